"""Reads profiles and published measurements: energy and time over batch sizes and power limits.

A profile in JSON is `{batch: [{power_limit, energy, time}, …]}`, one measurement each. Our own Parquet has a
row per repeat (`COLUMNS`), so it also knows their spread.
"""

from __future__ import annotations

import csv
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from smaragdine.errors import UserError
from smaragdine.files import read_json
from smaragdine.recording.tables import need_one_of_each
from smaragdine.stats import MOST_SQUARED

COLUMNS: Mapping[str, str] = {
    "gpu": "string",
    "batch": "int64",
    "power_limit_w": "double",
    "repeat": "int64",
    "steps": "int64",  # the figures are their sum
    "time_s": "double",
    "energy_j": "double",
    "out_of_memory": "bool",  # if so, steps is 0, and time and energy are null
    "idle_w": "double",  # the GPU's, the same in all rows; null: not measured
    "wait_w": "double",  # while it waits for others in an all-reduce
}


@dataclass(frozen=True)
class Repeat:
    """One measurement; `time_s` and `energy_j` are per step."""

    batch: int
    power_limit_w: float
    time_s: float
    energy_j: float


@dataclass(frozen=True)
class Point:
    """A step at one batch size and limit: means over repeats, and the covariance of these means."""

    batch: int
    power_limit_w: float
    time_s: float
    energy_j: float
    repeats: int = 1
    time_variance: float | None = None  # s²; None: a single repeat has no spread
    energy_variance: float | None = None
    covariance: float | None = None  # J·s


@dataclass(frozen=True)
class Profile:
    gpu: str
    batches: tuple[int, ...]  # rising
    power_limits_w: tuple[float, ...]  # rising
    points: Mapping[tuple[int, float], Point]
    idle_w: float | None = None
    wait_w: float | None = None
    out_of_memory: tuple[int, ...] = ()  # batch sizes that did not fit


def read_profile(path: str | os.PathLike[str], gpu: str) -> Profile:
    """Reads a file as the profile of `gpu`; from a Parquet file of several GPUs, the one of that name."""
    file = Path(path)
    try:
        with file.open("rb") as source:
            parquet = source.read(4) == b"PAR1"
    except OSError as error:
        raise UserError(f"{file} cannot be read", error.strerror or str(error)) from None
    return _read_parquet(file, gpu) if parquet else _read_json(file, gpu)


def profile_of(
    gpu: str,
    repeats: Iterable[Repeat],
    idle_w: float | None = None,
    wait_w: float | None = None,
    out_of_memory: Sequence[int] = (),
    where: str = "",
) -> Profile:
    """Makes a profile of measurements, and checks that every batch size has the same limits."""
    where = where or gpu
    measured: dict[tuple[int, float], list[Repeat]] = {}
    for repeat in repeats:
        _check(repeat, where)
        measured.setdefault((repeat.batch, repeat.power_limit_w), []).append(repeat)
    batches = tuple(sorted({batch for batch, _ in measured}))
    limits_w = tuple(sorted({limit for _, limit in measured}))
    if len(batches) < 2:
        found = f"batch size {batches[0]} alone" if batches else "no batch size"
        raise UserError(
            f"{where} cannot be modelled", f"it has {found}", "Profile two batch sizes or more, better five"
        )
    for batch in batches:
        missing = [limit for limit in limits_w if (batch, limit) not in measured]
        if missing:
            raise UserError(
                f"{where} has batch sizes measured at different limits",
                f"batch {batch} was not measured at {missing[0]:g} W",
                "Profile every batch size at the same limits",
            )
    for name, value in (("idle", idle_w), ("wait", wait_w)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UserError(f"{where} has a bad {name} power", f"{value} W")
    points = {key: _point(each) for key, each in measured.items()}
    return Profile(gpu, batches, limits_w, points, idle_w, wait_w, tuple(sorted(set(out_of_memory))))


def _check(repeat: Repeat, where: str) -> None:
    at = f"batch {repeat.batch} at {repeat.power_limit_w:g} W"
    if repeat.batch < 1:
        raise UserError(f"{where} has a bad batch size", f"{repeat.batch} is not above 0")
    if not (math.isfinite(repeat.power_limit_w) and repeat.power_limit_w > 0):
        raise UserError(f"{where} has a bad power limit", f"{repeat.power_limit_w} W is not above 0")
    for name, value, unit in (("time", repeat.time_s, "s"), ("energy", repeat.energy_j, "J")):
        if not 0 < value < MOST_SQUARED:
            raise UserError(
                f"{where} has a bad {name} for {at}",
                f"{value:g} {unit} is {'no figure' if value >= MOST_SQUARED else 'not above 0'}",
                "Profile it again, for longer",
            )


def _point(repeats: Sequence[Repeat]) -> Point:
    first, count = repeats[0], len(repeats)
    times = [repeat.time_s for repeat in repeats]
    energies = [repeat.energy_j for repeat in repeats]
    spread = (None, None, None)
    if count > 1:
        spread = (
            statistics.variance(times) / count,
            statistics.variance(energies) / count,
            statistics.covariance(times, energies) / count,
        )
    mean_s, mean_j = statistics.fmean(times), statistics.fmean(energies)
    return Point(first.batch, first.power_limit_w, mean_s, mean_j, count, *spread)


def _read_json(file: Path, gpu: str) -> Profile:
    try:
        values = read_json(file)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} is no profile", f"not JSON: {error}", "It is made by smaragdine profile"
        ) from None
    if not isinstance(values, dict) or not values:
        raise UserError(f"{file} is no profile", "it is not {batch: [{power_limit, energy, time}, …]}")
    repeats: list[Repeat] = []
    for key, rows in cast("dict[str, Any]", values).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise UserError(f"{file} is no profile", f"{key[:40]!r} is not a batch size")
        if not isinstance(rows, list):
            raise UserError(f"{file} is no profile", f"batch {key} has no list of measurements")
        seen: set[float] = set()
        for row in cast("list[Any]", rows):
            repeat = _json_repeat(file, int(key), row)
            if repeat.power_limit_w in seen:
                raise UserError(f"{file} has batch {key} twice at {repeat.power_limit_w:g} W")
            seen.add(repeat.power_limit_w)
            repeats.append(repeat)
        if not rows:
            raise UserError(f"{file} has no measurement for batch {key}", remedy="Leave the batch size out")
    return profile_of(gpu, repeats, where=str(file))


def _json_repeat(file: Path, batch: int, row: Any) -> Repeat:
    fields = ("power_limit", "time", "energy")
    given = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
    for field in fields:
        if not isinstance(given.get(field), int | float) or isinstance(given[field], bool):
            raise UserError(f"{file} is no profile", f"batch {batch} has a measurement without {field}")
    limit_w, time_s, energy_j = (float(given[field]) for field in fields)
    return Repeat(batch, limit_w, time_s, energy_j)


def _read_parquet(file: Path, gpu: str) -> Profile:
    import pyarrow as pa

    from smaragdine.recording.tables import read_content, read_table

    table = read_table(read_content(file), "parquet", list(COLUMNS), (), str(file))
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise UserError(f"{file} is no profile", f"it has no column {missing[0]}")
    try:
        table = table.select(list(COLUMNS)).cast(_schema())
    except pa.ArrowException as error:
        raise UserError(f"{file} is no profile", str(error)) from None
    rows = table.to_pylist()
    names = sorted({str(row["gpu"]) for row in rows})
    if len(names) > 1:
        rows = [row for row in rows if row["gpu"] == gpu]
        if not rows:
            raise UserError(f"{file} has no GPU named {gpu}", remedy=f"There are: {', '.join(names)}")
    return _from_rows(file, gpu, rows)


def _from_rows(file: Path, gpu: str, rows: Sequence[Mapping[str, Any]]) -> Profile:
    repeats: list[Repeat] = []
    too_large: list[int] = []
    for row in rows:
        if row["batch"] is None or row["power_limit_w"] is None:
            raise UserError(f"{file} is no profile", "a row has no batch or power limit")
        if row["out_of_memory"]:
            too_large.append(row["batch"])
            continue
        steps, time_s, energy_j = row["steps"], row["time_s"], row["energy_j"]
        if not steps or steps < 0 or time_s is None or energy_j is None:
            raise UserError(
                f"{file} is no profile", f"batch {row['batch']} has a row without steps or figures"
            )
        repeats.append(Repeat(row["batch"], row["power_limit_w"], time_s / steps, energy_j / steps))
    idle_w, wait_w = (
        next((row[name] for row in rows if row[name] is not None), None) for name in ("idle_w", "wait_w")
    )
    fitting = [repeat for repeat in repeats if repeat.batch not in too_large]
    return profile_of(gpu, fitting, idle_w, wait_w, too_large, str(file))


def profile_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows of `COLUMNS` as an Arrow table; missing values are null."""
    import pyarrow as pa

    return pa.Table.from_pylist([{name: row.get(name) for name in COLUMNS} for row in rows], _schema())


def _schema() -> Any:
    import pyarrow as pa

    types = {"string": pa.string(), "int64": pa.int64(), "double": pa.float64(), "bool": pa.bool_()}
    return pa.schema([(name, types[kind]) for name, kind in COLUMNS.items()])


# Published measurements of training as CSV: time and power per epoch, and epochs until a metric is reached.

_WORKLOAD = ("dataset", "network", "optimizer")


@dataclass(frozen=True)
class MeasuredEpoch:
    """One epoch of a workload on a GPU."""

    gpu: str
    workload: str  # dataset/network/optimizer
    batch: int
    power_limit_w: float
    time_s: float
    power_w: float  # mean

    @property
    def energy_j(self) -> float:
        return self.power_w * self.time_s


@dataclass(frozen=True)
class Training:
    """How many epochs one training took to reach its target; None: it never did."""

    workload: str
    batch: int
    run: int
    target: float
    epochs: float | None


def read_epochs(path: str | os.PathLike[str], gpu: str | None = None) -> list[MeasuredEpoch]:
    """Reads `dataset, network, batch_size, optimizer, power_limit, time_per_epoch, average_power`. Unless
    given, the GPU is the last word of the file's name (summary_power_v100.csv)."""
    file = Path(path)
    name = gpu or file.stem.rpartition("_")[2]
    found: list[MeasuredEpoch] = []
    for row in _rows(file, (*_WORKLOAD, "batch_size", "power_limit", "time_per_epoch", "average_power")):
        limit_w, time_s, power_w = (
            _number(file, row, field) for field in ("power_limit", "time_per_epoch", "average_power")
        )
        if not (limit_w > 0 and time_s > 0 and power_w > 0):
            raise UserError(f"{file} has a bad row", f"{row}", "Power, time and limit must be above 0")
        found.append(
            MeasuredEpoch(name, _workload(row), _whole(file, row, "batch_size"), limit_w, time_s, power_w)
        )
    return found


def read_trainings(path: str | os.PathLike[str]) -> list[Training]:
    """Reads `dataset, network, batch_size, optimizer, run, target_metric, target_epoch`."""
    file = Path(path)
    found: list[Training] = []
    for row in _rows(file, (*_WORKLOAD, "batch_size", "run", "target_metric", "target_epoch")):
        epochs = _number(file, row, "target_epoch", may_be_nan=True)
        found.append(
            Training(
                _workload(row),
                _whole(file, row, "batch_size"),
                _whole(file, row, "run"),
                _number(file, row, "target_metric"),
                None if math.isnan(epochs) else epochs,
            )
        )
    return found


def _workload(row: dict[str, str]) -> str:
    return "/".join(row[field] for field in _WORKLOAD)


def _rows(file: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    try:
        with file.open(newline="", encoding="utf-8") as source:
            reader = csv.DictReader(source)
            fields = list(reader.fieldnames or ())
            need_one_of_each(fields, needed, str(file))
            missing = [field for field in needed if field not in fields]
            if missing:
                raise UserError(f"{file} cannot be used", f"it has no column {missing[0]}")
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file} cannot be read", str(getattr(error, "strerror", None) or error)) from None
    if not rows or any(row[field] is None for row in rows for field in needed):
        raise UserError(f"{file} cannot be used", "it has no rows, or rows that are cut off")
    return rows


def _number(file: Path, row: dict[str, str], field: str, may_be_nan: bool = False) -> float:
    try:
        value = float(row[field])
    except ValueError:
        value = math.inf
    if math.isinf(value) or (math.isnan(value) and not may_be_nan):
        raise UserError(f"{file} has a bad {field}", f"{row[field]!r} is not a number")
    return value


def _whole(file: Path, row: dict[str, str], field: str) -> int:
    value = _number(file, row, field)
    if value != int(value) or value < 0:
        raise UserError(f"{file} has a bad {field}", f"{row[field]!r} is not a whole number")
    return int(value)
