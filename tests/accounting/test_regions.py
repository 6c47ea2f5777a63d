"""`smaragdine.region`: what the program names is measured every time it runs."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_summary import T0, S, channel, mark, record, steady

import smaragdine as package
from cli import smaragdine, write_script
from nvml_fake import GpuSpec, energy_j, nvml_environment
from smaragdine.accounting.run import Run
from smaragdine.accounting.spans import mark_spans, region_spans
from smaragdine.accounting.summary import to_json
from smaragdine.api import hook_module, summarise
from smaragdine.arrow import pc
from smaragdine.recording.marks import marks_table, read_spool
from smaragdine.report.terminal import run_tables


def region(name: str, begin: float, end: float | None, number: int, **who: Any) -> list[dict[str, Any]]:
    """Marks as the program makes them; seconds since the beginning of the recording."""
    edges = [("region_begin", begin), *([("region_end", end)] if end is not None else [])]
    return [{**mark(what, t, number, source="region", **who), "detail": name} for what, t in edges]


def test_each_time_has_the_energy_of_its_own_seconds(tmp_path: Path) -> None:
    """100 W on one device, 20 W on another until it is lost: both are straight lines."""
    marks = [
        *region("load", 1.0, 1.5, 0),
        *region("train", 1.5, 4.0, 1),
        *region("load", 4.0 + 1e-6, 4.25, 2),
        *region("late", 7.0, 7.5, 3),
        *region("never ends", 8.0, None, 4),
    ]
    readings = [(channel("gpu:0"), steady(100)), (channel("cpu:0"), steady(20, end=5))]
    found = {each.name: each for each in summarise(record(tmp_path, readings, marks)).regions}
    assert list(found) == ["load", "train", "late"]
    assert found["load"].energies_j["gpu:0"] == pytest.approx((50.0, 24.9999))
    assert found["load"].total_j == {"gpu:0": pytest.approx(74.9999), "cpu:0": pytest.approx(14.99998)}
    assert found["load"].duration_s == pytest.approx(0.749999)
    assert found["train"].energies_j == {
        "gpu:0": (pytest.approx(250.0),),
        "cpu:0": (pytest.approx(50.0),),
    }
    assert found["late"].energies_j["cpu:0"] == (None,)
    assert found["late"].total_j["cpu:0"] is None


def test_what_overlaps_counts_once_in_the_sum(tmp_path: Path) -> None:
    """Of two ranks, of two threads of one process, and of a function that calls itself."""
    marks = [
        *region("ranks", 1.0, 2.0, 0, rank=0, pid=1),
        *region("ranks", 1.5, 2.5, 0, rank=1, pid=2),
        *region("threads", 3.0, 4.0, 1),
        *region("threads", 3.5, 4.5, 2),
        *region("itself", 5.0, 6.0, 3),
        *region("itself", 5.2, 5.4, 4),
        *region("itself", 6.5, 7.0, 5),
    ]
    marks.sort(key=lambda each: each["t_ns"])
    summary = summarise(record(tmp_path, [(channel("gpu:0"), steady(100))], marks))
    spans = {each.name: [((b - T0) / S, (e - T0) / S) for b, e in each.spans_ns] for each in summary.regions}
    assert spans == {
        "ranks": [(1.0, 2.0), (1.5, 2.5)],
        "threads": [(3.0, 4.0), (3.5, 4.5)],
        "itself": [(5.0, 6.0), (pytest.approx(5.2), pytest.approx(5.4)), (6.5, 7.0)],
    }
    assert [each.total_j["gpu:0"] for each in summary.regions] == [pytest.approx(150.0)] * 3
    assert [each.duration_s for each in summary.regions] == [pytest.approx(1.5)] * 3
    assert summary.regions[2].energies_j["gpu:0"] == pytest.approx((100.0, 20.0, 50.0))


def test_steps_and_epochs_do_not_notice() -> None:
    plain = [
        *(mark("step_end", 1.0 + n, n, source="torch") for n in range(5)),
        mark("epoch_begin", 0.5, 0),
        mark("epoch_end", 5.5, 0),
    ]
    inside = [
        *region("step", 1.2, 1.4, 0),
        *region("epoch", 1.9, 2.1, 1),
        *region("train", 3.5, 3.6, 2),
    ]
    with_regions = marks_table(sorted([*plain, *inside], key=lambda each: each["t_ns"]))
    assert mark_spans(with_regions) == mark_spans(marks_table(sorted(plain, key=lambda each: each["t_ns"])))
    assert [span.name for span in region_spans(with_regions)] == ["step", "epoch", "train"]


def test_a_sensor_that_looks_rarely_is_said(tmp_path: Path) -> None:
    marks = [*region("short", 1.0, 1.01, 0), *region("long", 2.0, 3.0, 1)]
    readings = [(channel("gpu:0", period_ms=20.0), steady(100)), (channel("cpu:0"), steady(20))]
    marks += [each for n in range(50) for each in region(f"{n:03}" * 30, 4 + n / 10, 4.01 + n / 10, 5 + n)]
    said = [line for line in summarise(record(tmp_path, readings, marks)).problems if "is shorter" in line]
    assert len(said) == 1
    assert said[0].startswith(
        "power of gpu:0 is known every 20.0 ms, and one time of short (10.0 ms), 000000"
    )
    assert said[0].endswith(", 48 more is shorter: a sum of many is better")
    assert len(said[0]) < 250


def test_show_has_a_table_and_json(tmp_path: Path) -> None:
    marks = [each for n in range(4) for each in region("load [x]", 1.0 + n, 1.5 + n, n)]
    marks += [each for n in range(25) for each in region(f"r{n}", 6 + n / 10, 6.05 + n / 10, 10 + n)]
    summary = summarise(record(tmp_path, [(channel("gpu:0"), steady(100))], marks))
    out = io.StringIO()
    Console(file=out, width=120).print(run_tables(summary))
    lines = out.getvalue().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("region"))
    assert lines[at].split() == ["region", "times", "time", "program", "all", "gpu:0"]
    assert lines[at + 1].split() == ["load", "[x]", "4", "2.00", "s", "200", "J", "200", "J"]
    assert lines[at + 2].split()[:2] == ["each", "500"]
    assert any(line.startswith("… 6 shorter ones") for line in lines)
    said = json.loads(json.dumps(to_json(summary)))["regions"]
    assert len(said) == 26
    assert (said[0]["name"], said[0]["count"], said[0]["duration_s"]) == ("load [x]", 4, pytest.approx(2.0))
    assert said[0]["energy_j"] == {"gpu:0": pytest.approx(200.0)}
    assert said[0]["energies_j"] == {"gpu:0": [pytest.approx(50.0)] * 4}


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Path]:
    """Marks of this process go here."""
    (tmp_path / "spool").mkdir()
    marks = hook_module("marks")
    marks.set_spool(str(tmp_path / "spool"))
    yield tmp_path
    marks.set_spool(None)


def test_blocks_functions_and_coroutines(spool: Path) -> None:
    @package.region("function")
    def function(n: int, *, more: int = 0) -> int:
        """What it does."""
        return n if not more else function(n + 1, more=more - 1)

    @package.region("coroutine", sync=True)
    async def coroutine(n: int) -> int:
        await asyncio.sleep(0.01)
        return n

    assert function(1, more=1) == 2
    assert function.__doc__ == "What it does."
    assert asyncio.run(coroutine(3)) == 3
    with pytest.raises(KeyError), package.region("fails"):
        raise KeyError
    again = package.region("again")
    with again, again:
        pass
    found = region_spans(read_spool(spool))
    names = [span.name for span in found]
    assert sorted(names) == ["again", "again", "coroutine", "fails", "function", "function"]
    assert next(span.end_ns - span.begin_ns for span in found if span.name == "coroutine") >= 10_000_000


def test_names_cannot_spoil_the_terminal(tmp_path: Path) -> None:
    marks = [*region("\x1b[31mred\n", 1.0, 1.5, 0), *region("long " * 600, 2.0, 2.001, 1)]
    readings = [(channel("gpu:0", period_ms=20.0), steady(100))]
    out = io.StringIO()
    Console(file=out, width=100).print(run_tables(summarise(record(tmp_path, readings, marks))))
    assert "\x1b" not in out.getvalue()
    lines = out.getvalue().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("region"))
    assert lines[at + 1].split() == [r"\x1b[31mred\n", "1", "500", "ms", "50.0", "J", "50.0", "J"]
    assert lines[at + 2].split()[-7:] == ["1", "1.00", "ms", "100", "mJ", "100", "mJ"]
    assert len(out.getvalue()) < 2000


def test_torch_compile_does_not_see_it() -> None:
    torch = pytest.importorskip("torch")
    graphs: list[int] = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(1)
        return graph.forward

    @package.region("decorated")
    def decorated(x: Any) -> Any:
        return x + 1

    def step(x: Any) -> Any:
        with package.region("inside", sync=True):
            x = decorated(x)
        return x.sin()

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    assert compiled(torch.zeros(2)).tolist() == pytest.approx([0.8414709848] * 2)
    assert graphs == [1]


def test_a_generator_is_refused_in_one_line() -> None:
    with pytest.raises(TypeError, match="batches runs in pieces"):

        @package.region("batches")
        def batches() -> Iterator[int]:  # pyright: ignore[reportUnusedFunction]
            yield 1


def test_nobody_records() -> None:
    with package.region("x", sync=True):
        pass


REGIONS = """
import random, time
import smaragdine

dice = random.Random(7)
for _ in range(25):
    with smaragdine.region("short"):
        time.sleep(dice.uniform(0.05, 0.15))
    time.sleep(dice.uniform(0.0, 0.05))
with smaragdine.region("long"):
    time.sleep(1.0)
"""


def test_a_gpu_s_regions_have_its_energy(tmp_path: Path) -> None:
    """Of a GPU that is at 300 W for a quarter of every 0.7 s: each time within a fraction of a sample's."""
    gpu = GpuSpec(low_w=60, high_w=300, period_ms=700, duty=0.25)
    environment = nvml_environment(tmp_path, [gpu])
    script = write_script(tmp_path / "train.py", REGIONS)
    env = {key: environment[key] for key in ("LD_LIBRARY_PATH", "FAKE_NVML")}
    done = smaragdine("run", "-o", tmp_path / "run", script, env=env)
    assert done.returncode == 0, done.stderr
    said = json.loads(smaragdine("show", tmp_path / "run", "--json").stdout)["regions"]
    assert [(each["name"], each["count"]) for each in said] == [("short", 25), ("long", 1)]
    for each in said:
        true_j = [energy_j(gpu, begin, end) for begin, end in each["spans_ns"]]
        # Power may change anywhere in the samples of 20 ms at either end.
        assert each["energies_j"]["gpu:0"] == pytest.approx(true_j, abs=2 * 0.020 * (300 - 60))
        assert each["energy_j"]["gpu:0"] == pytest.approx(sum(true_j), rel=0.03)
    done = smaragdine("export", tmp_path / "run", "--to", "csv", "-o", tmp_path / "csv")
    with open(tmp_path / "csv" / "regions.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["device"] == "gpu:0"]
    exported = [float(row["energy_j"]) for row in rows if row["name"] == "short"]
    assert exported == pytest.approx(said[0]["energies_j"]["gpu:0"])


def test_any_order_of_marks_adds_up(tmp_path: Path) -> None:
    """Times that do not overlap, in any order of their names: their sum is that of the time they cover."""
    dice = random.Random(3)
    edges = sorted(dice.uniform(0.1, 9.9) for _ in range(80))
    marks: list[dict[str, Any]] = []
    for number, (begin, end) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
        marks += region(dice.choice("abc"), begin, end, number)
    found = summarise(record(tmp_path, [(channel("gpu:0"), steady(100))], marks)).regions
    covered_s = sum(end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True))
    assert sum(each.duration_s for each in found) == pytest.approx(covered_s)
    assert sum(each.total_j["gpu:0"] or 0 for each in found) == pytest.approx(100 * covered_s)


ODD = """
import smaragdine


class Slow:
    def __str__(self):
        raise RuntimeError("nobody asked you")

    __index__ = __repr__ = __str__


smaragdine.mark(None)
smaragdine.mark(7, index=2.0)
smaragdine.mark(Slow(), Slow())
smaragdine.mark("x" * 100_000, 2**70)
smaragdine.mark("two\\nlines", "three")
smaragdine.mark("hook_error")
smaragdine.mark("sensor_lost")
for name in (None, 7, Slow(), "y" * 100_000):
    with smaragdine.region(name):
        pass
smaragdine.region("ended").__exit__(None, None, None)
smaragdine.region("begun").__enter__()
smaragdine.mark("epoch_begin", 0)
smaragdine.mark("epoch_begin", 1)
smaragdine.mark("epoch_end", 1)
smaragdine.mark("evaluate_end")


@smaragdine.region
def bare(x):
    return x + 1


class Model:
    @smaragdine.region
    def forward(self, x):
        return bare(x) + 1


print(Model().forward(1))
"""


def test_odd_marks_never_fail_and_are_said_once(tmp_path: Path) -> None:
    script = tmp_path / "odd.py"
    script.write_text(ODD)
    folder = tmp_path / "run"
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (alone.returncode, alone.stdout, alone.stderr) == (0, "3\n", "")
    done = smaragdine("run", "-o", folder, "--trace", "off", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"
    found = Run.open(folder)
    own = found.recording.marks.filter(pc.equal(found.recording.marks["source"].fill_null(""), "user"))
    rows = [(row["name"], row["index"]) for row in own.to_pylist()]
    assert rows[:5] == [
        ("None", None),
        ("7", 2),
        ("<Slow>", None),
        (f"{'x' * 199}…", None),
        ("two\nlines", None),
    ]
    assert [region.name for region in found.summary.regions] == [
        "None",
        "7",
        "<Slow>",
        f"{'y' * 199}…",
        "Model.forward",
        "bare",
    ]
    said = found.summary.problems
    for line in (
        "mark: a name is text, not NoneType: it is called None",
        "mark('<Slow>'): an index is a whole number of 64 bits, and this one is none; it was left out",
        "region: a name is text, not NoneType: it is called None",
        "region 'ended' ended more often than it began",
        "region begun began once and never ended: that counts nowhere",
        "epoch began once and never ended: that counts nowhere",
        "evaluate ended once and never began: that counts nowhere",
    ):
        assert said.count(line) == 1, said
    assert len([line for line in said if "name is text" in line]) == 2  # once of marks, once of regions
    assert not any(line.startswith(("lost:", "marks may be")) for line in said)
