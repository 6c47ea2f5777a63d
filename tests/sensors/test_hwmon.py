from __future__ import annotations

from pathlib import Path

import pytest

from smaragdine.sensors import hwmon
from smaragdine.sensors.base import Channel, Found, SensorLost


def add_chip(root: Path, number: int, name: str, **attributes: object) -> Path:
    folder = root / f"hwmon{number}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    for attribute, value in attributes.items():
        (folder / attribute).write_text(f"{value}\n")
    return folder


def channels(found: Found) -> dict[str, Channel]:
    return {channel.name: channel for sensor in found.sensors for channel in sensor.channels()}


def test_power_input_is_a_sample_over_the_update_interval(tmp_path: Path) -> None:
    add_chip(tmp_path, 0, "ina226", power1_input=12_500_000, power1_label="12V rail", update_interval=35)
    found = hwmon.open_sensors(root=tmp_path)
    (sensor,) = found.sensors
    (channel,) = sensor.channels()
    assert channel.name == "hwmon:ina226/12V-rail power"
    assert (channel.unit, channel.kind, channel.scope) == ("W", "sample", "whole")
    assert (channel.period_ms, channel.window_ms) == (35.0, 35.0)
    assert (sensor.period_ns, sensor.lane) == (35_000_000, "hwmon")
    assert [(index, value) for _, index, value in sensor.read()] == [(0, 12.5)]
    sensor.close()


def test_without_an_update_interval_nothing_is_assumed_of_the_window(tmp_path: Path) -> None:
    add_chip(tmp_path, 0, "corsairpsu", power1_input=1_000_000, power2_input=2_000_000)
    found = hwmon.open_sensors(root=tmp_path)
    assert [(c.period_ms, c.window_ms) for c in channels(found).values()] == [(100.0, None)] * 2
    assert list(channels(found)) == ["hwmon:corsairpsu/power1 power", "hwmon:corsairpsu/power2 power"]


def test_the_average_is_preferred_and_says_so(tmp_path: Path) -> None:
    add_chip(
        tmp_path, 0, "power_meter", power1_input=1, power1_average=300_000_000, power1_average_interval=1000
    )
    found = hwmon.open_sensors(root=tmp_path)
    (channel,) = channels(found).values()
    assert channel.window_ms == 1000.0
    assert "power1_average" in channel.detail
    assert "power1_input not read" in channel.detail
    assert [value for _, _, value in found.sensors[0].read()] == [300.0]


def test_energy_is_a_counter_without_a_known_wrap(tmp_path: Path) -> None:
    chip = add_chip(tmp_path, 3, "i915", energy1_input=5_000_000, power1_max=1)
    found = hwmon.open_sensors(root=tmp_path)
    (channel,) = channels(found).values()
    assert (channel.name, channel.unit) == ("hwmon:i915/energy1 energy", "J")
    assert (channel.kind, channel.wraps_at, channel.window_ms) == ("counter", None, None)
    (chip / "energy1_input").write_text("7250000\n")
    assert [value for _, _, value in found.sensors[0].read()] == [7.25]


def test_chips_of_one_name_are_numbered_in_order(tmp_path: Path) -> None:
    add_chip(tmp_path, 10, "ina226", power1_input=3_000_000)
    add_chip(tmp_path, 2, "ina226", power1_input=2_000_000)
    add_chip(tmp_path, 1, "ina226", temp1_input=40_000)
    add_chip(tmp_path, 0, "nvme", temp1_input=40_000)
    found = hwmon.open_sensors(root=tmp_path)
    assert list(channels(found)) == ["hwmon:ina226#1/power1 power", "hwmon:ina226#2/power1 power"]
    assert [sensor.read()[0][2] for sensor in found.sensors] == [2.0, 3.0]


def test_labels_used_twice_stay_apart(tmp_path: Path) -> None:
    add_chip(tmp_path, 0, "x", power1_input=1, power1_label="in", power2_input=2, power2_label="in")
    assert list(channels(hwmon.open_sensors(root=tmp_path))) == [
        "hwmon:x/in power",
        "hwmon:x/in-power2 power",
    ]


def test_an_attribute_that_cannot_be_read_is_absent(tmp_path: Path) -> None:
    chip = add_chip(tmp_path, 0, "x", power1_input=1_000_000)
    (chip / "power2_input").mkdir()
    found = hwmon.open_sensors(root=tmp_path)
    assert list(channels(found)) == ["hwmon:x/power1 power"]
    assert found.absent[0].channel == "hwmon:x/power2 power"
    assert "Is a directory" in found.absent[0].reason


def test_no_chip_is_normal(tmp_path: Path) -> None:
    assert hwmon.open_sensors(root=tmp_path / "hwmon") == Found()
    add_chip(tmp_path, 0, "nvme", temp1_input=40_000)
    assert hwmon.open_sensors(root=tmp_path) == Found()


def test_closed_means_lost(tmp_path: Path) -> None:
    add_chip(tmp_path, 0, "x", power1_input=1_000_000)
    (sensor,) = hwmon.open_sensors(root=tmp_path).sensors
    assert [value for _, _, value in sensor.close()] == [1.0]
    with pytest.raises(SensorLost):
        sensor.read()
