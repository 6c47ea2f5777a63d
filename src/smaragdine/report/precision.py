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
    return Group(Text(""), table, Text(_NOTE, style="dim"))


def widening_table(found: Widening) -> RenderableType:
    """ASSW: one experiment against more of them."""
    lines = [Line(f"the first {score.n}, itself among them", _figures(score)) for score in found.pooled]
    lines += [
        Line(f"{score.n} other{'s' if score.n > 1 else ''}", _figures(score)) for score in found.disjoint
    ]
    return Group(
        FittingTable("experiments pooled (ASSW)", _HEADERS, lines, ("names",)), Text(_NOTE, style="dim")
    )


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
