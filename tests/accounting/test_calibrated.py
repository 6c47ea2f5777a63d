"""Rows by what each call draws alone: exact where replays are, conserved always."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smaragdine.accounting.account import account_meters, event_energies_j
from smaragdine.accounting.calibrated import BASIS, MODEL, Calibration, CallPower, UntracedLevel
from smaragdine.accounting.device_power import DevicePower, DevicePowers
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.intervals import grouped
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.uncertainty import sensor_of
from smaragdine.recording.format import EVENTS_WITH_CALLS
from smaragdine.recording.writer import fit

GPU = "gpu:0"
MS = 1_000_000
IDLE_W = 100.0

Made = tuple[str, int, int, int | None, int]  # name, start and end in ms, call, lane


def events(rows: Sequence[Made], step_ms: int | None = None) -> pa.Table:
    return fit(
        pa.table(
            {
                "name": [row[0] for row in rows],
                "device": [GPU] * len(rows),
                "start_ns": [row[1] * MS for row in rows],
                "duration_ns": [(row[2] - row[1]) * MS for row in rows],
                "phase": ["forward"] * len(rows),
                "lane": [row[4] for row in rows],
                "step": [None if step_ms is None else row[1] // step_ms for row in rows],
                "call": pa.array([row[3] for row in rows], pa.int64()),
            }
        ),
        EVENTS_WITH_CALLS,
        "events",
    )


def sensed(
    rows: Sequence[Made], above_w: dict[int | None, float], until_ms: int, window_ms: int
) -> PowerTrace:
    """What a sensor with that window reads while every call draws what it truly draws above idle."""
    fine = np.full(until_ms, IDLE_W)
    for _, begin, end, call, _ in rows:
        fine[begin:end] += above_w[call]
    edges = np.arange(0, until_ms, window_ms)
    mean_w = np.array([fine[at : at + window_ms].mean() for at in edges])
    return PowerTrace(
        edges * MS, np.minimum(edges + window_ms, until_ms) * MS, mean_w, hold_ns=2 * window_ms * MS
    )


def meters(
    trace: PowerTrace,
    calls: dict[int, float],
    idle_w: float | None = IDLE_W,
    guessed: dict[int, tuple[float, float]] | None = None,
) -> DevicePowers:
    """`guessed`: power above idle and its deviation, by the model of the card."""
    known = {call: CallPower(IDLE_W + above_w, 0.01) for call, above_w in calls.items()}
    for call, (above_w, deviation) in (guessed or {}).items():
        known[call] = CallPower(IDLE_W + above_w, deviation, modelled=True)
    sensor = sensor_of(trace, IDLE_W, 700.0)
    power = DevicePower(trace, sensor, idle_w=idle_w, calibration=Calibration(known, IDLE_W))
    return DevicePowers({GPU: power})


def by_name(found: Footprint) -> dict[str, float]:
    rows = found.device_rows(GPU).to_pylist()
    return {row["name"]: row["energy_j"] for row in rows}


def check_conserved(found: Footprint, trace: PowerTrace) -> None:
    total_j = float((trace.power_w * (trace.end_ns - trace.start_ns)).sum() * 1e-9)
    assert sum(by_name(found).values()) + found.devices[GPU].idle_j == pytest.approx(total_j, rel=1e-12)


# Twenty steps of 20 ms in one sensor window each: a product, a sum, and 5 ms in which nothing runs.
STEPS = [
    made
    for step in range(20)
    for made in (
        ("net/mm", 20 * step, 20 * step + 5, 1, 7),
        ("net/sum", 20 * step + 5, 20 * step + 15, 2, 7),
    )
]
TRUE_W = {1: 800.0, 2: 150.0}


def test_what_shares_a_window_is_told_apart() -> None:
    trace = sensed(STEPS, {**TRUE_W}, 400, 20)
    found = account_meters(events(STEPS, 20), meters(trace, TRUE_W))
    check_conserved(found, trace)
    assert by_name(found) == pytest.approx({"net/mm": 0.1 * 900, "net/sum": 0.2 * 250}, rel=1e-9)
    assert found.devices[GPU].idle_j == pytest.approx(0.1 * IDLE_W, rel=1e-9)
    rows = found.device_rows(GPU).to_pylist()
    assert {row["basis"] for row in rows} == {BASIS}
    assert [row["step_mean_j"] for row in rows] == pytest.approx([4.5, 2.5])
    assert [row["step_std_j"] for row in rows] == pytest.approx([0, 0], abs=1e-9)
    assert "100.0% of the busy time was replayed" in found.remarks[-1]
    assert "explain 100.0% of the energy counter" in found.remarks[-1]


def test_equal_shares_could_not() -> None:
    """The error that calibration takes away, so that the test above is known to test something."""
    trace = sensed(STEPS, {**TRUE_W}, 400, 20)
    plain = DevicePowers({GPU: DevicePower(trace, sensor_of(trace, IDLE_W, 700.0), idle_w=IDLE_W)})
    product_j = by_name(account_meters(events(STEPS, 20), plain))["net/mm"]
    assert product_j == pytest.approx(90, rel=0.6)
    assert abs(product_j - 90) > 20


def test_streams_that_overlap_pay_the_idle_card_once() -> None:
    rows = [("net/a", 0, 100, 1, 7), ("net/b", 0, 100, 2, 8)]
    trace = sensed(rows, {1: 300.0, 2: 100.0}, 100, 20)
    found = account_meters(events(rows), meters(trace, {1: 300.0, 2: 100.0}))
    check_conserved(found, trace)
    assert by_name(found) == pytest.approx({"net/a": 30 + 5, "net/b": 10 + 5}, rel=1e-9)


def test_streams_that_slow_each_other_down_take_the_energy_of_their_work() -> None:
    """Call 1 takes 20 J above idle: in 50 ms alone, and in 100 ms beside call 2, which it slows down, too."""
    rows = [("net/a", 0, 100, 1, 7), ("net/b", 0, 100, 2, 8), ("net/c", 100, 200, 3, 7)]
    alone = ("net/a", 200, 250, 1, 7)
    trace = sensed([*rows, ("", 200, 250, 4, 7)], {1: 200.0, 2: 50.0, 3: 300.0, 4: 400.0}, 250, 10)
    calls = {
        1: CallPower(IDLE_W + 20 / 0.075, 0.01, gap=0.3, alone=50 / 75),
        2: CallPower(IDLE_W + 50, 0.01, gap=0.3, alone=0.5),
        3: CallPower(IDLE_W + 300, 0.01),
    }
    sensor = sensor_of(trace, IDLE_W, 700.0)
    power = DevicePower(trace, sensor, idle_w=IDLE_W, calibration=Calibration(calls, IDLE_W))
    table, known = events([*rows, alone]), DevicePowers({GPU: power})
    found = account_meters(table, known)
    check_conserved(found, trace)
    expected = {"net/a": 2 * 20 + 5 + 5, "net/b": 5 + 5, "net/c": 30 + 10}
    assert by_name(found) == pytest.approx(expected, rel=1e-9)
    assert event_energies_j(table, known) == pytest.approx([20 + 5, 5 + 5, 30 + 10, 20 + 5], rel=1e-9)
    widths = {row["name"]: row["uncertainty_j"] for row in found.device_rows(GPU).to_pylist()}
    assert widths["net/a"] < 0.3 * 50  # the gap in time is explained


def test_what_nobody_replayed_takes_what_is_left() -> None:
    rows = [*STEPS, *((f"net/strange_{n}", 20 * n + 15, 20 * n + 20, None, 7) for n in range(20))]
    trace = sensed(rows, {**TRUE_W, None: 400.0}, 400, 20)
    found = account_meters(events(rows, 20), meters(trace, TRUE_W))
    check_conserved(found, trace)
    energy_j = by_name(found)
    strange = [row for row in found.device_rows(GPU).to_pylist() if "strange" in row["name"]]
    assert {row["basis"] for row in strange} == {"prior"}
    assert sum(row["energy_j"] for row in strange) == pytest.approx(0.1 * 500, rel=0.15)
    assert all(abs(row["energy_j"] - 2.5) <= row["uncertainty_j"] for row in strange)
    assert energy_j["net/mm"] == pytest.approx(90, rel=0.1)


def test_a_model_that_is_far_off_costs_the_replays_nothing() -> None:
    """The model guesses 5 kW, give or take twice that, where 400 W are drawn: what was replayed stays."""
    rows = [*STEPS, *(("net/strange", 20 * n + 15, 20 * n + 20, 3, 7) for n in range(20))]
    trace = sensed(rows, {**TRUE_W, 3: 400.0}, 400, 20)
    found = account_meters(events(rows, 20), meters(trace, TRUE_W, guessed={3: (5000.0, 2.0)}))
    check_conserved(found, trace)
    assert by_name(found)["net/mm"] == pytest.approx(90, rel=0.05)
    assert by_name(found)["net/strange"] == pytest.approx(50, rel=0.3)
    # A guess that knows itself to be right is another matter: then the replays describe no such program.
    sure = account_meters(events(rows, 20), meters(trace, TRUE_W, guessed={3: (5000.0, 0.01)}))
    assert "does not describe this run" in sure.remarks[-1]


def test_what_is_modelled_gives_way_before_what_is_replayed() -> None:
    """The model guesses 300 W where 400 W are drawn: the counter says so, and replayed rows hardly move."""
    rows = [*STEPS, *(("net/strange", 20 * n + 15, 20 * n + 20, 3, 7) for n in range(20))]
    trace = sensed(rows, {**TRUE_W, 3: 400.0}, 400, 20)
    found = account_meters(events(rows, 20), meters(trace, TRUE_W, guessed={3: (300.0, 0.2)}))
    check_conserved(found, trace)
    row = {row["name"]: row for row in found.device_rows(GPU).to_pylist()}
    assert {name: each["basis"] for name, each in row.items()} == {
        "net/mm": BASIS,
        "net/sum": BASIS,
        "net/strange": MODEL,
    }
    assert row["net/mm"]["energy_j"] == pytest.approx(90, rel=0.05)
    assert row["net/strange"]["energy_j"] == pytest.approx(50, rel=0.15)
    assert abs(row["net/strange"]["energy_j"] - 50) <= row["net/strange"]["uncertainty_j"]
    assert "75.0% of the busy time was replayed and 25.0% modelled" in found.remarks[-1]
    # What the model misses it misses in all calls alike: two of them are not surer together than one.
    both = [
        (*row[:3], 3 if row[1] % 40 < 20 else 4, row[4]) if row[0] == "net/strange" else row for row in rows
    ]
    both = [(f"strange/{row[3]}" if row[3] in (3, 4) else row[0], *row[1:]) for row in both]
    apart = account_meters(
        events(both, 20), meters(trace, TRUE_W, guessed={3: (300.0, 0.01), 4: (300.0, 0.01)})
    )
    alike = [row["uncertainty_j"] for row in apart.device_rows(GPU).to_pylist() if "strange" in row["name"]]
    layers = {row["name"]: row for row in grouped(apart, "layer", 1).device_rows(GPU).to_pylist()}
    assert layers["strange"]["uncertainty_j"] > 0.95 * sum(alike)
    # Where nothing was replayed, the model is what there is.
    guesses = {1: (750.0, 0.2), 2: (180.0, 0.2), 3: (450.0, 0.2)}
    alone = account_meters(events(rows, 20), meters(trace, {}, guessed=guesses))
    check_conserved(alone, trace)
    for each in alone.device_rows(GPU).to_pylist():
        true_w = {"net/mm": 900, "net/sum": 250, "net/strange": 500}[each["name"]]
        assert each["basis"] == MODEL
        assert abs(each["energy_j"] - true_w * each["busy_s"]) <= each["uncertainty_j"]


def test_the_counter_has_the_last_word() -> None:
    """Replays that are all 4 % too high: rows come out right, and a remark says what replays came to."""
    high = {call: 1.04 * above_w for call, above_w in TRUE_W.items()}
    trace = sensed(STEPS, {**TRUE_W}, 400, 20)
    found = account_meters(events(STEPS, 20), meters(trace, high))
    check_conserved(found, trace)
    assert by_name(found) == pytest.approx({"net/mm": 90, "net/sum": 50}, rel=0.01)
    assert "explain 102.9% of the energy counter" in found.remarks[-1]


def test_the_closure_is_that_of_untraced_steps_where_they_are_known() -> None:
    """A window that the sensor saw 10 % too low says nothing of the replays: many untraced steps do. They
    take 15 ms, of which the operations take as long as in traced ones."""
    seen = sensed(STEPS, {**TRUE_W}, 400, 20)
    low = dataclasses.replace(seen, power_w=0.9 * seen.power_w)
    step_j = 0.005 * 800 + 0.010 * 150 + 0.015 * IDLE_W
    for level, said in (
        (None, "explain 111.1% of the energy counter,"),
        (UntracedLevel(20, 0.015, step_j), "explain 100.0% of the energy counter in steps without tracing"),
        (UntracedLevel(20, 0.005, step_j), "explain 111.1% of the energy counter,"),  # no step is so short
    ):
        known = meters(low, TRUE_W)
        power = dataclasses.replace(known.of[GPU], untraced=level)
        found = account_meters(events(STEPS, 20), DevicePowers({GPU: power}))
        check_conserved(found, low)
        assert said in found.remarks[-1]


def test_replays_of_another_program_are_refused() -> None:
    trace = sensed(STEPS, {**TRUE_W}, 400, 20)
    plain = DevicePowers({GPU: DevicePower(trace, sensor_of(trace, IDLE_W, 700.0), idle_w=IDLE_W)})
    found = account_meters(events(STEPS, 20), meters(trace, {1: 8000.0, 2: 10.0}))
    assert by_name(found) == by_name(account_meters(events(STEPS, 20), plain))
    assert "does not describe this run" in found.remarks[-1]


def test_events_and_rows_are_the_same_energy() -> None:
    trace = sensed(STEPS, {**TRUE_W}, 400, 20)
    table, known = events(STEPS, 20), meters(trace, TRUE_W)
    energy_j = event_energies_j(table, known)
    assert energy_j.sum() == pytest.approx(sum(by_name(account_meters(table, known)).values()), rel=1e-12)


def test_a_group_is_known_better_than_its_rows_together() -> None:
    trace = sensed(STEPS, {**TRUE_W}, 400, 20)
    found = account_meters(events(STEPS, 20), meters(trace, TRUE_W))
    rows_j = sum(row["uncertainty_j"] for row in found.device_rows(GPU).to_pylist())
    (whole,) = grouped(found, "layer", 1).device_rows(GPU).to_pylist()
    assert whole["energy_j"] == pytest.approx(140)
    assert whole["uncertainty_j"] < rows_j
    assert whole["uncertainty_j"] < 0.03 * 140


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_conserved_and_covered_whatever_runs(data: st.DataObject) -> None:
    """Calls of any power on two streams, replays off by what they say they are, some of them missing."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    count = int(random.integers(2, 12))
    true_w = {call: float(random.uniform(0, 700)) for call in range(count)}
    rows: list[Made] = []
    for lane in (7, 8):
        t = 0
        while t < 380:
            t += int(random.integers(0, 6))
            long = int(random.integers(1, 9))
            call = int(random.integers(0, count))
            rows.append((f"net/{call}", t, min(t + long, 400), call, lane))
            t += long
    rows = [row for row in rows if row[1] < row[2]]
    trace = sensed(rows, {**true_w}, 400, 20)
    replayed = {c: w * float(random.normal(1, 0.03)) for c, w in true_w.items() if random.uniform() < 0.9}
    found = account_meters(events(rows), meters(trace, {**replayed}))
    check_conserved(found, trace)
