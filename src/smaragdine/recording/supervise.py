"""Run a program as if we were not there, and record it.

The program is a direct child with our standard streams, working directory, process group and inherited
files. Signals are the delicate part: one sent to the whole group (Ctrl-C, a batch system) has reached the
program already, one sent to us alone has not and must be passed on. The canary tells which it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from smaragdine.errors import NOT_RUN, UserError
from smaragdine.files import last_printed
from smaragdine.recording.command import Command
from smaragdine.recording.recorder import GROUP_SIGNALS, RecorderConfig
from smaragdine.system import end_with_parent, readable

# The other end of the recorder's lines: start it, tell it what to watch, hear what it has to say.


class RecorderClient:
    """A running recorder process. Its death is a fact to report, never an exception."""

    def __init__(self, config: RecorderConfig, environment: Mapping[str, str]) -> None:
        self.config = config
        self.ready: dict[str, Any] | None = None
        self.done: dict[str, Any] | None = None
        self.feeds: list[dict[str, Any]] = []
        self._text = b""
        log = os.open(
            f"{config.folder}/recorder.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        # -P: a file named numpy.py beside the user's script must not be imported by us.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "smaragdine.recording.recorder", json.dumps(asdict(config))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=dict(environment),
        )
        os.close(log)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin_fd = self._process.stdin.fileno()
        self.fd = self._process.stdout.fileno()
        self.ended = False

    def take(self) -> None:
        """Read what is there; call when `fd` is readable."""
        chunk = os.read(self.fd, 1 << 16)
        if not chunk:
            self.ended = True
            self._process.wait()
            return
        *lines, self._text = (self._text + chunk).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                self._note(json.loads(line))

    def _note(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.ready = message["ready"]
        elif "done" in message:
            self.done = message["done"]
        elif "feed" in message:
            self.feeds.append(message["feed"])

    def wait_ready(self, timeout_s: float) -> bool:
        return self._wait(lambda: self.ready is not None, timeout_s)

    def watch(self, pid: int, include_past: bool, marker: str) -> None:
        self._tell(f"watch {pid} {int(include_past)} {marker}\n")

    def stop(self, timeout_s: float) -> None:
        """Ask it to finish, wait, and end it if it hangs in a driver: the run must come to its end."""
        self._tell("stop\n")
        if not self._wait(lambda: False, timeout_s) and not self.ended:
            self._process.kill()
            self._process.wait()
            self.ended = True
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def gone(self) -> bool:
        return self._process.poll() is not None

    def returncode(self) -> int | None:
        return self._process.returncode

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._stdin_fd, line.encode())

    def _wait(self, happened: Any, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not self.ended and not happened():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            if readable([self.fd], left_s):
                self.take()
        return bool(happened())


# Signals: every one reaches the program exactly once, whomever it was sent to.
#
# Was it sent to us alone, or to our whole process group? The canary is a tiny process of the same group that
# does nothing but say which signals it got: if it got one too, so did the program, and passing it on would
# deliver it twice.

_CANARY_WAIT_S = 0.15
_CANARY_LATE_S = 2.0  # on a busy machine
_MOST_CANARIES = 4


class Canary:
    """`fds` (one or none) gives one byte, its number, per signal that reached the group. One that is killed
    is replaced, a few times."""

    def __init__(self, numbers: Collection[int]) -> None:
        self._numbers = numbers
        self._left = _MOST_CANARIES
        self.fds: list[int] = []
        self._start()

    def _start(self) -> None:
        self._left -= 1
        numbers = self._numbers
        fd, write_fd = os.pipe()
        parent_pid = os.getpid()
        # Held back before the fork: our own handlers, in the child, would tell us of a signal once more.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                end_with_parent()
                for number in (signal.SIGTTIN, signal.SIGTTOU):
                    signal.signal(number, signal.SIG_IGN)
                while os.getppid() == parent_pid:
                    os.write(write_fd, bytes([signal.sigwait(numbers)]))
            finally:
                os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(write_fd)
        os.set_blocking(fd, False)
        self.fds = [fd]

    def take(self) -> bytes:
        try:
            said = b"".join(os.read(fd, 256) for fd in self.fds)
        except BlockingIOError:
            return b""
        if not said and self.fds:
            self._end()
            if self._left:
                self._start()
        return said

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        while self.fds:
            os.close(self.fds.pop())

    def __enter__(self) -> Canary:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()


class Signals:
    """Which signals came to us, and which of them the program still has to be told of."""

    def __init__(self, canary: Canary) -> None:
        self.canary = canary
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._old: dict[int, Any] = {}
        for number in GROUP_SIGNALS:
            # What the caller ignores (nohup) the program must go on ignoring.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, lambda *_: None)
        # Ignored, the kernel would reap the program and its exit code with it.
        self._child_ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        self._old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._alone: list[tuple[int, float]] = []
        self._shared: list[tuple[int, float]] = []
        self._early: list[tuple[int, float]] = []

    @contextlib.contextmanager
    def starting(self) -> Iterator[Callable[[], None]]:
        """Around the program's start: signals wait. Yields what the child does before it becomes the program.

        What came before the program was there it cannot have got, whoever it was sent to.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._old.keys())
        self._early_ones(list(self.canary.take()))

        def in_child() -> None:
            # Handled signals are the default in the program; until it is that, ours must not swallow one.
            for number in self._old:
                signal.signal(number, signal.SIG_DFL)
            if self._child_ignored:
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        try:
            yield in_child
        finally:
            # Signals that wait now may have come before the program was there, too.
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._early_ones([])

    def _early_ones(self, reported: list[int]) -> None:
        """The program has to be told of all that came until now, also of what the canary got or, being slow,
        still reports."""
        known = len(self._alone)
        self._take(0.0)
        self._shared.clear()
        late_s = time.monotonic() + _CANARY_LATE_S
        for number, _ in self._alone[known:]:
            if number in reported:
                reported.remove(number)
            else:
                self._early.append((number, late_s))

    def take(self) -> None:
        now_s = time.monotonic()
        self._early = [(n, s) for n, s in self._early if s > now_s]
        for number in self.canary.take():
            if _drop(self._early, number):
                continue
            if _drop(self._alone, number):
                self._obey(number)
            else:
                self._shared.append((number, time.monotonic() + _CANARY_WAIT_S))
        self._take(_CANARY_WAIT_S)

    def _take(self, wait_s: float) -> None:
        try:
            numbers = os.read(self.fd, 256)
        except BlockingIOError:
            return
        now_s = time.monotonic()
        self._shared = [(n, s) for n, s in self._shared if s > now_s]
        for number in numbers:
            if number == signal.SIGCHLD or number not in self._old:
                continue
            if _drop(self._shared, number):
                self._obey(number)
            else:
                self._alone.append((number, now_s + wait_s))

    def _obey(self, number: int) -> None:
        """What a signal to the group means for ourselves."""
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def pass_on(self, pid: int) -> None:
        """Tell the program of the signals that reached nobody but us."""
        for number in self._due():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            self._obey(number)

    def _due(self) -> list[int]:
        now_s = time.monotonic()
        due = [number for number, deadline_s in self._alone if deadline_s <= now_s]
        self._alone = [(number, s) for number, s in self._alone if s > now_s]
        return due

    def timeout_s(self) -> float | None:
        if not self._alone:
            return None
        return max(0.0, min(s for _, s in self._alone) - time.monotonic())

    def restore(self) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write_fd)


def _drop(entries: list[tuple[int, float]], number: int) -> bool:
    for entry in entries:
        if entry[0] == number:
            entries.remove(entry)
            return True
    return False


_MOST_RESTARTS = 3
_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0


@dataclass
class Supervision:
    """What came of it. `returncode` as subprocess has it: negative is the signal the program died of."""

    returncode: int = 0
    begin_ns: int = 0
    end_ns: int = 0
    program_cpu_s: float = 0.0
    ready: dict[str, Any] | None = None
    figures: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    deaths_ns: list[int] = field(default_factory=lambda: list[int]())  # of the monitor


class Recorders:
    """The recorder and, should it die, its successors."""

    def __init__(self, config: RecorderConfig, environment: Mapping[str, str], outcome: Supervision) -> None:
        self._config = config
        self._environment = environment
        self._outcome = outcome
        self._watching: tuple[int, bool, str] | None = None
        self.client: RecorderClient | None = self._start(config)
        if self.client is not None and not self.client.wait_ready(_READY_TIMEOUT_S):
            self._bury("did not start")
        if self.client is not None:
            outcome.ready = self.client.ready

    def watch(self, pid: int, include_past: bool, marker: str) -> None:
        self._watching = (pid, include_past, marker)
        if self.client is not None:
            self.client.watch(pid, include_past, marker)

    def take(self) -> None:
        """Hear the recorder; if it is dead, start another one, a few times."""
        client = self.client
        if client is None:
            return
        client.take()
        if not client.ended:
            return
        if client.done is not None:
            # It saw the program's end before we did.
            self._outcome.figures.append(client.done)
            self.client = None
            return
        self._bury("died")
        if client.config.segment < _MOST_RESTARTS and self._watching is not None:
            self.client = self._start(dataclasses.replace(self._config, segment=client.config.segment + 1))
            if self.client is not None:
                # What the program spent while nobody looked is not this segment's.
                self.client.watch(self._watching[0], False, self._watching[2])

    def stop(self) -> None:
        client = self.client
        if client is None:
            return
        gone = client.gone()
        client.stop(_STOP_TIMEOUT_S)
        if client.done is not None:
            self._outcome.figures.append(client.done)
        elif gone:
            # Nobody heard it die: a block of the program's own has no supervisor.
            self._bury("died")
        else:
            self._outcome.problems.append("the monitor did not finish: the last second may be missing")
        self.client = None

    def _start(self, config: RecorderConfig) -> RecorderClient | None:
        try:
            return RecorderClient(config, self._environment)
        except OSError as error:
            self._outcome.problems.append(f"the monitor could not be started: {error}")
            return None

    def _bury(self, how: str) -> None:
        assert self.client is not None
        if not self.client.ended:
            self.client.stop(0)
        self._outcome.deaths_ns.append(time.time_ns())
        code = self.client.returncode()
        reason = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        last = last_printed(Path(self._config.folder) / "recorder.log")
        self._outcome.problems.append(f"the monitor {how} ({reason}){': ' + last if last else ''}")
        self.client = None


def supervise(
    command: Command,
    config: RecorderConfig,
    environment: Mapping[str, str],
    program_environment: Mapping[str, str],
    marker: str,
    on_start: Callable[[Supervision], None],
    on_feed: Callable[[dict[str, Any]], None] | None = None,
) -> Supervision:
    """Record one program from its first instruction to its end.

    `on_start` is called when the sensors are known and the program is about to begin. Raises `UserError`
    when the program cannot be started at all.
    """
    outcome = Supervision()
    with Canary(GROUP_SIGNALS) as canary:
        signals = Signals(canary)
        recorders = Recorders(config, environment, outcome)
        try:
            outcome.begin_ns = time.time_ns()
            on_start(outcome)
            with signals.starting() as in_child:
                program = _start(command, program_environment, in_child)
            recorders.watch(program.pid, True, marker)
            _until_end(program, outcome, recorders, signals, on_feed)
        finally:
            recorders.stop()
            signals.restore()
    return outcome


def dying_with_us(in_child: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """What a child does before it becomes the program: whoever kills us with -9 meant the program too, which
    would otherwise go on unseen."""
    parent_pid = os.getpid()

    def prepare() -> None:
        end_with_parent()
        if os.getppid() != parent_pid:
            os._exit(128 + signal.SIGKILL)
        in_child()

    return prepare


def _start(
    command: Command, environment: Mapping[str, str], in_child: Callable[[], None]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command.argv,
            executable=command.executable,
            env=dict(environment),
            close_fds=False,  # files the caller opened for the program stay open; ours are close-on-exec
            preexec_fn=dying_with_us(in_child),
        )
    except OSError as error:
        raise UserError(
            f"cannot run {command.argv[0]}",
            error.strerror or str(error),
            "Is it a program for this machine, with a valid #! line?",
            NOT_RUN,
        ) from None


def _until_end(
    program: subprocess.Popen[bytes],
    outcome: Supervision,
    recorders: Recorders,
    signals: Signals,
    on_feed: Callable[[dict[str, Any]], None] | None,
) -> None:
    while True:
        # Not Popen.poll: this also tells the exact CPU time of the program and all it waited for.
        pid, status, usage = os.wait4(program.pid, os.WNOHANG)
        if pid:
            outcome.end_ns = time.time_ns()
            outcome.program_cpu_s = usage.ru_utime + usage.ru_stime
            outcome.returncode = program.returncode = os.waitstatus_to_exitcode(status)
            return
        client = recorders.client
        fds = [signals.fd, *signals.canary.fds, *([client.fd] if client is not None else [])]
        ready = readable(fds, signals.timeout_s())
        if client is not None and client.fd in ready:
            recorders.take()
            feeds, client.feeds = client.feeds, []
            if on_feed is not None:
                # A display that fails is no reason to end the program.
                with contextlib.suppress(Exception):
                    for feed in feeds:
                        on_feed(feed)
        signals.take()
        signals.pass_on(program.pid)
