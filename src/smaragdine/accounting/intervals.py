"""Groups rows by layer, phase or another name, and tells how far the sum of any rows may be off.

Errors cancel inside a sensor's window: if one operation is charged too little, its neighbours are charged too
much. So the error of a group is less than the sum of its rows' errors. Its half-width is the least of three:

    the sum of its rows' half-widths
    the sum of all other rows' half-widths, plus how far all rows together may be off
    what the joint posterior of all rows says (`uncertainty`)

Whoever shows a sum of rows gets its half-width here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from smaragdine.accounting.calibrated import COUNTER, GUESSED, TOGETHER, Attribution
from smaragdine.accounting.footprint import Footprint, column, combine, group, numbers, ordered, replace
from smaragdine.accounting.integral import sum_by
from smaragdine.accounting.ledger import Ledger
from smaragdine.accounting.uncertainty import Z_95, Look, Widths, around_zero
from smaragdine.arrays import Floats, Ints

By = Literal["name", "layer", "phase"]

NO_PHASE = "(no phase)"

Key = tuple[str, str | None]  # name, phase
_AT_ONCE = 64  # directions at a time, to bound the memory


@dataclass(frozen=True)
class Joint:
    """What is known about the rows of one device together. Everything but `vector_of` adds up over rows."""

    row: Mapping[Key, int]
    vectors_j: Floats  # a group is off by the length of the sum of its rows' vectors
    vector_of: Ints  # per row: its vector; -1: none
    weight: Floats  # per row: how much of that vector
    own_var_j2: Floats  # per row: its error that is independent of others
    bias_j: Floats  # row × look: how far equal sharing is off, signed
    chance_j: Floats  # an error that may be the same in every row

    def scaled(self, factor: float) -> Joint:
        return dataclasses.replace(
            self,
            weight=self.weight * factor,
            own_var_j2=self.own_var_j2 * factor**2,
            bias_j=self.bias_j * factor,
            chance_j=self.chance_j * factor,
        )


def joint_of(
    looks: Sequence[Look], widths: Widths, ledger: Ledger, keys: Ints, names: Sequence[Key]
) -> Joint | None:
    """For the rows `keys`, called `names`; None if no window was looked at."""
    if not looks or looks[0].together is None:
        return None
    clocks, together = looks[0], looks[0].together
    # The windows we looked at stand for all.
    scale = np.divide(
        ledger.energy_j, clocks.equal_j, out=np.zeros_like(ledger.energy_j), where=clocks.equal_j > 0
    )
    share_s = (clocks.share_s * scale)[keys]
    bias_j = [
        np.where(look.joint_w > 0, look.joint_w, clocks.joint_w)[keys] * share_s
        - (clocks.equal_j * scale)[keys]
        for look in looks
    ]
    return Joint(
        row={name: i for i, name in enumerate(names)},
        vectors_j=together.factor_w,
        vector_of=together.column[keys],
        weight=share_s,
        own_var_j2=(together.own_w[keys] * share_s) ** 2,
        bias_j=np.stack(bias_j, axis=1),
        chance_j=widths.chance_j[keys],
    )


def joint_of_calls(found: Attribution, call: Ints, row: Ints, rows: int, names: Sequence[Key]) -> Joint:
    """What is known together about the rows. A replay that is off is off in every row of its call, the model
    in every row that goes by it. The counter knows the sum: what one row has too much, the others have too
    little."""
    ids, column = np.unique(np.where(found.replayed | found.modelled, call, -1), return_inverse=True)
    off_j = np.zeros((rows, ids.size + 2))
    np.add.at(off_j, (row, column), found.above_idle_j * found.deviation)
    unknown = np.flatnonzero(ids == -1)
    own_j = np.zeros(rows)
    if unknown.size:
        own_j = off_j[:, unknown[0]].copy()
        off_j[:, unknown[0]] = 0.0
    above_j = sum_by(row, found.above_idle_j, rows)
    off_j[:, -2] = GUESSED * sum_by(row, np.where(found.modelled, found.above_idle_j, 0.0), rows)
    off_j[:, -1] = (TOGETHER + abs(1 - found.closure) / 2) * above_j
    share = above_j / above_j.sum() if above_j.sum() > 0 else np.zeros(rows)
    off_j -= share[:, None] * off_j.sum(axis=0)
    energy_j = sum_by(row, found.energy_j, rows)
    return Joint(
        row={name: i for i, name in enumerate(names)},
        vectors_j=off_j,
        vector_of=np.arange(rows),
        weight=np.ones(rows),
        own_var_j2=(own_j * (1 - share)) ** 2,
        bias_j=np.zeros((rows, 1)),
        chance_j=COUNTER * energy_j,
    )


def row_half_widths_j(joint: Joint) -> Floats:
    variance = (joint.vectors_j**2).sum(axis=1) + joint.own_var_j2 + joint.chance_j**2
    return Z_95 * np.sqrt(variance)


def half_widths_j(footprint: Footprint, order: Ints, begin: Ints, end: Ints) -> Floats:
    """For each group of rows `order[begin[i]:end[i]]`; nan if one of its rows is not known.

    Sensors of two devices err independently, in ways we do not know: their half-widths add up.
    """
    rows = footprint.rows
    width_j = np.zeros(begin.size)
    texts = rows["device"].combine_chunks().dictionary_encode()
    code = texts.indices.to_numpy()[order] if rows.num_rows else np.zeros(0, dtype=np.int32)
    for i, device in enumerate(texts.dictionary.to_pylist()):
        before = np.concatenate([[0], np.cumsum(code == i)])
        here = order[code == i]
        width_j += _of_device(footprint, device, here, before[begin], before[end])
    return width_j


def _of_device(footprint: Footprint, device: str, order: Ints, begin: Ints, end: Ints) -> Floats:
    row_j = column(footprint.rows, "uncertainty_j")[order]
    unknown = _sums(np.isnan(row_j).astype(np.float64), begin, end) > 0
    row_j = np.nan_to_num(row_j, nan=0.0)
    inside_j = np.maximum(_sums(row_j, begin, end), 0.0)
    width_j = inside_j.copy()
    total = footprint.devices.get(device)
    if total is not None and total.uncertainty_j is not None:
        all_j = column(footprint.device_rows(device), "uncertainty_j").sum()  # nan: others are not known
        width_j = np.fmin(width_j, np.maximum(all_j - inside_j, 0.0) + total.uncertainty_j)
    joint = footprint.joints.get(device)
    if joint is not None:
        width_j = np.minimum(width_j, _by_joint(footprint, joint, order, begin, end))
    # A row alone keeps its own half-width.
    width_j = np.where(end - begin == 1, inside_j, width_j)
    return np.where(unknown, np.nan, width_j)


def _by_joint(footprint: Footprint, joint: Joint, order: Ints, begin: Ints, end: Ints) -> Floats:
    rows = footprint.rows.select(["name", "phase"]).take(pa.array(order))
    keys = zip(rows["name"].to_pylist(), rows["phase"].to_pylist(), strict=True)
    place = np.array([joint.row.get(key, -1) for key in keys], dtype=np.int64)
    strange = _sums((place < 0).astype(np.float64), begin, end) > 0
    variance = _sums(joint.own_var_j2[place], begin, end)
    vector, weight = joint.vector_of[place], joint.weight[place]
    vector, weight = np.maximum(vector, 0), np.where(vector < 0, 0.0, weight)
    for first in range(0, joint.vectors_j.shape[1], _AT_ONCE):
        part = joint.vectors_j[:, first : first + _AT_ONCE]
        summed = _sums(part[vector] * weight[:, None], begin, end)
        variance += np.einsum("ij,ij->i", summed, summed)
    bias_j = np.abs(_sums(joint.bias_j[place], begin, end)).max(axis=1)
    deviation_j = np.hypot(np.sqrt(np.maximum(variance, 0.0)), _sums(joint.chance_j[place], begin, end))
    width_j = around_zero(bias_j, deviation_j, np.ones(begin.size))
    return np.where(strange, np.inf, width_j)


def _sums(values: Floats, begin: Ints, end: Ints) -> Floats:
    """The sum of each range, from running sums."""
    running = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])
    return running[end] - running[begin]


def sum_half_width_j(footprint: Footprint, device: str) -> float | None:
    """How far all rows of a device together may be off; None if we know no better than row by row."""
    joint = footprint.joints.get(device)
    rows = np.flatnonzero(footprint.rows["device"].to_numpy(zero_copy_only=False) == device)
    if joint is None or not rows.size:
        return None
    whole = np.array([0]), np.array([rows.size])
    found = float(_by_joint(footprint, joint, rows, *whole)[0])
    summed = float(column(footprint.rows, "uncertainty_j")[rows].sum())
    return None if np.isnan(summed) or not np.isfinite(found) else min(found, summed)


def joined(footprint: Footprint, rows: pa.Table, devices: Sequence[str] | None = None) -> Footprint:
    """Joins rows of the same device, name and phase, and keeps the energy. `rows` are the footprint's own,
    with other names or devices."""
    groups = group(rows)
    order = np.argsort(groups.of_row, kind="stable")
    end = np.cumsum(groups.size)
    widths_j = half_widths_j(footprint, order, end - groups.size, end)
    combined = replace(combine(rows, groups), {"uncertainty_j": numbers(widths_j)})
    joints = {}
    if rows["device"].equals(footprint.rows["device"]):
        joints = {
            device: _regrouped(footprint, joint, device, rows) for device, joint in footprint.joints.items()
        }
    return dataclasses.replace(
        footprint, rows=ordered(combined, footprint.devices if devices is None else devices), joints=joints
    )


def _regrouped(footprint: Footprint, joint: Joint, device: str, rows: pa.Table) -> Joint:
    """What is known of a device's rows together, under their new names."""
    here = np.flatnonzero(rows["device"].to_numpy(zero_copy_only=False) == device)
    old, new = (table.select(["name", "phase"]).take(pa.array(here)) for table in (footprint.rows, rows))
    called: dict[Key, int] = {}
    place, of = np.empty(here.size, dtype=np.int64), np.empty(here.size, dtype=np.int64)
    pairs = (zip(table["name"].to_pylist(), table["phase"].to_pylist(), strict=True) for table in (old, new))
    for i, (before, after) in enumerate(zip(*pairs, strict=True)):
        place[i], of[i] = joint.row[before], called.setdefault(after, len(called))
    vector, weight = joint.vector_of[place], joint.weight[place]
    spread = np.zeros((len(called), joint.vectors_j.shape[0]))
    np.add.at(spread, (of[vector >= 0], vector[vector >= 0]), weight[vector >= 0])

    def summed(values: Floats) -> Floats:
        sums = np.zeros((len(called), *values.shape[1:]))
        np.add.at(sums, of, values[place])
        return sums

    return Joint(
        row=called,
        vectors_j=spread @ joint.vectors_j,
        vector_of=np.arange(len(called)),
        weight=np.ones(len(called)),
        own_var_j2=summed(joint.own_var_j2),
        bias_j=summed(joint.bias_j),
        chance_j=summed(joint.chance_j),
    )


def grouped(footprint: Footprint, by: By, depth: int = 3) -> Footprint:
    """Rows by name, phase or layer: a layer is the first `depth` parts of the path, without the operation."""
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
    """An operation outside of all layers stands for itself."""
    *layers, operation = name.split("/")
    return "/".join(layers[: max(depth, 1)]) if layers else operation
