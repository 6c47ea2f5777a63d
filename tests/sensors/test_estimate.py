from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from smaragdine.clock import Clock
from smaragdine.errors import UserError
from smaragdine.sensors import cpu as cpuinfo
from smaragdine.sensors import estimate
from smaragdine.sensors.base import Sensor
from smaragdine.sensors.cpu import CpuInfo
from smaragdine.sensors.estimate import EstimateSettings, find_model, rated_cpus, short_name

GIB = 1 << 30
EPYC_GUEST = CpuInfo("AMD EPYC", {0: (0, 1)}, {0: 2})
TWO_SOCKETS = CpuInfo(
    "Intel(R) Xeon(R) Platinum 8280 CPU @ 2.70GHz",
    {0: tuple(range(56)), 1: tuple(range(56, 112))},
    {0: 28, 1: 28},
)


@dataclass
class Bench:
    """A clock and busy totals that move only when told."""

    t_ns: int = 1_700_000_000_000_000_000
    mono_ns: int = 50
    busy: dict[int, float] = field(default_factory=lambda: {0: 100.0, 1: 200.0})

    def busy_s(self, socket: int) -> tuple[int, float]:
        return self.t_ns, self.busy[socket]

    def clock(self) -> Clock:
        return Clock(wall_ns=lambda: self.t_ns, mono_ns=lambda: self.mono_ns)

    def pass_time(self, seconds: float, *busy_s: float) -> None:
        self.t_ns += round(seconds * 1e9)
        self.mono_ns += round(seconds * 1e9)
        for socket, added_s in enumerate(busy_s):
            self.busy[socket] += added_s


def open_one(
    bench: Bench,
    cpus: CpuInfo = EPYC_GUEST,
    settings: EstimateSettings | None = None,
    dram: tuple[int, ...] = (),
    memory_bytes: int = 0,
) -> Sensor:
    found = estimate.open_sensors(
        activity=bench,
        cpus=cpus,
        memory_bytes=memory_bytes,
        sockets_missing=sorted(cpus.sockets),
        dram_missing=dram,
        settings=settings,
        clock=bench.clock(),
    )
    assert found.absent == []
    (sensor,) = found.sensors
    return sensor


def values(sensor: Sensor) -> list[float]:
    return [value for _, _, value in sensor.read()]


def test_energy_against_a_hand_computation() -> None:
    # 2 cores × 7 W = 14 W rated, 20 % of it idle: 2.8 W + 11.2 W · u.
    bench = Bench()
    sensor = open_one(bench)
    assert values(sensor) == [0.0]
    bench.pass_time(10.0, 0.0)
    assert values(sensor) == [pytest.approx(28.0)]
    bench.pass_time(0.1, 0.2)
    assert values(sensor) == [pytest.approx(28.0 + 1.4)]
    bench.pass_time(2.0, 1.0)  # a quarter busy: 5.6 W
    assert values(sensor) == [pytest.approx(28.0 + 1.4 + 11.2)]
    bench.pass_time(1.0, 0.0)
    assert list(sensor.close()) == [(bench.t_ns, 0, pytest.approx(28.0 + 1.4 + 11.2 + 2.8))]


def test_the_channel_says_that_and_how_it_is_estimated() -> None:
    (channel,) = open_one(Bench()).channels()
    assert (channel.name, channel.provenance, channel.kind, channel.unit) == (
        "cpu:0 energy",
        "estimated",
        "counter",
        "J",
    )
    assert channel.detail == "AMD EPYC (unknown model): 2 cores × 7 W default, idle 20 %"
    assert (channel.period_ms, channel.wraps_at, channel.sensor) == (100.0, None, "estimate")


def test_utilisation_stays_between_nothing_and_all() -> None:
    bench = Bench()
    sensor = open_one(bench)
    sensor.read()
    bench.pass_time(1.0, 5.0)
    assert values(sensor) == [pytest.approx(14.0)]
    bench.pass_time(1.0, -5.0)
    assert values(sensor) == [pytest.approx(14.0 + 2.8)]


def test_nothing_new_is_no_reading() -> None:
    bench = Bench()
    sensor = open_one(bench)
    assert len(values(sensor)) == 1
    bench.mono_ns += 1_000_000
    assert values(sensor) == []


def test_a_busy_time_that_nobody_looked_at_for_long_is_no_reading() -> None:
    """Nor is it a wall clock that somebody has set."""
    bench = Bench()
    sensor = open_one(bench)
    assert values(sensor) == [0.0]
    bench.mono_ns += 6 * 10**9  # the activity's own time stands
    assert values(sensor) == []
    bench.mono_ns -= 6 * 10**9
    bench.pass_time(6.0, 6.0)
    ((t_ns, _, energy_j),) = sensor.read()
    assert (t_ns, energy_j) == (bench.t_ns, pytest.approx(6 * (2.8 + 11.2 / 2)))


@pytest.mark.parametrize("set_by_s", [3600, -3600])
def test_setting_the_wall_clock_makes_no_energy(set_by_s: int) -> None:
    bench = Bench()
    sensor = open_one(bench)
    sensor.read()
    bench.pass_time(1.0, 0.0)
    bench.t_ns += set_by_s * 1_000_000_000
    assert values(sensor) == [pytest.approx(2.8)]
    bench.pass_time(1.0, 0.0)
    assert values(sensor) == [pytest.approx(5.6)]


def test_two_sockets_each_with_its_own_load() -> None:
    # 205 W rated, 41 W idle, 56 logical CPUs a socket.
    bench = Bench()
    sensor = open_one(bench, TWO_SOCKETS)
    assert [channel.device for channel in sensor.channels()] == ["cpu:0", "cpu:1"]
    assert sensor.channels()[0].detail == "Xeon Platinum 8280: 205 W, idle 20 %"
    sensor.read()
    bench.pass_time(2.0, 56.0, 112.0)
    assert values(sensor) == [pytest.approx((41 + 0.5 * 164) * 2), pytest.approx(410.0)]


def test_a_guest_is_charged_its_share_of_the_socket() -> None:
    guest = CpuInfo("AMD EPYC 7742 64-Core Processor", {0: (0, 1, 2, 3)}, {0: 2})
    model = estimate.socket_model(guest, 0, EstimateSettings())
    assert model.rated_w == pytest.approx(225 * 2 / 64)
    assert model.detail == "EPYC 7742: 225 W × 2/64 cores, idle 20 %"


def test_what_the_user_says_wins_and_is_not_scaled() -> None:
    guest = CpuInfo("AMD EPYC 7742 64-Core Processor", {0: (0, 1, 2, 3)}, {0: 2})
    model = estimate.socket_model(guest, 0, EstimateSettings(cpu_rated_w=30.0, idle_fraction=0.5))
    assert (model.rated_w, model.idle_w) == (30.0, 15.0)
    assert "30 W from SMARAGDINE_CPU_RATED_W" in model.detail


def test_memory_by_its_size_shared_between_the_sockets() -> None:
    bench = Bench()
    sensor = open_one(bench, TWO_SOCKETS, dram=(0, 1), memory_bytes=512 * GIB)
    assert [channel.device for channel in sensor.channels()] == ["cpu:0", "cpu:1", "dram:0", "dram:1"]
    assert sensor.channels()[2].detail.startswith("256.0 GiB × 0.375 W/GiB")
    assert values(sensor) == [0.0] * 4
    bench.pass_time(2.0, 0.0, 0.0)
    assert values(sensor)[2:] == [pytest.approx(192.0), pytest.approx(192.0)]


def test_nothing_missing_is_nothing_estimated() -> None:
    found = estimate.open_sensors(
        activity=Bench(), cpus=EPYC_GUEST, memory_bytes=GIB, sockets_missing=[], dram_missing=[]
    )
    assert (found.sensors, found.absent, found.facts) == ([], [], {})


def test_what_cannot_even_be_estimated_is_absent() -> None:
    found = estimate.open_sensors(
        activity=Bench(), cpus=EPYC_GUEST, memory_bytes=0, sockets_missing=[7], dram_missing=[0]
    )
    assert found.sensors == []
    assert [absent.channel for absent in found.absent] == ["cpu:7 energy", "dram:0 energy"]


def test_settings_from_the_environment() -> None:
    assert EstimateSettings.from_environment({}) == EstimateSettings(None, 0.2, 0.375)
    assert EstimateSettings.from_environment(
        {
            "SMARAGDINE_CPU_RATED_W": "95",
            "SMARAGDINE_CPU_IDLE_FRACTION": "0",
            "SMARAGDINE_DRAM_W_PER_GIB": " 0.1 ",
        }
    ) == EstimateSettings(95.0, 0.0, 0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SMARAGDINE_CPU_RATED_W", "-5"),
        ("SMARAGDINE_CPU_RATED_W", "0"),
        ("SMARAGDINE_CPU_RATED_W", "inf"),
        ("SMARAGDINE_CPU_RATED_W", "lots"),
        ("SMARAGDINE_CPU_IDLE_FRACTION", "20"),
        ("SMARAGDINE_CPU_IDLE_FRACTION", "nan"),
        ("SMARAGDINE_DRAM_W_PER_GIB", "-0.1"),
    ],
)
def test_nonsense_in_the_environment_is_one_line(name: str, value: str) -> None:
    with pytest.raises(UserError) as caught:
        EstimateSettings.from_environment({name: value})
    assert str(caught.value).startswith(f"{name}={value}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_name", "rated_w", "cores"),
    [
        ("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz", 120, 14),
        ("Intel(R) Xeon(R) CPU E5-2670 0 @ 2.60GHz", 115, 8),
        ("Intel(R) Xeon(R) Gold 6248R CPU @ 3.00GHz", 205, 24),
        ("Intel(R) Xeon(R) Platinum 8480+", 350, 56),
        ("Intel(R) Xeon(R) w9-3495X", 350, 56),
        ("12th Gen Intel(R) Core(TM) i9-12900K", 125, 16),
        ("AMD EPYC 9654 96-Core Processor", 360, 96),
        ("AMD Ryzen 9 5950X 16-Core Processor", 105, 16),
        ("AMD Ryzen Threadripper 3970X 32-Core Processor", 280, 32),
        ("AMD Ryzen Threadripper PRO 5995WX 64-Cores", 280, 64),
    ],
)
def test_models_as_the_kernel_spells_them(model_name: str, rated_w: float, cores: int) -> None:
    rated = find_model(model_name)
    assert rated is not None
    assert (rated.rated_w, rated.cores) == (rated_w, cores)


@pytest.mark.parametrize(
    "model_name", ["AMD EPYC", "Intel(R) Xeon(R) CPU @ 2.20GHz", "AMD EPYC 7R13 Processor", "", "EPYC 77421"]
)
def test_other_models_are_not_guessed(model_name: str) -> None:
    assert find_model(model_name) is None


def test_the_table_is_plausible() -> None:
    assert len(rated_cpus()) > 400
    assert all(1 <= rated.rated_w / rated.cores <= 35 for rated in rated_cpus().values())
    assert short_name("Intel(R) Xeon(R) CPU @ 2.20GHz") == "Intel Xeon"


def write_cpuinfo(folder: Path, *blocks: dict[str, object]) -> CpuInfo:
    text = "\n\n".join("\n".join(f"{key}\t: {value}" for key, value in block.items()) for block in blocks)
    (folder / "cpuinfo").write_text(text + "\n\n")
    return cpuinfo.read_cpuinfo(folder)


def test_cpuinfo_of_two_sockets_with_two_threads_a_core(tmp_path: Path) -> None:
    found = write_cpuinfo(
        tmp_path,
        *(
            {
                "processor": cpu,
                "model name": "AMD EPYC 7742",
                "physical id": cpu // 2 % 2,
                "core id": cpu % 2,
                "cpu cores": 2,
            }
            for cpu in range(8)
        ),
    )
    assert found == CpuInfo("AMD EPYC 7742", {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)}, {0: 2, 1: 2})


def test_cpuinfo_of_a_container_that_sees_a_part_of_the_socket(tmp_path: Path) -> None:
    blocks = ({"processor": cpu, "physical id": 0, "core id": cpu, "cpu cores": 64} for cpu in range(3))
    found = write_cpuinfo(tmp_path, *blocks)
    assert found.cores == {0: 3}


def test_cpuinfo_of_arm_has_one_socket(tmp_path: Path) -> None:
    blocks = ({"processor": cpu, "CPU implementer": "0x41", "CPU part": "0xd0c"} for cpu in range(4))
    assert write_cpuinfo(tmp_path, *blocks) == CpuInfo(
        "ARM implementer 0x41 part 0xd0c", {0: (0, 1, 2, 3)}, {0: 4}
    )


def test_cpuinfo_without_proc_still_has_cpus(tmp_path: Path) -> None:
    found = cpuinfo.read_cpuinfo(tmp_path)
    assert found.model == cpuinfo.UNKNOWN_MODEL
    assert len(found.sockets[0]) == found.cores[0] >= 1


def test_cpuinfo_and_memory_of_this_machine() -> None:
    found = cpuinfo.read_cpuinfo(Path("/proc"))
    assert sum(map(len, found.sockets.values())) >= 1
    assert set(found.sockets) == set(found.cores)
    assert cpuinfo.read_memory_bytes(Path("/proc")) > GIB // 4


def test_memory_unknown_is_zero(tmp_path: Path) -> None:
    assert cpuinfo.read_memory_bytes(tmp_path) == 0
    (tmp_path / "meminfo").write_text("MemTotal:       24684100 kB\nMemFree: 1 kB\n")
    assert cpuinfo.read_memory_bytes(tmp_path) == 24684100 * 1024
