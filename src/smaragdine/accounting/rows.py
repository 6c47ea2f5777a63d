"""Rows of footprints: which belong together, what their sum is, and their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from smaragdine.arrays import Floats, Ints


@dataclass(frozen=True)
class Groups:
    """Rows of the same device, name and phase, over all that are given."""

    of_row: Ints  # row → its group
    leader: Ints  # group → its row with the widest uncertainty
    size: Ints

    def sum(self, values: Floats) -> Floats:
        """A group with an unknown (nan) value has an unknown sum."""
        return np.bincount(self.of_row, weights=values, minlength=self.size.size).astype(np.float64)


def column(rows: pa.Table, name: str) -> Floats:
    """A column of numbers; null is nan, so that what is not known stays so in every sum."""
    return rows[name].to_numpy().astype(np.float64, copy=False)


def numbers(values: Floats) -> pa.Array:
    return pa.array(values, type=pa.float64(), from_pandas=True)


def replace(rows: pa.Table, columns: dict[str, pa.Array]) -> pa.Table:
    for name, values in columns.items():
        rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), values)
    return rows


def group(rows: pa.Table) -> Groups:
    code = np.zeros(rows.num_rows, dtype=np.int64)
    for name in ("device", "name", "phase"):
        texts = rows[name].combine_chunks().dictionary_encode(null_encoding="encode")
        code = code * max(1, len(texts.dictionary)) + texts.indices.to_numpy(zero_copy_only=False)
    _, of_row, size = np.unique(code, return_inverse=True, return_counts=True)
    width_j = np.nan_to_num(column(rows, "uncertainty_j"), nan=np.inf)
    by_group = np.lexsort((-width_j, of_row))
    first = np.concatenate([[0], np.cumsum(size)[:-1]]).astype(np.int64) if size.size else size
    return Groups(of_row.astype(np.int64), by_group[first], size.astype(np.int64))


def combine(rows: pa.Table, groups: Groups) -> pa.Table:
    """One row for each group.

    Uncertainties add up: nothing here knows what cancels (`joint` does). The sum rests on what its widest
    part rests on. What the parts cost per step adds up; how much their sum spreads over steps cannot be had
    from their own spreads.
    """
    alone = groups.size == 1
    summed = {
        name: numbers(groups.sum(column(rows, name)))
        for name in ("energy_j", "busy_s", "count", "uncertainty_j", "step_mean_j")
    }
    spread_j = np.where(alone, column(rows, "step_std_j")[groups.leader], np.nan)
    return replace(rows.take(pa.array(groups.leader)), {**summed, "step_std_j": numbers(spread_j)})


def ordered(rows: pa.Table, devices: Iterable[str]) -> pa.Table:
    """Devices in the given order, each by falling energy; ties by name, so that the order is always one."""
    known = {device: i for i, device in enumerate(devices)}
    texts = rows["device"].combine_chunks().dictionary_encode()
    rank = pa.array([known.get(device, len(known)) for device in texts.dictionary.to_pylist()], pa.int32())
    order = [
        ("rank", "ascending"),
        ("device", "ascending"),
        ("energy_j", "descending"),
        ("name", "ascending"),
        ("phase", "ascending"),
    ]
    return rows.append_column("rank", rank.take(texts.indices)).sort_by(order).drop_columns(["rank"])
