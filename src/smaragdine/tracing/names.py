"""A qualified name with its phase, and the classes of work that has no place in the model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from smaragdine.tracing import table
from smaragdine.tracing.coverage import FRAMEWORK, INPUT, PROGRAM, UNPLACED
from smaragdine.tracing.coverage import OPTIMIZER as OPTIMIZER_CLASS
from smaragdine.tracing.table import OPTIMIZER, phase_of

_INSTANCE = re.compile(r"[.]\d+$")


@dataclass(frozen=True)
class Name:
    path: str
    phase: str  # forward | backward | optimizer | other


def framework_name(operation: str) -> Name:
    """Work that belongs to no line of the program, by kind: `copy.12` is a copy."""
    return Name(f"{FRAMEWORK}/{_INSTANCE.sub('', operation)}", "other")


def unplaced_name(operation: str) -> Name:
    return Name(f"{UNPLACED}/{_INSTANCE.sub('', operation)}", "other")


# JAX's names → qualified names (the path that a person would write) and phases.
#
# jit(step)/transpose(jvp(Model))/layer_0/up/dot_general  →  Model/layer_0/up/dot_general, backward

LOOP = "while"  # a scan or fori_loop: what runs in it has one name, however often it runs

_WRAPPED = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
# A function that is compiled apart is no scope. Transformations change what is done, not where it is written.
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
    """`in_update`: it works on the gradients, after they are made. If a program differentiates nothing, what
    has a scope is the forward work of a model."""
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
    if phase is None and (table.phase_of(path) == table.OPTIMIZER or OPTIMIZER_CLASS in scopes):
        return Name(path if scopes[0] == OPTIMIZER_CLASS else f"{OPTIMIZER_CLASS}/{path}", "optimizer")
    if scopes[0] == _LOSS:
        path = f"{PROGRAM}/{path}"
    return Name(path, phase or ("other" if in_training else "forward"))


def is_scoped(op_name: str) -> bool:
    """In a scope of the program, or differentiated: not merely in a function."""
    raw = op_name.split(";", 1)[0]
    return _phase(raw) is not None or len(_without_loops(_scopes(raw, []))) > 1


def name_between(op_names: list[str], operation: str) -> str:
    """A name, as JAX writes it, in the innermost scope around all of these, and of the latest of their
    phases; "" if they share no scope."""
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
    """A loop around the whole step (`scan` over batches) is no part of the model: a layer in it has the same
    path as without it."""
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
            # A transformation within another (remat) repeats the scopes around it.
            scopes = inside if inside[: len(scopes)] == scopes else scopes + inside
        elif scopes and scopes[-1] == LOOP and part in ("body", "cond"):
            continue
        elif part and not _CALLED.fullmatch(part) and _EINSUM not in part:
            scopes.append(part)
    return scopes


def split(path: str) -> list[str]:
    """Splits at the slashes outside brackets: JAX writes a transformation around a scope."""
    parts: list[str] = []
    depth = begin = 0
    for position, letter in enumerate(path):
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth == 0:
            parts.append(path[begin:position])
            begin = position + 1
    return [*parts, path[begin:]]


# TensorFlow's names → qualified names (the path that a person would write) and phases.
#
# StatefulPartitionedCall/gradient_tape/net/first/MatMul/MatMul  →  net/first/MatMul/MatMul, backward
# gradients/bert/pooler/dense/MatMul_grad/MatMul_1               →  bert/pooler/dense/MatMul/MatMul_1,
# backward

_CALLS = re.compile(r"^(?:(?:StatefulPartitionedCall|PartitionedCall)(?:_\d+)?/)+")
# TensorFlow's rewriter writes these before the place that it adds an operation for, or in it.
_REWRITER = re.compile(
    r"^(?:(?:ConstantFolding(?:Ctrl)?|ArithmeticOptimizer|LayoutOptimizer|Func)/)+|(?<=/)ArithmeticOptimizer/"
)
_TAPE = re.compile(r"^gradient_tape(?:_\d+)?/")
_GRADIENTS = re.compile(r"gradients(?:_\d+)?")
# Sums of gradients stand between the layers, and so does what TensorFlow makes of sparse ones.
_GRADIENT_SUM = re.compile(r"(?:(?:.*/)?gradients(?:_\d+)?/)?(AddN(?:_\d+)?(?:/.*)?)")
_FUSED = re.compile(r"_(?:Mkl|Native)*(Fused\w+)")
# What an optimizer of TensorFlow 1 calls its scope and, at the end of a variable's name, its state.
_OLD_OPTIMIZER = re.compile(
    r"(?:Adadelta|Adagrad|AdagradDA|Adam|AdamW|Ftrl|GradientDescent|Momentum|ProximalAdagrad"
    r"|ProximalGradientDescent|RMSProp|LossScaleOptimizer)(?:_\d+)?"
)
_READ = re.compile(r"/ReadVariableOp(?:_\d+)?$")
_CONTAINERS = re.compile(
    r"(?:Stateful)?PartitionedCall|(?:Stateless)?(?:While|If|Case)|XlaLaunch|_XlaRun|_XlaCompile"
)
_BATCH = re.compile(r"IteratorGetNext|Optional")  # Keras asks whether there is another
_COUNTERS = re.compile(r"(?:global_step|beta[12]_power)(?:/ReadVariableOp)?")
_NUMBERED = re.compile(r"(.+)_\d+")


def contains_others(kind: str) -> bool:
    """Whether operations of this type run others, which are recorded themselves."""
    return _CONTAINERS.fullmatch(kind) is not None


def without_calls(raw: str) -> str:
    """The name that an operation has inside its function."""
    return _CALLS.sub("", raw)


def input_name(raw: str) -> Name:
    return Name(f"{INPUT}/{without_calls(raw)}", "other")


def tensorflow_name(raw: str, kind: str = "", product: str = "", outside: str = FRAMEWORK) -> Name:
    """`kind`: the operation's type. `product`: the product that is fused in it. It may be written in another
    scope, for a fused operation is called after its last part. `outside`: the class of all in no scope."""
    if raw.startswith("_"):
        # No program gave this name: it is what a run feeds and fetches, or the executor's own.
        return Name(f"{INPUT if raw.startswith('_arg_') else FRAMEWORK}/{raw}", "other")
    if kind in ("_Arg", "_Retval"):
        return Name(f"{FRAMEWORK}/{kind}", "other")  # functions number theirs
    path = _REWRITER.sub("", without_calls(raw))
    fused = _FUSED.fullmatch(kind)
    if fused:
        scope = (product or path).rpartition("/")[0]
        path = f"{scope}/{fused[1]}" if scope else fused[1]
    if _TAPE.match(path):
        return _backward(_TAPE.sub("", path), PROGRAM)
    gradient_sum = _GRADIENT_SUM.fullmatch(path)
    if gradient_sum:
        return Name(f"{FRAMEWORK}/{gradient_sum[1]}", "backward")
    gradient = _gradient(path)
    if gradient:
        return _backward(gradient, FRAMEWORK)
    if phase_of(path) == OPTIMIZER or any(map(_OLD_OPTIMIZER.fullmatch, path.split("/"))):
        return Name(f"{OPTIMIZER_CLASS}/{path}", "optimizer")
    if "/" not in _READ.sub("", path):
        # It stands between the layers: a sum of gradients, a metric of the step, its input.
        if path.startswith(("Iterator", "OneShotIterator")) or _BATCH.match(kind):
            return input_name(path)
        return Name(f"{FRAMEWORK if _COUNTERS.fullmatch(path) else outside}/{path}", "other")
    return Name(_with_loss(path), "forward")


def gradients_outside(names: Iterable[Name], outside: str) -> dict[Name, Name]:
    """Puts the gradients of operations in no scope under their class: `Mean/Tile` is in no layer."""
    known = set(names)
    scopes = {name.path.split("/", 1)[0] for name in known if name.phase == "forward"} | {FRAMEWORK, PROGRAM}
    return {
        name: Name(f"{outside}/{name.path}", name.phase)
        for name in known
        if name.phase == "backward" and name.path.split("/", 1)[0] not in scopes
    }


def _backward(path: str, outside: str) -> Name:
    return Name(_with_loss(path) if "/" in path else f"{outside}/{path}", "backward")


def _with_loss(path: str) -> str:
    """Keras' loss has a scope of its own beside the model: it is the program's."""
    return f"{PROGRAM}/{path}" if path.startswith("compile_loss/") else path


def _gradient(path: str) -> str:
    """The forward operation's path of what TensorFlow 1 writes below a scope `gradients`; else ""."""
    parts = path.split("/")
    scopes = [i for i, part in enumerate(parts[:-1]) if _GRADIENTS.fullmatch(part)]
    if not scopes:
        return ""
    inside = parts[scopes[-1] + 1 :]
    # The scope of a gradient's operations is called after the forward one; so may a layer be: take the last.
    for i in reversed(range(len(inside) - 1)):
        if inside[i].endswith("_grad"):
            return "/".join([*inside[:i], inside[i].removesuffix("_grad"), *inside[i + 1 :]])
    return "/".join(inside)


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
    """Those that stay apart from all others once their numbers are off."""
    bases = Counter(_NUMBERED.sub(r"\1", scope) for scope in siblings)
    return {scope for scope in siblings if bases[_NUMBERED.sub(r"\1", scope)] == 1}


def _strip(scope: str, name: str, children: dict[str, set[str]], plain: dict[str, str]) -> None:
    plain[scope] = name
    inside = children.get(scope, set())
    alone = _alone(inside)
    for child in inside:
        clean = _NUMBERED.sub(r"\1", child) if child in alone else child
        _strip(f"{scope}/{child}", f"{name}/{clean}", children, plain)
