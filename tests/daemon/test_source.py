from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from cli import TIMEOUT_S
from nvml_fake import GpuSpec, in_process, write_spec
from powercap_fake import PowercapTree
from smaragdine.clock import Clock
from smaragdine.daemon.log import Batch
from smaragdine.daemon.recovery import Returning, mend
from smaragdine.daemon.running_energy import RunningEnergy
from smaragdine.daemon.source import Source, Trees, machine_numbers
from smaragdine.monitor.sampler import Alarm, LagHistogram, Note, SensorSlot, run_slots
from smaragdine.sensors.base import Channel, Sensor, SensorLost
from smaragdine.sensors.discover import Machine, SensorSettings, discover

MS = 1_000_000
SECOND = 1_000 * MS
CPUS = dict.fromkeys(range(os.cpu_count() or 1), 0)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@contextmanager
def program(code: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A process that does what `code` says, prints a line and waits for its input to close."""
    whole = f"import os, subprocess, sys, time\n{code}\nprint(flush=True)\nsys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", whole],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


# --- trees --------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Trees that are read as the sampler does it, and what they gave."""

    trees: Trees = field(default_factory=lambda: Trees(CPUS))
    last_s: dict[int, float] = field(default_factory=dict)

    def add(self, key: str, pid: int, number: int, include_past: bool = True, start_s: float = 0.0) -> None:
        self.trees.add(key, pid, include_past, MS, {0: number}, {0: start_s})

    def look(self) -> None:
        self.trees._next_scan_ns = 0
        self.trees.read()
        for t_ns, number, value in zip(*self.trees.drain(), strict=True):
            assert value >= self.last_s.get(number, 0.0)
            assert t_ns > 0
            self.last_s[number] = value


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    return time.clock_gettime((~process.pid << 3) | 2)


def test_a_tree_that_cannot_be_added_is_closed(monkeypatch: pytest.MonkeyPatch):
    watch = Watch()
    before = os.listdir("/proc/self/fd")

    def fail(*_: object) -> None:
        raise OSError("no more")

    monkeypatch.setattr(watch.trees, "_nest", fail)
    with pytest.raises(OSError, match="no more"):
        watch.add("one", os.getpid(), 1)
    assert os.listdir("/proc/self/fd") == before


def test_each_tree_follows_its_own_processes_on_one_look():
    burn = "end = time.process_time() + 0.05\nwhile time.process_time() < end: pass\n"
    with program(burn) as one, program() as two:
        watch = Watch()
        watch.add("one", one.pid, 1)
        watch.add("two", two.pid, 2)
        watch.look()
        assert watch.last_s[1] == pytest.approx(cpu_s(one), abs=0.02)
        assert watch.last_s[2] == pytest.approx(cpu_s(two), abs=0.02)
        assert watch.last_s[1] > watch.last_s[2]
        child = "p = subprocess.Popen(['sleep', '60'])"
        with program(child) as three:
            watch.add("three", three.pid, 3)
            assert len(watch.trees._members["three"].tree.pids) == 2
            watch.trees.remove("three")
        two.kill()
        two.wait()
        watch.look()
        watch.look()
        assert watch.trees._members["two"].tree.pids == frozenset()
        watch.trees.close()


def test_a_child_that_is_started_later_is_found_by_the_common_look():
    later = "print(flush=True); sys.stdin.readline(); subprocess.Popen(['sleep', '60'])"
    with program(later) as late, program() as other:
        watch = Watch()
        for i, process in enumerate((late, other)):
            watch.add(str(i), process.pid, i)
        watch.look()
        assert late.stdin is not None
        assert late.stdout is not None
        late.stdin.write(b"go\n")
        late.stdin.flush()
        late.stdout.readline()
        watch.look()
        sizes = [len(watch.trees._members[key].tree.pids) for key in "01"]
        assert sizes == [2, 1]
        watch.trees.close()


def test_past_time_counts_only_where_it_is_wanted_and_a_session_from_before_goes_on():
    burn = "end = time.process_time() + 0.1\nwhile time.process_time() < end: pass\n"
    with program(burn) as busy:
        watch = Watch()
        watch.add("past", busy.pid, 1)
        watch.add("now", busy.pid, 2, include_past=False)
        watch.add("again", busy.pid, 3, include_past=False, start_s=5.0)
        watch.look()
        assert watch.last_s[1] >= 0.1
        assert watch.last_s[2] < 0.05
        assert 5.0 <= watch.last_s[3] < 5.05
        watch.trees.close()


def test_no_such_process():
    with program() as process:
        pass
    with pytest.raises(ProcessLookupError):
        Trees(CPUS).add("a", process.pid, True, MS, {0: 0}, {0: 0.0})
    with pytest.raises(ProcessLookupError):
        Trees(CPUS).add("a", 2**30, True, MS, {0: 0}, {0: 0.0})


def test_a_process_belongs_to_the_innermost_session():
    with (
        program("p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True)") as outer,
        program() as other,
    ):
        trees = Trees(CPUS)
        tree_pids = lambda key: trees._members[key].tree.pids  # noqa: E731
        trees.add("outer", outer.pid, True, MS, {0: 0}, {0: 0.0})
        [inner] = tree_pids("outer") - {outer.pid}
        trees.add("inner", inner, True, MS, {0: 1}, {0: 0.0})
        trees.add("other", other.pid, True, MS, {0: 2}, {0: 0.0})
        assert trees.inside() == {"inner": "outer"}
        assert trees.sessions_of(frozenset({outer.pid, inner})) == {"outer", "inner"}
        assert trees.sessions_of(frozenset({inner})) == {"inner"}
        assert trees.sessions_of(frozenset({other.pid, 1})) == {"other", ""}
        # Around both: where they are is not changed by whoever came first.
        trees.add("around", os.getpid(), True, MS, {0: 3}, {0: 0.0})
        assert trees.inside() == {"inner": "outer", "outer": "around", "other": "around"}
        trees.add("twin", inner, True, MS, {0: 4}, {0: 0.0})
        assert trees.inside()["twin"] == "inner"
        trees.remove("outer")
        assert trees.inside() == {"inner": "around", "other": "around", "twin": "inner"}
        trees.remove("around")
        assert trees.inside() == {"twin": "inner"}
        trees.close()


def test_the_last_reading_of_a_removed_tree_is_kept():
    with program() as process:
        trees = Trees(CPUS)
        trees.add("a", process.pid, True, SECOND, {0: 7}, {0: 0.0})
        trees.read()
        trees.remove("a")
        t_ns, numbers, _ = trees.drain()
        assert list(numbers) == [7, 7]
        assert t_ns[1] > t_ns[0]
        trees.close()


def test_a_tree_that_is_dear_to_read_is_read_less_often_and_no_other_is(monkeypatch: pytest.MonkeyPatch):
    """One user's costs 2 ms, in two sessions; another user's next to nothing."""
    now_ns = SECOND
    trees = Trees(CPUS, Clock(mono_ns=lambda: now_ns))
    trees.period_ns = MS
    seen: Counter[str] = Counter()
    with program() as process:
        for key, owner in (("dear", 1), ("dear too", 1), ("cheap", 2)):
            trees.add(key, process.pid, True, MS, {0: 0}, {0: 0.0}, owner)

            def update(key: str = key, cost_s: float = 0.002 if owner == 1 else 0.0) -> None:
                seen[key] += 1
                end_s = time.thread_time() + cost_s
                while time.thread_time() < end_s:
                    pass

            monkeypatch.setattr(trees._members[key].tree, "update", update)
        for _ in range(1000):
            trees.read()
            now_ns += MS
        assert seen["cheap"] > 900
        # 2 ms each of a tenth of a core, halved among users and halved again among sessions.
        assert 1 <= seen["dear"] <= 1000 // 80 + 1
        assert 1 <= seen["dear too"] <= 1000 // 80 + 1
        trees.remove("dear too")
        seen.clear()
        for _ in range(1000):
            trees.read()
            now_ns += MS
        assert 15 <= seen["dear"] <= 1000 // 40 + 1
        trees.close()


# --- periods ------------------------------------------------------------------------------------------------


def test_a_wait_ends_when_it_is_woken_and_a_wake_is_never_lost():
    alarm = Alarm(3600 * SECOND)
    rounds = 0
    done = threading.Event()

    def waiting() -> None:
        nonlocal rounds
        while not done.is_set():
            alarm.wait_until(time.monotonic_ns() + 3600 * SECOND)
            rounds += 1

    thread = threading.Thread(target=waiting)
    thread.start()
    for _ in range(200):
        seen = rounds
        alarm.wake()
        wait_until(lambda seen=seen: rounds > seen)
    done.set()
    alarm.wake()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    alarm.close()
    alarm.wake()  # after the end: nothing


def test_the_grid_of_a_woken_alarm_has_the_new_period():
    alarm = Alarm(3600 * SECOND)
    alarm.wake(2 * MS)
    due_ns = time.monotonic_ns()
    alarm.wait_until(due_ns)
    for _ in range(20):
        due_ns += 2 * MS
        while time.monotonic_ns() < due_ns:
            alarm.wait_until(due_ns)
    alarm.close()


@dataclass
class Ticker:
    period_ns: int
    now_ns: Callable[[], int]
    lane: str = "counters"
    reads_ns: list[int] = field(default_factory=list)

    def channels(self) -> Sequence[Channel]:
        return ()

    def read(self) -> Sequence[tuple[int, int, float]]:
        self.reads_ns.append(self.now_ns())
        return ()

    def close(self) -> Sequence[tuple[int, int, float]]:
        return ()


def test_a_lane_that_is_retimed_reads_at_once_and_on_one_grid():
    now = [10 * SECOND]

    def sleep(seconds: float) -> None:
        now[0] += round(seconds * 1e9)

    changes = [(10 * SECOND + 250 * MS, 4 * MS), (10 * SECOND + 300 * MS, 500 * MS)]
    fast, slow = (Ticker(SECOND, lambda: now[0]) for _ in range(2))

    def retimed() -> bool:
        if changes and now[0] >= changes[0][0]:
            fast.period_ns = changes.pop(0)[1]
            slow.period_ns = max(fast.period_ns, 20 * MS)
            return True
        return False

    slots = [SensorSlot(fast, 0, now[0]), SensorSlot(slow, 0, now[0])]
    clock = Clock(lambda: now[0], lambda: now[0], sleep)
    end_ns = 12 * SECOND
    run_slots(slots, clock, lambda: now[0] >= end_ns, LagHistogram(), lambda *_: None, None, retimed)
    at_ms = [(t - 10 * SECOND) / MS for t in fast.reads_ns]
    # The change is noticed at the next wake-up, which is never more than 50 ms away.
    begin = at_ms[1]
    assert 250 <= begin <= 300
    fine = [t for t in at_ms if begin <= t < 300]
    assert np.diff(fine) == pytest.approx(4.0)
    coarse = [t for t in at_ms if t >= 300]
    assert np.diff(coarse[1:]) == pytest.approx(500.0)
    assert set(slow.reads_ns) <= set(fast.reads_ns)


# --- numbers ------------------------------------------------------------------------------------------------


def channel(device: str, quantity: str = "energy", sensor: str = "rapl", detail: str = "") -> Channel:
    return Channel(device, quantity, "J", "counter", "measured", 1.0, sensor, detail=detail)


def test_a_channel_has_the_same_number_after_a_restart_with_other_sensors(tmp_path: Path):
    first = [channel("cpu:0"), channel("cpu:0"), channel("gpu:0", "power", "nvml", "every 20 ms")]
    assert machine_numbers(first, tmp_path, 0) == [0, 1, 2]
    # Sessions had numbers 3 to 9 meanwhile.
    second = [channel("dram:0"), channel("cpu:0"), channel("gpu:0", "power", "nvml", "every 19 ms")]
    assert machine_numbers(second, tmp_path, 10) == [10, 0, 2]
    assert machine_numbers([*first, *second[:1]], tmp_path, 12) == [0, 1, 2, 10]
    (tmp_path / "channels.json").write_text("{")
    assert machine_numbers(second, tmp_path, 12) == [12, 13, 14]
    assert machine_numbers(second, None, 0) == [0, 1, 2]


# --- loss and return ----------------------------------------------------------------------------------------


@dataclass
class Fallible:
    """A sensor of several channels that reads 1, 2, 3 … until it is told to fail."""

    names: list[str]
    error: Exception | None = None
    ended: dict[str, str] = field(default_factory=dict)
    reads: int = 0
    closed: int = 0
    lane: str = "counters"
    period_ns: int = MS

    def channels(self) -> Sequence[Channel]:
        return [channel(name, sensor="test", detail="d") for name in self.names]

    def read(self) -> Sequence[tuple[int, int, float]]:
        if self.error is not None:
            raise self.error
        self.reads += 1
        gone = {name for name in self.names if f"{name} energy (d)" in self.ended}
        return [(self.reads, i, float(self.reads)) for i, name in enumerate(self.names) if name not in gone]

    def close(self) -> Sequence[tuple[int, int, float]]:
        self.closed += 1
        return ()


@dataclass
class Ward:
    """A returning sensor, what it told, and what can be opened again at present."""

    sensor: Fallible
    told: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    there: list[Sensor] = field(default_factory=list)
    asked: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        numbers = [10 + i for i in range(len(self.sensor.names))]
        self.returning = Returning(self.sensor, numbers, lambda *note: self.told.append(note))

    def read(self) -> dict[int, float]:
        return {place: value for _, place, value in self.returning.read()}

    def mend(self) -> None:
        def reopen(lost: Sequence[Channel]) -> Sequence[Sensor]:
            self.asked.append([each.device for each in lost])
            there, self.there = self.there, []
            return there

        mend([self.returning], {"test": reopen}, {})


def test_the_loss_of_a_sensor_that_does_not_return_names_its_channels():
    sensors = [Fallible(["a", "b"]), Fallible(["c", "d"])]
    sensors[0].ended["b energy (d)"] = "no such device"
    sensors[1].error = SensorLost("fell off the bus")
    machine = Machine(list(sensors), [], {}, None)
    source = Source(machine, SensorSettings(), next_channel=70, gpu_pids=dict)
    number = {channel.device: number for number, channel in source.channels.items()}
    assert min(number.values()) == 70
    source.start()
    notes: list[Note] = []

    def heard() -> bool:
        batch = source.drain()
        notes.extend(batch.notes if batch is not None else ())
        return len(notes) >= 2

    try:
        wait_until(heard)
    finally:
        source.stop()
    assert {note.name for note in notes} == {"sensor_lost"}
    assert {note.channels for note in notes} == {(number["b"],), (number["c"], number["d"])}


def test_a_lost_sensor_comes_back_under_the_same_numbers():
    ward = Ward(Fallible(["a", "b"]))
    assert ward.read() == {0: 1.0, 1: 1.0}
    ward.mend()
    assert ward.asked == []
    ward.sensor.error = SensorLost("fell off the bus")
    assert ward.read() == {}
    assert ward.read() == {}
    ward.mend()
    assert ward.sensor.closed == 1
    assert ward.asked == [["a", "b"]]
    fresh = Fallible(["b", "unknown", "a"])
    ward.there = [fresh]
    ward.mend()
    ward.mend()  # what is on its way is not opened again
    assert len(ward.asked) == 2
    assert ward.read() == {1: 1.0, 0: 1.0}
    assert ward.told == [
        ("sensor_lost", "a energy, b energy: fell off the bus", (10, 11)),
        ("sensor_back", "b energy, a energy", (11, 10)),
    ]
    ward.returning.close()
    assert (ward.sensor.closed, fresh.closed) == (1, 1)


def test_one_channel_of_several_is_lost_and_returns_alone():
    ward = Ward(Fallible(["a", "b", "c"]))
    ward.sensor.ended["b energy (d)"] = "No such device"
    assert ward.read() == {0: 1.0, 2: 1.0}
    assert ward.told == [("sensor_lost", "b energy: No such device", (11,))]
    ward.there = [Fallible(["b"])]
    ward.mend()
    assert ward.asked == [["b"]]
    assert ward.read() == {0: 2.0, 1: 1.0, 2: 2.0}
    assert ward.told[1:] == [("sensor_back", "b energy", (11,))]
    assert ward.sensor.closed == 0


def test_a_sensor_that_only_fails_is_lost_and_tried_again():
    ward = Ward(Fallible(["a"], error=ValueError("no number")))
    for _ in range(30):
        assert ward.read() == {}
    assert ward.told == [("sensor_lost", "a energy: ValueError: no number", (10,))]
    ward.there = [Fallible(["z"])]  # not ours: closed again
    stranger = ward.there[0]
    ward.mend()
    assert isinstance(stranger, Fallible)
    assert stranger.closed == 1
    assert ward.returning.lost


# --- the source ---------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A source on a machine with a powercap tree, and all it gave."""

    source: Source
    machine: Machine
    batches: list[Batch] = field(default_factory=list)

    def drain(self) -> None:
        batch = self.source.drain()
        if batch is not None:
            self.batches.append(batch)

    def number(self, device: str, quantity: str = "energy") -> int:
        [found] = [n for n, c in self.source.channels.items() if (c.device, c.quantity) == (device, quantity)]
        return found

    def readings(self, number: int) -> list[tuple[int, float]]:
        self.drain()
        return [
            (t_ns, value)
            for batch in self.batches
            for t_ns, channel, value in zip(
                batch.t_ns.tolist(), batch.channel.tolist(), batch.value.tolist(), strict=True
            )
            if channel == number
        ]

    def notes(self, name: str) -> list[str]:
        self.drain()
        return [note.detail for batch in self.batches for note in batch.notes if note.name == name]


def sensor_settings(tmp_path: Path, powercap: Path, visible: str | None = "") -> SensorSettings:
    nowhere = tmp_path / "nothing"
    return SensorSettings(powercap, hwmon_root=nowhere, perf_root=nowhere, cuda_visible=visible)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[PowercapTree]:
    with PowercapTree(tmp_path / "powercap", packages=1, wrap_uj=50_000_000) as tree:
        yield tree


@contextmanager
def running(settings: SensorSettings, **more: object) -> Iterator[Run]:
    machine = discover(settings)
    source = Source(machine, settings, **more)  # type: ignore[arg-type]
    run = Run(source, machine)
    source.start()
    try:
        yield run
    finally:
        source.stop(TIMEOUT_S)
        run.drain()


def test_the_pace_follows_the_finest_session_and_no_joule_is_lost(tmp_path: Path, tree: PowercapTree):
    with running(sensor_settings(tmp_path, tree.root), next_channel=100) as run, program() as process:
        source = run.source
        meter = RunningEnergy(source.channels, source.cpus)
        cpu = run.number("cpu:0")
        assert not any(channel.quantity == "program" for channel in source.channels.values())
        assert min(source.channels) == 100
        wait_until(lambda: len(run.readings(cpu)) >= 1)
        tree.start({"cpu:0": 500.0, "dram:0": 100.0})
        assert source.period_ns == SECOND
        first = source.add("first", process.pid, True, 50 * MS)
        second = source.add("second", process.pid, True, 1)
        numbers = [*source.channels, *first, *second]
        assert len(set(numbers)) == len(numbers)
        assert source.period_ns == MS  # no finer
        wait_until(lambda: len(run.readings(cpu)) >= 300)
        assert len(run.readings(min(second))) > len(run.readings(min(first))) > 1
        source.remove("second")
        assert source.period_ns == 50 * MS
        source.remove("first")
        assert source.period_ns == SECOND
        tree.stop()
        third = source.add("third", process.pid, True, MS)
        assert min(third) > max(numbers)
        count = len(run.readings(cpu))
        wait_until(lambda: len(run.readings(cpu)) >= count + 3)
    for batch in run.batches:
        meter.update(batch)
    totals = {total.device: total.energy_j for total in meter.devices()}
    # Wrapped many times at 50 J, and still exact to the last µJ.
    assert totals["cpu:0"] == tree.exact_joules("cpu:0") > 50
    assert totals["dram:0"] == tree.exact_joules("dram:0")
    t_ns = [t for t, _ in run.readings(cpu)]
    assert t_ns == sorted(t_ns)
    parts = [t for t, _ in run.readings(run.number("cpu:0/core"))]
    assert len(parts) < len(t_ns) / 2


def test_a_zone_that_vanishes_and_returns(tmp_path: Path, tree: PowercapTree):
    opened: list[Path] = []
    denied = threading.Event()
    denied.set()

    def open_file(path: Path) -> int:
        opened.append(path)
        if denied.is_set():
            raise PermissionError(13, "not yet", str(path))
        return os.open(path, os.O_RDONLY)

    tree.add_joules("cpu:0", 10.0)
    with running(sensor_settings(tmp_path, tree.root), open_file=open_file) as run, program() as process:
        run.source.add("a", process.pid, True, 5 * MS)
        cpu, dram = run.number("cpu:0"), run.number("dram:0")
        wait_until(lambda: len(run.readings(cpu)) >= 3)
        zone = tree.zones["intel-rapl:0"]
        zone.rename(tmp_path / "away")
        wait_until(lambda: len(run.notes("sensor_lost")) >= 1)
        wait_until(lambda: not any(channel.sensor == "rapl" for channel in run.source._returning[0].present))
        seen = len(run.readings(cpu))
        (tmp_path / "away").rename(zone)
        energy = zone / "energy_uj"
        value = energy.read_bytes()
        energy.unlink()  # another file under the old name, as after a reload of the driver
        energy.write_bytes(b"%020d\n" % 3_000_000)
        wait_until(lambda: energy in opened)
        assert len(run.readings(cpu)) == seen
        assert run.notes("sensor_back") == []
        denied.clear()
        wait_until(lambda: len(run.readings(cpu)) > seen and len(run.readings(dram)) > 0)
        wait_until(lambda: any("cpu:0 energy" in text for text in run.notes("sensor_back")))
        assert value != energy.read_bytes()
        assert run.readings(cpu)[-1][1] == 3.0
        assert not any(value == 0.0 for _, value in run.readings(cpu))
        meter = RunningEnergy(run.source.channels, run.source.cpus)
        for batch in run.batches:
            meter.update(batch)
        # 10 J before and 3 J after: whatever happened in between, nobody saw it.
        assert [each.energy_j for each in meter.devices() if each.device == "cpu:0"] == [0.0]
    assert all(path.name == "energy_uj" for path in opened)


def test_a_driver_that_is_loaded_anew(tmp_path: Path, tree: PowercapTree, monkeypatch: pytest.MonkeyPatch):
    spec = tmp_path / "gpus.spec"
    monkeypatch.setenv("FAKE_NVML", str(spec))
    gpu = GpuSpec(high_w=200.0, pcie=False)
    write_spec(spec, [gpu])
    with in_process(tmp_path), program() as process:
        settings = sensor_settings(tmp_path, tree.root, visible=None)
        with running(settings) as run:
            run.source.add("a", process.pid, True, 100 * MS)
            power = run.number("gpu:0", "power")
            wait_until(lambda: len(run.readings(power)) >= 3)
            write_spec(spec, [gpu], init_error=9, driver_load=1)
            wait_until(lambda: any("gpu:0 power" in text for text in run.notes("sensor_lost")))
            seen = len(run.readings(power))
            write_spec(spec, [gpu], driver_load=1)
            wait_until(lambda: any("gpu:0 power" in text for text in run.notes("sensor_back")))
            wait_until(lambda: len(run.readings(power)) > seen)
            assert {value for _, value in run.readings(power)} == {200.0}
            wait_until(lambda: "gpu:0" in run.source.gpu_sessions())
            assert run.source.gpu_sessions() == {"gpu:0": frozenset({""})}


def test_gpus_that_a_new_driver_numbers_otherwise(
    tmp_path: Path, tree: PowercapTree, monkeypatch: pytest.MonkeyPatch
):
    """First one is missing, so that the other has its index; then it comes back behind that."""
    spec = tmp_path / "gpus.spec"
    monkeypatch.setenv("FAKE_NVML", str(spec))
    one, other = (GpuSpec(high_w=watts, pcie=False).at(n) for n, watts in enumerate((100.0, 200.0)))
    write_spec(spec, [one, other])
    with in_process(tmp_path), program() as process:
        settings = sensor_settings(tmp_path, tree.root, visible=None)
        with running(settings) as run:
            run.source.add("a", process.pid, True, 100 * MS)
            powers = [run.number(device, "power") for device in ("gpu:0", "gpu:1")]

            def comes_back(device: str) -> None:
                power = run.number(device, "power")
                wait_until(lambda: any(f"{device} power" in text for text in run.notes("sensor_back")))
                seen = len(run.readings(power))
                wait_until(lambda: len(run.readings(power)) > seen)

            wait_until(lambda: all(run.readings(power) for power in powers))
            write_spec(spec, [other], driver_load=1)
            comes_back("gpu:1")
            assert not any("gpu:0 power" in text for text in run.notes("sensor_back"))
            write_spec(spec, [other, one], driver_load=2)
            comes_back("gpu:0")
            watts = [{value for _, value in run.readings(power)} for power in powers]
            assert watts == [{100.0}, {200.0}]


def test_clock_step_and_suspension_are_told_apart(tmp_path: Path, tree: PowercapTree):
    now = {"wall": 1_700_000_000 * SECOND, "mono": 5 * SECOND, "boot": 5 * SECOND}
    clock = Clock(lambda: now["wall"], lambda: now["mono"], lambda _: None)
    settings = sensor_settings(tmp_path, tree.root)
    source = Source(discover(settings), settings, clock, boot_ns=lambda: now["boot"])

    def notes(**moved_ns: int) -> list[tuple[str, str]]:
        for name in now:
            now[name] += SECOND
        for name, by_ns in moved_ns.items():
            now[name] += by_ns
        batch = source.drain()
        return [(note.name, note.detail) for note in batch.notes] if batch is not None else []

    assert notes() == []
    assert notes(wall=400_000) == []  # slewed
    assert notes(wall=-90 * SECOND) == [("clock_step", "the wall clock was set by -90000.0 ms")]
    asleep = [("suspended", "the machine was suspended for 7200.000 s")]
    assert notes(wall=7200 * SECOND, boot=7200 * SECOND) == asleep
    both = notes(wall=7201 * SECOND, boot=7200 * SECOND)
    assert both == [*asleep, ("clock_step", "the wall clock was set by +1000.0 ms")]
    assert notes() == []


def test_a_session_that_goes_on_keeps_its_numbers(tmp_path: Path, tree: PowercapTree):
    with program() as process:
        with running(sensor_settings(tmp_path, tree.root), folder=tmp_path / "state") as run:
            before = dict(run.source.channels)
            numbers = [*run.source.add("a", process.pid, True, 10 * MS)]
            wait_until(lambda: len(run.readings(numbers[0])) > 1)
        shutil.rmtree(tmp_path / "powercap" / "intel-rapl" / "intel-rapl:0" / "intel-rapl:0:0")
        with running(sensor_settings(tmp_path, tree.root), folder=tmp_path / "state") as again:
            kept = again.source.add("a", process.pid, False, 10 * MS, channels=numbers, start_s=[7.0])
            assert [*kept] == numbers
            assert min(again.source.add("b", process.pid, False, 10 * MS)) > max(*numbers, *before)
            wait_until(lambda: len(again.readings(numbers[0])) > 1)
            assert again.readings(numbers[0])[0][1] >= 7.0
            names = {channel.name for channel in again.source.channels.values()}
            assert "cpu:0/core energy" not in names
            assert {n: c.name for n, c in again.source.channels.items()} == {
                n: c.name for n, c in before.items() if c.name in names
            }
