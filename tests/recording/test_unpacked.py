"""A few megabytes that unpack to gigabytes are refused in one line, in whatever they are packed."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from refusal import refused
from smaragdine.accounting import footprint
from smaragdine.recording import tables
from smaragdine.recording.power_logs import read_power
from smaragdine.recording.reader import open_recording
from smaragdine.recording.tables import arrow_bytes
from smaragdine.tracing.files import read_events

ROWS = 40_000_000  # of eight bytes


@pytest.fixture
def zeros() -> pa.Table:
    column = pa.array(np.zeros(ROWS, dtype=np.int64))
    return pa.table({"device": pa.nulls(ROWS), "t_ns": column, "power_w": column})


def test_a_gzip_file_is_unpacked_in_pieces_up_to_a_ceiling(tmp_path: Path) -> None:
    path = tmp_path / "events.csv.gz"
    with gzip.open(path, "wb", 1) as file:
        for _ in range(320):
            file.write(bytes(1 << 20))
    assert path.stat().st_size < 3 << 20
    tracemalloc.start()
    refused(lambda: read_events(path), "unpacks to more than 256 MiB", "gunzip")
    assert tracemalloc.get_traced_memory()[1] < 320 << 20  # all at once it would be twice what it unpacks to
    tracemalloc.stop()
    refused(lambda: read_power(path), "unpacks to more than 256 MiB")


def test_several_gzip_members_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "events.csv.gz"
    head, rest = b"name,device,start_ns,duration_ns\n", b"a,cpu:0,1,2\n"
    path.write_bytes(gzip.compress(head) + gzip.compress(rest) + bytes(7))
    assert read_events(path).num_rows == 1


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_message_says_what_it_unpacks_to(tmp_path: Path, zeros: pa.Table, kind: str) -> None:
    path = tmp_path / "power.arrow"
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with new(str(path), zeros.schema, options=options) as out:
        out.write_table(zeros, max_chunksize=ROWS // 2)
    content = pa.py_buffer(path.read_bytes())
    assert content.size < 3 << 20
    assert 16 * ROWS <= arrow_bytes(content) < 17 * ROWS
    before = pa.total_allocated_bytes()
    refused(lambda: read_power(path), "power.arrow unpacks to more than 256 MiB")
    assert pa.total_allocated_bytes() == before
    refused(lambda: footprint.load(path), "power.arrow")


def test_a_dictionary_counts_too() -> None:
    words = pa.array(["a" * 5000, "b"]).dictionary_encode()
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, pa.schema([("w", words.type)]), options=options) as out:
        out.write_table(pa.table({"w": words}))
    assert 5000 < arrow_bytes(sink.getvalue()) < 6000


def test_rows_of_one_value_are_few_bytes_of_parquet(tmp_path: Path, zeros: pa.Table) -> None:
    pq.write_table(zeros, tmp_path / "power.parquet", compression="zstd")
    assert (tmp_path / "power.parquet").stat().st_size < 3 << 20
    refused(lambda: read_power(tmp_path / "power.parquet"), "power.parquet unpacks to more than 256 MiB")


def test_what_is_not_packed_so_tightly_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_AT_LEAST", 0)
    table = pa.table(
        {
            "device": ["gpu:0"] * 5000,
            "t_ns": [1_700_000_000_000_000_000 + 20_000_123 * n for n in range(5000)],
            "power_w": [100 + n % 37 / 8 for n in range(5000)],
        }
    )
    pq.write_table(table, tmp_path / "power.parquet", compression="zstd")
    text = "\n".join(
        ["device,t_ns,power_w", *(",".join(map(str, row.values())) for row in table.to_pylist())]
    )
    (tmp_path / "power.csv.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("power.parquet", "power.csv.gz"):
        assert read_power(tmp_path / name).num_rows == 5000


def test_a_table_of_an_old_recording_is_no_bomb(tmp_path: Path, zeros: pa.Table) -> None:
    import recordings

    folder = recordings.make(tmp_path / "run")
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(str(folder / "power.arrows"), zeros.schema, options=options) as out:
        out.write_table(zeros)
    refused(lambda: open_recording(folder).damage, "power.arrows unpacks to more than 256 MiB")
