"""Where all readings come from: one sampling loop for all sessions, and their process trees.

The loop runs at the pace of the finest session, and once a second when there is none. Notes say what happens
to the measurement itself: a sensor is lost or back, somebody set the wall clock, the machine was suspended.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from smaragdine.clock import SYSTEM, Clock
from smaragdine.daemon.log import Batch, ChannelNumbers, Times, Values
from smaragdine.daemon.recovery import (
    OpenFile,
    Returning,
    gpu_uuids,
    mend,
    open_read_only,
    running_pids,
    ways_back,
    ways_to_miss,
)
from smaragdine.files import write_whole
from smaragdine.monitor.sampler import ClockWatch, Note, Sampler, boot_ns
from smaragdine.sensors.base import Channel, Sensor
from smaragdine.sensors.discover import ESTIMATE_SHARE_PERIOD_NS, Machine, SensorSettings
from smaragdine.sensors.processes import (
    SCAN_EVERY_NS,
    SCAN_SHARE,
    SOCKET_SCAN_SHARE,
    ProcessTree,
    find_parents,
    fresh_pids,
    newest_pid,
    process_clock,
)
from smaragdine.sensors.rapl import PARTS_PERIOD_NS

# Channel numbers. A channel keeps its number over restarts, and no other channel ever gets it.

_FILE = "channels.json"


def machine_numbers(channels: Sequence[Channel], folder: Path | None, next_number: int) -> list[int]:
    """A number for each channel of the machine: the one it had before, else a new one from `next_number` on.

    So numbers in a spool, or in a reader's hands, stay right when a restarted daemon finds other sensors.
    """
    known = _load(folder)
    seen: Counter[str] = Counter()
    numbers: list[int] = []
    next_number = max([next_number, *(number + 1 for number in known.values())])
    for channel in channels:
        # Details are worded anew at each start. Channels of one name (dies of a package) come in order.
        name = f"{channel.sensor} {channel.name}"
        key = f"{name} {seen[name]}"
        seen[name] += 1
        if key not in known:
            known[key] = next_number
            next_number += 1
        numbers.append(known[key])
    _save(folder, known)
    return numbers


def _load(folder: Path | None) -> dict[str, int]:
    if folder is None:
        return {}
    try:
        values = json.loads((folder / _FILE).read_text())
        return {str(key): int(number) for key, number in values.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _save(folder: Path | None, known: dict[str, int]) -> None:
    if folder is None:
        return
    # Where this cannot be written, nothing can be spooled either, and a restart begins anew.
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(folder / _FILE, json.dumps(known))


# The process trees of all sessions. One look finds new processes for all of them.

# The part of a core for reading all trees. Users share it equally, and a user's sessions that user's part.
_READ_SHARE = 0.1


@dataclass(slots=True)
class _Member:
    """A session's tree; for each socket its channel number and its total at the start; and when it is due."""

    tree: ProcessTree
    numbers: Mapping[int, int]
    start_s: Mapping[int, float]
    every_ns: int
    owner: int
    share: float = _READ_SHARE  # of a core
    next_ns: int = 0


class Trees:
    """A sensor that keeps what it reads until `drain`, because sessions come and go, and their channels with
    them.

    The sampler's thread reads; any other thread may call the rest.
    """

    lane = "counters"

    def __init__(
        self, socket_of_cpu: Mapping[int, int], clock: Clock = SYSTEM, proc: Path = Path("/proc")
    ) -> None:
        self.period_ns = 1_000_000_000
        self._socket_of_cpu = socket_of_cpu
        self._clock = clock
        self._proc = proc
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._inside: dict[str, str] = {}
        self._t_ns, self._number, self._value = array("q"), array("I"), array("d")
        self._loadavg_fd = os.open(proc / "loadavg", os.O_RDONLY | os.O_CLOEXEC)
        self._last_pid = newest_pid(self._loadavg_fd)
        self._next_scan_ns = 0

    def channels(self) -> Sequence[Channel]:
        return ()

    def add(
        self,
        session_id: str,
        pid: int,
        include_past: bool,
        every_ns: int,
        numbers: Mapping[int, int],
        start_s: Mapping[int, float],
        owner: int = 0,
    ) -> None:
        """Follow a process from now on. Raises ProcessLookupError where there is none of that number."""
        try:
            time.clock_gettime_ns(process_clock(pid))
        except (OSError, OverflowError):
            raise ProcessLookupError(f"there is no process {pid}") from None
        tree = ProcessTree(pid, self._socket_of_cpu, b"", include_past, self._proc, self._clock, shared=True)
        try:
            with self._lock:
                # Look again: what started while the tree looked around is in nobody's next look.
                tree.catch_up()
                self._nest(session_id, tree)
                self._members[session_id] = _Member(tree, numbers, start_s, every_ns, owner)
                self._share_out()
        except BaseException:
            tree.close()
            raise

    def remove(self, session_id: str) -> None:
        """Stop following. The last readings are in the next `drain`."""
        with self._lock:
            member = self._members.pop(session_id)
            member.tree.update()
            self._note(member)
            member.tree.close()
            outer = self._inside.pop(session_id, None)
            for inner, parent in list(self._inside.items()):
                if parent == session_id and outer is not None:
                    self._inside[inner] = outer
                elif parent == session_id:
                    del self._inside[inner]
            self._share_out()

    def inside(self) -> dict[str, str]:
        """Sessions whose first process belongs to another session: session → the innermost one around it."""
        with self._lock:
            return dict(self._inside)

    def sessions_of(self, pids: frozenset[int]) -> frozenset[str]:
        """The innermost session of each of these processes; "" for those that are in none."""
        with self._lock:
            found: set[str] = set()
            for pid in pids:
                members = {key for key, member in self._members.items() if pid in member.tree}
                found |= members - {self._inside[key] for key in members if key in self._inside} or {""}
            return frozenset(found)

    def drain(self) -> tuple[array[int], array[int], array[float]]:
        """Times, channel numbers and CPU-seconds since the last call."""
        with self._lock:
            columns = self._t_ns, self._number, self._value
            self._t_ns, self._number, self._value = array("q"), array("I"), array("d")
            return columns

    def read(self) -> Sequence[tuple[int, int, float]]:
        now_ns = self._clock.mono_ns()
        # A tree that is due within a hair must not wait for a whole period more.
        due_ns = now_ns + self.period_ns // 2
        with self._lock:
            if now_ns >= self._next_scan_ns and self._members:
                self._look(now_ns)
            for member in self._members.values():
                if member.next_ns > due_ns:
                    continue
                before_ns = time.thread_time_ns()
                member.tree.update()
                self._note(member)
                # Read thousands of processes less often. What their sessions cost is their user's own affair.
                cost_ns = time.thread_time_ns() - before_ns
                member.next_ns = now_ns + max(member.every_ns, int(cost_ns / member.share))
        return ()

    def close(self) -> Sequence[tuple[int, int, float]]:
        with self._lock:
            for member in self._members.values():
                member.tree.update()
                self._note(member)
                member.tree.close()
            self._members.clear()
            os.close(self._loadavg_fd)
        return ()

    def _note(self, member: _Member) -> None:
        t_ns, cpu_s = self._clock.wall_ns(), member.tree.cpu_s
        for socket, number in member.numbers.items():
            self._t_ns.append(t_ns)
            self._number.append(number)
            self._value.append(member.start_s[socket] + cpu_s[socket])

    def _look(self, now_ns: int) -> None:
        before_ns = time.thread_time_ns()
        newest = newest_pid(self._loadavg_fd)
        if newest != self._last_pid:
            candidates = fresh_pids(self._proc, self._last_pid, newest)
            self._last_pid = newest
            known = frozenset[int]().union(*(member.tree.pids for member in self._members.values()))
            parents = find_parents(self._proc, candidates, known)
            for member in self._members.values():
                member.tree.take(parents)
        cost_ns = time.thread_time_ns() - before_ns
        self._next_scan_ns = now_ns + max(SCAN_EVERY_NS, int(cost_ns / SCAN_SHARE))

    def _nest(self, session_id: str, tree: ProcessTree) -> None:
        """Find where the new session lies. Of two on the same process, the later is the inner one."""
        around = {key for key, member in self._members.items() if tree.root_pid in member.tree}
        within = {key for key, member in self._members.items() if member.tree.root_pid in tree} - around
        innermost = around - {self._inside[key] for key in around if key in self._inside}
        outer = min(innermost, default=None)
        if outer is not None:
            self._inside[session_id] = outer
        for key in within:
            if self._inside.get(key) is None or self._inside[key] in around:
                self._inside[key] = session_id

    def _share_out(self) -> None:
        sessions = Counter(member.owner for member in self._members.values())
        for member in self._members.values():
            member.share = _READ_SHARE / (len(sessions) * sessions[member.owner])
            member.tree.socket_scan_share = SOCKET_SCAN_SHARE / max(1, len(self._members) // 4)


IDLE_PERIOD_NS = 1_000_000_000
FINEST_PERIOD_NS = 1_000_000
_MEND_EVERY_S = 1.0

GpuPids = Callable[[], Mapping[str, frozenset[int]]]


class Source:
    """All readings and notes. Any thread may call; one of them drains, about every 100 ms.

    `channels` are the machine's, by number. CPU time of a program belongs to its session (`add`).
    """

    def __init__(
        self,
        machine: Machine,
        settings: SensorSettings,
        clock: Clock = SYSTEM,
        *,
        folder: Path | None = None,
        next_channel: int = 0,
        open_file: OpenFile = open_read_only,
        boot_ns: Callable[[], int] = boot_ns,
        gpu_pids: GpuPids | None = None,
    ) -> None:
        """`folder` keeps the machine's channel numbers; `next_channel` is the log's."""
        self._clock = clock
        self._lock = threading.Lock()
        self._notes: list[Note] = []
        self._periods_ns: dict[str, int] = {}
        uuids = gpu_uuids(machine.facts)
        self._gpu_pids = gpu_pids or (lambda: running_pids(uuids))
        self._gpu_sessions: dict[str, frozenset[str]] = {}
        if machine.activity is not None:
            machine.activity.leave_out_program()
        channels = machine.channels()
        numbers = machine_numbers(channels, folder, next_channel)
        self.channels: Mapping[int, Channel] = dict(zip(numbers, channels, strict=True))
        self._next_channel = max([next_channel, *(number + 1 for number in numbers)])
        self._numbers = np.array(numbers, dtype=np.uint32)
        self._reopen = ways_back(settings, machine.facts, clock, open_file)
        self._gone = ways_to_miss(settings)
        self._activity = machine.activity
        socket_of_cpu = machine.activity.socket_of_cpu if machine.activity is not None else {}
        self._trees = Trees(socket_of_cpu, clock)
        self._sockets = sorted(set(socket_of_cpu.values())) or [0]
        self._returning: list[Returning] = []
        sensors = self._wrap(machine.sensors, numbers)
        self._own_periods_ns = {id(sensor): sensor.period_ns for sensor in sensors}
        self._estimates_only = not any(channel.sensor in ("rapl", "perf") for channel in channels)
        self._sensors: list[Sensor] = [*sensors, self._trees]
        self.sampler = Sampler(self._sensors, clock)  # public for figures about the sampling itself
        self.sampler.retime(self._periods())
        self._clocks = ClockWatch(clock, boot_ns)
        self._halt = threading.Event()
        self._mender = threading.Thread(target=self._keep_mending, name="mend sensors", daemon=True)

    def start(self) -> None:
        self.sampler.start()
        self._mender.start()

    def stop(self, timeout_s: float = 0.5) -> None:
        """End the lanes. The last readings are in the next `drain`."""
        self._halt.set()
        self.sampler.stop(timeout_s)

    def add(
        self,
        session_id: str,
        pid: int,
        include_past: bool,
        period_ns: int,
        owner: int = 0,
        *,
        channels: Sequence[int] = (),
        start_s: Sequence[float] = (),
    ) -> dict[int, Channel]:
        """Follow a process and all that it starts. Returns its `program` channels by number, one per socket.

        A session from before a restart brings its channel numbers and the last totals in them. Raises
        ProcessLookupError where there is no such process.
        """
        with self._lock:
            if len(channels) != len(self._sockets):
                channels = [self._next_channel + i for i in range(len(self._sockets))]
            self._next_channel = max([self._next_channel, *(number + 1 for number in channels)])
        period_ns = _in_bounds(period_ns)
        numbers = dict(zip(self._sockets, channels, strict=True))
        starts = dict(zip(self._sockets, start_s, strict=False))
        every_ns = self._share_period_ns(period_ns)
        self._trees.add(
            session_id,
            pid,
            include_past,
            every_ns,
            numbers,
            {socket: starts.get(socket, 0.0) for socket in self._sockets},
            owner,
        )
        with self._lock:
            self._periods_ns[session_id] = period_ns
            self.sampler.retime(self._periods())
        return {
            number: Channel(
                device=f"cpu:{socket}",
                quantity="program",
                unit="s",
                kind="counter",
                provenance="measured",
                period_ms=every_ns / 1e6,
                sensor="activity",
                detail="process CPU clocks of the session's processes",
            )
            for socket, number in numbers.items()
        }

    def remove(self, session_id: str) -> None:
        """Stop following a session. Its last readings are in the next `drain`."""
        self._trees.remove(session_id)
        with self._lock:
            self._periods_ns.pop(session_id, None)
            self.sampler.retime(self._periods())

    @property
    def period_ns(self) -> int:
        """The period that the finest session asks for."""
        return min(self._periods_ns.values(), default=IDLE_PERIOD_NS)

    def inside(self) -> dict[str, str]:
        """Sessions that lie in another one: session → the innermost one around it."""
        return self._trees.inside()

    def gpu_sessions(self) -> dict[str, frozenset[str]]:
        """Which sessions compute on each GPU, looked up once a second, without GPUs that do not tell.

        Each process counts for its innermost session. An empty name stands for all processes of no session.
        """
        return dict(self._gpu_sessions)

    @property
    def cpus(self) -> dict[int, int]:
        """Logical CPUs of each socket."""
        return dict(self._activity.cpu_count) if self._activity is not None else {}

    def drain(self) -> Batch | None:
        """All readings and notes since the last call; None when there are none."""
        t_ns: list[Times] = []
        channel: list[ChannelNumbers] = []
        value: list[Values] = []
        for first, readings in self.sampler.drain():
            times, places, values = zip(*readings, strict=True)
            t_ns.append(np.array(times, dtype=np.int64))
            channel.append(self._numbers[np.array(places, dtype=np.int64) + first])
            value.append(np.array(values, dtype=np.float64))
        program_t_ns, program_number, program_s = self._trees.drain()
        t_ns.append(np.array(program_t_ns, dtype=np.int64))
        channel.append(np.array(program_number, dtype=np.uint32))
        value.append(np.array(program_s, dtype=np.float64))
        for name, detail in self._clocks.look().words().items():
            self._tell(name, detail, ())
        count = len(self._notes)  # other threads append to them
        notes = (*map(self._numbered, self.sampler.notes()), *self._notes[:count])
        del self._notes[:count]
        batch = Batch(0, np.concatenate(t_ns), np.concatenate(channel), np.concatenate(value), notes)
        return batch if batch.t_ns.size or notes else None

    def mend(self) -> None:
        """Once a second: look for lost sensors, and for who computes on which GPU."""
        mend(self._returning, self._reopen, self._gone)
        if self._periods_ns:
            pids = self._gpu_pids()
            self._gpu_sessions = {device: self._trees.sessions_of(each) for device, each in pids.items()}

    def _keep_mending(self) -> None:
        while not self._halt.wait(_MEND_EVERY_S):
            try:
                self.mend()
            except Exception as error:  # one that cannot be mended must not keep the rest from it
                self._tell("sensor_error", f"{type(error).__name__}: {error}", ())

    def _wrap(self, sensors: Sequence[Sensor], numbers: Sequence[int]) -> list[Sensor]:
        wrapped: list[Sensor] = []
        first = 0
        for sensor in sensors:
            channels = sensor.channels()
            if channels and all(channel.sensor in self._reopen for channel in channels):
                sensor = Returning(sensor, numbers[first : first + len(channels)], self._tell)
                self._returning.append(sensor)
            wrapped.append(sensor)
            first += len(channels)
        return wrapped

    def _numbered(self, note: Note) -> Note:
        """The sampler's note, with our numbers for its channels."""
        return replace(note, channels=tuple(int(self._numbers[place]) for place in note.channels))

    def _tell(self, name: str, detail: str, channels: tuple[int, ...]) -> None:
        self._notes.append(Note(self._clock.wall_ns(), name, detail, channels))

    def _periods(self) -> list[tuple[Sensor, int]]:
        return [(sensor, self._period_of(sensor)) for sensor in self._sensors]

    def _period_of(self, sensor: Sensor) -> int:
        """The period of a sensor. Counters follow the sessions; those with a rhythm of their own (NVML,
        hwmon, plug-ins) keep it."""
        if sensor is self._trees or sensor is self._activity:
            return self._share_period_ns(self.period_ns)
        channels = sensor.channels()
        if channels[0].sensor in ("rapl", "perf"):
            part = all(channel.scope == "part" for channel in channels)
            return max(self.period_ns, PARTS_PERIOD_NS) if part else self.period_ns
        own_ns = self._own_periods_ns[id(sensor)]
        return max(self.period_ns, own_ns) if channels[0].sensor == "estimate" else own_ns

    def _share_period_ns(self, period_ns: int) -> int:
        # As `discover` does for one program.
        finest_ns = ESTIMATE_SHARE_PERIOD_NS if self._estimates_only else 0
        return min(max(2 * period_ns, finest_ns), IDLE_PERIOD_NS)


def _in_bounds(period_ns: int) -> int:
    return min(max(period_ns, FINEST_PERIOD_NS), IDLE_PERIOD_NS)
