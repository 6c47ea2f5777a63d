"""Traced and untraced steps, against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import recordings
from footprints import assert_conserved, energies, footprint, footprints, row
from smaragdine.accounting.arithmetic import average
from smaragdine.accounting.device_power import DevicePower, DevicePowers
from smaragdine.accounting.footprint import ROWS, DeviceTotal, Footprint
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.run import Run, alike
from smaragdine.accounting.spans import (
    PROFILER,
    TRACED,
    Steps,
    joined,
    mark_spans,
    step_table,
    steps_of,
    traced_spans,
)
from smaragdine.accounting.steps import (
    UntracedStep,
    at_level,
    handed_over,
    runs_behind,
    untraced_step,
)
from smaragdine.accounting.uncertainty import sensor_of
from smaragdine.recording.format import EVENTS
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.recording.writer import ReadingsWriter
from smaragdine.report.tables import step_tables, tracing_lines
from smaragdine.sensors.base import Channel
from traced_recording import (
    MS,
    T0,
    after_the_window,
    event,
    full_queue,
    mark,
    recording,
    slow_input,
    ten_and_three,
    waits_and_compiles,
    window,
    with_a_compilation,
)


def traced_steps(made: Recording) -> Steps | None:
    return steps_of(made, step_table(made))


def spans_ms(pairs: object) -> list[tuple[float, float]]:
    return [((int(b) - T0) / MS, (int(e) - T0) / MS) for b, e in pairs]  # pyright: ignore


def test_which_steps_were_traced_and_which_were_not(tmp_path: Path) -> None:
    steps = traced_steps(ten_and_three(tmp_path / "run"))
    assert steps is not None
    assert (steps.source, steps.count) == ("torch", 25)
    assert spans_ms(steps.traced_ns) == [(103, 118), (118, 133), (133, 148)]
    # Those after the window, but not the one an epoch begins in, nor the one in which the profiler stopped.
    expected = [(180 + 10 * i, 190 + 10 * i) for i in range(10) if i != 4]
    assert spans_ms(steps.untraced_ns) == expected


def test_operations_draw_no_more_than_their_device(tmp_path: Path) -> None:
    """Untraced steps take 1 J each, at 100 W, and operations run for 1 ms of them. The limit is 150 W."""
    found = ten_and_three(tmp_path / "run")
    marks, windows = found.marks.to_pylist(), found.windows.to_pylist()
    events = [event("net/mm", 103 + 15 * n, 104 + 15 * n, n) for n in range(3)]
    levels = ((102.0, 100.0), (150.0, 20.0), (400.0, 100.0))
    host = {"gpus": [{"device": "gpu:0", "power_limit_w": 150.0}]}
    step = Run(recording(tmp_path / "other", marks, windows, events, levels, host=host)).step
    assert step is not None
    total = step.devices["gpu:0"]
    (row,) = step.rows.to_pylist()
    assert total.total_j == pytest.approx(1.0)
    assert row["busy_s"] == pytest.approx(0.001)
    assert row["energy_j"] == pytest.approx(150 * 0.001)
    assert row["energy_j"] + total.idle_j == pytest.approx(total.total_j, rel=1e-12)


@pytest.mark.parametrize(
    ("device", "limit_w", "drawn_w"),
    [("gpu:0", 700.0, 500.0), ("gpu:0", 400.0, 480.0), ("gpu:0", None, 500.0), ("cpu:0", None, 480.0)],
)
def test_kernels_may_draw_more_than_any_reading_shows(
    device: str, limit_w: float | None, drawn_w: float
) -> None:
    """Steps of 50 ms: 19 ms of kernels at 500 W, each of 1 ms, 31 ms of waiting at 120 W, in readings of
    20 ms. A processor does not wait: its readings, and 480 W in the traced steps, are all there is."""
    ms = 10**6
    true_w = np.tile([*[500.0, 120.0] * 19, *[120.0] * 12], 40)
    power_w = true_w.reshape(-1, 20).mean(axis=1)
    assert power_w.max() == 310
    begin_ns = np.arange(len(power_w)) * 20 * ms
    trace = PowerTrace(begin_ns, begin_ns + 20 * ms, power_w)
    untraced = np.array([[50 * n * ms, 50 * (n + 1) * ms] for n in range(40)])
    traced = np.array([[2000 * ms, 2100 * ms], [2100 * ms, 2200 * ms]])
    steps = Steps("torch", 42, traced, untraced, 0.0, 2.2)
    meters = DevicePowers({device: DevicePower(trace, sensor_of(trace, 120.0, limit_w), idle_w=120.0)})
    rows = [event("mm", 2000 + 100 * n, 2019 + 100 * n, n, device=device) for n in range(2)]
    events = pa.Table.from_pylist([{**each, "start_ns": each["start_ns"] - T0} for each in rows], EVENTS)
    operations_j = 2 * 0.019 * 480.0
    idle_j = 2 * 0.081 * 120.0
    known = {"name": "mm", "energy_j": operations_j, "device": device}
    made = footprint([known], idle_j, steps=2, covered_s=0.2)
    step = untraced_step(made, meters, steps, events)[device]
    assert step.factor is not None
    assert step.energy_j == pytest.approx(0.019 * 500 + 0.031 * 120)
    assert step.energy_j - step.idle_j == pytest.approx(0.019 * drawn_w)
    assert step.factor * operations_j / 2 == pytest.approx(0.019 * drawn_w)


def test_a_device_without_operations_idles_whatever_rounding_leaves() -> None:
    rounded = DeviceTotal(0.1 + 0.2, 0.3, 1.0, 0.0, 3)  # not equal
    assert rounded.total_j > rounded.idle_j
    trace = PowerTrace(np.array([0]), np.array([10**9]), np.array([5.0]))
    spans = np.array([[0, 10**7], [10**7, 2 * 10**7]])
    steps = Steps("torch", 9, spans, spans, 0.0, 1.0)
    meters = DevicePowers({"dram:0": DevicePower(trace, sensor_of(trace))})
    made = Footprint(ROWS.empty_table(), {"dram:0": rounded})
    step = untraced_step(made, meters, steps, EVENTS.empty_table())["dram:0"]
    assert (step.factor, step.energy_j, step.idle_j) == (None, pytest.approx(0.05), pytest.approx(0.05))


def test_where_few_steps_follow_those_before_count_too(tmp_path: Path) -> None:
    steps = traced_steps(ten_and_three(tmp_path / "run", later=3))
    assert steps is not None
    # Not the first, which has no beginning, nor the second, which still compiles.
    before = [(10 * i, 10 * i + 10) for i in range(2, 10)]
    assert spans_ms(steps.untraced_ns) == [*before, (180, 190), (190, 200)]


def test_where_the_trace_is_written_until_the_end_steps_meanwhile_count(tmp_path: Path) -> None:
    marks = [mark(t) for t in [*range(10, 101, 10), 115, 130, *range(140, 211, 10)]]
    resumed = {"resumed_ns": T0 + 133 * MS}
    windows = [window(101, 102, 131, 300, [(0, 102, 115), (1, 115, 130)], **resumed)]
    steps = traced_steps(recording(tmp_path / "run", marks, windows))
    assert steps is not None
    assert spans_ms(steps.untraced_ns) == [(140 + 10 * i, 150 + 10 * i) for i in range(7)]


def test_what_tracing_cost(tmp_path: Path) -> None:
    steps = traced_steps(ten_and_three(tmp_path / "run"))
    assert steps is not None
    assert steps.traced_s == pytest.approx(0.015)
    assert steps.untraced_s == pytest.approx(0.010)
    assert steps.slower == pytest.approx(0.5)
    assert steps.paused_s == pytest.approx(0.003 + 0.007)
    assert steps.tails_s == pytest.approx(0.015)
    assert steps.elapsed_s == pytest.approx(0.270)
    # Three steps 5 ms longer each, 15 ms more at two thirds of the speed, 10 ms of pauses; 240 ms without.
    assert steps.cost == pytest.approx((0.015 + 0.005 + 0.010) / 0.240)


def test_steps_beside_which_the_trace_is_written_are_what_tracing_cost(tmp_path: Path) -> None:
    """They are no untraced steps, but they are longer because of us."""
    marks = [mark(t) for t in [*range(10, 101, 10), 115, 130, 145, 160, 175, *range(185, 256, 10)]]
    windows = [window(101, 102, 131, 176, [(0, 102, 115), (1, 115, 130)], resumed_ns=T0 + 131 * MS)]
    steps = traced_steps(recording(tmp_path / "run", marks, windows))
    assert steps is not None
    assert steps.untraced_s == pytest.approx(0.010)
    assert spans_ms(steps.writing_ns) == [(145, 160), (160, 175), (175, 185)]
    plain = dataclasses.replace(steps, writing_ns=steps.writing_ns[:0])
    assert steps.cost is not None
    assert plain.cost is not None
    assert steps.cost > plain.cost
    spent_s = plain.cost * plain.elapsed_s / (1 + plain.cost) + 2 * 0.005
    assert steps.cost == pytest.approx(spent_s / (steps.elapsed_s - spent_s))


def test_without_untraced_steps_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    marks = [mark(t) for t in (10, 20, 30)]
    made = recording(tmp_path / "run", marks, [window(10, 11, 30, 31, [(1, 11, 20), (2, 20, 30)])])
    steps = traced_steps(made)
    assert steps is not None
    assert (len(steps.untraced_ns), steps.untraced_s, steps.slower, steps.cost) == (0, None, None, None)


def test_slices_have_no_steps_and_steps_found_in_them_no_marks(tmp_path: Path) -> None:
    assert traced_steps(recording(tmp_path / "slices", windows=[window(10, 11, 30, 31, [])])) is None
    assert traced_steps(recording(tmp_path / "none")) is None
    found = recording(
        tmp_path / "found", windows=[window(10, 11, 40, 41, [(0, 12, 20), (1, 20, 30)], source=None)]
    )
    steps = traced_steps(found)
    assert steps is not None
    assert (steps.source, steps.count, len(steps.traced_ns), steps.tails_s) == (None, 0, 2, 0.0)


def test_the_lowest_rank_speaks_for_all(tmp_path: Path) -> None:
    windows = [
        window(10, 11, 30, 31, [(1, 11, 30)], rank=1, pid=8),
        window(12, 13, 32, 33, [(1, 13, 32)], rank=0, pid=9),
        window(5, 6, 7, 8, [(1, 6, 7)], rank=0, pid=9, source="torch:forward"),
    ]
    marks = [mark(t, pid=pid, source="torch") for t in (10, 20) for pid in (8, 9)]
    steps = traced_steps(recording(tmp_path / "run", marks, windows[:2]))
    assert steps is not None
    assert spans_ms(steps.traced_ns) == [(13, 32)]
    assert steps.count == 2
    steps = traced_steps(recording(tmp_path / "two", marks, windows))  # of two sources, the first one's steps
    assert steps is not None
    assert (steps.source, spans_ms(steps.traced_ns)) == ("torch:forward", [(6, 7)])


def test_when_each_device_was_traced(tmp_path: Path) -> None:
    events = [
        event("a", 12, 18, 0),
        event("a", 38, 45, 1),  # a GPU lags behind
        event("a", 61, 62, 2),
        event("load", 11, 14, 0, device="cpu:0"),
        event("save", 39, 43, 1, device="cpu:0"),  # and a call may last beyond the step
    ]
    windows = [
        window(9, 10, 41, 44, [(0, 10, 20), (1, 20, 40)]),
        window(59, 60, 70, 71, []),
    ]
    made = recording(tmp_path / "run", (), windows, events)
    found = {device: spans_ms(spans) for device, spans in traced_spans(made, made.events).items()}
    assert found == {
        "": [(10, 40), (60, 70)],
        "cpu:0": [(10, 43), (60, 70)],
        "gpu:0": [(12, 45), (61, 62)],
    }


def test_joined_spans_are_disjoint() -> None:
    assert joined([(5, 7), (0, 2), (2, 3), (6, 9)]) == [(0, 3), (5, 9)]
    assert joined([]) == []


def made() -> Footprint:
    return footprint(
        [{"name": "a", "energy_j": 3.0, "busy_s": 0.4, "count": 4.0}, {"name": "b", "energy_j": 1.0}],
        idle_j=2.0,
        steps=2,
    )


def test_a_step_at_the_level_of_the_untraced_ones() -> None:
    step = at_level(made(), {"gpu:0": UntracedStep(0.01, 5.0, 0.2, 1.0, 2.0)})
    assert energies(step) == pytest.approx({"a": 3.0, "b": 1.0})
    total = step.devices["gpu:0"]
    assert (total.total_j, total.idle_j, total.covered_s) == (5.0, 1.0, 0.01)
    assert (row(step, "a")["busy_s"], row(step, "a")["count"]) == (pytest.approx(0.2), 2.0)
    assert_conserved(step)


@pytest.mark.parametrize("factor", [0.0, 0.1, 0.49])
def test_a_step_that_would_idle_its_energy_away_is_shown_as_it_was_traced(factor: float) -> None:
    step = at_level(made(), {"gpu:0": UntracedStep(0.01, 5.0, 0.2, 5.0 - 2.0 * factor, factor)})
    assert energies(step) == {"a": 1.5, "b": 0.5}
    assert step.devices["gpu:0"].total_j == 3.0
    assert_conserved(step)


def test_without_untraced_steps_a_traced_one_stands(tmp_path: Path) -> None:
    step = at_level(made(), {})
    assert energies(step) == {"a": 1.5, "b": 0.5}
    assert step.devices["gpu:0"].total_j == 3.0
    assert_conserved(step)


@given(footprints(), st.floats(1e-3, 1e3), st.floats(0, 1))
def test_conserved_at_any_level(traced: Footprint, energy_j: float, idle: float) -> None:
    untraced = {}
    for device in list(traced.devices)[:1]:
        total = traced.devices[device]
        operations_j = math.fsum(traced.device_rows(device)["energy_j"].to_pylist()) / total.steps
        if operations_j > 0:
            factor = (energy_j - idle * energy_j) / operations_j
            untraced[device] = UntracedStep(1.0, energy_j, 0.5, energy_j - factor * operations_j, factor)
        else:
            untraced[device] = UntracedStep(1.0, energy_j, 0.5, energy_j, None)
    assert_conserved(at_level(traced, untraced))


def test_from_a_recording_to_a_step(tmp_path: Path) -> None:
    """100 W all the time: 6 ms of every traced step are busy, and an untraced step lasts 10 ms."""
    found = Run(ten_and_three(tmp_path / "run"))
    assert found.footprint is not None
    assert found.step is not None
    assert_conserved(found.footprint)
    assert_conserved(found.step)
    assert energies(found.footprint) == pytest.approx({"net/a": 1.2, "net/b": 0.6})
    # A GPU is known from its first traced kernel to its last: 104 to 140 ms.
    assert found.footprint.devices["gpu:0"].total_j == pytest.approx(3.6)
    assert found.step.devices["gpu:0"].total_j == pytest.approx(1.0)
    assert energies(found.step) == pytest.approx({"net/a": 0.4, "net/b": 0.2})
    assert found.untraced["gpu:0"].idle_j == pytest.approx(0.4)
    assert pa.compute.sum(found.step.rows["count"]).as_py() == 2.0


def test_a_step_that_compiles_is_no_step_like_the_others(tmp_path: Path) -> None:
    made = with_a_compilation(tmp_path / "run")
    found = Run(made)
    assert found.steps is not None
    assert found.table is not None
    assert spans_ms(found.table.of("far")) == [(250, 550)]
    assert (found.steps.far, len(found.steps.untraced_ns)) == (1, 12)
    assert found.steps.untraced_s == pytest.approx(0.010)
    assert found.step is not None
    assert found.step.devices["gpu:0"].total_j == pytest.approx(1.0)
    assert energies(found.step) == pytest.approx({"net/a": 0.4, "net/b": 0.2})


def test_where_many_steps_are_long_they_are_no_exceptions(tmp_path: Path) -> None:
    """Of 11 steps every third takes 40 ms, the others 10."""
    ends = [180.0]
    for n in range(11):
        ends.append(ends[-1] + (40 if n % 3 == 1 else 10))
    found = Run(after_the_window(tmp_path / "run", ends, ((500.0, 100.0),)))
    assert found.steps is not None
    assert found.tracing is not None
    assert (found.steps.far, found.steps.uneven) == (0, 4)
    assert found.steps.untraced_s == pytest.approx((7 * 0.010 + 4 * 0.040) / 11)
    said = "4 of the 11 untraced steps that count are longer than 3 times their median"
    assert any(remark.startswith(said) for remark in found.tracing.remarks)


def test_where_idle_would_take_all_of_a_step_a_traced_one_is_shown(tmp_path: Path) -> None:
    """An untraced step takes 0.6 J. At the 100 W of traced gaps its 54 ms of idle would take 5.4 J."""
    found = Run(slow_input(tmp_path / "run"))
    assert found.step is not None
    assert found.footprint is not None
    assert found.tracing is not None
    assert found.untraced == {}
    assert found.unresolved["gpu:0"].energy_j == pytest.approx(0.6)
    assert found.unresolved["gpu:0"].length_s == pytest.approx(0.060)
    assert found.step_s == pytest.approx(0.015)
    assert energies(found.step) == pytest.approx({"net/a": 0.4, "net/b": 0.2})  # as they were traced
    assert found.step.devices["gpu:0"].total_j == found.footprint.devices["gpu:0"].total_j / 3
    assert_conserved(found.step)
    said = " ".join(found.tracing.remarks)
    assert "gpu:0: one traced step is shown. An untraced one takes 600 mJ in 60.0 ms" in said
    assert "untraced steps are 4 times as long as traced ones" in said


def test_an_untraced_step_is_not_compared_with_a_traced_one(tmp_path: Path) -> None:
    known, unknown = Run(ten_and_three(tmp_path / "a")), Run(slow_input(tmp_path / "b"))
    pair = alike(known, unknown)
    assert pair is not None
    assert known.footprint is not None
    traced_j = known.footprint.devices["gpu:0"].total_j / 3
    assert [each.devices["gpu:0"].total_j for each in pair[0]] == pytest.approx([traced_j, traced_j])
    assert pair[1] == []
    assert alike(known, known) == ([known.step, known.step], ["gpu:0"])
    vars(unknown)["step"] = None
    assert alike(known, unknown) is None


@pytest.mark.parametrize(("power_w", "resolved"), [(94.0, False), (96.0, True)])
def test_operations_keep_half_of_their_energy_or_are_not_resolved(
    tmp_path: Path, power_w: float, resolved: bool
) -> None:
    """54 ms of idle at 100 W leave 60 ms × 94 W − 5.4 J = 0.24 J of the 0.6 J that operations took; of
    60 ms × 96 W they leave 0.36 J."""
    found = Run(slow_input(tmp_path / "run", power_w))
    assert ("gpu:0" in found.untraced, "gpu:0" in found.unresolved) == (resolved, not resolved)
    assert found.step is not None
    operations_j = 0.36 if resolved else 0.6
    assert sum(energies(found.step).values()) == pytest.approx(operations_j)
    assert_conserved(found.step)


def test_steps_that_wait_for_a_full_queue_belong_to_the_mean(tmp_path: Path) -> None:
    found = Run(full_queue(tmp_path / "run"))
    assert found.steps is not None
    assert (found.steps.far, found.steps.early) == (0, True)
    assert found.steps.untraced_s == pytest.approx(0.010)
    assert found.untraced["gpu:0"].length_s == pytest.approx(0.010)


def test_a_compilation_among_waits_belongs_to_no_mean(tmp_path: Path) -> None:
    found = Run(waits_and_compiles(tmp_path / "run"))
    assert found.steps is not None
    assert (found.steps.far, found.steps.early) == (1, True)
    assert found.steps.untraced_s == pytest.approx((44 * 0.001 + 5 * 0.091) / 49)


def test_a_compilation_is_no_wait_for_the_device(tmp_path: Path) -> None:
    """Nobody waits, one step compiles: with it alone the mean would be as long as what runs."""
    lengths = [1.0] * 50
    lengths[20] = 900.0
    found = Run(full_queue(tmp_path / "run", lengths))
    assert found.steps is not None
    assert found.table is not None
    assert not found.untraced
    assert found.steps.untraced_s is None
    assert found.table.counts() == {
        "first": 1,
        "before": 8,
        "traced": 3,
        "profiler": 1,
        "handed over": 49,
        "far": 1,
    }


@pytest.mark.parametrize("compiles_ms", [2000.0, 60_000.0])
def test_among_uneven_steps_a_compilation_is_an_exception(tmp_path: Path, compiles_ms: float) -> None:
    """Of 30 steps every third takes 40 ms, the others 10, and one compiles."""
    lengths = [40.0 if n % 3 == 1 else 10.0 for n in range(30)]
    ends = np.cumsum([180.0, *lengths[:15], compiles_ms, *lengths[15:]]).tolist()
    found = Run(after_the_window(tmp_path / "run", ends, ((ends[-1] + 50, 100.0),)))
    assert found.steps is not None
    assert (found.steps.far, found.steps.uneven) == (1, 10)
    assert found.tracing is not None
    said = "besides the 1 that are left out, 10 of the 30 untraced steps that count are longer"
    assert any(remark.startswith(said) for remark in found.tracing.remarks)
    assert any("(mean of 30, without 1 far longer or shorter)" in line for line in tracing_lines(found))
    assert found.steps.untraced_s == pytest.approx(0.020)


def test_a_step_begins_where_the_one_before_it_ended(tmp_path: Path) -> None:
    """Keras says when a batch begins, too: to wait for it is a part of the step."""
    marks = [mark(0, "train_begin")]
    for n in range(4):
        marks += [mark(10 * n + 4, "step_begin", index=n), mark(10 * n + 10, index=n)]
    marks += [mark(41, "epoch_end"), mark(50, "epoch_begin"), mark(54, "step_begin", index=4)]
    marks.append(mark(60, index=4))
    made = recording(tmp_path / "run", marks)
    found = [(span.begin_ns, span.end_ns) for span in mark_spans(made.marks) if span.name == "step"]
    assert spans_ms(found) == [(4, 10), (10, 20), (20, 30), (30, 40), (54, 60)]
    table = step_table(made)
    assert table is not None
    assert spans_ms(table.spans_ns) == [(10, 20), (20, 30), (30, 40), (40, 60)]
    assert table.kind.tolist() == ["first", "untraced", "untraced", "more"]
    kinds = [kind for _, kind in Run(made).announced_steps]
    assert kinds == ["first", "first", "untraced", "untraced", "more"]


def test_steps_that_run_behind_their_marks_have_no_level() -> None:
    ms = 1_000_000
    spans = np.array([[0, 10 * ms], [10 * ms, 20 * ms]])
    steps = Steps("keras", 100, spans, spans + 100 * ms, 0.0, 1.0)

    def step(busy_s: float, length_s: float) -> dict[str, UntracedStep]:
        return {"cpu:0": UntracedStep(length_s, 1.0, busy_s, 0.0, 1.0)}

    assert runs_behind(steps, step(busy_s=0.5, length_s=0.02))  # a step of 10 ms cannot hold half a second
    assert not runs_behind(steps, step(busy_s=0.5, length_s=0.5))  # in the long run the queue is full
    assert not runs_behind(steps, step(busy_s=0.012, length_s=0.005))  # only slower for being traced


def test_steps_announced_before_they_are_done_say_nothing_of_tracing() -> None:
    ms = 1_000_000
    spans = np.array([[0, ms], [ms, 2 * ms]])
    steps = Steps(
        "keras", 100, spans, np.array([[100 * ms, 105 * ms]]), paused_s=0.2, elapsed_s=1.2, tails_s=1.0
    )
    assert handed_over(steps, {"cpu:0": UntracedStep(0.005, 1.0, 0.002, 0.0, 1.0)})
    assert not handed_over(steps, {"cpu:0": UntracedStep(0.005, 1.0, 0.001, 0.0, 1.0)})
    early = dataclasses.replace(steps, early=True)
    assert (steps.slower, early.slower) == (pytest.approx(-0.8), None)
    assert early.cost == pytest.approx(0.2)  # what it took to start and stop the profiler


def test_a_gpu_lost_before_its_events_used_something_and_not_nothing(tmp_path: Path) -> None:
    lost = recordings.make(tmp_path / "lost", power=False)
    gpu = Channel("gpu:0", "power", "W", "sample", "measured", 20.0, "nvml", window_ms=20.0)
    cpu = Channel("cpu:0", "energy", "J", "counter", "estimated", 100.0, "estimate")
    writer = ReadingsWriter(lost, [gpu, cpu])
    writer.write([(0, [(recordings.T0 + ms * MS, 0, 10.0) for ms in range(0, 1200, 20)])])
    writer.write([(0, [(recordings.T0 + ms * MS, 1, 0.04 * ms) for ms in range(0, 4001, 100)])])
    writer.close()
    found = Run.open(lost).accounted
    assert list(found.devices) == ["cpu:0"]
    assert found.without_power["gpu:0"] == 36
    assert "no power is known of gpu:0 while these events ran" in found.remarks
    whole = Run.open(recordings.make(tmp_path / "whole")).accounted
    mean = average([found, whole]).mean
    assert mean.devices["gpu:0"].total_j == pytest.approx(whole.devices["gpu:0"].total_j)


def test_steps_are_not_traced_while_the_trace_is_written(tmp_path: Path) -> None:
    marks = [mark(t) for t in range(10, 101, 10)]
    told = {"resumed_ns": T0 + 55 * MS}
    made = recording(tmp_path / "run", marks, [window(31, 32, 50, 85, [(0, 32, 40), (1, 40, 50)], **told)])
    found = step_table(made)
    assert found is not None
    assert spans_ms(found.of(TRACED)) == [(32, 40), (40, 50)]  # from where the profiler listens
    assert spans_ms(found.of(PROFILER)) == [(50, 60)]
    blocking = recording(tmp_path / "other", marks, [window(31, 32, 50, 85, [(0, 32, 40), (1, 40, 50)])])
    waited = step_table(blocking)
    assert waited is not None
    assert spans_ms(waited.of(PROFILER)) == [(50, 60), (60, 70), (70, 80), (80, 90)]


def test_a_step_nobody_read_has_no_energy_rather_than_zero(tmp_path: Path) -> None:
    lost = recordings.make(tmp_path / "lost", power=False)
    gpu = Channel("gpu:0", "power", "W", "sample", "measured", 20.0, "nvml", window_ms=20.0)
    writer = ReadingsWriter(lost, [gpu])
    writer.write([(0, [(recordings.T0 + ms * MS, 0, 10.0) for ms in range(0, 1501, 20)])])
    writer.close()
    found = Run.open(lost).step_energies
    assert found is not None
    # Steps of 0.1 s end from 1.1 s on; at 1.5 s the GPU was lost.
    assert found.energy_j["gpu:0"][:4] == pytest.approx([1.0, 1.0, 1.0, 1.0])
    assert np.isnan(found.energy_j["gpu:0"][4:]).all()
    console = Console(width=100, record=True, file=io.StringIO())
    made = open_recording(lost)
    console.print(step_tables(Run(made), 20))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["4", "(traced)", "100", "ms", "1.00", "J"] in lines
    assert ["6", "(traced)", "100", "ms", "–"] in lines
    means = [" ".join(line) for line in lines if line[:1] == ["mean"]]
    assert means == ["mean of 9 untraced 100 ms ± 0 –", "mean of 4 traced 100 ms ± 0 1.00 J ± 0"]
