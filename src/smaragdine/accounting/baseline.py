"""Baselines: whether a recording is one of the idle machine, and what a run used above it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smaragdine.accounting.activity import Intervals, run_bounds
from smaragdine.errors import UserError, shortened
from smaragdine.recording.asked import BASELINE, verb_of
from smaragdine.recording.reader import Recording

if TYPE_CHECKING:
    from smaragdine.accounting.summary import RunSummary

_QUIET = 0.1  # of a socket's CPU time: an idle system takes a few percent of it
_QUIET_GPU = 0.05  # of the time
_WORKS = 0.1  # of one CPU: a program that only waits takes next to nothing
_TRAINS = ("step_end", "epoch_begin", "epoch_end", "train_begin")
_LONGEST = 60  # characters of a command in a message

Sockets = Mapping[int, Intervals]  # who used each socket


def is_baseline(recording: Recording) -> bool:
    """Whether it was made without a program."""
    verb = verb_of(recording.info)
    # Older recordings do not say which verb made them; baselines had this as their command.
    return verb == BASELINE or (verb is None and recording.info.get("command") == ["baseline"])


def not_idle(recording: Recording, sockets: Sockets) -> list[str]:
    """A line for each socket and GPU that was busy during a baseline."""
    lines: list[str] = []
    for socket, of in sockets.items():
        cpus = recording.info.get("host", {}).get("sockets", {}).get(f"cpu:{socket}", {}).get("logical_cpus")
        wall_s = float(of.length_s.sum())
        if not cpus or wall_s <= 0:
            continue
        load = float(of.busy_s.sum()) / wall_s / cpus
        if load > _QUIET:
            lines.append(_busy(f"cpu:{socket}", load))
    loads = _gpu_loads(recording)
    return lines + [_busy(device, load) for device, load in loads.items() if load > _QUIET_GPU]


def doubts(recording: Recording, sockets: Sockets) -> list[str]:
    """A line for each reason not to trust a recording as a baseline."""
    if is_baseline(recording):
        return not_idle(recording, sockets)
    works = _works(recording, sockets)
    if works is None:
        said = f"{_recording_of(recording)}, not one that smaragdine baseline made"
    else:
        said = f"{_recording_of(recording)}, and {works}: what the machine drew is not its idle power"
    return [said, *not_idle(recording, sockets)]


def refuse_work(recording: Recording, sockets: Sockets) -> None:
    """Raises `UserError` if the recorded program worked: that says nothing about the idle machine."""
    works = _works(recording, sockets)
    if works is not None:
        raise UserError(
            f"{recording.path} is no baseline",
            f"{_recording_of(recording)}, and {works}",
            "Record one: smaragdine baseline",
        )


def _works(recording: Recording, sockets: Sockets) -> str | None:
    """What the recorded program did; None if it did nothing, or there was no program."""
    if is_baseline(recording):
        return None
    names: list[str] = recording.marks["name"].to_pylist()
    if any(name in _TRAINS for name in names):
        steps = recording.announced_steps
        return f"it announced {steps} step{'' if steps == 1 else 's'}" if steps else "it announced a training"
    begin_ns, end_ns = run_bounds(recording)
    spent = [[(recording.info.get("program_cpu_s") or 0.0, (end_ns - begin_ns) * 1e-9)]]
    spent += [[(float(of.program_s.sum()), float(of.length_s.sum())) for of in sockets.values()]]
    load = max(sum(cpu_s / wall_s for cpu_s, wall_s in each if wall_s > 0) for each in spent)
    if load > _WORKS:
        return f"it kept {load:.1f} CPUs busy"
    for device, part in _gpu_loads(recording).items():
        if part > _QUIET_GPU:
            return f"{device} was {part:.0%} busy"
    return None


def _recording_of(recording: Recording) -> str:
    command = shortened(shlex.join(recording.info.get("command", [])), _LONGEST)
    return f"it is a recording of {command}" if command else "it is a recording of a program"


def _gpu_loads(recording: Recording) -> dict[str, float]:
    begin_ns, end_ns = run_bounds(recording)
    loads: dict[str, float] = {}
    for series in recording.series("telemetry"):
        during = (series.t_ns >= begin_ns) & (series.t_ns <= end_ns)
        if series.channel.quantity == "gpu_utilisation" and during.any():
            loads[series.channel.device] = float(series.value[during].mean()) / 100
    return loads


def _busy(device: str, load: float) -> str:
    return f"{device} was {load:.0%} busy: what it drew is not its idle power"


@dataclass(frozen=True)
class NetEnergy:
    """A device's energy during a run, less what it draws when idle."""

    device: str
    net_j: float
    idle_w: float
    idle_j: float


def subtract(run: RunSummary, idle: RunSummary) -> list[NetEnergy]:
    """Per device of both: energy − idle power × duration. A negative result: the baseline was not idle."""
    rows: list[NetEnergy] = []
    for name, device in run.devices.items():
        quiet = idle.devices.get(name)
        if quiet is None or quiet.mean_w is None or device.energy_j is None or device.scope == "part":
            continue
        if quiet.provenance != device.provenance:
            continue
        idle_j = quiet.mean_w * (run.duration_s - device.missing_s)
        rows.append(NetEnergy(name, device.energy_j - idle_j, quiet.mean_w, idle_j))
    if not rows:
        raise UserError(
            "the baseline has no device in common with the run",
            "another machine, or other sensors",
            "Record one here: smaragdine baseline",
        )
    return rows
