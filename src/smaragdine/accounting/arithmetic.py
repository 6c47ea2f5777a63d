"""Adds, scales and averages footprints: sums over runs and devices, means with their spread, figures per
step.

Every result keeps the conservation law: on each device, rows and idle add up to the total.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from smaragdine.accounting.footprint import (
    DeviceTotal,
    Footprint,
    Groups,
    column,
    combine,
    group,
    numbers,
    ordered,
    replace,
)
from smaragdine.accounting.intervals import joined
from smaragdine.arrays import Floats
from smaragdine.errors import UserError

ALL_DEVICES = "all"


@dataclass(frozen=True)
class Average:
    """The mean of several runs, and how far apart they are.

    `spread` has a row for every row of `mean`, in the same order: energy_mean_j, energy_std_j, busy_mean_s,
    busy_std_s, power_mean_w, power_std_w, and `runs`, the number of runs that have the row. In a run without
    it, a name took no energy; its power is the mean over runs that have it. With one run a standard deviation
    is null.
    """

    mean: Footprint
    spread: pa.Table
    runs: int


def add(footprints: Sequence[Footprint]) -> Footprint:
    """The sum over runs. Uncertainties add up linearly, because all runs share their bias (see `combine`).

    Figures per step are over all steps of all runs; a name that a run does not have cost nothing there.
    """
    if not footprints:
        raise UserError("no footprints to add")
    devices = _devices(footprints)
    rows = pa.concat_tables([footprint.rows for footprint in footprints])
    groups = group(rows)
    steps = np.concatenate([_steps(footprint) for footprint in footprints])
    totals = {
        device: _sum_totals([f.devices[device] for f in _having(footprints, device)]) for device in devices
    }
    combined = combine(rows, groups)
    all_steps = np.array(
        [totals[device].steps for device in combined["device"].to_pylist()], dtype=np.float64
    )
    mean_j, std_j = _pool_steps(rows, groups, steps, all_steps)
    combined = replace(combined, {"step_mean_j": numbers(mean_j), "step_std_j": numbers(std_j)})
    return Footprint(ordered(combined, devices), totals, _without_power(footprints), _remarks(footprints))


def scale(footprint: Footprint, factor: float | Mapping[str, float]) -> Footprint:
    """Multiplies the work by a factor, or by one per device.

    What a step costs, and on how many steps that rests, stays as it is.
    """
    by_device = factor if isinstance(factor, Mapping) else dict.fromkeys(footprint.devices, factor)
    if not all(0 < value < float("inf") for value in by_device.values()):
        raise UserError("a footprint can only be scaled by a number above 0")
    factors = np.array(
        [by_device[device] for device in footprint.rows["device"].to_pylist()], dtype=np.float64
    )
    scaled = ("energy_j", "busy_s", "count", "uncertainty_j")
    rows = replace(footprint.rows, {name: numbers(column(footprint.rows, name) * factors) for name in scaled})
    devices = {device: _scale_total(total, by_device[device]) for device, total in footprint.devices.items()}
    joints = {device: joint.scaled(by_device[device]) for device, joint in footprint.joints.items()}
    return dataclasses.replace(footprint, rows=rows, devices=devices, joints=joints)


def per(footprint: Footprint, n: float) -> Footprint:
    """Divides by `n`, the number of epochs or samples that the footprint covers."""
    if not n > 0:
        raise UserError(f"a footprint cannot be divided by {n}", remedy="Give a number above 0")
    return scale(footprint, 1 / n)


def per_step(footprint: Footprint) -> Footprint:
    """Divides by the steps of the run: the most that any of its devices saw."""
    steps = max((total.steps for total in footprint.devices.values()), default=0)
    if not steps:
        raise UserError("the footprint has no steps", "its events do not say to which step they belong")
    if any(total.per_step for total in footprint.devices.values()):
        return footprint
    scaled = scale(footprint, 1 / steps)
    devices = {name: dataclasses.replace(total, per_step=True) for name, total in scaled.devices.items()}
    return dataclasses.replace(scaled, devices=devices)


def over_devices(footprint: Footprint) -> Footprint:
    """All devices as one, named `all`.

    Parts of devices (`cpu:0/core`) and the whole platform (`psys`) are left out: others contain them, or they
    contain others. Devices run side by side, so covered and missing time are those of the device with the
    most.
    """
    kept = adding_devices(footprint)
    counted = [device in kept for device in footprint.rows["device"].to_pylist()]
    whole = footprint.rows.filter(pa.array(counted, type=pa.bool_()))
    rows = replace(whole, {"device": pa.repeat(pa.scalar(ALL_DEVICES, pa.string()), whole.num_rows)})
    totals = [footprint.devices[device] for device in kept]
    together = dataclasses.replace(
        _sum_totals(totals),
        covered_s=max((total.covered_s for total in totals), default=0.0),
        missing_s=max((total.missing_s for total in totals), default=0.0),
        steps=max((total.steps for total in totals), default=0),
        foreign=max((total.foreign for total in totals if total.foreign is not None), default=None),
    )
    chosen = dataclasses.replace(footprint, rows=whole)
    return dataclasses.replace(
        joined(chosen, rows, [ALL_DEVICES]), devices={ALL_DEVICES: together} if totals else {}
    )


def adding_devices(footprint: Footprint) -> list[str]:
    """Devices whose energies may be added up: none is counted twice."""
    names = list(footprint.devices)
    kept = [name for name in names if name != "psys" and name.partition("/")[0] not in set(names) - {name}]
    return kept or names


def working_device(footprints: Sequence[Footprint]) -> str | None:
    """The device whose operations take the most energy; None if the footprints have none in common."""
    energy_j = {
        device: sum(f.devices[device].total_j - f.devices[device].idle_j for f in footprints)
        for device in footprints[0].devices
        if len(_having(footprints, device)) == len(footprints)
    }
    return max(energy_j, key=lambda device: energy_j[device], default=None)


def average(footprints: Sequence[Footprint]) -> Average:
    """Mean and spread over runs. A device counts over the runs that have it: not measured is not zero."""
    total = add(footprints)
    runs = {device: len(_having(footprints, device)) for device in total.devices}
    remarks = [
        f"{device} was measured in {n} of {len(footprints)} runs; its mean is over those"
        for device, n in runs.items()
        if n < len(footprints)
    ]
    mean = scale(total, {device: 1 / n for device, n in runs.items()})
    devices = {
        # An average run has the steps of one run, so that `per_step` works on it.
        device: dataclasses.replace(one, steps=round(one.steps / runs[device]))
        for device, one in mean.devices.items()
    }
    mean = dataclasses.replace(mean, devices=devices, remarks=(*mean.remarks, *remarks))
    return Average(mean, _spread(footprints, mean, runs), len(footprints))


def _spread(footprints: Sequence[Footprint], mean: Footprint, runs: Mapping[str, int]) -> pa.Table:
    keys = mean.rows.select(["device", "name", "phase"])
    # Rows of the mean come first, so each row of a run falls into the group of one.
    rows = pa.concat_tables([mean.rows, *(footprint.rows for footprint in footprints)])
    groups = group(rows)
    own = groups.of_row[: mean.rows.num_rows]
    in_run = np.arange(rows.num_rows) >= mean.rows.num_rows
    energy_j, busy_s = column(rows, "energy_j"), column(rows, "busy_s")
    ran = in_run & (busy_s > 0)
    power_w = np.divide(energy_j, busy_s, out=np.zeros_like(energy_j), where=ran)
    out_of = _by_row(keys, runs)
    columns: dict[str, pa.Array] = {name: keys[name] for name in keys.column_names}
    for name, unit, values, counted, n in (
        ("energy", "j", energy_j, in_run, out_of),
        ("busy", "s", busy_s, in_run, out_of),
        ("power", "w", power_w, ran, groups.sum(ran.astype(np.float64))[own]),
    ):
        mean_of, std = _mean_std(groups, own, values, counted, n)
        columns |= {f"{name}_mean_{unit}": numbers(mean_of), f"{name}_std_{unit}": numbers(std)}
    occurs = groups.sum(in_run.astype(np.float64))[own].astype(np.int64)
    return pa.table({**columns, "runs": pa.array(occurs)})


def _mean_std(
    groups: Groups, own: np.ndarray, values: Floats, counted: np.ndarray, n: Floats
) -> tuple[Floats, Floats]:
    """Over `n` runs; those without the row count as zero. nan if there are too few runs."""
    with np.errstate(divide="ignore", invalid="ignore"):
        by_group = np.zeros(groups.size.size)
        by_group[own] = np.where(n > 0, groups.sum(np.where(counted, values, 0.0))[own] / n, np.nan)
        mean = by_group[own]
        off = np.where(counted, values - by_group[groups.of_row], 0.0)
        absent = n - groups.sum(counted.astype(np.float64))[own]
        squares = groups.sum(off * off)[own] + absent * mean * mean
        return mean, np.where(n > 1, np.sqrt(squares / (n - 1)), np.nan)


def _pool_steps(rows: pa.Table, groups: Groups, steps: Floats, all_steps: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation over all steps of all runs, from those of each run."""
    counted = steps > 0
    mean_j = np.where(counted, column(rows, "step_mean_j"), 0.0)
    # One step has no spread, so it adds none.
    std_j = np.where(steps > 1, column(rows, "step_std_j"), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        pooled_j = np.where(all_steps > 0, groups.sum(mean_j * steps) / all_steps, np.nan)
        off_j = np.where(counted, mean_j - pooled_j[groups.of_row], 0.0)
        squares = groups.sum(np.maximum(steps - 1, 0) * std_j**2 + steps * off_j**2)
        squares += (all_steps - groups.sum(steps)) * pooled_j**2
        return pooled_j, np.where(all_steps > 1, np.sqrt(squares / (all_steps - 1)), np.nan)


def _steps(footprint: Footprint) -> Floats:
    return _by_row(footprint.rows, {device: total.steps for device, total in footprint.devices.items()})


def _by_row(rows: pa.Table, by_device: Mapping[str, float]) -> Floats:
    """The number of each row's device."""
    return np.array([by_device[device] for device in rows["device"].to_pylist()], dtype=np.float64)


def _devices(footprints: Sequence[Footprint]) -> list[str]:
    return list(dict.fromkeys(device for footprint in footprints for device in footprint.devices))


def _having(footprints: Sequence[Footprint], device: str) -> list[Footprint]:
    return [footprint for footprint in footprints if device in footprint.devices]


def _sum_totals(totals: Sequence[DeviceTotal]) -> DeviceTotal:
    if len({total.per_step for total in totals}) > 1:
        raise UserError("footprints of one step and of whole runs do not add up", remedy="Give one kind only")
    return DeviceTotal(
        total_j=sum(total.total_j for total in totals),
        idle_j=sum(total.idle_j for total in totals),
        covered_s=sum(total.covered_s for total in totals),
        missing_s=sum(total.missing_s for total in totals),
        steps=sum(total.steps for total in totals),
        other_j=_sum_known([total.other_j for total in totals]),
        static_j=_sum_known([total.static_j for total in totals]),
        uncertainty_j=_sum_known([total.uncertainty_j for total in totals]),
        per_step=all(total.per_step for total in totals),
        provenance=_provenance([total.provenance for total in totals]),
        foreign=_mean_foreign(totals),
    )


def _sum_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _mean_foreign(totals: Sequence[DeviceTotal]) -> float | None:
    """Weighted by covered time; if a part is not known, neither is the whole."""
    loads = [(total.foreign, total.covered_s) for total in totals if total.foreign is not None]
    covered_s = sum(covered for _, covered in loads)
    if len(loads) < len(totals) or covered_s <= 0:
        return None
    return sum(load * covered for load, covered in loads) / covered_s


def _provenance(each: Sequence[str | None]) -> str | None:
    known = sorted({provenance for provenance in each if provenance is not None})
    return " + ".join(known) if known and None not in each else None


def _scale_total(total: DeviceTotal, factor: float) -> DeviceTotal:
    return dataclasses.replace(
        total,
        total_j=total.total_j * factor,
        idle_j=total.idle_j * factor,
        covered_s=total.covered_s * factor,
        missing_s=total.missing_s * factor,
        other_j=None if total.other_j is None else total.other_j * factor,
        static_j=None if total.static_j is None else total.static_j * factor,
        uncertainty_j=None if total.uncertainty_j is None else total.uncertainty_j * factor,
    )


def _without_power(footprints: Sequence[Footprint]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for footprint in footprints:
        for device, count in footprint.without_power.items():
            counts[device] = counts.get(device, 0) + count
    return counts


def _remarks(footprints: Sequence[Footprint]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(remark for footprint in footprints for remark in footprint.remarks))
