"""The events of an XPlane file, as they are written."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smaragdine.tracing.names import contains_others
from smaragdine.tracing.xplane.foreign import (
    DERIVED_LINES,
    GPU_PLANE,
    HOST_PLANE,
    TF_OPERATION,
    event_times,
    profile_start_ns,
)
from smaragdine.tracing.xplane.hlo import NO_PROGRAM, Program

# Operations that TensorFlow ran one by one, outside any function: their type is all the profiler tells.
#
# The hook's own events around them say where they are written; see hook/tensorflow/scopes.py.

MARK = "smaragdine:"
_OPERATION = "EagerLocalExecute: "
_KERNEL = "EagerKernelExecute"


def eager_rows(texts: dict[int, str], line: Any) -> Iterator[tuple[str, int, int]]:
    """`scope/Type:Type`, begin and length in picoseconds, of each kernel of a line."""
    wanted = {
        key: text for key, text in texts.items() if text.startswith((MARK, _OPERATION)) or text == _KERNEL
    }
    if not any(text == _KERNEL for text in wanted.values()):
        return
    events = [
        (event.offset_ps, -event.duration_ps, wanted[event.metadata_id])
        for event in line.events
        if event.metadata_id in wanted
    ]
    around: list[tuple[int, str]] = []  # end and text of what is open, the innermost last
    for begin_ps, length_ps, text in sorted(events):
        while around and around[-1][0] <= begin_ps:
            around.pop()
        if text != _KERNEL:
            around.append((begin_ps - length_ps, text))
            continue
        kind = around[-1][1].removeprefix(_OPERATION) if around else ""
        # A function's own operations are recorded where they run.
        if kind and not kind.startswith((MARK, "__")):
            scope = next(
                (text.removeprefix(MARK) for _, text in reversed(around) if text.startswith(MARK)), ""
            )
            yield f"{scope}/{kind}:{kind}" if scope else f"{kind}:{kind}", begin_ps, -length_ps


# Threads of the lines of an XPlane file.
#
# A line's number is std::hash of the thread's handle, as libstdc++ computes it: MurmurHash64A of its 8 bytes
# (TensorFlow 2.21, jaxlib 0.10). The hook tells the handles of the program's threads.

_BITS = (1 << 64) - 1
_FACTOR = 0xC6A4A7935BD1E995
_SEED = 0xC70F6907
# No kernel numbers its threads so high (2²² at most): a lane that is no thread's is not taken for one.
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


_STATS = frozenset(
    {
        *("hlo_op", "hlo_module", "program_id", "run_id", "name", "tf_op", "_p", "_c"),
        *("correlation_id", "cuda_graph_id", "cuda_graph_node_id"),
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
    operation: str = ""  # of HLO
    module: str = ""  # XLA's name of the program: jit_step
    program: int | None = None  # of XLA's; None: an operation of TensorFlow's executor
    run: int | None = None  # which execution of the program, where it is known
    path: str = ""  # that a GPU's kernel carries
    producer: int | None = None  # XLA's own number of this execution of this operation
    consumer: int | None = None  # no work: the task, up to where the execution of this number was seen done
    dispatches: bool = False  # no work: `module` is handed to the device
    graph: int | None = None  # the CUDA graph that a kernel is part of
    node: int | None = None  # of that graph, in the order in which it was built
    launch: int | None = None
    is_eager: bool = False  # run by itself, outside any function of TensorFlow's


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
    """Where an operation was seen to be done: in the task that did the last of it, or behind that."""

    task_ns: int
    marked_ns: int
    begun_ns: Sequence[int]  # when operations began on this thread, in order


def read_rows(
    space: Any, where: str, known: Mapping[int, Program], threads: Mapping[int, int] | None = None
) -> Rows:
    """`threads`: of the lines of the host, by their number; a line without one is a lane of its own."""
    begin_ns = profile_start_ns(space)
    events, seen = Rows(), dict[int, _Seen]()
    for plane in space.planes:
        gpu = GPU_PLANE.fullmatch(plane.name)
        if gpu is None and plane.name != HOST_PLANE:
            continue
        for position, line in enumerate(plane.lines):
            rows = [] if gpu and DERIVED_LINES.match(line.name) else list(_rows(plane, line, gpu is not None))
            if not rows:
                continue
            device, lane = f"gpu:{int(gpu[1])}" if gpu else "cpu:0", int(line.id)
            if not gpu:
                lane = (threads or {}).get(lane, NO_THREAD + position)
            offsets_ps, durations_ps = [row.offset_ps for row in rows], [row.duration_ps for row in rows]
            start_ns, duration_ns = event_times(line, offsets_ps, durations_ps, begin_ns, where)
            end_ns = (start_ns + duration_ns).tolist()
            begun_ns = sorted(
                start for row, start in zip(rows, start_ns.tolist(), strict=True) if row.operation
            )
            dispatched_until_ns = 0
            for row, start, end in zip(rows, start_ns.tolist(), end_ns, strict=True):
                if row.dispatches:
                    # JAX records a call and, within it, the same call: one of them counts.
                    if start >= dispatched_until_ns:
                        events.dispatched_ns.setdefault(row.module, []).append(start)
                        dispatched_until_ns = end
                    continue
                if row.consumer is not None:
                    seen[row.consumer] = _Seen(start, end, begun_ns)
                    continue
                events.rows.append(row)
                events.devices.append(device)
                events.lanes.append(lane)
                events.start_ns.append(start)
                events.end_ns.append(end)
    _last_until_done(events, seen, known)
    return events


def _rows(plane: Any, line: Any, is_gpu: bool) -> Iterator[Row]:
    texts: dict[int, str] = {key: value.name for key, value in plane.event_metadata.items()}
    stat_names: dict[int, str] = {key: value.name for key, value in plane.stat_metadata.items()}
    wanted = {key: name for key, name in stat_names.items() if name in _STATS}
    is_input = line.name.startswith("tf_data_")
    has_operations = not is_gpu and (is_input or line.name.startswith("tf_Compute/"))
    if not is_gpu:
        for each in eager_rows(texts, line):
            yield Row(*each, is_eager=True)
    task_ps = 0
    for event in line.events:
        text = texts.get(event.metadata_id, "")
        if text == _TASK_BEGINS:
            task_ps = event.offset_ps
        # Python frames, and what the runtime says of itself.
        if event.num_occurrences or text.startswith("$") or (not is_gpu and "::" in text):
            continue
        if has_operations and TF_OPERATION.fullmatch(text):
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
            )


def _last_until_done(events: Rows, seen: Mapping[int, _Seen], known: Mapping[int, Program]) -> None:
    """A product may go on in a pool of threads after the thread that began it took up the next operation: it
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
    """XLA marks an operation's end only when all that waited for it has run, in the task that did the last of
    it: it was done when the first of these began. Tasks before may have run anything."""
    at = max(bisect_left(seen.begun_ns, seen.task_ns), bisect_right(seen.begun_ns, start_ns))
    return min([seen.marked_ns, *seen.begun_ns[at : at + 1]])


def _contains_others(row: Row, known: Mapping[int, Program]) -> bool:
    """A loop goes on in tasks on other threads; on its own it lasts as long as it says."""
    program = NO_PROGRAM if row.program is None else known.get(row.program, NO_PROGRAM)
    origin = program.origins.get(row.operation)
    return origin is not None and origin.opcode in _CONTAINERS
