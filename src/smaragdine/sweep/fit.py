"""Fits energy, time and their products against a limit, for every group of measurements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from smaragdine.arrays import Floats
from smaragdine.errors import UserError
from smaragdine.stats import MOST_SQUARED, regularised_beta, t_quantile
from smaragdine.sweep.measurements import Group, Value

# A second-degree least-squares fit against a limit: R², band, optimum, and the interval it may lie in.
#
# It is computed on u = (limit − middle) / half range, from −1 to 1: there sums are well conditioned, and the
# ends of the range are the same for every sweep.

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
# A misfit below this part of the mean does not matter, however sure it is.
LEAST_MISFIT = 0.01
# Without repetitions noise looks like misfit: single measurements further off are not taken for noise.
MOST_SINGLE_MISFIT = 0.10
_ROUNDING = 1e-12  # of the values: anything smaller is rounding


@dataclass(frozen=True)
class Parabola:
    """y = c₂·limit² + c₁·limit + c₀ over the measured range, and how far to trust it."""

    coefficients: tuple[float, float, float]  # c₂, c₁, c₀, as np.polyval takes them
    limits: Floats  # of every measurement; `values` belong to them
    values: Floats
    r2: float | None  # None: all values are the same
    r2_of_means: float | None  # of the means at each limit, as GPyJoules has it
    freedom: int  # measurements beyond the three that determine a parabola
    residual_std: float | None  # None: no degrees of freedom
    effect_p: float | None  # how likely chance alone gives such a curve
    misfit_p: float | None  # how likely chance puts the means so far off it; None: no repetitions
    lowest: float
    highest: float
    optimum: float  # kept within the measured range
    edge: bool  # the vertex lies outside, or the parabola opens downwards
    interval: tuple[float, float] | None  # where the true optimum may lie, 95 %
    best_measured: float
    _scaled: Floats  # c₂, c₁, c₀ for u
    _inverse: Floats  # (XᵀX)⁻¹ of u², u, 1

    @property
    def repeated(self) -> bool:
        return np.unique(self.limits).size < self.limits.size

    @property
    def misfit(self) -> float | None:
        """The residual standard deviation as a part of the mean value."""
        mean = abs(float(self.values.mean()))
        return None if self.residual_std is None or not mean > 0 else self.residual_std / mean

    def at(self, limits: npt.ArrayLike) -> Floats:
        return _design(self._u(limits)) @ self._scaled

    def band(self, limits: npt.ArrayLike) -> Floats | None:
        """The half-width of the curve's 95 % confidence band at each limit."""
        if self.residual_std is None:
            return None
        rows = _design(self._u(limits))
        leverage = np.einsum("ij,jk,ik->i", rows, self._inverse, rows)
        return _t(self.freedom) * self.residual_std * np.sqrt(leverage)

    def measured_at(self, limit: float) -> float:
        """The mean of all measurements at a limit."""
        return float(self.values[self.limits == limit].mean())

    def _u(self, limits: npt.ArrayLike) -> Floats:
        half = (self.highest - self.lowest) / 2
        return (np.atleast_1d(np.asarray(limits, dtype=np.float64)) - (self.lowest + half)) / half


def fit_parabola(limits: Sequence[float] | Floats, values: Sequence[float] | Floats) -> Parabola:
    """Every measurement counts the same. Needs three different limits."""
    x, y = np.asarray(limits, dtype=np.float64), np.asarray(values, dtype=np.float64)
    different = np.unique(x)
    if different.size < 3:
        raise ValueError("a parabola needs three different limits")
    lowest, highest = float(different[0]), float(different[-1])
    half, middle = (highest - lowest) / 2, (highest + lowest) / 2
    # Around the mean, so that a curve of 1 J on a base of 1 MJ keeps its digits.
    level = float(y.mean())
    design = _design((x - middle) / half)
    scaled: Floats = np.asarray(np.linalg.lstsq(design, y - level, rcond=None)[0], dtype=np.float64)
    inverse: Floats = np.asarray(np.linalg.inv(design.T @ design), dtype=np.float64)
    residual = y - level - design @ scaled
    tiny = _ROUNDING * float(np.abs(y).max())
    total, left = float(((y - level) ** 2).sum()), float((residual**2).sum())
    flat = total <= y.size * tiny**2
    left = 0.0 if left <= y.size * tiny**2 else left
    freedom = y.size - 3
    variance = left / freedom if freedom else None
    means = np.array([y[x == limit].mean() for limit in different])
    if flat:
        scaled = np.zeros(3)
    at, edge = _minimum(scaled)
    interval = None if variance is None else _interval(scaled, inverse, variance, freedom)
    mean_here = means[np.searchsorted(different, x)]
    between, pure = float(((mean_here - level) ** 2).sum()), float(((y - mean_here) ** 2).sum())
    c2, c1, c0 = (float(c) for c in scaled)
    return Parabola(
        coefficients=(
            c2 / half**2,
            c1 / half - 2 * c2 * middle / half**2,
            c0 + level - c1 * middle / half + c2 * (middle / half) ** 2,
        ),
        limits=x,
        values=y,
        r2=None if flat else 1 - left / total,
        r2_of_means=None if flat or between <= y.size * tiny**2 else 1 - max(0.0, left - pure) / between,
        freedom=freedom,
        residual_std=None if variance is None else math.sqrt(variance),
        effect_p=None if variance is None else _tail(total - left, 2, left, freedom),
        misfit_p=_misfit_p(left, pure, different.size, y.size),
        lowest=lowest,
        highest=highest,
        optimum=_limit(at, lowest, highest),
        edge=edge,
        interval=interval and (_limit(interval[0], lowest, highest), _limit(interval[1], lowest, highest)),
        best_measured=float(different[int(np.argmin(means))]),
        _scaled=np.array([c2, c1, c0 + level]),
        _inverse=inverse,
    )


def judge(fit: Parabola) -> tuple[bool | None, str]:
    """Whether the model fits, and why if not; None if nothing is left to test it."""
    if fit.r2 is None:
        return False, "it is the same at every limit"
    if fit.effect_p is None or fit.misfit is None:
        return None, "three measurements determine a parabola: none is left to test it"
    if fit.effect_p >= ALPHA:
        return False, f"the limit explains no more than chance may (p = {fit.effect_p:.2g})"
    if fit.misfit_p is not None and fit.misfit_p < ALPHA and fit.misfit > LEAST_MISFIT:
        return False, f"means lie off the parabola by more than repetitions differ (p = {fit.misfit_p:.2g})"
    if not fit.repeated and fit.misfit > MOST_SINGLE_MISFIT:
        return False, f"measurements lie {fit.misfit:.0%} off the parabola"
    return True, ""


@cache
def _t(freedom: int) -> float:
    return t_quantile(freedom, CONFIDENCE)


def _design(u: Floats) -> Floats:
    return np.stack([u * u, u, np.ones_like(u)], axis=1)


def _limit(u: float, lowest: float, highest: float) -> float:
    return lowest if u <= -1 else highest if u >= 1 else lowest + (u + 1) / 2 * (highest - lowest)


def _minimum(scaled: Floats) -> tuple[float, bool]:
    """Where on [−1, 1] the parabola is lowest, and whether that is at an end."""
    c2, c1 = float(scaled[0]), float(scaled[1])
    if c2 > 0 and abs(c1) <= 2 * c2 * (1 + _ROUNDING):
        return min(1.0, max(-1.0, -c1 / (2 * c2))), False
    return (-1.0 if c1 >= 0 else 1.0), True


def _interval(scaled: Floats, inverse: Floats, variance: float, freedom: int) -> tuple[float, float]:
    """Limits that a likelihood-ratio test at 5 % does not rule out as the place of the minimum.

    For a v inside, "the minimum is at v" means that the slope there is 0 and that the parabola does not open
    downwards. In the plane of slope and curvature that is a ray; we keep v if the estimate is within t
    standard deviations of it. Inside the range this is Fieller's interval, exact for normal errors; the usual
    one (delta method) is too short as soon as the curvature is uncertain. An end is the minimum of half a
    plane or more, bordered by two such rays. Returns the hull.
    """
    slope, curve = float(scaled[1]), float(scaled[0])
    at = _minimum(scaled)[0]
    if not variance > 0:
        return at, at
    covariance = inverse[:2, :2][::-1, ::-1] * variance  # of (slope, curvature)
    weight, estimate = np.linalg.inv(covariance), np.array([slope, curve])
    most = _t(freedom) ** 2

    def off(ray: tuple[float, float]) -> float:
        direction = np.array(ray)
        along = max(0.0, float(direction @ weight @ estimate))
        return float(estimate @ weight @ estimate) - along**2 / float(direction @ weight @ direction)

    def kept(v: float) -> bool:
        return off((-2 * v, 1.0)) <= most

    # Between two of these points all limits are kept or none: where Fieller's quadratic is 0, where the ray
    # turns away.
    (ss, sc), (_, cc) = covariance
    roots = np.roots([4 * (curve**2 - most * cc), 4 * (slope * curve - most * sc), slope**2 - most * ss])
    turn = weight @ estimate
    borders = [float(root.real) for root in np.atleast_1d(roots) if abs(root.imag) < 1e-12]
    borders += [float(turn[1] / (2 * turn[0]))] if turn[0] else []
    cuts = sorted({-1.0, 1.0, *(v for v in borders if -1 < v < 1)})
    inside = [(a, b) for a, b in itertools.pairwise(cuts) if kept((a + b) / 2)]
    found = [at, *(end for pair in inside for end in pair)]
    # It may open downwards, with both ends equally low.
    found += [-1.0, 1.0] if off((0.0, -1.0)) <= most else []
    return min(found), max(found)


def _misfit_p(left: float, pure: float, limits: int, measurements: int) -> float | None:
    """The lack-of-fit test. Needs repetitions, and more limits than a parabola has coefficients."""
    if limits == 3 or measurements == limits:
        return None
    return _tail(max(0.0, left - pure), limits - 3, pure, measurements - limits)


def _tail(explained: float, of: int, left: float, freedom: int) -> float:
    """P(F > f) for the ratio of two mean squares."""
    if not left > 0:
        return 0.0 if explained > 0 else 1.0
    f = (explained / of) / (left / freedom)
    return regularised_beta(freedom / (freedom + of * f), freedom / 2, of / 2)


# The Pareto front: settings that no other beats in both time and energy.


def pareto(time_s: npt.ArrayLike, energy_j: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Indices of the front, by rising time. Of two equal settings, both are on it or neither."""
    time, energy = np.asarray(time_s, dtype=np.float64), np.asarray(energy_j, dtype=np.float64)
    order = np.lexsort((energy, time))
    kept: list[int] = []
    least = np.inf
    for i in order:
        alike = bool(kept) and time[i] == time[kept[-1]] and energy[i] == energy[kept[-1]]
        if energy[i] < least or alike:
            kept.append(int(i))
            least = min(least, float(energy[i]))
    return np.array(kept, dtype=np.int64)


QUANTITIES: Mapping[str, str] = {"energy": "J", "time": "s", "edp": "J·s", "ed2p": "J·s²", "power": "W"}
LEAST_LIMITS = 3
_LEAST_SPAN = 1e-100  # of the limits: curvatures are divided by its square
SINGLE = "residuals of single measurements"
REPEATED = "residuals of repeated measurements"


@dataclass(frozen=True)
class GroupFit:
    group: Group
    parabolas: dict[str, Parabola]  # quantity → its fit
    front: list[float]  # limits that no other beats in both mean time and mean energy, fastest first


@dataclass(frozen=True)
class Analysis:
    groups: list[GroupFit]
    left_out: list[tuple[dict[str, Value], str]]  # each group that cannot be fitted, and why


def analyse(groups: Sequence[Group], quantities: Sequence[str] = tuple(QUANTITIES)) -> Analysis:
    """Fits every group with three limits or more; an error if there is none."""
    fitted: list[GroupFit] = []
    left_out: list[tuple[dict[str, Value], str]] = []
    for group in groups:
        limits = np.unique(group.limit)
        if limits.size < LEAST_LIMITS:
            there = ", ".join(f"{limit:g}" for limit in limits)
            left_out.append(
                (group.by, f"{limits.size} of the {LEAST_LIMITS} limits that a parabola needs: {there}")
            )
            continue
        if _apart(limits) < LEAST_LIMITS:
            spread = f"{limits[0]:g} to {limits[-1]:g}"
            left_out.append((group.by, f"most of its limits lie too close together for {spread}"))
            continue
        for name in quantities:
            if not np.abs(quantity(group, name)).max() < MOST_SQUARED:
                raise UserError(
                    f"{name} is beyond {MOST_SQUARED:.0e} {QUANTITIES[name]}", remedy="Is time in seconds?"
                )
        parabolas = {name: fit_parabola(group.limit, quantity(group, name)) for name in quantities}
        fitted.append(GroupFit(group, parabolas, front(group)))
    if not fitted:
        raise UserError(
            "nothing can be fitted",
            left_out[0][1] if len(left_out) == 1 else f"no group has {LEAST_LIMITS} limits",
            "Measure at more limits"
            if len(left_out) < 2
            else "Measure at more, or name fewer columns with --by",
        )
    return Analysis(fitted, left_out)


def _apart(limits: Floats) -> int:
    """How many limits differ by a millionth of the range. No curve can tell others apart; nor can it if the
    range is too small to divide by twice."""
    with np.errstate(over="ignore", invalid="ignore"):
        span = limits[-1] - limits[0]
        if not _LEAST_SPAN < span < 1 / _LEAST_SPAN:
            return 1
        return np.unique(np.round((limits - limits[0]) / span, 6)).size


def quantity(group: Group, name: str) -> Floats:
    """The values of every measurement."""
    with np.errstate(over="ignore"):
        if name == "power":
            return group.energy_j / group.time_s
        delays = {"edp": 1, "ed2p": 2}.get(name, 0)
        return group.time_s if name == "time" else group.energy_j * group.time_s**delays


def means(group: Group, name: str) -> tuple[Floats, Floats, Floats]:
    """Limits, and mean and standard deviation over repetitions at each; nan if there is only one."""
    values = quantity(group, name)
    limits = np.unique(group.limit)
    each = [values[group.limit == limit] for limit in limits]
    std = [float(v.std(ddof=1)) if v.size > 1 else np.nan for v in each]
    return limits, np.array([v.mean() for v in each]), np.array(std)


def front(group: Group) -> list[float]:
    limits, time_s, _ = means(group, "time")
    return limits[pareto(time_s, means(group, "energy")[1])].tolist()


def saved(fit: Parabola) -> float | None:
    """The part that the best measured limit saves against the highest."""
    at_highest = fit.measured_at(fit.highest)
    return 1 - fit.measured_at(fit.best_measured) / at_highest if at_highest > 0 else None


def slower(of: GroupFit, limit: float) -> float:
    """How much longer the work takes at a measured limit than at the highest, as a part."""
    limits, time_s, _ = means(of.group, "time")
    return float(time_s[np.searchsorted(limits, limit)] / time_s[-1]) - 1


def below_limits(of: GroupFit) -> bool:
    """Whether the program draws less than the lowest power limit anyway: then no limit changes anything."""
    return of.group.unit == "W" and bool(quantity(of.group, "power").max() < of.group.limit.min())


def verdict(of: GroupFit, name: str) -> tuple[bool | None, str]:
    """Whether a quantity's model fits, and why if not."""
    fits, why = judge(of.parabolas[name])
    if fits is False and below_limits(of):
        why += "; the program draws less than the lowest limit"
    return fits, why


def rests_on(fit: Parabola) -> str:
    return REPEATED if fit.repeated else SINGLE


def to_json(found: Analysis) -> dict[str, Any]:
    """One entry for every group and quantity."""
    return {
        "of": found.groups[0].group.of,
        "groups": [
            {"by": each.group.by, "quantity": name, **_fit_json(each, name)}
            for each in found.groups
            for name in each.parabolas
        ],
        "pareto": [{"by": each.group.by, "limits": each.front} for each in found.groups],
        "left_out": [{"by": by, "why": why} for by, why in found.left_out],
    }


def _fit_json(of: GroupFit, name: str) -> dict[str, Any]:
    fit = of.parabolas[name]
    fits, why = verdict(of, name)
    limits = np.unique(fit.limits)
    half = fit.band(limits)
    return {
        "unit": QUANTITIES[name],
        "coefficients": list(fit.coefficients),
        "r2": fit.r2,
        "r2_of_means": fit.r2_of_means,
        "best_measured": fit.best_measured,
        "best_measured_value": fit.measured_at(fit.best_measured),
        "saved": saved(fit),
        "slower": slower(of, fit.best_measured),
        "optimum": fit.optimum,
        "optimum_value": float(fit.at(fit.optimum)[0]),
        "interval": None if fit.interval is None else list(fit.interval),
        "edge": fit.edge,
        "fits": fits,
        "why": why,
        "measurements": int(fit.values.size),
        "differing": list(of.group.differing),
        "limits": limits.tolist(),
        "fitted": fit.at(limits).tolist(),
        "band": None if half is None else half.tolist(),
        "band_rests_on": None if half is None else rests_on(fit),
        "residual_std": fit.residual_std,
        "effect_p": fit.effect_p,
        "misfit_p": fit.misfit_p,
    }
