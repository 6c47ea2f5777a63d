"""Programs that import PyTorch, each in a process of its own, forked from one that has imported it already:
to start it takes longer than most of them."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What a program finds is a fresh interpreter's, but for PyTorch and what its optimizers import.
# The child leaves the loop and ends as any program does, with its threads and its exit handlers.
_PARENT = """
import json, os, sys, types
import torch, torch._dynamo

def run(script, words, cwd, stdout, stderr):
    os.chdir(cwd)
    for number, name in enumerate((os.devnull, stdout, stderr)):
        file = os.open(name, os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    os.close(answers)
    sys.argv, sys.path[0] = [script, *words], os.path.dirname(script)
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = script
    with open(script) as file:
        code = compile(file.read(), script, "exec")
    exec(code, vars(main))

answers = os.dup(1)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        run(**json.loads(line))
        break
    _, status = os.waitpid(pid, 0)
    os.write(answers, b"%d\\n" % os.waitstatus_to_exitcode(status))
"""

_LIMIT_S = 240

_parents: list[subprocess.Popen[str]] = []


def run(script: Path, words: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        said = {"script": script, "cwd": cwd, "stdout": out.name, "stderr": err.name}
        line = json.dumps({"words": [*words], **{key: str(value) for key, value in said.items()}})
        code = _answer(line)
        return subprocess.CompletedProcess([script, *words], code, out.read().decode(), err.read().decode())


def printed(text: str, cwd: Path) -> Any:
    """The JSON that such a program prints; it ends well, and says nothing else."""
    script = cwd / "program.py"
    script.write_text(text)
    done = run(script, [], cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def _answer(line: str) -> int:
    if not _parents:
        command = [sys.executable, "-X", "faulthandler", "-c", _PARENT]
        pipe = subprocess.PIPE
        parent = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        _parents.append(parent)
        atexit.register(_end)
    (parent,) = _parents
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(line + "\n")
    parent.stdin.flush()
    if not select.select([parent.stdout], [], [], _LIMIT_S)[0]:
        _end()
        raise TimeoutError(f"{line} has not ended after {_LIMIT_S} s")
    return int(parent.stdout.readline())


def _end() -> None:
    for parent in _parents:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()
    _parents.clear()
