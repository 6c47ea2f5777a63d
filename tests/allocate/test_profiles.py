"""Profiles as they are read and refused, models between and beyond the points, and the spread of repeats."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusal import refused
from smaragdine.allocate.model import (
    Objective,
    choices,
    curve,
    model_warnings,
    points_at,
    rising,
    standard_error,
)
from smaragdine.allocate.optimal import optimal
from smaragdine.allocate.profile import Profile, Repeat, profile_of, profile_table, read_profile


def row(power_limit: Any = 100, energy: Any = 10.0, time: Any = 0.5) -> dict[str, Any]:
    return {"power_limit": power_limit, "energy": energy, "time": time}


def write(path: Path, values: Any) -> Path:
    path.write_text(json.dumps(values))
    return path


def test_json(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.json", {"64": [row(100), row(80, 9)], "32": [row(80, 5, 0.3), row(100, 6, 0.25)]}
    )
    profile = read_profile(file, "a")
    assert profile.gpu == "a"
    assert profile.batches == (32, 64)
    assert profile.power_limits_w == (80, 100)
    point = profile.points[32, 100.0]
    assert (point.time_s, point.energy_j, point.repeats, point.time_variance) == (0.25, 6, 1, None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"32": [row()]}, ["batch size 32 alone", "two batch sizes"]),
        ({}, ["is no profile"]),
        ([row()], ["is no profile"]),
        ({"32": [row(100), row(80)], "64": [row(100)]}, ["different limits", "batch 64", "80 W"]),
        ({"32": [row(time=0)], "64": [row()]}, ["bad time", "batch 32 at 100 W", "not above 0"]),
        ({"32": [row(time=-1.0)], "64": [row()]}, ["bad time"]),
        ({"32": [row(energy=0.0)], "64": [row()]}, ["bad energy"]),
        ({"32": [row(energy=math.nan)], "64": [row()]}, ["NaN is no number"]),
        ({"32": [row(time=math.inf)], "64": [row()]}, ["Infinity is no number"]),
        ({"32": [row(0)], "64": [row(0)]}, ["bad power limit"]),
        ({"0": [row()], "64": [row()]}, ["bad batch size"]),
        ({"x": [row()], "64": [row()]}, ["'x' is not a batch size"]),
        ({"-5": [row()], "64": [row()]}, ["'-5' is not a batch size"]),
        ({"32": [row(), row()], "64": [row()]}, ["batch 32 twice at 100 W"]),
        ({"32": [], "64": [row()]}, ["no measurement for batch 32"]),
        ({"32": row(), "64": [row()]}, ["batch 32 has no list"]),
        ({"32": [{"power_limit": 1, "energy": 2}], "64": [row()]}, ["batch 32", "without time"]),
        ({"32": [row(energy="7")], "64": [row()]}, ["without energy"]),
        ({"32": [row(energy=True)], "64": [row()]}, ["without energy"]),
        ({"32": [3], "64": [row()]}, ["without power_limit"]),
    ],
)
def test_bad_json(tmp_path: Path, values: Any, words: list[str]) -> None:
    file = write(tmp_path / "bad.json", values)
    refused(lambda: read_profile(file, "a"), "bad.json", *words)


def test_no_json(tmp_path: Path) -> None:
    refused(lambda: read_profile(tmp_path / "none.json", "a"), "none.json cannot be read")
    refused(lambda: read_profile(tmp_path, "a"), "cannot be read")
    (tmp_path / "text").write_text("hello")
    refused(lambda: read_profile(tmp_path / "text", "a"), "not JSON")
    (tmp_path / "empty").write_text("")
    refused(lambda: read_profile(tmp_path / "empty", "a"), "not JSON")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    refused(lambda: read_profile(tmp_path / "bytes", "a"), "not JSON")


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(profile_table(rows), path)
    return path


def repeats(gpu: str = "a", batches: tuple[int, ...] = (32, 64), **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "gpu": gpu,
            "batch": batch,
            "power_limit_w": limit_w,
            "repeat": n,
            "steps": 10,
            "time_s": batch * (1.0 + 0.1 * n),
            "energy_j": batch * (50.0 + 2 * n),
            "out_of_memory": False,
            **more,
        }
        for batch in batches
        for limit_w in (80.0, 100.0)
        for n in range(3)
    ]


def test_parquet(tmp_path: Path) -> None:
    too_large = {
        "gpu": "a",
        "batch": 128,
        "power_limit_w": 80.0,
        "repeat": 0,
        "steps": 0,
        "out_of_memory": True,
    }
    rows = [*repeats(idle_w=9.0, wait_w=20.0), too_large]
    profile = read_profile(parquet(tmp_path / "a.parquet", rows), "mine")
    assert profile.gpu == "mine"
    assert (profile.idle_w, profile.wait_w) == (9.0, 20.0)
    assert profile.out_of_memory == (128,)
    point = profile.points[32, 80.0]
    assert point.time_s == pytest.approx(3.2 * 1.1)
    assert point.energy_j == pytest.approx(3.2 * 52)
    times, energies = [3.2, 3.52, 3.84], [160.0, 166.4, 172.8]
    assert point.time_variance == pytest.approx(statistics.variance(times) / 3)
    assert point.energy_variance == pytest.approx(statistics.variance(energies) / 3)
    assert point.covariance == pytest.approx(statistics.covariance(times, energies) / 3)
    # What did not fit bounds the batch: the largest that ran, whatever the curve says beyond.
    assert choices(profile, 1000).highest == 64
    assert choices(profile, 1000, max_batch=40).highest == 40
    assert choices(profile, 50).highest == 50


def test_parquet_of_several_gpus(tmp_path: Path) -> None:
    file = parquet(tmp_path / "all.parquet", [*repeats("a"), *repeats("b", (16, 32, 64))])
    assert read_profile(file, "b").batches == (16, 32, 64)
    refused(lambda: read_profile(file, "c"), "no GPU named c", "a, b")


def test_bad_parquet(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    pq.write_table(profile_table(repeats()).drop_columns(["steps"]), file)
    refused(lambda: read_profile(file, "a"), "no column steps")
    parquet(file, repeats(steps=0))
    refused(lambda: read_profile(file, "a"), "without steps or figures")
    parquet(file, repeats(time_s=None))
    refused(lambda: read_profile(file, "a"), "without steps or figures")
    parquet(file, repeats(batch=None))
    refused(lambda: read_profile(file, "a"), "no batch or power limit")
    parquet(file, repeats(time_s=1e300))
    refused(lambda: read_profile(file, "a"), "bad time", "no figure")
    parquet(file, repeats(idle_w=math.nan))
    refused(lambda: read_profile(file, "a"), "bad idle power")
    pq.write_table(profile_table(repeats()), file, store_schema=False)
    file.write_bytes(file.read_bytes().replace(b"\x18\x03gpu%", b"\x18\x03\xed\xa0\x80%"))
    refused(lambda: read_profile(file, "a"), "not UTF-8")
    file.write_bytes(file.read_bytes()[:50])
    refused(lambda: read_profile(file, "a"), "cannot be read")


def profiled(times_s: dict[int, float], powers_w: dict[int, float], limit_w: float, **more: Any) -> Profile:
    points = [Repeat(b, limit_w, t, powers_w[b] * t) for b, t in times_s.items()]
    return profile_of("g", points, **more)


def test_monotone_by_hand() -> None:
    profile = profiled(
        {10: 1.0, 20: 3.0, 30: 2.0, 40: 5.0}, {10: 40, 20: 60, 30: 130, 40: 90}, 100, idle_w=35
    )
    at = np.array([0.0, 5, 10, 15, 20, 25, 30, 35, 40, 50])
    time_s, power_w = curve("monotone", points_at(profile, 100), 100, 35, at)
    # 3 and 2 are pooled to 2.5; beyond the last point as steep as from the last that differs.
    assert time_s == pytest.approx([0.0, 0.5, 1.0, 1.75, 2.5, 2.5, 2.5, 3.75, 5.0, 7.5])
    # 130 W is above the limit, −20 + 0·2 … below idle: both are held.
    assert power_w == pytest.approx([35, 35, 40, 50, 60, 95, 100, 100, 90, 50])


def test_monotone_without_idle_power() -> None:
    profile = profiled({10: 1.0, 20: 2.0}, {10: 40, 20: 60}, 100)
    assert choices(profile, 30).power_w[0, [0, 10, 15, 30]] == pytest.approx([40, 40, 50, 80])


def test_flat_times_stay_flat() -> None:
    profile = profiled({10: 3.0, 20: 2.0}, {10: 40, 20: 60}, 100)
    assert choices(profile, 40).time_s[0, [5, 10, 20, 40]] == pytest.approx([2.5, 2.5, 2.5, 2.5])


numbers = st.floats(0.01, 100)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.integers(1, 300), st.tuples(numbers, numbers), min_size=2, max_size=6),
    st.floats(1, 200),
    st.one_of(st.none(), st.floats(0, 50)),
)
def test_monotone_stays_possible(
    measured: dict[int, tuple[float, float]], limit_w: float, idle_w: float | None
) -> None:
    profile = profile_of("g", [Repeat(b, limit_w, t, p * t) for b, (t, p) in measured.items()], idle_w)
    found = choices(profile, 500)
    assert (np.diff(found.time_s[0]) >= -1e-9).all()
    assert (found.time_s[0, 1:] > 0).all()
    assert (found.power_w[0] <= limit_w).all()
    assert idle_w is None or (found.power_w[0] >= min(idle_w, limit_w)).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6))
def test_rising_is_the_nearest(values: list[tuple[int, int]]) -> None:
    y, w = (np.array(each, dtype=np.float64) for each in zip(*values, strict=True))
    found = rising(y, w)
    assert (np.diff(found) >= -1e-12).all()
    # The greatest of the least means: isotonic regression's closed form.
    for i in range(y.size):
        exact = max(
            min(np.average(y[a : b + 1], weights=w[a : b + 1]) for b in range(i, y.size))
            for a in range(i + 1)
        )
        assert found[i] == pytest.approx(exact)


def test_quadratic_is_the_parabola_and_clipped() -> None:
    at = [16, 32, 64, 128]
    profile = profiled(
        {b: 2 + 0.01 * b + 1e-4 * b * b for b in at}, {b: 80 + b - 0.01 * b * b for b in at}, 300
    )
    found = choices(profile, 200, "quadratic")
    batch = np.arange(201)
    assert found.time_s[0] == pytest.approx(2 + 0.01 * batch + 1e-4 * batch**2)
    assert found.power_w[0] == pytest.approx(np.maximum(80 + batch - 0.01 * batch**2, 0), abs=1e-9)
    assert found.power_w[0, 200] == 0
    two = profiled({16: 1.0, 32: 2.0}, {16: 50, 32: 60}, 100)
    refused(lambda: choices(two, 64, "quadratic"), "three batch sizes", "--model monotone")


def test_powers_above_the_limit_are_said() -> None:
    profile = profiled({10: 1.0, 20: 2.0}, {10: 40, 20: 130}, 100)
    (said,) = model_warnings([profile], "monotone")
    assert "g: 1 of 2 points" in said
    assert "130.0 W at 100 W, batch 20" in said
    assert model_warnings([profile], "quadratic") == []


@pytest.mark.parametrize("model", ["monotone", "quadratic"])
@pytest.mark.parametrize("kind", ["sum", "sync", "edp"])
def test_standard_error(model: Any, kind: Any) -> None:
    """Against the spread of the same allocation's cost over many profiles drawn anew."""
    chance = random.Random(7)

    def draw(noise: float) -> dict[str, Profile]:
        found: dict[str, Profile] = {}
        for gpu, speed in (("a", 100.0), ("b", 60.0)):
            measured: list[Repeat] = []
            for batch in (16, 32, 64, 128):
                for limit_w in (80.0, 120.0):
                    for _ in range(8):
                        time_s = (5 + batch) / speed * (1 + noise * chance.gauss(0, 1))
                        power_w = (30 + batch / 4) * (1 + noise * chance.gauss(0, 1))
                        measured.append(Repeat(batch, limit_w, time_s, power_w * time_s))
            found[gpu] = profile_of(gpu, measured, idle_w=10, wait_w=20)
        return found

    objective = Objective(kind, 0.5)
    first = draw(0.02)
    chosen = optimal([choices(profile, 150, model) for profile in first.values()], objective, 150)

    def cost_in(profiles: dict[str, Profile]) -> float:
        gpus = []
        for share in chosen.shares:
            each = choices(profiles[share.gpu], 150, model)
            gpus.append(_only(each, share.batch, share.power_limit_w))
        return optimal(gpus, objective, 150).cost

    seen = statistics.stdev(cost_in(draw(0.02)) for _ in range(150))
    said = statistics.fmean(
        value
        for value in (standard_error(chosen, draw(0.02), model, objective) for _ in range(10))
        if value is not None
    )
    assert said == pytest.approx(seen, rel=0.3)


def _only(each: Any, batch: int, limit_w: float) -> Any:
    import dataclasses

    i = int(np.flatnonzero(each.power_limit_w == limit_w)[0])
    return dataclasses.replace(
        each,
        power_limit_w=each.power_limit_w[i : i + 1],
        time_s=each.time_s[i : i + 1],
        power_w=each.power_w[i : i + 1],
        lowest=batch,
        highest=batch,
    )


def test_no_standard_error_without_repeats() -> None:
    profile = profiled({10: 1.0, 20: 2.0}, {10: 40, 20: 60}, 100)
    objective = Objective("sum")
    found = optimal([choices(profile, 15)], objective, 15)
    assert standard_error(found, {"g": profile}, "monotone", objective) is None
