"""What there is to export of a recording: one step's footprint, or that of all that was traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.accounting.account import recording_inputs
from smaragdine.accounting.event_energy import event_energies_j
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.merge import Rule, merge_edges, renamed, renaming
from smaragdine.accounting.overview import Overview, overview
from smaragdine.accounting.summary import RunSummary
from smaragdine.arrays import Floats
from smaragdine.errors import UserError
from smaragdine.recording.reader import Recording
from smaragdine.tracing.assemble.absence import why_no_operations


@dataclass(frozen=True)
class Run:
    recording: Recording
    found: Overview
    footprint: Footprint | None  # merged, of the devices asked for
    of: Mapping[str, str]  # device → what its footprint is of: one step, 20 traced steps …
    edges: pa.Table  # dataflow between the footprint's names
    why_none: str  # why there is no footprint
    devices: tuple[str, ...]  # asked for; none: all
    baseline: Recording | None = None

    @property
    def name(self) -> str:
        return self.recording.path.resolve().name

    @property
    def summary(self) -> RunSummary:
        return self.found.summary

    @property
    def what(self) -> str:
        """What the footprint is of, over all devices."""
        return " and ".join(dict.fromkeys(self.of.values()))

    def wants(self, device: str) -> bool:
        return not self.devices or device in self.devices

    def needs_footprint(self) -> Footprint:
        if self.footprint is None:
            raise UserError(f"{self.recording.path} has no footprint", self.why_none)
        return self.footprint


def gather(
    recording: Recording,
    *,
    traced: bool = False,
    merged: bool = False,
    rules: Sequence[Rule] = (),
    devices: Sequence[str] = (),
    baseline: Recording | None = None,
) -> Run:
    """A recording without events, or without power, is exported as far as it goes."""
    found = overview(recording, baseline)
    why_none = found.absent or ""
    traced = traced or found.step is None
    footprint = found.footprint if traced else found.shown
    if footprint is None and not why_none:
        untraced = not recording.events.num_rows
        why_none = why_no_operations(recording) if untraced else "its power was not recorded"
    _check_devices(recording, found, devices)
    edges = recording.edges
    if footprint is not None:
        footprint = _of_devices(footprint, devices)
        if merged or rules:
            names = renaming([footprint], rules)
            edges = merge_edges(edges, names)
            footprint = renamed(footprint, names)
    what = {device: _what(found, traced, device) for device in footprint.devices} if footprint else {}
    return Run(recording, found, footprint, what, edges, why_none, tuple(devices), baseline)


def _what(found: Overview, traced: bool, device: str) -> str:
    if not traced:
        return found.what(device)
    count = len(found.steps.traced_ns) if found.steps is not None else 0
    return f"{count} traced step{'s' if count > 1 else ''}" if count else "the time traced"


def _check_devices(recording: Recording, found: Overview, devices: Sequence[str]) -> None:
    known = dict.fromkeys([*found.summary.devices, *_event_devices(recording)])
    for device in devices:
        if device not in known:
            there = f"There are: {', '.join(known)}" if known else ""
            raise UserError(f"{recording.path} has no device {device}", remedy=there)


def _event_devices(recording: Recording) -> list[str]:
    events = recording.events
    return events["device"].unique().to_pylist() if events.num_rows else []


def _of_devices(footprint: Footprint, devices: Sequence[str]) -> Footprint:
    if not devices:
        return footprint
    from smaragdine.arrow import pc

    return dataclasses.replace(
        footprint,
        rows=footprint.rows.filter(pc.field("device").isin(list(devices))),
        devices={device: total for device, total in footprint.devices.items() if device in devices},
        without_power={d: count for d, count in footprint.without_power.items() if d in devices},
    )


def hardware(info: dict[str, Any], device: str) -> str | None:
    """What a device is: NVIDIA H200."""
    host: dict[str, Any] = info.get("host") or {}
    if device.startswith("cpu:"):
        return host.get("cpu")
    for gpu in host.get("gpus") or []:
        if gpu.get("device") == device:
            return gpu.get("name")
    return None


def program(info: dict[str, Any]) -> str:
    """The script that was run, without the folders of the machine it ran on."""
    words: list[str] = [word for word in info.get("command", []) if isinstance(word, str)]
    scripts = [word for word in words if word.endswith((".py", ".ipynb", ".sh"))]
    return PurePath((scripts or words or ["the program"])[0]).name


def traced_energies(run: Run) -> tuple[pa.Table, Floats, list[str]]:
    """Events, the energy of each (nan: not known), and what is to be said about those without."""
    events = run.recording.events
    nothing = np.full(events.num_rows, np.nan)
    if not events.num_rows:
        return events, nothing, ["no events: nothing was traced"]
    try:
        traced, meters = recording_inputs(run.recording, baseline=run.baseline)
    except UserError as error:
        return events, nothing, [f"events have no energy: {error}"]
    energy_j = event_energies_j(traced, meters)
    without = int(np.isnan(energy_j).sum())
    remarks = [f"{without:,} events have no energy: no power is known while they ran"] if without else []
    return traced, energy_j, remarks
