"""`smaragdine fit` of a sweep: its own table, its groups and settings, and what is shown of them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recordings
from refusal import refused
from smaragdine.accounting.run import Run
from smaragdine.cli.fit import main
from smaragdine.recording.format import SPOOL_FOLDER, channel_to_dict
from smaragdine.recording.marks import append, fold_spool, read_spool
from smaragdine.recording.writer import ReadingsWriter
from smaragdine.sensors.base import Channel
from smaragdine.sweep.measurements import SweepGroups, groups_of_sweep
from smaragdine.sweep.table import (
    RESULTS,
    SCHEMA,
    Repetition,
    measure,
    read_results,
    results_table,
    write_results,
)


def _json(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _repetition(limit_w: float, number: int, **more: Any) -> Repetition:
    known: dict[str, Any] = {"time_s": 400 / limit_w, "energy_j": 10 + (limit_w - 200) ** 2 / 100 + number}
    known |= {"energy_counter_j": known["energy_j"] + 1, "power_limit_w": limit_w, "status": "complete"}
    return Repetition(
        "first", "bert", "power", repetition=number, recording=f"{limit_w:g}-{number}", **known | more
    )


def test_a_sweeps_table_comes_back_as_it_was(tmp_path: Path) -> None:
    rows = [
        _repetition(150, 0, epoch_time_s=(1.0, 2.0), epoch_energy_j=(3.0, None), provenance="measured"),
        _repetition(150, 1, status="failed", time_s=None, energy_j=None, energy_counter_j=None),
        Repetition(
            "second", "ecg", "clock", 0, "r", "complete", None, 877.0, 1530.0, node="n1", device="gpu:0"
        ),
        Repetition(
            "third", "net", "parameter", 0, "r2", "complete", parameters={"batch": 64, "kind": "bf16"}
        ),
    ]
    path = write_results(tmp_path, rows)
    assert read_results(tmp_path) == rows
    table = pq.read_table(path)
    assert table["edp_js"].to_pylist()[:2] == [rows[0].edp_js, None]
    assert rows[0].ed2p_js2 == pytest.approx(rows[0].energy_j * rows[0].time_s ** 2)  # type: ignore[operator]
    write_results(tmp_path, rows[:1])
    assert read_results(tmp_path) == rows[:1]
    assert os.listdir(tmp_path) == [RESULTS]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("parameters", "{"),
        ("parameters", "[1]"),
        ("parameters", 5),
        ("limit_kind", "voltage"),
        ("limit_kind", None),
        ("time_s", "a"),
        ("status", None),
    ],
)
def test_a_table_with_a_column_of_another_kind(tmp_path: Path, column: str, value: object) -> None:
    path = write_results(tmp_path, [_repetition(150, 0)])
    table = pq.read_table(path)
    at = table.schema.get_field_index(column)
    pq.write_table(table.set_column(at, column, pa.array([value])), path)
    refused(lambda: read_results(tmp_path), f"{RESULTS} cannot be read", "Was it edited?")


def test_a_table_that_is_no_sweeps(tmp_path: Path) -> None:
    refused(lambda: read_results(tmp_path), "is no sweep", RESULTS)
    pq.write_table(pa.table({"experiment": ["a"]}), tmp_path / RESULTS)
    refused(lambda: read_results(tmp_path), "no column benchmark")
    (tmp_path / RESULTS).write_bytes(b"PAR1 not really")
    refused(lambda: read_results(tmp_path), RESULTS)
    newer = results_table([]).replace_schema_metadata({b"smaragdine.sweep": b"99"})
    pq.write_table(newer, tmp_path / RESULTS)
    refused(lambda: read_results(tmp_path), "newer version")
    refused(lambda: write_results(tmp_path / "none", []), "cannot be written")
    assert SCHEMA.names[0] == "experiment"


def _named(found: SweepGroups) -> list[dict[str, list[str]]]:
    return [{name: [row.recording for row in rows] for name, rows in each.items()} for each in found.settings]


def test_a_sweeps_groups() -> None:
    rows = [_repetition(limit, n) for n in range(2) for limit in (250.0, 150.0, 200.0)]
    rows.append(_repetition(300, 0, status="killed"))
    found = groups_of_sweep(rows)
    (group,) = found.groups
    assert found.unfinished == 1
    assert group.by == {"experiment": "first", "benchmark": "bert"}
    assert (group.limit.tolist(), group.unit) == ([150, 150, 200, 200, 250, 250], "W")
    assert _named(found) == [
        {name: [name[:3] + "-0", name[:3] + "-1"] for name in ("150 W", "200 W", "250 W")}
    ]
    counted = groups_of_sweep(rows, energy="energy_counter_j").groups[0]
    assert (counted.energy_j - group.energy_j).tolist() == [1] * 6
    two = [dataclasses.replace(r, device_name=f"GPU {r.repetition}") for r in rows]
    assert [g.by["device_name"] for g in groups_of_sweep(two).groups] == ["GPU 0", "GPU 1"]
    clocks = [
        Repetition("e", "b", "clock", 0, "r", "complete", None, memory, clock, time_s=1, energy_j=1)
        for memory in (405.0, 877.0)
        for clock in (600.0, 1200.0, 900.0)
    ]
    assert [(g.by["memory_clock_mhz"], g.unit) for g in groups_of_sweep(clocks).groups] == [
        (405.0, "MHz"),
        (877.0, "MHz"),
    ]
    assert [[*each] for each in groups_of_sweep(clocks).settings] == [
        [f"{memory}/{clock} MHz" for clock in (600, 900, 1200)] for memory in (405, 877)
    ]
    batches = [
        Repetition("e", "b", "parameter", 0, "r", "complete", parameters=p, time_s=1, energy_j=1)
        for p in ({"batch": 16, "precision": "bf16"}, {"batch": 8, "precision": "bf16"})
    ]
    (group,) = groups_of_sweep(batches).groups
    assert _named(groups_of_sweep(batches)) == [{"batch 8": ["r"], "batch 16": ["r"]}]
    assert (group.limit.tolist(), group.by["precision"]) == ([8, 16], "bf16")
    refused(lambda: groups_of_sweep(batches, "precision"), "precision", "batch")
    refused(lambda: groups_of_sweep([]), "no repetition")
    refused(lambda: groups_of_sweep(rows[-1:]), "no repetition of the sweep has time")
    refused(lambda: groups_of_sweep(rows, energy="heat"), "energy_counter_j")


def test_a_recordings_figures_are_the_sums_of_its_readings(tmp_path: Path) -> None:
    """Four seconds: 10 W in the first, then 200 and 100 W by turns of 100 ms; the estimated CPU 40 W."""
    run = Run.open(recordings.make(tmp_path / "run"))
    found = measure(run)
    assert (found.device, found.device_name, found.provenance) == ("gpu:0", "Test GPU", "measured")
    assert found.time_s == 4
    assert found.energy_j == pytest.approx(10 + 3 * 150)
    assert found.energy_counter_j is None
    assert found.epoch_time_s == pytest.approx((0.99, 0.99))
    assert found.epoch_energy_j == pytest.approx((0.99 * 150 + 0.5, 0.99 * 150 + 0.5), rel=0.01)
    both = measure(run, ["gpu:0", "cpu:0"])
    assert both.energy_j == pytest.approx(460 + 160)
    assert both.provenance == "estimated + measured"
    assert both.energy_counter_j is None
    assert measure(run, ["cpu:0"]).energy_counter_j == pytest.approx(160)
    refused(lambda: measure(run, ["gpu:7"]), "gpu:7", "gpu:0")


def test_power_readings_and_counter_are_told_apart(tmp_path: Path) -> None:
    """Samples of 100 W, and a counter that says 110 W: neither is levelled by the other."""
    channels = [
        Channel("gpu:0", "power", "W", "sample", "measured", 20.0, "nvml", window_ms=20.0),
        Channel("gpu:0", "energy", "J", "counter", "measured", 100.0, "nvml"),
    ]
    at = recordings.T0
    facts = {
        "format_version": 1,
        "status": "complete",
        "begin_ns": at,
        "end_ns": at + 4 * recordings.S,
        "clock": {"begin": {"wall_ns": at, "mono_ns": 0}},
        "channels": [channel_to_dict(channel) for channel in channels],
    }
    (tmp_path / "run.json").write_text(json.dumps(facts))
    writer = ReadingsWriter(tmp_path, channels)
    writer.write([(0, [(at + ms * recordings.MS, 0, 100.0) for ms in range(-20, 4041, 20)])])
    writer.write([(0, [(at + ms * recordings.MS, 1, 0.11 * ms) for ms in range(-100, 4101, 100)])])
    writer.close()
    found = measure(Run.open(tmp_path))
    assert (found.energy_j, found.energy_counter_j) == (pytest.approx(400), pytest.approx(440))


@pytest.mark.parametrize(
    ("read_ms", "died", "energy_j"),
    [
        (0, False, None),
        (0, True, None),
        (950, True, 95),
        (850, False, 85),
        (850, True, None),
        (600, False, None),
    ],
)
def test_what_was_hardly_read_has_no_energy(
    tmp_path: Path, read_ms: int, died: bool, energy_j: float | None
) -> None:
    """A second at 100 W, seen so long. The last 150 ms may be how a source works; not if its monitor died."""
    channel = Channel("gpu:0", "power", "W", "sample", "measured", 20.0, "nvml", window_ms=20.0)
    at = recordings.T0
    facts = {
        "format_version": 1,
        "status": "complete",
        "begin_ns": at,
        "end_ns": at + recordings.S,
        "clock": {"begin": {"wall_ns": at, "mono_ns": 0}},
        "channels": [channel_to_dict(channel)],
    }
    (tmp_path / "run.json").write_text(json.dumps(facts))
    (tmp_path / SPOOL_FOLDER).mkdir()
    writer = ReadingsWriter(tmp_path, [channel])
    times_ms = [*range(0, read_ms, 20), read_ms]
    writer.write([(0, [(at + ms * recordings.MS, 0, 100.0) for ms in times_ms])])
    writer.close()
    if died:
        append(tmp_path, "monitor_died", at + read_ms * recordings.MS)
        assert fold_spool(tmp_path, read_spool(tmp_path)) is None
    found = measure(Run.open(tmp_path))
    assert found.energy_j == (None if energy_j is None else pytest.approx(energy_j))
    row = Repetition("e", "b", "parameter", 0, "r", "complete", **vars(found))
    assert (row.time_s, row.of_use) == (1, energy_j is not None)


def test_a_sweep_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(
        tmp_path, [_repetition(limit, n) for n in range(3) for limit in (150.0, 200.0, 250.0, 300.0)]
    )
    found = _json(capsys, tmp_path, "--quantity", "energy")
    (group,) = found["groups"]
    assert group["coefficients"] == pytest.approx((0.01, -4, 411))
    assert group["optimum"] == pytest.approx(200)
    assert group["band_rests_on"] == "residuals of repeated measurements"
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "energy: all that the device used meanwhile, what other programs took included" in " ".join(
        shown.split()
    )
    assert "4 (12)" in shown
    assert "200 (199–201)" in shown


def test_where_the_model_does_not_fit_no_optimum_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step is no parabola; JSON has the figures all the same."""
    step = {150.0: 900.0, 200.0: 500.0, 250.0: 500.0, 300.0: 500.0}
    write_results(tmp_path, [_repetition(w, n, energy_j=j + n) for n in range(3) for w, j in step.items()])
    (group,) = _json(capsys, tmp_path, "--quantity", "energy")["groups"]
    assert group["fits"] is False
    assert 250 < group["optimum"] < 300
    assert group["interval"] is not None
    assert main([str(tmp_path), "--quantity", "energy"]) == 0
    shown = capsys.readouterr().out.splitlines()
    line = next(line.split() for line in shown if line.startswith("all "))
    assert line[-3:] == ["–", f"{group['r2']:.3f}", "misfit"]
    assert "–: no optimum where the model does not fit" in shown


def test_experiments_that_set_different_things_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clocks = [
        Repetition(
            "clocks", "bert", "clock", 0, f"c{mhz}", "complete", None, 877, mhz, time_s=1, energy_j=mhz
        )
        for mhz in (600, 900, 1200)
    ]
    write_results(tmp_path, [*clocks, *(_repetition(limit, 0) for limit in (150.0, 200.0, 250.0))])
    assert main([str(tmp_path), "--quantity", "time"]) == 0
    shown = capsys.readouterr().out
    assert "experiment memory_clock_mhz" in shown
    assert "clocks 877.0" in shown
    assert "first  " in shown
