"""Draws what `smaragdine allocate` found: the models of the profiles, and what the methods chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from smaragdine.allocate.methods import Answer, Corner
from smaragdine.allocate.model import Choices, Objective, cost, share, unit
from smaragdine.allocate.profile import Profile
from smaragdine.arrays import Floats
from smaragdine.report.figures import style
from smaragdine.report.figures.draw import save, write_captions
from smaragdine.report.figures.style import styled
from smaragdine.units import seconds, si, watts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_CURVE = 400  # points of a curve: nobody could see more


def draw_allocation(
    profiles: Mapping[str, Profile],
    gpus: Sequence[Choices],
    answers: Sequence[Answer],
    front: Sequence[Corner],
    model: str,
    folder: Path,
) -> list[Path]:
    """Draws `models` and `allocations`, `split` for two GPUs, and `pareto` if there is a front. With
    captions."""
    figures = {
        "allocate_models": models(profiles, gpus, answers[-1], model),
        "allocate": allocations(answers),
    }
    if len(gpus) == 2:
        figures["allocate_split"] = split(gpus, answers)
    if len(front) > 1:
        figures["allocate_pareto"] = front_figure(front, answers[0].objective)
    files = [file for name, figure in figures.items() for file in save(figure, folder, name)]
    captions = {name: style.alt_text(figure) for name, figure in figures.items()}
    return [*files, write_captions(folder, captions)]


@styled
def models(profiles: Mapping[str, Profile], gpus: Sequence[Choices], answer: Answer, model: str) -> Figure:
    """Time and mean power against batch: dots were measured, lines are the model, dashed beyond the dots."""
    figure, axes = style.sheet(16 + 42 * len(gpus), rows=len(gpus), columns=2, wide_mm=style.PAGE_MM)
    said: list[str] = []
    furthest = max(share.batch for share in answer.allocation.shares)
    furthest = max(furthest, *(profile.batches[-1] for profile in profiles.values()))
    for g, each in enumerate(gpus):
        profile, chosen = profiles[each.gpu], answer.allocation.shares[g]
        time, power = axes[2 * g : 2 * g + 2]
        for n, limit_w in enumerate(each.power_limit_w):
            colour = style.SERIES[n % len(style.SERIES)]
            points = [profile.points[batch, float(limit_w)] for batch in profile.batches]
            measured_w = [point.energy_j / point.time_s for point in points]
            for on, values, dots in (
                (time, each.time_s[n], [point.time_s for point in points]),
                (power, each.power_w[n], measured_w),
            ):
                _curve(on, values[: furthest + 1], profile.batches[-1], colour, f"{limit_w:g} W")
                on.plot(
                    profile.batches, dots, ls="none", marker="o", ms=2.4, mew=0, color=colour, gid="measured"
                )
        for on, value in ((time, chosen.time_s), (power, chosen.power_w)):
            if chosen.batch:
                on.plot(
                    [chosen.batch],
                    [value],
                    ls="none",
                    marker="o",
                    ms=6,
                    mfc="none",
                    mec=style.INK,
                    gid="chosen",
                )
            on.set_xlim(0, furthest * 1.03)
            on.set_ylim(bottom=0)
            on.grid()
        time.set_title(style.shortened(each.gpu, 60))
        style.quantity(time.yaxis, "Time of a step", "s", float(time.get_ylim()[1]))
        style.quantity(power.yaxis, "Mean power", "W", 1.0)
        power.legend(title="Power limit", loc="center left", bbox_to_anchor=(1.0, 0.5), alignment="left")
        said.append(
            f"{each.gpu}: batch {chosen.batch} at {chosen.power_limit_w:g} W, {seconds(chosen.time_s)}, "
            f"{watts(chosen.power_w)}"
        )
    for on in axes[-2:]:
        on.set_xlabel("Batch")
    notes = [f"{model} model; dots: measured; dashed: beyond what was profiled; circle: {answer.method}"]
    return style.describe(figure, "Time and mean power against batch", "; ".join(said), notes)


def _curve(axes: Axes, values: Floats, measured: int, colour: str, label: str) -> None:
    batch = np.unique(np.linspace(1, values.size - 1, _MOST_CURVE).astype(np.int64))
    within, beyond = batch[batch <= measured], batch[batch >= measured]
    axes.plot(within, values[within], color=colour, label=label)
    axes.plot(beyond, values[beyond], color=colour, ls="--", lw=0.7, gid="beyond")


@styled
def allocations(answers: Sequence[Answer]) -> Figure:
    """Each GPU's batch, one bar per method."""
    figure, (axes,) = style.sheet(26 + 7 * len(answers))
    shares = [each.allocation.shares for each in answers]
    left = np.zeros(len(answers))
    for g in range(len(shares[0])):
        sizes = np.array([of[g].batch for of in shares], dtype=np.float64)
        colour = style.SERIES[g % len(style.SERIES)]
        bars = axes.barh(
            range(len(answers)), sizes, left=left, color=colour, label=shares[0][g].gpu, height=0.6
        )
        for bar, of in zip(bars, shares, strict=True):
            text = f"{of[g].batch} at {of[g].power_limit_w:g} W"
            room_mm = bar.get_width() / max(sum(s.batch for s in shares[0]), 1) * 55
            if style.width_mm(text) < room_mm:
                x = bar.get_x() + bar.get_width() / 2
                y = bar.get_y() + bar.get_height() / 2
                axes.text(x, y, text, ha="center", va="center", color=style.ink_on(colour))
        left += sizes
    quantity = unit(answers[0].objective)
    names = [f"{each.method}\n{si(each.allocation.cost, quantity, 4)}" for each in answers]
    axes.set_yticks(range(len(answers)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("Batch")
    style.legend_above(axes)
    said = "; ".join(
        f"{each.method}: "
        + " + ".join(f"{s.gpu} {s.batch} at {s.power_limit_w:g} W" for s in each.allocation.shares)
        + f", {each.allocation.cost:.4f} {quantity}"
        for each in answers
    )
    return style.describe(figure, "Allocations by method", said, [f"objective: {answers[0].objective.kind}"])


@styled
def split(gpus: Sequence[Choices], answers: Sequence[Answer]) -> Figure:
    """Cost against the first GPU's batch, with the best limits for each split."""
    figure, (axes,) = style.sheet(62)
    objective = answers[0].objective
    total = sum(each.batch for each in answers[0].allocation.shares)
    low = max(gpus[0].lowest, total - gpus[1].highest)
    high = min(gpus[0].highest, total - gpus[1].lowest)
    batch = np.unique(np.linspace(low, high, _MOST_CURVE).astype(np.int64))
    axes.plot(batch, [_best(gpus, objective, int(b), total) for b in batch], color=style.BLUE)
    for n, each in enumerate(answers):
        at = each.allocation.shares[0].batch
        marker = "osD^"[n % 4]
        colour = style.SERIES[(n + 1) % len(style.SERIES)]
        size = 7 - 1.3 * n  # equal answers show as rings
        axes.plot(
            [at],
            [each.allocation.cost],
            ls="none",
            marker=marker,
            ms=size,
            mfc="none",
            mec=colour,
            label=each.method,
        )
    largest = max(each.allocation.cost for each in answers)
    style.quantity(axes.yaxis, "Cost", unit(objective), largest)
    axes.set_xlabel(
        f"Batch of {style.shortened(gpus[0].gpu, 40)}; the rest to {style.shortened(gpus[1].gpu, 20)}"
    )
    axes.grid()
    style.legend_above(axes)
    said = "; ".join(
        f"{each.method} {each.allocation.shares[0].batch}: {each.allocation.cost:.4f} {unit(objective)}"
        for each in answers
    )
    notes = [f"objective: {objective.kind}; line: the best limits for every split"]
    return style.describe(figure, "Cost against the split", said, notes)


def _best(gpus: Sequence[Choices], objective: Objective, batch: int, total: int) -> float:
    first, second = gpus
    return min(
        cost(objective, (share(first, batch, i), share(second, total - batch, j)))
        for i in range(first.power_limit_w.size)
        for j in range(second.power_limit_w.size)
    )


@styled
def front_figure(front: Sequence[Corner], objective: Objective) -> Figure:
    figure, (axes,) = style.sheet(60)
    energy = [corner.energy for corner in front]
    limits = [corner.limit_energy for corner in front]
    axes.plot(limits, energy, color=style.BLUE, marker="o", ms=3, mew=0)
    for corner in (front[0], front[-1]):
        eta = 0 if corner is front[0] else 1
        axes.annotate(
            f"η = {eta}", (corner.limit_energy, corner.energy), xytext=(3, 3), textcoords="offset points"
        )
    names = (
        ("Σ P_limit·t", "Σ mean power·t")
        if objective.kind == "sum"
        else ("Step time · Σ P_limit", "Energy of a step")
    )
    style.quantity(axes.xaxis, names[0], "J", max(limits))
    style.quantity(axes.yaxis, names[1], "J", max(energy))
    axes.grid()
    said = f"{len(front)} allocations, from {si(energy[0], 'J')} to {si(energy[-1], 'J')}"
    notes = [f"objective: {objective.kind}; dots: every allocation that is the best for some η"]
    return style.describe(figure, "Pareto front over η", said, notes)
