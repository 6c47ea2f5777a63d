"""`sampling`: how far readings are apart, and how much that varies (GPyJoules' sample rate and jitter)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smaragdine.arrays import Floats, Ints
from smaragdine.recording.reader import Series
from smaragdine.report.figures import lettering, style
from smaragdine.report.figures.runs import NotDrawn, Run, provenance_notes
from smaragdine.report.figures.style import styled
from smaragdine.units import si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTILES = (0.01, 0.5, 0.99)
_BINS_A_DECADE = 40
_MOST = 8


@styled
def sampling(
    channels: Mapping[str, Sequence[Series]], begin_ns: int | None = None, notes: Sequence[str] = ()
) -> Figure:
    """Channel → its readings in each run. Above the distribution of intervals, below them over time."""
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
    axes.text(0.0, n - 0.47, lettering.shortened(name, 30), transform=side, va="bottom", weight="bold")
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


def sampling_of_runs(runs: Sequence[Run]) -> Figure:
    channels: dict[str, list[Series]] = {}
    for run in runs:
        for series in run.recording.series("power"):
            channels.setdefault(series.channel.name, []).append(series)
    if not channels:
        raise NotDrawn(f"{runs[0].label} has no power of any device")
    order = sorted(channels, key=lambda name: (not name.startswith("gpu"), name))
    whole = ["of the whole program"] if runs[0].steps_ns else []
    return sampling({name: channels[name] for name in order}, runs[0].overview.summary.begin_ns, whole)


def intervals_s(series: Series) -> tuple[Ints, Floats]:
    """When each interval between two readings ended, and how long it was. None spans a restarted sampler."""
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
