"""The virtual standard device and the bandit: on data that obey the law, and on the published tables."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from refusal import refused
from smaragdine.allocate.batch_size import Bandit, BatchSize, batch_sizes, best_batch_size, epoch_cost, replay
from smaragdine.allocate.platform import best_platform, leave_one_out, predict, standard_device
from smaragdine.allocate.profile import MeasuredEpoch, Training, read_epochs, read_trainings
from smaragdine.cli import batch as batch_verb
from smaragdine.cli import platform as platform_verb

DATA = os.environ.get("SMARAGDINE_DATA")
published = pytest.mark.skipif(
    not DATA, reason="SMARAGDINE_DATA is not set: the published tables are not here"
)

GPUS = {"slow": (2.0, 0.8), "fast": (0.5, 1.25)}
WORKLOADS = {f"data{n}/net{n}/sgd": (10.0 * (n + 1), 120.0 + 15 * n) for n in range(4)}
LIMITS_W = (100.0, 125.0, 150.0, 175.0, 200.0, 250.0)


def lawful(gpu: str, workload: str, batch: int, limit_w: float) -> MeasuredEpoch:
    """A power that is held at the limit, and a time that goes with its square root."""
    slowness, draw = GPUS[gpu]
    work, appetite = WORKLOADS[workload]
    demand = appetite * draw * (batch / 32) ** 0.1
    power_w = min(limit_w, demand)
    return MeasuredEpoch(
        gpu,
        workload,
        batch,
        limit_w,
        work * slowness * (32 / batch) ** 0.3 * (demand / power_w) ** 0.5,
        power_w,
    )


def everything() -> list[MeasuredEpoch]:
    return [lawful(g, w, b, limit) for g in GPUS for w in WORKLOADS for b in (32, 64) for limit in LIMITS_W]


def test_the_scale() -> None:
    scale = standard_device(everything())
    assert {gpu: math.exp(value) for gpu, value in scale.slowness.items()} == pytest.approx(
        {"slow": 2.0, "fast": 0.5}
    )
    assert {gpu: math.exp(value) for gpu, value in scale.draw.items()} == pytest.approx(
        {"slow": 0.8, "fast": 1.25}
    )
    assert scale.highest_w == {"slow": 250, "fast": 250}


def test_a_lawful_world_is_predicted() -> None:
    for one_point, most in ((True, 0.06), (False, 0.06)):
        missed = leave_one_out(everything(), one_point)
        assert len(missed) == 2 * 4 * 12 - (8 if one_point else 0)
        assert max(abs(miss.time_error) for miss in missed) < most
        assert max(abs(miss.energy_error) for miss in missed) < most


def test_one_point_fixes_what_the_product_gets_wrong() -> None:
    """A workload that is three times as slow on one GPU as the scale says, and hungrier."""
    odd = "data0/net0/sgd"
    epochs = [each for each in everything() if (each.gpu, each.workload) != ("fast", odd)]
    scale = standard_device(epochs)
    truth = lawful("fast", odd, 64, 250.0)
    known = dataclasses.replace(
        lawful("fast", odd, 32, 250.0), time_s=3 * lawful("fast", odd, 32, 250.0).time_s
    )
    assert predict(scale, "fast", odd, 64, 250.0).time_s == pytest.approx(truth.time_s, rel=0.02)
    assert predict(scale, "fast", odd, 64, 250.0, known).time_s == pytest.approx(3 * truth.time_s, rel=0.02)
    # A point below the highest limit, that is not held by it, says as much.
    lower = dataclasses.replace(known, power_limit_w=200.0)
    assert predict(scale, "fast", odd, 64, 250.0, lower).time_s == pytest.approx(3 * truth.time_s, rel=0.02)


def test_best_platform() -> None:
    scale = standard_device(everything())
    limits = dict.fromkeys(GPUS, LIMITS_W)
    ranked = best_platform(scale, "data1/net1/sgd", 32, limits)
    every = [(lawful(g, "data1/net1/sgd", 32, w).energy_j, g) for g in GPUS for w in LIMITS_W]
    assert ranked[0].gpu == min(every)[1]
    assert ranked[0].prediction.energy_j == pytest.approx(min(every)[0], rel=0.03)
    assert ranked[0].cost <= ranked[1].cost
    quick = best_platform(scale, "data1/net1/sgd", 32, limits, cost=lambda each: each.time_s)
    assert quick[0].gpu == "fast"
    refused(
        lambda: predict(scale, "none", "data1/net1/sgd", 32, 100.0), "none is not on the scale", "fast, slow"
    )
    refused(lambda: predict(scale, "fast", "data1/net1/sgd", 7, 100.0), "batch 7 is not on the scale")
    refused(lambda: standard_device([]), "no measurements")


def size(batch: int, epoch: float, *epochs: float | None) -> BatchSize:
    return BatchSize(batch, 100.0, epoch, epoch, 1.0, epochs)


def test_batch_size_by_hand() -> None:
    epochs = [
        MeasuredEpoch("g", "w", batch, limit_w, time_s, power_w)
        for batch, limit_w, time_s, power_w in (
            (8, 100, 10, 90),
            (8, 200, 8, 150),
            (16, 100, 7, 95),
            (16, 200, 5, 180),
        )
    ]
    trainings = [
        Training("w", b, n, 0.5, e)
        for b, each in ((8, (4, 6)), (16, (8, 10)), (32, (1, 1)))
        for n, e in enumerate(each)
    ]
    small, large = batch_sizes(epochs, trainings, "g", "w", 0.5)
    # (90 + 200)/2 · 10 = 1450 against (150 + 200)/2 · 8 = 1400; (95 + 200)/2 · 7 against (180 + 200)/2 · 5.
    assert (small.power_limit_w, small.epoch_cost, small.cost) == (200, 1400, 5 * 1400)
    assert (large.power_limit_w, large.epoch_cost, large.cost) == (200, 950, 9 * 950)
    assert best_batch_size([small, large]) is small
    assert epoch_cost(epochs[0], 1.0, 200) == epochs[0].energy_j == 900
    refused(lambda: batch_sizes(epochs, trainings, "g", "w", 0.9), "w on g to 0.9")
    never = size(4, 1.0, 3, None)
    assert never.cost == math.inf
    refused(lambda: best_batch_size([never]), "no batch size always reaches")


def test_the_bandit_prunes_and_settles() -> None:
    sizes = [
        size(8, 1.0, None),
        size(16, 1.0, 30, 31),
        size(32, 1.0, 10, 11),
        size(64, 1.0, 20, 21),
        size(128, 1.0, 90),
    ]
    default = dataclasses.replace(sizes[3], epoch_cost=1.5)
    found = replay(sizes, default, 60, seed=3)
    assert found.oracle == 10.5
    assert found.default == 20.5 * 1.5
    # 64 first; 32 is better; 16 and 128 are stopped at twice the best, 8 is never tried.
    assert found.batches[:2] == [64, 32]
    assert set(found.batches) <= {32, 64}
    assert found.batches[-40:] == [32] * 40
    assert len(found.costs) == 60
    assert found.regret[-1] == pytest.approx(sum(found.costs) - 60 * 10.5)
    assert found.regret[-1] < 60 * (found.default - found.oracle)
    assert replay(sizes, default, 60, seed=3) == found
    assert replay(sizes, default, 60, seed=4).costs != found.costs


def test_what_a_stopped_job_cost_is_paid() -> None:
    sizes = [size(16, 1.0, 100), size(32, 1.0, 10)]
    found = replay(sizes, sizes[1], 4)
    # 10; then 16 is stopped at 20 and 32 runs instead; then 32 alone.
    assert found.costs == [10, 20 + 10, 10, 10]
    assert found.batches == [32] * 4


def test_the_bandit_refuses() -> None:
    refused(lambda: Bandit([8, 16], 32, np.random.default_rng(0)), "default batch size 32")
    sizes = [size(16, 1.0, None), size(32, 1.0, 10)]
    assert replay(sizes, sizes[1], 5).batches == [32] * 5


@published
def test_leave_one_out_on_the_published_tables() -> None:
    files = sorted((Path(DATA or "") / "zeus").glob("summary_power_*.csv"))
    epochs = [each for file in files for each in read_epochs(file)]
    assert {each.gpu for each in epochs} == {"a40", "p100", "rtx6000", "v100"}
    known, blind = leave_one_out(epochs), leave_one_out(epochs, one_point=False)
    medians = [np.median([abs(miss.energy_error) for miss in each]) for each in (known, blind)]
    assert medians[0] < 0.09  # docs/measurements has the figures
    assert medians[0] < medians[1] / 3
    assert np.median([abs(miss.time_error) for miss in known]) < 0.08


@published
def test_the_bandit_on_the_published_tables() -> None:
    folder = Path(DATA or "") / "zeus"
    epochs, trainings = (
        read_epochs(folder / "summary_power_v100.csv"),
        read_trainings(folder / "summary_train.csv"),
    )
    sizes = batch_sizes(epochs, trainings, "v100", "cifar100/shufflenetv2/adadelta", 0.6)
    best = best_batch_size(sizes)
    assert (best.batch, best.power_limit_w) == (128, 100)
    default = next(each for each in sizes if each.batch == 1024)
    found = replay(sizes, default, 100)
    assert np.mean(found.costs[-20:]) == pytest.approx(best.cost, rel=0.1)
    assert found.regret[-1] < 0.3 * 100 * (default.cost - best.cost)


def test_bad_tables(tmp_path: Path) -> None:
    file = tmp_path / "summary_power_x.csv"
    head = "dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\n"
    refused(lambda: read_epochs(file), "cannot be read")
    for text, words in (
        ("a,b\n1,2\n", "no column dataset"),
        (head, "no rows"),
        (head + "d,n,8,o,100\n", "cut off"),
        (head + "d,n,8.5,o,100,1,50\n", "not a whole number"),
        (head + "d,n,8,o,100,x,50\n", "bad time_per_epoch"),
        (head + "d,n,8,o,100,0,50\n", "above 0"),
        (head + "d,n,8,o,100,nan,50\n", "bad time_per_epoch"),
    ):
        file.write_text(text)
        refused(lambda: read_epochs(file), words)
    file.write_text(head + "d,n,8,o,100,2,50\n")
    assert read_epochs(file) == [MeasuredEpoch("x", "d/n/o", 8, 100, 2, 50)]
    file.write_text(
        "dataset,network,batch_size,optimizer,run,target_metric,target_epoch\nd,n,8,o,1,0.5,nan\n"
    )
    assert read_trainings(file) == [Training("d/n/o", 8, 1, 0.5, None)]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """The lawful world as tables, and trainings in which the small batch takes fewer epochs."""
    head = ["dataset", "network", "optimizer", "batch_size"]
    found: dict[str, Path] = {}
    for gpu in GPUS:
        found[gpu] = tmp_path / f"summary_power_{gpu}.csv"
        rows = [
            [*each.workload.split("/"), each.batch, each.power_limit_w, each.time_s, each.power_w]
            for each in everything()
            if each.gpu == gpu
        ]
        _write(found[gpu], [*head, "power_limit", "time_per_epoch", "average_power"], rows)
    found["train"] = tmp_path / "train.csv"
    trainings = [
        ["data0", "net0", "sgd", b, run, 0.5, e + run] for b, e in ((32, 10), (64, 30)) for run in (1, 2)
    ]
    _write(found["train"], [*head, "run", "target_metric", "target_epoch"], trainings)
    return found


def _write(file: Path, head: list[str], rows: list[list[object]]) -> None:
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([head, *rows])


def test_platform_verb(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    tables = ["--epochs", f"slow={files['slow']}", "--epochs", f"fast={files['fast']}"]
    job = ["--workload", "data1/net1/sgd", "--batch", "64", "--leave-one-out"]
    assert platform_verb.main([*tables, *job, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["gpu"]: each["slowness"] for each in found["scale"]} == pytest.approx(
        {"slow": 2.0, "fast": 0.5}
    )
    every = [(lawful(g, "data1/net1/sgd", 64, w).energy_j, g) for g in GPUS for w in LIMITS_W]
    assert found["platforms"][0]["gpu"] == min(every)[1]
    assert found["platforms"][0]["energy_j"] == pytest.approx(min(every)[0], rel=0.03)
    assert [each["gpu"] for each in found["leave_one_out"]] == ["fast", "slow", "all"] * 2
    assert platform_verb.main([*tables, *job]) == 0
    assert "best first" in capsys.readouterr().out
    refused(lambda: platform_verb.main([]), "no table")
    refused(lambda: platform_verb.main([*tables, *tables]), "slow is given twice")
    refused(lambda: platform_verb.main(["--epochs", "slow"]), "not GPU=FILE")
    refused(lambda: platform_verb.main([*tables, "--workload", "data1/net1/sgd"]), "--batch N")


def test_batch_verb(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--epochs", f"fast={files['fast']}", "--trainings", str(files["train"]), "--target", "0.5"]
    words += ["--workload", "data0/net0/sgd"]
    assert batch_verb.main([*words, "--json", "--recurrences", "30"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["batch"] == 32
    assert found["default"]["batch"] == 64
    assert found["default"]["power_limit_w"] == 250
    assert found["replays"]["regret"] < found["replays"]["regret_of_default"]
    assert batch_verb.main(words) == 0
    assert "the best costs" in capsys.readouterr().out
    refused(lambda: batch_verb.main([*words, "--default", "8"]), "batch size 8", "32, 64")
    refused(lambda: batch_verb.main([*words, "--eta", "2"]), "not between 0 and 1")
    refused(
        lambda: batch_verb.main([*words[:4], "--target", "0.9", *words[6:]]), "to 0.9 cannot be looked at"
    )
