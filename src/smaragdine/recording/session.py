"""One recording from beginning to end: folder, recorder, program, marks, run.json."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smaragdine.errors import UserError
from smaragdine.monitor.sampler import ClockWatch
from smaragdine.recording import folder as folders
from smaragdine.recording import marks
from smaragdine.recording.asked import asked
from smaragdine.recording.command import Command, without_secrets
from smaragdine.recording.format import SPOOL_FOLDER
from smaragdine.recording.recorder import RecorderConfig
from smaragdine.recording.seal import last_seals
from smaragdine.recording.supervise import Recorders, Supervision, supervise
from smaragdine.recording.thinned import read_thinned
from smaragdine.sensors.discover import COUNTER_PERIOD_NS, host_facts, settings_from_environment

MARKER_VARIABLE = "SMARAGDINE_RUN_ID"


@dataclass(frozen=True)
class RecordOptions:
    period_ns: int = COUNTER_PERIOD_NS
    pcie: bool = False
    live: bool = False
    gpus: tuple[str, ...] = ()  # UUIDs; none: those that the environment lets a program see
    keep_all: bool = False  # of the readings; else old ones are thinned
    asked: Mapping[str, Any] = field(default_factory=lambda: asked("record"))


@dataclass(frozen=True)
class Recorded:
    folder: Path
    info: dict[str, Any]  # what run.json should say, even where a full disk kept it from being written
    returncode: int
    problems: list[str]


# Prepares the program's environment: (spool folder, run id, environment) → environment.
Prepare = Callable[[str, str, Mapping[str, str]], Mapping[str, str]]


def record_program(
    command: Command,
    folder: Path | None,
    options: RecordOptions,
    environment: Mapping[str, str],
    prepare: Prepare,
    on_feed: Callable[[Path, list[Any], dict[str, Any]], None] | None = None,
) -> Recorded:
    """Run `command` to its end and leave a recording of it, whatever happens to the monitor."""
    host = host_facts(settings_from_environment(environment))
    existed = folder is not None and folder.exists()
    path = folders.create(folder, command.label).absolute()
    run_id = uuid.uuid4().hex
    clocks = ClockWatch()
    info = folders.initial_info(without_secrets(command.argv), environment, host, clocks.pair)
    info["run_id"] = run_id
    info["asked"] = dict(options.asked)
    first_error = folders.write_info(path, info)
    channels: list[Any] = []

    def on_start(outcome: Supervision) -> None:
        _take_ready(info, outcome)
        info["begin_ns"] = outcome.begin_ns
        marks.append(path, "experiment_begin", outcome.begin_ns)
        channels.extend(info["channels"])
        folders.write_info(path, info)

    try:
        outcome = supervise(
            command,
            _config(path, options),
            environment,
            prepare(str(path / SPOOL_FOLDER), run_id, environment),
            f"{MARKER_VARIABLE}={run_id}",
            on_start,
            functools.partial(on_feed, path, channels) if on_feed is not None else None,
        )
    except UserError:
        folders.remove(path, keep_folder=existed)
        raise
    if first_error is not None:
        outcome.problems.append(f"the recording could not be written: {first_error}")
    marks.append(path, "experiment_end", outcome.end_ns)
    info["exit_code"] = outcome.returncode if outcome.returncode >= 0 else None
    info["signal"] = -outcome.returncode if outcome.returncode < 0 else None
    info["program_cpu_s"] = outcome.program_cpu_s
    status = "complete" if outcome.returncode == 0 else "failed" if outcome.returncode > 0 else "killed"
    _finish(path, info, outcome, status, clocks)
    return Recorded(path, info, outcome.returncode, outcome.problems)


@contextlib.contextmanager
def record_here(
    folder: Path | None, options: RecordOptions | None = None, label: str = "block"
) -> Iterator[Path]:
    """Record this process and its children while the block runs."""
    options = options or RecordOptions()
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(options.gpus)} if options.gpus else {}
    environment = {**os.environ, **chosen}
    host = host_facts(settings_from_environment(environment))
    path = folders.create(folder, label).absolute()
    clocks = ClockWatch()
    info = folders.initial_info([label], environment, host, clocks.pair)
    info["asked"] = dict(options.asked)
    folders.write_info(path, info)
    outcome = Supervision()
    recorders = Recorders(_config(path, options), environment, outcome)
    _take_ready(info, outcome)
    folders.write_info(path, info)
    recorders.watch(os.getpid(), False, "")
    outcome.begin_ns = info["begin_ns"] = time.time_ns()
    marks.append(path, "experiment_begin", outcome.begin_ns)
    status, pid = "failed", os.getpid()
    try:
        yield path
        status = "complete"
    finally:
        # A forked child that leaves the block ends nothing: the recording is its parent's.
        if os.getpid() == pid:
            outcome.end_ns = time.time_ns()
            recorders.stop()
            marks.append(path, "experiment_end", outcome.end_ns)
            _finish(path, info, outcome, status, clocks)


def _config(path: Path, options: RecordOptions) -> RecorderConfig:
    return RecorderConfig(str(path), 0, options.period_ns, options.pcie, options.live, options.keep_all)


def _take_ready(info: dict[str, Any], outcome: Supervision) -> None:
    if outcome.ready is not None:
        info["channels"] = outcome.ready["channels"]
        info["absent"] = outcome.ready["absent"]
        info["host"].update(outcome.ready["facts"])


def _finish(path: Path, info: dict[str, Any], outcome: Supervision, status: str, clocks: ClockWatch) -> None:
    info["clock"]["step_ns"] = clocks.look().step_ns
    info["clock"]["end"] = {"wall_ns": clocks.pair.wall_ns, "mono_ns": clocks.pair.mono_ns}
    info["status"] = status
    info["begin_ns"], info["end_ns"] = outcome.begin_ns, outcome.end_ns
    info["monitor"] = outcome.figures
    info["problems"] = outcome.problems
    if not path.exists():
        outcome.problems[:] = [f"the recording was lost: {path} was deleted during the run"]
        return
    outcome.problems.extend(
        f"readings were lost: {figures['write_error']}"
        for figures in outcome.figures
        if figures["write_error"]
    )
    outcome.problems.extend(problem for figures in outcome.figures for problem in figures["problems"])
    # A file that is gone, or is another, is noticed by its rows.
    info["rows"] = {name: rows for figures in outcome.figures for name, rows in figures["rows"].items()}
    for t_ns in outcome.deaths_ns:
        marks.append(path, "monitor_died", t_ns)
    try:
        thinned = read_thinned(path)
        table = marks.read_spool(path, None if thinned is None else thinned.state.spool)
        info["libraries"] = marks.libraries(table)
        error = marks.fold_spool(path, table)
        if error is None:
            info["rows"]["marks.arrows"] = table.num_rows
    except Exception as unexpected:
        # Nothing a program marks may keep its own exit code from the caller.
        error = unexpected
    if error is not None:
        outcome.problems.append(f"the marks stay in the spool: {error}")
    # Another recording's table may have as many rows.
    info["seals"] = last_seals(path, info["rows"])
    log = path / "recorder.log"
    with contextlib.suppress(OSError):
        if not log.stat().st_size:
            log.unlink()
    error = folders.write_info(path, info)
    if error is not None:
        outcome.problems.append(f"run.json could not be finished: {error}")
