"""Whose a socket's power was, against rational arithmetic and on a machine with a competitor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli import environment, info, show_json, smaragdine, write_script
from powercap_fake import PowercapTree
from smaragdine.accounting.activity import activity
from smaragdine.accounting.baseline import not_idle
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.run import Run
from smaragdine.accounting.split import Split
from smaragdine.accounting.summary import shares
from smaragdine.accounting.traces import device_traces
from smaragdine.recording.format import EVENTS, MARKS
from smaragdine.recording.reader import Recording, Series, open_recording
from smaragdine.sensors.base import Channel

MS = 1_000_000
S = 1_000_000_000
T0 = 1_700_000_000 * S
NS = Fraction(1, S)

Points = Sequence[tuple[int, float]]  # ns since T0, running total
Stretch = tuple[int, int, Fraction]  # start, end, watts
PARTS = ("program", "static", "other", "monitor")


@dataclass(frozen=True)
class Canned:
    """As much of a recording as the split and its baseline ask for."""

    info: dict[str, Any]
    tables: Mapping[str, list[Series]]
    path: Path = field(default=Path("runs/idle"))
    thinned: None = None
    damage: tuple[str, ...] = ()
    events: pa.Table = field(default_factory=EVENTS.empty_table)
    marks: pa.Table = field(default_factory=MARKS.empty_table)

    def series(self, table: str) -> list[Series]:
        return self.tables.get(table, [])


def series(device: str, quantity: str, segments: Sequence[Points], **more: Any) -> Series:
    facts: dict[str, Any] = {"provenance": "measured", "period_ms": 4.0, "sensor": "test", **more}
    points = [(t, v, number) for number, each in enumerate(segments) for t, v in each]
    return Series(
        Channel(device, quantity, "s", "counter", **facts),
        np.array([T0 + t for t, _, _ in points], dtype=np.int64),
        np.array([v for _, v, _ in points], dtype=np.float64),
        np.array([number for _, _, number in points], dtype=np.int16),
    )


def canned(power: Sequence[Series], activity: Sequence[Series], end: int = 10 * S, **more: Any) -> Recording:
    sockets = {f"cpu:{n}": {"logical_cpus": 4, "cores": 2} for n in range(4)}
    facts = {"begin_ns": T0, "end_ns": T0 + end, "host": {"sockets": sockets}, **more}
    made: Any = Canned(facts, {"power": list(power), "activity": list(activity)})
    return made


def ramp(*pieces: tuple[float, float], step: float = 0.04, start: float = 0.0) -> list[tuple[int, float]]:
    """A running total from (seconds, rate) pieces, read every `step` seconds."""
    t, total, points = start, 0.0, [(round(start * S), 0.0)]
    for seconds, rate in pieces:
        for _ in range(round(seconds / step)):
            t, total = t + step, total + rate * step
            points.append((round(t * S), total))
    return points


def used(
    socket: int, busy: Sequence[Points], program: Sequence[Points], monitor: Sequence[Points] | None = None
) -> list[Series]:
    device = f"cpu:{socket}"
    members = [series(device, "busy", busy), series(device, "program", program)]
    return [*members, series(device, "monitor", monitor)] if monitor is not None else members


def run_split(
    recording: Recording, baseline: Recording | None = None
) -> tuple[dict[str, Split], tuple[str, ...]]:
    run = Run(recording, None if baseline is None else Run(baseline))
    traces, splits, remarks = run.traces, run.power.splits, run.power.remarks
    for device, each in splits.items():
        check_conservation(traces[device], each)
    return splits, remarks


def check_conservation(trace: PowerTrace, found: Split) -> None:
    """Stretch by stretch: the three parts are the device's power, none below nothing, static inside."""
    assert (found.program.end_ns > found.program.start_ns).all()
    assert (found.program.start_ns[1:] >= found.program.end_ns[:-1]).all()
    edges = np.stack([found.program.start_ns, found.program.end_ns])
    covered_ns = np.diff(trace.covered_until_ns(edges), axis=0)[0]
    assert (covered_ns == edges[1] - edges[0]).all(), "power where the device's is not known"
    middle_ns = edges[0]
    at = np.searchsorted(trace.start_ns, middle_ns, side="right") - 1
    total = found.program.power_w + found.other.power_w + found.monitor.power_w
    assert total == pytest.approx(trace.power_w[at], rel=1e-12, abs=1e-12)
    for part in PARTS:
        assert (getattr(found, part).power_w >= 0).all()
    assert (found.static.power_w <= found.program.power_w * (1 + 1e-12)).all()


def joules(found: Split, start: float, end: float) -> dict[str, float]:
    window = T0 + round(start * S), T0 + round(end * S)
    return {part: getattr(found, part).energy_j(*window) for part in PARTS}


# --- the oracle: intervals and stretches in rational numbers, one at a time ---------------------------------


def at(points: Points, t: int) -> Fraction:
    """A running total between its readings; before the first and after the last it stands still."""
    if not points or t <= points[0][0]:
        return Fraction(points[0][1]) if points else Fraction(0)
    for (t0, v0), (t1, v1) in pairwise(points):
        if t0 <= t <= t1:
            return Fraction(v0) + (Fraction(v1) - Fraction(v0)) * (t - t0) / (t1 - t0)
    return Fraction(points[-1][1])


def oracle_points(busy: Points, program: Points, run: tuple[int, int]) -> list[int]:
    first, last = max(busy[0][0], program[0][0]), min(busy[-1][0], program[-1][0])
    edges = sorted({first, last, *(t for t in run if first < t < last)})
    found = edges[:1]
    for a, b in pairwise(edges):
        chosen = [a]
        for t, v in busy:
            long = t - chosen[-1] >= 100 * MS
            enough = Fraction(v) - at(busy, chosen[-1]) >= Fraction(0.1) or t - chosen[-1] >= S
            if a < t < b and long and enough:
                chosen.append(t)
        if len(chosen) > 1 and b - chosen[-1] < 100 * MS:
            chosen.pop()
        found += [*chosen[1:], b]
    return found


Interval = tuple[int, int, Fraction, Fraction, Fraction]


def oracle_intervals(
    segments: Sequence[tuple[Points, Points, Points]], run: tuple[int, int], exact: float | None
) -> list[Interval]:
    found: list[Interval] = []
    for number, (busy, program, monitor) in enumerate(segments):
        if number:
            zeros = sum(v == 0 for _, v in program)
            program = program[max(zeros - 1, 0) :] if any(v for _, v in program) else []
        if not busy or not program or min(busy[-1][0], program[-1][0]) <= max(busy[0][0], program[0][0]):
            continue
        for a, b in pairwise(oracle_points(busy, program, run)):
            p, m = at(program, b) - at(program, a), at(monitor, b) - at(monitor, a)
            found.append((a, b, max(at(busy, b) - at(busy, a), p + m), p, m))
    inside = [each for each in found if run[0] <= each[0] and each[1] <= run[1]]
    free = sum((busy - p - m for _, _, busy, p, m in inside), Fraction(0))
    seen = sum((p for _, _, _, p, _ in inside), Fraction(0))
    if sum(b - a for a, b, *_ in inside) < run[1] - run[0] or exact is None or exact <= seen or not free:
        return found
    part = min(Fraction(1), (Fraction(exact) - seen) / free)
    return [
        (a, b, busy, p + part * (busy - p - m) if (a, b, busy, p, m) in inside else p, m)
        for a, b, busy, p, m in found
    ]


def oracle(
    stretches: Sequence[Stretch],
    intervals: Sequence[Interval],
    cpus: int,
    static_w: float,
    window: tuple[int, int],
) -> dict[str, Fraction]:
    total = dict.fromkeys([*PARTS, "split_s"], Fraction(0))
    for start, end, watts in stretches:
        for a, b, busy, p, m in intervals:
            seconds = max(0, min(end, b, window[1]) - max(start, a, window[0])) * NS
            idle = min(watts, Fraction(static_w))
            static = idle * min(Fraction(1), p / ((b - a) * NS * cpus))
            program = static + (watts - idle) * (p / busy if busy else 0)
            monitor = (watts - idle) * (m / busy if busy else 0)
            total["static"] += static * seconds
            total["program"] += program * seconds
            total["monitor"] += monitor * seconds
            total["other"] += (watts - program - monitor) * seconds
            total["split_s"] += seconds
    return total


def stretches_of(trace: PowerTrace) -> list[Stretch]:
    rows = zip(trace.start_ns.tolist(), trace.end_ns.tolist(), trace.power_w.tolist(), strict=True)
    return [(start - T0, end - T0, Fraction(watts)) for start, end, watts in rows]


TICK = 1 / 128  # exact in binary, so that the oracle and numpy choose the same intervals
BUSY = st.lists(
    st.tuples(st.sampled_from([40 * MS, 40 * MS, 100 * MS, 7 * MS, 600 * MS, 1100 * MS]), st.integers(0, 30)),
    min_size=1,
    max_size=12,
)
FINE = st.lists(
    st.tuples(st.sampled_from([8 * MS, 20 * MS, 45 * MS, 400 * MS]), st.sampled_from([0, 0, 1, 6, 12])),
    min_size=1,
    max_size=20,
)
SEGMENT = st.tuples(
    BUSY, FINE, st.lists(st.integers(0, 2), min_size=13, max_size=13), st.integers(0, 30 * MS)
)


def build(
    draws: Sequence[tuple[list[tuple[int, int]], list[tuple[int, int]], list[int], int]],
) -> list[tuple[Points, Points, Points]]:
    """Running totals of each segment; one begins some time after the one before it has ended."""
    found: list[tuple[Points, Points, Points]] = []
    begin = 0
    for busy_steps, program_steps, monitor_steps, late in draws:
        busy_ns = np.cumsum([begin, *(ns for ns, _ in busy_steps)]).tolist()
        busy = np.cumsum([0, *(n for _, n in busy_steps)]) * TICK
        program_ns = np.cumsum([begin + late, *(ns for ns, _ in program_steps)]).tolist()
        program = np.cumsum([0, *(n for _, n in program_steps)]) * TICK / 2
        monitor = np.cumsum(monitor_steps[: len(busy_ns)]) * TICK / 8
        points = [
            list(zip(t, v.tolist(), strict=True))
            for t, v in ((busy_ns, busy), (program_ns, program), (busy_ns, monitor))
        ]
        found.append((points[0], points[1], points[2]))
        begin = max(busy_ns[-1], program_ns[-1]) + 333 * MS
    return found


@settings(max_examples=300, deadline=None)
@given(
    st.lists(SEGMENT, min_size=1, max_size=2),
    st.lists(st.tuples(st.sampled_from([4 * MS, 90 * MS, 300 * MS, 2 * S]), st.floats(0, 40)), max_size=12),
    st.tuples(st.integers(0, 300 * MS), st.integers(0, 300 * MS) | st.integers(0, 4 * S)),
    st.integers(1, 8),
    st.none() | st.floats(0, 3),
    st.just(0.0) | st.floats(0.01, 60),
    st.lists(st.tuples(st.integers(0, 5 * S), st.integers(0, 5 * S)), min_size=1, max_size=3),
)
def test_the_split_against_the_oracle(
    draws: Any,
    power: list[tuple[int, float]],
    bounds: tuple[int, int],
    cpus: int,
    exact: float | None,
    static_w: float,
    windows: list[tuple[int, int]],
):
    segments = build(draws)
    run = bounds[0], bounds[0] + bounds[1]
    t = np.cumsum([13 * MS, *(ns for ns, _ in power)]).tolist()
    counter = series("cpu:0", "energy", [list(zip(t, np.cumsum([0.0, *(j for _, j in power)]), strict=True))])
    recording = canned(
        [counter],
        used(0, *([segment[i] for segment in segments] for i in range(3))),
        host={"sockets": {"cpu:0": {"logical_cpus": cpus}}, "estimate": {}},
        begin_ns=T0 + run[0],
        end_ns=T0 + run[1],
        program_cpu_s=exact,
    )
    idle = canned([series("cpu:0", "energy", [[(0, 0.0), (200 * MS, static_w / 5)]])], [])
    trace = device_traces(recording)["cpu:0"]
    splits, _ = run_split(recording, baseline=idle)
    intervals = oracle_intervals(segments, run, exact)
    everything = oracle(stretches_of(trace), intervals, cpus, 1.0, (-S, 99 * S))
    if not everything["split_s"] or not trace.power_w.any():
        assert splits == {}
        return
    found = splits["cpu:0"]
    if static_w:  # an idle machine of 0 W is no baseline
        assert found.static_w == pytest.approx(static_w, rel=1e-9)
    for a, b in [*windows, (0, 99 * S)]:
        window = min(a, b), max(a, b)
        expected = oracle(stretches_of(trace), intervals, cpus, found.static_w, window)
        got = joules(found, window[0] / S, window[1] / S)
        for part in PARTS:
            assert got[part] == pytest.approx(float(expected[part]), rel=1e-9, abs=1e-9), part
    in_run = oracle(stretches_of(trace), intervals, cpus, found.static_w, run)
    run_ns = T0 + run[0], T0 + run[1]
    assert found.unsplit_s == pytest.approx(trace.covered_s(*run_ns) - float(in_run["split_s"]), abs=1e-9)
    whole = sum(float(in_run[part]) for part in ("program", "other", "monitor"))
    assert found.unsplit_j == pytest.approx(trace.energy_j(*run_ns) - whole, rel=1e-9, abs=1e-9)


# --- the physics --------------------------------------------------------------------------------------------


def energy(device: str, *pieces: tuple[float, float], **more: Any) -> Series:
    return series(device, "energy", [ramp(*pieces, step=0.004)], **more)


def test_who_is_busy_pays_when_it_is_busy():
    """A second alone on one of four CPUs, then asleep while another process works."""
    recording = canned(
        [energy("cpu:0", (1, 60.0), (1, 60.0), (1, 20.0))],
        used(0, [ramp((2, 1.0), (1, 0.0))], [ramp((1, 1.0), (2, 0.0), step=0.008)]),
    )
    found = run_split(recording)[0]["cpu:0"]
    assert found.static_w == pytest.approx(20)
    assert found.basis == "the lowest second of this recording, in which the socket was 2% busy"
    # A CPU of four: a quarter of the static 20 W, and all of the dynamic 40 W.
    assert joules(found, 0, 0.88) == pytest.approx(
        {"program": 45 * 0.88, "static": 5 * 0.88, "other": 15 * 0.88, "monitor": 0}
    )
    # One interval of 120 ms has the change in it.
    assert joules(found, 0, 1.12)["program"] == pytest.approx(45, rel=1e-6)
    assert joules(found, 1.12, 3) == pytest.approx(
        {"program": 0, "static": 0, "other": 60 * 0.88 + 20, "monitor": 0}, abs=1e-9
    )
    assert found.unsplit_s == 0


def test_a_baseline_says_which_sockets_worked_meanwhile():
    quiet = used(0, [ramp((10, 0.2))], [ramp((10, 0.0))])
    working = used(1, [ramp((5, 4.0), (5, 0.0))], [ramp((10, 0.0))])
    recording = canned([], [*quiet, *working])
    assert not_idle(recording, activity(recording).sockets) == [
        "cpu:1 was 50% busy: what it drew is not its idle power"
    ]


def test_at_one_percent_one_does_not_pay_for_an_idle_socket():
    """Ticks of 10 ms: the busy total stands still most of the time, and then jumps."""
    busy = [(t, int(v * 100 + 1e-6) / 100) for t, v in ramp((10, 0.02))]
    recording = canned(
        [energy("cpu:0", (9, 21.0), (1, 20.0))], used(0, [busy], [ramp((10, 0.01), step=0.02)])
    )
    found = run_split(recording)[0]["cpu:0"]
    spent = joules(found, 0, 10)
    # 1 % of one of four CPUs of 20 W for 10 s, and half of the 9 J that came on top.
    assert spent["static"] == pytest.approx(200 * 0.01 / 4, rel=1e-6)
    assert spent["program"] - spent["static"] == pytest.approx(4.5, rel=0.1)
    assert spent["other"] == pytest.approx(209 - spent["program"])


def test_with_nothing_busy_all_is_other():
    recording = canned([energy("cpu:0", (2, 30.0))], used(0, [ramp((2, 0.0))], [ramp((2, 0.0))]))
    found = run_split(recording)[0]["cpu:0"]
    assert joules(found, 0, 2) == pytest.approx({"program": 0, "static": 0, "other": 60, "monitor": 0})


def test_the_monitor_pays_its_own_share():
    """It pays dynamic power alone; what it occupies of an idle socket is other processes'."""
    recording = canned(
        [energy("cpu:0", (2, 50.0))],
        used(0, [ramp((2, 1.0))], [ramp((2, 0.5))], [ramp((2, 0.1))]),
    )
    idle = canned([energy("cpu:0", (1, 10.0))], [], end=S)
    splits, remarks = run_split(recording, baseline=idle)
    assert remarks == ()
    assert splits["cpu:0"].basis == "the mean of idle"
    assert splits["cpu:0"].static_w == pytest.approx(10)
    assert joules(splits["cpu:0"], 0, 2) == pytest.approx(
        {"program": 80 * 0.5 + 20 / 8, "static": 20 / 8, "monitor": 8, "other": 100 - 40 - 2.5 - 8}
    )


def test_process_clocks_may_run_ahead_of_the_ticks():
    """Program and monitor used more than the busy time shows: together they are all of it."""
    recording = canned(
        [energy("cpu:0", (2, 50.0))],
        used(0, [ramp((2, 0.9))], [ramp((2, 0.9))], [ramp((2, 0.1))]),
    )
    idle = canned([energy("cpu:0", (1, 10.0))], [], end=S)
    spent = joules(run_split(recording, baseline=idle)[0]["cpu:0"], 0, 2)
    assert spent["monitor"] == pytest.approx(8)
    assert spent["program"] == pytest.approx(72 + 20 * 0.9 / 4)


def test_two_sockets_and_their_memories_each_by_their_own_share():
    recording = canned(
        [
            energy("cpu:0", (2, 40.0)),
            energy("dram:0", (2, 8.0)),
            energy("cpu:1", (2, 40.0)),
            energy("dram:1", (2, 8.0)),
            energy("cpu:0/core", (2, 30.0), scope="part"),
            energy("psys", (2, 99.0), scope="whole"),
            energy("gpu:0", (2, 99.0)),
        ],
        [
            *used(0, [ramp((2, 2.0))], [ramp((2, 1.5))]),
            *used(1, [ramp((2, 2.0))], [ramp((2, 0.0))]),
        ],
    )
    idle = canned([energy(f"{kind}:{n}", (1, 4.0)) for kind in ("cpu", "dram") for n in (0, 1)], [], end=S)
    splits, remarks = run_split(recording, baseline=idle)
    assert remarks == ()
    assert sorted(splits) == ["cpu:0", "cpu:1", "dram:0", "dram:1"]
    occupied = 1.5 / 4
    assert joules(splits["cpu:0"], 0, 2)["program"] == pytest.approx(72 * 0.75 + 8 * occupied)
    assert joules(splits["dram:0"], 0, 2)["program"] == pytest.approx(8 * 0.75 + 8 * occupied)
    assert joules(splits["cpu:1"], 0, 2)["other"] == pytest.approx(80)
    assert joules(splits["dram:1"], 0, 2)["program"] == 0


def test_what_passed_in_a_restart_is_nobodys():
    """Power is known again at once; whose it is, only when the successor was told whom to watch."""
    power = [ramp((2, 50.0), step=0.004), ramp((3, 50.0), start=3.0, step=0.004)]
    busy = [ramp((2, 1.0)), ramp((3, 1.0), start=3.0)]
    program = [ramp((2, 1.0)), ramp((0.48, 0.0), (2.52, 1.0), start=3.0)]
    recording = canned(
        [series("cpu:0", "energy", power)], used(0, busy, program), end=6 * S, program_cpu_s=6.0
    )
    idle = canned([energy("cpu:0", (1, 10.0))], [], end=S)
    found = run_split(recording, baseline=idle)[0]["cpu:0"]
    assert found.unsplit_s == pytest.approx(0.48)
    assert found.unsplit_j == pytest.approx(24)
    spent = joules(found, 0, 6)
    # The kernel's total is more than was seen, but the rest may have been spent while nobody looked.
    assert spent["program"] == pytest.approx(4.52 * (40 + 10 / 4))
    assert spent["other"] == pytest.approx(4.52 * 7.5)
    assert found.program.missing(T0, T0 + 6 * S) == [(T0 + 2 * S, T0 + 3 * S + 480 * MS)]


def test_what_was_spent_in_a_restart_is_not_put_into_the_time_that_was_seen():
    """Half of the busy time is the program's, of whose ten CPU-seconds four were spent unseen."""
    busy = [ramp((3, 2.0)), ramp((3, 2.0), start=7.0)]
    program = [ramp((3, 1.0)), ramp((3, 1.0), start=7.0)]
    recording = canned([], used(0, busy, program), program_cpu_s=10.0)
    found = shares(recording, T0, T0 + 10 * S)["cpu:0"]
    assert (found.program, found.other, found.monitor) == pytest.approx((0.5, 0.5, 0.0))


def test_activity_that_ends_early_leaves_the_rest_unsplit():
    recording = canned(
        [energy("cpu:0", (4, 50.0))],
        used(0, [ramp((2, 1.0))], [ramp((2, 0.5))]),
        end=4 * S,
        program_cpu_s=9.0,
    )
    found = run_split(recording)[0]["cpu:0"]
    assert (found.unsplit_s, found.unsplit_j) == pytest.approx((2, 100))
    assert joules(found, 2, 4) == {"program": 0, "static": 0, "other": 0, "monitor": 0}


def test_children_nobody_saw_are_in_the_kernels_total():
    """Of 1 CPU-second that was nobody's, the kernel says that the program used 0.4."""
    recording = canned(
        [energy("cpu:0", (2, 50.0))],
        used(0, [ramp((2, 1.0))], [ramp((2, 0.5), (0.04, 0.0))]),
        end=2 * S,
        program_cpu_s=1.4,
    )
    idle = canned([energy("cpu:0", (1, 10.0))], [], end=S)
    spent = joules(run_split(recording, baseline=idle)[0]["cpu:0"], 0, 2)
    assert spent["program"] == pytest.approx(80 * 0.7 + 20 * 0.7 / 4)


def test_the_program_pays_nothing_before_its_first_instant():
    """It starts in the middle of what would be one interval, and is charged from there."""
    program = [(0, 0.0), (500 * MS, 0.0), (2 * S, 1.5)]
    recording = canned(
        [energy("cpu:0", (0.5, 10.0), (1.5, 50.0))],
        used(0, [[(0, 0.0), (480 * MS, 0.0), (520 * MS, 0.02), (2 * S, 1.5)]], [program]),
        begin_ns=T0 + 500 * MS,
        end=2 * S,
    )
    idle = canned([energy("cpu:0", (1, 10.0))], [], end=S)
    found = run_split(recording, baseline=idle)[0]["cpu:0"]
    assert joules(found, 0, 0.5)["program"] == 0
    assert joules(found, 0.5, 2)["program"] == pytest.approx(1.5 * 42.5)


# --- where static power comes from --------------------------------------------------------------------------


def estimated(**facts: Any) -> Recording:
    return canned(
        [
            energy("cpu:0", (2, 45.0), provenance="estimated", sensor="estimate"),
            energy("dram:0", (2, 6.0), provenance="estimated", sensor="estimate"),
        ],
        used(0, [ramp((2, 2.0))], [ramp((2, 1.0))]),
        end=2 * S,
        host={"sockets": {"cpu:0": {"logical_cpus": 4}}, **facts},
    )


def test_an_estimate_knows_its_own_idle_power():
    facts = {
        "cpu:0": {"idle_w": 20.0, "rated_w": 70.0, "from": "?"},
        "dram:0": {"gib": 16.0, "w_per_gib": 0.375},
    }
    splits, remarks = run_split(estimated(estimate=facts))
    assert remarks == ()
    assert {found.basis for found in splits.values()} == {"the idle power of the estimate"}
    assert joules(splits["cpu:0"], 0, 2)["program"] == pytest.approx(40 / 4 + 50 / 2)
    # Memory draws what it draws whatever the program does: by occupancy alone.
    assert joules(splits["dram:0"], 0, 2)["program"] == pytest.approx(12 / 4)


@pytest.mark.parametrize("facts", [{}, {"estimate": {"cpu:0": {"idle_w": "much"}}}, {"estimate": None}])
def test_an_estimate_without_figures_is_like_a_measurement(facts: dict[str, Any]):
    found = run_split(estimated(**facts))[0]["cpu:0"]
    assert found.static_w == pytest.approx(45)
    assert found.basis == "the lowest second of this recording, in which the socket was 50% busy"


def test_an_estimate_is_no_baseline_of_a_measurement():
    recording = canned([energy("cpu:0", (2, 50.0))], used(0, [ramp((2, 1.0))], [ramp((2, 0.5))]), end=2 * S)
    idle = canned([energy("cpu:0", (1, 10.0), provenance="estimated")], [], end=S)
    splits, remarks = run_split(recording, baseline=idle)
    assert splits["cpu:0"].static_w == pytest.approx(50)
    assert remarks == ("cpu:0: no measured power of it in idle",)


@pytest.mark.parametrize(
    ("power", "static_w", "basis"),
    [
        ([(0.4, 30.0), (0.2, 20.0)], 20.0, "the lowest 100 ms of this recording, in which"),
        ([(0.048, 30.0), (0.02, 25.0)], 25.0, "the lowest reading of this recording"),
    ],
)
def test_a_recording_of_less_than_a_second(power: list[tuple[float, float]], static_w: float, basis: str):
    recording = canned([energy("cpu:0", *power)], used(0, [ramp((1, 1.0))], [ramp((1, 1.0))]), end=S)
    found = run_split(recording)[0]["cpu:0"]
    assert found.static_w == pytest.approx(static_w)
    assert found.basis.startswith(basis)


# --- what cannot be split -----------------------------------------------------------------------------------


def test_a_socket_nobody_looked_at_is_left_out_with_the_reason():
    busy = [ramp((2, 1.0))]
    recording = canned(
        [energy(f"cpu:{n}", (2, 50.0)) for n in range(3)] + [energy("dram:0", (2, 0.0))],
        [*used(0, busy, busy), series("cpu:1", "busy", busy), *used(2, [ramp((2, 1.0), start=5)], busy)],
    )
    splits, remarks = run_split(recording)
    assert sorted(splits) == ["cpu:0"]
    assert remarks == (
        "cpu:1: not split, nobody recorded who used socket 1",
        "cpu:2: not split, nobody recorded who used socket 2",
        "dram:0: not split, its power is not known or always 0",
    )


def test_power_and_activity_at_different_times():
    late = [ramp((2, 1.0), start=5)]
    splits, remarks = run_split(canned([energy("cpu:0", (2, 50.0))], used(0, late, late)))
    assert splits == {}
    assert remarks == ("cpu:0: not split, its power and who used it are never known together",)


def test_without_the_number_of_cpus_as_many_as_were_seen_busy():
    recording = canned(
        [energy("cpu:0", (2, 50.0))],
        used(0, [ramp((1, 0.5), (1, 2.4))], [ramp((2, 0.3))]),
        host={},
        end=2 * S,
    )
    splits, remarks = run_split(recording)
    assert joules(splits["cpu:0"], 0, 2)["static"] == pytest.approx(100 * 0.1)
    assert len(remarks) == 1
    assert "does not say how many CPUs it has; 3," in remarks[0]


def test_a_wall_clock_that_is_set_back_says_no_time_twice():
    back = [(t - (600 * MS if i > 30 else 0), v) for i, (t, v) in enumerate(ramp((4, 1.0)))]
    recording = canned([energy("cpu:0", (3, 50.0))], used(0, [back], [back]), end=3 * S)
    found = run_split(recording)[0]["cpu:0"]
    assert found.unsplit_s == 0
    assert joules(found, 0, 3)["monitor"] == 0


# --- the real thing -----------------------------------------------------------------------------------------

SPIN = """
import time
end = time.process_time() + 1.5
while time.process_time() < end:
    pass
"""


def test_with_a_competitor_the_program_pays_about_half(tmp_path: Path):
    """Idle at 20 W, then 100 W while two processes are busy, of which one is the program."""
    script = write_script(tmp_path / "spin.py", SPIN)
    with PowercapTree(tmp_path / "powercap", packages=1) as tree:
        env = {"SMARAGDINE_POWERCAP_ROOT": str(tree.root)}
        tree.start({"cpu:0": 20.0, "dram:0": 2.0})
        done = smaragdine("run", "-o", tmp_path / "idle", "sleep", "0.5", env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        tree.stop()
        tree.start({"cpu:0": 100.0, "dram:0": 2.0})
        endless = "while True: pass"
        competitor = subprocess.Popen([sys.executable, "-c", endless], env=environment(), cwd=tmp_path)
        try:
            done = smaragdine("run", "-o", tmp_path / "run", script, env=env, cwd=tmp_path)
        finally:
            competitor.kill()
            competitor.wait()
        assert done.returncode == 0, done.stderr
    recording = open_recording(tmp_path / "run")
    facts = info(tmp_path / "run")
    if list(facts["host"]["sockets"]) != ["cpu:0"]:
        pytest.skip("the made-up tree has one socket, this machine another number")
    splits, remarks = run_split(recording, baseline=open_recording(tmp_path / "idle"))
    assert remarks == ()
    assert sorted(splits) == ["cpu:0", "dram:0"]
    found = splits["cpu:0"]
    assert found.static_w == pytest.approx(20, rel=0.1)
    window = facts["begin_ns"], facts["end_ns"]
    duration_s = (window[1] - window[0]) * 1e-9
    spent = {part: getattr(found, part).energy_j(*window) for part in PARTS}
    dynamic_j = spent["program"] - spent["static"]
    all_dynamic_j = sum(spent[part] for part in ("program", "other", "monitor")) - 20 * duration_s
    # At most half, on a CPU of their own each or on one together; less where the machine has other work.
    assert 0 < dynamic_j / all_dynamic_j < 0.65
    assert spent["monitor"] < 0.2 * all_dynamic_j
    # Whatever the load: 80 W by CPU time.
    [busy] = [s for s in recording.series("activity") if s.channel.quantity == "busy"]
    busy_s = np.interp(window[1], busy.t_ns, busy.value) - np.interp(window[0], busy.t_ns, busy.value)
    assert dynamic_j == pytest.approx(80 * duration_s * facts["program_cpu_s"] / busy_s, rel=0.4)
    cpus = facts["host"]["sockets"]["cpu:0"]["logical_cpus"]
    assert spent["static"] == pytest.approx(20 * facts["program_cpu_s"] / cpus, rel=0.3)
    assert found.unsplit_s < 0.1 * duration_s
    # What `show` says of it, without a baseline: the parts are the whole.
    shown = show_json(tmp_path / "run")
    whose = shown["owners"]["cpu:0"]
    parts_j = whose["program_j"] + whose["other_j"] + whose["monitor_j"]
    assert 0 < whose["static_j"] < whose["program_j"]
    assert parts_j == pytest.approx(shown["devices"]["cpu:0"]["energy_j"], rel=0.1)
