"""A raw XPlane file of JAX or TensorFlow → events with qualified names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.errors import UserError
from smaragdine.recording.columns import encode
from smaragdine.tracing.assemble.coverage import NO_STEP, UNPLACED, Coverage, coverage_of, steps_at
from smaragdine.tracing.assemble.hlo import Origin, programs
from smaragdine.tracing.assemble.xplane_names import (
    Name,
    framework_name,
    input_name,
    jax_name,
    keras_scopes,
    tensorflow_name,
    unplaced_name,
)
from smaragdine.tracing.files.table import built
from smaragdine.tracing.files.xplane import (
    DERIVED_LINES,
    GPU_PLANE,
    HOST_PLANE,
    TF_OPERATION,
    event_times,
    profile_start_ns,
)
from smaragdine.tracing.files.xplane_message import message_class

_STATS = frozenset({"hlo_op", "hlo_module", "program_id", "run_id", "name", "tf_op", "_p", "_c"})
_DISPATCH = re.compile(r"PjitFunction\((.*)\)", re.DOTALL)  # on the program's own thread
_COMMAND_BUFFER = "command_buffer"
_NO_PROGRAM = -1


@dataclass(frozen=True)
class _Row:
    """One event of a line, as it is written."""

    text: str
    offset_ps: int
    duration_ps: int
    is_input: bool = False
    operation: str = ""  # of HLO
    module: str = ""  # XLA's name of the program: jit_step
    program: int | None = None  # of XLA's; None: an operation of TensorFlow's executor
    run: int | None = None  # which execution of the program, where the profiler says
    path: str = ""  # that a GPU's kernel carries
    producer: int | None = None  # XLA's own number of this execution of this operation
    consumer: int | None = None  # the number of the execution that ends here
    dispatches: bool = False  # no work: `module` is handed to the device


@dataclass(frozen=True)
class _Events:
    """Columns of the same length, and when which module was handed to the device."""

    rows: list[_Row] = field(default_factory=list[_Row])
    names: list[Name] = field(default_factory=list[Name])
    devices: list[str] = field(default_factory=list[str])
    lanes: list[int | None] = field(default_factory=list[int | None])
    start_ns: list[int] = field(default_factory=list[int])
    end_ns: list[int] = field(default_factory=list[int])
    dispatched_ns: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


def events_of(raw: Path, meta: dict[str, Any]) -> tuple[pa.Table, Coverage]:
    """Events of schema EVENTS, in order of time. `meta["steps"]`: [index, begin_ns, end_ns], in order."""
    from google.protobuf.message import DecodeError

    space = message_class()()
    try:
        space.ParseFromString(raw.read_bytes())
    except (DecodeError, OSError) as error:
        raise UserError(f"{raw.name} is no XPlane file", str(error)) from None
    events = _read(space, raw.name)
    remarks = [f"the profiler said: {error}" for error in space.errors] + _losses(events)
    names, said = _cleaned(events, meta)
    table = built(
        encode([name.path for name in names]),
        encode(events.devices),
        np.array(events.start_ns, dtype=np.int64),
        np.array(events.end_ns, dtype=np.int64) - np.array(events.start_ns, dtype=np.int64),
        encode([name.phase for name in names]),
        pa.array(events.lanes, pa.int64()),
        _steps(events, meta),
    ).sort_by("start_ns")
    inside = table.filter(table["step"].is_valid())
    return table, coverage_of(inside, len(meta["steps"]), remarks + said)


def _read(space: Any, where: str) -> _Events:
    begin_ns = profile_start_ns(space)
    origins = programs(space)
    named: dict[tuple[str, int | None, str, str, bool], Name] = {}
    events, ends = _Events(), dict[int, int]()
    for plane in space.planes:
        gpu = GPU_PLANE.fullmatch(plane.name)
        if gpu is None and plane.name != HOST_PLANE:
            continue
        for position, line in enumerate(plane.lines):
            rows = [] if gpu and DERIVED_LINES.match(line.name) else list(_rows(plane, line, gpu is not None))
            if not rows:
                continue
            device, lane = (f"gpu:{int(gpu[1])}", int(line.id)) if gpu else ("cpu:0", position)
            offsets_ps, durations_ps = [row.offset_ps for row in rows], [row.duration_ps for row in rows]
            start_ns, duration_ns = event_times(line, offsets_ps, durations_ps, begin_ns, where)
            end_ns = (start_ns + duration_ns).tolist()
            dispatched_until_ns = 0
            for row, start, end in zip(rows, start_ns.tolist(), end_ns, strict=True):
                if row.dispatches:
                    # JAX records a call and, within it, the same call: one of them counts.
                    if start >= dispatched_until_ns:
                        events.dispatched_ns.setdefault(row.module, []).append(start)
                        dispatched_until_ns = end
                    continue
                if row.consumer is not None:
                    ends[row.consumer] = end
                    continue
                key = (row.text, row.program, row.operation, row.path, row.is_input)
                if key not in named:
                    named[key] = _name(row, origins)
                events.rows.append(row)
                events.names.append(named[key])
                events.devices.append(device)
                events.lanes.append(lane)
                events.start_ns.append(start)
                events.end_ns.append(end)
    _last_until_done(events, ends)
    return events


def _rows(plane: Any, line: Any, is_gpu: bool) -> Iterator[_Row]:
    texts: dict[int, str] = {key: value.name for key, value in plane.event_metadata.items()}
    stat_names: dict[int, str] = {key: value.name for key, value in plane.stat_metadata.items()}
    wanted = {key: name for key, name in stat_names.items() if name in _STATS}
    is_input = line.name.startswith("tf_data_")
    has_operations = not is_gpu and (is_input or line.name.startswith("tf_Compute/"))
    for event in line.events:
        text = texts.get(event.metadata_id, "")
        # Python frames, and what the runtime says of itself.
        if event.num_occurrences or text.startswith("$") or (not is_gpu and "::" in text):
            continue
        if has_operations and TF_OPERATION.fullmatch(text):
            yield _Row(text, event.offset_ps, event.duration_ps, is_input)
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
            yield _Row(text, event.offset_ps, event.duration_ps, module=module, dispatches=True)
        elif text.startswith("end: "):
            if stats.get("_c"):
                yield _Row(text, event.offset_ps, event.duration_ps, consumer=stats["_c"])
        elif is_gpu or stats.get("hlo_op"):
            run = stats.get("run_id")
            yield _Row(
                text,
                event.offset_ps,
                event.duration_ps,
                operation=str(stats.get("hlo_op") or ""),
                module=str(stats.get("hlo_module") or ""),
                program=int(stats.get("program_id", _NO_PROGRAM)),
                run=None if run in (None, 0, -1) else int(run),  # -1: TensorFlow does not count them
                path=str(stats.get("name") or stats.get("tf_op") or ""),
                producer=stats.get("_p"),
            )


def _name(row: _Row, origins: dict[int, dict[str, Origin]]) -> Name:
    if row.program is None:
        path, kind = row.text.rsplit(":", 1)
        return input_name(path) if row.is_input else tensorflow_name(path, kind)
    known = origins.get(row.program, {})
    # All kernels of a command buffer (a CUDA graph) give its name for theirs, but theirs is often the
    # instruction's.
    in_buffer = row.operation.startswith(_COMMAND_BUFFER)
    operation = row.text if in_buffer or not row.operation else row.operation
    origin = known.get(operation)
    path = row.path.removesuffix(":") or (origin.op_name if origin else "")
    if origin is not None and origin.is_tensorflow and path:
        return tensorflow_name(path)
    name = jax_name(path) if "/" in path else None
    if name is not None:
        return name
    return framework_name(operation) if origin is not None and origin.is_move else unplaced_name(operation)


def _last_until_done(events: _Events, ends: dict[int, int]) -> None:
    """A product may go on in a pool of threads after the thread that began it took up the next operation: it
    lasts until it is done, and nests in no lane."""
    for i, row in enumerate(events.rows):
        done_ns = ends.get(row.producer) if row.producer is not None else None
        if done_ns is not None and done_ns > events.end_ns[i]:
            events.end_ns[i] = done_ns
            events.lanes[i] = None


def _cleaned(events: _Events, meta: dict[str, Any]) -> tuple[list[Name], list[str]]:
    if meta["framework"] == "jax":
        return events.names, []
    scopes = keras_scopes({name.path for name in events.names if name.phase == "forward"})
    remarks = [f"Keras' scopes were numbered ({root}): the number was taken off" for root in scopes.stripped]
    remarks += [
        f"paths under {root} have TensorFlow's numbers: they may name no layer" for root in scopes.kept
    ]
    cleaned = {name: replace(name, path=scopes.clean(name.path)) for name in set(events.names)}
    return [cleaned[name] for name in events.names], remarks


def _steps(events: _Events, meta: dict[str, Any]) -> pa.Array:
    """By time where the program waits for its work. XLA's runs behind it: what counts is when it was handed
    over. The input is made ahead: of no step."""
    found = steps_at(np.array(events.start_ns, dtype=np.int64), meta)
    indices: list[int] = [step[0] for step in meta["steps"]]
    for module, executions in _asynchronous(events):
        dispatched_ns = events.dispatched_ns.get(module, [])
        if dispatched_ns and len(executions) % len(dispatched_ns) == 0:
            steps: list[int] = steps_at(np.array(dispatched_ns, dtype=np.int64), meta).tolist()
        else:
            # The profiler may have run for one step more than was asked for.
            steps = [*indices, NO_STEP] if len(executions) % (len(indices) + 1) == 0 else indices
            if not steps or len(executions) % len(steps):
                continue
        for i, numbers in enumerate(executions):
            found[numbers] = steps[i * len(steps) // len(executions)]
    ahead = np.array([row.is_input for row in events.rows], dtype=np.bool_)
    return pa.array(found, mask=(found == NO_STEP) | ahead)


def _asynchronous(events: _Events) -> Iterator[tuple[str, list[list[int]]]]:
    """Module → its executions on a device in order of time, each the numbers of its events; where the
    profiler does not tell one run from another, each kernel of it by itself."""
    runs: dict[tuple[str, str], dict[Any, list[int]]] = {}
    for number, (row, device) in enumerate(zip(events.rows, events.devices, strict=True)):
        if row.program is not None and row.run is not None:
            runs.setdefault((device, row.module), {}).setdefault((row.program, row.run), []).append(number)
        elif row.program is not None and device != "cpu:0":
            key = f"{device} {row.program} {row.text} {events.names[number]}"
            runs.setdefault((key, row.module), {})[number] = [number]
    for (_, module), by_run in runs.items():
        executions = list(by_run.values())
        yield module, sorted(executions, key=lambda each: min(events.start_ns[number] for number in each))


def _losses(events: _Events) -> list[str]:
    """What this profiler is known to leave out, where the trace shows that it did."""
    remarks: list[str] = []
    host: Sequence[tuple[str, str]] = [
        (row.text, name.phase)
        for row, name in zip(events.rows, events.names, strict=True)
        if row.program is None and not row.is_input
    ]
    trains = any(phase in ("backward", "optimizer") for _, phase in host)
    # A step reads its weights, and nothing is cheaper than that.
    if trains and not any(text.endswith(":ReadVariableOp") for text, _ in host):
        remarks.append(
            "TensorFlow left cheap operations out, as it does after 50 to 100 untraced steps: "
            "trace earlier (--trace-skip 10)"
        )
    if any(
        row.operation.startswith(_COMMAND_BUFFER) and name.path.startswith(f"{UNPLACED}/")
        for row, name in zip(events.rows, events.names, strict=True)
    ):
        remarks.append(
            "kernels in CUDA graphs have no path; XLA_FLAGS=--xla_gpu_enable_command_buffer= gives them one"
        )
    return remarks
