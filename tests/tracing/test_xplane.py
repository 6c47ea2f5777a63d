"""Traces of JAX and TensorFlow: real training programs, each in a process of its own, and their events."""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from smaragdine import protobuf
from smaragdine.errors import UserError
from smaragdine.recording.format import EVENTS
from smaragdine.tracing.hook.keras import steps_itself
from smaragdine.tracing.names import Name, keras_scopes, tensorflow_name
from smaragdine.tracing.xplane import hlo
from smaragdine.tracing.xplane.rows import NO_THREAD
from smaragdine.tracing.xplane.window import events_of

# Between two steps it asks for a trace, as the hook does. `mode`: plain, traced, late (150 untraced steps),
# busy (the program profiles already) or own (the program starts to profile while we do).
COMMON = """
import hashlib, importlib, json, sys, time
import numpy

mode, folder, framework = sys.argv[1:4]
from smaragdine.tracing.hook import tracers
tracer = tracers.named(framework)
first = 150 if mode == "late" else 2
last = first + 2
seen = {"steps": [], "said": None}
random = numpy.random.default_rng(0)
session = None


def between(step):
    # Called before `step`. The profile is a step longer than what is asked for.
    global session, ended_ns
    if mode == "plain":
        return
    if step == first - 1 and mode == "busy":
        own_start(folder + "/own")
    if step == first + 1 and mode == "own":
        own_start(folder + "/own")
    if step == first:
        try:
            session = tracer.start()
        except Exception as error:
            seen["said"] = str(error)
        ended_ns = time.time_ns()
    if step == last + 2:
        if session is not None:
            try:
                tracer.stop(session, folder + "/raw.xplane.pb")
            except Exception as error:
                seen["said"] = str(error)
        if mode in ("busy", "own"):
            own_stop()


def after(step):
    global ended_ns
    if first <= step <= last and mode != "plain":
        begin_ns, ended_ns = ended_ns, time.time_ns()
        seen["steps"].append([step, begin_ns, ended_ns])


def finish(arrays):
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(numpy.asarray(array).tobytes())
    seen["digest"] = digest.hexdigest()
    print(json.dumps(seen))
"""

JAX_PROFILER = """
import jax
own_start = jax.profiler.start_trace

def own_stop():
    jax.block_until_ready(jax.live_arrays())
    jax.profiler.stop_trace()
"""

TENSORFLOW_PROFILER = """
import tensorflow
own_start, own_stop = tensorflow.profiler.experimental.start, tensorflow.profiler.experimental.stop
"""

JAX = """
import jax.numpy as jnp

def model(weights, x):
    with jax.named_scope("Model"):
        for i, (w, b) in enumerate(weights):
            with jax.named_scope("layer_%d" % i):
                x = jnp.tanh(x @ w + b)
    return x

def loss(weights, x, y):
    return jnp.mean((model(weights, x) - y) ** 2)

@jax.jit
def step(weights, x, y):
    gradients = jax.grad(loss)(weights, x, y)
    with jax.named_scope("optimizer"):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

weights = [(jnp.array(random.normal(size=(96, 96)) / 10, "float32"), jnp.zeros(96)) for _ in range(2)]
x = jnp.array(random.normal(size=(32, 96)), "float32")
for number in range(last + 4):
    between(number)
    weights = step(weights, x, x)
    after(number)
finish(jax.tree.leaves(weights))
"""

KERAS = """
import keras

class Steps(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        between(batch)

    def on_train_batch_end(self, batch, logs=None):
        after(batch)

keras.utils.set_random_seed(0)
inputs = keras.Input((96,))
hidden = keras.layers.Dense(96, activation="relu", name="first")(inputs)
model = keras.Model(inputs, keras.layers.Dense(96, name="second")(hidden), name="net")
model.compile("adam", "mse", jit_compile=JIT)
x = random.normal(size=((last + 4) * 32, 96)).astype("float32")
model.fit(x, x, batch_size=32, shuffle=False, verbose=0, callbacks=[Steps()])
finish(model.get_weights())
"""

# program → framework, what it needs, its text
PROGRAMS = {
    "jax": ("jax", ("jax",), JAX_PROFILER + JAX),
    "keras-jax": ("jax", ("jax", "keras", "tensorflow"), JAX_PROFILER + KERAS.replace("JIT", '"auto"')),
    "keras-tf": ("tensorflow", ("keras", "tensorflow"), TENSORFLOW_PROFILER + KERAS.replace("JIT", "False")),
    "keras-tf-xla": (
        "tensorflow",
        ("keras", "tensorflow"),
        TENSORFLOW_PROFILER + KERAS.replace("JIT", "True"),
    ),
}
STEPS = (2, 3, 4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What a program said, and its folder; each is run once."""
    done = {}

    def run(program, mode):
        if (program, mode) not in done:
            folder = tmp_path_factory.mktemp(f"{program}-{mode}")
            done[program, mode] = _train(folder, program, mode), folder
        return done[program, mode]

    return run


def _train(folder, program, mode):
    framework, needed, text = PROGRAMS[program]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    script = folder / "train.py"
    script.write_text(COMMON + text)
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        "KERAS_BACKEND": "jax" if program == "keras-jax" else "tensorflow",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ended = subprocess.run(
        [sys.executable, str(script), mode, str(folder), framework],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return {"framework": framework, **json.loads(ended.stdout.splitlines()[-1])}


def traced(trained, program, mode="traced"):
    meta, folder = trained(program, mode)
    assert meta["said"] is None
    assert sorted(path.name for path in folder.iterdir()) == ["raw.xplane.pb", "train.py"]
    return events_of(folder / "raw.xplane.pb", meta)


def products(table):
    """(step, path, phase) → how many matrix products."""
    return Counter(
        (row["step"], row["name"], row["phase"])
        for row in table.to_pylist()
        if row["name"].rsplit("/", 1)[-1] in ("dot_general", "MatMul", "FusedMatMul", "MatMul_1")
    )


def expected(*products_per_step):
    # The step after those asked for is in the trace too, and is none of them.
    return {(step, *product): count for step in (*STEPS, None) for product, count in products_per_step}


# The first layer's input needs no gradient: one product backward there, two in the second.
@pytest.mark.parametrize(
    ("program", "per_step"),
    [
        (
            "jax",
            [
                (("Model/layer_0/dot_general", "forward"), 1),
                (("Model/layer_1/dot_general", "forward"), 1),
                (("Model/layer_0/dot_general", "backward"), 1),
                (("Model/layer_1/dot_general", "backward"), 2),
            ],
        ),
        (
            "keras-jax",
            [
                (("first/dot_general", "forward"), 1),
                (("second/dot_general", "forward"), 1),
                (("first/dot_general", "backward"), 1),
                (("second/dot_general", "backward"), 2),
            ],
        ),
        (
            "keras-tf",
            [
                (("net/first/FusedMatMul", "forward"), 1),
                (("net/second/FusedMatMul", "forward"), 1),
                (("net/first/MatMul/MatMul", "backward"), 1),
                (("net/second/MatMul/MatMul", "backward"), 1),
                (("net/second/MatMul/MatMul_1", "backward"), 1),
            ],
        ),
        (
            "keras-tf-xla",
            [
                (("net/first/MatMul", "forward"), 1),
                (("net/second/MatMul", "forward"), 1),
                (("net/first/MatMul/MatMul", "backward"), 1),
                (("net/second/MatMul/MatMul", "backward"), 1),
                (("net/second/MatMul/MatMul_1", "backward"), 1),
            ],
        ),
    ],
)
def test_products_are_where_they_are_written(trained, program, per_step):
    table, coverage = traced(trained, program)
    assert table.schema == EVENTS
    assert products(table) == expected(*per_step)
    assert coverage.steps == 3
    assert coverage.counts_divide, coverage.remarks
    unplaced = {name for name in table["name"].to_pylist() if name.startswith("unplaced/")}
    # How XLA splits a large sum of TensorFlow's; it tells nobody of what.
    assert unplaced <= ({"unplaced/wrapped_reduce-window"} if program == "keras-tf-xla" else set())
    assert 0 < coverage.placed_ns <= coverage.busy_ns
    assert (coverage.placed_ns < coverage.busy_ns) == bool(unplaced)


@pytest.mark.parametrize("program", PROGRAMS)
def test_phases_and_classes(trained, program):
    table, _ = traced(trained, program)
    roots = {
        phase: {row["name"].split("/")[0] for row in table.to_pylist() if row["phase"] == phase}
        for phase in ("forward", "backward", "optimizer", "other")
    }
    layers = {"jax": {"Model"}, "keras-jax": {"first", "second"}}.get(program, {"net"})
    assert layers <= roots["forward"] <= layers | {"program"}
    assert layers <= roots["backward"] <= layers | {"program"}
    assert roots["optimizer"] == {"optimizer"}
    assert roots["other"] <= {"framework", "input", "unplaced", "program"}
    assert set(table["device"].to_pylist()) == {"cpu:0"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_bit_identical(trained, program):
    plain, _ = trained(program, "plain")
    assert trained(program, "traced")[0]["digest"] == plain["digest"]


@pytest.mark.parametrize("program", ["jax", "keras-tf"])
def test_a_profiler_of_the_program_is_left_alone(trained, program):
    busy, folder = trained(program, "busy")
    assert "running already" in busy["said"]
    assert busy["digest"] == trained(program, "plain")[0]["digest"]
    (own,) = folder.glob("own/**/*.xplane.pb")
    assert any(phase == "backward" for _, _, phase in products(events_of(own, busy)[0]))
    assert not (folder / "raw.xplane.pb").exists()


@pytest.mark.parametrize("program", ["jax", "keras-tf"])
def test_the_program_may_start_its_own(trained, program):
    own, folder = trained(program, "own")
    assert "profiler of its own" in own["said"]
    assert own["digest"] == trained(program, "plain")[0]["digest"]
    assert sorted(path.name for path in folder.iterdir()) == ["own", "train.py"]
    (raw,) = folder.glob("own/**/*.xplane.pb")
    assert any(phase == "backward" for _, _, phase in products(events_of(raw, own)[0]))


def test_nothing_is_lost_however_late(trained):
    counts = [
        Counter(
            (row["name"], row["phase"])
            for row in traced(trained, "keras-tf", mode)[0].to_pylist()
            if not row["name"].startswith("input/")  # made ahead, by threads of their own
        )
        for mode in ("traced", "late")
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("weights_are_read", [True, False])
def test_operations_that_tensorflow_left_out_are_said(tmp_path, weights_are_read):
    space = Space()
    space.line.name = "tf_Compute/1"
    space.event("gradient_tape/net/up/MatMul/MatMul:MatMul", 0, 5)
    if weights_are_read:
        space.event("net/up/MatMul/ReadVariableOp:ReadVariableOp", 5, 6)
    meta = {"framework": "tensorflow", "steps": [[0, 1_000_000, 1_000_010]]}
    _, coverage = events_of(space.write(tmp_path / "a.xplane.pb"), meta)
    assert any("left cheap operations out" in remark for remark in coverage.remarks) != weights_are_read


def test_keras_numbers_are_said(trained):
    _, coverage = traced(trained, "keras-tf")
    assert any("net_1" in remark for remark in coverage.remarks)


@pytest.mark.parametrize(
    ("raw", "kind", "name"),
    [
        ("StatefulPartitionedCall/net/up/MatMul", "MatMul", ("net/up/MatMul", "forward")),
        ("net/up/Relu", "_MklNativeFusedMatMul", ("net/up/FusedMatMul", "forward")),
        ("net/up/Conv2D", "_FusedConv2D", ("net/up/FusedConv2D", "forward")),
        ("gradient_tape/net/up/MatMul/MatMul_1", "MatMul", ("net/up/MatMul/MatMul_1", "backward")),
        ("StatefulPartitionedCall/adam/Mul_3", "Mul", ("optimizer/adam/Mul_3", "optimizer")),
        ("AddN_2", "AddN", ("framework/AddN_2", "backward")),
        ("gradients/AddN_2", "AddN", ("framework/AddN_2", "backward")),
        ("gradients/AddN_2/inputs_1", "UnsortedSegmentSum", ("framework/AddN_2/inputs_1", "backward")),
        ("gradients/AddN_2_grad/Sum", "Sum", ("AddN_2/Sum", "backward")),
        ("net/ArithmeticOptimizer/FoldIntoMatMul_MatMul", "MatMul", ("net/FoldIntoMatMul_MatMul", "forward")),
        ("Add/ReadVariableOp", "ReadVariableOp", ("framework/Add/ReadVariableOp", "other")),
        ("IteratorGetNext", "IteratorGetNext", ("input/IteratorGetNext", "other")),
        ("optional", "OptionalFromValue", ("input/optional", "other")),
    ],
)
def test_tensorflow_names(raw, kind, name):
    assert tensorflow_name(raw, kind) == Name(*name)


def test_a_step_is_keras_own_unless_the_program_says_how():
    def method(self):
        raise NotImplementedError

    method.__module__ = "keras.src.trainers.trainer"
    model = type("Model", (), {"train_step": method, "compute_loss": method})
    own = type("Own", (model,), {"train_step": lambda self: None})
    loss = type("Loss", (model,), {"compute_loss": lambda self: None})
    older = type("Older", (), {"train_step": method})
    assert [steps_itself(each()) for each in (model, own, loss, older)] == [True, False, False, True]
    assert not steps_itself(None)


@pytest.mark.parametrize(
    ("paths", "clean"),
    [
        # numbered once each; the operation keeps its own number
        (["net_1/a_1/MatMul", "net_1/layer_0_1/Cast_1"], ["net/a/MatMul", "net/layer_0/Cast_1"]),
        # really named so
        (["net_1/pooler/MatMul", "net_1/layer_0/Cast"], None),
        # layers that would become one
        (["net_1/layer_0/MatMul", "net_1/layer_1/MatMul"], None),
        (["net/a/MatMul", "net/b_1/MatMul"], None),
        # a layer called twice; operations with a scope of their own
        (
            ["net_1/shared_1/MatMul", "net_1/shared_3/MatMul", "net_1/a_1/einsum/E", "net_1/a_1/einsum_1/E"],
            ["net/shared_1/MatMul", "net/shared_3/MatMul", "net/a/einsum/E", "net/a/einsum_1/E"],
        ),
        (["net_1/dense_1/MatMul", "net_1/dense_1_1/MatMul"], ["net/dense/MatMul", "net/dense_1/MatMul"]),
    ],
)
def test_keras_scopes(paths, clean):
    scopes = keras_scopes(paths)
    assert [scopes.clean(path) for path in paths] == (clean or paths)
    assert bool(scopes.stripped) == (clean is not None)
    assert [name for name in scopes.kept if "shared" in name] == [
        f"net_1/{name}" for name in ("shared_1", "shared_3") if f"net_1/{name}/MatMul" in paths
    ]


def test_hlo_descriptors_are_tensorflow_s():
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("needs tensorflow")
    script = """
import json
from tensorflow.compiler.xla.service.hlo_pb2 import HloProto
real, todo = {}, [HloProto.DESCRIPTOR]
while todo:
    message = todo.pop()
    real[message.name] = {f.name: [f.number, f.type] for f in message.fields}
    todo += [f.message_type for f in message.fields if f.message_type and f.message_type.name not in real]
print(json.dumps(real))
"""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    real = json.loads(ended.stdout.splitlines()[-1])
    ours = hlo.message_class().DESCRIPTOR.file.message_types_by_name
    assert set(ours) == set(hlo.FIELDS)
    for name, message in ours.items():
        for field in message.fields:
            assert real[name][field.name] == [field.number, field.type], (name, field.name)


class Space:
    """An XPlane file by hand: XLA operations of one program on one line, in nanoseconds."""

    def __init__(self):
        self.message = protobuf.message_class()()
        task = self.message.planes.add(name="Task Environment")
        task.stat_metadata[1].name = "profile_start_time"
        task.stats.add(metadata_id=1, uint64_value=1_000_000)
        self.host = self.message.planes.add(name="/host:CPU")
        for key, name in enumerate(("hlo_op", "hlo_module", "program_id", "run_id", "_p", "_c"), start=1):
            self.host.stat_metadata[key].name = name
        self.line = self.thread()
        self.metadata = self.message.planes.add(name="/host:metadata")

    def thread(self):
        return self.host.lines.add(name=f"tf_XLAEigen/{len(self.host.lines) + 1}")

    def event(self, text, begin, end, **stats):
        key = len(self.host.event_metadata) + 1
        self.host.event_metadata[key].name = text
        event = self.line.events.add(
            metadata_id=key, offset_ps=begin * 1000, duration_ps=(end - begin) * 1000
        )
        keys = {value.name: key for key, value in self.host.stat_metadata.items()}
        for name, value in stats.items():
            which = {"str_value": value} if isinstance(value, str) else {"int64_value": value}
            event.stats.add(metadata_id=keys[name], **which)

    def program(self, number, module):
        key = len(self.metadata.event_metadata) + 1
        self.metadata.event_metadata[key].name = f"jit_step({number})"
        content = hlo.message_class()(hlo_module=module).SerializeToString()
        self.metadata.event_metadata[key].stats.add(metadata_id=1, bytes_value=content)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.message.SerializeToString())
        return path


def instruction(identity, name, opcode, op_name="", calls=()):
    return {
        "id": identity,
        "name": name,
        "opcode": opcode,
        "metadata": {"op_name": op_name},
        "called_computation_ids": list(calls),
    }


MODULE = {
    "computations": [
        {
            "id": 1,
            "root_id": 10,
            "instructions": [instruction(10, "sum", "add", "jit(step)/jvp(M)/up/reduce_sum")],
        },
        {"id": 2, "root_id": 20, "instructions": [instruction(20, "window", "reduce-window", calls=[1])]},
        {
            "id": 3,
            "root_id": 30,
            "instructions": [instruction(30, "d", "dot", "jit(step)/transpose(jvp(M))/transpose")],
        },
        {
            "id": 4,
            "root_id": 40,
            "instructions": [
                instruction(40, "fusion.1", "fusion", calls=[2]),
                instruction(41, "fusion.2", "fusion", "jit(step)/transpose(jvp(M))/transpose", calls=[3]),
                instruction(42, "copy.7", "copy", "params['w']"),
                instruction(43, "rng.3", "rng"),
            ],
        },
    ]
}


def test_programs_are_joined_by_number(tmp_path):
    space = Space()
    space.program(7, MODULE)
    space.program(8, {"computations": []})
    for i, operation in enumerate(("fusion.1", "fusion.2", "copy.7", "rng.3")):
        space.event(operation, 10 * i, 10 * i + 5, hlo_op=operation, program_id=7)
    space.event("fusion.1", 50, 55, hlo_op="fusion.1", program_id=8)
    meta = {"framework": "jax", "steps": [[0, 1_000_000, 1_000_100]]}
    table, coverage = events_of(space.write(tmp_path / "a.xplane.pb"), meta)
    assert list(zip(table["name"].to_pylist(), table["phase"].to_pylist(), strict=True)) == [
        ("M/up/reduce_sum", "forward"),
        ("M/dot_general", "backward"),
        ("framework/copy", "other"),
        ("unplaced/rng", "other"),
        ("unplaced/fusion", "other"),
    ]
    assert (coverage.busy_ns, coverage.placed_ns) == (25, 15)


@pytest.mark.parametrize("said", [True, False])
def test_runs_behind_the_marks_belong_to_their_step(tmp_path, said):
    # All was handed over in [0, 30), two runs a step; the work came later. The last two are of no step.
    space = Space()
    space.program(7, MODULE)
    for run, begin in enumerate(range(40, 100, 10)):
        stats = {"program_id": 7, "hlo_module": "jit__lambda_", "run_id": 50 - run}
        space.event("fusion.2", begin, begin + 3, hlo_op="fusion.2", _p=50 - run, **stats)
        space.event("fusion.1", begin + 3, begin + 5, hlo_op="fusion.1", _p=100 + run, **stats)
    space.event("end: fusion.2", 42, 43, _c=50)
    if said:
        for begin in (1, 5, 11, 15, 21, 25):
            space.event("PjitFunction(<lambda>)", begin, begin + 3)
            space.event("PjitFunction(<lambda>)", begin + 1, begin + 2)
    space.line = space.thread()
    space.event("end: fusion.2", 53, 54, _c=49)  # while the next was running
    meta = {"framework": "jax", "steps": [[8, 1_000_000, 1_000_010], [9, 1_000_010, 1_000_020]]}
    table, coverage = events_of(space.write(tmp_path / "a.xplane.pb"), meta)
    assert table["step"].to_pylist() == [8, 8, 8, 8, 9, 9, 9, 9, None, None, None, None]
    columns = ("start_ns", "duration_ns", "lane")
    assert [tuple(row[name] for name in columns) for row in table.to_pylist()[:4]] == [
        (1_000_040, 3, NO_THREAD),
        (1_000_043, 2, NO_THREAD),
        (1_000_050, 4, None),
        (1_000_053, 2, NO_THREAD),
    ]
    assert coverage.counts_divide


def spans(space, folder):
    """(operation, begin, end, thread) of each event, threads by their position."""
    meta = {"framework": "jax", "steps": [[0, 1_000_000, 1_001_000]]}
    table, _ = events_of(space.write(folder / "a.xplane.pb"), meta)
    return [
        (
            row["name"].rpartition("/")[2],
            row["start_ns"] - 1_000_000,
            row["start_ns"] + row["duration_ns"] - 1_000_000,
            None if row["lane"] is None else row["lane"] - NO_THREAD,
        )
        for row in table.to_pylist()
    ]


def test_an_operation_lasts_until_what_waited_for_it_began(tmp_path):
    # As XLA on a CPU has it: its mark comes after all that could run in the same task, once it was done.
    space = Space()
    space.event("ThreadpoolListener::StartRegion", 0, 0)
    space.event("dot.1", 1, 3, hlo_op="dot.1", _p=1)
    space.event("sine.2", 4, 30, hlo_op="sine.2", _p=2)  # does not need the product
    space.event("end: sine.2", 30, 30, _c=2)
    space.line = space.thread()
    space.event("ThreadpoolListener::StartRegion", 2, 2)
    space.event("cosine.3", 5, 20, hlo_op="cosine.3", _p=3)  # nor does this, in a task before
    space.event("ThreadpoolListener::StopRegion", 21, 21)
    space.event("ThreadpoolListener::StartRegion", 22, 22)  # the last part of the product
    space.event("tanh.4", 40, 50, hlo_op="tanh.4", _p=4)
    space.event("add.5", 51, 90, hlo_op="add.5", _p=5)
    space.event("end: dot.1", 91, 91, _c=1)
    assert spans(space, tmp_path) == [
        ("dot", 1, 40, None),
        ("sine", 4, 30, 0),
        ("cosine", 5, 20, 1),
        ("tanh", 40, 50, 1),
        ("add", 51, 90, 1),
    ]


def test_an_operation_that_nothing_waited_for_lasts_until_its_mark(tmp_path):
    space = Space()
    space.event("dot.1", 1, 3, hlo_op="dot.1", _p=1)
    space.event("sine.2", 4, 30, hlo_op="sine.2", _p=2)
    space.line = space.thread()
    space.event("ThreadpoolListener::StartRegion", 2, 2)
    space.event("end: dot.1", 60, 61, _c=1)
    assert spans(space, tmp_path) == [("dot", 1, 61, None), ("sine", 4, 30, 0)]


@pytest.mark.parametrize("opcode", ["while", "conditional", "call"])
def test_what_contains_others_stays_around_them(tmp_path, opcode):
    inside = [instruction(11, "dot.2", "dot")]
    module = {
        "computations": [
            {"id": 1, "root_id": 11, "instructions": inside},
            {"id": 2, "root_id": 20, "instructions": [instruction(20, "outer.1", opcode, calls=[1])]},
        ]
    }
    space = Space()
    space.program(7, module)
    space.event("outer.1", 1, 20, hlo_op="outer.1", program_id=7, _p=1)
    space.event("dot.2", 2, 15, hlo_op="dot.2", program_id=7, _p=2)
    space.line = space.thread()
    space.event("ThreadpoolListener::StartRegion", 19, 19)
    space.event("dot.2", 25, 80, hlo_op="dot.2", program_id=7, _p=3)  # it goes on here
    space.event("end: outer.1", 90, 90, _c=1)
    assert [span[1:] for span in spans(space, tmp_path)] == [(1, 20, 0), (2, 15, 0), (25, 80, 1)]


def test_operations_in_some_steps_only_are_said(tmp_path):
    space = Space()
    space.program(7, MODULE)
    for i in range(3):
        space.event("fusion.1", 10 * i, 10 * i + 5, hlo_op="fusion.1", program_id=7)
    meta = {"framework": "jax", "steps": [[0, 1_000_000, 1_000_010], [1, 1_000_010, 1_000_100]]}
    _, coverage = events_of(space.write(tmp_path / "a.xplane.pb"), meta)
    assert not coverage.counts_divide
    assert "M/up/reduce_sum" in coverage.uneven


def test_bad_files(tmp_path):
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(b"\x0a\xff")
    with pytest.raises(UserError, match="no XPlane file"):
        events_of(path, {"framework": "jax", "steps": []})
    table, coverage = events_of(Space().write(path), {"framework": "jax", "steps": []})
    assert (table.num_rows, coverage.busy_ns) == (0, 0)
