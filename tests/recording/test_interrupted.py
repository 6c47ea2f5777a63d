"""Ctrl-C after the program's end: the recording is named, and what is missing; exit code 130."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli import info, write_script
from smaragdine.cli import run as run_verb
from smaragdine.recording import marks
from smaragdine.recording.reader import open_recording


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("SMARAGDINE_SPOOL", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def interrupting(call: Callable[..., Any]) -> Callable[..., Any]:
    def interrupted(*words: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return call(*words)

    return interrupted


@pytest.mark.parametrize("when", ["marks are folded", "the trace is read", "the table is made"])
def test_the_recording_is_named_and_whole(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    traced = when == "the trace is read"
    left = "import os; os.makedirs('out/traces'); open('out/traces/torch-1-0.meta.json', 'w').close()"
    write_script(here / "program.py", left if traced else "pass")
    if when == "marks are folded":
        monkeypatch.setattr(marks, "fold_spool", interrupting(marks.fold_spool))
    else:
        at = "_assemble" if traced else "report"
        monkeypatch.setattr(run_verb, at, interrupting(getattr(run_verb, at)))
    try:
        assert run_verb.main(["-o", "out", "program.py"]) == 130
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    said = capsys.readouterr().err.splitlines()
    line = "interrupted: the program had ended, and its recording is whole"
    more = "; what was traced is not read yet: smaragdine report out does that"
    assert said[-2:] == [line + (more if traced else ""), "recording: out"]
    assert info("out")["status"] == "complete"
    assert list(open_recording("out").damage) == []
