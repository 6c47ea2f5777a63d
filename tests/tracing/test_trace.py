"""`smaragdine run --trace-steps`: from the program's steps to a footprint, and what if that cannot be."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pyarrow as pa
import pytest

from cli import info, show_json, smaragdine, write_script
from smaragdine.accounting.run import Run
from smaragdine.accounting.traces import device_traces
from smaragdine.arrow import pc
from smaragdine.recording.reader import open_recording

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")

TRAIN = """
import sys
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
STEPS = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(STEPS):
    x, y = torch.randn(32, 64), torch.randint(0, 4, (32,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print("%.17g" % sum(float(p.detach().sum()) for p in model.parameters()))
"""


def train(folder: Path, *options: str, steps: int = 30, script: str = TRAIN):
    write_script(folder / "train.py", script)
    return smaragdine("run", *options, "train.py", str(steps), cwd=folder)


def test_a_footprint_of_traced_steps(tmp_path: Path) -> None:
    bare = train(tmp_path, "-o", "bare", "--trace", "off")
    traced = train(tmp_path, "-o", "traced", "--trace-steps", "6", "--trace-skip", "4")
    assert (bare.returncode, traced.returncode) == (0, 0), traced.stderr
    assert traced.stdout == bare.stdout  # the same weights to the last bit, and nothing of ours on stdout
    assert "smaragdine report traced" in traced.stderr
    recording = open_recording(tmp_path / "traced")
    assert not (tmp_path / "traced" / "traces").exists()
    events = recording.events.to_pylist()
    assert {event["step"] for event in events} == set(range(4, 10))
    # One product forward; backward one for the weights and, but for the first layer, one for the input.
    for phase, expected in (("forward", {"0": 6, "2": 6}), ("backward", {"0": 6, "2": 12})):
        for layer, count in expected.items():
            path = f"Sequential/{layer}/{'addmm' if phase == 'forward' else 'mm'}"
            assert sum(e["name"] == path and e["phase"] == phase for e in events) == count, (path, phase)
    assert any(event["phase"] == "optimizer" for event in events)
    assert not (tmp_path / "bare" / "events.arrows").exists()


def test_energy_is_conserved_through_the_whole_pipe(tmp_path: Path) -> None:
    done = train(tmp_path, "-o", "out", "--trace-steps", "5", "--trace-skip", "2")
    assert done.returncode == 0, done.stderr
    recording = open_recording(tmp_path / "out")
    (window,) = recording.windows.to_pylist()
    begin_ns, end_ns = window["steps"][0]["begin_ns"], window["steps"][-1]["end_ns"]
    footprint = Run(recording).accounted
    whole = device_traces(recording)
    for device, total in footprint.devices.items():
        rows_j = sum(footprint.device_rows(device)["energy_j"].to_pylist())
        assert rows_j + total.idle_j == pytest.approx(total.total_j, rel=1e-9)
        used_j = whole[device].energy_j(begin_ns, end_ns)
        # The program's part and the others' are the device's.
        assert total.total_j + (total.other_j or 0.0) == pytest.approx(used_j, rel=1e-9)
    assert footprint.devices["cpu:0"].steps == 5


@pytest.mark.parametrize("steps", [1, 3])
def test_too_few_steps_are_said(tmp_path: Path, steps: int) -> None:
    done = train(tmp_path, "-o", "out", "--trace-steps", "5", "--trace-skip", "10", steps=steps)
    assert done.returncode == 0
    if open_recording(tmp_path / "out").events.num_rows == 0:
        assert "no step was traced" in done.stderr
    else:  # on a machine so busy that slices of time were traced before the first step had ended
        assert "slice" in done.stderr


def test_a_program_that_ends_while_traced_keeps_what_there_is(tmp_path: Path) -> None:
    done = train(tmp_path, "-o", "out", "--trace-steps", "50", "--trace-skip", "3", steps=8)
    assert done.returncode == 0, done.stderr
    assert {e["step"] for e in open_recording(tmp_path / "out").events.to_pylist()} == {3, 4, 5, 6, 7}


PROFILES_ITSELF = TRAIN.replace(
    "for step in range(STEPS):",
    "profiler = torch.profiler.profile(); profiler.start()\nfor step in range(STEPS):",
).replace("print(", "profiler.stop()\nprint(len(profiler.events()) > 100)\nprint(")


def test_a_program_with_a_profiler_of_its_own_is_left_alone(tmp_path: Path) -> None:
    bare = train(tmp_path, "-o", "bare", "--trace", "off", script=PROFILES_ITSELF)
    traced = train(tmp_path, "-o", "out", "--trace-steps", "3", "--trace-skip", "2", script=PROFILES_ITSELF)
    assert (traced.returncode, traced.stdout) == (bare.returncode, bare.stdout) == (0, bare.stdout)
    assert "True" in traced.stdout
    assert "a PyTorch profiler is already running" in traced.stderr
    assert open_recording(tmp_path / "out").events.num_rows == 0


SCHEDULED = (
    TRAIN.replace(
        "for step in range(STEPS):",
        "seen = []\n"
        "profiler = torch.profiler.profile(\n"
        "    schedule=torch.profiler.schedule(wait=1, warmup=2, active=2, repeat=2),\n"
        "    on_trace_ready=lambda own: seen.append(sum(e.name == 'aten::addmm' for e in own.events())))\n"
        "profiler.start()\nfor step in range(STEPS):",
    )
    .replace("    optimizer.step()", "    optimizer.step()\n    profiler.step()")
    .replace("print(", "profiler.stop()\nprint(seen)\nprint(", 1)
)


def test_a_profiler_that_the_program_has_for_some_steps_is_waited_for(tmp_path: Path) -> None:
    bare = train(tmp_path, "-o", "bare", "--trace", "off", script=SCHEDULED)
    traced = train(tmp_path, "-o", "out", "--trace-steps", "6", "--trace-skip", "2", script=SCHEDULED)
    assert (traced.returncode, traced.stdout) == (0, bare.stdout), traced.stderr
    assert traced.stdout.startswith("[4, 4]\n")  # two products in each of two steps, twice
    assert "! " not in traced.stderr
    # Refused in the first warm-up, after step 1; begun after step 5 and ended by the second warm-up, which is
    # seen when six steps and one more have passed; eight after that.
    (window,) = open_recording(tmp_path / "out").windows.to_pylist()
    assert [step["index"] for step in window["steps"]] == [21, 22, 23, 24, 25, 26]


JAX = """
import sys
import jax, jax.numpy as jnp
import smaragdine

step = jax.jit(lambda w, x: w - 0.01 * jax.grad(lambda w: jnp.square(x @ w).mean())(w))
w, x = jnp.ones((64, 64)), jnp.ones((32, 64))
for i in range(int(sys.argv[1])):
    if i == 2:
        jax.profiler.start_trace("own")
    w = step(w, x).block_until_ready()
    if i == 12:
        jax.profiler.stop_trace()
    smaragdine.mark("step_end", i)
"""


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
def test_a_profiler_that_a_program_of_jax_has_for_some_steps_is_waited_for(tmp_path: Path) -> None:
    done = train(tmp_path, "-o", "out", "--trace-steps", "3", "--trace-skip", "5", steps=40, script=JAX)
    assert done.returncode == 0, done.stderr
    assert "! " not in done.stderr
    assert list((tmp_path / "own").glob("**/*.xplane.pb"))
    # Refused after steps 4 and 8.
    (window,) = open_recording(tmp_path / "out").windows.to_pylist()
    assert [step["index"] for step in window["steps"]] == [17, 18, 19]


EVALUATES = TRAIN.replace(
    "    optimizer.step()",
    """    optimizer.step()
    if step % 4 == 3:
        model.eval()
        with torch.no_grad():
            model(x).argmax(-1)
        model.train()""",
)


def test_evaluation_in_a_loop_of_ones_own_is_no_part_of_a_step(tmp_path: Path) -> None:
    done = train(tmp_path, "-o", "out", "--trace-steps", "6", "--trace-skip", "3", script=EVALUATES)
    assert done.returncode == 0, done.stderr
    recording = open_recording(tmp_path / "out")
    windows = recording.windows.to_pylist()
    traced = [[step["index"] for step in window["steps"]] for window in windows]
    # One ends at each evaluation, and the next begins with the step after it, at the earliest.
    assert traced[0] == [3]
    assert all({index // 4 for index in indices} == {indices[0] // 4} for indices in traced)
    assert all(index % 4 for indices in traced for index in indices)
    assert all(window["counts_divide"] and not window["remarks"] for window in windows)
    names: list[str] = recording.events["name"].to_pylist()
    assert names.count("Sequential/0/addmm") == sum(map(len, traced))
    assert "program/argmax" not in names
    marks = recording.marks.filter(pc.is_in(recording.marks["name"], pa.array(["step_end", "evaluate_end"])))
    assert (
        marks.sort_by("t_ns")["name"].to_pylist()
        == [*["step_end"] * 4, "evaluate_end"] * 7 + ["step_end"] * 2
    )


RAISES = TRAIN.replace(
    "    optimizer.step()", "    optimizer.step()\n    if step == 6: raise ValueError('mine')"
)


def test_a_program_that_raises_while_traced_fails_as_it_would(tmp_path: Path) -> None:
    done = train(tmp_path, "-o", "out", "--trace-steps", "20", "--trace-skip", "3", script=RAISES)
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr
    assert info(tmp_path / "out")["status"] == "failed"


def test_nothing_is_traced_where_it_is_off(tmp_path: Path) -> None:
    done = train(tmp_path, "-o", "out", "--trace", "off")
    assert done.returncode == 0
    assert "smaragdine report" not in done.stderr
    assert show_json(tmp_path / "out")["status"] == "complete"
