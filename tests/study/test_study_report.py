"""The report of a study: figures, tables and the page, from results of a BERT on a GPU that never was."""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import io
import json
import math
import re
import shutil
import statistics
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("matplotlib", reason="pip install 'smaragdine[figures]'")

from footprints import assert_conserved, footprint
from legible import assert_legible, gallery
from smaragdine.accounting.footprint import Footprint, write_json
from smaragdine.accounting.precision import score_json
from smaragdine.accounting.run import Run
from smaragdine.errors import UserError
from smaragdine.recording.reader import open_recording
from smaragdine.report.figures.precision import pair
from smaragdine.report.figures.runs import NotDrawn
from smaragdine.report.figures.style import alt_text
from smaragdine.study import figures
from smaragdine.study.document import (
    Column,
    Document,
    Head,
    Material,
    MeanOverRuns,
    StudyTable,
    csv_text,
    latex_text,
    markdown_text,
    materials,
    mean_of,
    note_key,
    of_phase,
    read_notes,
    shown_as,
    spare_notes,
    worth_showing,
)
from smaragdine.study.figures import FIGURES
from smaragdine.study.findings import JudgedClaim
from smaragdine.study.overhead import OVERHEAD, ExtraCost, Overhead
from smaragdine.study.page import html_page, write_study
from smaragdine.study.plan import StudyRun, StudySetting
from smaragdine.study.precision import summaries
from smaragdine.study.results import (
    Result,
    by_setting,
    load_results,
    load_sketch,
    result_of,
    save_result,
    save_sketch,
    sketch_of,
)
from smaragdine.study.tables import (
    findings_table,
    growth_table,
    layers_table,
    overhead_table,
    scaling_table,
    stages_table,
    study_tables,
    top_table,
    variants_table,
)

GPU = "gpu:0"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SMALL = gallery.Setting(layers=3, epochs=3, steps=4, traced=2)


def setting(
    model: str, stage: str, layers: int = 3, hidden: int = 768, precision: str = "fp32"
) -> StudySetting:
    name = f"{model}-{stage}-torch-L{layers}-H{hidden}-{precision}"
    facts = {
        "model": model,
        "stage": stage,
        "framework": "torch",
        "layers": layers,
        "hidden": hidden,
        "batch": 32,
        "length": 128,
        "precision": precision,
    }
    return StudySetting(name, ("train.py",), facts)


def like(result: Result, of: StudySetting, number: int, step: Footprint | None = None) -> Result:
    run = StudyRun(of, number)
    return dataclasses.replace(
        result, name=run.name, setting=of.name, number=number, facts=of.facts, step=step or result.step
    )


def called(step: Footprint, old: str, new: str) -> Footprint:
    names = [name.replace(old, new, 1) for name in step.rows["name"].to_pylist()]
    rows = step.rows.set_column(1, "name", pa.array(names, pa.string()))
    return dataclasses.replace(step, rows=rows)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole study: stages, variants, ALBERT, and a few runs of another precision."""
    folder = tmp_path_factory.mktemp("study")

    def made(of: StudySetting, number: int, shape: Any, seed: int) -> Result:
        run = StudyRun(of, number)
        recording = gallery.record(folder / "runs" / run.name, shape, seed)
        return result_of(run, Run(recording), "data: generated, as long as CoLA's\n")

    base = setting("bert", "pretrain")
    results = [made(base, n, SMALL, n) for n in (1, 2, 3)]
    for n, (layers, hidden) in enumerate(((3, 512), (4, 512))):
        shape = dataclasses.replace(SMALL, layers=layers, hidden=hidden)
        results.append(made(setting("bert", "pretrain", layers, hidden), 1, shape, 10 + n))
    predicted = made(setting("bert", "predict"), 1, dataclasses.replace(SMALL, backward=False), 6)
    results += [
        predicted,
        like(results[0], setting("bert", "finetune"), 1),
        like(results[1], setting("bert", "finetune"), 2),
    ]
    albert = setting("albert", "pretrain")
    results += [like(r, albert, n, called(r.step, "bert/", "albert/")) for n, r in enumerate(results[:2], 1)]
    results.append(like(results[0], setting("bert", "pretrain", precision="bf16"), 1))
    for result in results:
        save_result(folder, result)
    for number in (2, 3):  # as a study keeps them: events of the first run alone
        for file in (folder / "runs" / f"{base.name}-{number}").glob("events*"):
            file.unlink()
    return folder


@pytest.fixture(scope="module")
def kinds(out: Path) -> list[Material]:
    return materials(out, load_results(out))


@pytest.fixture(scope="module")
def written(out: Path) -> list[Path]:
    (out / "notes.md").write_text(
        "# Mine\n\nOn a <quiet> night.\n\n## encoder-share\n\nBecause of `x`.\n\n## odd\n\nKept.\n"
    )
    return write_study(out, ["png"])  # PDF takes thrice as long


@pytest.mark.parametrize("wanted", FIGURES, ids=lambda wanted: wanted.name)
def test_every_figure_of_the_paper_is_drawn_and_legible(wanted: Any, kinds: list[Material]) -> None:
    figure = wanted.draw(kinds[0])
    assert_legible(figure)
    assert re.fullmatch(r"[A-Z][^.]*\. .+\.", alt_text(figure), re.DOTALL)


def test_kinds_are_told_apart_by_what_differs(out: Path, kinds: list[Material]) -> None:
    assert [(kind.kind, kind.suffix, kind.device) for kind in kinds] == [
        ("torch-fp32", "-torch-fp32", GPU),
        ("torch-bf16", "-torch-bf16", GPU),
    ]
    (alone,) = materials(out, kinds[0].results)
    assert alone.suffix == ""
    grown = dataclasses.replace(kinds[0].results[0], facts={**kinds[0].results[0].facts, "scale": "batch"})
    assert materials(out, [grown]) == []
    own = dataclasses.replace(kinds[0].results[0], facts={"program": "train.py", "--layers": 2})
    (mine,) = materials(
        out, [own, dataclasses.replace(own, setting="other", facts={**own.facts, "--layers": 4})]
    )
    assert (mine.kind, mine.suffix) == ("train.py", "")
    assert list(mine.variants()) == ["layers 2", "layers 4"]


def test_the_base_is_the_shape_that_has_all_stages(kinds: list[Material]) -> None:
    assert {result.setting for result in kinds[0].base} == {"bert-pretrain-torch-L3-H768-fp32"}
    assert list(kinds[0].variants()) == ["L3 H512", "L4 H512", "L3 H768"]
    assert len(kinds[0].like_base("albert", "pretrain")) == 2
    assert kinds[0].like_base("albert", "finetune") == []


def test_all_files_are_there_and_what_is_not_says_why(out: Path, written: list[Path]) -> None:
    assert all(path.is_file() for path in written)
    assert written[:3] == [out / "findings.html", out / "findings.md", out / "findings.json"]
    for wanted in FIGURES:
        assert out / "figures" / f"{wanted.name}-torch-fp32.png" in written
    said = json.loads((out / "findings.json").read_text())
    assert set(said["figures"]).isdisjoint(said["left_out"])
    assert len(said["figures"]) + len(said["left_out"]) == 2 * len(FIGURES)
    assert said["left_out"]["figure-10-albert-energy-torch-bf16"] == "ALBERT was not run"
    assert "neither a sketch nor a recording" in said["left_out"]["figure-3-power-torch-bf16"]
    assert said["provenance"] == {"cpu:0": "estimated", GPU: "measured"}
    assert said["data"] == ["generated, as long as CoLA's"]
    assert {path.name for path in (out / "tables").iterdir()} >= {
        "stages.csv",
        "top.md",
        "variants.csv",
        "albert.csv",
    }
    assert (
        "figure-5-top-energy-torch-fp32** The 10 names with the most energy on gpu:0."
        in (out / "figures" / "captions.md").read_text()
    )


def test_the_footprints_of_every_setting_add_up_to_its_step(out: Path, written: list[Path]) -> None:
    assert out / "tables" / "footprints.csv" in written
    with open(out / "tables" / "footprints.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    runs = by_setting(load_results(out))
    assert {row["setting"] for row in rows} == set(runs)
    for setting, each in runs.items():
        own = [row for row in rows if row["setting"] == setting]
        step_j = statistics.fmean(result.step.devices[GPU].total_j for result in each)
        assert math.fsum(float(row["energy_j"]) for row in own) == pytest.approx(step_j, rel=1e-12)
        assert [row["name"] for row in own][-1] == "(idle)"
        busy = [row for row in own if row["power_w"]]
        assert all(row["energy_j_runs"] == str(len(each)) for row in busy)
        if len(each) == 1:  # over runs, the mean of powers is not the power of means
            for row in busy:
                assert float(row["power_w"]) == pytest.approx(float(row["energy_j"]) / float(row["busy_s"]))


def test_sketches_take_the_place_of_recordings(out: Path, written: list[Path], tmp_path: Path) -> None:
    """Figures are the same by what is kept beside the results, where no recording is."""
    name = f"{setting('bert', 'pretrain').name}-1"
    recording = open_recording(out / "runs" / name)
    made = sketch_of(name, Run(recording))
    assert made is not None
    save_sketch(tmp_path, made)
    assert {path.name for path in (tmp_path / "sketches").iterdir()} == {
        f"{name}.json",
        f"{name}-all.parquet",
        f"{name}-half.parquet",
    }
    shutil.copytree(out / "results", tmp_path / "results")
    write_study(tmp_path, ["png"])
    here, there = (json.loads((folder / "findings.json").read_text()) for folder in (tmp_path, out))
    for figure in ("figure-2-program", "figure-3-power", "figure-4-transformer", "figure-6-similarity"):
        assert (
            here["figures"][f"{figure}-torch-fp32"]["text"]
            == there["figures"][f"{figure}-torch-fp32"]["text"]
        )
    assert "dataflow not kept" not in here["figures"]["figure-2-program-torch-fp32"]["text"]


@pytest.mark.parametrize("broken", ["cut short", "without power", "of another device"])
def test_a_sketch_that_cannot_be_used_costs_what_needs_it_alone(
    out: Path, tmp_path: Path, broken: str
) -> None:
    name = f"{setting('bert', 'pretrain').name}-1"
    recording = open_recording(out / "runs" / name)
    made = sketch_of(name, Run(recording))
    assert made is not None
    assert made.power is not None
    nothing = np.full_like(made.power.mean_w, np.nan)
    if broken == "without power":
        made = dataclasses.replace(made, power=dataclasses.replace(made.power, mean_w=nothing, std_w=nothing))
    elif broken == "of another device":
        made = dataclasses.replace(made, device="gpu:7")
    save_sketch(tmp_path, made)
    if broken == "cut short":
        (tmp_path / "sketches" / f"{name}.json").write_text("{")
    shutil.copytree(out / "results", tmp_path / "results")
    write_study(tmp_path, ["png"])
    said = json.loads((tmp_path / "findings.json").read_text())
    why = said["left_out"]["figure-3-power-torch-fp32"]
    assert "figure-2-program-torch-fp32" in said["figures"]
    assert "figure-4-transformer-torch-fp32" in said["figures"]
    expected = {
        "cut short": f"{name}.json is no sketch of a study",
        "without power": "nothing is known of the power of gpu:0 in most",
        "of another device": "is of gpu:7, not of gpu:0",
    }
    assert expected[broken] in why


def test_a_sketch_comes_back_as_it_was(out: Path, tmp_path: Path) -> None:
    name = f"{setting('bert', 'pretrain').name}-1"
    recording = open_recording(out / "runs" / name)
    made = sketch_of(name, Run(recording))
    assert made is not None
    assert made.power is not None
    assert made.ran is not None
    assert made.ran.others
    assert made.ran.others_s
    gap = np.where(np.arange(made.power.std_w.size) == 3, np.nan, made.power.std_w)
    made = dataclasses.replace(made, power=dataclasses.replace(made.power, std_w=gap))
    save_sketch(tmp_path, made)
    found = load_sketch(tmp_path, name)
    assert found is not None
    assert found.power is not None
    assert (found.name, found.device, found.ran) == (name, GPU, made.ran)
    assert found.edges.equals(made.edges)
    assert found.edges.num_rows
    for key in ("edges_s", "mean_w", "std_w"):
        np.testing.assert_array_equal(getattr(found.power, key), getattr(made.power, key))
    assert (found.power.of, found.power.count) == (made.power.of, made.power.count)
    for key in ("all_readings", "half_readings"):
        own, other = getattr(found, key), getattr(made, key)
        assert own.rows.equals(other.rows)
        assert own.devices == other.devices
        device = own.devices[GPU]
        rows_j = math.fsum(own.rows["energy_j"].to_pylist())
        assert rows_j + device.idle_j == pytest.approx(device.total_j, rel=1e-12)
    assert load_sketch(tmp_path, "another") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "list indices"),
        ('{"format_version": 1}', "it has no power"),
        ('{"format_version": 9}', "newer version"),
    ],
)
def test_a_broken_sketch_is_said_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "sketches").mkdir()
    (tmp_path / "sketches" / "x-1.json").write_text(text)
    with pytest.raises(UserError, match=why) as caught:
        load_sketch(tmp_path, "x-1")
    assert "x-1.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_figure_that_results_allow_no_more_goes(out: Path, written: list[Path], tmp_path: Path) -> None:
    shutil.copytree(out / "results", tmp_path / "results")
    for file in (tmp_path / "results").glob("*"):
        if "bert-pretrain-torch-L3-H768-fp32-1" not in file.name:
            file.unlink()
    stale = tmp_path / "figures" / "figure-3-power.png"
    stale.parent.mkdir()
    stale.write_bytes(b"old")
    write_study(tmp_path, ["png"])
    assert not stale.exists()
    said = json.loads((tmp_path / "findings.json").read_text())
    assert {"figure-3-power", "figure-6-similarity", "figure-8-stability", "figure-9-difference"} <= set(
        said["left_out"]
    )
    assert "dataflow not kept" in said["figures"]["figure-2-program"]["text"]
    assert said["figures"]["figure-2-program"]["files"] == ["figures/figure-2-program.png"]


def test_no_results_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no results"):
        write_study(tmp_path)


class Page(HTMLParser):
    """Tags that open and close, addresses that a browser would ask for, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.said: list[str] = []
        self.alts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "img", "br", "wbr"):
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self.alts += [value or "" for name, value in attrs if name == "alt"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.said.append(data)


def test_the_page_is_one_file_that_asks_for_nothing(out: Path, written: list[Path]) -> None:
    text = (out / "findings.html").read_text()
    page = Page(text)
    assert page.open == []
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert "<script" not in text
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in text
    assert "url(" not in style
    said = json.loads((out / "findings.json").read_text())
    assert page.alts == [figure["text"] for figure in said["figures"].values()]
    shown = " ".join(page.said)
    for finding in said["findings"]:
        assert finding["question"] in shown
        assert finding["here"] in shown
        assert finding["why"] in shown
    for name, why in said["left_out"].items():
        assert name in shown
        assert why in shown
    assert "On a <quiet> night." in shown
    markdown = (out / "findings.md").read_text()
    assert all(finding["key"] in markdown for finding in said["findings"] if finding["verdict"] == "differs")
    assert "On a <quiet> night." in markdown
    for finding in said["findings"]:  # two kinds have the same questions
        assert f"\n| {finding['question']} | {finding['settings'][0]}" in markdown
    linked = re.findall(r"\]\((figures/[^)]+)\)", markdown)
    assert len(linked) == len(said["figures"])
    assert all((out / link).is_file() for link in linked)


def test_notes_belong_to_their_findings_and_none_is_lost(out: Path, written: list[Path]) -> None:
    notes = read_notes(out)
    assert notes == {"": "On a <quiet> night.", "encoder-share": "Because of `x`.", "odd": "Kept."}
    finding = made_finding(key="encoder-share-torch-fp32")
    assert note_key(finding, notes) == "encoder-share"
    assert note_key(finding, {**notes, "encoder-share-torch": "Nearer."}) == "encoder-share-torch"
    assert note_key(made_finding(key="encoder-shares"), notes) is None
    document = made_document([finding], notes)
    assert spare_notes(document) == {"odd": "Kept."}
    page = html_page(document)
    assert "<p>Because of <code>x</code>.</p>" in page
    assert "<h3>odd</h3><p>Kept.</p>" in page
    assert "<p>Here: 97 % of &lt;it&gt;. There: 99 %. The rule: agrees above 99 %.</p>" in page
    assert (out / "notes.md").read_text().startswith("# Mine")


def made_finding(key: str = "a", verdict: Any = "differs") -> JudgedClaim:
    return JudgedClaim(
        key, "bert", "How much?", "97 % of <it>", "99 %", 97.0, 99.0, verdict, "agrees above 99 %"
    )


def made_document(findings: Sequence[JudgedClaim], notes: dict[str, str]) -> Document:
    head = Head(("a GPU",), ("smaragdine study bert",), ("CoLA",), {GPU: "measured"}, 1, 1, ())
    return Document(head, tuple(findings), (), {}, (), notes)


def test_findings_on_a_terminal_keep_their_verdict() -> None:
    from rich.console import Console

    verdicts = ("agrees", "differs", "not comparable")
    console = Console(file=io.StringIO(), width=100)
    found = [made_finding(verdict=verdict) for verdict in verdicts]
    found[1] = dataclasses.replace(found[1], settings=("bert-bf16",))
    console.print(findings_table(found))
    lines = [line for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]
    assert lines[0].split() == ["finding", "here", "there", "verdict"]
    said = [line for line in lines if "97 % of <it>" in line]
    assert [next(v for v in verdicts if v in line) for line in said] == list(verdicts)
    # The same question of several: each says of what.
    assert lines[lines.index(said[1]) + 1].strip() == "bert-bf16"
    assert lines[-1] == "1 agrees, 1 differs, 1 not comparable"


def made(of: StudySetting, number: int, rows: Sequence[dict[str, Any]], idle_j: float = 0.0) -> Result:
    step = footprint(rows, idle_j)
    devices = {
        d: dataclasses.replace(t, per_step=True, provenance="measured") for d, t in step.devices.items()
    }
    return Result(
        name=StudyRun(of, number).name,
        setting=of.name,
        number=number,
        facts=of.facts,
        step=dataclasses.replace(step, devices=devices),
        steps=50,
        step_s=0.5,
        traced_steps=20,
        slower=None,
        duration_s=30.0,
        energy_j={GPU: 1000.0},
        provenance={GPU: "measured"},
        data="generated",
        hardware="a GPU",
        asss={},
    )


def layer_rows(scale: float = 1.0) -> list[dict[str, Any]]:
    """Three layers of 1, 2 and 3 J forward and twice that backward; a second each."""
    return [
        {"name": f"bert/encoder/layer_{i}/dense/MatMul", "phase": phase, "energy_j": scale * (i + 1) * times}
        for i in range(3)
        for phase, times in (("forward", 1), ("backward", 2))
    ]


def only_material(results: Sequence[Result]) -> Material:
    (found,) = materials(Path("nowhere"), results)
    return found


def test_a_stage_is_so_many_steps() -> None:
    results = [made(setting("bert", "pretrain"), n, layer_rows(n), idle_j=2.0) for n in (1, 2)]
    results.append(made(setting("bert", "predict"), 1, layer_rows()[::2]))
    table = stages_table([only_material(results)])
    said = [each.note for each in study_tables([only_material(results)])]
    assert said
    assert all(note.endswith("Power of gpu:0: measured.") for note in said)
    first, second = csv.DictReader(io.StringIO(csv_text(table)))
    assert (first["stage"], second["stage"]) == ("pre-training", "prediction")
    # Steps of 18 + 2 J and 36 + 2 J: 29 J on average.
    assert float(first["step_j"]) == pytest.approx(29)
    assert float(first["stage_j"]) == pytest.approx(29 * 500)
    assert float(first["stage_j_std"]) == pytest.approx(500 * 18 / math.sqrt(2))
    assert float(first["forward_j"]) == pytest.approx(9)
    assert float(first["idle_j"]) == pytest.approx(2)
    assert float(second["stage_j"]) == pytest.approx(6 * 34)
    assert second["stage_j_std"] == ""
    figure = figures.stages_figure(only_material(results))
    heights = {round(patch.get_x() + patch.get_width() / 2): 0.0 for patch in figure.axes[0].patches}
    for patch in figure.axes[0].patches:
        heights[round(patch.get_x() + patch.get_width() / 2)] += patch.get_height()
    assert heights == {0: pytest.approx(29 * 500), 1: pytest.approx(6 * 34)}
    assert "prediction: 34 steps" in alt_text(figure)


def test_layers_and_top_are_means_over_runs() -> None:
    material = only_material([made(setting("bert", "pretrain"), n, layer_rows(n)) for n in (1, 3)])
    layers = list(csv.DictReader(io.StringIO(csv_text(layers_table([material])))))
    assert [row["layer"] for row in layers] == [f"bert/encoder/layer_{i}" for i in range(3)]
    assert [float(row["forward_j"]) for row in layers] == pytest.approx([2, 4, 6])
    assert [float(row["forward_share_percent"]) for row in layers] == pytest.approx(
        [100 / 6, 200 / 6, 300 / 6]
    )
    assert [float(row["forward_share_percent_std"]) for row in layers] == pytest.approx([0, 0, 0], abs=1e-9)
    top = list(csv.DictReader(io.StringIO(csv_text(top_table([material])))))
    assert [(row["name"], row["phase"]) for row in top] == [
        ("bert/encoder/layer_*/dense/MatMul", "backward"),
        ("bert/encoder/layer_*/dense/MatMul", "forward"),
    ]
    assert [float(row["energy_j"]) for row in top] == pytest.approx([24, 12])
    assert [float(row["energy_j_std"]) for row in top] == pytest.approx([12 * math.sqrt(2), 6 * math.sqrt(2)])
    assert [float(row["share_percent"]) for row in top] == pytest.approx([200 / 3, 100 / 3])
    # Three seconds each in both runs: 4 and 12 W backward.
    assert float(top[0]["power_w"]) == pytest.approx(8)
    assert {row["runs"] for row in top} == {"2"}


def test_variants_have_their_power_while_busy() -> None:
    results = [
        made(setting("bert", "pretrain", 3, h), 1, layer_rows(h / 256), idle_j=5.0) for h in (256, 512)
    ]
    rows = list(csv.DictReader(io.StringIO(csv_text(variants_table([only_material(results)])))))
    assert [row["variant"] for row in rows] == ["L3 H256", "L3 H512"]
    assert [float(row["step_j"]) for row in rows] == pytest.approx([23, 41])
    assert [float(row["busy_w"]) for row in rows] == pytest.approx([3, 6])


def test_an_operation_that_one_run_lacks_does_not_part_its_layers() -> None:
    of = setting("bert", "pretrain")
    rare = {"name": "bert/encoder/layer_1/dense/Add", "phase": "forward", "energy_j": 1.0}
    every = [{**rare, "name": f"bert/encoder/layer_{i}/dense/Add"} for i in range(3)]
    runs = [made(of, 1, [*layer_rows(), *every]), made(of, 2, [*layer_rows(), rare])]
    found = summaries(runs, GPU)
    assert [sorted(set(one.rows["name"].to_pylist())) for one in found] == [
        ["bert/encoder/layer_*/dense/Add", "bert/encoder/layer_*/dense/MatMul"]
    ] * 2
    for one in found:
        assert_conserved(one)


def test_a_phase_of_a_footprint_is_conserved() -> None:
    forward = of_phase(made(setting("bert", "pretrain"), 1, layer_rows(), idle_j=7.0).step, "forward")
    assert_conserved(forward)
    assert forward.devices[GPU].total_j == pytest.approx(6)
    assert of_phase(forward, "backward").rows.num_rows == 0


def test_long_paths_keep_their_ends_where_two_footprints_stand_side_by_side() -> None:
    top = "BertForPreTraining/bert"
    paths = [
        *(f"{top}/encoder/layer/{i}/{part}" for i in range(3) for part in ("attention/self", "output/dense")),
        *(f"{top}/embeddings/{kind}_embeddings" for kind in ("word", "position", "token_type")),
        f"{top}/pooler/dense",
        "BertForPreTraining/cls/predictions",
    ]
    a, b = (
        footprint([{"name": f"{p}/mm", "energy_j": k * n} for n, p in enumerate(paths, 1)]) for k in (1, 2)
    )
    figure = pair(a, b, ("all", "every 2nd"), GPU)
    assert_legible(figure)
    shown = {text.get_text() for text in figure.axes[0].texts}
    # Layers as one: 1 + 3 + 5 J and 2 + 4 + 6 J; of the embeddings two segments would not fit.
    ends = {"attention/self", "output/dense", "word_embeddings", "pooler/dense", "cls/predictions"}
    assert ends <= {name.removeprefix("embeddings/") for name in shown}
    assert {"9.00 J", "18.0 J", "12.0 J", "24.0 J", "1.0000"} <= shown
    assert "BertForPreTraining/bert/encoder/layer/*/attention/self: 9.00 J and 18.0 J" in alt_text(figure)


def test_two_variants_have_room_for_their_titles() -> None:
    results = [made(setting("bert", "pretrain", 3, h), 1, layer_rows(h / 256)) for h in (256, 512)]
    similarity = next(each for each in FIGURES if each.name == "figure-9-similarity")
    assert_legible(similarity.draw(only_material(results)))


def test_scores_come_back_as_they_were_kept(out: Path) -> None:
    kept = load_results(out)[0].asss[GPU]
    assert [score_json("every", figures.score_of(one)) for one in kept] == list(kept)


def test_without_layers_that_repeat_there_is_no_transformer_to_show() -> None:
    material = only_material([made(setting("bert", "pretrain"), 1, layer_rows()[:4])])
    for draw in (figures.program_figure, figures.transformer_figure, figures.transformers_figure):
        with pytest.raises(NotDrawn, match="three times or more"):
            draw(material)


def test_cells_say_no_more_than_is_known() -> None:
    joules, share, one = Column("e_j", "E", "J"), Column("p", "P", "%"), Column("r", "r", "1")
    assert shown_as(MeanOverRuns(1234.0, 67.0, 3), joules) == "1.23 ± 0.07 kJ"
    assert shown_as(MeanOverRuns(1234.0, None, 1), joules) == "1.23 kJ"
    assert shown_as(-0.5, share) == "−0.50 %"
    assert shown_as(MeanOverRuns(0.98765, 0.001, 2), one) == "0.9877 ± 0.0010"
    assert shown_as(None, joules) == "–"
    assert shown_as(1234567, Column("events", "Events")) == "1,234,567"
    assert shown_as(MeanOverRuns(0.0, 0.0, 3), joules) == "0 J"
    assert shown_as(-0.25, Column("slower", "Slower", "part")) == "−25.0 %"
    assert mean_of([None, math.nan]) is None
    assert mean_of([1.0, None, 3.0]) == MeanOverRuns(2.0, math.sqrt(2), 2)
    table = StudyTable(
        "t", "T", (Column("n", "N"), joules), (("a|b", MeanOverRuns(1.0, 0.5, 2)), ("c", None))
    )
    assert csv_text(table) == "n,e_j,e_j_std,e_j_runs\na|b,1.0,0.5,2\nc,,,\n"
    assert "| a\\|b | 1.0 ± 0.5 J |" in markdown_text(table)
    latex = latex_text(dataclasses.replace(table, note="Power of cpu:0: 50 % estimated."))
    assert "{@{}lr@{}}" in latex
    assert "    a\\textbar{}b & 1.0 $\\pm$ 0.5 J \\\\\n" in latex
    assert r"Power of cpu:0: 50 \% estimated.}" in latex
    columns = (Column("kind", "Kind"), Column("n", "N"), joules, joules)
    wide = StudyTable("t", "T", columns, (("x", 0, MeanOverRuns(0.0, 0.0, 2), 1.0), ("x", 1, None, None)))
    assert worth_showing(wide).rows == ((0, 1.0), (1, None))
    assert [column.key for column in worth_showing(wide).columns] == ["n", "e_j"]


def test_costs_are_tabled_with_their_interval_and_provenance(tmp_path: Path) -> None:
    time, energy = ExtraCost(-0.001, 0.002, 0.005), ExtraCost(0.0, 0.01, 0.02, "estimated")
    found = Overhead("bert", 20, 2.0, 0.1, time, time, {"cpu:0": energy}, 0.02, "a GPU")
    write_json({"format_version": 1, "settings": {"bert": dataclasses.asdict(found)}}, tmp_path / OVERHEAD)
    rows = list(csv.DictReader(io.StringIO(csv_text(overhead_table(tmp_path)))))
    assert [(row["what"], row["provenance"]) for row in rows] == [
        ("time", "measured"),
        ("time, median of pairs", "measured"),
        ("energy of cpu:0", "estimated"),
    ]
    assert [float(rows[0][key]) for key in ("more_percent", "low_percent", "high_percent")] == pytest.approx(
        [0.2, -0.1, 0.5]
    )
    of = setting("bert", "pretrain")
    base = dataclasses.replace(made(of, 1, layer_rows()), cost={"events": 100, "account_s": 0.002})
    grown = dataclasses.replace(
        base,
        name="grown-1",
        setting="grown",
        facts={**of.facts, "layers": 6, "scale": "layers", "base": of.name},
        cost={"events": 200, "account_s": 0.004},
    )
    (first, second) = csv.DictReader(io.StringIO(csv_text(scaling_table([base, grown]))))
    assert (first["run"], second["run"]) == (base.name, "grown-1")
    assert float(second["account_us_per_event"]) == pytest.approx(20)
    growths = {row["y"]: row for row in csv.DictReader(io.StringIO(csv_text(growth_table([base, grown]))))}
    assert float(growths["step_events"]["exponent"]) == pytest.approx(1)
    assert growths["step_events"]["runs"] == "2"


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_shows_the_page_without_complaint_or_overflow(out: Path, written: list[Path]) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=0)
        page = browser.new_page()
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((out / "findings.html").as_uri())
        pictures = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth > 0)")
        for width in (1280, 420):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [(out / "findings.html").as_uri()]
    assert len(pictures) > 20
    assert all(pictures)


def test_figures_of_names_that_are_no_more_go(tmp_path: Path, kinds: list[Material]) -> None:
    """One kind alone has plain names; with a second one they are told apart, and the plain ones are gone."""
    save_result(tmp_path, kinds[0].results[0])
    write_study(tmp_path, ("png",))
    alone = {path.name for path in (tmp_path / "figures").glob("figure-*")}
    assert "figure-5-top-energy.png" in alone
    (tmp_path / "figures" / "mine.png").write_bytes(b"")
    save_result(tmp_path, kinds[1].results[0])
    write_study(tmp_path, ("png",))
    both = {path.name for path in (tmp_path / "figures").glob("figure-*")}
    assert "figure-5-top-energy-torch-fp32.png" in both
    assert not alone & both
    assert (tmp_path / "figures" / "mine.png").exists()
