"""Whatever a program, a region or an operation is called: what a verb prints is no command to the terminal,
no line of its own, no markup, and no formula."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

import recordings
from smaragdine.cli.main import main
from smaragdine.recording.tables import read_content, read_table, write_csv
from smaragdine.sensors.base import Channel
from smaragdine.tracing.files import read_events

FORGED = "gpu:9  1.00 J"
TITLE = "\x1b]0;owned\x07"
NASTY = f"{TITLE}\x1b[2J[/red][link=x]\n{FORGED}\r\u202eab\x9b5m:smile:"
FORMULAS = ("=cmd|' /C calc'!A0", "+cmd", "-x", "@x", "\t=1", "'=x", "''+y", "-5", "+.5", "'", "a=b", "net")
COMMAND = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording all of whose words are as bad as they can be."""
    facts: dict[str, Any] = {"provenance": NASTY, "period_ms": 20.0, "sensor": NASTY, "detail": NASTY}
    device = f"gpu:0{NASTY}"
    channels = [
        Channel("gpu:0", "power", "W", "sample", window_ms=20.0, **facts),
        Channel(device, "power", "W", "sample", window_ms=20.0, **facts),
    ]
    readings = [
        (recordings.T0 + ms * recordings.MS, n, 100.0) for ms in range(-180, 4100, 20) for n in range(2)
    ]
    events = [
        {
            "name": f"net/{NASTY}/{n % 3}",
            "device": device if n % 4 == 0 else "gpu:0",
            "start_ns": recordings.T0 + (1300 + 10 * n) * recordings.MS,
            "duration_ns": 9 * recordings.MS,
            "phase": NASTY if n % 2 else "forward",
            "lane": 7,
            "step": 3 + n // 10,
        }
        for n in range(40)
    ]
    names = (*events[0:1], *events[1:2])
    marks = recordings.region(NASTY, 1200, 1900, 0)
    marks.append({"t_ns": recordings.T0 + 10**9, "name": NASTY, "source": NASTY, "pid": 42, "detail": NASTY})
    folder = tmp_path_factory.mktemp("hostile") / "run"
    info = {
        "command": ["python", NASTY],
        "problems": [NASTY],
        "libraries": {NASTY: NASTY},
        "host": {"cpu": NASTY, "hostname": NASTY, "gpus": [{"device": "gpu:0", "name": NASTY}]},
        "absent": [{"channel": NASTY, "reason": NASTY, "remedy": NASTY}],
        "begin_ns": recordings.T0,
        "end_ns": recordings.T0 + recordings.RUN_S * recordings.S,
        "clock": {"begin": {"wall_ns": recordings.T0, "mono_ns": 5}},
    }
    table = recordings.marks_table(sorted([*recordings._marks(), *marks], key=lambda mark: mark["t_ns"]))
    window = {**recordings._window(), "remarks": [NASTY], "framework": NASTY}
    edges = [{"source": names[0]["name"], "target": names[1]["name"]}]
    return recordings.put(folder, info, channels, [(0, readings)], table, [window], events, edges)


def harmless(text: str) -> None:
    assert not (found := COMMAND.search(text)), (found, text[max(0, found.start() - 80) : found.end() + 80])
    assert not [line for line in text.splitlines() if line.strip().startswith(FORGED)], text


@pytest.mark.parametrize(
    "words",
    [
        ["show", "RUN"],
        ["show", "RUN", "--subtract", "RUN"],
        ["report", "RUN"],
        ["report", "RUN", "--traced", "--top", "50"],
        ["report", "RUN", "--by", "layer"],
        ["report", "RUN", "--by", "phase"],
        ["report", "RUN", "--by", "device"],
        ["report", "RUN", "--by", "step"],
        ["report", "RUN", "RUN"],
        ["account", "RUN"],
        ["account", "RUN", "--tree", "--depth", "9"],
        ["account", "RUN", "--zoom", "no/such"],
        ["account", "RUN", "--thin", "2"],
        ["account", "RUN", "--summary", "--sum"],
        ["compare", "RUN", "RUN"],
        ["compare", "RUN", "--", "RUN"],
        ["export", "RUN", "--to", "latex", "-o", "-"],
        ["export", "RUN", "--to", "markdown", "-o", "-"],
        ["export", "RUN", "--to", "prometheus", "-o", "-"],
        ["export", "RUN", "--to", "prometheus", "-o", "-", "--device", NASTY],
        ["show", NASTY],
        ["account", "--events", NASTY, "--power", NASTY],
        ["fit", NASTY],
        [NASTY],
    ],
    ids=lambda words: " ".join(words).replace(NASTY, "NASTY"),
)
def test_no_verb_prints_what_a_terminal_obeys(
    hostile: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([str(hostile) if word == "RUN" else word for word in words])
    said = capsys.readouterr()
    harmless(said.out)
    harmless(said.err)
    assert code in (0, 2), said.err
    if code:
        assert len(said.err.splitlines()) == 1


def test_files_are_harmless_too(hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(hostile), "--html", str(page)]) == 0
    head = page.read_text().partition("</title>")[0]
    assert not COMMAND.search(head.rpartition("<title>")[2])
    assert "<script>" not in head
    assert main(["export", str(hostile), "--to", "csv", "-o", str(tmp_path / "tables")]) == 0
    for path in (tmp_path / "tables").glob("*.csv"):
        for row in csv.reader(path.read_text().splitlines()):
            assert not [cell for cell in row if re.match(r"[=@\t\r]|[+-][^\d.]", cell)], path
    harmless(capsys.readouterr().out)


def test_a_formula_is_text_in_a_csv_and_comes_back_as_it_was(tmp_path: Path) -> None:
    import pyarrow as pa

    columns = {
        "name": FORMULAS,
        "device": ["gpu:0"] * len(FORMULAS),
        "start_ns": [*range(len(FORMULAS))],
        "duration_ns": [1] * len(FORMULAS),
    }
    table = pa.table({name: list(values) for name, values in columns.items()})
    path = tmp_path / "events.csv"
    for written in (table, table.set_column(0, "name", table["name"].dictionary_encode())):
        write_csv(written, path)
        for row in csv.DictReader(path.read_text().splitlines()):
            assert not re.match(r"[=@\t\r]|[+-][^\d.]", row["name"])
        assert read_events(path)["name"].to_pylist() == list(FORMULAS)
        plain = read_table(read_content(path), "csv", ["name"], (), "t")
        assert plain["name"].to_pylist() == list(FORMULAS)


def test_json_says_it_as_it_is(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(hostile), "--json"]) == 0
    said = capsys.readouterr().out
    harmless(said)  # JSON escapes what is no text
    assert NASTY in json.dumps(json.loads(said)) or json.dumps(NASTY)[1:-1] in said
