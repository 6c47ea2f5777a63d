"""The daemon's heart: one source of readings, one log, one meter, and the sessions that look at them.

Everything here runs on the thread of the event loop. Only the source has threads of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from smaragdine.daemon.callers import Caller
from smaragdine.daemon.log import Batch, Log
from smaragdine.daemon.metrics import slurm_job_id
from smaragdine.daemon.running_energy import DeviceUse, RunningEnergy
from smaragdine.daemon.sessions import (
    PROCESS_ENDED,
    STOPPED,
    Refused,
    Session,
    SessionTable,
    StateFile,
    check_request,
    open_target,
)
from smaragdine.daemon.settings import Settings
from smaragdine.daemon.source import Source
from smaragdine.daemon.views import CoarseGrid, View, is_restricted, select, view_of
from smaragdine.monitor.sampler import Note
from smaragdine.sensors.base import Absent, Channel
from smaragdine.system import out_of_files

_LATEST_NOTES = 20
_KEEP_HOUSE_EVERY_S = 1.0


@dataclass(frozen=True)
class Knowledge:
    """What we found out about the machine when we opened the sensors."""

    absent: tuple[Absent, ...]
    facts: Mapping[str, object]


class Daemon:
    def __init__(
        self,
        settings: Settings,
        knowledge: Knowledge,
        source: Source,
        log: Log,
        table: SessionTable,
        meter: RunningEnergy,
        say: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.knowledge = knowledge
        self.source = source
        self.log = log
        self.table = table
        self.meter = meter
        self.say = say
        self.begin_ns = time.time_ns()
        self.notes: deque[Note] = deque(maxlen=_LATEST_NOTES)
        self.stopping = False
        self.dropped_batches = 0
        self.readers = 0
        self.lost: set[int] = set()  # channels without readings
        self.every_second: list[Callable[[], None]] = []
        self._grid = CoarseGrid(n for n, channel in source.channels.items() if is_restricted(channel))
        self._meter_file = StateFile(settings.state, "meter.json", say)
        self._pump: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Take up the sessions from before a restart, and begin to sample."""
        self.table.load()
        if self._meter_file.load(self.meter.load):
            for session in self.table.live:
                self.meter.add(session.id, session.channels, session.begin_ns)
            self._feed_again()
        else:
            for session in self.table.live:
                self.meter.add(session.id, session.channels)
        if self.log.next_sequence > 1:
            note = Note(self.begin_ns, "daemon_restarted", "what was between is missing")
            self.log.append(_only_note(note))
        for session in self.table.live:
            self._take_up(session)
        self.source.start()
        self._save()
        self._pump = asyncio.get_running_loop().create_task(self._keep_pumping())

    def machine_channels(self, caller: Caller) -> dict[int, Channel]:
        """The channels that a caller may see. Parts of a package are read at other instants than the package.
        Together they would be finer than either, so only root gets them."""
        channels = self.source.channels.items()
        return {n: c for n, c in channels if caller.is_root or not (c.scope == "part" and is_restricted(c))}

    def visible(self, caller: Caller, session: Session) -> dict[int, Channel]:
        return {**self.machine_channels(caller), **session.channels}

    def view(self, caller: Caller, session: Session) -> View:
        grid = None if caller.is_root else self._grid
        return view_of(self.visible(caller, session), session.period_ns, session.begin_ns, grid)

    async def start(
        self, caller: Caller, pid: int, period_ms: float, job: str, include_past: bool
    ) -> Session:
        check_request(period_ms, job)
        period_ns = int((period_ms or self.settings.period_ms) * 1e6)
        pid, pidfd = open_target(caller, pid)
        try:
            session = self.table.reserve(caller, pid, period_ns, job)
        except (Refused, OSError):
            os.close(pidfd)
            raise
        # To look at every process of the machine may take a while, and nothing can interrupt it.
        adding = asyncio.get_running_loop().run_in_executor(
            None, self.source.add, session.id, pid, include_past, period_ns, session.uid
        )
        try:
            channels = await asyncio.shield(adding)
        except asyncio.CancelledError:
            # It counts from now on: else who starts and leaves could have as many as they like.
            adding.add_done_callback(functools.partial(self._take_back, session, pidfd))
            raise
        except BaseException as error:
            self._give_up(session, pidfd)
            if isinstance(error, OSError) and not out_of_files(error):
                raise Refused("NOT_FOUND", f"process {pid} has ended") from None
            raise
        session.channels = channels
        session.slurm_job_id = slurm_job_id(pid)
        session.begin_ns = time.time_ns()
        session.sequence = self.log.next_sequence
        self.meter.add(session.id, channels, session.begin_ns)
        self._watch(session, pidfd)
        self.table.save()
        self.say(f"session {session.id}: process {pid} of {session.user}, every {period_ns / 1e6:g} ms")
        return session

    def stop(self, session: Session, reason: str = STOPPED) -> None:
        """End a session. Its last readings are in the log afterwards."""
        if session.ended:
            return
        if session.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = -1
        self.source.remove(session.id)
        try:
            self.pump()
        except Exception as error:  # a session ends all the same
            self.say(f"a batch was lost: {type(error).__name__}: {error}")
        self._finish(session, reason, time.time_ns())
        self._save()

    def energies(self, session: Session) -> list[DeviceUse]:
        """What each device used since the session began."""
        if session.ended or not session.begin_ns:
            return session.energies
        return self.meter.energies(session.id)

    def exclusive_j(self, session: Session) -> dict[tuple[str, str], float]:
        """What the session alone used, by device and provenance. No process counts for two sessions."""
        return {
            (energy.device, energy.provenance): energy.own_exclusive_j
            for energy in self.energies(session)
            if energy.own_exclusive_j is not None
        }

    def pump(self) -> None:
        """Put what was read since the last time into the log and the meter."""
        batch = self.source.drain()
        if batch is not None:
            self._append(batch)

    def memory_bytes(self) -> int:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def end(self) -> None:
        """Stop sampling, tell the readers, keep what a restart needs."""
        self.stopping = True
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump
        try:
            await asyncio.to_thread(self.source.stop)
            self.pump()
        except Exception as error:  # the rest must end all the same
            self.say(f"the last batch was lost: {type(error).__name__}: {error}")
        for session in self.table.sessions.values():
            session.wake.set()
        self._save()

    async def _keep_pumping(self) -> None:
        every_s = self.settings.drain_s
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        house_s = next_s
        while True:
            next_s = max(next_s + every_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            try:
                self.pump()
                if loop.time() >= house_s:
                    house_s = loop.time() + _KEEP_HOUSE_EVERY_S
                    self._keep_house()
            except Exception as error:  # one bad batch must not end all measuring
                self.say(f"a batch was lost: {type(error).__name__}: {error}")

    def _keep_house(self) -> None:
        self._meter_file.save(self.meter.state())
        if self.table.forget(time.time_ns()):
            self.table.save()
        for work in self.every_second:
            work()

    def _append(self, batch: Batch) -> None:
        batch = self._grid.mark(batch)
        for note in batch.notes:
            if note.t_ns:
                self.notes.append(note)
                self.say(f"{note.name}: {note.detail}")
            if note.name == "sensor_lost":
                self.lost.update(note.channels)
            elif note.name == "sensor_back":
                self.lost.difference_update(note.channels)
        self._measure(batch, self.log.append(batch))

    def _measure(self, batch: Batch, sequence: int) -> None:
        self.meter.update(select(batch, self._grid.coarse(batch)), sequence)

    def _feed_again(self) -> None:
        """Feed the meter what came into the log after it was last saved."""
        sequence = self.meter.sequence + 1
        while (batch := self.log.read(sequence)) is not None:
            self._measure(batch, batch.sequence)
            sequence = batch.sequence + 1
        self.meter.go_on()

    def _save(self) -> None:
        self._meter_file.save(self.meter.state())
        self.table.save()

    def _take_back(self, session: Session, pidfd: int, added: asyncio.Future[dict[int, Channel]]) -> None:
        """Remove a session for which nobody waits any more, once it has been added or that has failed."""
        if not added.cancelled() and added.exception() is None and not self.stopping:
            self.source.remove(session.id)
        self._give_up(session, pidfd)

    def _give_up(self, session: Session, pidfd: int) -> None:
        del self.table.sessions[session.id]
        os.close(pidfd)

    def _watch(self, session: Session, pidfd: int) -> None:
        session.pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self.stop, session, PROCESS_ENDED)

    def _take_up(self, session: Session) -> None:
        """Go on with a session from before a restart, unless its process has ended meanwhile."""
        numbers = sorted(session.channels)
        try:
            if session.pidfd < 0:
                raise ProcessLookupError
            last_s = self.meter.last_values(numbers)
            who = session.id, session.pid, False, session.period_ns, session.uid
            self.source.add(*who, channels=numbers, start_s=last_s)
        except OSError:
            self._finish(session, PROCESS_ENDED, self.begin_ns)
            return
        self._watch(session, session.pidfd)
        self.say(f"session {session.id}: goes on")

    def _finish(self, session: Session, reason: str, end_ns: int) -> None:
        session.energies = self.meter.remove(session.id, end_ns)
        session.end_ns = end_ns
        session.end_sequence = self.log.next_sequence
        session.end_reason = reason
        session.wake.set()
        self.say(f"session {session.id}: {reason}")


def _only_note(note: Note) -> Batch:
    return Batch(0, np.empty(0, np.int64), np.empty(0, np.uint32), np.empty(0, np.float64), (note,))
