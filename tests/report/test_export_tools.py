"""`smaragdine export` for speedscope, Prometheus, papers and TensorBoard, read back by these tools."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from exports import Figures, export, figures_of, scalars
from footprints import footprint
from perfetto_trace import CPU, GPU
from recordings import RUN_S, T0, S, gpu_w, make
from smaragdine.cli.export import main
from smaragdine.recording.reader import open_recording
from smaragdine.report.export import paper, tensorboard
from smaragdine.report.export.selection import Selection


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("full") / "a run")


@pytest.fixture(scope="module")
def figures(run: Path) -> Figures:
    return figures_of(run)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def profiles(path: Path) -> dict[str, dict[tuple[str, ...], float]]:
    """Device → stack → weight."""
    content = json.loads(path.read_text())
    frames = [frame["name"] for frame in content["shared"]["frames"]]
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for profile in content["profiles"]:
        stacks = [tuple(frames[i] for i in sample) for sample in profile["samples"]]
        assert len(set(stacks)) == len(stacks)
        assert profile["endValue"] == sum(profile["weights"])
        found[profile["name"]] = dict(zip(stacks, profile["weights"], strict=True))
    return found


def test_speedscope_weights_are_the_joules_of_a_step(run: Path, figures: Figures) -> None:
    found = profiles(export(run, "speedscope"))
    assert list(found) == [f"{GPU}, one step (mJ)", f"{CPU}, one step, estimated (mJ)"]
    for device, stacks in zip(("gpu:0", "cpu:0"), found.values(), strict=True):
        step = figures["step"]["devices"][device]
        expected = {("(idle)",): step["idle_j"]}
        for row in step["rows"]:
            *layers, operation = row["name"].split("/")
            phase = f" ({row['phase']})" if row["phase"] else ""
            expected[*layers, operation + phase] = row["energy_j"]
        assert stacks == {stack: energy_j * 1000 for stack, energy_j in expected.items()}
        assert math.fsum(stacks.values()) == pytest.approx(step["total_j"] * 1000)


def test_speedscope_of_all_traced_steps_merged(run: Path, figures: Figures) -> None:
    found = profiles(export(run, "speedscope", "--traced", "--summary", "--device", "gpu:0"))
    (stacks,) = found.values()
    assert list(found) == [f"{GPU}, 4 traced steps (mJ)"]
    rows = figures["traced"]["devices"]["gpu:0"]["rows"]
    forward_j = math.fsum(r["energy_j"] for r in rows if "MatMul" in r["name"] and r["phase"] == "forward")
    merged = [weight for stack, weight in stacks.items() if stack[-1] == "MatMul (forward)"]
    assert math.fsum(merged) == pytest.approx(forward_j * 1000)


def test_speedscope_file_fits_the_schema_speedscope_ships(run: Path, tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    command = [npm, "pack", "speedscope@1.25.0"]
    try:
        fetched = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        pytest.skip("npm does not answer")
    if fetched.returncode:
        pytest.skip(f"npm cannot fetch speedscope: {fetched.stderr.strip()[-200:]}")
    shutil.unpack_archive(tmp_path / "speedscope-1.25.0.tgz", tmp_path)
    schema = json.loads((tmp_path / "package/dist/release/file-format-schema.json").read_text())
    content = json.loads(export(run, "speedscope").read_text())
    jsonschema.validate(content, schema)
    content["profiles"][0]["unit"] = "joules"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, schema)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r'(\w+)\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\} (\S+)', line)
        assert match, line
        labels = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2])
        key = (match[1], frozenset(labels))
        assert key not in found
        found[key] = float(match[3])
    return found


def test_prometheus_text_has_the_figures_of_the_report(run: Path, figures: Figures) -> None:
    found = samples(export(run, "prometheus", "--depth", "3").read_text())

    def value(name: str, **labels: str) -> float:
        (one,) = [
            v for (n, of), v in found.items() if n == f"smaragdine_{name}" and of >= set(labels.items())
        ]
        return one

    for device, figure in figures["devices"].items():
        assert value("device_energy_joules_total", device=device, run="a run") == figure["energy_j"]
        assert value("device_mean_power_watts", device=device) == figure["mean_w"]
    assert value("run_duration_seconds") == RUN_S
    for row in figures["step"]["devices"]["gpu:0"]["rows"]:
        layer = row["name"].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        labels = {"device": "gpu:0", "phase": row["phase"] or "not known", "layer": layer}
        assert value("step_energy_joules", **labels) == row["energy_j"]
    for device, step in figures["step"]["devices"].items():
        layers = [
            v for (n, of), v in found.items() if n.endswith("step_energy_joules") and ("device", device) in of
        ]
        assert math.fsum(layers) == pytest.approx(step["total_j"])


def test_prometheus_layers_are_as_deep_as_asked(run: Path) -> None:
    found = samples(export(run, "prometheus", "--depth", "1", "--traced").read_text())
    layers = {dict(of)["layer"] for name, of in found if name == "smaragdine_traced_energy_joules"}
    assert layers == {"net", "copy", "(idle)"}


def test_promtool_takes_it(run: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian's prometheus) is not installed")
    with export(run, "prometheus", "--depth", "9").open() as text:
        done = subprocess.run(
            [promtool, "check", "metrics"], stdin=text, capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_markdown_table(run: Path) -> None:
    text = export(run, "markdown", "--top", "3", "--device", "gpu:0").read_text()
    caption, _, header, ruler, *rows = text.strip().splitlines()
    assert "one step of train\\_it.py on gpu:0, Test GPU, limit 700 W: 15.6 J" in caption
    assert "Power measured (nvml). 4 of 18 steps traced with torch 2.9" in caption
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in (header, *rows)]
    assert {len(row) for row in cells} == {7}
    assert len(ruler.split("|")) == 9
    names = ["Operation", "copy", "net/layer\\_2/MatMul", "net/layer\\_0/MatMul", "5 more", "(idle)", "total"]
    assert [row[0] for row in cells] == names
    assert cells[-1][2:4] == ["15.6", "100.0"]


def test_digits_are_those_the_uncertainty_allows(run: Path, figures: Figures) -> None:
    rows = export(run, "markdown").read_text().splitlines()
    copy = next(row for row in rows if row.startswith("| copy"))
    (row,) = [row for row in figures["step"]["devices"]["gpu:0"]["rows"] if row["name"] == "copy"]
    assert 1 <= row["uncertainty_j"] < 3  # so that two digits are allowed, and no more
    assert copy.split(" | ")[2] == f"{row['energy_j']:.1f} ± {row['uncertainty_j']:.1f}"
    assert f"| {row['power_w'] / 10:.0f}0 |" in copy


@pytest.mark.parametrize(
    ("largest_j", "unit", "shown"),
    [(0.9996, "J", 1.0), (999.7, "kJ", 1.0), (0.0123, "mJ", 12.3), (5.0, "J", 5.0)],
)
def test_numbers_are_in_the_unit_of_their_column(
    monkeypatch: pytest.MonkeyPatch, largest_j: float, unit: str, shown: float
) -> None:
    rows = [{"name": "mm", "energy_j": largest_j}, {"name": "add", "energy_j": largest_j / 10}]
    monkeypatch.setattr(paper, "_caption", lambda *_: "")
    run = cast("Selection", SimpleNamespace(run=SimpleNamespace(name="run")))
    table = paper._table(run, footprint(rows), "gpu:0", 10)  # pyright: ignore[reportPrivateUsage]
    assert table.headers[2] == f"Energy ({unit})"
    assert float(table.rows[0][2]) == pytest.approx(shown, rel=0.01)
    assert float(table.sums[-1][2]) == pytest.approx(1.1 * shown, rel=0.01)


def test_latex_table_is_escaped(run: Path) -> None:
    text = export(run, "latex").read_text()
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
    assert r"Test CPU \& Co" in text
    odd = next(line for line in text.splitlines() if "50" in line and "script" in line)
    plain = odd.replace(r"\allowbreak{}", "")
    assert r"a \char34{}b\char34{} \textbackslash{} \{c\textbar{}d\}\_50\%" in plain
    assert r"\textless{}script\textgreater{}" in plain
    without = re.sub(r"\\[{}&%_$#]", "", text)
    assert without.count("{") == without.count("}")
    for line in without.splitlines():
        if line.endswith(r"\\"):
            assert line.count("&") == 6, line


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles(run: Path, tmp_path: Path) -> None:
    export(run, "latex", out="t.tex")
    document = (
        r"\documentclass[twocolumn]{article}\usepackage{booktabs}\begin{document}\input{t}\end{document}"
    )
    (tmp_path / "doc.tex").write_text(document)
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-draftmode", "doc.tex"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    if "booktabs.sty' not found" in done.stdout:
        pytest.skip("LaTeX has no booktabs")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout


def test_tensorboard_reads_the_scalars(run: Path, figures: Figures) -> None:
    found = scalars(export(run, "tensorboard"))
    assert set(found) == {
        f"{what}/{device}"
        for what in ("energy_per_epoch_j", "energy_per_step_j", "power_w")
        for device in ("gpu:0", "cpu:0")
    }
    epochs = [
        (epoch["end_ns"] * 1e-9, epoch["index"], float(np.float32(epoch["devices"]["cpu:0"]["energy_j"])))
        for epoch in figures["epochs"]
    ]
    assert found["energy_per_epoch_j/cpu:0"] == epochs
    steps = {step: value for _, step, value in found["energy_per_step_j/gpu:0"]}
    full_j = dict.fromkeys((2, 4, 6, 8, 11, 13, 15, 17), 20.0)
    assert steps == pytest.approx(full_j | dict.fromkeys((1, 3, 5, 7, 10, 12, 14, 16), 10.0))
    power = [(step, value) for _, step, value in found["power_w/gpu:0"]]
    assert power == [(ms, gpu_w(ms - 20)) for ms in range(20, RUN_S * 1000 + 1, 20)]


def test_tensorboard_scalars_go_beside_those_of_the_program(tmp_path: Path) -> None:
    run = make(tmp_path / "runs" / "one", working_folder=str(tmp_path))
    assert tensorboard.log_folder(open_recording(run)) is None
    for folder, t_s in (("logs/train", 1), ("logs/validation", 2), ("old", -500)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"events.out.tfevents.{T0 // S + t_s}.host.1.0").touch()
    assert tensorboard.log_folder(open_recording(run)) == tmp_path / "logs"
    assert main([str(run), "--to", "tensorboard"]) == 0
    assert [path.suffix for path in (tmp_path / "logs" / "energy").iterdir()] == [".smaragdine"]


def test_tensorboard_fields_are_those_of_tensorboard() -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto import event_pb2, summary_pb2

    real = {
        "Event": event_pb2.Event.DESCRIPTOR,
        "Summary": summary_pb2.Summary.DESCRIPTOR,
        "Value": summary_pb2.Summary.Value.DESCRIPTOR,
    }
    for name, message in tensorboard.event_class().DESCRIPTOR.file.message_types_by_name.items():
        for field in message.fields:
            theirs = real[name].fields_by_name[field.name]
            assert (theirs.number, theirs.type) == (field.number, field.type), field.name
