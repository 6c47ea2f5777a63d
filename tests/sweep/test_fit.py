"""Second-degree fits against a limit: exact coefficients, intervals that hold, and models that do not fit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusal import refused
from smaragdine.sweep.fit import (
    SINGLE,
    analyse,
    below_limits,
    fit_parabola,
    front,
    judge,
    means,
    pareto,
    quantity,
    rests_on,
    saved,
    slower,
    to_json,
    verdict,
)
from smaragdine.sweep.measurements import Group

SEVEN = np.arange(100.0, 251.0, 25.0)


def _group(limit: list[float], time_s: list[float], energy_j: list[float]) -> Group:
    return Group({}, np.array(limit), np.array(time_s), np.array(energy_j), "W")


def _exact(limits: list[int], values: list[int]) -> tuple[list[Fraction], Fraction, Fraction]:
    """Least squares in rational numbers: coefficients, residual and total sum of squares."""
    rows = [[Fraction(x) ** 2, Fraction(x), Fraction(1)] for x in limits]
    matrix = [
        [
            *(sum(r[i] * r[j] for r in rows) for j in range(3)),
            sum(r[i] * y for r, y in zip(rows, values, strict=True)),
        ]
        for i in range(3)
    ]
    for i in range(3):
        pivot = next(k for k in range(i, 3) if matrix[k][i])
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        matrix[i] = [value / matrix[i][i] for value in matrix[i]]
        for k in range(3):
            if k != i:
                matrix[k] = [a - matrix[k][i] * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    found = [row[3] for row in matrix]
    left = sum(
        (
            (y - sum(a * b for a, b in zip(r, found, strict=True))) ** 2
            for r, y in zip(rows, values, strict=True)
        ),
        Fraction(0),
    )
    mean = Fraction(sum(values), len(values))
    return found, left, sum(((y - mean) ** 2 for y in values), Fraction(0))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(50, 700), st.integers(-1000, 1000)), min_size=4, max_size=15).filter(
        lambda rows: len({x for x, _ in rows}) >= 3
    )
)
def test_coefficients_r2_and_spread_are_those_of_rational_arithmetic(rows: list[tuple[int, int]]) -> None:
    limits, values = [x for x, _ in rows], [y for _, y in rows]
    found, left, total = _exact(limits, values)
    fit = fit_parabola(limits, values)
    scale = max(1.0, *(abs(y) for y in values))
    exact_at = [float(found[0] * x * x + found[1] * x + found[2]) for x in limits]
    np.testing.assert_allclose(fit.at(limits), exact_at, atol=1e-8 * scale)
    np.testing.assert_allclose(np.polyval(fit.coefficients, limits), exact_at, atol=1e-6 * scale)
    if total == 0:
        assert fit.r2 is None
    else:
        assert fit.r2 == pytest.approx(float(1 - left / total), abs=1e-9)
    assert fit.residual_std == pytest.approx(float(left / (len(rows) - 3)) ** 0.5, rel=1e-6, abs=1e-7 * scale)
    vertex = -found[1] / (2 * found[0]) if found[0] > 0 else None
    assert (
        fit.edge == (vertex is None or not min(limits) <= vertex <= max(limits))
        or (vertex is not None and min(abs(vertex - x) for x in (min(limits), max(limits))) < 1e-6)
        or abs(found[0]) < 1e-12
    )


def test_a_parabola_is_found_again() -> None:
    fit = fit_parabola(SEVEN, 3 + 0.002 * (SEVEN - 160) ** 2)
    assert fit.coefficients == pytest.approx((0.002, -0.64, 54.2))
    assert (fit.optimum, fit.edge) == (pytest.approx(160), False)
    assert fit.r2 == pytest.approx(1)
    assert fit.interval == pytest.approx((160, 160), abs=1e-3)
    assert fit.best_measured == 150


@pytest.mark.parametrize(
    ("values", "optimum"),
    [
        (SEVEN**2, 100.0),  # vertex left of the range
        ((SEVEN - 900) ** 2, 250.0),  # right of it
        (-((SEVEN - 150) ** 2), 250.0),  # opens downwards, the far end is lower
        (-((SEVEN - 190) ** 2), 100.0),
        (2 * SEVEN, 100.0),  # a line
    ],
)
def test_edge(values: np.ndarray, optimum: float) -> None:
    fit = fit_parabola(SEVEN, values)
    assert fit.edge
    assert fit.optimum == optimum


@pytest.mark.parametrize(
    ("curve", "interval"),
    [
        (-((SEVEN - 190) ** 2) / 100, (100, 100)),  # opens downwards, one end is clearly lower
        (-((SEVEN - 175) ** 2) / 100, (100, 250)),  # both ends alike: it may be either
        (0.4 * SEVEN, (100, 100)),
        (0 * SEVEN, (100, 250)),  # nothing is known
        ((SEVEN - 180) ** 2 / 100, (180, 180)),
    ],
)
def test_intervals_are_no_wider_than_they_must_be(curve: np.ndarray, interval: tuple[float, float]) -> None:
    wobble = np.array([1.0, -2.0, 0.0, 2.0, 0.0, -2.0, 1.0]) / 8  # no part of it is a parabola's
    assert fit_parabola(SEVEN, 50 + curve + wobble).interval == pytest.approx(interval, abs=1)


def test_a_vertex_at_the_end_is_inside() -> None:
    assert not fit_parabola([0, 1, 2], [0, 1, 4]).edge


def test_statistics_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(5)
    x = np.repeat(SEVEN, 3)
    y = 900 - 0.65 * x + 0.002 * x * x + rng.normal(0, 2, x.size)
    fit = fit_parabola(x, y)
    design = np.stack([x**2, x, np.ones_like(x)], axis=1)
    found = np.polyfit(x, y, 2)
    residual = y - np.polyval(found, x)
    left, total = residual @ residual, ((y - y.mean()) ** 2).sum()
    freedom = x.size - 3
    assert fit.effect_p == pytest.approx(
        stats.f.sf((total - left) / 2 / (left / freedom), 2, freedom), rel=1e-6
    )
    pure = sum(((y[x == limit] - y[x == limit].mean()) ** 2).sum() for limit in SEVEN)
    assert fit.misfit_p == pytest.approx(stats.f.sf((left - pure) / 4 / (pure / 14), 4, 14), rel=1e-6)
    at = np.array([[130.0**2, 130.0, 1.0]])
    leverage = (at @ np.linalg.inv(design.T @ design) @ at.T).item()
    half = stats.t.ppf(0.975, freedom) * np.sqrt(left / freedom * leverage)
    band = fit.band([130.0])
    assert band is not None
    assert band[0] == pytest.approx(half, rel=1e-6)
    # Inside the range the interval is Fieller's: where the slope is not more than t deviations from 0.
    assert fit.interval is not None
    covariance = np.linalg.inv(design.T @ design) * left / freedom
    assert 100 < fit.interval[0] < fit.optimum < fit.interval[1] < 250
    for end in fit.interval:
        slope = np.array([2 * end, 1.0, 0.0])
        assert abs(slope @ found) == pytest.approx(
            stats.t.ppf(0.975, freedom) * np.sqrt(slope @ covariance @ slope), rel=1e-5
        )


@pytest.mark.parametrize(
    ("curve", "slope", "noise", "repeat"),
    [(1.0, 0.0, 0.3, 1), (1.0, 1.9, 0.5, 1), (1.0, 2.0, 0.3, 2), (0.2, 1.0, 0.5, 1), (-1.0, 0.5, 0.5, 1)],
)
def test_interval_and_band_cover_the_truth(curve: float, slope: float, noise: float, repeat: int) -> None:
    """Vertex inside, near an end, at the end, outside, and a parabola that opens downwards."""
    rng = np.random.default_rng(11)
    trials = 500
    limits = np.repeat(SEVEN, repeat)
    u = (limits - 175) / 75
    true = 10 + curve * u * u + slope * u
    inside = curve > 0 and abs(slope) <= 2 * curve
    optimum = 175 + 75 * (-slope / (2 * curve) if inside else -np.sign(slope))
    held, banded = 0, 0
    for _ in range(trials):
        fit = fit_parabola(limits, true + rng.normal(0, noise, limits.size))
        assert fit.interval is not None
        assert 100 <= fit.interval[0] <= fit.optimum <= fit.interval[1] <= 250
        held += fit.interval[0] - 1e-9 <= optimum <= fit.interval[1] + 1e-9
        half = fit.band([125.0])
        assert half is not None
        banded += abs(fit.at([125.0])[0] - true[limits == 125][0]) <= half[0]
    # 95 %, and four standard deviations of the count below it; where the end is the optimum, more.
    assert held >= 0.91 * trials
    assert 0.91 * trials <= banded <= 0.99 * trials


def test_a_model_that_does_not_fit_says_so() -> None:
    rng = np.random.default_rng(3)
    x = np.repeat(SEVEN, 5)
    small = fit_parabola(x, 100 + rng.normal(0, 2, x.size))  # draws less than the lowest limit
    assert judge(small)[0] is False
    assert "chance" in judge(small)[1]
    kink = np.where(x < 130, 20.0, 10.0) + rng.normal(0, 0.05, x.size)
    assert judge(fit_parabola(x, kink)) == (False, judge(fit_parabola(x, kink))[1])
    assert "repetitions" in judge(fit_parabola(x, kink))[1]
    single = fit_parabola(SEVEN, [40, 22, 10, 9, 9, 9, 9])
    assert judge(single)[0] is False
    assert "off the parabola" in judge(single)[1]
    assert judge(fit_parabola(SEVEN, [7.0] * 7)) == (False, "it is the same at every limit")
    assert judge(fit_parabola(SEVEN[:3], [3.0, 2.0, 4.0]))[0] is None
    assert judge(fit_parabola(x, 3 + (x - 160) ** 2 / 5000 + rng.normal(0, 0.05, x.size))) == (True, "")


def test_three_limits_have_no_band() -> None:
    fit = fit_parabola([100, 200, 300], [3, 2, 4])
    assert (fit.freedom, fit.residual_std, fit.interval, fit.band([150.0])) == (0, None, None, None)
    assert fit.r2 == pytest.approx(1)


def test_quantities_and_what_is_saved() -> None:
    group = _group([100, 150, 200, 200], [4, 2, 1, 3], [40, 30, 50, 70])
    assert quantity(group, "power").tolist() == [10, 15, 50, 70 / 3]
    assert quantity(group, "edp").tolist() == [160, 60, 50, 210]
    assert quantity(group, "ed2p").tolist() == [640, 120, 50, 630]
    limits, mean, std = means(group, "energy")
    assert (limits.tolist(), mean.tolist()) == ([100, 150, 200], [40, 30, 60])
    assert std[2] == pytest.approx(200**0.5)
    assert np.isnan(std[:2]).all()
    each = analyse([group]).groups[0]
    assert saved(each.parabolas["energy"]) == pytest.approx(0.5)
    assert slower(each, 100) == pytest.approx(1.0)
    assert front(group) == [150]
    assert rests_on(analyse([_group([1, 2, 3, 4], [1] * 4, [1] * 4)]).groups[0].parabolas["energy"]) == SINGLE


def test_a_program_that_never_reaches_a_limit() -> None:
    limits, energy_j = SEVEN.tolist(), [80.0, 81.0, 79.0, 80.5, 79.5, 80.0, 81.0]
    idle = analyse([_group(limits, [1.0] * 7, energy_j)]).groups[0]
    assert below_limits(idle)
    assert "less than the lowest limit" in verdict(idle, "energy")[1]
    assert verdict(idle, "energy")[0] is False
    busy = analyse([_group(limits, [1.0] * 7, [*energy_j[:-1], 101.0])]).groups[0]
    assert not below_limits(busy)
    clocks = Group({}, SEVEN, np.ones(7), np.array(energy_j), "MHz")
    assert not below_limits(analyse([clocks]).groups[0])


def test_json_has_all_groups_and_quantities_and_nothing_that_is_no_json() -> None:
    import json

    whole = _group([100, 150, 200, 250], [4, 3, 2, 2], [40, 30, 35, 44])
    few = Group({"net": "b"}, np.array([100.0, 150.0]), np.ones(2), np.ones(2), "W")
    found = to_json(analyse([whole, few]))
    json.dumps(found, allow_nan=False)
    assert [each["quantity"] for each in found["groups"]] == ["energy", "time", "edp", "ed2p", "power"]
    wanted = {"by", "quantity", "coefficients", "r2", "best_measured", "optimum", "interval", "edge"}
    assert all(wanted <= each.keys() for each in found["groups"])
    assert found["left_out"] == [
        {"by": {"net": "b"}, "why": "2 of the 3 limits that a parabola needs: 100, 150"}
    ]
    assert found["groups"][0]["band_rests_on"] == SINGLE
    refused(lambda: analyse([few]), "2 of the 3 limits", "100, 150")


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=12))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    beaten = {(t, e) for t, e in points if any(a <= t and b <= e and (a, b) != (t, e) for a, b in points)}
    found = pareto([t for t, _ in points], [e for _, e in points])
    assert sorted(points[i] for i in found) == sorted(point for point in points if point not in beaten)
    assert [points[i][0] for i in found] == sorted(points[i][0] for i in found)
