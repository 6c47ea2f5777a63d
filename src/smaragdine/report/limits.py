"""Prints fits, sweeps and tuning against a limit, as tables for a terminal or a paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from smaragdine.report.live import RunsDisplay
from smaragdine.report.terminal import FittingTable, Line
from smaragdine.sweep.fit import (
    ALPHA,
    SINGLE,
    Analysis,
    GroupFit,
    Parabola,
    below_limits,
    judge,
    rests_on,
    saved,
    slower,
)
from smaragdine.sweep.measurements import Value
from smaragdine.sweep.plan import Plan, Task, command_words
from smaragdine.sweep.sweep import Progress
from smaragdine.sweep.table import Repetition
from smaragdine.tuning.process import PartSaved, Searched, TuneOutcome
from smaragdine.units import joule_seconds, joules, seconds, si, watts

# Fits.

TITLES = {
    "energy": "Energy",
    "time": "Time",
    "edp": "Energy × delay",
    "ed2p": "Energy × delay²",
    "power": "Mean power",
}
_OF = {"program": " of the whole program", "steps": " of the steps"}
_BEST, _OPTIMUM = "best", "optimum"
_HEADERS = ("limits", _BEST, "there", "saved", "slower", _OPTIMUM, "R²", "remark")
_GIVES_WAY = ("limits", "there", "slower", "saved")


@dataclass(frozen=True)
class _Roomy:
    """A table in which names stay on one line as long as figures can give way."""

    title: str
    headers: Sequence[str]
    lines: Sequence[Line]
    left: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        headers = list(self.headers)
        longest = max(len(self.title), *(len(line.name) for line in self.lines))
        for header in [h for word in _GIVES_WAY for h in self.headers if h.split(" (")[0] == word]:
            widths = [max(len(h), *(len(line.figures.get(h, "")) for line in self.lines)) for h in headers]
            if longest + sum(widths) + 2 * len(widths) <= options.max_width:
                break
            headers.remove(header)
        yield FittingTable(self.title, headers, self.lines, (), self.left)
        dropped = [header for header in self.headers if header not in headers]
        if dropped:
            yield Text(f"no room for {', '.join(dropped)}", style="dim")


def label(by: Mapping[str, Value], names: Sequence[str] | None = None) -> str:
    """A group in words: the values of its columns, or of those named."""
    values = [by[name] for name in (by if names is None else names) if name in by]
    return " ".join("–" if value is None else str(value) for value in values) or "all"


def varying(found: Analysis) -> tuple[list[str], str]:
    """The columns that tell groups apart, and in words what all of them have in common."""
    names = telling([of.group.by for of in found.groups])
    first = found.groups[0].group.by
    return names, ", ".join(f"{name} {value}" for name, value in first.items() if name not in names)


def telling(groups: Sequence[Mapping[str, Value]]) -> list[str]:
    """The columns in which groups differ. Experiments of one sweep may have different columns."""
    names = dict.fromkeys(name for by in groups for name in by)
    return [name for name in names if len({str(by.get(name)) for by in groups}) > 1]


def value_text(quantity: str, value: float) -> str:
    show = {"energy": joules, "time": seconds, "edp": joule_seconds, "power": watts}
    return show[quantity](value) if quantity in show else si(value, "J·s²")


def of_words(of: GroupFit) -> str:
    """What time and energy cover, to put after their names."""
    return _OF.get(of.group.of or "", "")


def limit_text(limit: float, unit: str) -> str:
    return f"{limit:.4g}{' ' if unit else ''}{unit}"


def fit_tables(found: Analysis, quantities: Sequence[str]) -> RenderableType:
    """One table per quantity, one line per group, and notes that help to read them."""
    names, common = varying(found)
    units = {each.group.unit for each in found.groups}
    unit = f" ({units.pop()})" if len(units) == 1 and "" not in units else ""
    with_unit = {_BEST: _BEST + unit, _OPTIMUM: _OPTIMUM + unit}
    headers = [with_unit.get(header, header) for header in _HEADERS]
    parts: list[RenderableType] = []
    for quantity in quantities:
        lines = [
            Line(line.name, {with_unit.get(h, h): text for h, text in line.figures.items()}, line.style)
            for line in (_line(each, quantity, names) for each in found.groups)
        ]
        title = TITLES[quantity] + of_words(found.groups[0]) + (f": {common}" if common else "")
        table = _Roomy(" ".join(names) or "group", headers, lines, ("remark",))
        parts += [Text(title, style="bold"), table, Text("")]
    parts += [Text(note, style="dim") for note in _notes(found, quantities)]
    parts += [
        Text.assemble(("! ", "yellow"), f"{label(by)} is left out: {why}") for by, why in found.left_out
    ]
    return Group(*parts)


def front_table(found: Analysis) -> RenderableType:
    """The limits that no other beats in both time and energy."""
    names, _ = varying(found)
    header = "fastest → least energy"
    lines = [
        Line(label(each.group.by, names), {header: _listed(each.front, each.group.unit)})
        for each in found.groups
    ]
    title = Text(f"Pareto front of time and energy{of_words(found.groups[0])}", style="bold")
    return Group(title, _Roomy(" ".join(names) or "group", (header,), lines, (header,)))


def _line(each: GroupFit, quantity: str, names: Sequence[str]) -> Line:
    fit = each.parabolas[quantity]
    part = saved(fit)
    interval = "" if fit.interval is None else f" ({_round(fit.interval[0])}–{_round(fit.interval[1])})"
    remarks = _remarks(each, quantity)
    return Line(
        label(each.group.by, names),
        {
            "limits": _counted(fit),
            _BEST: _round(fit.best_measured),
            "there": value_text(quantity, fit.measured_at(fit.best_measured)),
            "saved": "–" if part is None else f"{part:.1%}",
            "slower": f"{slower(each, fit.best_measured):+.1%}".replace("-", "−"),
            _OPTIMUM: "–" if judge(fit)[0] is False else f"{_round(fit.optimum)}{interval}",
            "R²": "–" if fit.r2 is None else f"{fit.r2:.3f}",
            "remark": ", ".join(remarks),
        },
        "dim" if {"below", "chance", "misfit"} & {*remarks} else "",
    )


def _counted(fit: Parabola) -> str:
    limits, measurements = len(set(fit.limits.tolist())), fit.values.size
    return f"{limits}" if limits == measurements else f"{limits} ({measurements})"


def _remarks(of: GroupFit, quantity: str) -> list[str]:
    fit = of.parabolas[quantity]
    words = ["edge" if fit.edge and judge(fit)[0] is not False else "", _verdict(of, quantity)]
    return [word for word in (*words, "mixed" if of.group.differing else "") if word]


def _verdict(of: GroupFit, quantity: str) -> str:
    """One word for a table's line; the notes below say more."""
    fit = of.parabolas[quantity]
    fits, _ = judge(fit)
    if fits is None:
        return "not tested"
    if fits:
        return ""
    if below_limits(of):
        return "below"
    return "chance" if fit.r2 is None or (fit.effect_p or 0.0) >= ALPHA else "misfit"


def _notes(found: Analysis, quantities: Sequence[str]) -> list[str]:
    fits = [each.parabolas[name] for each in found.groups for name in quantities]
    words = [_remarks(each, name) for each in found.groups for name in quantities]
    differing = ", ".join(sorted({name for each in found.groups for name in each.group.differing}))
    bases = sorted({rests_on(fit) for fit in fits if fit.freedom})
    notes = [
        "best: the limit with the least, as measured; saved, slower: there, against the highest limit",
        "optimum: minimum of the fit within the measured limits (95 % interval, if it is a parabola)",
    ]
    if found.groups[0].group.of:
        notes.append("energy: all that the device used meanwhile, what other programs took included")
    named = sorted({each.group.limit_name for each in found.groups if not each.group.unit} - {""})
    if named:
        notes.insert(0, f"limit: the value of {', '.join(named)}")
    if any(judge(fit)[0] is False for fit in fits):
        notes.append("–: no optimum where the model does not fit")
    if found.groups[0].group.of == "steps":
        notes.append("of the steps: all of them, at their mean from the first one's end to the last one's")
    if bases:
        single = ": noise and misfit cannot be told apart" if SINGLE in bases else ""
        notes.append(f"interval and band rest on {' and on '.join(bases)}{single}")
    meanings = {
        "edge": "the vertex lies outside, or the parabola opens downwards: the better end is given",
        "below": "the model does not fit: the program draws less than the lowest limit",
        "chance": "the model does not fit: the limit explains no more than chance may",
        "misfit": "the model does not fit: measurements lie off the parabola",
        "not tested": "three measurements determine a parabola: none is left",
        "mixed": f"rows of one limit differ in {differing}: if these are no repetitions, name it with --by",
    }
    for word, meaning in meanings.items():
        if count := sum(word in each for each in words):
            notes.append(f"{word} ({count} of {len(words)}): {meaning}")
    return notes


def _round(limit: float) -> str:
    return f"{limit:.0f}" if abs(limit) >= 100 else f"{limit:.3g}"


def _listed(limits: Sequence[float], unit: str) -> str:
    return ", ".join(f"{limit:.4g}" for limit in limits) + (f" {unit}" if unit else "")


# A sweep on the terminal: its plan and its progress.

_MOST_ROWS = 200


def plan_table(plan: Plan, left: Sequence[Task]) -> RenderableType:
    """Every repetition that is left, in order; of a long plan only the beginning."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("", "experiment", "benchmark", "setting", "repetition", "command"):
        table.add_column(header, justify="right" if header in ("", "repetition") else "left")
    for n, task in enumerate(left[:_MOST_ROWS], 1):
        words = " ".join(command_words(plan.benchmark(task), task.setting))
        cells = [task.experiment, task.benchmark, str(task.setting), str(task.repetition + 1), words]
        table.add_row(str(n), *cells)
    if len(left) > _MOST_ROWS:
        table.add_row("…", f"{len(left) - _MOST_ROWS} more")
    return table


def row_words(task: Task, row: Repetition) -> str:
    """`small 150 W #2: 12.1 s, 1.82 kJ`."""
    what = f"{task.benchmark} {task.setting} #{task.repetition + 1}"
    if row.status != "complete":
        return f"{what}: {row.status}"
    energy_j = row.energy_j if row.energy_j is not None else row.energy_counter_j
    if row.time_s is None or energy_j is None:
        return f"{what}: not measured"
    return f"{what}: {seconds(row.time_s)}, {joules(energy_j)}"


class SweepDisplay(RunsDisplay):
    """Shows how a sweep goes; says `first` once it is sure to begin."""

    def __init__(self, note: Callable[[str], None], total: int, first: str) -> None:
        super().__init__(note, total)
        self._first = first

    def ready(self) -> None:
        self.say(self._first)

    def begin(self, task: Task, node: str, progress: Progress) -> None:
        self.show(f"{task.benchmark} {task.setting} #{task.repetition + 1}", progress)

    def end(self, task: Task, row: Repetition, progress: Progress) -> None:
        self.ended(row_words(task, row), progress)


_MOST_SEARCHES = 3


def tune_tables(found: TuneOutcome) -> list[Table]:
    """The limits of each of the last searches."""
    return [_search_table(search) for search in found.searches[-_MOST_SEARCHES:]]


def tune_lines(found: TuneOutcome) -> Iterator[str]:
    """All there is to say, line by line."""
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


def _searched(found: TuneOutcome, search: Searched) -> str:
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


def _part(part: PartSaved, more: str, less: str) -> str:
    if part.part < 0:
        part, more = PartSaved(-part.part, -part.high, -part.low), less
    return f"{100 * part.part:.1f} % [{100 * part.low:.1f}, {100 * part.high:.1f}] {more}"


def _search_table(search: Searched) -> Table:
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
