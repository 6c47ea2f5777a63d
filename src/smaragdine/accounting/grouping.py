"""A footprint by layer or by phase, and in another order."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pyarrow as pa

from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.joint import joined
from smaragdine.accounting.rows import column, replace

By = Literal["name", "layer", "phase"]
Sort = Literal["energy", "power", "time", "count"]

NO_PHASE = "(no phase)"
_SORTED = {"energy": "energy_j", "time": "busy_s", "count": "count"}


def grouped(footprint: Footprint, by: By, depth: int = 3) -> Footprint:
    """The same energy in fewer rows. By layer: the first `depth` parts of the path, less the operation."""
    if by == "name":
        return footprint
    rows = footprint.rows
    if by == "phase":
        names = [phase or NO_PHASE for phase in rows["phase"].to_pylist()]
    else:
        names = [_layer(name, depth) for name in rows["name"].to_pylist()]
    columns = {"name": pa.array(names, pa.string()), "phase": pa.nulls(rows.num_rows, pa.string())}
    return joined(footprint, replace(rows, columns))


def _layer(name: str, depth: int) -> str:
    """An operation that is in no layer is its own."""
    *layers, operation = name.split("/")
    return "/".join(layers[: max(depth, 1)]) if layers else operation


def in_order(footprint: Footprint, sort: Sort) -> Footprint:
    """Rows of each device by falling energy, mean power, busy time or count."""
    rows = footprint.rows
    if sort == "power":
        busy_s, energy_j = column(rows, "busy_s"), column(rows, "energy_j")
        key = np.divide(energy_j, busy_s, out=np.full(len(busy_s), -1.0), where=busy_s > 0)
    else:
        key = column(rows, _SORTED[sort])
    rank = {device: i for i, device in enumerate(footprint.devices)}
    device = np.array([rank.get(name, len(rank)) for name in rows["device"].to_pylist()], dtype=np.int64)
    return dataclasses.replace(footprint, rows=rows.take(pa.array(np.lexsort((-key, device)))))
