"""Findings against exact sums over what the operations were made to be, and every verdict both ways."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction as F

import numpy as np
import pytest

from made_study import Model, Op, Study, one, operations, result, results
from smaragdine.study.claims import above, at_least, below, near, shown, signed, within_factor
from smaragdine.study.findings import (
    JudgedClaim,
    _level_later,
    albert_findings,
    all_claims,
    bert_findings,
    findings,
    variant_findings,
)
from smaragdine.study.results import Result
from smaragdine.study.roles import groups, rounds

SUFFIX = "-tf1-fp32"
STUDY_OF = {claim.name: claim.study for claim in all_claims() if claim.study != "precision"}
NAMES = set(STUDY_OF)


def found(made: Sequence[Result], study: str = "") -> dict[str, JudgedClaim]:
    (group,) = groups(made)
    of = {"bert": bert_findings, "variants": variant_findings, "albert": albert_findings}
    parts = [of[study](group)] if study else [each(group) for each in of.values()]
    by_name = {each.key.removesuffix(SUFFIX): each for part in parts for each in part}
    assert set(by_name) <= NAMES
    return by_name


@pytest.fixture(scope="module")
def agreeing() -> dict[str, JudgedClaim]:
    return found(results(Study()))


def test_all_claims_can_agree(agreeing: dict[str, JudgedClaim]) -> None:
    assert set(agreeing) == NAMES
    assert {name: each.verdict for name, each in agreeing.items()} == dict.fromkeys(NAMES, "agrees")


# What makes each claim differ, and nothing but that is changed.
EVEN = (F(1),) * 12
KNOBS: dict[str, Study] = {
    "encoder-share": Study(bert=Model(embeddings=F(1, 2))),
    "transformer-share": Study(bert=Model(encoder_rest=F(6))),
    "transformer-spread": Study(bert=Model(weights=EVEN)),
    "first-transformer-lower": Study(bert=Model(weights=tuple(reversed(Model().weights)))),
    "transformers-level-later": Study(bert=Model(weights=tuple(F(n + 20, 26) for n in range(12)))),
    "attention-forward": Study(bert=Model(attention=(F(3, 10), F(4819, 10000)))),
    "attention-backward": Study(bert=Model(attention=(F(4068, 10000), F(6, 10)))),
    "self-attention-forward": Study(bert=Model(itself=(F(6, 10), F(7952, 10000)))),
    "self-attention-backward": Study(bert=Model(itself=(F(7251, 10000), F(9, 10)))),
    "attention-larger-backward": Study(bert=Model(attention=(F(45, 100), F(44, 100)))),
    "self-attention-larger-backward": Study(bert=Model(itself=(F(77, 100), F(76, 100)))),
    "dense-dominates": Study(bert=Model(gelu=F(1))),
    "top-ten-products": Study(bert=Model(gelu=F(1))),
    "top-ten-backward": Study(bert=Model(backward=F(1, 4))),
    "backward-larger": Study(bert=Model(backward=F(1, 4))),
    "products-power": Study(bert=Model(wide_w=F(-60))),
    "total-pretrain": Study(bert=Model(total_j=F(200))),
    "total-finetune": Study(finetune_j=F(20)),
    "total-predict": Study(predict_j=F(30)),
    "finetune-ratio": Study(finetune_j=F(30)),
    "predict-ratio": Study(predict_j=F(320)),
    "finetune-less": Study(finetune_j=F(121)),
    "predict-less": Study(predict_j=F(1600)),
    "variants-energy-similar": Study(
        variant_attention=lambda layers, hidden: F(9, 10) if hidden > 512 else F(1, 10)
    ),
    "variants-power-similar": Study(variant_wide_w=lambda layers, hidden: F(-60) if hidden > 512 else F(60)),
    "hidden-raises-power": Study(variant_w=lambda layers, hidden: F(200) - F(hidden, 8)),
    "layers-raise-power": Study(variant_w=lambda layers, hidden: F(hidden, 8) + 40 - layers),
    "layers-raise-energy": Study(variant_j=lambda layers, hidden: F(hidden + 256, layers)),
    "hidden-alone-not-energy": Study(variant_j=lambda layers, hidden: F(layers) * hidden**2),
    "albert-einsum": Study(albert=Model(total_j=F(60), product_w=F(140), product="Einsum", gelu=F(1))),
    "albert-alike": Study(albert=Model(product="Einsum", attention=(F(9, 10), F(9, 10)), backward=F(1, 4))),
    "albert-half": Study(albert=Model(total_j=F(100), product_w=F(140), product="Einsum")),
    "albert-power": Study(albert=Model(total_j=F(60), product_w=F(110), product="Einsum")),
    "albert-power-spread": Study(albert_noise=F(1, 200)),
}


def test_every_claim_has_a_knob() -> None:
    assert set(KNOBS) == NAMES


@pytest.mark.parametrize("name", sorted(KNOBS))
def test_every_claim_can_differ(name: str) -> None:
    study = STUDY_OF[name]
    finding = found(results(KNOBS[name], study), study)[name]
    assert finding.verdict == "differs"
    assert finding.why.startswith("agrees if ")  # the rule


POWER = {
    *("products-power", "variants-power-similar", "hidden-raises-power", "layers-raise-power"),
    *("albert-power", "albert-power-spread"),
    *("transformer-spread", "first-transformer-lower", "transformers-level-later"),
}


def test_an_estimate_says_nothing_about_power() -> None:
    got = found(results(Study(facts=(("provenance", "estimated"),))))
    assert {name for name, each in got.items() if each.verdict == "not comparable"} == POWER
    for name, each in got.items():
        assert "estimated" in each.here
        assert "is estimated" in each.why
        assert each.here_value is not None, name


def test_another_machine_has_other_totals(agreeing: dict[str, JudgedClaim]) -> None:
    got = found(results(Study(facts=(("hardware", "H200"),))))
    changed = {name for name in NAMES if got[name].verdict != agreeing[name].verdict}
    assert changed == {"total-pretrain", "total-finetune", "total-predict"}
    assert {got[name].verdict for name in changed} == {"not comparable"}
    assert got["total-pretrain"].here_value == pytest.approx(60e3)
    assert got["total-predict"].here_value == pytest.approx(2e3)
    assert "H200" in got["total-predict"].why
    assert "34 steps" in got["total-predict"].here


def test_without_names_of_layers_there_is_no_comparison() -> None:
    whole = [
        Op("other", None, None, True, phase, f"compiled_{n}/mm", F(1), F(100))
        for phase in ("forward", "backward")
        for n in range(3)
    ]
    got = found([result(whole, F(0))])
    absent = {name for name, each in got.items() if each.verdict == "not comparable"}
    assert {
        "encoder-share",
        "transformer-share",
        "attention-forward",
        "self-attention-backward",
    } <= absent
    assert {"attention-larger-backward", "top-ten-products", "first-transformer-lower"} <= absent
    assert got["encoder-share"].here_value is None
    assert got["encoder-share"].here == "–"


def test_transformers_without_energy_are_not_compared() -> None:
    made = [replace(op, energy_j=F(op.part == "embeddings")) for op in operations(Model())]
    got = found([result(made, F(0)), result(made, F(0), model="albert")])
    absent = {name for name, each in got.items() if each.verdict == "not comparable"}
    assert {"encoder-share", "transformer-share", "first-transformer-lower", "attention-forward"} <= absent


def test_prediction_alone_has_its_total_only() -> None:
    assert set(found([one(Model(), stage="predict")])) == {"total-predict"}


def test_no_einsum_is_no_difference() -> None:
    study = Study(albert=Model(total_j=F(60), product_w=F(140)))
    finding = found(results(study, "albert"), "albert")["albert-einsum"]
    assert (finding.verdict, finding.here_value) == ("not comparable", 0.0)
    assert "10 ± 0 of 10" in finding.here  # products of any kind


def test_one_run_has_no_spread_over_runs() -> None:
    got = found(results(Study(runs=1)))
    assert got["albert-power-spread"].verdict == "not comparable"
    assert "±" not in got["encoder-share"].here
    assert got["encoder-share"].verdict == "agrees"
    # A rule that asks for the deviation over runs says that there is none.
    assert "; of one run there is no deviation" in got["attention-forward"].why
    assert "one run" not in got["encoder-share"].why
    assert "one run" not in found(results(Study(runs=2)))["attention-forward"].why


def test_all_runs_count_where_settings_have_different_numbers_of_them() -> None:
    """The deviation of the made runs is symmetric: their mean is the run in the middle."""
    middle = found(results(Study(runs=1)))
    uneven = [each for each in results(Study()) if each.facts["model"] == "bert" or each.number == 3]
    got = found(uneven)
    for name in ("albert-power", "albert-half"):
        assert got[name].here_value == pytest.approx(middle[name].here_value)
    assert got["albert-power-spread"].verdict == "not comparable"
    assert "it takes 5 runs of each" in got["albert-power-spread"].why
    one_pretraining = [each for each in results(Study(), "bert") if each.facts["stage"] != "pretrain"]
    one_pretraining.append(
        next(each for each in results(Study(), "bert") if each.facts["stage"] == "pretrain")
    )
    assert found(one_pretraining)["finetune-ratio"].here_value == pytest.approx(0.75)


def test_rounds_deal_out_what_others_lack() -> None:
    (group,) = groups(results(Study(), "albert"))
    albert, bert = group.of("albert", "pretrain"), group.of("bert", "pretrain")
    first, second = rounds([albert[:2], bert])
    numbers = [[[work.result.number for work in works] for works in each] for each in (first, second)]
    assert numbers == [[[1], [1, 3, 5]], [[2], [2, 4]]]
    assert rounds([albert, []]) == []


def test_runs_of_several_machines_are_said() -> None:
    made = results(Study(), "bert")
    made[0] = replace(made[0], hardware="a GPU")
    got = found(made, "bert")
    assert "runs of several machines: " in got["encoder-share"].why
    assert "several" not in found(results(Study(), "bert"), "bert")["encoder-share"].why


def test_runs_of_two_cards_of_one_kind_are_said() -> None:
    made = [replace(run, cards=("GPU-a",)) for run in results(Study(), "bert")]
    assert "cards" not in found(made, "bert")["encoder-share"].why
    made[0] = replace(made[0], cards=())  # made before cards were noted: nothing is known of it
    assert "cards" not in found(made, "bert")["encoder-share"].why
    made[0] = replace(made[0], cards=("GPU-b",))
    assert "runs of 2 cards of one kind" in found(made, "bert")["encoder-share"].why


def random_runs(seed: int, runs: int = 4, layers: int = 3) -> list[list[Op]]:
    """The made model with energies of its own in every run."""
    dice = random.Random(seed)
    plain = operations(Model(layers=layers))
    return [[replace(op, energy_j=F(dice.randint(1, 1000), 64)) for op in plain] for _ in range(runs)]


def share(runs: Sequence[Sequence[Op]], part: Callable[[Op], bool], whole: Callable[[Op], bool]) -> list[F]:
    """In percent, of each run; by exact sums."""
    return [
        100
        * F(
            sum(op.energy_j for op in run if whole(op) and part(op)),
            sum(op.energy_j for op in run if whole(op)),
        )
        for run in runs
    ]


MODEL_PARTS = ("embeddings", "encoder", "pooler")
ORACLE: dict[str, tuple[Callable[[Op], bool], Callable[[Op], bool]]] = {
    "dense-dominates": (
        lambda op: op.product,
        lambda op: op.layer == 0 and op.phase == "forward" and op.block in ("intermediate", "output"),
    ),
    "encoder-share": (
        lambda op: op.part == "encoder",
        lambda op: op.phase == "forward" and op.part in MODEL_PARTS,
    ),
    **{
        f"attention-{phase}": (
            lambda op: (op.block or "").startswith("attention"),
            lambda op, phase=phase: op.layer == 0 and op.phase == phase,
        )
        for phase in ("forward", "backward")
    },
    **{
        f"self-attention-{phase}": (
            lambda op: op.block == "attention/self",
            lambda op, phase=phase: (
                op.layer == 0 and op.phase == phase and (op.block or "").startswith("attention")
            ),
        )
        for phase in ("forward", "backward")
    },
}


@pytest.mark.parametrize("seed", range(3))
def test_shares_are_exact(seed: int) -> None:
    runs = random_runs(seed)
    got = found([result(run, F(1), number, layers=3) for number, run in enumerate(runs, 1)])
    for name, (part, whole) in ORACLE.items():
        shares = share(runs, part, whole)
        assert got[name].here_value == pytest.approx(float(F(sum(shares), len(shares))), rel=1e-12), name
        assert shown([float(value) for value in shares], "%") in got[name].here


@pytest.mark.parametrize("seed", range(3))
def test_transformers_are_exact(seed: int) -> None:
    runs = random_runs(seed)
    got = found([result(run, F(1), number, layers=3) for number, run in enumerate(runs, 1)])
    of_layers = [
        share(runs, lambda op, n=n: op.layer == n, lambda op: op.phase == "forward" and op.part == "encoder")
        for n in range(3)
    ]
    by_run = list(zip(*of_layers, strict=True))
    average = [F(sum(each), 3) for each in by_run]
    assert got["transformer-share"].here_value == pytest.approx(float(F(sum(average), len(average))))
    assert got["transformer-share"].there_value == pytest.approx(33)  # 8.25 of twelve, for three
    uneven = [
        100 * statistics.stdev(map(float, each)) / float(mean)
        for each, mean in zip(by_run, average, strict=True)
    ]
    assert got["transformer-spread"].here_value == pytest.approx(statistics.fmean(uneven))
    first = [float(100 * (each[0] / mean - 1)) for each, mean in zip(by_run, average, strict=True)]
    assert got["first-transformer-lower"].here_value == pytest.approx(statistics.fmean(first))
    assert got["transformers-level-later"].verdict == "not comparable"
    assert "fewer than 6 transformers" in got["transformers-level-later"].why


@pytest.mark.parametrize("seed", range(3))
def test_transformers_are_level_after_a_third(seed: int) -> None:
    runs = random_runs(seed, layers=9)
    forward = [
        share(runs, lambda op, n=n: op.layer == n, lambda op: op.phase == "forward" and op.part == "encoder")
        for n in range(9)
    ]
    expected = [
        statistics.stdev(map(float, each[3:])) / statistics.stdev(map(float, each))
        if each[0] < F(sum(each), 9)
        else 1.0
        for each in zip(*forward, strict=True)
    ]
    got = found([result(run, F(1), number, layers=9) for number, run in enumerate(runs, 1)])
    assert got["transformers-level-later"].here_value == pytest.approx(statistics.fmean(expected))


@pytest.mark.parametrize("share", [0.1, 1 / 3, 8.3, 8.4])  # means of equal numbers may be others
def test_equal_shares_do_not_rise(share: float) -> None:
    assert {_level_later([share] * layers, layers // 3) for layers in range(6, 50)} == {1.0}


def test_even_transformers_do_not_rise() -> None:
    finding = found(results(Study(bert=Model(weights=EVEN)), "bert"), "bert")["transformers-level-later"]
    assert (finding.verdict, finding.here_value) == ("differs", 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_top_ten_is_exact(seed: int) -> None:
    """Of sums over transformers: names without their number."""
    runs = random_runs(seed)
    products: list[int] = []
    backward: list[int] = []
    for run in runs:
        summed: dict[tuple[str, str, bool], F] = {}
        for op in run:
            key = (op.name.replace(f"layer_{op.layer}/", ""), op.phase, op.product)
            summed[key] = summed.get(key, F(0)) + op.energy_j
        top = sorted(summed, key=lambda key: -summed[key])[:10]
        products.append(sum(key[2] for key in top))
        backward.append(sum(key[1] == "backward" for key in top))
    got = found([result(run, F(1), number, layers=3) for number, run in enumerate(runs, 1)])
    assert got["top-ten-products"].here_value == statistics.fmean(products)
    assert got["top-ten-backward"].here_value == statistics.fmean(backward)


def test_numbers_of_variants(agreeing: dict[str, JudgedClaim]) -> None:
    """All names of a variant are the same times those of another: one more than it is what is left."""
    study = Study()
    hidden = agreeing["hidden-raises-power"]
    # 18 products of 22 names that took time draw more, and by the least from 512 to 768 with 12 layers.
    least_w = study.bert.product_w - study.variant_w(12, 512)
    assert hidden.here_value == pytest.approx(float(least_w * F(18, 22)))
    few = agreeing["hidden-alone-not-energy"]
    names = 23  # with the one that took none
    difference_j = (study.variant_j(6, 1024) - study.variant_j(12, 512)) * F(9, 10) / names
    assert few.here_value == pytest.approx(float(difference_j))
    assert "L6 H1024" in few.here
    assert set(few.settings) == {"bert-pretrain-tf1-6-1024-fp32", "bert-pretrain-tf1-12-512-fp32"}


def test_least_alike_variants_against_numpy() -> None:
    made = [
        one(Model(layers=layers, attention=(F(layers, 20), F(1, 2))), layers=layers) for layers in (6, 8, 10)
    ]

    def energies(run: Result) -> list[float]:
        (work,) = [work for work in groups(made)[0].works if work.result is run]
        known = dict(
            zip(zip(work.summed.name, work.summed.phase, strict=True), work.summed.energy_j, strict=True)
        )
        return [known[key] for key in sorted(known)]

    pairs = [(a, b) for i, a in enumerate(made) for b in made[i + 1 :]]
    lowest = min(float(np.corrcoef(energies(a), energies(b))[0, 1]) for a, b in pairs)
    finding = found(made)["variants-energy-similar"]
    assert finding.here_value == pytest.approx(lowest)
    assert "constant power" in finding.here


def test_albert_is_beside_the_bert_of_its_shape(agreeing: dict[str, JudgedClaim]) -> None:
    assert agreeing["albert-half"].here_value == pytest.approx(0.5)
    # ten top names: six wide products and four others, ± 10 % of 140 W and ± 1 % of 120 W cancel in the mean
    assert agreeing["albert-power"].here_value == pytest.approx(20)
    assert set(agreeing["albert-half"].settings) == {
        "albert-pretrain-tf1-12-768-fp32",
        "bert-pretrain-tf1-12-768-fp32",
    }
    alone = found([one(Model(product="Einsum"), model="albert"), one(Model(), hidden=512)])
    assert {name for name in alone if name.startswith("albert")} == {"albert-einsum"}


def test_frameworks_and_precisions_are_apart() -> None:
    made = [
        one(Model(), precision=precision, framework=framework)
        for precision in ("fp32", "bf16")
        for framework in ("torch", "tf1")
    ]
    keys = {each.key for each in findings(made) if each.key.startswith("encoder-share-t")}
    assert keys == {f"encoder-share-{f}-{p}" for f in ("torch", "tf1") for p in ("fp32", "bf16")}
    everything = [each.key for each in findings(made)]
    assert len(everything) == len(set(everything))


def test_other_batches_are_apart_and_runs_of_scaling_are_left_out() -> None:
    made = [
        one(Model(), 1),
        one(Model(), 2),
        one(Model(), 1, batch=8),
        one(Model(), 1, batch=64, scale="batch"),
    ]
    keys = [each.key for each in findings(made) if each.key.startswith("encoder-share-tf1")]
    assert keys == ["encoder-share-tf1-fp32", "encoder-share-tf1-fp32-B8-N128"]


def test_what_is_unlike_the_papers_model_is_said() -> None:
    finding = found([one(Model(layers=4), layers=4, length=64)])["attention-forward"]
    assert "layers 4 (12 there), length 64 (128 there)" in finding.why


def test_no_results_no_findings() -> None:
    assert [each for each in findings([]) if each.study != "precision"] == []


@pytest.mark.parametrize(
    ("rule", "yes", "no"),
    [
        (near(40, 5, "points"), [[45.0], [35.0], [44.0, 54.0]], [[45.1], [34.9], [46.0, 54.0]]),
        (within_factor(0.5, 1.5), [[0.75], [0.34]], [[0.76], [0.33]]),
        (above(99, "%"), [[99.1]], [[99.0]]),
        (below(1, ""), [[0.9]], [[1.0]]),
        (at_least(10, ""), [[10.0, 10.0]], [[10.0, 9.0]]),
        # ± 1 in four runs: two standard errors are 1
        (signed(+1), [[0.1], [1.6, 1.6, 1.6]], [[0.0], [-0.1], [2.0, -1.5, 2.0, -1.5]]),
        (signed(-1), [[-0.1]], [[0.1], [-2.0, 1.5]]),
    ],
)
def test_rules(rule: object, yes: list[list[float]], no: list[list[float]]) -> None:
    from smaragdine.study.claims import ClaimRule

    assert isinstance(rule, ClaimRule)
    assert [rule.agrees(values) for values in yes] == [True] * len(yes)
    assert [rule.agrees(values) for values in no] == [False] * len(no)


@pytest.mark.parametrize(
    ("values", "unit", "text"),
    [
        ([], "%", "–"),
        ([40.678], "%", "40.68 %"),
        ([40.0, 41.0], "%", "40.50 ± 0.71 %"),
        ([10.0, 10.0], "of 10", "10 ± 0 of 10"),
        ([0.5, 0.7], "", "0.600 ± 0.141"),
        ([60000.0, 61000.0], "J", "60.5 ± 0.7 kJ"),
        ([120.0], "W", "120 W"),
    ],
)
def test_numbers_as_they_are_shown(values: list[float], unit: str, text: str) -> None:
    assert shown(values, unit) == text
