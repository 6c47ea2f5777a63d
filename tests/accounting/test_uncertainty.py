"""The error bar: it covers the truth, is narrow where the sensor is fast, and says what it rests on."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from smaragdine.accounting.account import account
from smaragdine.accounting.arithmetic import per_step
from smaragdine.accounting.device_power import DevicePower
from smaragdine.accounting.diagram import diagram, walk
from smaragdine.accounting.intervals import grouped
from smaragdine.accounting.merge import merge
from smaragdine.accounting.power import PowerTrace, from_log
from smaragdine.accounting.uncertainty import sensor_of
from smaragdine.recording.format import EVENTS
from smaragdine.stats import t_quantile

BENCH = Path(__file__).parents[2] / "bench"
MS = 1_000_000


def bench(name: str) -> ModuleType:
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    return importlib.import_module(name)


def loop(lengths_ms: dict[str, float], steps: int) -> pa.Table:
    """The same operations one after the other, step by step, without a pause."""
    names = list(lengths_ms)
    length_ns = np.tile(np.array([int(ms * MS) for ms in lengths_ms.values()]), steps)
    count = length_ns.size
    return pa.table(
        {
            "name": pa.array(names * steps).dictionary_encode(),
            "device": pa.array(["gpu:0"] * count).dictionary_encode(),
            "start_ns": np.cumsum(length_ns) - length_ns,
            "duration_ns": length_ns,
            "phase": pa.nulls(count, pa.dictionary(pa.int32(), pa.string())),
            "lane": np.zeros(count, dtype=np.int64),
            "step": np.repeat(np.arange(steps), len(names)),
        },
        schema=EVENTS,
    )


def seen(lengths_ms: dict[str, float], power_w: dict[str, float], window_ms: float, steps: int) -> PowerTrace:
    """What a sensor of that window says of the loop: exact means."""
    edges_ns = np.concatenate([[0], np.cumsum(np.tile([int(ms * MS) for ms in lengths_ms.values()], steps))])
    until_j = np.concatenate([[0.0], np.cumsum(np.tile(list(power_w.values()), steps) * np.diff(edges_ns))])
    cuts_ns = np.append(np.arange(0, edges_ns[-1], int(window_ms * MS)), edges_ns[-1])
    mean_w = np.diff(np.interp(cuts_ns, edges_ns, until_j)) / np.diff(cuts_ns)
    return PowerTrace(cuts_ns[:-1], cuts_ns[1:], mean_w)


def figures(lengths_ms: dict[str, float], power_w: dict[str, float], window_ms: float, steps: int = 50):
    trace = seen(lengths_ms, power_w, window_ms, steps)
    sensor = sensor_of(trace, 80.0, 700.0, timing_ns=int(0.02 * window_ms * MS))
    found = account(loop(lengths_ms, steps), {"gpu:0": DevicePower(trace, sensor)})
    rows = {row["name"]: row for row in found.rows.to_pylist()}
    true_j = {name: power_w[name] * lengths_ms[name] * 1e-3 * steps for name in lengths_ms}
    return rows, true_j


@pytest.mark.parametrize("window_ms", [5, 20, 100])
@pytest.mark.parametrize("limits_known", [True, False])
def test_covers_the_truth_at_every_window(window_ms: float, limits_known: bool) -> None:
    outcome = bench("intervals").watch_programs(16, window_ms, limits_known)
    assert outcome.error.size > 300
    assert np.mean(outcome.error <= outcome.width) >= 0.9
    # That is not for want of error, nor could the spread over steps have said so.
    assert np.mean(outcome.error <= outcome.spread) < 0.2
    assert np.median(outcome.error) > 0.1


def test_a_faster_sensor_gives_a_narrower_interval() -> None:
    by_energy = [
        np.average(outcome.width, weights=outcome.energy_j)
        for outcome in (bench("intervals").watch_programs(8, window_ms, True) for window_ms in (5, 20, 100))
    ]
    assert by_energy[0] < 0.8 * by_energy[1] < 0.64 * by_energy[2] / 0.6


@pytest.mark.parametrize("window_ms", [5, 20, 100])
def test_groups_cover_the_truth_and_are_narrower_than_the_sum_of_their_rows(window_ms: float) -> None:
    outcomes = bench("intervals").watch_models(12, window_ms)
    error, width, summed = (
        np.concatenate([getattr(of, name) for of in outcomes.values()])
        for name in ("error", "width", "summed")
    )
    assert error.size > 500
    assert np.mean(error <= width) >= 0.9
    assert np.all(width <= summed * (1 + 1e-9))
    # A layer is made of what shares windows, and so is the whole model: most of its rows' errors cancel.
    assert np.median(outcomes["layer"].width / outcomes["layer"].summed) < 0.6
    assert np.median(outcomes["whole"].width / outcomes["whole"].summed) < 0.1


def test_a_group_has_one_interval_wherever_it_is_shown() -> None:
    program, _ = bench("programs").make_model(4, steps=20)
    trace = bench("programs").watch(program, 20, 4)
    found = account(program.events, {"gpu:0": DevicePower(trace, sensor_of(trace, 80.0, 700.0))})
    layers = {row["name"]: row["uncertainty_j"] for row in grouped(found, "layer", 2).rows.to_pylist()}
    nodes = {node.path: node.uncertainty_j for node in walk(diagram(found))}
    assert len(layers) > 3
    for name, width_j in layers.items():
        assert nodes[name] == pytest.approx(width_j, rel=1e-9)
    # Layers of layers, one step of them, and what is merged first: the same again.
    assert nodes["model"] == pytest.approx(
        grouped(grouped(found, "layer", 2), "layer", 1).rows["uncertainty_j"][0].as_py(), rel=1e-9
    )
    assert nodes["model"] == pytest.approx(
        grouped(merge(found), "layer", 1).rows["uncertainty_j"][0].as_py(), rel=1e-9
    )
    step = grouped(per_step(found), "layer", 1).rows["uncertainty_j"][0].as_py()
    assert nodes["model"] == pytest.approx(step * 20, rel=1e-9)
    assert nodes["model"] == pytest.approx(found.devices["gpu:0"].uncertainty_j, rel=1e-9)


def test_without_the_joint_posterior_what_lies_outside_bounds_a_group() -> None:
    """A footprint from a file has rows and totals alone: nearly all of it is nearly as well known as all."""
    program, _ = bench("programs").make_model(4, steps=20)
    trace = bench("programs").watch(program, 20, 4)
    found = account(program.events, {"gpu:0": DevicePower(trace, sensor_of(trace, 80.0, 700.0))})
    bare = dataclasses.replace(found, joints={})
    phases = {row["name"]: row["uncertainty_j"] for row in grouped(bare, "phase").rows.to_pylist()}
    by_row = dict.fromkeys(phases, 0.0)
    for row in bare.rows.to_pylist():
        by_row[row["phase"]] += row["uncertainty_j"]
    all_j = bare.devices["gpu:0"].uncertainty_j
    for name, width_j in phases.items():
        outside_j = sum(of for other, of in by_row.items() if other != name)
        assert width_j == pytest.approx(min(by_row[name], outside_j + all_j), rel=1e-9)
    assert diagram(bare).uncertainty_j == pytest.approx(all_j)


def test_an_operation_with_windows_of_its_own_is_nearly_exact() -> None:
    rows, true_j = figures({"long": 400, "short": 37}, {"long": 300, "short": 650}, window_ms=5)
    assert rows["long"]["basis"] == "resolution"
    assert abs(rows["long"]["energy_j"] - true_j["long"]) <= rows["long"]["uncertainty_j"]
    assert rows["long"]["uncertainty_j"] < 0.02 * true_j["long"]


def test_where_the_window_exceeds_the_operation_the_basis_is_a_prior() -> None:
    rows, true_j = figures({"a": 4, "b": 6, "c": 1}, {"a": 600, "b": 200, "c": 400}, window_ms=110)
    for name, row in rows.items():
        assert row["basis"] == "prior"
        # Ten whole steps in every window: nothing tells the three apart, and the interval must say so.
        assert abs(row["energy_j"] - true_j[name]) <= row["uncertainty_j"]
        assert row["uncertainty_j"] > 0.3 * row["energy_j"]


def test_repetition_in_changing_company_narrows_the_prior() -> None:
    """Windows out of step with the loop meet other mixes every time: from these the powers can be told."""
    lengths_ms, power_w = {"a": 4, "b": 6.7, "c": 5.3}, {"a": 650.0, "b": 200.0, "c": 400.0}
    in_step, _ = figures(lengths_ms, power_w, window_ms=16, steps=200)
    out_of_step, true_j = figures(lengths_ms, power_w, window_ms=7.3, steps=200)
    for name in lengths_ms:
        assert abs(out_of_step[name]["energy_j"] - true_j[name]) <= out_of_step[name]["uncertainty_j"]
        bias_j = abs(out_of_step[name]["energy_j"] - true_j[name])
        # Equal sharing is off by a known amount; little is added to it.
        assert out_of_step[name]["uncertainty_j"] < bias_j + 0.25 * true_j[name]
    widths = [sum(row["uncertainty_j"] for row in rows.values()) for rows in (in_step, out_of_step)]
    assert widths[1] < 0.6 * widths[0]


def test_two_at_a_time_cannot_be_told_apart() -> None:
    lengths = {"a": 50, "b": 50}
    events = loop(lengths, 20)
    together = events.set_column(2, "start_ns", pa.array(np.repeat(np.arange(20) * 50 * MS, 2)))
    together = together.set_column(5, "lane", pa.array(np.tile([0, 1], 20)))
    trace = PowerTrace(np.arange(0, 1000, 5) * MS, np.arange(5, 1005, 5) * MS, np.full(200, 500.0))
    found = account(together, {"gpu:0": DevicePower(trace, sensor_of(trace, 80.0, 700.0))})
    for row in found.rows.to_pylist():
        # 250 W each by equal shares; in truth one may have used all 420 W above idle, the other none.
        assert row["uncertainty_j"] >= 0.8 * 210 * row["busy_s"]


def test_what_a_log_does_not_say_is_guessed_wide() -> None:
    trace = from_log(np.arange(100) * 100 * MS, np.linspace(100, 300, 100))
    guessed = sensor_of(trace)
    assert (guessed.idle_w, guessed.limit_w) == (50.0, 600.0)
    assert guessed.window_ns == 100 * MS
    assert "idle and limit guessed" in guessed.source
    assert sensor_of(trace, 80.0, 700.0).source == "given"


def test_a_log_polled_faster_than_its_source_has_the_source_s_window() -> None:
    polled = from_log(
        np.arange(1000) * 10 * MS, np.repeat(np.random.default_rng(1).uniform(100, 300, 100), 10)
    )
    assert sensor_of(polled).window_ns == pytest.approx(100 * MS, rel=0.05)


@pytest.mark.parametrize("freedom", [0.7, 1, 2, 3.5, 9, 30, 1000])
def test_student_s_t(freedom: float) -> None:
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)
    assert t_quantile(freedom, 0.5) == pytest.approx(stats.t.ppf(0.75, freedom), rel=1e-9)
