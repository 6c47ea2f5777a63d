"""Figures of fits and sweeps: what is drawn is what was fitted and measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="pip install 'smaragdine[figures]'")

import recordings
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.run import Run
from smaragdine.accounting.summary import Epoch
from smaragdine.cli.fit import main
from smaragdine.report.figures import style
from smaragdine.report.figures.epochs import (
    averaged,
    cumulative_of_runs,
    epochs,
    mean_power,
    mean_power_of_runs,
)
from smaragdine.report.figures.limits import fit_figure
from smaragdine.report.figures.power import power, power_of_runs, sampling_of_runs
from smaragdine.report.figures.runs import LabelledRun, NotDrawn
from smaragdine.sweep.fit import analyse, judge
from smaragdine.sweep.measurements import Group
from smaragdine.sweep.table import Repetition, steps_span_ns, write_results

LIMITS = np.array([100.0, 150.0, 200.0, 250.0, 300.0])
S = 1_000_000_000


def _drawn(figure: object, name: str) -> tuple[np.ndarray, np.ndarray]:
    lines = [line for axes in figure.axes for line in axes.lines if line.get_gid() == name]  # type: ignore[attr-defined]
    assert len(lines) == 1
    return np.asarray(lines[0].get_xdata()), np.asarray(lines[0].get_ydata())


def test_a_fits_figure_shows_the_fit_the_measurements_and_the_front() -> None:
    energy_j = np.array([60.0, 41.0, 40.0, 52.0, 70.0])
    each = analyse([Group({"net": "a"}, LIMITS, 1000 / LIMITS, energy_j, "W")]).groups[0]
    figure = fit_figure(each, "a")
    fit = each.parabolas["energy"]
    x, y = _drawn(figure, "fit energy")
    assert y == pytest.approx(np.polyval(fit.coefficients, x))
    assert (x[0], x[-1]) == (100, 300)
    assert _drawn(figure, "measured energy")[1].tolist() == energy_j.tolist()
    assert tuple(_drawn(figure, "interval energy")[0]) == fit.interval
    times, energies = _drawn(figure, "front")
    assert energies.tolist() == [70, 52, 40]
    assert times == pytest.approx([1000 / 300, 4, 5])
    text = style.alt_text(figure)
    assert "residuals of single measurements" in text
    assert "least 40.0 J at 200 W" in text


def test_a_model_that_does_not_fit_is_dashed_and_has_no_optimum() -> None:
    """Energy without a trend, and a time that is a parabola."""
    time_s, flat_j = 2 + ((LIMITS - 200) / 100) ** 2, np.array([50.0, 49.0, 51.0, 50.0, 50.0])
    noise_s = np.array([0.01, -0.01, 0.01, -0.01, 0.01])
    each = analyse([Group({}, LIMITS, time_s + noise_s, flat_j)], ("energy", "time")).groups[0]
    figure = fit_figure(each)
    drawn = [{str(line.get_gid()): line.get_linestyle() for line in axes.lines} for axes in figure.axes]
    assert (drawn[0]["fit energy"], drawn[1]["fit time"]) == ("--", "-")
    assert ["optimum" in lines for lines in drawn] == [False, True, False, False]
    assert ["interval" in " ".join(lines) for lines in drawn] == [False, True, False, False]
    titles = [axes.get_title(loc="left") for axes in figure.axes[:2]]
    assert ["does not fit" in title for title in titles] == [True, False]
    text = style.alt_text(figure)
    assert "dashed, no optimum where it does not fit" in text
    assert "Energy: least 49.0 J at 150, a parabola does not fit; " in text
    alone = style.alt_text(fit_figure(analyse([each.group], ("energy",)).groups[0]))
    assert "open circle" not in alone
    assert "no optimum where" not in style.alt_text(fit_figure(analyse([each.group], ("time",)).groups[0]))


def test_against_a_parameter_its_name_is_on_the_axis_and_no_optimum_is_below_zero() -> None:
    batch, noise = np.array([8.0, 16.0, 32.0, 48.0]), np.array([0.02, -0.02, 0.02, -0.02])
    time_s, energy_j = ((batch - 40) / 10) ** 2 - 0.3 + noise, ((batch - 30) / 10) ** 2 + 10 + noise
    each = analyse([Group({}, batch, time_s, energy_j, limit_name="batch", of="steps")]).groups[0]
    below = each.parabolas["time"]
    assert judge(below)[0]
    assert below.at(below.optimum)[0] < 0 < each.parabolas["energy"].at(each.parabolas["energy"].optimum)[0]
    figure = fit_figure(each)
    assert [axes.get_xlabel() for axes in figure.axes] == ["batch"] * 3 + ["Time (s)"]
    assert {axes.get_xscale() for axes in figure.axes} == {"linear"}
    assert "optimum" in [line.get_gid() for line in figure.axes[0].lines]
    assert "optimum" not in [line.get_gid() for line in figure.axes[1].lines]
    text = style.alt_text(figure)
    assert text.startswith("Energy, time and their product of the steps against batch. ")
    assert "time and energy of the steps" in text.lower()
    assert "values of batch on the Pareto front" in text


@pytest.mark.parametrize(
    ("limits", "unit", "ticks"),
    [
        ([8, 16, 32, 64], "", [8, 16, 32, 64]),
        ([1e-5, 1e-4, 1e-3], "", [1e-5, 1e-4, 1e-3]),
        # Where labels would run into each other, some go.
        ([1, 100, 101, 102, 1_048_576], "", [1, 100, 1_048_576]),
        ([8, 16, 32, 63], "", None),
        ([0, 8, 16, 64], "", None),
        ([-64, -8, -1], "", None),
        ([50, 100, 400], "W", None),
    ],
)
def test_a_parameter_of_a_wide_range_is_on_a_logarithmic_axis(
    limits: list[float], unit: str, ticks: list[float] | None
) -> None:
    at = np.array(limits, dtype=float)
    energy_j = np.linspace(90.0, 70.0, at.size)
    each = analyse([Group({}, at, energy_j / 10, energy_j, unit, limit_name="x")], ("energy",)).groups[0]
    figure = fit_figure(each)
    axes = figure.axes[0]
    assert axes.get_xscale() == ("linear" if ticks is None else "log")
    assert ("logarithmic" in style.alt_text(figure)) == (ticks is not None)
    x, y = _drawn(figure, "fit energy")
    if ticks is not None:
        assert axes.get_xticks().tolist() == ticks
        assert np.diff(np.log(x)) == pytest.approx(np.log(x[-1] / x[0]) / 100)
        assert [label.get_text() for label in axes.get_xticklabels()] == [f"{tick:.10g}" for tick in ticks]
    assert (x[0], x[-1]) == (limits[0], limits[-1])
    assert y == pytest.approx(np.polyval(each.parabolas["energy"].coefficients, x), rel=1e-6)


def test_mean_power_is_over_runs_that_still_run_and_no_gap_is_bridged() -> None:
    def trace(power_w: float, count: int, gap: range = range(0)) -> tuple[PowerTrace, int, int]:
        t = np.array([i for i in range(count) if i not in gap], dtype=np.int64) * S
        return PowerTrace(t, t + S, np.full(t.size, power_w), hold_ns=2 * S), 0, count * S

    found = averaged([trace(100, 20), trace(200, 10)])
    assert found.mean == pytest.approx(np.where(found.t_s <= 9, 150.0, 100.0))
    alone = averaged([trace(100, 20, range(8, 14))])
    assert np.isnan(alone.mean[(alone.t_s > 7) & (alone.t_s < 13)]).all()
    assert alone.mean[alone.t_s <= 7] == pytest.approx(100)
    figure = mean_power({"100 W": [trace(100, 20)], "200 W": [trace(200, 10), trace(220, 10)]}, "gpu:0")
    assert _drawn(figure, "mean 200 W")[1] == pytest.approx(210)


@pytest.mark.parametrize(("count", "columns"), [(8, 1), (9, 2), (16, 2), (17, 3), (36, 3)])
def test_power_of_many_settings_is_in_columns_that_a_page_holds(count: int, columns: int) -> None:
    t = np.arange(20, dtype=np.int64) * S
    traces = [PowerTrace(t, t + S, np.full(20, 100.0 + n), hold_ns=2 * S) for n in range(count)]
    figure = power({f"{100 + n} W": [(traces[n], 0, 20 * S)] for n in range(count)}, "gpu:0")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [f"{100 + n} W" for n in range(count)]
    assert [axes.lines[0].get_ydata()[0] for axes in figure.axes] == [100 + n for n in range(count)]
    places = [axes.get_position() for axes in figure.axes]
    assert len({round(place.x0, 6) for place in places}) == columns
    assert figure.get_figwidth() * 25.4 == pytest.approx(84 if columns == 1 else 174)
    assert figure.get_figheight() * 25.4 <= 245
    # Times can be read off below each column, also where its last row is shorter.
    named = [axes.get_xlabel() for axes in figure.axes]
    assert named == [""] * (count - columns) + ["Time (s)"] * columns
    shown = [any(label.get_visible() for label in axes.get_xticklabels()) for axes in figure.axes]
    assert shown == [bool(name) for name in named]
    with pytest.raises(NotDrawn, match="37 settings are too many for one figure; give up to 36"):
        power({f"{n} W": [(traces[0], 0, 20 * S)] for n in range(37)}, "gpu:0")


def test_many_settings_leave_room_for_the_curve() -> None:
    t = np.arange(20, dtype=np.int64) * S
    runs = [(PowerTrace(t, t + S, np.full(20, 100.0), hold_ns=2 * S), 0, 20 * S)]
    for count in range(2, 9):
        figure = mean_power({f"batch {2 << n}": runs for n in range(count)}, "gpu:0")
        assert figure.axes[0].get_position().width > 0.8


@pytest.mark.parametrize(
    ("settings", "ticks", "title"),
    [
        (("150 W", "200 W"), ["150", "200"], "Power limit (W)"),
        (("877/1005 MHz", "877/1530 MHz"), ["877/1005", "877/1530"], "Clock limit (MHz)"),
        (("batch size 8", "batch size 64"), ["8", "64"], "batch size"),
        (("batch 8", "lr 8"), ["batch 8", "lr 8"], ""),
        (("base", "wide"), ["base", "wide"], ""),
        (("batch 8",), ["batch 8"], ""),
    ],
)
def test_boxes_of_epochs_are_named_by_what_differs(
    settings: tuple[str, ...], ticks: list[str], title: str
) -> None:
    figure = epochs({name: [Epoch(0, 0, S, {})] for name in settings}, [])
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_xticklabels()] == ticks
        assert axes.get_xlabel() == title


def test_curves_over_time_are_of_the_steps_where_these_are_asked_for(tmp_path: Path) -> None:
    """From 1.1 s to 2.9 s: 150 W of the GPU and 40 W of the CPU."""
    run = Run.open(recordings.make(tmp_path / "run", events=False))
    steps_ns = steps_span_ns(run.recording.marks)
    assert steps_ns == (recordings.T0 + 1100 * recordings.MS, recordings.T0 + 2900 * recordings.MS)
    steps, whole = (LabelledRun(run, "a", "a", "batch 8", span) for span in (steps_ns, None))
    for of_runs in (power_of_runs, mean_power_of_runs, cumulative_of_runs):
        said = [style.alt_text(of_runs([run])) for run in (steps, whole)]
        assert ["from the end of the first step to the end of the last" in text for text in said] == [
            True,
            False,
        ]
    power = power_of_runs([steps]).axes[0].lines[0]
    t_s, power_w = np.asarray(power.get_xdata(), float), np.asarray(power.get_ydata(), float)
    assert (t_s[0], t_s[-1]) == (0, pytest.approx(1.8))
    assert power_w[:11].tolist() == pytest.approx([100] * 5 + [200] * 5 + [100])
    assert "batch 8: 342 J in 1.80 s. " in style.alt_text(cumulative_of_runs([steps]))
    assert "batch 8: 620 J in 4.00 s. " in style.alt_text(cumulative_of_runs([whole]))
    # How often a sensor was read is no matter of steps.
    sampled = sampling_of_runs([steps])
    times = [np.asarray(line.get_xdata(), float) for line in sampled.axes[1].lines]
    assert max(float(t.max()) for t in times) > 3.9
    assert "of the whole program" in style.alt_text(sampled)


def test_a_sweeps_figures_from_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Groups as the fits have them, also the one that has too few limits for a fit."""
    rows: list[Repetition] = []
    for n, (batch, precision) in enumerate(((64, "bf16"), (8, "bf16"), (16, "bf16"), (8, "fp32"))):
        recordings.make(tmp_path / "sweep" / "runs" / f"{n}", events=False)
        measured: dict[str, Any] = {
            "time_s": 4,
            "energy_j": 460,
            "steps_time_s": 2,
            "steps_energy_j": 270 + n,
            "device": "gpu:0",
            "device_name": "Test GPU",
            "provenance": "measured",
        }
        settings = {"batch": batch, "precision": precision}
        rows.append(
            Repetition("e", "net", "parameter", 0, f"runs/{n}", "complete", parameters=settings, **measured)
        )
    write_results(tmp_path / "sweep", rows)
    out = tmp_path / "figures"
    words = [str(tmp_path / "sweep"), "--of", "steps", "--figures", str(out), "--format", "svg", "--json"]
    assert main(words) == 0
    streams = capsys.readouterr()
    assert len(json.loads(streams.out)["groups"]) == 5
    drawn = {str(path.relative_to(out)) for path in out.rglob("*.*")}
    names = ("power", "mean_power", "cumulative", "epochs", "sampling")
    of_runs = {f"fit-{group}/{name}.svg" for group in ("bf16", "fp32") for name in names}
    assert drawn == {"fit-bf16.svg", "captions.md"} | of_runs
    said = (out / "fit-bf16" / "cumulative.svg").read_text()
    assert "batch 8: 342 J in 1.80 s; batch 16: 342 J in 1.80 s; batch 64: 342 J in 1.80 s. " in said
    captions = (out / "captions.md").read_text().splitlines()[::2]
    assert [line.split("**")[1] for line in captions] == [
        "fit-bf16",
        *(f"fit-{group}/{name}" for group in ("bf16", "fp32") for name in names),
    ]
    assert captions[0].startswith("**fit-bf16** Energy, time and their product of the steps against batch")
    bf16, fp32 = (f" A sweep of e net {kind} on Test GPU (gpu:0 measured): " for kind in ("bf16", "fp32"))
    ends = f"{bf16}3 settings from batch 8 to batch 64, 1 repetition each."
    assert all(line.endswith(ends) for line in captions[:6])
    assert all(line.endswith(f"{fp32}batch 8, 1 repetition.") for line in captions[6:])
