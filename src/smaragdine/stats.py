"""Student's t, noise between runs, and what was measured in turn, compared pair by pair."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smaragdine.arrays import Floats

MOST_SQUARED = 1e100  # beyond it the square of a figure is no number

# Student's t distribution, as much of it as confidence intervals need.


def t_quantile(freedom: float, two_sided: float = 0.95) -> float:
    """The t that |T| stays below with probability `two_sided`; any degrees of freedom above 0."""
    low, high = 0.0, 1.0
    while outside(high, freedom) > 1 - two_sided:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if outside(middle, freedom) > 1 - two_sided else (low, middle)
    return (low + high) / 2


def outside(t: float, freedom: float) -> float:
    """P(|T| ≥ t)."""
    return regularised_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def regularised_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - regularised_beta(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c, d = 1 + term / c, 1 / (1 + term * d)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value / a


# What difference between two means is no more than noise: Welch's interval, and how sure it must be.
#
# Of a hundred names that did not change, five lie outside their own 95 % interval. Where many are judged at
# once, Benjamini and Hochberg's rule says how sure each interval must be, so that of those that are said to
# have changed no more than the stated part did so by chance. That part is shared out by weight (Genovese,
# Roeder and Wasserman, 2006): a hundred names of a microjoule do not hide one that takes half of the energy.


@dataclass(frozen=True)
class StandardError:
    """The standard error of one figure, and on how many free values it rests."""

    error: float
    freedom: float


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; `statistics` works in exact fractions, which takes seconds for many names."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def of_runs(values: Sequence[float]) -> StandardError | None:
    """Of a mean over runs; one run alone does not say how it spreads."""
    if len(values) < 2:
        return None
    return StandardError(deviation(values) / math.sqrt(len(values)), len(values) - 1)


def of_steps(energy_j: float, step_mean_j: float, step_std_j: float, steps: int) -> StandardError | None:
    """Of the energy of one run, from its steps; nan where the steps are not known."""
    if steps < 2 or math.isnan(step_mean_j) or math.isnan(step_std_j):
        return None
    # Figures per step may rest on other work than the energy does: per epoch, per sample.
    work = energy_j / (step_mean_j * steps) if step_mean_j > 0 and energy_j > 0 else 1.0
    error = step_std_j * math.sqrt(steps) * work
    return StandardError(error, steps - 1) if math.isfinite(error) else None


def difference(a: StandardError, b: StandardError) -> StandardError:
    """Of a difference, by Welch: the two sides need not spread alike."""
    error = math.hypot(a.error, b.error)
    if error == 0:
        return StandardError(0.0, a.freedom + b.freedom)
    part_a, part_b = (a.error / error) ** 2, (b.error / error) ** 2
    return StandardError(error, 1 / (part_a**2 / a.freedom + part_b**2 / b.freedom))


def of_difference(a: Sequence[float], b: Sequence[float]) -> StandardError | None:
    """Of the difference of two means over runs; a side of one run is taken to spread as the other's runs do.

    None where neither side was repeated.
    """
    of_a, of_b = of_runs(a), of_runs(b)
    if of_a is None and of_b is None:
        return None
    if of_a is not None and of_b is not None:
        return difference(of_a, of_b)
    repeated = a if of_a is not None else b
    return StandardError(deviation(repeated) * math.sqrt(1 / len(a) + 1 / len(b)), len(repeated) - 1)


def half_width(spread: StandardError, chance: float = 0.05) -> float:
    """Of the interval that a difference of nothing leaves with probability `chance`."""
    return t_within(spread.freedom, chance) * spread.error


def probability(difference: float, spread: StandardError) -> float:
    """That noise alone makes a difference as large as this one."""
    if spread.error == 0:
        return 1.0 if difference == 0 else 0.0
    return outside(abs(difference) / spread.error, _rounded(spread.freedom))


def chance_for_each(
    probabilities: Sequence[float], false_part: float, weights: Sequence[float] | None = None
) -> list[float]:
    """By Benjamini and Hochberg: whatever is less probable than its chance, taken as a change, is false in no
    more than `false_part` of the cases. Of each the chance is in proportion to its weight, if any are given;
    weights must not depend on the probabilities.

    An interval with this chance leaves out 0 just where the rule calls a change (Benjamini and Yekutieli).
    """
    count = len(probabilities)
    parts = [1 / count for _ in probabilities] if weights is None else _parts(weights)
    found = 0
    tried = sorted(p / part if part else math.inf for p, part in zip(probabilities, parts, strict=True))
    for rank, value in enumerate(tried, start=1):
        if value <= false_part * rank:
            found = rank
    return [min(false_part * max(found, 1) * part, 0.5) for part in parts]


def _parts(weights: Sequence[float]) -> list[float]:
    """Of one. In steps of a fifth, down, so that a hundred thousand names share a hundred values."""
    total = math.fsum(weights)
    if not total > 0:
        return [1 / len(weights) for _ in weights]
    least = 2.0**-40
    return [2.0 ** (math.floor(4 * math.log2(max(weight / total, least))) / 4) for weight in weights]


def t_within(freedom: float, chance: float = 0.05) -> float:
    """Student's t that is exceeded with probability `chance`, on either side."""
    return _t_within(_rounded(freedom), chance)


def _rounded(freedom: float) -> float:
    """Degrees of freedom, down to the wider interval, so that many names share a few hundred values."""
    rounded = math.floor(freedom * 100) / 100 if freedom < 100 else float(min(math.floor(freedom), 10_000))
    return max(rounded, 1.0)


@lru_cache(maxsize=100_000)
def _t_within(freedom: float, chance: float) -> float:
    return t_quantile(freedom, 1 - chance)


# How variances of many names spread, by the logarithms of those that were seen (Smyth, 2004).


def prior_of_variances(log_variance: Floats, freedom: float) -> tuple[float, float]:
    """Fits the prior of these variances: the logarithm of their typical value, and how many free values it is
    worth.

    It compares the mean and the variance of their logarithms with log s² = log prior + log F(freedom, worth).
    """
    log = log_variance - _digamma(freedom / 2) + math.log(freedom / 2)
    mean, more = float(log.mean()), float(log.var(ddof=1)) - _trigamma(freedom / 2)
    if more <= 0:
        return mean, math.inf
    low, high = 1e-3, 1e6
    while high > low * (1 + 1e-6):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _trigamma(middle / 2) > more else (low, middle)
    return mean + _digamma(low / 2) - math.log(low / 2), low


def _digamma(x: float) -> float:
    below = 0.0
    while x < 8:
        below, x = below - 1 / x, x + 1
    return below + math.log(x) - 1 / (2 * x) - 1 / (12 * x**2) + 1 / (120 * x**4) - 1 / (252 * x**6)


def _trigamma(x: float) -> float:
    above = 0.0
    while x < 8:
        above, x = above + 1 / x**2, x + 1
    return above + 1 / x + 1 / (2 * x**2) + 1 / (6 * x**3) - 1 / (30 * x**5) + 1 / (42 * x**7)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """(low, middle, high): the median ratio of pairs and its 95 % interval.

    By order statistics, so that a pair in which somebody else took the machine moves nothing.
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    count = len(ratios)
    middle = (ratios[(count - 1) // 2] + ratios[count // 2]) / 2
    # The median lies between the k-th lowest and the k-th highest with probability 1 − 2·P(Binomial < k).
    k, tail = 0, 0.0
    while k < count // 2 and tail + math.comb(count, k) / 2**count <= 0.025:
        tail += math.comb(count, k) / 2**count
        k += 1
    at = max(0, k - 1)
    return ratios[at], middle, ratios[count - 1 - at]


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(low, middle, high): the mean and its 95 % interval by Student's t. Needs two."""
    middle = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return middle - half, middle, middle + half


def alternating_interval(
    numerators: Sequence[float], denominators: Sequence[float]
) -> tuple[float, float, float]:
    """(low, middle, high): the geometric mean ratio of pairs and its 95 % interval.

    Pairs alternate in their order (AB BA AB …), so two that follow each other are one value: what drifts
    steadily cancels in it and does not count as spread.
    """
    logs = [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]
    if len(logs) >= 4:
        logs = [(logs[i] + logs[i + 1]) / 2 for i in range(0, len(logs) - 1, 2)]
    low, middle, high = mean_interval(logs)
    return math.exp(low), math.exp(middle), math.exp(high)
