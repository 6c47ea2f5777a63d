"""Prints what changed between runs, and how precise footprints are, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from smaragdine.accounting.comparison import GONE, NEW, Change, Comparison
from smaragdine.accounting.precision import Score, Widening
from smaragdine.accounting.similarity import Correlation, Key
from smaragdine.errors import visible
from smaragdine.report.terminal import FittingTable, Line, plain_table
from smaragdine.units import joules, plus_minus, watts

_FEW = 5
_STYLE = {
    "more": "red",
    "less": "green",
    "inside the noise": "dim",
    "unknown": "yellow",
    GONE: "blue",
    NEW: "magenta",
}


def comparison_tables(comparison: Comparison, top: int) -> RenderableType:
    parts: list[RenderableType] = [Text(comparison.what, style="dim"), Text("")]
    parts += [_device_table(comparison), Text(""), _score_table(comparison)]
    parts += [Text(line, style="dim") for line in _undefined(comparison)]
    if comparison.changes:
        parts += [Text(""), _change_table(comparison.changes[:top], comparison.noise)]
        if len(comparison.changes) > top:
            parts.append(Text(f"… and {len(comparison.changes) - top} more names", style="dim"))
    parts += _alone("A", GONE, comparison.only_a) + _alone("B", NEW, comparison.only_b)
    parts += [Text(""), Text(_sentence(comparison.verdict), style="bold")]
    parts += [Text.assemble(("! ", "yellow"), remark) for remark in comparison.remarks]
    return Group(*parts)


def matrix_tables(
    labels: Sequence[str], matrices: Sequence[tuple[str, Sequence[Sequence[Correlation]]]]
) -> RenderableType:
    """How alike many runs are, each to each, in several quantities."""
    letters = [letter(i) for i in range(len(labels))]
    parts: list[RenderableType] = [
        Text(f"{name}  {label}") for name, label in zip(letters, labels, strict=True)
    ]
    for title, rows in matrices:
        table = plain_table(title, *letters)
        for name, row in zip(letters, rows, strict=True):
            table.add_row(visible(name), *(correlation_text(score) for score in row))
        reasons = dict.fromkeys(score.reason for row in rows for score in row if score.reason)
        parts += [Text(""), table, *(Text(f"–: {reason}", style="dim") for reason in reasons)]
    return Group(*parts)


def _headers(noise: str) -> tuple[str, ...]:
    return ("A", "B", "B − A", noise, "verdict")


def _device_table(comparison: Comparison) -> FittingTable:
    shown = [*comparison.devices]
    if len(shown) != 1:
        shown.append(comparison.total)
    shown.append(comparison.idle)
    noise = comparison.noise
    lines = [Line(change.name, _figures(change, noise)) for change in shown]
    lines += [
        Line(f"{one.name}, shared by no operation", _figures(one, noise)) for one in comparison.unshared
    ]
    return FittingTable("device", _headers(noise), lines, (noise, "verdict"), left=("verdict",))


def _change_table(changes: Sequence[Change], noise: str) -> FittingTable:
    lines = [Line(change.name, _figures(change, noise)) for change in changes]
    headers = ("phase", *_headers(noise))
    return FittingTable("changed most", headers, lines, (noise, "phase", "A", "B"), left=("phase", "verdict"))


def _figures(change: Change, noise: str) -> dict[str, str | Text]:
    return {
        "phase": visible(change.phase or "–"),
        "A": _mean_std(change.a_j, change.a_std_j),
        "B": _mean_std(change.b_j, change.b_std_j),
        "B − A": joules(change.difference_j),
        noise: joules(change.half_width_j),
        "verdict": Text(change.verdict, style=_STYLE[change.verdict]),
    }


def _mean_std(mean_j: float, std_j: float | None) -> str:
    return joules(mean_j) if std_j is None else plus_minus(mean_j, std_j, "J")


def _score_table(comparison: Comparison) -> Table:
    of = comparison.scores
    table = plain_table("similarity", "correlation", "by time alone", "mean difference", "names")
    for name, score, time, difference in (
        ("energy", of.energy, of.time_alone_energy, joules(comparison.mean_difference_j)),
        ("power", of.power, of.time_alone_power, watts(comparison.mean_difference_w)),
    ):
        table.add_row(name, correlation_text(score), correlation_text(time), difference, str(score.common))
    return table


def _undefined(comparison: Comparison) -> list[str]:
    of = comparison.scores
    named = (
        ("energy", of.energy),
        ("power", of.power),
        ("energy by time alone", of.time_alone_energy),
        ("power by time alone", of.time_alone_power),
    )
    reasons: dict[str, list[str]] = {}
    for name, score in named:
        if score.value is None:
            by_definition = score is of.time_alone_power and score.common > 1
            reason = "by time alone all names have the same power" if by_definition else score.reason
            reasons.setdefault(reason, []).append(name)
    return [f"no correlation of {', '.join(names)}: {reason}" for reason, names in reasons.items()]


def correlation_text(score: Correlation) -> str:
    return "–" if score.value is None else f"{score.value:.4f}"


def _alone(side: str, verdict: str, names: Sequence[tuple[Key, float]]) -> list[RenderableType]:
    if not names:
        return []
    said = Text(verdict, style=_STYLE[verdict])
    lines = [
        Line(name, {"phase": visible(phase or "–"), "energy": joules(energy_j), "verdict": said})
        for (name, phase), energy_j in names[:_FEW]
    ]
    if len(names) > _FEW:
        lines.append(Line("…", {"energy": joules(sum(energy_j for _, energy_j in names[_FEW:]))}))
    table = FittingTable(
        f"only in {side}: {len(names)}",
        ("phase", "energy", "verdict"),
        lines,
        ("phase",),
        left=("phase", "verdict"),
    )
    return [Text(""), table]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def letter(i: int) -> str:
    """Counts in letters: a … z, then a1 … z1 and so on."""
    return chr(ord("a") + i % 26) + (str(i // 26) if i >= 26 else "")


# How precise footprints are.

_SCORES = ("energy", "times against energy", "power", "names")
_SCORE_NOTE = (
    "times against energy: the score of busy times without any power; above it is what the sensor adds"
)


def thinned_table(scores: Mapping[str, Sequence[Score]]) -> RenderableType:
    """ASSS: the footprint from every k-th reading against that from all."""
    lines = [
        Line(f"{device}  every {_ordinal(score.n)}", _score_figures(score))
        for device, of_device in scores.items()
        for score in of_device
    ]
    table = FittingTable("readings kept (ASSS)", _SCORES, lines, ("names",))
    all_scores = [score for of_device in scores.values() for score in of_device]
    return Group(Text(""), table, *_notes(all_scores, "A: by all readings, B: by those kept"))


def widening_table(found: Widening) -> RenderableType:
    """ASSW: one experiment against more and more of them."""
    lines = [Line(f"the first {score.n}, itself among them", _score_figures(score)) for score in found.pooled]
    lines += [
        Line(f"{score.n} other{'s' if score.n > 1 else ''}", _score_figures(score))
        for score in found.disjoint
    ]
    table = FittingTable("experiments pooled (ASSW)", _SCORES, lines, ("names",))
    return Group(table, *_notes([*found.pooled, *found.disjoint], "A: the first, B: those pooled"))


def _notes(scores: Sequence[Score], sides: str) -> list[Text]:
    found = [
        each for score in scores for each in (score.scores.energy, score.scores.floor, score.scores.power)
    ]
    reasons = dict.fromkeys(
        f"–: {each.reason} ({sides})" for each in found if each.value is None and each.reason
    )
    return [Text(line, style="dim") for line in (_SCORE_NOTE, *reasons)]


def _score_figures(score: Score) -> dict[str, str]:
    found = score.scores
    return {
        "energy": correlation_text(found.energy),
        "times against energy": correlation_text(found.floor),
        "power": correlation_text(found.power),
        "names": str(found.energy.common),
    }


def _ordinal(n: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(n % 10 if n % 100 not in (11, 12, 13) else 0, "th")
    return f"{n}{ending} reading"
