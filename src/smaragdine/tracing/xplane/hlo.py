"""The programs that XLA compiled, as an XPlane file has them: where each instruction came from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from smaragdine.protobuf import Fields, build_class
from smaragdine.tracing.coverage import FRAMEWORK, INPUT, PROGRAM
from smaragdine.tracing.names import (
    LOOP,
    Name,
    is_backward,
    is_differentiated,
    is_scoped,
    jax_name,
    name_between,
    tensorflow_name,
)

# The fields that we read of xla/service/hlo.proto. `protobuf` builds their descriptors at run time.

FIELDS: Fields = {
    "HloProto": "HloModuleProto hlo_module = 1",
    "HloModuleProto": """
        string name = 1; repeated HloComputationProto computations = 3; int64 entry_computation_id = 6;
        HloScheduleProto schedule = 7""",
    "HloScheduleProto": "map InstructionSequence sequences = 1",
    "InstructionSequence": "repeated int64 instruction_ids = 1",
    "HloComputationProto": """
        string name = 1; repeated HloInstructionProto instructions = 2; int64 id = 5; int64 root_id = 6""",
    "HloInstructionProto": """
        string name = 1; string opcode = 2; OpMetadata metadata = 7; int64 parameter_number = 9;
        int64 tuple_index = 13; string custom_call_target = 28; int64 id = 35;
        repeated int64 operand_ids = 36; repeated int64 called_computation_ids = 38""",
    "OpMetadata": "string op_type = 1; string op_name = 2",
}


@cache
def message_class() -> Any:
    return build_class("hlo", FIELDS, "HloProto")


# XLA adds these by itself, to move data where it needs it.
_MOVES = re.compile(r"copy|bitcast|tuple|get-tuple-element|parameter|constant|transpose")
_NO_WORK = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"})
_PROGRAM = re.compile(r"\((\d+)\)$")
_LETTERS = re.compile(r"[^A-Za-z0-9_]")
_PLANE = "/host:metadata"
_PRODUCTS = re.compile(r"dot|convolution|ragged-dot")
_PRODUCT_CALLS = re.compile(r"gemm|matmul|conv|__onednn|ynn", re.IGNORECASE)
_PRODUCT = "dot_general"
_HEAVY = re.compile(r"reduce|reduce-window|scatter|sort")
_SHAPES = re.compile(r"convert|copy|bitcast|transpose|reshape|broadcast|slice|pad|concatenate")
_FURTHEST = 8


@dataclass(frozen=True)
class Origin:
    op_name: str  # "" if XLA kept none
    opcode: str
    is_tensorflow: bool
    in_update: bool = False  # it works on the gradients, outside any scope
    in_training: bool = True  # its program differentiates

    @property
    def is_move(self) -> bool:
        return _MOVES.match(self.opcode) is not None


@dataclass(frozen=True)
class Scheduled:
    """An instruction that does work, at its place in the order of a program."""

    name: str
    is_library: bool  # a library names its kernels


@dataclass(frozen=True)
class Program:
    origins: Mapping[str, Origin]  # by the instruction's name
    kernels: Mapping[str, str]  # what a GPU's kernel is called (the name in letters that C allows) → name
    order: tuple[Scheduled, ...]
    module: Any  # HloModuleProto


NO_PROGRAM = Program({}, {}, (), None)


def programs(space: Any) -> dict[int, Program]:
    """By program_id. Module names repeat, identities do not."""
    from google.protobuf.message import DecodeError

    found: dict[int, Program] = {}
    for plane in space.planes:
        if plane.name != _PLANE:
            continue
        for metadata in plane.event_metadata.values():
            number = _PROGRAM.search(metadata.name)
            for stat in metadata.stats:
                if number is None or not stat.bytes_value:
                    continue
                proto = message_class()()
                try:
                    proto.ParseFromString(stat.bytes_value)
                except DecodeError:
                    continue  # its operations get no path, and coverage counts that
                found[int(number[1])] = _program(proto.hlo_module)
    return found


def _program(module: Any) -> Program:
    computations = {computation.id: computation for computation in module.computations}
    in_training = any(
        is_differentiated(instruction.metadata.op_name)
        for computation in module.computations
        for instruction in computation.instructions
    )
    origins: dict[str, Origin] = {}
    for computation in module.computations:
        own = {each.id: _own(each, computations) for each in computation.instructions}
        placed = _with_neighbours(computation, own, computations)
        update = _update(computation, placed, computations) if in_training else frozenset[int]()
        for each in computation.instructions:
            origin = placed[each.id]
            origins[each.name] = replace(origin, in_update=each.id in update, in_training=in_training)
    kernels: dict[str, str] = {}
    for name in origins:
        kernels.setdefault(_LETTERS.sub("_", name), name)
    return Program(origins, kernels, tuple(_order(module, computations)), module)


def _own(instruction: Any, computations: Mapping[int, Any], depth: int = 0) -> Origin:
    """What an instruction says of itself. A fusion belongs where the product in it is written, for that is
    its work; else where its root or its heaviest result is; else where its last known part is."""
    metadata = instruction.metadata
    origin = Origin(metadata.op_name, instruction.opcode, bool(metadata.op_type))
    if depth > _FURTHEST:
        return origin
    if instruction.opcode == "fusion":
        inside = _called(instruction, computations)
        work = [each for each in inside if each.opcode not in _NO_WORK]
        product = next((each for each in work if _PRODUCTS.fullmatch(each.opcode)), None)
        if product is not None:
            return _own(product, computations, depth + 1)
        opcode = work[-1].opcode if work else origin.opcode
        results = _results(inside)
        if not results and _is_path(origin):
            return _beside_product(replace(origin, opcode=opcode))
        for each in [*results, *reversed(work)]:
            inner = _own(each, computations, depth + 1)
            if inner.op_name:
                return _beside_product(replace(inner, opcode=opcode))
        return Origin("", opcode, origin.is_tensorflow)
    if not _is_path(origin):
        # A rewritten reduction may have lost its own place, but the sum it calls still knows.
        for each in reversed(_called(instruction, computations) if _HEAVY.fullmatch(origin.opcode) else []):
            inner = _own(each, computations, depth + 1)
            if inner.op_name:
                return replace(inner, opcode=origin.opcode)
        return Origin("", origin.opcode, origin.is_tensorflow)
    stem, _, operation = origin.op_name.rpartition("/")
    if _is_library(instruction) or (origin.opcode == "dot" and operation == "transpose"):
        # The gradient of a weight is a product, transposed; a library adds to its product on the way. XLA
        # calls the whole after what comes last.
        return replace(origin, op_name=f"{stem}/{_PRODUCT}")
    return _beside_product(origin)


def _results(inside: list[Any]) -> list[Any]:
    """The results of a fusion that has several, the heaviest first. XLA calls it after any of them."""
    several = next((each for each in inside if each.opcode == "tuple"), None)
    of_tuple = set(several.operand_ids) if several is not None else set[int]()
    results = [each for each in inside if each.id in of_tuple and each.opcode not in _NO_WORK]
    return sorted(results, key=lambda each: _HEAVY.fullmatch(each.opcode) is None)


def _is_library(instruction: Any) -> bool:
    return instruction.opcode == "custom-call" and bool(_PRODUCT_CALLS.search(instruction.custom_call_target))


def _beside_product(origin: Origin) -> Origin:
    """What XLA does to shape a product's arguments or result has the product's name; we give it its own."""
    stem, _, operation = origin.op_name.rpartition("/")
    if operation == _PRODUCT and _SHAPES.fullmatch(origin.opcode):
        return replace(origin, op_name=f"{stem}/{origin.opcode}")
    return origin


def _is_path(origin: Origin) -> bool:
    """In JAX a bare word is the name of an argument that is copied (`params['w']`). What a reduction calls
    has a path only within that call."""
    if origin.is_tensorflow:
        return bool(origin.op_name)
    return "(" in origin.op_name and "/" in origin.op_name


def _with_neighbours(
    computation: Any, own: dict[int, Origin], computations: Mapping[int, Any]
) -> dict[int, Origin]:
    """Places what XLA put in between without a word, by what it was put in for. The pieces of a large sum
    belong to the sum they end in; other work to the innermost scope that all it works on comes from."""
    by_id = {each.id: each for each in computation.instructions}
    operands: dict[int, list[int]] = {each.id: list(each.operand_ids) for each in computation.instructions}
    users: dict[int, list[int]] = {}
    for each in computation.instructions:
        for operand in each.operand_ids:
            users.setdefault(operand, []).append(each.id)

    def nearest(start: int, ways: Mapping[int, list[int]]) -> Origin | None:
        seen, front = {start}, [start]
        for _ in range(_FURTHEST):
            for one in front:
                if one in by_id and own[one].op_name:
                    return own[one]
            front = [one for at in front for one in ways.get(at, ()) if one not in seen]
            seen.update(front)
        return None

    def around(each: Any, ways: Mapping[int, list[int]]) -> Origin | None:
        near = [origin for one in ways.get(each.id, ()) if (origin := nearest(one, ways)) is not None]
        if not near:
            return None
        operation = _PRODUCT if _PRODUCTS.fullmatch(own[each.id].opcode) else own[each.id].opcode
        if near[0].is_tensorflow:
            stem = near[0].op_name.rpartition("/")[0]
            return replace(near[0], op_name=f"{stem}/{operation}") if stem else near[0]
        name = name_between([origin.op_name for origin in near], operation)
        return replace(near[0], op_name=name or near[0].op_name)

    placed = dict(own)
    for each in computation.instructions:
        origin = own[each.id]
        if origin.op_name or origin.is_move or each.opcode in _NO_WORK:
            continue
        product = _converted(each, origin, users, by_id, computations)
        forwards = origin.opcode in ("reduce-window", "reduce")
        first, second = (users, operands) if forwards else (operands, users)
        near = product or around(each, first) or around(each, second)
        if near is not None:
            placed[each.id] = replace(origin, op_name=near.op_name, is_tensorflow=near.is_tensorflow)
    return placed


def _converted(
    each: Any,
    origin: Origin,
    users: Mapping[int, list[int]],
    by_id: Mapping[int, Any],
    computations: Mapping[int, Any],
) -> Origin | None:
    """A product in another precision than was asked for lost its name to the conversion after it."""
    if not _PRODUCTS.fullmatch(origin.opcode):
        return None
    for user in users.get(each.id, ()):
        for one in (by_id[user], *_called(by_id[user], computations)):
            if one.opcode != "dot" and one.metadata.op_name.endswith(f"/{_PRODUCT}"):
                return Origin(one.metadata.op_name, origin.opcode, False)
    return None


def _update(
    computation: Any, placed: Mapping[int, Origin], computations: Mapping[int, Any]
) -> frozenset[int]:
    """What works on the gradients outside any scope: the optimizer of a program that does not name it, and
    what only serves it."""
    after: set[int] = set()
    update: set[int] = set()
    users: dict[int, list[int]] = {}
    for each in computation.instructions:  # operands come before their users
        origin = placed[each.id]
        inside = _called(each, computations) if each.opcode == "fusion" else ()
        is_gradient = is_backward(origin.op_name) or any(is_backward(one.metadata.op_name) for one in inside)
        if is_gradient or any(operand in after for operand in each.operand_ids):
            after.add(each.id)
            if origin.op_name and not is_scoped(origin.op_name):
                update.add(each.id)
        for operand in each.operand_ids:
            users.setdefault(operand, []).append(each.id)
    for each in reversed(computation.instructions):
        served = [user for user in users.get(each.id, ()) if user != computation.root_id]
        name = placed[each.id].op_name
        if served and all(user in update for user in served) and not (name and is_scoped(name)):
            update.add(each.id)
    return frozenset(update)


def _order(module: Any, computations: Mapping[int, Any]) -> Iterable[Scheduled]:
    """The instructions as they are launched: by the schedule if there is one, and calls opened."""

    def run(identity: int, depth: int) -> Iterable[Scheduled]:
        computation = computations.get(identity)
        if computation is None or depth > _FURTHEST:
            return
        by_id = {each.id: each for each in computation.instructions}
        scheduled = (
            module.schedule.sequences[identity].instruction_ids
            if identity in module.schedule.sequences
            else by_id
        )
        for each in (by_id[one] for one in scheduled if one in by_id):
            if each.opcode == "call":  # a command buffer, in older versions
                for called in each.called_computation_ids:
                    yield from run(called, depth + 1)
            elif each.opcode not in _NO_WORK:
                yield Scheduled(each.name, _is_library(each))

    return run(module.entry_computation_id, 0)


def _called(instruction: Any, computations: Mapping[int, Any]) -> list[Any]:
    return [
        each
        for called in instruction.called_computation_ids[:1]
        if called in computations
        for each in computations[called].instructions
    ]


# Dataflow between sibling scopes of a model, from the operands of the instructions XLA compiled.
#
# The jaxpr would tell more plainly, but it is gone when a program runs, and to make it again we would have to
# run the program's own Python a second time.

Scope = tuple[str, ...]
# The scopes that made a value: the last of them, and those inside it. A tuple has them for each element.
Sources = frozenset[Scope]
Value = Sources | list["Value"]
# The program's own arguments have the empty scope. What is made of constants alone has no source: XLA makes
# it once for all who ask for it.
_NOTHING: Sources = frozenset()
_ARGUMENT: Sources = frozenset({()})
_FURTHEST_HLO_EDGES = 16
# XLA does these once too, in the name of one of those who ask.
_SHARED = re.compile(r"convert|copy|bitcast|reshape|transpose|broadcast|slice|iota|constant|reverse")


def edges_of(programs: Iterable[Program]) -> tuple[tuple[str, str], ...]:
    """(source, target): scopes of forward work with the same parent."""
    found: dict[tuple[Scope, Scope], None] = {}
    for program in programs:
        if program.module is not None:
            _Walk(program.module, found).entry()
    return tuple(("/".join(source), "/".join(target)) for source, target in found)


class _Walk:
    def __init__(self, module: Any, found: dict[tuple[Scope, Scope], None]) -> None:
        self.computations: Mapping[int, Any] = {each.id: each for each in module.computations}
        self.entry_id = module.entry_computation_id
        self.found = found
        self.scopes: dict[tuple[str, bool], Scope | None] = {}

    def entry(self) -> None:
        self.run(self.entry_id, [], 0)

    def run(self, identity: int, arguments: list[Value], depth: int) -> Value:
        """What the root of a computation is made of, given its arguments."""
        computation = self.computations.get(identity)
        if computation is None or depth > _FURTHEST_HLO_EDGES:
            return _NOTHING
        values: dict[int, Value] = {}
        for each in computation.instructions:  # operands come before their users
            operands = [values.get(one, _NOTHING) for one in each.operand_ids]
            values[each.id] = self.value(each, operands, arguments, depth)
        return values.get(computation.root_id, _NOTHING)

    def value(self, each: Any, operands: list[Value], arguments: list[Value], depth: int) -> Value:
        if each.opcode == "parameter":
            at = each.parameter_number
            return arguments[at] if at < len(arguments) else _ARGUMENT
        if each.opcode == "tuple":
            return operands
        if each.opcode == "get-tuple-element":
            whole = operands[0] if operands else _NOTHING
            if isinstance(whole, list) and each.tuple_index < len(whole):
                return whole[each.tuple_index]
            return _flat(whole)
        called: list[int] = list(each.called_computation_ids)
        if each.opcode in ("fusion", "call") and called:
            return self.run(called[0], operands, depth + 1)
        if each.opcode == "while" and called and operands:
            for body in called:  # the condition's result is of no use to anybody
                result = self.run(body, operands[:1], depth + 1)
                if isinstance(result, list):
                    return result
            return operands[0]
        if each.opcode == "conditional" and called:
            results = [
                self.run(branch, operands[at + 1 : at + 2], depth + 1) for at, branch in enumerate(called)
            ]
            return next((result for result in results if isinstance(result, list)), _flat(results))
        sources = _flat(operands)
        return sources if _SHARED.fullmatch(each.opcode) else self.made(self.scope(each.metadata), sources)

    def scope(self, metadata: Any) -> Scope | None:
        """None: the instruction says nothing, and passes on what it gets. Empty: it is not forward work."""
        key = (metadata.op_name, bool(metadata.op_type))
        if key not in self.scopes:
            name: Name | None = None
            if key[1] and key[0]:
                name = tensorflow_name(key[0])
            elif "(" in key[0] and "/" in key[0]:
                name = jax_name(key[0])
            scope = (
                None if name is None else tuple(part for part in name.path.split("/")[:-1] if part != LOOP)
            )
            self.scopes[key] = scope if name is None or _in_model(name) else ()
        return self.scopes[key]

    def made(self, scope: Scope | None, sources: Sources) -> Sources:
        if scope is None or not sources:
            return sources
        if not scope:
            return _ARGUMENT
        inside: set[Scope] = {scope}
        for source in sources:
            shared = _shared(source, scope)
            if shared < len(source) and shared < len(scope):
                self.found[source[: shared + 1], scope[: shared + 1]] = None
            elif shared == len(scope):
                inside.add(source)  # an operation between the scopes inside its own
        return frozenset(inside)


def _in_model(name: Name) -> bool:
    return name.phase == "forward" and name.path.split("/", 1)[0] not in (PROGRAM, FRAMEWORK, INPUT)


def _flat(value: Value | list[Value]) -> Sources:
    if isinstance(value, frozenset):
        return value
    return frozenset[Scope]().union(*(_flat(each) for each in value))


def _shared(one: Scope, other: Scope) -> int:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))
