"""The solver: optimal and brute force against every allocation, tried one by one in whole numbers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smaragdine.allocate import optimal as optimal_module
from smaragdine.allocate.methods import answer, baseline, brute_force, even_split, heuristic, pareto
from smaragdine.allocate.model import OBJECTIVES, Choices, Objective, cost, energy_j, step_time_s
from smaragdine.allocate.optimal import bound, least_sum, optimal
from smaragdine.errors import UserError


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """A cost per GPU and batch: jagged, rising, stepped or equal rows, with batches that are not allowed."""
    rows, wide = draw(st.integers(1, 4)), draw(st.integers(2, 8))
    most = draw(st.sampled_from([2, 9, 1000]))
    values = st.lists(st.integers(0, most), min_size=wide, max_size=wide)
    costs = np.array([draw(values) for _ in range(rows)], dtype=np.float64)
    shape = draw(st.sampled_from(["jagged", "rising", "convex", "equal"]))
    if shape in ("rising", "convex"):
        costs = np.cumsum(costs if shape == "rising" else np.sort(costs, axis=1), axis=1)
    if shape == "equal":
        costs[:] = costs[0]
    if draw(st.booleans()):
        forbidden = st.lists(st.booleans(), min_size=costs.size, max_size=costs.size)
        costs[np.array(draw(forbidden)).reshape(costs.shape)] = np.inf
    return costs, draw(st.integers(0, rows * (wide - 1) + 1))


def least_of_all(costs: np.ndarray, total: int) -> float:
    splits = itertools.product(range(costs.shape[1]), repeat=costs.shape[0])
    return min(
        (sum(row[b] for row, b in zip(costs, split, strict=True)) for split in splits if sum(split) == total),
        default=math.inf,
    )


@settings(max_examples=400, deadline=None)
@given(tables())
def test_least_sum(instance: tuple[np.ndarray, int]) -> None:
    costs, total = instance
    least = least_of_all(costs, total)
    found = least_sum(costs, total)
    if math.isinf(least):
        assert found is None
        return
    assert found is not None
    assert found[0] == least
    assert int(found[1].sum()) == total
    assert sum(row[b] for row, b in zip(costs, found[1], strict=True)) == least
    below = bound(costs, total)
    assert below is not None
    assert below.least <= least + 1e-9 <= below.cost + 2e-9
    # Asked for something better than the best, there is nothing; a little more, and it is found.
    assert least_sum(costs, total, below=least) is None
    more = least_sum(costs, total, below=least + 0.5)
    assert more is not None
    assert more[0] == least


@st.composite
def instances(draw: st.DrawFn, kinds: Sequence[str] = OBJECTIVES) -> tuple[list[Choices], Objective, int]:
    """A few GPUs with whole-numbered times and powers, some of them clipped to zero."""
    count = draw(st.integers(1, 3))
    total = draw(st.integers(count, 9))
    rising, clipped = draw(st.booleans()), draw(st.booleans())
    gpus: list[Choices] = []
    for g in range(count):
        limits = draw(st.lists(st.integers(5, 60), min_size=1, max_size=3, unique=True))

        def table(most: int, rows: int = len(limits)) -> np.ndarray:
            cells = draw(
                st.lists(st.integers(0, most), min_size=rows * (total + 1), max_size=rows * (total + 1))
            )
            return np.array(cells, dtype=np.float64).reshape(rows, total + 1)

        time_s, power_w = table(30) + 1, table(40)
        if rising:
            time_s = np.cumsum(time_s, axis=1)
        if clipped:
            time_s, power_w = np.maximum(time_s - 10, 0), np.maximum(power_w - 15, 0)
        lowest = draw(st.integers(0, 1))
        # The last one takes what the others cannot hold, so that every instance has a solution.
        held = sum(each.highest for each in gpus) if g == count - 1 else total
        highest = draw(st.integers(max(lowest, total - held), total))
        wait_w = float(draw(st.integers(0, 20)))
        gpus.append(
            Choices(f"g{g}", np.sort(np.array(limits, float)), time_s, power_w, lowest, highest, wait_w)
        )
    kind = draw(st.sampled_from(kinds))
    eta = draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    slowdown = draw(st.sampled_from([None, 0.25, 1.0])) if kind == "energy" else None
    return gpus, Objective(kind, eta, float(draw(st.integers(0, 3))), slowdown), total  # pyright: ignore


def every_cost(
    gpus: Sequence[Choices], objective: Objective, total: int
) -> Iterator[tuple[float, float, float]]:
    """Cost, step time and energy of every allocation, one by one."""
    for paid, step, energy, _ in every_allocation(gpus, objective, total):
        yield paid, step, energy


def every_allocation(
    gpus: Sequence[Choices], objective: Objective, total: int
) -> Iterator[tuple[float, float, float, tuple[int, ...]]]:
    """And its batches; whole numbers and quarters, so exact."""
    batches = [range(each.lowest, each.highest + 1) for each in gpus]
    rows = [range(each.power_limit_w.size) for each in gpus]
    for split in itertools.product(*batches):
        if sum(split) != total:
            continue
        for limits in itertools.product(*rows):
            on = [(each, b, i) for each, b, i in zip(gpus, split, limits, strict=True) if b]
            times = [each.time_s[i, b] for each, b, i in on]
            powers = [each.power_w[i, b] for each, b, i in on]
            limit_w = [each.power_limit_w[i] for each, _, i in on]
            step = max(times) + objective.all_reduce_s
            energy = sum(
                p * t + each.wait_w * (step - t) for (each, _, _), t, p in zip(on, times, powers, strict=True)
            )
            eta = objective.eta
            paid = {
                "sum": sum(
                    (eta * p + (1 - eta) * w) * t for t, p, w in zip(times, powers, limit_w, strict=True)
                ),
                "sync": eta * energy + (1 - eta) * step * sum(limit_w),
                "energy": energy,
                "time": step,
                "edp": energy * step,
            }[objective.kind]
            yield float(paid), float(step), float(energy), split


@settings(max_examples=300, deadline=None)
@given(instances())
def test_optimal_and_brute_force_find_the_best(instance: tuple[list[Choices], Objective, int]) -> None:
    gpus, objective, total = instance
    every = list(every_cost(gpus, objective, total))
    longest = math.inf
    if objective.slowdown is not None:
        longest = min(step for _, step, _ in every) * (1 + objective.slowdown)
        every = [each for each in every if each[1] <= longest]
    least = min(paid for paid, _, _ in every)
    for method in (brute_force, optimal):
        found = method(gpus, objective, total)
        assert found.cost == pytest.approx(least, rel=1e-12, abs=1e-12), method
        assert found.exact
        assert sum(share.batch for share in found.shares) == total
        assert found.cost == cost(objective, found.shares)
        if objective.kind == "time":
            # Among the equally fast, the least energy.
            least_j = min(energy for paid, _, energy in every if paid == least)
            assert energy_j(found.shares, objective.all_reduce_s) == pytest.approx(least_j)
    # Fewer choices are never better; and too slow only where they leave nothing faster.
    soonest = Objective("time", 1.0, objective.all_reduce_s)
    for name, fewer in {"heuristic": heuristic, "baseline": baseline}.items():
        if name == "baseline" and any(
            b < each.lowest for each, b in zip(gpus, even_split(gpus, total), strict=True)
        ):
            continue
        answered = answer(name, gpus, objective, total)
        step = step_time_s(answered.allocation.shares, objective.all_reduce_s)
        assert answered.too_slow == (step > longest * (1 + 1e-9))
        if answered.too_slow:
            assert step == pytest.approx(fewer(gpus, soonest, total).cost)
        else:
            assert answered.allocation.cost >= least - 1e-9


@settings(max_examples=60, deadline=None)
@given(instances([kind for kind in OBJECTIVES if kind not in ("sum", "time")]))
def test_beyond_the_exact_size_the_bound_holds(instance: tuple[list[Choices], Objective, int]) -> None:
    gpus, objective, total = instance
    best = optimal(gpus, objective, total)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimal_module, "EXACT_GPUS", 0)
        for work in (0, 200, 100_000):
            patch.setattr(optimal_module, "MOST_WORK", work)
            try:
                found = optimal(gpus, objective, total)
            except UserError:
                continue  # no split was met at all
            assert found.lower_bound <= best.cost * (1 + 1e-9)
            assert found.cost >= best.cost * (1 - 1e-9)


def smooth(name: str, total: int, speed: float, lowest_w: float, wait_w: float = 30.0) -> Choices:
    """A GPU that gets more efficient with the batch, at three limits, with dents: not convex."""
    batch = np.arange(total + 1, dtype=np.float64)
    limits = np.array([1.0, 1.5, 2.0]) * lowest_w
    time_s = np.array([(20 + batch + 30 * np.sin(batch / 300)) / speed / k**0.4 for k in (1.0, 1.5, 2.0)])
    power_w = np.array([np.minimum(w, 20 + lowest_w * (1 - np.exp(-batch / 200)) * 1.6) for w in limits])
    return Choices(name, limits, np.maximum.accumulate(time_s, axis=1), power_w, 1, total, wait_w)


def test_sixteen_gpus_and_65536() -> None:
    total = 65_536
    gpus = [smooth(f"g{g}", total, 100.0 + 40 * (g % 4), 60.0 + 25 * (g % 4)) for g in range(16)]
    found = optimal(gpus, Objective("sum"), total)
    assert sum(share.batch for share in found.shares) == total
    assert found.exact
    # No exchange between two GPUs gains: what a necessary condition can check at this size.
    tables = [
        ((0.5 * each.power_w + 0.5 * each.power_limit_w[:, None]) * each.time_s).min(axis=0) for each in gpus
    ]
    for g, h in itertools.combinations(range(16), 2):
        both = found.shares[g].batch + found.shares[h].batch
        sums = tables[g][1:both] + tables[h][1:both][::-1]
        now = tables[g][found.shares[g].batch] + tables[h][found.shares[h].batch]
        assert sums.min() >= now - 1e-9 * now


@pytest.mark.parametrize("kind", ["sync", "energy", "edp"])
def test_two_gpus_and_4096_agree(kind: str) -> None:
    gpus = [smooth("fast", 4096, 300.0, 100.0), smooth("slow", 4096, 110.0, 60.0, 15.0)]
    objective = Objective(kind, 0.3, 0.05)  # pyright: ignore[reportArgumentType]
    assert optimal(gpus, objective, 4096).cost == pytest.approx(
        brute_force(gpus, objective, 4096).cost, rel=1e-12
    )


def test_four_gpus_and_4096_are_exact() -> None:
    gpus = [smooth(f"g{g}", 4096, 100.0 + 70 * g, 60.0 + 20 * g) for g in range(4)]
    found = optimal(gpus, Objective("sync", 0.5, 0.1), 4096)
    assert found.exact


def flat(name: str, time_s: Sequence[float], power_w: float, limit_w: float, wait_w: float = 0.0) -> Choices:
    times = np.array([time_s], dtype=np.float64)
    return Choices(
        name, np.array([limit_w]), times, np.full(times.shape, power_w), 1, times.shape[1] - 1, wait_w
    )


def test_objectives_by_hand() -> None:
    # Two samples, one each: 2 s at 30 W (limit 40) and 5 s at 10 W (limit 20); waiting takes 6 W and 3 W.
    gpus = [flat("a", [0, 2, 9], 30, 40, 6), flat("b", [0, 5, 9], 10, 20, 3)]
    expected = {
        "sum": (15 + 20) * 2 + (5 + 10) * 5,
        "energy": 60 + 6 * 4 + 50 + 3 * 1,  # the step lasts 5 s and 1 s of all-reduce
        "time": 6,
        "edp": 137 * 6,
        "sync": 137 / 2 + 6 * 60 / 2,
    }
    for kind, paid in expected.items():
        objective = Objective(kind, 0.5, 1.0)  # pyright: ignore[reportArgumentType]
        for method in (baseline, heuristic, brute_force, optimal):
            assert method(gpus, objective, 2).cost == paid, (kind, method)


def test_a_gpu_may_be_left_out() -> None:
    gpus = [flat("a", [9, 2, 3], 10, 10, 5), flat("b", [9, 50, 60], 10, 10, 5)]
    assert [share.batch for share in optimal(gpus, Objective("energy"), 2).shares] == [1, 1]
    free = [dataclasses.replace(each, lowest=0) for each in gpus]
    for kind, paid in (("sum", 30.0), ("energy", 30.0), ("time", 3.0), ("edp", 90.0)):
        for method in (brute_force, optimal):
            found = method(free, Objective(kind), 2)  # pyright: ignore[reportArgumentType]
            assert [share.batch for share in found.shares] == [2, 0]
            assert found.cost == paid  # nobody pays for the waiting of a GPU that is not there


@pytest.mark.parametrize(
    ("highest", "total", "split"),
    [((9, 9), 7, [4, 3]), ((2, 9, 9), 9, [2, 4, 3]), ((1, 1, 9), 9, [1, 1, 7]), ((3, 3), 6, [3, 3])],
)
def test_even_split(highest: Sequence[int], total: int, split: list[int]) -> None:
    gpus = [dataclasses.replace(flat(f"g{i}", [0] * 10, 1, 1), highest=h) for i, h in enumerate(highest)]
    assert even_split(gpus, total) == split


@settings(max_examples=60, deadline=None)
@given(instances(["sum", "sync"]))
@example(([flat("a", [0, 1, 2], 5, 10), flat("b", [0, 1, 2], 5, 10)], Objective("sum"), 2))
def test_pareto_has_the_best_for_every_eta(instance: tuple[list[Choices], Objective, int]) -> None:
    gpus, objective, total = instance
    front = pareto(gpus, objective, total)
    assert front[0].eta_low == 0
    assert front[-1].eta_high == 1
    for a, b in itertools.pairwise(front):
        assert a.eta_high == b.eta_low
        assert a.energy > b.energy
        assert a.limit_energy < b.limit_energy
    for eta in (0.0, 0.1, 0.5, 0.77, 1.0):
        at = dataclasses.replace(objective, eta=eta)
        corner = next(each for each in front if each.eta_low <= eta <= each.eta_high)
        assert cost(at, corner.allocation.shares) == pytest.approx(
            optimal(gpus, at, total).cost, rel=1e-9, abs=1e-9
        )


def test_refusals() -> None:
    gpus = [flat("a", [0, 2, 9], 30, 40), flat("b", [0, 5, 9], 10, 20)]
    for given_, objective, total, words in (
        ([], Objective("sum"), 2, "no GPU"),
        ([gpus[0], gpus[0]], Objective("sum"), 2, "a is given twice"),
        (gpus, Objective("sum"), 5, "the GPUs hold 4 in all"),
        (gpus, Objective("sum"), 1, "2 GPUs need one each"),
        (gpus, Objective("sum", 2.0), 2, "not between 0 and 1"),
        (gpus, Objective("sync", slowdown=0.1), 2, "--objective energy"),
        ([dataclasses.replace(gpus[0], wait_w=None), gpus[1]], Objective("sync"), 2, "--wait-power a=W"),
    ):
        for method in (baseline, brute_force, optimal):
            with pytest.raises(UserError, match=words):
                method(given_, objective, total)
    with pytest.raises(UserError, match="no GPU named c"):
        heuristic(gpus, Objective("sum"), 2, "c")
    with pytest.raises(UserError, match="no η"):
        pareto(gpus, Objective("time"), 2)
    many = [smooth(f"g{g}", 4096, 100.0, 60.0) for g in range(4)]
    with pytest.raises(UserError, match="too many allocations"):
        brute_force(many, Objective("sum"), 4096)
