"""Events and edges on disk: what was written is read, whatever the writers, the cut or the columns."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smaragdine.errors import UserError
from smaragdine.recording import writer
from smaragdine.recording.format import EDGES, EVENTS
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.recording.writer import EventsWriter, write_edges, write_events

Row = tuple[str, str, int, int, str | None, int | None, int | None]
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.sampled_from(["a", "b", "a/b", ""]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
ROW = st.tuples(TEXT, TEXT, INT64, INT64, st.none() | TEXT, st.none() | INT64, st.none() | INT64)


def recording_in(folder: Path) -> Recording:
    clock = {"begin": {"wall_ns": 1_700_000_000_000_000_000, "mono_ns": 5}}
    info = {"format_version": 1, "status": "complete", "channels": [], "clock": clock}
    (folder / "run.json").write_text(json.dumps(info))
    return open_recording(folder)


def table_of(rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(EVENTS.names, row, strict=True)) for row in rows], schema=EVENTS)


def rows_of(table: pa.Table) -> list[Row]:
    return [tuple(row[name] for name in EVENTS.names) for row in table.to_pylist()]  # pyright: ignore


def event(name: str, start_ns: int = 0) -> Row:
    return (name, "gpu:0", start_ns, 7, None, None, None)


def check_dictionaries(table: pa.Table) -> None:
    assert table.schema.equals(EVENTS)
    for name in ("name", "device", "phase"):
        texts = [chunk.dictionary.to_pylist() for chunk in table[name].chunks]
        assert all(each == texts[0] for each in texts), "more than one dictionary"
        assert all(None not in each and len(set(each)) == len(each) for each in texts)


def stream(path: Path, batches: Sequence[pa.RecordBatch], deltas: bool = False) -> None:
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=deltas)
    with pa.ipc.new_stream(path, batches[0].schema, options=options) as out:
        for batch in batches:
            out.write_batch(batch)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.lists(ROW, max_size=6), max_size=4), max_size=3), st.integers(1, 5))
def test_what_is_written_is_read(tmp_path_factory: Any, files: list[list[list[Row]]], batch_rows: int):
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_BATCH_ROWS", batch_rows)
        for number, writes in enumerate(files):
            out = EventsWriter(folder, number)
            for rows in writes:
                out.write(table_of(rows))
            out.close()
            assert out.error is None
            assert out.dropped_batches == 0
    table = recording_in(folder).events
    check_dictionaries(table)
    assert rows_of(table) == [row for writes in files for rows in writes for row in rows]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), max_size=8))
def test_edges_are_read_as_written(tmp_path_factory: Any, pairs: list[tuple[str, str]]):
    folder = tmp_path_factory.mktemp("run")
    rows = [{"source": a, "target": b} for a, b in pairs]
    assert write_edges(folder, pa.Table.from_pylist(rows, schema=EDGES)) is None
    recording = recording_in(folder)
    assert recording.edges.schema.equals(EDGES)
    assert recording.edges.to_pylist() == recording.table("edges").to_pylist() == rows


def test_a_recording_without_events_has_tables_of_no_rows(tmp_path: Path):
    recording = recording_in(tmp_path)
    assert recording.events.equals(EVENTS.empty_table())
    assert recording.table("edges").equals(EDGES.empty_table())


def test_files_are_read_by_number(tmp_path: Path):
    for number in (10, 2, 0, 1):
        assert write_events(tmp_path, table_of([event(f"rank{number}")]), number) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "events.1.arrows",
        "events.10.arrows",
        "events.2.arrows",
        "events.arrows",
    ]
    assert recording_in(tmp_path).events["name"].to_pylist() == ["rank0", "rank1", "rank2", "rank10"]


def test_a_cut_anywhere_leaves_the_whole_batches_before_it(tmp_path: Path):
    """New names come with each batch, so that a cut may also fall into a dictionary."""
    source = tmp_path / "source"
    source.mkdir()
    out = EventsWriter(source)
    path = source / "events.arrows"
    written: list[Row] = []
    whole: list[tuple[int, int]] = [(path.stat().st_size, 0)]  # bytes, rows that are in them
    for names in (["a", "b"], ["b", "a"], ["a", "b", "c"], ["z", "a"]):
        written += (rows := [event(name, len(written) + i) for i, name in enumerate(names)])
        out.write(table_of(rows))
        whole.append((path.stat().st_size, len(written)))
    out.close()
    content = path.read_bytes()
    cut = tmp_path / "cut"
    cut.mkdir()
    near = {end + off for end, _ in whole for off in (-2, -1, 0, 1)}
    for size in sorted((near | set(range(len(content))[::7]) | {len(content)}) - {-2, -1}):
        (cut / "events.arrows").write_bytes(content[:size])
        expected = max((rows for end, rows in whole if end <= size), default=0)
        assert rows_of(recording_in(cut).events) == written[:expected], size


def test_events_are_readable_while_they_are_written(tmp_path: Path):
    out = EventsWriter(tmp_path, 3)
    for i in range(4):
        out.write(table_of([event(f"op{i}", i)]))
        assert recording_in(tmp_path).events["start_ns"].to_pylist() == list(range(i + 1))
    out.close()


@pytest.mark.parametrize("deltas", [True, False])
def test_dictionaries_that_grow_or_change_between_batches(tmp_path: Path, deltas: bool):
    batches = [
        pa.RecordBatch.from_arrays(
            [
                pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(texts)),
                pa.array(["gpu:0"] * len(codes)).dictionary_encode(),
                pa.array(codes, pa.int64()),
                pa.array(codes, pa.int64()),
            ],
            names=["name", "device", "start_ns", "duration_ns"],
        )
        for texts, codes in ((["a", "b"], [0, 1]), (["a", "b", "c"], [2, 0]), (["c", "x"], [0, 1, 0]))
    ]
    stream(tmp_path / "events.arrows", batches, deltas)
    table = recording_in(tmp_path).events
    check_dictionaries(table)
    assert table["name"].to_pylist() == ["a", "b", "c", "a", "c", "x", "c"]


def test_other_writers_types_unknown_columns_and_missing_ones(tmp_path: Path):
    narrow = pa.dictionary(pa.int8(), pa.large_string())
    plain = {"start_ns": pa.array([1, 2], pa.int32()), "duration_ns": pa.array([3, 4], pa.uint64())}
    first = pa.table(
        {
            "correlation": pa.array([{"id": 1}, None]),
            "name": pa.array(["a", "b"], pa.large_string()).dictionary_encode().cast(narrow),
            "device": ["gpu:0", "gpu:1"],
            **plain,
        }
    )
    second = pa.table({"name": ["b", "c"], "device": ["gpu:0"] * 2, **plain, "lane": [5, None]})
    stream(tmp_path / "events.arrows", first.to_batches())
    stream(tmp_path / "events.7.arrows", second.to_batches())
    table = recording_in(tmp_path).events
    check_dictionaries(table)
    assert rows_of(table) == [
        ("a", "gpu:0", 1, 3, None, None, None),
        ("b", "gpu:1", 2, 4, None, None, None),
        ("b", "gpu:0", 1, 3, None, 5, None),
        ("c", "gpu:0", 2, 4, None, None, None),
    ]


@pytest.mark.parametrize("files", [1, 2])
def test_a_dictionary_with_a_null_or_a_repeat(tmp_path: Path, files: int):
    phases = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["x", None, "x"]))
    names = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["a", "b", "a"]))
    columns = {"name": names, "device": ["gpu:0"] * 3, "start_ns": [1, 2, 3], "duration_ns": [1, 1, 1]}
    for number in range(files):
        batches = pa.table({**columns, "phase": phases}).to_batches()
        stream(tmp_path / f"events{f'.{number}' if number else ''}.arrows", batches)
    table = recording_in(tmp_path).events
    check_dictionaries(table)
    assert table["name"].to_pylist() == ["a", "b", "a"] * files
    assert table["phase"].to_pylist() == ["x", None, "x"] * files
    assert table["phase"].null_count == files


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start_ns": None}, "named start_ns"),
        ({"name": None}, "named name"),
        ({"duration_ns": ["short", "long"]}, "column duration_ns"),
        ({"start_ns": [0.5, 1.0]}, "column start_ns"),
        ({"device": [[1], [2]]}, "column device"),
    ],
)
def test_columns_that_cannot_be_used_are_one_line(tmp_path: Path, change: dict[str, Any], said: str):
    columns = {
        "name": ["a", "b"],
        "device": ["gpu:0"] * 2,
        "start_ns": [1, 2],
        "duration_ns": [3, 4],
        **change,
    }
    bad = pa.table({name: values for name, values in columns.items() if values is not None})
    with pytest.raises(UserError, match=said):
        write_events(tmp_path, bad)
    assert list(tmp_path.iterdir()) == [], "something half-written was left"
    stream(tmp_path / "events.arrows", bad.to_batches())
    recording = recording_in(tmp_path)
    with pytest.raises(UserError, match=said) as raised:
        _ = recording.events
    assert "events.arrows" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert recording.marks.num_rows == 0, "the other tables are none the worse"


def test_events_are_never_overwritten(tmp_path: Path):
    assert write_events(tmp_path, table_of([event("first")])) is None
    with pytest.raises(UserError, match="never overwritten"):
        EventsWriter(tmp_path)
    with pytest.raises(UserError, match="cannot write"):
        EventsWriter(tmp_path / "nowhere")
    assert recording_in(tmp_path).events["name"].to_pylist() == ["first"]


def test_a_null_stays_a_null_in_numpy_and_pandas(tmp_path: Path):
    rows: list[Row] = [("a", "gpu:0", 1, 2, None, None, 3), ("b", "gpu:0", 1, 2, "forward", 4, 5)]
    assert write_events(tmp_path, table_of(rows)) is None
    recording = recording_in(tmp_path)
    assert list(recording.table("events", "numpy")["phase"]) == [None, "forward"]
    frame = recording.table("events", "pandas")
    assert frame["phase"].isna().tolist() == [True, False]
    assert frame["name"].dtype.name == "category"


def test_a_full_disk_costs_the_end_and_never_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A later batch leans on the dictionaries of those before it: none may be missing in between."""
    monkeypatch.setattr(writer, "_MOST_PENDING_BYTES", 4000)
    full = False
    pwrite = os.pwrite

    def limited(fd: int, data: bytes, offset: int) -> int:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", limited)
    out = EventsWriter(tmp_path)
    written = [event(f"op{i}", i) for i in range(30)]
    for i, row in enumerate(written):
        full = 5 <= i < 20
        out.write(table_of([row, *written[: i // 3]]))
    out.close()
    assert out.error is None
    assert out.dropped_batches > 0
    batches = [[row, *written[: i // 3]] for i, row in enumerate(written)]
    kept = batches[: 30 - out.dropped_batches]
    assert 5 < len(kept) < 20
    assert rows_of(recording_in(tmp_path).events) == [row for batch in kept for row in batch]


def test_a_file_that_finds_no_room_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    error = write_events(tmp_path, table_of([event("a")]))
    assert error is not None
    assert error.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_events_stay_columns_on_their_way_in(tmp_path: Path):
    count = 300_000
    text = pa.DictionaryArray.from_arrays(
        pa.array(np.arange(count) % 3, pa.int32()), pa.array(["a", "b", "c"])
    )
    numbers = pa.array(np.arange(count))
    table = pa.table({"name": text, "device": text, "start_ns": numbers, "duration_ns": numbers})
    assert write_events(tmp_path, table) is None
    recording = recording_in(tmp_path)
    tracemalloc.start()
    read = recording.events
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < count, "less than a byte of Python an event"
    assert read.num_rows == count
    assert read["start_ns"].num_chunks > 1
    check_dictionaries(read)
