"""The profilers of JAX and TensorFlow, which both give XPlane files, around a few steps.

Their sessions are opened directly. Through jax.profiler or tf.profiler.experimental ours would be the one
session a process may have, and a program that starts its own meanwhile would fail. So the program goes first:
when it opens a session, ours is dropped.
"""

import glob
import os
import shutil
import sys
import tempfile
import time


class Session:
    def __init__(self, framework, module, profiler, folder):
        self.framework = framework
        self.profiler = profiler  # None once dropped
        self.folder = folder
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


def start(framework, folder=None):
    """Profile from now on. `framework` is "jax" or "tensorflow"; TensorFlow's export lies in `folder`, or in
    the system's temporary one, until it is moved."""
    if framework not in _OPEN:
        raise ValueError("no XPlane profiler for %s" % framework)
    _WAIT[framework]()
    return _OPEN[framework](folder)


def stop(session, path):
    """End the profile and write it to `path`, whole or not at all."""
    part = path + ".part"
    try:
        if session.profiler is None:
            raise RuntimeError("the program started a profiler of its own; ours was dropped")
        _WAIT[session.framework]()
        _EXPORT[session.framework](session.profiler, session.folder, part)
        os.replace(part, path)
    finally:
        session.close()
        if session.folder is not None:
            shutil.rmtree(session.folder, ignore_errors=True)
        if os.path.exists(part):
            os.remove(part)


def _open_jax(folder):
    import jax._src.profiler as profiler

    state = getattr(profiler, "_profile_state", None)
    if getattr(state, "profile_session", None) is not None:
        raise RuntimeError("a JAX profiler is running already")
    module = getattr(profiler, "_profiler", None)
    if module is None:
        from jax._src.lib import xla_client

        module = xla_client.profiler
    _check_unused(module)
    options = module.ProfileOptions()
    options.python_tracer_level = 0
    return Session("jax", module, module.ProfilerSession(options), None)


def _open_tensorflow(folder):
    from tensorflow.python.profiler import profiler_v2
    from tensorflow.python.profiler.internal import _pywrap_profiler as module

    if getattr(profiler_v2, "_profiler", None) is not None:
        raise RuntimeError("a TensorFlow profiler is running already")
    _check_unused(module)
    # The profiler makes the folder, when it exports.
    name = "smaragdine-xplane-%d-%d" % (os.getpid(), time.time_ns())
    folder = os.path.join(folder or tempfile.gettempdir(), name)
    profiler = module.ProfilerSession()
    profiler.start(folder, {"host_tracer_level": 2, "python_tracer_level": 0, "device_tracer_level": 1})
    return Session("tensorflow", module, profiler, folder)


def _check_unused(module):
    if isinstance(getattr(module.ProfilerSession, "__self__", None), Session):
        raise RuntimeError("a trace of ours is running already")


def _export_jax(profiler, folder, path):
    with open(path, "wb") as file:
        file.write(profiler.stop())


def _export_tensorflow(profiler, folder, path):
    profiler.export_to_tb()
    found = glob.glob(os.path.join(glob.escape(folder), "**", "*.xplane.pb"), recursive=True)
    if len(found) != 1:
        raise RuntimeError("TensorFlow's profiler left %d files" % len(found))
    shutil.move(found[0], path)


def _wait_jax():
    """Until the devices have done what they were given. A step that failed says so to the program, not here;
    jax.effects_barrier would take the error away from it."""
    for array in sys.modules["jax"].live_arrays():
        try:
            if not array.is_deleted():
                array.block_until_ready()
        except Exception:
            pass


def _wait_tensorflow():
    # On the CPU a step has ended when its call returns.
    tensorflow = sys.modules["tensorflow"]
    try:
        if tensorflow.executing_eagerly() and tensorflow.config.list_logical_devices("GPU"):
            tensorflow.test.experimental.sync_devices()
    except Exception:
        pass


_WAIT = {"jax": _wait_jax, "tensorflow": _wait_tensorflow}
_OPEN = {"jax": _open_jax, "tensorflow": _open_tensorflow}
_EXPORT = {"jax": _export_jax, "tensorflow": _export_tensorflow}
