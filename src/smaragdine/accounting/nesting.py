"""Who pays when events of one lane lie inside each other: only the leaf.

An event lies inside another of the same device and lane when its interval does; of two equal intervals the
later one in the input lies inside. While an event runs that lies inside it, the outer one pays nothing;
events of a lane that merely overlap are concurrent and both pay. So every event pays for its own interval
less those inside it: the *pieces* below.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from smaragdine.arrays import Ints

PAIRS_AT_ONCE = 1 << 20


class Pieces(NamedTuple):
    """Stretches in which one event pays: positions into the events, begin and end."""

    event: Ints
    start_ns: Ints
    end_ns: Ints


def overlapping_lanes(start_ns: Ints, end_ns: Ints, lane: Ints) -> npt.NDArray[np.bool_] | None:
    """Which events are in a lane where some event begins before another ended; None: nowhere."""
    low, high = int(lane.min()), int(lane.max())
    if high < 0:
        return None
    # numpy sorts 16-bit numbers by radix, many times faster than wider ones.
    codes = (lane - low).astype(np.uint16) if high - low < 1 << 16 else lane
    order = np.argsort(codes, kind="stable")
    overlaps = _overlaps(start_ns, end_ns, lane, order)
    if overlaps is not None:
        # Perhaps they only came out of order.
        order = np.lexsort((end_ns, start_ns, lane))
        overlaps = _overlaps(start_ns, end_ns, lane, order)
    return None if overlaps is None else np.isin(lane, overlaps)


def _overlaps(start_ns: Ints, end_ns: Ints, lane: Ints, order: Ints) -> Ints | None:
    """Lanes with an event that begins before the one before it ended. If there is none, then in this order
    all ends rise too, and nothing overlaps at all."""
    early = start_ns[order[1:]] < end_ns[order[:-1]]
    lanes = lane[order]
    early &= (lanes[1:] == lanes[:-1]) & (lanes[1:] >= 0)
    return np.unique(lanes[1:][early]) if early.any() else None


def leaf_pieces(start_ns: Ints, end_ns: Ints, lane: Ints, begin_ns: int, until_ns: int) -> Pieces:
    """The pieces of events in lanes that overlap, cut to [begin, until).

    `start_ns` and `end_ns` are whole intervals, also where they reach beyond the cut: what lies inside what
    does not depend on where a trace is cut.
    """
    # An event without length pays nothing and hides nobody.
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
    """Pieces where any two events of a lane are disjoint or one inside the other; None where some cross.

    Then the running events of a lane are a stack, and the leaf is its top: after a start the event itself,
    after an end the parent of what ended.
    """
    count = start_ns.size
    first_ns = int(start_ns.min())
    span_ns = int(end_ns.max()) - first_ns + 1
    _, lane_rank = np.unique(lane, return_inverse=True)
    if span_ns * (int(lane_rank[-1]) + 1) >= 1 << 62:
        return None  # one number for lane and time would overflow; the general way needs none
    start_key = lane_rank * span_ns + (start_ns - first_ns)
    end_key = lane_rank * span_ns + (end_ns - first_ns)
    position = np.arange(count, dtype=np.int64)
    depth = position - np.searchsorted(np.sort(end_key, kind="stable"), start_key, side="right")
    parent = np.full(count, -1, dtype=np.int64)
    inner = np.flatnonzero(depth > 0)
    # The parent is the latest earlier event one level up.
    by_depth = np.argsort(depth, kind="stable")
    levels = depth[by_depth] * count + by_depth
    above = np.searchsorted(levels, (depth[inner] - 1) * count + inner, side="right") - 1
    parent[inner] = by_depth[above]
    if (end_ns[inner] > end_ns[parent[inner]]).any():
        return None
    # At one instant: ends before starts, and inner ends before outer ones, so that the last of them leaves
    # the right event on top.
    inside_out = np.argsort(-depth, kind="stable")
    order = np.argsort(np.concatenate([end_key[inside_out], start_key]), kind="stable")
    leaf = np.concatenate([parent[inside_out], position])[order]
    time_ns = np.concatenate([end_ns[inside_out], start_ns])[order]
    running = np.flatnonzero(leaf[:-1] >= 0)  # after the last end nothing runs
    return Pieces(leaf[running], time_ns[running], time_ns[running + 1])


def _crossing(start_ns: Ints, end_ns: Ints, lane: Ints) -> Pieces:
    """Pieces of any events: each one's interval less the union of those inside it, pair by pair."""
    count = start_ns.size
    position = np.arange(count, dtype=np.int64)
    # What lies inside an event begins after it and before its end: a row of neighbours.
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
    # Per outer event: hidden until the latest end so far of those inside it. The events themselves stand
    # first in their row, hidden until their own start.
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
    """The largest value so far within each row; rows are contiguous and rise."""
    rank = np.unique(value, return_inverse=True)[1] + 1
    level = (row - row[0]) * (int(rank.max()) + 1)
    so_far = np.maximum.accumulate(level + rank) - level
    return np.unique(value)[so_far - 1]
