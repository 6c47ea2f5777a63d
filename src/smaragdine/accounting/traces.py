"""Builds the power trace of every device from a recording's channels.

If a GPU has both samples and a counter, samples give the shape and the counter gives the level (`anchor`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from smaragdine.accounting.power import (
    Anchors,
    PowerTrace,
    add,
    distinct,
    from_counter,
    from_samples,
    goes_on,
    used,
    within,
)
from smaragdine.arrays import Floats, Ints
from smaragdine.recording.format import channel_from_dict
from smaragdine.recording.reader import Recording, Series
from smaragdine.recording.thinned import Thinned
from smaragdine.sensors.base import Channel
from smaragdine.sensors.energy import MOST_W, can_be

ANCHOR_EVERY_NS = 2_000_000_000
SAMPLES_REACH_NS = 5_000_000_000
FOREVER_NS = 1 << 62


def device_traces(recording: Recording) -> dict[str, PowerTrace]:
    """The power trace of every device with a reading, and of parts of devices (`cpu:0/core`)."""
    fine = fine_traces(recording)
    if recording.thinned is None:
        return fine
    return {device: _after_thinned(recording.thinned, device, fine.get(device)) for device in _all(recording)}


def fine_traces(recording: Recording) -> dict[str, PowerTrace]:
    """Traces from the readings that are still there: of a long run, its later part."""
    return {device: _device_trace(members) for device, members in _by_device(recording).items()}


def _all(recording: Recording) -> list[str]:
    thinned = [] if recording.thinned is None else [*recording.thinned.state.devices]
    return list(dict.fromkeys([*thinned, *_by_device(recording)]))


def _after_thinned(thinned: Thinned, device: str, fine: PowerTrace | None) -> PowerTrace:
    """What thinning kept, followed by the readings that are still there."""
    known, columns = thinned.state.devices.get(device), thinned.stretches.get(device)
    if known is None or columns is None:
        assert fine is not None
        return fine
    start_ns, end_ns, power_w = columns["start_ns"], columns["end_ns"], columns["power_w"]
    restarts_ns = np.array(known.restarts_ns, dtype=np.int64)
    if fine is None:
        return PowerTrace(start_ns, end_ns, power_w, known.hold_ns, restarts_ns=restarts_ns)
    later = within(fine, [(thinned.state.cut_ns, FOREVER_NS)])
    anchors = later.anchors
    if anchors is not None:
        anchors = dataclasses.replace(anchors, earlier=known.anchors, earlier_implausible=known.implausible)
    return PowerTrace(
        np.concatenate([start_ns, later.start_ns]),
        np.concatenate([end_ns, later.end_ns]),
        np.concatenate([power_w, later.power_w]),
        later.hold_ns,
        anchors,
        np.concatenate([restarts_ns, later.restarts_ns[later.restarts_ns >= known.start_ns]]),
    )


def main_channels(recording: Recording) -> dict[str, Channel]:
    """Per device the channel that its figures rest on: its samples, if it has any."""
    main: dict[str, Channel] = {}
    if recording.thinned is not None:
        devices = recording.thinned.state.devices
        main = {device: channel_from_dict(known.channel) for device, known in devices.items()}
    for device, members in _by_device(recording).items():
        sampled = [series.channel for series in members if series.channel.quantity == "power"]
        main[device] = [members[0].channel, *sampled][-1]
    return main


def left_out(recording: Recording) -> list[str]:
    """A line for each device that further sensors read too; only one counts."""
    used = {device: members[0].channel.sensor for device, members in _by_device(recording).items()}
    all_of = dict.fromkeys((s.channel.device, s.channel.sensor) for s in _of_power(recording))
    return [
        f"{device}: its figures are those of {used[device]}, not of {sensor}, which read it too"
        for device, sensor in all_of
        if sensor != used[device]
    ]


def beyond(recording: Recording) -> list[str]:
    """A line for each channel with readings that no device can have: we leave them out."""
    return [
        f"{name}: left out {count:,} of its readings, which would be more than "
        f"{MOST_W / 1000:g} kW: no device draws that. Is the recording damaged?"
        for name, count in count_beyond(recording).items()
    ]


def count_beyond(recording: Recording, until_ns: int = FOREVER_NS) -> dict[str, int]:
    """How many such readings each channel has before `until_ns`."""
    counts: dict[str, int] = {}
    since_ns = -FOREVER_NS
    if recording.thinned is not None:
        counts |= recording.thinned.state.beyond
        since_ns = recording.thinned.state.cut_ns
    for series in _of_power(recording):
        if series.channel.quantity == "power":
            odd = np.isfinite(series.value) & ~can_be(series.value)
        else:
            unknown = np.isnan(used(series, series.t_ns, series.value))
            # A total that fell was set back, and between two segments nobody looked: neither is impossible.
            odd = unknown & (np.diff(series.value) > 0) & (np.diff(series.segment) == 0)
        t_ns = series.t_ns[-odd.size :] if odd.size else series.t_ns[:0]
        count = int(np.count_nonzero(odd & (t_ns >= since_ns) & (t_ns < until_ns)))
        if count:
            counts[series.channel.name] = counts.get(series.channel.name, 0) + count
    return counts


def _of_power(recording: Recording) -> list[Series]:
    """Series of power and energy; a damaged table may have others."""
    return [each for each in recording.series("power") if each.channel.quantity in ("power", "energy")]


def _by_device(recording: Recording) -> dict[str, list[Series]]:
    """Per device what its first sensor read. What a second one reads (a plug-in; or an estimate, if a
    restarted sampler may no longer read the counters) is the same energy again, of another provenance."""
    found: dict[str, list[Series]] = {}
    known = {} if recording.thinned is None else recording.thinned.state.devices
    for series in _of_power(recording):
        if series.channel.device in known:
            if series.channel.sensor != known[series.channel.device].channel["sensor"]:
                continue
            # A sample's window reaches back, and so does what sharpens it; a counter goes on from its cut.
            back_ns = SAMPLES_REACH_NS if series.channel.quantity == "power" else 0
            series = later(series, known[series.channel.device].start_ns - back_ns)
            if not series.t_ns.size:
                continue
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
    # Between two segments nobody looked, so no anchor reaches across.
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


def later(series: Series, since_ns: int) -> Series:
    """The readings from `since_ns` on."""
    rows = series.t_ns >= since_ns
    return Series(series.channel, series.t_ns[rows], series.value[rows], series.segment[rows])


def _segment(series: Series, segment: int) -> Series:
    rows = series.segment == segment
    return Series(series.channel, series.t_ns[rows], series.value[rows], series.segment[rows])


def _join(pieces: Sequence[PowerTrace]) -> PowerTrace:
    anchors = [piece.anchors for piece in pieces if piece.anchors is not None]
    start_ns = np.concatenate([piece.start_ns for piece in pieces])
    end_ns = np.concatenate([piece.end_ns for piece in pieces])
    # A restarted sampler's first window may reach back into what the one before it saw.
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
    """Rescales a sampled trace, so that between two anchors its integral is what the counter says was used.

    Anchors are readings of the counter, each an observed change, at least `every_ns` apart. Time between two
    anchors that no sample covers gets their mean power, because the counter saw it.
    """
    new = goes_on(counter.t_ns)
    rows = np.flatnonzero(new)
    chosen = rows[_choose_anchors(counter.t_ns[rows], every_ns)]
    if chosen.size < 2:
        return shape
    t_ns = counter.t_ns[chosen]
    used_j = used(counter, t_ns, counter.value[chosen])
    # If the clock was set back between two anchors, the counter counted more than that time used.
    used_j[np.diff(np.cumsum(~new)[chosen]) > 0] = np.nan
    filled = _fill(shape, t_ns, used_j)
    interval = np.searchsorted(t_ns, filled.start_ns, side="right") - 1
    sampled_j = _energy_of_intervals(filled, interval, used_j.size)
    # A counter that was set back (a reset GPU) says nothing about this interval: keep the samples.
    factor = np.divide(used_j, sampled_j, out=np.ones_like(used_j), where=(sampled_j > 0) & (used_j >= 0))
    return PowerTrace(
        filled.start_ns,
        filled.end_ns,
        filled.power_w * factor[np.clip(interval, 0, factor.size - 1)],
        shape.hold_ns,
        Anchors(t_ns, factor),
    )


def _energy_of_intervals(trace: PowerTrace, interval: Ints, count: int) -> Floats:
    """Summed stretch by stretch: differences of running totals would lose the digits of a short interval."""
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
        # The last reading ends the run: better a somewhat longer last interval than an open end.
        if len(chosen) > 1:
            chosen[-1] = last
        else:
            chosen.append(last)
    return np.array(chosen, dtype=np.int64)


def _fill(shape: PowerTrace, anchors_ns: Ints, used_j: Floats) -> PowerTrace:
    """Cuts the trace at the anchors. Time between them that no sample covers gets their mean power, if the
    counter says what was used."""
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
        out=np.ones(covered_ns.size),  # no samples: any shape will do
        where=covered_ns > 0,
    )
    interval = np.clip(interval, 0, mean_w.size - 1)
    power_w = np.where(~inside & between, mean_w[interval], power_w)
    # Samples of 0 W have no shape to scale: use the counter's mean power.
    level_w = used_j / (np.diff(anchors_ns) * 1e-9)
    dark = between & (sampled_j[interval] <= 0) & (covered_ns[interval] > 0) & (level_w[interval] > 0)
    power_w = np.where(dark, level_w[interval], power_w)
    kept = inside | between
    return PowerTrace(start_ns[kept], end_ns[kept], power_w[kept], shape.hold_ns)
