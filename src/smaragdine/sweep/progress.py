"""How far a sweep is, and how long it still takes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from smaragdine.accounting.student import t_quantile
from smaragdine.sweep.plan import Plan, Task
from smaragdine.sweep.table import Repetition

LEAST_REPETITIONS = 3  # before a setting's energy can be called known


@dataclass(frozen=True)
class Progress:
    done: int  # well or not
    total: int  # with those that early stopping may still spare
    failed: int
    left_s: float | None  # None: nothing is known of the time a repetition takes


def judged_j(rows: Sequence[Repetition]) -> list[float]:
    """The energies of one setting's repetitions that tell how well it is known: of their steps where all
    have them, for a long start, which no setting changes, makes whole programs look alike."""
    steps_j = [row.steps_energy_j for row in rows if row.steps_energy_j is not None]
    if len(steps_j) == len(rows):
        return steps_j
    return [row.energy_j for row in rows if row.energy_j is not None]


def relative_interval(energies_j: Sequence[float]) -> float | None:
    """Half the 95 % interval of the mean, as a part of it; None of fewer than three."""
    n = len(energies_j)
    mean_j = statistics.fmean(energies_j) if n else 0.0
    if n < LEAST_REPETITIONS or mean_j <= 0:
        return None
    return t_quantile(n - 1) * statistics.stdev(energies_j) / n**0.5 / mean_j


def expected_s(plan: Plan, tasks: Iterable[Task], took_s: Mapping[str, Sequence[float]]) -> float | None:
    """How long these take, one after another: as others of their setting did, else of their benchmark,
    else as the experiment file expects. `took_s` is by `Task.group`."""
    of_benchmark: dict[tuple[str, str], list[float]] = {}
    for task in plan.tasks:
        if task.repetition == 0 and task.group in took_s:
            mean_s = statistics.fmean(took_s[task.group])
            of_benchmark.setdefault((task.experiment, task.benchmark), []).append(mean_s)
    total_s = 0.0
    for task in tasks:
        known = of_benchmark.get((task.experiment, task.benchmark))
        said_s = plan.benchmark(task).expected_s
        if task.group in took_s:
            total_s += statistics.fmean(took_s[task.group])
        elif known:
            total_s += statistics.fmean(known)
        elif said_s is not None:
            total_s += said_s
        else:
            return None
    return total_s


def with_warm_up(plan: Plan, tasks: Sequence[Task]) -> list[Task]:
    """These and the runs before the first of each benchmark."""
    first = {(task.experiment, task.benchmark): task for task in reversed(tasks)}
    return [*tasks, *(task for task in first.values() for _ in range(plan.experiment(task).warm_up))]


def measured_s(rows: Iterable[tuple[Task, Repetition]]) -> dict[str, list[float]]:
    """Times of complete repetitions by setting."""
    found: dict[str, list[float]] = {}
    for task, row in rows:
        if row.status == "complete" and row.time_s is not None:
            found.setdefault(task.group, []).append(row.time_s)
    return found
