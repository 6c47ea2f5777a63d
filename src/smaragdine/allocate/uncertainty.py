"""How far the spread over a profile's repeats reaches into the cost of an allocation.

First order: each measured point that an allocation rests on is moved by its standard error, time and energy
each, and the model and the cost are computed anew. What the model itself may be wrong by is not in it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from smaragdine.allocate.model import Model, curve, least_power_w, points_at
from smaragdine.allocate.objective import Allocation, Objective, Share, cost
from smaragdine.allocate.profile import Point, Profile


def standard_error(
    allocation: Allocation, profiles: Mapping[str, Profile], model: Model, objective: Objective
) -> float | None:
    """Of the cost; None where some GPU's profile has no repeats."""
    variance = 0.0
    for g, share in enumerate(allocation.shares):
        if not share.batch:
            continue
        profile = profiles[share.gpu]
        points = points_at(profile, share.power_limit_w)

        def cost_with(moved: Sequence[Point], g: int = g, profile: Profile = profile) -> float:
            shares = list(allocation.shares)
            shares[g] = _modelled(shares[g], moved, profile, model)
            return cost(objective, shares)

        for i in range(len(points)):
            found = _variance(points, i, cost_with)
            if found is None:
                return None
            variance += found
    return math.sqrt(variance)


def _variance(points: Sequence[Point], i: int, cost_with: Callable[[Sequence[Point]], float]) -> float | None:
    """What one point's spread adds to the variance of the cost."""
    point = points[i]
    if point.time_variance is None or point.energy_variance is None or point.covariance is None:
        return None
    slopes: dict[str, float] = {}
    for field, variance in (("time_s", point.time_variance), ("energy_j", point.energy_variance)):
        step = math.sqrt(variance)
        value: float = getattr(point, field)
        step = min(step, value / 2)  # a time stays a time
        moved = [[*points], [*points]]
        moved[0][i] = dataclasses.replace(point, **{field: value - step})
        moved[1][i] = dataclasses.replace(point, **{field: value + step})
        slopes[field] = (cost_with(moved[1]) - cost_with(moved[0])) / (2 * step) if step > 0 else 0.0
    by_time, by_energy = slopes["time_s"], slopes["energy_j"]
    return max(
        0.0,
        by_time**2 * point.time_variance
        + by_energy**2 * point.energy_variance
        + 2 * by_time * by_energy * point.covariance,
    )


def _modelled(share: Share, points: Sequence[Point], profile: Profile, model: Model) -> Share:
    at = np.array([float(share.batch)])
    time_s, power_w = curve(model, points, share.power_limit_w, least_power_w(profile), at)
    return dataclasses.replace(share, time_s=float(time_s[0]), power_w=float(power_w[0]))
