"""Findings on ALBERT, beside BERT of the same layers and hidden size (the paper's § 6.2)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from smaragdine.accounting.arithmetic import average
from smaragdine.accounting.rows import column
from smaragdine.study import claims_cases as claims
from smaragdine.study.findings_bert import TOP, powers_w
from smaragdine.study.verdicts import Finding, mean, shown
from smaragdine.study.work import Group, Work, rounds
from smaragdine.units import watts

_ENOUGH = 5  # runs, as the paper has them
_Block = tuple[object, object, object, bool]  # phase, part, block, by matrix products


def albert_findings(group: Group) -> list[Finding]:
    albert = group.main("albert", "pretrain")
    if not albert:
        return []
    bert = group.of("bert", "pretrain", albert[0].shape)
    beside = [*_beside(group, albert, bert)] if bert else []
    return [_einsum(group, albert), *beside]


def _einsum(group: Group, albert: Sequence[Work]) -> Finding:
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


def _beside(group: Group, albert: Sequence[Work], bert: Sequence[Work]) -> Iterator[Finding]:
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
    """Names of the two differ; what a block does in a phase, and whether by products, does not."""
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
    except statistics.StatisticsError:  # fewer than two, or all the same
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
    """The standard deviation over runs of a name's power, mean over the ten that take most."""
    if len(works) < _ENOUGH:
        return None
    spread = average([work.summary for work in works]).spread
    std_w = column(spread, "power_std_w")[:TOP]  # rows are by falling energy
    known = [value for value in std_w.tolist() if value == value]
    return mean(known) if known else None
