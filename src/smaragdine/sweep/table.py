"""The results of a sweep: one row for every repetition, in `results.parquet` of the sweep's folder."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa

from smaragdine.errors import UserError
from smaragdine.files import parse_json
from smaragdine.whole import users_file

RESULTS = "results.parquet"
_FORMAT = 1
_VERSION = b"smaragdine.sweep"

LimitKind = Literal["power", "clock", "parameter"]

SCHEMA = pa.schema(
    [
        pa.field("experiment", pa.string(), nullable=False),
        pa.field("benchmark", pa.string(), nullable=False),
        pa.field("limit_kind", pa.string(), nullable=False),
        ("power_limit_w", pa.float64()),
        ("memory_clock_mhz", pa.float64()),
        ("graphics_clock_mhz", pa.float64()),
        ("parameters", pa.string()),  # JSON object
        pa.field("repetition", pa.int64(), nullable=False),
        pa.field("recording", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        ("node", pa.string()),
        ("device", pa.string()),
        ("device_name", pa.string()),
        ("provenance", pa.string()),
        ("time_s", pa.float64()),
        ("energy_j", pa.float64()),
        ("energy_counter_j", pa.float64()),
        ("edp_js", pa.float64()),
        ("ed2p_js2", pa.float64()),
        ("epoch_time_s", pa.list_(pa.float64())),
        ("epoch_energy_j", pa.list_(pa.float64())),
        ("steps", pa.int64()),
        ("steps_time_s", pa.float64()),
        ("steps_energy_j", pa.float64()),
    ],
    metadata={_VERSION: str(_FORMAT)},
)


@dataclass(frozen=True)
class Repetition:
    """One run of a benchmark at one limit. What could not be measured is None, never zero."""

    experiment: str
    benchmark: str
    limit_kind: LimitKind
    repetition: int  # from 0
    recording: str  # its folder, relative to the sweep's
    status: str  # complete, failed, killed, interrupted …, as a recording has it
    power_limit_w: float | None = None
    memory_clock_mhz: float | None = None
    graphics_clock_mhz: float | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])  # batch size, precision …
    node: str | None = None
    device: str | None = None  # gpu:0, or gpu:0 + gpu:1
    device_name: str | None = None  # NVIDIA H200
    provenance: str | None = None
    time_s: float | None = None
    energy_j: float | None = None  # Σ Δt·P of the power readings
    energy_counter_j: float | None = None
    epoch_time_s: tuple[float, ...] = ()
    epoch_energy_j: tuple[float | None, ...] = ()
    steps: int | None = None  # that were announced
    steps_time_s: float | None = None  # of all of them, without the program's start and end
    steps_energy_j: float | None = None

    @property
    def of_use(self) -> bool:
        """Whether it ended well and was measured: a program can do so with its recorder killed beside it."""
        measured = self.energy_j is not None or self.energy_counter_j is not None
        return self.status == "complete" and self.time_s is not None and measured

    @property
    def edp_js(self) -> float | None:
        return _times(self.energy_j, self.time_s)

    @property
    def ed2p_js2(self) -> float | None:
        return _times(self.edp_js, self.time_s)


_FIELDS = tuple(each.name for each in dataclasses.fields(Repetition))


def write_results(folder: str | os.PathLike[str], rows: Iterable[Repetition]) -> Path:
    """Write the whole table anew, in place of the one before; whole or not at all."""
    import pyarrow.parquet as pq

    path = Path(folder) / RESULTS
    with users_file(path) as part:
        pq.write_table(results_table(rows), part)
    return path


def read_results(folder: str | os.PathLike[str]) -> list[Repetition]:
    """The rows of a sweep's table, as they were written."""
    path = Path(folder) / RESULTS
    if not path.is_file():
        raise UserError(
            f"{folder} is no sweep", f"it has no {RESULTS}", "Name the folder that smaragdine sweep made"
        )
    from smaragdine.recording.table_files import kind_of, read_content, read_table

    content = read_content(path)
    if kind_of(content, path) != "parquet":
        raise UserError(f"{path} cannot be read as Parquet", remedy="Is it whole? Copy it anew")
    table = read_table(content, "parquet", SCHEMA.names, (), str(path))
    version = _version(table.schema)
    missing = [name for name in SCHEMA.names if name not in table.column_names]
    if version > _FORMAT:
        raise UserError(f"{path} is of a newer version of Smaragdine", remedy="Upgrade it")
    if missing:
        raise UserError(f"{path} is no table of a sweep", f"it has no column {missing[0]}")
    try:
        return [_row(values) for values in table.to_pylist()]
    except (ValueError, TypeError, msgspec.ValidationError) as error:
        raise UserError(f"{path} cannot be read", str(error), "Was it edited?") from None


def results_table(rows: Iterable[Repetition]) -> pa.Table:
    values = [
        {
            **{name: getattr(row, name) for name in (*_FIELDS, "edp_js", "ed2p_js2")},
            "parameters": json.dumps(dict(row.parameters)) if row.parameters else None,
            "epoch_time_s": list(row.epoch_time_s),
            "epoch_energy_j": list(row.epoch_energy_j),
        }
        for row in rows
    ]
    return pa.Table.from_pylist(values, schema=SCHEMA)


def _row(values: dict[str, Any]) -> Repetition:
    known = {name: values[name] for name in _FIELDS if name in values}
    known["parameters"] = parse_json(values["parameters"]) if values["parameters"] else {}
    for name in ("epoch_time_s", "epoch_energy_j"):
        known[name] = tuple(values[name] or ())
    return msgspec.convert(known, Repetition)


def _version(schema: pa.Schema) -> int:
    written: bytes = (schema.metadata or {}).get(_VERSION, b"0")
    return int(written) if written.isdigit() and len(written) < 10 else 0


def _times(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b
