"""The rows of a sweep as groups of measurements: what the limit is, and what tells groups apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from smaragdine.errors import UserError
from smaragdine.sweep.measured import LEAST_STEPS
from smaragdine.sweep.measurements import Group, Of, Value
from smaragdine.sweep.table import Repetition

_UNITS = {"power": "W", "clock": "MHz", "parameter": ""}
ENERGIES = ("energy_j", "energy_counter_j")


@dataclass(frozen=True)
class SweepGroups:
    groups: list[Group]
    settings: list[Mapping[str, list[Repetition]]]  # of each group by rising limit, such as 150 W → its runs
    unfinished: int  # repetitions that are left out, for they did not complete or lack a figure
    steps_part: float | None = None  # of the programs' time, where steps were announced


@dataclass(frozen=True)
class _Row:
    at: float  # the limit
    time_s: float
    used_j: float
    row: Repetition


def groups_of_sweep(
    rows: Sequence[Repetition],
    limit: str | None = None,
    energy: str = "energy_j",
    of: Of = "program",
) -> SweepGroups:
    """A group for every experiment, benchmark, kind of device and setting. `limit` names a parameter."""
    if energy not in ENERGIES:
        raise UserError(f"a sweep has no energy {energy}", remedy=f"There are: {', '.join(ENERGIES)}")
    if of == "steps" and energy != "energy_j":
        raise UserError(f"{energy} of steps is not known", "the counter is read too seldom", "Leave it out")
    if not rows:
        raise UserError("the sweep has no repetition yet", remedy="Let it run on")
    found: dict[tuple[tuple[str, Value], ...], list[_Row]] = {}
    kinds: dict[tuple[tuple[str, Value], ...], tuple[str, str]] = {}
    names = {row.device_name for row in rows}
    unfinished = 0
    for row in rows:
        time_s, used_j = _figures(row, energy, of)
        if row.status != "complete" or time_s is None or used_j is None:
            unfinished += 1
            continue
        at, name, kept = _limit(row, limit)
        by: dict[str, Value] = {"experiment": row.experiment, "benchmark": row.benchmark, **kept}
        if len(names) > 1:
            by["device_name"] = row.device_name
        key = tuple(by.items())
        found.setdefault(key, []).append(_Row(at, time_s, used_j, row))
        kinds[key] = _UNITS[row.limit_kind], name
    if not found and of == "steps":
        raise _no_steps(rows)
    if not found:
        raise UserError(f"no repetition of the sweep has time and {energy}", f"{unfinished} have not")
    groups: list[Group] = []
    settings: list[Mapping[str, list[Repetition]]] = []
    for key, measured in found.items():
        at, time_s, used_j = np.array(sorted((each.at, each.time_s, each.used_j) for each in measured)).T
        unit, name = kinds[key]
        groups.append(Group(dict(key), at, time_s, used_j, unit, limit_name=name, of=of))
        settings.append(_settings(measured, name))
    return SweepGroups(groups, settings, unfinished, _steps_part(rows))


def _settings(measured: Sequence[_Row], parameter: str) -> dict[str, list[Repetition]]:
    found: dict[float, list[Repetition]] = {}
    for each in sorted(measured, key=lambda each: (each.at, each.row.repetition)):
        found.setdefault(each.at, []).append(each.row)
    return {_words(rows[0], parameter): rows for rows in found.values()}


def _words(row: Repetition, parameter: str) -> str:
    """The limit of a row: `150 W`, `877/1005 MHz`, `batch 16`."""
    if parameter:
        return f"{parameter} {row.parameters[parameter]}"
    if row.limit_kind == "power":
        return f"{row.power_limit_w:g} W"
    memory = "" if row.memory_clock_mhz is None else f"{row.memory_clock_mhz:g}/"
    return f"{memory}{row.graphics_clock_mhz:g} MHz"


def _figures(row: Repetition, energy: str, of: Of) -> tuple[float | None, float | None]:
    if of == "steps":
        return row.steps_time_s, row.steps_energy_j
    return row.time_s, row.energy_j if energy == "energy_j" else row.energy_counter_j


def _steps_part(rows: Sequence[Repetition]) -> float | None:
    known = [
        (row.steps_time_s, row.time_s)
        for row in rows
        if row.status == "complete" and row.steps_time_s is not None and row.time_s is not None
    ]
    return sum(steps_s for steps_s, _ in known) / sum(whole_s for _, whole_s in known) if known else None


def _no_steps(rows: Sequence[Repetition]) -> UserError:
    what = "no repetition of the sweep has time and energy of its steps"
    whole = "Fit whole programs: --of program"
    most = max((row.steps or 0 for row in rows if row.status == "complete"), default=0)
    if not most:
        return UserError(what, "none was announced", f'{whole}. Or mark them: smaragdine.mark("step_end", n)')
    if most < LEAST_STEPS:
        return UserError(what, f"{most} of the {LEAST_STEPS} that it takes were announced", whole)
    return UserError(what, "their power was not read", whole)


def _limit(row: Repetition, named: str | None) -> tuple[float, str, dict[str, Value]]:
    """The limit's value, its name where it is a parameter, and the settings beside it."""
    if row.limit_kind == "power" and row.power_limit_w is not None:
        return row.power_limit_w, "", dict(row.parameters)
    if row.limit_kind == "clock" and row.graphics_clock_mhz is not None:
        memory = {} if row.memory_clock_mhz is None else {"memory_clock_mhz": row.memory_clock_mhz}
        return row.graphics_clock_mhz, "", {**memory, **row.parameters}
    numbers = [
        name
        for name, value in row.parameters.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if named is None and len(numbers) != 1:
        if not numbers:
            why = f"there is only {', '.join(row.parameters)}"
            remedy = "The sweep's results.parquet has the figures"
            raise UserError("a fit needs a parameter that is a number", why, remedy)
        there = ", ".join(numbers)
        raise UserError("which parameter is the limit?", f"numbers are: {there}", "Name one with --limit")
    name = named or numbers[0]
    if name not in numbers:
        raise UserError(f"no parameter {name} that is a number", f"there are: {', '.join(numbers) or 'none'}")
    return float(row.parameters[name]), name, {k: v for k, v in row.parameters.items() if k != name}
