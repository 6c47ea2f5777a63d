"""The methods that choose an allocation, each timed on the same GPUs, and what to say about their answers."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smaragdine.allocate.model import (
    Allocation,
    Choices,
    Model,
    Objective,
    check,
    cost,
    share,
    standard_error,
    step_time_s,
)
from smaragdine.allocate.optimal import longest_step_s, no_split, optimal, usable
from smaragdine.allocate.profile import Profile
from smaragdine.arrays import Floats
from smaragdine.errors import UserError
from smaragdine.units import watts

Ranges = Mapping[str, tuple[int, int]]  # GPU → the smallest and the largest batch that was profiled

# `baseline`: an even split, as if all GPUs were equal, at the best limits for it.


def baseline(gpus: Sequence[Choices], objective: Objective, global_batch: int) -> Allocation:
    """Slowdown is relative to the best split. If an even split is slower at any limit, take its fastest."""
    check(objective, gpus, global_batch)
    split = even_split(gpus, global_batch)
    held = [dataclasses.replace(each, lowest=b, highest=b) for each, b in zip(gpus, split, strict=True)]
    return optimal(held, objective, global_batch, longest_step_s(gpus, objective, global_batch))


def even_split(gpus: Sequence[Choices], global_batch: int) -> list[int]:
    """Equal batches, one more for the first GPUs if they do not come out even. What a full GPU cannot take
    goes to the others."""
    split = [0] * len(gpus)
    room = list(range(len(gpus)))
    while (left := global_batch - sum(split)) > 0 and room:
        each, more = divmod(left, len(room))
        for n, g in enumerate(room):
            split[g] = min(gpus[g].highest, split[g] + each + (n < more))
        room = [g for g in room if split[g] < gpus[g].highest]
    return split


# `brute-force`: every split with every combination of limits.

MOST = 200_000_000  # allocations to try; more would take minutes


def allocations(gpus: Sequence[Choices], global_batch: int) -> int:
    """The most there can be: splits × combinations of limits."""
    splits = math.comb(global_batch + len(gpus) - 1, len(gpus) - 1)
    return splits * math.prod(each.power_limit_w.size for each in gpus)


def brute_force(
    gpus: Sequence[Choices],
    objective: Objective,
    global_batch: int,
    most: float | None = None,
    profiled: Ranges | None = None,
) -> Allocation:
    """With `most`, it chooses as `preferred` does among allocations that cost no more: `profiled` batches
    first, then the shortest step, then the least cost."""
    check(objective, gpus, global_batch)
    if allocations(gpus, global_batch) > MOST:
        raise UserError(
            "too many allocations for brute force",
            f"{allocations(gpus, global_batch):.1e} of them",
            "Use --method optimal",
        )
    longest_s = math.inf
    if objective.slowdown is not None:
        fastest = brute_force(gpus, Objective("time", 1.0, objective.all_reduce_s), global_batch).cost
        longest_s = fastest * (1 + objective.slowdown) * (1 + 1e-12)
    best: tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...]] | None = None
    for limits in itertools.product(*(range(each.power_limit_w.size) for each in gpus)):
        for batches in _splits(gpus, global_batch):
            first, second = _costs(gpus, objective, limits, batches, longest_s)
            # If costs are equal, the second decides: energy among the equally fast.
            keys = [first, second]
            if most is not None:
                outside = _outside(gpus, batches, profiled or {})
                keys = [outside, _step_s(gpus, limits, batches), *keys]
            chosen = np.flatnonzero(np.isfinite(first) & (first <= (math.inf if most is None else most)))
            if not chosen.size:
                continue
            i = int(chosen[np.lexsort([key[chosen] for key in reversed(keys)])[0]])
            found = tuple(float(key[i]) for key in keys)
            if best is None or found < best[0]:
                best = (found, limits, tuple(int(batch[i]) for batch in batches))
    if best is None:
        raise no_split(global_batch)
    _, limits, split = best
    shares = tuple(share(each, b, limit) for each, b, limit in zip(gpus, split, limits, strict=True))
    least = cost(objective, shares)
    return Allocation(shares, least, least)


def _outside(gpus: Sequence[Choices], batches: Sequence[np.ndarray], profiled: Ranges) -> Floats:
    """1 if the batch of some GPU was not profiled."""
    outside = np.zeros(batches[0].size)
    for each, batch in zip(gpus, batches, strict=True):
        low, high = profiled.get(each.gpu, (0, int(batch.max())))
        outside[(batch > 0) & ((batch < low) | (batch > high))] = 1.0
    return outside


def _step_s(gpus: Sequence[Choices], limits: Sequence[int], batches: Sequence[np.ndarray]) -> Floats:
    parts = zip(gpus, limits, batches, strict=True)
    times = [np.where(batch > 0, each.time_s[limit][batch], 0.0) for each, limit, batch in parts]
    return np.asarray(np.maximum.reduce(times), dtype=np.float64)


def _splits(gpus: Sequence[Choices], global_batch: int) -> Iterator[list[np.ndarray]]:
    """All batches of all GPUs but the last two, one after the other; splits of the rest as columns."""
    if len(gpus) == 1:
        if gpus[0].lowest <= global_batch <= gpus[0].highest:
            yield [np.array([global_batch])]
        return
    fixed, (last_but_one, last) = gpus[:-2], gpus[-2:]
    for batches in itertools.product(*(range(each.lowest, each.highest + 1) for each in fixed)):
        rest = global_batch - sum(batches)
        low = max(last_but_one.lowest, rest - last.highest)
        high = min(last_but_one.highest, rest - last.lowest)
        if low <= high:
            split = np.arange(low, high + 1)
            yield [*(np.full(split.size, b) for b in batches), split, rest - split]


def _costs(
    gpus: Sequence[Choices],
    objective: Objective,
    limits: Sequence[int],
    batches: Sequence[np.ndarray],
    longest_s: float,
) -> tuple[Floats, Floats]:
    """The objective and the energy of many splits at once."""
    eta = objective.eta
    used = [batch > 0 for batch in batches]
    pick = list(zip(gpus, limits, batches, used, strict=True))
    times = [np.where(on, each.time_s[limit][batch], 0.0) for each, limit, batch, on in pick]
    powers = [np.where(on, each.power_w[limit][batch], 0.0) for each, limit, batch, on in pick]
    if objective.kind == "sum":
        paid = sum(
            on * (eta * power + (1 - eta) * each.power_limit_w[limit]) * time
            for (each, limit, _, on), time, power in zip(pick, times, powers, strict=True)
        )
        return np.asarray(paid, dtype=np.float64), np.zeros(batches[0].size)
    step_s = np.maximum.reduce(times) + objective.all_reduce_s
    energy = np.zeros(batches[0].size)
    limit_w = np.zeros(batches[0].size)
    for (each, limit, _, on), took_s, power in zip(pick, times, powers, strict=True):
        energy += np.where(on, power * took_s + (each.wait_w or 0.0) * (step_s - took_s), 0.0)
        limit_w += on * each.power_limit_w[limit]
    if objective.kind == "time":
        return step_s, energy
    if objective.kind == "energy":
        return np.where(step_s <= longest_s, energy, np.inf), energy
    if objective.kind == "edp":
        return energy * step_s, energy
    return eta * energy + (1 - eta) * step_s * limit_w, energy


# `heuristic`: the original's shortcut. The strongest GPU runs at its lowest limit, the rest is searched.


def heuristic(
    gpus: Sequence[Choices], objective: Objective, global_batch: int, strongest: str | None = None
) -> Allocation:
    """The first GPU counts as the strongest, unless another is named. Only its limit is given, its batch is
    searched; so this is the exact search with fewer limits. Slowdown is relative to what the GPUs can do
    without that restriction."""
    check(objective, gpus, global_batch)
    name = gpus[0].gpu if strongest is None else strongest
    if name not in [each.gpu for each in gpus]:
        raise UserError(f"no GPU named {name}", remedy=f"There are: {', '.join(each.gpu for each in gpus)}")
    held = [at_lowest_limit(each) if each.gpu == name else each for each in gpus]
    return optimal(held, objective, global_batch, longest_step_s(gpus, objective, global_batch))


def at_lowest_limit(each: Choices) -> Choices:
    row = slice(int(each.power_limit_w.argmin()), int(each.power_limit_w.argmin()) + 1)
    return dataclasses.replace(
        each, power_limit_w=each.power_limit_w[row], time_s=each.time_s[row], power_w=each.power_w[row]
    )


# Which of several answers to take where nobody can tell which costs less.
#
# Two allocations cannot be told apart if their costs differ by less than `margin`: the standard error of the
# least cost, by how far the profiles' repeats spread (without repeats: rounding). Among all that cost at most
# the least cost + margin:
#
#     1. take those whose batches were all profiled, if there are any: a model says little beyond its points
#     2. of these take the shortest step
#     3. of equal steps take the least cost
#
# If steps may take longer, the least cost cannot rise. So we find the shortest step by bisection over the
# times a step can have, and ask `optimal` for the best allocation within each: exact wherever `optimal` is.

ROUNDING = 1e-9  # of the least cost


def highest_cost(cheapest: Allocation, margin: float) -> float:
    """The highest cost that cannot be told from the cheapest."""
    return cheapest.cost + max(margin, 0.0) + ROUNDING * abs(cheapest.cost)


def preferred(
    gpus: Sequence[Choices],
    objective: Objective,
    global_batch: int,
    cheapest: Allocation,
    margin: float,
    profiled: Ranges,
) -> Allocation:
    """`cheapest` itself if nothing beside it is better, or if nobody knows that it is the cheapest."""
    if not cheapest.exact:
        return cheapest
    most = highest_cost(cheapest, margin)
    longest_s = longest_step_s(gpus, objective, global_batch)
    for among in (only_profiled(gpus, profiled), gpus):
        found = _fastest(among, objective, global_batch, most, longest_s)
        if found is not None:
            return found if better(found, cheapest, profiled) else cheapest
    return cheapest


def better(found: Allocation, cheapest: Allocation, profiled: Ranges) -> bool:
    """Of two that are as good: whether the first alone was profiled, or is faster."""
    if inside(found, profiled) != inside(cheapest, profiled):
        return inside(found, profiled)
    return step_time_s(found.shares, 0.0) < step_time_s(cheapest.shares, 0.0) * (1 - ROUNDING)


def inside(allocation: Allocation, profiled: Ranges) -> bool:
    return all(
        profiled[each.gpu][0] <= each.batch <= profiled[each.gpu][1]
        for each in allocation.shares
        if each.batch
    )


def only_profiled(gpus: Sequence[Choices], profiled: Ranges) -> list[Choices]:
    """The same GPUs, without batches that were not profiled."""
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
    """The allocation with the shortest step among those that cost at most `most`."""
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


METHODS = ("baseline", "heuristic", "brute-force", "optimal")


@dataclass(frozen=True)
class Tie:
    """The cheapest answer, to which another was preferred because they cannot be told apart."""

    cheapest: Allocation
    margin: float  # of cost: differences that the profiles' repeats do not resolve


@dataclass(frozen=True)
class Answer:
    method: str
    objective: Objective
    allocation: Allocation
    seconds: float  # how long the method took
    too_slow: bool = False  # its steps are longer than the objective's slowdown allows
    standard_error: float | None = None  # of the cost, from the profiles' repeats
    tie: Tie | None = None


def answer(
    method: str,
    gpus: Sequence[Choices],
    objective: Objective,
    global_batch: int,
    strongest: str | None = None,
    profiles: Mapping[str, Profile] | None = None,
    model: Model = "monotone",
) -> Answer:
    """With the `profiles` behind the choices, it also tells how sure the cost is, and among allocations that
    cannot be told apart takes the `preferred` one."""
    ways: Mapping[str, Callable[[], Allocation]] = {
        "baseline": lambda: baseline(gpus, objective, global_batch),
        "heuristic": lambda: heuristic(gpus, objective, global_batch, strongest),
        "brute-force": lambda: brute_force(gpus, objective, global_batch),
        "optimal": lambda: optimal(gpus, objective, global_batch),
    }
    if method not in ways:
        raise UserError(f"no method named {method}", remedy=f"There are: {', '.join(METHODS)}")
    check(objective, gpus, global_batch)
    begin_ns = time.perf_counter_ns()
    allocation, tie = ways[method](), None
    error = standard_error(allocation, profiles, model, objective) if profiles is not None else None
    if profiles is not None and method in ("brute-force", "optimal"):
        profiled = {gpu: (profile.batches[0], profile.batches[-1]) for gpu, profile in profiles.items()}
        margin = error or 0.0
        if method == "optimal":
            chosen = preferred(gpus, objective, global_batch, allocation, margin, profiled)
        else:
            most = highest_cost(allocation, margin)
            chosen = brute_force(gpus, objective, global_batch, most, profiled)
        if better(chosen, allocation, profiled):
            allocation, tie = chosen, Tie(allocation, margin)
            error = standard_error(allocation, profiles, model, objective)
    seconds = (time.perf_counter_ns() - begin_ns) * 1e-9
    too_slow = _too_slow(allocation, gpus, objective, global_batch)
    return Answer(method, objective, allocation, seconds, too_slow, error, tie)


def _too_slow(
    allocation: Allocation, gpus: Sequence[Choices], objective: Objective, global_batch: int
) -> bool:
    longest_s = longest_step_s(gpus, objective, global_batch)
    if longest_s is None:
        return False
    return step_time_s(allocation.shares, objective.all_reduce_s) > longest_s * (1 + 1e-9)


def left_out(gpus: Sequence[Choices], global_batch: int) -> dict[str, str]:
    """Methods for which there are too many allocations, and why."""
    count = allocations(gpus, global_batch)
    if count <= MOST:
        return {}
    return {"brute-force": f"{count:.1e} allocations are too many to try"}


def warnings(answers: Sequence[Answer], profiles: Mapping[str, Profile]) -> list[str]:
    """Says where answers rest on what nobody measured."""
    found: list[str] = []
    for gpu, profile in profiles.items():
        low, high = profile.batches[0], profile.batches[-1]
        outside = _by_batch(answers, gpu, lambda share, low=low, high=high: not low <= share.batch <= high)
        if outside:
            found.append(f"{gpu}: batch {outside} outside what was profiled, {low}–{high}")
        lowest_w = min(point.energy_j / point.time_s for point in profile.points.values())
        least_w = profile.idle_w if profile.idle_w is not None else lowest_w / 2
        weak = [
            share
            for each in answers
            for share in each.allocation.shares
            if share.gpu == gpu and share.batch and share.power_w < least_w
        ]
        if weak:
            worst = min(weak, key=lambda share: share.power_w)
            found.append(
                f"{gpu}: the model's mean power of {watts(worst.power_w)} for batch {worst.batch} at "
                f"{worst.power_limit_w:g} W is not possible; the lowest measured is {watts(lowest_w)}"
            )
    return found


def _by_batch(answers: Sequence[Answer], gpu: str, which: Callable[[Any], bool]) -> str:
    """In words: 1874 (heuristic, optimal) and 2048 (baseline)."""
    methods: dict[int, list[str]] = {}
    for each in answers:
        for its in each.allocation.shares:
            if its.gpu == gpu and its.batch and which(its):
                methods.setdefault(its.batch, []).append(each.method)
    return " and ".join(f"{batch} ({', '.join(names)})" for batch, names in methods.items())


def answers_json(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The answers as JSON. A bound, an error, a tie and `too_slow` appear only if they say something."""
    return [
        {
            "method": each.method,
            "objective": each.objective.kind,
            "cost": each.allocation.cost,
            "seconds": each.seconds,
            "allocation": allocation_json(each.allocation),
            **({"too_slow": True} if each.too_slow else {}),
            **({} if each.allocation.exact else {"lower_bound": each.allocation.lower_bound}),
            **({} if each.standard_error is None else {"standard_error": each.standard_error}),
            **({} if each.tie is None else {"tie": _tie_json(each.tie)}),
        }
        for each in answers
    ]


def _tie_json(tie: Tie) -> dict[str, Any]:
    return {
        "cost": tie.cheapest.cost,
        "margin": tie.margin,
        "allocation": allocation_json(tie.cheapest),
    }


def allocation_json(allocation: Allocation) -> list[dict[str, Any]]:
    return [
        {"gpu": share.gpu, "batch": share.batch, "power_limit_w": share.power_limit_w}
        for share in allocation.shares
    ]


# The Pareto front over η: what energy costs in time, and time in energy.
#
# Both `sum` and `sync` are η·E + (1−η)·X, where X is the limits' power over time. At the η at which two
# neighbours of the front cost the same, either a third allocation is cheaper than both, or there is none
# between them. So we find the front by its own corners, each with the range of η in which it is the best; no
# grid can miss one.

MOST_CORNERS = 32  # more would be too close to tell apart


@dataclass(frozen=True)
class Corner:
    """The best allocation for every η from `eta_low` to `eta_high`."""

    eta_low: float
    eta_high: float
    energy: float  # what η weighs, J
    limit_energy: float  # what 1 − η weighs: the limits' power over time, J
    allocation: Allocation


def pareto(gpus: Sequence[Choices], objective: Objective, global_batch: int) -> list[Corner]:
    """By rising η, from the least time to the least energy; at most `MOST_CORNERS`, widest apart first."""
    if objective.kind not in ("sum", "sync"):
        raise UserError(
            f"--objective {objective.kind} has no η to go over", remedy="Use --pareto with sum or sync"
        )

    def corner_at(eta: float) -> Corner:
        found = optimal(gpus, dataclasses.replace(objective, eta=eta), global_batch)
        energy, limit_energy = (
            cost(dataclasses.replace(objective, eta=only), found.shares) for only in (1.0, 0.0)
        )
        return Corner(0.0, 1.0, energy, limit_energy, found)

    found = [corner_at(0.0), corner_at(1.0)]
    if _same(*found) or found[0].energy <= found[1].energy:
        return [found[0]]
    if found[1].limit_energy <= found[0].limit_energy:
        return [found[1]]
    pairs = [(found[0], found[1])]
    while pairs and len(found) < MOST_CORNERS:
        pairs.sort(key=lambda pair: pair[0].energy - pair[1].energy)
        left, right = pairs.pop()
        eta = _meeting(left, right)
        between = corner_at(eta)
        level = eta * left.energy + (1 - eta) * left.limit_energy
        here = eta * between.energy + (1 - eta) * between.limit_energy
        if here < level * (1 - 1e-12):
            found.append(between)
            pairs += [(left, between), (between, right)]
    return _with_ranges(_not_dominated(found))


def _not_dominated(corners: Sequence[Corner]) -> list[Corner]:
    """Most energy first. At an η of 0 or 1 one part does not count at all, so what was found there may be
    worse in it than a neighbour of the same cost."""
    kept: list[Corner] = []
    for corner in sorted(corners, key=lambda corner: (corner.energy, corner.limit_energy)):
        if not kept or corner.limit_energy < kept[-1].limit_energy:
            kept.append(corner)
    return kept[::-1]


def _same(a: Corner, b: Corner) -> bool:
    return math.isclose(a.energy, b.energy) and math.isclose(a.limit_energy, b.limit_energy)


def _meeting(left: Corner, right: Corner) -> float:
    """The η at which both cost the same."""
    less = left.energy - right.energy
    more = right.limit_energy - left.limit_energy
    return more / (more + less)


def _with_ranges(corners: Sequence[Corner]) -> list[Corner]:
    edges = [0.0, *(_meeting(a, b) for a, b in itertools.pairwise(corners)), 1.0]
    return [
        dataclasses.replace(corner, eta_low=edges[i], eta_high=edges[i + 1])
        for i, corner in enumerate(corners)
    ]
