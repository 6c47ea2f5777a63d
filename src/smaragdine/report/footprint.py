"""A footprint as tables for a terminal, and its tree."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from smaragdine.accounting.diagram import Node
from smaragdine.accounting.footprint import DeviceTotal, Footprint, with_power
from smaragdine.errors import visible
from smaragdine.report.fitting import FittingTable, Line
from smaragdine.units import joules, plus_minus, seconds, watts

_HEADERS = ("phase", "energy ± 95 %", "share", "power", "busy", "count", "basis")
# What gives way, first to last, where a terminal is too narrow for names and all figures.
_GIVES_WAY = ("basis", "busy", "count", "power", "share", "phase")
_NONE = "–"
_BAR = 6  # characters


def footprint_tables(footprint: Footprint, top: int) -> RenderableType:
    """Per device its names by falling energy, idle, other processes, and the sum they make."""
    parts: list[RenderableType] = []
    for device, total in footprint.devices.items():
        parts += [device_table(device, total, footprint, top), *_device_remarks(total), Text("")]
    parts += footprint_remarks(footprint)
    if parts and isinstance(parts[-1], Text) and not parts[-1].plain:
        parts.pop()
    return Group(*parts)


def idle_remarks(footprint: Footprint) -> list[Text]:
    """What a tree of operations leaves out."""
    return [
        Text(
            f"{visible(device)}: {joules(total.idle_j)} of {joules(total.total_j)} idle besides", style="dim"
        )
        for device, total in footprint.devices.items()
    ]


def footprint_remarks(footprint: Footprint) -> list[Text]:
    """What one must know besides the figures."""
    lines = [
        f"{device}: {count:,} event{'s' if count > 1 else ''}, but nobody measured its power"
        for device, count in footprint.without_power.items()
    ]
    return [Text.assemble(("! ", "yellow"), visible(line)) for line in (*lines, *footprint.remarks)]


def device_table(device: str, total: DeviceTotal, footprint: Footprint, top: int) -> FittingTable:
    rows = with_power(footprint.device_rows(device))
    lines = [Line(row["name"], _figures(row, total)) for row in rows.slice(0, top).to_pylist()]
    if (hidden := rows.slice(top)).num_rows:
        left_j = float(hidden["energy_j"].to_numpy().sum())
        names = "name" if hidden.num_rows == 1 else "names"
        lines.append(Line(f"… {hidden.num_rows:,} more {names}", _sum(left_j, total), "dim"))
    lines.append(Line("(idle)", _sum(total.idle_j, total), "dim"))
    lines.append(Line("total", _sum(total.total_j, total), "bold"))
    there = {header for line in lines for header, figure in line.figures.items() if figure != _NONE}
    headers = [header for header in _HEADERS if header in there]
    return FittingTable(device, headers, lines, _GIVES_WAY, left=("phase", "basis"))


def _figures(row: dict[str, Any], total: DeviceTotal) -> dict[str, str]:
    return {
        "phase": visible(row["phase"] or _NONE),
        "energy ± 95 %": _within(row["energy_j"], row["uncertainty_j"]),
        "share": _share(row["energy_j"], total),
        "power": watts(row["power_w"]),
        "busy": seconds(row["busy_s"]),
        "count": f"{row['count']:,.0f}" if row["count"].is_integer() else f"{row['count']:.4g}",
        "basis": row["basis"] or _NONE,
    }


def _sum(energy_j: float, total: DeviceTotal) -> dict[str, str]:
    return {"energy ± 95 %": joules(energy_j), "share": _share(energy_j, total)}


def _within(energy_j: float, uncertainty_j: float | None) -> str:
    """No digits that the uncertainty does not allow."""
    return joules(energy_j) if uncertainty_j is None else plus_minus(energy_j, uncertainty_j, "J")


def _share(energy_j: float, total: DeviceTotal) -> str:
    if total.total_j <= 0:
        return _NONE
    part = energy_j / total.total_j
    return f"{_bar(part)} {part:6.1%}"


def _bar(part: float) -> str:
    """In eighths of a character."""
    eighths = round(max(0.0, min(part, 1.0)) * _BAR * 8)
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()).ljust(_BAR)


def _device_remarks(total: DeviceTotal) -> list[Text]:
    lines: list[str] = []
    if total.missing_s > 0:
        known = total.covered_s / (total.covered_s + total.missing_s)
        lines.append(
            f"power is known for {seconds(total.covered_s)}, {known:.1%} of the time; "
            f"{seconds(total.missing_s)} are missing"
        )
    if total.steps:
        steps = f"{total.steps} step{'s' if total.steps > 1 else ''}"
        lines.append(f"of one step, from {steps}" if total.per_step else steps)
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
    phases = sorted((-energy_j, phase) for phase, energy_j in node.by_phase.items() if phase)
    split = ", ".join(f"{visible(phase)} {joules(-less_j)}" for less_j, phase in phases)
    return Text.assemble(
        ("(all)" if node.is_root else visible(node.name) or "(no name)", "bold"),
        f"  {joules(node.energy_j)}",
        (share, "cyan"),
        (f"  {split}" if split else "", "dim"),
    )
