"""The statistics that a TensorFlow 1 session keeps of its steps → events with qualified names.

A raw file holds one StepStats (tensorflow/core/framework/step_stats.proto) for each run of a session. We
build the descriptors of the fields that we read at run time, as `protobuf` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.errors import UserError
from smaragdine.protobuf import Fields, build_class
from smaragdine.recording.tables import encode
from smaragdine.tracing.coverage import NO_STEP, PROGRAM, Coverage, coverage_of, steps_at
from smaragdine.tracing.coverage import OPTIMIZER as OPTIMIZER_CLASS
from smaragdine.tracing.names import (
    Name,
    contains_others,
    framework_name,
    gradients_outside,
    tensorflow_name,
    unplaced_name,
)
from smaragdine.tracing.table import built
from smaragdine.tracing.xplane.reader import TF_OPERATION

FIELDS: Fields = {
    "Runs": "repeated StepStats runs = 1",
    "StepStats": "repeated DeviceStepStats dev_stats = 1",
    "DeviceStepStats": "string device = 1; repeated NodeExecStats node_stats = 2",
    "NodeExecStats": """
        string node_name = 1; int64 all_start_micros = 2; int64 op_start_rel_micros = 3;
        int64 op_end_rel_micros = 4; string timeline_label = 8; int64 all_start_nanos = 13;
        int64 op_start_rel_nanos = 14; int64 op_end_rel_nanos = 15""",
}

# `name = Op(input, …)`; before it stands the memory it took, if that is much.
_LABEL = re.compile(r"(?:\[.*?\] ?)?.+? = (?P<kind>\w+)\((?P<inputs>.*)\)", re.DOTALL)
# The row of one stream; rows named `all`, `memcpy` and `sync` show the same kernels again, or none.
_STREAM = re.compile(r"/device:GPU:(?P<gpu>\d+)/stream:(?P<stream>\d*)(?:<.*>)?")
_EXECUTOR = re.compile(r".*/device:(?:CPU|GPU|XLA_CPU|XLA_GPU):\d+")
_WAITS = frozenset({"_Recv", "_HostRecv", "Recv", "HostRecv"})
_NO_FLOW = frozenset({"Const", "VarHandleOp", "VariableV2", "ReadVariableOp", "NoOp", "Shape", "Size"})
_WEIGHTS = re.compile(
    r"(?P<product>(?:.+/)?(?:MatMul|BatchMatMul|Conv2D|Conv3D|depthwise)\w*)/ReadVariableOp"
)
_WRITES = re.compile(r"(?:Resource)?(?:Sparse)?Apply\w+|Assign\w*|(?:Resource)?Scatter\w+")


@dataclass(frozen=True)
class _Node:
    """An operation as the executed graph has it."""

    kind: str
    inputs: tuple[str, ...]  # names, without those that only have to run first


@dataclass(frozen=True)
class _Graph:
    nodes: Mapping[str, _Node]
    names: Mapping[str, Name]


@cache
def message_class() -> Any:
    return build_class("step_stats", FIELDS, "Runs")


def events_of(raw: Path, meta: dict[str, Any]) -> tuple[pa.Table, Coverage]:
    """Events of schema EVENTS, in order of time."""
    names: list[Name] = []
    devices: list[str] = []
    lanes: list[int | None] = []
    times_ns: list[tuple[int, int]] = []
    edges: set[tuple[str, str]] = set()
    for run in _read(raw).runs:
        graph = _graph(run)
        edges |= _edges(graph)
        for device, lane, node in _executed(run):
            kind = graph.nodes[node.node_name].kind if node.node_name in graph.nodes else ""
            if kind in _WAITS or contains_others(kind):
                continue
            names.append(_name(node, device, graph))
            devices.append(device)
            lanes.append(lane)
            times_ns.append(_times_ns(node))
    start_ns, end_ns = np.array(times_ns, dtype=np.int64).reshape(-1, 2).T
    step = steps_at(start_ns, meta)
    table = built(
        encode([name.path for name in names]),
        encode(devices),
        start_ns,
        end_ns - start_ns,
        encode([name.phase for name in names]),
        pa.array(lanes, pa.int64()),
        pa.array(step, mask=step == NO_STEP),
    ).sort_by("start_ns")
    remarks = (
        [f"{meta['refused_runs']} runs had a trace of the program's own"] if meta.get("refused_runs") else []
    )
    coverage = coverage_of(table, len(meta["steps"]), remarks)
    return table, replace(coverage, edges=tuple(sorted(edges)))


def _edges(graph: _Graph) -> set[tuple[str, str]]:
    """The forward dataflow: each edge goes between the siblings in which its ends lie."""
    forward = {
        name
        for name, node in graph.nodes.items()
        if graph.names[name].phase == "forward" and node.kind not in _NO_FLOW
    }
    return {
        edge
        for name in forward
        for source in graph.nodes[name].inputs
        if source in forward
        for edge in _siblings(graph.names[source].path, graph.names[name].path)
    }


def _siblings(source: str, target: str) -> Iterator[tuple[str, str]]:
    above, below = source.split("/"), target.split("/")
    for i, (one, other) in enumerate(zip(above, below, strict=False), start=1):
        if one != other:
            yield "/".join(above[:i]), "/".join(below[:i])
            return


def _read(raw: Path) -> Any:
    from google.protobuf.message import DecodeError

    message = message_class()()
    try:
        message.ParseFromString(raw.read_bytes())
    except (DecodeError, OSError) as error:
        raise UserError(f"{raw.name} holds no step statistics", str(error)) from None
    return message


def _executed(run: Any) -> Iterator[tuple[str, int | None, Any]]:
    """Device, lane and record of what ran. Threads are not told: operations on the CPU have no lane."""
    for stats in run.dev_stats:
        stream = _STREAM.fullmatch(stats.device)
        if stream:
            device, lane = f"gpu:{stream['gpu']}", int(stream["stream"]) if stream["stream"] else None
        elif _EXECUTOR.fullmatch(stats.device):
            device, lane = "cpu:0", None  # of a GPU: the time it took to launch the kernels
        else:
            continue
        for node in stats.node_stats:
            yield device, lane, node


def _times_ns(node: Any) -> tuple[int, int]:
    if node.all_start_nanos:
        return node.all_start_nanos + node.op_start_rel_nanos, node.all_start_nanos + node.op_end_rel_nanos
    begin_us = node.all_start_micros
    return (begin_us + node.op_start_rel_micros) * 1000, (begin_us + node.op_end_rel_micros) * 1000


def _name(node: Any, device: str, graph: _Graph) -> Name:
    known = graph.names.get(node.node_name)
    if known is not None:
        return known
    # A kernel says whose it is: `path:Op`.
    operation = TF_OPERATION.fullmatch(node.node_name)
    if operation:
        return graph.names.get(operation[1]) or tensorflow_name(operation[1], operation[2], outside=PROGRAM)
    is_move = node.timeline_label.startswith(("Memcpy", "Memset"))
    return framework_name(node.node_name) if is_move else unplaced_name(node.node_name)


@cache
def _parsed(label: str) -> _Node:
    match = _LABEL.fullmatch(label)
    if match is None:
        return _Node("", ())
    inputs = [each.partition(":")[0] for each in match["inputs"].split(", ") if each and each[0] != "^"]
    return _Node(match["kind"], tuple(inputs))


def _graph(run: Any) -> _Graph:
    nodes = {
        node.node_name: _parsed(node.timeline_label)
        for stats in run.dev_stats
        if _EXECUTOR.fullmatch(stats.device)
        for node in stats.node_stats
    }
    names = {name: tensorflow_name(name, node.kind, _product(node), PROGRAM) for name, node in nodes.items()}
    outside = gradients_outside(names.values(), PROGRAM)
    names = {name: outside.get(found, found) for name, found in names.items()}
    for name in _updates(nodes, names):
        path = names[name].path
        if path.split("/")[0] == PROGRAM:
            path = f"{OPTIMIZER_CLASS}/{path.split('/', 1)[1]}"
        names[name] = Name(path, "optimizer")
    return _Graph(nodes, names)


def _product(node: _Node) -> str:
    """The product in a fused operation: it still reads its weights where it was written."""
    reads = (_WEIGHTS.fullmatch(each) for each in node.inputs)
    return next((read["product"] for read in reads if read), "")


def _updates(nodes: Mapping[str, _Node], names: Mapping[str, Name]) -> set[str]:
    """What is made of gradients and goes into weights, whatever the program calls it. Not what goes into
    other gradients, as a loss does that contains gradients."""
    backward = {name for name, found in names.items() if found.phase == "backward"}
    # The rewriter shares constants: that of a gradient may be a forward operation's too.
    flowing = {name for name in backward if nodes[name].kind not in _NO_FLOW}
    writing = {name for name, node in nodes.items() if _WRITES.fullmatch(node.kind)}
    sources = {name: node.inputs for name, node in nodes.items()}
    consumers: dict[str, list[str]] = {}
    for name, inputs in sources.items():
        for source in inputs:
            consumers.setdefault(source, []).append(name)
    into_weights = writing | _reached(writing, sources)
    return (_reached(flowing, consumers) & into_weights) - _reached(backward, sources) - backward


def _reached(origin: Iterable[str], following: Mapping[str, Iterable[str]]) -> set[str]:
    reached, waiting = set[str](), list(origin)
    while waiting:
        for name in following.get(waiting.pop(), ()):
            if name not in reached:
                reached.add(name)
                waiting.append(name)
    return reached
