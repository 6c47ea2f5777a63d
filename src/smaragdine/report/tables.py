"""Prints a recording for people: its energy, what was traced, and where the joules of a step go."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from smaragdine.accounting import spans
from smaragdine.accounting.diagram import Node, diagram
from smaragdine.accounting.footprint import DeviceTotal, Footprint, with_power
from smaragdine.accounting.run import Run, phases_j
from smaragdine.accounting.summary import RunSummary
from smaragdine.arrays import Floats
from smaragdine.errors import visible
from smaragdine.report.terminal import FittingTable, Line, how_it_ended, run_tables
from smaragdine.tracing.absence import why_no_operations
from smaragdine.units import joules, plain, plus_minus, seconds, si, watts

# A footprint as tables for a terminal, and as a tree.

_HEADERS = ("phase", "energy ± 95 %", "share", "power", "busy", "count", "basis")
# Columns that give way, first to last, if the terminal is too narrow for names and all figures.
_GIVES_WAY = ("basis", "busy", "count", "power", "share", "phase")
_NONE = "–"
_BAR = 6  # width in characters


def footprint_tables(footprint: Footprint, top: int) -> RenderableType:
    """Per device: names with the most energy first, idle, other processes, and the sum."""
    parts: list[RenderableType] = []
    for device, total in footprint.devices.items():
        parts += [device_table(device, total, footprint, top), *_device_remarks(total), Text("")]
    parts += footprint_remarks(footprint)
    if parts and isinstance(parts[-1], Text) and not parts[-1].plain:
        parts.pop()
    return Group(*parts)


def idle_remarks(footprint: Footprint) -> list[Text]:
    """What a tree of operations leaves out."""
    return [
        Text(
            f"{visible(device)}: {joules(total.idle_j)} of {joules(total.total_j)} idle besides", style="dim"
        )
        for device, total in footprint.devices.items()
    ]


def footprint_remarks(footprint: Footprint) -> list[Text]:
    """What one must know besides the figures."""
    lines = [
        f"{device}: {count:,} event{'s' if count > 1 else ''}, but nobody measured its power"
        for device, count in footprint.without_power.items()
    ]
    return [Text.assemble(("! ", "yellow"), visible(line)) for line in (*lines, *footprint.remarks)]


def device_table(device: str, total: DeviceTotal, footprint: Footprint, top: int) -> FittingTable:
    rows = with_power(footprint.device_rows(device))
    lines = [Line(row["name"], _figures(row, total)) for row in rows.slice(0, top).to_pylist()]
    if (hidden := rows.slice(top)).num_rows:
        left_j = float(hidden["energy_j"].to_numpy().sum())
        names = "name" if hidden.num_rows == 1 else "names"
        lines.append(Line(f"… {hidden.num_rows:,} more {names}", _sum(left_j, total), "dim"))
    lines.append(Line("(idle)", _sum(total.idle_j, total), "dim"))
    lines.append(Line("total", _sum(total.total_j, total), "bold"))
    there = {header for line in lines for header, figure in line.figures.items() if figure != _NONE}
    headers = [header for header in _HEADERS if header in there]
    return FittingTable(device, headers, lines, _GIVES_WAY, left=("phase", "basis"))


def _figures(row: dict[str, Any], total: DeviceTotal) -> dict[str, str]:
    return {
        "phase": visible(row["phase"] or _NONE),
        "energy ± 95 %": _within(row["energy_j"], row["uncertainty_j"]),
        "share": _share(row["energy_j"], total),
        "power": watts(row["power_w"]),
        "busy": seconds(row["busy_s"]),
        "count": f"{row['count']:,.0f}" if row["count"].is_integer() else f"{row['count']:.4g}",
        "basis": row["basis"] or _NONE,
    }


def _sum(energy_j: float, total: DeviceTotal) -> dict[str, str]:
    return {"energy ± 95 %": joules(energy_j), "share": _share(energy_j, total)}


def _within(energy_j: float, uncertainty_j: float | None) -> str:
    """Without digits that the uncertainty does not allow."""
    return joules(energy_j) if uncertainty_j is None else plus_minus(energy_j, uncertainty_j, "J")


def _share(energy_j: float, total: DeviceTotal) -> str:
    if total.total_j <= 0:
        return _NONE
    part = energy_j / total.total_j
    return f"{_bar(part)} {part:6.1%}"


def _bar(part: float) -> str:
    """A bar in eighths of a character."""
    eighths = round(max(0.0, min(part, 1.0)) * _BAR * 8)
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()).ljust(_BAR)


def _device_remarks(total: DeviceTotal) -> list[Text]:
    lines: list[str] = []
    if total.missing_s > 0:
        known = total.covered_s / (total.covered_s + total.missing_s)
        what = "power" if total.other_j is None else "the program's part of it"
        lines.append(
            f"{what} is known for {seconds(total.covered_s)}, {known:.1%} of the time; "
            f"{seconds(total.missing_s)} are missing"
        )
    if total.steps:
        steps = f"{total.steps} step{'s' if total.steps > 1 else ''}"
        lines.append(f"of one step, from {steps}" if total.per_step else steps)
    if total.static_j is not None:
        lines.append(f"of this {joules(total.static_j)} are the program's part of the idle device's power")
    if total.other_j is not None:
        lines.append(f"other processes and the monitor used {joules(total.other_j)} besides")
    if total.provenance not in (None, "measured"):
        lines.append(f"power is {total.provenance}")
    return [Text(line, style="dim") for line in lines]


def diagram_tree(node: Node, depth: int, least_share: float = 0.005) -> Tree:
    """The diagram as a tree: energy, share of the parent, split by phase."""
    tree = Tree(_label(node), guide_style="dim")
    _grow(tree, node, depth, least_share)
    return tree


def _grow(tree: Tree, node: Node, depth: int, least_share: float) -> None:
    if depth <= 0:
        return
    shown = [child for child in node.children if child.share is None or child.share >= least_share]
    for child in shown:
        _grow(tree.add(_label(child)), child, depth - 1, least_share)
    if len(shown) < len(node.children):
        left_j = sum(child.energy_j for child in node.children) - sum(child.energy_j for child in shown)
        tree.add(Text(f"… {len(node.children) - len(shown)} more, {joules(left_j)}", style="dim"))


def _label(node: Node) -> Text:
    share = "" if node.share is None else f" {node.share:.1%}"
    phases = sorted((-energy_j, phase) for phase, energy_j in node.by_phase.items() if phase)
    split = ", ".join(f"{visible(phase)} {joules(-less_j)}" for less_j, phase in phases)
    return Text.assemble(
        ("(all)" if node.is_root else visible(node.name) or "(no name)", "bold"),
        f"  {joules(node.energy_j)}",
        (share, "cyan"),
        (f"  {split}" if split else "", "dim"),
    )


_NOISE = 1e-9  # of a mean: a smaller spread comes from rounding
_LEAST_SHARE = 0.02  # of its parent; the tree sums up smaller ones


def overview_tables(
    run: Run,
    shown: Footprint | None,
    rows: Footprint | None,
    top: int,
    depth: int,
) -> RenderableType:
    """`shown` is the footprint to print: of a step or of what was traced, merged or not. `rows` is the same,
    grouped and sorted as asked for."""
    parts: list[RenderableType] = [
        run_tables(run.summary, idle=run.is_baseline),
        Text(""),
    ]
    if run.tracing is not None:
        parts += [_dim(line) for line in tracing_lines(run)]
    if shown is None and run.absent is None and (run.tracing is None or run.recording.lost("events")):
        parts.append(_dim(f"no operations: {why_no_operations(run.recording)}"))
    remarks: list[RenderableType] = []
    if run.absent is not None:
        parts.append(_warning(f"no energy per operation: {run.absent}"))
    if shown is not None and rows is not None:
        parts += _operations(run, shown, rows, top, depth)
        remarks += footprint_remarks(shown)
    if run.tracing is not None:
        remarks += [_warning(remark) for remark in run.tracing.remarks]
    return Group(*parts, Text(""), *remarks) if remarks else Group(*parts)


def tracing_lines(run: Run) -> list[str]:
    """What was traced, and what it cost."""
    tracing, steps = run.tracing, run.steps
    if tracing is None:
        return []
    what = visible(" and ".join(tracing.frameworks))
    slices = f"{_count(tracing.windows, 'slice')} of time ({seconds(tracing.traced_s)})"
    if steps is None:
        line = f"{what}: traced {slices}"
        if run.footprint is not None:  # without one, nobody has looked
            line += "; nothing tells steps apart"
    elif steps.source is None:
        line = f"{what}: traced {_count(len(steps.traced_ns), 'step')}, found in {slices}"
    else:
        line = f"{what}: traced {len(steps.traced_ns):,} of {_count(steps.count, 'step')}"
        if steps.count < len(steps.traced_ns):
            line = f"{what}: traced {_count(len(steps.traced_ns), 'step')}; not all marks of steps are left"
    if tracing.placed is not None:
        line += f"; {_part(tracing.placed)} of the busy time has a place in the model or a class"
    return [line] if steps is None else [line, _slowdown(steps)]


def _slowdown(steps: spans.Steps) -> str:
    paused = f"starting and stopping the profiler took {seconds(steps.paused_s)}"
    if steps.untraced_s is None:
        return f"{paused}; there is no untraced step to compare with"
    without = f", without {steps.far:,} far longer or shorter" if steps.far else ""
    mean = f"(mean of {steps.untraced_count:,}{without})"
    if steps.slower is None:
        line = (
            f"an untraced step took {seconds(steps.untraced_s)} {mean}; steps are announced before they are "
            f"done: how long a traced one took is not known; {paused}"
        )
    else:
        line = (
            f"a traced step took {seconds(steps.traced_s)} (mean of {len(steps.traced_ns):,}), "
            f"an untraced one {seconds(steps.untraced_s)} {mean}: {steps.slower:+.0%}; {paused}"
        )
    return line if steps.cost is None else f"{line}; all in all {_longer(steps.cost)}"


def _longer(cost: float) -> str:
    if cost >= 1:
        return f"the steps took {plain(1 + cost)} times as long"
    return f"the steps took {plain(cost * 100)} % longer"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _part(part: float) -> str:
    """Rounds so that 99.96 % does not become all."""
    return f"{part:.1%}" if part == 1 else f"{min(part, 0.999):.1%}"


def _operations(run: Run, shown: Footprint, rows: Footprint, top: int, depth: int) -> list[RenderableType]:
    parts: list[RenderableType] = []
    devices = [device for device in shown.devices if shown.device_rows(device).num_rows]
    devices.sort(key=lambda device: -shown.devices[device].total_j)
    for device in devices:
        table = device_table(device, rows.devices[device], rows, top)
        parts += [Text(""), _heading(device, run, shown), dataclasses.replace(table, title="")]
    for device in [device for device in shown.devices if device not in devices]:
        total_j = shown.devices[device].total_j
        parts.append(_dim(f"{visible(device)}: {joules(total_j)}, shared by no operation"))
    idle_j = math.fsum(shown.devices[device].idle_j for device in devices)
    phases = {**phases_j(shown, devices), "idle": idle_j}
    all_j = math.fsum(phases.values())
    if all_j > 0:
        text = ", ".join(f"{visible(phase)} {energy_j / all_j:.1%}" for phase, energy_j in phases.items())
        parts += [Text(""), Text(f"by phase: {text}")]
    if depth:
        parts += [Text(""), diagram_tree(diagram(shown), depth, _LEAST_SHARE)]
    return parts


def _heading(device: str, run: Run, shown: Footprint) -> Text:
    step = run.untraced.get(device)
    total = shown.devices[device]
    if total.per_step:
        what = run.what(device)
    else:
        what = _count(total.steps, "traced step") if total.steps else "while traced"
    line = Text.assemble(
        (f"{visible(device)}, {what}", "bold"), f": {joules(total.total_j)} in {seconds(total.covered_s)}"
    )
    if total.per_step and step is not None and step.length_s > 0:
        line.append(f", {min(step.busy_s / step.length_s, 1.0):.0%} busy")
    elif total.per_step and device.startswith("gpu:"):
        line.append(", from its first kernel to its last")  # a GPU lags behind the program's steps
    return line


_ENDED = {
    "failed": "the program failed",
    "killed": "the program was killed",
    "interrupted": "the recording was interrupted",
    "running": "the program still runs",
}
_SHORT = "its whole run is what it did until then"


def both_summaries(a: RunSummary, b: RunSummary) -> RenderableType:
    """Two runs side by side: the program's part, each device's energy, and a note if one was cut short."""
    lines: list[Line] = []
    if a.program_j is not None and b.program_j is not None:
        lines.append(_both("program", a.program_j, b.program_j, "bold"))
    for device in dict.fromkeys([*a.devices, *b.devices]):
        both = [side.devices.get(device) for side in (a, b)]
        if all(each is None or each.scope != "device" for each in both):
            continue
        energies = [None if each is None else each.energy_j for each in both]
        lines.append(_both(f"all {device}", energies[0], energies[1]))
    times = {"A": seconds(a.duration_s), "B": seconds(b.duration_s)}
    lines.append(
        Line("time", {**times, "B ÷ A": f"{b.duration_s / a.duration_s:.3f}" if a.duration_s else "–"})
    )
    cut = [
        Text.assemble(("! ", "yellow"), f"{side}: {_ENDED[each.status]}{how_it_ended(each)}: {_SHORT}")
        for side, each in (("A", a), ("B", b))
        if each.status in _ENDED
    ]
    cut += [
        _warning(f"{side}: {seconds(each.missing_s)} of {seconds(each.duration_s)} have no readings")
        for side, each in (("A", a), ("B", b))
        if each.missing_s > 0.0005
    ]
    return Group(FittingTable("whole run", ("A", "B", "B ÷ A"), lines, ("B ÷ A",)), *cut, Text(""))


def _both(name: str, a_j: float | None, b_j: float | None, style: str = "") -> Line:
    figures = {"A": joules(a_j), "B": joules(b_j)}
    if a_j and b_j is not None:
        figures["B ÷ A"] = f"{b_j / a_j:.3f}"
    return Line(name, figures, style)


_SAID = {
    spans.PROFILER: "profiler starts, stops or runs on",
    spans.WRITING: "its file is written",
    spans.FIRST: "warms up",
    spans.MORE: "with more than a step",
    spans.BEFORE: "before the traced ones",
    spans.ANOTHER: "far from the others",
    spans.HANDED: "handed over, not done",
}


def step_tables(run: Run, top: int) -> RenderableType:
    """The steps that took most energy, in the order of time; the mean of each kind that counts, and how many
    others there are. Of each device its part that is the program's, or all of it where nobody knows that."""
    table = run.step_energies
    if table is None:
        if run.recording.announced_steps:
            return _dim("the program announced one step, and nothing tells when it began")
        return _dim("the program announced no steps")
    steps, devices = table.steps, list(table.energy_j)
    length_s = steps.length_s
    known = run.power.program.keys() - run.power.unused
    called = {device: f"program's {device}" if device in known else f"all {device}" for device in devices}
    shown = np.sort(np.argsort(-np.nan_to_num(table.sum_j), kind="stable")[:top]).tolist()
    lines = [
        Line(
            _called(int(steps.index[i]), str(steps.kind[i])),
            {
                "time": seconds(float(length_s[i])),
                **{called[d]: joules(float(table.energy_j[d][i])) for d in devices},
            },
        )
        for i in shown
    ]
    # If a part of a step was not read, its mean is the mean power of the rest, as above the operations.
    known_j = {device: step.energy_j for device, step in {**run.unresolved, **run.untraced}.items()}
    counts, thinned = steps.counts(), steps.thinned
    for kind, means_j in ((spans.UNTRACED, table.thinned_mean_j | known_j), (spans.TRACED, {})):
        chosen = steps.kind == kind
        if counts.get(kind):
            more_s = thinned.lengths_us[thinned.of(kind)] * 1e-6
            lengths_s = np.concatenate([length_s[chosen], more_s], dtype=np.float64)
            figures = {"time": _mean_std(lengths_s, "s")}
            figures |= {called[d]: _mean_std(table.energy_j[d][chosen], "J", means_j.get(d)) for d in devices}
            lines.append(Line(f"mean of {counts[kind]:,} {kind}", figures, "bold"))
    others = ", ".join(f"{counts[kind]:,} ({said})" for kind, said in _SAID.items() if kind in counts)
    headers = tuple(called.values())
    rows = FittingTable("step", ("time", *headers), lines, tuple(reversed(headers)))
    said = [f"in neither mean: {others}"] if others else []
    if 0 < len(shown) < len(steps.kind):
        said.insert(
            0, f"shown: {len(shown):,} of {_count(len(steps.kind), 'step')}, those that took most energy"
        )
    if thinned.count.size:
        said.append(
            f"the readings of {thinned.lengths_us.size:,} steps were thinned: they count for the mean; "
            "what each took by itself is not known"
        )
    return Group(rows, *map(_dim, said)) if said else rows


def _called(index: int, kind: str) -> str:
    name = "?" if index < 0 else f"{index}"
    return name if kind == spans.UNTRACED else f"{name} ({_SAID.get(kind, kind)})"


def _mean_std(values: Floats, unit: str, mean: float | None = None) -> str:
    """The mean, with as many digits as elsewhere in the report, and the spread."""
    known = values[np.isfinite(values)]
    if mean is None and len(known):
        mean = float(known.mean())
    if mean is None or len(known) < 2:
        return si(mean, unit)
    std = float(known.std(ddof=1))
    return f"{si(mean, unit)} ± {si(std, unit, 2) if std > _NOISE * abs(mean) else 0}"


def _dim(line: str) -> Text:
    return Text(line, style="dim")


def _warning(line: str) -> Text:
    return Text.assemble(("! ", "yellow"), visible(line))
