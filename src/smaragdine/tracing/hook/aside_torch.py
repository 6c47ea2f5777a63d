"""Ends PyTorch's profiler beside the program, without holding the interpreter's lock.

To stop, Kineto turns all its records into a trace and writes it: 13 µs for each, seconds for a few steps on a
GPU. PyTorch's own function holds the lock all the while. The library's does not, when called by ctypes; its
names say what it takes, and where one of them is missing PyTorch's own function is used.
"""

import _thread
import ctypes
import os
import platform

import torch

from . import marks

_STOP = "_ZN5torch8autograd8profiler15disableProfilerEv"
_RESULT = "_ZN5torch8autograd8profiler14ProfilerResult"
_SAVE = _RESULT + "4saveERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_DESTROY = _RESULT + "D1Ev"
_DELETE = "_ZdlPv"

_found = None  # the functions; False where they are not to be had


class _String(ctypes.Structure):
    # A std::string: where its text is, how long, and room for a short one.
    _fields_ = [("text", ctypes.c_void_p), ("size", ctypes.c_size_t), ("room", ctypes.c_size_t * 2)]


def possible():
    return bool(_functions())


def _functions():
    global _found
    if _found is None:
        _found = _look() or False
    return _found


def _look():
    # How an object is returned differs between processors.
    if platform.machine() != "x86_64":
        return None
    try:
        path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
        library = ctypes.CDLL(path)
        found = [getattr(library, name) for name in (_STOP, _SAVE, _DESTROY, _DELETE)]
    except (OSError, AttributeError):
        return None
    for function in found:
        function.restype = None
        function.argtypes = [ctypes.c_void_p]
    found[1].argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return found


def _stop_and_save(path):
    stop, save, destroy, delete = _functions()
    result = (ctypes.c_void_p * 8)()  # one is used
    stop(result)
    text = os.fsencode(path)
    kept = ctypes.create_string_buffer(text)
    save(result[0], ctypes.byref(_String(ctypes.addressof(kept), len(text), (len(text), 0))))
    destroy(result[0])
    delete(result[0])


class Ending:
    """A profiler that is being ended by a thread of its own; `then` is called there when the file is written.

    The profiler must run, and for all threads: the library ends the process where there is none to end.
    """

    def __init__(self, path, then):
        self._path, self._then = path, then
        self._busy = _thread.allocate_lock()
        self._busy.acquire()
        # Not by threading: a program may join every thread it finds there.
        _thread.start_new_thread(self._run, ())

    def _run(self):
        try:
            _stop_and_save(self._path)
            self._then()
        except Exception as exception:
            marks.error("torch", exception)
        finally:
            self._busy.release()

    def over(self):
        return not self._busy.locked()

    def wait(self):
        self._busy.acquire()
        self._busy.release()
