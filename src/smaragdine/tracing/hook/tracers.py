"""Which framework's profiler a program needs.

A tracer is a module with the FRAMEWORK, FORMAT and SUFFIX of its raw files, and with

    start()                          begins, returns a session; raises, having changed nothing, if it cannot
    stop(session, path)              ends, writes `path` and returns what else is known; raises if it cannot

and, where the framework asks for more care,

    ready(), may_stop()              whether it can begin, or stop, just now
    stop_aside(session, path, then)  like `stop`, on a background thread
    at_next_call(work)               has a thread of the program do `work`; returns what takes this back
    still_safe()                     whether what waits for the next call may go on waiting
"""

import importlib
import sys

_TORCH = ("torch", "transformers", "lightning")
_TRACERS = {
    "torch": "torch.tracer",
    "tensorflow": "tensorflow.tracer",
    "session": "tensorflow.sessions",
    "jax": "jax",
}

_DRIVERS = (b"/libcuda.so", b"/libamdhip64.so")


class ProfilerBusy(RuntimeError):
    """The program runs a profiler of its own, and there can be no other; it may end."""


def of_source(source):
    """The tracer for whoever announces steps."""
    if source == "tensorflow":
        return named("session")
    if source == "keras":
        return named(sys.modules["keras"].backend.backend())
    if source == "tf_keras":
        return named("tensorflow")
    if source.partition(":")[0] in _TORCH:
        return named("torch")
    framework = in_use()
    if framework is None:
        raise NotImplementedError("steps of %s are of no framework we know" % source)
    return named(framework)


def named(framework):
    return importlib.import_module("%s.%s" % (__package__, _TRACERS[framework]))


def in_use():
    """The framework that has work in this process. Libraries import many that they never use: JAX has a
    backend only once it is used, and TensorFlow a context."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and getattr(bridge, "_backends", None):
        return "jax"
    context = sys.modules.get("tensorflow.python.eager.context")
    # Not `context()`, which makes one where there is none.
    known = getattr(context, "context_safe", None)
    if known is not None and getattr(known(), "_initialized", False):
        return "tensorflow"
    return "torch" if "torch" in sys.modules else None


def gpu_in_use():
    """Whether this process has loaded a GPU's driver, which frameworks do once they use it; true where nobody
    can tell."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return any(name in line for line in file for name in _DRIVERS)
    except OSError:
        return True
