"""`smaragdine export`: writes a recording for other tools."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from smaragdine.cli.parsing import Parser, add_merge_options, opened, opened_baseline, positive_count
from smaragdine.errors import UserError, visible

if TYPE_CHECKING:
    from smaragdine.report.export.selection import Selection

_EXAMPLE = """\
  smaragdine export runs/2026-11-15-train --to perfetto
  smaragdine export runs/first --to latex --summary --top 8 --device gpu:0 -o -
  smaragdine export runs/first --to csv -o tables"""
# Format → what to add to the recording's name, and what to do with the file.
_FORMATS = {
    "perfetto": (".perfetto-trace", "open it in https://ui.perfetto.dev"),
    "speedscope": (".speedscope.json", "open it in https://www.speedscope.app"),
    "csv": ("-csv", ""),
    "parquet": ("-parquet", ""),
    "prometheus": (".prom", ""),
    "latex": (".tex", ""),
    "markdown": (".md", ""),
    "tensorboard": ("-tensorboard", "tensorboard --logdir {}"),
}
_TEXT = ("speedscope", "prometheus", "latex", "markdown")


def _parser() -> Parser:
    parser = Parser(
        "export",
        "Write a recording for other tools: Perfetto (events, power, energy, marks over time), speedscope\n"
        "(a flame graph of joules), tables as CSV or Parquet, Prometheus text, a table for a paper in\n"
        "LaTeX or Markdown, TensorBoard scalars. See docs/exports.md for what is in each.",
        _EXAMPLE,
    )
    parser.add_argument("recording", metavar="RUN", help="the folder of a recording")
    parser.add_argument(
        "--to", metavar="FORMAT", choices=list(_FORMATS), required=True, help=", ".join(_FORMATS)
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE|DIR",
        help="where to (the recording's name, in this folder; for TensorBoard energy/ in the "
        "program's own log folder, if it has one); - is the standard output, for text",
    )
    parser.add_argument("--force", action="store_true", help="overwrite what is there")
    parser.add_argument(
        "--device", metavar="D", action="append", default=[], help="only this device; repeat it for more"
    )
    parser.add_argument(
        "--traced", action="store_true", help="export all traced steps as they were, not one step"
    )
    add_merge_options(parser)
    parser.add_argument("--top", metavar="N", type=positive_count, default=10, help="rows for a paper (10)")
    parser.add_argument(
        "--depth",
        metavar="N",
        type=positive_count,
        default=2,
        help="levels of layers for Prometheus (2)",
    )
    parser.add_argument(
        "--baseline", metavar="RUN", help="a recording of the idle machine: what of the CPU's power is static"
    )
    return parser


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    if options.output == "-" and options.to not in _TEXT:
        raise UserError(f"{options.to} is no text", remedy="Name a file or a folder with -o")
    from smaragdine.accounting.merge import parse_rule
    from smaragdine.report.export.selection import select

    baseline = opened_baseline(options.baseline) if options.baseline else None
    chosen = select(
        opened(options.recording, baseline),
        traced=options.traced,
        merged=options.summary,
        rules=[parse_rule(text) for text in options.merge],
        devices=options.device,
    )
    if options.output == "-":
        sys.stdout.write(_text(chosen, options))
        return 0
    where = Path(options.output) if options.output else _default(chosen, options.to)
    for remark in _write(chosen, where, options):
        print(f"smaragdine: {visible(remark)}", file=sys.stderr)
    if not (where.is_file() or where.is_dir()):
        return 0  # a pipe or a device gets what was asked for, and no more
    hint = _FORMATS[options.to][1].format(where)
    print(f"{where}  ({hint})" if hint else where)
    return 0


def _default(chosen: Selection, to: str) -> Path:
    if to == "tensorboard":
        from smaragdine.report.export.tensorboard import log_folder

        own = log_folder(chosen.run.recording)
        if own is not None:
            return own / "energy"
    return Path(chosen.run.name + _FORMATS[to][0])


def _write(chosen: Selection, where: Path, options: argparse.Namespace) -> list[str]:
    """Returns remarks on what the file lacks, and why."""
    from smaragdine.report.export.output import new_file, new_folder

    without = [f"no footprint: {chosen.run.why_none}"] if chosen.footprint is None else []
    if options.to in ("csv", "parquet"):
        from smaragdine.report.export.tables import TABLES, write_tables

        with new_folder(where, options.force, [f"{name}.{options.to}" for name in TABLES]) as part:
            return write_tables(chosen, part, options.to)
    if options.to == "tensorboard":
        from smaragdine.report.export.tensorboard import devices_with_power, file_name, write_tensorboard

        devices_with_power(chosen)  # before a folder is made
        if where.exists() and not where.is_dir():
            raise UserError(f"{where} is a file", remedy="Name a folder with -o DIR")
        where.mkdir(parents=True, exist_ok=True)
        with new_file(where / file_name(chosen.run.recording), options.force) as part:
            write_tensorboard(chosen, part)
        return []
    if options.to == "perfetto":
        from smaragdine.report.export.perfetto import write_perfetto

        with new_file(where, options.force) as part:
            return write_perfetto(chosen, part)
    text = _text(chosen, options)
    with new_file(where, options.force) as part:
        part.write_text(text, encoding="utf-8")
    return without


def _text(chosen: Selection, options: argparse.Namespace) -> str:
    if options.to == "speedscope":
        from smaragdine.report.export.speedscope import speedscope_json

        return json.dumps(speedscope_json(chosen), allow_nan=False) + "\n"
    if options.to == "prometheus":
        from smaragdine.report.export.prometheus import prometheus_text

        return prometheus_text(chosen, options.depth)
    from smaragdine.report.export.paper import latex_text, markdown_text

    return (latex_text if options.to == "latex" else markdown_text)(chosen, options.top)
