"""The tables of a study: mean ± standard deviation over runs, every kind of result in its own rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from smaragdine.accounting.diagram import Node
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.rows import column
from smaragdine.report.figures.layers import family_of
from smaragdine.report.figures.runs import NotDrawn, only
from smaragdine.report.figures.stages import IDLE, phase_energies_j
from smaragdine.report.figures.top import TOP, Bars, energies, powers
from smaragdine.report.study.cells import Cell, Column, Mean, Table, mean_of
from smaragdine.report.study.document import counted, provenance_of, settings_of
from smaragdine.report.study.material import Material, variant_label
from smaragdine.study.claims import stage_steps
from smaragdine.study.results import Result
from smaragdine.study.scores import summaries
from smaragdine.study.settings import STAGES

if TYPE_CHECKING:
    from rich.console import RenderableType

    from smaragdine.study.findings import Finding

_KIND = Column("kind", "Kind")
_RUNS = Column("runs", "Runs")
_PHASES = ("forward", "backward", "optimizer", "other")
_STYLES = {"agrees": "green", "differs": "yellow", "not comparable": "dim"}


def findings_table(findings: Sequence[Finding]) -> RenderableType:
    """For the terminal: what was asked, the number here and there, and whether they agree."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 1, 0), header_style="bold")
    table.add_column("finding", overflow="fold", ratio=3)
    table.add_column("here", overflow="fold", ratio=3)
    table.add_column("there", overflow="fold", ratio=2)
    table.add_column("verdict", no_wrap=True)
    asked = Counter(finding.question for finding in findings)
    for finding in findings:
        verdict = Text(finding.verdict, style=_STYLES.get(finding.verdict, ""))
        question = Text(finding.question)
        if asked[finding.question] > 1:  # of several frameworks, precisions or programs
            question.append(f"\n{settings_of(finding)}", style="dim")
        table.add_row(question, Text(finding.here), Text(finding.there), verdict)
    return Group(table, Text(""), Text(counted(findings)))


def study_tables(materials: Sequence[Material]) -> list[Table]:
    """Those that have rows."""
    found = [
        stages_table(materials),
        layers_table(materials),
        top_table(materials),
        variants_table(materials),
        albert_table(materials),
    ]
    power = power_words(materials)
    return [replace(table, note=f"{table.note} {power}".strip()) for table in found if table.rows]


def power_words(materials: Sequence[Material]) -> str:
    """How the power behind a table is known."""
    found: dict[str, dict[str, None]] = {}
    for material in materials:
        how = provenance_of(material.results).get(material.device, "of unknown provenance")
        found.setdefault(material.device, {})[how] = None
    return " ".join(f"Power of {device}: {', '.join(how)}." for device, how in found.items())


def stages_table(materials: Sequence[Material]) -> Table:
    """Of the shape that is no variant."""
    rows = [
        _stage_row(material, model, stage, results)
        for material in materials
        for model in ("bert", "albert")
        for stage in STAGES
        for results in [material.like_base(model, stage)]
        if results
    ]
    columns = (
        _KIND,
        Column("model", "Model"),
        Column("stage", "Stage"),
        Column("size", "Size"),
        Column("step_j", "Energy of a step", "J"),
        Column("stage_j", "Of the stage", "J"),
        *(Column(f"{phase}_j", phase.capitalize(), "J") for phase in (*_PHASES, IDLE)),
        Column("step_s", "Time of a step", "s"),
        Column("all_devices_step_j", "A step on all devices", "J"),
        _RUNS,
    )
    note = "On the device that does the work, unless said. A stage is 500 steps, prediction 1,063 sentences."
    return Table("stages", "Stages", columns, tuple(rows), note)


def _stage_row(material: Material, model: str, stage: str, results: Sequence[Result]) -> tuple[Cell, ...]:
    parts = [phase_energies_j(only(result.step, [material.device])) for result in results]
    total_j = [math.fsum(part.values()) for part in parts]
    all_j = [math.fsum(phase_energies_j(result.step).values()) for result in results]
    by_phase = [[part.get(phase, 0.0) for part in parts] for phase in (*_PHASES, IDLE)]
    steps = stage_steps(stage, int(results[0].facts.get("batch", 1)))
    return (
        material.kind,
        model.upper(),
        STAGES[stage],
        _size(results[0]),
        mean_of(total_j),
        mean_of([value * steps for value in total_j]),
        *map(mean_of, by_phase),
        mean_of([result.step_s for result in results]),
        mean_of(all_j),
        len(results),
    )


def layers_table(materials: Sequence[Material]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for material in materials:
        try:
            found = family_of([r.step for r in material.base], material.device, material.base[0].setting)
        except NotDrawn:
            continue
        for node in found[0]:
            energies_j = [mean_of([_of(family, node.path, p) for family in found]) for p in _PHASES[:2]]
            shares = [mean_of([_share(family, node.path, p) for family in found]) for p in _PHASES[:2]]
            rows.append((material.kind, node.path, *energies_j, *shares, len(found)))
    columns = (
        _KIND,
        Column("layer", "Layer"),
        Column("forward_j", "Forward", "J"),
        Column("backward_j", "Backward", "J"),
        Column("forward_share_percent", "Share of forward", "%"),
        Column("backward_share_percent", "Share of backward", "%"),
        _RUNS,
    )
    note = "Energy of a step on the device that does the work; shares of all layers that repeat."
    return Table("layers", "Layers", columns, tuple(rows), note)


def _of(family: Sequence[Node], path: str, phase: str) -> float:
    return math.fsum(node.by_phase.get(phase, 0.0) for node in family if node.path == path)


def _share(family: Sequence[Node], path: str, phase: str) -> float | None:
    whole_j = math.fsum(node.by_phase.get(phase, 0.0) for node in family)
    return 100 * _of(family, path, phase) / whole_j if whole_j > 0 else None


def top_table(materials: Sequence[Material]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for material in materials:
        for model in ("bert", "albert"):
            results = material.like_base(model, "pretrain")
            if not results and (model == "albert" or material.of("bert", "pretrain")):
                continue
            results = results or material.base
            footprints = summaries(results, material.device)
            total_j = mean_of([one.devices[material.device].total_j for one in footprints])
            watts = powers(footprints, material.device)
            power_w = dict(_means(watts, len(results)))
            for key, energy in _means(energies(footprints, material.device), len(results))[:TOP]:
                share = 100 * energy.mean / total_j.mean if total_j and total_j.mean > 0 else None
                called = model.upper() if "model" in results[0].facts else results[0].setting
                rows.append((material.kind, called, *key, energy, share, power_w.get(key), len(results)))
    columns = (
        _KIND,
        Column("model", "Model"),
        Column("name", "Operation"),
        Column("phase", "Phase"),
        Column("energy_j", "Energy of a step", "J"),
        Column("share_percent", "Share", "%"),
        Column("power_w", "Power while busy", "W"),
        _RUNS,
    )
    return Table(
        "top", "Operations with the most energy", columns, tuple(rows), "Self-similar layers merged."
    )


def _means(bars: Bars, runs: int) -> list[tuple[tuple[str, str], Mean]]:
    spread = runs > 1  # of one run the bars have the spread over its steps
    return [
        ((name, phase or ""), Mean(float(v), float(s) if spread and math.isfinite(s) else None, runs))
        for name, phase, v, s in zip(bars.name, bars.phase, bars.value, bars.std, strict=True)
    ]


def variants_table(materials: Sequence[Material]) -> Table:
    rows = [
        (material.kind, label, *_figures(results, material.device), len(results))
        for material in materials
        for found in [material.variants()]
        if len(found) > 1
        for label, results in found.items()
    ]
    columns = (_KIND, Column("variant", "Variant"), *_FIGURES, _RUNS)
    return Table("variants", "Variants", columns, tuple(rows), _BUSY)


def albert_table(materials: Sequence[Material]) -> Table:
    rows = [
        (material.kind, model.upper(), STAGES[stage], *_figures(results, material.device), len(results))
        for material in materials
        for stage in STAGES
        if material.like_base("albert", stage)
        for model in ("albert", "bert")
        for results in [material.like_base(model, stage)]
        if results
    ]
    columns = (_KIND, Column("model", "Model"), Column("stage", "Stage"), *_FIGURES, _RUNS)
    return Table("albert", "ALBERT and BERT", columns, tuple(rows), _BUSY)


_BUSY = (
    "On the device that does the work. Power while busy is the mean over operations, each as long as it ran: "
    "what runs at once shares the device's power, and an operation that only calls others has little."
)
_FIGURES = (
    Column("step_j", "Energy of a step", "J"),
    Column("busy_w", "Power while busy", "W"),
    Column("step_s", "Time of a step", "s"),
)


def _figures(results: Sequence[Result], device: str) -> tuple[Cell, ...]:
    return (
        mean_of([result.step.devices[device].total_j for result in results if device in result.step.devices]),
        mean_of([busy_power_w(result.step, device) for result in results]),
        mean_of([result.step_s for result in results]),
    )


def busy_power_w(footprint: Footprint, device: str) -> float | None:
    """The mean power over all operations, each as long as it ran."""
    rows = footprint.device_rows(device)
    busy_s = float(column(rows, "busy_s").sum())
    return float(column(rows, "energy_j").sum()) / busy_s if busy_s > 0 else None


def _size(result: Result) -> str:
    return f"{variant_label(result)}, {result.facts.get('batch')} × {result.facts.get('length')}"
