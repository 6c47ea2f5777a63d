"""Finds how precise a study is and what sampling costs, beside the paper's findings (§ 5.4)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.merge import merge_all
from smaragdine.accounting.precision import Experiment, Score, Stability, assw, stability
from smaragdine.accounting.similarity import Correlation, select
from smaragdine.errors import UserError
from smaragdine.study.claims import Claim, ClaimRule, JudgedClaim, Verdict
from smaragdine.study.folder import experiment_runs
from smaragdine.study.overhead import ExtraCost, Overhead, load_overhead
from smaragdine.study.results import Result, by_setting
from smaragdine.units import plain

# How alike the footprints of a study stay: ASSS, ASSW and stability over its runs.
#
# An experiment is a few runs of one setting that follow each other; the paper's has five. As in the paper,
# scores are those of summary footprints, on the device that does the work.

PAPERS_RUNS = 5  # runs of an experiment
PAPERS_EXPERIMENTS = 9
_WIDEST = 5  # most experiments for ASSW


@dataclass(frozen=True)
class Spread:
    """Mean and deviation over runs."""

    mean: float
    std: float | None  # None for a single run
    lowest: float
    runs: int


@dataclass(frozen=True)
class EveryNth:
    """Every n-th reading against all of them. None: there is no such correlation."""

    every: int
    energy: Spread | None
    power: Spread | None
    times_against_energy: Spread | None  # busy times of the thinned one against energies of the whole
    constant_power: Spread | None  # energies if all operations drew the same power; powers have no such score


@dataclass(frozen=True)
class Widened:
    """One experiment against the mean of so many that include it, over the experiments it may be."""

    experiments: int
    energy: Spread | None
    power: Spread | None
    constant_power: Spread | None


@dataclass(frozen=True)
class Precision:
    setting: str
    device: str
    provenance: str
    period_ms: float | None  # time between two readings
    size: int  # runs per experiment
    experiments: int
    asss: list[EveryNth]
    assw: list[Widened]  # empty: there is one experiment
    stability: Stability | None


def repeated(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Setting → its runs, the most repeated setting first, without runs that only show growth."""
    plain = [result for result in results if "scale" not in result.facts]
    found = by_setting(sorted(plain, key=lambda each: (each.setting, each.number)))

    def order(runs: list[Result]) -> tuple[int, bool]:
        # The paper's experiments are BERT's pre-training.
        kind = [runs[0].facts.get(name) for name in ("model", "stage")]
        return -len(runs), kind != ["bert", "pretrain"]

    return dict(sorted(found.items(), key=lambda item: order(item[1])))


def usual_size(runs: int) -> int:
    """The paper's five if that makes several experiments; else whatever makes nine."""
    if runs >= 2 * PAPERS_RUNS and runs % PAPERS_RUNS == 0:
        return PAPERS_RUNS
    return min(PAPERS_RUNS, max(1, runs // PAPERS_EXPERIMENTS))


def experiments_of(results: Sequence[Result], size: int | None = None) -> list[list[Result]]:
    """Consecutive runs of the most repeated setting, `size` at a time; the rest belongs to none."""
    runs = next(iter(repeated(results).values()), [])
    if size is None or len(runs) < 2 * size:  # the study has not come far, or was asked for differently
        size = usual_size(len(runs))
    return [runs[at : at + size] for at in range(0, len(runs) - size + 1, size)]


def precision_of(results: Sequence[Result], size: int | None = None) -> Precision:
    """Of the most repeated setting, without runs in which its working device was not measured."""
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
    """The device whose operations take the most energy, over the runs in which it was measured."""
    energy_j: dict[str, float] = {}
    for run in runs:
        for device, total in run.step.devices.items():
            energy_j[device] = energy_j.get(device, 0.0) + total.total_j - total.idle_j
    return max(energy_j, key=lambda device: energy_j[device])


def summaries(results: Sequence[Result], device: str) -> list[Footprint]:
    """One device, with self-similar layers merged: the paper's STEF and STPF."""
    return merge_all([select(result.step, device) for result in results])


def _thinned(runs: Sequence[Result], device: str) -> list[EveryNth]:
    known = [scores for run in runs if (scores := run.asss.get(device))]
    found: list[EveryNth] = []
    for every in sorted({int(score["every"] or 0) for scores in known for score in scores}):
        here = [score for scores in known for score in scores if score["every"] == every]
        # Short runs have no score if few readings are left; a mean over the others would mean something else.
        if sum(score["energy"] is not None for score in here) < len(known):
            continue
        names = ("energy", "power", "times_against_energy", "constant_power")
        found.append(EveryNth(every, *(_spread([score.get(name) for score in here]) for name in names)))
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
    """Every pair of experiments once."""
    cells = [matrix[a][b].value for a in range(len(matrix)) for b in range(a)]
    return [value for value in cells if value is not None]


__all__ = ["PRECISION_CLAIMS", "Precision", "experiments_of", "precision_findings", "precision_of"]


def _lowest(bound: float) -> ClaimRule:
    return ClaimRule(f"agrees if the lowest is {bound:.2f} at least", lambda values: min(values) >= bound)


def _overlaps(middle: float, half: float) -> ClaimRule:
    """Values are an interval's low and high end."""
    return ClaimRule(
        "agrees if the 95 % interval here and the paper's ± overlap",
        lambda values: values[0] <= middle + half and values[-1] >= middle - half,
    )


_SCALE = "1 is alike, Pearson"
# fmt: off
ASSS = Claim("asss", "precision",
    "How alike is the footprint with fewer readings (ASSS)?",
    "0.90–0.94, with periods longer than its 4 ms", 0.90, _SCALE, _lowest(0.90), "5.4.1")
ASSW = Claim("assw", "precision",
    "How alike is the footprint of 2 to 5 experiments (ASSW)?",
    "0.97–0.99", 0.97, _SCALE, _lowest(0.97), "5.4.1")
STABILITY = Claim("stability", "precision",
    "How alike are experiments?",
    "more than 0.7 for all pairs of nine", 0.7, _SCALE,
    ClaimRule("agrees if the lowest pair is above 0.7", lambda values: min(values) > 0.7), "5.4.2")
TIME_OVERHEAD = Claim("time-overhead", "precision",
    "How much longer does a step take while power is sampled?",
    "−0.052 ± 0.12 %", -0.052, "%", _overlaps(-0.052, 0.12), "5.4.3")
ENERGY_OVERHEAD = Claim("energy-overhead", "precision",
    "How much more energy does a step take while power is sampled?",
    "0.47 ± 1.10 %", 0.47, "%", _overlaps(0.47, 1.10), "5.4.3")
# fmt: on
PRECISION_CLAIMS = (ASSS, ASSW, STABILITY, TIME_OVERHEAD, ENERGY_OVERHEAD)
PAPERS_PERIOD_MS = 4.0
WIDEST = 2.0  # per cent: a wider interval says nothing about costs of a few tenths
TARGETS = {"asss": 0.90, "assw": 0.97, "stability": 0.9}  # our own targets, for energies


def precision_findings(
    results: Sequence[Result], out: Path | None = None, size: int | None = None
) -> list[JudgedClaim]:
    """For the most repeated setting of each framework and precision, and for the overhead that `out` has."""
    if size is None and out is not None:
        size = experiment_runs(out)
    most: dict[str, list[Result]] = {}
    for runs in repeated(results).values():
        most.setdefault(_suffix(runs[0]), runs)
    found: list[JudgedClaim] = []
    for runs in most.values():
        if len(runs) > 1:
            found += _similarities(runs, precision_of(runs, size))
    facts = {result.setting: result for result in results}
    for each in load_overhead(out) if out is not None else ():
        found += _overheads(each, facts.get(each.setting))
    return found


def _similarities(runs: Sequence[Result], precision: Precision) -> list[JudgedClaim]:
    thinned = [each for each in precision.asss if each.every > 1]
    matrix = precision.stability

    def values(kind: str, of_stability: str) -> dict[Claim, list[float]]:
        spreads: dict[Claim, list[Spread | None]] = {
            claim: [getattr(each, kind) for each in of]
            for claim, of in ((ASSS, thinned), (ASSW, precision.assw))
        }
        found = {claim: [each.mean for each in of if each] for claim, of in spreads.items()}
        return {**found, STABILITY: pairs_of(getattr(matrix, of_stability)) if matrix else []}

    of_power, flat = values("power", "power"), values("constant_power", "time_alone")
    suffix, settings = _suffix(runs[0]), (runs[0].setting,)
    estimated = precision.provenance != "measured"
    found: list[JudgedClaim] = []
    for claim, energies in values("energy", "energy").items():
        if not energies:
            continue
        here = [_range(energies), _over(claim, precision)]
        here += [f"constant power scores {_range(flat[claim])}"] if flat[claim] else []
        here += [precision.provenance] if estimated else []
        target = TARGETS[claim.name]
        why = [claim.rule.text, f"our own target, {target:.2f} at least, is {_kept(min(energies) >= target)}"]
        if estimated:
            power = f"power of {precision.device} is {precision.provenance}"
            why.append(f"{power}: this says little more than time")
        verdict: Verdict = "agrees" if claim.rule.agrees(energies) else "differs"
        found.append(_judged(claim, suffix, here, min(energies), verdict, why, settings))
        if of_power[claim]:
            found.append(_of_power(claim, of_power[claim], precision, suffix, settings))
    return found


def _of_power(
    claim: Claim, values: Sequence[float], precision: Precision, suffix: str, settings: tuple[str, ...]
) -> JudgedClaim:
    """The paper has no such score. If power is the same for all operations, nothing correlates with it."""
    above = "above" if min(values) > 0 else "not above"
    why = f"the paper compares energies only; {above} the score of constant power, which for powers is none"
    here = [_range(values), _over(claim, precision)]
    if precision.provenance != "measured":
        why = f"power of {precision.device} is {precision.provenance}, alike for all operations"
        here.append(precision.provenance)
    question = claim.question.replace("the footprint", "the power footprint")
    question = question.replace("are experiments", "are the powers of experiments")
    of_power = replace(
        claim, name=f"{claim.name}-power", question=question, there="not given", there_value=None
    )
    return _judged(of_power, suffix, here, min(values), "not comparable", [why], settings)


def _judged(
    claim: Claim,
    suffix: str,
    here: Sequence[str],
    here_value: float,
    verdict: Verdict,
    why: Sequence[str],
    settings: tuple[str, ...],
) -> JudgedClaim:
    return JudgedClaim(
        f"{claim.name}-{suffix}",
        claim.study,
        claim.question,
        "; ".join(here),
        claim.there,
        here_value,
        claim.there_value,
        verdict,
        "; ".join(why),
        settings,
    )


def _overheads(overhead: Overhead, run: Result | None) -> list[JudgedClaim]:
    suffix = _suffix(run) if run else overhead.setting
    blocks = f"{overhead.pairs} pairs of blocks of {overhead.block_s:.1f} s"
    time_remarks = [f"the recorder takes {100 * overhead.core_share:.1f} % of a core"]
    found = [_cost_finding(TIME_OVERHEAD, suffix, overhead, overhead.time, [blocks], time_remarks)]
    for device, cost in overhead.energy.items():
        about = [remark for remark in overhead.remarks if remark.startswith((device, cost.provenance))]
        here = [device, *(["estimated"] if cost.provenance != "measured" else [])]
        name = f"{device.replace(':', '').replace(' + ', '-')}-{suffix}"
        found.append(_cost_finding(ENERGY_OVERHEAD, name, overhead, cost, here, about))
    return found


def _cost_finding(
    claim: Claim,
    suffix: str,
    overhead: Overhead,
    cost: ExtraCost,
    about: Sequence[str],
    remarks: Sequence[str],
) -> JudgedClaim:
    low, middle, high = (100 * value for value in (cost.low, cost.middle, cost.high))
    verdict: Verdict = "agrees" if claim.rule.agrees([low, high]) else "differs"
    why = claim.rule.text
    if cost.provenance != "measured":
        verdict, why = "not comparable", f"{cost.provenance}: there is no counter to see a difference by"
    elif high - low > 2 * WIDEST:
        verdict = "not comparable"
        why = f"the interval is wider than ± {WIDEST:g} %: the machine was not quiet, or the pairs are few"
    here = f"{middle:+.2f} % ({low:+.2f} … {high:+.2f} %)".replace("-", "−")
    return _judged(claim, suffix, [here, *about], middle, verdict, [why, *remarks], (overhead.setting,))


def _suffix(run: Result) -> str:
    """As in other findings; for a user's own program, its setting."""
    facts = run.facts
    return f"{facts['framework']}-{facts['precision']}" if "framework" in facts else run.setting


def _over(claim: Claim, precision: Precision) -> str:
    if claim is ASSS:
        ns = [each.every for each in precision.asss if each.every > 1 and each.energy is not None]
        if not ns:
            return ""
        text = f"one reading in {ns[0]}{f' to one in {ns[-1]}' if len(ns) > 1 else ''} kept"
        if precision.period_ms is None:
            return text
        ends_ms = dict.fromkeys((ns[0] * precision.period_ms, ns[-1] * precision.period_ms))
        here = " to ".join(plain(each_ms, 3) for each_ms in ends_ms)
        times = " to ".join(plain(each_ms / PAPERS_PERIOD_MS, 3) for each_ms in ends_ms)
        return f"{text}: {here} ms between them, {times} times the paper's {PAPERS_PERIOD_MS:g} ms"
    each = f"of {precision.size} run{'s' if precision.size > 1 else ''}"
    if claim is ASSW:
        return f"experiments {each}, the mean of all {precision.experiments} in turn"
    return f"{precision.experiments} experiments {each}"


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.3f}" for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def _kept(kept: bool) -> str:
    return "kept" if kept else "missed"
