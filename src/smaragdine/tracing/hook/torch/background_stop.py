"""Stops PyTorch's profiler on a background thread, without holding the interpreter's lock.

To stop, Kineto turns all its records into a trace and writes it: 13 µs for each, seconds for a few steps on a
GPU. PyTorch's own function holds the interpreter's lock all the while. The function of its library does not
when we call it by ctypes. Its mangled name says what it takes; where a name is missing, PyTorch's own
function is used.

A thread that ends an operator writes a record. While the records are turned into a trace that crashes, in
PyTorch's own function too. So the profiler first stops listening, with the lock held. We stop it when every
other thread has left the operator it may have been in, or has been in it for so long that it writes nothing
now. An operator that ends after the profiler has stopped writes no record, unless the next profiler has
begun: it would write to where its record once was. So none begins while a thread may be in such an operator.
"""

import _thread
import ctypes
import gc
import os
import platform
import sys
import threading
import time

import torch

from .. import marks
from ..state import process
from . import conflicts, detach

_state = process.torch

_STOP = "_ZN5torch8autograd8profiler15disableProfilerEv"
_RESULT = "_ZN5torch8autograd8profiler14ProfilerResult"
_SAVE = _RESULT + "4saveERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_DESTROY = _RESULT + "D1Ev"
_DELETE = "_ZdlPv"
_STATE = "_ZN5torch8profiler4impl17ProfilerStateBase"
_RUNNING, _UNHEAR = _STATE + "3getEb", _STATE + "14removeCallbackEv"

# What Kineto has CUPTI record: launches by runtime and driver, kernels, copies, sets, which launch they come
# from, waiting, and CUPTI's own overhead.
_CUPTI_KINDS = (5, 4, 10, 1, 2, 39, 38, 17)

_PYTHON = os.path.dirname(threading.__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep  # the hook
# Threads stay in the loops there for good; what those call ends.
_LOOPS = tuple(
    os.path.join(_TORCH, *folder) + os.sep for folder in (("utils", "data"), ("_inductor", "compile_worker"))
)
_GRACE_S = 0.02  # for records that threads without Python are writing
_PATIENCE_S = 1.0  # for operators of other threads to end
_ASLEEP = 0.1  # of the time: a thread at work runs for more than that

_COLLECTS_ANYWHERE = sys.version_info < (3, 12)  # since then garbage is collected between instructions only


class _String(ctypes.Structure):
    # A std::string: where its text is, how long it is, and room for a short one.
    _fields_ = [("text", ctypes.c_void_p), ("size", ctypes.c_size_t), ("room", ctypes.c_size_t * 2)]


def possible():
    return bool(_functions())


def _functions():
    if _state.functions is None:
        _state.functions = _look() or False
    return _state.functions


def _look():
    # How a function returns an object differs between processors.
    if platform.machine() != "x86_64":
        return None
    try:
        path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
        library, locked = ctypes.CDLL(path), ctypes.PyDLL(path)
        found = [getattr(library, name) for name in (_STOP, _SAVE, _DESTROY, _DELETE)]
        found += [getattr(locked, name) for name in (_RUNNING, _UNHEAR)]
    except (OSError, AttributeError):
        return None
    for function in found:
        function.restype = None
        function.argtypes = [ctypes.c_void_p]
    found[1].argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    found[4].restype, found[4].argtypes = ctypes.c_void_p, [ctypes.c_bool]
    return found


def unhear():
    """Has the profiler of all threads listen no more. Returns whether there is one."""
    state = _functions()[4](True)
    if state:
        _functions()[5](state)
    return bool(state)


def silence():
    """Has the profiler of all threads listen no more. Returns the threads that may be in an operator whose
    beginning it has recorded, or None where there is no such profiler."""
    if not unhear():
        return None
    own = threading.get_ident()
    return {
        ident: (stack[0][:2], _calling(stack), _worked(ident))
        for ident, stack in _stacks().items()
        if ident != own and not _waits(stack)
    }


def leave_gpu():
    """Records nothing more of the GPUs, once they have done their work. Kineto would stop that only after it
    has put all records of operators in order, and till then a launch takes as long as in a traced step.
    PyTorch's own switch for it prints a warning."""
    conflicts.wait_for_gpu()
    try:
        with open("/proc/self/maps") as file:
            loaded = {line.split()[-1] for line in file if "/libcupti.so" in line}
        for path in loaded:
            disable = ctypes.CDLL(path).cuptiActivityDisable
            for kind in _CUPTI_KINDS:
                disable(kind)
    except (OSError, AttributeError) as exception:
        marks.error("torch", exception)


def _stacks():
    """Where each thread is: its frames from the innermost on, as (id, instruction, file). A reference to a
    frame would keep the program's tensors.

    Python makes the object of a frame when it is asked for. Before 3.12 that may collect garbage, and
    collecting lets other threads run on: the frame may be gone before its object is made, and the process
    crashes.
    """
    with _state.looking:
        collects = _COLLECTS_ANYWHERE and gc.isenabled()
        if collects:
            gc.disable()
        try:
            return {ident: _stack(frame) for ident, frame in sys._current_frames().items()}
        finally:
            if collects:
                gc.enable()


def before_fork():
    """Lets nobody look at threads while the process forks. The child would find the lock held by a thread
    that it does not have, and garbage collection switched off."""
    _state.looking.acquire()


def after_fork():
    """In both processes."""
    _state.looking.release()


def _stack(frame):
    found = []
    while frame is not None:
        found.append((id(frame), frame.f_lasti, frame.f_code.co_filename))
        frame = frame.f_back
    return found


def _waits(stack):
    # A thread that waits for work is in a function of Python's own library. It is in no operator there, nor
    # in a function of ours, unless an operator of PyTorch has called back.
    path = stack[0][2]
    elsewhere = path.startswith(_OURS) or (path.startswith(_PYTHON) and "site-packages" not in path)
    return elsewhere and not _calling(stack)


def _calling(stack):
    """Those of its frames that are calls of PyTorch."""
    return {frame for frame, _, path in stack if path.startswith(_TORCH) and not path.startswith(_LOOPS)}


def _worked(ident):
    """(now, how long the thread has run or waited to), in ns; None where the kernel does not tell."""
    try:
        with open("/proc/self/task/%d/schedstat" % threading._active[ident].native_id) as file:
            running, ready = [int(part) for part in file.read().split()[:2]]
        return (time.monotonic_ns(), running + ready) if running else None
    except (KeyError, OSError, ValueError):
        return None


def _sleeps(ident, before):
    """Whether the thread has hardly run since: it waits for something, or sleeps in a loop."""
    now = _worked(ident)
    if before is None or now is None or now[0] - before[0] < _PATIENCE_S * 5e8:
        return False
    return now[1] - before[1] < _ASLEEP * (now[0] - before[0])


def left(inside):
    """Takes threads that have gone on out of `inside`: whatever they are in now, the profiler has not
    recorded its beginning. Returns whether none is left."""
    stacks = _stacks()
    for ident, (last, calling, worked) in list(inside.items()):
        stack = stacks.get(ident, [])
        # What it was in may have called back: then it is further down the stack.
        there = any(each[:2] == last for each in stack) or calling & _calling(stack)
        if not there or (not calling and _sleeps(ident, worked)):
            del inside[ident]
    return not inside


def drain(inside):
    """Waits until these threads write no record of what they were in."""
    time.sleep(_GRACE_S)
    deadline_s, pause_s = time.monotonic() + _PATIENCE_S, 0.0005
    while not left(inside) and time.monotonic() < deadline_s:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)


def _stop_and_save(path):
    stop, save, destroy, delete = _functions()[:4]
    result = (ctypes.c_void_p * 8)()  # only the first is used
    with detach.leaving():
        stop(result)
    text = os.fsencode(path)
    kept = ctypes.create_string_buffer(text)
    save(result[0], ctypes.byref(_String(ctypes.addressof(kept), len(text), (len(text), 0))))
    destroy(result[0])
    delete(result[0])


class Ending:
    """Stops the profiler on a thread of its own, which calls `then` when the file is written.

    The profiler must have been silenced, with the threads `inside`, and must still be there: where there is
    none, the library ends the process.
    """

    def __init__(self, inside, path, then):
        self._inside, self._path, self._then = inside, path, then
        self._busy = _thread.allocate_lock()
        self._busy.acquire()
        try:
            # Not by `threading`: a program may join every thread that it finds there.
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # the program may have no more threads
            self._run()

    def _run(self):
        try:
            drain(self._inside)
            _stop_and_save(self._path)
            self._then()
        except Exception as exception:
            marks.error("trace", exception)
        finally:
            self._busy.release()

    def forgotten(self):
        """Whether no thread can be in an operator whose beginning it has recorded."""
        return left(self._inside)

    def over(self):
        return not self._busy.locked()

    def wait(self):
        self._busy.acquire()
        self._busy.release()
