"""`smaragdine fit`: tables of others, and what is wrong with them in one line."""

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
from rich.console import Console

from cli import smaragdine
from refusal import refused
from smaragdine.cli.fit import main
from smaragdine.report.limits import fit_tables
from smaragdine.sweep.fit import analyse
from smaragdine.sweep.measurements import ColumnNames, Group, read_groups

COLUMNS = ColumnNames("limit", "time", "power")
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
    found = read_groups(path, ColumnNames("limit", "time", energy="joules", by=("net", "batch")))
    assert [group.by for group in found] == [{"net": n, "batch": b} for n in "ab" for b in (8, 16)]
    assert found[0].energy_j.tolist() == [1, 2, 3]
    assert not any(group.differing for group in found)
    mixed = read_groups(path, ColumnNames("limit", "time", energy="joules", by=("net",)))
    assert [group.differing for group in mixed] == [("batch",), ("batch",)]


@pytest.mark.parametrize(
    ("text", "columns", "words"),
    [
        (ROWS, ColumnNames("watt", "time", "power"), ("no column watt", "it has limit, time, power")),
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
        (ROWS, ColumnNames("limit", "time"), ("neither power nor energy",)),
        ("a;b\n", COLUMNS, ("no column limit, time, power", "it has a, b")),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, text: str, columns: ColumnNames, words: tuple[str, ...]
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


def test_of_a_parameter_it_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    batch = np.array([8.0, 16.0, 32.0, 48.0])
    for name, unit, said in (("batch", "", True), ("power_limit_w", "W", False)):
        found = analyse([Group({}, batch, 60 - batch, batch + 1, unit, limit_name=name)], ("energy",))
        Console(width=120).print(fit_tables(found, ("energy",)))
        assert (f"limit: the value of {name}\n" in capsys.readouterr().out) == said


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
