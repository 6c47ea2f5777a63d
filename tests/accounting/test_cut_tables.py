"""Tables of a recording that were cut off: what is said is true, and no part passes for the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import recordings
from recordings import MS, T0, S
from simulated_runs import make_model, record_run
from smaragdine.accounting.run import Run
from smaragdine.arrow import pc
from smaragdine.cli.main import main
from smaragdine.recording.writer import TableWriter
from smaragdine.report.html.data import comparison_data, run_data
from traced_recording import ten_and_three

Said = Callable[..., str]


@pytest.fixture
def processor(tmp_path: Path) -> Path:
    return record_run(tmp_path / "run", make_model(5, "cpu:0"), 1)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    monkeypatch.setenv("COLUMNS", "300")

    def ask(*words: object) -> str:
        capsys.readouterr()
        main([str(word) for word in words])
        found = capsys.readouterr()
        return found.out + found.err

    return ask


def cut(folder: Path, table: str, until_ns: int) -> Path:
    """Cuts a table off after the rows of that time, as a full disk or a broken copy does."""
    path = folder / f"{table}.arrows"
    rows = pa.ipc.open_stream(path.read_bytes()).read_all()
    at = {"events": "start_ns", "windows": "begin_ns"}.get(table, "t_ns")
    path.unlink()
    writer = TableWriter(path, rows.schema)
    for batch in rows.filter(pc.less_equal(rows[at], until_ns)).to_batches():
        writer.write(batch)
    writer.close()
    path.write_bytes(path.read_bytes()[:-8])
    return folder


def test_who_used_it_is_not_known_but_power_is(processor: Path, said: Said) -> None:
    cut(processor, "activity", T0 + 100 * MS)
    why = "who used cpu:0 while these events ran is not known, because activity.arrows is damaged"
    for words in (["report"], ["account"], ["export", "--to", "latex", "-o", processor / "table.tex"]):
        text = said(words[0], processor, *words[1:])
        assert why in text, words
        assert "no power is known" not in text
    assert why in (Run.open(processor).absent or "")
    assert why in said("compare", processor, processor)
    assert why in comparison_data(Run.open(processor), Run.open(processor))["reason"]
    (remark,) = Run.open(processor).event_energies[2]
    assert why in remark
    assert "your program: at least " in said("show", processor)
    assert "nothing tells steps apart" not in said("report", processor)


def test_a_cut_power_table_is_no_log_that_began_too_late(processor: Path, said: Said) -> None:
    cut(processor, "power", T0 - 100 * MS)
    why = "no power is known of cpu:0 while these events ran, because power.arrows is damaged"
    for verb in ("report", "account"):
        text = said(verb, processor)
        assert why in text
        assert "Let the log begin" not in text


def test_the_energy_of_a_part_is_not_multiplied_by_the_whole_time(tmp_path: Path, said: Said) -> None:
    folder = ten_and_three(tmp_path / "run", power_w=((4000.0, 100.0),)).path
    whole = Run.open(folder).summary.devices["gpu:0"]
    assert whole.edp_js == pytest.approx(400.0 * 4.0)
    cut(folder, "power", T0 + 2 * S)
    found = json.loads(said("show", folder, "--json"))["devices"]["gpu:0"]
    assert found["energy_j"] == pytest.approx(200.0)
    assert found["edp_js"] is None
    text = said("show", folder)
    assert "200 J of the machine's 200 J (100%) in 4.00 s, 2.00 s of it without readings" in text
    assert "800 J·s" not in text
    assert "380 g/kWh, without the 2.00 s that have no readings" in said("show", folder, "--carbon", "380")
    whole_too = ten_and_three(tmp_path / "whole", power_w=((4000.0, 100.0),)).path
    assert "! B: 2.00 s of 4.00 s have no readings" in said("report", whole_too, folder)


def test_an_epoch_or_a_region_of_which_half_is_lost_took_nobody_knows_what(tmp_path: Path) -> None:
    marks = [mark for at in (500, 2500) for mark in recordings.region("load", at, at + 400, at)]
    folder = recordings.make(tmp_path / "run", marked=marks)
    before = Run.open(folder).summary
    assert before.regions[0].known_j("gpu:0") == [pytest.approx(4.0), pytest.approx(60.0)]
    cut(folder, "power", T0 + 2500 * MS)
    after = Run.open(folder).summary
    assert [epoch.devices["gpu:0"].energy_j for epoch in after.epochs] == [
        before.epochs[0].devices["gpu:0"].energy_j,
        None,
    ]
    assert after.epochs[1].program_j is None
    assert after.regions[0].energies_j["gpu:0"] == (pytest.approx(4.0), None)
    assert (after.regions[0].total_j["gpu:0"], after.regions[0].program_j) == (None, None)


def test_lost_events_windows_and_marks_are_called_so(tmp_path: Path, said: Said) -> None:
    events = cut(ten_and_three(tmp_path / "events").path, "events", 0)
    lost = "events.arrows is damaged: it was cut off"
    assert f"no operations: {lost}" in said("report", events)
    assert lost in run_data(Run.open(events))["why_untraced"]
    assert (
        f"has no traced operations: {lost}" in comparison_data(Run.open(events), Run.open(events))["reason"]
    )
    assert f"cannot be compared by operation: {lost}" in said("report", events, events)
    marks = cut(ten_and_three(tmp_path / "marks").path, "marks", 0)
    text = said("report", marks)
    assert "of 0 steps" not in text
    assert "torch: traced 3 steps; not all marks of steps are left" in text
    bare = recordings.make(tmp_path / "bare", events=False)
    cut(bare, "marks", T0 + S)
    assert "nothing was traced, and nobody can tell why: marks.arrows is damaged" in said("report", bare)
