"""Splits the power of CPU sockets and their memory among the program, other processes and the monitor.

    P = static + dynamic                static: the power of the idle device, or P if that is less
    dynamic × program ÷ busy            by CPU time: whoever keeps the socket busy pays for it
    static × program ÷ (wall × CPUs)    by occupancy: at 1 % CPU nobody pays for a whole idle socket

The monitor pays its dynamic part in the same way. Other processes get all the rest, also what nobody used.
Memory (`dram:N`) is split by the CPU time of its socket. Time in which power is known but activity is not
stays unsplit. `activity` says how CPU time is measured.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.accounting.activity import (
    NO_INTERVALS,
    Intervals,
    SocketUse,
    logical_cpus,
    run_bounds,
)
from smaragdine.accounting.baseline import doubts
from smaragdine.accounting.power import PowerTrace, distinct, within
from smaragdine.accounting.traces import FOREVER_NS, main_channels
from smaragdine.arrays import Floats, Ints
from smaragdine.recording.reader import Recording
from smaragdine.recording.thinned import Thinned
from smaragdine.sensors.base import Channel

_SPLIT = re.compile(r"(?:cpu|dram):(\d+)")
BEGINNING_NS = 120_000_000_000  # shorter than the first file of readings, so it is never thinned in part
_LOWEST_OVER = ((1_000_000_000, "second"), (100_000_000, "100 ms"))


@dataclass(frozen=True)
class Split:
    """A device's power by who used it: program + other + monitor add up to it, wherever it was split."""

    program: PowerTrace  # dynamic and static
    static: PowerTrace  # the static part of `program`
    other: PowerTrace  # other processes, and what nobody used
    monitor: PowerTrace
    static_w: float  # of the whole device
    basis: str  # how we know `static_w`
    unsplit_s: float  # time of the run whose power is known but could not be split
    unsplit_j: float
    # The part of all CPU time that other programs used, over time: its "power" is a part of one.
    foreign: PowerTrace


@dataclass(frozen=True)
class FineSplit(Split):
    """A split with all that must be known before its readings are thinned."""

    # Like `foreign`, for the program and for the monitor.
    occupied: PowerTrace
    monitored: PowerTrace
    # The part of `other` that would be the program's, if it had used all CPU time of which nobody is known.
    unseen: PowerTrace


@dataclass(frozen=True)
class IdleMachine:
    """What a recording of the idle machine, a baseline, tells us."""

    name: str  # of the recording
    power_w: Mapping[tuple[str, str], float]  # by device and provenance: estimates are not measurements
    remarks: Sequence[str]  # for the remarks of whatever uses it


@dataclass(frozen=True)
class RunPower:
    """The power of every device of a run, split by who used it.

    Sockets and memory are split. A GPU's power is all the program's, unless nobody used the GPU. For any
    other device nobody knows.
    """

    traces: Mapping[str, PowerTrace]  # of every device with a reading, parts of devices included
    channels: Mapping[str, Channel]  # the channel behind each trace
    activity: SocketUse
    splits: Mapping[str, Split]
    program: Mapping[str, PowerTrace]  # the program's part, for each device of which it is known
    unused: Sequence[str]  # GPUs
    remarks: tuple[str, ...]  # what could not be split, and why

    @property
    def adding(self) -> dict[str, PowerTrace]:
        """Devices that may be added up: no part of another device."""
        return {d: trace for d, trace in self.traces.items() if self.channels[d].scope == "device"}

    @property
    def accounted(self) -> dict[str, PowerTrace]:
        """The power that operations share: the program's part of each device; all of it where not split."""
        return {d: self.splits[d].program if d in self.splits else trace for d, trace in self.adding.items()}


def run_power(
    recording: Recording, traces: Mapping[str, PowerTrace], activity: SocketUse, idle: IdleMachine | None
) -> RunPower:
    channels = main_channels(recording)
    splits, remarks = split(recording, traces, activity, idle)
    unused = [device for device in _unused_gpus(recording) if device in traces]
    program = {device: found.program for device, found in splits.items()}
    for device, channel in channels.items():
        if device.startswith("gpu:") and channel.scope == "device" and device in traces:
            program[device] = _nothing_of(traces[device]) if device in unused else traces[device]
    return RunPower(traces, channels, activity, splits, program, unused, remarks)


def _unused_gpus(recording: Recording) -> list[str]:
    """GPUs that nobody used during the run: no process was on them, no kernel ran, and no event is theirs. If
    processes or kernels were not watched, the GPU may have been used."""
    begin_ns, end_ns = run_bounds(recording)
    quiet: dict[str, set[str]] = {}
    for series in recording.series("telemetry"):
        during = (series.t_ns >= begin_ns) & (series.t_ns <= end_ns)
        if during.any() and not series.value[during].any():
            quiet.setdefault(series.channel.device, set()).add(series.channel.quantity)
    silent = [device for device, said in quiet.items() if {"processes", "gpu_utilisation"} <= said]
    if silent and recording.lost("telemetry"):
        return []  # in the part that is lost, somebody may have
    busy = set(recording.events["device"].cast(pa.string()).unique().to_pylist()) if silent else set[str]()
    return sorted(device for device in silent if device not in busy)


def _nothing_of(trace: PowerTrace) -> PowerTrace:
    zeros = np.zeros_like(trace.power_w)
    return PowerTrace(trace.start_ns, trace.end_ns, zeros, trace.hold_ns, restarts_ns=trace.restarts_ns)


def split(
    recording: Recording, traces: Mapping[str, PowerTrace], activity: SocketUse, idle: IdleMachine | None
) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Splits every socket and memory among `traces` that can be split; remarks say why others cannot."""
    splits: dict[str, Split] = {}
    remarks: list[str] = []
    sockets, unseen = activity.sockets, activity.unseen
    thinned = recording.thinned
    run_ns = run_bounds(recording)
    if idle is not None and idle.power_w and thinned is not None:
        remarks.append(
            f"before {when(thinned.state.cut_ns)} readings were thinned, and what is static was taken from "
            "them then, not from the baseline"
        )
    for device, (socket, provenance) in sorted(_devices(recording, traces).items()):
        trace, intervals = traces[device], sockets.get(socket)
        if not trace.power_w.any():
            remarks.append(f"{device}: not split, its power is not known or always 0")
            continue
        earlier = None if thinned is None else _thinned_split(thinned, device, unseen)
        if (intervals is None or not intervals.start_ns.size) and earlier is None:
            remarks.append(f"{device}: not split, nobody recorded who used socket {socket}")
            continue
        intervals = NO_INTERVALS if intervals is None else intervals
        cpus, remark = _logical_cpus(recording.info, socket, intervals)
        if remark:
            remarks.append(f"{device}: {remark}")
        idle_w = None if idle is None else idle.power_w.get((device, provenance))
        if idle is not None and idle_w is None:
            remarks.append(f"{device}: {idle.name} has no {provenance} power of it")
        fine = trace if thinned is None else within(trace, [(thinned.state.cut_ns, FOREVER_NS)])
        if idle is not None and idle_w is not None:
            static_w, basis = idle_w, f"the mean of {idle.name}"
        else:
            static_w, basis = _static(recording, device, provenance, trace, intervals, cpus)
        found = split_trace(fine, intervals, cpus, static_w, basis, run_ns)
        if earlier is not None:
            found = _one_after_the_other(earlier, found, trace, run_ns)
        if found.program.start_ns.size:
            splits[device] = found
        else:
            remarks.append(f"{device}: not split, its power and who used it are never known together")
    return splits, tuple(remarks)


def split_trace(
    trace: PowerTrace, intervals: Intervals, cpus: float, static_w: float, basis: str, run_ns: tuple[int, int]
) -> Split:
    """Splits one device's power by the intervals of its socket, which has `cpus` logical CPUs."""
    fine = _split_trace(trace, intervals, cpus, static_w, basis, run_ns)
    return Split(**{of.name: getattr(fine, of.name) for of in dataclasses.fields(Split)})


def _split_trace(
    trace: PowerTrace, intervals: Intervals, cpus: float, static_w: float, basis: str, run_ns: tuple[int, int]
) -> FineSplit:
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
    foreign_s = np.maximum(intervals.busy_s - intervals.program_s - intervals.monitor_s, 0.0)
    foreign = np.minimum(foreign_s / (intervals.length_s * cpus), 1.0)[interval]
    idle_w = np.minimum(power_w, static_w)
    static_part_w = idle_w * occupied
    program_w = static_part_w + (power_w - idle_w) * program
    monitor_w = (power_w - idle_w) * monitor

    def part(watts: Floats) -> PowerTrace:
        return PowerTrace(start_ns, end_ns, watts, trace.hold_ns, restarts_ns=trace.restarts_ns)

    # Rounding may leave a little less than nothing.
    other_w = np.maximum(power_w - program_w - monitor_w, 0.0)
    unsplit_s, unsplit_j = _unsplit(trace, part(power_w), run_ns)
    return FineSplit(
        program=part(program_w),
        static=part(static_part_w),
        other=part(other_w),
        monitor=part(monitor_w),
        static_w=static_w,
        basis=basis,
        unsplit_s=unsplit_s,
        unsplit_j=unsplit_j,
        foreign=part(foreign),
        occupied=part(occupied),
        monitored=part((intervals.monitor_s / (intervals.length_s * cpus))[interval]),
        unseen=part(idle_w * foreign + (power_w - idle_w) * (foreign_s / busy_s)[interval]),
    )


def split_fine(
    recording: Recording, traces: Mapping[str, PowerTrace], sockets: Mapping[int, Intervals]
) -> dict[str, FineSplit]:
    """Splits what is still there in full, while a run goes on."""
    found: dict[str, FineSplit] = {}
    for device, (socket, provenance) in _devices(recording, traces).items():
        trace, intervals = traces[device], sockets.get(socket)
        if intervals is None or not intervals.start_ns.size or not trace.power_w.any():
            continue
        cpus, _ = _logical_cpus(recording.info, socket, intervals)
        static_w, basis = _static(recording, device, provenance, trace, intervals, cpus)
        found[device] = _split_trace(trace, intervals, cpus, static_w, basis, run_bounds(recording))
    return found


def _static(
    recording: Recording, device: str, provenance: str, trace: PowerTrace, intervals: Intervals, cpus: float
) -> tuple[float, str]:
    return (
        (_estimated_idle(recording.info, device) if provenance == "estimated" else None)
        or _thinned_static(recording.thinned, device)
        or _lowest(_beginning(trace), intervals, cpus)
    )


def _unsplit(trace: PowerTrace, whole: PowerTrace, run_ns: tuple[int, int]) -> tuple[float, float]:
    """Seconds and joules of the run whose power is known but was not split; `whole` is what was split."""
    unsplit_ns = int(np.diff(trace.covered_until_ns(run_ns) - whole.covered_until_ns(run_ns))[0])
    unsplit_j = trace.energy_j(*run_ns) - whole.energy_j(*run_ns) if unsplit_ns else 0.0
    return unsplit_ns * 1e-9, max(unsplit_j, 0.0)


def _thinned_split(thinned: Thinned, device: str, unseen: float) -> Split | None:
    """The split that thinning kept, with its share of unseen children's time; None if it was not split."""
    columns, known = thinned.stretches.get(device), thinned.state.devices.get(device)
    if columns is None or known is None:
        return None
    rows = np.flatnonzero(np.isfinite(columns["program_w"]))
    if not rows.size:
        return None
    of = {name: column[rows] for name, column in columns.items()}
    restarts_ns = np.array(known.restarts_ns, dtype=np.int64)

    def part(watts: Floats) -> PowerTrace:
        return PowerTrace(of["start_ns"], of["end_ns"], watts, known.hold_ns, restarts_ns=restarts_ns)

    more_w = unseen * of["unseen_w"]
    program_w = of["program_w"] + more_w
    return Split(
        program=part(program_w),
        static=part(of["static_w"] + unseen * of["foreign"] * (known.static_w or 0.0)),
        other=part(np.maximum(of["power_w"] - program_w - of["monitor_w"], 0.0)),
        monitor=part(of["monitor_w"]),
        static_w=known.static_w or 0.0,
        basis=known.basis,
        unsplit_s=0.0,
        unsplit_j=0.0,
        foreign=part((1 - unseen) * of["foreign"]),
    )


def _one_after_the_other(a: Split, b: Split, trace: PowerTrace, run_ns: tuple[int, int]) -> Split:
    start_ns, end_ns = (
        np.concatenate([getattr(a.program, edge), getattr(b.program, edge)])
        for edge in ("start_ns", "end_ns")
    )
    restarts_ns = np.concatenate([a.program.restarts_ns, b.program.restarts_ns])

    def part(first: PowerTrace, second: PowerTrace) -> PowerTrace:
        watts = np.concatenate([first.power_w, second.power_w])
        return PowerTrace(start_ns, end_ns, watts, second.hold_ns, restarts_ns=restarts_ns)

    program, other, monitor = (part(getattr(a, n), getattr(b, n)) for n in ("program", "other", "monitor"))
    whole = dataclasses.replace(program, power_w=program.power_w + other.power_w + monitor.power_w)
    unsplit_s, unsplit_j = _unsplit(trace, whole, run_ns)
    return Split(
        program=program,
        static=part(a.static, b.static),
        other=other,
        monitor=monitor,
        static_w=b.static_w,
        basis=b.basis,
        unsplit_s=unsplit_s,
        unsplit_j=unsplit_j,
        foreign=part(a.foreign, b.foreign),
    )


def _thinned_static(thinned: Thinned | None, device: str) -> tuple[float, str] | None:
    known = None if thinned is None else thinned.state.devices.get(device)
    return None if known is None or known.static_w is None else (known.static_w, known.basis)


def _beginning(trace: PowerTrace) -> PowerTrace:
    """Its first minutes: static power is then known before a long run ends, whatever its length."""
    if not trace.start_ns.size or trace.end_ns[-1] - trace.start_ns[0] <= BEGINNING_NS:
        return trace
    return within(trace, [(int(trace.start_ns[0]), int(trace.start_ns[0]) + BEGINNING_NS)])


def foreign_load(whose: Split, spans: Sequence[tuple[int, int]]) -> float | None:
    """The part of the socket's CPU time that neither the program nor the monitor used, over these spans."""
    covered_s = sum(whose.foreign.covered_s(begin_ns, end_ns) for begin_ns, end_ns in spans)
    if covered_s <= 0:
        return None
    return sum(whose.foreign.energy_j(begin_ns, end_ns) for begin_ns, end_ns in spans) / covered_s


def _devices(recording: Recording, traces: Mapping[str, PowerTrace]) -> dict[str, tuple[int, str]]:
    """Sockets and memories that are devices of their own → socket and provenance."""
    found: dict[str, tuple[int, str]] = {}
    for device, channel in main_channels(recording).items():
        match = _SPLIT.fullmatch(device)
        if match and channel.scope == "device" and device in traces:
            found[device] = int(match[1]), channel.provenance
    return found


def idle_machine(recording: Recording, traces: Mapping[str, PowerTrace], activity: SocketUse) -> IdleMachine:
    """What a baseline tells us, with remarks on whatever is doubtful about it."""
    run_ns = run_bounds(recording)
    power_w = {
        (device, provenance): traces[device].energy_j(*run_ns) / traces[device].covered_s(*run_ns)
        for device, (_, provenance) in _devices(recording, traces).items()
        if traces[device].covered_s(*run_ns) > 0 and traces[device].power_w.any()
    }
    said = [f"baseline: {line}" for line in (*recording.damage, *doubts(recording, activity.sockets))]
    return IdleMachine(recording.path.name, power_w, said)


def _lowest(trace: PowerTrace, intervals: Intervals, cpus: float) -> tuple[float, str]:
    """The lowest mean over any second; if the trace is shorter, over 100 ms, or of a stretch."""
    for window_ns, name in _LOWEST_OVER:
        # Power is constant piece by piece, so the lowest mean begins or ends at an edge of a piece.
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


def when(t_ns: int) -> str:
    return datetime.datetime.fromtimestamp(t_ns / 1e9).astimezone().strftime("%d %b %H:%M")


def _load(intervals: Intervals, begin_ns: int, end_ns: int, cpus: float) -> float | None:
    overlap_ns = np.minimum(intervals.end_ns, end_ns) - np.maximum(intervals.start_ns, begin_ns)
    weight = np.maximum(overlap_ns, 0) * 1e-9
    if weight.sum() <= 0:
        return None
    return float((intervals.busy_s / intervals.length_s * weight).sum() / weight.sum() / cpus)


def _containing(start_ns: Ints, end_ns: Ints, at_ns: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """For each instant the span [start, end) that it lies in, and whether there is one."""
    i = np.maximum(np.searchsorted(start_ns, at_ns, side="right") - 1, 0)
    return i, (at_ns >= start_ns[i]) & (at_ns < end_ns[i])


def _logical_cpus(info: Mapping[str, Any], socket: int, intervals: Intervals) -> tuple[float, str | None]:
    cpus = logical_cpus(info, socket)
    if not math.isnan(cpus):
        return cpus, None
    if not intervals.start_ns.size:
        return 1, None
    most = max(1, math.ceil(round(float((intervals.busy_s / intervals.length_s).max()), 1)))
    return (
        most,
        f"run.json does not say how many CPUs it has; {most}, the most that were busy at once, is used",
    )


def _estimated_idle(info: Mapping[str, Any], device: str) -> tuple[float, str] | None:
    """What docs/estimate.md calls P_idle. Memory is estimated to draw the same, whatever it does."""
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
