"""`stages`: what each stage took in all, forward and backward stacked (the paper's figure 1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from smaragdine.accounting.arithmetic import adding_devices, scale
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.noise import deviation
from smaragdine.accounting.overview import Overview, phases_j
from smaragdine.report.figures import lettering, style
from smaragdine.report.figures.runs import Run, by_folder, footprint_notes
from smaragdine.report.figures.style import styled
from smaragdine.units import joules, plus_minus

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IDLE = "idle"
_THIN = 0.002


@styled
def stages(runs: Mapping[str, Sequence[Footprint]], of: str = "a step", more: Sequence[str] = ()) -> Figure:
    """Stage → the footprints of its runs; `of` is what one footprint covers, `more` what else to say."""
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
    names, key = lettering.distinct(parts, room_mm)
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


def stages_of_runs(runs: Sequence[Run]) -> Figure:
    """All steps that were announced, as if each were the mean one, where every run has such a step; else one
    step, be it a traced one."""
    groups = by_folder(runs)
    counts = [_untraced_steps(run.overview) for run in runs]
    if all(counts):
        whole = {id(run): scale(run.footprint, count) for run, count in zip(runs, counts, strict=True)}
        each_run = {stage: [whole[id(run)] for run in each] for stage, each in groups.items()}
        return stages(each_run, "all steps", ["steps × the mean of untraced ones"])
    of = "a step" if all(run.overview.step is not None for run in runs) else "what was traced"
    return stages({stage: [run.footprint for run in each] for stage, each in groups.items()}, of)


def _untraced_steps(found: Overview) -> int:
    """How many steps there were, where one of them is known as it is without tracing, on every device."""
    if found.steps is None or found.step is None:
        return 0
    known = all(device in found.untraced for device in adding_devices(found.step))
    return found.steps.count if known else 0


def phase_energies_j(footprint: Footprint) -> dict[str, float]:
    """Phase → energy over the devices that add up, with idle; their sum is the total."""
    devices = adding_devices(footprint)
    idle_j = math.fsum(footprint.devices[device].idle_j for device in devices)
    return {**phases_j(footprint, devices), IDLE: idle_j}


def worth_saying(parts: Iterable[Mapping[str, float]]) -> set[str]:
    """Phases that one can see: a legend has no room for what is drawn thinner than a line."""
    return {
        phase for part in parts for phase, value in part.items() if value > _THIN * math.fsum(part.values())
    }
