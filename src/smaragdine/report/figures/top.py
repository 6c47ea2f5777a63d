"""`top_energy` and `top_power`: names that take or draw the most (the paper's figure 5, STEF and STPF)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from smaragdine.accounting.arithmetic import average
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.merge import renaming
from smaragdine.accounting.rows import column
from smaragdine.arrays import Floats
from smaragdine.report.figures import lettering, style
from smaragdine.report.figures.runs import NotDrawn, Run, footprint_notes, one_setting, only, working_device
from smaragdine.report.figures.style import styled
from smaragdine.units import si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOP = 10
LEAST_SHARE = 0.001  # of the device's energy: the power of what hardly ran is a matter of chance


@dataclass(frozen=True)
class Bars:
    """Names by falling value, each with its standard deviation and 95 % half-width; nan: not known."""

    name: list[str]
    phase: list[str | None]
    value: Floats
    std: Floats
    interval: Floats
    spread_over: str


def top_energy(footprints: Sequence[Footprint], device: str | None = None, top: int = TOP) -> Figure:
    """Of one run, or of the mean of several; `device` is the one that does the work unless given."""
    return top_energies({"": footprints}, device, top)


def top_power(footprints: Sequence[Footprint], device: str | None = None, top: int = TOP) -> Figure:
    return top_powers({"": footprints}, device, top)


def top_energies(
    groups: Mapping[str, Sequence[Footprint]], device: str | None = None, top: int = TOP
) -> Figure:
    """Groups of runs beside each other, on the same scale."""
    device = device or working_device([one for each in groups.values() for one in each])
    bars = {name: energies(each, device) for name, each in groups.items()}
    return _draw(bars, groups, device, "Energy", "J", top)


def top_powers(
    groups: Mapping[str, Sequence[Footprint]], device: str | None = None, top: int = TOP
) -> Figure:
    device = device or working_device([one for each in groups.values() for one in each])
    bars = {name: powers(each, device) for name, each in groups.items()}
    return _draw(bars, groups, device, "Power", "W", top)


def top_energy_of_runs(runs: Sequence[Run]) -> Figure:
    return top_energy(_summaries(runs))


def top_power_of_runs(runs: Sequence[Run]) -> Figure:
    return top_power(_summaries(runs))


def _summaries(runs: Sequence[Run]) -> list[Footprint]:
    one_setting(runs)
    names = renaming([run.footprint for run in runs])
    return [run.summary_footprint(names) for run in runs]


def energies(footprints: Sequence[Footprint], device: str) -> Bars:
    rows, spread = _rows(footprints, device)
    if spread is not None:
        std_j = column(spread, "energy_std_j")
    else:
        std_j = _of_steps(rows) * column(rows, "energy_j")
    return _ranked(rows, column(rows, "energy_j"), std_j, column(rows, "uncertainty_j"), footprints, device)


def powers(footprints: Sequence[Footprint], device: str) -> Bars:
    rows, spread = _rows(footprints, device)
    energy_j, busy_s = column(rows, "energy_j"), column(rows, "busy_s")
    with np.errstate(divide="ignore", invalid="ignore"):
        power_w, interval_w = energy_j / busy_s, column(rows, "uncertainty_j") / busy_s
    std_w = np.full(power_w.size, np.nan)  # of one run: steps are long or short at the same power
    if spread is not None:
        power_w, std_w = column(spread, "power_mean_w"), column(spread, "power_std_w")
    least_j = LEAST_SHARE * footprints[0].devices[device].total_j
    kept = np.isfinite(power_w) & (energy_j >= least_j)
    power_w = np.where(kept, power_w, np.nan)
    return _ranked(rows, power_w, std_w, interval_w, footprints, device)


def _rows(footprints: Sequence[Footprint], device: str) -> tuple[pa.Table, pa.Table | None]:
    found = [only(footprint, [device]) for footprint in footprints]
    if len(found) == 1:
        return found[0].rows, None
    over_runs = average(found)
    return over_runs.mean.rows, over_runs.spread


def _of_steps(rows: pa.Table) -> Floats:
    """The standard deviation over steps, as a part of the mean: a footprint may be levelled."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return column(rows, "step_std_j") / column(rows, "step_mean_j")


def _ranked(
    rows: pa.Table,
    value: Floats,
    std: Floats,
    interval: Floats,
    footprints: Sequence[Footprint],
    device: str,
) -> Bars:
    order = np.argsort(-value, kind="stable")
    order = order[np.isfinite(value[order]) & (value[order] > 0)]
    steps = max(footprint.devices[device].steps for footprint in footprints)
    over = f"{len(footprints)} runs" if len(footprints) > 1 else f"{steps} steps" if steps > 1 else ""
    name, phase = rows["name"].to_pylist(), rows["phase"].to_pylist()
    return Bars(
        [name[i] for i in order],
        [phase[i] for i in order],
        value[order],
        std[order],
        interval[order],
        over if np.isfinite(std[order]).any() else "",
    )


@styled
def _draw(
    groups: Mapping[str, Bars],
    runs: Mapping[str, Sequence[Footprint]],
    device: str,
    what: str,
    unit: str,
    top: int,
) -> Figure:
    counts = {name: min(top, len(bars.name)) for name, bars in groups.items()}
    if not all(counts.values()):
        raise NotDrawn(f"no operation took any energy on {device}")
    count = max(counts.values())
    footprints = [only(one, [device]) for each in runs.values() for one in each]
    titled = len(groups) > 1
    figure, panels = style.sheet(
        height_mm=(26 if titled else 22) + 5.9 * count,
        columns=len(groups),
        wide_mm=style.PAGE_MM if titled else style.COLUMN_MM,
        sharex=True,
    )
    reach = max(_bars(axes, bars, top) for axes, bars in zip(panels, groups.values(), strict=True))
    of = "in a step" if footprints[0].devices[device].per_step else "while traced"
    title = f"{what} {of}" if unit == "J" else "Mean power while busy"
    for axes, (name, bars) in zip(panels, groups.items(), strict=True):
        axes.set_ylim(count - 0.6, -0.95)
        axes.set_xlim(0, reach * 1.03)
        style.quantity(axes.xaxis, f"{title} on {device}", unit, reach)
        if titled:
            axes.set_title(name, pad=16)
        style.phase_legend(axes, bars.phase[:top])
    over = dict.fromkeys(bars.spread_over for bars in groups.values() if bars.spread_over)
    notes = [f"whiskers: standard deviation over {' and '.join(over)}"] if over else []
    notes += (
        ["grey lines: 95 % interval"] if any(np.isfinite(b.interval).any() for b in groups.values()) else []
    )
    notes += [f"names with {100 * LEAST_SHARE:g} % of the energy or more"] if unit == "W" else []
    notes += (
        ["the order is not known: all intervals overlap"]
        if any(_unordered(b, top) for b in groups.values())
        else []
    )
    notes += [] if notes else ["uncertainty not known"]
    text = ". ".join(
        f"{name}: {_said(b, top, unit)}" if name else _said(b, top, unit) for name, b in groups.items()
    )
    notes += footprint_notes(footprints)
    return style.describe(figure, f"The {count} names with the most {what.lower()} on {device}", text, notes)


def _unordered(bars: Bars, top: int) -> bool:
    """Whether the last of them may as well be the first."""
    value, interval = bars.value[:top], bars.interval[:top]
    known = bool(np.isfinite(interval).all()) and value.size > 1
    return known and float((value - interval).max()) <= float((value + interval).min())


def _bars(axes: Axes, bars: Bars, top: int) -> float:
    """Draws one group; returns how far it reaches."""
    value, std, interval = bars.value[:top], bars.std[:top], bars.interval[:top]
    at = np.arange(value.size, dtype=float)
    axes.barh(at, value, 0.34, color=[style.colour_of_phase(phase) for phase in bars.phase[:top]])
    known = np.isfinite(interval)
    low = np.maximum(value - interval, 0.0)
    axes.hlines(at[known], low[known], (value + interval)[known], color="#9A9A9A", lw=0.8, gid="interval")
    if bars.spread_over:
        spread = np.isfinite(std)
        axes.errorbar(
            value[spread], at[spread], xerr=std[spread], fmt="none", color=style.INK, lw=0.9, capsize=2
        )
    for i, name in enumerate(bars.name[:top]):
        axes.text(0, at[i] - 0.23, lettering.shortened(name, style.COLUMN_MM - 8), va="bottom")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    reach = np.concatenate([value, value + np.nan_to_num(std), value + np.nan_to_num(interval)])
    return float(np.nanmax(reach))


def _said(bars: Bars, top: int, unit: str) -> str:
    return "; ".join(
        f"{name} ({style.named_phase(phase)}) {si(float(v), unit)}"
        for name, phase, v in zip(bars.name[:top], bars.phase[:top], bars.value[:top], strict=True)
    )
