"""PyTorch's profiler ended beside the program: the same trace, and a program that notices nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import warm_torch
from smaragdine.tracing.hook import environment, trace, windows
from smaragdine.tracing.hook.state import process

PRELUDE = """
import json, os, sys, time
import torch
from smaragdine.tracing.hook.torch import background_stop, tracer
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
heard = []

def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()

def record(steps, path="trace.json"):
    while not tracer.ready():
        train(1)
    session = tracer.start()
    train(steps)
    return session, tracer.stop_aside(session, path, lambda *what: heard.append(what))

def names(path="trace.json"):
    counts = {}
    for event in json.load(open(path))["traceEvents"]:
        if event.get("ph") == "X":
            counts[event["name"]] = counts.get(event["name"], 0) + 1
    return counts
"""


def program(tmp_path: Path, body: str) -> Any:
    return warm_torch.printed(PRELUDE + textwrap.dedent(body), tmp_path)


@pytest.fixture(scope="module", autouse=True)
def _here() -> None:
    from smaragdine.tracing.hook.torch import background_stop

    if not background_stop.possible():
        pytest.skip("this PyTorch shows no such functions; its own are used")


def test_the_trace_is_the_one_of_pytorchs_own_function(tmp_path: Path) -> None:
    result = program(
        tmp_path,
        """
        train(2)
        for i in range(3):  # one after the other
            record(3, "%d.json" % i)
        session = tracer.start()
        train(3)
        facts = tracer.stop(session, "own.json")
        own = names("own.json")
        print(json.dumps([[own == names("%d.json" % i) for i in range(3)], own["aten::linear"],
                          sorted(heard[0][0]) == sorted(facts), len(heard),
                          abs(time.time_ns() - heard[0][1]) < 10**11]))
        """,
    )
    assert result == [[True] * 3, 6, True, 3, True]


CUPTI = """
#include <stdio.h>
int cuptiActivityDisable(int kind) {
    FILE *file = fopen("kinds", "a");
    fprintf(file, "%d\\n", kind);
    return fclose(file);
}
"""


def test_gpus_are_recorded_no_more_by_whatever_cupti_is_loaded(tmp_path: Path) -> None:
    """One that says what it was asked to leave, in place of NVIDIA's; where there is none nothing happens."""
    (tmp_path / "cupti.c").write_text(CUPTI)
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libcupti.so.13"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "cupti.c"], check=True)
    result = program(
        tmp_path,
        f"""
        import ctypes
        background_stop.leave_gpu()
        before = os.path.exists("kinds")
        ctypes.CDLL({str(library)!r})
        session = tracer.start()
        train(3)
        background_stop.leave_gpu()
        train(1)
        tracer.stop_aside(session, "one.json", lambda *what: None).wait()
        print(json.dumps([before, [int(line) for line in open("kinds")], names("one.json")["aten::linear"]]))
        """,
    )
    # cupti_activity.h: memory copies and sets, concurrent kernels, the driver's and the runtime's calls.
    assert {1, 2, 4, 5, 10} <= set(result[1])
    assert (result[0], len(result[1]), result[2]) == (False, len(set(result[1])), 8)


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


def test_who_needs_it_over_waits_for_it(tmp_path: Path) -> None:
    """A profiler of the program's own, and a fork."""
    result = program(
        tmp_path,
        """
        session, ending = record(100)
        with torch.profiler.profile() as own:
            over = ending.over()
            train(2)
        count = sum(event.name == "aten::linear" for event in own.events())
        before = names()["aten::linear"]
        session, ending = record(100)
        pid = os.fork()
        if not pid:
            train(1)
            os._exit(0 if ending.over() else 1)
        _, status = os.waitpid(pid, 0)
        print(json.dumps([over, count, before, status, len(heard)]))
        """,
    )
    assert result == [True, 4, 200, 0, 2]


def test_a_child_of_multiprocessing_ends_with_its_trace_written(tmp_path: Path) -> None:
    """It ends by _exit."""
    result = program(
        tmp_path,
        """
        import multiprocessing
        from smaragdine.tracing.hook import environment, marks, trace
        marks.set_spool(os.getcwd())
        trace.begin(environment.TraceSettings("traces", steps=3, skip=1))

        def child():
            for i in range(6):
                train(1)
                marks.soon(time.time_ns(), "step_end", i, "torch")

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        noted = [os.path.join("traces", name) for name in os.listdir("traces") if name.endswith(".meta.json")]
        print(json.dumps([process.exitcode, [len(json.load(open(path))["steps"]) for path in noted]]))
        """,
    )
    assert result == [0, [3]]


def test_an_interrupt_does_not_end_the_wait_at_the_programs_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process would end under a thread that is at work in PyTorch."""
    waits: list[int] = []

    class Ending:
        def wait(self) -> None:
            waits.append(1)
            if len(waits) < 4:
                raise KeyboardInterrupt

    plan = windows.WindowPlan(environment.TraceSettings(str(tmp_path)))
    plan.ending = Ending()
    with pytest.raises(KeyboardInterrupt):
        plan.settle()
    monkeypatch.setattr(process.trace, "plan", plan)
    trace.at_exit()
    assert (len(waits), plan.ending) == (4, None)


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


def test_threads_are_looked_at_while_garbage_is_collected(tmp_path: Path) -> None:
    """Making objects of frames collects garbage, and that lets the thread in these frames run on."""
    result = program(
        tmp_path,
        """
        import gc, threading
        stop, looking = threading.Event(), False

        class Loop:
            def __init__(self):
                self.itself = self

            def __del__(self):
                if looking:
                    time.sleep(0.0002)

        def deep(depth):
            return deep(depth - 1) if depth else 0

        def beside():
            while not stop.is_set():
                deep(250), deep(3)

        def current_frames(original=sys._current_frames):
            collects = gc.isenabled()
            gc.disable()
            found = original()
            Loop()
            if collects:
                gc.enable()
            return found

        sys._current_frames = current_frames
        thread = threading.Thread(target=beside)
        thread.start()
        gc.set_threshold(40, 1000000, 1000000)
        deepest = 0
        end_s = time.monotonic() + 3
        while time.monotonic() < end_s:
            looking = True
            deepest = max(deepest, len(background_stop._stacks()[thread.ident]))
            looking = False
        stop.set()
        thread.join()
        print(json.dumps([deepest, gc.isenabled()]))
        """,
    )
    assert 100 < result[0] < 270
    assert result[1]


def test_a_child_forked_while_threads_are_looked_at_collects_garbage(tmp_path: Path) -> None:
    result = program(
        tmp_path,
        """
        import gc, threading
        inside = threading.Event()

        def slowly(original=sys._current_frames):
            inside.set()
            time.sleep(0.2)
            return original()

        record(2)[1].wait()  # forks are watched from then on
        sys._current_frames = slowly
        thread = threading.Thread(target=background_stop._stacks)
        thread.start()
        inside.wait()
        pid = os.fork()
        if pid == 0:
            background_stop._stacks()  # the lock is free
            os._exit(0 if gc.isenabled() else 3)
        thread.join()
        _, status = os.waitpid(pid, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), gc.isenabled()]))
        """,
    )
    assert result == [0, True]


def test_an_operator_that_calls_back_is_not_left(tmp_path: Path) -> None:
    """Called from the program's own frame, it lies below a function of the program's that it calls."""
    result = program(
        tmp_path,
        """
        import threading
        inside, go = threading.Event(), threading.Event()

        def callback(gradient):
            inside.set()
            go.wait()

        def beside():
            x = torch.ones(2, requires_grad=True)
            y = x.sum()
            x.register_hook(callback)
            engine = torch.autograd.Variable._execution_engine.run_backward
            engine((y,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)

        thread = threading.Thread(target=beside)
        thread.start()
        inside.wait()
        callback, caller = [each for each in background_stop._stacks()[thread.ident] if each[2] == __file__]
        held = {thread.ident: (caller[:2], set(), None)}  # as found before the operator called back
        before = background_stop.left(held)
        go.set()
        thread.join()
        print(json.dumps([before, background_stop.left(held)]))
        """,
    )
    assert result == [False, True]


def test_threads_that_stay_where_they_are(tmp_path: Path) -> None:
    """One that waits inside a function of its own backward pass is still in PyTorch's. It is waited for, not
    for ever, and no other window begins meanwhile; one that sleeps is in nobody's way."""
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

        def window(patience_s, path="trace.json"):
            background_stop._PATIENCE_S = patience_s
            session = tracer.start()
            thread = threading.Thread(target=beside)
            thread.start()
            inside.wait()
            inside.clear()
            train(2)
            return thread, tracer.stop_aside(session, path, lambda *what: heard.append(what))

        def leave(thread):
            go.set()
            thread.join()
            go.clear()

        thread, ending = window(600)
        time.sleep(0.2)
        early = ending.over()
        leave(thread)
        ending.wait()
        patient = names()["SlowBackward"]

        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        threading.Thread(target=lambda: time.sleep(3600), daemon=True).start()
        thread, ending = window(0.2)
        ending.wait()
        ready = [tracer.ready()]
        with torch.profiler.profile() as own:
            train(1)
        leave(thread)
        ready.append(tracer.ready())
        count = sum(event.name == "aten::linear" for event in own.events())
        print(json.dumps([early, patient, ready, names()["aten::linear"], count, len(heard)]))
        """,
    )
    assert result == [False, 1, [False, True], 4, 2, 2]
