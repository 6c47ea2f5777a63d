from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from smaragdine.sensors import rapl
from smaragdine.sensors.base import Found
from unprivileged import as_nobody

SOFTWARE = 1  # PERF_TYPE_SOFTWARE, whose event 0 counts the nanoseconds of a CPU: a steady, known power


class Pmu:
    """A `power` PMU in a folder whose events the kernel's software PMU counts for real."""

    def __init__(self, folder: Path, pmu_type: int = SOFTWARE, sockets: dict[int, int] | None = None) -> None:
        self.root, self.cpu_root = folder / "event_source", folder / "cpu"
        self.events = self.root / "power" / "events"
        self.events.mkdir(parents=True)
        sockets = sockets or {0: 0}
        (self.root / "power" / "type").write_text(f"{pmu_type}\n")
        (self.root / "power" / "cpumask").write_text(",".join(map(str, sockets)) + "\n")
        for cpu, socket in sockets.items():
            topology = self.cpu_root / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{socket}\n")

    def add(self, name: str, joules_per_count: str, event: str = "event=0x00", unit: str = "Joules") -> Pmu:
        (self.events / name).write_text(f"{event}\n")
        (self.events / f"{name}.scale").write_text(f"{joules_per_count}\n")
        (self.events / f"{name}.unit").write_text(f"{unit}\n")
        return self

    def open(self) -> Found:
        return rapl.open_perf_sensors(root=self.root, cpu_root=self.cpu_root)


def needs_kernel(found: Found) -> Found:
    if not found.sensors and any("permission denied" in a.reason for a in found.absent):
        pytest.skip(f"the kernel refuses: {found.absent[0].reason}")
    return found


@pytest.fixture
def open_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="perf-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_real_counts_become_joules(tmp_path: Path) -> None:
    # 5e-8 J per nanosecond is 50 W.
    found = needs_kernel(Pmu(tmp_path).add("energy-pkg", "5.0e-8").add("energy-ram", "1.0e-8").open())
    assert found.absent == []
    (sensor,) = found.sensors
    cpu, dram = sensor.channels()
    assert (cpu.device, cpu.scope, cpu.sensor, cpu.wraps_at) == ("cpu:0", "device", "perf", None)
    assert cpu.detail == "perf power/energy-pkg/ on CPU 0"
    assert (dram.device, dram.scope) == ("dram:0", "device")
    times_ns = [time.time_ns()]
    first = sensor.read()
    times_ns.append(time.time_ns())
    time.sleep(0.2)
    times_ns.append(time.time_ns())
    second = sensor.close()
    times_ns.append(time.time_ns())
    # However long a read was held up: it was made while it was asked for.
    least_s, most_s = (times_ns[2] - times_ns[1]) / 1e9, (times_ns[3] - times_ns[0]) / 1e9
    for (t0_ns, _, start_j), (t1_ns, _, end_j), power_w in zip(first, second, (50.0, 10.0), strict=True):
        assert times_ns[0] <= t0_ns <= times_ns[1] < times_ns[2] <= t1_ns <= times_ns[3]
        assert 0.99 * power_w * least_s < end_j - start_j < 1.01 * power_w * most_s


def test_every_event_is_what_powercap_calls_it(tmp_path: Path) -> None:
    pmu = Pmu(tmp_path)
    for name in ("energy-pkg", "energy-cores", "energy-gpu", "energy-ram", "energy-psys"):
        pmu.add(name, "2.3283064365386962890625e-10")
    (sensor,) = needs_kernel(pmu.open()).sensors
    assert {channel.device: channel.scope for channel in sensor.channels()} == {
        "cpu:0": "device",
        "cpu:0/core": "part",
        "cpu:0/uncore": "part",
        "dram:0": "device",
        "psys": "whole",
    }
    sensor.close()


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPUs")
def test_each_socket_reads_on_its_own_cpu_and_the_platform_once(tmp_path: Path) -> None:
    pmu = Pmu(tmp_path, sockets={0: 0, 1: 1}).add("energy-pkg", "1e-9").add("energy-psys", "1e-9")
    (sensor,) = needs_kernel(pmu.open()).sensors
    assert [channel.device for channel in sensor.channels()] == ["cpu:0", "cpu:1", "psys"]
    sensor.close()


def test_cpumask_may_be_a_range_and_dies_share_their_socket(tmp_path: Path) -> None:
    pmu = Pmu(tmp_path, sockets={0: 0, 1: 0, 2: 1})
    assert rapl._socket_cpus("0-1,2", pmu.cpu_root) == [(0, 0), (1, 0), (2, 1)]


def test_devices_measured_already_are_left_out(tmp_path: Path) -> None:
    pmu = Pmu(tmp_path).add("energy-pkg", "1e-9").add("energy-ram", "1e-9")
    found = rapl.open_perf_sensors(root=pmu.root, cpu_root=pmu.cpu_root, have={"cpu:0"})
    (sensor,) = needs_kernel(found).sensors
    assert [channel.device for channel in sensor.channels()] == ["dram:0"]
    sensor.close()


def test_absent_without_the_pmu(tmp_path: Path) -> None:
    (absent,) = rapl.open_perf_sensors(root=tmp_path).absent
    assert "no power events" in absent.reason


def test_absent_when_the_kernel_does_not_know_the_pmu(tmp_path: Path) -> None:
    found = needs_kernel(Pmu(tmp_path, pmu_type=1_000_000).add("energy-pkg", "1e-9").open())
    assert found.sensors == []
    assert found.absent[0].channel == "cpu:0 energy"
    assert "No such file or directory" in found.absent[0].reason


@pytest.mark.parametrize(
    ("scale", "event", "unit", "why"),
    [
        ("1e-9", "event=0x00,umask=1", "Joules", "cannot read"),
        ("1e-9", "event=0x00", "Watts", "not Joules"),
        ("0", "event=0x00", "Joules", "scale"),
        ("much", "event=0x00", "Joules", "could not convert"),
    ],
)
def test_an_event_we_cannot_read_is_absent(
    tmp_path: Path, scale: str, event: str, unit: str, why: str
) -> None:
    found = Pmu(tmp_path).add("energy-pkg", scale, event, unit).open()
    assert found.sensors == []
    assert why in found.absent[0].reason


def test_absent_without_permission(open_folder: Path) -> None:
    if int(Path("/proc/sys/kernel/perf_event_paranoid").read_text()) < 1:
        pytest.skip("everybody may count here")
    pmu = Pmu(open_folder).add("energy-pkg", "1e-9")
    (absent,) = as_nobody(lambda: pmu.open().absent)
    assert absent.channel == "cpu:0 energy"
    assert "permission denied" in absent.reason
    assert "perf_event_paranoid=0" in absent.remedy
    assert "CAP_PERFMON" in absent.remedy
