"""Sums per row while chunks of events go by: energy, busy time, count, and the spread over steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from smaragdine.accounting.compiled import Sweep
from smaragdine.accounting.engine import ALL_LATER, CHUNK, Chunk, Levels, Shares, share, sum_by
from smaragdine.arrays import Floats, Ints


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
    span_ns: tuple[int, int]  # from its first start to its last end


def entry(chunk: Chunk, power: Levels, keys: int) -> Entry:
    shares = share(chunk, power)
    rows, code = _numbered(chunk.key, keys)
    started = code[chunk.carried :]
    length_ns = chunk.end_ns[chunk.carried :] - chunk.start_ns[chunk.carried :]
    return Entry(
        key=rows,
        energy_j=sum_by(shares.of_pieces(code), shares.energy_j, rows.size),
        busy_ns=sum_by(started, length_ns, rows.size),
        started=np.bincount(started, minlength=rows.size),
        idle_j=shares.idle_j,
        steps=_step_lines(chunk, shares, rows, code),
        done_step=chunk.done_step,
        span_ns=_span(chunk),
    )


def entry_compiled(chunk: Chunk, power: Levels, keys: int, sweep: Sweep) -> Entry | None:
    """As `entry`; None where events of a lane overlap."""
    first, last = np.searchsorted(power.edge_ns, [chunk.begin_ns, chunk.until_ns], side="right")
    bits = (2 * chunk.start_ns.size).bit_length() + (chunk.until_ns - chunk.begin_ns).bit_length()
    if bits > 62:
        return None  # time and number of an event do not fit one word
    rows, code = _numbered(chunk.key, keys)
    energy_j, key_j, busy_ns, started, idle_j, overlap = sweep(
        chunk.start_ns,
        chunk.end_ns,
        chunk.lane,
        code,
        chunk.begin_ns,
        chunk.until_ns,
        power.edge_ns[first:last],
        power.power_w[first : last + 1],
        chunk.carried,
        rows.size,
    )
    if overlap:
        return None
    steps = _step_lines(chunk, Shares(None, energy_j, idle_j), rows, code)
    return Entry(rows, key_j, busy_ns, started, idle_j, steps, chunk.done_step, _span(chunk))


def _numbered(key: Ints, keys: int) -> tuple[Ints, Ints]:
    """The rows a chunk may have, and which of them each event is of.

    A place for every possible row is fastest while there are few; many names need their own numbering.
    """
    return (np.arange(keys), key) if keys <= 4 * CHUNK else np.unique(key, return_inverse=True)


def _span(chunk: Chunk) -> tuple[int, int]:
    if not chunk.start_ns.size:
        return ALL_LATER, -ALL_LATER
    return int(chunk.start_ns.min()), int(chunk.end_ns.max())


def _step_lines(chunk: Chunk, shares: Shares, rows: Ints, code: Ints) -> StepLines | None:
    if not chunk.step.size or int(chunk.step.max()) < 0:
        return None
    steps, number = np.unique(chunk.step, return_inverse=True)
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
        first_ns, last_ns = added.span_ns
        self.first_ns, self.last_ns = min(self.first_ns, first_ns), max(self.last_ns, last_ns)
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
