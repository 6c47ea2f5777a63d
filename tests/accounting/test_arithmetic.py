"""Sums, means and normalised footprints, against the plain definitions."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footprints import assert_conserved, energies, footprint, footprints, row
from smaragdine.accounting.arithmetic import add, average, over_devices, per, per_step, scale
from smaragdine.accounting.footprint import ROWS, Footprint
from smaragdine.errors import UserError


def test_a_sum_has_the_names_of_all_runs() -> None:
    first = footprint(
        [{"name": "x", "energy_j": 3.0, "count": 2.0}, {"name": "y", "energy_j": 1.0}], idle_j=2.0
    )
    second = footprint([{"name": "x", "energy_j": 4.0, "busy_s": 0.5}, {"name": "z", "energy_j": 5.0}])
    total = add([first, second])
    assert energies(total) == {"x": 7.0, "z": 5.0, "y": 1.0}
    assert list(energies(total)) == ["x", "z", "y"]  # by falling energy
    assert (row(total, "x")["count"], row(total, "x")["busy_s"]) == (3.0, 1.5)
    assert (total.devices["gpu:0"].total_j, total.devices["gpu:0"].idle_j) == (15.0, 2.0)
    assert total.devices["gpu:0"].covered_s == 20.0
    assert_conserved(total)


def test_phases_and_devices_stay_apart() -> None:
    rows = [
        {"name": "x", "energy_j": 3.0, "phase": "forward"},
        {"name": "x", "energy_j": 4.0, "phase": None},
        {"name": "x", "energy_j": 5.0, "phase": "forward", "device": "cpu:0"},
    ]
    total = add([footprint(rows)] * 2)
    found = {(r["device"], r["phase"]): r["energy_j"] for r in total.rows.to_pylist()}
    assert found == {("gpu:0", "forward"): 6.0, ("gpu:0", None): 8.0, ("cpu:0", "forward"): 10.0}


def test_bias_does_not_average_away() -> None:
    runs = [footprint([{"name": "x", "energy_j": 10.0, "uncertainty_j": u, "basis": b}])
            for u, b in ((1.0, "repetition"), (3.0, "prior"))]  # fmt: skip
    assert row(add(runs), "x")["uncertainty_j"] == 4.0
    assert row(average(runs).mean, "x")["uncertainty_j"] == 2.0
    assert row(add(runs), "x")["basis"] == "prior"


def test_an_unknown_uncertainty_makes_the_sum_unknown() -> None:
    known = footprint([{"name": "x", "energy_j": 1.0, "uncertainty_j": 1.0}])
    unknown = footprint([{"name": "x", "energy_j": 1.0}])
    assert row(add([known, unknown]), "x")["uncertainty_j"] is None


@given(st.lists(st.lists(st.floats(0, 1e3), min_size=1, max_size=6), min_size=1, max_size=4))
def test_figures_per_step_are_those_over_all_steps(runs: list[list[float]]) -> None:
    made = [
        footprint(
            [
                {
                    "name": "x",
                    "energy_j": math.fsum(steps),
                    "step_mean_j": statistics.fmean(steps),
                    "step_std_j": statistics.stdev(steps) if len(steps) > 1 else None,
                }
            ],
            steps=len(steps),
        )
        for steps in runs
    ]
    made.append(footprint([{"name": "y", "energy_j": 1.0, "step_mean_j": 1.0}], steps=1))  # a step without x
    steps = [*(value for run in runs for value in run), 0.0]
    total = add(made)
    assert total.devices["gpu:0"].steps == len(steps)
    assert row(total, "x")["step_mean_j"] == pytest.approx(statistics.fmean(steps), abs=1e-9)
    assert row(total, "x")["step_std_j"] == pytest.approx(statistics.stdev(steps), rel=1e-6, abs=1e-6)


def test_scaling_leaves_what_a_step_costs() -> None:
    run = footprint(
        [{"name": "x", "energy_j": 30.0, "uncertainty_j": 6.0, "step_mean_j": 10.0, "step_std_j": 1.0}],
        idle_j=3.0,
        steps=3,
    )
    step = per_step(run)
    assert energies(step) == {"x": 10.0}
    assert row(step, "x")["uncertainty_j"] == 2.0
    assert row(step, "x")["busy_s"] == pytest.approx(1 / 3)
    assert (row(step, "x")["step_mean_j"], row(step, "x")["step_std_j"]) == (10.0, 1.0)
    assert step.devices["gpu:0"].total_j == 11.0
    assert energies(per(run, 60)) == {"x": 0.5}
    assert_conserved(step)


def test_bad_divisors_are_user_errors() -> None:
    run = footprint([{"name": "x", "energy_j": 1.0}])
    for action in (lambda: per_step(run), lambda: per(run, 0), lambda: scale(run, math.nan), lambda: add([])):
        with pytest.raises(UserError):
            action()


def test_all_devices_as_one() -> None:
    run = footprint(
        [
            {"name": "x", "energy_j": 3.0},
            {"name": "x", "energy_j": 4.0, "device": "cpu:0"},
            {"name": "x", "energy_j": 1.0, "device": "cpu:0/core"},  # inside cpu:0 already
            {"name": "x", "energy_j": 9.0, "device": "psys"},
        ],
        idle_j=1.0,
    )
    one = over_devices(run)
    assert list(one.devices) == ["all"]
    assert row(one, "x", "all")["energy_j"] == 7.0
    assert one.devices["all"].total_j == 9.0
    assert one.devices["all"].covered_s == 10.0
    assert_conserved(one)


def test_mean_and_standard_deviation_over_runs() -> None:
    powers = {"x": [(2.0, 1.0), (4.0, 1.0), (6.0, 2.0)], "y": [(3.0, 1.0), (9.0, 1.5)], "z": [(0.0, 0.0)]}
    runs = [
        footprint(
            [
                {"name": name, "energy_j": of[i][0], "busy_s": of[i][1]}
                for name, of in powers.items()
                if i < len(of)
            ],
            idle_j=float(i),
        )
        for i in range(3)
    ]
    found = average(runs)
    spread = {r["name"]: r for r in found.spread.to_pylist()}
    assert found.spread["name"].to_pylist() == found.mean.rows["name"].to_pylist()
    for name, of in powers.items():
        energy_j = [e for e, _ in of] + [0.0] * (3 - len(of))
        assert spread[name]["energy_mean_j"] == pytest.approx(statistics.fmean(energy_j))
        assert spread[name]["energy_std_j"] == pytest.approx(statistics.stdev(energy_j))
        assert energies(found.mean)[name] == pytest.approx(statistics.fmean(energy_j))
        assert spread[name]["runs"] == len(of)
    assert spread["y"]["power_mean_w"] == 4.5  # 3 W and 6 W: the run without it has no power of it
    assert spread["y"]["power_std_w"] == pytest.approx(statistics.stdev([3.0, 6.0]))
    assert spread["z"]["power_mean_w"] is None
    assert spread["x"]["busy_std_s"] == pytest.approx(statistics.stdev([1.0, 1.0, 2.0]))
    assert found.mean.devices["gpu:0"].idle_j == 1.0
    assert_conserved(found.mean)


def test_one_run_has_no_spread() -> None:
    spread = average([footprint([{"name": "x", "energy_j": 1.0}])]).spread.to_pylist()
    assert (spread[0]["energy_std_j"], spread[0]["power_std_w"], spread[0]["busy_std_s"]) == (
        None,
        None,
        None,
    )
    assert spread[0]["power_mean_w"] == 1.0


def test_a_device_that_was_not_measured_is_not_zero() -> None:
    both = footprint([{"name": "x", "energy_j": 4.0}, {"name": "x", "energy_j": 6.0, "device": "gpu:1"}])
    one = footprint([{"name": "x", "energy_j": 2.0}])
    found = average([both, one])
    assert found.mean.devices["gpu:0"].total_j == 3.0
    assert found.mean.devices["gpu:1"].total_j == 6.0
    assert "gpu:1" in found.mean.remarks[-1]
    assert_conserved(found.mean)


def test_a_footprint_without_rows() -> None:
    nothing = footprint([], idle_j=2.0)
    assert add([nothing, nothing]).devices["gpu:0"].total_j == 4.0
    assert average([nothing]).spread.num_rows == 0
    assert over_devices(Footprint(ROWS.empty_table(), {})).devices == {}


@given(st.lists(footprints(), min_size=1, max_size=4), st.floats(1e-6, 1e6))
def test_everything_is_conserved(runs: list[Footprint], factor: float) -> None:
    for made in (
        add(runs),
        average(runs).mean,
        scale(runs[0], factor),
        over_devices(add(runs)),
        per_step(runs[0]),
    ):
        assert_conserved(made)
        assert made.rows.schema.equals(ROWS)
    whole = math.fsum(total.total_j for run in runs for total in run.devices.values())
    assert math.fsum(t.total_j for t in add(runs).devices.values()) == pytest.approx(whole)
    total = add(runs)
    order = [(list(total.devices).index(r["device"]), -r["energy_j"]) for r in total.rows.to_pylist()]
    assert order == sorted(order)
