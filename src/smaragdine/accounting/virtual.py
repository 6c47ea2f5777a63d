"""Whose a socket's power was: the program's, other processes', the monitor's.

    P = static + dynamic                static: the power of the idle device, or P where that is less
    dynamic × program ÷ busy            by CPU time: whoever keeps the socket busy pays for it
    static × program ÷ (wall × CPUs)    by occupancy: at 1 % CPU one does not pay for an idle socket

The monitor pays its dynamic part in the same way; all the rest, whatever nobody used included, is other
processes'. Memory (`dram:N`) is split by the CPU time of its socket. Time with power but without activity is
not split. See `activity` for the intervals over which CPU time is compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from smaragdine.accounting.activity import Intervals, activity, run_bounds
from smaragdine.accounting.power import Floats, Ints, PowerTrace, distinct
from smaragdine.accounting.traces import device_traces, main_channels
from smaragdine.recording.reader import Recording

_SPLIT = re.compile(r"(?:cpu|dram):(\d+)")
_LOWEST_OVER = ((1_000_000_000, "second"), (100_000_000, "100 ms"))


@dataclass(frozen=True)
class Split:
    """A device's power by whom it was used by: program + other + monitor is the device's, where split."""

    program: PowerTrace  # dynamic and static
    static: PowerTrace  # what of `program` is static
    other: PowerTrace  # with whatever nobody used
    monitor: PowerTrace
    static_w: float  # of the whole device
    basis: str  # where `static_w` comes from
    unsplit_s: float  # of the run: power is known, whose it was is not; in none of the traces
    unsplit_j: float


def split(
    recording: Recording, traces: Mapping[str, PowerTrace], baseline: Recording | None = None
) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Every socket and memory among `traces` that can be split, and remarks: what could not be, and why.

    `baseline` is a recording of the idle machine.
    """
    splits: dict[str, Split] = {}
    remarks: list[str] = []
    sockets = activity(recording)
    idle = _baseline(baseline) if baseline is not None else {}
    for device, (socket, provenance) in sorted(_devices(recording, traces).items()):
        trace, intervals = traces[device], sockets.get(socket)
        if not trace.power_w.any():
            remarks.append(f"{device}: not split, its power is not known or always 0")
            continue
        if intervals is None or not intervals.start_ns.size:
            remarks.append(f"{device}: not split, nobody recorded who used socket {socket}")
            continue
        cpus, remark = _logical_cpus(recording.info, socket, intervals)
        if remark:
            remarks.append(f"{device}: {remark}")
        if baseline is not None and (device, provenance) not in idle:
            remarks.append(f"{device}: no {provenance} power of it in {baseline.path.name}")
        static_w, basis = (
            idle.get((device, provenance))
            or (_estimated_idle(recording.info, device) if provenance == "estimated" else None)
            or _lowest(trace, intervals, cpus)
        )
        found = split_trace(trace, intervals, cpus, static_w, basis, run_bounds(recording))
        if found.program.start_ns.size:
            splits[device] = found
        else:
            remarks.append(f"{device}: not split, its power and who used it are never known together")
    return splits, tuple(remarks)


def split_trace(
    trace: PowerTrace, intervals: Intervals, cpus: float, static_w: float, basis: str, run_ns: tuple[int, int]
) -> Split:
    """One device's trace by the intervals of its socket with `cpus` logical CPUs."""
    edges = [trace.start_ns, trace.end_ns, intervals.start_ns, intervals.end_ns]
    cuts = distinct(np.concatenate(edges))
    start_ns, end_ns = cuts[:-1], cuts[1:]
    stretch, has_power = _containing(trace.start_ns, trace.end_ns, start_ns)
    interval, has_activity = _containing(intervals.start_ns, intervals.end_ns, start_ns)
    kept = has_power & has_activity
    start_ns, end_ns, interval = start_ns[kept], end_ns[kept], interval[kept]
    power_w = trace.power_w[stretch[kept]]
    busy_s = np.where(intervals.busy_s > 0, intervals.busy_s, np.inf)
    program = (intervals.program_s / busy_s)[interval]
    monitor = (intervals.monitor_s / busy_s)[interval]
    occupied = np.minimum(intervals.program_s / (intervals.length_s * cpus), 1.0)[interval]
    idle_w = np.minimum(power_w, static_w)
    static_part_w = idle_w * occupied
    program_w = static_part_w + (power_w - idle_w) * program
    monitor_w = (power_w - idle_w) * monitor

    def part(watts: Floats) -> PowerTrace:
        return PowerTrace(start_ns, end_ns, watts, trace.hold_ns, restarts_ns=trace.restarts_ns)

    # Rounding may leave a hair less than nothing.
    other_w = np.maximum(power_w - program_w - monitor_w, 0.0)
    whole = part(power_w)
    unsplit_ns = int(np.diff(trace.covered_until_ns(run_ns) - whole.covered_until_ns(run_ns))[0])
    return Split(
        program=part(program_w),
        static=part(static_part_w),
        other=part(other_w),
        monitor=part(monitor_w),
        static_w=static_w,
        basis=basis,
        unsplit_s=unsplit_ns * 1e-9,
        unsplit_j=max(trace.energy_j(*run_ns) - whole.energy_j(*run_ns), 0.0) if unsplit_ns else 0.0,
    )


def _devices(recording: Recording, traces: Mapping[str, PowerTrace]) -> dict[str, tuple[int, str]]:
    """Sockets and memories that are devices of their own: socket and provenance."""
    found: dict[str, tuple[int, str]] = {}
    for device, channel in main_channels(recording).items():
        match = _SPLIT.fullmatch(device)
        if match and channel.scope == "device" and device in traces:
            found[device] = int(match[1]), channel.provenance
    return found


def _baseline(recording: Recording) -> dict[tuple[str, str], tuple[float, str]]:
    """By device and provenance: an estimate is no baseline of a measurement, nor the other way round."""
    run_ns = run_bounds(recording)
    traces = device_traces(recording)
    basis = f"the mean of {recording.path.name}"
    return {
        (device, provenance): (traces[device].energy_j(*run_ns) / traces[device].covered_s(*run_ns), basis)
        for device, (_, provenance) in _devices(recording, traces).items()
        if traces[device].covered_s(*run_ns) > 0 and traces[device].power_w.any()
    }


def _lowest(trace: PowerTrace, intervals: Intervals, cpus: float) -> tuple[float, str]:
    """The lowest mean over any second that is known; of a shorter trace, over 100 ms or of a stretch."""
    for window_ns, name in _LOWEST_OVER:
        # Where power is constant piece by piece, the lowest mean begins or ends at an edge of a piece.
        begin_ns = np.concatenate([trace.start_ns, trace.end_ns - window_ns])
        covered_ns = trace.covered_until_ns(begin_ns + window_ns) - trace.covered_until_ns(begin_ns)
        used_j = trace.energy_until_j(begin_ns + window_ns) - trace.energy_until_j(begin_ns)
        known = np.flatnonzero(covered_ns >= 0.9 * window_ns)
        if known.size:
            mean_w = used_j[known] / (covered_ns[known] * 1e-9)
            at_ns = int(begin_ns[known[np.argmin(mean_w)]])
            load = _load(intervals, at_ns, at_ns + window_ns, cpus)
            busy = "" if load is None else f", in which the socket was {load:.0%} busy"
            return float(mean_w.min()), f"the lowest {name} of this recording{busy}"
    return float(trace.power_w.min()), "the lowest reading of this recording"


def _load(intervals: Intervals, begin_ns: int, end_ns: int, cpus: float) -> float | None:
    overlap_ns = np.minimum(intervals.end_ns, end_ns) - np.maximum(intervals.start_ns, begin_ns)
    weight = np.maximum(overlap_ns, 0) * 1e-9
    if weight.sum() <= 0:
        return None
    return float((intervals.busy_s / intervals.length_s * weight).sum() / weight.sum() / cpus)


def _containing(start_ns: Ints, end_ns: Ints, at_ns: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """For each instant the span [start, end) it is in, and whether there is one."""
    i = np.maximum(np.searchsorted(start_ns, at_ns, side="right") - 1, 0)
    return i, (at_ns >= start_ns[i]) & (at_ns < end_ns[i])


def _logical_cpus(info: Mapping[str, Any], socket: int, intervals: Intervals) -> tuple[float, str | None]:
    cpus = _number(info, "host", "sockets", f"cpu:{socket}", "logical_cpus")
    if cpus is not None and cpus >= 1:
        return cpus, None
    most = max(1, math.ceil(round(float((intervals.busy_s / intervals.length_s).max()), 1)))
    return (
        most,
        f"run.json does not say how many CPUs it has; {most}, the most that were busy at once, is used",
    )


def _estimated_idle(info: Mapping[str, Any], device: str) -> tuple[float, str] | None:
    """What docs/estimate.md calls P_idle; memory is estimated to draw the same whatever it does."""
    idle_w = _number(info, "host", "estimate", device, "idle_w")
    gib = _number(info, "host", "estimate", device, "gib")
    w_per_gib = _number(info, "host", "estimate", device, "w_per_gib")
    if device.startswith("dram:") and gib is not None and w_per_gib is not None:
        idle_w = gib * w_per_gib
    return (idle_w, "the idle power of the estimate") if idle_w is not None else None


def _number(info: Mapping[str, Any], *keys: str) -> float | None:
    value: Any = info
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) and math.isfinite(value) and value >= 0 else None
