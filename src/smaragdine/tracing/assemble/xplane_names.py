"""From the names in an XPlane file to qualified names: the path a person would write, and the phase.

TensorFlow  StatefulPartitionedCall/gradient_tape/net/first/MatMul/MatMul  →  net/first/MatMul/MatMul
JAX         jit(step)/transpose(jvp(Model))/layer_0/up/dot_general         →  Model/layer_0/up/dot_general
both of them backward.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from smaragdine.tracing.assemble.coverage import FRAMEWORK, INPUT, UNPLACED
from smaragdine.tracing.files.phases import OPTIMIZER, phase_of


@dataclass(frozen=True)
class Name:
    path: str
    phase: str  # forward | backward | optimizer | other


_CALLS = re.compile(r"^(?:(?:StatefulPartitionedCall|PartitionedCall)(?:_\d+)?/)+")
_TAPE = re.compile(r"^gradient_tape(?:_\d+)?/")
_GRADIENT_SUM = re.compile(r"AddN(?:_\d+)?")
_FUSED = re.compile(r"_(?:Mkl|Native)*(Fused\w+)")
_WRAPPED = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
# A function compiled apart is no scope of its own; the others change what is done, not where it is written.
_FUNCTIONS = frozenset({"jit", "pjit", "pmap", "xla_pmap", "core_call", "named_call"})
_TRANSFORMATIONS = frozenset({"jvp", "transpose", "vmap", "linearize", "remat", "checkpoint", "custom_jvp"})
_CALLED = frozenset({"closed_call", "core_call", "pjit", "jit", "custom_jvp_call", "custom_vjp_call"})
_INSTANCE = re.compile(r"[.]\d+$")
_NUMBERED = re.compile(r"(.+)_\d+")


def framework_name(operation: str) -> Name:
    """Work that belongs to no line of the program, by kind: `copy.12` is a copy."""
    return Name(f"{FRAMEWORK}/{_INSTANCE.sub('', operation)}", "other")


def unplaced_name(operation: str) -> Name:
    return Name(f"{UNPLACED}/{_INSTANCE.sub('', operation)}", "other")


def input_name(raw: str) -> Name:
    return Name(f"{INPUT}/{_CALLS.sub('', raw)}", "other")


def tensorflow_name(raw: str, kind: str = "") -> Name:
    """`kind`: the operation's type. A fused product is called after the last thing fused to it."""
    path = _CALLS.sub("", raw)
    fused = _FUSED.fullmatch(kind)
    if fused:
        path = "/".join([*path.split("/")[:-1], fused[1]])
    if _TAPE.match(path):
        return Name(_TAPE.sub("", path), "backward")
    if phase_of(path) == OPTIMIZER:
        return Name(path, "optimizer")
    if "/" not in path.removesuffix("/ReadVariableOp"):
        # Between the layers: sums of gradients, the step's metrics, its input.
        if path.startswith("Iterator"):
            return input_name(path)
        return Name(f"{FRAMEWORK}/{path}", "backward" if _GRADIENT_SUM.fullmatch(path) else "other")
    return Name(path, "forward")


def jax_name(op_name: str) -> Name | None:
    """None where the name holds no place: an operation run by itself, outside any function of the program."""
    # Instructions merged into one list all their names; the first is the oldest.
    raw = op_name.split(";", 1)[0]
    functions: list[str] = []
    scopes = _scopes(raw, functions)
    operation = scopes.pop() if scopes else ""
    if not scopes:
        if not functions or functions[0] == operation:
            return None
        scopes = [functions[0]]
    path = "/".join([*scopes, operation])
    if "transpose(" in raw:
        return Name(path, "backward")
    if "jvp(" in raw:
        return Name(path, "forward")
    if phase_of(path) == OPTIMIZER or "optimizer" in scopes:
        return Name(path, "optimizer")
    return Name(path, "other")


def _scopes(path: str, functions: list[str]) -> list[str]:
    scopes: list[str] = []
    for part in _split(path):
        wrapped = _WRAPPED.fullmatch(part)
        if wrapped and wrapped[1] in _FUNCTIONS:
            functions.append(wrapped[2])
        elif wrapped and wrapped[1] in _TRANSFORMATIONS:
            scopes += _scopes(wrapped[2], functions)
        elif part and part not in _CALLED:
            scopes.append(part)
    return scopes


def _split(path: str) -> list[str]:
    """At the slashes outside brackets: a transformation is written around a scope."""
    parts: list[str] = []
    depth = begin = 0
    for position, letter in enumerate(path):
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth == 0:
            parts.append(path[begin:position])
            begin = position + 1
    return [*parts, path[begin:]]


@dataclass(frozen=True)
class KerasScopes:
    """Keras 3 opens every scope a second time in the training function, where TensorFlow numbers it: `net_1`.

    The number is taken off a model whose children all have one, and inside it wherever siblings stay apart
    without. The calls of a layer that is called twice cannot be told from other layers: they keep theirs.
    """

    plain: dict[str, str]  # scope as TensorFlow has it → as the program has it
    stripped: tuple[str, ...]  # models, as TensorFlow has them
    kept: tuple[str, ...]  # models and layers that keep their numbers

    def clean(self, path: str) -> str:
        parts = path.split("/")
        for length in range(len(parts) - 1, 0, -1):
            scope = self.plain.get("/".join(parts[:length]))
            if scope is not None:
                return "/".join([scope, *parts[length:]])
        return path


def keras_scopes(forward_paths: Iterable[str]) -> KerasScopes:
    children: dict[str, set[str]] = {"": set()}  # scope → scopes in it
    for path in forward_paths:
        *parts, operation = path.split("/")
        if operation == "ReadVariableOp":
            continue  # its parent is an operation, not a scope
        for length in range(len(parts)):
            children.setdefault("/".join(parts[:length]), set()).add(parts[length])
    plain: dict[str, str] = {}
    stripped: list[str] = []
    kept: list[str] = []
    for root in sorted(filter(_NUMBERED.fullmatch, children[""])):
        inside = children.get(root, set())
        alone = _alone(inside)
        if alone and all(map(_NUMBERED.fullmatch, inside)):
            stripped.append(root)
            kept += sorted(f"{root}/{scope}" for scope in inside - alone)
            _strip(root, _NUMBERED.sub(r"\1", root), children, plain)
        else:
            kept.append(root)
    return KerasScopes(plain, tuple(stripped), tuple(kept))


def _alone(siblings: set[str]) -> set[str]:
    """Those that no other could be taken for once the numbers are off."""
    bases = Counter(_NUMBERED.sub(r"\1", scope) for scope in siblings)
    return {scope for scope in siblings if bases[_NUMBERED.sub(r"\1", scope)] == 1}


def _strip(scope: str, name: str, children: dict[str, set[str]], plain: dict[str, str]) -> None:
    plain[scope] = name
    inside = children.get(scope, set())
    alone = _alone(inside)
    for child in inside:
        clean = _NUMBERED.sub(r"\1", child) if child in alone else child
        _strip(f"{scope}/{child}", f"{name}/{clean}", children, plain)
