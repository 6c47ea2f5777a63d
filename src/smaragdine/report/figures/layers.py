"""`layers`: the energy of each of a model's repeating layers, forward and backward stacked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from smaragdine.accounting.diagram import Node, diagram, walk
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.noise import deviation
from smaragdine.accounting.repeats import repeating
from smaragdine.report.figures import lettering, style
from smaragdine.report.figures.runs import NotDrawn, Run, footprint_notes, one_setting, only, working_device
from smaragdine.report.figures.style import styled
from smaragdine.units import joules

if TYPE_CHECKING:
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
    """The same layers of one run or more; `std_j` is each layer's spread where it is not that over runs."""
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
    axes.set_xlabel(lettering.shortened(f"Layer * of {whole}", 68))
    style.quantity(axes.yaxis, f"Energy of {of} on {device}", "J", highest_j)
    style.phase_legend(axes, phases)
    said = [f"whiskers: standard deviation over {spread_over}" if spread_over else "spread not known", *notes]
    means_j = {node.name: math.fsum(_of(run, node.path) for run in runs) / len(runs) for node in first}
    text = f"{whole}: " + ", ".join(f"{name} {joules(mean_j)}" for name, mean_j in means_j.items())
    return style.describe(figure, "Energy by layer and phase", text, said)


def layers_of_runs(runs: Sequence[Run]) -> Figure:
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
    """The layers that repeat in the first footprint, as each of them has them; `label` is what has none."""
    roots = [diagram(only(footprint, [device])) for footprint in footprints]
    paths = {node.path: n for n, node in enumerate(repeating(roots[0]))}
    if not paths:
        raise NotDrawn(f"no layers of {label} repeat three times or more")
    found = [[node for node in walk(root) if node.path in paths] for root in roots]
    return [sorted(nodes, key=lambda node: paths[node.path]) for nodes in found]


def _over_steps(run: Run, paths: Sequence[str], device: str) -> dict[str, float]:
    """The standard deviation of each layer's energy over steps, at the level of the footprint."""
    names = {
        name: path
        for name in run.footprint.rows["name"].unique().to_pylist()
        for path in paths
        if name == path or name.startswith(path + "/")
    }
    rows = run.accounted_as(names, by_phase=False).device_rows(device).to_pylist()
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
