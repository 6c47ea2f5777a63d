"""Was a signal sent to us alone, or to our whole process group?

A tiny process of the same group that does nothing but say which signals it got: if it got one too, so did
the program, and passing it on would deliver it twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from types import TracebackType

_PR_SET_PDEATHSIG = 1


class Canary:
    """`fd` gives one byte, its number, per signal that reached the group."""

    def __init__(self, numbers: tuple[signal.Signals, ...]) -> None:
        # Loaded here: the child is a fork and should only make system calls.
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        self.fd, write_fd = os.pipe()
        parent_pid = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                for number in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
                    signal.signal(number, signal.SIG_IGN)
                while os.getppid() == parent_pid:
                    os.write(write_fd, bytes([signal.sigwait(numbers)]))
            finally:
                os._exit(0)
        os.close(write_fd)
        os.set_blocking(self.fd, False)

    def take(self) -> bytes:
        try:
            return os.read(self.fd, 256)
        except BlockingIOError:
            return b""

    def __enter__(self) -> Canary:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self.fd)
