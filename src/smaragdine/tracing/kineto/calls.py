"""The calls that launched a GPU's kernels, each once: what it takes to make such a call again.

A kernel belongs to the innermost operator that launched it. Where an operator launches kernels of its own and
calls others that do, too, it is one call with all of theirs: made again, it launches them all. A kernel that
inductor generated is a call of its own, with the source that the hook found.

Kernels that nobody can launch again are in the table too, each with the reason: what they draw may be guessed
from others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa

from smaragdine.arrays import Ints
from smaragdine.recording.format import CALLS
from smaragdine.tracing.kineto.reader import Args, TraceEvent, args_of

_LAUNCH = " smaragdine-launch:"  # in a name: the number of what our hook knows of it
_NO_OPERATOR = ("autograd::", "torch::autograd::", "smaragdine:")


@dataclass
class _Call:
    op: str
    inputs: str
    device: str
    kernels: str
    lists: bool  # it took a list of tensors of which Kineto kept nothing
    count: int = 0
    busy_ns: int = 0


@dataclass
class Replayable:
    """What rebuilds the calls of a window, and which of them each kernel belongs to."""

    of_kernel: list[int | None]
    table: pa.Table = field(default_factory=CALLS.empty_table)


def calls_of(
    calls: Sequence[TraceEvent],
    parents: Sequence[int | None],
    kernels: Sequence[TraceEvent],
    launched_by: Sequence[int | None],
    start_ns: Ints,
    duration_ns: Ints,
    settings: Mapping[str, Any] | None,
    sources: Mapping[str, str],
    in_graph: Sequence[bool],
) -> Replayable:
    """`launched_by` says which call launched each kernel, and `in_graph` whether a CUDA graph did; times are
    the kernels'. `sources` are those of generated kernels, by inductor's hash."""
    found: Replayable = Replayable([None] * len(kernels))
    launched_by = [None if graph else at for at, graph in zip(launched_by, in_graph, strict=True)]
    direct = {at for at in launched_by if at is not None}
    whole: dict[int, int | None] = {}
    members: dict[int, list[int]] = {}
    for number, at in enumerate(launched_by):
        if at is None:
            continue
        if at not in whole:
            whole[at] = _whole(at, calls, parents, direct)
        if (outer := whole[at]) is not None:
            members.setdefault(outer, []).append(number)
    known: dict[int, _Call] = {}
    for at, numbers in members.items():
        inputs = _inputs(calls[at], sources)
        if inputs is None:
            continue
        numbers.sort(key=lambda number: int(start_ns[number]))
        launched = [[kernels[n].name, _grid(kernels[n])] for n in numbers]
        device = f"gpu:{args_of(kernels[numbers[0]]).device or 0}"
        call = _Call(calls[at].name, inputs[0], device, _text(launched), inputs[1])
        key = _key(call, settings)
        call = known.setdefault(key, call)
        call.count += 1
        call.busy_ns += sum(int(duration_ns[number]) for number in numbers)
        for number in numbers:
            found.of_kernel[number] = key
    if settings is not None:  # else shapes were not recorded at all
        for number, graph in enumerate(in_graph):
            if found.of_kernel[number] is None:
                at = launched_by[number]
                generated = at is not None and _is_generated(calls[at])
                call = _lost(kernels[number], graph, generated)
                key = _key(call, settings)
                call = known.setdefault(key, call)
                call.count += 1
                call.busy_ns += int(duration_ns[number])
                found.of_kernel[number] = key
    found.table = pa.Table.from_pylist([_row(key, call, settings) for key, call in known.items()], CALLS)
    return found


def tell_launches(events: Sequence[TraceEvent], launches: Sequence[Mapping[str, Any]]) -> None:
    """Gives the events of generated kernels their own names, and the arguments that our hook saw."""
    for event in events:
        if _LAUNCH not in event.name:
            continue
        event.name, _, number = event.name.rpartition(_LAUNCH)
        if not (number.isdecimal() and int(number) < len(launches) and isinstance(event.args, Args)):
            continue
        said = launches[int(number)]
        for name in ("dims", "strides", "types", "values"):
            setattr(event.args, name, msgspec.Raw(msgspec.json.encode(said[name])))
        event.args.kernel_backend = "triton"
        event.args.kernel_hash, event.args.kernel_kwargs = said["kernel_hash"], said["kernel_kwargs"]
        event.args.num_warps, event.args.num_stages = said["num_warps"], said["num_stages"]


def merged(tables: Sequence[pa.Table]) -> pa.Table:
    """Replayable of several windows, each once."""
    together = pa.concat_tables([CALLS.empty_table(), *tables])
    keys = [name for name in CALLS.names if name not in ("count", "busy_ns")]
    sums = together.group_by(keys, use_threads=False).aggregate([("count", "sum"), ("busy_ns", "sum")])
    return sums.rename_columns([*keys, "count", "busy_ns"]).select(CALLS.names).cast(CALLS)


def _whole(
    at: int, calls: Sequence[TraceEvent], parents: Sequence[int | None], direct: set[int]
) -> int | None:
    """The outermost operator around this one that launches kernels itself; None where this is no operator."""
    found: int | None = None
    inner: int | None = at
    while inner is not None and _is_operator(calls[inner]):
        if inner in direct:
            found = inner
        inner = parents[inner]
    return found


def _is_operator(call: TraceEvent) -> bool:
    if call.cat != "cpu_op" or call.name.startswith(_NO_OPERATOR):
        return False
    return "::" in call.name or _is_generated(call)


def _is_generated(call: TraceEvent) -> bool:
    return args_of(call).kernel_backend == "triton"


def _inputs(call: TraceEvent, sources: Mapping[str, str]) -> tuple[str, bool] | None:
    """As text, and whether a list of tensors in it was cut; None where the profiler did not record them."""
    args = args_of(call)
    parts = {"dims": args.dims, "strides": args.strides, "types": args.types, "values": args.values}
    if not all(map(bytes, parts.values())):
        return None
    decoded = {name: msgspec.json.decode(part) for name, part in parts.items()}
    if not all(isinstance(part, list) for part in decoded.values()):
        return None
    cut = any(
        kind == "TensorList" and not dims
        for kind, dims in zip(decoded["types"], decoded["dims"], strict=False)
    )
    if _is_generated(call):
        source = sources.get(str(args.kernel_hash))
        if not source:
            return None
        decoded["generated"] = {
            "source": source,
            "blocks": str(args.kernel_kwargs or ""),
            "warps": args.num_warps,
            "stages": args.num_stages,
        }
    return _text(decoded), cut


def _lost(kernel: TraceEvent, graph: bool, generated: bool) -> _Call:
    why = "the profiler does not know what it was called with"
    if graph:
        why = "it ran from a CUDA graph"
    elif generated:
        why = "the source that torch.compile generated was not found"
    launched = _text([[kernel.name, _grid(kernel)]])
    device = f"gpu:{args_of(kernel).device or 0}"
    return _Call(_function(kernel.name), _text({"why": why}), device, launched, False)


def _function(name: str) -> str:
    """`reduce_kernel` in `void at::native::(anonymous namespace)::reduce_kernel<512, 1, …>(…)`."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", plain, maxsplit=1)[0].rsplit("::", 1)[-1].strip() or name


def _grid(kernel: TraceEvent) -> Any:
    grid = args_of(kernel).grid
    return msgspec.json.decode(grid) if bytes(grid) else None


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _settings(call: _Call, settings: Mapping[str, Any] | None) -> str:
    """Lists of tensors are long: only a call that needs one has them."""
    kept = {name: value for name, value in (settings or {}).items() if name != "lists" or call.lists}
    return _text(kept)


def _key(call: _Call, settings: Mapping[str, Any] | None) -> int:
    text = "\0".join([call.op, call.inputs, call.device, call.kernels, _settings(call, settings)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _row(key: int, call: _Call, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "call": key,
        "framework": "torch",
        "device": call.device,
        "op": call.op,
        "inputs": call.inputs,
        "settings": _settings(call, settings),
        "kernels": call.kernels,
        "count": call.count,
        "busy_ns": call.busy_ns,
    }
