"""A footprint as tables for a terminal, and its tree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from smaragdine.accounting.diagram import Node
from smaragdine.accounting.footprint import DeviceTotal, Footprint, with_power
from smaragdine.units import joules, seconds, watts

# What gives way, first to last, where a terminal is too narrow for names and all figures.
_GIVES_WAY = ("basis", "busy", "count", "power", "share", "± 95 %", "phase")
_NAME_WIDTH = 24
_GAP = 2
_NONE = "–"
_LEFT = ("phase", "basis")
# They would move the cursor, break the table, or turn the text around.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def footprint_tables(footprint: Footprint, top: int) -> RenderableType:
    """Per device its names by falling energy, idle, other processes, and the sum they make."""
    parts: list[RenderableType] = []
    for device, total in footprint.devices.items():
        parts += [_DeviceTable(device, total, footprint, top), *_device_remarks(total), Text("")]
    parts += footprint_remarks(footprint)
    if parts and isinstance(parts[-1], Text) and not parts[-1].plain:
        parts.pop()
    return Group(*parts)


def footprint_remarks(footprint: Footprint) -> list[Text]:
    """What one must know besides the figures."""
    lines = [
        f"{device}: {count:,} event{'s' if count > 1 else ''}, but nobody measured its power"
        for device, count in footprint.without_power.items()
    ]
    return [Text.assemble(("! ", "yellow"), visible(line)) for line in (*lines, *footprint.remarks)]


def visible(text: str) -> str:
    """A name as it can be shown: a line break in it as \\n, and so on."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@dataclass(frozen=True)
class _DeviceTable:
    """One device: all figures, or as many as leave its names room in a narrow terminal."""

    device: str
    total: DeviceTotal
    footprint: Footprint
    top: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self._lines()
        phased = any(cells.get("phase", _NONE) != _NONE for _, cells, _ in lines)
        headers = [name for name in lines[0][1] if phased or name != "phase"]
        widths = {name: max(len(name), *(len(c.get(name, "")) for _, c, _ in lines)) for name in headers}
        name_width = min(_NAME_WIDTH, max(len(name) for name, _, _ in lines))
        left_out: list[str] = []
        for name in _GIVES_WAY:
            if name_width + sum(widths[kept] + _GAP for kept in headers) <= options.max_width:
                break
            if name in headers:
                headers.remove(name)
                left_out.append(name)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        table.add_column(Text(visible(self.device)), overflow="fold", ratio=1)
        for name in headers:
            table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
        for name, cells, style in lines:
            table.add_row(Text(name), *(Text(cells.get(header, "")) for header in headers), style=style)
        yield table
        if left_out:
            yield Text(f"no room for {', '.join(left_out)}", style="dim")

    def _lines(self) -> list[tuple[str, dict[str, str], str]]:
        """Name, figures by header, and style of every line."""
        rows = with_power(self.footprint.device_rows(self.device))
        lines = [
            (visible(row["name"]), _figures(row, self.total), "")
            for row in rows.slice(0, self.top).to_pylist()
        ]
        if (hidden := rows.slice(self.top)).num_rows:
            left_j = float(hidden["energy_j"].to_numpy().sum())
            lines.append((f"… {hidden.num_rows:,} more names", _sum(left_j, self.total), "dim"))
        lines.append(("(idle)", _sum(self.total.idle_j, self.total), "dim"))
        lines.append(("total", _sum(self.total.total_j, self.total), "bold"))
        return lines


def _figures(row: dict[str, Any], total: DeviceTotal) -> dict[str, str]:
    return {
        "phase": visible(row["phase"] or _NONE),
        "energy": joules(row["energy_j"]),
        "± 95 %": joules(row["uncertainty_j"]),
        "share": _share(row["energy_j"], total),
        "power": watts(row["power_w"]),
        "busy": seconds(row["busy_s"]),
        "count": f"{row['count']:,.0f}" if row["count"].is_integer() else f"{row['count']:.4g}",
        "basis": row["basis"] or _NONE,
    }


def _sum(energy_j: float, total: DeviceTotal) -> dict[str, str]:
    return {"energy": joules(energy_j), "share": _share(energy_j, total)}


def _share(energy_j: float, total: DeviceTotal) -> str:
    return f"{energy_j / total.total_j:.1%}" if total.total_j > 0 else _NONE


def _device_remarks(total: DeviceTotal) -> list[Text]:
    lines: list[str] = []
    if total.missing_s > 0:
        known = total.covered_s / (total.covered_s + total.missing_s)
        lines.append(
            f"power is known for {seconds(total.covered_s)}, {known:.1%} of the time; "
            f"{seconds(total.missing_s)} are missing"
        )
    if total.steps:
        lines.append(f"{total.steps} step{'s' if total.steps > 1 else ''}")
    if total.static_j is not None:
        lines.append(f"of this {joules(total.static_j)} are the program's part of the idle device's power")
    if total.other_j is not None:
        lines.append(f"other processes and the monitor used {joules(total.other_j)} besides")
    if total.provenance not in (None, "measured"):
        lines.append(f"power is {total.provenance}")
    return [Text(line, style="dim") for line in lines]


def diagram_tree(node: Node, depth: int, least_share: float = 0.005) -> Tree:
    """The diagram as a tree: energy, share of the parent, split by phase."""
    tree = Tree(_label(node), guide_style="dim")
    _grow(tree, node, depth, least_share)
    return tree


def _grow(tree: Tree, node: Node, depth: int, least_share: float) -> None:
    if depth <= 0:
        return
    shown = [child for child in node.children if child.share is None or child.share >= least_share]
    for child in shown:
        _grow(tree.add(_label(child)), child, depth - 1, least_share)
    if len(shown) < len(node.children):
        left_j = sum(child.energy_j for child in node.children) - sum(child.energy_j for child in shown)
        tree.add(Text(f"… {len(node.children) - len(shown)} more, {joules(left_j)}", style="dim"))


def _label(node: Node) -> Text:
    share = "" if node.share is None else f" {node.share:.1%}"
    phases = {phase: energy_j for phase, energy_j in node.by_phase.items() if phase}
    split = ", ".join(f"{visible(phase)} {joules(energy_j)}" for phase, energy_j in phases.items())
    return Text.assemble(
        ("(all)" if node.is_root else visible(node.name) or "(no name)", "bold"),
        f"  {joules(node.energy_j)}",
        (share, "cyan"),
        (f"  {split}" if split else "", "dim"),
    )
