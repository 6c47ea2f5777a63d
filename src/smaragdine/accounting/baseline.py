"""Idle power, and what a run used above it."""

from __future__ import annotations

from dataclasses import dataclass

from smaragdine.accounting.activity import activity
from smaragdine.accounting.summary import RunSummary
from smaragdine.errors import UserError
from smaragdine.recording.reader import Recording

_QUIET = 0.1  # of a socket's CPU time; what an idle system does besides takes a few percent of it


@dataclass(frozen=True)
class NetEnergy:
    """A run's energy on one device less what the device draws doing nothing, in J and W."""

    device: str
    net_j: float
    idle_w: float
    idle_j: float


def not_idle(recording: Recording) -> list[str]:
    """What makes a baseline wrong: sockets that worked meanwhile."""
    lines: list[str] = []
    for socket, of in activity(recording).items():
        cpus = recording.info.get("host", {}).get("sockets", {}).get(f"cpu:{socket}", {}).get("logical_cpus")
        wall_s = float(of.length_s.sum())
        if not cpus or wall_s <= 0:
            continue
        load = float(of.busy_s.sum()) / wall_s / cpus
        if load > _QUIET:
            lines.append(f"cpu:{socket} was {load:.0%} busy: what it drew is not its idle power")
    return lines


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
