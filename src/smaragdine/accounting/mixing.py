"""Which operations shared a sensor's windows: for every window its energy and who had how much of its time.

Taken from a few chunks spread over the events: what the uncertainty needs to know, a sample shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from smaragdine.accounting.engine import (
    CHUNK,
    Boundaries,
    Chunk,
    Levels,
    at_pieces,
    boundaries,
    pieces,
    sum_by,
)
from smaragdine.accounting.nesting import Pieces
from smaragdine.arrays import Floats, Ints


class Windows(NamedTuple):
    """Whole windows, and a line for every row in each of them."""

    energy_j: Floats  # per window
    length_s: Floats
    window: Ints  # per line
    row: Ints
    share_s: Floats  # ∫ 1/n over the row's events in the window
    busy_s: Floats  # their time
    pieces: Ints  # per row: how many stretches it paid for, wherever they are
    paid_s: Floats  # and their time


def windows(chunk: Chunk, power: Levels, by_ns: int, window_ns: int, rows: int) -> Windows:
    """Of a chunk, with the power moved by `by_ns`."""
    paying = pieces(chunk)
    power = _near(power, by_ns, paying, window_ns)
    at = boundaries(chunk, paying, power)
    length_s = np.diff(at.t_ns) * 1e-9
    running = at.running[:-1]
    share_s = np.zeros(at.t_ns.size)
    np.cumsum(np.where(running > 0, length_s / np.maximum(running, 1), 0.0), out=share_s[1:])
    window, whole = _window_of(chunk, at.t_ns + chunk.begin_ns, power, window_ns)
    count = int(window[-1]) + 1
    row, number, event_share_s, event_s = _per_window(chunk.key[paying.event], paying, at, share_s, window)
    line, code = number * rows + row, None
    if count * rows > 8 * CHUNK:  # many names: number only those that occur
        code, line = np.unique(line, return_inverse=True)
    size = count * rows if code is None else code.size
    line_share_s, line_busy_s = sum_by(line, event_share_s, size), sum_by(line, event_s, size)
    there = np.flatnonzero(line_share_s)
    line_share_s, line_busy_s = line_share_s[there], line_busy_s[there]
    number, row = np.divmod(there if code is None else code[there], rows)
    whole = whole & (sum_by(window, length_s, count) > 0)
    new_number = np.cumsum(whole) - 1
    kept = whole[number]
    own = chunk.key[paying.event]
    return Windows(
        sum_by(window, at.power_w * length_s, count)[whole],
        sum_by(window, length_s, count)[whole],
        new_number[number[kept]],
        row[kept],
        line_share_s[kept],
        line_busy_s[kept],
        np.bincount(own, minlength=rows),
        sum_by(own, (paying.end_ns - paying.start_ns) * 1e-9, rows),
    )


def _near(power: Levels, by_ns: int, paying: Pieces, window_ns: int) -> Levels:
    """The levels around what ran, whole; of a long log beside a short trace, few. Others count as unknown."""
    around_ns = 2 * max(window_ns, 1)
    first = np.searchsorted(power.edge_ns, paying.start_ns - by_ns - around_ns, side="right")
    last = np.searchsorted(power.edge_ns, paying.end_ns - by_ns + around_ns, side="left")
    if not first.size or int((last - first).sum()) >= power.edge_ns.size:
        return Levels(power.edge_ns + by_ns, power.power_w)
    kept = np.unique(np.concatenate([np.arange(i, j + 1) for i, j in _merged(first, last)]))
    # Level i lasts from edge i - 1 to edge i: a kept one needs both.
    edges = np.union1d(kept - 1, kept)
    edges = edges[(edges >= 0) & (edges < power.edge_ns.size)]
    after = edges + 1
    known = np.isin(after, kept)
    return Levels(
        power.edge_ns[edges] + by_ns,
        np.concatenate(
            [[power.power_w[0] if kept[0] == 0 else 0.0], np.where(known, power.power_w[after], 0.0)]
        ),
    )


def _merged(first: Ints, last: Ints) -> list[tuple[int, int]]:
    """Ranges of levels as few that do not touch."""
    order = np.argsort(first, kind="stable")
    first, until = first[order], np.maximum.accumulate(last[order])
    begins = np.flatnonzero(np.concatenate([[True], first[1:] > until[:-1] + 1]))
    ends = until[np.concatenate([begins[1:], [first.size]]) - 1]
    return list(zip(first[begins].tolist(), ends.tolist(), strict=True))


def join(parts: Sequence[Windows]) -> Windows:
    offsets = np.cumsum([0, *(part.energy_j.size for part in parts)])
    moved = [part._replace(window=part.window + by) for part, by in zip(parts, offsets[:-1], strict=True)]
    *lines, pieces, paid_s = zip(*moved, strict=True)
    return Windows(*map(np.concatenate, lines), pieces=np.sum(pieces, axis=0), paid_s=np.sum(paid_s, axis=0))


def _window_of(chunk: Chunk, t_ns: Ints, power: Levels, window_ns: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """For every stretch between boundaries its window; and which windows the chunk has whole.

    A window is one reading's stretch, or several where the sensor's own window is longer. One that the chunk
    cuts says nothing about the mean it had; but if there is no other, it must do.
    """
    level = np.searchsorted(power.edge_ns, t_ns[:-1], side="right")
    changes = np.concatenate([[True], level[1:] != level[:-1]])
    levels, number = level[changes], np.cumsum(changes) - 1
    begins_ns = t_ns[:-1][changes]
    spacing_ns = int(np.median(np.diff(begins_ns))) if begins_ns.size > 1 else window_ns
    if window_ns > 1.5 * spacing_ns:
        slot = (begins_ns - begins_ns[0]) // window_ns
        group = np.concatenate([[0], np.cumsum(np.diff(slot) > 0)])
    else:
        group = np.arange(levels.size)
    # Nothing is known before the first edge and after the last, nor in gaps: levels of 0 W.
    known = np.bincount(group, power.power_w[levels] > 0) == np.bincount(group)
    cut = np.zeros(levels.size, dtype=bool)
    cut[0] = levels[0] > 0 and power.edge_ns[levels[0] - 1] < chunk.begin_ns
    cut[-1] |= levels[-1] < power.edge_ns.size and power.edge_ns[levels[-1]] > chunk.until_ns
    whole = known & (np.bincount(group, cut) == 0)
    return group[number], whole if whole.any() else known


def _per_window(
    row: Ints, paying: Pieces, at: Boundaries, share_s: Floats, window: Ints
) -> tuple[Ints, Ints, Floats, Floats]:
    """Every piece cut at the windows' borders: row, window, share of time, time."""
    t_ns = at.t_ns
    at_start, at_end = at_pieces(np.arange(t_ns.size), at, paying)
    lasting = t_ns[at_end] > t_ns[at_start]
    row, at_start, at_end = row[lasting], at_start[lasting], at_end[lasting]
    first, last = window[at_start], window[at_end - 1]
    spans = last - first + 1
    piece = np.repeat(np.arange(row.size), spans)
    number = np.repeat(first - (np.cumsum(spans) - spans), spans) + np.arange(piece.size)
    begins = np.flatnonzero(np.concatenate([[True], window[1:] != window[:-1]]))
    ends = np.concatenate([begins[1:], [window.size]])
    begin, end = np.maximum(at_start[piece], begins[number]), np.minimum(at_end[piece], ends[number])
    lasts_s = (t_ns[end] - t_ns[begin]).astype(np.float64) * 1e-9
    return row[piece], number.astype(np.int64), share_s[end] - share_s[begin], lasts_s
