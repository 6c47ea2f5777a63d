"""What `smaragdine export` writes, in this process, and what the report says of the same recording."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from smaragdine.accounting.run import Run
from smaragdine.cli.export import main

Figures = dict[str, Any]


def figures_of(run: Path) -> Figures:
    """As `smaragdine report --json` prints them."""
    return json.loads(json.dumps(Run.open(run).to_json()))


def export(run: Path, to: str, *words: str, out: str = "out") -> Path:
    assert main([str(run), "--to", to, "-o", out, *words]) == 0
    return Path(out)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def scalars(folder: Path) -> dict[str, list[tuple[float, int, float]]]:
    # What tells TensorBoard to read by its own means, and not to load TensorFlow for it.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loaded = module.EventAccumulator(str(folder), size_guidance={module.SCALARS: 0})
    loaded.Reload()
    return {
        tag: [(one.wall_time, one.step, one.value) for one in loaded.Scalars(tag)]
        for tag in loaded.Tags()["scalars"]
    }
