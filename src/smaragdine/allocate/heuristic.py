"""`heuristic`: the original's shortcut: the strongest GPU at its lowest limit, the rest searched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from smaragdine.allocate.model import Choices
from smaragdine.allocate.objective import Allocation, Objective, check
from smaragdine.allocate.optimal import longest_step_s, optimal
from smaragdine.errors import UserError


def heuristic(
    gpus: Sequence[Choices], objective: Objective, global_batch: int, strongest: str | None = None
) -> Allocation:
    """The first GPU is the strongest unless another is named. Its batch is searched too: only its limit is
    given, so the search is the exact one with fewer limits. A slowdown is one of what the GPUs can do without
    that."""
    check(objective, gpus, global_batch)
    name = gpus[0].gpu if strongest is None else strongest
    if name not in [each.gpu for each in gpus]:
        raise UserError(f"no GPU named {name}", remedy=f"There are: {', '.join(each.gpu for each in gpus)}")
    held = [at_lowest_limit(each) if each.gpu == name else each for each in gpus]
    return optimal(held, objective, global_batch, longest_step_s(gpus, objective, global_batch))


def at_lowest_limit(each: Choices) -> Choices:
    row = slice(int(each.power_limit_w.argmin()), int(each.power_limit_w.argmin()) + 1)
    return dataclasses.replace(
        each, power_limit_w=each.power_limit_w[row], time_s=each.time_s[row], power_w=each.power_w[row]
    )
