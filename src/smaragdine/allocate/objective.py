"""What an allocation costs.

`sum` is the original's: Σ (η·P̄ + (1−η)·P_limit)·t over GPUs, as if each could go on by itself. The others
are of synchronous training, where a step lasts as long as its slowest GPU and the all-reduce after it, and
the rest waits meanwhile at its wait power:

    T = max t + all-reduce,    E = Σ (P̄·t + P_wait·(T − t))

    sync    η·E + (1−η)·T·Σ P_limit
    energy  E, within a slowdown if one is given
    time    T (of equally fast allocations the one with the least energy)
    edp     E·T

A GPU with a batch of 0 is not part of the job: it takes no time, and nobody pays for its waiting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from smaragdine.allocate.model import Choices
from smaragdine.errors import UserError

Kind = Literal["sum", "sync", "energy", "time", "edp"]
OBJECTIVES: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True)
class Objective:
    kind: Kind
    eta: float = 0.5
    all_reduce_s: float = 0.0
    slowdown: float | None = None  # part of one, above the fastest step; for `energy`


@dataclass(frozen=True)
class Share:
    """What one GPU does in a step."""

    gpu: str
    batch: int
    power_limit_w: float
    time_s: float
    power_w: float
    wait_w: float


@dataclass(frozen=True)
class Allocation:
    shares: tuple[Share, ...]
    cost: float
    lower_bound: float  # of the cost of any allocation; equal to the cost where it is known to be the best

    @property
    def exact(self) -> bool:
        return self.lower_bound >= self.cost


def share(choices: Choices, batch: int, limit: int) -> Share:
    """`limit` is the number of the row."""
    used = batch > 0
    return Share(
        choices.gpu,
        batch,
        float(choices.power_limit_w[limit]),
        float(choices.time_s[limit, batch]) if used else 0.0,
        float(choices.power_w[limit, batch]) if used else 0.0,
        choices.wait_w or 0.0,
    )


def step_time_s(shares: Sequence[Share], all_reduce_s: float) -> float:
    return max((each.time_s for each in shares), default=0.0) + all_reduce_s


def energy_j(shares: Sequence[Share], all_reduce_s: float) -> float:
    """Of a synchronous step, waiting included."""
    step_s = step_time_s(shares, all_reduce_s)
    return math.fsum(
        each.power_w * each.time_s + each.wait_w * (step_s - each.time_s) for each in shares if each.batch
    )


def cost(objective: Objective, shares: Sequence[Share]) -> float:
    eta = objective.eta
    used = [each for each in shares if each.batch]
    if objective.kind == "sum":
        return math.fsum((eta * each.power_w + (1 - eta) * each.power_limit_w) * each.time_s for each in used)
    step_s = step_time_s(used, objective.all_reduce_s)
    if objective.kind == "time":
        return step_s
    energy = energy_j(used, objective.all_reduce_s)
    if objective.kind == "energy":
        return energy
    if objective.kind == "edp":
        return energy * step_s
    return eta * energy + (1 - eta) * step_s * math.fsum(each.power_limit_w for each in used)


def unit(objective: Objective) -> str:
    return {"time": "s", "edp": "J·s"}.get(objective.kind, "J")


def check(objective: Objective, gpus: Sequence[Choices], global_batch: int) -> None:
    """Whether there is anything to choose from, and all that the objective needs is known."""
    if not gpus:
        raise UserError("no GPU to allocate to", remedy="Name one or more: --gpu NAME=FILE")
    names = [each.gpu for each in gpus]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"GPU {name} is given twice", remedy="Give each a name of its own")
    if not 0 <= objective.eta <= 1:
        raise UserError(f"--eta {objective.eta:g} is not between 0 and 1")
    if objective.slowdown is not None and objective.kind != "energy":
        raise UserError("a slowdown is for the least energy within it", remedy="Use --objective energy")
    least, most = sum(each.lowest for each in gpus), sum(each.highest for each in gpus)
    if any(each.highest < each.lowest for each in gpus) or not least <= global_batch <= most:
        held = f"the GPUs hold {most} in all" if global_batch > most else f"{len(gpus)} GPUs need one each"
        raise UserError(
            f"no split can hold a global batch of {global_batch}",
            held,
            "Choose another batch, or other GPUs",
        )
    if objective.kind in ("sync", "energy", "edp"):
        for each in gpus:
            if each.wait_w is None:
                raise UserError(
                    f"the wait power of {each.gpu} is not known",
                    f"its profile has none, and --objective {objective.kind} needs it",
                    f"Give it: --wait-power {each.gpu}=W",
                )
