"""Draws `layers`, `stages`, `phases`, `top_energy` and `top_power`: bars of energy and power."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from smaragdine.accounting.arithmetic import adding_devices, average, scale
from smaragdine.accounting.diagram import Node, diagram, walk
from smaragdine.accounting.footprint import Footprint, column, only
from smaragdine.accounting.merge import renaming
from smaragdine.accounting.repeats import repeating
from smaragdine.accounting.run import Run, phases_j
from smaragdine.arrays import Floats
from smaragdine.report.figures import style
from smaragdine.report.figures.runs import (
    LabelledRun,
    NotDrawn,
    by_folder,
    footprint_notes,
    one_setting,
    working_device,
)
from smaragdine.report.figures.style import styled
from smaragdine.stats import deviation
from smaragdine.units import joules, plus_minus, si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@styled
def layers(
    runs: Sequence[Sequence[Node]],
    of: str,
    device: str,
    std_j: Mapping[str, float] | None = None,
    spread_over: str = "",
    notes: Sequence[str] = (),
) -> Figure:
    """The same layers of one run or more; `std_j` is each layer's spread, if it is not that over runs."""
    first = runs[0]
    if len(runs) > 1:
        each_j = {node.path: [_of(run, node.path) for run in runs] for node in first}
        std_j = {path: deviation(values) for path, values in each_j.items()}
        spread_over = f"{len(runs)} runs"
    wide = len(first) > 26
    figure, (axes,) = style.sheet(height_mm=56, wide_mm=style.PAGE_MM if wide else style.COLUMN_MM)
    phases = style.ordered_phases(phase for node in first for phase in node.by_phase)
    highest_j = 0.0
    for at, node in enumerate(first):
        bottom_j = 0.0
        for phase in phases:
            mean_j = math.fsum(_phase_j(_find(run, node.path), phase) for run in runs) / len(runs)
            axes.bar(at, mean_j, 0.74, bottom_j, color=style.colour_of_phase(phase))
            bottom_j += mean_j
        spread_j = (std_j or {}).get(node.path, math.nan)
        if math.isfinite(spread_j):
            axes.errorbar(at, bottom_j, spread_j, color=style.INK, capsize=1.8, lw=0.8, capthick=0.8)
        highest_j = max(highest_j, bottom_j + (spread_j if math.isfinite(spread_j) else 0.0))
    numbers = ["".join(re.findall(r"\d+", node.name)[-1:]) for node in first]
    every = max(1, -(-len(first) // (26 if not wide else 50)))
    axes.set_xticks(range(0, len(first), every), numbers[::every])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.7, len(first) - 0.3)
    axes.set_ylim(0, highest_j * 1.06)
    axes.grid(axis="y")
    family = re.sub(r"\d+", "*", first[0].path.rpartition("/")[2])
    above = first[0].path.rpartition("/")[0]
    whole = f"{above}/{family}" if above else family
    axes.set_xlabel(style.shortened(f"Layer * of {whole}", 68))
    style.quantity(axes.yaxis, f"Energy of {of} on {device}", "J", highest_j)
    style.phase_legend(axes, phases)
    said = [f"whiskers: standard deviation over {spread_over}" if spread_over else "spread not known", *notes]
    means_j = {node.name: math.fsum(_of(run, node.path) for run in runs) / len(runs) for node in first}
    text = f"{whole}: " + ", ".join(f"{name} {joules(mean_j)}" for name, mean_j in means_j.items())
    return style.describe(figure, "Energy by layer and phase", text, said)


def layers_of_runs(runs: Sequence[LabelledRun]) -> Figure:
    one_setting(runs)
    footprints = [run.footprint for run in runs]
    device = working_device(footprints)
    ordered = family_of(footprints, device, runs[0].label)
    paths = [node.path for node in ordered[0]]
    total = runs[0].footprint.devices[device]
    std_j, over = (
        (_over_steps(runs[0], paths, device), f"{total.steps} steps") if len(runs) == 1 else ({}, "")
    )
    of = "a step" if total.per_step else "what was traced"
    notes = footprint_notes([only(run.footprint, [device]) for run in runs])
    return layers(ordered, of, device, std_j, over if std_j else "", notes)


def family_of(footprints: Sequence[Footprint], device: str, label: str) -> list[list[Node]]:
    """The layers that repeat in the first footprint, as each has them; `label` names it in errors."""
    roots = [diagram(only(footprint, [device])) for footprint in footprints]
    paths = {node.path: n for n, node in enumerate(repeating(roots[0]))}
    if not paths:
        raise NotDrawn(f"no layers of {label} repeat three times or more")
    found = [[node for node in walk(root) if node.path in paths] for root in roots]
    return [sorted(nodes, key=lambda node: paths[node.path]) for nodes in found]


def _over_steps(run: LabelledRun, paths: Sequence[str], device: str) -> dict[str, float]:
    """The standard deviation over steps of each layer's energy, at the level of the footprint."""
    names = {
        name: path
        for name in run.footprint.rows["name"].unique().to_pylist()
        for path in paths
        if name == path or name.startswith(path + "/")
    }
    rows = run.run.accounted_as(names, by_phase=False).device_rows(device).to_pylist()
    return {
        row["name"]: row["step_std_j"] / row["step_mean_j"] * row["energy_j"]
        for row in rows
        if row["name"] in paths and row["step_std_j"] is not None and row["step_mean_j"]
    }


def _find(run: Sequence[Node], path: str) -> Node | None:
    return next((node for node in run if node.path == path), None)


def _of(run: Sequence[Node], path: str) -> float:
    node = _find(run, path)
    return node.energy_j if node is not None else 0.0


def _phase_j(node: Node | None, phase: str) -> float:
    if node is None:
        return 0.0
    return math.fsum(value for known, value in node.by_phase.items() if style.named_phase(known) == phase)


# `stages`: what each stage took in total, forward and backward stacked (the paper's figure 1).

IDLE = "idle"
_THIN = 0.002


@styled
def stages(runs: Mapping[str, Sequence[Footprint]], of: str = "a step", more: Sequence[str] = ()) -> Figure:
    """Stage → the footprints of its runs; `of` says what a footprint covers, `more` adds notes."""
    figure, (axes,) = style.sheet(height_mm=62)
    parts = {stage: [phase_energies_j(one) for one in each] for stage, each in runs.items()}
    phases = style.ordered_phases(phase for each in parts.values() for one in each for phase in one)
    totals = {stage: [math.fsum(one.values()) for one in each] for stage, each in parts.items()}
    wide = 0.62 if len(parts) > 2 else 0.25 * len(parts)
    spread = any(len(each) > 1 for each in totals.values())
    highest = 0.0
    for at, (stage, each) in enumerate(parts.items()):
        bottom_j = 0.0
        for phase in phases:
            mean_j = math.fsum(one.get(phase, 0.0) for one in each) / len(each)
            axes.bar(at, mean_j, wide, bottom_j, color=style.colour_of_phase(phase))
            bottom_j += mean_j
        total_j = math.fsum(totals[stage]) / len(each)
        std_j = deviation(totals[stage]) if len(each) > 1 else 0.0
        if len(each) > 1:
            axes.errorbar(at, total_j, std_j, color=style.INK, capsize=3, lw=0.8, capthick=0.8)
        highest = max(highest, total_j + std_j)
        said = plus_minus(total_j, std_j, "J") if len(each) > 1 else joules(total_j)
        axes.annotate(said, (at, total_j + std_j), (0, 2.5), textcoords="offset points", ha="center")
    room_mm = 68 / len(parts) - 1
    names, key = style.distinct(parts, room_mm)
    axes.set_xticks(range(len(parts)), names)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(parts) - 0.4)
    axes.set_ylim(0, highest * 1.08)
    axes.grid(axis="y")
    style.quantity(axes.yaxis, f"Energy of {of}", "J", highest)
    style.phase_legend(axes, worth_saying(one for each in parts.values() for one in each))
    counts = {len(each) for each in runs.values()}
    said = f"{min(counts)}–{max(counts)}" if len(counts) > 1 else f"{counts.pop()}"
    whiskers = f"whiskers: standard deviation over {said} runs" if spread else "one run each: no whiskers"
    text = "; ".join(f"{s}: {joules(math.fsum(t) / len(t))}" for s, t in totals.items())
    notes = [whiskers, *more, *key, *footprint_notes([one for each in runs.values() for one in each])]
    return style.describe(figure, f"Energy of {of} by stage and phase", text, notes)


def stages_of_runs(runs: Sequence[LabelledRun]) -> Figure:
    """All announced steps as if each were the mean one, if every run knows its untraced step; else one step,
    traced or not."""
    groups = by_folder(runs)
    counts = [_untraced_steps(run.run) for run in runs]
    if all(counts):
        whole = {id(run): scale(run.footprint, count) for run, count in zip(runs, counts, strict=True)}
        each_run = {stage: [whole[id(run)] for run in each] for stage, each in groups.items()}
        return stages(each_run, "all steps", ["steps × the mean of untraced ones"])
    of = "a step" if all(run.run.step is not None for run in runs) else "what was traced"
    return stages({stage: [run.footprint for run in each] for stage, each in groups.items()}, of)


def _untraced_steps(run: Run) -> int:
    """How many steps there were, if one of them is known untraced on every device; else 0."""
    if run.steps is None or run.step is None:
        return 0
    known = all(device in run.untraced for device in adding_devices(run.step))
    return run.steps.count if known else 0


def phase_energies_j(footprint: Footprint) -> dict[str, float]:
    """Phase → energy over the devices that add up, idle included; the sum is the total."""
    devices = adding_devices(footprint)
    idle_j = math.fsum(footprint.devices[device].idle_j for device in devices)
    return {**phases_j(footprint, devices), IDLE: idle_j}


def worth_saying(parts: Iterable[Mapping[str, float]]) -> set[str]:
    """Phases that one can see: the legend has no room for what is thinner than a line."""
    return {
        phase for part in parts for phase, value in part.items() if value > _THIN * math.fsum(part.values())
    }


# `phases`: each device's energy by phase, and idle.


@styled
def phases(runs: Sequence[Footprint]) -> Figure:
    """The mean over runs per device; the whisker at a part's end is the spread of that part alone."""
    mean = average(runs).mean
    devices = [device for device in adding_devices(mean) if mean.devices[device].total_j > 0]
    devices.sort(key=lambda device: (not device.startswith("gpu"), device))
    if not devices:
        raise NotDrawn("no device has any energy")
    figure, (axes,) = style.sheet(height_mm=26 + 7 * len(devices))
    found = [{device: _shares(one, device) for device in devices if device in one.devices} for one in runs]
    every = style.ordered_phases(phase for one in found for shares in one.values() for phase in shares)
    for at, device in enumerate(devices):
        left = 0.0
        for phase in every:
            shares = [one[device].get(phase, 0.0) for one in found if device in one]
            share = math.fsum(shares) / len(shares)
            colour = style.colour_of_phase(phase)
            axes.barh(at, share, 0.62, left, color=colour)
            text = f"{share:.0%}"
            if share * 55 > style.width_mm(text) + 1:
                axes.text(left + share / 2, at, text, ha="center", va="center", color=style.ink_on(colour))
            left += share
            if len(shares) > 1 and 0 < left < 0.9999:
                off = deviation(shares)
                axes.errorbar(left, at, xerr=off, color=style.INK, lw=0.8, capsize=1.5, capthick=0.8)
        axes.text(1.02, at, joules(mean.devices[device].total_j), va="center")
    axes.set_yticks(range(len(devices)), devices)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    axes.set_xlabel("Share of the device's energy (%)")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    style.phase_legend(axes, worth_saying(shares for one in found for shares in one.values()))
    of = "a step" if all(total.per_step for total in mean.devices.values()) else "what was traced"
    text = "; ".join(
        f"{device}: " + ", ".join(f"{phase} {share:.1%}" for phase, share in _shares(mean, device).items())
        for device in devices
    )
    spread = f"whiskers: standard deviation over {len(runs)} runs" if len(runs) > 1 else "one run: no spread"
    notes = [f"energy of {of}", spread, *footprint_notes(runs)]
    return style.describe(figure, "Energy of each device by phase", text, notes)


def phases_of_runs(runs: Sequence[LabelledRun]) -> Figure:
    one_setting(runs)
    return phases([run.footprint for run in runs])


def _shares(footprint: Footprint, device: str) -> dict[str, float]:
    total = footprint.devices[device]
    energies_j = {**phases_j(footprint, [device]), IDLE: total.idle_j}
    whole_j = math.fsum(energies_j.values())
    return {phase: energy_j / whole_j for phase, energy_j in energies_j.items()} if whole_j > 0 else {}


# `top_energy` and `top_power`: the names that take or draw the most (the paper's figure 5, STEF and STPF).

TOP = 10
LEAST_SHARE = 0.001  # of the device's energy: what hardly ran has a power by chance


@dataclass(frozen=True)
class Bars:
    """Names, highest value first, each with its standard deviation and 95 % half-width; nan: not known."""

    name: list[str]
    phase: list[str | None]
    value: Floats
    std: Floats
    interval: Floats
    spread_over: str


def top_energy(footprints: Sequence[Footprint], device: str | None = None, top: int = TOP) -> Figure:
    """One run, or the mean of several; `device` is by default the one that does the work."""
    return top_energies({"": footprints}, device, top)


def top_power(footprints: Sequence[Footprint], device: str | None = None, top: int = TOP) -> Figure:
    return top_powers({"": footprints}, device, top)


def top_energies(
    groups: Mapping[str, Sequence[Footprint]], device: str | None = None, top: int = TOP
) -> Figure:
    """Groups of runs side by side, on the same scale."""
    device = device or working_device([one for each in groups.values() for one in each])
    bars = {name: energies(each, device) for name, each in groups.items()}
    return _draw(bars, groups, device, "Energy", "J", top)


def top_powers(
    groups: Mapping[str, Sequence[Footprint]], device: str | None = None, top: int = TOP
) -> Figure:
    device = device or working_device([one for each in groups.values() for one in each])
    bars = {name: powers(each, device) for name, each in groups.items()}
    return _draw(bars, groups, device, "Power", "W", top)


def top_energy_of_runs(runs: Sequence[LabelledRun]) -> Figure:
    return top_energy(_summaries(runs))


def top_power_of_runs(runs: Sequence[LabelledRun]) -> Figure:
    return top_power(_summaries(runs))


def _summaries(runs: Sequence[LabelledRun]) -> list[Footprint]:
    one_setting(runs)
    names = renaming([run.footprint for run in runs])
    return [run.summary_footprint(names) for run in runs]


def energies(footprints: Sequence[Footprint], device: str) -> Bars:
    rows, spread = _rows(footprints, device)
    if spread is not None:
        std_j = column(spread, "energy_std_j")
    else:
        std_j = _of_steps(rows) * column(rows, "energy_j")
    return _ranked(rows, column(rows, "energy_j"), std_j, column(rows, "uncertainty_j"), footprints, device)


def powers(footprints: Sequence[Footprint], device: str) -> Bars:
    rows, spread = _rows(footprints, device)
    energy_j, busy_s = column(rows, "energy_j"), column(rows, "busy_s")
    with np.errstate(divide="ignore", invalid="ignore"):
        power_w, interval_w = energy_j / busy_s, column(rows, "uncertainty_j") / busy_s
    std_w = np.full(power_w.size, np.nan)  # one run: steps differ in length, not in power
    if spread is not None:
        power_w, std_w = column(spread, "power_mean_w"), column(spread, "power_std_w")
    least_j = LEAST_SHARE * footprints[0].devices[device].total_j
    kept = np.isfinite(power_w) & (energy_j >= least_j)
    power_w = np.where(kept, power_w, np.nan)
    return _ranked(rows, power_w, std_w, interval_w, footprints, device)


def _rows(footprints: Sequence[Footprint], device: str) -> tuple[pa.Table, pa.Table | None]:
    found = [only(footprint, [device]) for footprint in footprints]
    if len(found) == 1:
        return found[0].rows, None
    over_runs = average(found)
    return over_runs.mean.rows, over_runs.spread


def _of_steps(rows: pa.Table) -> Floats:
    """The standard deviation over steps as a part of the mean, because a footprint may be levelled."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return column(rows, "step_std_j") / column(rows, "step_mean_j")


def _ranked(
    rows: pa.Table,
    value: Floats,
    std: Floats,
    interval: Floats,
    footprints: Sequence[Footprint],
    device: str,
) -> Bars:
    order = np.argsort(-value, kind="stable")
    order = order[np.isfinite(value[order]) & (value[order] > 0)]
    steps = max(footprint.devices[device].steps for footprint in footprints)
    over = f"{len(footprints)} runs" if len(footprints) > 1 else f"{steps} steps" if steps > 1 else ""
    name, phase = rows["name"].to_pylist(), rows["phase"].to_pylist()
    return Bars(
        [name[i] for i in order],
        [phase[i] for i in order],
        value[order],
        std[order],
        interval[order],
        over if np.isfinite(std[order]).any() else "",
    )


@styled
def _draw(
    groups: Mapping[str, Bars],
    runs: Mapping[str, Sequence[Footprint]],
    device: str,
    what: str,
    unit: str,
    top: int,
) -> Figure:
    counts = {name: min(top, len(bars.name)) for name, bars in groups.items()}
    if not all(counts.values()):
        raise NotDrawn(f"no operation took any energy on {device}")
    count = max(counts.values())
    footprints = [only(one, [device]) for each in runs.values() for one in each]
    titled = len(groups) > 1
    figure, panels = style.sheet(
        height_mm=(26 if titled else 22) + 5.9 * count,
        columns=len(groups),
        wide_mm=style.PAGE_MM if titled else style.COLUMN_MM,
        sharex=True,
    )
    reach = max(_bars(axes, bars, top) for axes, bars in zip(panels, groups.values(), strict=True))
    of = "in a step" if footprints[0].devices[device].per_step else "while traced"
    title = f"{what} {of}" if unit == "J" else "Mean power while busy"
    for axes, (name, bars) in zip(panels, groups.items(), strict=True):
        axes.set_ylim(count - 0.6, -0.95)
        axes.set_xlim(0, reach * 1.03)
        style.quantity(axes.xaxis, f"{title} on {device}", unit, reach)
        if titled:
            axes.set_title(name, pad=16)
        style.phase_legend(axes, bars.phase[:top])
    over = dict.fromkeys(bars.spread_over for bars in groups.values() if bars.spread_over)
    notes = [f"whiskers: standard deviation over {' and '.join(over)}"] if over else []
    notes += (
        ["grey lines: 95 % interval"] if any(np.isfinite(b.interval).any() for b in groups.values()) else []
    )
    notes += [f"names with {100 * LEAST_SHARE:g} % of the energy or more"] if unit == "W" else []
    notes += (
        ["the order is not known: all intervals overlap"]
        if any(_unordered(b, top) for b in groups.values())
        else []
    )
    notes += [] if notes else ["uncertainty not known"]
    text = ". ".join(
        f"{name}: {_said(b, top, unit)}" if name else _said(b, top, unit) for name, b in groups.items()
    )
    notes += footprint_notes(footprints)
    return style.describe(figure, f"The {count} names with the most {what.lower()} on {device}", text, notes)


def _unordered(bars: Bars, top: int) -> bool:
    """Whether the last of them may as well be the first."""
    value, interval = bars.value[:top], bars.interval[:top]
    known = bool(np.isfinite(interval).all()) and value.size > 1
    return known and float((value - interval).max()) <= float((value + interval).min())


def _bars(axes: Axes, bars: Bars, top: int) -> float:
    """Draws one group; returns how far it reaches."""
    value, std, interval = bars.value[:top], bars.std[:top], bars.interval[:top]
    at = np.arange(value.size, dtype=float)
    axes.barh(at, value, 0.34, color=[style.colour_of_phase(phase) for phase in bars.phase[:top]])
    known = np.isfinite(interval)
    low = np.maximum(value - interval, 0.0)
    axes.hlines(at[known], low[known], (value + interval)[known], color="#9A9A9A", lw=0.8, gid="interval")
    if bars.spread_over:
        spread = np.isfinite(std)
        axes.errorbar(
            value[spread], at[spread], xerr=std[spread], fmt="none", color=style.INK, lw=0.9, capsize=2
        )
    for i, name in enumerate(bars.name[:top]):
        axes.text(0, at[i] - 0.23, style.shortened(name, style.COLUMN_MM - 8), va="bottom")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    reach = np.concatenate([value, value + np.nan_to_num(std), value + np.nan_to_num(interval)])
    return float(np.nanmax(reach))


def _said(bars: Bars, top: int, unit: str) -> str:
    return "; ".join(
        f"{name} ({style.named_phase(phase)}) {si(float(v), unit)}"
        for name, phase, v in zip(bars.name[:top], bars.phase[:top], bars.value[:top], strict=True)
    )
