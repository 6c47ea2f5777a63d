"""Prints summaries of recordings as tables for a terminal or a log file, and fits tables to the terminal."""

from __future__ import annotations

import io
import os
import re
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from smaragdine.accounting.baseline import NetEnergy
from smaragdine.accounting.regions import RegionTimes, longest
from smaragdine.accounting.summary import Epoch, RunSummary
from smaragdine.errors import shortened, signal_name, visible
from smaragdine.sensors.base import Absent, Channel
from smaragdine.units import J_PER_KWH, carbon_g, joule_seconds, joules, plain, plus_minus, seconds, si, watts

_PROGRAM = "program"  # the first column: the program's part of all devices
_MOST_EPOCHS = 12
_MOST_REGIONS = 20
_STATUS = {
    "complete": "green",
    "failed": "yellow",
    "killed": "yellow",
    "running": "cyan",
    "interrupted": "red",
}


def console(stream: IO[str] | None = None, width: int | None = None) -> Console:
    """A console that keeps tables whole in a pipe or a log, which have no width."""
    out: IO[str] = stream or sys.stdout or io.StringIO()  # None: closed by the caller
    width = width or (None if out.isatty() or "COLUMNS" in os.environ else 110)
    # Names may have square brackets: only `Text.from_markup` on our own words makes markup.
    return _Console(
        file=out,
        width=width,
        highlight=False,
        soft_wrap=False,
        markup=False,
        emoji=False,
        force_jupyter=False,
    )


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would exit with code 1; our callers know what a closed pipe means."""
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Keeps names in files and programs from reaching the terminal as commands."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                lines = map(visible, segment.text.split("\n"))
                yield Segment("\n".join(lines), segment.style)


def shortest_path(path: Path) -> str:
    """Relative if the path is inside the working folder, else absolute."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def plain_table(*headers: str, left: Collection[str] = (), folds: Collection[str] = ()) -> Table:
    """A table without lines. The first column and those in `left` are text, all others figures. On a narrow
    terminal the first gives way, and those in `folds`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for n, header in enumerate(headers):
        justify = "right" if n and header not in left else "left"
        table.add_column(
            Text(header), justify=justify, overflow="fold", no_wrap=n > 0 and header not in folds
        )
    return table


def _table(*headers: str, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < left else "right", no_wrap=i < left)
    return table


def run_tables(summary: RunSummary, net: Sequence[NetEnergy] = (), idle: bool = False) -> RenderableType:
    """What the program used, energy per device and epoch, and remarks. `idle`: there is no program."""
    parts: list[RenderableType] = []
    if summary.devices:
        parts += [Text(headline(summary, idle), style="bold"), Text(""), _device_table(summary, idle)]
    if net:
        parts += [Text(""), _net_table(net)]
    if summary.epochs:
        parts += [_Tables(summary, _epoch_table)]
    if summary.regions:
        parts += [_Tables(summary, _region_table)]
    parts += [Text.from_markup(line) for line in _remarks(summary, idle)]
    return Group(*parts)


def headline(summary: RunSummary, idle: bool = False) -> str:
    """The first figure of every view: what the program used, and of how much; else the machine's."""
    time = seconds(summary.duration_s)
    if summary.missing_s > 0.0005:
        time += f", {seconds(summary.missing_s)} of it without readings"
    parts = {d.provenance for d in summary.devices.values() if d.scope == "device" and d.energy_j is not None}
    how = "" if parts <= {"measured"} else f" ({' + '.join(sorted(parts))})"
    if summary.total_j is None:
        return f"no energy is known, in {time}"
    if idle:
        return f"the machine, without a program: {joules(summary.total_j)} in {time}{how}"
    if summary.program_j is None:
        return f"the machine: {joules(summary.total_j)} in {time}{how}; what your program used is not known"
    part = f" ({summary.program_j / summary.total_j:.0%})" if summary.total_j > 0 else ""
    of = f"of the machine's {joules(summary.total_j)}{part} in {time}"
    unsplit_j = summary.unsplit_j or 0.0
    if unsplit_j <= 1e-3 * summary.total_j:
        return f"your program: {joules(summary.program_j)} {of}{how}"
    least = f"your program: at least {joules(summary.program_j)} {of}{how}"
    return f"{least}; who used {joules(unsplit_j)} is not known"


def carbon_line(summary: RunSummary, intensity_g_per_kwh: float) -> str:
    """CO₂ of the program, and of the machine."""
    if summary.total_j is None:
        return "no CO₂: no energy is known"

    def emitted(used_j: float) -> str:
        return (
            f"{si(carbon_g(used_j, intensity_g_per_kwh), 'g')} of CO₂: {si(used_j / J_PER_KWH * 1000, 'Wh')}"
        )

    at = f" at {plain(intensity_g_per_kwh, 4)} g/kWh"
    if summary.missing_s > 0.0005:
        at += f", without the {seconds(summary.missing_s)} that have no readings"
    if summary.program_j is None:
        return f"the machine: {emitted(summary.total_j)}{at}"
    return f"your program: {emitted(summary.program_j)}{at}; the machine: {emitted(summary.total_j)}"


def _device_table(summary: RunSummary, idle: bool) -> Table:
    """Mean, peak and energy × delay are the machine's: the program's part is not known at each instant."""
    first = () if idle or summary.program_j is None else (_PROGRAM,)
    table = _table("device", *first, "energy" if idle else "machine", "mean", "peak", "energy × delay", "")
    table.columns[-1].justify = "left"
    adding = 0
    for device in summary.devices.values():
        if device.scope == "part":
            continue
        adding += device.scope == "device"
        label = device.provenance if device.scope == "device" else f"{device.provenance}, not in the sum"
        table.add_row(
            device.device,
            *(joules(device.program_j) for _ in first),
            joules(device.energy_j),
            watts(device.mean_w),
            watts(device.peak_w),
            joule_seconds(device.edp_js),
            Text(label, style="" if device.provenance == "measured" else "yellow"),
        )
    if adding > 1 and summary.total_j is not None:
        means = [d.mean_w for d in summary.devices.values() if d.scope == "device" and d.mean_w is not None]
        whole = all(d.edp_js is not None for d in summary.devices.values() if d.scope == "device")
        edp = joule_seconds(summary.total_j * summary.duration_s if whole else None)
        parts = {d.provenance for d in summary.devices.values() if d.scope == "device"}
        table.add_section()
        table.add_row(
            "sum",
            *(joules(summary.program_j) for _ in first),
            joules(summary.total_j),
            watts(sum(means)),
            "",
            edp,
            " + ".join(sorted(parts)),
            style="bold",
        )
    return table


@dataclass(frozen=True)
class _Tables:
    """One table, or several below each other on a narrow terminal. The program comes first."""

    summary: RunSummary
    table: Callable[[RunSummary, Sequence[str]], Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [name for name, device in self.summary.devices.items() if device.scope == "device"]
        if self.summary.program_j is not None:
            names.insert(0, _PROGRAM)
        at_once = max(1, (options.max_width - 30) // 17)
        for i in range(0, max(1, len(names)), at_once):
            yield Text("")
            yield self.table(self.summary, names[i : i + at_once])


def _epoch_table(summary: RunSummary, names: Sequence[str]) -> Table:
    table = _table("epoch", "time", *(_heading(name) for name in names))
    shown = summary.epochs if len(summary.epochs) <= _MOST_EPOCHS else summary.epochs[:3]
    for epoch in shown:
        energies = (joules(_epoch_j(epoch, name)) for name in names)
        table.add_row(_epoch_name(epoch), seconds(epoch.duration_s), *energies)
    if len(shown) < len(summary.epochs):
        table.add_row("…", "", *("" for _ in names))
    if len(summary.epochs) > 1:
        table.add_section()
        durations = [epoch.duration_s for epoch in summary.epochs]
        energies = [[_epoch_j(epoch, name) for epoch in summary.epochs] for name in names]
        table.add_row(
            f"mean of {len(summary.epochs)}",
            _mean_std(durations, "s"),
            *(_mean_std([v for v in values if v is not None], "J") for values in energies),
        )
    return table


def _region_table(summary: RunSummary, names: Sequence[str]) -> Table:
    table = _table("region", "times", "time", *(_heading(name) for name in names))
    for region in longest(summary.regions, _MOST_REGIONS):
        count = region.count
        energies = (
            joules(region.program_j if name == _PROGRAM else region.total_j.get(name)) for name in names
        )
        table.add_row(Text(visible(region.short)), f"{count:,}", seconds(region.duration_s), *energies)
        if len(region.spans_ns) > 1:
            each = (_mean_std(_each_j(region, name), "J") for name in names)
            table.add_row("  each", "", _mean_std(region.lengths_s, "s"), *each)
    left = len(summary.regions) - _MOST_REGIONS
    if left > 0:
        table.add_row(f"… {left:,} shorter ones", "", "", *("" for _ in names))
    return table


def _heading(name: str) -> str:
    return name if name == _PROGRAM else f"all {name}"


def _epoch_j(epoch: Epoch, name: str) -> float | None:
    return epoch.program_j if name == _PROGRAM else epoch.devices[name].energy_j


def _each_j(region: RegionTimes, name: str) -> list[float]:
    if name == _PROGRAM:
        return [each for each in region.programs_j if each is not None]
    return region.known_j(name)


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


def _remarks(summary: RunSummary, idle: bool) -> list[str]:
    lines: list[str] = []
    for device, share in summary.shares.items():
        lines.append(
            f"[dim]{escape(device)} busy time: program {share.program:.1%}, "
            f"other processes {share.other:.1%}, monitor {share.monitor:.1%}[/]"
        )
    lines += [f"[dim]{escape(visible(note))}[/]" for note in summary.notes]
    for device, of in summary.owners.items():
        # Memory that is estimated to draw the same all the time leaves it nothing but rounding.
        least_j = 1e-4 * (of.program_j + of.other_j)
        monitor = f", monitor {joules(of.monitor_j)}" if of.monitor_j > least_j else ""
        lines.append(
            f"[dim]{escape(device)} energy: program {joules(of.program_j)}, other processes and idle "
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
        status = f"[{_STATUS.get(summary.status, 'red')}]{summary.status}[/]"
        lines.append(f"the {'recording' if idle else 'program'}: {status}{how_it_ended(summary)}")
    lines += [f"[yellow]![/] {escape(visible(problem))}" for problem in summary.problems]
    return lines


def how_it_ended(summary: RunSummary) -> str:
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


# Tables that fit the terminal: names keep their room, figures give way.

_NAME_WIDTH = 24
_LONGEST = 120
_GAP = 2


@dataclass(frozen=True)
class Line:
    name: str
    figures: Mapping[str, str | Text]  # header → cell; missing ones stay empty
    style: str = ""


@dataclass(frozen=True)
class FittingTable:
    """All figures, or as many as leave room for names. A very long name is shortened in the middle."""

    title: str  # heads the column of names
    headers: Sequence[str]
    lines: Sequence[Line]
    gives_way: Sequence[str]  # headers that go first, if there is no room
    left: Sequence[str] = ()  # headers of columns with text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        headers = list(self.headers)
        widths = {header: self._width(header) for header in headers}
        names = [visible(line.name) for line in self.lines]
        longest = max([len(self.title), *map(len, names)])
        dropped: list[str] = []
        for header in self.gives_way:
            if min(_NAME_WIDTH, longest) + sum(widths[kept] + _GAP for kept in headers) <= options.max_width:
                break
            if header in headers:
                headers.remove(header)
                dropped.append(header)
        room = options.max_width - sum(widths[kept] + _GAP for kept in headers)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        table.add_column(Text(visible(self.title)), overflow="fold", ratio=1)
        for header in headers:
            table.add_column(header, justify="left" if header in self.left else "right", no_wrap=True)
        for name, line in zip(names, self.lines, strict=True):
            cells = (line.figures.get(header, "") for header in headers)
            shown = (cell if isinstance(cell, Text) else Text(cell) for cell in cells)
            # Kernels have names of a thousand characters.
            table.add_row(Text(_folded(shortened(name, _LONGEST), room)), *shown, style=line.style)
        yield table
        if dropped:
            yield Text(f"no room for {', '.join(dropped)}", style="dim")

    def _width(self, header: str) -> int:
        return max(len(header), *(len(line.figures.get(header, "")) for line in self.lines), 0)


def _folded(name: str, room: int) -> str:
    """Breaks a long name after slashes, as a path is read."""
    lines = [""]
    for part in re.findall(r"[^/]*/|[^/]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > room:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
