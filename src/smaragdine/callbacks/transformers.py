"""One line for Hugging Face: `Trainer(…, callbacks=[smaragdine.TrainerCallback()])`."""

from __future__ import annotations

from typing import Any

import transformers

from smaragdine.callbacks.training import traced_training, tuned_training


class TrainerCallback(transformers.TrainerCallback):
    """Records a training and traces a few of its steps. `trace` has the result; the arguments are those of
    `smaragdine.trace`."""

    def __init__(self, folder: str | None = None, **options: Any) -> None:
        self._training = traced_training(folder, options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.end()

    @property
    def trace(self) -> Any:
        return self._training.last


# One line for Hugging Face: `Trainer(…, callbacks=[smaragdine.TrainerTuneCallback()])`.


class TrainerTuneCallback(transformers.TrainerCallback):
    """Tunes the power limit during a training. `tune` has the result; arguments as of `smaragdine.tune`."""

    def __init__(self, folder: str | None = None, **options: Any) -> None:
        self._tuning = tuned_training(folder, options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tuning.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tuning.end()

    @property
    def tune(self) -> Any:
        return self._tuning.last
