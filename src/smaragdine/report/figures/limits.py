"""`fit`: energy, time and their product against the limit, with fit and band, and time against energy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from smaragdine.errors import UserError
from smaragdine.report.figures import style
from smaragdine.report.figures.draw import CAPTIONS, FORMATS, save
from smaragdine.report.figures.style import styled
from smaragdine.report.fit import TITLES, label, limit_text, value_text, varying
from smaragdine.sweep.fit import QUANTITIES, Analysis, GroupFit, means, rests_on
from smaragdine.sweep.parabola import Parabola, judge

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 101
_PANELS = ("energy", "time", "edp")
_LIMITS = {"W": "Power limit", "MHz": "Clock limit"}


@styled
def fit_figure(of: GroupFit, name: str = "") -> Figure:
    """One group: a panel for each of energy, time and their product, and the front of time and energy."""
    shown = [quantity for quantity in _PANELS if quantity in of.parabolas]
    figure, panels = style.sheet(108 if len(shown) > 1 else 58, -(-(len(shown) + 1) // 2), 2, style.PAGE_MM)
    for axes, quantity in zip(panels, shown, strict=False):
        _curve(axes, of, quantity)
    _front(panels[len(shown)], of)
    for axes in panels[len(shown) + 1 :]:
        axes.set_visible(False)
    fits = [of.parabolas[quantity] for quantity in shown]
    repeated = any(fit.repeated for fit in fits)
    notes = [
        *([name] if name else []),
        "line: second-degree fit, dashed where it does not fit",
        *([f"band: 95 % confidence, from {rests_on(fits[0])}"] if fits[0].freedom else []),
        "open circle: optimum of the fit with its 95 % interval",
        *(["whiskers: standard deviation over repetitions"] if repeated else []),
        "numbers: limits on the Pareto front",
    ]
    text = "; ".join(_said(of, quantity) for quantity in shown)
    title = "Energy, time and their product against the limit"
    return style.describe(figure, f"{title}{f': {name}' if name else ''}", text, notes)


def draw_fits(found: Analysis, folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """A figure for every group, named after it, with the alt texts beside them."""
    names, _ = varying(found)
    files: list[Path] = []
    captions: list[str] = []
    taken: set[str] = set()
    for each in found.groups:
        stem = _stem(label(each.group.by, names) if names else "", taken)
        figure = fit_figure(each, label(each.group.by) if each.group.by else "")
        files += save(figure, folder, stem, formats)
        captions.append(f"**{stem}** {style.alt_text(figure)}\n")
    try:
        (folder / CAPTIONS).write_text("\n".join(captions), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder / CAPTIONS} cannot be written", error.strerror or str(error)) from None
    return [*files, folder / CAPTIONS]


def _stem(words: str, taken: set[str]) -> str:
    stem = "-".join(["fit", *re.findall(r"[\w.+]+", words.lower())])[:100]
    unique, n = stem, 1
    while unique in taken:
        n += 1
        unique = f"{stem}-{n}"
    taken.add(unique)
    return unique


def _curve(axes: Axes, of: GroupFit, quantity: str) -> None:
    fit = of.parabolas[quantity]
    grid = np.linspace(fit.lowest, fit.highest, _POINTS)
    curve, half = fit.at(grid), fit.band(grid)
    fits = judge(fit)[0]
    tops = [float(fit.values.max()), float(curve.max())]
    if half is not None:
        axes.fill_between(grid, np.maximum(curve - half, 0), curve + half, color=style.BLUE, alpha=0.18, lw=0)
    axes.plot(grid, curve, color=style.BLUE, ls="--" if fits is False else "-", gid=f"fit {quantity}")
    _measured(axes, of, quantity)
    at = float(fit.at(fit.optimum)[0])
    if fit.interval is not None:
        axes.plot(fit.interval, (at, at), color=style.VERMILLION, lw=1.2, gid=f"interval {quantity}")
    axes.plot(
        [fit.optimum], [at], ls="none", marker="o", ms=5, mfc="white", mec=style.VERMILLION, gid="optimum"
    )
    low = min(float(fit.values.min()), float(curve.min()))
    pad = 0.12 * (max(tops) - low) or 0.05 * max(tops)
    # A band far wider than what was measured would flatten the curve it belongs to.
    axes.set_ylim(max(0.0, low - pad), max(tops) + pad)
    r2 = "–" if fit.r2 is None else f"{fit.r2:.3f}"
    words = [f"R² = {r2}", *(["edge"] if fit.edge else []), *(["does not fit"] if fits is False else [])]
    axes.set_title(f"{TITLES[quantity]}: {', '.join(words)}", weight="normal")
    axes.set_xlabel(_limit_label(of))
    axes.grid()
    if quantity == "time":
        style.duration(axes.yaxis, TITLES[quantity], max(tops))
    else:
        style.quantity(axes.yaxis, TITLES[quantity], QUANTITIES[quantity], max(tops))


def _measured(axes: Axes, of: GroupFit, quantity: str) -> None:
    limits, mean, std = means(of.group, quantity)
    known = np.isfinite(std)
    axes.errorbar(limits[known], mean[known], yerr=std[known], fmt="none", color=style.INK, lw=0.9, capsize=2)
    axes.plot(limits, mean, ls="none", marker="o", ms=3, mew=0, color=style.INK, gid=f"measured {quantity}")


def _front(axes: Axes, of: GroupFit) -> None:
    limits, time_s, _ = means(of.group, "time")
    energy_j = means(of.group, "energy")[1]
    at = [int(np.searchsorted(limits, limit)) for limit in of.front]
    axes.plot(time_s, energy_j, ls="none", marker="o", ms=3, mew=0, color="#9A9A9A")
    axes.plot(time_s[at], energy_j[at], marker="o", ms=3, mew=0, color=style.GREEN, lw=0.9, gid="front")
    for i in at:
        axes.annotate(
            f"{limits[i]:g}",
            (float(time_s[i]), float(energy_j[i])),
            xytext=(3, 3),
            textcoords="offset points",
            color=style.INK,
        )
    axes.set_title("Pareto front of time and energy", weight="normal")
    axes.margins(0.12)
    axes.grid()
    style.duration(axes.xaxis, "Time", float(time_s.max()))
    style.quantity(axes.yaxis, "Energy", "J", float(energy_j.max()))


def _limit_label(of: GroupFit) -> str:
    unit = of.group.unit
    return f"{_LIMITS.get(unit, 'Limit')}{f' ({unit})' if unit else ''}"


def _said(of: GroupFit, quantity: str) -> str:
    fit: Parabola = of.parabolas[quantity]
    unit = of.group.unit
    best = f"least {value_text(quantity, fit.measured_at(fit.best_measured))} at "
    optimum = f"the fit's at {limit_text(fit.optimum, unit)}" + (" (edge)" if fit.edge else "")
    return f"{TITLES[quantity]}: {best}{limit_text(fit.best_measured, unit)}, {optimum}"
