"""`smaragdine run` on programs that make tracing hard: they do as they would, and what is missing is said."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cli import environment, smaragdine, start, wait_for, write_script
from smaragdine.recording.reader import Recording, open_recording

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
SOON = {"SMARAGDINE_TRACE_QUIET_S": "0.3", **QUIET}  # slices, where there are no steps


def needs(*modules: str) -> Any:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def bare(folder: Path, script: str, *words: str) -> str:
    """What the program prints without us."""
    write_script(folder / "program.py", script)
    done = subprocess.run(
        [sys.executable, "program.py", *words],
        cwd=folder,
        env=environment(QUIET),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(folder: Path, script: str, *words: str, expected: str, env: Mapping[str, str] = QUIET) -> str:
    """Run and traced, with the same result; stderr."""
    write_script(folder / "program.py", script)
    options = ("--trace-steps", "12", "--trace-skip", "4")
    done = smaragdine("run", "-o", "out", *options, "program.py", *words, cwd=folder, env=env)
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
    return done.stderr


def steps(recording: Recording) -> list[int]:
    return [step["index"] for window in recording.windows.to_pylist() for step in window["steps"]]


TRIED_OUT = """
import time
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4, 8)
begin = time.monotonic()
while time.monotonic() - begin < 2:
    model(x).sum()
    time.sleep(0.01)
for _ in range(30):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
print("done")
"""


@needs("torch")
def test_a_model_that_was_tried_out_before_its_training_keeps_its_dataflow(tmp_path: Path) -> None:
    """Windows of before are thrown away, and in them alone it was found."""
    run(tmp_path, TRIED_OUT, expected="done\n", env=SOON)
    recording = open_recording(tmp_path / "out")
    assert {window["source"] for window in recording.windows.to_pylist()} == {"torch"}
    edges = {(edge["source"], edge["target"]) for edge in recording.edges.to_pylist()}
    assert edges == {("Sequential/0", "Sequential/1"), ("Sequential/1", "Sequential/2")}


TORCH = """
import os
import resource
import shutil
import sys
import time
import torch

CASE = sys.argv[1]

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.second = torch.nn.Linear(64, 4)
        self.failed = False

    def forward(self, x):
        if STEP == 6 and CASE == "odd" and not self.failed:
            self.failed = True
            raise ValueError("mine")
        return self.second(torch.relu(self.first(x)))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 18 * 8

    def __getitem__(self, i):
        return torch.randn(64, generator=torch.Generator().manual_seed(i)), i % 4

def odd(model, optimizer, x):
    if STEP == 5:
        child = os.fork()
        if child == 0:
            model(x).sum().backward()
            optimizer.step()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
    if STEP == 8:
        model.first = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Linear(8, 64))
        optimizer.param_groups[0]["params"][:] = list(model.parameters())

def train(**workers):
    global STEP
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for STEP, (x, y) in enumerate(torch.utils.data.DataLoader(Data(), batch_size=8, **workers)):
        if CASE == "odd":
            odd(model, optimizer, x)
        traces = os.environ.get("SMARAGDINE_TRACE_FOLDER")
        if CASE == "removed" and STEP == 6 and traces:
            shutil.rmtree(traces, ignore_errors=True)
            open(traces, "w").close()  # no folder can be made there any more
        if CASE == "full" and STEP == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        optimizer.zero_grad()
        try:
            loss = torch.nn.functional.cross_entropy(model(x), y)
        except ValueError:
            continue
        loss.backward()
        optimizer.step()
    print("%.17g" % sum(float(p.detach().sum()) for p in model.parameters()))

if __name__ == "__main__":
    if CASE == "workers":
        train(num_workers=2, multiprocessing_context="fork")
        train(num_workers=2, multiprocessing_context="spawn")
    else:
        train()
"""


@needs("torch")
def test_a_step_that_raises_a_process_that_forks_a_model_that_changes(tmp_path: Path) -> None:
    said = run(tmp_path, TORCH, "odd", expected=bare(tmp_path, TORCH, "odd"))
    assert "! " not in said
    recording = open_recording(tmp_path / "out")
    assert steps(recording) == list(range(4, 16))
    names = {(event["step"], event["name"]) for event in recording.events.to_pylist()}
    # The seventh batch was given up, so its step is the one of the eighth; the model changes after it.
    assert {step for step, name in names if name == "Net/first/addmm"} == {4, 5, 6}
    assert {step for step, name in names if name == "Net/first/1/addmm"} == set(range(7, 16))


@needs("torch")
def test_disks_and_workers(tmp_path: Path) -> None:
    plain = bare(tmp_path, TORCH, "plain")
    (tmp_path / "workers").mkdir()
    said = run(tmp_path / "workers", TORCH, "workers", expected=plain * 2)
    assert "could be traced" not in said
    recording = open_recording(tmp_path / "workers" / "out")
    (window,) = recording.windows.to_pylist()  # of one process
    assert steps(recording) == list(range(4, 16))
    trained = {mark["pid"] for mark in recording.marks.to_pylist() if mark["name"] == "step_end"}
    assert trained == {window["pid"]}
    for case, words in (("removed", "File exists"), ("full", "could not write")):
        (tmp_path / case).mkdir()
        said = run(tmp_path / case, TORCH, case, expected=plain)
        assert words in said
        assert "ERROR" not in said  # nor anything of the profiler's own
        assert open_recording(tmp_path / case / "out").events.num_rows == 0
        assert not (tmp_path / case / "out" / "traces").is_dir()


SHORT = """
import time
import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(40):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
"""


@needs("torch")
def test_a_budget_too_small_is_said(tmp_path: Path) -> None:
    write_script(tmp_path / "program.py", SHORT)
    done = smaragdine("run", "-o", "out", "--trace-budget", "1%", "program.py", cwd=tmp_path)
    assert done.returncode == 0
    assert "no step was traced: 1% of the time of 40 steps is too little" in done.stderr
    assert open_recording(tmp_path / "out").events.num_rows == 0


@needs("torch")
def test_a_launcher_traces_nothing_itself_and_files_can_be_kept(tmp_path: Path) -> None:
    write_script(tmp_path / "program.py", SHORT + "time.sleep(1.5)\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    options = ("--trace-keep", "--trace-steps", "5")
    done = smaragdine("run", "-o", "out", *options, *launcher, "program.py", cwd=tmp_path, env=SOON)
    assert done.returncode == 0, done.stderr
    recording = open_recording(tmp_path / "out")
    (window,) = recording.windows.to_pylist()
    assert len(window["steps"]) == 5
    (meta_path,) = [
        path
        for path in (tmp_path / "out" / "traces").glob("*.meta.json")
        if json.loads(path.read_text())["steps"]
    ]
    raw = meta_path.with_name(meta_path.name.removesuffix(".meta.json") + window_suffix(meta_path))
    done = smaragdine("account", "out", "--events", raw, "--json", "-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["devices"]["cpu:0"]["total_j"] > 0


def window_suffix(meta_path: Path) -> str:
    return str(json.loads(meta_path.read_text())["suffix"])


JAX = """
import glob
import sys
import time
import tempfile
import time
import jax
import jax.numpy as jnp
import smaragdine

@jax.jit
def step(w, x):
    def loss(w):
        with jax.named_scope("net"):
            return jnp.sum(jnp.tanh(x @ w) ** 2)
    return w - 1e-4 * jax.grad(loss)(w)

w, x = jnp.ones((64, 64)) * 0.01, jnp.ones((64, 64)) * 0.1
folder = tempfile.mkdtemp()
end = time.monotonic() + 2.5
while sys.argv[1] == "loop" and time.monotonic() < end:
    step(w, x).block_until_ready()
for i in range(0 if sys.argv[1] == "loop" else 20):
    if i == {"marks": None, "before": 1, "inside": 7}[sys.argv[1]]:
        jax.profiler.start_trace(folder)
    w = step(w, x)
    smaragdine.mark("step_end", i)
if sys.argv[1] in ("before", "inside"):
    jax.profiler.stop_trace()
print(len(glob.glob(folder + "/**/*.xplane.pb", recursive=True)))
print("%.17g" % float(w.sum()))
"""


@needs("jax")
def test_marked_steps_of_jax_beside_a_profiler_of_its_own(tmp_path: Path) -> None:
    weights = bare(tmp_path, JAX, "marks").splitlines()[1]
    for case, files, words in (
        ("marks", 0, ""),
        ("before", 1, "a JAX profiler is running already"),
        ("inside", 1, "a JAX profiler is running already"),  # still, at the second attempt
    ):
        (tmp_path / case).mkdir()
        said = run(tmp_path / case, JAX, case, expected=f"{files}\n{weights}\n")
        assert words in said
        recording = open_recording(tmp_path / case / "out")
        assert steps(recording) == ([] if words else list(range(4, 16)))
        names = {(event["name"], event["phase"]) for event in recording.events.to_pylist()}
        assert (("net/dot_general", "backward") in names) == (not words)


@needs("jax")
def test_a_jax_loop_without_marks_gets_slices(tmp_path: Path) -> None:
    run(tmp_path, JAX, "loop", expected="0\n40.959999084472656\n", env=SOON)
    recording = open_recording(tmp_path / "out")
    names = {(event["name"], event["phase"]) for event in recording.events.to_pylist()}
    assert {("net/dot_general", "forward"), ("net/dot_general", "backward")} <= names


TENSORFLOW = """
import glob
import os
import sys
import time
import tempfile
os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
model.compile("sgd", "mse")
folder = tempfile.mkdtemp()

class Profile(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 6:
            tf.profiler.experimental.start(folder)
        if batch == 12:
            tf.profiler.experimental.stop()

x, y = np.random.rand(640, 8).astype("float32"), np.random.rand(640, 1).astype("float32")
model.fit(x, y, batch_size=32, epochs=1, verbose=0, callbacks=[Profile()])
print(len(glob.glob(folder + "/**/*.xplane.pb", recursive=True)))
print("%.17g" % sum(float(np.sum(w)) for w in model.get_weights()))
"""


@needs("tensorflow", "keras")
def test_a_tensorflow_program_with_a_profiler_of_its_own(tmp_path: Path) -> None:
    said = run(tmp_path, TENSORFLOW, expected=bare(tmp_path, TENSORFLOW))
    assert "the program started a profiler of" in said
    assert open_recording(tmp_path / "out").events.num_rows == 0


FOREVER = """
import time
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.002)
"""


@needs("torch")
def test_a_run_that_was_killed_keeps_its_trace(tmp_path: Path) -> None:
    write_script(tmp_path / "program.py", FOREVER)
    words = ("run", "-o", "out", "--trace-steps", "5", "--trace-skip", "2", "program.py")
    running = start(*words, cwd=tmp_path, env=QUIET, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: list(tmp_path.glob("out/traces/*.meta.json")))
        time.sleep(0.5)  # readings are written about every second
    finally:
        running.kill()
        running.wait()
    done = smaragdine("report", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["status"] == "interrupted"
    assert found["steps"]["traced"] == 5
    assert any(row["name"] == "Linear/addmm" for row in found["step"]["devices"]["cpu:0"]["rows"])
