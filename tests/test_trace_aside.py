"""PyTorch's profiler ended beside the program: the same trace, and a program that notices nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

PRELUDE = """
import json, os, sys, time
import torch
from smaragdine.tracing.hook import aside_torch, trace_torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
heard = []

def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()

def record(steps, path="trace.json"):
    session = trace_torch.start()
    train(steps)
    return session, trace_torch.stop_aside(session, path, lambda *what: heard.append(what))

def names(path="trace.json"):
    counts = {}
    for event in json.load(open(path))["traceEvents"]:
        if event.get("ph") == "X":
            counts[event["name"]] = counts.get(event["name"], 0) + 1
    return counts
"""


def program(tmp_path: Path, body: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture(scope="module", autouse=True)
def _here() -> None:
    from smaragdine.tracing.hook import aside_torch

    if not aside_torch.possible():
        pytest.skip("this PyTorch shows no such functions; its own are used")


def test_the_trace_is_the_one_of_pytorchs_own_function(tmp_path: Path) -> None:
    result = program(
        tmp_path,
        """
        train(2)
        session, ending = record(3)
        ending.wait()
        session = trace_torch.start()
        train(3)
        facts = trace_torch.stop(session, "own.json")
        own, aside = names("own.json"), names()
        print(json.dumps([own == aside, own["aten::linear"], sorted(heard[0][0]) == sorted(facts), len(heard),
                          abs(time.time_ns() - heard[0][1]) < 10**11]))
        """,
    )
    assert result == [True, 6, True, 1, True]


def test_the_program_goes_on_while_the_trace_is_written(tmp_path: Path) -> None:
    """What it does then is in no trace, and nothing is left of us."""
    result = program(
        tmp_path,
        """
        session, ending = record(200)
        seen = ending.over()
        began = torch.nn.modules.module._global_forward_pre_hooks
        count = 0
        while not ending.over():
            train(1)
            count += 1
        ending.wait()
        import torch.autograd.profiler as profiler
        print(json.dumps([seen, count > 0, len(began), profiler._enable_profiler.__module__,
                          names()["aten::linear"] <= 2 * (200 + count), names()["smaragdine:Sequential/0"]]))
        """,
    )
    assert result[:4] == [False, True, 0, "torch._C._autograd"]
    assert result[4:] == [True, 200]


def test_a_profiler_of_the_programs_own_waits_for_it(tmp_path: Path) -> None:
    result = program(
        tmp_path,
        """
        session, ending = record(100)
        with torch.profiler.profile() as own:
            over = ending.over()
            train(2)
        count = sum(event.name == "aten::linear" for event in own.events())
        print(json.dumps([over, count, names()["aten::linear"], len(heard)]))
        """,
    )
    assert result == [True, 4, 200, 1]


def test_a_fork_waits_for_it(tmp_path: Path) -> None:
    result = program(
        tmp_path,
        """
        session, ending = record(100)
        pid = os.fork()
        if not pid:
            train(1)
            os._exit(0 if ending.over() else 1)
        _, status = os.waitpid(pid, 0)
        print(json.dumps([status, len(heard)]))
        """,
    )
    assert result == [0, 1]


def test_windows_one_after_the_other(tmp_path: Path) -> None:
    result = program(
        tmp_path,
        """
        for i in range(4):
            record(5, "%d.json" % i)
        trace_torch._ending.wait()
        print(json.dumps([len(heard), [names("%d.json" % i)["aten::linear"] for i in range(4)]]))
        """,
    )
    assert result == [4, [10] * 4]


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PRELUDE
            + textwrap.dedent(
                """
                from smaragdine.tracing.hook import marks
                said = []
                marks.error = lambda source, exception: said.append(str(exception))
                record(2, "/nowhere/trace.json")[1].wait()
                print(json.dumps([said, [facts for facts, _ in heard]]))
                """
            ),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
        timeout=240,
    )
    assert json.loads(done.stdout) == [["the profiler could not write /nowhere/trace.json"], [None]]


def test_other_threads_in_the_middle_of_operators(tmp_path: Path) -> None:
    """PyTorch's own end crashes such a program now and then; ours waits until they are out of them."""
    result = program(
        tmp_path,
        """
        import queue, threading
        stop = threading.Event()
        other = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
        done = [0, 0]

        def busy():
            while not stop.is_set():
                other(torch.ones(2, 64)).sum().backward()
                done[0] += 1

        def waiting(tasks=queue.Queue()):
            while not stop.is_set():
                try:
                    tasks.get(timeout=0.005)
                except queue.Empty:
                    done[1] += 1

        threads = [threading.Thread(target=each) for each in (busy, waiting)]
        for thread in threads:
            thread.start()
        for _ in range(40):
            session, ending = record(3)
            while not ending.over():
                train(1)
        stop.set()
        for thread in threads:
            thread.join()
        print(json.dumps([len(heard), all(facts is not None for facts, _ in heard), min(done) > 0]))
        """,
    )
    assert result == [40, True, True]


def test_an_operator_that_has_called_back_is_not_left(tmp_path: Path) -> None:
    """A thread that waits inside a function of its own backward pass is still in PyTorch's."""
    result = program(
        tmp_path,
        """
        import threading
        inside, go = threading.Event(), threading.Event()

        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x

            @staticmethod
            def backward(context, gradient):
                inside.set()
                go.wait()
                return gradient

        def beside():
            Slow.apply(torch.ones(2, requires_grad=True)).sum().backward()

        session = trace_torch.start()
        thread = threading.Thread(target=beside)
        thread.start()
        inside.wait()
        train(2)
        ending = trace_torch.stop_aside(session, "trace.json", lambda *what: heard.append(what))
        time.sleep(0.2)
        early = ending.over()
        go.set()
        ending.wait()
        thread.join()
        print(json.dumps([early, len(heard), names()["SlowBackward"]]))
        """,
    )
    assert result == [False, 1, 1]
