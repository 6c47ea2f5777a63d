"""Published measurements of training: time and power per epoch, and epochs to reach a metric, as CSV."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smaragdine.errors import UserError
from smaragdine.recording.columns import need_one_of_each

_WORKLOAD = ("dataset", "network", "optimizer")


@dataclass(frozen=True)
class Epoch:
    """An epoch of a workload on a GPU."""

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
    """How many epochs one training run took to reach its target; None: it never did."""

    workload: str
    batch: int
    run: int
    target: float
    epochs: float | None


def read_epochs(path: str | os.PathLike[str], gpu: str | None = None) -> list[Epoch]:
    """`dataset, network, batch_size, optimizer, power_limit, time_per_epoch, average_power`; the GPU is the
    last word of the file's name (summary_power_v100.csv) unless it is given."""
    file = Path(path)
    name = gpu or file.stem.rpartition("_")[2]
    found: list[Epoch] = []
    for row in _rows(file, (*_WORKLOAD, "batch_size", "power_limit", "time_per_epoch", "average_power")):
        limit_w, time_s, power_w = (
            _number(file, row, field) for field in ("power_limit", "time_per_epoch", "average_power")
        )
        if not (limit_w > 0 and time_s > 0 and power_w > 0):
            raise UserError(f"{file} has a bad row", f"{row}", "Power, time and limit must be above 0")
        found.append(Epoch(name, _workload(row), _whole(file, row, "batch_size"), limit_w, time_s, power_w))
    return found


def read_trainings(path: str | os.PathLike[str]) -> list[Training]:
    """`dataset, network, batch_size, optimizer, run, target_metric, target_epoch`."""
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
