"""Reads the events of any file: what is in it tells its kind, and of a Chrome trace who wrote it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa

from smaragdine.errors import UserError
from smaragdine.recording.tables import encode, kind_of, read_content
from smaragdine.tracing import table
from smaragdine.tracing.kineto import foreign as kineto
from smaragdine.tracing.kineto.reader import (
    Id,
    TraceEvent,
    TraceFile,
    args_of,
    codes,
    complete,
    decode,
    named,
    times_ns,
)
from smaragdine.tracing.table import built, phases_by_name
from smaragdine.tracing.xplane import foreign as xplane


def read_events(path: str | os.PathLike[str]) -> pa.Table:
    """A table of schema EVENTS from Parquet, Arrow, CSV, a Chrome trace or an XPlane file, or a UserError."""
    where = os.fspath(path)
    content = read_content(path)
    kind = kind_of(content, path)
    if kind == "json":
        return _chrome(content, where)
    if kind == "xplane":
        return xplane.read(content, where)
    if kind == "unknown":
        raise UserError(
            f"{where} is of no kind that holds events",
            remedy="Parquet, Arrow, CSV, a Chrome trace (JSON) and XPlane (.pb) are read; see docs/events.md",
        )
    return table.read(content, kind, where)


def _chrome(content: pa.Buffer, where: str) -> pa.Table:
    trace = decode(memoryview(content), where)
    # Messages name an event by its place in the file, so the list stays whole until all is checked.
    events = complete(trace.events, where)
    processes = _process_names(trace.events)
    if kineto.is_kineto(trace):
        found = kineto.events_of(events, trace.base_ns, where)
    elif _is_timeline(processes):
        found = _timeline_events(events, processes, where)
    else:
        _refuse_derived_view(trace, processes, where)
        found = _any_events(events, processes, trace.base_ns, where)
    if not found.num_rows:
        raise UserError(
            f"{where} has no events",
            f"none of its {len(trace.events):,} entries is an operation with a duration",
        )
    return found


# Of a tool that we do not know: a process is a device where its name says so.

_DEVICE = re.compile(r"(?<![a-z])(gpu|cuda|cpu)(?:[\s:#]*(\d{1,9})(?!\d))?(?![a-z])", re.IGNORECASE)


def _process_names(events: Sequence[TraceEvent]) -> dict[Id, str]:
    return {
        event.pid: str(args_of(event).name)
        for event in events
        if event.ph == "M" and event.name == "process_name"
    }


def _device(process: str) -> str:
    match = _DEVICE.search(process)
    if match is None:
        return "cpu:0"
    kind = "cpu" if match[1].lower() == "cpu" else "gpu"
    return f"{kind}:{int(match[2] or 0)}"


def _any_events(events: Sequence[TraceEvent], processes: dict[Id, str], base_ns: int, where: str) -> pa.Table:
    start_ns, duration_ns = times_ns(events, base_ns, where)
    names = named(events, [event.name for event in events], where)
    device_of = {pid: _device(process) for pid, process in processes.items()}
    return built(
        names,
        encode([device_of.get(event.pid, "cpu:0") for event in events]),
        start_ns,
        duration_ns,
        phases_by_name(names),
        codes((event.pid, event.tid) for event in events),
    )


def _refuse_derived_view(trace: TraceFile, processes: dict[Id, str], where: str) -> None:
    """TensorFlow and JAX also write a trace.json.gz for viewers; its times count from the profile's start."""
    metadata = trace.metadata
    if not isinstance(metadata, dict) or "highres-ticks" not in metadata:
        return
    if any(process.startswith(("/host:", "/device:")) for process in processes.values()):
        raise UserError(
            f"{where} is a profile's view",
            "its times are not absolute and it may be thinned out",
            "Read the .xplane.pb beside it",
        )


# TensorFlow's `timeline.Timeline`: one process per device, the qualified name among an event's arguments.
#
# It lists a kernel under its stream and again under `stream:all`, and a copy under its stream and again under
# `memcpy`. What a stream lists counts; of the other two lists only what no stream has.

_COMPUTE = re.compile(r"^/.*device:(CPU|GPU):(\d{1,9})(?:/(stream:\w+|memcpy))? Compute$", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,18}")


def _is_timeline(processes: Mapping[Id, str]) -> bool:
    return any(_COMPUTE.match(process) for process in processes.values())


def _timeline_events(events: Sequence[TraceEvent], processes: Mapping[Id, str], where: str) -> pa.Table:
    matches = {pid: _COMPUTE.match(process) for pid, process in processes.items()}
    # pid → device, and the stream it lists: "" for the operations as the host saw them
    place = {
        pid: (f"{match[1].lower()}:{int(match[2])}", (match[3] or "").lower().removeprefix("stream:"))
        for pid, match in matches.items()
        if match
    }
    traced = {device for device, stream in place.values() if stream}
    # If the GPU itself was traced, its process without a stream lists only the host's launches.
    rows = [
        event
        for event in events
        if event.pid in place and (place[event.pid][1] or place[event.pid][0] not in traced)
    ]
    number = {stream: int(stream) for _, stream in place.values() if _NUMBER.fullmatch(stream)}
    own = Counter(_key(event, place[event.pid][0]) for event in rows if place[event.pid][1] in number)
    kept: list[TraceEvent] = []
    for event in rows:
        device, stream = place[event.pid]
        if stream and stream not in number:
            key = _key(event, device)
            if own[key] > 0:
                own[key] -= 1
                continue
        kept.append(event)
    start_ns, duration_ns = times_ns(kept, 0, where)
    names = named(kept, [_name(event) for event in kept], where)
    return built(
        names,
        encode([place[event.pid][0] for event in kept]),
        start_ns,
        duration_ns,
        phases_by_name(names),
        # A CPU operation's tid is a place in the picture, no thread.
        pa.array([number.get(place[event.pid][1]) for event in kept], pa.int64()),
    )


def _name(event: TraceEvent) -> str:
    name = args_of(event).name
    return name if isinstance(name, str) and name else event.name


def _key(event: TraceEvent, device: str) -> tuple[str, str, object, object]:
    return device, _name(event), event.ts, event.dur
