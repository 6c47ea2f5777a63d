"""Publication figures: what is drawn is what was accounted, legible at its size, and the same every time."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="pip install 'smaragdine[figures]'")

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from footprints import footprint
from legible import assert_legible, gallery, texts_drawn
from recordings import MS, T0, make
from smaragdine.accounting.account import thinned
from smaragdine.accounting.arithmetic import average, scale
from smaragdine.accounting.diagram import diagram as tree
from smaragdine.accounting.diagram import walk
from smaragdine.accounting.merge import merge, renaming
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.precision import assw as widened
from smaragdine.accounting.repeats import LayerTimes, averaged, traced_steps, when
from smaragdine.accounting.run import Run
from smaragdine.accounting.similarity import constant_power, matrix, mean_difference
from smaragdine.errors import UserError
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.report.figures import style
from smaragdine.report.figures.diagram import diagram, layout, main_levels
from smaragdine.report.figures.draw import CAPTIONS, FIGURES, FORMATS, draw, rendered, save
from smaragdine.report.figures.epochs import cumulative, epoch_power, over_runs
from smaragdine.report.figures.layers import stages, top_energy, top_power
from smaragdine.report.figures.matrices import difference, similarity
from smaragdine.report.figures.power import envelope, intervals_s, power, sampling_of_runs
from smaragdine.report.figures.runs import LabelledRun, by_setting, labelled, only

DOCS = Path(__file__).parents[2] / "docs"
GPU = "gpu:0"


SMALL = gallery.Setting(layers=3, epochs=3, steps=4, traced=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("figures")


def labelled_all(recordings: Sequence[Recording]) -> list[LabelledRun]:
    return labelled([Run(recording) for recording in recordings])


@pytest.fixture(scope="module")
def base(folder: Path) -> list[LabelledRun]:
    return labelled_all(gallery.repeated(folder, "bert", SMALL, 3, 1))


@pytest.fixture(scope="module")
def limits(folder: Path) -> list[LabelledRun]:
    settings = [replace(SMALL, limit_w=w, traced=0) for w in (150.0, 300.0)]
    found = [gallery.repeated(folder, f"limit{s.limit_w:.0f}W", s, 2, 10) for s in settings]
    return labelled_all([one for each in found for one in each])


@pytest.fixture(scope="module")
def variants(folder: Path) -> list[LabelledRun]:
    found = [
        gallery.record(folder / f"H{hidden}", replace(SMALL, hidden=hidden), hidden) for hidden in (512, 768)
    ]
    return labelled_all(found)


@pytest.fixture(scope="module")
def every(
    base: list[LabelledRun], limits: list[LabelledRun], variants: list[LabelledRun]
) -> dict[str, list[LabelledRun]]:
    of = {"base": base, "stages": base, "limits": limits, "variants": variants}
    return {name: of[which] for name, (which, _) in gallery.SHOWN.items()}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_legible_and_the_same_in_every_format_every_time(
    name: str, every: Mapping[str, list[LabelledRun]]
) -> None:
    runs = every[name]
    figure = FIGURES[name](runs)
    assert_legible(figure)
    alt = style.alt_text(figure)
    assert re.fullmatch(r"[A-Z][^.]*\. .+[^.]\.", alt)
    again = FIGURES[name](runs)
    for form, start in zip(FORMATS, (b"%PDF", b"<?xml", b"\x89PNG"), strict=True):
        content = rendered(figure, form)
        assert content.startswith(start)
        assert form == "png" or content == rendered(again, form)
    pdf, svg = rendered(figure, "pdf"), rendered(figure, "svg").decode()
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"Date" not in pdf
    assert '<svg role="img"' in svg
    assert svg.count("<title>") == svg.count("<desc>") == 1
    assert svg.index("<title>") < svg.index("<desc>")
    units = r"\((?:[kmµM]?[JWs]|%|1|min|number, .*|n, 1)\)$"
    for axes in figure.axes:
        for label in (axes.get_xlabel(), axes.get_ylabel()):
            assert not label or re.search(units, label) or label.startswith("Layer"), label


@pytest.mark.parametrize("name", ["stages", "power", "cumulative", "epochs", "similarity", "difference"])
def test_many_runs_with_long_names_stay_legible(name: str, base: list[LabelledRun]) -> None:
    runs = [
        LabelledRun(base[n % 3].run, label, label)
        for n in range(7)
        for label in [f"experiments/bert-large-uncased-{n}-whole-word-masking"]
    ]
    figure = FIGURES[name](runs)
    assert_legible(figure)
    assert all(run.label in style.alt_text(figure) for run in runs)


def test_labels_that_do_not_fit_stay_different() -> None:
    assert style.distinct(["a", "b"], 20) == (["a", "b"], [])
    long = [f"experiments/bert-large-uncased-{n}-whole-word-masking" for n in range(3)]
    middles, notes = style.distinct(long, 12)
    assert middles == ["0", "1", "2"]
    assert notes == ["names: experiments/bert-large-uncased-…whole-word-masking"]
    other = ["x" * 40 + str(n) + "y" * 40 for n in range(3)]
    letters, notes = style.distinct(other, 12)
    assert letters == ["a", "b", "c"]
    assert all(name in notes[0] for name in other)
    assert style.distinct(["same", "same"], 20) == (["same", "same"], [])


def test_what_is_estimated_is_marked_on_the_figure(every: Mapping[str, list[LabelledRun]]) -> None:
    for name in ("stages", "phases", "cumulative", "epochs", "sampling"):
        figure = FIGURES[name](every[name])
        shown = " ".join(text.get_text() for text, _ in texts_drawn(figure))
        assert "cpu:0 estimated" in " ".join(shown.split()), name
        assert "cpu:0 estimated" in style.alt_text(figure)


def bars(figure: Figure) -> list[Any]:
    return list(figure.axes[0].patches)


def whiskers(axes: Any) -> list[np.ndarray]:
    """The two ends of each error bar, as drawn."""
    return [
        segment for bar in axes.containers if hasattr(bar, "has_yerr") for segment in bar[2][0].get_segments()
    ]


def test_stages_stack_to_the_total_and_whiskers_are_the_deviation_over_runs(base: list[LabelledRun]) -> None:
    whole = [scale(run.footprint, run.run.steps.count) for run in base if run.run.steps]
    figure = FIGURES["stages"](base)
    found = bars(figure)
    totals = [sum(total.total_j for total in one.devices.values()) for one in whole]
    assert sum(bar.get_height() for bar in found) == pytest.approx(np.mean(totals), rel=1e-12)
    by_phase = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    for one in whole:
        for row in one.rows.to_pylist():
            by_phase[row["phase"]] += row["energy_j"] / 3
    assert [bar.get_height() for bar in found[:3]] == pytest.approx(list(by_phase.values()), rel=1e-12)
    ((low, high),) = [segment[:, 1] for segment in whiskers(figure.axes[0])]
    assert (low + high) / 2 == pytest.approx(np.mean(totals), rel=1e-12)
    assert (high - low) / 2 == pytest.approx(np.std(totals, ddof=1), rel=1e-9)


def test_one_run_of_a_stage_has_no_whiskers_and_says_so() -> None:
    figure = stages({"train": [footprint([{"name": "a", "energy_j": 3.0, "phase": "forward"}], idle_j=1.0)]})
    assert [bar.get_height() for bar in bars(figure)] == [3.0, 1.0]
    assert whiskers(figure.axes[0]) == []
    assert "no whiskers" in style.alt_text(figure)


def test_top_energy_over_runs_is_the_average_of_summary_footprints(base: list[LabelledRun]) -> None:
    figure = FIGURES["top_energy"](base)
    over = average([only(merge(run.footprint), [GPU]) for run in base])
    order = np.argsort(-over.mean.rows["energy_j"].to_numpy(), kind="stable")[:10]
    energy_j, std_j = (over.spread[name].to_numpy()[order] for name in ("energy_mean_j", "energy_std_j"))
    assert [bar.get_width() for bar in bars(figure)] == pytest.approx(energy_j, rel=1e-12)
    ends = np.array([segment[:, 0] for segment in whiskers(figure.axes[0])])
    assert ends[:, 1] - ends[:, 0] == pytest.approx(2 * std_j, rel=1e-9)
    names = over.mean.rows["name"].to_pylist()
    assert all(names[i] in style.alt_text(figure) for i in order)


def test_top_energy_of_one_run_is_the_report_to_the_last_digit(base: list[LabelledRun]) -> None:
    run = base[0]
    figure = FIGURES["top_energy"]([run])
    rows = sorted(merge(run.footprint).device_rows(GPU).to_pylist(), key=lambda row: -row["energy_j"])
    assert [bar.get_width() for bar in bars(figure)] == [row["energy_j"] for row in rows[:10]]
    said = run.run.to_json()["step"]["devices"][GPU]["rows"]
    assert sum(bar.get_width() for bar in bars(figure)) < sum(row["energy_j"] for row in said)
    (lines,) = [c for c in figure.axes[0].collections if c.get_gid() == "interval"]
    drawn = [segment[1, 0] for segment in lines.get_segments()]
    assert drawn == [row["energy_j"] + row["uncertainty_j"] for row in rows[:10]]


def test_the_deviation_of_merged_names_is_that_of_their_sum_over_steps(base: list[LabelledRun]) -> None:
    """Siblings that rise and fall together spread more than their own deviations say."""
    run = base[0]
    rows = {
        (r["name"], r["phase"]): r
        for r in run.summary_footprint(renaming([run.footprint])).device_rows(GPU).to_pylist()
    }
    key = ("bert/encoder/layer_*/intermediate/dense/MatMul", "forward")
    one_by_one = [
        row["step_std_j"]
        for row in run.footprint.device_rows(GPU).to_pylist()
        if re.sub(r"layer_\d", "layer_*", row["name"]) == key[0] and row["phase"] == key[1]
    ]
    assert len(one_by_one) == 3
    assert 0 < rows[key]["step_std_j"] <= sum(one_by_one) * (1 + 1e-9)
    assert rows[key]["step_std_j"] != pytest.approx(math.hypot(*one_by_one), rel=1e-6)


def test_power_of_one_run_has_no_whiskers() -> None:
    """Steps that are long or short at the same power spread in energy alone."""
    rows = [{"name": "a", "energy_j": 90.0, "step_mean_j": 9.0, "step_std_j": 3.0, "uncertainty_j": 5.0}]
    assert whiskers(top_energy([footprint(rows, steps=10)]).axes[0]) != []
    assert whiskers(top_power([footprint(rows, steps=10)]).axes[0]) == []


@pytest.mark.parametrize(("width_j", "known"), [(3.0, False), (0.4, True), (None, True)])
def test_an_order_that_intervals_do_not_tell_is_said(width_j: float | None, known: bool) -> None:
    rows = [{"name": name, "energy_j": j, "uncertainty_j": width_j} for name, j in (("a", 10.0), ("b", 9.0))]
    said = style.alt_text(top_energy([footprint(rows)], GPU))
    assert ("the order is not known: all intervals overlap" not in said) == known


def test_top_power_leaves_out_what_hardly_ran() -> None:
    rows = [
        {"name": "long", "energy_j": 90.0, "busy_s": 1.0, "uncertainty_j": 5.0},
        {"name": "hot", "energy_j": 10.0, "busy_s": 0.05, "uncertainty_j": 1.0},
        {"name": "speck", "energy_j": 1e-3, "busy_s": 1e-7, "uncertainty_j": 1e-3},
    ]
    figure = top_power([footprint(rows)])
    assert [bar.get_width() for bar in bars(figure)] == [10.0 / 0.05, 90.0]
    assert "speck" not in style.alt_text(figure)


def test_very_long_names_are_shortened_in_the_middle_and_stand_in_full_in_the_alt_text() -> None:
    long = "model/" + "/".join(f"block_{i}" for i in range(40)) + "/$MatMul$\n"
    rows = [{"name": long, "energy_j": 2.0, "phase": "forward"}, {"name": "k" * 400, "energy_j": 1.0}]
    figure = top_energy([footprint(rows)])
    assert_legible(figure)
    shown = [text.get_text() for text, _ in texts_drawn(figure)]
    assert any(re.fullmatch(r"model/…/block_3.*/block_39/\$MatMul\$\\n", text) for text in shown)
    assert long.strip() in style.alt_text(figure)
    assert style.shortened("a/b", 30) == "a/b"


def constant(spans: Sequence[tuple[int, int, float]]) -> PowerTrace:
    start, end, power_w = (np.array(column) for column in zip(*spans, strict=True))
    return PowerTrace(start.astype(np.int64), end.astype(np.int64), power_w.astype(np.float64))


def test_epochs_are_aligned_at_their_beginnings_and_averaged() -> None:
    ms = 1_000_000
    second = 1000 * ms
    # Two epochs, 7 s apart: 100 W then 300 W, and 140 W then 320 W, each for half a second.
    trace = constant(
        [
            (3 * second, 3 * second + 500 * ms, 100.0),
            (3 * second + 500 * ms, 4 * second, 300.0),
            (10 * second, 10 * second + 500 * ms, 140.0),
            (10 * second + 500 * ms, 11 * second, 320.0),
        ]
    )
    spans = [(3 * second, 4 * second), (10 * second, 11 * second)]
    found = averaged([(trace, spans)])
    edges_s, mean_w, std_w = found.edges_s, found.mean_w, found.std_w
    half = (len(edges_s) - 1) // 2
    assert edges_s[[0, -1]].tolist() == [0.0, 1.0]
    assert mean_w[:half] == pytest.approx([120.0] * half)
    assert mean_w[half:] == pytest.approx([310.0] * half)
    assert std_w[:half] == pytest.approx([math.sqrt(800)] * half)
    own_s, others_s = [[(0.1, 0.2)], [(0.1, 0.25), (0.7, 0.8)]], [[(0.3, 0.6)]]
    figure = epoch_power(found, GPU, LayerTimes("layer_0", own_s, ("layer_1", "layer_2"), others_s))
    line = figure.axes[0].get_lines()[0]
    assert np.array_equal(line.get_ydata(), mean_w)
    assert np.array_equal(line.get_xdata(), (edges_s[:-1] + edges_s[1:]) / 2)
    others, own = (np.asarray(image.get_array())[0, :, 3] for image in figure.axes[0].get_images())
    middle_s = (np.arange(others.size) + 0.5) / others.size
    np.testing.assert_allclose(others, 0.35 * ((middle_s > 0.3) & (middle_s < 0.6)), atol=1e-9)
    first, second = (middle_s > 0.1) & (middle_s < 0.2), (middle_s > 0.1) & (middle_s < 0.25)
    late = (middle_s > 0.7) & (middle_s < 0.8)
    np.testing.assert_allclose(own, 0.55 * (first * 0.5 + second * 0.5 + late * 0.5), atol=1e-9)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["mean power", "layer_0", "the 2 others"]


def test_a_cell_that_half_of_the_epochs_do_not_cover_is_not_drawn() -> None:
    trace = constant([(0, 10**9, 100.0)])
    found = averaged([(trace, [(0, 10**9), (2 * 10**9, 3 * 10**9), (4 * 10**9, 5 * 10**9)])])
    assert np.isnan(found.mean_w).all()


def test_steps_of_a_gpu_begin_with_its_kernels(tmp_path: Path) -> None:
    """It lags behind the marks."""
    late = make(tmp_path / "late", lag_ms=30)
    gone = copy(open_recording(make(tmp_path / "whole")), tmp_path / "gone", ["events.arrows"])
    runs = labelled([Run.open(late), Run(gone)])
    spans = [(T0 + (1330 + 100 * i) * MS, T0 + (1430 + 100 * i) * MS) for i in range(3)]
    for run, expected in zip(runs, (spans, []), strict=True):
        assert traced_steps(run.run, GPU) == expected
    assert traced_steps(runs[0].run, "cpu:0")[0] == (
        T0 + 1300 * MS,
        T0 + 1400 * MS,
    )


def test_a_layers_stretches_are_those_of_its_events(base: list[LabelledRun]) -> None:
    run = base[0]
    epochs = [(epoch.start_ns, epoch.end_ns) for epoch in run.run.summary.epochs]
    layers = [f"bert/encoder/layer_{i}" for i in (1, 0, 2)]
    ran = when(run.run.recording.events, GPU, layers, epochs)
    assert (ran.layer, *ran.others) == tuple(layers)
    for own, spans_s in ((layers[:1], ran.spans_s), (layers[1:], ran.others_s)):
        inside = [
            ((event["start_ns"] - begin) * 1e-9, (event["start_ns"] + event["duration_ns"] - begin) * 1e-9)
            for event in run.run.recording.events.to_pylist()
            if any(event["name"].startswith(layer + "/") for layer in own)
            for begin, end in epochs
            if begin <= event["start_ns"] < end
        ]
        assert len(spans_s) == 2  # epochs in which steps were traced
        assert min(b for b, _ in inside) == pytest.approx(min(b for spans in spans_s for b, _ in spans))
        assert all(
            any(b - 1e-12 <= begin and end <= e + 1e-12 for spans in spans_s for b, e in spans)
            for begin, end in inside
        )
    assert "bert/encoder/layer_0" in style.alt_text(FIGURES["epoch_power"](base))


def test_power_is_drawn_as_it_was_recorded(limits: list[LabelledRun]) -> None:
    figure = FIGURES["power"](limits)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["150 W limit", "300 W limit"]
    for axes, runs in zip(figure.axes, by_setting(limits).values(), strict=True):
        for line, run in zip(axes.get_lines(), runs, strict=False):
            trace = run.traces[GPU]
            drawn = np.asarray(line.get_ydata(), dtype=float)
            known = drawn[~np.isnan(drawn)]
            assert np.array_equal(known, trace.power_w[trace.start_ns < run.bounds_ns[1]])
        assert axes.get_lines()[len(runs)].get_ydata()[0] == runs[0].limit_w


def test_a_long_trace_is_drawn_by_means_that_keep_its_energy_and_its_extremes() -> None:
    chance = np.random.default_rng(5)
    edges = np.concatenate([[0], np.cumsum(chance.integers(1, 10**7, 20_000))])
    trace = PowerTrace(edges[:-1], edges[1:], chance.uniform(10, 500, 20_000))
    t_s, low_w, mean_w, high_w = envelope(trace, 0, int(edges[-1]))
    width_s = np.diff(np.append(t_s, edges[-1] * 1e-9))
    assert (mean_w * width_s).sum() == pytest.approx(trace.energy_j(0, int(edges[-1])), rel=1e-9)
    assert (low_w.min(), high_w.max()) == (trace.power_w.min(), trace.power_w.max())
    assert (low_w <= mean_w).all()
    assert (mean_w <= high_w).all()


def test_a_gap_in_the_power_is_a_gap_in_the_line() -> None:
    trace = constant([(0, 10, 5.0), (20, 30, 7.0)])
    t_s, _, mean_w, _ = envelope(trace, 0, 30)
    assert t_s.tolist() == pytest.approx([0.0, 1e-8, 2e-8, 3e-8])
    assert np.array_equal(mean_w, [5.0, np.nan, 7.0, np.nan], equal_nan=True)


def test_cumulative_energy_ends_at_the_total_of_each_run(limits: list[LabelledRun]) -> None:
    figure = FIGURES["cumulative"](limits)
    lines = figure.axes[0].get_lines()
    ends = [line for line in lines if line.get_gid() == "ends"]
    for line, runs in zip(ends, by_setting(limits).values(), strict=True):
        assert list(line.get_ydata()) == pytest.approx([run.run.summary.total_j for run in runs], rel=1e-12)
        assert list(line.get_xdata()) == pytest.approx([run.run.summary.duration_s for run in runs])


def test_cumulative_energy_is_mean_and_deviation_over_runs() -> None:
    runs = [([constant([(5, 5 + 10**9, w)])], 5, 5 + 10**9) for w in (100.0, 140.0)]
    t_s, mean_j, std_j = over_runs(runs)
    assert mean_j == pytest.approx(120 * t_s)
    assert std_j == pytest.approx(math.sqrt(800) * t_s)
    figure = cumulative({"a": runs}, "gpu:0")
    assert np.array_equal(figure.axes[0].get_lines()[0].get_ydata(), mean_j)


def test_epoch_boxes_are_those_of_the_summary(limits: list[LabelledRun]) -> None:
    figure = FIGURES["epochs"](limits)
    energy, time = figure.axes
    for axes, value in ((energy, _epoch_j), (time, lambda epoch: epoch.duration_s)):
        dots = [line for line in axes.get_lines() if line.get_gid() == "dots"]
        for line, runs in zip(dots, by_setting(limits).values(), strict=True):
            expected = [value(epoch) for run in runs for epoch in run.run.summary.epochs]
            assert list(line.get_ydata()) == expected
    assert [label.get_text() for label in energy.get_xticklabels()] == ["150", "300"]


def _epoch_j(epoch: Any) -> float:
    return sum(epoch.devices[device].energy_j for device in ("gpu:0", "cpu:0"))


def test_intervals_between_readings_and_their_quantiles(base: list[LabelledRun]) -> None:
    figure = sampling_of_runs(base[:1])
    ridges, jitter = figure.axes
    (series,) = [s for s in base[0].run.recording.series("power") if s.channel.name == "gpu:0 power"]
    gaps_s = np.diff(np.sort(series.t_ns)) * 1e-9
    assert np.array_equal(intervals_s(series)[1], gaps_s)
    (line,) = [one for one in ridges.get_lines() if one.get_gid() == "gpu:0 power quantiles"]
    assert list(line.get_xdata()) == list(np.quantile(gaps_s, (0.01, 0.5, 0.99)))
    (dots,) = [one for one in jitter.get_lines() if one.get_gid() == "gpu:0 power"]
    assert np.array_equal(dots.get_ydata(), gaps_s / np.median(gaps_s))


def test_precision_curves_are_the_scores(base: list[LabelledRun]) -> None:
    figure = FIGURES["asss"](base[:1])
    events, meters = base[0].run.inputs
    energy, power_, floor = figure.axes[0].get_lines()
    count = len(energy.get_xdata())
    scores = thinned(events, meters, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)[:count])[GPU]
    assert list(energy.get_xdata()) == [20.0 * score.n for score in scores]
    assert list(energy.get_ydata()) == [score.scores.energy.value for score in scores]
    assert list(power_.get_ydata()) == [score.scores.power.value for score in scores]
    assert list(floor.get_ydata()) == [score.scores.floor.value for score in scores]

    figure = FIGURES["assw"](base)
    footprints = [run.footprint for run in base]
    turns = [widened([[f] for f in [*footprints[i:], *footprints[:i]]], GPU).disjoint for i in range(3)]
    drawn = figure.axes[0].get_lines()[0]
    assert list(drawn.get_xdata()) == [1.0, 2.0]
    for n, value in enumerate(drawn.get_ydata()):
        assert value == pytest.approx(np.mean([turn[n].scores.energy.value for turn in turns]), rel=1e-15)


def test_matrices_are_those_of_the_accounting(variants: list[LabelledRun]) -> None:
    footprints = {run.label: only(run.footprint, [GPU]) for run in variants}
    runs = list(footprints.values())
    figure = similarity(footprints, GPU)
    flat = [constant_power(one) for one in runs]
    for axes, rows in zip(
        figure.axes,
        (matrix(runs, "energy", GPU), matrix(runs, "power", GPU), matrix(flat, "energy", GPU)),
        strict=True,
    ):
        drawn = axes.get_images()[0].get_array()
        assert drawn[1, 0] == rows[1][0].value
        assert drawn.mask[0, 1]
    figure = difference(footprints, GPU)
    for axes, quantity in zip(figure.axes, ("energy", "power"), strict=True):
        assert axes.get_images()[0].get_array()[1, 0] == mean_difference(runs[0], runs[1], quantity, GPU)  # type: ignore[arg-type]
    # The one with more hidden units takes more: row − column is above zero.
    assert figure.axes[0].get_images()[0].get_array()[1, 0] > 0


def test_layers_are_drawn_one_by_one(base: list[LabelledRun]) -> None:
    figure = FIGURES["layers"](base[:1])
    nodes = {n.path: n for n in walk(tree(only(base[0].footprint, [GPU])))}
    expected = [
        nodes[f"bert/encoder/layer_{i}"].by_phase[phase]
        for i in range(3)
        for phase in ("forward", "backward")
    ]
    assert [bar.get_height() for bar in bars(figure)] == pytest.approx(expected, rel=1e-14)
    assert len(whiskers(figure.axes[0])) == 3
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == ["0", "1", "2"]


def test_phases_of_each_device_fill_it(base: list[LabelledRun]) -> None:
    figure = FIGURES["phases"](base)
    widths: dict[float, float] = {}
    for bar in bars(figure):
        widths[bar.get_y()] = widths.get(bar.get_y(), 0.0) + bar.get_width()
    assert list(widths.values()) == pytest.approx([1.0, 1.0])
    total = base[0].footprint.devices[GPU]
    alone = FIGURES["phases"](base[:1])
    idle = [bar.get_width() for bar in bars(alone) if bar.get_y() == bars(alone)[0].get_y()][-1]
    assert idle == pytest.approx(total.idle_j / total.total_j, rel=1e-9)


def test_a_diagram_has_a_box_for_each_part_and_its_share(base: list[LabelledRun]) -> None:
    root = base[0].diagram
    levels = main_levels(root)
    assert [node.path for node in levels] == [
        "",
        "bert",
        "bert/encoder/layer_*",
        "bert/encoder/layer_*/attention",
    ]
    figure = diagram(levels, GPU)
    boxes = {patch.get_gid(): patch for patch in figure.axes[0].patches if patch.get_gid()}
    for node in levels:
        for child in node.children:
            box = boxes[f"{node.path}|{child.name}"]
            kind = type(box.get_boxstyle()).__name__
            assert kind == ("Round" if child.children else "Square")
            shown = [text.get_text() for text in figure.axes[0].texts]
            assert f"{child.share:.1%}" in shown
    attention = boxes["bert/encoder/layer_*|attention"].get_facecolor()
    assert sum(attention[:3]) < sum(boxes["bert/encoder/layer_*|output"].get_facecolor()[:3])
    assert_legible(diagram([levels[2]], GPU))


def test_merged_siblings_do_not_feed_themselves(base: list[LabelledRun]) -> None:
    """The output of a layer goes to the next one's attention: inside `layer_*` that is no edge."""
    layer = next(node for node in walk(base[0].diagram) if node.path == "bert/encoder/layer_*")
    found = {(edge.source, edge.target) for edge in layer.edges}
    assert found == {("attention", "intermediate"), ("attention", "output"), ("intermediate", "output")}


def test_operations_are_sharp_and_what_is_small_shares_a_box() -> None:
    rows = [{"name": f"net/op_{chr(97 + i)}", "energy_j": 10.0 - i / 2} for i in range(16)]
    figure = diagram([tree(footprint(rows)).children[0]])
    assert_legible(figure)
    boxes = [patch for patch in figure.axes[0].patches if patch.get_gid()]
    assert len(boxes) == 12
    assert {type(box.get_boxstyle()).__name__ for box in boxes} == {"Square"}
    assert "5 more" in [text.get_text() for text in figure.axes[0].texts]


_names = st.sampled_from("abcdefghij")


@given(
    st.dictionaries(_names, st.floats(8, 27), min_size=1),
    st.lists(st.tuples(_names, _names), max_size=25),
)
def test_boxes_never_overlap_and_arrows_join_them(
    widths: dict[str, float], edges: list[tuple[str, str]]
) -> None:
    room_mm, high_mm = 77.0, 8.4
    placed = layout(widths, edges, room_mm, high_mm)
    assert placed.boxes.keys() == widths.keys()
    for name, box in placed.boxes.items():
        assert box.width_mm == pytest.approx(widths[name])
        assert box.x_mm >= -1e-9
        assert box.x_mm + box.width_mm <= room_mm + 1e-9
        assert box.y_mm + high_mm <= placed.height_mm + 1e-9
    for (_, a), (_, b) in itertools.combinations(placed.boxes.items(), 2):
        beside = a.x_mm + a.width_mm <= b.x_mm + 1e-9 or b.x_mm + b.width_mm <= a.x_mm + 1e-9
        above = a.y_mm + high_mm <= b.y_mm + 1e-9 or b.y_mm + high_mm <= a.y_mm + 1e-9
        assert beside or above
    known = {(a, b) for a, b in edges if a != b and a in widths and b in widths}
    drawn = {(way.source, way.target) for way in placed.ways}
    assert drawn | set(placed.left_out) == known
    assert not drawn & set(placed.left_out)
    for way in placed.ways:  # to the right, or on below
        source, target = placed.boxes[way.source], placed.boxes[way.target]
        assert target.x_mm >= source.x_mm + source.width_mm or target.y_mm > source.y_mm
    for way in placed.ways:
        for name, (x_mm, y_mm) in ((way.source, way.points_mm[0]), (way.target, way.points_mm[-1])):
            box = placed.boxes[name]
            assert y_mm == pytest.approx(box.y_mm + high_mm / 2)
            assert min(abs(x_mm - box.x_mm), abs(x_mm - box.x_mm - box.width_mm)) < 1e-6


def test_dataflow_without_a_cycle_goes_to_the_right() -> None:
    placed = layout(
        dict.fromkeys("abcd", 10.0), [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "d")], 77, 8
    )
    x = {name: box.x_mm for name, box in placed.boxes.items()}
    assert x["a"] < x["b"] == x["c"] < x["d"]
    through = next(way for way in placed.ways if (way.source, way.target) == ("a", "d"))
    beside = [placed.boxes[name] for name in "bc"]
    for x_mm, y_mm in through.points_mm[1:-1]:
        assert not any(b.x_mm < x_mm < b.x_mm + 10 and b.y_mm < y_mm < b.y_mm + 8 for b in beside)


def test_what_leads_back_is_left_out_and_what_others_imply_where_lines_are_short() -> None:
    ring = layout(dict.fromkeys("abc", 10.0), [("a", "b"), ("b", "c"), ("c", "a")], 77, 8)
    assert ring.left_out == (("c", "a"),)
    edges = [("a", "b"), ("b", "c"), ("a", "c")]
    assert layout(dict.fromkeys("abc", 20.0), edges, 77, 8).left_out == ()
    narrow = layout(dict.fromkeys("abc", 20.0), edges, 50, 8)
    assert narrow.bands == 2
    assert narrow.left_out == (("a", "c"),)


# Viénot, Brettel and Mollon 1999: what is left of linear RGB without one kind of cone.
_BLIND = {
    "deuteranopia": [[0.29275, 0.70725, -0.00000], [0.29275, 0.70725, 0.00000], [-0.02234, 0.02234, 1.0]],
    "protanopia": [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, -0.0], [0.00401, -0.00401, 1.0]],
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
}


def lab(colour: str, sight: str = "none") -> np.ndarray:
    """CIE L*a*b* of a colour as that sight has it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(_BLIND[sight]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    f = np.array(to_xyz) @ linear / (0.9505, 1.0, 1.089)
    f = np.where(f > 0.008856, np.cbrt(f), 7.787 * f + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", _BLIND)
def test_colours_are_told_apart_by_every_eye(sight: str) -> None:
    phases = [*style.PHASES.values(), style.UNKNOWN, style.IDLE]
    for colours in (phases, style.SERIES):
        apart = [math.dist(lab(a, sight), lab(b, sight)) for a, b in itertools.combinations(colours, 2)]
        assert min(apart) > 18  # just noticeable is about 2.3


@pytest.mark.parametrize("sight", _BLIND)
def test_more_energy_is_darker_and_text_on_it_is_read(sight: str) -> None:
    from matplotlib.colors import to_hex

    colours = [to_hex(style.intensity()(value)) for value in np.linspace(0, 1, 50)]
    lightness = [lab(colour, sight)[0] for colour in colours]
    assert all(a > b for a, b in itertools.pairwise(lightness))
    assert all(abs(lab(style.ink_on(c), sight)[0] - lab(c, sight)[0]) > 38 for c in colours)


def test_axes_have_si_prefixes_and_draw_plain_joules() -> None:
    assert style.prefixed(0.02, "J") == (1e-3, "mJ")
    assert style.prefixed(1500.0, "W") == (1e3, "kW")
    assert style.prefixed(0.0, "J") == (1.0, "J")
    figure, (axes,) = style.sheet(40)
    style.duration(axes.xaxis, "Time", 7000.0)
    axes.set_xlim(0, 7000)
    assert axes.get_xlabel() == "Time (min)"
    assert [t for t in axes.get_xticks() if 0 <= t <= 7000] == [0, 1200, 2400, 3600, 4800, 6000]
    assert figure.get_figwidth() * 25.4 == pytest.approx(84)


def test_runs_are_grouped_only_where_they_repeat(tmp_path: Path) -> None:
    def groups(*names: str, command: Sequence[str] = ("train",)) -> list[str]:
        infos = [{"command": [*command, *([name] if command == ("train",) else [])]} for name in names]
        return [
            run.group
            for run in labelled([Run(Recording(tmp_path / n, i)) for n, i in zip(names, infos, strict=True)])
        ]

    assert groups("base-1", "base-2", "other-1", "other-2") == ["base", "base", "other", "other"]
    assert groups("auto1", "auto2") == ["auto", "auto"]
    assert groups("2026-11-15-train", "2026-11-15-train-2") == ["2026-11-15-train"] * 2
    assert groups("batch-32", "batch-64") == ["batch-32", "batch-64"]
    assert groups("seed-7", "seed-9", command=("same",)) == ["seed", "seed"]
    assert groups("L6H512", "L6H768", command=("same",)) == ["L6H512", "L6H768"]
    assert groups("lr-0.1", "lr-0.2") == ["lr-0.1", "lr-0.2"]
    assert groups("a/1", "b/1") == ["a/1", "b/1"]
    assert groups("a/1", "a/2") == ["1", "2"] or groups("a/1", "a/2") == ["a", "a"]
    assert groups("one") == ["one"]
    assert groups("x", "x") == ["x (1)", "x (2)"]  # the same recording, given twice


def test_draw_saves_what_the_recordings_allow_and_says_why_not(
    base: list[LabelledRun], tmp_path: Path
) -> None:
    drawn = draw([base[0].run], tmp_path / "new" / "figures", formats=("svg",))
    assert drawn.left_out.keys() == {"assw", "similarity", "difference"}
    assert "three runs" in drawn.left_out["assw"]
    files = {path.name for path in (tmp_path / "new" / "figures").iterdir()}
    assert files == {path.name for path in drawn.files}
    assert files == {f"{name}.svg" for name in FIGURES if name not in drawn.left_out} | {CAPTIONS}
    captions = (tmp_path / "new" / "figures" / CAPTIONS).read_text()
    assert "**top_energy** The 10 names with the most energy on gpu:0." in captions


def copy(recording: Recording, to: Path, without: Sequence[str]) -> Recording:
    shutil.copytree(recording.path, to)
    for name in without:
        (to / name).unlink()
    return open_recording(to)


def test_recordings_without_events_power_or_epochs_give_what_they_can(
    base: list[LabelledRun], tmp_path: Path
) -> None:
    no_events = copy(
        base[0].run.recording, tmp_path / "a", ["events.arrows", "windows.arrows", "edges.arrows"]
    )
    drawn = draw([Run(no_events)], tmp_path / "figures", formats=("svg",))
    assert [path.stem for path in drawn.files[:-1]] == [
        "epoch_power",
        "power",
        "cumulative",
        "epochs",
        "sampling",
    ]
    assert "nothing was traced" in drawn.left_out["diagram"]

    no_marks = copy(base[0].run.recording, tmp_path / "b", ["marks.arrows"])
    drawn = draw([Run(no_marks)], tmp_path / "figures", ["epoch_power"], ("png",))
    assert [path.name for path in drawn.files] == ["epoch_power.png", CAPTIONS]
    with pytest.raises(UserError, match="figure epochs cannot be drawn: b has no epochs"):
        draw([Run(no_marks)], tmp_path / "figures", ["epochs"])

    no_power = copy(base[0].run.recording, tmp_path / "c", ["power.arrows"])
    with pytest.raises(UserError, match=r"no figure can be drawn: .*no power"):
        draw([Run(no_power)], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_settings_that_differ_are_not_averaged(variants: list[LabelledRun], tmp_path: Path) -> None:
    drawn = draw([run.run for run in variants], tmp_path, formats=("svg",))
    assert {"top_energy", "layers", "asss", "epoch_power", "phases"} <= drawn.left_out.keys()
    assert "2 settings" in drawn.left_out["top_energy"]
    assert {"similarity.svg", "difference.svg", "stages.svg"} <= {path.name for path in drawn.files}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"names": ["pie"]}, r"no figure named pie. There are: stages, diagram"),
        ({"formats": ["bmp"]}, r"no format named bmp. There are: pdf, svg, png"),
    ],
)
def test_a_wrong_name_is_one_line(
    options: dict[str, Any], line: str, base: list[LabelledRun], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=line):
        draw([base[0].run], tmp_path, **options)


def test_a_folder_that_cannot_be_written_is_one_line(base: list[LabelledRun], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created"):
        draw([base[0].run], tmp_path / "file", ["power"])
    (tmp_path / "power.png").mkdir()
    with pytest.raises(UserError, match=r"power\.png cannot be written"):
        save(FIGURES["power"](base), tmp_path, "power", ("png",))
    assert {path.name for path in tmp_path.iterdir()} == {"file", "power.png"}


def test_without_matplotlib_the_remedy_is_said(
    base: list[LabelledRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError) as error:
        draw([base[0].run], tmp_path / "figures")
    assert str(error.value) == (
        "figures need matplotlib: it is not installed. pip install 'smaragdine[figures]'"
    )
    assert not (tmp_path / "figures").exists()


def test_matplotlib_is_loaded_only_to_draw() -> None:
    code = (
        "import sys, smaragdine.report.figures.draw as d; print(len(d.FIGURES), 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(FIGURES)), "False"]


@pytest.mark.parametrize("form", FORMATS)
def test_the_users_own_settings_change_nothing(form: str, base: list[LabelledRun]) -> None:
    import matplotlib as mpl

    plain = rendered(FIGURES["stages"](base), form)
    with mpl.rc_context({"font.size": 20, "svg.hashsalt": "mine", "axes.grid": True, "savefig.dpi": 20}):
        assert rendered(FIGURES["stages"](base), form) == plain


def test_names_that_no_file_may_hold_do_not_break_one() -> None:
    from xml.etree import ElementTree

    rows = [{"name": "a<b>&\x00\x1b[31m/op", "energy_j": 1.0}]
    svg = ElementTree.fromstring(rendered(top_energy([footprint(rows)]), "svg"))
    (said,) = [element.text or "" for element in svg if element.tag.endswith("desc")]
    assert "a<b>&\\x00\\x1b[31m/op" in said


def _figures_of_the_gallery() -> Iterator[Path]:
    return (DOCS / "gallery").glob("*.png")


def test_the_gallery_shows_every_figure_and_stays_small() -> None:
    shown = {path.stem: path.stat().st_size for path in _figures_of_the_gallery()}
    assert shown.keys() == set(FIGURES) == set(gallery.SHOWN)
    assert max(shown.values()) < 120_000
    assert sum(shown.values()) < 1_500_000
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    assert all(f"](gallery/{name}.png)" in page for name in FIGURES)


def test_an_overview_says_the_same_as_the_run(base: list[LabelledRun]) -> None:
    found = Run(base[0].run.recording)
    assert found.step is not None
    assert base[0].footprint.rows.equals(found.step.rows)


def test_a_setting_alone_is_named_by_its_folder(base: list[LabelledRun]) -> None:
    run = base[0]
    figure = power({"only": [(run.traces[GPU], *run.bounds_ns)]}, GPU)
    assert figure.axes[0].get_title(loc="left") == "only"
