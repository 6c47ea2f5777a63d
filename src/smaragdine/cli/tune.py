"""`smaragdine tune`: record a program, try power limits while it runs, and settle on the best."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from smaragdine.cli.parsing import (
    Parser,
    count,
    percentage,
    positive_count,
    positive_seconds,
    positive_watts,
    split_words,
)
from smaragdine.cli.recorded import cut_short, end_like, finishing, report
from smaragdine.errors import UserError
from smaragdine.recording.asked import asked
from smaragdine.recording.command import build_command
from smaragdine.recording.session import Recorded, RecordOptions, record_program
from smaragdine.report.limits import tune_lines, tune_tables
from smaragdine.report.terminal import console
from smaragdine.tracing.hook.environment import environment as hook_environment
from smaragdine.tuning.process import TUNED_VARIABLE, TuneOptions, TuneOutcome, TunerClient, save_outcome

_EXAMPLE = """\
  smaragdine tune -- train.py --epochs 3
  smaragdine tune --objective edp -- train.py
  smaragdine tune --slowdown 5% -- torchrun --nproc-per-node 2 train.py
  smaragdine tune --power 150,200,250,300 --objective cost --eta 0.7 -- train.py"""

_WITH_VALUE = ("-o", "--output", "--power", "--objective", "--eta", "--slowdown", "--devices", "--steps",
               "--settle-s", "--skip", "--trying")  # fmt: skip


def _parser() -> Parser:
    parser = Parser(
        "tune",
        "Run a program unchanged, record it, and try power limits during its steps: the best one stays until "
        "the program ends or its steps change. Afterwards all limits are as before.",
        _EXAMPLE,
    )
    parser.usage = "smaragdine tune [options] [--] SCRIPT.py | -m MODULE | EXECUTABLE  [arguments]"
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="the recording's folder (default runs/<date>-<script>)"
    )
    parser.add_argument(
        "--power",
        metavar="W,…",
        type=_watts,
        default=(),
        help="limits to try (default: even steps downwards)",
    )
    parser.add_argument(
        "--objective",
        choices=("energy", "edp", "cost"),
        default="energy",
        help="least energy (default), energy × delay, or eta × energy + (1 − eta) × highest power × time",
    )
    parser.add_argument("--eta", type=_part, help="the weight of energy in cost (0.5)")
    parser.add_argument(
        "--slowdown",
        metavar="P%",
        type=percentage,
        help="least energy with steps at most so much longer: 5%%",
    )
    parser.add_argument("--devices", type=_names, default=(), help="gpu:0,gpu:1 (default: all it sees)")
    parser.add_argument(
        "--steps", metavar="N", type=positive_count, default=20, help="in each slice, at least (20)"
    )
    parser.add_argument("--skip", metavar="N", type=count, default=10, help="steps before the first (10)")
    parser.add_argument(
        "--settle-s", metavar="S", type=positive_seconds, default=0.5, help="dropped after a change (0.5)"
    )
    parser.add_argument(
        "--trying",
        metavar="P%",
        type=percentage,
        default=0.1,
        help="no search begins anew while more than this part of the time went into searches (10%%)",
    )
    return parser


def main(words: list[str]) -> int:
    ours, program = split_words(words, _WITH_VALUE)
    program = program[1:] if program[:1] == ["--"] else program
    options = _parser().parse_args(ours)
    wanted = _options(options)
    if not program:
        raise UserError("nothing to tune", remedy="Example: smaragdine tune -- train.py --epochs 3")
    command = build_command(program, os.environ)
    tuner = TunerClient(wanted, os.environ)

    def prepare(spool: str, run_id: str, base: Mapping[str, str]) -> Mapping[str, str]:
        tuner.follow(spool)
        return {**base, **hook_environment(spool, run_id, base), TUNED_VARIABLE: "1"}

    recorded = None
    try:
        folder = Path(options.output) if options.output else None
        options_of = RecordOptions(asked=asked("tune"))
        with finishing() as finish:
            recorded = record_program(command, folder, options_of, os.environ, finish(prepare))
    finally:
        found = tuner.finish()
    try:
        finish.interrupted()
        _report(recorded, found)
    except KeyboardInterrupt:
        return cut_short(recorded)
    return end_like(recorded.returncode)


def _options(options: argparse.Namespace) -> TuneOptions:
    if options.eta is not None and options.objective != "cost":
        raise UserError("--eta weighs energy against time", remedy="Say --objective cost with it")
    if options.slowdown is not None and options.objective != "energy":
        raise UserError("--slowdown asks for the least energy", remedy="Leave --objective out")
    return TuneOptions(
        options.power,
        options.objective,
        0.5 if options.eta is None else options.eta,
        options.slowdown,
        options.devices,
        options.steps,
        options.settle_s,
        options.skip,
        options.trying,
    )


def _report(recorded: Recorded, found: TuneOutcome | None) -> None:
    """After the table of the run, on stderr. Whatever fails here, the program's own result stands."""
    report(recorded, [])
    if found is not None:
        save_outcome(recorded.folder, found)
    if sys.stderr is None:  # closed by the caller
        return
    try:
        out = console(sys.stderr)
        died = ["the tuner died; what it had set was brought back then"]
        for table in tune_tables(found) if found is not None else ():
            out.print()
            out.print(table)
        for line in tune_lines(found) if found is not None else died:
            out.print(f"limits: {line}", markup=False, soft_wrap=True)
        sys.stderr.flush()
    except (OSError, SystemExit):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _watts(text: str) -> tuple[float, ...]:
    return tuple(positive_watts(word) for word in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _part(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value
