"""Footprints by layer and by phase, and in another order: the energy stays."""

from __future__ import annotations

import pyarrow as pa
import pytest

from smaragdine.accounting.footprint import ROWS, DeviceTotal, Footprint, in_order
from smaragdine.accounting.intervals import NO_PHASE, grouped


def row(name: str, phase: str | None, energy_j: float, busy_s: float, count: float, device: str = "gpu:0"):
    return {
        "device": device,
        "name": name,
        "phase": phase,
        "energy_j": energy_j,
        "busy_s": busy_s,
        "count": count,
        "uncertainty_j": energy_j / 10,
        "basis": "prior",
        "step_mean_j": None,
        "step_std_j": None,
    }


FOOTPRINT = Footprint(
    pa.Table.from_pylist(
        [
            row("bert/encoder/layer_0/dense/MatMul", "forward", 8.0, 1.0, 4),
            row("bert/encoder/layer_0/dense/MatMul", "backward", 16.0, 4.0, 8),
            row("bert/encoder/layer_1/Softmax", "forward", 2.0, 2.0, 16),
            row("loss", None, 1.0, 0.0, 1),
            row("bert/encoder/layer_0/dense/MatMul", "forward", 32.0, 8.0, 4, "cpu:0"),
        ],
        schema=ROWS,
    ),
    {"gpu:0": DeviceTotal(30.0, 3.0, 9.0, 0.0), "cpu:0": DeviceTotal(33.0, 1.0, 9.0, 0.0)},
)


@pytest.mark.parametrize(
    ("depth", "gpu"),
    [
        (1, {"bert": 26.0, "loss": 1.0}),
        (3, {"bert/encoder/layer_0": 24.0, "bert/encoder/layer_1": 2.0, "loss": 1.0}),
        (9, {"bert/encoder/layer_0/dense": 24.0, "bert/encoder/layer_1": 2.0, "loss": 1.0}),
    ],
)
def test_layers(depth: int, gpu: dict[str, float]) -> None:
    found = grouped(FOOTPRINT, "layer", depth)
    assert {r["name"]: r["energy_j"] for r in found.device_rows("gpu:0").to_pylist()} == gpu
    assert found.device_rows("cpu:0")["energy_j"].to_pylist() == [32.0]
    assert found.devices == FOOTPRINT.devices
    first = found.device_rows("gpu:0").to_pylist()[0]
    assert (first["busy_s"], first["count"]) == ((7.0, 28.0) if depth == 1 else (5.0, 12.0))
    assert first["uncertainty_j"] == pytest.approx(first["energy_j"] / 10)


def test_phases() -> None:
    found = grouped(FOOTPRINT, "phase").device_rows("gpu:0").to_pylist()
    assert [(r["name"], r["energy_j"]) for r in found] == [
        ("backward", 16.0),
        ("forward", 10.0),
        (NO_PHASE, 1.0),
    ]


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("energy", [16.0, 8.0, 2.0, 1.0]),
        ("power", [8.0, 16.0, 2.0, 1.0]),  # 8, 4, 1 W; never busy comes last
        ("time", [16.0, 2.0, 8.0, 1.0]),
        ("count", [2.0, 16.0, 8.0, 1.0]),
    ],
)
def test_order(sort: str, order: list[float]) -> None:
    found = in_order(FOOTPRINT, sort)  # type: ignore[arg-type]
    assert found.device_rows("gpu:0")["energy_j"].to_pylist() == order
    assert found.device_rows("cpu:0")["energy_j"].to_pylist() == [32.0]
