from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli import TIMEOUT_S
from smaragdine.clock import Clock
from smaragdine.monitor.sampler import LagHistogram, Sampler, SensorSlot, run_slots
from smaragdine.sensors.base import Channel, SensorLost

MS = 1_000_000
START_NS = 7_000 * MS


def channel(name: str = "x") -> Channel:
    return Channel(f"test:{name}", "power", "W", "sample", "measured", 1.0, "test")


@dataclass
class FakeTime:
    """Sleeping makes time pass, and wakes a little late as a real kernel does."""

    now_ns: int = START_NS
    late_ns: int = 0

    def clock(self) -> Clock:
        return Clock(wall_ns=lambda: self.now_ns, mono_ns=lambda: self.now_ns, sleep_s=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9) + self.late_ns


@dataclass
class Ticker:
    """A sensor that notes when it was read. `at` says what happens in read number n."""

    time: FakeTime
    period_ns: int = 4 * MS
    lane: str = "counters"
    name: str = "x"
    at: Callable[[int], None] = lambda n: None
    reads_ns: list[int] = field(default_factory=list)
    tries: int = 0
    ended: dict[str, str] = field(default_factory=dict)

    def channels(self) -> Sequence[Channel]:
        return [channel(self.name)]

    def read(self) -> Sequence[tuple[int, int, float]]:
        self.tries += 1
        self.at(self.tries - 1)
        self.reads_ns.append(self.time.now_ns)
        return [(self.time.now_ns, 0, float(self.tries - 1))]

    def close(self) -> Sequence[tuple[int, int, float]]:
        return []


@dataclass
class Outcome:
    slots: list[SensorSlot]
    lag: LagHistogram
    notes: list[tuple[str, str, tuple[int, ...]]]


def run(fake: FakeTime, sensors: Sequence[Ticker], until_s: float) -> Outcome:
    """The ticks of [0, until_s); the loop asks whether to stop after a reading, not before."""
    slots = [SensorSlot(sensor, i, fake.now_ns) for i, sensor in enumerate(sensors)]
    outcome = Outcome(slots, LagHistogram(), [])
    end_ns = fake.now_ns + round(until_s * 1e9) - min(sensor.period_ns for sensor in sensors)
    clock = fake.clock()
    run_slots(
        slots, clock, lambda: fake.now_ns >= end_ns, outcome.lag, lambda *note: outcome.notes.append(note)
    )
    return outcome


def raises(error: Exception, when: Callable[[int], bool]) -> Callable[[int], None]:
    def at(n: int) -> None:
        if when(n):
            raise error

    return at


def test_a_hundred_thousand_ticks_do_not_drift():
    fake = FakeTime(late_ns=70_000)
    sensor = Ticker(fake)
    outcome = run(fake, [sensor], 400)
    late_ns = np.array(sensor.reads_ns) - (START_NS + 4 * MS * np.arange(len(sensor.reads_ns)))
    assert len(sensor.reads_ns) == 100_000
    assert late_ns.min() >= 0
    # Drift would add up; what is left is the kernel's own lateness and the rounding of a float of seconds.
    assert late_ns.max() <= 70_001
    assert outcome.lag.missed == 0
    assert outcome.lag.worst_ns == late_ns.max()


def test_after_a_stall_readings_are_skipped_not_made_up():
    fake = FakeTime()

    def stall(n: int) -> None:
        if n == 10:
            fake.now_ns += 1_001 * MS

    sensor = Ticker(fake, at=stall)
    outcome = run(fake, [sensor], 2)
    apart = np.diff(sensor.reads_ns)
    assert apart.min() >= 3 * MS
    # The grid is kept: everything is still on multiples of the period, save the reading that stalled.
    off_grid = [t for t in sensor.reads_ns if (t - START_NS) % (4 * MS)]
    assert len(off_grid) == 1
    # 40 ms + 1001 ms: the ticks due at 44 … 1040 ms were never made.
    assert outcome.lag.missed == 250
    assert len(sensor.reads_ns) + outcome.lag.missed == 500


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 300)), max_size=5),
)
def test_every_tick_is_read_or_missed_and_never_in_a_burst(
    periods_ms: list[int], stalls: list[tuple[int, int]]
):
    fake = FakeTime()
    stall_ms = dict(stalls)

    def stall(n: int) -> None:
        fake.now_ns += stall_ms.get(n, 0) * MS

    sensors = [Ticker(fake, period_ns=p * MS) for p in periods_ms]
    sensors[0].at = stall
    outcome = run(fake, sensors, 2)
    due = 0
    for sensor, slot in zip(sensors, outcome.slots, strict=True):
        assert (slot.next_ns - START_NS) % sensor.period_ns == 0
        due += (slot.next_ns - START_NS) // sensor.period_ns
        ticks = Counter((t - START_NS) // sensor.period_ns for t in sensor.reads_ns)
        # A late reading and the next punctual one may fall into the same period; three would be a burst.
        assert max(ticks.values()) <= 2
    assert sum(slot.rounds for slot in outcome.slots) + outcome.lag.missed == due


def test_each_sensor_has_its_own_rate():
    fake = FakeTime()
    sensors = [Ticker(fake, period_ns=p * MS) for p in (4, 20, 1000)]
    run(fake, sensors, 10)
    assert [len(s.reads_ns) for s in sensors] == [2500, 500, 10]


def test_a_period_may_change_on_the_way():
    fake = FakeTime()
    sensor = Ticker(fake)

    def slow_down(n: int) -> None:
        if n == 100:
            sensor.period_ns = 20 * MS

    sensor.at = slow_down
    run(fake, [sensor], 1)
    assert set(np.diff(sensor.reads_ns[:100])) == {4 * MS}
    assert set(np.diff(sensor.reads_ns[101:])) == {20 * MS}


def test_a_long_sleep_is_cut_so_that_the_end_is_noticed():
    fake = FakeTime()
    naps: list[float] = []
    clock = Clock(lambda: fake.now_ns, lambda: fake.now_ns, lambda s: (naps.append(s), fake.sleep(s))[0])
    slot = SensorSlot(Ticker(fake, period_ns=10_000 * MS), 0, fake.now_ns)
    end_ns = fake.now_ns + 5_000 * MS
    run_slots([slot], clock, lambda: fake.now_ns >= end_ns, LagHistogram(), lambda *_: None)
    assert max(naps) <= 0.1
    assert slot.rounds == 1


def test_a_lost_sensor_leaves_the_rest():
    fake = FakeTime()
    lost = Ticker(fake, name="gone", at=raises(SensorLost("fell off the bus"), lambda n: n == 5))
    stays = Ticker(fake, name="stays")
    outcome = run(fake, [lost, stays], 1)
    assert lost.tries == 6
    assert len(lost.reads_ns) == 5
    assert len(stays.reads_ns) == 250
    assert outcome.notes == [("sensor_lost", "test:gone power: fell off the bus", (0,))]
    assert [slot.ended for slot in outcome.slots] == [True, False]
    assert len(outcome.slots[0].readings) == 5


def test_the_loop_ends_with_its_last_sensor():
    fake = FakeTime()
    run(fake, [Ticker(fake, at=raises(SensorLost("gone"), lambda n: n == 3))], 1e6)
    assert fake.now_ns < START_NS + 100 * MS


def test_a_sensor_that_fails_now_and_then_goes_on():
    fake = FakeTime()
    sensor = Ticker(fake, at=raises(OSError("busy"), lambda n: n % 20 != 19))
    outcome = run(fake, [sensor], 2)
    assert sensor.tries == 500
    assert len(sensor.reads_ns) == 25
    assert outcome.notes == []


def test_a_sensor_that_only_fails_is_given_up():
    fake = FakeTime()
    sensor = Ticker(fake, name="bad", at=raises(ValueError("no number"), lambda n: n >= 2))
    other = Ticker(fake, name="good")
    outcome = run(fake, [sensor, other], 2)
    assert sensor.tries == 2 + 20
    assert len(other.reads_ns) == 500
    assert outcome.notes == [("sensor_lost", "test:bad power: ValueError: no number", (0,))]


@given(st.lists(st.integers(0, 19_000_000), min_size=1, max_size=300), st.floats(0.01, 1.0))
def test_lag_quantiles_are_within_a_bin(lags_ns: list[int], q: float):
    lag = LagHistogram()
    for value in lags_ns:
        lag.add(value)
    exact_ms = np.quantile(lags_ns, q, method="inverted_cdf") / 1e6
    assert exact_ms - 1e-9 <= lag.quantile_ms(q) <= exact_ms + 0.0101
    assert lag.worst_ns == max(lags_ns)
    assert lag.count == len(lags_ns)


def test_no_wake_up_has_no_quantile():
    assert LagHistogram().quantile_ms(0.5) is None


def test_lag_beyond_the_bins_is_not_made_smaller():
    lag = LagHistogram()
    for _ in range(100):
        lag.add(500 * MS)
    assert lag.quantile_ms(0.5) == pytest.approx(500, rel=0.01)


@dataclass
class Sequencer:
    """Emits 0, 1, 2 … in clumps; the last number with close()."""

    lane: str
    clump: int
    period_ns: int = MS
    name: str = "seq"
    emitted: int = 0
    stuck: threading.Event | None = None
    fails: str = ""

    def channels(self) -> Sequence[Channel]:
        return [channel(self.name)]

    def _next(self, count: int) -> list[tuple[int, int, float]]:
        first = self.emitted
        self.emitted += count
        return [(time.time_ns(), 0, float(first + i)) for i in range(count)]

    def read(self) -> Sequence[tuple[int, int, float]]:
        if self.stuck is not None:
            self.stuck.wait(TIMEOUT_S)
        return self._next(self.clump)

    def close(self) -> Sequence[tuple[int, int, float]]:
        if self.fails:
            raise RuntimeError(self.fails)
        return self._next(1)


def drained(sampler: Sampler, into: dict[int, list[float]]) -> None:
    for first, readings in sampler.drain():
        into.setdefault(first, []).extend(value for _, _, value in readings)


@pytest.mark.usefixtures("eager_switching")
def test_nothing_is_lost_or_doubled_between_drains():
    sensors = [
        Sequencer("counters", 50),
        Sequencer("counters", 7, name="b"),
        Sequencer("slow", 500, name="c"),
        Sequencer("third", 1, name="d"),
    ]
    sampler = Sampler(sensors)
    got: dict[int, list[float]] = {}
    sampler.start()
    end = time.monotonic() + 1.0
    while time.monotonic() < end or min(sensor.emitted for sensor in sensors) <= 10:
        drained(sampler, got)
    sampler.stop()
    drained(sampler, got)
    assert sampler.drain() == []
    for first, sensor in enumerate(sensors):
        assert got[first] == [float(i) for i in range(sensor.emitted)]


def test_channels_are_numbered_through():
    sensors = [Sequencer("a", 1, name="a"), Sequencer("b", 1, name="b")]
    assert [c.device for c in Sampler(sensors).channels] == ["test:a", "test:b"]


def test_stop_collects_what_close_returns():
    sensor = Sequencer("counters", 1, period_ns=3_600_000 * MS)
    sampler = Sampler([sensor])
    sampler.start()
    wait_until(sampler.every_lane_has_read)
    sampler.drain()
    sampler.stop()
    assert [[value for _, _, value in readings] for _, readings in sampler.drain()] == [[1.0]]


def wait_until(condition: Callable[[], bool], seconds: float = TIMEOUT_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def test_a_stuck_lane_does_not_hold_the_others_or_the_end():
    stuck = Sequencer("driver", 1, name="stuck", stuck=threading.Event())
    good = Sequencer("counters", 1, name="good")
    sampler = Sampler([stuck, good])
    sampler.start()
    wait_until(lambda: good.emitted > 20)
    assert not sampler.every_lane_has_read()
    sampler.stop(timeout_s=0.2)
    assert [note.name for note in sampler.notes()] == ["lane_stuck"]
    got: dict[int, list[float]] = {}
    drained(sampler, got)
    assert got == {1: [float(i) for i in range(good.emitted)]}
    assert stuck.stuck is not None
    stuck.stuck.set()


def test_a_close_that_raises_is_noted_and_the_next_sensor_is_still_closed():
    bad = Sequencer("counters", 1, name="bad", fails="no such device")
    good = Sequencer("counters", 1, name="good")
    sampler = Sampler([bad, good])
    sampler.start()
    wait_until(sampler.every_lane_has_read)
    sampler.stop()
    notes = sampler.notes()
    assert [(n.name, n.detail) for n in notes] == [
        ("sensor_error", "test:bad power: RuntimeError: no such device")
    ]
    got: dict[int, list[float]] = {}
    drained(sampler, got)
    assert got[1][-1] == good.emitted - 1


def test_a_channel_that_ended_is_noted_once():
    fake = FakeTime()
    sensor = Ticker(fake)
    sampler = Sampler([sensor], fake.clock())
    assert sampler.notes() == []
    sensor.ended["gpu:1 power"] = "GPU is lost"
    notes = sampler.notes()
    assert [(n.t_ns, n.name, n.detail) for n in notes] == [
        (START_NS, "sensor_lost", "gpu:1 power: GPU is lost")
    ]
    assert sampler.notes() == []


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads change as often as they can, so that a race shows."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_a_note_made_while_the_notes_are_taken_is_not_lost():
    taken: list[str] = []

    def taken_meanwhile() -> int:
        taken.extend(note.detail for note in sampler.notes())
        return START_NS

    sampler = Sampler([], Clock(wall_ns=taken_meanwhile))
    sampler.note("sensor_lost", "gpu:0 power: gone")
    taken.extend(note.detail for note in sampler.notes())
    assert taken == ["gpu:0 power: gone"]
