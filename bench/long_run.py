"""Makes a training of hours or days on a simulated clock, and writes it as a run does.

It has two sockets with memory at 4 ms, a GPU with samples, counter and telemetry, ten steps a second, epochs,
an evaluation and a traced window.

    make_run(folder, hours)                     # readings are thinned as the run goes on
    make_run(folder, hours, keep_all=True)      # all readings stay

Thinning gives as many rows whatever the period of the readings was. So all but the last half hour is written
every `old_period_ms`, and a week is made in half an hour.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.accounting.thinning import thin
from smaragdine.arrays import Floats, Ints
from smaragdine.recording.folder import write_info
from smaragdine.recording.format import EVENTS, SPOOL_FOLDER, TRACES_FOLDER, WINDOWS, channel_to_dict
from smaragdine.recording.marks import fold_spool, read_spool
from smaragdine.recording.reader import open_recording
from smaragdine.recording.recorder import PIECE_NS
from smaragdine.recording.thinned import read_thinned
from smaragdine.recording.writer import ReadingsWriter, write_events, write_windows
from smaragdine.sensors.base import Channel

S = 1_000_000_000
T0 = 1_790_000_000 * S
CPUS = 32
EPOCH_S, TRACED_S = 900, 60.0  # an epoch lasts; the profiler begins
STEPS_A_S, WINDOW_STEPS = 10, 10
_PID = 4711


def channels(period_ms: float) -> list[Channel]:
    rapl = [
        Channel(f"{kind}:{i}", "energy", "J", "counter", "measured", period_ms, "rapl", wraps_at=262143.3)
        for kind in ("cpu", "dram")
        for i in (0, 1)
    ]
    who = [
        Channel(f"cpu:{i}", quantity, "s", "counter", "measured", period_ms, "proc")
        for i in (0, 1)
        for quantity in ("busy", "program", "monitor")
    ]
    gpu = [
        Channel("gpu:0", "power", "W", "sample", "measured", 20.0, "nvml", window_ms=20.0, detail="ring"),
        Channel("gpu:0", "energy", "J", "counter", "measured", 100.0, "nvml"),
        *(
            Channel("gpu:0", quantity, unit, "sample", "measured", 1000.0, "nvml")
            for quantity, unit in (
                ("temperature", "°C"),
                ("sm_clock", "MHz"),
                ("gpu_utilisation", "%"),
                ("processes", "1"),
            )
        ),
    ]
    return [*rapl, *who, *gpu]


def make_run(
    folder: Path,
    hours: float,
    *,
    keep_all: bool = False,
    period_ms: float = 4.0,
    old_period_ms: float = 20.0,
    region_every_s: float = 0.0,
) -> None:
    seconds = round(hours * 3600)
    (folder / SPOOL_FOLDER).mkdir(parents=True)
    (folder / TRACES_FOLDER).mkdir()
    of = channels(period_ms)
    info = run_info(of)
    write_info(folder, info)
    machine = _Machine()
    writer = ReadingsWriter(folder, of)
    window = _note_window(folder)
    piece_s = PIECE_NS // S
    with open(folder / SPOOL_FOLDER / f"marks-{_PID}.jsonl", "a", encoding="utf-8") as spool:
        _mark(spool, 0.0, "experiment_begin", source="run")
        for begin_s in range(-2, seconds + 2, 50):
            end_s = min(begin_s + 50, seconds + 2)
            # A recorder writes every second; of what is thinned nobody can tell.
            old = end_s < seconds - 1800
            each_s, n = (10, round(1000 / old_period_ms)) if old else (1, round(1000 / period_ms))
            for second in range(begin_s, end_s, each_s):
                of_each = [machine.readings(s, n) for s in range(second, min(second + each_s, end_s))]
                parts = zip(*of_each, strict=True)
                writer.write_columns(*map(np.concatenate, parts))
            _mark_steps(spool, begin_s, min(end_s, seconds), region_every_s)
            spool.flush()
            if end_s // piece_s > max(begin_s, 0) // piece_s:
                writer.next_piece()
                if not keep_all:
                    thin(folder)
        _mark(spool, seconds, "experiment_end", source="run")
    writer.close()
    info |= {"end_ns": T0 + seconds * S, "program_cpu_s": machine.program_cpu_s, "rows": writer.rows_of}
    info["clock"]["end"] = {"wall_ns": T0 + seconds * S, "mono_ns": seconds * S}
    write_info(folder, info)
    _write_traced(folder, window)


def finish_run(folder: Path) -> None:
    """Does what `run` does after the program has ended, except for printing the table."""
    info = open_recording(folder).info
    thinned = read_thinned(folder)
    marks = read_spool(folder, None if thinned is None else thinned.state.spool)
    fold_spool(folder, marks)
    info["rows"]["marks.arrows"] = marks.num_rows
    write_info(folder, info | {"status": "complete", "exit_code": 0})


def run_info(of: list[Channel]) -> dict[str, Any]:
    return {
        "format_version": 1,
        "status": "running",
        "run_id": "0" * 32,
        "command": ["train.py"],
        "working_folder": ".",
        "environment": {},
        "host": {
            "hostname": os.uname().nodename,
            "sockets": {f"cpu:{i}": {"logical_cpus": CPUS} for i in (0, 1)},
            "gpus": [{"device": "gpu:0", "power_limit_w": 700.0}],
        },
        "supervisor_pid": os.getpid(),
        "clock": {"begin": {"wall_ns": T0, "mono_ns": 0}},
        "channels": [channel_to_dict(channel) for channel in of],
        "absent": [],
        "problems": [],
        "monitor": [],
        "begin_ns": T0,
    }


class _Machine:
    """Counters that go on from second to second. A second is the same whatever the length of the run."""

    def __init__(self) -> None:
        self._totals = np.zeros(11)
        self._random = np.random.default_rng(1)

    @property
    def program_cpu_s(self) -> float:
        # The program had children that nobody saw, for a hundredth of its time.
        return float(self._totals[[5, 8]].sum()) * 1.01

    def readings(self, second: int, n: int) -> tuple[Ints, npt.NDArray[np.uint16], Floats]:
        random = self._random
        at_s = second + (np.arange(n) + 1) / n
        # A slow wave over minutes, one of the steps, and a dip of some seconds in every minute.
        wave = 0.5 + 0.3 * np.sin(at_s / 97) + 0.15 * np.sin(2 * np.pi * at_s * 3.7)
        busy = np.where(at_s % 60 < 3, 0.05, wave) * (at_s > 0)
        foreign = 0.1 + 0.08 * np.sin(at_s / 31)
        watts = [(60 + 180 * (busy * (1 - 0.2 * i) + foreign)) * random.normal(1, 0.03, n) for i in (0, 1)]
        watts += [12 + 9 * busy, 12 + 5 * busy + 0 * foreign]
        cpu = [(busy * (1 - 0.2 * i) * 10, foreign * 10, np.full(n, 0.01)) for i in (0, 1)]
        rates = [*watts]
        for program, other, monitor in cpu:
            rates += [program + other + monitor, program, monitor]
        grown = self._totals[:10, None] + np.cumsum(np.array(rates) / n, axis=1)
        self._totals[:10] = grown[:, -1]
        jitter_ns = random.integers(0, 200_000, n)
        stamps = T0 + (at_s * 1e9).astype(np.int64) + jitter_ns
        t_ns, number, value = [], [], []
        for i in range(10):
            t_ns.append(stamps)
            number.append(np.full(n, i, dtype=np.uint16))
            value.append(grown[i] % 262143.3 if i < 4 else grown[i])
        samples_s = second + (np.arange(50) + 1) / 50
        gpu_w = np.where(samples_s % 60 < 3, 130.0, 480 + 150 * np.sin(samples_s / 53)) * (samples_s > 0) + 70
        gpu_w = gpu_w * random.normal(1, 0.02, 50)
        self._totals[10] += float(gpu_w.sum()) / 50 * 1.02  # the counter knows the level
        t_ns.append(T0 + (samples_s * 1e9).astype(np.int64) + random.integers(0, 3_000_000, 50))
        number.append(np.full(50, 10, dtype=np.uint16))
        value.append(gpu_w)
        at_end = np.array([T0 + (second + 1) * S])
        for i, reading in enumerate((self._totals[10], 60.0 + second % 7, 1700.0, 90.0, float(second >= 0))):
            t_ns.append(at_end)
            number.append(np.array([11 + i], dtype=np.uint16))
            value.append(np.array([reading]))
        return np.concatenate(t_ns), np.concatenate(number), np.concatenate(value)


def _mark(spool: Any, at_s: float, name: str, **more: Any) -> None:
    mark = {"t_ns": T0 + round(at_s * 1e9), "name": name, **more}
    spool.write(json.dumps(mark, separators=(",", ":")) + "\n")


def step_ends_s(begin_s: int, end_s: int) -> Floats:
    """Ten steps a second; each hour a checkpoint of three seconds makes one step far longer."""
    ends_s = (np.arange(begin_s * STEPS_A_S, end_s * STEPS_A_S) + 1) / STEPS_A_S
    ends_s = ends_s[(ends_s > 1.0) & ~((ends_s % 3600 > 100) & (ends_s % 3600 < 103))]
    return ends_s + 0.004 * np.sin(ends_s * 13)


def _mark_steps(spool: Any, begin_s: int, end_s: int, region_every_s: float) -> None:
    who = {"rank": 0, "pid": _PID, "source": "torch"}
    lines: list[tuple[float, str, dict[str, Any]]] = [
        (at_s, "step_end", {"index": round(at_s * STEPS_A_S), **who})
        for at_s in step_ends_s(begin_s, end_s).tolist()
    ]
    for epoch in range(max(begin_s, 0) // EPOCH_S, end_s // EPOCH_S + 1):
        for name, at_s in (
            ("epoch_begin", epoch * EPOCH_S + 1.013),
            ("epoch_end", (epoch + 1) * EPOCH_S + 0.507),
        ):
            if begin_s <= at_s < end_s:
                lines.append((at_s, name, {"index": epoch, **who}))
    if region_every_s:
        first = int(np.ceil(max(begin_s, 2) / region_every_s))
        for i in range(first, int(np.ceil(end_s / region_every_s))):
            own = {"rank": 0, "pid": _PID, "source": "region", "index": i, "detail": "load"}
            lines.append((i * region_every_s + 0.001, "region_begin", own))
            lines.append((i * region_every_s + 0.3 * region_every_s, "region_end", own))
    for at_s, name, more in sorted(lines, key=lambda line: line[0]):
        _mark(spool, at_s, name, **more)


def _note_window(folder: Path) -> dict[str, Any]:
    ends_ns = [T0 + round(at_s * 1e9) for at_s in step_ends_s(int(TRACED_S), int(TRACED_S) + 3).tolist()]
    steps = list(itertools.pairwise(ends_ns))[:WINDOW_STEPS]
    window = {
        "framework": "torch",
        "source": "torch",
        "rank": 0,
        "pid": _PID,
        "asked_ns": steps[0][0] - 50_000_000,
        "begin_ns": steps[0][0],
        "end_ns": steps[-1][1],
        "resumed_ns": steps[-1][1] + 30_000_000,
        "stopped_ns": steps[-1][1] + 30_000_000,
        "steps": [
            {"index": round((end - T0) / 1e9 * STEPS_A_S), "begin_ns": begin, "end_ns": end}
            for begin, end in steps
        ],
        "events": 0,
        "busy_ns": 0,
        "placed_ns": 0,
        "counts_divide": True,
        "remarks": [],
    }
    (folder / TRACES_FOLDER / "1.meta.json").write_text(json.dumps(window))
    return window


def _write_traced(folder: Path, window: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = []
    for step in window["steps"]:
        for i in range(20):
            for device, lane in (("gpu:0", 7), ("cpu:0", 1)):
                start_ns = step["begin_ns"] + i * 4_500_000
                rows.append(
                    {
                        "name": f"net/layer_{i % 10}/MatMul",
                        "device": device,
                        "start_ns": start_ns,
                        "duration_ns": 3_000_000 + 40_000 * i,
                        "phase": "forward" if i < 10 else "backward",
                        "lane": lane,
                        "step": step["index"],
                    }
                )
    write_events(folder, pa.Table.from_pylist(rows, schema=EVENTS))
    busy_ns = sum(row["duration_ns"] for row in rows)
    write_windows(
        folder,
        pa.Table.from_pylist(
            [{**window, "events": len(rows), "busy_ns": busy_ns, "placed_ns": busy_ns}], schema=WINDOWS
        ),
    )
    (folder / TRACES_FOLDER / "1.meta.json").unlink()
    (folder / TRACES_FOLDER).rmdir()
