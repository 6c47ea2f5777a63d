"""`smaragdine study`, where the result of a run is made beside the next program."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_study import TINY, Recorder

from cli import alive, wait_for
from smaragdine.accounting.footprint import load
from smaragdine.cli.main import main
from smaragdine.errors import UserError
from smaragdine.jobs.job import RunRequest, RunResult, Stop
from smaragdine.study import runner
from smaragdine.study.folder import read_made
from smaragdine.study.results import load_results
from smaragdine.tracing.assemble import NotWritten

PREDICT = ("study", "bert", "--stage", "predict")
NAME = "bert-predict-torch-L2-H32-fp32"
# Only once the second program runs, and so beside it.
AFTER_THE_SECOND = """
import pathlib, runpy, time
while not pathlib.Path("second").exists():
    time.sleep(0.01)
runpy.run_module("smaragdine.study.runner", run_name="__main__")
"""
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


class BesideRecorder(Recorder):
    stops = False

    def record(self, job: RunRequest, recording: Path, log: Path, stop: Stop) -> RunResult:
        ran = super().record(job, recording, log, stop)
        if len(self.ran) == 2:
            if self.stops:
                os.kill(os.getpid(), signal.SIGINT)
            Path("second").touch()
        return ran


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> BesideRecorder:
    made = BesideRecorder()
    monkeypatch.setattr(runner, "record", made.record)
    monkeypatch.setattr(runner, "LEAST_PROCESSORS", 1)
    monkeypatch.chdir(tmp_path)
    return made


def helper(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(runner, "COMMAND", (sys.executable, "-c", code))


def test_the_same_is_said_and_made_as_in_line(
    recorder: BesideRecorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study", "bert", "--stage", "pretrain,predict", *TINY[:-2], "--seed", "5"]
    failing = NAME.replace("predict", "pretrain")
    said: dict[str, list[str]] = {}
    recorder.fails = lambda name: int(name == f"{failing}-2")
    helper(monkeypatch, AFTER_THE_SECOND)
    for out, processors in (("beside", 1), ("line", 1 << 20)):
        monkeypatch.setattr(runner, "LEAST_PROCESSORS", processors)
        assert main([*words, "-o", out]) == 1
        lines = [line.partition(" a step")[0] for line in capsys.readouterr().err.splitlines()]
        said[out] = [line.replace(out, "OUT") for line in lines]
        made = read_made(Path(out))
        assert made is not None
        assert set(made.took_s) == {path.stem for path in Path(out).glob("results/*.json")}
    assert recorder.ran[:4] == recorder.ran[4:]
    assert said["beside"] == said["line"]
    # It fails beside the result of the one before, which is said first.
    failed = f"{failing}-2: exit code 1: last words (see OUT/logs/{failing}-2.log)"
    assert said["line"].index(failed) == said["line"].index(f"[3/4] {NAME}-2: 1.00 J and 10.0 ms") + 1
    for result in Path("line/results").glob("*.json"):
        beside, line = (json.loads(Path(out, "results", result.name).read_text()) for out in said)
        assert beside["cost"].pop("account_s") > 0
        del line["cost"]["account_s"]
        assert beside == line
        tables = [load(Path(out, "results", f"{result.stem}.parquet")) for out in said]
        assert tables[0].rows.equals(tables[1].rows)
        assert tables[0].devices == tables[1].devices
    kept = [{str(path.relative_to(out)) for path in Path(out).glob("runs/*/*")} for out in said]
    assert kept[0] == kept[1]


def test_whoever_makes_the_result_is_killed(
    recorder: BesideRecorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        helper(patched, KILLED)
        assert main([*PREDICT, *TINY]) == 1
    said = capsys.readouterr().err
    assert f"{NAME}-1: its result was not made: whoever made it was killed by SIGKILL\n" in said
    assert "2 of 2 runs have no result" in said
    assert not load_results(Path("out"))
    with monkeypatch.context() as patched:
        helper(patched, "raise OSError('no space')")
        assert main([*PREDICT, *TINY]) == 1
    assert f"{NAME}-1: its result was not made: OSError: no space\n" in capsys.readouterr().err
    # The recordings are whole, and lacked their results alone.
    assert main([*PREDICT, *TINY]) == 0
    assert recorder.ran == [f"{NAME}-1", f"{NAME}-2"]
    assert [result.name for result in load_results(Path("out"))] == recorder.ran
    capsys.readouterr()


def test_ctrl_c_leaves_what_was_begun_to_end(
    recorder: BesideRecorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    helper(monkeypatch, AFTER_THE_SECOND)
    recorder.stops = True
    assert main([*PREDICT, *TINY]) == 130
    assert [result.name for result in load_results(Path("out"))] == [f"{NAME}-1"]
    assert [path.name for path in Path("out/runs").iterdir()] == [f"{NAME}-1"]
    assert main([*PREDICT, *TINY]) == 0
    assert recorder.ran == [f"{NAME}-{n}" for n in (1, 2, 2)]
    capsys.readouterr()


def test_a_failure_that_is_still_to_come_counts(
    recorder: BesideRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    """After two recordings of no use a setting is left out, though the second is known late."""
    recorder.traces = False
    assert main([*PREDICT, "--size", "tiny", "--runs", "4", "-o", "out"]) == 1
    said = capsys.readouterr().err
    assert recorder.ran == [f"{NAME}-1", f"{NAME}-2"]
    assert f"{NAME}-2: no footprint of a step: " in said
    assert f"See smaragdine report out/unfinished/{NAME}-2\n" in said
    assert "4 of 4 runs have no result" in said


def test_a_trace_half_assembled_is_assembled_anew(
    recorder: BesideRecorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Killed(BaseException):
        pass

    def recorded(job: RunRequest, recording: Path, log: Path, stop: Stop) -> RunResult:
        """Events are in the raw trace alone."""
        ran = recorder.record(job, recording, log, stop)
        (recording / "traces").mkdir()
        for path in [*recording.glob("events*"), *recording.glob("windows*")]:
            path.rename(recording / "traces" / path.name)
        return ran

    def assemble(recording: Path, keep: bool = False) -> list[str]:
        assert keep
        assert not list(recording.glob("*events*"))
        for path in (recording / "traces").iterdir():
            shutil.copy(path, recording)
            if len(started) == 1:
                raise Killed
        return ["a remark"]

    started: list[Any] = []
    monkeypatch.setattr(runner, "record", recorded)
    monkeypatch.setattr(runner, "LEAST_PROCESSORS", 1 << 20)
    monkeypatch.setattr(runner, "assemble", lambda *a, **b: (started.append(a), assemble(*a, **b))[1])
    with pytest.raises(Killed):
        main([*PREDICT, *TINY])
    assert main([*PREDICT, *TINY, "--keep", "all"]) == 0
    assert recorder.ran == [f"{NAME}-1", f"{NAME}-2"]
    results = load_results(Path("out"))
    assert {result.cost["events"] for result in results} == {6}
    for result in results:
        place = Path("out/runs", result.name)
        assert not (place / "traces").exists()
        # The raw trace, which goes, is no part of its size.
        sizes = [path.stat().st_size for path in place.iterdir() if path.is_file()]
        assert result.cost["bytes"] == sum(sizes)
    log = Path("out/study.log").read_text()
    assert [log.count(f"{NAME}-{n}: trace: a remark\n") for n in (1, 2)] == [1, 1]
    capsys.readouterr()


@pytest.mark.parametrize("what", ["the result", "the events"])
def test_a_full_disk_costs_no_recording(
    recorder: BesideRecorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    def full(*_: Any) -> Any:
        if what == "the events":
            raise NotWritten("No space left on device")
        raise UserError("it cannot be written", "No space left on device")

    monkeypatch.setattr(runner, "LEAST_PROCESSORS", 1 << 20)
    with monkeypatch.context() as patched:
        patched.setattr(runner, "assembled" if what == "the events" else "save_result", full)
        assert main([*PREDICT, *TINY]) != 0
    assert "No space left" in capsys.readouterr().err
    assert recorder.ran == [f"{NAME}-1", f"{NAME}-2"]
    assert main([*PREDICT, *TINY]) == 0
    assert recorder.ran == [f"{NAME}-1", f"{NAME}-2"], "what was recorded is not run again"
    assert len(load_results(Path("out"))) == 2


def test_it_dies_with_the_study(tmp_path: Path) -> None:
    recording = tmp_path / "out" / "runs" / f"{NAME}-1"
    recording.mkdir(parents=True)
    os.mkfifo(recording / "run.json")  # it waits there
    code = f"""
import time
from pathlib import Path
from smaragdine.study.runner import FinishingProcess
from smaragdine.study.plan import StudyRun, StudySetting
print(FinishingProcess(Path("out"), StudyRun(StudySetting("{NAME}", ()), 1))._child.pid, flush=True)
time.sleep(300)
"""
    study = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    with study:
        assert study.stdout is not None
        pid = int(study.stdout.readline())
        assert alive(pid)
        study.kill()
    assert wait_for(lambda: not alive(pid))
