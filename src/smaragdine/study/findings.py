"""Makes all findings that results allow: each claim of the paper beside the number here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np

from smaragdine.accounting.arithmetic import average
from smaragdine.accounting.footprint import Footprint, column
from smaragdine.accounting.similarity import Correlation, Quantity, constant_power, matrix, mean_difference
from smaragdine.arrays import Ints
from smaragdine.study import claims
from smaragdine.study.claims import Claim, JudgedClaim, Verdict, mean, shown
from smaragdine.study.plan import STAGES
from smaragdine.study.results import Result
from smaragdine.study.roles import Mask, OperationGroup, Operations, Shape, Work, groups, rounds, summary_of
from smaragdine.units import joules, watts

# BERT itself: where the energy of a step goes, and what the stages take (the paper's § 5).

TOP = 10
_LEAST_LAYERS = 6  # so that a third of them is more than one
_FEED_FORWARD = ("intermediate", "output")
_UNNAMED = "no operation here has the name of a transformer"
_NO_BACKWARD = "no operation here is of the backward pass"


def bert_findings(group: OperationGroup) -> list[JudgedClaim]:
    works = group.main("bert", "pretrain")
    if not works:
        return list(_stages(group))
    return [
        *_parts(group, works),
        *_transformers(group, works),
        *_attention(group, works),
        _dense(group, works),
        *_top(group, works),
        *_stages(group),
    ]


def _parts(group: OperationGroup, works: Sequence[Work]) -> Iterator[JudgedClaim]:
    """The paper speaks of embedding and encoding; heads and loss are mentioned beside them."""
    model = ("embeddings", "encoder", "pooler")
    alone, with_heads = (
        _over(works, lambda run, of=parts: _percent(run, _encoder(run), _in(run, *of) & run.of("forward")))
        for parts in (model, (*model, "heads"))
    )
    if any(alone):
        also = f"of the whole forward pass, heads and loss included, {shown(with_heads, '%')}"
        yield group.finding(claims.ENCODER_SHARE, works, alone, also)
    else:  # without a named encoder there is nothing to take a share of
        yield group.finding(claims.ENCODER_SHARE, works, [], obstacle=_UNNAMED)


def _transformers(group: OperationGroup, works: Sequence[Work]) -> Iterator[JudgedClaim]:
    # A transformer on which no reading of power fell has no share to compare.
    shares = [share for share in map(_layer_shares, works) if len(share) > 1 and min(share) > 0]
    obstacle = "" if shares else _UNNAMED
    layers = min(map(len, shares), default=12)
    spread = [statistics.stdev(each) for each in shares]
    also = f"{shown(spread, '%')} the deviation over the {layers} transformers" if shares else ""
    means = [mean(each) for each in shares]
    yield group.finding(claims.transformer_share(layers), works, means, also, obstacle)
    uneven = [100 * each / middle for each, middle in zip(spread, means, strict=True)]
    # The paper explains both by the power at which a step begins.
    yield group.finding(claims.TRANSFORMER_SPREAD, works, uneven, "", obstacle, of_power=True)
    first = [100 * (each[0] / middle - 1) for each, middle in zip(shares, means, strict=True)]
    third = max(1, layers // 3)
    early = [100 * (mean(each[:third]) / mean(each[third:]) - 1) for each in shares]
    also = f"the first {third} of {layers} against the others {shown(early, '%')}" if shares else ""
    yield group.finding(claims.FIRST_LOWER, works, first, also, obstacle, of_power=True)
    few = "" if layers >= _LEAST_LAYERS else f"fewer than {_LEAST_LAYERS} transformers"
    level = [] if few else [_level_later(each, third) for each in shares]
    yield group.finding(claims.LEVEL_LATER, works, level, "", obstacle or few, of_power=True)


def _attention(group: OperationGroup, works: Sequence[Work]) -> Iterator[JudgedClaim]:
    """The first transformer, as in the paper, and all of them."""

    def attention(phase: str, layers: Callable[[Operations], Mask]) -> list[float]:
        return _over(works, lambda run: _percent(run, run.attention, layers(run) & run.of(phase)))

    def itself(phase: str, layers: Callable[[Operations], Mask]) -> list[float]:
        return _over(
            works,
            lambda run: _percent(
                run, run.block == "attention/self", layers(run) & run.attention & run.of(phase)
            ),
        )

    for share, by_phase, larger in (
        (attention, claims.ATTENTION, claims.ATTENTION_BACKWARD),
        (itself, claims.SELF_ATTENTION, claims.SELF_ATTENTION_BACKWARD),
    ):
        of_first = {phase: share(phase, _first) for phase in by_phase}
        for phase, claim in by_phase.items():
            also = f"of all transformers {shown(share(phase, _any), '%')}" if of_first[phase] else ""
            yield group.finding(claim, works, of_first[phase], also, "" if of_first[phase] else _UNNAMED)
        known = len(of_first["forward"]) == len(of_first["backward"])
        pairs = zip(of_first["backward"], of_first["forward"], strict=True) if known else ()
        difference = [backward - forward for backward, forward in pairs]
        yield group.finding(larger, works, difference, obstacle="" if difference else _UNNAMED)


def _dense(group: OperationGroup, works: Sequence[Work]) -> JudgedClaim:
    def share(layers: Callable[[Operations], Mask]) -> list[float]:
        return _over(
            works,
            lambda run: _percent(
                run, run.product, layers(run) & np.isin(run.block, _FEED_FORWARD) & run.of("forward")
            ),
        )

    of_first = share(_first)
    also = f"of all transformers {shown(share(_any), '%')}" if of_first else ""
    return group.finding(claims.DENSE, works, of_first, also, "" if of_first else _UNNAMED)


def _top(group: OperationGroup, works: Sequence[Work]) -> Iterator[JudgedClaim]:
    tops = [work.summed.top(TOP) for work in works]
    obstacle = "" if all(len(top) == TOP for top in tops) else f"fewer than {TOP} operations"
    runs = [work.summed for work in works]
    products = [float(run.product[top].sum()) for run, top in zip(runs, tops, strict=True)]
    name = f"the first is {runs[0].name[tops[0][0]]}" if len(tops[0]) else ""
    yield group.finding(claims.TOP_PRODUCTS, works, products, name, obstacle)
    backward = [float(run.of("backward")[top].sum()) for run, top in zip(runs, tops, strict=True)]
    yield group.finding(claims.TOP_BACKWARD, works, backward, obstacle=obstacle)
    ratio = _over(works, lambda run: _ratio(run.sum_j(run.of("backward")), run.sum_j(run.of("forward"))))
    absent = "" if any(backward_j > 0 for backward_j in ratio) else _NO_BACKWARD
    yield group.finding(claims.BACKWARD_LARGER, works, ratio, obstacle=absent)
    yield _products_power(group, works)


def _products_power(group: OperationGroup, works: Sequence[Work]) -> JudgedClaim:
    of_products: list[float] = []
    of_all: list[float] = []
    for run in (work.summed for work in works):
        top = run.top(TOP)
        ten = relative_spread(run, top[run.product[top]])
        every = relative_spread(run, np.arange(len(run.name)))
        if ten is not None and every is not None:
            of_products.append(100 * ten)
            of_all.append(100 * every)
    also = f"{shown(of_all, '%')} among all operations" if of_all else ""
    obstacle = "" if of_products else "the ten hold fewer than two products"
    return group.finding(claims.PRODUCTS_POWER, works, of_products, also, obstacle, of_power=True)


def _stages(group: OperationGroup) -> Iterator[JudgedClaim]:
    works = {stage: group.main("bert", stage) for stage in STAGES}
    for stage, claim in claims.STAGE_TOTAL.items():
        if works[stage]:
            same = all(claims.PAPERS_GPU in work.result.hardware for work in works[stage])
            obstacle = "" if same else f"another machine: {works[stage][0].result.hardware or 'not known'}"
            batch = int(works[stage][0].result.facts.get("batch", 1))
            steps = claims.stage_steps(stage, batch)
            also = f"{steps} steps of {batch} sentences on {group.device}, idle included"
            totals_j = [stage_total_j(work) for work in works[stage]]
            yield group.finding(claim, works[stage], totals_j, also, obstacle)
    for stage, claim in claims.STAGE_RATIO.items():
        pairs = rounds([works[stage], works["pretrain"]])
        if pairs:
            totals = [(_stage_mean_j(one), _stage_mean_j(whole)) for one, whole in pairs]
            ratios = [one_j / whole_j for one_j, whole_j in totals if whole_j > 0]
            yield group.finding(claim, [*works[stage], *works["pretrain"]], ratios)
    for stage, more in (("finetune", "pretrain"), ("predict", "finetune")):
        pairs = rounds([works[stage], works[more]])
        if pairs:
            differences = [_stage_mean_j(one) - _stage_mean_j(other) for one, other in pairs]
            yield group.finding(claims.STAGE_ORDER[stage], [*works[stage], *works[more]], differences)


def stage_total_j(work: Work) -> float:
    """For as many steps as the paper's stage has."""
    facts = work.result.facts
    return work.total_j * claims.stage_steps(str(facts["stage"]), int(facts.get("batch", 1)))


def _stage_mean_j(works: Sequence[Work]) -> float:
    return mean([stage_total_j(work) for work in works])


def powers_w(run: Operations, chosen: Ints) -> list[float]:
    """The power of those that took time."""
    ran = chosen[run.busy_s[chosen] > 0]
    return (run.energy_j[ran] / run.busy_s[ran]).tolist()


def relative_spread(run: Operations, chosen: Ints) -> float | None:
    """The standard deviation of operations' powers, relative to their mean."""
    found_w = powers_w(run, chosen)
    return statistics.stdev(found_w) / mean(found_w) if len(found_w) > 1 and mean(found_w) > 0 else None


def _level_later(shares: Sequence[float], third: int) -> float:
    """If the first is not below the average, nothing rises, so there is no level to reach."""
    spread = statistics.stdev(shares)
    rises = spread > 0 and shares[0] < mean(shares)
    return statistics.stdev(shares[third:]) / spread if rises else 1.0


def _layer_shares(work: Work) -> list[float]:
    """Each transformer's share of the encoder's forward pass, beginning at the input."""
    run = work.operations
    chosen = _encoder(run) & run.of("forward")
    layers = sorted({int(layer) for layer in run.layer[chosen] if layer >= 0})
    found = [_percent(run, run.layer == layer, chosen) for layer in layers]
    return [share for share in found if share is not None]


def _over(works: Sequence[Work], figure: Callable[[Operations], float | None]) -> list[float]:
    """The figure of each run that has it."""
    return [value for value in (figure(work.operations) for work in works) if value is not None]


def _percent(run: Operations, part: Mask, whole: Mask) -> float | None:
    ratio = _ratio(run.sum_j(part & whole), run.sum_j(whole))
    return None if ratio is None else 100 * ratio


def _ratio(part_j: float, whole_j: float) -> float | None:
    return part_j / whole_j if whole_j > 0 else None


def _in(run: Operations, *parts: str) -> Mask:
    return np.isin(run.part, parts)


def _encoder(run: Operations) -> Mask:
    return run.part == "encoder"


def _first(run: Operations) -> Mask:
    return run.layer == 0


def _any(run: Operations) -> Mask:
    return run.layer >= 0


# ALBERT, beside BERT with the same layers and hidden size (the paper's § 6.2).

_ENOUGH = 5  # runs, as in the paper
_Block = tuple[object, object, object, bool]  # phase, part, block, by matrix products


def albert_findings(group: OperationGroup) -> list[JudgedClaim]:
    albert = group.main("albert", "pretrain")
    if not albert:
        return []
    bert = group.of("bert", "pretrain", albert[0].shape)
    beside = [*_beside(group, albert, bert)] if bert else []
    return [_einsum(group, albert), *beside]


def _einsum(group: OperationGroup, albert: Sequence[Work]) -> JudgedClaim:
    runs = [work.summed for work in albert]
    einsums = [float((run.kind[run.top(TOP)] == "einsum").sum()) for run in runs]
    products = [float(run.product[run.top(TOP)].sum()) for run in runs]
    has_einsum = any((run.kind == "einsum").any() for run in runs)
    obstacle = "" if has_einsum else "this implementation runs einsum as other products, or has none"
    return group.finding(
        claims.ALBERT_EINSUM,
        albert,
        einsums,
        f"matrix products of any kind {shown(products, 'of 10')}",
        obstacle,
    )


def _beside(group: OperationGroup, albert: Sequence[Work], bert: Sequence[Work]) -> Iterator[JudgedClaim]:
    both = [*albert, *bert]
    pairs = rounds([albert, bert])
    alike = [_correlation(_by_block(a), _by_block(b)) for a, b in pairs]
    known = [value for value in alike if value is not None]
    obstacle = "" if known else "no operation here has the name of a block"
    yield group.finding(claims.ALBERT_ALIKE, both, known, obstacle=obstacle)

    ratios = [_mean(_top_j, a) / _mean(_top_j, b) for a, b in pairs if _mean(_top_j, b) > 0]
    steps = [_mean(_total_j, a) / _mean(_total_j, b) for a, b in pairs if _mean(_total_j, b) > 0]
    also = f"of a whole step {shown(steps, '')}" if steps else ""
    yield group.finding(claims.ALBERT_HALF, both, ratios, also)

    of_albert, of_bert = ([_power_w(work) for work in works] for works in (albert, bert))
    differences = [_mean(_power_w, a) - _mean(_power_w, b) for a, b in pairs]
    least = min((power_w for work in albert for power_w in _powers_w(work)), default=None)
    also = f"{shown(of_albert, 'W')} against {shown(of_bert, 'W')}; ALBERT's least {watts(least)}"
    yield group.finding(claims.ALBERT_POWER, both, differences, also, of_power=True)

    spread_albert, spread_bert = _spread_w(albert), _spread_w(bert)
    if spread_albert is None or spread_bert is None:
        few = f"it takes {_ENOUGH} runs of each: a deviation over fewer says little"
        yield group.finding(claims.ALBERT_POWER_SPREAD, both, [], obstacle=few, of_power=True)
    else:
        also = f"{watts(spread_albert)} against {watts(spread_bert)}"
        ratio = [spread_albert / spread_bert] if spread_bert > 0 else []
        yield group.finding(claims.ALBERT_POWER_SPREAD, both, ratio, also, of_power=True)


def _by_block(works: Sequence[Work]) -> dict[_Block, float]:
    """Names differ between the two. What a block does in a phase, and whether by products, does not."""
    found: dict[_Block, float] = {}
    for run in (work.summed for work in works):
        keys = zip(run.phase, run.part, run.block, run.product.tolist(), strict=True)
        for key, energy_j in zip(keys, run.energy_j.tolist(), strict=True):
            if key[1] == "encoder":
                found[key] = found.get(key, 0.0) + energy_j
    return found


def _correlation(a: dict[_Block, float], b: dict[_Block, float]) -> float | None:
    keys = sorted(a.keys() | b.keys(), key=str)
    try:
        return statistics.correlation([a.get(key, 0.0) for key in keys], [b.get(key, 0.0) for key in keys])
    except statistics.StatisticsError:  # fewer than two values, or all the same
        return None


def _mean(figure: Callable[[Work], float], works: Sequence[Work]) -> float:
    return mean([figure(work) for work in works])


def _total_j(work: Work) -> float:
    return work.total_j


def _top_j(work: Work) -> float:
    return float(work.summed.energy_j[work.summed.top(TOP)].sum())


def _powers_w(work: Work) -> list[float]:
    return powers_w(work.summed, work.summed.top(TOP))


def _power_w(work: Work) -> float:
    return statistics.fmean(_powers_w(work) or [0.0])


def _spread_w(works: Sequence[Work]) -> float | None:
    """The standard deviation over runs of a name's power, averaged over the ten that take most."""
    if len(works) < _ENOUGH:
        return None
    spread = average([work.summary for work in works]).spread
    std_w = column(spread, "power_std_w")[:TOP]  # rows with the most energy come first
    known = [value for value in std_w.tolist() if value == value]
    return mean(known) if known else None


# BERT's variants: what layers and hidden size do to energy and power (the paper's § 6.1).

Pair = tuple[Shape, Shape]
Variants = Mapping[Shape, Sequence[Work]]
Averaged = Sequence[Mapping[Shape, Footprint]]  # one entry per round
_CONSTANT = "power is the same for all operations here"


def variant_findings(group: OperationGroup) -> list[JudgedClaim]:
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


def _alike(
    group: OperationGroup, variants: Variants, averaged: Averaged, claim: Claim, quantity: Quantity
) -> JudgedClaim:
    """All pairs in each round of runs. The least alike decides, beside the score of constant power."""
    lowest: list[float] = []
    middle: list[float] = []
    constant: list[float] = []
    for of in averaged:
        footprints = list(of.values())
        known = _pairs(matrix(footprints, quantity, group.device))
        if known:
            lowest.append(min(known))
            middle.append(mean(known))
        # Constant power has no footprint of power to compare, so compare the energies that time alone gives.
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
    """Every pair once."""
    return _known([table[a][b].value for a, b in combinations(range(len(table)), 2)])


def _rises(group: OperationGroup, variants: Variants, averaged: Averaged) -> Iterator[JudgedClaim]:
    wider, deeper = _steps(variants, fixed=0), _steps(variants, fixed=1)
    if wider:
        yield _smallest(group, variants, averaged, claims.HIDDEN_POWER, wider, "power")
    if deeper:
        yield _smallest(group, variants, averaged, claims.LAYERS_POWER, deeper, "power")
        yield _smallest(group, variants, averaged, claims.LAYERS_ENERGY, deeper, "energy")


def _smallest(
    group: OperationGroup,
    variants: Variants,
    averaged: Averaged,
    claim: Claim,
    pairs: Sequence[Pair],
    quantity: Quantity,
) -> JudgedClaim:
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


def _few_wide(group: OperationGroup, variants: Variants, averaged: Averaged) -> Iterator[JudgedClaim]:
    """The paper's cell E, D: the widest with the fewest layers against the narrowest with the most."""
    layers, hidden = ({shape[side] for shape in variants} for side in (0, 1))
    narrow, wide = (max(layers), min(hidden)), (min(layers), max(hidden))
    if narrow == wide or len(hidden) < 2 or not {narrow, wide} <= set(variants):
        return
    differences = _known(_differences(group, averaged, (narrow, wide), "energy"))
    step = {shape: joules(mean([work.total_j for work in variants[shape]])) for shape in (wide, narrow)}
    also = f"a step of {_called(wide)} takes {step[wide]}, of {_called(narrow)} {step[narrow]}"
    yield group.finding(claims.HIDDEN_ENERGY, [*variants[wide], *variants[narrow]], differences, also)


def _differences(
    group: OperationGroup, averaged: Averaged, pair: Pair, quantity: Quantity
) -> list[float | None]:
    """The second less the first in each round of runs; None if they have no name in common."""
    return [mean_difference(of[pair[0]], of[pair[1]], quantity, group.device) for of in averaged]


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _steps(variants: Variants, fixed: int) -> list[Pair]:
    """Neighbours with the same layers (fixed 0) or hidden size (1), the smaller first."""
    same = sorted({shape[fixed] for shape in variants})
    rows = [sorted(shape for shape in variants if shape[fixed] == value) for value in same]
    return [pair for row in rows for pair in pairwise(row)]


def _all(variants: Variants) -> list[Work]:
    return [work for works in variants.values() for work in works]


def _called(shape: Shape) -> str:
    return f"L{shape[0]} H{shape[1]}"


__all__ = ["Claim", "JudgedClaim", "Verdict", "all_claims", "findings"]


def findings(results: Sequence[Result], out: Path | None = None) -> list[JudgedClaim]:
    """By study, then by framework and precision. `out` is the study's folder, which has the overhead."""
    # Imported here, because it takes `JudgedClaim` from us.
    from smaragdine.study.precision import precision_findings

    by_group = groups(results)
    return [
        *(finding for group in by_group for finding in bert_findings(group)),
        *(finding for group in by_group for finding in variant_findings(group)),
        *(finding for group in by_group for finding in albert_findings(group)),
        *precision_findings(results, out),
    ]


def all_claims() -> list[Claim]:
    """What is compared and how it is judged, as the docs print it."""
    from smaragdine.study import precision

    return [*claims.PAPER_CLAIMS, *claims.CASE_CLAIMS, *precision.PRECISION_CLAIMS]
