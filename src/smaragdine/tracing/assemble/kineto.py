"""A window of PyTorch's profiler → events with paths, phases and steps.

Operators are events, and so are kernels; a kernel is called by the operator that launched it, so that the
kernels of one operation add up. Annotations and the engine's wrapper around each backward node only say where
the operators in them belong. Nodes themselves (`AddmmBackward0`) are operators: they pay for what they do
beside the operators they call, and hold the kernels of functions written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import pyarrow as pa

from smaragdine.errors import UserError
from smaragdine.recording.columns import MOST_NS, encode, words_column
from smaragdine.tracing.assemble.coverage import (
    FRAMEWORK,
    INPUT,
    NO_STEP,
    OPTIMIZER,
    UNPLACED,
    Coverage,
    coverage_of,
    steps_at,
)
from smaragdine.tracing.files import chrome
from smaragdine.tracing.files.table import built

PREFIX = "smaragdine:"  # of the annotations the hook makes

_PHASES = ("forward", "backward", "optimizer", "other")
_FORWARD, _BACKWARD, _OPTIMIZER, _OTHER = range(4)
_UNDECIDED = -1

_ENGINE = "autograd::engine::evaluate_function: "
_ACCUMULATE = _ENGINE + "torch::autograd::AccumulateGrad"
_REGION = "Torch-Compiled Region"
_OPTIMIZER_STEP = re.compile(r"Optimizer\.(?:step|zero_grad)#(.+)\.(?:step|zero_grad)$")
_LOADER = re.compile(r"enumerate\(DataLoader\)#([^.]+)\.")
_GRAPH = re.compile(r"## Call (\w+) \w+ ##")
_CALLS = ("cpu_op", "user_annotation")
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


class _Args(msgspec.Struct, frozen=True, gc=False):
    external_id: Any = msgspec.field(default=None, name="External id")
    sequence: Any = msgspec.field(default=None, name="Sequence number")
    forward_thread: Any = msgspec.field(default=None, name="Fwd thread id")
    device: Any = None
    stream: Any = None


_NOTHING = _Args()


class _Event(msgspec.Struct, gc=False):
    """As chrome.Event, with the arguments that only a trace of our own is sure to have."""

    ph: str = ""
    name: str = ""
    cat: str | None = ""
    id: Any = None
    tid: Any = None
    ts: chrome.Decimal = chrome.Decimal("NaN")
    dur: chrome.Decimal = chrome.Decimal("NaN")
    args: _Args = _NOTHING


class _Trace(msgspec.Struct, gc=False):
    events: list[_Event] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(default=0, name="baseTimeNanoseconds")


class _Place(NamedTuple):
    path: str
    phase: int


_OUTSIDE = _Place(FRAMEWORK, _UNDECIDED)


def events_of(raw: Path, meta: dict[str, Any]) -> tuple[pa.Table, Coverage]:
    """The events of a file that `torch`'s profiler saved, and how much of it they explain."""
    trace = _read(raw)
    spans = [event for event in trace.events if event.ph == "X"]
    calls = [event for event in spans if event.cat in _CALLS]
    kernels = [event for event in spans if event.cat in _KERNELS]
    start_ns, duration_ns = _times_ns([*calls, *kernels], trace.base_ns, str(raw))
    end_ns = start_ns + duration_ns
    ends = end_ns.tolist()
    order = np.lexsort((-end_ns[: len(calls)], start_ns[: len(calls)])).tolist()
    places = _places(calls, order, start_ns.tolist(), ends, _forward_threads(trace.events))

    operators = [at for at, call in enumerate(calls) if _is_operator(call)]
    rows = np.array([*operators, *range(len(calls), len(calls) + len(kernels))], dtype=np.int64)
    launchers = _launchers(calls, kernels)
    asked_ns = start_ns[rows].copy()
    names = [f"{places[at].path}/{_operation(calls[at].name)}" for at in operators]
    phases = [places[at].phase for at in operators]
    for row, (kernel, launcher) in enumerate(zip(kernels, launchers, strict=True), len(operators)):
        if launcher is None:
            names.append(f"{UNPLACED}/{_kernel_name(kernel.name)}")
            phases.append(_OTHER)
            continue
        call, place = calls[launcher], places[launcher]
        asked_ns[row] = start_ns[launcher]
        named = _operation(call.name) if _is_operator(call) else _kernel_name(kernel.name)
        names.append(f"{place.path}/{named}")
        phases.append(place.phase)
    codes = np.array([_OTHER if phase == _UNDECIDED else phase for phase in phases], dtype=np.int32)
    steps = steps_at(asked_ns, meta)
    table = built(
        encode(names),
        encode(["cpu:0"] * len(operators) + [f"gpu:{kernel.args.device or 0}" for kernel in kernels]),
        start_ns[rows],
        duration_ns[rows],
        words_column(codes, _PHASES),
        pa.array(
            [_whole(calls[at].tid) for at in operators] + [_whole(kernel.args.stream) for kernel in kernels],
            pa.int64(),
        ),
        pa.array(steps, mask=steps == NO_STEP),
    )
    return table, coverage_of(table, len(meta.get("steps", ())), _remarks(calls, launchers))


def _read(raw: Path) -> _Trace:
    try:
        return msgspec.json.decode(raw.read_bytes(), type=_Trace)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{raw} is no trace of PyTorch", str(error), "Trace again") from None


def _times_ns(events: Sequence[_Event], base_ns: int, where: str) -> tuple[chrome.Ints, chrome.Ints]:
    return chrome.times_ns(cast("Sequence[chrome.Event]", events), base_ns, where)


def _whole(value: object) -> int | None:
    return value if type(value) is int and -MOST_NS <= value <= MOST_NS else None


def _is_operator(call: _Event) -> bool:
    return call.cat == "cpu_op" and not call.name.startswith((PREFIX, _ENGINE))


def _operation(name: str) -> str:
    """What a person calls it. A slash would read as a path."""
    graph = _GRAPH.match(name)
    if graph is not None:
        return graph[1]
    return name.removeprefix("aten::").removeprefix("torch::autograd::").replace("/", ".") or "unnamed"


def _kernel_name(name: str) -> str:
    """The function of `void at::native::reduce_kernel<512, 1, …>(…)`, less what tells its copies apart."""
    short = re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0]
    return _operation(short.rsplit("::", 1)[-1].strip() or name)


def _forward_threads(events: Sequence[_Event]) -> dict[int, Any]:
    """The thread a backward node means by its `Fwd thread id`, which is PyTorch's own count of threads.

    Kineto draws an arrow from a forward operator to its node; one arrow per thread tells.
    """
    flows = [event for event in events if event.cat == "fwdbwd"]
    origins = {event.id: event.tid for event in flows if event.ph == "s"}
    arrows = {(event.tid, event.ts): event.id for event in flows if event.ph == "f"}
    found: dict[int, Any] = {}
    if arrows:
        for event in events:
            if event.ph == "X" and event.args.forward_thread:
                origin = origins.get(arrows.get((event.tid, event.ts)))
                if origin is not None:
                    found.setdefault(event.args.forward_thread, origin)
    return found


def _places(
    calls: Sequence[_Event],
    order: Sequence[int],
    start_ns: Sequence[int],
    end_ns: Sequence[int],
    forward_threads: dict[int, Any],
) -> list[_Place]:
    """Where each call belongs: by what it runs in, and for backward nodes by the forward call they undo."""
    places = [_OUTSIDE] * len(calls)
    open_by_thread: dict[Any, list[int]] = {}
    # A number is taken by the call that makes the node; those before it with the same number made none.
    by_sequence: dict[tuple[Any, int], _Place] = {}
    last_node: dict[Any, _Place] = {}
    for at in order:
        call = calls[at]
        stack = open_by_thread.setdefault(call.tid, [])
        while stack and end_ns[stack[-1]] <= start_ns[at]:
            stack.pop()
        place = places[stack[-1]] if stack else _OUTSIDE
        stack.append(at)
        sequence, thread = call.args.sequence, call.args.forward_thread
        if call.name.startswith(_ENGINE):
            if call.name == _ACCUMULATE:
                # The engine runs it right after the node that made the gradient.
                place = last_node.get(call.tid, _Place(UNPLACED, _BACKWARD))
            else:
                origin = by_sequence.get((forward_threads.get(thread), sequence))
                place = _Place(UNPLACED if origin is None else origin.path, _BACKWARD)
                last_node[call.tid] = place
        elif call.cat == "user_annotation" or call.name.startswith(PREFIX):
            place = _annotated(call.name, place)
        elif not thread and type(sequence) is int:
            if place.phase == _UNDECIDED:
                place = _Place(place.path, _FORWARD)
            by_sequence[call.tid, sequence] = place
        elif call.name.startswith(_REGION) and place is _OUTSIDE:
            place = _Place(f"{FRAMEWORK}/compiled", _FORWARD)
        places[at] = place
    return places


def _annotated(name: str, place: _Place) -> _Place:
    if name.startswith(PREFIX):
        # A module called in backward is recomputed there: the backward pass pays for it.
        phase = _FORWARD if place.phase in (_UNDECIDED, _OTHER) else place.phase
        return _Place(name.removeprefix(PREFIX), phase)
    optimizer = _OPTIMIZER_STEP.match(name)
    if optimizer is not None:
        return _Place(f"{OPTIMIZER}/{_operation(optimizer[1])}", _OPTIMIZER)
    loader = _LOADER.match(name)
    if loader is not None:
        return _Place(f"{INPUT}/{_operation(loader[1])}", _OTHER)
    return place


def _launchers(calls: Sequence[_Event], kernels: Sequence[_Event]) -> list[int | None]:
    """The call that launched each kernel. Other records reuse small ids: only calls are asked."""
    if not kernels:
        return []
    by_id = {call.args.external_id: at for at, call in enumerate(calls) if call.args.external_id}
    return [by_id.get(kernel.args.external_id) for kernel in kernels]


def _remarks(calls: Sequence[_Event], launchers: Sequence[int | None]) -> list[str]:
    remarks: list[str] = []
    if not any(call.name.startswith(PREFIX) for call in calls):
        remarks.append("no module was called, so operations have no path")
    if any(call.name.startswith(_REGION) for call in calls):
        remarks.append("compiled code is reported under the module that was compiled, not the modules inside")
    lost = sum(launcher is None for launcher in launchers)
    if lost:
        remarks.append(f"{lost} of {len(launchers)} kernels were launched by nothing the profiler saw")
    return remarks
