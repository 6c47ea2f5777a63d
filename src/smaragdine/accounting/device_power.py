"""Joins each device's power with what is known about its sensor, from a bare log or from a recording."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.accounting.calibrated import Calibration, UntracedLevel
from smaragdine.accounting.power import PowerTrace, Readings, from_log, from_stretches, within
from smaragdine.accounting.spans import Spans
from smaragdine.accounting.split import RunPower, foreign_load
from smaragdine.accounting.uncertainty import SensorModel, sensor_of
from smaragdine.errors import UserError
from smaragdine.recording.power_logs import LENGTH
from smaragdine.recording.reader import Recording
from smaragdine.sensors.base import Channel
from smaragdine.sensors.energy import MOST_W
from smaragdine.units import si

# Stamps of samples and counters are exact to a fraction of the time they cover. If we do not know the chip's
# electronics, less so: an H200's came late by a sixth of it, and later when smoothed.
TIMING_OF_WINDOW, TIMING_UNKNOWN = 0.1, 0.25


@dataclass(frozen=True)
class DevicePower:
    """One device's power, with all that accounting needs to know of it."""

    trace: PowerTrace
    sensor: SensorModel
    readings: Readings = "held"
    provenance: str | None = None  # None: a foreign log does not say
    other_j: float | None = None  # what other processes and the monitor used
    static_j: float | None = None  # the static part of the trace
    spans: Spans | None = None  # what the trace should cover; None: what it does cover
    idle_w: float | None = None  # what it draws while nothing runs; None: not known
    foreign: float | None = None  # the part of its CPU time that other programs used; None: not known
    calibration: Calibration | None = None  # what its calls draw alone; None: rows are equal shares
    untraced: UntracedLevel | None = None  # None: there are no steps, or too few of them


@dataclass(frozen=True)
class SensorFacts:
    """What a user knows about a sensor and its device; None: take it from the power itself."""

    idle_w: float | None = None
    limit_w: float | None = None
    window_s: float | None = None


NOTHING_KNOWN = SensorFacts()


@dataclass(frozen=True)
class DevicePowers:
    of: Mapping[str, DevicePower]
    remarks: tuple[str, ...] = field(default=())


def from_power_table(
    power: pa.Table, facts: SensorFacts = NOTHING_KNOWN, hold_s: float | None = None
) -> DevicePowers:
    """The devices of a power log (schema POWER, by time). If it says how long each power holds, `hold_s` says
    nothing."""
    if hold_s is not None and not 0 < hold_s < 1e9:
        raise UserError(f"hold_s={hold_s} is not a number of seconds above 0")
    meters: dict[str, DevicePower] = {}
    remarks: list[str] = []
    column = power["device"].combine_chunks()
    codes = column.indices.to_numpy()
    t_ns, power_w = power["t_ns"].to_numpy(), power["power_w"].to_numpy()
    length_ns = power[LENGTH].to_numpy() if LENGTH in power.column_names else None
    for code, device in enumerate(column.dictionary.to_pylist()):
        rows = np.flatnonzero(codes == code)
        if not rows.size:
            continue
        if length_ns is None:
            trace = from_log(t_ns[rows], power_w[rows], None if hold_s is None else round(hold_s * 1e9))
        else:
            trace = from_stretches(t_ns[rows], length_ns[rows], power_w[rows])
        if not trace.start_ns.size:
            # We do not know what it used; that is not 0 J.
            why = f"{device}: its power log covers no time: one reading, or gaps beyond --hold-s alone"
            remarks.append(why)
            continue
        if (most_w := float(power_w[rows].max())) > MOST_W:
            remarks.append(
                f"{device}: its power log goes up to {si(most_w, 'W')}, and no device draws more than "
                f"{MOST_W / 1000:g} kW: is it in watts?"
            )
        readings: Readings = "held" if length_ns is None else "counter"
        meters[device] = DevicePower(trace, _sensor(trace, facts), readings)
    if remarks and not meters:
        raise UserError(
            "no power is known", remarks[0], "Log power while the program runs, every 100 ms or so"
        )
    return DevicePowers(meters, tuple(remarks))


def from_recording(
    recording: Recording,
    power: RunPower,
    quiet_w: Mapping[str, float],
    spans_of: Callable[[str], Spans],
    facts: SensorFacts,
) -> DevicePowers:
    """Every device of a recording that adds up: the program's power over its spans. `quiet_w` is what GPUs
    draw while nothing runs, as far as known."""
    meters: dict[str, DevicePower] = {}
    for device, trace in power.accounted.items():
        channel = power.channels[device]
        whose = power.splits.get(device)
        spans = spans_of(device)
        mine = within(trace, spans)
        known = SensorFacts(
            # A share of a socket can go down to nothing.
            facts.idle_w if facts.idle_w is not None else 0.0 if whose else quiet_w.get(device),
            _limit_w(recording.info, device) if facts.limit_w is None else facts.limit_w,
            _window_s(channel) if facts.window_s is None else facts.window_s,
        )
        other_j = static_j = foreign = None
        if whose is not None:
            other_j = _energy_j(whose.other, spans) + _energy_j(whose.monitor, spans)
            static_j = _energy_j(whose.static, spans)
            foreign = foreign_load(whose, spans)
        readings: Readings = "counter" if channel.kind == "counter" else "sample"
        sensor = _sensor(mine, known, _timing(channel))
        meters[device] = DevicePower(
            mine, sensor, readings, channel.provenance, other_j, static_j, spans, quiet_w.get(device), foreign
        )
    if not meters:
        lost = recording.lost("power")
        remedy = "Copy it anew" if lost else "smaragdine doctor says what can be measured"
        raise UserError(f"{recording.path} has no power of any device", lost, remedy)
    return DevicePowers(meters, power.remarks)


def known(meters: DevicePowers, recording: Recording, power: RunPower) -> DevicePowers:
    """Drops devices of which nothing is known in that time: it is not 0 J."""
    found = {device: meter for device, meter in meters.of.items() if meter.trace.start_ns.size}
    unknown = [device for device in meters.of if device not in found]
    unsplit = [d for d in unknown if within(power.traces[d], meters.of[d].spans or ()).start_ns.size]
    dark = [device for device in unknown if device not in unsplit]
    said: list[str] = []
    if dark:
        lost = why_lost(recording, "power")
        said.append(f"no power is known of {', '.join(dark)} while these events ran{lost}")
    if unsplit:
        lost = why_lost(recording, "activity")
        said.append(f"who used {', '.join(unsplit)} while these events ran is not known{lost}")
    if not found:
        raise UserError(
            f"{recording.path} cannot be accounted", "; ".join(said), "smaragdine show says what is missing"
        )
    return DevicePowers(found, (*meters.remarks, *said))


def why_lost(recording: Recording, *tables: str) -> str:
    """The end of a sentence about something that is not known: the damaged table that is to blame, if any."""
    lost = [recording.lost(table).partition(":")[0] for table in tables or ("power", "activity")]
    return next((f", because {each}" for each in lost if each), "")


def _energy_j(trace: PowerTrace, spans: Spans) -> float:
    return sum(trace.energy_j(begin_ns, end_ns) for begin_ns, end_ns in spans)


def _sensor(trace: PowerTrace, facts: SensorFacts, timing_of_window: float | None = None) -> SensorModel:
    window_ns = None if facts.window_s is None else int(facts.window_s * 1e9)
    found = sensor_of(trace, facts.idle_w, facts.limit_w, window_ns)
    if timing_of_window is None:
        return found
    timing_ns = int(timing_of_window * found.window_ns)
    return sensor_of(trace, facts.idle_w, facts.limit_w, window_ns, timing_ns)


def _timing(channel: Channel) -> float:
    sampled_gpu = channel.kind == "sample" and channel.device.startswith("gpu:")
    return TIMING_UNKNOWN if sampled_gpu and channel.smoothing_ms is None else TIMING_OF_WINDOW


def _window_s(channel: Channel) -> float | None:
    return None if channel.window_ms is None else channel.window_ms / 1000


def _limit_w(info: dict[str, Any], device: str) -> float | None:
    gpus: list[dict[str, Any]] = info.get("host", {}).get("gpus") or []
    limits = [gpu.get("power_limit_w") for gpu in gpus if gpu.get("device") == device]
    limit_w = limits[0] if limits else None
    return float(limit_w) if isinstance(limit_w, int | float) and 0 < limit_w <= MOST_W else None
