"""Puts many GPUs on one scale, a virtual standard device, so that a workload measured here is known there.

Without a limit, a workload takes a time and draws a power (its demand), which are products of what the
workload needs and what the GPU is:

    time(w, b, g) = work(w, b) · slowness(g),     demand(w, b, g) = appetite(w, b) · draw(g)

The standard device has a slowness and a draw of 1, the geometric means of all. What a limit does depends on
how far it is below the demand: x = limit ÷ demand gives the slowdown and the part of the demand that is left,
by curves that were seen on other workloads of the same GPU. One measured point of a workload on a GPU then
corrects what its product gets wrong.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from smaragdine.allocate.profile import MeasuredEpoch
from smaragdine.arrays import Floats
from smaragdine.errors import UserError

Job = tuple[str, int]  # workload and batch

_WIDTH = 0.08  # of the smoothing, in ln x; 25 W at 250 W are 0.1
_ENOUGH = 20  # points of a GPU's own curve; with fewer, use that of all GPUs
_UNLIMITED = 0.95  # of the limit: what draws less is not held back by it


@dataclass(frozen=True)
class Standard:
    """The scale, in logarithms of time and of power."""

    work: Mapping[Job, float]
    slowness: Mapping[str, float]
    appetite: Mapping[Job, float]
    draw: Mapping[str, float]
    highest_w: Mapping[str, float]  # the GPU's largest limit
    curves: Mapping[str, Floats]  # per GPU, rows of ln x, ln slowdown, ln part of the demand


@dataclass(frozen=True)
class Prediction:
    time_s: float
    power_w: float

    @property
    def energy_j(self) -> float:
        return self.time_s * self.power_w


@dataclass(frozen=True)
class Miss:
    """A prediction beside the measurement, for a workload that the scale had not seen on that GPU."""

    measured: MeasuredEpoch
    predicted: Prediction

    @property
    def time_error(self) -> float:
        return self.predicted.time_s / self.measured.time_s - 1

    @property
    def energy_error(self) -> float:
        return self.predicted.energy_j / self.measured.energy_j - 1


@dataclass(frozen=True)
class Choice:
    gpu: str
    power_limit_w: float
    prediction: Prediction
    cost: float


def standard_device(epochs: Sequence[MeasuredEpoch]) -> Standard:
    free = _unlimited(epochs)
    if not free:
        raise UserError("no measurements to make a scale of")
    work, slowness = _two_ways({key: math.log(epoch.time_s) for key, epoch in free.items()})
    appetite, draw = _two_ways({key: math.log(epoch.power_w) for key, epoch in free.items()})
    highest_w: dict[str, float] = defaultdict(float)
    curves: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for epoch in epochs:
        highest_w[epoch.gpu] = max(highest_w[epoch.gpu], epoch.power_limit_w)
        top = free[epoch.gpu, (epoch.workload, epoch.batch)]
        ratios = (
            epoch.power_limit_w / top.power_w,
            epoch.time_s / top.time_s,
            epoch.power_w / top.power_w,
        )
        curves[epoch.gpu].append((math.log(ratios[0]), math.log(ratios[1]), math.log(ratios[2])))
    tables = {gpu: np.array(rows) for gpu, rows in curves.items()}
    return Standard(work, slowness, appetite, draw, dict(highest_w), tables)


def predict(
    standard: Standard,
    gpu: str,
    workload: str,
    batch: int,
    power_limit_w: float,
    known: MeasuredEpoch | None = None,
) -> Prediction:
    """Predicts an epoch on a GPU. `known` is a measured one of the workload there, at any batch and limit."""
    time, power = _unlimited_logs(standard, gpu, workload, batch)
    if known is not None:
        known_time, known_power = _unlimited_logs(standard, gpu, workload, known.batch)
        # What the highest limit holds back shows its demand; below, the demand is at least what was drawn.
        unheld = known.power_limit_w >= standard.highest_w[gpu]
        unheld = unheld or known.power_w < _UNLIMITED * known.power_limit_w
        demand = math.log(known.power_w) if unheld else max(known_power, math.log(known.power_w))
        slowdown, _ = _limited(standard, gpu, math.log(known.power_limit_w) - demand)
        time += math.log(known.time_s) - slowdown - known_time
        power += demand - known_power
    power = min(power, math.log(standard.highest_w[gpu]))
    slowdown, left = _limited(standard, gpu, math.log(power_limit_w) - power)
    return Prediction(math.exp(time + slowdown), math.exp(power + left))


def best_platform(
    standard: Standard,
    workload: str,
    batch: int,
    limits_w: Mapping[str, Sequence[float]],
    known: Mapping[str, MeasuredEpoch] | None = None,
    cost: Callable[[Prediction], float] = lambda each: each.energy_j,
) -> list[Choice]:
    """Every GPU at its best limit, the best first."""
    found: list[Choice] = []
    for gpu, limits in limits_w.items():
        point = (known or {}).get(gpu)
        each = [(w, predict(standard, gpu, workload, batch, w, point)) for w in limits]
        limit_w, prediction = min(each, key=lambda pair: cost(pair[1]))
        found.append(Choice(gpu, limit_w, prediction, cost(prediction)))
    return sorted(found, key=lambda choice: choice.cost)


def leave_one_out(epochs: Sequence[MeasuredEpoch], one_point: bool = True) -> list[Miss]:
    """Takes each workload on each GPU out of the scale in turn, and predicts it from other GPUs, with one
    point of it known (its middle batch, at the highest limit) or none."""
    found: list[Miss] = []
    for gpu, workload in sorted({(epoch.gpu, epoch.workload) for epoch in epochs}):
        network = _network(workload)
        # The same workload with another optimizer would tell nearly all, so it is left out too.
        seen = [each for each in epochs if each.gpu != gpu or _network(each.workload) != network]
        hidden = [each for each in epochs if (each.gpu, each.workload) == (gpu, workload)]
        if not any(each.gpu == gpu for each in seen):
            continue
        scale = standard_device(seen)
        hidden = [each for each in hidden if (workload, each.batch) in scale.work]
        if not hidden:
            continue
        batches = sorted({each.batch for each in hidden})
        of_middle = [each for each in hidden if each.batch == batches[len(batches) // 2]]
        known = max(of_middle, key=lambda each: each.power_limit_w) if one_point else None
        for each in hidden:
            if each is not known:
                predicted = predict(scale, gpu, workload, each.batch, each.power_limit_w, known)
                found.append(Miss(each, predicted))
    return found


def _network(workload: str) -> str:
    return workload.rpartition("/")[0]


def _unlimited(epochs: Sequence[MeasuredEpoch]) -> dict[tuple[str, Job], MeasuredEpoch]:
    """Each job's epoch at the highest limit at which it was measured."""
    free: dict[tuple[str, Job], MeasuredEpoch] = {}
    for epoch in epochs:
        key = (epoch.gpu, (epoch.workload, epoch.batch))
        if key not in free or epoch.power_limit_w > free[key].power_limit_w:
            free[key] = epoch
    return free


def _two_ways(values: Mapping[tuple[str, Job], float]) -> tuple[dict[Job, float], dict[str, float]]:
    """value = job + GPU, by least squares; the GPUs' mean is 0."""
    gpus = sorted({gpu for gpu, _ in values})
    jobs = sorted({job for _, job in values})
    rows = np.zeros((len(values) + 1, len(jobs) + len(gpus)))
    right = np.zeros(len(values) + 1)
    for n, ((gpu, job), value) in enumerate(values.items()):
        rows[n, jobs.index(job)] = rows[n, len(jobs) + gpus.index(gpu)] = 1.0
        right[n] = value
    rows[-1, len(jobs) :] = 1.0
    found = np.linalg.lstsq(rows, right, rcond=None)[0].tolist()
    return dict(zip(jobs, found, strict=False)), dict(zip(gpus, found[len(jobs) :], strict=True))


def _unlimited_logs(standard: Standard, gpu: str, workload: str, batch: int) -> tuple[float, float]:
    job = (workload, batch)
    if gpu not in standard.slowness:
        raise UserError(f"{gpu} is not on the scale", remedy=f"There are: {', '.join(standard.slowness)}")
    if job not in standard.work:
        raise UserError(f"{workload} with batch {batch} is not on the scale", "no GPU was measured with it")
    return standard.work[job] + standard.slowness[gpu], standard.appetite[job] + standard.draw[gpu]


def _limited(standard: Standard, gpu: str, log_x: float) -> tuple[float, float]:
    """Slowdown and part of the demand at a limit, in logarithms: a local mean of what was seen."""
    seen = standard.curves.get(gpu, np.zeros((0, 3)))
    if len(seen) < _ENOUGH:
        seen = np.concatenate(list(standard.curves.values()))
    distance = (seen[:, 0] - log_x) / _WIDTH
    # Beyond all that was seen the nearest counts, and no weight is zero.
    weights = np.exp(-0.5 * (distance**2 - (distance**2).min()))
    return float(np.average(seen[:, 1], weights=weights)), float(np.average(seen[:, 2], weights=weights))
