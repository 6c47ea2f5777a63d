"""Chrome traces: what they have in common, and traces of tools we know nothing else about.

Times are decimal microseconds of any length. They are read as decimals, never as floats: a float of
today's time in microseconds is right to a quarter microsecond only.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal
from itertools import repeat
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.arrays import Ints
from smaragdine.errors import UserError
from smaragdine.recording.tables import MOST_NS, encode, words_column
from smaragdine.tracing.table import BACKWARD, OPTIMIZER, PHASES, built, phases_by_name

Id = int | float | str | None

_EXACT = Context(prec=80, rounding=ROUND_HALF_EVEN)
_ABSENT = Decimal("NaN")
_BEYOND = "its time is beyond 64 bits"
_DEVICE = re.compile(r"(?<![a-z])(gpu|cuda|cpu)(?:[\s:#]*(\d{1,9})(?!\d))?(?![a-z])", re.IGNORECASE)


class Args(msgspec.Struct, gc=False):
    """What we look at of an event's arguments; whose types depend on who wrote them."""

    name: Any = None
    external_id: Any = msgspec.field(default=None, name="External id")
    old_external_id: Any = msgspec.field(default=None, name="external id")
    device: Any = None
    stream: Any = None
    correlation: Any = None


class TraceEvent(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str | None = ""
    pid: Id = None
    tid: Id = None
    ts: Decimal = _ABSENT
    dur: Decimal = _ABSENT
    args: Args | list[Any] | str | None = None


class TraceFile(msgspec.Struct, gc=False):
    events: list[TraceEvent] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(default=0, name="baseTimeNanoseconds")
    schema_version: Any = msgspec.field(default=None, name="schemaVersion")
    metadata: Any = None


def read(content: pa.Buffer, where: str) -> pa.Table:

    trace = _decode(memoryview(content), where)
    # Positions in the file are kept for messages, so nothing is left out of the list until all is checked.
    complete = _complete(trace.events, where)
    processes = _process_names(trace.events)
    if is_kineto(trace):
        table = kineto_events(complete, trace.base_ns, where)
    elif is_timeline(processes):
        table = timeline_events(complete, processes, where)
    else:
        _refuse_derived_view(trace, processes, where)
        table = _any_events(complete, processes, trace.base_ns, where)
    if not table.num_rows:
        raise UserError(
            f"{where} has no events",
            f"none of its {len(trace.events):,} entries is an operation with a duration",
        )
    return table


def _decode(data: memoryview, where: str) -> TraceFile:
    start = 3 if bytes(data[:3]) == b"\xef\xbb\xbf" else 0
    plain_array = bytes(data[start : start + 256]).lstrip()[:1] == b"["
    try:
        if plain_array:
            return TraceFile(_decode_array(data[start:]))
        return msgspec.json.decode(data[start:], type=TraceFile)
    except msgspec.ValidationError as error:
        raise UserError(
            f"{where} is no Chrome trace", _with_row(str(error), data[start:], plain_array)
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8", str(error)) from None
    except msgspec.DecodeError as error:
        if "truncated" in str(error):
            raise UserError(f"{where} is cut off", "the JSON has no end", "Copy it anew") from None
        raise UserError(f"{where} is not JSON", str(error)) from None
    except RecursionError:
        raise UserError(f"{where} is no Chrome trace", "its JSON is nested too deeply") from None


def _decode_array(data: memoryview) -> list[TraceEvent]:
    try:
        return msgspec.json.decode(data, type=list[TraceEvent])
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        if "truncated" not in str(error):
            raise
        # The format allows a missing end, so that a killed program leaves a readable trace: whole events.
        text = bytes(data).rstrip().removesuffix(b",").rstrip()
        try:
            return msgspec.json.decode(text + b"]", type=list[TraceEvent])
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            raise error from None


class _RawTrace(msgspec.Struct):
    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")


def _with_row(message: str, data: memoryview, plain_array: bool) -> str:
    """msgspec says what is wrong, but not in which of a million events."""
    if "traceEvents" not in message and not plain_array:
        return message.replace("required field", "key")
    try:
        raw = (
            msgspec.json.decode(data, type=list[msgspec.Raw])
            if plain_array
            else msgspec.json.decode(data, type=_RawTrace).events
        )
    except (msgspec.DecodeError, RecursionError):
        return message
    for row, event in enumerate(raw, 1):
        try:
            msgspec.json.decode(event, type=TraceEvent)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return f"event {row:,}: {error}"
    return message


def _complete(events: Sequence[TraceEvent], where: str) -> list[TraceEvent]:
    """The events with a duration: X as they are, and each B with its E."""
    kinds = {event.ph for event in events}
    paired = bool(kinds & {"B", "E"})
    rows = _paired(events, where) if paired else [event for event in events if event.ph == "X"]
    lacking = [event for event in rows if event.ts is _ABSENT or event.dur is _ABSENT]
    if lacking:
        event = lacking[0]
        row = next(row for row, other in enumerate(events, 1) if other is event)
        what = "ts" if event.ts is _ABSENT else "dur"
        raise UserError(f"{where}, event {row:,} ({event.name})", f"it has no {what}")
    return rows


def _paired(events: Sequence[TraceEvent], where: str) -> list[TraceEvent]:
    open_by_thread: dict[tuple[Id, Id], list[tuple[int, TraceEvent]]] = {}
    marks = [(row, event) for row, event in enumerate(events, 1) if event.ph in ("B", "E")]
    for row, event in marks:
        if not event.ts.is_finite():
            why = "it has no ts" if event.ts is _ABSENT else "its time is no number"
            raise UserError(f"{where}, event {row:,} ({event.name})", why)
    whole: dict[int, TraceEvent] = {}
    # Chrome orders by time; entries of one time stay as they were written.
    for row, event in sorted(marks, key=lambda mark: mark[1].ts):
        stack = open_by_thread.setdefault((event.pid, event.tid), [])
        if event.ph == "B":
            stack.append((row, event))
            continue
        if not stack or (event.name and event.name != stack[-1][1].name):
            raise UserError(
                f"{where}, event {row:,} ({event.name or 'unnamed'})",
                "an E without its B",
                "B and E must nest within a thread",
            )
        begun, begin = stack.pop()
        try:
            dur = _EXACT.subtract(event.ts, begin.ts)
        except ArithmeticError:
            raise UserError(f"{where}, event {begun:,} ({begin.name})", _BEYOND) from None
        whole[begun] = TraceEvent("X", begin.name, begin.cat, begin.pid, begin.tid, begin.ts, dur, begin.args)
    for stack in open_by_thread.values():
        if stack:
            row, event = stack[-1]
            raise UserError(f"{where}, event {row:,} ({event.name})", "a B without its E")
    return [whole.get(row, event) for row, event in enumerate(events, 1) if event.ph == "X" or row in whole]


def times_ns(events: Sequence[TraceEvent], base_ns: int, where: str) -> tuple[Ints, Ints]:
    """Starts and durations; both ends rounded to the nearest nanosecond, so what touched still touches."""
    ts, dur = [event.ts for event in events], [event.dur for event in events]
    try:
        if dur and min(dur) < 0:
            raise OverflowError
        start_ns = np.array(_nanoseconds(ts, base_ns), dtype=np.int64)
        end_ns = np.array(_nanoseconds(map(_EXACT.add, ts, dur), base_ns), dtype=np.int64)
        duration_ns = end_ns - start_ns
        if dur and int(duration_ns.min()) < 0:
            raise OverflowError
        return start_ns, duration_ns
    except (ValueError, OverflowError, ArithmeticError):
        _refuse_times(events, base_ns, where)


def _nanoseconds(times_us: Iterable[Decimal], base_ns: int) -> list[int]:
    # A million calls each: without a line of Python in between.
    whole = map(int, map(_EXACT.to_integral_value, map(_EXACT.scaleb, times_us, repeat(3))))
    return list(map(base_ns.__add__, whole) if base_ns else whole)


def _refuse_times(events: Sequence[TraceEvent], base_ns: int, where: str) -> NoReturn:
    most_us, longest_us = (_EXACT.scaleb(Decimal(ns), -3) for ns in (MOST_NS - base_ns, MOST_NS))
    least_us = _EXACT.scaleb(Decimal(-MOST_NS - base_ns), -3)
    for event in events:
        if not (event.ts.is_finite() and event.dur.is_finite()):
            why = "its time is no number"
        elif event.dur < 0:
            why = "its duration is negative"
        # One after the other: a sum of numbers of any size may be none.
        elif not least_us <= event.ts < most_us or event.dur >= longest_us or event.ts + event.dur >= most_us:
            why = _BEYOND
        else:
            continue
        raise UserError(f"{where}, event at ts {event.ts} ({event.name})", why)
    raise UserError(where, _BEYOND)


def argument(event: TraceEvent, name: str) -> Any:
    return getattr(event.args, name, None) if isinstance(event.args, Args) else None


def is_int(value: object) -> bool:
    return type(value) is int  # true is no number here


def codes(values: Iterable[Any]) -> pa.Array:
    """A number for each distinct value, in order of appearance."""
    known: dict[Any, int] = {}
    return pa.array([known.setdefault(value, len(known)) for value in values], pa.int64())


def named(events: Sequence[TraceEvent], names: Sequence[str], where: str) -> pa.DictionaryArray:
    column = encode(names)
    if "" in column.dictionary.to_pylist():
        at = events[names.index("")].ts
        raise UserError(f"{where}, event at ts {at}", "it has no name")
    return column


def _process_names(events: Sequence[TraceEvent]) -> dict[Id, str]:
    return {
        event.pid: str(argument(event, "name"))
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


# PyTorch's `export_chrome_trace` (Kineto): operators on the CPU, kernels and copies on the GPU.
#
# Step and phase of an operator come from the annotations it starts within, those of a kernel from the
# operator that launched it. Launches themselves, Python frames and annotations are no operations.

# Names before torch 1.13 in the second place.
_CPU = {"cpu_op", "Operator"}
_GPU = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"}
_LAUNCH = {"cuda_runtime", "cuda_driver", "Runtime"}
_ANNOTATION = {"user_annotation"}
_NO_STEP = -(2**63)
_STEP = re.compile(r"ProfilerStep#(\d{1,18})")


def is_kineto(trace: TraceFile) -> bool:
    if trace.schema_version is not None or trace.base_ns:
        return True
    return any(
        event.ph == "X"
        and (event.cat == "cpu_op" or (event.cat in _GPU and is_int(argument(event, "stream"))))
        for event in trace.events
    )


def kineto_events(complete: Sequence[TraceEvent], base_ns: int, where: str) -> pa.Table:
    cpu = [event for event in complete if event.cat in _CPU]
    gpu = [event for event in complete if event.cat in _GPU]
    annotations = [event for event in complete if event.cat in _ANNOTATION]
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
        device = argument(event, "device")
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
    streams = [argument(event, "stream") for event in gpu]
    return pa.array(
        [stream if is_int(stream) and abs(stream) <= MOST_NS else None for stream in streams], pa.int64()
    )


def _external_ids(events: Sequence[TraceEvent]) -> Ints:
    """0 where there is none."""
    ids: list[int] = []
    for event in events:
        args = event.args
        value = 0
        if isinstance(args, Args):
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
    calls = [event for event in complete if event.cat in _LAUNCH and is_int(argument(event, "correlation"))]
    calls_ns, _ = times_ns(calls, base_ns, where)
    begun = dict(zip((argument(event, "correlation") for event in calls), calls_ns.tolist(), strict=True))
    if len(begun) < len(calls):
        return
    for row in open_rows.tolist():
        correlation = argument(gpu[row], "correlation")
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


# TensorFlow's `timeline.Timeline`: one process per device, the qualified name among an event's arguments.
#
# A kernel is listed under its own stream and again under `stream:all`, a copy under its stream and again
# under `memcpy`; the stream's own listing counts, and of the other two only what no stream lists.

_COMPUTE = re.compile(r"^/.*device:(CPU|GPU):(\d{1,9})(?:/(stream:\w+|memcpy))? Compute$", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,18}")


def is_timeline(processes: Mapping[Id, str]) -> bool:
    return any(_COMPUTE.match(process) for process in processes.values())


def timeline_events(complete: Sequence[TraceEvent], processes: Mapping[Id, str], where: str) -> pa.Table:
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
    name = argument(event, "name")
    return name if isinstance(name, str) and name else event.name


def _key(event: TraceEvent, device: str) -> tuple[str, str, object, object]:
    return device, _name(event), event.ts, event.dur
