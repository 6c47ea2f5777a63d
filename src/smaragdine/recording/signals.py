"""Signals: every one reaches the program exactly once, whomever it was sent to.

Was it sent to us alone, or to our whole process group? The canary is a tiny process of the same group that
does nothing but say which signals it got: if it got one too, so did the program, and passing it on would
deliver it twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Any

from smaragdine.recording.recorder_config import GROUP_SIGNALS

_PR_SET_PDEATHSIG = 1
_CANARY_WAIT_S = 0.15
_MOST_CANARIES = 4


class Canary:
    """`fds` (one or none) gives one byte, its number, per signal that reached the group. One that is killed
    is replaced, a few times."""

    def __init__(self, numbers: Collection[int]) -> None:
        self._numbers = numbers
        # Loaded here: the child is a fork and should only make system calls.
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._left = _MOST_CANARIES
        self.fds: list[int] = []
        self._start()

    def _start(self) -> None:
        self._left -= 1
        numbers, prctl = self._numbers, self._prctl
        fd, write_fd = os.pipe()
        parent_pid = os.getpid()
        # Held back before the fork: our own handlers, in the child, would tell us of a signal once more.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
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

    @contextlib.contextmanager
    def starting(self) -> Iterator[Callable[[], None]]:
        """Around the program's start: signals wait. Yields what the child does before it becomes the program.

        What came before the program was there it cannot have got, whoever it was sent to.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._old.keys())
        self.canary.take()
        self._take(0.0)
        self._shared.clear()

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
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def take(self) -> None:
        for number in self.canary.take():
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
