"""What sampling costs: the arithmetic on made-up blocks, and the controller beside a plain loop."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvml_fake import GpuSpec, in_process, write_spec
from powercap_fake import PowercapTree
from smaragdine.errors import UserError
from smaragdine.stats import alternating_interval, mean_interval, ratio_interval
from smaragdine.study import overhead
from smaragdine.study.overhead import (
    CounterReading,
    MeasuredOverhead,
    OverheadBlock,
    command_of,
    load_overhead,
    mean_power_w,
    measure_overhead,
    measured_counters,
    overhead_of,
    pairs_of,
    stamps_in,
    steps_between,
)
from smaragdine.study.plan import StudySetting
from traced_recording import recording

DRIVER = Path(__file__).parents[2] / "experiments" / "study" / "overhead_loop.py"


def test_a_steady_drift_cancels() -> None:
    # AB BA AB BA: every block takes a hundredth longer than the one before, whatever runs beside it.
    block_s = [math.exp(0.01 * number) for number in range(8)]
    off = [block_s[i] for i in (0, 3, 4, 7)]
    on = [block_s[i] for i in (1, 2, 5, 6)]
    assert alternating_interval(on, off) == pytest.approx((1, 1, 1), abs=1e-12)


def test_intervals_by_hand() -> None:
    # t(0.95, 1) = 12.706…; the standard error of 1 and 3 is 1
    low, middle, high = mean_interval([1.0, 3.0])
    assert (low, middle, high) == (pytest.approx(2 - 12.7062047), 2.0, pytest.approx(2 + 12.7062047))
    assert ratio_interval([1.0] * 5 + [9.0], [1.0] * 6)[1] == 1.0
    # Of 20, the 6th lowest and highest: P(Binomial(20, ½) < 6) = 2.07 %
    assert ratio_interval([float(n) for n in range(1, 21)], [1.0] * 20) == (6.0, 10.5, 15.0)


def test_steps_between_two_times() -> None:
    stamps = np.array([[100, 1], [200, 4], [300, 7], [400, 10]], dtype=np.int64)
    assert steps_between(stamps, 150, 400) == (6, pytest.approx(200e-9 / 6))
    assert steps_between(stamps, 150, 250) is None
    assert steps_between(stamps, 500, 900) is None


def test_a_stamp_that_is_being_written_is_no_stamp(tmp_path: Path) -> None:
    path = tmp_path / "stamps"
    assert len(stamps_in(path)) == 0
    path.write_bytes(struct.pack("<qq", 5, 1) + struct.pack("<q", 9))
    assert stamps_in(path).tolist() == [[5, 1]]


def blocks(off_s: list[float], on_s: list[float], **of_on: Any) -> list[OverheadBlock]:
    found: list[OverheadBlock] = []
    for number, (off, on) in enumerate(zip(off_s, on_s, strict=True)):
        pair = [
            OverheadBlock(False, off, 20, {"gpu:0": 100.0}),
            OverheadBlock(True, on, 20, {"gpu:0": 101.0}, core_share=0.02, **of_on),
        ]
        found += pair if number % 2 == 0 else pair[::-1]
    return found


def measured(tmp_path: Path, of: list[OverheadBlock]) -> MeasuredOverhead:
    made = recording(tmp_path / "run", host={"cpu": "Test CPU", "gpus": [{"name": "Test GPU"}]})
    return MeasuredOverhead(of, 2.0, {"gpu:0": 0.004}, made)


def test_equal_kinds_cost_nothing(tmp_path: Path) -> None:
    noise = [0.101, 0.099, 0.1, 0.102, 0.098, 0.1]
    found = overhead_of("bert", measured(tmp_path, blocks(noise, noise[::-1])))
    assert found.time.low < 0 < found.time.high
    assert found.time_median.low <= 0 <= found.time_median.high
    assert found.time.middle == pytest.approx(0, abs=1e-12)
    assert found.hardware == "Test GPU, Test CPU"


def test_one_per_cent_is_found(tmp_path: Path) -> None:
    off = [0.1, 0.2, 0.1, 0.4]
    made = blocks(off, [1.01 * each for each in off], monitor_part={"cpu:0": 0.03})
    found = overhead_of("bert", measured(tmp_path, made))
    assert (found.time.low, found.time.middle, found.time.high) == pytest.approx((0.01, 0.01, 0.01))
    assert found.time_median.middle == pytest.approx(0.01)
    assert found.energy["gpu:0"].middle == pytest.approx(1.01 * 1.01 - 1)
    assert found.energy["gpu:0"].provenance == "measured"
    assert found.energy["cpu:0"].middle == pytest.approx(0.03)
    assert found.energy["cpu:0"].provenance == "estimated"
    assert (found.pairs, found.step_s, found.core_share) == (4, pytest.approx(0.15), 0.02)
    assert any("4.0 ms" in remark and "0.20%" in remark for remark in found.remarks)


def test_a_pair_has_both_kinds() -> None:
    made = blocks([0.1, 0.1], [0.1, 0.1])
    assert [[b.recorded for b in kind] for kind in pairs_of(made)] == [[True, True], [False, False]]
    with pytest.raises(ValueError, match="each kind"):
        pairs_of([made[0], made[3]])


def test_mean_power_between_edges() -> None:
    first = {
        "cpu:0": CounterReading(0, 5.0, 0, 10.0),
        "gpu:0": CounterReading(0, 1.0, 0),
        "gone": CounterReading(0, 0.0, 0),
    }
    last = {
        "cpu:0": CounterReading(2_000_000_000, 1.0, 0, 10.0),
        "gpu:0": CounterReading(500_000_000, 51.0, 0),
    }
    assert mean_power_w(first, last) == {"cpu:0": 3.0, "gpu:0": 100.0}  # the first one wrapped


def test_counters_of_sockets(tmp_path: Path) -> None:
    tree = PowercapTree(tmp_path, packages=1, psys=True)
    environment = {"SMARAGDINE_POWERCAP_ROOT": str(tree.root), "CUDA_VISIBLE_DEVICES": ""}
    with measured_counters(environment) as read:
        edges = read()
    assert set(edges) == {"cpu:0", "dram:0"}  # parts and the platform never add up


def test_counters_of_the_gpus_that_the_program_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_spec(tmp_path / "gpus.spec", [GpuSpec(high_w=100), GpuSpec(high_w=300)])
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "gpus.spec"))
    environment = {"SMARAGDINE_POWERCAP_ROOT": str(tmp_path / "none"), "CUDA_VISIBLE_DEVICES": "1"}
    with in_process(tmp_path), measured_counters(environment) as read:
        first, last = read(), read()
    assert set(first) == set(last) == {"gpu:1"}
    # Edges are where the counter steps, every 100 ms.
    steps = (last["gpu:1"].energy_j - first["gpu:1"].energy_j) / 30
    assert steps == pytest.approx(round(steps), abs=1e-3)
    assert steps > 0.5
    assert mean_power_w(first, last)["gpu:1"] > 0


def test_programs_of_ours_run_in_their_driver() -> None:
    words = (str(DRIVER.with_name("data.py")), "--layers", "2")
    python, driver, framework, *rest = command_of(
        StudySetting("x", words, {"framework": "torch"}), os.environ
    )
    assert (python, driver, framework) == (sys.executable, str(DRIVER), "torch")
    assert rest[:3] == list(words)
    assert rest[3] == "--seconds"
    assert command_of(StudySetting("x", words), os.environ) == (sys.executable, *words)


# As much of PyTorch as the driver knows: it must end a step as an optimizer does.
_FAKE_TORCH = {
    "torch/__init__.py": "from . import cuda, optim",
    "torch/cuda.py": "def is_available(): return False",
    "torch/optim/__init__.py": "",
    "torch/optim/optimizer.py": "hooks = []\nregister_optimizer_step_post_hook = hooks.append",
}
_PROGRAM = """
import atexit, os, sys, numpy
from torch.optim.optimizer import hooks
print("words:", *sys.argv[1:], flush=True)
print("pid:", os.getpid(), flush=True)
atexit.register(lambda: print("ended well", flush=True))
x = numpy.ones((40, 40))
while True:
    x = x @ x
    x /= x.max()
    for hook in hooks:
        hook(None, (), {})
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_WARM_UP_S", "_SETTLE_S"):
        monkeypatch.setattr(overhead, name, 0.05)


def children() -> set[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in text.split()}


@pytest.mark.usefixtures("quick")
def test_the_recorder_comes_and_goes(tmp_path: Path) -> None:
    for name, text in _FAKE_TORCH.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text(_PROGRAM)
    (tmp_path / "overhead_loop.py").symlink_to(DRIVER)
    environment = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    setting = StudySetting(
        "loop", (str(tmp_path / "train.py"), "--seconds", "1"), {"framework": "torch"}, environment
    )
    out, said, before = tmp_path / "out", list[str](), children()
    found = measure_overhead(setting, out, said.append, False, pairs=1, block_s=0.3)
    assert found is not None
    assert children() <= before
    assert found.pairs == 2  # whole rounds of ABBA
    assert [block.recorded for block in found.blocks] == [False, True, True, False]
    assert [block.core_share is not None for block in found.blocks] == [False, True, True, False]
    assert all(block.steps > 0 and block.step_s > 0 for block in found.blocks)
    assert found.block_s >= 0.3
    assert found.time.low <= found.time.middle <= found.time.high
    assert said == ["overhead: 1 of 2 pairs of blocks", "overhead: 2 of 2 pairs of blocks"]
    log = (out / "logs" / "overhead-loop.log").read_text()
    assert "words: --seconds 1 --seconds 86400" in log
    assert log.endswith("ended well\n")
    pid = int(log.partition("pid: ")[2].split()[0])
    assert not Path(f"/proc/{pid}").exists()
    assert sorted(path.name for path in out.iterdir()) == ["logs", "overhead.json"]
    assert load_overhead(out) == [found]
    # Nothing runs again.
    gone = StudySetting("loop", ("gone.py",), {"framework": "torch"})
    assert measure_overhead(gone, out, said.append, False, pairs=2) == found
    json.loads((out / "overhead.json").read_text())


def test_a_program_that_ends_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('no data')")
    before = children()
    with pytest.raises(UserError, match="ended too early: no data"):
        measure_overhead(StudySetting("x", (str(tmp_path / "train.py"),)), tmp_path / "out", print, False)
    assert children() <= before
    assert not (tmp_path / "out" / "overhead.json").exists()


def test_a_program_that_records_itself_is_never_bare(tmp_path: Path) -> None:
    said: list[str] = []
    setting = StudySetting("x", ("gone.py",), {"framework": "tf1"})
    assert measure_overhead(setting, tmp_path, said.append, False) is None
    assert "session hook" in said[0]


def test_the_user_wants_no_more(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")
    before = children()
    assert (
        measure_overhead(StudySetting("x", (str(tmp_path / "train.py"),)), tmp_path / "out", print, True)
        is None
    )
    assert children() <= before
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "logs"]
    # What a killed one left goes.
    (tmp_path / "out" / "overhead-abc").mkdir()
    assert (
        measure_overhead(StudySetting("x", (str(tmp_path / "train.py"),)), tmp_path / "out", print, True)
        is None
    )
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "logs"]
