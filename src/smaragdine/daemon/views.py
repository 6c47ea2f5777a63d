"""What a caller gets to see of the log.

Package, memory and board meters are restricted: only root gets more than one reading in 100 ms, because finer
ones tell what other people's programs compute (CVE-2020-8694). When a batch enters the log, we decide once
which readings those are, and note it in the batch. So all callers get the same readings, however they ask,
and several callers together know no more. Running totals rest on the same readings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from smaragdine.daemon.log import Batch
from smaragdine.daemon.settings import COARSE_NS
from smaragdine.monitor.contract import monitor_pb2 as pb
from smaragdine.monitor.sampler import Note
from smaragdine.protobuf import varint
from smaragdine.sensors.base import Channel

_COARSE_NOTE = "coarse_rows"  # only for us: the rows of restricted channels that everybody may see
_UNRESTRICTED_SENSORS = frozenset({"nvml", "activity"})

Rows = npt.NDArray[np.bool_]


def is_restricted(channel: Channel) -> bool:
    """Whether fine readings tell of other people's programs. Those of an unknown sensor may."""
    return (
        channel.quantity in ("energy", "power")
        and channel.provenance == "measured"
        and channel.sensor not in _UNRESTRICTED_SENSORS
    )


class CoarseGrid:
    """Picks one reading in 100 ms of each restricted channel, the same for everybody."""

    def __init__(self, restricted: Iterable[int]) -> None:
        self.restricted = np.array(sorted(restricted), np.uint32)
        self._last_ns: dict[int, int] = {}

    def mark(self, batch: Batch) -> Batch:
        """Note in the batch which rows everybody may see."""
        rows: list[int] = []
        for number in self.restricted.tolist():
            places = np.flatnonzero(batch.channel == number)
            last_ns = self._last_ns.get(number)
            for place, t_ns in zip(places.tolist(), batch.t_ns[places].tolist(), strict=True):
                # It is earlier than the last one: root has set the clock back.
                if last_ns is None or t_ns - last_ns >= COARSE_NS or t_ns < last_ns:
                    rows.append(place)
                    last_ns = t_ns
            if last_ns is not None:
                self._last_ns[number] = last_ns
        if not rows:
            return batch
        note = Note(0, _COARSE_NOTE, ",".join(map(str, rows)))
        return replace(batch, notes=(*batch.notes, note))

    def coarse(self, batch: Batch) -> Rows:
        """Which rows everybody may see."""
        rows = ~np.isin(batch.channel, self.restricted)
        for note in batch.notes:
            if note.name == _COARSE_NOTE:
                rows[[int(word) for word in note.detail.split(",")]] = True
        return rows


def select(batch: Batch, rows: Rows) -> Batch:
    return replace(batch, t_ns=batch.t_ns[rows], channel=batch.channel[rows], value=batch.value[rows])


@dataclass
class View:
    """What one reader sees: channels of the machine and the session, thinned to the session's period."""

    visible: Rows  # by channel number; the last one stands for all beyond
    thinned: Rows  # counters; the others come as rarely as they are
    period_ns: int
    begin_ns: int
    grid: CoarseGrid | None  # None for root
    _cells: dict[int, int] = field(default_factory=dict[int, int])

    def see(self, batch: Batch) -> Batch:
        rows = self.visible[np.minimum(batch.channel, len(self.visible) - 1)]
        if len(batch.t_ns) and batch.t_ns.min() < self.begin_ns:
            rows &= batch.t_ns >= self.begin_ns
        if self.grid is not None:
            rows &= self.grid.coarse(batch)
        notes = tuple(note for note in batch.notes if note.name != _COARSE_NOTE)
        return self._thin(select(replace(batch, notes=notes), rows))

    def _thin(self, batch: Batch) -> Batch:
        """Keep the first reading of a counter in each period, counted from the epoch."""
        if not len(batch.channel):
            return batch
        order = np.argsort(batch.channel, kind="stable")
        channels = batch.channel[order]
        cells = batch.t_ns[order] // self.period_ns
        starts = np.r_[True, channels[1:] != channels[:-1]]
        firsts = starts | np.r_[True, cells[1:] != cells[:-1]]
        places = np.flatnonzero(starts).tolist()
        for start, end in pairwise([*places, len(order)]):
            number = int(channels[start])
            firsts[start] = self._cells.get(number) != cells[start]
            self._cells[number] = int(cells[end - 1])
        firsts |= ~self.thinned[channels]
        rows = np.zeros(len(order), np.bool_)
        rows[order[firsts]] = True
        return select(batch, rows)


def view_of(channels: Mapping[int, Channel], period_ns: int, begin_ns: int, grid: CoarseGrid | None) -> View:
    visible, thinned = np.zeros((2, max(channels, default=0) + 2), np.bool_)
    for number, channel in channels.items():
        visible[number] = True
        thinned[number] = channel.kind == "counter"
    return View(visible, thinned, period_ns, begin_ns, grid)


_KINDS = {"counter": pb.KIND_COUNTER, "sample": pb.KIND_SAMPLE, "level": pb.KIND_LEVEL}
_SCOPES = {"device": pb.SCOPE_DEVICE, "part": pb.SCOPE_PART, "whole": pb.SCOPE_WHOLE}
PROVENANCES = {
    "measured": pb.PROVENANCE_MEASURED,
    "estimated": pb.PROVENANCE_ESTIMATED,
    "replayed": pb.PROVENANCE_REPLAYED,
}


def channel_message(number: int, channel: Channel, coarse: bool, period_ms: float) -> pb.Channel:
    """A channel as a caller gets it, with the period that the caller may have."""
    every_ms = channel.period_ms
    if channel.kind == "counter":
        every_ms = max(every_ms, period_ms)
    if coarse and is_restricted(channel):
        every_ms = max(every_ms, COARSE_NS / 1e6)
    message = pb.Channel(
        number=number,
        device=channel.device,
        quantity=channel.quantity,
        unit=channel.unit,
        kind=_KINDS[channel.kind],
        provenance=PROVENANCES[channel.provenance],
        period_ms=every_ms,
        sensor=channel.sensor,
        scope=_SCOPES[channel.scope],
        detail=channel.detail,
    )
    if channel.window_ms is not None:
        message.window_ms = channel.window_ms
    if channel.wraps_at is not None:
        message.wraps_at = channel.wraps_at
    return message


def note_message(note: Note) -> pb.Note:
    return pb.Note(t_ns=note.t_ns, name=note.name, detail=note.detail)


def encode_columns(batches: list[Batch]) -> bytes:
    """Encode the columns of a ReadResponse. A number costs 100 ns field by field, 1 ns as a block."""
    if not batches:
        return b""
    channel = np.concatenate([batch.channel for batch in batches])
    if not len(channel):
        return b""
    t_ns = np.concatenate([batch.t_ns for batch in batches]).astype("<i8", copy=False).tobytes()
    value = np.concatenate([batch.value for batch in batches]).astype("<f8", copy=False).tobytes()
    numbers = _varints(channel)
    return b"".join(
        [_block(2, len(t_ns)), t_ns, _block(3, len(numbers)), numbers, _block(4, len(value)), value]
    )


def _block(field_number: int, length: int) -> bytes:
    return varint(field_number << 3 | 2) + varint(length)


def _varints(numbers: npt.NDArray[np.uint32]) -> bytes:
    if int(numbers.max()) < 128:
        return numbers.astype(np.uint8).tobytes()
    known = {number: varint(number) for number in set(numbers.tolist())}
    return b"".join([known[number] for number in numbers.tolist()])
