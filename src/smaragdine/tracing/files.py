"""Read the events of any file we know, by what is in it."""

from __future__ import annotations

import os

import pyarrow as pa

from smaragdine.errors import UserError
from smaragdine.recording.tables import kind_of, read_content


def read_events(path: str | os.PathLike[str]) -> pa.Table:
    """A table of schema EVENTS from Parquet, Arrow, CSV, a Chrome trace or an XPlane file, or a UserError."""
    where = os.fspath(path)
    content = read_content(path)
    kind = kind_of(content, path)
    if kind == "json":
        from smaragdine.tracing import chrome

        return chrome.read(content, where)
    if kind == "xplane":
        from smaragdine.tracing.xplane import foreign

        return foreign.read(content, where)
    if kind == "unknown":
        raise UserError(
            f"{where} is of no kind that holds events",
            remedy="Parquet, Arrow, CSV, a Chrome trace (JSON) and XPlane (.pb) are read; see docs/events.md",
        )
    from smaragdine.tracing import table

    return table.read(content, kind, where)
