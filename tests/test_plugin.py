"""A third-party sensor: a package of its own, found by its entry point, recorded like ours."""

from __future__ import annotations

from pathlib import Path

from cli import show_json, smaragdine

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

def open_sensors():
    return Found([WallPlug()], [Absent("plug:attic energy", "not plugged in", "plug it in")])

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
    plug = show_json(tmp_path / "out")["devices"]["plug:desk"]
    assert 41 < plug["mean_w"] < 43
    assert plug["provenance"] == "measured"
    assert "plug:attic" in smaragdine("doctor", env=env, cwd=tmp_path).stdout


def test_a_broken_plug_in_is_absent_and_nothing_else(tmp_path: Path) -> None:
    env = install(tmp_path, "bad = wallplug:broken\nwallplug = wallplug:open_sensors")
    done = smaragdine("doctor", env=env, cwd=tmp_path)
    assert done.returncode == 0
    assert "no meter" in " ".join(done.stdout.split())
    assert "plug:desk" in done.stdout
