"""A second-degree least-squares fit against a limit: R², band, optimum and the interval it may lie in.

All of it is computed on u = (limit − middle) / half range, from −1 to 1, where the sums are well conditioned
and the ends of the range are the same for every sweep.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from smaragdine.accounting.student import regularised_beta, t_quantile
from smaragdine.arrays import Floats

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
# A misfit below this part of the mean is of no consequence, however sure it is.
LEAST_MISFIT = 0.01
# No repetition tells noise from misfit: single measurements further off than this are not taken for noise.
MOST_SINGLE_MISFIT = 0.10
_ROUNDING = 1e-12  # of the values: what is smaller is arithmetic, not measurement


@dataclass(frozen=True)
class Parabola:
    """y = c₂·limit² + c₁·limit + c₀ over the measured range, and how far it may be trusted."""

    coefficients: tuple[float, float, float]  # c₂, c₁, c₀: as np.polyval takes them
    limits: Floats  # of every measurement, with `values` beside them
    values: Floats
    r2: float | None  # None: all values are the same
    r2_of_means: float | None  # of the means at each limit; that of GPyJoules
    freedom: int  # measurements beyond the three that a parabola needs
    residual_std: float | None  # None: no freedom
    effect_p: float | None  # how likely chance alone would give such a curve
    misfit_p: float | None  # … such a distance of the means from it; None: no repetitions to tell
    lowest: float
    highest: float
    optimum: float  # clamped to the measured range
    edge: bool  # the vertex lies outside, or the parabola opens downwards: no minimum was bracketed
    interval: tuple[float, float] | None  # limits that may be the true optimum, 95 %
    best_measured: float
    _scaled: Floats  # c₂, c₁, c₀ of u
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
        """The half-width of the 95 % confidence band of the curve at each limit."""
        if self.residual_std is None:
            return None
        rows = _design(self._u(limits))
        leverage = np.einsum("ij,jk,ik->i", rows, self._inverse, rows)
        return _t(self.freedom) * self.residual_std * np.sqrt(leverage)

    def measured_at(self, limit: float) -> float:
        """The mean of what was measured at a limit."""
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
    # Around the mean: a curve of 1 J on a base of 1 MJ keeps its digits.
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
    """Whether the model fits, and why it does not; None where nothing is left to tell by."""
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
    """Where on [−1, 1] the parabola is lowest, and whether that is not its vertex."""
    c2, c1 = float(scaled[0]), float(scaled[1])
    if c2 > 0 and abs(c1) <= 2 * c2 * (1 + _ROUNDING):
        return min(1.0, max(-1.0, -c1 / (2 * c2))), False
    return (-1.0 if c1 >= 0 else 1.0), True


def _interval(scaled: Floats, inverse: Floats, variance: float, freedom: int) -> tuple[float, float]:
    """The limits that a likelihood-ratio test at 5 % does not refuse as the place of the minimum.

    "The minimum is at v" means for a v inside: slope 0 there, and not opening downwards. In the plane of the
    slope and the curvature that is a ray; v is kept where the estimate is within t standard deviations of
    it. Inside the range this is Fieller's interval, exact for normal errors, where the usual one (delta
    method) is too short as soon as the curvature is uncertain. An end is the minimum of half a plane or
    more, whose border are two such rays. What is returned is the hull.
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

    # Between two of these, all are kept or none: where Fieller's quadratic is 0, where the ray turns away.
    (ss, sc), (_, cc) = covariance
    roots = np.roots([4 * (curve**2 - most * cc), 4 * (slope * curve - most * sc), slope**2 - most * ss])
    turn = weight @ estimate
    borders = [float(root.real) for root in np.atleast_1d(roots) if abs(root.imag) < 1e-12]
    borders += [float(turn[1] / (2 * turn[0]))] if turn[0] else []
    cuts = sorted({-1.0, 1.0, *(v for v in borders if -1 < v < 1)})
    inside = [(a, b) for a, b in itertools.pairwise(cuts) if kept((a + b) / 2)]
    found = [at, *(end for pair in inside for end in pair)]
    # It may open downwards with both ends as low as each other.
    found += [-1.0, 1.0] if off((0.0, -1.0)) <= most else []
    return min(found), max(found)


def _misfit_p(left: float, pure: float, limits: int, measurements: int) -> float | None:
    """The lack-of-fit test: needs repetitions, and more limits than a parabola has coefficients."""
    if limits == 3 or measurements == limits:
        return None
    return _tail(max(0.0, left - pure), limits - 3, pure, measurements - limits)


def _tail(explained: float, of: int, left: float, freedom: int) -> float:
    """P(F > f) for the ratio of two mean squares."""
    if not left > 0:
        return 0.0 if explained > 0 else 1.0
    f = (explained / of) / (left / freedom)
    return regularised_beta(freedom / (freedom + of * f), freedom / 2, of / 2)
