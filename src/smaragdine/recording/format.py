"""What a recording looks like on disk, for code. `docs/format.md` says the same for people.

    RUN/run.json            what was run, on what, how it ended
    RUN/power.arrows        energy counters and power samples     t_ns, channel, value
    RUN/activity.arrows     CPU time: machine, program, monitor   t_ns, channel, value
    RUN/telemetry.arrows    clocks, temperatures, utilisation …   t_ns, channel, value
    RUN/places.arrows       which thread of the program was on which socket, where there are several
    RUN/marks.arrows        named instants
    RUN/events.arrows       executions of tensor operations, of traced steps
    RUN/edges.arrows        dataflow between the operations
    RUN/calls.arrows        what rebuilds the calls that launched a GPU's kernels
    RUN/windows.arrows      when the profiler ran, over which steps, and how much of them it explains
    RUN/spool/              marks on their way into marks.arrows
    RUN/thinned/            what is left of readings that are older than some minutes (see `thinned`)

A table is an Arrow IPC stream. It is written in batches of about a second, so that what is on disk can be
read whenever the writer dies. A restarted sampler writes `power.1.arrows` and so on. Every three minutes
readings go on in a new file, `power.0.1.arrows` and so on (the restart, then the file), so that old files can
be removed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from smaragdine.errors import visible
from smaragdine.sensors.base import Channel, checked

FORMAT_VERSION = 1
INFO_FILE = "run.json"
SPOOL_FOLDER = "spool"
TRACES_FOLDER = "traces"
THINNED_FOLDER = "thinned"
READING_TABLES = ("power", "activity", "telemetry")
TABLES = (*READING_TABLES, "marks", "events", "edges", "windows", "places", "calls")

READINGS = pa.schema([("t_ns", pa.int64()), ("channel", pa.uint16()), ("value", pa.float64())])
# Where a thread was first seen, and where it moved to another socket.
PLACES = pa.schema([("t_ns", pa.int64()), ("pid", pa.int32()), ("tid", pa.int32()), ("socket", pa.int16())])
MARKS = pa.schema(
    [
        ("t_ns", pa.int64()),
        ("name", pa.string()),
        ("index", pa.int64()),
        ("rank", pa.int32()),
        ("pid", pa.int32()),
        ("source", pa.string()),
        ("total", pa.int64()),
        ("detail", pa.string()),
    ]
)
# Sources of marks that nobody announced: the hook inferred them.
CALLS_OF_MODEL = "torch:forward"  # each call of a model as a step
EPOCHS_OF_LOADER = "torch.dataloader"
_TEXT = pa.dictionary(pa.int32(), pa.string())  # few names, many events
EVENTS = pa.schema(
    [
        ("name", _TEXT),
        ("device", _TEXT),
        ("start_ns", pa.int64()),
        ("duration_ns", pa.int64()),
        ("phase", _TEXT),  # null: not known
        ("lane", pa.int64()),  # thread or stream; null: its events do not nest
        ("step", pa.int64()),
    ]
)
# As a recording has them: a kernel says which of `calls` launched it.
EVENTS_WITH_CALLS = EVENTS.append(pa.field("call", pa.int64()))
# What rebuilds a call of a framework: every one that launched work on a GPU, once.
CALLS = pa.schema(
    [
        ("call", pa.int64()),
        ("framework", pa.string()),
        ("device", pa.string()),
        ("op", pa.string()),
        ("inputs", pa.string()),  # JSON: dims, strides, types and values, as the profiler has them
        ("settings", pa.string()),  # JSON: what chooses the kernels, and the optimizers' lists of tensors
        ("kernels", pa.string()),  # JSON: name and grid of each
        ("count", pa.int64()),
        ("busy_ns", pa.int64()),
    ]
)
EDGES = pa.schema([("source", pa.string()), ("target", pa.string())])  # qualified names
# A window: when the profiler was asked for, began and ended, when the program went on, and when all was
# written. Slices of time have no steps.
WINDOWS = pa.schema(
    [
        ("framework", pa.string()),
        ("source", pa.string()),  # who announced the steps
        ("rank", pa.int32()),
        ("pid", pa.int32()),
        ("asked_ns", pa.int64()),
        ("begin_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("resumed_ns", pa.int64()),  # null: not before it had stopped
        ("stopped_ns", pa.int64()),
        (
            "steps",
            pa.list_(pa.struct([("index", pa.int64()), ("begin_ns", pa.int64()), ("end_ns", pa.int64())])),
        ),
        ("events", pa.int64()),
        ("busy_ns", pa.int64()),
        ("placed_ns", pa.int64()),
        ("counts_divide", pa.bool_()),
        ("remarks", pa.list_(pa.string())),
    ]
)
# The columns that a file of tracing or places must have. Others may be missing, and are null then.
REQUIRED = frozenset(
    {"name", "device", "start_ns", "duration_ns", *PLACES.names, *EDGES.names, *WINDOWS.names, *CALLS.names}
    - {"resumed_ns", "call"}
)

_TABLE_OF_QUANTITY = {
    "energy": "power",
    "power": "power",
    "busy": "activity",
    "program": "activity",
    "monitor": "activity",
}


def file_name(table: str, segment: int = 0, piece: int = 0) -> str:
    """power.arrows, power.2.arrows after two restarts, power.2.7.arrows 21 minutes later."""
    return f"{table}{f'.{segment}' if segment or piece else ''}{f'.{piece}' if piece else ''}.arrows"


def table_of(channel: Channel) -> str:
    return _TABLE_OF_QUANTITY.get(channel.quantity, "telemetry")


def channel_to_dict(channel: Channel) -> dict[str, Any]:
    return asdict(channel)


def channel_from_dict(values: dict[str, Any]) -> Channel:
    """A channel of a recording. Fields of a later version are dropped, so old readers read new recordings."""
    known: dict[str, Any] = {
        key: value for key, value in values.items() if key in Channel.__dataclass_fields__
    }
    # These texts are names in tables: a line break in one would make a row that nobody measured.
    texts: dict[str, Any] = {key: visible(value) for key, value in known.items() if isinstance(value, str)}
    return checked(Channel(**{**known, **texts}))


def readings_schema(channels: Sequence[Channel]) -> pa.Schema:
    """The channels travel inside each table, so that one file alone says what its numbers are."""
    text = json.dumps([channel_to_dict(channel) for channel in channels], ensure_ascii=False)
    return READINGS.with_metadata({"smaragdine.channels": text, "smaragdine.format": str(FORMAT_VERSION)})


def channels_of(schema: pa.Schema) -> list[Channel]:
    metadata: dict[bytes, bytes] = schema.metadata or {}
    return [channel_from_dict(values) for values in json.loads(metadata.get(b"smaragdine.channels", b"[]"))]
