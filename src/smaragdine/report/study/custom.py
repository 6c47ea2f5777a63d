"""A user's own program as a study, on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from smaragdine.accounting.similarity import Correlation
from smaragdine.report.comparison import letter, matrix_tables
from smaragdine.study.custom import Customs
from smaragdine.units import joules, plus_minus, seconds, watts


def customs_tables(found: Customs) -> RenderableType:
    """A line for each setting; then how alike they are, and by how much they differ."""
    table = _table(
        "setting", "runs", "energy", "time", "power", "runs\nalike", "power\nalike", "fewer\nreadings"
    )
    for own in found.settings:
        one = own.energy_std_j is None
        energy = joules(own.energy_j) if one else plus_minus(own.energy_j, own.energy_std_j or 0.0, "J")
        power = "–" if not own.step_s else watts(own.energy_j / own.step_s)
        scores = map(_score, (own.alike, own.alike_power, own.asss))
        table.add_row(own.name, str(own.runs), energy, seconds(own.step_s), power, *scores)
    provenance = ", ".join(dict.fromkeys(own.provenance for own in found.settings))
    of = found.device or "all devices"
    parts: list[RenderableType] = [
        table,
        Text(f"of a step on all devices, power {provenance}; ± is the standard deviation over runs", "dim"),
        Text(f"alike: the lowest similarity on {of}: of two runs; of every n-th reading to all", "dim"),
    ]
    if len(found.settings) > 1:
        labels = [own.name for own in found.settings]
        matrices = [
            ("energy", found.energy),
            ("power", found.power),
            ("energy by time alone", found.time_alone),
        ]
        parts += [Text(""), Text(f"similarity of a step on {of}, layers merged", style="bold")]
        parts += [matrix_tables(labels, matrices)]
        parts += [Text(""), Text("row − column, the mean over names that both have", style="bold")]
        parts += [Text(""), _differences("energy", found.difference_j, joules)]
        parts += [Text(""), _differences("power", found.difference_w, watts)]
    return Group(*parts)


def customs_json(found: Customs) -> dict[str, Any]:
    return {
        "device": found.device,
        "settings": [asdict(own) for own in found.settings],
        "similarity": {
            "energy": _values(found.energy),
            "power": _values(found.power),
            "time_alone": _values(found.time_alone),
        },
        "difference_j": found.difference_j,
        "difference_w": found.difference_w,
    }


def _differences(
    title: str, rows: Sequence[Sequence[float | None]], words: Callable[[float | None], str]
) -> RichTable:
    letters = [letter(n) for n in range(len(rows))]
    table = _table(title, *letters)
    for name, row in zip(letters, rows, strict=True):
        table.add_row(name, *(words(value).replace("-", "−") for value in row))
    return table


def _table(*headers: str) -> RichTable:
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for n, header in enumerate(headers):
        # The first column alone gives way on a narrow terminal.
        table.add_column(Text(header), justify="right" if n else "left", overflow="fold", no_wrap=n > 0)
    return table


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _values(rows: Sequence[Sequence[Correlation]]) -> list[list[float | None]]:
    return [[score.value for score in row] for row in rows]
