"""What the paper claims about BERT (§ 5), and the rule that judges a finding here."""

from __future__ import annotations

import math

from smaragdine.study.settings import STAGES
from smaragdine.study.verdicts import Claim, above, at_least, below, near, signed, within_factor

_TRAINED = 500  # steps: what the paper calls epochs (60 kJ / 500 = 120 J, at about 120 W)
_SENTENCES = 1063  # of CoLA's test set
PAPERS_GPU = "P5000"

_POINTS = 5.0  # of a share: the paper's have no deviation, and its GPU, framework and kernels are others
_ALIKE = 10.0  # per cent: powers that we call similar, where the paper gives no number
_OF = dict.fromkeys(STAGES, f"{_TRAINED} steps") | {"predict": f"{_SENTENCES:,} sentences"}


def stage_steps(stage: str, batch: int) -> int:
    """How many steps a stage's total is of."""
    return math.ceil(_SENTENCES / batch) if stage == "predict" else _TRAINED


ENCODER_SHARE = Claim(
    "encoder-share",
    "bert",
    "Does the encoder dominate the forward pass of embeddings, encoder and pooler?",
    "more than 99 %",
    99.0,
    "%",
    above(99, "%"),
    "5.3.1",
)


def transformer_share(layers: int = 12) -> Claim:
    """The paper's share of each of twelve, for as many as there are here."""
    share, spread = 8.25 * 12 / layers, 0.61 * 12 / layers
    scaled = "" if layers == 12 else f" (8.25 ± 0.61 % of 12, for {layers})"
    return Claim(
        "transformer-share",
        "bert",
        "What share of the encoder's forward pass does a transformer take?",
        f"{share:.2f} ± {spread:.2f} %{scaled}",
        share,
        "%",
        near(share, 2 * spread, "% (two of the paper's deviations)"),
        "5.3.1",
    )


TRANSFORMER_SPREAD = Claim(
    "transformer-spread",
    "bert",
    "How uneven are the transformers (standard deviation, as a part of their mean)?",
    "7.4 % (0.61 of 8.25)",
    100 * 0.61 / 8.25,
    "%",
    within_factor(100 * 0.61 / 8.25, 2),
    "5.3.1",
)
FIRST_LOWER = Claim(
    "first-transformer-lower",
    "bert",
    "Does the first transformer take less than the average?",
    "−24 % (up to 2 points of 8.25)",
    -100 * 2 / 8.25,
    "%",
    signed(-1),
    "5.3.1",
)
LEVEL_LATER = Claim(
    "transformers-level-later",
    "bert",
    "Do they rise over the first third, and are level then (deviation of the others over that of all)?",
    "yes: 8.55 % from the fifth of twelve on",
    0.0,
    "times",
    below(0.5, "times, with a first one below the average"),
    "5.3.1",
)


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
ATTENTION_BACKWARD = Claim(
    "attention-larger-backward",
    "bert",
    "Is attention's share larger backward than forward (difference)?",
    "yes, by 7.51 points",
    48.19 - 40.68,
    "points",
    signed(+1),
    "5.3.2",
)
SELF_ATTENTION_BACKWARD = Claim(
    "self-attention-larger-backward",
    "bert",
    "Is self-attention's share larger backward than forward (difference)?",
    "yes, by 7.01 points",
    79.52 - 72.51,
    "points",
    signed(+1),
    "5.3.2",
)
DENSE = Claim(
    "dense-dominates",
    "bert",
    "What share of the first transformer's intermediate and output do dense layers' products take, forward?",
    "they dominate (no number)",
    None,
    "%",
    above(50, "%"),
    "5.3.2",
)
TOP_PRODUCTS = Claim(
    "top-ten-products",
    "bert",
    "How many of the ten operations that take most are matrix products?",
    "all 10",
    10.0,
    "of 10",
    at_least(10, "of 10"),
    "5.3.3",
)
TOP_BACKWARD = Claim(
    "top-ten-backward",
    "bert",
    "How many of these ten are of the backward pass?",
    "8",
    8.0,
    "of 10",
    near(8, 1, "operation"),
    "5.3.3",
)
BACKWARD_LARGER = Claim(
    "backward-larger",
    "bert",
    "How many times the forward pass's energy does the backward pass take?",
    "much more (no number)",
    None,
    "times",
    above(1, ""),
    "5.3.3",
)
PRODUCTS_POWER = Claim(
    "products-power",
    "bert",
    "How far do the powers of the ten's products lie from each other (standard deviation, of their mean)?",
    "similar for all (no number)",
    None,
    "%",
    below(_ALIKE, "%"),
    "5.3.3",
)
STAGE_TOTAL = {
    stage: Claim(
        f"total-{stage}",
        "bert",
        f"What does {STAGES[stage]} take ({_OF[stage]})?",
        there,
        there_j,
        "J",
        within_factor(there_j, 1.5),
        "5.2",
    )
    for stage, there, there_j in (
        ("pretrain", "over 60 kJ", 60e3),
        ("finetune", "45 kJ", 45e3),
        ("predict", "around 2 kJ", 2e3),
    )
}
STAGE_RATIO = {
    stage: Claim(
        f"{stage}-ratio",
        "bert",
        f"What part of pre-training's energy does {STAGES[stage]} take?",
        there,
        ratio,
        "",
        within_factor(ratio, factor),
        "5.2",
    )
    # "over 60" and "around 2" are read off a figure: the smaller the number, the coarser
    for stage, there, ratio, factor in (
        ("finetune", "45 / 60", 45 / 60, 1.5),
        ("predict", "2 / 60", 2 / 60, 3),
    )
}
STAGE_ORDER = {
    stage: Claim(
        f"{stage}-less",
        "bert",
        f"Does {STAGES[stage]} take less than {STAGES[more]} (difference)?",
        there,
        there_j,
        "J",
        signed(-1),
        "5.2",
    )
    for stage, more, there, there_j in (
        ("finetune", "pretrain", "yes, by 15 kJ", -15e3),
        ("predict", "finetune", "yes, by 43 kJ", -43e3),
    )
}

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
