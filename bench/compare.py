"""Ratios of two commands measured in turn, with their spread: the machine's mood cancels out."""

from __future__ import annotations

import math
from collections.abc import Sequence


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
