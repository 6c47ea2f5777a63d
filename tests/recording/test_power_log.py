"""Power logs: local times, missing values, and nothing wrong in silence."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusal import refused
from smaragdine.accounting.device_power import from_power_table
from smaragdine.recording.power_logs import POWER, power_table, read_power

HEADER = "timestamp, index, power.draw [W]\n"
BERLIN = ZoneInfo("Europe/Berlin")


def rows(table: pa.Table) -> list[tuple[str, int, float]]:
    assert table.schema.equals(POWER)
    return [tuple(row.values()) for row in table.to_pylist()]


def unix_ns(text: str) -> int:
    """Of an ISO time with offset, in whole milliseconds."""
    return (
        round((datetime.fromisoformat(text) - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(milliseconds=1))
        * 10**6
    )


@pytest.fixture
def log(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "power.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["gpu:0", "cpu:0"]),
            st.integers(0, 2**61),
            st.floats(0, 1e5, allow_nan=False, allow_subnormal=False),
        ),
        min_size=1,
        max_size=20,
        unique_by=lambda row: row[:2],
    )
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, readings: list[tuple[str, int, float]]) -> None:
    device, t_ns, power_w = zip(*readings, strict=True)
    data = {"device": list(device), "t_ns": np.array(t_ns), "power_w": np.array(power_w)}
    folder = tmp_path_factory.mktemp("power")
    pq.write_table(pa.table(data), folder / "p.parquet")
    pa.feather.write_feather(pa.table(data), folder / "p.arrow")
    text = "".join(f"{d},{t},{p!r}\n" for d, t, p in readings)
    (folder / "p.csv").write_text("device,t_ns,power_w\n" + text)
    (folder / "p.csv.gz").write_bytes(gzip.compress(("device,t_ns,power_w\n" + text).encode()))
    expected = sorted(readings, key=lambda row: (row[1], list(dict.fromkeys(device)).index(row[0])))
    for name in ("p.parquet", "p.arrow", "p.csv", "p.csv.gz"):
        assert rows(read_power(folder / name)) == expected
    assert rows(power_table(data)) == expected
    assert rows(power_table(pd.DataFrame(data))) == expected


def test_order_and_repeats() -> None:
    data = {"device": ["gpu:0", "gpu:1", "gpu:0", "gpu:0"], "t_ns": [5, 5, 3, 5], "power_w": [1, 2, 3, 1]}
    assert rows(power_table(data)) == [("gpu:0", 3, 3.0), ("gpu:0", 5, 1.0), ("gpu:1", 5, 2.0)]
    refused(lambda: power_table({**data, "power_w": [1, 2, 3, 4]}), "gpu:0 has 1.0 W and 4.0 W at 5 ns")


def test_how_long_each_power_holds() -> None:
    data = {"device": ["a", "b", "a"], "t_ns": [50, 0, 10], "power_w": [3, 1, 2], "duration_ns": [5, 90, 20]}
    table = power_table(data)
    assert table.to_pylist() == [
        {"device": "b", "t_ns": 0, "power_w": 1.0, "duration_ns": 90},
        {"device": "a", "t_ns": 10, "power_w": 2.0, "duration_ns": 20},
        {"device": "a", "t_ns": 50, "power_w": 3.0, "duration_ns": 5},
    ]
    meters = from_power_table(table, hold_s=1e-9)
    assert meters.of["a"].trace.energy_until_j(100) == pytest.approx((2 * 20 + 3 * 5) * 1e-9)
    assert meters.of["a"].trace.missing(10, 55) == [(30, 50)]
    refused(lambda: power_table({**data, "duration_ns": [5, 90, 41]}), "a has two powers at 50 ns")
    refused(lambda: power_table({**data, "duration_ns": [5, -1, 20]}), "row 2", "duration_ns is negative")
    refused(lambda: power_table({**data, "duration_ns": [5, 2**63 - 1, 20]}), "row 2", "is no time")
    refused(lambda: power_table({**data, "duration_ns": [5, None, 20]}), "row 2", "duration_ns is missing")


def test_sorted_int64_is_not_copied() -> None:
    t_ns, power_w = np.arange(10), np.ones(10)
    table = power_table({"device": ["gpu:0"] * 10, "t_ns": t_ns, "power_w": power_w})
    assert table["t_ns"].chunk(0).buffers()[1].address == t_ns.ctypes.data
    assert table["power_w"].chunk(0).buffers()[1].address == power_w.ctypes.data


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"power_w": None}, ["no column power_w"]),
        ({"power_w": [1.0, float("nan")]}, ["row 2", "power_w is"]),
        ({"power_w": pa.array([1.0, float("nan")])}, ["row 2", "power_w is not finite"]),
        ({"power_w": [1.0, float("inf")]}, ["row 2", "power_w is not finite"]),
        ({"power_w": [1.0, -0.5]}, ["row 2", "power_w is negative"]),
        ({"power_w": [1.0, None]}, ["row 2", "power_w is missing"]),
        ({"power_w": ["1", "x"]}, ["row 2", "power_w is no number"]),
        ({"power_w": [True, False]}, ["power_w is of type bool"]),
        ({"t_ns": [1.5, 2]}, ["row 1", "t_ns is no whole number"]),
        ({"t_ns": [1, None]}, ["row 2", "t_ns is missing"]),
        ({"device": [0, 0]}, ["device is of type int64"]),
    ],
)
def test_bad_columns(change: dict[str, Any], words: list[str]) -> None:
    data = {"device": ["gpu:0", "gpu:0"], "t_ns": [1, 2], "power_w": [1.0, 2.0], **change}
    refused(
        lambda: power_table({name: values for name, values in data.items() if values is not None}), *words
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["is empty"]),
        ("device,t_ns,power_w\n", ["has no rows"]),
        ("device,t_ns,power_w\ngpu:0,1,nan\n", ["row 1", "not finite"]),
        ("device,t_ns,power_w\ngpu:0,1,5\ngpu:0,2,-5\n", ["row 2", "negative"]),
        ("device,t_ns,power_w\ngpu:0,1,five\n", ["row 1", "no number"]),
        ("device,t_ns\ngpu:0,1\n", ["no column power_w"]),
        ("[]", ["of no kind that holds power"]),
        (gzip.compress(HEADER.encode() * 99, mtime=0)[:-9], ["cut off"]),
        (HEADER, ["has no rows"]),
        ("timestamp, uuid, power.draw [W]\n2026/11/15 10:52:16.123, GPU-1, 71.45 W\n", ["no column index"]),
        ("index, power.draw [W]\n0, 71.45 W\n", ["no column timestamp"]),
        (HEADER + "2026/11/15 10:52:16.123, 0, [N/A]\n", ["has no power"]),
        (HEADER + "2026/11/15 10:52:16.123, 0, much\n", ["row 1", "no number of watts"]),
        (HEADER + "2026/11/15 10:52:16.123, 0, -5 W\n", ["row 1", "no number of watts"]),
        (HEADER + "2026/11/15 10:52:16.123, x, 5 W\n", ["row 1", "index is no number"]),
        (HEADER + "15.11.2026 10:52, 0, 5 W\n", ["row 1", "timestamp is not like"]),
        (HEADER + "2026/13/15 10:52:16.123, 0, 5 W\n", ["a time that is none"]),
        (
            HEADER + "2026/11/15 10:52:16.123, 0\n2026/11/15 10:52:17.123, 0, 5 W\n",
            ["2 fields, the header 3"],
        ),
    ],
)
def test_bad_files(log: Any, content: str | bytes, words: list[str]) -> None:
    refused(lambda: read_power(log(content), "UTC"), *words)


def test_nvidia_smi(log: Any) -> None:
    text = HEADER + (
        "2026/11/15 10:52:16.123, 0, 71.45 W\n"
        "2026/11/15 10:52:16.124, 1, [Not Supported]\n"
        "2026/11/15 10:52:16.223, 0, [Unknown Error]\n"
        "timestamp, index, power.draw [W]\n"
        "2026/11/15 10:52:16.224, 1, 60 W\n"
        "2026/11/15 10:52:16.323, 0, 70.00 W\n"
    )
    expected = [
        ("gpu:0", unix_ns("2026-11-15T10:52:16.123+02:00"), 71.45),
        ("gpu:1", unix_ns("2026-11-15T10:52:16.224+02:00"), 60.0),
        ("gpu:0", unix_ns("2026-11-15T10:52:16.323+02:00"), 70.0),
    ]
    assert rows(read_power(log(text), "+02:00")) == expected
    assert rows(read_power(log(text.replace("\n", "\r\n")), "+0200")) == expected
    assert rows(read_power(log(text.replace(" W\n", "\n")), "Africa/Cairo")) == expected  # nounits
    shifted = [(device, t_ns + 2 * 3600 * 10**9, power_w) for device, t_ns, power_w in expected]
    assert rows(read_power(log(text), "UTC")) == shifted


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        ("2026/11/15 10:52:17.123, 0, 70.00 W", 2),
        ("2026/11/15 10:52:17.123, 0, 70.00", 2),
        ("2026/11/15 10:52:17.123, 0, 70.0", 1),
        ("2026/11/15 10:52:17.123, 0, 7", 1),
        ("2026/11/15 10:52:17.123, ", 1),
        ("2026/1", 1),
    ],
)
def test_a_line_being_written_is_left_out(log: Any, end: str, kept: int) -> None:
    path = log(HEADER + "2026/11/15 10:52:16.123, 0, 71.45 W\n" + end)
    assert len(rows(read_power(path, "UTC"))) == kept


def test_which_power_is_taken(log: Any) -> None:
    header = "power.draw.average [W], timestamp, name, power.draw [W], index, power.draw.instant [W]\n"
    when = "2026/11/15 10:52:16.123, H200"
    text = (
        header
        + f"1.0 W, {when}, 2.0 W, 0, 3.0 W\n1.0 W, {when}, 2.0 W, 1, [N/A]\n1.0 W, {when}, N/A, 2, [N/A]\n"
    )
    assert [power_w for _, _, power_w in rows(read_power(log(text), "UTC"))] == [3.0, 2.0, 1.0]


# 25 October 2026: at 03:00 +02:00 clocks in Berlin go back to 02:00 +01:00.
def _berlin(log: Any, *times: str) -> list[str]:
    text = HEADER + "".join(f"2026/10/25 {t}, 0, 50.00 W\n" for t in times)
    return [
        datetime.fromtimestamp(t_ns / 1e9, BERLIN).strftime("%H:%M %z")
        for _, t_ns, _ in rows(read_power(log(text), "Europe/Berlin"))
    ]


def test_the_hour_that_comes_twice(log: Any) -> None:
    first, second = "+0200", "+0100"
    assert _berlin(log, "01:59:00", "02:30:00", "02:59:00", "02:00:00", "02:58:00", "03:00:00") == [
        f"01:59 {first}",
        f"02:30 {first}",
        f"02:59 {first}",
        f"02:00 {second}",
        f"02:58 {second}",
        f"03:00 {second}",
    ]
    assert _berlin(log, "01:59:00", "02:30:00") == [f"01:59 {first}", f"02:30 {first}"]
    assert _berlin(log, "02:30:00", "03:01:00") == [f"02:30 {second}", f"03:01 {second}"]
    assert _berlin(log, "02:30:00", "02:10:00") == [f"02:30 {first}", f"02:10 {second}"]
    refused(lambda: _berlin(log, "02:30:00", "02:31:00"), "showed twice", "+02:00")
    refused(lambda: _berlin(log, "02:30:00", "02:10:00", "02:05:00"), "go back twice")


def test_each_gpu_has_its_own_order(log: Any) -> None:
    lines = [("02:59:59.900", 0), ("02:59:59.901", 1), ("02:00:00.000", 0), ("02:00:00.001", 1)]
    text = HEADER + "".join(f"2026/10/25 {t}, {gpu}, 50.00 W\n" for t, gpu in lines)
    start = unix_ns("2026-10-25T02:59:59.900+02:00")
    assert [(d, (t - start) // 10**6) for d, t, _ in rows(read_power(log(text), "Europe/Berlin"))] == [
        ("gpu:0", 0),
        ("gpu:1", 1),
        ("gpu:0", 100),
        ("gpu:1", 101),
    ]


def test_a_time_that_does_not_exist(log: Any) -> None:
    path = log(HEADER + "2026/03/29 01:59:59.000, 0, 50.00 W\n2026/03/29 02:30:00.000, 0, 50.00 W\n")
    refused(lambda: read_power(path, "Europe/Berlin"), "row 2", "does not exist")


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def put(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield put
    monkeypatch.undo()
    time.tzset()


def test_the_machine_s_own_zone(log: Any, zone: Any) -> None:
    zone("Europe/Berlin")
    text = (
        HEADER
        + "2026/10/25 01:59:00, 0, 50.00 W\n2026/10/25 02:59:00, 0, 51.00 W\n2026/10/25 02:00:00, 0, 5.00 W\n"
    )
    assert rows(read_power(log(text))) == rows(read_power(log(text), "Europe/Berlin"))
    path = log(HEADER + "2026/03/29 02:30:00.000, 0, 50.00 W\n")
    refused(lambda: read_power(path), "does not exist")


@pytest.mark.parametrize("tz", ["Europe/Nowhere", "+2", "+25:00", "../etc/passwd", ""])
def test_no_such_zone(log: Any, tz: str) -> None:
    path = log(HEADER + "2026/11/15 10:52:16.123, 0, 71.45 W\n")
    refused(lambda: read_power(path, tz), "no time zone")
