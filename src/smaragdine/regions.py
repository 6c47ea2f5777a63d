"""`region`: a stretch of the program that has a name, measured every time it runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from smaragdine.api import hook_module


def _compiling() -> bool:
    """A constant under torch.compile, which then sees an empty function."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and compiler.is_compiling()


_Function = TypeVar("_Function", bound=Callable[..., Any])
_numbers = itertools.count()  # what tells one time from another, also in threads


class Region:
    """Around a block, or a function; does nothing where nobody records.

    with smaragdine.region("load"):          @smaragdine.region("forward", sync=True)
        batch = next(batches)                def forward(batch): …

    A GPU works behind the program: what a block has started may run after it. `sync` waits for PyTorch's
    work at both ends, which takes the program time. Inside what torch.compile compiles there is no region:
    its kernels have no begin and end that Python could see.
    """

    def __init__(self, name: str, *, sync: bool = False) -> None:
        self.name = str(name)
        self._sync = sync
        self._begun: list[int] = []

    def __enter__(self) -> Region:
        if _compiling():
            return self
        self._begun.append(next(_numbers))
        self._mark("region_begin", self._begun[-1])
        return self

    def __exit__(self, *_: object) -> None:
        if _compiling():
            return
        self._mark("region_end", self._begun.pop())

    def __call__(self, function: _Function) -> _Function:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__name__} runs in pieces: put `with smaragdine.region(…):` around one, inside it"
            )

        def again() -> Region:
            return Region(self.name, sync=self._sync)

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with again():
                return function(*args, **kwargs)

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with again():
                return await function(*args, **kwargs)

        return cast(_Function, awaited if inspect.iscoroutinefunction(function) else measured)

    def _mark(self, name: str, number: int) -> None:
        marks = hook_module("marks")
        if self._sync and "torch" in sys.modules and marks.wanted():
            # What is wrong with the GPU, the program's own next call will say.
            with contextlib.suppress(Exception):
                hook_module("captures_torch").wait_for_gpu()
        marks.mark(name, number, source="region", detail=self.name)
