"""`smaragdine run`: record a program, then say what it used."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from smaragdine.accounting.run import Run
from smaragdine.cli.parsing import Parser, count, percentage, period_ms
from smaragdine.errors import UserError, visible
from smaragdine.recording.asked import UNTRACED, TraceAsked, asked
from smaragdine.recording.command import build_command
from smaragdine.recording.format import TRACES_FOLDER
from smaragdine.recording.reader import Recording
from smaragdine.recording.session import Prepare, Recorded, RecordOptions, record_program
from smaragdine.report.terminal import console, run_tables, shortest_path
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
        "--trace-steps",
        metavar="N",
        type=count,
        default=10,
        help="how many steps (10; 0: every one); they take longer",
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
    parser.add_argument(
        "--keep-readings",
        choices=("recent", "all"),
        default="recent",
        help="of runs longer than six minutes: recent readings and those of traced steps (recent), or all",
    )
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
    return end_like(recorded.returncode)


class _Finish:
    """Ctrl-C is the program's while it runs. One that comes between its end and the recording's waits: the
    recording is to be whole."""

    def __init__(self) -> None:
        self._came = False

    def __call__(self, prepare: Prepare) -> Prepare:
        def prepared(spool: str, run_id: str, base: Mapping[str, str]) -> Mapping[str, str]:
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._take)
            return prepare(spool, run_id, base)

        return prepared

    def interrupted(self) -> None:
        """Raises for the one that has waited."""
        if self._came:
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def end(self) -> None:
        if signal.getsignal(signal.SIGINT) == self._take:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def finishing() -> Iterator[_Finish]:
    finish = _Finish()
    try:
        yield finish
    finally:
        finish.end()


def cut_short(recorded: Recorded) -> int:
    """The program has ended, and somebody does not wait for the rest: what there is, and how to have it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would leave this unsaid
    where = shortest_path(recorded.folder)
    left = any((recorded.folder / TRACES_FOLDER).glob("*.meta.json"))
    operations = f"; what was traced is not read yet: smaragdine report {where} does that" if left else ""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(
                f"\ninterrupted: the program had ended, and its recording is whole{operations}\n"
                f"recording: {where}",
                file=sys.stderr,
            )
    return 128 + signal.SIGINT


def _check(options: argparse.Namespace, ours: Sequence[str]) -> None:
    """What is asked of a trace, where there is to be none."""
    given = [word for word in ours if word.startswith("--trace-")]
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


def _assemble(recorded: Recorded, keep: bool) -> list[str]:
    if not (recorded.folder / TRACES_FOLDER).is_dir():
        return []
    from smaragdine.tracing.assemble import assemble

    try:
        return assemble(recorded.folder, keep)
    except Exception as error:  # the program's own result stands
        return [f"the trace cannot be used: {error}"]


def _why_nothing(recorded: Recorded, wanted: bool) -> list[str]:
    """Whoever asked for steps wants to know; else only who computed with a framework need hear of them."""
    from smaragdine.tracing.absence import computed_without_steps, why_nothing

    try:
        recording = Recording(recorded.folder, recorded.info)
        if not wanted and not computed_without_steps(recording):
            return []
        why = why_nothing(recording)
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
        summary = Run(Recording(recorded.folder, recorded.info)).summary
    except Exception as error:
        print(f"smaragdine: the recording cannot be summarised: {visible(str(error))}", file=sys.stderr)
        for problem in recorded.problems:
            print(f"smaragdine: {visible(problem)}", file=sys.stderr)
    else:
        out.print()
        out.print(run_tables(summary))
    for line in said:
        out.print(f"trace: {visible(line)}", markup=False, soft_wrap=True)
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
