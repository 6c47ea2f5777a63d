"""Has Kineto leave CUPTI, the GPU's profiling library, when it stops, and the process end without hanging.

Kineto would stay attached to CUPTI, and every launch after it would be slower (steps by 30 % on an H200). A
variable of the environment tells it to leave: it then starts a thread that waits for the next call of CUDA's
runtime, and leaves CUPTI at the end of that call. We find the thread by its name, which it takes from the one
that started it.

While that thread waits, two things must not happen. A new session must not begin, for the next call would
take its records. And the process must not end: Kineto's destructor destroys the condition that the thread
waits on, and waits for it forever. So before either we call CUDA ourselves.

A forked child has no such thread, but the wait is still noted in it, and it hangs at its end (torch 2.13). So
a child leaves by `_exit`: after Python has ended and the streams of C are written, but without destructors.
"""

import contextlib
import ctypes
import os
import threading
import time

import torch

from ..state import process

_TOLD = "TEARDOWN_CUPTI"
_TASKS = "/proc/self/task"
_NAME, _SET_NAME = "kineto-leaves", 15
_NEXT_S, _END_S = 0.05, 1.0  # for how long CUDA is called, before the next session and at the program's end
_PAUSE_S = 0.0005

_state = process.torch


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


def has_left():
    """Whether CUPTI has been left, so that another session may begin. The program waits for it only once."""
    most_s, _state.patience_s = _state.patience_s, 0.0
    return _left_within(most_s)


def program_ends():
    """A session that is about to stop stays attached: leaving is of no use any more."""
    _state.program_ends = True
    _take_back()


def leave():
    """At the program's end: wait until CUPTI has been left, or end without destructors."""
    if not _left_within(_END_S):
        _without_destructors()()


def watch_forks():
    """Children that this process forks from now on end without destructors."""
    os.register_at_fork(after_in_child=_without_destructors())


def _left_within(most_s):
    until_s = time.monotonic() + most_s
    while True:
        _state.leaving = [thread for thread in _state.leaving if _name(thread) == _NAME]
        if not _state.leaving:
            return True
        try:
            torch.cuda.cudart().cudaMemGetInfo(torch.cuda.current_device())
        except Exception:
            pass  # a call that fails is a call, too
        if time.monotonic() >= until_s:
            return False
        time.sleep(_PAUSE_S)


def _without_destructors():
    """A function after which this process, or the child that calls it, ends by `_exit`."""
    libc = ctypes.CDLL(None)
    leave, flush = (ctypes.cast(function, ctypes.c_void_p) for function in (libc._exit, libc.fflush))
    on_exit, at_exit = libc.on_exit, getattr(libc, "__cxa_atexit")

    def end():
        on_exit(leave, None)
        at_exit(flush, None, None)  # the last one registered is the first called

    return end


def _tell():
    """Unless the program has set the variable. Before CUDA 12.6, programs with CUDA graphs might crash."""
    version = torch.version.cuda or "0"
    old = [int(part) for part in version.split(".")[:2]] < [12, 6]
    if old or _TOLD in os.environ or _state.program_ends:
        return
    os.environ[_TOLD] = "1"
    _state.told_to_leave = True


def _take_back():
    if _state.told_to_leave:
        _state.told_to_leave = False
        if os.environ.get(_TOLD) == "1":  # else the program has set it since
            os.environ.pop(_TOLD, None)


def _renamed(name):
    """Names this thread; returns the name it had."""
    former = _name(str(threading.get_native_id()))
    try:
        if name:
            ctypes.CDLL(None).prctl(_SET_NAME, name.encode(), 0, 0, 0)
    except (OSError, AttributeError):
        pass
    return former


def _name(thread):
    """None where the thread has ended."""
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
