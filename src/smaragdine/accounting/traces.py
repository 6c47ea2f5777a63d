"""The power trace of every device of a recording.

Where a GPU has both samples and a counter, samples give the shape and the counter gives the level (`anchor`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smaragdine.accounting.power import (
    Anchors,
    Floats,
    Ints,
    PowerTrace,
    add,
    distinct,
    from_counter,
    from_samples,
    goes_on,
    used,
)
from smaragdine.recording.reader import Recording, Series
from smaragdine.sensors.base import Channel

ANCHOR_EVERY_NS = 2_000_000_000


def device_traces(recording: Recording) -> dict[str, PowerTrace]:
    """The power trace of every device with a reading, parts of devices (`cpu:0/core`) included."""
    return {device: _device_trace(members) for device, members in _by_device(recording).items()}


def main_channels(recording: Recording) -> dict[str, Channel]:
    """Per device the channel its figures rest on: the samples where there are some."""
    main: dict[str, Channel] = {}
    for device, members in _by_device(recording).items():
        sampled = [series.channel for series in members if series.channel.quantity == "power"]
        main[device] = [members[0].channel, *sampled][-1]
    return main


def left_out(recording: Recording) -> list[str]:
    """What further sensors read of a device, said in a line each."""
    used = {device: members[0].channel.sensor for device, members in _by_device(recording).items()}
    all_of = dict.fromkeys((s.channel.device, s.channel.sensor) for s in recording.series("power"))
    return [
        f"{device}: its figures are those of {used[device]}, not of {sensor}, which read it too"
        for device, sensor in all_of
        if sensor != used[device]
    ]


def _by_device(recording: Recording) -> dict[str, list[Series]]:
    """Of each device what its first sensor read: what another one says of it (a plug-in; an estimate, where a
    restarted sampler may no longer read the counters) is no more energy, and of another provenance."""
    found: dict[str, list[Series]] = {}
    for series in recording.series("power"):
        members = found.setdefault(series.channel.device, [])
        if not members or members[0].channel.sensor == series.channel.sensor:
            members.append(series)
    return found


def _device_trace(members: Sequence[Series]) -> PowerTrace:
    samples = [series for series in members if series.channel.quantity == "power"]
    counters = [series for series in members if series.channel.quantity == "energy"]
    if not samples:
        return add([from_counter(series) for series in counters])
    pieces: list[PowerTrace] = []
    # Between two segments nobody looked: no anchor reaches across.
    for segment in np.unique(np.concatenate([series.segment for series in (samples[0], *counters[:1])])):
        sampled = _segment(samples[0], segment)
        counter = _segment(counters[0], segment) if counters else None
        if counter is None or not counter.t_ns.size:
            pieces.append(from_samples(sampled))
        elif not sampled.t_ns.size:
            pieces.append(from_counter(counter))
        else:
            pieces.append(anchor(from_samples(sampled), counter))
    return pieces[0] if len(pieces) == 1 else _join(pieces)


def _segment(series: Series, segment: int) -> Series:
    rows = series.segment == segment
    return Series(series.channel, series.t_ns[rows], series.value[rows], series.segment[rows])


def _join(pieces: Sequence[PowerTrace]) -> PowerTrace:
    anchors = [piece.anchors for piece in pieces if piece.anchors is not None]
    start_ns = np.concatenate([piece.start_ns for piece in pieces])
    end_ns = np.concatenate([piece.end_ns for piece in pieces])
    # A successor's first window may reach back over what its predecessor saw.
    begun_ns = np.maximum.accumulate(np.concatenate([start_ns[:1], end_ns[:-1]]))
    start_ns = np.maximum(start_ns, begun_ns)
    kept = end_ns > start_ns
    return PowerTrace(
        start_ns[kept],
        end_ns[kept],
        np.concatenate([piece.power_w for piece in pieces])[kept],
        pieces[0].hold_ns,
        Anchors(np.concatenate([a.t_ns for a in anchors]), np.concatenate([a.factor for a in anchors]))
        if anchors
        else None,
        restarts_ns=np.array(
            [int(piece.end_ns[-1]) for piece in pieces[:-1] if piece.end_ns.size], dtype=np.int64
        ),
    )


def anchor(shape: PowerTrace, counter: Series, every_ns: int = ANCHOR_EVERY_NS) -> PowerTrace:
    """Rescale a sampled trace so that between anchors its integral is what the counter says was used.

    Anchors are readings of the counter, each an observed change, at least `every_ns` apart. Time between
    two anchors that no sample covers gets the interval's mean power, because the counter saw it.
    """
    new = goes_on(counter.t_ns)
    rows = np.flatnonzero(new)
    chosen = rows[_choose_anchors(counter.t_ns[rows], every_ns)]
    if chosen.size < 2:
        return shape
    t_ns = counter.t_ns[chosen]
    used_j = used(counter, counter.value[chosen])
    # Between two anchors with time said twice the counter counted more than that time used.
    used_j[np.diff(np.cumsum(~new)[chosen]) > 0] = np.nan
    filled = _fill(shape, t_ns, used_j)
    interval = np.searchsorted(t_ns, filled.start_ns, side="right") - 1
    sampled_j = _energy_of_intervals(filled, interval, used_j.size)
    # A counter that was set back (a reset GPU) says nothing about that interval: its samples stand.
    factor = np.divide(used_j, sampled_j, out=np.ones_like(used_j), where=(sampled_j > 0) & (used_j >= 0))
    return PowerTrace(
        filled.start_ns,
        filled.end_ns,
        filled.power_w * factor[np.clip(interval, 0, factor.size - 1)],
        shape.hold_ns,
        Anchors(t_ns, factor),
    )


def _energy_of_intervals(trace: PowerTrace, interval: Ints, count: int) -> Floats:
    """Summed stretch by stretch: a difference of running totals has lost the digits of a short interval."""
    inside = (interval >= 0) & (interval < count)
    energy_j = trace.power_w * (trace.end_ns - trace.start_ns) * 1e-9
    return np.bincount(interval[inside], energy_j[inside], minlength=count).astype(np.float64)


def _choose_anchors(t_ns: Ints, every_ns: int) -> Ints:
    chosen: list[int] = []
    for i, t in enumerate(t_ns):
        if not chosen or t - t_ns[chosen[-1]] >= every_ns:
            chosen.append(i)
    last = t_ns.size - 1
    if last >= 0 and chosen[-1] != last:
        # The last reading bounds the run: better a somewhat longer last interval than an open end.
        if len(chosen) > 1:
            chosen[-1] = last
        else:
            chosen.append(last)
    return np.array(chosen, dtype=np.int64)


def _fill(shape: PowerTrace, anchors_ns: Ints, used_j: Floats) -> PowerTrace:
    """Cut the trace at the anchors, and give time between them that it does not cover their mean power: the
    counter saw it, where it says what was used."""
    cuts = distinct(np.concatenate([shape.start_ns, shape.end_ns, anchors_ns]))
    start_ns, end_ns = cuts[:-1], cuts[1:]
    i = np.searchsorted(shape.start_ns, start_ns, side="right") - 1
    inside = (i >= 0) & (start_ns < shape.end_ns[np.maximum(i, 0)])
    power_w = np.where(inside, shape.power_w[np.maximum(i, 0)], 0.0)
    covered_ns = np.diff(shape.covered_until_ns(anchors_ns))
    interval = np.searchsorted(anchors_ns, start_ns, side="right") - 1
    between = (start_ns >= anchors_ns[0]) & (start_ns < anchors_ns[-1])
    between &= used_j[np.clip(interval, 0, used_j.size - 1)] >= 0
    sampled = PowerTrace(start_ns[inside], end_ns[inside], power_w[inside])
    sampled_j = _energy_of_intervals(sampled, interval[inside], used_j.size)
    mean_w = np.divide(
        sampled_j,
        covered_ns * 1e-9,
        out=np.ones(covered_ns.size),  # nothing sampled at all: any shape will do, the counter sets the level
        where=covered_ns > 0,
    )
    interval = np.clip(interval, 0, mean_w.size - 1)
    power_w = np.where(~inside & between, mean_w[interval], power_w)
    # Samples of 0 W have no shape to scale: the counter's mean power stands in.
    level_w = used_j / (np.diff(anchors_ns) * 1e-9)
    dark = between & (sampled_j[interval] <= 0) & (covered_ns[interval] > 0) & (level_w[interval] > 0)
    power_w = np.where(dark, level_w[interval], power_w)
    kept = inside | between
    return PowerTrace(start_ns[kept], end_ns[kept], power_w[kept], shape.hold_ns)
