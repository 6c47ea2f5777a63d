"""Raw traces that a run left beside its recording → the recording's events."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from smaragdine.errors import UserError
from smaragdine.recording.events import write_events
from smaragdine.recording.format import TRACES_FOLDER
from smaragdine.tracing.assemble.coverage import Coverage

pc: Any = pyarrow.compute  # its functions are made on import, where no type checker sees them


def assemble(folder: Path) -> list[str]:
    """Turn every raw trace of a run into events of its recording; what is to be said about them.

    A raw file that was read is removed; one that could not be stays, and is named.
    """
    said: list[str] = []
    for number, meta_path in enumerate(sorted((folder / TRACES_FOLDER).glob("*.meta.json"))):
        try:
            meta: dict[str, Any] = json.loads(meta_path.read_text(encoding="utf-8"))
            raw = meta_path.with_name(meta_path.name.removesuffix(".meta.json") + _SUFFIX[meta["format"]])
            table, coverage = _events_of(raw, meta)
            error = write_events(folder, _within(table), number)
        except (UserError, OSError, ValueError, KeyError, TypeError) as failure:
            said.append(f"the trace {meta_path.name} cannot be used: {failure}")
            continue
        if error is not None:
            said.append(f"the events of {raw.name} could not be written: {error}")
            continue
        said += _remarks(meta, table, coverage)
        raw.unlink(missing_ok=True)
        meta_path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / TRACES_FOLDER).rmdir()
    return said


_SUFFIX = {"kineto": ".json", "xplane": ".xplane.pb"}


def _events_of(raw: Path, meta: dict[str, Any]) -> tuple[pa.Table, Coverage]:
    if meta["format"] == "kineto":
        from smaragdine.tracing.assemble import kineto

        return kineto.events_of(raw, meta)
    from smaragdine.tracing.assemble import xplane

    return xplane.events_of(raw, meta)


def _within(table: pa.Table) -> pa.Table:
    """The profiler ran a little longer than the steps asked for."""
    return table.filter(pc.is_valid(table["step"]))


def _remarks(meta: dict[str, Any], table: pa.Table, coverage: Coverage) -> list[str]:
    who = f"{meta['framework']} (rank {meta['rank']})"
    if not table.num_rows:
        return [f"{who}: nothing was traced"]
    placed = coverage.placed_ns / coverage.busy_ns if coverage.busy_ns else 0.0
    lines = [f"{who}: {coverage.placed_ns * 1e-9:.3g} s of operations placed"] if placed < 0.99 else []
    return lines + [f"{who}: {remark}" for remark in coverage.remarks]
