"""The policy alone, on a simulated workload with seeded noise and a clock that is a sum."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from smaragdine.tuning.policy import MOST_ROUNDS, Policy, Slice, TuneObjective

LIMITS = (400.0, 350.0, 300.0, 250.0, 200.0, 150.0, 100.0)
BLOCKS = 5
SETTLE_S = 0.3


@dataclass
class Workload:
    """A step needs base_s and, the lower the limit, work_s × (300 / limit)³ more; power is the limit, up to
    what it draws at most. Energy per step is least at 300 W × (2 work / base)^⅓."""

    base_s: float = 0.02
    work_s: float = 0.01
    draws_w: float = 1000.0
    noise: float = 0.0  # standard deviation of a block's time and of its power
    drift: float = 0.0  # by which each slice is longer than the one before

    def time_s(self, limit_w: float) -> float:
        return self.base_s + self.work_s * (300 / min(limit_w, self.draws_w)) ** 3

    def energy_j(self, limit_w: float) -> float:
        return self.time_s(limit_w) * min(limit_w, self.draws_w)

    def slice(self, limit_w: float, dice: random.Random, steps: int = 50) -> Slice:
        times_s = [self.time_s(limit_w) * dice.gauss(1, self.noise) for _ in range(BLOCKS)]
        powers_w = [min(limit_w, self.draws_w) * dice.gauss(1, self.noise) for _ in range(BLOCKS)]
        energies_j = [t * p for t, p in zip(times_s, powers_w, strict=True)]
        self.base_s *= 1 + self.drift
        self.work_s *= 1 + self.drift
        span_s = SETTLE_S + steps * self.time_s(limit_w)
        return Slice(limit_w, tuple(times_s), tuple(energies_j), steps, span_s)


def search(policy: Policy, workload: Workload, dice: random.Random) -> list[float]:
    """The limits that are tried until it is settled."""
    tried: list[float] = []
    while not policy.settled:
        tried.append(policy.limit_w)
        policy.take(workload.slice(policy.limit_w, dice))
    return tried


def exact(objective: TuneObjective | None = None, **workload: float) -> tuple[Policy, list[float]]:
    policy = Policy(LIMITS, LIMITS[0], objective)
    return policy, search(policy, Workload(**workload), random.Random(0))


def test_from_the_highest_down_and_no_further_than_it_gets_worse() -> None:
    policy, tried = exact()
    assert tried == [400, 350, 300, 250]
    assert policy.limit_w == policy.search.chosen_w == 300
    assert policy.search.rounds == 1


def test_limits_above_what_the_program_draws_change_nothing_and_are_passed() -> None:
    policy, tried = exact(draws_w=320.0, work_s=0.0013)
    assert tried == [400, 350, 300, 250, 200, 150, 100]
    assert policy.limit_w == 150


@pytest.mark.parametrize(
    ("objective", "best"),
    [
        (TuneObjective("energy"), lambda t, e: e),
        (TuneObjective("edp"), lambda t, e: e * t),
        (TuneObjective("cost", eta=0.3, highest_w=400.0), lambda t, e: 0.3 * e + 0.7 * 400.0 * t),
        (TuneObjective("cost", eta=1.0, highest_w=400.0), lambda t, e: e),
    ],
)
@pytest.mark.parametrize("work_s", [0.0005, 0.002, 0.01, 0.02])
def test_each_objective_finds_its_own_best(
    objective: TuneObjective, best: Callable[[float, float], float], work_s: float
) -> None:
    workload = Workload(work_s=work_s)
    policy, _ = exact(objective, work_s=work_s)
    assert policy.limit_w == min(LIMITS, key=lambda w: best(workload.time_s(w), workload.energy_j(w)))


@pytest.mark.parametrize("slowdown", [0.001, 0.03, 0.1, 0.3, 5.0])
def test_least_energy_within_a_slowdown(slowdown: float) -> None:
    workload = Workload(work_s=0.002)
    policy, tried = exact(TuneObjective(slowdown=slowdown), work_s=0.002)
    longest_s = (1 + slowdown) * workload.time_s(400)
    allowed = [w for w in LIMITS if workload.time_s(w) <= longest_s]
    assert policy.limit_w == min(allowed, key=workload.energy_j)
    # One slice is needed to see that a limit is too slow; none below it is tried.
    assert sum(workload.time_s(w) > longest_s for w in tried) <= 1


def test_the_limit_before_is_tried_first_even_in_the_middle() -> None:
    policy = Policy([350, 150], 250)
    tried = search(policy, Workload(work_s=0.0013), random.Random(0))
    assert tried == [250, 350, 150]
    assert policy.limit_w == 150


def test_slices_of_another_limit_are_left_out() -> None:
    policy, workload, dice = Policy(LIMITS, 400), Workload(), random.Random(0)
    assert policy.take(workload.slice(200, dice)) == 400
    assert policy.search.seen == {}
    assert policy.take(Slice(400, (1.0,), (1.0,), 1, 1.0)) == 400


def test_what_is_too_close_to_tell_is_tried_again_in_turned_order() -> None:
    policy = Policy([300, 290, 100], 300)
    tried = search(policy, Workload(noise=0.05), random.Random(4))
    assert tried[:3] == [300, 290, 100]
    assert tried[3:5] == [290, 300]
    assert 1 < policy.search.rounds <= MOST_ROUNDS


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
@pytest.mark.parametrize("work_s", [0.0005, 0.003, 0.01, 0.02])
def test_with_noise_the_choice_is_near_the_best(noise: float, work_s: float) -> None:
    """In at least 95 % of 200 runs within 1 % of the least energy, or half the noise of a block."""
    exactly = Workload(work_s=work_s)
    least_j = min(map(exactly.energy_j, LIMITS))
    near, slices = 0, 0
    for seed in range(200):
        policy = Policy(LIMITS, LIMITS[0])
        slices += len(search(policy, Workload(work_s=work_s, noise=noise), random.Random(seed)))
        near += exactly.energy_j(policy.limit_w) <= least_j * (1 + max(0.01, noise / 2))
    assert near >= 190
    assert slices / 200 <= 20


def test_a_workload_that_slows_down_steadily_does_not_favour_what_came_first() -> None:
    # 2 % longer with each slice: 1.4 % between neighbours is hidden in the first round.
    exactly = Workload()
    right = 0
    for seed in range(200):
        policy = Policy([350, 300, 250], 350)
        search(policy, Workload(noise=0.02, drift=0.003), random.Random(seed))
        right += exactly.energy_j(policy.limit_w) <= 1.02 * exactly.energy_j(300)
    assert right >= 190


def settle(noise: float = 0.01, trying: float = 1.0, seed: int = 0) -> tuple[Policy, random.Random]:
    policy, dice = Policy(LIMITS, LIMITS[0], trying=trying), random.Random(seed)
    search(policy, Workload(noise=noise), dice)
    assert policy.search.chosen_w == 300
    return policy, dice


def slices_until_noticed(policy: Policy, workload: Workload, dice: random.Random, most: int) -> int | None:
    searches = len(policy.searches)
    for number in range(1, most + 1):
        policy.take(workload.slice(policy.limit_w, dice))
        if len(policy.searches) > searches:
            return number
    return None


def test_a_change_of_the_optimum_is_noticed_and_the_new_one_found() -> None:
    policy, dice = settle()
    changed = Workload(work_s=0.0013, noise=0.01)
    noticed = slices_until_noticed(policy, changed, dice, 10)
    assert noticed is not None
    assert noticed <= 3
    assert policy.search.why == "step time changed"
    assert policy.limit_w == policy.reference_w
    search(policy, changed, dice)
    assert policy.limit_w == 150
    assert [each.chosen_w for each in policy.searches] == [300, 150]


def test_noise_alone_is_no_change() -> None:
    alarms = 0
    for seed in range(20):
        policy, dice = settle(seed=seed)
        alarms += slices_until_noticed(policy, Workload(noise=0.01), dice, 300) is not None
    assert alarms <= 1


def test_one_odd_slice_is_no_change_and_a_power_change_is_one() -> None:
    policy, dice = settle()
    assert slices_until_noticed(policy, Workload(base_s=1.0, noise=0.01), dice, 1) is None
    assert slices_until_noticed(policy, Workload(noise=0.01), dice, 50) is None
    less = Workload(noise=0.01)
    less.draws_w = 250.0
    less.base_s, less.work_s = 0.03, 0.0  # as long as before, with less power
    assert slices_until_noticed(policy, less, dice, 10) is not None
    assert policy.search.why == "power changed"


def test_a_slow_change_is_noticed_in_time() -> None:
    policy, dice = settle()
    noticed = slices_until_noticed(policy, Workload(noise=0.01, drift=0.001), dice, 200)
    assert noticed is not None
    assert 10 < noticed < 120


def test_no_more_than_the_given_part_of_the_time_goes_into_searches() -> None:
    policy, dice = settle(trying=0.1)
    tried_s = policy.search.tried_s
    changed = Workload(work_s=0.0013, noise=0.01)
    noticed = slices_until_noticed(policy, changed, dice, 1000)
    assert noticed is not None
    first = policy.searches[0]
    assert first.tried_s == tried_s
    assert tried_s <= 0.1 * (tried_s + first.settled_s)
    # At the first slice that allows it.
    last_s = changed.slice(300, dice).span_s
    assert tried_s > 0.1 * (tried_s + first.settled_s - last_s)
    assert first.settled_steps == 50 * noticed


def test_a_change_that_went_away_before_a_search_was_allowed_is_forgotten() -> None:
    policy, dice = settle(trying=0.1)
    assert slices_until_noticed(policy, Workload(work_s=0.0013, noise=0.01), dice, 5) is None
    assert slices_until_noticed(policy, Workload(noise=0.01), dice, 200) is None
