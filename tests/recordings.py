"""A recording made by hand, small and exact: every reading and every event is a round number."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from smaragdine.recording.folder import write_info
from smaragdine.recording.format import CALLS, EDGES, MARKS, PLACES, WINDOWS, channel_to_dict
from smaragdine.recording.marks import marks_table
from smaragdine.recording.writer import (
    ReadingsWriter,
    TableWriter,
    write_calls,
    write_edges,
    write_events,
    write_windows,
)
from smaragdine.sensors.base import Channel

MS = 1_000_000
S = 1_000_000_000
T0 = 1_700_000_000 * S
RUN_S = 4
ODD = 'net/layer_0/a "b" \\ {c|d}_50%\n<script>'

_GPU = Channel("gpu:0", "power", "W", "sample", "measured", 20.0, "nvml", window_ms=20.0, detail="ring")
_CPU = Channel("cpu:0", "energy", "J", "counter", "estimated", 100.0, "estimate")


def gpu_w(ms: int) -> float:
    """200 W in every first half of 200 ms, else 100 W; 10 W in the first second."""
    return 10.0 if ms < 1000 else 200.0 if ms % 200 < 100 else 100.0


def _readings(gap: bool) -> list[tuple[int, list[tuple[int, int, float]]]]:
    """From before the program began until after it ended, as a monitor does."""
    gpu = [(T0 + ms * MS, 0, gpu_w(ms - 20)) for ms in range(-180, RUN_S * 1000 + 101, 20)]
    if gap:
        gpu = [row for row in gpu if not 3000 < (row[0] - T0) // MS <= 3600]
    cpu = [(T0 + ms * MS, 1, 100 + 40.0 * ms / 1000) for ms in range(-200, RUN_S * 1000 + 101, 100)]
    return [(0, gpu), (0, cpu)]


def _events(lag_ms: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(
        step: int, name: str, device: str, at: int, long: float, phase: str | None, lane: int | None
    ) -> None:
        begin = T0 + (1000 + 100 * step + at + (lag_ms if device == "gpu:0" else 0)) * MS
        long_ns = round(long * MS)
        rows.append(
            {
                "name": name,
                "device": device,
                "start_ns": begin,
                "duration_ns": long_ns,
                "phase": phase,
                "lane": lane,
                "step": step,
            }
        )

    for step in range(3, 7):
        for layer in range(3):
            add(step, f"net/layer_{layer}/MatMul", "gpu:0", 10 * layer, 10, "forward", 7)
            add(step, f"net/layer_{layer}/MatMul", "gpu:0", 40 + 15 * layer, 15, "backward", 7)
        add(step, "copy", "gpu:0", 5, 20, None, 9)  # beside the first lane
        add(step, "copy", "gpu:0", 15, 20, None, 9)  # crosses the one before it
        add(step, ODD, "gpu:0", 90, 0.5, "other", None)
        add(step, "net", "cpu:0", 0, 60, "forward", 100)
        add(step, "net/layer_0", "cpu:0", 0, 30, "forward", 100)
        add(step, "net/layer_0/MatMul", "cpu:0", 10, 20, "forward", 100)  # ends with what it is in
        add(step, "net/zero", "cpu:0", 30, 0, "forward", 100)
        add(step, "ring", "nic:0", 0, 10, None, 1)
    return rows


def _marks() -> list[dict[str, Any]]:
    who = {"rank": 0, "pid": 42, "source": "torch"}
    rows: list[dict[str, Any]] = [
        {"t_ns": T0, "name": "experiment_begin", "source": "run"},
        {"t_ns": T0 + 900 * MS, "name": "train_begin", **who},
        {"t_ns": T0 + RUN_S * S, "name": "experiment_end", "source": "run"},
        {"t_ns": T0 + 3 * S, "name": "train_end", **who},
        {"t_ns": T0 + 2500 * MS, "name": "checkpoint", "detail": 'to "disk"', **who, "source": "user"},
    ]
    for epoch in range(2):
        rows.append({"t_ns": T0 + (1000 + 1000 * epoch) * MS, "name": "epoch_begin", "index": epoch, **who})
        rows.append({"t_ns": T0 + (1990 + 1000 * epoch) * MS, "name": "epoch_end", "index": epoch, **who})
    for step in range(18):
        # Steps lie back to back; the first of each epoch has no beginning.
        at_ms = 1000 + 100 * (step + 1) + (100 if step >= 9 else 0)
        rows.append({"t_ns": T0 + at_ms * MS, "name": "step_end", "index": step, **who})
    return rows


def region(name: str, begin_ms: int, end_ms: int, number: int) -> list[dict[str, Any]]:
    """What a program leaves that names a stretch of itself."""
    who = {"rank": 0, "pid": 42, "source": "region", "index": number, "detail": name}
    edges = (("region_begin", begin_ms), ("region_end", end_ms))
    return [{"t_ns": T0 + t * MS, "name": mark, **who} for mark, t in edges]


def _window() -> dict[str, Any]:
    steps = [
        {"index": i, "begin_ns": T0 + (1000 + 100 * i) * MS, "end_ns": T0 + (1100 + 100 * i) * MS}
        for i in range(3, 7)
    ]
    return {
        "framework": "torch",
        "source": "torch",
        "rank": 0,
        "pid": 42,
        "asked_ns": T0 + 1299 * MS,
        "begin_ns": T0 + 1300 * MS,
        "end_ns": T0 + 1700 * MS,
        "stopped_ns": T0 + 1701 * MS,
        "steps": steps,
        "events": 60,
        "busy_ns": 400 * MS,
        "placed_ns": 400 * MS,
        "counts_divide": True,
        "remarks": [],
    }


def make(
    folder: Path,
    *,
    power: bool = True,
    events: bool = True,
    gap: bool = False,
    lag_ms: int = 0,
    marked: Sequence[dict[str, Any]] = (),
    **info: Any,
) -> Path:
    """Four seconds, two epochs, eighteen steps of 100 ms, of which four are traced, on a GPU that lags."""
    facts = {
        "smaragdine_version": "0",
        "run_id": "0123456789abcdef",
        "command": ["python", "/home/me/train_it.py", "--epochs", "2"],
        "working_folder": str(folder.parent),
        "begin_ns": T0,
        "end_ns": T0 + RUN_S * S,
        "clock": {"begin": {"wall_ns": T0 - S, "mono_ns": 5 * S}},
        "libraries": {"torch": "2.9"},
        "host": {
            "cpu": "Test CPU & Co",
            "gpus": [{"device": "gpu:0", "name": "Test GPU", "power_limit_w": 700.0}],
        },
        **info,
    }
    channels, readings = ([_GPU, _CPU], _readings(gap)) if power else ([], [])
    marks = marks_table(sorted([*_marks(), *marked], key=lambda mark: mark["t_ns"]) if marked else _marks())
    if not events:
        return put(folder, facts, channels, readings, marks)
    edges = [{"source": "net/layer_0/MatMul", "target": "net/layer_1/MatMul"}]
    return put(folder, facts, channels, readings, marks, [_window()], _events(lag_ms), edges)


def put(
    folder: Path,
    facts: Mapping[str, Any],
    channels: Sequence[Channel],
    readings: Sequence[tuple[int, list[tuple[int, int, float]]]],
    marks: pa.Table,
    windows: Sequence[dict[str, Any]] = (),
    events: Sequence[dict[str, Any]] | pa.Table = (),
    edges: Sequence[dict[str, Any]] = (),
) -> Path:
    """A recording of what is given; without channels nothing was measured, without events nothing traced."""
    folder.mkdir(parents=True)
    known = {"format_version": 1, "status": "complete", "channels": list(map(channel_to_dict, channels))}
    assert write_info(folder, {**known, **facts}) is None
    if channels:
        writer = ReadingsWriter(folder, channels)
        writer.write(readings)
        writer.close()
    table = TableWriter(folder / "marks.arrows", MARKS)
    for batch in marks.to_batches():
        table.write(batch)
    table.close()
    if windows:
        assert write_windows(folder, pa.Table.from_pylist(list(windows), schema=WINDOWS)) is None
    if len(events):
        told = events if isinstance(events, pa.Table) else pa.Table.from_pylist(list(events))
        assert write_events(folder, told) is None
        assert write_edges(folder, pa.Table.from_pylist(list(edges), schema=EDGES)) is None
    return folder


def whole(folder: Path) -> Path:
    """A recording with every table, each of several batches."""
    facts: dict[str, Any] = {"provenance": "measured", "period_ms": 100.0, "sensor": "test"}
    channels = [
        Channel("gpu:0", "power", "W", "sample", window_ms=100.0, **facts),
        Channel("cpu:0", "energy", "J", "counter", wraps_at=10_000.0, **facts),
        Channel("cpu:0", "busy", "s", "counter", **facts),
        Channel("cpu:0", "program", "s", "counter", **facts),
        Channel("cpu:0", "monitor", "s", "counter", **facts),
        Channel("gpu:0", "temperature", "°C", "level", **facts),
    ]
    writer_folder = folder.with_name(f"{folder.name}.readings")
    writer_folder.mkdir(parents=True)
    writer = ReadingsWriter(writer_folder, channels)
    for second in range(-1, RUN_S + 1):
        rows: list[tuple[int, int, float]] = []
        for tenth in range(10):
            t_s = second + tenth / 10
            values = (
                gpu_w(round(t_s * 1000) - 1),
                40 * (t_s + 2),
                t_s + 2,
                (t_s + 2) / 2,
                0.01 * t_s + 1,
            )
            rows += [(T0 + round(t_s * S), n, value) for n, value in enumerate((*values, 50.0 + t_s))]
        writer.write([(0, rows)])
    writer.close()
    places = TableWriter(writer_folder / "places.arrows", PLACES)
    for n in range(2):
        columns = [[T0 + n * MS], [42], [42 + n], [n]]
        arrays = [pa.array(each, field.type) for each, field in zip(columns, PLACES, strict=True)]
        places.write(pa.RecordBatch.from_arrays(arrays, schema=PLACES))
    places.close()
    host = {
        "cpu": "Test CPU",
        "sockets": {"cpu:0": {"logical_cpus": 4, "cores": 2}},
        "gpus": [{"device": "gpu:0", "name": "Test GPU", "power_limit_w": 700.0}],
    }
    rows_of = {**writer.rows_of, "places.arrows": 2}
    told = [channel_to_dict(channel) for channel in channels]
    named = region("load", 1200, 1900, 0)
    make(folder, power=False, marked=named, channels=told, host=host, rows=rows_of)
    for path in writer_folder.iterdir():
        shutil.move(path, folder / path.name)
    assert (
        write_calls(folder, pa.Table.from_pylist([call(1, "aten::mm"), call(2, "aten::sum")], CALLS)) is None
    )
    return folder


def call(number: int, op: str) -> dict[str, Any]:
    """What rebuilds a call, as a window of PyTorch leaves it."""
    return {
        "call": number,
        "framework": "torch",
        "device": "gpu:0",
        "op": op,
        "inputs": '{"dims":[[4]],"strides":[[1]],"types":["float"],"values":[""]}',
        "settings": "{}",
        "kernels": '[["kernel",[1,1,1]]]',
        "count": 12,
        "busy_ns": 150 * MS,
    }
