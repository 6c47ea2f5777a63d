"""The sampling loop: every sensor at its own rate, on absolute deadlines, never drifting.

Sensors of one lane share a thread. The lane of the counters wakes every few milliseconds and must not wait
for an NVML call that takes three, so NVML has lanes of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from smaragdine.clock import STEP_NS, SYSTEM, Clock, ClockPair, pair, step_ns
from smaragdine.sensors.base import Channel, Sensor, SensorLost

# A periodic timer costs one system call a wake-up, half of what it costs to compute and sleep each delay.

_CLOCK_MONOTONIC = 1
_TFD_CLOEXEC = 0o2000000
_TFD_TIMER_ABSTIME = 1


class Alarm:
    """Wakes its thread on a grid of `period_ns`. `wake` wakes it at once, from any thread.

    Raises OSError where the kernel has no timerfd.
    """

    def __init__(self, period_ns: int) -> None:
        self._period_ns = period_ns
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._lock = threading.Lock()
        self._grid_ns: int | None = None
        self._woken = False

    def wait_until(self, due_ns: int) -> None:
        """Block until the monotonic clock shows `due_ns`, or somewhat earlier (missed ticks, `wake`)."""
        with self._lock:
            # This may replace the timer that `wake` has just set, by a later one.
            if self._woken:
                self._woken = False
                return
            if self._grid_ns is None or (due_ns - self._grid_ns) % self._period_ns:
                self._set(due_ns, self._period_ns)
                self._grid_ns = due_ns
        os.read(self._fd, 8)

    def wake(self, period_ns: int | None = None) -> None:
        """End the wait, or else the next one. From then on the grid has the new period."""
        with self._lock:
            if self._fd < 0:
                return
            self._period_ns = period_ns or self._period_ns
            self._woken = True
            self._set(1, 0)
            self._grid_ns = None

    def _set(self, due_ns: int, period_ns: int) -> None:
        spec = struct.pack("4q", *divmod(period_ns, 1_000_000_000), *divmod(due_ns, 1_000_000_000))
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, spec, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            os.close(self._fd)
            self._fd = -1


# What happened to the clocks between two looks: somebody set the wall clock, or the machine was suspended.
# The monotonic clock stands still while the machine sleeps, so that waking up looks like a wall clock that
# was set forward. The boot clock goes on, and so tells the two apart.


@dataclass(frozen=True)
class Moved:
    """By how much the clocks moved apart; 0 where they only drifted."""

    step_ns: int = 0  # by how much the wall clock was set
    slept_ns: int = 0

    def words(self) -> dict[str, str]:
        """Marks to make: name → detail."""
        found: dict[str, str] = {}
        if self.slept_ns:
            found["suspended"] = f"the machine was suspended for {self.slept_ns / 1e9:.3f} s"
        if self.step_ns:
            found["clock_step"] = f"the wall clock was set by {self.step_ns / 1e6:+.1f} ms"
        return found


def boot_ns() -> int:
    """The monotonic clock, plus the time that the machine was suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class ClockWatch:
    """Watches the clocks. `pair` is from the last look."""

    def __init__(self, clock: Clock = SYSTEM, boot_ns: Callable[[], int] = boot_ns) -> None:
        self._clock = clock
        self._boot = Clock(boot_ns, clock.mono_ns)
        self.pair = pair(clock)
        self._away_ns = pair(self._boot).offset_ns

    def look(self) -> Moved:
        now, away_ns = pair(self._clock), pair(self._boot).offset_ns
        slept_ns = away_ns - self._away_ns
        set_ns = step_ns(ClockPair(self.pair.wall_ns + slept_ns, self.pair.mono_ns), now)
        self.pair, self._away_ns = now, away_ns
        return Moved(set_ns, slept_ns if slept_ns > STEP_NS else 0)


# How to wake up on time on a busy machine, as far as the user may.

_PR_SET_TIMERSLACK = 29


def prioritise_thread(realtime: bool) -> str:
    """Ask for exact timers and an early turn for the calling thread. Returns what was granted.

    With every core busy, an ordinary thread wakes up to 4 ms late, a real-time one 0.04 ms.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    if realtime:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
            return "SCHED_FIFO"
        except OSError:
            pass
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        return "nice -10"
    except OSError:
        return "normal"


# Lanes sleep in pieces, to notice the end of the run.
_LONGEST_SLEEP_NS = 50_000_000
_GIVE_UP_AFTER = 20  # failures of one sensor in a row
_LAG_BIN_NS = 10_000
_LAG_BINS = 2_000  # up to 20 ms; later ones are counted in the last bin


@dataclass(frozen=True)
class Note:
    """Something that happened to the measurement itself; becomes a mark."""

    t_ns: int
    name: str
    detail: str
    channels: tuple[int, ...] = ()  # channels by number, where it is about some


# Is told what happened, in words, and which channels it concerns.
TakeNote = Callable[[str, str, tuple[int, ...]], None]


@dataclass
class SensorSlot:
    """A sensor in the loop: where its channels stand in the recording, and what it has read."""

    sensor: Sensor
    first_channel: int
    next_ns: int
    readings: list[tuple[int, int, float]] = field(default_factory=list[tuple[int, int, float]])
    channels_ended: set[str] = field(default_factory=lambda: set())
    rounds: int = 0
    failures: int = 0
    ended: bool = False


@dataclass
class LagHistogram:
    """How late the loop woke up, in bins of 10 µs: an hour at 4 ms has 900,000 wake-ups, too many to keep."""

    bins: list[int] = field(default_factory=lambda: [0] * _LAG_BINS)
    count: int = 0
    missed: int = 0
    worst_ns: int = 0

    def add(self, lag_ns: int) -> None:
        self.bins[min(lag_ns // _LAG_BIN_NS, _LAG_BINS - 1)] += 1
        self.count += 1
        if lag_ns > self.worst_ns:
            self.worst_ns = lag_ns

    def quantile_ms(self, q: float) -> float | None:
        if not self.count:
            return None
        left = q * self.count
        for i, bin_count in enumerate(self.bins):
            left -= bin_count
            if left <= 0 and i < _LAG_BINS - 1:
                return min((i + 1) * _LAG_BIN_NS, self.worst_ns) / 1e6
        return self.worst_ns / 1e6


class Sampler:
    """Runs the lanes. `drain` hands out what they have read since the last call."""

    def __init__(self, sensors: Sequence[Sensor], clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._stop = threading.Event()
        self._notes: list[Note] = []
        self.lag: dict[str, LagHistogram] = {}
        self.priority: dict[str, str] = {}
        self.channels: list[Channel] = []
        self._lanes: dict[str, list[SensorSlot]] = {}
        self._alarms: dict[str, Alarm] = {}
        self._retimed: set[str] = set()
        start_ns = clock.mono_ns()
        for sensor in sensors:
            slot = SensorSlot(sensor, len(self.channels), start_ns)
            self.channels.extend(sensor.channels())
            self._lanes.setdefault(sensor.lane, []).append(slot)
        self._threads = [
            threading.Thread(target=self._run_lane, args=(lane, slots), name=f"lane {lane}", daemon=True)
            for lane, slots in self._lanes.items()
        ]

    def start(self) -> None:
        if self._clock is SYSTEM:
            with contextlib.suppress(OSError):  # then lanes sleep, in pieces
                for lane, slots in self._lanes.items():
                    self._alarms[lane] = Alarm(min(slot.sensor.period_ns for slot in slots))
        for thread in self._threads:
            thread.start()

    def retime(self, periods_ns: Sequence[tuple[Sensor, int]]) -> None:
        """Give some sensors other periods: their lanes read at once and go on from there."""
        lanes: set[str] = set()
        for sensor, period_ns in periods_ns:
            if sensor.period_ns != period_ns:
                sensor.period_ns = period_ns
                lanes.add(sensor.lane)
        for lane in lanes:
            self._retimed.add(lane)
            if lane in self._alarms:
                self._alarms[lane].wake(min(slot.sensor.period_ns for slot in self._lanes[lane]))

    def stop(self, timeout_s: float = 3.0) -> None:
        """End every lane, and keep each sensor's last readings. A lane stuck in a driver is left behind."""
        self._stop.set()
        for alarm in self._alarms.values():
            alarm.wake()
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
            if thread.is_alive():
                self.note("lane_stuck", f"{thread.name} did not answer within {timeout_s:g} s")

    def drain(self) -> list[tuple[int, list[tuple[int, int, float]]]]:
        """(first channel, readings) of each sensor. Lanes only append, so copying a prefix needs no lock."""
        batches: list[tuple[int, list[tuple[int, int, float]]]] = []
        for slots in self._lanes.values():
            for slot in slots:
                count = len(slot.readings)
                if count:
                    batches.append((slot.first_channel, slot.readings[:count]))
                    del slot.readings[:count]
        return batches

    def every_lane_has_read(self) -> bool:
        return all(slot.rounds or slot.ended for slots in self._lanes.values() for slot in slots)

    def notes(self) -> list[Note]:
        for slots in self._lanes.values():
            for slot in slots:
                # A sensor may lose one of its channels and go on with the others.
                ended: dict[str, str] = getattr(slot.sensor, "ended", {})
                for channel in ended.keys() - slot.channels_ended:
                    slot.channels_ended.add(channel)
                    self.note("sensor_lost", f"{channel}: {ended[channel]}", _named(slot, channel))
        count = len(self._notes)
        notes = self._notes[:count]
        del self._notes[:count]
        return notes

    def note(self, name: str, detail: str, channels: tuple[int, ...] = ()) -> None:
        """Note something. `channels` are places in `self.channels`."""
        self._notes.append(Note(self._clock.wall_ns(), name, detail, channels))

    def _run_lane(self, lane: str, slots: list[SensorSlot]) -> None:
        lag = self.lag[lane] = LagHistogram()
        # Only the counters' lane is short and regular enough for a real-time priority.
        self.priority[lane] = prioritise_thread(realtime=lane == "counters")
        alarm = self._alarms.get(lane)
        wait_until = _sleeper(self._clock) if alarm is None else alarm.wait_until

        def retimed() -> bool:
            if lane not in self._retimed:
                return False
            self._retimed.discard(lane)
            return True

        try:
            run_slots(slots, self._clock, self._stop.is_set, lag, self.note, wait_until, retimed)
        finally:
            if alarm is not None:
                alarm.close()
            for slot in slots:
                try:
                    slot.readings.extend(slot.sensor.close())
                except Exception as error:
                    self.note("sensor_error", f"{_names(slot)}: {type(error).__name__}: {error}")


def run_slots(
    slots: list[SensorSlot],
    clock: Clock,
    stopped: Callable[[], bool],
    lag: LagHistogram,
    note: TakeNote,
    wait_until: Callable[[int], None] | None = None,
    retimed: Callable[[], bool] = lambda: False,
) -> None:
    """The loop of one lane, until it is `stopped` or no sensor is left.

    When `retimed`, it reads all sensors at once, so that their next readings fall on one grid again.
    """
    mono_ns = clock.mono_ns
    wait_until = wait_until or _sleeper(clock)
    live = [slot for slot in slots if not slot.ended]
    while live and not stopped():
        if retimed():
            now_ns = mono_ns()
            for slot in live:
                slot.next_ns = min(slot.next_ns, now_ns)
        due_ns = min([slot.next_ns for slot in live])
        now_ns = mono_ns()
        if now_ns < due_ns:
            wait_until(due_ns)
            now_ns = mono_ns()
            if now_ns < due_ns:
                continue
        lag.add(now_ns - due_ns)
        for slot in live:
            if slot.next_ns > now_ns:
                continue
            if not _read(slot, note):
                live = [other for other in live if other is not slot]
            slot.rounds += 1
            period_ns = slot.sensor.period_ns
            slot.next_ns += period_ns
            behind_ns = mono_ns() - slot.next_ns
            if behind_ns > 0:
                # Skip the readings that came too late, rather than make them up in a burst.
                skipped = behind_ns // period_ns + 1
                lag.missed += skipped
                slot.next_ns += skipped * period_ns


def _sleeper(clock: Clock) -> Callable[[int], None]:
    def wait_until(due_ns: int) -> None:
        clock.sleep_s(max(0, min(due_ns - clock.mono_ns(), _LONGEST_SLEEP_NS)) * 1e-9)

    return wait_until


def _read(slot: SensorSlot, note: TakeNote) -> bool:
    """Read a sensor once. False: it was its last reading."""
    try:
        readings = slot.sensor.read()
        slot.readings.extend(readings)
        slot.failures = 0
    except SensorLost as lost:
        slot.ended = True
        note("sensor_lost", f"{_names(slot)}: {lost}", _places(slot))
    except Exception as error:
        slot.failures += 1
        if slot.failures >= _GIVE_UP_AFTER:
            slot.ended = True
            note("sensor_lost", f"{_names(slot)}: {type(error).__name__}: {error}", _places(slot))
    return not slot.ended


def _names(slot: SensorSlot) -> str:
    return ", ".join(channel.name for channel in slot.sensor.channels())


def _places(slot: SensorSlot) -> tuple[int, ...]:
    return tuple(range(slot.first_channel, slot.first_channel + len(slot.sensor.channels())))


def _named(slot: SensorSlot, ended: str) -> tuple[int, ...]:
    """The place of the channel to which a sensor's `ended` gives this name."""
    channels = zip(_places(slot), slot.sensor.channels(), strict=True)
    return tuple(place for place, channel in channels if f"{channel.name} ({channel.detail})" == ended)
