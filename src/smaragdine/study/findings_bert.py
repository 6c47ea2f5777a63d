"""Findings on BERT itself: where the energy of a step goes, and what the stages take (the paper's § 5)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from smaragdine.arrays import Ints
from smaragdine.study import claims
from smaragdine.study.roles import Mask, Operations
from smaragdine.study.settings import STAGES
from smaragdine.study.verdicts import Finding, mean, shown
from smaragdine.study.work import Group, Work, rounds

TOP = 10
_LEAST_LAYERS = 6  # for a third of them to be more than one
_FEED_FORWARD = ("intermediate", "output")
_UNNAMED = "no operation here has the name of a transformer"
_NO_BACKWARD = "no operation here is of the backward pass"


def bert_findings(group: Group) -> list[Finding]:
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


def _parts(group: Group, works: Sequence[Work]) -> Iterator[Finding]:
    """The paper speaks of embedding and encoding; heads and loss are said beside it."""
    model = ("embeddings", "encoder", "pooler")
    alone, with_heads = (
        _over(works, lambda run, of=parts: _percent(run, _encoder(run), _in(run, *of) & run.of("forward")))
        for parts in (model, (*model, "heads"))
    )
    if any(alone):
        also = f"of the whole forward pass, heads and loss included, {shown(with_heads, '%')}"
        yield group.finding(claims.ENCODER_SHARE, works, alone, also)
    else:  # without an encoder that has a name there is nothing to take a share of
        yield group.finding(claims.ENCODER_SHARE, works, [], obstacle=_UNNAMED)


def _transformers(group: Group, works: Sequence[Work]) -> Iterator[Finding]:
    # A transformer that no reading of power fell upon has none, and no share to compare.
    shares = [share for share in map(_layer_shares, works) if len(share) > 1 and min(share) > 0]
    obstacle = "" if shares else _UNNAMED
    layers = min(map(len, shares), default=12)
    spread = [statistics.stdev(each) for each in shares]
    also = f"{shown(spread, '%')} the deviation over the {layers} transformers" if shares else ""
    means = [mean(each) for each in shares]
    yield group.finding(claims.transformer_share(layers), works, means, also, obstacle)
    uneven = [100 * each / middle for each, middle in zip(spread, means, strict=True)]
    # The paper explains both by the power that a step begins with.
    yield group.finding(claims.TRANSFORMER_SPREAD, works, uneven, "", obstacle, of_power=True)
    first = [100 * (each[0] / middle - 1) for each, middle in zip(shares, means, strict=True)]
    third = max(1, layers // 3)
    early = [100 * (mean(each[:third]) / mean(each[third:]) - 1) for each in shares]
    also = f"the first {third} of {layers} against the others {shown(early, '%')}" if shares else ""
    yield group.finding(claims.FIRST_LOWER, works, first, also, obstacle, of_power=True)
    few = "" if layers >= _LEAST_LAYERS else f"fewer than {_LEAST_LAYERS} transformers"
    level = [] if few else [_level_later(each, third) for each in shares]
    yield group.finding(claims.LEVEL_LATER, works, level, "", obstacle or few, of_power=True)


def _attention(group: Group, works: Sequence[Work]) -> Iterator[Finding]:
    """Of the first transformer, as in the paper, and of all."""

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


def _dense(group: Group, works: Sequence[Work]) -> Finding:
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


def _top(group: Group, works: Sequence[Work]) -> Iterator[Finding]:
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


def _products_power(group: Group, works: Sequence[Work]) -> Finding:
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


def _stages(group: Group) -> Iterator[Finding]:
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
    """Of as many steps as the paper's stage has."""
    facts = work.result.facts
    return work.total_j * claims.stage_steps(str(facts["stage"]), int(facts.get("batch", 1)))


def _stage_mean_j(works: Sequence[Work]) -> float:
    return mean([stage_total_j(work) for work in works])


def powers_w(run: Operations, chosen: Ints) -> list[float]:
    """Of those that took time."""
    ran = chosen[run.busy_s[chosen] > 0]
    return (run.energy_j[ran] / run.busy_s[ran]).tolist()


def relative_spread(run: Operations, chosen: Ints) -> float | None:
    """The standard deviation of operations' powers, of their mean."""
    found_w = powers_w(run, chosen)
    return statistics.stdev(found_w) / mean(found_w) if len(found_w) > 1 and mean(found_w) > 0 else None


def _level_later(shares: Sequence[float], third: int) -> float:
    """Where the first is not below the average nothing rises, and there is no level to come to."""
    spread = statistics.stdev(shares)
    rises = spread > 0 and shares[0] < mean(shares)
    return statistics.stdev(shares[third:]) / spread if rises else 1.0


def _layer_shares(work: Work) -> list[float]:
    """Each transformer's share of the encoder's forward pass, from the input on."""
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
