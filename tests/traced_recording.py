"""Recordings of traced runs, made by hand: every figure can be worked out on paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from recordings import MS, T0, put
from smaragdine.recording.format import MARKS
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.sensors.base import Channel

PID = 7
GPU = Channel("gpu:0", "energy", "J", "counter", "measured", 1.0, "test")


def mark(t_ms: float, name: str = "step_end", **more: Any) -> dict[str, Any]:
    return {
        "t_ns": T0 + round(t_ms * MS),
        "name": name,
        "index": None,
        "rank": 0,
        "pid": PID,
        "source": "torch",
        "total": None,
        "detail": None,
        **more,
    }


def window(asked: float, begin: float, end: float, stopped: float, steps: Sequence[Any], **more: Any) -> Any:
    """Times in ms; steps are (index, begin, end)."""
    times = {"asked_ns": asked, "begin_ns": begin, "end_ns": end, "stopped_ns": stopped}
    return {
        "framework": "torch",
        "source": "torch" if steps else None,
        "rank": 0,
        "pid": PID,
        **{name: T0 + round(t * MS) for name, t in times.items()},
        "steps": [
            {"index": index, "begin_ns": T0 + round(b * MS), "end_ns": T0 + round(e * MS)}
            for index, b, e in steps
        ],
        "events": 0,
        "busy_ns": 1000,
        "placed_ns": 1000,
        "counts_divide": True,
        "remarks": [],
        **more,
    }


def event(name: str, begin: float, end: float, step: int | None, phase: str = "forward", **more: Any) -> Any:
    return {
        "name": name,
        "device": "gpu:0",
        "start_ns": T0 + round(begin * MS),
        "duration_ns": round((end - begin) * MS),
        "phase": phase,
        "lane": 0,
        "step": step,
        **more,
    }


def recording(
    folder: Path,
    marks: Sequence[dict[str, Any]] = (),
    windows: Sequence[dict[str, Any]] = (),
    events: Sequence[dict[str, Any]] = (),
    power_w: Sequence[tuple[float, float]] = ((400.0, 100.0),),
    **info: Any,
) -> Recording:
    """`power_w` are (until when in ms, watts), read every ms."""
    facts = {
        "command": ["train.py"],
        "begin_ns": T0,
        "end_ns": T0 + round(power_w[-1][0] * MS),
        "clock": {"begin": {"wall_ns": T0, "mono_ns": 5}},
        "host": {},
        **info,
    }
    readings: list[tuple[int, int, float]] = [(T0, 0, 0.0)]
    t_ms = 0
    for until_ms, watts in power_w:
        while t_ms < until_ms:
            t_ms += 1
            readings.append((T0 + t_ms * MS, 0, readings[-1][2] + watts / 1000))
    told = pa.Table.from_pylist(list(marks), schema=MARKS)  # in this order, be it by time or not
    return open_recording(put(folder, facts, [GPU], [(0, readings)], told, windows, events))


def ten_and_three(folder: Path, later: int = 11, **more: Any) -> Recording:
    """Steps of 10 ms; three of 15 ms traced, and a fourth into which the profiler ran on.

    0 … 100 ms, the profiler from 100 (from 103) to 163 (to 170), then steps again from 180 on.
    """
    ends = [*range(10, 101, 10), 118, 133, 148, 163, *(180 + 10 * i for i in range(later))]
    marks = [mark(t, index=index) for index, t in enumerate(ends)]
    marks += [mark(t + 1, source="torch:1") for t in ends]  # of another optimizer, and another process
    marks += [mark(t + 2, pid=8) for t in ends]
    marks.append(mark(225, "epoch_begin", source="torch.dataloader"))
    steps = [(10, 103, 118), (11, 118, 133), (12, 133, 148)]
    events: list[Any] = []
    for index, begin, _ in steps:
        # 6 ms of work and 9 of waiting
        events += [event("net/a", begin + 1, begin + 5, index), event("net/b", begin + 5, begin + 7, index)]
    windows = [window(100, 103, 163, 170, steps, events=len(events))]
    return recording(folder, marks, windows, events, **more)


def with_a_compilation(folder: Path) -> Recording:
    """Steps of 10 ms, one of which takes 300 ms: it compiles. 100 W all the time, as in `ten_and_three`."""
    return after_the_window(folder, [*range(180, 251, 10), *range(550, 601, 10)], ((700.0, 100.0),))


def slow_input(folder: Path, power_w: float = 10.0) -> Recording:
    """Traced steps take 15 ms at 100 W, operations run for 6 of them. The later ones wait for their input:
    60 ms, at so little power that 54 ms at that of the traced gaps would take several times as much."""
    return after_the_window(folder, [180 + 60 * n for n in range(12)], ((180.0, 100.0), (900.0, power_w)))


def full_queue(folder: Path, later: Sequence[float] | None = None) -> Recording:
    """Steps of 8 ms on the device are handed over within 1 ms, and every tenth of `later` ones waits until
    they are done. Three are traced."""
    ends = [float(n) for n in range(1, 11)]  # two warm up, the others are before the window
    ends += [13.0 + n for n in range(4)]  # traced, and one in which the profiler stops
    for length in waits_every_tenth(50) if later is None else later:
        ends.append(ends[-1] + length)
    steps = [(10 + n, 12.0 + n, 13.0 + n) for n in range(3)]
    events = [event("net/a", 12 + 8 * n, 20 + 8 * n, 10 + n) for n in range(3)]
    marks = [mark(t, index=index) for index, t in enumerate(ends)]
    windows = [window(11, 11.5, 15.5, 15.8, steps, events=len(events))]
    return recording(folder, marks, windows, events, ((ends[-1] + 100.0, 100.0),))


def waits_every_tenth(count: int) -> list[float]:
    """Lengths of steps, of 10 ms in the mean."""
    return [91.0 if n % 10 == 4 else 1.0 for n in range(count)]


def waits_and_compiles(folder: Path) -> Recording:
    """As `full_queue`, and one step compiles for 3 s: it is longer than thirty waits."""
    lengths = waits_every_tenth(50)
    lengths[20] = 3000.0
    return full_queue(folder, lengths)


def after_the_window(
    folder: Path, later: Sequence[float], power_w: Sequence[tuple[float, float]]
) -> Recording:
    """Steps before and in the window are those of `ten_and_three`; `later` are the ends of the others."""
    ends = [*range(10, 101, 10), 118, 133, 148, 163, *later]
    steps = [(10, 103, 118), (11, 118, 133), (12, 133, 148)]
    work = (("net/a", 1, 5), ("net/b", 5, 7))
    events = [event(name, begin + at, begin + to, n) for n, begin, _ in steps for name, at, to in work]
    marks = [mark(t, index=index) for index, t in enumerate(ends)]
    return recording(folder, marks, [window(100, 103, 163, 170, steps, events=len(events))], events, power_w)
