"""PyTorch's profiler leaves the GPU's library before the next session, and before the program ends.

Kineto does it by a thread that waits for the next call of CUDA; here one of our own stands in for it, for a
PyTorch without CUDA. A program that ends while it waits would wait for it forever.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

import warm_torch

PRELUDE = """
import _thread, atexit, json, os, threading, time, types
import torch
import torch.cuda

said = {"waited": 0, "calls": 0}
called = _thread.allocate_lock()
called.acquire()

def ends():  # registered before ours, and so called after it
    said["waiting"] = said["waited"] - said["calls"]
    said["told"] = os.environ.get("TEARDOWN_CUPTI")
    print(json.dumps(said))

atexit.register(ends)

def call(device):
    if called.locked() and said["waited"] > said["calls"]:
        said["calls"] += 1
        called.release()

torch.version.cuda = "13.0"
torch.cuda.is_initialized = lambda: True
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.synchronize = lambda: None
torch.cuda.current_device = lambda: 0
torch.cuda.cudart = lambda: types.SimpleNamespace(cudaMemGetInfo=call)

from smaragdine.tracing.hook import aside_torch, detach_torch, trace, trace_torch, windows

original = aside_torch._stop_and_save

def wait():
    called.acquire()

def stop_and_save(path):
    original(path)
    time.sleep(delay_s)
    if os.environ.get("TEARDOWN_CUPTI") == "1":
        said["waited"] += 1
        _thread.start_new_thread(wait, ())

aside_torch._stop_and_save = stop_and_save
delay_s = 0
torch.set_num_threads(1)
model = torch.nn.Linear(8, 4)

def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()

def record():
    session = trace_torch.start()
    train(2)
    return trace_torch.stop_aside(session, "trace.json", lambda *what: None)
"""


def program(tmp_path: Path, body: str) -> dict[str, Any]:
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    done = warm_torch.run(script, [], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture(scope="module", autouse=True)
def _here() -> None:
    from smaragdine.tracing.hook import aside_torch

    if not aside_torch.possible():
        pytest.skip("this PyTorch shows no such functions; its own are used")


def test_the_next_session_begins_when_the_last_one_has_left(tmp_path: Path) -> None:
    result = program(
        tmp_path,
        """
        for _ in range(3):
            record().wait()
            said.setdefault("waiting_then", []).append(said["waited"] - said["calls"])
            said.setdefault("ready", []).append(trace_torch.ready())
        """,
    )
    assert (result["waiting_then"], result["ready"]) == ([1] * 3, [True] * 3)
    assert (result["waited"], result["calls"], result["told"]) == (3, 3, None)


def test_a_thread_of_the_programs_own_is_not_waited_for_long(tmp_path: Path) -> None:
    """One that begins while the profiler stops is taken for the profiler's, unless Python knows it."""
    result = program(
        tmp_path,
        """
        torch.cuda.cudart = lambda: types.SimpleNamespace(cudaMemGetInfo=lambda device: None)
        detach_torch._LONGEST_S = 0.2
        record().wait()
        said["ready"] = [trace_torch.ready()]
        time.sleep(0.2)
        said["ready"].append(trace_torch.ready())
        forever = threading.Event()
        wait = lambda: threading.Thread(target=forever.wait, daemon=True).start()
        record().wait()
        said["ready"].append(not (detach_torch._leaving & detach_torch._pythons()))
        """,
    )
    assert result["ready"] == [False, True, True]


@pytest.mark.parametrize("when", ["before", "long before", "meanwhile", "open"])
def test_a_program_ends_after_the_profiler_has_left(tmp_path: Path, when: str) -> None:
    """Whether that had stopped before, stops meanwhile, or still runs: then it has no need to leave."""
    result = program(
        tmp_path,
        f"""
        when = {when!r}
        trace.begin(windows.Settings(os.getcwd(), steps=3, skip=1))
        for index in range(3 if when == "open" else 6):
            train(1)
            trace.marked("step_end", index, "torch", time.time_ns())
            delay_s = 0.3 if when == "meanwhile" else 0
        if "before" in when:
            trace._plan.settle()
        if when == "long before":
            detach_torch._until_s = time.monotonic()
        said["ending"] = trace._plan.ending is not None
        said["open"] = trace._plan.window is not None
        """,
    )
    assert (result["ending"], result["open"]) == (when == "meanwhile", when == "open")
    assert (result["waited"], result["waiting"], result["told"]) == (int("before" in when), 0, None)


def test_what_the_program_says_to_the_profiler_holds(tmp_path: Path) -> None:
    result = program(
        tmp_path,
        """
        os.environ["TEARDOWN_CUPTI"] = "0"
        record().wait()
        """,
    )
    assert (result["waited"], result["told"]) == (0, "0")
