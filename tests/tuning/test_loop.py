"""The tuner's loop on a clock of its own: a program and counters that are exact, and what can go wrong."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from smaragdine.clock import Clock
from smaragdine.limits.nvml import LimitRange, LimitValue
from smaragdine.sensors.base import SensorLost
from smaragdine.tuning.policy import Policy, TuneObjective
from smaragdine.tuning.process import TuneOutcome, even_limits, outcome
from smaragdine.tuning.tuner import (
    MARKS_FILE,
    LiveEnergy,
    PowerSensor,
    SliceOptions,
    Step,
    StepFollower,
    Tuner,
)

MS = 1_000_000
EPOCH_NS = 1_800_000_000_000_000_000
COUNTER_NS = 100 * MS


@dataclass
class World:
    """Two GPUs that draw their limit, and a program: a step lasts 8 ms + work × 4 ms × (300 W / limit)³."""

    spool: Path
    now_ns: int = EPOCH_NS
    limit_w: float = 700.0
    work: float = 1.0
    work_later: float = 1.0
    changes_s: float = 1e9
    ends_s: float = 60.0
    held_from_s: float = 0.0  # limits do not stand before
    lost_from_s: float = 1e9  # the second counter
    between: int = 0  # after so many steps an evaluation of a second
    pause: int = 0  # every so many steps one takes 300 ms longer, and nobody says why
    applied: list[float] = field(default_factory=list[float])
    steps: int = 0
    step_at_ns: int = EPOCH_NS
    energy_j: Fraction = Fraction(0)
    counters: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])

    @property
    def s(self) -> float:
        return (self.now_ns - EPOCH_NS) * 1e-9

    def step_ns(self, limit_w: float | None = None) -> int:
        work = self.work_later if self.s >= self.changes_s else self.work
        return round(8 * MS + work * 4 * MS * (300 / (limit_w or self.limit_w)) ** 3)

    def advance(self, wait_s: float) -> bool:
        until_ns = self.now_ns + max(1, round(wait_s * 1e9))
        while self.now_ns < until_ns:
            next_counter_ns = self.now_ns // COUNTER_NS * COUNTER_NS + COUNTER_NS
            next_ns = min(until_ns, next_counter_ns, max(self.step_at_ns, self.now_ns + 1))
            self.energy_j += Fraction(self.limit_w) * (next_ns - self.now_ns) / 10**9
            self.now_ns = next_ns
            if next_ns == next_counter_ns:
                self.counters.append((next_ns, float(self.energy_j)))
            if next_ns >= self.step_at_ns:
                self.step()
        return self.s >= self.ends_s

    def step(self) -> None:
        lines = [{"t_ns": self.now_ns, "name": "step_end", "index": self.steps, "pid": 7, "source": "torch"}]
        self.steps += 1
        self.step_at_ns = self.now_ns + self.step_ns()
        if self.between and self.steps % self.between == 0:
            lines.append({"t_ns": self.now_ns + 1, "name": "evaluate_begin", "pid": 7, "source": "torch"})
            lines.append({"t_ns": self.now_ns + 10**9, "name": "evaluate_end", "pid": 7, "source": "torch"})
            self.step_at_ns += 10**9
        if self.pause and self.steps % self.pause == 0:
            self.step_at_ns += 300 * MS
        with open(self.spool / "marks-7.jsonl", "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    # As a lender.
    def apply(self, wanted: Any) -> None:
        assert {device for device, _ in wanted} == {"gpu:0", "gpu:1"}
        (limit,) = set(wanted.values())
        self.limit_w = limit.value
        self.applied.append(limit.value)

    def held(self) -> bool:
        return self.s >= self.held_from_s


@dataclass
class Counter:
    world: World
    lost_from_s: float = 1e9
    seen: int = 0

    def read(self) -> list[tuple[int, int, float]]:
        if self.world.s >= self.lost_from_s:
            raise SensorLost("gpu:1 stopped answering")
        new = [(t_ns, 0, energy_j) for t_ns, energy_j in self.world.counters[self.seen :]]
        self.seen = len(self.world.counters)
        return new


def tune(
    world: World, limits_w: tuple[float, ...] = (400, 300, 200, 100), **more: Any
) -> tuple[Tuner, TuneOutcome, list[dict[str, Any]]]:
    clock = Clock(lambda: world.now_ns, lambda: world.now_ns)
    energy = LiveEnergy([Counter(world), Counter(world, world.lost_from_s)], COUNTER_NS)
    policy = Policy(limits_w, 700.0, more.pop("objective", None), trying=1.0)
    tuner = Tuner(world, energy, policy, ("gpu:0", "gpu:1"), world.spool, SliceOptions(**more), clock)
    tuner.run(world.advance)
    path = world.spool / MARKS_FILE
    marks = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return tuner, outcome(policy, ("gpu:0", "gpu:1"), tuner.problem), marks


def test_finds_the_optimum_and_the_next_one_when_it_moves(tmp_path: Path) -> None:
    world = World(tmp_path, work_later=0.125, changes_s=15.0)
    tuner, found, marks = tune(world)
    assert tuner.problem == ""
    assert [search.chosen_w for search in found.searches] == [300, 200]
    assert [search.why for search in found.searches] == ["", "step time changed"]
    assert found.chosen_w == 200
    first, second = ([700, 400, 300, 200, 300], [700, 400, 300, 200, 100, 200])
    assert world.applied == [*first, *second]
    assert [mark["detail"]["limit_w"] for mark in marks if mark["name"] == "limit_set"] == world.applied
    assert [mark["detail"]["limit_w"] for mark in marks if mark["name"] == "tune_settled"] == [300, 200]
    changed = next(mark["t_ns"] for mark in marks if mark["name"] == "workload_changed")
    # Two slices that are out of line, of which only every third second is one.
    assert 15 < (changed - EPOCH_NS) * 1e-9 < 24


def test_what_a_limit_took_and_saved_is_exact(tmp_path: Path) -> None:
    """Against the program's own arithmetic: both GPUs draw the limit."""
    world = World(tmp_path, ends_s=30)
    _, found, _ = tune(world)
    (search,) = found.searches
    time_s = {w: world.step_ns(w) * 1e-9 for w in (700.0, 400.0, 300.0, 200.0)}
    for tried in search.tried:
        assert tried.time_s == pytest.approx(time_s[tried.limit_w], rel=1e-6)
        assert tried.energy_j == pytest.approx(2 * tried.limit_w * time_s[tried.limit_w], rel=1e-6)
        assert tried.power_w == pytest.approx(2 * tried.limit_w, rel=1e-6)
        assert tried.slices == 1
    assert search.saved is not None
    assert search.slower is not None
    assert search.saved.part == pytest.approx(1 - 300 * time_s[300.0] / (700 * time_s[700.0]), rel=1e-6)
    assert search.slower.part == pytest.approx(time_s[300.0] / time_s[700.0] - 1, rel=1e-6)
    # Every step since tuning began is one of a slice or a settled one.
    steps = sum(tried.steps for tried in search.tried) + search.settled_steps
    assert world.steps - steps == pytest.approx(10, abs=15)
    step_j = {w: 2 * w * time_s[w] for w in time_s}
    extra_j = sum(tried.steps * (step_j[tried.limit_w] - step_j[300.0]) for tried in search.tried)
    assert search.trying_extra_j == pytest.approx(extra_j, rel=1e-6)
    extra_s = sum(tried.steps * (time_s[tried.limit_w] - time_s[300.0]) for tried in search.tried)
    assert search.trying_extra_s == pytest.approx(extra_s, rel=1e-6)
    saved_j = sum(tried.steps * (step_j[700.0] - step_j[tried.limit_w]) for tried in search.tried)
    saved_j += search.settled_steps * (step_j[700.0] - step_j[300.0])
    assert found.saved_j == pytest.approx(saved_j, rel=1e-6)
    assert search.trying_s + search.settled_s == pytest.approx(30, abs=1)


@pytest.mark.parametrize("odd", [{"between": 40}, {"pause": 30}, {"between": 25, "pause": 9}])
def test_evaluations_and_pauses_are_no_steps(tmp_path: Path, odd: dict[str, int]) -> None:
    world = World(tmp_path, ends_s=120, **odd)  # pyright: ignore[reportArgumentType]
    _, found, _ = tune(world)
    assert found.searches[0].chosen_w == 300
    for tried in found.searches[0].tried:
        assert tried.time_s == pytest.approx(world.step_ns(tried.limit_w) * 1e-9, rel=1e-6)
    assert len(found.searches) == 1


def test_a_slice_has_enough_steps_and_nothing_of_the_time_after_a_change(tmp_path: Path) -> None:
    world = World(tmp_path, ends_s=100)
    _, found, marks = tune(world, steps=300, settle_s=2.0)
    assert found.searches[0].chosen_w == 300
    set_s = [(mark["t_ns"] - EPOCH_NS) * 1e-9 for mark in marks if mark["name"] == "limit_set"]
    for begin_s, end_s, limit_w in zip(set_s, set_s[1:], world.applied, strict=False):
        assert end_s - begin_s >= 2.0 + 300 * world.step_ns(limit_w) * 1e-9


def test_a_limit_that_does_not_stand_is_measured_again_and_at_last_given_up(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    _, found, _ = tune(World(tmp_path / "a", held_from_s=3.0))
    assert found.searches[0].chosen_w == 300
    assert all(tried.slices == 1 for tried in found.searches[0].tried)
    (tmp_path / "b").mkdir()
    world = World(tmp_path / "b", held_from_s=1e9)
    tuner, found, _ = tune(world)
    assert "limits do not stand" in tuner.problem
    assert found.searches == ()
    assert world.s < 10


def test_a_lost_gpu_ends_it_with_what_is_known(tmp_path: Path) -> None:
    tuner, found, marks = tune(World(tmp_path, lost_from_s=3.0))
    assert tuner.problem == found.problem == "gpu:1 stopped answering"
    assert found.chosen_w is None
    assert found.searches[0].tried
    assert marks[-1]["name"] == "tune_end"


def test_a_program_without_steps_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path, step_at_ns=EPOCH_NS + 10**12)
    _, found, marks = tune(world)
    assert (found.searches, found.saved_j, world.applied, marks) == ((), None, [], [])


def test_edp_and_slowdown_reach_the_policy(tmp_path: Path) -> None:
    # Steps of 8.3, 9.7 and 12 ms at 700, 400 and 300 W.
    for name, objective, best in (
        ("edp", TuneObjective("edp"), 400),
        ("slow", TuneObjective(slowdown=0.2), 400),
        ("fast", TuneObjective(slowdown=0.1), 700),
        ("cost", TuneObjective("cost", eta=0.2, highest_w=1400.0), 700),
    ):
        (tmp_path / name).mkdir()
        _, found, _ = tune(World(tmp_path / name), objective=objective)
        assert found.chosen_w == best


def spooled(folder: Path, pid: int, *marks: tuple[Any, ...]) -> None:
    with open(folder / f"marks-{pid}.jsonl", "a") as file:
        for name, t_ms, *more in marks:
            index = more[0] if more else None
            line = {"t_ns": t_ms * MS, "name": name, "index": index, "pid": pid, "source": "torch"}
            file.write(json.dumps(line) + "\n")


def lengths(steps: list[Step]) -> list[tuple[int, int, int]]:
    return [(step.begin_ns // MS, step.end_ns // MS, step.count) for step in steps]


def test_follows_steps_as_they_come_and_half_a_line_later(tmp_path: Path) -> None:
    follower = StepFollower(tmp_path)
    assert follower.look() == []
    spooled(tmp_path, 1, ("step_end", 10, 0), ("step_end", 20, 1))
    assert lengths(follower.look()) == [(10, 20, 1)]
    assert follower.look() == []
    with open(tmp_path / "marks-1.jsonl", "a") as file:
        file.write('{"t_ns": 30000000, "name": "step_e')
    assert follower.look() == []
    with open(tmp_path / "marks-1.jsonl", "a") as file:
        file.write('nd", "index": 2, "pid": 1, "source": "torch"}\nnonsense\n')
    assert lengths(follower.look()) == [(20, 30, 1)]
    assert follower.ended == 3


def test_one_mark_may_stand_for_several_steps_and_between_epochs_is_none(tmp_path: Path) -> None:
    follower = StepFollower(tmp_path)
    spooled(
        tmp_path, 1, ("step_end", 10, 3), ("step_end", 50, 7), ("epoch_end", 51), ("epoch_begin", 60, 1),
        ("step_end", 100, 11), ("step_end", 140, 15),
    )  # fmt: skip
    assert lengths(follower.look()) == [(10, 50, 4), (100, 140, 4)]
    assert follower.ended == 13


def test_of_processes_that_train_together_one_is_followed_until_it_is_quiet(tmp_path: Path) -> None:
    follower = StepFollower(tmp_path)
    for pid in (1, 2):
        spooled(tmp_path, pid, *[("step_end", 10 * n + pid, n) for n in range(5)])
    assert lengths(follower.look()) == [(10 * n + 1, 10 * n + 11, 1) for n in range(4)]
    spooled(tmp_path, 2, ("step_end", 1000, 5), ("step_end", 3000, 6), ("step_end", 3010, 7))
    assert lengths(follower.look()) == [(1000, 3000, 1), (3000, 3010, 1)]


def test_energy_between_readings_is_exact_for_even_power() -> None:
    dice = random.Random(5)
    times_ns = sorted(dice.sample(range(0, 10**9, 1000), 40))

    class Fixed:
        def __init__(self, power_w: int) -> None:
            self.readings = [(t_ns, 0, power_w * t_ns * 1e-9) for t_ns in times_ns]

        def read(self) -> list[tuple[int, int, float]]:
            readings, self.readings = self.readings, []
            return readings

    energy = LiveEnergy([Fixed(100), Fixed(40)], COUNTER_NS)
    assert energy.covered_ns() is None
    energy.read()
    assert energy.covered_ns() == (times_ns[0], times_ns[-1])
    for _ in range(100):
        begin_ns, end_ns = sorted(dice.sample(range(times_ns[0], times_ns[-1] + 1), 2))
        assert energy.between_j(begin_ns, end_ns) == pytest.approx(140 * (end_ns - begin_ns) * 1e-9, rel=1e-9)
    energy.forget()
    assert energy.covered_ns() is None


def test_without_a_counter_power_is_summed_up() -> None:
    now = [0]
    sensor = PowerSensor("gpu:0", lambda: now[0] // MS, Clock(lambda: now[0], lambda: now[0]))
    readings: list[tuple[int, int, float]] = []
    for t_ms in range(0, 1001, 5):
        now[0] = t_ms * MS
        readings += sensor.read()
    # Power rises evenly from 0 to 1 W in a second.
    assert [t_ns for t_ns, _, _ in readings] == list(range(20 * MS, 1001 * MS, 20 * MS))
    assert readings[-1][2] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("lowest", "reference", "limits"),
    [
        (200, 700, (700, 625, 550, 475, 400, 325, 250, 200)),
        (100, 300, (300, 270, 240, 210, 180, 150, 120, 100)),
        (100, 250, (250, 225, 200, 175, 150, 125, 100)),
        (100, 107, (107, 102)),
        (150, 150, (150,)),
    ],
)
def test_limits_are_even_steps_down_from_what_is_set(
    lowest: float, reference: float, limits: tuple[float, ...]
) -> None:
    ranges = [
        LimitRange("gpu:0", "power", lowest, 800, current=LimitValue(reference)),
        LimitRange("gpu:1", "power", lowest - 50, 800, current=LimitValue(700)),
    ]
    assert even_limits(ranges, reference) == limits
