"""Power sharpened by what an idle GPU draws, against the power it was made from."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smaragdine.accounting.account import account
from smaragdine.accounting.idle import busy_spans, sharpen
from smaragdine.accounting.meters import Meter
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.uncertainty import sensor_of
from smaragdine.recording.format import EVENTS

IDLE_W, BUSY_W, LIMIT_W = 118.0, 550.0, 700.0


def trace_of(starts: list[int], ends: list[int], watts: list[float]) -> PowerTrace:
    return PowerTrace(np.array(starts), np.array(ends), np.array(watts))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12))
def test_busy_time_is_that_of_any_event(events: list[tuple[int, int]]) -> None:
    start_ns = np.array([start for start, _ in events], dtype=np.int64)
    end_ns = start_ns + np.array([length for _, length in events], dtype=np.int64)
    busy = {t for start, length in events for t in range(start, start + length)}
    begins, ends = busy_spans(start_ns, end_ns)
    assert [t for b, e in zip(begins, ends, strict=True) for t in range(b, e)] == sorted(busy)
    assert all(e < b for e, b in zip(ends, begins[1:], strict=False))


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0, 900)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 15)), max_size=8),
)
def test_every_reading_keeps_its_energy(
    readings: list[tuple[int, float]], events: list[tuple[int, int]]
) -> None:
    edges = np.cumsum([0, *(length for length, _ in readings)])
    trace = PowerTrace(edges[:-1], edges[1:], np.array([watts for _, watts in readings]))
    start_ns = np.array([start for start, _ in events], dtype=np.int64)
    busy = busy_spans(start_ns, start_ns + np.array([length for _, length in events], dtype=np.int64))
    sharp = sharpen(trace, busy, IDLE_W, LIMIT_W)
    assert (sharp.power_w >= 0).all()
    for begin, end, watts in zip(trace.start_ns, trace.end_ns, trace.power_w, strict=True):
        expected = trace.energy_j(int(begin), int(end))
        assert sharp.energy_j(int(begin), int(end)) == pytest.approx(expected, rel=1e-9, abs=1e-15)
        inside = (sharp.start_ns >= begin) & (sharp.end_ns <= end)
        assert sharp.power_w[inside].max() <= max(LIMIT_W, watts) * (1 + 1e-9)


def test_the_power_that_a_sensor_blurred_comes_back() -> None:
    """Kernels of 550 W between idle stretches of 118 W, seen by a sensor that averages over 20 ms."""
    random = np.random.default_rng(0)
    ms = 1_000_000
    starts = np.arange(200) * 5 * ms + random.integers(0, 2 * ms, 200)
    lengths = random.integers(ms // 2, 2 * ms, 200)
    truth = busy_spans(starts, starts + lengths)
    edges = np.arange(0, 1000 * ms + 1, 20 * ms)
    busy_s = np.array(
        [
            sum(max(0, min(e, b1) - max(s, b0)) for s, e in zip(*truth, strict=True)) * 1e-9
            for b0, b1 in itertools.pairwise(edges)
        ]
    )
    watts = (busy_s * BUSY_W + (0.02 - busy_s) * IDLE_W) / 0.02
    trace = PowerTrace(edges[:-1], edges[1:], watts)
    events = pa.table(
        {
            "name": ["kernel"] * 200,
            "device": ["gpu:0"] * 200,
            "start_ns": starts,
            "duration_ns": lengths,
            "phase": ["forward"] * 200,
            "lane": [7] * 200,
            "step": [0] * 200,
        }
    ).cast(EVENTS)
    sensor = sensor_of(trace, IDLE_W, LIMIT_W, 20 * ms)
    blurred = account(events, {"gpu:0": Meter(trace, sensor)})
    sharp = account(events, {"gpu:0": Meter(trace, sensor, idle_w=IDLE_W)})
    true_j = busy_s.sum() * BUSY_W
    (row,) = sharp.rows.to_pylist()
    assert row["energy_j"] == pytest.approx(true_j, rel=1e-9)
    assert abs(row["energy_j"] - true_j) <= row["uncertainty_j"]
    assert sharp.devices["gpu:0"].idle_j == pytest.approx((1.0 - busy_s.sum()) * IDLE_W, rel=1e-9)
    # Which is not what equal power over time says.
    assert blurred.rows["energy_j"].to_pylist()[0] < 0.75 * true_j


def test_a_reading_too_low_for_idle_and_one_too_high_for_busy_time() -> None:
    trace = trace_of([0, 100], [100, 200], [80.0, 600.0])
    busy = (np.array([50, 190]), np.array([60, 200]))
    sharp = sharpen(trace, busy, IDLE_W, LIMIT_W)
    assert sharp.power_w.tolist() == pytest.approx(
        [80.0, 80.0, 80.0, (600 * 100 - 700 * 10) / 90, 700.0], rel=1e-12
    )
