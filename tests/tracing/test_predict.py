"""Programs that only predict: the calls of their model are steps, where nothing speaks against it; and what
is said where nothing was traced."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli import smaragdine, write_script
from smaragdine.accounting.run import Run
from smaragdine.accounting.spans import step_table
from smaragdine.cli import run as run_verb
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.tracing import absence
from smaragdine.tracing.assemble import assemble
from smaragdine.tracing.kineto.window import events_of

torch_only = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")

MARK = 'mark them with smaragdine.mark("step_end", i)'
FOUND = "no steps were announced: those are the calls of Net, each up to the next one's beginning"
FEW = "no steps were announced, and fewer than 3 calls of one module began in a slice"


class Kineto:
    """A trace by hand, in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def span(self, name: str, begin: int, end: int, thread: int = 1, cat: str = "cpu_op") -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "tid": thread, "ts": begin, "dur": end - begin}
        )

    def call(self, path: str, begin: int, end: int, thread: int = 1, operators: int = 1) -> None:
        """Of a module, with operators of one microsecond each in it."""
        self.span(f"smaragdine:{path}", begin, end, thread, "user_annotation")
        for number in range(operators):
            self.span("aten::mm", begin + 1 + number, begin + 2 + number, thread)

    def calls(self, *paths: str, each: int = 10, first: int = 0) -> Kineto:
        """One after the other, with an operator of the program's after each."""
        for number, path in enumerate(paths):
            begin = first + each * number
            self.call(path, begin, begin + each - 4)
            self.span("aten::softmax", begin + each - 3, begin + each - 2)
        return self

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps({"traceEvents": self.events, "baseTimeNanoseconds": 0}))
        return path


def found(tmp_path: Path, trace: Kineto, **meta: Any) -> tuple[list[tuple[int, int]], Sequence[str], Any]:
    """The steps in microseconds, the remarks, and the events."""
    table, coverage = events_of(trace.write(tmp_path / "torch.json"), {"steps": [], **meta})
    steps = [(begin // 1000, end // 1000) for _, begin, end in coverage.found_steps]
    return steps, coverage.remarks, table


def test_a_step_is_a_call_up_to_the_next_and_the_last_one_is_none(tmp_path: Path) -> None:
    trace = Kineto().calls("Net", "Net", "Net", "Net")
    steps, remarks, table = found(tmp_path, trace)
    assert steps == [(0, 10), (10, 20), (20, 30)]
    assert remarks == (FOUND,)
    rows = [(row["name"], row["step"]) for row in table.to_pylist()]
    expected = [(name, step) for step in (0, 1, 2, None) for name in ("Net/mm", "program/softmax")]
    assert sorted(rows, key=str) == sorted(expected, key=str)


def test_what_the_edges_of_a_slice_cut_is_no_step(tmp_path: Path) -> None:
    # A call was under way when the slice began: of it there are parts alone, one even before it.
    trace = Kineto().calls("Net/0", "Net/1").calls("Net", "Net", "Net", "Net", "Net", first=20)
    steps, _, _ = found(tmp_path, trace, begin_ns=5000, end_ns=45_000)
    assert steps == [(20, 30), (30, 40)]
    # One long call, and no whole one at all.
    steps, remarks, _ = found(tmp_path, Kineto().calls("Net/0", "Net/1", "Net/0", "Net/0", "Net/0"))
    assert (steps, remarks) == ([], (f"{FEW}; {MARK}",))


@pytest.mark.parametrize(
    ("paths", "steps", "why"),
    [
        (["Net", "Net"], [], FEW),
        (["Net", "Loss", "Net", "Loss", "Net"], [(0, 20), (20, 40)], None),
        # A decoder that is called for each token, and its encoder whenever there is a new sentence.
        (
            ["Encoder", "Decoder", "Decoder", "Decoder", "Encoder", "Decoder", "Decoder"],
            [],
            "no steps were announced, and the calls of Decoder and of other modules do not take turns",
        ),
    ],
)
def test_modules_that_take_turns(
    tmp_path: Path, paths: list[str], steps: list[tuple[int, int]], why: str | None
) -> None:
    got, remarks, table = found(tmp_path, Kineto().calls(*paths))
    assert got == steps
    assert (f"{why}; {MARK}" in remarks) == (why is not None)
    assert steps or table["step"].null_count == table.num_rows


def test_the_module_that_holds_most_time_begins_the_steps(tmp_path: Path) -> None:
    trace = Kineto()
    for begin in range(0, 4000, 1000):
        trace.call("Encoder", begin, begin + 200)
        trace.call("Decoder", begin + 300, begin + 900)
    trace.call("Metric", 950, 955)  # once, but what it takes does not matter
    steps, _, _ = found(tmp_path, trace)
    assert steps == [(300, 1300), (1300, 2300), (2300, 3300)]


def test_calls_that_differ_are_no_steps(tmp_path: Path) -> None:
    trace = Kineto()
    for number, operators in enumerate((7, 3, 3, 3)):  # a prompt, and the tokens after it
        trace.call("Net", 10 * number, 10 * number + 9, operators=operators)
    steps, remarks, _ = found(tmp_path, trace)
    why = "no steps were announced, and the calls of Net do not all run the same operations"
    assert (steps, remarks) == ([], (f"{why}; {MARK}",))


def test_beside_compiled_modules_others_may_be_called_unseen(tmp_path: Path) -> None:
    trace = Kineto().calls("Net", "Net", "Net", "Net", "Net")
    assert len(found(tmp_path, trace, marked=False)[0]) == 4
    trace.span("aten::conv2d", 18, 19)  # of an encoder, say, for the next ones
    assert len(found(tmp_path, trace)[0]) == 4
    steps, remarks, _ = found(tmp_path, trace, marked=False)
    why = "no steps were announced, and not the same operations run between the calls of Net"
    assert steps == []
    assert f"{why}; {MARK}" in remarks


def test_threads_side_by_side_have_no_steps_but_replicas_have(tmp_path: Path) -> None:
    side = Kineto().calls("Net", "Net", "Net", "Net")
    side.call("Net", 8, 17, thread=2)
    steps, remarks, _ = found(tmp_path, side)
    why = "no steps were announced, and modules are called by several threads"
    assert (steps, remarks) == ([], (f"{why}; {MARK}",))
    replicas = Kineto().calls("Net", "Net", "Net", "Net")
    for begin in range(0, 40, 10):
        replicas.call("Net", begin + 1, begin + 5, thread=2)
    assert found(tmp_path, replicas)[0] == [(0, 10), (10, 20), (20, 30)]


def test_what_backward_does_again_begins_no_step(tmp_path: Path) -> None:
    trace = Kineto().calls("Net", "Net", "Net", "Net", each=20)
    for begin in (17, 37):  # not after each, which would be taking turns
        trace.span("autograd::engine::evaluate_function: CheckpointFunctionBackward", begin + 1, begin + 3)
        trace.span("smaragdine:Net/0", begin + 1, begin + 2, cat="user_annotation")
    assert found(tmp_path, trace)[0] == [(0, 20), (20, 40), (40, 60)]


def slices(folder: Path, *traces: Kineto) -> tuple[list[str], Recording]:
    (folder / "traces").mkdir(parents=True)
    for number, trace in enumerate(traces):
        base = folder / "traces" / f"torch-7-{number}"
        first_ns, last_ns = number * 10**9, number * 10**9 + 10**6
        for event in trace.events:
            event["ts"] += first_ns // 1000
        trace.write(base.with_suffix(".json"))
        meta = {"framework": "torch", "format": "kineto", "suffix": ".json", "rank": 0, "pid": 7}
        meta |= {"asked_ns": first_ns, "begin_ns": first_ns, "end_ns": last_ns, "stopped_ns": last_ns}
        meta |= {"source": None, "steps": []}
        Path(f"{base}.meta.json").write_text(json.dumps(meta))
    said = assemble(folder)
    assert not (folder / "traces").exists()
    return said, Recording(folder, {})


def test_slices_that_agree_count_their_steps_on(tmp_path: Path) -> None:
    loading = Kineto().calls("Net")
    said, recording = slices(
        tmp_path / "a", loading, *(Kineto().calls("Net", "Net", "Net") for _ in range(2))
    )
    windows = recording.windows.to_pylist()
    assert [[step["index"] for step in window["steps"]] for window in windows] == [[0, 1], [2, 3]]
    assert recording.events["step"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert said == [f"torch (rank 0): {FOUND}"]


@pytest.mark.parametrize("other", [["Other"] * 4, ["Other", "Net", "Net", "Other", "Net"]])
def test_slices_that_do_not_agree_have_no_steps(tmp_path: Path, other: list[str]) -> None:
    said, recording = slices(tmp_path / "a", Kineto().calls("Net", "Net", "Net"), Kineto().calls(*other))
    assert [window["steps"] for window in recording.windows.to_pylist()] == [[], []]
    assert recording.events.num_rows == 6 + 2 * len(other)
    assert recording.events["step"].null_count == recording.events.num_rows
    why = "no steps were announced, and what the program repeats differs from slice to slice"
    assert f"torch (rank 0): {why}; {MARK}" in said
    assert not any("those are the calls" in line for line in said)


PREDICT = """
import sys
import time
import smaragdine
import torch

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
loss = torch.nn.CrossEntropyLoss()
with torch.inference_mode():
    with smaragdine.trace(model) as trace:
        for _ in range(20 if sys.argv[1] == "with" else 0):
            model(torch.ones(64, 256))
    assert trace.folder is None and not model._forward_hooks
    end = time.monotonic() + (0 if sys.argv[1] == "with" else 2)
    while time.monotonic() < end:
        loss(model(torch.ones(64, 256)), torch.zeros(64, dtype=torch.int64))
"""


@torch_only
def test_a_loop_that_only_predicts_has_steps(tmp_path: Path) -> None:
    write_script(tmp_path / "program.py", PREDICT)
    soon = {"SMARAGDINE_TRACE_QUIET_S": "0.3"}
    done = smaragdine("run", "-o", "out", "program.py", "plain", cwd=tmp_path, env=soon)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    recording = open_recording(tmp_path / "out")
    windows = recording.windows.to_pylist()
    assert windows
    assert all(window["source"] is None for window in windows)
    steps = [step["index"] for window in windows for step in window["steps"]]
    assert steps == list(range(len(steps)))
    names: list[str] = recording.events["name"].to_pylist()
    for name in ("Sequential/0/addmm", "Sequential/2/addmm", "CrossEntropyLoss/nll_loss_nd", "program/zeros"):
        assert names.count(name) == len(steps) > 1, name
    footprint = Run(recording).accounted
    total = footprint.devices["cpu:0"]
    rows_j = sum(footprint.device_rows("cpu:0")["energy_j"].to_pylist())
    assert rows_j + total.idle_j == pytest.approx(total.total_j, rel=1e-9)
    done = smaragdine("report", "out", cwd=tmp_path)
    assert "cpu:0, one traced step" in done.stdout


COMPILED = """
import time
import torch
from torch._dynamo.utils import counters

torch.set_num_threads(1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(256, 256), torch.nn.Linear(256, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

model = torch.compile(Net(), backend="eager")
with torch.inference_mode():
    model(torch.ones(64, 256))
    end = time.monotonic() + 2
    while time.monotonic() < end:
        model(torch.ones(64, 256)).argmax(-1)
print(dict(counters["stats"]), dict(counters["graph_break"]))
"""


@torch_only
def test_a_compiled_model_that_only_predicts_has_steps_and_is_not_compiled_anew(tmp_path: Path) -> None:
    write_script(tmp_path / "program.py", COMPILED)
    soon = {"SMARAGDINE_TRACE_QUIET_S": "0.3"}
    done = smaragdine("run", "-o", "out", "program.py", cwd=tmp_path, env=soon)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'calls_captured': 3, 'unique_graphs': 1} {}\n"
    recording = open_recording(tmp_path / "out")
    windows = recording.windows.to_pylist()
    assert windows
    assert FOUND in windows[-1]["remarks"]
    steps = sum(len(window["steps"]) for window in windows)
    names: list[str] = recording.events["name"].to_pylist()
    # Two products in each call, under the module that was compiled.
    assert names.count("Net/addmm") == 2 * steps > 2
    assert names.count("program/argmax") == steps


@torch_only
def test_a_model_that_is_traced_inside_run_announces_its_calls(tmp_path: Path) -> None:
    write_script(tmp_path / "program.py", PREDICT)
    options = ("--trace-steps", "5", "--trace-skip", "3")
    done = smaragdine("run", "-o", "out", *options, "program.py", "with", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    (window,) = open_recording(tmp_path / "out").windows.to_pylist()
    assert window["source"] == "torch:forward"
    assert [step["index"] for step in window["steps"]] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("loads", [True, False])
def test_what_to_do_is_said_to_who_computes_without_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loads: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SMARAGDINE_SPOOL", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    write_script(tmp_path / "torch.py", "__version__ = '2.0'")
    write_script(tmp_path / "program.py", "import torch" if loads else "import json")
    # Nobody can have computed for as long in so short a program.
    assert run_verb.main(["-o", "merely", "program.py"]) == 0
    assert "trace:" not in capsys.readouterr().err
    monkeypatch.setattr(absence, "_LEAST_CPU_S", 0.0)
    assert run_verb.main(["-o", "computed", "program.py"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trace:")]
    assert len(said) == loads
    if loads:
        assert said[0].startswith("trace: no steps were announced in ")
        assert said[0].endswith(f"s; {MARK}, or let it run longer than 15 s")
    text = " ".join(smaragdine("report", "computed", cwd=tmp_path).stdout.split())
    assert (f"{MARK}, or let it run longer than 15 s" in text) == loads
    assert ("no process told of a framework that is traced" in text) != loads


def test_of_a_long_program_only_the_remedy_is_said() -> None:
    assert absence.no_steps(15.0, 15.0) == f"no steps were announced in 15.0 s; {MARK}"


def test_steps_of_a_training_come_before_the_calls_it_evaluates_by(tmp_path: Path) -> None:
    sources = ["torch:forward"] * 5 + ["torch"] * 3
    (tmp_path / "spool").mkdir()
    lines = [
        json.dumps({"t_ns": 1000 * n, "name": "step_end", "index": n, "rank": 0, "pid": 7, "source": source})
        for n, source in enumerate(sources)
    ]
    (tmp_path / "spool" / "marks-7.jsonl").write_text("\n".join(lines) + "\n")
    found = step_table(Recording(tmp_path, {}))
    assert found is not None
    assert found.index.tolist() == [6, 7]
