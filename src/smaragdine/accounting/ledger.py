"""Sums per row while chunks of events go by: energy, busy time, count, and the spread over steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from smaragdine.accounting.engine import ALL_LATER, CHUNK, Chunk, Shares, sum_by

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class StepLines(NamedTuple):
    """Energy per step and row: one line each."""

    step: Ints
    key: Ints
    energy_j: Floats


class Entry(NamedTuple):
    """What one chunk adds to the rows `key`."""

    key: Ints
    energy_j: Floats
    busy_ns: Floats
    started: Ints  # how many events
    idle_j: float
    steps: StepLines | None
    done_step: int
    first_ns: int
    last_ns: int


def entry(chunk: Chunk, shares: Shares, keys: int) -> Entry:
    # A column per possible key is fastest while there are few; many names need their own numbering.
    rows, code = np.arange(keys), chunk.key
    if keys > 4 * CHUNK:
        rows, code = np.unique(chunk.key, return_inverse=True)
    started = code[chunk.carried :]
    length_ns = chunk.end_ns[chunk.carried :] - chunk.start_ns[chunk.carried :]
    paid = shares.of_pieces(code)
    return Entry(
        key=rows,
        energy_j=sum_by(paid, shares.energy_j, rows.size),
        busy_ns=sum_by(started, length_ns, rows.size),
        started=np.bincount(started, minlength=rows.size),
        idle_j=shares.idle_j,
        steps=_step_lines(chunk, shares, rows, code),
        done_step=chunk.done_step,
        first_ns=int(chunk.start_ns.min()) if chunk.start_ns.size else ALL_LATER,
        last_ns=int(chunk.end_ns.max()) if chunk.end_ns.size else -ALL_LATER,
    )


def _step_lines(chunk: Chunk, shares: Shares, rows: Ints, code: Ints) -> StepLines | None:
    steps, number = np.unique(chunk.step, return_inverse=True)
    if steps.size == 0 or steps[-1] < 0:
        return None
    lines, line = np.unique(number * rows.size + code, return_inverse=True)
    energy_j = sum_by(shares.of_pieces(line), shares.energy_j, lines.size)
    step, key = steps[lines // rows.size], rows[lines % rows.size]
    return StepLines(step[step >= 0], key[step >= 0], energy_j[step >= 0])


class Ledger:
    """The running sums of one device."""

    def __init__(self, keys: int) -> None:
        self.energy_j = np.zeros(keys)
        self.busy_ns = np.zeros(keys)
        self.count = np.zeros(keys, dtype=np.int64)
        self.idle_j = 0.0
        self.first_ns, self.last_ns = ALL_LATER, -ALL_LATER
        self.steps = 0
        self.step_mean_j = np.zeros(keys)
        self._step_m2 = np.zeros(keys)
        self._open: dict[int, Floats] = {}

    def add(self, added: Entry) -> None:
        self.energy_j[added.key] += added.energy_j
        self.busy_ns[added.key] += added.busy_ns
        self.count[added.key] += added.started
        self.idle_j += added.idle_j
        self.first_ns, self.last_ns = min(self.first_ns, added.first_ns), max(self.last_ns, added.last_ns)
        if added.steps is not None:
            begins = np.flatnonzero(np.diff(added.steps.step, prepend=-1))
            for begin, end in zip(begins, [*begins[1:], added.steps.step.size], strict=True):
                sums = self._open.setdefault(int(added.steps.step[begin]), np.zeros(self.energy_j.size))
                sums[added.steps.key[begin:end]] += added.steps.energy_j[begin:end]
        for step in [step for step in self._open if step < added.done_step]:
            self._close(self._open.pop(step))

    def close(self) -> None:
        for sums in self._open.values():
            self._close(sums)
        self._open.clear()

    def step_std_j(self) -> Floats:
        """Unknown (nan) with fewer than two steps."""
        return np.sqrt(self._step_m2 / (self.steps - 1 if self.steps > 1 else np.nan))

    def _close(self, sums: Floats) -> None:
        """Welford's way: exact enough whatever the mean, and no step needs to be kept."""
        self.steps += 1
        away_j = sums - self.step_mean_j
        self.step_mean_j += away_j / self.steps
        self._step_m2 += away_j * (sums - self.step_mean_j)
