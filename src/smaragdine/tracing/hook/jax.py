"""JAX: scopes where its programs have none, and a window of its profiler.

The root of a Keras model and the modules of flax.nnx have no scopes. A scope is a word in the compiled
program's metadata. Values do not depend on it, nor does the key under which JAX keeps compiled programs (it
leaves metadata out, unless told otherwise). We open scopes while JAX traces a function, not when the function
runs, and only in processes that may be profiled.

We do not recognise the steps of a plain JAX loop. What jax.jit returns is an object of C++ that people
inspect (`lower`, `clear_cache`) and whose calls are a fast path; wrapping it would change the one and lose
the other. The profiler tells the executions of a program apart by itself.
"""

import _thread
import functools
import sys
import threading

from . import environment, marks, wrapping
from .state import process
from .tracers import ProfilerBusy
from .xplane import FORMAT, SUFFIX, XplaneSession, check_unused, write

FRAMEWORK = "jax"
__all__ = ["FORMAT", "FRAMEWORK", "SUFFIX", "patch_keras_layer", "patch_nnx", "start", "stop"]


def patch_keras_layer(module):
    """On JAX, `fit` calls the model's `call` and so leaves out the model's own scope."""
    if environment.trace_wanted() and module.backend.backend() == "jax":
        wrapping.replace(module.Layer, "stateless_call", _keras_root)


def _keras_root(original):
    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        with _Scope("keras", lambda: self.name):
            return original(self, *args, **kwargs)

    return wrapper


def patch_nnx(module):
    """Wraps `__call__` of the classes there are; Python tells us of those made later."""
    if not environment.trace_wanted():
        return
    base = module.Module
    inherited = base.__init_subclass__.__func__

    def __init_subclass__(cls, **kwargs):
        inherited(cls, **kwargs)
        _wrap_call(cls)

    base.__init_subclass__ = classmethod(__init_subclass__)
    classes = list(base.__subclasses__())
    while classes:
        each = classes.pop()
        classes += each.__subclasses__()
        _wrap_call(each)


def _wrap_call(cls):
    try:
        wrapping.replace(cls, "__call__", _nnx_call)
    except Exception as exception:
        marks.error("flax", exception)


def _nnx_call(original):
    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        # A parent class's `__call__` is part of the same call. Unless JAX traces, nobody would see a scope.
        stack = _stack()
        if (stack and stack[-1][0] is self) or not _is_tracing():
            return original(self, *args, **kwargs)
        above = len(stack)
        with _Scope("flax", lambda: _enter(stack, self)):
            try:
                return original(self, *args, **kwargs)
            finally:
                del stack[above:]

    return wrapper


def _stack():
    """Calls under way: (module, its path from the outermost module called, paths of all modules in that)."""
    if not hasattr(process.nnx, "stack"):
        process.nnx.stack = []
    return process.nnx.stack


def _enter(stack, module):
    """The scope of a module that is called: its path from the one that calls it."""
    scope = type(module).__name__
    path, paths = "", None
    if stack:
        _, above, paths = stack[-1]
        path = paths.get(id(module), "")
        if path.startswith(above) and path != above:
            scope = path[len(above) :].strip("/") or scope
    if not path:
        # It is no part of the one that calls it, but a root of its own.
        paths = _paths(module)
    stack.append((module, path, paths))
    return scope


def _paths(root):
    nnx = sys.modules["flax.nnx"]
    paths = {}
    for path, module in nnx.iter_modules(root):
        paths.setdefault(id(module), "/" + "/".join(map(str, path)) if path else "")
    return paths


def _is_tracing():
    try:
        return not sys.modules["jax._src.core"].trace_state_clean()
    except Exception:
        return True


class _Scope:
    """A named scope, or nothing where that fails: the program's own call is made in any case."""

    def __init__(self, framework, name):
        self.framework = framework
        self.name = name
        self.scope = None

    def __enter__(self):
        try:
            scope = sys.modules["jax"].named_scope(self.name())
            scope.__enter__()
            self.scope = scope
        except Exception as exception:
            marks.error(self.framework, exception)

    def __exit__(self, *raised):
        if self.scope is not None:
            self.scope.__exit__(*raised)
        return False


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
    """End the session and write its raw file; raises where there is nothing to write."""
    if session.profiler is not None:
        _wait()
    return write(session, path, _export)


def _export(profiler, path):
    with open(path, "wb") as file:
        file.write(profiler.stop())


def _wait():
    """Wait until the devices have done what they were given. A step that failed tells the program, not us;
    jax.effects_barrier would take the error away from the program."""
    # In a thread beside the program's own, our list of its arrays would keep them in memory for too long.
    if _thread.get_ident() not in getattr(threading, "_active", ()):
        return
    for array in sys.modules["jax"].live_arrays():
        try:
            if not array.is_deleted():
                array.block_until_ready()
        except Exception:
            pass
