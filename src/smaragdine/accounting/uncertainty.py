"""Tells how far a row's energy may be off: its 95 % half-width, and what that rests on.

A sensor sees one mean power per window, and we give that power to all that ran in it. If an operation draws
more or less than its neighbours, it is wrong with the same sign in every window: repeating it does not help,
and its spread over steps does not show it. What we can say about its power p comes from a prior, to which any
power between the device's idle and its limit is equally likely, and from the windows it was in, whose
energies are sums:

    p ~ N(mean busy power, (limit − idle)² / 12)        window energy = Σ time share × p + noise

The posterior mean tells how far equal sharing is off (bias), the posterior deviation how well we know that
(doubt). The half-width is that of the interval around the equal share that holds 95 % of the posterior. The
sensor's resolution makes it wider, and so does the spread over steps if we looked at only some of them; idle
and limit bound it. The bias is the largest of three: with the clocks as they are, and with power moved either
way by as much as they may disagree. `docs/uncertainty.md` derives this, and says how often the interval
covers the truth.

Errors cancel inside a window, so we know a layer's rows better together than one by one: `Together` is one
joint posterior of all rows, from which `grouping` makes the interval of any group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from smaragdine.accounting.integral import (
    CHUNK,
    Boundaries,
    Chunk,
    Levels,
    Pieces,
    at_pieces,
    boundaries,
    pieces,
    sum_by,
)
from smaragdine.accounting.ledger import Ledger
from smaragdine.accounting.power import PowerTrace
from smaragdine.arrays import Floats, Ints
from smaragdine.stats import t_quantile

# Windows: which operations shared a sensor's window, for how much of its time, and the window's energy.
#
# A few chunks spread over the events are enough to show that.


class Windows(NamedTuple):
    """Whole windows, and one line for each row in each of them."""

    energy_j: Floats  # per window
    length_s: Floats
    window: Ints  # per line
    row: Ints
    share_s: Floats  # ∫ 1/n over the row's events in the window
    busy_s: Floats  # their time
    pieces: Ints  # per row: the number of its stretches, in any window
    paid_s: Floats  # and their time


def windows(chunk: Chunk, power: Levels, by_ns: int, window_ns: int, rows: int) -> Windows:
    """The windows of a chunk, with power moved by `by_ns`."""
    paying = pieces(chunk)
    power = _near(power, by_ns, paying, window_ns)
    at = boundaries(chunk, paying, power)
    length_s = np.diff(at.t_ns) * 1e-9
    running = at.running[:-1]
    share_s = np.zeros(at.t_ns.size)
    np.cumsum(np.where(running > 0, length_s / np.maximum(running, 1), 0.0), out=share_s[1:])
    window, whole = _window_of(chunk, at.t_ns + chunk.begin_ns, power, window_ns)
    count = int(window[-1]) + 1
    row, number, event_share_s, event_s = _per_window(chunk.key[paying.event], paying, at, share_s, window)
    line, code = number * rows + row, None
    if count * rows > 8 * CHUNK:  # with many names, number only those that occur
        code, line = np.unique(line, return_inverse=True)
    size = count * rows if code is None else code.size
    line_share_s, line_busy_s = sum_by(line, event_share_s, size), sum_by(line, event_s, size)
    there = np.flatnonzero(line_share_s)
    line_share_s, line_busy_s = line_share_s[there], line_busy_s[there]
    number, row = np.divmod(there if code is None else code[there], rows)
    whole = whole & (sum_by(window, length_s, count) > 0)
    new_number = np.cumsum(whole) - 1
    kept = whole[number]
    own = chunk.key[paying.event]
    return Windows(
        sum_by(window, at.power_w * length_s, count)[whole],
        sum_by(window, length_s, count)[whole],
        new_number[number[kept]],
        row[kept],
        line_share_s[kept],
        line_busy_s[kept],
        np.bincount(own, minlength=rows),
        sum_by(own, (paying.end_ns - paying.start_ns) * 1e-9, rows),
    )


def _near(power: Levels, by_ns: int, paying: Pieces, window_ns: int) -> Levels:
    """The levels around the events, few of a long log beside a short trace; others count as unknown."""
    around_ns = 2 * max(window_ns, 1)
    first = np.searchsorted(power.edge_ns, paying.start_ns - by_ns - around_ns, side="right")
    last = np.searchsorted(power.edge_ns, paying.end_ns - by_ns + around_ns, side="left")
    if not first.size or int((last - first).sum()) >= power.edge_ns.size:
        return Levels(power.edge_ns + by_ns, power.power_w)
    kept = np.unique(np.concatenate([np.arange(i, j + 1) for i, j in _merged(first, last)]))
    # Level i lasts from edge i - 1 to edge i: to keep it, keep both.
    edges = np.union1d(kept - 1, kept)
    edges = edges[(edges >= 0) & (edges < power.edge_ns.size)]
    after = edges + 1
    known = np.isin(after, kept)
    return Levels(
        power.edge_ns[edges] + by_ns,
        np.concatenate(
            [[power.power_w[0] if kept[0] == 0 else 0.0], np.where(known, power.power_w[after], 0.0)]
        ),
    )


def _merged(first: Ints, last: Ints) -> list[tuple[int, int]]:
    """Joins ranges of levels that touch."""
    order = np.argsort(first, kind="stable")
    first, until = first[order], np.maximum.accumulate(last[order])
    begins = np.flatnonzero(np.concatenate([[True], first[1:] > until[:-1] + 1]))
    ends = until[np.concatenate([begins[1:], [first.size]]) - 1]
    return list(zip(first[begins].tolist(), ends.tolist(), strict=True))


def join(parts: Sequence[Windows]) -> Windows:
    offsets = np.cumsum([0, *(part.energy_j.size for part in parts)])
    moved = [part._replace(window=part.window + by) for part, by in zip(parts, offsets[:-1], strict=True)]
    *lines, pieces, paid_s = zip(*moved, strict=True)
    return Windows(*map(np.concatenate, lines), pieces=np.sum(pieces, axis=0), paid_s=np.sum(paid_s, axis=0))


def _window_of(chunk: Chunk, t_ns: Ints, power: Levels, window_ns: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """The window of every stretch between boundaries, and which windows lie wholly in the chunk.

    A window is one reading's stretch, or several if the sensor's own window is longer. A window that the
    chunk cuts no longer shows its mean; we use it only if there is no other.
    """
    level = np.searchsorted(power.edge_ns, t_ns[:-1], side="right")
    changes = np.concatenate([[True], level[1:] != level[:-1]])
    levels, number = level[changes], np.cumsum(changes) - 1
    begins_ns = t_ns[:-1][changes]
    spacing_ns = int(np.median(np.diff(begins_ns))) if begins_ns.size > 1 else window_ns
    if window_ns > 1.5 * spacing_ns:
        slot = (begins_ns - begins_ns[0]) // window_ns
        group = np.concatenate([[0], np.cumsum(np.diff(slot) > 0)])
    else:
        group = np.arange(levels.size)
    # Before the first edge, after the last, and in gaps power is not known: levels of 0 W.
    known = np.bincount(group, power.power_w[levels] > 0) == np.bincount(group)
    cut = np.zeros(levels.size, dtype=bool)
    cut[0] = levels[0] > 0 and power.edge_ns[levels[0] - 1] < chunk.begin_ns
    cut[-1] |= levels[-1] < power.edge_ns.size and power.edge_ns[levels[-1]] > chunk.until_ns
    whole = known & (np.bincount(group, cut) == 0)
    return group[number], whole if whole.any() else known


def _per_window(
    row: Ints, paying: Pieces, at: Boundaries, share_s: Floats, window: Ints
) -> tuple[Ints, Ints, Floats, Floats]:
    """Cuts pieces at the windows' borders: row, window, share of time, time."""
    t_ns = at.t_ns
    at_start, at_end = at_pieces(np.arange(t_ns.size), at, paying)
    lasting = t_ns[at_end] > t_ns[at_start]
    row, at_start, at_end = row[lasting], at_start[lasting], at_end[lasting]
    first, last = window[at_start], window[at_end - 1]
    spans = last - first + 1
    piece = np.repeat(np.arange(row.size), spans)
    number = np.repeat(first - (np.cumsum(spans) - spans), spans) + np.arange(piece.size)
    begins = np.flatnonzero(np.concatenate([[True], window[1:] != window[:-1]]))
    ends = np.concatenate([begins[1:], [window.size]])
    begin, end = np.maximum(at_start[piece], begins[number]), np.minimum(at_end[piece], ends[number])
    lasts_s = (t_ns[end] - t_ns[begin]).astype(np.float64) * 1e-9
    return row[piece], number.astype(np.int64), share_s[end] - share_s[begin], lasts_s


RESOLUTION, REPETITION, PRIOR = "resolution", "repetition", "prior"
MOST_WINDOWS, MOST_ROWS = 1500, 1000  # more would take seconds and say little more
LEAST_NOISE = 0.01  # of the mean power: no operation is more constant
NOISE_ROUNDS = 4
_NOTHING_J = 1e-30  # parts of less would round to nothing
# How the prior's variance splits: each operation's own, common to a kind of operation, common to a phase.
# Copies of memory draw little wherever they run, and optimizers are made of them.
OWN_PART, KIND_PART, PHASE_PART = 0.5, 0.5, 0.25
# What 95 % lie within, in standard deviations: two-sided, one-sided.
BELL_95, FLAT_95 = (1.960, 1.645), (1.645, 1.559)
Z_95 = BELL_95[0]


@dataclass(frozen=True)
class SensorModel:
    """What is known about a device and its sensor."""

    idle_w: float
    limit_w: float
    window_ns: int
    timing_ns: int  # how far its clock and the events' may disagree
    step_w: float  # the smallest difference it shows
    source: str  # how we know idle and limit


def sensor_of(
    trace: PowerTrace,
    idle_w: float | None = None,
    limit_w: float | None = None,
    window_ns: int | None = None,
    timing_ns: int | None = None,
) -> SensorModel:
    """Takes the facts that were given, and guesses the others from the trace; `source` says which."""
    length_ns = trace.end_ns - trace.start_ns
    spacing_ns = int(np.median(length_ns)) if length_ns.size else 0
    low, high = (float(trace.power_w.min()), float(trace.power_w.max())) if length_ns.size else (0.0, 0.0)
    guessed = [name for name, value in (("idle", idle_w), ("limit", limit_w)) if value is None]
    steps = np.diff(np.unique(trace.power_w))
    return SensorModel(
        # Means over a window hide the quietest operation and the loudest.
        idle_w=min(low, low / 2 if idle_w is None else idle_w),
        limit_w=max(high, 2 * high if limit_w is None else limit_w),
        window_ns=_window_ns(trace, spacing_ns) if window_ns is None else window_ns,
        timing_ns=spacing_ns // 2 if timing_ns is None else timing_ns,
        step_w=float(steps.min()) if steps.size else 0.0,
        source=f"{' and '.join(guessed)} guessed from the power trace" if guessed else "given",
    )


def _window_ns(trace: PowerTrace, spacing_ns: int) -> int:
    """If a log polls faster than its source updates, values repeat: the window is as long as nearly all of
    them stand.

    Power that is constant for a while makes some runs long, but short ones remain.
    """
    changes = np.flatnonzero(np.diff(trace.power_w))
    if changes.size < 10:
        return spacing_ns
    return max(1, int(np.quantile(np.diff(changes), 0.25))) * spacing_ns


class Look(NamedTuple):
    """What the sampled windows say about every row; 0 for rows that are not among them."""

    share_s: Floats
    equal_j: Floats  # the row's energy by equal shares
    mean_w: Floats  # its power per share of time, as inferred
    deviation_w: Floats
    learned: Floats  # the part of the prior's variance that the windows took away
    most_j: Floats  # the true energy cannot be farther from the equal share
    stretch_s: Floats  # the mean length of what the row pays for; for a parent, between its children
    joint_w: Floats  # like mean_w, but rows of one kind or phase are taken to be alike
    together: Together | None = None


class Together(NamedTuple):
    """The joint posterior of all rows' powers. If there are very many rows, the smallest share a column."""

    column: Ints  # per row; -1: not seen
    factor_w: Floats  # column × direction: a sum of columns errs by the length of the sum of their vectors
    own_w: Floats  # per row: how far it differs from its column, by the prior alone


class Kinship(NamedTuple):
    """Per row, its kind of operation and its phase, as numbers."""

    kind: Ints
    phase: Ints


def infer(seen: Windows, sensor: SensorModel, rows: int, kin: Kinship) -> Look:
    seen = with_events(seen)
    share_s = sum_by(seen.row, seen.share_s, rows)
    busy_s = sum_by(seen.row, seen.busy_s, rows)
    window_w = (seen.energy_j / seen.length_s)[seen.window]
    equal_j = sum_by(seen.row, seen.share_s * window_w, rows)
    most_j = sum_by(seen.row, seen.share_s * _most_off_w(seen, window_w, sensor), rows)
    known = np.flatnonzero(equal_j > 0)
    mean_w, deviation_w, learned, joint_w = (np.zeros(rows) for _ in range(4))
    together = None
    if known.size and sensor.limit_w > sensor.idle_w:
        prior_w = (sensor.limit_w - sensor.idle_w) * busy_s[known] / share_s[known] / np.sqrt(12)
        # Imported here: it sets a variable in our environment, and a recorded program would inherit it.
        from threadpoolctl import threadpool_limits

        # One thread is fastest on two cores; with sixteen, accounting took up to a hundred times the CPU.
        with threadpool_limits(1, "blas"):
            # In parts of the limit, so that squares of any watts fit a float.
            prior = prior_w / sensor.limit_w
            system = _system(seen, sensor, known, share_s[known], prior)
            means, deviations, noise_var = _posterior(system, prior)
            joint_means, factor = _joint_posterior(system, prior, noise_var, kin, known)
        mean_w[known], deviation_w[known] = means * sensor.limit_w, deviations * sensor.limit_w
        learned[known] = 1 - (deviation_w[known] / prior_w) ** 2
        joint_w[known] = joint_means * sensor.limit_w
        column, own_w = np.full(rows, -1), np.zeros(rows)
        column[known] = system.column
        own_w[known] = np.where(system.column < MOST_ROWS, 0.0, prior_w)
        together = Together(column, factor * sensor.limit_w, own_w)
    else:
        mean_w[known] = joint_w[known] = equal_j[known] / share_s[known]
    stretch_s = seen.paid_s / np.maximum(seen.pieces, 1)
    return Look(share_s, equal_j, mean_w, deviation_w, learned, most_j, stretch_s, joint_w, together)


def _most_off_w(seen: Windows, window_w: Floats, sensor: SensorModel) -> Floats:
    """How far a row's power in a window can be from the window's mean.

    It lies between idle and limit, and the rest of the window, which does too, must make up for it. A row
    that has a window to itself is not off at all.
    """
    fraction = np.minimum(seen.share_s / seen.length_s[seen.window], 1.0)
    # If several run at once, each may use all the power above idle.
    high_w = sensor.idle_w + seen.busy_s / seen.share_s * (sensor.limit_w - sensor.idle_w)
    least_w = np.maximum(sensor.idle_w, (window_w - (1 - fraction) * high_w) / fraction)
    most_w = np.minimum(high_w, (window_w - (1 - fraction) * sensor.idle_w) / fraction)
    return np.maximum(np.maximum(window_w - least_w, most_w - window_w), 0.0)


class _System(NamedTuple):
    """One equation per window, in parts of the limit: design × (powers − mean) = target + noise."""

    design: Floats  # window × column: the part of the window's time
    target: Floats
    mean: float
    prior_var: Floats  # per column
    least_var: float  # of the noise
    column: Ints  # per known row: its own; MOST_ROWS for the smallest of very many


def _system(seen: Windows, sensor: SensorModel, known: Ints, share_s: Floats, prior: Floats) -> _System:
    """Idle time in a window is known to draw about idle power. If there are very many rows, the smallest
    share one column of the equations; only the prior tells them apart."""
    time_s, picked, column = _time_matrix(seen, known, share_s)
    told = np.flatnonzero(column < MOST_ROWS)
    length_s = seen.length_s[picked]
    idle_s = np.maximum(length_s - time_s.sum(axis=1), 0.0)
    busy = (seen.energy_j[picked] - idle_s * sensor.idle_w) / sensor.limit_w
    # As power: every window counts the same, however long it is.
    design = time_s / length_s[:, None]
    total_s = float(time_s.sum())
    mean = max(float(busy.sum()) / total_s, 0.0) if total_s > 0 else 0.0
    prior_var = np.full(time_s.shape[1], float(np.max(prior)) ** 2)
    prior_var[column[told]] = prior[told] ** 2
    least_var = (LEAST_NOISE * mean) ** 2 + (sensor.step_w / sensor.limit_w) ** 2 / 12
    return _System(
        design, busy / length_s - design.sum(axis=1) * mean, mean, prior_var, max(least_var, 1e-12), column
    )


def _posterior(system: _System, prior: Floats) -> tuple[Floats, Floats, float]:
    """Mean and deviation of every known row's power per share of time, and the variance of the noise:
    whatever no fixed powers explain in the windows' energies. Found by repetition (EM)."""
    design, target, prior_var, column = system.design, system.target, system.prior_var, system.column
    told = np.flatnonzero(column < MOST_ROWS)
    noise_var = max(system.least_var, float(np.var(target)) / 4)
    away, variance = np.zeros(prior_var.size), prior_var
    for _ in range(NOISE_ROUNDS):
        away, variance, fitted_var = _solve(design, target, prior_var, noise_var)
        left = target - design @ away
        noise_var = max(system.least_var, float(np.mean(left**2 + fitted_var)))
    means, deviations = np.full(column.size, system.mean), prior.copy()
    means[told] += away[column[told]]
    deviations[told] = np.sqrt(variance[column[told]])
    return means, deviations, noise_var


def _joint_posterior(
    system: _System, prior: Floats, noise_var: float, kin: Kinship, known: Ints
) -> tuple[Floats, Floats]:
    """Every known row's mean power, and a factor B of the columns' covariance: B Bᵀ = covariance."""
    columns = system.prior_var.size
    told = np.flatnonzero(system.column < MOST_ROWS)
    deviation = np.sqrt(system.prior_var)
    alike = OWN_PART * np.eye(columns)
    for codes, part in ((kin.kind, KIND_PART), (kin.phase, PHASE_PART)):
        # The rows that share the last column are of no one kind: give them a number of their own.
        code = np.arange(-1, -1 - columns, -1)
        code[system.column[told]] = codes[known[told]]
        alike += part * (code[:, None] == code[None, :])
    cov = alike * np.outer(deviation, deviation)
    design, target = system.design, system.target
    if len(design) <= columns:
        spread = design @ cov
        gain = np.linalg.solve(spread @ design.T + noise_var * np.eye(len(design)), spread)
        away, cov = gain.T @ target, cov - spread.T @ gain
    else:
        cov = np.linalg.inv(design.T @ design / noise_var + np.linalg.inv(cov))
        away = cov @ (design.T @ target) / noise_var
    size, turned = np.linalg.eigh((cov + cov.T) / 2)
    return system.mean + away[system.column], turned * np.sqrt(np.maximum(size, 0.0))


def with_events(seen: Windows) -> Windows:
    """Drops windows in which nothing ran: most of them, for a short trace beside a long log."""
    number, window = np.unique(seen.window, return_inverse=True)
    return seen._replace(energy_j=seen.energy_j[number], length_s=seen.length_s[number], window=window)


def _time_matrix(seen: Windows, known: Ints, share_s: Floats) -> tuple[Floats, Ints, Ints]:
    """The time share of each row in each window; which windows; and the column of every known row.

    Rows beyond the MOST_ROWS with the most time share the last column.
    """
    picked = np.arange(seen.energy_j.size)
    if picked.size > MOST_WINDOWS:
        picked = np.linspace(0, picked.size - 1, MOST_WINDOWS).astype(np.int64)
    place = np.full(seen.energy_j.size, -1)
    place[picked] = np.arange(picked.size)
    column = np.empty(known.size, dtype=np.int64)
    column[np.argsort(-share_s, kind="stable")] = np.minimum(np.arange(known.size), MOST_ROWS)
    column_of_row = np.full(int(known[-1]) + 1, -1)
    column_of_row[known] = column
    used = (place[seen.window] >= 0) & (seen.row <= known[-1])
    used[used] = column_of_row[seen.row[used]] >= 0
    columns = int(column.max()) + 1
    cell = place[seen.window[used]] * columns + column_of_row[seen.row[used]]
    return sum_by(cell, seen.share_s[used], picked.size * columns).reshape(-1, columns), picked, column


def _solve(
    design: Floats, target: Floats, prior_var: Floats, noise_var: float
) -> tuple[Floats, Floats, Floats]:
    """The normal posterior: mean and variance of each power, and the variance of each window's fitted value.

    Solves the smaller of the two systems: one equation per window, or one per row.
    """
    windows, rows = design.shape
    if windows <= rows:
        spread = design * prior_var
        gain = np.linalg.solve(spread @ design.T + noise_var * np.eye(windows), spread).T
        variance = prior_var - np.einsum("ij,ji->i", gain, spread)
        fitted_var = noise_var * np.einsum("ij,ji->i", design, gain)
        return gain @ target, np.maximum(variance, 0.0), fitted_var
    cov = np.linalg.inv(design.T @ design / noise_var + np.diag(1 / prior_var))
    fitted_var = np.einsum("ij,ij->i", design @ cov, design)
    return cov @ (design.T @ target) / noise_var, np.maximum(np.diag(cov), 0.0), fitted_var


class Widths(NamedTuple):
    """Per row the 95 % half-width, what it rests on, and the part of it that repeats in every row."""

    half_width_j: Floats
    basis: list[str]
    chance_j: Floats  # a standard deviation: steps we did not look at, and the resolution


def combine(looks: Sequence[Look], ledger: Ledger, sensor: SensorModel) -> Widths:
    """`looks`: with the clocks as they are, then moved either way."""
    energy_j, busy_s = ledger.energy_j, ledger.busy_ns / 1e9
    # If no window was seen, power may be anything between idle and limit.
    anything_j = np.maximum(energy_j - sensor.idle_w * busy_s, sensor.limit_w * busy_s - energy_j)
    anything_j = np.maximum(anything_j, 0.0)
    if not looks:
        return Widths(anything_j, [PRIOR] * energy_j.size, anything_j / Z_95)
    clocks = looks[0]
    seen = clocks.equal_j > 0
    true_j = [look.mean_w * clocks.share_s for look in looks]
    bias = _relative(np.max([abs(inferred - clocks.equal_j) for inferred in true_j], axis=0), clocks)
    doubt = _relative(clocks.deviation_w * clocks.share_s, clocks)
    most = _relative(
        np.max([abs(look.equal_j - clocks.equal_j) + look.most_j for look in looks], axis=0), clocks
    )
    bias_j, doubt_j, most_j = bias * energy_j, doubt * energy_j, most * energy_j
    windows = np.maximum(1.0, busy_s * 1e9 / max(sensor.window_ns, 1))
    resolution_j = sensor.step_w / np.sqrt(12) * busy_s / np.sqrt(windows)
    spread_j = np.zeros_like(energy_j)
    if ledger.steps > 1:
        # Steps that we looked at are known; their spread tells how far the others may differ.
        looked = np.divide(clocks.equal_j, energy_j, out=np.ones_like(energy_j), where=energy_j > 0)
        unlooked = 1 - np.minimum(looked, 1.0)
        spread_j = ledger.step_std_j() * np.sqrt(ledger.steps * unlooked)
        spread_j *= t_quantile(ledger.steps - 1) / Z_95
    chance_j = np.hypot(spread_j, resolution_j)
    inferred_j = around_zero(bias_j, np.hypot(doubt_j, chance_j), clocks.learned)
    width_j = np.minimum(inferred_j, most_j + Z_95 * chance_j)
    width_j = np.where(seen, width_j, anything_j)
    basis = np.where(Z_95 * spread_j > width_j / 2, REPETITION, RESOLUTION)
    short = clocks.stretch_s * 1e9 < sensor.window_ns
    return Widths(
        width_j,
        np.where(short | ~seen, PRIOR, basis).tolist(),
        np.where(seen, chance_j, anything_j / Z_95),
    )


def _relative(off_j: Floats, clocks: Look) -> Floats:
    """Relative to the equal share; 0 for rows that are not in the sample."""
    return np.divide(off_j, clocks.equal_j, out=np.zeros_like(off_j), where=clocks.equal_j > _NOTHING_J)


def around_zero(mean: Floats, deviation: Floats, learned: Floats) -> Floats:
    """The h for which a value lies within ±h with 95 %; good to 0.02 deviations.

    What was learned is normal; what rests on the prior is uniform, which has shorter tails.
    """
    two_sided, one_sided = (
        (1 - learned) * flat + learned * bell for flat, bell in zip(FLAT_95, BELL_95, strict=True)
    )
    away = np.divide(mean, deviation, out=np.full_like(mean, 40.0), where=deviation > 0)
    return mean + deviation * (one_sided + (two_sided - one_sided) * np.exp(-4 * np.minimum(away, 40)))
