"""What tuning a program's power limit came to, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from smaragdine.sweep.tune.outcome import Outcome, Part, Searched
from smaragdine.units import joules, seconds

_MOST_SEARCHES = 3


def tune_tables(found: Outcome) -> list[Table]:
    """The limits of each of the last searches."""
    return [_table(search) for search in found.searches[-_MOST_SEARCHES:]]


def tune_lines(found: Outcome) -> Iterator[str]:
    """What is to be said, in one line each."""
    if not found.searches:
        yield "no limit was tried: " + (found.problem or "the program ended before enough steps were seen")
        return
    left_out = len(found.searches) - _MOST_SEARCHES
    if left_out > 0:
        yield f"{left_out} earlier searches are in tune.json"
    for search in found.searches[-_MOST_SEARCHES:]:
        yield _searched(found, search)
        if search.chosen_w is not None:
            yield _cost(search)
    if found.saved_j is not None:
        word = "saved" if found.saved_j >= 0 else "lost"
        words = f"{word} about {joules(abs(found.saved_j))} in all against {found.reference_w:g} W"
        yield f"{words} (estimated from the slices)"
    if found.problem:
        yield f"tuning ended early: {found.problem}"
    yield from found.notes


def _searched(found: Outcome, search: Searched) -> str:
    if search.chosen_w is None:
        return f"{len(search.tried)} limits tried{_after(search)}, and none settled on before the end"
    line = f"settled on {search.chosen_w:g} W{_after(search)}"
    if search.saved is None or search.slower is None:
        return f"{line}, the limit that was set before"
    saved = _part(search.saved, "less energy", "more energy")
    slower = _part(search.slower, "more time", "less time")
    return f"{line}: {saved} and {slower} a step than at {found.reference_w:g} W"


def _after(search: Searched) -> str:
    return f" after {search.why}" if search.why else ""


def _cost(search: Searched) -> str:
    line = f"trying took {seconds(search.trying_s)}"
    if search.trying_extra_j is None or search.trying_extra_s is None:
        return line
    energy = _more(search.trying_extra_j, joules(abs(search.trying_extra_j)))
    time = _more(search.trying_extra_s, seconds(abs(search.trying_extra_s)))
    return f"{line}; its steps took {energy} and {time} than at {search.chosen_w:g} W"


def _more(value: float, words: str) -> str:
    return f"{words} {'more' if value >= 0 else 'less'}"


def _part(part: Part, more: str, less: str) -> str:
    if part.part < 0:
        part, more = Part(-part.part, -part.high, -part.low), less
    return f"{100 * part.part:.1f} % [{100 * part.low:.1f}, {100 * part.high:.1f}] {more}"


def _table(search: Searched) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("limit", "slices", "steps", "time a step", "energy a step", "power", ""):
        table.add_column(name, justify="left" if not name else "right")
    for tried in search.tried:
        table.add_row(
            f"{tried.limit_w:g} W",
            str(tried.slices),
            str(tried.steps),
            f"{seconds(tried.time_s)} ± {_percent(tried.time_interval_s, tried.time_s)}",
            f"{joules(tried.energy_j)} ± {_percent(tried.energy_interval_j, tried.energy_j)}",
            f"{tried.power_w:.0f} W",
            "chosen" if tried.limit_w == search.chosen_w else "",
        )
    return table


def _percent(half: float, value: float) -> str:
    return f"{100 * half / value:.1f} %"
