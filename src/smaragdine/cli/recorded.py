"""What `run` and `tune` do once the recorded program has ended: say what it used, and end as it did."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from smaragdine.accounting.run import Run
from smaragdine.errors import visible
from smaragdine.recording.format import TRACES_FOLDER
from smaragdine.recording.reader import Recording
from smaragdine.recording.session import Prepare, Recorded
from smaragdine.report.terminal import console, run_tables, shortest_path


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
