"""Stretches of time between marks: training, epochs, steps, and what a script marks itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from smaragdine.arrow import pc
from smaragdine.recording.reader import Recording

REGION = "region"  # the source of marks whose name is their detail


@dataclass(frozen=True)
class Span:
    """From `epoch_begin 3` to `epoch_end 3` of one process, announced by one source."""

    name: str  # epoch
    index: int | None
    rank: int | None
    pid: int | None
    source: str | None
    begin_ns: int
    end_ns: int


def all_spans(recording: Recording) -> list[Span]:
    """Those of a recording; of a long run's earlier part without the steps that are like all others."""
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
    """All that begins and ends, by its end; what never ended has no span.

    A step begins where the one before it ended: to wait for its batch is a part of it. Where something else
    began or ended in between it begins where that is announced; where it is not, nobody knows. `runs`: when
    steps ended that have no mark, and whose, by time.
    """
    found: list[Span] = []
    left = list(reversed(runs))
    begun: dict[tuple[object, ...], tuple[int, int | None]] = {}
    step_ends_ns: dict[tuple[object, ...], int] = {}
    columns = (marks[name].to_pylist() for name in ("t_ns", "name", "index", "rank", "pid", "source"))
    for t_ns, mark, index, rank, pid, source in zip(*columns, strict=True):
        name, _, what = mark.rpartition("_")
        # A region may be in the middle of a step as well as around many.
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
    """Those that a program named itself, by their beginning; what never ended has no span."""
    own = marks.filter(is_region(marks))
    t_ns, names, ranks, pids = (own[name].to_pylist() for name in ("t_ns", "detail", "rank", "pid"))
    found = [
        # The clock may have been set back.
        Span(names[end] or "", None, ranks[end], pids[end], REGION, t_ns[begin], max(t_ns[begin], t_ns[end]))
        for begin, end in region_pairs(own)
    ]
    return sorted(found, key=lambda span: span.begin_ns)


def is_region(marks: pa.Table) -> pa.ChunkedArray:
    """Which marks are of regions."""
    return pc.equal(marks["source"].fill_null(""), REGION)


def region_pairs(own: pa.Table) -> Iterator[tuple[int, int]]:
    """Among marks of regions, the rows in which one begins and ends, by its end."""
    begun: dict[tuple[int, int], int] = {}
    columns = (own[name].to_pylist() for name in ("name", "pid", "index"))
    for row, (mark, *who) in enumerate(zip(*columns, strict=True)):
        if mark == "region_begin":
            begun[who[0], who[1]] = row
        elif (who[0], who[1]) in begun:
            yield begun.pop((who[0], who[1])), row
