"""Kernels of torch.compile: found by the hook, and launched alone from the source that it found. Here the
launcher is a stand-in with inductor's attributes: without a GPU inductor makes none."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from card_files import load_card

torch = pytest.importorskip("torch")

SOURCE = """
class tl:
    constexpr = int

class Config:
    def __init__(self, kwargs, num_warps, num_stages):
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages

class Launcher:
    def __init__(self, function):
        self.function, self.called, self.inductor_meta = function, [], {}
        self.device = "DeviceProperties(type='cuda', index=1, cc=90)"
        self.configs = [Config({"XBLOCK": 256}, 4, 1), Config({"XBLOCK": 512}, 8, 1)]
    def run(self, *args, stream):
        self.called.append((*args, stream))

@Launcher
def triton_poi_fused_embedding_0(in_ptr0, in_ptr1, in_ptr2, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + (x1), xmask, eviction_policy='evict_last')
    tmp5 = tl.load(in_ptr2 + (x1), xmask)
    tmp1 = tl.full([XBLOCK], 100, tl.int32)
    tmp2 = tmp0 + tmp1
    tmp3 = tmp0 < 0
    tmp4 = tl.where(tmp3, tmp2, tmp0)
    tl.device_assert(((0 <= tmp4) & (tmp4 < 100)) | ~(xmask), "index out of bounds: 0 <= tmp4 < 100")
    tmp6 = tl.load(in_ptr1 + (x0 + 32*tmp4), xmask)
    tl.store(out_ptr0 + (x0 + 32*x1), tmp6 + tmp5, xmask)
"""


def call(**more: Any) -> dict[str, Any]:
    about = {"source": SOURCE, "blocks": "XBLOCK=512", "warps": 8, "stages": 1}
    return {
        "op": "triton_poi_fused_embedding_0",
        "dims": [[64], [100, 32], [64], [64, 32], []],
        "strides": [[1], [32, 1], [1], [32, 1], []],
        "types": ["long int", "float", "long int", "c10::BFloat16", "Scalar"],
        "values": ["", "", "", "", "2048"],
        "generated": {**about, **more},
    }


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = load_card("torch_card")
    made.DEVICE = "cpu"
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return made


def test_it_is_called_as_it_was(card: Any) -> None:
    kernel, as_it_is = card.variants(call(), [])
    assert (kernel.steady, as_it_is.steady) == (True, False)
    inputs = kernel.inputs()
    kernel.run(inputs)
    index, table, unchecked, out, size, stream = kernel.launcher.called[-1]
    assert (size, stream) == (2048, 7)
    assert (list(table.shape), list(out.shape), out.dtype) == ([100, 32], [64, 32], torch.bfloat16)
    # Indices are below what the kernel asserts; where it asserts nothing, zero is always inside.
    assert len(index.unique()) > 20
    assert 0 <= int(index.min()) <= int(index.max()) < 100
    assert int(unchecked.abs().max()) == 0
    assert card.size_bytes(inputs) == 64 * 8 * 2 + 100 * 32 * 4 + 64 * 32 * 2


CHANGES_IN_PLACE = """
def triton_red_fused_mul_0(in_out_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_out_ptr0 + (r0_1 + 768*(x0 // 2)), r0_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr0 + (x0), tmp5, None)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tl.store(in_out_ptr0 + (r0_1 + 768*(x0 // 2)), tmp4, r0_mask)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):

        tmp7 = tl.load(in_out_ptr0 + (r0_1 + 768*(x0 // 2)), r0_mask, other=0.0).to(tl.float32)
        tmp9 = tmp7 * tmp5
        tl.store(in_out_ptr0 + (r0_1 + 768*(x0 // 2)), tmp9, r0_mask)
"""


def test_what_it_changes_in_place_stays_as_it_was(card: Any) -> None:
    """What a loop has read is known in that loop alone; a store of what was never read is left."""
    lines = card.inductor_kernels.kept(CHANGES_IN_PLACE).splitlines()
    before = CHANGES_IN_PLACE.splitlines()
    changed = [(old, new) for old, new in zip(before, lines, strict=True) if old != new]
    ((old, new),) = changed
    assert (before.index(old), lines.index(new)) == (11, 11)
    assert new == old.replace("tmp9", "tl.where(tmp9 > 1e30, tmp9, tmp7)")


def test_it_has_the_blocks_that_the_program_chose(card: Any) -> None:
    known = next(card.variants(call(), []))
    known.inputs()
    assert [(each.kwargs, each.num_warps) for each in known.launcher.configs] == [({"XBLOCK": 512}, 8)]
    # What a longer search found is none of those in the source.
    found = next(card.variants(call(blocks="XBLOCK=64,R0_BLOCK=16", warps=2, stages=3), []))
    found.inputs()
    (config,) = found.launcher.configs
    assert (config.kwargs, config.num_warps, config.num_stages) == ({"XBLOCK": 64, "R0_BLOCK": 16}, 2, 3)
    # The second card of the program is the only one here.
    assert "index=0" in found.launcher.device


def test_an_argument_that_was_not_recorded_is_said(card: Any) -> None:
    odd = call()
    odd["types"][4] = ""
    kernel = next(card.variants(odd, []))
    with pytest.raises(card.CannotBeRebuilt, match="argument 4"):
        kernel.inputs()


def test_the_hook_writes_down_what_a_kernel_is_launched_with(tmp_path: Path) -> None:
    """As inductor says it to the profiler, in a session of all threads."""
    from smaragdine.tracing.hook.torch.compiled import SEPARATOR, Launches

    original = torch._C._profiler._RecordFunctionFast
    about = {"kernel_backend": "triton", "kernel_hash": "cab", "kernel_kwargs": "XBLOCK=128", "num_warps": 4}

    def launch(*args: Any) -> None:
        with torch._C._profiler._RecordFunctionFast("triton_poi_fused_add_0", args, about):
            torch.ones(3)

    turned = torch.zeros(4, 8, dtype=torch.bfloat16).T
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    launches = Launches()
    with torch.autograd.profiler.profile(
        use_kineto=True, record_shapes=True, experimental_config=config
    ) as seen:
        launches.follow()
        launch(turned, 32, 0.5)
        launch(turned, 64, 0.5)
        launch(turned, 32, 0.5)
        with torch._C._profiler._RecordFunctionFast("another"):
            pass
        # As inductor calls a compiled graph, and in ways that it does not know yet.
        with torch._C._profiler._RecordFunctionFast("another", keyword_values={"scope": "user_scope"}):
            pass
        with torch._C._profiler._RecordFunctionFast(name="another"):
            pass
        with torch._C._profiler._RecordFunctionFast("another", [], {}):
            pass
        with torch._C._profiler._RecordFunctionFast("another", [object(), []], dict(about)):
            pass
        launches.let_go()
        launch(turned, 32, 0.5)
    assert torch._C._profiler._RecordFunctionFast is original
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    events.sort(key=lambda event: event.get("ts", 0))
    name = "triton_poi_fused_add_0"
    names = [event["name"] for event in events if event["name"].startswith((name, "another"))]
    told = [f"{name}{SEPARATOR}{number}" for number in (0, 1, 0)]
    assert names == [*told, *["another"] * 4, f"another{SEPARATOR}2", name]
    first, second, odd = launches.said
    assert (odd["types"], odd["values"]) == (("", ""), ("", ""))
    assert (first["dims"], first["strides"]) == (([8, 4], [], []), ([1, 8], [], []))
    assert (first["types"], first["values"]) == (("c10::BFloat16", "Scalar", "Scalar"), ("", "32", "0.5"))
    assert (first["kernel_hash"], first["num_stages"], second["values"][1]) == ("cab", None, "64")


def test_a_compiled_program_runs_as_ever_while_launches_are_noted() -> None:
    """inductor itself tells the profiler what it calls, in ways of its own."""
    from smaragdine.tracing.hook.torch.compiled import Launches

    layer = torch.nn.Linear(8, 8)
    whole = torch.compile(layer)
    given = torch.ones(2, 8)
    expected = whole(given)
    launches = Launches()
    with torch.autograd.profiler.profile(use_kineto=True, record_shapes=True):
        launches.follow()
        try:
            found = whole(given)
            found.sum().backward()
        finally:
            launches.let_go()
    assert torch.equal(found, expected)


def test_the_hook_keeps_sources_while_they_are_there(tmp_path: Path) -> None:
    from smaragdine.tracing.hook.torch import compiled

    there = tmp_path / "ab" / "cab.py"
    there.parent.mkdir()
    there.write_text("import triton")
    large = tmp_path / "clarge.py"
    large.write_text("#" * (5 << 20))
    paths = [str(there), str(tmp_path / "cgone.py"), str(large), os.devnull, ""]
    assert compiled.sources(paths) == {"cab": "import triton"}
    autotuner = type("CachingAutotuner", (), {"__module__": "torch._inductor.runtime.triton_heuristics"})()
    autotuner.filename = str(there)
    assert compiled._facts()["kernels"] == {"cab": "import triton"}
