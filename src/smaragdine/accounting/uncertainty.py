"""How far a row's energy may be off: the 95 % half-width, and what it rests on.

A sensor sees one mean power per window, and all that runs inside one is given that power. An operation of
another power than its company is then wrong by the same sign in every window, and no number of repetitions
shows it in the spread over steps. What can be said about its power p comes from a prior, which takes any
power between the device's idle and its limit for as likely as another, and from the windows it was in,
whose energies are sums over their company:

    p ~ N(mean busy power, (limit − idle)² / 12)        window energy = Σ time share × p + noise

The posterior mean says how far equal sharing is off (bias), its deviation how well that is known (doubt);
the half-width is that of the interval around the equal share that holds 95 % of the posterior, widened by
the sensor's resolution and, where only a sample of the steps was looked at, by the spread over steps, but
never beyond what idle and limit allow. The bias is
the largest of three: as the clocks say, and with power moved against the events by as much as their clocks
may disagree. `docs/uncertainty.md` has the derivation, and how often the interval covers the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from smaragdine.accounting.engine import sum_by
from smaragdine.accounting.ledger import Ledger
from smaragdine.accounting.mixing import Windows
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.student import t_quantile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RESOLUTION, REPETITION, PRIOR = "resolution", "repetition", "prior"
MOST_WINDOWS = 1500  # more would cost seconds and say little more
LEAST_NOISE = 0.01  # of the mean power: no operation is that constant
NOISE_ROUNDS = 4
Z_95, Z_95_ONE_SIDED = 1.960, 1.645


@dataclass(frozen=True)
class Sensor:
    """What is known about a device and the sensor its power comes from."""

    idle_w: float
    limit_w: float
    window_ns: int
    timing_ns: int  # by how much its clock and the events' may disagree
    step_w: float  # the smallest difference it shows
    source: str  # where idle and limit come from


def sensor_of(
    trace: PowerTrace,
    idle_w: float | None = None,
    limit_w: float | None = None,
    window_ns: int | None = None,
    timing_ns: int | None = None,
) -> Sensor:
    """Facts that were given, and for the others what the trace itself suggests, said in `source`."""
    length_ns = trace.end_ns - trace.start_ns
    spacing_ns = int(np.median(length_ns)) if length_ns.size else 0
    low, high = (float(trace.power_w.min()), float(trace.power_w.max())) if length_ns.size else (0.0, 0.0)
    guessed = [name for name, value in (("idle", idle_w), ("limit", limit_w)) if value is None]
    steps = np.diff(np.unique(trace.power_w))
    return Sensor(
        # Means over a window hide both the quietest and the loudest operation.
        idle_w=min(low, low / 2 if idle_w is None else idle_w),
        limit_w=max(high, 2 * high if limit_w is None else limit_w),
        window_ns=_window_ns(trace, spacing_ns) if window_ns is None else window_ns,
        timing_ns=spacing_ns // 2 if timing_ns is None else timing_ns,
        step_w=float(steps.min()) if steps.size else 0.0,
        source=f"{' and '.join(guessed)} guessed from the power trace" if guessed else "given",
    )


def _window_ns(trace: PowerTrace, spacing_ns: int) -> int:
    """A log polled faster than its source repeats values: the window is as long as a value usually stands."""
    changes = int(np.count_nonzero(np.diff(trace.power_w)))
    each = (trace.power_w.size - 1) / changes if changes >= 10 else 1.0
    return round(spacing_ns * each) if each >= 1.5 else spacing_ns


class Doubt(NamedTuple):
    """Per row, relative to its energy by equal shares; nan where the row was not in the sample."""

    bias: Floats
    doubt: Floats
    most: Floats  # no true value is farther off
    seen_j: Floats  # the energy of it that was in the sample


def infer(seen: Windows, sensor: Sensor, rows: int) -> Doubt:
    """What the windows say about each row's power."""
    share_s = sum_by(seen.row, seen.share_s, rows)
    busy_s = sum_by(seen.row, seen.busy_s, rows)
    window_w = seen.energy_j / seen.length_s
    equal_j = sum_by(seen.row, seen.share_s * window_w[seen.window], rows)
    known = np.flatnonzero(equal_j > 0)
    bias, doubt, most = (np.full(rows, np.nan) for _ in range(3))
    if not known.size:
        return Doubt(bias, doubt, most, equal_j)
    among = busy_s[known] / share_s[known]
    mean_w, cov_w = _posterior(seen, sensor, known, among)
    bias[known] = mean_w * share_s[known] / equal_j[known] - 1
    doubt[known] = np.sqrt(cov_w) * share_s[known] / equal_j[known]
    high_w = sensor.idle_w + among * (sensor.limit_w - sensor.idle_w)
    equal_w = equal_j[known] / share_s[known]
    most[known] = np.maximum(equal_w - sensor.idle_w, high_w - equal_w) / equal_w
    return Doubt(bias, doubt, most, equal_j)


def _posterior(seen: Windows, sensor: Sensor, known: Ints, among: Floats) -> tuple[Floats, Floats]:
    """Mean and variance of every known row's power per share of time.

    Of idle time in a window the power is known to be near idle; the noise is what the windows' energies show
    that no fixed power explains, found by repeating (EM).
    """
    picked = np.arange(seen.energy_j.size)
    if picked.size > MOST_WINDOWS:
        picked = np.unique(np.linspace(0, picked.size - 1, MOST_WINDOWS).astype(np.int64))
    place = np.full(seen.energy_j.size, -1)
    place[picked] = np.arange(picked.size)
    column = np.full(int(known[-1]) + 1, -1)
    column[known] = np.arange(known.size)
    used = (place[seen.window] >= 0) & (np.isin(seen.row, known))
    time_s = np.zeros((picked.size, known.size))
    np.add.at(time_s, (place[seen.window[used]], column[seen.row[used]]), seen.share_s[used])
    length_s = seen.length_s[picked]
    idle_s = np.maximum(length_s - time_s.sum(axis=1), 0.0)
    busy_j = seen.energy_j[picked] - idle_s * sensor.idle_w
    # In watts: every window counts alike, however long.
    design = time_s / length_s[:, None]
    mean_w = float(max(busy_j.sum() / max(time_s.sum(), 1e-300), 0.0))
    target_w = busy_j / length_s - design.sum(axis=1) * mean_w
    prior_var = ((sensor.limit_w - sensor.idle_w) * among) ** 2 / 12
    least_var = (LEAST_NOISE * mean_w) ** 2 + sensor.step_w**2 / 12
    noise_var = max(least_var, float(np.var(target_w)) / 4)
    deviation_w, variance = np.zeros(known.size), prior_var
    for _ in range(NOISE_ROUNDS):
        deviation_w, variance, fitted_var = _solve(design, target_w, prior_var, noise_var)
        left_w = target_w - design @ deviation_w
        noise_var = max(least_var, float(np.mean(left_w**2 + fitted_var)))
    return mean_w + deviation_w, variance


def _solve(
    design: Floats, target_w: Floats, prior_var: Floats, noise_var: float
) -> tuple[Floats, Floats, Floats]:
    """The normal posterior: mean and variance of each power, and the variance of each window's fitted value.

    By the smaller of the two systems: one equation per window, or one per row.
    """
    windows, rows = design.shape
    if windows <= rows:
        spread = design * prior_var
        gain = np.linalg.solve(spread @ design.T + noise_var * np.eye(windows), spread).T
        variance = prior_var - np.einsum("ij,ji->i", gain, spread)
        fitted_var = noise_var * np.einsum("ij,ji->i", design, gain)
        return gain @ target_w, np.maximum(variance, 0.0), fitted_var
    cov = np.linalg.inv(design.T @ design / noise_var + np.diag(1 / prior_var))
    fitted_var = np.einsum("ij,ij->i", design @ cov, design)
    return cov @ (design.T @ target_w) / noise_var, np.maximum(np.diag(cov), 0.0), fitted_var


def combine(doubts: Sequence[Doubt], ledger: Ledger, sensor: Sensor) -> tuple[Floats, list[str]]:
    """Per row the 95 % half-width, and what it rests on. `doubts`: by the clocks, then moved either way."""
    if not doubts:
        return np.zeros_like(ledger.energy_j), [PRIOR] * ledger.energy_j.size
    energy_j, busy_s = ledger.energy_j, ledger.busy_ns / 1e9
    bias = np.max([abs(doubt.bias) for doubt in doubts], axis=0)
    doubt, most = doubts[0].doubt, doubts[0].most
    unseen = np.isnan(bias)
    if not unseen.all():
        # A row that is not in the sample is as doubtful as the most doubtful one that is.
        bias, doubt, most = (np.where(unseen, np.nanmax(part), part) for part in (bias, doubt, most))
    bias_j, doubt_j, most_j = (np.nan_to_num(part) * energy_j for part in (bias, doubt, most))
    windows = np.maximum(1.0, busy_s * 1e9 / max(sensor.window_ns, 1))
    resolution_j = sensor.step_w / np.sqrt(12) * busy_s / np.sqrt(windows)
    spread_j = np.zeros_like(energy_j)
    if ledger.steps > 1:
        # Steps that were looked at are known; how far the others may differ, their spread says.
        unlooked = 1 - np.minimum(
            np.divide(doubts[0].seen_j, energy_j, out=np.ones_like(energy_j), where=energy_j > 0), 1
        )
        t = t_quantile(ledger.steps - 1) / Z_95
        spread_j = t * ledger.step_std_j() * np.sqrt(ledger.steps * unlooked)
    width_j = np.minimum(
        _around_zero(bias_j, np.sqrt(doubt_j**2 + spread_j**2 + resolution_j**2)),
        np.maximum(most_j, spread_j),
    )
    mean_ns = ledger.busy_ns / np.maximum(ledger.count, 1)
    basis = np.where(spread_j > np.hypot(bias_j, doubt_j), REPETITION, RESOLUTION)
    return width_j, np.where(mean_ns < sensor.window_ns, PRIOR, basis).tolist()


def _around_zero(mean: Floats, deviation: Floats) -> Floats:
    """h such that a normal value lies within ±h with 95 %; good to 0.02 deviations."""
    away = np.divide(mean, deviation, out=np.full_like(mean, 40.0), where=deviation > 0)
    return mean + deviation * (Z_95_ONE_SIDED + (Z_95 - Z_95_ONE_SIDED) * np.exp(-4 * np.minimum(away, 40)))
