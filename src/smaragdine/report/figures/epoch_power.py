"""`epoch_power`: the power of an epoch, averaged over epochs, and when layers ran (the paper's figure 3).

Epochs are laid over each other at their beginnings. A run without epochs but with traced steps is drawn by
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smaragdine.accounting.repeats import Ran, Repeated, Stretches, laid_over
from smaragdine.report.figures import lettering, style
from smaragdine.report.figures.power import common_device
from smaragdine.report.figures.runs import NotDrawn, Run, one_setting, power_notes, working_device
from smaragdine.report.figures.style import styled
from smaragdine.units import watts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    if ran is not None:
        _shade(axes, ran.others_s, *_OTHERS)
        _shade(axes, ran.spans_s, *_LAYER)
    if count > 1:
        axes.fill_between(middle_s, mean_w - std_w, mean_w + std_w, color=style.BLUE, alpha=0.22, lw=0)
    axes.plot(middle_s, mean_w, color=style.BLUE, marker="o", ms=1.6, mew=0, lw=0.8, label="mean power")
    highest_w = float(np.nanmax(mean_w + np.nan_to_num(std_w)))
    axes.set_xlim(0, float(edges_s[-1]))
    axes.set_ylim(0, highest_w * 1.06)
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


def _shade(axes: Axes, stretches: Stretches, color: str, density: float) -> None:
    """So faint that those of all epochs over each other make the colour of the legend."""
    for spans in stretches:
        bars = [(begin_s, end_s - begin_s) for begin_s, end_s in spans]
        alpha = 1 - (1 - density) ** (1 / len(stretches))
        axes.broken_barh(bars, (0, 1), transform=axes.get_xaxis_transform(), color=color, alpha=alpha, lw=0.3)


def _legend(axes: Axes, ran: Ran | None) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = list(axes.get_lines()[:1])
    if ran is not None and ran.spans_s:
        color, density = _LAYER
        handles.append(Patch(fc=color, alpha=density, label=lettering.shortened(ran.layer, 44)))
    if ran is not None and ran.others_s:
        color, density = _OTHERS
        handles.append(Patch(fc=color, alpha=density, label=f"the {len(ran.others)} others"))
    style.legend_above(axes, handles)
