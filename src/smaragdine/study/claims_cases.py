"""What the paper claims about BERT's variants and ALBERT (§ 6), and the rule that judges a finding here."""

from __future__ import annotations

from smaragdine.study.verdicts import Claim, above, at_least, signed, within_factor

_STRONG = "high for all pairs (above 0.7 is strong to the paper)"
VARIANTS_ENERGY = Claim(
    "variants-energy-similar",
    "variants",
    "How alike are the energy footprints of the two variants that differ most (correlation)?",
    _STRONG,
    0.7,
    "",
    above(0.7, ""),
    "6.1",
)
VARIANTS_POWER = Claim(
    "variants-power-similar",
    "variants",
    "How alike are the power footprints of the two variants that differ most (correlation)?",
    _STRONG,
    0.7,
    "",
    above(0.7, ""),
    "6.1",
)
HIDDEN_POWER = Claim(
    "hidden-raises-power",
    "variants",
    "Does a larger hidden size draw more power, the layers the same (the smallest difference)?",
    "yes, in every pair",
    None,
    "W",
    signed(+1),
    "6.1",
)
LAYERS_POWER = Claim(
    "layers-raise-power",
    "variants",
    "Do more layers draw more power, the hidden size the same (the smallest difference)?",
    "yes, in every pair",
    None,
    "W",
    signed(+1),
    "6.1",
)
LAYERS_ENERGY = Claim(
    "layers-raise-energy",
    "variants",
    "Do more layers take more energy, the hidden size the same (the smallest mean difference of a name)?",
    "yes, in every pair",
    None,
    "J",
    signed(+1),
    "6.1",
)
HIDDEN_ENERGY = Claim(
    "hidden-alone-not-energy",
    "variants",
    "Do few wide layers take less energy than many narrow ones (mean difference of a name)?",
    "yes: L6 H768 less than L12 H512",
    None,
    "J",
    signed(-1),
    "6.1",
)

# Of two deviations of one kind over five runs each, one is so many times the other in one case of twenty.
_BY_CHANCE = 2.5

ALBERT_EINSUM = Claim(
    "albert-einsum",
    "albert",
    "How many of ALBERT's ten operations that take most are einsum?",
    "all 10",
    10.0,
    "of 10",
    at_least(10, "of 10"),
    "6.2",
)
ALBERT_ALIKE = Claim(
    "albert-alike",
    "albert",
    "How alike is the way ALBERT's energy is spread over blocks and phases to BERT's (correlation)?",
    "similar (no number; above 0.7 is strong to the paper)",
    None,
    "",
    above(0.7, ""),
    "6.2",
)
ALBERT_HALF = Claim(
    "albert-half",
    "albert",
    "What part of the energy of BERT's top ten do ALBERT's take?",
    "much less, almost half in some cases",
    0.5,
    "",
    within_factor(0.5, 1.5),
    "6.2",
)
ALBERT_POWER = Claim(
    "albert-power",
    "albert",
    "Do ALBERT's top ten draw more power than BERT's (difference of means)?",
    "much more: all at least 120 W",
    None,
    "W",
    signed(+1),
    "6.2",
)
ALBERT_POWER_SPREAD = Claim(
    "albert-power-spread",
    "albert",
    "How many times BERT's is the deviation over runs of the power of ALBERT's top ten?",
    "significantly larger (no number)",
    None,
    "times",
    above(_BY_CHANCE, ""),
    "6.2",
)

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
