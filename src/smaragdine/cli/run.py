"""`smaragdine run`: records a program, then says what it used."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from smaragdine.cli.parsing import Parser, count, percentage, period_ms, split_words
from smaragdine.cli.recorded import calibrate_run, cut_short, end_like, finishing, report
from smaragdine.errors import UserError, visible
from smaragdine.recording.asked import UNTRACED, TraceAsked, asked
from smaragdine.recording.command import build_command
from smaragdine.recording.format import TRACES_FOLDER
from smaragdine.recording.reader import Recording
from smaragdine.recording.session import Recorded, RecordOptions, record_program
from smaragdine.tracing.hook.environment import QUIET, TraceSettings, trace_environment
from smaragdine.tracing.hook.environment import environment as hook_environment

_EXAMPLE = """\
  smaragdine run train.py --epochs 3
  smaragdine run -o runs/first -m package.train
  smaragdine run torchrun --nproc-per-node 2 train.py
  smaragdine run --trace-steps 50 --trace-budget 1% train.py
  smaragdine run -- ./any-program its arguments"""

_WITH_VALUE = (
    "-o",
    "--output",
    "--period-ms",
    "--trace",
    "--trace-steps",
    "--trace-skip",
    "--trace-budget",
    "--keep-readings",
)


def _parser() -> Parser:
    parser = Parser(
        "run",
        "Run a program unchanged and record the energy it uses. Our options come before the program's name.",
        _EXAMPLE,
    )
    parser.usage = "smaragdine run [options] SCRIPT.py | -m MODULE | [--] EXECUTABLE  [arguments]"
    parser.add_argument("-o", "--output", metavar="DIR", help="the recording's folder (runs/<date>-<script>)")
    parser.add_argument(
        "--live", action="store_true", help="show power and energy so far on the terminal's last line"
    )
    parser.add_argument("--period-ms", type=period_ms, default=4.0, help="how often to read counters (4)")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="afterwards replay the operations one by one on the same GPU, to know what each draws (minutes)",
    )
    trace = parser.add_argument_group(
        "tracing: a few steps tell which operation of a deep-learning framework uses what"
    )
    trace.add_argument(
        "--trace", choices=("auto", "off"), default="auto", help="auto traces if a framework is used"
    )
    trace.add_argument(
        "--trace-steps",
        metavar="N",
        type=count,
        default=10,
        help="trace so many steps (10; 0: all); they take longer",
    )
    trace.add_argument(
        "--trace-skip", metavar="N", type=count, default=10, help="steps before the first traced one (10)"
    )
    trace.add_argument(
        "--trace-budget",
        metavar="P%",
        type=percentage,
        help="trace so little that the whole training takes at most so much longer, such as 1%% (no limit)",
    )
    trace.add_argument("--trace-keep", action="store_true", help="keep the profiler's files in RUN/traces")
    parser.add_argument(
        "--keep-readings",
        choices=("recent", "all"),
        default="recent",
        help="if the run takes over six minutes: recent readings and those of traced steps (recent), or all",
    )
    parser.add_argument("--pcie", action="store_true", help="also record PCIe traffic (21 ms a reading)")
    return parser


def main(words: list[str]) -> int:
    ours, program = split_words(words, _WITH_VALUE)
    options, unknown = _parser().parse_known_args(ours)
    if unknown:
        raise UserError(
            f"unknown option {unknown[0]}",
            "options before the program's name are ours",
            "Its own follow it: smaragdine run train.py --epochs 3. See smaragdine run --help",
        )
    _check(options, ours)
    if options.calibrate:
        from smaragdine.calibrate.session import check_gpu

        check_gpu()
    command = build_command(program, os.environ)
    prepare = functools.partial(_prepare, options)
    wanted = asked(
        "run",
        _trace_asked(options),
        period_ms=options.period_ms,
        pcie=options.pcie,
        keep_readings=options.keep_readings,
    )
    record_options = RecordOptions(
        int(options.period_ms * 1e6),
        options.pcie,
        options.live,
        keep_all=options.keep_readings == "all",
        asked=wanted,
    )
    folder = Path(options.output) if options.output else None
    with contextlib.ExitStack() as shown:
        on_feed = None
        if options.live:
            from smaragdine.report.live import live_line

            on_feed = shown.enter_context(live_line())
        with finishing() as finish:
            recorded = record_program(command, folder, record_options, os.environ, finish(prepare), on_feed)
    try:
        finish.interrupted()
        said = _assemble(recorded, options.trace_keep)
        if not said and options.trace != "off":
            said = _why_nothing(recorded, any(word.startswith("--trace-") for word in ours))
        report(recorded, said)
    except KeyboardInterrupt:
        return cut_short(recorded)
    if options.calibrate:
        _calibrate(recorded)
    return end_like(recorded.returncode)


def _check(options: argparse.Namespace, ours: Sequence[str]) -> None:
    """Refuses options of a trace if there is to be none."""
    given = [word for word in ours if word.startswith("--trace-")]
    if options.trace == "off" and options.calibrate:
        given.append("--calibrate")
    if options.trace == "off" and given:
        raise UserError(
            f"{given[0].partition('=')[0]} says how to trace", "--trace is off", "Leave one of them out"
        )


def _trace_asked(options: argparse.Namespace) -> TraceAsked:
    if options.trace == "off":
        return UNTRACED
    quiet_s = TraceSettings("").quiet_s
    with contextlib.suppress(KeyError, ValueError):
        quiet_s = float(os.environ[QUIET])
    return TraceAsked(True, options.trace_steps, options.trace_skip, options.trace_budget, quiet_s)


def _prepare(
    options: argparse.Namespace, spool: str, run_id: str, base: Mapping[str, str]
) -> Mapping[str, str]:
    variables = hook_environment(spool, run_id, base)
    if options.trace == "auto":
        folder = os.path.join(os.path.dirname(spool), TRACES_FOLDER)
        variables |= trace_environment(folder, options.trace_steps, options.trace_skip, options.trace_budget)
    return {**base, **variables}


def _calibrate(recorded: Recorded) -> None:
    """The program's own result stands, whatever becomes of this."""
    from smaragdine.accounting.run import Run

    try:
        calibrate_run(Run.open(recorded.folder))
    except KeyboardInterrupt:
        pass  # it has said what is kept
    except Exception as error:
        print(f"smaragdine: not calibrated: {visible(str(error))}", file=sys.stderr)


def _assemble(recorded: Recorded, keep: bool) -> list[str]:
    if not (recorded.folder / TRACES_FOLDER).is_dir():
        return []
    from smaragdine.tracing.assemble import assemble

    try:
        return assemble(recorded.folder, keep)
    except Exception as error:  # the program's own result stands
        return [f"the trace cannot be used: {error}"]


def _why_nothing(recorded: Recorded, wanted: bool) -> list[str]:
    """Why nothing was traced. Who asked for steps wants to know; others only if a framework computed."""
    from smaragdine.tracing.absence import computed_without_steps, why_nothing

    try:
        recording = Recording(recorded.folder, recorded.info)
        if not wanted and not computed_without_steps(recording):
            return []
        why = why_nothing(recording)
    except Exception:  # the summary says what is wrong with the recording
        return []
    return [why] if why else []
