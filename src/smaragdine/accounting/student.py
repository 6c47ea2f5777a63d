"""Student's t distribution, as much of it as confidence intervals need."""

from __future__ import annotations

import math


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
