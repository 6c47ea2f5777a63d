"""Power sharpened by what an idle GPU draws, against the power it was made from."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smaragdine.accounting.account import account
from smaragdine.accounting.device_power import DevicePower
from smaragdine.accounting.gpu_idle import busy_spans, idle_w, sharpen
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.run import Run
from smaragdine.accounting.spans import step_table, steps_of
from smaragdine.accounting.traces import device_traces
from smaragdine.accounting.uncertainty import sensor_of
from smaragdine.recording.format import EVENTS
from smaragdine.recording.reader import Recording
from traced_recording import mark, recording, ten_and_three, window

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
    st.lists(st.tuples(st.integers(1, 20), st.floats(-1, 900)), min_size=1, max_size=8),
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
    assert sharp.power_w.min() >= min(trace.power_w.min(), 0)
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
    blurred = account(events, {"gpu:0": DevicePower(trace, sensor)})
    sharp = account(events, {"gpu:0": DevicePower(trace, sensor, idle_w=IDLE_W)})
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


def stretched(
    folder: Path,
    traced_ms: int,
    pause: tuple[int, float] = (0, 0.0),
    after: tuple[int, float] = (0, 0.0),
    traced_w: float = IDLE_W,
) -> Recording:
    """Steps of 40 ms, 15 of them at work, seen by a sensor as one; twenty traced ones that wait longer, at
    `traced_w`; a `pause` of so many ms, at so much power; then steps again, later ones with more work: a GPU
    warms up; and what comes `after` the last one."""
    power: list[tuple[float, float]] = []
    marks, steps = [mark(0)], []
    now = 0.0

    def stand(length_ms: int, watts: float) -> None:
        nonlocal now
        if length_ms:
            now += length_ms
            power.append((now, watts))

    def step(length_ms: int, busy_w: float, idle_w: float) -> None:
        stand(length_ms, (15 * busy_w + (length_ms - 15) * idle_w) / length_ms)
        marks.append(mark(now))

    for _ in range(10):
        step(40, BUSY_W, IDLE_W)
    begin = now
    for index in range(20):
        step(traced_ms, BUSY_W, traced_w)
        steps.append((index, now - traced_ms, now))
    end = now
    stand(*pause)
    for number in range(100):
        step(40, BUSY_W if number < 70 else BUSY_W + 50, IDLE_W)
    stand(40, BUSY_W)  # work in flight
    stand(*after)
    marks.append(mark(now, "experiment_end"))
    windows = [window(begin, begin, end, end + pause[0], steps)]
    return recording(folder, marks, windows, power_w=power)


def found_w(made: Recording) -> float | None:
    return idle_w(made, {"gpu:0": device_traces(made)["gpu:0"]}, steps_of(made, step_table(made))).get(
        "gpu:0"
    )


def test_idle_power_is_what_a_longer_step_takes_more(tmp_path: Path) -> None:
    assert found_w(stretched(tmp_path / "run", 80)) == pytest.approx(IDLE_W, rel=1e-9)


def test_every_gpu_has_its_own(tmp_path: Path) -> None:
    made = stretched(tmp_path / "run", 80)
    one = device_traces(made)["gpu:0"]
    two = {"gpu:0": one, "gpu:1": dataclasses.replace(one, power_w=2 * one.power_w)}
    found = idle_w(made, two, steps_of(made, step_table(made)))
    assert found == {"gpu:0": pytest.approx(IDLE_W, rel=1e-9), "gpu:1": pytest.approx(2 * IDLE_W, rel=1e-9)}


def test_a_pause_tells_it_directly(tmp_path: Path) -> None:
    assert found_w(stretched(tmp_path / "run", 80, pause=(150, 100.0))) == pytest.approx(100.0, rel=1e-9)


@pytest.mark.parametrize("traced_ms", [45, 80])
def test_the_end_tells_it_directly(tmp_path: Path, traced_ms: int) -> None:
    """Also of a program that keeps its GPU so busy that tracing hardly stretches its steps."""
    made = stretched(tmp_path / "run", traced_ms, after=(150, 125.0))
    assert found_w(made) == pytest.approx(125.0, rel=1e-9)


def test_an_end_with_work_tells_nothing(tmp_path: Path) -> None:
    made = stretched(tmp_path / "run", 80, after=(150, 300.0))
    assert found_w(made) == pytest.approx(IDLE_W, rel=1e-9)


def test_steps_that_tracing_hardly_stretches_tell_nothing(tmp_path: Path) -> None:
    assert found_w(stretched(tmp_path / "run", 45)) is None


def test_idle_time_cannot_draw_more_than_all_time(tmp_path: Path) -> None:
    assert found_w(stretched(tmp_path / "run", 80, traced_w=450.0)) is None


def test_energies_need_no_look_at_what_the_sensor_saw(tmp_path: Path) -> None:
    made = ten_and_three(tmp_path / "run")
    events, meters = Run(made).inputs
    whole, quick = (account(events, meters.of, narrowed=narrowed) for narrowed in (True, False))
    for name in ("name", "phase", "energy_j", "busy_s", "count", "step_mean_j"):
        assert quick.rows[name].to_pylist() == whole.rows[name].to_pylist()
    assert set(quick.rows["basis"].to_pylist()) == {"prior"}
    unseen = {d: dataclasses.replace(total, uncertainty_j=None) for d, total in whole.devices.items()}
    assert quick.devices == unseen
