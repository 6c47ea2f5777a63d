from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import smaragdine
from smaragdine.clock import ClockPair
from smaragdine.errors import UserError
from smaragdine.recording import folder as folders
from smaragdine.recording import marks, writer
from smaragdine.recording.command import build_command, without_secrets
from smaragdine.recording.format import (
    MARKS,
    READINGS,
    SPOOL_FOLDER,
    channel_from_dict,
    channel_to_dict,
    channels_of,
    readings_schema,
    table_of,
)
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.recording.recorder import RecorderConfig
from smaragdine.recording.writer import ReadingsWriter, TableWriter
from smaragdine.sensors.base import Channel
from smaragdine.system import boot_id, start_ticks

T0 = 1_700_000_000_000_000_000
CLOCK = {"begin": {"wall_ns": T0, "mono_ns": 5}}
BatchRows = list[tuple[int, int, float]]


def channel(device: str, quantity: str, sensor: str = "test", **more: Any) -> Channel:
    return Channel(device, quantity, "J", "counter", "measured", 4.0, sensor, **more)


CHANNELS = [
    channel("cpu:0", "energy", wraps_at=65.5),
    channel("cpu:0", "busy"),
    channel("cpu:0", "program"),
    channel("gpu:0", "power", window_ms=20.0),
    channel("gpu:0", "temperature"),
    channel("gpu:0", "sm_clock"),
]


def recording_in(folder: Path, **more: Any) -> Recording:
    folder.mkdir(exist_ok=True)
    (folder / "spool").mkdir(exist_ok=True)
    info = {"format_version": 1, "status": "complete", "channels": [], "clock": CLOCK, **more}
    (folder / "run.json").write_text(json.dumps(info))
    return open_recording(folder)


def rows_of(recording: Recording, table: str) -> list[tuple[str, str, int, float, int]]:
    return [
        (s.channel.device, s.channel.quantity, int(t), float(v), int(n))
        for s in recording.series(table)
        for t, v, n in zip(s.t_ns, s.value, s.segment, strict=True)
    ]


# --- round trip ---------------------------------------------------------------------------------------------

VALUES = st.floats(allow_nan=False) | st.sampled_from([0.0, -0.0, 5e-324, 1.7e308])
ONE_READING = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, len(CHANNELS) - 1), VALUES)
FLUSHES = st.lists(st.lists(ONE_READING, max_size=20), max_size=5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FLUSHES, st.integers(0, 3))
def test_what_is_written_is_read(tmp_path_factory: Any, flushes: list[BatchRows], first: int):
    folder = tmp_path_factory.mktemp("run")
    out = ReadingsWriter(folder, CHANNELS)
    for flush in flushes:
        # As the sampler hands it over: numbered from each sensor's first channel.
        low = [(t, c, v) for t, c, v in flush if c < first]
        high = [(t, c - first, v) for t, c, v in flush if c >= first]
        out.write([(0, low), (first, high)])
    out.close()
    assert out.rows == sum(len(flush) for flush in flushes)
    recording = recording_in(folder)
    for table in ("power", "activity", "telemetry"):
        expected = [
            (CHANNELS[c].device, CHANNELS[c].quantity, t, v, 0)
            for number in range(len(CHANNELS))
            for flush in flushes
            for t, c, v in [*(r for r in flush if r[1] < first), *(r for r in flush if r[1] >= first)]
            if c == number and table_of(CHANNELS[c]) == table
        ]
        assert rows_of(recording, table) == expected
        assert recording.table(table).num_rows == len(expected)


def test_every_channel_survives_the_schema():
    full = channel(
        "dram:1", "energy", scope="part", window_ms=25.5, wraps_at=262143.328, detail="µ, “quotes” and \\"
    )
    assert channels_of(readings_schema([full, *CHANNELS])) == [full, *CHANNELS]
    assert channel_from_dict({**channel_to_dict(full), "from_the_future": 1}) == full
    # A line break in a text of a file would forge a row of a table.
    assert channel_from_dict({**channel_to_dict(full), "detail": "a\nb"}).detail == "a\\nb"


@pytest.mark.parametrize(
    "odd",
    [{"device": 5}, {"period_ms": "x"}, {"period_ms": None}, {"window_ms": 10**400}, {"wraps_at": True}],
)
def test_a_channel_of_another_shape_is_none(odd: dict[str, Any]):
    with pytest.raises(TypeError):
        channel_from_dict({**channel_to_dict(CHANNELS[0]), **odd})


def test_a_table_appears_with_its_first_reading(tmp_path: Path):
    out = ReadingsWriter(tmp_path, CHANNELS)
    out.write([])
    out.write([(0, [])])
    assert list(tmp_path.iterdir()) == []
    out.write([(0, [(T0, 0, 1.0)])])
    assert [path.name for path in tmp_path.iterdir()] == ["power.arrows"]
    out.close()


def test_a_table_is_readable_while_it_is_written(tmp_path: Path):
    out = ReadingsWriter(tmp_path, CHANNELS)
    for i in range(5):
        out.write([(0, [(T0 + i, 0, float(i))])])
        assert recording_in(tmp_path).power["value"].to_pylist() == [float(n) for n in range(i + 1)]
    out.close()


def test_a_finished_table_is_an_ordinary_arrow_stream(tmp_path: Path):
    out = ReadingsWriter(tmp_path, CHANNELS)
    out.write([(0, [(T0, 0, 1.0), (T0 + 1, 3, 2.0)])])
    out.close()
    with pa.ipc.open_stream(tmp_path / "power.arrows") as stream:
        table = stream.read_all()
    assert table.schema.equals(READINGS)
    assert table.to_pylist() == [
        {"t_ns": T0, "channel": 0, "value": 1.0},
        {"t_ns": T0 + 1, "channel": 3, "value": 2.0},
    ]


def test_a_stream_cut_at_every_byte_gives_a_prefix(tmp_path: Path):
    out = ReadingsWriter(tmp_path / "whole", CHANNELS)
    (tmp_path / "whole").mkdir()
    for i in range(4):
        out.write([(0, [(T0 + 10 * i + j, 0, float(10 * i + j)) for j in range(3)])])
    out.close()
    whole = (tmp_path / "whole" / "power.arrows").read_bytes()
    complete = [float(10 * i + j) for i in range(4) for j in range(3)]
    lengths: list[int] = []
    cut = tmp_path / "cut"
    recording_in(cut)
    for size in range(len(whole) + 1):
        (cut / "power.arrows").write_bytes(whole[:size])
        values = open_recording(cut).power["value"].to_pylist()
        assert values == complete[: len(values)]
        assert len(values) % 3 == 0
        lengths.append(len(values))
    assert lengths == sorted(lengths)
    assert set(lengths) == {0, 3, 6, 9, 12}


def test_marks_cut_at_every_byte_are_still_a_table(tmp_path: Path):
    recording_in(tmp_path)
    table = TableWriter(tmp_path / "marks.arrows", MARKS)
    rows = [{"t_ns": T0 + i, "name": f"m{i}"} for i in range(3)]
    for row in rows:
        table.write(marks.marks_table([row]).to_batches()[0])
    table.close()
    whole = (tmp_path / "marks.arrows").read_bytes()
    seen: set[int] = set()
    for size in range(len(whole) + 1):
        (tmp_path / "marks.arrows").write_bytes(whole[:size])
        names = open_recording(tmp_path).marks["name"].to_pylist()
        assert names == ["m0", "m1", "m2"][: len(names)]
        seen.add(len(names))
    assert seen == {0, 1, 2, 3}


def test_a_tail_of_zeros_gives_a_prefix(tmp_path: Path):
    """What a power cut leaves on some file systems: the length is there, the bytes are not."""
    write_segment(tmp_path, 0, CHANNELS, [(T0 + i, 0, float(i)) for i in range(3)])
    recording_in(tmp_path)
    whole = (tmp_path / "power.arrows").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "power.arrows").write_bytes(whole[:size] + bytes(len(whole) - size))
        values = open_recording(tmp_path).power["value"].to_pylist()
        assert values in ([], [0.0, 1.0, 2.0])


# --- a full disk --------------------------------------------------------------------------------------------


def batch(start: int, count: int = 2000) -> pa.RecordBatch:
    """Random values, so that compression cannot make them small."""
    values = np.random.default_rng(start).random(count)
    columns = [
        pa.array(np.arange(start, start + count)),
        pa.array(np.zeros(count, np.uint16)),
        pa.array(values),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=readings_schema(CHANNELS))


def t_ns_in(path: Path) -> list[int]:
    return [t for part in _read(path) for t in part["t_ns"].to_pylist()]


def _read(path: Path) -> list[pa.RecordBatch]:
    found: list[pa.RecordBatch] = []
    try:
        with pa.ipc.open_stream(path) as stream:
            found.extend(iter(stream))
    except pa.ArrowInvalid:
        pass
    return found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(ballast: Path) -> None:
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_keeps_the_file_readable_and_writing_resumes(small_disk: Path):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(64 << 10))
    out = TableWriter(small_disk / "power.arrows", readings_schema(CHANNELS))
    for i in range(6):  # 6 × 19 kB do not fit into what is left
        out.write(batch(2000 * i))
        on_disk = t_ns_in(small_disk / "power.arrows")
        assert on_disk == list(range(len(on_disk)))
        assert len(on_disk) % 2000 == 0
    assert out.error is not None
    assert out.error.errno == errno.ENOSPC
    assert 0 < len(t_ns_in(small_disk / "power.arrows")) < 12_000
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    out.write(batch(12_000))
    out.close()
    assert t_ns_in(small_disk / "power.arrows") == list(range(14_000))
    assert out.dropped_batches == 0


def test_a_disk_full_from_the_start_drops_the_oldest_and_counts(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(writer, "_MOST_PENDING_BYTES", 100_000)
    ballast = small_disk / "ballast"
    fill(ballast)
    out = TableWriter(small_disk / "power.arrows", readings_schema(CHANNELS))
    for i in range(20):
        out.write(batch(2000 * i))
    assert (small_disk / "power.arrows").stat().st_size == 0
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=2m", str(small_disk)], check=True)
    out.write(batch(40_000))
    out.close()
    kept = t_ns_in(small_disk / "power.arrows")
    assert kept[-1] == 41_999
    assert kept == sorted(kept)
    assert len(kept) % 2000 == 0
    assert out.dropped_batches == 21 - len(kept) // 2000 > 0


def test_readings_that_never_reached_the_disk_are_counted_as_dropped(small_disk: Path):
    (small_disk / "ballast").write_bytes(bytes(96 << 10))
    out = ReadingsWriter(small_disk, CHANNELS)
    for i in range(8):
        values = np.random.default_rng(i).random(2000)
        out.write([(0, [(2000 * i + j, 0, float(v)) for j, v in enumerate(values)])])
    out.close()
    written = len(t_ns_in(small_disk / "power.arrows")) // 2000
    assert written < 8
    assert out.error is not None
    assert out.dropped_batches == 8 - written


def test_marks_of_a_full_disk_stay_in_the_spool(small_disk: Path):
    recording_in(small_disk)
    marks.append(small_disk, "kept", T0)
    fill(small_disk / "ballast")
    error = marks.fold_spool(small_disk, marks.read_spool(small_disk))
    assert error is not None
    assert error.errno == errno.ENOSPC
    assert not (small_disk / "marks.arrows").exists()
    assert open_recording(small_disk).marks["name"].to_pylist() == ["kept"]
    (small_disk / "ballast").unlink()
    assert marks.fold_spool(small_disk, marks.read_spool(small_disk)) is None
    assert open_recording(small_disk).marks["name"].to_pylist() == ["kept"]


def test_run_json_of_a_full_disk_is_the_old_one(small_disk: Path):
    old = {"format_version": 1, "clock": CLOCK}
    assert folders.write_info(small_disk, old) is None
    fill(small_disk / "ballast")
    error = folders.write_info(small_disk, {"format_version": 1, "new": "x" * 10_000})
    assert error is not None
    assert error.errno == errno.ENOSPC
    assert open_recording(small_disk).info == old
    assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", "run.json"]


def in_fork(work: Callable[[], object]) -> Any:
    """What `work` returns in a child whose limits are its own."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(send, json.dumps(work()).encode())
        except BaseException as error:
            os.write(send, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def test_a_file_size_limit_keeps_whole_messages_and_writing_resumes(tmp_path: Path):
    path = tmp_path / "power.arrows"

    def work() -> object:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        out = TableWriter(path, readings_schema(CHANNELS))
        for i in range(6):
            out.write(batch(2000 * i))
        error = out.error.errno if out.error else None
        before = len(t_ns_in(path))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        out.write(batch(12_000))
        out.close()
        return [error, before, out.dropped_batches]

    assert in_fork(work) == [errno.EFBIG, 4000, 0]
    assert t_ns_in(path) == list(range(14_000))


# --- segments and twins -------------------------------------------------------------------------------------


def write_segment(folder: Path, segment: int, channels: Sequence[Channel], rows: BatchRows) -> None:
    out = ReadingsWriter(folder, channels, segment)
    out.write([(0, rows)])
    out.close()


def test_segments_are_joined_in_order(tmp_path: Path):
    for segment in (0, 1, 2, 10):
        write_segment(tmp_path, segment, CHANNELS, [(T0 + segment, 0, float(segment))])
    assert (tmp_path / "power.10.arrows").exists()
    assert rows_of(recording_in(tmp_path), "power") == [
        ("cpu:0", "energy", T0 + n, float(n), n) for n in (0, 1, 2, 10)
    ]


def test_a_successor_may_number_its_channels_otherwise(tmp_path: Path):
    write_segment(tmp_path, 0, CHANNELS, [(T0, 0, 1.0), (T0, 3, 2.0)])
    write_segment(tmp_path, 1, list(reversed(CHANNELS)), [(T0 + 1, 5, 1.5), (T0 + 1, 2, 2.5)])
    found = {s.channel.name: s.value.tolist() for s in recording_in(tmp_path).series("power")}
    assert found == {"cpu:0 energy": [1.0, 1.5], "gpu:0 power": [2.0, 2.5]}


def test_a_first_segment_that_never_was_is_no_loss(tmp_path: Path):
    (tmp_path / "power.arrows").write_bytes(b"")
    write_segment(tmp_path, 1, CHANNELS, [(T0, 0, 1.0)])
    assert rows_of(recording_in(tmp_path), "power") == [("cpu:0", "energy", T0, 1.0, 1)]


def test_two_dies_of_one_socket_stay_two_series(tmp_path: Path):
    dies = [channel("cpu:0", "energy", detail="package-0-die-0"), channel("cpu:0", "energy", detail="die-1")]
    write_segment(tmp_path, 0, dies, [(T0, 0, 1.0), (T0, 1, 100.0), (T0 + 1, 0, 2.0)])
    write_segment(tmp_path, 1, dies, [(T0 + 2, 1, 101.0), (T0 + 2, 0, 3.0)])
    found = recording_in(tmp_path).series("power")
    assert [s.value.tolist() for s in found] == [[1.0, 2.0, 3.0], [100.0, 101.0]]
    assert [s.segment.tolist() for s in found] == [[0, 0, 1], [0, 1]]


def test_two_dies_of_which_one_was_silent_at_first_keep_apart(tmp_path: Path):
    dies = [channel("cpu:0", "energy", detail="a"), channel("cpu:0", "energy", detail="b")]
    write_segment(tmp_path, 0, dies, [(T0, 1, 100.0)])
    write_segment(tmp_path, 1, dies, [(T0 + 1, 0, 1.0), (T0 + 1, 1, 101.0)])
    assert sorted(s.value.tolist() for s in recording_in(tmp_path).series("power")) == [[1.0], [100.0, 101.0]]


@pytest.mark.parametrize("name", ["power.backup.arrows", "power.1.old.arrows", "power..arrows"])
def test_a_foreign_file_in_the_folder_is_none_of_ours(tmp_path: Path, name: str):
    write_segment(tmp_path, 0, CHANNELS, [(T0, 0, 1.0)])
    (tmp_path / name).write_bytes((tmp_path / "power.arrows").read_bytes())
    assert rows_of(recording_in(tmp_path), "power") == [("cpu:0", "energy", T0, 1.0, 0)]


# --- marks --------------------------------------------------------------------------------------------------


def spool(folder: Path, *lines: bytes, name: str = "marks-1-0.jsonl") -> None:
    recording_in(folder)
    (folder / "spool" / name).write_bytes(b"".join(lines))


def names_both_ways(folder: Path) -> list[str]:
    """From the spool, then from the table it was folded into: the same."""
    before = open_recording(folder).marks
    assert marks.fold_spool(folder, marks.read_spool(folder)) is None
    assert not (folder / "spool").exists()
    after = open_recording(folder).marks
    assert after.equals(before)
    assert after.schema.equals(MARKS)
    return after["name"].to_pylist()


def test_marks_of_many_processes_come_by_time(tmp_path: Path):
    spool(tmp_path, b'{"t_ns": 3, "name": "c"}\n{"t_ns": 1, "name": "a", "rank": 1, "index": 7}\n')
    (tmp_path / "spool" / "marks-2-0.jsonl").write_bytes(b'{"t_ns": 2, "name": "b", "detail": {"x": [1]}}\n')
    marks.append(tmp_path, "experiment_end", 4, detail="ä")
    assert names_both_ways(tmp_path) == ["a", "b", "c", "experiment_end"]
    rows = open_recording(tmp_path).marks.to_pylist()
    assert [(row["index"], row["rank"]) for row in rows] == [(7, 1), (None, None), (None, None), (None, None)]
    assert [row["detail"] for row in rows] == [None, '{"x": [1]}', None, "ä"]
    assert rows[3]["source"] == "run"


def test_a_line_cut_off_anywhere_costs_that_line(tmp_path: Path):
    line = '{"t_ns": 2, "name": "tö", "index": 12, "detail": "x"}\n'.encode()
    for size in range(len(line)):
        folder = tmp_path / str(size)
        spool(folder, b'{"t_ns": 1, "name": "a"}\n', line[:size])
        names = marks.read_spool(folder)["name"].to_pylist()
        assert names[0] == "a"
        assert names[1:] == (["tö"] if size == len(line) - 1 else [])


def test_a_torn_line_in_the_middle_costs_no_other(tmp_path: Path):
    spool(tmp_path, b'{"t_ns": 1, "name": "a"}\n{"t_ns": 2, "na\n{"t_ns": 3, "name": "c"}\n')
    assert names_both_ways(tmp_path) == ["a", "c"]


JUNK = [
    b"",
    b"\x00\xff\xfe",
    b"[1, 2]",
    b"5",
    b'"text"',
    b"null",
    b"{}",
    b'{"t_ns": null, "name": "x"}',
    b'{"t_ns": "soon", "name": "x"}',
    b'{"t_ns": 5}',
    b"\xef\xbb\xbf{",
]


@pytest.mark.parametrize("junk", JUNK)
def test_junk_in_the_spool_is_skipped(tmp_path: Path, junk: bytes):
    spool(tmp_path, b'{"t_ns": 1, "name": "a"}\n', junk, b'\n{"t_ns": 3, "name": "c"}\n')
    assert names_both_ways(tmp_path) == ["a", "c"]


MEAN_JUNK = [
    b'{"t_ns": Infinity, "name": "x"}',
    b'{"t_ns": 99999999999999999999999, "name": "x"}',
    b'{"t_ns": 2, "name": "x", "index": NaN}',
    b'{"t_ns": 2, "name": "x", "index": Infinity}',
    b'{"t_ns": 2, "name": "x", "index": 99999999999999999999999}',
    b'{"t_ns": 2, "name": "x", "rank": "first"}',
    b'{"t_ns": 2, "name": "x", "pid": [1]}',
    b'{"t_ns": 2, "name": "x", "source": 5}',
    b'{"t_ns": 2, "name": "x", "total": "many"}',
    b'{"t_ns": 2, "name": "\\ud800"}',
    b'{"t_ns": 2, "name": "x", "detail": "\\udcff"}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("junk", MEAN_JUNK, ids=[junk[:45].decode() for junk in MEAN_JUNK])
def test_fields_of_a_wrong_kind_do_not_lose_the_other_marks(tmp_path: Path, junk: bytes):
    spool(tmp_path, b'{"t_ns": 1, "name": "a"}\n', junk, b'\n{"t_ns": 3, "name": "c"}\n')
    names = names_both_ways(tmp_path)
    assert names[0] == "a"
    assert names[-1] == "c"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"t_ns": st.integers(0, 2**62), "name": st.text(st.characters(exclude_categories=["Cs"]))},
            optional={
                "index": st.integers(-(2**62), 2**62) | st.none(),
                "rank": st.integers(0, 10_000) | st.none(),
                "pid": st.integers(1, 2**22),
                "total": st.integers(0, 10**9),
                "source": st.sampled_from(["keras", "user"]),
            },
        ),
        max_size=8,
    )
)
def test_marks_round_trip(tmp_path_factory: Any, rows: list[dict[str, Any]]):
    folder = tmp_path_factory.mktemp("run")
    spool(folder, *(json.dumps(row).encode() + b"\n" for row in rows))
    expected = [{**dict.fromkeys(MARKS.names), **row} for row in sorted(rows, key=lambda row: row["t_ns"])]
    assert marks.read_spool(folder).to_pylist() == expected
    names_both_ways(folder)
    assert open_recording(folder).marks.to_pylist() == expected


def test_both_table_and_spool_count_once(tmp_path: Path):
    spool(tmp_path, b'{"t_ns": 1, "name": "a"}\n')
    table = TableWriter(tmp_path / "marks.arrows", MARKS)
    table.write(marks.read_spool(tmp_path).to_batches()[0])
    table.close()
    assert open_recording(tmp_path).marks["name"].to_pylist() == ["a"]


def test_folding_twice_keeps_the_first_table(tmp_path: Path):
    spool(tmp_path, b'{"t_ns": 1, "name": "a"}\n')
    assert marks.fold_spool(tmp_path, marks.read_spool(tmp_path)) is None
    (tmp_path / "spool").mkdir()
    assert isinstance(marks.fold_spool(tmp_path, marks.read_spool(tmp_path)), FileExistsError)
    assert open_recording(tmp_path).marks["name"].to_pylist() == ["a"]


def test_no_spool_and_no_table_are_no_marks(tmp_path: Path):
    recording_in(tmp_path)
    (tmp_path / "spool").rmdir()
    assert open_recording(tmp_path).marks.num_rows == 0
    marks.append(tmp_path, "lost", T0)  # nowhere to write: not an error


def test_libraries_are_read_from_the_last_marks(tmp_path: Path):
    spool(
        tmp_path,
        b'{"t_ns": 1, "name": "libraries", "detail": {"torch": "2.2"}}\n',
        b'{"t_ns": 2, "name": "libraries", "detail": "[not a dict"}\n',
        b'{"t_ns": 3, "name": "libraries", "detail": {"keras": "3.3"}}\n',
    )
    assert marks.libraries(marks.read_spool(tmp_path)) == {"torch": "2.2", "keras": "3.3"}


# --- forms --------------------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path: Path) -> Recording:
    write_segment(tmp_path, 0, CHANNELS, [(T0 + 2, 0, 1.0), (T0 + 1, 3, 2.0), (T0, 1, 0.5), (T0, 4, 41.0)])
    spool(tmp_path, b'{"t_ns": 1, "name": "a", "index": 3}\n{"t_ns": 2, "name": "b"}\n')
    return smaragdine.open(tmp_path)


def test_arrow_form(example: Recording):
    assert example.power.column_names[:4] == ["t_ns", "device", "quantity", "value"]
    assert example.power.to_pylist() == [
        {"t_ns": T0 + 1, "device": "gpu:0", "quantity": "power", "value": 2.0},
        {"t_ns": T0 + 2, "device": "cpu:0", "quantity": "energy", "value": 1.0},
    ]
    assert example.activity["value"].to_pylist() == [0.5]
    assert example.telemetry["quantity"].to_pylist() == ["temperature"]
    assert {c.name for c in example.channels} == {
        "cpu:0 energy",
        "gpu:0 power",
        "cpu:0 busy",
        "gpu:0 temperature",
    }


def test_numpy_form(example: Recording):
    columns = example.table("power", "numpy")
    assert columns["t_ns"].dtype == np.int64
    assert columns["value"].dtype == np.float64
    assert columns["device"].tolist() == ["gpu:0", "cpu:0"]
    assert example.table("marks", "numpy")["name"].tolist() == ["a", "b"]


def test_pandas_form(example: Recording):
    pytest.importorskip("pandas")
    frame = example.table("power", "pandas")
    assert frame["value"].tolist() == [2.0, 1.0]
    assert frame["t_ns"].tolist() == [T0 + 1, T0 + 2]
    assert example.table("marks", "pandas")["name"].tolist() == ["a", "b"]


@pytest.mark.parametrize("form", ["arrow", "numpy", "pandas"])
@pytest.mark.parametrize("table", ["power", "activity", "telemetry", "marks"])
def test_empty_tables_have_their_columns(tmp_path: Path, table: str, form: Any):
    found = recording_in(tmp_path).table(table, form)
    names = found.column_names if form == "arrow" else list(found)
    assert "t_ns" in names
    assert len(found["t_ns"]) == 0


def test_an_unknown_table_is_a_user_error(example: Recording):
    with pytest.raises(UserError, match=r"no table named energy.*power, activity, telemetry, marks"):
        example.table("energy")


def test_an_unknown_form_is_said(example: Recording):
    with pytest.raises((UserError, ValueError)):
        example.table("power", "polars")  # type: ignore[arg-type]


# --- run.json -----------------------------------------------------------------------------------------------


def test_a_format_from_the_future_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"has format 2.*formats up to 1.*Update smaragdine"):
        recording_in(tmp_path, format_version=2)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"format_version": null}', '{"format_version": "x"}', "\ud800"]
)
def test_a_broken_run_json_is_a_user_error(tmp_path: Path, text: str):
    (tmp_path / "run.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match="cannot be read"):
        open_recording(tmp_path)


def test_what_is_no_recording_is_said(tmp_path: Path):
    with pytest.raises(UserError, match="does not exist"):
        open_recording(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"is no recording.*smaragdine run printed"):
        open_recording(tmp_path)
    for age, name in enumerate(("new", "old")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
        os.utime(tmp_path / name / "run.json", (100 - age, 100 - age))
    with pytest.raises(UserError, match=r"is no recording.*It holds 2 recordings; the newest is .*/new$"):
        open_recording(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError):
        open_recording(file)


def test_status_of_a_recording_whose_supervisor_died(tmp_path: Path):
    assert recording_in(tmp_path, status="running", supervisor_pid=os.getpid()).status == "running"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    assert recording_in(tmp_path, status="running", supervisor_pid=dead.pid).status == "interrupted"
    assert recording_in(tmp_path, status="running").status == "interrupted"
    assert recording_in(tmp_path, status="failed").status == "failed"
    mine = {"status": "running", "supervisor_pid": os.getpid()}
    same = {"supervisor_start_ticks": start_ticks(os.getpid()), "boot_id": boot_id()}
    assert recording_in(tmp_path, **mine, **same).status == "running"
    again = {**same, "supervisor_start_ticks": 1}  # the number is another process's by now
    assert recording_in(tmp_path, **mine, **again).status == "interrupted"


@pytest.mark.parametrize("elsewhere", [{"boot_id": "another"}, {"host": {"hostname": "another"}}])
def test_status_of_a_recording_elsewhere(tmp_path: Path, elsewhere: dict[str, Any]):
    """Of a process that cannot be seen from here."""
    recording = recording_in(tmp_path, status="running", supervisor_pid=2**30, **elsewhere)
    assert recording.status == "running"
    os.utime(tmp_path / "run.json", (100, 100))
    assert recording.status == "interrupted"


def test_the_environment_stored_is_the_short_list(tmp_path: Path):
    environment = {
        "CUDA_VISIBLE_DEVICES": "0",
        "AWS_SECRET_ACCESS_KEY": "s",
        "HOME": "/root",
        "HF_TOKEN": "t",
    }
    info = folders.initial_info(["x"], environment, {}, ClockPair(T0, 5))
    assert info["environment"] == {"CUDA_VISIBLE_DEVICES": "0"}
    assert info["clock"] == {"begin": {"wall_ns": T0, "mono_ns": 5}}
    assert folders.write_info(tmp_path, info) is None
    assert open_recording(tmp_path).status == "running"


# --- folders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "end"),
    [
        ("train", "-train"),
        ("my model!", "-my-model"),
        ("Größe 3", "-Größe-3"),
        ("/", "-run"),
        ("", "-run"),
        ("a.b_c-d", "-a.b_c-d"),
    ],
)
def test_names_of_folders(tmp_path: Path, label: str, end: str):
    made = folders.create(None, label, tmp_path / "runs")
    assert made.parent == tmp_path / "runs"
    assert made.name.endswith(end)
    assert (made / "spool").is_dir()


@pytest.mark.parametrize("label", ["..", ".", "../../etc", ".hidden"])
def test_a_label_never_leaves_the_root(tmp_path: Path, label: str):
    made = folders.create(None, label, tmp_path / "runs")
    assert made.resolve().parent == (tmp_path / "runs").resolve()


def together(count: int, work: Callable[[int], object]) -> list[object]:
    """All at once, as far as threads go; results in no order, errors among them."""
    gate = threading.Barrier(count)
    results: list[object] = []

    def one(number: int) -> None:
        gate.wait()
        try:
            results.append(work(number))
        except UserError as error:
            results.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_runs_started_together_get_a_folder_each(tmp_path: Path):
    made = together(24, lambda _: folders.create(None, "train", tmp_path / "runs"))
    assert len({str(path) for path in made}) == 24
    assert all(isinstance(path, Path) and (path / "spool").is_dir() for path in made)


def test_a_named_folder_goes_to_one_of_two(tmp_path: Path):
    for attempt in range(40):
        made = together(6, lambda _, n=attempt: folders.create(tmp_path / f"out{n}", "train"))
        assert sum(isinstance(result, Path) for result in made) == 1


def test_a_named_folder_is_never_overwritten(tmp_path: Path):
    assert folders.create(tmp_path / "deep" / "new", "x") == tmp_path / "deep" / "new"
    taken = recording_in(tmp_path / "taken").path
    with pytest.raises(UserError, match=r"already holds a recording.*never overwritten"):
        folders.create(taken, "x")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "precious").touch()
    with pytest.raises(UserError, match="already holds files"):
        folders.create(tmp_path / "files", "x")
    with pytest.raises(UserError, match="is a file"):
        folders.create(tmp_path / "files" / "precious", "x")
    with pytest.raises(UserError, match="cannot create"):
        folders.create(tmp_path / "files" / "precious" / "below", "x")
    (tmp_path / "empty").mkdir()
    assert folders.create(tmp_path / "empty", "x") == tmp_path / "empty"


# --- commands -----------------------------------------------------------------------------------------------

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print()")
    return tmp_path


def test_a_script(here: Path):
    command = build_command(["train.py", "--epochs", "3", "-m", "x"], ENVIRONMENT)
    assert command.argv == (sys.executable, "train.py", "--epochs", "3", "-m", "x")
    assert command.executable == sys.executable
    assert command.label == "train"


def test_a_module(here: Path):
    command = build_command(["-m", "package.train", "--lr", "1"], ENVIRONMENT)
    assert command.argv == (sys.executable, "-m", "package.train", "--lr", "1")
    assert command.label == "train"


def test_an_executable(here: Path):
    command = build_command(["ls", "-l", "train.py"], ENVIRONMENT)
    assert Path(command.executable).name == "ls"
    assert command.argv == ("ls", "-l", "train.py")
    assert command.label == "train"  # of a launcher, the script it launches
    assert build_command(["ls", "-l"], ENVIRONMENT).label == "ls"
    assert build_command(["--", "ls"], ENVIRONMENT) == build_command(["ls"], ENVIRONMENT)


def test_after_two_dashes_a_script_is_an_executable(here: Path):
    script = here / "train.py"
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    assert build_command(["--", "./train.py"], ENVIRONMENT).argv == ("./train.py",)


def test_after_two_dashes_a_script_that_cannot_start_by_itself_is_a_script(here: Path):
    assert build_command(["--", "train.py", "-x"], ENVIRONMENT) == build_command(
        ["train.py", "-x"], ENVIRONMENT
    )


def test_a_launcher_beside_our_interpreter_is_found(here: Path):
    beside = Path(sys.executable).parent / "pytest"
    assert beside.exists()
    assert build_command(["pytest", "-q"], ENVIRONMENT).executable == str(beside)


def test_a_folder_with_a_main(here: Path):
    (here / "app").mkdir()
    with pytest.raises(UserError, match=r"it has no __main__.py"):
        build_command(["app"], ENVIRONMENT)
    (here / "app" / "__main__.py").touch()
    assert build_command(["app"], ENVIRONMENT).label == "app"


def test_a_folder_named_like_a_command_does_not_hide_it(here: Path):
    (here / "ls").mkdir()
    assert Path(build_command(["ls", "-l"], ENVIRONMENT).executable).is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to run"),
        (["--"], "nothing to run"),
        (["-m"], "-m needs a module"),
        (["--epochs", "3"], "unknown option --epochs"),
        (["missing.py"], "missing.py does not exist: looked in"),
        (["notes.ipynb"], "is a notebook.*nbconvert"),
        (["no-such-command-here"], "no such command on PATH.*needs its .py"),
        (["./no/such/file"], "no such file"),
        (["./data.bin"], "is not executable.*chmod u\\+x"),
        (["--", "missing.py"], "cannot run missing.py"),
    ],
)
def test_errors_of_commands(here: Path, words: list[str], said: str):
    (here / "data.bin").touch()
    (here / "notes.ipynb").touch()
    with pytest.raises(UserError, match=said) as error:
        build_command(words, ENVIRONMENT)
    assert "\n" not in str(error.value)


def test_a_script_that_cannot_be_read_is_said(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read anything
    with pytest.raises(UserError, match=r"cannot be read: permission denied.*chmod u\+r"):
        build_command(["train.py"], ENVIRONMENT)


@pytest.mark.parametrize(
    ("argv", "stored"),
    [
        (["t.py", "--token", "hunter2"], ["t.py", "--token", "***"]),
        (["t.py", "--token=hunter2"], ["t.py", "--token=***"]),
        (["t.py", "--hf_token=hunter2"], ["t.py", "--hf_token=***"]),
        (["t.py", "-password", "hunter2"], ["t.py", "-password", "***"]),
        (
            ["t.py", "--wandb-api-key", "hunter2", "--lr", "1"],
            ["t.py", "--wandb-api-key", "***", "--lr", "1"],
        ),
        (["t.py", "--AWS_SECRET_ACCESS_KEY=a=b\nc"], ["t.py", "--AWS_SECRET_ACCESS_KEY=***"]),
        (["t.py", "--token", "--lr", "1"], ["t.py", "--token", "--lr", "1"]),
        (["t.py", "--lr", "1", "token"], ["t.py", "--lr", "1", "token"]),
    ],
)
def test_secrets_are_not_stored(argv: list[str], stored: list[str]):
    assert without_secrets(argv) == stored


@pytest.mark.parametrize(
    "argv",
    [
        ["t.py", "hub.token=hunter2"],  # Hydra, OmegaConf
        ["t.py", "+wandb.api_key=hunter2"],
        ["env", "HF_TOKEN=hunter2", "python", "t.py"],
        ["t.py", "--hub.token", "hunter2"],  # jsonargparse, Lightning CLI
        ["t.py", "--model.api_key=hunter2"],
        ["t.py", "--db", "postgres://user:hunter2@host/db"],
    ],
)
def test_secrets_in_other_clothes_are_not_stored(argv: list[str]):
    assert "hunter2" not in " ".join(without_secrets(argv))


def test_tokens_that_are_no_secrets_are_kept():
    argv = ["t.py", "--max-tokens", "512", "--tokenizer", "gpt2", "--tokens_per_batch=4096"]
    assert without_secrets(argv) == argv


def test_a_million_steps_are_read_as_one_by_one_would(tmp_path: Path):
    (tmp_path / "spool").mkdir()
    step = '{"t_ns":%d,"name":"step_end","index":%d,"rank":0,"pid":7,"source":"torch:1"}'
    lines = [step % (1_794_730_433_684_011_145 + i, i) for i in range(3000)]
    lines.insert(1500, '{"t_ns":5,"name":"odd","index":1e3,"source":"user","detail":{"a":1}}')
    lines.insert(
        10, '{"t_ns":99999999999999999999,"name":"step_end","index":0,"rank":0,"pid":7,"source":"torch"}'
    )
    lines.append('{"t_ns":12,"name":"to')
    (tmp_path / "spool" / "marks-7.jsonl").write_text("\n".join(lines))
    table = marks.read_spool(tmp_path)
    by_hand = marks.marks_table(list(marks.parse_lines(line.encode() for line in lines)))
    assert table.num_rows == 3001
    assert table.equals(by_hand)


@pytest.mark.parametrize(
    ("words", "stored"),
    [
        (["bash", "-c", "export HF_TOKEN=abc; run"], ["bash", "-c", "export HF_TOKEN=***; run"]),
        (["--wandb-key=abc"], ["--wandb-key=***"]),
        (["--openai_key", "abc"], ["--openai_key", "***"]),
        (["--credentials", "abc"], ["--credentials", "***"]),
        (["https://abc@host/x"], ["https://***@host/x"]),
        (["--keyboard", "de", "--max-tokens", "5"], ["--keyboard", "de", "--max-tokens", "5"]),
    ],
)
def test_more_secrets(words: list[str], stored: list[str]):
    assert without_secrets(words) == stored


# --- a reader that does not read ----------------------------------------------------------------------------


def test_a_recorder_goes_on_writing_while_nobody_reads_its_feed(tmp_path: Path):
    """As when `run --live` is stopped with Ctrl-Z: its pipe is full, and stays so."""
    (tmp_path / SPOOL_FOLDER).mkdir()
    config = json.dumps(asdict(RecorderConfig(str(tmp_path), period_ns=20_000_000, live=True)))
    receive, send = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "smaragdine.recording.recorder", config],
        stdin=subprocess.PIPE,
        stdout=send,
    ) as recorder:
        assert recorder.stdin is not None
        assert b"ready" in os.read(receive, 1 << 20)
        # A file of our own on the pipe: what is set on it is not set on the recorder's.
        filling = os.open(f"/proc/self/fd/{send}", os.O_WRONLY | os.O_NONBLOCK)
        os.close(send)
        for size in (4096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(filling, b"\n" * size)
        os.close(filling)
        recorder.stdin.write(b'{"watch": %d, "include_past": false, "marker": "x"}\n' % os.getpid())
        recorder.stdin.flush()
        sizes = {written_bytes(tmp_path)}
        deadline_s = time.monotonic() + 60
        while len(sizes) < 5:
            if time.monotonic() > deadline_s:
                recorder.kill()
                pytest.fail("nothing more is written")
            time.sleep(0.05)
            sizes.add(written_bytes(tmp_path))
        recorder.stdin.write(b'{"stop": true}\n')
        recorder.stdin.close()
        with open(receive, "rb") as answers:
            heard = answers.read().splitlines()
    assert "done" in json.loads(heard[-1])
    assert recorder.returncode == 0


def written_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.arrows"))
