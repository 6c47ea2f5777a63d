"""`smaragdine report`: shows where the joules of a recording went."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.run import Run, alike
from smaragdine.cli.parsing import Parser, add_merge_options, count, opened_baseline, print_json, say_damage
from smaragdine.errors import UserError, visible
from smaragdine.recording.format import TRACES_FOLDER

_EXAMPLE = """\
  smaragdine report runs/2026-11-15-train
  smaragdine report runs/first --html report.html
  smaragdine report runs/first --by layer --depth 3 --sort power
  smaragdine report runs/before runs/after                      # what got better, what worse, what is noise
  smaragdine report runs/* --figures figures --only cumulative,epochs --format pdf
  smaragdine report runs/first --json | jq '.step.devices["gpu:0"].rows[:5]'"""


def _parser() -> Parser:
    parser = Parser(
        "report",
        "Show where the energy of a recording went: per device, and per operation of one step. Names, busy\n"
        "times and powers come from traced steps, a step's length and level from untraced ones.",
        _EXAMPLE,
    )
    parser.add_argument(
        "recordings", metavar="RUN", nargs="+", help="the folder of a recording; give two to compare them"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page that opens in any browser, offline")
    shown = parser.add_argument_group("what to print")
    shown.add_argument(
        "--by",
        choices=("name", "layer", "phase", "device", "step"),
        default="name",
        help="what to list (name)",
    )
    shown.add_argument(
        "--sort",
        choices=("energy", "power", "time", "count"),
        default="energy",
        help="highest first (energy)",
    )
    shown.add_argument("--top", metavar="N", type=count, default=10, help="show so many (10)")
    shown.add_argument("--depth", metavar="N", type=count, default=2, help="levels of layers (2; 0: no tree)")
    shown.add_argument(
        "--traced", action="store_true", help="show all traced steps as they were, not one step"
    )
    add_merge_options(shown)
    shown.add_argument(
        "--baseline", metavar="RUN", help="a recording of the idle machine: what of the CPU's power is static"
    )
    figures = parser.add_argument_group("figures for a paper (needs matplotlib: smaragdine[figures])")
    figures.add_argument(
        "--figures", metavar="DIR", help="draw all that the recordings allow into this folder"
    )
    figures.add_argument("--only", metavar="NAME,…", help="only these; docs/gallery.md has their names")
    figures.add_argument("--format", metavar="F,…", default="pdf,svg,png", help="pdf,svg,png")
    return parser


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    if options.only and not options.figures:
        raise UserError("--only chooses figures", "none are asked for", "Name a folder with --figures DIR")
    files = [word for word, wanted in (("--html", options.html), ("--figures", options.figures)) if wanted]
    if options.json and files:
        raise UserError(
            "--json prints a report", f"{files[0]} writes one to a file", "Ask for one after the other"
        )
    silent = options.by == "step" or len(options.recordings) == 2
    runs = [_opened(path) for path in options.recordings]
    if options.figures or options.by == "step" or (len(runs) == 2 and not options.json):
        # These print no remarks of their own.
        for run in runs:
            say_damage(run)
    if options.figures:
        _draw(runs, options)
    baseline = None
    if options.baseline and (options.html or not options.figures):
        baseline = opened_baseline(options.baseline, say=silent and not options.html)
        runs = [replace(run, baseline=baseline) for run in runs]
    if options.html:
        _write_html(runs, options)
    if options.figures or options.html:
        return 0
    if len(runs) > 2:
        raise UserError(
            "a report is of one run, or of two side by side",
            f"{len(runs)} were given",
            "smaragdine compare takes more; so does --figures",
        )
    if len(runs) == 2 and options.by in ("device", "step"):
        raise UserError(
            f"two runs are not compared by {options.by}", remedy="Use --by name, --by layer or --by phase"
        )
    if options.by == "step" and options.sort != "energy":
        raise UserError(
            f"steps are listed in the order of time, not by {options.sort}", remedy="Leave out --sort"
        )
    runs = _merged(runs, options)
    if len(runs) == 2:
        return _print_both(runs[0], runs[1], options)
    if options.json:
        return print_json(runs[0].to_json())
    _print_one(runs[0], options)
    return 0


def _opened(path: str) -> Run:
    """Opens a run. If it died before its trace was read, reads that first."""
    run = Run.open(path)
    if run.recording.status == "running" or not (run.path / TRACES_FOLDER).is_dir():
        return run
    from smaragdine.tracing.assemble import assemble, is_left

    if not is_left(run.recording):
        return run
    for remark in assemble(run.path):
        print(f"trace: {visible(remark)}", file=sys.stderr)
    return Run.open(path)


def _merged(runs: Sequence[Run], options: argparse.Namespace) -> Sequence[Run]:
    """Merges self-similar names, if asked for, in the same way in all runs."""
    if not (options.summary or options.merge):
        return runs
    from smaragdine.accounting.merge import parse_rule, renaming

    rules = [parse_rule(text) for text in options.merge]
    known = [part for run in runs for part in (run.step, run.footprint) if part is not None]
    names = renaming(known, rules) if known else {}
    return [run.renamed(names) for run in runs]


def _print_one(run: Run, options: argparse.Namespace) -> None:
    from smaragdine.accounting.footprint import in_order
    from smaragdine.accounting.intervals import grouped
    from smaragdine.report.tables import overview_tables, step_tables
    from smaragdine.report.terminal import console, run_tables

    shown = run.footprint if options.traced else run.shown
    out = console()
    command = visible(" ".join(run.info.get("command", [])))
    out.print(command, style="bold", markup=False, soft_wrap=True)
    if options.by == "device":
        out.print(run_tables(run.summary, idle=run.is_baseline))
        return
    if options.by == "step":
        out.print(step_tables(run, options.top))
        return
    tree = min(options.depth, 100) if options.by == "name" else 0
    rows = shown
    if rows is not None:
        rows = in_order(grouped(rows, options.by, max(options.depth, 1)), options.sort)
    out.print(overview_tables(run, shown, rows, options.top, tree))


def _print_both(a: Run, b: Run, options: argparse.Namespace) -> int:
    from smaragdine.accounting.comparison import compare, to_json
    from smaragdine.accounting.intervals import grouped

    sides: list[Footprint] = []
    alone: list[UserError] = []
    both = None if options.traced else alike(a, b)
    steps, untraced = both or ((a.footprint, b.footprint), [])
    for run, footprint in zip((a, b), steps, strict=True):
        if footprint is None:
            why = run.absent or run.recording.lost("events") or "it has no events"
            alone.append(UserError(f"{run.path} cannot be compared by operation", why))
        else:
            sides.append(grouped(footprint, options.by, max(options.depth, 1)))
    if alone and options.json:
        raise alone[0]
    by_step = False if options.traced else None
    comparison = None if alone else compare(sides[:1], sides[1:], by_step=by_step, untraced=untraced)
    if comparison is not None and options.json:
        reports = [run.to_json() for run in (a, b)]
        return print_json({"a": str(a.path), "b": str(b.path), **to_json(comparison), "reports": reports})
    from smaragdine.report.comparison import comparison_tables
    from smaragdine.report.tables import both_summaries
    from smaragdine.report.terminal import console

    out = console()
    for side, run in (("A", a), ("B", b)):
        out.print(f"{side}  {run.path}", markup=False, soft_wrap=True)
    out.print()
    out.print(both_summaries(a.summary, b.summary))
    if comparison is not None:
        out.print()
        out.print(comparison_tables(comparison, options.top))
    for reason in alone:
        out.print(f"! {reason}", markup=False, soft_wrap=True)
    return 0


def _write_html(runs: Sequence[Run], options: argparse.Namespace) -> None:
    from smaragdine.accounting.merge import parse_rule
    from smaragdine.report.html.page import write_html

    path = Path(options.html)
    write_html(runs, path, [parse_rule(text) for text in options.merge])
    print(path)


def _draw(runs: Sequence[Run], options: argparse.Namespace) -> None:
    from smaragdine.report.figures.draw import draw

    names = options.only.split(",") if options.only else None
    drawn = draw(runs, Path(options.figures), names, options.format.split(","))
    for name, why in drawn.left_out.items():
        print(f"not drawn: {name}: {visible(why)}", file=sys.stderr)
    for path in drawn.files:
        print(path)
