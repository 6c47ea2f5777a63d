"""What verbs do once a program is recorded: say what it used, calibrate it, and end as it did."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from smaragdine.accounting.run import Run
from smaragdine.errors import visible
from smaragdine.recording.format import TRACES_FOLDER
from smaragdine.recording.reader import Recording
from smaragdine.recording.session import Prepare, Recorded
from smaragdine.report.terminal import console, run_tables, shortest_path

if TYPE_CHECKING:
    from smaragdine.calibrate.replay import ReplayProgress
    from smaragdine.calibrate.store import Store

_SHOWN = 5  # operations that were not replayed
DEFAULT_BUDGET_S = 600.0


class _Finish:
    """Lets the program have Ctrl-C while it runs; after its end, one waits until the recording is whole."""

    def __init__(self) -> None:
        self._came = False

    def __call__(self, prepare: Prepare) -> Prepare:
        def prepared(spool: str, run_id: str, base: Mapping[str, str]) -> Mapping[str, str]:
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._take)
            return prepare(spool, run_id, base)

        return prepared

    def interrupted(self) -> None:
        """Raises the one that has waited."""
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
    """Says what there is and how to get the rest, if Ctrl-C comes after the program's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would cut this off
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


def report(recorded: Recorded, said: Sequence[str]) -> None:
    """Prints the table to stderr. Whatever fails here, the program's own result stands."""
    if sys.stderr is None:  # closed by the caller; nothing of ours goes elsewhere
        return
    try:
        _print_tables(recorded, said)
        sys.stderr.flush()
    except (OSError, SystemExit):
        # A broken pipe, which rich turns into an exit. The interpreter must not stumble over it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _print_tables(recorded: Recorded, said: Sequence[str]) -> None:
    out = console(sys.stderr)
    try:
        # The info that we have, even if run.json could not be written.
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
    """Exits with the program's code, or dies of the signal that it died of."""
    if returncode >= 0:
        return returncode
    number = -returncode
    sys.stderr.flush()
    # The program left the core file that was asked for; do not add another.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number


def calibrate_run(
    run: Run,
    store: Store | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    python: str | None = None,
    *,
    replay: bool = True,
    as_json: bool = False,
) -> int:
    """Calibrates, and says what came of it. Progress goes to stderr."""
    from smaragdine.calibrate.session import calibrate
    from smaragdine.calibrate.store import Store, default_folder

    kept = store or Store(default_folder())
    line = _Line()

    def say(what: str | ReplayProgress) -> None:
        if isinstance(what, str):
            line.show(what, lasting=True)
        else:
            line.show(_progress(what), lasting=False)

    for damaged in kept.damage():
        say(f"smaragdine: {visible(damaged)}")
    try:
        found = calibrate(run, kept, budget_s=budget_s, python=python, replay=replay, say=say)
    except KeyboardInterrupt:
        line.end()
        where = shortest_path(run.path)
        print(
            f"interrupted: what was replayed is kept; smaragdine calibrate {where} goes on from there",
            file=sys.stderr,
        )
        raise
    finally:
        line.end()
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=2))
        return 0
    for each in found:
        lent = f", lent from {each.lent_from}" if each.lent_from else ""
        print(
            f"{each.device}: {each.known} of {each.calls} calls are known, {each.busy_known:.1%} of the busy "
            f"time; {each.replayed} were replayed now{lent}"
        )
        if each.model:
            print(f"  {each.busy_modelled:.1%} of the busy time: {visible(each.model)}")
        left = 1 - each.busy_known - each.busy_modelled
        if left > 5e-4:
            few = "" if each.model else "; a model of the card takes at least twelve replays"
            print(f"  {left:.1%} of the busy time: equal shares of what is left{few}")
        for op, why in list(each.not_replayed.items())[:_SHOWN]:
            print(f"  not replayed: {visible(op)}: {visible(why)}")
        if (more := len(each.not_replayed) - _SHOWN) > 0:
            print(f"  … and {more} more operations, or some of their calls: --json")
    print(f"rows rest on it from now on: smaragdine report {shortest_path(run.path)}")
    return 0


def _progress(progress: ReplayProgress) -> str:
    left = f"{progress.left_s:.0f} s left" if progress.left_s < 90 else f"{progress.left_s / 60:.0f} min left"
    return f"{progress.done} of {progress.of} calls, {progress.busy_share:.0%} of the busy time, {left}"


class _Line:
    """Progress on stderr: a line that changes on a terminal. A log gets only what lasts."""

    def __init__(self) -> None:
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._open = False

    def show(self, text: str, *, lasting: bool) -> None:
        if sys.stderr is None:
            return
        if lasting:
            self.end()
            print(text, file=sys.stderr, flush=True)
        elif self._terminal:
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
            self._open = True

    def end(self) -> None:
        if self._open:
            print(file=sys.stderr, flush=True)
            self._open = False
