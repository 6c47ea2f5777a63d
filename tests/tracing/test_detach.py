"""PyTorch's profiler leaves the GPU's library before the next session, and before the program ends.

Kineto does it by a thread that waits for the next call of CUDA; here one of our own stands in for it, for a
PyTorch without CUDA. A program that ends while it waits would wait for it forever.
"""

from __future__ import annotations

import json
import subprocess
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

from smaragdine.tracing.hook import environment, trace
from smaragdine.tracing.hook.state import process
from smaragdine.tracing.hook.torch import background_stop, detach, tracer

original, *others = background_stop._functions()

def start():
    _thread.start_new_thread(called.acquire, ())

def stop(result):
    original(result)
    time.sleep(delay_s)
    if os.environ.get("TEARDOWN_CUPTI") == "1":
        said["waited"] += 1
        start()

process.torch.functions = [stop, *others]
delay_s = 0
torch.set_num_threads(1)
model = torch.nn.Linear(8, 4)

def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()

def record():
    session = tracer.start()
    train(2)
    return tracer.stop_aside(session, "trace.json", lambda *what: None)
"""


def program(tmp_path: Path, body: str) -> dict[str, Any]:
    return warm_torch.printed(PRELUDE + textwrap.dedent(body), tmp_path)


@pytest.fixture(scope="module", autouse=True)
def _here() -> None:
    from smaragdine.tracing.hook.torch import background_stop

    if not background_stop.possible():
        pytest.skip("this PyTorch shows no such functions; its own are used")


def test_the_next_session_begins_when_the_last_one_has_left(tmp_path: Path) -> None:
    result = program(
        tmp_path,
        """
        for _ in range(3):
            record().wait()
            said.setdefault("waiting_then", []).append(said["waited"] - said["calls"])
            said.setdefault("ready", []).append(tracer.ready())
        """,
    )
    assert (result["waiting_then"], result["ready"]) == ([1] * 3, [True] * 3)
    assert (result["waited"], result["calls"], result["told"]) == (3, 3, None)


def test_threads_of_the_program_are_not_waited_for(tmp_path: Path) -> None:
    """Though they begin while the profiler stops."""
    result = program(
        tmp_path,
        """
        names = lambda: sorted(detach._name(thread) or "" for thread in detach._tasks())
        before = names()
        delay_s = 0.2
        ending = record()
        for _ in range(3):
            time.sleep(0.05)
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        ending.wait()
        said["found"] = len(process.torch.leaving)
        said["ready"] = tracer.ready()
        said["names"] = set(names()) == set(before)  # and nobody keeps another
        """,
    )
    assert (result["found"], result["ready"], result["names"], result["waited"]) == (1, True, True, 1)


def test_one_that_does_not_go_holds_nobody_up(tmp_path: Path) -> None:
    """The next session does not begin, and the program ends all the same."""
    result = program(
        tmp_path,
        """
        torch.cuda.cudart = lambda: 1 / 0  # a call that fails
        detach._END_S = 0.1
        trace.begin(environment.TraceSettings(os.getcwd(), steps=3, skip=1))
        record().wait()
        said["ready"] = [tracer.ready() for _ in range(2)]
        """,
    )
    assert (result["ready"], result["waiting"]) == ([False, False], 1)


def test_a_program_that_tells_the_profiler_itself_is_waited_for(tmp_path: Path) -> None:
    result = program(
        tmp_path,
        """
        os.environ["TEARDOWN_CUPTI"] = "1"
        trace.begin(environment.TraceSettings(os.getcwd(), steps=3, skip=1))
        record().wait()
        """,
    )
    assert (result["waited"], result["waiting"], result["told"]) == (1, 0, "1")


def test_what_the_program_sets_meanwhile_stays(tmp_path: Path) -> None:
    """As torch.compile does, with CUDA graphs."""
    result = program(
        tmp_path,
        """
        delay_s = 0.3
        ending = record()
        time.sleep(0.1)
        os.environ["TEARDOWN_CUPTI"] = "0"
        ending.wait()
        """,
    )
    assert (result["waited"], result["told"]) == (0, "0")


@pytest.mark.parametrize("when", ["before", "meanwhile", "open"])
def test_a_program_ends_after_the_profiler_has_left(tmp_path: Path, when: str) -> None:
    """Whether that had stopped before, stops meanwhile, or still runs: then it has no need to leave."""
    result = program(
        tmp_path,
        f"""
        when = {when!r}
        trace.begin(environment.TraceSettings(os.getcwd(), steps=3, skip=1))
        for index in range(3 if when == "open" else 6):
            train(1)
            trace.marked("step_end", index, "torch", time.time_ns())
            delay_s = 0.3 if when == "meanwhile" else 0
        if when == "before":
            process.trace.plan.settle()
        said["ending"] = process.trace.plan.ending is not None
        said["open"] = process.trace.plan.window is not None
        """,
    )
    assert (result["ending"], result["open"]) == (when == "meanwhile", when == "open")
    assert (result["waited"], result["waiting"], result["told"]) == (int(when == "before"), 0, None)


WAITS = """
#include <pthread.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t called = PTHREAD_COND_INITIALIZER;
static int waits;

static void *wait(void *nothing) {
    pthread_mutex_lock(&mutex);
    while (waits) pthread_cond_wait(&called, &mutex);
    pthread_mutex_unlock(&mutex);
    return nothing;
}

void leave_later(void) {
    pthread_t thread;
    waits = 1;
    pthread_create(&thread, 0, wait, 0);
    pthread_detach(thread);
}

void call(void) {
    pthread_mutex_lock(&mutex);
    waits = 0;
    pthread_mutex_unlock(&mutex);
    pthread_cond_broadcast(&called);
}

__attribute__((destructor)) static void end(void) { pthread_cond_destroy(&called); }
"""


@pytest.mark.parametrize("answers", [True, False])
def test_a_library_whose_thread_waits_does_not_hold_the_programs_end_up(
    tmp_path: Path, answers: bool
) -> None:
    """As Kineto's does: its end destroys what the thread waits on, and waits for it. Where CUDA does not
    answer, the program ends without, and with its own exit code."""
    (tmp_path / "waits.c").write_text(WAITS)
    library = tmp_path / "waits.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-o", library, tmp_path / "waits.c"], check=True)
    script = tmp_path / "program.py"
    body = f"""
        import ctypes, sys
        library = ctypes.CDLL({str(library)!r})
        answers = lambda device: library.call() if {answers} else None
        torch.cuda.cudart = lambda: types.SimpleNamespace(cudaMemGetInfo=answers)
        start = library.leave_later
        detach._END_S = 0.2
        trace.begin(environment.TraceSettings(os.getcwd(), steps=3, skip=1))
        record().wait()
        said["waits"] = len(process.torch.leaving)
        sys.exit(3)
        """
    script.write_text(PRELUDE + textwrap.dedent(body))
    done = warm_torch.run(script, [], tmp_path)
    assert (done.returncode, done.stderr) == (3, "")
    assert json.loads(done.stdout)["waits"] == 1


def test_what_the_program_says_to_the_profiler_holds(tmp_path: Path) -> None:
    result = program(
        tmp_path,
        """
        os.environ["TEARDOWN_CUPTI"] = "0"
        record().wait()
        """,
    )
    assert (result["waited"], result["told"]) == (0, "0")
