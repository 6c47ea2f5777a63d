"""Tells what all names of a run have in common from what one name does by itself.

Runs of one program differ mostly as a whole: on a warmer card, or beside a busier processor, every name takes
a percent more. With three runs on each side, that alone hides a layer that takes a tenth more. So each name
is also judged beside its company: relative to its run's level, the weighted median of the names' ratios.

Three runs say little about how far one name spreads around that level. But names of one program that take
about as much energy spread alike, and all of them together say more: the moderated t of Smyth (2004), an
inverse-χ² prior of relative variances around a line over energy, fitted to all names of a side. Names also
err together, which no such prior sees; so it never counts for more than the runs themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from smaragdine.arrays import Floats
from smaragdine.stats import StandardError, difference

LEAST_NAMES = 5  # with fewer, one of them may be all they have in common
_NOTHING = 1e-24  # a relative variance below this is rounding


@dataclass(frozen=True)
class Beside:
    """How a name's difference splits into what all names share and what is its own."""

    common_j: float  # the part that all names have in common
    spread: StandardError  # of the part that is its own


def beside_company(a_j: Floats, b_j: Floats) -> list[Beside | None]:
    """For every name, from matrices of runs × names; None if the runs say nothing.

    If one side has a single run, we take it to spread as the other side's runs do.
    """
    count = a_j.shape[1]
    mean_j = (a_j.mean(axis=0) + b_j.mean(axis=0)) / 2
    usual = mean_j > 0
    if usual.sum() < LEAST_NAMES or max(len(a_j), len(b_j)) < 2:
        return [None] * count
    safe_j = np.where(usual, mean_j, 1.0)
    relative = [side / safe_j / _levels(side, mean_j)[:, None] for side in (a_j, b_j)]
    variances = [
        _moderated(side[:, usual], np.log(mean_j[usual])) if len(side) > 1 else None for side in relative
    ]
    known = [variance for variance in variances if variance is not None]
    if not known:
        return [None] * count
    variance_a, variance_b = (known[0] if variance is None else variance for variance in variances)
    common_j = (b_j.mean(axis=0) - a_j.mean(axis=0)) - mean_j * (
        relative[1].mean(axis=0) - relative[0].mean(axis=0)
    )
    found: list[Beside | None] = [None] * count
    for i, name in enumerate(np.flatnonzero(usual).tolist()):
        sides = [
            StandardError(math.sqrt(variance[i] / len(side)) * float(mean_j[name]), freedom)
            for (variance, freedom), side in ((variance_a, a_j), (variance_b, b_j))
        ]
        spread = difference(*sides)
        if min(len(a_j), len(b_j)) == 1:
            # Both sides rest on the same few runs.
            spread = StandardError(spread.error, sides[0].freedom)
        found[name] = Beside(float(common_j[name]), spread)
    return found


def _levels(side_j: Floats, mean_j: Floats) -> Floats:
    """Per run, the weighted median of its names' ratios to the mean: one changed layer does not move it."""
    rows = np.flatnonzero(mean_j > 0)
    ratio = side_j[:, rows] / mean_j[rows]
    order = np.argsort(ratio, axis=1)
    weight = np.cumsum(mean_j[rows][order], axis=1)
    middle = np.argmax(weight >= weight[:, -1:] / 2, axis=1)
    level = np.take_along_axis(np.take_along_axis(ratio, order, 1), middle[:, None], 1)[:, 0]
    return np.where(level > 0, level, 1.0)


def _moderated(relative: Floats, log_j: Floats) -> tuple[list[float], float] | None:
    """Relative variances of all names, each drawn towards those of names with as much energy, and the number
    of free values behind them. None if no name spreads."""
    own = len(relative) - 1
    variance = relative.var(axis=0, ddof=1)
    spreading = variance > _NOTHING
    if spreading.sum() < LEAST_NAMES:
        return None
    log = np.log(variance[spreading])
    line = _line(log_j[spreading], log)
    usual = np.polyval(line, log_j)
    shift, prior = fit(log - usual[spreading], own)
    prior = min(prior, own)
    of_others = np.exp(usual + shift)
    return ((prior * of_others + own * variance) / (prior + own)).tolist(), own + prior


def _line(log_j: Floats, log_variance: Floats) -> Floats:
    """Small names spread more. With few names, or equal ones, the slope would say nothing."""
    if log_j.size < 2 * LEAST_NAMES or log_j.std() < 1e-6:
        return np.array([log_variance.mean()])
    return np.polyfit(log_j, log_variance, 1)


def fit(log_variance: Floats, freedom: float) -> tuple[float, float]:
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
