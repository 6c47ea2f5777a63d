"""Wake up on time on a busy machine, as far as the user is allowed to."""

from __future__ import annotations

import ctypes
import os
import threading

_PR_SET_TIMERSLACK = 29


def prioritise_thread(realtime: bool) -> str:
    """Ask for exact timers and an early turn for the calling thread; say what was granted.

    With every core busy an ordinary thread wakes up to 4 ms late, a real-time one 0.04 ms.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    if realtime:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
            return "SCHED_FIFO"
        except OSError:
            pass
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        return "nice -10"
    except OSError:
        return "normal"
