"""`smaragdine fit`: fits energy, time and energy × delay against a limit, and finds the best one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from smaragdine.cli.parsing import Parser, print_json
from smaragdine.errors import UserError, visible
from smaragdine.sweep.fit import QUANTITIES, Analysis, analyse, to_json
from smaragdine.sweep.measurements import ColumnNames, Group, Of, read_groups

if TYPE_CHECKING:
    from smaragdine.sweep.measurements import SweepGroups

_MOSTLY_STEPS = 0.5
_SHOWN = ("energy", "time", "edp")
_EXAMPLE = """\
  smaragdine fit sweeps/2026-11-15-bert
  smaragdine fit sweeps/2026-11-15-bert --of steps
  smaragdine fit sweeps/2026-11-15-bert --figures figures --format pdf
  smaragdine fit table.csv --limit power_limit --time time_per_epoch --power average_power \\
    --by network,batch_size
  smaragdine fit table.parquet --limit clock_mhz --time s --energy joules --quantity energy,edp --json"""


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    quantities = _quantities(options.quantity)
    source = Path(options.source)
    swept = _of_sweep(source, options) if source.is_dir() else None
    groups, remarks = (swept.groups, _remarks(swept)) if swept else _of_table(source, options)
    found = analyse(groups, quantities or tuple(QUANTITIES))
    for remark in remarks:
        print(f"smaragdine: {visible(remark)}", file=sys.stderr)
    if options.figures:
        _draw(found, swept, options)
    if options.json:
        print_json({**to_json(found), "remarks": remarks})
    elif not options.figures:
        _print(found, quantities or _SHOWN)
    return 0


def _parser() -> Parser:
    parser = Parser(
        "fit",
        "Fit energy, time and energy × delay against a power or clock limit: a second-degree fit with R²,\n"
        "confidence, and the best limit as measured and as fitted. Of a sweep, or any table of measurements\n"
        "(CSV, TSV, Parquet, Arrow): then --limit, --time and --power or --energy name its columns.",
        _EXAMPLE,
    )
    parser.add_argument("source", metavar="SWEEP|TABLE", help="the folder of a sweep, or a table")
    parser.add_argument(
        "--of",
        choices=get_args(Of),
        help="in a sweep: time and energy of the whole program (default), or of its steps only",
    )
    parser.add_argument("--limit", metavar="COL", help="the limit; in a sweep over parameters, one of them")
    parser.add_argument("--time", metavar="COL", help="seconds")
    parser.add_argument("--power", metavar="COL", help="mean power in watts: energy is power × time")
    parser.add_argument(
        "--energy", metavar="COL", help="joules; in a sweep: energy_j (default) or energy_counter_j"
    )
    parser.add_argument(
        "--by", metavar="COL,…", default="", help="make one fit for every combination of these"
    )
    parser.add_argument(
        "--repeated", action="store_true", help="without --by: rows of the same limit are repetitions"
    )
    parser.add_argument(
        "--quantity",
        metavar="Q,…",
        help=f"of {', '.join(QUANTITIES)} (prints {', '.join(_SHOWN)}; JSON has all)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    figures = parser.add_argument_group("figures for a paper (needs matplotlib: smaragdine[figures])")
    figures.add_argument("--figures", metavar="DIR", help="draw each group's fits into this folder")
    figures.add_argument("--format", metavar="F,…", default="pdf,svg,png", help="pdf,svg,png")
    return parser


def _quantities(text: str | None) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(","))) if text else ()
    for name in names:
        if name not in QUANTITIES:
            raise UserError(f"no quantity {name}", remedy=f"There are: {', '.join(QUANTITIES)}")
    return names


def _of_table(path: Path, options: argparse.Namespace) -> tuple[list[Group], list[str]]:
    if options.of and path.exists():
        raise UserError("--of is for sweeps", f"{path} is a table", "Name columns with --time and --energy")
    missing = [f"--{name} COL" for name in ("limit", "time") if getattr(options, name) is None]
    if options.power is None and options.energy is None:
        missing.append("--power COL or --energy COL")
    if missing and path.exists():
        raise UserError(f"{path} is a table: its columns must be named", remedy=f"Add {', '.join(missing)}")
    by = tuple(name.strip() for name in options.by.split(",") if name.strip())
    columns = ColumnNames(options.limit or "", options.time or "", options.power, options.energy, by)
    groups = read_groups(path, columns, options.repeated)
    differing = sorted({name for group in groups for name in group.differing})
    remarks: list[str] = []
    if differing:
        names = ", ".join(differing)
        remarks.append(f"rows of one limit differ in {names}: taken as repetitions. If not, add it to --by")
    return groups, remarks


def _of_sweep(folder: Path, options: argparse.Namespace) -> SweepGroups:
    from smaragdine.sweep.measurements import groups_of_sweep
    from smaragdine.sweep.table import read_results

    for name in ("time", "power", "by"):
        if getattr(options, name):
            raise UserError(f"--{name} is for tables", f"{folder} is a folder", "A sweep knows its columns")
    rows = read_results(folder)
    energy = options.energy or "energy_j"
    return groups_of_sweep(rows, options.limit, energy, options.of or "program")


def _remarks(swept: SweepGroups) -> list[str]:
    remarks: list[str] = []
    if swept.unfinished:
        remarks.append(f"{swept.unfinished} repetitions did not complete or lack a figure: left out")
    part = swept.steps_part
    if swept.groups[0].of == "program" and part is not None and part < _MOSTLY_STEPS:
        remarks.append(f"steps are {part:.0%} of the programs' time: --of steps fits them alone")
    return remarks


def _print(found: Analysis, quantities: tuple[str, ...]) -> None:
    from smaragdine.report.limits import fit_tables, front_table
    from smaragdine.report.terminal import console

    out = console()
    out.print(fit_tables(found, quantities))
    out.print()
    out.print(front_table(found))


def _draw(found: Analysis, swept: SweepGroups | None, options: argparse.Namespace) -> None:
    from smaragdine.report.figures.limits import draw_fits, draw_sweep

    folder, formats = Path(options.figures), options.format.split(",")
    if swept is None:
        drawn = draw_fits(found, folder, formats)
    else:
        drawn = draw_sweep(Path(options.source), swept, found, folder, formats)
    for name, why in drawn.left_out.items():
        print(f"not drawn: {name}: {visible(why)}", file=sys.stderr)
    for path in drawn.files:
        print(path, file=sys.stderr if options.json else sys.stdout)
