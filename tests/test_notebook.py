"""Recordings, footprints and diagrams in a notebook, and `%%energy`, in a real IPython and a real kernel."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import smaragdine as package
from footprints import footprint
from recordings import ODD, make
from smaragdine.accounting.diagram import diagram
from smaragdine.accounting.run import Run
from smaragdine.report.notebook import html
from smaragdine.units import joules

VOID = {"wbr", "br", "hr"}


class Page(HTMLParser):
    """The cells of all tables, and a check that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("notebook") / "run")


def test_a_footprint_shows_itself(run: Path) -> None:
    made = Run.open(run).step
    assert made is not None
    page = Page(made._repr_html_() or "")
    by_name = {(row[0], row[2]): row for row in page.rows if len(row) == 8}
    for device, total in made.devices.items():
        for row in made.device_rows(device).to_pylist():
            if row["name"] == ODD:
                continue
            cells = by_name[row["name"], row["phase"] or "–"]
            if cells[3] != joules(row["energy_j"]):
                continue  # the same name on another device
            assert cells[5] == f"{row['energy_j'] / total.total_j:.1%}"
    totals = [row[3] for row in page.rows if row[0] == "total"]
    assert totals == [joules(total.total_j) for total in made.devices.values()]
    assert [row[0] for row in page.rows if row[1:2] == [""] and row[2] == "phase"] == [
        "gpu:0",
        "cpu:0, estimated",
    ]
    assert "script" not in page.tags
    assert any("\\n<script>" in row[0] for row in page.rows)


def test_long_footprints_are_cut_and_add_up() -> None:
    made = footprint([{"name": f"n{i}", "energy_j": float(i)} for i in range(1, 31)], idle_j=35.0)
    page = Page(html(made))
    assert [row[0] for row in page.rows[1:11]] == [f"n{i}" for i in range(30, 20, -1)]
    assert [row[:1] + row[3:4] for row in page.rows[11:]] == [
        ["… 20 more names", "210 J"],
        ["(idle)", "35.0 J"],
        ["total", "500 J"],
    ]


def test_a_diagram_shows_itself(run: Path) -> None:
    made = Run.open(run).step
    assert made is not None
    text = diagram(made)._repr_html_() or ""
    Page(text)
    assert text.count("<details") > 2
    assert re.search(r"<b>layer_1</b> [\d.]+ m?J [\d.]+%", text)
    assert f"{joules(made.devices['gpu:0'].idle_j)} of {joules(made.devices['gpu:0'].total_j)} idle" in text
    wide = footprint([{"name": f"a/b{i}/c/d/e/f", "energy_j": 1.0} for i in range(100)])
    assert len(html(diagram(wide))) < 100_000


def test_a_recording_shows_itself(run: Path) -> None:
    page = Page(package.open(run)._repr_html_() or "")
    devices = {row[0]: row[1:] for row in page.rows if len(row) == 6}
    assert devices["gpu:0"] == ["460 J", "460 J", "115 W", "200 W", "measured"]
    assert devices["sum"][:2] == ["460 J", "620 J"]  # whose the socket's was nobody recorded
    # Layers that are alike stand as one.
    assert any(row[0] == "net/layer_*/MatMul" for row in page.rows)


def test_recordings_without_power_or_events_show_what_they_have(tmp_path: Path) -> None:
    bare = html(package.open(make(tmp_path / "bare", events=False)))
    assert "460 J" in bare
    assert "nothing was traced" in bare
    dark = html(package.open(make(tmp_path / "dark", power=False)))
    Page(dark)
    assert "no power of any device" in dark
    assert "0 J" not in dark


# %%energy


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    made = interactive.InteractiveShell()
    monkeypatch.setattr(interactive.InteractiveShell, "_instance", made)
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: made)
    assert made.run_cell("%load_ext smaragdine").success
    return made


def test_the_magic_records_a_cell(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cell = "import time\nend = time.monotonic() + 0.3\nwhile time.monotonic() < end: sum(range(1000))\n40 + 2"
    assert shell.run_cell(f"%%energy -o one\n{cell}").success
    out = capsys.readouterr().out
    assert re.search(r"\b42\b", out)
    assert "cpu:0" in out
    measured = shell.user_ns["_energy"]
    assert measured.recording.path.name == "one"
    assert measured.run.summary.duration_s >= 0.3
    assert measured.footprint is None
    assert "cpu:0" in measured._repr_html_()
    assert shell.user_ns["end"] > 0, "names of the cell are the notebook's"


@pytest.mark.parametrize("option", ["--no-trace", "--steps 3"])
def test_a_failing_cell_fails_and_is_recorded(
    shell: Any, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert not shell.run_cell(f"%%energy {option} -o two\n1 / 0").success
    said = capsys.readouterr()
    assert (said.out + said.err).count("division by zero") == 1
    recording = shell.user_ns["_energy"].recording
    assert (recording.path.name, recording.status) == ("two", "failed")


def test_mistakes_are_one_line(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make(Path("taken").absolute())
    for line, word in (("--bogus", "--bogus"), ("-o taken", "taken"), ("--steps many", "--steps")):
        assert not shell.run_cell(f"%%energy {line}\nran = True").success
        said = capsys.readouterr()
        lines = (said.out + said.err).strip().splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("UsageError: ")
        assert word in lines[0]
    assert "ran" not in shell.user_ns


def test_in_a_kernel_steps_are_traced_and_shown(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("torch")
    train = "for _ in range(30):\n    opt.zero_grad(); net(x).square().mean().backward(); opt.step()"
    cells = [
        "%load_ext smaragdine\nimport torch, smaragdine\ntorch.set_num_threads(1)",
        "net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())\n"
        "opt = torch.optim.SGD(net.parameters(), 0.01); x = torch.randn(64, 64)",
        f"%%energy --steps 5 --skip 2\n{train}",
        "print(sorted(set(_energy.footprint.rows['name'].to_pylist())))",
        "smaragdine.open(_energy.recording.path)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [out.data["text/html"] for cell in notebook.cells for out in cell.outputs if "data" in out]
    assert len(shown) == 2
    for text in shown:
        page = Page(text)
        assert any(row[0].startswith("Sequential/0/") for row in page.rows)
    (printed,) = notebook.cells[3].outputs
    assert "Sequential/0/addmm" in printed.text
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-cell-1")
