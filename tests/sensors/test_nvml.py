"""The NVML sensor against a fake driver with exact physics, through the real binding."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pynvml
import pytest

from nvml_fake import (
    AMPERE,
    MS_NS,
    PASCAL,
    TURING,
    GpuSpec,
    build_cuda,
    energy_j,
    in_process,
    nvml_environment,
    simulated_time,
    write_spec,
)
from smaragdine.clock import Clock
from smaragdine.sensors.base import Channel, Found, Sensor, SensorLost
from smaragdine.sensors.nvml import discover
from smaragdine.sensors.nvml.cuda import bus_key, cuda_bus_ids, has_indices, visible_gpus
from smaragdine.sensors.nvml.gpus import Gpu, Health, usual_step
from smaragdine.sensors.nvml.power import (
    CounterSensor,
    Pace,
    PolledSensor,
    Ring,
    RingSensor,
    find_pace,
)

SRC = Path(discover.__file__).parents[2]
BEGIN_NS = 1_800_000_000_123_456_789
QUICK = GpuSpec(counter=False)  # nothing to watch at start: opens at once
SQUARE = GpuSpec(low_w=60, high_w=300, period_ms=130, duty=0.3)

Readings = dict[str, list[tuple[int, float]]]


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "gpus.spec"
    monkeypatch.setenv("FAKE_NVML", str(path))
    with in_process(tmp_path):
        theirs.clock = simulated_time(BEGIN_NS)
        yield path


class Theirs:
    """The GPUs' own time, in which whoever reads them in this process lives."""

    clock: Clock


theirs = Theirs()


def look(visible: str | None = None, device_order: str | None = None, *, pcie: bool = False) -> Found:
    return discover.open_sensors(visible=visible, device_order=device_order, pcie=pcie, clock=theirs.clock)


def close(found: Found) -> None:
    for sensor in found.sensors:
        sensor.close()


def channels(found: Found) -> dict[str, Channel]:
    return {c.name: c for sensor in found.sensors for c in sensor.channels()}


def recorded_devices(found: Found) -> list[str]:
    return sorted({c.device for c in channels(found).values()})


def record(sensors: Sequence[Sensor], seconds: float, lost: list[str] | None = None) -> Readings:
    """What a lane's thread does: each sensor when it is due; then close them all."""
    readings: Readings = {c.name: [] for sensor in sensors for c in sensor.channels()}
    clock = theirs.clock
    end_s = clock.mono_ns() / 1e9 + seconds
    due_s = dict.fromkeys(sensors, 0.0)

    def keep(sensor: Sensor, new: Sequence[tuple[int, int, float]]) -> None:
        for t_ns, channel, value in new:
            readings[sensor.channels()[channel].name].append((t_ns, value))

    while due_s and (now_s := clock.mono_ns() / 1e9) < end_s:
        sensor = min(due_s, key=lambda s: due_s[s])
        if due_s[sensor] > now_s:
            clock.sleep_s(max(1e-6, min(due_s[sensor], end_s) - now_s))
            continue
        due_s[sensor] = now_s + sensor.period_ns / 1e9
        try:
            keep(sensor, sensor.read())
        except SensorLost as error:
            if lost is None:
                raise
            lost.append(str(error))
            del due_s[sensor]
    for sensor in sensors:
        keep(sensor, sensor.close())
    return readings


def power_lane(found: Found) -> list[Sensor]:
    return [sensor for sensor in found.sensors if sensor.lane == "nvml"]


def step_ns(gpu: GpuSpec, t_ns: int) -> int:
    """The step of the fake's counter nearest to a time."""
    phase_ns = round(gpu.counter_phase_ms * MS_NS)
    return round((t_ns - phase_ns) / (100 * MS_NS)) * 100 * MS_NS + phase_ns


def check_counter(gpu: GpuSpec, readings: Sequence[tuple[int, float]], stamp_ms: float) -> None:
    """Values are exact at the steps; stamps are near them."""
    late_ms = sorted(abs(t_ns - step_ns(gpu, t_ns)) / MS_NS for t_ns, _ in readings)
    assert late_ms[len(late_ms) // 2] < stamp_ms, late_ms
    for (t0_ns, e0_j), (t1_ns, e1_j) in pairwise(readings):
        exact_j = energy_j(gpu, step_ns(gpu, t0_ns), step_ns(gpu, t1_ns))
        assert e1_j - e0_j == pytest.approx(exact_j, abs=0.002)


# Energy


def test_samples_and_counter_agree_with_the_exact_energy(spec: Path) -> None:
    gpus = [
        dataclasses.replace(SQUARE, counter_cost_us=3000),
        GpuSpec(low_w=80, high_w=650, period_ms=1000, duty=0.5, counter_phase_ms=81, limit_default_w=500),
    ]
    write_spec(spec, gpus)
    before_ns = theirs.clock.wall_ns()
    found = look()
    opened_ns = theirs.clock.wall_ns()
    assert not found.absent
    readings = record(power_lane(found), 3.2)
    close(Found(sensors=[s for s in found.sensors if s.lane != "nvml"]))
    for n, gpu in enumerate(gpus):
        samples = readings[f"gpu:{n} power"]
        stamps_ns = [t_ns for t_ns, _ in samples]
        assert all(b - a == 20 * MS_NS for a, b in pairwise(stamps_ns))
        assert before_ns - 20 * MS_NS <= stamps_ns[0] <= opened_ns + 40 * MS_NS
        measured_j = sum(power_w * 0.02 for _, power_w in samples)
        assert measured_j == pytest.approx(energy_j(gpu, stamps_ns[0] - 20 * MS_NS, stamps_ns[-1]), rel=1e-5)
        anchors = readings[f"gpu:{n} energy"]
        assert 2 <= len(anchors) <= 4
        check_counter(gpu, anchors, stamp_ms=12)
        # The ring reaches over the last anchor, so that the whole run can be levelled.
        assert stamps_ns[-1] >= anchors[-1][0] - 25 * MS_NS
    said = channels(found)
    assert said["gpu:0 power"].detail.startswith("route: samples + counter")
    assert said["gpu:0 power"].kind == "sample"
    assert said["gpu:0 power"].window_ms == said["gpu:0 power"].period_ms == 20
    assert (said["gpu:0 energy"].kind, said["gpu:0 energy"].unit) == ("counter", "J")


def test_counter_alone_sees_the_steps(spec: Path) -> None:
    gpu = dataclasses.replace(SQUARE, samples=False, counter_cost_us=3000)
    write_spec(spec, [gpu])
    found = look()
    assert "gpu:0 power" not in channels(found)
    channel = channels(found)["gpu:0 energy"]
    assert channel.detail.startswith("route: counter; without samples")
    assert channel.period_ms == pytest.approx(100, abs=15)
    readings = record(power_lane(found), 2.0)["gpu:0 energy"]
    assert len(readings) >= 14
    check_counter(gpu, readings, stamp_ms=12)


def test_instant_power_is_what_the_last_25_ms_were(spec: Path) -> None:
    gpu = dataclasses.replace(SQUARE, samples=False, counter=False)
    write_spec(spec, [gpu])
    found = look()
    channel = channels(found)["gpu:0 power"]
    assert channel.detail.startswith("route: instant polling")
    readings = record(power_lane(found), 1.5)["gpu:0 power"]
    assert 8 <= len(readings) <= 25
    for t_ns, power_w in readings[1:]:
        # The stamp may lie a little on either side of the renewal.
        near = [(t_ns + side * 50 * MS_NS) // (100 * MS_NS) * 100 * MS_NS for side in (0, 1, -1)]
        assert any(power_w == pytest.approx(energy_j(gpu, t - 25 * MS_NS, t) / 0.025, abs=0.01) for t in near)


def test_unchanging_instant_power_is_still_reported(spec: Path) -> None:
    write_spec(spec, [GpuSpec(samples=False, counter=False)])
    found = look()
    assert "assumed" in channels(found)["gpu:0 power"].detail
    readings = record(power_lane(found), 1.0)["gpu:0 power"]
    assert len(readings) >= 5
    assert {power_w for _, power_w in readings} == {300.0}


@pytest.mark.parametrize("counter", [True, False])
def test_a_run_shorter_than_one_reading_lies_between_two(spec: Path, counter: bool) -> None:
    write_spec(spec, [QUICK])
    now_ns = 10 * MS_NS

    def sleep_s(seconds: float) -> None:
        nonlocal now_ns
        now_ns += round(seconds * 1e9)

    def read_milli() -> int:
        nonlocal now_ns
        now_ns += MS_NS
        return (now_ns - MS_NS) // (100 * MS_NS) * 5000

    clock = Clock(wall_ns=lambda: now_ns, mono_ns=lambda: now_ns, sleep_s=sleep_s)
    found = look()
    gpu = Gpu(0, None, "", "", "", 0, 0, False)
    if counter:
        pace = Pace(100 * MS_NS, None)
        sensor: Sensor = CounterSensor(gpu, clock, read_milli, pace, alone=True, detail="")
    else:
        sensor = PolledSensor(gpu, clock, read_milli, (100 * MS_NS, True), (None, ""), "")
    (before,) = sensor.read()
    begin_ns = now_ns
    sleep_s(0.02)
    end_ns = now_ns
    (after,) = sensor.close()
    close(found)
    assert before[0] <= begin_ns < end_ns <= after[0]


@pytest.mark.parametrize(
    ("architecture", "device_id", "window_ms"),
    [(AMPERE, 0x2204, 1000), (AMPERE, 0x20B0, None), (TURING, 0x1E04, None)],
)
def test_average_power_has_the_documented_window(
    spec: Path, architecture: int, device_id: int, window_ms: float | None
) -> None:
    gpu = GpuSpec(
        samples=False,
        counter=False,
        instant=False,
        architecture=architecture,
        device_id=device_id,
        period_ms=370,
    )
    write_spec(spec, [gpu])
    found = look()
    channel = channels(found)["gpu:0 power"]
    assert channel.detail.startswith("route: average polling")
    assert "documentation" in channel.detail
    assert channel.window_ms == (window_ms or channel.period_ms)
    assert record(power_lane(found), 0.3)["gpu:0 power"]


def test_samples_without_a_counter_are_used(spec: Path) -> None:
    write_spec(spec, [dataclasses.replace(SQUARE, counter=False, architecture=PASCAL)])
    found = look()
    assert channels(found)["gpu:0 power"].detail.startswith("route: samples; without counter")
    assert len(record(power_lane(found), 0.3)["gpu:0 power"]) >= 10


def test_no_route_at_all_is_absent_with_reasons(spec: Path) -> None:
    write_spec(spec, [GpuSpec(samples=False, counter=False, instant=False, usage=False)])
    found = look()
    (absent,) = found.absent
    assert absent.channel == "gpu:0 power"
    assert all(route in absent.reason for route in ("samples", "counter", "instant", "average"))
    assert absent.remedy
    assert not power_lane(found)
    close(found)


def test_a_counter_that_never_steps_is_not_polled_for_ever(spec: Path) -> None:
    write_spec(spec, [GpuSpec(low_w=0, high_w=0, counter_cost_us=3000)])
    found = look()
    counter = power_lane(found)[0]
    start_ns = theirs.clock.mono_ns()
    assert not counter.read()
    assert theirs.clock.mono_ns() - start_ns < 600 * MS_NS
    start_ns = theirs.clock.mono_ns()
    assert not counter.read()
    assert theirs.clock.mono_ns() - start_ns < 100 * MS_NS
    close(found)


def test_the_usual_step_withstands_jitter_and_gaps() -> None:
    # Every second stamp 6 ms late and three missing: the median difference says 14 or 26.
    stamps = [20 * n + 6 * (n % 2) for n in range(100) if n not in (31, 32, 33)]
    assert usual_step(stamps) == pytest.approx(20, rel=0.02)


def test_a_slow_call_does_not_move_the_counters_stamp(spec: Path) -> None:
    """Steps every 100 ms, and a call of 30 ms across one of them: stamped by prediction, not midway."""
    write_spec(spec, [QUICK])
    now_ns = 0
    polls = iter(range(10_000))

    def sleep_s(seconds: float) -> None:
        nonlocal now_ns
        now_ns += round(seconds * 1e9)

    def read_mj() -> int:
        nonlocal now_ns
        value_mj = now_ns // (100 * MS_NS) * 5000
        now_ns += (30 if next(polls) in slow_polls else 3) * MS_NS
        return value_mj

    clock = Clock(wall_ns=lambda: now_ns, mono_ns=lambda: now_ns, sleep_s=sleep_s)
    slow_polls: set[int] = set()
    pace = find_pace(read_mj, clock)
    assert pace.period_ns == pytest.approx(100 * MS_NS, rel=0.02)
    found = look()
    gpu = Gpu(0, None, "", "", "", 0, 0, False)
    sensor = CounterSensor(gpu, clock, read_mj, pace, alone=True, detail="")
    readings: list[tuple[int, int, float]] = []
    while len(readings) < 20:
        if len(readings) == 10:
            slow_polls = {next(polls) + 1 + n for n in range(3)}
        readings += sensor.read()
        sleep_s(sensor.period_ns / 1e9)
    sensor.close()
    close(found)
    assert all(abs(t_ns - round(t_ns, -8)) <= 7 * MS_NS for t_ns, _, _ in readings)
    assert [value_j for _, _, value_j in readings] == [
        t_ns // (100 * MS_NS) * 5.0 for t_ns in (round(t_ns, -8) for t_ns, _, _ in readings)
    ]


def test_nothing_new_in_the_ring_is_no_error(spec: Path) -> None:
    write_spec(spec, [QUICK])
    found = look()
    seconds = iter(range(1000))
    clock = Clock(wall_ns=theirs.clock.wall_ns, mono_ns=lambda: next(seconds) * 10**9)
    gpu = Gpu(0, pynvml.nvmlDeviceGetHandleByIndex(0), "", "", "", 0, 0, False)
    ring = RingSensor(gpu, clock, Ring(20_000, 2_400_000), "")
    ring.read()
    # Ten looks at an empty ring, seconds apart for all the sensor knows, must not end it.
    assert sum(len(ring.read()) for _ in range(10)) == 0
    ring.close()
    close(found)


def test_a_limit_set_while_running_shows_in_every_reading(spec: Path) -> None:
    gpu = GpuSpec(high_w=400)
    write_spec(spec, [gpu])
    found = look()
    pynvml.nvmlInit()
    pynvml.nvmlDeviceSetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(0), 150_000)
    set_ns = theirs.clock.wall_ns()
    pynvml.nvmlShutdown()
    readings = record(found.sensors, 1.0)
    after = [power_w for t_ns, power_w in readings["gpu:0 power"] if t_ns > set_ns + 20 * MS_NS]
    assert after
    assert set(after) == {150.0}
    (t0_ns, e0_j), *_, (t1_ns, e1_j) = readings["gpu:0 energy"]
    if step_ns(gpu, t0_ns) > set_ns:
        exact_j = energy_j(gpu, step_ns(gpu, t0_ns), step_ns(gpu, t1_ns), limit_w=150)
        assert e1_j - e0_j == pytest.approx(exact_j, abs=0.002)
    assert {limit_w for _, limit_w in readings["gpu:0 power_limit"]} == {150.0}


# Faults


def test_a_lost_gpu_ends_its_own_channels_only(spec: Path) -> None:
    gpus = [SQUARE, SQUARE]
    write_spec(spec, gpus)
    found = look()
    for sensor in found.sensors:
        assert sensor.read() is not None
    write_spec(spec, [dataclasses.replace(SQUARE, lost=True), SQUARE])
    lost: list[str] = []
    readings = record(found.sensors, 2.6, lost)
    own = [s for s in found.sensors if s.channels()[0].device == "gpu:0"]
    assert len(lost) == len(own)
    assert all(line.startswith("gpu:0 ") and "lost" in line for line in lost)
    assert not readings["gpu:0 power"]
    assert len(readings["gpu:1 power"]) >= 40
    assert readings["gpu:1 temperature"]


def test_a_passing_error_is_skipped(spec: Path) -> None:
    write_spec(spec, [SQUARE])
    found = look()
    write_spec(spec, [dataclasses.replace(SQUARE, error=pynvml.NVML_ERROR_UNKNOWN)])
    assert all(not sensor.read() for sensor in found.sensors)
    write_spec(spec, [SQUARE])
    readings = record(found.sensors, 0.4)
    assert all(readings.values())


def test_errors_without_end_are_a_lost_gpu() -> None:
    now_ns = 0
    health = Health("gpu:3", Clock(mono_ns=lambda: now_ns))
    error = pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
    for _ in range(100):
        health.bad(error)  # many within one instant are one hiccup
    health.good()
    for _ in range(4):
        health.bad(error)
        now_ns += 1_000_000_000
    with pytest.raises(SensorLost, match=r"gpu:3 .*Timeout"):
        health.bad(error)


def test_mig_power_is_the_whole_gpus_and_says_so(spec: Path) -> None:
    uuids = ("MIG-11111111-aaaa", "MIG-22222222-bbbb")
    write_spec(spec, [QUICK, dataclasses.replace(QUICK, mig=True, mig_uuids=uuids)])
    for visible in (uuids[1], "MIG-2222", f"MIG-{GpuSpec().at(1).uuid}/1/0"):
        found = look(visible)
        assert recorded_devices(found) == ["gpu:1"]
        assert "whole physical GPU" in channels(found)["gpu:1 power"].detail
        (absent,) = found.absent
        assert absent.channel == "gpu:1/mig power"
        assert absent.remedy
        close(found)
    found = look("MIG-33333333")
    assert not found.sensors
    assert found.absent[0].channel == "gpu power"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "different versions"),
        (pynvml.NVML_ERROR_UNKNOWN, "does not start"),
    ],
)
def test_a_driver_that_does_not_start_is_absent(spec: Path, code: int, words: str) -> None:
    write_spec(spec, [GpuSpec()], init_error=code)
    (absent,) = look().absent
    assert absent.channel == "gpu power"
    assert words in absent.reason
    assert absent.remedy


def test_no_library_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", no_library)
    found = look()
    assert not found.sensors
    (absent,) = found.absent
    assert absent.reason.startswith("libnvidia-ml.so.1 not found: no NVIDIA driver is installed")
    assert "docker run --gpus all" in absent.remedy


def test_a_driver_without_gpus_is_absent(spec: Path) -> None:
    write_spec(spec, [])
    (absent,) = look().absent
    assert "no GPU" in absent.reason


def test_gpus_that_cannot_be_opened_leave_the_others(spec: Path) -> None:
    closed = dataclasses.replace(QUICK, no_permission=True)
    gone = dataclasses.replace(QUICK, lost=True)
    write_spec(spec, [closed, gone, QUICK])
    found = look()
    assert recorded_devices(found) == ["gpu:2"]
    assert [a.channel for a in found.absent] == ["gpu:0 power", "gpu:1 power"]
    assert "/dev/nvidia0" in found.absent[0].remedy
    assert "reset" in found.absent[1].remedy
    close(found)


# Which GPUs


def test_all_gpus_without_the_variable_and_none_with_an_empty_one(spec: Path) -> None:
    write_spec(spec, [QUICK, QUICK])
    found = look()
    assert recorded_devices(found) == ["gpu:0", "gpu:1"]
    close(found)
    for nothing in ("", "-1"):
        found = look(nothing)
        assert not found.sensors
        assert "CUDA_VISIBLE_DEVICES" in found.absent[0].reason


UUIDS = ["GPU-aaaa1111-0", "GPU-aaaa2222-1", "GPU-bbbb3333-2"]


@pytest.mark.parametrize(
    ("value", "positions", "ended"),
    [
        ("0", [0], False),
        ("2,0", [2, 0], False),
        (" 1 , +2x", [1, 2], False),
        ("0,2,-1,1", [0, 2], True),
        ("0,7,1", [0], True),
        ("0,", [0], False),
        ("0,0", [], True),
        ("GPU-bbbb", [2], False),
        ("GPU-AAAA2222-1,GPU-b", [1, 2], False),
        ("GPU-b,GPU-bb", [], True),
        ("GPU-b,0", [2], True),  # forms do not mix
        ("gpu-bbbb", [], True),
        ("GPU-aaaa", [], True),  # not unique
        ("GPU-", [], True),
        ("GPU-cccc,GPU-b", [], True),
        ("nonsense", [], True),
        ("MIG-1234,MIG-1235", [1], False),
        ("MIG-9999,MIG-1234", [], True),
    ],
)
def test_cuda_visible_devices_as_cuda_reads_it(value: str, positions: list[int], ended: bool) -> None:
    seen = visible_gpus(value, UUIDS, [0, 1, 2], {"MIG-1234": 1, "MIG-1235": 1}.get)
    assert seen.positions == positions
    assert bool(seen.ended_by) is ended


def test_only_indices_need_an_order() -> None:
    assert has_indices(" 1,2")
    assert not has_indices("GPU-1,MIG-2")
    assert bus_key("00000000:3B:00.0") == bus_key("0000:3b:00.0") == (0, 0x3B, 0)


def test_mixed_models_are_counted_in_cudas_order(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = dataclasses.replace(QUICK, name="NVIDIA Fake T4")
    write_spec(spec, [slow, QUICK, slow], cuda_order=[1, 0, 2])
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_cuda(tmp_path)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for visible, order, devices in (
        ("0", None, ["gpu:1"]),
        ("0", "FASTEST_FIRST", ["gpu:1"]),
        ("1,2", None, ["gpu:0", "gpu:2"]),
        ("0", "PCI_BUS_ID", ["gpu:0"]),
        (GpuSpec().at(2).uuid, None, ["gpu:2"]),
    ):
        found = look(visible, order)
        assert recorded_devices(found) == devices
        assert not found.absent
        close(found)
    assert cuda_bus_ids("PCI_BUS_ID") == ["0000:3B:00.0", "0000:4B:00.0", "0000:5B:00.0"]


def test_mixed_models_without_cuda_record_all_and_say_so(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    write_spec(spec, [dataclasses.replace(QUICK, name="NVIDIA Fake T4"), QUICK])
    found = look("0")
    assert recorded_devices(found) == ["gpu:0", "gpu:1"]
    (absent,) = found.absent
    assert absent.channel == "gpu selection"
    assert "all GPUs are recorded" in absent.reason
    assert "PCI_BUS_ID" in absent.remedy
    close(found)


def test_an_index_too_high_is_said(spec: Path) -> None:
    write_spec(spec, [QUICK])
    found = look("4")
    assert not found.sensors
    (absent,) = found.absent
    assert "'4'" in absent.reason
    for nothing in ("-1,0", ","):
        (absent,) = look(nothing).absent
        assert absent.channel == "gpu power"
    found = look("0,4")
    assert recorded_devices(found) == ["gpu:0"]
    assert [a.channel for a in found.absent] == ["gpu selection"]
    close(found)


# Telemetry and facts


def test_telemetry_reads_what_the_gpu_supports(spec: Path) -> None:
    gpu = dataclasses.replace(QUICK, utilisation=73, temperature=55, processes=2, memory_w=36.5)
    write_spec(spec, [gpu])
    found = look(pcie=True)
    lanes = {c.quantity: s.lane for s in found.sensors for c in s.channels()}
    assert lanes["pcie_tx"] == lanes["pcie_rx"] == "nvml-pcie"
    values = {name: readings[-1][1] for name, readings in record(found.sensors, 0.2).items()}
    del values["gpu:0 power"]
    assert values == {
        "gpu:0 gpu_utilisation": 73,
        "gpu:0 memory_utilisation": 36,
        "gpu:0 sm_clock": 1980,
        "gpu:0 clock_held_by": 0,
        "gpu:0 memory_clock": 3201,
        "gpu:0 performance_state": 0,
        "gpu:0 temperature": 55,
        "gpu:0 power_limit": 700,
        "gpu:0 memory_power": 36.5,
        "gpu:0 processes": 2,
        "gpu:0 pcie_tx": 1000,
        "gpu:0 pcie_rx": 2000,
    }
    said = channels(found)
    assert said["gpu:0 gpu_utilisation"].kind == "sample"
    assert said["gpu:0 gpu_utilisation"].window_ms == 200
    assert said["gpu:0 temperature"].kind == "level"
    write_spec(spec, [dataclasses.replace(gpu, pcie=False, memory_w=0.0)])
    found = look(pcie=True)
    assert "gpu:0 memory_power" not in channels(found)
    assert not any(s.lane == "nvml-pcie" for s in found.sensors)
    assert not found.absent
    close(found)


def test_a_clock_is_read_often_and_told_when_it_changes(spec: Path) -> None:
    write_spec(spec, [QUICK])
    found = look()
    (clock,) = [s for s in found.sensors if "sm_clock" in {c.quantity for c in s.channels()}]
    assert clock.period_ns == 50 * MS_NS
    told = [clock.read() for _ in range(6)]
    assert [len(each) for each in told] == [2, 0, 0, 0, 0, 0]  # the clock, and what holds it down
    write_spec(spec, [dataclasses.replace(QUICK, clock_mhz=1500)])
    assert [value for *_, value in clock.read()] == [1500]
    assert clock.read() == []
    theirs.clock.sleep_s(0.55)
    assert len(clock.read()) == 2  # so that nobody takes it for lost
    close(found)


def test_facts_name_the_gpus(spec: Path) -> None:
    write_spec(spec, [dataclasses.replace(QUICK, limit_default_w=650)])
    found = look()
    close(found)
    assert found.facts == {
        "driver": "580.00.fake",
        "nvml": "13.580.00.fake",
        "cuda_driver": "13.0",
        "gpus": [
            {
                "device": "gpu:0",
                "name": "NVIDIA Fake H200",
                "uuid": GpuSpec().at(0).uuid,
                "pci_bus_id": "00000000:3B:00.0",
                "power_limit_w": 650.0,
                "power_limit_default_w": 650.0,
                "power_limit_range_w": [100.0, 700.0],
                "architecture": "Ada",
                "mig": False,
                "memory_mib": 81920,
            }
        ],
    }


def test_a_program_finds_the_fake_by_its_environment(tmp_path: Path) -> None:
    environment = nvml_environment(tmp_path, [QUICK])
    environment["PYTHONPATH"] = str(SRC)
    program = (
        "from smaragdine.sensors.nvml.discover import open_sensors\n"
        "found = open_sensors(visible=None, device_order=None)\n"
        "print(*(c.name for s in found.sensors for c in s.channels()), sep='\\n')\n"
        "[s.close() for s in found.sensors]\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert "gpu:0 power" in answer.stdout.splitlines()
    assert "FAKE_NVML" not in os.environ
