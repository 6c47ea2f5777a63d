"""Run what a study lacks: each run is recorded, its result kept, and its events taken away."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from smaragdine.errors import UserError
from smaragdine.recording.reader import open_recording
from smaragdine.study.folder import Keep, Study, expected_s, in_order, left_of
from smaragdine.study.results import Result, result_of, save_result
from smaragdine.study.settings import Run
from smaragdine.sweep.engine_local import ended_words, last_line
from smaragdine.sweep.progress import Progress
from smaragdine.sweep.repetition import Job, Stop, record

# A setting that fails so often, one after the other, is not tried again in this command.
_MOST_FAILURES = 2


class Watcher(Protocol):
    """Is told how a study goes."""

    def say(self, line: str) -> None: ...

    def begin(self, run: Run, progress: Progress) -> None: ...

    def end(self, run: Run, result: Result, progress: Progress) -> None: ...


@dataclass(frozen=True)
class Outcome:
    failed: tuple[str, ...] = ()  # runs
    left_out: tuple[str, ...] = ()  # runs of settings that had failed before


def run_missing(study: Study, runs: Sequence[Run], keep: Keep, watch: Watcher, stop: Stop) -> Outcome:
    """Until all have a result, or `stop`."""
    study.slim(keep)
    left = in_order(left_of(study.folder, runs), study.made.seed)
    failed: list[str] = []
    left_out: list[str] = []
    in_a_row: Counter[str] = Counter()
    for number, run in enumerate(left):
        if stop:
            break
        if in_a_row[run.setting.name] >= _MOST_FAILURES:
            left_out.append(run.name)
            continue
        watch.begin(run, _progress(study, runs, left[number:], failed))
        result = _result(study, run, watch, stop)
        if stop and result is None:
            break
        in_a_row[run.setting.name] = 0 if result is not None else in_a_row[run.setting.name] + 1
        if result is None:
            failed.append(run.name)
            continue
        study.slim(keep)
        watch.end(run, result, _progress(study, runs, left[number + 1 :], failed))
    return Outcome(tuple(failed), tuple(left_out))


def _result(study: Study, run: Run, watch: Watcher, stop: Stop) -> Result | None:
    """None where there is none, which has been said."""
    begin_s = time.monotonic()
    # A recording that is whole already lacks its result alone: whoever made it was ended before.
    if study.run_folder(run).is_dir():
        try:
            return _saved(study, run)
        except UserError:
            study.give_up(run)  # its events are gone, say, and its result was removed
    if not _recorded(study, run, watch, stop):
        return None
    try:
        result = _saved(study, run)
    except UserError as error:
        watch.say(f"{run.name}: {error.reason}. See smaragdine report {study.give_up(run)}")
        return None
    study.took(run, time.monotonic() - begin_s)
    return result


def _saved(study: Study, run: Run) -> Result:
    log = study.log(run)
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    result = result_of(run, open_recording(study.run_folder(run)), text)
    save_result(study.folder, result)
    return result


def _recorded(study: Study, run: Run, watch: Watcher, stop: Stop) -> bool:
    setting, place, log = run.setting, study.place(run), study.log(run)
    job = Job(
        setting.words,
        os.getcwd(),
        setting.environment,
        trace_steps=setting.trace_steps,
        trace_skip=setting.trace_skip,
    )
    ran = record(job, place, log, stop)
    if stop:
        return False
    if ran.error or ran.returncode:
        watch.say(f"{run.name}: {ran.error or ended_words(ran) + last_line(log)}")
        return False
    for line in ran.said:
        study.note(f"{run.name}: trace: {line}")
    study.take(run, place)
    return True


def _progress(study: Study, runs: Sequence[Run], left: Sequence[Run], failed: Sequence[str]) -> Progress:
    done = len(runs) - len(left_of(study.folder, runs))
    return Progress(done, len(runs), len(failed), expected_s(left, study.made.took_s))
