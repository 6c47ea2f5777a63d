"""How a process ends that would wait for a thread of PyTorch's profiler for ever.

Kineto leaves a thread that waits, and its destructor destroys the condition the thread waits on. In a forked
child there is no such thread, but the wait is still noted there, and the child hangs at its end (torch 2.13).
So it leaves by _exit: after Python has ended and the streams of C are written, but without destructors.
"""

import ctypes
import os


def watch():
    """From now on, children forked by this process end so."""
    os.register_at_fork(after_in_child=ending())


def ending():
    """A function after which this process, or the child that calls it, ends so."""
    libc = ctypes.CDLL(None)
    leave, flush = (ctypes.cast(function, ctypes.c_void_p) for function in (libc._exit, libc.fflush))
    on_exit, at_exit = libc.on_exit, getattr(libc, "__cxa_atexit")

    def end():
        on_exit(leave, None)
        at_exit(flush, None, None)  # the last one registered is the first called

    return end
