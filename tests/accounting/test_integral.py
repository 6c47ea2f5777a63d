"""The engine against an oracle in rational arithmetic: ties, overlaps, nesting, gaps, any order and chunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smaragdine.accounting import account as account_module
from smaragdine.accounting import integral, ledger
from smaragdine.accounting import integral as nesting
from smaragdine.accounting import ledger as columns
from smaragdine.accounting.account import account
from smaragdine.accounting.footprint import Footprint, with_power
from smaragdine.accounting.integral import Chunk, compiled_sweep, levels
from smaragdine.accounting.intervals import grouped
from smaragdine.accounting.ledger import entry, entry_compiled
from smaragdine.accounting.power import PowerTrace
from smaragdine.errors import UserError
from smaragdine.recording.format import EVENTS

Stretch = tuple[int, int, int]  # begin, end, watts


@dataclass(frozen=True)
class Event:
    name: str
    start: int
    duration: int
    lane: int | None = None
    step: int | None = None

    @property
    def end(self) -> int:
        return self.start + self.duration


def table(events: Sequence[Event], device: str = "gpu:0") -> pa.Table:
    return pa.table(
        {
            "name": pa.array([e.name for e in events], pa.string()).dictionary_encode(),
            "device": pa.array([device] * len(events), pa.string()).dictionary_encode(),
            "start_ns": pa.array([e.start for e in events], pa.int64()),
            "duration_ns": pa.array([e.duration for e in events], pa.int64()),
            "phase": pa.array([None] * len(events), pa.string()).dictionary_encode(),
            "lane": pa.array([e.lane for e in events], pa.int64()),
            "step": pa.array([e.step for e in events], pa.int64()),
        },
        schema=EVENTS,
    )


def power(stretches: Sequence[Stretch]) -> PowerTrace:
    columns = np.array(stretches, dtype=np.int64).reshape(-1, 3)
    return PowerTrace(columns[:, 0], columns[:, 1], columns[:, 2].astype(float))


def inside(events: Sequence[Event], inner: int, outer: int) -> bool:
    a, b = events[inner], events[outer]
    if inner == outer or a.lane is None or a.lane != b.lane:
        return False
    if (a.start, a.end) == (b.start, b.end):
        return inner > outer
    return b.start <= a.start and a.end <= b.end


def oracle(
    events: Sequence[Event], stretches: Sequence[Stretch]
) -> tuple[dict[str, Fraction], dict[tuple[str, int], Fraction], Fraction, dict[str, int]]:
    """Energy per name, per name and step, and idle, in nanojoules, and the time that each name pays for: the
    definition, instant by instant."""
    rows: dict[str, Fraction] = defaultdict(Fraction)
    paid_ns: dict[str, int] = defaultdict(int)
    steps: dict[tuple[str, int], Fraction] = defaultdict(Fraction)
    idle = Fraction(0)
    edges = {t for e in events for t in (e.start, e.end)} | {t for s in stretches for t in s[:2]}
    cuts = sorted(edges)
    for begin, end in pairwise(cuts):
        watts = next((w for b, e, w in stretches if b <= begin < e), None)
        running = [i for i, e in enumerate(events) if e.start <= begin < e.end]
        leaves = [i for i in running if not any(inside(events, j, i) for j in running)]
        for i in leaves:
            paid_ns[events[i].name] += end - begin
        if watts is None:
            continue
        used = Fraction(watts) * (end - begin)
        if not leaves:
            idle += used
        for i in leaves:
            rows[events[i].name] += used / len(leaves)
            if events[i].step is not None:
                steps[events[i].name, events[i].step] += used / len(leaves)
    return rows, steps, idle, paid_ns


def agrees(found: Footprint, events: Sequence[Event], stretches: Sequence[Stretch]) -> None:
    rows, steps, idle, paid_ns = oracle(events, stretches)
    total = found.devices["gpu:0"]
    exact = sum((Fraction(w) * (e - b) for b, e, w in stretches), Fraction(0))
    assert total.total_j == pytest.approx(float(exact) * 1e-9, rel=1e-12, abs=1e-20)
    assert total.idle_j == pytest.approx(float(idle) * 1e-9, rel=1e-9, abs=1e-18)
    by_name = {row["name"]: row for row in found.rows.to_pylist()}
    assert set(by_name) == {e.name for e in events}
    numbers = {e.step for e in events if e.step is not None}
    assert total.steps == len(numbers)
    for name, row in by_name.items():
        mine = [e for e in events if e.name == name]
        assert row["energy_j"] == pytest.approx(float(rows[name]) * 1e-9, rel=1e-9, abs=1e-18)
        assert row["count"] == len(mine)
        assert row["busy_s"] == paid_ns[name] / 1e9
        each = [float(steps[name, n]) * 1e-9 for n in numbers]
        if each:
            assert row["step_mean_j"] == pytest.approx(np.mean(each), rel=1e-9, abs=1e-18)
        if len(each) > 1:
            assert row["step_std_j"] == pytest.approx(np.std(each, ddof=1), rel=1e-6, abs=1e-17)
        assert (row["step_mean_j"] is None) == (not each)
        assert (row["step_std_j"] is None) == (len(each) < 2)
        assert row["uncertainty_j"] is None if not stretches else row["uncertainty_j"] >= 0
    rest = total.total_j - total.idle_j - sum(row["energy_j"] for row in by_name.values())
    assert abs(rest) <= 1e-9 * total.total_j


instants = st.integers(0, 24)
events_of = st.lists(
    st.builds(
        Event,
        st.sampled_from("ABC"),
        instants,
        st.integers(0, 12),
        st.one_of(st.none(), st.integers(-1, 1)),
        st.one_of(st.none(), st.integers(-1, 2)),
    ),
    max_size=14,
)


@st.composite
def stretches_of(draw: st.DrawFn) -> list[Stretch]:
    cuts = sorted(draw(st.sets(st.integers(-3, 30), max_size=10)))
    pairs = list(pairwise(cuts))
    return [(b, e, draw(st.integers(0, 9))) for b, e in pairs if draw(st.integers(0, 3))]


@pytest.fixture(params=[1, 3, 1 << 15], ids=["chunks of 1", "chunks of 3", "one chunk"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (integral, columns, account_module):
        monkeypatch.setattr(module, "CHUNK", request.param)
    monkeypatch.setattr(columns, "WAITING_BLOCKS", 2)
    return request.param


@settings(max_examples=300, deadline=None)
@given(
    events_of,
    stretches_of(),
    st.sampled_from([1, 2, 5, 1 << 15]),
    st.sampled_from([0, 2, 1 << 30]),
    st.booleans(),
)
@example([Event("A", 0, 10), Event("A", 5, 10), Event("B", 0, 15)], [(0, 15, 1)], 1, 0, True)
def test_agrees_with_the_definition(
    events: list[Event], stretches: list[Stretch], size: int, waiting: int, compiled: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (integral, columns, account_module):
            patch.setattr(module, "CHUNK", size)
        patch.setattr(columns, "WAITING_BLOCKS", waiting)
        patch.setattr(account_module, "sweep_for", lambda _: compiled_sweep() if compiled else None)
        agrees(account(table(events), {"gpu:0": power(stretches)}), events, stretches)


# Long enough that events cross many of each other in one lane.
crowds = st.lists(
    st.builds(Event, st.sampled_from("ABCD"), st.integers(0, 60), st.integers(0, 60), st.just(0)), max_size=25
)


@settings(max_examples=200, deadline=None)
@given(crowds, st.sampled_from([1, 7, 1 << 20]), st.sampled_from([4, 1 << 15]))
def test_crossing_events_of_one_lane(events: list[Event], pairs: int, size: int) -> None:
    stretches = [(0, 40, 3), (40, 70, 5), (80, 130, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "PAIRS_AT_ONCE", pairs)
        for module in (integral, columns, account_module):
            patch.setattr(module, "CHUNK", size)
        agrees(account(table(events), {"gpu:0": power(stretches)}), events, stretches)


# What the published implementation gives, in the comment, is wrong in each (1 W, microseconds).
@pytest.mark.parametrize(
    ("events", "exact"),
    [
        ([("A", 0, 10), ("B", 10, 20)], {"A": 10, "B": 10}),  # 15, 5: exits applied late
        ([("A", 0, 10), ("B", 100, 110)], {"A": 10, "B": 10}),  # 100, 10: the gap is charged
        ([("A", 0, 10), ("A", 5, 15), ("B", 0, 15)], {"A": 25 / 3, "B": 20 / 3}),  # 7.5, 7.5: names merged
        ([("A", 0, 10), ("A", 10, 20), ("B", 12, 14)], {"A": 19, "B": 1}),  # 12, 8
        ([("A", 0, 10), ("Z", 5, 5)], {"A": 10, "Z": 0}),  # 7.5, 2.5: no length is no energy
    ],
)
def test_mistakes_of_the_published_implementation(
    events: list[tuple[str, int, int]], exact: dict[str, float], chunk: int
) -> None:
    scaled = [Event(name, 1000 * start, 1000 * (end - start)) for name, start, end in events]
    last = max(event.end for event in scaled)
    found = account(table(scaled), {"gpu:0": power([(0, last, 1)])})
    energy_uj = {row["name"]: row["energy_j"] * 1e6 for row in found.rows.to_pylist()}
    assert energy_uj == pytest.approx(exact, abs=1e-9)


def test_only_the_leaf_pays(chunk: int) -> None:
    nest = [Event("step", 0, 100, 1), Event("layer", 10, 80, 1), Event("MatMul", 20, 30, 1)]
    found = account(table(nest), {"gpu:0": power([(0, 100, 1)])})
    energy_nj = {row["name"]: row["energy_j"] * 1e9 for row in found.rows.to_pylist()}
    assert energy_nj == pytest.approx({"step": 20, "layer": 50, "MatMul": 30})


def test_equal_names_and_times_far_from_zero(chunk: int) -> None:
    """Unix nanoseconds do not fit a float: nothing may pass through one."""
    t0 = 1_800_000_000_000_000_001
    events = [Event("A", t0 + 3 * i, 3, step=i) for i in range(9)]
    stretches = [(t0 + 2 * i, t0 + 2 * i + 2, i) for i in range(14)]
    agrees(account(table(events), {"gpu:0": power(stretches)}), events, stretches)


def test_shuffled_is_the_same_as_sorted() -> None:
    random = np.random.default_rng(7)
    events = [
        Event("ABCDE"[random.integers(5)], int(start), int(random.integers(0, 900)), int(random.integers(4)))
        for start in np.sort(random.integers(0, 200_000, 3000))
    ]
    stretches = [(b, b + 1000, int(random.integers(1, 500))) for b in range(0, 200_000, 1000)]
    kept = account(table(events), {"gpu:0": power(stretches)})
    random.shuffle(events)
    with pytest.MonkeyPatch.context() as patch:
        for module in (integral, columns, account_module):
            patch.setattr(module, "CHUNK", 64)
        mixed = account(table(events), {"gpu:0": power(stretches)})
    by_name = [{row["name"]: row["energy_j"] for row in found.rows.to_pylist()} for found in (kept, mixed)]
    assert by_name[0] == pytest.approx(by_name[1], rel=1e-9)


def test_devices_are_accounted_apart() -> None:
    events = pa.concat_tables(
        [
            table([Event("A", 0, 10)], "gpu:0"),
            table([Event("B", 5, 10)], "gpu:1"),
            table([Event("C", 0, 1)], "gpu:2"),
        ]
    )
    watts = {"gpu:0": power([(0, 20, 2)]), "gpu:1": power([(0, 20, 4)]), "cpu:0": power([(0, 5, 7)])}
    found = account(events, watts)
    assert [(r["device"], r["name"], r["energy_j"] * 1e9) for r in found.rows.to_pylist()] == [
        ("gpu:0", "A", pytest.approx(20)),
        ("gpu:1", "B", pytest.approx(40)),
    ]
    assert found.without_power == {"gpu:2": 1}
    assert found.devices["cpu:0"].idle_j == pytest.approx(35e-9)


def test_missing_power_is_said_and_costs_nothing() -> None:
    found = account(table([Event("A", -10, 50)]), {"gpu:0": power([(0, 10, 1), (20, 30, 1)])})
    total = found.devices["gpu:0"]
    assert found.rows["energy_j"][0].as_py() == pytest.approx(20e-9)
    assert (total.covered_s, total.missing_s) == (pytest.approx(20e-9), pytest.approx(30e-9))


def test_many_names_need_no_column_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (integral, columns, account_module):
        monkeypatch.setattr(module, "CHUNK", 4)
    monkeypatch.setattr(ledger, "CHUNK", 4)
    events = [Event(f"op{i}", 3 * i, 5, step=i % 3) for i in range(40)]
    stretches = [(0, 60, 2), (60, 200, 3)]
    agrees(account(table(events), {"gpu:0": power(stretches)}), events, stretches)


def test_the_compiled_loop_is_there_and_declines_nested_lanes() -> None:
    sweep = compiled_sweep()
    assert sweep is not None  # else the tests above would have passed without it
    power_levels = levels(power([(0, 50, 3), (60, 90, 2)]))
    apart = Chunk(
        0, 100, 0, 0, *(np.array(v) for v in ([0, 20, 95], [20, 70, 99], [0, 1, 0], [0, 0, -1], [-1] * 3))
    )
    found = entry_compiled(apart, power_levels, 2, sweep)
    assert found is not None
    assert found.energy_j * 1e9 == pytest.approx([60, 110])
    assert found.busy_ns.tolist() == [24, 50]
    assert found.started.tolist() == [2, 1]
    assert found.idle_j * 1e9 == pytest.approx(40)
    assert entry_compiled(apart._replace(end_ns=np.array([21, 70, 99])), power_levels, 2, sweep) is None
    # An event that goes on in a later chunk is busy there, too.
    cut = entry_compiled(apart._replace(until_ns=60), power_levels, 2, sweep)
    rest = entry_compiled(
        apart._replace(
            begin_ns=60,
            carried=1,
            **{name: getattr(apart, name)[1:] for name in ("start_ns", "end_ns", "key", "lane", "step")},
        ),
        power_levels,
        2,
        sweep,
    )
    assert cut is not None
    assert rest is not None
    assert (cut.busy_ns.tolist(), rest.busy_ns.tolist()) == ([20, 40], [4, 10])
    assert cut.busy_ns.tolist() == entry(apart._replace(until_ns=60), power_levels, 2).busy_ns.tolist()
    turned = apart._replace(
        **{name: getattr(apart, name)[::-1].copy() for name in ("start_ns", "end_ns", "lane")}
    )
    assert entry_compiled(turned, power_levels, 2, sweep) is not None  # what touches does not overlap
    # A time that does not fit beside its event's number is left to numpy as well.
    assert entry_compiled(apart._replace(until_ns=1 << 62), power_levels, 2, sweep) is None


def test_more_at_a_time_than_the_table_of_shares_holds() -> None:
    events = [Event("A", i, 200) for i in range(150)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(account_module, "sweep_for", lambda _: compiled_sweep())
        agrees(account(table(events), {"gpu:0": power([(0, 400, 7)])}), events, [(0, 400, 7)])


def test_a_lane_s_time_counts_once() -> None:
    """A layer of 100 ns, with operations of 30 and 50 ns in it, ran for 100 ns and not for 180."""
    events = [Event("net/layer", 0, 100, 1), Event("net/layer/a", 0, 30, 1), Event("net/layer/b", 40, 50, 1)]
    found = account(table(events), {"gpu:0": power([(0, 200, 300)])})
    busy_ns = {row["name"]: round(row["busy_s"] * 1e9) for row in found.rows.to_pylist()}
    assert busy_ns == {"net/layer": 20, "net/layer/a": 30, "net/layer/b": 50}
    (layer,) = with_power(grouped(found, "layer", 1).rows).to_pylist()
    assert layer["busy_s"] == pytest.approx(100e-9)
    assert layer["power_w"] == pytest.approx(300.0)


def test_the_two_loops_agree_on_busy_time_to_the_last_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks in which nothing is nested go through one, the others through the other: nothing counts twice
    where they meet."""
    for module in (integral, columns, account_module):
        monkeypatch.setattr(module, "CHUNK", 8)
    events = [Event("root", 0, 1_000_000, 1), Event("long", 5, 900_000, 2)]
    events += [Event("op", 400_000 + 100 * i, 61 + i % 7, 1, step=i % 3) for i in range(300)]
    events += [Event("other", 50_000 + 2_000 * i, 700, 3) for i in range(200)]
    trace = power([(0, 500_000, 7), (500_001, 1_000_000, 3)])
    rows: list[list[dict[str, object]]] = []
    for sweep in (None, compiled_sweep()):
        monkeypatch.setattr(account_module, "sweep_for", lambda _, sweep=sweep: sweep)
        rows.append(account(table(events), {"gpu:0": trace}).rows.select(["name", "busy_s"]).to_pylist())
    assert rows[0] == rows[1]
    agrees(account(table(events), {"gpu:0": trace}), events, [(0, 500_000, 7), (500_001, 1_000_000, 3)])


def test_a_parent_that_pays_between_its_children_only_is_not_measured_in_time() -> None:
    ms = 1_000_000
    root = [Event("root", 0, 2_000 * ms, 1)]
    children = [Event("op", i * 10 * ms, 10 * ms - 10_000, 1) for i in range(200)]
    trace = power([(b * ms, (b + 5) * ms, 100 + b % 7) for b in range(0, 2_000, 5)])
    rows = {row["name"]: row for row in account(table([*root, *children]), {"gpu:0": trace}).rows.to_pylist()}
    assert (rows["root"]["basis"], rows["op"]["basis"]) == ("prior", "resolution")


def test_a_long_event_without_a_step_keeps_no_step_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (integral, columns, account_module):
        monkeypatch.setattr(module, "CHUNK", 8)
    most = 0
    add = ledger.Ledger.add

    def watched(self: ledger.Ledger, added: ledger.Entry) -> None:
        nonlocal most
        add(self, added)
        most = max(most, len(self._open))

    monkeypatch.setattr(ledger.Ledger, "add", watched)
    events = [Event("root", 0, 4000), *(Event("op", 10 * i, 10, step=i) for i in range(400))]
    found = account(table(events), {"gpu:0": power([(0, 4000, 1)])})
    assert found.devices["gpu:0"].steps == 400
    assert most < 20


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("duration_ns", [10, -5], "duration below 0"),
        ("duration_ns", [10, 2**63 - 1], "centuries"),
        ("start_ns", [-(2**61) - 5, 10], "centuries"),
        ("name", ["a", None], "1 events have no name"),
        ("device", ["gpu:0", None], "no device"),
        ("start_ns", [0, None], "no start_ns"),
    ],
)
def test_events_nobody_checked(column: str, values: list[object], said: str) -> None:
    """A recording's events may come from any writer."""
    events = table([Event("a", 0, 10), Event("b", 20, 10)])
    field = EVENTS.field(column)
    broken = (
        pa.array(values, pa.string()).dictionary_encode()
        if column in ("name", "device")
        else pa.array(values)
    )
    events = events.set_column(EVENTS.get_field_index(column), field, broken.cast(field.type))
    with pytest.raises(UserError, match=said):
        account(events, {"gpu:0": power([(0, 40, 1)])})
