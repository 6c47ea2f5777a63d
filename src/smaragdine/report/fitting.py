"""A table of names and figures that fits the terminal: names keep their room, figures give way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from smaragdine.errors import shortened, visible

_NAME_WIDTH = 24
_LONGEST = 120
_GAP = 2


@dataclass(frozen=True)
class Line:
    name: str
    figures: Mapping[str, str | Text]  # by header; what is not there stays empty
    style: str = ""


@dataclass(frozen=True)
class FittingTable:
    """All figures, or as many as leave the names room. A very long name is shortened in the middle."""

    title: str  # of the names
    headers: Sequence[str]
    lines: Sequence[Line]
    gives_way: Sequence[str]  # headers, first to last, where there is no room
    left: Sequence[str] = ()  # headers of text, not figures

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
    """Over several lines, where it is too long for one: after slashes, as a path is read."""
    lines = [""]
    for part in re.findall(r"[^/]*/|[^/]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > room:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
