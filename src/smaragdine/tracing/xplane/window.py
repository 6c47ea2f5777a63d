"""A raw XPlane file of JAX or TensorFlow → events with qualified names."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.arrays import Ints
from smaragdine.recording.tables import encode
from smaragdine.tracing.coverage import FRAMEWORK, NO_STEP, PROGRAM, UNPLACED, Coverage, coverage_of, steps_at
from smaragdine.tracing.names import (
    LOOP,
    Name,
    framework_name,
    gradients_outside,
    input_name,
    jax_name,
    keras_scopes,
    tensorflow_name,
    unplaced_name,
    without_calls,
)
from smaragdine.tracing.table import built
from smaragdine.tracing.xplane.calls import calls_of
from smaragdine.tracing.xplane.hlo import NO_PROGRAM, Program, edges_of, programs
from smaragdine.tracing.xplane.reader import Row, Rows, line_threads, read_rows, read_space

# Which instruction a kernel of a command buffer (a CUDA graph) executes.
#
# XLA gives the buffer's name to every kernel in it. The kernel's own name is no help: one kernel serves all
# instructions that are alike, in all layers, and is called after one of them. But the nodes of a graph are
# numbered as they were made, one for each instruction, in the order of the schedule. A call of a library (a
# product) is a graph within the graph: its own number stays free, and its kernels come after all others,
# again in order.

COMMAND_BUFFER = "command_buffer"
# What a library launches besides its product: zeros first, and the sum of its pieces last.
_BEFORE = re.compile(r"Mem(?:set|cpy)", re.IGNORECASE)
_AFTER = re.compile(r"splitk\w*reduce|reduce\w*splitk", re.IGNORECASE)


def out_of_buffers(events: Rows, programs: Mapping[int, Program]) -> Rows:
    """The same events; those of command buffers get their instructions, as far as we can find them."""
    owners: dict[int, tuple[int, str]] = {}
    for row in events.rows:
        if row.graph is not None and row.program is not None and row.operation.startswith(COMMAND_BUFFER):
            owners[row.graph] = row.program, row.module
    owners = {graph: owner for graph, owner in owners.items() if owner[0] in programs}
    # We take all launches of a graph together: the first and the last may be cut.
    nodes: dict[int, dict[int, Row]] = {}
    for row in events.rows:
        if row.graph is not None and row.graph in owners and row.node is not None:
            nodes.setdefault(row.graph, {})[row.node] = row
    found = {graph: _instructions(nodes[graph], programs[owners[graph][0]]) for graph in nodes}
    rows = list(events.rows)
    for number, row in enumerate(rows):
        if row.graph is not None and row.graph in owners:
            # A kernel that was launched before the profiler ran does not say its program.
            program, module = owners[row.graph]
            operation = found.get(row.graph, {}).get(row.node or 0, COMMAND_BUFFER)
            rows[number] = replace(row, operation=operation, program=program, module=module)
    return replace(events, rows=rows)


def _instructions(nodes: Mapping[int, Row], program: Program) -> dict[int, str]:
    """Node of a graph → its instruction."""
    place = {each.name: at for at, each in enumerate(program.order)}
    own = {
        node: place[name]
        for node, row in nodes.items()
        if (name := program.kernels.get(row.text)) is not None and name in place
    }
    if not own:
        return {}
    # A kernel is called after one of the instructions that it serves.
    shift = Counter(at - node for node, at in own.items()).most_common(1)[0][0]
    last = max(own)
    found = {
        node: program.order[node + shift].name
        for node in nodes
        if node <= last and 0 <= node + shift < len(program.order)
    }
    taken = {node + shift for node in found}
    libraries = [at for at, each in enumerate(program.order) if each.is_library and at not in taken]
    inside = libraries[bisect_left(libraries, min(taken)) : bisect_left(libraries, max(taken))]
    calls = _calls([(node, nodes[node]) for node in sorted(nodes) if node > last])
    for candidates in (inside, _with_edges(inside, libraries, min(taken), max(taken))):
        if len(candidates) == len(calls):
            for call, at in zip(calls, candidates, strict=True):
                found.update(dict.fromkeys(call, program.order[at].name))
            break
    return found


def _with_edges(inside: list[int], libraries: list[int], first: int, last: int) -> list[int]:
    """Adds the library calls right before the first other instruction, and right after the last."""
    known = set(libraries)
    while first - 1 in known:
        first -= 1
        inside = [first, *inside]
    while last + 1 in known:
        last += 1
        inside = [*inside, last]
    return inside


def _calls(nodes: Sequence[tuple[int, Row]]) -> list[list[int]]:
    """Groups the nodes by library call: each has one product."""
    calls: list[list[int]] = []
    before: list[int] = []
    for node, row in nodes:
        if _BEFORE.match(row.text):
            before.append(node)
        elif calls and _AFTER.search(row.text):
            calls[-1].append(node)
        else:
            calls.append([*before, node])
            before = []
    return calls


# Which step an operation of an XLA program belongs to.

# Parts of the busy time. A program with less than the first is no step, one with less than the second no part
# of a step.
_LEAST_OF_A_STEP, _LEAST_BESIDE_IT = 0.1, 0.01


def with_runs(events: Rows, programs: Mapping[int, Program]) -> Rows:
    """The same events; those of a GPU get the number of their run. The profiler does not tell it, but a
    program runs its instructions in the order of its schedule: where that starts again, a new run begins."""
    rows = list(events.rows)
    kernels: dict[tuple[str, int], list[int]] = {}
    for number, row in enumerate(rows):
        if row.program in programs and row.run is None and row.program is not None and row.launch is not None:
            kernels.setdefault((events.devices[number], row.program), []).append(number)
    for (_, program), numbers in kernels.items():
        place = {each.name: at for at, each in enumerate(programs[program].order)}
        run, last = 1, -1
        for number in sorted(numbers, key=lambda one: events.start_ns[one]):
            at = place.get(rows[number].operation, last)
            if at < last and 2 * (last - at) >= len(place) - 1:
                run += 1
            last = at
            rows[number] = replace(rows[number], run=run)
    return replace(events, rows=rows) if kernels else events


@dataclass(frozen=True)
class FoundSteps:
    found: Ints  # per event; NO_STEP: of none
    count: int
    spans: tuple[tuple[int, int, int], ...] = ()  # of those that nobody announced: index, begin_ns, end_ns
    remarks: tuple[str, ...] = ()


def marked_steps(events: Rows, names: list[Name], meta: dict[str, Any]) -> FoundSteps:
    """By time, if the program waits for its work. XLA's work runs behind the program: what counts is when the
    program handed it over. Input is made ahead and belongs to no step."""
    found = steps_at(np.array(events.start_ns, dtype=np.int64), meta)
    indices: list[int] = [step[0] for step in meta["steps"]]
    for module, executions in _asynchronous(events, names):
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
    found[np.array([row.is_input for row in events.rows], dtype=np.bool_)] = NO_STEP
    return FoundSteps(found, len(indices))


def _asynchronous(events: Rows, names: list[Name]) -> Iterator[tuple[str, list[list[int]]]]:
    """Module → its executions on a device by time, each as the numbers of its events. Where the profiler does
    not tell one run from another, each kernel is an execution by itself."""
    runs: dict[tuple[str, str], dict[Any, list[int]]] = {}
    for number, (row, device) in enumerate(zip(events.rows, events.devices, strict=True)):
        if row.program is not None and row.run is not None:
            runs.setdefault((device, row.module), {}).setdefault((row.program, row.run), []).append(number)
        elif row.program is not None and device != "cpu:0":
            key = f"{device} {row.program} {row.text} {names[number]}"
            runs.setdefault((key, row.module), {})[number] = [number]
    for (_, module), by_run in runs.items():
        executions = list(by_run.values())
        yield module, sorted(executions, key=lambda each: min(events.start_ns[number] for number in each))


@dataclass(frozen=True)
class _Execution:
    start_ns: int
    end_ns: int
    numbers: list[int]


def sliced_steps(events: Rows) -> FoundSteps:
    """Steps of a slice where nobody announced any. If one compiled program runs again and again, its
    executions are the steps: each lasts until the next begins. We drop those that the edges of the slice cut.

    Of several programs that take turns (gradients, gradients, update) the rarest counts.
    """
    found = np.full(len(events.rows), NO_STEP, dtype=np.int64)
    start_ns = np.array(events.start_ns, dtype=np.int64)
    end_ns = np.array(events.end_ns, dtype=np.int64)
    programs = _executions(events, start_ns, end_ns)
    busy_ns = {key: int((end_ns - start_ns)[_all(runs)].sum()) for key, runs in programs.items()}
    total_ns = sum(busy_ns.values())
    main = [
        key for key, runs in programs.items() if len(runs) > 1 and busy_ns[key] >= _LEAST_OF_A_STEP * total_ns
    ]
    if not main:
        return FoundSteps(found, 0)
    chosen = min(main, key=lambda key: (len(programs[key]), -busy_ns[key]))
    runs = programs[chosen]
    alone = total_ns - busy_ns[chosen] < _LEAST_BESIDE_IT * total_ns
    ends_ns = [run.start_ns for run in runs[1:]] + ([runs[-1].end_ns] if alone else [])
    steps = tuple((i, runs[i].start_ns, end) for i, end in enumerate(ends_ns))
    found[:] = steps_at(start_ns, {"steps": steps})
    for i in range(len(steps)):
        found[runs[i].numbers] = i
    if not alone:
        found[runs[-1].numbers] = NO_STEP
    said = f"no steps were announced: those are the executions of {chosen[1]} that lay whole in the window"
    return FoundSteps(found, len(steps), steps, (said,))


def _executions(events: Rows, start_ns: Ints, end_ns: Ints) -> dict[tuple[int, str], list[_Execution]]:
    """(program, module) → its whole executions on all devices, in order of time."""
    runs: dict[tuple[int, str], dict[int, list[int]]] = {}
    for number, row in enumerate(events.rows):
        if row.program is not None and row.run is not None:
            runs.setdefault((row.program, row.module), {}).setdefault(row.run, []).append(number)
    return {
        key: sorted(
            (
                _Execution(int(start_ns[numbers].min()), int(end_ns[numbers].max()), numbers)
                for numbers in _whole(list(by_run.values()), start_ns)
            ),
            key=lambda run: run.start_ns,
        )
        for key, by_run in runs.items()
    }


def _whole(runs: list[list[int]], start_ns: Ints) -> list[list[int]]:
    """Drops the first and the last if the profiler did not see all of them."""
    runs = sorted(runs, key=lambda numbers: int(start_ns[numbers].min()))
    usual = Counter(len(numbers) for numbers in runs).most_common(1)[0][0] if len(runs) > 2 else 0
    begin = 1 if runs and len(runs[0]) < usual else 0
    end = len(runs) - 1 if len(runs) > 1 and len(runs[-1]) < usual else len(runs)
    return runs[begin:end]


def _all(runs: list[_Execution]) -> list[int]:
    return [number for run in runs for number in run.numbers]


_LAYERS_IN_LOOP = re.compile(rf"(.*?)/{LOOP}/.+/")
_AUTOTUNER = re.compile(r"\bstream_executor::")
_TRANSFER = re.compile(r"Mem(?:cpy|set)", re.IGNORECASE)


def events_of(raw: Path, meta: dict[str, Any]) -> tuple[pa.Table, Coverage]:
    """Events of schema EVENTS, by time. `meta["steps"]`: [index, begin_ns, end_ns], in order; a slice of time
    has none."""
    space = read_space(raw, raw.name)
    known = programs(space)
    events = with_runs(out_of_buffers(read_rows(space, raw.name, known, line_threads(meta)), known), known)
    if not meta["steps"]:
        events = _within(events, meta)
    names = _names(events, known, _products(events, meta), _outside(meta))
    remarks = [f"the profiler said: {error}" for error in space.errors] + _losses(events, names)
    names, said = _cleaned(names, meta)
    steps = marked_steps(events, names, meta) if meta["steps"] else sliced_steps(events)
    calls = calls_of(events, known) if meta["framework"] == "jax" else None
    table = built(
        encode([name.path for name in names]),
        encode(events.devices),
        np.array(events.start_ns, dtype=np.int64),
        np.array(events.end_ns, dtype=np.int64) - np.array(events.start_ns, dtype=np.int64),
        encode([name.phase for name in names]),
        pa.array(events.lanes, pa.int64()),
        pa.array(steps.found, mask=steps.found == NO_STEP),
        calls and pa.array(calls.of_event, pa.int64()),
    ).sort_by("start_ns")
    inside = table.filter(table["step"].is_valid()) if steps.count else table
    coverage = coverage_of(inside, steps.count, [*remarks, *said, *steps.remarks])
    ran = {row.program for row in events.rows if row.program in known}
    edges = edges_of(known[number] for number in known if number in ran)
    return table, replace(coverage, edges=edges, found_steps=steps.spans, calls=calls and calls.table)


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
    """Operation → the product that TensorFlow fused with it: the one, of those that lead there, that did not
    run by itself."""
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
    """The class of code in no scope: Keras' own if Keras trains, else the program's."""
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
    """What we know that this profiler leaves out, if the trace shows that it did."""
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
    # Every step reads its weights, and no operation is cheaper than that.
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
