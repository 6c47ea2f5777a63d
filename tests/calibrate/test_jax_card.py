"""Instructions of JAX's programs are replayed by a plugin of XLA's. Here a plugin in Python takes its place,
which computes nothing and keeps time: what the card is asked to do, and what comes out of it, is seen
exactly."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from card_files import FOLDER, load_card
from pjrt_fake import build_plugin

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

from smaragdine.calibrate import hlo_wire  # noqa: E402
from smaragdine.tracing.xplane.calls import Module  # noqa: E402


@pytest.fixture
def card_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    made = load_card("jax_card")
    yield made
    for name in ("card_requests", "hlo_wire", "pjrt", "xla_inputs"):
        sys.modules.pop(name, None)


class Plugin:
    """A program takes `call_s` for each instruction in it; the host's clock moves when somebody waits."""

    def __init__(self, call_s: float = 20e-6, launch_s: float = 0.0, refuses_bytes: int = 1 << 60) -> None:
        self.call_s, self.launch_s, self.refuses_bytes = call_s, launch_s, refuses_bytes
        self.now_s = self.done_s = 0.0
        self.compiled: list[bytes] = []
        self.buffers = 0  # made, not those that are results
        self.alive: dict[int, int] = {}
        self.most_waiting = self.waiting = 0

    def compile(self, module: bytes, options: bytes) -> Any:
        if b"no_such_target" in module:
            raise RuntimeError("INTERNAL: no such target\nand a long story")
        self.compiled.append(module)
        return Program(self, module)

    def buffer(self, address: int, kind: int, dims: list[int], minor: list[int], item_bytes: int) -> int:
        size = item_bytes
        for length in dims:
            size *= length
        if sum(self.alive.values()) + size > self.refuses_bytes:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        self.buffers += 1
        return self._new(size)

    def _new(self, size: int) -> int:
        number = max(self.alive, default=0) + 1
        self.alive[number] = size
        return number

    def free(self, buffer: int) -> None:
        del self.alive[buffer]

    def wait(self, event: float) -> None:
        self.waiting -= 1
        self.now_s = max(self.now_s, event)


class Program:
    def __init__(self, plugin: Plugin, module: bytes) -> None:
        self.plugin = plugin
        _, result = hlo_wire.program_shape(module)
        self.outputs = len(result.parts or [result])
        self.times = self.outputs

    def prepare(self, buffers: list[int], taken: list[int]) -> Any:
        arguments = list(buffers)
        assert len({arguments[at] for at in taken}) == len(taken)

        def run() -> tuple[list[int], float]:
            plugin = self.plugin
            assert set(arguments) <= set(plugin.alive)
            plugin.now_s += plugin.launch_s
            plugin.done_s = max(plugin.done_s, plugin.now_s) + plugin.call_s * self.times
            plugin.waiting += 1
            plugin.most_waiting = max(plugin.most_waiting, plugin.waiting)
            return [plugin._new(0) for _ in range(self.outputs)], plugin.done_s

        return run, arguments

    def close(self) -> None:
        pass


def call_of(number: int, function: Any, *arguments: Any, grid: int = 16) -> dict[str, Any]:
    module = jax.jit(function).lower(*arguments).compile().runtime_executable().hlo_modules()[0]
    found = hlo_module(module.as_serialized_hlo_module_proto())
    entry = next(each for each in found.computations if each.id == found.entry_computation_id)
    alone = Module(found).alone(entry.instructions[-1].name)
    packed = base64.b64encode(zlib.compress(alone.module)).decode()
    return {"id": number, "op": alone.op, "hlo": packed, "kernels": [["loop_fusion", [grid, 1, 1]]]}


def hlo_module(raw: bytes) -> Any:
    from smaragdine.tracing.xplane import hlo

    found = hlo.message_class()()
    found.hlo_module.ParseFromString(raw)
    return found.hlo_module


@pytest.fixture
def made(card_file: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card of a plugin: its clock is the plugin's, and its profiler sees one kernel of each instruction."""

    def card(plugin: Plugin) -> Any:
        def launched(work: list[Any]) -> dict[str, Any]:
            for each in work:
                with each.filled():
                    each.once()
            kernel = ("loop_fusion_7", [16, 1, 1], plugin.call_s)
            return {each.name: [kernel] * each.times for each in work}

        monkeypatch.setattr(card_file, "launched", launched)
        monkeypatch.setattr(card_file.time, "perf_counter", lambda: plugin.now_s)
        return card_file.XlaCard(plugin)

    return card


def test_a_call_is_checked_prepared_and_run(made):
    plugin = Plugin(call_s=20e-6)
    card = made(plugin)
    call = call_of(5, lambda x: jnp.sin(x) + 1, jnp.ones((1024, 1024)))
    (answer,) = card.check([call])["checked"]
    assert answer == {"id": 5, "kernel_s": plugin.call_s}
    prepared = card.prepare(5, cold=True)
    # 8 MiB a call, read and written: 26 copies are more than a cache holds.
    assert (prepared["bytes"], prepared["copies"]) == (8 << 20, 26)
    assert prepared["call_s"] == pytest.approx(plugin.call_s)
    assert prepared["calls"] % prepared["copies"] == 0
    assert prepared["calls"] * plugin.call_s == pytest.approx(card.turn_s)
    assert prepared["busy"] == pytest.approx(1.0)
    hot = card.prepare(5, cold=False)
    assert (hot["copies"], hot["call_s"]) == (1, pytest.approx(plugin.call_s))


@pytest.mark.parametrize("rest", [0.0, 1.0, 3.0])
def test_rests_are_told_from_calls(made, rest):
    plugin = Plugin(call_s=50e-6)
    card = made(plugin)
    card.check([call_of(1, lambda x: jnp.sin(x) + 1, jnp.ones(1000))])
    card.prepare(1, cold=False)
    card.begin(rest)
    while card.load.turns < 100:
        pass
    ran = card.stop()
    assert ran["on_s"] == pytest.approx(ran["calls"] * plugin.call_s, rel=1e-6)
    assert ran["rest_s"] == pytest.approx(rest * ran["on_s"], rel=0.3, abs=1e-9)  # no two rests are alike
    assert 1 < plugin.most_waiting <= 32  # the card never waits, and the plugin takes no more


def test_a_small_error_of_the_spacers_is_no_time_of_the_calls(made):
    plugin = Plugin(call_s=50e-6)
    card = made(plugin)
    card.check([call_of(1, lambda x: jnp.sin(x) + 1, jnp.ones(1000))])
    card.prepare(1, cold=False)
    card.spacer_s *= 0.98
    card.begin(3.0)
    while card.load.turns < 100:
        pass
    ran = card.stop()
    assert ran["on_s"] == pytest.approx(ran["calls"] * plugin.call_s, rel=1e-6)


def test_an_error_that_ends_all_work_is_told_from_others(made):
    card = made(Plugin())
    assert not card.lost()
    card.spacer.run = lambda: (_ for _ in ()).throw(RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"))
    assert card.lost()


def test_a_pause_is_all_rest_and_tells_how_long_a_spacer_takes(made):
    plugin = Plugin(call_s=50e-6)
    card = made(plugin)
    plugin.call_s = 20e-6  # the clock went up
    card.pause()
    while card.load.turns < 20:
        pass
    ran = card.stop()
    assert (ran["on_s"], ran["calls"]) == (0.0, 0)
    assert ran["rest_s"] > 0
    assert card.spacer_s == pytest.approx(20e-6)


def test_kernels_shorter_than_their_launch_have_their_own_time_alone(made):
    plugin = Plugin(call_s=1e-6, launch_s=200e-6)
    card = made(plugin)
    card.check([call_of(1, lambda x: jnp.sin(x) + 1, jnp.ones(8))])
    prepared = card.prepare(1, cold=False)
    assert prepared["busy"] < 0.5
    card.begin(0.0)
    while card.load.turns < 5:
        pass
    ran = card.stop()
    assert ran["on_s"] / ran["calls"] == pytest.approx(plugin.call_s, rel=0.05)
    assert ran["rest_s"] > ran["on_s"]


def test_kernels_that_overlap_have_the_time_that_a_trace_says(made, card_file, monkeypatch):
    """Energy is what counts: (power - idle) x the whole time, whatever part of it is called the calls'."""
    plugin = Plugin(call_s=50e-6)
    card = made(plugin)
    card.check([call_of(1, lambda x: jnp.sin(x) + 1, jnp.ones(1000))])
    own = card_file.launched

    def longer(work: list[Any]) -> dict[str, Any]:
        found = own(work)
        return {name: [(*each[:2], 1.1 * each[2]) for each in kernels] for name, kernels in found.items()}

    monkeypatch.setattr(card_file, "launched", longer)
    card.prepare(1, cold=False)
    card.begin(0.0)
    while card.load.turns < 20:
        pass
    ran = card.stop()
    assert ran["on_s"] / ran["calls"] == pytest.approx(1.1 * plugin.call_s, rel=1e-6)
    assert ran["on_s"] + ran["rest_s"] == pytest.approx(ran["calls"] * plugin.call_s, rel=1e-6)


def test_what_does_not_launch_the_same_kernels_is_no_replay(made):
    card = made(Plugin())
    call = call_of(1, lambda x: jnp.sin(x) + 1, jnp.ones(8), grid=17)
    (answer,) = card.check([call])["checked"]
    assert answer["why"] == "it launches other kernels here"
    assert answer["kernels"] == [["loop_fusion_7", [16, 1, 1]]]


def test_kernels_are_compared_without_their_numbers(card_file):
    own = [["loop_fusion", [4, 1, 1]], ["Memset", None]]
    assert card_file.differs([("loop_fusion_3_1", [4, 1, 1], 1e-6), ("Memset 3", None, 1e-6)], own) == ""
    assert "other kernels" in card_file.differs([("loop_fusion_3", [4, 1, 1], 1e-6)], own)
    assert "other kernels" in card_file.differs([], own)
    copied = [("MemcpyD2D", None, 1e-6), ("loop_fusion", [4, 1, 1], 1e-6), ("Memset 3", None, 1e-6)]
    assert card_file.differs(copied, own) == "it writes in place, and alone it copies first"


def test_what_writes_in_place_is_given_its_own_result_again(made, card_file, monkeypatch):
    plugin = Plugin()
    card = made(plugin)
    own = card_file.launched

    def copying(work: list[Any]) -> dict[str, Any]:
        found = own(work)
        for each in work:
            if each.name.startswith("alone") and not each.pairs:
                found[each.name].append(("MemcpyD2D", None, 1e-6))
        return found

    monkeypatch.setattr(card_file, "launched", copying)
    (answer,) = card.check([call_of(1, lambda x: jnp.sin(x) + 1, jnp.ones(1024))])["checked"]
    assert "why" not in answer
    prepared = card.prepare(1, cold=True)
    assert prepared["copies"] == card.ready.times > 1
    before = set(card.ready.buffers)
    card.ready.once()
    assert not before & set(card.ready.buffers)
    assert set(card.ready.buffers) <= set(plugin.alive)


def test_results_in_the_memory_of_parameters():
    module = base64.b64decode(call_of(1, lambda x, y: x.at[2].set(y), jnp.ones((8, 4)), jnp.ones(4))["hlo"])
    alone = zlib.decompress(module)
    pairs = hlo_wire.in_place(alone)
    assert [at for at, _ in pairs] == [0]
    shared = hlo_wire.sharing(alone, pairs)
    text = jax._src.lib.xla_client.XlaComputation(shared).get_hlo_module().to_string()
    place = pairs[0][1]
    assert f"input_output_alias={{ {{}}: ({place}, {{}}, may-alias) }}" in text
    parameters = len(hlo_wire.program_shape(alone)[0])
    many = [(turn, place + turn * parameters) for turn in range(2)]
    twice = hlo_wire.sharing(hlo_wire.repeated(alone, 2), many)
    text = jax._src.lib.xla_client.XlaComputation(twice).get_hlo_module().to_string()
    assert f"{{0}}: ({place}, {{}}, may-alias), {{1}}: ({place + parameters}, {{}}, may-alias)" in text


def test_what_cannot_be_made_says_why_and_leaves_the_others(made):
    card = made(Plugin())
    good = call_of(1, lambda x: jnp.sin(x) + 1, jnp.ones(8))
    refused = zlib.decompress(base64.b64decode(good["hlo"])) + hlo_wire.field(1, b"no_such_target")
    calls = [
        {"id": 2, "op": "while", "why": "it takes a tuple", "kernels": []},
        dict(good, id=3, hlo=base64.b64encode(zlib.compress(refused)).decode()),
        good,
    ]
    answers = {each["id"]: each.get("why", "") for each in card.check(calls)["checked"]}
    assert answers == {2: "it takes a tuple", 3: "INTERNAL: no such target", 1: ""}


def test_where_memory_is_short_there_are_fewer_copies(made):
    plugin = Plugin(refuses_bytes=40 << 20)
    card = made(plugin)
    card.check([call_of(1, lambda x: jnp.sin(x) + 1, jnp.ones((1024, 1024)))])
    prepared = card.prepare(1, cold=True)
    assert prepared["copies"] == 6
    assert sum(plugin.alive.values()) <= 40 << 20


def test_nothing_is_left_on_the_card(made):
    plugin = Plugin()
    card = made(plugin)
    before = len(plugin.alive)
    card.check([call_of(1, lambda x: jnp.sin(x) + 1, jnp.ones(8))])
    card.pool.empty()
    assert len(plugin.alive) == before
    card.prepare(1, cold=True)
    own = len(plugin.alive)
    for _ in range(3):
        card.prepare(1, cold=True)
    assert len(plugin.alive) == own


def test_what_one_call_has_read_the_next_may_read(made):
    plugin = Plugin()
    card = made(plugin)
    calls = [call_of(1, jnp.sin, jnp.ones(1000)), call_of(2, jnp.cos, jnp.ones(1000))]
    card.check(calls)
    made_before = plugin.buffers
    for call in (1, 2):
        card.prepare(call, cold=False)
    assert plugin.buffers == made_before


def test_values_are_of_their_type_and_in_range(card_file):
    import xla_inputs

    values = card_file.Values()
    for kind, (name, _) in xla_inputs.TYPES.items():
        shape = hlo_wire.Shape(hlo_wire.encoded([(2, kind), (3, 4), (3, 5)]))
        flat = values.of(shape, 7)
        assert (flat.dtype.name, flat.size) == (name, 20)
        if kind in xla_inputs.SIGNED:
            assert 0 <= flat.min() <= flat.max() < 7
    with pytest.raises(card_file.CannotBeMade, match="values of its type"):
        values.of(hlo_wire.Shape(hlo_wire.field(2, 99)), 2)


def test_the_spacer_is_a_program_that_xla_understands(card_file):
    module = card_file.spacer_module()
    parameters, result = hlo_wire.program_shape(module)
    assert [each.dims for each in [*parameters, result]] == [[], []]


def test_a_machine_without_the_plugin_says_so(card_file, monkeypatch, capsys):
    monkeypatch.setattr(card_file, "plugin_path", lambda: None)
    with pytest.raises(card_file.CannotBeMade, match="JAX has no plugin for CUDA here"):
        card_file.open_plugin()


def test_the_process_answers_what_it_is_asked(tmp_path):
    """Its plugin computes nothing, and the profiler sees no GPU: a call without kernels is the same call."""
    build_plugin(tmp_path)
    call = call_of(7, lambda x: jnp.sin(x) + 1, jnp.ones(8))
    calls = [dict(call, kernels=[]), dict(call, id=8), {"id": 9, "op": "while", "why": "it takes a tuple"}]
    asked = [
        {"framework": "jax"},
        {"do": "check", "calls": calls, "lists": []},
        {"do": "prepare", "call": 7, "cold": True},
        {"do": "load", "rest": 1.0},
        {"do": "stop"},
        {"do": "pause"},
        {"do": "stop"},
        {"do": "prepare", "call": 8, "cold": True},
    ]
    done = subprocess.run(
        [sys.executable, FOLDER / "jax_card.py"],
        input="".join(json.dumps(each) + "\n" for each in asked),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"},
    )
    ready, checked, prepared, running, ran, paused, rested, unknown = map(
        json.loads, done.stdout.splitlines()
    )
    assert ready["ready"]["jax"] == jax.__version__
    assert ready["ready"]["platform"] == "cuda 13000"
    whys = [each.get("why", "") for each in checked["checked"]]
    assert whys == ["", "it launches other kernels here", "it takes a tuple"]
    assert (prepared["prepared"], prepared["bytes"], prepared["copies"]) == (7, 64, 64)
    assert running == paused == {"running": True}
    assert ran["calls"] > 0
    assert rested["on_s"] == rested["calls"] == 0
    assert rested["rest_s"] > 0
    assert "why" in unknown


def test_settings_choose_the_process(tmp_path):
    from smaragdine.calibrate.replay import CardProcess
    from smaragdine.errors import UserError

    with pytest.raises(UserError, match="It needs JAX with CUDA"):
        CardProcess(sys.executable, "GPU-none", {"framework": "jax"}).start()
