"""Append-only Arrow tables that survive a crash at any byte and a disk that fills up."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.recording.format import PLACES, READING_TABLES, readings_schema, table_of
from smaragdine.sensors.base import Channel
from smaragdine.sensors.processes import Place

# Deltas: names that appear as a run goes on cost only themselves.
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd", emit_dictionary_deltas=True)
# What waits for space on a full disk; beyond it the oldest readings are dropped, and that is counted.
_MOST_PENDING_BYTES = 16 << 20


def _column(values: npt.NDArray[Any]) -> pa.Array:
    # pa.array would import pandas, where it is installed, to ask whether this is one of its own.
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, values.size, [None, pa.py_buffer(np.ascontiguousarray(values))])


class TableWriter:
    """One Arrow IPC stream file. Whole messages reach the file, or nothing of them does."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._offset = 0
        self._staging = io.BytesIO()
        self._stream = pa.ipc.new_stream(self._staging, schema, options=_OPTIONS)
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        # A batch brings the names that later ones lean on: of such a table only the end may be dropped.
        self._whole = any(pa.types.is_dictionary(field.type) for field in schema)
        self._cut = False
        self.dropped_batches = 0
        self.error: OSError | None = None
        self._take()

    def write(self, batch: pa.RecordBatch) -> None:
        if self._cut:
            self.dropped_batches += 1
            self._flush()
            return
        self._stream.write_batch(batch)
        self._take()

    def close(self) -> None:
        self._flush()
        self.dropped_batches += len(self._pending) - (bool(self._pending) and not self._offset)
        if not self._pending:
            # The end-of-stream marker matters only to readers that insist on it; ours does not.
            self._stream.close()
            self._take()
        os.close(self._fd)

    def _take(self) -> None:
        message = self._staging.getvalue()
        self._staging.seek(0)
        self._staging.truncate()
        if message:
            self._pending.append(message)
            self._pending_bytes += len(message)
        while self._pending_bytes > _MOST_PENDING_BYTES and len(self._pending) > 2:
            # Position 0 may hold the schema, without which the file cannot be read.
            self._pending_bytes -= len(self._pending.pop(-1 if self._whole else 1))
            self._cut = self._whole
            self.dropped_batches += 1
        self._flush()

    def _flush(self) -> None:
        while self._pending:
            message = self._pending[0]
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
            self._pending.pop(0)
            self._pending_bytes -= len(message)
        self.error = None


class ReadingsWriter:
    """Sorts readings into the tables of their channels. Files appear with their first row."""

    def __init__(self, folder: Path, channels: Sequence[Channel], segment: int = 0) -> None:
        self._folder = folder
        self._suffix = f".{segment}" if segment else ""
        self._schema = readings_schema(channels)
        codes = {table: code for code, table in enumerate(READING_TABLES)}
        self._table_code = np.array([codes[table_of(channel)] for channel in channels], dtype=np.int8)
        self._tables: dict[str, TableWriter] = {}
        self.rows = 0

    def write(self, batches: Sequence[tuple[int, list[tuple[int, int, float]]]]) -> None:
        """`batches` as the sampler drains them: (first channel, [(t_ns, channel − first, value), …])."""
        columns = [(first, *zip(*readings, strict=True)) for first, readings in batches if readings]
        if not columns:
            return
        t_ns = np.concatenate([np.array(stamps, dtype=np.int64) for _, stamps, _, _ in columns])
        channel = np.concatenate(
            [np.array(numbers, dtype=np.uint16) + first for first, _, numbers, _ in columns]
        )
        value = np.concatenate([np.array(values, dtype=np.float64) for _, _, _, values in columns])
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

    def close(self) -> None:
        for table in self._tables.values():
            table.close()

    @property
    def error(self) -> str | None:
        return next((str(table.error) for table in self._tables.values() if table.error), None)

    @property
    def dropped_batches(self) -> int:
        return sum(table.dropped_batches for table in self._tables.values())

    def _write(self, name: str, arrays: list[pa.Array], schema: pa.Schema) -> None:
        if name not in self._tables:
            self._tables[name] = TableWriter(self._folder / f"{name}{self._suffix}.arrows", schema)
        self._tables[name].write(pa.RecordBatch.from_arrays(arrays, schema=schema))
