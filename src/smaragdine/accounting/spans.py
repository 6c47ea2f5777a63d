"""Finds stretches of time between marks: trainings, epochs, steps, and regions that a script marks itself.

The second half sorts steps: which were traced, which show what a step costs untraced, and what tracing cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.arrays import Ints
from smaragdine.arrow import pc
from smaragdine.recording.format import CALLS_OF_MODEL
from smaragdine.recording.reader import Recording
from smaragdine.recording.thinned import give_back

REGION = "region"  # the source of marks that have the region's name as their detail


@dataclass(frozen=True)
class Span:
    """For instance from `epoch_begin 3` to `epoch_end 3`, of one process and one source of marks."""

    name: str  # epoch
    index: int | None
    rank: int | None
    pid: int | None
    source: str | None
    begin_ns: int
    end_ns: int


def all_spans(recording: Recording) -> list[Span]:
    """All spans of a recording. A long run's earlier part has lost the steps that are like all others."""
    runs: list[tuple[int, tuple[object, ...]]] = []
    if recording.thinned is not None:
        for row in recording.thinned.table("steps").to_batches():
            lengths_ns = pc.list_value_length(row["lengths_us"]), pc.list_flatten(row["lengths_us"])
            who = (row[name].to_pylist() for name in ("rank", "pid", "source"))
            at = np.concatenate([[0], np.cumsum(lengths_ns[0].to_numpy(zero_copy_only=False))])
            sums = np.concatenate([[0], np.cumsum(lengths_ns[1].to_numpy(), dtype=np.int64)]) * 1000
            ends_ns = row["begin_ns"].to_numpy() + sums[at[1:]] - sums[at[:-1]]
            runs += zip(ends_ns.tolist(), zip(*who, strict=True), strict=True)
    return mark_spans(recording.marks, sorted(runs, key=lambda run: run[0]))


def mark_spans(marks: pa.Table, runs: Sequence[tuple[int, tuple[object, ...]]] = ()) -> list[Span]:
    """All that begins and ends, in the order of the ends. What never ended has no span.

    A step begins where the one before it ended, because waiting for its batch is a part of it. If something
    else began or ended in between, it begins at its own mark; without one, nobody knows. `runs` says when
    thinned steps ended, which have no marks, and whose they are, by time.
    """
    found: list[Span] = []
    left = list(reversed(runs))
    begun: dict[tuple[object, ...], tuple[int, int | None]] = {}
    step_ends_ns: dict[tuple[object, ...], int] = {}
    columns = (marks[name].to_pylist() for name in ("t_ns", "name", "index", "rank", "pid", "source"))
    for t_ns, mark, index, rank, pid, source in zip(*columns, strict=True):
        name, _, what = mark.rpartition("_")
        # A region may lie within a step, or around many.
        if what not in ("begin", "end") or not name or source == REGION:
            continue
        who = (rank, pid, source)
        while left and left[-1][0] <= t_ns:
            ended_ns, of = left.pop()
            step_ends_ns[of] = ended_ns
        if name != "step":
            for of in [of for of in step_ends_ns if of[1] == pid]:
                del step_ends_ns[of]
        if what == "begin":
            begun[name, *who] = t_ns, index
            continue
        begin_ns, begun_index = begun.pop((name, *who), (None, None))
        if name == "step":
            begin_ns = step_ends_ns.get(who, begin_ns)
            step_ends_ns[who] = t_ns
        if begin_ns is not None:
            found.append(
                Span(name, begun_index if index is None else index, rank, pid, source, begin_ns, t_ns)
            )
    return found


def region_spans(marks: pa.Table) -> list[Span]:
    """Regions that a program named, in the order of their beginnings. What never ended has no span."""
    own = marks.filter(is_region(marks))
    t_ns, names, ranks, pids = (own[name].to_pylist() for name in ("t_ns", "detail", "rank", "pid"))
    found = [
        # The clock may have been set back.
        Span(names[end] or "", None, ranks[end], pids[end], REGION, t_ns[begin], max(t_ns[begin], t_ns[end]))
        for begin, end in region_pairs(own)
    ]
    return sorted(found, key=lambda span: span.begin_ns)


def is_region(marks: pa.Table) -> pa.ChunkedArray:
    """Which marks belong to regions."""
    return pc.equal(marks["source"].fill_null(""), REGION)


def region_pairs(own: pa.Table) -> Iterator[tuple[int, int]]:
    """Pairs the rows where a region begins and ends, in the order of the ends."""
    begun: dict[tuple[int, int], int] = {}
    columns = (own[name].to_pylist() for name in ("name", "pid", "index"))
    for row, (mark, *who) in enumerate(zip(*columns, strict=True)):
        if mark == "region_begin":
            begun[who[0], who[1]] = row
        elif (who[0], who[1]) in begun:
            yield begun.pop((who[0], who[1])), row


# Steps: which were traced, which were not, and what tracing cost.

Spans = Sequence[tuple[int, int]]  # begin and end, ns; in order and disjoint

# A mark of these between the ends of two steps means that more than a step lies there.
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
_ENOUGH = 5
FAR = 3.0  # times the median, or a third of it: a compilation, a pause, a step without work
FEW = 0.25  # if more steps are that far from the median, they are no exceptions

# The kind of a step: what it counts for when we show one step. `docs/tracing.md` has the same list.
UNTRACED = "untraced"  # like any other: their mean is the step that we show
TRACED = "traced"  # the profiler listened all the while
PROFILER = "profiler"  # the profiler started or stopped meanwhile, or ran on after the last traced step
WRITING = "writing"  # the profiler's file was written beside the program
FIRST = "first"  # the program's first: it compiles and allocates
MORE = "more"  # an epoch, an evaluation or a training begins or ends in it
BEFORE = "before"  # before the first traced one, if enough come after it
ANOTHER = "far"  # much longer or shorter than the others
HANDED = "handed over"  # its mark says when the device got it, not when it was done


@dataclass(frozen=True)
class ThinnedSteps:
    """Steps of a long run's earlier part, whose readings were thinned. They come in runs of steps that follow
    each other; none was traced, and nothing else began or ended in them. Nobody knows the energy of a single
    one."""

    begin_ns: Ints  # when each run begins
    count: Ints  # how many steps each run has
    lengths_us: npt.NDArray[np.uint32]  # of every step
    kind: npt.NDArray[np.str_]  # the kind of each run's steps
    far: npt.NDArray[np.bool_]  # of every step: it is far from the median

    @cached_property
    def end_ns(self) -> Ints:
        some = np.flatnonzero(self.count)
        sums_us = np.zeros(self.count.size, dtype=np.int64)
        if some.size:  # without an array of all ends, of which there may be millions
            edges = (np.cumsum(self.count) - self.count)[some]
            sums_us[some] = np.add.reduceat(self.lengths_us, edges, dtype=np.int64)
        return self.begin_ns + sums_us * 1000

    def of(self, kind: str) -> npt.NDArray[np.bool_]:
        """Which steps are of this kind."""
        if kind == ANOTHER:
            return self.far
        return np.repeat(self.kind == kind, self.count) & ~self.far

    def counts(self) -> dict[str, int]:
        kinds = [*dict.fromkeys(self.kind.tolist()), ANOTHER]
        counted = {kind: int(self.of(kind).sum()) for kind in kinds}
        return {kind: count for kind, count in counted.items() if count}

    def called(self, kind: str, now: str) -> ThinnedSteps:
        if kind == ANOTHER:
            return dataclasses.replace(self, far=np.zeros_like(self.far))
        return dataclasses.replace(self, kind=np.where(self.kind == kind, now, self.kind))

    def untraced_ns(self) -> int:
        """The length of all untraced ones together."""
        return int(self.lengths_us.sum(where=self.of(UNTRACED), dtype=np.int64)) * 1000

    def spans_ns(self) -> list[tuple[int, int]]:
        """When the untraced ones ran, in order and disjoint."""
        spans: list[tuple[int, int]] = []
        ends = np.cumsum(self.count)
        for i in np.flatnonzero(self.kind == UNTRACED).tolist():
            lengths_us = self.lengths_us[ends[i] - self.count[i] : ends[i]]
            far = np.flatnonzero(self.far[ends[i] - self.count[i] : ends[i]])
            edges_ns = self.begin_ns[i] + np.concatenate([[0], np.cumsum(lengths_us, dtype=np.int64)]) * 1000
            begin = [int(edges_ns[0]), *edges_ns[far + 1].tolist()]
            end = [*edges_ns[far].tolist(), int(edges_ns[-1])]
            spans += [(b, e) for b, e in zip(begin, end, strict=True) if e > b]
        return spans


_NO_STEPS = ThinnedSteps(
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.uint32),
    np.zeros(0, dtype="U12"),
    np.zeros(0, dtype=np.bool_),
)


@dataclass(frozen=True)
class StepTable:
    """Every step of the one process that stands for all. A step lasts from the end of the one before it to
    its own end; a traced one begins when the profiler listens. The very first has no beginning and is left
    out."""

    rank: int | None
    pid: int | None
    source: str | None  # None: not announced: tracing found them in slices of time
    count: int  # steps that were announced
    index: Ints  # -1: not known
    spans_ns: Ints  # rows of begin and end
    kind: npt.NDArray[np.str_]
    elapsed_s: float  # from the first step's end to the last one's
    thinned: ThinnedSteps = _NO_STEPS

    @property
    def length_s(self) -> npt.NDArray[np.float64]:
        return np.asarray((self.spans_ns[:, 1] - self.spans_ns[:, 0]) * 1e-9, dtype=np.float64)

    def of(self, kind: str) -> Ints:
        """The spans of all steps of this kind."""
        return self.spans_ns[self.kind == kind]

    def counts(self) -> dict[str, int]:
        """Kind → number of steps."""
        kinds, counts = np.unique(self.kind, return_counts=True)
        found = dict(zip(kinds.tolist(), counts.tolist(), strict=True))
        for kind, count in self.thinned.counts().items():
            found[kind] = found.get(kind, 0) + count
        return found

    def called(self, kind: str, now: str) -> StepTable:
        """Counts steps of one kind as another."""
        kinds = np.where(self.kind == kind, now, self.kind)
        return dataclasses.replace(self, kind=kinds, thinned=self.thinned.called(kind, now))


@dataclass(frozen=True)
class Steps:
    """The steps whose mean is the one step that we show: of the process that traced, or the lowest rank's."""

    source: str | None  # None: not announced: tracing found them in slices of time
    count: int  # steps that were announced
    traced_ns: Ints  # rows of begin and end
    untraced_ns: Ints  # the same, without special steps and without thinned ones
    paused_s: float  # time to start and stop the profiler
    elapsed_s: float  # from the first step's end to the last one's
    tails_s: float = 0.0  # how long the profiler ran on after the last steps of its windows
    early: bool = False  # announced when the device gets them: traced lengths say nothing
    far: int = 0  # untraced ones left out, because they are far longer or shorter than the others
    uneven: int = 0  # just as far from the median, but too many to be exceptions: they count
    thinned: ThinnedSteps = _NO_STEPS
    writing_ns: Ints = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))  # of their kind

    @property
    def traced_s(self) -> float:
        """The mean of all traced ones, as in their footprint."""
        return mean_s(self.traced_ns)

    @cached_property
    def untraced_count(self) -> int:
        return len(self.untraced_ns) + int(self.thinned.of(UNTRACED).sum())

    @cached_property
    def untraced_s(self) -> float | None:
        """The mean of all untraced ones, thinned ones included; None if there are none."""
        if not self.untraced_count:
            return None
        if not self.thinned.count.size:
            return mean_s(self.untraced_ns)
        sum_ns = int((self.untraced_ns[:, 1] - self.untraced_ns[:, 0]).sum()) + self.thinned.untraced_ns()
        return sum_ns * 1e-9 / self.untraced_count

    @property
    def untraced_spans(self) -> Spans:
        """When the untraced ones ran."""
        own = [(int(begin_ns), int(end_ns)) for begin_ns, end_ns in self.untraced_ns]
        return joined([*self.thinned.spans_ns(), *own])

    def without_untraced(self) -> Steps:
        return dataclasses.replace(self, untraced_ns=self.untraced_ns[:0], thinned=_NO_STEPS)

    @property
    def slower(self) -> float | None:
        """How much longer a traced step takes than an untraced one, as a part of the latter."""
        return None if not self.untraced_s or self.early else self.traced_s / self.untraced_s - 1

    @property
    def cost(self) -> float | None:
        """How much longer tracing made all steps together, as a part of what they would have taken."""
        if self.untraced_s is None:
            return None
        longer_s = float(((self.traced_ns[:, 1] - self.traced_ns[:, 0]) * 1e-9 - self.untraced_s).sum())
        if self.early:
            longer_s = 0.0
        elif self.traced_s > 0:
            longer_s += self.tails_s * (1 - self.untraced_s / self.traced_s)
        # While the profiler's file is written beside the program, its steps are longer too.
        writing_s = float(((self.writing_ns[:, 1] - self.writing_ns[:, 0]) * 1e-9 - self.untraced_s).sum())
        spent_s = max(longer_s, 0.0) + max(writing_s, 0.0) + self.paused_s
        return spent_s / (self.elapsed_s - spent_s) if self.elapsed_s > spent_s else None


def main_steps(marks: pa.Table, thinned: pa.Table | None = None) -> pa.Table:
    """The ends of the steps that count, by time: of the lowest rank, from the source that announced most in
    one process. Calls of a model count only if that rank announced nothing else, because a training also
    evaluates with them. `thinned` steps count too, though they have no marks."""
    ends = marks.filter(pc.equal(marks["name"], "step_end"))
    nobody = {"rank": 0, "pid": 0, "source": ""}  # as in marks that somebody else wrote
    who = pa.table({name: ends[name].fill_null(without) for name, without in nobody.items()})
    groups = who.group_by(who.column_names).aggregate([([], "count_all")]).to_pylist()
    if not groups:
        return ends
    if thinned is not None:
        more = pa.table({name: thinned[name].fill_null(without) for name, without in nobody.items()})
        more = more.append_column("count", pc.list_value_length(thinned["lengths_us"]))
        for row in more.group_by(list(nobody)).aggregate([("count", "sum")]).to_pylist():
            for of in groups:
                if all(of[name] == row[name] for name in nobody):
                    of["count_all"] += row["count_sum"]
    of = min(
        groups, key=lambda of: (of["rank"], of["source"] == CALLS_OF_MODEL, -of["count_all"], of["source"])
    )
    mine = [pc.equal(who[name], of[name]) for name in nobody]
    return ends.filter(pc.and_(pc.and_(mine[0], mine[1]), mine[2])).sort_by("t_ns")


def resumed_ns(window: Mapping[str, Any]) -> int:
    """When the program went on after the profiler's window."""
    return window["stopped_ns"] if window["resumed_ns"] is None else window["resumed_ns"]


def mean_s(spans_ns: Ints) -> float:
    return float((spans_ns[:, 1] - spans_ns[:, 0]).mean()) * 1e-9


def step_table(recording: Recording) -> StepTable | None:
    """The steps of the process and source that were traced; if none were, of those that announced most steps.
    None if there are no steps."""
    windows = _windows(recording)
    if windows:
        rank, pid, source = (windows[0][who] for who in ("rank", "pid", "source"))
        marks = recording.marks.filter(pc.equal(recording.marks["pid"], pid))
        named = pc.and_(pc.equal(marks["name"], "step_end"), pc.equal(marks["source"], source))
        ends = marks.filter(named).sort_by("t_ns")  # none, if tracing found the steps in slices of time
    else:
        thinned = None if recording.thinned is None else recording.thinned.table("steps")
        ends = main_steps(recording.marks, thinned)
        if ends.num_rows < 2:
            return None
        rank, pid, source = (ends[who][0].as_py() for who in ("rank", "pid", "source"))
        marks = recording.marks.filter(pc.equal(recording.marks["pid"].fill_null(0), pid or 0))
    traced = sorted((s["begin_ns"], s["end_ns"], s["index"]) for w in windows for s in w["steps"])
    ends_ns = ends["t_ns"].to_numpy()
    heard_ns = np.array([(begin_ns, end_ns) for begin_ns, end_ns, _ in traced], dtype=np.int64).reshape(-1, 2)
    runs = _thinned(recording, pid, source)
    spans_ns = np.stack([_ends_before(ends_ns, runs.end_ns), ends_ns[1:]], axis=1)
    others = ~np.isin(spans_ns[:, 1], heard_ns[:, 1])
    spans_ns = spans_ns[others]
    boundaries_ns = _times_ns(marks.filter(pc.is_in(marks["name"], pa.array(sorted(BOUNDARIES)))))
    warm_ns = int(ends_ns[1]) if ends_ns.size > 1 else 0  # the first two compile and allocate
    kind, runs = _kinds(spans_ns, warm_ns, boundaries_ns, windows, runs)
    index = ends["index"].fill_null(-1).to_numpy()[1:][others]
    all_ns = np.concatenate([spans_ns, heard_ns])
    order = np.argsort(all_ns[:, 1], kind="stable")
    return StepTable(
        rank,
        pid,
        source,
        ends_ns.size + runs.lengths_us.size,
        np.append(index, [index for *_, index in traced]).astype(np.int64)[order],
        all_ns[order],
        np.append(kind, [TRACED] * len(traced))[order],
        float(ends_ns[-1] - ends_ns[0]) * 1e-9 if ends_ns.size else 0.0,
        runs,
    )


def _thinned(recording: Recording, pid: int | None, source: str | None) -> ThinnedSteps:
    if recording.thinned is None:
        return _NO_STEPS
    table = recording.thinned.table("steps")
    mine = pc.and_(
        pc.equal(table["pid"].fill_null(0), pid or 0), pc.equal(table["source"].fill_null(""), source or "")
    )
    # Each of these two copies all lengths, and a week has millions of them.
    if not pc.all(mine).as_py():
        table = table.filter(mine)
    if (np.diff(table["begin_ns"].to_numpy()) < 0).any():
        table = table.sort_by("begin_ns")
    begin_ns = table["begin_ns"].to_numpy()
    lengths_us = pc.list_flatten(table["lengths_us"]).to_numpy()
    count = pc.list_value_length(table["lengths_us"]).to_numpy().astype(np.int64)
    del table, mine
    give_back()
    kind = np.full(count.size, UNTRACED, dtype="U12")
    return ThinnedSteps(begin_ns, count, lengths_us, kind, np.zeros(lengths_us.size, dtype=np.bool_))


def _ends_before(ends_ns: Ints, runs_ns: Ints) -> Ints:
    """Where each step but the first begins: where the one before it ends, even if that was thinned."""
    if not runs_ns.size:
        return ends_ns[:-1]
    run = np.searchsorted(runs_ns, ends_ns[1:]) - 1
    return np.where(run >= 0, np.maximum(ends_ns[:-1], runs_ns[np.maximum(run, 0)]), ends_ns[:-1])


def _windows(recording: Recording) -> list[dict[str, Any]]:
    """The profiler's windows with traced steps, of the process and source that stand for all. If the clock
    was set back, a step may end before it begins; such steps are left out."""
    windows = [
        {**window, "steps": [step for step in window["steps"] if step["end_ns"] > step["begin_ns"]]}
        for window in recording.windows.to_pylist()
    ]
    windows = [window for window in windows if window["steps"]]
    if not windows:
        return []
    first = min(windows, key=lambda window: (window["rank"], window["asked_ns"]))
    mine = (first["pid"], first["source"])
    return [first, *(w for w in windows if (w["pid"], w["source"]) == mine and w is not first)]


def _kinds(
    spans_ns: Ints,
    warm_ns: int,
    boundaries_ns: Ints,
    windows: Sequence[dict[str, Any]],
    thinned: ThinnedSteps,
) -> tuple[npt.NDArray[np.str_], ThinnedSteps]:
    """The kind of each announced step that was not traced, and of thinned ones. Until `warm_ns` the program
    warms up."""
    begin_ns, end_ns = spans_ns[:, 0], spans_ns[:, 1]
    kind = np.full(len(spans_ns), UNTRACED, dtype="U12")
    kind[np.searchsorted(boundaries_ns, begin_ns) != np.searchsorted(boundaries_ns, end_ns)] = MORE
    kind[end_ns <= warm_ns] = FIRST
    if windows:
        kind[~_outside(begin_ns, end_ns, windows, [resumed_ns(w) for w in windows])] = PROFILER
        plain = kind == UNTRACED
        writing = plain & ~_outside(begin_ns, end_ns, windows, [w["stopped_ns"] for w in windows])
        first_ns = min(w["asked_ns"] for w in windows)
        later = plain & (begin_ns > first_ns)
        before = thinned.begin_ns <= first_ns
        many = int(thinned.count[~before].sum())
        # A short program may end while its trace is being written beside it. Those steps say more than the
        # first ones, which compile.
        if (later & ~writing).sum() + many >= _ENOUGH:
            kind[writing] = WRITING
        if later.sum() + many >= _ENOUGH:
            kind[plain & ~later] = BEFORE
            kinds = np.where(before, BEFORE, thinned.kind).astype("U12")
            thinned = dataclasses.replace(thinned, kind=kinds)
    chosen = np.flatnonzero(kind == UNTRACED)
    length_us = (end_ns[chosen] - begin_ns[chosen]) * 1e-3
    if not thinned.count.size:
        far, far_thinned = far_from_median(length_us), thinned.far
    else:
        those = thinned.of(UNTRACED)
        # In single precision, because a week has millions of steps.
        all_us = np.empty(chosen.size + np.count_nonzero(those), dtype=np.float32)
        all_us[: chosen.size] = length_us
        all_us[chosen.size :] = thinned.lengths_us if those.all() else thinned.lengths_us[those]
        both = far_from_median(all_us)
        far, far_thinned = both[: chosen.size], np.zeros_like(thinned.far)
        far_thinned[those] = both[chosen.size :]
    if far.sum() + far_thinned.sum() <= FEW * (chosen.size + thinned.of(UNTRACED).sum()):
        kind[chosen[far]] = ANOTHER
        thinned = dataclasses.replace(thinned, far=far_thinned)
    return kind, thinned


def far_from_median(lengths: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which steps are far longer or shorter than the others; with fewer than five we cannot tell."""
    if lengths.size < _ENOUGH:
        return np.zeros(lengths.size, dtype=np.bool_)
    median = float(np.median(lengths))
    return (lengths > FAR * median) | (lengths < median / FAR)


def without_pauses(table: StepTable, fits: Callable[[float], bool]) -> StepTable:
    """Decides which long steps belong to the mean: if lengths differ much, or if most steps are only handed
    over and a few wait for the device.

    A wait comes again and again: each long enough stretch of steps has one, so stretches are alike. A
    compilation or a pause comes once, and outlasts `FAR` typical stretches: it is left out. We try stretches
    of 1, 2, 4 … steps, until they are alike and their mean, in seconds, `fits`; or as long as there are five
    of them.
    """
    whole = table.called(ANOTHER, UNTRACED)
    chosen = np.flatnonzero(whole.kind == UNTRACED)
    those = whole.thinned.of(UNTRACED)
    own_us = (whole.spans_ns[chosen, 1] - whole.spans_ns[chosen, 0]) * 1e-3
    lengths_us = np.concatenate([own_us, whole.thinned.lengths_us[those]], dtype=np.float32)
    long, stretch = np.zeros(lengths_us.size, dtype=np.bool_), 1
    while lengths_us.size // stretch >= _ENOUGH:
        found = _outlasting(lengths_us, stretch)
        long = np.zeros(lengths_us.size, dtype=np.bool_) if found is None else found
        if found is not None and fits(float(lengths_us[~found].mean(dtype=np.float64)) * 1e-6):
            break
        stretch *= 2
    kind, far = whole.kind.copy(), np.zeros_like(whole.thinned.far)
    kind[chosen[long[: chosen.size]]] = ANOTHER
    far[those] = long[chosen.size :]
    return dataclasses.replace(whole, kind=kind, thinned=dataclasses.replace(whole.thinned, far=far))


def _outlasting(lengths: npt.NDArray[np.float32], stretch: int) -> npt.NDArray[np.bool_] | None:
    """Which steps are longer than `FAR` typical stretches of so many; None if stretches are not alike."""
    count = lengths.size // stretch
    begins = np.arange(count) * lengths.size // count
    sums = np.add.reduceat(lengths, begins, dtype=np.float64)
    most = FAR * float(np.median(sums))
    return None if (sums > most).sum() > FEW * count else np.asarray(lengths > most, dtype=np.bool_)


def steps_of(recording: Recording, table: StepTable | None) -> Steps | None:
    """None if no steps were traced."""
    windows = _windows(recording)
    if not windows or table is None:
        return None
    untraced_ns = table.of(UNTRACED)
    lengths_us = (untraced_ns[:, 1] - untraced_ns[:, 0]) * 1e-3
    if table.thinned.count.size:
        thinned_us = table.thinned.lengths_us[table.thinned.of(UNTRACED)]
        lengths_us = np.concatenate([lengths_us, thinned_us], dtype=np.float32)
    uneven = int(far_from_median(lengths_us).sum())
    return Steps(
        table.source,
        table.count,
        table.of(TRACED),
        untraced_ns,
        sum(w["begin_ns"] - w["asked_ns"] + resumed_ns(w) - w["end_ns"] for w in windows) * 1e-9,
        table.elapsed_s,
        sum(max(w["end_ns"] - w["steps"][-1]["end_ns"], 0) for w in windows) * 1e-9 if table.source else 0.0,
        far=table.counts().get(ANOTHER, 0),
        uneven=uneven if uneven > FEW * lengths_us.size else 0,
        thinned=table.thinned,
        writing_ns=table.of(WRITING),
    )


def _outside(
    begin_ns: Ints, end_ns: Ints, windows: Sequence[dict[str, Any]], over_ns: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """Which steps lie outside of all windows. Windows follow each other; so a step is outside if just as many
    were over before it began as had begun before it ended."""
    asked_ns = np.sort([w["asked_ns"] for w in windows])
    return np.searchsorted(asked_ns, end_ns) == np.searchsorted(np.sort(over_ns), begin_ns)


def _times_ns(marks: pa.Table) -> Ints:
    return np.sort(marks["t_ns"].to_numpy())


def traced_spans(recording: Recording, events: pa.Table) -> dict[str, Spans]:
    """Device → when it was traced.

    A processor: from the first step's beginning to the last step's end, idle or not. A GPU lags behind: from
    its first traced kernel on, because before that it still did what was asked of it untraced.
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
    """In order and disjoint: spans that touch or overlap become one."""
    whole: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if whole and begin <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((begin, end))
    return whole
