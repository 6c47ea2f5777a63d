"""Unequal shards: two ranks end with the weights of one that took every global batch whole."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import TIMEOUT_S, environment
from nvml_fake import GpuSpec, in_process, nvml_environment, settings_now
from refusal import refused
from smaragdine.hetero.shards import (
    MeasuredBlock,
    ShardSampler,
    checked_batches,
    checked_limits,
    gpus_of,
    read_allocation,
    set_limits,
    shares,
)

torch = pytest.importorskip("torch")

import smaragdine.hetero  # noqa: E402

RANKS = Path(__file__).parents[1] / "models" / "hetero_ranks.py"
SPLIT = [3, 5]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of two ranks and of the reference, what each rank saw, and what they printed."""
    folder = tmp_path_factory.mktemp("hetero")
    places = [(0, 1), (0, 2), (1, 2)]
    env = environment({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
    started = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(rank), str(world), str(folder), json.dumps(SPLIT)],
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank, world in places
    ]
    try:
        said = [each.communicate(timeout=TIMEOUT_S)[1] for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0, 0, 0], said
    found: dict[str, Any] = {
        name: torch.load(folder / f"{name}.pt") for name in ("reference", "rank0", "rank1")
    }
    parts = [json.loads((folder / f"parts{rank}.json").read_text()) for rank in range(2)]
    return {**found, "parts": parts, "said": said[1:]}


def furthest(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize(
    ("case", "reference", "tolerance"),
    [
        ("float64", "float64", 1e-12),
        ("accumulated", "accumulated", 1e-12),
        ("tokens", "tokens", 1e-12),
        ("empty", "empty", 1e-12),
        ("empty tokens", "empty tokens", 1e-12),
        ("float32", "float32", 2e-5),
        ("mixed", "float32", 2e-5),
    ],
)
def test_same_weights_as_one_device(
    trained: dict[str, Any], case: str, reference: str, tolerance: float
) -> None:
    expected = trained["reference"][reference]
    assert furthest(trained["rank0"][case], expected) < tolerance
    # No bit apart, or the ranks would drift.
    assert furthest(trained["rank0"][case], trained["rank1"][case]) == 0


def test_cases_differ_from_their_beginning_and_each_other(trained: dict[str, Any]) -> None:
    """What stays as it was would be equal to anything."""
    reference = trained["reference"]
    assert furthest(reference["float64"], reference["accumulated"]) > 1e-3
    assert furthest(reference["float64"], reference["empty"]) > 1e-3


def test_parts_of_the_last_batch(trained: dict[str, Any]) -> None:
    first, second = trained["parts"]
    # 37 = 4 × 8 + 5, of which 3 : 5 is 2 : 3; and of one sample nothing, with a sample that stands in.
    assert first["float64"] == 3 * [*[[3, 3]] * 4, [2, 2]]
    assert second["float64"] == 3 * [*[[5, 5]] * 4, [3, 3]]
    assert first["empty"][4] == [0, 1]
    assert second["empty"][4] == [1, 1]


def test_time_and_energy_are_printed_once(trained: dict[str, Any]) -> None:
    first, second = trained["said"]
    assert "Time (s): " in first
    assert "Energy (J): " in first
    assert "cpu:0 " in first
    assert second == ""


@given(st.integers(0, 10**6), st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_shares(total: int, batches: list[int]) -> None:
    found = shares(total, batches)
    assert sum(found) == total
    for share, batch in zip(found, batches, strict=True):
        assert abs(share - Fraction(total * batch, sum(batches))) < 1
    assert shares(sum(batches), batches) == batches


def test_shares_by_largest_remainder() -> None:
    assert shares(5, [3, 5]) == [2, 3]  # 1.875 : 3.125
    assert shares(1, [3, 5]) == [0, 1]
    assert shares(1, [4, 4]) == [1, 0]
    assert shares(0, [3, 5]) == [0, 0]


@given(
    st.integers(0, 60),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_every_sample_once(
    count: int, batches: list[int], epoch: int, shuffle: bool, drop_last: bool
) -> None:
    ranks = [ShardSampler(count, batches, rank, shuffle, 7, drop_last) for rank in range(len(batches))]
    for sampler in ranks:
        sampler.epoch = epoch
    whole = ShardSampler(count, [sum(batches)], 0, shuffle, 7, drop_last)
    whole.epoch = epoch
    expected = list(whole)
    assert len({len(sampler) for sampler in ranks}) == 1
    for n, batch in enumerate(zip(*ranks, strict=True)):
        parts = [list(sampler.parts())[n] for sampler in ranks]
        together = [i for part, mine in zip(parts, batch, strict=True) for i in mine[: part.samples]]
        assert together == expected[n]
        assert all(mine for mine in batch)
        assert {part.global_samples for part in parts} == {len(together)}
    assert sum(map(len, expected)) == (count - count % sum(batches) if drop_last else count)


def test_another_order_every_epoch() -> None:
    sampler = ShardSampler(100, [10], 0, True, 7, False)
    first = list(sampler)
    assert first == list(sampler)
    sampler.epoch = 1
    assert first != list(sampler)
    assert first != list(ShardSampler(100, [10], 0, True, 8, False))


def test_loader_takes_a_data_loaders_options() -> None:
    shards = smaragdine.hetero.split([4], record=False)
    loader = shards.loader(range(10), shuffle=False, collate_fn=tuple)
    assert list(loader) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert len(loader) == 3
    assert shards.part is not None
    assert (shards.part.samples, shards.part.global_samples) == (2, 2)
    loss = torch.tensor(3.0, requires_grad=True)
    assert shards.weight(loss).item() == 3
    assert shards.weight(loss, 5).item() == 3
    assert shards.weight(loss, 6, summed=True).item() == 0.5


@pytest.fixture
def two_ranks() -> smaragdine.hetero.Shards:
    """As the first of two: nobody is asked for anything here."""
    return smaragdine.hetero.Shards([3, 5], 0, None, MeasuredBlock(0, 2, None, None, False, None))


def test_warns_once_of_batch_norm(
    two_ranks: smaragdine.hetero.Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.parallel.DistributedDataParallel", type("Wrapped", (), {}))
    monkeypatch.setattr("torch.nn.parallel.DistributedDataParallel.__init__", lambda *_, **__: None)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.warns(UserWarning, match="SyncBatchNorm"):
        two_ranks.wrap(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two_ranks.wrap(model)
        two_ranks._warned = False
        two_ranks.wrap(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))
        two_ranks.wrap(torch.nn.GroupNorm(1, 2))


def allocation(*methods: tuple[str, float, list[tuple[int, float]]]) -> dict[str, Any]:
    return {
        "methods": [
            {
                "method": method,
                "cost": cost,
                "allocation": [
                    {"gpu": f"g{n}", "batch": batch, "power_limit_w": limit}
                    for n, (batch, limit) in enumerate(rows)
                ],
            }
            for method, cost, rows in methods
        ]
    }


def test_allocation(tmp_path: Path) -> None:
    file = tmp_path / "allocation.json"
    values = allocation(("baseline", 9.0, [(4, 100), (4, 60)]), ("optimal", 8.0, [(5, 100), (3, 70)]))
    file.write_text(json.dumps(values))
    assert read_allocation(file).batches == (5, 3)
    assert read_allocation(file).power_limits_w == (100, 70)
    assert read_allocation(file, "baseline").batches == (4, 4)
    refused(lambda: read_allocation(file, "heuristic"), "no method heuristic", "baseline, optimal")
    file.write_text(json.dumps(allocation(("optimal", 8.0, [(8, 100), (0, 70)]))))
    refused(lambda: read_allocation(file), "gives rank 1 no samples")
    for text in ("", "{}", "[1]", '{"methods": []}', '{"methods": [{"method": "optimal", "cost": 1}]}'):
        file.write_text(text)
        refused(lambda: read_allocation(file), "is no allocation", "smaragdine allocate")
    refused(lambda: read_allocation(tmp_path / "none.json"), "cannot be read")


def test_bad_splits(tmp_path: Path) -> None:
    for bad in ([], [3, -1], [3, 1.5], [True], ["3"], [0]):
        refused(lambda bad=bad: checked_batches(bad))
    refused(lambda: smaragdine.hetero.split([3, 5]), "for 2 ranks", "there are 1 ranks")
    refused(lambda: smaragdine.hetero.split([3], power_limits=True), "no power limits")
    refused(lambda: smaragdine.hetero.split([3], power_limits=[100, 60]), "2 power limits for 1 ranks")
    refused(lambda: checked_limits([0], 1), "not a power above 0 W")
    shards = smaragdine.hetero.split([3], record=False)
    refused(lambda: shards.loader(range(3), batch_size=4), "batch_size", "the split decides")
    refused(lambda: shards.loader(iter(range(3))), "cannot be split")
    refused(lambda: shards.weight(torch.tensor(1.0)), "does not know the samples")


def test_limits_stand_for_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in nvml_environment(tmp_path, [GpuSpec(), GpuSpec()]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SMARAGDINE_LIMITS_JOURNAL", str(tmp_path / "limits" / "journal"))
    spec = Path(os.environ["FAKE_NVML"])
    first, second = GpuSpec().at(0).uuid, GpuSpec().at(1).uuid
    with in_process(tmp_path):
        with contextlib.ExitStack() as opened:
            set_limits(opened, [(second, 150.0), (first, 200.0)])
            assert settings_now(spec) == {(0, "l"): 200_000, (1, "l"): 150_000}
        assert settings_now(spec) == {(0, "l"): 700_000, (1, "l"): 700_000}
        with contextlib.ExitStack() as opened:
            refused(lambda: set_limits(opened, [(first, 5.0)]), "outside the device's range")
            refused(lambda: set_limits(opened, [("GPU-x", 150.0)]), "NVML does not know GPU-x")
    assert settings_now(spec) == {(0, "l"): 700_000, (1, "l"): 700_000}


GPUS = ("gpu:0", "gpu:1", "gpu:2")


def test_all_gpus_of_a_machines_ranks_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the rank that records sees the second alone."""
    for name, value in nvml_environment(tmp_path, [GpuSpec(), GpuSpec(), GpuSpec()]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    uuids = [GpuSpec().at(n).uuid for n in range(len(GPUS))]
    with in_process(tmp_path):
        assert gpus_of([uuids[1], uuids[0], uuids[1]]) == ([uuids[1], uuids[0]], [])
        assert gpus_of([None, None]) == ([], [])
        assert gpus_of([uuids[0], "GPU-of-a-container"]) == ([uuids[0]], ["GPU-of-a-container"])
    with smaragdine.record(tmp_path / "all", gpus=[uuids[1], uuids[0]]):
        time.sleep(0.3)
    with smaragdine.record(tmp_path / "mine"):
        time.sleep(0.3)
    found = {
        name: {channel.device for channel in smaragdine.open(tmp_path / name).channels} & set(GPUS)
        for name in ("all", "mine")
    }
    assert found == {"all": {"gpu:0", "gpu:1"}, "mine": {"gpu:1"}}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("at", ["the recording's end", "reading it"])
def test_what_fails_at_the_end_fails_on_every_rank(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """None waits for a word of the rank that records."""
    monkeypatch.delenv("SMARAGDINE_SPOOL", raising=False)
    told: list[Any] = []

    def fail() -> None:
        raise OSError("the disk is full")

    def hear(mine: Any) -> list[Any]:
        told.append(mine)
        return [mine, (None, "")]

    records, waits = (MeasuredBlock(rank, 2, None, None, True, None) for rank in range(2))
    monkeypatch.setattr(records, "_gather", hear)
    if at == "reading it":
        monkeypatch.setattr(records, "_used", fail)
    else:
        records._open.callback(fail)
    refused(lambda: records.end(failed=False), "the disk is full")
    words = iter(told)
    monkeypatch.setattr(waits, "_gather", lambda mine: [next(words), mine])
    refused(lambda: waits.end(failed=False), "the disk is full")
    assert next(words, None) is None


def test_limits_without_a_gpu() -> None:
    with contextlib.ExitStack() as opened:
        shards = smaragdine.hetero.split([4], power_limits=[100.0], record=False)
        refused(lambda: opened.enter_context(shards), "no GPU to set a power limit on", "this rank has none")


def test_several_ranks_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(lambda: smaragdine.hetero.split([3, 5]), "init_process_group")
