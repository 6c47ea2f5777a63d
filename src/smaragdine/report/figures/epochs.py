"""`epochs`: energy and time of an epoch, as boxes over epochs (GPyJoules' box plots)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smaragdine.accounting.summary import Epoch
from smaragdine.report.figures import lettering, style
from smaragdine.report.figures.runs import NotDrawn, Run, by_setting, power_notes
from smaragdine.report.figures.style import styled
from smaragdine.units import joules, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW = 30  # epochs that are shown as dots besides


@styled
def epochs(
    settings: Mapping[str, Sequence[Epoch]], devices: Sequence[str], notes: Sequence[str] = ()
) -> Figure:
    """Setting → its epochs, of one run or of many; energy over the given devices."""
    count = len(settings)
    figure, (energy, time) = style.sheet(52 + 1.5 * count, columns=2)
    energies_j = {name: _energies_j(each, devices) for name, each in settings.items()}
    times_s = {name: [epoch.duration_s for epoch in each] for name, each in settings.items()}
    room_mm = 30 / count
    values, title = _ticks([*settings])
    names, key = lettering.distinct(values, max(room_mm, 12))
    for axes, measured in ((energy, energies_j), (time, times_s)):
        _boxes(axes, measured, names)
        if any(lettering.width_mm(name) + 1 > room_mm for name in names):
            axes.tick_params(axis="x", rotation=90)
        axes.set_xlabel(lettering.shortened(title, 30))
    style.quantity(energy.yaxis, "Energy of an epoch", "J", max(max(v) for v in energies_j.values()))
    style.quantity(time.yaxis, "Time of an epoch", "s", max(max(v) for v in times_s.values()))
    numbers = sorted({len(each) for each in settings.values()})
    of = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
    said = [
        f"boxes: quartiles and median of {of} epochs; whiskers: up to 1.5 interquartile ranges",
        " + ".join(devices),
        *key,
        *notes,
    ]
    text = "; ".join(
        f"{name}: median {joules(float(np.median(e)))} and {seconds(float(np.median(times_s[name])))}"
        for name, e in energies_j.items()
    )
    return style.describe(figure, "Energy and time of an epoch", text, said)


def epochs_of_runs(runs: Sequence[Run]) -> Figure:
    for run in runs:
        if not run.overview.summary.epochs:
            raise NotDrawn(f"{run.label} has no epochs: none was announced by a framework or marked")
    shared = [device for device in runs[0].traces if all(device in run.traces for run in runs)]
    settings = {
        name: [
            epoch
            for run in each
            for epoch in run.overview.summary.epochs
            if all(epoch.devices[device].energy_j is not None for device in shared)
        ]
        for name, each in by_setting(runs).items()
    }
    if not all(settings.values()):
        raise NotDrawn("an epoch's energy is not known")
    return epochs(settings, shared, power_notes(runs, shared))


def _energies_j(each: Sequence[Epoch], devices: Sequence[str]) -> list[float]:
    return [sum(epoch.devices[device].energy_j or 0.0 for device in devices) for epoch in each]


def _ticks(settings: Sequence[str]) -> tuple[list[str], str]:
    """What differs in settings, for the ticks of an axis, and what they have in common, for its name."""
    for unit, title in style.LIMITS.items():
        if all(name.endswith(f" {unit}") for name in settings):
            return [name.removesuffix(f" {unit}") for name in settings], f"{title} ({unit})"
    heads, _, tails = zip(*(name.rpartition(" ") for name in settings), strict=True)
    if len(settings) > 1 and len(set(heads)) == 1 and heads[0]:
        return list(tails), heads[0]
    return list(settings), ""


def _boxes(axes: Axes, values: Mapping[str, Sequence[float]], names: Sequence[str]) -> None:
    line: dict[str, Any] = {"color": style.INK, "lw": 0.8}
    found = axes.boxplot(
        list(values.values()),
        tick_labels=names,
        widths=0.55,
        patch_artist=True,
        showfliers=not any(len(each) <= _FEW for each in values.values()),
        medianprops={"color": style.INK, "lw": 1.2},
        boxprops={"lw": 0.8, "edgecolor": style.INK},
        whiskerprops=line,
        capprops=line,
        flierprops={"marker": ".", "ms": 2, "mec": style.FAINT},
    )
    for n, box in enumerate(found["boxes"]):
        box.set_facecolor(style.SERIES[n % len(style.SERIES)] + "66")
    for at, each in enumerate(values.values(), 1):
        if len(each) <= _FEW:
            # Side by side in the order of the epochs: no chance is needed to keep dots apart.
            off = np.linspace(-0.18, 0.18, len(each)) if len(each) > 1 else np.zeros(1)
            axes.plot(at + off, each, ls="none", marker="o", ms=1.6, mew=0, color=style.FAINT, gid="dots")
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
