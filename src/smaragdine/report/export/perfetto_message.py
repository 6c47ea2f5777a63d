"""The messages of a Perfetto trace, of protos/perfetto/trace/perfetto_trace.proto: the fields we write.

Enumerations are plain numbers here, which is the same on the wire.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from smaragdine.tracing.files.xplane_message import Fields, build_class

FIELDS: Fields = {
    "TracePacket": [
        (6, "clock_snapshot", "ClockSnapshot"),
        (8, "timestamp", "uint64"),
        (10, "trusted_packet_sequence_id", "uint32"),
        (11, "track_event", "TrackEvent"),
        (12, "interned_data", "InternedData"),
        (13, "sequence_flags", "uint32"),
        (59, "trace_packet_defaults", "TracePacketDefaults"),
        (60, "track_descriptor", "TrackDescriptor"),
    ],
    "ClockSnapshot": [(1, "clocks", "repeated Clock"), (2, "primary_trace_clock", "int32")],
    "Clock": [(1, "clock_id", "uint32"), (2, "timestamp", "uint64")],
    "TracePacketDefaults": [(58, "timestamp_clock_id", "uint32")],
    "TrackDescriptor": [
        (1, "uuid", "uint64"),
        (2, "name", "string"),
        (3, "process", "ProcessDescriptor"),
        (5, "parent_uuid", "uint64"),
        (8, "counter", "CounterDescriptor"),
        (11, "child_ordering", "int32"),
        (12, "sibling_order_rank", "int32"),
        (14, "description", "string"),
    ],
    "ProcessDescriptor": [
        (1, "pid", "int32"),
        (6, "process_name", "string"),
        (8, "process_labels", "repeated string"),
    ],
    "CounterDescriptor": [(6, "unit_name", "string")],
    "InternedData": [
        (2, "event_names", "repeated EventName"),
        (3, "debug_annotation_names", "repeated DebugAnnotationName"),
        (29, "debug_annotation_string_values", "repeated InternedString"),
    ],
    "EventName": [(1, "iid", "uint64"), (2, "name", "string")],
    "DebugAnnotationName": [(1, "iid", "uint64"), (2, "name", "string")],
    "InternedString": [(1, "iid", "uint64"), (2, "str", "bytes")],
    "TrackEvent": [
        (4, "debug_annotations", "repeated DebugAnnotation"),
        (9, "type", "int32"),
        (10, "name_iid", "uint64"),
        (11, "track_uuid", "uint64"),
        (44, "double_counter_value", "value double"),
    ],
    "DebugAnnotation": [
        (1, "name_iid", "uint64"),
        (4, "int_value", "value int64"),
        (5, "double_value", "value double"),
        (17, "string_value_iid", "value uint64"),
    ],
}
REALTIME, MONOTONIC = 1, 3
SLICE_BEGIN, SLICE_END, INSTANT, COUNTER = 1, 2, 3, 4
STATE_CLEARED, NEEDS_STATE = 1, 2
EXPLICIT_ORDER = 3


@cache
def packet_class() -> Any:
    return build_class("perfetto", FIELDS, "TracePacket")
