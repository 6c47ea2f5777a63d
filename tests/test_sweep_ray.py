"""The Ray engine on a real local cluster of three nodes: one is killed midway, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli import TIMEOUT_S, finish, smaragdine, start, wait_for, write_script
from nvml_fake import GpuSpec, nvml_environment, settings_now
from smaragdine.sweep.table import read_results

pytest.importorskip("ray", reason="Ray is not installed")

LIMITS, REPEAT = (150, 250), 6
GPU = GpuSpec(high_w=900)
DEFAULT_MW = 700_000
LIMITS_MW = [limit * 1000 for limit in LIMITS]


@dataclass
class Cluster:
    address: str
    nodes: dict[str, Any]
    specs: dict[str, Path]
    cluster: Any

    def limits_mw(self) -> list[int]:
        """Of every node's GPU, as read from outside."""
        return [settings_now(spec).get((0, "l"), DEFAULT_MW) for spec in self.specs.values()]

    def at_work(self) -> int:
        return sum(limit_mw != DEFAULT_MW for limit_mw in self.limits_mw())

    def restored(self) -> bool:
        return wait_for(lambda: set(self.limits_mw()) == {DEFAULT_MW}, TIMEOUT_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head that runs nothing and three nodes, each with a simulated GPU of its own."""
    from ray.cluster_utils import Cluster as RayCluster

    tmp_path = tmp_path_factory.mktemp("cluster")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quick = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 4,
    }
    made = RayCluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "_system_config": quick},
    )
    nodes: dict[str, Any] = {}
    specs: dict[str, Path] = {}
    try:
        for name in ("n1", "n2", "n3"):
            folder = tmp_path / name
            folder.mkdir()
            own = nvml_environment(folder, [GPU])
            specs[name] = Path(own["FAKE_NVML"])
            variables = {k: own[k] for k in ("FAKE_NVML", "LD_LIBRARY_PATH")}
            variables["SMARAGDINE_LIMITS_JOURNAL"] = str(folder / "limits" / "journal")
            nodes[name] = made.add_node(
                wait=False, node_name=name, num_cpus=1, num_gpus=1, env_vars=variables,
                labels={"ray.io/accelerator-type": "H200"}, object_store_memory=80 * 2**20,
            )  # fmt: skip
        made.wait_for_nodes()
        yield Cluster(made.address, nodes, specs, made)
    finally:
        made.shutdown()


def test_what_a_node_refuses_is_refused_before_anything_runs(cluster: Cluster, tmp_path: Path) -> None:
    write_script(tmp_path / "work.py", "")
    words = ["--engine", "ray", "--address", cluster.address]
    low = smaragdine("sweep", "--power", "50,150", *words, "--", "work.py", cwd=tmp_path)
    assert low.returncode == 2
    assert "n1 cannot run the sweep: experiment work: gpu:0 power limit of 50 W: outside" in low.stderr
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
        assert wait_for(lambda: process.poll() is not None or "3 devices" in text_of(log), TIMEOUT_S)
        assert wait_for(
            lambda: process.poll() is not None or cluster.limits_mw().count(150_000) == 2, TIMEOUT_S
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
        assert wait_for(lambda: process.poll() is not None or _midway(sweep, cluster.specs["n2"]), TIMEOUT_S)
        if process.poll() is None:
            cluster.cluster.remove_node(cluster.nodes["n2"], allow_graceful=False)
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


def _midway(sweep: Path, spec: Path) -> bool:
    return len(list((sweep / "runs").glob("*"))) >= 3 and settings_now(spec).get((0, "l")) in LIMITS_MW


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""
