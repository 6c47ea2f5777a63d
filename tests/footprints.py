"""Footprints made by hand or by Hypothesis, and the law that holds for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from smaragdine.accounting.footprint import ROWS, DeviceTotal, Footprint

Row = dict[str, Any]


def footprint(rows: Sequence[Row], idle_j: float = 0.0, steps: int = 0, **total: Any) -> Footprint:
    """Rows need a name and an energy; all else has a default. Every device has the same idle energy."""
    whole = [
        {
            "device": "gpu:0",
            "phase": None,
            "busy_s": 1.0,
            "count": 1.0,
            "uncertainty_j": None,
            "basis": None,
            "step_mean_j": None,
            "step_std_j": None,
            **row,
        }
        for row in rows
    ]
    whole.sort(key=lambda row: (row["device"], -row["energy_j"], row["name"], row["phase"] or "~"))
    columns = {field.name: [row[field.name] for row in whole] for field in ROWS}
    devices = {
        device: DeviceTotal(
            math.fsum(row["energy_j"] for row in whole if row["device"] == device) + idle_j,
            idle_j,
            total.get("covered_s", 10.0),
            total.get("missing_s", 0.0),
            steps,
            provenance=total.get("provenance"),
        )
        for device in sorted({row["device"] for row in whole} or {"gpu:0"})
    }
    return Footprint(pa.table(columns, schema=ROWS), devices)


def energies(made: Footprint) -> dict[str, float]:
    """name → energy, where a name has one row."""
    return dict(zip(made.rows["name"].to_pylist(), made.rows["energy_j"].to_pylist(), strict=True))


def row(made: Footprint, name: str, device: str = "gpu:0") -> Row:
    (found,) = [r for r in made.rows.to_pylist() if r["name"] == name and r["device"] == device]
    return found


def assert_conserved(made: Footprint) -> None:
    """Rows and idle add up to the total, on each device; and no row is twice there."""
    for device, total in made.devices.items():
        rows_j = math.fsum(made.device_rows(device)["energy_j"].to_pylist())
        assert math.isclose(rows_j + total.idle_j, total.total_j, rel_tol=1e-9, abs_tol=1e-12)
    keys = [(r["device"], r["name"], r["phase"]) for r in made.rows.to_pylist()]
    assert len(keys) == len(set(keys))
    assert {key[0] for key in keys} <= set(made.devices)


_segment = st.sampled_from(
    ["a", "b", "layer_0", "layer_1", "layer_2", "0", "1", "x", "MatMul", "MatMul_1", ""]
)
names = st.lists(_segment, min_size=1, max_size=5).map("/".join)
_energy = st.just(0.0) | st.floats(1e-9, 1e6)


@st.composite
def footprints(draw: st.DrawFn, devices: Sequence[str] = ("gpu:0", "cpu:0"), most: int = 12) -> Footprint:
    keys = draw(
        st.lists(
            st.tuples(st.sampled_from(list(devices)), names, st.sampled_from([None, "forward", "backward"])),
            max_size=most,
            unique=True,
        )
    )
    rows: list[Row] = [
        {
            "device": device,
            "name": name,
            "phase": phase,
            "energy_j": draw(_energy),
            "busy_s": draw(st.just(0.0) | st.floats(1e-9, 1e3)),
            "count": float(draw(st.integers(1, 100))),
            "uncertainty_j": draw(st.none() | _energy),
            "basis": draw(st.sampled_from([None, "prior", "repetition"])),
            "step_mean_j": draw(_energy),
            "step_std_j": draw(_energy),
        }
        for device, name, phase in keys
    ]
    return footprint(rows, draw(_energy), draw(st.integers(2, 50)))
