"""CPU events on the socket their thread ran on: from where threads were seen to each socket's energy."""

from __future__ import annotations

import importlib.util
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import machine_fake
from cli import smaragdine, write_script
from powercap_fake import PowercapTree
from smaragdine.accounting.run import Run
from smaragdine.accounting.traces import device_traces
from smaragdine.recording.format import EVENTS, PLACES
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.recording.writer import ReadingsWriter, fit, write_events
from smaragdine.sensors.processes import Place
from smaragdine.tracing.assemble import on_sockets, remarks_on_sockets
from smaragdine.tracing.xplane.reader import NO_THREAD

PID = 100
needs_two_cpus = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPUs")


def places_table(places: list[Place]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(PLACES.names, place, strict=True)) for place in places], PLACES)


def events_table(rows: list[dict[str, Any]]) -> pa.Table:
    return fit(pa.Table.from_pylist([{"name": "op", "duration_ns": 1, **row} for row in rows]), EVENTS, "")


# --- which socket -------------------------------------------------------------------------------------------


def socket_of(places: list[Place], lane: int | None, start_ns: int) -> tuple[int, bool] | None:
    """Word for word what is promised: the socket, and whether it is a guess."""
    mine = sorted((p for p in places if p[1] == PID), key=lambda place: place[0])
    if not mine:
        return None
    of_thread = [p for p in mine if p[2] == lane]
    if of_thread:
        before = [p for p in of_thread if p[0] <= start_ns]
        return (before[-1] if before else of_thread[0])[3], False
    last = {tid: socket for t_ns, _, tid, socket in mine if t_ns <= max(start_ns, mine[0][0])}
    sockets = list(last.values())
    return min(set(sockets), key=lambda socket: (-sockets.count(socket), socket)), True


TIMES = st.integers(0, 12)
PLACE = st.tuples(TIMES, st.sampled_from([PID, PID, 7]), st.integers(101, 105), st.integers(0, 3))
EVENT = st.fixed_dictionaries(
    {
        "start_ns": TIMES,
        "lane": st.sampled_from([None, 101, 102, 103, 104, 105, 106, 0, -1, 2**40]),
        "device": st.sampled_from(["cpu:0", "cpu:0", "gpu:0", "nic:0"]),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    # One thread is in one place at a time; two processes never have the same thread.
    st.lists(PLACE, max_size=14, unique_by=lambda p: (p[0], p[2])).map(
        lambda places: [(t, pid, tid + 1000 * (pid != PID), socket) for t, pid, tid, socket in places]
    ),
    st.lists(EVENT, min_size=1, max_size=12),
    st.integers(0, 12),
)
def test_each_event_is_where_its_thread_was(places: list[Place], rows: list[dict[str, Any]], cut: int):
    # Two chunks, each with words of its own.
    parts = [events_table(part) for part in (rows[:cut], rows[cut:]) if part]
    table, guessed = on_sockets(pa.concat_tables(parts), places_table(places), PID)
    on_host = [row["device"] == "cpu:0" for row in rows]
    found = [socket_of(places, row["lane"], row["start_ns"]) for row in rows]
    expected = [
        f"cpu:{socket[0]}" if host and socket else row["device"]
        for row, host, socket in zip(rows, on_host, found, strict=True)
    ]
    assert table["device"].to_pylist() == expected
    assert guessed == sum(
        host and (socket is None or socket[1]) for host, socket in zip(on_host, found, strict=True)
    ) * bool(places)
    assert table.schema == EVENTS
    others = [name for name in EVENTS.names if name != "device"]
    assert table.select(others).equals(pa.concat_tables(parts).select(others))


def test_a_million_events():
    """As many as a window may have; the answers, not the time."""
    chance = random.Random(0)
    places = [(t * 10**8, PID, 200 + chance.randrange(64), chance.randrange(2)) for t in range(5000)]
    lane = pa.array([200 + i % 70 for i in range(10**6)])
    start_ns = pa.array(range(0, 5 * 10**11, 5 * 10**5))
    events = fit(
        pa.table(
            {
                "name": pa.array(["op"] * 10**6).dictionary_encode(),
                "device": pa.array(["cpu:0"] * 10**6).dictionary_encode(),
                "start_ns": start_ns,
                "duration_ns": pa.array([1] * 10**6),
                "lane": lane,
            }
        ),
        EVENTS,
        "",
    )
    table, guessed = on_sockets(events, places_table(places), PID)
    devices = table["device"]
    for i in chance.sample(range(10**6), 100):
        socket = socket_of(places, lane[i].as_py(), start_ns[i].as_py())
        assert socket is not None
        assert devices[i].as_py() == f"cpu:{socket[0]}"
    assert guessed == sum(i % 70 >= 64 for i in range(10**6))


def test_one_socket_changes_nothing():
    events = events_table([{"device": "cpu:0", "start_ns": 5, "lane": 101}])
    assert on_sockets(events, PLACES.empty_table(), PID) == (events, 0)


def test_a_guess_is_said():
    assert remarks_on_sockets(0) == []
    assert "1,234 operations" in remarks_on_sockets(1234)[0]


# --- on disk ------------------------------------------------------------------------------------------------


def test_places_of_a_recorder_and_its_successor(tmp_path: Path):
    parts: list[list[Place]] = [[(1, 5, 5, 0), (1, 5, 6, 1)], [(2, 5, 6, 0)], [(9, 5, 5, 1), (9, 5, 6, 0)]]
    for segment, batches in enumerate([parts[:2], parts[2:]]):
        writer = ReadingsWriter(tmp_path, [], segment)
        writer.write_places([])
        assert not (tmp_path / f"places{'.1' if segment else ''}.arrows").exists()
        for batch in batches:
            writer.write_places(batch)
        writer.close()
        assert (writer.error, writer.dropped_batches, writer.rows) == (None, 0, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["places.1.arrows", "places.arrows"]
    found = Recording(tmp_path, {}).places
    assert found.equals(places_table([place for part in parts for place in part]))


def test_places_of_a_recorder_that_died(tmp_path: Path):
    writer = ReadingsWriter(tmp_path, [])
    writer.write_places([(1, 5, 5, 0)])
    whole = (tmp_path / "places.arrows").stat().st_size
    writer.write_places([(2, 5, 5, 1)])
    writer.close()
    with open(tmp_path / "places.arrows", "r+b") as file:
        file.truncate(whole + 20)
    assert Recording(tmp_path, {}).places.to_pylist() == [{"t_ns": 1, "pid": 5, "tid": 5, "socket": 0}]


def test_a_recording_without_places_has_an_empty_table(tmp_path: Path):
    assert Recording(tmp_path, {}).places.equals(PLACES.empty_table())


# --- the whole way ------------------------------------------------------------------------------------------

# A thread begins where its maker may run, so that it is never anywhere else.
TWO_THREADS = """
import json, os, threading, time

def work(name):
    spans = []
    while time.monotonic() < end:
        start_ns = time.time_ns()
        while time.time_ns() < start_ns + 20_000_000:
            sum(range(500))
        spans.append([start_ns, time.time_ns() - start_ns])
    done[name] = {"tid": threading.get_native_id(), "spans": spans}

done, threads, end = {}, [], time.monotonic() + 2.5
for cpu in (0, 1):
    os.sched_setaffinity(0, {cpu})
    threads.append(threading.Thread(target=work, args=("on_%d" % cpu,)))
    threads[-1].start()
[thread.join() for thread in threads]
json.dump({"pid": os.getpid(), **done}, open("spans.json", "w"))
"""


@needs_two_cpus
def test_each_sockets_energy_goes_to_the_threads_on_it(tmp_path: Path):
    write_script(tmp_path / "train.py", TWO_THREADS)
    env = {"SMARAGDINE_PROC_ROOT": str(machine_fake.two_sockets(tmp_path / "proc"))}
    with PowercapTree(tmp_path / "powercap", packages=2) as tree:
        tree.start({"cpu:0": 40.0, "dram:0": 4.0, "cpu:1": 90.0, "dram:1": 6.0})
        env["SMARAGDINE_POWERCAP_ROOT"] = str(tree.root)
        done = smaragdine("run", "-o", "out", "train.py", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ran = json.loads((tmp_path / "spans.json").read_text())
    events = events_table(
        [
            {"name": name, "device": "cpu:0", "lane": ran[name]["tid"], "start_ns": t, "duration_ns": long}
            for name in ("on_0", "on_1")
            for t, long in ran[name]["spans"]
        ]
    )
    recording = open_recording(tmp_path / "out")
    for socket in (0, 1):
        seen = {p["socket"] for p in recording.places.to_pylist() if p["tid"] == ran[f"on_{socket}"]["tid"]}
        assert seen == {socket}
    placed, guessed = on_sockets(events, recording.places, ran["pid"])
    assert guessed == 0
    assert write_events(tmp_path / "out", placed) is None

    recording = open_recording(tmp_path / "out")
    footprint = Run(recording).accounted
    whole = device_traces(recording)
    starts, longs = (events[name].to_numpy() for name in ("start_ns", "duration_ns"))
    for socket in (0, 1):
        total, rows = footprint.devices[f"cpu:{socket}"], footprint.device_rows(f"cpu:{socket}").to_pylist()
        assert {row["name"] for row in rows} == {f"on_{socket}"}
        rows_j = sum(row["energy_j"] for row in rows)
        assert rows_j > 0
        assert rows_j + total.idle_j == pytest.approx(total.total_j, rel=1e-9)
        used_j = whole[f"cpu:{socket}"].energy_j(int(starts.min()), int((starts + longs).max()))
        assert total.total_j + (total.other_j or 0.0) == pytest.approx(used_j, rel=1e-9)


ON_ONE_CPU = """
import os
os.sched_setaffinity(0, {1})
import keras
import numpy as np
model = keras.Sequential([keras.layers.Dense(64), keras.layers.Dense(8)])
model.compile("sgd", "mse")
model.fit(np.ones((480, 32), "float32"), np.ones((480, 8), "float32"), batch_size=32, verbose=0)
"""


@needs_two_cpus
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs Keras")
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_every_framework_names_the_threads_that_were_seen(tmp_path: Path, backend: str):
    """Also those that Python knows nothing of; all of them are on the second socket."""
    pytest.importorskip(backend)
    write_script(tmp_path / "train.py", ON_ONE_CPU)
    env = {
        "SMARAGDINE_PROC_ROOT": str(machine_fake.two_sockets(tmp_path / "proc")),
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    options = ("-o", "out", "--trace-steps", "5", "--trace-skip", "3")
    done = smaragdine("run", *options, "train.py", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recording = open_recording(tmp_path / "out")
    events = recording.events
    threads = set(recording.places["tid"].to_pylist())
    assert events.num_rows
    lanes = events["lane"].drop_null().to_pylist()
    assert threads & set(lanes)  # a thread that lives between two looks is not seen
    assert max(lanes) < NO_THREAD
    assert set(events["device"].to_pylist()) == {"cpu:1"}
