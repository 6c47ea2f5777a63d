"""Idle power, and what a run used above it."""

from __future__ import annotations

from dataclasses import dataclass

from smaragdine.accounting.summary import RunSummary
from smaragdine.errors import UserError


@dataclass(frozen=True)
class NetEnergy:
    """A run's energy on one device less what the device draws doing nothing, in J and W."""

    device: str
    net_j: float
    idle_w: float
    idle_j: float


def subtract(run: RunSummary, idle: RunSummary) -> list[NetEnergy]:
    """Per device that both have: energy − idle power × duration. Negative means the baseline was not idle."""
    rows: list[NetEnergy] = []
    for name, device in run.devices.items():
        at_rest = idle.devices.get(name)
        if at_rest is None or at_rest.mean_w is None or device.energy_j is None or device.scope == "part":
            continue
        if at_rest.provenance != device.provenance:
            continue
        idle_j = at_rest.mean_w * (run.duration_s - device.missing_s)
        rows.append(NetEnergy(name, device.energy_j - idle_j, at_rest.mean_w, idle_j))
    if not rows:
        raise UserError(
            "the baseline has no device in common with the run",
            "another machine, or other sensors",
            "Record one here: smaragdine baseline",
        )
    return rows
