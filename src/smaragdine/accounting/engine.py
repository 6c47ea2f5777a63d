"""Events × power → energy: the integral of P(t) / n(t) over every event, exactly.

With F(t) = ∫ P/n an event's energy is F(end) − F(start). Events are taken in chunks in the order of their
starts; what still runs at a chunk's end enters the next one, so that memory does not grow with the number of
events while their disorder is bounded, and a stable sort of nearly sorted boundaries is near linear. Chunks
are summed by two threads: numpy releases the interpreter lock.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from smaragdine.accounting.nesting import Pieces, leaf_pieces, overlapping_lanes
from smaragdine.accounting.power import PowerTrace, distinct
from smaragdine.arrays import Floats, Ints

Task = TypeVar("Task")
Result = TypeVar("Result")
Number = TypeVar("Number", np.float64, np.int64)

CHUNK = 1 << 15
ALL_LATER = (1 << 63) - 1


class Block(NamedTuple):
    """Some events of one device, in any order; those of later blocks all start at `later_ns` or after."""

    start_ns: Ints
    end_ns: Ints
    key: Ints  # which row an event belongs to
    lane: Ints  # below 0: none
    step: Ints  # below 0: none
    later_ns: int
    later_step: int  # nor has any of them a step below this


class Chunk(NamedTuple):
    """All that runs within [begin, until), and some that only begin later: whole intervals, in any order."""

    begin_ns: int
    until_ns: int
    carried: int  # so many of them, the first ones, were in an earlier chunk too
    done_step: int  # no event of a later chunk has a step below this
    start_ns: Ints
    end_ns: Ints
    key: Ints
    lane: Ints
    step: Ints


@dataclass(frozen=True)
class Levels:
    """A power trace as a row of levels: after `i` edges have passed it is `power_w[i]`; 0 where unknown."""

    edge_ns: Ints
    power_w: Floats


class Boundaries(NamedTuple):
    """A chunk's instants in order, with what is true from each to the next."""

    t_ns: Ints  # since the chunk's begin
    running: Ints
    power_w: Floats  # one fewer: between instants
    order: Ints  # which boundary each instant is: a piece's start, then the pieces' ends, then others


class Shares(NamedTuple):
    """Who pays what in a chunk. A piece is a stretch in which one event pays (see `nesting`)."""

    event: Ints | None  # of each piece; None: every event is one piece
    energy_j: Floats  # of each piece
    idle_j: float

    def of_pieces(self, column: Ints) -> Ints:
        """A column of the events, for every piece."""
        return column if self.event is None else column[self.event]


def levels(trace: PowerTrace) -> Levels:
    edge_ns = distinct(np.concatenate([trace.start_ns, trace.end_ns]))
    if not edge_ns.size:
        return Levels(edge_ns, np.zeros(1))
    i = np.searchsorted(trace.start_ns, edge_ns, side="right") - 1
    known = edge_ns < trace.end_ns[i]
    # One more level than edges: before the first one, position 0, nothing is known either.
    return Levels(edge_ns, np.concatenate([[0.0], np.where(known, trace.power_w[i], 0.0)]))


def chunks(blocks: Iterable[Block], begin_ns: int, until_ns: int) -> Iterator[Chunk]:
    """Cut a device's events into chunks, one after the other in time, over all of [begin, until).

    An event that does not end within a chunk, or has not even begun, enters the next one too.
    """
    waiting: list[Block] = []
    running: Chunk | None = None
    held, enough = 0, CHUNK
    for block in blocks:
        waiting.append(block)
        held += block.start_ns.size
        if held < enough:
            continue
        pool = _joined(waiting)
        if 2 * int(np.count_nonzero(pool.start_ns < block.later_ns)) < held:
            waiting, enough = [pool], 2 * held  # much disorder: look again only when that pays
            continue
        cut_ns = min(max(int(block.later_ns), begin_ns), until_ns)
        chunk = _chunk(running, pool, begin_ns, cut_ns)
        running, begin_ns = _running_on(chunk), cut_ns
        yield chunk._replace(done_step=min(block.later_step, _lowest(running.step)))
        # As many new events as still run, or a crowd of long ones would be sorted over and over.
        waiting, held, enough = [], 0, max(CHUNK, running.start_ns.size)
    yield _chunk(running, _joined(waiting), begin_ns, until_ns)


def _joined(parts: list[Block]) -> Block:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return Block(none, none, none, none, none, ALL_LATER, ALL_LATER)
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in Block._fields[:5]}
    return Block(**columns, later_ns=ALL_LATER, later_step=ALL_LATER)


def _lowest(step: Ints) -> int:
    known = step[step >= 0]
    return int(known.min()) if known.size else ALL_LATER


def _chunk(running: Chunk | None, new: Block, begin_ns: int, until_ns: int) -> Chunk:
    if running is None or not running.start_ns.size:
        return Chunk(begin_ns, until_ns, 0, ALL_LATER, *new[:5])
    columns = (np.concatenate([old, fresh]) for old, fresh in zip(running[4:], new[:5], strict=True))
    return Chunk(begin_ns, until_ns, running.start_ns.size, ALL_LATER, *columns)


def _running_on(chunk: Chunk) -> Chunk:
    rows = np.flatnonzero(chunk.end_ns > chunk.until_ns)
    running = (column[rows] for column in chunk[4:])
    return Chunk(chunk.until_ns, chunk.until_ns, rows.size, ALL_LATER, *running)


def pieces(chunk: Chunk) -> Pieces:
    """When which event of the chunk pays, cut to the chunk."""
    start_ns = np.clip(chunk.start_ns, chunk.begin_ns, chunk.until_ns)
    end_ns = np.clip(chunk.end_ns, chunk.begin_ns, chunk.until_ns)
    every = np.arange(start_ns.size)
    nested = overlapping_lanes(chunk.start_ns, chunk.end_ns, chunk.lane) if start_ns.size else None
    if nested is None:
        return Pieces(every, start_ns, end_ns)
    inside = np.flatnonzero(nested)
    leaves = leaf_pieces(
        chunk.start_ns[inside], chunk.end_ns[inside], chunk.lane[inside], chunk.begin_ns, chunk.until_ns
    )
    plain = np.flatnonzero(~nested)
    return Pieces(
        np.concatenate([plain, inside[leaves.event]]),
        np.concatenate([start_ns[plain], leaves.start_ns]),
        np.concatenate([end_ns[plain], leaves.end_ns]),
    )


def boundaries(chunk: Chunk, paying: Pieces, power: Levels) -> Boundaries:
    first, last = np.searchsorted(power.edge_ns, [chunk.begin_ns, chunk.until_ns], side="right")
    edge_ns = power.edge_ns[first:last] - chunk.begin_ns
    count = paying.start_ns.size
    t_ns = np.concatenate([paying.start_ns, paying.end_ns, power.edge_ns[first:last], [0, 0]])
    t_ns -= chunk.begin_ns
    t_ns[-2:] = 0, chunk.until_ns - chunk.begin_ns
    t_ns, order = _in_order(t_ns)
    change = np.zeros(t_ns.size, dtype=np.int8)
    change[:count], change[count : 2 * count] = 1, -1
    # Where several boundaries are at an edge's instant, nothing lasts between them: any place will do.
    lengths = np.diff(np.searchsorted(t_ns, edge_ns), prepend=0, append=t_ns.size - 1)
    power_w = np.repeat(power.power_w[first : last + 1], lengths)
    return Boundaries(t_ns, np.cumsum(change[order], dtype=np.int64), power_w, order)


def _in_order(t_ns: Ints) -> tuple[Ints, Ints]:
    """Instants sorted, and which each was.

    Time and origin in one number where they fit: sorting values is faster than sorting positions. Starts and
    ends rise nearly everywhere, so that timsort has little more to do than to merge them.
    """
    bits = t_ns.size.bit_length()
    if int(t_ns[-1]).bit_length() + bits > 62:
        order = np.argsort(t_ns, kind="stable")
        return t_ns[order], order
    t_ns <<= bits
    t_ns |= np.arange(t_ns.size)
    t_ns.sort(kind="stable")
    return t_ns >> bits, t_ns & ((1 << bits) - 1)


def share(chunk: Chunk, power: Levels) -> Shares:
    paying = pieces(chunk)
    at = boundaries(chunk, paying, power)
    energy_j = np.diff(at.t_ns) * 1e-9
    energy_j *= at.power_w
    running = at.running[:-1]
    # A table of 1/n, 0 for n = 0, is faster than dividing.
    among = np.arange(int(at.running.max()) + 1, dtype=np.float64)
    np.divide(1.0, among, out=among, where=among > 0)
    idle_j = float((energy_j * (running == 0)).sum())
    energy_j *= among[running]
    until_j = np.zeros(at.t_ns.size)
    np.cumsum(energy_j, out=until_j[1:])
    starts_j, ends_j = at_pieces(until_j, at, paying)
    return Shares(paying.event, ends_j - starts_j, idle_j)


def at_pieces(
    value: npt.NDArray[Number], at: Boundaries, paying: Pieces
) -> tuple[npt.NDArray[Number], npt.NDArray[Number]]:
    """Of a value at every instant: at the start and at the end of every piece."""
    unsorted = np.empty_like(value)
    unsorted[at.order] = value
    count = paying.start_ns.size
    return unsorted[:count], unsorted[count : 2 * count]


def sum_by(code: Ints, weight: npt.NDArray[np.number[Any]], size: int) -> Floats:
    return np.bincount(code, weight, minlength=size).astype(np.float64, copy=False)


def in_threads(work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
    """`map` with a thread per core, in order, holding only a few tasks at a time."""
    threads = max(1, min(2, len(os.sched_getaffinity(0))))
    # Freeing one large block teaches glibc to keep what it gets back; else every temporary array costs a
    # round of page faults, as much again as the work itself.
    np.empty(24 << 20, dtype=np.uint8)
    if threads == 1:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(threads) as pool:
        under_way: deque[Future[Result]] = deque()
        for task in tasks:
            under_way.append(pool.submit(work, task))
            if len(under_way) > threads + 1:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
