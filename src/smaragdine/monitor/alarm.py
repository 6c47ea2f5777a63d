"""A periodic timer: one system call a wake-up, half the cost of computing and sleeping each delay."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct

_CLOCK_MONOTONIC = 1
_TFD_CLOEXEC = 0o2000000
_TFD_TIMER_ABSTIME = 1


class Alarm:
    """Wakes the calling thread on a grid of `period_ns`.

    Raises OSError where the kernel has no timerfd.
    """

    def __init__(self, period_ns: int) -> None:
        self._period_ns = period_ns
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._grid_ns: int | None = None

    def wait_until(self, due_ns: int) -> None:
        """Block until the monotonic clock shows `due_ns`, or somewhat earlier when ticks were missed."""
        if self._grid_ns is None or (due_ns - self._grid_ns) % self._period_ns:
            self._set(due_ns)
        os.read(self._fd, 8)

    def _set(self, due_ns: int) -> None:
        self._grid_ns = due_ns
        every = divmod(self._period_ns, 1_000_000_000)
        first = divmod(due_ns, 1_000_000_000)
        spec = struct.pack("4q", *every, *first)
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, spec, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
