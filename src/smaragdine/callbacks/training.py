"""What the callbacks of all frameworks share: something that lasts from the beginning of a training to its
end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from smaragdine.api import hook_module
from smaragdine.traced import Trace


class _Stopped(Protocol):
    def stop(self) -> Any: ...


_T = TypeVar("_T", bound=_Stopped)


class PerTraining(Generic[_T]):
    """One of it for each training, with a folder of its own."""

    def __init__(self, folder: str | None, make: Callable[[str | None], _T]) -> None:
        self.last: _T | None = None
        self._folder = folder
        self._make = make
        self._count = 0
        # Before the framework's own trainer is called, which would not see it any more.
        hook_module("marks").install_all()

    def begin(self) -> None:
        self.end()  # of a training that failed, and so did not say that it ended
        self._count += 1
        folder = self._folder
        if folder is not None and self._count > 1:
            folder = f"{folder}-{self._count}"
        self.last = self._make(folder)

    def end(self) -> None:
        if self.last is not None:
            self.last.stop()


def traced_training(folder: str | None, options: Mapping[str, Any]) -> PerTraining[Trace]:
    hook_module("windows").asked = True
    return PerTraining(folder, lambda here: Trace(None, here, **options))
