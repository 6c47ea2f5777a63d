"""One line for Hugging Face: `Trainer(…, callbacks=[smaragdine.TrainerTuneCallback()])`."""

from __future__ import annotations

from typing import Any

import transformers

from smaragdine.callbacks.tune import tuned_training


class TrainerTuneCallback(transformers.TrainerCallback):
    """Tunes the power limit during a training. `tune` has the result; the arguments are those of
    `smaragdine.tune`."""

    def __init__(self, folder: str | None = None, **options: Any) -> None:
        self._tuning = tuned_training(folder, options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tuning.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tuning.end()

    @property
    def tune(self) -> Any:
        return self._tuning.last
