"""`baseline`: an even split, as if the GPUs were equal, with the best limits for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from smaragdine.allocate.model import Choices
from smaragdine.allocate.objective import Allocation, Objective, check
from smaragdine.allocate.optimal import longest_step_s, optimal


def baseline(gpus: Sequence[Choices], objective: Objective, global_batch: int) -> Allocation:
    """A slowdown is of the best split: where an even one is slower at any limits, its fastest counts."""
    check(objective, gpus, global_batch)
    split = even_split(gpus, global_batch)
    held = [dataclasses.replace(each, lowest=b, highest=b) for each, b in zip(gpus, split, strict=True)]
    return optimal(held, objective, global_batch, longest_step_s(gpus, objective, global_batch))


def even_split(gpus: Sequence[Choices], global_batch: int) -> list[int]:
    """Equal batches, the first GPUs one more where that does not go even; what a full one cannot take goes on
    to the others."""
    split = [0] * len(gpus)
    room = list(range(len(gpus)))
    while (left := global_batch - sum(split)) > 0 and room:
        each, more = divmod(left, len(room))
        for n, g in enumerate(room):
            split[g] = min(gpus[g].highest, split[g] + each + (n < more))
        room = [g for g in room if split[g] < gpus[g].highest]
    return split
