"""Events and the dataflow between them, as tables of a recording.

Each process that traces writes a file of its own, `events.arrows`, `events.1.arrows` …: none is shared.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow as pa

from smaragdine.errors import UserError
from smaragdine.recording.format import EDGES, EVENTS, REQUIRED, WINDOWS
from smaragdine.recording.writer import TableWriter

# What a crash can cost, and what a reader has in memory at a time.
_BATCH_ROWS = 65_536


class EventsWriter:
    """The events of one process, on disk when `write` returns, unless the disk is full."""

    def __init__(self, folder: Path, number: int = 0) -> None:
        self._table = _create(folder / f"events{f'.{number}' if number else ''}.arrows", EVENTS)

    def write(self, table: pa.Table) -> None:
        """Any table with the required columns of EVENTS; text may be plain or dictionary-encoded."""
        _write(self._table, fit(table, EVENTS, "the events"))

    def close(self) -> None:
        self._table.close()

    @property
    def rows(self) -> int:
        """In the file."""
        return self._table.rows

    @property
    def error(self) -> OSError | None:
        return self._table.error

    @property
    def dropped_batches(self) -> int:
        return self._table.dropped_batches


def write_events(folder: Path, table: pa.Table, number: int = 0) -> OSError | None:
    """All events of a process at once: the whole file, or none and the reason."""
    return _write_whole(folder / f"events{f'.{number}' if number else ''}.arrows", table, EVENTS)


def write_edges(folder: Path, table: pa.Table) -> OSError | None:
    return _write_whole(folder / "edges.arrows", table, EDGES)


def write_windows(folder: Path, table: pa.Table) -> OSError | None:
    return _write_whole(folder / "windows.arrows", table, WINDOWS)


def fit(table: pa.Table, schema: pa.Schema, what: str) -> pa.Table:
    """`table` with the columns of `schema`: others left out, optional ones it lacks null, types converted."""
    columns: list[pa.ChunkedArray] = []
    for field in schema:
        index = table.schema.get_field_index(field.name)
        if index >= 0:
            columns.append(_fit_column(table.column(index), field, what))
        elif field.name in REQUIRED:
            raise UserError(f"{what} cannot be used", f"not exactly one column is named {field.name}")
        else:
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
    return one_dictionary(pa.Table.from_arrays(columns, schema=schema))


def one_dictionary(table: pa.Table) -> pa.Table:
    """The same table, each text column with one dictionary for all its chunks, without nulls or repeats."""
    columns = [
        _encode(column)
        if pa.types.is_dictionary(column.type) and any(chunk.dictionary.null_count for chunk in column.chunks)
        else column
        for column in table.columns
    ]
    unified = pa.Table.from_arrays(columns, schema=table.schema).unify_dictionaries()
    columns = [_encode(column) if _repeats(column) else column for column in unified.columns]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _repeats(column: pa.ChunkedArray) -> bool:
    """Other writers may leave a text in the dictionary twice: two names to whoever groups by code."""
    if not pa.types.is_dictionary(column.type) or not column.num_chunks:
        return False
    texts = column.chunk(0).dictionary
    return len(texts.unique()) < len(texts)


def _encode(column: pa.ChunkedArray) -> pa.ChunkedArray:
    text = pa.string()
    return column.cast(text).dictionary_encode().cast(pa.dictionary(pa.int32(), text))


def _fit_column(column: pa.ChunkedArray, field: pa.Field, what: str) -> pa.ChunkedArray:
    if column.type == field.type:
        return column
    try:
        return _encode(column) if pa.types.is_dictionary(field.type) else column.cast(field.type)
    except pa.ArrowException as error:
        raise UserError(f"{what} cannot be used", f"column {field.name}: {error}") from None


def _create(path: Path, schema: pa.Schema) -> TableWriter:
    try:
        return TableWriter(path, schema)
    except FileExistsError:
        raise UserError(f"{path} exists", "it is never overwritten", "Name a new folder") from None
    except OSError as error:
        raise UserError(f"cannot write {path}", error.strerror or str(error)) from None


def _write(writer: TableWriter, table: pa.Table) -> None:
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        writer.write(batch)


def _write_whole(path: Path, table: pa.Table, schema: pa.Schema) -> OSError | None:
    fitted = fit(table, schema, f"the {path.name.partition('.')[0]}")
    writer = _create(path, schema)
    _write(writer, fitted)
    writer.close()
    if writer.error is not None:
        with contextlib.suppress(OSError):
            path.unlink()
    return writer.error
