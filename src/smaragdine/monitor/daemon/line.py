"""A running total as a function of time, in whole numbers so that shares of it never add up to more.

Energy is counted in µJ, the unit of RAPL's counters, and CPU time in ns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import numpy as np

from smaragdine.monitor.daemon.batch import Times, Values
from smaragdine.sensors.base import Channel
from smaragdine.sensors.energy import can_be, growth, stretches

_KEEP_NS = 5_000_000_000
_CARRY_NS = 2_500_000_000
_MOST_WAITING = 100


def _no_numbers() -> list[int]:
    return []


@dataclass
class Line:
    """Grows by what is added; between two points it is straight."""

    total: int = 0
    holes: int = 0  # times of which nothing is known, so far
    since_ns: int | None = None  # the first point after the last of them; None: it goes on
    t_ns: list[int] = field(default_factory=_no_numbers)
    at_t: list[int] = field(default_factory=_no_numbers)

    def add(self, t_ns: int, amount: int) -> None:
        """Grow until `t_ns`. A clock that was set back begins a new stretch."""
        self.total += max(amount, 0)
        if self.t_ns and t_ns <= self.t_ns[-1]:
            if t_ns == self.t_ns[-1]:
                self.at_t[-1] = self.total
                return
            del self.t_ns[:], self.at_t[:]
            self.since_ns = None
        if self.since_ns is None:
            self.since_ns = t_ns
        self.t_ns.append(t_ns)
        self.at_t.append(self.total)

    def break_off(self) -> None:
        """Nothing is known from now until the next point."""
        self.holes += 1
        self.since_ns = None

    def at(self, t_ns: int) -> int:
        """The total at a time; before the first point kept and after the last it stands still."""
        after = bisect_right(self.t_ns, t_ns)
        if after == 0:
            return self.at_t[0] if self.at_t else self.total
        if after == len(self.t_ns):
            return self.total
        begin_ns, end_ns = self.t_ns[after - 1], self.t_ns[after]
        begin, end = self.at_t[after - 1], self.at_t[after]
        return begin + (end - begin) * (t_ns - begin_ns) // (end_ns - begin_ns)

    def carried_to(self, t_ns: int) -> int:
        """As `at`; what is not read yet is taken to go on as in the last stretch, for a short while."""
        late_ns = t_ns - self.last_ns
        if len(self.t_ns) < 2 or not 0 < late_ns <= _CARRY_NS:
            return self.at(t_ns)
        length_ns = self.t_ns[-1] - self.t_ns[-2]
        return self.total + (self.at_t[-1] - self.at_t[-2]) * late_ns // length_ns

    @property
    def last_ns(self) -> int:
        return self.t_ns[-1] if self.t_ns else 0

    def forget_before(self, t_ns: int) -> None:
        keep = max(bisect_left(self.t_ns, min(t_ns, self.last_ns - _KEEP_NS)) - 1, 0)
        if keep > 256:
            del self.t_ns[:keep], self.at_t[:keep]


@dataclass
class Counter:
    """A counter's readings onto a line: by differences, over its wrapping round, but never across a gap."""

    line: Line
    wraps_at: int | None = None
    joules: float | None = None  # of one count; null: it counts something else
    last: int | None = None
    last_ns: int = 0

    def add(self, t_ns: Times, counts: list[int]) -> None:
        if not counts:
            return
        first = (counts[0], int(t_ns[0])) if self.last is None else (self.last, self.last_ns)
        total = np.array([first[0], *counts], dtype=np.int64)
        since_ns = np.diff(np.concatenate([np.array([first[1]], dtype=np.int64), t_ns]))
        grown, known = growth(total, since_ns, self.wraps_at, self.joules)
        for now_ns, amount in zip(t_ns.tolist(), np.where(known, grown, 0).tolist(), strict=True):
            self.line.add(now_ns, amount)
        self.last, self.last_ns = counts[-1], int(t_ns[-1])

    def break_off(self) -> None:
        """Nothing is known from now until the next reading."""
        self.last = None
        self.line.break_off()


@dataclass
class Samples:
    """Powers onto a line, each for the time it stands for.

    Where a counter counts the same device, it says how high the line is and the samples say what came since.
    A line that was too high waits for the counter instead of falling.
    """

    line: Line
    channel: Channel
    counter: Counter | None = None
    last: tuple[int, float] | None = None
    level: int | None = None  # how much higher the line is than the counter's own
    owed: int = 0
    paid: Line = field(default_factory=Line)
    waiting: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    rest_nj: int = 0

    def add(self, t_ns: Times, power_w: Values) -> None:
        known = can_be(power_w)
        t_ns, power_w = t_ns[known], power_w[known]
        # A clock that was set back begins anew.
        back = np.flatnonzero(np.diff(t_ns) < 0) + 1
        for times_ns, watts in zip(np.split(t_ns, back), np.split(power_w, back), strict=True):
            if not times_ns.size:
                continue
            before = self.last if self.last is not None and self.last[0] <= times_ns[0] else None
            for start_ns, end_ns, power in zip(
                *(column.tolist() for column in stretches(self.channel, times_ns, watts, before)), strict=True
            ):
                if start_ns < self.line.last_ns < end_ns:
                    start_ns = self.line.last_ns  # its window reaches over what was seen before a break
                elif start_ns > self.line.last_ns:
                    self.line.add(start_ns, 0)
                # W × ns are nJ. Rounded as they add up, not one by one.
                self._grow(end_ns, round(power * (end_ns - start_ns)))
                self._settle()
            if before is None or before[0] < times_ns[-1]:
                first = int(np.searchsorted(times_ns, times_ns[-1]))  # of those with this stamp
                self.last = (int(times_ns[first]), float(watts[first]))

    def add_counter(self, t_ns: Times, counts: list[int]) -> None:
        """The counter's readings. They come at once and samples a second later: each waits for those."""
        assert self.counter is not None
        for i, now_ns in enumerate(t_ns.tolist()):
            if self.counter.last is None:
                self.level = None
            self.counter.add(t_ns[i : i + 1], counts[i : i + 1])
            self.waiting.append((now_ns, self.counter.line.total))
            del self.waiting[:-_MOST_WAITING]
        self._settle()

    def break_off(self) -> None:
        """Nothing is known from now on, until there are new readings of both."""
        self.last, self.level = None, None
        self.line.break_off()
        self.waiting.clear()
        if self.counter is not None:
            self.counter.break_off()

    def _grow(self, t_ns: int, amount_nj: int) -> None:
        self.rest_nj += amount_nj
        amount, self.rest_nj = divmod(self.rest_nj, 1000)
        paid = min(self.owed, amount)
        self.owed -= paid
        self.line.add(t_ns, amount - paid)
        self.paid.add(t_ns, paid)

    def _settle(self) -> None:
        while self.waiting and self.waiting[0][0] <= self.line.last_ns:
            t_ns, counted = self.waiting.pop(0)
            if self.level is None:
                self.level = self.line.at(t_ns) - counted
                continue
            paid_since = self.paid.total - self.paid.at(t_ns)
            too_high = self.line.at(t_ns) - (self.level + counted) - paid_since
            self.owed = max(too_high, 0)
            if too_high < 0:
                self.line.add(self.line.last_ns, -too_high)
