"""Drive the real command line, as a user would, in the current folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SMARAGDINE = [sys.executable, "-m", "smaragdine"]
# Ends what hangs. No verdict rests on it: a busy machine takes many times as long as a quiet one.
TIMEOUT_S = 600.0


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours, without what a surrounding test run may have put there."""
    base = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SMARAGDINE_") and name not in ("PYTHONPATH", "COLUMNS", "PYTHONIOENCODING")
    }
    return {**base, **(extra or {})}


def smaragdine(
    *words: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    text: bool = True,
    **more: Any,
) -> subprocess.CompletedProcess[Any]:
    """`smaragdine WORDS…` to its end. `env` is added to the environment."""
    if "stdin" not in more and "input" not in more:
        more["stdin"] = subprocess.DEVNULL
    for stream in ("stdout", "stderr"):
        more.setdefault(stream, subprocess.PIPE)
    return subprocess.run(
        [*SMARAGDINE, *map(os.fspath, words)],
        env=environment(env),
        cwd=cwd,
        text=text,
        timeout=TIMEOUT_S,
        check=False,
        **more,
    )


def start(
    *words: str | os.PathLike[str], env: Mapping[str, str] | None = None, cwd: Path | None = None, **more: Any
) -> subprocess.Popen[str]:
    """`smaragdine WORDS…`, still running, in a process group of its own."""
    for stream in ("stdout", "stderr"):
        more.setdefault(stream, subprocess.PIPE)
    more.setdefault("stdin", subprocess.DEVNULL)
    more.setdefault("start_new_session", True)
    command = [*SMARAGDINE, *map(os.fspath, words)]
    return subprocess.Popen(command, env=environment(env), cwd=cwd, text=True, **more)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; a process that hangs is ended, and fails the test."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


def show_json(run: str | os.PathLike[str], *more: str) -> dict[str, Any]:
    done = smaragdine("show", run, "--json", *more)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def info(run: str | os.PathLike[str]) -> dict[str, Any]:
    return json.loads((Path(run) / "run.json").read_text())


def write_script(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


def wait_for(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """The first true value of `condition`; its last value when time is up."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def recorder_of(pid: int) -> int | None:
    """The recorder process among the children of a `smaragdine run`."""
    for child in children(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"smaragdine.recording.recorder" in command and alive(child):
            return child
    return None
