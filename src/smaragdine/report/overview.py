"""A recording as people read it: its energy, what was traced, and where a step's joules go."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from smaragdine.accounting.diagram import diagram
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.overview import Overview, Tracing, phases_j
from smaragdine.accounting.power import Floats
from smaragdine.accounting.step_spans import Steps
from smaragdine.accounting.steps import UntracedStep, step_energies
from smaragdine.accounting.summary import RunSummary
from smaragdine.recording.reader import Recording
from smaragdine.report.fitting import FittingTable, Line, visible
from smaragdine.report.footprint import device_table, diagram_tree, footprint_remarks
from smaragdine.report.terminal import run_tables
from smaragdine.tracing.assemble.absence import why_no_operations
from smaragdine.units import joules, plain, plus_minus, seconds

_LEAST_SHARE = 0.02  # of its parent; smaller ones are summed up in the tree
_LEVEL = (0.8, 1.25)  # outside, traced and untraced steps are not the same work


def overview_tables(
    found: Overview, shown: Footprint | None, rows: Footprint | None, top: int, depth: int
) -> RenderableType:
    """`shown` is the footprint to print: a step's, or what was traced, merged or not; `rows` the same in the
    groups and the order asked for."""
    parts: list[RenderableType] = [run_tables(found.summary), Text("")]
    if found.tracing is not None:
        parts += [_dim(line) for line in _tracing_lines(found.tracing, found.steps)]
    elif shown is None and found.absent is None:
        why = why_no_operations(found.summary.marks, found.summary.duration_s)
        parts.append(_dim(f"no operations: {why}"))
    remarks: list[RenderableType] = []
    if found.absent is not None:
        parts.append(_warning(f"no energy per operation: {found.absent}"))
    if shown is not None and rows is not None:
        parts += _operations(found, shown, rows, top, depth)
        remarks += [*_level_remarks(found.untraced), *footprint_remarks(shown)]
    if found.tracing is not None:
        remarks += [_warning(remark) for remark in found.tracing.remarks]
    return Group(*parts, Text(""), *remarks) if remarks else Group(*parts)


def _tracing_lines(tracing: Tracing, steps: Steps | None) -> list[str]:
    what = " and ".join(tracing.frameworks)
    slices = f"{_count(tracing.windows, 'slice')} of time ({seconds(tracing.traced_s)})"
    if steps is None:
        line = f"{what}: traced {slices}; nothing tells steps apart"
    elif steps.source is None:
        line = f"{what}: traced {_count(len(steps.traced_ns), 'step')}, found in {slices}"
    else:
        line = f"{what}: traced {len(steps.traced_ns)} of {steps.count} steps"
    if tracing.placed is not None:
        line += f"; {_share(tracing.placed)} of the busy time has a place in the model or a class"
    return [line] if steps is None else [line, _slowdown(steps)]


def _slowdown(steps: Steps) -> str:
    paused = f"starting and stopping the profiler took {seconds(steps.paused_s)}"
    if steps.untraced_s is None:
        return f"{paused}; there is no untraced step to compare with"
    if steps.slower is None:
        line = f"steps are announced before they are done: how long a traced one took is not known; {paused}"
    else:
        line = (
            f"a traced step took {seconds(steps.traced_s)}, an untraced one {seconds(steps.untraced_s)} "
            f"({steps.slower:+.0%}, medians); {paused}"
        )
    return line if steps.cost is None else f"{line}; all in all {_longer(steps.cost)}"


def _longer(cost: float) -> str:
    if cost >= 1:
        return f"the steps took {plain(1 + cost)} times as long"
    return f"the steps took {plain(cost * 100)} % longer"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _share(part: float) -> str:
    """99.96 % is not all."""
    return f"{part:.1%}" if part == 1 else f"{min(part, 0.999):.1%}"


def _operations(
    found: Overview, shown: Footprint, rows: Footprint, top: int, depth: int
) -> list[RenderableType]:
    parts: list[RenderableType] = []
    devices = [device for device in shown.devices if shown.device_rows(device).num_rows]
    devices.sort(key=lambda device: -shown.devices[device].total_j)
    for device in devices:
        table = device_table(device, rows.devices[device], rows, top)
        parts += [Text(""), _heading(device, found, shown), dataclasses.replace(table, title="")]
    for device in [device for device in shown.devices if device not in devices]:
        total_j = shown.devices[device].total_j
        parts.append(_dim(f"{visible(device)}: {joules(total_j)}, shared by no operation"))
    phases = phases_j(shown, devices)
    all_j = sum(phases.values())
    if all_j > 0:
        text = ", ".join(f"{visible(phase)} {energy_j / all_j:.1%}" for phase, energy_j in phases.items())
        parts += [Text(""), Text(f"by phase: {text}")]
    if depth:
        parts += [Text(""), diagram_tree(diagram(shown), depth, _LEAST_SHARE)]
    return parts


def _heading(device: str, found: Overview, shown: Footprint) -> Text:
    step = found.untraced.get(device)
    total = shown.devices[device]
    if found.step is None or total.covered_s != found.step.devices[device].covered_s:
        what = _count(total.steps, "traced step") if total.steps else "while traced"
        length_s = total.covered_s
    elif step is None:
        what, length_s = "one traced step", total.covered_s
    else:
        what, length_s = "one step", step.length_s
    line = Text.assemble(
        (f"{visible(device)}, {what}", "bold"), f": {joules(total.total_j)} in {seconds(length_s)}"
    )
    if what == "one step" and step is not None and step.length_s > 0:
        line.append(f", {min(step.busy_s / step.length_s, 1.0):.0%} busy")
    return line


def _level_remarks(untraced: Mapping[str, UntracedStep]) -> Sequence[Text]:
    low, high = _LEVEL
    return [
        _warning(
            f"{device}: operations of untraced steps take {step.factor:.2f} times the energy of traced ones: "
            "they may not do the same work"
        )
        for device, step in untraced.items()
        if step.factor is not None and not low <= step.factor <= high
    ]


def both_summaries(a: RunSummary, b: RunSummary) -> RenderableType:
    """Two runs device by device."""
    lines: list[Line] = []
    for device in dict.fromkeys([*a.devices, *b.devices]):
        both = [side.devices.get(device) for side in (a, b)]
        if all(each is None or each.scope != "device" for each in both):
            continue
        energies = [None if each is None else each.energy_j for each in both]
        figures = {
            "A": "–" if energies[0] is None else joules(energies[0]),
            "B": "–" if energies[1] is None else joules(energies[1]),
        }
        if energies[0] and energies[1] is not None:
            figures["B ÷ A"] = f"{energies[1] / energies[0]:.3f}"
        lines.append(Line(device, figures))
    times = {"A": seconds(a.duration_s), "B": seconds(b.duration_s)}
    lines.append(
        Line("time", {**times, "B ÷ A": f"{b.duration_s / a.duration_s:.3f}" if a.duration_s else "–"})
    )
    return Group(FittingTable("whole run", ("A", "B", "B ÷ A"), lines, ("B ÷ A",)), Text(""))


def step_tables(recording: Recording, top: int) -> RenderableType:
    """The steps that took most energy, and what one takes on the mean; whole devices, whoever used them."""
    table = step_energies(recording)
    if table is None:
        return _dim("the program announced no steps")
    devices = list(table.energy_j)
    length_s = table.length_s
    sums_j = table.sum_j
    lines = [
        Line(
            f"{table.index[i]}{' (traced)' if table.traced[i] else ''}",
            {
                "time": seconds(float(length_s[i])),
                **{d: joules(float(table.energy_j[d][i])) for d in devices},
            },
        )
        for i in (-sums_j).argsort(kind="stable")[:top].tolist()
    ]
    for name, chosen in (("mean ± std, untraced", ~table.traced), ("mean ± std, traced", table.traced)):
        if chosen.sum() > 1:
            figures = {"time": _mean_std(length_s[chosen], "s")}
            figures |= {device: _mean_std(table.energy_j[device][chosen], "J") for device in devices}
            lines.append(Line(f"{name} ({chosen.sum()})", figures, "bold"))
    return FittingTable("step", ("time", *devices), lines, tuple(reversed(devices)))


def _mean_std(values: Floats, unit: str) -> str:
    known = values[np.isfinite(values)]
    if len(known) < 2:
        return "–"
    return plus_minus(float(known.mean()), float(known.std(ddof=1)), unit)


def _dim(line: str) -> Text:
    return Text(line, style="dim")


def _warning(line: str) -> Text:
    return Text.assemble(("! ", "yellow"), visible(line))
