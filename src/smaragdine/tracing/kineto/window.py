"""A window of PyTorch's profiler → events with paths, phases and steps.

Operators are events, and so are kernels. A kernel takes the name of the operator that launched it, so that
the kernels of one operation add up. Annotations, and the engine's wrapper around each backward node, only say
where the operators in them belong. The nodes themselves (`AddmmBackward0`) are operators: they pay for what
they do besides the operators they call, and they hold the kernels of functions written by hand.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from smaragdine.errors import UserError
from smaragdine.recording.tables import MOST_NS, encode, words_column
from smaragdine.tracing.coverage import NO_STEP, PROGRAM, UNPLACED, Coverage, coverage_of, steps_at
from smaragdine.tracing.kineto.calls import calls_of, tell_launches
from smaragdine.tracing.kineto.compiled import compiled_of
from smaragdine.tracing.kineto.places import (
    ENGINE,
    OTHER,
    PREFIX,
    REGION,
    UNDECIDED,
    CallPlace,
    CallSteps,
    call_steps,
    is_generated,
    operation,
    places_of,
)
from smaragdine.tracing.kineto.reader import (
    ANNOTATIONS,
    GPU_WORK,
    LAUNCHES,
    OPERATORS,
    TraceEvent,
    TraceFile,
    args_of,
    times_ns,
)
from smaragdine.tracing.table import built

_PHASES = ("forward", "backward", "optimizer", "other")  # by their numbers in places.py
_CALLS = OPERATORS | ANNOTATIONS
_NEVER_NS = 2**63 - 1
_LONG_AGO_NS = -(2**62)


class _Launch(NamedTuple):
    call: int | None  # the one that launched the kernel
    asked_ns: int
    graph: bool  # what was launched is a CUDA graph with this kernel in it


def events_of(raw: Path, meta: dict[str, Any]) -> tuple[pa.Table, Coverage]:
    """The events of a file that `torch`'s profiler saved, and how much of it they explain."""
    trace = _read(raw)
    tell_launches(trace.events, meta.get("launches") or ())
    spans = [event for event in trace.events if event.ph == "X"]
    calls = [event for event in spans if event.cat in _CALLS]
    kernels = [event for event in spans if event.cat in GPU_WORK]
    start_ns, duration_ns = times_ns([*calls, *kernels], trace.base_ns, str(raw))
    begins, ends = start_ns.tolist(), (start_ns + duration_ns).tolist()
    order = np.lexsort((-(start_ns + duration_ns)[: len(calls)], start_ns[: len(calls)])).tolist()
    places, parents = places_of(calls, order, begins, ends, _forward_threads(trace.events), compiled_of(meta))
    launches = _launches(spans, calls, kernels, order, begins, ends, parents, trace.base_ns)

    operators = [at for at, call in enumerate(calls) if _is_operator(call)]
    rows = np.array([*operators, *range(len(calls), len(calls) + len(kernels))], dtype=np.int64)
    named = [(f"{places[at].path}/{operation(calls[at].name)}", places[at].phase) for at in operators]
    named += [_kernel(*both, calls, places) for both in zip(kernels, launches, strict=True)]
    phases = np.array([OTHER if phase == UNDECIDED else phase for _, phase in named], dtype=np.int32)
    devices = ["cpu:0"] * len(operators) + [f"gpu:{args_of(kernel).device or 0}" for kernel in kernels]
    lanes = [calls[at].tid for at in operators] + [args_of(kernel).stream for kernel in kernels]
    asked_ns = np.concatenate(
        [start_ns[operators], np.array([launch.asked_ns for launch in launches], dtype=np.int64)]
    ).astype(np.int64)
    begin_ns, until_ns = int(meta.get("begin_ns") or _LONG_AGO_NS), int(meta.get("end_ns") or _NEVER_NS)
    found = (
        CallSteps()
        if meta.get("steps")
        else call_steps(calls, order, parents, begins, ends, begin_ns, until_ns, meta.get("marked", True))
    )
    steps = steps_at(asked_ns, {"steps": found.spans} if found.spans else meta)
    replayable = calls_of(
        calls,
        parents,
        kernels,
        [launch.call for launch in launches],
        start_ns[len(calls) :],
        duration_ns[len(calls) :],
        meta.get("settings"),
        (meta.get("compiled") or {}).get("kernels") or {},
        [launch.graph for launch in launches],
    )
    table = built(
        encode([name for name, _ in named]),
        encode(devices),
        start_ns[rows],
        duration_ns[rows],
        words_column(phases, _PHASES),
        pa.array([_whole(lane) for lane in lanes], pa.int64()),
        pa.array(steps, mask=steps == NO_STEP),
        pa.array([None] * len(operators) + replayable.of_kernel, pa.int64()),
    )
    # The program goes on while the profiler is being stopped.
    inside = np.where(asked_ns == _LONG_AGO_NS, start_ns[rows], asked_ns) <= until_ns
    if not meta.get("steps"):
        # This is a slice of time: it may count only from its first whole step on.
        inside &= asked_ns >= begin_ns
    table = table.filter(pa.array(inside))
    remarks = _remarks(calls, launches, meta)
    if not found.spans:
        said = [*remarks, found.why_not] if found.why_not else remarks
        coverage = coverage_of(table, len(meta.get("steps", ())), said)
        return table, replace(coverage, irregular=found.irregular, calls=replayable.table)
    coverage = coverage_of(table, len(found.spans), [*remarks, found.said])
    return table, replace(
        coverage,
        found_steps=found.spans,
        found_of=found.of,
        slice_remarks=tuple(remarks),
        calls=replayable.table,
    )


def _read(raw: Path) -> TraceFile:
    try:
        return msgspec.json.decode(raw.read_bytes(), type=TraceFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{raw} is no trace of PyTorch", str(error), "Trace again") from None


def _whole(value: object) -> int | None:
    return value if type(value) is int and -MOST_NS <= value <= MOST_NS else None


def _is_operator(call: TraceEvent) -> bool:
    return call.cat in OPERATORS and not call.name.startswith((PREFIX, ENGINE))


def _kernel_name(name: str) -> str:
    """The function's own name in `void at::native::reduce_kernel<512, 1, …>(…)`."""
    short = re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0]
    return operation(short.rsplit("::", 1)[-1].strip() or name)


def _forward_threads(events: Sequence[TraceEvent]) -> dict[int, Any]:
    """Which thread a backward node means by its `Fwd thread id`: PyTorch counts threads in its own way.

    Kineto draws an arrow from a forward operator to its node; one arrow per thread is enough to tell.
    """
    flows = [event for event in events if event.cat == "fwdbwd"]
    origins = {event.id: event.tid for event in flows if event.ph == "s"}
    arrows = {(event.tid, event.ts): event.id for event in flows if event.ph == "f"}
    found: dict[int, Any] = {}
    if arrows:
        for event in events:
            if event.ph == "X" and (thread := args_of(event).forward_thread):
                origin = origins.get(arrows.get((event.tid, event.ts)))
                if origin is not None:
                    found.setdefault(thread, origin)
    return found


def _kernel(
    kernel: TraceEvent, launch: _Launch, calls: Sequence[TraceEvent], places: Sequence[CallPlace]
) -> tuple[str, int]:
    """The kernel's name and phase."""
    own = _kernel_name(kernel.name)
    if launch.call is None:
        return f"{UNPLACED if launch.asked_ns == _LONG_AGO_NS else PROGRAM}/{own}", OTHER
    call, place = calls[launch.call], places[launch.call]
    by_call = _is_operator(call) and not launch.graph and not is_generated(call.name)
    return f"{place.path}/{operation(call.name) if by_call else own}", place.phase


def _launches(
    spans: Sequence[TraceEvent],
    calls: Sequence[TraceEvent],
    kernels: Sequence[TraceEvent],
    order: Sequence[int],
    start_ns: Sequence[int],
    end_ns: Sequence[int],
    parents: Sequence[int | None],
    base_ns: int,
) -> list[_Launch]:
    """What launched each kernel. We ask only calls: other records use small ids again."""
    if not kernels:
        return []
    by_id = {number: at for at, call in enumerate(calls) if (number := args_of(call).external_id)}
    records = {
        number: span for span in spans if span.cat in LAUNCHES and (number := args_of(span).correlation)
    }
    by_thread: dict[Any, list[int]] = {}
    for at in order:
        by_thread.setdefault(calls[at].tid, []).append(at)

    def around(tid: Any, t_ns: int) -> int | None:
        in_thread = by_thread.get(tid, [])
        index = bisect_right(in_thread, t_ns, key=start_ns.__getitem__) - 1
        at = in_thread[index] if index >= 0 else None
        while at is not None and end_ns[at] <= t_ns:
            at = parents[at]
        return at

    found: list[_Launch] = []
    for kernel in kernels:
        args = args_of(kernel)
        record = records.get(args.correlation)
        call = by_id.get(args.external_id)
        asked_ns = _LONG_AGO_NS if call is None else start_ns[call]
        if record is not None:
            asked_ns = base_ns + int(record.ts * 1000)
            if call is None:
                call = by_id.get(args_of(record).external_id)
            if call is None:
                call = around(record.tid, asked_ns)
        found.append(_Launch(call, asked_ns, record is not None and "GraphLaunch" in record.name))
    return found


def _remarks(calls: Sequence[TraceEvent], launches: Sequence[_Launch], meta: dict[str, Any]) -> list[str]:
    remarks: list[str] = []
    if not meta.get("marked", True):
        remarks.append(
            "the program uses torch.compile and would compile anew if its modules were marked: those outside "
            "compiled code have no path"
        )
    elif not any(call.name.startswith(PREFIX) for call in calls):
        remarks.append("no module was called, so operations have no path")
    if any(call.name.startswith(REGION) for call in calls):
        remarks.append(
            "of compiled code, calls of libraries and fused kernels on a GPU go by the modules they come "
            "from, the rest by the module that was compiled"
            if (meta.get("compiled") or {}).get("graphs")
            else "compiled code is reported under the module that was compiled, not the modules inside"
        )
    graph = sum(launch.graph for launch in launches)
    if graph:
        remarks.append(
            f"{graph} of {len(launches)} kernels ran from CUDA graphs: they carry the path of the code "
            "around the launch, not of the modules captured"
        )
    lost = sum(launch.asked_ns == _LONG_AGO_NS for launch in launches)
    if lost:
        remarks.append(f"{lost} of {len(launches)} kernels were launched by nothing the profiler saw")
    return remarks
