"""Marks of Lightning, under both its names.

Every event passes through `trainer.call._call_callback_hooks` (private, there since 2.0). We wrap it instead
of adding a callback: the trainer's list of callbacks and its checkpoints stay as the user made them, and it
works in processes that receive the trainer by pickle.
"""

import functools
import time

from . import marks, training
from .state import process

SOURCE = "lightning"


def patch_call(module):
    original = module._call_callback_hooks
    if getattr(original, "_smaragdine_hook", False):
        return

    @functools.wraps(original)
    def _call_callback_hooks(trainer, hook_name, *args, **kwargs):
        _event(_BEFORE, trainer, hook_name, args, kwargs)
        result = original(trainer, hook_name, *args, **kwargs)
        _event(_AFTER, trainer, hook_name, args, kwargs)
        return result

    _call_callback_hooks._smaragdine_hook = True
    module._call_callback_hooks = _call_callback_hooks


def _event(table, trainer, name, args, kwargs):
    action = table.get(name)
    if action is not None:
        try:
            action(trainer, args, kwargs)
        except Exception as exception:
            marks.error(SOURCE, exception)


def _setup(trainer, args, kwargs):
    # All processes are there, and nothing is marked. Lightning's launcher puts no rank into the environment.
    marks.learn_rank(trainer.global_rank)


def _train_begin(trainer, args, kwargs):
    if training.begin(trainer):
        process.lightning_step = trainer.global_step
        epochs = trainer.max_epochs
        marks.mark("train_begin", source=SOURCE, total=epochs if epochs is not None and epochs >= 0 else None)


def _train_end(trainer, args, kwargs):
    if training.end(trainer):
        marks.mark("train_end", source=SOURCE)


def _epoch_begin(trainer, args, kwargs):
    if training.owns(trainer):
        marks.mark("epoch_begin", trainer.current_epoch, source=SOURCE)


def _epoch_end(trainer, args, kwargs):
    # Lightning calls this twice; the second time is for checkpoints and early stopping.
    if kwargs.get("monitoring_callbacks") is not False and training.owns(trainer):
        marks.mark("epoch_end", trainer.current_epoch, source=SOURCE)


def _step_begin(trainer, args, kwargs):
    if training.owns(trainer):
        marks.soon(time.time_ns(), "step_begin", process.lightning_step, SOURCE)


def _step_end(trainer, args, kwargs):
    if training.owns(trainer):
        marks.soon(time.time_ns(), "step_end", process.lightning_step, SOURCE)
        process.lightning_step += 1


def _exception(trainer, args, kwargs):
    if training.end(trainer):
        marks.mark("train_end", source=SOURCE, detail={"error": type(args[0]).__name__ if args else None})


def _plain(name):
    return lambda trainer, args, kwargs: marks.mark(name, source=SOURCE)


_BEFORE = {
    "setup": _setup,
    "on_train_start": _train_begin,
    "on_train_epoch_start": _epoch_begin,
    "on_train_batch_end": _step_end,
    "on_validation_start": _plain("evaluate_begin"),
    "on_test_start": _plain("evaluate_begin"),
    "on_predict_start": _plain("predict_begin"),
    "on_exception": _exception,
}
_AFTER = {
    "on_train_batch_start": _step_begin,
    "on_train_epoch_end": _epoch_end,
    "on_train_end": _train_end,
    "on_validation_end": _plain("evaluate_end"),
    "on_test_end": _plain("evaluate_end"),
    "on_predict_end": _plain("predict_end"),
    "teardown": _train_end,
}
