from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cli import wait_for
from powercap_fake import Layout, PowercapTree
from smaragdine.sensors import rapl
from smaragdine.sensors.base import Channel, Sensor, SensorLost
from unprivileged import as_nobody


class Together:
    """Packages and their parts, which have a sensor each, as one: channels in the order of their zones."""

    period_ns = 4_000_000
    lane = "counters"

    def __init__(self, sensors: Sequence[Sensor]) -> None:
        self._sensors = sensors
        zones = [(re.findall(r"\d+|:", c.detail.split()[0]), c) for s in sensors for c in s.channels()]
        self._channels = [channel for _, channel in sorted(zones, key=lambda zone: zone[0])]

    def channels(self) -> Sequence[Channel]:
        return self._channels

    def read(self) -> Sequence[tuple[int, int, float]]:
        return [self._at(s, *reading) for s in self._sensors for reading in s.read()]

    def close(self) -> Sequence[tuple[int, int, float]]:
        return [self._at(s, *reading) for s in self._sensors for reading in s.close()]

    def _at(self, sensor: Sensor, t_ns: int, index: int, value: float) -> tuple[int, int, float]:
        return t_ns, self._channels.index(sensor.channels()[index]), value


def only_sensor(root: Path) -> Sensor:
    found = rapl.open_sensors(root=root)
    assert found.absent == []
    assert {sensor.lane for sensor in found.sensors} == {"counters"}
    return found.sensors[0] if len(found.sensors) == 1 else Together(found.sensors)


def test_parts_of_a_package_are_read_less_often(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=2) as tree:
        found = rapl.open_sensors(root=tree.root)
        periods = {c.device: s.period_ns for s in found.sensors for c in s.channels()}
        assert periods["cpu:0"] == periods["dram:1"] == 4_000_000
        assert periods["cpu:0/core"] > periods["cpu:0"]
        for sensor in found.sensors:
            sensor.close()


def devices(sensor: Sensor) -> list[str]:
    return [channel.device for channel in sensor.channels()]


def by_device(sensor: Sensor) -> dict[str, Channel]:
    return {channel.device: channel for channel in sensor.channels()}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own belongs to its user alone."""
    folder = Path(tempfile.mkdtemp(prefix="powercap-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("layout", ["nested", "flat", "links"])
def test_every_zone_once_whatever_the_layout(tmp_path: Path, layout: Layout) -> None:
    with PowercapTree(tmp_path, packages=2, uncore=True, psys=True, layout=layout) as tree:
        sensor = only_sensor(tree.root)
        assert devices(sensor) == [
            *("cpu:0", "cpu:0/core", "cpu:0/uncore", "dram:0"),
            *("cpu:1", "cpu:1/core", "cpu:1/uncore", "dram:1"),
            "psys",
        ]
        scopes = {device: channel.scope for device, channel in by_device(sensor).items()}
        assert scopes["cpu:0"] == scopes["dram:1"] == "device"
        assert scopes["cpu:0/core"] == scopes["cpu:1/uncore"] == "part"
        assert scopes["psys"] == "whole"
        assert all(
            (c.quantity, c.unit, c.kind, c.provenance, c.period_ms, c.sensor)
            == ("energy", "J", "counter", "measured", 1.0, "rapl")
            for c in sensor.channels()
        )
        sensor.close()


def test_root_may_be_one_control_type(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=1) as tree:
        assert devices(only_sensor(tree.root / "intel-rapl")) == ["cpu:0", "cpu:0/core", "dram:0"]


def test_more_than_ten_packages_stay_in_order(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=12, dram=False, core=False, layout="flat") as tree:
        assert devices(only_sensor(tree.root)) == [f"cpu:{n}" for n in range(12)]


def test_dies_belong_to_their_socket_and_add_up(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=1, dies=2, core=False) as tree:
        sensor = only_sensor(tree.root)
        assert devices(sensor) == ["cpu:0", "dram:0", "cpu:0", "dram:0"]
        assert len({channel.detail for channel in sensor.channels()}) == 4
        tree.add_joules("cpu:0", 3.0)
        values = [value for _, index, value in sensor.read() if sensor.channels()[index].device == "cpu:0"]
        assert sum(values) == 3.0


def test_memory_mapped_twins_are_left_out_unless_alone(tmp_path: Path) -> None:
    with PowercapTree(tmp_path / "both", packages=1, mmio=True) as tree:
        assert devices(only_sensor(tree.root)) == ["cpu:0", "cpu:0/core", "dram:0"]
    with PowercapTree(tmp_path / "alone", packages=0) as tree:
        tree.add_zone("intel-rapl-mmio:0", "package-0", "cpu:0")
        assert devices(only_sensor(tree.root)) == ["cpu:0"]


def test_unknown_zones_are_never_added_up(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=1, core=False, dram=False) as tree:
        tree.add_zone("intel-rapl:0:0", "cxl", "cxl")
        tree.add_zone("dtpm:0", "soc", "soc")
        channels = by_device(only_sensor(tree.root))
        assert channels["powercap:cxl"].scope == channels["powercap:soc"].scope == "whole"


def test_zones_without_an_energy_counter_are_no_channels(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=1, core=False, dram=False) as tree:
        tree.add_zone("dtpm:0", "soc", "soc")
        (tree.zones["dtpm:0"] / "energy_uj").unlink()
        assert devices(only_sensor(tree.root)) == ["cpu:0"]


def test_raw_values_and_where_they_wrap(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=1, wrap_uj=10_000_000, start_uj=9_000_000, core=False) as tree:
        sensor = only_sensor(tree.root)
        assert by_device(sensor)["cpu:0"].wraps_at == 10.0
        before_ns = time.time_ns()
        tree.add_joules("cpu:0", 0.5)
        first = sensor.read()
        tree.add_joules("cpu:0", 0.75)
        second = sensor.read()
        assert [(index, value) for _, index, value in first] == [(0, 9.5), (1, 9.0)]
        assert [(index, value) for _, index, value in second] == [(0, 0.25), (1, 9.0)]
        stamps = [t_ns for t_ns, _, _ in (*first, *second)]
        assert before_ns <= stamps[0] <= stamps[1] <= stamps[2] <= stamps[3] <= time.time_ns()


def test_wrap_unknown_when_the_range_is(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=1, core=False, dram=False) as tree:
        (tree.zones["intel-rapl:0"] / "max_energy_range_uj").unlink()
        assert by_device(only_sensor(tree.root))["cpu:0"].wraps_at is None


def test_moving_counters_are_followed_through_wraps(tmp_path: Path) -> None:
    wrap_j = 5.0
    with PowercapTree(tmp_path, packages=1, wrap_uj=5_000_000, start_uj=4_900_000, core=False) as tree:
        sensor = only_sensor(tree.root)
        last = {index: value for _, index, value in sensor.read()}
        total = dict.fromkeys(last, 0.0)
        wraps = 0
        # It writes while the other reads, but never a whole range ahead.
        ahead: queue.Queue[int] = queue.Queue(8)

        def write() -> None:
            for number in range(400):
                ahead.put(number)
                tree.add_joules("cpu:0", 0.1)
                tree.add_joules("dram:0", 0.04 if number % 2 else 0.008)

        writer = threading.Thread(target=write)
        writer.start()
        running = True
        while running:
            running = writer.is_alive()
            written = ahead.qsize()
            for _, index, value in sensor.read():
                wraps += value < last[index]
                total[index] += (value - last[index]) % wrap_j
                last[index] = value
            for _ in range(written):
                ahead.get()
        assert wraps >= 8
        assert total[0] == pytest.approx(40.0, abs=1e-6)
        assert total[1] == pytest.approx(400 * 0.024, abs=1e-6)


def test_a_zone_that_vanishes_ends_alone_and_the_last_one_ends_the_sensor(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=1, core=False) as tree:
        # A number whose open file really starts to fail: a process's own attribute, once it is gone.
        processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
        for process, zone_id in zip(processes, ("intel-rapl:0", "intel-rapl:0:0"), strict=True):
            energy = tree.zones[zone_id] / "energy_uj"
            energy.unlink()
            energy.symlink_to(f"/proc/{process.pid}/oom_score_adj")
        sensor = only_sensor(tree.root)
        assert [index for _, index, _ in sensor.read()] == [0, 1]
        processes[0].send_signal(signal.SIGKILL)
        processes[0].wait()
        assert [index for _, index, _ in sensor.read()] == [1]
        assert [index for _, index, _ in sensor.read()] == [1]
        processes[1].send_signal(signal.SIGKILL)
        processes[1].wait()
        with pytest.raises(SensorLost, match=r"cpu:0 energy \(intel-rapl:0 package-0\)"):
            sensor.read()
        assert list(sensor.close()) == []


def test_close_gives_the_last_reading_and_the_descriptors_back(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=2) as tree:
        before = len(os.listdir("/proc/self/fd"))
        sensor = only_sensor(tree.root)
        assert len(os.listdir("/proc/self/fd")) == before + 6
        tree.add_joules("dram:1", 1.5)
        last = {sensor.channels()[index].device: value for _, index, value in sensor.close()}
        assert last["dram:1"] == 1.5
        assert len(os.listdir("/proc/self/fd")) == before
        assert list(sensor.close()) == []


def test_absent_without_powercap(tmp_path: Path) -> None:
    found = rapl.open_sensors(root=tmp_path / "powercap")
    assert found.sensors == []
    (absent,) = found.absent
    assert absent.channel == "cpu:* energy"
    assert "does not exist" in absent.reason
    assert "modprobe intel_rapl_msr" in absent.remedy


def test_absent_without_a_driver(tmp_path: Path) -> None:
    (absent,) = rapl.open_sensors(root=tmp_path).absent
    assert "no RAPL driver" in absent.reason


def test_absent_when_a_container_hides_the_zones(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=1, layout="links") as tree:
        shutil.rmtree(tmp_path / "devices" / "virtual" / "powercap")
        (tmp_path / "devices" / "virtual" / "powercap").mkdir()
        found = rapl.open_sensors(root=tree.root)
        assert found.sensors == []
        (absent,) = found.absent
        assert "container" in absent.reason
        assert "SMARAGDINE_POWERCAP_ROOT=/host/powercap" in absent.remedy


def test_absent_without_permission(open_folder: Path) -> None:
    with PowercapTree(open_folder, packages=2, core=False) as tree:
        for path in tree.zones.values():
            (path / "energy_uj").chmod(0o400 if os.geteuid() == 0 else 0)
        absent = as_nobody(lambda: rapl.open_sensors(root=tree.root).absent)
        assert [a.channel for a in absent] == [
            "cpu:0 energy",
            "dram:0 energy",
            "cpu:1 energy",
            "dram:1 energy",
        ]
        assert all("permission denied" in a.reason and "CVE-2020-8694" in a.reason for a in absent)
        remedy = absent[0].remedy
        assert "\n" not in remedy
        assert 'SUBSYSTEM=="powercap"' in remedy
        assert "daemon" in remedy


def test_absent_with_any_other_error_and_the_rest_still_works(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=1, core=False) as tree:
        energy = tree.zones["intel-rapl:0:0"] / "energy_uj"
        energy.unlink()
        energy.mkdir()
        found = rapl.open_sensors(root=tree.root)
        assert devices(found.sensors[0]) == ["cpu:0"]
        (absent,) = found.absent
        assert absent.channel == "dram:0 energy"
        assert absent.reason.endswith("energy_uj: Is a directory")


def test_a_file_that_holds_no_number_is_absent_not_zero(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=1, core=False, dram=False) as tree:
        (tree.zones["intel-rapl:0"] / "energy_uj").write_text("")
        found = rapl.open_sensors(root=tree.root)
        assert found.sensors == []
        assert "not a number" in found.absent[0].reason


def test_what_a_read_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PowercapTree(tmp_path, packages=2) as tree:
        sensor = only_sensor(tree.root)
        start_ns = time.perf_counter_ns()
        for _ in range(2000):
            sensor.read()
        cost_us = (time.perf_counter_ns() - start_ns) / 2000 / 1e3
        sensor.close()
    with capsys.disabled():
        print(f" [6 zones: {cost_us:.1f} µs a read] ", end="")


def test_a_counter_replaced_under_its_name_is_followed(tmp_path: Path) -> None:
    with PowercapTree(tmp_path, packages=1, dram=False, core=False) as tree:
        (sensor,) = rapl.open_sensors(root=tree.root).sensors
        (path,) = {(folder / "energy_uj").resolve() for folder in tree.zones.values()}
        new = tmp_path / "new"
        new.write_text("77000000\n")
        os.replace(new, path)
        assert wait_for(lambda: sensor.read()[0][2] == 77.0)
        sensor.close()


def test_a_zone_folder_nobody_may_enter_hides_no_other(open_folder: Path) -> None:
    with PowercapTree(open_folder, packages=2, dram=False, core=False) as tree:
        shut = tree.zones["intel-rapl:1"]
        shut.chmod(0o700 if os.geteuid() == 0 else 0)
        absent = as_nobody(lambda: rapl.open_sensors(root=tree.root).absent)
        shut.chmod(0o755)
    assert len(absent) == 1
    assert "intel-rapl:1" in absent[0].channel
    assert "permission denied" in absent[0].reason
