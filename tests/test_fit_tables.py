"""`smaragdine fit`: tables of others, a sweep's own table, and what is wrong with either in one line."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recordings
from cli import smaragdine
from refusal import refused
from smaragdine.cli.fit import main
from smaragdine.recording.format import channel_to_dict
from smaragdine.recording.reader import open_recording
from smaragdine.recording.writer import ReadingsWriter
from smaragdine.sensors.base import Channel
from smaragdine.sweep.fit import analyse
from smaragdine.sweep.measured import measure
from smaragdine.sweep.measurements import Columns, read_groups
from smaragdine.sweep.settings import groups_of_sweep
from smaragdine.sweep.table import RESULTS, SCHEMA, Repetition, read_results, results_table, write_results

COLUMNS = Columns("limit", "time", "power")
WORDS = ("--limit", "limit", "--time", "time", "--power", "power")
ROWS = "limit,time,power\n100,4,10\n150,2,15\n200,1,50\n250,1,60\n"
DATA = os.environ.get("SMARAGDINE_DATA")
zeus = pytest.mark.skipif(not DATA, reason="SMARAGDINE_DATA names no folder with measured tables")


def _file(tmp_path: Path, text: str, name: str = "table.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def _json(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["csv", "tsv", "semicolon", "bom", "parquet", "arrow", "gzip"])
def test_every_kind_of_table_gives_the_same_groups(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"table.{kind}"
    columns = {"limit": [100, 150, 200, 250], "time": [4, 2, 1, 1], "power": [10, 15, 50, 60]}
    if kind == "parquet":
        pq.write_table(pa.table(columns), path)
    elif kind == "arrow":
        with pa.ipc.new_file(path, pa.table(columns).schema) as file:
            file.write(pa.table(columns))
    elif kind == "gzip":
        import gzip

        path.write_bytes(gzip.compress(ROWS.encode()))
    else:
        mark = {"tsv": "\t", "semicolon": ";"}.get(kind, ",")
        path.write_bytes((b"\xef\xbb\xbf" if kind == "bom" else b"") + ROWS.replace(",", mark).encode())
    (group,) = read_groups(path, COLUMNS)
    assert group.limit.tolist() == [100, 150, 200, 250]
    assert group.energy_j.tolist() == [40, 30, 50, 60]
    assert group.by == {}


def test_groups_are_sorted_and_whole_numbers_are_numbers(tmp_path: Path) -> None:
    rows = [f"{net},{batch},{limit},1,{limit}" for net in "ba" for batch in (16, 8) for limit in (3, 2, 1)]
    path = _file(tmp_path, "\n".join(["net,batch,limit,time,joules", *rows]))
    found = read_groups(path, Columns("limit", "time", energy="joules", by=("net", "batch")))
    assert [group.by for group in found] == [{"net": n, "batch": b} for n in "ab" for b in (8, 16)]
    assert found[0].energy_j.tolist() == [1, 2, 3]
    assert not any(group.differing for group in found)
    mixed = read_groups(path, Columns("limit", "time", energy="joules", by=("net",)))
    assert [group.differing for group in mixed] == [("batch",), ("batch",)]


@pytest.mark.parametrize(
    ("text", "columns", "words"),
    [
        (ROWS, Columns("watt", "time", "power"), ("no column watt", "it has limit, time, power")),
        (ROWS, dataclasses.replace(COLUMNS, by=("net",)), ("no column net",)),
        ("limit,time,power\n", COLUMNS, ("no rows",)),
        ("", COLUMNS, ("is empty",)),
        (ROWS + "300,abc,3\n", COLUMNS, ("row 5", "time is no number")),
        (ROWS + "300,nan,3\n", COLUMNS, ("row 5", "time is not finite")),
        (ROWS + "300,,3\n", COLUMNS, ("row 5", "time")),
        (ROWS + "300,0,3\n", COLUMNS, ("row 5", "time is not above 0")),
        (ROWS + "300,1,-3\n", COLUMNS, ("row 5", "power is negative")),
        (ROWS + "300,1\n", COLUMNS, ("row 5", "2 of 3 columns")),
        (ROWS + "250,1,70\n", COLUMNS, ("2 rows with limit 250", "--by", "--repeated")),
        ('{"a": 1}', COLUMNS, ("is no table",)),
        (ROWS, Columns("limit", "time"), ("neither power nor energy",)),
        ("a;b\n", COLUMNS, ("no column limit, time, power", "it has a, b")),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, text: str, columns: Columns, words: tuple[str, ...]
) -> None:
    path = _file(tmp_path, text)
    refused(lambda: read_groups(path, columns), str(path) if text else "empty", *words)


def test_what_is_wrong_with_the_request_is_said_too(tmp_path: Path) -> None:
    path = _file(tmp_path, ROWS)
    refused(lambda: read_groups(path, dataclasses.replace(COLUMNS, by=("time",))), "time cannot be in --by")
    huge = _file(tmp_path, ROWS.replace("4,10", "1e80,1e80"), "huge.csv")
    refused(lambda: analyse(read_groups(huge, COLUMNS)), "beyond 1e+100 J")
    two = _file(tmp_path, "limit,limit,time,power\n1,1,1,1\n", "two.csv")
    refused(lambda: read_groups(two, COLUMNS), "two columns named limit")
    others = _file(
        tmp_path,
        ROWS.replace("power\n", "power,x,x\n").replace("0\n", "0,1,1\n").replace("5\n", "5,1,1\n"),
        "others.csv",
    )
    assert len(read_groups(others, COLUMNS)) == 1
    windows = _file(tmp_path, ROWS.replace("\n", "\r\n") + "\r\n", "windows.csv")
    assert read_groups(windows, COLUMNS)[0].limit.size == 4


def test_repetitions_are_taken_where_they_are_said_to_be(tmp_path: Path) -> None:
    path = _file(tmp_path, ROWS + "250,1,70\n")
    (group,) = read_groups(path, COLUMNS, repeated=True)
    assert group.limit.tolist() == [100, 150, 200, 250, 250]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, "net," + ROWS.replace("\n", "\nx,").removesuffix("x,") + "y,100,1,1\n")
    found = _json(capsys, path, *WORDS, "--by", "net", "--quantity", "energy")
    (group,) = found["groups"]
    assert group["by"] == {"net": "x"}
    assert group["coefficients"] == pytest.approx(np.polyfit([100, 150, 200, 250], [40, 30, 50, 60], 2))
    assert (group["best_measured"], group["edge"]) == (150, False)
    assert found["pareto"][0]["limits"] == [200, 150]
    assert found["left_out"][0]["by"] == {"net": "y"}
    assert main([str(path), *WORDS, "--by", "net"]) == 0
    shown = capsys.readouterr().out
    for words in ("Energy × delay", "Pareto front", "200, 150", "single measurements", "y is left out"):
        assert words in shown
    for wrong, said in (
        ([str(path)], "--limit COL, --time COL, --power COL or --energy COL"),
        ([str(path), *WORDS, "--quantity", "heat"], "no quantity heat"),
        ([str(tmp_path), *WORDS], "--time is for tables"),
        ([str(tmp_path)], "is no sweep"),
        ([str(tmp_path / "none.csv"), *WORDS], "does not exist"),
    ):
        refused(lambda words=wrong: main(words), said)


def test_as_a_command_it_is_one_line_and_two(tmp_path: Path) -> None:
    done = smaragdine("fit", _file(tmp_path, ROWS), "--limit", "x", "--time", "time", "--power", "power")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "it has limit, time, power" in done.stderr


@zeus
@pytest.mark.parametrize(
    ("gpu", "groups", "edges", "left_out"),
    [("v100", 68, 41, 0), ("a40", 53, 15, 0), ("p100", 45, 41, 0), ("rtx6000", 51, 13, 1)],
)
def test_measured_tables(
    capsys: pytest.CaptureFixture[str], gpu: str, groups: int, edges: int, left_out: int
) -> None:
    """Every network and batch size; over the four, 110 of 217 energies have no minimum inside the range."""
    path = Path(str(DATA)) / "zeus" / f"summary_power_{gpu}.csv"
    words = ("--limit", "power_limit", "--time", "time_per_epoch", "--power", "average_power")
    found = _json(capsys, path, *words, "--by", "dataset,network,batch_size,optimizer")
    energies = [each for each in found["groups"] if each["quantity"] == "energy"]
    assert (len(energies), sum(each["edge"] for each in energies)) == (groups, edges)
    assert len(found["left_out"]) == left_out
    for each in found["groups"]:
        a, b, _ = each["coefficients"]
        low, high = each["limits"][0], each["limits"][-1]
        inside = a > 0 and low <= -b / (2 * a) <= high
        assert each["edge"] is not inside
        assert (
            each["optimum"] == pytest.approx(-b / (2 * a), rel=1e-6)
            if inside
            else each["optimum"] in (low, high)
        )
        assert low <= each["interval"][0] <= each["optimum"] <= each["interval"][1] <= high
        assert each["band_rests_on"] == "residuals of single measurements"
        assert 0 <= each["r2"] <= 1


def _repetition(limit_w: float, number: int, **more: Any) -> Repetition:
    known: dict[str, Any] = {"time_s": 400 / limit_w, "energy_j": 10 + (limit_w - 200) ** 2 / 100 + number}
    known |= {"energy_counter_j": known["energy_j"] + 1, "power_limit_w": limit_w, "status": "complete"}
    return Repetition(
        "first", "bert", "power", repetition=number, recording=f"{limit_w:g}-{number}", **known | more
    )


def test_a_sweeps_table_comes_back_as_it_was(tmp_path: Path) -> None:
    rows = [
        _repetition(150, 0, epoch_time_s=(1.0, 2.0), epoch_energy_j=(3.0, None), provenance="measured"),
        _repetition(150, 1, status="failed", time_s=None, energy_j=None, energy_counter_j=None),
        Repetition(
            "second", "ecg", "clock", 0, "r", "complete", None, 877.0, 1530.0, node="n1", device="gpu:0"
        ),
        Repetition(
            "third", "net", "parameter", 0, "r2", "complete", parameters={"batch": 64, "kind": "bf16"}
        ),
    ]
    path = write_results(tmp_path, rows)
    assert read_results(tmp_path) == rows
    table = pq.read_table(path)
    assert table["edp_js"].to_pylist()[:2] == [rows[0].edp_js, None]
    assert rows[0].ed2p_js2 == pytest.approx(rows[0].energy_j * rows[0].time_s ** 2)  # type: ignore[operator]
    write_results(tmp_path, rows[:1])
    assert read_results(tmp_path) == rows[:1]
    assert os.listdir(tmp_path) == [RESULTS]


def test_a_table_that_is_no_sweeps(tmp_path: Path) -> None:
    refused(lambda: read_results(tmp_path), "is no sweep", RESULTS)
    pq.write_table(pa.table({"experiment": ["a"]}), tmp_path / RESULTS)
    refused(lambda: read_results(tmp_path), "no column benchmark")
    (tmp_path / RESULTS).write_bytes(b"PAR1 not really")
    refused(lambda: read_results(tmp_path), RESULTS)
    newer = results_table([]).replace_schema_metadata({b"smaragdine.sweep": b"99"})
    pq.write_table(newer, tmp_path / RESULTS)
    refused(lambda: read_results(tmp_path), "newer version")
    refused(lambda: write_results(tmp_path / "none", []), "cannot be written")
    assert SCHEMA.names[0] == "experiment"


def test_a_sweeps_groups() -> None:
    rows = [_repetition(limit, n) for n in range(2) for limit in (250.0, 150.0, 200.0)]
    rows.append(_repetition(300, 0, status="killed"))
    found = groups_of_sweep(rows)
    (group,) = found.groups
    assert found.unfinished == 1
    assert group.by == {"experiment": "first", "benchmark": "bert"}
    assert (group.limit.tolist(), group.unit) == ([150, 150, 200, 200, 250, 250], "W")
    counted = groups_of_sweep(rows, energy="energy_counter_j").groups[0]
    assert (counted.energy_j - group.energy_j).tolist() == [1] * 6
    two = [dataclasses.replace(r, device_name=f"GPU {r.repetition}") for r in rows]
    assert [g.by["device_name"] for g in groups_of_sweep(two).groups] == ["GPU 0", "GPU 1"]
    clocks = [
        Repetition("e", "b", "clock", 0, "r", "complete", None, memory, clock, time_s=1, energy_j=1)
        for memory in (405.0, 877.0)
        for clock in (600.0, 900.0, 1200.0)
    ]
    assert [(g.by["memory_clock_mhz"], g.unit) for g in groups_of_sweep(clocks).groups] == [
        (405.0, "MHz"),
        (877.0, "MHz"),
    ]
    batches = [
        Repetition("e", "b", "parameter", 0, "r", "complete", parameters=p, time_s=1, energy_j=1)
        for p in ({"batch": 8, "precision": "bf16"}, {"batch": 16, "precision": "bf16"})
    ]
    (group,) = groups_of_sweep(batches).groups
    assert (group.limit.tolist(), group.by["precision"]) == ([8, 16], "bf16")
    refused(lambda: groups_of_sweep(batches, "precision"), "precision", "batch")
    refused(lambda: groups_of_sweep([]), "no repetition")
    refused(lambda: groups_of_sweep(rows[-1:]), "no repetition of the sweep has time")
    refused(lambda: groups_of_sweep(rows, energy="heat"), "energy_counter_j")


def test_a_recordings_figures_are_the_sums_of_its_readings(tmp_path: Path) -> None:
    """Four seconds: 10 W in the first, then 200 and 100 W by turns of 100 ms; the estimated CPU 40 W."""
    recording = open_recording(recordings.make(tmp_path / "run"))
    found = measure(recording)
    assert (found.device, found.device_name, found.provenance) == ("gpu:0", "Test GPU", "measured")
    assert found.time_s == 4
    assert found.energy_j == pytest.approx(10 + 3 * 150)
    assert found.energy_counter_j is None
    assert found.epoch_time_s == pytest.approx((0.99, 0.99))
    assert found.epoch_energy_j == pytest.approx((0.99 * 150 + 0.5, 0.99 * 150 + 0.5), rel=0.01)
    both = measure(recording, ["gpu:0", "cpu:0"])
    assert both.energy_j == pytest.approx(460 + 160)
    assert both.provenance == "estimated + measured"
    assert both.energy_counter_j is None
    assert measure(recording, ["cpu:0"]).energy_counter_j == pytest.approx(160)
    refused(lambda: measure(recording, ["gpu:7"]), "gpu:7", "gpu:0")


def test_power_readings_and_counter_are_told_apart(tmp_path: Path) -> None:
    """Samples of 100 W, and a counter that says 110 W: neither is levelled by the other."""
    channels = [
        Channel("gpu:0", "power", "W", "sample", "measured", 20.0, "nvml", window_ms=20.0),
        Channel("gpu:0", "energy", "J", "counter", "measured", 100.0, "nvml"),
    ]
    at = recordings.T0
    facts = {
        "format_version": 1,
        "status": "complete",
        "begin_ns": at,
        "end_ns": at + 4 * recordings.S,
        "clock": {"begin": {"wall_ns": at, "mono_ns": 0}},
        "channels": [channel_to_dict(channel) for channel in channels],
    }
    (tmp_path / "run.json").write_text(json.dumps(facts))
    writer = ReadingsWriter(tmp_path, channels)
    writer.write([(0, [(at + ms * recordings.MS, 0, 100.0) for ms in range(-20, 4041, 20)])])
    writer.write([(0, [(at + ms * recordings.MS, 1, 0.11 * ms) for ms in range(-100, 4101, 100)])])
    writer.close()
    found = measure(open_recording(tmp_path))
    assert (found.energy_j, found.energy_counter_j) == (pytest.approx(400), pytest.approx(440))


def test_a_sweep_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(
        tmp_path, [_repetition(limit, n) for n in range(3) for limit in (150.0, 200.0, 250.0, 300.0)]
    )
    found = _json(capsys, tmp_path, "--quantity", "energy")
    (group,) = found["groups"]
    assert group["coefficients"] == pytest.approx((0.01, -4, 411))
    assert group["optimum"] == pytest.approx(200)
    assert group["band_rests_on"] == "residuals of repeated measurements"
    assert main([str(tmp_path)]) == 0
    assert "4 (12)" in capsys.readouterr().out
