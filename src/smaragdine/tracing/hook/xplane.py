"""What the tracers of JAX and TensorFlow share: both profilers give XPlane files.

We open their sessions directly. Opened through jax.profiler or tf.profiler.experimental, ours would be the
one session that a process may have, and a program that starts its own meanwhile would fail. So the program
goes first: when it opens a session, we drop ours.

An XPlane file numbers its lines by a hash of the C library's handles of threads. Python knows no handle of a
thread that is not its own. But for each thread the kernel keeps the address of a field of what the handle
points to (glibc: the list of robust mutexes), and that is equally far from the handle in all threads.
"""

import ctypes
import os
import threading

from . import marks
from .tracers import ProfilerBusy

FORMAT = "xplane"
SUFFIX = ".xplane.pb"

_GET_ROBUST_LIST = {"x86_64": 274, "aarch64": 100}


class XplaneSession:
    def __init__(self, module, profiler):
        self.profiler = profiler  # None once dropped
        self._module = module
        self._original = module.ProfilerSession
        module.ProfilerSession = self._opened_by_program

    def _opened_by_program(self, *args, **kwargs):
        self.close()
        return self._original(*args, **kwargs)

    def close(self):
        """Without a reference the profiler ends and forgets what it saw."""
        self.profiler = None
        if self._module.ProfilerSession == self._opened_by_program:
            self._module.ProfilerSession = self._original


def check_unused(module):
    if isinstance(getattr(module.ProfilerSession, "__self__", None), XplaneSession):
        raise RuntimeError("a trace of ours is running already")


def write(session, path, export):
    """Write the file whole or not at all; returns what else is known. `export` ends the profile and writes it
    to a path."""
    part = path + ".part"
    try:
        if session.profiler is None:
            raise ProfilerBusy("the program started a profiler of its own; ours was dropped")
        export(session.profiler, part)
        os.replace(part, path)
        return _facts()
    finally:
        session.close()
        if os.path.exists(part):
            os.remove(part)


def _facts():
    try:
        return {"threads": _handles()}
    except Exception as exception:
        marks.error("xplane", exception)
        return {}


def _handles():
    """[[thread, handle], …] of this process, as the kernel and the C library number them; none where we
    cannot tell."""
    number = _GET_ROBUST_LIST.get(os.uname().machine)
    if number is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return []
    syscall = ctypes.CDLL(None).syscall
    address, length = ctypes.c_void_p(), ctypes.c_size_t()

    def field_of(thread):
        arguments = (
            ctypes.c_long(number),
            ctypes.c_long(thread),
            ctypes.byref(address),
            ctypes.byref(length),
        )
        return address.value if syscall(*arguments) == 0 else None

    own = field_of(0)
    if own is None:
        return []
    distance = own - threading.get_ident()
    fields = [(thread, field_of(thread)) for thread in map(int, os.listdir("/proc/self/task"))]
    found = {thread: field - distance for thread, field in fields if field is not None}
    # Python knows the handles of its own threads: where one differs, this is another C library.
    if any(found.get(thread.native_id, thread.ident) != thread.ident for thread in threading.enumerate()):
        return []
    return [[thread, handle] for thread, handle in found.items()]
