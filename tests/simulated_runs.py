"""Runs of a training in simulated time, written as recordings by the real writer.

Every run of a program differs a little from every other, as runs do:

    its level        power, by 1 to 2 % (one standard deviation, drawn per program); speed, by half of it
    its operations   each by 0.5 %: another place in memory
    its steps        each by 2 %, and each operation in each of them by 3 %
    a neighbour      another program that keeps some of the processor's CPUs busy: who shares a processor with
                     it is slower. A steady one wants as many in all runs of a program, give or take 5 %; a
                     fickle one changes its mind several times a second, and by how much from run to run

A GPU is seen through means over 20 ms, in whole watts, beside an energy counter; a processor through a
counter that is read every 4 ms, and through CPU times in the kernel's ticks of 10 ms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from recordings import MS, T0, S, put
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.run import Run, alike
from smaragdine.arrays import Floats, Ints
from smaragdine.recording.format import EVENTS
from smaragdine.recording.marks import marks_table
from smaragdine.sensors.base import Channel
from traced_recording import mark, window

Neighbour = Literal["none", "steady", "fickle"]

LAYERS = 6
FIRST, TRACED, LATER = 4, 10, 8  # steps
_KINDS = ("mm", "softmax", "mm_1", "norm", "gelu", "mm_2")
_PHASES = ("forward", "backward", "optimizer")
_GPU_IDLE_W, _GPU_LIMIT_W = 80.0, 700.0
_CPUS, _THREADS = 4, 2
_CPU_IDLE_W, _CORE_W = 20.0, 14.0
_LEAD_NS = 300 * MS  # of the readings, before the program and after it


@dataclass(frozen=True)
class Model:
    """The operations of one step, one after the other."""

    device: str
    level: float  # by how much the level of its runs differs: one standard deviation
    beside: float  # CPUs that a steady neighbour keeps busy
    names: list[str]
    phases: list[str]
    length_ms: Floats
    bound: Floats  # their power, as a part of the way from idle to limit
    pause_ms: Floats


def make_model(seed: int, device: str) -> Model:
    """Six layers between an embedding and a head, and an optimizer: 81 names."""
    random = np.random.default_rng([seed, 1])
    known = {
        kind: (random.lognormal(0, 0.8), random.uniform(0.2, 1.0))
        for kind in (*_KINDS, "gather", "cross_entropy", "mul", "add", "sqrt", "addcdiv")
    }
    blocks = [
        ("embed", ("gather", "add", "norm"), "forward"),
        *((f"layer_{i}", _KINDS, "forward") for i in range(LAYERS)),
        ("head", ("mm", "cross_entropy"), "forward"),
        *((f"layer_{i}", _KINDS, "backward") for i in reversed(range(LAYERS))),
        ("AdamW", ("mul", "add", "sqrt", "addcdiv"), "optimizer"),
    ]
    operations = [(place, kind, phase) for place, kinds, phase in blocks for kind in kinds]
    twice = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5}
    length_ms = np.array([known[kind][0] * twice[phase] for _, kind, phase in operations])
    # A step of 60 to 120 ms.
    length_ms *= random.uniform(60, 120) / length_ms.sum()
    return Model(
        device,
        float(random.uniform(0.01, 0.02)),
        float(np.random.default_rng([seed, 3]).uniform(0.5, 3.0)),
        [f"net/{place}/{kind}" for place, kind, _ in operations],
        [phase for *_, phase in operations],
        length_ms,
        np.array([known[kind][1] for _, kind, _ in operations]),
        random.exponential(0.03 * length_ms.mean(), len(operations)),
    )


def wider(model: Model, layer: str, by: float = 0.1) -> Model:
    """The same with a layer that has so much more to do: it takes so much longer, at the same power."""
    more = np.array([1 + by if f"/{layer}/" in name else 1.0 for name in model.names])
    return replace(model, length_ms=model.length_ms * more)


def layer_of(seed: int) -> str:
    """The layer that `three_sides` makes wider."""
    return f"layer_{seed % LAYERS}"


def three_sides(seed: int, device: str, neighbour: Neighbour, folder: Path) -> list[list[Footprint]]:
    """Three runs of a program, three more of it, and three with a layer that has 10 % more to do; accounted
    as `smaragdine compare` does."""
    model = make_model(seed, device)
    runs: list[Run] = []
    for side, program in enumerate((model, model, wider(model, layer_of(seed)))):
        for number in range(3):
            at = folder / f"{seed}-{side}-{number}"
            runs.append(Run.open(record_run(at, program, 1000 * seed + 10 * side + number, neighbour)))
    both = alike(*runs)
    assert both is not None
    steps, _ = both
    return [steps[i : i + 3] for i in (0, 3, 6)]


@dataclass(frozen=True)
class _Timeline:
    """What happened, piece by piece: from each edge to the next."""

    edge_ns: Ints
    power_w: Floats
    program: Floats  # CPUs that the program kept busy
    busy: Floats  # CPUs that anybody kept busy

    def until(self, rate: Floats, t_ns: Ints) -> Floats:
        """The integral of a rate per second, until each instant."""
        total = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(self.edge_ns) * 1e-9)])
        return np.interp(t_ns, self.edge_ns, total)


def record_run(folder: Path, model: Model, seed: int, neighbour: Neighbour = "none") -> Path:
    random = np.random.default_rng([seed, 2])
    steps, count = FIRST + TRACED + LATER, len(model.names)
    level = 1 + random.normal(0, model.level)
    slower = 1 + random.normal(0, model.level / 2)
    own = 1 + random.normal(0, 0.005, count)
    step = 1 + random.normal(0, 0.02, (steps, 1))
    length_ms = model.length_ms * own * step * random.normal(1, 0.03, (steps, count)) * slower
    pause_ms = model.pause_ms * random.uniform(0.5, 1.5, (steps, count))
    pause_ms[:, -1] += random.uniform(0.5, 2.0, steps)
    # In the time of a machine of its own, then in that of one it shares.
    end_ms = np.cumsum(length_ms + pause_ms) - pause_ms.ravel()
    begin_ms = end_ms - length_ms.ravel()
    step_ms = np.concatenate([[0.0], np.cumsum((length_ms + pause_ms).sum(axis=1))])
    change_ms, others = _others(neighbour, model.beside, random, step_ms[-1])
    # Who gets fewer CPUs than it could use takes longer; caches and memory are shared, too.
    speed = np.minimum(1.0, _CPUS / (_THREADS + others)) / (1 + 0.02 * others)
    alone_ms = np.concatenate([[0.0], np.cumsum(speed[:-1] * np.diff(change_ms))])
    last_ms = change_ms[-1] + (step_ms[-1] + 1 - alone_ms[-1]) / speed[-1]

    def shared_ns(t_ms: Floats) -> Ints:
        wall_ms = np.interp(t_ms, [*alone_ms, step_ms[-1] + 1], [*change_ms, last_ms])
        return np.asarray(T0 + np.round(wall_ms * MS), dtype=np.int64)

    begin_ns, end_ns, step_ns = shared_ns(begin_ms), shared_ns(end_ms), shared_ns(step_ms)
    bound = np.tile(model.bound, steps) * random.normal(1, 0.03, steps * count)
    changes_ns = T0 + np.round(change_ms * MS).astype(np.int64)
    line = _timeline(model.device, level, begin_ns, end_ns, bound, (changes_ns, others))
    channels, readings = (_gpu if model.device == "gpu:0" else _processor)(line, random)
    traced = slice(FIRST, FIRST + TRACED)
    events = _events(model, begin_ns.reshape(steps, count)[traced], end_ns.reshape(steps, count)[traced])
    ms = ((step_ns - T0) / MS).tolist()
    spans = [(n, ms[n], ms[n + 1]) for n in range(FIRST, FIRST + TRACED)]
    told = [mark(t, index=n) for n, t in enumerate(ms[1:])]
    windows = [window(spans[0][1], spans[0][1], spans[-1][2], spans[-1][2], spans, events=events.num_rows)]
    facts: dict[str, Any] = {
        "command": ["train.py"],
        "begin_ns": T0,
        "end_ns": int(step_ns[-1]),
        "clock": {"begin": {"wall_ns": T0, "mono_ns": 5}},
        "host": {
            "gpus": [{"device": "gpu:0", "name": "simulated", "power_limit_w": _GPU_LIMIT_W}],
            "sockets": {"cpu:0": {"logical_cpus": _CPUS, "cores": _CPUS}},
        },
    }
    return put(folder, facts, channels, [(0, readings)], marks_table(told), windows, events)


def _others(
    neighbour: Neighbour, steady: float, random: np.random.Generator, length_ms: float
) -> tuple[Floats, Floats]:
    """When the neighbour changes its mind, and how many CPUs it would like to have from then on."""
    if neighbour == "none":
        return np.zeros(1), np.zeros(1)
    mean = steady if neighbour == "steady" else random.uniform(0.5, 3.0)
    spread = 0.05 if neighbour == "steady" else 0.5
    count = int(4 * length_ms / 300) + 10
    change_ms = np.concatenate([[0.0], np.cumsum(random.exponential(300, count))])
    return change_ms, np.clip(mean * random.lognormal(0, spread, count + 1), 0.0, float(_CPUS))


def _timeline(
    device: str, level: float, begin_ns: Ints, end_ns: Ints, bound: Floats, others: tuple[Ints, Floats]
) -> _Timeline:
    until_ns = int(end_ns[-1]) + 2 * _LEAD_NS
    edge_ns = np.unique(np.concatenate([begin_ns, end_ns, others[0], [T0 - 2 * _LEAD_NS, until_ns]]))
    edge_ns = edge_ns[edge_ns <= until_ns]
    at = np.searchsorted(begin_ns, edge_ns, side="right") - 1
    runs = (at >= 0) & (edge_ns < end_ns[at])
    work = np.where(runs, np.clip(bound[at], 0, 1), 0.0)
    if device == "gpu:0":
        power_w = (_GPU_IDLE_W + (_GPU_LIMIT_W - _GPU_IDLE_W) * work) * level
        return _Timeline(edge_ns, power_w, np.zeros(edge_ns.size), np.zeros(edge_ns.size))
    asked = others[1][np.clip(np.searchsorted(others[0], edge_ns, side="right") - 1, 0, None)]
    program = np.where(runs, _THREADS * np.minimum(1.0, _CPUS / (_THREADS + asked)), 0.0)
    busy = np.minimum(program + asked, float(_CPUS))
    # What a core draws depends on what it does, and on how many of them share a socket's power.
    intensity = np.where(runs, 0.5 + 0.5 * work, 0.0)
    power_w = _CPU_IDLE_W + _CORE_W * (program * intensity + (busy - program) * 0.8) / (1 + 0.05 * busy)
    return _Timeline(edge_ns, power_w * level, program, busy)


def _gpu(line: _Timeline, random: np.random.Generator) -> tuple[list[Channel], list[tuple[int, int, float]]]:
    channels = [
        Channel("gpu:0", "power", "W", "sample", "measured", 20.0, "nvml", window_ms=20.0),
        Channel("gpu:0", "energy", "J", "counter", "measured", 20.0, "nvml"),
    ]
    begin_ns, end_ns = int(line.edge_ns[0]) + int(random.integers(20 * MS)), int(line.edge_ns[-1])
    t_ns = np.arange(begin_ns, end_ns, 20 * MS)
    used_j = line.until(line.power_w, t_ns)
    watts = np.round(np.diff(used_j) / 0.02)
    readings = [(t, 0, w) for t, w in zip(t_ns[1:].tolist(), watts.tolist(), strict=True)]
    counted = np.arange(begin_ns, end_ns, 2 * S)
    joules = np.round(line.until(line.power_w, counted), 3)
    return channels, readings + [(t, 1, j) for t, j in zip(counted.tolist(), joules.tolist(), strict=True)]


def _processor(
    line: _Timeline, random: np.random.Generator
) -> tuple[list[Channel], list[tuple[int, int, float]]]:
    def clock(quantity: str) -> Channel:
        return Channel("cpu:0", quantity, "s", "counter", "measured", 10.0, "activity")

    channels = [
        Channel("cpu:0", "energy", "J", "counter", "measured", 4.0, "rapl"),
        *map(clock, ("busy", "program", "monitor")),
    ]
    begin_ns, end_ns = int(line.edge_ns[0]) + int(random.integers(4 * MS)), int(line.edge_ns[-1])
    energy_ns, activity_ns = np.arange(begin_ns, end_ns, 4 * MS), np.arange(begin_ns, end_ns, 50 * MS)
    monitor_s = 0.001 * (activity_ns - begin_ns) * 1e-9
    # The kernel counts each CPU's idle time in whole ticks.
    idle_s = _CPUS * (activity_ns - begin_ns) * 1e-9 - line.until(line.busy, activity_ns)
    ticks = np.maximum.accumulate(np.floor(idle_s * 100 + random.uniform(0, 1, idle_s.size)))
    busy_s = np.maximum.accumulate(_CPUS * (activity_ns - begin_ns) * 1e-9 - ticks / 100 + monitor_s)
    columns = (
        (energy_ns, np.round(line.until(line.power_w, energy_ns), 4)),
        (activity_ns, busy_s),
        (activity_ns, line.until(line.program, activity_ns)),
        (activity_ns, monitor_s),
    )
    return channels, [
        (t, channel, value)
        for channel, (t_ns, values) in enumerate(columns)
        for t, value in zip(t_ns.tolist(), values.tolist(), strict=True)
    ]


def _events(model: Model, begin_ns: Ints, end_ns: Ints) -> pa.Table:
    steps, count = begin_ns.shape
    name = pa.array(np.tile(np.arange(count, dtype=np.int32), steps))
    phase = np.array([_PHASES.index(phase) for phase in model.phases], dtype=np.int32)
    device = pa.array(np.zeros(steps * count, dtype=np.int32))
    return pa.table(
        {
            "name": pa.DictionaryArray.from_arrays(name, model.names),
            "device": pa.DictionaryArray.from_arrays(device, [model.device]),
            "start_ns": begin_ns.ravel(),
            "duration_ns": (end_ns - begin_ns).ravel(),
            "phase": pa.DictionaryArray.from_arrays(pa.array(np.tile(phase, steps)), list(_PHASES)),
            "lane": np.zeros(steps * count, dtype=np.int64),
            "step": np.repeat(np.arange(FIRST, FIRST + TRACED), count),
        },
        schema=EVENTS,
    )
