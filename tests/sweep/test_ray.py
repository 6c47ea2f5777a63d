"""The Ray engine on a real local cluster of three nodes: one is killed midway, and nothing is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from cli import TIMEOUT_S, finish, smaragdine, start, wait_for, write_script
from nvml_fake import GpuSpec
from ray_nodes import Cluster, ray_cluster
from smaragdine.errors import UserError
from smaragdine.jobs.job import Stop
from smaragdine.jobs.ray import RaySlot
from smaragdine.sweep import ray as engine_ray
from smaragdine.sweep.table import read_results

pytest.importorskip("ray", reason="Ray is not installed")

LIMITS, REPEAT = (150, 250), 6
GPU = GpuSpec(high_w=900)
LIMITS_MW = [limit * 1000 for limit in LIMITS]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    nodes = dict.fromkeys(("n1", "n2", "n3"), ("H200", GPU))
    with ray_cluster(tmp_path_factory.mktemp("cluster"), nodes) as made:
        yield made


def test_what_a_node_refuses_is_refused_before_anything_runs(cluster: Cluster, tmp_path: Path) -> None:
    write_script(tmp_path / "work.py", "")
    words = ["--engine", "ray", "--address", cluster.address]
    low = smaragdine("sweep", "--power", "50,150", *words, "--", "work.py", cwd=tmp_path)
    assert low.returncode == 2
    # Whichever answers first.
    assert " cannot run the sweep: experiment work: gpu:0 power limit of 50 W: outside" in low.stderr
    other = smaragdine("sweep", "--power", "150", "--gpu-type", "V100", *words, "--", "work.py", cwd=tmp_path)
    assert other.returncode == 2
    assert "no node has a GPU of type V100: there are: H200" in other.stderr
    assert not (tmp_path / "sweeps").exists()


def test_ctrl_c_brings_every_limit_back(cluster: Cluster, tmp_path: Path) -> None:
    write_script(tmp_path / "work.py", "import time; time.sleep(60)")
    words = ["--power", "150", "--repeat", "2", "--engine", "ray", "--address", cluster.address]
    process = start("sweep", *words, "-o", tmp_path / "sweep", "--", "work.py", cwd=tmp_path)
    try:
        # Each of three devices has tried the limit; two of them are at work now.
        log = tmp_path / "sweep" / "sweep.log"
        assert wait_for(lambda: process.poll() is not None or "3 devices" in text_of(log))
        assert wait_for(
            lambda: process.poll() is not None or list(cluster.limits_mw().values()).count(150_000) == 2,
            TIMEOUT_S,
        )
        process.send_signal(signal.SIGINT)
    finally:
        code, _, err = finish(process)
    assert code == 130, err
    assert "--resume" in err
    assert cluster.restored()
    assert not list((tmp_path / "sweep" / "runs").iterdir())


def test_a_node_dies_and_every_repetition_is_there_once(cluster: Cluster, tmp_path: Path) -> None:
    write_script(tmp_path / "work.py", "import time; time.sleep(0.3)")
    sweep = tmp_path / "sweep"
    limits = ",".join(map(str, LIMITS))
    words = ["--power", limits, "--repeat", str(REPEAT), "--gpu-type", "H200", "--engine", "ray"]
    process = start("sweep", *words, "--address", cluster.address, "-o", sweep, "--", "work.py", cwd=tmp_path)
    try:
        # Midway: some are done, and the node that is to die is at one.
        assert wait_for(lambda: process.poll() is not None or _midway(sweep, cluster))
        if process.poll() is None:
            cluster.kill("n2")
    finally:
        code, _, err = finish(process)
    assert code == 0, err
    assert "was lost with n2" in err
    rows = read_results(sweep)
    assert len(rows) == len(LIMITS) * REPEAT
    assert {(row.power_limit_w, row.repetition) for row in rows} == {
        (float(limit), n) for limit in LIMITS for n in range(REPEAT)
    }
    assert {row.status for row in rows} == {"complete"}
    assert {"n1", "n3"} <= {row.node for row in rows} <= {"n1", "n2", "n3"}
    for row in rows:
        assert row.device_name == GPU.name
        assert row.energy_counter_j is None or row.energy_counter_j > 0
    assert cluster.restored()


class BusyRay:
    """Nodes that answer at the given look; the user stops waiting at the last one."""

    def __init__(self, answers: dict[str, tuple[int, str]], stop: Stop) -> None:
        self.answers, self.stop = answers, stop
        self.looks = 0
        self.cancelled: list[str] = []
        self.exceptions = pytest.importorskip("ray").exceptions

    def wait(self, refs: list[str], timeout: float) -> tuple[list[str], list[str]]:
        self.looks += 1
        if self.looks == 5:
            self.stop.number = signal.SIGINT
        done = [ref for ref in refs if self.answers[ref][0] <= self.looks]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: str) -> str:
        return self.answers[ref][1]

    def cancel(self, ref: str, force: bool) -> None:
        self.cancelled.append(ref)


class Listener:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)


def check(ray: BusyRay, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def submit(_: Any, slot: RaySlot, *call: Any) -> str:
        return slot.node

    monkeypatch.setattr("smaragdine.jobs.ray.submit", submit)
    monkeypatch.setattr(engine_ray, "_SAY_AFTER_S", 0.0)
    slots = [RaySlot(node, node, 0, True, "H200", 1.0) for node in ray.answers]
    listener = Listener()
    try:
        engine_ray.check_nodes(ray, cast(Any, None), [], slots, cast(Any, listener), ray.stop)
    except UserError as error:
        return [*listener.said, str(error)]
    return listener.said


def test_waiting_for_a_busy_cluster_ends_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = BusyRay({"n1": (1, ""), "n2": (99, ""), "n3": (99, "")}, Stop())
    assert check(ray, monkeypatch) == ["waiting for n2, n3: busy with something else; see ray status"]
    assert (ray.looks, ray.cancelled) == (5, ["n2", "n3"])


def test_a_node_that_refuses_ends_the_waiting_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = BusyRay({"n1": (99, ""), "n2": (2, "no such limit")}, Stop())
    assert check(ray, monkeypatch)[1:] == ["n2 cannot run the sweep: no such limit"]
    assert (ray.looks, ray.cancelled) == (2, ["n1"])


def test_nodes_that_answer_at_once_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = BusyRay({"n1": (1, ""), "n2": (1, "")}, Stop())
    assert check(ray, monkeypatch) == []
    assert (ray.looks, ray.cancelled) == (1, [])


def _midway(sweep: Path, cluster: Cluster) -> bool:
    return len(list((sweep / "runs").glob("*"))) >= 3 and cluster.limit_mw("n2") in LIMITS_MW


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""
