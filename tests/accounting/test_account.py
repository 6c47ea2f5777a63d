"""`smaragdine account` on any trace and any power log, and the same from Python: the figures to the letter,
against the definition in rational arithmetic on raw rows."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import math
import os
import resource
import statistics
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import smaragdine as package
from cli import smaragdine
from smaragdine.accounting.device_power import SensorFacts
from smaragdine.accounting.footprint import Footprint, load, to_json
from smaragdine.errors import UserError

MS = 1_000_000
ROW_KEYS = {"name", "phase", "energy_j", "busy_s", "power_w", "count", "uncertainty_j", "basis"}
DEVICE_KEYS = {"total_j", "idle_j", "covered_s", "missing_s", "rows"}
BASES = {"resolution", "repetition", "calibration", "prior"}


class Event(NamedTuple):
    name: str
    device: str
    start_ns: int
    duration_ns: int
    lane: str | None = None

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class Reading(NamedTuple):
    device: str
    t_ns: int
    power_w: float


def columns(rows: Sequence[Any]) -> dict[str, Any]:
    """Rows as a dict of numpy arrays."""
    return {
        name: np.array(values, dtype=np.int64 if name.endswith("_ns") else None)
        if name != "lane"
        else np.array(values, dtype=object)
        for name, values in zip(rows[0]._fields, zip(*rows, strict=True), strict=True)
    }


# The definition, on raw rows


def stretches(log: Sequence[Reading], hold_s: Fraction | None) -> list[tuple[int, int, Fraction]]:
    """A bare log holds each value until the next, the last one for the median spacing."""
    readings = sorted({(row.t_ns, Fraction(row.power_w)) for row in log})
    spacings = [b - a for (a, _), (b, _) in itertools.pairwise(readings)]
    if not spacings:
        return []
    median = Fraction(statistics.median([Fraction(s) for s in spacings]))
    hold_ns = 10 * median if hold_s is None else hold_s * 10**9
    ends = [*(t for t, _ in readings[1:]), readings[-1][0] + math.floor(median)]
    return [(t, end, w) for (t, w), end in zip(readings, ends, strict=True) if end - t <= hold_ns]


def pays(events: Sequence[Event], i: int, at: Fraction) -> bool:
    """Runs at that time, and nothing of its own lane that lies inside it does."""
    mine = events[i]
    if not mine.start_ns <= at < mine.end_ns:
        return False
    for j, other in enumerate(events):
        inside = mine.start_ns <= other.start_ns and other.end_ns <= mine.end_ns
        same = (mine.start_ns, mine.end_ns) == (other.start_ns, other.end_ns)
        if (
            j != i
            and mine.lane is not None
            and mine.lane == other.lane
            and inside
            and (not same or j > i)
            and other.start_ns <= at < other.end_ns
        ):
            return False
    return True


def expected(events: Sequence[Event], log: Sequence[Reading], hold_s: Fraction | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for device in dict.fromkeys(row.device for row in log):
        mine = [event for event in events if event.device == device]
        known = stretches([row for row in log if row.device == device], hold_s)
        if not known:
            continue  # what it used is not 0 J
        edges = {t for begin, end, _ in known for t in (begin, end)}
        edges |= {t for event in mine for t in (event.start_ns, event.end_ns)}
        cuts = sorted(edges)
        energy_j: dict[str, Fraction] = defaultdict(Fraction)
        paid_s: dict[str, Fraction] = defaultdict(Fraction)
        idle_j = Fraction(0)
        for begin, end in itertools.pairwise(cuts):
            middle = Fraction(begin + end, 2)
            power_w = next((w for b, e, w in known if b <= middle < e), Fraction(0))
            paying = [i for i in range(len(mine)) if pays(mine, i, middle)]
            for i in paying:
                energy_j[mine[i].name] += power_w * (end - begin) / 10**9 / len(paying)
                paid_s[mine[i].name] += Fraction(end - begin, 10**9)
            if not paying:
                idle_j += power_w * (end - begin) / 10**9
        covered_ns = sum(end - begin for begin, end, _ in known)
        found[device] = {
            "idle_j": idle_j,
            "total_j": idle_j + sum(energy_j.values()),
            "covered_s": Fraction(covered_ns, 10**9),
            "missing_s": Fraction(cuts[-1] - cuts[0] - covered_ns if cuts else 0, 10**9),
            "rows": {
                name: (
                    energy_j[name],
                    paid_s[name],
                    sum(e.name == name for e in mine),
                )
                for name in {event.name for event in mine}
            },
        }
    return found


def nothing_in_common(events: Sequence[Event], log: Sequence[Reading], hold_s: Fraction | None) -> bool:
    """No device, or no time: there is nothing to share."""
    of = {
        device: stretches([row for row in log if row.device == device], hold_s)
        for device in {event.device for event in events}
    }
    known = [stretch for found in of.values() for stretch in found]
    if not known:
        return True
    first_ns, last_ns = min(e.start_ns for e in events), max(e.end_ns for e in events)
    return min(begin for begin, *_ in known) > last_ns or max(end for _, end, _ in known) < first_ns


def check(found: dict[str, Any], exact: dict[str, Any]) -> None:
    assert found["devices"].keys() == exact.keys()
    for device, figures in found["devices"].items():
        true = exact[device]
        for name in ("total_j", "idle_j", "covered_s", "missing_s"):
            assert figures[name] == pytest.approx(float(true[name]), rel=1e-9, abs=1e-21), (device, name)
        assert {row["name"] for row in figures["rows"]} == true["rows"].keys()
        for row in figures["rows"]:
            energy_j, busy_s, count = true["rows"][row["name"]]
            assert row["energy_j"] == pytest.approx(float(energy_j), rel=1e-9, abs=1e-21), row["name"]
            assert row["busy_s"] == pytest.approx(float(busy_s), rel=1e-12)
            assert row["count"] == count


def check_contract(found: dict[str, Any]) -> None:
    """What the JSON promises, whatever the input."""
    json.dumps(found, allow_nan=False)
    for figures in found["devices"].values():
        assert figures.keys() >= DEVICE_KEYS
        rows = figures["rows"]
        assert all(row.keys() >= ROW_KEYS for row in rows)
        energies = [row["energy_j"] for row in rows]
        assert energies == sorted(energies, reverse=True)
        assert math.fsum([*energies, figures["idle_j"]]) == pytest.approx(figures["total_j"], rel=1e-9)
        for row in rows:
            assert type(row["count"]) is int
            assert row["count"] > 0
            if row["uncertainty_j"] is None:
                assert (row["energy_j"], figures["covered_s"]) == (0, 0)
            else:
                assert row["uncertainty_j"] >= 0
            assert row["basis"] in BASES
            if row["busy_s"] == 0:
                assert row["power_w"] is None
            else:
                assert row["power_w"] == pytest.approx(row["energy_j"] / row["busy_s"], rel=1e-12)


TIMES = st.integers(0, 40)
EVENTS = st.lists(
    st.builds(
        Event,
        st.sampled_from(["a", "b", "c/d"]),
        st.sampled_from(["gpu:0", "cpu:0"]),
        TIMES,
        st.integers(0, 20),
        st.sampled_from([None, "s1", "s2"]),
    ),
    min_size=1,
    max_size=8,
)
LOG = st.lists(
    st.builds(
        Reading,
        st.sampled_from(["gpu:0", "cpu:0", "gpu:1"]),
        st.integers(0, 60),
        st.integers(0, 400).map(lambda quarter_w: quarter_w / 4),
    ),
    min_size=1,
    max_size=12,
)
HOLDS = st.none() | st.integers(1, 30).map(lambda n: Fraction(n, 10**9))


@settings(max_examples=100, deadline=None)
@given(EVENTS, LOG, HOLDS, st.sampled_from([0, 1_790_000_000_123_456_789]), st.sampled_from([1, 1000, 10**9]))
def test_agrees_with_the_definition(
    events: list[Event], log: list[Reading], hold_s: Fraction | None, begin_ns: int, scale: int
) -> None:
    assume(len({(row.device, row.t_ns) for row in log}) == len(set(log)))
    assume({event.device for event in events} & {row.device for row in log})
    events = [
        e._replace(start_ns=begin_ns + e.start_ns * scale, duration_ns=e.duration_ns * scale) for e in events
    ]
    log = [row._replace(t_ns=begin_ns + row.t_ns * scale) for row in log]
    hold_s = None if hold_s is None else hold_s * scale
    if nothing_in_common(events, log, hold_s):
        with pytest.raises(UserError):
            package.account(columns(events), columns(log), hold_s=None if hold_s is None else float(hold_s))
        return
    exact = expected(events, log, hold_s)
    as_arrays = columns(events), columns(log)
    footprints = [
        package.account(trace, power, hold_s=None if hold_s is None else float(hold_s))
        for trace, power in (
            as_arrays,
            [pa.table(data) for data in as_arrays],
            [pd.DataFrame(data) for data in as_arrays],
        )
    ]
    found = [to_json(footprint) for footprint in footprints]
    check(found[0], exact)
    check_contract(found[0])
    assert found[1] == found[2] == found[0]
    assert footprints[0].without_power == {
        device: sum(event.device == device for event in events)
        for device in {event.device for event in events} - exact.keys()
    }


@pytest.mark.parametrize("hold_s", [0.07, 8.2, 1.001, 33.3])
def test_a_gap_as_long_as_hold_s_is_no_gap(hold_s: float) -> None:
    gap_ns = round(hold_s * 1e9)
    log = [Reading("gpu:0", t_ns, 2.0) for t_ns in (0, gap_ns, gap_ns + 1)]
    found = package.account(columns([Event("a", "gpu:0", 0, gap_ns)]), columns(log), hold_s=hold_s)
    assert found.devices["gpu:0"].missing_s == 0
    later = [*log, Reading("gpu:0", gap_ns + 2, 2.0)]
    found = package.account(
        columns([Event("a", "gpu:0", 0, gap_ns + 1)]), columns(later), hold_s=hold_s * 0.999
    )
    assert found.devices["gpu:0"].missing_s == pytest.approx(gap_ns / 1e9)


def test_lanes() -> None:
    """A parent pays only while no child of its own device and lane runs; null lanes are all concurrent."""
    log = [Reading(device, t_ns, 6.0) for device in ("gpu:0", "gpu:1") for t_ns in (0, 50 * MS)]
    cases: list[tuple[str | None, str | None, str, float, float]] = [
        ("s", "s", "gpu:0", 0.36, 0.24),
        ("s", "t", "gpu:0", 0.48, 0.12),
        (None, None, "gpu:0", 0.48, 0.12),
        ("s", None, "gpu:0", 0.48, 0.12),
        ("s", "s", "gpu:1", 0.6, 0.24),
    ]
    for outer, inner, device, parent_j, child_j in cases:
        trace = [
            Event("parent", "gpu:0", 0, 100 * MS, outer),
            Event("child", device, 30 * MS, 40 * MS, inner),
        ]
        found = package.account(columns(trace), columns(log))
        energies = dict(zip(found.rows["name"].to_pylist(), found.rows["energy_j"].to_pylist(), strict=True))
        assert energies == {"parent": pytest.approx(parent_j), "child": pytest.approx(child_j)}


def test_steps_of_any_number_are_steps() -> None:
    log = columns([Reading("gpu:0", t_ns, 1.0) for t_ns in (0, 10, 20, 30)])
    events = columns([Event(name, "gpu:0", 10 * i, 10) for i, name in enumerate("abab")])
    for steps in ([0, 0, 1, 1], [7, 7, -3, -3], [0, 0, 2**62, 2**62], [-(2**63), -(2**63), 2**63 - 1, 0]):
        found = package.account({**events, "step": np.array(steps)}, log)
        assert found.devices["gpu:0"].steps == len(set(steps)), steps


# Uncertainty must not vanish where nothing is known


def widths(events: Any, log: Any, **facts: float) -> dict[tuple[str, str], float]:
    rows = package.account(events, log, facts=SensorFacts(**facts)).rows.to_pylist()
    return {(row["device"], row["name"]): row["uncertainty_j"] / row["energy_j"] for row in rows}


def test_a_device_with_few_events_beside_a_busy_one_is_as_uncertain_as_alone() -> None:
    many, few = 400_000, 500
    start_ns = np.concatenate([np.arange(many) * 1000, np.arange(few) * 1000 * (many // few)])
    device = np.array(["gpu:0"] * many + ["gpu:1"] * few)
    order = np.argsort(start_ns, kind="stable")
    name = np.array(["a", "b", "c", "d"])[np.arange(many + few) % 4]
    events = {
        "name": name[order],
        "device": device[order],
        "start_ns": start_ns[order],
        "duration_ns": np.full(order.size, 900),
    }
    watts = np.random.default_rng(1).uniform(50, 300, 40)
    log = [Reading(d, t * 10 * MS, float(watts[t])) for d in ("gpu:0", "gpu:1") for t in range(watts.size)]
    together = widths(events, columns(log))
    alone = widths({key: values[events["device"] == "gpu:1"] for key, values in events.items()}, columns(log))
    assert len(alone) == 4
    for row, width in alone.items():
        assert width > 0.05
        assert together[row] == pytest.approx(width, rel=0.5), row


def test_a_window_longer_than_the_log_makes_no_figure_certain() -> None:
    events = columns([Event(name, "gpu:0", i * 200 * MS, 200 * MS) for i, name in enumerate("abc")])
    log = columns([Reading("gpu:0", t * 20 * MS, 100.0 + 2 * t) for t in range(35)])
    within = widths(events, log, window_s=0.5)
    for window_s in (0.7, 0.71, 1.0, 10.0):
        beyond = widths(events, log, window_s=window_s)
        assert min(beyond.values()) > 0.5 * min(within.values()), window_s


# Files, options and output


def write_files(folder: Path, events: Sequence[Event], log: Sequence[Reading]) -> None:
    for name, rows in (("events", events), ("power", log)):
        table = pa.table(columns(rows))
        pq.write_table(table, folder / f"{name}.parquet")
        pv.write_csv(table, folder / f"{name}.csv")
        with (
            pa.OSFile(str(folder / f"{name}.arrow"), "wb") as sink,
            pa.ipc.new_file(sink, table.schema) as out,
        ):
            out.write_table(table)


STEPS = [
    Event("net/layer_0/MatMul", "gpu:0", 0, 50 * MS, "s"),
    Event("net/layer_0/Add", "gpu:0", 50 * MS, 20 * MS, "s"),
    Event("net/layer_1/MatMul", "gpu:0", 60 * MS, 50 * MS, "t"),
    Event("mark", "gpu:0", 60 * MS, 0, "s"),
    Event("load", "cpu:0", 0, 80 * MS, None),
]
READINGS = [Reading("gpu:0", t * 10 * MS, 100.0 + 10 * t) for t in range(13)]
OPTIONS = ["--events", "events.parquet", "--power", "power.csv"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, STEPS, READINGS)
    return tmp_path


def account_json(*words: str | os.PathLike[str], **more: Any) -> dict[str, Any]:
    done = smaragdine("account", *words, "--json", "-", **more)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    check_contract(found)
    return found


def test_json_to_the_letter(here: Path) -> None:
    found = account_json(*OPTIONS)
    check(found, expected(STEPS, READINGS, None))
    assert found["without_power"] == {"cpu:0": 1}
    for kind in ("csv", "arrow", "parquet"):
        assert account_json("--events", f"events.{kind}", "--power", f"power.{kind}") == found
    done = smaragdine("account", *OPTIONS, "--json", "found.json")
    assert json.loads(Path("found.json").read_text()) == found
    for row in found["devices"]["gpu:0"]["rows"]:
        assert row["name"] in done.stdout
    assert "cpu:0: 1 event, but nobody measured its power" in done.stdout
    done = smaragdine("account", *OPTIONS, "--hold-s", "0.005")
    assert done.returncode == 2
    assert "--hold-s" in done.stderr


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "json"])
def test_output_is_read_back(here: Path, suffix: str) -> None:
    exact = package.account("events.parquet", "power.csv")
    file = Path(f"footprint.{suffix}")
    file.write_text("what was there before")
    for _ in range(2):
        done = smaragdine("account", *OPTIONS, "-o", file)
        assert done.returncode == 0, done.stderr
        found = load(file)
        assert to_json(found) == to_json(exact)
        assert found.rows.equals(exact.rows)
    assert not [path for path in here.iterdir() if path.name.startswith(".")]


def test_output_as_csv_has_every_row(here: Path) -> None:
    assert smaragdine("account", *OPTIONS, "-o", "footprint.csv").returncode == 0
    again = smaragdine("compare", "footprint.csv", "footprint.csv")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "a CSV has rows and no totals" in again.stderr
    rows = pd.read_csv("footprint.csv")
    exact = package.account("events.parquet", "power.csv")
    assert rows["name"].tolist() == exact.rows["name"].to_pylist()
    assert rows["energy_j"].tolist() == exact.rows["energy_j"].to_pylist()
    assert "power_w" in rows


def test_a_link_stays_a_link_and_a_pipe_a_pipe(here: Path) -> None:
    Path("link.json").symlink_to("target.json")
    assert smaragdine("account", *OPTIONS, "-o", "link.json").returncode == 0
    assert Path("link.json").is_symlink()
    assert load("target.json").rows.num_rows == 4
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert smaragdine("account", *OPTIONS, "--json", "pipe").returncode == 0
        assert Path("pipe").is_fifo()
        assert json.loads(os.read(reader, 1 << 16)) == to_json(load("target.json"))
    finally:
        os.close(reader)


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_a_chrome_trace_is_as_good_as_columns(here: Path, suffix: str) -> None:
    pids = {"gpu:0": 1, "cpu:0": 2}
    trace: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": device.upper()}}
        for device, pid in pids.items()
    ]
    for event in STEPS:
        place = {"pid": pids[event.device], "tid": event.lane or "main"}
        times = {"ts": event.start_ns / 1000, "dur": event.duration_ns / 1000}
        trace.append({"ph": "X", "name": event.name, **place, **times})
    text = json.dumps({"traceEvents": trace}).encode()
    Path(f"trace.{suffix}").write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    assert account_json("--events", f"trace.{suffix}", "--power", "power.parquet") == account_json(*OPTIONS)


def test_an_nvidia_smi_log_through_the_end_of_summer_time(here: Path) -> None:
    """In Berlin on 25 October 2026 it is 02:59:59 twice; the second hour begins at 01:00 UTC."""
    change_ns = int(datetime(2026, 10, 25, 1, tzinfo=UTC).timestamp()) * 10**9
    local = ["02:59:59.000", "02:59:59.500", "02:00:00.000", "02:00:00.500", "02:00:01.000"]
    lines = [f"2026/10/25 {time}, 0, {100 + 20 * i}.00 W" for i, time in enumerate(local)]
    Path("smi.csv").write_text("\n".join(["timestamp, index, power.draw [W]", *lines]) + "\n")
    log = [Reading("gpu:0", change_ns + (i - 2) * 500 * MS, 100.0 + 20 * i) for i in range(5)]
    events = [
        Event("a", "gpu:0", change_ns - 750 * MS, 1000 * MS),
        Event("b", "gpu:0", change_ns, 900 * MS),
    ]
    write_files(here, events, log)
    words = ["--events", "events.parquet", "--power", "smi.csv"]
    found = account_json(*words, "--tz", "Europe/Berlin")
    check(found, expected(events, log, None))
    assert account_json(*words, env={"TZ": "Europe/Berlin"}) == found
    done = smaragdine("account", *words, "--tz", "America/New_York")
    assert done.returncode == 2
    assert "--tz" in done.stderr


def test_what_is_shown_can_be_chosen(here: Path) -> None:
    top = smaragdine("account", *OPTIONS, "--top", "1").stdout
    assert "3 more names" in top
    assert "layer_1/MatMul" not in top or "layer_0/MatMul" not in top
    tree = smaragdine("account", *OPTIONS, "--tree").stdout
    assert [word for word in ("net", "layer_0", "MatMul", "nobody measured") if word not in tree] == []
    zoomed = smaragdine("account", *OPTIONS, "--zoom", "net/layer_1").stdout
    assert "layer_1" in zoomed
    assert "layer_0" not in zoomed
    whole = account_json(*OPTIONS)["devices"]["gpu:0"]
    merged = account_json(*OPTIONS, "--merge", r"layer_\d+=block")["devices"]["gpu:0"]
    assert {row["name"] for row in merged["rows"]} == {"net/block/MatMul", "net/block/Add", "mark"}
    assert merged["total_j"] == whole["total_j"]


NAMES = [
    "bert/encoder/layer_0/attention/self/query/a_very_long_operation_name/MatMul",
    'a, "quoted"',
    "line\nbreak",
    "[bold]markup[/bold]",
    "[/red]",
    "🔥/日本語",
    "\x1b[31mred\x07",
]


@pytest.mark.parametrize("width", [None, 110, 80, 60, 30])
def test_no_name_is_lost_from_sight(here: Path, width: int | None) -> None:
    events = [Event(name, "gpu:0", i * 10 * MS, 10 * MS) for i, name in enumerate(NAMES)]
    table = {**columns(events), "phase": np.array(["[/red]", *["forward"] * (len(NAMES) - 1)])}
    pq.write_table(pa.table(table), "events.parquet")
    pv.write_csv(pa.table(table), "names.csv")
    env = {} if width is None else {"COLUMNS": str(width)}
    done = smaragdine("account", *OPTIONS, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= (width or 110)
    header = lines[0]
    figures = header.index("phase" if "phase" in header else "energy")
    first = "".join(line[: figures - 2].strip() for line in lines)
    for name in (*NAMES[:2], r"line\nbreak", *NAMES[3:5], "日本語", r"\x1b[31mred\x07"):
        assert name.replace(" ", "") in first.replace(" ", ""), name
    assert smaragdine("account", *OPTIONS, "--tree", env=env).returncode == 0
    read = account_json("--events", "names.csv", "--power", "power.csv")
    assert {row["name"] for row in read["devices"]["gpu:0"]["rows"]} == set(NAMES)


def test_a_hundred_thousand_names(here: Path) -> None:
    count = 100_000
    events = {
        "name": [f"op_{i}" for i in range(count)],
        "device": ["gpu:0"] * count,
        "start_ns": np.arange(count) * 1000,
        "duration_ns": np.full(count, 1000),
    }
    pq.write_table(pa.table(events), "events.parquet")
    log = [Reading("gpu:0", t, 100.0 + t % 7) for t in range(0, count * 1000, 50_000)]
    pq.write_table(pa.table(columns(log)), "power.parquet")
    most = 3 << 30
    words = ("--events", "events.parquet", "--power", "power.parquet", "--json", "-")
    done = smaragdine(
        "account", *words, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most))
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["devices"]["gpu:0"]
    assert len(found["rows"]) == count
    assert found["idle_j"] == pytest.approx(0, abs=1e-12)


def test_help_describes_everything() -> None:
    for verb in ("account", "compare"):
        done = smaragdine(verb, "--help", env={"COLUMNS": "60"})
        assert done.returncode == 0
        assert f"example:\n  smaragdine {verb} " in done.stdout
    for verb in ("account", "compare"):
        parser = importlib.import_module(f"smaragdine.cli.{verb}")._parser()
        assert all(action.help for action in parser._actions)


def test_the_api_says_what_is_wrong() -> None:
    events, log = columns([Event("a", "gpu:0", 0, 10)]), columns([Reading("gpu:0", t, 1.0) for t in (0, 5)])
    assert isinstance(package.account(events, log), Footprint)
    with pytest.raises(UserError, match="no column power_w"):
        package.account(events, {name: log[name] for name in ("device", "t_ns")})
    with pytest.raises(UserError, match="no column duration_ns"):
        package.account({name: events[name] for name in ("name", "device", "start_ns")}, log)


@pytest.mark.parametrize("hold_s", [math.nan, math.inf, -1.0, 0.0])
def test_the_api_refuses_a_hold_that_is_none(hold_s: float) -> None:
    events, log = columns([Event("a", "gpu:0", 0, 10)]), columns([Reading("gpu:0", t, 1.0) for t in (0, 5)])
    with pytest.raises(UserError):
        package.account(events, log, hold_s=hold_s)


@pytest.mark.parametrize("power_w", [1e308, 1e200, 1e-200, 1e-300])
def test_power_of_any_size_is_accounted_or_refused(power_w: float) -> None:
    events = columns([Event("a", "gpu:0", 0, 10), Event("b", "gpu:0", 5, 10)])
    try:
        found = package.account(events, columns([Reading("gpu:0", t, power_w) for t in (0, 10, 20)]))
    except UserError:
        return
    check_contract(to_json(found))


def test_thinned_power(here: Path) -> None:
    events = [Event(name, "gpu:0", i * 40 * MS, 40 * MS) for i, name in enumerate("abcdefgh")]
    pq.write_table(pa.table(columns(events)), "events.parquet")
    log = [Reading("gpu:0", t * 10 * MS, 100.0 + (t * 7 % 11) * 20) for t in range(40)]
    pq.write_table(pa.table(columns(log)), "power.parquet")
    paths = ("--events", "events.parquet", "--power", "power.parquet")
    found = account_json(*paths, "--thin", "1,4")["devices"]["gpu:0"]["thinned"]
    whole = package.account(columns(events), columns(log))
    # Every fourth value, held four times as long.
    kept = package.account(columns(events), columns([Reading("gpu:0", r.t_ns, r.power_w) for r in log[::4]]))
    expected = [np.corrcoef(*(_energies(one) for one in (whole, other)))[0, 1] for other in (whole, kept)]
    assert [score["k"] for score in found] == [1, 4]
    assert [score["energy"] for score in found] == pytest.approx(expected)
    assert expected[1] < 0.999
    assert "every 4th reading" in smaragdine("account", *paths, "--thin", "4").stdout
    refused = smaragdine("account", *paths, "--thin", "0")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def _energies(footprint: Footprint) -> list[float]:
    rows = {row["name"]: row["energy_j"] for row in footprint.rows.to_pylist()}
    return [rows[name] for name in sorted(rows)]
