"""XPlane files (`*.xplane.pb`) from elsewhere: what TensorFlow's and JAX's profilers write → events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.arrays import Ints
from smaragdine.errors import UserError
from smaragdine.recording.tables import MOST_NS, encode
from smaragdine.tracing.coverage import steps_apart
from smaragdine.tracing.table import built, phases_by_name
from smaragdine.tracing.xplane.reader import (
    COMPUTE_LINE,
    TF_OPERATION,
    Plane,
    event_times,
    planes_of,
    profile_start_ns,
    read_space,
)

_PATHS = ("tf_op", "op_name", "name")


def read(content: pa.Buffer, where: str) -> pa.Table:
    space = read_space(content.to_pybytes(), where, "Is it whole? Copy it anew")
    if not space.planes:
        raise UserError(f"{where} is no XPlane file", "it has no planes")
    planes = list(planes_of(space))
    parts = [part for plane in planes for part in _parts(plane)]
    if not parts:
        why = "; ".join(space.errors) or "no plane has operations (TensorFlow's, or XLA's with hlo_op)"
        raise UserError(f"{where} has no events", why)
    begin_ns = profile_start_ns(space)
    spans = [span for plane in planes if plane.gpu is None for span in _steps(plane, begin_ns, where)]
    names: list[str] = []
    devices: list[str] = []
    lanes: list[int] = []
    times: list[tuple[Ints, Ints]] = []
    steps: list[Ints] = []
    for part in parts:
        start_ns, duration_ns = event_times(part.line, part.offset_ps, part.duration_ps, begin_ns, where)
        times.append((start_ns, duration_ns))
        steps.append(steps_apart(start_ns, spans if part.in_step else []))
        names += part.names
        devices += [part.device] * start_ns.size
        lanes += [part.lane] * start_ns.size
    name_column = encode(names)
    step = np.concatenate(steps)
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
    in_step: bool  # the time of an annotation tells whose step they are
    names: Sequence[str]
    offset_ps: Sequence[int]
    duration_ps: Sequence[int]


def _parts(plane: Plane) -> Iterator[_Part]:
    # Of the host we name neither these nor the moments that XLA marks as an operation's end.
    ends = [key for key, text in plane.texts.items() if text.startswith("end: ")]
    xla_name = _xla_namer(plane, (*plane.tf_paths, *plane.quiet, *ends) if plane.gpu is None else ())

    def tf_name(event: Any) -> str | None:
        return plane.tf_paths.get(event.metadata_id)

    for position, line in plane.lines:
        # Other lines hold operations too: tf_data_* the input pipeline's, python what a rewriter folded.
        has_tf = plane.gpu is None and line.name.startswith(COMPUTE_LINE)
        for in_step, name_of in ((True, tf_name), (False, xla_name)) if has_tf else ((False, xla_name),):
            # Events are dropped as they are read: a million of their wrappers would keep the collector busy.
            rows = [
                (name, event.offset_ps, event.duration_ps)
                for event in line.events
                if (name := name_of(event)) is not None and not event.num_occurrences
            ]
            if rows:
                names, offset_ps, duration_ps = zip(*rows, strict=True)
                lane = position if plane.gpu is None else int(line.id)
                yield _Part(plane.device, lane, line, in_step, names, offset_ps, duration_ps)


def _xla_namer(plane: Plane, skipped: Iterable[int]) -> Callable[[Any], str | None]:
    """Names an event by its operation's path if it has one, else program/HLO operation, else the kernel."""
    stat_names = plane.stat_names
    wanted = plane.wanted((*_PATHS, "hlo_op", "hlo_module"))
    only_operations = plane.gpu is None
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
            operation = plane.texts.get(key, "") or operation or "(unnamed)"
        return f"{stats['hlo_module']}/{operation}" if stats.get("hlo_module") else operation

    return name_of


def _steps(plane: Plane, begin_ns: int | None, where: str) -> Iterator[tuple[int, int, int]]:
    """Annotations with a step number: begin, end and number. They are right for what the annotated thread
    waits for, as it does for TensorFlow's operations; XLA runs behind, so its operations get no step."""
    keys = plane.wanted(("step_num",))
    for _, line in plane.lines if keys else ():
        if line.name.startswith("tf_"):
            continue
        marked = [
            (event.offset_ps, event.duration_ps, stat.int64_value or stat.uint64_value)
            for event in line.events
            for stat in event.stats
            if stat.metadata_id in keys and stat.uint64_value <= MOST_NS
        ]
        if marked:
            offset_ps, duration_ps, numbers = zip(*marked, strict=True)
            start_ns, length_ns = event_times(line, offset_ps, duration_ps, begin_ns, where)
            yield from zip(start_ns.tolist(), (start_ns + length_ns).tolist(), numbers, strict=True)
