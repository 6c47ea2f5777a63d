"""A device's power as a function of time, built from its channels.

A trace is a row of stretches of constant power, in order and without overlap; between them nothing is known.
The difference of two readings of a counter covers the time between them, a sample covers the window it
averages over, and a value of a bare log holds until the next one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from smaragdine.arrays import Floats, Ints
from smaragdine.recording.reader import Series
from smaragdine.sensors.energy import can_be, growth, hold_ns, stretches

# Undoes what a sensor's electronics do to the power that they show.
#
# A sample need not be the mean since the last sample. An H200 samples every 20 ms a signal that is late and
# that a first-order low-pass has smoothed; when the driver was busy, stamps are later still. With the
# smoothing's time constant τ and readings v that are Δ apart,
#
#     v_i = a v_(i-1) + (1 - a) u_i        a = exp(-Δ / τ)
#
# where u_i is a mean of the power between the two readings, weighted towards the second one. So we get back,
# reading by reading, what was smoothed. No energy is lost: the sums of u and v agree but for their ends.

_REACH = 2  # readings on either side, to tell when one was taken
_LEAST = 0.6  # of the usual spacing: a reading that comes sooner says next to nothing new


def sharp(t_ns: Ints, power_w: Floats, lag_ns: float, smoothing_ns: float) -> tuple[Ints, Floats]:
    """The ends of the stretches that the means are over, and the means. Each stretch begins where the one
    before it ends.

    Readings must come in rising time. Fewer come back if some are too close to each other.
    """
    if t_ns.size < 2 * _REACH + 1:
        return t_ns - round(lag_ns), power_w
    t_ns = on_time(t_ns)
    spacing_ns = float(np.median(np.diff(t_ns)))
    kept = _apart(t_ns, _LEAST * spacing_ns)
    t_ns, power_w = t_ns[kept], power_w[kept]
    since_ns = np.diff(t_ns)
    stays = np.exp(-since_ns / smoothing_ns)
    means_w = (power_w[1:] - stays * power_w[:-1]) / (1 - stays)
    # Noise may push it below zero when power falls.
    means_w = np.concatenate([power_w[:1], np.maximum(means_w, 0.0)])
    # The mean is weighted towards its end, so it belongs to a later time than the middle.
    typical = np.exp(-spacing_ns / smoothing_ns)
    centre_ns = smoothing_ns - spacing_ns * typical / (1 - typical)
    return t_ns - round(lag_ns - (spacing_ns / 2 - centre_ns)), means_w


def on_time(t_ns: Ints) -> Ints:
    """When readings of an even rhythm were really taken, if stamps are late now and then: the median of what
    each reading and its neighbours say."""
    spacing_ns = int(np.median(np.diff(t_ns)))
    here = np.arange(t_ns.size)[:, None]
    # At either end, take the nearest ones.
    others = np.clip(here - _REACH, 0, t_ns.size - 2 * _REACH - 1) + np.arange(2 * _REACH + 1)
    said_ns = t_ns[others] - (others - here) * spacing_ns - t_ns[0]  # small: a median is a float
    return t_ns[0] + np.maximum.accumulate(np.median(said_ns, axis=1).astype(np.int64))


def _apart(t_ns: Ints, least_ns: float) -> Ints:
    """Which ones to keep so that none follows the last one within `least_ns`."""
    close = np.flatnonzero(np.diff(t_ns) < least_ns) + 1
    kept = np.ones(t_ns.size, dtype=np.bool_)
    before = 0  # the last one kept
    for i in close.tolist():
        before = i - 1 if kept[i - 1] else before
        kept[i] = t_ns[i] - t_ns[before] >= least_ns
    return np.flatnonzero(kept)


# What a reading stands for: a mean over the time before it, a value that holds until the next, or a total.
Readings = Literal["sample", "held", "counter"]

# Outside of this range samples and counter do not agree: the factor is used, and flagged.
PLAUSIBLE_FACTOR = (0.8, 1.25)

MOST_MISSED = 0.1  # of a time: if more was missed, the rest would look like a saving


@dataclass(frozen=True)
class Anchors:
    """How the counter set the level of a sampled trace: one factor per interval between two anchors."""

    t_ns: Ints
    factor: Floats
    earlier: int = 0  # number of earlier ones, whose readings were thinned,
    earlier_implausible: int = 0

    @property
    def count(self) -> int:
        return self.earlier + self.factor.size

    @property
    def implausible(self) -> int:
        return self.earlier_implausible + int(np.count_nonzero(implausible(self.factor)))


def implausible(factor: Floats) -> npt.NDArray[np.bool_]:
    low, high = PLAUSIBLE_FACTOR
    return (factor < low) | (factor > high)


@dataclass(frozen=True)
class PowerTrace:
    """Stretches [start, end) of constant power: in order, disjoint, immutable."""

    start_ns: Ints
    end_ns: Ints
    power_w: Floats
    hold_ns: int = 0  # gaps up to this length are how the source works; longer ones are missing time
    anchors: Anchors | None = None
    restarts_ns: Ints = field(
        default_factory=lambda: np.zeros(0, dtype=np.int64)
    )  # last readings of samplers that died

    @cached_property
    def _energy_before_j(self) -> Floats:
        return np.concatenate([[0.0], np.cumsum(self.power_w * (self.end_ns - self.start_ns) * 1e-9)])

    @cached_property
    def _covered_before_ns(self) -> Ints:
        return np.concatenate([[0], np.cumsum(self.end_ns - self.start_ns)])

    def energy_until_j(self, t_ns: npt.ArrayLike) -> Floats:
        """The energy of all known time before each `t_ns`."""
        i, into_ns = self._locate(t_ns)
        power_w = self.power_w[i] if self.power_w.size else np.zeros(i.shape)
        return self._energy_before_j[i] + power_w * into_ns * 1e-9

    def covered_until_ns(self, t_ns: npt.ArrayLike) -> Ints:
        i, into_ns = self._locate(t_ns)
        return self._covered_before_ns[i] + into_ns

    def energy_j(self, start_ns: int, end_ns: int) -> float:
        until_j = self.energy_until_j([start_ns, end_ns])
        return float(until_j[1] - until_j[0])

    def covered_s(self, start_ns: int, end_ns: int) -> float:
        until_ns = self.covered_until_ns([start_ns, end_ns])
        return float(until_ns[1] - until_ns[0]) * 1e-9

    def missing(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """Stretches of [start, end] that nobody looked at: gaps longer than the source's own rhythm explains,
        and any gap in which the sampler was restarted."""
        inside = slice(
            np.searchsorted(self.end_ns, start_ns, side="right"), np.searchsorted(self.start_ns, end_ns)
        )
        begin = np.concatenate([[start_ns], self.end_ns[inside]])
        end = np.concatenate([self.start_ns[inside], [end_ns]])
        restarted = np.searchsorted(self.restarts_ns, end) > np.searchsorted(self.restarts_ns, begin)
        gone = (end > begin) & ((end - begin > self.hold_ns) | restarted)
        return [(int(b), int(e)) for b, e in zip(begin[gone], end[gone], strict=True)]

    def missing_s(self, start_ns: int, end_ns: int) -> float:
        return sum(end - begin for begin, end in self.missing(start_ns, end_ns)) * 1e-9

    def _locate(self, t_ns: npt.ArrayLike) -> tuple[Ints, Ints]:
        t = np.asarray(t_ns, dtype=np.int64)
        if not self.start_ns.size:
            return np.zeros(t.shape, dtype=np.int64), np.zeros(t.shape, dtype=np.int64)
        i = np.maximum(np.searchsorted(self.start_ns, t, side="right") - 1, 0)
        return i, np.clip(t - self.start_ns[i], 0, self.end_ns[i] - self.start_ns[i])


def from_counter(series: Series) -> PowerTrace:
    """From differences of a counter, over the time they cover. If it wraps around, by its own range."""
    hold = hold_ns(series.channel)
    t_ns, value = series.t_ns, series.value
    length_ns = np.diff(t_ns)
    used_j = used(series, t_ns, value)
    # Anchoring readings come only about once a second; so what counts as a gap follows the rhythm.
    rhythm_ns = int(np.median(length_ns)) if length_ns.size else 0
    hold = max(hold, 4 * rhythm_ns if rhythm_ns > hold // 10 else 0)
    known = (length_ns > 0) & (length_ns <= hold) & (used_j >= 0) & (np.diff(series.segment) == 0)
    # A wall clock that is set back gives the same time twice: it counts once.
    known &= t_ns[:-1] == np.maximum.accumulate(t_ns)[:-1]
    power_w = used_j[known] / (length_ns[known] * 1e-9)
    restarts_ns = t_ns[:-1][np.diff(series.segment) != 0]
    return PowerTrace(t_ns[:-1][known], t_ns[1:][known], power_w, hold, restarts_ns=restarts_ns)


def from_samples(series: Series) -> PowerTrace:
    """From samples, each over its own window. Windows touch if the source reports without a pause."""
    hold = hold_ns(series.channel)
    known = np.flatnonzero(can_be(series.value))
    order = known[np.argsort(series.t_ns[known], kind="stable")]
    t_ns, power_w = series.t_ns[order], series.value[order]
    kept = goes_on(t_ns)
    t_ns, power_w = t_ns[kept], power_w[kept]
    if series.channel.window_ms is None and t_ns.size > 1:
        # The last one holds for as long as they usually do.
        t_ns = np.append(t_ns, t_ns[-1] + int(np.median(np.diff(t_ns))))
        power_w = np.append(power_w, power_w[-1])
    elif series.channel.smoothing_ms:
        lag_ns, smoothing_ns = (series.channel.lag_ms or 0.0) * 1e6, series.channel.smoothing_ms * 1e6
        t_ns, power_w = sharp(t_ns, power_w, lag_ns, smoothing_ns)
    return PowerTrace(*stretches(series.channel, t_ns, power_w), hold)


def from_log(t_ns: Ints, power_w: Floats, hold: int | None = None) -> PowerTrace:
    """From a bare log, by rising time: each value holds until the next, the last for the median spacing.

    A gap longer than `hold` (default: ten times that spacing) is missing time.
    """
    if hold is None:
        hold = int(10 * np.median(np.diff(t_ns))) if t_ns.size > 1 else 0
    return _held(t_ns, power_w, hold)


def from_stretches(t_ns: Ints, length_ns: Ints, power_w: Floats) -> PowerTrace:
    """From powers with the time that each holds for, by rising time; between them nothing is known."""
    some = length_ns > 0
    return PowerTrace(t_ns[some], (t_ns + length_ns)[some], power_w[some])


def _held(t_ns: Ints, power_w: Floats, hold: int) -> PowerTrace:
    spacing_ns = np.diff(t_ns)
    if not spacing_ns.size:
        return PowerTrace(t_ns[:0], t_ns[:0], power_w[:0], hold)  # one reading covers no time
    end_ns = np.concatenate([t_ns[1:], [t_ns[-1] + int(np.median(spacing_ns))]])
    kept = end_ns - t_ns <= hold
    return PowerTrace(t_ns[kept], end_ns[kept], power_w[kept], hold)


def goes_on(t_ns: Ints) -> npt.NDArray[np.bool_]:
    """Readings that are later than all before them: drops those of a wall clock that was set back."""
    new = np.ones(t_ns.size, dtype=np.bool_)
    new[1:] = t_ns[1:] > np.maximum.accumulate(t_ns)[:-1]
    return new


def distinct(t_ns: Ints) -> Ints:
    """Each instant once, in order. `np.unique` hashes: a hundred times slower on nearly sorted times."""
    in_order = np.sort(t_ns, kind="stable")
    return in_order[np.concatenate([[True], in_order[1:] != in_order[:-1]])] if in_order.size else in_order


def used(counter: Series, t_ns: Ints, total_j: Floats) -> Floats:
    """From each reading to the next; nan if the counter does not tell."""
    used_j, known = growth(total_j, np.diff(t_ns), counter.channel.wraps_at, 1.0)
    return np.where(known, used_j, np.nan)


def within(trace: PowerTrace, spans: Sequence[tuple[int, int]]) -> PowerTrace:
    """The part of a trace that lies within these spans, which are in order and disjoint."""
    parts = [
        (np.maximum(trace.start_ns[i:j], begin_ns), np.minimum(trace.end_ns[i:j], end_ns), trace.power_w[i:j])
        for begin_ns, end_ns in spans
        if (i := int(np.searchsorted(trace.end_ns, begin_ns, side="right")))
        < (j := int(np.searchsorted(trace.start_ns, end_ns, side="left")))
    ]
    none = (trace.start_ns[:0], trace.end_ns[:0], trace.power_w[:0])
    start_ns, until_ns, power_w = (np.concatenate(column) for column in zip(none, *parts, strict=True))
    return dataclasses.replace(trace, start_ns=start_ns, end_ns=until_ns, power_w=power_w)


def add(traces: Sequence[PowerTrace]) -> PowerTrace:
    """The sum of several traces while all of them are known: two dies of one socket, for instance."""
    if len(traces) == 1:
        return traces[0]
    cuts = distinct(np.concatenate([edge for trace in traces for edge in (trace.start_ns, trace.end_ns)]))
    start_ns, end_ns = cuts[:-1], cuts[1:]
    power_w = np.zeros(start_ns.size)
    known = np.ones(start_ns.size, dtype=bool)
    for trace in traces:
        known &= trace.covered_until_ns(end_ns) - trace.covered_until_ns(start_ns) == end_ns - start_ns
        power_w += (trace.energy_until_j(end_ns) - trace.energy_until_j(start_ns)) / (
            (end_ns - start_ns) * 1e-9
        )
    return PowerTrace(
        start_ns[known],
        end_ns[known],
        power_w[known],
        max(trace.hold_ns for trace in traces),
        restarts_ns=np.unique(np.concatenate([trace.restarts_ns for trace in traces])),
    )


# Fewer stretches for drawing: the same energy over the same time.


def coarse(trace: PowerTrace, most: int) -> PowerTrace:
    """Joins neighbours into about `most` stretches at their mean power; none reaches across a gap."""
    count = trace.start_ns.size
    if count <= most:
        return trace
    after_gap = np.concatenate([[True], trace.start_ns[1:] != trace.end_ns[:-1]])
    since_gap = np.arange(count) - np.maximum.accumulate(np.where(after_gap, np.arange(count), 0))
    first = np.flatnonzero(since_gap % -(-count // most) == 0)
    last = np.append(first[1:], count) - 1
    length_ns = trace.end_ns - trace.start_ns
    power_w = np.add.reduceat(trace.power_w * length_ns, first) / np.add.reduceat(length_ns, first)
    return dataclasses.replace(
        trace, start_ns=trace.start_ns[first], end_ns=trace.end_ns[last], power_w=power_w
    )
