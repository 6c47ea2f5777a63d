"""Draws `epochs`, `cumulative`, `epoch_power` and `mean_power`: energy, time and power of epochs and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.repeats import LayerTimes, Repeated, Stretches, laid_over
from smaragdine.accounting.summary import Epoch
from smaragdine.arrays import Floats
from smaragdine.report.figures import style
from smaragdine.report.figures.power import Traced, common_device
from smaragdine.report.figures.runs import (
    LabelledRun,
    NotDrawn,
    by_setting,
    one_setting,
    power_notes,
    time_notes,
    working_device,
)
from smaragdine.report.figures.style import styled
from smaragdine.sweep.curves import Averaged, average, rate_hz, relative_s, resample
from smaragdine.units import joules, seconds, watts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_FEW = 30  # up to so many epochs are also shown as dots


@styled
def epochs(
    settings: Mapping[str, Sequence[Epoch]], devices: Sequence[str], notes: Sequence[str] = ()
) -> Figure:
    """Boxes of energy and time over epochs (GPyJoules' box plots): setting → epochs of one run or many."""
    count = len(settings)
    figure, (energy, time) = style.sheet(52 + 1.5 * count, columns=2)
    energies_j = {name: _energies_j(each, devices) for name, each in settings.items()}
    times_s = {name: [epoch.duration_s for epoch in each] for name, each in settings.items()}
    room_mm = 30 / count
    values, title = _ticks([*settings])
    names, key = style.distinct(values, max(room_mm, 12))
    for axes, measured in ((energy, energies_j), (time, times_s)):
        _boxes(axes, measured, names)
        if any(style.width_mm(name) + 1 > room_mm for name in names):
            axes.tick_params(axis="x", rotation=90)
        axes.set_xlabel(style.shortened(title, 30))
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


def epochs_of_runs(runs: Sequence[LabelledRun]) -> Figure:
    for run in runs:
        if not run.run.summary.epochs:
            raise NotDrawn(f"{run.label} has no epochs: none was announced by a framework or marked")
    shared = [device for device in runs[0].traces if all(device in run.traces for run in runs)]
    settings = {
        name: [
            epoch
            for run in each
            for epoch in run.run.summary.epochs
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
    """What differs between settings, for an axis's ticks, and what they have in common, for its name."""
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
            # Side by side in the order of epochs: no random jitter is needed to keep dots apart.
            off = np.linspace(-0.18, 0.18, len(each)) if len(each) > 1 else np.zeros(1)
            axes.plot(at + off, each, ls="none", marker="o", ms=1.6, mew=0, color=style.FAINT, gid="dots")
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")


# `cumulative`: energy used since the beginning, mean and standard deviation over runs (GPyJoules' plots).

TOTAL_CELLS = 200

Powered = tuple[Sequence[PowerTrace], int, int]  # the power of a run's devices, its beginning and end


@styled
def cumulative(settings: Mapping[str, Sequence[Powered]], of: str, notes: Sequence[str] = ()) -> Figure:
    """Setting → its runs. A line ends with its shortest run; dots mark where each run ended."""
    figure, (axes,) = style.sheet(height_mm=58 + 3.2 * max(0, len(settings) - 3))
    names, key = style.distinct(settings, 26)
    longest_s, most_j, said = 0.0, 0.0, list[str]()
    for n, (setting, runs) in enumerate(settings.items()):
        colour, dashes = style.SERIES[n % len(style.SERIES)], style.DASHES[n % len(style.DASHES)]
        t_s, mean_j, std_j = over_runs(runs)
        if len(runs) > 1:
            axes.fill_between(t_s, mean_j - std_j, mean_j + std_j, color=colour, alpha=0.25, lw=0)
        axes.plot(t_s, mean_j, color=colour, ls=dashes, label=names[n])
        ends = [((end - begin) * 1e-9, _energy_j(traces, begin, end)) for traces, begin, end in runs]
        axes.plot(*zip(*ends, strict=True), ls="none", marker="o", ms=2.5, mew=0, color=colour, gid="ends")
        longest_s, most_j = max(longest_s, *(t for t, _ in ends)), max(most_j, *(e for _, e in ends))
        mean_end_s, mean_end_j = (sum(each) / len(ends) for each in zip(*ends, strict=True))
        said.append(f"{setting}: {joules(mean_end_j)} in {seconds(mean_end_s)}")
    axes.set_xlim(0, longest_s * 1.02)
    axes.set_ylim(0, most_j * 1.05)
    axes.grid()
    style.duration(axes.xaxis, "Time", longest_s)
    style.quantity(axes.yaxis, "Energy used", "J", most_j)
    if len(settings) > 1:
        limits = all(setting.endswith(" W") for setting in settings)
        style.legend_above(axes, title="Power limit" if limits else None)
    counts = {len(runs) for runs in settings.values()}
    bands = "bands: standard deviation over runs; dots: where each run ended"
    spread = "one run: no spread; the dot is its end" if counts == {1} else bands
    return style.describe(figure, f"Energy of {of} over time", "; ".join(said), [of, spread, *key, *notes])


def cumulative_of_runs(runs: Sequence[LabelledRun]) -> Figure:
    shared = [device for device in runs[0].traces if all(device in run.traces for run in runs)]
    settings = {
        name: [([run.traces[device] for device in shared], *run.bounds_ns) for run in each]
        for name, each in by_setting(runs).items()
    }
    return cumulative(settings, " + ".join(shared), [*time_notes(runs), *power_notes(runs, shared)])


def over_runs(runs: Sequence[Powered]) -> tuple[Floats, Floats, Floats]:
    """Seconds on an even grid, up to the end of the shortest run; mean and spread of the energy."""
    shortest_ns = min(end - begin for _, begin, end in runs)
    t_ns = np.linspace(0, shortest_ns, TOTAL_CELLS + 1).astype(np.int64)
    each_j = np.array([_until_j(traces, begin, t_ns) for traces, begin, _ in runs])
    std_j = each_j.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(t_ns.size)
    return t_ns / 1e9, each_j.mean(axis=0), std_j


def _until_j(traces: Sequence[PowerTrace], begin_ns: int, t_ns: np.ndarray) -> Floats:
    sums = [trace.energy_until_j(begin_ns + t_ns) - trace.energy_until_j(begin_ns) for trace in traces]
    return np.sum(sums, axis=0)


def _energy_j(traces: Sequence[PowerTrace], begin_ns: int, end_ns: int) -> float:
    return sum(trace.energy_j(begin_ns, end_ns) for trace in traces)


# `epoch_power`: the power of an epoch, averaged over epochs, and when layers ran (the paper's figure 3).
#
# Epochs are laid over each other at their beginnings. If a run has traced steps but no epochs, steps are.

_CELLS = 480
_LAYER = (style.VERMILLION, 0.55)  # colour, and how dense it is if the layer ran in every epoch
_OTHERS = (style.SKY, 0.35)


@styled
def epoch_power(
    found: Repeated, device: str, ran: LayerTimes | None = None, notes: Sequence[str] = ()
) -> Figure:
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


def epoch_power_of_runs(runs: Sequence[LabelledRun], layer: str | None = None) -> Figure:
    """Highlights the first of the layers that repeat, or the one named, in the first run that traced it."""
    one_setting(runs)
    traced = [run for run in runs if run.run.footprint is not None]
    device = working_device([run.footprint for run in traced]) if traced else common_device(runs)
    found = laid_over([run.run for run in runs], device, layer)
    if found is None:
        raise NotDrawn("no run has epochs or traced steps")
    repeated, ran = found
    return epoch_power(repeated, device, ran, power_notes(runs, [device]))


def _shade(axes: Axes, stretches: Stretches, size: tuple[float, float], color: str, density: float) -> None:
    """As dense as in the legend if it ran in every epoch, and in proportion if it ran in fewer."""
    from matplotlib.colors import to_rgb

    if not stretches:
        return
    cells = np.zeros((1, _CELLS, 4))
    cells[..., :3] = to_rgb(color)
    cells[..., 3] = density * _part(stretches, np.linspace(0, size[0], _CELLS + 1))
    axes.imshow(cells, extent=(0, size[0], 0, size[1]), aspect="auto", interpolation="nearest", zorder=0)


def _part(stretches: Stretches, edges_s: Floats) -> Floats:
    """The part of the epochs in which it ran, between each edge and the next."""
    until_s = np.zeros(len(edges_s))
    for spans in stretches:
        begin_s, end_s = np.array(spans).T
        until_s += np.clip(edges_s[:, None], begin_s, end_s).sum(axis=1)
    return np.diff(until_s) / np.diff(edges_s) / len(stretches)


def _legend(axes: Axes, ran: LayerTimes | None) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = list(axes.get_lines()[:1])
    if ran is not None and ran.spans_s:
        color, density = _LAYER
        handles.append(Patch(fc=color, alpha=density, label=style.shortened(ran.layer, 44)))
    if ran is not None and ran.spans_s and ran.others_s:
        color, density = _OTHERS
        handles.append(Patch(fc=color, alpha=density, label=f"the {len(ran.others)} others"))
    style.legend_above(axes, handles)


# `mean_power`: the mean power curve of each setting over its runs, with the spread (GPyJoules' averages).

POWER_CELLS = 400  # more than the dots of a column


@styled
def mean_power(settings: Mapping[str, Sequence[Traced]], device: str, notes: Sequence[str] = ()) -> Figure:
    """Setting → its runs. At each time, the mean is over runs that have not ended."""
    figure, (axes,) = style.sheet(height_mm=58 + 3.2 * max(0, len(settings) - 3))
    names, key = style.distinct(settings, 26)
    said: list[str] = []
    highest_w, longest_s = 0.0, 0.0
    for n, (setting, runs) in enumerate(settings.items()):
        colour, dashes = style.SERIES[n % len(style.SERIES)], style.DASHES[n % len(style.DASHES)]
        t_s, mean_w, std_w = _cells(averaged(runs))
        if len(runs) > 1:
            axes.fill_between(t_s, mean_w - std_w, mean_w + std_w, color=colour, alpha=0.25, lw=0)
        axes.plot(t_s, mean_w, color=colour, ls=dashes, label=names[n], gid=f"mean {setting}")
        highest_w = max(highest_w, float(np.nanmax(mean_w + np.nan_to_num(std_w))))
        longest_s = max(longest_s, float(t_s[-1]))
        said.append(f"{setting}: {watts(float(np.nanmean(mean_w)))}")
    axes.set_xlim(0, longest_s)
    axes.set_ylim(0, highest_w * 1.05)
    axes.grid()
    style.duration(axes.xaxis, "Time", longest_s)
    style.quantity(axes.yaxis, f"Power of {device}", "W", highest_w)
    if len(settings) > 1:
        limits = all(setting.endswith(" W") for setting in settings)
        style.legend_above(axes, title="Power limit" if limits else None)
    several = any(len(runs) > 1 for runs in settings.values())
    spread = "bands: standard deviation over runs that still run" if several else "one run: no spread"
    how = "cubic interpolation at twice the sensor's rate, since the first reading"
    notes = [spread, how, *key, *notes]
    return style.describe(figure, f"Mean power of {device} over time", "; ".join(said), notes)


def mean_power_of_runs(runs: Sequence[LabelledRun]) -> Figure:
    device = common_device(runs)
    settings = {
        name: [(run.traces[device], *run.bounds_ns) for run in each]
        for name, each in by_setting(runs).items()
    }
    return mean_power(settings, device, [*time_notes(runs), *power_notes(runs, [device])])


def averaged(runs: Sequence[Traced]) -> Averaged:
    readings = [_readings(*run) for run in runs]
    if any(t_ns.size < 4 for t_ns, _, _ in readings):
        raise NotDrawn("a run has too few readings for a curve")
    hz = max(rate_hz(relative_s(t_ns)) for t_ns, _, _ in readings)
    curves: list[Floats] = []
    for t_ns, power_w, hold_ns in readings:
        grid_s, curve_w = resample(relative_s(t_ns), power_w, hz)
        # Across a gap, interpolation would invent power that nobody saw.
        after = np.clip(np.searchsorted(relative_s(t_ns), grid_s), 1, t_ns.size - 1)
        seen = np.diff(t_ns)[after - 1] <= max(hold_ns, 1)
        curves.append(np.where(seen, np.maximum(curve_w, 0.0), np.nan))
    return average(curves, hz)


def _readings(trace: PowerTrace, begin_ns: int, end_ns: int) -> tuple[np.ndarray, Floats, int]:
    """A reading covers the time before it, so its time is its end."""
    inside = (trace.start_ns >= begin_ns) & (trace.end_ns <= end_ns)
    return trace.end_ns[inside], trace.power_w[inside], trace.hold_ns


def _cells(found: Averaged) -> tuple[Floats, Floats, Floats]:
    """As many points as one can see, each the mean of those it stands for."""
    each = max(1, -(-found.t_s.size // POWER_CELLS))
    start = np.arange(0, found.t_s.size, each)
    known = np.isfinite(found.mean)
    counts = np.maximum(np.add.reduceat(known.astype(np.float64), start), 1e-300)

    def cells(values: Floats) -> Floats:
        sums = np.add.reduceat(np.where(np.isfinite(values), values, 0.0), start)
        mean = np.where(counts < 1, np.nan, sums / counts)
        return np.asarray(mean, dtype=np.float64)

    return found.t_s[start], cells(found.mean), cells(found.std)
