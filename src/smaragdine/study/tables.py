"""Makes the tables of a study: mean ± standard deviation over runs, each kind of result in its own rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from smaragdine.accounting.arithmetic import average
from smaragdine.accounting.diagram import Node
from smaragdine.accounting.footprint import Footprint, column, only
from smaragdine.accounting.similarity import Correlation
from smaragdine.errors import UserError
from smaragdine.report.comparison import letter, matrix_tables
from smaragdine.report.figures.layers import IDLE, TOP, Bars, energies, family_of, phase_energies_j, powers
from smaragdine.report.figures.runs import NotDrawn
from smaragdine.report.terminal import plain_table
from smaragdine.study.claims import stage_steps
from smaragdine.study.custom import Customs
from smaragdine.study.document import (
    Cell,
    Column,
    Material,
    MeanOverRuns,
    StudyTable,
    counted,
    mean_of,
    provenance_of,
    settings_of,
    variant_label,
)
from smaragdine.study.folder import experiment_runs
from smaragdine.study.overhead import load_overhead
from smaragdine.study.plan import STAGES
from smaragdine.study.precision import Spread, pairs_of, precision_of, summaries
from smaragdine.study.results import Result, by_setting
from smaragdine.study.scaling import growths_of, scaling_of
from smaragdine.units import joules, plus_minus, seconds, watts

if TYPE_CHECKING:
    from smaragdine.study.findings import JudgedClaim


# A user's own program, on the terminal.


def customs_tables(found: Customs) -> RenderableType:
    """A line for each setting; then how alike they are, and how far they differ."""
    table = plain_table(
        "setting", "runs", "energy", "time", "power", "runs\nalike", "power\nalike", "fewer\nreadings"
    )
    for own in found.settings:
        one = own.energy_std_j is None
        energy = joules(own.energy_j) if one else plus_minus(own.energy_j, own.energy_std_j or 0.0, "J")
        power = "–" if not own.step_s else watts(own.energy_j / own.step_s)
        scores = map(_score, (own.alike, own.alike_power, own.asss))
        table.add_row(own.name, str(own.runs), energy, seconds(own.step_s), power, *scores)
    provenance = ", ".join(dict.fromkeys(own.provenance for own in found.settings))
    of = found.device or "all devices"
    parts: list[RenderableType] = [
        table,
        Text(f"of a step on all devices, power {provenance}; ± is the standard deviation over runs", "dim"),
        Text(f"alike: the lowest similarity on {of}: of two runs; of every n-th reading to all", "dim"),
    ]
    if len(found.settings) > 1:
        labels = [own.name for own in found.settings]
        matrices = [
            ("energy", found.energy),
            ("power", found.power),
            ("energy by time alone", found.time_alone),
        ]
        parts += [Text(""), Text(f"similarity of a step on {of}, layers merged", style="bold")]
        parts += [matrix_tables(labels, matrices)]
        parts += [Text(""), Text("row − column, the mean over names that both have", style="bold")]
        parts += [Text(""), _differences("energy", found.difference_j, joules)]
        parts += [Text(""), _differences("power", found.difference_w, watts)]
    return Group(*parts)


def customs_json(found: Customs) -> dict[str, Any]:
    return {
        "device": found.device,
        "settings": [asdict(own) for own in found.settings],
        "similarity": {
            "energy": _values(found.energy),
            "power": _values(found.power),
            "time_alone": _values(found.time_alone),
        },
        "difference_j": found.difference_j,
        "difference_w": found.difference_w,
    }


def _differences(
    title: str, rows: Sequence[Sequence[float | None]], words: Callable[[float | None], str]
) -> RichTable:
    letters = [letter(n) for n in range(len(rows))]
    table = plain_table(title, *letters)
    for name, row in zip(letters, rows, strict=True):
        table.add_row(name, *(words(value).replace("-", "−") for value in row))
    return table


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _values(rows: Sequence[Sequence[Correlation]]) -> list[list[float | None]]:
    return [[score.value for score in row] for row in rows]


# The summary footprint of every setting, name by name: the figures are drawn from it.

_COLUMNS = (
    Column("setting", "Setting"),
    Column("device", "Device"),
    Column("name", "Operation"),
    Column("phase", "Phase"),
    Column("count", "Executions in a step"),
    Column("energy_j", "Energy of a step", "J"),
    Column("uncertainty_j", "95 % half-width", "J"),
    Column("basis", "Which rests on"),
    Column("busy_s", "Busy time", "s"),
    Column("power_w", "Power while busy", "W"),
)


def footprints_table(materials: Sequence[Material]) -> StudyTable:
    """For the device that does the work; a setting's rows, `(idle)` among them, add up to its step."""
    rows = [
        row
        for material in materials
        for results in by_setting(material.results).values()
        for row in _rows(results, material.device)
    ]
    return StudyTable("footprints", "Footprints", _COLUMNS, tuple(rows))


def _rows(results: Sequence[Result], device: str) -> Iterator[tuple[Cell, ...]]:
    having = [result for result in results if device in result.step.devices]
    if not having:
        return
    footprints = summaries(having, device)
    over = average(footprints)
    setting = having[0].setting
    for row, spread in zip(over.mean.rows.to_pylist(), over.spread.to_pylist(), strict=True):
        ran = row["busy_s"] > 0
        yield (
            setting,
            device,
            row["name"],
            row["phase"],
            row["count"],
            _over_runs(row["energy_j"], spread["energy_std_j"], len(having)),
            row["uncertainty_j"],
            row["basis"],
            _over_runs(row["busy_s"], spread["busy_std_s"], len(having)),
            _over_runs(spread["power_mean_w"], spread["power_std_w"], spread["runs"]) if ran else None,
        )
    idle = mean_of([footprint.devices[device].idle_j for footprint in footprints])
    yield (setting, device, f"({IDLE})", None, None, idle, None, None, None, None)


def _over_runs(mean: float, std: float | None, runs: int) -> MeanOverRuns:
    return MeanOverRuns(mean, std if std is not None and math.isfinite(std) else None, runs)


_KIND = Column("kind", "Kind")
_RUNS = Column("runs", "Runs")
_PHASES = ("forward", "backward", "optimizer", "other")
_STYLES = {"agrees": "green", "differs": "yellow", "not comparable": "dim"}


def findings_table(findings: Sequence[JudgedClaim]) -> RenderableType:
    """For the terminal: what was asked, the number here and there, and whether they agree."""
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 1, 0), header_style="bold")
    table.add_column("finding", overflow="fold", ratio=3)
    table.add_column("here", overflow="fold", ratio=3)
    table.add_column("there", overflow="fold", ratio=2)
    table.add_column("verdict", no_wrap=True)
    asked = Counter(finding.question for finding in findings)
    for finding in findings:
        verdict = Text(finding.verdict, style=_STYLES.get(finding.verdict, ""))
        question = Text(finding.question)
        if asked[finding.question] > 1:  # asked for several frameworks, precisions or programs
            question.append(f"\n{settings_of(finding)}", style="dim")
        table.add_row(question, Text(finding.here), Text(finding.there), verdict)
    return Group(table, Text(""), Text(counted(findings)))


def study_tables(materials: Sequence[Material]) -> list[StudyTable]:
    """Tables that have rows."""
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


def stages_table(materials: Sequence[Material]) -> StudyTable:
    """Only the shape that is no variant."""
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
    return StudyTable("stages", "Stages", columns, tuple(rows), note)


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


def layers_table(materials: Sequence[Material]) -> StudyTable:
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
    return StudyTable("layers", "Layers", columns, tuple(rows), note)


def _of(family: Sequence[Node], path: str, phase: str) -> float:
    return math.fsum(node.by_phase.get(phase, 0.0) for node in family if node.path == path)


def _share(family: Sequence[Node], path: str, phase: str) -> float | None:
    whole_j = math.fsum(node.by_phase.get(phase, 0.0) for node in family)
    return 100 * _of(family, path, phase) / whole_j if whole_j > 0 else None


def top_table(materials: Sequence[Material]) -> StudyTable:
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
    return StudyTable(
        "top", "Operations with the most energy", columns, tuple(rows), "Self-similar layers merged."
    )


def _means(bars: Bars, runs: int) -> list[tuple[tuple[str, str], MeanOverRuns]]:
    spread = runs > 1  # for a single run, bars show the spread over its steps
    return [
        ((name, phase or ""), MeanOverRuns(float(v), float(s) if spread and math.isfinite(s) else None, runs))
        for name, phase, v, s in zip(bars.name, bars.phase, bars.value, bars.std, strict=True)
    ]


def variants_table(materials: Sequence[Material]) -> StudyTable:
    rows = [
        (material.kind, label, *_figures(results, material.device), len(results))
        for material in materials
        for found in [material.variants()]
        if len(found) > 1
        for label, results in found.items()
    ]
    columns = (_KIND, Column("variant", "Variant"), *_FIGURES, _RUNS)
    return StudyTable("variants", "Variants", columns, tuple(rows), _BUSY)


def albert_table(materials: Sequence[Material]) -> StudyTable:
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
    return StudyTable("albert", "ALBERT and BERT", columns, tuple(rows), _BUSY)


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
    """The mean power of all operations, weighted by how long each ran."""
    rows = footprint.device_rows(device)
    busy_s = float(column(rows, "busy_s").sum())
    return float(column(rows, "energy_j").sum()) / busy_s if busy_s > 0 else None


def _size(result: Result) -> str:
    return f"{variant_label(result)}, {result.facts.get('batch')} × {result.facts.get('length')}"


# How precise a study is and what measuring costs: scores, overhead, growth.

_SCALING = (
    Column("run", "Run"),
    Column("scale", "What grows"),
    Column("layers", "Layers"),
    Column("batch", "Batch"),
    Column("run_s", "Run", "s"),
    Column("devices", "Devices"),
    Column("channels", "Channels"),
    Column("monitor_cores", "Monitor, cores", "1"),
    Column("step_s", "Step", "s"),
    Column("traced_slower", "Traced step, longer by", "part"),
    Column("paused_s", "Pauses", "s"),
    Column("traced_steps", "Traced steps"),
    Column("events", "Events"),
    Column("assemble_us_per_event", "Assembling an event (µs)"),
    Column("account_us_per_event", "Accounting an event (µs)"),
    Column("bytes", "Bytes"),
)


def cost_tables(out: Path, results: Sequence[Result], materials: Sequence[Material]) -> list[StudyTable]:
    """Tables that have rows."""
    precision = precision_table(materials)
    precision = replace(precision, note=f"{precision.note} {power_words(materials)}")
    found = [precision, overhead_table(out), scaling_table(results), growth_table(results)]
    return [table for table in found if table.rows]


def precision_table(materials: Sequence[Material]) -> StudyTable:
    rows: list[tuple[Cell, ...]] = []
    for material in materials:
        try:
            found = precision_of(material.results, experiment_runs(material.out))
        except UserError:
            continue
        for thinned in found.asss:
            spreads = (thinned.energy, thinned.power, thinned.constant_power)
            rows.append(
                (material.kind, "ASSS", f"every n-th reading, n {thinned.every}", *map(_mean_score, spreads))
            )
        for widened in found.assw:
            spreads = (widened.energy, widened.power, widened.constant_power)
            of = f"{widened.experiments} experiments of {found.size}"
            rows.append((material.kind, "ASSW", of, *map(_mean_score, spreads)))
        if found.stability is not None:
            matrices = (found.stability.energy, found.stability.power, found.stability.time_alone)
            lowest = [min(pairs_of(matrix), default=None) for matrix in matrices]
            of = f"lowest pair of {found.experiments} experiments of {found.size}"
            rows.append((material.kind, "stability", of, *lowest))
    columns = (
        _KIND,
        Column("score", "Score"),
        Column("of", "Of"),
        Column("energy_correlation", "Energy", "1"),
        Column("power_correlation", "Power", "1"),
        Column("constant_power_correlation", "Constant power", "1"),
    )
    note = (
        "Pearson correlation of footprints. Constant power: the score of energies that busy times alone give."
    )
    return StudyTable("precision", "Precision", columns, tuple(rows), note)


def overhead_table(out: Path) -> StudyTable:
    rows: list[tuple[Cell, ...]] = []
    for found in load_overhead(out):
        costs = [("time", found.time), ("time, median of pairs", found.time_median)]
        costs += [(f"energy of {device}", cost) for device, cost in found.energy.items()]
        for what, cost in costs:
            percent = [100 * value for value in (cost.middle, cost.low, cost.high)]
            rows.append((found.setting, what, *percent, cost.provenance, found.pairs))
    columns = (
        Column("setting", "Setting"),
        Column("what", "What"),
        Column("more_percent", "More", "%"),
        Column("low_percent", "From", "%"),
        Column("high_percent", "To", "%"),
        Column("provenance", "Provenance"),
        Column("pairs", "Pairs"),
    )
    note = "What sampling adds to a step, with its 95 % interval over pairs of blocks with and without."
    return StudyTable("overhead", "Overhead", columns, tuple(rows), note)


def scaling_table(results: Sequence[Result]) -> StudyTable:
    found = scaling_of(results)
    rows = [tuple(row.get(column.key) for column in _SCALING) for row in found]
    note = "What measuring took as layers, batch and the length of a run grow, one run each."
    return StudyTable("scaling", "Scaling", _SCALING, tuple(rows), note)


def growth_table(results: Sequence[Result]) -> StudyTable:
    rows = [
        (
            growth.base,
            growth.scale,
            growth.x,
            growth.y,
            growth.exponent,
            growth.lowest_ratio,
            growth.highest_ratio,
            growth.runs,
        )
        for growth in growths_of(scaling_of(results))
    ]
    columns = (
        Column("setting", "Setting"),
        Column("scale", "What grows"),
        Column("x", "x"),
        Column("y", "y"),
        Column("exponent", "Exponent", "1"),
        Column("lowest_ratio", "Lowest y ÷ x"),
        Column("highest_ratio", "Highest y ÷ x"),
        Column("runs", "Runs"),
    )
    note = (
        "y grows as x to the exponent: 1 is proportional, 0 not at all. Names ending in _s are of seconds; "
        "step_events are those of one traced step."
    )
    return StudyTable("growth", "Growth", columns, tuple(rows), note)


def _mean_score(spread: Spread | None) -> MeanOverRuns | None:
    return None if spread is None else MeanOverRuns(spread.mean, spread.std, spread.runs)
