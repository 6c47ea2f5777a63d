"""The rows of a sweep as groups of measurements: what the limit is, and what tells groups apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smaragdine.errors import UserError
from smaragdine.sweep.measurements import Group, Value
from smaragdine.sweep.table import Repetition

_UNITS = {"power": "W", "clock": "MHz", "parameter": ""}
ENERGIES = ("energy_j", "energy_counter_j")


@dataclass(frozen=True)
class SweepGroups:
    groups: list[Group]
    unfinished: int  # repetitions that are left out, for they did not complete or lack a figure


def groups_of_sweep(
    rows: Sequence[Repetition], limit: str | None = None, energy: str = "energy_j"
) -> SweepGroups:
    """A group for every experiment, benchmark, kind of device and setting. `limit` names a parameter."""
    if energy not in ENERGIES:
        raise UserError(f"a sweep has no energy {energy}", remedy=f"There are: {', '.join(ENERGIES)}")
    if not rows:
        raise UserError("the sweep has no repetition yet", remedy="Let it run on")
    found: dict[tuple[tuple[str, Value], ...], list[tuple[float, float, float]]] = {}
    kinds: dict[tuple[tuple[str, Value], ...], str] = {}
    names = {row.device_name for row in rows}
    unfinished = 0
    for row in rows:
        used_j = row.energy_j if energy == "energy_j" else row.energy_counter_j
        if row.status != "complete" or row.time_s is None or used_j is None:
            unfinished += 1
            continue
        at, kept = _limit(row, limit)
        by: dict[str, Value] = {"experiment": row.experiment, "benchmark": row.benchmark, **kept}
        if len(names) > 1:
            by["device_name"] = row.device_name
        key = tuple(by.items())
        found.setdefault(key, []).append((at, row.time_s, used_j))
        kinds[key] = row.limit_kind
    if not found:
        raise UserError(f"no repetition of the sweep has time and {energy}", f"{unfinished} have not")
    groups: list[Group] = []
    for key, measured in found.items():
        at, time_s, used_j = np.array(sorted(measured)).T
        groups.append(Group(dict(key), at, time_s, used_j, _UNITS[kinds[key]]))
    return SweepGroups(groups, unfinished)


def _limit(row: Repetition, named: str | None) -> tuple[float, dict[str, Value]]:
    """The limit's value, and the settings beside it."""
    if row.limit_kind == "power" and row.power_limit_w is not None:
        return row.power_limit_w, dict(row.parameters)
    if row.limit_kind == "clock" and row.graphics_clock_mhz is not None:
        memory = {} if row.memory_clock_mhz is None else {"memory_clock_mhz": row.memory_clock_mhz}
        return row.graphics_clock_mhz, {**memory, **row.parameters}
    numbers = [
        name
        for name, value in row.parameters.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if named is None and len(numbers) != 1:
        there = ", ".join(numbers) or "none"
        raise UserError("which parameter is the limit?", f"numbers are: {there}", "Name one with --limit")
    name = named or numbers[0]
    if name not in numbers:
        raise UserError(f"no parameter {name} that is a number", f"there are: {', '.join(numbers) or 'none'}")
    return float(row.parameters[name]), {k: v for k, v in row.parameters.items() if k != name}
