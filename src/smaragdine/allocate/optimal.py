"""`optimal`: the same answer as brute force, provably, without enumerating.

`sum` has one term per GPU: for each batch the best limit, then the least sum of one table per GPU.

For a step that lasts as long as its slowest GPU, fix the step time T at a candidate, the time of some GPU at
some batch and limit: what is left is a least sum again, of tables without all that takes longer than T. Its
cost at T is at least the true cost of the allocation it finds (waiting only costs), and equal at the T of the
best one; so the best over all candidates is exact. An interval [T₁, T₂] of candidates is bounded from below
by the tables allowed at T₂ with waiting counted up to T₁ only; intervals are opened in order of their bounds,
halved, and dropped once their bound is no better than what was found. A single candidate's bound is its cost.

Up to 4 GPUs and a batch of 4096 this runs to its end. Beyond that it stops after a fixed amount of work, and
the lowest bound of what is still open is the gap that is stated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smaragdine.allocate.model import Choices
from smaragdine.allocate.objective import Allocation, Objective, Share, check, cost, share
from smaragdine.allocate.separable import bound, least_sum
from smaragdine.arrays import Floats
from smaragdine.errors import UserError

EXACT_GPUS = 4
EXACT_BATCH = 4096
MOST_WORK = 10_000_000_000  # table entries looked at, beyond these
_EQUAL = 1e-12  # costs that differ by less do so by rounding


def optimal(
    gpus: Sequence[Choices], objective: Objective, global_batch: int, longest_s: float | None = None
) -> Allocation:
    """A slowdown is one of these GPUs' fastest step, unless how long a step may be is given. Where none is so
    short, the fastest of them is the answer."""
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
    """What a step may last, all-reduce and all, to keep to the objective's slowdown. None: it has none."""
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
    """Which batches a GPU may be given, at all limits alike, or at each of them."""
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
    times_s: Floats  # candidates, rising, without the all-reduce
    time_s: list[Floats]  # per GPU, limit × batch; infinite where not allowed
    fixed: list[Floats]  # what does not depend on the step time
    per_s: list[Floats]  # what a second of step time costs

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
        """Per GPU and batch the best limit of those that take at most the candidate `upto`, the step time
        counted as the candidate `counted`."""
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
        least_sum = max(least_sum, 0.0)  # nothing is won by waiting, whatever a clipped model says
        return least_sum * self._step_s(counted) if self.objective.kind == "edp" else least_sum

    def sum_for(self, cost: float, counted: int) -> float:
        """The sum over GPUs that an objective stands for; a little above, for rounding."""
        if self.objective.kind == "edp":
            cost = cost / self._step_s(counted) if self._step_s(counted) > 0 else math.inf
        return cost * (1 + _EQUAL)

    def _step_s(self, counted: int) -> float:
        return float(self.times_s[counted] + self.objective.all_reduce_s)

    @property
    def work(self) -> int:
        return sum(times.size for times in self.time_s)


def _fastest(tables: _Tables) -> int:
    """The first candidate that some split keeps within: what is feasible stays so as the step gets longer."""
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
    passed_over = math.inf  # the lowest bound of single candidates that were not solved
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
        left -= 40 * tables.work  # building the tables, and some twenty prices each for both halves
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
