"""Tells how precise footprints are: the paper's ASSS, ASSW and stability.

ASSS keeps only every k-th reading, ASSW adds more runs, stability repeats an experiment. Each asks how alike
the footprint stays, in energy and in power, beside the score that time alone would get.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smaragdine.accounting.arithmetic import average
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.power import (
    PowerTrace,
    Readings,
)
from smaragdine.accounting.similarity import Correlation, Scores, constant_power, matrix, scores
from smaragdine.arrays import Floats, Ints
from smaragdine.errors import UserError

KS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # keep every k-th reading; for figures and studies
Experiment = Sequence[Footprint]  # runs of one program in one setting; the paper has five


@dataclass(frozen=True)
class Score:
    n: int  # ASSS: every n-th reading; ASSW: n experiments
    scores: Scores


@dataclass(frozen=True)
class Widening:
    """One experiment against more and more runs: `pooled`: it and others, m in all; `disjoint`: m others."""

    pooled: list[Score]
    disjoint: list[Score]


@dataclass(frozen=True)
class Stability:
    energy: list[list[Correlation]]
    power: list[list[Correlation]]
    time_alone: list[list[Correlation]]


def thin(trace: PowerTrace, k: int, readings: Readings = "sample") -> PowerTrace:
    """The trace that only every k-th reading would give, at the same level: it is not anchored again.

    The time of a reading that is left out goes to the next one kept (a sample covers the time before it), to
    the last one kept (a bare log holds its values), or is averaged with its neighbours' (a counter). No gap
    is bridged, and counting starts anew after missing time; samples and differences of a counter between the
    last one kept and the gap are lost.
    """
    if k < 1:
        raise UserError(f"every {k}-th reading cannot be kept", remedy="Give a whole number from 1")
    if k == 1 or not trace.start_ns.size:
        return trace
    number, missing = _number_readings(trace)
    power_w = np.full(trace.start_ns.size, np.nan)  # stays nan if no reading covers the time
    for pieces in np.split(np.arange(trace.start_ns.size), np.flatnonzero(missing) + 1):
        power_w[pieces] = _thin_stretch(trace, pieces, number[pieces] - number[pieces[0]], k, readings)
    kept = ~np.isnan(power_w)
    return dataclasses.replace(
        trace, start_ns=trace.start_ns[kept], end_ns=trace.end_ns[kept], power_w=power_w[kept]
    )


def _thin_stretch(trace: PowerTrace, pieces: Ints, number: Ints, k: int, readings: Readings) -> Floats:
    """The power of each piece of a stretch without missing time, from readings 0, k, 2k …"""
    power_w = trace.power_w[pieces]
    if readings == "counter":
        spoken_for = number < (number[-1] + 1) // k * k
        length_ns = (trace.end_ns - trace.start_ns)[pieces].astype(np.float64)
        group = number // k
        mean_w = np.bincount(group, weights=power_w * length_ns) / np.bincount(group, weights=length_ns)
        return np.where(spoken_for, mean_w[group], np.nan)
    # An anchor cuts a reading in two: for samples the later piece stands for it, for held values the earlier.
    if readings == "held":
        return power_w[np.searchsorted(number, number // k * k, side="left")]
    by = -(-number // k) * k
    return np.where(by <= number[-1], power_w[np.searchsorted(number, by, side="right") - 1], np.nan)


def asss(
    account: Callable[[dict[str, PowerTrace]], Footprint],
    traces: Mapping[str, PowerTrace],
    ks: Sequence[int],
    readings: Readings = "sample",
    device: str | None = None,
) -> list[Score]:
    """Compares the footprint from every k-th reading with that from all of them."""
    whole = account(dict(traces))
    found: list[Score] = []
    for k in ks:
        thinned = account({name: thin(trace, k, readings) for name, trace in traces.items()})
        found.append(Score(k, scores(whole, thinned, device)))
    return found


def assw(experiments: Sequence[Experiment], device: str | None = None) -> Widening:
    """Compares the first experiment with more and more runs, some with its own runs among them."""
    first = _means(experiments)[0]
    pooled = [(m, experiments[:m]) for m in range(2, len(experiments) + 1)]
    disjoint = [(m, experiments[1 : m + 1]) for m in range(1, len(experiments))]

    def score(m: int, pool: Sequence[Experiment]) -> Score:
        runs = [run for experiment in pool for run in experiment]
        return Score(m, scores(first, average(runs).mean, device))

    return Widening([score(m, pool) for m, pool in pooled], [score(m, pool) for m, pool in disjoint])


def stability(experiments: Sequence[Experiment], device: str | None = None) -> Stability:
    """Compares every experiment with every other."""
    means = _means(experiments)
    return Stability(
        matrix(means, "energy", device),
        matrix(means, "power", device),
        matrix([constant_power(mean) for mean in means], "energy", device),
    )


def _means(experiments: Sequence[Experiment]) -> list[Footprint]:
    if len(experiments) < 2:
        raise UserError("too few experiments to compare", remedy="Give two or more, of several runs each")
    return [average(experiment).mean for experiment in experiments]


def _number_readings(trace: PowerTrace) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """The number of each piece's reading, and whether time is missing after the piece.

    If an anchor cuts a reading in two, both pieces belong to that reading.
    """
    begin_ns, end_ns = trace.end_ns[:-1], trace.start_ns[1:]
    cut = np.zeros(end_ns.size, dtype=bool)
    if trace.anchors is not None:
        cut = (begin_ns == end_ns) & np.isin(end_ns, trace.anchors.t_ns)
    restarted = np.searchsorted(trace.restarts_ns, end_ns) > np.searchsorted(trace.restarts_ns, begin_ns)
    missing = (end_ns - begin_ns > trace.hold_ns) | restarted
    return np.concatenate([[0], np.cumsum(~cut)]), missing


def score_json(of: str, score: Score) -> dict[str, float | int | None]:
    """A score as JSON; `of` says what `n` counts. A correlation that does not exist is null."""
    found = score.scores
    return {
        of: score.n,
        "energy": found.energy.value,
        "power": found.power.value,
        "times_against_energy": found.floor.value,
        "constant_power": found.time_alone_energy.value,
    }
