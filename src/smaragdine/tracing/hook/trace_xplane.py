"""What the tracers of JAX and TensorFlow share: both profilers give XPlane files.

Their sessions are opened directly. Through jax.profiler or tf.profiler.experimental ours would be the one
session a process may have, and a program that starts its own meanwhile would fail. So the program goes first:
when it opens a session, ours is dropped.
"""

import os

from . import marks, threads
from .tracers import ProfilerBusy

FORMAT = "xplane"
SUFFIX = ".xplane.pb"


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
    """`export(profiler, path)` ends the profile and writes it: whole or not at all. What else is known."""
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
        return {"threads": threads.handles()}
    except Exception as exception:
        marks.error("xplane", exception)
        return {}
