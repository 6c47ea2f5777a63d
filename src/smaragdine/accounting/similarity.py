"""Tells how alike two footprints are: Pearson correlation and mean difference (the paper's PCC and MED).

Energies correlate highly for a reason that has nothing to do with power: what runs longer takes more. So
every score stands beside the one that constant power, time alone, would get.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from smaragdine.accounting.arithmetic import over_devices
from smaragdine.accounting.footprint import Footprint, column, numbers, only, replace
from smaragdine.arrays import Floats
from smaragdine.errors import UserError
from smaragdine.stats import StandardError, difference, prior_of_variances

Quantity = Literal["energy", "power"]
Key = tuple[str, str | None]  # name, phase

# Powers that are meant to be one constant differ in their last bits: that is no variance.
_SAME = 1e-12
LEAST_NAMES = 5  # with fewer, one of them may be all they have in common
_NOTHING = 1e-24  # a relative variance below this is rounding


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
    return only(footprint, [device])


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


# How a difference splits into what all names share and what is a name's own.


@dataclass(frozen=True)
class Beside:
    """How a name's difference splits into what all names share and what is its own."""

    common_j: float  # the part that all names have in common
    spread: StandardError  # of the part that is its own


def beside_company(a_j: Floats, b_j: Floats) -> list[Beside | None]:
    """For every name, from matrices of runs × names; None if the runs say nothing.

    If one side has a single run, we take it to spread as the other side's runs do.
    """
    count = a_j.shape[1]
    mean_j = (a_j.mean(axis=0) + b_j.mean(axis=0)) / 2
    usual = mean_j > 0
    if usual.sum() < LEAST_NAMES or max(len(a_j), len(b_j)) < 2:
        return [None] * count
    safe_j = np.where(usual, mean_j, 1.0)
    relative = [side / safe_j / _levels(side, mean_j)[:, None] for side in (a_j, b_j)]
    variances = [
        _moderated(side[:, usual], np.log(mean_j[usual])) if len(side) > 1 else None for side in relative
    ]
    known = [variance for variance in variances if variance is not None]
    if not known:
        return [None] * count
    variance_a, variance_b = (known[0] if variance is None else variance for variance in variances)
    common_j = (b_j.mean(axis=0) - a_j.mean(axis=0)) - mean_j * (
        relative[1].mean(axis=0) - relative[0].mean(axis=0)
    )
    found: list[Beside | None] = [None] * count
    for i, name in enumerate(np.flatnonzero(usual).tolist()):
        sides = [
            StandardError(math.sqrt(variance[i] / len(side)) * float(mean_j[name]), freedom)
            for (variance, freedom), side in ((variance_a, a_j), (variance_b, b_j))
        ]
        spread = difference(*sides)
        if min(len(a_j), len(b_j)) == 1:
            # Both sides rest on the same few runs.
            spread = StandardError(spread.error, sides[0].freedom)
        found[name] = Beside(float(common_j[name]), spread)
    return found


def _levels(side_j: Floats, mean_j: Floats) -> Floats:
    """Per run, the weighted median of its names' ratios to the mean: one changed layer does not move it."""
    rows = np.flatnonzero(mean_j > 0)
    ratio = side_j[:, rows] / mean_j[rows]
    order = np.argsort(ratio, axis=1)
    weight = np.cumsum(mean_j[rows][order], axis=1)
    middle = np.argmax(weight >= weight[:, -1:] / 2, axis=1)
    level = np.take_along_axis(np.take_along_axis(ratio, order, 1), middle[:, None], 1)[:, 0]
    return np.where(level > 0, level, 1.0)


def _moderated(relative: Floats, log_j: Floats) -> tuple[list[float], float] | None:
    """Relative variances of all names, each drawn towards those of names with as much energy, and the number
    of free values behind them. None if no name spreads."""
    own = len(relative) - 1
    variance = relative.var(axis=0, ddof=1)
    spreading = variance > _NOTHING
    if spreading.sum() < LEAST_NAMES:
        return None
    log = np.log(variance[spreading])
    line = _line(log_j[spreading], log)
    usual = np.polyval(line, log_j)
    shift, prior = prior_of_variances(log - usual[spreading], own)
    prior = min(prior, own)
    of_others = np.exp(usual + shift)
    return ((prior * of_others + own * variance) / (prior + own)).tolist(), own + prior


def _line(log_j: Floats, log_variance: Floats) -> Floats:
    """Small names spread more. With few names, or equal ones, the slope would say nothing."""
    if log_j.size < 2 * LEAST_NAMES or log_j.std() < 1e-6:
        return np.array([log_variance.mean()])
    return np.polyfit(log_j, log_variance, 1)
