"""Reads measurements, from any table (CSV, TSV, Parquet, Arrow) or from a sweep, as groups to fit."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from smaragdine.arrays import Floats
from smaragdine.errors import UserError
from smaragdine.recording import tables
from smaragdine.sweep.table import LEAST_STEPS, Repetition

Value = str | int | float | bool | None
Of = Literal["program", "steps"]

_WHOLE = re.compile(r"0|-?[1-9]\d{0,17}")
_COUNTS_REPEATS = re.compile(
    r"(repetition|repeat|rep|run|seed|trial|iteration)s?(_?(id|index|number))?", re.I
)


@dataclass(frozen=True)
class ColumnNames:
    """Which columns hold what. Energy has its own column, or is power × time."""

    limit: str
    time: str
    power: str | None = None
    energy: str | None = None
    by: tuple[str, ...] = ()

    @property
    def measured(self) -> tuple[str, ...]:
        return tuple(name for name in (self.limit, self.time, self.power, self.energy) if name is not None)


@dataclass(frozen=True)
class Group:
    """Measurements of one workload by rising limit; several at one limit are repetitions."""

    by: dict[str, Value]
    limit: Floats
    time_s: Floats
    energy_j: Floats
    unit: str = ""  # of the limit
    differing: tuple[str, ...] = ()  # columns in which rows of one limit differ: they may be no repetitions
    limit_name: str = ""  # the name of a parameter or a column
    of: Of | None = None  # what time and energy cover; None: a foreign table does not say


def read_groups(path: str | os.PathLike[str], columns: ColumnNames, repeated: bool = False) -> list[Group]:
    """Reads groups from a file. Without `--by`, several rows of one limit need `repeated`."""
    where = os.fspath(path)
    return groups_of(read_measurements(path), columns, where, repeated or bool(columns.by))


def read_measurements(path: str | os.PathLike[str]) -> pa.Table:
    """Reads all columns of a file; those of a text file are text."""
    where = os.fspath(path)
    content = tables.read_content(path)
    kind = tables.kind_of(content, path)
    if kind in ("json", "xplane") or (
        kind == "unknown" and b"\0" in bytes(content[: min(4096, content.size)])
    ):
        raise UserError(f"{where} is no table", remedy="CSV, TSV, Parquet and Arrow are read")
    if kind in ("csv", "unknown"):
        return _read_text(content, where)
    if kind == "parquet":
        import pyarrow.parquet as pq

        try:
            names = pq.read_schema(pa.BufferReader(content)).names
        except (OSError, pa.ArrowException, ValueError):
            names = []  # read_table will say what is wrong
        return tables.read_table(content, kind, names, (), where)
    return tables.read_table(content, kind, (), (), where)


def groups_of(table: pa.Table, columns: ColumnNames, where: str, repeated: bool = True) -> list[Group]:
    if columns.power is None and columns.energy is None:
        raise UserError(f"{where}: no energy", "neither power nor energy is named", "Name a column of either")
    for name in columns.by:
        if name in columns.measured:
            raise UserError(f"{name} cannot be in --by", "it is what is fitted")
    tables.need_columns(table, list(dict.fromkeys((*columns.measured, *columns.by))), (), where)
    values = {name: tables.number(table, name, where).to_numpy() for name in columns.measured}
    limit, time_s = values[columns.limit], values[columns.time]
    tables.refuse(where, columns.time, time_s <= 0, "is not above 0")
    if columns.energy is not None:
        energy_j = values[columns.energy]
        tables.refuse(where, columns.energy, energy_j < 0, "is negative")
    else:
        power = columns.power or ""
        tables.refuse(where, power, values[power] < 0, "is negative")
        with np.errstate(over="ignore"):
            energy_j = values[power] * time_s
        tables.refuse(
            where, f"{power} × {columns.time}", ~np.isfinite(energy_j), "is beyond what a number can be"
        )
    once = [name for name in table.column_names if table.column_names.count(name) == 1]
    words = {name: _values(table[name]) for name in once if name not in columns.measured}
    rows_of: dict[tuple[Value, ...], list[int]] = {}
    for row, key in enumerate(zip(*(words[name] for name in columns.by), strict=True)) if columns.by else ():
        rows_of.setdefault(key, []).append(row)
    if not columns.by:
        rows_of[()] = list(range(table.num_rows))
        if not repeated:
            _refuse_repeated(limit, columns, [*words], where)
    groups: list[Group] = []
    for key in sorted(rows_of, key=lambda key: [_order(value) for value in key]):
        rows = np.array(rows_of[key])
        rows = rows[np.argsort(limit[rows], kind="stable")]
        others = {name: [column[i] for i in rows] for name, column in words.items() if name not in columns.by}
        by = dict(zip(columns.by, key, strict=True))
        differing = tuple(name for name, column in others.items() if _tells_apart(name, column, limit[rows]))
        unit, name = unit_of(columns.limit), columns.limit
        groups.append(Group(by, limit[rows], time_s[rows], energy_j[rows], unit, differing, name))
    return groups


def unit_of(column: str) -> str:
    """The unit of a limit, as far as the column's name tells."""
    name = column.lower()
    for unit, words in (("W", r"power|watts?|_w$"), ("MHz", r"clock|mhz")):
        if re.search(words, name):
            return unit
    return ""


def _read_text(content: pa.Buffer, where: str) -> pa.Table:
    import pyarrow.csv as pv

    tables.check_text(content, where)
    delimiter = max("\t,;", key=tables.first_line(content).decode("utf-8", "replace").count)
    names, _ = tables.csv_header(content, delimiter)
    uneven: list[Any] = []

    def note(row: Any) -> str:
        uneven.append(row)
        return "error"

    try:
        table = pv.read_csv(
            pa.BufferReader(content),
            # With a single thread, rows have numbers.
            read_options=pv.ReadOptions(column_names=names, skip_rows=1, use_threads=False),
            parse_options=pv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, invalid_row_handler=note
            ),
            convert_options=pv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
        return tables.unguarded(table)
    except pa.ArrowInvalid as error:
        if uneven:
            row = uneven[0]
            why = f"it has {row.actual_columns} of {row.expected_columns} columns"
            raise UserError(f"{where}, row {row.number - 1}", why) from None
        why = str(error).splitlines()[0]
        if "Empty CSV" in why:
            raise UserError(f"{where} has no rows") from None
        raise UserError(f"{where} cannot be read as a table", why) from None


def _values(column: pa.ChunkedArray) -> list[Value]:
    """Turns a text column of whole numbers into numbers."""
    plain = (str, int, float, bool, type(None))
    values: list[Value] = [v if isinstance(v, plain) else str(v) for v in column.to_pylist()]
    values = [v.strip() if isinstance(v, str) else v for v in values]
    whole = bool(values) and all(isinstance(v, str) and _WHOLE.fullmatch(v) for v in values)
    return [int(str(v)) for v in values] if whole else values


def _order(value: Value) -> tuple[int, float, str]:
    if isinstance(value, int | float):
        return 0, float(value), ""
    return 1, 0.0, str(value)


def _refuse_repeated(limit: Floats, columns: ColumnNames, others: Sequence[str], where: str) -> None:
    different, counts = np.unique(limit, return_counts=True)
    if counts.max() > 1:
        most = int(np.argmax(counts))
        kept = f" ({', '.join(others[:12])})" if others else ""
        raise UserError(
            f"{where} has {counts[most]} rows with {columns.limit} {different[most]:g}",
            "" if others else "and no other column to tell them apart",
            f"Name what tells them apart with --by COL,…{kept}, or say --repeated if they are repetitions",
        )


def _tells_apart(name: str, column: Sequence[Value], limit: Floats) -> bool:
    """Whether a column looks like a setting that was forgotten in `--by`: text that differs between rows of
    one limit, or numbers of which every limit has the same choice. A count of repetitions does not."""
    if _COUNTS_REPEATS.fullmatch(name):
        return False
    at: dict[float, set[Value]] = {}
    for here, value in zip(limit.tolist(), column, strict=True):
        at.setdefault(here, set()).add(value)
    if max(map(len, at.values())) < 2:
        return False
    numbers = all(isinstance(value, int | float) or _is_number(value) for value in column)
    return not numbers or (len(at) > 1 and len({frozenset(values) for values in at.values()}) == 1)


def _is_number(value: Value) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return True


# Rows of a sweep as groups: what the limit is, and what tells groups apart.

_UNITS = {"power": "W", "clock": "MHz", "parameter": ""}
ENERGIES = ("energy_j", "energy_counter_j")


@dataclass(frozen=True)
class SweepGroups:
    groups: list[Group]
    settings: list[Mapping[str, list[Repetition]]]  # per group by rising limit: 150 W → its runs
    unfinished: int  # repetitions left out: not complete, or without a figure
    steps_part: float | None = (
        None  # the part of the programs' time that steps took; None: none were announced
    )


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
    """A group for every experiment, benchmark, kind of device and setting. `limit` may name a parameter."""
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
    """The limit of a row in words: `150 W`, `877/1005 MHz`, `batch 16`."""
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
    """The limit's value, its name if it is a parameter, and the settings beside it."""
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
