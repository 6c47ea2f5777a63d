"""Chrome traces from elsewhere: of PyTorch, of TensorFlow's timeline, and of tools that we do not know."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa

from smaragdine.errors import UserError
from smaragdine.recording.tables import encode
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

_DEVICE = re.compile(r"(?<![a-z])(gpu|cuda|cpu)(?:[\s:#]*(\d{1,9})(?!\d))?(?![a-z])", re.IGNORECASE)


def read(content: pa.Buffer, where: str) -> pa.Table:
    trace = decode(memoryview(content), where)
    # Positions in the file are kept for messages, so nothing is left out of the list until all is checked.
    events = complete(trace.events, where)
    processes = _process_names(trace.events)
    if kineto.is_kineto(trace):
        table = kineto.events_of(events, trace.base_ns, where)
    elif _is_timeline(processes):
        table = _timeline_events(events, processes, where)
    else:
        _refuse_derived_view(trace, processes, where)
        table = _any_events(events, processes, trace.base_ns, where)
    if not table.num_rows:
        raise UserError(
            f"{where} has no events",
            f"none of its {len(trace.events):,} entries is an operation with a duration",
        )
    return table


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
    """TensorFlow and JAX also write a trace.json.gz for viewers, in time since the profile's start."""
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
# A kernel is listed under its own stream and again under `stream:all`, a copy under its stream and again
# under `memcpy`; the stream's own listing counts, and of the other two only what no stream lists.

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
    # Where the GPU itself was traced, its process without a stream lists only the launches, by the host.
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
