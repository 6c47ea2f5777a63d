"""Why nothing was traced: from what was asked for and recorded, or not at all."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cli import finish, info, smaragdine, start, wait_for, write_script
from smaragdine.accounting.run import Run
from smaragdine.cli import run as run_verb
from smaragdine.cli.main import main
from smaragdine.recording.asked import TraceAsked, asked, trace_of, verb_of
from smaragdine.recording.reader import open_recording
from smaragdine.report.html.data import run_data
from smaragdine.tracing.absence import why_no_operations, why_nothing

# Steps as a framework's patch announces them: they wait a moment before they are written.
ANNOUNCED = """\
    import sys, time
    marks = sys.modules["_smaragdine_hook.marks"]
    now_ns = time.time_ns()
    for i in range({steps}):
        marks.soon(now_ns, "step_end", i, "torch")
    """


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("SMARAGDINE_SPOOL", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def recorded(here: Path, script: str, *options: str) -> str:
    """Why nothing was traced, as the page and the terminal have it."""
    write_script(here / "program.py", script)
    run_verb.main([*options, "-o", "out", "program.py"])
    return why_no_operations(open_recording(here / "out"))


def test_what_was_asked_for_is_in_run_json(here: Path) -> None:
    options = ("--trace-steps", "5", "--trace-skip", "3", "--trace-budget", "2%", "--period-ms", "8")
    recorded(here, "pass", *options)
    trace = {"mode": "auto", "steps": 5, "skip": 3, "budget": 0.02, "quiet_s": 15.0}
    assert info("out")["asked"] == {
        "verb": "run",
        "trace": trace,
        "period_ms": 8.0,
        "pcie": False,
        "keep_readings": "recent",
    }


def test_trace_off_is_the_reason_whatever_was_announced(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "import smaragdine\nfor i in range(60): smaragdine.mark('step_end', i)"
    assert recorded(here, script, "--trace", "off") == "nothing was traced: it was recorded with --trace off"
    assert info("out")["asked"]["trace"] == {"mode": "off"}
    capsys.readouterr()
    assert main(["report", "out"]) == 0
    text = capsys.readouterr().out
    assert "it was recorded with --trace off" in text
    assert "skip" not in text
    recording = open_recording("out")
    page = run_data(Run(recording))
    assert page["why_untraced"] == "nothing was traced: it was recorded with --trace off"
    assert main(["export", "out", "--to", "speedscope", "-o", "out.json"]) == 2
    assert "--trace off" in capsys.readouterr().err


def test_a_program_that_crashed_is_not_told_to_mark_steps(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_script(here / "torch.py", "__version__ = '2.0'")
    why = recorded(here, "import torch\nraise SystemExit(3)", "--trace-skip", "2")
    assert why == "nothing was traced: the program ended with exit code 3; no step had been announced"
    assert "mark" not in capsys.readouterr().err


def test_a_program_that_ended_in_order_announced_as_many_as_it_says(here: Path) -> None:
    write_script(here / "torch.py", "__version__ = '2.0'")
    why = recorded(here, "    import torch\n" + ANNOUNCED.format(steps=2), "--trace-skip", "3")
    assert why == "nothing was traced: 2 steps had been announced, and the first 3 are not traced"


@pytest.mark.parametrize("framework", [True, False])
def test_without_steps_a_framework_is_named_only_where_one_told_of_itself(
    here: Path, framework: bool
) -> None:
    write_script(here / "torch.py", "__version__ = '2.0'")
    why = recorded(here, "import torch" if framework else "import json")
    if framework:
        assert 'mark them with smaragdine.mark("step_end", i)' in why
    else:
        told = "no steps were announced, and no process told of a framework that is traced"
        assert why == f"nothing was traced: {told}"


def test_a_killed_program_has_lost_what_it_announced_last(here: Path) -> None:
    script = ANNOUNCED.format(steps=6) + "open('there', 'w').close()\n    time.sleep(1e6)"
    write_script(here / "program.py", script)
    process = start("run", "-o", "out", "--trace-steps", "5", "--trace-skip", "3", "program.py")
    assert wait_for((here / "there").exists)
    (pid,) = [int(path.stem.split("-")[1]) for path in (here / "out" / "spool").glob("marks-[0-9]*.jsonl")]
    os.kill(pid, signal.SIGKILL)
    code, _, said = finish(process)
    assert code == -signal.SIGKILL
    why = (
        "the program was killed by SIGKILL, and what was announced or traced last is lost; at least 1 step "
        "had been announced, and the first 3 are not traced"
    )
    assert f"trace: no step was traced: {why}\n" in said
    assert why_no_operations(open_recording("out")) == f"nothing was traced: {why}"


def older(run: Path, change: Any) -> None:
    values = json.loads((run / "run.json").read_text())
    values.pop("crc32", None)
    change(values)
    (run / "run.json").write_text(json.dumps(values))


def test_a_recording_that_does_not_say_what_was_asked_is_not_explained(here: Path) -> None:
    recorded(here, "import smaragdine\nfor i in range(60): smaragdine.mark('step_end', i)", "--trace", "off")
    older(here / "out", lambda values: values.pop("asked"))
    recording = open_recording("out")
    assert (verb_of(recording.info), trace_of(recording.info)) == (None, None)
    assert why_nothing(recording) is None
    assert why_no_operations(recording) == "nothing was traced"


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        "run",
        {"verb": 3, "trace": 4},
        {"trace": {"mode": "auto", "steps": "x", "skip": 1, "quiet_s": 1}},
    ],
)
def test_an_edited_run_json_explains_nothing(said: Any) -> None:
    assert verb_of({"asked": said}) is None
    assert trace_of({"asked": said}) is None


def test_what_was_asked_is_read_as_it_was_written() -> None:
    for trace in (TraceAsked(False), TraceAsked(True, 0, 1, None, 2.5), TraceAsked(True, 5, 3, 0.01, 15.0)):
        values = json.loads(json.dumps(asked("run", trace)))
        assert trace_of({"asked": values}) == trace


def test_every_step_is_traced_where_none_are_counted(here: Path) -> None:
    """As docs/tracing.md says of `--trace-steps 0`."""
    write_script(here / "program.py", "import os; print(os.environ['SMARAGDINE_TRACE_STEPS'])")
    done = smaragdine("run", "-o", "out", "--trace-steps", "0", "program.py")
    assert done.stdout == "0\n", done.stderr
