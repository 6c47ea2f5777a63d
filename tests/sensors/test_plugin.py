"""A third-party sensor: a package of its own, found by its entry point, recorded like ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli import show_json, smaragdine
from smaragdine.sensors.base import Channel
from smaragdine.sensors.discover import PluginSensor

PLUGIN = """
import time
from smaragdine.sensors.base import Absent, Channel, Found

class WallPlug:
    period_ns = 50_000_000
    lane = "wallplug"
    def __init__(self):
        self.start = time.monotonic()
    def channels(self):
        return [Channel("plug:desk", "energy", "J", "counter", "measured", 50.0, "wallplug", scope="whole")]
    def read(self):
        return [(time.time_ns(), 0, 42.0 * (time.monotonic() - self.start))]
    def close(self):
        return self.read()

class Confused(WallPlug):
    lane = "confused"
    def channels(self):
        return [Channel("plug:cellar", "energy", "J", "counter", "measured", 50.0, "wallplug", scope="whole")]
    def read(self):
        return [(time.time_ns(), 7, 1.0)]

def open_sensors():
    return Found([WallPlug(), Confused()], [Absent("plug:attic energy", "not plugged in", "plug it in")])

def broken():
    raise RuntimeError("no meter")
"""


def install(folder: Path, entries: str) -> dict[str, str]:
    """A package as pip would leave it, in a folder for PYTHONPATH."""
    (folder / "wallplug.py").write_text(PLUGIN)
    metadata = folder / "wallplug-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: wallplug\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[smaragdine.sensors]\n{entries}\n")
    return {"PYTHONPATH": str(folder)}


def test_a_third_party_sensor_is_recorded(tmp_path: Path) -> None:
    env = install(tmp_path, "wallplug = wallplug:open_sensors")
    done = smaragdine("run", "-o", str(tmp_path / "out"), "--", "sleep", "1", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = show_json(tmp_path / "out")
    plug = shown["devices"]["plug:desk"]
    assert 41 < plug["mean_w"] < 43
    assert plug["provenance"] == "measured"
    assert any("plug:cellar energy: ValueError" in problem for problem in shown["problems"])
    assert "plug:attic" in smaragdine("doctor", env=env, cwd=tmp_path).stdout


@dataclass
class Canned:
    given: Any
    period_ns: int = 1
    lane: str = "canned"

    def channels(self) -> list[Channel]:
        return [Channel("plug:desk", "power", "W", "sample", "measured", 1.0, "canned")]

    def read(self) -> Any:
        return self.given

    close = read


@pytest.mark.parametrize(
    "given",
    [
        None,
        [None],
        [(1, 0)],
        [(1, 0, None)],
        [(1, 1, 2.0)],
        [(1, -1, 2.0)],
        [(1 << 70, 0, 2.0)],
        [("", 0, 1)],
    ],
)
def test_what_is_no_reading_of_its_channels_goes_no_further(given: Any) -> None:
    """Further on it would end the recording, or be another sensor's reading."""
    sensor = PluginSensor(Canned(given))
    with pytest.raises((TypeError, ValueError)):
        sensor.read()
    assert sensor.close() == ()
    assert list(sensor.ended) == ["plug:desk power"]


def test_what_is_a_reading_is_a_plain_one() -> None:
    sensor = PluginSensor(Canned([(np.int64(5), np.int32(0), np.float32(0.5)), [7, False, 2]]))
    assert sensor.read() == [(5, 0, 0.5), (7, 0, 2.0)]
    assert {type(value) for reading in sensor.read() for value in reading} == {int, float}


def test_a_broken_plug_in_is_absent_and_nothing_else(tmp_path: Path) -> None:
    env = install(tmp_path, "bad = wallplug:broken\nwallplug = wallplug:open_sensors")
    done = smaragdine("doctor", env=env, cwd=tmp_path)
    assert done.returncode == 0
    assert "no meter" in " ".join(done.stdout.split())
    assert "plug:desk" in done.stdout
