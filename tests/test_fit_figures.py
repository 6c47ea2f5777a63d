"""Figures of fits and sweeps: what is drawn is what was fitted and measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="pip install 'smaragdine[figures]'")

import recordings
from smaragdine.accounting.power import PowerTrace
from smaragdine.cli.fit import main
from smaragdine.report.figures import style
from smaragdine.report.figures.limits import fit_figure
from smaragdine.report.figures.mean_power import averaged, mean_power
from smaragdine.sweep.fit import analyse
from smaragdine.sweep.measurements import Group
from smaragdine.sweep.table import Repetition, write_results

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


def test_a_model_that_does_not_fit_is_dashed() -> None:
    time_s = np.array([9.0, 4.0, 2.0, 2.0, 2.0])
    each = analyse([Group({}, LIMITS, time_s, np.array([50.0, 49.0, 51.0, 50.0, 50.0]))]).groups[0]
    figure = fit_figure(each)
    styles = {line.get_gid(): line.get_linestyle() for axes in figure.axes for line in axes.lines}
    assert styles["fit energy"] == "--"
    assert any("does not fit" in axes.get_title(loc="left") for axes in figure.axes)


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


def test_a_sweeps_figures_from_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Repetition] = []
    for n, limit_w in enumerate((150.0, 200.0, 250.0)):
        recordings.make(tmp_path / "sweep" / "runs" / f"{limit_w:g}", events=False)
        rows.append(
            Repetition(
                "e", "net", "power", 0, f"runs/{limit_w:g}", "complete", limit_w, time_s=4, energy_j=460 + n
            )
        )
    write_results(tmp_path / "sweep", rows)
    out = tmp_path / "figures"
    assert main([str(tmp_path / "sweep"), "--figures", str(out), "--format", "svg", "--json"]) == 0
    streams = capsys.readouterr()
    assert len(json.loads(streams.out)["groups"]) == 5
    drawn = {str(path.relative_to(out)) for path in out.rglob("*.*")}
    wanted = ("power", "mean_power", "cumulative", "epochs", "sampling")
    assert drawn == {"fit.svg", "captions.md", *(f"e-net/{name}.svg" for name in wanted)}
