"""The packets of a Perfetto trace, one after the other into a file."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import IO, Any

from smaragdine.recording.reader import Recording
from smaragdine.report.export.perfetto_message import (
    COUNTER,
    EXPLICIT_ORDER,
    MONOTONIC,
    NEEDS_STATE,
    REALTIME,
    SLICE_BEGIN,
    SLICE_END,
    STATE_CLEARED,
    packet_class,
)


class Packets:
    """Tracks, and what happens on them. Names are sent once, and a number for them afterwards."""

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
        """A new track; those below it stand in the order they are given."""
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
        """A slice; with `kind` INSTANT, an instant. A note that is None is left out."""
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

    def count(self, t_ns: int, track: int, value: float) -> None:
        packet = self._event(t_ns, track, COUNTER)
        packet.track_event.double_counter_value = value
        self._send(packet)

    def _event(self, t_ns: int, track: int, kind: int) -> Any:
        # A foreign writer's times may lie before the epoch, where a trace cannot go.
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
        packet.trusted_packet_sequence_id = 1
        content = packet.SerializeToString()
        # A trace is a message whose field 1, repeated, is the packet.
        self._file.write(b"\x0a" + _varint(len(content)) + content)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
