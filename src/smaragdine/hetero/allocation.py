"""What `split` was given: samples per rank, and the limits that go with them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from smaragdine.errors import UserError
from smaragdine.files import read_json

_MOST = 10**9


@dataclass(frozen=True)
class Allocation:
    """By rank."""

    batches: tuple[int, ...]
    power_limits_w: tuple[float, ...] | None = None
    gpus: tuple[str, ...] = ()  # names in the file


def read_allocation(path: str | os.PathLike[str], method: str | None = None) -> Allocation:
    """An answer of `smaragdine allocate --json`: `method`'s, else the cheapest that is fast enough."""
    file = Path(path)
    try:
        values = read_json(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read", error.strerror or str(error)) from None
    except ValueError as error:
        raise _bad(file, f"not JSON: {error}") from None
    try:
        answers: dict[str, Any] = {str(each["method"]): each for each in values["methods"]}
        chosen = method or min(answers, key=lambda name: _preference(answers[name]))
        if chosen not in answers:
            raise UserError(f"{file} has no method {chosen}", remedy=f"There are: {', '.join(answers)}")
        rows: Sequence[Mapping[str, Any]] = answers[chosen]["allocation"]
        found = Allocation(
            checked_batches([row["batch"] for row in rows], str(file)),
            tuple(float(row["power_limit_w"]) for row in rows),
            tuple(str(row["gpu"]) for row in rows),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(file, f"{type(error).__name__} {error}") from None
    return found


def _preference(answer: Mapping[str, Any]) -> tuple[bool, float, bool]:
    """What keeps to the slowdown that was asked for comes first, however much cheaper a slower one is. An
    answer that was preferred to one it cannot be told from stands for it."""
    least = float(answer.get("tie", answer)["cost"])
    return bool(answer.get("too_slow")), float(f"{least:.9g}"), answer["method"] != "optimal"


def checked_batches(batches: Sequence[Any], where: str = "the split") -> tuple[int, ...]:
    if not batches:
        raise UserError(f"{where} has no rank", remedy="Give the samples of each rank: split([3, 5])")
    for rank, batch in enumerate(batches):
        if not isinstance(batch, int) or isinstance(batch, bool) or not 0 <= batch <= _MOST:
            raise UserError(f"{where} has a bad batch for rank {rank}", f"{batch!r} is no number of samples")
        if not batch:
            raise UserError(f"{where} gives rank {rank} no samples", remedy="Start the job without that rank")
    return tuple(batches)


def checked_limits(limits_w: Sequence[Any], ranks: int) -> tuple[float, ...]:
    if len(limits_w) != ranks:
        raise UserError(f"{len(limits_w)} power limits for {ranks} ranks", remedy="Give one for each")
    for limit in cast("Sequence[object]", limits_w):
        if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 < limit < 1e5:
            raise UserError(f"a power limit of {limit!r}", "not a power above 0 W")
    return tuple(float(limit) for limit in limits_w)


def _bad(file: Path, why: str) -> UserError:
    return UserError(f"{file} is no allocation", why, "Make one: smaragdine allocate … --json > FILE")
