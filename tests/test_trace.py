"""`smaragdine run --trace-steps`: from the program's steps to a footprint, and what if that cannot be."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from cli import info, show_json, smaragdine, write_script
from smaragdine.accounting.account import account_recording
from smaragdine.accounting.traces import device_traces
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
    footprint = account_recording(recording)
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
    assert "no step was traced" in done.stderr
    assert open_recording(tmp_path / "out").events.num_rows == 0


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
    assert "profiler" in traced.stderr
    assert open_recording(tmp_path / "out").events.num_rows == 0


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
