"""What `smaragdine account` cannot work with: one line, exit code 2, nothing written; no wrong number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli import smaragdine
from smaragdine.cli.main import main

MS = 1_000_000
HEADS = {"events": "name,device,start_ns,duration_ns", "power": "device,t_ns,power_w"}
EVENTS = f"{HEADS['events']}\na,gpu:0,0,{10 * MS}\nb,gpu:0,{10 * MS},{20 * MS}\n"
POWER = f"{HEADS['power']}\n" + "".join(f"gpu:0,{t * 10 * MS},{100 + t}\n" for t in range(4))
LATE = 2**63 - 1 - 5
DAY = 86_400 * 1000 * MS


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("events.csv").write_text(EVENTS)
    Path("power.csv").write_text(POWER)
    Path("folder").mkdir()
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr. No other file is there than before, whole or half."""
    before = sorted(Path().rglob("*"))
    assert main(["account", *words, "--json", "out.json", "-o", "out.parquet"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("smaragdine: ")
    assert err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
    return err


FILES = ["--events", "events.csv", "--power", "power.csv"]


@pytest.mark.parametrize(
    ("which", "content", "said"),
    [
        ("events", "name,device,start_ns\na,gpu:0,0\n", "no column duration_ns"),
        ("power", "device,power_w\ngpu:0,1\n", "no column t_ns"),
        ("events", EVENTS + "c,gpu:0,5,-1\n", "row 3: duration_ns is negative"),
        ("power", POWER + f"gpu:0,{50 * MS},nan\n", "row 5: power_w is not finite"),
        ("power", POWER + f"gpu:0,{50 * MS},inf\n", "row 5: power_w is not finite"),
        ("power", POWER + f"gpu:0,{50 * MS},-1\n", "row 5: power_w is negative"),
        ("power", POWER + f"gpu:0,{50 * MS},\n", "row 5: power_w is"),
        ("power", POWER + f"gpu:0,{50 * MS},many\n", "row 5: power_w is no number"),
        ("power", POWER + f"gpu:0,{10 * MS},5\n", "gpu:0 has 101.0 W and 5.0 W"),
        ("events", EVENTS.replace("gpu:0", "gpu:7"), "no device in common"),
        ("events", "", "empty"),
        ("power", "", "empty"),
        ("events", HEADS["events"] + "\n", "no rows"),
        ("power", HEADS["power"] + "\n", "no rows"),
        ("events", EVENTS + f"c,gpu:0,{LATE},6\n", "row 3: start_ns + duration_ns is beyond 64 bits"),
        ("events", EVENTS + f"c,gpu:0,{2**63},6\n", "row 3: start_ns is beyond 64 bits"),
        ("power", POWER + f"gpu:0,{2**64},6\n", "row 5: t_ns is beyond 64 bits"),
        ("events", EVENTS + ",gpu:0,1,6\n", "row 3: name is empty"),
        ("events", EVENTS + "c,,1,6\n", "row 3: device is empty"),
        ("events", EVENTS + "c,gpu:0,1.5,6\n", "row 3: start_ns is no whole number"),
        ("power", POWER + "gpu:0,1792890000.25,6\n", "row 5: t_ns is no whole number"),
        ("events", EVENTS + "c,gpu:0\n", "cannot be read as CSV"),
        ("events", f"{HEADS['events']}\na,gpu:0,{DAY},5\n", "no time in common"),
        ("power", f"{HEADS['power']}\ngpu:0,{DAY},5\ngpu:0,{DAY + 5},5\n", "no time in common"),
        ("power", f"{HEADS['power']}\ngpu:0,{40 * MS},5\ngpu:0,{50 * MS},5\n", "no time in common"),
        ("power", f"{HEADS['power']}\ngpu:0,0,100\n", "covers no time: one reading"),
        ("events", b"\x00\x01\x02\xff" * 100, ""),
        ("power", b"\x00\x01\x02\xff" * 100, ""),
        ("events", EVENTS.encode() + b"\xff\xfe,gpu:0,1,6\n", "not UTF-8"),
        ("events", EVENTS.encode("utf-16"), "UTF-16"),
        ("events", gzip.compress(EVENTS.encode(), mtime=0)[:-9], "cut off"),
        ("power", gzip.compress(POWER.encode(), mtime=0)[:-20], "cut off"),
        ("events", '{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur"', "cut off"),
        ("events", '{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": -1}]}', "negative"),
        ("power", '{"traceEvents": []}', "no kind that holds power"),
    ],
)
def test_bad_files(capsys: pytest.CaptureFixture[str], which: str, content: str | bytes, said: str) -> None:
    Path(f"{which}.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    line = refused(capsys, *FILES)
    assert said in line
    if not any(words in said for words in ("in common", "has 101.0 W", "covers no time")):
        assert f"{which}.csv" in line


@pytest.mark.parametrize("cut", [3, 12, 100, 400])
def test_a_parquet_file_that_is_cut_off(capsys: pytest.CaptureFixture[str], cut: int) -> None:
    pq.write_table(
        pa.table({"name": ["a"], "device": ["gpu:0"], "start_ns": [0], "duration_ns": [10 * MS]}),
        "whole.parquet",
    )
    Path("cut.parquet").write_bytes(Path("whole.parquet").read_bytes()[:-cut])
    assert "cut.parquet" in refused(capsys, "--events", "cut.parquet", "--power", "power.csv")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to account"),
        (["--events", "events.csv"], "nothing to account"),
        (["--power", "power.csv"], "nothing to account"),
        (["--events", "", "--power", ""], "nothing to account"),
        (["folder", "--power", "power.csv"], "for power logs"),
        (["folder", "--tz", "UTC"], "for power logs"),
        (["folder"], "no recording"),
        (["nowhere"], "nowhere does not exist"),
        (["--events", "folder", "--power", "power.csv"], "folder is a folder"),
        (["--events", "events.csv", "--power", "nowhere.csv"], "nowhere.csv does not exist"),
        ([*FILES, "--hold-s", "0"], "--hold-s"),
        ([*FILES, "--hold-s", "nan"], "--hold-s"),
        ([*FILES, "--merge", "layer_("], "merge rule"),
        ([*FILES, "--merge", "layer_(=x"], "merge rule"),
        ([*FILES, "--per-step"], "no steps"),
        ([*FILES, "--baseline", "folder"], "--baseline"),
        ([*FILES, "--idle-w", "300", "--limit-w", "200"], "--idle-w"),
        ([*FILES, "--window-s", "-1"], "--window-s"),
        ([*FILES, "--top", "many"], "--top"),
        ([*FILES, "--tops", "3"], "--tops"),
        ([*FILES, "and", "more"], "more"),
    ],
)
def test_bad_words(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert said in refused(capsys, *words)


def test_an_unknown_path_and_zone() -> None:
    done = smaragdine("account", *FILES, "--zoom", "no/such/layer")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no/such/layer" in done.stderr
    Path("power.csv").write_text("timestamp, index, power.draw [W]\n2026/11/15 10:00:00.000, 0, 5.00 W\n")
    done = smaragdine("account", *FILES, "--tz", "Europe/Nowhere")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "Europe/Nowhere" in done.stderr


@pytest.mark.parametrize("option", ["-o", "--json"])
@pytest.mark.parametrize(
    "place",
    ["folder", ".", "/", "", "nowhere/out.json", "events.csv/out.json", "folder.json", "x" * 300 + ".json"],
)
def test_where_nothing_can_be_written(capsys: pytest.CaptureFixture[str], option: str, place: str) -> None:
    Path("folder.json").mkdir()
    before = sorted(Path().rglob("*"))
    assert main(["account", *FILES, option, place]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("suffix", ["", ".txt", ".feather"])
def test_a_suffix_nobody_knows(capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    assert main(["account", *FILES, "-o", f"footprint{suffix}"]) == 2
    assert ".parquet, .arrow, .csv, .json" in capsys.readouterr().err


# Odd, but with a documented treatment


def accounted(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["account", *FILES, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_order_and_repeats_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    whole = accounted(capsys)
    header, *rows = POWER.splitlines()
    Path("power.csv").write_text("\n".join([header, *rows[::-1], rows[1], rows[1]]) + "\n")
    header, *rows = EVENTS.splitlines()
    Path("events.csv").write_text("\n".join([header, *rows[::-1]]) + "\n")
    assert accounted(capsys) == whole


def test_devices_on_one_side_only(capsys: pytest.CaptureFixture[str]) -> None:
    Path("events.csv").write_text(EVENTS + "c,gpu:1,5,6\nd,gpu:1,5,6\n")
    Path("power.csv").write_text(POWER + "gpu:2,0,7\ngpu:2,1000000000,7\n")
    found = accounted(capsys)
    assert found["without_power"] == {"gpu:1": 2}
    unused = found["devices"]["gpu:2"]  # pyright: ignore
    assert (unused["total_j"], unused["idle_j"], unused["rows"]) == (14.0, 14.0, [])


def test_a_device_that_draws_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("power.csv").write_text(f"{HEADS['power']}\ngpu:0,0,0\ngpu:0,{10 * MS},0\ngpu:0,{20 * MS},0\n")
    found = accounted(capsys)
    assert found["devices"]["gpu:0"]["total_j"] == 0.0  # pyright: ignore
    assert found["remarks"] == []


def test_a_device_of_which_one_reading_is_known_is_absent_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("events.csv").write_text(EVENTS + "c,gpu:1,5,6\n")
    Path("power.csv").write_text(POWER + "gpu:1,5,100\n")
    found = accounted(capsys)
    assert list(found["devices"]) == ["gpu:0"]  # pyright: ignore
    assert found["without_power"] == {"gpu:1": 1}
    assert [said for said in found["remarks"] if said.startswith("gpu:1: its power log covers no time")]  # pyright: ignore
    assert main(["account", *FILES]) == 0
    assert "gpu:1: its power log covers no time" in " ".join(capsys.readouterr().out.split())


def test_a_log_in_milliwatts_is_doubted(capsys: pytest.CaptureFixture[str]) -> None:
    """It is not refused: what is logged as one device may be a whole rack."""
    Path("power.csv").write_text(f"{HEADS['power']}\ngpu:0,0,70000\ngpu:0,{10 * MS},70000\n")
    (remark,) = accounted(capsys)["remarks"]  # pyright: ignore
    assert remark.startswith("gpu:0: its power log goes up to 70.0 kW")
    assert main(["account", *FILES]) == 0
    assert "is it in watts?" in capsys.readouterr().out


def test_events_without_length_cost_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("events.csv").write_text(f"{HEADS['events']}\na,gpu:0,5,0\na,gpu:0,5,0\n")
    device = accounted(capsys)["devices"]["gpu:0"]  # pyright: ignore
    (row,) = device["rows"]
    assert (row["energy_j"], row["busy_s"], row["power_w"], row["count"]) == (0.0, 0.0, None, 2)
    assert device["idle_j"] == pytest.approx(device["total_j"])
    assert device["total_j"] > 0


def test_a_footprint_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["account", *FILES, "-o", "good.json"]) == 0
    good = json.loads(Path("good.json").read_text())
    capsys.readouterr()
    no_rows = {**good, "devices": {"gpu:0": {"total_j": 1}}}
    for bad in ("", "[]", "{}", "3", '{"devices": []}', '{"devices": {"gpu:0": 3}}', json.dumps(no_rows)):
        Path("bad.json").write_text(bad)
        assert main(["compare", "good.json", "bad.json"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "bad.json is no footprint" in err
    for name in ("bad.parquet", "bad.arrow", "bad.csv"):
        Path(name).write_bytes(b"PAR1 and nothing")
        assert main(["compare", "good.json", name]) == 2
        assert f"{name} is no footprint" in capsys.readouterr().err
