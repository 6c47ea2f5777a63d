"""Readings of a long run are thinned as it goes on: no figure changes, and whoever thins may be killed."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from long_run import T0, S, finish_run, make_run, run_info

from cli import TIMEOUT_S, wait_for
from smaragdine.accounting import thinning
from smaragdine.accounting.run import Run
from smaragdine.accounting.summary import to_json
from smaragdine.api import summarise
from smaragdine.cli.main import main
from smaragdine.errors import UserError
from smaragdine.recording.folder import write_info
from smaragdine.recording.reader import open_recording
from smaragdine.recording.recorder import RecorderClient, RecorderConfig

HOURS = 0.5
# A region that runs four times a second, too often for each time to be kept.
OFTEN_S = 0.25


def made(folder: Path, **how: Any) -> Path:
    make_run(folder, HOURS, period_ms=100, old_period_ms=100, **how)
    finish_run(folder)
    return folder


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("thinned") / "run", region_every_s=OFTEN_S)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("whole") / "run", keep_all=True, region_every_s=OFTEN_S)


def figures(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every number, text and length of a report; of regions the sums, for each time is kept of some alone."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name not in ("marks", "spans_ns", "energies_j", "programs_j"):
                yield from figures(each, f"{path}/{name}")
    elif isinstance(value, list):
        yield f"{path} has", len(value)
        for i, each in enumerate(value):
            yield from figures(each, f"{path}/{i}")
    else:
        yield path, value


def test_figures_are_those_of_all_readings(thinned: Path, whole: Path) -> None:
    found, wanted = (
        dict(figures(json.loads(json.dumps(Run.open(run).to_json())))) for run in (thinned, whole)
    )
    assert found.keys() == wanted.keys()
    assert len(found) > 500
    for path, value in wanted.items():
        if not isinstance(value, float):
            assert found[path] == value, path
        else:
            # What is static of children that nobody saw goes by the mean.
            close = (
                1e-4 if "static_j" in path else 1e-6 if "uncertainty" in path or "slower" in path else 1e-8
            )
            assert math.isclose(found[path], value, rel_tol=close), (path, found[path], value)


def test_what_is_left_is_small(thinned: Path, whole: Path) -> None:
    def size(run: Path) -> int:
        return sum(path.stat().st_size for path in run.rglob("*") if path.is_file())

    recording = open_recording(thinned)
    assert recording.thinned is not None
    assert recording.damage == []
    assert recording.thinned.state.cut_ns > T0 + (HOURS * 3600 - 1000) * S
    assert recording.marks.num_rows < open_recording(whole).marks.num_rows / 2
    assert size(thinned) < size(whole) / 2
    assert not (thinned / "power.arrows").exists()
    rows = recording.thinned.table("stretches").num_rows
    assert rows < 5 * (HOURS * 360 + 3000), "fine where it was traced, else every ten seconds"


def test_every_verb_reads_it(thinned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["show", thinned],
        ["report", thinned, "--by", "step"],
        ["report", thinned, "--html", tmp_path / "page.html"],
        ["account", thinned],
        *(["export", thinned, "--to", to, "-o", tmp_path / to] for to in ("csv", "perfetto", "prometheus")),
    ):
        assert main([str(word) for word in words]) == 0, words
    said = capsys.readouterr()
    assert "steps were thinned: they count for the mean" in said.out
    assert "were thinned: of that time steps" in said.err
    # A step after thinned ones begins where they end.
    lengths_s = [(s.end_ns - s.begin_ns) / S for s, _ in Run.open(thinned).announced_steps]
    assert max(lengths_s) < 4


def test_marks_that_stay_are_where_stretches_are_cut(thinned: Path) -> None:
    recording = open_recording(thinned)
    assert recording.thinned is not None
    cut_ns = recording.thinned.state.cut_ns
    edges = set(recording.thinned.stretches["cpu:0"]["start_ns"].tolist())
    for mark in recording.marks.to_pylist():
        if mark["name"].startswith("epoch") and T0 < mark["t_ns"] < cut_ns:
            assert mark["t_ns"] in edges


def test_one_that_is_killed_changes_nothing(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the state is written, and after it, before files are removed; then another goes on."""
    calls = 0
    write_state, remove = thinning.write_state, thinning._remove

    def killed_writing(*words: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 1:
            raise InterruptedError
        write_state(*words)

    def killed_removing(*words: Any) -> None:
        if calls % 3 == 2:
            raise InterruptedError
        remove(*words)

    def thin(folder: Path) -> bool:
        try:
            return thinning.thin(folder)
        except InterruptedError:
            return False

    monkeypatch.setattr(thinning, "write_state", killed_writing)
    monkeypatch.setattr(thinning, "_remove", killed_removing)
    monkeypatch.setattr("long_run.thin", thin)
    run = made(tmp_path / "run", region_every_s=OFTEN_S)
    assert calls > 5
    recording = open_recording(run)
    assert recording.thinned is not None
    assert recording.damage == []
    found, wanted = (dict(figures(to_json(summarise(open_recording(each))))) for each in (run, whole))
    for path in ("/program_j", "/total_j", "/epochs/0/program_j", "/regions/0/program_j", "/regions/0/count"):
        assert found[path] == pytest.approx(wanted[path], rel=1e-9), path


@pytest.mark.parametrize("file", ["state.json", "stretches.arrows", "steps.arrows", "marks.arrows"])
def test_damage_is_one_line(thinned: Path, tmp_path: Path, file: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(thinned, run)
    path = run / "thinned" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    try:
        said = Run.open(run).absent
    except UserError as error:
        said = str(error)
    assert said is not None
    assert f"{file} is damaged" in said


def test_whoever_misses_readings_is_told_which_file_lost_them(thinned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(thinned, folder)
    last = max(folder.glob("power.0.*.arrows"))
    last.write_bytes(last.read_bytes()[:-8])
    assert open_recording(folder).lost("power").startswith(f"{last.name} is damaged")


def test_the_process_that_thins(tmp_path: Path, whole: Path) -> None:
    """As the recorder starts it: alone, and on a run that it may thin no further."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    words = [sys.executable, "-P", "-m", "smaragdine.accounting.thinning", str(run)]
    for _ in range(2):
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found, wanted = (summarise(open_recording(each)) for each in (run, whole))
    assert found.program_j == pytest.approx(wanted.program_j, rel=1e-9)
    assert open_recording(run).thinned is not None
    assert not (run / "power.arrows").exists()


def test_a_recorder_goes_on_in_new_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "spool").mkdir(parents=True)
    write_info(run, run_info([]))
    client = RecorderClient(RecorderConfig(str(run), piece_ns=1_000_000_000), {})
    assert client.wait_ready(TIMEOUT_S)
    wait_for(lambda: (run / "activity.0.2.arrows").exists())
    client.stop(TIMEOUT_S)
    assert client.done is not None
    assert {"activity.arrows", "activity.0.1.arrows", "activity.0.2.arrows"} <= client.done["rows"].keys()
    assert not (run / "thinned").exists(), "a short run is not thinned"
    assert (run / "recorder.log").read_text() == ""


def test_events_of_another_tool_in_thinned_time_are_said_to_go_by_time(
    thinned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_ns = T0 + 600 * S
    rows = [
        {"name": f"op_{i % 2}", "device": "gpu:0", "start_ns": start_ns + i * S, "duration_ns": S}
        for i in range(20)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "trace.parquet")
    assert main(["account", str(thinned), "--events", str(tmp_path / "trace.parquet")]) == 0
    assert "energy goes by time alone" in capsys.readouterr().out
