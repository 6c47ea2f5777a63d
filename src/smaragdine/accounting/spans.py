"""Stretches of time between marks: training, epochs, steps, and what a script marks itself."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

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


def mark_spans(marks: pa.Table) -> list[Span]:
    """All that begins and ends, by its end; what never ended has no span.

    Where only the ends of steps are announced, a step begins where the one before it ended, unless something
    else began or ended in between: then nobody knows.
    """
    found: list[Span] = []
    begun: dict[tuple[object, ...], tuple[int, int | None]] = {}
    step_ends_ns: dict[tuple[object, ...], int] = {}
    columns = (marks[name].to_pylist() for name in ("t_ns", "name", "index", "rank", "pid", "source"))
    for t_ns, mark, index, rank, pid, source in zip(*columns, strict=True):
        name, _, what = mark.rpartition("_")
        # A region may be in the middle of a step as well as around many.
        if what not in ("begin", "end") or not name or source == REGION:
            continue
        who = (rank, pid, source)
        if name != "step":
            for of in [of for of in step_ends_ns if of[1] == pid]:
                del step_ends_ns[of]
        if what == "begin":
            begun[name, *who] = t_ns, index
            continue
        begin_ns, begun_index = begun.pop((name, *who), (None, None))
        if name == "step":
            begin_ns = step_ends_ns.get(who) if begin_ns is None else begin_ns
            step_ends_ns[who] = t_ns
        if begin_ns is not None:
            found.append(
                Span(name, begun_index if index is None else index, rank, pid, source, begin_ns, t_ns)
            )
    return found


def region_spans(marks: pa.Table) -> list[Span]:
    """Those that a program named itself, by their beginning; what never ended has no span."""
    begun_ns: dict[tuple[int, int], int] = {}
    found: list[Span] = []
    own = marks.filter(pc.field("source") == REGION)
    columns = (own[name].to_pylist() for name in ("t_ns", "name", "index", "rank", "pid", "detail"))
    for t_ns, mark, number, rank, pid, name in zip(*columns, strict=True):
        if mark == "region_begin":
            begun_ns[pid, number] = t_ns
        elif (pid, number) in begun_ns:
            begin_ns = begun_ns.pop((pid, number))
            end_ns = max(begin_ns, t_ns)  # the clock may have been set back
            found.append(Span(name or "", None, rank, pid, REGION, begin_ns, end_ns))
    return sorted(found, key=lambda span: span.begin_ns)
