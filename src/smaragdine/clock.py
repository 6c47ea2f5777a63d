"""The one clock: nanoseconds since the Unix epoch, and how the monotonic clock maps onto it.

Everything that waits or stamps takes a `Clock`, so that tests advance time instead of sleeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

# A slewed wall clock moves at most 500 ppm against the monotonic one: 0.5 ms in the second between two looks.
# Anything above that is a step that somebody made.
STEP_NS = 5_000_000


@dataclass(frozen=True)
class Clock:
    """Tells the time. `wall_ns` stamps readings, `mono_ns` keeps deadlines."""

    wall_ns: Callable[[], int] = time.time_ns
    mono_ns: Callable[[], int] = time.monotonic_ns
    sleep_s: Callable[[float], None] = time.sleep


SYSTEM = Clock()


@dataclass(frozen=True)
class ClockPair:
    """The same instant on both clocks."""

    wall_ns: int
    mono_ns: int

    @property
    def offset_ns(self) -> int:
        return self.wall_ns - self.mono_ns


def pair(clock: Clock = SYSTEM) -> ClockPair:
    """Read both clocks close together: the tightest of three tries, so preemption cannot fake a step."""
    best: ClockPair | None = None
    best_width_ns = 0
    for _ in range(3):
        before_ns = clock.mono_ns()
        wall_ns = clock.wall_ns()
        width_ns = clock.mono_ns() - before_ns
        if best is None or width_ns < best_width_ns:
            best, best_width_ns = ClockPair(wall_ns, before_ns + width_ns // 2), width_ns
    assert best is not None
    return best


def step_ns(earlier: ClockPair, later: ClockPair) -> int:
    """By how much the wall clock was set between two pairs; 0 when it only drifted."""
    moved_ns = later.offset_ns - earlier.offset_ns
    return moved_ns if abs(moved_ns) > STEP_NS else 0
