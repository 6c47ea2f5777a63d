"""`epoch_power`: the power of an epoch, averaged over epochs, and when layers ran (the paper's figure 3).

Epochs are laid over each other at their beginnings. A run without epochs but with traced steps is drawn by
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smaragdine.accounting.repeats import Ran, Repeated, Stretches, laid_over
from smaragdine.arrays import Floats
from smaragdine.report.figures import lettering, style
from smaragdine.report.figures.power import common_device
from smaragdine.report.figures.runs import NotDrawn, Run, one_setting, power_notes, working_device
from smaragdine.report.figures.style import styled
from smaragdine.units import watts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELLS = 480
_LAYER = (style.VERMILLION, 0.55)  # colour, and how dense where it ran in every epoch
_OTHERS = (style.SKY, 0.35)


@styled
def epoch_power(found: Repeated, device: str, ran: Ran | None = None, notes: Sequence[str] = ()) -> Figure:
    if not np.isfinite(found.mean_w).any():
        raise NotDrawn(f"nothing is known of the power of {device} in most {found.of}s")
    figure, (axes,) = style.sheet(height_mm=56)
    edges_s, mean_w, std_w = found.edges_s, found.mean_w, found.std_w
    middle_s = (edges_s[:-1] + edges_s[1:]) / 2
    count, of = found.count, found.of
    highest_w = float(np.nanmax(mean_w + np.nan_to_num(std_w)))
    size = float(edges_s[-1]), highest_w * 1.06
    if ran is not None and ran.spans_s:
        _shade(axes, ran.others_s, size, *_OTHERS)
        _shade(axes, ran.spans_s, size, *_LAYER)
    if count > 1:
        axes.fill_between(middle_s, mean_w - std_w, mean_w + std_w, color=style.BLUE, alpha=0.22, lw=0)
    axes.plot(middle_s, mean_w, color=style.BLUE, marker="o", ms=1.6, mew=0, lw=0.8, label="mean power")
    axes.set_xlim(0, size[0])
    axes.set_ylim(0, size[1])
    axes.grid(axis="y")
    style.duration(axes.xaxis, f"Time since the {of} began", float(edges_s[-1]))
    style.quantity(axes.yaxis, f"Power of {device}", "W", highest_w)
    _legend(axes, ran)
    plural = f"{count} {of}s" if count > 1 else f"one {of}"
    said = [f"mean and standard deviation (band) over {plural}" if count > 1 else f"{plural}: no spread"]
    if ran is not None and ran.spans_s:
        seen = len(ran.spans_s)
        layers = "these layers" if ran.others_s else "the layer"
        said += [f"shaded: when {layers} ran in {seen} traced {of}{'s, darker in more' if seen > 1 else ''}"]
    text = f"{watts(float(np.nanmean(mean_w)))} on average, {watts(float(np.nanmax(mean_w)))} at most"
    text += f"; the layer is {ran.layer}" if ran is not None else ""
    return style.describe(figure, f"Power of {device} during one {of}", text, [*said, *notes])


def epoch_power_of_runs(runs: Sequence[Run], layer: str | None = None) -> Figure:
    """Highlights the first of the layers that repeat, or the one named; of the first run that traced it."""
    one_setting(runs)
    traced = [run for run in runs if run.overview.footprint is not None]
    device = working_device([run.footprint for run in traced]) if traced else common_device(runs)
    found = laid_over([(run.recording, run.overview, run.traces[device]) for run in runs], device, layer)
    if found is None:
        raise NotDrawn("no run has epochs or traced steps")
    repeated, ran = found
    return epoch_power(repeated, device, ran, power_notes(runs, [device]))


def _shade(axes: Axes, stretches: Stretches, size: tuple[float, float], color: str, density: float) -> None:
    """As dense as the legend where it ran in every epoch, and in proportion elsewhere."""
    from matplotlib.colors import to_rgb

    if not stretches:
        return
    cells = np.zeros((1, _CELLS, 4))
    cells[..., :3] = to_rgb(color)
    cells[..., 3] = density * _part(stretches, np.linspace(0, size[0], _CELLS + 1))
    axes.imshow(cells, extent=(0, size[0], 0, size[1]), aspect="auto", interpolation="nearest", zorder=0)


def _part(stretches: Stretches, edges_s: Floats) -> Floats:
    """In how many of the epochs it ran, as a part of them, between each of these and the next."""
    until_s = np.zeros(len(edges_s))
    for spans in stretches:
        begin_s, end_s = np.array(spans).T
        until_s += np.clip(edges_s[:, None], begin_s, end_s).sum(axis=1)
    return np.diff(until_s) / np.diff(edges_s) / len(stretches)


def _legend(axes: Axes, ran: Ran | None) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = list(axes.get_lines()[:1])
    if ran is not None and ran.spans_s:
        color, density = _LAYER
        handles.append(Patch(fc=color, alpha=density, label=lettering.shortened(ran.layer, 44)))
    if ran is not None and ran.spans_s and ran.others_s:
        color, density = _OTHERS
        handles.append(Patch(fc=color, alpha=density, label=f"the {len(ran.others)} others"))
    style.legend_above(axes, handles)
