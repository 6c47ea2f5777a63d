"""Compares two programs: what changed between their runs, and which of it is more than noise.

Only repeated runs show how much runs differ by themselves (Welch's interval). With one run on each side we
only know how large noise is at least: from how its steps vary and how uncertain its figures are. A difference
beyond that may be a change, or just another run: the verdict is `unknown`.

Runs differ mostly as a whole: on a warmer card, or beside a busier processor, every name takes a percent
more. With three runs on each side, that alone hides a layer that takes a tenth more. So each name is judged
twice: as it is, and beside its company, relative to its run's level, the weighted median of the names'
ratios. Its noise is the lesser of the two: its own spread over runs, or what all names have in common plus
its spread around that.

Three runs say little about how far one name spreads around that level. But names of one program that take
about as much energy spread alike, and all of them together say more: the moderated t of Smyth (2004), an
inverse-χ² prior of relative variances around a line over energy, fitted to all names of a side. Names also
err together, which no such prior sees; so it never counts for more than the runs themselves.

Many names are judged at once. So intervals are wide enough that of twenty comparisons of equal programs no
more than one claims anything. The sum is over the operations compared; idle time is judged by itself.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from smaragdine.accounting.arithmetic import adding_devices, average, over_devices, per_step
from smaragdine.accounting.footprint import Footprint, column, only
from smaragdine.accounting.similarity import (
    Beside,
    Correlation,
    Key,
    Scores,
    beside_company,
    mean_difference,
    scores,
    select,
    values,
)
from smaragdine.errors import UserError
from smaragdine.stats import (
    StandardError,
    chance_for_each,
    deviation,
    difference,
    half_width,
    of_difference,
    of_steps,
    probability,
)
from smaragdine.units import joules

Verdict = Literal["more", "less", "inside the noise", "unknown"]
GONE, NEW = "gone", "new"  # verdicts on names that only one side has
# How many comparisons of equal programs may claim a change by chance: one in twenty, split in three.
OF_SUMS, OF_NAMES, OF_NAMES_BESIDE = 0.02, 0.01, 0.02
FOREIGN = 0.1  # of a machine's CPU time: less than that does not disturb a program
_AT_LEAST = "± at least"
_REPEAT = "repeat them, smaragdine compare A1 A2 A3 --against B1 B2 B3"


@dataclass(frozen=True)
class Change:
    """The energy of one name or one device on both sides, as means over runs."""

    name: str
    phase: str | None
    a_j: float
    b_j: float
    a_std_j: float | None  # over runs; None with a single run
    b_std_j: float | None
    half_width_j: float | None  # of the difference: noise alone may make as much; None: not known
    repeated: bool = False  # the half-width comes from repeated runs; else noise is at least that

    @property
    def difference_j(self) -> float:
        return self.b_j - self.a_j

    @property
    def verdict(self) -> Verdict:
        if self.difference_j == 0 or (
            self.half_width_j is not None and abs(self.difference_j) <= self.half_width_j
        ):
            return "inside the noise"
        if self.half_width_j is None or not self.repeated:
            return "unknown"
        return "more" if self.difference_j > 0 else "less"


@dataclass(frozen=True)
class Comparison:
    runs: tuple[int, int]
    by_step: bool  # figures are per step
    what: str  # in words: energy of which operations, of how much of the run
    devices: tuple[Change, ...]  # devices on both sides; operations only
    total: Change  # operations of all devices, or of the one asked for: the sum of all names
    idle: Change  # the same devices while no operation ran
    unshared: tuple[Change, ...]  # devices without operations, such as memory: all that they took
    scores: Scores
    mean_difference_j: float | None
    mean_difference_w: float | None
    changes: tuple[Change, ...]  # largest difference first
    only_a: tuple[tuple[Key, float], ...]  # gone, most energy first
    only_b: tuple[tuple[Key, float], ...]  # new
    foreign: tuple[float | None, float | None]  # the part of CPU time that others used; None: not known
    verdict: str
    remarks: tuple[str, ...]

    @property
    def noise(self) -> str:
        """The title of half-widths. One run against one only shows how large noise is at least."""
        return "±" if max(self.runs) > 1 else _AT_LEAST


@dataclass(frozen=True)
class _Pair:
    """One figure over all runs, and what is known of its noise."""

    key: Key
    a_j: Sequence[float]
    b_j: Sequence[float]
    spread: StandardError | None  # of the difference, over runs
    beside: Beside | None = None  # the same, judged beside its company
    least_j: float | None = None  # with single runs: noise is at least this

    @property
    def difference_j(self) -> float:
        return math.fsum(self.b_j) / len(self.b_j) - math.fsum(self.a_j) / len(self.a_j)

    @property
    def own_j(self) -> float:
        """How far the difference goes beyond that of its company; 0 if it does not."""
        return 0.0 if self.beside is None else max(abs(self.difference_j) - abs(self.beside.common_j), 0.0)


def compare(
    a: Sequence[Footprint],
    b: Sequence[Footprint],
    device: str | None = None,
    by_step: bool | None = None,
    untraced: Collection[str] = (),
) -> Comparison:
    """Compares runs of one program with runs of another.

    `by_step` compares what one step costs, otherwise all that was traced. None: one step if all have steps,
    because to trace more steps does not change a program. `untraced`: devices whose step is an untraced one.
    """
    if not a or not b:
        raise UserError("nothing to compare with", remedy="Give at least one run on each side")
    if by_step is None:
        by_step = all(_steps(run) or _is_per_step(run) for run in [*a, *b])
    if by_step:
        a, b = [per_step(run) for run in a], [per_step(run) for run in b]
    if len({total.per_step for run in [*a, *b] for total in run.devices.values()}) > 1:
        raise UserError(
            "one step cannot be compared with all that was traced",
            "some runs are of one step, others of several",
            "Use --per-step",
        )
    given = len(a), len(b)
    a, b = _each_once(a), _each_once(b)
    left_out = _not_everywhere([*a, *b])
    if device is None:
        # Devices that not all runs have would look like a change of the program.
        a, b = (
            [only(run, [name for name in run.devices if name not in left_out]) for run in side]
            for side in (a, b)
        )
    narrow_a, narrow_b = ([_narrow(run, device) for run in side] for side in (a, b))
    mean_a, mean_b = average(a).mean, average(b).mean
    of_a, of_b = ([values(run, "energy") for run in side] for side in (narrow_a, narrow_b))
    keys_a, keys_b = ({key: None for run in side for key in run} for side in (of_a, of_b))
    noise = _noise_of_single_runs(narrow_a[0], narrow_b[0]) if len(a) == len(b) == 1 else {}
    doubt = _doubt([_foreign(run) for run in a], [_foreign(run) for run in b])

    def pair(key: Key, a_j: Sequence[float], b_j: Sequence[float], least_j: float | None = None) -> _Pair:
        return _Pair(key, a_j, b_j, _known_spread(a_j, b_j), least_j=least_j)

    names = _beside_company(
        [
            pair(
                key, [run.get(key, 0.0) for run in of_a], [run.get(key, 0.0) for run in of_b], noise.get(key)
            )
            for key in keys_a
            if key in keys_b
        ]
    )
    together = next(iter(narrow_a[0].devices), "")
    worked = {name for run in [*a, *b] for name in run.rows["device"].unique().to_pylist()}
    # Memory has energy, but no operations of its own to compare.
    common = [name for name in mean_a.devices if name in mean_b.devices and name in worked]
    each = common if device is None and len(common) > 1 else []  # a single device is the sum itself
    adding = adding_devices(mean_a) if device is None else [device]
    unshared = [name for name in adding if name not in worked] if device is None else []
    sums = [
        pair((together, None), *_sums(narrow_a, narrow_b, together)),
        pair(("(idle)", None), *_idle(a, b, [name for name in adding if name not in unshared])),
        *(pair((name, None), *_idle(a, b, [name])) for name in unshared),
        *(pair((name, None), *_sums(a, b, name)) for name in each),
    ]
    changes = _judged(names, doubt is not None, OF_NAMES, OF_NAMES_BESIDE, by_energy=True)
    changes.sort(key=lambda change: (-abs(change.difference_j), change.name, change.phase or ""))
    total, idle, *others = _judged(sums, doubt is not None, OF_SUMS)
    devices = others[len(unshared) :]
    only_a, only_b = _alone(keys_a, keys_b, of_a), _alone(keys_b, keys_a, of_b)
    if not devices:
        devices = [dataclasses.replace(total, name=device or next(iter(common), together))]
    foreign = _mean_foreign(a), _mean_foreign(b)
    return Comparison(
        runs=(len(a), len(b)),
        by_step=by_step,
        what=_what([device] if device else common, by_step, untraced, _steps(mean_a), _steps(mean_b)),
        devices=tuple(devices),
        total=total,
        idle=idle,
        unshared=tuple(others[: len(unshared)]),
        scores=scores(mean_a, mean_b, device),
        mean_difference_j=mean_difference(mean_a, mean_b, "energy", device),
        mean_difference_w=mean_difference(mean_a, mean_b, "power", device),
        changes=tuple(changes),
        only_a=only_a,
        only_b=only_b,
        foreign=foreign,
        verdict=_say(total, changes, len(only_a), len(only_b), doubt),
        remarks=(
            *_same_runs(given, a, b),
            *_remarks(mean_a, mean_b, foreign, len(a), len(b), left_out if device is None else []),
        ),
    )


def to_json(comparison: Comparison, top: int | None = None) -> dict[str, Any]:
    """What `compare --json` prints; all names, unless `top` says how many."""

    def change(one: Change) -> dict[str, Any]:
        figures = dataclasses.asdict(one)
        return {**figures, "difference_j": one.difference_j, "verdict": one.verdict}

    def alone(names: Sequence[tuple[Key, float]], verdict: str) -> list[dict[str, Any]]:
        return [
            {"name": name, "phase": phase, "energy_j": energy_j, "verdict": verdict}
            for (name, phase), energy_j in names
        ]

    of = comparison.scores
    return {
        "verdict": comparison.verdict,
        "runs": list(comparison.runs),
        "by_step": comparison.by_step,
        "what": comparison.what,
        "noise": comparison.noise,
        "foreign_load": dict(zip("ab", comparison.foreign, strict=True)),
        "total": change(comparison.total),
        "idle": change(comparison.idle),
        "unshared": {one.name: change(one) for one in comparison.unshared},
        "devices": {one.name: change(one) for one in comparison.devices},
        "energy": _score(of.energy, of.time_alone_energy, comparison.mean_difference_j, "j"),
        "power": _score(of.power, of.time_alone_power, comparison.mean_difference_w, "w"),
        "changes": [change(one) for one in comparison.changes[:top]],
        "only_a": alone(comparison.only_a, GONE),
        "only_b": alone(comparison.only_b, NEW),
        "remarks": list(comparison.remarks),
    }


def _score(score: Correlation, time: Correlation, difference: float | None, unit: str) -> dict[str, Any]:
    return {
        "correlation": score.value,
        "reason": score.reason,
        "time_alone": time.value,
        "time_alone_reason": time.reason,
        f"mean_difference_{unit}": difference,
        "common": score.common,
    }


def _figures_of(footprint: Footprint) -> tuple[Hashable, ...]:
    """Figures of which no two runs agree in every digit."""
    rows = zip(
        *(footprint.rows[name].to_pylist() for name in ("device", "name", "phase", "energy_j")), strict=True
    )
    return (*rows, *((name, total.total_j, total.idle_j) for name, total in footprint.devices.items()))


def _each_once(runs: Sequence[Footprint]) -> list[Footprint]:
    """Drops runs that are named twice or copied: they are no repetitions, and would make noise look small."""
    return list({_figures_of(run): run for run in runs}.values())


def _same_runs(given: tuple[int, int], a: Sequence[Footprint], b: Sequence[Footprint]) -> list[str]:
    said = [
        f"{side}: {count} runs were given, {count - len(runs)} of them more than once: copies do not count"
        for side, count, runs in zip("AB", given, (a, b), strict=True)
        if len(runs) < count
    ]
    both = len({_figures_of(run) for run in a} & {_figures_of(run) for run in b})
    if both:
        which = "a run is" if both == 1 else f"{both} runs are"
        said.append(f"{which} on both sides, and a run does not differ from itself")
    return said


def _not_everywhere(runs: Sequence[Footprint]) -> list[str]:
    every = dict.fromkeys(name for run in runs for name in run.devices)
    left_out = [name for name in every if not all(name in run.devices for run in runs)]
    if len(left_out) == len(every):
        raise UserError(
            "the runs have no device in common", remedy="Compare runs of the same kind of machine"
        )
    return left_out


def _narrow(footprint: Footprint, device: str | None) -> Footprint:
    return over_devices(footprint) if device is None else select(footprint, device)


def _steps(footprint: Footprint) -> int:
    return max((total.steps for total in footprint.devices.values()), default=0)


def _is_per_step(footprint: Footprint) -> bool:
    return any(total.per_step for total in footprint.devices.values())


def _known_spread(a_j: Sequence[float], b_j: Sequence[float]) -> StandardError | None:
    """None for runs that agree in every digit: copies of one say nothing about noise."""
    spread = of_difference(a_j, b_j)
    if spread is None or spread.error <= 1e-12 * max(map(abs, [*a_j, *b_j])):
        return None
    return spread


def _beside_company(pairs: list[_Pair]) -> list[_Pair]:
    """Adds what the other names say about each; copies of one run say nothing."""
    known = [pair for pair in pairs if pair.spread is not None]
    if not known:
        return pairs
    a_j, b_j = (np.array(side).T for side in ([pair.a_j for pair in known], [pair.b_j for pair in known]))
    beside = {pair.key: each for pair, each in zip(known, beside_company(a_j, b_j), strict=True)}
    return [dataclasses.replace(pair, beside=beside.get(pair.key)) for pair in pairs]


def _judged(
    pairs: Sequence[_Pair],
    doubted: bool,
    false_part: float,
    false_beside: float = 0.0,
    by_energy: bool = False,
) -> list[Change]:
    """Gives each an interval as wide as it must be if so many are judged; none if the sides are in doubt."""
    beside = [(pair, pair.own_j, pair.beside.spread) for pair in pairs if pair.beside is not None]
    chance_beside = _chances(beside, false_beside, by_energy)
    tried = [(pair, pair.difference_j, pair.spread) for pair in pairs if pair.spread is not None]
    chance = _chances(tried, false_part if beside else false_part + false_beside, by_energy)
    found: list[Change] = []
    for pair in pairs:
        repeated = pair.spread is not None and not doubted
        width_j = None if doubted else pair.least_j
        if pair.spread is not None and not doubted:
            width_j = half_width(pair.spread, chance[pair.key])
            if pair.beside is not None:
                own_j = half_width(pair.beside.spread, chance_beside[pair.key])
                width_j = min(width_j, abs(pair.beside.common_j) + own_j)
        found.append(
            Change(
                name=pair.key[0],
                phase=pair.key[1],
                a_j=math.fsum(pair.a_j) / len(pair.a_j),
                b_j=math.fsum(pair.b_j) / len(pair.b_j),
                a_std_j=deviation(pair.a_j) if len(pair.a_j) > 1 else None,
                b_std_j=deviation(pair.b_j) if len(pair.b_j) > 1 else None,
                half_width_j=width_j,
                repeated=repeated,
            )
        )
    return found


def _chances(
    tried: Sequence[tuple[_Pair, float, StandardError]], false_part: float, by_energy: bool
) -> dict[Key, float]:
    """How sure each verdict must be. The more energy a name takes on both sides together, the more of the
    allowed chance it gets: that sum does not depend on whether it changed."""
    weights = [
        math.fsum(pair.a_j) / len(pair.a_j) + math.fsum(pair.b_j) / len(pair.b_j) for pair, *_ in tried
    ]
    probabilities = [probability(difference_j, spread) for _, difference_j, spread in tried]
    chances = chance_for_each(probabilities, false_part, weights if by_energy else None)
    return {pair.key: chance for (pair, *_), chance in zip(tried, chances, strict=True)}


def _sums(
    a: Sequence[Footprint], b: Sequence[Footprint], device: str
) -> tuple[list[float], list[float], float | None]:
    """The operations of a device in every run; with single runs also what noise is at least."""
    a_j, b_j = ([_operations_j(run, device) for run in side] for side in (a, b))
    if len(a) > 1 or len(b) > 1:
        return a_j, b_j, None
    # If all rows vary with the steps in the same way, their sum varies the most: the worst case.
    spread_a, spread_b = (_spread_of_rows(run, device) for run in (a[0], b[0]))
    # Steps that are all alike say nothing about noise.
    return a_j, b_j, (half_width(difference(spread_a, spread_b)) or None) if spread_a and spread_b else None


def _operations_j(footprint: Footprint, device: str) -> float:
    return math.fsum(footprint.device_rows(device)["energy_j"].to_pylist())


def _idle(
    a: Sequence[Footprint], b: Sequence[Footprint], devices: Sequence[str]
) -> tuple[list[float], list[float]]:
    of_a, of_b = (
        [math.fsum(run.devices[name].idle_j for name in devices if name in run.devices) for run in side]
        for side in (a, b)
    )
    return of_a, of_b


def _foreign(footprint: Footprint) -> float | None:
    return max((one.foreign for one in footprint.devices.values() if one.foreign is not None), default=None)


def _mean_foreign(side: Sequence[Footprint]) -> float | None:
    known = [load for load in map(_foreign, side) if load is not None]
    return statistics.fmean(known) if known else None


def _doubt(a: Sequence[float | None], b: Sequence[float | None]) -> str | None:
    """Why the sides cannot be compared: other programs ran beside only one of them.

    A program that shares its processor is slower, and is charged less of its power. If other load varies from
    run to run, it is part of the spread; if it sets the two sides apart, it is not.
    """
    of_a, of_b = ([load for load in side if load is not None] for side in (a, b))
    if not of_a or not of_b:
        return None
    apart = statistics.fmean(of_b) - statistics.fmean(of_a)
    spread = of_difference(of_a, of_b)
    if abs(apart) <= max(FOREIGN, 0.0 if spread is None else half_width(spread)):
        return None
    return (
        f"other programs used {statistics.fmean(of_b):.0%} of the processor beside B, "
        f"{statistics.fmean(of_a):.0%} beside A"
    )


def _spread_of_rows(footprint: Footprint, device: str) -> StandardError | None:
    rows = footprint.device_rows(device)
    if device not in footprint.devices or not rows.num_rows:
        return None
    energy_j, mean_j, std_j = (
        float(column(rows, name).sum()) for name in ("energy_j", "step_mean_j", "step_std_j")
    )
    return of_steps(energy_j, mean_j, std_j, footprint.devices[device].steps)


def _noise_of_single_runs(a: Footprint, b: Footprint) -> dict[Key, float]:
    of_a, of_b = _row_noise(a), _row_noise(b)
    noise: dict[Key, float] = {}
    for key in of_a.keys() & of_b.keys():
        (uncertainty_a, spread_a), (uncertainty_b, spread_b) = of_a[key], of_b[key]
        widths = [half_width(difference(spread_a, spread_b))] if spread_a and spread_b else []
        known = math.hypot(uncertainty_a, uncertainty_b)
        widths += [] if math.isnan(known) else [known]
        if widths:
            noise[key] = max(widths)
    return noise


def _row_noise(footprint: Footprint) -> dict[Key, tuple[float, StandardError | None]]:
    """For every name its uncertainty (nan: not known), and its spread over steps."""
    rows = footprint.rows
    steps = max((total.steps for total in footprint.devices.values()), default=0)
    keys = zip(rows["name"].to_pylist(), rows["phase"].to_pylist(), strict=True)
    names = ("uncertainty_j", "energy_j", "step_mean_j", "step_std_j")
    figures = zip(*(column(rows, name).tolist() for name in names), strict=True)
    return {
        key: (u, of_steps(e, mean, std, steps)) for key, (u, e, mean, std) in zip(keys, figures, strict=True)
    }


def _alone(
    keys: Mapping[Key, None], others: Mapping[Key, None], runs: Sequence[Mapping[Key, float]]
) -> tuple[tuple[Key, float], ...]:
    found = [(key, statistics.fmean(run.get(key, 0.0) for run in runs)) for key in keys if key not in others]
    return tuple(sorted(found, key=lambda item: (-item[1], item[0][0], item[0][1] or "")))


def _say(total: Change, changes: Sequence[Change], gone: int, new: int, doubt: str | None) -> str:
    by = f"{joules(abs(total.difference_j))} ({abs(total.difference_j) / total.a_j:.1%})" if total.a_j else ""
    by = by or joules(abs(total.difference_j))
    if total.half_width_j is not None:
        by += f" {'±' if total.repeated else _AT_LEAST} {joules(total.half_width_j)}"
    side = "more" if total.difference_j > 0 else "less"
    if total.verdict == "inside the noise":
        said = f"the difference is inside the noise: {by}"
    elif total.verdict == "unknown":
        why = doubt or "how much runs differ by themselves is not known"
        said = f"unknown: B took {by} {side} than A, but {why}"
    else:
        said = f"B takes {by} {total.verdict} than A, beyond the noise"
    judged = [change for change in changes if change.repeated]
    names: list[str] = []
    if judged:
        beyond = sum(change.verdict in ("more", "less") for change in judged)
        names.append(f"{beyond or 'none'} of {len(judged)} names changed by more than their own noise")
    names += [f"{_names(count)} {verdict}" for count, verdict in ((gone, GONE), (new, NEW)) if count]
    return f"{said}; {', '.join(names)}" if names else said


def _what(
    devices: Sequence[str], by_step: bool, untraced: Collection[str], steps_a: int, steps_b: int
) -> str:
    if by_step:
        traced = [device for device in devices if device not in untraced]
        if len(traced) == len(devices):
            return "energy of the operations of one traced step"
        of = f"; on {', '.join(traced)}, of one traced step" if traced else ""
        return f"energy of the operations of one step{of}"
    if not steps_a and not steps_b:
        return "energy of all operations that were traced"
    return (
        f"energy of the operations of the traced steps ({steps_a} in A, {steps_b} in B), not of the whole run"
    )


def _names(count: int) -> str:
    return f"{count} name{'' if count == 1 else 's'}"


def _remarks(
    a: Footprint,
    b: Footprint,
    foreign: tuple[float | None, float | None],
    runs_a: int,
    runs_b: int,
    left_out: Sequence[str],
) -> tuple[str, ...]:
    said: list[str] = []
    if runs_a == runs_b == 1:
        said.append(f"one run on each side does not show how runs differ: {_REPEAT}")
    elif min(runs_a, runs_b) == 1:
        said.append("the side with one run is taken to vary as much as the other")
    for side, load in zip("AB", foreign, strict=True):
        if load is not None and load > FOREIGN:
            said.append(f"{side}: other programs used {load:.0%} of the processor meanwhile")
    if left_out:
        said.append(f"left out, because not every run has it: {', '.join(left_out)}")
    steps_a, steps_b = _steps(a), _steps(b)
    if steps_a != steps_b and not _is_per_step(a):
        said.append(f"A has {steps_a} steps, B has {steps_b}: --per-step compares what one costs")
    for side, mean in (("A", a), ("B", b)):
        missing = [name for name, total in mean.devices.items() if total.missing_s > 0.01 * total.covered_s]
        if missing:
            said.append(
                f"{side}: what was used of {', '.join(missing)} is not known for more than 1 % of the time"
            )
        estimated = [name for name, total in mean.devices.items() if "estimated" in (total.provenance or "")]
        if estimated:
            verb = "is" if len(estimated) == 1 else "are"
            said.append(f"{side}: {', '.join(estimated)} {verb} estimated, not measured")
        said += [f"{side}: {remark}" for remark in mean.remarks]
    return tuple(said)
