"""What one recording says about its setting: the figures of a sweep's row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smaragdine.accounting.power import PowerTrace, add, from_counter, from_samples
from smaragdine.accounting.summary import summarise
from smaragdine.accounting.traces import main_channels
from smaragdine.errors import UserError
from smaragdine.recording.reader import Recording


@dataclass(frozen=True)
class Measured:
    """Over the whole program, on `device`; None where there is no such figure."""

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
        " + ".join(chosen),
        _name(recording, chosen),
        " + ".join(sorted({channels[device].provenance for device in chosen})),
        summary.duration_s,
        _energy_j(sampled, *span),
        _energy_j(counted, *span),
        tuple(epoch.duration_s for epoch in summary.epochs),
        tuple(_sum(each) for each in epochs),
    )


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


def _energy_j(traces: Sequence[PowerTrace | None], begin_ns: int, end_ns: int) -> float | None:
    known = [t for t in traces if t is not None and t.covered_s(begin_ns, end_ns) > 0]
    return _sum([t.energy_j(begin_ns, end_ns) for t in known]) if len(known) == len(traces) else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
