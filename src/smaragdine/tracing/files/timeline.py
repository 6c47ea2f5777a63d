"""TensorFlow's `timeline.Timeline`: one process per device, the qualified name among an event's arguments.

A kernel is listed under its own stream and again under `stream:all`, a copy under its stream and again under
`memcpy`; the stream's own listing counts, and of the other two only what no stream lists.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa

from smaragdine.recording.columns import encode
from smaragdine.tracing.files.chrome import Event, Id, argument, named, times_ns
from smaragdine.tracing.files.phases import phases_by_name
from smaragdine.tracing.files.table import built

_COMPUTE = re.compile(r"^/.*device:(CPU|GPU):(\d{1,9})(?:/(stream:\w+|memcpy))? Compute$", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,18}")


def is_timeline(processes: Mapping[Id, str]) -> bool:
    return any(_COMPUTE.match(process) for process in processes.values())


def timeline_events(complete: Sequence[Event], processes: Mapping[Id, str], where: str) -> pa.Table:
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
        for event in complete
        if event.pid in place and (place[event.pid][1] or place[event.pid][0] not in traced)
    ]
    number = {stream: int(stream) for _, stream in place.values() if _NUMBER.fullmatch(stream)}
    own = Counter(_key(event, place[event.pid][0]) for event in rows if place[event.pid][1] in number)
    kept: list[Event] = []
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


def _name(event: Event) -> str:
    name = argument(event, "name")
    return name if isinstance(name, str) and name else event.name


def _key(event: Event, device: str) -> tuple[str, str, object, object]:
    return device, _name(event), event.ts, event.dur
