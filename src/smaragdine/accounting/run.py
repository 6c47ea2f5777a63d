"""All there is to say of a recording: energy, what was traced of it, what a step costs, what to export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.accounting.account import account_meters, event_energies_j, recording_inputs
from smaragdine.accounting.device_power import NOTHING_KNOWN, SensorFacts, from_recording
from smaragdine.accounting.footprint import Footprint, to_json
from smaragdine.accounting.merge import MergeRule, merge_edges, renamed, renaming
from smaragdine.accounting.spans import (
    FAR,
    HANDED,
    UNTRACED,
    Steps,
    StepTable,
    far_from_median,
    step_table,
    steps_of,
    without_pauses,
)
from smaragdine.accounting.steps import UntracedStep, at_level, handed_over, runs_behind, untraced_step
from smaragdine.accounting.summary import RunSummary, summarise
from smaragdine.accounting.summary import to_json as summary_json
from smaragdine.accounting.traces import device_traces
from smaragdine.arrays import Floats
from smaragdine.arrow import pc
from smaragdine.errors import UserError
from smaragdine.recording.reader import Recording
from smaragdine.tracing.absence import why_no_operations
from smaragdine.units import joules, plain, seconds

# All there is to say about a recording: its energy, what was traced of it, and what one step costs.

_LEVEL = (0.8, 1.25)  # outside, traced and untraced steps are not the same work
_WAITS = 2.0  # times a traced step's length: tracing makes steps longer, not shorter
_BEHIND = (
    "steps are announced when they are handed to the device, long before they are done: how long one takes "
    "without tracing is not known"
)


@dataclass(frozen=True)
class Tracing:
    """What the profiler saw."""

    frameworks: tuple[str, ...]
    windows: int
    events: int
    traced_s: float
    placed: float | None  # the part of busy time with a place in the model or an honest class
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Overview:
    summary: RunSummary
    tracing: Tracing | None = None
    footprint: Footprint | None = None  # of all that was traced
    steps: Steps | None = None
    untraced: Mapping[str, UntracedStep] = field(default_factory=dict[str, UntracedStep])
    step: Footprint | None = None  # of one step, at the level of the untraced ones where there are any
    absent: str | None = None  # why there are no footprints, though there are events
    table: StepTable | None = None  # every step, and what it counts for
    unresolved: Mapping[str, UntracedStep] = field(default_factory=dict[str, UntracedStep])

    @property
    def shown(self) -> Footprint | None:
        """What is shown: one step where there are steps, else all that was traced."""
        return self.footprint if self.step is None else self.step

    @property
    def step_s(self) -> float | None:
        """How long the step is whose energy `step` has; None where nobody knows."""
        if self.steps is None or self.untraced:
            return None if self.steps is None else self.steps.untraced_s
        return self.steps.traced_s if self.unresolved and not self.steps.early else None

    def what(self, device: str) -> str:
        """What kind of step `step` has of a device."""
        return "one step" if device in self.untraced else "one traced step"


def overview(
    recording: Recording, baseline: Recording | None = None, facts: SensorFacts = NOTHING_KNOWN
) -> Overview:
    traces = device_traces(recording)
    summary = summarise(recording, traces, baseline)
    tracing = _tracing(recording)
    if not recording.events.num_rows:
        return Overview(summary, tracing)
    try:
        events, meters = recording_inputs(recording, None, baseline, facts, traces)
        footprint = account_meters(events, meters)
        # What is wrong with the recording is said of the whole run, and once.
        others = tuple(remark for remark in footprint.remarks if remark not in summary.problems)
        footprint = dataclasses.replace(footprint, remarks=others)
    except UserError as error:
        return Overview(summary, tracing, absent=str(error))
    table = step_table(recording)
    steps = None if table is None else steps_of(recording, table)
    if table is None or steps is None or not any(total.steps for total in footprint.devices.values()):
        return Overview(summary, tracing, footprint, table=table)

    def untraced_of(steps: Steps) -> dict[str, UntracedStep]:
        without = from_recording(recording, traces, lambda _: steps.untraced_spans, baseline, facts)
        return untraced_step(footprint, without, steps, events)

    untraced = untraced_of(steps)
    if steps.uneven or (steps.far and runs_behind(steps, untraced)):
        # Steps are handed to the device until its queue is full, then one waits: it belongs to the mean.
        first, known = steps, untraced
        table = without_pauses(table, lambda mean_s: not runs_behind(first, _as_long(known, mean_s)))
        steps = steps_of(recording, table) or steps
        untraced = untraced_of(steps)
    steps = dataclasses.replace(steps, early=handed_over(steps, untraced))
    remarks = _step_remarks(steps)
    if runs_behind(steps, untraced):
        table = table.called(UNTRACED, HANDED)
        steps = steps.without_untraced()
        untraced, remarks = {}, [_BEHIND]
    unresolved = {device: step for device, step in untraced.items() if not step.resolved}
    untraced = {device: step for device, step in untraced.items() if step.resolved}
    if unresolved and all(step.factor is None for step in untraced.values()):
        untraced = {}  # a traced step of one device is not put beside an untraced one of its memory
    remarks += [_unresolved(device, step) for device, step in unresolved.items()]
    remarks += _level_remarks(untraced)
    if tracing is not None:
        tracing = dataclasses.replace(tracing, remarks=(*tracing.remarks, *remarks))
    step = at_level(footprint, untraced)
    return Overview(summary, tracing, footprint, steps, untraced, step, table=table, unresolved=unresolved)


def _as_long(untraced: Mapping[str, UntracedStep], length_s: float) -> dict[str, UntracedStep]:
    return {device: dataclasses.replace(step, length_s=length_s) for device, step in untraced.items()}


def alike(a: Overview, b: Overview) -> tuple[Footprint, Footprint] | None:
    """One step of each, to compare: of a device that one of them knows only traced, a traced one of both.
    None where one has no steps."""
    if a.step is None or b.step is None or a.footprint is None or b.footprint is None:
        return None
    if a.untraced.keys() == b.untraced.keys():
        return a.step, b.step
    first, second = (
        at_level(each.footprint, {device: step for device, step in each.untraced.items() if device in other})
        for each, other in ((a, b.untraced), (b, a.untraced))
        if each.footprint is not None
    )
    return first, second


def _step_remarks(steps: Steps) -> list[str]:
    """What one must know to read the mean of these steps."""
    said: list[str] = []
    odd = int(far_from_median(steps.traced_ns[:, 1] - steps.traced_ns[:, 0]).sum())
    if odd and not steps.early:
        said.append(
            f"{odd} of {len(steps.traced_ns)} traced steps took far longer or shorter "
            "than the others: a traced step is the mean of them all"
        )
    if steps.uneven:
        said.append(
            f"{steps.uneven} of {steps.untraced_count} untraced steps are longer than {FAR:g} times their "
            f"median, or shorter than 1/{FAR:g} of it: one step is the mean of them all, and few are like it"
        )
    if steps.untraced_s is not None and not steps.early and steps.untraced_s > _WAITS * steps.traced_s > 0:
        said.append(
            f"untraced steps are {plain(steps.untraced_s / steps.traced_s)} times as long as traced ones: "
            "they wait for something, or do other work"
        )
    return said


def _level_remarks(untraced: Mapping[str, UntracedStep]) -> list[str]:
    low, high = _LEVEL
    return [
        f"{device}: operations of untraced steps take {step.factor:.2f} times the energy of traced ones: "
        "they may not do the same work"
        for device, step in untraced.items()
        if step.factor is not None and not low <= step.factor <= high
    ]


def _unresolved(device: str, step: UntracedStep) -> str:
    left = "nothing" if not step.factor else f"{plain(step.factor)} times what they took when traced"
    return (
        f"{device}: one traced step is shown. An untraced one takes {joules(step.energy_j)} in "
        f"{seconds(step.length_s)}; idling at the power of the gaps between traced operations would leave "
        f"{left} to the operations: what is idle of it and what is theirs cannot be told"
    )


def _tracing(recording: Recording) -> Tracing | None:
    windows: list[dict[str, Any]] = recording.windows.to_pylist()
    if not windows:
        return None
    busy_ns = sum(window["busy_ns"] for window in windows)
    return Tracing(
        tuple(dict.fromkeys(window["framework"] for window in windows)),
        len(windows),
        sum(window["events"] for window in windows),
        sum(window["end_ns"] - window["begin_ns"] for window in windows) * 1e-9,
        sum(window["placed_ns"] for window in windows) / busy_ns if busy_ns else None,
        tuple(dict.fromkeys(remark for window in windows for remark in window["remarks"])),
    )


def phases_j(footprint: Footprint, devices: Sequence[str]) -> dict[str, float]:
    """Phase → energy, the largest first."""
    rows = footprint.rows.filter(pc.is_in(footprint.rows["device"], pa.array(devices, pa.string())))
    sums = rows.group_by("phase").aggregate([("energy_j", "sum")]).to_pylist()
    return {
        row["phase"] or "not known": row["energy_j_sum"]
        for row in sorted(sums, key=lambda r: -r["energy_j_sum"])
    }


def overview_json(found: Overview) -> dict[str, Any]:
    steps = found.steps
    return {
        **summary_json(found.summary),
        "tracing": None if found.tracing is None else asdict(found.tracing),
        "steps": None
        if steps is None
        else {
            "announced": steps.count,
            "traced": len(steps.traced_ns),
            "traced_s": steps.traced_s,
            "untraced": steps.untraced_count,
            "untraced_s": steps.untraced_s,
            "kinds": {} if found.table is None else found.table.counts(),
            "slower": steps.slower,
            "early": steps.early,
            "paused_s": steps.paused_s,
            "cost": steps.cost,
        },
        "untraced_step": {device: asdict(step) for device, step in found.untraced.items()},
        "unresolved_step": {device: asdict(step) for device, step in found.unresolved.items()},
        "step": None if found.step is None else to_json(found.step),
        "traced": None if found.footprint is None else to_json(found.footprint),
        "absent": found.absent,
    }


@dataclass(frozen=True)
class ExportedRun:
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
    rules: Sequence[MergeRule] = (),
    devices: Sequence[str] = (),
    baseline: Recording | None = None,
) -> ExportedRun:
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
    return ExportedRun(recording, found, footprint, what, edges, why_none, tuple(devices), baseline)


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


def traced_energies(run: ExportedRun) -> tuple[pa.Table, Floats, list[str]]:
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
