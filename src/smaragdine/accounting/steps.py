"""Works out what a step costs without tracing, from traced steps and untraced ones.

Tracing makes a step longer, mostly by idling. So traced steps tell how long each operation is busy and what
it draws, and untraced ones how long a step is and how much energy it takes. Idle time that tracing caused is
not carried over. If an untraced step idled at the power of the gaps between traced operations, next to
nothing may be left for its operations: then it does not idle at that power, and nothing else tells idle from
operations, so we show a traced step as it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.accounting.arithmetic import per_step, scale
from smaragdine.accounting.calibrated import UntracedLevel
from smaragdine.accounting.device_power import DevicePower, DevicePowers
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.gpu_idle import busy_spans
from smaragdine.accounting.power import MOST_MISSED, PowerTrace
from smaragdine.accounting.spans import (
    FIRST,
    UNTRACED,
    Span,
    Steps,
    StepTable,
    all_spans,
    joined,
    mean_s,
)
from smaragdine.arrays import Floats, Ints
from smaragdine.arrow import pc
from smaragdine.recording.reader import Recording

_FITS = 1.25
_LEVEL_S = 1.0  # of untraced steps: the sensor takes 50 samples in it
_LEAST_FACTOR = 0.5  # the same operations cannot take less than half of their energy


@dataclass(frozen=True)
class UntracedStep:
    """What a device does in an untraced step."""

    length_s: float
    energy_j: float
    busy_s: float  # time in which something ran, as in traced steps
    idle_j: float
    factor: float | None  # what operations cost, in units of what they cost traced

    @property
    def resolved(self) -> bool:
        """Whether we can tell operations from idle."""
        return self.factor is None or self.factor >= _LEAST_FACTOR


def untraced_step(
    footprint: Footprint, meters: DevicePowers, steps: Steps, events: pa.Table
) -> dict[str, UntracedStep]:
    """Device → what it does in an untraced step.

    `footprint` is that of the traced steps, `meters` have the power of `steps.untraced_ns`.
    """
    found: dict[str, UntracedStep] = {}
    for device, total in footprint.devices.items():
        meter = meters.of.get(device)
        length_s = steps.untraced_s
        if meter is None or length_s is None or not meter.trace.start_ns.size:
            continue
        energy_j = _mean_w(meter.trace) * length_s
        traced = max(total.steps, 1)
        busy_s = min(_busy_s(events, device), total.covered_s)
        idle_w = total.idle_j / (total.covered_s - busy_s) if total.covered_s > busy_s else 0.0
        if meter.idle_w is not None:
            idle_w = meter.idle_w
        # Summed over rows: the total less idle may be nothing but rounding.
        operations_j = math.fsum(footprint.device_rows(device)["energy_j"].to_pylist()) / traced
        idle_j = min(max(length_s - busy_s / traced, 0.0) * idle_w, energy_j)
        # What operations cannot have drawn was used while none of them ran.
        most_w = _most_w(device, meter, operations_j * traced / busy_s if busy_s else 0.0)
        idle_j = max(idle_j, energy_j - busy_s / traced * most_w)
        if operations_j > 0:
            factor = (energy_j - idle_j) / operations_j
        else:
            factor, idle_j = None, energy_j  # memory, or a socket on which nothing was traced
        found[device] = UntracedStep(length_s, energy_j, busy_s / traced, idle_j, factor)
    return found


def untraced_levels(meters: DevicePowers, steps: Steps) -> dict[str, UntracedLevel]:
    """Device → what the counter says of its untraced steps, if there are enough of them. `meters` have the
    power of `steps.untraced_ns`."""
    length_s, count = steps.untraced_s, steps.untraced_count
    if length_s is None or not len(steps.traced_ns) or steps.uneven or length_s * count < _LEVEL_S:
        return {}
    return {
        device: UntracedLevel(len(steps.traced_ns), length_s, _mean_w(meter.trace) * length_s)
        for device, meter in meters.of.items()
        if meter.trace.start_ns.size
    }


def _mean_w(trace: PowerTrace) -> float:
    length_ns = trace.end_ns - trace.start_ns
    return float((trace.power_w * length_ns).sum()) / float(length_ns.sum())


def _most_w(device: str, meter: DevicePower, traced_w: float) -> float:
    """What operations draw at most.

    A processor also works between them, and its readings show what it draws. A GPU's readings are means over
    kernels and waiting: far below what kernels draw, if the GPU mostly waits.
    """
    known_w = meter.sensor.limit_w if device.startswith("gpu:") else float(meter.trace.power_w.max())
    return max(known_w, traced_w)


def handed_over(steps: Steps, untraced: Mapping[str, UntracedStep]) -> bool:
    """Whether marks only say when work was handed over: then more runs in a traced step than fits into it."""
    if not len(steps.traced_ns):
        return False
    return any(step.busy_s > _FITS * mean_s(steps.traced_ns) for step in untraced.values())


def runs_behind(steps: Steps, untraced: Mapping[str, UntracedStep]) -> bool:
    """Whether untraced steps are handed over too. With a full queue their mean is right."""
    if not len(steps.traced_ns):
        return False
    traced_s = mean_s(steps.traced_ns)
    return any(step.busy_s > _FITS * max(traced_s, step.length_s) for step in untraced.values())


def at_level(footprint: Footprint, untraced: Mapping[str, UntracedStep]) -> Footprint:
    """The footprint of one untraced step: the traced operations at its level, and its idle. Devices whose
    untraced step is not known, or cannot be resolved, stay as traced."""
    untraced = {device: step for device, step in untraced.items() if step.resolved}
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
        # Busy time stays as traced: only the level changes.
        rows = rows.set_column(rows.schema.get_field_index("busy_s"), "busy_s", one.rows["busy_s"])
        rows = rows.set_column(rows.schema.get_field_index("count"), "count", one.rows["count"])
    return dataclasses.replace(levelled, rows=rows, devices=devices)


def _busy_s(events: pa.Table, device: str) -> float:
    """Time in which at least one event ran."""
    here = events.filter(pc.equal(events["device"].cast(pa.string()), device))
    start_ns = here["start_ns"].to_numpy()
    begin_ns, until_ns = busy_spans(start_ns, start_ns + here["duration_ns"].to_numpy())
    return float((until_ns - begin_ns).sum()) * 1e-9


@dataclass(frozen=True)
class StepEnergies:
    """What each device used in every step of a table."""

    steps: StepTable
    energy_j: Mapping[str, Floats]  # per device; nan: too much of the step was missed
    # Per device, if readings were thinned: the mean over all untraced steps.
    thinned_mean_j: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def sum_j(self) -> Floats:
        return np.sum([np.zeros(len(self.steps.kind)), *self.energy_j.values()], axis=0)


def step_energies(steps: StepTable, traces: Mapping[str, PowerTrace]) -> StepEnergies:
    """What each step used of these traces, which are of whole devices or of the program's part."""
    means_j: dict[str, float] = {}
    if steps.thinned.count.size:
        own_ns = steps.of(UNTRACED)
        spans = joined([*steps.thinned.spans_ns(), *((int(begin), int(end)) for begin, end in own_ns)])
        long_s = sum(end - begin for begin, end in spans) * 1e-9
        count = len(own_ns) + int(steps.thinned.of(UNTRACED).sum())
        for device, trace in traces.items():
            covered_s = sum(trace.covered_s(*span) for span in spans)
            if covered_s > 0 and count:
                used_j = sum(trace.energy_j(*span) for span in spans)
                means_j[device] = used_j / covered_s * long_s / count
    return StepEnergies(
        steps,
        {
            device: np.where(
                _was_read(trace, steps.spans_ns), np.diff(trace.energy_until_j(steps.spans_ns))[:, 0], np.nan
            )
            for device, trace in traces.items()
            if trace.start_ns.size
        },
        means_j,
    )


def announced_steps(recording: Recording, table: StepTable | None) -> list[tuple[Span, str | None]]:
    """Every step of every process and source, by their ends, with its kind if the table has it."""
    found: list[tuple[Span, str | None]] = [
        (span, None) for span in all_spans(recording) if span.name == "step"
    ]
    if table is None:
        return found
    first_ns = int(table.spans_ns[0, 1]) if len(table.spans_ns) else 0
    told: list[tuple[Span, str | None]] = []
    for span, _ in found:
        if (span.rank, span.pid, span.source) != (table.rank, table.pid, table.source):
            told.append((span, None))
        elif span.end_ns < first_ns:  # the very first, if a mark says when it began
            told.append((span, FIRST))
    who = (table.rank, table.pid, table.source)
    rows = zip(table.index.tolist(), table.spans_ns.tolist(), table.kind.tolist(), strict=True)
    told += [
        (Span("step", None if index < 0 else index, *who, begin_ns, end_ns), kind)
        for index, (begin_ns, end_ns), kind in rows
    ]
    return sorted(told, key=lambda step: step[0].end_ns)


def _was_read(trace: PowerTrace, spans_ns: Ints) -> npt.NDArray[np.bool_]:
    missed_ns = np.zeros(len(spans_ns))
    if len(spans_ns):
        for begin_ns, end_ns in trace.missing(int(spans_ns.min()), int(spans_ns.max())):
            missed_ns += np.maximum(
                np.minimum(spans_ns[:, 1], end_ns) - np.maximum(spans_ns[:, 0], begin_ns), 0
            )
    length_ns = spans_ns[:, 1] - spans_ns[:, 0]
    return (missed_ns <= MOST_MISSED * length_ns) & (np.diff(trace.covered_until_ns(spans_ns))[:, 0] > 0)
