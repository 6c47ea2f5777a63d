"""What a notebook shows of an object. `report` registers the renderer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_how: list[Callable[[Any], str]] = []


def show_with(html: Callable[[Any], str]) -> None:
    """From now on this function shows every object."""
    _how[:] = [html]


class Shown:
    """An object that a notebook shows as the last line of a cell."""

    def _repr_html_(self) -> str | None:
        return _how[0](self) if _how else None
