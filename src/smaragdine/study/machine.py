"""The machine that a study runs on, as far as readers of its results need it."""

from __future__ import annotations

import os
from typing import Any

from smaragdine.sensors.discover import host_facts, settings_from_environment
from smaragdine.sensors.nvml_gpu import ask, nvml, text
from smaragdine.sweep.limits import gpus_here


def machine_here() -> dict[str, Any]:
    facts = host_facts(settings_from_environment(os.environ))
    with gpus_here() as gpus:
        names = [text(ask(nvml().nvmlDeviceGetName, gpu.handle) or "") for gpu in gpus]
        cards = [gpu.uuid for gpu in gpus]
    return {
        "gpus": names,
        "cards": cards,
        **{name: facts[name] for name in ("cpu", "kernel", "memory_bytes")},
    }


def size_here(machine: dict[str, Any]) -> str:
    """The paper's size where programs see a GPU, else what two cores can do."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return "base" if machine["gpus"] and not hidden else "small"
