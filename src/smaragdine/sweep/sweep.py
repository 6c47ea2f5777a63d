"""A sweep on disk: which folder it goes to, what is done and left, and how far it is."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smaragdine.accounting.run import Run
from smaragdine.errors import UserError
from smaragdine.files import locked
from smaragdine.stats import t_quantile
from smaragdine.sweep.experiment import ExperimentFile, until_part
from smaragdine.sweep.plan import PLAN, Plan, Task, read_plan, same_plan
from smaragdine.sweep.table import RESULTS, Repetition, measure, read_results, write_results

# How far a sweep is, and how long it still takes.

LEAST_REPETITIONS = 3  # before a setting's energy can be called known


@dataclass(frozen=True)
class Progress:
    done: int  # well or not
    total: int  # with those that early stopping may still spare
    failed: int
    left_s: float | None  # None: nothing is known of the time a repetition takes


def judged_j(rows: Sequence[Repetition]) -> list[float]:
    """The energies of one setting's repetitions that tell how well it is known: of their steps where all
    have them, for a long start, which no setting changes, makes whole programs look alike."""
    steps_j = [row.steps_energy_j for row in rows if row.steps_energy_j is not None]
    if len(steps_j) == len(rows):
        return steps_j
    return [row.energy_j for row in rows if row.energy_j is not None]


def relative_interval(energies_j: Sequence[float]) -> float | None:
    """Half the 95 % interval of the mean, as a part of it; None of fewer than three."""
    n = len(energies_j)
    mean_j = statistics.fmean(energies_j) if n else 0.0
    if n < LEAST_REPETITIONS or mean_j <= 0:
        return None
    return t_quantile(n - 1) * statistics.stdev(energies_j) / n**0.5 / mean_j


def expected_s(plan: Plan, tasks: Iterable[Task], took_s: Mapping[str, Sequence[float]]) -> float | None:
    """How long these take, one after another: as others of their setting did, else of their benchmark,
    else as the experiment file expects. `took_s` is by `Task.group`."""
    of_benchmark: dict[tuple[str, str], list[float]] = {}
    for task in plan.tasks:
        if task.repetition == 0 and task.group in took_s:
            mean_s = statistics.fmean(took_s[task.group])
            of_benchmark.setdefault((task.experiment, task.benchmark), []).append(mean_s)
    total_s = 0.0
    for task in tasks:
        known = of_benchmark.get((task.experiment, task.benchmark))
        said_s = plan.benchmark(task).expected_s
        if task.group in took_s:
            total_s += statistics.fmean(took_s[task.group])
        elif known:
            total_s += statistics.fmean(known)
        elif said_s is not None:
            total_s += said_s
        else:
            return None
    return total_s


def with_warm_up(plan: Plan, tasks: Sequence[Task]) -> list[Task]:
    """These and the runs before the first of each benchmark."""
    first = {(task.experiment, task.benchmark): task for task in reversed(tasks)}
    return [*tasks, *(task for task in first.values() for _ in range(plan.experiment(task).warm_up))]


def measured_s(rows: Iterable[tuple[Task, Repetition]]) -> dict[str, list[float]]:
    """Times of complete repetitions by setting."""
    found: dict[str, list[float]] = {}
    for task, row in rows:
        if row.status == "complete" and row.time_s is not None:
            found.setdefault(task.group, []).append(row.time_s)
    return found


# A sweep on disk: what is done, what is left, and how a finished repetition gets into the table.
#
#     SWEEP/plan.json         every repetition, made once
#           results.parquet   a row for each that has ended, in the plan's order
#           runs/NAME         its recording; a folder is here only when it is whole
#           unfinished/       recordings that were cut off, and failed attempts
#           logs/NAME.log     what the program printed
#           baseline          idle power, where it was asked for
#
# Only whole recordings are moved into `runs`, in one step. So whatever ends a sweep, the next start finds
# each repetition there or not there, and goes on.

RUNS, UNFINISHED, LOGS, BASELINE, LOG = "runs", "unfinished", "logs", "baseline", "sweep.log"


class Sweep:
    """One process at a time works on a sweep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: Plan = read_plan(folder)
        self._lock = locked(folder)
        for name in (RUNS, UNFINISHED, LOGS):
            (folder / name).mkdir(exist_ok=True)
        self._tasks = {task.name: task for task in self.plan.tasks}
        self.rows: dict[str, Repetition] = self._known_rows()
        self.took_s: dict[str, list[float]] = {}  # with all that is around the program
        for task, row in self.ended():
            for group, times_s in measured_s([(task, row)]).items():
                self.took_s.setdefault(group, []).extend(times_s)

    def close(self) -> None:
        self._lock.close()

    def ended(self) -> list[tuple[Task, Repetition]]:
        return [(task, self.rows[task.name]) for task in self.plan.tasks if task.name in self.rows]

    def left(self) -> list[Task]:
        """Repetitions without a complete recording; those that failed are tried again."""
        return [task for task in self.plan.tasks if not self._complete(task) and not self.known_well(task)]

    def known_well(self, task: Task) -> bool:
        """Whether the setting's energy is known as well as asked for: it needs no more repetitions."""
        part = until_part(self.plan.experiment(task))
        if part is None or self._complete(task):
            return False
        before = [
            row
            for other, row in self.ended()
            if other.group == task.group and other.repetition < task.repetition and row.of_use
        ]
        interval = relative_interval(judged_j(before))
        return interval is not None and interval <= part

    def place(self, task: Task) -> Path:
        """A new folder's name for a recording that has not ended."""
        return self.folder / UNFINISHED / f"{task.name}.{secrets.token_hex(4)}"

    def log(self, task: Task) -> Path:
        return self.folder / LOGS / f"{task.name}.log"

    def keep(self, task: Task, recording: Path, row: Repetition, took_s: float) -> None:
        """Take a whole recording into the sweep and its table."""
        place = self.folder / RUNS / task.name
        if place.exists():
            os.rename(place, self.place(task))
        os.rename(recording, place)
        self.rows[task.name] = row
        if row.of_use:
            self.took_s.setdefault(task.group, []).append(took_s)
        self.save()

    def save(self) -> None:
        write_results(self.folder, [row for _, row in self.ended()])

    def note(self, line: str) -> None:
        """Into the sweep's log: what was said, with its time."""
        with open(self.folder / LOG, "a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")

    def progress(self, left: Sequence[Task], at_once: int = 1) -> Progress:
        names = {task.name for task in left}
        ended = [task for task, _ in self.ended() if task.name not in names]
        failed = sum(not self._complete(task) for task in ended)
        left_s = expected_s(self.plan, left, self.took_s)
        all_s = None if left_s is None else left_s / max(1, at_once)
        return Progress(len(ended), len(ended) + len(left), failed, all_s)

    def failed(self) -> list[Repetition]:
        """What ended, and still is of no use."""
        return [row for task, row in self.ended() if not self._complete(task)]

    def _complete(self, task: Task) -> bool:
        row = self.rows.get(task.name)
        return row is not None and row.of_use

    def _known_rows(self) -> dict[str, Repetition]:
        """From the table, and from recordings that ended just before they could get into it."""
        by_recording = {row.recording: row for row in self._table()}
        known: dict[str, Repetition] = {}
        for task in self.plan.tasks:
            recording = f"{RUNS}/{task.name}"
            if not (self.folder / recording).is_dir():
                continue
            try:
                known[task.name] = by_recording.get(recording) or self.row(
                    task, self.folder / recording, platform.node()
                )
            except UserError as error:
                # A machine that lost its power may have lost what was written last, too.
                self.note(f"{task.name}: {error}")
                os.rename(self.folder / recording, self.place(task))
        return known

    def _table(self) -> list[Repetition]:
        if not (self.folder / RESULTS).is_file():
            return []
        try:
            return read_results(self.folder)
        except UserError as error:
            self.note(f"made anew from the recordings: {error}")
            return []

    def row(self, task: Task, folder: Path, node: str) -> Repetition:
        """What the recording in `folder` says of a repetition."""
        run = Run.open(folder)
        for line in run.recording.damage:
            self.note(f"{task.name}: {line}")
        setting = task.setting
        devices = self.plan.experiment(task).devices or None
        row: dict[str, Any] = {
            "experiment": task.experiment,
            "benchmark": task.benchmark,
            "limit_kind": setting.limit_kind,
            "repetition": task.repetition,
            "recording": f"{RUNS}/{task.name}",
            "status": run.recording.status,
            "power_limit_w": setting.power_limit_w,
            "memory_clock_mhz": setting.memory_clock_mhz,
            "graphics_clock_mhz": setting.graphics_clock_mhz,
            "parameters": dict(setting.parameters),
            "node": node,
        }
        try:
            found = measure(run, devices)
        except UserError as error:
            self.note(f"{task.name}: {error}")
            return Repetition(**row)
        return Repetition(**row, **vars(found))


class Queue:
    """What is left, in order. A task that failed comes back as often as it may be retried."""

    def __init__(self, sweep: Sweep, retry: int = 0) -> None:
        self.sweep = sweep
        self._waiting = deque(sweep.left())
        self._running: list[Task] = []
        self._retry = retry
        self._failures: Counter[str] = Counter()

    def next(self, gpu_type: str | None = None) -> Task | None:
        """The next one to run, on a device of that type."""
        for task in list(self._waiting):
            if self.sweep.known_well(task):
                self._waiting.remove(task)
            elif task.setting.gpu_type in (None, gpu_type):
                # Of a setting that may be known well enough soon, one at a time.
                if self._undecided(task):
                    continue
                self._waiting.remove(task)
                self._running.append(task)
                return task
        return None

    def again(self, task: Task) -> None:
        """It could not be finished, by no fault of its own."""
        self._running.remove(task)
        self._waiting.appendleft(task)

    def ended(
        self, task: Task, recording: Path, node: str, took_s: float, timed_out: bool = False
    ) -> Repetition | None:
        """Take its recording; None where it is of no use and is tried again."""
        row = self.sweep.row(task, recording, node)
        if timed_out:
            # Asked to end, a program may do so with exit code 0.
            row = replace(row, status="killed")
        if not row.of_use and self._failures[task.name] < self._retry:
            self._failures[task.name] += 1
            self.again(task)
            return None
        self._running.remove(task)
        self.sweep.keep(task, recording, row, took_s)
        return row

    def left(self) -> list[Task]:
        return [*self._running, *(t for t in self._waiting if not self.sweep.known_well(t))]

    def _undecided(self, task: Task) -> bool:
        if until_part(self.sweep.plan.experiment(task)) is None:
            return False
        return any(other.group == task.group for other in self._running)


ROOT = Path("sweeps")


def find_sweep(
    wanted: ExperimentFile, seed: int | None, output: Path | None, root: Path = ROOT
) -> tuple[Path, Plan | None]:
    """The folder; with its plan where the same sweep is there already."""
    if output is not None:
        return output, _plan_at(output, wanted, seed)
    for path in sorted(root.glob(f"*/{PLAN}")):
        try:
            plan = read_plan(path.parent)
        except UserError:
            continue
        if same_plan(plan, wanted.experiments, seed) and _unfinished(path.parent):
            return path.parent, plan
    name = "-".join(each.name for each in wanted.experiments)[:60]
    stem = f"{time.strftime('%Y-%m-%d')}-{name}"
    for number in range(1, 100_000):
        folder = root / (stem if number == 1 else f"{stem}-{number}")
        if not folder.exists():
            return folder, None
    raise UserError(f"{root} is full of sweeps named {stem}", remedy="Name another folder with -o DIR")


@contextlib.contextmanager
def gone_if_refused(folder: Path) -> Iterator[None]:
    """A new sweep that is refused before anything was run leaves nothing, nor the folders made on its way."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    users = set[Path]() if new else set(folder.iterdir())
    try:
        yield
    except UserError:
        # Unless another process, started at the same time, is at work in it.
        with contextlib.suppress(OSError, UserError), locked(folder):
            if not any((folder / RUNS).glob("*")) and not any((folder / UNFINISHED).glob("*")):
                _remove(set(folder.iterdir()) - users)
                for path in new:
                    path.rmdir()
        raise


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _plan_at(folder: Path, wanted: ExperimentFile, seed: int | None) -> Plan | None:
    if not (folder / PLAN).exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} already holds files", remedy="Name a new folder with -o DIR")
        return None
    plan = read_plan(folder)
    if not same_plan(plan, wanted.experiments, seed):
        why = "its experiments or its seed are not these"
        raise UserError(f"{folder} holds another sweep", why, "Name a new folder with -o DIR")
    return plan


def _unfinished(folder: Path) -> bool:
    try:
        sweep = Sweep(folder)
    except UserError as error:
        raise UserError("the same sweep is there", str(error)) from None
    try:
        return bool(sweep.left())
    finally:
        sweep.close()
