"""XPlane files (`*.xplane.pb`) of TensorFlow's and JAX's profilers.

Times are integers: profile_start_time + line.timestamp_ns + offset_ps / 1000, in unix nanoseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.arrays import Ints
from smaragdine.errors import UserError
from smaragdine.protobuf import message_class
from smaragdine.recording.tables import MOST_NS, encode
from smaragdine.tracing.table import built, phases_by_name

TF_OPERATION = re.compile(r"([A-Za-z0-9.][A-Za-z0-9_.\\/>-]*):([A-Z_][A-Za-z0-9_]*)")
GPU_PLANE = re.compile(r"/device:GPU:(\d+)")
HOST_PLANE = "/host:CPU"
# Rows that a viewer derives from the streams' own: the same kernels again.
DERIVED_LINES = re.compile(r"XLA |TensorFlow |Framework |Steps$|Source code|Launch Stats|Async ")
# Above it a line's time is a date, not a time since the profile's start: profilers before 2023.
_ABSOLUTE_NS = 10**17
_PATHS = ("tf_op", "op_name", "name")


def read(content: pa.Buffer, where: str) -> pa.Table:
    from google.protobuf.message import DecodeError

    space = message_class()()
    try:
        space.ParseFromString(content.to_pybytes())
    except (DecodeError, ValueError) as error:
        raise UserError(f"{where} is no XPlane file", str(error), "Is it whole? Copy it anew") from None
    if not space.planes:
        raise UserError(f"{where} is no XPlane file", "it has no planes")
    parts = [part for plane in space.planes for part in _plane_parts(plane)]
    if not parts:
        why = "; ".join(space.errors) or "no plane has operations (TensorFlow's, or XLA's with hlo_op)"
        raise UserError(f"{where} has no events", why)
    begin_ns = profile_start_ns(space)
    steps = _Steps(space, begin_ns, where)
    names: list[str] = []
    devices: list[str] = []
    lanes: list[int] = []
    times: list[tuple[Ints, Ints]] = []
    number: list[Ints] = []
    for part in parts:
        start_ns, duration_ns = event_times(part.line, part.offset_ps, part.duration_ps, begin_ns, where)
        times.append((start_ns, duration_ns))
        number.append(steps.at(start_ns) if part.in_step else np.full(start_ns.size, -1, dtype=np.int64))
        names += part.names
        devices += [part.device] * start_ns.size
        lanes += [part.lane] * start_ns.size
    name_column = encode(names)
    step = np.concatenate(number)
    return built(
        name_column,
        encode(devices),
        np.concatenate([start for start, _ in times]),
        np.concatenate([duration for _, duration in times]),
        phases_by_name(name_column),
        pa.array(lanes, pa.int64()),
        pa.array(step, mask=step < 0),
    )


@dataclass(frozen=True)
class _Part:
    """The operations of one line."""

    device: str
    lane: int
    line: Any
    in_step: bool  # an annotation's time tells whose step they are
    names: Sequence[str]
    offset_ps: Sequence[int]
    duration_ps: Sequence[int]


def _plane_parts(plane: Any) -> Iterator[_Part]:
    gpu = GPU_PLANE.fullmatch(plane.name)
    if gpu is None and plane.name != HOST_PLANE:
        return
    event_names: dict[int, str] = {key: value.name for key, value in plane.event_metadata.items()}
    matches = {key: TF_OPERATION.fullmatch(name) for key, name in event_names.items()}
    tf_paths = {key: match[1] for key, match in matches.items() if match}
    # On the host Python frames, and the moments XLA marks as an operation's end, are not worth a look.
    others = [key for key, name in event_names.items() if name.startswith(("$", "end: ")) or "::" in name]
    xla_name = _xla_namer(
        plane, event_names, () if gpu else (*tf_paths, *others), only_operations=gpu is None
    )

    def tf_name(event: Any) -> str | None:
        return tf_paths.get(event.metadata_id)

    for position, line in enumerate(plane.lines):
        if gpu is not None:
            named = () if DERIVED_LINES.match(line.name) else ((False, xla_name),)
            device, lane = f"gpu:{int(gpu[1])}", int(line.id)
        else:
            # Other lines hold operations too: tf_data_* the input pipeline's, python what a rewriter folded.
            tf_line = line.name.startswith("tf_Compute/")
            named = ((True, tf_name), (False, xla_name)) if tf_line else ((False, xla_name),)
            device, lane = "cpu:0", position
        for in_step, name_of in named:
            # Events are dropped as they are read: a million of their wrappers would keep the collector busy.
            rows = [
                (name, event.offset_ps, event.duration_ps)
                for event in line.events
                if (name := name_of(event)) is not None and not event.num_occurrences
            ]
            if rows:
                names, offset_ps, duration_ps = zip(*rows, strict=True)
                yield _Part(device, lane, line, in_step, names, offset_ps, duration_ps)


def _xla_namer(
    plane: Any, event_names: dict[int, str], skipped: Iterable[int], only_operations: bool
) -> Callable[[Any], str | None]:
    """Names an event by its operation's path if it has one, else program/HLO operation, else the kernel."""
    stat_names: dict[int, str] = {key: value.name for key, value in plane.stat_metadata.items()}
    wanted = {key: name for key, name in stat_names.items() if name in (*_PATHS, "hlo_op", "hlo_module")}
    if only_operations and "hlo_op" not in wanted.values():
        return lambda event: None
    ignored = set(skipped)

    def name_of(event: Any) -> str | None:
        key = event.metadata_id
        if key in ignored:
            return None
        stats = {
            wanted[stat.metadata_id]: stat.str_value or stat_names.get(stat.ref_value, "")
            for stat in event.stats
            if stat.metadata_id in wanted
        }
        operation = stats.get("hlo_op", "")
        if only_operations and not operation:
            return None
        for path in (stats[name] for name in _PATHS if stats.get(name)):
            match = TF_OPERATION.fullmatch(path)
            return match[1] if match else path.removesuffix(":")
        # All kernels of a command buffer (a CUDA graph) give its name for theirs.
        if not operation or operation.startswith("command_buffer"):
            operation = event_names.get(key, "") or operation or "(unnamed)"
        return f"{stats['hlo_module']}/{operation}" if stats.get("hlo_module") else operation

    return name_of


def event_times(
    line: Any, offsets_ps: Sequence[int], durations_ps: Sequence[int], begin_ns: int | None, where: str
) -> tuple[Ints, Ints]:
    """Both ends rounded to the nearest nanosecond: what touched still touches, what nested still nests."""
    base_ns = int(line.timestamp_ns)
    if base_ns < _ABSOLUTE_NS:
        if begin_ns is None:
            raise UserError(
                f"{where} does not say when it began",
                "no profile_start_time in a plane named Task Environment",
                "Is it whole? Profile with TensorFlow 2.15 or JAX 0.4.30 or later",
            )
        base_ns += begin_ns
    offset_ps, duration_ps = np.array(offsets_ps, dtype=np.int64), np.array(durations_ps, dtype=np.int64)
    if int(duration_ps.min()) < 0:
        raise UserError(f"{where}, line {line.name}", "a duration is negative")
    furthest_ps = max(abs(int(offset_ps.min())), int(offset_ps.max()) + int(duration_ps.max()))
    if furthest_ps > MOST_NS - 500 or abs(base_ns) + furthest_ps // 1000 >= MOST_NS:
        raise UserError(f"{where}, line {line.name}", "a time is beyond 64 bits")
    start_ns = (offset_ps + 500) // 1000
    return base_ns + start_ns, (offset_ps + duration_ps + 500) // 1000 - start_ns


def profile_start_ns(space: Any) -> int | None:
    for plane in space.planes:
        if plane.name == "Task Environment":
            for stat in plane.stats:
                if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
                    return int(stat.uint64_value or stat.int64_value)
    return None


class _Steps:
    """Annotations with a step number, by time. Right for what the annotated thread waits for, as TensorFlow's
    does; XLA runs behind, so its operations get no step from it."""

    def __init__(self, space: Any, begin_ns: int | None, where: str) -> None:
        spans: list[tuple[int, int, int]] = []
        for plane in space.planes:
            keys = {key for key, value in plane.stat_metadata.items() if value.name == "step_num"}
            if plane.name != HOST_PLANE or not keys:
                continue
            for line in plane.lines:
                if line.name.startswith("tf_"):
                    continue
                marked = [
                    (event.offset_ps, event.duration_ps, stat.int64_value or stat.uint64_value)
                    for event in line.events
                    for stat in event.stats
                    if stat.metadata_id in keys
                ]
                if marked:
                    offset_ps, duration_ps, numbers = zip(*marked, strict=True)
                    start_ns, length_ns = event_times(line, offset_ps, duration_ps, begin_ns, where)
                    ends_ns = (start_ns + length_ns).tolist()
                    spans += zip(start_ns.tolist(), ends_ns, numbers, strict=True)
        spans.sort()
        self._begin, self._end, self._number = (
            np.array([span[i] for span in spans], dtype=np.int64) for i in range(3)
        )
        if np.any(self._end[:-1] > self._begin[1:]):
            self._begin = self._begin[:0]  # several at once: time does not say whose

    def at(self, t_ns: Ints) -> Ints:
        if not self._begin.size:
            return np.full(t_ns.size, -1, dtype=np.int64)
        i = np.searchsorted(self._begin, t_ns, side="right") - 1
        inside = (i >= 0) & (t_ns < self._end[np.maximum(i, 0)])
        return np.where(inside, self._number[np.maximum(i, 0)], -1)
