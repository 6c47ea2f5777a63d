"""One line for sessions: `MonitoredTrainingSession(hooks=[smaragdine.SessionRunHook()])`."""

from __future__ import annotations

from typing import Any

import tensorflow

from smaragdine.callbacks.training import traced_training


class SessionRunHook(tensorflow.compat.v1.train.SessionRunHook):  # pyright: ignore[reportUntypedBaseClass, reportGeneralTypeIssues]
    """Records a session and traces a few of its steps. `trace` has the result; the arguments are those of
    `smaragdine.trace`."""

    def __init__(self, folder: str | None = None, **options: Any) -> None:
        self._training = traced_training(folder, options)

    def begin(self) -> None:
        self._training.begin()

    def end(self, session: Any) -> None:
        self._training.end()

    @property
    def trace(self) -> Any:
        return self._training.last
