"""How the hook gets into a program: which module of which framework is patched by what, and when.

A patch is imported after the module it is for, and applied at once. Everything else in the hook is therefore
named here and imported by name: a program without frameworks loads this file, `marks` and `state`.
"""

import atexit
import os
import sys

from . import marks
from .state import process

# Keras 3, Keras 2 (its files moved twice) and tf_keras; torch; and the two names Lightning goes by.
PATCHES = {
    "keras.src.callbacks.callback_list": "keras.patch_callbacks",
    "keras.src.backend.tensorflow.core": "tensorflow.scopes.patch_scopes",
    "keras.src.backend.tensorflow.trainer": "keras.patch_trainer",
    "keras.src.backend.jax.trainer": "keras.patch_trainer",
    "keras.src.backend.torch.trainer": "keras.patch_trainer",
    "keras.src.layers.layer": "jax.patch_keras_layer",
    "keras.src.optimizers.base_optimizer": "keras.patch_optimizer",
    "flax.nnx.module": "jax.patch_nnx",
    "keras.callbacks": "keras.patch_callbacks",
    "keras.engine.training": "keras.patch_trainer",
    "keras.src.callbacks": "keras.patch_callbacks",
    "keras.src.engine.training": "keras.patch_trainer",
    "tf_keras.src.callbacks": "keras.patch_callbacks",
    "tf_keras.src.engine.training": "keras.patch_trainer",
    "tf_keras.src.engine.training_v1": "keras.patch_trainer",
    "torch.autograd.profiler": "torch.conflicts.patch_profiler",
    "torch.nn.modules.module": "torch.loop.patch_module",
    "torch.optim.optimizer": "torch.loop.patch_optimizer",
    "torch.utils.data.dataloader": "torch.loop.patch_dataloader",
    "transformers.trainer_callback": "transformers.patch_callbacks",
    "transformers.trainer": "transformers.patch_trainer",
    "lightning.pytorch.trainer.call": "lightning.patch_call",
    "pytorch_lightning.trainer.call": "lightning.patch_call",
    "tensorflow.python.client.session": "tensorflow.sessions.patch_session",
    "tensorflow.python.training.monitored_session": "tensorflow.sessions.patch_monitored_session",
}

# A program that imports one of these may have work to trace, whatever it does with it.
FRAMEWORKS = ("torch", "jax", "tensorflow")

# Libraries whose versions a recording tells; one of them makes a program worth telling of.
_LIBRARIES = (
    "torch", "tensorflow", "keras", "tf_keras", "jax", "jaxlib", "flax", "transformers", "lightning",
    "pytorch_lightning", "accelerate",
)  # fmt: skip


def start():
    """Called in every Python process of a program run by Smaragdine."""
    marks.set_spool(os.environ["SMARAGDINE_SPOOL"])
    if os.environ.get("SMARAGDINE_TRACE_FOLDER"):
        _ours("trace").install()
    install_all()


def install_all():
    """Patch the frameworks imported already, and those imported later."""
    if not process.installed:
        process.installed = True
        atexit.register(_at_exit)
        patches = {name: _patch(target) for name, target in PATCHES.items()}
        patches.update({name: _patch("trace.framework_loaded") for name in FRAMEWORKS})
        after_import(patches)


def mark_libraries():
    """Which libraries the program ended up using, where a framework is among them."""
    found = {"python": "%d.%d.%d" % sys.version_info[:3]}
    for name in ("numpy", *_LIBRARIES):
        # Not getattr: on a lazy module that could import half a framework while the interpreter shuts down.
        version = getattr(sys.modules.get(name), "__dict__", {}).get("__version__")
        if isinstance(version, str):
            found[name] = str(version)
    if any(name in found for name in _LIBRARIES):
        marks.mark("libraries", source="hook", detail=found)


def after_import(patches):
    """`patches`: {module: function of the module}. What is imported already is patched at once."""
    process.patches.update(patches)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, patch in patches.items():
        module = sys.modules.get(name)
        # Half imported: its own import is under way and was not ours to follow.
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _apply(name, patch, module)


def _patch(target):
    file, _, function = target.rpartition(".")

    def patch(module):
        getattr(_ours(file), function)(module)

    return patch


def _ours(name):
    whole = "%s.%s" % (__package__, name)
    __import__(whole)
    return sys.modules[whole]


def _at_exit():
    try:
        loop = sys.modules.get("%s.torch.loop" % __package__)
        if loop is not None:
            loop.finish()
        trace = sys.modules.get("%s.trace" % __package__)
        if trace is not None:
            trace.finish()
        marks.flush()
        mark_libraries()
    except Exception:
        pass


def _apply(name, patch, module):
    try:
        patch(module)
    except Exception as exception:
        marks.error(name.split(".")[0], exception)


class _Finder:
    """The first of the interpreter's finders. Finds what the others find, and has a patch applied later."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        patch = process.patches.get(name)
        if patch is None:
            return None
        spec = _find(name, path, target)
        try:
            loader = getattr(spec, "loader", None)
            # A namespace has nothing to execute; a class used as its own loader is shared by many modules.
            if (
                not isinstance(loader, type)
                and hasattr(loader, "exec_module")
                and hasattr(loader, "__dict__")
            ):
                _after(name, patch, loader)
        except Exception as exception:
            marks.error(name.split(".")[0], exception)
        return spec


def _find(name, path, target):
    for finder in list(sys.meta_path):
        find_spec = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
        spec = None if find_spec is None else find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def _after(name, patch, loader):
    # We replace an attribute of this one loader, and take it back when it is used: its type, and what else
    # people ask a loader for, stay as they are. A lazy loader that keeps it and executes the module much
    # later still ends up here.
    execute = loader.exec_module

    def exec_module(module):
        ours = getattr(module, "__name__", name) == name
        if ours:
            vars(loader).pop("exec_module", None)
        execute(module)
        if ours:
            _apply(name, patch, module)

    loader.exec_module = exec_module
