"""`cumulative`: energy used since the beginning, mean and standard deviation over runs (GPyJoules' plots)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from smaragdine.accounting.power import PowerTrace
from smaragdine.arrays import Floats
from smaragdine.report.figures import lettering, style
from smaragdine.report.figures.runs import Run, by_setting, power_notes, time_notes
from smaragdine.report.figures.style import styled
from smaragdine.units import joules, seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOTAL_CELLS = 200

Powered = tuple[Sequence[PowerTrace], int, int]  # the power of a run's devices, its beginning and end


@styled
def cumulative(settings: Mapping[str, Sequence[Powered]], of: str, notes: Sequence[str] = ()) -> Figure:
    """Setting → its runs. A line ends with the shortest of its runs; dots are where each run ended."""
    figure, (axes,) = style.sheet(height_mm=58 + 3.2 * max(0, len(settings) - 3))
    names, key = lettering.distinct(settings, 26)
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


def cumulative_of_runs(runs: Sequence[Run]) -> Figure:
    shared = [device for device in runs[0].traces if all(device in run.traces for run in runs)]
    settings = {
        name: [([run.traces[device] for device in shared], *run.bounds_ns) for run in each]
        for name, each in by_setting(runs).items()
    }
    return cumulative(settings, " + ".join(shared), [*time_notes(runs), *power_notes(runs, shared)])


def over_runs(runs: Sequence[Powered]) -> tuple[Floats, Floats, Floats]:
    """Seconds on an even grid up to the end of the shortest run; mean and spread of the energy."""
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
