"""How alike the footprints of a study stay: ASSS, ASSW and stability over its runs.

An experiment is a few runs of one setting that follow each other; the paper's has five. Scores are those of
summary footprints, as the paper's are, on the device that does the work.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.merge import merge_all
from smaragdine.accounting.precision import Experiment, Score, Stability, assw, stability
from smaragdine.accounting.similarity import Correlation, select
from smaragdine.errors import UserError
from smaragdine.study.results import Result, by_setting

PAPERS_RUNS = 5  # of an experiment
PAPERS_EXPERIMENTS = 9
_WIDEST = 5  # experiments, of ASSW


@dataclass(frozen=True)
class Spread:
    """Over runs."""

    mean: float
    std: float | None  # of one run there is none
    lowest: float
    runs: int


@dataclass(frozen=True)
class Thinned:
    """Every n-th reading kept, against all. None: a correlation that there is none of."""

    every: int
    energy: Spread | None
    power: Spread | None
    times_against_energy: Spread | None  # busy times of the thinned one, against energies of the whole
    constant_power: Spread | None  # energies, had all operations the same power; of powers there is no score


@dataclass(frozen=True)
class Widened:
    """One experiment against the mean of so many, itself among them: over the experiments it may be."""

    experiments: int
    energy: Spread | None
    power: Spread | None
    constant_power: Spread | None


@dataclass(frozen=True)
class Precision:
    setting: str
    device: str
    provenance: str
    period_ms: float | None  # between two readings
    size: int  # runs of an experiment
    experiments: int
    asss: list[Thinned]
    assw: list[Widened]  # none: there is one experiment
    stability: Stability | None


def repeated(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Setting → its runs, the most repeated setting first. Runs that only show growth are none of it."""
    plain = [result for result in results if "scale" not in result.facts]
    found = by_setting(sorted(plain, key=lambda each: (each.setting, each.number)))

    def order(runs: list[Result]) -> tuple[int, bool]:
        # The paper's experiments are of BERT's pre-training.
        kind = [runs[0].facts.get(name) for name in ("model", "stage")]
        return -len(runs), kind != ["bert", "pretrain"]

    return dict(sorted(found.items(), key=lambda item: order(item[1])))


def usual_size(runs: int) -> int:
    """The paper's five, where that leaves several experiments; else what makes nine of them."""
    if runs >= 2 * PAPERS_RUNS and runs % PAPERS_RUNS == 0:
        return PAPERS_RUNS
    return min(PAPERS_RUNS, max(1, runs // PAPERS_EXPERIMENTS))


def experiments_of(results: Sequence[Result], size: int | None = None) -> list[list[Result]]:
    """Consecutive runs of the most repeated setting, `size` at a time; what is left over is of none."""
    runs = next(iter(repeated(results).values()), [])
    if size is None or len(runs) < 2 * size:  # the study has not come far, or was asked for otherwise
        size = usual_size(len(runs))
    return [runs[at : at + size] for at in range(0, len(runs) - size + 1, size)]


def precision_of(results: Sequence[Result], size: int | None = None) -> Precision:
    """Of the most repeated setting; runs in which its working device was not measured are left out."""
    runs = next(iter(repeated(results).values()), [])
    if not runs:
        raise UserError("the study has no runs to tell how precise they are", remedy="Run it first")
    device = _working_device(runs)
    runs = [run for run in runs if device in run.step.devices]
    experiments = experiments_of(runs, size)
    summary = dict(zip((run.name for run in runs), summaries(runs, device), strict=True))
    footprints = [[summary[run.name] for run in experiment] for experiment in experiments]
    return Precision(
        setting=runs[0].setting,
        device=device,
        provenance=runs[0].provenance.get(device, "not known"),
        period_ms=runs[0].period_ms.get(device),
        size=len(experiments[0]),
        experiments=len(experiments),
        asss=_thinned(runs, device),
        assw=_widened(in_turn(footprints, device)) if len(footprints) > 1 else [],
        stability=stability(footprints, device) if len(footprints) > 1 else None,
    )


def _working_device(runs: Sequence[Result]) -> str:
    """The device of which operations take the most energy, in whatever runs it was measured."""
    energy_j: dict[str, float] = {}
    for run in runs:
        for device, total in run.step.devices.items():
            energy_j[device] = energy_j.get(device, 0.0) + total.total_j - total.idle_j
    return max(energy_j, key=lambda device: energy_j[device])


def summaries(results: Sequence[Result], device: str) -> list[Footprint]:
    """Of one device, with self-similar layers merged: the paper's STEF and STPF."""
    return merge_all([select(result.step, device) for result in results])


def _thinned(runs: Sequence[Result], device: str) -> list[Thinned]:
    known = [scores for run in runs if (scores := run.asss.get(device))]
    found: list[Thinned] = []
    for every in sorted({int(score["every"] or 0) for scores in known for score in scores}):
        here = [score for scores in known for score in scores if score["every"] == every]
        # Short runs have no score where few readings are left: a mean over the others would be another's.
        if sum(score["energy"] is not None for score in here) < len(known):
            continue
        names = ("energy", "power", "times_against_energy", "constant_power")
        found.append(Thinned(every, *(_spread([score.get(name) for score in here]) for name in names)))
    return found


def in_turn(experiments: Sequence[Experiment], device: str) -> list[list[Score]]:
    """Each experiment against itself and those that follow it, two to five of them together."""
    turned = [[*experiments[n:], *experiments[:n]][:_WIDEST] for n in range(len(experiments))]
    return [assw(each, device).pooled for each in turned]


def _widened(turns: Sequence[Sequence[Score]]) -> list[Widened]:
    found: list[Widened] = []
    for scores in zip(*turns, strict=True):
        each = [score.scores for score in scores]
        kinds = (
            [one.energy.value for one in each],
            [one.power.value for one in each],
            [one.time_alone_energy.value for one in each],
        )
        found.append(Widened(scores[0].n, *map(_spread, kinds)))
    return found


def _spread(values: Sequence[float | int | None]) -> Spread | None:
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    std = statistics.stdev(known) if len(known) > 1 else None
    return Spread(statistics.fmean(known), std, min(known), len(known))


def pairs_of(matrix: Sequence[Sequence[Correlation]]) -> list[float]:
    """Every two experiments once."""
    cells = [matrix[a][b].value for a in range(len(matrix)) for b in range(a)]
    return [value for value in cells if value is not None]
