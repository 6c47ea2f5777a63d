"""Which of the answers to take that cannot be told apart.

An allocation is not known to be better than another that costs more by less than the profiles' repeats spread
(`margin`, the standard error of the least cost; without repeats, rounding). Among all that cost at most the
least cost + margin:

    1. those whose batches were all profiled, where there are any: a model says little beyond its points
    2. of these the shortest step
    3. of equal steps the least cost

The least cost of allocations with a step of at most T never rises with T. So the shortest step is found by
bisection over the times a step can have, each answered by `optimal` without all that takes longer: exact
where that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from smaragdine.allocate.model import Allocation, Choices, Objective, step_time_s
from smaragdine.allocate.optimal import longest_step_s, optimal, usable
from smaragdine.arrays import Floats
from smaragdine.errors import UserError

ROUNDING = 1e-9  # of the least cost

Ranges = Mapping[str, tuple[int, int]]  # by GPU: the smallest and the largest batch that was profiled


def highest_cost(cheapest: Allocation, margin: float) -> float:
    """Of allocations that cannot be told from the cheapest."""
    return cheapest.cost + max(margin, 0.0) + ROUNDING * abs(cheapest.cost)


def preferred(
    gpus: Sequence[Choices],
    objective: Objective,
    global_batch: int,
    cheapest: Allocation,
    margin: float,
    profiled: Ranges,
) -> Allocation:
    """`cheapest` itself where nothing beside it is better, or it is not known to be the cheapest."""
    if not cheapest.exact:
        return cheapest
    most = highest_cost(cheapest, margin)
    longest_s = longest_step_s(gpus, objective, global_batch)
    for among in (within(gpus, profiled), gpus):
        found = _fastest(among, objective, global_batch, most, longest_s)
        if found is not None:
            return found if better(found, cheapest, profiled) else cheapest
    return cheapest


def better(found: Allocation, cheapest: Allocation, profiled: Ranges) -> bool:
    """Of two that cannot be told apart: whether the first rests on what was profiled, or is faster."""
    if inside(found, profiled) != inside(cheapest, profiled):
        return inside(found, profiled)
    return step_time_s(found.shares, 0.0) < step_time_s(cheapest.shares, 0.0) * (1 - ROUNDING)


def inside(allocation: Allocation, profiled: Ranges) -> bool:
    return all(
        profiled[each.gpu][0] <= each.batch <= profiled[each.gpu][1]
        for each in allocation.shares
        if each.batch
    )


def within(gpus: Sequence[Choices], profiled: Ranges) -> list[Choices]:
    """The same GPUs without the batches that were not profiled."""
    held: list[Choices] = []
    for each in gpus:
        low, high = profiled[each.gpu]
        batch = np.arange(each.time_s.shape[1])
        held.append(_barred(each, (batch > 0) & ((batch < low) | (batch > high))))
    return held


def _fastest(
    gpus: Sequence[Choices],
    objective: Objective,
    global_batch: int,
    most: float,
    longest_s: float | None,
) -> Allocation | None:
    """The allocation with the shortest step of those that cost at most `most`."""
    parts: list[Floats] = []
    for each in gpus:
        allowed = _working(each) & usable(each, global_batch)
        parts.append(each.time_s[np.broadcast_to(allowed, each.time_s.shape)])
    times_s = np.unique(np.concatenate(parts))
    if longest_s is not None:
        times_s = times_s[times_s + objective.all_reduce_s <= longest_s * (1 + ROUNDING)]

    def upto(i: int) -> Allocation | None:
        capped = [_barred(each, (each.time_s > times_s[i]) & _working(each)) for each in gpus]
        if any(each.lowest > 0 and not usable(each, global_batch).any() for each in capped):
            return None
        try:
            found = optimal(capped, objective, global_batch, longest_s)
        except UserError:
            return None
        return found if found.cost <= most else None

    low, high = 0, times_s.size - 1
    best = upto(high) if times_s.size else None
    while best is not None and low < high:
        middle = (low + high) // 2
        found = upto(middle)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best


def _working(each: Choices) -> np.ndarray:
    return np.arange(each.time_s.shape[1]) > 0


def _barred(each: Choices, which: np.ndarray) -> Choices:
    barred = np.broadcast_to(which, each.time_s.shape)
    return dataclasses.replace(each, barred=barred if each.barred is None else barred | each.barred)
