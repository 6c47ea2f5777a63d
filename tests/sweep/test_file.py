"""Experiment files: a message per mistake; plans are what their seed says."""

from __future__ import annotations

import copy
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import yaml

from smaragdine.errors import UserError
from smaragdine.jobs.ray import slots_of
from smaragdine.sweep.experiment import checked, read_experiments
from smaragdine.sweep.plan import (
    command_environment,
    command_words,
    make_plan,
    read_plan,
    same_plan,
    save_plan,
)
from smaragdine.sweep.sweep import Sweep, expected_s, relative_interval
from smaragdine.sweep.table import Repetition, write_results

GOOD: dict[str, Any] = {
    "seed": 7,
    "experiments": [
        {
            "name": "bert",
            "repeat": 2,
            "power_limits": [150, 200.5],
            "parameters": {"batch": [16, 32]},
            "cool_down": {"temperature_c": 45},
            "until": "2%",
            "benchmarks": [
                {"name": "small", "command": "train.py --epochs {epochs} {batch}", "epochs": 10},
                {"command": ["-m", "big.train", "{batch}", "{own}"], "environment": {"B": "b{batch}"}},
            ],
        }
    ],
}


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_files_of_each_kind_say_the_same(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"e.{kind}"
    path.write_text(json.dumps(GOOD) if kind == "json" else yaml.safe_dump(GOOD))
    found = read_experiments(path)
    assert found.seed == 7
    (bert,) = found.experiments
    assert [b.name for b in bert.benchmarks] == ["small", "train"]
    assert bert.benchmarks[0].folder == str(tmp_path)
    assert found == checked(GOOD, str(path), tmp_path)


MISTAKES: list[tuple[str, object, str]] = [
    ("repaet", 3, "experiments[0].repaet: there is no such key, but repeat. Allowed: name, benchmarks"),
    ("repeat", "x", "experiments[0].repeat: expected a whole number, got a text"),
    ("repeat", 0, "experiments[0].repeat: expected a whole number >= 1"),
    (
        "power_limits",
        [150, "a"],
        "power_limits[1]: expected a number, got a text. Example: power_limits: [150",
    ),
    ("power_limits", [150, 150], "experiments[0].power_limits: 150 is there twice. Use repeat"),
    ("clock_limits", [[877, 1005]], "experiments[0]: it has both power_limits and clock_limits"),
    ("clock_limits", [[877]], "experiments[0].clock_limits[0]: expected a list of length 2, got 1"),
    ("name", "a/b", "experiments[0].name: allowed are letters, digits and _.+-"),
    ("devices", ["0"], "experiments[0].devices[0]: allowed are gpu:0, gpu:1"),
    ("order", "random", "experiments[0].order: allowed are shuffled and listed"),
    ("until", 2, "experiments[0].until: expected a text, got a whole number. Example: until: 2%"),
    ("until", "2", "experiments[0].until: '2' is no percentage"),
    ("parameters", {"lr": [1]}, "experiments[0].benchmarks[0].command: nothing in it says {lr}"),
    ("parameters", {"batch": 16}, "experiments[0].parameters.batch: expected a list, got a whole number"),
    ("parameters", {"batch": []}, "experiments[0].parameters.batch: it has no values"),
    ("parameters", {"epochs": [1]}, "experiments[0].parameters.epochs: no name for a parameter"),
    ("cool_down", {"celsius": 4}, "experiments[0].cool_down.celsius: there is no such key. Allowed: temper"),
    ("benchmarks", [], "experiments[0].benchmarks: expected a list of length >= 1"),
    ("benchmarks", [{"command": ""}], "experiments[0].benchmarks[0].command: it is empty"),
    ("benchmarks", [{"command": "a 'b"}], "experiments[0].benchmarks[0].command: No closing quotation"),
    ("benchmarks", [{"command": "a {batch}"}] * 2, "experiments[0].benchmarks[1].name: a is there twice"),
    ("benchmarks", [{"command": "a {batch}", "epochs": 3}], "command: nothing in it says {epochs}"),
    ("benchmarks", [{"command": "a {batch} {epochs}"}], "it says {epochs}, which is not given"),
]


@pytest.mark.parametrize(("key", "value", "said"), MISTAKES)
def test_a_mistake_is_one_line_with_file_key_and_what_is_allowed(key: str, value: object, said: str) -> None:
    values = copy.deepcopy(GOOD)
    values["experiments"][0][key] = value
    with pytest.raises(UserError) as caught:
        checked(values, "my.yaml", Path())
    assert str(caught.value).startswith("my.yaml: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("e.yaml", "", "the file: expected a mapping, got nothing. Allowed: experiments, seed"),
        ("e.yaml", "seed: 1", "the file: experiments is missing"),
        ("e.yaml", "experiments:\n - {name: a", "e.yaml, line 2 is no valid YAML"),
        ("e.yaml", "[" * 20_000, "e.yaml is no valid YAML: it is nested too deeply"),
        ("e.yaml", "experiments:\n\t- a", "Indent with blanks, not tabs"),
        ("e.yaml", "experiments:\n - name: a\n   name: b", "e.yaml, line 3: name: the key is there twice"),
        ("e.yaml", "experiments: [{name: a, benchmarks: [{command: b}]}]", "experiments[0]: nothing varies"),
        ("e.json", '{"seed": 1, "seed": 2}', "e.json: seed: the key is there twice. Leave one out"),
        (
            "e.json",
            '{"experiments": [{"name": "a", "repeat": 1, "repeat": 1}]}',
            "e.json: repeat: the key is there twice",
        ),
        ("e.json", '{"seed": NaN}', "e.json is no valid JSON: NaN is no number in JSON"),
        ("e.json", '{"seed":\n 1,}', "e.json is no valid JSON: "),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        read_experiments(tmp_path / name)
    assert said in str(caught.value)


def test_a_plan_is_every_setting_in_every_repetition_by_its_seed(tmp_path: Path) -> None:
    found = checked(GOOD, "e", tmp_path)
    plan = make_plan(found.experiments, 7)
    assert make_plan(found.experiments, 7).tasks == plan.tasks
    assert make_plan(found.experiments, 8).tasks != plan.tasks
    assert len({task.name for task in plan.tasks}) == len(plan.tasks) == 2 * 2 * 2 * 2
    for repetition in (0, 1):
        own = plan.tasks[8 * repetition : 8 * repetition + 8]
        assert {task.repetition for task in own} == {repetition}
        assert len({task.group for task in own}) == 8
    assert [t.group for t in plan.tasks[:8]] != [t.group for t in plan.tasks[8:]]
    save_plan(tmp_path, plan)
    again = read_plan(tmp_path)
    assert (again.tasks, again.experiments, again.seed) == (plan.tasks, plan.experiments, 7)
    assert same_plan(again, found.experiments, None)
    assert not same_plan(again, found.experiments, 8)
    task = next(t for t in plan.tasks if t.benchmark == "train" and t.setting.parameters["batch"] == 32)
    benchmark = plan.benchmark(task)
    assert command_words(benchmark, task.setting) == ["-m", "big.train", "32", "{own}"]
    assert command_environment(benchmark, task.setting) == {"B": "b32"}


@pytest.mark.parametrize(
    "tasks", [[5], "ab", [{"name": 5}], [{"experiment": "zz"}], [{"benchmark": "zz"}], [{"setting": None}]]
)
def test_a_plan_of_another_shape_is_one_line(tmp_path: Path, tasks: Any) -> None:
    save_plan(tmp_path, make_plan(checked(GOOD, "e", tmp_path).experiments, 7))
    values = json.loads((tmp_path / "plan.json").read_text())
    changed = [{**values["tasks"][0], **each} if isinstance(each, dict) else each for each in tasks]
    values["tasks"] = changed if isinstance(tasks, list) else tasks
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"plan.json cannot be read.*Was it edited\?"):
        read_plan(tmp_path)


def test_a_plan_with_a_secret_is_its_owners_alone(tmp_path: Path) -> None:
    for word, mode in (("--fast", 0o644), ("--token=abc", 0o600)):
        values = {"name": "a", "parameters": {"x": [1]}, "benchmarks": [{"command": ["a", "{x}", word]}]}
        save_plan(tmp_path, make_plan(checked({"experiments": [values]}, "e", tmp_path).experiments, 1))
        assert (tmp_path / "plan.json").stat().st_mode & 0o777 == mode


def test_the_interval_that_ends_repeating_is_students() -> None:
    energies = [101.0, 99.0, 103.0, 98.5]
    low, high = scipy.stats.t.interval(
        0.95, 3, loc=statistics.fmean(energies), scale=scipy.stats.sem(energies)
    )
    assert relative_interval(energies) == pytest.approx((high - low) / 2 / statistics.fmean(energies))
    assert relative_interval(energies[:2]) is None
    assert relative_interval([5.0, 5.0, 5.0]) == 0


def test_repeating_ends_by_the_energy_of_steps_where_all_repetitions_have_it(tmp_path: Path) -> None:
    """Whole programs differ by 1 %, their steps by half."""
    values = {
        "name": "e",
        "repeat": 4,
        "until": "5%",
        "parameters": {"x": [1]},
        "benchmarks": [{"command": ["a.py", "{x}"]}],
    }
    plan = make_plan(checked({"experiments": [values]}, "e", tmp_path).experiments, 1)
    save_plan(tmp_path, plan)

    def left(steps_j: list[float | None]) -> list[int]:
        rows: list[Repetition] = []
        for task, whole_j, of_steps_j in zip(plan.tasks, (100.0, 100.5, 101.0), steps_j, strict=False):
            (tmp_path / "runs" / task.name).mkdir(parents=True, exist_ok=True)
            where = f"runs/{task.name}"
            measured: dict[str, Any] = {"time_s": 1.0, "energy_j": whole_j, "steps_energy_j": of_steps_j}
            rows.append(Repetition("e", "a", "parameter", task.repetition, where, "complete", **measured))
        write_results(tmp_path, rows)
        sweep = Sweep(tmp_path)
        sweep.close()
        return [task.repetition for task in sweep.left()]

    assert left([None, None, None]) == []
    assert left([1.0, 1.5, 2.0]) == [3]
    assert left([1.0, 1.01, 1.02]) == []
    assert left([1.0, 1.5, None]) == []


def test_expected_time_is_that_of_the_setting_then_of_the_benchmark_then_as_said() -> None:
    values = copy.deepcopy(GOOD)
    values["experiments"][0]["benchmarks"][1]["expected_s"] = 100
    plan = make_plan(checked(values, "e", Path()).experiments, 7)
    small = [task for task in plan.tasks if task.benchmark == "small" and task.repetition == 0]
    train = [task for task in plan.tasks if task.benchmark == "train" and task.repetition == 0]
    assert expected_s(plan, small, {}) is None
    assert expected_s(plan, train, {}) == 400
    took_s = {small[0].group: [2.0, 4.0], small[1].group: [9.0]}
    assert expected_s(plan, small, took_s) == 3 + 9 + 6 + 6


def test_devices_of_a_cluster() -> None:
    def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"NodeID": name * 3, "NodeName": name, "Alive": alive, "Resources": resources, "Labels": {}}

    dgx = node("dgx", CPU=80, GPU=2, **{"accelerator_type:V100": 1})
    labelled = {**node("x", CPU=4, GPU=1), "Labels": {"ray.io/accelerator-type": "H200"}}
    slots = slots_of([dgx, node("gone", alive=False, CPU=8), node("head"), node("cpu", CPU=8), labelled])
    assert [(s.node, s.number, s.gpu, s.gpu_type, s.cpus) for s in slots] == [
        ("cpu", 0, False, None, 8),
        ("dgx", 0, True, "V100", 40),
        ("dgx", 1, True, "V100", 40),
        ("x", 0, True, "H200", 4),
    ]
