"""The daemon and the accounting make the same joules of the same readings, and the right ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smaragdine.accounting.power import PowerTrace, from_counter, from_samples
from smaragdine.daemon.totals import Gauges
from smaragdine.recording.reader import Series
from smaragdine.sensors.base import Channel
from smaragdine.sensors.energy import MOST_W, growth

MS = 1_000_000
S = 1000 * MS
T0 = 1_700_000_000 * S


def power(window_ms: float | None, period_ms: float) -> Channel:
    return Channel("gpu:0", "power", "W", "sample", "measured", period_ms, "nvml", window_ms=window_ms)


COUNTER = Channel("cpu:0", "energy", "J", "counter", "measured", 1.0, "rapl", wraps_at=262_143.0)


def accounted(channel: Channel, t_ns: list[int], value: list[float]) -> PowerTrace:
    times, values = np.array(t_ns, dtype=np.int64), np.array(value, dtype=np.float64)
    series = Series(channel, times, values, np.zeros(times.size, dtype=np.int16))
    return from_counter(series) if channel.kind == "counter" else from_samples(series)


def totalled_j(channel: Channel, t_ns: list[int], value: list[float], at_once: int = 7) -> float:
    """What the daemon's total comes to, of readings that come a few at a time."""
    gauges = Gauges({0: channel})
    for i in range(0, len(t_ns), at_once):
        times = np.array(t_ns[i : i + at_once], dtype=np.int64)
        gauges.read(0, times, np.array(value[i : i + at_once], dtype=np.float64))
    [total] = gauges.totals(t_ns[-1])
    return total.energy_j


@pytest.mark.parametrize(("window_ms", "period_ms"), [(20.0, 20.0), (25.0, 100.0), (1000.0, 100.0)])
@given(seed=st.integers(0, 2**32 - 1))
def test_constant_power_in_jittery_samples_is_power_times_time(
    window_ms: float, period_ms: float, seed: int
) -> None:
    """Samples of 20 ms come 7 to 47 ms apart on an H200."""
    apart = np.random.default_rng(seed).uniform(0.35, 2.35, 500) * period_ms * MS
    t_ns = (T0 + np.cumsum(apart.astype(np.int64))).tolist()
    channel = power(window_ms, period_ms)
    trace = accounted(channel, t_ns, [100.0] * 500)
    exact_j = 100.0 * (t_ns[-1] - t_ns[0] + window_ms * MS) / S
    assert trace.energy_j(T0 - 10 * S, t_ns[-1]) == pytest.approx(exact_j, rel=1e-9)
    assert totalled_j(channel, t_ns, [100.0] * 500) == pytest.approx(exact_j, abs=2e-6)


def test_power_that_no_device_gives_back_is_unknown_and_a_sensors_error_at_rest_is_not() -> None:
    channel = power(None, 100.0)
    t_ns = [T0 + n * 100 * MS for n in range(6)]
    trace = accounted(channel, t_ns, [10.0, -90.0, 10.0, -0.2, 10.0, 10.0])
    assert trace.energy_j(t_ns[0], t_ns[-1]) == pytest.approx(2.0 + 1.0 - 0.02 + 1.0)
    assert totalled_j(channel, t_ns, [10.0, -90.0, 10.0, -0.2, 10.0, 10.0]) == pytest.approx(3.98, abs=2e-6)


@pytest.mark.filterwarnings("error")
def test_a_counter_beyond_all_numbers_grew_by_nothing_that_is_known() -> None:
    total = np.array([1.0, 1.7e308, -1.7e308, 2.0, 3.0, np.inf, np.inf, 4.0])
    _grown, known = growth(total, np.full(7, S), wraps_at=1.7e308, joules=1.0)
    assert known.tolist() == [False, False, False, True, False, False, False]


@given(seed=st.integers(0, 2**32 - 1), window_ms=st.sampled_from([None, 20.0, 60.0]))
def test_any_samples_are_the_same_joules_here_and_there(seed: int, window_ms: float | None) -> None:
    """With pauses of any length, repeated stamps, and what no device draws or nobody knows."""
    random = np.random.default_rng(seed)
    apart = random.choice([0, 7, 20, 49, 51, 149, 151, 400, 5000], 80) * MS
    t_ns = (T0 + np.cumsum(apart)).tolist()
    value = random.choice([0.0, 75.5, 300.0, 699.9, np.nan, np.inf, MOST_W * 1.01, 1e15], 80).tolist()
    if np.isfinite(value).sum() == 0:
        return
    channel = power(window_ms, 20.0)
    trace = accounted(channel, t_ns, value)
    last_ns = max((t for t, v in zip(t_ns, value, strict=True) if v <= MOST_W), default=T0)
    exact_j = trace.energy_j(T0 - S, last_ns)
    assert totalled_j(channel, t_ns, value, int(random.integers(1, 20))) == pytest.approx(exact_j, abs=2e-6)


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 60_000)), min_size=2, max_size=40))
def test_a_counter_is_the_same_joules_here_and_there(steps: list[tuple[int, int]]) -> None:
    """It wraps round, is set back, and jumps by more than any device uses in that time."""
    t_ns = (T0 + np.cumsum([ms for ms, _ in steps]) * MS).tolist()
    value = np.mod(262_000 + np.cumsum([j for _, j in steps]), 262_143).astype(np.float64).tolist()
    exact_j = 0.0
    for i in range(1, len(steps)):
        grown, since_s = (value[i] - value[i - 1]) % 262_143.0, steps[i][0] / 1000
        least_s = 0.1 if value[i] >= value[i - 1] else 0.0
        exact_j += grown if grown <= MOST_W * max(since_s, least_s) else 0.0
    trace = accounted(COUNTER, t_ns, value)
    assert trace.energy_j(T0 - S, t_ns[-1]) == pytest.approx(exact_j, rel=1e-9)
    assert totalled_j(COUNTER, t_ns, value) == pytest.approx(exact_j, abs=1e-5)


def test_a_counter_that_moves_in_steps_may_move_between_two_close_readings() -> None:
    """An NVML counter moves every 100 ms: 70 J within one millisecond are no 70 kW."""
    t_ns = [T0, T0 + 100 * MS, T0 + 101 * MS, T0 + 200 * MS]
    value = [0.0, 0.0, 70.0, 70.0]
    assert accounted(COUNTER, t_ns, value).energy_j(T0, t_ns[-1]) == pytest.approx(70.0)
    assert totalled_j(COUNTER, t_ns, value) == pytest.approx(70.0)
