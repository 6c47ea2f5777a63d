"""Curves from many runs: splines against scipy's, averages of runs of different length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smaragdine.sweep.curves import average, rate_hz, relative_s, resample, spline

Points = st.lists(st.tuples(st.integers(1, 50), st.integers(-100, 100)), min_size=2, max_size=30)


@settings(max_examples=60, deadline=None)
@given(Points)
def test_spline_is_scipys(points: list[tuple[int, int]]) -> None:
    interpolate = pytest.importorskip("scipy.interpolate")
    t_s = np.cumsum([step for step, _ in points]) / 10
    value = np.array([v for _, v in points], dtype=float)
    at_s = np.linspace(t_s[0], t_s[-1], 57)
    ours = spline(t_s, value, at_s)
    theirs = interpolate.CubicSpline(t_s, value)(at_s)
    np.testing.assert_allclose(ours, theirs, atol=1e-7 * max(1.0, np.abs(theirs).max()))


def test_nothing_is_extrapolated_and_time_must_rise() -> None:
    t_s = np.array([0.0, 1.0, 2.0, 4.0])
    found = spline(t_s, t_s**3, np.array([-0.1, 0.0, 3.0, 4.0, 4.1]))
    assert np.isnan(found[[0, -1]]).all()
    assert found[1:-1] == pytest.approx([0, 27, 64])
    with pytest.raises(ValueError, match="rising"):
        spline(np.array([0.0, 1.0, 1.0]), np.zeros(3), t_s)
    with pytest.raises(ValueError, match="two readings"):
        spline(np.zeros(1), np.zeros(1), t_s)


def test_resampling_is_on_an_even_grid_at_twice_the_sensors_rate() -> None:
    t_ns = 1_700_000_000_000_000_000 + np.array([0, 500, 1000, 1500, 2100, 2500]) * 1_000_000
    t_s = relative_s(t_ns)
    assert t_s.tolist() == pytest.approx([0, 0.5, 1, 1.5, 2.1, 2.5])
    assert rate_hz(t_s) == pytest.approx(4)
    grid_s, value = resample(t_s, 3 * t_s**2 + 1, rate_hz(t_s))
    assert grid_s == pytest.approx(np.arange(11) / 4)
    assert value == pytest.approx(3 * grid_s**2 + 1)
    with pytest.raises(ValueError, match="no rate"):
        rate_hz(np.zeros(1))


def test_average_of_runs_of_different_length() -> None:
    found = average([np.array([1.0, 2.0, 3.0, 8.0]), np.array([3.0, 2.0]), np.array([5.0, np.nan, 5.0])], 4.0)
    assert found.t_s.tolist() == [0, 0.25, 0.5, 0.75]
    assert found.count.tolist() == [3, 2, 2, 1]
    assert found.mean.tolist() == [3, 2, 4, 8]
    assert found.std[:3] == pytest.approx([2, 0, 2**0.5])
    assert np.isnan(found.std[3])
    alone = average([np.array([1.0, 2.0])], 1.0)
    assert np.isnan(alone.std).all()
