"""Sums up a recording: what the program used, and what each device did, for the run and for each epoch.

    program_j + other_j + monitor_j + unsplit_j = total_j

The program's energy is its part of every socket and memory (see `split`) and all of every GPU that anybody
used. `total_j` is the machine's: all that its devices used meanwhile, whoever used it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.accounting.activity import SocketUse, run_bounds
from smaragdine.accounting.power import MOST_MISSED, PowerTrace
from smaragdine.accounting.regions import RegionTimes, regions_of, sum_of_each, too_short, unpaired
from smaragdine.accounting.split import RunPower, Split
from smaragdine.accounting.traces import beyond, left_out
from smaragdine.arrays import Ints
from smaragdine.arrow import pc
from smaragdine.recording.format import EPOCHS_OF_LOADER
from smaragdine.recording.reader import Recording
from smaragdine.recording.thinned import Arrays
from smaragdine.sensors.base import Channel
from smaragdine.tracing.absence import what_is_incomplete
from smaragdine.units import joules, seconds


def shared_gpus(recording: Recording, begin_ns: int) -> list[str]:
    """A line for each GPU that others share."""
    gpus: list[dict[str, Any]] = recording.info.get("host", {}).get("gpus") or []
    said = [
        f"{gpu['device']}: MIG is on, and its power is that of all its instances together"
        for gpu in gpus
        if gpu.get("mig") and "device" in gpu
    ]
    if "run_id" not in recording.info:
        return said  # recorded from within: the process on it may be the program itself
    for series in recording.series("telemetry"):
        before = np.flatnonzero(series.t_ns < begin_ns)
        if series.channel.quantity == "processes" and before.size and series.value[before[-1]] > 0:
            count = int(series.value[before[-1]])
            others = "another process was" if count == 1 else f"{count} other processes were"
            said.append(
                f"{series.channel.device}: {others} on it before the program; its energy is theirs, too"
            )
    return said


PEAK_OVER_NS = 100_000_000
_WORTH_SAYING = 1e-3  # of the machine's energy, or of a time: less does not show in three digits
_EPOCH_TRUST = {"user": 0, EPOCHS_OF_LOADER: 2}


@dataclass(frozen=True)
class DeviceSummary:
    """One device over one stretch of time. What is not known is None, never zero. Everything but `program_j`
    is of the whole device, whoever used it."""

    device: str
    energy_j: float | None
    mean_w: float | None
    peak_w: float | None  # the highest mean over 100 ms
    missing: list[tuple[int, int]]  # (begin, end) in ns of every stretch without readings
    provenance: str
    scope: str
    source: str  # the sensor and its route
    edp_js: float | None  # None also if a part of the time is missing
    program_j: float | None = None  # the program's part; None: not known

    @property
    def missing_s(self) -> float:
        return sum(end - begin for begin, end in self.missing) * 1e-9


@dataclass(frozen=True)
class SocketShare:
    """Who used a socket's busy time; fractions that add up to 1."""

    program: float
    other: float
    monitor: float


@dataclass(frozen=True)
class Owners:
    """Who used the energy of a socket or its memory. What could not be split is left out."""

    program_j: float
    static_j: float  # the static part of the program's
    other_j: float  # other processes, and idle
    monitor_j: float


@dataclass(frozen=True)
class Epoch:
    index: int | None
    start_ns: int
    end_ns: int
    devices: dict[str, DeviceSummary]
    program_j: float | None = None  # over devices that could be split

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) * 1e-9


@dataclass(frozen=True)
class RunSummary:
    status: str
    begin_ns: int
    end_ns: int
    missing_s: float
    devices: dict[str, DeviceSummary]
    total_j: float | None  # the machine's: over all devices, whoever used them
    shares: dict[str, SocketShare]
    epochs: list[Epoch]
    marks: pa.Table
    problems: list[str]
    owners: dict[str, Owners] = field(default_factory=dict[str, Owners])
    regions: list[RegionTimes] = field(default_factory=list[RegionTimes])
    exit_code: int | None = None
    signal: int | None = None  # the signal that ended the program
    program_j: float | None = None  # None: not known of any device
    other_j: float | None = None  # other processes, idle, and GPUs that nobody used
    monitor_j: float | None = None
    unsplit_j: float | None = None  # energy that could not be split; not part of the others
    notes: list[str] = field(default_factory=list[str])  # what could not be split, and why

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.begin_ns) * 1e-9


def summarise(recording: Recording, power: RunPower, remarks: Sequence[str]) -> RunSummary:
    """`remarks` are about the baseline, if there is one."""
    traces, channels = power.traces, power.channels
    marks = recording.marks
    begin_ns, end_ns = run_bounds(recording)
    ordered = sorted(traces, key=_device_order)
    peaks = {} if recording.thinned is None else recording.thinned.stretches

    def devices_in(start_ns: int, end_ns: int) -> dict[str, DeviceSummary]:
        return {
            d: summarise_device(
                d, traces[d], channels[d], start_ns, end_ns, power.program.get(d), peaks.get(d)
            )
            for d in ordered
        }

    devices = devices_in(begin_ns, end_ns)
    known = {d: trace for d, trace in traces.items() if devices[d].energy_j is not None}
    program = {d: trace for d, trace in power.program.items() if devices[d].program_j is not None}
    regions = regions_of(recording, known, program, power.activity.unseen)
    epochs: list[Epoch] = []
    for index, start, end in epoch_bounds(_named(marks, ("epoch_begin", "epoch_end"))):
        each = {
            d: _of_epoch(of, start, end, power.program.get(d)) for d, of in devices_in(start, end).items()
        }
        [program_j] = sum_of_each([[each[d].program_j] for d in program]) or [None]
        epochs.append(Epoch(index, start, end, each, program_j))
    owned = owners(power.splits, begin_ns, end_ns)
    return RunSummary(
        status=recording.status,
        begin_ns=begin_ns,
        end_ns=end_ns,
        missing_s=max((device.missing_s for device in devices.values()), default=(end_ns - begin_ns) * 1e-9),
        devices=devices,
        total_j=sum_known(d.energy_j for d in devices.values() if d.scope == "device"),
        shares=shares(power.activity, begin_ns, end_ns),
        epochs=epochs,
        marks=marks,
        problems=[
            *recording.info.get("problems", []),
            *recording.damage,
            *_problem_marks(marks),
            *unpaired(recording),
            *_trace_problems(traces),
            *beyond(recording),
            *left_out(recording),
            *too_short(regions, channels),
            *shared_gpus(recording, begin_ns),
            *remarks,
        ],
        owners=owned,
        regions=regions,
        exit_code=recording.info.get("exit_code"),
        signal=recording.info.get("signal"),
        **_sums(devices, power, owned),
    )


def owners(splits: Mapping[str, Split], begin_ns: int, end_ns: int) -> dict[str, Owners]:
    """Who used the energy of every socket and memory that was split."""
    return {
        device: Owners(
            *(trace.energy_j(begin_ns, end_ns) for trace in (of.program, of.static, of.other, of.monitor))
        )
        for device, of in splits.items()
    }


def _sums(
    devices: Mapping[str, DeviceSummary], power: RunPower, owned: Mapping[str, Owners]
) -> dict[str, Any]:
    """Who used the energy of all devices together, and notes on the rest."""
    energy_j = {
        name: device.energy_j
        for name, device in devices.items()
        if device.scope == "device" and device.energy_j is not None
    }
    if not energy_j:
        return {}
    least_j = _WORTH_SAYING * sum(energy_j.values())
    of = {name: owned[name] for name in energy_j if name in owned}
    unknown = [name for name in energy_j if devices[name].program_j is None]
    partly = {name: power.splits[name] for name in of if name not in unknown}
    why = {name: remark for remark in power.remarks for name in unknown if remark.startswith(f"{name}: ")}
    notes = [why.get(name, f"{name}: not split, nobody knows who used it") for name in unknown]
    notes += [
        f"{name}: who used {joules(part.unsplit_j)} in {seconds(part.unsplit_s)} is not known"
        for name, part in partly.items()
        if part.unsplit_j > least_j
    ]
    unused_j = {name: energy_j[name] for name in power.unused if name in energy_j}
    notes += [
        f"{name}: nobody used it; its {joules(used)} are the machine's" for name, used in unused_j.items()
    ]
    known = len(unknown) < len(energy_j)
    unsplit_j = sum(energy_j[name] for name in unknown) + sum(part.unsplit_j for part in partly.values())
    return {
        "program_j": sum_known(devices[name].program_j for name in energy_j),
        "other_j": sum(o.other_j for o in of.values()) + sum(unused_j.values()) if known else None,
        "monitor_j": sum(o.monitor_j for o in of.values()) if known else None,
        "unsplit_j": unsplit_j,
        "notes": notes,
    }


def sum_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def summarise_device(
    device: str,
    trace: PowerTrace,
    channel: Channel,
    start_ns: int,
    end_ns: int,
    program: PowerTrace | None = None,
    thinned: Arrays | None = None,
) -> DeviceSummary:
    covered_s = trace.covered_s(start_ns, end_ns)
    duration_s = (end_ns - start_ns) * 1e-9
    energy_j = trace.energy_j(start_ns, end_ns) if covered_s > 0 and not stands_still(trace) else None
    missing = trace.missing(start_ns, end_ns)
    # The energy of a part of the time, times all of it, is nobody's.
    whole = sum(end - begin for begin, end in missing) <= _WORTH_SAYING * (end_ns - start_ns)
    return DeviceSummary(
        device=device,
        energy_j=energy_j,
        mean_w=energy_j / covered_s if energy_j is not None else None,
        peak_w=peak_w(trace, start_ns, end_ns, thinned),
        missing=missing,
        provenance=channel.provenance,
        scope=channel.scope,
        source=f"{channel.sensor}{': ' + channel.detail if channel.detail else ''}",
        edp_js=energy_j * duration_s if energy_j is not None and whole else None,
        program_j=None
        if program is None or energy_j is None or program.covered_s(start_ns, end_ns) <= 0
        else program.energy_j(start_ns, end_ns),
    )


def _of_epoch(device: DeviceSummary, start_ns: int, end_ns: int, program: PowerTrace | None) -> DeviceSummary:
    """What was used in a part of an epoch is not what the epoch took."""
    length_s = (end_ns - start_ns) * 1e-9
    if device.missing_s > MOST_MISSED * length_s:
        return dataclasses.replace(device, energy_j=None, program_j=None)
    if program is not None and program.covered_s(start_ns, end_ns) < (1 - MOST_MISSED) * length_s:
        return dataclasses.replace(device, program_j=None)
    return device


def stands_still(trace: PowerTrace) -> bool:
    """A counter that stands still for a second counts nothing; some virtual machines have such ones."""
    if not trace.start_ns.size:
        return False
    whole_ns = int(trace.start_ns[0]), int(trace.end_ns[-1])
    return trace.energy_j(*whole_ns) == 0 and trace.covered_s(*whole_ns) > 1.0


def peak_w(trace: PowerTrace, start_ns: int, end_ns: int, thinned: Arrays | None = None) -> float | None:
    """The highest mean over any 100 ms; over less, if the stretch is shorter.

    Shorter windows would show the counter's own jitter as peaks. If readings were thinned, their peak was
    noted before, and what is left of them is never higher.
    """
    if end_ns <= start_ns or stands_still(trace):
        return None
    if thinned is not None:
        found = [peak_w(trace, start_ns, end_ns), _noted_peak_w(thinned, start_ns, end_ns)]
        return max((watts for watts in found if watts is not None), default=None)
    window_ns = min(PEAK_OVER_NS, end_ns - start_ns)
    # Power is constant piece by piece, so the highest mean begins or ends at an edge of a piece.
    starts_ns = _between(trace.start_ns, start_ns, end_ns - window_ns)
    ends_ns = _between(trace.end_ns, start_ns + window_ns, end_ns)
    begin_ns = np.concatenate([[start_ns, end_ns - window_ns], starts_ns, ends_ns - window_ns])
    covered_ns = trace.covered_until_ns(begin_ns + window_ns) - trace.covered_until_ns(begin_ns)
    used_j = trace.energy_until_j(begin_ns + window_ns) - trace.energy_until_j(begin_ns)
    known = covered_ns >= 0.9 * window_ns
    if not known.any():
        return None
    return float((used_j[known] / (covered_ns[known] * 1e-9)).max())


def _noted_peak_w(thinned: Arrays, start_ns: int, end_ns: int) -> float | None:
    begin = int(np.searchsorted(thinned["start_ns"], start_ns))
    end = int(np.searchsorted(thinned["end_ns"], end_ns, side="right"))
    # What begins near the end may reach beyond it.
    inside = int(np.searchsorted(thinned["end_ns"], end_ns - PEAK_OVER_NS, side="right"))
    noted_w = np.concatenate([thinned["peak_w"][begin:end], thinned["highest_w"][begin:inside]])
    known_w = noted_w[np.isfinite(noted_w)]
    return float(known_w.max()) if known_w.size else None


def _between(t_ns: Ints, first_ns: int, last_ns: int) -> Ints:
    """Instants between two others, without looking at all of them: a run may have thousands of epochs."""
    begin, end = np.searchsorted(t_ns, first_ns), np.searchsorted(t_ns, last_ns, side="right")
    return t_ns[begin:end]


def shares(activity: SocketUse, start_ns: int, end_ns: int) -> dict[str, SocketShare]:
    """Who used each socket's busy time: the program, the monitor, everybody else."""
    found: dict[str, SocketShare] = {}
    sockets, earlier = activity.sockets, activity.earlier
    for socket in sorted({*sockets, *earlier}):
        busy_s = program_s = monitor_s = 0.0
        for spent, given in ((earlier.get(socket), activity.unseen), (sockets.get(socket), 0.0)):
            if spent is None:
                continue
            inside = (spent.start_ns >= start_ns) & (spent.end_ns <= end_ns)
            of = (spent.busy_s, spent.program_s, spent.monitor_s)
            busy, program, monitor = (float(each_s[inside].sum()) for each_s in of)
            busy_s, monitor_s = busy_s + busy, monitor_s + monitor
            program_s += program + given * (busy - program - monitor)
        if busy_s > 0:
            other_s = max(0.0, busy_s - program_s - monitor_s)
            found[f"cpu:{socket}"] = SocketShare(program_s / busy_s, other_s / busy_s, monitor_s / busy_s)
    return found


def epoch_bounds(marks: Sequence[dict[str, Any]]) -> list[tuple[int | None, int, int]]:
    """(index, begin, end) of every finished epoch, in order.

    Ranks that train together share an epoch: those of the same index that overlap in time. Two trainings one
    after the other both have an epoch 0. If a process has epochs from several sources, those that a person
    marked win over those of a framework, and these over those inferred from a DataLoader.
    """
    begun: dict[tuple[Any, Any, Any], dict[str, Any]] = {}
    known: list[tuple[int, Any, int | None, int, int]] = []
    for mark in marks:
        who = (mark["rank"], mark["pid"], mark["source"])
        if mark["name"] == "epoch_begin":
            begun[who] = mark
        elif mark["name"] == "epoch_end" and who in begun:
            begin = begun.pop(who)
            trust = _EPOCH_TRUST.get(mark["source"], 1)
            known.append((trust, mark["pid"], begin["index"], begin["t_ns"], mark["t_ns"]))
    spans: list[tuple[int | None, int, int]] = []
    best = {pid: min(t for t, p, *_ in known if p == pid) for pid in {p for _, p, *_ in known}}
    for trust, pid, index, start, end in known:
        # If one source announced them all, thousands of epochs need not be compared with each other.
        better = [(s, e) for t, p, _, s, e in known if t < trust and p == pid] if trust > best[pid] else []
        if not any(s < end and start < e for s, e in better):
            spans.append((index, start, end))
    shared: list[tuple[int | None, int, int]] = []
    newest: dict[int, int] = {}  # index → position of its latest epoch in `shared`
    for index, start, end in sorted(spans, key=lambda span: span[1]):
        at = newest.get(index) if index is not None else None
        if at is not None and start < shared[at][2]:
            shared[at] = (index, shared[at][1], max(shared[at][2], end))
            continue
        if index is not None:
            newest[index] = len(shared)
        shared.append((index, start, end))
    return shared


def _device_order(device: str) -> tuple[int, list[tuple[int, str]]]:
    """GPUs first, and gpu:2 before gpu:10."""
    order = {"gpu": 0, "cpu": 1, "dram": 2, "psys": 3}
    pieces = re.split(r"(\d+)", device)
    numbered = [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]
    return order.get(device.partition(":")[0], 4), numbered


def _named(marks: pa.Table, names: Sequence[str]) -> list[dict[str, Any]]:
    """Only these marks as dicts: a long run has millions of others."""
    return marks.filter(pc.field("name").isin(list(names))).to_pylist()


def _problem_marks(marks: pa.Table) -> list[str]:
    said = {
        "sensor_lost": "lost",
        "sensor_error": "sensor",
        "clock_step": "clock",
        "suspended": "clock",
        "left_running": "note",
        "lane_stuck": "monitor",
    }
    ours = marks.filter(pc.not_equal(marks["source"].fill_null(""), "user"))  # a program may mark anything
    plain = [f"{said[mark['name']]}: {mark['detail']}" for mark in _named(ours, list(said))]
    odd = [mark["detail"] for mark in _named(ours, ["odd_mark"])]
    return list(dict.fromkeys(plain + odd)) + what_is_incomplete(marks)


def _trace_problems(traces: Mapping[str, PowerTrace]) -> list[str]:
    still = [f"{device}: its counter never moved" for device, trace in traces.items() if stands_still(trace)]
    return still + [
        f"{device}: samples and energy counter disagree by more than a fifth in "
        f"{trace.anchors.implausible} of {trace.anchors.count} intervals; the counter was believed"
        for device, trace in traces.items()
        if trace.anchors is not None and trace.anchors.implausible
    ]


def to_json(summary: RunSummary) -> dict[str, Any]:
    """What `show --json` prints."""

    def figures(device: DeviceSummary) -> dict[str, Any]:
        return {
            "program_j": device.program_j,
            "energy_j": device.energy_j,
            "mean_w": device.mean_w,
            "peak_w": device.peak_w,
            "edp_js": device.edp_js,
            "missing_s": device.missing_s,
            "missing": [list(gap) for gap in device.missing],
            "provenance": device.provenance,
            "scope": device.scope,
            "source": device.source,
        }

    return {
        "status": summary.status,
        "exit_code": summary.exit_code,
        "signal": summary.signal,
        "duration_s": summary.duration_s,
        "missing_s": summary.missing_s,
        "program_j": summary.program_j,
        "other_j": summary.other_j,
        "monitor_j": summary.monitor_j,
        "unsplit_j": summary.unsplit_j,
        "total_j": summary.total_j,
        "devices": {name: figures(device) for name, device in summary.devices.items()},
        "shares": {name: vars(share) for name, share in summary.shares.items()},
        "owners": {name: vars(of) for name, of in summary.owners.items()},
        "epochs": [
            {
                "index": epoch.index,
                "start_ns": epoch.start_ns,
                "end_ns": epoch.end_ns,
                "duration_s": epoch.duration_s,
                "program_j": epoch.program_j,
                "devices": {name: figures(device) for name, device in epoch.devices.items()},
            }
            for epoch in summary.epochs
        ],
        "regions": [
            {
                "name": region.name,
                "count": region.count,
                "duration_s": region.duration_s,
                "spans_ns": [list(span) for span in region.spans_ns],
                "program_j": region.program_j,
                "programs_j": list(region.programs_j),
                "energy_j": dict(region.total_j),
                "energies_j": {device: list(each) for device, each in region.energies_j.items()},
            }
            for region in summary.regions
        ],
        "marks": summary.marks.select(["name", "index", "rank", "t_ns", "source", "detail"]).to_pylist(),
        "notes": summary.notes,
        "problems": summary.problems,
    }
