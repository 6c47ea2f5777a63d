"""Averages curves over time from many runs: relative times, an even grid, mean and standard deviation.

These are the functions that GPyJoules' report applies to its power readings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smaragdine.arrays import Floats

OVERSAMPLING = 2.0  # of the sensor's own rate: interpolation must not lose what was measured


@dataclass(frozen=True)
class Averaged:
    """The mean curve of runs of different length; at each time over those that still ran."""

    t_s: Floats
    mean: Floats
    std: Floats  # nan where but one run is left
    count: npt.NDArray[np.int64]


def relative_s(t_ns: npt.ArrayLike) -> Floats:
    """Seconds since the first reading."""
    t = np.asarray(t_ns, dtype=np.int64)
    return (t - t[:1]).astype(np.float64) * 1e-9


def rate_hz(t_s: Floats) -> float:
    """The rate to resample at: twice the sensor's, which is the usual spacing of readings."""
    if t_s.size < 2:
        raise ValueError("one reading has no rate")
    return OVERSAMPLING / float(np.median(np.diff(t_s)))


def resample(t_s: Floats, value: Floats, hz: float) -> tuple[Floats, Floats]:
    """Times 0, 1/hz, 2/hz … within the readings, and the cubic interpolation there."""
    span_s = float(t_s[-1] - t_s[0])
    # A grid point that rounding puts a hair behind the last reading is still on it.
    grid = np.minimum(np.arange(np.floor(span_s * hz * (1 + 1e-12)) + 1) / hz, span_s)
    return grid, spline(t_s - t_s[0], value, grid)


def spline(t_s: Floats, value: Floats, at_s: Floats) -> Floats:
    """The not-a-knot cubic spline through (t, value); nan outside of it: nothing is extrapolated."""
    step = np.diff(t_s)
    if t_s.size < 2 or not (step > 0).all():
        raise ValueError("a spline needs two readings or more, at rising times")
    bend = _second_derivatives(step, np.diff(value) / step)
    i = np.clip(np.searchsorted(t_s, at_s, side="right") - 1, 0, step.size - 1)
    h, right, left = step[i], at_s - t_s[i], t_s[i + 1] - at_s
    found = (bend[i] * left**3 + bend[i + 1] * right**3) / (6 * h)
    found += (value[i] / h - bend[i] * h / 6) * left + (value[i + 1] / h - bend[i + 1] * h / 6) * right
    return np.where((at_s >= t_s[0]) & (at_s <= t_s[-1]), found, np.nan)


def average(curves: Sequence[Floats], hz: float) -> Averaged:
    """Mean and standard deviation of curves on one even grid; what has ended or is nan does not count."""
    longest = max(curve.size for curve in curves)
    padded = np.ma.masked_all((len(curves), longest), dtype=np.float64)
    for row, curve in enumerate(curves):
        padded[row, : curve.size] = np.ma.masked_invalid(curve)
    count = padded.count(axis=0)
    std = padded.std(axis=0, ddof=1).filled(np.nan) if len(curves) > 1 else np.full(longest, np.nan)
    return Averaged(
        np.arange(longest) / hz,
        padded.mean(axis=0).filled(np.nan),
        np.where(count > 1, std, np.nan),
        count.astype(np.int64),
    )


def _second_derivatives(step: Floats, slope: Floats) -> Floats:
    inner = step.size - 1
    bend = np.zeros(step.size + 1)
    if not inner:
        return bend
    before, after = step[:-1], step[1:]
    diagonal, lower, upper = 2 * (before + after), before.copy(), after.copy()
    right = 6 * np.diff(slope)
    first, last = before[0] / after[0], after[-1] / before[-1]
    if inner == 1:
        bend[:] = right[0] / (3 * (before[0] + after[0]))  # three readings: one parabola
        return bend
    # The first two pieces are one cubic, and so are the last two.
    diagonal[0] += before[0] * (1 + first)
    upper[0] -= before[0] * first
    diagonal[-1] += after[-1] * (1 + last)
    lower[-1] -= after[-1] * last
    bend[1:-1] = _solved(lower, diagonal, upper, right)
    bend[0] = bend[1] + first * (bend[1] - bend[2])
    bend[-1] = bend[-2] + last * (bend[-2] - bend[-3])
    return bend


def _solved(lower: Floats, diagonal: Floats, upper: Floats, right: Floats) -> Floats:
    """Three diagonals, by elimination; plain floats, for numpy's scalars are five times slower."""
    a, b, c, d = lower.tolist(), diagonal.tolist(), upper.tolist(), right.tolist()
    for i in range(1, len(b)):
        part = a[i] / b[i - 1]
        b[i] -= part * c[i - 1]
        d[i] -= part * d[i - 1]
    d[-1] /= b[-1]
    for i in range(len(b) - 2, -1, -1):
        d[i] = (d[i] - c[i] * d[i + 1]) / b[i]
    return np.array(d)
