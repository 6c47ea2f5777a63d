from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import recordings
from smaragdine.accounting.baseline import NetEnergy, subtract
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.summary import (
    DeviceSummary,
    Epoch,
    RunSummary,
    SocketShare,
    epoch_bounds,
    peak_w,
    to_json,
)
from smaragdine.api import summarise
from smaragdine.cli.show import main as show
from smaragdine.errors import UserError
from smaragdine.recording.folder import write_info
from smaragdine.recording.format import MARKS, channel_to_dict
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.recording.writer import ReadingsWriter
from smaragdine.report.live import RunProgress
from smaragdine.report.terminal import doctor_tables, run_tables
from smaragdine.sensors.base import Absent, Channel
from smaragdine.units import joules, watts

MS = 1_000_000
S = 1_000_000_000
T0 = 1_700_000_000 * S


def channel(device: str, quantity: str = "energy", **more: Any) -> Channel:
    facts: dict[str, Any] = {
        "unit": "J",
        "kind": "counter",
        "provenance": "measured",
        "period_ms": 4.0,
        **more,
    }
    return Channel(device, quantity, sensor="test", **facts)


def record(
    folder: Path,
    channels: Sequence[tuple[Channel, Sequence[tuple[float, float]]]],
    marks: Sequence[dict[str, Any]] = (),
    **info: Any,
) -> Recording:
    """A recording of readings given as (seconds, value)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spool").mkdir()
    out = ReadingsWriter(folder, [c for c, _ in channels])
    rows = [(T0 + round(t * S), number, v) for number, (_, points) in enumerate(channels) for t, v in points]
    out.write([(0, rows)])
    out.close()
    lines = [json.dumps(mark) for mark in marks]
    (folder / "spool" / "marks-1-0.jsonl").write_text("\n".join([*lines, ""]))
    facts = {
        "format_version": 1,
        "status": "complete",
        "begin_ns": T0,
        "end_ns": T0 + 10 * S,
        "clock": {"begin": {"wall_ns": T0, "mono_ns": 0}},
        "channels": [channel_to_dict(c) for c, _ in channels],
    }
    known = {key: value for key, value in {**facts, **info}.items() if value is not None}
    write_info(folder, known)
    return open_recording(folder)


def steady(
    watts_: float, start: float = 0, end: float = 10, step: float = 0.004
) -> list[tuple[float, float]]:
    count = round((end - start) / step)
    return [(start + i * step, watts_ * i * step) for i in range(count + 1)]


def mark(
    name: str, t: float, index: int | None = None, rank: int | None = 0, pid: int = 1, source: str = "keras"
) -> dict[str, Any]:
    return {
        "name": name,
        "t_ns": T0 + round(t * S),
        "index": index,
        "rank": rank,
        "pid": pid,
        "source": source,
        "total": None,
    }


def epoch(index: int | None, start: float, end: float, **who: Any) -> list[dict[str, Any]]:
    return [mark("epoch_begin", start, index, **who), mark("epoch_end", end, index, **who)]


def spans(marks: Sequence[dict[str, Any]]) -> list[tuple[int | None, float, float]]:
    ordered = sorted(marks, key=lambda m: m["t_ns"])
    return [(i, (s - T0) / S, (e - T0) / S) for i, s, e in epoch_bounds(ordered)]


# --- epochs -------------------------------------------------------------------------------------------------


def test_epochs_in_order():
    marks = [mark("train_begin", 0), *epoch(0, 1, 2), *epoch(1, 2, 4), mark("train_end", 4)]
    assert spans(marks) == [(0, 1, 2), (1, 2, 4)]


def test_an_unfinished_epoch_is_not_counted():
    marks = [*epoch(0, 1, 2), mark("epoch_begin", 2, 1)]
    assert spans(marks) == [(0, 1, 2)]
    assert spans([mark("epoch_end", 1, 0)]) == []
    assert spans([]) == []


def test_ranks_that_train_together_share_an_epoch():
    marks = [
        *epoch(0, 1.0, 2.0, rank=0, pid=10),
        *epoch(0, 1.1, 2.2, rank=1, pid=11),
        *epoch(1, 2.1, 3.0, rank=0, pid=10),
        *epoch(1, 2.3, 3.1, rank=1, pid=11),
    ]
    assert spans(marks) == [(0, 1.0, 2.2), (1, 2.1, 3.1)]


def test_a_second_fit_begins_again_at_epoch_zero():
    marks = [mark("train_begin", 0), *epoch(0, 0, 1), *epoch(1, 1, 2)]
    marks += [mark("train_begin", 3), *epoch(0, 3, 4), *epoch(1, 4, 5)]
    assert spans(marks) == [(0, 0, 1), (1, 1, 2), (0, 3, 4), (1, 4, 5)]


def test_repeated_fits_of_two_ranks():
    marks: list[dict[str, Any]] = []
    for rank in (0, 1):
        for fit in (0, 1):
            marks.append(mark("train_begin", 5 * fit, rank=rank, pid=rank))
            marks += epoch(0, 5 * fit + 0.1 * rank, 5 * fit + 1 + 0.1 * rank, rank=rank, pid=rank)
    assert spans(marks) == [(0, 0, 1.1), (0, 5, 6.1)]


def test_a_rank_that_dies_in_an_epoch_leaves_the_others():
    marks = [*epoch(0, 1, 2, rank=0, pid=10), mark("epoch_begin", 1, 0, rank=1, pid=11)]
    assert spans(marks) == [(0, 1, 2)]


def test_two_programs_one_after_the_other_do_not_share_an_epoch():
    marks = [mark("train_begin", 0, pid=1), *epoch(0, 0, 1, pid=1), *epoch(1, 1, 2, pid=1)]
    marks += [mark("train_begin", 5, pid=2), *epoch(0, 5, 6, pid=2), *epoch(1, 6, 7, pid=2)]
    assert spans(marks) == [(0, 0, 1), (1, 1, 2), (0, 5, 6), (1, 6, 7)]


def test_epochs_marked_by_hand_twice_are_two():
    assert spans([*epoch(0, 0, 1), *epoch(1, 1, 2), *epoch(0, 3, 4), *epoch(1, 4, 5)]) == [
        (0, 0, 1),
        (1, 1, 2),
        (0, 3, 4),
        (1, 4, 5),
    ]


def test_epochs_without_a_number_are_still_many():
    assert spans([*epoch(None, 0, 1), *epoch(None, 1, 2)]) == [(None, 0, 1), (None, 1, 2)]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.randoms(use_true_random=False))
def test_epochs_of_any_number_of_ranks_and_fits(ranks: int, fits: int, epochs: int, random: Any):
    marks: list[dict[str, Any]] = []
    expected: list[tuple[int, float, float]] = []
    for fit in range(fits):
        begins = [[100 * fit + 10 * e + random.randrange(3) for _ in range(ranks)] for e in range(epochs)]
        ends = [[b + 4 + random.randrange(3) for b in row] for row in begins]
        for rank in range(ranks):
            marks.append(mark("train_begin", 100 * fit - 1, rank=rank, pid=rank))
            for e in range(epochs):
                marks += epoch(e, begins[e][rank], ends[e][rank], rank=rank, pid=rank)
        expected += [(e, min(begins[e]), max(ends[e])) for e in range(epochs)]
    assert spans(marks) == expected


# --- figures ------------------------------------------------------------------------------------------------


def test_the_figures_of_a_steady_load(tmp_path: Path):
    marks = [*epoch(0, 1, 3), *epoch(1, 3, 8)]
    summary = summarise(record(tmp_path, [(channel("cpu:0"), steady(50))], marks))
    cpu = summary.devices["cpu:0"]
    assert cpu.energy_j == pytest.approx(500)
    assert cpu.mean_w == pytest.approx(50)
    assert cpu.peak_w == pytest.approx(50)
    assert cpu.edp_js == pytest.approx(5000)
    assert cpu.missing_s == 0
    assert summary.missing_s == 0
    assert summary.total_j == pytest.approx(500)
    assert [e.devices["cpu:0"].energy_j for e in summary.epochs] == pytest.approx([100, 250])
    assert [e.duration_s for e in summary.epochs] == pytest.approx([2, 5])


def test_parts_and_wholes_are_not_added_up(tmp_path: Path):
    devices = [
        (channel("psys", scope="whole"), steady(200)),
        (channel("cpu:0"), steady(50)),
        (channel("cpu:0/core", scope="part"), steady(30)),
        (channel("dram:0"), steady(10)),
        (channel("gpu:0"), steady(100)),
    ]
    summary = summarise(record(tmp_path, devices))
    assert summary.total_j == pytest.approx(1600)
    assert list(summary.devices) == ["gpu:0", "cpu:0", "cpu:0/core", "dram:0", "psys"]


def test_ten_gpus_come_in_order(tmp_path: Path):
    names = [f"gpu:{n}" for n in range(12)]
    summary = summarise(record(tmp_path, [(channel(name), steady(1, step=0.2)) for name in names]))
    assert list(summary.devices) == names


def test_seconds_without_readings_are_missing_and_the_mean_is_of_the_rest(tmp_path: Path):
    summary = summarise(
        record(
            tmp_path, [(channel("cpu:0"), [*steady(50, 0, 4), *((t, v + 999) for t, v in steady(50, 7, 10))])]
        )
    )
    cpu = summary.devices["cpu:0"]
    assert cpu.missing_s == pytest.approx(3)
    assert summary.missing_s == pytest.approx(3)
    assert cpu.energy_j == pytest.approx(350)
    assert cpu.mean_w == pytest.approx(50)


def test_a_device_that_two_sensors_read_is_counted_once_and_said(tmp_path: Path):
    plugin = replace(channel("cpu:0"), sensor="wallplug")
    summary = summarise(record(tmp_path, [(channel("cpu:0"), steady(50)), (plugin, steady(50))]))
    assert summary.total_j == pytest.approx(500)
    assert summary.problems == ["cpu:0: its figures are those of test, not of wallplug, which read it too"]


@pytest.mark.parametrize(
    ("before", "info", "said"),
    [
        (
            2,
            {"run_id": "r"},
            ["gpu:0: 2 other processes were on it before the program; its energy is theirs, too"],
        ),
        (0, {"run_id": "r"}, []),
        (1, {}, []),  # a block: the one may be the process that it is in
        (
            0,
            {"host": {"gpus": [{"device": "gpu:0", "mig": True}, {"device": "gpu:1", "mig": False}]}},
            ["gpu:0: MIG is on, and its power is that of all its instances together"],
        ),
    ],
)
def test_a_gpu_that_is_not_the_programs_alone(
    tmp_path: Path, before: int, info: dict[str, Any], said: list[str]
):
    processes = channel("gpu:0", "processes", unit="", kind="level")
    counts = [(-1.5, 7), (-0.5, before), (0.5, before + 1), (1.5, before + 1)]
    summary = summarise(record(tmp_path, [(channel("gpu:0"), steady(100)), (processes, counts)], **info))
    assert summary.problems == said


def test_a_device_lost_for_good_is_missing_to_the_end(tmp_path: Path):
    lost = [{"t_ns": T0 + 4 * S, "name": "sensor_lost", "detail": "gpu:0 power: GPU is lost"}]
    devices = [(channel("gpu:0"), steady(100, 0, 4)), (channel("cpu:0"), steady(50))]
    summary = summarise(record(tmp_path, devices, [*epoch(0, 6, 8), *lost]))
    assert summary.devices["gpu:0"].missing_s == pytest.approx(6)
    assert summary.missing_s == pytest.approx(6)
    assert "lost: gpu:0 power: GPU is lost" in summary.problems
    late = summary.epochs[0].devices["gpu:0"]
    assert (late.energy_j, late.mean_w, late.peak_w, late.edp_js) == (None, None, None, None)
    assert late.missing_s == pytest.approx(2)


def test_nothing_measured_is_nothing_not_zero(tmp_path: Path):
    summary = summarise(record(tmp_path, [(channel("gpu:0", "temperature", kind="level"), [(1, 40.0)])]))
    assert summary.devices == {}
    assert summary.total_j is None
    assert summary.missing_s == pytest.approx(10)


def test_an_interrupted_recording_ends_with_its_readings(tmp_path: Path):
    recording = record(tmp_path, [(channel("cpu:0"), steady(50, 0, 7))], status="running", end_ns=None)
    summary = summarise(recording)
    assert summary.status == "interrupted"
    assert summary.duration_s == pytest.approx(7)
    assert summary.devices["cpu:0"].energy_j == pytest.approx(350)


def test_a_run_of_no_length_has_no_figures(tmp_path: Path):
    summary = summarise(
        record(tmp_path, [(channel("cpu:0"), steady(50, -2, -1))], status="running", end_ns=None)
    )
    assert summary.duration_s == 0
    assert summary.devices["cpu:0"].energy_j is None
    assert summary.devices["cpu:0"].peak_w is None
    json.dumps(to_json(summary), allow_nan=False)


def trace_of(stretches: Sequence[tuple[float, float, float]]) -> PowerTrace:
    times = [(T0 + round(s * S), T0 + round(e * S), w) for s, e, w in stretches]
    return PowerTrace(
        np.array([t[0] for t in times], dtype=np.int64),
        np.array([t[1] for t in times], dtype=np.int64),
        np.array([t[2] for t in times], dtype=np.float64),
        250 * MS,
    )


def test_the_peak_is_a_mean_over_a_tenth_of_a_second():
    trace = trace_of([(0, 1, 100), (1, 1.1, 400), (1.1, 1.14, 1000), (1.14, 3, 100)])
    assert peak_w(trace, T0, T0 + 3 * S) == pytest.approx(640, rel=1e-3)
    assert peak_w(trace, T0, T0 + S) == pytest.approx(100)


def test_the_peak_of_a_short_stretch_is_its_mean():
    trace = trace_of([(0, 0.02, 100), (0.02, 0.04, 300)])
    assert peak_w(trace, T0, T0 + 40 * MS) == pytest.approx(200)


def test_there_is_no_peak_where_nothing_is_known():
    trace = trace_of([(0, 1, 100), (2, 3, 500)])
    assert peak_w(trace, T0 + S, T0 + 2 * S) is None
    assert peak_w(trace_of([]), T0, T0 + S) is None
    # Half a slice known is too little to call it a peak.
    assert peak_w(trace_of([(0, 1, 100), (1.05, 1.1, 9000)]), T0, T0 + 2 * S) == pytest.approx(100)


def test_a_burst_of_a_tenth_of_a_second_is_seen_wherever_it_falls():
    trace = trace_of([(0, 1.05, 100), (1.05, 1.15, 500), (1.15, 3, 100)])
    assert peak_w(trace, T0, T0 + 3 * S) == pytest.approx(500, rel=0.01)


def counter_of(rate: float, start: float = -1, end: float = 11) -> list[tuple[float, float]]:
    return [(start + i * 0.02, rate * i * 0.02) for i in range(round((end - start) / 0.02) + 1)]


def activity(device: str, busy: float, program: float | None, monitor: float) -> list[Any]:
    rates = {"busy": busy, "program": program, "monitor": monitor}
    return [(channel(device, q, unit="s"), counter_of(r)) for q, r in rates.items() if r is not None]


def test_shares_of_two_sockets(tmp_path: Path):
    readings = [*activity("cpu:0", 2.0, 1.5, 0.1), *activity("cpu:1", 1.0, 0.0, 0.1)]
    found = summarise(record(tmp_path, readings)).shares
    assert found["cpu:0"].program == pytest.approx(0.75)
    assert found["cpu:0"].other == pytest.approx(0.2)
    assert found["cpu:0"].monitor == pytest.approx(0.05)
    assert found["cpu:1"].program == 0
    assert found["cpu:1"].monitor == pytest.approx(0.1)


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 4), st.floats(0, 4), st.floats(0, 1))
def test_shares_sum_to_one(tmp_path_factory: Any, busy: float, program: float, monitor: float):
    recording = record(tmp_path_factory.mktemp("run") / "r", activity("cpu:0", busy, program, monitor))
    for share in summarise(recording).shares.values():
        assert share.program + share.other + share.monitor == pytest.approx(1)
        assert min(share.program, share.other, share.monitor) >= 0


def test_a_socket_that_did_nothing_has_no_shares(tmp_path: Path):
    assert summarise(record(tmp_path, activity("cpu:0", 0.0, 0.0, 0.0))).shares == {}


def test_shares_are_of_the_run_not_of_what_came_before(tmp_path: Path):
    points = [(t, 5 * (t + 1) if t < 0 else 5.0 + t) for t in (i * 0.02 for i in range(-50, 550))]
    readings = [
        (channel("cpu:0", "busy", unit="s"), points),
        (channel("cpu:0", "program", unit="s"), counter_of(1)),
    ]
    assert summarise(record(tmp_path, readings)).shares["cpu:0"].program == pytest.approx(1, abs=0.02)


# --- JSON ---------------------------------------------------------------------------------------------------


def test_json_has_the_keys_of_the_contract(tmp_path: Path):
    marks = [mark("experiment_begin", 0), *epoch(0, 1, 3)]
    readings = [(channel("cpu:0", provenance="estimated"), steady(50)), *activity("cpu:0", 1, 0.5, 0.1)]
    found = json.loads(json.dumps(to_json(summarise(record(tmp_path, readings, marks))), allow_nan=False))
    assert found.keys() >= {"status", "duration_s", "missing_s", "devices", "epochs", "marks"}
    assert found["devices"]["cpu:0"].keys() >= {"energy_j", "mean_w", "peak_w", "provenance"}
    assert found["devices"]["cpu:0"]["provenance"] == "estimated"
    assert all(m.keys() >= {"name", "index", "rank", "t_ns"} for m in found["marks"])
    assert [m["name"] for m in found["marks"]] == ["experiment_begin", "epoch_begin", "epoch_end"]
    assert found["epochs"][0]["devices"].keys() == found["devices"].keys()
    assert (found["status"], found["duration_s"], found["missing_s"]) == ("complete", 10.0, 0.0)


def test_absent_figures_are_null(tmp_path: Path):
    recording = record(tmp_path, [(channel("gpu:0"), steady(100, -4, -1))])
    found = to_json(summarise(recording))
    assert [found["devices"]["gpu:0"][key] for key in ("energy_j", "mean_w", "peak_w")] == [None, None, None]
    assert found["total_j"] is None
    assert found["missing_s"] == pytest.approx(10)


def test_a_factor_nobody_believes_is_a_problem(tmp_path: Path):
    shape = [(i * 0.02, 100.0) for i in range(501)]
    devices = [
        (channel("gpu:0", "power", kind="sample", unit="W", window_ms=20.0, period_ms=20.0), shape),
        (channel("gpu:0", period_ms=100.0), [(t, 200.0 * t) for t in range(11)]),
    ]
    summary = summarise(record(tmp_path, devices))
    assert any("gpu:0" in p and "disagree" in p for p in summary.problems)
    assert summary.devices["gpu:0"].energy_j == pytest.approx(2000, rel=0.01)


# --- baseline -----------------------------------------------------------------------------------------------


def test_above_idle(tmp_path: Path):
    run = summarise(
        record(tmp_path / "run", [(channel("cpu:0"), steady(50)), (channel("gpu:0"), steady(100, 0, 6))])
    )
    idle = summarise(
        record(tmp_path / "idle", [(channel("cpu:0"), steady(20)), (channel("gpu:0"), steady(40))])
    )
    net = {row.device: row for row in subtract(run, idle)}
    assert net["cpu:0"].net_j == pytest.approx(300)
    assert net["cpu:0"].idle_w == pytest.approx(20)
    # Of the four seconds without readings neither the energy nor the idle energy is known.
    assert net["gpu:0"].net_j == pytest.approx(360)
    assert net["gpu:0"].idle_j == pytest.approx(240)


def test_a_baseline_of_another_kind_is_not_subtracted(tmp_path: Path):
    run = summarise(
        record(tmp_path / "run", [(channel("cpu:0"), steady(50)), (channel("gpu:0"), steady(10))])
    )
    idle = summarise(
        record(
            tmp_path / "idle",
            [(channel("cpu:0", provenance="estimated"), steady(20)), (channel("gpu:0"), steady(4))],
        )
    )
    assert [row.device for row in subtract(run, idle)] == ["gpu:0"]


def test_a_baseline_of_another_machine_is_refused(tmp_path: Path):
    run = summarise(record(tmp_path / "run", [(channel("cpu:0"), steady(50))]))
    idle = summarise(record(tmp_path / "idle", [(channel("gpu:0"), steady(20))]))
    with pytest.raises(UserError, match="no device in common"):
        subtract(run, idle)


@pytest.mark.parametrize("indices", [(1, 2), (None, None)])
def test_epochs_a_person_marked_stand_before_inferred_ones(indices: tuple[int | None, int | None]):
    inferred = [
        *epoch(0, 1.1, 1.9, source="torch.dataloader"),
        *epoch(1, 2.1, 2.9, source="torch.dataloader"),
    ]
    marked = [*epoch(indices[0], 1, 2, source="user"), *epoch(indices[1], 2, 3, source="user")]
    assert spans([*inferred, *marked]) == [(indices[0], 1, 2), (indices[1], 2, 3)]
    # Another process's are its own.
    foreign = epoch(7, 1.2, 1.8, source="torch.dataloader", pid=99)
    assert len(spans([*foreign, *marked])) == 3


# --- whose it was -------------------------------------------------------------------------------------------


def ours_and_others(folder: Path, **info: Any) -> Recording:
    """1.75 kJ: a socket at its idle power of 100 W, of whose four CPUs the program keeps one busy; a GPU that
    it uses, 50 W, and one that nobody uses, 20 W; and a disk, 5 W, that nobody knows the users of."""
    flat = [(t / 5, 0.0) for t in range(-1, 52)]
    busy = {"unit": "s", "kind": "counter"}
    level = {"unit": "", "kind": "level"}
    readings = [
        (channel("cpu:0"), steady(100)),
        (channel("cpu:0", "busy", **busy), steady(2, -0.2, 10.4, 0.04)),
        (channel("cpu:0", "program", **busy), steady(1, -0.2, 10.4, 0.04)),
        (channel("gpu:0"), steady(50)),
        (channel("gpu:0", "processes", **level), flat),
        (channel("gpu:0", "gpu_utilisation", **level), [(t, 3.0 if t == 5 else 0.0) for t, _ in flat]),
        (channel("gpu:1"), steady(20)),
        (channel("gpu:1", "processes", **level), flat),
        (channel("gpu:1", "gpu_utilisation", **level), flat),
        (channel("disk:0"), steady(5)),
    ]
    host = {"host": {"sockets": {"cpu:0": {"logical_cpus": 4}}}}
    who = {"rank": 0, "pid": 1, "source": "region", "total": None, "index": 1, "detail": "load"}
    load = [{"name": f"region_{n}", "t_ns": T0 + t * S, **who} for n, t in (("begin", 4), ("end", 5))]
    return record(folder, readings, [*epoch(0, 1, 3), *load], **{**host, **info})


def test_the_program_comes_first_and_the_parts_are_the_machine(tmp_path: Path) -> None:
    summary = summarise(ours_and_others(tmp_path))
    assert summary.program_j == pytest.approx(750)  # a quarter of the idle socket, and the GPU it used
    assert summary.other_j == pytest.approx(950)  # the rest of the socket, and the GPU that nobody used
    assert summary.monitor_j == 0
    assert summary.unsplit_j == pytest.approx(50)
    parts = (summary.program_j, summary.other_j, summary.monitor_j, summary.unsplit_j)
    assert sum(part or 0 for part in parts) == pytest.approx(summary.total_j)
    each = {name: device.program_j for name, device in summary.devices.items()}
    assert each == {"gpu:0": pytest.approx(500), "gpu:1": 0, "cpu:0": pytest.approx(250), "disk:0": None}
    assert summary.notes == [
        "disk:0: not split, nobody knows who used it",
        "gpu:1: nobody used it; its 200 J are the machine's",
    ]
    assert summary.epochs[0].program_j == pytest.approx(150)
    assert summary.regions[0].program_j == pytest.approx(75)
    assert summary.regions[0].programs_j == (pytest.approx(75),)


def test_every_view_leads_with_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from smaragdine.accounting.run import Run
    from smaragdine.report.export.prometheus import prometheus_text
    from smaragdine.report.export.selection import select
    from smaragdine.report.export.tables import tables
    from smaragdine.report.html.data import run_data
    from smaragdine.report.notebook import html

    recording = ours_and_others(tmp_path / "run")
    lead = (
        "your program: at least 750 J of the machine's 1.75 kJ (43%) in 10.0 s; who used 50.0 J is not known"
    )
    assert show([str(recording.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == lead
    rows = {line.split()[0]: line.split()[1:5] for line in reversed(lines) if line}  # the first of each
    assert rows["sum"] == ["750", "J", "1.75", "kJ"]
    assert rows["gpu:1"] == ["0", "J", "200", "J"]
    assert rows["disk:0"] == ["–", "50.0", "J", "5.00"]
    assert rows["0"] == ["2.00", "s", "150", "J"]
    assert rows["load"][3:] == ["75.0"]
    assert show([str(recording.path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["program_j"], said["total_j"]) == (pytest.approx(750), pytest.approx(1750))
    assert lead in html(recording).replace("&#x27;", "'")
    page = run_data(Run(recording))
    assert page["headline"] == lead
    assert page["figures"]["program_j"] == said["program_j"]
    assert page["epochs"]["program_j"].tolist() == [said["epochs"][0]["program_j"]]
    assert page["regions"]["rows"][0]["program_j"] == said["regions"][0]["program_j"]
    run = select(Run(recording))
    assert f'program_energy_joules{{run="run"}} {said["program_j"]!r}\n' in prometheus_text(run)
    written, _ = tables(run)
    known = {row["device"]: row["program_j"] for row in written["devices"].to_pylist()}
    assert known == {name: device["program_j"] for name, device in said["devices"].items()}
    in_epoch = {row["device"]: row["program_j"] for row in written["epochs"].to_pylist()}
    assert in_epoch == {n: d["program_j"] for n, d in said["epochs"][0]["devices"].items()}


def test_where_nobody_knows_the_figure_is_the_machines(tmp_path: Path) -> None:
    summary = summarise(record(tmp_path, [(channel("cpu:0"), steady(50))]))
    assert (summary.program_j, summary.unsplit_j) == (None, pytest.approx(500))
    text = render(run_tables(summary), 110)
    assert text.startswith("the machine: 500 J in 10.0 s; what your program used is not known\n")
    assert "program " not in text.splitlines()[2]
    assert "cpu:0: not split, nobody recorded who used socket 0" in text


# --- terminal -----------------------------------------------------------------------------------------------


def device(name: str, energy_j: float | None, **more: Any) -> DeviceSummary:
    facts: dict[str, Any] = {"provenance": "measured", "scope": "device", "missing": [], **more}
    known = energy_j is not None
    return DeviceSummary(
        name,
        energy_j,
        energy_j / 100 if known else None,
        energy_j / 50 if known else None,
        source="test",
        edp_js=energy_j * 100 if known else None,
        **facts,
    )


def summary_of(devices: Sequence[DeviceSummary], epochs: int = 0, **more: Any) -> RunSummary:
    facts: dict[str, Any] = {"status": "complete", "missing_s": 0.0, "shares": {}, "problems": [], **more}
    each = [
        Epoch(n, T0 + n * S, T0 + (n + 1) * S, {d.device: device(d.device, 1000 + 111 * n) for d in devices})
        for n in range(epochs)
    ]
    return RunSummary(
        begin_ns=T0,
        end_ns=T0 + 100 * S,
        devices={d.device: d for d in devices},
        total_j=sum(d.energy_j or 0 for d in devices),
        epochs=each,
        marks=MARKS.empty_table(),
        **facts,
    )


def render(what: Any, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(what)
    return out.getvalue()


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


FOUR = [
    device("gpu:0", 123_456.0),
    device("gpu:1", 98_765.0),
    device("cpu:0", 4_321.0, provenance="estimated"),
    device("psys", 234_567.0, scope="whole"),
    device("cpu:0/core", 1_111.0, scope="part"),
]


@pytest.mark.parametrize("width", [60, 110])
def test_no_number_is_lost(width: int):
    text = render(run_tables(summary_of(FOUR)), width)
    assert max(len(line) for line in text.split("\n")) <= width
    assert "…" not in text
    for d in FOUR[:4]:
        row = next(line for line in text.split("\n") if line.startswith(d.device + " "))
        for figure in (joules(d.energy_j), watts(d.mean_w), watts(d.peak_w)):
            number, unit = figure.split(" ")
            assert number in row
            assert unit in text
    assert "cpu:0/core" not in text
    assert "not in the sum" in " ".join(text.split())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"status": "failed", "exit_code": 3}, "the program: failed with exit code 3\n"),
        ({"status": "killed", "signal": 9}, "the program: killed by SIGKILL\n"),
        ({"status": "killed", "signal": 41}, "the program: killed by signal 41\n"),
        ({"status": "interrupted"}, "the program: interrupted\n"),
    ],
)
def test_how_the_program_ended(tmp_path: Path, how: dict[str, Any], said: str):
    summary = summarise(record(tmp_path, [(channel("cpu:0"), steady(50))], **how))
    assert said in render(run_tables(summary), 110)
    assert {key: to_json(summary)[key] for key in how} == how


def test_carbon_is_energy_times_the_intensity_of_the_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record(tmp_path, [(channel("cpu:0"), steady(360)), (channel("gpu:0"), steady(3240))])  # 36 kJ: 10 Wh
    assert show([str(tmp_path), "--carbon", "380"]) == 0
    # Whose the socket's energy was nobody recorded.
    said = "your program: 3.42 g of CO₂: 9.00 Wh at 380 g/kWh; the machine: 3.80 g of CO₂: 10.0 Wh\n"
    assert capsys.readouterr().out.endswith(said)
    assert show([str(tmp_path), "--carbon", "380", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["carbon"] == {
        "program_g": pytest.approx(3.42),
        "total_g": pytest.approx(3.8),
        "intensity_g_per_kwh": 380,
    }


def test_where_no_energy_is_known_there_is_no_carbon(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record(tmp_path, [(channel("gpu:0"), steady(100, -4, -1))])
    assert show([str(tmp_path), "--carbon", "380"]) == 0
    assert "no CO₂: no energy is known" in capsys.readouterr().out
    assert show([str(tmp_path), "--carbon", "380", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["carbon"]["total_g"] is None


@pytest.mark.parametrize("width", [60, 110])
def test_epochs_are_shown_with_mean_and_spread(width: int):
    text = render(run_tables(summary_of(FOUR[:3], epochs=3)), width)
    assert max(len(line) for line in text.split("\n")) <= width
    for n in range(3):
        assert text.count(joules(1000 + 111 * n).split(" ")[0]) >= 3
    assert "mean of 3" in text
    assert "±" in text
    assert "1.11±0.11" in squeezed(text)


def test_many_epochs_are_cut_short_but_all_are_in_the_mean():
    text = render(run_tables(summary_of(FOUR[:1], epochs=40)), 110)
    assert "mean of 40" in text
    assert "…" in text
    assert len(text.split("\n")) < 20


@pytest.mark.parametrize("width", [60, 110])
def test_eight_gpus_keep_their_epochs(width: int):
    eight = [device(f"gpu:{n}", 1000.0 * (n + 1)) for n in range(8)]
    text = render(run_tables(summary_of(eight, epochs=2)), width)
    assert max(len(line) for line in text.split("\n")) <= width
    for n in range(8):
        assert f"gpu:{n}" in text
    assert "…" not in text


def test_an_absent_figure_is_a_dash():
    text = render(run_tables(summary_of([device("gpu:0", None), device("cpu:0", 5.0)])), 110)
    row = next(line for line in text.split("\n") if line.startswith("gpu:0"))
    assert row.count("–") == 4
    assert "0 J" not in row


@pytest.mark.parametrize("table", ["marks", "power", "events"])
def test_a_damaged_table_is_said(tmp_path: Path, table: str) -> None:
    whole = open_recording(recordings.make(tmp_path / "run"))
    assert not [line for line in summarise(whole).problems if "damaged" in line]
    file = whole.path / f"{table}.arrows"
    for content in (b"garbage", file.read_bytes()[: file.stat().st_size // 2]):
        file.write_bytes(content)
        said = summarise(open_recording(whole.path)).problems
        assert [line for line in said if line.startswith(f"{table}.arrows is damaged: ")]
    # Who was cut off may leave half a batch.
    write_info(whole.path, {**whole.info, "status": "running"})
    assert not [line for line in summarise(open_recording(whole.path)).problems if "damaged" in line]


def test_what_is_wrong_is_said():
    summary = summary_of(
        FOUR[:3],
        missing_s=3.5,
        status="killed",
        problems=["lost: [gpu:0] power: GPU is lost"],
        shares={"cpu:0": SocketShare(0.755, 0.2, 0.045)},
    )
    text = " ".join(render(run_tables(summary), 60).split())
    assert "missing 3.50 s of 100 s" in text
    assert "killed" in text
    assert "lost: [gpu:0] power: GPU is lost" in text
    assert "program 75.5%, other processes 20.0%, monitor 4.5%" in text
    assert "estimated" in text


def test_nothing_measured_is_said():
    text = render(run_tables(summary_of([])), 60)
    assert "nothing was measured" in text


@pytest.mark.parametrize("width", [60, 110])
def test_energy_above_idle_is_a_table(width: int):
    text = render(run_tables(summary_of(FOUR), [NetEnergy("gpu:0", 1234.0, 41.0, 4100.0)]), width)
    for figure in ("1.23 kJ", "41.0 W", "4.10 kJ"):
        assert figure in text


@pytest.mark.parametrize("width", [60, 110])
def test_the_doctors_table_loses_nothing(width: int):
    channels = [channel("cpu:0", detail="package-0 of /sys/class/powercap/intel-rapl:0, wraps at 262143 J")]
    absent = [Absent("gpu power", "libnvidia-ml.so.1 was not found [errno 2]", "install the NVIDIA driver")]
    text = render(doctor_tables(channels, absent), width)
    assert squeezed("package-0 of /sys/class/powercap/intel-rapl:0, wraps at 262143 J") in squeezed(text)
    assert squeezed("libnvidia-ml.so.1 was not found [errno 2]") in squeezed(text)
    assert "install the NVIDIA driver" in text


# --- live ---------------------------------------------------------------------------------------------------

COUNTER = {
    "device": "cpu:0",
    "quantity": "energy",
    "scope": "device",
    "provenance": "measured",
    "wraps_at": None,
}
SAMPLES = {**COUNTER, "device": "gpu:0", "quantity": "power"}


def spool_line(name: str, t: float, index: int | None = None, total: int | None = None) -> str:
    line = {"t_ns": T0 + round(t * S), "name": name, "index": index, "rank": 0, "pid": 7, "source": "keras"}
    return json.dumps({**line, **({"total": total} if total is not None else {})}) + "\n"


def reading(t_ns: int, value: float, mean: float = 0.0) -> list[float]:
    """A second's feed in which one reading is both the newest and the first."""
    return [t_ns, value, mean, t_ns, value]


def fed(progress: RunProgress, watts_: Sequence[float]) -> None:
    """One feed a second of a counter that gains that many joules each second."""
    total = 100.0
    progress.take([COUNTER], {"0": reading(T0, total, total)})
    for second, power in enumerate(watts_):
        total += power
        progress.take([COUNTER], {"0": reading(T0 + (second + 1) * S, total, total)})


def test_the_first_second_counts():
    progress = RunProgress()
    progress.take([COUNTER], {"0": [T0 + S, 150.0, 125.0, T0, 100.0]})
    assert progress.energy_j == {"cpu:0": pytest.approx(50)}
    assert progress.t_ns == [T0, T0 + S]
    assert progress.total_j == [0, pytest.approx(50)]


def test_joules_so_far_from_a_counter():
    progress = RunProgress()
    fed(progress, [10, 20, 30])
    assert progress.energy_j == {"cpu:0": pytest.approx(60)}
    assert progress.power_w == {"cpu:0": pytest.approx(30)}
    assert "30.0 W" in progress.line()
    assert "60.0 J" in progress.line()
    assert "estimated" not in progress.line()


def test_a_counter_that_wraps():
    progress = RunProgress()
    wrapping = {**COUNTER, "wraps_at": 100.0}
    for second, value in enumerate((90.0, 5.0, 20.0)):
        progress.take([wrapping], {"0": reading(T0 + second * S, value, value)})
    assert progress.energy_j == {"cpu:0": pytest.approx(30)}


def test_samples_say_the_power_and_the_counter_the_energy():
    progress = RunProgress()
    channels = [SAMPLES, {**COUNTER, "device": "gpu:0"}]
    for second in range(3):
        progress.take(
            channels,
            {"0": reading(T0 + second * S, 300, 250), "1": reading(T0 + second * S, 200.0 * second, 0)},
        )
    assert progress.power_w == {"gpu:0": 250}
    assert progress.energy_j == {"gpu:0": pytest.approx(400)}


def test_samples_alone_give_the_energy_too():
    progress = RunProgress()
    for second in range(3):
        progress.take([SAMPLES], {"0": reading(T0 + second * S, 300, 250)})
    assert progress.energy_j == {"gpu:0": pytest.approx(500)}


def test_only_devices_that_add_up_are_shown():
    progress = RunProgress()
    channels = [{**COUNTER, "scope": "part"}, {**COUNTER, "device": "psys", "scope": "whole"}]
    for second in range(3):
        progress.take(channels, {str(n): reading(T0 + second * S, 10.0 * second) for n in (0, 1)})
    assert progress.energy_j == {}
    assert progress.power_w == {}


def test_two_dies_of_a_socket_show_their_sum():
    progress = RunProgress()
    for second in range(3):
        progress.take([COUNTER, COUNTER], {str(n): reading(T0 + second * S, 10.0 * second) for n in (0, 1)})
    assert progress.energy_j == {"cpu:0": pytest.approx(40)}
    assert progress.power_w == {"cpu:0": pytest.approx(20)}


def test_an_estimate_is_called_one():
    progress = RunProgress()
    progress.take([{**COUNTER, "provenance": "estimated"}], {"0": reading(T0, 1.0, 1.0)})
    assert "(estimated)" in progress.line()


def test_the_expected_total_and_its_spread(tmp_path: Path):
    """Epochs of 100, 120 and 110 J out of ten, after 50 J of loading."""
    progress = RunProgress()
    fed(progress, [50] + [10] * 10 + [12] * 10 + [11] * 10)
    spool = tmp_path / "marks-7-0.jsonl"
    spool.write_text(spool_line("train_begin", 0.5, total=10))
    progress.read_marks(tmp_path)
    assert progress.expected_j() is None
    with spool.open("a") as file:
        file.write(spool_line("epoch_begin", 1, 0) + spool_line("epoch_end", 11, 0))
    progress.read_marks(tmp_path)
    assert progress.expected_j() is None
    with spool.open("a") as file:
        for n in (1, 2):
            file.write(spool_line("epoch_begin", 1 + 10 * n, n) + spool_line("epoch_end", 11 + 10 * n, n))
    progress.read_marks(tmp_path)
    expected = progress.expected_j()
    assert expected is not None
    mean_j, spread_j = expected
    assert mean_j == pytest.approx(50 + 330 + 7 * 110, rel=1e-6)
    # Seven epochs to come vary by 10 J each; that the mean itself is known only from three adds to it.
    assert 7**0.5 * 10 * 0.99 <= spread_j <= (7 + 49 / 3) ** 0.5 * 10 * 1.01
    assert "expected 1.15 kJ" in progress.line()


def test_the_spread_covers_the_uncertainty_of_the_mean():
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        each = rng.normal(100, 10, 40)
        progress = RunProgress()
        fed(progress, list(each[:5]))
        for n in range(5):
            progress._marks.extend(
                json.loads(spool_line(*m)) for m in (("epoch_begin", n, n, 40), ("epoch_end", n + 1, n))
            )
        expected = progress.expected_j()
        assert expected is not None
        covered += abs(expected[0] - each.sum()) <= 2 * expected[1]
    assert covered / 200 > 0.8


def test_no_plan_no_expectation(tmp_path: Path):
    progress = RunProgress()
    fed(progress, [10] * 10)
    lines = [spool_line("epoch_begin", n, n) + spool_line("epoch_end", n + 1, n) for n in range(4)]
    (tmp_path / "marks-7-0.jsonl").write_text("".join(lines))
    progress.read_marks(tmp_path)
    assert progress.expected_j() is None
    assert "expected" not in progress.line()


def test_marks_are_read_once_and_only_whole_lines(tmp_path: Path):
    progress = RunProgress()
    spool = tmp_path / "marks-7-0.jsonl"
    line = spool_line("epoch_begin", 1, 0)
    for size in range(1, len(line) + 1):
        spool.write_text(line[:size])
        progress.read_marks(tmp_path)
    assert len(progress._marks) == 1
    with spool.open("a") as file:
        file.write("torn {\n" + spool_line("epoch_end", 2, 0))
    progress.read_marks(tmp_path)
    progress.read_marks(tmp_path)
    assert [m["name"] for m in progress._marks] == ["epoch_begin", "epoch_end"]


@pytest.mark.parametrize(
    "line",
    ["[1]", "5", "null", '{"name": "epoch_begin"}', '{"name": "epoch_begin", "t_ns": 5}', '{"name": ["x"]}'],
)
def test_junk_in_the_spool_does_not_end_the_run(tmp_path: Path, line: str):
    progress = RunProgress()
    fed(progress, [10] * 5)
    lines = [spool_line("epoch_begin", n, n, total=9) + spool_line("epoch_end", n + 1, n) for n in range(2)]
    (tmp_path / "marks-7-0.jsonl").write_text(line + "\n" + "".join(lines))
    progress.read_marks(tmp_path)
    assert progress.expected_j() is not None


def test_a_second_fit_has_its_own_plan(tmp_path: Path):
    progress = RunProgress()
    fed(progress, [10] * 20)
    lines = [spool_line("train_begin", 0, total=5)]
    lines += [spool_line("epoch_begin", n, n) + spool_line("epoch_end", n + 1, n) for n in range(5)]
    lines += [spool_line("train_begin", 6, total=10)]
    lines += [spool_line("epoch_begin", 6 + n, n) + spool_line("epoch_end", 7 + n, n) for n in range(2)]
    (tmp_path / "marks-7-0.jsonl").write_text("".join(lines))
    progress.read_marks(tmp_path)
    expected = progress.expected_j()
    assert expected is not None
    assert expected[0] == pytest.approx(80 + 8 * 10)


def test_nothing_yet_is_a_line_too():
    assert "so far 0 J" in RunProgress().line()
    progress = RunProgress()
    progress.take([COUNTER], {})
    assert progress.expected_j() is None
