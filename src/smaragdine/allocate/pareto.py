"""The Pareto front over η: what energy costs in time, and time in energy.

Both `sum` and `sync` are η·E + (1−η)·X, where X is the limits' power over time. Where two neighbours of the
front cost the same, a third allocation is cheaper than both or there is none between them: so the front is
found by its own corners, each with the range of η in which it is the best, and no grid can miss one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from smaragdine.allocate.model import Choices
from smaragdine.allocate.objective import Allocation, Objective, cost
from smaragdine.allocate.optimal import optimal
from smaragdine.errors import UserError

MOST_CORNERS = 32  # beyond that, corners are too close to tell apart


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
    """By falling energy. For an η of 0 or 1 the other part does not count: what was found there may be worse
    in it than a neighbour of the same cost."""
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
