"""What one recording says about its setting: the figures of a sweep's row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.accounting.power import PowerTrace, add, from_counter, from_samples
from smaragdine.accounting.step_spans import main_steps
from smaragdine.accounting.steps import MOST_MISSED
from smaragdine.accounting.summary import summarise
from smaragdine.accounting.traces import main_channels
from smaragdine.errors import UserError
from smaragdine.recording.reader import Recording

LEAST_STEPS = 3


@dataclass(frozen=True)
class MeasuredSteps:
    """All steps, each at the mean from the end of the first to the end of the last: the first, which compiles
    and allocates, counts as the others do. None where there is no such figure."""

    steps: int | None = None  # that were announced
    steps_time_s: float | None = None
    steps_energy_j: float | None = None  # as `Measured.energy_j`


@dataclass(frozen=True, kw_only=True)
class Measured(MeasuredSteps):
    """The whole program and its steps, on `device`; None where there is no such figure."""

    device: str
    device_name: str | None  # of the GPUs, where all are of one kind
    provenance: str
    time_s: float
    energy_j: float | None  # Σ Δt·P of the power readings as they are; of a bare counter, its differences
    energy_counter_j: float | None
    epoch_time_s: tuple[float, ...]
    epoch_energy_j: tuple[float | None, ...]


def measure(recording: Recording, devices: Sequence[str] | None = None) -> Measured:
    """Time and energy of a recording on `devices`: its GPUs unless given, or all that add up without one."""
    summary = summarise(recording)
    adding = [name for name, device in summary.devices.items() if device.scope == "device"]
    gpus = [name for name in adding if name.startswith("gpu:")]
    chosen = list(devices) if devices is not None else gpus or adding
    missing = [name for name in chosen if name not in summary.devices]
    if missing or not chosen:
        raise UserError(
            f"{recording.path} has no power of {missing[0] if missing else 'any device'}",
            f"it has {', '.join(summary.devices) or 'none'}",
        )
    channels = main_channels(recording)
    span = summary.begin_ns, summary.end_ns
    sampled, counted = zip(*(_traces(recording, device) for device in chosen), strict=True)
    epochs = [[epoch.devices[device].energy_j for device in chosen] for epoch in summary.epochs]
    return Measured(
        device=" + ".join(chosen),
        device_name=_name(recording, chosen),
        provenance=" + ".join(sorted({channels[device].provenance for device in chosen})),
        time_s=summary.duration_s,
        energy_j=_energy_j(recording.marks, sampled, *span),
        energy_counter_j=_energy_j(recording.marks, counted, *span),
        epoch_time_s=tuple(epoch.duration_s for epoch in summary.epochs),
        epoch_energy_j=tuple(_sum(each) for each in epochs),
        **vars(_steps(recording.marks, sampled)),
    )


def measure_steps(recording: Recording, devices: Sequence[str]) -> MeasuredSteps:
    """The steps of a recording, and what they took on `devices`."""
    return _steps(recording.marks, [_traces(recording, device)[0] for device in devices])


def steps_span_ns(recording: Recording) -> tuple[int, int] | None:
    """From the end of the first step to the end of the last; None where there are too few to measure."""
    return _span_ns(main_steps(recording.marks)["t_ns"].to_numpy())


def _span_ns(ends_ns: npt.NDArray[np.int64]) -> tuple[int, int] | None:
    if ends_ns.size < LEAST_STEPS or ends_ns[0] == ends_ns[-1]:
        return None
    return int(ends_ns[0]), int(ends_ns[-1])


def _steps(marks: pa.Table, traces: Sequence[PowerTrace | None]) -> MeasuredSteps:
    ends_ns = main_steps(marks)["t_ns"].to_numpy()
    count, span_ns = ends_ns.size, _span_ns(ends_ns)
    if span_ns is None:
        return MeasuredSteps(count or None)
    first_ns, last_ns = span_ns
    energy_j = _energy_j(marks, traces, first_ns, last_ns)
    # Between the ends of n steps lie n - 1 of them.
    whole = count / (count - 1)
    time_s = (last_ns - first_ns) * 1e-9 * whole
    return MeasuredSteps(count, time_s, None if energy_j is None else energy_j * whole)


def _name(recording: Recording, devices: Sequence[str]) -> str | None:
    gpus = recording.info.get("host", {}).get("gpus") or []
    names = {gpu.get("name") for gpu in gpus if gpu.get("device") in devices}
    return names.pop() if len(names) == 1 else None


def _traces(recording: Recording, device: str) -> tuple[PowerTrace | None, PowerTrace | None]:
    """By power readings, and by counters; neither levelled by the other."""
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
    """Gaps may be how a source works; where its monitor died they are not, however short the program."""
    most_s = MOST_MISSED * (end_ns - begin_ns) * 1e-9
    covered_s = trace.covered_s(begin_ns, end_ns)
    missed_s = (end_ns - begin_ns) * 1e-9 - covered_s if died else trace.missing_s(begin_ns, end_ns)
    return covered_s > 0 and missed_s <= most_s


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
