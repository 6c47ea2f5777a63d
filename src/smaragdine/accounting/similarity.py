"""Tells how alike two footprints are: Pearson correlation and mean difference (the paper's PCC and MED).

Energies correlate highly for a reason that has nothing to do with power: what runs longer takes more. So
every score stands beside the one that constant power, time alone, would get.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from smaragdine.accounting.arithmetic import over_devices
from smaragdine.accounting.footprint import Footprint, column, numbers, replace
from smaragdine.arrays import Floats
from smaragdine.errors import UserError

Quantity = Literal["energy", "power"]
Key = tuple[str, str | None]  # name, phase

# Powers that are meant to be one constant differ in their last bits: that is no variance.
_SAME = 1e-12


@dataclass(frozen=True)
class Correlation:
    """`value` is None if there is none; then `reason` says why."""

    value: float | None
    reason: str
    common: int  # names and phases on both sides
    only_a: tuple[Key, ...]
    only_b: tuple[Key, ...]


@dataclass(frozen=True)
class Scores:
    """How alike two footprints are, and how alike they would be if power were constant.

    `time_alone` puts time in the place of energy on both sides: the score of a tool that knows no power.
    `floor` does so in b only: how well b's times alone foretell a's energies.
    """

    energy: Correlation
    power: Correlation
    time_alone_energy: Correlation
    time_alone_power: Correlation
    floor: Correlation


def correlation(
    a: Footprint, b: Footprint, quantity: Quantity = "energy", device: str | None = None
) -> Correlation:
    """Pearson correlation over the names and phases that both have, on one device or over all."""
    return _correlate(values(a, quantity, device), values(b, quantity, device))


def mean_difference(
    a: Footprint, b: Footprint, quantity: Quantity = "energy", device: str | None = None
) -> float | None:
    """The mean of b − a over the names and phases that both have, in joules or watts."""
    of_a, of_b = values(a, quantity, device), values(b, quantity, device)
    differences = [of_b[key] - of_a[key] for key in of_a if key in of_b]
    return float(np.mean(differences)) if differences else None


def time_alone(
    a: Footprint, b: Footprint, quantity: Quantity = "energy", device: str | None = None
) -> Correlation:
    """The score of constant power: on both sides an energy is busy time × the device's mean power."""
    return correlation(constant_power(a), constant_power(b), quantity, device)


def scores(a: Footprint, b: Footprint, device: str | None = None) -> Scores:
    flat_a, flat_b = constant_power(a), constant_power(b)
    return Scores(
        correlation(a, b, "energy", device),
        correlation(a, b, "power", device),
        correlation(flat_a, flat_b, "energy", device),
        correlation(flat_a, flat_b, "power", device),
        correlation(a, flat_b, "energy", device),
    )


def matrix(
    footprints: Sequence[Footprint], quantity: Quantity = "energy", device: str | None = None
) -> list[list[Correlation]]:
    """Each footprint against every other, and against itself."""
    of_each = [values(footprint, quantity, device) for footprint in footprints]
    return [[_correlate(a, b) for b in of_each] for a in of_each]


def constant_power(footprint: Footprint) -> Footprint:
    """The footprint if all operations of a device drew the same power; totals stay."""
    busy_s, energy_j = column(footprint.rows, "busy_s"), column(footprint.rows, "energy_j")
    devices = np.array(footprint.rows["device"].to_pylist(), dtype=object)
    flat_j = np.zeros_like(energy_j)
    for device in footprint.devices:
        own = devices == device
        if busy_s[own].sum() > 0:
            flat_j[own] = busy_s[own] * (energy_j[own].sum() / busy_s[own].sum())
    return dataclasses.replace(footprint, rows=replace(footprint.rows, {"energy_j": numbers(flat_j)}))


def values(footprint: Footprint, quantity: Quantity, device: str | None = None) -> dict[Key, float]:
    """Energy or mean power of every name and phase; what never took time has no power."""
    rows = (over_devices(footprint) if device is None else select(footprint, device)).rows
    energy_j, busy_s = column(rows, "energy_j").tolist(), column(rows, "busy_s").tolist()
    keys = zip(rows["name"].to_pylist(), rows["phase"].to_pylist(), strict=True)
    if quantity == "energy":
        return dict(zip(keys, energy_j, strict=True))
    return {key: e / s for key, e, s in zip(keys, energy_j, busy_s, strict=True) if s > 0}


def select(footprint: Footprint, device: str) -> Footprint:
    """One device of a footprint."""
    if device not in footprint.devices:
        known = ", ".join(footprint.devices) or "none"
        raise UserError(f"the footprint has no device {device}", remedy=f"There are: {known}")
    return dataclasses.replace(
        footprint, rows=footprint.device_rows(device), devices={device: footprint.devices[device]}
    )


def _correlate(a: Mapping[Key, float], b: Mapping[Key, float]) -> Correlation:
    common = [key for key in a if key in b]
    only_a, only_b = tuple(key for key in a if key not in b), tuple(key for key in b if key not in a)
    value, reason = _pearson(np.array([a[key] for key in common]), np.array([b[key] for key in common]))
    return Correlation(value, reason, len(common), only_a, only_b)


def _pearson(x: Floats, y: Floats) -> tuple[float | None, str]:
    if x.size < 2:
        return None, f"{x.size or 'no'} common name{'' if x.size == 1 else 's'}, and it takes two"
    for side, of_side in (("A", x), ("B", y)):
        if np.ptp(of_side) <= _SAME * np.abs(of_side).max():
            return None, f"all common names are the same in {side}"
    x, y = x / np.abs(x).max(), y / np.abs(y).max()
    x, y = x - x.mean(), y - y.mean()
    r = float((x @ y) / np.sqrt((x @ x) * (y @ y)))
    return min(1.0, max(-1.0, r)), ""
