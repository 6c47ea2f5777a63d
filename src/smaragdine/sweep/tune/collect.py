"""Puts steps and energy together into slices."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from smaragdine.sweep.tune.energy import Energy
from smaragdine.sweep.tune.slices import Slice
from smaragdine.sweep.tune.steps import Step

BLOCKS = 5
UPDATES = 2  # of the energy counter in each block: its error there is a part of one step of the counter
SETTLE_STEPS = 2  # a GPU may still be working off steps that were announced before
PAUSE = 5.0  # a step so many times longer than usual has a checkpoint or the like in it


@dataclass(frozen=True)
class SliceOptions:
    steps: int = 20  # at least
    settle_s: float = 0.5  # dropped after a change of the limit
    skip: int = 10  # the program's first steps: compiling, choosing kernels


class Collector:
    """One slice after the other, of the steps since `begin`."""

    def __init__(self, energy: Energy, options: SliceOptions) -> None:
        self._energy = energy
        self._options = options
        self._settled_ns = 0
        self._steps: list[Step] = []
        self._early = 0  # steps that ended after the limit settled and are dropped all the same

    def begin(self, t_ns: int, settle: bool) -> None:
        """What ends before is not of this slice; `settle` after a change of the limit."""
        self._settled_ns = t_ns + (round(self._options.settle_s * 1e9) if settle else 0)
        self._early = SETTLE_STEPS if settle else 0
        self._steps.clear()
        self._energy.forget()

    def take(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if step.begin_ns < self._settled_ns:
                continue
            if self._early:
                self._early -= 1
                continue
            self._steps.append(step)

    def made(self, limit_w: float, steps: int, span_s: float) -> Slice | None:
        """The slice, once it is long enough. `steps` and `span_s` as a Slice has them."""
        usable = self._usable()
        if sum(step.count for step in usable) < self._options.steps:
            return None
        blocks = _blocks(usable, UPDATES * self._energy.period_ns)
        if len(blocks) < BLOCKS:
            return None
        counts = [sum(step.count for step in block) for block in blocks]
        times_s = [sum(s.end_ns - s.begin_ns for s in block) * 1e-9 for block in blocks]
        energies_j = [sum(self._energy.between_j(s.begin_ns, s.end_ns) for s in block) for block in blocks]
        return Slice(
            limit_w,
            tuple(time_s / count for time_s, count in zip(times_s, counts, strict=True)),
            tuple(energy_j / count for energy_j, count in zip(energies_j, counts, strict=True)),
            steps,
            span_s,
        )

    def _usable(self) -> list[Step]:
        covered_ns = self._energy.covered_ns()
        if covered_ns is None or not self._steps:
            return []
        # Also those outside the readings: they say what is usual.
        usual = statistics.median((step.end_ns - step.begin_ns) / step.count for step in self._steps)
        return [
            step
            for step in self._steps
            if covered_ns[0] <= step.begin_ns
            and step.end_ns <= covered_ns[1]
            and step.end_ns - step.begin_ns <= PAUSE * usual * step.count
        ]


def _blocks(steps: Sequence[Step], length_ns: int) -> list[list[Step]]:
    """Whole blocks of at least that length; what is left over at the end belongs to none."""
    blocks: list[list[Step]] = []
    block: list[Step] = []
    length = 0
    for step in steps:
        block.append(step)
        length += step.end_ns - step.begin_ns
        if length >= length_ns:
            blocks.append(block)
            block, length = [], 0
    return blocks
