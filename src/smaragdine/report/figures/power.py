"""Draws `power`, raw power over time per setting (GPyJoules' plots per limit), and `sampling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smaragdine.accounting.power import PowerTrace
from smaragdine.arrays import Floats, Ints
from smaragdine.recording.reader import Series
from smaragdine.report.figures import style
from smaragdine.report.figures.runs import (
    LabelledRun,
    NotDrawn,
    by_setting,
    power_notes,
    provenance_notes,
    time_notes,
)
from smaragdine.report.figures.style import styled
from smaragdine.units import si, watts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MOST_PIECES = (
    1500  # more than the dots of a column; beyond that, draw means of even cells with their extremes
)
_MOST_ROWS = (8, 8, 12)  # of panels in one, two and three columns: a page has room for no more

Traced = tuple[PowerTrace, int, int]  # a run's power, begin and end


@styled
def power(
    settings: Mapping[str, Sequence[Traced]],
    device: str,
    limits_w: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
) -> Figure:
    """Setting → its runs, drawn over each other from their beginnings."""
    figure, panels, bottom = _panels(len(settings))
    longest_s = max((end - begin) * 1e-9 for runs in settings.values() for _, begin, end in runs)
    names, key = style.distinct(settings, 44 if len(bottom) < 3 else 26)
    highest_w, coarse, means = 0.0, False, list[str]()
    for axes, name, (setting, runs) in zip(panels, names, settings.items(), strict=True):
        for n, (trace, begin_ns, end_ns) in enumerate(runs):
            colour = style.SERIES[n % len(style.SERIES)]
            t_s, low_w, mean_w, high_w = envelope(trace, begin_ns, end_ns)
            if low_w is not mean_w:
                coarse = True
                axes.fill_between(t_s, low_w, high_w, step="post", color=colour, alpha=0.3, lw=0)
            axes.step(t_s, mean_w, where="post", color=colour, lw=0.6, alpha=0.85)
            highest_w = max(highest_w, float(np.nanmax(high_w, initial=0.0)))
        limit_w = (limits_w or {}).get(setting)
        if limit_w is not None and limit_w < 3 * highest_w:
            axes.axhline(limit_w, color=style.FAINT, ls="--", lw=0.8)
            highest_w = max(highest_w, limit_w)
        if limit_w is None:
            axes.set_title(name)
        else:
            axes.set_title(f"{name} limit" if setting == f"{limit_w:g} W" else f"{name}, {limit_w:g} W limit")
        axes.grid(axis="y")
        covered_s = [trace.covered_s(begin, end) for trace, begin, end in runs]
        mean = sum(t.energy_j(b, e) for t, b, e in runs) / max(sum(covered_s), 1e-12)
        means.append(f"{setting}: {watts(mean)} on average")
    panels[0].set_xlim(0, longest_s)
    panels[0].set_ylim(0, highest_w * 1.06)
    for axes in bottom:
        style.duration(axes.xaxis, "Time", longest_s)
    for axes in panels:
        style.quantity(axes.yaxis, "Power", "W", highest_w)
        axes.yaxis.set_label_text("")
    _, unit = style.prefixed(highest_w, "W")
    figure.supylabel(f"Power of {device} ({unit})", fontsize=style.TEXT_PT)
    drawn = {len(runs) for runs in settings.values()}
    said = [] if drawn == {1} else ["one line for each run"]
    said += ["bands: lowest to highest reading around the mean"] if coarse else []
    said += ["dashed: power limit"] if limits_w else []
    return style.describe(figure, f"Power of {device} over time", "; ".join(means), [*said, *key, *notes])


def _panels(count: int) -> tuple[Figure, list[Axes], list[Axes]]:
    """One panel per setting, row by row, in as many columns as it takes; and the lowest of each column."""
    columns = next((n for n, rows in enumerate(_MOST_ROWS, 1) if count <= n * rows), None)
    if columns is None:
        most = len(_MOST_ROWS) * _MOST_ROWS[-1]
        raise NotDrawn(f"{count} settings are too many for one figure; give up to {most}")
    rows = -(-count // columns)
    each_mm = 40 if rows == 1 else 24 if rows < 5 else 19
    wide_mm = style.COLUMN_MM if columns == 1 else style.PAGE_MM
    figure, panels = style.sheet(14 + each_mm * rows, rows, columns, wide_mm, sharex=True, sharey=True)
    for axes in panels[count:]:
        axes.remove()
    bottom = panels[:count][-columns:]
    for axes in bottom:
        axes.tick_params(labelbottom=True)  # also if there is no panel below it
    return figure, panels[:count], bottom


def power_of_runs(runs: Sequence[LabelledRun]) -> Figure:
    device = common_device(runs)
    settings = by_setting(runs)
    traced = {name: [(run.traces[device], *run.bounds_ns) for run in each] for name, each in settings.items()}
    limits_w = {name: each[0].limit_w for name, each in settings.items() if device.startswith("gpu")}
    known = {name: limit for name, limit in limits_w.items() if limit is not None}
    return power(traced, device, known, [*time_notes(runs), *power_notes(runs, [device])])


def common_device(runs: Sequence[LabelledRun]) -> str:
    """The device that every run has power of and that takes the most, a GPU if there is one."""
    shared = [device for device in runs[0].traces if all(device in run.traces for run in runs)]
    if not shared:
        raise NotDrawn("the recordings have no device in common")
    gpus = [device for device in shared if device.startswith("gpu")]
    return max(
        gpus or shared, key=lambda device: sum(run.traces[device].energy_j(*run.bounds_ns) for run in runs)
    )


def envelope(trace: PowerTrace, begin_ns: int, end_ns: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Seconds since the beginning, and lowest, mean and highest power from there on; nan: not known.

    A trace of few stretches is drawn as it is: lowest and highest are the mean.
    """
    inside = (trace.end_ns > begin_ns) & (trace.start_ns < end_ns)
    start_ns, until_ns = trace.start_ns[inside], np.minimum(trace.end_ns[inside], end_ns)
    power_w = trace.power_w[inside]
    if start_ns.size <= MOST_PIECES:
        gap = np.append(start_ns[1:] > until_ns[:-1], True) if start_ns.size else np.zeros(0, bool)
        t_ns = np.insert(start_ns, np.flatnonzero(gap) + 1, until_ns[gap])
        mean_w = np.insert(power_w, np.flatnonzero(gap) + 1, np.nan)
        return np.maximum(t_ns - begin_ns, 0) * 1e-9, mean_w, mean_w, mean_w
    edges_ns = np.linspace(begin_ns, end_ns, MOST_PIECES // 3 + 1).astype(np.int64)
    covered_s = np.diff(trace.covered_until_ns(edges_ns)) * 1e-9
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_w = np.where(covered_s > 0, np.diff(trace.energy_until_j(edges_ns)) / covered_s, np.nan)
    low_w, high_w = np.full(mean_w.size, np.inf), np.full(mean_w.size, -np.inf)
    cell = np.clip(np.searchsorted(edges_ns, start_ns, side="right") - 1, 0, mean_w.size - 1)
    np.minimum.at(low_w, cell, power_w)
    np.maximum.at(high_w, cell, power_w)
    low_w, high_w = np.fmin(low_w, mean_w), np.fmax(high_w, mean_w)
    return (edges_ns[:-1] - begin_ns) / 1e9, low_w, mean_w, high_w


# `sampling`: how far apart readings are, and how much that varies (GPyJoules' sample rate and jitter).

QUANTILES = (0.01, 0.5, 0.99)
_BINS_A_DECADE = 40
_MOST = 8


@styled
def sampling(
    channels: Mapping[str, Sequence[Series]], begin_ns: int | None = None, notes: Sequence[str] = ()
) -> Figure:
    """Channel → its readings in each run. Above the distribution of intervals, below intervals over time."""
    gaps = {name: np.concatenate([intervals_s(one)[1] for one in each]) for name, each in channels.items()}
    gaps = {name: values for name, values in list(gaps.items())[:_MOST] if values.size > 1}
    if not gaps:
        raise NotDrawn("no channel has three readings or more")
    figure, (ridges, jitter) = style.sheet(
        56 + 11 * len(gaps), rows=2, gridspec_kw={"height_ratios": [11 * len(gaps), 26]}
    )
    said = [_ridge(ridges, n, name, values, gaps) for n, (name, values) in enumerate(gaps.items())]
    ridges.set_ylim(len(gaps) - 0.78, -0.8)
    ridges.set_yticks([])
    ridges.spines["left"].set_visible(False)
    longest_s = 0.0
    for n, (name, values) in enumerate(gaps.items()):
        first = channels[name][0]
        t_ns, gap_s = intervals_s(first)
        t_s = (t_ns - (begin_ns if begin_ns is not None else int(first.t_ns[0]))) * 1e-9
        look: dict[str, Any] = {"ls": "none", "marker": "o", "mew": 0, "gid": name}
        size, colour = 3.0 if t_s.size < 100 else 1.6, style.SERIES[n % len(style.SERIES)]
        jitter.plot(t_s, gap_s / np.median(values), ms=size, color=colour, **look)
        longest_s = max(longest_s, float(t_s[-1]) if t_s.size else 0.0)
    _ratio(jitter)
    jitter.set_xlim(0, longest_s)
    style.duration(jitter.xaxis, "Time", longest_s)
    provenance = [(s.channel.device, s.channel.provenance) for each in channels.values() for s in each]
    said_below = [
        "above: distribution, with 1 %, 50 % and 99 % quantiles; CV: standard deviation ÷ mean",
        *(["below: the first run"] if max(len(each) for each in channels.values()) > 1 else []),
        *notes,
        *provenance_notes(provenance),
    ]
    return style.describe(figure, "Intervals between readings", "; ".join(said), said_below)


def _ridge(axes: Axes, n: int, name: str, values: Floats, gaps: Mapping[str, Floats]) -> str:
    every = np.concatenate(list(gaps.values()))
    low, high = float(every.min()) / 1.3, float(every.max()) * 1.3
    edges = np.geomspace(low, high, int(np.log10(high / low) * _BINS_A_DECADE) + 2)
    if n == 0:
        _log_time(axes, "Interval between readings", low, high)
    counts, _ = np.histogram(values, edges)
    colour = style.SERIES[n % len(style.SERIES)]
    axes.stairs(n - 0.42 * counts / counts.max(), edges, baseline=n, fill=True, color=colour, gid=name)
    axes.axhline(n, color=colour, lw=0.5)
    quantiles = np.quantile(values, QUANTILES)
    axes.plot(quantiles, [n + 0.11] * 3, color=style.INK, lw=0.8, marker="|", ms=4, gid=f"{name} quantiles")
    cv = float(values.std(ddof=1) / values.mean())
    low_s, middle_s, high_s = (si(float(quantile), "s") for quantile in quantiles)
    text = f"median {middle_s}, CV {100 * cv:.1f} %"
    side = axes.get_yaxis_transform()
    axes.text(0.0, n - 0.47, style.shortened(name, 30), transform=side, va="bottom", weight="bold")
    axes.text(1.0, n - 0.47, text, transform=side, va="bottom", ha="right")
    rate = si(1 / float(quantiles[1]), "Hz")
    return f"{name}: median {middle_s} ({rate}), 98 % within {low_s} to {high_s}, CV {100 * cv:.1f} %"


def _ratio(axes: Axes) -> None:
    """Twice as late is as far from the middle as twice as early."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()])
    axes.set_yscale("log")
    reach = max(float(max(values.max(), 1 / values.min())), 1.15) * 1.1
    axes.set_ylim(1 / reach, reach)
    ticks = (0.5, 0.8, 1, 1.25, 2) if reach < 2.2 else (0.1, 0.2, 0.5, 1, 2, 5, 10) if reach < 15 else ()
    decades = [10.0**n for n in range(-9, 10)]
    axes.yaxis.set_major_locator(FixedLocator([t for t in ticks or decades if 1 / reach <= t <= reach]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("Interval ÷ median (1)")
    axes.grid(axis="y")


def sampling_of_runs(runs: Sequence[LabelledRun]) -> Figure:
    channels: dict[str, list[Series]] = {}
    for run in runs:
        for series in run.run.recording.series("power"):
            channels.setdefault(series.channel.name, []).append(series)
    if not channels:
        raise NotDrawn(f"{runs[0].label} has no power of any device")
    order = sorted(channels, key=lambda name: (not name.startswith("gpu"), name))
    whole = ["of the whole program"] if runs[0].steps_ns else []
    return sampling({name: channels[name] for name in order}, runs[0].run.summary.begin_ns, whole)


def intervals_s(series: Series) -> tuple[Ints, Floats]:
    """When each interval between two readings ended, and its length. None spans a restart of the sampler."""
    order = np.argsort(series.t_ns, kind="stable")
    t_ns, segment = series.t_ns[order], series.segment[order]
    same = (np.diff(segment) == 0) & (np.diff(t_ns) > 0)
    return t_ns[1:][same], np.diff(t_ns)[same] * 1e-9


def _log_time(axes: Axes, text: str, low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    axes.set_xscale("log")
    axes.set_xlim(low, high)
    scale, unit = style.prefixed(float(np.sqrt(low * high)), "s")
    steps = (1, 2, 5) if high / low < 1000 else (1, 10)
    ticks = [n * 10.0**e for e in range(-9, 6) for n in steps if low <= n * 10.0**e <= high and n < 10]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"{text} ({unit})")
