"""Traced steps and untraced ones: what tracing cost, and what a step costs without it.

Tracing stretches a step, mostly by idling. So a traced step says how long which operation is busy and what it
draws, and an untraced one how long a step is and how much energy it takes. Idle that tracing itself caused is
not carried over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from smaragdine.accounting.arithmetic import per_step, scale
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.idle import busy_spans, resumed_ns
from smaragdine.accounting.meters import Meters, Spans
from smaragdine.accounting.traces import device_traces
from smaragdine.recording.reader import Recording

pc: Any = pyarrow.compute  # its functions are made on import, where no type checker sees them

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Between two ends of steps they say that more than a step lies there.
BOUNDARIES = frozenset(
    {
        "train_begin",
        "epoch_begin",
        "epoch_end",
        "evaluate_begin",
        "evaluate_end",
        "predict_begin",
        "predict_end",
    }
)
_CALLS = "torch:forward"  # the source of marks that are calls of a model; a training evaluates by them
_WARM_UP = 2  # steps that compile and allocate
_ENOUGH = 5
_FITS = 1.25


@dataclass(frozen=True)
class Steps:
    """The steps of the process that traced, of the lowest rank where there are several."""

    source: str | None  # None: nobody announced them, they were found in slices of time
    count: int  # all that were announced
    traced_ns: Ints  # rows of begin and end
    untraced_ns: Ints  # the same, without the first ones and those in which the profiler started or stopped
    paused_s: float  # to start and stop the profiler
    elapsed_s: float  # from the first step's end to the last one's
    tails_s: float = 0.0  # the profiler ran on so long, after the last step of a window

    @property
    def traced_s(self) -> float:
        return _median_s(self.traced_ns)

    @property
    def untraced_s(self) -> float | None:
        return _median_s(self.untraced_ns) if len(self.untraced_ns) else None

    @property
    def slower(self) -> float | None:
        """How much longer a traced step takes, as a part of an untraced one."""
        return None if not self.untraced_s else self.traced_s / self.untraced_s - 1

    @property
    def cost(self) -> float | None:
        """How much longer all steps together took, as a part of what they would have taken."""
        if self.untraced_s is None:
            return None
        longer_s = float(((self.traced_ns[:, 1] - self.traced_ns[:, 0]) * 1e-9 - self.untraced_s).sum())
        if self.traced_s > 0:
            longer_s += self.tails_s * (1 - self.untraced_s / self.traced_s)
        spent_s = max(longer_s, 0.0) + self.paused_s
        return spent_s / (self.elapsed_s - spent_s) if self.elapsed_s > spent_s else None


@dataclass(frozen=True)
class UntracedStep:
    """What a device does in a step that nobody traced."""

    length_s: float
    energy_j: float
    busy_s: float  # something ran, as in the traced steps
    idle_j: float
    factor: float | None  # operations cost this many times what they cost in a traced step


def _median_s(spans_ns: Ints) -> float:
    return float(np.median(spans_ns[:, 1] - spans_ns[:, 0])) * 1e-9


def steps_of(recording: Recording) -> Steps | None:
    """None where no steps were traced."""
    windows = [window for window in recording.windows.to_pylist() if window["steps"]]
    if not windows:
        return None
    first = min(windows, key=lambda window: (window["rank"], window["asked_ns"]))
    pid, source = first["pid"], first["source"]
    mine = [window for window in windows if (window["pid"], window["source"]) == (pid, source)]
    marks = recording.marks.filter(pc.equal(recording.marks["pid"], pid))
    # Steps found in slices of time were announced by nobody.
    ends_ns = _times_ns(
        marks.filter(pc.and_(pc.equal(marks["name"], "step_end"), pc.equal(marks["source"], source)))
    )
    boundaries_ns = _times_ns(marks.filter(pc.is_in(marks["name"], pa.array(sorted(BOUNDARIES)))))
    traced = [(step["begin_ns"], step["end_ns"]) for window in mine for step in window["steps"]]
    return Steps(
        source,
        ends_ns.size,
        _pairs(traced),
        _untraced(ends_ns, boundaries_ns, mine),
        sum(w["begin_ns"] - w["asked_ns"] + resumed_ns(w) - w["end_ns"] for w in mine) * 1e-9,
        float(ends_ns[-1] - ends_ns[0]) * 1e-9 if ends_ns.size else 0.0,
        sum(max(w["end_ns"] - w["steps"][-1]["end_ns"], 0) for w in mine) * 1e-9 if source else 0.0,
    )


def _untraced(ends_ns: Ints, boundaries_ns: Ints, windows: Sequence[dict[str, Any]]) -> Ints:
    begin_ns, end_ns = ends_ns[:-1], ends_ns[1:]
    plain = np.searchsorted(boundaries_ns, begin_ns) == np.searchsorted(boundaries_ns, end_ns)
    first_ns, last_ns = (np.array(sorted(w[key] for w in windows)) for key in ("asked_ns", "stopped_ns"))
    # One after the other, windows overlap a step where as many began before its end as ended before its
    # beginning, and one more.
    plain &= np.searchsorted(first_ns, end_ns) == np.searchsorted(last_ns, begin_ns)
    plain[: _WARM_UP - 1] = False  # the very first has no beginning
    later = plain & (begin_ns > first_ns[0])
    return np.stack([begin_ns, end_ns], axis=1)[later if later.sum() >= _ENOUGH else plain]


def _times_ns(marks: pa.Table) -> Ints:
    return np.sort(marks["t_ns"].to_numpy())


def _pairs(spans: Sequence[tuple[int, int]]) -> Ints:
    return np.array(sorted(spans), dtype=np.int64).reshape(-1, 2)


def untraced_step(
    footprint: Footprint, meters: Meters, steps: Steps, events: pa.Table
) -> dict[str, UntracedStep]:
    """Device → what it does in an untraced step.

    `footprint` is that of the traced steps; `meters` have the power of `steps.untraced_ns`.
    """
    found: dict[str, UntracedStep] = {}
    count = len(steps.untraced_ns)
    for device, total in footprint.devices.items():
        meter = meters.of.get(device)
        if meter is None or not count or not meter.trace.start_ns.size:
            continue
        covered_s = float((meter.trace.end_ns - meter.trace.start_ns).sum()) * 1e-9
        length_s = float((steps.untraced_ns[:, 1] - steps.untraced_ns[:, 0]).mean()) * 1e-9
        power_w = (
            float((meter.trace.power_w * (meter.trace.end_ns - meter.trace.start_ns)).sum())
            * 1e-9
            / covered_s
        )
        energy_j = power_w * length_s
        traced = max(total.steps, 1)
        busy_s = min(_busy_s(events, device), total.covered_s)
        idle_w = total.idle_j / (total.covered_s - busy_s) if total.covered_s > busy_s else 0.0
        if meter.idle_w is not None:
            idle_w = meter.idle_w
        operations_j = (total.total_j - total.idle_j) / traced
        idle_j = min(max(length_s - busy_s / traced, 0.0) * idle_w, energy_j)
        if operations_j > 0:
            factor = (energy_j - idle_j) / operations_j
        else:
            factor, idle_j = None, energy_j  # memory, or a socket nothing was traced on
        found[device] = UntracedStep(length_s, energy_j, busy_s / traced, idle_j, factor)
    return found


def runs_behind(steps: Steps, untraced: Mapping[str, UntracedStep]) -> bool:
    """Whether marks only say when work was handed over: more runs in a step than fits into it."""
    if not len(steps.traced_ns):
        return False
    traced_s = float((steps.traced_ns[:, 1] - steps.traced_ns[:, 0]).mean()) * 1e-9
    return any(step.busy_s > _FITS * max(traced_s, step.length_s) for step in untraced.values())


def at_level(footprint: Footprint, untraced: Mapping[str, UntracedStep]) -> Footprint:
    """The footprint of one untraced step: the traced operations at its level, with its idle."""
    one = per_step(footprint)
    factors = {device: step.factor for device, step in untraced.items()}
    levelled = scale(one, {device: factors.get(device) or 1.0 for device in one.devices})
    devices = {
        device: dataclasses.replace(
            total,
            total_j=untraced[device].energy_j,
            idle_j=untraced[device].idle_j,
            covered_s=untraced[device].length_s,
            missing_s=0.0,
            static_j=None,
            other_j=None,
        )
        if device in untraced
        else total
        for device, total in levelled.devices.items()
    }
    rows = levelled.rows
    if untraced:
        # Busy time stands as it was traced: only the level is another.
        rows = rows.set_column(rows.schema.get_field_index("busy_s"), "busy_s", one.rows["busy_s"])
        rows = rows.set_column(rows.schema.get_field_index("count"), "count", one.rows["count"])
        # Where idling takes all the energy of an untraced step, nothing is left for operations.
        nothing = [factors.get(device) == 0 for device in rows["device"].to_pylist()]
        left_j = pc.if_else(pa.array(nothing, pa.bool_()), 0.0, rows["energy_j"])
        rows = rows.set_column(rows.schema.get_field_index("energy_j"), "energy_j", left_j)
    return dataclasses.replace(levelled, rows=rows, devices=devices)


def _busy_s(events: pa.Table, device: str) -> float:
    """Time in which at least one event ran."""
    here = events.filter(pc.equal(events["device"].cast(pa.string()), device))
    start_ns = here["start_ns"].to_numpy()
    begin_ns, until_ns = busy_spans(start_ns, start_ns + here["duration_ns"].to_numpy())
    return float((until_ns - begin_ns).sum()) * 1e-9


def traced_spans(recording: Recording, events: pa.Table) -> dict[str, Spans]:
    """Device → when it was traced.

    A processor is idle, or not, from the first step's beginning to the last one's end. A GPU lags behind: it
    is known from its first traced kernel on, before which it did what was asked of it untraced.
    """
    windows = recording.windows.to_pylist()
    names: list[str] = sorted(set(events["device"].cast(pa.string()).unique().to_pylist()))
    start_ns = events["start_ns"].to_numpy()
    end_ns = start_ns + events["duration_ns"].to_numpy()
    device = events["device"].cast(pa.string()).to_numpy(zero_copy_only=False)
    found: dict[str, list[tuple[int, int]]] = {"": [], **{name: [] for name in names}}
    for window in windows:
        bounds = [(s["begin_ns"], s["end_ns"]) for s in window["steps"]] or [
            (window["begin_ns"], window["end_ns"])
        ]
        begin, end = min(b for b, _ in bounds), max(e for _, e in bounds)
        found[""].append((begin, end))
        inside = (start_ns >= window["begin_ns"]) & (start_ns <= window["stopped_ns"])
        for name in names:
            here = inside & (device == name)
            if name.startswith("gpu") and here.any():
                found[name].append((int(start_ns[here].min()), int(end_ns[here].max())))
            elif not name.startswith("gpu"):
                last = int(end_ns[here].max()) if here.any() else end
                found[name].append((begin, max(end, last)))
    return {name: joined(spans) for name, spans in found.items()}


def joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order and disjoint."""
    whole: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if whole and begin <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((begin, end))
    return whole


@dataclass(frozen=True)
class StepEnergies:
    """Every announced step, as long as the time since the one before. Whole devices, whoever used them."""

    index: Ints
    spans_ns: Ints  # rows of begin and end
    traced: npt.NDArray[np.bool_]  # the profiler ran, started or stopped in it
    energy_j: Mapping[str, Floats]  # per device

    @property
    def length_s(self) -> Floats:
        return np.asarray((self.spans_ns[:, 1] - self.spans_ns[:, 0]) * 1e-9, dtype=np.float64)

    @property
    def sum_j(self) -> Floats:
        return np.sum([np.zeros(len(self.spans_ns)), *self.energy_j.values()], axis=0)


def step_energies(recording: Recording) -> StepEnergies | None:
    """Of the process that announced most steps, of a training rather than calls of a model; None: nobody."""
    ends = recording.marks.filter(pc.equal(recording.marks["name"], "step_end"))
    if ends.num_rows < 2:
        return None
    groups = ends.group_by(["pid", "source"]).aggregate([([], "count_all"), ("rank", "min")]).to_pylist()
    most = max(
        groups, key=lambda each: (each["source"] != _CALLS, each["count_all"], -(each["rank_min"] or 0))
    )
    mine = pc.and_(pc.equal(ends["pid"], most["pid"]), pc.equal(ends["source"], most["source"]))
    ends = ends.filter(mine).sort_by("t_ns")
    t_ns = ends["t_ns"].to_numpy()
    spans = np.stack([t_ns[:-1], t_ns[1:]], axis=1)
    traced = np.zeros(len(spans), dtype=np.bool_)
    for window in recording.windows.to_pylist():
        if window["pid"] == most["pid"]:
            traced |= (spans[:, 1] > window["asked_ns"]) & (spans[:, 0] < window["stopped_ns"])
    return StepEnergies(
        ends["index"].fill_null(-1).to_numpy()[1:],
        spans,
        traced,
        {
            device: np.diff(trace.energy_until_j(t_ns))
            for device, trace in device_traces(recording).items()
            if trace.start_ns.size
        },
    )
