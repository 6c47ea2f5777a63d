"""Which libraries the program ended up using."""

import sys

from . import marks

FRAMEWORKS = (
    "torch", "tensorflow", "keras", "tf_keras", "jax", "jaxlib", "flax", "transformers", "lightning",
    "pytorch_lightning", "accelerate",
)  # fmt: skip


def mark_libraries():
    found = libraries()
    if any(name in found for name in FRAMEWORKS):
        marks.mark("libraries", source="hook", detail=found)


def libraries():
    found = {"python": "%d.%d.%d" % sys.version_info[:3]}
    for name in ("numpy", *FRAMEWORKS):
        # Not getattr: on a lazy module that could import half a framework while the interpreter shuts down.
        version = getattr(sys.modules.get(name), "__dict__", {}).get("__version__")
        if isinstance(version, str):
            found[name] = str(version)
    return found
