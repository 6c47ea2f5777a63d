"""Kineto's traces from elsewhere: what PyTorch's `export_chrome_trace` writes → events.

Operators on the CPU are events, and so are kernels and copies on the GPU; launches, Python frames and
annotations are not. An operator takes its step and phase from the annotations it starts in, and a kernel
from the operator that launched it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.arrays import Ints
from smaragdine.errors import UserError
from smaragdine.recording.tables import MOST_NS, words_column
from smaragdine.tracing.kineto.reader import (
    ANNOTATIONS,
    GPU_WORK,
    LAUNCHES,
    OPERATORS,
    TraceEvent,
    TraceFile,
    args_of,
    codes,
    is_int,
    named,
    times_ns,
)
from smaragdine.tracing.table import BACKWARD, OPTIMIZER, PHASES, built

_NO_STEP = -(2**63)
_STEP = re.compile(r"ProfilerStep#(\d{1,18})")


def is_kineto(trace: TraceFile) -> bool:
    if trace.schema_version is not None or trace.base_ns:
        return True
    return any(
        event.ph == "X"
        and (event.cat == "cpu_op" or (event.cat in GPU_WORK and is_int(args_of(event).stream)))
        for event in trace.events
    )


def events_of(complete: Sequence[TraceEvent], base_ns: int, where: str) -> pa.Table:
    cpu = [event for event in complete if event.cat in OPERATORS]
    gpu = [event for event in complete if event.cat in GPU_WORK]
    annotations = [event for event in complete if event.cat in ANNOTATIONS]
    rows = cpu + gpu
    start_ns, duration_ns = times_ns(rows, base_ns, where)
    marks_ns, marks_length_ns = times_ns(annotations, base_ns, where)

    threads = _numbers([(event.pid, event.tid) for event in [*cpu, *annotations]])
    cpu_thread, mark_thread = threads[: len(cpu)], threads[len(cpu) :]
    # When and in which thread each event was asked for: itself for an operator, its launch for a kernel.
    asked_ns, asked_thread = start_ns.copy(), np.full(len(rows), -1, dtype=np.int64)
    asked_thread[: len(cpu)] = cpu_thread
    _find_launches(
        gpu,
        [*cpu, *annotations],
        np.concatenate([start_ns[: len(cpu)], marks_ns]),
        threads,
        asked_ns[len(cpu) :],
        asked_thread[len(cpu) :],
    )
    _find_runtime(complete, gpu, base_ns, where, asked_ns[len(cpu) :], asked_thread[len(cpu) :])

    names = named(rows, [event.name for event in rows], where)
    backward = np.array([_is_backward(word) for word in names.dictionary.to_pylist()], dtype=np.bool_)
    in_backward = np.flatnonzero(backward[names.indices.to_numpy()[: len(cpu)]])
    optimizer = np.array([event.name.startswith("Optimizer.step") for event in annotations], dtype=np.bool_)
    phases = np.full(len(rows), -1, dtype=np.int32)
    cpu_end_ns = start_ns[: len(cpu)] + duration_ns[: len(cpu)]
    inside = _inside(
        cpu_thread[in_backward],
        start_ns[in_backward],
        cpu_end_ns[in_backward],
        asked_thread,
        asked_ns,
    )
    phases[inside] = BACKWARD
    marks_end_ns = marks_ns + marks_length_ns
    inside = _inside(
        mark_thread[optimizer], marks_ns[optimizer], marks_end_ns[optimizer], asked_thread, asked_ns
    )
    phases[inside] = OPTIMIZER

    steps = _steps(annotations, marks_ns, marks_end_ns, asked_ns)
    return built(
        names,
        _devices(cpu, gpu, where),
        start_ns,
        duration_ns,
        words_column(phases, PHASES),
        pa.concat_arrays([_cpu_lanes(cpu), _streams(gpu)]),
        pa.array(steps, mask=steps == _NO_STEP),
    )


def _is_backward(name: str) -> bool:
    return name.startswith("autograd::engine::evaluate_function") or "Backward" in name


def _numbers(values: Sequence[object]) -> Ints:
    return codes(values).to_numpy(zero_copy_only=False)


def _devices(cpu: Sequence[TraceEvent], gpu: Sequence[TraceEvent], where: str) -> pa.Array:
    numbers: list[Any] = []
    for event in gpu:
        device = args_of(event).device
        if not is_int(device):
            device = event.pid  # old traces: a GPU is a process of its own
        if not is_int(device):
            raise UserError(f"{where}, event at ts {event.ts} ({event.name})", "it does not name its GPU")
        numbers.append(device)
    known = sorted(set(numbers))
    code = {number: i for i, number in enumerate(known, 1)}
    codes = np.array([0] * len(cpu) + [code[number] for number in numbers], dtype=np.int32)
    return words_column(codes, ["cpu:0", *(f"gpu:{number}" for number in known)])


def _cpu_lanes(cpu: Sequence[TraceEvent]) -> pa.Array:
    threads = [event.tid for event in cpu]
    if set(map(type, threads)) <= {int} and len({event.pid for event in cpu}) <= 1:
        with contextlib.suppress(OverflowError):  # 64 bits without a sign
            return pa.array(threads, pa.int64())
    return codes((event.pid, event.tid) for event in cpu)


def _streams(gpu: Sequence[TraceEvent]) -> pa.Array:
    streams = [args_of(event).stream for event in gpu]
    return pa.array(
        [stream if is_int(stream) and abs(stream) <= MOST_NS else None for stream in streams], pa.int64()
    )


def _external_ids(events: Sequence[TraceEvent]) -> Ints:
    """0 where there is none."""
    ids: list[int] = []
    for args in map(args_of, events):
        value = args.old_external_id if args.external_id is None else args.external_id
        ids.append(value if type(value) is int and 0 < value <= MOST_NS else 0)
    return np.array(ids, dtype=np.int64)


def _find_launches(
    gpu: Sequence[TraceEvent],
    operators: Sequence[TraceEvent],
    operators_ns: Ints,
    operators_thread: Ints,
    asked_ns: Ints,
    asked_thread: Ints,
) -> None:
    """Fill in the operator that launched each kernel. Other records reuse small ids: only operators count."""
    if not gpu or not operators:
        return
    ids = _external_ids(operators)
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    if np.any((ids[1:] == ids[:-1]) & (ids[1:] > 0)):
        return  # several traces in one file: an id says nothing
    wanted = _external_ids(gpu)
    at = np.minimum(np.searchsorted(ids, wanted), ids.size - 1)
    found = (wanted > 0) & (ids[at] == wanted)
    asked_ns[found] = operators_ns[order[at[found]]]
    asked_thread[found] = operators_thread[order[at[found]]]


def _find_runtime(
    complete: Sequence[TraceEvent],
    gpu: Sequence[TraceEvent],
    base_ns: int,
    where: str,
    asked_ns: Ints,
    asked_thread: Ints,
) -> None:
    """For kernels without an operator, the runtime call with the same correlation; its thread stays open."""
    open_rows = np.flatnonzero(asked_thread < 0)
    if not open_rows.size:
        return
    calls = [event for event in complete if event.cat in LAUNCHES and is_int(args_of(event).correlation)]
    calls_ns, _ = times_ns(calls, base_ns, where)
    begun = dict(zip((args_of(event).correlation for event in calls), calls_ns.tolist(), strict=True))
    if len(begun) < len(calls):
        return
    for row in open_rows.tolist():
        correlation = args_of(gpu[row]).correlation
        if is_int(correlation):
            asked_ns[row] = begun.get(correlation, asked_ns[row])


def _inside(
    thread: Ints, begin_ns: Ints, end_ns: Ints, asked_thread: Ints, asked_ns: Ints
) -> npt.NDArray[np.bool_]:
    """Which events were asked for in one of the intervals of their own thread; the intervals may nest."""
    result = np.zeros(asked_ns.size, dtype=np.bool_)
    for one in np.unique(thread):
        mine = np.flatnonzero(thread == one)
        mine = mine[np.argsort(begin_ns[mine], kind="stable")]
        reach_ns = np.maximum.accumulate(end_ns[mine])
        rows = np.flatnonzero(asked_thread == one)
        at = np.searchsorted(begin_ns[mine], asked_ns[rows], side="right") - 1
        result[rows] = (at >= 0) & (asked_ns[rows] < reach_ns[np.maximum(at, 0)])
    return result


def _steps(annotations: Sequence[TraceEvent], begin_ns: Ints, end_ns: Ints, asked_ns: Ints) -> Ints:
    steps = np.full(asked_ns.size, _NO_STEP, dtype=np.int64)
    named_steps = [
        (int(begin_ns[i]), int(end_ns[i]), int(step[1]))
        for i, event in enumerate(annotations)
        if (step := _STEP.fullmatch(event.name))
    ]
    if not named_steps:
        return steps
    begin, end, number = np.array(sorted(named_steps), dtype=np.int64).T
    if np.any(end[:-1] > begin[1:]):
        return steps  # steps of several processes at once: time does not say whose
    at = np.searchsorted(begin, asked_ns, side="right") - 1
    inside = (at >= 0) & (asked_ns < end[np.maximum(at, 0)])
    steps[inside] = number[at[inside]]
    return steps
