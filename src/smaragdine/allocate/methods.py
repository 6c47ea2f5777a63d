"""All methods on the same GPUs, each timed, and what there is to say about their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smaragdine.allocate.baseline import baseline
from smaragdine.allocate.brute_force import MOST, allocations, brute_force
from smaragdine.allocate.heuristic import heuristic
from smaragdine.allocate.model import Choices, Model
from smaragdine.allocate.objective import Allocation, Objective, check, step_time_s
from smaragdine.allocate.optimal import longest_step_s, optimal
from smaragdine.allocate.profile import Profile
from smaragdine.allocate.ties import better, highest_cost, preferred
from smaragdine.allocate.uncertainty import standard_error
from smaragdine.errors import UserError
from smaragdine.units import watts

METHODS = ("baseline", "heuristic", "brute-force", "optimal")


@dataclass(frozen=True)
class Tie:
    """What an answer was preferred to: the cheapest, which it cannot be told from."""

    cheapest: Allocation
    margin: float  # of cost: what the profiles' repeats do not resolve


@dataclass(frozen=True)
class Answer:
    method: str
    objective: Objective
    allocation: Allocation
    seconds: float  # that the method took
    too_slow: bool = False  # its steps last longer than the objective's slowdown allows
    standard_error: float | None = None  # of the cost, from the profiles' repeats
    tie: Tie | None = None


def answer(
    method: str,
    gpus: Sequence[Choices],
    objective: Objective,
    global_batch: int,
    strongest: str | None = None,
    profiles: Mapping[str, Profile] | None = None,
    model: Model = "monotone",
) -> Answer:
    """With the `profiles` behind the choices: how sure the cost is, and of allocations that cannot be told
    apart the one that `ties` prefers."""
    ways: Mapping[str, Callable[[], Allocation]] = {
        "baseline": lambda: baseline(gpus, objective, global_batch),
        "heuristic": lambda: heuristic(gpus, objective, global_batch, strongest),
        "brute-force": lambda: brute_force(gpus, objective, global_batch),
        "optimal": lambda: optimal(gpus, objective, global_batch),
    }
    if method not in ways:
        raise UserError(f"no method named {method}", remedy=f"There are: {', '.join(METHODS)}")
    check(objective, gpus, global_batch)
    begin_ns = time.perf_counter_ns()
    allocation, tie = ways[method](), None
    error = standard_error(allocation, profiles, model, objective) if profiles is not None else None
    if profiles is not None and method in ("brute-force", "optimal"):
        profiled = {gpu: (profile.batches[0], profile.batches[-1]) for gpu, profile in profiles.items()}
        margin = error or 0.0
        if method == "optimal":
            chosen = preferred(gpus, objective, global_batch, allocation, margin, profiled)
        else:
            most = highest_cost(allocation, margin)
            chosen = brute_force(gpus, objective, global_batch, most, profiled)
        if better(chosen, allocation, profiled):
            allocation, tie = chosen, Tie(allocation, margin)
            error = standard_error(allocation, profiles, model, objective)
    seconds = (time.perf_counter_ns() - begin_ns) * 1e-9
    too_slow = _too_slow(allocation, gpus, objective, global_batch)
    return Answer(method, objective, allocation, seconds, too_slow, error, tie)


def _too_slow(
    allocation: Allocation, gpus: Sequence[Choices], objective: Objective, global_batch: int
) -> bool:
    longest_s = longest_step_s(gpus, objective, global_batch)
    if longest_s is None:
        return False
    return step_time_s(allocation.shares, objective.all_reduce_s) > longest_s * (1 + 1e-9)


def left_out(gpus: Sequence[Choices], global_batch: int) -> dict[str, str]:
    """Methods that all GPUs together are too much for, and why."""
    count = allocations(gpus, global_batch)
    if count <= MOST:
        return {}
    return {"brute-force": f"{count:.1e} allocations are too many to try"}


def warnings(answers: Sequence[Answer], profiles: Mapping[str, Profile]) -> list[str]:
    """Where answers rest on what nobody measured."""
    found: list[str] = []
    for gpu, profile in profiles.items():
        low, high = profile.batches[0], profile.batches[-1]
        outside = _by_batch(answers, gpu, lambda share, low=low, high=high: not low <= share.batch <= high)
        if outside:
            found.append(f"{gpu}: batch {outside} outside what was profiled, {low}–{high}")
        lowest_w = min(point.energy_j / point.time_s for point in profile.points.values())
        least_w = profile.idle_w if profile.idle_w is not None else lowest_w / 2
        weak = [
            share
            for each in answers
            for share in each.allocation.shares
            if share.gpu == gpu and share.batch and share.power_w < least_w
        ]
        if weak:
            worst = min(weak, key=lambda share: share.power_w)
            found.append(
                f"{gpu}: the model's mean power of {watts(worst.power_w)} for batch {worst.batch} at "
                f"{worst.power_limit_w:g} W is not possible; the lowest measured is {watts(lowest_w)}"
            )
    return found


def _by_batch(answers: Sequence[Answer], gpu: str, which: Callable[[Any], bool]) -> str:
    """1874 (heuristic, optimal) and 2048 (baseline)."""
    methods: dict[int, list[str]] = {}
    for each in answers:
        for share in each.allocation.shares:
            if share.gpu == gpu and share.batch and which(share):
                methods.setdefault(share.batch, []).append(each.method)
    return " and ".join(f"{batch} ({', '.join(names)})" for batch, names in methods.items())


def answers_json(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The methods as the JSON has them; a bound, a standard error, a tie and that it is too slow only where
    they say something."""
    return [
        {
            "method": each.method,
            "objective": each.objective.kind,
            "cost": each.allocation.cost,
            "seconds": each.seconds,
            "allocation": allocation_json(each.allocation),
            **({"too_slow": True} if each.too_slow else {}),
            **({} if each.allocation.exact else {"lower_bound": each.allocation.lower_bound}),
            **({} if each.standard_error is None else {"standard_error": each.standard_error}),
            **({} if each.tie is None else {"tie": _tie_json(each.tie)}),
        }
        for each in answers
    ]


def _tie_json(tie: Tie) -> dict[str, Any]:
    return {
        "cost": tie.cheapest.cost,
        "margin": tie.margin,
        "allocation": allocation_json(tie.cheapest),
    }


def allocation_json(allocation: Allocation) -> list[dict[str, Any]]:
    return [
        {"gpu": share.gpu, "batch": share.batch, "power_limit_w": share.power_limit_w}
        for share in allocation.shares
    ]
