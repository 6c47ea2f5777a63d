"""Tables for a terminal or a log file."""

from __future__ import annotations

import io
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from smaragdine.accounting.baseline import NetEnergy
from smaragdine.accounting.regions import longest
from smaragdine.accounting.summary import Epoch, RunSummary
from smaragdine.errors import signal_name
from smaragdine.report.fitting import visible
from smaragdine.sensors.base import Absent, Channel
from smaragdine.units import J_PER_KWH, carbon_g, joule_seconds, joules, plain, plus_minus, seconds, si, watts

_MOST_EPOCHS = 12
_MOST_REGIONS = 20
_STATUS = {
    "complete": "green",
    "failed": "yellow",
    "killed": "yellow",
    "running": "cyan",
    "interrupted": "red",
}


def console(stream: IO[str] | None = None) -> Console:
    """A console that keeps its tables whole in a pipe or a log, where there is no width to ask for."""
    out: IO[str] = stream or sys.stdout or io.StringIO()  # none at all: closed by the caller
    width = None if out.isatty() or "COLUMNS" in os.environ else 110
    return _Console(file=out, width=width, highlight=False, soft_wrap=False)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the program with exit code 1; whoever called us knows what a closed pipe means."""
        raise BrokenPipeError


def shortest_path(path: Path) -> str:
    """Relative where that is inside the working folder, else absolute."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _table(*headers: str, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < left else "right", no_wrap=i < left)
    return table


def run_tables(summary: RunSummary, net: Sequence[NetEnergy] = ()) -> RenderableType:
    """Energy per device, per epoch where there are epochs, and all there is to say about the figures."""
    parts: list[RenderableType] = [_device_table(summary)] if summary.devices else []
    if net:
        parts += [Text(""), _net_table(net)]
    if summary.epochs:
        parts += [_Tables(summary, _epoch_table)]
    if summary.regions:
        parts += [_Tables(summary, _region_table)]
    parts += [Text.from_markup(line) for line in _remarks(summary)]
    return Group(*parts)


def carbon_line(summary: RunSummary, intensity_g_per_kwh: float) -> str:
    """Of whole devices, as the sum is."""
    if summary.total_j is None:
        return "no CO₂: no energy is known"
    emitted = si(carbon_g(summary.total_j, intensity_g_per_kwh), "g")
    of = f"{si(summary.total_j / J_PER_KWH * 1000, 'Wh')} at {plain(intensity_g_per_kwh, 4)} g/kWh"
    return f"{emitted} of CO₂: {of}"


def _device_table(summary: RunSummary) -> Table:
    table = _table("device", "energy", "mean", "peak", "time", "energy × delay", "")
    table.columns[-1].justify = "left"
    time = seconds(summary.duration_s)
    adding = 0
    for device in summary.devices.values():
        if device.scope == "part":
            continue
        adding += device.scope == "device"
        label = device.provenance if device.scope == "device" else f"{device.provenance}, not in the sum"
        table.add_row(
            device.device,
            joules(device.energy_j),
            watts(device.mean_w),
            watts(device.peak_w),
            time,
            joule_seconds(device.edp_js),
            Text(label, style="" if device.provenance == "measured" else "yellow"),
        )
    if adding > 1 and summary.total_j is not None:
        means = [d.mean_w for d in summary.devices.values() if d.scope == "device" and d.mean_w is not None]
        edp = joule_seconds(summary.total_j * summary.duration_s)
        parts = {d.provenance for d in summary.devices.values() if d.scope == "device"}
        table.add_section()
        table.add_row(
            "sum",
            joules(summary.total_j),
            watts(sum(means)),
            "",
            time,
            edp,
            " + ".join(sorted(parts)),
            style="bold",
        )
    return table


@dataclass(frozen=True)
class _Tables:
    """One table, or several below each other where the terminal is too narrow for all devices."""

    summary: RunSummary
    table: Callable[[RunSummary, Sequence[str]], Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [name for name, device in self.summary.devices.items() if device.scope == "device"]
        at_once = max(1, (options.max_width - 30) // 17)
        for i in range(0, max(1, len(names)), at_once):
            yield Text("")
            yield self.table(self.summary, names[i : i + at_once])


def _epoch_table(summary: RunSummary, names: Sequence[str]) -> Table:
    table = _table("epoch", "time", *names)
    shown = summary.epochs if len(summary.epochs) <= _MOST_EPOCHS else summary.epochs[:3]
    for epoch in shown:
        table.add_row(
            _epoch_name(epoch), seconds(epoch.duration_s), *(joules(epoch.devices[n].energy_j) for n in names)
        )
    if len(shown) < len(summary.epochs):
        table.add_row("…", "", *("" for _ in names))
    if len(summary.epochs) > 1:
        table.add_section()
        durations = [epoch.duration_s for epoch in summary.epochs]
        energies = [[e.devices[n].energy_j for e in summary.epochs] for n in names]
        table.add_row(
            f"mean of {len(summary.epochs)}",
            _mean_std(durations, "s"),
            *(_mean_std([v for v in values if v is not None], "J") for values in energies),
        )
    return table


def _region_table(summary: RunSummary, names: Sequence[str]) -> Table:
    table = _table("region", "times", "time", *names)
    for region in longest(summary.regions, _MOST_REGIONS):
        count = len(region.spans_ns)
        energies = (joules(region.total_j.get(name)) for name in names)
        table.add_row(Text(visible(region.short)), f"{count:,}", seconds(region.duration_s), *energies)
        if count > 1:
            each = (_mean_std(region.known_j(name), "J") for name in names)
            table.add_row("  each", "", _mean_std(region.lengths_s, "s"), *each)
    left = len(summary.regions) - _MOST_REGIONS
    if left > 0:
        table.add_row(f"… {left:,} shorter ones", "", "", *("" for _ in names))
    return table


def _epoch_name(epoch: Epoch) -> str:
    return "?" if epoch.index is None else str(epoch.index)


def _mean_std(values: Sequence[float], unit: str) -> str:
    if len(values) < 2:
        return si(values[0], unit) if values else "–"
    return plus_minus(statistics.fmean(values), statistics.stdev(values), unit)


def _net_table(net: Sequence[NetEnergy]) -> Table:
    table = _table("above idle", "energy", "idle power", "idle energy")
    for row in net:
        table.add_row(row.device, joules(row.net_j), watts(row.idle_w), joules(row.idle_j))
    return table


def _remarks(summary: RunSummary) -> list[str]:
    lines: list[str] = []
    for device, share in summary.shares.items():
        lines.append(
            f"[dim]{device} busy time: program {share.program:.1%}, other processes {share.other:.1%}, "
            f"monitor {share.monitor:.1%}[/]"
        )
    for device, of in summary.owners.items():
        # Memory that is estimated to draw the same at any time leaves nothing for it but rounding.
        least_j = 1e-4 * (of.program_j + of.other_j)
        monitor = f", monitor {joules(of.monitor_j)}" if of.monitor_j > least_j else ""
        lines.append(
            f"[dim]{device} energy: program {joules(of.program_j)}, other processes and idle "
            f"{joules(of.other_j)}{monitor}[/]"
        )
    if any(device.provenance == "estimated" for device in summary.devices.values()):
        lines.append(
            "[yellow]estimated[/] figures come from utilisation and rated power: see smaragdine doctor"
        )
    if not summary.devices:
        lines.append("[red]nothing was measured[/]: see smaragdine doctor")
    if summary.missing_s > 0.0005:
        lines.append(
            f"[red]missing[/] {seconds(summary.missing_s)} of {seconds(summary.duration_s)}: no readings"
        )
    if summary.status != "complete":
        lines.append(f"the program: [{_STATUS.get(summary.status, 'red')}]{summary.status}[/]{_how(summary)}")
    lines += [f"[yellow]![/] {escape(visible(problem))}" for problem in summary.problems]
    return lines


def _how(summary: RunSummary) -> str:
    if summary.signal:
        return f" by {signal_name(summary.signal)}"
    return f" with exit code {summary.exit_code}" if summary.exit_code else ""


def doctor_tables(channels: Sequence[Channel], absent: Sequence[Absent]) -> RenderableType:
    power = [
        channel
        for channel in channels
        if channel.unit in ("J", "W") and channel.quantity in ("energy", "power")
    ]
    table = _table("channel", "provenance", "update", "how", left=4)
    table.columns[3].no_wrap = False
    table.columns[3].overflow = "fold"
    for channel in power:
        style = "green" if channel.provenance == "measured" else "yellow"
        how = f"{channel.sensor}: {channel.detail}" if channel.detail else channel.sensor
        table.add_row(
            channel.name, Text(channel.provenance, style=style), f"{channel.period_ms:g} ms", Text(how)
        )
    parts: list[RenderableType] = [
        table if power else Text("no power can be measured or estimated here", style="red")
    ]
    others = sorted({channel.quantity for channel in channels if channel not in power})
    if others:
        parts += [Text(""), Text(f"also recorded: {', '.join(others)}", style="dim")]
    for gap in absent:
        parts += [
            Text(""),
            Text.assemble((gap.channel, "bold"), (" absent: ", "red"), gap.reason),
            Text(f"  → {gap.remedy}"),
        ]
    return Group(*parts)
