"""Energies against exact ones: whole numbers of µJ and ns, so nothing is approximate but what says so."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smaragdine.daemon.log import Batch
from smaragdine.daemon.running_energy import DeviceUse, RunningEnergy
from smaragdine.daemon.totals import Counter, EnergyLine
from smaragdine.monitor.sampler import Note
from smaragdine.sensors.base import Channel

MS = 1_000_000
SECOND = 1_000 * MS
START = 1_700_000_000 * SECOND
CPU, DRAM, BUSY, MONITOR, GPU_W, GPU_J, CORE = range(7)
WRAPS_J = 262_143.0


def channel(
    device: str, quantity: str, kind: str = "counter", sensor: str = "rapl", **more: object
) -> Channel:
    unit = {"energy": "J", "power": "W"}.get(quantity, "s")
    return Channel(device, quantity, unit, kind, "measured", 1.0, sensor, **more)  # type: ignore[arg-type]


CHANNELS = {
    CPU: channel("cpu:0", "energy", wraps_at=WRAPS_J),
    DRAM: channel("dram:0", "energy", wraps_at=WRAPS_J),
    BUSY: channel("cpu:0", "busy", sensor="activity"),
    MONITOR: channel("cpu:0", "monitor", sensor="activity"),
    CORE: channel("cpu:0/core", "energy", scope="part"),
}
GPU = {
    GPU_W: Channel("gpu:0", "power", "W", "sample", "measured", 20.0, "nvml", window_ms=20.0),
    GPU_J: channel("gpu:0", "energy", sensor="nvml"),
}


def batch(rows: list[tuple[int, int, float]], notes: tuple[Note, ...] = ()) -> Batch:
    t_ns, number, value = zip(*rows, strict=True) if rows else ((), (), ())
    return Batch(
        0,
        np.array(t_ns, dtype=np.int64),
        np.array(number, dtype=np.uint32),
        np.array(value, dtype=np.float64),
        notes,
    )


def program(number: int) -> dict[int, Channel]:
    return {number: channel("cpu:0", "program", sensor="activity")}


def of(energies: list[DeviceUse], device: str) -> DeviceUse:
    [found] = [energy for energy in energies if energy.device == device]
    return found


def total_j(meter: RunningEnergy, device: str) -> float:
    [found] = [each.energy_j for each in meter.devices() if each.device == device]
    return found


@given(st.integers(0, 999), st.lists(st.integers(0, 900), min_size=1, max_size=50))
def test_a_counter_is_followed_over_its_wrapping_round(start: int, steps: list[int]):
    meter = RunningEnergy({0: channel("cpu:0", "energy", wraps_at=1000e-6)}, {})
    count, t_ns = start, START
    meter.update(batch([(t_ns, 0, count / 1e6)]))
    for step in steps:
        count = (count + step) % 1000
        t_ns += MS
        meter.update(batch([(t_ns, 0, count / 1e6)]))
    assert total_j(meter, "cpu:0") == sum(steps) / 1e6


def test_a_counter_that_was_set_back_brings_nothing():
    counter = Counter(EnergyLine(), wraps_at=262_143_000_000, joules=1e-6)
    t_ns = np.array([START, START + SECOND, START + 2 * SECOND, START + 3 * SECOND])
    counter.add(t_ns, [200_000_000_000, 200_100_000_000, 5, 105])
    assert counter.line.total == 100_000_000 + 100


def test_across_a_loss_nothing_is_invented():
    meter = RunningEnergy(CHANNELS, {0: 4})
    lost = Note(START + 250 * MS, "sensor_lost", "cpu:0 energy: gone", (CPU,))
    rows = [(START, CPU, 10.0), (START + 200 * MS, CPU, 30.0)]
    # The way back is in the same batch: what is after the note is after the loss.
    rows += [(START + 300 * MS, CPU, 1000.0), (START + 400 * MS, CPU, 1004.0)]
    meter.update(batch(rows, (lost,)))
    assert total_j(meter, "cpu:0") == 24.0
    meter.update(batch([], (Note(START + 450 * MS, "sensor_lost", "", (CPU,)),)))
    meter.update(batch([(START + 500 * MS, CPU, 0.5), (START + 600 * MS, CPU, 0.75)]))
    assert total_j(meter, "cpu:0") == 24.25


def test_after_a_suspension_counters_begin_anew():
    meter = RunningEnergy({CPU: CHANNELS[CPU]}, {})
    meter.update(batch([(START, CPU, 262_000.0)]))
    hour = 3600 * SECOND
    meter.update(batch([(START + hour, CPU, 7.0)], (Note(START + hour, "suspended", ""),)))
    # The reading of the batch itself may be from before or after: only later differences count.
    before = total_j(meter, "cpu:0")
    meter.update(batch([(START + hour + SECOND, CPU, 9.0)]))
    meter.update(batch([(START + hour + 2 * SECOND, CPU, 12.0)]))
    assert total_j(meter, "cpu:0") - before == 3.0


def test_parts_and_other_telemetry_are_not_devices():
    meter = RunningEnergy({**CHANNELS, **GPU}, {0: 4})
    meter.update(batch([(START + i * MS, CORE, float(i)) for i in range(10)]))
    assert meter.devices() == []


def samples(meter: RunningEnergy, begin_ns: int, count: int, power_w: float) -> None:
    meter.update(batch([(begin_ns + (i + 1) * 20 * MS, GPU_W, power_w) for i in range(count)]))


def gpu_power_w(meter: RunningEnergy) -> float | None:
    [gpu] = meter.devices()
    return gpu.power_w


def test_a_device_that_is_lost_or_silent_has_no_power():
    now_ns = START
    meter = RunningEnergy({GPU_W: GPU[GPU_W]}, {}, wall_ns=lambda: now_ns)
    samples(meter, START, 100, 700.0)
    now_ns = START + 4 * SECOND  # samples come a second late, and more
    assert gpu_power_w(meter) == pytest.approx(700.0)
    lost = Note(START + 2 * SECOND, "sensor_lost", "gpu:0 power: fell off the bus", (GPU_W,))
    meter.update(batch([], (lost,)))
    assert gpu_power_w(meter) is None
    # What is between is no second of low power.
    samples(meter, START + 2_500 * MS, 10, 300.0)
    assert gpu_power_w(meter) == pytest.approx(300.0)
    now_ns = START + 3600 * SECOND
    assert gpu_power_w(meter) is None
    assert total_j(meter, "gpu:0") == 1460.0


def test_a_slow_device_keeps_its_power_between_its_readings():
    slow = Channel("wall", "power", "W", "sample", "measured", 10_000.0, "plug-in")
    now_ns = START + 25 * SECOND
    meter = RunningEnergy({0: slow}, {}, wall_ns=lambda: now_ns)
    meter.update(batch([(START, 0, 90.0), (START + 10 * SECOND, 0, 120.0)]))
    assert gpu_power_w(meter) == pytest.approx(90.0)


def test_samples_alone_are_summed_over_their_windows():
    meter = RunningEnergy({GPU_W: GPU[GPU_W]}, {})
    samples(meter, START, 50, 100.0)
    assert total_j(meter, "gpu:0") == 100.0
    # A gap of a second: the sample after it covers its own window, and no more.
    samples(meter, START + 2 * SECOND, 1, 300.0)
    assert total_j(meter, "gpu:0") == 106.0


def test_the_counter_sets_the_level_and_samples_say_what_came_since():
    meter = RunningEnergy(GPU, {})
    samples(meter, START, 100, 90.0)  # 180 J in two seconds, where there were 200
    meter.update(batch([(START + 1 * SECOND, GPU_J, 5000.0)]))
    meter.update(batch([(START + 2 * SECOND, GPU_J, 5100.0)]))
    assert total_j(meter, "gpu:0") == 90.0 + 100.0  # samples until the first anchor, the counter from there
    samples(meter, START + 2 * SECOND, 25, 90.0)
    assert total_j(meter, "gpu:0") == 190.0 + 45.0


def test_a_counter_that_comes_before_its_samples_waits_for_them():
    meter = RunningEnergy(GPU, {})
    meter.update(batch([(START + 1 * SECOND, GPU_J, 5000.0)]))
    samples(meter, START, 50, 90.0)
    meter.update(batch([(START + 2 * SECOND, GPU_J, 5100.0)]))
    samples(meter, START + SECOND, 50, 90.0)
    assert total_j(meter, "gpu:0") == 190.0


def test_a_total_that_was_too_high_waits_instead_of_falling():
    meter = RunningEnergy(GPU, {})
    samples(meter, START, 100, 110.0)
    meter.update(batch([(START + 1 * SECOND, GPU_J, 5000.0)]))
    meter.update(batch([(START + 2 * SECOND, GPU_J, 5100.0)]))
    assert total_j(meter, "gpu:0") == 220.0
    samples(meter, START + 2 * SECOND, 50, 110.0)
    meter.update(batch([(START + 3 * SECOND, GPU_J, 5200.0)]))
    assert total_j(meter, "gpu:0") == 320.0
    samples(meter, START + 3 * SECOND, 50, 100.0)
    meter.update(batch([(START + 4 * SECOND, GPU_J, 5300.0)]))
    # The ten joules it was too high by have been paid now that the samples are right.
    assert total_j(meter, "gpu:0") == 110.0 + 300.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(10, 700), st.integers(-30, 30)), min_size=3, max_size=12))
def test_whatever_the_samples_say_the_counter_decides_and_no_total_falls(seconds: list[tuple[int, int]]):
    meter = RunningEnergy(GPU, {})
    samples(meter, START - SECOND, 50, 50.0)
    counted_j = 1000.0
    meter.update(batch([(START, GPU_J, counted_j)]))
    last_j = begin_j = total_j(meter, "gpu:0")
    for i, (power_w, error_percent) in enumerate([*seconds, (500, 0), (500, 0), (500, 0)]):
        samples(meter, START + i * SECOND, 50, power_w * (1 + error_percent / 100))
        counted_j += power_w
        meter.update(batch([(START + (i + 1) * SECOND, GPU_J, counted_j)]))
        assert total_j(meter, "gpu:0") >= last_j
        last_j = total_j(meter, "gpu:0")
    # What the worst second was too high by is less than what three more of 500 W bring.
    if sum(p * max(e, 0) / 100 for p, e in seconds) < 1400:
        assert last_j - begin_j == pytest.approx(counted_j - 1000.0, abs=1e-4)


@dataclass
class Machine:
    """One socket of four CPUs, read every 100 ms."""

    meter: RunningEnergy = field(default_factory=lambda: RunningEnergy(CHANNELS, {0: 4}))
    now_ns: int = START
    totals: dict[int, Fraction] = field(default_factory=dict)

    def step(self, *, power_w: float, busy: float, programs: dict[int, float], monitor: float = 0.0) -> None:
        """100 ms at this power, with so many CPUs busy, of which so many by each program's channel."""
        self.now_ns += 100 * MS
        rates = {CPU: power_w, DRAM: power_w / 4, BUSY: busy, MONITOR: monitor, **programs}
        for number, rate in rates.items():
            self.totals[number] = self.totals.get(number, Fraction(0)) + Fraction(rate) / 10
        self.meter.update(batch([(self.now_ns, number, float(v)) for number, v in self.totals.items()]))

    def seconds(self, count: float, **rates: object) -> None:
        for _ in range(round(10 * count)):
            self.step(**rates)  # type: ignore[arg-type]


def idle_first(machine: Machine, programs: dict[int, float], power_w: float = 20.0) -> None:
    """More than a second at the power that is then the static one."""
    machine.step(power_w=power_w, busy=0, programs=dict.fromkeys(programs, 0.0))
    machine.seconds(2.1, power_w=power_w, busy=0, programs=dict.fromkeys(programs, 0.0))


def test_dynamic_power_goes_by_busy_time_and_static_power_by_occupancy():
    machine = Machine()
    machine.meter.add("a", program(100), begin_ns=START)
    idle_first(machine, {100: 0})
    machine.seconds(10, power_w=100.0, busy=2.0, programs={100: 0.5})
    machine.step(power_w=20.0, busy=0, programs={100: 0.0})
    energies = machine.meter.energies("a", machine.now_ns)
    cpu, dram = of(energies, "cpu:0"), of(energies, "dram:0")
    # 20 W static × 0.5 of 4 CPUs + 80 W dynamic × 0.5 of 2 busy ones, for 10 s.
    assert cpu.own_j == pytest.approx(10 * (20 * 0.5 / 4 + 80 * 0.5 / 2), abs=1e-3)
    assert dram.own_j == pytest.approx(cpu.own_j / 4, abs=1e-3)
    assert cpu.own_exclusive_j == cpu.own_j
    # From the first reading on: 2.1 s idle, 10 s of work, 0.1 s idle.
    assert cpu.energy_j == pytest.approx(20 * 2.2 + 1000, abs=1e-3)
    assert "20 W" in cpu.basis
    assert "lowest second" in cpu.basis


def lightly_loaded(asks: int) -> tuple[DeviceUse, DeviceUse]:
    """A second at 20 W with a fiftieth of a CPU at work, ten times; asked so often in each step of 100 ms.

    The socket is read 50 ms before the programs, as the coarse grid does it. Before the end, and at it.
    """
    meter = RunningEnergy(CHANNELS, {0: 4})
    meter.add("a", program(100), begin_ns=START)
    for i in range(100):
        t_ns = START + i * 100 * MS
        rows = [(t_ns - 50 * MS, CPU, 2.0 * i), (t_ns, BUSY, i / 500), (t_ns, 100, i / 1000)]
        meter.update(batch(rows))
        for _ in range(asks):
            meter.energies("a", t_ns)
    end_ns = START + 9_900 * MS
    return of(meter.energies("a", end_ns), "cpu:0"), of(meter.remove("a", end_ns), "cpu:0")


def test_asking_for_a_sessions_energy_does_not_change_it():
    before_end, at_end = lightly_loaded(asks=0)
    assert before_end.own_j is not None
    assert at_end.own_j is not None
    # All but nothing is dynamic: a hundredth of one CPU of four for ten seconds of 20 W.
    assert 0.3 < before_end.own_j < at_end.own_j < 1.0
    for asks in (1, 2, 3):
        assert lightly_loaded(asks) == (before_end, at_end)


def test_a_process_in_two_sessions_counts_once_in_the_sum():
    inside = {"inner": "outer"}
    machine = Machine(RunningEnergy(CHANNELS, {0: 4}, inside=lambda: inside))
    for key, number in (("outer", 100), ("inner", 101), ("other", 102)):
        machine.meter.add(key, program(number), begin_ns=START)
    idle_first(machine, {100: 0, 101: 0, 102: 0})
    machine.seconds(10, power_w=100.0, busy=4.0, programs={100: 3.0, 101: 1.0, 102: 1.0})
    machine.step(power_w=20.0, busy=0, programs={100: 0.0, 101: 0.0, 102: 0.0})
    own = {
        key: of(machine.meter.energies(key, machine.now_ns), "cpu:0") for key in ("outer", "inner", "other")
    }
    per_cpu_j = 10 * 100 / 4
    assert [own[key].own_j for key in own] == pytest.approx([3 * per_cpu_j, per_cpu_j, per_cpu_j], abs=1e-3)
    assert [own[key].own_exclusive_j for key in own] == pytest.approx(
        [2 * per_cpu_j, per_cpu_j, per_cpu_j], abs=1e-3
    )


rates = st.integers(0, 8).map(lambda n: n / 2)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 200), rates, st.lists(rates, min_size=4, max_size=4), rates),
        min_size=3,
        max_size=30,
    ),
    st.sampled_from([{}, {"s1": "s0"}, {"s1": "s0", "s2": "s1"}, {"s1": "s0", "s2": "s0", "s3": "s2"}]),
)
def test_shares_never_add_up_to_more_than_the_device_used(
    steps: list[tuple[int, float, list[float], float]], inside: dict[str, str]
):
    """Whatever is read, even programs that are busier than the machine."""
    machine = Machine(RunningEnergy(CHANNELS, {0: 4}, inside=lambda: inside))
    for i in range(4):
        machine.meter.add(f"s{i}", program(100 + i), begin_ns=START)
    for power_w, busy, programs, monitor in steps:
        machine.step(
            power_w=power_w,
            busy=busy,
            programs={100 + i: rate for i, rate in enumerate(programs)},
            monitor=monitor / 10,
        )
    alone = [machine.meter.energies(f"s{i}", machine.now_ns) for i in range(4)]
    top = [i for i in range(4) if f"s{i}" not in inside]
    for device in ("cpu:0", "dram:0"):
        device_uj = round(total_j(machine.meter, device) * 1e6)
        exclusive_uj = [round((of(each, device).own_exclusive_j or 0) * 1e6) for each in alone]
        own_uj = [round((of(each, device).own_j or 0) * 1e6) for each in alone]
        assert sum(exclusive_uj) <= device_uj
        assert sum(own_uj[i] for i in top) <= device_uj
        assert all(part >= 0 for part in exclusive_uj)


@dataclass
class OneGpu:
    """A GPU whose samples come a second's at a time, as the driver hands them out."""

    told: dict[str, frozenset[str]] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)
    now_ns: int = START

    def __post_init__(self) -> None:
        self.meter = RunningEnergy(
            GPU, {}, inside=lambda: self.inside, gpu_sessions=lambda: self.told, wall_ns=lambda: self.now_ns
        )

    def add(self, *keys: str) -> None:
        for key in keys:
            self.meter.add(key, {}, self.now_ns)

    def look(self, *on_it: str) -> None:
        self.told["gpu:0"] = frozenset(on_it)
        self.meter.update(batch([]))

    def second(self, power_w: float, end_ns: int | None = None) -> None:
        """The samples of the second that ends then."""
        samples(self.meter, (end_ns or self.now_ns) - SECOND, 50, power_w)

    def used_j(self, key: str) -> tuple[float | None, float | None]:
        energy = of(self.meter.energies(key, self.now_ns), "gpu:0")
        return energy.own_j, energy.own_exclusive_j


def test_a_gpu_is_shared_equally_among_those_on_it():
    gpu = OneGpu(inside={"b": "a"})
    gpu.add(*"abc")
    gpu.now_ns += SECOND
    gpu.second(100.0)
    assert gpu.used_j("a") == (None, None)  # nobody tells who is on it
    gpu.look("b", "c")
    gpu.now_ns += SECOND
    gpu.second(100.0)
    gpu.look("c", "")
    gpu.now_ns += SECOND
    gpu.second(60.0)
    assert [gpu.used_j(key) for key in "abc"] == [(50.0, 0.0), (50.0, 50.0), (80.0, 80.0)]
    assert of(gpu.meter.energies("a", gpu.now_ns), "gpu:0").energy_j == 260.0
    # A session that is over has no share any more, though the list is a second old.
    gpu.meter.remove("c")
    gpu.look("b", "c")
    gpu.now_ns += SECOND
    gpu.second(10.0)
    assert gpu.used_j("b") == (60.0, 60.0)


def test_a_gpus_energy_is_whose_it_was_when_it_was_used_and_not_when_it_was_read():
    gpu = OneGpu()
    gpu.add("a")
    gpu.look("a")
    gpu.now_ns += 500 * MS
    gpu.meter.remove("a")
    gpu.add("b")
    gpu.look("b")
    gpu.now_ns += 500 * MS
    # The first half of this second was the other's, who is gone.
    gpu.second(700.0)
    assert gpu.used_j("b") == (350.0, 350.0)
    gpu.look("b", "")
    gpu.now_ns += SECOND
    gpu.second(100.0)
    assert gpu.used_j("b") == (400.0, 400.0)


def test_who_ends_before_the_readings_come_leaves_its_part_to_nobody():
    gpu = OneGpu(inside={"inner": "outer"})
    gpu.add("outer", "inner", "other")
    gpu.look("inner", "other")
    gpu.now_ns += SECOND
    gpu.inside.clear()
    gpu.meter.remove("inner")
    gpu.second(100.0)
    assert gpu.used_j("other") == (50.0, 50.0)
    assert gpu.used_j("outer") == (50.0, 0.0)  # it lay around the inner one at the time


def test_while_a_gpu_does_not_tell_its_energy_is_nobodys():
    gpu = OneGpu()
    gpu.add("a")
    gpu.look("a")
    gpu.now_ns += SECOND
    del gpu.told["gpu:0"]
    gpu.second(100.0)
    gpu.now_ns += SECOND
    gpu.look("a")
    gpu.second(100.0)
    gpu.now_ns += SECOND
    gpu.second(100.0)
    assert gpu.used_j("a") == (200.0, 200.0)


def test_a_clock_that_is_set_gives_nobody_what_another_used():
    gpu = OneGpu()
    gpu.add("a")
    gpu.look("a")
    gpu.now_ns += SECOND
    gpu.second(100.0)
    gpu.now_ns -= 3600 * SECOND
    gpu.meter.update(batch([], (Note(gpu.now_ns, "clock_step", ""),)))
    gpu.now_ns += SECOND
    gpu.second(100.0)
    own_j, _ = gpu.used_j("a")
    assert own_j is not None
    assert 100.0 <= own_j <= 200.0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 900), st.frozensets(st.sampled_from(["a", "b", "c", ""])), rates),
        min_size=2,
        max_size=12,
    ),
    st.sampled_from([{}, {"b": "a"}, {"b": "a", "c": "b"}]),
)
def test_shares_of_a_gpu_never_add_up_to_more_than_it_used(
    looks: list[tuple[int, frozenset[str], float]], inside: dict[str, str]
):
    gpu = OneGpu(inside=inside)
    gpu.add(*"abc")
    gpu.now_ns = read_ns = START + SECOND
    gpu.second(10.0)
    for wait_ms, on_it, watts in looks:
        gpu.look(*on_it)
        gpu.now_ns += wait_ms * MS
        while read_ns + SECOND <= gpu.now_ns:
            read_ns += SECOND
            gpu.second(watts, read_ns)
    used = [gpu.used_j(key) for key in "abc"]
    total = sum(each.energy_j for each in gpu.meter.devices())
    assert sum(alone or 0 for _, alone in used) <= total + 1e-9
    assert all((own or 0) <= total + 1e-9 for own, _ in used)


def test_a_session_begins_when_it_began_and_not_when_the_gpu_was_read():
    meter = RunningEnergy(GPU, {})
    samples(meter, START, 50, 100.0)
    meter.add("a", program(100), begin_ns=START + 1_500 * MS)
    samples(meter, START + SECOND, 100, 200.0)
    # 1.5 s at 200 W, the last half of it not read yet and carried on.
    samples(meter, START + 3 * SECOND, 1, 200.0)
    assert of(meter.energies("a", START + 3_500 * MS), "gpu:0").energy_j == pytest.approx(400.0, abs=1e-3)


def test_a_wall_clock_that_is_set_does_not_move_energies():
    machine = Machine()
    machine.meter.add("a", program(100), begin_ns=START)
    idle_first(machine, {100: 0})
    machine.seconds(2, power_w=100.0, busy=2.0, programs={100: 1.0})
    before = of(machine.meter.energies("a", machine.now_ns), "cpu:0")
    machine.now_ns -= 3600 * SECOND
    machine.meter.update(batch([], (Note(machine.now_ns, "clock_step", ""),)))
    machine.seconds(2, power_w=100.0, busy=2.0, programs={100: 1.0})
    after = of(machine.meter.energies("a", machine.now_ns), "cpu:0")
    assert after.energy_j - before.energy_j == pytest.approx(200.0, abs=1e-3)
    # The interval across the step is nobody's, and the one that runs is not over.
    assert after.own_j is not None
    assert before.own_j is not None
    assert 0 < after.own_j - before.own_j <= 100.0


def test_a_restart_goes_on_from_the_state_and_the_batches_after_it():
    machine = Machine()
    machine.meter.add("a", program(100), begin_ns=START)
    idle_first(machine, {100: 0})
    machine.seconds(3, power_w=100.0, busy=2.0, programs={100: 1.0})
    before = of(machine.meter.energies("a", machine.now_ns), "cpu:0")
    state = json.loads(json.dumps(machine.meter.state()))
    machine.meter = RunningEnergy(CHANNELS, {0: 4}, wall_ns=lambda: machine.now_ns)
    machine.meter.load(state)
    machine.meter.go_on()
    [last_s] = machine.meter.last_values([100])
    assert last_s == pytest.approx(3.0)
    machine.meter.add("a", program(100))
    # The daemon's own totals begin anew, the hardware's and the session's go on.
    machine.totals[BUSY] = machine.totals[MONITOR] = Fraction(0)
    machine.seconds(3.1, power_w=100.0, busy=2.0, programs={100: 1.0})
    after = of(machine.meter.energies("a", machine.now_ns), "cpu:0")
    assert after.energy_j - before.energy_j == pytest.approx(310.0, abs=1e-3)
    assert after.own_j is not None
    assert before.own_j is not None
    assert after.own_j > before.own_j + 50
    assert machine.meter.last_values([100]) == [pytest.approx(6.1)]


@pytest.mark.parametrize("away_s", [45, 3600])
@pytest.mark.parametrize("fed_again", [False, True], ids=["saved", "fed again"])
def test_after_a_boot_no_counter_is_taken_for_one_that_wrapped_round(away_s: int, fed_again: bool):
    now_ns = START + away_s * SECOND
    before = RunningEnergy(CHANNELS, {0: 4})
    before.update(batch([(START, CPU, 100_000.0), (START + SECOND, CPU, 100_020.0)]), 1)
    state = json.loads(json.dumps(before.state()))
    state["gauges"]["boot_id"] = "another"
    meter = RunningEnergy(CHANNELS, {0: 4}, wall_ns=lambda: now_ns)
    meter.load(state)
    if fed_again:
        meter.update(batch([(START + 2 * SECOND, CPU, 100_040.0)]), 2)
    meter.go_on()
    total_before_j = total_j(meter, "cpu:0")
    # 150 J since the boot. As a wrap of the old count they would be 162 kJ.
    meter.update(batch([(now_ns, CPU, 150.0)]), 3)
    meter.update(batch([(now_ns + SECOND, CPU, 170.0)]), 4)
    assert total_j(meter, "cpu:0") - total_before_j == 20.0


def test_batches_fed_again_do_not_hide_how_long_nobody_looked():
    now_ns = START + 3600 * SECOND
    before = RunningEnergy(CHANNELS, {0: 4})
    before.update(batch([(START, CPU, 100.0)]), 1)
    meter = RunningEnergy(CHANNELS, {0: 4}, wall_ns=lambda: now_ns)
    meter.load(json.loads(json.dumps(before.state())))
    meter.update(batch([(START + SECOND, CPU, 120.0)]), 2)
    meter.go_on()
    before_j = total_j(meter, "cpu:0")
    # The counter may have gone round any number of times in an hour.
    meter.update(batch([(now_ns, CPU, 5000.0)]), 3)
    assert total_j(meter, "cpu:0") == before_j


def test_memory_does_not_grow_with_time():
    machine = Machine()
    machine.meter.add("a", program(100), begin_ns=START)
    machine.seconds(200, power_w=100.0, busy=2.0, programs={100: 1.0})
    sizes = [len(line.t_ns) for line in _lines(machine.meter)]
    assert max(sizes) < 600


def _lines(meter: RunningEnergy) -> list[EnergyLine]:
    socket = meter._sockets[0]
    lines = [line for device in meter._gauges.devices.values() for line in device.lines]
    return [*lines, socket.busy.line, socket.monitor.line, *(each.line for each in socket.programs.values())]
