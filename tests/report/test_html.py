"""The HTML report in a real Chromium: what it shows is what `report --json` says, to the last digit."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import recordings
from cli import smaragdine
from footprints import footprint
from made_runs import made_run
from models import bert_keras
from smaragdine.accounting.comparison import compare
from smaragdine.accounting.comparison import to_json as comparison_json
from smaragdine.accounting.diagram import diagram, walk
from smaragdine.accounting.footprint import to_json as footprint_json
from smaragdine.accounting.merge import renaming
from smaragdine.accounting.power import PowerTrace, within
from smaragdine.accounting.run import Run, alike
from smaragdine.accounting.steps import UntracedStep
from smaragdine.errors import UserError
from smaragdine.report.html.data import layer_columns, power_columns, tree_of
from smaragdine.report.html.page import html_page, pack, write_html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FIGURES = ("energy_j", "busy_s", "count", "uncertainty_j", "power_w")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=0)
        yield started
        started.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Opens a report, and sees to it that it asks for nothing and complains of nothing."""
    contexts, said, asked = [], [], []

    def open_page(source: str | Path, view: str = "", **options):
        path = source
        if isinstance(source, str):
            path = tmp_path / f"{len(contexts)}.html"
            path.write_text(source, encoding="utf-8")
        options = {"viewport": {"width": 1440, "height": 900}, "reduced_motion": "reduce", **options}
        context = browser.new_context(**options)
        context.set_default_timeout(0)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url.partition("#")[0]))
        page.goto(path.as_uri() + view)
        page.wait_for_selector("html[data-ready]")
        assert set(asked) <= {path.as_uri()}
        asked.clear()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert asked == []


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Two recordings of a BERT in Keras, made as a user does."""
    for needed in ("keras", "torch"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed}")
    folder = tmp_path_factory.mktemp("bert")
    extra = {"KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name, steps in (("a", "8"), ("b", "12")):
        options = ("-o", name, "--trace-steps", "3", "--trace-skip", "2")
        done = smaragdine("run", *options, bert_keras.__file__, steps, "functional", env=extra, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def bert_page(bert):
    write_html([Run.open(bert / "a")], bert / "a.html")
    return bert / "a.html"


@pytest.fixture(scope="module")
def said(bert):
    done = smaragdine("report", bert / "a", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def by_hand(tmp_path):
    return Run.open(recordings.make(tmp_path / "hand"))


def json_rows(values, level="step", device="all", phase="all"):
    """Rows of `report --json` as the page's choices name them."""
    return [
        {**row, "device": name, "phase": row["phase"] or "not known"}
        for name, total in values[level]["devices"].items()
        for row in total["rows"]
        if device in ("all", name) and phase in ("all", row["phase"] or "not known")
    ]


def below(rows, path, figure="energy_j"):
    return math.fsum(r[figure] for r in rows if f"{r['name']}/".startswith(f"{path}/" if path else ""))


def attribute(element, figure):
    text = element.get_attribute(f"data-{figure.replace('_', '-')}")
    return None if text is None else float(text)


def boxes(page):
    return page.locator("#boxes .box").all()


def box(page, path):
    return page.locator(f'#boxes .box[data-path="{path}"]')


def shown_path(page):
    return page.locator("#crumbs [aria-current]").get_attribute("data-path")


def check_boxes(page, rows, path):
    """Every box is the exact sum of the rows below it, and all of them are their parent."""
    shown = page.eval_on_selector_all("#boxes .box", "all => all.map(e => ({...e.dataset}))")
    for one in shown:
        if one["kind"] != "rest" and one["path"] != path:
            assert float(one["energyJ"]) == below(rows, one["path"])
            assert float(one["busyS"]) == below(rows, one["path"], "busy_s")
    assert math.fsum(float(one["energyJ"]) for one in shown) == pytest.approx(below(rows, path), rel=1e-12)


def largest_layer(page):
    layers = [one for one in boxes(page) if one.get_attribute("data-kind") == "layer"]
    return max(layers, key=lambda one: attribute(one, "energy_j"))


def table_rows(page):
    """All rows of the table, by scrolling through it: only those in sight are there."""
    found = {}
    table = page.locator("#table")
    total = int(table.get_attribute("aria-rowcount")) - 1
    table.evaluate("e => { e.scrollTop = 0; drawLines(); }")
    while len(found) < total:
        lines = page.eval_on_selector_all(
            "#table .line", "all => all.map(e => [e.getAttribute('aria-rowindex'), {...e.dataset}])"
        )
        before = len(found)
        found |= dict(lines)
        table.evaluate("e => { e.scrollTop += e.clientHeight - 60; drawLines(); }")
        assert len(found) > before or len(found) == total
    return [found[key] for key in sorted(found, key=int)]


def test_zoom_four_levels_down_and_back(visit, bert_page, said):
    page = visit(bert_page)
    rows = json_rows(said, device="cpu:0")
    paths = [None]
    check_boxes(page, rows, "")
    for _ in range(4):
        target = largest_layer(page)
        paths.append(target.get_attribute("data-path"))
        target.click()
        assert shown_path(page) == paths[-1]
        check_boxes(page, rows, paths[-1])
    assert paths[-1].count("/") == 3
    for path in reversed(paths[:-1]):
        page.keyboard.press("Backspace")
        assert shown_path(page) == path
    page.go_back()  # the browser's own history has the same steps
    assert shown_path(page) == paths[1]


def test_the_table_is_the_json(visit, bert_page, said):
    page = visit(bert_page)
    wanted = {(r["name"], r["phase"]): r for r in json_rows(said, device="cpu:0")}
    found = {(row["name"], row["phase"]): row for row in table_rows(page)}
    assert found.keys() == wanted.keys()
    for key, row in found.items():
        for figure in FIGURES:
            camel = "".join(p.capitalize() if i else p for i, p in enumerate(figure.split("_")))
            value = wanted[key][figure]
            assert (float(row[camel]) if camel in row else None) == value, (key, figure)
        assert row["basis"] == wanted[key]["basis"]
    energies = [float(row["energyJ"]) for row in found.values()]
    assert energies == sorted(energies, reverse=True)


def test_header_and_conservation(visit, bert_page, said):
    page = visit(bert_page)
    for device, figures in said["devices"].items():
        line = page.locator(f'.devices tr[data-device="{device}"]')
        assert attribute(line, "energy_j") == figures["energy_j"]
        assert figures["provenance"] in line.inner_text()
    assert attribute(page.locator(".devices .sum"), "energy_j") == said["total_j"]
    total = said["step"]["devices"]["cpu:0"]
    balance = page.locator("#balance [data-total-j]")
    assert attribute(balance, "total_j") == total["total_j"]
    assert attribute(balance, "idle_j") == total["idle_j"]
    assert attribute(balance, "rows_j") == below(json_rows(said, device="cpu:0"), "")
    assert attribute(balance, "rows_j") + total["idle_j"] == pytest.approx(total["total_j"], rel=1e-9)
    assert "traced 3 of 8 steps" in page.locator("header").inner_text()


def test_phase_metric_and_level(visit, bert_page, said):
    page = visit(bert_page, "#path=bert%2Fencoder")
    for phase in ("forward", "backward"):
        page.click(f'[data-set="phase"][data-value="{phase}"]')
        check_boxes(page, json_rows(said, device="cpu:0", phase=phase), "bert/encoder")
    page.click('[data-set="level"][data-value="traced"]')
    check_boxes(page, json_rows(said, "traced", "cpu:0", "backward"), "bert/encoder")
    page.click('[data-set="phase"][data-value="all"]')
    rows = json_rows(said, "traced", "cpu:0")
    layer = box(page, "bert/encoder/layer_0")
    page.click('[data-set="metric"][data-value="time"]')
    busy_s = below(rows, "bert/encoder/layer_0", "busy_s")
    assert attribute(layer, "busy_s") == busy_s
    assert attribute(layer, "share") == busy_s / below(rows, "bert/encoder", "busy_s")
    page.click('[data-set="metric"][data-value="power"]')
    assert attribute(layer, "power_w") == below(rows, "bert/encoder/layer_0") / busy_s
    assert layer.locator(".big").inner_text().endswith("W")
    # The address has all of it.
    again = visit(bert_page, page.evaluate("location.hash"))
    assert attribute(box(again, "bert/encoder/layer_0"), "power_w") == attribute(layer, "power_w")
    assert again.locator("[aria-pressed=true][data-set=metric]").get_attribute("data-value") == "power"


def test_dataflow_is_drawn(visit, bert_page):
    page = visit(bert_page, "#path=bert%2Fencoder")
    flows = page.eval_on_selector_all(
        "path.flow", "all => all.map(e => [e.dataset.source, e.dataset.target])"
    )
    assert flows == [["layer_0", "layer_1"]]
    left, right = (box(page, f"bert/encoder/layer_{i}").bounding_box() for i in (0, 1))
    assert left["x"] + left["width"] < right["x"]
    corner = "e => getComputedStyle(e).borderTopLeftRadius"
    assert box(page, "bert/encoder/layer_0").evaluate(corner) != "0px"
    leaf = visit(bert_page, "#path=bert%2Fclassifier").locator('.box[data-kind="operation"]').first
    assert leaf.evaluate(corner) == "0px"


def test_merged_layers(visit, by_hand):
    seen = by_hand
    names = renaming([seen.footprint])
    assert names["net/layer_1/MatMul"] == names["net/layer_2/MatMul"] == "net/layer_*/MatMul"
    rows = json_rows(seen.to_json(), device="gpu:0")
    merged = [{**row, "name": names[row["name"]]} for row in rows]
    page = visit(html_page([by_hand]), "#path=net")
    assert {one.get_attribute("data-path") for one in boxes(page)} == {f"net/layer_{i}" for i in range(3)}
    page.click('[data-set="merged"][data-value="true"]')
    assert {one.get_attribute("data-path") for one in boxes(page)} == {"net/layer_0", "net/layer_*"}
    check_boxes(page, merged, "net")
    wanted = defaultdict(list)
    for row in merged:
        wanted[row["name"], row["phase"]].append(row["energy_j"])
    inside = {key: math.fsum(parts) for key, parts in wanted.items() if key[0].startswith("net/")}
    found = {(row["name"], row["phase"]): float(row["energyJ"]) for row in table_rows(page)}
    assert found == inside


def test_layers_have_the_intervals_of_the_diagram(visit, by_hand):
    found = by_hand.step
    assert found is not None
    nodes = {
        device: {
            node.path: node
            for node in walk(diagram(dataclasses.replace(found, rows=found.device_rows(device))))
        }
        for device in found.devices
    }
    page = visit(html_page([by_hand]), "#path=net")
    for one in boxes(page):
        node = nodes["gpu:0"][one.get_attribute("data-path")]
        assert attribute(one, "uncertainty_j") == pytest.approx(node.uncertainty_j, rel=1e-6)
    # Half-widths of devices add up.
    page.click('[data-set="device"][data-value="all"]')
    for one in boxes(page):
        path = one.get_attribute("data-path")
        if path == "net":  # what the layer used itself is a part beside the others
            continue
        of_all = sum(of[path].uncertainty_j for of in nodes.values() if path in of)
        assert attribute(one, "uncertainty_j") == pytest.approx(of_all, rel=1e-6)


def test_search_and_keyboard(visit, bert_page):
    page = visit(bert_page)
    page.keyboard.press("/")
    page.keyboard.type("layer_1 attention self")
    first = page.locator("#found li").first.get_attribute("data-path")
    assert first == "bert/encoder/layer_1/attention/self"
    page.keyboard.press("Enter")
    assert shown_path(page) == first
    focused = page.locator("#boxes :focus")
    before = focused.bounding_box()["x"]
    page.keyboard.press("ArrowRight")
    after = focused.bounding_box()["x"]
    assert after > before
    page.keyboard.press("ArrowLeft")
    assert focused.bounding_box()["x"] < after
    page.keyboard.press("Escape")
    assert shown_path(page) == "bert/encoder/layer_1/attention"
    assert focused.get_attribute("data-path") == first  # the focus returns to what one left
    page.keyboard.press("Enter")
    assert shown_path(page) == first
    page.keyboard.press("/")
    page.keyboard.type("no such thing")
    assert page.locator("#found").inner_text() == "no such name"
    page.keyboard.press("Escape")
    page.locator("#crumbs button").first.click()
    assert shown_path(page) is None


def test_an_operation_is_found_and_marked(visit, bert_page):
    page = visit(bert_page)
    page.fill("#search", "bert/classifier/mm")
    page.keyboard.press("Enter")
    assert shown_path(page) == "bert/classifier"
    assert page.locator('.box[aria-pressed="true"]').get_attribute("data-path") == "bert/classifier/mm"
    assert page.locator(".line[aria-current=true]").first.get_attribute("data-name") == "bert/classifier/mm"


def test_the_icicle_zooms_both(visit, bert_page):
    page = visit(bert_page)
    canvas = page.locator("#icicle")
    assert int(canvas.get_attribute("data-cells")) > 20
    place = canvas.bounding_box()
    page.mouse.move(place["x"] + 40, place["y"] + 30)
    assert page.locator("#tip strong").inner_text() == "bert"
    canvas.click(position={"x": 40, "y": 30})
    assert shown_path(page) == "bert"


def test_epochs_on_request(visit, by_hand):
    page = visit(html_page([by_hand]))
    epochs = by_hand.to_json()["epochs"]
    shown = page.locator(".epochs")
    assert shown.locator("summary").inner_text().startswith("2 epochs: 990 ms ± 0 and ")
    assert not shown.locator("table").is_visible()
    shown.locator("summary").click()
    assert shown.locator("table").is_visible()
    lines = shown.locator("tr[data-epoch]").all()
    assert [line.get_attribute("data-epoch") for line in lines] == ["0", "1"]
    for line, epoch in zip(lines, epochs, strict=True):
        assert attribute(line.locator("[data-s]"), "s") == pytest.approx(epoch["duration_s"], rel=1e-12)
        cells = {cell.get_attribute("data-device"): cell for cell in line.locator("[data-device]").all()}
        adding = {name for name, device in epoch["devices"].items() if device["scope"] == "device"}
        assert set(cells) == adding
        for name, cell in cells.items():
            assert attribute(cell, "energy_j") == epoch["devices"][name]["energy_j"]
    assert "mean of 2" in shown.locator(".sum").inner_text()


def test_regions_on_request(visit, tmp_path, by_hand):
    times = [("<b>load", 1000, 1100), ("<b>load", 1200, 1250), ("eval", 3000, 3900)]
    marked = [mark for number, each in enumerate(times) for mark in recordings.region(*each, number)]
    recording = Run.open(recordings.make(tmp_path / "regions", marked=marked))
    page = visit(html_page([recording]))
    shown = page.locator(".regions")
    assert shown.locator("summary").inner_text() == "2 regions"
    shown.locator("summary").click()
    regions = recording.to_json()["regions"]
    lines = shown.locator("tr[data-region]").all()
    assert [line.get_attribute("data-region") for line in lines] == ["<b>load", "eval"]
    for line, region in zip(lines, regions, strict=True):
        assert attribute(line.locator("[data-times]"), "times") == region["count"]
        assert attribute(line.locator("[data-s]"), "s") == pytest.approx(region["duration_s"], rel=1e-12)
        for cell in line.locator("[data-device]").all():
            assert attribute(cell, "energy_j") == region["energy_j"][cell.get_attribute("data-device")]
    assert attribute(lines[0].locator('[data-device="gpu:0"]'), "energy_j") == pytest.approx(200 * 0.15)
    assert visit(html_page([by_hand])).locator(".regions").count() == 0


def test_power_says_which_layer_ran(visit, by_hand):
    """The second tenth of the window is in the backward pass of layer_0, at 100 W on average."""
    page = visit(html_page([by_hand]))
    page.locator("#ranges button", has_text="one step").click()
    canvas = page.locator("#power")
    canvas.scroll_into_view_if_needed()
    place = canvas.bounding_box()
    left, right = 54, 10  # beside the bands
    x = place["x"] + left + 0.45 * (place["width"] - left - right)
    page.mouse.move(x, place["y"] + 40)
    lines = page.locator("#tip tr").all_inner_texts()
    assert page.locator("#tip strong").inner_text().startswith("1.345")
    assert "epoch 0" in page.locator("#tip strong").inner_text()
    assert any(line.split("\t") == ["gpu:0", "100 W"] for line in lines)
    assert any("net/layer_0, backward" in line for line in lines)


def test_devices(visit, by_hand):
    values = by_hand.to_json()
    page = visit(html_page([by_hand]))
    assert page.locator('[aria-pressed=true][data-set="device"]').inner_text() == "gpu:0"
    for device in ("cpu:0", "all", "gpu:0"):
        page.click(f'[data-set="device"][data-value="{device}"]')
        check_boxes(page, json_rows(values, device=device), "")
        wanted = {
            (r["device"], r["name"], r["phase"]): r["energy_j"] for r in json_rows(values, device=device)
        }
        found = {(r["device"], r["name"], r["phase"]): float(r["energyJ"]) for r in table_rows(page)}
        assert found == wanted
    # A name that is an operation and a layer at once has a box of its own beside its parts.
    page.click('[data-set="device"][data-value="cpu:0"]')
    page.click('.box[data-path="net"]')
    check_boxes(page, json_rows(values, device="cpu:0"), "net")
    itself = page.locator(".box", has_text="net itself")
    (alone,) = [r for r in json_rows(values, device="cpu:0") if r["name"] == "net"]
    assert attribute(itself, "energy_j") == alone["energy_j"]
    assert "nic:0" in page.locator("footer").inner_text()


@pytest.mark.parametrize(
    ("level", "phase", "device"), [("traced", "other", "cpu:0"), ("nonsense", "no phase", "tpu:7")]
)
def test_a_link_from_elsewhere_still_opens(visit, by_hand, level, phase, device):
    page = visit(html_page([by_hand]), f"#path=no%2Fsuch&level={level}&phase={phase}&device={device}&run=7")
    assert page.locator("#crumbs").inner_text() == "all"


def test_dark_and_light(visit, bert_page):
    background = "getComputedStyle(document.body).backgroundColor"
    page = visit(bert_page, color_scheme="dark")
    dark = page.evaluate(background)
    page.click("#theme")
    light = page.evaluate(background)
    assert [sum(map(int, c[4:-1].split(","))) > 380 for c in (dark, light)] == [False, True]
    assert light == visit(bert_page).evaluate(background)


def test_print(visit, bert_page):
    page = visit(bert_page, "#path=bert%2Fencoder", color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("#controls").is_visible()
    page.locator("#table .line").nth(29).wait_for()  # the page hears of the medium a frame later
    assert page.locator("#table .line").count() == 30
    assert box(page, "bert/encoder/layer_0").is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.parametrize("width", [1024, 390])
def test_nothing_is_wider_than_the_screen(visit, bert_page, width):
    page = visit(bert_page, "#path=bert%2Fencoder", viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_two_runs_are_no_wider_than_a_telephone(visit, by_hand):
    page = visit(html_page([by_hand, by_hand]), viewport={"width": 390, "height": 800})
    chip = page.locator("td.verdict .chip").first
    chip.evaluate("chip => { chip.textContent = 'inside the noise '.repeat(4); }")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_two_runs(visit, bert):
    runs = [Run.open(bert / name) for name in ("a", "b")]
    a, b = runs
    page = visit(html_page(runs))
    both = alike(a, b)  # on a busy machine what an untraced step costs may not be known of one of them
    assert both is not None
    steps, untraced = both
    values = comparison_json(compare(steps[:1], steps[1:], "cpu:0", untraced=untraced))
    assert page.locator('[aria-pressed=true][data-set="device"]').get_attribute("data-value") == "cpu:0"
    wanted = {(one["name"], one["phase"] or "not known"): one for one in values["changes"]}
    found = {(row["name"], row["phase"]): row for row in table_rows(page)}
    alone = {(o["name"], o["phase"] or "not known") for o in (*values["only_a"], *values["only_b"])}
    assert found.keys() == wanted.keys() | alone
    for key, change in wanted.items():
        row = found[key]
        figures = [float(row[name]) for name in ("aJ", "bJ", "differenceJ")]
        assert figures == [change["a_j"], change["b_j"], change["difference_j"]]
        assert (float(row["halfWidthJ"]) if "halfWidthJ" in row else None) == change["half_width_j"]
        assert row["verdict"] == change["verdict"]
    line = page.locator('.devices tr[data-device="cpu:0"][data-difference-j]')
    assert attribute(line, "difference_j") == values["devices"]["cpu:0"]["difference_j"]
    page.click('.box[data-path="bert"]')
    encoder = box(page, "bert/encoder")
    compared = [json_rows({"step": footprint_json(step)}, device="cpu:0") for step in steps]
    before, after = (below(rows, "bert/encoder") for rows in compared)
    assert (attribute(encoder, "a_j"), attribute(encoder, "b_j")) == (before, after)
    sides = [json_rows(side.to_json(), device="cpu:0") for side in (a, b)]
    for side, rows in zip(("0", "1"), sides, strict=True):
        page.click(f'[data-set="run"][data-value="{side}"]')
        assert shown_path(page) == "bert"
        check_boxes(page, rows, "bert")


def test_without_operations_in_one_run(visit, by_hand, tmp_path):
    other = Run.open(recordings.make(tmp_path / "none", events=False))
    page = visit(html_page([by_hand, other]))
    assert "B has no traced operations" in page.locator("header").inner_text()
    assert len(boxes(page)) > 1
    page.click('[data-set="run"][data-value="1"]')
    assert "nothing was traced" in page.locator("#empty").inner_text()


@pytest.mark.parametrize(
    ("made", "where", "text"),
    [
        ({"events": False}, "#empty", "nothing was traced"),
        ({"power": False}, "#empty", "no power was measured"),
        ({"power": False}, "header", "Nothing was measured"),
        ({"power": False}, "#time", "No power"),
        ({"power": False, "events": False}, "#empty", "nothing was traced"),
        ({"gap": True}, "header", "missing"),
        ({"status": "failed", "exit_code": 3}, "header", "failed with exit code 3"),
        ({"status": "killed", "signal": 9}, "header", "killed by SIGKILL"),
        ({"status": "running", "supervisor_pid": 2**30, "end_ns": None}, "header", "interrupted"),
        ({"problems": ["disk <full>"]}, "footer", "disk <full>"),
    ],
)
def test_what_is_missing_is_said(visit, tmp_path, made, where, text):
    info = {key: value for key, value in made.items() if value is not None}
    folder = recordings.make(tmp_path / "run", **info)
    if made.get("end_ns", 0) is None:
        values = json.loads((folder / "run.json").read_text())
        del values["end_ns"]
        (folder / "run.json").write_text(json.dumps(values))
    page = visit(html_page([Run.open(folder)]))
    assert text in page.locator(where).inner_text()


def with_rows(run, rows, steps=20) -> Run:
    whole = footprint(rows, idle_j=3.0, steps=steps)
    factor, idle_j = 0.973, 0.1
    energy_j = factor * (whole.devices["gpu:0"].total_j - 3.0) / steps + idle_j
    untraced = {"gpu:0": UntracedStep(0.1, energy_j, 0.05, idle_j, factor)}
    return made_run(run.recording, whole, untraced)


HOSTILE = [
    "</script><script>document.title='x'</script>/op",
    "<img src=x onerror=\"document.title='x'\">/op",
    'it\'s "quoted" & <b>bold</b>/{{style}}',
    "🧪/Ünïcode/漢字 \u202e turned",
    "#path=x&y=%00/../etc?a=b+c d",
    "long_" + "x" * 4000,
    "//empty//",
    "line\nbreak\ttab\x00nul/op",
    recordings.ODD,
]


def test_a_share_is_of_its_device_with_idle(visit, by_hand):
    """As in the terminal, and whatever devices are chosen."""
    values = by_hand.to_json()
    page = visit(html_page([by_hand]))
    for device in ("all", *values["step"]["devices"]):
        page.evaluate("device => setState({device})", device)
        shown = page.eval_on_selector_all(
            "#table .line",
            "all => all.map(e => [e.dataset.device, e.dataset.name, e.dataset.energyJ,"
            " e.querySelector('.share').innerText])",
        )
        assert shown
        for of, name, energy_j, share in shown:
            part = float(energy_j) / values["step"]["devices"][of]["total_j"]
            assert share == (f"{100 * part:.1f} %" if part >= 0.0005 or not part else "< 0.1 %"), name


def test_hostile_names_are_text(visit, by_hand):
    rows = [{"name": name, "energy_j": 1.0 + i, "phase": "forward"} for i, name in enumerate(HOSTILE)]
    found = with_rows(by_hand, rows)
    page = visit(html_page([found]))
    title = page.title()
    assert page.locator("script").count() == 1
    assert page.locator("main img, main b b").count() == 0
    seen = {row["name"]: float(row["energyJ"]) for row in table_rows(page)}
    wanted = {row["name"]: row["energy_j"] for row in json_rows(found.to_json())}
    # An attribute takes any text but the null character.
    assert {name.replace("\ufffd", "\x00"): energy for name, energy in seen.items()} == wanted
    for name in HOSTILE[:5]:
        top = name.partition("/")[0]
        page.evaluate("setState({path: null})")
        find = "(all, path) => all.find(e => e.dataset.path === path).click()"
        page.eval_on_selector_all(".box", find, top)
        assert shown_path(page) == top
        assert page.title() == title
        again = visit(html_page([found]), page.evaluate("location.hash"))
        assert shown_path(again) == top


def many_rows(count: int):
    random = np.random.default_rng(0)
    energy_j, wide = random.lognormal(0, 2, count * 2), random.random(count * 2)
    busy_s = random.integers(1000, 100_000_000, count * 2) / 1e9
    kinds = ("MatMul", "Add", "Mul", "Softmax", "LayerNorm")
    for n in range(count):
        path = f"model/stage_{n // 4000}/block_{n // 400 % 10}/layer_{n // 20 % 20}/part_{n % 20 // 5}"
        for k, phase in enumerate(("forward", "backward")):
            i = 2 * n + k
            yield {
                "name": f"{path}/op_{n % 5}_{kinds[n % 5]}",
                "phase": phase,
                "energy_j": float(energy_j[i]),
                "busy_s": float(busy_s[i]),
                "uncertainty_j": float(energy_j[i] * wide[i]),
                "basis": "prior",
                "count": 20.0,
            }


def test_twenty_thousand_names(visit, by_hand):
    found = with_rows(by_hand, list(many_rows(20_000)))
    text = html_page([found])
    assert len(text.encode()) < 2_000_000
    page = visit(text)
    rows = json_rows(found.to_json())
    assert page.locator("#table").get_attribute("aria-rowcount") == "40001"
    assert page.locator(".line").count() < 100  # only what is in sight
    for path in ("model", "model/stage_3", "model/stage_3/block_7", "model/stage_3/block_7/layer_11"):
        box(page, path).click()
        check_boxes(page, rows, path)
    page.click('[data-set="level"][data-value="traced"]')
    check_boxes(page, json_rows(found.to_json(), "traced"), path)
    page.fill("#search", "stage_2 block_4 softmax")
    assert page.locator("#found li").count() == 30
    page.evaluate("setState({path: null, level: 'step'})")
    page.locator("#table").evaluate("e => { e.scrollTop = e.scrollHeight; drawLines(); }")
    assert page.locator("#balance .missing").count() == 0
    last = page.locator(".line").last
    assert attribute(last, "energy_j") == min(row["energy_j"] for row in rows)


def test_a_wide_level_is_folded_and_opens(visit, by_hand):
    rows = [{"name": f"all/op_{i}", "energy_j": 100.0 / (i + 1)} for i in range(300)]
    found = with_rows(by_hand, rows)
    page = visit(html_page([found]), "#path=all")
    assert len(boxes(page)) <= 49
    check_boxes(page, json_rows(found.to_json()), "all")
    page.click(".box.rest")
    assert len(boxes(page)) == 300
    check_boxes(page, json_rows(found.to_json()), "all")


def test_numbers_come_through_exactly(visit, by_hand):
    """Whatever is packed, the script reads: the same bits, and not a number where it was none."""
    random = np.random.default_rng(1)
    bits = random.integers(0, 2**64, 1000, dtype=np.uint64).view(np.float64)
    given = {
        "bits": bits[np.isfinite(bits)],
        "signs": np.array([0.0, -0.0, -1.5, 5e-324, 1.7976931348623157e308]),
        "unknown": np.array([1.0, np.nan, 3.0]),
        "ns": random.integers(0, 10**12, 500) / 1e9,
        "times": np.cumsum(random.integers(0, 10**10, 500)),
        "small": np.arange(5),
        "wide": np.array([-(2**40), 2**52, 0]),
        "none": np.zeros(0),
    }
    page = visit(html_page([by_hand]))
    read = """async text => {
      const said = values => Array.from(values, v => Object.is(v, -0) ? "-0" : String(v));
      return Object.fromEntries(Object.entries(await unpack(text)).map(([k, values]) => [k, said(values)]));
    }"""
    found = page.evaluate(read, pack(given))
    for name, values in given.items():
        seen = np.array([float(text.replace("NaN", "nan")) for text in found[name]])
        assert seen.astype(np.float64).tobytes() == values.astype(np.float64).tobytes(), name


def test_a_long_trace_is_drawn_from_few_points():
    random = np.random.default_rng(2)
    edges_ns = np.concatenate([[0], np.cumsum(random.integers(1, 9, 200_000))]) * 1_000_000
    power_w = random.random(200_000) * 300
    kept = random.random(200_000) > 0.1  # the rest is not known
    trace = PowerTrace(edges_ns[:-1][kept], edges_ns[1:][kept], power_w[kept])
    end_ns = int(edges_ns[-1])
    window = (end_ns // 4, end_ns // 4 + 3_000_000_000)
    points = power_columns(trace, 0, end_ns, [window], 4000)
    start_ns, stop_ns = points["start_ns"], points["end_ns"]
    assert start_ns.size <= 4000
    assert (start_ns[1:] >= stop_ns[:-1]).all()
    for i in random.integers(0, start_ns.size, 200):
        begin, end = int(start_ns[i]), int(stop_ns[i])
        here = trace.power_w[(trace.end_ns > begin) & (trace.start_ns < end)]
        assert points["low_w"][i] == np.float32(here.min())
        assert points["high_w"][i] == np.float32(here.max())
        mean_w = trace.energy_j(begin, end) / trace.covered_s(begin, end)
        assert points["mean_w"][i] == pytest.approx(mean_w, rel=1e-6)
    inside = (start_ns >= window[0]) & (stop_ns <= window[1])
    # In the window as it was measured.
    assert np.array_equal(points["low_w"][inside], points["high_w"][inside])
    exact = within(trace, [window])
    assert np.array_equal(start_ns[inside], exact.start_ns)


def test_the_layer_at_work(by_hand):
    """What began later has the floor; an operation in no layer stands for itself."""
    tree = tree_of(by_hand.footprint, None)
    found = layer_columns(by_hand.recording.events, "gpu:0", tree, recordings.T0, 1000)
    paths = [tree.paths[node] for node in found["node"]]
    phases = [found["phases"][code] for code in found["phase"]]
    begin_ms, long_ms = found["start_ns"] / 1e6 - 1300, found["length_ns"] / 1e6
    step = [
        ("net/layer_0", "forward", 0, 5),
        ("copy", None, 5, 5),
        ("net/layer_1", "forward", 10, 5),
        ("copy", None, 15, 5),
        ("net/layer_2", "forward", 20, 10),
        ("net/layer_0", "backward", 40, 15),
        ("net/layer_1", "backward", 55, 15),
        ("net/layer_2", "backward", 70, 15),
        (recordings.ODD.rpartition("/")[0], "other", 90, 0.5),
    ]
    wanted = [(path, phase, 100 * i + at, long) for i in range(4) for path, phase, at, long in step]
    assert list(zip(paths, phases, begin_ms.tolist(), long_ms.tolist(), strict=True)) == wanted
    few = layer_columns(by_hand.recording.events, "gpu:0", tree, recordings.T0, 5)
    assert few["left_out"] == len(wanted) - 5
    assert np.array_equal(few["start_ns"], found["start_ns"][:5])
    assert np.array_equal(few["length_ns"], found["length_ns"][:5])


def test_power_is_drawn_where_it_was(visit, by_hand):
    """10 W in the first second; then 200 W and 100 W in turns: the middle of three lines is at 100 W."""
    page = visit(html_page([by_hand]))
    heights = page.evaluate("""() => {
      const canvas = at("power");
      const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, 88);
      const accent = token("accent").match(/[0-9a-f]{2}/gi).map(text => parseInt(text, 16));
      const lowest = s => {
        const x = Math.round(54 + (s / 4) * (canvas.clientWidth - 64));
        const near = y => accent.every((value, i) => Math.abs(data[4 * (y * width + x) + i] - value) < 40);
        for (let y = 87; y >= 0; y--) if (near(y)) return y;
      };
      return [0.5, 1.05, 1.15].map(lowest);
    }""")
    top, height = 12, 74
    assert heights == pytest.approx([top + height * (1 - w / 200) for w in (10, 200, 100)], abs=2)


def test_the_title_is_text(visit, tmp_path):
    run = Run.open(recordings.make(tmp_path / "<b>{{data}}<title>&amp;"))
    assert visit(html_page([run])).title() == f"{run.path.name} – Smaragdine"


def test_more_than_two_runs(by_hand, tmp_path):
    with pytest.raises(UserError, match="3 runs"):
        write_html([by_hand] * 3, tmp_path / "three.html")


def test_written_whole_or_not_at_all(by_hand, tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        write_html([by_hand], tmp_path / "nowhere" / "report.html")
    write_html([by_hand], tmp_path / "report.html")
    write_html([by_hand], tmp_path / "report.html")
    assert sorted(path.name for path in tmp_path.glob("*.html")) == ["report.html"]
