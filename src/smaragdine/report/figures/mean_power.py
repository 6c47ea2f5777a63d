"""`mean_power`: the mean power curve of each setting over its runs, with the spread (GPyJoules' averages)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from smaragdine.accounting.power import PowerTrace
from smaragdine.arrays import Floats
from smaragdine.report.figures import lettering, style
from smaragdine.report.figures.power import Traced, common_device
from smaragdine.report.figures.runs import NotDrawn, Run, by_setting, power_notes, time_notes
from smaragdine.report.figures.style import styled
from smaragdine.sweep.curves import Averaged, average, rate_hz, relative_s, resample
from smaragdine.units import watts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POWER_CELLS = 400  # more than a column has dots


@styled
def mean_power(settings: Mapping[str, Sequence[Traced]], device: str, notes: Sequence[str] = ()) -> Figure:
    """Setting → its runs. At each time the mean over the runs that have not ended."""
    figure, (axes,) = style.sheet(height_mm=58 + 3.2 * max(0, len(settings) - 3))
    names, key = lettering.distinct(settings, 26)
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


def mean_power_of_runs(runs: Sequence[Run]) -> Figure:
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
        # Over a gap the interpolation would invent power that nobody saw.
        after = np.clip(np.searchsorted(relative_s(t_ns), grid_s), 1, t_ns.size - 1)
        seen = np.diff(t_ns)[after - 1] <= max(hold_ns, 1)
        curves.append(np.where(seen, np.maximum(curve_w, 0.0), np.nan))
    return average(curves, hz)


def _readings(trace: PowerTrace, begin_ns: int, end_ns: int) -> tuple[np.ndarray, Floats, int]:
    """A reading speaks for the time before it: its own time is its end."""
    inside = (trace.start_ns >= begin_ns) & (trace.end_ns <= end_ns)
    return trace.end_ns[inside], trace.power_w[inside], trace.hold_ns


def _cells(found: Averaged) -> tuple[Floats, Floats, Floats]:
    """As many points as can be seen, each the mean of those it stands for."""
    each = max(1, -(-found.t_s.size // POWER_CELLS))
    start = np.arange(0, found.t_s.size, each)
    known = np.isfinite(found.mean)
    counts = np.maximum(np.add.reduceat(known.astype(np.float64), start), 1e-300)

    def cells(values: Floats) -> Floats:
        sums = np.add.reduceat(np.where(np.isfinite(values), values, 0.0), start)
        mean = np.where(counts < 1, np.nan, sums / counts)
        return np.asarray(mean, dtype=np.float64)

    return found.t_s[start], cells(found.mean), cells(found.std)
