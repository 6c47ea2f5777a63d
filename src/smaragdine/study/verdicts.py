"""A finding: a claim of the paper, the number here, and by which rule the two agree or differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from smaragdine.units import plus_minus, si

Verdict = Literal["agrees", "differs", "not comparable"]


@dataclass(frozen=True)
class Finding:
    key: str  # with framework and precision: encoder-share-torch-fp32
    study: str  # bert, variants, albert, precision
    question: str
    here: str
    there: str
    here_value: float | None
    there_value: float | None
    verdict: Verdict
    why: str  # the rule that decided, or why the two cannot be compared
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """`agrees` of the number in each run."""

    text: str
    agrees: Callable[[Sequence[float]], bool]
    by_spread: bool = False  # takes the deviation over runs into account


@dataclass(frozen=True)
class Claim:
    """What the paper says, and the rule; docs print these."""

    name: str
    study: str
    question: str
    there: str
    there_value: float | None
    unit: str  # of the number here
    rule: Rule
    section: str  # of the paper


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation; of one run there is none."""
    return statistics.stdev(values) if len(values) > 1 else None


def _noise(values: Sequence[float]) -> float:
    """Two standard errors of the mean; of one run none is known."""
    spread = deviation(values)
    return 0.0 if spread is None else 2 * spread / math.sqrt(len(values))


def near(there: float, points: float, unit: str) -> Rule:
    """The paper gives no deviation of most figures: a fixed distance stands for it."""
    return Rule(
        f"agrees if within {points:g} {unit} or two standard errors over runs, whichever is wider",
        lambda values: abs(mean(values) - there) <= max(points, _noise(values)),
        by_spread=True,
    )


def within_factor(there: float, factor: float) -> Rule:
    return Rule(
        f"agrees if within a factor of {factor:g}",
        lambda values: there / factor <= mean(values) <= there * factor,
    )


def above(bound: float, unit: str) -> Rule:
    return Rule(f"agrees if above {bound:g} {unit}".rstrip(), lambda values: mean(values) > bound)


def below(bound: float, unit: str) -> Rule:
    return Rule(f"agrees if below {bound:g} {unit}".rstrip(), lambda values: mean(values) < bound)


def at_least(bound: float, unit: str) -> Rule:
    return Rule(f"agrees if at least {bound:g} {unit}".rstrip(), lambda values: mean(values) >= bound)


def signed(sign: int) -> Rule:
    """Of a difference."""
    word = "above" if sign > 0 else "below"

    return Rule(
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
) -> Finding:
    """`also`: more numbers, after the one that is judged. `obstacle`: why it cannot be compared."""
    obstacle = obstacle or ("" if values else "no run here has it")
    if len(values) == 1 and claim.rule.by_spread and not obstacle:
        remarks = ["of one run there is no deviation", *remarks]
    verdict: Verdict = "not comparable" if obstacle else "agrees" if claim.rule.agrees(values) else "differs"
    return Finding(
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
    """Counts that are the same in all runs need none; a number below 1 needs more than one above."""
    if all(value == round(value) for value in values) and len(set(values)) == 1:
        return 0
    return 2 if abs(mean(values)) >= 1 else 3
