"""What difference between two means is no more than noise: Welch's 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from smaragdine.accounting.student import t_quantile


@dataclass(frozen=True)
class Spread:
    """The standard error of one figure, and on how many free values it rests."""

    error: float
    freedom: float


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; `statistics` works in exact fractions, which takes seconds for many names."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def of_runs(values: Sequence[float]) -> Spread | None:
    """Of a mean over runs; one run alone does not say how it spreads."""
    if len(values) < 2:
        return None
    return Spread(deviation(values) / math.sqrt(len(values)), len(values) - 1)


def of_steps(energy_j: float, step_mean_j: float, step_std_j: float, steps: int) -> Spread | None:
    """Of the energy of one run, from its steps; nan where the steps are not known."""
    if steps < 2 or math.isnan(step_mean_j) or math.isnan(step_std_j):
        return None
    # Figures per step may rest on other work than the energy does: per epoch, per sample.
    work = energy_j / (step_mean_j * steps) if step_mean_j > 0 and energy_j > 0 else 1.0
    error = step_std_j * math.sqrt(steps) * work
    return Spread(error, steps - 1) if math.isfinite(error) else None


def half_width(a: Spread, b: Spread) -> float:
    """Of the 95 % interval of a difference, by Welch: the two sides need not spread alike."""
    error = math.hypot(a.error, b.error)
    if error == 0:
        return 0.0
    part_a, part_b = (a.error / error) ** 2, (b.error / error) ** 2
    return t_95(1 / (part_a**2 / a.freedom + part_b**2 / b.freedom)) * error


def half_width_runs(a: Sequence[float], b: Sequence[float]) -> float | None:
    """As `half_width`, over runs; a side of one run is taken to spread as the other side's runs do."""
    of_a, of_b = of_runs(a), of_runs(b)
    if of_a is None and of_b is None:
        return None
    if of_a is not None and of_b is not None:
        return half_width(of_a, of_b)
    repeated = a if of_a is not None else b
    error = deviation(repeated) * math.sqrt(1 / len(a) + 1 / len(b))
    return t_95(len(repeated) - 1) * error


def t_95(freedom: float) -> float:
    """Student's t that 95 % lie within. Degrees of freedom are rounded down, to the wider interval, so that
    a hundred thousand names share a few hundred values."""
    return _t_95(
        math.floor(freedom * 100) / 100 if freedom < 100 else float(min(math.floor(freedom), 10_000))
    )


@lru_cache(maxsize=10_000)
def _t_95(freedom: float) -> float:
    return t_quantile(max(freedom, 1.0))
