"""The results of a sweep: one row per repetition, in `results.parquet` of the sweep's folder."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from smaragdine.accounting.power import MOST_MISSED, PowerTrace, add, from_counter, from_samples
from smaragdine.accounting.run import Run
from smaragdine.accounting.spans import main_steps
from smaragdine.errors import UserError
from smaragdine.files import parse_json, users_file
from smaragdine.jobs.setting import LimitKind
from smaragdine.recording.reader import Recording

RESULTS = "results.parquet"
_FORMAT = 1
_VERSION = b"smaragdine.sweep"


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
    """One run of a benchmark at one limit. What was not measured is None, never zero."""

    experiment: str
    benchmark: str
    limit_kind: LimitKind
    repetition: int  # from 0
    recording: str  # its folder, relative to the sweep's
    status: str  # the recording's: complete, failed, killed, interrupted …
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
    steps: int | None = None  # announced ones
    steps_time_s: float | None = None  # all of them, without the program's start and end
    steps_energy_j: float | None = None

    @property
    def of_use(self) -> bool:
        """Whether it ended well and was measured: its recorder may have been killed beside it."""
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
    """Writes the whole table anew, in place of the old one; whole or not at all."""
    import pyarrow.parquet as pq

    path = Path(folder) / RESULTS
    with users_file(path) as part:
        pq.write_table(results_table(rows), part)
    return path


def read_results(folder: str | os.PathLike[str]) -> list[Repetition]:
    """Reads the rows of a sweep's table."""
    path = Path(folder) / RESULTS
    if not path.is_file():
        raise UserError(
            f"{folder} is no sweep", f"it has no {RESULTS}", "Name the folder that smaragdine sweep made"
        )
    from smaragdine.recording.tables import kind_of, read_content, read_table

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


# What one recording says about its setting: the figures of a row.

LEAST_STEPS = 3


@dataclass(frozen=True)
class Measured:
    """The whole program and its steps, on `device`. None: the recording does not say.

    Every step counts as the mean from the end of the first to the end of the last, because the first one
    compiles and allocates.
    """

    device: str
    device_name: str | None  # the GPUs' name, if all are of one kind
    provenance: str
    time_s: float
    energy_j: float | None  # Σ Δt·P of the power readings as they are; of a bare counter, differences
    energy_counter_j: float | None
    epoch_time_s: tuple[float, ...]
    epoch_energy_j: tuple[float | None, ...]
    steps: int | None  # announced ones
    steps_time_s: float | None
    steps_energy_j: float | None  # by the same readings as `energy_j`


def measure(run: Run, devices: Sequence[str] | None = None) -> Measured:
    """Time and energy on `devices`; by default its GPUs or, if it has none, all that add up."""
    recording, summary = run.recording, run.summary
    adding = [name for name, device in summary.devices.items() if device.scope == "device"]
    gpus = [name for name in adding if name.startswith("gpu:")]
    chosen = list(devices) if devices is not None else gpus or adding
    missing = [name for name in chosen if name not in summary.devices]
    if missing or not chosen:
        raise UserError(
            f"{run.path} has no power of {missing[0] if missing else 'any device'}",
            f"it has {', '.join(summary.devices) or 'none'}",
        )
    span = summary.begin_ns, summary.end_ns
    marks = recording.marks
    sampled, counted = zip(*(_traces(recording, device) for device in chosen), strict=True)
    epochs = [[epoch.devices[device].energy_j for device in chosen] for epoch in summary.epochs]
    steps = main_steps(marks).num_rows
    steps_ns = steps_span_ns(marks)
    steps_time_s = steps_energy_j = None
    if steps_ns is not None:
        # Between the ends of n steps lie n - 1 of them.
        whole = steps / (steps - 1)
        steps_time_s = (steps_ns[1] - steps_ns[0]) * 1e-9 * whole
        energy_j = _energy_j(marks, sampled, *steps_ns)
        steps_energy_j = None if energy_j is None else energy_j * whole
    return Measured(
        device=" + ".join(chosen),
        device_name=_name(recording, chosen),
        provenance=" + ".join(sorted({run.channels[device].provenance for device in chosen})),
        time_s=summary.duration_s,
        energy_j=_energy_j(marks, sampled, *span),
        energy_counter_j=_energy_j(marks, counted, *span),
        epoch_time_s=tuple(epoch.duration_s for epoch in summary.epochs),
        epoch_energy_j=tuple(_sum(each) for each in epochs),
        steps=steps or None,
        steps_time_s=steps_time_s,
        steps_energy_j=steps_energy_j,
    )


def steps_span_ns(marks: pa.Table) -> tuple[int, int] | None:
    """From the end of the first step to the end of the last; None if there are too few to measure."""
    ends_ns = main_steps(marks)["t_ns"].to_numpy()
    if ends_ns.size < LEAST_STEPS or ends_ns[0] == ends_ns[-1]:
        return None
    return int(ends_ns[0]), int(ends_ns[-1])


def _name(recording: Recording, devices: Sequence[str]) -> str | None:
    gpus = recording.info.get("host", {}).get("gpus") or []
    names = {gpu.get("name") for gpu in gpus if gpu.get("device") in devices}
    return names.pop() if len(names) == 1 else None


def _traces(recording: Recording, device: str) -> tuple[PowerTrace | None, PowerTrace | None]:
    """One from power readings, one from counters; neither sets the other's level."""
    own = [series for series in recording.series("power") if series.channel.device == device]
    counters = [from_counter(series) for series in own if series.channel.quantity == "energy"]
    samples = [from_samples(series) for series in own if series.channel.quantity == "power"]
    counted = add(counters) if counters else None
    return (samples[0] if samples else counted), counted


def _energy_j(
    marks: pa.Table, traces: Sequence[PowerTrace | None], begin_ns: int, end_ns: int
) -> float | None:
    died = "monitor_died" in marks["name"].unique().to_pylist()
    known = [t for t in traces if t is not None and _was_read(t, begin_ns, end_ns, died)]
    return _sum([t.energy_j(begin_ns, end_ns) for t in known]) if len(known) == len(traces) else None


def _was_read(trace: PowerTrace, begin_ns: int, end_ns: int, died: bool) -> bool:
    """Whether enough was read. Gaps may be how a source works; but not if its monitor died."""
    most_s = MOST_MISSED * (end_ns - begin_ns) * 1e-9
    covered_s = trace.covered_s(begin_ns, end_ns)
    missed_s = (end_ns - begin_ns) * 1e-9 - covered_s if died else trace.missing_s(begin_ns, end_ns)
    return covered_s > 0 and missed_s <= most_s


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
