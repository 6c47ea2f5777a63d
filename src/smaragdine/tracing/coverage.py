"""How much of a traced window the events explain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.arrays import Ints

# What has no path in the model begins with one of these classes. `program` is the program's own code outside
# any module, such as its loss. `unplaced` is what we could not find out: it alone counts against coverage.
PROGRAM, FRAMEWORK, INPUT = "program", "framework", "input"
OPTIMIZER, UNPLACED = "optimizer", "unplaced"
# These may run as often as they like: a loader fetches ahead, a program logs every so many steps.
_AS_IT_LIKES = (PROGRAM, FRAMEWORK, INPUT, UNPLACED)

NO_STEP = -(2**63)
_NAMED_IN_A_REMARK = 3


@dataclass(frozen=True)
class Coverage:
    busy_ns: int  # how long something ran, summed over lanes
    placed_ns: int  # how long of that it had a path or a class other than `unplaced`
    steps: int
    remarks: tuple[str, ...] = ()
    # Operations of the model and the optimizer whose counts show that they did not run equally often per step
    uneven: tuple[str, ...] = ()
    edges: tuple[tuple[str, str], ...] = ()  # dataflow between siblings, where the raw file tells it
    # [index, begin_ns, end_ns] of steps that nobody announced: the executions of one compiled program, or the
    # calls of one module
    found_steps: tuple[tuple[int, int, int], ...] = ()
    found_of: str = ""  # that module
    irregular: bool = False  # it was called often enough, but its calls are no steps
    slice_remarks: tuple[str, ...] = ()  # the remarks that hold even if the steps found do not count
    calls: pa.Table | None = None  # what rebuilds the calls that launched a GPU's kernels

    @property
    def counts_divide(self) -> bool:
        return not self.uneven


def coverage_of(table: pa.Table, steps: int, remarks: Sequence[str] = ()) -> Coverage:
    """Coverage of a table of schema EVENTS, traced over this many steps."""
    inside = table.filter(table["step"].is_valid()) if steps else table
    busy_ns, placed_ns = _times_ns(inside)
    return Coverage(busy_ns, placed_ns, steps, tuple(remarks), tuple(_uneven(inside, steps)))


def uneven_remark(names: Collection[str]) -> str:
    what = "1 operation" if len(names) == 1 else f"{len(names)} operations"
    shown = ", ".join(sorted(names)[:_NAMED_IN_A_REMARK]) + (" …" if len(names) > _NAMED_IN_A_REMARK else "")
    return f"{what} of the model did not run equally often in all traced steps: {shown}"


def steps_at(times_ns: Ints, meta: dict[str, Any]) -> Ints:
    """The index of the step in which each instant lies, by the marks in `meta`; NO_STEP outside."""
    spans: list[tuple[int, int, int]] = []
    last_ns = int(meta.get("begin_ns") or 0)
    for index, begin_ns, end_ns in meta.get("steps", ()):
        # Where no DataLoader told its beginning, only its end is marked: it follows the one before.
        spans.append((last_ns if begin_ns is None else int(begin_ns), int(end_ns), int(index)))
        last_ns = int(end_ns)
    return _steps_of(times_ns, spans)


def steps_apart(times_ns: Ints, spans: Sequence[tuple[int, int, int]]) -> Ints:
    """The same for steps that a trace from elsewhere tells: begin, end and index. Where two overlap, as those
    of several processes do, time does not say whose an instant is, and it is in none."""
    in_order = sorted(spans)
    overlap = any(one[1] > other[0] for one, other in pairwise(in_order))
    return _steps_of(times_ns, [] if overlap else in_order)


def _steps_of(times_ns: Ints, spans: Sequence[tuple[int, int, int]]) -> Ints:
    found = np.full(times_ns.size, NO_STEP, dtype=np.int64)
    if spans:
        begin, end, index = np.array(sorted(spans), dtype=np.int64).T
        at = np.searchsorted(begin, times_ns, side="right") - 1
        inside = (at >= 0) & (times_ns < end[np.maximum(at, 0)])
        found[inside] = index[at[inside]]
    return found


def _times_ns(table: pa.Table) -> tuple[int, int]:
    """Busy and placed time."""
    names, words = _codes(table["name"])
    unplaced = np.array([word.split("/", 1)[0] == UNPLACED for word in words], dtype=np.bool_)
    placed = ~unplaced[names]
    device, _ = _codes(table["device"])
    start_ns, duration_ns = table["start_ns"].to_numpy(), table["duration_ns"].to_numpy()
    # Events without a lane do not nest: each is a lane of its own.
    alone = table["lane"].is_null().to_numpy()
    lane = table["lane"].fill_null(0).to_numpy()

    def union_ns(rows: npt.NDArray[np.bool_]) -> int:
        total = int(duration_ns[rows & alone].sum())
        rows = rows & ~alone
        return total + _union_ns(device[rows], lane[rows], start_ns[rows], duration_ns[rows])

    return union_ns(np.ones_like(placed)), union_ns(placed)


def _codes(column: pa.ChunkedArray) -> tuple[Ints, list[str]]:
    if not len(column):
        return np.zeros(0, dtype=np.int64), []
    whole: Any = column.unify_dictionaries()
    codes = np.concatenate([chunk.indices.to_numpy(zero_copy_only=False) for chunk in whole.chunks])
    return codes.astype(np.int64), whole.chunk(0).dictionary.to_pylist()


def _union_ns(device: Ints, lane: Ints, start_ns: Ints, duration_ns: Ints) -> int:
    if not start_ns.size:
        return 0
    order = np.lexsort((start_ns, lane, device))
    device, lane = device[order], lane[order]
    first = np.ones(order.size, dtype=np.bool_)
    first[1:] = (device[1:] != device[:-1]) | (lane[1:] != lane[:-1])
    # Lanes are laid one after the other, far enough apart, so that one running maximum serves them all.
    base_ns = int(start_ns.min())
    span_ns = int((start_ns + duration_ns).max()) - base_ns + 1
    begin = (start_ns[order] - base_ns) + (np.cumsum(first) - 1) * span_ns
    end = begin + duration_ns[order]
    reached = np.concatenate([[0], np.maximum.accumulate(end)[:-1]])
    return int(np.maximum(end - np.maximum(begin, reached), 0).sum())


def _uneven(table: pa.Table, steps: int) -> list[str]:
    """Names of the model and the optimizer whose count does not divide by the number of steps."""
    if steps < 2:
        return []
    counts = table.group_by(["name", "phase", "device"]).aggregate([([], "count_all")])
    rows = counts.select(["name", "count_all"]).to_pylist()
    uneven = {row["name"] for row in rows if row["count_all"] % steps}
    return sorted(name for name in uneven if name.split("/", 1)[0] not in _AS_IT_LIKES)
