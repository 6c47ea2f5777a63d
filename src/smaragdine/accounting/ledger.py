"""Adds up what chunks of events say of each row: energy, busy time, count, and the spread over steps.

`columns` and `blocks` turn a table of events into the plain numbers that `integral` works on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.accounting.integral import (
    ALL_LATER,
    CHUNK,
    Block,
    Chunk,
    Levels,
    Shares,
    Sweep,
    pieces,
    share,
    sum_by,
)
from smaragdine.arrays import Floats, Ints
from smaragdine.arrow import pc
from smaragdine.errors import UserError


class StepLines(NamedTuple):
    """Energy per step and row, one line for each pair."""

    step: Ints
    key: Ints
    energy_j: Floats


class Entry(NamedTuple):
    """What one chunk adds to the rows `key`."""

    key: Ints
    energy_j: Floats
    busy_ns: Floats  # in which its events pay: what lies inside them on their lane pays for itself
    started: Ints  # how many events
    idle_j: float
    steps: StepLines | None
    done_step: int
    span_ns: tuple[int, int]  # from its first start to its last end


def entry(chunk: Chunk, power: Levels, keys: int) -> Entry:
    paying = pieces(chunk)
    shares = share(chunk, power, paying)
    rows, code = _numbered(chunk.key, keys)
    started = code[chunk.carried :]
    return Entry(
        key=rows,
        energy_j=sum_by(shares.of_pieces(code), shares.energy_j, rows.size),
        busy_ns=sum_by(code[paying.event], paying.end_ns - paying.start_ns, rows.size),
        started=np.bincount(started, minlength=rows.size),
        idle_j=shares.idle_j,
        steps=_step_lines(chunk, shares, rows, code),
        done_step=chunk.done_step,
        span_ns=_span(chunk),
    )


def entry_compiled(chunk: Chunk, power: Levels, keys: int, sweep: Sweep) -> Entry | None:
    """The same by the compiled loop; None if events of a lane overlap."""
    first, last = np.searchsorted(power.edge_ns, [chunk.begin_ns, chunk.until_ns], side="right")
    bits = (2 * chunk.start_ns.size).bit_length() + (chunk.until_ns - chunk.begin_ns).bit_length()
    if bits > 62:
        return None  # an event's time and number do not fit one word
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
    """The rows that a chunk may have, and which of them each event belongs to.

    With few rows it is fastest to keep a place for every one; with many, only those that occur get a number.
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
        """nan if there are fewer than two steps."""
        return np.sqrt(self._step_m2 / (self.steps - 1 if self.steps > 1 else np.nan))

    def _close(self, sums: Floats) -> None:
        """Welford's method: exact enough for any mean, and no step must be kept."""
        self.steps += 1
        away_j = sums - self.step_mean_j
        self.step_mean_j += away_j / self.steps
        self._step_m2 += away_j * (sums - self.step_mean_j)


# A table of events as blocks of plain numbers, without a copy of the table.

# If more blocks than this wait for stragglers, it is cheaper to sort all events once.
WAITING_BLOCKS = 3
MOST_LANES = 1 << 16
LONGEST_NS = 1 << 61  # 73 years: sums and differences of times must fit 64 bits


@dataclass(frozen=True)
class Columns:
    """A table of events (schema EVENTS), its texts as lists, and what is needed to read it block by block."""

    table: pa.Table
    names: list[str]
    phases: list[str]
    devices: list[str]
    first_ns: int
    last_ns: int
    later_ns: Ints  # per block: the earliest start in all later ones
    later_step: Ints
    order: Ints | None  # nearly by start, if the table is in much disorder

    @cached_property
    def whole(self) -> dict[str, npt.NDArray[np.signedinteger[Any]] | None]:
        """Whole columns, None for one of nulls: only tables in much disorder need them."""
        return {
            name: None if column.null_count == len(column) else _numbers(column)
            for name, column in zip(self.table.column_names, self.table.columns, strict=True)
        }

    @property
    def keys(self) -> int:
        """How many keys rows may have: name × phase, where phase 0 is none."""
        return len(self.names) * (len(self.phases) + 1)

    def key_names(self, key: Ints) -> tuple[list[str], list[str | None]]:
        name, phase = np.divmod(key, len(self.phases) + 1)
        phases: list[str | None] = [None, *self.phases]
        return [self.names[i] for i in name], [phases[i] for i in phase]


def columns(events: pa.Table) -> Columns:
    """Checks the events first: anybody may have written them."""
    for name in ("name", "device", "start_ns", "duration_ns"):
        if events[name].null_count:
            raise UserError(f"{events[name].null_count:,} events have no {name}", remedy="Write them anew")
    events = events.unify_dictionaries()
    texts = {name: _dictionary(events[name]) for name in ("name", "phase", "device")}
    for name, most in (("lane", MOST_LANES), ("step", ALL_LATER)):
        # In `integral` numbers below 0 mean none, and lanes are places in a table.
        extremes = pc.min_max(events[name]).as_py()
        if (extremes["min"] or 0) < 0 or (extremes["max"] or 0) >= most:
            codes = pc.dictionary_encode(events[name].combine_chunks()).indices.cast(pa.int64())
            events = events.set_column(events.schema.get_field_index(name), name, codes)
    order, later_ns, first_ns, last_ns = _later(events)
    return Columns(
        table=events,
        names=texts["name"],
        phases=texts["phase"],
        devices=texts["device"],
        first_ns=first_ns,
        last_ns=last_ns,
        later_ns=later_ns,
        later_step=_later_steps(events, order),
        order=order,
    )


def device_counts(source: Columns) -> dict[str, int]:
    """How many events each device has. If there is one device only, nothing is counted."""
    if len(source.devices) == 1:
        return {source.devices[0]: source.table.num_rows} if source.table.num_rows else {}
    counts = source.table["device"].value_counts().to_pylist()
    return {pair["values"]: pair["counts"] for pair in counts}


def blocks(source: Columns, device: str) -> Iterator[Block]:
    """One device's events in the table's order, or by start if that order is hopeless."""
    wanted = source.devices.index(device)
    for i, rows in enumerate(_slices(source.table.num_rows)):
        read = _reader(source, rows)
        ours = None
        if len(source.devices) > 1:
            ours = read("device") == wanted
            ours = None if ours.all() else ours
        start_ns, duration_ns, name, phase, lane, step = (
            read(column) if ours is None else read(column)[ours]
            for column in ("start_ns", "duration_ns", "name", "phase", "lane", "step")
        )
        key = name * (len(source.phases) + 1)
        key += phase + 1
        end_ns = start_ns + duration_ns
        yield Block(start_ns, end_ns, key, lane, step, int(source.later_ns[i]), int(source.later_step[i]))


def _reader(source: Columns, rows: slice) -> Callable[[str], Ints]:
    if source.order is None:
        return lambda name: _ints(source.table[name].slice(rows.start, rows.stop - rows.start))
    picked = source.order[rows]

    def read(name: str) -> Ints:
        column = source.whole[name]
        return np.full(picked.size, -1) if column is None else column[picked].astype(np.int64, copy=False)

    return read


def _later(events: pa.Table) -> tuple[Ints | None, Ints, int, int]:
    """An order by start if too many events would have to wait; per block the earliest start of all later
    blocks; the first start and the last end."""
    lowest: list[int] = []
    highest: list[int] = []
    ends: list[int] = []
    for rows in _slices(events.num_rows):
        part = events.slice(rows.start, rows.stop - rows.start)
        start_ns, duration_ns = _ints(part["start_ns"]), _ints(part["duration_ns"])
        if int(duration_ns.min()) < 0 or int(duration_ns.max()) > LONGEST_NS:
            raise UserError("the events cannot be accounted", "some have a duration below 0 or of centuries")
        lowest.append(int(start_ns.min()))
        highest.append(int(start_ns.max()))
        ends.append(int((start_ns + duration_ns).max()))
    if not lowest:
        return None, np.zeros(0, dtype=np.int64), 0, 0
    if max(ends) - min(lowest) > LONGEST_NS:
        raise UserError("the events cannot be accounted", "from first to last they span centuries")
    later_ns = _suffix_min(lowest)
    waits = np.arange(len(lowest)) - np.searchsorted(np.maximum.accumulate(highest), later_ns, side="left")
    order = None
    if waits.mean() > WAITING_BLOCKS:
        order, later_ns = _by_start(_ints(events["start_ns"]), min(lowest), max(highest))
    return order, later_ns, min(lowest), max(ends)


def _by_start(start_ns: Ints, first_ns: int, last_ns: int) -> tuple[Ints, Ints]:
    """An order by start that is good enough for chunks, and per block the earliest start of all later blocks.

    Sixteen bits of the time bring events near their neighbours, and numpy sorts 16-bit numbers by radix, ten
    times faster.
    """
    shift = max(0, (last_ns - first_ns).bit_length() - 16)
    bucket = np.empty(start_ns.size, dtype=np.uint16)
    for rows in _slices(start_ns.size):
        bucket[rows] = (start_ns[rows] - first_ns) >> shift
    begins = [rows.start for rows in _slices(start_ns.size)]
    if int(np.bincount(bucket).max()) > CHUNK:  # far outliers push all others into a few buckets
        order = np.argsort(start_ns, kind="stable")
        return order, _suffix_min(start_ns[order[begins]].tolist())
    order = np.argsort(bucket, kind="stable")
    return order, _suffix_min([first_ns + (int(bucket[order[begin]]) << shift) for begin in begins])


def _later_steps(events: pa.Table, order: Ints | None) -> Ints:
    step = events["step"]
    if step.null_count == len(step):
        return np.full(len(_slices(len(step))), ALL_LATER)
    if order is None:
        parts = [step.slice(rows.start, rows.stop - rows.start) for rows in _slices(len(step))]
    else:
        in_one = step.combine_chunks()
        parts = [in_one.take(pa.array(order[rows])) for rows in _slices(len(step))]
    lowest = [pc.min(part).as_py() for part in parts]
    return _suffix_min([ALL_LATER if low is None else low for low in lowest])


def _suffix_min(lowest: list[int]) -> Ints:
    later = np.array([*lowest[1:], ALL_LATER], dtype=np.int64)
    return np.minimum.accumulate(later[::-1])[::-1]


def _slices(count: int) -> list[slice]:
    return [slice(begin, min(begin + CHUNK, count)) for begin in range(0, count, CHUNK)]


def _dictionary(column: pa.ChunkedArray) -> list[str]:
    return column.chunk(0).dictionary.to_pylist() if column.num_chunks else []


def _ints(column: pa.ChunkedArray) -> Ints:
    """Whole numbers or a dictionary's codes, -1 for null; not copied if they are int64 without nulls."""
    if column.null_count == len(column):
        return np.full(len(column), -1, dtype=np.int64)
    return _numbers(column).astype(np.int64, copy=False)


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[np.signedinteger[Any]]:
    if pa.types.is_dictionary(column.type):
        column = pa.chunked_array([chunk.indices for chunk in column.chunks])
    return (pc.fill_null(column, -1) if column.null_count else column).to_numpy()
