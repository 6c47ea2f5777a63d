"""Which module of which framework is patched by what."""

import atexit
import os
import sys

from . import imports, marks, versions
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
    "torch.autograd.profiler": "torch.program_profiler.patch_profiler",
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

# Whatever the program does with these, it may be worth a trace.
FRAMEWORKS = ("torch", "jax", "tensorflow")


def start():
    """Called in every Python process of a program run by Smaragdine."""
    marks.set_spool(os.environ["SMARAGDINE_SPOOL"])
    if os.environ.get("SMARAGDINE_TRACE_FOLDER"):
        from . import trace

        trace.install()
    install_all()


def install_all():
    if not process.installed:
        process.installed = True
        atexit.register(_at_exit)
        patches = {name: _patch(target) for name, target in PATCHES.items()}
        patches.update({name: _patch("trace.framework_loaded") for name in FRAMEWORKS})
        imports.install(patches)


def _patch(target):
    file, _, function = target.rpartition(".")

    def patch(module):
        name = "%s.%s" % (__package__, file)
        __import__(name)
        getattr(sys.modules[name], function)(module)

    return patch


def _at_exit():
    try:
        loop = sys.modules.get("%s.torch.loop" % __package__)
        if loop is not None:
            loop.finish()
        trace = sys.modules.get("%s.trace" % __package__)
        if trace is not None:
            trace.finish()
        marks.flush()
        versions.mark_libraries()
    except Exception:
        pass
