"""`phases`: how each device's energy splits into phases and idle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from smaragdine.accounting.arithmetic import adding_devices, average
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.noise import deviation
from smaragdine.accounting.overview import phases_j
from smaragdine.report.figures import lettering, style
from smaragdine.report.figures.runs import NotDrawn, Run, footprint_notes, one_setting
from smaragdine.report.figures.stages import IDLE, worth_saying
from smaragdine.report.figures.style import styled
from smaragdine.units import joules

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def phases(runs: Sequence[Footprint]) -> Figure:
    """Of each device, the mean over runs; a whisker at the end of a part is the spread of that part alone."""
    mean = average(runs).mean
    devices = [device for device in adding_devices(mean) if mean.devices[device].total_j > 0]
    devices.sort(key=lambda device: (not device.startswith("gpu"), device))
    if not devices:
        raise NotDrawn("no device has any energy")
    figure, (axes,) = style.sheet(height_mm=26 + 7 * len(devices))
    found = [{device: _shares(one, device) for device in devices if device in one.devices} for one in runs]
    every = style.ordered_phases(phase for one in found for shares in one.values() for phase in shares)
    for at, device in enumerate(devices):
        left = 0.0
        for phase in every:
            shares = [one[device].get(phase, 0.0) for one in found if device in one]
            share = math.fsum(shares) / len(shares)
            colour = style.colour_of_phase(phase)
            axes.barh(at, share, 0.62, left, color=colour)
            text = f"{share:.0%}"
            if share * 55 > lettering.width_mm(text) + 1:
                axes.text(left + share / 2, at, text, ha="center", va="center", color=style.ink_on(colour))
            left += share
            if len(shares) > 1 and 0 < left < 0.9999:
                off = deviation(shares)
                axes.errorbar(left, at, xerr=off, color=style.INK, lw=0.8, capsize=1.5, capthick=0.8)
        axes.text(1.02, at, joules(mean.devices[device].total_j), va="center")
    axes.set_yticks(range(len(devices)), devices)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    axes.set_xlabel("Share of the device's energy (%)")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    style.phase_legend(axes, worth_saying(shares for one in found for shares in one.values()))
    of = "a step" if all(total.per_step for total in mean.devices.values()) else "what was traced"
    text = "; ".join(
        f"{device}: " + ", ".join(f"{phase} {share:.1%}" for phase, share in _shares(mean, device).items())
        for device in devices
    )
    spread = f"whiskers: standard deviation over {len(runs)} runs" if len(runs) > 1 else "one run: no spread"
    notes = [f"energy of {of}", spread, *footprint_notes(runs)]
    return style.describe(figure, "Energy of each device by phase", text, notes)


def phases_of_runs(runs: Sequence[Run]) -> Figure:
    one_setting(runs)
    return phases([run.footprint for run in runs])


def _shares(footprint: Footprint, device: str) -> dict[str, float]:
    total = footprint.devices[device]
    energies_j = {**phases_j(footprint, [device]), IDLE: total.idle_j}
    whole_j = math.fsum(energies_j.values())
    return {phase: energy_j / whole_j for phase, energy_j in energies_j.items()} if whole_j > 0 else {}
