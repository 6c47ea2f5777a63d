"""Models every batch size from measured points: time and mean power of a step, one curve per power limit.

`quadratic` is the original's: one parabola for time and one for mean power, clipped at zero. It follows the
points closely and means nothing beyond them. `monotone` is ours: time rises with the batch, and is linear
between and beyond the points; mean power is linear too, and stays between the GPU's idle power (or the least
that was measured) and the limit.

`Objective` says what an allocation costs, `standard_error` how sure that is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from smaragdine.allocate.profile import Point, Profile
from smaragdine.arrays import Floats
from smaragdine.errors import UserError

Model = Literal["monotone", "quadratic"]
MODELS: tuple[str, ...] = get_args(Model)


@dataclass(frozen=True)
class Choices:
    """All that one GPU can be told to do: a row per power limit, a column per batch from 0."""

    gpu: str
    power_limit_w: Floats
    time_s: Floats
    power_w: Floats  # mean power while it works
    lowest: int  # smallest batch; 0: the GPU may be left out of the job
    highest: int
    wait_w: float | None = None
    barred: npt.NDArray[np.bool_] | None = None  # limit × batch: must not be chosen


def choices(
    profile: Profile,
    global_batch: int,
    model: Model = "monotone",
    max_batch: int | None = None,
    wait_w: float | None = None,
    may_be_left_out: bool = False,
) -> Choices:
    """Every limit, and every batch up to the global one or to what the GPU's memory holds."""
    at = np.arange(global_batch + 1, dtype=np.float64)
    least_w = least_power_w(profile)
    curves = [curve(model, points_at(profile, w), w, least_w, at) for w in profile.power_limits_w]
    highest = global_batch if max_batch is None else min(global_batch, max_batch)
    if profile.out_of_memory:
        ran = [batch for batch in profile.batches if batch < min(profile.out_of_memory)]
        highest = min(highest, max(ran, default=min(profile.out_of_memory) - 1))
    return Choices(
        profile.gpu,
        np.array(profile.power_limits_w),
        np.array([time_s for time_s, _ in curves]),
        np.array([power_w for _, power_w in curves]),
        0 if may_be_left_out else 1,
        highest,
        profile.wait_w if wait_w is None else wait_w,
    )


def least_power_w(profile: Profile) -> float:
    """The least that a working GPU can draw: its idle power, or the least that was measured."""
    if profile.idle_w is not None:
        return profile.idle_w
    return min(point.energy_j / point.time_s for point in profile.points.values())


def points_at(profile: Profile, power_limit_w: float) -> list[Point]:
    return [profile.points[batch, power_limit_w] for batch in profile.batches]


def curve(
    model: Model, points: Sequence[Point], limit_w: float, least_w: float, at: Floats
) -> tuple[Floats, Floats]:
    """Time and mean power at the batches `at`, from one limit's points, which come by rising batch."""
    batch = np.array([point.batch for point in points], dtype=np.float64)
    time_s = np.array([point.time_s for point in points])
    power_w = np.array([point.energy_j for point in points]) / time_s
    if model == "quadratic":
        if batch.size < 3:
            raise UserError(
                "a quadratic model needs three batch sizes", f"there are {batch.size}", "Use --model monotone"
            )
        fits = (np.polyval(np.polyfit(batch, values, 2), at) for values in (time_s, power_w))
        times, powers = (np.maximum(values, 0.0) for values in fits)
        return times, powers
    weights = np.array([float(point.repeats) for point in points])
    times = _rising_line(batch, rising(time_s, weights), at)
    powers = np.clip(_line(batch, power_w, at), min(least_w, limit_w), limit_w)
    return times, powers


def rising(values: Floats, weights: Floats) -> Floats:
    """The nearest values that never fall (isotonic regression: neighbours that fall are pooled)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, heavy, count = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            before, its_weight, its_count = blocks.pop()
            mean = (before * its_weight + mean * heavy) / (its_weight + heavy)
            heavy, count = heavy + its_weight, count + its_count
        blocks.append((mean, heavy, count))
    return np.repeat([mean for mean, _, _ in blocks], [count for _, _, count in blocks])


def _line(x: Floats, y: Floats, at: Floats) -> Floats:
    """Linear between the points; beyond them as between the outermost two."""
    left = y[0] + (at - x[0]) * (y[1] - y[0]) / (x[1] - x[0])
    right = y[-1] + (at - x[-1]) * (y[-1] - y[-2]) / (x[-1] - x[-2])
    return np.where(at < x[0], left, np.where(at > x[-1], right, np.interp(at, x, y)))


def _rising_line(x: Floats, y: Floats, at: Floats) -> Floats:
    """The same for times; beyond the points as steep as up to the nearest point that differs.

    Pooled neighbours are equal, and a flat end would make any batch free. Towards a batch of 0, time falls at
    most in proportion, so it never reaches zero.
    """
    differs = np.flatnonzero(y != y[-1])
    after = (y[-1] - y[differs[-1]]) / (x[-1] - x[differs[-1]]) if differs.size else 0.0
    differs = np.flatnonzero(y != y[0])
    before = (y[differs[0]] - y[0]) / (x[differs[0]] - x[0]) if differs.size else 0.0
    left = np.maximum(y[0] + (at - x[0]) * before, y[0] * at / x[0])
    right = y[-1] + (at - x[-1]) * after
    return np.where(at < x[0], left, np.where(at > x[-1], right, np.interp(at, x, y)))


def model_warnings(profiles: Sequence[Profile], model: Model) -> list[str]:
    """Says what the measurements show but the model does not take."""
    found: list[str] = []
    if model == "quadratic":
        return found
    for profile in profiles:
        above = [
            point
            for point in profile.points.values()
            if point.energy_j > 1.02 * point.power_limit_w * point.time_s
        ]
        if above:
            worst = max(above, key=lambda point: point.energy_j / point.time_s / point.power_limit_w)
            found.append(
                f"{profile.gpu}: {len(above)} of {len(profile.points)} points draw more than their limit "
                f"({worst.energy_j / worst.time_s:.1f} W at {worst.power_limit_w:g} W, batch {worst.batch}): "
                "taken as the limit"
            )
    return found


# What an allocation costs.
#
# `sum` is the original's: Σ (η·P̄ + (1−η)·P_limit)·t over GPUs, as if each could go on by itself. The others
# are for synchronous training: a step lasts as long as its slowest GPU and the all-reduce after it, and the
# other GPUs wait meanwhile at their wait power:
#
#     T = max t + all-reduce,    E = Σ (P̄·t + P_wait·(T − t))
#
#     sync    η·E + (1−η)·T·Σ P_limit
#     energy  E, within a slowdown if one is given
#     time    T (of equally fast allocations the one with the least energy)
#     edp     E·T
#
# A GPU with a batch of 0 is not part of the job: it takes no time, and nobody pays for its waiting.

Kind = Literal["sum", "sync", "energy", "time", "edp"]
OBJECTIVES: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True)
class Objective:
    kind: Kind
    eta: float = 0.5
    all_reduce_s: float = 0.0
    slowdown: float | None = None  # how much slower than the fastest step; for `energy`


@dataclass(frozen=True)
class Share:
    """What one GPU does in a step."""

    gpu: str
    batch: int
    power_limit_w: float
    time_s: float
    power_w: float
    wait_w: float


@dataclass(frozen=True)
class Allocation:
    shares: tuple[Share, ...]
    cost: float
    lower_bound: float  # no allocation costs less; equal to the cost if this one is known to be the best

    @property
    def exact(self) -> bool:
        return self.lower_bound >= self.cost


def share(choices: Choices, batch: int, limit: int) -> Share:
    """`limit` is the number of the row."""
    used = batch > 0
    return Share(
        choices.gpu,
        batch,
        float(choices.power_limit_w[limit]),
        float(choices.time_s[limit, batch]) if used else 0.0,
        float(choices.power_w[limit, batch]) if used else 0.0,
        choices.wait_w or 0.0,
    )


def step_time_s(shares: Sequence[Share], all_reduce_s: float) -> float:
    return max((each.time_s for each in shares), default=0.0) + all_reduce_s


def energy_j(shares: Sequence[Share], all_reduce_s: float) -> float:
    """The energy of a synchronous step, waiting included."""
    step_s = step_time_s(shares, all_reduce_s)
    return math.fsum(
        each.power_w * each.time_s + each.wait_w * (step_s - each.time_s) for each in shares if each.batch
    )


def cost(objective: Objective, shares: Sequence[Share]) -> float:
    eta = objective.eta
    used = [each for each in shares if each.batch]
    if objective.kind == "sum":
        return math.fsum((eta * each.power_w + (1 - eta) * each.power_limit_w) * each.time_s for each in used)
    step_s = step_time_s(used, objective.all_reduce_s)
    if objective.kind == "time":
        return step_s
    energy = energy_j(used, objective.all_reduce_s)
    if objective.kind == "energy":
        return energy
    if objective.kind == "edp":
        return energy * step_s
    return eta * energy + (1 - eta) * step_s * math.fsum(each.power_limit_w for each in used)


def unit(objective: Objective) -> str:
    return {"time": "s", "edp": "J·s"}.get(objective.kind, "J")


def check(objective: Objective, gpus: Sequence[Choices], global_batch: int) -> None:
    """Checks that there is something to choose from, and that all that the objective needs is known."""
    if not gpus:
        raise UserError("no GPU to allocate to", remedy="Name one or more: --gpu NAME=FILE")
    names = [each.gpu for each in gpus]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"GPU {name} is given twice", remedy="Give each a name of its own")
    if not 0 <= objective.eta <= 1:
        raise UserError(f"--eta {objective.eta:g} is not between 0 and 1")
    if objective.slowdown is not None and objective.kind != "energy":
        raise UserError("a slowdown is for the least energy within it", remedy="Use --objective energy")
    least, most = sum(each.lowest for each in gpus), sum(each.highest for each in gpus)
    if any(each.highest < each.lowest for each in gpus) or not least <= global_batch <= most:
        held = f"the GPUs hold {most} in all" if global_batch > most else f"{len(gpus)} GPUs need one each"
        raise UserError(
            f"no split can hold a global batch of {global_batch}",
            held,
            "Choose another batch, or other GPUs",
        )
    if objective.kind in ("sync", "energy", "edp"):
        for each in gpus:
            if each.wait_w is None:
                raise UserError(
                    f"the wait power of {each.gpu} is not known",
                    f"its profile has none, and --objective {objective.kind} needs it",
                    f"Give it: --wait-power {each.gpu}=W",
                )


# How the spread of a profile's repeats carries over to the cost of an allocation.
#
# To first order: move the time and the energy of each measured point that an allocation rests on by its
# standard error, and compute model and cost again. Errors of the model itself are not in it.


def standard_error(
    allocation: Allocation, profiles: Mapping[str, Profile], model: Model, objective: Objective
) -> float | None:
    """Of the cost; None if the profile of some GPU has no repeats."""
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
        step = min(step, value / 2)  # a time must stay above zero
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
