"""Finds what a GPU draws when idle, and uses it to sharpen the power that its sensor shows.

A sensor averages over 20 to 100 ms, and a GPU that waits for its processor is idle for half of that. If we
shared this mean over time as it is, idle time would be charged with the kernels' energy. But we can find out
what the idle GPU draws: nothing runs on it after the last step, nor while the profiler stops; and a traced
step runs the same kernels as an untraced one, takes longer, and idles the rest. So within each reading we
give idle time that power, and the rest of the energy to the time in which something ran. Every reading keeps
its energy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from smaragdine.accounting.integral import sum_by
from smaragdine.accounting.power import PowerTrace, distinct
from smaragdine.accounting.spans import Steps, mean_s, resumed_ns
from smaragdine.accounting.uncertainty import Windows
from smaragdine.arrays import Ints
from smaragdine.recording.reader import Recording

_LEAST_NS = 50_000_000  # several readings of a sensor that averages over 20 or 25 ms
# A traced step must be so much longer, alone and all together, that the sensor cannot explain the difference.
_LONGER, _LONGER_S = 1.25, 0.2
_NEAR = 3  # untraced steps per traced one, the nearest: a GPU warms up
_WORKED = 1.2  # times what steps say: at more than that the GPU was not idle all the while


def idle_w(recording: Recording, traces: Mapping[str, PowerTrace], steps: Steps | None) -> dict[str, float]:
    """The power of each GPU while nothing runs on it; GPUs of which nobody could see it are left out.

    Only if a single process traced: other processes' work would go on.
    """
    windows = [window for window in recording.windows.to_pylist() if window["steps"] and window["source"]]
    if steps is None or not traces or len({window["pid"] for window in windows}) != 1:
        return {}
    last_ns = max(int(each_ns.max()) for each_ns in (steps.traced_ns, steps.untraced_ns) if each_ns.size)
    end_ns = int(recording.marks["t_ns"].to_numpy().max(initial=last_ns))
    quiet_ns = [*((window["end_ns"], resumed_ns(window)) for window in windows), (last_ns, end_ns)]
    found = {device: _idle_w(trace, steps, quiet_ns) for device, trace in traces.items()}
    return {device: watts for device, watts in found.items() if watts is not None}


def _idle_w(trace: PowerTrace, steps: Steps, quiet_ns: Sequence[tuple[int, int]]) -> float | None:
    """From readings of spans in which the GPU may have been idle, checked against its steps."""
    read_w = _lowest_w(trace, quiet_ns)
    if read_w is not None and read_w >= _mean_j(trace, steps.traced_ns) / mean_s(steps.traced_ns):
        read_w = None  # the GPU was working
    steps_w = _from_steps_w(steps, trace)
    if read_w is None or steps_w is None:
        return steps_w if read_w is None else read_w
    return read_w if read_w <= _WORKED * steps_w else steps_w


def _lowest_w(trace: PowerTrace, spans_ns: Sequence[tuple[int, int]]) -> float | None:
    """The lowest mean power within these spans over a time that is long enough for the sensor: at other times
    the GPU may still have been working."""
    found_w: list[float] = []
    for begin_ns, end_ns in spans_ns:
        start_ns = trace.start_ns[(trace.start_ns >= begin_ns) & (trace.start_ns + _LEAST_NS <= end_ns)]
        until_ns = start_ns + _LEAST_NS
        whole = trace.covered_until_ns(until_ns) - trace.covered_until_ns(start_ns) == _LEAST_NS
        energy_j = trace.energy_until_j(until_ns[whole]) - trace.energy_until_j(start_ns[whole])
        found_w += (energy_j / (_LEAST_NS * 1e-9)).tolist()
    return min(found_w, default=None)


def _from_steps_w(steps: Steps, trace: PowerTrace) -> float | None:
    """How much more energy a traced step takes than an untraced one, divided by how much longer it is."""
    if not len(steps.untraced_ns):
        return None
    traced_ns = steps.traced_ns
    apart_ns = np.abs(steps.untraced_ns.mean(axis=1) - traced_ns.mean())
    near_ns = steps.untraced_ns[np.argsort(apart_ns, kind="stable")[: _NEAR * len(traced_ns)]]
    longer_s = mean_s(traced_ns) - mean_s(near_ns)
    if mean_s(traced_ns) < _LONGER * mean_s(near_ns) or longer_s * len(traced_ns) < _LONGER_S:
        return None
    traced_j, near_j = _mean_j(trace, traced_ns), _mean_j(trace, near_ns)
    found_w = (traced_j - near_j) / longer_s
    # No GPU draws less when busy: if it seems so, something else differed too.
    return found_w if 0 < found_w < min(traced_j / mean_s(traced_ns), near_j / mean_s(near_ns)) else None


def _mean_j(trace: PowerTrace, spans_ns: Ints) -> float:
    return float((trace.energy_until_j(spans_ns[:, 1]) - trace.energy_until_j(spans_ns[:, 0])).mean())


def busy_spans(start_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints]:
    """Beginnings and ends of the time in which at least one event ran, in order and disjoint."""
    order = np.argsort(start_ns, kind="stable")
    start_ns, reached_ns = start_ns[order], np.maximum.accumulate(end_ns[order])
    first = np.ones(start_ns.size, dtype=np.bool_)
    first[1:] = start_ns[1:] > reached_ns[:-1]
    last = np.append(np.flatnonzero(first)[1:] - 1, start_ns.size - 1) if start_ns.size else first
    begin_ns, until_ns = start_ns[first], reached_ns[last]
    some = until_ns > begin_ns
    return begin_ns[some], until_ns[some]


def sharpen(trace: PowerTrace, busy: tuple[Ints, Ints], idle_w: float, limit_w: float) -> PowerTrace:
    """Moves power within each stretch: `idle_w` while idle, the rest while busy. Idle time gets less if there
    is not as much, and more if busy time would go beyond `limit_w`. No stretch changes its energy."""
    begin_ns, until_ns = busy
    inside = distinct(np.concatenate([trace.start_ns, trace.end_ns, begin_ns, until_ns]))
    start_ns, end_ns = inside[:-1], inside[1:]
    stretch = np.searchsorted(trace.start_ns, start_ns, side="right") - 1
    known = stretch >= 0
    known[known] = start_ns[known] < trace.end_ns[stretch[known]]
    start_ns, end_ns, stretch = start_ns[known], end_ns[known], stretch[known]
    span = np.searchsorted(begin_ns, start_ns, side="right") - 1
    runs = span >= 0
    runs[runs] = start_ns[runs] < until_ns[span[runs]]
    count = trace.start_ns.size
    length_s = (trace.end_ns - trace.start_ns) * 1e-9
    busy_s = np.bincount(stretch[runs], (end_ns - start_ns)[runs] * 1e-9, minlength=count)
    idle_s = np.maximum(length_s - busy_s, 0.0)
    energy_j = trace.power_w * length_s
    mixed = (busy_s > 0) & (idle_s > 0) & (energy_j > 0)
    quiet_w = np.minimum(trace.power_w, idle_w)
    with np.errstate(divide="ignore", invalid="ignore"):
        loud_w = np.minimum((energy_j - quiet_w * idle_s) / busy_s, np.maximum(limit_w, trace.power_w))
        quiet_w = np.maximum((energy_j - loud_w * busy_s) / idle_s, 0.0)
    loud_w, quiet_w = np.where(mixed, loud_w, trace.power_w), np.where(mixed, quiet_w, trace.power_w)
    power_w = np.where(runs, loud_w[stretch], quiet_w[stretch])
    return dataclasses.replace(trace, start_ns=start_ns, end_ns=end_ns, power_w=power_w)


def without_idle(seen: Windows, idle_w: float, limit_w: float) -> Windows:
    """The same windows without their idle time: what the sensor says of busy time alone."""
    busy_s = sum_by(seen.window, seen.share_s, seen.energy_j.size)
    idle_s = np.maximum(seen.length_s - busy_s, 0.0)
    energy_j = seen.energy_j - idle_s * np.minimum(idle_w, seen.energy_j / seen.length_s)
    some = busy_s > 0
    return seen._replace(
        energy_j=np.minimum(energy_j, np.maximum(limit_w * busy_s, seen.energy_j * busy_s / seen.length_s))[
            some
        ],
        length_s=busy_s[some],
        window=(np.cumsum(some) - 1)[seen.window],
    )
