"""Exports a footprint for speedscope.app: one profile per device, paths as stacks, energy as weight."""

from __future__ import annotations

from typing import Any

from smaragdine.accounting.diagram import diagram, walk
from smaragdine.accounting.run import Run, hardware
from smaragdine.report.export.selection import Selection
from smaragdine.version import __version__

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_SMALL_J = 1000.0


def speedscope_json(chosen: Selection) -> dict[str, Any]:
    """Weights and idle add up to the device's energy in `chosen.footprint`."""
    footprint = chosen.needs_footprint()
    root = diagram(footprint, chosen.edges if chosen.edges.num_rows else None)
    rows = footprint.rows.to_pylist()
    drawn = [(node.path, rows[row]) for node in walk(root) for row in node.rows]
    frames: dict[str, int] = {}
    profiles: list[dict[str, Any]] = []
    for device, total in footprint.devices.items():
        # speedscope shows three decimals and knows no joules: below a kilojoule all would be zero.
        unit, scale = ("mJ", 1000.0) if total.total_j < _SMALL_J else ("J", 1.0)
        stacks = [
            (_stack(path, row["phase"]), row["energy_j"]) for path, row in drawn if row["device"] == device
        ]
        if total.idle_j > 0:
            stacks.append((["(idle)"], total.idle_j))
        weights = [energy_j * scale for _, energy_j in stacks]
        profiles.append(
            {
                "type": "sampled",
                "name": f"{_called(chosen.run, device)}, {chosen.of[device]}"
                f"{_provenance(total.provenance)} ({unit})",
                "unit": "none",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": [[frames.setdefault(word, len(frames)) for word in stack] for stack, _ in stacks],
                "weights": weights,
            }
        )
    largest = max(footprint.devices, key=lambda device: footprint.devices[device].total_j, default=None)
    return {
        "$schema": _SCHEMA,
        "name": f"{chosen.run.name}: energy of {chosen.what}",
        "exporter": f"smaragdine@{__version__}",
        "activeProfileIndex": 0 if largest is None else list(footprint.devices).index(largest),
        "shared": {"frames": [{"name": word} for word in frames]},
        "profiles": profiles,
    }


def _stack(path: str, phase: str | None) -> list[str]:
    """The phase is a part of the stack, so an operation's executions in two phases are two leaves."""
    *layers, operation = path.split("/")
    return [*layers, f"{operation} ({phase})" if phase else operation]


def _called(run: Run, device: str) -> str:
    what = hardware(run.info, device)
    return f"{device} {what}" if what else device


def _provenance(provenance: str | None) -> str:
    return "" if provenance in (None, "measured") else f", {provenance}"
