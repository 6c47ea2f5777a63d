"""Which limit next, and when it is settled: fed with slices, and with nothing else.

Limits are tried from the highest down, since a slice at a low limit is the slow one, and no further once it
gets worse beyond noise. Those that may still beat the best by more than it matters are tried again, in turned
order, so that a slow change of the workload falls on all alike. Then it is settled, and every further slice
only says whether the workload is still the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from smaragdine.sweep.tune.drift import Drift
from smaragdine.sweep.tune.slices import Objective, Seen, Slice, difference

TOLERANCE = 0.01  # a gain below this part is not worth another round
MOST_ROUNDS = 4
SURE = 0.99
CONTENDER = 0.95


@dataclass
class Search:
    """One time of trying limits, and the time it stayed settled after it."""

    why: str  # what had changed; empty at first
    seen: dict[float, Seen] = field(default_factory=dict[float, Seen])
    rounds: int = 1
    chosen_w: float | None = None  # None: it was not settled
    watched: int = 0  # slices since
    settled_steps: int = 0
    settled_s: float = 0.0

    @property
    def tried_s(self) -> float:
        return sum(each.span_s for each in self.seen.values())


class Policy:
    """`limit_w` is the one to set; `take` gets a slice made at it."""

    def __init__(
        self,
        limits_w: Sequence[float],
        reference_w: float,
        objective: Objective | None = None,
        trying: float = 0.1,
    ) -> None:
        """`trying`: no search begins by itself while more than this part of the time went into searches."""
        self.objective = objective or Objective()
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
        """The limit to set next, which may be the same."""
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
        """What ran after the last slice, at the end of it all."""
        if self.settled:
            self.search.settled_steps += steps
            self.search.settled_s += span_s

    def best(self) -> Seen | None:
        """Of the current search."""
        allowed = [each for each in self.search.seen.values() if self._slower(each) <= 0]
        return min(allowed, key=lambda each: each.value.value, default=None)

    def _begin(self, why: str) -> None:
        self.searches.append(Search(why))
        self._drift = None
        self._left = [limit_w for limit_w in self.limits_w if limit_w != self.reference_w]
        self.limit_w = self.reference_w

    def _settle(self) -> None:
        best = self.best()
        assert best is not None  # the reference is never slower than itself
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
        """Whether lower limits than this one can only be worse still."""
        best = self.best()
        if best is None or best.limit_w <= last.limit_w:
            return False
        if self._surely_too_slow(last):
            return True
        worse = difference(last.value, best.value)
        least = max(worse.half_width(2 * SURE - 1), TOLERANCE * best.value.value)
        return worse.value > least

    def _next_round(self) -> None:
        """Plan what to try again, and what noise had kept from being tried."""
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
        """By how much a step is longer than allowed, in seconds."""
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
