"""Run what a study lacks: each run is recorded, its result kept, and its events taken away.

The result of a run is made while the next program starts: that takes longer, and nothing of it is measured.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from smaragdine.study.finishing import Beside, Finished, assembled, finish
from smaragdine.study.folder import Keep, Study, expected_s, in_order, left_of
from smaragdine.study.results import Result
from smaragdine.study.settings import Run
from smaragdine.sweep.engine_local import ended_words, last_line
from smaragdine.sweep.progress import Progress
from smaragdine.sweep.repetition import Job, Stop, record

# A setting that fails so often, one after the other, is not tried again in this command.
_MOST_FAILURES = 2
LEAST_PROCESSORS = 4  # with fewer, what goes on beside a program takes too much from it


class Watcher(Protocol):
    """Is told how a study goes."""

    def say(self, line: str) -> None: ...

    def begin(self, run: Run, progress: Progress) -> None: ...

    def end(self, run: Run, result: Result, progress: Progress) -> None: ...


@dataclass(frozen=True)
class Outcome:
    failed: tuple[str, ...] = ()  # runs
    left_out: tuple[str, ...] = ()  # runs of settings that had failed before


def run_missing(
    study: Study,
    runs: Sequence[Run],
    keep: Keep,
    watch: Watcher,
    stop: Stop,
    beside: bool | None = None,
    timeout_s: float | None = None,
) -> Outcome:
    """Until all have a result, or `stop`.

    `beside`: a run's result is made while the next program starts; None: where there are processors for it.
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
    return Outcome(tuple(course.failed), tuple(course.left_out))


@dataclass(frozen=True)
class _Behind:
    """A run whose program has ended, and whose result is being made."""

    run: Run
    recorded_s: float
    process: Beside | None  # None: nobody makes it yet


class _Course:
    """One run after the other, the result of at most one of them still to come."""

    def __init__(
        self,
        study: Study,
        runs: Sequence[Run],
        keep: Keep,
        watch: Watcher,
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

    def run(self, run: Run, left: Sequence[Run]) -> None:
        """`left` begins with it."""
        setting = run.setting.name
        # The result that is still to come may be the failure that decides.
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

    def settle(self, left: Sequence[Run]) -> None:
        """Wait for the result that is still to come; `left` are to be run after that."""
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
        """The recording is whole: the next command makes its result."""
        if self._behind is not None and self._behind.process is not None:
            self._behind.process.abandon()

    def _is_whole(self, run: Run, left: Sequence[Run]) -> bool:
        """Whether a recording was there that lacked its result alone: whoever made it was ended before."""
        if not self._study.run_folder(run).is_dir():
            return False
        self.settle(left)
        found = self._finished(run, self._begun(run))
        if found.result is not None:
            self._end(run, found.result, left[1:])
        elif found.useless:
            self._study.give_up(run)  # its events are gone, say, and its result was removed
            return False
        elif not self._stop:
            self._fail(run, found.error)
        return True

    def _begun(self, run: Run) -> Beside | None:
        return Beside(self._study.folder, run) if self._beside else None

    def _finished(self, run: Run, process: Beside | None) -> Finished:
        found = finish(self._study.folder, run) if process is None else process.finished(self._stop)
        for line in found.said:
            self._study.note(f"{run.name}: trace: {line}")
        return found

    def _end(self, run: Run, result: Result, left: Sequence[Run]) -> None:
        self._in_a_row[run.setting.name] = 0
        self._study.slim(self._keep)
        self._watch.end(run, result, self._progress(left))

    def _fail(self, run: Run, error: str) -> None:
        self._in_a_row[run.setting.name] += 1
        self.failed.append(run.name)
        self._watch.say(f"{run.name}: {error}")

    def _progress(self, left: Sequence[Run]) -> Progress:
        done = len(self._runs) - len(left_of(self._study.folder, self._runs))
        left_s = expected_s(left, self._study.made.took_s)
        return Progress(done, len(self._runs), len(self.failed), left_s)


def _recorded(study: Study, run: Run, timeout_s: float | None, stop: Stop) -> str | None:
    """Why there is no recording; None where there is."""
    setting, place, log = run.setting, study.place(run), study.log(run)
    job = Job(
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
        assembled(place)  # what it did until then may tell why
        return ran.error or ended_words(ran) + last_line(log)
    study.take(run, place)
    return None
