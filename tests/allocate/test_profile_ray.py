"""`smaragdine profile --engine ray` on a real local cluster: two types of GPU, and a node that dies."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cli import finish, smaragdine, start, wait_for, write_script
from nvml_fake import GpuSpec
from ray_nodes import Cluster, ray_cluster
from refusal import refused
from smaragdine.accounting.run import Run
from smaragdine.allocate.device import Request
from smaragdine.allocate.profiler import steps_of
from smaragdine.allocate.ray import requests_by_type
from smaragdine.jobs.ray import RaySlot
from smaragdine.recording.reader import open_recording

pytest.importorskip("ray", reason="Ray is not installed")


def a10(uuid: str, idle_w: float) -> tuple[str, GpuSpec]:
    name = "NVIDIA Fake A10"
    return "A10", GpuSpec(name, uuid, high_w=idle_w, limit_default_w=300, limit_max_w=300, counter=False)


T4 = GpuSpec(
    "NVIDIA Fake T4", "GPU-t4", high_w=90, limit_min_w=60, limit_default_w=70, limit_max_w=70, counter=False
)
# No two chips draw the same power.
NODES = {"a1": a10("GPU-a1", 250), "a2": a10("GPU-a2", 240), "t1": ("T4", T4)}
# All but the T4's first point are over only when they may be: until then the cluster is looked at.
TRAIN = """
    import os, pathlib, time
    import smaragdine

    first = os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-t4" and not pathlib.Path("second").exists()
    if first:
        pathlib.Path("second").touch()
    while not first and not pathlib.Path("go").exists():
        time.sleep(0.02)
    for step in range(100_000):
        time.sleep(0.01)
        smaragdine.mark("step_end", step)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    # As where PyTorch has no CUDA, but without the seconds that its import takes.
    (folder / "torch.py").write_text("raise RuntimeError('no CUDA here')")
    with ray_cluster(folder, NODES, {"PYTHONPATH": str(folder)}) as made:
        yield made


def test_a_node_dies_and_ctrl_c_and_every_type_has_its_profile(cluster: Cluster, tmp_path: Path) -> None:
    write_script(tmp_path / "train.py", TRAIN)
    words = [
        "profile",
        "--engine",
        "ray",
        "--address",
        cluster.address,
        "-o",
        "profiles/",
        "--power",
        "a10=150",
    ]
    words += ["--batches", "4", "--warm-up", "1", "--steps", "4", "--blocks", "2"]
    program = ["--power", "t4=60,65", "--", "train.py", "{batch}"]
    out = tmp_path / "profiles"
    process = start(*words, *program, cwd=tmp_path)

    def until(condition: Callable[[], bool]) -> None:
        assert wait_for(lambda: process.poll() is not None or condition())

    try:
        until(lambda: 150_000 in (cluster.limit_mw("a1"), cluster.limit_mw("a2")))
        first, other = ("a1", "a2") if cluster.limit_mw("a1") == 150_000 else ("a2", "a1")
        if process.poll() is None:
            cluster.kill(first)
        until(lambda: cluster.limit_mw(other) == 150_000)
        until(lambda: (out / "t4.profile" / "batch4-60W.json").exists() and cluster.limit_mw("t1") == 65_000)
        process.send_signal(signal.SIGINT)
    finally:
        code, _, err = finish(process)
    assert code == 130, err
    assert f"A10 was lost with {first}: it runs again" in err
    assert f"A10 begins anew on {other}" in err
    assert "The same command goes on" in err
    assert cluster.restored()
    assert not list(out.glob("*.parquet"))

    # One type is refused, and the other goes on until it fails; its log is here, not on the node.
    write_script(tmp_path / "train.py", "raise ValueError('bad data')")
    bad = smaragdine(*words, "--power", "t4=50", "--", "train.py", "{batch}", cwd=tmp_path)
    assert bad.returncode == 2
    assert "T4 cannot be profiled: t1: gpu:0 power limit of 50 W: outside" in bad.stderr
    assert "exit code 1: ValueError: bad data. See profiles/a10.profile/batch4-150W.log" in bad.stderr
    assert "ValueError: bad data" in (out / "a10.profile" / "batch4-150W.log").read_text()
    assert bad.stderr.splitlines()[-1] == "smaragdine: T4 and A10 cannot be profiled: see above"

    # Only what is missing is measured, on the same GPUs.
    write_script(tmp_path / "train.py", TRAIN)
    (tmp_path / "go").touch()
    done = smaragdine(*words, *program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "smaragdine allocate --gpu a10=profiles/a10.parquet --gpu t4=profiles/t4.parquet" in done.stderr
    measured = [line.partition(": ")[2] for line in done.stderr.splitlines() if "batch 4" in line]
    assert sorted(measured) == [
        f"A10 on {other}: gpu:0: batch 4 at 150 W (1 of 1)",
        "T4 on t1: gpu:0: batch 4 at 65 W (2 of 2)",
    ]
    assert cluster.restored()
    for kind, limits_w, idle_w in (("a10", [150], NODES[other][1].high_w), ("t4", [60, 65], 70)):
        rows = pq.read_table(out / f"{kind}.parquet").to_pylist()
        assert [(row["power_limit_w"], row["repeat"]) for row in rows] == [
            (w, n) for w in limits_w for n in (0, 1)
        ]
        for row in rows:
            assert row["energy_j"] / row["time_s"] == pytest.approx(row["power_limit_w"], rel=1e-3)
            assert row["idle_w"] == pytest.approx(idle_w, rel=1e-3)
            assert (row["gpu"], row["batch"]) == (kind, 4)
        for limit_w in limits_w:
            recording = open_recording(out / f"{kind}.profile" / f"batch4-{limit_w}W")
            assert steps_of(Run(recording), "gpu:0", 1, 2).count >= 4


def test_types_are_those_of_the_cluster() -> None:
    slots = [
        RaySlot("1", "n1", 0, True, "A10", 1),
        RaySlot("2", "n2", 0, True, "T4", 1),
        RaySlot("3", "n3", 0, True, "T4", 1),
    ]
    asked = Request(("train.py", "{batch}"), (4,), (100.0,), 1, 1, 1, 60)
    found = requests_by_type(asked, {"a10": [200, 300]}, [], slots)
    assert {kind: each.limits_w for kind, each in found.items()} == {"A10": (200, 300), "T4": (100,)}
    assert list(requests_by_type(asked, {}, ["t4"], slots)) == ["T4"]
    assert list(requests_by_type(asked, {}, [], [RaySlot("1", "n1", 0, False, None, 4)])) == ["cpu"]
    refused(lambda: requests_by_type(asked, {}, ["t4", "V100"], slots), "type V100", "there are: A10, T4")
    refused(lambda: requests_by_type(asked, {"h200": [500]}, [], slots), "type h200")
    refused(lambda: requests_by_type(asked, {"a10": [200]}, ["T4"], slots), "--power a10", "--gpu-type")
    refused(lambda: requests_by_type(asked, {}, [], []), "no node")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "ray", "-o", "a.parquet"], "Name a folder"),
        (["--engine", "ray", "--device", "gpu:0"], "Choose types with --gpu-type"),
        (["--engine", "ray", "--power", "=5"], "is not TYPE=W"),
        (["--engine", "ray", "--address", "127.0.0.1:1"], "no Ray cluster"),
        (["--power", "a10=200"], "types are those of a cluster"),
        (["--gpu-type", "T4"], "Add --engine ray"),
    ],
)
def test_bad_words(tmp_path: Path, words: list[str], said: str) -> None:
    write_script(tmp_path / "train.py", "")
    done = smaragdine("profile", *words, "--", "train.py", "{batch}", cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
