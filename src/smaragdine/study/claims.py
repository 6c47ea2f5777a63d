"""What the paper claims about BERT (§ 5), its variants and ALBERT (§ 6), and the rules that judge it here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from smaragdine.study.plan import STAGES
from smaragdine.units import plus_minus, si

# A judged claim: what the paper says, the number here, and by which rule the two agree or differ.

Verdict = Literal["agrees", "differs", "not comparable"]


@dataclass(frozen=True)
class JudgedClaim:
    key: str  # includes framework and precision: encoder-share-torch-fp32
    study: str  # bert, variants, albert, precision
    question: str
    here: str
    there: str
    here_value: float | None
    there_value: float | None
    verdict: Verdict
    why: str  # the rule that decided, or why they cannot be compared
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClaimRule:
    """`agrees` gets the number of each run."""

    text: str
    agrees: Callable[[Sequence[float]], bool]
    by_spread: bool = False  # uses the deviation over runs


@dataclass(frozen=True)
class Claim:
    """What the paper says, and the rule; the docs print these."""

    name: str
    study: str
    question: str
    there: str
    there_value: float | None
    unit: str  # unit of the number here
    rule: ClaimRule
    section: str  # the paper's section


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation; None for a single run."""
    return statistics.stdev(values) if len(values) > 1 else None


def _noise(values: Sequence[float]) -> float:
    """Two standard errors of the mean; 0 for a single run, of which none is known."""
    spread = deviation(values)
    return 0.0 if spread is None else 2 * spread / math.sqrt(len(values))


def near(there: float, points: float, unit: str) -> ClaimRule:
    """The paper gives no deviation for most figures; a fixed distance takes its place."""
    return ClaimRule(
        f"agrees if within {points:g} {unit} or two standard errors over runs, whichever is wider",
        lambda values: abs(mean(values) - there) <= max(points, _noise(values)),
        by_spread=True,
    )


def within_factor(there: float, factor: float) -> ClaimRule:
    return ClaimRule(
        f"agrees if within a factor of {factor:g}",
        lambda values: there / factor <= mean(values) <= there * factor,
    )


def above(bound: float, unit: str) -> ClaimRule:
    return ClaimRule(f"agrees if above {bound:g} {unit}".rstrip(), lambda values: mean(values) > bound)


def below(bound: float, unit: str) -> ClaimRule:
    return ClaimRule(f"agrees if below {bound:g} {unit}".rstrip(), lambda values: mean(values) < bound)


def at_least(bound: float, unit: str) -> ClaimRule:
    return ClaimRule(f"agrees if at least {bound:g} {unit}".rstrip(), lambda values: mean(values) >= bound)


def signed(sign: int) -> ClaimRule:
    """The sign of a difference."""
    word = "above" if sign > 0 else "below"

    return ClaimRule(
        f"agrees if {word} 0 by more than two standard errors of the mean over runs",
        lambda values: sign * mean(values) > _noise(values),
        by_spread=True,
    )


def judge(
    claim: Claim,
    values: Sequence[float],
    suffix: str,
    settings: Sequence[str],
    also: str = "",
    remarks: Sequence[str] = (),
    obstacle: str = "",
) -> JudgedClaim:
    """`also`: more numbers, after the one that is judged. `obstacle`: why it cannot be compared."""
    obstacle = obstacle or ("" if values else "no run here has it")
    if len(values) == 1 and claim.rule.by_spread and not obstacle:
        remarks = ["of one run there is no deviation", *remarks]
    verdict: Verdict = "not comparable" if obstacle else "agrees" if claim.rule.agrees(values) else "differs"
    return JudgedClaim(
        key=f"{claim.name}-{suffix}",
        study=claim.study,
        question=claim.question,
        here="; ".join(text for text in (shown(values, claim.unit), also) if text),
        there=claim.there,
        here_value=mean(values) if values else None,
        there_value=claim.there_value,
        verdict=verdict,
        why="; ".join([obstacle or claim.rule.text, *remarks]),
        settings=tuple(dict.fromkeys(settings)),
    )


def shown(values: Sequence[float], unit: str) -> str:
    """Mean ± standard deviation over runs."""
    if not values:
        return "–"
    spread = deviation(values)
    if unit in ("J", "W"):
        text = si(mean(values), unit) if spread is None else plus_minus(mean(values), spread, unit)
    else:
        decimals = _decimals(values)
        text = f"{mean(values):.{decimals}f}"
        text += "" if spread is None else f" ± {spread:.{decimals}f}"
        text += f" {unit}" if unit else ""
    return text.replace("-", "−")


def _decimals(values: Sequence[float]) -> int:
    """Counts that are the same in all runs need none; numbers below 1 need more than those above."""
    if all(value == round(value) for value in values) and len(set(values)) == 1:
        return 0
    return 2 if abs(mean(values)) >= 1 else 3


_TRAINED = 500  # steps: what the paper calls epochs (60 kJ / 500 = 120 J, at about 120 W)
_SENTENCES = 1063  # in CoLA's test set
PAPERS_GPU = "P5000"

_POINTS = 5.0  # points of a share: the paper gives no deviation, and its GPU, framework and kernels differ
_ALIKE = 10.0  # per cent: powers that we call similar, if the paper gives no number
_OF = dict.fromkeys(STAGES, f"{_TRAINED} steps") | {"predict": f"{_SENTENCES:,} sentences"}


def stage_steps(stage: str, batch: int) -> int:
    """How many steps a stage's total covers."""
    return math.ceil(_SENTENCES / batch) if stage == "predict" else _TRAINED


# Each is a table of three lines: its name, what is asked, and the paper's answer with the rule.
# fmt: off
ENCODER_SHARE = Claim("encoder-share", "bert",
    "Does the encoder dominate the forward pass of embeddings, encoder and pooler?",
    "more than 99 %", 99.0, "%", above(99, "%"), "5.3.1")


def transformer_share(layers: int = 12) -> Claim:
    """The paper's share of each of twelve transformers, scaled to as many as there are here."""
    share, spread = 8.25 * 12 / layers, 0.61 * 12 / layers
    scaled = "" if layers == 12 else f" (8.25 ± 0.61 % of 12, for {layers})"
    return Claim("transformer-share", "bert",
        "What share of the encoder's forward pass does a transformer take?",
        f"{share:.2f} ± {spread:.2f} %{scaled}", share, "%",
        near(share, 2 * spread, "% (two of the paper's deviations)"), "5.3.1")


TRANSFORMER_SPREAD = Claim("transformer-spread", "bert",
    "How uneven are the transformers (standard deviation, as a part of their mean)?",
    "7.4 % (0.61 of 8.25)", 100 * 0.61 / 8.25, "%", within_factor(100 * 0.61 / 8.25, 2), "5.3.1")
FIRST_LOWER = Claim("first-transformer-lower", "bert",
    "Does the first transformer take less than the average?",
    "−24 % (up to 2 points of 8.25)", -100 * 2 / 8.25, "%", signed(-1), "5.3.1")
LEVEL_LATER = Claim("transformers-level-later", "bert",
    "Do they rise over the first third, and are level then (deviation of the others over that of all)?",
    "yes: 8.55 % from the fifth of twelve on", 0.0, "times",
    below(0.5, "times, with a first one below the average"), "5.3.1")


def _share(name: str, question: str, there: float) -> Claim:
    return Claim(
        name, "bert", question, f"{there:.2f} %", there, "%", near(there, _POINTS, "points"), "5.3.2"
    )


ATTENTION = {
    phase: _share(f"attention-{phase}", f"Attention's share of the first transformer, {phase}?", there)
    for phase, there in (("forward", 40.68), ("backward", 48.19))
}
SELF_ATTENTION = {
    phase: _share(f"self-attention-{phase}", f"Self-attention's share of its attention, {phase}?", there)
    for phase, there in (("forward", 72.51), ("backward", 79.52))
}
ATTENTION_BACKWARD = Claim("attention-larger-backward", "bert",
    "Is attention's share larger backward than forward (difference)?",
    "yes, by 7.51 points", 48.19 - 40.68, "points", signed(+1), "5.3.2")
SELF_ATTENTION_BACKWARD = Claim("self-attention-larger-backward", "bert",
    "Is self-attention's share larger backward than forward (difference)?",
    "yes, by 7.01 points", 79.52 - 72.51, "points", signed(+1), "5.3.2")
DENSE = Claim("dense-dominates", "bert",
    "What share of the first transformer's intermediate and output do dense layers' products take, forward?",
    "they dominate (no number)", None, "%", above(50, "%"), "5.3.2")
TOP_PRODUCTS = Claim("top-ten-products", "bert",
    "How many of the ten operations that take most are matrix products?",
    "all 10", 10.0, "of 10", at_least(10, "of 10"), "5.3.3")
TOP_BACKWARD = Claim("top-ten-backward", "bert",
    "How many of these ten are of the backward pass?",
    "8", 8.0, "of 10", near(8, 1, "operation"), "5.3.3")
BACKWARD_LARGER = Claim("backward-larger", "bert",
    "How many times the forward pass's energy does the backward pass take?",
    "much more (no number)", None, "times", above(1, ""), "5.3.3")
PRODUCTS_POWER = Claim("products-power", "bert",
    "How far do the powers of the ten's products lie from each other (standard deviation, of their mean)?",
    "similar for all (no number)", None, "%", below(_ALIKE, "%"), "5.3.3")
STAGE_TOTAL = {
    stage: Claim(f"total-{stage}", "bert",
        f"What does {STAGES[stage]} take ({_OF[stage]})?",
        there, there_j, "J", within_factor(there_j, 1.5), "5.2")
    for stage, there, there_j in (
        ("pretrain", "over 60 kJ", 60e3),
        ("finetune", "45 kJ", 45e3),
        ("predict", "around 2 kJ", 2e3),
    )
}
STAGE_RATIO = {
    stage: Claim(f"{stage}-ratio", "bert",
        f"What part of pre-training's energy does {STAGES[stage]} take?",
        there, ratio, "", within_factor(ratio, factor), "5.2")
    # "over 60" and "around 2" are read off a figure: the smaller the number, the coarser
    for stage, there, ratio, factor in (
        ("finetune", "45 / 60", 45 / 60, 1.5),
        ("predict", "2 / 60", 2 / 60, 3),
    )
}
STAGE_ORDER = {
    stage: Claim(f"{stage}-less", "bert",
        f"Does {STAGES[stage]} take less than {STAGES[more]} (difference)?",
        there, there_j, "J", signed(-1), "5.2")
    for stage, more, there, there_j in (
        ("finetune", "pretrain", "yes, by 15 kJ", -15e3),
        ("predict", "finetune", "yes, by 43 kJ", -43e3),
    )
}

# fmt: on

PAPER_CLAIMS: tuple[Claim, ...] = (
    ENCODER_SHARE,
    transformer_share(),
    TRANSFORMER_SPREAD,
    FIRST_LOWER,
    LEVEL_LATER,
    *(claim for phase in ("forward", "backward") for claim in (ATTENTION[phase], SELF_ATTENTION[phase])),
    ATTENTION_BACKWARD,
    SELF_ATTENTION_BACKWARD,
    DENSE,
    TOP_PRODUCTS,
    TOP_BACKWARD,
    BACKWARD_LARGER,
    PRODUCTS_POWER,
    *STAGE_TOTAL.values(),
    *STAGE_RATIO.values(),
    *STAGE_ORDER.values(),
)


# What the paper claims about BERT's variants and ALBERT (§ 6), and the rules that judge it here.

# fmt: off
_STRONG = "high for all pairs (above 0.7 is strong to the paper)"
VARIANTS_ENERGY = Claim("variants-energy-similar", "variants",
    "How alike are the energy footprints of the two variants that differ most (correlation)?",
    _STRONG, 0.7, "", above(0.7, ""), "6.1")
VARIANTS_POWER = Claim("variants-power-similar", "variants",
    "How alike are the power footprints of the two variants that differ most (correlation)?",
    _STRONG, 0.7, "", above(0.7, ""), "6.1")
HIDDEN_POWER = Claim("hidden-raises-power", "variants",
    "Does a larger hidden size draw more power, the layers the same (the smallest difference)?",
    "yes, in every pair", None, "W", signed(+1), "6.1")
LAYERS_POWER = Claim("layers-raise-power", "variants",
    "Do more layers draw more power, the hidden size the same (the smallest difference)?",
    "yes, in every pair", None, "W", signed(+1), "6.1")
LAYERS_ENERGY = Claim("layers-raise-energy", "variants",
    "Do more layers take more energy, the hidden size the same (the smallest mean difference of a name)?",
    "yes, in every pair", None, "J", signed(+1), "6.1")
HIDDEN_ENERGY = Claim("hidden-alone-not-energy", "variants",
    "Do few wide layers take less energy than many narrow ones (mean difference of a name)?",
    "yes: L6 H768 less than L12 H512", None, "J", signed(-1), "6.1")

# Of two like deviations over five runs each, one is this many times the other in one case of twenty.
_BY_CHANCE = 2.5

ALBERT_EINSUM = Claim("albert-einsum", "albert",
    "How many of ALBERT's ten operations that take most are einsum?",
    "all 10", 10.0, "of 10", at_least(10, "of 10"), "6.2")
ALBERT_ALIKE = Claim("albert-alike", "albert",
    "How alike is the way ALBERT's energy is spread over blocks and phases to BERT's (correlation)?",
    "similar (no number; above 0.7 is strong to the paper)", None, "", above(0.7, ""), "6.2")
ALBERT_HALF = Claim("albert-half", "albert",
    "What part of the energy of BERT's top ten do ALBERT's take?",
    "much less, almost half in some cases", 0.5, "", within_factor(0.5, 1.5), "6.2")
ALBERT_POWER = Claim("albert-power", "albert",
    "Do ALBERT's top ten draw more power than BERT's (difference of means)?",
    "much more: all at least 120 W", None, "W", signed(+1), "6.2")
ALBERT_POWER_SPREAD = Claim("albert-power-spread", "albert",
    "How many times BERT's is the deviation over runs of the power of ALBERT's top ten?",
    "significantly larger (no number)", None, "times", above(_BY_CHANCE, ""), "6.2")

# fmt: on

CASE_CLAIMS: tuple[Claim, ...] = (
    VARIANTS_ENERGY,
    VARIANTS_POWER,
    HIDDEN_POWER,
    LAYERS_POWER,
    LAYERS_ENERGY,
    HIDDEN_ENERGY,
    ALBERT_EINSUM,
    ALBERT_ALIKE,
    ALBERT_HALF,
    ALBERT_POWER,
    ALBERT_POWER_SPREAD,
)
