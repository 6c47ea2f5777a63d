"""A footprint as tables for a terminal, and its tree."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from smaragdine.accounting.diagram import Node
from smaragdine.accounting.footprint import DeviceTotal, Footprint, with_power
from smaragdine.units import joules, seconds, watts


def footprint_tables(footprint: Footprint, top: int) -> RenderableType:
    """Per device its names by falling energy, idle, other processes, and the sum they make."""
    parts: list[RenderableType] = []
    for device, total in footprint.devices.items():
        parts += [_device_table(device, total, footprint, top), *_device_remarks(total), Text("")]
    for device, count in footprint.without_power.items():
        parts.append(_remark(f"{device}: {count:,} events, but nobody measured its power"))
    parts += [_remark(text) for text in footprint.remarks]
    if parts and isinstance(parts[-1], Text) and not parts[-1].plain:
        parts.pop()
    return Group(*parts)


def _device_table(device: str, total: DeviceTotal, footprint: Footprint, top: int) -> Table:
    rows = with_power(footprint.device_rows(device))
    phased = rows["phase"].null_count < rows.num_rows
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(Text(device), overflow="fold", ratio=1)
    for header in (
        *(["phase"] if phased else []),
        "energy",
        "± 95 %",
        "share",
        "power",
        "busy",
        "count",
        "basis",
    ):
        side = "left" if header in ("phase", "basis") else "right"
        table.add_column(header, justify=side, no_wrap=True)
    for row in rows.slice(0, top).to_pylist():
        table.add_row(*_cells(row, total, phased))
    hidden = rows.slice(top)
    if hidden.num_rows:
        left_j = float(hidden["energy_j"].to_numpy().sum())
        _line(table, f"… {hidden.num_rows:,} more names", left_j, total, phased, "dim")
    _line(table, "(idle)", total.idle_j, total, phased, "dim")
    table.add_section()
    _line(table, "total", total.total_j, total, phased, "bold")
    return table


def _cells(row: dict[str, Any], total: DeviceTotal, phased: bool) -> list[str | Text]:
    cells: list[str | Text] = [Text(row["name"]), *([row["phase"] or "–"] if phased else [])]
    count = f"{row['count']:,.0f}" if row["count"].is_integer() else f"{row['count']:.4g}"
    return [
        *cells,
        joules(row["energy_j"]),
        joules(row["uncertainty_j"]),
        _share(row["energy_j"], total),
        watts(row["power_w"]),
        seconds(row["busy_s"]),
        count,
        row["basis"] or "–",
    ]


def _line(table: Table, name: str, energy_j: float, total: DeviceTotal, phased: bool, style: str) -> None:
    cells = [Text(name), *([""] if phased else []), joules(energy_j), "", _share(energy_j, total)]
    table.add_row(*cells, *[""] * 4, style=style)


def _share(energy_j: float, total: DeviceTotal) -> str:
    return f"{energy_j / total.total_j:.1%}" if total.total_j > 0 else "–"


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


def _remark(text: str) -> Text:
    return Text.assemble(("! ", "yellow"), text)


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
    split = ", ".join(f"{phase} {joules(energy_j)}" for phase, energy_j in phases.items())
    return Text.assemble(
        (node.name or "(all)", "bold"),
        f"  {joules(node.energy_j)}",
        (share, "cyan"),
        (f"  {split}" if split else "", "dim"),
    )
