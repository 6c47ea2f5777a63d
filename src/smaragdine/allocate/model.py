"""From measured points to every batch size: time and mean power of a step, one curve per power limit.

`quadratic` is the original's: a parabola each for time and for mean power, clipped at zero. It follows the
points closely and means nothing beyond them. `monotone` is ours: time rises with the batch and is linear
between and beyond the points; mean power is linear too, and stays between the GPU's idle power and the limit
(without an idle power in the profile, the least that was measured).
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """All that one GPU can be told to do, a row per power limit and a column per batch from 0."""

    gpu: str
    power_limit_w: Floats
    time_s: Floats
    power_w: Floats  # mean power while the GPU works
    lowest: int  # batch; 0: the GPU may be left out of the job
    highest: int
    wait_w: float | None = None
    barred: npt.NDArray[np.bool_] | None = None  # limit × batch: not to be chosen


def choices(
    profile: Profile,
    global_batch: int,
    model: Model = "monotone",
    max_batch: int | None = None,
    wait_w: float | None = None,
    may_be_left_out: bool = False,
) -> Choices:
    """Every limit and every batch up to the global one or what the GPU's memory holds."""
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
    """What a GPU at work cannot draw less than: its idle power, or the least that was measured of it."""
    if profile.idle_w is not None:
        return profile.idle_w
    return min(point.energy_j / point.time_s for point in profile.points.values())


def points_at(profile: Profile, power_limit_w: float) -> list[Point]:
    return [profile.points[batch, power_limit_w] for batch in profile.batches]


def curve(
    model: Model, points: Sequence[Point], limit_w: float, least_w: float, at: Floats
) -> tuple[Floats, Floats]:
    """Time and mean power at the batches `at`, from the points of one limit, in rising order of batch."""
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
    """The nearest values that never fall (isotonic regression: neighbours that do are pooled)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, heavy, count = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            before, its_weight, its_count = blocks.pop()
            mean = (before * its_weight + mean * heavy) / (its_weight + heavy)
            heavy, count = heavy + its_weight, count + its_count
        blocks.append((mean, heavy, count))
    return np.repeat([mean for mean, _, _ in blocks], [count for _, _, count in blocks])


def _line(x: Floats, y: Floats, at: Floats) -> Floats:
    """Linear between the points, and beyond them as between the outermost two."""
    left = y[0] + (at - x[0]) * (y[1] - y[0]) / (x[1] - x[0])
    right = y[-1] + (at - x[-1]) * (y[-1] - y[-2]) / (x[-1] - x[-2])
    return np.where(at < x[0], left, np.where(at > x[-1], right, np.interp(at, x, y)))


def _rising_line(x: Floats, y: Floats, at: Floats) -> Floats:
    """The same for times: beyond the points as steep as up to the nearest point that differs.

    Pooled neighbours are equal, and a flat end would make any batch free. Towards a batch of 0, time falls at
    most in proportion: it can never reach zero.
    """
    differs = np.flatnonzero(y != y[-1])
    after = (y[-1] - y[differs[-1]]) / (x[-1] - x[differs[-1]]) if differs.size else 0.0
    differs = np.flatnonzero(y != y[0])
    before = (y[differs[0]] - y[0]) / (x[differs[0]] - x[0]) if differs.size else 0.0
    left = np.maximum(y[0] + (at - x[0]) * before, y[0] * at / x[0])
    right = y[-1] + (at - x[-1]) * after
    return np.where(at < x[0], left, np.where(at > x[-1], right, np.interp(at, x, y)))


def model_warnings(profiles: Sequence[Profile], model: Model) -> list[str]:
    """What the measurements say that the model does not take."""
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
