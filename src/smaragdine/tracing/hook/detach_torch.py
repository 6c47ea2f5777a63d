"""Has Kineto leave CUPTI when it stops, and sees to it that it has.

It would stay attached, and every launch after it slower (steps by 30 % on an H200). Told by a variable of the
environment, it starts a thread that waits for the next call of CUDA's runtime, at whose end CUPTI is left.
That must not be a call at the end of the process, which may never return then, nor one of the next session,
whose records it would take.
"""

import os
import time

import torch

from . import marks

_TOLD = "TEARDOWN_CUPTI"
_TASKS = "/proc/self/task"
_LONGEST_S = 2.0  # by then the program has called CUDA, or will not
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
        _leaving, _until_s = _threads() - before, time.monotonic() + _LONGEST_S

    return stopped


def program_ends():
    """A session that is about to stop stays attached."""
    global _program_ends
    _program_ends = True
    _take_back()


def has_left(most_s):
    """Whether CUPTI has been left, as far as one can see. If not, CUDA is called for so long."""
    global _leaving
    until_s = min(time.monotonic() + most_s, _until_s)
    while _leaving:
        _leaving &= _threads()
        if time.monotonic() >= until_s:
            break
        try:
            if torch.cuda.is_initialized():
                torch.cuda.cudart().cudaMemGetInfo(torch.cuda.current_device())
        except Exception as exception:
            marks.error("torch", exception)
            break
        time.sleep(_PAUSE_S)
    return not _leaving or time.monotonic() >= _until_s


def _take_back():
    global _telling
    if _telling:
        _telling = False
        os.environ.pop(_TOLD, None)


def _threads():
    try:
        return frozenset(os.listdir(_TASKS))
    except OSError:
        return frozenset()
