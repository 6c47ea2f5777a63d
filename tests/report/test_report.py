"""`smaragdine report`: what a person reads, and what a machine does."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cli import smaragdine
from smaragdine.accounting.summary import Owners, RunSummary
from smaragdine.recording.reader import open_recording
from smaragdine.recording.writer import write_events
from smaragdine.report.terminal import console, run_tables
from traced_recording import event, mark, recording, ten_and_three, window


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    ten_and_three(folder / "steps")
    recording(folder / "bare", [mark(t) for t in range(10, 100, 10)])
    slices = [window(10, 20, 60, 61, []), window(100, 110, 160, 161, [], remarks=["said by the profiler"])]
    events = [
        event(f"net/layer_{i}/MatMul", at + 10 * i, at + 10 * i + 8, None)
        for at in (20, 110)
        for i in (0, 1, 2)
    ]
    recording(folder / "slices", (), slices, events)
    one = [window(10, 20, 60, 61, [(0, 22, 30)], source=None)]
    recording(folder / "found", (), one, [event("net/a", 23, 28, 0)])
    return folder


def report(runs: Path, *words: str, **env: str) -> str:
    done = smaragdine("report", *words, cwd=runs, env=env)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.parametrize("option", ["--html", "--figures"])
def test_a_report_is_printed_or_written(runs: Path, option: str) -> None:
    done = smaragdine("report", "steps", "--json", option, "out", cwd=runs)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--json prints a report: {option} writes one to a file" in done.stderr
    assert not (runs / "out").exists()


def test_a_traced_run(runs: Path) -> None:
    text = report(runs, "steps")
    assert text.startswith("train.py\n")
    assert "torch: traced 3 of 25 steps; 100.0% of the busy time" in text
    said = "a traced step took 15.0 ms (mean of 3), an untraced one 10.0 ms (mean of 9): +50%"
    assert said in " ".join(text.split())
    assert "starting and stopping the profiler took 10.0 ms" in " ".join(text.split())
    assert any(f"the steps took {percent} % longer" in " ".join(text.split()) for percent in (12, 13))
    assert "gpu:0, one step: 1.00 J in 10.0 ms, 60% busy" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["net/a", "forward"] in [line[:2] for line in lines]
    assert ["(idle)", "400", "mJ", "██▍", "40.0%"] in [line[:5] for line in lines]
    assert ["total", "1.00", "J", "██████", "100.0%"] in [line[:5] for line in lines]
    assert text.count("gpu:0") == 2  # the run's table, and the heading
    assert "by phase: forward 60.0%, idle 40.0%" in text
    assert "└── net" in text


def test_all_traced_steps_as_they_were(runs: Path) -> None:
    text = report(runs, "steps", "--traced", "--depth", "0")
    assert "gpu:0, 3 traced steps: 3.60 J in 36.0 ms" in text
    assert "└── " not in text


def test_slices(runs: Path) -> None:
    text = report(runs, "slices", "--summary", "--top", "1")
    assert "torch: traced 2 slices of time (90.0 ms); nothing tells steps apart" in text
    assert "gpu:0, while traced" in text
    assert "net/layer_*/MatMul" in text
    assert "! said by the profiler" in text
    assert "traced 1 step, found in 1 slice of time" in report(runs, "found")


def test_a_run_without_a_trace(runs: Path) -> None:
    text = report(runs, "bare")
    assert "40.0 J" in text
    assert "no operations: nothing was traced" in text


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for each in value.values():
            yield from numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, float):
        yield value


def test_for_machines(runs: Path) -> None:
    found = {name: json.loads(report(runs, name, "--json")) for name in ("steps", "slices", "bare", "found")}
    keys = set(found["steps"])
    for name, each in found.items():
        assert set(each) == keys, name
        assert all(math.isfinite(number) for number in numbers(each)), name
        assert each["total_j"] == pytest.approx(40.0)
    steps = found["steps"]
    assert steps["steps"] == {
        "announced": 25,
        "traced": 3,
        "traced_s": pytest.approx(0.015),
        "untraced": 9,
        "untraced_s": pytest.approx(0.010),
        "kinds": {"first": 1, "before": 8, "traced": 3, "profiler": 2, "untraced": 9, "more": 1},
        "slower": pytest.approx(0.5),
        "early": False,
        "paused_s": pytest.approx(0.010),
        "cost": pytest.approx(0.125),
    }
    for part in ("step", "traced"):
        device = steps[part]["devices"]["gpu:0"]
        rows_j = sum(row["energy_j"] for row in device["rows"])
        assert rows_j + device["idle_j"] == pytest.approx(device["total_j"], rel=1e-9)
    assert found["slices"]["steps"] is None
    assert found["slices"]["tracing"]["windows"] == 2
    assert found["bare"]["tracing"] is None
    assert found["bare"]["traced"] is None


def test_narrow_and_without_colours(runs: Path) -> None:
    for name in ("steps", "slices", "bare"):
        text = report(runs, name, COLUMNS="60", NO_COLOR="1")
        assert max(map(len, text.splitlines())) <= 60
        assert "\x1b" not in text
        assert "\x1b" not in report(runs, name)
    assert "\x1b" in report(runs, "steps", FORCE_COLOR="1")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["none"], "none"),
        ([], "RUN"),
        (["steps", "--top", "-1"], "--top"),
        (["steps", "--only", "power"], "--figures DIR"),
        (["steps", "--merge", "x"], "merge rule"),
    ],
)
def test_a_mistake_is_one_line(runs: Path, words: list[str], named: str) -> None:
    done = smaragdine("report", *words, cwd=runs)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert named in done.stderr


def test_a_closed_output_is_no_failure_of_ours(runs: Path) -> None:
    done = smaragdine("report", "steps", cwd=runs, stdout=None, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


def test_rounding_is_nobodys_energy() -> None:
    owners = {"cpu:0": Owners(2.0, 1.0, 1.0, 0.5), "dram:0": Owners(2.0, 2.0, 1.0, 7e-6)}
    out = io.StringIO()
    console(out).print(
        run_tables(RunSummary("complete", 0, 1, 0.0, {}, None, {}, [], pa.table({}), [], owners))
    )
    assert "cpu:0 energy: program 2.00 J, other processes and idle 1.00 J, monitor 500 mJ\n" in out.getvalue()
    assert "dram:0 energy: program 2.00 J, other processes and idle 1.00 J\n" in out.getvalue()


def names_of(text: str) -> list[str]:
    lines = text[text.index("one step") :].splitlines()[2:]
    return [line.split()[0] for line in lines[: next(i for i, line in enumerate(lines) if "(idle)" in line)]]


def test_by_layer_by_phase_and_in_another_order(runs: Path) -> None:
    by_name = names_of(report(runs, "steps"))
    assert set(names_of(report(runs, "steps", "--by", "layer", "--depth", "1"))) == {"net"}
    assert names_of(report(runs, "steps", "--by", "phase")) == ["forward"]
    for sort in ("power", "time", "count"):
        assert sorted(names_of(report(runs, "steps", "--sort", sort))) == sorted(by_name)
    assert "one step" not in report(runs, "steps", "--by", "device")


def test_by_step(runs: Path) -> None:
    text = report(runs, "steps", "--by", "step", "--top", "2")
    rows = [line for line in text.splitlines() if re.match(r"\d+", line)]
    assert len(rows) == 2
    assert all("(profiler starts, stops or runs on)" in row for row in rows)  # they are the longest
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "mean of 9 untraced 10.0 ms ± 0 1.00 J ± 0" in lines
    assert "mean of 3 traced 15.0 ms ± 0 1.50 J ± 0" in lines
    assert [int(row.split()[0]) for row in rows] == sorted(int(row.split()[0]) for row in rows)
    assert lines[1] == "step time program's gpu:0"
    assert "shown: 2 of 24 steps, those that took most energy" in lines
    every = report(runs, "steps", "--by", "step", "--top", "100")
    numbers = [int(row.split()[0]) for row in every.splitlines() if re.match(r"\d+ ", row)]
    assert numbers == list(range(1, 25))  # in the order of time
    assert "those that took most energy" not in every
    others = "2 (profiler starts, stops or runs on), 1 (warms up), 1 (with more than a step), "
    assert f"in neither mean: {others}8 (before the traced ones)" in " ".join(lines)
    assert "announced no steps" in report(runs, "slices", "--by", "step")
    refused = smaragdine("report", "steps", "--by", "step", "--sort", "power", cwd=runs)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "steps are listed in the order of time, not by power. Leave out --sort" in refused.stderr


def test_one_step_is_not_put_beside_all_that_was_traced(runs: Path) -> None:
    """One of them has no steps: both are of all that was traced."""
    shutil.copytree(runs / "steps", runs / "stepless")
    recording = open_recording(runs / "stepless")
    none = pa.nulls(recording.events.num_rows, recording.events.schema.field("step").type)
    at = recording.events.schema.get_field_index("step")
    events = recording.events.set_column(at, "step", none)
    (runs / "stepless" / "events.arrows").unlink()
    assert write_events(runs / "stepless", events) is None
    text = report(runs, "steps", "stepless")
    assert "energy of the operations of the traced steps" in text
    found = json.loads(report(runs, "steps", "stepless", "--json"))
    assert found["devices"]["gpu:0"]["difference_j"] == pytest.approx(0, abs=1e-9)
    assert "energy of the operations of one step" in report(runs, "steps", "steps")


def test_summary_merges_in_json_too(runs: Path) -> None:
    found = [json.loads(report(runs, "slices", "--json", *more)) for more in ([], ["--summary"])]
    plain, merged = (each["traced"]["devices"]["gpu:0"] for each in found)
    assert {row["name"] for row in plain["rows"]} == {f"net/layer_{n}/MatMul" for n in range(3)}
    assert [row["name"] for row in merged["rows"]] == ["net/layer_*/MatMul"]
    assert merged["total_j"] == plain["total_j"]


def test_a_pipe_that_is_closed_is_no_error(runs: Path) -> None:
    for verb in ("show", "report"):
        read_fd, write_fd = os.pipe()
        os.close(read_fd)
        done = smaragdine(verb, "steps", cwd=runs, stdout=write_fd)
        os.close(write_fd)
        assert (done.returncode, done.stderr) == (141, "")


def test_two_runs_side_by_side(runs: Path) -> None:
    text = report(runs, "steps", "steps")
    assert "A  steps\nB  steps\n" in text
    assert re.search(r"gpu:0 +40.0 J +40.0 J +1.000", text)
    found = json.loads(report(runs, "steps", "steps", "--json"))
    assert found["reports"][0] == json.loads(report(runs, "steps", "--json"))
    text = report(runs, "steps", "bare")
    assert re.search(r"gpu:0 +40.0 J +40.0 J +1.000", text)
    assert text.endswith("! bare cannot be compared by operation: it has no events\n")
    done = smaragdine("report", "steps", "bare", "--json", cwd=runs)
    assert (done.returncode, done.stdout) == (2, "")
    assert "bare cannot be compared by operation: it has no events" in done.stderr
    assert smaragdine("report", "steps", "steps", "steps", cwd=runs).returncode == 2


def test_files_for_people(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert report(runs, "steps", "--html", str(page)) == f"{page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    pytest.importorskip("matplotlib")
    figures = tmp_path / "figures"
    done = smaragdine(
        "report", "steps", "--figures", str(figures), "--only", "top_energy", "--format", "svg", cwd=runs
    )
    assert done.returncode == 0, done.stderr
    assert str(figures / "top_energy.svg") in done.stdout.splitlines()
