"""Selects what of a run to export: which devices, one step or all that was traced, merged or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from smaragdine.accounting.footprint import Footprint, only
from smaragdine.accounting.merge import MergeRule, merge_edges, renamed, renaming
from smaragdine.accounting.run import Run
from smaragdine.errors import UserError


@dataclass(frozen=True)
class Selection:
    """A run and the part of it that is exported. Without events or power, export what there is."""

    run: Run
    footprint: Footprint | None  # of the devices asked for, and merged if asked for
    of: Mapping[str, str]  # device → what its footprint covers: one step, 20 traced steps …
    edges: pa.Table  # dataflow between the footprint's names
    devices: tuple[str, ...]  # the devices asked for; empty: all

    @property
    def what(self) -> str:
        """What the footprint covers, over all devices."""
        return " and ".join(dict.fromkeys(self.of.values()))

    def wants(self, device: str) -> bool:
        return not self.devices or device in self.devices

    def needs_footprint(self) -> Footprint:
        if self.footprint is None:
            raise UserError(f"{self.run.path} has no footprint", self.run.why_none)
        return self.footprint


def select(
    run: Run,
    *,
    traced: bool = False,
    merged: bool = False,
    rules: Sequence[MergeRule] = (),
    devices: Sequence[str] = (),
) -> Selection:
    _check_devices(run, devices)
    traced = traced or run.step is None
    footprint, edges = run.footprint if traced else run.step, run.edges
    if footprint is not None:
        footprint = only(footprint, devices) if devices else footprint
        if merged or rules:
            names = renaming([footprint], rules)
            edges = merge_edges(edges, names)
            footprint = renamed(footprint, names)
    of = {device: _what(run, traced, device) for device in footprint.devices} if footprint else {}
    return Selection(run, footprint, of, edges, tuple(devices))


def _what(run: Run, traced: bool, device: str) -> str:
    if not traced:
        return run.what(device)
    count = len(run.steps.traced_ns) if run.steps is not None else 0
    return f"{count} traced step{'s' if count > 1 else ''}" if count else "the time traced"


def _check_devices(run: Run, devices: Sequence[str]) -> None:
    events = run.recording.events
    traced: list[str] = events["device"].unique().to_pylist() if events.num_rows else []
    known = dict.fromkeys([*run.summary.devices, *traced])
    for device in devices:
        if device not in known:
            there = f"There are: {', '.join(known)}" if known else ""
            raise UserError(f"{run.path} has no device {device}", remedy=there)
