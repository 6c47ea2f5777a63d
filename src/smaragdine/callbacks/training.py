"""What the callbacks of all frameworks share: a trace from the beginning of a training to its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smaragdine.api import hook_module
from smaragdine.traced import Trace


class Training:
    def __init__(self, folder: str | None, options: Mapping[str, Any]) -> None:
        self.trace: Trace | None = None  # of the last training
        self._folder = folder
        self._options = options
        self._depth = 0
        # Before the framework's own trainer is called, which would not see it any more.
        hook_module("marks").install_all()

    def begin(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self.trace = Trace(None, self._folder, **self._options)

    def end(self) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self.trace is not None:
            self.trace.stop()
