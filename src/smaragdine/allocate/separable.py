"""The least sum of one cost per GPU when their batches add up to a total: exact, without enumerating.

Minimise Σ f_g(b_g) with Σ b_g = B, for any f_g (tables; infinite where a batch is not allowed).

*Bound.* For every price λ, D(λ) = λB + Σ_g min_b (f_g(b) − λb) is at most the least sum, because for batches
that add up to B the prices cancel. The best λ is found on the lower hull of the summed tables, by the secant
of one solution below B and one above it; every step finds a new hull point, so there is an end.

*Repair.* With that λ, r_g(b) = f_g(b) − λb − min_b (…) ≥ 0 is what a batch costs above the bound, and a sum
of f is D + Σ r. Given any allocation, at UB, a better one has Σ r < UB − D: no single r_g may exceed that
gap, and no partial sum either. What is left of the tables is combined by min-plus convolution, in which the
same rule drops partial sums; nothing that could be better is ever dropped, so the result is exact (to 1e-12
of the largest figure: a float's rounding). GPUs with the same table share their partial sums.

Convex tables have no gap, and nothing is left to do; only one GPU of the hull's solution lies off the hull
(one constraint, one fractional part), so the gap is at most one GPU's bulge, however many GPUs there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smaragdine.arrays import Floats, Ints

_ROUNDING = 1e-12
_MOST_SWEEPS = 4  # over all pairs of GPUs; each only makes the gap smaller


@dataclass(frozen=True)
class Bound:
    """No allocation has a smaller sum than `least`; `batches` may have it, where some were found."""

    least: float
    price: float  # λ: what one more sample costs
    batches: Ints | None
    cost: float  # of batches


@dataclass(frozen=True)
class Partial:
    """Least reduced costs of some GPUs together: `r[i]` for a summed batch of `first + i`."""

    first: int
    r: Floats
    parts: tuple[Partial, Partial] | None = None


def bound(costs: Floats, total: int) -> Bound | None:
    """Of a table with a row per GPU and a column per batch from 0; None where no split can add up."""
    allowed = np.isfinite(costs)
    if not allowed.any(axis=1).all():
        return None
    rows = np.arange(costs.shape[0])
    low = allowed.argmax(axis=1)
    high = costs.shape[1] - 1 - allowed[:, ::-1].argmax(axis=1)
    if not low.sum() <= total <= high.sum():
        return None
    if costs.shape[0] == 2:
        return _of_two(costs, total)
    batch = np.arange(costs.shape[1], dtype=np.float64)
    low_sum, high_sum = float(costs[rows, low].sum()), float(costs[rows, high].sum())
    price = 0.0
    while low.sum() < total < high.sum():
        price = (high_sum - low_sum) / float(high.sum() - low.sum())
        priced = costs - price * batch
        found = priced.argmin(axis=1)
        on_secant = low_sum - price * float(low.sum())
        # Nothing below the secant: it is an edge of the hull, and its two ends are the solution around B.
        if float(priced[rows, found].sum()) >= on_secant - _ROUNDING * (abs(low_sum) + abs(high_sum)):
            break
        if int(found.sum()) <= total:
            low, low_sum = found, float(costs[rows, found].sum())
        else:
            high, high_sum = found, float(costs[rows, found].sum())
    exact = low if low.sum() == total else high if high.sum() == total else None
    if exact is not None:
        price = _price_at(costs, exact, price)
    priced = costs - price * batch
    least = float(priced.min(axis=1).sum()) + price * total
    batches = exact if exact is not None else _between(priced, low, high, total)
    return Bound(least, price, batches, math.inf if batches is None else sum_of(costs, batches))


def _of_two(costs: Floats, total: int) -> Bound | None:
    """Two GPUs have one free batch: looking at all of them is quicker than any bound."""
    begin, end = max(0, total - costs.shape[1] + 1), min(total, costs.shape[1] - 1)
    sums = costs[0, begin : end + 1] + costs[1, total - end : total - begin + 1][::-1]
    b = begin + int(sums.argmin())
    if not math.isfinite(sums[b - begin]):
        return None
    batches = np.array([b, total - b])
    least = sum_of(costs, batches)
    return Bound(least, 0.0, batches, least)


def _price_at(costs: Floats, at: Ints, price: float) -> float:
    """A price for which a hull solution is the cheapest: between the slopes to its left and right.

    The last secant need not be one. The steepest slope down to smaller batches is below the flattest up to
    larger ones where the solution is on the hull; any price between the two gives the tightest bound.
    """
    batch = np.arange(costs.shape[1])
    distance = batch[None, :] - at[:, None]
    rise = costs - costs[np.arange(at.size), at][:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = rise / distance
    left = np.max(np.where(distance < 0, slope, -np.inf), initial=-np.inf)
    right = np.min(np.where(distance > 0, slope, np.inf), initial=np.inf)
    if not math.isfinite(left):
        return float(right) if math.isfinite(right) else price
    return float(left) if not math.isfinite(right) else float(left + right) / 2


def _between(priced: Floats, low: Ints, high: Ints, total: int) -> Ints | None:
    """From the solution below the total towards the one above it; the GPU that costs least takes the rest."""
    batches = low.copy()
    for g in np.argsort(low - high, kind="stable"):
        if high[g] > batches[g] and batches.sum() + high[g] - batches[g] <= total:
            batches[g] = high[g]
    missing = total - int(batches.sum())
    rows = np.arange(batches.size)
    after = batches + missing
    fits = after < priced.shape[1]
    more = np.full(batches.size, np.inf)
    more[fits] = priced[rows[fits], after[fits]] - priced[rows[fits], batches[fits]]
    g = int(more.argmin())
    if not math.isfinite(more[g]):
        return None
    batches[g] += missing
    return batches


def least_sum(costs: Floats, total: int, below: float = math.inf) -> tuple[float, Ints] | None:
    """The least sum and the batches that have it; None where there is none, or none less than `below`."""
    found = bound(costs, total)
    if found is None or found.least >= below:
        return None
    if found.batches is None:
        best, best_cost = None, math.inf
    else:
        best = _improved(costs, found.batches)
        best_cost = sum_of(costs, best)
    scale = float(np.abs(costs[np.isfinite(costs)]).max()) + abs(found.price) * total
    rounding = _ROUNDING * scale
    gap = min(best_cost, below) - found.least
    if gap > rounding:
        repaired = _repair(costs, total, found.price, gap + rounding)
        if repaired is not None and sum_of(costs, repaired) < best_cost:
            best, best_cost = repaired, sum_of(costs, repaired)
    return None if best is None or best_cost >= below else (best_cost, best)


def sum_of(costs: Floats, batches: Ints) -> float:
    return math.fsum(float(row[b]) for row, b in zip(costs, batches, strict=True))


def _improved(costs: Floats, batches: Ints) -> Ints:
    """The best split of each two GPUs' common batch, the others as they are, until nothing gains."""
    batches = batches.copy()
    for _ in range(_MOST_SWEEPS):
        gained = False
        for g in range(batches.size):
            for h in range(g + 1, batches.size):
                both = int(batches[g] + batches[h])
                first = max(0, both - costs.shape[1] + 1)
                sums = costs[g, first : both + 1] + costs[h, first : both + 1][::-1]
                b = int(sums.argmin())
                if sums[b] < costs[g, batches[g]] + costs[h, batches[h]]:
                    batches[g], batches[h] = first + b, both - first - b
                    gained = True
        if not gained:
            break
    return batches


def _repair(costs: Floats, total: int, price: float, gap: float) -> Ints | None:
    """The best allocation whose reduced costs stay within the gap."""
    priced = costs - price * np.arange(costs.shape[1])
    reduced = priced - priced.min(axis=1, keepdims=True)
    kinds: dict[bytes, Partial] = {}
    leaves: list[Partial] = []
    for row in reduced:
        leaf = _trimmed(0, row, gap)
        if leaf is None:
            return None
        leaves.append(kinds.setdefault(row.tobytes(), leaf))
    nodes = [(leaf, [g]) for g, leaf in enumerate(leaves)]
    made: dict[tuple[int, int], Partial | None] = {}
    while len(nodes) > 2:
        # Small ones first; equal ones beside each other, so that their sums are made once.
        nodes.sort(key=lambda node: (node[0].r.size, id(node[0])))
        (left, of_left), (right, of_right) = nodes[:2]
        key = (id(left), id(right))
        if key not in made:
            others = [node for node, _ in nodes[2:]]
            lowest = total - sum(other.first + other.r.size - 1 for other in others)
            highest = total - sum(other.first for other in others)
            made[key] = _combined(left, right, gap, lowest, highest)
        together = made[key]
        if together is None:
            return None
        nodes = [*nodes[2:], (together, of_left + of_right)]
    batches = np.zeros(costs.shape[0], dtype=np.int64)
    if len(nodes) == 1:
        leaf, of = nodes[0]
        held = leaf.first <= total < leaf.first + leaf.r.size and math.isfinite(leaf.r[total - leaf.first])
        batches[of[0]] = total
        return batches if held else None
    (left, of_left), (right, of_right) = nodes
    split = _split(left, right, total)
    if split is None:
        return None
    _unfold(left, split, of_left, batches)
    _unfold(right, total - split, of_right, batches)
    return batches


def _trimmed(
    first: int, r: Floats, gap: float, parts: tuple[Partial, Partial] | None = None
) -> Partial | None:
    kept = np.flatnonzero(r <= gap)
    if not kept.size:
        return None
    within = r[kept[0] : kept[-1] + 1].copy()
    within[within > gap] = np.inf
    return Partial(first + int(kept[0]), within, parts)


def _combined(left: Partial, right: Partial, gap: float, lowest: int, highest: int) -> Partial | None:
    """Min-plus convolution, a shifted copy of one per finite entry of the other."""
    few, many = sorted((left, right), key=lambda part: int(np.isfinite(part.r).sum()))
    first = left.first + right.first
    begin, end = max(0, lowest - first), min(left.r.size + right.r.size - 1, highest - first + 1)
    if begin >= end:
        return None
    sums = np.full(end - begin, np.inf)
    room = np.empty(many.r.size)
    for i in np.flatnonzero(np.isfinite(few.r)).tolist():
        start, stop = max(0, begin - i), min(many.r.size, end - i)
        if start < stop:
            window = sums[i + start - begin : i + stop - begin]
            shifted = np.add(many.r[start:stop], few.r[i], out=room[: stop - start])
            np.minimum(window, shifted, out=window)
    return _trimmed(first + begin, sums, gap, (left, right))


def _split(left: Partial, right: Partial, total: int) -> int | None:
    """How much of a summed batch the left part takes at the least cost."""
    begin = max(left.first, total - right.first - right.r.size + 1)
    end = min(left.first + left.r.size - 1, total - right.first)
    if begin > end:
        return None
    sums = left.r[begin - left.first : end - left.first + 1] + _reversed(right, total - end, total - begin)
    i = int(sums.argmin())
    return begin + i if math.isfinite(sums[i]) else None


def _reversed(part: Partial, begin: int, end: int) -> Floats:
    return part.r[begin - part.first : end - part.first + 1][::-1]


def _unfold(node: Partial, batch: int, of: Sequence[int], batches: Ints) -> None:
    if node.parts is None:
        batches[of[0]] = batch
        return
    left, right = node.parts
    split = _split(left, right, batch)
    assert split is not None
    count = _leaves(left)
    _unfold(left, split, of[:count], batches)
    _unfold(right, batch - split, of[count:], batches)


def _leaves(node: Partial) -> int:
    return 1 if node.parts is None else _leaves(node.parts[0]) + _leaves(node.parts[1])
