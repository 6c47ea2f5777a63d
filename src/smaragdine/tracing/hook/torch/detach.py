"""Has Kineto leave CUPTI when it stops, and sees to it that it has.

It would stay attached, and every launch after it slower (steps by 30 % on an H200). Told by a variable of the
environment, it starts a thread that waits for the next call of CUDA's runtime, at whose end CUPTI is left.
A process that ends while it waits, waits for it forever, and a call in the next session would take that one's
records: so we call CUDA ourselves before either. That thread is known by its name, which is that of the one
that started it.
"""

import contextlib
import ctypes
import os
import threading
import time

import torch

from ..state import process
from . import forks

_state = process.torch

_TOLD = "TEARDOWN_CUPTI"
_TASKS = "/proc/self/task"
_NAME, _SET_NAME = "kineto-leaves", 15
_NEXT_S, _END_S = 0.05, 1.0  # for how long CUDA is called, before the next session and at the program's end
_PAUSE_S = 0.0005


@contextlib.contextmanager
def leaving():
    """Around the call that stops Kineto."""
    if not torch.cuda.is_initialized():
        yield
        return
    _tell()
    name = _renamed(_NAME)
    try:
        yield
    finally:
        own = str(threading.get_native_id())
        _state.leaving = [thread for thread in _tasks() if thread != own and _name(thread) == _NAME]
        _state.patience_s = _NEXT_S
        _renamed(name)
        _take_back()


def program_ends():
    """A session that is about to stop stays attached: it is of no use any more."""
    _state.program_ends = True
    _take_back()


def has_left():
    """Whether CUPTI has been left, so that another session may begin. The program waits for it once only."""
    most_s, _state.patience_s = _state.patience_s, 0.0
    return _left_within(most_s)


def leave():
    """At the program's end."""
    if not _left_within(_END_S):
        forks.ending()()


def _left_within(most_s):
    until_s = time.monotonic() + most_s
    while True:
        _state.leaving = [thread for thread in _state.leaving if _name(thread) == _NAME]
        if not _state.leaving:
            return True
        try:
            torch.cuda.cudart().cudaMemGetInfo(torch.cuda.current_device())
        except Exception:
            pass  # a call that fails is an occasion, too
        if time.monotonic() >= until_s:
            return False
        time.sleep(_PAUSE_S)


def _tell():
    """Unless the program says what it wants. Before CUDA 12.6 programs with CUDA graphs might crash."""
    version = torch.version.cuda or "0"
    if [int(part) for part in version.split(".")[:2]] < [12, 6] or _TOLD in os.environ or _state.program_ends:
        return
    os.environ[_TOLD] = "1"
    _state.told_to_leave = True


def _take_back():
    if _state.told_to_leave:
        _state.told_to_leave = False
        if os.environ.get(_TOLD) == "1":  # else the program has set it since
            os.environ.pop(_TOLD, None)


def _renamed(name):
    """This thread; its former name."""
    former = _name(str(threading.get_native_id()))
    try:
        if name:
            ctypes.CDLL(None).prctl(_SET_NAME, name.encode(), 0, 0, 0)
    except (OSError, AttributeError):
        pass
    return former


def _name(thread):
    """None where it is no more."""
    try:
        with open("%s/%s/comm" % (_TASKS, thread)) as file:
            return file.read().rstrip("\n")
    except OSError:
        return None


def _tasks():
    try:
        return os.listdir(_TASKS)
    except OSError:
        return []
