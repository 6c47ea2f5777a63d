"""Instructions of JAX's programs that ran on a GPU become calls: a program of their own each, once for all
layers that are alike. Compiled for the processor here: what XLA made of it is read, run and compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smaragdine import protobuf
from smaragdine.calibrate import hlo_wire
from smaragdine.recording.format import CALLS
from smaragdine.tracing.xplane import calls, hlo
from smaragdine.tracing.xplane.calls import CannotStandAlone, Module
from smaragdine.tracing.xplane.window import events_of

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
xla_client = pytest.importorskip("jax._src.lib").xla_client

T0_NS = 1_000_000
DETAILS = "regs:32 static_shared:0 dynamic_shared:0 grid:{},1,1 block:128,1,1 occ_pct:100"


def compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """The program that XLA made of it."""
    module = jax.jit(function).lower(*arguments).compile().runtime_executable().hlo_modules()[0]
    found = hlo.message_class()()
    found.hlo_module.ParseFromString(module.as_serialized_hlo_module_proto())
    return found.hlo_module


def layers(weights: Any, x: Any) -> Any:
    for i, weight in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ weight) * 0.5 + x
    return x


@pytest.fixture(scope="module")
def two_layers() -> Any:
    return compiled(layers, [jnp.ones((32, 32))] * 2, jnp.ones((8, 32)))


def entry(module: Any) -> list[Any]:
    return next(each for each in module.computations if each.id == module.entry_computation_id).instructions


def work(module: Any) -> list[str]:
    idle = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
    return [each.name for each in entry(module) if each.opcode not in idle]


def trace(path: Path, module: Any, kernels: list[tuple[str, str, int, int, str]]) -> Any:
    """Events and calls of kernels: name, instruction, begin, end, details."""
    space = protobuf.message_class()()
    task = space.planes.add(name="Task Environment")
    task.stat_metadata[1].name = "profile_start_time"
    task.stats.add(metadata_id=1, uint64_value=T0_NS)
    plane = space.planes.add(name="/device:GPU:0")
    names = ("hlo_op", "hlo_module", "program_id", "correlation_id", "kernel_details")
    for number, name in enumerate(names):
        plane.stat_metadata[number + 1].name = name
    line = plane.lines.add(id=14, name="Stream #14(Compute)")
    for number, (name, operation, begin, end, details) in enumerate(kernels):
        plane.event_metadata[number + 1].name = name
        event = line.events.add(
            metadata_id=number + 1, offset_ps=begin * 1000, duration_ps=(end - begin) * 1000
        )
        for at, value in enumerate((operation, "jit_f", 7, number + 1, details)):
            which = {"str_value": value} if isinstance(value, str) else {"int64_value": value}
            event.stats.add(metadata_id=at + 1, **which)
    metadata = space.planes.add(name="/host:metadata")
    metadata.event_metadata[7].name = "jit_f(7)"
    content = hlo.message_class()(hlo_module=module).SerializeToString()
    metadata.event_metadata[7].stats.add(metadata_id=1, bytes_value=content)
    path.write_bytes(space.SerializeToString())
    return events_of(path, {"framework": "jax", "steps": []})


def test_layers_that_are_alike_are_one_call(tmp_path, two_layers):
    operations = work(two_layers)
    kernels = [
        (name.replace(".", "_"), name, 100 * run + 10 * at, 100 * run + 10 * at + 7, DETAILS.format(16))
        for run in range(3)
        for at, name in enumerate(operations)
    ]
    table, coverage = trace(tmp_path / "a.xplane.pb", two_layers, kernels)
    assert coverage.calls.schema == CALLS
    found = coverage.calls.to_pylist()
    assert len(operations) >= 4
    assert len(found) <= len(operations) // 2 + 1
    assert sum(call["count"] for call in found) == len(kernels)
    assert sum(call["busy_ns"] for call in found) == 7 * len(kernels)
    assert {call["device"] for call in found} == {"gpu:0"}
    by_number = {call["call"]: call for call in found}
    for row in table.to_pylist():
        assert by_number[row["call"]]["framework"] == "jax"
    for call in found:
        ((name, grid),) = json.loads(call["kernels"])
        assert grid == [16, 1, 1]
        assert not name[-1].isdigit()


def test_a_call_has_all_kernels_of_an_execution_and_a_loop_many_executions(tmp_path):
    def loop(x):
        return jax.lax.fori_loop(0, 5, lambda i, x: jnp.sin(x) * i, x)

    module = compiled(loop, jnp.ones(1000))
    computations = {each.id: each for each in module.computations}
    bodies = [
        each
        for one in module.computations
        for step in one.instructions
        if step.opcode == "while"
        for each in computations[step.called_computation_ids[0]].instructions
    ]
    inside = next(each.name for each in bodies if each.opcode in ("fusion", "call", "sine", "multiply"))
    kernels = []
    for turn in range(5):
        begin = 10 * turn
        kernels.append(("Memset 3", inside, begin, begin + 1, ""))
        kernels.append(("nvjet_sm90_2", inside, begin + 1, begin + 8, DETAILS.format(2)))
    table, coverage = trace(tmp_path / "a.xplane.pb", module, kernels)
    (call,) = coverage.calls.to_pylist()
    assert (call["count"], call["busy_ns"]) == (5, 40)
    assert json.loads(call["kernels"]) == [["Memset", None], ["nvjet_sm90_2", [2, 1, 1]]]
    assert set(table["call"].to_pylist()) == {call["call"]}


def test_what_cannot_stand_alone_says_why(two_layers):
    module = compiled(lambda x: jax.lax.fori_loop(0, 5, lambda i, x: jnp.sin(x) * i, x), jnp.ones(1000))
    loop = next(each.name for each in entry(module) if each.opcode == "while")
    with pytest.raises(CannotStandAlone, match="it takes a tuple"):
        Module(module).alone(loop)
    with pytest.raises(CannotStandAlone, match="does not have it"):
        Module(two_layers).alone("nobody")


def test_on_a_processor_there_are_no_calls(tmp_path, two_layers):
    _, coverage = trace(tmp_path / "a.xplane.pb", two_layers, [])
    assert coverage.calls is None


def unfused(module: bytes) -> bytes:
    """A fusion as a plain call: StableHLO, which is all that JAX itself compiles, has no word for its
    settings."""
    found = calls.message_class()()
    found.ParseFromString(module)
    for computation in found.computations:
        for each in computation.instructions:
            if each.opcode == "fusion":
                each.CopyFrom(
                    type(each)(
                        opcode="call",
                        name=each.name,
                        id=each.id,
                        shape=each.shape,
                        operand_ids=each.operand_ids,
                        called_computation_ids=each.called_computation_ids,
                    )
                )
    return found.SerializeToString()


def run(module: bytes, arguments: list[Any]) -> list[Any]:
    """What a program computes, as XLA understands it."""
    computation = xla_client.XlaComputation(unfused(module))
    mlir = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
    backend = jax.devices("cpu")[0].client
    devices = xla_client.DeviceList(tuple(backend.local_devices()[:1]))
    program = backend.compile_and_load(mlir, devices, xla_client.CompileOptions())
    results = program.execute_sharded([jax.device_put(each) for each in arguments])
    return [np.asarray(each[0]) for each in results.disassemble_into_single_device_arrays()]


def test_an_instruction_alone_computes_what_it_computed(two_layers):
    """A layer's instructions, put together by hand, are the layer."""
    module = Module(two_layers)
    weight = np.random.default_rng(0).standard_normal((32, 32)).astype("float32")
    x = np.random.default_rng(1).standard_normal((8, 32)).astype("float32")
    values = {}
    for each in entry(two_layers):
        if each.opcode == "parameter":
            values[each.id] = x if each.parameter_number == 2 else weight
    for each in entry(two_layers):
        if each.name in work(two_layers):
            given = [values[one] for one in dict.fromkeys(each.operand_ids)]
            (values[each.id],) = run(module.alone(each.name).module, given)
    root = next(one for one in two_layers.computations if one.id == two_layers.entry_computation_id).root_id
    expected = layers([weight, weight], x)
    np.testing.assert_allclose(values[root], np.asarray(expected), rtol=1e-5, atol=1e-6)


def test_a_program_several_times_in_a_row(two_layers):
    module = Module(two_layers)
    for name in work(two_layers):
        once = module.alone(name).module
        parameters, _ = hlo_wire.program_shape(once)
        random = np.random.default_rng(0)
        given = [random.standard_normal(each.dims).astype("float32") for each in parameters * 3]
        thrice = run(hlo_wire.named(hlo_wire.repeated(once, 3), "again"), given)
        for turn in range(3):
            own = given[turn * len(parameters) : (turn + 1) * len(parameters)]
            np.testing.assert_allclose(thrice[turn], run(once, own)[0], rtol=1e-6)


def test_an_instruction_with_several_results_has_all_of_them_each_time():
    module = compiled(lambda x: jax.lax.top_k(x, 3), jnp.ones(64))
    name = next(each.name for each in entry(module) if each.opcode in ("custom-call", "topk", "sort"))
    twice = hlo_wire.repeated(Module(module).alone(name).module, 2)
    parameters, result = hlo_wire.program_shape(twice)
    assert len(parameters) == 2
    assert [part.dims for part in result.parts] == [[3]] * 4
    text = xla_client.XlaComputation(twice).get_hlo_module().to_string()
    assert text.count("get-tuple-element(") == 4


def test_bytes_that_are_read_are_written_again(two_layers):
    for name in work(two_layers):
        module = Module(two_layers).alone(name).module
        assert hlo_wire.encoded(hlo_wire.fields(module)) == module


def test_layouts_and_what_the_compiler_is_to_leave_out():
    module = compiled(lambda x: jnp.sin(x) + 1, jnp.ones((4, 8)))
    once = Module(module).alone(work(module)[0]).module
    options = xla_client.CompileOptions.ParseFromString(hlo_wire.compile_options(once))
    assert [str(each) for each in options.argument_layouts] == ["f32[4,8]{1,0}"]
    assert str(options.executable_build_options.result_layout) == "f32[4,8]{1,0}"
    assert options.executable_build_options.num_replicas == 1


def test_whole_numbers_that_look_up_are_in_range():
    module = compiled(lambda table, at: table[at] + 1, jnp.ones((1000, 8)), jnp.ones(16, int))
    whole = hlo.message_class()(hlo_module=module).hlo_module.SerializeToString()
    assert hlo_wire.most_index(whole) == 1000
    plain = compiled(lambda x: x + 1, jnp.ones(1000, int))
    assert hlo_wire.most_index(plain.SerializeToString()) == 2
