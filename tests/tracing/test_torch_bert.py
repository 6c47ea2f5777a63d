"""A BERT in plain PyTorch under `smaragdine run --trace-steps`: operations counted from the model itself."""

from __future__ import annotations

import collections
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli import smaragdine
from smaragdine.recording.reader import open_recording

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")

SCRIPT = Path(__file__).parents[1] / "models" / "bert_torch.py"
STEPS = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    bare = subprocess.run([sys.executable, str(SCRIPT), "7"], capture_output=True, text=True, check=True)
    options = ("-o", "out", "--trace-steps", str(STEPS), "--trace-skip", "2")
    traced = smaragdine("run", *options, SCRIPT, "7", cwd=folder)
    assert traced.returncode == 0, traced.stderr
    return bare, traced, open_recording(folder / "out")


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("bert_torch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Bert()


def reference(model):
    """Operations of one step, (path/operation, phase) -> count, by walking the model."""
    from torch import nn

    expected = collections.Counter()

    def add(path, forward, backward=()):
        for phase, names in (("forward", forward), ("backward", backward)):
            for name in names:
                expected[f"{path}/{name}", phase] += 1

    for name, module in model.named_modules():
        path = "/".join(["Bert", *name.split(".")])
        parameters = len(list(module.parameters(recurse=False)))
        if parameters:
            expected[f"{path}/AccumulateGrad", "backward"] += parameters
        if isinstance(module, nn.Linear):
            # All inputs need a gradient: they come from embeddings that are trained.
            add(path, ["addmm"], ["mm", "mm"])
        elif isinstance(module, nn.LayerNorm):
            add(path, ["native_layer_norm"], ["native_layer_norm_backward"])
        elif isinstance(module, nn.Embedding):
            add(path, ["embedding"], ["embedding_dense_backward"])
        elif isinstance(module, nn.Dropout):
            # On a CPU a mask is drawn and multiplied with; backward multiplies once more.
            add(path, ["dropout", "bernoulli_", "mul"], ["mul"])
        elif isinstance(module, nn.GELU):
            add(path, ["gelu"], ["gelu_backward"])
        elif isinstance(module, nn.Tanh):
            add(path, ["tanh"], ["tanh_backward"])
        elif type(module).__name__ == "SelfAttention":
            # Scores and values, each with two factors to derive by.
            add(path, ["bmm", "bmm"], ["bmm"] * 4)
            add(path, ["_softmax"], ["_softmax_backward_data"])
            # The scores are divided by a constant; nothing is multiplied with one.
            add(path, ["div"], ["div"])
    add("program", ["cross_entropy_loss", "_log_softmax", "nll_loss_forward"])
    add("program", [], ["_log_softmax_backward_data", "nll_loss_backward"])
    return expected


def test_operations_per_step_are_those_of_the_model(runs, model):
    expected = reference(model)
    operations = {name.rsplit("/", 1)[1] for name, _ in expected}
    for step in (2, 3, 4):
        counts = collections.Counter(
            (event["name"], event["phase"])
            for event in runs[2].events.to_pylist()
            if event["step"] == step
            and event["phase"] in ("forward", "backward")
            and event["name"].rsplit("/", 1)[1] in operations
        )
        assert counts == expected


def test_nearly_all_busy_time_has_a_path_or_an_honest_class(runs):
    events = runs[2].events.to_pylist()
    assert {event["step"] for event in events} == {2, 3, 4}
    first = {event["name"].split("/", 1)[0] for event in events}
    assert first <= {"Bert", "program", "optimizer", "framework", "input", "unplaced"}
    (window,) = runs[2].windows.to_pylist()
    assert window["placed_ns"] >= 0.99 * window["busy_ns"] > 0
    assert window["counts_divide"]
    # What the model does is inside it: only batch, loss and the seed of its gradient are the program's.
    outside = {event["name"] for event in events if event["name"].startswith("program/")}
    assert not {name for name in outside if name.rsplit("/", 1)[1] in ("addmm", "mm", "bmm", "embedding")}
    assert {event["phase"] for event in events if event["name"].startswith("Bert/")} == {
        "forward",
        "backward",
    }
    assert {event["phase"] for event in events if event["name"].startswith("optimizer/AdamW/")} == {
        "optimizer"
    }


def test_weights_are_the_same_to_the_last_bit(runs):
    bare, traced, _ = runs
    assert traced.stdout == bare.stdout


def edges_of_the_model():
    """As written in bert_torch.py, by hand."""
    written = {
        ("Bert/embeddings", "Bert/encoder"),
        ("Bert/encoder", "Bert/pooler"),
        ("Bert/pooler", "Bert/classifier"),
        ("Bert/pooler/dense", "Bert/pooler/activation"),
        *(
            (f"Bert/embeddings/{name}", "Bert/embeddings/LayerNorm")
            for name in ("word_embeddings", "position_embeddings", "token_type_embeddings")
        ),
        ("Bert/embeddings/LayerNorm", "Bert/embeddings/dropout"),
        ("Bert/encoder/layer/0", "Bert/encoder/layer/1"),
    }
    for n in range(2):
        layer = f"Bert/encoder/layer/{n}"
        written |= {
            (f"{layer}/attention", f"{layer}/intermediate"),
            (f"{layer}/intermediate", f"{layer}/output"),
            (f"{layer}/attention", f"{layer}/output"),  # residual
            (f"{layer}/attention/self", f"{layer}/attention/output"),
            (f"{layer}/attention/self/query", f"{layer}/attention/self/dropout"),
            (f"{layer}/attention/self/key", f"{layer}/attention/self/dropout"),
            (f"{layer}/intermediate/dense", f"{layer}/intermediate/activation"),
        }
        for output in (f"{layer}/attention/output", f"{layer}/output"):
            written |= {
                (f"{output}/dense", f"{output}/dropout"),
                (f"{output}/dropout", f"{output}/LayerNorm"),
            }
    return written


def test_edges_are_those_written_in_the_model(tmp_path):
    from smaragdine.tracing.hook import environment

    hook = Path(environment.__file__).with_name("__init__.py")
    script = f"""
import importlib.util, json, sys, weakref
import torch
for name, path in (("_hook", {str(hook)!r}), ("bert", {str(SCRIPT)!r})):
    where = [path.rsplit("/", 1)[0]] if name == "_hook" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=where)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
import bert
from _hook.state import process
from _hook.torch import tracer
model, found, alive = bert.Bert(), [], []
for grad in (True, False):
    for window in range(2):
        session = tracer.start()
        with torch.set_grad_enabled(grad):
            words, types, _ = bert.batch()
            output = model(words, types)
        alive.append(weakref.ref(output))
        del output
        alive[-1] = alive[-1]() is not None
        found.append(tracer.stop(session, "trace.json")["edges"])
    process.torch.edges_done.clear()
    process.torch.edges.clear()
print(json.dumps([found, alive]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    (first, second, without, _), alive = json.loads(done.stdout)
    assert {tuple(edge) for edge in first} == edges_of_the_model()
    assert second == first  # known, and told again: the first window may be thrown away
    assert not any(alive)
    # Without a graph, only what is passed on as it is: no sum, no view.
    assert {tuple(edge) for edge in without} <= edges_of_the_model()
    assert ("Bert/encoder/layer/0", "Bert/encoder/layer/1") in {tuple(edge) for edge in without}
