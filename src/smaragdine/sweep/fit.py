"""Energy, time and their products against a limit, for every group of measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smaragdine.arrays import Floats
from smaragdine.errors import UserError
from smaragdine.sweep.measurements import Group, Value
from smaragdine.sweep.parabola import Parabola, fit_parabola, judge
from smaragdine.sweep.pareto import pareto

QUANTITIES: Mapping[str, str] = {"energy": "J", "time": "s", "edp": "J·s", "ed2p": "J·s²", "power": "W"}
LEAST_LIMITS = 3
MOST = 1e100  # squares of it must still be numbers
_LEAST_SPAN = 1e-100  # of the limits: a curvature is divided by its square
SINGLE = "residuals of single measurements"
REPEATED = "residuals of repeated measurements"


@dataclass(frozen=True)
class GroupFit:
    group: Group
    parabolas: dict[str, Parabola]  # by quantity
    front: list[float]  # limits that no other beats in both mean time and mean energy, fastest first


@dataclass(frozen=True)
class Analysis:
    groups: list[GroupFit]
    left_out: list[tuple[dict[str, Value], str]]  # group, and why it cannot be fitted


def analyse(groups: Sequence[Group], quantities: Sequence[str] = tuple(QUANTITIES)) -> Analysis:
    """Fit every group with three limits or more; an error where there is none."""
    fitted: list[GroupFit] = []
    left_out: list[tuple[dict[str, Value], str]] = []
    for group in groups:
        limits = np.unique(group.limit)
        if limits.size < LEAST_LIMITS:
            there = ", ".join(f"{limit:g}" for limit in limits)
            left_out.append(
                (group.by, f"{limits.size} of the {LEAST_LIMITS} limits that a parabola needs: {there}")
            )
            continue
        if _apart(limits) < LEAST_LIMITS:
            spread = f"{limits[0]:g} to {limits[-1]:g}"
            left_out.append((group.by, f"most of its limits lie too close together for {spread}"))
            continue
        for name in quantities:
            if not np.abs(quantity(group, name)).max() < MOST:
                raise UserError(
                    f"{name} is beyond {MOST:.0e} {QUANTITIES[name]}", remedy="Is time in seconds?"
                )
        parabolas = {name: fit_parabola(group.limit, quantity(group, name)) for name in quantities}
        fitted.append(GroupFit(group, parabolas, front(group)))
    if not fitted:
        raise UserError(
            "nothing can be fitted",
            left_out[0][1] if len(left_out) == 1 else f"no group has {LEAST_LIMITS} limits",
            "Measure at more limits"
            if len(left_out) < 2
            else "Measure at more, or name fewer columns with --by",
        )
    return Analysis(fitted, left_out)


def _apart(limits: Floats) -> int:
    """How many differ by a millionth of the range: of others no curve can be told, nor where the range is
    nothing that a number could be divided by twice."""
    with np.errstate(over="ignore", invalid="ignore"):
        span = limits[-1] - limits[0]
        if not _LEAST_SPAN < span < 1 / _LEAST_SPAN:
            return 1
        return np.unique(np.round((limits - limits[0]) / span, 6)).size


def quantity(group: Group, name: str) -> Floats:
    """Of every measurement."""
    with np.errstate(over="ignore"):
        if name == "power":
            return group.energy_j / group.time_s
        delays = {"edp": 1, "ed2p": 2}.get(name, 0)
        return group.time_s if name == "time" else group.energy_j * group.time_s**delays


def means(group: Group, name: str) -> tuple[Floats, Floats, Floats]:
    """Limits, and mean and standard deviation over repetitions at each; nan where there is but one."""
    values = quantity(group, name)
    limits = np.unique(group.limit)
    each = [values[group.limit == limit] for limit in limits]
    std = [float(v.std(ddof=1)) if v.size > 1 else np.nan for v in each]
    return limits, np.array([v.mean() for v in each]), np.array(std)


def front(group: Group) -> list[float]:
    limits, time_s, _ = means(group, "time")
    return limits[pareto(time_s, means(group, "energy")[1])].tolist()


def saved(fit: Parabola) -> float | None:
    """The part that the best measured limit saves against the highest."""
    at_highest = fit.measured_at(fit.highest)
    return 1 - fit.measured_at(fit.best_measured) / at_highest if at_highest > 0 else None


def slower(of: GroupFit, limit: float) -> float:
    """How much longer the work takes at a measured limit than at the highest, as a part."""
    limits, time_s, _ = means(of.group, "time")
    return float(time_s[np.searchsorted(limits, limit)] / time_s[-1]) - 1


def below_limits(of: GroupFit) -> bool:
    """Whether the program draws less than the lowest power limit anyhow: then no limit changes anything."""
    return of.group.unit == "W" and bool(quantity(of.group, "power").max() < of.group.limit.min())


def verdict(of: GroupFit, name: str) -> tuple[bool | None, str]:
    """Whether a quantity's model fits, and why it does not."""
    fits, why = judge(of.parabolas[name])
    if fits is False and below_limits(of):
        why += "; the program draws less than the lowest limit"
    return fits, why


def rests_on(fit: Parabola) -> str:
    return REPEATED if fit.repeated else SINGLE


def to_json(found: Analysis) -> dict[str, Any]:
    """One entry for every group and quantity."""
    return {
        "of": found.groups[0].group.of,
        "groups": [
            {"by": each.group.by, "quantity": name, **_fit_json(each, name)}
            for each in found.groups
            for name in each.parabolas
        ],
        "pareto": [{"by": each.group.by, "limits": each.front} for each in found.groups],
        "left_out": [{"by": by, "why": why} for by, why in found.left_out],
    }


def _fit_json(of: GroupFit, name: str) -> dict[str, Any]:
    fit = of.parabolas[name]
    fits, why = verdict(of, name)
    limits = np.unique(fit.limits)
    half = fit.band(limits)
    return {
        "unit": QUANTITIES[name],
        "coefficients": list(fit.coefficients),
        "r2": fit.r2,
        "r2_of_means": fit.r2_of_means,
        "best_measured": fit.best_measured,
        "best_measured_value": fit.measured_at(fit.best_measured),
        "saved": saved(fit),
        "slower": slower(of, fit.best_measured),
        "optimum": fit.optimum,
        "optimum_value": float(fit.at(fit.optimum)[0]),
        "interval": None if fit.interval is None else list(fit.interval),
        "edge": fit.edge,
        "fits": fits,
        "why": why,
        "measurements": int(fit.values.size),
        "differing": list(of.group.differing),
        "limits": limits.tolist(),
        "fitted": fit.at(limits).tolist(),
        "band": None if half is None else half.tolist(),
        "band_rests_on": None if half is None else rests_on(fit),
        "residual_std": fit.residual_std,
        "effect_p": fit.effect_p,
        "misfit_p": fit.misfit_p,
    }
