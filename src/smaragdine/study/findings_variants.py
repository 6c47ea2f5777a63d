"""Findings on BERT's variants: what layers and hidden size do to energy and power (the paper's § 6.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise

from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.similarity import Correlation, Quantity, constant_power, matrix, mean_difference
from smaragdine.study import claims_cases as claims
from smaragdine.study.verdicts import Claim, Finding, mean, shown
from smaragdine.study.work import Group, Shape, Work, rounds, summary_of
from smaragdine.units import joules

Pair = tuple[Shape, Shape]
Variants = Mapping[Shape, Sequence[Work]]
Averaged = Sequence[Mapping[Shape, Footprint]]  # of each round
_CONSTANT = "power is the same for all operations here"


def variant_findings(group: Group) -> list[Finding]:
    runs = group.of("bert", "pretrain")
    by_shape = {shape: [work for work in runs if work.shape == shape] for shape in {w.shape for w in runs}}
    if len(by_shape) < 2:
        return []
    variants = dict(sorted(by_shape.items()))
    averaged = [
        dict(zip(variants, map(summary_of, works), strict=True)) for works in rounds(list(variants.values()))
    ]
    return [
        _alike(group, variants, averaged, claims.VARIANTS_ENERGY, "energy"),
        _alike(group, variants, averaged, claims.VARIANTS_POWER, "power"),
        *_rises(group, variants, averaged),
        *_few_wide(group, variants, averaged),
    ]


def _alike(group: Group, variants: Variants, averaged: Averaged, claim: Claim, quantity: Quantity) -> Finding:
    """All pairs in each round of runs; the least alike decides, beside what constant power would score."""
    lowest: list[float] = []
    middle: list[float] = []
    constant: list[float] = []
    for of in averaged:
        footprints = list(of.values())
        known = _pairs(matrix(footprints, quantity, group.device))
        if known:
            lowest.append(min(known))
            middle.append(mean(known))
        # Constant power has no footprint of power to compare: its energies are what time alone scores.
        flat = _pairs(matrix([constant_power(each) for each in footprints], "energy", group.device))
        constant += [min(flat)] if flat else []
    also = [f"mean of all pairs {shown(middle, '')}"] if middle else []
    if constant:
        also.append(f"energies at constant power {shown(constant, '')}")
    return group.finding(
        claim,
        _all(variants),
        lowest,
        "; ".join(also),
        "" if lowest else _CONSTANT,
        of_power=quantity == "power",
    )


def _pairs(table: list[list[Correlation]]) -> list[float]:
    """Every two once."""
    return _known([table[a][b].value for a, b in combinations(range(len(table)), 2)])


def _rises(group: Group, variants: Variants, averaged: Averaged) -> Iterator[Finding]:
    wider, deeper = _steps(variants, fixed=0), _steps(variants, fixed=1)
    if wider:
        yield _smallest(group, variants, averaged, claims.HIDDEN_POWER, wider, "power")
    if deeper:
        yield _smallest(group, variants, averaged, claims.LAYERS_POWER, deeper, "power")
        yield _smallest(group, variants, averaged, claims.LAYERS_ENERGY, deeper, "energy")


def _smallest(
    group: Group,
    variants: Variants,
    averaged: Averaged,
    claim: Claim,
    pairs: Sequence[Pair],
    quantity: Quantity,
) -> Finding:
    by_pair = {pair: _differences(group, averaged, pair, quantity) for pair in pairs}
    by_round = [_known(each) for each in zip(*by_pair.values(), strict=True)]
    smallest = [min(each) for each in by_round if each]
    means = {pair: mean(_known(values)) for pair, values in by_pair.items() if _known(values)}
    also = ""
    if means:
        rising = sum(value > 0 for value in means.values())
        on_average = shown([mean(list(means.values()))], claim.unit)
        least = min(means, key=lambda pair: means[pair])
        also = f"more in {rising} of {len(means)} pairs, on average {on_average}"
        also += f", least from {_called(least[0])} to {_called(least[1])}"
    return group.finding(claim, _all(variants), smallest, also, of_power=quantity == "power")


def _few_wide(group: Group, variants: Variants, averaged: Averaged) -> Iterator[Finding]:
    """The paper's cell E, D: the fewest of the widest against the most of the narrowest layers."""
    layers, hidden = ({shape[side] for shape in variants} for side in (0, 1))
    narrow, wide = (max(layers), min(hidden)), (min(layers), max(hidden))
    if narrow == wide or len(hidden) < 2 or not {narrow, wide} <= set(variants):
        return
    differences = _known(_differences(group, averaged, (narrow, wide), "energy"))
    step = {shape: joules(mean([work.total_j for work in variants[shape]])) for shape in (wide, narrow)}
    also = f"a step of {_called(wide)} takes {step[wide]}, of {_called(narrow)} {step[narrow]}"
    yield group.finding(claims.HIDDEN_ENERGY, [*variants[wide], *variants[narrow]], differences, also)


def _differences(group: Group, averaged: Averaged, pair: Pair, quantity: Quantity) -> list[float | None]:
    """The second less the first, in each round of runs; None where they have no name in common."""
    return [mean_difference(of[pair[0]], of[pair[1]], quantity, group.device) for of in averaged]


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _steps(variants: Variants, fixed: int) -> list[Pair]:
    """Neighbours of the same layers (fixed 0) or hidden size (1), the smaller first."""
    same = sorted({shape[fixed] for shape in variants})
    rows = [sorted(shape for shape in variants if shape[fixed] == value) for value in same]
    return [pair for row in rows for pair in pairwise(row)]


def _all(variants: Variants) -> list[Work]:
    return [work for works in variants.values() for work in works]


def _called(shape: Shape) -> str:
    return f"L{shape[0]} H{shape[1]}"
