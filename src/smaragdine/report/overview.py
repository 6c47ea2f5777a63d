"""A recording as people read it: its energy, what was traced, and where a step's joules go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from smaragdine.accounting.diagram import diagram
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.overview import Overview, Tracing, phases_j
from smaragdine.accounting.steps import Steps, UntracedStep
from smaragdine.report.fitting import visible
from smaragdine.report.footprint import device_table, diagram_tree, footprint_remarks
from smaragdine.report.terminal import run_tables
from smaragdine.units import joules, seconds

_LEVEL = (0.8, 1.25)  # outside, traced and untraced steps are not the same work


def overview_tables(found: Overview, shown: Footprint | None, top: int, depth: int) -> RenderableType:
    """`shown` is the footprint to print: a step's, or what was traced, merged or not."""
    parts: list[RenderableType] = [run_tables(found.summary), Text("")]
    if found.tracing is None:
        parts.append(
            _dim("no operations: nothing was traced (smaragdine run traces where a framework is used)")
        )
        return Group(*parts)
    parts += [_dim(line) for line in _tracing_lines(found.tracing, found.steps)]
    if shown is not None:
        parts += _operations(found, shown, top, depth)
    parts += [_warning(remark) for remark in found.tracing.remarks]
    return Group(*parts)


def _tracing_lines(tracing: Tracing, steps: Steps | None) -> list[str]:
    what = " and ".join(tracing.frameworks)
    if steps is None:
        lines = [
            f"{what}: traced {tracing.windows} slices of time, {seconds(tracing.traced_s)}; it has no steps"
        ]
    else:
        lines = [f"{what}: traced {len(steps.traced_ns)} of {steps.count} steps"]
    if tracing.placed is not None:
        lines[0] += f"; {tracing.placed:.1%} of their time has a place in the model or a class"
    if steps is not None:
        lines.append(_slowdown(steps))
    return lines


def _slowdown(steps: Steps) -> str:
    if steps.untraced_s is None or steps.slower is None:
        return f"a traced step took {seconds(steps.traced_s)}; no untraced one to compare with"
    line = (
        f"a traced step took {seconds(steps.traced_s)}, an untraced one {seconds(steps.untraced_s)} "
        f"({steps.slower:+.0%}); profiler started and stopped in {seconds(steps.paused_s)}"
    )
    return line if steps.cost is None else f"{line}; the training took {steps.cost:.2%} longer"


def _operations(found: Overview, shown: Footprint, top: int, depth: int) -> list[RenderableType]:
    parts: list[RenderableType] = []
    devices = [device for device in shown.devices if shown.device_rows(device).num_rows]
    for device in devices:
        parts += [Text(""), _heading(device, found), device_table(device, shown.devices[device], shown, top)]
    for device in [device for device in shown.devices if device not in devices]:
        total_j = shown.devices[device].total_j
        parts.append(_dim(f"{visible(device)}: {joules(total_j)}, shared by no operation"))
    phases = phases_j(shown, devices)
    all_j = sum(phases.values())
    if all_j > 0:
        text = ", ".join(f"{visible(phase)} {energy_j / all_j:.1%}" for phase, energy_j in phases.items())
        parts += [Text(""), Text(f"by phase: {text}")]
    if depth:
        parts += [Text(""), diagram_tree(diagram(shown), depth)]
    parts += [Text(""), *_level_remarks(found.untraced), *footprint_remarks(shown)]
    return parts


def _heading(device: str, found: Overview) -> Text:
    step = found.untraced.get(device)
    if found.steps is None:
        return Text(f"{visible(device)}, while traced", style="bold")
    if step is None:
        return Text(f"{visible(device)}, one traced step", style="bold")
    busy = min(step.busy_s / step.length_s, 1.0)
    return Text.assemble(
        (f"{visible(device)}, one step", "bold"),
        f": {joules(step.energy_j)} in {seconds(step.length_s)}, {busy:.0%} busy",
    )


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


def _dim(line: str) -> Text:
    return Text(line, style="dim")


def _warning(line: str) -> Text:
    return Text.assemble(("! ", "yellow"), visible(line))
