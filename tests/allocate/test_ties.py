"""Answers that cannot be told apart: the one that was profiled, then the fastest, as if all were tried."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_allocate import every_allocation, instances

from smaragdine.allocate.methods import brute_force, highest_cost, inside, preferred
from smaragdine.allocate.model import Allocation, Choices, Objective, step_time_s
from smaragdine.allocate.optimal import optimal
from smaragdine.cli.allocate import main
from smaragdine.hetero.shards import read_allocation


@settings(max_examples=150, deadline=None)
@given(instances(), st.sampled_from([0.0, 1.0, 40.0, 1e9]), st.integers(0, 4), st.integers(2, 9))
def test_the_one_preferred_is_that_of_all_allocations(
    instance: tuple[list[Choices], Objective, int], margin: float, low: int, high: int
) -> None:
    gpus, objective, total = instance
    profiled = {each.gpu: (low, max(low, high)) for each in gpus}
    every = list(every_allocation(gpus, objective, total))
    if objective.slowdown is not None:
        longest = min(step for _, step, _, _ in every) * (1 + objective.slowdown)
        every = [each for each in every if each[1] <= longest]

    def outside(split: tuple[int, ...]) -> bool:
        return any(b and not low <= b <= max(low, high) for b in split)

    cheapest = optimal(gpus, objective, total)
    most = highest_cost(cheapest, margin)
    tied = [each for each in every if each[0] <= most]
    best = min((outside(split), step, paid) for paid, step, _, split in tied)
    searched = preferred(gpus, objective, total, cheapest, margin, profiled)
    tried = brute_force(gpus, objective, total, most, profiled)

    def rank(found: Allocation) -> tuple[bool, float, float]:
        return not inside(found, profiled), step_time_s(found.shares, objective.all_reduce_s), found.cost

    assert rank(tried) == pytest.approx(best)
    # The search keeps the cheapest where nothing is better than it but for its cost.
    assert rank(searched)[:2] == pytest.approx(best[:2])
    assert best[2] - 1e-9 <= searched.cost or math.isclose(searched.cost, cheapest.cost)
    assert searched.cost <= most


def profile(file: Path, spread: float) -> Path:
    """A step of 10 ms and 1 ms a sample at 200 W, three times each; `spread` of the first and the last."""
    rows = [
        {
            "gpu": "any",
            "batch": batch,
            "power_limit_w": 250.0,
            "repeat": repeat,
            "steps": 1,
            "time_s": time_s,
            # A little less for a large batch, far less than repeats differ by: the cheapest is uneven.
            "energy_j": time_s * (200 - batch / 1e3) * (1 + spread * (repeat - 1)),
            "out_of_memory": False,
            "idle_w": 50.0,
            "wait_w": 60.0,
        }
        for batch in (32, 64, 128, 192)
        for repeat in range(3)
        for time_s in [0.010 + 0.001 * batch]
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


@pytest.mark.parametrize("spread", [0.02, 0.0])
def test_two_equal_gpus_share_equally_where_nothing_tells_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spread: float
) -> None:
    file = profile(tmp_path / "profile.parquet", spread)
    words = ["--gpu", f"a={file}", "--gpu", f"b={file}", "--global-batch", "256"]
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    methods = {each["method"]: each for each in json.loads(out)["methods"]}
    (tmp_path / "found.json").write_text(out)
    for name in ("brute-force", "optimal"):
        found = methods[name]
        batches = [each["batch"] for each in found["allocation"]]
        if not spread:
            # What differs, however little, is known to.
            assert "tie" not in found
            assert max(batches) > 192
            continue
        assert batches == [128, 128]
        tie = found["tie"]
        assert max(each["batch"] for each in tie["allocation"]) > 192  # nobody profiled that
        assert tie["cost"] < found["cost"] <= tie["cost"] + tie["margin"]
    if not spread:
        return
    assert f"({', '.join(['heuristic'])})" in err  # the others' answers were profiled
    assert read_allocation(tmp_path / "found.json").batches == (128, 128)
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "optimal: a tie." in text
    assert "of such answers the fastest inside what was profiled is given" in text
