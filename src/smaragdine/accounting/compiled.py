"""The engine's inner loop, compiled: the same sums as `engine.share`, several times faster.

Needs numba (`pip install smaragdine[fast]`). Loading it takes as long as it saves on some ten million events,
so only larger traces ask for it. It takes chunks in which no lane has overlapping events and declines others;
these, and machines without numba, go through numpy.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from smaragdine.arrays import Floats, Ints

# starts, ends, lanes, keys, begin, until, edges, power per level, how many an earlier chunk had, all keys
# → energies of events; energy, busy time and count of keys; idle energy; whether some lane overlaps
Sweep = Callable[
    [Ints, Ints, Ints, Ints, int, int, Ints, Floats, int, int],
    tuple[Floats, Floats, Floats, Ints, float, bool],
]

WORTH_LOADING = 10_000_000  # events
MOST_DIGIT_BITS = 13
MOST_CONCURRENT = 64  # up to so many at a time, 1/n comes from a table: a division takes longer


def sweep_for(events: int) -> Sweep | None:
    """The compiled loop where it is worth it: for many events, or when it is loaded anyway."""
    worth = events >= WORTH_LOADING or compiled_sweep.cache_info().currsize > 0
    return compiled_sweep() if worth else None


@cache
def compiled_sweep() -> Sweep | None:
    """The compiled loop, loaded; None where numba is not installed or does not work."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        numba: Any = importlib.import_module("numba")
        sweep: Sweep = numba.njit(_sweep, nogil=True, cache=True, error_model="numpy")
        none = np.zeros(0, dtype=np.int64)
        sweep(none, none, none, none, 0, 0, none, np.zeros(1), 0, 1)
    except Exception:  # an accelerator that fails must not stop what works without it
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

    `edge_ns` are those after begin, and `power_w[i]` holds after `i` of them have passed. Lanes are small
    numbers, below 0 for none. Written for numba: plain loops over arrays.
    """
    count = start_ns.size
    energy_j = np.zeros(count)
    # Every event's end and start as one number: time since begin, and which it is. The sort keeps ends before
    # starts of the same instant, so that an event ends before the next of its lane begins.
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
    # A radix sort of the time, by as many bits at once as have their counters in the first-level cache.
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
        if i >= carried:
            key_ns[key[i]] += end_ns[i] - start_ns[i]
            key_count[key[i]] += 1
    return energy_j, key_j, key_ns, key_count, idle_j, overlap
