"""All there is to say about a recording: its energy, what was traced of it, and what one step costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute

from smaragdine.accounting.account import account_meters, recording_inputs
from smaragdine.accounting.footprint import Footprint, to_json
from smaragdine.accounting.meters import NOTHING_KNOWN, SensorFacts, from_recording
from smaragdine.accounting.step_spans import Steps, joined, steps_of
from smaragdine.accounting.steps import UntracedStep, at_level, handed_over, runs_behind, untraced_step
from smaragdine.accounting.summary import RunSummary, summarise
from smaragdine.accounting.summary import to_json as summary_json
from smaragdine.accounting.traces import device_traces
from smaragdine.errors import UserError
from smaragdine.recording.reader import Recording

pc: Any = pyarrow.compute  # its functions are made on import, where no type checker sees them

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


def overview(
    recording: Recording, baseline: Recording | None = None, facts: SensorFacts = NOTHING_KNOWN
) -> Overview:
    traces = device_traces(recording)
    summary = summarise(recording, traces)
    tracing = _tracing(recording)
    if not recording.events.num_rows:
        return Overview(summary, tracing)
    try:
        events, meters = recording_inputs(recording, None, baseline, facts, traces)
        footprint = account_meters(events, meters)
    except UserError as error:
        return Overview(summary, tracing, absent=str(error))
    steps = steps_of(recording)
    if steps is None or not any(total.steps for total in footprint.devices.values()):
        return Overview(summary, tracing, footprint)
    spans = joined([(int(begin), int(end)) for begin, end in steps.untraced_ns])
    without = from_recording(recording, traces, lambda _: spans, baseline, facts)
    untraced = untraced_step(footprint, without, steps, events)
    steps = dataclasses.replace(steps, early=handed_over(steps, untraced))
    if runs_behind(steps, untraced):
        steps = dataclasses.replace(steps, untraced_ns=steps.untraced_ns[:0])
        untraced = {}
        if tracing is not None:
            tracing = dataclasses.replace(tracing, remarks=(*tracing.remarks, _BEHIND))
    return Overview(summary, tracing, footprint, steps, untraced, at_level(footprint, untraced))


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
            "untraced": len(steps.untraced_ns),
            "untraced_s": steps.untraced_s,
            "slower": steps.slower,
            "early": steps.early,
            "paused_s": steps.paused_s,
            "cost": steps.cost,
        },
        "untraced_step": {device: asdict(step) for device, step in found.untraced.items()},
        "step": None if found.step is None else to_json(found.step),
        "traced": None if found.footprint is None else to_json(found.footprint),
        "absent": found.absent,
    }
