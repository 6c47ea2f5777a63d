"""Programs on the card of `simulated_card`: what each operation truly took, and the recording of it.

A training loop of some seconds: untraced steps, traced ones, untraced ones, and a quiet end. Layers repeat
their calls; shapes differ from layer to layer in some programs, and with them power and time. Every fourth
program has two streams, some wait for their processor for half of the time, and some run into the power
limit.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recordings import MS, T0, S, put
from simulated_card import LIMIT_W, NAME, UUID, SimulatedCall, SimulatedCard
from smaragdine.arrays import Floats, Ints
from smaragdine.recording.format import CALLS, EVENTS_WITH_CALLS
from smaragdine.recording.marks import marks_table
from smaragdine.recording.writer import fit, write_calls
from smaragdine.sensors.base import Channel
from traced_recording import mark, window

BEFORE_S, TRACED_S, AFTER_S, QUIET_S = 1.0, 1.5, 0.5, 0.6


@dataclass(frozen=True)
class Kind:
    """What calls of an operation are like: ranges to draw from."""

    op: str
    time_us: float  # the median
    core_w: tuple[float, float]
    memory_w: tuple[float, float]
    bound: tuple[float, float]
    bytes_s: tuple[float, float]  # of inputs, per second of the call
    hot_time: tuple[float, float]
    wants: tuple[float, float]


# After an H200: 200 W for a gather, 260 for a sum, 370 for a copy, 600 and more for products. With the static
# power of some 120 W.
KINDS = (
    Kind("mm", 250, (480, 760), (50, 130), (0.9, 1.0), (0.1e12, 0.6e12), (0.0, 0.02), (0.7, 1.0)),
    Kind("addmm", 200, (450, 700), (50, 130), (0.9, 1.0), (0.1e12, 0.6e12), (0.0, 0.02), (0.7, 1.0)),
    Kind("attention", 200, (280, 400), (40, 90), (0.6, 0.9), (0.2e12, 1.0e12), (0.0, 0.05), (0.5, 0.9)),
    Kind("gelu", 40, (110, 200), (200, 280), (0.0, 0.2), (1.5e12, 3.5e12), (0.1, 0.4), (0.5, 0.9)),
    Kind("mul", 30, (80, 160), (200, 280), (0.0, 0.1), (1.5e12, 3.5e12), (0.1, 0.4), (0.5, 0.9)),
    Kind("copy_", 30, (60, 110), (140, 210), (0.0, 0.1), (1.5e12, 3.0e12), (0.1, 0.4), (0.4, 0.8)),
    Kind("layer_norm", 40, (90, 140), (130, 190), (0.1, 0.4), (1.0e12, 2.5e12), (0.1, 0.3), (0.4, 0.8)),
    Kind("sum", 25, (50, 90), (50, 100), (0.1, 0.4), (0.8e12, 2.0e12), (0.1, 0.3), (0.2, 0.6)),
    Kind("gather", 60, (20, 50), (30, 60), (0.0, 0.2), (0.2e12, 0.8e12), (0.0, 0.2), (0.2, 0.5)),
)
LARGE_BYTES = 128 << 20  # of inputs so large nothing is left in a cache of 60 MB
PRODUCTS = ("mm", "addmm", "attention")


@dataclass(frozen=True)
class Place:
    """One operation of a step."""

    name: str
    call: int
    phase: str
    lane: int
    pause_s: float  # before it, where the processor is late
    hot: float  # how much of its inputs the calls before it left in the caches


@dataclass(frozen=True)
class Program:
    seed: int
    calls: dict[int, SimulatedCall]
    places: list[Place]
    lanes: int


def make_program(seed: int) -> Program:
    dice = random.Random(seed * 7 + 1)
    lanes = 2 if seed % 4 == 3 else 1
    dense = seed % 5 == 1  # products alone, nearly: the power limit holds the clock down
    kinds = [kind for kind in KINDS if not dense or kind.op in PRODUCTS or dice.random() < 0.4]
    if dense:
        kinds = [replace(kind, core_w=(kind.core_w[1], kind.core_w[1] * 1.1)) for kind in kinds]
    chosen = [kinds[0], *dice.sample(kinds[1:], dice.randint(min(3, len(kinds) - 1), len(kinds) - 1))]
    size = dice.lognormvariate(0, 0.6)
    waits = 0.02 if dense else dice.choice([0.02, 0.1, 0.3, 0.6])  # of a call's length, on average
    shapes = 3 if seed % 3 == 0 else 1
    calls: dict[int, SimulatedCall] = {}
    places: list[Place] = []
    for phase in ("forward", "backward"):
        of_shape = [[_call(kind, dice, size, len(calls)) for kind in chosen] for _ in range(shapes)]
        first = len(calls)
        calls |= {first + i: call for i, call in enumerate(call for each in of_shape for call in each)}
        mean_s = sum(call.time_s for call in of_shape[0]) / len(chosen)
        hot = [dice.betavariate(1, 2) for _ in range(shapes * len(chosen))]
        for layer in range(dice.randint(2, 6)):
            for i, kind in enumerate(chosen):
                number = layer % shapes * len(chosen) + i
                pause_s = dice.expovariate(1 / (waits * mean_s))
                lane = i % lanes
                name = f"net/layer_{layer}/{kind.op}"
                places.append(Place(name, first + number, phase, lane, pause_s, hot[number]))
    for i in range(2):
        call = _call(KINDS[4], dice, 60 * size, len(calls))
        calls[len(calls)] = call
        places.append(Place(f"AdamW/mul_{i}", len(calls) - 1, "optimizer", 0, 0.0, 0.0))
    return Program(seed, calls, places, lanes)


def _call(kind: Kind, dice: random.Random, size: float, number: int) -> SimulatedCall:
    time_s = kind.time_us * 1e-6 * size * dice.lognormvariate(0, 0.5)
    product = kind.op in PRODUCTS
    # Of one in fifteen the values matter much, if it is no product; one in twenty cannot be made again.
    matter = not product and dice.random() < 1 / 15
    values = dice.gauss(1, 0.02) + (dice.choice([-0.08, 0.1]) if matter else 0)
    hot_time = dice.uniform(*kind.hot_time)
    return SimulatedCall(
        op=f"aten::{kind.op}",
        time_s=time_s,
        core_j=dice.uniform(*kind.core_w) * time_s,
        memory_j=dice.uniform(*kind.memory_w) * time_s,
        bound=dice.uniform(*kind.bound),
        bytes=int(dice.uniform(*kind.bytes_s) * time_s) + 1,
        hot_time=hot_time,
        hot_energy=dice.uniform(0.2, 0.7) if product else hot_time * dice.uniform(0.8, 1.5),
        wants=dice.uniform(*kind.wants),
        values=values,
        kernels=2 if product and dice.random() < 0.3 else 1,
        why="it launches other kernels here" if number and dice.random() < 1 / 20 else "",
    )


@dataclass
class _Running:
    """An event that runs, or waits to."""

    place: int
    step: int
    begins_s: float
    time_factor: float
    energy_factor: float
    left: float = 1.0
    began_s: float = -1.0
    energy_j: float = 0.0


@dataclass
class History:
    """What happened, and what it took."""

    place: list[int] = field(default_factory=list[int])
    step: list[int] = field(default_factory=list[int])
    start_s: list[float] = field(default_factory=list[float])
    end_s: list[float] = field(default_factory=list[float])
    energy_j: list[float] = field(default_factory=list[float])  # with its share of static power
    step_end_s: list[float] = field(default_factory=list[float])
    edge_s: list[float] = field(default_factory=list[float])
    power_w: list[float] = field(default_factory=list[float])  # from each edge to the next
    state: list[tuple[float, float, float, bool]] = field(default_factory=list)  # time, clock, warmth, slowed


def run_steps(
    card: SimulatedCard, program: Program, until_s: float, seen: History, waits: float, dice: random.Random
) -> None:
    """Whole steps until that time. `waits`: times the processor's usual lateness, which tracing adds to."""
    while card.now_s < until_s:
        step = len(seen.step_end_s)
        queues: list[list[_Running]] = [[] for _ in range(program.lanes)]
        for number, place in enumerate(program.places):
            late_s = place.pause_s * waits * dice.uniform(0.7, 1.3)
            queues[place.lane].append(
                _Running(number, step, late_s, dice.gauss(1, 0.01), dice.gauss(1, 0.02))
            )
        for queue in queues:
            queue.reverse()
            queue[-1].begins_s += card.now_s + 1e-4 * waits  # the loop itself
        _step(card, program, queues, seen)
        seen.step_end_s.append(card.now_s)


def _step(card: SimulatedCard, program: Program, queues: list[list[_Running]], seen: History) -> None:
    while any(queues):
        running = [queue[-1] for queue in queues if queue and queue[-1].began_s >= 0]
        until_s = card.regulate_at()
        for queue in queues:
            if queue and queue[-1].began_s < 0:
                until_s = min(until_s, queue[-1].begins_s)
        calls = [program.calls[program.places[each.place].call] for each in running]
        wanted = sum(call.wants for call in calls)
        speed = 1.0 if len(calls) < 2 else 1 / max(1.0, wanted)
        rates: list[tuple[float, float]] = []  # of one: work a second, joules a unit of work
        for each, call in zip(running, calls, strict=True):
            hot = program.places[each.place].hot * max(0.0, 1 - call.bytes / LARGE_BYTES)
            rate = speed / (call.time_at(card.clock_mhz, hot) * each.time_factor)
            rates.append((rate, call.energy_at(card.clock_mhz, hot) * call.values * each.energy_factor))
            until_s = min(until_s, card.now_s + each.left / rate)
        length_s = max(until_s - card.now_s, 1e-9)
        static_w = card.static_w()
        seen.edge_s.append(card.now_s)
        above_w = sum(rate * joules for rate, joules in rates)
        seen.power_w.append(card.pass_by(length_s, above_w))
        _look(card, seen)
        for each, (rate, joules) in zip(running, rates, strict=True):
            each.left -= rate * length_s
            each.energy_j += rate * joules * length_s + static_w * length_s / len(running)
        for queue in queues:
            if not queue:
                continue
            first = queue[-1]
            if first.began_s < 0 and first.begins_s <= card.now_s + 1e-9:
                first.began_s = card.now_s
            elif first.began_s >= 0 and first.left < 1e-6:
                queue.pop()
                seen.place.append(first.place)
                seen.step.append(first.step)
                seen.start_s.append(first.began_s)
                seen.end_s.append(card.now_s)
                seen.energy_j.append(first.energy_j)
                if queue:
                    queue[-1].begins_s += card.now_s


def _look(card: SimulatedCard, seen: History) -> None:
    if not seen.state or card.now_s - seen.state[-1][0] >= 0.05:
        seen.state.append((card.now_s, card.clock_mhz, card.temperature_c, card.slowed))


@dataclass(frozen=True)
class Recorded:
    folder: Path
    true_j: dict[tuple[str, str], float]  # name and phase → energy over the traced steps
    slowed: float  # of the traced time, the part in which the limit held the clock down


def record(folder: Path, program: Program, card: SimulatedCard, window_ms: float) -> Recorded:
    """Runs a program on a card, and writes what a monitor and a profiler would have seen."""
    dice = random.Random(program.seed * 7 + 2)
    begin_s, seen = card.now_s, History()
    _rest(card, 0.4, seen)
    run_steps(card, program, card.now_s + 0.3, seen, 1.0, dice)
    used = np.array(seen.power_w[-200:])
    card.settle(float(used.mean()) * dice.uniform(0.6, 1.0))  # it may have run for a while
    run_steps(card, program, card.now_s + BEFORE_S, seen, 1.0, dice)
    first = len(seen.step_end_s)
    run_steps(card, program, card.now_s + TRACED_S, seen, 1.3, dice)
    last = len(seen.step_end_s)
    run_steps(card, program, card.now_s + AFTER_S, seen, 1.0, dice)
    _rest(card, QUIET_S, seen)
    seen.edge_s.append(card.now_s)

    def at_ns(t_s: Any) -> Any:
        return T0 + np.round((np.asarray(t_s) - begin_s) * S).astype(np.int64)

    step = np.array(seen.step)
    traced = np.flatnonzero((step >= first) & (step < last))
    place = np.array(seen.place)[traced]
    start_ns, end_ns = at_ns(seen.start_s)[traced], at_ns(seen.end_s)[traced]
    names = [program.places[i].name for i in place]
    phases = [program.places[i].phase for i in place]
    call = np.array([program.places[i].call for i in place])
    events = pa.table(
        {
            "name": names,
            "device": ["gpu:0"] * len(names),
            "start_ns": start_ns,
            "duration_ns": end_ns - start_ns,
            "phase": phases,
            "lane": np.array([program.places[i].lane for i in place]),
            "step": step[traced],
            "call": call,
        }
    )
    true_j: dict[tuple[str, str], float] = {}
    for name, phase, joules in zip(names, phases, np.array(seen.energy_j)[traced].tolist(), strict=True):
        true_j[name, phase] = true_j.get((name, phase), 0.0) + joules
    ends_ns = at_ns(seen.step_end_s)
    _write(folder, program, card, seen, at_ns, (first, last), ends_ns, events, call, window_ms)
    begin_ns, until_ns = int(ends_ns[first - 1]), int(ends_ns[last - 1])
    slowed = [low for t_s, _, _, low in seen.state if begin_ns <= at_ns(t_s) <= until_ns]
    return Recorded(folder, true_j, float(np.mean(slowed)))


def _rest(card: SimulatedCard, length_s: float, seen: History) -> None:
    until_s = card.now_s + length_s
    while card.now_s < until_s - 1e-9:
        seen.edge_s.append(card.now_s)
        piece_s = min(max(card.regulate_at() - card.now_s, 1e-6), until_s - card.now_s)
        seen.power_w.append(card.pass_by(piece_s, 0.0))
        _look(card, seen)


def _write(
    folder: Path,
    program: Program,
    card: SimulatedCard,
    seen: History,
    at_ns: Any,
    traced: tuple[int, int],
    ends_ns: Ints,
    events: pa.Table,
    call: Ints,
    window_ms: float,
) -> None:
    edge_ns = at_ns(seen.edge_s)
    channels, readings = _readings(card, edge_ns, np.array(seen.power_w), window_ms)
    state = [
        row
        for t_s, clock_mhz, warmth_c, _ in seen.state
        for row in ((int(at_ns(t_s)), 2, clock_mhz), (int(at_ns(t_s)), 3, float(round(warmth_c))))
    ]
    first, last = traced
    ms = ((ends_ns - T0) / MS).tolist()
    spans = [(n, ms[n - 1], ms[n]) for n in range(first, last)]
    busy_ns = events["duration_ns"].to_numpy()
    told = window(spans[0][1], spans[0][1], spans[-1][2], spans[-1][2], spans, events=events.num_rows)
    facts: dict[str, Any] = {
        "command": ["train.py"],
        "begin_ns": T0,
        "end_ns": int(edge_ns[-1]),
        "clock": {"begin": {"wall_ns": T0, "mono_ns": 5}},
        "host": {"gpus": [{"device": "gpu:0", "name": NAME, "uuid": UUID, "power_limit_w": LIMIT_W}]},
    }
    marks = [mark(t, index=n) for n, t in enumerate(ms)]
    marks.append({"t_ns": int(edge_ns[-1]), "name": "experiment_end", "source": "run"})
    table = fit(events, EVENTS_WITH_CALLS, "events")
    put(folder, facts, channels, [(0, readings), (0, state)], marks_table(marks), [told], table)
    counts = np.bincount(call, minlength=len(program.calls))
    busy = np.bincount(call, busy_ns, minlength=len(program.calls))
    rows = [
        {
            "call": number,
            "framework": "torch",
            "device": "gpu:0",
            "op": each.op,
            "inputs": json.dumps({"dims": [[number]], "strides": [[1]], "types": ["float"], "values": [""]}),
            "settings": "{}",
            "kernels": json.dumps([["kernel", [number, 1, 1]]] * each.kernels),
            "count": int(counts[number]),
            "busy_ns": int(busy[number]),
        }
        for number, each in program.calls.items()
        if counts[number]
    ]
    assert write_calls(folder, pa.Table.from_pylist(rows, schema=CALLS)) is None


def _readings(
    card: SimulatedCard, edge_ns: Ints, power_w: Floats, window_ms: float
) -> tuple[list[Channel], list[tuple[int, int, float]]]:
    """Means over the window in whole watts, and the counter as it steps."""
    facts: dict[str, Any] = {"provenance": "measured", "period_ms": window_ms, "sensor": "nvml"}
    channels = [
        Channel("gpu:0", "power", "W", "sample", window_ms=window_ms, **facts),
        Channel("gpu:0", "energy", "J", "counter", **facts),
        Channel("gpu:0", "sm_clock", "MHz", "level", **facts),
        Channel("gpu:0", "temperature", "°C", "level", **facts),
    ]
    until_j = np.concatenate([[0.0], np.cumsum(power_w * np.diff(edge_ns) * 1e-9)]) * card.gain
    step_ns = int(window_ms * MS)
    t_ns = np.arange(edge_ns[0] + card.random.randrange(step_ns), edge_ns[-1], step_ns)
    used_j = np.interp(t_ns, edge_ns, until_j)
    watts = np.round(np.diff(used_j) / (window_ms * 1e-3))
    samples = [(t, 0, w) for t, w in zip(t_ns[1:].tolist(), watts.tolist(), strict=True)]
    # Its steps are seen when it is read, about once a second.
    some = t_ns[:: max(1, round(1000 / window_ms))]
    counted = [
        (t, 1, round(j, 3)) for t, j in zip(some.tolist(), np.interp(some, edge_ns, until_j), strict=True)
    ]
    return channels, samples + counted
