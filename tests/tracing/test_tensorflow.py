"""TensorFlow as people run it, through `smaragdine run`: sessions, Keras, eager; and what can go wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli import smaragdine, write_script
from models import bert_v1
from smaragdine.errors import UserError
from smaragdine.recording.reader import open_recording
from smaragdine.tracing import step_stats
from smaragdine.tracing.names import Name, tensorflow_name

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")

ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow"}
TRACE = ("--trace-steps", "3", "--trace-skip", "2")
STEPS = (2, 3, 4)
PRODUCTS = ("MatMul", "FusedMatMul", "BatchMatMul")


@dataclass(frozen=True)
class Done:
    said: str  # by the program, the last line
    stderr: str
    events: list[dict[str, Any]]
    edges: set[tuple[str, str]]
    folder: Path


Run = Callable[..., Done]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`smaragdine run OPTIONS… SCRIPT…`; the same run is made once."""
    known: dict[tuple[Any, ...], Done] = {}

    def make(script: str | Path, *words: str, options: tuple[str, ...] = TRACE) -> Done:
        key = (script, words, options)
        if key not in known:
            folder = tmp_path_factory.mktemp("tensorflow")
            path = script if isinstance(script, Path) else write_script(folder / "train.py", script)
            done = smaragdine("run", "-o", "out", *options, path, *words, env=ENVIRONMENT, cwd=folder)
            assert done.returncode == 0, done.stderr[-4000:]
            recording = open_recording(folder / "out")
            edges = {(row["source"], row["target"]) for row in recording.edges.to_pylist()}
            known[key] = Done(
                done.stdout.splitlines()[-1], done.stderr, recording.events.to_pylist(), edges, folder
            )
        return known[key]

    return make


def products(events: Iterable[dict[str, Any]]) -> Counter[tuple[int, str, str]]:
    """(step, scope, phase) → how many matrix products. A gradient has its forward operation around it."""
    found: Counter[tuple[int, str, str]] = Counter()
    for event in events:
        *scopes, operation = event["name"].split("/")
        if operation.rstrip("_0123456789") in PRODUCTS:
            depth = len(scopes) - (event["phase"] == "backward")
            found[event["step"], "/".join(scopes[:depth]), event["phase"]] += 1
    return found


def expected(
    per_step: Iterable[tuple[str, int, int]], steps: Iterable[int]
) -> dict[tuple[int, str, str], int]:
    rows = list(per_step)
    return {
        (step, scope, phase): count
        for step in steps
        for scope, forward, backward in rows
        for phase, count in (("forward", forward), ("backward", backward))
        if count
    }


def placed(events: Iterable[dict[str, Any]]) -> float:
    """The part of busy time that has a path or an honest class."""
    spent = Counter[bool]()
    for event in events:
        spent[event["name"].startswith("unplaced/")] += event["duration_ns"]
    return spent[False] / spent.total()


# Sessions

BERT_V1 = Path(bert_v1.__file__)


@pytest.mark.parametrize("kind", ["plain", "monitored"])
def test_a_bert_of_sessions(run: Run, kind: str) -> None:
    done = run(BERT_V1, "10", kind)
    assert done.said == run(BERT_V1, "10", "plain", options=()).said  # the weights, to the last bit
    assert products(done.events) == expected(bert_v1.products(), STEPS)
    assert placed(done.events) >= 0.99
    assert {event["phase"] for event in done.events} == {"forward", "backward", "optimizer", "other"}
    roots = {
        phase: {e["name"].split("/")[0] for e in done.events if e["phase"] == phase}
        for phase in ("forward", "backward", "other")
    }
    assert roots["forward"] == {"bert", "cls", "loss"}
    assert roots["backward"] == {"bert", "cls", "loss", "framework"}
    assert roots["other"] == {"framework", "input"}
    updates = {e["name"] for e in done.events if e["name"].endswith("/ResourceApplyAdam")}
    assert updates == {
        f"optimizer/Adam/update_{name}/ResourceApplyAdam" for name in learned() if "word" not in name
    }
    assert all(e["phase"] == "optimizer" for e in done.events if e["name"] in updates)


def learned() -> Iterable[str]:
    """Names of the weights, as the model's code has them."""
    dense = {
        scope for scope, forward, _ in bert_v1.products() if scope != "cls" and not scope.endswith("self")
    }
    yield from (f"{scope}/{name}" for scope in dense for name in ("kernel", "bias"))
    layers = [f"bert/encoder/layer_{i}" for i in range(bert_v1.LAYERS)]
    norms = ["bert/embeddings", *layers, *(f"{layer}/attention" for layer in layers)]
    for scope in norms:
        inside = scope if scope == "bert/embeddings" else f"{scope}/output"
        yield from (f"{inside}/LayerNorm/{name}" for name in ("gamma", "beta"))
    yield from (f"bert/embeddings/{name}_embeddings" for name in ("word", "position"))
    yield from ("cls/output_weights", "cls/output_bias")


def test_the_dataflow_of_sessions(run: Run) -> None:
    edges = run(BERT_V1, "10", "plain").edges
    layer = "bert/encoder/layer_0"
    assert {
        ("bert", "cls"),
        ("bert/encoder", "bert/pooler"),
        (layer, "bert/encoder/layer_1"),
        (f"{layer}/attention", f"{layer}/intermediate"),
        (f"{layer}/attention", f"{layer}/output"),
        (f"{layer}/intermediate", f"{layer}/output"),
        (f"{layer}/attention/self", f"{layer}/attention/output"),
    } <= edges
    assert not {(target, source) for source, target in edges} & edges
    assert not any(path.split("/")[0] in ("gradients", "Adam") for edge in edges for path in edge)


SESSION = """
import sys
import tensorflow
tf = tensorflow.compat.v1
tf.disable_eager_execution()
tf.set_random_seed(1)
data = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(tf.ones((7, 4, 8)))).get_next()
with tf.variable_scope("net"):
    with tf.variable_scope("dense"):
        weights = tf.get_variable("kernel", [8, 8], use_resource=True)
        y = tf.nn.bias_add(tf.matmul(data, weights), tf.get_variable("bias", [8], use_resource=True))
    y = tf.nn.relu(y)
with tf.name_scope("train"):
    loss = tf.reduce_sum(y)
    (gradient,) = tf.gradients(loss, [weights])
change = weights.assign_sub(0.01 * tf.clip_by_norm(gradient, 1.0), read_value=False)
OPTIONS = {}
kept = tf.RunMetadata()
steps, traces = 0, 0
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    try:
        while True:
            session.run(change, options=tf.RunOptions(**OPTIONS), run_metadata=kept)
            steps += 1
            traces += len(kept.step_stats.dev_stats) > 0
    except tf.errors.OutOfRangeError:
        pass
    print(steps, traces, session.run(weights).tobytes().hex())
"""


def test_an_input_that_ends_while_traced(run: Run) -> None:
    options = ("--trace-steps", "20", "--trace-skip", "2")
    done = run(SESSION, options=options)
    # The program's own metadata stay as they were: without statistics.
    assert done.said.startswith("7 0 ")
    assert done.said == run(SESSION, options=()).said
    # Fetching the weights is a run too, and the last.
    assert {event["step"] for event in done.events} == {2, 3, 4, 5, 6, 7}
    # Relu is written outside the layer it is fused to; the step of gradient descent has no scope at all.
    assert products(done.events) == expected([("net/dense", 1, 1)], range(2, 7))
    by_name = {event["name"]: event["phase"] for event in done.events}
    assert by_name["net/dense/FusedMatMul"] == "forward"
    assert by_name["optimizer/AssignSubVariableOp"] == "optimizer"
    assert {name for name in by_name if name.startswith("clip_by_norm/")}
    assert {by_name[name] for name in by_name if name.startswith("clip_by_norm/")} <= {"optimizer", "forward"}
    assert by_name["input/IteratorGetNext"] == "other"


def test_a_program_that_asks_for_statistics_itself_is_left_alone(run: Run) -> None:
    done = run(SESSION.replace("OPTIONS = {}", 'OPTIONS = {"trace_level": 3}'))
    assert done.said.startswith("7 7 ")
    assert done.said.split()[2] == run(SESSION, options=()).said.split()[2]
    assert done.events == []
    assert "traces of its own" in done.stderr


# Keras

KERAS = """
import hashlib
import keras
import numpy as np

keras.utils.set_random_seed(0)
inputs = keras.Input((16,))
x = keras.layers.Dense(32, activation="relu", name="dense_1")(inputs)
x = keras.layers.Dropout(0.5, name="dropout")(x)
shared = keras.layers.Dense(32, name="shared")
x = shared(shared(x))
inside = keras.Input((32,))
nested = keras.Model(inside, keras.layers.Dense(32, name="dense")(inside), name="nested")
x = keras.layers.Add(name="sum")([nested(x), x])
left = keras.layers.Dense(32, activation="relu", name="left")(x)
x = keras.layers.Add(name="both")([left, keras.layers.Dense(32, name="right")(x)])
model = keras.Model(inputs, keras.layers.Dense(4, name="head")(x), name="net")
model.compile("adam", "mse", metrics=["mae"], jit_compile=False, run_eagerly=EAGER)
random = np.random.default_rng(0)
x, y = random.normal(size=(8 * STEPS, 16)), random.normal(size=(8 * STEPS, 4))
history = model.fit(x.astype("float32"), y.astype("float32"), batch_size=8, shuffle=False, verbose=0)
digest = hashlib.sha256()
for weights in model.get_weights():
    digest.update(weights.tobytes())
print(digest.hexdigest(), history.history)
"""
# The first layer's input needs no gradient; the shared layer is called twice. TensorFlow fuses products with
# the sums that follow, and calls them after those.
KERAS_PRODUCTS = [
    ("net/dense_1", 1, 1),
    ("net/shared", 2, 4),
    *((f"net/{name}", 1, 2) for name in ("nested/dense", "left", "right", "head")),
]


def keras_program(steps: int, eager: bool = False) -> str:
    return KERAS.replace("STEPS", str(steps)).replace("EAGER", str(eager))


@pytest.mark.parametrize("skip", [2, 150])
def test_a_functional_model_early_and_late(run: Run, skip: int) -> None:
    pytest.importorskip("keras")
    program = keras_program(160)
    done = run(program, options=("--trace-steps", "3", "--trace-skip", str(skip)))
    assert done.said == run(program, options=()).said
    assert products(done.events) == expected(KERAS_PRODUCTS, range(skip, skip + 3))
    assert placed(done.events) >= 0.99
    # Weights are read wherever they are used, and nothing is cheaper: none is lost however late.
    reads = Counter(event["name"] for event in done.events if event["name"].startswith("net/head/"))
    assert all(count % 3 == 0 for count in reads.values())
    assert any(name.endswith("/ReadVariableOp") for name in reads)
    assert {
        ("net/dense_1", "net/dropout"),
        ("net/dropout", "net/shared"),
        ("net/shared", "net/nested"),
        ("net/shared", "net/sum"),
        ("net/nested", "net/sum"),
        ("net/sum", "net/left"),
        ("net/sum", "net/right"),
        ("net/left", "net/both"),
        ("net/right", "net/both"),
        ("net/both", "net/head"),
    } == {edge for edge in done.edges if edge[0].startswith("net/") and edge[0].count("/") == 1}


def test_eager_layers_are_found_forward(run: Run) -> None:
    pytest.importorskip("keras")
    program = keras_program(8, eager=True)
    done = run(program)
    assert done.said == run(program, options=()).said
    forward = {key: count for key, count in products(done.events).items() if key[2] == "forward"}
    assert forward == expected([(scope, count, 0) for scope, count, _ in KERAS_PRODUCTS], STEPS)
    # TensorFlow does not tell whose gradients are computed.
    backward = Counter(e["name"] for e in done.events if e["phase"] == "backward")
    assert backward["program/MatMul"] == 3 * sum(count for _, _, count in KERAS_PRODUCTS)
    assert "gradients" in done.stderr


# Names


@pytest.mark.parametrize(
    ("raw", "kind", "product", "name"),
    [
        ("gradients/bert/a/MatMul_grad/MatMul_1", "MatMul", "", ("bert/a/MatMul/MatMul_1", "backward")),
        ("train/gradients/a/b_grad/c", "Mul", "", ("a/b/c", "backward")),
        ("gradients/a_grad/MatMul_grad/MatMul", "MatMul", "", ("a_grad/MatMul/MatMul", "backward")),
        (
            "gradients_1/gradients/a/MatMul_grad/MatMul_grad/b",
            "Mul",
            "",
            ("a/MatMul_grad/MatMul/b", "backward"),
        ),
        ("gradients/AddN_3", "AddN", "", ("framework/AddN_3", "backward")),
        ("ConstantFolding/gradients/a/Mul_grad/c", "Const", "", ("a/Mul/c", "backward")),
        ("train/Adam/update_a/kernel/ResourceApplyAdam", "ResourceApplyAdam", "", None),
        ("a/kernel/Momentum", "VarHandleOp", "", None),
        ("_arg_words_0_1", "_Arg", "", ("input/_arg_words_0_1", "other")),
        ("_retval_loss/Mean_0_0", "_Retval", "", ("framework/_retval_loss/Mean_0_0", "other")),
        ("MatMul_2", "MatMul", "", ("program/MatMul_2", "other")),
        ("a/Relu", "_FusedMatMul", "a/d/MatMul", ("a/d/FusedMatMul", "forward")),
        ("a/Relu", "_FusedMatMul", "MatMul", ("program/FusedMatMul", "other")),
    ],
)
def test_names_of_graphs(raw: str, kind: str, product: str, name: tuple[str, str] | None) -> None:
    assert tensorflow_name(raw, kind, product, "program") == Name(
        *(name or (f"optimizer/{raw}", "optimizer"))
    )


# Statistics by hand


def statistics(path: Path, *devices: tuple[str, list[tuple[str, str, int, int]]]) -> Path:
    message = step_stats.message_class()()
    run = message.runs.add()
    for device, nodes in devices:
        stats = run.dev_stats.add(device=device)
        for name, label, begin_us, end_us in nodes:
            stats.node_stats.add(
                node_name=name,
                timeline_label=label,
                all_start_micros=begin_us,
                op_end_rel_micros=end_us - begin_us,
            )
    path.write_bytes(message.SerializeToString())
    return path


def test_kernels_of_a_gpu_count_once(tmp_path: Path) -> None:
    kernel = ("net/d/MatMul:MatMul", "sgemm regs:32", 110, 130)
    copy = ("edge_5_x", "MemcpyH2D", 100, 105)
    path = statistics(
        tmp_path / "a.pb",
        (
            "/job:localhost/replica:0/task:0/device:GPU:0",
            [("net/d/MatMul", "net/d/MatMul = MatMul(x, w)", 90, 95)],
        ),
        ("/job:localhost/replica:0/task:0/device:CPU:0", [("x", "x = _HostRecv(edge_5_x @ gpu)", 0, 200)]),
        ("/device:GPU:1/stream:13", [kernel]),
        ("/device:GPU:1/stream:all", [kernel]),
        ("/device:GPU:1/stream:14<MemcpyH2D>", [copy]),
        ("/device:GPU:1/memcpy", [copy]),
        ("/device:GPU:1/sync", [("cuStreamSynchronize", "ThreadId 1", 0, 200)]),
    )
    table, _ = step_stats.events_of(path, {"steps": [[7, 0, 150_000]]})
    found = [
        (row["name"], row["device"], row["start_ns"], row["duration_ns"], row["lane"])
        for row in table.to_pylist()
    ]
    assert found == [
        ("net/d/MatMul", "cpu:0", 90_000, 5_000, None),
        ("framework/edge_5_x", "gpu:1", 100_000, 5_000, 14),
        ("net/d/MatMul", "gpu:1", 110_000, 20_000, 13),
    ]
    assert set(table["step"].to_pylist()) == {7}


def test_statistics_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.pb"
    path.write_bytes(b"\x0a\xff")
    with pytest.raises(UserError, match="no step statistics"):
        step_stats.events_of(path, {"steps": []})
    table, coverage = step_stats.events_of(statistics(path), {"steps": []})
    assert (table.num_rows, coverage.busy_ns) == (0, 0)


def test_step_stats_descriptors_are_tensorflow_s() -> None:
    script = """
import json
from tensorflow.core.framework.step_stats_pb2 import DeviceStepStats, NodeExecStats, StepStats
messages = [message.DESCRIPTOR for message in (StepStats, DeviceStepStats, NodeExecStats)]
print(json.dumps({m.name: {f.name: [f.number, f.type] for f in m.fields} for m in messages}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=True,
    )
    real = json.loads(done.stdout.splitlines()[-1])
    for name, message in step_stats.message_class().DESCRIPTOR.file.message_types_by_name.items():
        for field in message.fields if name != "Runs" else ():
            assert real[name][field.name] == [field.number, field.type], (name, field.name)
