"""Traced steps and untraced ones: what a step costs without tracing.

Tracing stretches a step, mostly by idling. So a traced step says how long which operation is busy and what it
draws, and an untraced one how long a step is and how much energy it takes. Idle that tracing itself caused is
not carried over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from smaragdine.accounting.arithmetic import per_step, scale
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.idle import busy_spans
from smaragdine.accounting.meters import Meter, Meters
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.step_spans import Steps, main_steps, mean_s, resumed_ns
from smaragdine.accounting.traces import device_traces
from smaragdine.recording.reader import Recording

pc: Any = pyarrow.compute  # its functions are made on import, where no type checker sees them

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_FITS = 1.25
MOST_MISSED = 0.1  # of a time: what was read of the rest would look like a saving


@dataclass(frozen=True)
class UntracedStep:
    """What a device does in a step that nobody traced."""

    length_s: float
    energy_j: float
    busy_s: float  # something ran, as in the traced steps
    idle_j: float
    factor: float | None  # operations cost this many times what they cost in a traced step


def untraced_step(
    footprint: Footprint, meters: Meters, steps: Steps, events: pa.Table
) -> dict[str, UntracedStep]:
    """Device → what it does in an untraced step.

    `footprint` is that of the traced steps; `meters` have the power of `steps.untraced_ns`.
    """
    found: dict[str, UntracedStep] = {}
    count = len(steps.untraced_ns)
    for device, total in footprint.devices.items():
        meter = meters.of.get(device)
        if meter is None or not count or not meter.trace.start_ns.size:
            continue
        covered_s = float((meter.trace.end_ns - meter.trace.start_ns).sum()) * 1e-9
        length_s = float((steps.untraced_ns[:, 1] - steps.untraced_ns[:, 0]).mean()) * 1e-9
        power_w = (
            float((meter.trace.power_w * (meter.trace.end_ns - meter.trace.start_ns)).sum())
            * 1e-9
            / covered_s
        )
        energy_j = power_w * length_s
        traced = max(total.steps, 1)
        busy_s = min(_busy_s(events, device), total.covered_s)
        idle_w = total.idle_j / (total.covered_s - busy_s) if total.covered_s > busy_s else 0.0
        if meter.idle_w is not None:
            idle_w = meter.idle_w
        # By its rows: what is left of the total without its idle may be nothing but rounding.
        operations_j = math.fsum(footprint.device_rows(device)["energy_j"].to_pylist()) / traced
        idle_j = min(max(length_s - busy_s / traced, 0.0) * idle_w, energy_j)
        # What they cannot have drawn was used while nothing that is known ran.
        most_w = _most_w(device, meter, operations_j * traced / busy_s if busy_s else 0.0)
        idle_j = max(idle_j, energy_j - busy_s / traced * most_w)
        if operations_j > 0:
            factor = (energy_j - idle_j) / operations_j
        else:
            factor, idle_j = None, energy_j  # memory, or a socket nothing was traced on
        found[device] = UntracedStep(length_s, energy_j, busy_s / traced, idle_j, factor)
    return found


def _most_w(device: str, meter: Meter, traced_w: float) -> float:
    """What operations draw at most.

    A processor is at work between them, too, and its readings show what it draws. A GPU's are means over
    kernels and waiting: far below what the kernels draw, where it waits for most of the time.
    """
    known_w = meter.sensor.limit_w if device.startswith("gpu:") else float(meter.trace.power_w.max())
    return max(known_w, traced_w)


def handed_over(steps: Steps, untraced: Mapping[str, UntracedStep]) -> bool:
    """Whether marks only say when work was handed over: more runs in a traced step than fits into it."""
    if not len(steps.traced_ns):
        return False
    return any(step.busy_s > _FITS * mean_s(steps.traced_ns) for step in untraced.values())


def runs_behind(steps: Steps, untraced: Mapping[str, UntracedStep]) -> bool:
    """The same of untraced steps too. In the long run the queue is full, and their mean length is right."""
    if not len(steps.traced_ns):
        return False
    traced_s = mean_s(steps.traced_ns)
    return any(step.busy_s > _FITS * max(traced_s, step.length_s) for step in untraced.values())


def at_level(footprint: Footprint, untraced: Mapping[str, UntracedStep]) -> Footprint:
    """The footprint of one untraced step: the traced operations at its level, with its idle."""
    one = per_step(footprint)
    factors = {device: step.factor for device, step in untraced.items()}
    levelled = scale(one, {device: factors.get(device) or 1.0 for device in one.devices})
    devices = {
        device: dataclasses.replace(
            total,
            total_j=untraced[device].energy_j,
            idle_j=untraced[device].idle_j,
            covered_s=untraced[device].length_s,
            missing_s=0.0,
            static_j=None,
            other_j=None,
        )
        if device in untraced
        else total
        for device, total in levelled.devices.items()
    }
    rows = levelled.rows
    if untraced:
        # Busy time stands as it was traced: only the level is another.
        rows = rows.set_column(rows.schema.get_field_index("busy_s"), "busy_s", one.rows["busy_s"])
        rows = rows.set_column(rows.schema.get_field_index("count"), "count", one.rows["count"])
        # Where idling takes all the energy of an untraced step, nothing is left for operations.
        nothing = [factors.get(device) == 0 for device in rows["device"].to_pylist()]
        left_j = pc.if_else(pa.array(nothing, pa.bool_()), 0.0, rows["energy_j"])
        rows = rows.set_column(rows.schema.get_field_index("energy_j"), "energy_j", left_j)
    return dataclasses.replace(levelled, rows=rows, devices=devices)


def _busy_s(events: pa.Table, device: str) -> float:
    """Time in which at least one event ran."""
    here = events.filter(pc.equal(events["device"].cast(pa.string()), device))
    start_ns = here["start_ns"].to_numpy()
    begin_ns, until_ns = busy_spans(start_ns, start_ns + here["duration_ns"].to_numpy())
    return float((until_ns - begin_ns).sum()) * 1e-9


@dataclass(frozen=True)
class StepEnergies:
    """Every announced step, as long as the time since the one before. Whole devices, whoever used them."""

    index: Ints
    spans_ns: Ints  # rows of begin and end
    traced: npt.NDArray[np.bool_]  # the profiler ran, started or stopped in it
    energy_j: Mapping[str, Floats]  # per device; nan: too much of the step was not read

    @property
    def length_s(self) -> Floats:
        return np.asarray((self.spans_ns[:, 1] - self.spans_ns[:, 0]) * 1e-9, dtype=np.float64)

    @property
    def sum_j(self) -> Floats:
        return np.sum([np.zeros(len(self.spans_ns)), *self.energy_j.values()], axis=0)


def step_energies(recording: Recording) -> StepEnergies | None:
    """None where nobody announced two."""
    ends = main_steps(recording.marks)
    if ends.num_rows < 2:
        return None
    t_ns = ends["t_ns"].to_numpy()
    spans = np.stack([t_ns[:-1], t_ns[1:]], axis=1)
    traced, pid = np.zeros(len(spans), dtype=np.bool_), ends["pid"][0].as_py()
    for window in recording.windows.to_pylist():
        if window["pid"] == pid:
            # While its file is written beside the program the profiler listens no more.
            traced |= (spans[:, 1] > window["asked_ns"]) & (spans[:, 0] < resumed_ns(window))
    return StepEnergies(
        ends["index"].fill_null(-1).to_numpy()[1:],
        spans,
        traced,
        {
            device: np.where(_was_read(trace, t_ns), np.diff(trace.energy_until_j(t_ns)), np.nan)
            for device, trace in device_traces(recording).items()
            if trace.start_ns.size
        },
    )


def _was_read(trace: PowerTrace, t_ns: Ints) -> npt.NDArray[np.bool_]:
    """Of each step between two of these instants."""
    missed_ns = np.zeros(len(t_ns) - 1)
    for begin_ns, end_ns in trace.missing(int(t_ns[0]), int(t_ns[-1])):
        missed_ns += np.maximum(np.minimum(t_ns[1:], end_ns) - np.maximum(t_ns[:-1], begin_ns), 0)
    return (missed_ns <= MOST_MISSED * np.diff(t_ns)) & (np.diff(trace.covered_until_ns(t_ns)) > 0)
