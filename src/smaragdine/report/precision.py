"""How alike footprints stay with fewer readings or more runs, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from smaragdine.accounting.precision import Score, Widening
from smaragdine.report.comparison import correlation_text
from smaragdine.report.fitting import FittingTable, Line

_HEADERS = ("energy", "times against energy", "power", "names")
_NOTE = "times against energy: the score of busy times without any power; above it is what the sensor adds"


def thinned_table(scores: Mapping[str, Sequence[Score]]) -> RenderableType:
    """ASSS: every k-th reading against all of them."""
    lines = [
        Line(f"{device}  every {_ordinal(score.n)}", _figures(score))
        for device, of_device in scores.items()
        for score in of_device
    ]
    table = FittingTable("readings kept (ASSS)", _HEADERS, lines, ("names",))
    all_scores = [score for of_device in scores.values() for score in of_device]
    return Group(Text(""), table, *_notes(all_scores, "A: by all readings, B: by those kept"))


def widening_table(found: Widening) -> RenderableType:
    """ASSW: one experiment against more of them."""
    lines = [Line(f"the first {score.n}, itself among them", _figures(score)) for score in found.pooled]
    lines += [
        Line(f"{score.n} other{'s' if score.n > 1 else ''}", _figures(score)) for score in found.disjoint
    ]
    table = FittingTable("experiments pooled (ASSW)", _HEADERS, lines, ("names",))
    return Group(table, *_notes([*found.pooled, *found.disjoint], "A: the first, B: those pooled"))


def _notes(scores: Sequence[Score], sides: str) -> list[Text]:
    found = [
        each for score in scores for each in (score.scores.energy, score.scores.floor, score.scores.power)
    ]
    reasons = dict.fromkeys(
        f"–: {each.reason} ({sides})" for each in found if each.value is None and each.reason
    )
    return [Text(line, style="dim") for line in (_NOTE, *reasons)]


def _figures(score: Score) -> dict[str, str]:
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
