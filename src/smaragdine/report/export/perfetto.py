"""Exports a recording for ui.perfetto.dev: events as slices on their lanes, power and energy as counters,
marks.

It writes native protobuf, packet by packet. Times are Unix nanoseconds, and the trace says so (REALTIME).
"""

from __future__ import annotations

import heapq
import itertools
import struct
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from smaragdine.accounting.power import coarse, within
from smaragdine.accounting.run import hardware, program
from smaragdine.accounting.spans import REGION, Span, all_spans, region_spans
from smaragdine.accounting.summary import DeviceSummary
from smaragdine.arrays import Floats, Ints
from smaragdine.protobuf import Fields, build_class, varint
from smaragdine.recording.reader import Recording
from smaragdine.report.export.selection import Selection

# Slices on tracks: what is on one track must nest, so what merely overlaps goes to another track of its lane.

Lane = TypeVar("Lane", bound=Hashable)


class TrackSlice(NamedTuple, Generic[Lane]):
    start_ns: int
    end_ns: int
    lane: Lane
    nests: bool  # whether it may be drawn inside another slice of its lane
    item: int  # the number of what it shows


class SliceEdge(NamedTuple, Generic[Lane]):
    """A slice begins, or (`slice` None) the last one that began on this track ends."""

    t_ns: int
    track: tuple[Lane, int]  # the lane, and the number of its track
    slice: TrackSlice[Lane] | None


def edges(slices: Iterable[TrackSlice[Lane]]) -> Iterator[SliceEdge[Lane]]:
    """Beginnings and ends in the order of time. Slices must come by start, and of equal starts the longest
    first.

    On each track, ends come before beginnings of the same instant.
    """
    ends: list[tuple[int, int, tuple[Lane, int]]] = []
    stacks: dict[Lane, list[list[int]]] = {}  # lane → per track, the ends of open slices
    for number, one in enumerate(slices):
        yield from _ended(ends, stacks, one.start_ns)
        tracks = stacks.setdefault(one.lane, [])
        at = next((i for i, stack in enumerate(tracks) if _fits(stack, one)), len(tracks))
        if at == len(tracks):
            tracks.append([])
        tracks[at].append(one.end_ns)
        # The number is there because lanes cannot be compared with each other.
        heapq.heappush(ends, (one.end_ns, number, (one.lane, at)))
        yield SliceEdge(one.start_ns, (one.lane, at), one)
    yield from _ended(ends, stacks, None)


def _fits(stack: list[int], one: TrackSlice[Lane]) -> bool:
    return not stack or (one.nests and one.end_ns <= stack[-1])


def _ended(
    ends: list[tuple[int, int, tuple[Lane, int]]], stacks: dict[Lane, list[list[int]]], until_ns: int | None
) -> Iterator[SliceEdge[Lane]]:
    while ends and (until_ns is None or ends[0][0] <= until_ns):
        end_ns, _, (lane, at) = heapq.heappop(ends)
        stacks[lane][at].pop()
        yield SliceEdge(end_ns, (lane, at), None)


# The messages of a Perfetto trace, from protos/perfetto/trace/perfetto_trace.proto: only fields we write.
#
# Enumerations are plain numbers here; on the wire that is the same.

FIELDS: Fields = {
    "TracePacket": """
        ClockSnapshot clock_snapshot = 6; uint64 timestamp = 8; uint32 trusted_packet_sequence_id = 10;
        TrackEvent track_event = 11; InternedData interned_data = 12; uint32 sequence_flags = 13;
        TracePacketDefaults trace_packet_defaults = 59; TrackDescriptor track_descriptor = 60""",
    "ClockSnapshot": "repeated Clock clocks = 1; int32 primary_trace_clock = 2",
    "Clock": "uint32 clock_id = 1; uint64 timestamp = 2",
    "TracePacketDefaults": "uint32 timestamp_clock_id = 58",
    "TrackDescriptor": """
        uint64 uuid = 1; string name = 2; ProcessDescriptor process = 3; uint64 parent_uuid = 5;
        CounterDescriptor counter = 8; int32 child_ordering = 11; int32 sibling_order_rank = 12;
        string description = 14""",
    "ProcessDescriptor": "int32 pid = 1; string process_name = 6; repeated string process_labels = 8",
    "CounterDescriptor": "string unit_name = 6",
    "InternedData": """
        repeated EventName event_names = 2; repeated DebugAnnotationName debug_annotation_names = 3;
        repeated InternedString debug_annotation_string_values = 29""",
    "EventName": "uint64 iid = 1; string name = 2",
    "DebugAnnotationName": "uint64 iid = 1; string name = 2",
    "InternedString": "uint64 iid = 1; bytes str = 2",
    "TrackEvent": """
        repeated DebugAnnotation debug_annotations = 4; int32 type = 9; uint64 name_iid = 10;
        uint64 track_uuid = 11; value double double_counter_value = 44""",
    "DebugAnnotation": """
        uint64 name_iid = 1; value int64 int_value = 4; value double double_value = 5;
        value uint64 string_value_iid = 17""",
}
REALTIME, MONOTONIC = 1, 3
SLICE_BEGIN, SLICE_END, INSTANT, COUNTER = 1, 2, 3, 4
STATE_CLEARED, NEEDS_STATE = 1, 2
EXPLICIT_ORDER = 3
_TIME = b"\x40"  # the tag of a packet's first field
_FOUND_AGAIN = 1.2345e-67  # a value whose bytes appear nowhere else in a packet


@cache
def packet_class() -> Any:
    return build_class("perfetto", FIELDS, "TracePacket")


class Packets:
    """Writes a trace's packets into a file. Each name is sent once, and by number afterwards."""

    def __init__(self, file: IO[bytes], recording: Recording) -> None:
        self._file = file
        self._numbers: dict[tuple[str, str], int] = {}
        self._uuid = zlib.crc32(str(recording.info.get("run_id", recording.path)).encode()) << 24
        packet = packet_class()()
        packet.clock_snapshot.primary_trace_clock = REALTIME
        begin: dict[str, int] = recording.info["clock"]["begin"]
        packet.clock_snapshot.clocks.add(clock_id=REALTIME, timestamp=begin["wall_ns"])
        if "mono_ns" in begin:
            packet.clock_snapshot.clocks.add(clock_id=MONOTONIC, timestamp=begin["mono_ns"])
        packet.timestamp = begin["wall_ns"]
        packet.sequence_flags = STATE_CLEARED
        packet.trace_packet_defaults.timestamp_clock_id = REALTIME
        self._send(packet)

    def track(self, name: str, parent: int = 0, order: int = 0, **more: Any) -> int:
        """Adds a track; tracks below it appear in the order in which they are added."""
        self._uuid += 1
        packet = packet_class()()
        track = packet.track_descriptor
        track.uuid, track.parent_uuid = self._uuid, parent
        track.child_ordering, track.sibling_order_rank = EXPLICIT_ORDER, order
        if "pid" in more:
            track.process.pid, track.process.process_name = more["pid"], name
            track.process.process_labels.extend(more["labels"])
        else:
            track.name = name
        track.description = more.get("description", "")
        if "unit" in more:
            track.counter.unit_name = more["unit"]
        self._send(packet)
        return self._uuid

    def begin(
        self, t_ns: int, track: int, name: str, notes: Mapping[str, object] = {}, kind: int = SLICE_BEGIN
    ) -> None:
        """Begins a slice; with `kind` INSTANT, marks an instant. Notes that are None are left out."""
        packet = self._event(t_ns, track, kind)
        packet.track_event.name_iid = self._number(packet, "event_names", name)
        for note, value in notes.items():
            if value is None:
                continue
            noted = packet.track_event.debug_annotations.add()
            noted.name_iid = self._number(packet, "debug_annotation_names", note)
            if isinstance(value, float):
                noted.double_value = value
            elif isinstance(value, int):
                noted.int_value = value
            else:
                noted.string_value_iid = self._number(packet, "debug_annotation_string_values", str(value))
        self._send(packet)

    def end(self, t_ns: int, track: int) -> None:
        self._send(self._event(t_ns, track, SLICE_END))

    def count(self, track: int, t_ns: Ints, values: Floats) -> None:
        """Writes a counter's values. Its packets differ only in time and value, so one is made for each
        number of bytes that a time takes, and copied."""
        t_ns = np.maximum(t_ns, 0)
        sizes = np.ones(t_ns.size, dtype=np.int64)
        for n in range(1, 9):
            sizes += t_ns >= 1 << 7 * n
        for begin, end in _alike(sizes):
            self._file.write(self._counted(track, t_ns[begin:end], values[begin:end]))

    def _counted(self, track: int, t_ns: Ints, values: Floats) -> bytes:
        packet = self._event(int(t_ns[0]), track, COUNTER)
        packet.track_event.double_counter_value = _FOUND_AGAIN
        one = self._framed(packet)
        time = varint(int(t_ns[0]))
        at_time = one.index(_TIME + time) + 1
        at_value = one.index(struct.pack("<d", _FOUND_AGAIN))
        rows = np.tile(np.frombuffer(one, dtype=np.uint8), (t_ns.size, 1))
        for i in range(len(time)):
            more = 0x80 if i + 1 < len(time) else 0
            rows[:, at_time + i] = (t_ns >> (7 * i) & 0x7F) | more
        rows[:, at_value : at_value + 8] = values.astype("<f8").view(np.uint8).reshape(-1, 8)
        return rows.tobytes()

    def _event(self, t_ns: int, track: int, kind: int) -> Any:
        # Times that somebody else wrote may lie before the epoch, which a trace cannot express.
        packet = packet_class()(timestamp=max(t_ns, 0), sequence_flags=NEEDS_STATE)
        packet.track_event.type, packet.track_event.track_uuid = kind, track
        return packet

    def _number(self, packet: Any, table: str, text: str) -> int:
        number = self._numbers.get((table, text))
        if number is None:
            number = self._numbers[table, text] = len(self._numbers) + 1
            strings = table == "debug_annotation_string_values"
            said = {"str": text.encode()} if strings else {"name": text}
            getattr(packet.interned_data, table).add(iid=number, **said)
        return number

    def _send(self, packet: Any) -> None:
        self._file.write(self._framed(packet))

    def _framed(self, packet: Any) -> bytes:
        """A trace is a message whose field 1, repeated, is a packet."""
        packet.trusted_packet_sequence_id = 1
        content = packet.SerializeToString()
        return b"\x0a" + varint(len(content)) + bytes(content)


def _alike(sizes: Ints) -> Iterator[tuple[int, int]]:
    """Ranges of equal sizes that follow each other."""
    edges = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), sizes.size]
    return ((begin, end) for begin, end in itertools.pairwise(edges) if end > begin)


_BATCH = 1 << 16
_MOST_POINTS = 500_000  # points of a counter: the browser must hold them
_SPAN_ORDER = {"experiment": 1, "train": 2, "evaluate": 3, "predict": 4, "epoch": 5, "step": 6}


def write_perfetto(chosen: Selection, path: Path) -> list[str]:
    """Returns remarks on what the file lacks, and why."""
    events, energy_j, remarks = chosen.run.event_energies
    with path.open("wb") as file:
        trace = Packets(file, chosen.run.recording)
        _write_marks(trace, chosen)
        devices = [device for device in _devices(chosen, events) if chosen.wants(device)]
        tracks = {device: _describe_device(trace, chosen, device, i + 1) for i, device in enumerate(devices)}
        for device in devices:
            if device in chosen.run.summary.devices:
                _write_counters(trace, chosen, chosen.run.summary.devices[device], tracks[device])
        _write_events(trace, events, energy_j, tracks)
    return remarks


def _devices(chosen: Selection, events: pa.Table) -> Sequence[str]:
    traced: list[str] = events["device"].unique().to_pylist()
    return list(dict.fromkeys([*chosen.run.summary.devices, *sorted(traced)]))


def _describe_device(trace: Packets, chosen: Selection, device: str, pid: int) -> int:
    known = chosen.run.summary.devices.get(device)
    what = hardware(chosen.run.info, device)
    labels = [known.provenance if known is not None else "power not recorded"]
    return trace.track(f"{device} {what}" if what else device, pid=pid, labels=labels, order=pid)


def _write_counters(trace: Packets, chosen: Selection, device: DeviceSummary, parent: int) -> None:
    if device.energy_j is None:
        return
    begin_ns, end_ns = chosen.run.summary.begin_ns, chosen.run.summary.end_ns
    whole = chosen.run.traces[device.device]
    drawn = coarse(within(whole, [(begin_ns, end_ns)]), _MOST_POINTS)
    suffix = "" if device.provenance == "measured" else f", {device.provenance}"
    about = device.source + ("" if device.scope == "device" else "; not in the sum over devices")
    power = trace.track(f"power{suffix}", parent, 1, unit="W", description=about)
    trace.count(power, drawn.start_ns, drawn.power_w)
    energy = trace.track(f"energy{suffix}", parent, 2, unit="J", description=about)
    at_ns = np.unique(np.concatenate([[begin_ns], drawn.start_ns, drawn.end_ns, [end_ns]]))
    until_j = whole.energy_until_j(at_ns) - whole.energy_until_j(begin_ns)
    trace.count(energy, at_ns, until_j)
    if device.missing:
        missing = trace.track("no readings", parent, 3)
        for gap_begin_ns, gap_end_ns in device.missing:
            trace.begin(gap_begin_ns, missing, "no readings")
            trace.end(gap_end_ns, missing)


def _write_events(trace: Packets, events: pa.Table, energy_j: Floats, parents: Mapping[str, int]) -> None:
    tracks: dict[object, int] = {}
    reading = _Reading(events, energy_j)
    for edge in edges(reading.slices(parents)):
        track = tracks.get(edge.track)
        if track is None:
            (device, lane), _ = edge.track
            # Tracks of the same name below one parent are drawn as one lane.
            kind = "stream" if device.startswith("gpu") else "thread"
            name = "lane not known" if lane is None else f"{kind} {lane}"
            track = tracks[edge.track] = trace.track(name, parents[device], 4 + len(tracks))
        if edge.slice is None:
            trace.end(edge.t_ns, track)
        else:
            name, notes = reading.of(edge.slice.item)
            trace.begin(edge.t_ns, track, name, notes)


class _Reading:
    """Events in the order in which they are drawn, converted to Python's numbers and words batch by batch."""

    def __init__(self, events: pa.Table, energy_j: Floats) -> None:
        self._events, self._energy_j = events, energy_j
        self._batch: list[tuple[str, dict[str, object]]] = []
        self._first = 0

    def slices(self, devices: Mapping[str, int]) -> Iterator[TrackSlice[tuple[str, int | None]]]:
        start_ns = self._events["start_ns"].to_numpy()
        order = np.lexsort((-self._events["duration_ns"].to_numpy(), start_ns))
        for first in range(0, order.size, _BATCH):
            rows = order[first : first + _BATCH]
            batch = self._events.take(pa.array(rows)).to_pydict()
            energy_j = [None if np.isnan(value) else value for value in self._energy_j[rows].tolist()]
            named = zip(batch["name"], batch["phase"], batch["step"], energy_j, strict=True)
            self._batch = [
                (name, {"phase": phase, "step": step, "energy_j": used_j})
                for name, phase, step, used_j in named
            ]
            self._first = first
            timed = zip(batch["start_ns"], batch["duration_ns"], batch["device"], batch["lane"], strict=True)
            for item, (begun_ns, duration_ns, device, lane) in enumerate(timed, start=first):
                if device in devices:
                    yield TrackSlice(begun_ns, begun_ns + duration_ns, (device, lane), lane is not None, item)

    def of(self, item: int) -> tuple[str, dict[str, object]]:
        """Name and notes of a slice that has just begun."""
        return self._batch[item - self._first]


def _write_marks(trace: Packets, chosen: Selection) -> None:
    """Draws pairs of marks as slices, others as instants; and when the profiler ran, over which steps."""
    top = trace.track(program(chosen.run.info))
    spans = [*all_spans(chosen.run.recording), *region_spans(chosen.run.recording.marks)]
    spans.sort(key=lambda span: (span.begin_ns, -span.end_ns))
    kinds = sorted({_kind(span) for span in spans}, key=lambda kind: (_SPAN_ORDER.get(kind[0], 9), kind))
    lanes = {kind: (_called(kind), order) for order, kind in enumerate(kinds, start=1)}
    slices = [TrackSlice(s.begin_ns, s.end_ns, lanes[_kind(s)], True, i) for i, s in enumerate(spans)]
    notes = [
        (span.name if span.index is None else f"{span.name} {span.index}", {"source": span.source})
        for span in spans
    ]
    for window in chosen.run.recording.windows.to_pylist():
        lane = (f"tracing, process {window['pid']}", 20)
        texts = [(window["asked_ns"], window["begin_ns"], "profiler starts")]
        texts.append((window["begin_ns"], window["end_ns"], f"traced by {window['framework']}"))
        texts += [(step["begin_ns"], step["end_ns"], f"step {step['index']}") for step in window["steps"]]
        texts.append((window["end_ns"], window["stopped_ns"], "profiler stops"))
        for begin_ns, end_ns, text in texts:
            slices.append(TrackSlice(begin_ns, max(begin_ns, end_ns), lane, True, len(notes)))
            notes.append((text, {}))
    slices.sort(key=lambda one: (one.start_ns, -one.end_ns))
    tracks: dict[object, int] = {}
    for edge in edges(slices):
        _write_mark_edge(trace, edge, tracks, top, notes)
    _write_instants(trace, chosen.run.recording.marks, spans, top)


def _write_mark_edge(
    trace: Packets,
    edge: SliceEdge[tuple[str, int]],
    tracks: dict[object, int],
    top: int,
    notes: Sequence[tuple[str, Mapping[str, object]]],
) -> None:
    if edge.track not in tracks:
        (name, order), _ = edge.track
        tracks[edge.track] = trace.track(name, top, order)
    if edge.slice is None:
        trace.end(edge.t_ns, tracks[edge.track])
    else:
        trace.begin(edge.t_ns, tracks[edge.track], *notes[edge.slice.item])


def _kind(span: Span) -> tuple[str, int]:
    return f"region {span.name}" if span.source == REGION else span.name, span.rank or 0


def _called(kind: tuple[str, int]) -> str:
    return f"{kind[0]}, rank {kind[1]}" if kind[1] else kind[0]


def _write_instants(trace: Packets, marks: pa.Table, spans: Sequence[Span], top: int) -> None:
    ends = {
        (REGION if span.source == REGION else span.name, span.pid, span.source, t_ns)
        for span in spans
        for t_ns in (span.begin_ns, span.end_ns)
    }
    track = None
    for mark in marks.to_pylist():
        if (mark["name"].rpartition("_")[0], mark["pid"], mark["source"], mark["t_ns"]) in ends:
            continue
        track = trace.track("marks", top, 30) if track is None else track
        name = mark["name"] if mark["index"] is None else f"{mark['name']} {mark['index']}"
        trace.begin(mark["t_ns"], track, name, {"source": mark["source"], "detail": mark["detail"]}, INSTANT)
