"""Measures who used each CPU socket, interval by interval: the program, the monitor, and everyone together.

The kernel counts idle time in ticks of 10 ms. So an interval lasts at least 100 ms, and goes on for up to a
second until a tenth of a CPU-second was used. The program's first and last instant always end an interval,
and none reaches across a restart of the monitor.

Some children live too short to be seen; only the kernel's exact total has their time (`program_cpu_s`). If we
watched the whole run, we give the program that much of the time that nobody is known to have used, in every
interval in proportion.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from smaragdine.accounting.power import goes_on
from smaragdine.arrays import Floats, Ints
from smaragdine.recording.reader import Recording, Series

LEAST_NS = 100_000_000
LEAST_BUSY_S = 0.1
MOST_NS = 1_000_000_000


@dataclass(frozen=True)
class Intervals:
    """CPU-seconds spent on one socket in each interval; program + monitor ≤ busy."""

    start_ns: Ints
    end_ns: Ints
    busy_s: Floats
    program_s: Floats
    monitor_s: Floats

    @property
    def length_s(self) -> Floats:
        return np.asarray((self.end_ns - self.start_ns) * 1e-9, dtype=np.float64)


_NONE = np.zeros(0)
NO_INTERVALS = Intervals(_NONE.astype(np.int64), _NONE.astype(np.int64), _NONE, _NONE, _NONE)


@dataclass(frozen=True)
class SocketUse:
    """Who used each socket; only sockets on which the program was watched."""

    sockets: Mapping[int, Intervals]  # from readings that are still there
    earlier: Mapping[int, Intervals]  # from readings that were thinned
    unseen: float  # the part that the program gets of the time nobody is known to have used


def activity(recording: Recording) -> SocketUse:
    sockets, earlier = fine_activity(recording), _thinned_activity(recording)
    thinned = recording.thinned
    if thinned is not None:
        sockets = {socket: _from(each, thinned.state.cut_ns) for socket, each in sockets.items()}
    exact_s = recording.info.get("program_cpu_s")
    sockets, unseen = _with_unseen(sockets, exact_s, run_bounds(recording), earlier)
    return SocketUse(sockets, earlier, unseen)


def fine_activity(recording: Recording) -> dict[int, Intervals]:
    """From the readings as they were taken, beginning with the last interval that was thinned."""
    by_socket: dict[int, dict[str, Series]] = {}
    for series in recording.series("activity"):
        match = re.fullmatch(r"cpu:(\d+)", series.channel.device)
        if match:
            by_socket.setdefault(int(match[1]), {})[series.channel.quantity] = series
    run_ns = run_bounds(recording)
    begun = {} if recording.thinned is None else recording.thinned.state.sockets
    return {
        socket: _intervals(
            members["busy"], members["program"], members.get("monitor"), run_ns, begun.get(str(socket))
        )
        for socket, members in by_socket.items()
        if "busy" in members and "program" in members
    }


def _thinned_activity(recording: Recording) -> dict[int, Intervals]:
    """Per socket, what thinning kept: one interval per stretch."""
    if recording.thinned is None:
        return {}
    found: dict[int, Intervals] = {}
    for device, columns in recording.thinned.stretches.items():
        match = re.fullmatch(r"cpu:(\d+)", device)
        known = np.flatnonzero(np.isfinite(columns["occupied"]))
        if match is None or not known.size:
            continue
        start_ns, end_ns = columns["start_ns"][known], columns["end_ns"][known]
        cpus_s = (end_ns - start_ns) * 1e-9 * logical_cpus(recording.info, int(match[1]))
        program_s, monitor_s, foreign_s = (
            columns[name][known] * cpus_s for name in ("occupied", "monitor", "foreign")
        )
        busy_s = program_s + monitor_s + foreign_s
        found[int(match[1])] = Intervals(start_ns, end_ns, busy_s, program_s, monitor_s)
    return found


def logical_cpus(info: Mapping[str, Any], socket: int) -> float:
    """How many logical CPUs a socket has; nan if run.json does not say."""
    of: Any = info
    for key in ("host", "sockets", f"cpu:{socket}", "logical_cpus"):
        of = of.get(key) if isinstance(of, Mapping) else None
    return float(of) if isinstance(of, int | float) and 1 <= of < math.inf else math.nan


def _from(intervals: Intervals, begin_ns: int) -> Intervals:
    """The intervals from `begin_ns` on; an interval around it counts in part."""
    kept = np.flatnonzero(intervals.end_ns > begin_ns)
    start_ns, end_ns = intervals.start_ns[kept], intervals.end_ns[kept]
    part = (end_ns - np.maximum(start_ns, begin_ns)) / (end_ns - start_ns)
    spent_s = (each[kept] * part for each in (intervals.busy_s, intervals.program_s, intervals.monitor_s))
    return Intervals(np.maximum(start_ns, begin_ns), end_ns, *spent_s)


def run_bounds(recording: Recording) -> tuple[int, int]:
    """The program's first and last instant; if the recording was cut off, its last reading."""
    begin_ns = recording.info.get("begin_ns") or recording.info["clock"]["begin"]["wall_ns"]
    end_ns = recording.info.get("end_ns")
    if not end_ns:
        everything = [s for s in (*recording.series("power"), *recording.series("activity")) if s.t_ns.size]
        end_ns = max((int(series.t_ns.max()) for series in everything), default=begin_ns)
    return begin_ns, max(begin_ns, end_ns)


def _intervals(
    busy: Series,
    program: Series,
    monitor: Series | None,
    run_ns: tuple[int, int],
    begun_ns: int | None = None,
) -> Intervals:
    """If `begun_ns` is given, an interval ended at this reading of `busy`, and earlier readings are
    skipped."""
    start_ns, end_ns = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    spent_s = [np.zeros((3, 0))]
    for segment in np.unique(busy.segment):
        t_ns, busy_s = _totals(busy, segment)
        if begun_ns is not None:
            after = t_ns >= begun_ns
            t_ns, busy_s = t_ns[after], busy_s[after]
        if not t_ns.size:
            continue
        program_ns, program_s = _watched(*_totals(program, segment), restarted=segment > 0)
        if not program_ns.size:
            continue
        first_ns, last_ns = int(max(t_ns[0], program_ns[0])), int(min(t_ns[-1], program_ns[-1]))
        if last_ns <= first_ns:
            continue
        points = [first_ns]
        for edges in pairwise(sorted({first_ns, last_ns, *(t for t in run_ns if first_ns < t < last_ns)})):
            points += _points(t_ns, busy_s, *edges)
        at_ns = np.array(points, dtype=np.int64)
        program_spent_s = _spent(program_ns, program_s, at_ns)
        monitor_spent_s = (
            _spent(*_totals(monitor, segment), at_ns) if monitor is not None else np.zeros(at_ns.size - 1)
        )
        # The program's clock is exact, the machine's counts in ticks: the whole is never less than its parts.
        busy_spent_s = np.maximum(_spent(t_ns, busy_s, at_ns), program_spent_s + monitor_spent_s)
        start_ns.append(at_ns[:-1])
        end_ns.append(at_ns[1:])
        spent_s.append(np.stack([busy_spent_s, program_spent_s, monitor_spent_s]))
    return Intervals(np.concatenate(start_ns), np.concatenate(end_ns), *np.concatenate(spent_s, axis=1))


def _totals(series: Series, segment: int) -> tuple[Ints, Floats]:
    """One segment's readings in rising time. A wall clock that was set back gives the same time twice."""
    rows = np.flatnonzero(series.segment == segment)
    rows = rows[goes_on(series.t_ns[rows])]
    return series.t_ns[rows], np.maximum.accumulate(series.value[rows])


def _watched(t_ns: Ints, program_s: Floats, restarted: bool) -> tuple[Ints, Floats]:
    """Drops the readings of a restarted monitor that came before it knew which program to watch."""
    if not restarted:
        return t_ns, program_s
    begun = max(int(np.count_nonzero(program_s <= 0)) - 1, 0) if program_s.any() else t_ns.size
    return t_ns[begun:], program_s[begun:]


def _points(t_ns: Ints, busy_s: Floats, begin_ns: int, end_ns: int) -> list[int]:
    """The readings at which the intervals after `begin_ns` end; the last one ends at `end_ns`."""
    inside = slice(np.searchsorted(t_ns, begin_ns, side="right"), np.searchsorted(t_ns, end_ns))
    last_ns, last_s = begin_ns, float(_at(t_ns, busy_s, np.array([begin_ns]))[0])
    points: list[int] = []
    for now_ns, now_s in zip(t_ns[inside].tolist(), busy_s[inside].tolist(), strict=True):
        length_ns = now_ns - last_ns
        if length_ns >= LEAST_NS and (now_s - last_s >= LEAST_BUSY_S or length_ns >= MOST_NS):
            points.append(now_ns)
            last_ns, last_s = now_ns, now_s
    if points and end_ns - last_ns < LEAST_NS:
        points.pop()
    return [*points, end_ns]


def _at(t_ns: Ints, value: Floats, at_ns: Ints) -> Floats:
    # Relative to the first reading: a double cannot hold nanoseconds since 1970.
    return np.interp((at_ns - t_ns[0]).astype(np.float64), (t_ns - t_ns[0]).astype(np.float64), value)


def _spent(t_ns: Ints, value: Floats, at_ns: Ints) -> Floats:
    return np.diff(_at(t_ns, value, at_ns)) if t_ns.size else np.zeros(at_ns.size - 1)


def _with_unseen(
    sockets: dict[int, Intervals],
    exact_s: float | None,
    run_ns: tuple[int, int],
    earlier: Mapping[int, Intervals],
) -> tuple[dict[int, Intervals], float]:
    begin_ns, end_ns = run_ns
    in_run = {s: (each.start_ns >= begin_ns) & (each.end_ns <= end_ns) for s, each in sockets.items()}
    before = {s: _sums_within(each, run_ns) for s, each in earlier.items()}
    for s, each in sockets.items():
        looked_ns = int((each.end_ns - each.start_ns)[in_run[s]].sum()) + (before[s][0] if s in before else 0)
        if looked_ns < end_ns - begin_ns:
            return sockets, 0.0  # the rest may have been spent while nobody looked
    seen_s = sum(float(each.program_s[in_run[s]].sum()) for s, each in sockets.items())
    seen_s += sum(program_s for _, program_s, _ in before.values())
    free_s = {s: (each.busy_s - each.program_s - each.monitor_s) * in_run[s] for s, each in sockets.items()}
    all_free_s = sum(float(free.sum()) for free in free_s.values())
    all_free_s += sum(free for _, _, free in before.values())
    if exact_s is None or exact_s <= seen_s or all_free_s <= 0:
        return sockets, 0.0
    part = min(1.0, (exact_s - seen_s) / all_free_s)
    whole = {s: replace(each, program_s=each.program_s + part * free_s[s]) for s, each in sockets.items()}
    return whole, part


def _sums_within(intervals: Intervals, run_ns: tuple[int, int]) -> tuple[int, float, float]:
    """Seconds, the program's CPU time, and CPU time of nobody known, over the intervals within a run."""
    inside = (intervals.start_ns >= run_ns[0]) & (intervals.end_ns <= run_ns[1])
    free_s = intervals.busy_s - intervals.program_s - intervals.monitor_s
    return (
        int((intervals.end_ns - intervals.start_ns)[inside].sum()),
        float(intervals.program_s[inside].sum()),
        float(free_s[inside].sum()),
    )
