"""Reads XPlane files, as TensorFlow and JAX write them: planes, lines, times, and rows for our own windows.

A file has a plane for the host and one for each GPU, a plane has a line for each thread or stream, and a line
has events. An event carries numbers for names; the plane says once what they mean. Times are whole numbers:
in Unix nanoseconds, an event begins at profile_start_time + line.timestamp_ns + offset_ps / 1000.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from smaragdine.arrays import Ints
from smaragdine.errors import UserError
from smaragdine.protobuf import message_class
from smaragdine.recording.tables import MOST_NS
from smaragdine.tracing.names import contains_others
from smaragdine.tracing.xplane.hlo import NO_PROGRAM, Program

TF_OPERATION = re.compile(r"([A-Za-z0-9.][A-Za-z0-9_.\\/>-]*):([A-Z_][A-Za-z0-9_]*)")  # path:Type
COMPUTE_LINE = "tf_Compute/"  # operations of TensorFlow's executor
INPUT_LINE = "tf_data_"  # those of its input pipeline
_GPU_PLANE = re.compile(r"/device:GPU:(\d+)")
_HOST_PLANE = "/host:CPU"
# A viewer makes these lines from those of the streams: they show the same kernels again.
_DERIVED_LINES = re.compile(r"XLA |TensorFlow |Framework |Steps$|Source code|Launch Stats|Async ")
# Profilers before 2023 wrote a date as a line's time; since then it counts from the profile's start.
_ABSOLUTE_NS = 10**17


@dataclass(frozen=True)
class Plane:
    """The host or a GPU."""

    gpu: int | None
    texts: Mapping[int, str]  # what an event is called, by its metadata_id
    stat_names: Mapping[int, str]  # what a statistic is called, and the words that statistics refer to
    lines: Sequence[tuple[int, Any]]  # with their place in the file
    tf_paths: Mapping[int, str]  # of TensorFlow's operations, by their metadata_id
    quiet: frozenset[int]  # no operations: Python frames, and what the runtime says of itself

    @property
    def device(self) -> str:
        return "cpu:0" if self.gpu is None else f"gpu:{self.gpu}"

    def wanted(self, names: Iterable[str]) -> dict[int, str]:
        """Those of the named statistics that the plane has, by their number."""
        return {key: name for key, name in self.stat_names.items() if name in names}


def read_space(content: bytes | Path, where: str, remedy: str = "") -> Any:
    """The file as a message, or a UserError."""
    from google.protobuf.message import DecodeError

    space = message_class()()
    try:
        space.ParseFromString(content.read_bytes() if isinstance(content, Path) else content)
    except (DecodeError, ValueError, OSError) as error:
        raise UserError(f"{where} is no XPlane file", str(error), remedy) from None
    return space


def planes_of(space: Any) -> Iterator[Plane]:
    """The host and the GPUs, in the order of the file."""
    for plane in space.planes:
        gpu = _GPU_PLANE.fullmatch(plane.name)
        if gpu is None and plane.name != _HOST_PLANE:
            continue
        texts = {key: value.name for key, value in plane.event_metadata.items()}
        matches = {key: TF_OPERATION.fullmatch(text) for key, text in texts.items()}
        yield Plane(
            None if gpu is None else int(gpu[1]),
            texts,
            {key: value.name for key, value in plane.stat_metadata.items()},
            [
                (position, line)
                for position, line in enumerate(plane.lines)
                if gpu is None or not _DERIVED_LINES.match(line.name)
            ],
            {key: match[1] for key, match in matches.items() if match},
            frozenset(
                key for key, text in texts.items() if text.startswith("$") or (gpu is None and "::" in text)
            ),
        )


def event_times(
    line: Any, offsets_ps: Sequence[int], durations_ps: Sequence[int], begin_ns: int | None, where: str
) -> tuple[Ints, Ints]:
    """Starts and durations. Both ends are rounded to nanoseconds: what touched or nested still does."""
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


# The rows of our own windows: each event with all that the profiler says of it.

_STATS = frozenset(
    {
        *("hlo_op", "hlo_module", "program_id", "run_id", "name", "tf_op", "_p", "_c"),
        *("correlation_id", "cuda_graph_id", "cuda_graph_node_id", "kernel_details"),
    }
)
_DISPATCH = re.compile(r"PjitFunction\((.*)\)", re.DOTALL)  # on the program's own thread
_NO_PROGRAM_ID = -1
_TASK_BEGINS = "ThreadpoolListener::StartRegion"  # on a thread of a pool
_CONTAINERS = frozenset({"while", "conditional", "call"})  # what they run is recorded itself


@dataclass(frozen=True)
class Row:
    """One event of a line."""

    text: str
    offset_ps: int
    duration_ps: int
    is_input: bool = False
    operation: str = ""  # the HLO instruction
    module: str = ""  # XLA's name of the program: jit_step
    program: int | None = None  # XLA's number of the program; None: TensorFlow's executor ran the operation
    run: int | None = None  # which execution of the program, where we know it
    path: str = ""  # the path that a GPU's kernel carries
    producer: int | None = None  # XLA's own number of this execution of this operation
    consumer: int | None = None  # no work: the task in which the execution of this number was seen done
    dispatches: bool = False  # no work: the program hands `module` to the device
    graph: int | None = None  # the CUDA graph that a kernel is part of
    node: int | None = None  # of that graph, in the order in which it was built
    launch: int | None = None
    details: str = ""  # of a GPU's kernel: registers, grid, block
    is_eager: bool = False  # TensorFlow ran it by itself, outside any function


@dataclass(frozen=True)
class Rows:
    """Columns of the same length, and when which module was handed to the device."""

    rows: list[Row] = field(default_factory=list[Row])
    devices: list[str] = field(default_factory=list[str])
    lanes: list[int | None] = field(default_factory=list[int | None])
    start_ns: list[int] = field(default_factory=list[int])
    end_ns: list[int] = field(default_factory=list[int])
    dispatched_ns: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


@dataclass(frozen=True)
class _Seen:
    """What tells when an operation was done: the task that did the last of it."""

    task_ns: int
    marked_ns: int
    begun_ns: Sequence[int]  # when operations began on this thread, in order


def read_rows(space: Any, where: str, known: Mapping[int, Program], threads: Mapping[int, int]) -> Rows:
    """`threads`: the thread of each of the host's lines, by number. A line without one is its own lane."""
    begin_ns = profile_start_ns(space)
    events, seen = Rows(), dict[int, _Seen]()
    for plane in planes_of(space):
        eager = _eager_texts(plane)
        for position, line in plane.lines:
            rows = [*(_eager_rows(eager, line) if eager else ()), *_rows(plane, line)]
            if not rows:
                continue
            lane = int(line.id)
            if plane.gpu is None:
                lane = threads.get(lane, NO_THREAD + position)
            offsets_ps, durations_ps = [row.offset_ps for row in rows], [row.duration_ps for row in rows]
            start_ns, duration_ns = event_times(line, offsets_ps, durations_ps, begin_ns, where)
            end_ns = (start_ns + duration_ns).tolist()
            begun_ns = sorted(
                start for row, start in zip(rows, start_ns.tolist(), strict=True) if row.operation
            )
            dispatched_until_ns = 0
            for row, start, end in zip(rows, start_ns.tolist(), end_ns, strict=True):
                if row.dispatches:
                    # JAX records a call and, inside it, the same call again: one of them counts.
                    if start >= dispatched_until_ns:
                        events.dispatched_ns.setdefault(row.module, []).append(start)
                        dispatched_until_ns = end
                    continue
                if row.consumer is not None:
                    seen[row.consumer] = _Seen(start, end, begun_ns)
                    continue
                events.rows.append(row)
                events.devices.append(plane.device)
                events.lanes.append(lane)
                events.start_ns.append(start)
                events.end_ns.append(end)
    _last_until_done(events, seen, known)
    return events


def _rows(plane: Plane, line: Any) -> Iterator[Row]:
    texts, stat_names, is_gpu = plane.texts, plane.stat_names, plane.gpu is not None
    wanted = plane.wanted(_STATS)
    is_input = line.name.startswith(INPUT_LINE)
    has_operations = not is_gpu and (is_input or line.name.startswith(COMPUTE_LINE))
    task_ps = 0
    for event in line.events:
        key = event.metadata_id
        if key in plane.quiet:
            if texts[key] == _TASK_BEGINS:
                task_ps = event.offset_ps
            continue
        if event.num_occurrences:
            continue
        text = texts.get(key, "")
        if has_operations and key in plane.tf_paths:
            if not contains_others(text.rpartition(":")[2]):
                yield Row(text, event.offset_ps, event.duration_ps, is_input)
            continue
        stats: dict[str, Any] = {
            wanted[stat.metadata_id]: stat.str_value
            or (
                stat_names.get(stat.ref_value, "")
                if stat.ref_value
                else stat.int64_value or stat.uint64_value
            )
            for stat in event.stats
            if stat.metadata_id in wanted
        }
        dispatch = _DISPATCH.fullmatch(text)
        if dispatch:
            module = "jit_" + re.sub(r"[^\w.-]", "_", dispatch[1])
            yield Row(text, event.offset_ps, event.duration_ps, module=module, dispatches=True)
        elif text.startswith("end: "):
            if stats.get("_c"):
                lasted_ps = event.offset_ps + event.duration_ps - task_ps
                yield Row(text, task_ps, lasted_ps, consumer=stats["_c"])
        elif is_gpu or stats.get("hlo_op"):
            run = stats.get("run_id")
            yield Row(
                text,
                event.offset_ps,
                event.duration_ps,
                operation=str(stats.get("hlo_op") or ""),
                module=str(stats.get("hlo_module") or ""),
                program=int(stats.get("program_id", _NO_PROGRAM_ID)),
                run=None if run in (None, 0, -1) else int(run),  # -1: TensorFlow does not count them
                path=str(stats.get("name") or stats.get("tf_op") or ""),
                producer=stats.get("_p"),
                graph=stats.get("cuda_graph_id"),
                node=stats.get("cuda_graph_node_id"),
                launch=stats.get("correlation_id"),
                details=str(stats.get("kernel_details") or ""),
            )


# Operations that TensorFlow ran one by one, outside any function. The profiler tells only their type; the
# events that our hook puts around them say where they are written.

_SCOPE = "smaragdine:"
_OPERATION = "EagerLocalExecute: "
_KERNEL = "EagerKernelExecute"


def _eager_texts(plane: Plane) -> dict[int, str]:
    """The names of the host's events that tell of such operations; nothing where there are none."""
    texts = {
        key: text
        for key, text in plane.texts.items()
        if text == _KERNEL or text.startswith((_SCOPE, _OPERATION))
    }
    return texts if plane.gpu is None and _KERNEL in texts.values() else {}


def _eager_rows(wanted: Mapping[int, str], line: Any) -> Iterator[Row]:
    """Each kernel of a line as `scope/Type:Type`."""
    events = [
        (event.offset_ps, -event.duration_ps, wanted[event.metadata_id])
        for event in line.events
        if event.metadata_id in wanted
    ]
    around: list[tuple[int, str]] = []  # end and text of the events around, the innermost last
    for begin_ps, length_ps, text in sorted(events):
        while around and around[-1][0] <= begin_ps:
            around.pop()
        if text != _KERNEL:
            around.append((begin_ps - length_ps, text))
            continue
        kind = around[-1][1].removeprefix(_OPERATION) if around else ""
        # The operations of a function are recorded where they run.
        if kind and not kind.startswith((_SCOPE, "__")):
            scope = next(
                (text.removeprefix(_SCOPE) for _, text in reversed(around) if text.startswith(_SCOPE)), ""
            )
            name = f"{scope}/{kind}:{kind}" if scope else f"{kind}:{kind}"
            yield Row(name, begin_ps, -length_ps, is_eager=True)


# When an operation was done, where other threads did part of it.


def _last_until_done(events: Rows, seen: Mapping[int, _Seen], known: Mapping[int, Program]) -> None:
    """A product may go on in a pool of threads while the thread that began it is at the next operation. It
    lasts until it is done, and nests in no lane."""
    for i, row in enumerate(events.rows):
        found = seen.get(row.producer) if row.producer is not None else None
        if found is None or _contains_others(row, known):
            continue
        done_ns = _done_ns(found, events.start_ns[i])
        if done_ns > events.end_ns[i]:
            events.end_ns[i] = done_ns
            events.lanes[i] = None


def _done_ns(seen: _Seen, start_ns: int) -> int:
    """XLA marks the end of an operation only after all that waited for it has run, in the task that did the
    last of it. So it was done when the first of those began. Tasks before may have run anything."""
    at = max(bisect_left(seen.begun_ns, seen.task_ns), bisect_right(seen.begun_ns, start_ns))
    return min([seen.marked_ns, *seen.begun_ns[at : at + 1]])


def _contains_others(row: Row, known: Mapping[int, Program]) -> bool:
    """A loop runs on in tasks on other threads; it lasts as long as it says itself."""
    program = NO_PROGRAM if row.program is None else known.get(row.program, NO_PROGRAM)
    origin = program.origins.get(row.operation)
    return origin is not None and origin.opcode in _CONTAINERS


# Whose thread a line is.
#
# The number of a line is std::hash of the thread's handle, as libstdc++ computes it: MurmurHash64A of its 8
# bytes (TensorFlow 2.21, jaxlib 0.10). The hook tells the handles of the program's threads.

_BITS = (1 << 64) - 1
_FACTOR = 0xC6A4A7935BD1E995
_SEED = 0xC70F6907
# Linux numbers its threads below 2²²: nobody takes a lane from here on for a thread.
NO_THREAD = 1 << 22


def line_threads(meta: dict[str, Any]) -> dict[int, int]:
    """Line number → thread."""
    return {_hash(int(handle)): int(thread) for thread, handle in meta.get("threads") or ()}


def _hash(handle: int) -> int:
    mixed = _shifted(handle * _FACTOR & _BITS) * _FACTOR & _BITS
    mixed = ((_SEED ^ (8 * _FACTOR & _BITS)) ^ mixed) * _FACTOR & _BITS
    mixed = _shifted(_shifted(mixed) * _FACTOR & _BITS)
    return mixed - (1 << 64) if mixed >> 63 else mixed


def _shifted(bits: int) -> int:
    return bits ^ (bits >> 47)
