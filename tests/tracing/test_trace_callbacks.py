"""One line in the program: callbacks, a hook, `smaragdine.trace`; each for real, on a tiny model."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import smaragdine as package
from cli import environment, smaragdine, write_script
from footprints import assert_conserved
from refusal import refused
from smaragdine.accounting.run import Run
from smaragdine.recording.reader import Recording, open_recording


def needs(*modules: str) -> Any:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def python(folder: Path, script: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    write_script(folder / "train.py", script)
    return subprocess.run(
        [sys.executable, "train.py", *words],
        cwd=folder,
        env=environment({"TF_CPP_MIN_LOG_LEVEL": "3", **env}),
        capture_output=True,
        text=True,
        check=False,
    )


def traced_like_bare(folder: Path, script: str, **env: str) -> Recording:
    """The script trains twice from the same seed, at first without us, and prints the weights."""
    done = python(folder, script, **env)
    assert done.returncode == 0, done.stderr
    bare, traced = done.stdout.splitlines()
    assert bare == traced
    assert "operations: smaragdine report" in done.stderr
    return complete(folder / "out")


def complete(folder: Path) -> Recording:
    recording = open_recording(folder)
    assert recording.info["status"] == "complete"
    assert not (folder / "traces").exists()
    assert recording.events.num_rows
    assert_conserved(Run(recording).accounted)
    return recording


def steps(recording: Recording) -> list[int]:
    return [step["index"] for window in recording.windows.to_pylist() for step in window["steps"]]


def names(recording: Recording) -> set[tuple[str, str]]:
    return {(event["name"], event["phase"]) for event in recording.events.to_pylist()}


KERAS = """
import keras
import numpy as np
import smaragdine

def train(make_callbacks):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((32,))
    first = keras.layers.Dense(32, activation="relu", name="first")
    hidden = first(first(inputs))  # TensorFlow numbers both calls, unless it is asked not to
    model = keras.Model(inputs, keras.layers.Dense(8, name="second")(hidden), name="net")
    model.compile("sgd", "mse")
    x, y = np.random.rand(640, 32).astype("float32"), np.random.rand(640, 8).astype("float32")
    callbacks = make_callbacks()
    for training in range(2):
        model.fit(x, y, batch_size=32, epochs=1, verbose=0, callbacks=callbacks)
    print("%.17g" % sum(float(np.sum(w)) for w in model.get_weights()))

train(list)
train(lambda: [smaragdine.KerasCallback("out", steps=3, skip=4)])
"""


@needs("keras")
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_keras_callback(tmp_path: Path, backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    first = traced_like_bare(tmp_path, KERAS, KERAS_BACKEND=backend)
    second = complete(tmp_path / "out-2")  # each training is a recording
    for recording in (first, second):
        assert steps(recording) == [4, 5, 6]
        paths = {("/".join(name.split("/")[:2]), phase) for name, phase in names(recording)}
        expected = {(f"net/{n}", p) for n in ("first", "second") for p in ("forward", "backward")}
        assert expected <= paths


SESSION = """
import numpy as np
import smaragdine
import tensorflow as tf

v1 = tf.compat.v1
v1.disable_eager_execution()
data = np.random.RandomState(0).rand(32, 16).astype("float32")

def train(hooks):
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, (32, 16))
        with v1.variable_scope("net/dense"):
            weights = v1.get_variable("w", (16, 4), initializer=v1.initializers.ones())
            out = tf.matmul(x, weights)
        step = v1.train.get_or_create_global_step()
        optimizer = v1.train.GradientDescentOptimizer(0.01)
        train = optimizer.minimize(tf.reduce_mean(out ** 2), global_step=step)
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for i in range(12):
                session.run(train, {x: data})
            print("%.17g" % session.run(weights).sum())

train([])
train([smaragdine.SessionRunHook("out", steps=3, skip=4)])
"""


@needs("tensorflow")
def test_session_run_hook(tmp_path: Path) -> None:
    recording = traced_like_bare(tmp_path, SESSION)
    assert steps(recording) == [4, 5, 6]
    assert ("net/dense/MatMul", "forward") in names(recording)


TRAINER = """
import torch
import transformers
import smaragdine

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(8, 2)

    def forward(self, x, labels=None):
        out = self.dense(x)
        return {"loss": torch.nn.functional.cross_entropy(out, labels), "logits": out}

def train(callbacks):
    transformers.set_seed(0)
    model = Net()
    data = [{"x": torch.randn(8), "labels": i % 2} for i in range(48)]
    arguments = transformers.TrainingArguments(
        "hf", per_device_train_batch_size=4, max_steps=12, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, logging_strategy="no",
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    print("%.17g" % sum(float(p.detach().double().sum()) for p in model.parameters()))

torch.set_num_threads(1)
train([])
train([smaragdine.TrainerCallback("out", steps=3, skip=4)])
"""


@needs("transformers", "accelerate")
def test_trainer_callback(tmp_path: Path) -> None:
    recording = traced_like_bare(tmp_path, TRAINER)
    assert steps(recording) == [4, 5, 6]
    assert ("Net/dense/addmm", "forward") in names(recording)


LIGHTNING = """
import logging
import warnings
import torch
import smaragdine
try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        return torch.nn.functional.mse_loss(self.dense(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def train(callbacks):
    pl.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks,
    )
    model = Net()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    print("%.17g" % sum(float(p.detach().double().sum()) for p in model.parameters()))

torch.set_num_threads(1)
train([])
train([smaragdine.LightningCallback("out", steps=3, skip=4)])
"""


@pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning")),
    reason="needs Lightning",
)
def test_lightning_callback(tmp_path: Path) -> None:
    recording = traced_like_bare(tmp_path, LIGHTNING)
    assert steps(recording) == [4, 5, 6]
    found = names(recording)
    assert {("Net/dense/addmm", "forward"), ("program/mse_loss", "forward")} <= set(found)
    assert ("program/MseLossBackward0", "backward") in found


PLAIN = """
import contextlib
import os
import sys
import torch
import smaragdine

torch.set_num_threads(1)

def fresh():
    global model, optimizer
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

def predict(count):
    with torch.no_grad():
        for _ in range(count):
            model(torch.randn(8, 16))

def train(count, fails=None):
    for step in range(count):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).sum().backward()
        optimizer.step()
        if step == fails:
            raise ValueError("mine")

def say():
    print("%.17g" % sum(float(p.detach().sum()) for p in model.parameters()))

def traced(folder="out"):
    return smaragdine.trace(model, folder, steps=3, skip=4)

fresh()
BODY
"""
LOOPS = """
def training(): train(12)
def inference(): predict(12)
def mixed(): predict(12); train(12); predict(30)

for work in (training, inference, mixed):
    for around in (contextlib.nullcontext, traced):
        fresh()
        with around(work.__name__):
            work()
        say()
fresh()
trace = traced("exit")
training()
say()
"""


@needs("torch")
def test_plain_loops(tmp_path: Path) -> None:
    done = python(tmp_path, PLAIN.replace("BODY", LOOPS))
    assert done.returncode == 0, done.stderr
    weights = done.stdout.splitlines()
    assert weights[0::2][:3] == weights[1::2]
    assert weights[6] == weights[0]
    for name in ("training", "inference", "mixed", "exit"):
        recording = complete(tmp_path / name)
        assert len(steps(recording)) == 3
        assert ("Sequential/0/addmm", "forward") in names(recording)
        assert any(phase == "backward" for _, phase in names(recording)) == (name != "inference")
        (source,) = {window["source"] for window in recording.windows.to_pylist()}
        assert (source == "torch:forward") == (name == "inference")


FAILING = """
try:
    with traced("first"):
        train(12, fails=6)
except ValueError:
    print("caught")
with traced("second"):
    train(12)
trace = traced("third")
train(12, fails=6)
"""


@needs("torch")
def test_a_training_that_fails_fails_as_it_would(tmp_path: Path) -> None:
    done = python(tmp_path, PLAIN.replace("BODY", FAILING))
    assert (done.returncode, done.stdout) == (1, "caught\n")
    assert "ValueError: mine" in done.stderr
    recordings = [open_recording(tmp_path / name) for name in ("first", "second", "third")]
    assert [recording.info["status"] for recording in recordings] == ["failed", "complete", "failed"]
    assert [len(steps(recording)) for recording in recordings] == [3, 3, 3]


@needs("torch")
def test_inside_smaragdine_run_it_does_nothing(tmp_path: Path) -> None:
    write_script(tmp_path / "train.py", PLAIN.replace("BODY", "with traced(): train(12)"))
    options = ("--trace-steps", "2", "--trace-skip", "3")
    done = smaragdine("run", "-o", "run", *options, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out").exists()
    assert steps(open_recording(tmp_path / "run")) == [3, 4]


FORKS = """
with traced() as trace:
    for step in range(12):
        train(1)
        if step == 5:
            child = os.fork()
            if child == 0:
                train(1)
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
"""


@needs("torch")
def test_a_forked_child_ends_nothing(tmp_path: Path) -> None:
    done = python(tmp_path, PLAIN.replace("BODY", FORKS))
    assert done.returncode == 0, done.stderr
    recording = open_recording(tmp_path / "out")
    assert recording.info["status"] == "complete"
    assert steps(recording) == [4, 5, 6]


def test_a_mistake_is_one_line_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SMARAGDINE_SPOOL", raising=False)
    Path("taken").write_text("")
    refused(lambda: package.trace(None, "taken"), "taken is a file")
    refused(lambda: package.trace(None, "/proc/none"), "/proc/none")
    refused(lambda: package.trace(None, budget=5.0), "budget=5.0", "1 % is 0.01")
    refused(lambda: package.trace(None, steps=-1), "steps=-1")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


PROFILED = """
profiler = torch.profiler.profile(); profiler.start()
with traced(): train(12)
profiler.stop()
"""


@needs("torch")
def test_what_could_not_be_traced_is_said(tmp_path: Path) -> None:
    done = python(tmp_path, PLAIN.replace("BODY", PROFILED))
    assert done.returncode == 0
    assert "a PyTorch profiler is already running" in done.stderr
    assert "operations:" not in done.stderr


JAX = """
import sys
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

w, x = jnp.ones((128, 128)), jnp.ones((64, 128))
def loop(seconds):
    global w
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        w = step(w, x).block_until_ready()
BODY
"""


@needs("jax")
def test_a_plain_jax_loop_and_a_program_that_ends_in_a_slice(tmp_path: Path) -> None:
    body = """
with smaragdine.trace(folder='with'):
    loop(2.8)
trace = smaragdine.trace(folder='exit')
loop(1.7)
"""
    done = python(tmp_path, JAX.replace("BODY", body))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Traceback" not in done.stderr
    for name in ("with", "exit"):
        recording = complete(tmp_path / name)
        assert {("net/dot_general", "forward"), ("net/dot_general", "backward")} <= names(recording)
