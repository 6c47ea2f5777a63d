"""`smaragdine export --to perfetto`, decoded: slices nest, counters rise, joules add up."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from exports import Figures, export, figures_of
from perfetto_trace import CPU, GPU, Decoded
from recordings import MS, ODD, RUN_S, T0, S, gpu_w, make, region
from smaragdine.recording.reader import open_recording
from smaragdine.report.export import perfetto


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("full") / "a run")


@pytest.fixture(scope="module")
def figures(run: Path) -> Figures:
    return figures_of(run)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trace(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Decoded:
    pytest.importorskip("perfetto.protos", reason="the perfetto package is not installed")
    return Decoded(export(run, "perfetto", out=str(tmp_path_factory.mktemp("perfetto") / "trace")))


def test_perfetto_fields_are_those_of_perfetto() -> None:
    proto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    ours = perfetto.packet_class().DESCRIPTOR.file.message_types_by_name
    assert set(ours) == set(perfetto.FIELDS)
    for name, message in ours.items():
        real = proto.ClockSnapshot.Clock.DESCRIPTOR if name == "Clock" else getattr(proto, name).DESCRIPTOR
        for field in message.fields:
            theirs = real.fields_by_name[field.name]
            kind = field.TYPE_INT32 if theirs.type == field.TYPE_ENUM else theirs.type
            assert (theirs.number, kind) == (field.number, field.type), (name, field.name)
    event = proto.TrackEvent
    kinds = (event.TYPE_SLICE_BEGIN, event.TYPE_SLICE_END, event.TYPE_INSTANT, event.TYPE_COUNTER)
    assert kinds == (
        perfetto.SLICE_BEGIN,
        perfetto.SLICE_END,
        perfetto.INSTANT,
        perfetto.COUNTER,
    )
    assert perfetto.REALTIME == proto.BUILTIN_CLOCK_REALTIME
    assert perfetto.MONOTONIC == proto.BUILTIN_CLOCK_MONOTONIC
    assert perfetto.EXPLICIT_ORDER == proto.TrackDescriptor.EXPLICIT
    packet = proto.TracePacket
    flags = (packet.SEQ_INCREMENTAL_STATE_CLEARED, packet.SEQ_NEEDS_INCREMENTAL_STATE)
    assert flags == (perfetto.STATE_CLEARED, perfetto.NEEDS_STATE)


def test_perfetto_slices_have_the_joules_of_the_footprint(trace: Decoded, figures: Figures) -> None:
    for device, name in (("gpu:0", GPU), ("cpu:0", CPU)):
        sums: dict[tuple[str, str | None], list[float]] = defaultdict(list)
        for one in trace.of(name):
            sums[one["name"], one.get("phase")].append(one["energy_j"])
        rows = figures["traced"]["devices"][device]["rows"]
        assert {(row["name"], row["phase"]) for row in rows} == set(sums)
        for row in rows:
            energies = sums[row["name"], row["phase"]]
            assert len(energies) == row["count"]
            assert math.fsum(energies) == pytest.approx(row["energy_j"], rel=1e-12, abs=1e-15)


def test_perfetto_slices_are_the_events(trace: Decoded, run: Path) -> None:
    names = {"gpu:0": GPU, "cpu:0": CPU, "nic:0": "nic:0"}
    expected = sorted(
        (names[row["device"]], row["name"], row["start_ns"], row["duration_ns"], row["step"])
        for row in open_recording(run).events.to_pylist()
    )
    drawn = [(device, one) for device in names.values() for one in trace.of(device)]
    found = [(d, o["name"], o["begin_ns"], o["end_ns"] - o["begin_ns"], o["step"]) for d, o in drawn]
    assert sorted(found) == expected
    # Inside each other on the processor's thread; what crosses is on another track of the same name.
    inside = {(one["name"], one["in"]) for one in trace.of(CPU)}
    assert inside == {
        ("net", None),
        ("net/layer_0", "net"),
        ("net/layer_0/MatMul", "net/layer_0"),
        ("net/zero", "net"),
    }
    copies = {one["track"] for one in trace.of(GPU) if one["name"] == "copy"}
    assert len(copies) == 2
    assert {trace.tracks[uuid].name for uuid in copies} == {"stream 9"}
    assert {trace.tracks[one["track"]].name for one in trace.of(GPU) if one["name"] == ODD} == {
        "lane not known"
    }
    assert not any("energy_j" in one for one in trace.of("nic:0"))


def test_perfetto_counters_rise_to_the_energy_of_the_device(trace: Decoded, figures: Figures) -> None:
    for device, name in (("gpu:0", GPU), ("cpu:0", CPU)):
        energy = trace.counters[name, "J"]
        assert [t_ns for t_ns, _ in energy] == sorted(t_ns for t_ns, _ in energy)
        assert all(b >= a for (_, a), (_, b) in pairwise(energy))
        assert energy[0] == (T0, 0.0)
        assert energy[-1] == (T0 + RUN_S * S, figures["devices"][device]["energy_j"])
    power = dict(trace.counters[GPU, "W"])
    assert power == {T0 + ms * MS: gpu_w(ms) for ms in range(0, RUN_S * 1000, 20)}
    named = {track.name for track in trace.tracks.values() if track.counter.unit_name}
    assert named == {"power", "energy", "power, estimated", "energy, estimated"}


def test_perfetto_has_the_marks_and_says_its_clock(trace: Decoded) -> None:
    marks = [(one["name"], one["begin_ns"] - T0, one["end_ns"] - T0) for one in trace.of("train_it.py")]
    assert ("epoch 1", 2 * S, 2990 * MS) in marks
    assert ("step 4", 1400 * MS, 1500 * MS) in marks
    assert ("traced by torch", 1300 * MS, 1700 * MS) in marks
    assert ("profiler stops", 1700 * MS, 1701 * MS) in marks
    instants = {name: (t_ns - T0, notes) for t_ns, name, notes in trace.instants}
    assert instants["checkpoint"] == (2500 * MS, {"source": "user", "detail": 'to "disk"'})
    assert set(instants) == {"checkpoint"}  # all others are the beginning or the end of a slice
    first = trace.packets[0]
    assert first.clock_snapshot.primary_trace_clock == 1
    assert [(c.clock_id, c.timestamp) for c in first.clock_snapshot.clocks] == [(1, T0 - S), (3, 5 * S)]
    assert first.trace_packet_defaults.timestamp_clock_id == 1
    assert {packet.trusted_packet_sequence_id for packet in trace.packets} == {1}


def test_perfetto_has_regions_on_tracks_of_their_own(tmp_path: Path) -> None:
    """Also one that crosses a step, which slices of one track could not."""
    pytest.importorskip("perfetto.protos")
    marked = [*region("load", 1010, 1020, 0), *region("load", 1450, 1550, 1), *region("save", 1500, 1510, 2)]
    trace = Decoded(export(make(tmp_path / "regions", marked=marked), "perfetto"))
    marks = [(one["name"], one["begin_ns"] - T0, one["end_ns"] - T0) for one in trace.of("train_it.py")]
    assert ("load", 1010 * MS, 1020 * MS) in marks
    assert ("load", 1450 * MS, 1550 * MS) in marks
    assert ("save", 1500 * MS, 1510 * MS) in marks
    assert ("step 4", 1400 * MS, 1500 * MS) in marks
    assert {name for _, name, _ in trace.instants} == {"checkpoint"}


def test_perfetto_of_one_device(run: Path) -> None:
    pytest.importorskip("perfetto.protos")
    trace = Decoded(export(run, "perfetto", "--device", "cpu:0"))
    assert not trace.of("nic:0")
    assert {device for device, _ in trace.counters} == {CPU}
    assert len(trace.of(CPU)) == 16


def test_the_trace_processor_reads_it(run: Path) -> None:
    shell = shutil.which("trace_processor_shell")
    if shell is None:
        pytest.skip("trace_processor_shell, a download, is not installed")
    query = "select count(*) as n from slice where name = 'copy'"
    done = subprocess.run(
        [shell, "-Q", query, export(run, "perfetto")], capture_output=True, text=True, check=True
    )
    assert re.search(r"\b8\b", done.stdout), done.stdout
