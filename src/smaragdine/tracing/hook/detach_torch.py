"""Has Kineto leave CUPTI when it stops, and sees to it that it has.

It would stay attached, and every launch after it slower (steps by 30 % on an H200). Told by a variable of the
environment, it starts a thread that waits for the next call of CUDA's runtime, at whose end CUPTI is left.
A process that ends while it waits, waits for it forever, and a call in the next session would take that one's
records: so we call CUDA ourselves before either.
"""

import os
import threading
import time

import torch

_TOLD = "TEARDOWN_CUPTI"
_TASKS = "/proc/self/task"
_LONGEST_S = 2.0  # by then the program has called CUDA: what is left is a thread of its own
_PAUSE_S = 0.0005

_telling = False
_program_ends = False
_leaving = frozenset()  # threads that began while Kineto stopped: its own, and perhaps others
_until_s = 0.0


def asked():
    """Before Kineto stops: a function to call when it has. A process that ends has no use for it, and before
    CUDA 12.6 programs with CUDA graphs might crash."""
    global _telling
    version = torch.version.cuda or "0"
    if [int(part) for part in version.split(".")[:2]] < [12, 6] or _TOLD in os.environ or _program_ends:
        return int
    before = _threads()
    os.environ[_TOLD] = "1"
    _telling = True

    def stopped():
        global _leaving, _until_s
        _take_back()
        _leaving, _until_s = _threads() - before - _pythons(), time.monotonic() + _LONGEST_S

    return stopped


def program_ends():
    """A session that is about to stop stays attached."""
    global _program_ends
    _program_ends = True
    _take_back()


def may_begin(most_s):
    """Whether CUPTI has been left, and another session may begin. If not, CUDA is called for so long."""
    return _left_by(min(time.monotonic() + most_s, _until_s)) or time.monotonic() >= _until_s


def leave(most_s):
    """At the program's end, whenever it was that Kineto stopped."""
    _left_by(time.monotonic() + most_s)


def _left_by(until_s):
    global _leaving
    while True:
        _leaving &= _threads()
        if not _leaving:
            return True
        try:
            if torch.cuda.is_initialized():
                torch.cuda.cudart().cudaMemGetInfo(torch.cuda.current_device())
        except Exception:
            pass  # a call that fails is an occasion, too
        if time.monotonic() >= until_s:
            return False
        time.sleep(_PAUSE_S)


def _take_back():
    global _telling
    if _telling:
        _telling = False
        os.environ.pop(_TOLD, None)


def _pythons():
    """Threads of the program's that Python knows: a DataLoader's, say."""
    return {str(thread.native_id) for thread in list(threading._active.values())}


def _threads():
    try:
        return frozenset(os.listdir(_TASKS))
    except OSError:
        return frozenset()
