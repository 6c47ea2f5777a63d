"""A step has the same figures wherever it is shown: how many there are and how many were traced, how long one
is, what it takes, and which share of it each operation has."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recordings
from cli import smaragdine
from exports import export, rows_of, scalars
from smaragdine.accounting.run import Run
from smaragdine.cli.compare import main as compare_main
from smaragdine.cli.report import main
from smaragdine.report.figures.layers import energies
from smaragdine.report.figures.runs import labelled
from smaragdine.report.html.page import html_page
from smaragdine.report.notebook import text as notebook_text
from smaragdine.units import joules, seconds
from traced_recording import full_queue, slow_input, ten_and_three, waits_and_compiles, with_a_compilation

_WAITING_LOOP = """
import time, torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    if step >= 8:
        time.sleep(0.03)  # a slow input, from here on
    loss = model(torch.randn(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def real(folder: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    folder.parent.mkdir(exist_ok=True)
    script = folder.with_suffix(".py")
    script.write_text(_WAITING_LOOP)
    words = ("run", "-o", folder, "--trace-steps", "4", "--trace-skip", "4", script)
    done = smaragdine(*words, env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


MADE: dict[str, Callable[[Path], object]] = {
    "untraced": ten_and_three,
    "compiles": with_a_compilation,
    "waits": slow_input,
    "full queue": full_queue,
    "waits and compiles": waits_and_compiles,
    "two devices": recordings.make,
    "real": real,
}


@pytest.fixture(scope="module", params=list(MADE))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same") / "run"
    MADE[request.param](folder)
    return folder


@pytest.fixture
def said(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """What `report --json` says: the others are held against it."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    return json.loads(printed(capsys, run, "--json"))


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def plain_rows(said: dict[str, Any]) -> list[tuple[str, dict[str, Any], float]]:
    """Device, row, share of its device's energy; without names that are no single word on a line."""
    return [
        (device, row, row["energy_j"] / total["total_j"])
        for device, total in said["step"]["devices"].items()
        for row in total["rows"]
        if re.fullmatch(r"\S+", row["name"]) and row["phase"]
    ]


def what(said: dict[str, Any], device: str) -> str:
    return "one step" if device in said["untraced_step"] else "one traced step"


def test_operations_are_never_all_zero(said: dict[str, Any]) -> None:
    for device, total in said["step"]["devices"].items():
        rows_j = sum(row["energy_j"] for row in total["rows"])
        traced_j = sum(row["energy_j"] for row in said["traced"]["devices"][device]["rows"])
        assert rows_j >= 0.499 * traced_j / said["steps"]["traced"]
        assert rows_j + total["idle_j"] == pytest.approx(total["total_j"], rel=1e-9)


def test_a_step_is_as_long_as_its_steps(said: dict[str, Any]) -> None:
    steps, step = said["steps"], said["step"]["devices"]
    assert steps["kinds"]["traced"] == steps["traced"]
    assert steps["kinds"].get("untraced", 0) == steps["untraced"]
    for device, total in step.items():
        if device in said["untraced_step"]:
            assert total["covered_s"] == pytest.approx(steps["untraced_s"], rel=1e-9)
            assert total["total_j"] == said["untraced_step"][device]["energy_j"]
        elif not device.startswith("gpu:"):  # a GPU is known from its first traced kernel to its last
            long_s = total["covered_s"] + total["missing_s"]
            assert long_s == pytest.approx(steps["traced_s"], rel=0.02)


def test_in_the_terminal(run: Path, said: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, run, "--top", 1000)
    steps = said["steps"]
    assert f"traced {steps['traced']} of {steps['announced']} steps" in text
    if steps["early"]:
        times = f"an untraced step took {seconds(steps['untraced_s'])} (mean of {steps['untraced']}"
    else:
        times = f"a traced step took {seconds(steps['traced_s'])} (mean of {steps['traced']}), "
        times += f"an untraced one {seconds(steps['untraced_s'])} (mean of {steps['untraced']}"
    assert times in text
    for device, total in said["step"]["devices"].items():
        if total["rows"]:
            of = (
                f"{device}, {what(said, device)}: {joules(total['total_j'])} in {seconds(total['covered_s'])}"
            )
            assert of in text
    lines = [line.split() for line in text.splitlines()]
    for _, row, share in plain_rows(said):
        shown = [line for line in lines if line[:2] == [row["name"], row["phase"]]]
        assert any(f"{share:.1%}" in line for line in shown), row


def test_step_by_step(run: Path, said: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, run, "--by", "step", "--top", 1000)
    steps, lines = said["steps"], text.splitlines()
    (untraced,) = [line for line in lines if line.startswith(f"mean of {steps['untraced']} untraced")]
    (traced,) = [line for line in lines if line.startswith(f"mean of {steps['traced']} traced")]
    assert f" {seconds(steps['untraced_s'])} ± " in untraced
    assert f" {seconds(steps['traced_s'])} ± " in traced
    for untraced_step in [*said["untraced_step"].values(), *said["unresolved_step"].values()]:
        assert f" {joules(untraced_step['energy_j'])} ± " in untraced
    # Every step but the first, which has no beginning.
    assert len([line for line in lines if re.match(r"\d+ ", line)]) == steps["announced"] - 1
    assert sum(steps["kinds"].values()) == steps["announced"] - 1


def unpacked(page: str) -> dict[str, Any]:
    """What the page's script reads."""
    (data,) = re.findall(r'id="data">([^<]*)<', page)
    whole = zlib.decompress(base64.b64decode(data))
    end = 4 + struct.unpack("<I", whole[:4])[0]

    def numbers(kind: str, offset: int, length: int, differences: int, divisor: float) -> list[float]:
        size = np.dtype(kind).itemsize
        planes = np.frombuffer(whole, np.uint8, length * size, end + offset).reshape(size, length)
        values = np.ascontiguousarray(planes.T).view(f"<{kind}").ravel().astype(np.float64)
        return ((np.cumsum(values) if differences else values) / divisor).tolist()

    return json.loads(whole[4:end], object_hook=lambda each: numbers(*each["$"]) if "$" in each else each)


def test_in_the_page(run: Path, said: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (data,) = unpacked(html_page([Run.open(run)]))["runs"]
    for name in ("steps", "untraced_step", "unresolved_step", "tracing"):
        assert data["figures"][name] == said[name]
    text = printed(capsys, run)
    assert data["traced_lines"]
    assert all(line in text for line in data["traced_lines"])
    level, rows = data["levels"]["step"], {**data["rows"], **data["levels"]["step"].get("rows", {})}
    for device, total in said["step"]["devices"].items():
        assert level["devices"][device] == {name: value for name, value in total.items() if name != "rows"}
    energy_j = level.get("columns", {}).get("energy_j", rows["energy_j"])
    devices = [rows["device_names"][int(code)] for code in rows["device"]]
    if isinstance(energy_j, dict):
        factors = energy_j["times"]
        energy_j = [
            value * factors[device][0] * factors[device][1]
            for value, device in zip(rows["energy_j"], devices, strict=True)
        ]
    for device, total in said["step"]["devices"].items():
        shown_j = sorted(value for value, of in zip(energy_j, devices, strict=True) if of == device)
        assert shown_j == pytest.approx(sorted(row["energy_j"] for row in total["rows"]), rel=1e-12)


def test_in_figures(run: Path, said: dict[str, Any]) -> None:
    (drawn,) = labelled([Run.open(run)])
    for device, total in said["step"]["devices"].items():
        if total["rows"]:
            bars = energies([drawn.footprint], device)
            wanted_j = {(row["name"], row["phase"]): row["energy_j"] for row in total["rows"]}
            for name, phase, value in zip(bars.name, bars.phase, bars.value, strict=True):
                assert value == wanted_j[name, phase]


def test_in_tables(run: Path, said: dict[str, Any]) -> None:
    folder = export(run, "csv")
    totals = {row["device"]: row for row in rows_of(folder / "totals.csv")}
    for device, total in said["step"]["devices"].items():
        assert float(totals[device]["total_j"]) == total["total_j"]
        assert float(totals[device]["idle_j"]) == total["idle_j"]
        assert float(totals[device]["covered_s"]) == total["covered_s"]
    energy_j = {
        (row["device"], row["name"], row["phase"]): float(row["energy_j"])
        for row in rows_of(folder / "footprint.csv")
    }
    for device, row, share in plain_rows(said):
        part_j = energy_j[device, row["name"], row["phase"]]
        assert part_j / float(totals[device]["total_j"]) == pytest.approx(share, rel=1e-12)
    steps = [row for row in rows_of(folder / "steps.csv") if row["kind"]]
    device = steps[0]["device"]
    here = [row for row in steps if row["device"] == device]
    # Of the very first, which has no beginning, there may be a row nevertheless.
    counted = Counter(row["kind"] for row in here if row["index"] != "0")
    assert counted == said["steps"]["kinds"]
    for kind in ("traced", "untraced"):
        lengths_s = [float(row["duration_s"]) for row in here if row["kind"] == kind]
        assert len(lengths_s) == said["steps"][kind]
        assert np.mean(lengths_s) == pytest.approx(said["steps"][f"{kind}_s"], rel=1e-9)


@pytest.mark.parametrize("to", ["markdown", "latex"])
def test_in_a_paper(run: Path, said: dict[str, Any], to: str) -> None:
    export(run, to, "--top", "1000", out="table.txt")
    text = Path("table.txt").read_text().replace("\\allowbreak{}", "").replace("\\", "").replace(" ", "")
    steps = said["steps"]
    assert f"{steps['traced']}of{steps['announced']}stepstraced" in text
    for device, total in said["step"]["devices"].items():
        if total["rows"]:
            of = f"Energyof{what(said, device)}of".replace(" ", "")
            assert of in text
            assert f"{device}" in text
            idle = f"{100 * total['idle_j'] / total['total_j']:.1f}"
            assert re.search(rf"\(idle\)[^\n]*[|&]{re.escape(idle)}[|&]", text)
            assert (
                joules(total["total_j"]).replace(" ", "").replace("µ", "$mu$" if to == "latex" else "µ")
                in text
            )


def test_in_other_tools(run: Path, said: dict[str, Any]) -> None:
    export(run, "speedscope", out="stacks.json")
    flames = json.loads(Path("stacks.json").read_text())
    for profile, (device, total) in zip(flames["profiles"], said["step"]["devices"].items(), strict=True):
        assert f", {what(said, device)}" in profile["name"]
        scale = 1000.0 if "(mJ)" in profile["name"] else 1.0
        assert profile["endValue"] / scale == pytest.approx(total["total_j"], rel=1e-9)
    export(run, "prometheus", out="run.prom")
    sums_j: dict[str, float] = {}
    for line in Path("run.prom").read_text().splitlines():
        if line.startswith("smaragdine_step_energy_joules{"):
            (device,) = re.findall(r'device="([^"]*)"', line)
            sums_j[device] = sums_j.get(device, 0.0) + float(line.rpartition(" ")[2])
    totals_j = {device: total["total_j"] for device, total in said["step"]["devices"].items()}
    assert sums_j == pytest.approx(totals_j, rel=1e-9)
    shown = notebook_text(Run.open(run))
    assert f"of {said['steps']['traced']} traced; {said['steps']['announced']} steps in all" in shown
    assert all(joules(total_j) in shown for total_j in totals_j.values())


def test_in_tensorboard(run: Path, said: dict[str, Any]) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("needs tensorboard")
    found = scalars(export(run, "tensorboard"))
    rows = [row for row in rows_of(export(run, "csv", out="tables") / "steps.csv") if row["kind"] != "more"]
    for tag, points in found.items():
        if tag.startswith("energy_per_step_j/") and tag.count("/") == 1:
            device = tag.partition("/")[2]
            wanted = {
                int(row["index"]): float(row["energy_j"])
                for row in rows
                if row["device"] == device and row["kind"] and row["energy_j"]
            }
            assert {step: value for _, step, value in points} == pytest.approx(wanted, rel=1e-6)


def test_two_runs_are_compared_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `compare`, by `report A B` and on the page: of the same step, with the same noise, by one name."""
    monkeypatch.setenv("COLUMNS", "300")
    before, after = tmp_path / "before", tmp_path / "after"
    waits = tmp_path / "waits"
    for folder, power_w in ((before, 96.0), (after, 98.0), (waits, 10.0)):
        slow_input(folder, power_w)
    # An untraced step's operations take less than a traced one's; of the last nobody knows how much.
    for b, step, total_j in ((after, "one step", 0.36), (waits, "one traced step", 0.6)):
        found = json.loads(printed(capsys, before, b, "--json"))
        del found["reports"]
        capsys.readouterr()
        assert compare_main([str(before), str(b), "--json"]) == 0
        compared = json.loads(capsys.readouterr().out)
        assert {**compared, "a": compared["a"][0], "b": compared["b"][0]} == {
            **found,
            "remarks": compared["remarks"],  # `compare` has no other place for what is wrong with a run
        }
        assert found["total"]["a_j"] == pytest.approx(total_j)
        page = unpacked(html_page([Run.open(before), Run.open(b)]))["comparison"]["views"]["all"]
        assert {key: page[key] for key in ("total", "devices", "idle", "what", "noise", "verdict")} == {
            key: found[key] for key in ("total", "devices", "idle", "what", "noise", "verdict")
        }
        assert found["what"] == f"energy of the operations of {step}"
        assert found["noise"] == "± at least"
        text = printed(capsys, before, b)
        assert compare_main([str(before), str(b)]) == 0
        for said in (text, capsys.readouterr().out):
            assert f"energy of the operations of {step}\n" in said
            (head,) = [line for line in said.splitlines() if line.startswith("device ")]
            assert "± at least" in head
        assert compare_main([str(before), str(b), "--traced"]) == 0
        assert "of the traced steps (3 in A, 3 in B)" in capsys.readouterr().out
