"""A sweep by its steps alone: what they took, and what is said where the start outweighs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import recordings
from recordings import MS, T0
from refusal import refused
from smaragdine.accounting.run import Run
from smaragdine.cli.fit import main
from smaragdine.recording.format import MARKS
from smaragdine.recording.marks import marks_table
from smaragdine.recording.writer import TableWriter
from smaragdine.sweep.experiment import checked
from smaragdine.sweep.measurements import groups_of_sweep
from smaragdine.sweep.plan import make_plan, save_plan
from smaragdine.sweep.sweep import Sweep
from smaragdine.sweep.table import (
    RESULTS,
    Repetition,
    measure,
    results_table,
    write_results,
)

# Eighteen steps: from the end of the first to that of the last 1.8 s at 150 W on average.
STEPS = {
    "steps": 18,
    "steps_time_s": pytest.approx(1.8 * 18 / 17),
    "steps_energy_j": pytest.approx(270 * 18 / 17),
}


def _ends(at_ms: list[int], source: str = "torch", rank: int = 0, pid: int = 42) -> list[dict[str, Any]]:
    who = {"source": source, "rank": rank, "pid": pid}
    return [{"t_ns": T0 + ms * MS, "name": "step_end", **who} for ms in at_ms]


def _recording(folder: Path, marks: list[dict[str, Any]]) -> Path:
    recordings.make(folder, events=False)
    (folder / "marks.arrows").unlink()
    writer = TableWriter(folder / "marks.arrows", MARKS)
    for batch in marks_table(marks).to_batches():
        writer.write(batch)
    writer.close()
    return folder


def _row(limit_w: float, **more: Any) -> Repetition:
    known: dict[str, Any] = {"device": "gpu:0", "time_s": 4.0, "energy_j": 460.0, "status": "complete"}
    known |= {"steps": 10, "steps_time_s": 300 / limit_w, "steps_energy_j": (limit_w - 200) ** 2 / 100 + 10}
    return Repetition("e", "net", "power", 0, f"runs/{limit_w:g}", power_limit_w=limit_w, **known | more)


def _json(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_step_counts_as_those_after_the_first(tmp_path: Path) -> None:
    run = Run.open(recordings.make(tmp_path / "run"))
    found = measure(run)
    assert {name: getattr(found, name) for name in STEPS} == STEPS
    assert measure(run, ["gpu:0", "cpu:0"]).steps_energy_j == pytest.approx((270 + 72) * 18 / 17)


@pytest.mark.parametrize(
    ("marks", "steps", "time_s", "energy_j"),
    [
        ([], None, None, None),
        (_ends([1000, 2000]), 2, None, None),
        (_ends([1000, 1000, 1000]), 3, None, None),
        (_ends([3000, 1000, 1500]), 3, 3.0, 450.0),
        ([{"t_ns": T0 + ms * MS, "name": "step_end"} for ms in (1000, 1500, 3000)], 3, 3.0, 450.0),
        # The lowest rank, though another announced more.
        (_ends([1000, 1200, 2000], rank=1) + _ends([1000, 1500, 1600, 3000], rank=2), 3, 1.5, 225.0),
        # The source that announced most, in one process: those of two are not added up.
        (_ends([1000, 1200, 1400], "keras") + _ends([1000, 2000, 2500, 2800]), 4, 2.4, 360.0),
        (_ends([1000, 1500, 2000], pid=7) + _ends([1000, 2000, 2500, 2800], pid=8), 4, 2.4, 360.0),
        # Calls of a model are steps only where nothing else is.
        (_ends([1000, 2000, 2000]) + _ends([1000, 1100, 1200, 1300], "torch:forward"), 3, 1.5, 225.0),
        (_ends([1000, 2000, 2000], "torch:forward"), 3, 1.5, 225.0),
    ],
)
def test_which_steps_are_taken(
    tmp_path: Path,
    marks: list[dict[str, Any]],
    steps: int | None,
    time_s: float | None,
    energy_j: float | None,
) -> None:
    """From 1 s on the GPU draws 150 W over any 200 ms."""
    found = measure(Run.open(_recording(tmp_path / "run", marks)), ["gpu:0"])
    assert (found.steps, found.steps_time_s, found.steps_energy_j) == (
        steps,
        None if time_s is None else pytest.approx(time_s),
        None if energy_j is None else pytest.approx(energy_j),
    )


def test_groups_are_of_what_is_asked_for() -> None:
    rows = [_row(limit_w) for limit_w in (150.0, 200.0, 300.0)]
    whole, steps = groups_of_sweep(rows), groups_of_sweep(rows, of="steps")
    assert (whole.groups[0].of, whole.groups[0].time_s.tolist()) == ("program", [4, 4, 4])
    assert (steps.groups[0].of, steps.groups[0].time_s.tolist()) == ("steps", [2, 1.5, 1])
    assert steps.groups[0].energy_j.tolist() == [35, 10, 110]
    assert whole.steps_part == pytest.approx(4.5 / 12)
    some = [*rows, _row(250, steps=2, steps_time_s=None, steps_energy_j=None), _row(350, status="failed")]
    found = groups_of_sweep(some, of="steps")
    assert (found.groups[0].limit.tolist(), found.unfinished) == ([150, 200, 300], 2)
    assert found.steps_part == whole.steps_part


def test_a_sweep_without_steps_is_refused() -> None:
    none = {"steps": None, "steps_time_s": None, "steps_energy_j": None}
    for rows, words in (
        ([_row(150, **none)], ("none was announced", "--of program", 'smaragdine.mark("step_end", n)')),
        ([_row(150, **none | {"steps": 2})], ("2 of the 3", "--of program")),
        ([_row(150, steps_energy_j=None)], ("power was not read",)),
    ):
        refused(lambda: groups_of_sweep(rows, of="steps"), *words)  # noqa: B023
    refused(lambda: groups_of_sweep([_row(150)], energy="energy_counter_j", of="steps"), "energy_counter_j")


def test_steps_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(tmp_path, [_row(limit_w) for limit_w in (150.0, 200.0, 250.0, 300.0)])
    found = _json(capsys, tmp_path, "--of", "steps")
    assert (found["of"], found["remarks"]) == ("steps", [])
    energy, time, edp, ed2p, power = found["groups"]
    assert energy["coefficients"] == pytest.approx((0.01, -4, 410))
    assert [each["best_measured"] for each in (energy, time, edp, ed2p, power)] == [200, 300, 200, 200, 200]
    values = [each["best_measured_value"] for each in (energy, time, edp, ed2p, power)]
    assert values == pytest.approx([10, 1, 15, 22.5, 10 / 1.5])
    assert found["pareto"][0]["limits"] == [300, 250, 200]
    assert main([str(tmp_path), "--of", "steps"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "Energy of the steps: ",
        "Energy × delay of the steps: ",
        "front of time and energy of the steps",
    ):
        assert words in shown
    whole = _json(capsys, tmp_path)
    # 2, 1.5, 1.2 and 1 s of 4 s each.
    remark = "steps are 36% of the programs' time: --of steps fits them alone"
    assert (whole["of"], whole["remarks"]) == ("program", [remark])
    write_results(tmp_path, [_row(limit_w, time_s=2.5) for limit_w in (150.0, 200.0, 250.0, 300.0)])
    assert _json(capsys, tmp_path)["remarks"] == []
    table = tmp_path / RESULTS
    refused(lambda: main([str(table), "--of", "steps"]), "--of is for sweeps")


def test_a_sweep_that_goes_on_has_all_its_steps(tmp_path: Path) -> None:
    values = {
        "name": "e",
        "repeat": 1,
        "parameters": {"x": [1, 2]},
        "benchmarks": [{"command": ["a.py", "{x}"]}],
    }
    plan = make_plan(checked({"experiments": [values]}, "e", tmp_path).experiments, 1)
    save_plan(tmp_path, plan)
    for task in plan.tasks:
        recordings.make(tmp_path / "runs" / task.name, events=False)
    for _ in ("made from the recordings", "read from the table"):
        sweep = Sweep(tmp_path)
        sweep.close()
        rows = [row for _, row in sweep.ended()]
        assert [{name: getattr(row, name) for name in STEPS} for row in rows] == [STEPS] * 2


def test_a_table_without_steps_is_no_table_of_a_sweep(tmp_path: Path) -> None:
    table = results_table([_row(150)]).drop_columns(["steps"])
    pq.write_table(table, tmp_path / RESULTS)
    refused(lambda: main([str(tmp_path)]), "it has no column steps")
