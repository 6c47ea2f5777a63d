"""A raw XPlane file of JAX or TensorFlow → events with qualified names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.errors import UserError
from smaragdine.recording.columns import encode
from smaragdine.tracing.assemble.command_buffers import COMMAND_BUFFER, out_of_buffers
from smaragdine.tracing.assemble.coverage import (
    FRAMEWORK,
    NO_STEP,
    PROGRAM,
    UNPLACED,
    Coverage,
    coverage_of,
)
from smaragdine.tracing.assemble.executions import marked_steps, sliced_steps, with_runs
from smaragdine.tracing.assemble.hlo import NO_PROGRAM, Program, programs
from smaragdine.tracing.assemble.hlo_edges import edges_of
from smaragdine.tracing.assemble.jax_names import LOOP, jax_name
from smaragdine.tracing.assemble.line_threads import line_threads
from smaragdine.tracing.assemble.names import Name, framework_name, unplaced_name
from smaragdine.tracing.assemble.tensorflow_names import (
    gradients_outside,
    input_name,
    keras_scopes,
    tensorflow_name,
    without_calls,
)
from smaragdine.tracing.assemble.xplane_rows import Row, Rows, read_rows
from smaragdine.tracing.files.table import built
from smaragdine.tracing.files.xplane_message import message_class

_LAYERS_IN_LOOP = re.compile(rf"(.*?)/{LOOP}/.+/")
_AUTOTUNER = re.compile(r"\bstream_executor::")
_TRANSFER = re.compile(r"Mem(?:cpy|set)", re.IGNORECASE)


def events_of(raw: Path, meta: dict[str, Any]) -> tuple[pa.Table, Coverage]:
    """Events of schema EVENTS, in order of time. `meta["steps"]`: [index, begin_ns, end_ns], in order; none
    in a slice of time."""
    from google.protobuf.message import DecodeError

    space = message_class()()
    try:
        space.ParseFromString(raw.read_bytes())
    except (DecodeError, OSError) as error:
        raise UserError(f"{raw.name} is no XPlane file", str(error)) from None
    known = programs(space)
    events = with_runs(out_of_buffers(read_rows(space, raw.name, known, line_threads(meta)), known), known)
    if not meta["steps"]:
        events = _within(events, meta)
    names = _names(events, known, _products(events, meta), _outside(meta))
    remarks = [f"the profiler said: {error}" for error in space.errors] + _losses(events, names)
    names, said = _cleaned(names, meta)
    steps = marked_steps(events, names, meta) if meta["steps"] else sliced_steps(events)
    table = built(
        encode([name.path for name in names]),
        encode(events.devices),
        np.array(events.start_ns, dtype=np.int64),
        np.array(events.end_ns, dtype=np.int64) - np.array(events.start_ns, dtype=np.int64),
        encode([name.phase for name in names]),
        pa.array(events.lanes, pa.int64()),
        pa.array(steps.found, mask=steps.found == NO_STEP),
    ).sort_by("start_ns")
    inside = table.filter(table["step"].is_valid()) if steps.count else table
    coverage = coverage_of(inside, steps.count, [*remarks, *said, *steps.remarks])
    ran = {row.program for row in events.rows if row.program in known}
    edges = edges_of(known[number] for number in known if number in ran)
    return table, replace(coverage, edges=edges, found_steps=steps.spans)


def _within(events: Rows, meta: dict[str, Any]) -> Rows:
    begin_ns, end_ns = int(meta.get("begin_ns") or 0), int(meta.get("end_ns") or 2**63 - 1)
    kept = [
        i
        for i, (start, end) in enumerate(zip(events.start_ns, events.end_ns, strict=True))
        if begin_ns <= start and end <= end_ns
    ]
    return Rows(
        [events.rows[i] for i in kept],
        [events.devices[i] for i in kept],
        [events.lanes[i] for i in kept],
        [events.start_ns[i] for i in kept],
        [events.end_ns[i] for i in kept],
        events.dispatched_ns,
    )


def _names(
    events: Rows, known: Mapping[int, Program], products: Mapping[str, str], outside: str
) -> list[Name]:
    found: dict[tuple[str, int | None, str, str, bool], Name] = {}
    names: list[Name] = []
    for row in events.rows:
        key = (row.text, row.program, row.operation, row.path, row.is_input)
        if key not in found:
            found[key] = _name(row, known, products, outside)
        names.append(found[key])
    return names


def _name(row: Row, known: Mapping[int, Program], products: Mapping[str, str], outside: str) -> Name:
    if row.program is None:
        path, kind = row.text.rsplit(":", 1)
        if row.is_input:
            return input_name(path)
        return tensorflow_name(path, kind, products.get(without_calls(path), ""), outside)
    program = known.get(row.program, NO_PROGRAM)
    in_buffer = row.operation.startswith(COMMAND_BUFFER)
    operation = row.text if in_buffer or not row.operation else row.operation
    origin = None if in_buffer else program.origins.get(operation)
    path = row.path.removesuffix(":") if origin is None else origin.op_name
    if origin is not None and origin.is_tensorflow and path:
        return tensorflow_name(path, outside=outside)
    if "/" in path:
        if _TRANSFER.match(row.text):  # a library makes zeros for its product
            path = f"{path.rpartition('/')[0]}/{row.text.split()[0]}"
        return jax_name(path, *((origin.in_update, origin.in_training) if origin else ()))
    if origin is not None and origin.is_move:
        return framework_name(origin.opcode)
    if _TRANSFER.match(row.text):
        return framework_name(row.text.split()[0])
    if _AUTOTUNER.search(row.text):
        return framework_name("autotuning")
    return unplaced_name(operation)


def _products(events: Rows, meta: dict[str, Any]) -> dict[str, str]:
    """Operation → the product that TensorFlow fused to it: of those that lead there, one that did not run by
    itself."""
    fusions: dict[str, list[list[str]]] = meta.get("fusions") or {}
    ran = {
        without_calls(row.text.rsplit(":", 1)[0]) for row in events.rows if row.program is None and fusions
    }
    return {
        operation: chain[0]
        for operation, chains in fusions.items()
        for chain in reversed(chains)
        if ran.isdisjoint(chain)
    }


def _outside(meta: dict[str, Any]) -> str:
    """Whose code stands in no scope: that of Keras where it trains, else the program's."""
    return FRAMEWORK if meta.get("keras", True) else PROGRAM


def _cleaned(names: list[Name], meta: dict[str, Any]) -> tuple[list[Name], list[str]]:
    if meta["framework"] == "jax":
        loops = sorted({loop[1] for name in set(names) if (loop := _LAYERS_IN_LOOP.match(name.path))})
        return names, [f"{loop} is a loop: its layers have one name for all its turns" for loop in loops]
    outside = gradients_outside(names, _outside(meta))
    names = [outside.get(name, name) for name in names]
    if meta.get("exact_scopes"):
        return names, []
    scopes = keras_scopes({name.path for name in names if name.phase == "forward"})
    remarks = [f"Keras' scopes were numbered ({root}): the number was taken off" for root in scopes.stripped]
    remarks += [
        f"paths under {root} have TensorFlow's numbers: they may name no layer" for root in scopes.kept
    ]
    cleaned = {name: replace(name, path=scopes.clean(name.path)) for name in set(names)}
    return [cleaned[name] for name in names], remarks


def _losses(events: Rows, names: list[Name]) -> list[str]:
    """What this profiler is known to leave out, where the trace shows that it did."""
    remarks: list[str] = []
    host: Sequence[tuple[str, str]] = [
        (row.text, name.phase)
        for row, name in zip(events.rows, names, strict=True)
        if row.program is None and not row.is_input
    ]
    trains = any(phase in ("backward", "optimizer") for _, phase in host)
    if any(row.is_eager and name.phase == "backward" for row, name in zip(events.rows, names, strict=True)):
        remarks.append(
            "run eagerly, TensorFlow does not tell whose gradients it computes: they have no layer"
        )
    # A step reads its weights, and nothing is cheaper than that.
    if trains and not any(text.endswith(":ReadVariableOp") for text, _ in host):
        remarks.append(
            "TensorFlow left cheap operations out, as it does after 50 to 100 untraced steps: "
            "trace earlier (--trace-skip 10)"
        )
    if any(
        row.operation.startswith(COMMAND_BUFFER) and name.path.startswith(f"{UNPLACED}/")
        for row, name in zip(events.rows, names, strict=True)
    ):
        remarks.append(
            "kernels in CUDA graphs have no path; XLA_FLAGS=--xla_gpu_enable_command_buffer= gives them one"
        )
    return remarks
