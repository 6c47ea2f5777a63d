"""The whole path without a GPU: programs run on a simulated card whose truth is known, are recorded, replayed
by the code that ships, and accounted. Every figure is of fixed seeds, in the card's own time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from simulated_calibration import CALIBRATED, EQUAL, LIMITED, NAIVE, ONE, TWO, Figures, judge
from simulated_card import LIMIT_W, TOP_MHZ, UUID, SimulatedCall, SimulatedCard, SimulatedCards
from smaragdine.accounting.calibrated import CallPower
from smaragdine.calibrate.powers import held, powers
from smaragdine.calibrate.replay import Call
from smaragdine.calibrate.store import CacheState, MeasuredCall

SEEDS = (1, 2, 7, 15, 21, 26, 28, 55)


@pytest.mark.parametrize("window_ms", [20, 100])
def test_calibrated_rows_are_near_the_truth_and_intervals_cover_it(tmp_path: Path, window_ms: int) -> None:
    found = [judge(tmp_path / str(seed), seed, window_ms) for seed in SEEDS]
    assert all("rows rest on calibration" in each.closure for each in found)
    equal, naive, calibrated = (
        Figures.of([row for each in found for row in each.rows[name]]) for name in (EQUAL, NAIVE, CALIBRATED)
    )
    assert calibrated.error < 0.03
    assert calibrated.covered > 0.9
    assert calibrated.by_energy > 0.9
    assert calibrated.width < 0.12
    assert naive.error > 2 * calibrated.error
    assert equal.error > 5 * calibrated.error
    for kind in (ONE, TWO, LIMITED):
        rows = [row for each in found if each.kind == kind for row in each.rows[CALIBRATED]]
        assert Figures.of(rows).error < 0.04, kind


# The card itself: what the figures above rest on.


def product(**other: float) -> SimulatedCall:
    facts = {"time_s": 2e-4, "core_j": 0.14, "memory_j": 0.02, "bound": 1.0, "bytes": 100 << 20}
    facts |= {"hot_time": 0.0, "hot_energy": 0.3, "wants": 0.9, "values": 1.0}
    return SimulatedCall(op="aten::mm", **{**facts, **other})  # pyright: ignore[reportArgumentType]


def ran(call: SimulatedCall, rest: float, cold: bool = True) -> tuple[float, float, SimulatedCard]:
    """Energy above idle and seconds of one call, and the card after it."""
    card = SimulatedCard(1, 20)
    process = SimulatedCards(card, {0: call}).process("", {})
    process.ask(do="prepare", call=0, cold=cold)
    process.ask(do="load", rest=rest)
    process.let_pass(2.0)
    before_j, before_s = card.energy_j, card.now_s
    process.let_pass(1.0)
    power_w = (card.energy_j - before_j) / (card.now_s - before_s)
    load = process.load
    assert load is not None
    part = load.on_s / (load.on_s + load.off_s)
    one_s = load.on_s / (load.turns * load.count)
    return (power_w - card.static_w()) / part * one_s, one_s, card


def test_back_to_back_a_product_meets_the_limit_and_a_sum_does_not() -> None:
    rested_j, rested_s, free = ran(product(), rest=1.0)
    packed_j, packed_s, limited = ran(product(), rest=0.0)
    assert free.clock_mhz == TOP_MHZ
    assert limited.clock_mhz < 1700
    assert limited.mean_w == pytest.approx(LIMIT_W, rel=0.03)
    assert packed_s > 1.05 * rested_s
    assert packed_j < 0.9 * rested_j
    _, _, small = ran(product(core_j=0.02), rest=0.0)
    assert small.clock_mhz == TOP_MHZ


def test_between_two_clocks_power_lies_between() -> None:
    """A product that draws 700 W above idle at 2000 MHz and 400 W at 1500."""
    free = CacheState(800.0, 1.0e-3, spread=0.0, clock_mhz=2000.0, slowed=0.0, temperature_c=50.0, rest=1.0)
    slow = CacheState(500.0, 1.2e-3, spread=0.0, clock_mhz=1500.0, slowed=1.0, temperature_c=50.0, rest=0.0)
    met = MeasuredCall("k", "aten::mm", UUID, "a card", "driver", "torch", 100.0, free, limited=slow)
    never = dataclasses.replace(met, limited=None)

    def at(replay: MeasuredCall, clock_mhz: float) -> CallPower:
        call = Call(0, "k", "aten::mm", {}, {}, (), count=10, busy_s=10 * 1.1e-3)
        return powers([call], {"k": replay}, 100.0, False, clock_mhz)[0]

    # 1.0 ms is not the program's 1.1, and the work is the same.
    assert at(met, 2000.0).power_w == pytest.approx(100 + 700 * 1.0 / 1.1)
    assert at(met, 2000.0).gap > 0.04
    assert at(met, 1750.0).power_w == pytest.approx(650.0)
    assert at(met, 1750.0).gap == 0.0
    assert at(never, 2000.0) == at(met, 2000.0)
    assert 700 < at(never, 1750.0).power_w < at(never, 2000.0).power_w
    assert at(never, 1750.0).deviation > at(never, 2000.0).deviation


def test_a_clock_holds_until_it_is_read_anew() -> None:
    t_ns, mhz = np.array([0, 400, 900]), np.array([2000.0, 1500.0, 1000.0])
    for (begin_ns, end_ns), (length_s, mean) in {
        (100, 300): (200e-9, 2000.0),  # nothing was read in it
        (300, 500): (200e-9, 1750.0),
        (400, 1000): (600e-9, (500 * 1500 + 100 * 1000) / 600),
        (-100, 100): (100e-9, 2000.0),  # known from its first reading on
    }.items():
        known_s, cycles = held(t_ns, mhz, begin_ns, end_ns)
        assert known_s == pytest.approx(length_s)
        assert cycles / known_s == pytest.approx(mean)
    assert held(t_ns[:0], mhz[:0], 0, 100) == (0.0, 0.0)


def test_what_waits_for_memory_does_not_follow_the_clock() -> None:
    call = product(bound=0.0, core_j=0.04)
    assert call.time_at(1400, 0.0) == call.time_at(TOP_MHZ, 0.0)
    assert product().time_at(TOP_MHZ / 2, 0.0) == 2 * product().time_at(TOP_MHZ, 0.0)


def test_hot_inputs_take_less_and_large_ones_are_never_hot() -> None:
    hot_j, *_ = ran(product(bytes=10 << 20), rest=1.0, cold=False)
    cold_j, *_ = ran(product(bytes=10 << 20), rest=1.0, cold=True)
    assert hot_j < 0.98 * cold_j
    large_j, *_ = ran(product(), rest=1.0, cold=False)
    assert large_j == pytest.approx(ran(product(), rest=1.0, cold=True)[0], rel=0.001)


def test_a_warm_card_draws_more_at_rest() -> None:
    card = SimulatedCard(1, 20)
    cool_w = card.static_w()
    for _ in range(2000):
        card.pass_by(0.005, 500.0)
    assert card.temperature_c > 40
    assert card.static_w() > cool_w + 5
