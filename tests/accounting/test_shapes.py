"""Inputs of every shape that people have: few events beside a long log, many beside a short one, gaps, units.

Through the function, the command line and the report: an answer or one line, never a traceback, and energy is
conserved.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recordings import put
from smaragdine.accounting.account import account
from smaragdine.accounting.device_power import from_power_table
from smaragdine.accounting.diagram import diagram, walk
from smaragdine.accounting.intervals import grouped
from smaragdine.accounting.merge import merge
from smaragdine.accounting.run import Run
from smaragdine.cli.main import main
from smaragdine.errors import UserError
from smaragdine.recording.format import EVENTS, MARKS
from smaragdine.recording.power_logs import POWER
from smaragdine.recording.reader import open_recording
from smaragdine.report.html.page import html_page
from smaragdine.sensors.base import Channel

T0 = 1_700_000_000_000_000_000


@dataclass(frozen=True)
class Shape:
    events: int
    readings: int
    spacing_ns: int  # of the readings
    length_ns: int  # of an event, in the mean
    at: float  # where in the log the events begin; below 0 and above 1 they lie outside
    devices: int = 1
    gaps: float = 0.0  # part of the readings that is missing
    lanes: int = 1
    steps: int = 1
    watts: float = 100.0
    seed: int = 0


def shapes(most_events: int, most_readings: int, most_devices: int = 3) -> st.SearchStrategy[Shape]:
    def sizes(least: int, most: int) -> st.SearchStrategy[int]:
        return st.floats(math.log10(least), math.log10(most)).map(lambda x: round(10**x))

    return st.builds(
        Shape,
        events=sizes(1, most_events),
        readings=sizes(2, most_readings),
        spacing_ns=st.sampled_from([1_000, 4_000_000, 20_000_000, 1_000_000_000]),
        length_ns=st.sampled_from([0, 1, 900, 20_000, 900_000, 50_000_000, 3_000_000_000]),
        at=st.sampled_from([-0.001, 0.0, 0.3, 0.5, 0.999, 1.0]),
        devices=st.integers(1, most_devices),
        gaps=st.sampled_from([0.0, 0.1, 0.9]),
        lanes=st.sampled_from([0, 1, 4]),
        steps=st.sampled_from([0, 1, 7]),
        watts=st.sampled_from([0.0, 1e-9, 3.0, 250.0, 9_000.0]),
        seed=st.integers(0, 1 << 16),
    )


def made(shape: Shape) -> tuple[pa.Table, pa.Table]:
    random = np.random.default_rng(shape.seed)
    log_ns = shape.readings * shape.spacing_ns
    t_ns = T0 + np.arange(shape.readings) * shape.spacing_ns
    t_ns = t_ns[random.random(t_ns.size) >= shape.gaps]
    power_w = shape.watts * random.uniform(0.5, 1.5, t_ns.size)
    devices = [f"gpu:{i}" for i in range(shape.devices)]
    power = pa.table(
        {
            "device": pa.DictionaryArray.from_arrays(
                np.repeat(np.arange(len(devices), dtype=np.int32), t_ns.size), devices
            ),
            "t_ns": np.tile(t_ns, len(devices)),
            "power_w": np.tile(power_w, len(devices)),
        },
        schema=POWER,
    )
    length_ns = np.rint(random.exponential(shape.length_ns, shape.events)).astype(np.int64)
    pause_ns = np.rint(random.exponential(shape.length_ns / 4, shape.events)).astype(np.int64)
    start_ns = T0 + int(shape.at * log_ns) + np.cumsum(length_ns + pause_ns) - length_ns
    names = [f"net/layer_{i}/{op}" for i in range(5) for op in ("MatMul", "Softmax")]
    number = np.arange(shape.events)
    events = pa.table(
        {
            "name": pa.DictionaryArray.from_arrays((number % len(names)).astype(np.int32), names),
            "device": pa.DictionaryArray.from_arrays((number % len(devices)).astype(np.int32), devices),
            "start_ns": start_ns,
            "duration_ns": length_ns,
            "phase": pa.DictionaryArray.from_arrays((number % 2).astype(np.int32), ["forward", "backward"]),
            "lane": pa.array(
                number % max(shape.lanes, 1), pa.int64(), mask=np.full(number.size, not shape.lanes)
            ),
            "step": pa.array(
                number * max(shape.steps, 1) // number.size,
                pa.int64(),
                mask=np.full(number.size, not shape.steps),
            ),
        },
        schema=EVENTS,
    )
    return events, power


def check(footprint, energy_j: dict[str, float]) -> None:
    for device, total in footprint.devices.items():
        rows = footprint.device_rows(device).to_pylist()
        summed_j = math.fsum(row["energy_j"] for row in rows) + total.idle_j
        assert summed_j == pytest.approx(total.total_j, rel=1e-9, abs=1e-30)
        assert total.total_j == pytest.approx(energy_j[device], rel=1e-9, abs=1e-30)
        for row in rows:
            assert row["uncertainty_j"] is None or 0 <= row["uncertainty_j"] < math.inf, row
    groups = [grouped(footprint, "layer"), grouped(footprint, "phase"), merge(footprint)]
    for device in footprint.devices:
        most_j = math.fsum(row["uncertainty_j"] or 0 for row in footprint.device_rows(device).to_pylist())
        for of in groups:
            assert math.fsum(of.device_rows(device)["energy_j"].to_pylist()) == pytest.approx(
                math.fsum(footprint.device_rows(device)["energy_j"].to_pylist()), rel=1e-9, abs=1e-30
            )
            for row in of.device_rows(device).to_pylist():
                width_j = row["uncertainty_j"]
                assert width_j is None or 0 <= width_j <= most_j * (1 + 1e-9) + 1e-30
    for node in walk(diagram(footprint)):
        assert node.uncertainty_j is None or 0 <= node.uncertainty_j < math.inf


def check_refusal(error: UserError) -> None:
    assert len(str(error).splitlines()) == 1


# A short trace beside a long log, and the other way round.
@example(Shape(events=5, readings=3_000, spacing_ns=20_000_000, length_ns=900_000, at=0.0))
@example(Shape(events=5, readings=100_000, spacing_ns=20_000_000, length_ns=900_000, at=0.5))
@example(Shape(events=100_000, readings=2, spacing_ns=20_000_000, length_ns=20_000, at=0.0))
@example(Shape(events=1, readings=2, spacing_ns=1_000_000_000, length_ns=1, at=0.3))
@example(Shape(events=20_000, readings=5_000, spacing_ns=4_000_000, length_ns=900_000, at=0.3, lanes=0))
@given(shapes(100_000, 100_000))
@settings(max_examples=40)
def test_every_shape_is_accounted_or_refused_in_a_line(shape: Shape) -> None:
    events, power = made(shape)
    try:
        meters = from_power_table(power)
        found = account(events, meters.of)
    except UserError as error:
        check_refusal(error)
        return
    energy_j = {
        device: float((meter.trace.power_w * (meter.trace.end_ns - meter.trace.start_ns)).sum() * 1e-9)
        for device, meter in meters.of.items()
    }
    check(found, energy_j)


@example(Shape(events=5, readings=3_000, spacing_ns=20_000_000, length_ns=900_000, at=0.5, devices=2))
@given(shapes(3_000, 10_000))
@settings(max_examples=12)
def test_the_command_line_answers_or_says_why_not(shape: Shape) -> None:
    events, power = made(shape)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.parquet" for name in ("events", "power", "out")]
        pq.write_table(events, paths[0])
        pq.write_table(power, paths[1])
        words = ["account", "--events", str(paths[0]), "--power", str(paths[1])]
        for more in (["--json", str(paths[2].with_suffix(".json"))], ["--summary", "--tree"], ["--sum"]):
            assert main([*words, *more]) in (0, 2)
        written = paths[2].with_suffix(".json")
        if written.exists():
            json.loads(written.read_text())


@example(Shape(events=5, readings=3_000, spacing_ns=20_000_000, length_ns=900_000, at=0.5))
@given(shapes(3_000, 10_000, 1))
@settings(max_examples=12)
def test_the_report_of_every_shape(shape: Shape) -> None:
    events, power = made(shape)
    channel = Channel(
        "gpu:0", "power", "W", "sample", "measured", shape.spacing_ns / 1e6, "test", window_ms=20.0
    )
    t_ns, power_w = power["t_ns"].to_pylist(), power["power_w"].to_pylist()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        readings = [(t, 0, w) for t, w in zip(t_ns, power_w, strict=True)]
        end_ns = T0 + shape.readings * shape.spacing_ns
        info = {
            "command": ["train.py"],
            "begin_ns": T0,
            "end_ns": end_ns,
            "clock": {"begin": {"wall_ns": T0, "mono_ns": 0}},
        }
        put(run, info, [channel], [(0, readings)], MARKS.empty_table(), events=events.to_pylist())
        recording = open_recording(run)
        for words in (["report", str(run)], ["report", str(run), "--by", "layer"], ["show", str(run)]):
            assert main(words) in (0, 2)
        try:
            assert html_page([Run(recording)])
        except UserError as error:
            check_refusal(error)
