"""Turns the raw traces that a run left into the events, edges and windows of its recording."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.arrays import Ints
from smaragdine.arrow import pc
from smaragdine.errors import UserError
from smaragdine.recording.damage import oddity
from smaragdine.recording.folder import count_rows
from smaragdine.recording.format import CALLS_OF_MODEL, EDGES, TRACES_FOLDER, WINDOWS
from smaragdine.recording.reader import Recording
from smaragdine.recording.tables import words_column
from smaragdine.recording.writer import EventsWriter, write_calls, write_edges, write_windows
from smaragdine.tracing.coverage import Coverage, coverage_of, uneven_remark
from smaragdine.tracing.kineto.calls import merged
from smaragdine.tracing.kineto.places import NO_STEPS, REMEDY

# A program that announced no steps leaves slices of time. Do the steps that we found in them count?

_DIFFER = f"{NO_STEPS}, and what the program repeats differs from slice to slice; {REMEDY}"


@dataclass(frozen=True)
class ProcessSlice:
    pid: int
    files: tuple[Path, ...]
    meta: dict[str, Any]
    table: pa.Table
    coverage: Coverage


def agreed(slices: Sequence[ProcessSlice]) -> list[ProcessSlice]:
    """The slices to keep, process by process. Steps count if all slices that have some found the same. Slices
    without any are then left out: the program was compiling, or preparing itself."""
    kept: list[ProcessSlice] = []
    for pid in dict.fromkeys(each.pid for each in slices):
        mine = [each for each in slices if each.pid == pid]
        found = [each for each in mine if each.coverage.found_steps]
        differ = len({each.coverage.found_of for each in found}) > 1
        if found and (differ or any(each.coverage.irregular for each in mine)):
            kept += [_without_steps(each) if each.coverage.found_steps else each for each in mine]
        else:
            kept += found or mine
    return kept


def _without_steps(one: ProcessSlice) -> ProcessSlice:
    at = one.table.schema.get_field_index("step")
    none = pa.nulls(one.table.num_rows, one.table.schema.field(at).type)
    table = one.table.set_column(at, one.table.schema.field(at), none)
    return replace(one, table=table, coverage=coverage_of(table, 0, [*one.coverage.slice_remarks, _DIFFER]))


_WELL_PLACED = 0.99


def assemble(
    folder: Path, keep: bool = False, on_window: Callable[[int, int], None] | None = None
) -> list[str]:
    """Turns every raw trace of a run into events of its recording, and returns what there is to say of them.

    It reads one window after the other, so that a long trace is never in memory as a whole. Once all is
    written it removes the raw files, unless they are to be kept; one that it could not read stays, and is
    named. It writes the windows last: if they are missing, the rest is incomplete, and the next call begins
    anew. `on_window` hears how many of how many are done. Raises `NotWritten`, with every raw file as it was.
    """
    with _alone(folder / TRACES_FOLDER):
        return _assembled(folder, keep, on_window)


class NotWritten(UserError):
    """The disk is full, say: another try may do better."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "what was traced could not be written", why, "Make room: smaragdine report reads it anew"
        )


def is_left(recording: Recording) -> bool:
    """Whether there are raw traces that nobody has turned into events to the end."""
    folder = recording.path / TRACES_FOLDER
    return not recording.windows.num_rows and any(folder.glob("*.meta.json"))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps a second process from reading the same traces: one would remove what the other writes."""
    if not folder.is_dir():
        yield
        return
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not _locked(lock):
            raise UserError(f"{folder} is being read by another process", remedy="Wait for it to end")
        yield
    finally:
        os.close(lock)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # this file system has no locks
    return True


def _assembled(folder: Path, keep: bool, on_window: Callable[[int, int], None] | None) -> list[str]:
    said: list[str] = []
    _remove_half(folder)
    found = _needed(_metas(folder / TRACES_FOLDER, said), keep)
    windows: list[pa.Table] = []
    uneven: list[tuple[str, ...]] = []  # per window
    edges: dict[tuple[str, str], None] = {}
    calls: list[pa.Table] = []
    writer: EventsWriter | None = None
    places, guessed = Recording(folder, {}).places, 0
    read: list[Path] = []
    slices: list[ProcessSlice] = []  # few and short; together they tell whether there are steps in them

    def write(meta: dict[str, Any], table: pa.Table, coverage: Coverage) -> None:
        nonlocal writer, guessed
        table, more = on_sockets(_within(table, meta), places, int(meta["pid"]))
        window = _window(meta, table, coverage)  # before the events: a window of another shape has none
        writer = writer or _events_writer(folder)
        writer.write(table)
        windows.append(window)
        if coverage.calls is not None:
            calls.append(coverage.calls)
        uneven.append(coverage.uneven)
        guessed += more

    for number, (meta_path, meta) in enumerate(found):
        with _named(meta_path, said):
            raw = _raw(meta_path, meta)
            table, coverage = _events_of(raw, meta)
            edges |= dict.fromkeys(_edges(meta, coverage))
            if meta["steps"]:
                write(meta, table, coverage)
                read += [raw, meta_path]
            else:
                slices.append(ProcessSlice(int(meta["pid"]), (raw, meta_path), meta, table, coverage))
        if on_window is not None:
            on_window(number + 1, len(found))
    counted = 0  # steps that nobody announced, in all slices so far
    kept = agreed(slices)
    tried = {each.files for each in kept}
    read += [path for each in slices if each.files not in tried for path in each.files]
    for each in kept:
        with _named(each.files[-1], said):
            table = each.table
            if each.coverage.found_steps:
                table = _numbered(table, each.meta, each.coverage, counted)
            write(each.meta, table, each.coverage)
            counted += len(each.coverage.found_steps)
            read += each.files
    _say_once(windows, uneven)
    table = pa.concat_tables([WINDOWS.empty_table(), *windows])
    if writer is not None:
        writer.close()
        _finish(folder, writer, table, edges, merged(calls))
    for path in [] if keep else read:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / TRACES_FOLDER).rmdir()
    return said + _remarks(table.to_pylist()) + remarks_on_sockets(guessed)


@contextlib.contextmanager
def _named(meta_path: Path, said: list[str]) -> Iterator[None]:
    """A trace that cannot be used, for whatever reason, is named and stays; the others go on."""
    try:
        yield
    except NotWritten:
        raise
    except Exception as failure:
        said.append(f"the trace {meta_path.name} cannot be used: {str(failure) or repr(failure)}")


def _metas(folder: Path, said: list[str]) -> list[tuple[Path, dict[str, Any]]]:
    found: list[tuple[Path, dict[str, Any]]] = []
    for path in sorted(folder.glob("*.meta.json"), key=_order):
        with _named(path, said):
            meta = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(meta, dict) or not isinstance(meta.get("suffix"), str):
                raise ValueError("it does not say which file it is about")
            if not isinstance(meta.get("pid"), int):
                raise ValueError("it does not say whose it is")
            _raw(path, meta)  # a suffix may be no part of a name
            found.append((path, meta))
    return found


def _order(path: Path) -> tuple[str, int]:
    """torch-4711-2.meta.json comes before torch-4711-10.meta.json."""
    stem, _, number = path.name.removesuffix(".meta.json").rpartition("-")
    return stem, int(number) if number.isdecimal() else 0


def _needed(found: list[tuple[Path, dict[str, Any]]], keep: bool) -> list[tuple[Path, dict[str, Any]]]:
    """Drops what a process left before its training announced steps, slices of time and calls of a model:
    the program was still preparing itself, or trying the model out."""
    best: dict[Any, int] = {}
    for _, meta in found:
        best[meta.get("pid")] = max(best.get(meta.get("pid"), 0), _telling(meta))
    needed: list[tuple[Path, dict[str, Any]]] = []
    for path, meta in found:
        if _telling(meta) == best[meta.get("pid")]:
            needed.append((path, meta))
        elif not keep:
            _raw(path, meta).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    return needed


def _telling(meta: dict[str, Any]) -> int:
    if not meta.get("steps"):
        return 0
    return 1 if meta.get("source") == CALLS_OF_MODEL else 2


def _raw(meta_path: Path, meta: dict[str, Any]) -> Path:
    return meta_path.with_name(meta_path.name.removesuffix(".meta.json") + str(meta["suffix"]))


def _events_of(raw: Path, meta: dict[str, Any]) -> tuple[pa.Table, Coverage]:
    if meta["format"] == "kineto":
        from smaragdine.tracing.kineto import window as kineto

        return kineto.events_of(raw, meta)
    if meta["format"] == "step_stats":
        from smaragdine.tracing import step_stats

        return step_stats.events_of(raw, meta)
    from smaragdine.tracing.xplane import window as xplane

    return xplane.events_of(raw, meta)


def _numbered(table: pa.Table, meta: dict[str, Any], coverage: Coverage, counted: int) -> pa.Table:
    """Numbers the steps found in a slice after those of the slices before."""
    meta["steps"] = [[index + counted, begin_ns, end_ns] for index, begin_ns, end_ns in coverage.found_steps]
    at = table.schema.get_field_index("step")
    return table.set_column(at, table.schema.field(at), pc.add(table["step"], counted))


def _within(table: pa.Table, meta: dict[str, Any]) -> pa.Table:
    """Only what lies in steps, if there are some: the profiler ran a little longer than they did."""
    return table.filter(pc.is_valid(table["step"])) if meta["steps"] else table


def _edges(meta: dict[str, Any], coverage: Coverage) -> list[tuple[str, str]]:
    found = [(str(source), str(target)) for source, target in (*(meta.get("edges") or ()), *coverage.edges)]
    _edges_table(found)  # JSON may hold text that no table can
    return found


def _edges_table(edges: Iterable[tuple[str, str]]) -> pa.Table:
    rows = [{"source": source, "target": target} for source, target in edges]
    return pa.Table.from_pylist(rows, schema=EDGES)


def _window(meta: dict[str, Any], table: pa.Table, coverage: Coverage) -> pa.Table:
    row = {
        **{name: meta.get(name) for name in WINDOWS.names},
        "steps": [dict(zip(("index", "begin_ns", "end_ns"), step, strict=True)) for step in meta["steps"]],
        "events": table.num_rows,
        "busy_ns": coverage.busy_ns,
        "placed_ns": coverage.placed_ns,
        "counts_divide": coverage.counts_divide,
        "remarks": list(coverage.remarks),
    }
    window = pa.Table.from_pylist([row], schema=WINDOWS)
    why = oddity("windows", window)
    if why is not None:
        raise ValueError(why)
    return window


def _say_once(windows: list[pa.Table], uneven: Sequence[Collection[str]]) -> None:
    """Says in one window, for all, which operations did not run equally often."""
    first = next((i for i, names in enumerate(uneven) if names), None)
    if first is not None:
        (row,) = windows[first].to_pylist()
        row["remarks"].append(uneven_remark({name for names in uneven for name in names}))
        windows[first] = pa.Table.from_pylist([row], schema=WINDOWS)


def _events_writer(folder: Path) -> EventsWriter:
    try:
        return EventsWriter(folder)
    except UserError as error:
        raise NotWritten(str(error)) from None


def _finish(
    folder: Path,
    writer: EventsWriter,
    windows: pa.Table,
    edges: Collection[tuple[str, str]],
    calls: pa.Table,
) -> None:
    error, rows = writer.error, {"events.arrows": writer.rows, "windows.arrows": windows.num_rows}
    if error is None and edges:
        error, rows["edges.arrows"] = write_edges(folder, _edges_table(edges)), len(edges)
    if error is None and calls.num_rows:
        error, rows["calls.arrows"] = write_calls(folder, calls), calls.num_rows
    if error is None:
        error = write_windows(folder, windows)
    if error is not None:
        _remove_half(folder)
        raise NotWritten(error.strerror or str(error))
    count_rows(folder, rows)


def _remove_half(folder: Path) -> None:
    if not (folder / "windows.arrows").exists():
        for name in ("events.arrows", "edges.arrows", "calls.arrows"):
            (folder / name).unlink(missing_ok=True)


def _remarks(windows: list[dict[str, Any]]) -> list[str]:
    """Each remark once, with the first rank that made it."""
    said: dict[str, str] = {}

    def say(window: dict[str, Any], remark: str) -> None:
        said.setdefault(remark, f"{window['framework']} (rank {window['rank']}): {remark}")

    for window in windows:
        for remark in (*window["remarks"], *([] if window["events"] else ["nothing was traced"])):
            say(window, remark)
    busy_ns, placed_ns = (sum(window[name] for window in windows) for name in ("busy_ns", "placed_ns"))
    if placed_ns < _WELL_PLACED * busy_ns:
        worst = min(windows, key=lambda each: each["placed_ns"] - each["busy_ns"])
        say(worst, f"{placed_ns / busy_ns:.1%} of the traced time has a place in the model or a class")
    return list(said.values())


# On which socket each event of the CPU ran.
#
# A profiler knows the thread of an event, not the socket; the recording knows where the threads were. So all
# events of the CPU are on `cpu:0` at first, with the number of their thread as their lane, where the profiler
# tells it.

_HOST = "cpu:0"
_NO_THREAD = -1
_UNSEEN = -1


def on_sockets(events: pa.Table, places: pa.Table, pid: int) -> tuple[pa.Table, int]:
    """Puts the `cpu:0` events of one process on their sockets, and counts those for which that is a guess.

    An event ran where its thread was last seen at or before its start, else where it was first seen after. If
    nobody saw the thread (it was gone too soon, or the profiler does not name it), we take it to be where
    most threads of the process were at that time. `places` is empty on machines of one socket.
    """
    tid, t_ns, socket = _of_process(places, pid)
    device = events["device"].unify_dictionaries().combine_chunks()
    words: list[str] = device.dictionary.to_pylist()
    if not places.num_rows or _HOST not in words:
        return events, 0
    codes = device.indices.to_numpy().copy()
    rows = np.flatnonzero(codes == words.index(_HOST))
    if not t_ns.size:
        return events, rows.size
    start_ns: Ints = events["start_ns"].to_numpy()[rows]
    lane: Ints = events["lane"].fill_null(_NO_THREAD).to_numpy()[rows]
    found = _last_seen(tid, t_ns, socket, lane, start_ns)
    unseen = found == _UNSEEN
    guessed = int(np.count_nonzero(unseen))
    if guessed:
        found[unseen] = _where_most(tid, t_ns, socket, start_ns[unseen])
    sockets, at = np.unique(found, return_inverse=True)
    codes[rows] = len(words) + at
    words += [f"cpu:{number}" for number in sockets]
    # The dictionary keeps only words in use: others list them.
    used, codes = np.unique(codes, return_inverse=True)
    column = words_column(codes.astype(np.int32), [words[code] for code in used])
    index = events.schema.get_field_index("device")
    return events.set_column(index, events.schema.field(index), column), guessed


def remarks_on_sockets(guessed: int) -> list[str]:
    """What is to be said once of all windows together."""
    if not guessed:
        return []
    return [
        f"on which socket {guessed:,} operations ran was not seen:"
        " they are taken to be where most threads of their process were"
    ]


def _of_process(places: pa.Table, pid: int) -> tuple[Ints, Ints, Ints]:
    """Thread, time and socket of the rows of one process, in order of time."""
    mine = np.flatnonzero(places["pid"].to_numpy() == pid)
    t_ns = places["t_ns"].to_numpy()[mine]
    order = np.argsort(t_ns, kind="stable")
    tid, socket = (places[name].to_numpy()[mine][order].astype(np.int64) for name in ("tid", "socket"))
    return tid, t_ns[order], socket


def _last_seen(tid: Ints, t_ns: Ints, socket: Ints, lane: Ints, start_ns: Ints) -> Ints:
    """The socket of each lane at each start; _UNSEEN where the lane is no thread that was seen."""
    tids, thread = np.unique(tid, return_inverse=True)
    times_ns, time = np.unique(t_ns, return_inverse=True)
    # Thread and time in one number that can be searched for; ranks of times, because times would overflow.
    stride = times_ns.size + 1
    key = thread * stride + time + 1
    order = np.argsort(key, kind="stable")
    key, socket = key[order], socket[order]
    wanted = np.minimum(np.searchsorted(tids, lane), tids.size - 1)
    rank = np.searchsorted(times_ns, start_ns, side="right")
    last = np.searchsorted(key, wanted * stride + rank, side="right") - 1
    first = np.searchsorted(key, np.arange(tids.size) * stride)
    return np.where(tids[wanted] == lane, socket[np.maximum(last, first[wanted])], _UNSEEN)


def _where_most(tid: Ints, t_ns: Ints, socket: Ints, start_ns: Ints) -> Ints:
    """The socket with the most threads at each start; of several the lowest. Rows are in order of time."""
    sockets, to = np.unique(socket, return_inverse=True)
    order = np.argsort(tid, kind="stable")
    again = np.flatnonzero(tid[order][1:] == tid[order][:-1])
    rows, before = order[again + 1], order[again]
    moved = np.zeros((t_ns.size, sockets.size), dtype=np.int64)
    moved[np.arange(t_ns.size), to] += 1
    moved[rows, to[before]] -= 1
    most = np.argmax(np.cumsum(moved, axis=0), axis=1)
    at = np.searchsorted(t_ns, np.maximum(start_ns, t_ns[0]), side="right") - 1
    return sockets[most[at]]
