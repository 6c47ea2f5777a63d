"""Correlation and mean difference, against numpy's own and the paper's figure."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from footprints import assert_conserved, footprint, footprints
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.similarity import (
    constant_power,
    correlation,
    matrix,
    mean_difference,
    scores,
    time_alone,
    values,
)
from smaragdine.errors import UserError

FIGURE_6 = [(21, 15), (21, 15), (54, 23), (54, 23), (118, 59), (118, 59), (184, 92), (100, 50), (200, 100)]


def made(energy_j: list[float], busy_s: list[float] | None = None, first: int = 0) -> Footprint:
    times = busy_s or [1.0] * len(energy_j)
    return footprint(
        [{"name": f"x{first + i}", "energy_j": e, "busy_s": times[i]} for i, e in enumerate(energy_j)]
    )


def test_figure_6_of_the_paper() -> None:
    a, b = made([float(x) for x, _ in FIGURE_6]), made([float(y) for _, y in FIGURE_6])
    found = correlation(a, b, "energy")
    assert found.value is not None
    assert round(found.value, 4) == 0.9958
    assert mean_difference(a, b) == pytest.approx(statistics.fmean(y - x for x, y in FIGURE_6))


def test_power_is_not_energy() -> None:
    a, b = made([1.0, 2.0, 9.0], [1.0, 1.0, 3.0]), made([2.0, 1.0, 9.0], [2.0, 2.0, 1.0])
    found = correlation(a, b, "power")
    assert found.value == pytest.approx(np.corrcoef([1, 2, 3], [1, 0.5, 9])[0, 1])
    assert mean_difference(a, b, "power") == pytest.approx((0 - 1.5 + 6) / 3)


def test_names_on_one_side_are_listed_and_left_out() -> None:
    a, b = made([1.0, 2.0, 5.0, 7.0]), made([3.0, 9.0, 1.0, 4.0], first=1)
    found = correlation(a, b)
    assert found.value == pytest.approx(np.corrcoef([2, 5, 7], [3, 9, 1])[0, 1])
    assert (found.common, found.only_a, found.only_b) == (3, (("x0", None),), (("x4", None),))


def test_phases_are_different_names() -> None:
    a = footprint([{"name": "x", "phase": "forward", "energy_j": 1.0}])
    b = footprint([{"name": "x", "phase": "backward", "energy_j": 1.0}])
    assert correlation(a, b).common == 0


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ([1.0], [2.0], "1 common name, and it takes two"),
        ([], [], "no common names"),
        ([0.1] * 3, [1.0, 2.0, 3.0], "the same in A"),
        ([1.0, 2.0, 3.0], [0.0] * 3, "the same in B"),
    ],
)
def test_no_correlation_has_a_reason(a: list[float], b: list[float], reason: str) -> None:
    found = correlation(made(a), made(b))
    assert found.value is None
    assert reason in found.reason


def test_no_common_name_has_no_difference() -> None:
    assert mean_difference(made([1.0]), made([1.0], first=1)) is None


def test_time_alone_scores_the_busy_times() -> None:
    a, b = made([5.0, 1.0, 8.0], [1.0, 3.0, 2.0]), made([2.0, 2.0, 9.0], [2.0, 5.0, 1.0])
    found = scores(a, b)
    assert found.time_alone_energy.value == pytest.approx(np.corrcoef([1, 3, 2], [2, 5, 1])[0, 1])
    assert found.time_alone_energy == time_alone(a, b)
    assert found.floor.value == pytest.approx(np.corrcoef([5, 1, 8], [2, 5, 1])[0, 1])
    assert found.time_alone_power.value is None
    assert found.energy == correlation(a, b, "energy")
    assert found.power == correlation(a, b, "power")


def test_time_alone_has_each_devices_mean_power() -> None:
    run = footprint(
        [
            {"name": "x", "energy_j": 300.0, "busy_s": 1.0},
            {"name": "y", "energy_j": 100.0, "busy_s": 3.0},
            {"name": "x", "energy_j": 12.0, "busy_s": 4.0, "device": "cpu:0"},
        ]
    )
    flat = constant_power(run)
    assert values(flat, "energy", "gpu:0") == {("y", None): 300.0, ("x", None): 100.0}
    assert values(flat, "energy", "cpu:0") == {("x", None): 12.0}
    assert values(flat, "energy") == {("y", None): 300.0, ("x", None): 112.0}


def test_one_device_of_several() -> None:
    by_device = {"cpu:0": [1.0, 2.0, 4.0], "gpu:0": [4.0, 3.0, 0.0]}
    rows = [
        {"name": f"x{i}", "energy_j": energy_j, "device": device}
        for device, of in by_device.items()
        for i, energy_j in enumerate(of)
    ]
    run, other = footprint(rows), made([1.0, 2.0, 4.0])
    assert correlation(run, run, device="cpu:0").value == pytest.approx(1)
    assert correlation(run, other).value == pytest.approx(np.corrcoef([5, 5, 4], [1, 2, 4])[0, 1])
    with pytest.raises(UserError, match="no device gpu:7"):
        correlation(run, run, device="gpu:7")


def test_matrix() -> None:
    runs = [made([1.0, 2.0, 3.0]), made([3.0, 1.0, 2.0]), made([2.0, 2.0, 2.0])]
    found = [[score.value for score in line] for line in matrix(runs)]
    assert found[0][0] == pytest.approx(1)
    assert found[0][1] == found[1][0] == pytest.approx(np.corrcoef([1, 2, 3], [3, 1, 2])[0, 1])
    assert found[2] == [None] * 3


@given(st.lists(st.tuples(st.floats(1e-3, 1e9), st.floats(1e-3, 1e9)), min_size=2, max_size=30))
def test_against_numpy(pairs: list[tuple[float, float]]) -> None:
    x, y = ([pair[i] for pair in pairs] for i in (0, 1))
    assume(all(np.ptp(side) > 1e-3 * max(side) > 0 for side in (x, y)))
    found = correlation(made(x), made(y)).value
    assert found == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-9)


@given(footprints(), footprints())
def test_never_nan(a: Footprint, b: Footprint) -> None:
    flat = constant_power(a)
    for found in (correlation(a, b), correlation(a, b, "power"), time_alone(a, b), time_alone(a, b, "power")):
        assert (found.value is None) == bool(found.reason)
        assert found.value is None or -1 <= found.value <= 1
    if all(a.device_rows(device)["busy_s"].to_numpy().sum() > 0 for device in a.devices):
        assert_conserved(flat)
