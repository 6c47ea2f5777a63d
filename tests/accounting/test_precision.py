"""Thinned power traces, and the precision figures that rest on them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from footprints import footprint
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.power import Anchors, PowerTrace
from smaragdine.accounting.precision import asss, assw, stability, thin
from smaragdine.errors import UserError
from smaragdine.report.comparison import thinned_table
from smaragdine.report.terminal import console


def made(
    spec: list[tuple[int, int, float]], hold_ns: int = 15, anchors_ns: list[int] | None = None
) -> PowerTrace:
    return PowerTrace(
        np.array([start for start, _, _ in spec], dtype=np.int64),
        np.array([end for _, end, _ in spec], dtype=np.int64),
        np.array([power for _, _, power in spec], dtype=np.float64),
        hold_ns,
        Anchors(np.array(anchors_ns), np.ones(len(anchors_ns) - 1)) if anchors_ns else None,
    )


def pieces(trace: PowerTrace) -> list[tuple[int, int, float]]:
    return list(zip(trace.start_ns.tolist(), trace.end_ns.tolist(), trace.power_w.tolist(), strict=True))


TOUCHING = [(0, 10, 1.0), (10, 20, 2.0), (20, 30, 3.0), (30, 40, 4.0), (40, 50, 5.0)]


def test_every_reading_is_the_trace_itself() -> None:
    trace = made(TOUCHING)
    assert thin(trace, 1) is trace


@pytest.mark.parametrize(
    ("readings", "power_w"),
    [
        ("sample", [1.0, 3.0, 3.0, 5.0, 5.0]),  # back to the reading before
        ("held", [1.0, 1.0, 3.0, 3.0, 5.0]),  # on to the next one
        ("counter", [1.5, 1.5, 3.5, 3.5]),  # what was used between two readings; the last has no second one
    ],
)
def test_every_second_reading(readings: str, power_w: list[float]) -> None:
    found = thin(made(TOUCHING), 2, readings)  # type: ignore[arg-type]
    assert pieces(found) == [(s, e, w) for (s, e, _), w in zip(TOUCHING, power_w, strict=False)]


def test_more_than_there_are() -> None:
    assert pieces(thin(made(TOUCHING), 9)) == [(0, 10, 1.0)]
    assert [w for _, _, w in pieces(thin(made(TOUCHING), 9, "held"))] == [1.0] * 5
    assert pieces(thin(made(TOUCHING), 9, "counter")) == []


def test_what_was_missing_stays_missing() -> None:
    trace = made([(0, 10, 1.0), (10, 20, 2.0), (100, 110, 3.0), (110, 120, 4.0), (120, 130, 5.0)])
    found = thin(trace, 2)
    assert pieces(found) == [(0, 10, 1.0), (100, 110, 3.0), (110, 120, 5.0), (120, 130, 5.0)]
    assert found.missing(0, 130) == [(10, 100)]
    held = thin(trace, 2, "held")
    assert [w for _, _, w in pieces(held)] == [1.0, 1.0, 3.0, 3.0, 5.0]
    assert held.missing(0, 130) == trace.missing(0, 130) == [(20, 100)]


def test_a_restarted_sampler_counts_anew() -> None:
    trace = PowerTrace(
        np.array([0, 10, 25, 35]),
        np.array([10, 20, 35, 45]),
        np.array([1.0, 2.0, 3.0, 4.0]),
        15,
        restarts_ns=np.array([20]),
    )
    assert pieces(thin(trace, 2)) == [(0, 10, 1.0), (25, 35, 3.0)]


def test_short_gaps_are_not_bridged() -> None:
    trace = made([(0, 2, 1.0), (10, 12, 2.0), (20, 22, 3.0)])
    assert pieces(thin(trace, 2)) == [(0, 2, 1.0), (10, 12, 3.0), (20, 22, 3.0)]


def test_a_reading_that_an_anchor_cuts_is_one() -> None:
    trace = made([(0, 10, 1.0), (10, 14, 2.0), (14, 20, 2.5), (20, 30, 3.0)], anchors_ns=[0, 14, 30])
    assert [w for _, _, w in pieces(thin(trace, 2))] == [1.0, 3.0, 3.0, 3.0]
    late = made([(-10, 0, 9.0), *pieces(trace)], anchors_ns=[-10, 14, 30])
    assert [w for _, _, w in pieces(thin(late, 2))] == [9.0, 2.5, 2.5, 2.5]
    assert [w for _, _, w in pieces(thin(late, 2, "held"))] == [9.0, 9.0, 2.0, 2.0, 2.0]


def test_bad_k() -> None:
    with pytest.raises(UserError):
        thin(made(TOUCHING), 0)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(0, 99)), max_size=30),
    st.integers(2, 7),
)
def test_against_a_loop(spec: list[tuple[int, int, int]], k: int) -> None:
    whole: list[tuple[int, int, float]] = []
    runs: list[list[int]] = []
    at = 0
    for i, (gap, length, power) in enumerate(spec):
        if i == 0 or gap > 15:
            runs.append([])
        runs[-1].append(i)
        whole.append((at + gap, at + gap + length, float(power)))
        at += gap + length
    wanted = {"sample": dict[int, float](), "held": dict[int, float]()}
    for run in runs:
        for place, i in enumerate(run):
            wanted["held"][i] = whole[run[place - place % k]][2]
            after = next((p for p in range(place, len(run)) if p % k == 0), None)
            if after is not None:
                wanted["sample"][i] = whole[run[after]][2]
    for readings, power_w in wanted.items():
        found = thin(made(whole), k, readings)  # type: ignore[arg-type]
        assert pieces(found) == [(*whole[i][:2], power_w[i]) for i in sorted(power_w)]


def _account(traces: dict[str, PowerTrace]) -> Footprint:
    """Three operations, ten nanoseconds each, one after the other and again."""
    trace = traces["gpu:0"]
    return footprint(
        [
            {
                "name": name,
                "energy_j": 1e9 * sum(trace.energy_j(t, t + 10) for t in range(10 * i, 600, 30)),
                "busy_s": float(i + 1),
            }
            for i, name in enumerate("xyz")
        ]
    )


def test_sparse_samples() -> None:
    power_w = [100.0 + 50 * (i % 3) + i for i in range(60)]
    trace = made([(10 * i, 10 * i + 10, w) for i, w in enumerate(power_w)])
    found = asss(_account, {"gpu:0": trace}, [1, 3])
    assert [score.n for score in found] == [1, 3]
    assert found[0].scores.energy.value == pytest.approx(1)
    assert found[0].scores.power.value == pytest.approx(1)
    # Every third reading sees x alone: the order of the others is lost.
    sparse = [sum(power_w[0::3]), sum(power_w[3::3]), sum(power_w[3::3])]
    whole = [sum(power_w[i::3]) for i in range(3)]
    assert found[1].scores.energy.value == pytest.approx(np.corrcoef(whole, sparse)[0, 1])
    assert found[1].scores.floor.value == pytest.approx(np.corrcoef(whole, [1, 2, 3])[0, 1])
    assert found[1].scores.time_alone_energy.value == pytest.approx(1)
    assert found[1].scores.time_alone_power.value is None


def _runs(*energies: tuple[float, float, float]) -> list[Footprint]:
    return [
        footprint(
            [
                {"name": name, "energy_j": e, "busy_s": s}
                for name, e, s in zip("xyz", of, (1.0, 2.0, 4.0), strict=True)
            ]
        )
        for of in energies
    ]


def test_more_experiments() -> None:
    first = [(1.0, 2.0, 9.0), (3.0, 2.0, 1.0)]
    second = [(4.0, 4.0, 1.0), (2.0, 8.0, 1.0)]
    third = [(7.0, 1.0, 1.0), (1.0, 1.0, 6.0)]
    found = assw([_runs(*first), _runs(*second), _runs(*third)])

    def mean(*runs: tuple[float, float, float]) -> np.ndarray:
        return np.mean(runs, axis=0)

    assert [score.n for score in found.pooled] == [2, 3]
    assert [score.n for score in found.disjoint] == [1, 2]
    for score, pool in zip(
        [*found.pooled, *found.disjoint],
        [first + second, first + second + third, second, second + third],
        strict=True,
    ):
        assert score.scores.energy.value == pytest.approx(np.corrcoef(mean(*first), mean(*pool))[0, 1])
        busy_s = np.array([1.0, 2.0, 4.0])
        powers = np.corrcoef(mean(*first) / busy_s, mean(*pool) / busy_s)[0, 1]
        assert score.scores.power.value == pytest.approx(powers)
        assert score.scores.time_alone_energy.value == pytest.approx(1)


def test_every_experiment_against_every_other() -> None:
    found = stability([_runs((1.0, 2.0, 9.0)), _runs((3.0, 2.0, 1.0))])
    assert found.energy[0][1].value == pytest.approx(np.corrcoef([1, 2, 9], [3, 2, 1])[0, 1])
    assert found.power[0][1].value == pytest.approx(np.corrcoef([1, 1, 2.25], [3, 1, 0.25])[0, 1])
    assert found.time_alone[0][1].value == pytest.approx(1)


def test_one_experiment_is_too_few() -> None:
    with pytest.raises(UserError):
        assw([_runs((1.0, 2.0, 9.0))])


def test_a_score_that_cannot_be_had_says_why() -> None:
    def account_one(traces: dict[str, PowerTrace]) -> Footprint:
        return footprint([{"name": name, "energy_j": 1.0} for name in ("x", "y", "z")])

    with io.StringIO() as out:
        console(out).print(thinned_table({"gpu:0": asss(account_one, {"gpu:0": made(TOUCHING)}, [2])}))
        said = out.getvalue()
    assert "–: all common names are the same in A (A: by all readings, B: by those kept)\n" in said
