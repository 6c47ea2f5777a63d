"""Where each call of a Kineto trace belongs: the module it runs in, or the one whose forward it undoes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from smaragdine.tracing.assemble.coverage import FRAMEWORK, INPUT, OPTIMIZER, PROGRAM, UNPLACED
from smaragdine.tracing.assemble.kineto_compiled import Compiled, Follower

PREFIX = "smaragdine:"  # of the annotations the hook makes
ENGINE = "autograd::engine::evaluate_function: "
REGION = "Torch-Compiled Region"

FORWARD, BACKWARD, OPTIMIZING, OTHER = range(4)
UNDECIDED = -1

_ACCUMULATE = ENGINE + "torch::autograd::AccumulateGrad"
_OPTIMIZER_STEP = re.compile(r"Optimizer\.(?:step|zero_grad)#(.+)\.(?:step|zero_grad)$")
_LOADER = re.compile(r"enumerate\(DataLoader\)#([^.]+)\.")
_GRAPH = re.compile(r"## Call (\w+) (\w+) ##")
# Gradients and parameters that travel between processes are no module's work.
_EXCHANGE = ("c10d::", "nccl:", "gloo:", "record_param_comms", "torch.distributed.ddp.reducer::")


class Args(Protocol):
    @property
    def sequence(self) -> Any: ...
    @property
    def forward_thread(self) -> Any: ...


class Call(Protocol):
    name: str
    cat: str | None
    tid: Any

    @property
    def args(self) -> Args: ...


class Place(NamedTuple):
    path: str
    phase: int
    region: str = ""  # the compiled region it is in, by its compile id


_OUTSIDE = Place(PROGRAM, UNDECIDED)


def places_of(
    calls: Sequence[Call],
    order: Sequence[int],
    start_ns: Sequence[int],
    end_ns: Sequence[int],
    forward_threads: dict[int, Any],
    compiled: Compiled,
) -> tuple[list[Place], list[int | None]]:
    """The place of each call, and the call it runs in."""
    places = [_OUTSIDE] * len(calls)
    parents: list[int | None] = [None] * len(calls)
    open_by_thread: dict[Any, list[int]] = {}
    # A number is taken by the call that makes the node; those before it with the same number made none.
    by_sequence: dict[tuple[Any, int], Place] = {}
    last_node: dict[Any, Place] = {}
    followers: dict[int, Follower] = {}
    for at in order:
        call = calls[at]
        stack = open_by_thread.setdefault(call.tid, [])
        while stack and end_ns[stack[-1]] <= start_ns[at]:
            stack.pop()
        parent = parents[at] = stack[-1] if stack else None
        place = _OUTSIDE if parent is None else places[parent]
        stack.append(at)
        sequence, thread = call.args.sequence, call.args.forward_thread
        if call.name.startswith(ENGINE):
            if call.name == _ACCUMULATE:
                # The engine runs it right after the node that made the gradient.
                place = last_node.get(call.tid, Place(UNPLACED, BACKWARD))
            else:
                origin = by_sequence.get((forward_threads.get(thread), sequence))
                place = (
                    Place(UNPLACED, BACKWARD)
                    if origin is None
                    else Place(origin.path, BACKWARD, origin.region)
                )
                last_node[call.tid] = place
        elif call.cat == "user_annotation" or call.name.startswith(PREFIX):
            place = _annotated(call.name, place)
        elif not thread and type(sequence) is int:
            if place.phase == UNDECIDED:
                place = Place(place.path, FORWARD, place.region)
            elif place.phase == OPTIMIZING:
                # Optimizers want no gradients: it is the loss, in their closure.
                place = Place(PROGRAM, FORWARD)
            by_sequence[call.tid, sequence] = place
        elif call.name.startswith(REGION):
            phase = FORWARD if place.phase == UNDECIDED else place.phase
            region = call.name.removeprefix(REGION).strip(": ")
            path = compiled.root(region) if place.path == PROGRAM else place.path
            place = Place(path or place.path, phase, region)
        elif call.name.startswith(_EXCHANGE):
            place = Place(FRAMEWORK, place.phase)
        elif parent in followers:
            below = followers[parent].path_of(call.name)
            place = place if below is None else Place(_below(place.path, below), place.phase, place.region)
        graph = _GRAPH.match(call.name)
        if graph is not None:
            backward = place.phase == BACKWARD
            followers[at] = Follower(compiled.calls(graph[2], place.region, backward))
        places[at] = place
    return places, parents


def operation(name: str) -> str:
    """What a person calls it. A slash would read as a path."""
    graph = _GRAPH.match(name)
    if graph is not None:
        return graph[1]
    return name.removeprefix("aten::").removeprefix("torch::autograd::").replace("/", ".") or "unnamed"


def is_generated(name: str) -> bool:
    """Whether a call stands for compiled code as a whole, and so says nothing of the kernels in it."""
    return name.startswith((REGION, "## Call ", "CompiledFunction"))


def _below(path: str, below: str) -> str:
    """A module's path in a compiled region; one that begins with a slash starts at the model itself."""
    if not below.startswith("/"):
        return f"{path}/{below}" if below else path
    below = below[1:]
    return below if path == PROGRAM or f"{below}/".startswith(f"{path}/") else path


def _annotated(name: str, place: Place) -> Place:
    if name.startswith(PREFIX):
        # A module called in backward is recomputed there: the backward pass pays for it. One called in an
        # optimizer's step is called by its closure.
        phase = BACKWARD if place.phase == BACKWARD else FORWARD
        return Place(name.removeprefix(PREFIX) or PROGRAM, phase)
    optimizer = _OPTIMIZER_STEP.match(name)
    if optimizer is not None:
        return Place(f"{OPTIMIZER}/{operation(optimizer[1])}", OPTIMIZING)
    loader = _LOADER.match(name)
    if loader is not None:
        return Place(f"{INPUT}/{operation(loader[1])}", OTHER)
    return place
