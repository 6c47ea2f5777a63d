"""Kineto's files, and all Chrome traces: their JSON as structs, the duration of every event, exact times.

Kineto is PyTorch's profiler; it writes Chrome's format with a few arguments of its own. Times are decimal
microseconds of any length. We read them as decimals, never as floats: a float holds today's time in
microseconds only to a quarter of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal
from itertools import repeat
from typing import Any, NoReturn

import msgspec
import numpy as np
import pyarrow as pa

from smaragdine.arrays import Ints
from smaragdine.errors import UserError
from smaragdine.recording.tables import MOST_NS, encode

Id = int | float | str | None

# Categories of Kineto's events. PyTorch before 1.13 wrote the names with a capital letter.
OPERATORS = frozenset({"cpu_op", "Operator"})
GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "Runtime"})
ANNOTATIONS = frozenset({"user_annotation"})

_EXACT = Context(prec=80, rounding=ROUND_HALF_EVEN)
_ABSENT = Decimal("NaN")
_BEYOND = "its time is beyond 64 bits"


_NOTHING_WRITTEN = msgspec.Raw()


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that we look at. Any tool may write them, so they may be of any type."""

    name: Any = None
    external_id: Any = msgspec.field(default=None, name="External id")
    old_external_id: Any = msgspec.field(default=None, name="external id")
    sequence: Any = msgspec.field(default=None, name="Sequence number")
    forward_thread: Any = msgspec.field(default=None, name="Fwd thread id")
    device: Any = None
    stream: Any = None
    correlation: Any = None
    # Left as they are written: few ask for them, and they are long.
    dims: msgspec.Raw = msgspec.field(default=_NOTHING_WRITTEN, name="Input Dims")
    strides: msgspec.Raw = msgspec.field(default=_NOTHING_WRITTEN, name="Input Strides")
    types: msgspec.Raw = msgspec.field(default=_NOTHING_WRITTEN, name="Input type")
    values: msgspec.Raw = msgspec.field(default=_NOTHING_WRITTEN, name="Concrete Inputs")
    grid: msgspec.Raw = _NOTHING_WRITTEN
    # Of a kernel that inductor generated.
    kernel_backend: Any = None
    kernel_hash: Any = None
    kernel_kwargs: Any = None
    num_warps: Any = None
    num_stages: Any = None


_NO_ARGS = Args()


class TraceEvent(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str | None = ""
    id: Any = None
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


def args_of(event: TraceEvent) -> Args:
    return event.args if isinstance(event.args, Args) else _NO_ARGS


def is_int(value: object) -> bool:
    return type(value) is int  # JSON's true is no number here


def decode(data: memoryview, where: str) -> TraceFile:
    """A file that anybody may have written; a UserError says in one line what is wrong with it."""
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
        # The format allows a missing end, so that a killed program leaves a readable trace of whole events.
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


def complete(events: Sequence[TraceEvent], where: str) -> list[TraceEvent]:
    """The events with a duration: each X as it is, and each B with its E as one."""
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
    # Chrome sorts by time; entries of the same time keep the order of the file.
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
        whole[begun] = msgspec.structs.replace(begin, ph="X", dur=dur)
    for stack in open_by_thread.values():
        if stack:
            row, event = stack[-1]
            raise UserError(f"{where}, event {row:,} ({event.name})", "a B without its E")
    return [whole.get(row, event) for row, event in enumerate(events, 1) if event.ph == "X" or row in whole]


def times_ns(events: Sequence[TraceEvent], base_ns: int, where: str) -> tuple[Ints, Ints]:
    """Starts and durations. Both ends are rounded to the nearest nanosecond: what touched still touches."""
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
    # For a million times: without a line of Python in between.
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
        # Each alone before their sum: numbers of any size may have no sum.
        elif not least_us <= event.ts < most_us or event.dur >= longest_us or event.ts + event.dur >= most_us:
            why = _BEYOND
        else:
            continue
        raise UserError(f"{where}, event at ts {event.ts} ({event.name})", why)
    raise UserError(where, _BEYOND)


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
