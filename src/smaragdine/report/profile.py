"""A profile as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from smaragdine.allocate.points import Point
from smaragdine.units import joules, seconds


def profile_table(
    gpu: str, points: Sequence[Point], idle_w: float | None, wait_w: float | None, remarks: Sequence[str]
) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(gpu)
    for name in ("limit", "steps", "time per step", "", "energy per step", "", "mean power"):
        table.add_column(name, justify="right")
    estimated = False
    for point in points:
        steps, limit = point.steps, f"{point.power_limit_w:g} W"
        if steps is None:
            table.add_row(f"batch {point.batch}", limit, "", "out of memory", style="dim")
            continue
        estimated = estimated or steps.provenance == "estimated"
        table.add_row(
            f"batch {point.batch}",
            limit,
            str(steps.count),
            seconds(steps.time_s),
            _part(steps.time_error_s, steps.time_s),
            joules(steps.energy_j),
            _part(steps.energy_error_j, steps.energy_j),
            f"{steps.energy_j / steps.time_s:.4g} W",
        )
    powers = [("idle", idle_w), ("waiting", wait_w)]
    known = ", ".join(f"{name} {power_w:.4g} W" for name, power_w in powers if power_w is not None)
    notes = [*([known] if known else []), *(["energy is estimated"] if estimated else []), *remarks]
    return Group(table, *(Text(note, style="dim") for note in notes))


def _part(error: float | None, value: float) -> str:
    """The standard error, as a part of the value."""
    return "" if error is None or value <= 0 else f"± {error / value:.1%}"
