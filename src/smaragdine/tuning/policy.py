"""Decides which power limit to try next, and when to settle. It sees slices, and nothing else.

It tries limits from the highest down, because a slice at a low limit is slow, and stops once they get worse
beyond noise. Limits that may still beat the best by more than matters are tried again, in alternating order,
so that a slow change of the workload hits all of them alike. Then it settles, and further slices only tell
whether the workload is still the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from smaragdine.stats import t_quantile

# What some steps took at one power limit, and how sure that is.

Kind = Literal["energy", "edp", "cost"]


@dataclass(frozen=True)
class Slice:
    """Some steps at one limit, in blocks that are each long enough for the energy counter."""

    limit_w: float
    times_s: tuple[float, ...]  # per step, the mean of each block
    energies_j: tuple[float, ...]
    steps: int  # steps that ended meanwhile, dropped ones included
    span_s: float  # from the change of the limit to the slice's end


@dataclass(frozen=True)
class TuneObjective:
    """What to minimise, per step."""

    kind: Kind = "energy"
    eta: float = 0.5  # cost: eta × energy + (1 - eta) × highest power × time
    highest_w: float = 0.0  # over all devices
    slowdown: float | None = None  # at most so much slower than at the reference limit: 0.05

    def value(self, time_s: float, energy_j: float) -> float:
        if self.kind == "edp":
            return energy_j * time_s
        if self.kind == "cost":
            return self.eta * energy_j + (1 - self.eta) * self.highest_w * time_s
        return energy_j


@dataclass(frozen=True)
class Mean:
    """A mean with its standard error."""

    value: float
    error: float
    freedom: float  # of the error

    def half_width(self, confidence: float = 0.95) -> float:
        return t_quantile(self.freedom, confidence) * self.error


def mean_of(values: Sequence[float]) -> Mean:
    """Needs two independent values."""
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Mean(mean, math.sqrt(variance / count), count - 1)


def difference(a: Mean, b: Mean) -> Mean:
    """a − b, for means that may spread differently (Welch)."""
    freedom = welch_freedom((a.error, a.freedom), (b.error, b.freedom))
    return Mean(a.value - b.value, math.hypot(a.error, b.error), freedom)


def log_ratio(a: Mean, b: Mean) -> Mean:
    """ln(a / b), for means well above their errors."""
    errors = a.error / a.value, b.error / b.value
    freedom = welch_freedom((errors[0], a.freedom), (errors[1], b.freedom))
    return Mean(math.log(a.value / b.value), math.hypot(*errors), freedom)


def welch_freedom(*parts: tuple[float, float]) -> float:
    """Degrees of freedom of a sum of parts, each with its own standard error and degrees."""
    weight = math.fsum(error**4 / freedom for error, freedom in parts)
    whole = math.fsum(error**2 for error, _ in parts) ** 2
    # Without any spread, the degrees do not matter.
    return whole / weight if weight > 0 else math.fsum(freedom for _, freedom in parts)


class Seen:
    """All slices at one limit."""

    def __init__(self, limit_w: float, objective: TuneObjective, slices: Iterable[Slice] = ()) -> None:
        self.limit_w = limit_w
        self._objective = objective
        self.slices = tuple(slices)
        self.times_s = [time_s for each in self.slices for time_s in each.times_s]
        self.energies_j = [energy_j for each in self.slices for energy_j in each.energies_j]

    def with_slice(self, found: Slice) -> Seen:
        return Seen(self.limit_w, self._objective, (*self.slices, found))

    @cached_property
    def time_s(self) -> Mean:
        return mean_of(self.times_s)

    @cached_property
    def energy_j(self) -> Mean:
        return mean_of(self.energies_j)

    @cached_property
    def power_w(self) -> Mean:
        return mean_of([e / t for e, t in zip(self.energies_j, self.times_s, strict=True)])

    @cached_property
    def value(self) -> Mean:
        """The objective."""
        pairs = zip(self.times_s, self.energies_j, strict=True)
        return mean_of([self._objective.value(time_s, energy_j) for time_s, energy_j in pairs])

    @property
    def steps(self) -> int:
        return sum(each.steps for each in self.slices)

    @property
    def span_s(self) -> float:
        return math.fsum(each.span_s for each in self.slices)


# Has the workload changed? A two-sided CUSUM of step time and power at the settled limit.
#
# A CUSUM sees a sudden change within two slices, and a slow one in time. Testing each slice by itself would
# miss slow changes, or cry wolf once in twenty. One unit is the slice's own standard error and 2 % of the
# level together: changes below 1 % never count. With K = 0.5 and H = 8, such noise alone raises an alarm once
# in some 5,000 slices. A single slice counts for less than H, so one odd slice (a checkpoint, a neighbour) is
# no alarm.

ALLOWANCE = 0.5  # K
THRESHOLD = 8.0  # H
MOST_PER_SLICE = 6.0
FLOOR = 0.02


class Cusum:
    """One quantity against the level that it had."""

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
        """What has changed; empty if nothing has."""
        changed = [name for name, cusum in (("step time", self._time), ("power", self._power)) if cusum.alarm]
        return " and ".join(changed)


TOLERANCE = 0.01  # gains below this part are not worth another round
MOST_ROUNDS = 4
SURE = 0.99
CONTENDER = 0.95


@dataclass
class Search:
    """One time of trying limits, and how long it stayed settled afterwards."""

    why: str  # what had changed; empty for the first search
    seen: dict[float, Seen] = field(default_factory=dict[float, Seen])
    rounds: int = 1
    chosen_w: float | None = None  # None: not settled
    watched: int = 0  # slices since then
    settled_steps: int = 0
    settled_s: float = 0.0

    @property
    def tried_s(self) -> float:
        return sum(each.span_s for each in self.seen.values())


class Policy:
    """Set `limit_w`, and give each slice that was measured at it to `take`."""

    def __init__(
        self,
        limits_w: Sequence[float],
        reference_w: float,
        objective: TuneObjective | None = None,
        trying: float = 0.1,
    ) -> None:
        """`trying`: no search begins again while searches took more than this part of the time."""
        self.objective = objective or TuneObjective()
        self.reference_w = reference_w
        self.limits_w = sorted({*limits_w, reference_w}, reverse=True)
        self.searches: list[Search] = []
        self._trying = trying
        self._drift: Drift | None = None
        self._left: list[float] = []
        self.limit_w = reference_w
        self._begin("")

    @property
    def settled(self) -> bool:
        return self._drift is not None

    @property
    def search(self) -> Search:
        return self.searches[-1]

    def take(self, found: Slice) -> float:
        """Returns the limit to set next, which may be the same."""
        if found.limit_w != self.limit_w or len(found.times_s) < 2:
            return self.limit_w
        if self._drift is not None:
            self._watch(self._drift, found)
            return self.limit_w
        seen = self.search.seen
        at = seen.get(found.limit_w) or Seen(found.limit_w, self.objective)
        seen[found.limit_w] = at.with_slice(found)
        if self.search.rounds == 1 and self._past_the_best(seen[found.limit_w]):
            self._left.clear()
        if not self._left:
            self._next_round()
        if self._left:
            self.limit_w = self._left.pop(0)
        else:
            self._settle()
        return self.limit_w

    def finish(self, steps: int, span_s: float) -> None:
        """Takes what ran after the last slice, at the very end."""
        if self.settled:
            self.search.settled_steps += steps
            self.search.settled_s += span_s

    def best(self) -> Seen | None:
        """The best limit of the current search."""
        allowed = [each for each in self.search.seen.values() if self._slower(each) <= 0]
        return min(allowed, key=lambda each: each.value.value, default=None)

    def _begin(self, why: str) -> None:
        self.searches.append(Search(why))
        self._drift = None
        self._left = [limit_w for limit_w in self.limits_w if limit_w != self.reference_w]
        self.limit_w = self.reference_w

    def _settle(self) -> None:
        best = self.best()
        assert best is not None  # the reference is not slower than itself
        self.search.chosen_w = self.limit_w = best.limit_w
        self._drift = Drift(best)

    def _watch(self, drift: Drift, found: Slice) -> None:
        search = self.search
        search.watched += 1
        search.settled_steps += found.steps
        search.settled_s += found.span_s
        drift.take(Seen(found.limit_w, self.objective, [found]))
        tried_s = sum(each.tried_s for each in self.searches)
        whole_s = tried_s + sum(each.settled_s for each in self.searches)
        if drift.what and tried_s <= self._trying * whole_s:
            self._begin(f"{drift.what} changed")

    def _past_the_best(self, last: Seen) -> bool:
        """Whether limits below this one can only be worse."""
        best = self.best()
        if best is None or best.limit_w <= last.limit_w:
            return False
        if self._surely_too_slow(last):
            return True
        worse = difference(last.value, best.value)
        least = max(worse.half_width(2 * SURE - 1), TOLERANCE * best.value.value)
        return worse.value > least

    def _next_round(self) -> None:
        """Plans what to try again, and what noise has kept from being tried."""
        best = self.best()
        assert best is not None
        lowest_w = min(self.search.seen)
        if best.limit_w == lowest_w:
            self._left = [limit_w for limit_w in self.limits_w if limit_w < lowest_w][:1]
        if self._left or self.search.rounds == MOST_ROUNDS:
            return
        contenders = [each.limit_w for each in self.search.seen.values() if self._may_beat(each, best)]
        if contenders:
            self.search.rounds += 1
            again = {*contenders, best.limit_w}
            if self.objective.slowdown is not None:
                again.add(self.reference_w)
            self._left = sorted(again, reverse=self.search.rounds % 2 == 1)

    def _may_beat(self, other: Seen, best: Seen) -> bool:
        if other.limit_w == best.limit_w or self._surely_too_slow(other):
            return False
        worse = difference(other.value, best.value)
        return worse.value - worse.half_width(CONTENDER) < -TOLERANCE * best.value.value

    def _slower(self, at: Seen) -> float:
        """How much longer than allowed a step is, in seconds."""
        if self.objective.slowdown is None or at.limit_w == self.reference_w:
            return 0.0
        reference = self.search.seen[self.reference_w]
        return at.time_s.value - (1 + self.objective.slowdown) * reference.time_s.value

    def _surely_too_slow(self, at: Seen) -> bool:
        slower_s = self._slower(at)
        if slower_s <= 0:
            return False
        reference = self.search.seen[self.reference_w]
        return slower_s > difference(at.time_s, reference.time_s).half_width(2 * SURE - 1)
