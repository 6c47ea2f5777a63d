"""Marks of the Hugging Face Trainer.

Every event passes through `CallbackHandler.call_event`. We wrap it instead of adding a callback: the
trainer's list of callbacks, and with it the saved state, stays as the user made it.
"""

import functools
import time

from . import marks, training, wrapping
from .state import process

SOURCE = "transformers"


def patch_callbacks(module):
    wrapping.around(module.CallbackHandler, "call_event", _before, _after, SOURCE)


def patch_trainer(module):
    wrapping.replace(module.Trainer, "train", _train)
    for kind in process.transformers.inside:
        wrapping.replace(module.Trainer, kind, functools.partial(_outermost, kind))


def _before(handler, args, kwargs):
    event, state = args[0], args[2]
    if event == "on_train_begin":
        if training.begin(handler):
            marks.mark("train_begin", source=SOURCE, total=getattr(state, "num_train_epochs", None) or None)
    elif not training.owns(handler):
        pass
    elif event == "on_step_end":
        marks.soon(time.time_ns(), "step_end", state.global_step - 1, SOURCE)
    elif event == "on_epoch_begin":
        process.transformers.epoch = int((state.epoch or 0) + 1e-6)
        marks.mark("epoch_begin", process.transformers.epoch, source=SOURCE)


def _after(handler, args, kwargs):
    event, state = args[0], args[2]
    if event == "on_step_begin":
        if training.owns(handler):
            marks.soon(time.time_ns(), "step_begin", state.global_step, SOURCE)
    elif event == "on_epoch_end":
        if training.owns(handler):
            marks.mark("epoch_end", process.transformers.epoch, source=SOURCE)
    elif event == "on_train_end" and training.end(handler):
        marks.mark("train_end", source=SOURCE)


def _train(original):
    @functools.wraps(original)
    def train(self, *args, **kwargs):
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            if training.end(getattr(self, "callback_handler", None)):
                marks.mark("train_end", source=SOURCE, detail={"error": wrapping.failing()})
            raise

    return train


def _outermost(kind, original):
    # The trainer has events for the end of these only, and calls itself for each of several data sets.
    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        if process.transformers.inside[kind] == 0:
            marks.mark(kind + "_begin", source=SOURCE)
        process.transformers.inside[kind] += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            process.transformers.inside[kind] -= 1
            if process.transformers.inside[kind] == 0:
                marks.mark(kind + "_end", source=SOURCE)

    return wrapper
