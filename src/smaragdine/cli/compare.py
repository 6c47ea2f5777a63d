"""`smaragdine compare`: what changed between runs, and which of it is more than noise."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from smaragdine.accounting.arithmetic import per_step
from smaragdine.accounting.comparison import compare, to_json
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.grouping import grouped
from smaragdine.accounting.merge import merge_all, parse_rule
from smaragdine.accounting.precision import assw, score_json, stability
from smaragdine.accounting.similarity import Correlation, constant_power, matrix
from smaragdine.cli.parsing import Parser, add_merge_options, count, positive_count
from smaragdine.errors import UserError, visible


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    paths: list[str] = [*options.runs, *options.against]
    if len(paths) < 2:
        raise UserError("one run alone cannot be compared", remedy="Name two or more, or use --against")
    rules = [parse_rule(text) for text in options.merge]
    footprints = [_footprint(path) for path in paths]
    if options.summary or rules:
        footprints = merge_all(footprints, rules)
    footprints = [grouped(footprint, options.by, options.depth) for footprint in footprints]
    if options.experiment or (len(paths) > 2 and not options.against):
        # Their tables have no room for what must be known of a run.
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
    comparison = compare(*sides, options.device, by_step)
    if options.json:
        return _print_json({"a": paths[:split], "b": paths[split:], **to_json(comparison, options.top)})
    from smaragdine.report.comparison import comparison_tables, what_is_compared
    from smaragdine.report.terminal import console

    out = console()
    for side, names in (("A", paths[:split]), ("B", paths[split:])):
        out.print(f"{side}  {', '.join(names)}", markup=False, soft_wrap=True)
    out.print(what_is_compared(comparison, *sides), style="dim", markup=False, soft_wrap=True)
    out.print()
    out.print(comparison_tables(comparison, 10 if options.top is None else options.top))
    return 0


def _parser() -> Parser:
    parser = Parser(
        "compare",
        "What changed between runs: energy per device and per name, similarity, and which of it is more\n"
        "than noise. It is the energy of one traced step; smaragdine report A B has the whole runs too.\n"
        "One run against one cannot tell a change from noise: give three or more of each.\n"
        "More than two runs without --against: how alike each is to each.",
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
        help="runs of the other side: all before are one side",
    )
    parser.add_argument(
        "--by",
        choices=("name", "layer", "phase"),
        default="name",
        help="of what (name); a layer shows a change that its operations are each too noisy for",
    )
    parser.add_argument("--depth", metavar="N", type=positive_count, default=2, help="of layers (2)")
    add_merge_options(parser)
    parser.add_argument("--device", metavar="DEVICE", help="only this one (gpu:0); default: the sum over all")
    parser.add_argument(
        "--experiment",
        metavar="N",
        type=positive_count,
        help="every N runs are an experiment: how alike they are, and to more of them (the paper's 5)",
    )
    of = parser.add_mutually_exclusive_group()
    of.add_argument(
        "--per-step",
        action="store_true",
        help="one step, as it is where all runs have steps; else an error",
    )
    of.add_argument("--traced", action="store_true", help="all traced steps as they were, not one step")
    parser.add_argument(
        "--top", metavar="N", type=count, help="how many changed names (10; all of them in JSON)"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    return parser


def _footprint(path: str) -> Footprint:
    if Path(path).is_dir():
        from smaragdine.accounting.run import Run

        return Run.open(path).accounted
    from smaragdine.accounting.footprint import load

    return load(path)


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
        return _print_json(
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
        return _print_json(
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


def _print_json(values: dict[str, Any]) -> int:
    json.dump(values, sys.stdout, indent=1, allow_nan=False)
    print()
    return 0
