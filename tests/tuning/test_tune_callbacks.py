"""One line in the program: `smaragdine.tune`, and the callbacks; each for real, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import smaragdine as package
from cli import environment, smaragdine, write_script
from nvml_fake import write_spec
from smaragdine.callbacks.training import _is_tuned
from smaragdine.errors import UserError
from smaragdine.recording.reader import open_recording
from sweep_bench import GPU, Bench, make_bench


def needs(*modules: str) -> Any:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


# `done(folder)`: whether a limit was settled on, in the recording there.
BEGIN = """
import time
from pathlib import Path
import smaragdine

options = {"power_w": [300], "settle_s": 0.05, "skip": 1, "steps": 5}

def done(folder):
    return any("tune_settled" in path.read_text() for path in Path(folder).glob("*/marks-tune.jsonl"))

"""


def python(bench: Bench, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    write_script(bench.folder / "train.py", BEGIN + script)
    return subprocess.run(
        [sys.executable, "train.py"],
        cwd=bench.folder,
        env=environment({"TF_CPP_MIN_LOG_LEVEL": "3", **bench.env, **env}),
        capture_output=True,
        text=True,
        check=False,
    )


def assert_tuned(bench: Bench, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    # The GPU draws its limit, and no step of these depends on it.
    assert "limits: settled on 300 W: " in done.stderr
    assert bench.restored()
    assert bench.set_values()[1:3] == [700_000, 300_000]
    found = json.loads((bench.folder / "out" / "tune.json").read_text())
    assert found["searches"][0]["chosen_w"] == 300
    recording = open_recording(bench.folder / "out")
    assert recording.info["status"] == "complete"
    assert "limit_set" in recording.marks["name"].to_pylist()


LOOP = """
with smaragdine.tune("out", **options) as tune:
    while not done("out"):
        time.sleep(0.01)
        tune.step()
print(tune.outcome.chosen_w, tune.folder.name)
"""

TORCH = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with smaragdine.tune("out", **options):
    while not done("out"):
        optimizer.zero_grad()
        model(torch.rand(4, 8)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
"""

KERAS = """
import keras
import numpy as np

class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.01)
        self.model.stop_training = done("out")

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
model.compile("sgd", "mse")
tune = smaragdine.KerasTuneCallback("out", **options)
x = np.random.rand(64, 8).astype("float32")
model.fit(x, x, batch_size=4, epochs=1000, verbose=0, callbacks=[tune, Stop()])
assert tune.tune.outcome.chosen_w == 300
"""

TRANSFORMERS = """
import torch
import transformers

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x, labels=None):
        return {"loss": self.layer(x).sum(), "logits": x}

class Stop(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.01)
        control.should_training_stop = done("out")

tune = smaragdine.TrainerTuneCallback("out", **options)
arguments = transformers.TrainingArguments(
    "checkpoints", max_steps=100000, report_to=[], disable_tqdm=True, save_strategy="no",
    logging_strategy="no", use_cpu=True, per_device_train_batch_size=4)
data = [{"x": torch.rand(8), "labels": torch.zeros(1)} for _ in range(64)]
transformers.Trainer(Net(), arguments, train_dataset=data, callbacks=[tune, Stop()]).train()
assert tune.tune.outcome.chosen_w == 300
"""


def test_a_loop_of_ones_own(bench: Bench) -> None:
    done = python(bench, LOOP)
    assert_tuned(bench, done)
    assert done.stdout == "300.0 out\n"


@needs("torch")
def test_a_loop_of_pytorch(bench: Bench) -> None:
    assert_tuned(bench, python(bench, TORCH))


@needs("keras", "tensorflow")
def test_keras(bench: Bench) -> None:
    assert_tuned(bench, python(bench, KERAS))


@needs("transformers", "torch", "accelerate")
def test_transformers(bench: Bench) -> None:
    assert_tuned(bench, python(bench, TRANSFORMERS))


SHORT = """
with smaragdine.tune(**options) as tune:
    for _ in range(5):
        tune.step()
print(tune.folder, tune.problem)
"""


def test_inside_run_it_uses_that_recording(bench: Bench) -> None:
    script = LOOP.replace('"out", **options', "**options").replace("tune.folder.name", "tune.folder")
    write_script(bench.folder / "train.py", BEGIN + script)
    done = smaragdine("run", "-o", "out", "train.py", env=bench.env, cwd=bench.folder)
    assert (done.returncode, done.stdout) == (0, "300.0 None\n"), done.stderr
    assert "limits: settled on 300 W" in done.stderr
    assert "limit_set" in open_recording(bench.folder / "out").marks["name"].to_pylist()
    assert not (bench.folder / "runs").exists()
    assert bench.restored()


@pytest.mark.parametrize("env", [{"SMARAGDINE_TUNED": "1"}, {"LOCAL_RANK": "1"}])
def test_where_somebody_else_tunes_it_does_nothing(bench: Bench, env: dict[str, str]) -> None:
    done = python(bench, SHORT, **env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None \n", "")
    assert bench.set_values() == []


@pytest.mark.parametrize(
    ("env", "tuned"),
    [
        ({}, False),
        ({"SMARAGDINE_TUNED": "1"}, True),
        ({"LOCAL_RANK": "0"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, True),
        ({"MPI_LOCALRANKID": "1"}, True),
        ({"PMIX_LOCAL_RANK": "2"}, True),
        ({"SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, False),
        ({"SLURM_NTASKS": "4", "SLURM_LOCALID": "3"}, True),
        ({"SLURM_NTASKS": "1", "SLURM_LOCALID": "3"}, False),
        ({"SLURM_LOCALID": "3"}, False),
        ({"LOCAL_RANK": "gold"}, False),
    ],
)
def test_one_process_of_a_machine_tunes(env: dict[str, str], tuned: bool) -> None:
    assert _is_tuned(env) is tuned


def test_without_permission_the_training_goes_on(bench: Bench) -> None:
    write_spec(bench.spec, [replace(GPU, set_permission=False)])
    done = python(bench, SHORT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("limits: nothing is tuned: limits cannot be set")
    assert "limits cannot be set" in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "joy"},
        {"eta": 2},
        {"slowdown": 0.0},
        {"slowdown": 0.1, "objective": "edp"},
        {"steps": 0},
    ],
)
def test_mistakes_in_the_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        package.tune(**options)
