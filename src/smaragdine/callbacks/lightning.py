"""One line for Lightning: `Trainer(…, callbacks=[smaragdine.LightningCallback()])`."""

from __future__ import annotations

from typing import Any

from smaragdine.callbacks.training import traced_training

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    from pytorch_lightning.callbacks import Callback


class LightningCallback(Callback):  # pyright: ignore[reportUntypedBaseClass, reportGeneralTypeIssues]
    """Records a training and traces a few of its steps. `trace` has the result; the arguments are those of
    `smaragdine.trace`."""

    def __init__(self, folder: str | None = None, **options: Any) -> None:
        self._training = traced_training(folder, options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._training.begin()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.end()

    @property
    def trace(self) -> Any:
        return self._training.last
