"""Writes Arrow tables that survive a crash at any byte and a full disk. They are only appended to."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.errors import UserError
from smaragdine.recording.format import (
    CALLS,
    EDGES,
    EVENTS_WITH_CALLS,
    PLACES,
    READING_TABLES,
    REQUIRED,
    WINDOWS,
    file_name,
    readings_schema,
    table_of,
)
from smaragdine.recording.seal import BLANK, KEY, seal
from smaragdine.sensors.base import Channel
from smaragdine.sensors.processes import Place

# Write dictionaries as deltas, so that names that appear as a run goes on only cost themselves.
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd", emit_dictionary_deltas=True)
# How much may wait for space on a full disk. Beyond it we drop the oldest readings, and count them.
_MOST_PENDING_BYTES = 16 << 20
_BLANK_SEAL = {KEY: BLANK}

_Message = tuple[bytes, int | None]  # with how many rows its batch has; null: it is the end mark


def _column(values: npt.NDArray[Any]) -> pa.Array:
    # pa.array would import pandas, if it is installed, just to ask whether this is one of its arrays.
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, values.size, [None, pa.py_buffer(np.ascontiguousarray(values))])


class Position(NamedTuple):
    """How far a table is written: all that one needs to go on with it."""

    size: int  # bytes
    rows: int
    checksum: int


class TableWriter:
    """Writes one Arrow IPC stream file. A message reaches the file as a whole, or nothing of it does.

    `at` goes on with a file that was left there. What lies beyond it was never finished, and is cut off.
    """

    def __init__(self, path: Path, schema: pa.Schema, at: Position | None = None) -> None:
        new = os.O_CREAT | os.O_EXCL if at is None else 0
        self._fd = os.open(path, os.O_WRONLY | new | os.O_CLOEXEC, 0o644)
        self._offset = 0
        self._staging = io.BytesIO()
        self._stream = pa.ipc.new_stream(self._staging, schema, options=_OPTIONS)
        self._pending: list[_Message] = []
        self._pending_bytes = 0
        self._checksum = 0
        self.rows = 0  # in the file
        # A batch brings names that later ones build on, so of such a table only the end may be dropped.
        self._whole = any(pa.types.is_dictionary(field.type) for field in schema)
        self._cut = False
        self.dropped_batches = 0
        self.error: OSError | None = None
        # This batch has no rows: it seals the schema, which damage to the first readings cannot take along.
        none = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
        self._stream.write_batch(none, custom_metadata=_BLANK_SEAL)
        if at is None:
            self._take(0)
            return
        self._staging.seek(0)  # the schema is in the file
        self._staging.truncate()
        os.ftruncate(self._fd, at.size)
        self._offset, self.rows, self._checksum = at

    @property
    def position(self) -> Position:
        return Position(self._offset, self.rows, self._checksum)

    def leave(self) -> None:
        """Close without an end mark, to go on later. Raises for what a full disk kept out."""
        self._flush()
        os.close(self._fd)
        if self.error is not None:
            raise self.error

    def write(self, batch: pa.RecordBatch) -> None:
        if self._cut:
            self.dropped_batches += 1
            self._flush()
            return
        self._stream.write_batch(batch, custom_metadata=_BLANK_SEAL)
        self._take(batch.num_rows)

    def close(self) -> None:
        self._flush()
        self.dropped_batches += len(self._pending) - (bool(self._pending) and not self._offset)
        if not self._pending:
            # Without the end mark, a reader would think that the file was cut off.
            self._stream.close()
            self._take(None)
        os.close(self._fd)

    def _take(self, rows: int | None) -> None:
        message = self._staging.getvalue()
        self._staging.seek(0)
        self._staging.truncate()
        self._pending.append((message, rows))
        self._pending_bytes += len(message)
        while self._pending_bytes > _MOST_PENDING_BYTES and len(self._pending) > 2:
            # Do not drop position 0: it may hold the schema, without which nobody can read the file.
            self._pending_bytes -= len(self._pending.pop(-1 if self._whole else 1)[0])
            self._cut = self._whole
            self.dropped_batches += 1
        self._flush()

    def _flush(self) -> None:
        while self._pending:
            message, rows = self._pending[0]
            checksum = self._checksum
            if rows is not None:
                # Count it here and not when it came: what a full disk kept out is not in the file.
                message, checksum = seal(message, self.rows + rows, checksum)
            try:
                written = 0
                while written < len(message):
                    written += os.pwrite(self._fd, message[written:], self._offset + written)
            except OSError as error:
                self.error = error
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._offset)
                return
            self._offset += len(message)
            self._checksum = checksum
            self.rows += rows or 0
            self._pending.pop(0)
            self._pending_bytes -= len(message)
        self.error = None


class ReadingsWriter:
    """Sorts readings into the tables of their channels. A file appears with its first row."""

    def __init__(self, folder: Path, channels: Sequence[Channel], segment: int = 0) -> None:
        self._folder = folder
        self._segment, self._piece = segment, 0
        self._schema = readings_schema(channels)
        codes = {table: code for code, table in enumerate(READING_TABLES)}
        self._table_code = np.array([codes[table_of(channel)] for channel in channels], dtype=np.int8)
        self._tables: dict[str, TableWriter] = {}  # file → its writer
        self._finished: dict[str, int] = {}  # file → rows
        self._dropped_batches = 0
        self._error: str | None = None
        self.rows = 0

    def write(self, batches: Sequence[tuple[int, list[tuple[int, int, float]]]]) -> None:
        """Write `batches` of the sampler: (first channel, [(t_ns, channel − first, value), …])."""
        columns = [(first, *zip(*readings, strict=True)) for first, readings in batches if readings]
        if not columns:
            return
        t_ns = np.concatenate([np.array(stamps, dtype=np.int64) for _, stamps, _, _ in columns])
        channel = np.concatenate(
            [np.array(numbers, dtype=np.uint16) + first for first, _, numbers, _ in columns]
        )
        value = np.concatenate([np.array(values, dtype=np.float64) for _, _, _, values in columns])
        self.write_columns(t_ns, channel, value)

    def write_columns(
        self, t_ns: npt.NDArray[np.int64], channel: npt.NDArray[np.uint16], value: npt.NDArray[np.float64]
    ) -> None:
        table_code = self._table_code[channel]
        for code, table in enumerate(READING_TABLES):
            rows = np.flatnonzero(table_code == code)
            if rows.size:
                arrays = [_column(t_ns[rows]), _column(channel[rows]), _column(value[rows])]
                self._write(table, arrays, self._schema)
                self.rows += rows.size

    def write_places(self, places: Sequence[Place]) -> None:
        if places:
            t_ns, pid, tid, socket = np.array(places, dtype=np.int64).T
            numbers = (pid.astype(np.int32), tid.astype(np.int32), socket.astype(np.int16))
            self._write("places", [_column(t_ns), *map(_column, numbers)], PLACES)

    def next_piece(self) -> None:
        """Go on in new files. Those so far are whole."""
        for table in READING_TABLES:
            file = file_name(table, self._segment, self._piece)
            if file in self._tables:
                self._finished[file] = self._finish(self._tables.pop(file))
        self._piece += 1

    def _finish(self, table: TableWriter) -> int:
        table.close()
        self._dropped_batches += table.dropped_batches
        self._error = str(table.error) if table.error else self._error
        return table.rows

    def close(self) -> None:
        self._finished |= {file: self._finish(table) for file, table in self._tables.items()}
        self._tables = {}

    @property
    def error(self) -> str | None:
        return next((str(table.error) for table in self._tables.values() if table.error), self._error)

    @property
    def rows_of(self) -> dict[str, int]:
        """File → the rows it holds."""
        return self._finished | {file: table.rows for file, table in self._tables.items()}

    @property
    def dropped_batches(self) -> int:
        return self._dropped_batches + sum(table.dropped_batches for table in self._tables.values())

    def _write(self, name: str, arrays: list[pa.Array], schema: pa.Schema) -> None:
        file = file_name(name, self._segment, self._piece if name in READING_TABLES else 0)
        if file not in self._tables:
            self._tables[file] = TableWriter(self._folder / file, schema)
        self._tables[file].write(pa.RecordBatch.from_arrays(arrays, schema=schema))


# Events and the dataflow between them, as tables of a recording. Each process that traces writes files of its
# own, `events.arrows`, `events.1.arrows` …, and shares none.

# How much a crash can cost, and a reader has in memory at a time.
_BATCH_ROWS = 65_536


class EventsWriter:
    """Writes the events of one process. They are on disk when `write` returns, unless the disk is full."""

    def __init__(self, folder: Path, number: int = 0) -> None:
        self._table = _create(folder / f"events{f'.{number}' if number else ''}.arrows", EVENTS_WITH_CALLS)

    def write(self, table: pa.Table) -> None:
        """Write a table with the required columns of EVENTS; its text may be plain or dictionary-encoded."""
        _write(self._table, fit(table, EVENTS_WITH_CALLS, "the events"))

    def close(self) -> None:
        self._table.close()

    @property
    def rows(self) -> int:
        """How many rows are in the file."""
        return self._table.rows

    @property
    def error(self) -> OSError | None:
        return self._table.error

    @property
    def dropped_batches(self) -> int:
        return self._table.dropped_batches


def write_events(folder: Path, table: pa.Table, number: int = 0) -> OSError | None:
    """Write all events of a process at once: the whole file, or none. Returns the reason for none."""
    return _write_whole(folder / f"events{f'.{number}' if number else ''}.arrows", table, EVENTS_WITH_CALLS)


def write_edges(folder: Path, table: pa.Table) -> OSError | None:
    return _write_whole(folder / "edges.arrows", table, EDGES)


def write_calls(folder: Path, table: pa.Table) -> OSError | None:
    return _write_whole(folder / "calls.arrows", table, CALLS)


def write_windows(folder: Path, table: pa.Table) -> OSError | None:
    return _write_whole(folder / "windows.arrows", table, WINDOWS)


def fit(table: pa.Table, schema: pa.Schema, what: str) -> pa.Table:
    """Fit `table` to `schema`: drop other columns, set optional ones it lacks to null, convert types."""
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
    """The same, where each text column has one dictionary for all chunks, without nulls or repeats."""
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
    """Whether a text is in the dictionary twice, as other writers may leave it. Who groups by code would take
    it for two names."""
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
