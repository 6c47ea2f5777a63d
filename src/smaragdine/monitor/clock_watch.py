"""What happened to the clocks between two looks: the wall clock was set, or the machine was suspended.

The monotonic clock stands still while the machine sleeps, so that waking up looks like a wall clock that was
set forward; the boot clock goes on and tells the two apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from smaragdine.clock import STEP_NS, SYSTEM, Clock, ClockPair, pair, step_ns


@dataclass(frozen=True)
class Moved:
    """0 where nothing happened but drift."""

    step_ns: int = 0  # by how much the wall clock was set
    slept_ns: int = 0

    def words(self) -> dict[str, str]:
        """Name of a mark → its detail."""
        found: dict[str, str] = {}
        if self.slept_ns:
            found["suspended"] = f"the machine was suspended for {self.slept_ns / 1e9:.3f} s"
        if self.step_ns:
            found["clock_step"] = f"the wall clock was set by {self.step_ns / 1e6:+.1f} ms"
        return found


def boot_ns() -> int:
    """The monotonic clock with the time the machine was suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class ClockWatch:
    """`pair` is of the last look."""

    def __init__(self, clock: Clock = SYSTEM, boot_ns: Callable[[], int] = boot_ns) -> None:
        self._clock = clock
        self._boot = Clock(boot_ns, clock.mono_ns)
        self.pair = pair(clock)
        self._away_ns = pair(self._boot).offset_ns

    def look(self) -> Moved:
        now, away_ns = pair(self._clock), pair(self._boot).offset_ns
        slept_ns = away_ns - self._away_ns
        set_ns = step_ns(ClockPair(self.pair.wall_ns + slept_ns, self.pair.mono_ns), now)
        self.pair, self._away_ns = now, away_ns
        return Moved(set_ns, slept_ns if slept_ns > STEP_NS else 0)
