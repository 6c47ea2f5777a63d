"""`smaragdine run`: record a program, then say what it used."""

from __future__ import annotations

import argparse
import functools
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from smaragdine.accounting.summary import summarise
from smaragdine.cli.parsing import Parser, count, percentage, period_ms
from smaragdine.errors import UserError
from smaragdine.recording.command import build_command
from smaragdine.recording.format import TRACES_FOLDER
from smaragdine.recording.reader import Recording
from smaragdine.recording.session import Recorded, RecordOptions, record_program
from smaragdine.report.terminal import console, run_tables, shortest_path
from smaragdine.tracing.hook.environment import environment as hook_environment
from smaragdine.tracing.hook.environment import trace_environment

_EXAMPLE = """\
  smaragdine run train.py --epochs 3
  smaragdine run -o runs/first -m package.train
  smaragdine run torchrun --nproc-per-node 2 train.py
  smaragdine run --trace-steps 50 --trace-budget 1% train.py
  smaragdine run -- ./any-program its arguments"""

_WITH_VALUE = ("-o", "--output", "--period-ms", "--trace", "--trace-steps", "--trace-skip", "--trace-budget")


def _parser() -> Parser:
    parser = Parser(
        "run",
        "Run a program unchanged and record the energy it uses. Our options come before the program's name.",
        _EXAMPLE,
    )
    parser.usage = "smaragdine run [options] SCRIPT.py | -m MODULE | [--] EXECUTABLE  [arguments]"
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="the recording's folder (default runs/<date>-<script>)"
    )
    parser.add_argument(
        "--live", action="store_true", help="power and energy so far on the terminal's last line"
    )
    parser.add_argument(
        "--period-ms", type=period_ms, default=4.0, help="how often counters are read (default 4)"
    )
    trace = parser.add_argument_group(
        "tracing: which operation used what, from a few steps of a deep-learning framework"
    )
    trace.add_argument(
        "--trace", choices=("auto", "off"), default="auto", help="auto traces where a framework is used"
    )
    trace.add_argument(
        "--trace-steps", metavar="N", type=count, default=10, help="how many steps (10); they take longer"
    )
    trace.add_argument(
        "--trace-skip", metavar="N", type=count, default=10, help="steps before the first traced one (10)"
    )
    trace.add_argument(
        "--trace-budget",
        metavar="P%",
        type=percentage,
        help="trace only as much as slows the training down by no more than this, all in all: 1%%",
    )
    trace.add_argument("--trace-keep", action="store_true", help="keep the profiler's files in RUN/traces")
    parser.add_argument("--pcie", action="store_true", help="also record PCIe traffic (21 ms a reading)")
    return parser


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the program with everything that follows it."""
    i = 0
    while i < len(words) and words[i].startswith("-") and words[i] not in ("-m", "--", "-"):
        i += 2 if words[i] in _WITH_VALUE else 1
    return words[:i], words[i:]


def main(words: list[str]) -> int:
    ours, program = split_words(words)
    options, unknown = _parser().parse_known_args(ours)
    if unknown:
        raise UserError(
            f"unknown option {unknown[0]}",
            "options before the program's name are ours",
            "Its own follow it: smaragdine run train.py --epochs 3. See smaragdine run --help",
        )
    _check(options, ours)
    command = build_command(program, os.environ)
    prepare = functools.partial(_prepare, options)
    record_options = RecordOptions(int(options.period_ms * 1e6), options.pcie, options.live)
    folder = Path(options.output) if options.output else None
    if options.live:
        from smaragdine.report.live import live_line

        with live_line() as on_feed:
            recorded = record_program(command, folder, record_options, os.environ, prepare, on_feed)
    else:
        recorded = record_program(command, folder, record_options, os.environ, prepare)
    said = _assemble(recorded, options.trace_keep)
    if not said and options.trace != "off" and options.trace_steps:
        said = _why_nothing(recorded, options, any(word.startswith("--trace-") for word in ours))
    report(recorded, said)
    return end_like(recorded.returncode)


def _check(options: argparse.Namespace, ours: Sequence[str]) -> None:
    """What is asked of a trace, where there is to be none."""
    asked = [word for word in ours if word.startswith("--trace-")]
    if options.trace == "off" and asked:
        raise UserError(
            f"{asked[0].partition('=')[0]} says how to trace", "--trace is off", "Leave one of them out"
        )


def _prepare(
    options: argparse.Namespace, spool: str, run_id: str, base: Mapping[str, str]
) -> Mapping[str, str]:
    variables = hook_environment(spool, run_id, base)
    if options.trace == "auto" and options.trace_steps:
        folder = os.path.join(os.path.dirname(spool), TRACES_FOLDER)
        variables |= trace_environment(folder, options.trace_steps, options.trace_skip, options.trace_budget)
    return {**base, **variables}


def _assemble(recorded: Recorded, keep: bool) -> list[str]:
    if not (recorded.folder / TRACES_FOLDER).is_dir():
        return []
    from smaragdine.tracing.assemble.recording import assemble

    try:
        return assemble(recorded.folder, keep)
    except Exception as error:  # the program's own result stands
        return [f"the trace cannot be used: {error}"]


def _why_nothing(recorded: Recorded, options: argparse.Namespace, asked: bool) -> list[str]:
    """Whoever asked for steps wants to know; else only who computed with a framework need hear of them."""
    from smaragdine.tracing.assemble.absence import computed_without_steps, why_nothing

    try:
        recording = Recording(recorded.folder, recorded.info)
        if not asked and not computed_without_steps(recording):
            return []
        why = why_nothing(recording, options.trace_skip, options.trace_budget)
    except Exception:  # the summary says what is wrong with the recording
        return []
    return [why] if why else []


def report(recorded: Recorded, said: Sequence[str]) -> None:
    """The table, on stderr. Whatever fails here, the program's own result stands."""
    if sys.stderr is None:  # closed by the caller; nothing of ours goes elsewhere
        return
    try:
        _print_tables(recorded, said)
        sys.stderr.flush()
    except (OSError, SystemExit):
        # A broken pipe, which rich turns into an exit of its own. The interpreter must not stumble over it
        # again on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _print_tables(recorded: Recorded, said: Sequence[str]) -> None:
    out = console(sys.stderr)
    try:
        # What run.json should say, also where it could not be written.
        summary = summarise(Recording(recorded.folder, recorded.info))
    except Exception as error:
        print(f"smaragdine: the recording cannot be summarised: {error}", file=sys.stderr)
        for problem in recorded.problems:
            print(f"smaragdine: {problem}", file=sys.stderr)
    else:
        out.print()
        out.print(run_tables(summary))
    for line in said:
        out.print(f"trace: {line}", markup=False, soft_wrap=True)
    where = shortest_path(recorded.folder)
    out.print(f"recording: {where}", markup=False, soft_wrap=True)
    if any(recorded.folder.glob("events*.arrows")):
        out.print(f"operations: smaragdine report {where}", markup=False, soft_wrap=True)


def end_like(returncode: int) -> int:
    """Exit with the program's code, or die of the signal it died of."""
    if returncode >= 0:
        return returncode
    number = -returncode
    sys.stderr.flush()
    # The program left the core file that was asked for; we do not add one of our own.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number
