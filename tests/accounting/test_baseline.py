"""What is taken for a baseline: a busy one says so wherever it is used, a program at work is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_summary import channel, mark, record, steady

import recordings
from smaragdine.accounting.run import Run
from smaragdine.cli.main import main
from smaragdine.recording.asked import BASELINE, asked
from smaragdine.recording.reader import Recording, open_recording

BUSY = "baseline: cpu:0 was 100% busy: what it drew is not its idle power"


def idle(folder: Path, busy: float = 0.1, program: float = 0.0, gpu: float = 0.0, **info: Any) -> Recording:
    """Ten seconds of four CPUs, `busy` of them at work, `program` of these for the program; a GPU in %."""
    seconds = {"unit": "s", "kind": "counter"}
    readings = [
        (channel("cpu:0"), steady(20)),
        (channel("gpu:0"), steady(40)),
        (channel("cpu:0", "busy", **seconds), steady(busy, -0.2, 10.4, 0.04)),
        (channel("cpu:0", "program", **seconds), steady(program, -0.2, 10.4, 0.04)),
        (channel("gpu:0", "gpu_utilisation", unit="%", kind="level"), [(t, gpu) for t in range(11)]),
    ]
    host = {"sockets": {"cpu:0": {"logical_cpus": 4}}}
    return record(folder, readings, info.pop("marks", ()), host=host, **info)


@pytest.mark.parametrize(
    "said", [{"asked": asked(BASELINE), "command": ["sleep", "9"]}, {"command": ["baseline"]}]
)
def test_a_baseline_is_known_by_what_it_was_asked_for(tmp_path: Path, said: dict[str, Any]) -> None:
    assert Run(idle(tmp_path / "quiet", **said)).idle_machine.remarks == []
    assert Run(idle(tmp_path / "busy", 4.0, 1.0, **said)).idle_machine.remarks == [BUSY]
    assert Run(idle(tmp_path / "gpu", gpu=30.0, **said)).idle_machine.remarks == [
        "baseline: gpu:0 was 30% busy: what it drew is not its idle power"
    ]


def test_a_recording_of_a_program_that_waits_is_said_to_be_one(tmp_path: Path) -> None:
    quiet = idle(tmp_path / "quiet", asked=asked("run"), command=["sleep", "10"])
    assert Run(quiet).idle_machine.remarks == [
        "baseline: it is a recording of sleep 10, not one that smaragdine baseline made"
    ]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"marks": [mark("step_end", t, t) for t in range(3)]}, "it announced 3 steps"),
        ({"marks": [mark("epoch_begin", 1, 0)]}, "it announced a training"),
        ({"program": 1.0, "busy": 1.0}, "it kept 1.0 CPUs busy"),
        ({"program_cpu_s": 25.0}, "it kept 2.5 CPUs busy"),
        ({"gpu": 80.0}, "gpu:0 was 80% busy"),
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        ["show", "run", "--subtract", "work"],
        ["report", "run", "--baseline", "work"],
        ["account", "run", "--baseline", "work"],
        ["export", "run", "--to", "csv", "-o", "out", "--baseline", "work"],
    ],
)
def test_a_program_at_work_is_no_baseline(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    made: dict[str, Any],
    why: str,
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    recordings.make(Path("run"))
    idle(Path("work"), command=["python", "train.py"], **made)
    assert main(words) == 2
    line = f"smaragdine: work is no baseline: it is a recording of python train.py, and {why}. Record one: "
    assert capsys.readouterr().err == f"{line}smaragdine baseline\n"
    assert not Path("out").exists()


@pytest.mark.parametrize("how", ["text", "json"])
@pytest.mark.parametrize("verb", ["show", "report", "account", "export"])
def test_a_busy_baseline_says_so_wherever_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    recordings.make(Path("run"))
    idle(Path("busy"), 4.0, asked=asked(BASELINE))
    option = "--subtract" if verb == "show" else "--baseline"
    words = [verb, "run", option, "busy"]
    if verb == "export":
        words += ["--to", "csv", "-o", "out"]
    elif how == "json":
        words += ["--json", *(["-"] if verb == "account" else [])]
    assert main(words) == 0
    out, err = capsys.readouterr()
    if verb == "export":
        assert f"smaragdine: busy: {BUSY}\n" in err
    elif how == "json":
        assert BUSY in json.loads(out)["remarks" if verb == "account" else "problems"]
    else:
        assert " ".join(out.split()).count(f"! {BUSY}") == 1


def test_who_calls_us_hears_it_too(tmp_path: Path) -> None:
    run, work = (
        open_recording(recordings.make(tmp_path / "run")),
        idle(tmp_path / "work", program=1.0, busy=1.0),
    )
    assert any("it kept 1.0 CPUs busy" in line for line in Run(run, Run(work)).summary.problems)
    assert any("it kept 1.0 CPUs busy" in line for line in Run(run, Run(work)).accounted.remarks)
