"""Chooses batch size and power limit together, by the cost of reaching a target (Zeus' energy-to-accuracy
cost).

    cost(b, l) = epochs(b) · (η·P̄(b, l) + (1−η)·P_max)·t(b, l)

P_max is the GPU's highest limit. A batch size's best limit does not depend on how many epochs it takes. So we
choose one after the other, and the pair is still the best of all pairs.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from smaragdine.allocate.profile import MeasuredEpoch, Training
from smaragdine.errors import UserError


@dataclass(frozen=True)
class BatchSize:
    """One batch size at one limit; cost, energy and time are of a whole training."""

    batch: int
    power_limit_w: float
    epoch_cost: float
    epoch_energy_j: float
    epoch_time_s: float
    epochs: tuple[float | None, ...]  # per run; None: it never reached the target

    @property
    def reaches(self) -> bool:
        """Whether every run reached the target."""
        return all(each is not None for each in self.epochs)

    @property
    def mean_epochs(self) -> float:
        return (
            statistics.fmean(each for each in self.epochs if each is not None) if self.reaches else math.inf
        )

    @property
    def cost(self) -> float:
        return self.mean_epochs * self.epoch_cost


def batch_sizes(
    epochs: Sequence[MeasuredEpoch],
    trainings: Sequence[Training],
    gpu: str,
    workload: str,
    target: float,
    eta: float = 0.5,
) -> list[BatchSize]:
    """Every batch size that both tables have, at its best limit, by rising batch."""
    measured: dict[int, list[MeasuredEpoch]] = defaultdict(list)
    for epoch in epochs:
        if (epoch.gpu, epoch.workload) == (gpu, workload):
            measured[epoch.batch].append(epoch)
    taken: dict[int, list[float | None]] = defaultdict(list)
    for training in trainings:
        if training.workload == workload and math.isclose(training.target, target):
            taken[training.batch].append(training.epochs)
    both = sorted(set(measured) & set(taken))
    if not both:
        raise UserError(
            f"{workload} on {gpu} to {target:g} cannot be looked at",
            "no batch size has both an epoch's power and epochs to that target",
        )
    highest_w = max(epoch.power_limit_w for each in measured.values() for epoch in each)
    found: list[BatchSize] = []
    for batch in both:
        best = min(measured[batch], key=lambda epoch: epoch_cost(epoch, eta, highest_w))
        found.append(
            BatchSize(
                batch,
                best.power_limit_w,
                epoch_cost(best, eta, highest_w),
                best.energy_j,
                best.time_s,
                tuple(taken[batch]),
            )
        )
    return found


def epoch_cost(epoch: MeasuredEpoch, eta: float, highest_w: float) -> float:
    return (eta * epoch.power_w + (1 - eta) * highest_w) * epoch.time_s


def best_batch_size(sizes: Sequence[BatchSize]) -> BatchSize:
    """The least expected cost of those that always reach the target."""
    best = min(sizes, key=lambda size: size.cost)
    if not best.reaches:
        raise UserError("no batch size always reaches the target", remedy="Choose an easier one")
    return best


# A bandit for a job that comes again and again: Thompson sampling with pruning, as in Zeus.
#
# It first tries batch sizes from the default downwards, then upwards, each way until one fails to reach the
# target (or costs more than β times the best so far: then it is stopped). Those that fail are pruned, and the
# rest is tried once more, beginning with the best. From then on each batch size's cost is a Gaussian of
# unknown mean, with a flat prior and the spread that was seen; it draws one cost from each posterior, and the
# lowest wins. A stopped job's cost is paid, and the job runs again.
#
# `replay` draws a run's epochs from the table, to compare the bandit with an oracle that knows the best batch
# size, and with the default batch size at the highest limit.

BETA = 2.0


@dataclass
class Bandit:
    """What is known so far. First `choose` a batch size, then `learn` what it cost."""

    batches: Sequence[int]
    default: int
    chance: np.random.Generator
    beta: float = BETA
    costs: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    best: float = math.inf
    _round: int = 0
    _queue: list[int] = field(default_factory=list[int])
    _kept: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        if self.default not in self.batches:
            raise UserError(f"the default batch size {self.default} is not among those measured")
        self._begin_round(sorted(self.batches))

    def _begin_round(self, among: list[int]) -> None:
        down = [batch for batch in among if batch <= self.default]
        up = [batch for batch in among if batch > self.default]
        self._queue = [*down[::-1], *up]
        self._kept = []

    @property
    def stop_at(self) -> float:
        """The cost at which a job is stopped."""
        return self.beta * self.best

    def choose(self) -> int:
        if self._queue:
            return self._queue[0]
        return min(sorted(self.costs), key=self._draw)

    def learn(self, batch: int, cost: float, reached: bool) -> None:
        if reached:
            self.costs.setdefault(batch, []).append(cost)
            self.best = min(self.best, cost)
        if not self._queue:
            if not reached:  # it would have cost at least that
                self.costs[batch].append(cost)
            return
        self._queue.pop(0)
        if reached:
            self._kept.append(batch)
        else:
            # Further from the default it only gets worse, so the rest of this direction is pruned.
            self._queue = [each for each in self._queue if (each < self.default) != (batch <= self.default)]
        if not self._queue:
            self._end_round()

    def _end_round(self) -> None:
        if not self._kept:  # nothing works: try the default again
            self._kept = [self.default]
        self.costs = {batch: costs for batch, costs in self.costs.items() if batch in self._kept}
        # A lucky run of something pruned must not stop all others.
        self.best = min((cost for costs in self.costs.values() for cost in costs), default=math.inf)
        self._round += 1
        if self._round < 2 or not self.costs:
            if self.costs:
                self.default = min(self.costs, key=lambda batch: statistics.fmean(self.costs[batch]))
            self._begin_round(sorted(self._kept))

    def _draw(self, batch: int) -> float:
        seen = self.costs[batch]
        spread = statistics.stdev(seen) if len(seen) > 1 else 0.1 * seen[0]
        return float(self.chance.normal(statistics.fmean(seen), spread / math.sqrt(len(seen))))


@dataclass(frozen=True)
class Replay:
    batches: list[int]  # the batch size with which each recurrence ended
    costs: list[float]  # the cost of each recurrence, stopped tries included
    oracle: float  # a recurrence's expected cost with the best batch size
    default: (
        float  # with the default batch size at the highest limit; infinite if that never reaches the target
    )

    @property
    def regret(self) -> list[float]:
        """The cumulative regret against the oracle."""
        return np.cumsum(np.array(self.costs) - self.oracle).tolist()


def replay(
    sizes: Sequence[BatchSize],
    default: BatchSize,
    recurrences: int,
    seed: int = 0,
    beta: float = BETA,
) -> Replay:
    """`default` is what would run without us: the default batch size at the highest limit."""
    chance = np.random.default_rng(seed)
    by_batch = {size.batch: size for size in sizes}
    bandit = Bandit([*by_batch], default.batch, chance, beta)
    ended: list[int] = []
    costs: list[float] = []
    for _ in range(recurrences):
        paid = 0.0
        for batch, cost, reached in _tries(bandit, by_batch, chance):
            paid += cost
            if reached:
                ended.append(batch)
        costs.append(paid)
    return Replay(ended, costs, best_batch_size(sizes).cost, default.cost)


def _tries(
    bandit: Bandit, sizes: dict[int, BatchSize], chance: np.random.Generator
) -> Iterator[tuple[int, float, bool]]:
    """One recurrence: tries batch sizes until one reaches the target."""
    for _ in range(100 * len(sizes)):
        size = sizes[bandit.choose()]
        epochs = size.epochs[int(chance.integers(len(size.epochs)))]
        cost = math.inf if epochs is None else epochs * size.epoch_cost
        reached = cost <= bandit.stop_at and math.isfinite(cost)
        if not reached and not math.isfinite(bandit.stop_at):
            # Nothing to compare with yet: give up a run that never gets there after the longest that did.
            longest = max((each for other in sizes.values() for each in other.epochs if each), default=1.0)
            cost = longest * size.epoch_cost
        cost = min(cost, bandit.stop_at)
        bandit.learn(size.batch, cost, reached)
        yield size.batch, cost, reached
        if reached:
            return
    raise UserError("no batch size reaches the target", remedy="Choose an easier one")
