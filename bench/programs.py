"""Makes programs whose operations have a known power, and a sensor that sees only means over its window.

The coverage figures of docs/uncertainty.md rest on these programs. Seeds are fixed, and nothing here knows
how the uncertainty is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from smaragdine.accounting.power import PowerTrace
from smaragdine.arrays import Floats, Ints
from smaragdine.recording.format import EVENTS

IDLE_W, LIMIT_W = 80.0, 700.0  # an H200's
T0_NS = 1_800_000_000_000_000_000


@dataclass(frozen=True)
class Program:
    events: pa.Table
    true_j: Floats  # per operation `op0`, `op1`, …
    edge_ns: Ints  # where the device's true power changes
    power_w: Floats  # from each edge to the next


def make_program(seed: int, steps: int = 120) -> Program:
    """A training loop: the same operations in every step, in one lane or two.

    Durations are log-normal (median 0.4 ms, some over 20 ms). In even seeds two thirds of the operations are
    memory-bound (20–70 % of the way from idle to limit) and the others compute-bound (70–100 %); in odd ones
    any power between idle and limit is as likely as another. Each execution's duration and power vary by 3 %,
    and between operations there are pauses at idle power. Every fourth program has two lanes.
    """
    random = np.random.default_rng(seed)
    count = int(random.integers(8, 60))
    lanes = 1 + (seed % 4 == 3)
    length_ms = np.minimum(random.lognormal(np.log(0.4), 1.6, count), 60.0)
    bound = (
        random.random(count)
        if seed % 2
        else np.where(
            random.random(count) < 2 / 3, random.uniform(0.2, 0.7, count), random.uniform(0.7, 1.0, count)
        )
    )
    dynamic_w = bound * (LIMIT_W - IDLE_W) / lanes
    lane = np.arange(count) % lanes
    pause_ms = random.exponential(0.02 * length_ms.mean(), count)
    starts: list[Ints] = []
    lengths: list[Ints] = []
    powers: list[Floats] = []
    now_ns = np.full(lanes, T0_NS)
    for _ in range(steps):
        now_ns[:] = now_ns.max() + int(
            random.uniform(0.0, 0.3) * 1e6
        )  # a step begins when the last has ended
        each_ns = np.maximum(1000, length_ms * 1e6 * random.normal(1, 0.03, count)).astype(np.int64)
        start_ns = np.empty(count, dtype=np.int64)
        for op in range(count):
            start_ns[op] = now_ns[lane[op]]
            now_ns[lane[op]] += each_ns[op] + int(pause_ms[op] * 1e6)
        starts.append(start_ns)
        lengths.append(each_ns)
        powers.append(np.maximum(0, dynamic_w * random.normal(1, 0.03, count)))
    start_ns, length_ns, extra_w = np.concatenate(starts), np.concatenate(lengths), np.concatenate(powers)
    op = np.tile(np.arange(count), steps)
    edge_ns, power_w, running = _true_power(start_ns, start_ns + length_ns, extra_w)
    # An operation's true energy: what it adds, and an equal share of the power of the idle device.
    shared_j = np.concatenate(
        [
            [0.0],
            np.cumsum(
                np.where(running > 0, IDLE_W / np.maximum(running, 1), 0.0)
                * np.diff(edge_ns, append=edge_ns[-1])
                * 1e-9
            ),
        ]
    )
    begin, end = np.searchsorted(edge_ns, start_ns), np.searchsorted(edge_ns, start_ns + length_ns)
    energy_j = extra_w * length_ns * 1e-9 + shared_j[end] - shared_j[begin]
    names = pa.DictionaryArray.from_arrays(pa.array(op, pa.int32()), [f"op{i}" for i in range(count)])
    events = pa.table(
        {
            "name": names,
            "device": pa.DictionaryArray.from_arrays(pa.array(np.zeros(op.size, dtype=np.int32)), ["gpu:0"]),
            "start_ns": start_ns,
            "duration_ns": length_ns,
            "phase": pa.nulls(op.size, pa.dictionary(pa.int32(), pa.string())),
            "lane": lane[op],
            "step": np.repeat(np.arange(steps), count),
        },
        schema=EVENTS,
    )
    return Program(events, np.bincount(op, energy_j), edge_ns, power_w)


@dataclass(frozen=True)
class Operation:
    name: str
    phase: str
    length_ms: float
    bound: float  # its power, as a part of the way from idle to limit


def make_model(seed: int, steps: int = 60) -> tuple[Program, list[Operation]]:
    """A model in layers: the same kinds of operations in each, forward and backward, then an optimizer.

    In even seeds operations of one kind draw nearly the same power, as they do on a real GPU; in odd ones
    each has its own, whatever its kind. An optimizer's operations are memory-bound. True energies are in the
    order of the operations.
    """
    random = np.random.default_rng(seed + 777)
    operations = _operations(random, by_kind=seed % 2 == 0)
    count = len(operations)
    length_ms = np.array([operation.length_ms for operation in operations])
    dynamic_w = np.array([operation.bound for operation in operations]) * (LIMIT_W - IDLE_W)
    length_ns = np.maximum(1000, length_ms * 1e6 * random.normal(1, 0.03, (steps, count))).astype(np.int64)
    pause_ns = np.tile(random.exponential(0.03 * length_ms.mean() * 1e6, count), (steps, 1)).astype(np.int64)
    pause_ns[:, -1] += (random.uniform(0, 0.3, steps) * 1e6).astype(np.int64)
    length_ns, pause_ns = length_ns.ravel(), pause_ns.ravel()
    start_ns = T0_NS + np.cumsum(length_ns + pause_ns) - length_ns - pause_ns
    extra_w = np.maximum(0, np.tile(dynamic_w, steps) * random.normal(1, 0.03, steps * count))
    op = np.tile(np.arange(count), steps)
    edge_ns, power_w, _ = _true_power(start_ns, start_ns + length_ns, extra_w)
    phases = ["forward", "backward", "optimizer"]
    phase = np.array([phases.index(operation.phase) for operation in operations], dtype=np.int32)
    events = pa.table(
        {
            "name": pa.DictionaryArray.from_arrays(
                pa.array(op, pa.int32()), [operation.name for operation in operations]
            ),
            "device": pa.DictionaryArray.from_arrays(pa.array(np.zeros(op.size, dtype=np.int32)), ["gpu:0"]),
            "start_ns": start_ns,
            "duration_ns": length_ns,
            "phase": pa.DictionaryArray.from_arrays(pa.array(phase[op]), phases),
            "lane": np.zeros(op.size, dtype=np.int64),
            "step": np.repeat(np.arange(steps), count),
        },
        schema=EVENTS,
    )
    true_j = np.bincount(op, (extra_w + IDLE_W) * length_ns * 1e-9)
    return Program(events, true_j, edge_ns, power_w), operations


def _operations(random: np.random.Generator, by_kind: bool) -> list[Operation]:
    layers, kinds = int(random.integers(2, 13)), int(random.integers(4, 10))
    places = [
        ("embed", ["gather", "add", "norm"], "forward"),
        *((f"layer_{i}", [f"k{k}" for k in range(kinds)], "forward") for i in range(layers)),
        ("head", ["mm", "softmax"], "forward"),
        ("head", ["mm_back", "softmax_back"], "backward"),
        *((f"layer_{i}", [f"k{k}_back" for k in range(kinds)], "backward") for i in reversed(range(layers))),
        ("embed", ["gather_back"], "backward"),
        ("AdamW", [f"o{k}" for k in range(6)], "optimizer"),
    ]
    median_ms = random.lognormal(np.log(0.15), 0.8)
    optimizer = random.uniform(0.1, 0.5)

    def bound() -> float:
        return float(random.uniform(0.1, 0.6) if random.random() < 2 / 3 else random.uniform(0.7, 1.0))

    known: dict[str, tuple[float, float]] = {}
    operations: list[Operation] = []
    for place, names, phase in places:
        for kind in names:
            if kind not in known:
                length_ms = float(min(median_ms * random.lognormal(0, 1.2), 40.0))
                usual = optimizer + random.normal(0, 0.05) if phase == "optimizer" else bound()
                known[kind] = length_ms, usual
            length_ms, usual = known[kind]
            own = usual * random.normal(1, 0.05) if by_kind or phase == "optimizer" else bound()
            operations.append(
                Operation(f"model/{place}/{kind}", phase, length_ms, float(np.clip(own, 0.02, 1.0)))
            )
    return operations


def _true_power(start_ns: Ints, end_ns: Ints, extra_w: Floats) -> tuple[Ints, Floats, Ints]:
    t_ns = np.concatenate([start_ns, end_ns])
    order = np.argsort(t_ns, kind="stable")
    sign = np.repeat([1, -1], start_ns.size)[order]
    edge_ns, first = np.unique(t_ns[order], return_index=True)
    last = np.concatenate([first[1:], [t_ns.size]]) - 1
    extra = np.cumsum(sign * np.tile(extra_w, 2)[order])[last]
    running = np.cumsum(sign)[last]
    return edge_ns, IDLE_W + np.where(running > 0, np.maximum(extra, 0), 0.0), running


def watch(program: Program, window_ms: float, seed: int) -> PowerTrace:
    """Means over windows of about `window_ms`, in whole watts, out of step with the program."""
    random = np.random.default_rng(seed + 10_000)
    window_ns = int(window_ms * 1e6)
    begin, end = int(program.edge_ns[0]) - 10 * window_ns, int(program.edge_ns[-1]) + 10 * window_ns
    lengths = (window_ns * random.normal(1, 0.03, (end - begin) // window_ns + 2)).astype(np.int64)
    cut_ns = begin + np.cumsum(lengths) - int(random.integers(window_ns))
    lasting_ns = np.diff(program.edge_ns, append=program.edge_ns[-1])
    until_j = np.concatenate([[0.0], np.cumsum((program.power_w - IDLE_W) * lasting_ns * 1e-9)])
    at = np.clip(np.searchsorted(program.edge_ns, cut_ns, side="right") - 1, 0, None)
    inside_ns = np.clip(cut_ns - program.edge_ns[at], 0, lasting_ns[at])
    energy_j = until_j[at] + (program.power_w[at] - IDLE_W) * inside_ns * 1e-9
    power_w = np.round(np.diff(energy_j) / (np.diff(cut_ns) * 1e-9) + IDLE_W)
    return PowerTrace(cut_ns[:-1], cut_ns[1:], power_w)
