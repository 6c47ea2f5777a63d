"""`fit`: energy, time and their product against the limit, with fit and band, and time against energy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from smaragdine.accounting.run import Run
from smaragdine.errors import UserError
from smaragdine.report.figures import style
from smaragdine.report.figures.draw import FORMATS, Drawn, save, write_captions
from smaragdine.report.figures.epochs import cumulative_of_runs, epochs_of_runs, mean_power_of_runs
from smaragdine.report.figures.power import power_of_runs, sampling_of_runs
from smaragdine.report.figures.runs import LabelledRun, NotDrawn
from smaragdine.report.figures.style import alt_text, styled
from smaragdine.report.limits import TITLES, label, limit_text, of_words, telling, value_text
from smaragdine.sweep.fit import QUANTITIES, Analysis, GroupFit, Parabola, judge, means, rests_on
from smaragdine.sweep.measurements import Group, Of, SweepGroups, Value
from smaragdine.sweep.table import Repetition, steps_span_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Key = tuple[tuple[str, Value], ...]  # the columns of a group with their values

_POINTS = 101
_PANELS = ("energy", "time", "edp")
_WIDE = 8.0  # a parameter that spans this factor is drawn on a logarithmic axis
_PANEL_MM = 70.0


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
    parameter = "" if of.group.unit in style.LIMITS else of.group.limit_name
    known = [judge(fit)[0] is not False for fit in fits]
    notes = [
        *([f"for {name}"] if name else []),
        *([f"time and energy{of_words(of)}"] if of.group.of else []),
        "line: second-degree fit" + ("" if all(known) else "; dashed, no optimum where it does not fit"),
        *([f"band: 95 % confidence, from {rests_on(fits[0])}"] if fits[0].freedom else []),
        *(["open circle: optimum of the fit with its 95 % interval"] if any(known) else []),
        *(["whiskers: standard deviation over repetitions"] if repeated else []),
        f"numbers: {f'values of {parameter}' if parameter else 'limits'} on the Pareto front",
        *(["logarithmic axis, parabola in the value"] if _logarithmic(of) else []),
    ]
    text = "; ".join(_said(of, quantity) for quantity in shown)
    title = f"Energy, time and their product{of_words(of)} against {parameter or 'the limit'}"
    return style.describe(figure, f"{title}{f': {name}' if name else ''}", text, notes)


def draw_fits(found: Analysis, folder: Path, formats: Sequence[str] = FORMATS) -> Drawn:
    """A figure for every group, named after it, with the captions beside them."""
    files: list[Path] = []
    captions: dict[str, str] = {}
    names = stems(found)
    for each in found.groups:
        stem = names[tuple(each.group.by.items())]
        figure = fit_figure(each, label(each.group.by) if each.group.by else "")
        files += save(figure, folder, stem, formats)
        captions[stem] = style.alt_text(figure)
    return Drawn([*files, write_captions(folder, captions)], {}, captions)


def stems(found: Analysis) -> dict[Key, str]:
    """The name of each group's files, by what tells the group apart; also of those that are left out."""
    groups = [*(of.group.by for of in found.groups), *(by for by, _ in found.left_out)]
    names = telling(groups)
    taken: set[str] = set()
    return {tuple(by.items()): _stem(label(by, names) if names else "", taken) for by in groups}


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
    spaced = np.geomspace if _logarithmic(of) else np.linspace
    grid = np.clip(spaced(fit.lowest, fit.highest, _POINTS), fit.lowest, fit.highest)
    curve, half = fit.at(grid), fit.band(grid)
    fits = judge(fit)[0]
    tops = [float(fit.values.max()), float(curve.max())]
    if half is not None:
        axes.fill_between(grid, np.maximum(curve - half, 0), curve + half, color=style.BLUE, alpha=0.18, lw=0)
    axes.plot(grid, curve, color=style.BLUE, ls="--" if fits is False else "-", gid=f"fit {quantity}")
    _measured(axes, of, quantity)
    at = float(fit.at(fit.optimum)[0])
    if at > 0 and fits is not False:  # a parabola may dip below what can be, where no axis is
        _optimum(axes, fit, at, quantity)
    low = min(float(fit.values.min()), float(curve.min()))
    pad = 0.12 * (max(tops) - low) or 0.05 * max(tops)
    # A band far wider than what was measured would flatten the curve it belongs to.
    axes.set_ylim(max(0.0, low - pad), max(tops) + pad)
    r2 = "–" if fit.r2 is None else f"{fit.r2:.3f}"
    words = [f"R² = {r2}", *(["does not fit"] if fits is False else ["edge"] if fit.edge else [])]
    axes.set_title(f"{TITLES[quantity]}: {', '.join(words)}", weight="normal")
    axes.set_xlabel(_limit_label(of))
    if _logarithmic(of):
        _at_measured(axes, np.unique(fit.limits).tolist())
    axes.grid()
    if quantity == "time":
        style.duration(axes.yaxis, TITLES[quantity], max(tops))
    else:
        style.quantity(axes.yaxis, TITLES[quantity], QUANTITIES[quantity], max(tops))


def _logarithmic(of: GroupFit) -> bool:
    low, high = float(of.group.limit.min()), float(of.group.limit.max())
    return of.group.unit not in style.LIMITS and low > 0 and high >= _WIDE * low


def _at_measured(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis with ticks at these values, as far as their labels stand apart."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    mm_a_factor = _PANEL_MM / np.log(values[-1] / values[0])
    kept, end_mm = list[float](), -np.inf
    for value in values:
        at_mm, half_mm = mm_a_factor * np.log(value / values[0]), style.width_mm(f"{value:.10g}") / 2
        if at_mm - half_mm > end_mm:
            kept.append(value)
            end_mm = at_mm + half_mm + 1
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(kept))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))


def _optimum(axes: Axes, fit: Parabola, at: float, quantity: str) -> None:
    if fit.interval is not None:
        axes.plot(fit.interval, (at, at), color=style.VERMILLION, lw=1.2, gid=f"interval {quantity}")
    axes.plot(
        [fit.optimum], [at], ls="none", marker="o", ms=5, mfc="white", mec=style.VERMILLION, gid="optimum"
    )


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
    name = style.LIMITS.get(unit) or style.shortened(of.group.limit_name, 60) or "Limit"
    return f"{name}{f' ({unit})' if unit else ''}"


def _said(of: GroupFit, quantity: str) -> str:
    fit: Parabola = of.parabolas[quantity]
    unit = of.group.unit
    best = f"least {value_text(quantity, fit.measured_at(fit.best_measured))} at "
    optimum = f"the fit's at {limit_text(fit.optimum, unit)}" + (" (edge)" if fit.edge else "")
    if judge(fit)[0] is False:
        optimum = "a parabola does not fit"
    return f"{TITLES[quantity]}: {best}{limit_text(fit.best_measured, unit)}, {optimum}"


# The figures of a sweep's recordings: those of each group that is fitted, drawn by limit.

OF_RUNS: Mapping[str, Callable[[Sequence[LabelledRun]], Figure]] = {
    "power": power_of_runs,
    "mean_power": mean_power_of_runs,
    "cumulative": cumulative_of_runs,
    "epochs": epochs_of_runs,
    "sampling": sampling_of_runs,
}


def draw_sweep(
    sweep: Path, swept: SweepGroups, found: Analysis, folder: Path, formats: Sequence[str] = FORMATS
) -> Drawn:
    """The fits of a sweep; and what its recordings allow, a folder for every group: named as its fit is.

    All captions are in one file, each with what was run.
    """
    fits = draw_fits(found, folder, formats)
    names = stems(found)
    files = list(fits.files)
    captions: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for group, settings in zip(swept.groups, swept.settings, strict=True):
        name = names[tuple(group.by.items())]
        said_of = _swept_words(group, settings)
        if name in fits.captions:
            captions[name] = f"{fits.captions[name]} {said_of}"
        try:
            runs = [_run(sweep, row, said, group.of) for said, rows in settings.items() for row in rows]
        except UserError as error:
            left_out[name] = str(error)
            continue
        for kind, draw in OF_RUNS.items():
            try:
                figure = draw(runs)
            except NotDrawn as error:
                left_out[f"{name}/{kind}"] = str(error)
                continue
            files += save(figure, folder / name, kind, formats)
            captions[f"{name}/{kind}"] = f"{alt_text(figure)} {said_of}"
    write_captions(folder, captions)
    return Drawn(files, left_out, captions)


def _swept_words(group: Group, settings: Mapping[str, Sequence[Repetition]]) -> str:
    """What was run, on what and how often: the end of a caption."""
    rows = [row for each in settings.values() for row in each]
    gpus, devices, provenance = (
        " and ".join(sorted({value for row in rows if (value := getattr(row, name))}))
        for name in ("device_name", "device", "provenance")
    )
    known = " ".join(word for word in (devices, provenance) if word)
    where = f" on {gpus} ({known})" if gpus else f" on {known}" if known else ""
    names, several = list(settings), len(settings) > 1
    span = f"{len(names)} settings from {names[0]} to {names[-1]}" if several else names[0]
    low, high = (of(map(len, settings.values())) for of in (min, max))
    often = f"{low}–{high} repetitions" if low < high else f"{low} repetition{'s' * (low > 1)}"
    return f"A sweep of {label(group.by)}{where}: {span}, {often}{' each' * several}."


def _run(sweep: Path, row: Repetition, setting: str, of: Of | None) -> LabelledRun:
    run = Run.open(sweep / row.recording)
    steps_ns = steps_span_ns(run.recording.marks) if of == "steps" else None
    if of == "steps" and steps_ns is None:
        raise UserError(f"{run.path} has no steps", "the sweep's table has them", "Was it replaced?")
    return LabelledRun(run, run.path.name, setting, setting, steps_ns)
