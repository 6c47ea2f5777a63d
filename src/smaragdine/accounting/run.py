"""Everything that is known of a recording.

    run = Run.open("runs/first")
    run.summary.program_j                    # what the program used
    run.step                                 # one step: which operation takes how much of it
    run.footprint                            # the same for all that was traced

Whoever shows, exports or compares a recording takes a `Run`, which works each thing out once, when it is
first asked for. The other files of this folder take what they need as arguments; this file puts them
together.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.accounting.account import account_meters, check_times, event_energies_j
from smaragdine.accounting.activity import SocketUse, activity, run_bounds
from smaragdine.accounting.baseline import is_baseline, not_idle, refuse_work
from smaragdine.accounting.calibrated import Calibration
from smaragdine.accounting.calibrated import read as read_calibration
from smaragdine.accounting.device_power import (
    NOTHING_KNOWN,
    DevicePowers,
    SensorFacts,
    from_recording,
    known,
    why_lost,
)
from smaragdine.accounting.diagram import Node, diagram
from smaragdine.accounting.footprint import Footprint, to_json
from smaragdine.accounting.gpu_idle import idle_w
from smaragdine.accounting.ledger import columns
from smaragdine.accounting.merge import merge_edges, renamed
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.spans import (
    FAR,
    HANDED,
    UNTRACED,
    Span,
    Spans,
    Steps,
    StepTable,
    far_from_median,
    step_table,
    steps_of,
    traced_spans,
    without_pauses,
)
from smaragdine.accounting.split import IdleMachine, RunPower, idle_machine, run_power, when
from smaragdine.accounting.steps import (
    StepEnergies,
    UntracedStep,
    announced_steps,
    at_level,
    handed_over,
    runs_behind,
    step_energies,
    untraced_levels,
    untraced_step,
)
from smaragdine.accounting.summary import RunSummary, summarise
from smaragdine.accounting.summary import to_json as summary_json
from smaragdine.accounting.traces import beyond, device_traces
from smaragdine.arrays import Floats
from smaragdine.arrow import pc
from smaragdine.display import Shown
from smaragdine.errors import UserError
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.recording.writer import one_dictionary
from smaragdine.sensors.base import Channel
from smaragdine.tracing.absence import why_no_operations
from smaragdine.units import joules, plain, seconds

_LEVEL = (0.8, 1.25)  # outside, traced and untraced steps are not the same work
_WAITS = 2.0  # times a traced step's length; tracing should make steps longer, not shorter
_BEHIND = (
    "steps are announced when they are handed to the device, long before they are done: how long one takes "
    "without tracing is not known"
)
_COARSE_NS = 2_000_000_000  # longer than any sensor's window


@dataclass(frozen=True)
class Tracing:
    """What the profiler saw."""

    frameworks: tuple[str, ...]
    windows: int
    events: int
    traced_s: float
    placed: float | None  # the part of busy time that has a place in the model or a class
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class _Levels:
    """What traced and untraced steps say together."""

    table: StepTable | None  # every step and its kind
    steps: Steps | None = None
    untraced: Mapping[str, UntracedStep] = field(default_factory=dict[str, UntracedStep])
    unresolved: Mapping[str, UntracedStep] = field(default_factory=dict[str, UntracedStep])
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Run(Shown):
    """A recording, and all that follows from it. `baseline` is a run of the idle machine, `facts` are what
    the user knows about the sensors."""

    recording: Recording
    baseline: Run | None = None
    facts: SensorFacts = NOTHING_KNOWN

    @classmethod
    def open(cls, path: str | os.PathLike[str], baseline: str | os.PathLike[str] | None = None) -> Run:
        return cls(open_recording(path), None if baseline is None else cls.open(baseline))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        return self.recording.path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def info(self) -> dict[str, Any]:
        """What run.json says."""
        return self.recording.info

    @property
    def bounds_ns(self) -> tuple[int, int]:
        return run_bounds(self.recording)

    # Power.

    @cached_property
    def traces(self) -> Mapping[str, PowerTrace]:
        """The power of every device with a reading, and of parts of devices."""
        return device_traces(self.recording)

    @cached_property
    def activity(self) -> SocketUse:
        """Who used each socket."""
        return activity(self.recording)

    @cached_property
    def power(self) -> RunPower:
        """The power of every device, split by who used it."""
        idle = None if self.baseline is None else self.baseline.idle_machine
        return run_power(self.recording, self.traces, self.activity, idle)

    @property
    def channels(self) -> Mapping[str, Channel]:
        """Device → the channel that its power rests on."""
        return self.power.channels

    @cached_property
    def idle_machine(self) -> IdleMachine:
        """What this run tells about the idle machine, if it is another run's baseline."""
        return idle_machine(self.recording, self.traces, self.activity)

    @property
    def is_baseline(self) -> bool:
        """Whether it was made without a program."""
        return is_baseline(self.recording)

    @property
    def not_idle(self) -> list[str]:
        """A line for each device that worked, if this is a baseline."""
        return not_idle(self.recording, self.activity.sockets)

    def refuse_work(self) -> None:
        """Raises `UserError` if a program worked in this run: then it is no baseline."""
        refuse_work(self.recording, self.activity.sockets)

    @property
    def baseline_remarks(self) -> Sequence[str]:
        return () if self.baseline is None else self.baseline.idle_machine.remarks

    @cached_property
    def summary(self) -> RunSummary:
        return summarise(self.recording, self.power, self.baseline_remarks)

    # Operations.

    @cached_property
    def inputs(self) -> tuple[pa.Table, DevicePowers]:
        """Events, and the power that they share. Raises `UserError` if there are none, or no power."""
        recording = self.recording
        return self._inputs(recording.events, recording.windows.num_rows > 0, own=True)

    def inputs_of(self, events: pa.Table) -> tuple[pa.Table, DevicePowers]:
        """The same with events from another tool's trace of this run."""
        return self._inputs(events, False, own=False)

    @cached_property
    def calibrations(self) -> tuple[dict[str, Calibration], str]:
        """What its calls draw alone, per device, and what is wrong with the file that says so."""
        return read_calibration(self.path)

    @cached_property
    def accounted(self) -> Footprint:
        """The footprint of all that was traced, with every remark. Raises what `inputs` raises."""
        return account_meters(*self.inputs)

    @cached_property
    def footprint(self) -> Footprint | None:
        """The same, without remarks of `summary`. None if nothing was traced; `absent` may say why."""
        return self._footprint_or_why[0]

    @property
    def absent(self) -> str | None:
        """Why there is no footprint, although there are events."""
        return self._footprint_or_why[1]

    @cached_property
    def step(self) -> Footprint | None:
        """One step, at the level of untraced ones if there are any. None if nothing tells steps apart."""
        if self.footprint is None or self.steps is None:
            return None
        return at_level(self.footprint, self.untraced)

    @property
    def shown(self) -> Footprint | None:
        """What we show: one step if there are steps, else all that was traced."""
        return self.footprint if self.step is None else self.step

    @property
    def needed(self) -> Footprint:
        """The same, or `UserError` if there is nothing to show."""
        if self.shown is None:
            raise UserError(f"{self.path} has no footprint", self.why_none)
        return self.shown

    @property
    def why_none(self) -> str:
        """Why there is no footprint; empty if there is one."""
        if self.absent is not None:
            return self.absent
        if self.footprint is not None:
            return ""
        return why_no_operations(self.recording)

    @cached_property
    def edges(self) -> pa.Table:
        """The dataflow between operations."""
        return self.recording.edges

    @cached_property
    def diagram(self) -> Node:
        """Layers as a tree, with the dataflow between siblings."""
        return diagram(self.needed, self.edges if self.edges.num_rows else None)

    def renamed(self, names: Mapping[str, str]) -> Run:
        """The same run with operations under other names: `names` maps old ones to new ones."""
        found = Run(self.recording, self.baseline, self.facts)
        called = {
            name: None if footprint is None else renamed(footprint, names)
            for name, footprint in (("step", self.step), ("footprint", self.footprint))
        }
        vars(found).update(vars(self) | called | {"edges": merge_edges(self.edges, names)})
        return found

    def accounted_as(self, names: Mapping[str, str], by_phase: bool = True) -> Footprint:
        """`shown`, accounted again with events under other names. This knows how far a sum of parts spreads
        over steps; `renamed` does not."""
        events, meters = self.events_as(names, by_phase)
        again = account_meters(events, meters)
        return again if self.step is None else at_level(again, self.untraced)

    def events_as(self, names: Mapping[str, str], by_phase: bool = True) -> tuple[pa.Table, DevicePowers]:
        """`inputs` with events under other names."""
        events, meters = self.inputs
        name = events["name"].cast(pa.string()).combine_chunks().dictionary_encode()
        called = pa.array([names.get(each, each) for each in name.dictionary.to_pylist()], pa.string())
        columns = {"name": pa.DictionaryArray.from_arrays(name.indices, called)}
        if not by_phase:
            columns["phase"] = pa.nulls(events.num_rows, events.schema.field("phase").type)
        for column, values in columns.items():
            events = events.set_column(events.schema.get_field_index(column), column, values)
        return one_dictionary(events), meters

    @cached_property
    def event_energies(self) -> tuple[pa.Table, Floats, list[str]]:
        """Events, the energy of each (nan: not known), and remarks on events without energy."""
        events = self.recording.events
        nothing = np.full(events.num_rows, np.nan)
        if not events.num_rows:
            return events, nothing, ["no events: nothing was traced"]
        try:
            traced, meters = self.inputs
        except UserError as error:
            return events, nothing, [f"events have no energy: {error}"]
        energy_j = event_energies_j(traced, meters)
        without = int(np.isnan(energy_j).sum())
        why = f"what the program used while they ran is not known{why_lost(self.recording)}"
        return traced, energy_j, [f"{without:,} events have no energy: {why}"] if without else []

    # Steps.

    @cached_property
    def tracing(self) -> Tracing | None:
        """What the profiler saw. None if it never ran."""
        found = _tracing(self.recording)
        return found and dataclasses.replace(found, remarks=(*found.remarks, *self._levels.remarks))

    @property
    def table(self) -> StepTable | None:
        """Every step of the one process and source that stand for all, and its kind."""
        return self._levels.table

    @property
    def steps(self) -> Steps | None:
        """Traced steps beside untraced ones. None if no steps were traced."""
        return self._levels.steps

    @property
    def untraced(self) -> Mapping[str, UntracedStep]:
        """Device → what it does in an untraced step, as far as known."""
        return self._levels.untraced

    @property
    def unresolved(self) -> Mapping[str, UntracedStep]:
        """The same for devices whose operations and idle cannot be told apart: these show a traced step."""
        return self._levels.unresolved

    @property
    def step_s(self) -> float | None:
        """The length of the step that `step` shows; None if nobody knows."""
        if self.steps is None or self.untraced:
            return None if self.steps is None else self.steps.untraced_s
        return self.steps.traced_s if self.unresolved and not self.steps.early else None

    def what(self, device: str) -> str:
        """Which kind of step `step` shows of a device."""
        return "one step" if device in self.untraced else "one traced step"

    @cached_property
    def announced_steps(self) -> list[tuple[Span, str | None]]:
        """Every step of every process, in the order of their ends, and its kind if known."""
        return announced_steps(self.recording, self.table)

    @cached_property
    def step_energies(self) -> StepEnergies | None:
        """What the program used in each step. None if no steps were announced."""
        return None if self.table is None else step_energies(self.table, self.power.accounted)

    def to_json(self) -> dict[str, Any]:
        steps = self.steps
        return {
            **summary_json(self.summary),
            "tracing": None if self.tracing is None else asdict(self.tracing),
            "steps": None
            if steps is None
            else {
                "announced": steps.count,
                "traced": len(steps.traced_ns),
                "traced_s": steps.traced_s,
                "untraced": steps.untraced_count,
                "untraced_s": steps.untraced_s,
                "kinds": {} if self.table is None else self.table.counts(),
                "slower": steps.slower,
                "early": steps.early,
                "paused_s": steps.paused_s,
                "cost": steps.cost,
            },
            "untraced_step": {device: asdict(step) for device, step in self.untraced.items()},
            "unresolved_step": {device: asdict(step) for device, step in self.unresolved.items()},
            "step": None if self.step is None else to_json(self.step),
            "traced": None if self.footprint is None else to_json(self.footprint),
            "absent": self.absent,
        }

    @cached_property
    def _announced(self) -> tuple[StepTable | None, Steps | None]:
        """Steps, before anything is known of their energy."""
        table = step_table(self.recording)
        return table, steps_of(self.recording, table)

    @cached_property
    def _quiet_w(self) -> dict[str, float]:
        """What each GPU draws while nothing runs on it."""
        gpus = {d: trace for d, trace in self.power.adding.items() if d.startswith("gpu:")}
        return idle_w(self.recording, gpus, self._announced[1])

    def _over(self, spans_of: Callable[[str], Spans]) -> DevicePowers:
        return from_recording(self.recording, self.power, self._quiet_w, spans_of, self.facts)

    def _inputs(self, events: pa.Table, in_windows: bool, own: bool) -> tuple[pa.Table, DevicePowers]:
        recording = self.recording
        if not events.num_rows:
            raise UserError(
                f"{self.path} has no events",
                recording.lost("events") or "no steps were traced",
                "smaragdine report says why; with a trace of that run: smaragdine account RUN --events TRACE",
            )
        source = columns(events)
        if not own:
            check_times(source, list(self.traces.values()))
        spans: Mapping[str, Spans] = {"": [(source.first_ns, source.last_ns)]}
        if in_windows:
            spans = traced_spans(recording, events)
        meters = self._over(lambda device: spans.get(device, spans[""]))
        said = (
            *([self.calibrations[1]] if self.calibrations[1] else ()),
            *meters.remarks,
            *_thinned_remarks(recording, meters),
            *recording.damage,
            *beyond(recording),
            *self.baseline_remarks,
        )
        if in_windows and "call" in events.column_names:
            meters = self._with_calibration(meters)
        return events, known(dataclasses.replace(meters, remarks=said), recording, self.power)

    def _with_calibration(self, meters: DevicePowers) -> DevicePowers:
        found, _ = self.calibrations
        steps = self._announced[1]
        if not found:
            return meters
        levels = {} if steps is None else untraced_levels(self._over(lambda _: steps.untraced_spans), steps)
        of = {
            device: dataclasses.replace(meter, calibration=found.get(device), untraced=levels.get(device))
            for device, meter in meters.of.items()
        }
        return dataclasses.replace(meters, of=of)

    @cached_property
    def _footprint_or_why(self) -> tuple[Footprint | None, str | None]:
        if not self.recording.events.num_rows:
            return None, None
        try:
            footprint = self.accounted
        except UserError as error:
            return None, str(error)
        # The summary says what is wrong with the recording; once is enough.
        others = tuple(remark for remark in footprint.remarks if remark not in self.summary.problems)
        return dataclasses.replace(footprint, remarks=others), None

    @cached_property
    def _levels(self) -> _Levels:
        footprint = self._footprint_or_why[0]
        table, steps = self._announced
        if footprint is None or table is None or steps is None:
            return _Levels(table)
        if not any(total.steps for total in footprint.devices.values()):
            return _Levels(table)
        events, _ = self.inputs

        def untraced_of(steps: Steps) -> dict[str, UntracedStep]:
            return untraced_step(footprint, self._over(lambda _: steps.untraced_spans), steps, events)

        untraced = untraced_of(steps)
        if steps.uneven or (steps.far and runs_behind(steps, untraced)):
            # Steps are handed over until the device's queue is full; then one waits, and belongs to the mean.
            first, known = steps, untraced
            table = without_pauses(table, lambda mean_s: not runs_behind(first, _as_long(known, mean_s)))
            steps = steps_of(self.recording, table) or steps
            untraced = untraced_of(steps)
        steps = dataclasses.replace(steps, early=handed_over(steps, untraced))
        said = _step_remarks(steps)
        if runs_behind(steps, untraced):
            table = table.called(UNTRACED, HANDED)
            steps = steps.without_untraced()
            untraced, said = {}, [_BEHIND]
        unresolved = {device: step for device, step in untraced.items() if not step.resolved}
        untraced = {device: step for device, step in untraced.items() if step.resolved}
        if unresolved and all(step.factor is None for step in untraced.values()):
            untraced = {}  # do not mix a traced step of a device with an untraced one of its memory
        said += [_unresolved(device, step) for device, step in unresolved.items()]
        said += _level_remarks(untraced)
        return _Levels(table, steps, untraced, unresolved, tuple(said))


def _as_long(untraced: Mapping[str, UntracedStep], length_s: float) -> dict[str, UntracedStep]:
    return {device: dataclasses.replace(step, length_s=length_s) for device, step in untraced.items()}


def alike(*runs: Run) -> tuple[list[Footprint], list[str]] | None:
    """One step of each, ready to compare, and the devices of which it is an untraced one. A device that some
    of them know only traced is traced in all. None if one has no steps."""
    if any(run.footprint is None or run.step is None for run in runs):
        return None
    untraced = [device for device in runs[0].untraced if all(device in run.untraced for run in runs)]
    steps = [
        run.step
        if set(run.untraced) == set(untraced)
        else at_level(run.footprint, {device: run.untraced[device] for device in untraced})
        for run in runs
        if run.footprint is not None and run.step is not None
    ]
    return steps, untraced


def _step_remarks(steps: Steps) -> list[str]:
    """What one must know to judge the mean of these steps."""
    said: list[str] = []
    odd = int(far_from_median(steps.traced_ns[:, 1] - steps.traced_ns[:, 0]).sum())
    if odd and not steps.early:
        said.append(
            f"{odd} of {len(steps.traced_ns)} traced steps took far longer or shorter "
            "than the others: a traced step is the mean of them all"
        )
    if steps.uneven:
        left = f"besides the {steps.far:,} that are left out, " if steps.far else ""
        said.append(
            f"{left}{steps.uneven:,} of the {steps.untraced_count:,} untraced steps that count are longer "
            f"than {FAR:g} times their median, or shorter than 1/{FAR:g} of it: one step is the mean of them "
            "all, and few are like it"
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
        f"{seconds(step.length_s)}, but nobody can tell how much of that the operations use: if it idled at "
        f"the power seen between traced operations, {left} would be left for them"
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


def hardware(info: dict[str, Any], device: str) -> str | None:
    """The name of a device, such as NVIDIA H200."""
    host: dict[str, Any] = info.get("host") or {}
    if device.startswith("cpu:"):
        return host.get("cpu")
    for gpu in host.get("gpus") or []:
        if gpu.get("device") == device:
            return gpu.get("name")
    return None


def program(info: dict[str, Any]) -> str:
    """The name of the script that ran, without the folders of its machine."""
    words: list[str] = [word for word in info.get("command", []) if isinstance(word, str)]
    scripts = [word for word in words if word.endswith((".py", ".ipynb", ".sh"))]
    return PurePath((scripts or words or ["the program"])[0]).name


def _thinned_remarks(recording: Recording, meters: DevicePowers) -> list[str]:
    """Says if another tool's events lie in time of which only mean power is left."""
    if recording.thinned is None:
        return []
    lengths_ns = [meter.trace.end_ns - meter.trace.start_ns for meter in meters.of.values()]
    longest_ns = max((int(each_ns.max()) for each_ns in lengths_ns if each_ns.size), default=0)
    if longest_ns < _COARSE_NS:
        return []
    return [
        f"readings before {when(recording.thinned.state.cut_ns)} were thinned: power is a mean over up to "
        f"{seconds(longest_ns * 1e-9)}, and energy goes by time alone; "
        "smaragdine run --keep-readings all keeps them"
    ]
