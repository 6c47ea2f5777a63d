"""Comparisons of runs in simulated time: equal programs, and one of which a layer has 10 % more to do.

`bench/comparisons.py` does the same with 200 programs of each kind.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from footprints import footprint
from simulated_runs import Neighbour, layer_of, make_model, record_run, three_sides
from smaragdine.accounting.comparison import (
    Change,
    Comparison,
    compare,
    to_json,
)
from smaragdine.accounting.footprint import Footprint, save
from smaragdine.accounting.intervals import grouped
from smaragdine.accounting.similarity import LEAST_NAMES, beside_company
from smaragdine.cli.compare import main
from smaragdine.cli.report import main as report
from smaragdine.errors import UserError
from smaragdine.recording.folder import write_info
from smaragdine.recording.reader import open_recording
from smaragdine.stats import half_width, prior_of_variances

PROGRAMS = 4


def claimed(found: Comparison) -> list[Change]:
    judged = [found.total, found.idle, *found.devices, *found.changes]
    return [change for change in judged if change.verdict in ("more", "less")]


@pytest.mark.parametrize(
    ("device", "neighbour"), [("gpu:0", "none"), ("cpu:0", "none"), ("cpu:0", "steady"), ("cpu:0", "fickle")]
)
def test_runs_in_simulated_time(tmp_path: Path, device: str, neighbour: Neighbour) -> None:
    found = wrong = false = 0
    for seed in range(PROGRAMS):
        a, b, c = three_sides(seed, device, neighbour, tmp_path)
        false += bool(claimed(compare(a, b)))
        layers_a, layers_c = ([grouped(run, "layer", 2) for run in side] for side in (a, c))
        more = [change.name for change in compare(layers_a, layers_c).changes if change.verdict == "more"]
        found += f"net/{layer_of(seed)}" in more
        names = claimed(compare(a, c))
        wrong += sum(f"/{layer_of(seed)}/" not in change.name for change in names if "/" in change.name)
        for other in (b, c):
            single = compare(a[:1], other[:1])
            assert not claimed(single)
            assert single.total.verdict in ("unknown", "inside the noise")
    assert false == 0
    assert wrong <= 1  # of some 25 names
    if neighbour != "fickle":
        assert found == PROGRAMS


def test_a_layer_shows_where_runs_differ_as_a_whole() -> None:
    """Runs differ by 3 % as a whole, their names by 0.3 %: 5 % more in one of them is no noise, and 3 % more
    in all of them is."""
    draw = random.Random(3)

    def run(level: float, more: float = 1.0) -> Footprint:
        factors = [level * draw.gauss(1, 0.003) * (more if i == 3 else 1) for i in range(20)]
        return footprint(
            [{"name": f"net/{i}/x", "energy_j": (1 + i) * factor} for i, factor in enumerate(factors)]
        )

    a = [run(level) for level in (0.97, 1.0, 1.03)]
    found = compare(a, [run(level, 1.05) for level in (0.98, 1.01, 1.04)])
    assert [change.name for change in claimed(found)] == ["net/3/x"]
    named = {change.name: change for change in found.changes}
    assert named["net/3/x"].half_width_j is not None
    assert named["net/3/x"].difference_j > named["net/3/x"].half_width_j
    assert not claimed(compare(a, [run(level) for level in (1.0, 1.03, 1.06)]))
    # All of them 20 % more: the sum says so, and each name by its own spread over runs.
    whole = compare(a, [run(level) for level in (1.20, 1.201, 1.202)])
    assert whole.total.verdict == "more"


def test_what_noise_makes_of_a_name_holds_its_company_too() -> None:
    """A name that stands still while its company takes a tenth less has not changed."""
    draw = random.Random(4)

    def side(level: float) -> npt.NDArray[np.float64]:
        levels = [level] * 9 + [1.0]
        return np.array([[10 * each * draw.gauss(1, 0.001) for each in levels] for _ in range(3)])

    still = beside_company(side(1.0), side(0.9))[-1]
    assert still is not None
    assert still.common_j == pytest.approx(-1.0, rel=0.1)
    level_a = [footprint([{"name": f"n{i}", "energy_j": x} for i, x in enumerate(row)]) for row in side(1.0)]
    level_b = [footprint([{"name": f"n{i}", "energy_j": x} for i, x in enumerate(row)]) for row in side(0.9)]
    found = {change.name: change.verdict for change in compare(level_a, level_b).changes}
    assert found.pop("n9") == "inside the noise"
    assert set(found.values()) == {"less"}


def test_few_names_and_single_runs_have_no_company() -> None:
    few = np.ones((3, LEAST_NAMES - 1)) * np.array([[1.0], [1.1], [0.9]])
    assert beside_company(few, few) == [None] * (LEAST_NAMES - 1)
    one = np.ones((1, 10))
    assert beside_company(one, one) == [None] * 10
    copies = np.ones((3, 10))
    assert beside_company(copies, copies) == [None] * 10


def test_a_side_of_one_run_spreads_as_the_other() -> None:
    draw = np.random.default_rng(5)
    a = 10 * draw.normal(1, 0.01, (3, 30))
    both, alone = beside_company(a, a), beside_company(a, a[:1])
    pairs = [
        (x.spread, y.spread) for x, y in zip(both, alone, strict=True) if x is not None and y is not None
    ]
    assert len(pairs) == 30
    wider = math.sqrt((1 / 3 + 1) / (1 / 3 + 1 / 3))
    of_three, of_one = (sum(spread.error for spread in each) for each in zip(*pairs, strict=True))
    assert of_one == pytest.approx(of_three * wider, rel=0.1)
    for one, other in pairs:
        assert other.freedom < one.freedom
        assert half_width(other) > half_width(one)


def test_variances_of_names_are_drawn_together() -> None:
    """Names that all spread alike share what they know; names that do not keep their own."""
    draw = np.random.default_rng(6)
    alike = draw.chisquare(2, 20_000) / 2 * 1e-4
    level, worth = prior_of_variances(np.log(alike), 2)
    assert math.exp(level) == pytest.approx(1e-4, rel=0.05)
    assert worth > 50
    # An inverse-χ² of 6 free values around 4e-4.
    unlike = 4e-4 * 6 / draw.chisquare(6, 20_000) * draw.chisquare(2, 20_000) / 2
    level, worth = prior_of_variances(np.log(unlike), 2)
    assert math.exp(level) == pytest.approx(4e-4, rel=0.05)
    assert worth == pytest.approx(6, rel=0.1)


def test_by_layer_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file, more in (("a", 0.0), ("b", 1.0)):
        rows = [{"name": f"net/{i}/{op}", "energy_j": 2.0 + more * (i == 1)} for i in range(2) for op in "xy"]
        save(footprint(rows), tmp_path / f"{file}.json")
    assert main([str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--by", "layer"]) == 0
    said = capsys.readouterr().out
    assert "net/1 " in said
    assert "net/1/x" not in said


def test_two_recordings_by_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(1, "cpu:0")
    runs = [str(record_run(tmp_path / str(seed), model, seed)) for seed in range(2)]
    assert report([*runs, "--by", "layer", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {change["name"] for change in found["changes"]}
    assert {"net/layer_0", "net/head", "net/AdamW"} < names
    assert len(names) == 9
    parts_j = math.fsum(change["difference_j"] for change in found["changes"])
    assert parts_j == pytest.approx(found["total"]["difference_j"])
    for by in ("step", "device"):
        with pytest.raises(UserError, match="--by layer"):
            report([*runs, "--by", by])


def test_a_run_that_was_cut_short_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(3, "cpu:0")
    runs = [record_run(tmp_path / str(seed), model, seed) for seed in range(2)]
    assert report([str(run) for run in runs]) == 0
    assert "its whole run" not in capsys.readouterr().out
    whole = open_recording(runs[1]).info
    for status, more, said in (
        ("killed", {"signal": 9}, "the program was killed by SIGKILL"),
        ("failed", {"exit_code": 3}, "the program failed with exit code 3"),
    ):
        write_info(runs[1], {**whole, "status": status, **more})
        assert report([str(run) for run in runs]) == 0
        assert f"! B: {said}: its whole run is what it did until then" in capsys.readouterr().out


def test_memory_without_operations_is_not_compared() -> None:
    def run(energy_j: float) -> Footprint:
        made = footprint([{"name": "x", "device": "cpu:0", "energy_j": energy_j}], idle_j=1.0)
        memory = dataclasses.replace(made.devices["cpu:0"], total_j=5.0, idle_j=5.0)
        return dataclasses.replace(made, devices={**made.devices, "dram:0": memory})

    found = compare([run(x) for x in (1.0, 1.01, 0.99)], [run(x) for x in (2.0, 2.01, 1.99)])
    assert [change.name for change in found.devices] == ["cpu:0"]
    assert found.idle.a_j == pytest.approx(1.0)  # the processor's
    assert {one.name: one.a_j for one in found.unshared} == {"dram:0": pytest.approx(5.0)}
    assert to_json(found)["unshared"]["dram:0"]["b_j"] == pytest.approx(5.0)
