"""Which steps were traced and which were not, and what tracing cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from smaragdine.recording.reader import Recording

pc: Any = pyarrow.compute  # its functions are made on import, where no type checker sees them

Ints = npt.NDArray[np.int64]
Spans = Sequence[tuple[int, int]]  # begin and end, ns; in order and disjoint

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
_CALLS = "torch:forward"  # the source of marks that are calls of a model
_WARM_UP = 2  # steps that compile and allocate
_ENOUGH = 5


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
    early: bool = False  # announced when they are handed to the device: traced lengths say nothing

    @property
    def traced_s(self) -> float:
        return _median_s(self.traced_ns)

    @property
    def untraced_s(self) -> float | None:
        return _median_s(self.untraced_ns) if len(self.untraced_ns) else None

    @property
    def untraced_mean_s(self) -> float | None:
        """What goes with a mean energy; a few that are held up make it longer than most are."""
        long_ns = self.untraced_ns[:, 1] - self.untraced_ns[:, 0]
        return float(long_ns.mean()) * 1e-9 if long_ns.size else None

    @property
    def slower(self) -> float | None:
        """How much longer a traced step takes, as a part of an untraced one."""
        return None if not self.untraced_s or self.early else self.traced_s / self.untraced_s - 1

    @property
    def cost(self) -> float | None:
        """How much longer all steps together took, as a part of what they would have taken."""
        if self.untraced_s is None:
            return None
        longer_s = float(((self.traced_ns[:, 1] - self.traced_ns[:, 0]) * 1e-9 - self.untraced_s).sum())
        if self.early:
            longer_s = 0.0
        elif self.traced_s > 0:
            longer_s += self.tails_s * (1 - self.untraced_s / self.traced_s)
        spent_s = max(longer_s, 0.0) + self.paused_s
        return spent_s / (self.elapsed_s - spent_s) if self.elapsed_s > spent_s else None


def main_steps(marks: pa.Table) -> pa.Table:
    """The ends of the steps that count, by time: of the lowest rank, by the source that announced most in one
    process; calls of a model only where it announced nothing else, for a training evaluates by them."""
    ends = marks.filter(pc.equal(marks["name"], "step_end"))
    nobody = {"rank": 0, "pid": 0, "source": ""}  # as a mark of a foreign hand may have it
    who = pa.table({name: ends[name].fill_null(without) for name, without in nobody.items()})
    groups = who.group_by(who.column_names).aggregate([([], "count_all")]).to_pylist()
    if not groups:
        return ends
    of = min(groups, key=lambda of: (of["rank"], of["source"] == _CALLS, -of["count_all"], of["source"]))
    mine = [pc.equal(who[name], of[name]) for name in nobody]
    return ends.filter(pc.and_(pc.and_(mine[0], mine[1]), mine[2])).sort_by("t_ns")


def resumed_ns(window: Mapping[str, Any]) -> int:
    """When the program went on after a window."""
    return window["stopped_ns"] if window["resumed_ns"] is None else window["resumed_ns"]


def mean_s(spans_ns: Ints) -> float:
    return float((spans_ns[:, 1] - spans_ns[:, 0]).mean()) * 1e-9


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
    plain[: _WARM_UP - 1] = False  # the very first has no beginning
    spans = np.stack([begin_ns, end_ns], axis=1)
    first_ns = min(w["asked_ns"] for w in windows)
    # A short program may end while its trace is still being written beside it: those steps tell more than the
    # first ones, which compile.
    for over_ns in ([w["stopped_ns"] for w in windows], [resumed_ns(w) for w in windows]):
        outside = plain & _outside(begin_ns, end_ns, windows, over_ns)
        later = outside & (begin_ns > first_ns)
        if later.sum() >= _ENOUGH:
            return spans[later]
    return spans[outside]


def _outside(
    begin_ns: Ints, end_ns: Ints, windows: Sequence[dict[str, Any]], over_ns: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """One after the other, windows overlap a step where as many began before its end as were over before its
    beginning, and one more."""
    asked_ns = np.sort([w["asked_ns"] for w in windows])
    return np.searchsorted(asked_ns, end_ns) == np.searchsorted(np.sort(over_ns), begin_ns)


def _times_ns(marks: pa.Table) -> Ints:
    return np.sort(marks["t_ns"].to_numpy())


def _pairs(spans: Sequence[tuple[int, int]]) -> Ints:
    return np.array(sorted(spans), dtype=np.int64).reshape(-1, 2)


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
