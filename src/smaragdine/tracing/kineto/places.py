"""Steps of a slice of PyTorch in which nobody announced any: the calls of the model.

A program that only predicts calls its model again and again. Each call that lies whole in the slice is a
step, up to the next one's beginning: what lies between is done for it. A wrong step is worse than none, so
calls that differ, or modules that do not take turns, are no steps.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from smaragdine.tracing.coverage import FRAMEWORK, INPUT, OPTIMIZER, PROGRAM, UNPLACED
from smaragdine.tracing.kineto.compiled import CallFollower, Compiled
from smaragdine.tracing.kineto.reader import ANNOTATIONS, TraceEvent, args_of

# Where each call of a Kineto trace belongs: the module it runs in, or the one whose forward it undoes.

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


class CallPlace(NamedTuple):
    path: str
    phase: int
    region: str = ""  # the compiled region it is in, by its compile id


_OUTSIDE = CallPlace(PROGRAM, UNDECIDED)


def places_of(
    calls: Sequence[TraceEvent],
    order: Sequence[int],
    start_ns: Sequence[int],
    end_ns: Sequence[int],
    forward_threads: dict[int, Any],
    compiled: Compiled,
) -> tuple[list[CallPlace], list[int | None]]:
    """The place of each call, and the call it runs in."""
    places = [_OUTSIDE] * len(calls)
    parents: list[int | None] = [None] * len(calls)
    open_by_thread: dict[Any, list[int]] = {}
    # A number is taken by the call that makes the node; those before it with the same number made none.
    by_sequence: dict[tuple[Any, int], CallPlace] = {}
    last_node: dict[Any, CallPlace] = {}
    followers: dict[int, CallFollower] = {}
    for at in order:
        call = calls[at]
        stack = open_by_thread.setdefault(call.tid, [])
        while stack and end_ns[stack[-1]] <= start_ns[at]:
            stack.pop()
        parent = parents[at] = stack[-1] if stack else None
        place = _OUTSIDE if parent is None else places[parent]
        stack.append(at)
        args = args_of(call)
        sequence, thread = args.sequence, args.forward_thread
        if call.name.startswith(ENGINE):
            if call.name == _ACCUMULATE:
                # The engine runs it right after the node that made the gradient.
                place = last_node.get(call.tid, CallPlace(UNPLACED, BACKWARD))
            else:
                origin = by_sequence.get((forward_threads.get(thread), sequence))
                place = (
                    CallPlace(UNPLACED, BACKWARD)
                    if origin is None
                    else CallPlace(origin.path, BACKWARD, origin.region)
                )
                last_node[call.tid] = place
        elif call.cat in ANNOTATIONS or call.name.startswith(PREFIX):
            place = _annotated(call.name, place)
        elif not thread and type(sequence) is int:
            if place.phase == UNDECIDED:
                place = CallPlace(place.path, FORWARD, place.region)
            elif place.phase == OPTIMIZING:
                # Optimizers want no gradients: it is the loss, in their closure.
                place = CallPlace(PROGRAM, FORWARD)
            by_sequence[call.tid, sequence] = place
        elif call.name.startswith(REGION):
            phase = FORWARD if place.phase == UNDECIDED else place.phase
            region = call.name.removeprefix(REGION).strip(": ")
            path = compiled.root(region) if place.path == PROGRAM else place.path
            place = CallPlace(path or place.path, phase, region)
        elif call.name.startswith(_EXCHANGE):
            place = CallPlace(FRAMEWORK, place.phase)
        elif parent in followers:
            below = followers[parent].path_of(call.name)
            place = (
                place if below is None else CallPlace(_below(place.path, below), place.phase, place.region)
            )
        graph = _GRAPH.match(call.name)
        if graph is not None:
            backward = place.phase == BACKWARD
            followers[at] = CallFollower(compiled.calls(graph[2], place.region, backward))
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


def _annotated(name: str, place: CallPlace) -> CallPlace:
    if name.startswith(PREFIX):
        # A module called in backward is recomputed there: the backward pass pays for it. One called in an
        # optimizer's step is called by its closure.
        phase = BACKWARD if place.phase == BACKWARD else FORWARD
        return CallPlace(name.removeprefix(PREFIX) or PROGRAM, phase)
    optimizer = _OPTIMIZER_STEP.match(name)
    if optimizer is not None:
        return CallPlace(f"{OPTIMIZER}/{operation(optimizer[1])}", OPTIMIZING)
    loader = _LOADER.match(name)
    if loader is not None:
        return CallPlace(f"{INPUT}/{operation(loader[1])}", OTHER)
    return place


FEWEST = 3  # calls; the last one only ends the one before
NO_STEPS = "no steps were announced"
REMEDY = 'mark them with smaragdine.mark("step_end", i)'
_FEW = f"{NO_STEPS}, and fewer than {FEWEST} calls of one module began in a slice; {REMEDY}"
# Of the time in modules: one that has less may be called whenever it likes.
_LEAST_BESIDE_IT = 0.01


@dataclass(frozen=True)
class CallSteps:
    spans: tuple[tuple[int, int, int], ...] = ()  # index, begin_ns, end_ns
    of: str = ""  # the module whose calls they are
    why_not: str = ""
    irregular: bool = False  # there are calls enough, and yet they are no steps

    @property
    def said(self) -> str:
        return f"{NO_STEPS}: those are the calls of {self.of}, each up to the next one's beginning"


@dataclass(frozen=True)
class _Outermost:
    at: int  # its number among all calls
    path: str
    tid: Any
    begin_ns: int
    end_ns: int


def call_steps(
    calls: Sequence[TraceEvent],
    order: Sequence[int],
    parents: Sequence[int | None],
    start_ns: Sequence[int],
    end_ns: Sequence[int],
    begin_ns: int,
    until_ns: int,
    marked: bool = True,
) -> CallSteps:
    """`order` is that of time; before `begin_ns` a call was under way whose beginning was not seen, and after
    `until_ns` the profiler was being stopped. Where modules are not `marked`, only compiled ones are seen."""
    around = _outermost_of(calls, order, parents)
    found = [
        _Outermost(at, calls[at].name.removeprefix(PREFIX), calls[at].tid, start_ns[at], end_ns[at])
        for at in order
        if around[at] == at and begin_ns <= start_ns[at] <= until_ns
    ]
    found = _whole(found)
    if not found:
        return CallSteps(why_not=_FEW if any(at is not None for at in around) else "")
    thread, path = _main(found)
    of_thread = [call for call in found if call.tid == thread]
    mine = [call for call in of_thread if call.path == path]
    if len(mine) < FEWEST or all("/" in call.path for call in of_thread):
        return CallSteps(why_not=_FEW)
    if any(call.tid != thread and not _replica(call, mine) for call in found):
        return _irregular("modules are called by several threads")
    if not _take_turns(of_thread, path):
        return _irregular(f"the calls of {path} and of other modules do not take turns")
    if not _alike(calls, around, mine[:-1]):
        return _irregular(f"the calls of {path} do not all run the same operations")
    if not marked and not _alike_between(calls, order, start_ns, mine):
        return _irregular(f"not the same operations run between the calls of {path}")
    spans = ((i, call.begin_ns, following.begin_ns) for i, (call, following) in enumerate(pairwise(mine)))
    return CallSteps(tuple(spans), path)


def _irregular(why: str) -> CallSteps:
    return CallSteps(why_not=f"{NO_STEPS}, and {why}; {REMEDY}", irregular=True)


def _outermost_of(
    calls: Sequence[TraceEvent], order: Sequence[int], parents: Sequence[int | None]
) -> list[int | None]:
    """The outermost call of a module that each call is in, or is; not in backward, where it is done again."""
    found: list[int | None] = [None] * len(calls)
    backward = [False] * len(calls)
    for at in order:
        parent = parents[at]
        if parent is not None:
            found[at], backward[at] = found[parent], backward[parent]
        backward[at] = backward[at] or calls[at].name.startswith(ENGINE)
        if found[at] is None and not backward[at] and calls[at].name.startswith(PREFIX):
            found[at] = at
    return found


def _whole(found: Sequence[_Outermost]) -> list[_Outermost]:
    """Without parts of a model whose call was under way when the slice began, in each thread. A part that is
    called by itself has a path in the model too, but only once the model was called."""
    begun = {call.tid for call in found if "/" in call.path}
    kept: list[_Outermost] = []
    for call in found:
        if "/" not in call.path:
            begun.discard(call.tid)
        if call.tid not in begun:
            kept.append(call)
    # In a call all the time: it runs beside whatever else there is.
    return kept + [call for call in found if call.tid in begun]


def _main(found: Sequence[_Outermost]) -> tuple[Any, str]:
    """The thread and the module whose calls hold the most time."""
    held_ns: Counter[tuple[Any, str]] = Counter()
    for call in found:
        held_ns[call.tid, call.path] += call.end_ns - call.begin_ns
    return held_ns.most_common(1)[0][0]


def _replica(call: _Outermost, mine: Sequence[_Outermost]) -> bool:
    """DataParallel calls copies of the model in threads of its own."""
    at = bisect_right(mine, call.begin_ns, key=lambda each: each.begin_ns) - 1
    return at >= 0 and call.path == mine[at].path and call.end_ns <= mine[at].end_ns


def _take_turns(found: Sequence[_Outermost], path: str) -> bool:
    """Whether the same other modules are called between any two calls of this one."""
    held_ns: Counter[str] = Counter()
    for call in found:
        held_ns[call.path] += call.end_ns - call.begin_ns
    least_ns = _LEAST_BESIDE_IT * held_ns.total()
    between: list[tuple[str, ...]] = []
    turn: list[str] | None = None
    for call in found:
        if call.path == path:
            between += [] if turn is None else [tuple(turn)]
            turn = []
        elif turn is not None and held_ns[call.path] >= least_ns:
            turn.append(call.path)
    return len(set(between)) == 1


def _alike(calls: Sequence[TraceEvent], around: Sequence[int | None], mine: Sequence[_Outermost]) -> bool:
    """Whether each of these calls made the same calls. A prompt and the tokens after it do not."""
    made: dict[int | None, Counter[str]] = {call.at: Counter() for call in mine}
    for at, outermost in enumerate(around):
        if outermost in made:
            made[outermost][calls[at].name] += 1
    first, *others = made.values()
    return all(each == first for each in others)


def _alike_between(
    calls: Sequence[TraceEvent], order: Sequence[int], start_ns: Sequence[int], mine: Sequence[_Outermost]
) -> bool:
    """Whether the thread did the same from each of these calls to the next. Another module may be called
    there, that nobody saw."""
    begins_ns = [call.begin_ns for call in mine]
    made: list[Counter[str]] = [Counter() for _ in mine]
    for at in order:
        if calls[at].tid == mine[0].tid and start_ns[at] >= begins_ns[0]:
            made[bisect_right(begins_ns, start_ns[at]) - 1][calls[at].name] += 1
    return all(each == made[0] for each in made[:-1])
