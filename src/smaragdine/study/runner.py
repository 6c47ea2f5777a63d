"""Runs what a study lacks: records each run, keeps its result, and takes its events away.

A run's result is made while the next program starts: that takes longer, and nothing of it is measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from smaragdine.accounting.run import Run
from smaragdine.errors import UserError, signal_name
from smaragdine.jobs.job import RunRequest, Stop, record
from smaragdine.messages import Child, Inbox, Message, keep_stdout_for_messages, module_command, send
from smaragdine.recording.format import TRACES_FOLDER
from smaragdine.study.folder import (
    Keep,
    Study,
    expected_s,
    has_result,
    in_order,
    left_of,
    log_of,
    remove_traced,
    run_folder,
)
from smaragdine.study.plan import StudyRun
from smaragdine.study.results import (
    RESULTS,
    Result,
    has_sketch,
    load_result,
    result_of,
    save_result,
    save_sketch,
    sketch_of,
)
from smaragdine.sweep.local import ended_words, last_line
from smaragdine.sweep.sweep import Progress
from smaragdine.system import dying_with_us
from smaragdine.tracing.assemble import NotWritten, assemble

# What becomes of a recording: its raw trace becomes events, and these become a result.
#
#     python -m smaragdine.study.runner   # one message asks, one answers (see messages.py)
#
# A process of its own does this beside the next program, which has to start before it is measured. It dies
# with whoever started it. The raw trace stays until there is a result, so the next command can begin again.

COMMAND = module_command("smaragdine.study.runner")
_NICE = 10


@dataclass(frozen=True)
class Finished:
    result: Result | None = None
    said: tuple[str, ...] = ()  # remarks on the trace
    error: str = ""  # why there is no result
    useless: bool = False  # the recording says nothing about a step; if not, another try may give a result


def finish(folder: Path, run: StudyRun) -> Finished:
    """Makes the result of a run that was recorded into the study `folder`."""
    recording, log = run_folder(folder, run), log_of(folder, run)
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    try:
        said, assemble_s = assembled(recording)
    except NotWritten as error:
        return Finished(error=str(error))
    try:
        recorded = Run.open(recording)
        begin_s = time.process_time()
        _ = recorded.summary, recorded.step
        account_s = time.process_time() - begin_s
        result = result_of(run, recorded, text, assemble_s, account_s)
    except UserError as error:
        return Finished(said=said, error=error.reason, useless=True)
    if not has_sketch(folder, run.setting.name):
        said = (*said, *sketched(folder, run.name, recorded))
    try:
        save_result(folder, result)  # last: a run with a result is not done again
    except (UserError, OSError) as error:
        return Finished(said=said, error=f"its result could not be written: {error}")
    return Finished(result, said)


def sketched(folder: Path, name: str, run: Run) -> tuple[str, ...]:
    """Keeps the sketch of a run, or says why it cannot. Never costs the result."""
    try:
        sketch = sketch_of(name, run)
        if sketch is not None:
            save_sketch(folder, sketch)
    except Exception as error:
        return (f"some figures cannot be drawn of it: {str(error) or repr(error)}",)
    return ()


def assembled(recording: Path) -> tuple[tuple[str, ...], float | None]:
    """Remarks on the trace, and the CPU seconds that its events took."""
    if not (recording / TRACES_FOLDER).is_dir():
        return (), None
    import pyarrow as pa

    pa.array([0])  # the first call loads libraries
    remove_traced(recording)  # left if somebody was stopped before all events were there
    begin_s = time.process_time()
    try:
        said = tuple(assemble(recording, keep=True))
    except NotWritten:
        raise
    except Exception as error:  # name the run, and let the others go on
        said = (f"the trace cannot be used: {error}",)
    return said, time.process_time() - begin_s


class FinishingProcess:
    """Runs `finish` in a process of its own."""

    def __init__(self, folder: Path, run: StudyRun) -> None:
        self._folder, self._run = folder, run
        with _signals_held():
            self._child = Child(
                COMMAND, stderr=subprocess.STDOUT, process_group=0, preexec_fn=dying_with_us()
            )
        self._child.send({"folder": str(folder), "run": msgspec.to_builtins(run)})
        self._child.hang_up()

    def finished(self, stop: Stop) -> Finished:
        """Waits for it."""
        answer: Finished | None = None
        try:
            with stop.telling(self._child.process):
                for message in self._child.inbox:
                    answer = _answer(message) or answer
        finally:
            returncode = self._child.end()
        if has_result(self._folder, self._run):
            path = self._folder / RESULTS / f"{self._run.name}.json"
            return Finished(load_result(path), answer.said if answer else ())
        why = self._child.inbox.printed or _ended(returncode)
        return answer or Finished(error=f"its result was not made: {why}")

    def abandon(self) -> None:
        self._child.end(0.0)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Ignores Ctrl-C in a child: it is for the program, and a result that was begun is worth its seconds. The
    second Ctrl-C kills."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answer(message: Message) -> Finished | None:
    """None: it is of something else."""
    try:
        return Finished(None, tuple(message["said"]), message["error"], message["useless"])
    except (TypeError, KeyError):
        return None


def _ended(returncode: int) -> str:
    if returncode < 0:
        return f"whoever made it was killed by {signal_name(-returncode)}"
    return f"whoever made it ended with exit code {returncode}"


def main() -> None:
    request = Inbox(0).receive()
    if request is None:
        os._exit(1)
    os.nice(_NICE)
    answers = keep_stdout_for_messages()
    done = finish(Path(request["folder"]), msgspec.convert(request["run"], StudyRun))
    os.write(answers, b"\n")  # a library may have printed half a line
    send(answers, {"said": done.said, "error": done.error, "useless": done.useless})
    # Threads of libraries that nobody has joined can abort a process on its way out.
    os._exit(0)


# A setting that fails so often in a row is not tried again in this command.
_MOST_FAILURES = 2
LEAST_PROCESSORS = 4  # with fewer, work beside a program takes too much from it


class StudyWatcher(Protocol):
    """Is told how a study goes."""

    def say(self, line: str) -> None: ...

    def begin(self, run: StudyRun, progress: Progress) -> None: ...

    def end(self, run: StudyRun, result: Result, progress: Progress) -> None: ...


@dataclass(frozen=True)
class StudyOutcome:
    failed: tuple[str, ...] = ()  # runs
    left_out: tuple[str, ...] = ()  # runs of settings that had failed before


def run_missing(
    study: Study,
    runs: Sequence[StudyRun],
    keep: Keep,
    watch: StudyWatcher,
    stop: Stop,
    beside: bool | None = None,
    timeout_s: float | None = None,
) -> StudyOutcome:
    """Runs until all have a result, or `stop`.

    `beside`: make a run's result while the next program starts; None: if there are processors for it.
    `timeout_s`: a program that takes longer is ended, and its run has failed.
    """
    if beside is None:
        beside = len(os.sched_getaffinity(0)) >= LEAST_PROCESSORS
    study.slim(keep)
    left = in_order(left_of(study.folder, runs), study.made.seed)
    course = _Course(study, runs, keep, watch, stop, beside, timeout_s)
    try:
        for number, run in enumerate(left):
            if stop:
                break
            course.run(run, left[number:])
        course.settle([])
    finally:
        course.abandon()
    return StudyOutcome(tuple(course.failed), tuple(course.left_out))


@dataclass(frozen=True)
class _Behind:
    """A run whose program has ended, and whose result is being made."""

    run: StudyRun
    recorded_s: float
    process: FinishingProcess | None  # None: nobody makes it yet


class _Course:
    """Runs one after the other, while at most one result is still to come."""

    def __init__(
        self,
        study: Study,
        runs: Sequence[StudyRun],
        keep: Keep,
        watch: StudyWatcher,
        stop: Stop,
        beside: bool,
        timeout_s: float | None,
    ) -> None:
        self._study, self._runs, self._watch, self._stop = study, runs, watch, stop
        self._keep: Keep = keep
        self._beside, self._timeout_s = beside, timeout_s
        self._behind: _Behind | None = None
        self._in_a_row: Counter[str] = Counter()
        self.failed: list[str] = []
        self.left_out: list[str] = []

    def run(self, run: StudyRun, left: Sequence[StudyRun]) -> None:
        """`left` begins with this run."""
        setting = run.setting.name
        # The result still to come may be the failure that decides.
        behind = self._behind is not None and self._behind.run.setting.name == setting
        if behind and self._in_a_row[setting] >= _MOST_FAILURES - 1:
            self.settle(left)
        if self._in_a_row[setting] >= _MOST_FAILURES:
            self.left_out.append(run.name)
            return
        self._watch.begin(run, self._progress(left))
        if self._is_whole(run, left):
            return
        begin_s = time.monotonic()
        error = _recorded(self._study, run, self._timeout_s, self._stop)
        recorded_s = time.monotonic() - begin_s
        self.settle(left[1:])
        if error is None:
            self._behind = _Behind(run, recorded_s, self._begun(run))
            if not self._beside:
                self.settle(left[1:])
        elif not self._stop:
            self._fail(run, error)

    def settle(self, left: Sequence[StudyRun]) -> None:
        """Waits for the result that is still to come; `left` are to run after that."""
        if self._behind is None:
            return
        behind, self._behind = self._behind, None
        begin_s = time.monotonic()
        found = self._finished(behind.run, behind.process)
        if found.result is not None:
            self._study.took(behind.run, behind.recorded_s + time.monotonic() - begin_s)
            self._end(behind.run, found.result, left)
        elif found.useless:
            place = self._study.give_up(behind.run)
            self._fail(behind.run, f"{found.error}. See smaragdine report {place}")
        elif not self._stop:
            self._fail(behind.run, found.error)

    def abandon(self) -> None:
        """Leaves the recording as it is: it is whole, and the next command makes its result."""
        if self._behind is not None and self._behind.process is not None:
            self._behind.process.abandon()

    def _is_whole(self, run: StudyRun, left: Sequence[StudyRun]) -> bool:
        """Whether there was a recording that lacked only its result: whoever made it was stopped before."""
        if not self._study.run_folder(run).is_dir():
            return False
        self.settle(left)
        found = self._finished(run, self._begun(run))
        if found.result is not None:
            self._end(run, found.result, left[1:])
        elif found.useless:
            self._study.give_up(run)  # for instance, its events are gone and its result was removed
            return False
        elif not self._stop:
            self._fail(run, found.error)
        return True

    def _begun(self, run: StudyRun) -> FinishingProcess | None:
        return FinishingProcess(self._study.folder, run) if self._beside else None

    def _finished(self, run: StudyRun, process: FinishingProcess | None) -> Finished:
        found = finish(self._study.folder, run) if process is None else process.finished(self._stop)
        for line in found.said:
            self._study.note(f"{run.name}: trace: {line}")
        return found

    def _end(self, run: StudyRun, result: Result, left: Sequence[StudyRun]) -> None:
        self._in_a_row[run.setting.name] = 0
        self._study.slim(self._keep)
        self._watch.end(run, result, self._progress(left))

    def _fail(self, run: StudyRun, error: str) -> None:
        self._in_a_row[run.setting.name] += 1
        self.failed.append(run.name)
        self._watch.say(f"{run.name}: {error}")

    def _progress(self, left: Sequence[StudyRun]) -> Progress:
        done = len(self._runs) - len(left_of(self._study.folder, self._runs))
        left_s = expected_s(left, self._study.made.took_s)
        return Progress(done, len(self._runs), len(self.failed), left_s)


def _recorded(study: Study, run: StudyRun, timeout_s: float | None, stop: Stop) -> str | None:
    """Why there is no recording; None if there is one."""
    setting, place, log = run.setting, study.place(run), study.log(run)
    job = RunRequest(
        setting.words,
        os.getcwd(),
        setting.environment,
        timeout_s=timeout_s,
        trace_steps=setting.trace_steps,
        trace_skip=setting.trace_skip,
        verb="study",
    )
    ran = record(job, place, log, stop)
    if stop:
        return "stopped"
    if ran.error or ran.returncode or ran.timed_out:
        assembled(place)  # what it did before may tell why
        return ran.error or ended_words(ran) + last_line(log)
    study.take(run, place)
    return None


if __name__ == "__main__":
    main()
