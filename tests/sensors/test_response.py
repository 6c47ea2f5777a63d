"""A sensor's delay and smoothing undone, against the power they were made from."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvml_fake import ADA, HOPPER, GpuSpec, in_process, write_spec
from smaragdine.accounting.power import PowerTrace, from_samples, on_time, sharp
from smaragdine.recording.reader import Series
from smaragdine.sensors.base import Channel
from smaragdine.sensors.nvml.discover import open_sensors

MS = 1_000_000
LAG_MS, SMOOTHING_MS = 3.5, 13.5
WATTS = st.floats(0, 1000, allow_nan=False)


def smoothed(means_w: list[float], spacing_ms: float = 20.0) -> np.ndarray:
    stays = math.exp(-spacing_ms / SMOOTHING_MS)
    shown = means_w[:1]
    for mean_w in means_w[1:]:
        shown.append(stays * shown[-1] + (1 - stays) * mean_w)
    return np.array(shown)


def channel(lag_ms: float | None, smoothing_ms: float | None) -> Channel:
    return Channel(
        "gpu:0",
        "power",
        "W",
        "sample",
        "measured",
        20.0,
        "nvml",
        window_ms=20.0,
        lag_ms=lag_ms,
        smoothing_ms=smoothing_ms,
    )


@given(st.lists(WATTS, min_size=5, max_size=60))
def test_what_was_smoothed_comes_back(means_w: list[float]) -> None:
    t_ns = np.arange(len(means_w)) * 20 * MS
    ends_ns, found_w = sharp(t_ns, smoothed(means_w), LAG_MS * MS, SMOOTHING_MS * MS)
    assert found_w == pytest.approx(np.array(means_w), rel=1e-9, abs=1e-6)
    # So late, less what a mean weighted towards its end is later than the middle.
    assert set((t_ns - ends_ns).tolist()) == {t_ns[0] - ends_ns[0]}
    assert 0 < t_ns[0] - ends_ns[0] < LAG_MS * MS


@given(st.lists(st.integers(0, 19), min_size=20, max_size=60))
def test_late_stamps_are_put_right(late_ms: list[int]) -> None:
    """One of six, on either side of which two are on time."""
    grid_ns = np.arange(len(late_ms)) * 20 * MS
    late = np.array([ms * MS if n % 6 == 3 else 0 for n, ms in enumerate(late_ms)])
    assert on_time(grid_ns + late).tolist() == grid_ns.tolist()


def test_missing_readings_are_gaps() -> None:
    means_w = [100.0, 300.0, 100.0, 500.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0]
    t_ns, shown = np.arange(10) * 20 * MS, smoothed(means_w)
    later_ns = np.where(np.arange(10) > 4, t_ns + 1000 * MS, t_ns)
    ends_ns, found_w = sharp(later_ns, shown, 0.0, SMOOTHING_MS * MS)
    assert np.diff(ends_ns).max() == 1020 * MS
    assert found_w[:5] == pytest.approx(means_w[:5])
    assert found_w[5] == pytest.approx(shown[5])  # nothing of what was before is left
    assert found_w[6:] == pytest.approx(means_w[6:])


def test_of_two_readings_at_once_one_is_enough() -> None:
    means_w = [100.0, 300.0, 100.0, 500.0, 100.0, 200.0, 300.0]
    t_ns, shown = np.arange(7) * 20 * MS, smoothed(means_w)
    ends_ns, found_w = sharp(
        np.insert(t_ns, 4, t_ns[3] + 1), np.insert(shown, 4, shown[3]), 0, SMOOTHING_MS * MS
    )
    assert found_w == pytest.approx(means_w)
    assert np.diff(ends_ns) == pytest.approx(20 * MS, abs=2)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_few_readings_stand_as_they_are(count: int) -> None:
    t_ns, shown = np.arange(count) * 20 * MS, np.full(count, 7.0)
    ends_ns, found_w = sharp(t_ns, shown, LAG_MS * MS, SMOOTHING_MS * MS)
    assert found_w.tolist() == shown.tolist()
    assert (t_ns - ends_ns == LAG_MS * MS).all()


def test_noise_makes_no_negative_power() -> None:
    shown = np.array([500.0] * 6 + [0.0] * 6)
    _, found_w = sharp(np.arange(12) * 20 * MS, shown, 0.0, SMOOTHING_MS * MS)
    assert found_w.min() == 0.0


def square_w(t_ms: np.ndarray, period_ms: float) -> np.ndarray:
    """600 W in every first half, else 100 W."""
    return np.where(t_ms % period_ms < period_ms / 2, 600.0, 100.0)


def as_shown(period_ms: float) -> tuple[np.ndarray, np.ndarray]:
    """Three seconds of it, every 20 ms, through the electronics."""
    fine_ms = np.arange(0, 3000, 0.05)
    stays, level, shown = math.exp(-0.05 / SMOOTHING_MS), 350.0, []
    for watts in square_w(fine_ms, period_ms):
        level = stays * level + (1 - stays) * watts
        shown.append(level)
    stamps_ms = np.arange(100, 2990, 20.0)
    return (stamps_ms * MS).astype(np.int64), np.interp(stamps_ms - LAG_MS, fine_ms + 0.05, shown)


def loud_w(trace: PowerTrace, period_ms: float) -> float:
    """The mean power of the loud halves, as the trace has it."""
    begins = np.arange(np.ceil(500 / period_ms) * period_ms, 2500, period_ms) * MS
    spans = [(round(begin), round(begin + period_ms * MS / 2)) for begin in begins]
    return sum(trace.energy_j(*span) for span in spans) / sum(end - begin for begin, end in spans) * 1e9


@pytest.mark.parametrize("period_ms", [110, 210, 330])
def test_a_square_wave_is_seen_better(period_ms: float) -> None:
    t_ns, shown = as_shown(period_ms)
    segment = np.zeros(t_ns.size, dtype=np.int16)
    plain, better = (
        from_samples(Series(channel(*how), t_ns, shown, segment))
        for how in ((None, None), (LAG_MS, SMOOTHING_MS))
    )
    missed_w = 600 - loud_w(plain, period_ms)
    assert 600 - loud_w(better, period_ms) == pytest.approx(0.6 * missed_w, rel=0.1)
    for trace in (plain, better):
        assert trace.energy_j(510 * MS, 2490 * MS) == pytest.approx(350 * 1.98, rel=0.02)


@pytest.mark.parametrize("architecture", [ADA, HOPPER])
def test_the_response_of_an_h200_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: int
) -> None:
    """By the real binding: a square wave of 210 ms through such electronics, recorded for two seconds."""
    h200 = architecture == HOPPER
    gpu = GpuSpec(
        architecture=architecture,
        counter=False,
        low_w=100,
        high_w=600,
        period_ms=210,
        lag_ms=LAG_MS,
        smoothing_ms=SMOOTHING_MS,
    )
    spec = tmp_path / "gpus.spec"
    monkeypatch.setenv("FAKE_NVML", str(spec))
    write_spec(spec, [gpu])
    with in_process(tmp_path):
        found = open_sensors(visible=None, device_order=None)
        (ring,) = [sensor for sensor in found.sensors if sensor.channels()[0].quantity == "power"]
        time.sleep(2.2)
        readings = ring.read()
        for sensor in found.sensors:
            sensor.close()
    (known,) = ring.channels()
    assert (known.lag_ms, known.smoothing_ms) == ((LAG_MS, SMOOTHING_MS) if h200 else (None, None))
    assert ("3.5 ms late" in known.detail) == h200
    t_ns, watts = np.array([r[0] for r in readings]), np.array([r[2] for r in readings])
    trace = from_samples(Series(known, t_ns, watts, np.zeros(t_ns.size, dtype=np.int16)))
    period_ns = 210 * MS
    first, last = -(-int(t_ns[0] + 50 * MS) // period_ns), int(t_ns[-1] - 50 * MS) // period_ns
    loud_j = sum(trace.energy_j(n * period_ns, n * period_ns + period_ns // 2) for n in range(first, last))
    mean_w = loud_j / ((last - first) * period_ns / 2) * 1e9
    assert mean_w == pytest.approx(568 if h200 else 546, abs=12)
