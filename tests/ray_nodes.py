"""A real local Ray cluster: a head that runs nothing, and nodes with a simulated GPU each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli import wait_for
from nvml_fake import GpuSpec, nvml_environment, settings_now


@dataclass
class Cluster:
    address: str
    specs: dict[str, Path]
    defaults_mw: dict[str, int]
    nodes: dict[str, Any]
    cluster: Any

    def limit_mw(self, node: str) -> int:
        """Of its GPU, as read from outside."""
        return settings_now(self.specs[node]).get((0, "l"), self.defaults_mw[node])

    def limits_mw(self) -> dict[str, int]:
        return {node: self.limit_mw(node) for node in self.specs}

    def restored(self) -> bool:
        return wait_for(lambda: self.limits_mw() == self.defaults_mw)

    def kill(self, node: str) -> None:
        self.cluster.remove_node(self.nodes[node], allow_graceful=False)


@contextmanager
def ray_cluster(
    folder: Path, gpus: Mapping[str, tuple[str, GpuSpec]], more: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """`gpus` by node: the type that Ray knows it by, and what it is. `more` is added to every node's
    environment."""
    from ray.cluster_utils import Cluster as RayCluster

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
        for name, (kind, gpu) in gpus.items():
            (folder / name).mkdir()
            own = nvml_environment(folder / name, [gpu])
            specs[name] = Path(own["FAKE_NVML"])
            variables = {k: own[k] for k in ("FAKE_NVML", "LD_LIBRARY_PATH")}
            variables["SMARAGDINE_LIMITS_JOURNAL"] = str(folder / name / "limits" / "journal")
            nodes[name] = made.add_node(
                wait=False, node_name=name, num_cpus=1, num_gpus=1, env_vars={**variables, **(more or {})},
                labels={"ray.io/accelerator-type": kind}, object_store_memory=80 * 2**20,
            )  # fmt: skip
        made.wait_for_nodes()
        defaults_mw = {name: int(gpu.limit_default_w * 1000) for name, (_, gpu) in gpus.items()}
        yield Cluster(made.address, specs, defaults_mw, nodes, made)
    finally:
        made.shutdown()
