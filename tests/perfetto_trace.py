"""A Perfetto trace as the `perfetto` package's own classes read it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

GPU, CPU = "gpu:0 Test GPU", "cpu:0 Test CPU & Co"


def has_perfetto() -> bool:
    try:
        import perfetto.protos  # noqa: F401
    except ImportError:
        return False
    return True


class Decoded:
    """Tracks, slices, counters and instants; every slice that begins must end."""

    def __init__(self, path: Path) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

        self.packets = proto.Trace.FromString(path.read_bytes()).packet
        self.tracks: dict[int, Any] = {}
        self.slices: list[dict[str, Any]] = []
        self.counters: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
        self.instants: list[tuple[int, str, dict[str, Any]]] = []
        names: dict[int, str] = {}
        notes: dict[int, str] = {}
        strings: dict[int, str] = {}
        stacks: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for packet in self.packets:
            names |= {entry.iid: entry.name for entry in packet.interned_data.event_names}
            notes |= {entry.iid: entry.name for entry in packet.interned_data.debug_annotation_names}
            strings |= {e.iid: e.str.decode() for e in packet.interned_data.debug_annotation_string_values}
            if packet.HasField("track_descriptor"):
                self.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
            if not packet.HasField("track_event"):
                continue
            event, stack = packet.track_event, stacks[packet.track_event.track_uuid]
            said: dict[str, Any] = {}
            for note in event.debug_annotations:
                value = getattr(note, note.WhichOneof("value"))
                said[notes[note.name_iid]] = strings[value] if note.HasField("string_value_iid") else value
            if event.type == event.TYPE_COUNTER:
                track = self.tracks[event.track_uuid]
                key = (self.device(event.track_uuid), track.counter.unit_name)
                self.counters[key].append((packet.timestamp, event.double_counter_value))
            elif event.type == event.TYPE_INSTANT:
                self.instants.append((packet.timestamp, names[event.name_iid], said))
            elif event.type == event.TYPE_SLICE_BEGIN:
                if stack:
                    assert packet.timestamp >= stack[-1]["begin_ns"]
                begun = {
                    "name": names[event.name_iid],
                    "begin_ns": packet.timestamp,
                    "depth": len(stack),
                    **said,
                }
                begun |= {"track": event.track_uuid, "in": stack[-1]["name"] if stack else None}
                stack.append(begun)
            else:
                assert event.type == event.TYPE_SLICE_END
                ended = stack.pop()
                self.slices.append({**ended, "end_ns": packet.timestamp})
        assert not any(stacks.values()), "a slice never ends"

    def device(self, uuid: int) -> str:
        above = self.tracks[self.tracks[uuid].parent_uuid]
        return above.process.process_name or above.name

    def of(self, device: str) -> list[dict[str, Any]]:
        return [one for one in self.slices if self.device(one["track"]) == device]
