"""Tables of how precise a study is and what measuring costs: scores, overhead, growth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from smaragdine.errors import UserError
from smaragdine.report.study.cells import Cell, Column, Mean, Table
from smaragdine.report.study.material import Material
from smaragdine.report.study.tables import power_words
from smaragdine.study.folder import experiment_runs
from smaragdine.study.overhead import load_overhead
from smaragdine.study.results import Result
from smaragdine.study.scaling import growths_of, scaling_of
from smaragdine.study.scores import Spread, pairs_of, precision_of

_KIND = Column("kind", "Kind")
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


def cost_tables(out: Path, results: Sequence[Result], materials: Sequence[Material]) -> list[Table]:
    """Those that have rows."""
    precision = precision_table(materials)
    precision = replace(precision, note=f"{precision.note} {power_words(materials)}")
    found = [precision, overhead_table(out), scaling_table(results), growth_table(results)]
    return [table for table in found if table.rows]


def precision_table(materials: Sequence[Material]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for material in materials:
        try:
            found = precision_of(material.results, experiment_runs(material.out))
        except UserError:
            continue
        for thinned in found.asss:
            spreads = (thinned.energy, thinned.power, thinned.constant_power)
            rows.append(
                (material.kind, "ASSS", f"every n-th reading, n {thinned.every}", *map(_mean, spreads))
            )
        for widened in found.assw:
            spreads = (widened.energy, widened.power, widened.constant_power)
            of = f"{widened.experiments} experiments of {found.size}"
            rows.append((material.kind, "ASSW", of, *map(_mean, spreads)))
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
    return Table("precision", "Precision", columns, tuple(rows), note)


def overhead_table(out: Path) -> Table:
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
    return Table("overhead", "Overhead", columns, tuple(rows), note)


def scaling_table(results: Sequence[Result]) -> Table:
    found = scaling_of(results)
    rows = [tuple(row.get(column.key) for column in _SCALING) for row in found]
    note = "What measuring took as layers, batch and the length of a run grow, one run each."
    return Table("scaling", "Scaling", _SCALING, tuple(rows), note)


def growth_table(results: Sequence[Result]) -> Table:
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
    return Table("growth", "Growth", columns, tuple(rows), note)


def _mean(spread: Spread | None) -> Mean | None:
    return None if spread is None else Mean(spread.mean, spread.std, spread.runs)
