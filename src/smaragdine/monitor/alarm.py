"""A periodic timer: one system call a wake-up, half the cost of computing and sleeping each delay."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading

_CLOCK_MONOTONIC = 1
_TFD_CLOEXEC = 0o2000000
_TFD_TIMER_ABSTIME = 1


class Alarm:
    """Wakes the thread that waits on a grid of `period_ns`; `wake` does so at once, from any thread.

    Raises OSError where the kernel has no timerfd.
    """

    def __init__(self, period_ns: int) -> None:
        self._period_ns = period_ns
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._lock = threading.Lock()
        self._grid_ns: int | None = None
        self._woken = False

    def wait_until(self, due_ns: int) -> None:
        """Block until the monotonic clock shows `due_ns`, or somewhat earlier (missed ticks, `wake`)."""
        with self._lock:
            # The timer that `wake` set may just be replaced here by a later one.
            if self._woken:
                self._woken = False
                return
            if self._grid_ns is None or (due_ns - self._grid_ns) % self._period_ns:
                self._set(due_ns, self._period_ns)
                self._grid_ns = due_ns
        os.read(self._fd, 8)

    def wake(self, period_ns: int | None = None) -> None:
        """End the wait, or else the next one; from then on the grid is of the new period."""
        with self._lock:
            if self._fd < 0:
                return
            self._period_ns = period_ns or self._period_ns
            self._woken = True
            self._set(1, 0)
            self._grid_ns = None

    def _set(self, due_ns: int, period_ns: int) -> None:
        spec = struct.pack("4q", *divmod(period_ns, 1_000_000_000), *divmod(due_ns, 1_000_000_000))
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, spec, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            os.close(self._fd)
            self._fd = -1
