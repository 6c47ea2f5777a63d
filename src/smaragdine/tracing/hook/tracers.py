"""Which framework's profiler a program needs."""

import importlib
import sys

_TORCH = ("torch", "transformers", "lightning")
_TRACERS = {
    "torch": "torch.tracer",
    "tensorflow": "tensorflow.tracer",
    "session": "tensorflow.sessions",
    "jax": "jax",
}


class ProfilerBusy(RuntimeError):
    """The program has a profiler of its own, beside which there can be none of ours; it may end."""


def of_source(source):
    """The tracer of whoever announces steps."""
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
    """The framework that has work in this process. Many are imported by others and never used: JAX has a
    backend when it is, and TensorFlow a context."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and getattr(bridge, "_backends", None):
        return "jax"
    context = sys.modules.get("tensorflow.python.eager.context")
    # Not context(), which makes one where there is none.
    known = getattr(context, "context_safe", None)
    if known is not None and getattr(known(), "_initialized", False):
        return "tensorflow"
    return "torch" if "torch" in sys.modules else None
