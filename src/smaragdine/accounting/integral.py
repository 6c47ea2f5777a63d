"""Integrates power over events: each event gets ∫ P(t) / n(t) dt, where n(t) events run at once. Exact.

With F(t) = ∫ P/n, an event's energy is F(end) − F(start). Events come nearly in the order of their starts, so
we cut them into chunks of time; what still runs at a chunk's end goes on in the next one. That keeps memory
flat, and sorting nearly sorted boundaries takes nearly linear time. Two threads work on chunks at once,
because numpy releases the interpreter lock.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from smaragdine.accounting.power import PowerTrace, distinct
from smaragdine.arrays import Floats, Ints

# The inner loop, compiled: the same sums as `share`, several times faster.
#
# It needs numba (`pip install smaragdine[fast]`). Loading takes as long as it saves on some ten million
# events, so only larger traces use it. It declines chunks in which events of one lane overlap; numpy does
# those, and everything on machines without numba.

# Takes starts, ends, lanes, keys, begin, until, edges, power per level, how many an earlier chunk had, and
# the number of keys. Returns energies of events; energy, busy time and count of keys; idle energy; and
# whether events of a lane overlap.
Sweep = Callable[
    [Ints, Ints, Ints, Ints, int, int, Ints, Floats, int, int],
    tuple[Floats, Floats, Floats, Ints, float, bool],
]

WORTH_LOADING = 10_000_000  # events
MOST_DIGIT_BITS = 13
MOST_CONCURRENT = 64  # up to so many, 1/n comes from a table, which is faster than to divide


def sweep_for(events: int) -> Sweep | None:
    """The compiled loop, if it is worth loading: for many events, or if it is loaded anyway."""
    worth = events >= WORTH_LOADING or compiled_sweep.cache_info().currsize > 0
    return compiled_sweep() if worth else None


@cache
def compiled_sweep() -> Sweep | None:
    """The compiled loop; None if numba is not installed or does not work."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        numba: Any = importlib.import_module("numba")
        sweep: Sweep = numba.njit(_sweep, nogil=True, cache=True, error_model="numpy")
        none = np.zeros(0, dtype=np.int64)
        sweep(none, none, none, none, 0, 0, none, np.zeros(1), 0, 1)
    except Exception:  # it only makes things faster
        return None
    return sweep


def _sweep(
    start_ns: Ints,
    end_ns: Ints,
    lane: Ints,
    key: Ints,
    begin_ns: int,
    until_ns: int,
    edge_ns: Ints,
    power_w: Floats,
    carried: int,
    keys: int,
) -> tuple[Floats, Floats, Floats, Ints, float, bool]:
    """Energy of every event within [begin, until), sums per key, idle energy, and whether a lane overlaps.

    `edge_ns` are the edges after begin; after `i` of them power is `power_w[i]`. Lanes are small numbers,
    below 0 for none. Plain loops over arrays, as numba likes them.
    """
    count = start_ns.size
    energy_j = np.zeros(count)
    # Each boundary becomes one number: time since begin, then which event. Sorted, an end comes before a
    # start of the same instant, so an event ends before the next of its lane begins.
    packed = np.empty(2 * count, dtype=np.int64)
    bits = 1
    while (1 << bits) < 2 * count:
        bits += 1
    used = 0
    highest = 0
    lanes = 0
    for i in range(count):
        end = min(end_ns[i], until_ns) - begin_ns
        if end > max(start_ns[i], begin_ns) - begin_ns:
            packed[used] = (end << bits) | i
            used += 1
            highest = max(highest, end)
            lanes = max(lanes, lane[i] + 1)
    for i in range(used):
        which = packed[i] & ((1 << bits) - 1)
        start = max(start_ns[which], begin_ns) - begin_ns
        packed[used + i] = (start << bits) | (which + count)
    used *= 2
    packed = packed[:used]
    other = np.empty(used, dtype=np.int64)
    # A radix sort by time, with as many bits at once as the first-level cache has room for.
    time_bits = 1
    while (highest >> time_bits) > 0:
        time_bits += 1
    passes = (time_bits + MOST_DIGIT_BITS - 1) // MOST_DIGIT_BITS
    digit_bits = (time_bits + passes - 1) // passes
    counts = np.empty(1 << digit_bits, dtype=np.int32)
    for turn in range(passes):
        shift = bits + turn * digit_bits
        counts[:] = 0
        for i in range(used):
            counts[(packed[i] >> shift) & ((1 << digit_bits) - 1)] += 1
        total = 0
        for digit in range(counts.size):
            here = counts[digit]
            counts[digit] = total
            total += here
        for i in range(used):
            digit = (packed[i] >> shift) & ((1 << digit_bits) - 1)
            other[counts[digit]] = packed[i]
            counts[digit] += 1
        packed, other = other, packed
    open_in_lane = np.zeros(lanes, dtype=np.int32)
    among = 1.0 / np.arange(1, MOST_CONCURRENT)
    mask = (1 << bits) - 1
    now = 0  # since begin
    edge = 0
    running = 0
    until_j = 0.0  # ∫ P/n
    idle_j = 0.0
    overlap = False
    last = until_ns - begin_ns
    for i in range(used + 1):
        t = packed[i] >> bits if i < used else last
        while now < t:
            upto = t
            if edge < edge_ns.size and edge_ns[edge] - begin_ns < t:
                upto = edge_ns[edge] - begin_ns
            used_j = power_w[edge] * ((upto - now) * 1e-9)
            if running == 0:
                idle_j += used_j
            elif running < MOST_CONCURRENT:
                until_j += used_j * among[running - 1]
            else:
                until_j += used_j / running
            now = upto
            while edge < edge_ns.size and edge_ns[edge] - begin_ns <= now:
                edge += 1
        if i == used:
            break
        which = packed[i] & mask
        if which < count:
            energy_j[which] += until_j
            running -= 1
            if lane[which] >= 0:
                open_in_lane[lane[which]] -= 1
        else:
            which -= count
            energy_j[which] = -until_j
            running += 1
            if lane[which] >= 0:
                open_in_lane[lane[which]] += 1
                if open_in_lane[lane[which]] > 1:
                    overlap = True
    key_j = np.zeros(keys)
    key_ns = np.zeros(keys)
    key_count = np.zeros(keys, dtype=np.int64)
    for i in range(count):
        key_j[key[i]] += energy_j[i]
        key_ns[key[i]] += max(min(end_ns[i], until_ns) - max(start_ns[i], begin_ns), 0)
        if i >= carried:
            key_count[key[i]] += 1
    return energy_j, key_j, key_ns, key_count, idle_j, overlap


# When events of one lane lie inside each other, only the innermost pays.
#
# An event lies inside another of the same device and lane if its interval does; of two equal intervals, the
# later one in the input lies inside. The outer one pays nothing meanwhile. Events of a lane that merely
# overlap are concurrent, and both pay. So each event pays for its interval without those inside it: these are
# its *pieces*.

PAIRS_AT_ONCE = 1 << 20


class Pieces(NamedTuple):
    """Stretches in which one event pays: the event's position, begin and end."""

    event: Ints
    start_ns: Ints
    end_ns: Ints


def overlapping_lanes(start_ns: Ints, end_ns: Ints, lane: Ints) -> npt.NDArray[np.bool_] | None:
    """Marks the events in lanes where an event begins before another has ended; None if there are none."""
    low, high = int(lane.min()), int(lane.max())
    if high < 0:
        return None
    # numpy sorts 16-bit numbers by radix, many times faster.
    codes = (lane - low).astype(np.uint16) if high - low < 1 << 16 else lane
    order = np.argsort(codes, kind="stable")
    overlaps = _overlaps(start_ns, end_ns, lane, order)
    if overlaps is not None:
        # They may only be out of order: sort, and look again.
        order = np.lexsort((end_ns, start_ns, lane))
        overlaps = _overlaps(start_ns, end_ns, lane, order)
    return None if overlaps is None else np.isin(lane, overlaps)


def _overlaps(start_ns: Ints, end_ns: Ints, lane: Ints, order: Ints) -> Ints | None:
    """Lanes in which an event begins before the one before it has ended. If there is none, all ends rise in
    this order too, so nothing overlaps."""
    early = start_ns[order[1:]] < end_ns[order[:-1]]
    lanes = lane[order]
    early &= (lanes[1:] == lanes[:-1]) & (lanes[1:] >= 0)
    return np.unique(lanes[1:][early]) if early.any() else None


def leaf_pieces(start_ns: Ints, end_ns: Ints, lane: Ints, begin_ns: int, until_ns: int) -> Pieces:
    """The pieces of events in lanes that overlap, cut to [begin, until).

    `start_ns` and `end_ns` are the uncut intervals: what lies inside what must not depend on the cut.
    """
    # An event of no length pays nothing and hides nobody.
    kept = np.flatnonzero(end_ns > start_ns)
    order = kept[np.lexsort((kept, -end_ns[kept], start_ns[kept], lane[kept]))]
    start_ns, end_ns, lane = start_ns[order], end_ns[order], lane[order]
    found = _laminar(start_ns, end_ns, lane)
    if found is None:
        found = _crossing(start_ns, end_ns, lane)
    begun, ended = np.maximum(found.start_ns, begin_ns), np.minimum(found.end_ns, until_ns)
    lasting = ended > begun
    return Pieces(order[found.event[lasting]], begun[lasting], ended[lasting])


def _laminar(start_ns: Ints, end_ns: Ints, lane: Ints) -> Pieces | None:
    """Pieces if any two events of a lane are either disjoint or nested; None if some cross.

    If so, the running events of a lane are a stack, and its top pays: after a start that is the event itself,
    after an end the parent of what ended.
    """
    count = start_ns.size
    first_ns = int(start_ns.min())
    span_ns = int(end_ns.max()) - first_ns + 1
    _, lane_rank = np.unique(lane, return_inverse=True)
    if span_ns * (int(lane_rank[-1]) + 1) >= 1 << 62:
        return None  # lane and time do not fit one number; `_crossing` needs none
    start_key = lane_rank * span_ns + (start_ns - first_ns)
    end_key = lane_rank * span_ns + (end_ns - first_ns)
    position = np.arange(count, dtype=np.int64)
    depth = position - np.searchsorted(np.sort(end_key, kind="stable"), start_key, side="right")
    parent = np.full(count, -1, dtype=np.int64)
    inner = np.flatnonzero(depth > 0)
    # The parent is the latest earlier event one level up the stack.
    by_depth = np.argsort(depth, kind="stable")
    levels = depth[by_depth] * count + by_depth
    above = np.searchsorted(levels, (depth[inner] - 1) * count + inner, side="right") - 1
    parent[inner] = by_depth[above]
    if (end_ns[inner] > end_ns[parent[inner]]).any():
        return None
    # At the same instant ends come before starts, and inner ends before outer ones: then the right event ends
    # up on top.
    inside_out = np.argsort(-depth, kind="stable")
    order = np.argsort(np.concatenate([end_key[inside_out], start_key]), kind="stable")
    leaf = np.concatenate([parent[inside_out], position])[order]
    time_ns = np.concatenate([end_ns[inside_out], start_ns])[order]
    running = np.flatnonzero(leaf[:-1] >= 0)  # nothing runs after the last end
    return Pieces(leaf[running], time_ns[running], time_ns[running + 1])


def _crossing(start_ns: Ints, end_ns: Ints, lane: Ints) -> Pieces:
    """Pieces of any events: each interval without those inside it, pair by pair."""
    count = start_ns.size
    position = np.arange(count, dtype=np.int64)
    # Events inside another begin after it and before its end: they are its next neighbours.
    lane_end = np.searchsorted(lane, lane, side="right")
    reach = np.empty(count, dtype=np.int64)
    for begin in np.flatnonzero(np.concatenate([[True], lane[1:] != lane[:-1]])):
        of_lane = slice(begin, int(lane_end[begin]))
        reach[of_lane] = begin + np.searchsorted(start_ns[of_lane], end_ns[of_lane], side="left")
    neighbours = np.maximum(reach - position - 1, 0)
    pieces: list[Pieces] = []
    first = 0
    before = np.concatenate([[0], np.cumsum(neighbours)])
    while first < count:
        last = max(first + 1, int(np.searchsorted(before, before[first] + PAIRS_AT_ONCE, side="right")) - 1)
        pieces.append(_own_time(start_ns, end_ns, neighbours, first, min(last, count)))
        first = last
    return Pieces(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


def _own_time(start_ns: Ints, end_ns: Ints, neighbours: Ints, first: int, last: int) -> Pieces:
    outer = np.repeat(np.arange(first, last), neighbours[first:last])
    begins = np.cumsum(neighbours[first:last]) - neighbours[first:last]
    inner = outer + 1 + np.arange(outer.size) - np.repeat(begins, neighbours[first:last])
    inside = end_ns[inner] <= end_ns[outer]
    outer, inner = outer[inside], inner[inside]
    # For each outer event, how far the events inside have hidden it so far. The event itself comes first in
    # its row.
    row = np.concatenate([np.arange(first, last), outer])
    order = np.argsort(row, kind="stable")
    row = row[order]
    shown_ns = np.concatenate([start_ns[first:last], start_ns[inner]])[order]
    hidden_until_ns = _running_max(row, np.concatenate([start_ns[first:last], end_ns[inner]])[order])
    same = row[1:] == row[:-1]
    until_ns = np.where(np.concatenate([same, [False]]), np.concatenate([shown_ns[1:], [0]]), end_ns[row])
    paying = until_ns > hidden_until_ns
    return Pieces(row[paying], hidden_until_ns[paying], until_ns[paying])


def _running_max(row: Ints, value: Ints) -> Ints:
    """The largest value so far within each row. Rows follow each other and rise."""
    rank = np.unique(value, return_inverse=True)[1] + 1
    level = (row - row[0]) * (int(rank.max()) + 1)
    so_far = np.maximum.accumulate(level + rank) - level
    return np.unique(value)[so_far - 1]


Task = TypeVar("Task")
Result = TypeVar("Result")
Number = TypeVar("Number", np.float64, np.int64)

CHUNK = 1 << 15
ALL_LATER = (1 << 63) - 1


class Block(NamedTuple):
    """Some events of one device, in any order. Events of later blocks start at `later_ns` or after."""

    start_ns: Ints
    end_ns: Ints
    key: Ints  # the row that the event belongs to
    lane: Ints  # below 0: none
    step: Ints  # below 0: none
    later_ns: int
    later_step: int  # and have no step below this


class Chunk(NamedTuple):
    """The events that run within [begin, until), uncut and in any order; some may begin later."""

    begin_ns: int
    until_ns: int
    carried: int  # the first so many were in an earlier chunk too
    done_step: int  # later chunks have no step below this
    start_ns: Ints
    end_ns: Ints
    key: Ints
    lane: Ints
    step: Ints


@dataclass(frozen=True)
class Levels:
    """Power as levels: `power_w[i]` after `i` edges have passed, 0 where it is not known."""

    edge_ns: Ints
    power_w: Floats


class Boundaries(NamedTuple):
    """The instants of a chunk in order, and what holds from each to the next."""

    t_ns: Ints  # since the chunk's begin
    running: Ints
    power_w: Floats  # between instants: one fewer
    order: Ints  # the boundary at each instant: starts of pieces first, then ends, then others


class Shares(NamedTuple):
    """Who pays what in a chunk, piece by piece."""

    event: Ints | None  # of each piece; None: each event is one piece
    energy_j: Floats  # of each piece
    idle_j: float

    def of_pieces(self, column: Ints) -> Ints:
        """Spreads a column of events over their pieces."""
        return column if self.event is None else column[self.event]


def levels(trace: PowerTrace) -> Levels:
    edge_ns = distinct(np.concatenate([trace.start_ns, trace.end_ns]))
    if not edge_ns.size:
        return Levels(edge_ns, np.zeros(1))
    i = np.searchsorted(trace.start_ns, edge_ns, side="right") - 1
    known = edge_ns < trace.end_ns[i]
    # One level more than edges: nothing is known before the first edge either.
    return Levels(edge_ns, np.concatenate([[0.0], np.where(known, trace.power_w[i], 0.0)]))


def chunks(blocks: Iterable[Block], begin_ns: int, until_ns: int) -> Iterator[Chunk]:
    """Cuts a device's events into chunks that follow each other over all of [begin, until).

    An event that has not ended in a chunk, or not even begun, goes on in the next one.
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
            waiting, enough = [pool], 2 * held  # much disorder: wait until it pays to look again
            continue
        cut_ns = min(max(int(block.later_ns), begin_ns), until_ns)
        chunk = _chunk(running, pool, begin_ns, cut_ns)
        running, begin_ns = _running_on(chunk), cut_ns
        yield chunk._replace(done_step=min(block.later_step, _lowest(running.step)))
        # Take as many new events as still run; else we would sort a crowd of long ones over and over.
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
    # If several boundaries share an instant, nothing lasts between them: any of their places will do.
    lengths = np.diff(np.searchsorted(t_ns, edge_ns), prepend=0, append=t_ns.size - 1)
    power_w = np.repeat(power.power_w[first : last + 1], lengths)
    return Boundaries(t_ns, np.cumsum(change[order], dtype=np.int64), power_w, order)


def _in_order(t_ns: Ints) -> tuple[Ints, Ints]:
    """Sorts instants, and says which each was.

    If time and origin fit one number, we sort that: values sort faster than positions. Starts and ends mostly
    rise already, so timsort has little to do but merge them.
    """
    bits = t_ns.size.bit_length()
    if int(t_ns[-1]).bit_length() + bits > 62:
        order = np.argsort(t_ns, kind="stable")
        return t_ns[order], order
    t_ns <<= bits
    t_ns |= np.arange(t_ns.size)
    t_ns.sort(kind="stable")
    return t_ns >> bits, t_ns & ((1 << bits) - 1)


def share(chunk: Chunk, power: Levels, paying: Pieces | None = None) -> Shares:
    """`paying`: the chunk's pieces, if they are known already."""
    paying = pieces(chunk) if paying is None else paying
    at = boundaries(chunk, paying, power)
    energy_j = np.diff(at.t_ns) * 1e-9
    energy_j *= at.power_w
    running = at.running[:-1]
    # A table of 1/n (0 for n = 0) is faster than division.
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
    """A value that is known at every instant, at the start and at the end of every piece."""
    unsorted = np.empty_like(value)
    unsorted[at.order] = value
    count = paying.start_ns.size
    return unsorted[:count], unsorted[count : 2 * count]


def sum_by(code: Ints, weight: npt.NDArray[np.number[Any]], size: int) -> Floats:
    return np.bincount(code, weight, minlength=size).astype(np.float64, copy=False)


def in_threads(work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
    """`map` with one thread per core, in order, a few tasks at a time."""
    threads = max(1, min(2, len(os.sched_getaffinity(0))))
    # Freeing one large block teaches glibc to keep what it gets back. Else each temporary array costs page
    # faults that take as long as the work itself.
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
