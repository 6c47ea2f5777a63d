"""Raw traces that a run left beside its recording → events, edges and windows of the recording."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from smaragdine.errors import UserError
from smaragdine.recording.events import EventsWriter, write_edges, write_windows
from smaragdine.recording.format import EDGES, TRACES_FOLDER, WINDOWS
from smaragdine.recording.reader import Recording
from smaragdine.tracing.assemble.coverage import Coverage
from smaragdine.tracing.assemble.slices import Slice, agreed
from smaragdine.tracing.assemble.sockets import on_sockets, remarks_on
from smaragdine.tracing.hook.windows import FORWARD

pc: Any = pyarrow.compute  # its functions are made on import, where no type checker sees them

_WELL_PLACED = 0.99


def assemble(
    folder: Path, keep: bool = False, on_window: Callable[[int, int], None] | None = None
) -> list[str]:
    """Turn every raw trace of a run into events of its recording; what is to be said about them.

    One window after the other, so that a long trace is never in memory as a whole. A raw file that was read
    is removed, unless it is to be kept; one that could not be stays, and is named. `on_window` is told how
    many of how many are done.
    """
    said: list[str] = []
    found = _needed(_metas(folder / TRACES_FOLDER, said), keep)
    windows: list[dict[str, Any]] = []
    edges: dict[tuple[str, str], None] = {}
    writer: EventsWriter | None = None
    places, guessed = Recording(folder, {}).places, 0
    slices: list[Slice] = []  # few and short; together they tell whether there are steps in them

    def write(meta: dict[str, Any], table: pa.Table, coverage: Coverage) -> None:
        nonlocal writer, guessed
        table, more = on_sockets(_within(table, meta), places, int(meta["pid"]))
        guessed += more
        windows.append(_window(meta, table, coverage))
        writer = writer or EventsWriter(folder)
        writer.write(table)

    def remove(*read: Path) -> None:
        if not keep and (writer is None or writer.error is None):
            for path in read:
                path.unlink(missing_ok=True)

    for number, (meta_path, meta) in enumerate(found):
        try:
            raw = _raw(meta_path, meta)
            table, coverage = _events_of(raw, meta)
            edges |= dict.fromkeys((str(source), str(target)) for source, target in _edges(meta, coverage))
            if meta["steps"]:
                write(meta, table, coverage)
            else:
                slices.append(Slice(int(meta["pid"]), (raw, meta_path), meta, table, coverage))
        except (UserError, OSError, ValueError, KeyError, TypeError) as failure:
            said.append(f"the trace {meta_path.name} cannot be used: {failure}")
            continue
        if meta["steps"]:
            remove(raw, meta_path)
        if on_window is not None:
            on_window(number + 1, len(found))
    counted = 0  # steps that nobody announced, in all slices so far
    for each in agreed(slices):
        table = each.table
        if each.coverage.found_steps:
            table = _numbered(table, each.meta, each.coverage, counted)
            counted += len(each.coverage.found_steps)
        write(each.meta, table, each.coverage)
    remove(*(path for each in slices for path in each.files))
    if writer is not None:
        writer.close()
        said += _written(folder, writer, windows, edges)
    with contextlib.suppress(OSError):
        (folder / TRACES_FOLDER).rmdir()
    return said + _remarks(windows) + remarks_on(guessed)


def _metas(folder: Path, said: list[str]) -> list[tuple[Path, dict[str, Any]]]:
    found: list[tuple[Path, dict[str, Any]]] = []
    for path in sorted(folder.glob("*.meta.json"), key=_order):
        try:
            found.append((path, json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as failure:
            said.append(f"the trace {path.name} cannot be used: {failure}")
    return found


def _order(path: Path) -> tuple[str, int]:
    """torch-4711-2.meta.json comes before torch-4711-10.meta.json."""
    stem, _, number = path.name.removesuffix(".meta.json").rpartition("-")
    return stem, int(number) if number.isdigit() else 0


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
        from smaragdine.tracing.assemble import kineto

        return kineto.events_of(raw, meta)
    if meta["format"] == "step_stats":
        from smaragdine.tracing.assemble import step_stats

        return step_stats.events_of(raw, meta)
    from smaragdine.tracing.assemble import xplane

    return xplane.events_of(raw, meta)


def _numbered(table: pa.Table, meta: dict[str, Any], coverage: Coverage, counted: int) -> pa.Table:
    """A slice whose steps were found in it; every slice begins to count anew."""
    meta["steps"] = [[index + counted, begin_ns, end_ns] for index, begin_ns, end_ns in coverage.found_steps]
    at = table.schema.get_field_index("step")
    return table.set_column(at, table.schema.field(at), pc.add(table["step"], counted))


def _within(table: pa.Table, meta: dict[str, Any]) -> pa.Table:
    """The profiler ran a little longer than the steps asked for, and a slice begins and ends anywhere."""
    return table.filter(pc.is_valid(table["step"])) if meta["steps"] else table


def _edges(meta: dict[str, Any], coverage: Coverage) -> Iterable[tuple[str, str]]:
    yield from (meta.get("edges") or ())
    yield from getattr(coverage, "edges", ())


def _window(meta: dict[str, Any], table: pa.Table, coverage: Coverage) -> dict[str, Any]:
    return {
        **{name: meta.get(name) for name in WINDOWS.names},
        "steps": [dict(zip(("index", "begin_ns", "end_ns"), step, strict=True)) for step in meta["steps"]],
        "events": table.num_rows,
        "busy_ns": coverage.busy_ns,
        "placed_ns": coverage.placed_ns,
        "counts_divide": coverage.counts_divide,
        "remarks": list(coverage.remarks),
    }


def _written(
    folder: Path, writer: EventsWriter, windows: list[dict[str, Any]], edges: Iterable[tuple[str, str]]
) -> list[str]:
    errors = [writer.error, write_windows(folder, pa.Table.from_pylist(windows, schema=WINDOWS))]
    rows = [{"source": source, "target": target} for source, target in edges]
    if rows:
        errors.append(write_edges(folder, pa.Table.from_pylist(rows, schema=EDGES)))
    return [f"what was traced could not be written: {error}" for error in errors if error is not None][:1]


def _remarks(windows: list[dict[str, Any]]) -> list[str]:
    """Each once, whoever made it and however often; of several ranks only the first that did."""
    said: dict[str, str] = {}
    for window in windows:
        remarks: list[str] = list(window["remarks"])
        if not window["events"]:
            remarks.append("nothing was traced")
        elif window["placed_ns"] < _WELL_PLACED * window["busy_ns"]:
            share = window["placed_ns"] / window["busy_ns"]
            remarks.append(f"{share:.1%} of the traced time has a place in the model or a class")
        for remark in remarks:
            said.setdefault(remark, f"{window['framework']} (rank {window['rank']}): {remark}")
    return list(said.values())
