"""Draws `asss` and `assw`: how alike a footprint stays with fewer readings or more runs (the paper's figure
7).

Beside each score is that of busy times alone against the energies: what lies above it, the sensor adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from smaragdine.accounting.account import thinned
from smaragdine.accounting.footprint import Footprint, only
from smaragdine.accounting.intervals import grouped
from smaragdine.accounting.merge import merge_all
from smaragdine.accounting.precision import KS, Experiment, Score
from smaragdine.accounting.precision import assw as widened
from smaragdine.accounting.similarity import correlation, values
from smaragdine.report.figures import style
from smaragdine.report.figures.runs import (
    LabelledRun,
    NotDrawn,
    footprint_notes,
    one_setting,
    working_device,
)
from smaragdine.report.figures.style import styled
from smaragdine.units import joules

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_PAPER = 5  # runs of one experiment

_CURVES: dict[str, tuple[Callable[[Score], float | None], str, str, str]] = {
    "energy": (lambda score: score.scores.energy.value, style.BLUE, "-", "o"),
    "power": (lambda score: score.scores.power.value, style.VERMILLION, "--", "s"),
    "times against energies": (lambda score: score.scores.floor.value, style.FAINT, ":", ""),
}


@styled
def asss(
    runs: Sequence[Sequence[Score]], device: str, period_ms: float | None = None, notes: Sequence[str] = ()
) -> Figure:
    """Each run's scores with every n-th reading; `period_ms` is the time between two readings."""
    figure, (axes,) = style.sheet(height_mm=54)
    x = [score.n * (period_ms or 1.0) for score in runs[0]]
    lowest = min(_curve(axes, name, x, runs) for name in _CURVES)
    axes.set_xscale("log")
    axes.set_xlim(x[0] / 1.15, x[-1] * 1.15)
    ticks = [value for i, value in enumerate(x) if i % 2 == 0 or len(x) < 7]
    axes.set_xticks(ticks, [f"{float(f'{value:.3g}'):g}" for value in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("Sampling period (ms)" if period_ms else "Every n-th reading kept (n, 1)")
    _finish(axes, lowest)
    spread = f"bands: standard deviation over {len(runs)} runs" if len(runs) > 1 else "one run: no spread"
    text = _ends(runs)
    title = "Accounting similarity with sample sparsing (ASSS)"
    return style.describe(figure, title, f"{device}: {text}", [device, spread, *notes])


@styled
def assw(
    turns: Sequence[Sequence[Score]],
    device: str,
    runs_each: int,
    notes: Sequence[str] = (),
    pooled: bool = False,
) -> Figure:
    """The scores of one experiment against n others; each turn takes another experiment as the one.

    `pooled`: against n that include it, as in the paper.
    """
    figure, (axes,) = style.sheet(height_mm=54)
    x = [float(score.n) for score in turns[0]]
    lowest = min(_curve(axes, name, x, turns) for name in _CURVES)
    every = max(1, len(x) // 8)
    axes.set_xticks(x[::every], [f"{value:g}" for value in x[::every]])
    axes.set_xlim(x[0] - 0.3, x[-1] + 0.3)
    each = f"{runs_each} runs" if runs_each > 1 else "one run"
    axes.set_xlabel(f"{'Experiments' if pooled else 'Other experiments'} pooled (number, of {each} each)")
    _finish(axes, lowest)
    against = "more of them, itself among these" if pooled else "the others"
    spread = f"bands: standard deviation over {len(turns)} experiments, each in turn against {against}"
    title = "Accounting similarity with sample widening (ASSW)"
    return style.describe(figure, title, f"{device}: {_ends(turns)}", [device, spread, *notes])


def asss_of_runs(runs: Sequence[LabelledRun], ks: Sequence[int] = KS) -> Figure:
    one_setting(runs)
    device = working_device([run.footprint for run in runs])
    found: list[list[Score]] = []
    for run in runs:
        events, meters = run.run.inputs
        found.append(thinned(events, meters, ks)[device])
    period_ms = runs[0].run.channels[device].period_ms
    shown = min(sum(score.scores.energy.value is not None for score in each) for each in found)
    if shown < 3:
        raise NotDrawn("the traced time has too few readings to leave any out")
    return asss([each[:shown] for each in found], device, period_ms, _notes(runs, device))


def assw_of_runs(runs: Sequence[LabelledRun]) -> Figure:
    one_setting(runs)
    if len(runs) < 3:
        raise NotDrawn("it takes three runs of one setting or more")
    footprints = [run.footprint for run in runs]
    device = working_device(footprints)
    size = _PAPER if len(runs) % _PAPER == 0 and len(runs) >= 3 * _PAPER else 1
    experiments = [footprints[i : i + size] for i in range(0, len(runs), size)]
    return assw(in_turns(experiments, device), device, size, _notes(runs, device))


def in_turns(experiments: Sequence[Experiment], device: str) -> list[list[Score]]:
    return [widened([*experiments[i:], *experiments[:i]], device).disjoint for i in range(len(experiments))]


def _notes(runs: Sequence[LabelledRun], device: str) -> list[str]:
    footprints: list[Footprint] = [only(run.footprint, [device]) for run in runs]
    return footprint_notes(footprints)


def _curve(axes: Axes, name: str, x: Sequence[float], runs: Sequence[Sequence[Score]]) -> float:
    """Draws mean and standard deviation over runs; returns the lowest value drawn."""
    value, colour, dashes, marker = _CURVES[name]
    scores = np.array([[_number(value(score)) for score in each] for each in runs])
    mean = scores.mean(axis=0)
    axes.plot(x, mean, color=colour, ls=dashes, marker=marker, ms=3, mew=0, label=name)
    std = scores.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(mean.size)
    if len(runs) > 1:
        axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.2, lw=0)
    return float(np.nanmin(mean - std)) if np.isfinite(mean).any() else 1.0


def _finish(axes: Axes, lowest: float) -> None:
    bottom = 0.0 if 0 <= lowest < 0.9 else lowest - 0.05 if lowest < 0 else lowest - (1 - lowest) * 0.2
    axes.set_ylim(min(bottom, 1 - 1e-6), None)  # if all scores are 1, there is no room below them
    top = 1.0 + (1.0 - axes.get_ylim()[0]) * 0.04
    axes.set_ylim(top=top)
    axes.set_ylabel("Pearson correlation (1)")
    axes.grid(axis="y")
    style.legend_above(axes)


def _ends(runs: Sequence[Sequence[Score]]) -> str:
    said: list[str] = []
    for i in (0, -1):
        mean = np.mean([_number(each[i].scores.energy.value) for each in runs])
        said.append(f"{mean:.4f} at n = {runs[0][i].n}")
    return f"energy correlates {' and '.join(said)}"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


# `pair`: two footprints side by side: how similarity is computed (the paper's figure 6).

MOST_ROWS = 12
_DEEPEST = 9
_HEAD_MM = 5.4
_ROW_MM = 3.9
_VALUE_MM = 16.0
_NUMBER_MM = 10.5
_SCORE_MM = 15.0


@styled
def pair(
    a: Footprint, b: Footprint, labels: tuple[str, str], device: str, notes: Sequence[str] = ()
) -> Figure:
    """Both by layer, as deep as the table has room for; the correlation is over the rows shown."""
    of_a, of_b = coarse(*merge_all([a, b]))
    score = correlation(of_a, of_b, "energy", device)
    if score.value is None:
        raise NotDrawn(score.reason)
    left, right = values(of_a, "energy", device), values(of_b, "energy", device)
    rows = [(key[0], left[key], right[key]) for key in left if key in right]
    end_mm = style.COLUMN_MM - _SCORE_MM
    columns_mm = (end_mm - _VALUE_MM - 1, end_mm - 1)
    room_mm = columns_mm[0] - _NUMBER_MM - 1.5
    names, key = style.distinct(_endings([name for name, _, _ in rows], room_mm), room_mm)
    said = ["Pearson correlation (1) of the rows"]
    whole = correlation(a, b, "energy", device)
    if whole.value is not None:
        said.append(f"over all {whole.common} names {whole.value:.4f}")
    said += [*notes, *key, *footprint_notes([of_a])]
    bottom_mm = _HEAD_MM + _ROW_MM * len(rows)
    high_mm = bottom_mm + 4 + 2.9 * len(style.wrapped("; ".join(said), style.COLUMN_MM - 2))
    figure, axes = _canvas(high_mm)
    for x_mm, label in zip(columns_mm, labels, strict=True):
        axes.text(x_mm, 3, style.shortened(label, _VALUE_MM), ha="right", va="center", weight="bold")
    axes.plot([1.5, end_mm], [_HEAD_MM, _HEAD_MM], color=style.INK, lw=0.7)
    for n, (name, (_, *both_j)) in enumerate(zip(names, rows, strict=True)):
        y_mm = _HEAD_MM + _ROW_MM * (n + 0.5) + 0.5
        axes.text(1.5, y_mm, name, va="center")
        for x_mm, value_j in zip(columns_mm, both_j, strict=True):
            axes.text(x_mm, y_mm, joules(value_j), ha="right", va="center")
    bracket_mm = [end_mm + 1, end_mm + 2, end_mm + 2, end_mm + 1]
    axes.plot(bracket_mm, [_HEAD_MM + 0.6] * 2 + [bottom_mm] * 2, color=style.INK, lw=0.7)
    axes.text(end_mm + 3, (_HEAD_MM + bottom_mm) / 2, f"{score.value:.4f}", va="center", weight="bold")
    text = "; ".join(f"{name}: {joules(a_j)} and {joules(b_j)}" for name, a_j, b_j in rows)
    text = f"{labels[0]} and {labels[1]} correlate {score.value:.4f}: {text}"
    return style.describe(figure, "How similarity is computed", text, said)


def _canvas(high_mm: float) -> tuple[Figure, Axes]:
    """A sheet to write on, in millimetres from its upper left corner."""
    figure, (axes,) = style.sheet(high_mm)
    figure.set_layout_engine("none")
    axes.set_position((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, style.COLUMN_MM)
    axes.set_ylim(high_mm, 0)
    return figure, axes


def _endings(names: Sequence[str], room_mm: float) -> list[str]:
    """The ends of paths that tell them apart: two segments, one if two do not fit, more if needed."""
    found: list[str] = []
    for name in names:
        segments = name.split("/")
        ends = ["/".join(segments[-count:]) for count in range(1, len(segments) + 1)]
        telling = [end for end in ends if sum(f"/{other}".endswith(f"/{end}") for other in names) == 1]
        whole = [end for end in telling if "/" in end and not end.startswith("*")] or telling
        fitting = [end for end in (*whole, *telling) if style.width_mm(end) <= room_mm]
        found.append(next(iter(fitting or telling), name))
    return found


def coarse(a: Footprint, b: Footprint) -> tuple[Footprint, Footprint]:
    """By layers, as deep as leaves few enough of them in `a`."""
    depth = 1
    for deeper in range(2, _DEEPEST + 1):
        if grouped(a, "layer", deeper).rows.num_rows > MOST_ROWS:
            break
        depth = deeper
    return grouped(a, "layer", depth), grouped(b, "layer", depth)
