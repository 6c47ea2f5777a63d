"""Where all readings come from: one sampling loop for all sessions, and their process trees.

The loop runs at the pace of the finest session, and once a second when there is none. What happens to the
measurement itself (a sensor lost or back, the wall clock set, the machine suspended) comes as notes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from smaragdine.clock import SYSTEM, Clock
from smaragdine.monitor.clock_watch import ClockWatch, boot_ns
from smaragdine.monitor.daemon.batch import Batch, ChannelNumbers, Times, Values
from smaragdine.monitor.daemon.numbers import machine_numbers
from smaragdine.monitor.daemon.reopen import (
    OpenFile,
    gpu_uuids,
    open_read_only,
    running_pids,
    ways_back,
    ways_to_miss,
)
from smaragdine.monitor.daemon.returning import Returning, mend
from smaragdine.monitor.daemon.trees import Trees
from smaragdine.monitor.sampler import Note, Sampler
from smaragdine.sensors.base import Channel, Sensor
from smaragdine.sensors.discover import ESTIMATE_SHARE_PERIOD_NS, Machine, SensorSettings
from smaragdine.sensors.rapl import PARTS_PERIOD_NS

IDLE_PERIOD_NS = 1_000_000_000
FINEST_PERIOD_NS = 1_000_000
_MEND_EVERY_S = 1.0

GpuPids = Callable[[], Mapping[str, frozenset[int]]]


class Source:
    """Any thread may call; one drains, about every 100 ms.

    `channels` are the machine's, by number. CPU time of a program is a session's own (`add`).
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
        self._sampler = Sampler(self._sensors, clock)
        self._sampler.retime(self._periods())
        self._clocks = ClockWatch(clock, boot_ns)
        self._halt = threading.Event()
        self._mender = threading.Thread(target=self._keep_mending, name="mend sensors", daemon=True)

    def start(self) -> None:
        self._sampler.start()
        self._mender.start()

    def stop(self, timeout_s: float = 0.5) -> None:
        """End the lanes; the last readings are in the next `drain`."""
        self._halt.set()
        self._sampler.stop(timeout_s)

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
        """Follow a process and all it starts; its `program` channels, one per socket, by number.

        A session from before a restart brings its channel numbers and the last totals in them. Raises
        ProcessLookupError when there is no such process.
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
            self._sampler.retime(self._periods())
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
        """Its last readings are in the next `drain`."""
        self._trees.remove(session_id)
        with self._lock:
            self._periods_ns.pop(session_id, None)
            self._sampler.retime(self._periods())

    @property
    def period_ns(self) -> int:
        """What the finest session wants."""
        return min(self._periods_ns.values(), default=IDLE_PERIOD_NS)

    def inside(self) -> dict[str, str]:
        """Sessions that lie in another one: session → the innermost one around it."""
        return self._trees.inside()

    def gpu_sessions(self) -> dict[str, frozenset[str]]:
        """Which sessions compute on each GPU, looked up once a second.

        Each process counts for its innermost session; an empty name stands for all processes of none.
        A GPU that does not tell is left out.
        """
        return dict(self._gpu_sessions)

    @property
    def cpus(self) -> dict[int, int]:
        """Logical CPUs of each socket."""
        return dict(self._activity.cpu_count) if self._activity is not None else {}

    def every_lane_has_read(self) -> bool:
        return self._sampler.every_lane_has_read()

    @property
    def sampler(self) -> Sampler:
        """For figures about the sampling itself."""
        return self._sampler

    def drain(self) -> Batch | None:
        """All readings and notes since the last call; None when there are none."""
        t_ns: list[Times] = []
        channel: list[ChannelNumbers] = []
        value: list[Values] = []
        for first, readings in self._sampler.drain():
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
        count = len(self._notes)  # other threads add to them
        notes = (*map(self._numbered, self._sampler.notes()), *self._notes[:count])
        del self._notes[:count]
        batch = Batch(0, np.concatenate(t_ns), np.concatenate(channel), np.concatenate(value), notes)
        return batch if batch.t_ns.size or notes else None

    def mend(self) -> None:
        """What is done once a second: look for lost sensors, and for who computes on which GPU."""
        mend(self._returning, self._reopen, self._gone)
        if self._periods_ns:
            pids = self._gpu_pids()
            self._gpu_sessions = {device: self._trees.sessions_of(each) for device, each in pids.items()}

    def _keep_mending(self) -> None:
        while not self._halt.wait(_MEND_EVERY_S):
            try:
                self.mend()
            except Exception as error:  # what cannot be mended must not end the mending of the rest
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
        """The sampler's note, its channels by their numbers here."""
        return replace(note, channels=tuple(int(self._numbers[place]) for place in note.channels))

    def _tell(self, name: str, detail: str, channels: tuple[int, ...]) -> None:
        self._notes.append(Note(self._clock.wall_ns(), name, detail, channels))

    def _periods(self) -> list[tuple[Sensor, int]]:
        return [(sensor, self._period_of(sensor)) for sensor in self._sensors]

    def _period_of(self, sensor: Sensor) -> int:
        """Counters follow the sessions; whoever has a rhythm of its own (NVML, hwmon, plug-ins) keeps it."""
        if sensor is self._trees or sensor is self._activity:
            return self._share_period_ns(self.period_ns)
        channels = sensor.channels()
        if channels[0].sensor in ("rapl", "perf"):
            part = all(channel.scope == "part" for channel in channels)
            return max(self.period_ns, PARTS_PERIOD_NS) if part else self.period_ns
        own_ns = self._own_periods_ns[id(sensor)]
        return max(self.period_ns, own_ns) if channels[0].sensor == "estimate" else own_ns

    def _share_period_ns(self, period_ns: int) -> int:
        # As `discover` sets it for one program.
        finest_ns = ESTIMATE_SHARE_PERIOD_NS if self._estimates_only else 0
        return min(max(2 * period_ns, finest_ns), IDLE_PERIOD_NS)


def _in_bounds(period_ns: int) -> int:
    return min(max(period_ns, FINEST_PERIOD_NS), IDLE_PERIOD_NS)
