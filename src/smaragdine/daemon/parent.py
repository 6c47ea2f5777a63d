"""The process the operator starts: it stays root, and does next to nothing.

It forks the daemon, which gives up its privileges once its sensors are open. From then on the parent

  opens energy counters for the daemon after a driver was reloaded, and no other files;
  starts the keeper of limits for it, a fixed command;
  passes signals on, and ends with it, after the keeper has put every limit back.

The daemon asks over a socket that no other process has. A question is one packet, a line of JSON as anywhere
(messages.py): {"id": 7, "open": path} or {"id": 7, "start": helper}. The answer is {"id": 7, "errno": 0}.
It is a socket and not a pipe, because only a socket carries the descriptors that come with an answer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from smaragdine import privilege
from smaragdine.errors import UserError
from smaragdine.messages import Message, decode, encode
from smaragdine.system import end_with_parent

# Which files the privileged parent opens for the daemon: energy counters, and nothing posing as one.

ALLOWED_NAMES = frozenset({"energy_uj", "max_energy_range_uj"})
SYSFS_ROOT = Path("/sys/class/powercap")
SYSFS_REAL_ROOT = Path("/sys/devices/virtual/powercap")


def allowed_file(path: str, roots: Sequence[Path], trees: Sequence[Path]) -> int:
    """Open an energy counter that is named below one of `roots` and lies in one of `trees`. Else raises
    OSError.

    We look at the file before we open it, and open what we looked at: a link that changes in between, a pipe
    or a device leads nowhere.
    """
    asked = Path(path)
    named = asked.name in ALLOWED_NAMES and ".." not in asked.parts
    if not named or not any(asked.is_relative_to(root) for root in roots):
        raise OSError(errno.EPERM, "not an energy counter", path)
    place = os.open(asked, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(place)
        real = Path(os.readlink(f"/proc/self/fd/{place}"))
        inside = any(real.is_relative_to(tree) for tree in trees)
        if not inside or real.name != asked.name or not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise OSError(errno.EPERM, "not an energy counter", path)
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)


def real_trees(roots: Sequence[Path]) -> list[Path]:
    """Where files below these roots really lie: sysfs' class folders hold only links."""
    trees: list[Path] = []
    for root in roots:
        trees.append(Path(os.path.realpath(root)))
        if trees[-1] == SYSFS_ROOT:
            # Even where there is no zone yet.
            trees.append(SYSFS_REAL_ROOT)
        with contextlib.suppress(OSError):
            trees += [Path(os.path.realpath(entry)) for entry in root.iterdir() if entry.is_symlink()]
    return trees


# The parent keeps these: to pass a signal on to another user's process, and for the keeper to set limits.
KEEPER = "keeper"  # the helper that sets limits
PARENT_CAPABILITIES = frozenset({"CAP_KILL", "CAP_SYS_ADMIN"})

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_PACKET_BYTES = 4096
_HELPERS_END_WITHIN_S = 10.0
_MOST_HELPERS = 4  # one works and one may be ending; a daemon gone mad gets no more

Prepared = TypeVar("Prepared")


class Parent:
    """The daemon's side: what it may still ask its parent for. Any thread may call."""

    def __init__(self, connection: socket.socket, timeout_s: float = 5.0) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._number = 0

    def open_file(self, path: Path | str) -> int:
        """A descriptor for reading an energy counter. Raises OSError as `os.open` would."""
        return self._ask("open", os.fspath(path), 1)[0]

    def start(self, helper: str) -> tuple[int, int]:
        """Start a helper by its name. Returns descriptors to read its output and to write its input."""
        read_fd, write_fd = self._ask("start", helper, 2)
        return read_fd, write_fd

    def _ask(self, verb: str, what: str, fds: int) -> list[int]:
        with self._lock:
            self._number += 1
            request = encode({"id": self._number, verb: what})
            if len(request) > _PACKET_BYTES:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), what)
            try:
                code, received = self._exchange(request)
            except TimeoutError:
                raise OSError(errno.ETIMEDOUT, "the privileged parent does not answer", what) from None
        if code or len(received) != fds:
            _close(received)
            raise OSError(code or errno.EMFILE, os.strerror(code or errno.EMFILE), what)
        return received

    def _exchange(self, request: bytes) -> tuple[int, list[int]]:
        deadline_s = time.monotonic() + self._timeout_s
        self._connection.settimeout(self._timeout_s)
        self._connection.send(request)
        while True:
            self._connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            data, received, _, _ = socket.recv_fds(self._connection, _PACKET_BYTES, 2)
            for fd in received:
                os.set_inheritable(fd, False)
            answer = decode(data)
            if not answer:
                return errno.EPIPE, received
            if answer["id"] == self._number:
                return answer["errno"], received
            # A late answer to a question that we gave up.
            _close(received)


def run_unprivileged(
    prepare: Callable[[], Prepared],
    serve: Callable[[Prepared, Parent], int],
    *,
    user: str | None = None,
    keep: frozenset[str] = frozenset(),
    counters: Sequence[Path] = (SYSFS_ROOT,),
    helpers: Mapping[str, Sequence[str]] | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> int:
    """Fork. The child calls `prepare` as root (to open sensors, to bind sockets), gives up every privilege,
    and calls `serve`.

    The parent stays, to reopen files below `counters` and to start `helpers`. It returns the child's exit
    code, 128 + N after signal N. Call it before there are threads.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Hold signals back until we know the child, so that none is lost in between.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _child(prepare, serve, user, keep, Parent(theirs), parent_pid, before, say)
    theirs.close()
    try:
        return _Loop(pid, ours, counters, helpers or {}, before).run()
    finally:
        ours.close()


def _child(
    prepare: Callable[[], Prepared],
    serve: Callable[[Prepared, Parent], int],
    user: str | None,
    keep: frozenset[str],
    parent: Parent,
    parent_pid: int,
    mask: Iterable[int],
    say: Callable[[str], None],
) -> NoReturn:
    """Never returns: the caller's stack belongs to the parent."""
    code = 70
    try:
        # A terminal's Ctrl-C then comes once, through the parent. And this process must not keep root's
        # terminal, into which it could type.
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        privilege.fence()
        prepared = prepare()
        say(privilege.drop(user, keep))
        # After the change of user, which would undo it.
        end_with_parent(parent_pid, signal.SIGTERM)
        code = serve(prepared, parent)
    except UserError as error:
        print(f"smaragdine: {error}", file=sys.stderr)
        code = 2
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class _Loop:
    """The parent's loop: answers requests, passes signals on, and waits for its children."""

    def __init__(
        self,
        child: int,
        connection: socket.socket,
        counters: Sequence[Path],
        helpers: Mapping[str, Sequence[str]],
        mask: Iterable[int],
    ) -> None:
        self._child = child
        self._connection: socket.socket | None = connection
        self._trees = real_trees(counters)
        self._roots = [Path(os.path.abspath(root)) for root in counters]
        self._commands = helpers
        self._mask = mask
        self._helpers: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        with _signal_pipe(self._mask) as signals:
            if os.geteuid() == 0:
                privilege.bound(PARENT_CAPABILITIES)
            while True:
                watched: list[int | socket.socket] = [signals]
                if self._connection is not None:
                    watched.append(self._connection)
                ready, _, _ = select.select(watched, [], [], 1.0)
                if signals in ready:
                    self._pass_on(os.read(signals, 64))
                if self._connection in ready:
                    self._answer()
                code = self._ended()
                if code is not None:
                    self._wait_for_helpers()
                    return code

    def _pass_on(self, numbers: bytes) -> None:
        for number in numbers:
            if number != signal.SIGCHLD:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self._child, number)

    def _ended(self) -> int | None:
        for helper in self._helpers:
            helper.poll()
        pid, status = os.waitpid(self._child, os.WNOHANG)
        if pid == 0:
            return None
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _wait_for_helpers(self) -> None:
        # Their input ended with the daemon. That tells them to put everything back.
        deadline_s = time.monotonic() + _HELPERS_END_WITHIN_S
        for helper in self._helpers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                helper.wait(max(0.0, deadline_s - time.monotonic()))

    def _answer(self) -> None:
        assert self._connection is not None
        try:
            request = decode(self._connection.recv(_PACKET_BYTES))
        except OSError:
            request = {}
        if not request:
            self._connection.close()
            self._connection = None
            return
        fds: list[int] = []
        code = 0
        try:
            fds = self._do(request)
        except OSError as error:
            code = error.errno or errno.EIO
        except Exception:
            code = errno.EINVAL
        with contextlib.suppress(OSError):
            # Do not wait for a daemon that does not read: signals would have to wait too.
            answer = encode({"id": request.get("id"), "errno": code})
            socket.send_fds(self._connection, [answer], fds, socket.MSG_DONTWAIT)
        _close(fds)

    def _do(self, request: Message) -> list[int]:
        path, helper = request.get("open"), request.get("start")
        if isinstance(path, str):
            return [allowed_file(path, self._roots, self._trees)]
        if isinstance(helper, str) and helper in self._commands:
            return self._start(self._commands[helper])
        raise OSError(errno.EPERM, "not allowed")

    def _start(self, command: Sequence[str]) -> list[int]:
        self._helpers = [helper for helper in self._helpers if helper.poll() is None]
        if len(self._helpers) >= _MOST_HELPERS:
            raise OSError(errno.EAGAIN, "so many are running")
        read_fd, their_output = os.pipe()
        their_input, write_fd = os.pipe()
        try:
            # In a session of its own, a terminal's Ctrl-C does not reach it.
            self._helpers.append(
                subprocess.Popen(command, stdin=their_input, stdout=their_output, start_new_session=True)
            )
        except BaseException:
            os.close(read_fd)
            os.close(write_fd)
            raise
        finally:
            os.close(their_input)
            os.close(their_output)
        # Only the daemon will hold these, so they close when it ends, however it ends.
        return [read_fd, write_fd]


@contextlib.contextmanager
def _signal_pipe(mask: Iterable[int]) -> Iterator[int]:
    """A descriptor that gives a byte for each signal, its number."""
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    handlers = {number: signal.signal(number, _nothing) for number in (*_SIGNALS, signal.SIGCHLD)}
    before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield read_fd
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(read_fd)
        os.close(write_fd)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _nothing(number: int, frame: object) -> None:
    pass
