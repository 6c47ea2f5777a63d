"""What was measured in turn, compared pair by pair: the machine's mood cancels out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from smaragdine.accounting.student import t_quantile


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
