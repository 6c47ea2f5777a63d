"""Which steps are traced, and what that may cost: the policy by itself, with a profiler that is none."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smaragdine.tracing.assemble import assemble
from smaragdine.tracing.hook import environment, marks, trace, tracers, training, windows
from smaragdine.tracing.hook.state import process

MS = 1_000_000
S = 1_000 * MS


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_000 * S

    def __call__(self) -> int:
        return self.now_ns


class FakeTracer:
    """A profiler that takes time to start and to stop, writes so many bytes, and fails on demand."""

    FRAMEWORK, FORMAT, SUFFIX = "fake", "kineto", ".json"

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.start_ns, self.stop_ns, self.bytes_per_s = 10 * MS, 40 * MS, 1000
        self.calls: list[str] = []
        self.running = 0
        self.fails: set[str] = set()

    def start(self) -> int:
        self.calls.append("start")
        if "start" in self.fails:
            raise RuntimeError("a profiler is running already")
        if "busy" in self.fails:
            raise tracers.ProfilerBusy("the program profiles itself")
        self._passes(self.start_ns)
        self.running += 1
        return self.clock()

    def stop(self, begun_ns: int, path: str) -> dict[str, Any]:
        self.calls.append("stop")
        self.running -= 1
        size = int((self.clock() - begun_ns) / S * self.bytes_per_s)
        self._passes(self.stop_ns)
        if "taken" in self.fails:
            raise tracers.ProfilerBusy("the program profiles itself")
        if "stop" in self.fails:
            raise OSError("no space left on device")
        Path(path).write_bytes(b"x" * size)
        return {"edges": [["a", "b"]]}

    def _passes(self, ns: int) -> None:
        if isinstance(self.clock, Clock):
            self.clock.now_ns += ns


class Program:
    """A training whose steps take `step_ns`, half as long again while the profiler runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.clock = Clock()
        self.tracer = FakeTracer(self.clock)
        self.folder = folder / "traces"
        self.plan = windows.WindowPlan(environment.TraceSettings(str(self.folder), **settings), self.clock)
        self.step_ns = 100 * MS
        self.slower_ns = 50 * MS
        self.lost_ns = 0  # what all the tracing took, as only we know
        self.next = 0
        monkeypatch.setattr(tracers, "of_source", lambda source: self.tracer)
        self.on_gpu = True
        monkeypatch.setattr(tracers, "gpu_in_use", lambda: self.on_gpu)

    def steps(self, count: int, source: str = "keras") -> None:
        for _ in range(count):
            self.clock.now_ns += self.step_ns + (self.slower_ns if self.tracer.running else 0)
            self.lost_ns += self.slower_ns if self.tracer.running else 0
            before_ns = self.clock.now_ns
            self.plan.step_ended(source, self.next, self.clock.now_ns)
            self.lost_ns += self.clock.now_ns - before_ns
            self.next += 1

    def metas(self) -> list[dict[str, Any]]:
        paths = sorted(self.folder.glob("*.meta.json"), key=lambda path: int(path.name.split("-")[2][:-10]))
        return [json.loads(path.read_text()) for path in paths]

    def traced(self) -> list[list[int]]:
        return [[step[0] for step in meta["steps"]] for meta in self.metas()]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Program]:
    return lambda **settings: Program(tmp_path, monkeypatch, **settings)


@pytest.mark.parametrize(
    ("steps", "skip", "expected"),
    [(3, 5, [5, 6, 7]), (1, 1, [1]), (2, 0, [1, 2]), (20, 10, list(range(10, 30)))],
)
def test_so_many_steps_after_so_many_others(program: Any, steps: int, skip: int, expected: list[int]) -> None:
    run = program(steps=steps, skip=skip)
    run.tracer.bytes_per_s = 1
    run.step_ns = 10 * MS
    run.steps(60)
    assert run.traced() == [expected]
    assert run.tracer.calls == ["start", "stop"]
    assert run.plan.done
    (meta,) = run.metas()
    begins = [step[1] for step in meta["steps"]]
    ends = [step[2] for step in meta["steps"]]
    assert begins == [meta["begin_ns"], *ends[:-1]]
    assert meta["begin_ns"] - meta["asked_ns"] == run.tracer.start_ns
    assert meta["stopped_ns"] - meta["end_ns"] == run.tracer.stop_ns
    assert meta["end_ns"] == ends[-1]
    assert meta["edges"] == [["a", "b"]]


@pytest.mark.parametrize("source", ["torch", "torch:1", training.FORWARD])
def test_pytorch_runs_into_the_step_after_the_last(program: Any, source: str) -> None:
    run = program(steps=3, skip=5)
    run.steps(20, source)
    (meta,) = run.metas()
    assert [step[0] for step in meta["steps"]] == [5, 6, 7]
    assert meta["end_ns"] - meta["steps"][-1][2] == run.step_ns + run.slower_ns
    # It is slower too, and paid for.
    assert run.plan.cost.spent_s == pytest.approx(run.lost_ns * 1e-9, rel=1e-6)


def test_the_first_window_is_short_and_later_ones_keep_to_their_bytes(program: Any) -> None:
    run = program(steps=0, skip=1)
    run.slower_ns, run.step_ns = 0, 1 * S
    run.tracer.bytes_per_s = (64 << 20) // 5
    run.steps(40)
    lengths = [len(steps) for steps in run.traced()]
    assert lengths[0] == 4  # four seconds of whose size nothing was known
    assert set(lengths[1:-1]) <= {5, 6}  # whole steps
    assert not run.plan.done
    for meta in run.metas():
        assert (meta["end_ns"] - meta["begin_ns"]) / S * run.tracer.bytes_per_s < 1.3 * (64 << 20)


class Writing:
    """A trace that takes so long to be written, beside the program."""

    def __init__(self, clock: Clock, length_ns: int, then: Callable[[], None]) -> None:
        self.clock, self.until_ns, self.then = clock, clock() + length_ns, then

    def over(self) -> bool:
        return self.clock() >= self.until_ns

    def wait(self) -> None:
        self.clock.now_ns = max(self.clock.now_ns, self.until_ns)
        self.then()


@pytest.mark.parametrize("steps", [10, 0])
def test_nobody_waits_for_a_file_but_who_wants_every_step(
    program: Any, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """A window of four seconds, whose file takes five; then the next one."""
    run = program(steps=steps, skip=1)
    run.slower_ns, run.step_ns = 0, 1 * S

    def stop_aside(begun_ns: int, path: str, then: Callable[[Any, int], None]) -> Writing:
        facts, resumed_ns = run.tracer.stop(begun_ns, path), run.clock()
        return Writing(run.clock, 5 * S, lambda: then(facts, resumed_ns))

    monkeypatch.setattr(run.tracer, "stop_aside", stop_aside, raising=False)
    run.steps(14)
    paused_ns = run.lost_ns - run.tracer.start_ns * run.tracer.calls.count("start")
    paused_ns -= run.tracer.stop_ns * run.tracer.calls.count("stop")
    assert run.traced() == [[1, 2, 3, 4]]
    assert run.plan.window.steps[0][0] == (10 if steps else 6)
    assert paused_ns == (0 if steps else 4 * S)  # of five a step has passed


@pytest.mark.parametrize("source", ["keras", "torch"])
@pytest.mark.parametrize("budget", [0.01, 0.05])
def test_the_budget_is_kept_at_every_step(program: Any, budget: float, source: str) -> None:
    run = program(steps=60, skip=3, budget=budget)
    dice = random.Random(1)
    begin_ns = run.clock.now_ns + run.step_ns
    window_ns = 0
    for _ in range(6000):
        run.step_ns = dice.choice([90, 100, 110]) * MS
        before_ns = run.lost_ns
        run.steps(1, source)
        window_ns = max(window_ns, run.lost_ns - before_ns)
        elapsed_ns = run.clock.now_ns - begin_ns
        # What one window can be misjudged by: a pause, and a step or two.
        assert run.lost_ns <= budget * elapsed_ns + window_ns + 2 * (run.slower_ns + 20 * MS)
    assert run.lost_ns <= budget * (run.clock.now_ns - begin_ns)
    assert sum(map(len, run.traced())) == 60
    assert len(run.traced()) > 1


def test_a_tiny_budget_traces_nothing(program: Any) -> None:
    run = program(steps=20, skip=2, budget=0.001)
    run.steps(200)
    assert run.tracer.calls == []


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_budget_that_is_many_times_the_cost_is_enough(program: Any, on_gpu: bool) -> None:
    """900 steps of 7 ms, of which tracing costs 0.4 %: with 5 % there is no reason to refuse. Only on a GPU
    nobody knows before how long its profiler goes on to slow the program down."""
    run = program(steps=10, skip=10, budget=0.05)
    run.on_gpu, run.step_ns, run.slower_ns = on_gpu, 7 * MS, 1 * MS
    run.tracer.start_ns, run.tracer.stop_ns = 4 * MS, 2 * MS
    begin_ns = run.clock.now_ns
    run.steps(900)
    assert sum(map(len, run.traced())) == (0 if on_gpu else 10)
    assert run.lost_ns <= 0.004 * (run.clock.now_ns - begin_ns)


def test_whether_a_gpu_is_in_use_is_looked_up_once(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, asked = program(steps=10, skip=2, budget=1e-6), []
    monkeypatch.setattr(tracers, "gpu_in_use", lambda: asked.append(1))
    run.steps(50)
    assert len(asked) == 1
    monkeypatch.undo()
    maps = "7f0-7f1 r-xp 00000000 08:01 1 {}\n"
    for library, used in (("/usr/lib/libcuda.so.580.1", True), ("/opt/torch/libcudart.so.13", False)):
        (tmp_path / "maps").write_text(maps.format(library))
        with monkeypatch.context() as patched:
            patched.setattr("builtins.open", lambda *_, whole=open: whole(tmp_path / "maps", "rb"))
            assert tracers.gpu_in_use() is used


def test_a_slice_counts_whole_against_the_budget(program: Any) -> None:
    run = program(steps=20, skip=2, budget=0.1)
    plan, clock = run.plan, run.clock
    assert not plan.slice_affordable(1.0)
    clock.now_ns += 14 * S
    assert not plan.slice_affordable(1.0)  # half a second is put aside for a profiler nobody knows
    clock.now_ns += 2 * S
    assert plan.slice_affordable(1.0)
    plan.open(run.tracer)
    clock.now_ns += 1 * S
    plan.close()
    assert plan.cost.spent_s == pytest.approx(1.05)
    assert not plan.slice_affordable(1.0)
    clock.now_ns += 5 * S
    assert plan.slice_affordable(1.0)


def test_an_evaluation_is_no_part_of_a_step(program: Any) -> None:
    run = program(steps=6, skip=2)
    run.steps(4)
    run.clock.now_ns += 1 * S
    run.plan.interrupted()
    run.clock.now_ns += 60 * S
    run.plan.step_begins(run.clock.now_ns)
    run.steps(8)
    first, second = run.metas()
    assert [step[0] for step in first["steps"]] == [2, 3]
    assert len(second["steps"]) == 4
    assert max(step[2] - step[1] for step in first["steps"] + second["steps"]) <= run.step_ns + run.slower_ns
    assert run.plan.cost.longest_s <= (run.step_ns + run.slower_ns) * 1e-9


def test_the_gap_between_two_epochs_is_no_part_of_a_step(program: Any) -> None:
    run = program(steps=6, skip=2)
    run.steps(4)
    run.clock.now_ns += 5 * S
    run.plan.step_begins(run.clock.now_ns)
    run.steps(4)
    (meta,) = run.metas()
    assert {step[2] - step[1] for step in meta["steps"]} == {run.step_ns + run.slower_ns}


def test_a_window_without_a_step_leaves_nothing(program: Any) -> None:
    run = program(steps=6, skip=2)
    run.steps(2)
    assert run.tracer.running == 1
    run.plan.interrupted()
    assert run.tracer.running == 0
    assert list(run.folder.iterdir()) == []


@pytest.mark.parametrize("steps", [3, 0])
def test_a_window_that_cannot_be_closed_is_closed_later(
    program: Any, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    run = program(steps=steps, skip=2)
    run.steps(4)
    monkeypatch.setattr(run.tracer, "may_stop", lambda: False, raising=False)
    run.plan.interrupted()
    run.steps(30)
    run.steps(30, "torch:1")  # another training, which is not mixed with it
    assert (run.tracer.calls, run.plan.source) == (["start"], "keras")
    monkeypatch.setattr(run.tracer, "may_stop", lambda: True)
    run.steps(1)
    assert run.tracer.calls == ["start", "stop"]
    assert run.traced() == [[2, 3]]


def test_a_window_has_the_rank_found_at_run_time(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.marks, "rank", None)
    for name in (*marks._RANKS, "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    run = program(steps=3, skip=2)
    marks.learn_rank(3)
    run.steps(10)
    assert [meta["rank"] for meta in run.metas()] == [3]


def test_a_second_source_is_inside_the_first_ones_steps(program: Any) -> None:
    run = program(steps=4, skip=2)
    for _ in range(20):
        run.steps(1, "torch")
        run.steps(3, "torch:1")
    (meta,) = run.metas()
    assert meta["source"] == "torch"
    assert [step[0] for step in meta["steps"]] == [8, 12, 16, 20]


def test_a_training_that_ends_early_gives_way_to_the_next(program: Any) -> None:
    run = program(steps=3, skip=10)
    run.steps(5, "torch")  # a trial
    run.steps(60, "torch:1")
    (meta,) = run.metas()
    assert meta["source"] == "torch:1"
    assert len(meta["steps"]) == 3


def test_calls_of_a_model_give_way_to_its_training(program: Any) -> None:
    run = program(steps=3, skip=2)
    run.steps(10, training.FORWARD)
    assert run.plan.done
    run.steps(10, "torch")
    run.steps(40, training.FORWARD)  # its evaluation
    assert [meta["source"] for meta in run.metas()] == [training.FORWARD, "torch"]
    assert run.traced() == [[2, 3, 4], [12, 13, 14]]


def test_steps_end_a_slice(program: Any) -> None:
    run = program(steps=3, skip=2)
    run.plan.open(run.tracer)
    run.steps(10)
    assert run.traced() == [[], [2, 3, 4]]
    assert [meta["source"] for meta in run.metas()] == [None, "keras"]


@pytest.mark.parametrize("fails", ["start", "stop"])
def test_a_profiler_that_fails_is_not_asked_again(program: Any, fails: str) -> None:
    run = program(steps=3, skip=2)
    run.tracer.fails = {fails}
    for _ in range(20):
        trace._try(run.plan, lambda: run.steps(1))
    assert run.tracer.running == 0
    assert run.tracer.calls == (["start"] if fails == "start" else ["start", "stop"])
    assert run.plan.done
    assert not run.folder.exists() or not list(run.folder.iterdir())


def test_a_profiler_of_the_programs_own_is_waited_for(program: Any) -> None:
    run = program(steps=3, skip=2)
    run.tracer.fails = {"busy"}
    asked: list[int] = []
    for step in range(1, 401):
        before = len(run.tracer.calls)
        run.steps(1)
        asked += [step] * (len(run.tracer.calls) - before)
    assert asked == [2, 6, 14, 30, 62, 126, 190, 254, 318, 382]
    assert not run.plan.done
    run.tracer.fails.clear()
    run.steps(60)
    assert run.traced() == [[446, 447, 448]]


def test_windows_that_the_programs_profiler_ends_are_made_up_for(program: Any) -> None:
    run = program(steps=3, skip=2)
    run.tracer.fails = {"taken"}
    run.steps(19)  # 2, 3 and 4, then four to wait, then 9, 10 and 11
    assert run.tracer.calls == ["start", "stop"] * 2
    assert (run.traced(), run.plan.traced, run.plan.done) == ([], 0, False)
    run.tracer.fails.clear()
    run.steps(20)
    assert run.traced() == [[20, 21, 22]]


def test_windows_are_not_broken_for_ever(program: Any) -> None:
    run = program(steps=3, skip=2)
    run.tracer.fails = {"taken"}
    for _ in range(1000):
        trace._try(run.plan, lambda: run.steps(1))
    assert run.tracer.calls == ["start", "stop"] * windows._MOST_BROKEN
    assert run.plan.failed


def test_whatever_goes_wrong_no_profiler_goes_on(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = program(steps=3, skip=2)
    run.steps(3)
    assert run.tracer.running == 1
    monkeypatch.setattr(run.plan, "_enough", lambda window: 1 / 0)
    trace._try(run.plan, lambda: run.steps(1))
    assert (run.tracer.running, run.plan.done) == (0, True)
    run.steps(5)
    assert run.tracer.calls == ["start", "stop"]


def test_a_folder_that_cannot_be_made_stops_the_profiler(program: Any) -> None:
    run = program(steps=3, skip=2)
    run.folder.write_text("a file")
    for _ in range(10):
        trace._try(run.plan, lambda: run.steps(1))
    assert run.tracer.running == 0
    assert run.plan.done


def test_a_meta_file_that_cannot_be_written_takes_the_raw_file_along(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = program(steps=3, skip=2)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(windows, "json", types.SimpleNamespace(dump=full))
    for _ in range(10):
        trace._try(run.plan, lambda: run.steps(1))
    assert list(run.folder.iterdir()) == []


def test_a_window_that_no_step_ends_is_overdue(program: Any) -> None:
    run = program(steps=5, skip=2)
    run.steps(4)
    assert not run.plan.overdue()
    run.clock.now_ns += 9 * S
    assert not run.plan.overdue()
    run.clock.now_ns += 2 * S
    assert run.plan.overdue()
    run.plan.close()
    assert not run.plan.overdue()


def test_long_steps_are_waited_for(program: Any) -> None:
    run = program(steps=5, skip=2)
    run.step_ns = 30 * S
    run.steps(3)
    run.clock.now_ns += 300 * S
    assert not run.plan.overdue()


# The watch, and how marks reach the plan.


class Watched:
    def __init__(self, folder: Path) -> None:
        self.tracer = FakeTracer(__import__("time").time_ns)
        self.folder = folder / "traces"
        self.spool = folder / "spool"
        self.spool.mkdir()

    def begin(self, **settings: Any) -> None:
        trace.begin(environment.TraceSettings(str(self.folder), **settings))

    def errors(self) -> list[str]:
        marks.flush()
        lines = [json.loads(line) for file in self.spool.iterdir() for line in file.read_text().splitlines()]
        return [line["detail"]["error"] for line in lines if line["name"] == "hook_error"]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched(tmp_path)
    monkeypatch.setattr(tracers, "of_source", lambda source: made.tracer)
    monkeypatch.setattr(tracers, "in_use", lambda: "jax")
    monkeypatch.setattr(tracers, "named", lambda framework: made.tracer)
    monkeypatch.setattr(trace, "_TICK_S", 0.01)
    monkeypatch.setattr(trace, "_SLICE_S", 0.05)
    monkeypatch.setattr(process.trace, "watching", None)
    monkeypatch.setattr(process.trace, "plan", None)  # of another test
    monkeypatch.setattr(trace.atexit, "register", lambda function: None)
    monkeypatch.setattr(process.marks, "failed", set())
    marks.set_spool(str(made.spool))
    yield made
    trace.end()
    marks.set_spool(None)


def eventually(condition: Callable[[], Any]) -> None:
    done = threading.Event()
    for _ in range(2000):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("not within 20 s")


def test_a_program_without_steps_gets_slices(watched: Watched) -> None:
    watched.begin(quiet_s=0.02)
    trace.framework_loaded()
    eventually(lambda: watched.tracer.calls == ["start", "stop"] * trace._SLICES)
    trace.end()
    metas = sorted(watched.folder.glob("*.meta.json"))
    assert len(metas) == trace._SLICES
    assert all(json.loads(path.read_text())["steps"] == [] for path in metas)


def test_a_second_trace_is_watched_too(watched: Watched) -> None:
    for _ in range(2):
        watched.tracer.calls.clear()
        watched.begin(quiet_s=0.02)
        trace.framework_loaded()
        eventually(lambda: watched.tracer.calls[:2] == ["start", "stop"])
        trace.end()
        assert watched.tracer.running == 0


def test_nothing_begins_once_the_program_ends(watched: Watched) -> None:
    watched.begin(quiet_s=0.3)
    trace.framework_loaded()
    trace.finish()
    done = threading.Event()
    done.wait(0.6)
    assert watched.tracer.calls == []


def test_marks_open_and_close_windows(watched: Watched) -> None:
    watched.begin(steps=3, skip=2, quiet_s=60)
    for index in range(3):
        marks.soon(marks.time.time_ns(), "step_end", index, "keras")
    assert watched.tracer.running == 1
    marks.mark("evaluate_begin", source="keras")
    assert watched.tracer.running == 0
    marks.mark("evaluate_end", source="keras")
    marks.soon(marks.time.time_ns(), "step_end", 3, "keras")
    assert watched.tracer.running == 1
    marks.soon(marks.time.time_ns(), "step_end", 4, "keras")
    marks.mark("train_end", source="keras")
    assert watched.tracer.running == 0
    metas = [json.loads(path.read_text()) for path in sorted(watched.folder.glob("*.meta.json"))]
    assert [[step[0] for step in meta["steps"]] for meta in metas] == [[2], [4]]
    assert watched.errors() == []


def test_what_goes_wrong_is_said_once(watched: Watched) -> None:
    watched.tracer.fails = {"start"}
    watched.begin(steps=3, skip=1, quiet_s=60)
    for index in range(5):
        marks.mark("step_end", index, source="keras")
    assert watched.errors() == ["RuntimeError: a profiler is running already"]
    assert watched.tracer.calls == ["start"]


@pytest.mark.parametrize("ends", [True, False])
def test_that_the_program_profiled_itself_is_said_where_nothing_was_traced(
    watched: Watched, ends: bool
) -> None:
    watched.tracer.fails = {"busy"}
    watched.begin(steps=3, skip=1, quiet_s=60)
    for index in range(20):
        if ends and index == 5:
            watched.tracer.fails.clear()
        marks.mark("step_end", index, source="keras")
    assert watched.errors() == []
    trace.finish()
    assert watched.errors() == ([] if ends else ["ProfilerBusy: the program profiles itself"])


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Sets what is done on SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda work: signal.signal(signal.SIGUSR1, lambda *args: work()) and None
    signal.signal(signal.SIGUSR1, before)


def announce_evaluation() -> None:
    marks.mark("evaluate_begin", source="user")
    marks.mark("evaluate_end", source="user")


@pytest.mark.parametrize("moment", ["start", "stop"])
def test_a_signals_handler_may_announce_while_a_window_opens_or_closes(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, on_signal: Any, moment: str
) -> None:
    original = getattr(watched.tracer, moment)

    def interrupted(*args: Any) -> Any:
        if not handled:
            signal.raise_signal(signal.SIGUSR1)
        return original(*args)

    handled: list[bool] = []
    on_signal(lambda: (handled.append(True), announce_evaluation()))
    monkeypatch.setattr(watched.tracer, moment, interrupted)
    watched.begin(steps=3, skip=2, quiet_s=60)
    for index in range(10):
        marks.mark("step_end", index, source="keras")
    trace.finish()
    assert (handled, watched.errors(), watched.tracer.running) == ([True], [], 0)
    metas = [json.loads(path.read_text()) for path in watched.folder.glob("*.meta.json")]
    # The one that was being opened had no step when the evaluation was announced.
    assert [[step[0] for step in meta["steps"]] for meta in metas] == [
        [3, 4, 5] if moment == "start" else [2, 3, 4]
    ]


def test_a_signals_handler_may_end_the_trace_while_a_window_opens(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, on_signal: Any
) -> None:
    original = watched.tracer.start

    def interrupted() -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return original()

    on_signal(trace.end)
    monkeypatch.setattr(watched.tracer, "start", interrupted)
    watched.begin(steps=3, skip=1, quiet_s=60)
    marks.mark("step_end", 0, source="keras")
    assert watched.tracer.calls == ["start", "stop"]


@pytest.mark.parametrize("traced", [True, False])
def test_a_forked_child_traces_only_where_its_parent_did_not(watched: Watched, traced: bool) -> None:
    watched.begin(steps=2, skip=1, quiet_s=60)
    if traced:
        marks.mark("step_end", 0, source="keras")
        assert watched.tracer.running == 1
    process.trace.lock.acquire()  # as another thread may hold it just then
    child = os.fork()
    if child == 0:
        try:
            calls = list(watched.tracer.calls)
            for index in range(5):
                marks.mark("step_end", index, source="keras")
            trace.finish()
            os._exit(0 if watched.tracer.calls[len(calls) :] == ([] if traced else ["start", "stop"]) else 1)
        finally:
            os._exit(2)
    process.trace.lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert watched.tracer.running == (1 if traced else 0)


def test_raw_files_of_preparations_are_dropped(tmp_path: Path) -> None:
    """Slices and calls of a model before its training are none of its steps."""
    traces = tmp_path / "traces"
    traces.mkdir()
    for number, (source, steps) in enumerate(
        [(None, []), (training.FORWARD, [[0, 1, 2]]), ("torch", [[0, 3, 4]])]
    ):
        meta = {
            "framework": "torch",
            "format": "kineto",
            "suffix": ".json",
            "rank": 0,
            "pid": 7,
            "source": source,
        }
        meta |= {"steps": steps, "begin_ns": 0, "end_ns": 9, "asked_ns": 0, "stopped_ns": 9}
        (traces / f"torch-7-{number}.meta.json").write_text(json.dumps(meta))
        (traces / f"torch-7-{number}.json").write_text("no trace")
    said = assemble(tmp_path)
    assert len(said) == 1
    assert "torch-7-2" in said[0]
    assert sorted(path.name for path in traces.iterdir()) == ["torch-7-2.json", "torch-7-2.meta.json"]
