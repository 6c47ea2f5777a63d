"""One BERT in Keras 3, trained by `model.fit` on each backend under `smaragdine run`: the same layers in all.

What is expected is enumerated from the model (models/bert_keras.py), not from a trace.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cli import environment, smaragdine
from models import bert_keras
from smaragdine.recording.reader import open_recording

SCRIPT = Path(bert_keras.__file__)
STEPS, TRACED = 8, 3
BACKENDS = {"tensorflow": "tensorflow", "torch": "torch", "jax": "jax"}  # KERAS_BACKEND → what it needs
# What a product is called. PyTorch's `matmul` calls one of these; TensorFlow folds a transposition into some.
PRODUCT = re.compile(r"dot_general|(?:add)?mm|bmm|(?:Fold\w+_)?(?:Fused)?(?:Batch)?MatMul(?:V2)?(?:_\d+)?")
CLASSES = {"program", "framework", "input", "optimizer"}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Backend → its recording, and the digest of the weights with and without tracing; each is run once."""
    done = {}

    def run(backend):
        for needed in ("keras", BACKENDS[backend]):
            if importlib.util.find_spec(needed) is None:
                pytest.skip(f"needs {needed}")
        if backend not in done:
            folder = tmp_path_factory.mktemp(backend)
            extra = {
                "KERAS_BACKEND": backend,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
            }
            bare = subprocess.run(
                [sys.executable, str(SCRIPT), str(STEPS)],
                env=environment(extra),
                capture_output=True,
                text=True,
                check=True,
            )
            options = ("-o", "out", "--trace-steps", str(TRACED), "--trace-skip", "2")
            traced = smaragdine("run", *options, SCRIPT, str(STEPS), env=extra, cwd=folder)
            assert traced.returncode == 0, traced.stderr
            done[backend] = open_recording(folder / "out"), bare.stdout, traced.stdout
        return done[backend]

    return run


def layer_of(path: str) -> str:
    """The innermost layer of the model that a name is in."""
    parts = path.split("/")
    layers = bert_keras.scopes()
    inside = ["/".join(parts[:length]) for length in range(1, len(parts))]
    return next((each for each in reversed(inside) if each in layers), "")


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_are_in_their_layers(recordings, backend):
    events = recordings(backend)[0].events.to_pylist()
    assert len({event["step"] for event in events}) == TRACED
    found = Counter(
        (layer_of(event["name"]), event["phase"])
        for event in events
        if PRODUCT.fullmatch(event["name"].rpartition("/")[2])
    )
    expected = Counter()
    for layer, (forward, backward) in bert_keras.products().items():
        expected[layer, "forward"] = TRACED * forward
        expected[layer, "backward"] = TRACED * backward
    assert found == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_layer_is_found_and_no_other(recordings, backend):
    events = recordings(backend)[0].events.to_pylist()
    names = {(event["name"], event["phase"]) for event in events}
    assert {layer_of(name) for name, phase in names if phase == "forward"} - {""} == bert_keras.scopes()
    backward = {layer_of(name) for name, phase in names if phase == "backward"} - {""}
    # Nothing is drawn at random a second time, and a table's rows are summed where they are used: TensorFlow
    # leaves that to the optimizer.
    elsewhere = ("dropout", "embeddings")
    assert {each for each in bert_keras.scopes() if not each.endswith(elsewhere)} <= backward
    # Below the model, names are layers' or operations': no layer of another name, such as `layer_0_1`.
    known = {part for layer in bert_keras.scopes() for part in layer.split("/")}
    for name, _ in names:
        root, *inside = name.split("/")
        assert root == "bert" or root in CLASSES, name
        if root == "bert":
            assert not any(re.fullmatch(rf"{part}_\d+", each) for part in known for each in inside[:-1]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_time_has_a_place(recordings, backend):
    windows = recordings(backend)[0].windows.to_pylist()
    busy_ns, placed_ns = (sum(window[name] for window in windows) for name in ("busy_ns", "placed_ns"))
    assert placed_ns >= 0.99 * busy_ns > 0
    events = recordings(backend)[0].events.to_pylist()
    phases = {
        phase: {event["name"].split("/")[0] for event in events if event["phase"] == phase}
        for phase in ("forward", "backward", "optimizer")
    }
    assert "bert" in phases["forward"] & phases["backward"]
    assert phases["optimizer"]
    assert "bert" not in phases["optimizer"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_bit_identical(recordings, backend):
    _, bare, traced = recordings(backend)
    assert traced == bare
    assert re.fullmatch(r"[0-9a-f]{64}\n", bare)
