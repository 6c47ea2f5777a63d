"""The instructions whose kernels ran on a GPU, each once: what it takes to run such an instruction again.

That is a program of its own: what XLA compiled, with parameters in the place of operands, and nothing around
it. Layers that are alike have instructions that are alike: what tells them apart is names, numbers and places
in the source, and those are left out. An instruction that cannot stand alone is a call, too, so that what it
takes is seen, and why it cannot be replayed.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import pyarrow as pa

from smaragdine.protobuf import Fields, build_class
from smaragdine.recording.format import CALLS
from smaragdine.tracing.xplane.hlo import Program
from smaragdine.tracing.xplane.reader import Row, Rows

_MOST_BYTES = 64 << 10  # of a program, packed: beyond that a table of calls would be longer than its events
_NUMBERS = re.compile(r"(?:_\d+)+$")
_COPIED = re.compile(r"Mem(?:set|cpy\w*)")
_GRID = re.compile(r"\bgrid:(\d+),(\d+),(\d+)")

_SETTINGS = '{"framework":"jax"}'

Kernel = list[Any]  # name and grid


@dataclass
class _Call:
    op: str
    device: str
    inputs: str
    kernels: Counter[str] = field(default_factory=Counter[str])  # of each execution, as text
    busy_ns: int = 0


@dataclass(frozen=True)
class Instructions:
    """What rebuilds the instructions of a window, and which of them each event belongs to."""

    of_event: list[int | None]
    table: pa.Table


def calls_of(events: Rows, programs: Mapping[int, Program]) -> Instructions | None:
    """None where nothing ran on a GPU."""
    executions = _executions(events, programs)
    if not executions:
        return None
    modules = {number: Module(programs[number].module) for number in {key[1] for key in executions}}
    standing: dict[tuple[int, str], tuple[str, str]] = {}
    known: dict[tuple[str, str, str], _Call] = {}
    members: dict[tuple[str, str, str], list[int]] = {}
    for (device, number, operation), runs in executions.items():
        if (number, operation) not in standing:
            standing[number, operation] = _inputs(modules[number], operation)
        op, inputs = standing[number, operation]
        key = (device, op, inputs)
        call = known.setdefault(key, _Call(op, device, inputs))
        kernels = programs[number].kernels
        for numbers in runs:
            launched = [_kernel(events.rows[one], kernels) for one in numbers]
            call.kernels.update(_times(launched))
            call.busy_ns += sum(events.end_ns[one] - events.start_ns[one] for one in numbers)
            members.setdefault(key, []).extend(numbers)
    of_event: list[int | None] = [None] * len(events.rows)
    rows: list[dict[str, Any]] = []
    for key, call in known.items():
        # The first and the last execution may be cut; of what is left, all are alike.
        usual = call.kernels.most_common(1)[0][0]
        identity = _key(call, usual)
        for one in members[key]:
            of_event[one] = identity
        rows.append(
            {
                "call": identity,
                "framework": "jax",
                "device": call.device,
                "op": call.op,
                "inputs": call.inputs,
                "settings": _SETTINGS,
                "kernels": usual,
                "count": call.kernels.total(),
                "busy_ns": call.busy_ns,
            }
        )
    return Instructions(of_event, pa.Table.from_pylist(rows, CALLS))


def _executions(events: Rows, programs: Mapping[int, Program]) -> dict[tuple[str, int, str], list[list[int]]]:
    """(device, program, instruction) → its executions, each as the numbers of its kernels, by time."""
    found: dict[tuple[str, int, str], dict[int | None, list[int]]] = {}
    for number, (row, device) in enumerate(zip(events.rows, events.devices, strict=True)):
        if row.program is None or row.program not in programs or not device.startswith("gpu:"):
            continue
        if row.operation in programs[row.program].origins:
            runs = found.setdefault((device, row.program, row.operation), {})
            runs.setdefault(row.run, []).append(number)
    return {
        key: [sorted(numbers, key=lambda one: events.start_ns[one]) for numbers in runs.values()]
        for key, runs in found.items()
    }


def _inputs(module: Module, operation: str) -> tuple[str, str]:
    """What it is called, and what rebuilds it, or why nothing does."""
    try:
        alone: Alone = module.alone(operation)
    except CannotStandAlone as error:
        return stem(operation), _text({"why": str(error)})
    packed = base64.b64encode(zlib.compress(alone.module, 9)).decode()
    if len(packed) > _MOST_BYTES:
        return alone.op, _text({"why": "its program is too long to keep"})
    return alone.op, _text({"hlo": packed})


def _kernel(row: Row, kernels: Mapping[str, str]) -> Kernel:
    """XLA numbers the kernels that it writes, and calls one after any of the instructions that it serves."""
    grid = _GRID.search(row.details)
    copied = _COPIED.match(row.text)
    name = copied[0] if copied else _NUMBERS.sub("", row.text) if row.text in kernels else row.text
    return [name, [int(size) for size in grid.groups()] if grid else None]


def _times(launched: Sequence[Kernel]) -> dict[str, int]:
    """The kernels of one execution, and how many of them there are: an instruction in a loop runs often."""
    first = launched[0]
    turns = sum(each == first for each in launched)
    length, left = divmod(len(launched), turns)
    unit = list(launched[:length])
    if left or unit * turns != list(launched):
        return {_text(list(launched)): 1}
    return {_text(unit): turns}


def _key(call: _Call, kernels: str) -> int:
    text = "\0".join([call.op, call.inputs, call.device, kernels])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


# An instruction as a program of its own.

# More fields of xla/service/hlo.proto than `hlo` reads. What is not listed is copied as it is.
FIELDS: Fields = {
    "Module": """
        string name = 1; string entry_computation_name = 2; repeated Computation computations = 3;
        ProgramShape host_program_shape = 4; int64 entry_computation_id = 6""",
    "Computation": """
        string name = 1; repeated Instruction instructions = 2; ProgramShape program_shape = 4;
        int64 id = 5; int64 root_id = 6""",
    "ProgramShape": "repeated Shape parameters = 1; Shape result = 2; repeated string parameter_names = 3",
    "Shape": """
        int32 element_type = 2; repeated int64 dimensions = 3; repeated Shape tuple_shapes = 4;
        Layout layout = 5""",
    "Layout": "repeated int64 minor_to_major = 1",
    "Instruction": """
        string name = 1; string opcode = 2; Shape shape = 3; bytes metadata = 7; bytes literal = 8;
        int64 parameter_number = 9; string custom_call_target = 28; int64 id = 35;
        repeated int64 operand_ids = 36; repeated int64 control_predecessor_ids = 37;
        repeated int64 called_computation_ids = 38; bytes frontend_attributes = 68;
        bytes statistics_viz = 82; bytes original_value = 88""",
}
_LITERAL_BYTES = 4096  # a larger constant is read from memory like any other input
_DEEPEST = 16
_NAME, _ENTRY = "alone", 1
_STEM_NUMBERS = re.compile(r"(?:\.(?:\d+|clone|remat\d*))+$")
# What tells instructions apart that do the same.
_APART = (
    "metadata",
    "control_predecessor_ids",
    "frontend_attributes",
    "statistics_viz",
    "original_value",
)
_CALL = 32  # an instruction's number: its computation's, and from this bit down its own
_TUPLE = 13  # of xla.PrimitiveType


class CannotStandAlone(Exception):
    """Why, in words for a person."""


@cache
def message_class() -> Any:
    return build_class("alone", FIELDS, "Module")


@dataclass(frozen=True)
class Alone:
    """A program of one instruction."""

    op: str
    module: bytes  # HloModuleProto


class Module:
    """A compiled program, with all that its instructions say."""

    def __init__(self, module: Any) -> None:
        """Of any message that keeps the fields that it does not know."""
        whole = message_class()()
        whole.ParseFromString(module.SerializeToString())
        self._computations = {each.id: each for each in whole.computations}
        self._places = {each.name: (one, each) for one in whole.computations for each in one.instructions}

    def alone(self, name: str) -> Alone:
        """Raises CannotStandAlone."""
        if name not in self._places:
            raise CannotStandAlone("its program does not have it")
        parent, instruction = self._places[name]
        made = message_class()(name=_NAME, entry_computation_name=_NAME, entry_computation_id=_ENTRY)
        numbers: dict[int, int] = {}
        for number in self._called(instruction, 0):
            if number not in numbers:
                numbers[number] = _ENTRY + 1 + len(numbers)
                made.computations.add().CopyFrom(self._computations[number])
        for computation in made.computations:
            _rename(computation, numbers[computation.id], numbers)
        entry = made.computations.add(name=_NAME, id=_ENTRY, root_id=instruction.id)
        by_id = {each.id: each for each in parent.instructions}
        for operand in dict.fromkeys(instruction.operand_ids):
            _add_operand(entry, by_id[operand])
        entry.instructions.add().CopyFrom(instruction)
        entry.program_shape.result.CopyFrom(instruction.shape)
        made.host_program_shape.CopyFrom(entry.program_shape)
        _rename(entry, _ENTRY, numbers)
        op = instruction.custom_call_target or stem(instruction.name)
        return Alone(op, made.SerializeToString(deterministic=True))

    def _called(self, instruction: Any, depth: int) -> Iterator[int]:
        """The computations that it calls, each after those that it calls in turn."""
        if depth > _DEEPEST:
            raise CannotStandAlone("it calls too deeply")
        for number in instruction.called_computation_ids:
            for each in self._computations[number].instructions:
                yield from self._called(each, depth + 1)
            yield number


def _add_operand(entry: Any, given: Any) -> None:
    """A parameter in the place of an operand; a small constant stays one."""
    if given.shape.element_type == _TUPLE:
        raise CannotStandAlone("it takes a tuple")
    part = entry.instructions.add()
    if given.opcode == "constant" and len(given.literal) <= _LITERAL_BYTES:
        part.CopyFrom(given)
        return
    part.opcode, part.id = "parameter", given.id
    part.shape.CopyFrom(given.shape)
    part.parameter_number = len(entry.program_shape.parameters)
    entry.program_shape.parameters.add().CopyFrom(given.shape)
    entry.program_shape.parameter_names.append(f"p{part.parameter_number}")


def _rename(computation: Any, number: int, numbers: Mapping[int, int]) -> None:
    """A computation's number, its instructions', and all names: by their order and nothing else."""
    own = {each.id: number << _CALL | at for at, each in enumerate(computation.instructions)}
    computation.name = _NAME if number == _ENTRY else f"c{number}"
    computation.id = number
    del computation.program_shape.parameter_names[:]
    computation.root_id = own[computation.root_id]
    for at, each in enumerate(computation.instructions):
        # A kernel is called after the instruction in the entry.
        named = number == _ENTRY and each.opcode not in ("parameter", "constant")
        each.name = f"{stem(each.name)}.{at}" if named else f"i.{number}.{at}"
        each.id = own[each.id]
        each.operand_ids[:] = [own[one] for one in each.operand_ids]
        each.called_computation_ids[:] = [numbers[one] for one in each.called_computation_ids]
        for name in _APART:
            each.ClearField(name)


def stem(name: str) -> str:
    """A name without the numbers that tell it from others."""
    return _STEM_NUMBERS.sub("", name)
