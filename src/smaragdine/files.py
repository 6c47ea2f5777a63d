"""JSON from files that anybody may have written or edited: bounded, and only one kind of mistake."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_MOST_BYTES = 256 << 20
_MOST_WHOLE = 2**64  # beyond it no number of ours fits
_MOST_DIGITS = 30


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds, every number finite. Raises OSError, or ValueError for whatever is wrong with
    it: text that is no UTF-8, a number that is none, brackets too deep."""
    file = Path(path)
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
    return parse_json(file.read_bytes())


def parse_json(
    text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None, nan: bool = False
) -> Any:
    """`pairs` makes what an object becomes; `nan`: what Python writes for numbers that are none is read."""
    constant = None if nan else _constant
    try:
        return json.loads(
            text, parse_float=_float, parse_int=_int, parse_constant=constant, object_pairs_hook=pairs
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _float(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word[:_MOST_DIGITS]} is beyond what a number can be")
    return value


def _int(word: str) -> int:
    if len(word) > _MOST_DIGITS or abs(value := int(word)) > _MOST_WHOLE:
        raise ValueError(f"{word[:_MOST_DIGITS]} is beyond what a number can be")
    return value


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number in JSON")
