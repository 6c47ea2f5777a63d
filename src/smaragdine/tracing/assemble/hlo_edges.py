"""Dataflow between sibling scopes of a model, from the operands of the instructions XLA compiled.

The jaxpr would say it more plainly, but it is gone when a program runs, and making it anew would run the
program's own Python a second time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from smaragdine.tracing.assemble.coverage import FRAMEWORK, INPUT, PROGRAM
from smaragdine.tracing.assemble.hlo import Program
from smaragdine.tracing.assemble.jax_names import LOOP, jax_name
from smaragdine.tracing.assemble.names import Name
from smaragdine.tracing.assemble.tensorflow_names import tensorflow_name

Scope = tuple[str, ...]
# Of a value: the scopes that made it, the last of them and those inside it. Of a tuple: of each element.
Sources = frozenset[Scope]
Value = Sources | list["Value"]
# The program's own arguments are of the empty scope; what is made of constants alone has no source, for XLA
# makes it once for all who ask for it.
_NOTHING: Sources = frozenset()
_ARGUMENT: Sources = frozenset({()})
_FURTHEST = 16
# The same goes for these: done once, in the name of one of those who ask.
_SHARED = re.compile(r"convert|copy|bitcast|reshape|transpose|broadcast|slice|iota|constant|reverse")


def edges_of(programs: Iterable[Program]) -> tuple[tuple[str, str], ...]:
    """(source, target): scopes with the same parent, of forward work."""
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
        if computation is None or depth > _FURTHEST:
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
        """None: the instruction says nothing, and passes on what it gets. Empty: not of the forward pass."""
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
