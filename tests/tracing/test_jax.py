"""Traces of JAX programs without steps of their own: names, command buffers of a GPU, executions, edges."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from smaragdine import protobuf
from smaragdine.tracing.names import jax_name
from smaragdine.tracing.xplane import hlo
from smaragdine.tracing.xplane.window import events_of

T0_NS = 1_000_000


@pytest.mark.parametrize(
    ("raw", "path", "phase"),
    [
        (
            "jit(step)/jvp(Model)/encoder/layer_0/up/dot_general",
            "Model/encoder/layer_0/up/dot_general",
            "forward",
        ),
        ("jit(step)/transpose(jvp(Model))/up/jit(relu)/mul", "Model/up/mul", "backward"),
        ("jit(step)/transpose(jvp(Model/up))/mul;jit(step)/jvp(Other)/add", "Model/up/mul", "backward"),
        # scan over layers, remat in Flax (which says its scopes twice) and out of it, shard_map, vmap, einsum
        ("jit(step)/jvp(vmap(Model))/while/body/closed_call/up/add", "Model/while/up/add", "forward"),
        ("jit(f)/transpose(jvp(M))/jvp(M)/checkpoint/down/transpose", "M/down/transpose", "backward"),
        (
            "jit(f)/transpose(jvp(jvp()))/checkpoint/rematted_computation/layer/tanh",
            "layer/tanh",
            "backward",
        ),
        ("jit(<lambda>)/jvp()/shard_map/layer/dot_general", "layer/dot_general", "forward"),
        ("jit(step)/jvp(M)/attention/bqhd,bkhd->bhqk/dot_general", "M/attention/dot_general", "forward"),
        # a scan over steps
        ("jit(f)/while/body/closed_call/transpose(jvp(M))/up/dot_general", "M/up/dot_general", "backward"),
        ("jit(f)/while/body/closed_call/optimizer/sub", "optimizer/sub", "optimizer"),
        ("jit(f)/while/body/dynamic_slice", "program/f/dynamic_slice", "other"),
        ("jit(f)/while", "program/f/while", "other"),
        # the program's own: its loss, Keras' loss, what is computed outside any function
        ("jit(step)/jvp()/reduce_sum", "program/step/reduce_sum", "forward"),
        ("jit(train_step)/jvp(compile_loss)/mse/sub", "program/compile_loss/mse/sub", "forward"),
        ("jit(step)/mul", "program/step/mul", "other"),
        ("jit(matmul)/matmul", "program/matmul", "other"),
        ("jit(my(odd)name)/f(x)/mul", "f(x)/mul", "other"),
        ("jit(step)/optimizer/sub", "optimizer/sub", "optimizer"),
        ("jit(train_step)/adam/mul", "optimizer/adam/mul", "optimizer"),
    ],
)
def test_names(raw, path, phase):
    name = jax_name(raw)
    assert (name.path, name.phase) == (path, phase)


def test_phases_that_a_name_alone_does_not_tell():
    assert jax_name("jit(step)/mul", in_update=True).path == "optimizer/step/mul"
    assert jax_name("jit(f)/while/body/mul", in_update=True).path == "optimizer/f/mul"
    assert jax_name("jit(predict)/Model/up/add", in_training=False).phase == "forward"
    assert jax_name("jit(step)/Model/up/add").phase == "other"


class Space:
    """An XPlane file by hand, with one program: in nanoseconds since T0_NS."""

    def __init__(self, plane: str) -> None:
        self.message = protobuf.message_class()()
        task = self.message.planes.add(name="Task Environment")
        task.stat_metadata[1].name = "profile_start_time"
        task.stats.add(metadata_id=1, uint64_value=T0_NS)
        self.plane = self.message.planes.add(name=plane)
        self.line = self.plane.lines.add(id=14, name="Stream #14(Compute)")
        self.metadata = self.message.planes.add(name="/host:metadata")
        self.stats: dict[str, int] = {}
        self.texts: dict[str, int] = {}

    def event(self, text: str, begin: int, end: int, **stats: str | int) -> None:
        key = self.texts.setdefault(text, len(self.texts) + 1)
        self.plane.event_metadata[key].name = text
        event = self.line.events.add(
            metadata_id=key, offset_ps=begin * 1000, duration_ps=(end - begin) * 1000
        )
        for name, value in stats.items():
            number = self.stats.setdefault(name, len(self.stats) + 1)
            self.plane.stat_metadata[number].name = name
            which = {"str_value": value} if isinstance(value, str) else {"int64_value": value}
            event.stats.add(metadata_id=number, **which)

    def program(self, number: int, name: str, module: dict) -> None:
        self.metadata.event_metadata[number].name = f"{name}({number})"
        content = hlo.message_class()(hlo_module=module).SerializeToString()
        self.metadata.event_metadata[number].stats.add(metadata_id=1, bytes_value=content)

    def read(self, path: Path, **meta):
        path.write_bytes(self.message.SerializeToString())
        return events_of(path, {"framework": "jax", "steps": [], **meta})


def module_of(instructions: list[tuple[str, str, str]]) -> dict:
    """(name, opcode, op_name), in the order of the schedule. The proto's own order is another."""
    rows = [
        {
            "id": number,
            "name": name,
            "opcode": opcode,
            "metadata": {"op_name": op_name},
            "custom_call_target": "__cublas$lt$matmul" if opcode == "custom-call" else "",
        }
        for number, (name, opcode, op_name) in enumerate(instructions)
    ]
    return {
        "computations": [{"id": 5, "root_id": len(rows) - 1, "instructions": rows[::-1]}],
        "entry_computation_id": 5,
        "schedule": {"sequences": {5: {"instruction_ids": list(range(len(rows)))}}},
    }


# Two layers alike, each a product of a library between two kernels of XLA's; then the update.
SCHEDULE = [
    ("parameter.0", "parameter", ""),
    *(
        (f"{kind}.{layer}", opcode, f"jit(step)/jvp(M)/layer_{layer}/{operation}")
        for layer in range(2)
        for kind, opcode, operation in (
            ("loop_convert_fusion", "fusion", "up/convert_element_type"),
            ("custom-call", "custom-call", "up/dot_general"),
            ("loop_add_fusion", "fusion", "add"),
        )
    ),
    ("loop_subtract_fusion", "fusion", "jit(step)/optimizer/sub"),
]
# Node of the graph, kernel: one kernel serves both layers. Nodes 101 and 104 are the graphs of the library.
NODES = [
    (100, "loop_convert_fusion_1"),
    (107, "Memset 0"),
    (108, "nvjet_sm90"),
    (102, "loop_add_fusion_0"),
    (103, "loop_convert_fusion_1"),
    (109, "nvjet_sm90"),
    (110, "void splitKreduce_kernel<float>(int)"),
    (105, "loop_add_fusion_0"),
    (106, "loop_subtract_fusion"),
]
PLACED = [
    ("M/layer_0/up/convert_element_type", "forward"),
    ("M/layer_0/up/Memset", "forward"),
    ("M/layer_0/up/dot_general", "forward"),
    ("M/layer_0/add", "forward"),
    ("M/layer_1/up/convert_element_type", "forward"),
    ("M/layer_1/up/dot_general", "forward"),
    ("M/layer_1/up/dot_general", "forward"),
    ("M/layer_1/add", "forward"),
    ("optimizer/sub", "optimizer"),
]


def buffers(nodes: list[tuple[int, str]], launches: int = 4) -> Space:
    """The first launch came before the profiler ran, which then saw its second half and not whose it was."""
    space = Space("/device:GPU:0")
    space.program(7, "jit_step", module_of(SCHEDULE))
    for launch in range(launches):
        for at, (node, text) in enumerate(nodes):
            begin = 100 * launch + 10 * at
            graph = {"cuda_graph_id": 3, "cuda_graph_node_id": node, "correlation_id": 50 + launch}
            whose = {"hlo_op": "command_buffer_1", "hlo_module": "jit_step", "program_id": 7}
            if launch:
                space.event(text, begin, begin + 8, **graph, **whose)
            elif at >= len(nodes) // 2:
                space.event(text, begin, begin + 8, **graph)
    return space


def test_kernels_of_a_command_buffer_are_placed_by_their_node(tmp_path):
    table, coverage = buffers(NODES).read(tmp_path / "a.xplane.pb", begin_ns=T0_NS, end_ns=T0_NS + 375)
    rows = table.to_pylist()
    for step in range(2):  # of four launches the first and the last are cut
        placed = [(row["name"], row["phase"]) for row in rows if row["step"] == step]
        assert placed == PLACED
    cut = [(row["name"], row["phase"]) for row in rows if row["step"] is None]
    assert cut == PLACED[len(PLACED) // 2 :] + PLACED[:7]
    assert coverage.placed_ns == coverage.busy_ns == 2 * 8 * len(NODES)
    assert (coverage.steps, coverage.counts_divide) == (2, True)
    assert coverage.found_steps == ((0, T0_NS + 100, T0_NS + 200), (1, T0_NS + 200, T0_NS + 288))
    assert any("executions of jit_step" in remark for remark in coverage.remarks)


def test_a_library_that_does_not_fit_is_not_guessed_at(tmp_path):
    nodes = [*NODES, (111, "something_else")]
    table, coverage = buffers(nodes).read(tmp_path / "a.xplane.pb")
    names = Counter(row["name"] for row in table.to_pylist() if row["step"] == 0)
    assert names["unplaced/nvjet_sm90"] == 2
    assert names["M/layer_0/add"] == names["M/layer_1/add"] == 1
    assert not any(name.endswith("dot_general") for name in names)
    assert coverage.placed_ns < coverage.busy_ns
    assert any("CUDA graphs" in remark for remark in coverage.remarks)


def test_runs_on_a_gpu_without_buffers_are_told_apart(tmp_path):
    space = Space("/device:GPU:0")
    space.program(7, "jit_step", module_of(SCHEDULE))
    for run in range(3):
        for at, (name, *_) in enumerate(SCHEDULE[1:]):
            begin = 100 * run + 10 * at
            whose = {"hlo_op": name, "hlo_module": "jit_step", "program_id": 7, "correlation_id": begin + 1}
            space.event(name.replace(".", "_"), begin, begin + 8, **whose)
    table, coverage = space.read(tmp_path / "a.xplane.pb")
    assert coverage.steps == 3
    assert table["step"].to_pylist() == [run for run in range(3) for _ in SCHEDULE[1:]]


def test_of_programs_that_take_turns_the_rarest_is_the_step(tmp_path):
    space = Space("/host:CPU")
    for number, name in ((7, "jit_gradients"), (8, "jit_update")):
        space.program(number, name, module_of([("add.1", "add", f"jit({name[4:]})/M/add")]))
    kinds = [7, 8, 7, 7, 8, 7, 7, 8, 7]
    for run, program in enumerate(kinds):
        module = {7: "jit_gradients", 8: "jit_update"}[program]
        stats = {"hlo_op": "add.1", "hlo_module": module, "program_id": program, "run_id": 100 + run}
        space.event("add.1", 10 * run, 10 * run + 5, **stats)
    table, coverage = space.read(tmp_path / "a.xplane.pb")
    assert coverage.steps == 2
    assert table["step"].to_pylist() == [None, 0, 0, 0, 1, 1, 1, None, None]
    assert coverage.counts_divide


def test_a_slice_without_repetition_has_no_steps(tmp_path):
    space = Space("/host:CPU")
    space.program(7, "jit_f", module_of([("add.1", "add", "jit(f)/M/add")]))
    space.event("add.1", 0, 5, hlo_op="add.1", hlo_module="jit_f", program_id=7, run_id=1)
    space.event("add.1", 90, 105, hlo_op="add.1", hlo_module="jit_f", program_id=7, run_id=2)
    table, coverage = space.read(tmp_path / "a.xplane.pb", begin_ns=T0_NS, end_ns=T0_NS + 100)
    assert table["name"].to_pylist() == ["M/add"]  # the other is cut by the slice's end
    assert (coverage.steps, coverage.found_steps) == (0, ())


def instruction(identity: int, opcode: str, op_name: str = "", operands=(), calls=(), **more) -> dict:
    return {
        "id": identity,
        "name": f"{opcode}.{identity}",
        "opcode": opcode,
        "metadata": {"op_name": op_name},
        "operand_ids": list(operands),
        "called_computation_ids": list(calls),
        **more,
    }


def test_a_fusion_is_where_its_work_is(tmp_path):
    forward, backward = "jit(step)/jvp(M)", "jit(step)/transpose(jvp(M))"
    module = {
        "entry_computation_id": 9,
        "computations": [
            {  # a product and what is added to it
                "id": 1,
                "root_id": 11,
                "instructions": [
                    instruction(10, "dot", f"{forward}/up/dot_general"),
                    instruction(11, "add", f"{forward}/norm/add", [10]),
                ],
            },
            {  # several results: the sum is the most work
                "id": 2,
                "root_id": 22,
                "instructions": [
                    instruction(20, "add", f"{backward}/query/add_any"),
                    instruction(21, "reduce", f"{backward}/norm/reduce_sum", [20]),
                    instruction(22, "tuple", "", [20, 21]),
                ],
            },
            {  # a product whose name went to the conversion of its result
                "id": 3,
                "root_id": 31,
                "instructions": [instruction(30, "parameter"), instruction(31, "dot", "", [30])],
            },
            {
                "id": 9,
                "root_id": 96,
                "instructions": [
                    instruction(90, "fusion", f"{forward}/norm/add", calls=[1]),
                    instruction(91, "fusion", f"{backward}/query/add_any", calls=[2]),
                    instruction(92, "fusion", "", [90], calls=[3]),
                    instruction(93, "convert", f"{forward}/attention/bhqk,bkhd->bqhd/dot_general", [92]),
                    instruction(94, "convert", "", [91]),  # XLA's own, of what it converts
                    instruction(95, "subtract", "jit(step)/sub", [94]),
                    instruction(96, "tuple", "", [93, 95]),
                ],
            },
        ],
    }
    space = Space("/host:CPU")
    space.program(7, "jit_step", module)
    for at, name in enumerate(
        ("fusion.90", "fusion.91", "fusion.92", "convert.93", "convert.94", "subtract.95")
    ):
        space.event(name, 10 * at, 10 * at + 5, hlo_op=name, hlo_module="jit_step", program_id=7, run_id=1)
    table, _ = space.read(tmp_path / "a.xplane.pb")
    assert list(zip(table["name"].to_pylist(), table["phase"].to_pylist(), strict=True)) == [
        ("M/up/dot_general", "forward"),
        ("M/norm/reduce_sum", "backward"),
        ("M/attention/dot_general", "forward"),
        ("M/attention/convert", "forward"),
        ("M/norm/convert", "backward"),
        ("optimizer/step/sub", "optimizer"),
    ]


def test_what_xla_makes_once_for_all_is_no_edge(tmp_path):
    def scope(name: str) -> str:
        return f"jit(step)/jvp(M)/{name}/add"

    entry = [
        instruction(1, "parameter"),
        instruction(2, "constant"),
        instruction(3, "add", scope("last"), [2, 2]),  # of constants, and used by the first
        instruction(4, "add", scope("first"), [1, 3]),
        instruction(5, "convert", scope("last"), [4]),  # in the name of one of those who use it
        instruction(6, "add", scope("middle"), [5, 1]),
        instruction(7, "add", "jit(step)/jvp(M)/add", [4, 6]),  # the way around, in the model's own scope
        instruction(8, "add", scope("last"), [7, 5]),
        instruction(9, "add", "jit(step)/transpose(jvp(M))/first/add", [8]),
    ]
    space = Space("/host:CPU")
    module = {"entry_computation_id": 5, "computations": [{"id": 5, "root_id": 9, "instructions": entry}]}
    space.program(7, "jit_step", module)
    space.event("add.4", 0, 5, hlo_op="add.4", hlo_module="jit_step", program_id=7, run_id=1)
    _, coverage = space.read(tmp_path / "a.xplane.pb")
    assert set(coverage.edges) == {("M/first", "M/middle"), ("M/first", "M/last"), ("M/middle", "M/last")}


# Trains twice, untraced and then in a slice of time; the second time the modules of nnx have scopes. Says the
# weights' digest of both.
PROGRAM = """
import hashlib, importlib, json, os, sys, time
import jax, jax.numpy as jnp, numpy, optax
import flax.linen as nn
from flax import nnx

folder = sys.argv[1]
os.environ["SMARAGDINE_TRACE_FOLDER"] = folder
hook = "smaragdine.tracing.hook."
tracer = scopes = importlib.import_module(hook + "jax")
random = numpy.random.default_rng(0)
x = jnp.array(random.normal(size=(32, 48)), "float32")


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        up = nn.tanh(nn.Dense(96, name="up")(x))
        return nn.LayerNorm(name="norm")(x + nn.Dense(48, name="down")(up))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = LinenBlock(name="block_%d" % i)(x)
        return nn.Dense(4, name="head")(x)


def linen(steps):
    model, optimizer = Net(), optax.adam(1e-3)
    weights = model.init(jax.random.key(0), x)
    state = optimizer.init(weights)

    @jax.jit
    def step(weights, state, x):
        gradients = jax.grad(lambda w: (model.apply(w, x) ** 2).mean())(weights)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    for _ in steps():
        weights, state = step(weights, state, x)
    return weights


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(48, 96, rngs=rngs), nnx.Linear(96, 48, rngs=rngs)
        self.norm = nnx.LayerNorm(48, rngs=rngs)

    def __call__(self, x):
        return self.norm(x + self.down(nnx.tanh(self.up(x))))


class Special(Block):
    def __call__(self, x):
        return super().__call__(x) * 1.5


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Special(rngs)])
        self.head = nnx.Linear(48, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_nnx(steps):
    model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda m: (m(x) ** 2).mean())(model))

    for _ in steps():
        step(model, optimizer, x)
    return nnx.state(model, nnx.Param)


def digest(tree):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(numpy.asarray(leaf).tobytes())
    return found.hexdigest()


def traced(name, said):
    def steps():
        for number in range(8):
            if number == 3:
                session, said["begin_ns"] = tracer.start(), time.time_ns()
            yield number
        jax.block_until_ready(jax.live_arrays())
        if os.fork() == 0:
            os._exit(0)
        os.wait()
        said["end_ns"] = time.time_ns()
        tracer.stop(session, folder + "/" + name + ".xplane.pb")
    return steps


def failing():
    def fail(x):
        raise ValueError("mine")

    session, seen = tracer.start(), ""
    try:
        shape = jax.ShapeDtypeStruct((), "float32")
        jax.jit(lambda x: jax.pure_callback(fail, shape, x))(1.0).block_until_ready()
    except Exception as error:
        seen = str(error)
    tracer.stop(session, folder + "/failing.xplane.pb")
    return "mine" in seen


said = {}
for name, train in (("linen", linen), ("nnx", in_nnx)):
    said[name] = {"plain": digest(train(lambda: range(8)))}
    scopes.patch_nnx(importlib.import_module("flax.nnx.module"))
    said[name]["traced"] = digest(train(traced(name, said[name])))
said["failing"] = failing()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    missing = [name for name in ("jax", "flax", "optax") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("jax")
    script = folder / "train.py"
    script.write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder, json.loads(ended.stdout.splitlines()[-1])


def layers_of(name: str) -> tuple[str, list[str]]:
    """The model's scope, and those of its blocks."""
    return {
        "linen": ("Net", ["Net/block_0", "Net/block_1"]),
        "nnx": ("Nnx", ["Nnx/blocks/0", "Nnx/blocks/1"]),
    }[name]


def traced(programs, name: str):
    folder, said = programs
    meta = {"framework": "jax", "steps": [], **said[name]}
    return events_of(folder / f"{name}.xplane.pb", meta)


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_products_are_where_they_are_written(programs, name):
    table, coverage = traced(programs, name)
    root, blocks = layers_of(name)
    # Backward there is one for each weight and, but for the first layer, one for what comes into it.
    denses = [f"{block}/{part}" for block in blocks for part in ("up", "down")] + [f"{root}/head"]
    expected = {(f"{dense}/dot_general", "forward"): 5 for dense in denses}
    expected |= {(f"{dense}/dot_general", "backward"): 5 * (1 + (dense != denses[0])) for dense in denses}
    rows = [row for row in table.to_pylist() if row["step"] is not None]
    found = Counter((row["name"], row["phase"]) for row in rows if row["name"].endswith("/dot_general"))
    assert found == expected
    assert {row["step"] for row in rows} == set(range(5)) == {step[0] for step in coverage.found_steps}
    assert coverage.counts_divide, coverage.remarks
    assert coverage.placed_ns >= 0.99 * coverage.busy_ns > 0


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_an_update_without_scopes_is_the_optimizer_s(programs, name):
    table, _ = traced(programs, name)
    roots = {(row["name"].split("/")[0], row["phase"]) for row in table.to_pylist()}
    root, _ = layers_of(name)
    assert {(root, "forward"), (root, "backward"), ("optimizer", "optimizer")} <= roots
    assert {each for each, phase in roots if phase == "optimizer"} == {"optimizer"}
    assert not any(each == "unplaced" for each, _ in roots)


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_edges_between_siblings(programs, name):
    _, coverage = traced(programs, name)
    root, blocks = layers_of(name)
    within = {
        (f"{each}/{a}", f"{each}/{b}") for each in blocks for a, b in (("up", "down"), ("down", "norm"))
    }
    last = blocks[-1] if name == "linen" else f"{root}/blocks"
    assert set(coverage.edges) == {*within, (blocks[0], blocks[1]), (last, f"{root}/head")}


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_results_are_bit_identical(programs, name):
    _, said = programs
    assert said[name]["plain"] == said[name]["traced"]


def test_a_step_that_fails_fails_for_the_program(programs):
    assert programs[1]["failing"] is True
