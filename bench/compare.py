"""Ratios of two commands measured in turn, with their spread: the machine's mood cancels out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Two-sided 95 % of Student's t, by degrees of freedom; beyond 30 the normal value is near enough.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
_T95 += (2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """(low, middle, high): the mean ratio of pairs and its 95 % interval, on the logarithm."""
    logs = [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]
    middle = statistics.fmean(logs)
    freedom = len(logs) - 1
    t95 = _T95[freedom - 1] if freedom <= len(_T95) else 1.96
    half = t95 * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle - half), math.exp(middle), math.exp(middle + half)
