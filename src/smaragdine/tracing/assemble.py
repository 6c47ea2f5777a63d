"""Raw traces that a run left beside its recording → events, edges and windows of the recording."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from smaragdine.arrow import pc
from smaragdine.errors import UserError
from smaragdine.recording.damage import oddity
from smaragdine.recording.folder import count_rows
from smaragdine.recording.format import EDGES, TRACES_FOLDER, WINDOWS
from smaragdine.recording.reader import Recording
from smaragdine.recording.writer import EventsWriter, write_edges, write_windows
from smaragdine.tracing.coverage import Coverage, coverage_of, uneven_remark
from smaragdine.tracing.hook.training import FORWARD
from smaragdine.tracing.kineto.places import NO_STEPS, REMEDY
from smaragdine.tracing.sockets import on_sockets, remarks_on

# The slices of time of a program that announced no steps: whether the steps found in them count.

_DIFFER = f"{NO_STEPS}, and what the program repeats differs from slice to slice; {REMEDY}"


@dataclass(frozen=True)
class ProcessSlice:
    pid: int
    files: tuple[Path, ...]
    meta: dict[str, Any]
    table: pa.Table
    coverage: Coverage


def agreed(slices: Sequence[ProcessSlice]) -> list[ProcessSlice]:
    """Those that are kept, process by process. Steps count where all slices that could tell found the same;
    what came before them is then no step: it was compiling, or being prepared."""
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
    """Turn every raw trace of a run into events of its recording; what is to be said about them.

    One window after the other, so that a long trace is never in memory as a whole. Raw files that were read
    are removed once all is written, unless they are to be kept; one that could not be stays, and is named.
    The windows are written last: where they are missing, what is there is half of it, and all begins anew.
    `on_window` is told how many of how many are done. Raises `NotWritten`, with every raw file as it was.
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
    """Whether there are raw traces that nobody turned into events, or not to the end."""
    folder = recording.path / TRACES_FOLDER
    return not recording.windows.num_rows and any(folder.glob("*.meta.json"))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of two that read the same traces, one would remove what the other writes."""
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
        pass  # a file system that knows no locks
    return True


def _assembled(folder: Path, keep: bool, on_window: Callable[[int, int], None] | None) -> list[str]:
    said: list[str] = []
    _remove_half(folder)
    found = _needed(_metas(folder / TRACES_FOLDER, said), keep)
    windows: list[pa.Table] = []
    uneven: list[tuple[str, ...]] = []  # per window
    edges: dict[tuple[str, str], None] = {}
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
        _finish(folder, writer, table, edges)
    for path in [] if keep else read:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / TRACES_FOLDER).rmdir()
    return said + _remarks(table.to_pylist()) + remarks_on(guessed)


@contextlib.contextmanager
def _named(meta_path: Path, said: list[str]) -> Iterator[None]:
    """A trace that cannot be used costs no other: whatever is odd about it, it is named and stays."""
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
    """Without what a process left before its training announced steps: slices of time, and calls of a model.
    It was still being prepared, or tried out."""
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
    return 1 if meta.get("source") == FORWARD else 2


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
    """A slice whose steps were found in it; every slice begins to count anew."""
    meta["steps"] = [[index + counted, begin_ns, end_ns] for index, begin_ns, end_ns in coverage.found_steps]
    at = table.schema.get_field_index("step")
    return table.set_column(at, table.schema.field(at), pc.add(table["step"], counted))


def _within(table: pa.Table, meta: dict[str, Any]) -> pa.Table:
    """The profiler ran a little longer than the steps asked for, and a slice begins and ends anywhere."""
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
    """Which operations did not run equally often, of all windows, in the first that has some."""
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
    folder: Path, writer: EventsWriter, windows: pa.Table, edges: Collection[tuple[str, str]]
) -> None:
    error, rows = writer.error, {"events.arrows": writer.rows, "windows.arrows": windows.num_rows}
    if error is None and edges:
        error, rows["edges.arrows"] = write_edges(folder, _edges_table(edges)), len(edges)
    if error is None:
        error = write_windows(folder, windows)
    if error is not None:
        _remove_half(folder)
        raise NotWritten(error.strerror or str(error))
    count_rows(folder, rows)


def _remove_half(folder: Path) -> None:
    if not (folder / "windows.arrows").exists():
        for name in ("events.arrows", "edges.arrows"):
            (folder / name).unlink(missing_ok=True)


def _remarks(windows: list[dict[str, Any]]) -> list[str]:
    """Each once, whoever made it and however often; of several ranks only the first that did."""
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
