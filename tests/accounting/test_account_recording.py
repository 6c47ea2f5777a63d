"""`smaragdine account RUN` and `compare` on real recordings, against what the fakes gave out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import smaragdine as package
from cli import info, smaragdine, write_script
from nvml_fake import GpuSpec, energy_j, nvml_environment
from powercap_fake import PowercapTree
from smaragdine.accounting.traces import device_traces
from smaragdine.recording.writer import write_events

MS = 1_000_000
SQUARE = GpuSpec(low_w=60, high_w=300, period_ms=200, duty=0.25, limit_default_w=400)
BURN = """
import time
end = time.monotonic() + 3.2
while time.monotonic() < end:
    sum(range(1000))
"""


def record(folder: Path, gpu: GpuSpec, cpu_w: float) -> Path:
    write_script(folder / "burn.py", BURN)
    env = nvml_environment(folder, [gpu])
    with PowercapTree(folder / "powercap", packages=1) as tree:
        tree.start({"cpu:0": cpu_w, "dram:0": 4.0})
        done = smaragdine(
            "run",
            "-o",
            folder / "run",
            folder / "burn.py",
            env={
                "LD_LIBRARY_PATH": env["LD_LIBRARY_PATH"],
                "FAKE_NVML": env["FAKE_NVML"],
                "SMARAGDINE_POWERCAP_ROOT": str(tree.root),
            },
        )
    assert done.returncode == 0, done.stderr
    return folder / "run"


def traced(run: Path) -> pa.Table:
    """Four steps of 300 ms in the middle of the run, with gaps; the last part of each is the host's alone."""
    begin_ns = info(run)["begin_ns"] + 900 * MS
    rows = [
        {
            "name": name,
            "device": device,
            "start_ns": begin_ns + step * 300 * MS + after * MS,
            "duration_ns": long * MS,
            "phase": phase,
            "step": step,
        }
        for step in range(4)
        for name, device, after, long, phase in (
            ("net/layer_0/MatMul", "gpu:0", 0, 100, "forward"),
            ("net/layer_0/MatMul", "gpu:0", 100, 150, "backward"),
            ("load", "cpu:0", 0, 200, None),
            ("save", "cpu:0", 200, 100, None),
            ("ring", "nic:0", 0, 10, None),
        )
    ]
    return pa.Table.from_pylist(rows)


def span_ns(events: pa.Table) -> tuple[int, int]:
    rows = events.to_pylist()
    return min(r["start_ns"] for r in rows), max(r["start_ns"] + r["duration_ns"] for r in rows)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("a"), SQUARE, 40.0)


@pytest.fixture(scope="module")
def run(bare: Path) -> Path:
    run = Path(shutil.copytree(bare, bare.parent / "traced"))
    assert write_events(run, traced(run)) is None
    return run


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gpu = GpuSpec(low_w=120, high_w=390, period_ms=200, duty=0.25, limit_default_w=400)
    run = record(tmp_path_factory.mktemp("b"), gpu, 40.0)
    assert write_events(run, traced(run)) is None
    return run


def output(*words: Any) -> str:
    done = smaragdine(*words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def account(*words: Any) -> dict[str, Any]:
    return json.loads(output("account", *words, "--json", "-"))


def test_a_recording_is_accounted_over_its_traced_steps(run: Path) -> None:
    found = account(run)
    begin_ns, end_ns = span_ns(traced(run))
    traces = device_traces(package.open(run))
    assert found["devices"].keys() == {"gpu:0", "cpu:0", "dram:0"}
    assert found["without_power"] == {"nic:0": 4}

    gpu = found["devices"]["gpu:0"]
    assert gpu["total_j"] == pytest.approx(traces["gpu:0"].energy_j(begin_ns, end_ns), rel=1e-9)
    assert gpu["total_j"] == pytest.approx(energy_j(SQUARE, begin_ns, end_ns), rel=0.05)
    assert gpu["idle_j"] + sum(row["energy_j"] for row in gpu["rows"]) == pytest.approx(gpu["total_j"])
    assert {(row["name"], row["phase"], row["count"]) for row in gpu["rows"]} == {
        ("net/layer_0/MatMul", "forward", 4),
        ("net/layer_0/MatMul", "backward", 4),
    }
    assert gpu["covered_s"] == pytest.approx(1.2)
    assert (gpu["missing_s"], gpu["steps"], gpu["provenance"]) == (0, 4, "measured")
    assert gpu["other_j"] is gpu["static_j"] is None

    for device, watts in (("cpu:0", 40.0), ("dram:0", 4.0)):
        figures = found["devices"][device]
        whole_j = figures["total_j"] + figures["other_j"]
        assert whole_j == pytest.approx(traces[device].energy_j(begin_ns, end_ns), rel=1e-6)
        assert whole_j == pytest.approx(watts * 1.2, rel=0.05)
        assert 0 < figures["static_j"] <= figures["total_j"]
        assert figures["other_j"] >= 0
    assert found["devices"]["dram:0"]["rows"] == []
    assert found["devices"]["cpu:0"]["idle_j"] == pytest.approx(0, abs=1e-9)


def test_what_is_said_about_a_recording(run: Path) -> None:
    shown = output("account", run)
    for words in (
        "4 steps",
        "other processes and the monitor used",
        "program's part of the idle device's power",
        "nic:0: 4 events, but nobody measured its power",
    ):
        assert words in shown
    per_step = account(run, "--per-step")["devices"]["gpu:0"]
    assert per_step["total_j"] == pytest.approx(account(run)["devices"]["gpu:0"]["total_j"] / 4)
    assert "MatMul" in output("account", run, "--tree")


def test_events_of_another_tool(bare: Path, run: Path, tmp_path: Path) -> None:
    pq.write_table(traced(run), tmp_path / "trace.parquet")
    assert account(bare, "--events", tmp_path / "trace.parquet") == account(run)


def refused(*words: Any) -> str:
    done = smaragdine(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


def test_recordings_that_cannot_be_accounted(bare: Path, run: Path, tmp_path: Path) -> None:
    assert "has no events: no steps were traced" in refused("account", bare)
    assert "has no events" in refused("compare", bare, run)
    events = traced(run)
    late = pa.chunked_array([[t + 86_400_000 * MS for t in events["start_ns"].to_pylist()]])
    pq.write_table(events.set_column(2, "start_ns", late), tmp_path / "late.parquet")
    assert "no time in common" in refused("account", bare, "--events", tmp_path / "late.parquet")
    alien = events.set_column(1, "device", pa.array(["tpu:0"] * events.num_rows))
    pq.write_table(alien, tmp_path / "alien.parquet")
    assert "no device in common" in refused("account", bare, "--events", tmp_path / "alien.parquet")


def test_a_baseline_sets_the_static_part(run: Path, tmp_path: Path) -> None:
    with PowercapTree(tmp_path / "powercap", packages=1) as tree:
        tree.start({"cpu:0": 10.0, "dram:0": 1.0})
        env = {"SMARAGDINE_POWERCAP_ROOT": str(tree.root)}
        done = smaragdine("baseline", "--seconds", "1", "-o", tmp_path / "idle", env=env)
    assert done.returncode == 0, done.stderr
    plain, above = (
        account(run, *words)["devices"]["cpu:0"] for words in ([], ["--baseline", tmp_path / "idle"])
    )
    assert above["static_j"] < plain["static_j"]
    assert above["total_j"] + above["other_j"] == pytest.approx(plain["total_j"] + plain["other_j"])


def compared(*words: Any) -> dict[str, Any]:
    return json.loads(output("compare", *words, "--json"))


@pytest.fixture
def files(run: Path, other: Path, tmp_path: Path) -> Sequence[Path]:
    made = [tmp_path / "a.parquet", tmp_path / "b.json"]
    for source, file in zip((run, other), made, strict=True):
        output("account", source, "-o", file)
    return made


def test_compare_recordings_and_their_footprints(run: Path, other: Path, files: Sequence[Path]) -> None:
    found = compared(run, other)
    one = account(run, "--per-step")["devices"]["gpu:0"]
    assert found["devices"]["gpu:0"]["a_j"] == pytest.approx(one["total_j"] - one["idle_j"])
    assert found["idle"]["a_j"] >= one["idle_j"]
    assert found["devices"]["gpu:0"]["difference_j"] > 0
    assert [change["name"] for change in found["changes"][:2]] == ["net/layer_0/MatMul"] * 2
    assert {key: value for key, value in compared(*files).items() if key not in "ab"} == {
        key: value for key, value in found.items() if key not in "ab"
    }
    shown = output("compare", run, other)
    assert "net/layer_0/MatMul" in shown
    assert found["verdict"][1:] in " ".join(shown.split())
    same = compared(run, run)
    assert same["total"]["difference_j"] == 0
    assert same["energy"]["correlation"] == pytest.approx(1)


def test_compare_sides_and_many(run: Path, other: Path, files: Sequence[Path]) -> None:
    sides = compared(run, files[0], "--against", other, files[1])
    assert sides["runs"] == [1, 1]  # a footprint is no other run than the recording it was made of
    assert sides["devices"]["gpu:0"] == compared(run, other)["devices"]["gpu:0"]
    assert "2 runs were given, 1 of them more than once" in sides["remarks"][0]
    many = compared(run, other, files[0])
    for quantity in ("energy", "power", "time_alone"):
        rows = many[quantity]
        assert [len(row) for row in rows] == [3, 3, 3]
        assert rows[0][2] == rows[2][0] == pytest.approx(1)
        assert rows[0][1] == pytest.approx(rows[1][0])
    assert "time alone" in output("compare", run, other, files[0])
    assert "one run alone" in refused("compare", run)
