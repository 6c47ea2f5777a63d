"""What a node of a Ray cluster does for a sweep: see whether it can, run one repetition, send it back.

    python -m smaragdine.sweep.ray_node      # what to call is on stdin, what it gave on stdout

A Ray worker kills its children when it ends, and would kill the limits' keeper before it has brought anything
back. So all of this is done by one child, which dies with the worker, and whose own children do what they are
there for.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smaragdine.errors import UserError
from smaragdine.monitor.limits.journal import DEFAULT_JOURNAL
from smaragdine.sweep.engine_local import jobs_here, lender_for
from smaragdine.sweep.limits import JOURNAL_VARIABLE
from smaragdine.sweep.plan import Plan, Task
from smaragdine.sweep.repetition import Ran, Stop, perform

_PR_SET_PDEATHSIG = 1


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
    return _in_process("run", plan, task, warm)


def why_not(plan: Plan, tasks: Sequence[Task]) -> str:
    """Called by Ray: why these could not run here; empty when they can."""
    return _in_process("why_not", plan, tasks)


def _in_process(name: str, *arguments: Any) -> Any:
    command = [sys.executable, "-m", "smaragdine.sweep.ray_node"]
    request = pickle.dumps((os.getpid(), name, arguments))
    done = subprocess.run(command, input=request, stdout=subprocess.PIPE, check=True)
    return pickle.loads(done.stdout)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent, name, arguments = pickle.loads(sys.stdin.buffer.read())
    if os.getppid() != parent:
        os._exit(1)
    with open(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        answer.write(pickle.dumps({"run": _run, "why_not": _why_not}[name](*arguments)))
    os._exit(0)


def _run(plan: Plan, task: Task, warm: bool) -> Gathered:
    """One repetition, in a folder that goes back as an archive."""
    said: list[str] = []
    begin_s = time.monotonic()
    try:
        jobs = jobs_here(plan, [task], os.environ)
        job = replace(jobs[task.name], warm_up=0) if warm else jobs[task.name]
        with (
            tempfile.TemporaryDirectory(prefix="smaragdine-") as folder,
            lender_for([job], said.append, _journal(job.devices)) as lends,
        ):
            recording, log = Path(folder) / task.name, Path(folder) / "log"
            ran = perform(job, lends, recording, log, Stop(), said.append)
            archive = b"" if ran.error else _packed(recording)
            text = log.read_bytes() if log.exists() else b""
    except UserError as error:
        return Gathered(Ran(error=str(error)))
    return Gathered(ran, archive, text, tuple(said), time.monotonic() - begin_s)


def _why_not(plan: Plan, tasks: Sequence[Task]) -> str:
    try:
        jobs = jobs_here(plan, tasks, os.environ)
        devices = next((job.devices for job in jobs.values()), [])
        with lender_for(jobs.values(), lambda line: None, _journal(devices)):
            return ""
    except UserError as error:
        return str(error)


def unpack(archive: bytes, folder: Path) -> None:
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as packed:
        packed.extractall(folder, filter="data")


def _journal(devices: Sequence[str]) -> Path:
    """One for each device: several are at work on a node at once."""
    path = Path(os.environ.get(JOURNAL_VARIABLE) or DEFAULT_JOURNAL)
    return path.with_name("-".join([path.name, *(device.replace(":", "") for device in devices)]))


def _packed(folder: Path) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
        archive.add(folder, arcname=".")
    return out.getvalue()


if __name__ == "__main__":
    # By its real name, so that what it sends back can be read by those who know it under that.
    from smaragdine.sweep.ray_node import main as started

    started()
