"""From JAX's names to qualified names: the path a person would write, and the phase.

jit(step)/transpose(jvp(Model))/layer_0/up/dot_general  →  Model/layer_0/up/dot_general, backward
"""

from __future__ import annotations

import re

from smaragdine.tracing.assemble.coverage import OPTIMIZER as OPTIMIZER_CLASS
from smaragdine.tracing.assemble.coverage import PROGRAM
from smaragdine.tracing.assemble.names import Name
from smaragdine.tracing.files import phases

LOOP = "while"  # scan, fori_loop: what runs in it has one name, however often it runs

_WRAPPED = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
# A function compiled apart is no scope of its own; the others change what is done, not where it is written.
_FUNCTIONS = frozenset({"jit", "pjit", "pmap", "xla_pmap", "core_call", "named_call"})
_TRANSFORMATIONS = frozenset(
    {"jvp", "transpose", "vmap", "linearize", "remat", "checkpoint", "custom_jvp", "custom_vjp", "shard_map"}
)
_CALLED = re.compile(
    r"closed_call|core_call|p?jit|xla_pmap|shard_map|custom_(?:jvp|vjp)_call(?:_jaxpr)?|custom_lin"
    r"|checkpoint|remat2?|rematted_computation"
)
_EINSUM = "->"  # jnp.einsum opens a scope that is called after its formula
_LOSS = "compile_loss"  # Keras', of whichever model


def jax_name(op_name: str, in_update: bool = False, in_training: bool = True) -> Name:
    """`in_update`: it is done with the gradients, after them. Where nothing is differentiated, what has a
    scope is a model's forward work."""
    # Instructions merged into one list all their names; the first is the oldest.
    raw = op_name.split(";", 1)[0]
    functions: list[str] = []
    scopes = _without_loops(_scopes(raw, functions))
    operation = scopes.pop() if scopes else functions[-1] if functions else raw
    phase = _phase(raw)
    if not scopes:
        place = [OPTIMIZER_CLASS if phase is None and in_update else PROGRAM, *functions[:1]]
        path = "/".join([*place, operation] if place[-1] != operation else place)
        return Name(path, phase or ("optimizer" if in_update else "other"))
    path = "/".join([*scopes, operation])
    if phase is None and (phases.phase_of(path) == phases.OPTIMIZER or OPTIMIZER_CLASS in scopes):
        return Name(path if scopes[0] == OPTIMIZER_CLASS else f"{OPTIMIZER_CLASS}/{path}", "optimizer")
    if scopes[0] == _LOSS:
        path = f"{PROGRAM}/{path}"
    return Name(path, phase or ("other" if in_training else "forward"))


def is_scoped(op_name: str) -> bool:
    """In a scope of the program, or differentiated: not merely in a function."""
    raw = op_name.split(";", 1)[0]
    return _phase(raw) is not None or len(_without_loops(_scopes(raw, []))) > 1


def name_between(op_names: list[str], operation: str) -> str:
    """A name, as JAX writes it, in the innermost scope that all of these are in, of the latest phase of
    theirs; "" where that is no scope."""
    functions: list[str] = []
    all_scopes = [_without_loops(_scopes(op_name.split(";", 1)[0], functions))[:-1] for op_name in op_names]
    shared = all_scopes[0] if all_scopes else []
    for scopes in all_scopes[1:]:
        same = next((at for at, (a, b) in enumerate(zip(shared, scopes, strict=False)) if a != b), None)
        shared = shared[: min(len(shared), len(scopes)) if same is None else same]
    if not shared:
        return ""
    phases_seen = {_phase(op_name) for op_name in op_names}
    within = "transpose(jvp())" if "backward" in phases_seen else "jvp()" if "forward" in phases_seen else ""
    return "/".join([f"jit({functions[0]})" if functions else "jit()", within, *shared, operation])


def is_backward(op_name: str) -> bool:
    return "transpose(" in op_name


def is_differentiated(op_name: str) -> bool:
    return "jvp(" in op_name


def _phase(raw: str) -> str | None:
    return "backward" if is_backward(raw) else "forward" if is_differentiated(raw) else None


def _without_loops(scopes: list[str]) -> list[str]:
    """A loop around the whole step (`scan` over batches) is no part of the model: a layer has the path that
    it has without."""
    while len(scopes) > 1 and scopes[0] == LOOP:
        scopes = scopes[1:]
    return scopes


def _scopes(path: str, functions: list[str]) -> list[str]:
    scopes: list[str] = []
    for part in split(path):
        wrapped = _WRAPPED.fullmatch(part)
        if wrapped and wrapped[1] in _FUNCTIONS:
            functions.append(wrapped[2])
        elif wrapped and wrapped[1] in _TRANSFORMATIONS:
            inside = _scopes(wrapped[2], functions)
            # A transformation within another (remat) says the scopes it is in once more.
            scopes = inside if inside[: len(scopes)] == scopes else scopes + inside
        elif scopes and scopes[-1] == LOOP and part in ("body", "cond"):
            continue
        elif part and not _CALLED.fullmatch(part) and _EINSUM not in part:
            scopes.append(part)
    return scopes


def split(path: str) -> list[str]:
    """At the slashes outside brackets: a transformation is written around a scope."""
    parts: list[str] = []
    depth = begin = 0
    for position, letter in enumerate(path):
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth == 0:
            parts.append(path[begin:position])
            begin = position + 1
    return [*parts, path[begin:]]
