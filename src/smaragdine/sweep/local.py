"""The local engine: runs one repetition after another on this machine."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from smaragdine.errors import UserError, signal_name
from smaragdine.files import last_printed
from smaragdine.jobs.job import RunRequest, RunResult, Stop, perform, record
from smaragdine.jobs.lender import (
    Lender,
    Say,
    Wanted,
    devices_here,
    lender,
    ranges_here,
    temperature_c,
    try_all,
    wanted_limits,
)
from smaragdine.recording import asked
from smaragdine.recording.command import build_command
from smaragdine.sweep.experiment import Experiment
from smaragdine.sweep.plan import Plan, Task, command_environment, command_words
from smaragdine.sweep.sweep import BASELINE, UNFINISHED, Progress, Queue
from smaragdine.sweep.table import Repetition


class SweepWatcher(Protocol):
    """Is told how a sweep goes."""

    def ready(self) -> None:
        """Everything that can be refused was checked; what follows is run."""
        ...

    def say(self, line: str) -> None: ...

    def begin(self, task: Task, node: str, progress: Progress) -> None: ...

    def end(self, task: Task, row: Repetition, progress: Progress) -> None: ...


def run_local(queue: Queue, watch: SweepWatcher, stop: Stop) -> None:
    """Runs what is left, until it is done or `stop`."""
    sweep, node = queue.sweep, platform.node()
    jobs = jobs_here(sweep.plan, queue.left(), os.environ)
    warmed: set[tuple[str, str]] = set()
    with lender_for(jobs.values(), watch.say) as lends:
        watch.ready()
        _baseline(queue, stop, watch.say)
        while not stop and (task := queue.next()) is not None:
            watch.begin(task, node, sweep.progress(queue.left()))
            key = (task.experiment, task.benchmark)
            job = jobs[task.name] if key not in warmed else without_warm_up(jobs[task.name])
            begin_s, place = time.monotonic(), sweep.place(task)
            ran = perform(job, lends, place, sweep.log(task), stop, watch.say)
            if stop:
                return
            if ran.error:
                raise UserError(f"{task.name} cannot run", ran.error)
            warmed.add(key)
            row = queue.ended(task, place, node, time.monotonic() - begin_s, ran.timed_out)
            if trouble := trouble_words(row, ran, sweep.log(task)):
                watch.say(f"{task.name}: {trouble}")
            if row is not None:
                watch.end(task, row, sweep.progress(queue.left()))


def jobs_here(plan: Plan, tasks: Sequence[Task], environment: Mapping[str, str]) -> dict[str, RunRequest]:
    """What each task needs on this machine. Refuses limits that its devices do not allow."""
    needs_gpus = any(t.setting.limit_kind != "parameter" for t in tasks)
    cools = any(plan.experiment(t).cool_down for t in tasks)
    ranges = ranges_here() if needs_gpus else []
    devices: dict[str, dict[str, str]] = {}
    jobs: dict[str, RunRequest] = {}
    for task in tasks:
        experiment, benchmark = plan.experiment(task), plan.benchmark(task)
        if experiment.name not in devices:
            looked = needs_gpus or cools or experiment.devices
            try:
                devices[experiment.name] = devices_here(experiment.devices, environment) if looked else {}
            except UserError as error:
                raise UserError(f"experiment {experiment.name}", error.reason, error.remedy) from None
            _check_temperature(experiment, list(devices[experiment.name]))
            _check_commands(experiment, [t for t in tasks if t.experiment == experiment.name], environment)
        own = devices[experiment.name]
        # By UUID: CUDA numbers GPUs of different models in its own order.
        chosen = {"CUDA_VISIBLE_DEVICES": ",".join(own.values())} if experiment.devices else {}
        try:
            limits = wanted_limits(task.setting, list(own), ranges)
        except UserError as error:
            raise UserError(f"experiment {experiment.name}", str(error)) from None
        jobs[task.name] = RunRequest(
            command_words(benchmark, task.setting),
            benchmark.folder,
            {**chosen, **command_environment(benchmark, task.setting)},
            list(own),
            limits,
            experiment.warm_up,
            experiment.cool_down,
            benchmark.timeout_s,
        )
    return jobs


@contextlib.contextmanager
def lender_for(jobs: Iterable[RunRequest], say: Say, journal: Path | None = None) -> Iterator[Lender | None]:
    """Opens what sets the limits of these jobs, once each is known to be possible; None: there are none."""
    settings: list[Wanted] = []
    for job in jobs:
        if job.limits and job.limits not in settings:
            settings.append(job.limits)
    if not settings:
        yield None
        return
    with lender(say, journal) as lends:
        try_all(lends, settings)
        yield lends


def without_warm_up(job: RunRequest) -> RunRequest:
    return replace(job, warm_up=0)


def trouble_words(row: Repetition | None, ran: RunResult, log: Path) -> str:
    """What went wrong with a repetition; empty if nothing did."""
    if ran.returncode or ran.timed_out:
        return f"{ended_words(ran)}{last_line(log)}"
    problems = list(ran.problems) or ["its power was not read"]
    if row is None or not row.of_use:
        return f"not measured: {'; '.join(problems)}"
    return "; ".join(ran.problems)


def ended_words(ran: RunResult) -> str:
    """How a failed program ended."""
    if ran.timed_out:
        return "ended, for it took too long"
    if ran.returncode < 0:
        return f"killed by {signal_name(-ran.returncode)}"
    return f"exit code {ran.returncode}"


def last_line(log: Path) -> str:
    """The program's last line, to put after how it ended."""
    last = last_printed(log)
    return f": {last} (see {log})" if last else ""


def _baseline(queue: Queue, stop: Stop, say: Say) -> None:
    """Measures idle power once per sweep, as a recording beside the runs."""
    sweep = queue.sweep
    longest_s = max((e.baseline_s or 0.0 for e in sweep.plan.experiments), default=0.0)
    place = sweep.folder / BASELINE
    if not longest_s or place.exists():
        return
    say(f"measuring idle power for {longest_s:g} s")
    part = sweep.folder / UNFINISHED / f"{BASELINE}.{secrets.token_hex(4)}"
    job = RunRequest(["sleep", f"{longest_s}"], str(sweep.folder), verb=asked.BASELINE)
    ran = record(job, part, Path(os.devnull), stop)
    if not stop and not ran.error and not ran.returncode:
        os.rename(part, place)


def _check_commands(experiment: Experiment, tasks: Sequence[Task], environment: Mapping[str, str]) -> None:
    for benchmark in experiment.benchmarks:
        settings = [task.setting for task in tasks if task.benchmark == benchmark.name]
        for words in {tuple(command_words(benchmark, setting)) for setting in settings}:
            try:
                with contextlib.chdir(benchmark.folder):
                    build_command(words, environment)
            except OSError as error:
                what = f"experiment {experiment.name}: folder {benchmark.folder}"
                raise UserError(what, error.strerror or str(error)) from None


def _check_temperature(experiment: Experiment, devices: Sequence[str]) -> None:
    if experiment.cool_down is not None and temperature_c(devices) is None:
        why = "no temperature of a GPU can be read here"
        raise UserError(f"experiment {experiment.name}: cool_down", why, "Leave it out")
