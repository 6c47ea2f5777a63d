"""What changed between two programs, and which of it is more than noise.

With repeated runs the noise is their spread (Welch's interval); with one run on each side it is the spread
over steps or the uncertainties of the figures, whichever is wider. Bias common to all runs cancels in the
spread over runs, which is why repeating is better.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from smaragdine.accounting.arithmetic import average, over_devices, per_step
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.noise import Spread, deviation, half_width, half_width_runs, of_steps
from smaragdine.accounting.rows import column
from smaragdine.accounting.similarity import (
    Correlation,
    Key,
    Scores,
    mean_difference,
    scores,
    select,
    values,
)
from smaragdine.errors import UserError
from smaragdine.units import joules, plain

Verdict = Literal["more", "less", "inside the noise", "noise not known"]


@dataclass(frozen=True)
class Change:
    """The energy of one name, or of one device, on both sides; means over runs."""

    name: str
    phase: str | None
    a_j: float
    b_j: float
    a_std_j: float | None  # over runs; None of one
    b_std_j: float | None
    half_width_j: float | None  # of the 95 % interval of the difference

    @property
    def difference_j(self) -> float:
        return self.b_j - self.a_j

    @property
    def verdict(self) -> Verdict:
        if self.half_width_j is None:
            return "noise not known" if self.difference_j else "inside the noise"
        if abs(self.difference_j) <= self.half_width_j:
            return "inside the noise"
        return "more" if self.difference_j > 0 else "less"


@dataclass(frozen=True)
class Comparison:
    runs: tuple[int, int]
    devices: tuple[Change, ...]  # those on both sides
    total: Change  # over all devices, or the one asked for
    scores: Scores
    mean_difference_j: float | None
    mean_difference_w: float | None
    changes: tuple[Change, ...]  # by falling difference
    only_a: tuple[tuple[Key, float], ...]  # by falling energy
    only_b: tuple[tuple[Key, float], ...]
    verdict: str
    remarks: tuple[str, ...]


def compare(
    a: Sequence[Footprint], b: Sequence[Footprint], device: str | None = None, by_step: bool = False
) -> Comparison:
    """Runs of one program against runs of another; what one step of each costs, if `by_step`."""
    if not a or not b:
        raise UserError("nothing to compare with", remedy="Give at least one run on each side")
    if by_step:
        a, b = [per_step(run) for run in a], [per_step(run) for run in b]
    if len({total.per_step for run in [*a, *b] for total in run.devices.values()}) > 1:
        raise UserError(
            "one step cannot be compared with all that was traced",
            "some runs are of one step, others of several",
            "Use --per-step",
        )
    left_out = _not_everywhere([*a, *b])
    if device is None:
        # A sum over other devices would be no change of the program.
        a, b = ([_without(run, left_out) for run in side] for side in (a, b))
    narrow_a, narrow_b = ([_narrow(run, device) for run in side] for side in (a, b))
    mean_a, mean_b = average(a).mean, average(b).mean
    of_a, of_b = ([values(run, "energy") for run in side] for side in (narrow_a, narrow_b))
    keys_a, keys_b = ({key: None for run in side for key in run} for side in (of_a, of_b))
    noise = _noise_of_single_runs(narrow_a[0], narrow_b[0]) if len(a) == len(b) == 1 else {}
    changes = [
        _change(key, [run.get(key, 0.0) for run in of_a], [run.get(key, 0.0) for run in of_b], noise.get(key))
        for key in keys_a
        if key in keys_b
    ]
    changes.sort(key=lambda change: (-abs(change.difference_j), change.name, change.phase or ""))
    devices = [
        _device_change(a, b, name)
        for name in mean_a.devices
        if name in mean_b.devices and device in (None, name)
    ]
    total = _device_change(narrow_a, narrow_b, next(iter(narrow_a[0].devices), ""))
    return Comparison(
        runs=(len(a), len(b)),
        devices=tuple(devices),
        total=total,
        scores=scores(mean_a, mean_b, device),
        mean_difference_j=mean_difference(mean_a, mean_b, "energy", device),
        mean_difference_w=mean_difference(mean_a, mean_b, "power", device),
        changes=tuple(changes),
        only_a=_alone(keys_a, keys_b, of_a),
        only_b=_alone(keys_b, keys_a, of_b),
        verdict=_say(total, changes),
        remarks=_remarks(mean_a, mean_b, len(a), len(b), left_out if device is None else []),
    )


def to_json(comparison: Comparison, top: int | None = None) -> dict[str, Any]:
    """What `compare --json` prints; all names, unless `top` says how many."""

    def change(one: Change) -> dict[str, Any]:
        figures = dataclasses.asdict(one)
        return {**figures, "difference_j": one.difference_j, "verdict": one.verdict}

    def alone(names: Sequence[tuple[Key, float]]) -> list[dict[str, Any]]:
        return [{"name": name, "phase": phase, "energy_j": energy_j} for (name, phase), energy_j in names]

    of = comparison.scores
    return {
        "verdict": comparison.verdict,
        "runs": list(comparison.runs),
        "total": change(comparison.total),
        "devices": {one.name: change(one) for one in comparison.devices},
        "energy": _score(of.energy, of.time_alone_energy, comparison.mean_difference_j, "j"),
        "power": _score(of.power, of.time_alone_power, comparison.mean_difference_w, "w"),
        "changes": [change(one) for one in comparison.changes[:top]],
        "only_a": alone(comparison.only_a),
        "only_b": alone(comparison.only_b),
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


def _not_everywhere(runs: Sequence[Footprint]) -> list[str]:
    every = dict.fromkeys(name for run in runs for name in run.devices)
    left_out = [name for name in every if not all(name in run.devices for run in runs)]
    if len(left_out) == len(every):
        raise UserError(
            "the runs have no device in common", remedy="Compare runs of the same kind of machine"
        )
    return left_out


def _without(footprint: Footprint, devices: Sequence[str]) -> Footprint:
    if not devices:
        return footprint
    kept = [name not in devices for name in footprint.rows["device"].to_pylist()]
    rows = footprint.rows.filter(pa.array(kept, type=pa.bool_()))
    totals = {name: total for name, total in footprint.devices.items() if name not in devices}
    return dataclasses.replace(footprint, rows=rows, devices=totals)


def _narrow(footprint: Footprint, device: str | None) -> Footprint:
    return over_devices(footprint) if device is None else select(footprint, device)


def _change(key: Key, a_j: Sequence[float], b_j: Sequence[float], noise_j: float | None) -> Change:
    repeated_j = half_width_runs(a_j, b_j)
    return Change(
        name=key[0],
        phase=key[1],
        a_j=math.fsum(a_j) / len(a_j),
        b_j=math.fsum(b_j) / len(b_j),
        a_std_j=deviation(a_j) if len(a_j) > 1 else None,
        b_std_j=deviation(b_j) if len(b_j) > 1 else None,
        half_width_j=noise_j if repeated_j is None else repeated_j,
    )


def _device_change(a: Sequence[Footprint], b: Sequence[Footprint], device: str) -> Change:
    a_j, b_j = ([run.devices[device].total_j for run in side if device in run.devices] for side in (a, b))
    noise_j = None
    if len(a) == len(b) == 1:
        # Rows that spread over steps all in the same way spread the most: what a total can do at worst.
        spread_a, spread_b = (_spread_of_rows(run, device) for run in (a[0], b[0]))
        noise_j = half_width(spread_a, spread_b) if spread_a and spread_b else None
        # Steps say nothing about how long a device idled besides, nor do steps that are all the same.
        idle_j = [side[0].devices[device].idle_j for side in (a, b) if device in side[0].devices]
        if not noise_j or (len(idle_j) == 2 and abs(idle_j[0] - idle_j[1]) > noise_j):
            noise_j = None
    return _change((device, None), a_j or [0.0], b_j or [0.0], noise_j)


def _spread_of_rows(footprint: Footprint, device: str) -> Spread | None:
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
        widths = [half_width(spread_a, spread_b)] if spread_a and spread_b else []
        known = math.hypot(uncertainty_a, uncertainty_b)
        widths += [] if math.isnan(known) else [known]
        if widths:
            noise[key] = max(widths)
    return noise


def _row_noise(footprint: Footprint) -> dict[Key, tuple[float, Spread | None]]:
    """Of every name its uncertainty (nan: not known) and its spread over steps."""
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


def _say(total: Change, changes: Sequence[Change]) -> str:
    by = f"{joules(abs(total.difference_j))} ({abs(total.difference_j) / total.a_j:.1%})" if total.a_j else ""
    by = by or joules(abs(total.difference_j))
    if total.half_width_j is not None:
        by += f" ± {joules(total.half_width_j)}"
    if total.verdict == "inside the noise":
        said = f"the difference is inside the noise: {by}"
    elif total.verdict == "noise not known":
        side = "more" if total.difference_j > 0 else "less"
        said = f"B took {by} {side} than A, but how much runs differ by themselves is not known"
    else:
        said = f"B takes {by} {total.verdict} than A, beyond the noise"
    beyond = sum(change.verdict in ("more", "less") for change in changes)
    judged = sum(change.half_width_j is not None for change in changes)
    if judged:
        # One in twenty 95 % intervals misses: a long list has changes by chance alone.
        said += f"; {beyond} of {judged} names changed beyond theirs, where chance makes {plain(judged / 20)}"
    return said


def _remarks(
    a: Footprint, b: Footprint, runs_a: int, runs_b: int, left_out: Sequence[str]
) -> tuple[str, ...]:
    said: list[str] = []
    if runs_a == runs_b == 1:
        said.append("one run on each side does not show how runs differ: repeat, A1 A2 … --against B1 B2 …")
    elif min(runs_a, runs_b) == 1:
        said.append("the side of one run is taken to spread as the other does")
    if left_out:
        said.append(f"left out, because not every run has it: {', '.join(left_out)}")
    steps_a, steps_b = (max((t.steps for t in side.devices.values()), default=0) for side in (a, b))
    whole = not any(total.per_step for total in a.devices.values())  # and so of b's
    if steps_a != steps_b and whole:
        said.append(f"A has {steps_a} steps, B has {steps_b}: --per-step compares what one costs")
    for side, mean in (("A", a), ("B", b)):
        missing = [name for name, total in mean.devices.items() if total.missing_s > 0.01 * total.covered_s]
        if missing:
            said.append(f"{side}: more than 1 % of the time has no readings on {', '.join(missing)}")
        estimated = [name for name, total in mean.devices.items() if "estimated" in (total.provenance or "")]
        if estimated:
            verb = "is" if len(estimated) == 1 else "are"
            said.append(f"{side}: {', '.join(estimated)} {verb} estimated, not measured")
        said += [f"{side}: {remark}" for remark in mean.remarks]
    return tuple(said)
