"""Events from other tools' files: what comes out is what went in, or one line that says why not."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusal import refused
from smaragdine import protobuf
from smaragdine.recording.format import EVENTS
from smaragdine.tracing.files import read_events
from smaragdine.tracing.table import PHASES, events_table, phase_of

NOW_NS = 1_794_740_390_025_259_698
ONE = {"name": ["a/MatMul"], "device": ["gpu:0"], "start_ns": [NOW_NS], "duration_ns": [17_075]}


def write_json(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


def x(name: str, ts: Any, dur: Any, pid: Any = 1, tid: Any = 1, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, **more}


def marks(begin: Any, end: Any) -> bytes:
    thread = {"pid": 1, "tid": 1}
    return json.dumps(
        [{"ph": "B", "name": "a", "ts": begin, **thread}, {"ph": "E", "ts": end, **thread}]
    ).encode()


def process(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


# ── columns ───────────────────────────────────────────────────────────────────────────────────

_NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), min_size=1, max_size=12)
_EVENT = st.tuples(
    _NAMES,
    st.sampled_from(["cpu:0", "gpu:0", "gpu:11"]),
    st.integers(-(2**40), 2**62),
    st.integers(0, 2**62 - 1),
    st.sampled_from([None, "forward", "backward"]),
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.integers(0, 2**40),
)


def _write(table: pa.Table, path: Path) -> None:
    if path.name.endswith(".parquet"):
        pq.write_table(table, path)
    elif path.name.endswith(".feather"):
        pyarrow.feather.write_feather(table, path)
    elif path.name.endswith(".arrows"):
        with pa.ipc.new_stream(path, table.schema) as out:
            out.write_table(table, max_chunksize=3)
    elif path.name.endswith(".csv"):
        pa.csv.write_csv(table, path)
    elif path.name.endswith(".csv.gz"):
        with gzip.open(path, "wb") as out:
            pa.csv.write_csv(table, out)


@pytest.mark.parametrize("suffix", ["parquet", "feather", "arrows", "csv", "csv.gz"])
@settings(max_examples=60, deadline=None)
@given(rows=st.lists(_EVENT, min_size=1, max_size=12))
def test_columnar_round_trip(tmp_path_factory: pytest.TempPathFactory, suffix: str, rows: list[Any]) -> None:
    plain = [pa.string() if pa.types.is_dictionary(field.type) else field.type for field in EVENTS]
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), plain, strict=True)]
    path = tmp_path_factory.mktemp("events") / f"events.{suffix}"
    _write(pa.table(columns, names=EVENTS.names), path)
    table = read_events(path)
    assert table.schema.equals(EVENTS)
    assert [tuple(row.values()) for row in table.to_pylist()] == rows


def test_content_decides_before_the_suffix(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    pq.write_table(pa.table(ONE), path)
    assert read_events(path)["start_ns"].to_pylist() == [NOW_NS]
    path = tmp_path / "nosuffix"
    path.write_text("name,device,start_ns,duration_ns\na,cpu:0,1,2\n")
    assert read_events(path)["duration_ns"].to_pylist() == [2]


def test_csv_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / "e.csv"
    text = '\ufeffname, start_ns, device, duration_ns, lane, note\r\n"a,b", 5.0, gpu:0, 7, worker, hm\r\n'
    text += "c, 6, cpu:0, 0, , x"
    path.write_bytes(text.encode())
    rows = read_events(path).to_pylist()
    assert [(r["name"], r["device"], r["start_ns"], r["duration_ns"], r["lane"]) for r in rows] == [
        ("a,b", "gpu:0", 5, 7, 0),
        ("c", "cpu:0", 6, 0, None),
    ]


def test_events_table_takes_what_people_have() -> None:
    start = np.array([5, 6], dtype=np.int64)
    data = {
        "name": np.array(["a", "b"]),
        "device": np.array(["cpu:0", "cpu:0"], dtype=object),
        "start_ns": start,
        "duration_ns": np.array([1, 2], dtype=np.uint8),
        "lane": ["main", None],
        "step": np.array([np.nan, 3.0]),
    }
    expected = [
        {
            "name": "a",
            "device": "cpu:0",
            "start_ns": 5,
            "duration_ns": 1,
            "phase": None,
            "lane": 0,
            "step": None,
        },
        {
            "name": "b",
            "device": "cpu:0",
            "start_ns": 6,
            "duration_ns": 2,
            "phase": None,
            "lane": None,
            "step": 3,
        },
    ]
    table = events_table(data)
    assert table.schema.equals(EVENTS)
    assert table.to_pylist() == expected
    assert events_table(pd.DataFrame(data)).to_pylist() == expected
    assert events_table(table).to_pylist() == expected
    big = pa.table(
        {**data, "name": pa.array(["a", "b"], pa.large_string()), "start_ns": pa.array(start, pa.int64())}
    )
    assert events_table(big).to_pylist() == expected
    assert events_table(big.to_batches()[0]).to_pylist() == expected


def test_int64_columns_are_not_copied() -> None:
    start = np.arange(1000, dtype=np.int64)
    duration = np.ones(1000, dtype=np.int64)
    table = events_table(
        {"name": ["a"] * 1000, "device": ["d"] * 1000, "start_ns": start, "duration_ns": duration}
    )
    assert table["start_ns"].chunk(0).buffers()[1].address == start.ctypes.data
    assert table["duration_ns"].chunk(0).buffers()[1].address == duration.ctypes.data
    again = events_table(table)
    assert again["start_ns"].chunk(0).buffers()[1].address == start.ctypes.data


def test_every_word_has_one_code() -> None:
    twice = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["a", "a", "b"]))
    chunks = pa.chunked_array([pa.array(["x"]).dictionary_encode(), pa.array(["y", "x"]).dictionary_encode()])
    table = events_table({"name": twice, "device": chunks, "start_ns": [1, 2, 3], "duration_ns": [1, 1, 1]})
    assert table["name"].combine_chunks().indices.to_pylist() == [0, 0, 1]
    assert [chunk.dictionary.to_pylist() for chunk in table["device"].chunks] == [["x", "y"]] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start_ns": None}, ["no column start_ns", "it has name, device, duration_ns"]),
        ({"name": [None]}, ["row 1", "name is missing"]),
        ({"name": [""]}, ["row 1", "name is empty"]),
        ({"name": [5]}, ["name is of type int64"]),
        ({"device": [0]}, ["device is of type int64"]),
        ({"start_ns": [None]}, ["row 1", "start_ns is missing"]),
        ({"start_ns": [1.5]}, ["row 1", "start_ns is no whole number"]),
        ({"start_ns": [float("inf")]}, ["row 1", "start_ns"]),
        ({"start_ns": [float("nan")]}, ["row 1", "start_ns is missing"]),
        ({"start_ns": [1.794e18]}, ["row 1", "start_ns is a float too large to be exact"]),
        ({"start_ns": ["soon"]}, ["row 1", "start_ns is no whole number"]),
        ({"start_ns": [str(2**63)]}, ["row 1", "start_ns is beyond 64 bits"]),
        ({"start_ns": [True]}, ["start_ns is of type bool"]),
        (
            {"start_ns": np.array([2**63], dtype=np.uint64)},
            ["row 1", "start_ns is no whole number of 64 bits"],
        ),
        ({"start_ns": np.array([2**70], dtype=object)}, ["no table can be made"]),
        ({"duration_ns": [-1]}, ["row 1", "duration_ns is negative"]),
        ({"duration_ns": [2**63 - 1]}, ["row 1", "beyond 64 bits"]),
        ({"duration_ns": [1, 2]}, ["no table can be made"]),
        ({"lane": [1.5]}, ["row 1", "lane is no whole number"]),
        ({"lane": [[1]]}, ["lane is of type"]),
        ({"step": ["x"]}, ["row 1", "step is no whole number"]),
    ],
)
def test_bad_columns(change: dict[str, Any], words: list[str]) -> None:
    data = {name: values for name, values in {**ONE, **change}.items() if values is not None}
    refused(lambda: events_table(data), *words)


def test_no_table_at_all() -> None:
    refused(lambda: events_table({name: [] for name in ONE}), "has no rows")
    refused(lambda: events_table(5), "no table can be made of this int")
    doubled = pa.table(
        [["a"], ["b"], ["cpu:0"], [1], [1]], names=["name", "name", "device", "start_ns", "duration_ns"]
    )
    refused(lambda: events_table(doubled), "two columns named name")


HEADER = b"name,device,start_ns,duration_ns\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("e.csv", b"", ["is empty"]),
        ("e.csv", HEADER, ["has no rows"]),
        ("e.csv", b"name,device\na,b\n", ["no column start_ns, duration_ns"]),
        ("e.csv", HEADER + b"a,b,1,2\na,b,1.5,2\n", ["row 2", "start_ns is no whole number"]),
        ("e.csv", HEADER + b"a,b,1,2\na,b,,2\n", ["row 2", "start_ns is missing"]),
        ("e.csv", HEADER + b"a,b,1,2\na,b,1,-2\n", ["row 2", "duration_ns is negative"]),
        ("e.csv", HEADER + b"a,b,9223372036854775807,1\n", ["row 1", "beyond 64 bits"]),
        ("e.csv", HEADER + b"a,b,99223372036854775807,1\n", ["row 1", "beyond 64 bits"]),
        ("e.csv", HEADER + b"a,b,1,2\na,b,1\n", ["cannot be read as CSV"]),
        ("e.csv", HEADER + b"a\xff,b,1,2\n", ["not UTF-8"]),
        ("e.json", b"{", ["cut off"]),
        ("e.json", b'{"traceEvents": [', ["cut off"]),
        ("e.json", b'{"traceEvents": []}', ["has no events"]),
        ("e.json", b"[", ["no events"]),
        ("e.json", b"[]", ["has no events"]),
        ("e.json", b"{'a': 1}", ["is not JSON"]),
        ("e.json", b'{"a": 1}', ["no Chrome trace", "traceEvents"]),
        ("e.json", b'[{"name": "\xff"}]', ["not UTF-8"]),
        ("e.json", b"[1]", ["no Chrome trace", "event 1"]),
        ("e.json", b'[{"ph": "M"}, {"ph": "X", "name": 5}]', ["event 2", "name"]),
        ("e.json", b'[{"ph": "X", "name": "a", "ts": {}}]', ["event 1", "ts"]),
        ("e.json", b'[{"ph": "X", "name": "a", "ts": "NaN", "dur": 1}]', ["(a)", "no number"]),
        ("e.json", b'[{"ph": "X", "name": "a", "ts": 1}]', ["event 1 (a)", "no dur"]),
        ("e.json", b'[{"ph": "X", "name": "a", "dur": 1}]', ["event 1 (a)", "no ts"]),
        ("e.json", b'[{"ph": "X", "ts": 1, "dur": 1}]', ["ts 1", "no name"]),
        ("e.json", b'[{"ph": "X", "name": "a", "ts": 1, "dur": -1}]', ["(a)", "negative"]),
        ("e.json", b'[{"ph": "X", "name": "a", "ts": 1e300, "dur": 1}]', ["(a)", "beyond 64 bits"]),
        (
            "e.json",
            b'[{"ph": "X", "name": "a", "ts": 9223372036854775, "dur": 1}]',
            ["(a)", "beyond 64 bits"],
        ),
        ("e.json", b'[{"ph": "X", "name": "a", "ts": 1e999999999, "dur": 1}]', ["(a)", "beyond 64 bits"]),
        ("e.json", b'[{"ph": "X", "name": "a", "ts": 1, "dur": 1e999999999}]', ["(a)", "beyond 64 bits"]),
        ("e.json", b'[{"ph": "X", "name": "a", "ts": -9e15, "dur": 17e15}]', ["(a)", "beyond 64 bits"]),
        (
            "e.json",
            b'{"baseTimeNanoseconds": -%d, "traceEvents": '
            b'[{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1}]}' % 2**64,
            ["(a)", "beyond 64 bits"],
        ),
        ("e.json", marks("NaN", 2), ["event 1 (a)", "no number"]),
        ("e.json", marks("Infinity", "Infinity"), ["event 1 (a)", "no number"]),
        ("e.json", marks(1, "1e999999999"), ["event 1 (a)", "beyond 64 bits"]),
        ("e.json", b'{"traceEvents": [{"args": {"name": ' + b"[" * 100_000, ["nested too deeply"]),
        ("e.json", b'[{"ph": 5}, {"args": {"name": ' + b"[" * 100_000, ["no Chrome trace"]),
        ("e.json", b'[{"ph": "X", "name": "a", "ts": 1, "dur": 1},{"ph": "X", "na', ["cut off"]),
        ("e.json", b'[{"ph": "X", "name": "a", "ts": 1, "dur": 1, "args": {"x": {}}', ["cut off"]),
        ("e.json", b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1}', ["cut off"]),
        ("e.json.gz", gzip.compress(b"[]" * 500, mtime=0)[:-9], ["cut off"]),
        ("e.json.gz", gzip.compress(b"[]", mtime=0)[:-4] + b"abcd", ["damaged"]),
        ("e.json.gz", gzip.compress(b"", mtime=0), ["is empty"]),
        ("e.xplane.pb", b"\x0a\xff", ["no XPlane file"]),
        ("e.xplane.pb", b"\x10\x01", ["no XPlane file"]),
        ("e.parquet", b"PAR1 and no more", ["cannot be read as Parquet"]),
        ("e.arrow", b"ARROW1\0\0 and no more", ["cannot be read as an Arrow file"]),
        ("e.arrows", b"\xff\xff\xff\xff and no more", ["cut off"]),
        ("e.zip", b"PK\x03\x04", ["is a zip file"]),
        ("e.csv", "name".encode("utf-16"), ["is UTF-16 text"]),
        ("e.bin", b"\x01\x02\x03", ["of no kind that holds events"]),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, words: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    refused(lambda: read_events(path), str(path), *words)


def test_no_file(tmp_path: Path) -> None:
    refused(lambda: read_events(tmp_path / "none.csv"), "does not exist")
    refused(lambda: read_events(tmp_path), "is a folder")


@pytest.mark.parametrize("suffix", ["parquet", "feather", "arrows", "csv.gz"])
def test_cut_off_anywhere(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"e.{suffix}"
    _write(pa.table({name: values * 10 for name, values in ONE.items()}), path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        refused(lambda: read_events(path), str(path))


# ── Chrome traces ─────────────────────────────────────────────────────────────────────────────


def test_any_chrome_trace(tmp_path: Path) -> None:
    events = [
        process(1, "/device:GPU:1 stuff"),
        process(2, "CPU"),
        process(4, "Renderer (gpuprocess)"),
        x("k", 10, 2, pid=1, tid="s"),
        x("k", 11, 0, pid=1, tid="s", args=[]),
        x("host", 1.5, 2, pid=2),
        x("other", 3, 4, pid=3, tid=9),
        x("more", 3, 4, pid=4, tid=9),
        {"ph": "C", "name": "counter", "pid": 1, "ts": 1, "args": {"v": 1}},
        {"ph": "i", "name": "instant", "pid": 1, "ts": 1},
        {"ph": "b", "name": "async", "pid": 1, "ts": 1, "id": 1},
    ]
    rows = read_events(write_json(tmp_path / "t.json", {"traceEvents": events})).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("k", "gpu:1", 10_000, 2_000, None, 0, None),
        ("k", "gpu:1", 11_000, 0, None, 0, None),
        ("host", "cpu:0", 1_500, 2_000, None, 1, None),
        ("other", "cpu:0", 3_000, 4_000, None, 2, None),
        ("more", "cpu:0", 3_000, 4_000, None, 3, None),
    ]


@pytest.mark.parametrize(
    ("events", "device", "lane"),
    [
        ([x("a", 1, 2, cat="cpu_op", tid=2**64 - 1)], "cpu:0", 0),
        ([x("a", 1, 2, cat="kernel", args={"stream": 2**63, "device": 0})], "gpu:0", None),
        (
            [x("a", 1, 2, cat="cpu_op"), x(f"ProfilerStep#{'9' * 20}", 1, 2, cat="user_annotation")],
            "cpu:0",
            1,
        ),
        (
            [x("a", 1, 2, cat="cpu_op"), x(f"ProfilerStep#{'9' * 5000}", 1, 2, cat="user_annotation")],
            "cpu:0",
            1,
        ),
        ([process(1, f"GPU {'9' * 5000}"), x("a", 1, 2)], "gpu:0", 0),
        ([process(1, f"/device:GPU:0/stream:{'9' * 20} Compute"), x("a", 1, 2)], "gpu:0", None),
        ([process(1, "/device:GPU:0/stream:² Compute"), x("a", 1, 2)], "gpu:0", None),
    ],
)
def test_numbers_of_any_size(tmp_path: Path, events: Any, device: str, lane: int | None) -> None:
    rows = read_events(write_json(tmp_path / "t.json", {"traceEvents": events})).to_pylist()
    assert [tuple(row.values()) for row in rows] == [("a", device, 1_000, 2_000, None, lane, None)]


@pytest.mark.parametrize("end", ["", ",", "\n", ",\n ", "]", "]\n"])
def test_plain_array_may_lack_its_end(tmp_path: Path, end: str) -> None:
    path = tmp_path / "t.json.gz"
    text = "[" + ",\n".join(json.dumps(x(name, 1, 2, args={"a": {}})) for name in "ab") + end
    path.write_bytes(gzip.compress(text.encode()))
    assert read_events(path)["name"].to_pylist() == ["a", "b"]


def test_begin_and_end_are_matched_per_thread(tmp_path: Path) -> None:
    def mark(ph: str, ts: int, name: str = "", tid: int = 1) -> dict[str, Any]:
        return {"ph": ph, "ts": ts, "pid": 1, "tid": tid, **({"name": name} if name else {})}

    good = [
        mark("B", 1, "out"),
        mark("B", 2, "in"),
        mark("B", 2, "else", tid=2),
        mark("E", 3),
        mark("E", 9, "out"),
    ]
    path = write_json(tmp_path / "t.json", [*good, x("x", 4, 1), mark("E", 4, tid=2)])
    rows = read_events(path).to_pylist()
    assert [(r["name"], r["start_ns"], r["duration_ns"], r["lane"]) for r in rows] == [
        ("out", 1000, 8000, 0),
        ("in", 2000, 1000, 0),
        ("else", 2000, 2000, 1),
        ("x", 4000, 1000, 0),
    ]
    refused(lambda: read_events(write_json(path, good)), "event 3 (else)", "B without its E")
    refused(lambda: read_events(write_json(path, [mark("E", 1)])), "event 1", "E without its B")
    refused(
        lambda: read_events(write_json(path, [mark("B", 1, "a"), mark("E", 2, "b")])),
        "event 2",
        "E without its B",
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.decimals(0, Decimal(1794740390025259), places=6), st.decimals(0, Decimal(10**9), places=6)
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([0, 1_790_857_026_000_000_000]),
)
def test_decimal_microseconds_are_exact(
    tmp_path_factory: pytest.TempPathFactory, times: list[tuple[Decimal, Decimal]], base_ns: int
) -> None:
    rows = [
        f'{{"ph":"X","name":"a","cat":"cpu_op","pid":1,"tid":1,"ts":{ts:f},"dur":{dur:f}}}'
        for ts, dur in times
    ]
    path = tmp_path_factory.mktemp("chrome") / "t.json"
    path.write_text(f'{{"baseTimeNanoseconds":{base_ns},"traceEvents":[{",".join(rows)}]}}')
    table = read_events(path)
    start = [base_ns + round(ts * 1000) for ts, _ in times]  # Decimal's round: exact, half to even
    end = [base_ns + round((ts + dur) * 1000) for ts, dur in times]
    assert table["start_ns"].to_pylist() == start
    assert table["duration_ns"].to_pylist() == [e - s for s, e in zip(start, end, strict=True)]


def kineto_trace(*events: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 1_790_857_026_000_000_000,
        "traceEvents": [*events],
        **more,
    }


def test_kineto_gpu(tmp_path: Path) -> None:
    def op(name: str, ts: float, dur: float, number: int, tid: int = 5) -> dict[str, Any]:
        return x(name, ts, dur, pid=40, tid=tid, cat="cpu_op", args={"External id": number})

    def kernel(name: str, ts: float, cat: str = "kernel", **args: Any) -> dict[str, Any]:
        return x(name, ts, 3.25, pid=0, tid=7, cat=cat, args={"device": 0, "stream": 7, **args})

    step = "ProfilerStep#"
    table = read_events(
        write_json(
            tmp_path / "t.json",
            kineto_trace(
                x(f"{step}4", 0, 100, pid=40, tid=5, cat="user_annotation", args={"External id": 1}),
                x(f"{step}5", 100, 100, pid=40, tid=5, cat="user_annotation", args={"External id": 2}),
                x(f"{step}4", 50, 300, pid=0, tid=7, cat="gpu_user_annotation", args={"External id": 1}),
                x(
                    "Optimizer.step#Adam.step",
                    60,
                    20,
                    pid=40,
                    tid=5,
                    cat="user_annotation",
                    args={"External id": 9},
                ),
                op("aten::mm", 10.125, 5, 3),
                op("autograd::engine::evaluate_function: MmBackward0", 30, 20, 4, tid=6),
                op("aten::mm", 35, 5, 5, tid=6),
                op("aten::mul_", 65, 5, 6),
                x("cudaLaunchKernel", 12, 1, pid=40, tid=5, cat="cuda_runtime", args={"correlation": 70}),
                x("cudaMemsetAsync", 98, 1, pid=40, tid=5, cat="cuda_runtime", args={"correlation": 71}),
                x("Activity Buffer Request", 1, 1, cat="overhead", args={"External id": 3}),
                x("foo.py(3): f", 1, 90, cat="python_function"),
                {"ph": "s", "id": 70, "pid": 40, "tid": 5, "ts": 12, "cat": "ac2g", "name": "ac2g"},
                kernel("ampere_sgemm_128x64_nn", 150.001, **{"External id": 3, "correlation": 70}),
                kernel("ampere_sgemm_128x64_nt", 120, device=1, **{"External id": 5}),
                kernel("multi_tensor_apply", 130, **{"External id": 6}),
                kernel("in the optimizer, no operator", 140, **{"External id": 9}),
                kernel("Memset (Device)", 160, cat="gpu_memset", correlation=71, stream=20),
                kernel("Memcpy HtoD", 170, cat="gpu_memcpy"),
                kernel("late", 500),
                traceName="t.json",
            ),
        )
    )
    base = 1_790_857_026_000_000_000
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        ("aten::mm", "cpu:0", base + 10_125, 5_000, None, 5, 4),
        (
            "autograd::engine::evaluate_function: MmBackward0",
            "cpu:0",
            base + 30_000,
            20_000,
            "backward",
            6,
            4,
        ),
        ("aten::mm", "cpu:0", base + 35_000, 5_000, "backward", 6, 4),
        ("aten::mul_", "cpu:0", base + 65_000, 5_000, "optimizer", 5, 4),
        ("ampere_sgemm_128x64_nn", "gpu:0", base + 150_001, 3_250, None, 7, 4),  # ran in 5, launched in 4
        ("ampere_sgemm_128x64_nt", "gpu:1", base + 120_000, 3_250, "backward", 7, 4),
        ("multi_tensor_apply", "gpu:0", base + 130_000, 3_250, "optimizer", 7, 4),
        ("in the optimizer, no operator", "gpu:0", base + 140_000, 3_250, "optimizer", 7, 4),
        ("Memset (Device)", "gpu:0", base + 160_000, 3_250, None, 20, 4),  # by its runtime call
        ("Memcpy HtoD", "gpu:0", base + 170_000, 3_250, None, 7, 5),  # by its own time
        ("late", "gpu:0", base + 500_000, 3_250, None, 7, None),
    ]


def test_kineto_that_cannot_be_told(tmp_path: Path) -> None:
    lost = x("k", 1, 1, pid="?", tid=7, cat="kernel", args={"stream": 7})
    refused(lambda: read_events(write_json(tmp_path / "t.json", kineto_trace(lost))), "(k)", "name its GPU")
    # Two ranks in one file reuse each other's ids and steps overlap: own time for kernels, no step.
    twice = [x("op", 1, 1, pid=pid, tid=1, cat="cpu_op", args={"External id": 3}) for pid in (1, 2)]
    steps = [x("ProfilerStep#1", ts, 50, cat="user_annotation") for ts in (0, 10)]
    rows = read_events(write_json(tmp_path / "t.json", kineto_trace(*twice, *steps))).to_pylist()
    assert [(row["lane"], row["step"]) for row in rows] == [(0, None), (1, None)]


def test_timeline_counts_a_kernel_once(tmp_path: Path) -> None:
    job = "/job:localhost/replica:0/task:0/device"
    host, gpu = 1_794_740_396_880_181, 1_794_740_396_880_200

    def op(pid: int, name: str, ts: int, dur: int = 9) -> dict[str, Any]:
        return x(
            "MatMul", ts, dur, pid=pid, tid=0, cat="Op", args={"name": name, "op": "MatMul", "input0": "x"}
        )

    streams = [
        process(0, "Allocators"),
        process(1, f"{job}:CPU:0 Compute"),
        process(2, f"{job}:CPU:0 Tensors"),
        process(3, f"{job}:GPU:0 Compute"),
        process(4, "/device:GPU:0/stream:all Compute"),
        process(5, "/device:GPU:0/stream:13 Compute"),
        process(6, "/device:GPU:0/memcpy Compute"),
        process(7, "/device:GPU:0/stream:14 Compute"),
        op(1, "Adam/beta1", host),
        op(2, "a tensor", host),
        op(3, "net/MatMul", host),  # its launch
        op(4, "net/MatMul", gpu),
        op(4, "net/MatMul", gpu),  # the same name at the same time in two streams: two kernels
        op(4, "gradients/net/MatMul_grad/MatMul", gpu + 20),
        op(5, "net/MatMul", gpu),
        op(7, "net/MatMul", gpu),
        op(5, "gradients/net/MatMul_grad/MatMul", gpu + 20),
        op(6, "edge_3_x", gpu + 1),
        op(7, "edge_3_x", gpu + 1),
        op(6, "only here", gpu + 2),
        {
            "ph": "O",
            "cat": "Tensor",
            "name": "t",
            "pid": 2,
            "tid": 0,
            "ts": host,
            "id": 0,
            "args": {"snapshot": {}},
        },
    ]
    rows = read_events(write_json(tmp_path / "t.json", {"traceEvents": streams})).to_pylist()
    found = [(r["name"], r["device"], r["start_ns"], r["duration_ns"], r["phase"], r["lane"]) for r in rows]
    expected = [
        ("Adam/beta1", "cpu:0", host * 1000, 9_000, "optimizer", None),
        ("net/MatMul", "gpu:0", gpu * 1000, 9_000, None, 13),
        ("net/MatMul", "gpu:0", gpu * 1000, 9_000, None, 14),
        ("gradients/net/MatMul_grad/MatMul", "gpu:0", (gpu + 20) * 1000, 9_000, "backward", 13),
        ("edge_3_x", "gpu:0", (gpu + 1) * 1000, 9_000, None, 14),
        ("only here", "gpu:0", (gpu + 2) * 1000, 9_000, None, None),
    ]
    assert Counter(found) == Counter(expected)
    untraced = [process(3, f"{job}:GPU:0 Compute"), op(3, "net/MatMul", host)]
    rows = read_events(write_json(tmp_path / "t.json", {"traceEvents": untraced})).to_pylist()
    assert [(row["name"], row["device"]) for row in rows] == [("net/MatMul", "gpu:0")]


def test_a_profile_s_view_is_refused(tmp_path: Path) -> None:
    view = {
        "metadata": {"highres-ticks": True},
        "traceEvents": [process(701, "/host:CPU"), x("dot", 1, 2, pid=701)],
    }
    refused(lambda: read_events(write_json(tmp_path / "t.json", view)), "not absolute", ".xplane.pb")


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("bert/encoder/layer_0/MatMul", None),
        ("gradients/bert/layer_0/MatMul_grad/MatMul_1", "backward"),
        ("StatefulPartitionedCall/gradient_tape/net/MatMul/MatMul", "backward"),
        ("Adam/update_dense/kernel/ResourceApplyAdam", "optimizer"),
        ("StatefulPartitionedCall/adam/Sub_7", "optimizer"),
        ("adamant/MatMul", None),
        ("my_gradients/MatMul", None),
        ("jit(step)/jvp(Bert)/layer_0/up/dot_general", "forward"),
        ("jit(step)/transpose(jvp(Bert))/layer_0/up/dot_general", "backward"),
        ("jit(step)/optimizer/sub", "optimizer"),
    ],
)
def test_phases_by_name(name: str, phase: str | None) -> None:
    number = phase_of(name)
    assert (None if number < 0 else PHASES[number]) == phase


# ── XPlane ────────────────────────────────────────────────────────────────────────────────────


class Space:
    """A hand-made XPlane file."""

    def __init__(self, start_ns: int | None = NOW_NS) -> None:
        self.message = protobuf.message_class()()
        if start_ns is not None:
            plane = self.message.planes.add(name="Task Environment")
            plane.stat_metadata[1].name = "profile_start_time"
            plane.stats.add(metadata_id=1, uint64_value=start_ns)

    def line(
        self, plane_name: str, name: str, timestamp_ns: int, events: list[tuple[Any, ...]], id: int = 0
    ) -> None:
        plane = next((p for p in self.message.planes if p.name == plane_name), None)
        plane = plane or self.message.planes.add(name=plane_name)
        line = plane.lines.add(name=name, timestamp_ns=timestamp_ns, id=id)
        for event_name, offset_ps, duration_ps, *rest in events:
            key = len(plane.event_metadata) + 1
            plane.event_metadata[key].name = event_name
            event = line.events.add(metadata_id=key, offset_ps=offset_ps, duration_ps=duration_ps)
            for stat, value in (rest[0] if rest else {}).items():
                number = len(plane.stat_metadata) + 1
                plane.stat_metadata[number].name = stat
                if isinstance(value, int):
                    event.stats.add(metadata_id=number, int64_value=value)
                else:
                    plane.stat_metadata[number + 1].name = value
                    event.stats.add(metadata_id=number, ref_value=number + 1)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.message.SerializeToString())
        return path


def test_xplane_descriptors_are_tensorflow_s() -> None:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("needs tensorflow")
    script = """
import json
from tensorflow.tsl.profiler.protobuf import xplane_pb2
print(json.dumps({m.name: {f.name: [f.number, f.type, f.containing_oneof.name if f.containing_oneof else None,
                                    f.message_type.name if f.message_type else None]
                           for f in m.fields}
                  for t in xplane_pb2.DESCRIPTOR.message_types_by_name.values()
                  for m in (t, *t.nested_types)}))
"""
    real = json.loads(_python(script).splitlines()[-1])
    pool = protobuf.message_class().DESCRIPTOR.file.message_types_by_name
    assert set(pool) == set(protobuf.FIELDS)
    for top in pool.values():
        for message in (top, *top.nested_types):
            for field in message.fields:
                ours = [
                    field.number,
                    field.type,
                    field.containing_oneof.name if field.containing_oneof else None,
                    field.message_type.name if field.message_type else None,
                ]
                assert real[message.name][field.name] == ours, (message.name, field.name)


def test_xplane_by_hand(tmp_path: Path) -> None:
    space = Space()
    space.line("/host:CPU", "python", 0, [("train", 0, 50_000, {"step_num": 7}), ("folded/Add:AddV2", 0, 1)])
    space.line(
        "/host:CPU",
        "tf_Compute/9",
        10,
        [
            ("net/MatMul:_MklMatMul", 1_499, 1_001),
            ("ExecutorState::Process", 0, 90_000),
            ("net/Relu:Relu", 2_500, 0),
            ("gradient_tape/net/Relu:ReluGrad", 60_000_000, 1_000),
        ],
    )
    space.line("/host:CPU", "tf_data_x/1", 10, [("Cast:Cast", 1, 1)])
    space.line(
        "/host:CPU",
        "tf_XLAEigen/3",
        0,
        [("dot.1", 5_000, 2_000, {"hlo_op": "dot.1", "hlo_module": "jit_step"}), ("end: dot.1", 6_000, 1)],
    )
    path = "jit(step)/transpose(jvp(Bert))/up/dot_general"
    space.line(
        "/device:GPU:1",
        "Stream #14(Compute)",
        20,
        [
            ("gemm", 1_000, 1_000, {"hlo_op": "custom-call.3", "name": path}),
            ("fusion_7", 2_000, 1_000, {"hlo_op": "command_buffer_1", "hlo_module": "jit_step"}),
            ("MemcpyH2D", 3_000, 1_000),
            ("sgemm", 4_000, 1_000, {"tf_op": "net/MatMul:MatMul"}),
        ],
        id=14,
    )
    space.line("/device:GPU:1", "XLA Ops", 20, [("gemm", 1_000, 1_000, {"hlo_op": "custom-call.3"})], id=99)
    space.line("/host:CUPTI", "x", 0, [("a/b:MatMul", 0, 1)])
    rows = read_events(space.write(tmp_path / "h.xplane.pb")).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("net/MatMul", "cpu:0", NOW_NS + 11, 2, None, 1, 7),  # 1.499 … 2.5 ns: ends rounded, touching Relu
        ("net/Relu", "cpu:0", NOW_NS + 13, 0, None, 1, 7),
        ("gradient_tape/net/Relu", "cpu:0", NOW_NS + 60_010, 1, "backward", 1, None),
        ("jit_step/dot.1", "cpu:0", NOW_NS + 5, 2, None, 3, None),
        (path, "gpu:1", NOW_NS + 21, 1, "backward", 14, None),
        ("jit_step/fusion_7", "gpu:1", NOW_NS + 22, 1, None, 14, None),
        ("MemcpyH2D", "gpu:1", NOW_NS + 23, 1, None, 14, None),
        ("net/MatMul", "gpu:1", NOW_NS + 24, 1, None, 14, None),
    ]


def test_an_xplane_step_beyond_64_bits_is_none(tmp_path: Path) -> None:
    space = Space()
    space.line("/host:CPU", "python", 0, [("train", 0, 50_000, {"step_num": 7})])
    space.line("/host:CPU", "tf_Compute/1", 10, [("a:MatMul", 0, 1_000)])
    space.message.planes[1].lines[0].events[0].stats[0].uint64_value = 2**63
    assert read_events(space.write(tmp_path / "h.xplane.pb"))["step"].to_pylist() == [None]


def test_bad_xplanes(tmp_path: Path) -> None:
    path, operation = tmp_path / "h.xplane.pb", ("a:MatMul", 1_000, 1_000)

    def made(
        start_ns: int | None, timestamp_ns: int, *events: tuple[Any, ...], plane: str = "/host:CPU"
    ) -> Path:
        space = Space(start_ns)
        space.line(plane, "tf_Compute/1", timestamp_ns, list(events))
        return space.write(path)

    refused(lambda: read_events(made(None, 5, operation)), "does not say when it began")
    # Old profilers: dates on the lines themselves.
    assert read_events(made(None, NOW_NS, operation))["start_ns"].to_pylist() == [NOW_NS + 1]
    refused(lambda: read_events(made(NOW_NS, 5, operation, plane="/host:else")), "has no events")
    refused(lambda: read_events(made(NOW_NS, 5, ("a:MatMul", 1, -1))), "negative")
    refused(lambda: read_events(made(NOW_NS, 5, ("a:MatMul", 2**63 - 1, 1))), "beyond 64 bits")
    refused(lambda: read_events(made(2**63 - 10, 5, ("a:MatMul", 50_000, 1))), "beyond 64 bits")
    content = made(NOW_NS, 5, *[operation] * 20).read_bytes()
    for length in range(1, len(content)):
        path.write_bytes(content[:length])
        refused(lambda: read_events(path), str(path))


# ── real frameworks ───────────────────────────────────────────────────────────────────────────


def _python(script: str, *words: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _traced(framework: str, script: str, folder: Path, pattern: str) -> tuple[pa.Table, list[int]]:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    bracket_ns = [int(word) for word in _python(script, str(folder)).split()[-2:]]
    (path,) = folder.rglob(pattern)
    table = read_events(path)
    assert table.schema.equals(EVENTS)
    start_ns = table["start_ns"].to_numpy()
    assert bracket_ns[0] <= start_ns.min()
    assert (start_ns + table["duration_ns"].to_numpy()).max() <= bracket_ns[1]
    return table, bracket_ns


def _per_step(table: pa.Table) -> dict[str, set[int]]:
    counts = Counter((row["name"], row["step"]) for row in table.to_pylist())
    return {name: {count for (other, _), count in counts.items() if other == name} for name, _ in counts}


def test_torch(tmp_path: Path) -> None:
    script = """
import sys, time, torch
from torch.profiler import ProfilerActivity, profile, schedule
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())
begin = time.time_ns()
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=3),
             on_trace_ready=lambda p: p.export_chrome_trace(sys.argv[1] + "/trace.json.gz")) as profiler:
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        profiler.step()
print(begin, time.time_ns())
"""
    table, _ = _traced("torch", script, tmp_path, "trace.json.gz")
    assert set(table["device"].to_pylist()) == {"cpu:0"}
    assert None not in table["lane"].to_pylist()
    assert set(table["step"].to_pylist()) == {2, 3, 4}
    counts = _per_step(table)
    assert counts["aten::addmm"] == {2}
    assert counts["aten::relu"] == {1}
    # x @ w of two layers, and the gradient of the input of the second: x itself needs none
    phases = Counter((row["name"], row["phase"]) for row in table.to_pylist())
    assert phases["aten::mm", "backward"] == 9
    assert phases["aten::mm", None] == 0
    assert phases["aten::addmm", None] == 6
    assert "optimizer" in table["phase"].to_pylist()


def test_tensorflow_timeline(tmp_path: Path) -> None:
    script = """
import sys, time
import tensorflow as tf
from tensorflow.python.client import timeline
v1 = tf.compat.v1
with tf.Graph().as_default(), v1.Session() as session:
    w = v1.get_variable("dense/w", [8, 8])
    with tf.name_scope("net"):
        y = tf.matmul(tf.ones([8, 8]), w)
    train = v1.train.AdamOptimizer().minimize(tf.reduce_sum(y * y))
    session.run(v1.global_variables_initializer())
    data = v1.RunMetadata()
    begin = time.time_ns()
    session.run(train, options=v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE), run_metadata=data)
    end = time.time_ns() + 1000
    text = timeline.Timeline(data.step_stats).generate_chrome_trace_format(show_memory=True)
    open(sys.argv[1] + "/timeline.json", "w").write(text)
    print(sum(len(d.node_stats) for d in data.step_stats.dev_stats), begin // 1000 * 1000, end)
"""
    table, _ = _traced("tensorflow", script, tmp_path, "timeline.json")
    rows = {row["name"]: row for row in table.to_pylist()}
    assert {row["device"] for row in rows.values()} == {"cpu:0"}
    assert rows["net/MatMul"]["phase"] is None
    assert rows["gradients/net/MatMul_grad/MatMul_1"]["phase"] == "backward"
    assert rows["Adam/update_dense/w/ResourceApplyAdam"]["phase"] == "optimizer"
    assert len(rows) == table.num_rows  # one step: each node once


def test_tensorflow_xplane(tmp_path: Path) -> None:
    script = """
import sys, time
import tensorflow as tf
w = tf.Variable(tf.ones([8, 8]))
@tf.function
def step(x):
    with tf.GradientTape() as tape, tf.name_scope("net"):
        y = tf.reduce_sum(tf.tanh(tf.matmul(x, w)))
    w.assign_sub(tape.gradient(y, w))
x = tf.ones([8, 8])
step(x)
begin = time.time_ns()
tf.profiler.experimental.start(sys.argv[1])
for i in range(3):
    with tf.profiler.experimental.Trace("train", step_num=i, _r=1):
        step(x)
tf.profiler.experimental.stop()
print(begin, time.time_ns())
"""
    table, _ = _traced("tensorflow", script, tmp_path, "*.xplane.pb")
    assert set(table["step"].to_pylist()) == {0, 1, 2}
    counts = _per_step(table)
    assert counts["net/MatMul"] == {1}
    assert counts["gradient_tape/net/MatMul/MatMul"] == {1}
    assert all(count == {1} for count in counts.values())
    phases = {(row["name"], row["phase"]) for row in table.to_pylist()}
    assert ("gradient_tape/net/TanhGrad", "backward") in phases


def test_jax_xplane(tmp_path: Path) -> None:
    script = """
import sys, time
import jax, jax.numpy as jnp
step = jax.jit(lambda w, x: w - jnp.tanh(x @ w).sum())
w = x = jnp.ones((64, 64))
step(w, x).block_until_ready()
options = jax.profiler.ProfileOptions()
options.python_tracer_level = 0
begin = time.time_ns()
jax.profiler.start_trace(sys.argv[1], profiler_options=options)
for _ in range(4):
    w = step(w, x)
w.block_until_ready()
jax.profiler.stop_trace()
print(begin, time.time_ns())
"""
    table, _ = _traced("jax", script, tmp_path, "*.xplane.pb")
    assert all(count % 4 == 0 for count in Counter(table["name"].to_pylist()).values())
    assert all(name.startswith("jit") for name in table["name"].to_pylist())
    (view,) = tmp_path.rglob("*.trace.json.gz")
    refused(lambda: read_events(view), "not absolute", ".xplane.pb")
