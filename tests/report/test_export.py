"""`smaragdine export`: tables, what is missing in a recording, and what is in the way."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cli import smaragdine
from exports import Figures, export, figures_of, rows_of, scalars
from perfetto_trace import GPU, Decoded, has_perfetto
from recordings import MS, T0, S, make
from refusal import refused
from simulated_runs import make_model, record_run
from smaragdine.accounting.account import account, account_meters
from smaragdine.accounting.device_power import from_power_table
from smaragdine.accounting.run import Run
from smaragdine.api import account_inputs
from smaragdine.cli.export import main
from smaragdine.recording.power_logs import read_power
from traced_recording import ten_and_three


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("full") / "a run")


@pytest.fixture(scope="module")
def figures(run: Path) -> Figures:
    return figures_of(run)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


TABLES = {"devices", "footprint", "totals", "epochs", "steps", "power", "marks", "events", "edges"}


def test_csv_tables_have_the_figures_of_the_report(run: Path, figures: Figures) -> None:
    folder = export(run, "csv")
    assert {path.stem for path in folder.iterdir()} == TABLES
    footprint = rows_of(folder / "footprint.csv")
    expected = [
        {"device": device, **row}
        for device, step in figures["step"]["devices"].items()
        for row in step["rows"]
    ]
    assert len(footprint) == len(expected)
    for found, row in zip(footprint, expected, strict=True):
        assert found.keys() == row.keys()
        for name, value in row.items():
            assert (
                (float(found[name]) == value)
                if isinstance(value, int | float)
                else found[name] == (value or "")
            )
    for total in rows_of(folder / "totals.csv"):
        assert total["per_step"] == "true"
        mine = [float(row["energy_j"]) for row in footprint if row["device"] == total["device"]]
        assert math.fsum(mine) + float(total["idle_j"]) == pytest.approx(float(total["total_j"]), rel=1e-12)
    for row in rows_of(folder / "devices.csv"):
        assert float(row["energy_j"]) == figures["devices"][row["device"]]["energy_j"]
    used_j = defaultdict(float)
    for row in rows_of(folder / "power.csv"):
        used_j[row["device"]] += float(row["power_w"]) * int(row["duration_ns"]) / S
    assert used_j == pytest.approx({"gpu:0": 460.0, "cpu:0": 160.0})
    epochs = {
        (int(row["index"]), row["device"]): float(row["energy_j"]) for row in rows_of(folder / "epochs.csv")
    }
    for epoch in figures["epochs"]:
        for device, values in epoch["devices"].items():
            assert epochs[epoch["index"], device] == values["energy_j"]


def test_steps_table(run: Path) -> None:
    steps = pq.read_table(export(run, "parquet") / "steps.parquet").to_pylist()
    gpu = {row["index"]: row for row in steps if row["device"] == "gpu:0"}
    assert gpu.keys() == set(range(1, 18))  # the very first has no beginning
    assert gpu[4]["energy_j"] == pytest.approx(20.0)
    assert gpu[5]["energy_j"] == pytest.approx(10.0)
    assert [index for index, row in gpu.items() if row["traced"]] == [3, 4, 5, 6]
    kinds = {index: row["kind"] for index, row in gpu.items() if row["kind"] != "untraced"}
    traced = dict.fromkeys([3, 4, 5, 6], "traced")
    assert kinds == {1: "first", 2: "profiler", 7: "profiler", 9: "more", **traced}


def test_parquet_and_csv_are_the_same(run: Path) -> None:
    for path in export(run, "parquet").iterdir():
        table = pq.read_table(path)
        texts = rows_of(export(run, "csv", "--force", out="csv") / f"{path.stem}.csv")
        assert table.column_names == list(texts[0])
        assert table.num_rows == len(texts)


def test_events_and_power_account_to_the_same_footprint(run: Path) -> None:
    """But for the power of an idle GPU, which is known from what else a recording has."""
    folder = export(run, "csv")
    done = smaragdine(
        "account", "--events", folder / "events.csv", "--power", folder / "power.csv", "--json", "-"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["devices"]["gpu:0"]
    ours = {(row["name"], row["phase"] or None): row["energy_j"] for row in found["rows"]}
    events, meters = Run.open(run).inputs
    theirs = account(events, {"gpu:0": dataclasses.replace(meters.of["gpu:0"], idle_w=None)})
    assert theirs.rows.num_rows == 8
    for row in theirs.rows.to_pylist():
        assert ours[row["name"], row["phase"]] == pytest.approx(row["energy_j"])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("made", ["whole", "gap", "traced", "processor"])
def test_power_reads_back_with_the_same_energy(tmp_path: Path, made: str, kind: str) -> None:
    """To the last reading: it is as long as it was, and a gap is a gap."""
    folder = tmp_path / "made"
    if made == "traced":
        ten_and_three(folder, power_w=((83.0, 90.0), (400.0, 250.0)))
    elif made == "processor":
        record_run(folder, make_model(5, "cpu:0"), 1)
    else:
        make(folder, gap=made == "gap")
    out = export(folder, kind)
    meters = from_power_table(read_power(out / f"power.{kind}"))
    read_j = {device: meter.trace.energy_until_j(2**62).item() for device, meter in meters.of.items()}
    wanted_j = {name: device["energy_j"] for name, device in figures_of(folder)["devices"].items()}
    assert read_j == pytest.approx(wanted_j, rel=1e-12)
    again = account_inputs(out / f"events.{kind}", out / f"power.{kind}", None, None, None)
    totals = account_meters(*again).devices
    assert {device: total.total_j for device, total in totals.items()} == pytest.approx(wanted_j, rel=1e-12)


def test_without_events_power_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run", events=False)
    if has_perfetto():
        trace = Decoded(export(run, "perfetto"))
        assert trace.counters[GPU, "J"][-1][1] == pytest.approx(460.0)
        assert not trace.of(GPU)
        assert "no events: nothing was traced" in capsys.readouterr().err
    folder = export(run, "csv", out="csv")
    assert {path.stem for path in folder.iterdir()} == {"devices", "epochs", "steps", "power", "marks"}
    assert "device_energy_joules_total" in export(run, "prometheus", out="prom").read_text()
    assert scalars(export(run, "tensorboard", out="tb"))["power_w/gpu:0"]
    for to in ("speedscope", "latex", "markdown"):
        refused(lambda to=to: export(run, to, out="no"), "has no footprint", "nothing was traced")
    assert not Path("no").exists()


def test_without_power_events_are_exported_and_have_no_energy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "run", power=False)
    if has_perfetto():
        trace = Decoded(export(run, "perfetto"))
        assert "events have no energy" in capsys.readouterr().err
        assert len(trace.of("gpu:0 Test GPU")) == 36
        assert not any("energy_j" in one for one in trace.slices)
        assert not trace.counters
    folder = export(run, "csv", out="csv")
    assert "events have no energy" in capsys.readouterr().err
    assert {row["energy_j"] for row in rows_of(folder / "events.csv")} == {""}
    assert not (folder / "footprint.csv").exists()
    assert "joules" not in export(run, "prometheus", out="prom").read_text()
    for to in ("speedscope", "latex", "tensorboard"):
        refused(lambda to=to: export(run, to, out="no"), "has no")
    assert not Path("no").exists()


def test_after_a_crash_what_is_there_is_exported(tmp_path: Path) -> None:
    run = make(tmp_path / "run", status="running", supervisor_pid=2**22 + 1, end_ns=0)
    file = run / "power.arrows"
    file.write_bytes(file.read_bytes()[:-300])
    for to in ("perfetto", "csv", "prometheus"):
        export(run, to, out=to)
    assert 'status="interrupted"' in Path("prometheus").read_text()


def test_missing_time_is_shown_and_not_filled(tmp_path: Path) -> None:
    pytest.importorskip("perfetto.protos")
    trace = Decoded(export(make(tmp_path / "run", gap=True), "perfetto"))
    gaps = [
        (one["begin_ns"] - T0, one["end_ns"] - T0) for one in trace.of(GPU) if one["name"] == "no readings"
    ]
    assert gaps == [(3000 * MS, 3600 * MS)]
    assert not [t_ns for t_ns, _ in trace.counters[GPU, "W"] if 3000 * MS <= t_ns - T0 < 3600 * MS]


def test_a_newer_recording_is_refused(tmp_path: Path) -> None:
    run = make(tmp_path / "run", format_version=99)
    refused(lambda: export(run, "perfetto"), "format 99", "Update smaragdine")
    assert not Path("out").exists()


def test_nothing_is_overwritten(run: Path) -> None:
    for to in ("latex", "csv", "tensorboard"):
        where = export(run, to, out=to)
        before = {path: path.read_bytes() for path in ([where] if where.is_file() else where.iterdir())}
        refused(lambda to=to: export(run, to, out=to), "exists", "--force")
        assert {path: path.read_bytes() for path in before} == before
        export(run, to, "--force", out=to)
    stale = Path("csv/edges.csv")
    export(make(Path("bare").absolute(), events=False), "csv", "--force", out="csv")
    assert not stale.exists(), "a table of another recording"


def test_other_mistakes_are_one_line(run: Path) -> None:
    Path("file").touch()
    Path("folder").mkdir()
    refused(lambda: export(run, "perfetto", out="-"), "perfetto is no text")
    refused(lambda: export(run, "latex", out="nowhere/table.tex"), "there is no folder nowhere")
    refused(lambda: export(run, "csv", out="file"), "is a file")
    refused(lambda: export(run, "latex", out="folder"), "is a folder")
    refused(lambda: export(run, "latex", "--device", "gpu:7"), "no device gpu:7", "gpu:0, cpu:0")
    refused(lambda: main([str(run)]), "--to", "smaragdine export --help")
    refused(lambda: main([str(run), "--to", "excel"]), "invalid choice", "perfetto")
    assert sorted(path.name for path in Path().iterdir()) == ["file", "folder"]


def test_text_goes_to_the_standard_output(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for to in ("speedscope", "prometheus", "latex", "markdown"):
        assert main([str(run), "--to", to, "-o", "-"]) == 0
        assert capsys.readouterr().out == export(run, to, out=to).read_text()
        capsys.readouterr()


def test_the_verb_and_its_default_names(run: Path) -> None:
    done = smaragdine("export", "--help")
    assert done.returncode == 0
    assert "example:\n  smaragdine export" in done.stdout
    for to, name in (("perfetto", "a run.perfetto-trace"), ("parquet", "a run-parquet")):
        done = smaragdine("export", run, "--to", to)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(name)
        assert Path(name).exists()
