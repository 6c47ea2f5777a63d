"""What changed between runs: the verdicts, against Welch's interval by hand, and the verb on files."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footprints import energies, footprint, footprints
from smaragdine.accounting.arithmetic import add, per_step
from smaragdine.accounting.comparison import Change, compare, to_json
from smaragdine.accounting.footprint import Footprint, save
from smaragdine.accounting.precision import assw, stability
from smaragdine.cli.compare import main
from smaragdine.errors import UserError
from smaragdine.stats import (
    StandardError,
    chance_for_each,
    difference,
    half_width,
    of_difference,
    of_steps,
    probability,
    t_within,
)


def made(x: float, y: float = 10.0, **more: float) -> Footprint:
    rows = [{"name": "net/x", "energy_j": x, "busy_s": 1.0}, {"name": "net/y", "energy_j": y, "busy_s": 3.0}]
    rows += [{"name": name, "energy_j": energy_j, "busy_s": 2.0} for name, energy_j in more.items()]
    return footprint(rows, idle_j=1.0)


def changes(a: list[Footprint], b: list[Footprint]) -> dict[str, Change]:
    return {change.name: change for change in compare(a, b, by_step=False).changes}


def test_one_step_is_not_compared_with_several() -> None:
    several = footprint([{"name": "net/x", "energy_j": 10.0}], steps=10)
    with pytest.raises(UserError, match=r"one step cannot be compared.*--per-step"):
        compare([per_step(several)], [several], by_step=False)
    assert compare([per_step(several)], [several], by_step=True).total.difference_j == 0


def test_summaries_of_both_sides_have_the_same_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"net/layer_{n}/{op}" for n in range(4) for op in ("mm", "add")]
    for file, left in (("a.json", ""), ("b.json", "net/layer_2/add")):
        rows = [{"name": name, "energy_j": 1.0} for name in names if name != left]
        save(footprint(rows), tmp_path / file)
    assert main([str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--summary", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["difference_j"]) for one in values["changes"]] == [
        ("net/layer_*/add", -1.0),
        ("net/layer_*/mm", 0.0),
    ]
    assert values["only_a"] == values["only_b"] == []


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706205), (2, 4.302653), (2.5, 3.574655), (4, 2.776445), (10, 2.228139), (1e9, 1.959964)],
)
def test_student(freedom: float, t: float) -> None:
    assert t_within(freedom) == pytest.approx(t, rel=2e-4)


def test_degrees_of_freedom_are_rounded_to_the_wider_side() -> None:
    assert t_within(4.009) == t_within(4)
    assert t_within(4.011) < t_within(4)


def test_welch_by_hand() -> None:
    a, b = [27.5, 21.0, 19.0, 23.6], [27.1, 22.0, 20.8]
    va, vb = statistics.variance(a) / 4, statistics.variance(b) / 3
    freedom = (va + vb) ** 2 / (va**2 / 3 + vb**2 / 2)
    both = of_difference(a, b)
    assert both is not None
    assert half_width(both) == pytest.approx(t_within(freedom) * math.sqrt(va + vb))
    assert of_difference([1.0], [2.0]) is None
    alone = of_difference(a, [2.0])
    assert alone is not None
    assert alone == of_difference([2.0], a)
    assert half_width(alone) == pytest.approx(t_within(3) * statistics.stdev(a) * math.sqrt(1 / 4 + 1))
    assert half_width(difference(StandardError(0.0, 3), StandardError(0.0, 3))) == 0.0


def test_the_interval_leaves_out_nothing_just_where_the_probability_is_below_its_chance() -> None:
    spread = StandardError(2.0, 5)
    for chance in (0.05, 0.01, 1e-4, 1e-7):
        edge = half_width(spread, chance)
        assert probability(edge, spread) == pytest.approx(chance, rel=1e-6)
        assert probability(edge * 1.01, spread) < chance < probability(edge * 0.99, spread)


def test_benjamini_and_hochberg_by_hand() -> None:
    # Their own example (1995, table 1): 15 tests, at 5 % the four smallest are found.
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719,
         0.6528, 0.7590, 1.0]  # fmt: skip
    chances = chance_for_each(p, 0.05)
    assert chances == pytest.approx([0.05 * 4 / 15] * 15)
    assert sum(value <= chance for value, chance in zip(p, chances, strict=True)) == 4
    assert chance_for_each([0.9, 0.8], 0.05) == [0.025, 0.025]
    assert chance_for_each([], 0.05) == []


def test_a_hundred_small_names_do_not_hide_a_large_one() -> None:
    p = [0.01, *[0.5] * 100]
    assert max(chance_for_each(p, 0.05)) < p[0]
    weights = [50.0, *[0.5] * 100]
    chances = chance_for_each(p, 0.05, weights)
    assert chances[0] == pytest.approx(0.025)
    # Rounded down: all together have no more than the whole, and not much less.
    assert 0.8 * 0.05 < math.fsum(chances) <= 0.05
    assert chance_for_each(p, 0.05, [0.0] * 101) == pytest.approx(chance_for_each(p, 0.05))


def test_the_spread_of_steps() -> None:
    assert of_steps(50.0, 10.0, 2.0, 5) == StandardError(2.0 * math.sqrt(5), 4)
    per_step = of_steps(10.0, 10.0, 2.0, 5)
    assert per_step is not None
    assert per_step.error == pytest.approx(2.0 / math.sqrt(5))
    assert of_steps(50.0, math.nan, 2.0, 5) is of_steps(50.0, 10.0, 2.0, 1) is None


def test_repeated_runs_tell_change_from_noise() -> None:
    a = [made(x, y) for x, y in ((10.0, 50.0), (10.2, 53.0), (9.8, 47.0))]
    b = [made(x, y) for x, y in ((12.0, 51.0), (12.1, 54.0), (11.9, 48.0))]
    found = changes(a, b)
    assert found["net/x"].verdict == "more"
    assert found["net/y"].verdict == "inside the noise"
    assert found["net/x"].difference_j == pytest.approx(2.0)
    assert found["net/x"].a_std_j == pytest.approx(0.2)
    spread = of_difference([10.0, 10.2, 9.8], [12.0, 12.1, 11.9])
    assert spread is not None
    # Names have three fifths of the one in twenty, each by its part of the energy.
    chance = chance_for_each([0.0, 1.0], 0.03, [22.0, 101.0])[0]
    assert chance == pytest.approx(0.03 * 22 / 123, rel=0.2)
    assert found["net/x"].half_width_j == pytest.approx(half_width(spread, chance))
    assert changes(b, a)["net/x"].verdict == "less"
    whole = compare(a, b)
    assert whole.total.verdict == "inside the noise"
    assert "inside the noise" in whole.verdict
    assert [change.name for change in whole.devices] == ["gpu:0"]
    assert whole.total.a_j == pytest.approx(60.0)
    assert (whole.idle.a_j, whole.idle.verdict) == (1.0, "inside the noise")


def test_a_total_beyond_the_noise_says_by_how_much() -> None:
    found = compare([made(9.0, 10.0), made(9.1, 10.1)], [made(19.0, 10.1), made(19.1, 10.0)])
    assert found.total.verdict == "more"
    assert found.verdict.startswith("B takes 10.0 J (52.4%) ± ")
    assert "1 of 2 names changed" in found.verdict


def test_false_discoveries_are_controlled() -> None:
    """Of 400 names that spread alike on both sides, one in twenty lies outside its own 95 % interval."""
    draw = random.Random(18)

    def run() -> Footprint:
        return footprint([{"name": f"n{i}", "energy_j": draw.gauss(10.0, 0.1)} for i in range(400)])

    a, b = [run() for _ in range(3)], [run() for _ in range(3)]
    found = compare(a, b)
    outside = 0
    for change in found.changes:
        of = [[energies(one)[change.name] for one in side] for side in (a, b)]
        spread = of_difference(*of)
        assert spread is not None
        outside += abs(change.difference_j) > half_width(spread)
    assert outside > 5
    assert {change.verdict for change in found.changes} == {"inside the noise"}
    assert "none of 400 names changed" in found.verdict


def test_copies_of_one_run_say_nothing_about_noise() -> None:
    found = compare([made(9.0), made(9.0)], [made(19.0), made(19.0)])
    assert found.total.verdict == "unknown"
    assert {change.name: change.verdict for change in found.changes} == {
        "net/x": "unknown",
        "net/y": "inside the noise",
    }


def test_a_copy_of_a_run_counts_once() -> None:
    """It would make the noise look small: here three runs each of two that differ."""
    a, b = [made(9.0), made(10.0)], [made(11.0), made(12.0)]
    honest, copied = compare(a, b), compare([*a, a[0]], [*b, made(12.0)])
    assert copied.runs == (2, 2)
    assert copied.total == honest.total
    assert copied.changes == honest.changes
    assert [line.split(":")[0] for line in copied.remarks] == ["A", "B"]
    assert "3 runs were given, 1 of them more than once" in copied.remarks[0]
    assert compare(a, a).remarks[0].startswith("2 runs are on both sides")
    assert not honest.remarks


def test_names_that_are_new_or_gone_are_said_apart_from_the_reason() -> None:
    b = made(30.0, z=1.0, w=2.0)
    assert compare([made(9.0)], [b]).verdict.endswith(" is not known; 2 names new")
    assert compare([made(9.0, z=1.0)], [made(9.0)]).verdict.endswith("; 1 name gone")


def test_headline_and_parts_are_of_one_thing() -> None:
    def run(x: float, idle_j: float) -> Footprint:
        return footprint([{"name": "x", "energy_j": x}, {"name": "y", "energy_j": 2.0}], idle_j=idle_j)

    a = [run(x, 100.0 + x) for x in (1.0, 1.01, 0.99)]
    b = [run(x, 70.0 + x) for x in (2.5, 2.51, 2.49)]
    found = compare(a, b)
    parts_j = math.fsum(change.difference_j for change in found.changes)
    assert found.total.difference_j == pytest.approx(parts_j)
    assert found.verdict.startswith("B takes 1.50 J (50.0%)")
    assert found.total.verdict == "more"
    assert found.idle.verdict == "less"
    assert found.idle.difference_j == pytest.approx(-28.5)


def test_one_run_each_is_unknown_whatever_its_steps_say() -> None:
    found = compare([stepped(10.0, 10)], [stepped(30.0, 10)])
    assert found.total.verdict == "unknown"
    assert found.verdict.startswith("unknown: B took 2.00 J (200.0%)")
    assert [change.verdict for change in found.changes] == ["unknown"]
    known = compare([stepped(x, 10) for x in (10.0, 10.1, 9.9)], [stepped(30.0, 10)])
    assert known.total.verdict == "more"


def test_other_programs_beside_one_side_alone_make_it_unknown() -> None:
    def runs(energies_j: list[float], loads: list[float]) -> list[Footprint]:
        return [loaded(x, load) for x, load in zip(energies_j, loads, strict=True)]

    a = runs([10.0, 10.1, 9.9], [0.01, 0.02, 0.03])
    quiet = compare(a, runs([12.0, 12.1, 11.9], [0.02, 0.01, 0.03]))
    assert quiet.total.verdict == "more"
    assert quiet.foreign == (pytest.approx(0.02), pytest.approx(0.02))
    busy = compare(a, runs([12.0, 12.1, 11.9], [0.8, 0.81, 0.79]))
    assert busy.total.verdict == "unknown"
    assert {change.verdict for change in busy.changes} == {"unknown"}
    assert "other programs used 80% of the processor beside B, 2% beside A" in busy.verdict
    assert "B: other programs used 80% of the processor meanwhile" in busy.remarks
    # A load that comes and goes on both sides is part of how runs spread.
    mixed = compare(runs([10.0, 10.1, 9.9], [0.0, 0.5, 0.9]), runs([12.0, 12.1, 11.9], [0.9, 0.1, 0.8]))
    assert mixed.total.verdict == "more"


def loaded(energy_j: float, foreign: float) -> Footprint:
    made = footprint([{"name": "x", "device": "cpu:0", "energy_j": energy_j}])
    totals = {name: dataclasses.replace(total, foreign=foreign) for name, total in made.devices.items()}
    return dataclasses.replace(made, devices=totals)


def test_more_traced_steps_are_no_change() -> None:
    def side(steps: int) -> list[Footprint]:
        return [stepped(steps * each_j, steps) for each_j in (1.0, 1.01, 0.99)]

    found = compare(side(5), side(10))
    assert found.by_step
    assert found.total.verdict == "inside the noise"
    assert {change.verdict for change in found.changes} == {"inside the noise"}
    assert compare(side(5), side(10), by_step=False).total.verdict == "more"


def test_estimated_devices_are_named() -> None:
    def said(*devices: str) -> list[str]:
        rows = [{"name": "x", "device": device, "energy_j": 1.0} for device in devices]
        run = footprint(rows, provenance="estimated")
        return [remark for remark in compare([run], [run]).remarks if remark.startswith("B: ")]

    assert said("cpu:0") == ["B: cpu:0 is estimated, not measured"]
    assert said("cpu:0", "dram:0") == ["B: cpu:0, dram:0 are estimated, not measured"]


def test_single_runs_use_steps_or_uncertainty_whichever_is_wider() -> None:
    def run(energy_j: float, uncertainty_j: float | None, std_j: float | None) -> Footprint:
        # Of all four steps.
        figures = {"uncertainty_j": uncertainty_j, "step_mean_j": energy_j / 4, "step_std_j": std_j}
        return footprint([{"name": "x", "energy_j": energy_j, **figures}], steps=4)

    spread = StandardError(1.0 * 2, 3)
    by_steps = half_width(difference(spread, spread))
    assert changes([run(20.0, None, 1.0)], [run(21.0, None, 1.0)])["x"].half_width_j == pytest.approx(
        by_steps
    )
    assert changes([run(20.0, 0.3, 1.0)], [run(21.0, 0.4, 1.0)])["x"].half_width_j == pytest.approx(by_steps)
    wide = changes([run(20.0, 30.0, 1.0)], [run(21.0, 40.0, 1.0)])["x"]
    assert (wide.half_width_j, wide.verdict) == (pytest.approx(50.0), "inside the noise")
    small = changes([run(20.0, 0.3, 0.0)], [run(21.0, 0.4, 0.0)])["x"]
    assert (small.half_width_j, small.verdict) == (pytest.approx(0.5), "unknown")
    unknown = compare([run(20.0, None, None)], [run(21.0, None, None)])
    assert unknown.changes[0].verdict == "unknown"
    assert unknown.total.verdict == "unknown"
    assert "not known" in unknown.verdict
    assert any("--against" in remark for remark in unknown.remarks)


def test_names_on_one_side_and_order_of_changes() -> None:
    found = compare([made(1.0, 10.0, old=3.0, older=7.0)], [made(4.0, 11.0, new=2.0)])
    assert [change.name for change in found.changes] == ["net/x", "net/y"]
    assert found.only_a == ((("older", None), 7.0), (("old", None), 3.0))
    assert found.only_b == ((("new", None), 2.0),)
    assert found.mean_difference_j == 2.0


def test_a_name_absent_in_one_of_the_runs_took_nothing_there() -> None:
    found = changes([made(1.0, z=4.0), made(1.0)], [made(1.0, z=4.0), made(1.0, z=4.0)])
    assert (found["z"].a_j, found["z"].b_j) == (2.0, 4.0)
    assert found["z"].a_std_j == pytest.approx(statistics.stdev([4.0, 0.0]))


def test_per_step() -> None:
    def run(steps: int) -> Footprint:
        return footprint(
            [{"name": "x", "energy_j": 2.0 * steps}, {"name": "y", "energy_j": 1.0}], steps=steps
        )

    whole, each = (compare([run(10)], [run(20)], by_step=by_step) for by_step in (False, None))
    assert any("--per-step" in remark for remark in whole.remarks)
    assert not any("--per-step" in remark for remark in each.remarks)
    assert {change.name: change.difference_j for change in each.changes}["x"] == pytest.approx(0)


_side = st.lists(footprints(most=5), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(_side, _side)
def test_any_two_groups_can_be_compared(a: list[Footprint], b: list[Footprint]) -> None:
    everywhere = [set.intersection(*(set(run.devices) for run in side)) for side in ([*a, *b], a)]
    if not everywhere[1]:
        with pytest.raises(UserError, match="no device in common"):
            compare(a, a)
        return
    if everywhere[0]:
        json.dumps(to_json(compare(a, b)), allow_nan=False)
    same = compare(a, a)
    assert same.total.verdict in ("inside the noise", "unknown")
    assert all(change.verdict == "inside the noise" for change in same.changes)
    assert same.only_a == same.only_b == ()


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    runs = [made(10.0, 50.0), made(10.2, 53.0), made(15.0, 51.0, **{"net/[red]z": 1.0}), made(15.1, 54.0)]
    for i, run in enumerate(runs):
        save(run, tmp_path / f"{i}.json")
    return [str(tmp_path / f"{i}.json") for i in range(len(runs))]


def test_the_verb_on_two_groups(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files[:2], "--against", *files[2:]]) == 0
    said = capsys.readouterr().out
    for wanted in (
        "gpu:0",
        "by time alone",
        "net/x",
        "more",
        "inside the noise",
        "net/[red]z",
        "only in B: 1",
        "(idle)",
        "new",
    ):
        assert wanted in said
    assert main([*files[:2], "--against", *files[2:], "--json", "--top", "1"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["b"] == files[2:]
    assert [change["name"] for change in values["changes"]] == ["net/x"]
    assert values["devices"]["gpu:0"]["a_j"] == pytest.approx(61.6)
    assert values["energy"]["correlation"] == pytest.approx(1)
    assert values["power"]["time_alone"] is None


def test_the_verb_on_two_and_on_many(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([files[0], files[2], "--device", "gpu:0"]) == 0
    assert "only in B: 1" in capsys.readouterr().out
    assert main(files) == 0
    assert "time alone" in capsys.readouterr().out
    assert main([*files, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [len(line) for line in values["power"]] == [4] * 4


def test_the_verb_says_what_it_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = {"a": stepped(10.0, 10), "b": stepped(20.0, 20), "bare": made(1.0, 2.0)}
    for name, run in sides.items():
        save(run, tmp_path / f"{name}.json")
    words = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    said = {
        "energy of the operations of the traced steps (10 in A, 20 in B), not of the whole run": [
            *words,
            "--traced",
        ],
        "energy of the operations of one traced step": words,
        "energy of all operations that were traced": [str(tmp_path / "bare.json")] * 2,
    }
    for line, paths in said.items():
        assert main(paths) == 0
        assert capsys.readouterr().out.splitlines()[3] == line


def test_the_verb_merges_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = [{"name": f"l_{i}/x", "energy_j": float(i)} for i in range(3)]
    save(footprint(layers), tmp_path / "a.json")
    words = [str(tmp_path / "a.json")] * 2
    for more, name in ((["--summary"], "l_*/x"), (["--merge", r"l_\d=block"], "block/x"), ([], "l_0/x")):
        assert main([*words, "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert name in [change["name"] for change in found["changes"]]


def test_bad_words_are_one_line(files: list[str]) -> None:
    for words in (
        files[:1],
        [files[0], "nowhere.json"],
        [*files[:2], "--top", "-1"],
        [*files[:2], "--merge", "("],
        [*files[:2], "--device", "gpu:9"],
        [*files[:2], "--per-step"],
    ):
        with pytest.raises(UserError):
            main(words)


def test_experiments_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [made(20.0 + i % 3, 10.0 + i % 2, z=5.0 + i) for i in range(6)]
    paths = [str(tmp_path / f"{i}.parquet") for i in range(6)]
    for path, run in zip(paths, runs, strict=True):
        save(run, path)
    assert main([*paths, "--experiment", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    experiments = [runs[i : i + 2] for i in (0, 2, 4)]
    widening = assw(experiments)
    assert [score["experiments"] for score in found["pooled"]] == [2, 3]
    assert [score["experiments"] for score in found["disjoint"]] == [1, 2]
    assert found["disjoint"][1]["energy"] == widening.disjoint[1].scores.energy.value
    assert found["pooled"][0]["times_against_energy"] == widening.pooled[0].scores.floor.value
    assert found["stability"]["energy"][0][2] == stability(experiments).energy[0][2].value
    assert main([*paths, "--experiment", "3"]) == 0
    assert "experiments pooled" in capsys.readouterr().out
    with pytest.raises(UserError, match="no experiments of 4"):
        main([*paths, "--experiment", "4"])


def stepped(energy_j: float, steps: int, device: str = "gpu:0", idle_j: float = 0.0) -> Footprint:
    each_j = energy_j / steps
    rows = [{"name": "x", "device": device, "energy_j": energy_j, "busy_s": 1.0, "step_mean_j": each_j,
             "step_std_j": each_j / 10}]  # fmt: skip
    return footprint(rows, idle_j=idle_j, steps=steps)


def test_what_is_per_step_already_is_not_divided_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = per_step(stepped(10.0, 10)), per_step(stepped(20.0, 20))
    assert per_step(short) is short
    save(short, tmp_path / "a.json")
    save(long, tmp_path / "b.json")
    assert main([str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--per-step", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total"]["difference_j"] == pytest.approx(0)
    assert not any("--per-step" in remark for remark in found["remarks"])
    with pytest.raises(UserError, match="one step and of whole runs"):
        add([short, stepped(10.0, 10)])


def test_only_devices_of_every_run_are_compared() -> None:
    both = footprint(
        [
            {"name": "x", "energy_j": 5.0, "busy_s": 1.0},
            {"name": "x", "device": "cpu:0", "energy_j": 9.0, "busy_s": 1.0},
        ]
    )
    found = compare([both], [footprint([{"name": "x", "energy_j": 5.0, "busy_s": 1.0}])])
    assert found.total.difference_j == pytest.approx(0)
    assert any("cpu:0" in remark for remark in found.remarks)
    other = footprint([{"name": "x", "device": "gpu:7", "energy_j": 5.0, "busy_s": 1.0}])
    with pytest.raises(UserError, match="no device in common"):
        compare([both], [other])


def test_idle_time_of_single_runs_is_no_change_of_the_program() -> None:
    found = compare([stepped(10.0, 10)], [stepped(10.0, 10, idle_j=50.0)])
    assert (found.total.verdict, found.idle.verdict) == ("inside the noise", "unknown")
    assert [change.verdict for change in found.changes] == ["inside the noise"]
