"""The Ray engine: runs the same plan on a cluster, one repetition at a time on every device.

Smaragdine must be installed on every node, with the benchmarks' folders under the same path. The type of
their GPUs tells nodes apart. If a node dies, its repetition runs again elsewhere.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smaragdine.errors import UserError
from smaragdine.jobs import ray as cluster
from smaragdine.jobs.job import RunResult, Stop, perform
from smaragdine.sweep.local import SweepWatcher, jobs_here, lender_for, trouble_words
from smaragdine.sweep.plan import Plan, Task
from smaragdine.sweep.sweep import Queue

# What a node does for a sweep: checks whether it can run it, runs one repetition, and sends it back.


@dataclass(frozen=True)
class Gathered:
    """What a node sends back: the recording as an archive, or why there is none."""

    ran: RunResult
    archive: bytes = b""
    log: bytes = b""
    said: tuple[str, ...] = ()
    took_s: float = 0.0


def run_on_node(plan: Plan, task: Task, warm: bool) -> Gathered:
    """Called by Ray: runs one repetition."""
    return cluster.call(_run, plan, task, warm)


def why_not(plan: Plan, tasks: Sequence[Task]) -> str:
    """Called by Ray: why these tasks could not run here; empty if they can."""
    return cluster.call(_why_not, plan, tasks)


def _run(plan: Plan, task: Task, warm: bool) -> Gathered:
    """Runs one repetition, in a folder that goes back as an archive."""
    said: list[str] = []
    begin_s = time.monotonic()
    try:
        jobs = jobs_here(plan, [task], os.environ)
        job = replace(jobs[task.name], warm_up=0) if warm else jobs[task.name]
        with (
            tempfile.TemporaryDirectory(prefix="smaragdine-") as folder,
            lender_for([job], said.append, cluster.journal_for(job.devices)) as lends,
        ):
            recording, log = Path(folder) / task.name, Path(folder) / "log"
            ran = perform(job, lends, recording, log, Stop(), said.append)
            archive = b"" if ran.error else cluster.packed(recording)
            text = log.read_bytes() if log.exists() else b""
    except UserError as error:
        return Gathered(RunResult(error=str(error)))
    return Gathered(ran, archive, text, tuple(said), time.monotonic() - begin_s)


def _why_not(plan: Plan, tasks: Sequence[Task]) -> str:
    try:
        jobs = jobs_here(plan, tasks, os.environ)
        devices = next((job.devices for job in jobs.values()), [])
        with lender_for(jobs.values(), lambda line: None, cluster.journal_for(devices)):
            return ""
    except UserError as error:
        return str(error)


# A node that has not answered for so long is busy with something else; Ray starts ours afterwards.
_SAY_AFTER_S = 20.0


def run_ray(queue: Queue, watch: SweepWatcher, stop: Stop, address: str | None = None) -> None:
    """Runs what is left on a cluster, until it is done or `stop`."""
    ray = cluster.load_ray()
    plan = queue.sweep.plan
    with cluster.connected(ray, address):
        stop.take_over()
        everywhere = cluster.slots_of(ray.nodes())
        slots = _fitting(everywhere, queue.left())
        _check_types(plan, everywhere, slots)
        check_nodes(ray, plan, queue.left(), slots, watch, stop)
        if stop:
            return
        watch.ready()
        if any(each.baseline_s for each in plan.experiments):
            watch.say("idle power is measured by the local engine alone: baseline left out")
        watch.say(f"{len(slots)} devices on {len({slot.node_id for slot in slots})} nodes")
        _Cluster(ray, queue, watch, stop).run()


class _Cluster:
    """Hands tasks to devices as they become free."""

    def __init__(self, ray: Any, queue: Queue, watch: SweepWatcher, stop: Stop) -> None:
        self._ray, self._queue, self._watch, self._stop = ray, queue, watch, stop
        self._running: dict[Any, tuple[cluster.RaySlot, Task]] = {}
        self._warmed: set[tuple[str, str, str]] = set()
        self._losses = cluster.Losses()

    def run(self) -> None:
        try:
            while not self._stop and self._queue.left():
                self._hand_out()
                ready, _ = (
                    self._ray.wait(list(self._running), timeout=cluster.LOOK_S) if self._running else ([], [])
                )
                for ref in ready:
                    self._take(ref)
                if not self._running:
                    self._wait_for_nodes()
        finally:
            cluster.cancel(self._ray, self._running)

    def _slots(self) -> list[cluster.RaySlot]:
        return _fitting(cluster.slots_of(self._ray.nodes()), self._queue.left())

    def _hand_out(self) -> None:
        busy = {slot for slot, _ in self._running.values()}
        slots = self._slots()
        for slot in slots:
            if slot in busy or (task := self._queue.next(slot.gpu_type)) is None:
                continue
            progress = self._queue.sweep.progress(self._queue.left(), len(slots))
            self._watch.begin(task, slot.node, progress)
            warm = (slot.node_id, task.experiment, task.benchmark) in self._warmed
            ref = cluster.submit(self._ray, slot, run_on_node, self._queue.sweep.plan, task, warm)
            self._running[ref] = slot, task

    def _take(self, ref: Any) -> None:
        slot, task = self._running.pop(ref)
        try:
            found: Gathered = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            raise UserError(f"{task.name} cannot run on {slot.node}", str(error.cause)) from None
        except self._ray.exceptions.RayError as error:
            self._losses.add(task.name, error)
            self._queue.again(task)
            self._watch.say(f"{task.name} was lost with {slot.node}: it runs again")
            return
        for line in found.said:
            self._watch.say(f"{slot.node}: {line}")
        if found.ran.error:
            raise UserError(f"{task.name} cannot run on {slot.node}", found.ran.error)
        self._warmed.add((slot.node_id, task.experiment, task.benchmark))
        sweep = self._queue.sweep
        place = sweep.place(task)
        sweep.log(task).write_bytes(found.log)
        cluster.unpack(found.archive, place)
        row = self._queue.ended(task, place, slot.node, found.took_s, found.ran.timed_out)
        if trouble := trouble_words(row, found.ran, sweep.log(task)):
            self._watch.say(f"{task.name}: {trouble}")
        if row is not None:
            self._watch.end(task, row, sweep.progress(self._queue.left(), len(self._slots())))

    def _wait_for_nodes(self) -> None:
        there = bool(self._slots())
        if self._losses.too_long("the rest", there):
            raise UserError("no node is left that could run the rest", remedy="Go on with --resume")
        if not there:
            time.sleep(cluster.LOOK_S)


def check_nodes(
    ray: Any,
    plan: Plan,
    tasks: Sequence[Task],
    slots: Sequence[cluster.RaySlot],
    watch: SweepWatcher,
    stop: Stop,
) -> None:
    """Checks first that every device can take every setting it may get. Ends early at `stop`."""
    asked: dict[Any, cluster.RaySlot] = {}
    for slot in slots:
        own = [task for task in tasks if task.setting.gpu_type in (None, slot.gpu_type)]
        asked[cluster.submit(ray, slot, why_not, plan, own)] = slot
    said_at_s = time.monotonic() + _SAY_AFTER_S
    try:
        while asked and not stop:
            ready, _ = ray.wait(list(asked), timeout=cluster.LOOK_S)
            for ref in ready:
                _check_answer(ray, ref, asked.pop(ref))
            if asked and time.monotonic() >= said_at_s:
                said_at_s = math.inf
                nodes = ", ".join(sorted({slot.node for slot in asked.values()}))
                watch.say(f"waiting for {nodes}: busy with something else; see ray status")
    finally:
        cluster.cancel(ray, asked)


def _check_answer(ray: Any, ref: Any, slot: cluster.RaySlot) -> None:
    try:
        why = ray.get(ref)
    except ray.exceptions.RayError as error:
        raise UserError(f"{slot.node} cannot run the sweep", str(error).splitlines()[0]) from None
    if why:
        raise UserError(f"{slot.node} cannot run the sweep", why)


def _check_types(plan: Plan, everywhere: Sequence[cluster.RaySlot], slots: Sequence[cluster.RaySlot]) -> None:
    there = sorted({slot.gpu_type for slot in everywhere if slot.gpu_type})
    for experiment in plan.experiments:
        missing = [kind for kind in experiment.gpu_types if kind not in there]
        if missing:
            raise cluster.no_such_type(missing[0], everywhere)
        if not experiment.gpu_types and len({slot.gpu_type for slot in slots}) > 1:
            why = f"its nodes differ ({', '.join(there)}), and so would repetitions of one setting"
            raise UserError("which GPUs?", why, "Name types: --gpu-type, or gpu_types in the file")
    if not slots:
        raise UserError("the cluster has no node that could run the sweep", remedy="See ray status")


def _fitting(slots: Sequence[cluster.RaySlot], tasks: Sequence[Task]) -> list[cluster.RaySlot]:
    """Nodes without a GPU run nothing if others have one, or if limits are to be set."""
    needs_gpu = any(task.setting.limit_kind != "parameter" for task in tasks)
    kinds = {task.setting.gpu_type for task in tasks}
    found = [slot for slot in slots if None in kinds or slot.gpu_type in kinds]
    return [slot for slot in found if slot.gpu or not (needs_gpu or any(each.gpu for each in found))]
