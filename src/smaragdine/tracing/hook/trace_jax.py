"""A window of JAX's own profiler."""

import _thread
import sys
import threading

from .trace_xplane import FORMAT, SUFFIX, XplaneSession, check_unused, write
from .tracers import ProfilerBusy

FRAMEWORK = "jax"
__all__ = ["FORMAT", "FRAMEWORK", "SUFFIX", "start", "stop"]


def start():
    """Begin profiling; raises, having changed nothing, where the program would notice."""
    import jax._src.profiler as profiler

    state = getattr(profiler, "_profile_state", None)
    if getattr(state, "profile_session", None) is not None:
        raise ProfilerBusy("a JAX profiler is running already")
    module = getattr(profiler, "_profiler", None)
    if module is None:
        from jax._src.lib import xla_client

        module = xla_client.profiler
    check_unused(module)
    _wait()
    options = module.ProfileOptions()
    options.python_tracer_level = 0
    return XplaneSession(module, module.ProfilerSession(options))


def stop(session, path):
    """End it and write the raw file; raises where there is nothing to write."""
    if session.profiler is not None:
        _wait()
    return write(session, path, _export)


def _export(profiler, path):
    with open(path, "wb") as file:
        file.write(profiler.stop())


def _wait():
    """Until the devices have done what they were given. A step that failed says so to the program, not here;
    jax.effects_barrier would take the error away from it."""
    # Beside the program's own thread, a list of its arrays would keep them in memory longer than it does.
    if _thread.get_ident() not in getattr(threading, "_active", ()):
        return
    for array in sys.modules["jax"].live_arrays():
        try:
            if not array.is_deleted():
                array.block_until_ready()
        except Exception:
            pass
