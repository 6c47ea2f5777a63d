"""The energy of single events, the spans between marks, and what drawing them needs."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recordings import MS, T0, S, gpu_w, make
from smaragdine.accounting.account import account_meters, event_energies_j
from smaragdine.accounting.power import PowerTrace, coarse
from smaragdine.accounting.run import Run
from smaragdine.accounting.spans import mark_spans
from smaragdine.recording.format import EVENTS
from smaragdine.recording.reader import open_recording
from smaragdine.recording.writer import fit
from smaragdine.report.export.perfetto import TrackSlice, edges


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("full") / "a run")


@pytest.mark.parametrize("idle_w", [None, 100.0])
def test_energies_of_events_are_those_of_the_footprint(run: Path, idle_w: float | None) -> None:
    """Also where the GPU's idle power could not be seen."""
    events, meters = Run.open(run).inputs
    assert meters.of["gpu:0"].idle_w == pytest.approx(100.0)
    gpu = dataclasses.replace(meters.of["gpu:0"], idle_w=idle_w)
    meters = dataclasses.replace(meters, of={**meters.of, "gpu:0": gpu})
    energy_j = event_energies_j(events, meters)
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for row, value in zip(events.to_pylist(), energy_j.tolist(), strict=True):
        if row["device"] == "nic:0":
            assert math.isnan(value)
        else:
            sums[row["device"], row["name"], row["phase"]] += value
    rows = account_meters(events, meters).rows.to_pylist()
    assert sums.keys() == {(row["device"], row["name"], row["phase"]) for row in rows}
    for row in rows:
        assert sums[row["device"], row["name"], row["phase"]] == pytest.approx(row["energy_j"], rel=1e-12)


def test_an_event_pays_for_what_is_not_inside_it(run: Path) -> None:
    """40 W: 60 ms less the 30 ms inside; of those 10 ms; 20 ms; and nothing in no time."""
    events, meters = Run.open(run).inputs
    energy_j = event_energies_j(events, meters)
    first = [(row["name"], value) for row, value in zip(events.to_pylist(), energy_j, strict=True)]
    cpu = [
        value
        for (name, value), row in zip(first, events.to_pylist(), strict=True)
        if row["device"] == "cpu:0"
    ]
    assert cpu[:4] == pytest.approx([1.2, 0.4, 0.8, 0.0], abs=1e-9)


def test_energy_of_an_event_in_a_gap_is_not_known(tmp_path: Path) -> None:
    recording = open_recording(make(tmp_path / "run", gap=True))
    long = {"name": "a", "device": "gpu:0", "duration_ns": 2 * MS, "lane": 1}
    rows = [{**long, "start_ns": T0 + ms * MS} for ms in (2990, 2999, 3100, 3599)]
    events = fit(pa.Table.from_pylist(rows), EVENTS, "events")
    whole, half, none, later = event_energies_j(*Run(recording).inputs_of(events))
    assert whole == pytest.approx(gpu_w(2990) * 0.002)
    assert half == pytest.approx(gpu_w(2999) * 0.001)
    assert math.isnan(none)
    assert later == pytest.approx(gpu_w(3600) * 0.001)


def test_spans_between_marks(run: Path) -> None:
    spans = mark_spans(open_recording(run).marks)
    steps = [span for span in spans if span.name == "step"]
    # The first step of each epoch has no beginning.
    assert [span.index for span in steps] == [*range(1, 9), *range(10, 18)]
    assert {span.end_ns - span.begin_ns for span in steps} == {100 * MS}
    epochs = [(span.index, span.begin_ns - T0) for span in spans if span.name == "epoch"]
    assert epochs == [(0, S), (1, 2 * S)]
    assert [span.name for span in spans if span.name not in ("step", "epoch")] == ["train", "experiment"]


def test_coarse_power_has_the_same_energy_and_gaps() -> None:
    start_ns = np.array([0, 10, 20, 50, 60, 70, 80])
    power_w = np.array([1.0, 2.0, 6.0, 3.0, 5.0, 7.0, 9.0])
    trace = coarse(PowerTrace(start_ns, start_ns + 10, power_w), 4)
    assert trace.start_ns.tolist() == [0, 20, 50, 70]
    assert trace.end_ns.tolist() == [20, 30, 70, 90]
    assert trace.power_w.tolist() == [1.5, 6.0, 4.0, 8.0]


_slices = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 8), st.sampled_from("ab"), st.booleans()), max_size=30
)


@given(_slices)
def test_slices_nest_on_their_tracks(rows: list[tuple[int, int, str, bool]]) -> None:
    rows.sort(key=lambda row: (row[0], -row[1]))
    slices = [
        TrackSlice(start, start + long, lane, nests, i) for i, (start, long, lane, nests) in enumerate(rows)
    ]
    stacks: dict[Any, list[TrackSlice[str]]] = defaultdict(list)
    closed: list[int] = []
    last_ns = -1
    for edge in edges(slices):
        assert edge.t_ns >= last_ns
        last_ns = edge.t_ns
        stack = stacks[edge.track]
        if edge.slice is None:
            ended = stack.pop()
            assert ended.end_ns == edge.t_ns
            closed.append(ended.item)
            continue
        assert edge.slice.start_ns == edge.t_ns
        assert edge.track[0] == edge.slice.lane
        if stack:
            assert edge.slice.nests
            assert edge.slice.end_ns <= stack[-1].end_ns
        stack.append(edge.slice)
    assert sorted(closed) == list(range(len(slices)))
