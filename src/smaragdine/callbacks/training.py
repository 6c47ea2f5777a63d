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
        self._count = 0
        # Before the framework's own trainer is called, which would not see it any more.
        hook_module("windows").asked = True
        hook_module("marks").install_all()

    def begin(self) -> None:
        self.end()  # of a training that failed, and so did not say that it ended
        self._count += 1
        folder = self._folder
        if folder is not None and self._count > 1:
            folder = f"{folder}-{self._count}"
        self.trace = Trace(None, folder, **self._options)

    def end(self) -> None:
        if self.trace is not None:
            self.trace.stop()
