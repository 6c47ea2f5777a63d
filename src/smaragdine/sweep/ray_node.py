"""What a node of a Ray cluster does for a sweep: see whether it can, run one repetition, send it back."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from smaragdine.errors import UserError
from smaragdine.sweep.engine_local import jobs_here, lender_for
from smaragdine.sweep.plan import Plan, Task
from smaragdine.sweep.ray_child import call, journal_for, packed
from smaragdine.sweep.repetition import Ran, Stop, perform


@dataclass(frozen=True)
class Gathered:
    """What a node sends back: the recording as an archive, or why there is none."""

    ran: Ran
    archive: bytes = b""
    log: bytes = b""
    said: tuple[str, ...] = ()
    took_s: float = 0.0


def run_on_node(plan: Plan, task: Task, warm: bool) -> Gathered:
    """Called by Ray: one repetition."""
    return call(_run, plan, task, warm)


def why_not(plan: Plan, tasks: Sequence[Task]) -> str:
    """Called by Ray: why these could not run here; empty when they can."""
    return call(_why_not, plan, tasks)


def _run(plan: Plan, task: Task, warm: bool) -> Gathered:
    """One repetition, in a folder that goes back as an archive."""
    said: list[str] = []
    begin_s = time.monotonic()
    try:
        jobs = jobs_here(plan, [task], os.environ)
        job = replace(jobs[task.name], warm_up=0) if warm else jobs[task.name]
        with (
            tempfile.TemporaryDirectory(prefix="smaragdine-") as folder,
            lender_for([job], said.append, journal_for(job.devices)) as lends,
        ):
            recording, log = Path(folder) / task.name, Path(folder) / "log"
            ran = perform(job, lends, recording, log, Stop(), said.append)
            archive = b"" if ran.error else packed(recording)
            text = log.read_bytes() if log.exists() else b""
    except UserError as error:
        return Gathered(Ran(error=str(error)))
    return Gathered(ran, archive, text, tuple(said), time.monotonic() - begin_s)


def _why_not(plan: Plan, tasks: Sequence[Task]) -> str:
    try:
        jobs = jobs_here(plan, tasks, os.environ)
        devices = next((job.devices for job in jobs.values()), [])
        with lender_for(jobs.values(), lambda line: None, journal_for(devices)):
            return ""
    except UserError as error:
        return str(error)
