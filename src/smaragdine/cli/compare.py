"""`smaragdine compare`: shows what changed between runs, and which of it is more than noise."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from smaragdine.accounting.arithmetic import per_step
from smaragdine.accounting.comparison import compare, to_json
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.intervals import grouped
from smaragdine.accounting.merge import merge_all, parse_rule
from smaragdine.accounting.precision import assw, score_json, stability
from smaragdine.accounting.similarity import Correlation, constant_power, matrix
from smaragdine.cli.parsing import Parser, add_merge_options, count, positive_count, print_json
from smaragdine.errors import UserError, visible


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    paths: list[str] = [*options.runs, *options.against]
    if len(paths) < 2:
        raise UserError("one run alone cannot be compared", remedy="Name two or more, or use --against")
    rules = [parse_rule(text) for text in options.merge]
    footprints, untraced = _footprints(paths, options.traced)
    if options.summary or rules:
        footprints = merge_all(footprints, rules)
    footprints = [grouped(footprint, options.by, options.depth) for footprint in footprints]
    if options.experiment or (len(paths) > 2 and not options.against):
        # Their tables have no room for remarks on single runs.
        for path, footprint in zip(paths, footprints, strict=True):
            for remark in footprint.remarks:
                print(f"smaragdine: {path}: {visible(remark)}", file=sys.stderr)
    if options.experiment:
        return _print_precision(paths, footprints, options)
    if len(paths) > 2 and not options.against:
        return _print_matrix(paths, footprints, options)
    split = len(options.runs) if options.against else 1
    sides = footprints[:split], footprints[split:]
    by_step = True if options.per_step else False if options.traced else None
    comparison = compare(*sides, options.device, by_step, untraced)
    if options.json:
        return print_json({"a": paths[:split], "b": paths[split:], **to_json(comparison, options.top)})
    from smaragdine.report.comparison import comparison_tables
    from smaragdine.report.terminal import console

    out = console()
    for side, names in (("A", paths[:split]), ("B", paths[split:])):
        out.print(f"{side}  {', '.join(names)}", markup=False, soft_wrap=True)
    out.print()
    out.print(comparison_tables(comparison, 10 if options.top is None else options.top))
    return 0


def _parser() -> Parser:
    parser = Parser(
        "compare",
        "Show what changed between runs: energy per device and name, similarity, and which of it is more\n"
        "than noise. Energies are those of one step, as report shows it; report A B has the whole runs too.\n"
        "One run against one cannot tell a change from noise: give three or more of each.\n"
        "With more than two runs and no --against, show how alike they are, each to each.",
        "  smaragdine compare A1 A2 A3 --against B1 B2 B3 --by layer\n"
        "  smaragdine compare runs/before runs/after\n"
        "  smaragdine compare before.json after.json --summary --device gpu:0\n"
        "  smaragdine compare runs/* --experiment 5",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="a recording with events, or a footprint that account -o wrote"
    )
    parser.add_argument(
        "--against",
        metavar="RUN",
        nargs="+",
        default=[],
        help="runs of the other side; those before it are one side",
    )
    parser.add_argument(
        "--by",
        choices=("name", "layer", "phase"),
        default="name",
        help="what to compare (name); a layer can show a change that its single operations hide in noise",
    )
    parser.add_argument("--depth", metavar="N", type=positive_count, default=2, help="levels of layers (2)")
    add_merge_options(parser)
    parser.add_argument("--device", metavar="DEVICE", help="only this device, such as gpu:0 (the sum of all)")
    parser.add_argument(
        "--experiment",
        metavar="N",
        type=positive_count,
        help="take every N runs as an experiment, and show how alike they are (the paper's are of 5)",
    )
    of = parser.add_mutually_exclusive_group()
    of.add_argument(
        "--per-step",
        action="store_true",
        help="compare one step, as if all runs have steps; an error if not",
    )
    of.add_argument(
        "--traced", action="store_true", help="compare all traced steps as they were, not one step"
    )
    parser.add_argument("--top", metavar="N", type=count, help="show so many changed names (10; in JSON all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _footprints(paths: Sequence[str], traced: bool) -> tuple[list[Footprint], list[str]]:
    """One step of each if they are recordings with steps, as `report` shows it, and the devices of which it
    is an untraced one; else all that was traced."""
    from smaragdine.accounting.footprint import load
    from smaragdine.accounting.run import Run, alike

    runs = [Run.open(path) if Path(path).is_dir() else None for path in paths]
    whole = [load(path) if run is None else run.accounted for path, run in zip(paths, runs, strict=True)]
    opened = [run for run in runs if run is not None]
    both = None if traced or len(opened) < len(runs) else alike(*opened)
    if both is None:
        return whole, []
    steps, untraced = both
    return [replace(one, remarks=each.remarks) for one, each in zip(steps, whole, strict=True)], untraced


def _print_matrix(paths: list[str], footprints: list[Footprint], options: argparse.Namespace) -> int:
    if options.per_step:
        footprints = [per_step(footprint) for footprint in footprints]
    flat = [constant_power(footprint) for footprint in footprints]
    matrices = {
        "energy": matrix(footprints, "energy", options.device),
        "power": matrix(footprints, "power", options.device),
        "time alone": matrix(flat, "energy", options.device),
    }
    if options.json:
        return print_json(
            {"runs": paths, **{name.replace(" ", "_"): _values(rows) for name, rows in matrices.items()}}
        )
    from smaragdine.report.comparison import matrix_tables
    from smaragdine.report.terminal import console

    console().print(matrix_tables(paths, list(matrices.items())))
    return 0


def _print_precision(paths: list[str], footprints: list[Footprint], options: argparse.Namespace) -> int:
    size: int = options.experiment
    if options.against or len(footprints) % size or len(footprints) < 2 * size:
        raise UserError(
            f"{len(footprints)} runs are no experiments of {size} each",
            remedy=f"Give two or more times {size} runs, and no --against",
        )
    if options.per_step:
        footprints = [per_step(footprint) for footprint in footprints]
    experiments = [footprints[i : i + size] for i in range(0, len(footprints), size)]
    widening, stable = assw(experiments, options.device), stability(experiments, options.device)
    matrices = {"energy": stable.energy, "power": stable.power, "time alone": stable.time_alone}
    if options.json:
        return print_json(
            {
                "runs": paths,
                "experiment": size,
                "pooled": [score_json("experiments", score) for score in widening.pooled],
                "disjoint": [score_json("experiments", score) for score in widening.disjoint],
                "stability": {name.replace(" ", "_"): _values(rows) for name, rows in matrices.items()},
            }
        )
    from smaragdine.report.comparison import matrix_tables, widening_table
    from smaragdine.report.terminal import console

    out = console()
    out.print(widening_table(widening))
    out.print()
    labels = [", ".join(paths[i : i + size]) for i in range(0, len(paths), size)]
    out.print(matrix_tables(labels, list(matrices.items())))
    return 0


def _values(rows: list[list[Correlation]]) -> list[list[float | None]]:
    return [[score.value for score in row] for row in rows]
