"""Precision and growth over a study's runs, on results whose scores can be worked out on paper."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from footprints import footprint
from smaragdine.accounting.run import Run
from smaragdine.errors import UserError
from smaragdine.study.overhead import OVERHEAD, ExtraCost, Overhead, load_overhead
from smaragdine.study.plan import StudyRun, StudySetting
from smaragdine.study.precision import (
    PRECISION_CLAIMS,
    Spread,
    experiments_of,
    pairs_of,
    precision_findings,
    precision_of,
    usual_size,
)
from smaragdine.study.results import Result, load_results, result_of, save_result
from smaragdine.study.scaling import growths_of, scaling_of, scaling_settings
from traced_recording import ten_and_three

FACTS = {"model": "bert", "stage": "pretrain", "framework": "torch", "precision": "fp32", "layers": 12}


def result(number: int, energies: Sequence[float] = (1, 2, 3), setting: str = "bert", **more: Any) -> Result:
    """A run of operations a, b, c …, each busy for a second, on a measured GPU."""
    rows = [{"name": name, "energy_j": float(e)} for name, e in zip("abcdef", energies, strict=False)]
    made: dict[str, Any] = {
        "name": f"{setting}-{number}",
        "setting": setting,
        "number": number,
        "facts": FACTS,
        "step": footprint(rows),
        "steps": 100,
        "step_s": 0.1,
        "traced_steps": 20,
        "slower": 0.5,
        "duration_s": 10.0,
        "energy_j": {"gpu:0": 100.0},
        "provenance": {"gpu:0": "measured"},
        "data": "",
        "hardware": "Test GPU",
        "asss": {"gpu:0": [score(1, 1.0), score(2, 0.95)]},
        "period_ms": {"gpu:0": 20.0},
    }
    return Result(**{**made, **more})


def score(every: int, energy: float, power: float | None = 0.8) -> dict[str, float | int | None]:
    return {
        "every": every,
        "energy": energy,
        "power": power,
        "times_against_energy": 0.7,
        "constant_power": 1.0,
    }


def test_experiments_are_consecutive_runs() -> None:
    runs = [result(number) for number in (3, 1, 2, 5, 4, 7, 8)]
    other = [result(9, facts={**FACTS, "scale": "layers"}), result(1, setting="albert")]
    found = experiments_of([*other, *runs], 3)
    assert [[run.number for run in each] for each in found] == [[1, 2, 3], [4, 5, 7]]
    assert {run.setting for each in found for run in each} == {"bert"}
    assert experiments_of([], 3) == []


@pytest.mark.parametrize(
    ("runs", "size"), [(45, 5), (27, 3), (20, 5), (10, 5), (9, 1), (5, 1), (2, 1), (100, 5)]
)
def test_the_papers_size_where_it_leaves_several(runs: int, size: int) -> None:
    assert usual_size(runs) == size


def test_the_most_repeated_is_pretraining_where_several_are() -> None:
    finetune = [result(n, setting="a", facts={**FACTS, "stage": "finetune"}) for n in (1, 2)]
    pretrain = [result(n, setting="b") for n in (1, 2)]
    assert precision_of([*finetune, *pretrain]).setting == "b"
    assert precision_of([*finetune, *pretrain[:1]]).setting == "a"


def test_thinning_is_the_mean_over_runs() -> None:
    one = result(1, asss={"gpu:0": [score(2, 0.90, 0.5), score(4, 0.8, None)]})
    two = result(2, asss={"gpu:0": [score(2, 0.96, 0.7), score(4, 0.8, None)]})
    second, fourth = precision_of([one, two]).asss
    assert second.every == 2
    assert second.energy is not None
    assert second.energy.mean == pytest.approx(0.93, abs=1e-15)
    assert second.energy.std == pytest.approx(0.03 * math.sqrt(2), rel=1e-12)
    assert (second.energy.lowest, second.energy.runs) == (0.90, 2)
    assert fourth.energy == Spread(0.8, 0.0, 0.8, 2)
    assert fourth.power is None


def test_a_thinning_that_a_run_lacks_is_no_mean_of_the_others() -> None:
    long = {"gpu:0": [score(2, 0.95), score(4, 0.9), score(8, 0.99)]}
    short = {"gpu:0": [score(2, 0.95), score(4, 0.8), {**score(8, 0.0), "energy": None}]}
    runs = [result(1, asss=long), result(2, asss=short), result(3, asss={})]
    assert [(each.every, each.energy and each.energy.runs) for each in precision_of(runs).asss] == [
        (2, 2),
        (4, 2),
    ]
    found = by_key(runs)["asss-torch-fp32"]
    assert found.here.startswith(
        "0.850–0.950; one reading in 2 to one in 4 kept: 40 to 80 ms between them, 10 to 20 times the paper's"
    )


def test_widening_and_stability_of_experiments() -> None:
    found = precision_of([result(1, (1, 2, 3)), result(2, (1, 3, 2))], 1)
    assert (found.size, found.experiments, found.device, found.period_ms) == (1, 2, "gpu:0", 20.0)
    assert found.stability is not None
    # (1, 2, 3), and (1, 3, 2) in its turn, against the mean (1, 2.5, 2.5)
    (pooled,) = found.assw
    assert pooled.experiments == 2
    assert pooled.energy is not None
    assert pooled.energy.mean == pytest.approx(math.sqrt(0.75), rel=1e-12)
    assert pooled.energy.runs == 2
    assert pooled.constant_power is None
    assert pairs_of(found.stability.energy) == [pytest.approx(0.5, rel=1e-12)]
    assert pairs_of(found.stability.time_alone) == []  # all take a second: constant power knows no difference


def test_widening_ends_at_five_experiments() -> None:
    found = precision_of([result(n) for n in range(1, 10)], 1)
    assert [each.experiments for each in found.assw] == [2, 3, 4, 5]
    assert all(each.energy is not None and each.energy.runs == 9 for each in found.assw)
    assert found.stability is not None
    assert len(found.stability.energy) == 9


def test_layers_are_one_though_a_run_lacks_an_operation() -> None:
    names = ["net/layer/0/x", "net/layer/0/y", "net/layer/1/x", "net/layer/1/y", "net/head/z"]
    whole = [{"name": name, "energy_j": float(e)} for name, e in zip(names, (1, 2, 1, 2, 9), strict=True)]
    runs = [result(1, step=footprint(whole)), result(2, step=footprint([*whole[:3], whole[4]]))]
    found = precision_of(runs, 1)
    assert found.stability is not None
    cell = found.stability.energy[0][1]
    # layer/* x and y, and the head: (2, 4, 9) against (2, 2, 9)
    assert (cell.common, cell.only_a, cell.only_b) == (3, (), ())
    assert cell.value == pytest.approx(28 / math.sqrt(26 * 294 / 9), rel=1e-12)


def test_one_run_is_too_few_only_for_comparisons() -> None:
    found = precision_of([result(1)])
    assert found.assw == []
    assert found.stability is None
    with pytest.raises(UserError, match="no runs"):
        precision_of([])
    assert precision_of([result(1)], 5).size == 1  # what was asked for is not there yet


def test_a_run_whose_gpu_was_lost_is_left_out() -> None:
    lost = footprint([{"name": "a", "energy_j": 1.0, "device": "cpu:0"}])
    found = precision_of([result(1), result(2, step=lost), result(3)])
    assert (found.device, found.experiments) == ("gpu:0", 2)


def by_key(results: Sequence[Result], out: Path | None = None) -> dict[str, Any]:
    return {finding.key: finding for finding in precision_findings(results, out)}


def test_findings_agree_and_differ_by_their_rules() -> None:
    good = by_key([result(n) for n in (1, 2, 3)])
    assert {key: f.verdict for key, f in good.items() if "power" not in key} == {
        "asss-torch-fp32": "agrees",
        "assw-torch-fp32": "agrees",
        "stability-torch-fp32": "agrees",
    }
    assert good["asss-torch-fp32"].here_value == pytest.approx(0.95)
    assert "one reading in 2" in good["asss-torch-fp32"].here
    assert "in 2 kept: 40 ms between them, 10 times the paper's 4 ms" in good["asss-torch-fp32"].here
    poor = [
        result(1, (1, 2, 3), asss={"gpu:0": [score(2, 0.89)]}),
        result(2, (3, 2, 1), asss={"gpu:0": [score(2, 0.89)]}),
    ]
    bad = by_key(poor)
    assert bad["asss-torch-fp32"].verdict == "differs"
    assert bad["stability-torch-fp32"].verdict == "differs"
    assert bad["stability-torch-fp32"].here_value == -1
    assert good["stability-power-torch-fp32"].verdict == "not comparable"


def test_of_each_framework_the_most_repeated_setting() -> None:
    runs = [result(n, setting="long") for n in range(1, 4)]
    runs += [result(n, setting="short") for n in (1, 2)]
    runs += [result(n, setting="half", facts={**FACTS, "precision": "bf16"}) for n in (1, 2)]
    found = precision_findings(runs)
    assert {(each.key.rpartition("-")[2], each.settings) for each in found} == {
        ("fp32", ("long",)),
        ("bf16", ("half",)),
    }


def test_estimated_power_is_said() -> None:
    runs = [result(n, provenance={"gpu:0": "estimated"}) for n in (1, 2)]
    found = by_key(runs)
    assert "estimated" in found["asss-torch-fp32"].why
    assert all(each.here.endswith("; estimated") for each in found.values())
    assert found["asss-power-torch-fp32"].verdict == "not comparable"
    assert "estimated" in found["asss-power-torch-fp32"].why


def overhead(low: float, high: float, **more: Any) -> Overhead:
    cost = ExtraCost(low, (low + high) / 2, high)
    made = {"time": cost, "time_median": cost, "energy": {"gpu:0": cost}, **more}
    return Overhead(setting="bert", pairs=20, block_s=2.0, step_s=0.1, core_share=0.01, hardware="", **made)


def write_overhead(out: Path, found: Overhead) -> None:
    values = {"format_version": 1, "settings": {"bert": dataclasses.asdict(found)}}
    (out / OVERHEAD).write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("low", "high", "of_time", "of_energy"),
    [
        (-0.001, 0.001, "agrees", "agrees"),  # ± 0.1 %
        (0.0007, 0.002, "differs", "agrees"),  # above 0.068 %
        (0.016, 0.02, "differs", "differs"),  # above 1.57 % too
        (-0.01, -0.00173, "differs", "agrees"),
    ],
)
def test_overhead_agrees_where_intervals_overlap(
    tmp_path: Path, low: float, high: float, of_time: str, of_energy: str
) -> None:
    write_overhead(tmp_path, overhead(low, high))
    found = by_key([result(1)], tmp_path)
    assert found["time-overhead-torch-fp32"].verdict == of_time
    assert found["energy-overhead-gpu0-torch-fp32"].verdict == of_energy
    assert found["time-overhead-torch-fp32"].here_value == pytest.approx(50 * (low + high))


def test_estimated_overhead_is_not_compared(tmp_path: Path) -> None:
    write_overhead(
        tmp_path, overhead(-0.001, 0.001, energy={"cpu:0 + dram:0": ExtraCost(0.01, 0.02, 0.03, "estimated")})
    )
    found = by_key([], tmp_path)["energy-overhead-cpu0-dram0-bert"]
    assert found.verdict == "not comparable"
    assert "estimated" in found.here


def test_a_noisy_machine_proves_nothing(tmp_path: Path) -> None:
    write_overhead(tmp_path, overhead(-0.03, 0.03))
    found = by_key([result(1)], tmp_path)["time-overhead-torch-fp32"]
    assert found.verdict == "not comparable"
    assert "not quiet" in found.why


def test_an_overhead_that_is_none(tmp_path: Path) -> None:
    assert load_overhead(tmp_path) == []
    (tmp_path / OVERHEAD).write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        load_overhead(tmp_path)


def test_every_claim_has_a_rule() -> None:
    assert len({claim.name for claim in PRECISION_CLAIMS}) == 5
    assert all(claim.rule.text and claim.section.startswith("5.4") for claim in PRECISION_CLAIMS)


def test_a_result_says_what_measuring_took(tmp_path: Path) -> None:
    monitor = [{"cpu_s": 0.02, "wall_s": 2.0, "readings": 77}]
    recording = ten_and_three(tmp_path / "run", monitor=monitor)
    run = StudyRun(StudySetting("bert", ("train.py",), FACTS), 1)
    found = result_of(run, Run(recording), account_s=0.5)
    cost = dict(found.cost)
    assert cost.pop("bytes") == sum(p.stat().st_size for p in recording.path.rglob("*") if p.is_file())
    assert cost["account_s"] == 0.5
    assert cost["traced_step_s"] == pytest.approx(0.015)
    assert cost["events"] == recording.events.num_rows > 0
    assert (cost["devices"], cost["channels"], cost["readings"]) == (1, 1, 77)
    assert (cost["monitor_cpu_s"], cost["monitor_s"]) == (0.02, 2.0)
    assert cost["paused_s"] == pytest.approx(0.010)  # 100 … 103 and 163 … 170 ms
    assert cost["assemble_s"] is None  # this one was made by hand: its end is not known
    assert found.period_ms == {"gpu:0": 1.0}
    save_result(tmp_path, found)
    (again,) = load_results(tmp_path)
    assert again.cost == found.cost
    assert again.asss == {device: list(scores) for device, scores in found.asss.items()}
    path = tmp_path / "results" / "bert-1.json"
    values = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("cost", "period_ms")}
    path.write_text(json.dumps(values))
    assert load_results(tmp_path)[0].cost == {}  # an older one


def test_a_result_knows_its_cards_and_how_few_steps_were_traced(tmp_path: Path) -> None:
    gpus = [{"device": "gpu:0", "name": "a GPU", "uuid": "GPU-7"}]
    recording = ten_and_three(tmp_path / "run", host={"gpus": gpus})

    def asked(trace_steps: int) -> Result:
        setting = StudySetting("bert", ("train.py",), FACTS, trace_steps=trace_steps)
        return result_of(StudyRun(setting, 1), Run(recording))

    assert not any("were traced" in remark for remark in asked(4).remarks)
    few = asked(20)
    assert any(remark.startswith("3 of 20 steps were traced") for remark in few.remarks)
    save_result(tmp_path, few)
    assert [each.cards for each in load_results(tmp_path)] == [("GPU-7",)]


def test_growth_changes_one_word_at_a_time() -> None:
    words = ("bert.py", "--layers", "4", "--batch", "8", "--seconds", "3", "--steps", "37")
    base = StudySetting("bert", words, {**FACTS, "layers": 4, "batch": 8}, {"A": "b"}, 7, 5)
    found = scaling_settings(base)
    changed = {
        each.name: [(a, b) for a, b in zip(words, each.words, strict=True) if a != b] for each in found
    }
    assert changed == {
        "bert-layers2": [("4", "2")],
        "bert-layers8": [("4", "8")],
        "bert-batch16": [("8", "16")],
        "bert-seconds9": [("3", "9")],
    }
    assert [(e.facts["scale"], e.facts["layers"], e.facts["batch"]) for e in found[1:3]] == [
        ("layers", 8, 8),
        ("batch", 4, 16),
    ]
    assert {(e.facts["base"], e.trace_steps, e.trace_skip, e.environment["A"]) for e in found} == {
        ("bert", 7, 5, "b")
    }


def test_growth_of_what_is_proportional() -> None:
    def run(layers: int, number: int, **more: Any) -> Result:
        facts = {**FACTS, "layers": layers, **more}
        traced = 40 if layers < 8 else 20  # a window that was full ends early
        events = 1000 * layers * traced
        cost = {"events": events, "account_s": events * 2e-6, "bytes": 5_000_000, "monitor_cpu_s": 0.1}
        found = result(number, setting=f"L{layers}", facts=facts, cost={**cost, "monitor_s": 10.0})
        return dataclasses.replace(found, traced_steps=traced)

    base, second = run(4, 2), run(4, 3)
    grown = [run(2, 1, scale="layers", base="L4"), run(8, 1, scale="layers", base="L4")]
    rows = scaling_of([*grown, second, base, result(1)])
    other = [{**row, "base": "another", "account_s": 7.0 * float(row["account_s"] or 0)} for row in rows]
    both = [each for each in growths_of([*rows, *other]) if each.y == "account_s"]
    assert [(each.base, each.exponent, each.runs) for each in both] == [
        ("L4", pytest.approx(1.0), 3),
        ("another", pytest.approx(1.0), 3),
    ]
    assert both[1].highest_ratio == pytest.approx(7 * both[0].highest_ratio)
    assert [row["run"] for row in rows] == ["L4-2", "L2-1", "L8-1"]
    assert {row["base"] for row in rows} == {"L4"}
    assert [row["account_us_per_event"] for row in rows] == [pytest.approx(2.0)] * 3
    assert [row["monitor_cores"] for row in rows] == [0.01] * 3
    found = {(each.x, each.y): each for each in growths_of(rows)}
    assert found["layers", "step_events"].exponent == pytest.approx(1.0)
    assert found["events", "account_s"].exponent == pytest.approx(1.0)
    assert found["events", "bytes"].exponent == pytest.approx(0.0)
    assert found["events", "account_s"].lowest_ratio == pytest.approx(2e-6)
    assert ("batch", "step_events") not in found
    assert scaling_of([base]) == []
