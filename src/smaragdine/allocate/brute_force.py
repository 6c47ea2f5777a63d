"""`brute-force`: every split with every combination of limits, and nothing clever."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from smaragdine.allocate.model import Choices
from smaragdine.allocate.objective import Allocation, Objective, check, cost, share
from smaragdine.allocate.optimal import no_split
from smaragdine.allocate.ties import Ranges
from smaragdine.arrays import Floats
from smaragdine.errors import UserError

MOST = 200_000_000  # allocations that are tried; beyond that it would take minutes


def allocations(gpus: Sequence[Choices], global_batch: int) -> int:
    """How many there are at most: splits × combinations of limits."""
    splits = math.comb(global_batch + len(gpus) - 1, len(gpus) - 1)
    return splits * math.prod(each.power_limit_w.size for each in gpus)


def brute_force(
    gpus: Sequence[Choices],
    objective: Objective,
    global_batch: int,
    most: float | None = None,
    profiled: Ranges | None = None,
) -> Allocation:
    """With `most`, what `ties` prefers of the allocations that cost no more: batches in the `profiled` range,
    then the shortest step, then the least cost."""
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
            # Of equal costs the second decides: energy, among the equally fast.
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
    """1 where some GPU's batch was not profiled."""
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
    """All batches of all but the last two GPUs, one after the other; the splits of the rest as columns."""
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
    """The objective, and energy, of many splits at once."""
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
    for (each, limit, _, on), time, power in zip(pick, times, powers, strict=True):
        energy += np.where(on, power * time + (each.wait_w or 0.0) * (step_s - time), 0.0)
        limit_w += on * each.power_limit_w[limit]
    if objective.kind == "time":
        return step_s, energy
    if objective.kind == "energy":
        return np.where(step_s <= longest_s, energy, np.inf), energy
    if objective.kind == "edp":
        return energy * step_s, energy
    return eta * energy + (1 - eta) * step_s * limit_w, energy
