"""Chrome traces: what they have in common, and traces of tools we know nothing else about.

Times are decimal microseconds of any length. They are read as decimals, never as floats: a float of
today's time in microseconds is right to a quarter microsecond only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal
from itertools import repeat
from typing import Any, NoReturn

import msgspec
import numpy as np
import pyarrow as pa

from smaragdine.arrays import Ints
from smaragdine.errors import UserError
from smaragdine.recording.columns import MOST_NS, encode
from smaragdine.tracing.files.phases import phases_by_name
from smaragdine.tracing.files.table import built

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


class Event(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str | None = ""
    pid: Id = None
    tid: Id = None
    ts: Decimal = _ABSENT
    dur: Decimal = _ABSENT
    args: Args | list[Any] | str | None = None


class Trace(msgspec.Struct, gc=False):
    events: list[Event] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(default=0, name="baseTimeNanoseconds")
    schema_version: Any = msgspec.field(default=None, name="schemaVersion")
    metadata: Any = None


def read(content: pa.Buffer, where: str) -> pa.Table:
    from smaragdine.tracing.files import kineto, timeline

    trace = _decode(memoryview(content), where)
    # Positions in the file are kept for messages, so nothing is left out of the list until all is checked.
    complete = _complete(trace.events, where)
    processes = _process_names(trace.events)
    if kineto.is_kineto(trace):
        table = kineto.kineto_events(complete, trace.base_ns, where)
    elif timeline.is_timeline(processes):
        table = timeline.timeline_events(complete, processes, where)
    else:
        _refuse_derived_view(trace, processes, where)
        table = _any_events(complete, processes, trace.base_ns, where)
    if not table.num_rows:
        raise UserError(
            f"{where} has no events",
            f"none of its {len(trace.events):,} entries is an operation with a duration",
        )
    return table


def _decode(data: memoryview, where: str) -> Trace:
    start = 3 if bytes(data[:3]) == b"\xef\xbb\xbf" else 0
    plain_array = bytes(data[start : start + 256]).lstrip()[:1] == b"["
    try:
        if plain_array:
            return Trace(_decode_array(data[start:]))
        return msgspec.json.decode(data[start:], type=Trace)
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


def _decode_array(data: memoryview) -> list[Event]:
    try:
        return msgspec.json.decode(data, type=list[Event])
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        if "truncated" not in str(error):
            raise
        # The format allows a missing end, so that a killed program leaves a readable trace: whole events.
        text = bytes(data).rstrip().removesuffix(b",").rstrip()
        try:
            return msgspec.json.decode(text + b"]", type=list[Event])
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
            msgspec.json.decode(event, type=Event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return f"event {row:,}: {error}"
    return message


def _complete(events: Sequence[Event], where: str) -> list[Event]:
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


def _paired(events: Sequence[Event], where: str) -> list[Event]:
    open_by_thread: dict[tuple[Id, Id], list[tuple[int, Event]]] = {}
    marks = [(row, event) for row, event in enumerate(events, 1) if event.ph in ("B", "E")]
    for row, event in marks:
        if not event.ts.is_finite():
            why = "it has no ts" if event.ts is _ABSENT else "its time is no number"
            raise UserError(f"{where}, event {row:,} ({event.name})", why)
    whole: dict[int, Event] = {}
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
        whole[begun] = Event("X", begin.name, begin.cat, begin.pid, begin.tid, begin.ts, dur, begin.args)
    for stack in open_by_thread.values():
        if stack:
            row, event = stack[-1]
            raise UserError(f"{where}, event {row:,} ({event.name})", "a B without its E")
    return [whole.get(row, event) for row, event in enumerate(events, 1) if event.ph == "X" or row in whole]


def times_ns(events: Sequence[Event], base_ns: int, where: str) -> tuple[Ints, Ints]:
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


def _refuse_times(events: Sequence[Event], base_ns: int, where: str) -> NoReturn:
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


def argument(event: Event, name: str) -> Any:
    return getattr(event.args, name, None) if isinstance(event.args, Args) else None


def is_int(value: object) -> bool:
    return type(value) is int  # true is no number here


def codes(values: Iterable[Any]) -> pa.Array:
    """A number for each distinct value, in order of appearance."""
    known: dict[Any, int] = {}
    return pa.array([known.setdefault(value, len(known)) for value in values], pa.int64())


def named(events: Sequence[Event], names: Sequence[str], where: str) -> pa.DictionaryArray:
    column = encode(names)
    if "" in column.dictionary.to_pylist():
        at = events[names.index("")].ts
        raise UserError(f"{where}, event at ts {at}", "it has no name")
    return column


def _process_names(events: Sequence[Event]) -> dict[Id, str]:
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


def _any_events(events: Sequence[Event], processes: dict[Id, str], base_ns: int, where: str) -> pa.Table:
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


def _refuse_derived_view(trace: Trace, processes: dict[Id, str], where: str) -> None:
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
