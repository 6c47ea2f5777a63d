"""`optimal`: finds the same answer as brute force, provably, without trying everything.

For `sum`, each GPU has one term: take the best limit for each batch, then the least sum of one table per GPU.

If a step lasts as long as its slowest GPU, fix the step time T at a candidate: the time of some GPU at some
batch and limit. What is left is again a least sum, of tables without all that takes longer than T. Its cost
at T is at least the true cost of the allocation that it finds (because waiting costs), and equal at the T of
the best one; so the best over all candidates is exact. Tables allowed at T₂, with waiting counted only up to
T₁, bound an interval [T₁, T₂] of candidates from below. We open intervals in the order of their bounds, halve
them, and drop them once their bound is no better than what was found. A single candidate's bound is its cost.

Up to 4 GPUs and a batch of 4096 this runs to its end. Beyond that it stops after a fixed amount of work, and
states the lowest bound of what is still open.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smaragdine.allocate.model import Allocation, Choices, Objective, Share, check, cost, share
from smaragdine.arrays import Floats, Ints
from smaragdine.errors import UserError

# The least sum of one cost per GPU when batches must add up to a total: exact, without trying everything.
#
# Minimise Σ f_g(b_g) with Σ b_g = B, for any f_g (tables; infinite where a batch is not allowed).
#
# *Bound.* For every price λ, D(λ) = λB + Σ_g min_b (f_g(b) − λb) is at most the least sum, because for
# batches that add up to B the prices cancel. The best λ lies on the lower hull of the summed tables. We find
# it by the secant of one solution below B and one above it; every step finds a new hull point, so it ends.
#
# *Repair.* With that λ, r_g(b) = f_g(b) − λb − min_b (…) ≥ 0 is what a batch costs above the bound, and a sum
# of f is D + Σ r. Given any allocation of cost UB, a better one has Σ r < UB − D: no single r_g may exceed
# that gap, and no partial sum either. Min-plus convolution combines what is left of the tables, and drops
# partial sums by the same rule. Nothing that could be better is ever dropped, so the result is exact (to
# 1e-12 of the largest figure: a float's rounding). GPUs with equal tables share their partial sums.
#
# Convex tables have no gap, so nothing is left to do. Only one GPU of the hull's solution lies off the hull
# (one constraint, one fractional part), so the gap is at most one GPU's bulge, however many GPUs there are.

_ROUNDING = 1e-12
_MOST_SWEEPS = 4  # over all pairs of GPUs; each makes the gap smaller


@dataclass(frozen=True)
class Bound:
    """No allocation has a sum below `least`; `batches` are those of one, if one was found."""

    least: float
    price: float  # λ: what one more sample costs
    batches: Ints | None
    cost: float  # the cost of `batches`


@dataclass(frozen=True)
class Partial:
    """Least reduced costs of some GPUs together: `r[i]` for a summed batch of `first + i`."""

    first: int
    r: Floats
    parts: tuple[Partial, Partial] | None = None


def bound(costs: Floats, total: int) -> Bound | None:
    """For a table with a row per GPU and a column per batch from 0; None if no split can add up."""
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
        # Nothing below the secant: it is an edge of the hull, and its ends are the solution around B.
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
    """Two GPUs have one free batch: to try all is quicker than any bound."""
    begin, end = max(0, total - costs.shape[1] + 1), min(total, costs.shape[1] - 1)
    sums = costs[0, begin : end + 1] + costs[1, total - end : total - begin + 1][::-1]
    b = begin + int(sums.argmin())
    if not math.isfinite(sums[b - begin]):
        return None
    batches = np.array([b, total - b])
    least = sum_of(costs, batches)
    return Bound(least, 0.0, batches, least)


def _price_at(costs: Floats, at: Ints, price: float) -> float:
    """A price at which a hull solution is the cheapest: between the slopes to its left and right.

    The last secant need not be one. If the solution is on the hull, the steepest slope down to smaller
    batches is below the flattest up to larger ones; any price between them gives the tightest bound.
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
    """Goes from the solution below the total towards that above it; the cheapest GPU takes the rest."""
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
    """The least sum and its batches; None if there is none, or none below `below`."""
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
    """Splits each two GPUs' common batch in the best way, the others unchanged, until nothing gains."""
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
        # Small ones first, and equal ones side by side, so that their sums are made once.
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
    """Min-plus convolution: one shifted copy per finite entry of the other."""
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


EXACT_GPUS = 4
EXACT_BATCH = 4096
MOST_WORK = 10_000_000_000  # table entries to look at; then stop
_EQUAL = 1e-12  # costs that differ by less differ by rounding


def optimal(
    gpus: Sequence[Choices], objective: Objective, global_batch: int, longest_s: float | None = None
) -> Allocation:
    """Slowdown is relative to these GPUs' fastest step, unless `longest_s` says how long a step may be. If no
    step is that short, the answer is the fastest."""
    check(objective, gpus, global_batch)
    if objective.kind == "sum":
        return _least_of_sums(gpus, objective, global_batch)
    tables = _Tables.of(gpus, objective, global_batch)
    fastest = _fastest(tables)
    if objective.kind == "time":
        found = tables.solve(fastest, fastest)
        assert found is not None
        shares = tables.shares(found, fastest, fastest)
        least = cost(objective, shares)
        return Allocation(shares, least, least)
    last = tables.times_s.size - 1
    if objective.slowdown is not None:
        if longest_s is None:
            longest_s = _longest_s(tables, fastest)
        allowed_s = (longest_s - objective.all_reduce_s) * (1 + _EQUAL)
        last = max(fastest, int(np.searchsorted(tables.times_s, allowed_s, side="right")) - 1)
    return _search(tables, fastest, last)


def longest_step_s(gpus: Sequence[Choices], objective: Objective, global_batch: int) -> float | None:
    """The longest step, all-reduce included, that keeps to the objective's slowdown. None: it has none."""
    if objective.slowdown is None:
        return None
    tables = _Tables.of(gpus, objective, global_batch)
    return _longest_s(tables, _fastest(tables))


def _longest_s(tables: _Tables, fastest: int) -> float:
    slowdown, all_reduce_s = tables.objective.slowdown or 0.0, tables.objective.all_reduce_s
    return float((1 + slowdown) * (tables.times_s[fastest] + all_reduce_s))


def _least_of_sums(gpus: Sequence[Choices], objective: Objective, global_batch: int) -> Allocation:
    eta = objective.eta
    costs = np.full((len(gpus), global_batch + 1), np.inf)
    limits = np.zeros(costs.shape, dtype=np.int64)
    for g, each in enumerate(gpus):
        paid = (eta * each.power_w + (1 - eta) * each.power_limit_w[:, None]) * each.time_s
        paid = np.where(usable(each, global_batch), paid, np.inf)
        if each.lowest == 0:
            paid[:, 0] = 0.0
        limits[g] = paid.argmin(axis=0)
        costs[g] = paid.min(axis=0)
    found = least_sum(costs, global_batch)
    if found is None:
        raise no_split(global_batch)
    _, batches = found
    shares = tuple(share(each, int(b), int(limits[g, b])) for g, (each, b) in _numbered(gpus, batches))
    least = cost(objective, shares)
    return Allocation(shares, least, least)


def usable(each: Choices, global_batch: int) -> npt.NDArray[np.bool_]:
    """Which batches a GPU may be given, at all limits alike or at each of them."""
    batch = np.arange(global_batch + 1)
    allowed = (batch >= each.lowest) & (batch <= each.highest)
    return allowed if each.barred is None else allowed & ~each.barred


def no_split(global_batch: int) -> UserError:
    return UserError(f"no split can hold a global batch of {global_batch}", remedy="Choose another batch")


@dataclass(frozen=True)
class _Tables:
    """Costs of a step as functions of its time, and all times a step can have."""

    gpus: Sequence[Choices]
    objective: Objective
    global_batch: int
    times_s: Floats  # rising candidates, without the all-reduce
    time_s: list[Floats]  # per GPU, limit × batch; infinite if not allowed
    fixed: list[Floats]  # costs that do not depend on the step time
    per_s: list[Floats]  # cost per second of step time

    @classmethod
    def of(cls, gpus: Sequence[Choices], objective: Objective, global_batch: int) -> _Tables:
        eta = objective.eta if objective.kind == "sync" else 1.0
        time_s: list[Floats] = []
        fixed: list[Floats] = []
        per_s: list[Floats] = []
        for each in gpus:
            wait_w = each.wait_w or 0.0
            allowed = usable(each, global_batch)
            times = np.where(allowed, each.time_s, np.inf)
            base = np.where(allowed, eta * (each.power_w - wait_w) * each.time_s, np.inf)
            rate = np.repeat((eta * wait_w + (1 - eta) * each.power_limit_w)[:, None], times.shape[1], axis=1)
            if each.lowest == 0:
                times[:, 0] = base[:, 0] = rate[:, 0] = 0.0
            time_s.append(times)
            fixed.append(base)
            per_s.append(rate)
        candidates = np.unique(np.concatenate([times[np.isfinite(times)] for times in time_s]))
        return cls(gpus, objective, global_batch, candidates, time_s, fixed, per_s)

    def costs(self, upto: int, counted: int) -> tuple[Floats, list[npt.NDArray[np.int64]]]:
        """Per GPU and batch, the cost at the best limit among those that take at most candidate `upto`, with
        the step time counted as candidate `counted`."""
        step_s = self._step_s(counted)
        table = np.empty((len(self.gpus), self.global_batch + 1))
        limits: list[npt.NDArray[np.int64]] = []
        for g, times in enumerate(self.time_s):
            paid = self.fixed[g] + self.per_s[g] * step_s
            paid[times > self.times_s[upto]] = np.inf
            limits.append(paid.argmin(axis=0))
            table[g] = paid.min(axis=0)
        return table, limits

    def solve(self, upto: int, counted: int, below: float = math.inf) -> npt.NDArray[np.int64] | None:
        found = least_sum(self.costs(upto, counted)[0], self.global_batch, below)
        return None if found is None else found[1]

    def shares(self, batches: npt.NDArray[np.int64], upto: int, counted: int) -> tuple[Share, ...]:
        _, limits = self.costs(upto, counted)
        return _shares(self.gpus, batches, limits)

    def total(self, least_sum: float, counted: int) -> float:
        """The objective, from the sum over GPUs at a step time."""
        least_sum = max(least_sum, 0.0)  # waiting gains nothing, whatever a clipped model says
        return least_sum * self._step_s(counted) if self.objective.kind == "edp" else least_sum

    def sum_for(self, cost: float, counted: int) -> float:
        """The sum over GPUs that gives this objective, and a little more for rounding."""
        if self.objective.kind == "edp":
            cost = cost / self._step_s(counted) if self._step_s(counted) > 0 else math.inf
        return cost * (1 + _EQUAL)

    def _step_s(self, counted: int) -> float:
        return float(self.times_s[counted] + self.objective.all_reduce_s)

    @property
    def work(self) -> int:
        return sum(times.size for times in self.time_s)


def _fastest(tables: _Tables) -> int:
    """The first candidate that allows a split: if one is feasible, so are all longer ones."""
    low, high = 0, tables.times_s.size - 1
    if tables.solve(high, high) is None:
        raise no_split(tables.global_batch)
    while low < high:
        middle = (low + high) // 2
        costs, _ = tables.costs(middle, middle)
        held = least_sum(np.where(np.isfinite(costs), 0.0, np.inf), tables.global_batch) is not None
        low, high = (low, middle) if held else (middle + 1, high)
    return low


def _search(tables: _Tables, first: int, last: int) -> Allocation:
    objective = tables.objective
    best: tuple[Share, ...] = ()
    best_cost = math.inf
    small = len(tables.gpus) <= EXACT_GPUS and tables.global_batch <= EXACT_BATCH
    left = math.inf if small else MOST_WORK
    passed_over = math.inf  # the lowest bound of candidates that were not solved
    open_: list[tuple[float, int, int]] = []

    def keep(batches: npt.NDArray[np.int64], limits: Sequence[npt.NDArray[np.int64]]) -> None:
        nonlocal best, best_cost
        shares = _shares(tables.gpus, batches, limits)
        if (paid := cost(objective, shares)) < best_cost:
            best, best_cost = shares, paid

    def look(begin: int, end: int) -> None:
        costs, limits = tables.costs(end, begin)
        found = bound(costs, tables.global_batch)
        if found is None:
            return
        if found.batches is not None:
            keep(found.batches, limits)
        least = tables.total(found.least, begin)
        if small and found.cost > found.least and least < _clearly_below(best_cost):
            exact = least_sum(costs, tables.global_batch, tables.sum_for(best_cost, begin))
            if exact is None:
                return
            keep(exact[1], limits)
            least = tables.total(exact[0], begin)
        if least < _clearly_below(best_cost):
            heapq.heappush(open_, (least, begin, end))

    look(first, last)
    while open_ and left > 0:
        least, begin, end = heapq.heappop(open_)
        if least >= _clearly_below(best_cost):
            open_.clear()
            break
        left -= 40 * tables.work  # building tables, and some twenty prices for each half
        if begin < end:
            middle = (begin + end) // 2
            look(begin, middle)
            look(middle + 1, end)
        elif not small:
            passed_over = min(passed_over, least)
    lower = min([best_cost, passed_over, *(least for least, _, _ in open_)])
    if not best:
        raise no_split(tables.global_batch)
    return Allocation(best, best_cost, best_cost if lower >= _clearly_below(best_cost) else lower)


def _clearly_below(cost: float) -> float:
    return cost - _EQUAL * abs(cost) if math.isfinite(cost) else cost


def _shares(
    gpus: Sequence[Choices], batches: npt.NDArray[np.int64], limits: Sequence[npt.NDArray[np.int64]]
) -> tuple[Share, ...]:
    return tuple(share(each, int(b), int(limits[g][b])) for g, (each, b) in _numbered(gpus, batches))


def _numbered(gpus: Sequence[Choices], batches: npt.NDArray[np.int64]) -> enumerate[tuple[Choices, np.int64]]:
    return enumerate(zip(gpus, batches, strict=True))
