from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smaragdine.accounting import traces as device_power
from smaragdine.accounting.power import PowerTrace, add, from_counter, from_samples
from smaragdine.accounting.traces import anchor
from smaragdine.recording.reader import Recording, Series
from smaragdine.sensors.base import Channel

MS = 1_000_000
S = 1_000_000_000
EPOCH_NS = 1_700_000_000 * S
NS = Fraction(1, S)

Stretch = tuple[int, int, Fraction]  # start, end, watts


def series(
    t_ns: Sequence[int],
    values: Sequence[float],
    segments: Sequence[int] | None = None,
    quantity: str = "energy",
    **more: Any,
) -> Series:
    kind = "counter" if quantity == "energy" else "sample"
    facts: dict[str, Any] = {"device": "gpu:0", "period_ms": 1.0, **more}
    channel = Channel(quantity=quantity, unit="J", kind=kind, provenance="measured", sensor="test", **facts)
    return Series(
        channel,
        np.array(t_ns, dtype=np.int64),
        np.array(values, dtype=np.float64),
        np.array(segments if segments is not None else [0] * len(t_ns), dtype=np.int16),
    )


# --- the oracle: stretches in rational numbers, one at a time -----------------------------------------------


def oracle_counter(s: Series) -> tuple[list[Stretch], int]:
    lengths = sorted(int(b) - int(a) for a, b in pairwise(s.t_ns))
    middle = len(lengths) // 2
    rhythm = 0 if not lengths else int(Fraction(lengths[middle] + lengths[-middle - 1], 2))
    hold = max(int(s.channel.period_ms * 1e7), 250 * MS)
    if rhythm > hold // 10:
        hold = max(hold, 4 * rhythm)
    found: list[Stretch] = []
    for i in range(1, len(s.t_ns)):
        start, end = int(s.t_ns[i - 1]), int(s.t_ns[i])
        used = Fraction(float(s.value[i])) - Fraction(float(s.value[i - 1]))
        wrapped = used < 0 and bool(s.channel.wraps_at)
        if wrapped:
            used += Fraction(s.channel.wraps_at)
        # Set back, not wrapped; or a jump of more than any device uses until the counter's next step.
        if end > start and used / (max(end - start, 0 if wrapped else 100 * MS) * NS) > 20_000:
            continue
        if end > start and end - start <= hold and used >= 0 and s.segment[i] == s.segment[i - 1]:
            found.append((start, end, used / ((end - start) * NS)))
    return found, hold


def oracle_samples(s: Series) -> list[Stretch]:
    newest: dict[int, float] = {}
    for t, value in zip(s.t_ns, s.value, strict=True):
        newest.setdefault(int(t), float(value))
    times = sorted(newest)
    found: list[Stretch] = []
    window = int((s.channel.window_ms or 0) * 1e6)
    for i, t in enumerate(times):
        rhythm = max(window, int(s.channel.period_ms * 1e6))
        touches = i > 0 and t - times[i - 1] <= Fraction(5, 2) * rhythm
        found.append((times[i - 1] if touches else t - window, t, Fraction(newest[t])))
    return found


def oracle_held(s: Series, hold: int) -> list[Stretch]:
    times = [int(t) for t in s.t_ns]
    spacings = sorted(b - a for a, b in pairwise(times))
    middle = len(spacings) // 2
    usual = int(Fraction(spacings[middle] + spacings[-middle - 1], 2)) if spacings else hold
    found: list[Stretch] = []
    for i, t in enumerate(times):
        following = times[i + 1] if i + 1 < len(times) else t + usual
        if following - t <= hold:  # else the gap is missing, all of it
            found.append((t, following, Fraction(float(s.value[i]))))
    return found if spacings else []


def energy(stretches: Sequence[Stretch], start: int, end: int) -> Fraction:
    return sum((p * max(0, min(e, end) - max(s, start)) * NS for s, e, p in stretches), Fraction(0))


def covered(stretches: Sequence[Stretch], start: int, end: int) -> Fraction:
    return sum((max(0, min(e, end) - max(s, start)) * NS for s, e, _ in stretches), Fraction(0))


def missing(
    stretches: Sequence[Stretch], start: int, end: int, hold: int, restarts: Sequence[int] = ()
) -> Fraction:
    inside = sorted((max(s, start), min(e, end)) for s, e, _ in stretches if e > start and s < end)
    edges = [start, *(t for span in inside for t in span), end]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    gone = [b - a for a, b in gaps if b - a > hold or any(a <= r < b for r in restarts)]
    return sum((gap * NS for gap in gone), Fraction(0))


def power_at(stretches: Sequence[Stretch], start: int, end: int) -> Fraction | None:
    return next((p for s, e, p in stretches if s <= start and end <= e), None)


def oracle_add(many: Sequence[Sequence[Stretch]]) -> list[Stretch]:
    cuts = sorted({t for stretches in many for s, e, _ in stretches for t in (s, e)})
    found: list[Stretch] = []
    for start, end in pairwise(cuts):
        powers = [power_at(stretches, start, end) for stretches in many]
        if all(p is not None for p in powers):
            found.append((start, end, sum((p for p in powers if p is not None), Fraction(0))))
    return found


def oracle_anchor(stretches: Sequence[Stretch], anchors: Sequence[tuple[int, Fraction]]) -> list[Stretch]:
    """Each interval between anchors: what was sampled, the rest at its mean, all scaled to the counter."""
    times = [t for t, _ in anchors]
    cuts = sorted({t for s, e, _ in stretches for t in (s, e)} | set(times))
    level: list[Fraction] = []
    mean: list[Fraction] = []
    for (t0, j0), (t1, j1) in pairwise(anchors):
        seen_s = covered(stretches, t0, t1)
        mean.append(energy(stretches, t0, t1) / seen_s if seen_s else Fraction(1))
        level.append((j1 - j0) / (mean[-1] * (t1 - t0) * NS))
    found: list[Stretch] = []
    for start, end in pairwise(cuts):
        i = min(max(sum(t <= start for t in times) - 1, 0), len(level) - 1)
        watts = power_at(stretches, start, end)
        if watts is None and times[0] <= start < times[-1]:
            watts = mean[i]
        if watts is not None:
            found.append((start, end, watts * level[i]))
    return found


# --- comparison ---------------------------------------------------------------------------------------------


def check_shape(trace: PowerTrace) -> None:
    assert (trace.end_ns > trace.start_ns).all()
    assert (trace.start_ns[1:] >= trace.end_ns[:-1]).all(), "stretches overlap"
    assert np.isfinite(trace.power_w).all()


def check(
    trace: PowerTrace,
    stretches: Sequence[Stretch],
    hold: int,
    windows: Sequence[tuple[int, int]],
    restarts: Sequence[int] = (),
) -> None:
    check_shape(trace)
    stretches = [stretch for stretch in stretches if stretch[1] > stretch[0]]
    everything = float(sum((abs(p) * (e - s) * NS for s, e, p in stretches), Fraction(0)))
    assert trace.hold_ns == hold
    for start, end in windows:
        assert trace.energy_j(start, end) == pytest.approx(
            float(energy(stretches, start, end)), rel=1e-9, abs=1e-12 + 1e-13 * everything
        )
        assert trace.covered_s(start, end) == pytest.approx(float(covered(stretches, start, end)), abs=1e-12)
        assert trace.missing_s(start, end) == pytest.approx(
            float(missing(stretches, start, end, hold, restarts)), abs=1e-12
        )


def hold_of(s: Series) -> int:
    return max(int(s.channel.period_ms * 1e7), 250 * MS)


# Steps that meet the interesting lengths: ties, jitter, exactly the hold, one above it, long gaps.
STEPS_NS = st.sampled_from([0, 0, 1, 7, MS, 4 * MS, 20 * MS, 250 * MS, 250 * MS + 1, S]) | st.integers(
    1, 400 * MS
)
OFFSETS_NS = st.integers(-50 * MS, 3 * S)
WINDOWS = st.lists(st.tuples(OFFSETS_NS, OFFSETS_NS), min_size=1, max_size=6)


def windows_ns(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(EPOCH_NS + min(p), EPOCH_NS + max(p)) for p in pairs]


def times(steps: Sequence[int]) -> list[int]:
    return [EPOCH_NS + int(t) for t in np.cumsum(steps)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(STEPS_NS, st.floats(0, 999), st.integers(0, 9)), max_size=12),
    st.sampled_from([None, 1000.0]),
    st.sampled_from([1.0, 100.0]),
    WINDOWS,
)
def test_counter_against_the_oracle(
    rows: list[tuple[int, float, int]],
    wraps_at: float | None,
    period_ms: float,
    pairs: list[tuple[int, int]],
):
    segments = [int(n) for n in np.cumsum([new == 0 for _, _, new in rows])]
    s = series(
        times([r[0] for r in rows]), [r[1] for r in rows], segments, wraps_at=wraps_at, period_ms=period_ms
    )
    stretches, hold = oracle_counter(s)
    restarts = [int(s.t_ns[i]) for i in range(len(segments) - 1) if segments[i] != segments[i + 1]]
    check(from_counter(s), stretches, hold, windows_ns(pairs), restarts)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(STEPS_NS, st.floats(0, 700)), max_size=12),
    st.sampled_from([(1.0, 1.0), (20.0, 20.0), (25.5, 1.0), (1000.0, 100.0), (25.0, 100.0)]),
    WINDOWS,
    st.randoms(use_true_random=False),
)
def test_samples_against_the_oracle(
    rows: list[tuple[int, float]],
    window_and_period_ms: tuple[float, float],
    pairs: list[tuple[int, int]],
    random: Any,
):
    points = list(zip(times([r[0] for r in rows]), [r[1] for r in rows], strict=True))
    distinct = {t for t, _ in points}
    if len(distinct) == len(points):
        random.shuffle(points)  # a ring read twice may come out of order; of a tie the first one counts
    window_ms, period_ms = window_and_period_ms
    s = series(
        [t for t, _ in points],
        [p for _, p in points],
        quantity="power",
        window_ms=window_ms,
        period_ms=period_ms,
    )
    check(from_samples(s), oracle_samples(s), hold_of(s), windows_ns(pairs))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(STEPS_NS.filter(bool), st.floats(0, 700)), max_size=12), WINDOWS)
@example([(1, 5.0), (250 * MS + 1, 5.0), (S, 5.0)], [(0, 2 * S)])
def test_a_bare_log_is_held_forward(rows: list[tuple[int, float]], pairs: list[tuple[int, int]]):
    s = series(times([r[0] for r in rows]), [r[1] for r in rows], quantity="power", window_ms=None)
    check(from_samples(s), oracle_held(s, hold_of(s)), hold_of(s), windows_ns(pairs))


def as_trace(stretches: Sequence[Stretch]) -> PowerTrace:
    return PowerTrace(
        np.array([s for s, _, _ in stretches], dtype=np.int64),
        np.array([e for _, e, _ in stretches], dtype=np.int64),
        np.array([float(p) for _, _, p in stretches]),
        250 * MS,
    )


@st.composite
def traces(draw: st.DrawFn, max_size: int = 6, least_w: float = 0.0) -> list[Stretch]:
    at = EPOCH_NS + draw(st.integers(-20 * MS, 20 * MS))
    found: list[Stretch] = []
    for _ in range(draw(st.integers(0, max_size))):
        start = at + draw(st.sampled_from([0, 0, 5 * MS, 300 * MS]) | st.integers(0, 50 * MS))
        at = start + draw(st.sampled_from([1, 20 * MS, 700 * MS]) | st.integers(1, 50 * MS))
        found.append((start, at, Fraction(draw(st.floats(least_w, 700)))))
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(traces(), min_size=1, max_size=3), WINDOWS)
def test_sums_are_known_where_every_part_is(many: list[list[Stretch]], pairs: list[tuple[int, int]]):
    total = add([as_trace(stretches) for stretches in many])
    check_shape(total)
    expected = oracle_add(many)
    scale = float(sum((abs(p) * (e - s) * NS for part in many for s, e, p in part), Fraction(0)))
    for start, end in windows_ns(pairs):
        assert total.covered_s(start, end) == pytest.approx(float(covered(expected, start, end)), abs=1e-12)
        assert total.energy_j(start, end) == pytest.approx(
            float(energy(expected, start, end)), rel=1e-9, abs=1e-12 + 1e-13 * scale
        )


@settings(max_examples=300, deadline=None)
@given(
    traces(max_size=8, least_w=1.0).filter(len),
    st.lists(st.tuples(st.integers(20 * MS, 600 * MS), st.floats(0.1, 500)), min_size=1, max_size=8),
    st.integers(-30 * MS, 300 * MS),
    st.sampled_from([0, 100 * MS, 700 * MS]),
    WINDOWS,
)
def test_anchoring_against_the_oracle(
    shape: list[Stretch],
    steps: list[tuple[int, float]],
    first: int,
    every: int,
    pairs: list[tuple[int, int]],
):
    t_ns = [EPOCH_NS + first + int(t) for t in np.cumsum([0, *(s for s, _ in steps)])]
    total_j = [float(v) for v in np.cumsum([1000.0, *(j for _, j in steps)])]
    trace = anchor(as_trace(shape), series(t_ns, total_j), every)
    assert trace.anchors is not None
    chosen = [(t, Fraction(total_j[t_ns.index(t)])) for t in trace.anchors.t_ns]
    assert [t for t, _ in chosen] == oracle_anchor_times(t_ns, every)
    check(trace, oracle_anchor(shape, chosen), 250 * MS, windows_ns(pairs))
    for (t0, j0), (t1, j1) in pairwise(chosen):
        assert trace.energy_j(t0, t1) == pytest.approx(float(j1 - j0), rel=1e-9, abs=1e-10)
        assert trace.covered_s(t0, t1) == pytest.approx((t1 - t0) * 1e-9, abs=1e-12)


def oracle_anchor_times(t_ns: Sequence[int], every: int) -> list[int]:
    """The first reading, every reading `every` after the last chosen one, and the very last."""
    chosen = [t_ns[0]]
    for t in t_ns[1:]:
        if t - chosen[-1] >= every:
            chosen.append(t)
    if chosen[-1] != t_ns[-1]:
        chosen = [*(chosen[:-1] if len(chosen) > 1 else chosen), t_ns[-1]]
    return chosen


# --- the physics of a GPU -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SquareWave:
    """A load of `on_w` for `duty` of each period, and what NVML shows of it."""

    period_ns: int
    duty: float
    on_w: float = 600.0
    off_w: float = 120.0

    def energy_j(self, t_ns: Any) -> Any:
        """From EPOCH_NS to t."""
        t = np.asarray(t_ns, dtype=np.int64) - EPOCH_NS
        on_ns = int(self.period_ns * self.duty)
        whole, rest = t // self.period_ns, t % self.period_ns
        lit_ns = whole * on_ns + np.minimum(rest, on_ns)
        return (self.off_w * t + (self.on_w - self.off_w) * lit_ns) * 1e-9

    def samples(self, end_ns: int, gain: float, seed: int) -> Series:
        """Means over 20 ms, stamped with a jitter of the clock, off by a factor of the sensor's own."""
        rng = np.random.default_rng(seed)
        edges = np.arange(EPOCH_NS, end_ns, 20 * MS) + 3 * MS
        t_ns = edges + rng.integers(-200_000, 200_000, edges.size)
        power_w = gain * np.diff(self.energy_j(edges)) / 0.02
        return series(t_ns[1:], power_w, quantity="power", window_ms=20.0, period_ms=20.0)

    def steps(self, end_ns: int, seed: int) -> Series:
        """Every step of the counter, each observed half a millisecond wrong, in whole millijoules."""
        rng = np.random.default_rng(seed)
        at = np.arange(EPOCH_NS + 37 * MS, end_ns, 100 * MS)
        seen = at + rng.integers(-500_000, 500_000, at.size)
        return series(seen, np.round(self.energy_j(at), 3) + 5e5, period_ms=100.0)


def every_nth(s: Series, step: int, first: int = 0) -> Series:
    return Series(s.channel, s.t_ns[first::step], s.value[first::step], s.segment[first::step])


@pytest.mark.parametrize(
    ("period_ms", "duty"), [(200, 0.5), (100, 0.5), (100, 0.25), (50, 0.5), (330, 0.3), (5000, 0.5)]
)
@pytest.mark.parametrize("gain", [0.93, 1.0, 1.07])
def test_anchored_energy_of_a_square_wave_is_right_where_no_anchor_was(
    period_ms: int, duty: float, gain: float
):
    wave = SquareWave(period_ms * MS, duty)
    end_ns = EPOCH_NS + 60 * S
    steps = wave.steps(end_ns, seed=period_ms)
    seen = every_nth(steps, 10)  # the counter as it is read: about once a second
    trace = anchor(from_samples(wave.samples(end_ns, gain, seed=1)), seen)
    assert trace.anchors is not None
    assert trace.anchors.implausible == 0
    # Held out: steps of the counter that were never read, half a second off the anchors, 5 s apart.
    held_out = every_nth(steps, 50, first=5)
    inside = (held_out.t_ns >= seen.t_ns[0]) & (held_out.t_ns <= seen.t_ns[-1])
    t_ns = held_out.t_ns[inside]
    anchored = np.diff(trace.energy_until_j(t_ns))
    assert t_ns.size > 8
    assert np.abs(anchored / np.diff(wave.energy_j(t_ns)) - 1).max() < 0.01
    whole = trace.energy_j(int(seen.t_ns[0]), int(seen.t_ns[-1]))
    assert whole == pytest.approx(float(wave.energy_j(seen.t_ns[-1]) - wave.energy_j(seen.t_ns[0])), rel=1e-3)


def test_the_split_of_on_and_off_is_the_samples():
    wave = SquareWave(200 * MS, 0.5)
    end_ns = EPOCH_NS + 20 * S
    trace = anchor(
        from_samples(wave.samples(end_ns, 0.95, seed=2)), every_nth(wave.steps(end_ns, seed=3), 10)
    )
    begins = EPOCH_NS + 2 * S + np.arange(50) * 200 * MS
    on_j = trace.energy_until_j(begins + 100 * MS) - trace.energy_until_j(begins)
    off_j = trace.energy_until_j(begins + 200 * MS) - trace.energy_until_j(begins + 100 * MS)
    # The samples are 3 ms out of step with the load: one of ten straddles each edge.
    assert on_j.mean() == pytest.approx(60, rel=0.05)
    assert off_j.mean() == pytest.approx(12, rel=0.25)


def test_a_factor_nobody_believes_is_flagged_and_the_counter_wins():
    wave = SquareWave(200 * MS, 0.5)
    end_ns = EPOCH_NS + 20 * S
    counter = every_nth(wave.steps(end_ns, seed=4), 10)
    trace = anchor(from_samples(wave.samples(end_ns, 0.5, seed=5)), counter)
    assert trace.anchors is not None
    assert trace.anchors.implausible == trace.anchors.factor.size > 3
    t0, t1 = trace.anchors.t_ns[[0, -1]]
    assert trace.energy_j(t0, t1) == pytest.approx(float(wave.energy_j(t1) - wave.energy_j(t0)), rel=1e-3)


@pytest.mark.parametrize(("factor", "flagged"), [(0.79, 1), (0.81, 0), (1.24, 0), (1.26, 1)])
def test_the_plausible_range(factor: float, flagged: int):
    shape = as_trace([(EPOCH_NS, EPOCH_NS + 4 * S, Fraction(100))])
    trace = anchor(shape, series([EPOCH_NS, EPOCH_NS + 4 * S], [0.0, 400 * factor]))
    assert trace.anchors is not None
    assert trace.anchors.implausible == flagged


def test_anchors_are_two_seconds_apart():
    t_ns = [EPOCH_NS + i * 700 * MS for i in range(20)]
    shape = as_trace([(t_ns[0], t_ns[-1], Fraction(100))])
    trace = anchor(shape, series(t_ns, [70.0 * i for i in range(20)]))
    assert trace.anchors is not None
    assert np.diff(trace.anchors.t_ns).min() >= 2 * S
    assert trace.anchors.t_ns[-1] == t_ns[-1]


def test_one_counter_reading_sets_no_level():
    shape = as_trace([(EPOCH_NS, EPOCH_NS + S, Fraction(100))])
    assert anchor(shape, series([EPOCH_NS], [5.0])) is shape
    assert anchor(shape, series([], [])) is shape


def test_a_counter_that_wraps_gives_what_was_used():
    """100 W read every 4 ms from a counter of 3 J: it wraps 33 times in a second."""
    t_ns = [EPOCH_NS + i * 4 * MS for i in range(251)]
    s = series(t_ns, [(0.4 * i) % 3.0 for i in range(251)], wraps_at=3.0)
    trace = from_counter(s)
    assert trace.energy_j(t_ns[0], t_ns[-1]) == pytest.approx(100.0)
    assert trace.power_w == pytest.approx(np.full(250, 100.0))


def test_a_counter_that_starts_over_without_a_range_is_unknown_there():
    t_ns = [EPOCH_NS + i * 4 * MS for i in range(4)]
    trace = from_counter(series(t_ns, [10.0, 10.4, 0.1, 0.5]))
    assert trace.covered_s(t_ns[0], t_ns[-1]) == pytest.approx(0.008)
    assert trace.energy_j(t_ns[0], t_ns[-1]) == pytest.approx(0.8)


def test_a_wall_clock_that_is_set_back_counts_no_time_twice():
    """10 W; after two seconds the clock is set back by one, then it goes on for three."""
    passed = [i * 4 * MS for i in range(1251)]
    t_ns = [EPOCH_NS + t - (S if t > 2 * S else 0) for t in passed]
    trace = from_counter(series(t_ns, [t * 1e-8 for t in passed]))
    check_shape(trace)
    assert trace.energy_j(EPOCH_NS, EPOCH_NS + 2 * S) == pytest.approx(20)
    assert trace.energy_j(EPOCH_NS + S, EPOCH_NS + 2 * S) == pytest.approx(10)
    assert trace.covered_s(EPOCH_NS, EPOCH_NS + 4 * S) == pytest.approx(4)
    assert trace.energy_j(EPOCH_NS, EPOCH_NS + 4 * S) == pytest.approx(40)


@pytest.mark.parametrize("end_s", [15, 26])
def test_anchors_follow_no_clock_that_is_set_back(end_s: int):
    """100 W, and 300 W once the clock was set back from 20 s to 10 s; it ends before and after 20 s."""

    def clock(t: int) -> int:
        return EPOCH_NS + t - (10 * S if t >= 20 * S else 0)

    passed = [20 * MS * (i + 1) for i in range((end_s + 10) * 50)]
    watts = [100.0 if t < 20 * S else 300.0 for t in passed]
    samples = series([clock(t) for t in passed], watts, None, "power", window_ms=20.0, period_ms=20.0)
    steps = [2 * S * i for i in range((end_s + 10) // 2 + 1)]
    joules = [100e-9 * t if t < 20 * S else 2000 + 300e-9 * (t - 20 * S) for t in steps]
    trace = device_traces(samples, series([clock(t) for t in steps], joules, period_ms=2000.0))["gpu:0"]
    check_shape(trace)
    assert trace.anchors is not None
    assert (np.diff(trace.anchors.t_ns) > 0).all()
    assert trace.anchors.implausible == 0
    assert trace.energy_j(EPOCH_NS, EPOCH_NS + 18 * S) == pytest.approx(1800, rel=1e-6)
    if end_s > 20:
        assert trace.energy_j(EPOCH_NS + 20 * S, EPOCH_NS + 26 * S) == pytest.approx(1800, rel=0.02)


def test_a_gpu_lost_mid_run_is_missing_from_then_on():
    wave = SquareWave(200 * MS, 0.5)
    lost_ns = EPOCH_NS + 10 * S
    trace = anchor(from_samples(wave.samples(lost_ns, 1.0, 6)), every_nth(wave.steps(lost_ns, 7), 10))
    assert trace.missing_s(EPOCH_NS, EPOCH_NS + 30 * S) == pytest.approx(20, abs=0.1)
    assert trace.energy_j(lost_ns + 100 * MS, EPOCH_NS + 30 * S) == 0
    assert trace.energy_j(EPOCH_NS, lost_ns) == pytest.approx(float(wave.energy_j(lost_ns)), rel=0.01)


def test_samples_that_were_lost_are_filled_from_the_counter():
    wave = SquareWave(200 * MS, 0.5)
    end_ns = EPOCH_NS + 20 * S
    samples = wave.samples(end_ns, 1.0, 8)
    kept = (samples.t_ns < EPOCH_NS + 6 * S) | (samples.t_ns > EPOCH_NS + 11 * S)
    holed = Series(samples.channel, samples.t_ns[kept], samples.value[kept], samples.segment[kept])
    counter = every_nth(wave.steps(end_ns, 9), 10)
    trace = anchor(from_samples(holed), counter)
    t0, t1 = int(counter.t_ns[0]), int(counter.t_ns[-1])
    assert trace.missing_s(t0, t1) == 0
    assert trace.energy_j(t0, t1) == pytest.approx(float(wave.energy_j(t1) - wave.energy_j(t0)), rel=1e-3)


def test_a_counter_that_starts_over_makes_no_negative_power():
    shape = as_trace([(EPOCH_NS, EPOCH_NS + 8 * S, Fraction(100))])
    t_ns = [EPOCH_NS + i * 2 * S for i in range(5)]
    trace = anchor(shape, series(t_ns, [1000.0, 1200.0, 50.0, 250.0, 450.0]))
    assert (trace.power_w >= 0).all()


def test_a_counter_that_starts_over_fills_no_gap():
    """A GPU that was reset: what it used meanwhile nobody knows."""
    t_ns = [EPOCH_NS + t * S for t in (0, 2, 602, 604)]
    shape = as_trace([(t_ns[0], t_ns[0] + 3 * S, Fraction(100)), (t_ns[2] - S, t_ns[3], Fraction(100))])
    trace = anchor(shape, series(t_ns, [1000.0, 1200.0, 50.0, 250.0]))
    assert trace.energy_j(t_ns[0], t_ns[-1]) == pytest.approx(600)
    assert trace.missing(t_ns[0], t_ns[-1]) == [(t_ns[0] + 3 * S, t_ns[2] - S)]


def test_an_anchored_counter_wraps_like_any_other():
    shape = as_trace([(EPOCH_NS, EPOCH_NS + 4 * S, Fraction(100))])
    t_ns = [EPOCH_NS, EPOCH_NS + 2 * S, EPOCH_NS + 4 * S]
    trace = anchor(shape, series(t_ns, [900.0, 100.0, 300.0], wraps_at=1000.0))
    assert trace.energy_j(t_ns[0], t_ns[-1]) == pytest.approx(400)


def test_samples_of_zero_do_not_hide_what_the_counter_saw():
    shape = as_trace([(EPOCH_NS, EPOCH_NS + 4 * S, Fraction(0))])
    trace = anchor(shape, series([EPOCH_NS, EPOCH_NS + 4 * S], [0.0, 400.0]))
    assert trace.energy_j(EPOCH_NS, EPOCH_NS + 4 * S) == pytest.approx(400)


# --- whole devices ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Canned:
    """As much of a recording as the power traces ask for."""

    power: tuple[Series, ...]
    thinned: None = None

    def once(self, what: str, work_out: Callable[[], Any]) -> Any:
        return work_out()

    def series(self, table: str) -> list[Series]:
        assert table == "power"
        return list(self.power)


def device_traces(*members: Series) -> dict[str, PowerTrace]:
    canned: Any = Canned(members)
    recording: Recording = canned
    return device_power.device_traces(recording)


def main_channels(*members: Series) -> dict[str, Channel]:
    canned: Any = Canned(members)
    recording: Recording = canned
    return device_power.main_channels(recording)


def test_two_dies_of_a_socket_add_up():
    t_ns = [EPOCH_NS + i * 4 * MS for i in range(251)]
    first = series(t_ns, [0.2 * i for i in range(251)], device="cpu:0")
    second = series([t + 50_000 for t in t_ns], [0.1 * i for i in range(251)], device="cpu:0")
    trace = device_traces(first, second)["cpu:0"]
    assert trace.energy_j(t_ns[0], t_ns[-1]) == pytest.approx(75, rel=1e-3)
    assert trace.power_w == pytest.approx(np.full(trace.power_w.size, 75.0))


def test_of_two_sensors_of_a_device_the_first_counts():
    """A plug-in that reads what we read adds nothing to it."""
    t_ns = [EPOCH_NS + i * 100 * MS for i in range(11)]
    ours = series(t_ns, [float(i) for i in range(11)], device="cpu:0")
    for quantity in ("energy", "power"):
        plugin = series(t_ns, [float(i) for i in range(11)], None, quantity, device="cpu:0", window_ms=100.0)
        theirs = replace(plugin, channel=replace(plugin.channel, sensor="wallplug", provenance="estimated"))
        assert device_traces(ours, theirs)["cpu:0"].energy_j(t_ns[0], t_ns[-1]) == pytest.approx(10)
        assert main_channels(ours, theirs)["cpu:0"] == ours.channel


def test_a_restart_that_finds_another_sensor_loses_nothing_that_was_measured():
    """A daemon that is gone, say: its successor's estimate is no measurement, and the counter is no less."""
    before, after = ([EPOCH_NS + s * S + i * 4 * MS for i in range(251)] for s in (0, 2))
    rapl = series(before, [0.2 * i for i in range(251)], device="cpu:0")
    estimate = series(after, [0.2 * i for i in range(251)], [1] * 251, device="cpu:0")
    estimate = replace(estimate, channel=replace(estimate.channel, sensor="estimate", provenance="estimated"))
    trace = device_traces(rapl, estimate)["cpu:0"]
    assert trace.energy_j(before[0], after[-1]) == pytest.approx(50)
    assert trace.missing(before[0], after[-1]) == [(before[-1], after[-1])]
    assert main_channels(rapl, estimate)["cpu:0"].provenance == "measured"


def test_a_sample_of_the_end_of_its_period_stands_for_all_of_it():
    t_ns = [EPOCH_NS + i * 100 * MS for i in range(101)]
    trace = from_samples(series(t_ns, [300.0] * 101, quantity="power", window_ms=25.0, period_ms=100.0))
    assert trace.energy_j(t_ns[0], t_ns[-1]) == pytest.approx(3000)
    assert trace.missing(t_ns[0], t_ns[-1]) == []


def test_a_sample_that_is_no_number_is_none():
    t_ns = [EPOCH_NS + i * 20 * MS for i in range(1, 8)]
    values = [10.0, 10.0, float("nan"), float("inf"), float("nan"), 10.0, 10.0]
    trace = from_samples(series(t_ns, values, quantity="power", window_ms=20.0))
    assert trace.energy_j(EPOCH_NS, t_ns[-1]) == pytest.approx(0.8)
    assert trace.covered_s(EPOCH_NS, t_ns[-1]) == pytest.approx(0.08)


def test_no_anchor_reaches_across_a_restart():
    t_ns = [EPOCH_NS + i * 20 * MS for i in range(500)]
    later = [t + 20 * S for t in t_ns]
    segments = [0] * 500 + [1] * 500
    samples = series(t_ns + later, [100.0] * 1000, segments, "power", window_ms=20.0, period_ms=20.0)
    counter = series(
        [t_ns[0], t_ns[-1], later[0], later[-1]], [0.0, 998.0, 9000.0, 9998.0], [0, 0, 1, 1], period_ms=100.0
    )
    trace = device_traces(samples, counter)["gpu:0"]
    check_shape(trace)
    assert trace.missing_s(t_ns[0], later[-1]) == pytest.approx(10.0, abs=0.05)
    assert trace.energy_j(t_ns[0], later[-1]) == pytest.approx(1998, rel=0.003)
    assert trace.anchors is not None
    assert trace.anchors.implausible == 0


@pytest.mark.parametrize("window_ms", [1000.0, 20.0, None])
def test_a_restart_never_makes_stretches_overlap(window_ms: float | None):
    before = [EPOCH_NS + i * 100 * MS for i in range(50)]
    after = [before[-1] + 30 * MS + i * 100 * MS for i in range(50)]
    samples = series(before + after, [100.0] * 100, [0] * 50 + [1] * 50, "power", window_ms=window_ms)
    trace = device_traces(samples)["gpu:0"]
    assert (
        trace.energy_j(before[0] - S, after[-1] + S)
        <= 100.0 * (after[-1] + 1.1 * S - before[0]) * 1e-9 + 1e-6
    )
    check_shape(trace)


def test_a_segment_of_counter_readings_alone_is_not_lost():
    before = [EPOCH_NS + i * 20 * MS for i in range(500)]
    samples = series(before, [100.0] * 500, None, "power", window_ms=20.0, period_ms=20.0)
    after = [EPOCH_NS + 12 * S + i * S for i in range(10)]
    counter = series(
        [before[0], before[-1], *after],
        [0.0, 998.0, *(2000.0 + 100 * i for i in range(10))],
        [0, 0, *([1] * 10)],
        period_ms=100.0,
    )
    trace = device_traces(samples, counter)["gpu:0"]
    assert trace.energy_j(after[0], after[-1]) == pytest.approx(900)


def test_a_part_is_a_trace_of_its_own():
    t_ns = [EPOCH_NS, EPOCH_NS + 4 * MS]
    found = device_traces(
        series(t_ns, [0.0, 1.0], device="cpu:0"), series(t_ns, [0.0, 0.5], device="cpu:0/core", scope="part")
    )
    assert {name: t.energy_j(*t_ns) for name, t in found.items()} == {"cpu:0": 1.0, "cpu:0/core": 0.5}


def test_no_readings_make_an_empty_trace():
    for trace in (
        from_counter(series([], [])),
        from_samples(series([], [], quantity="power", window_ms=20.0)),
    ):
        assert trace.energy_j(EPOCH_NS, EPOCH_NS + S) == 0
        assert trace.covered_s(EPOCH_NS, EPOCH_NS + S) == 0
        assert trace.missing_s(EPOCH_NS, EPOCH_NS + S) == 1.0


def test_energies_of_neighbouring_stretches_add_up_over_hours():
    """A day at 4 ms: a cumulative sum of doubles must still know a single millisecond."""
    count = 2_000_000
    t_ns = EPOCH_NS + np.arange(count, dtype=np.int64) * 4 * MS
    trace = PowerTrace(t_ns[:-1], t_ns[1:], np.full(count - 1, 512.0))
    assert trace.energy_j(int(t_ns[-2]), int(t_ns[-1])) == pytest.approx(512 * 0.004, rel=1e-6)
    parts = np.diff(trace.energy_until_j(t_ns[:: count // 7]))
    whole = trace.energy_j(int(t_ns[0]), int(t_ns[:: count // 7][-1]))
    assert parts.sum() == pytest.approx(whole, rel=1e-12)
