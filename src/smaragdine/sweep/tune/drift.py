"""Has the workload changed? Two-sided CUSUM of step time and power at the settled limit.

A CUSUM sees a sudden change within two slices and a slow one in time, where a test of each slice for itself
would miss the slow one, or cry wolf once in twenty. One unit is the slice's own standard error and 2 % of the
level together: changes below 1 % never count. With K = 0.5 and H = 8 such noise alone raises an alarm once in
some 5,000 slices. A slice counts for less than H, so that one odd slice (a checkpoint, a neighbour) is no
alarm.
"""

from __future__ import annotations

import math

from smaragdine.sweep.tune.slices import Mean, Seen, log_ratio

ALLOWANCE = 0.5  # K
THRESHOLD = 8.0  # H
MOST_PER_SLICE = 6.0
FLOOR = 0.02


class Cusum:
    """Of one quantity against the level it had."""

    def __init__(self, level: Mean) -> None:
        self._level = level
        self._up = self._down = 0.0

    @property
    def alarm(self) -> bool:
        return max(self._up, self._down) >= THRESHOLD

    def take(self, found: Mean) -> None:
        ratio = log_ratio(found, self._level)
        units = ratio.value / math.hypot(ratio.error, FLOOR)
        units = max(-MOST_PER_SLICE, min(MOST_PER_SLICE, units))
        self._up = self._next(self._up, units)
        self._down = self._next(self._down, -units)

    @staticmethod
    def _next(total: float, units: float) -> float:
        # Bounded, so that a change that was undone is forgotten as soon as it was noticed.
        return min(THRESHOLD + MOST_PER_SLICE, max(0.0, total + units - ALLOWANCE))


class Drift:
    """Step time and power against what they were when the limit was chosen."""

    def __init__(self, settled: Seen) -> None:
        self._time = Cusum(settled.time_s)
        self._power = Cusum(settled.power_w)

    def take(self, found: Seen) -> None:
        self._time.take(found.time_s)
        self._power.take(found.power_w)

    @property
    def what(self) -> str:
        """What has changed, or nothing."""
        changed = [name for name, cusum in (("step time", self._time), ("power", self._power)) if cusum.alarm]
        return " and ".join(changed)
