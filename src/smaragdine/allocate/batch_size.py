"""Batch size and power limit together, by what it costs to reach a target (Zeus' energy-to-accuracy cost).

    cost(b, l) = epochs(b) · (η·P̄(b, l) + (1−η)·P_max)·t(b, l)

P_max is the GPU's highest limit. The best limit of a batch size does not depend on how many epochs it takes,
so the two are chosen one after the other, and the pair is still the best of all pairs.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from smaragdine.allocate.tables import Epoch, Training
from smaragdine.errors import UserError


@dataclass(frozen=True)
class BatchSize:
    """One batch size at one limit; costs, energy and time are of a whole training."""

    batch: int
    power_limit_w: float
    epoch_cost: float
    epoch_energy_j: float
    epoch_time_s: float
    epochs: tuple[float | None, ...]  # per run; None: the target was never reached

    @property
    def reaches(self) -> bool:
        """Whether every run got there."""
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
    epochs: Sequence[Epoch],
    trainings: Sequence[Training],
    gpu: str,
    workload: str,
    target: float,
    eta: float = 0.5,
) -> list[BatchSize]:
    """Every batch size that both tables have, at its best limit, by rising batch."""
    measured: dict[int, list[Epoch]] = defaultdict(list)
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


def epoch_cost(epoch: Epoch, eta: float, highest_w: float) -> float:
    return (eta * epoch.power_w + (1 - eta) * highest_w) * epoch.time_s


def best_batch_size(sizes: Sequence[BatchSize]) -> BatchSize:
    """The least expected cost among those that always reach the target."""
    best = min(sizes, key=lambda size: size.cost)
    if not best.reaches:
        raise UserError("no batch size always reaches the target", remedy="Choose an easier one")
    return best
