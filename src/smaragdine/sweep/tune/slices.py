"""What some steps at one power limit took, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from smaragdine.accounting.student import t_quantile

Kind = Literal["energy", "edp", "cost"]


@dataclass(frozen=True)
class Slice:
    """Some steps at one limit. They are put together into blocks, each long enough for the energy counter."""

    limit_w: float
    times_s: tuple[float, ...]  # of a step, the mean of each block
    energies_j: tuple[float, ...]
    steps: int  # that ended meanwhile, with those that were dropped
    span_s: float  # from the change of the limit to the slice's end


@dataclass(frozen=True)
class Objective:
    """What is to be as low as possible, per step."""

    kind: Kind = "energy"
    eta: float = 0.5  # cost: eta × energy + (1 - eta) × highest power × time
    highest_w: float = 0.0  # of all devices together
    slowdown: float | None = None  # at most so much longer than at the reference limit: 0.05

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
    freedom: float  # degrees of freedom of the error

    def half_width(self, confidence: float = 0.95) -> float:
        return t_quantile(self.freedom, confidence) * self.error


def mean_of(values: Sequence[float]) -> Mean:
    """Of at least two independent values."""
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Mean(mean, math.sqrt(variance / count), count - 1)


def difference(a: Mean, b: Mean) -> Mean:
    """a − b, of means with spreads of their own (Welch)."""
    freedom = welch_freedom((a.error, a.freedom), (b.error, b.freedom))
    return Mean(a.value - b.value, math.hypot(a.error, b.error), freedom)


def log_ratio(a: Mean, b: Mean) -> Mean:
    """ln(a / b), of means well above their errors."""
    errors = a.error / a.value, b.error / b.value
    freedom = welch_freedom((errors[0], a.freedom), (errors[1], b.freedom))
    return Mean(math.log(a.value / b.value), math.hypot(*errors), freedom)


def welch_freedom(*parts: tuple[float, float]) -> float:
    """Degrees of freedom of a sum of parts, each with its standard error and its own degrees."""
    weight = math.fsum(error**4 / freedom for error, freedom in parts)
    whole = math.fsum(error**2 for error, _ in parts) ** 2
    # Without any spread the degrees do not matter.
    return whole / weight if weight > 0 else math.fsum(freedom for _, freedom in parts)


class Seen:
    """All slices at one limit."""

    def __init__(self, limit_w: float, objective: Objective, slices: Iterable[Slice] = ()) -> None:
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
        """Of the objective."""
        pairs = zip(self.times_s, self.energies_j, strict=True)
        return mean_of([self._objective.value(time_s, energy_j) for time_s, energy_j in pairs])

    @property
    def steps(self) -> int:
        return sum(each.steps for each in self.slices)

    @property
    def span_s(self) -> float:
        return math.fsum(each.span_s for each in self.slices)
