"""What came of it: the limits, what they save, what trying them cost. Plain numbers, for a file as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from smaragdine.sweep.tune.policy import Policy, Search
from smaragdine.sweep.tune.slices import Mean, Seen, log_ratio


@dataclass(frozen=True)
class Part:
    """A part of one with its 95 % interval: 0.12 [0.10, 0.14]."""

    part: float
    low: float
    high: float


@dataclass(frozen=True)
class Tried:
    """A step at one limit. Intervals are half-widths, 95 %."""

    limit_w: float
    slices: int
    steps: int
    time_s: float
    time_interval_s: float
    energy_j: float
    energy_interval_j: float
    power_w: float
    value: float  # of the objective
    value_interval: float


@dataclass(frozen=True)
class Searched:
    why: str
    chosen_w: float | None  # None: the program ended, or limits were lost, before it was settled
    rounds: int
    tried: tuple[Tried, ...]  # from the highest limit down
    saved: Part | None  # energy per step, against the limit before
    slower: Part | None  # time per step
    trying_s: float
    trying_extra_j: float | None  # what its steps used more than at the chosen limit; negative: less
    trying_extra_s: float | None
    settled_steps: int
    settled_s: float


@dataclass(frozen=True)
class Outcome:
    objective: dict[str, Any]
    devices: tuple[str, ...]
    reference_w: float
    limits_w: tuple[float, ...]
    searches: tuple[Searched, ...] = ()
    saved_j: float | None = None  # by all steps since tuning began, estimated from the slices
    problem: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def chosen_w(self) -> float | None:
        """The last limit it settled on."""
        return next((each.chosen_w for each in reversed(self.searches) if each.chosen_w is not None), None)


def outcome(
    policy: Policy, devices: tuple[str, ...], problem: str = "", notes: tuple[str, ...] = ()
) -> Outcome:
    searches = tuple(_searched(policy, search) for search in policy.searches if search.seen)
    saved = [_saved_j(policy, search) for search in policy.searches if policy.reference_w in search.seen]
    return Outcome(
        asdict(policy.objective),
        devices,
        policy.reference_w,
        tuple(policy.limits_w),
        searches,
        math.fsum(saved) if saved else None,
        problem,
        notes,
    )


def outcome_from(values: Any) -> Outcome:
    """As `asdict` and JSON left it."""
    import msgspec

    return msgspec.convert(values, Outcome)


def _searched(policy: Policy, search: Search) -> Searched:
    seen = search.seen
    chosen = seen[search.chosen_w] if search.chosen_w is not None else None
    reference = seen.get(policy.reference_w)
    saved = slower = extra_j = extra_s = None
    if chosen is not None:
        extra_j = _extra(seen, "energy_j", chosen.energy_j)
        extra_s = _extra(seen, "time_s", chosen.time_s)
        if reference is not None and reference is not chosen:
            saved = _saved(chosen.energy_j, reference.energy_j)
            slower = _slower(chosen.time_s, reference.time_s)
    tried = tuple(_tried(seen[limit_w]) for limit_w in sorted(seen, reverse=True))
    return Searched(
        search.why,
        search.chosen_w,
        search.rounds,
        tried,
        saved,
        slower,
        search.tried_s,
        extra_j,
        extra_s,
        search.settled_steps,
        search.settled_s,
    )


def _tried(seen: Seen) -> Tried:
    return Tried(
        seen.limit_w,
        len(seen.slices),
        seen.steps,
        seen.time_s.value,
        seen.time_s.half_width(),
        seen.energy_j.value,
        seen.energy_j.half_width(),
        seen.power_w.value,
        seen.value.value,
        seen.value.half_width(),
    )


def _extra(seen: dict[float, Seen], name: str, chosen: Mean) -> float:
    """Of all steps while limits were tried; those dropped while a limit settled count as the others do."""
    return math.fsum(each.steps * (getattr(each, name).value - chosen.value) for each in seen.values())


def _saved(chosen: Mean, reference: Mean) -> Part:
    ratio = log_ratio(chosen, reference)
    half = ratio.half_width()
    part, low, high = (1 - math.exp(ratio.value + by) for by in (0, half, -half))
    return Part(part, low, high)


def _slower(chosen: Mean, reference: Mean) -> Part:
    ratio = log_ratio(chosen, reference)
    half = ratio.half_width()
    part, low, high = (math.exp(ratio.value + by) - 1 for by in (0, -half, half))
    return Part(part, low, high)


def _saved_j(policy: Policy, search: Search) -> float:
    """Against the limit before: settled steps, and those of the slices, which may have cost more."""
    reference_j = search.seen[policy.reference_w].energy_j.value
    tried = [each.steps * (reference_j - each.energy_j.value) for each in search.seen.values()]
    if search.chosen_w is None:
        return math.fsum(tried)
    chosen_j = search.seen[search.chosen_w].energy_j.value
    return math.fsum([*tried, search.settled_steps * (reference_j - chosen_j)])
