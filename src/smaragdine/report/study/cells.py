"""A table of a study as CSV, with every figure in its base unit, and as Markdown and LaTeX for people."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from smaragdine.accounting.noise import deviation
from smaragdine.errors import visible
from smaragdine.recording.table_files import guarded
from smaragdine.report.export.paper import latex_escaped
from smaragdine.units import plus_minus, seconds, si

NONE = "–"
_SIGNS = {sign: f"\\{sign}" for sign in "\\`*_[]<>|~$"}


@dataclass(frozen=True)
class Mean:
    """Over runs. One run has no spread."""

    mean: float
    std: float | None
    runs: int


Cell = Mean | float | int | str | None


@dataclass(frozen=True)
class Column:
    key: str  # in a CSV, with its unit: energy_j
    title: str
    unit: str = ""  # J, W, s, %, 1, part (shown in %); nothing: text or a count

    @property
    def is_text(self) -> bool:
        return not self.unit


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


def mean_of(values: Sequence[float | None]) -> Mean | None:
    """None where no run has it."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return Mean(math.fsum(known) / len(known), deviation(known) if len(known) > 1 else None, len(known))


def worth_showing(table: Table) -> Table:
    """Without columns of nothing, and without the kind where there is one: pages are narrow, CSV has all."""

    def says(n: int) -> bool:
        cells = [row[n] for row in table.rows]
        if table.columns[n].key == "kind":
            return len(set(cells)) > 1
        return any((cell.mean if isinstance(cell, Mean) else cell) not in (None, 0, "") for cell in cells)

    kept = [n for n in range(len(table.columns)) if says(n)]
    return replace(
        table,
        columns=tuple(table.columns[n] for n in kept),
        rows=tuple(tuple(row[n] for n in kept) for row in table.rows),
    )


def csv_text(table: Table) -> str:
    """Means with their standard deviation and the number of runs beside them."""
    spread = [any(isinstance(row[n], Mean) for row in table.rows) for n in range(len(table.columns))]
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    heads: list[str] = []
    for column, wide in zip(table.columns, spread, strict=True):
        heads += [column.key, f"{column.key}_std", f"{column.key}_runs"] if wide else [column.key]
    writer.writerow(heads)
    for row in table.rows:
        cells: list[float | int | str | None] = []
        for cell, wide in zip(row, spread, strict=True):
            if isinstance(cell, Mean):
                cells += [cell.mean, cell.std, cell.runs]
            else:
                cells += [cell, None, None] if wide else [cell]
        shown = [guarded(cell) if isinstance(cell, str) else cell for cell in cells]
        writer.writerow(["" if cell is None else cell for cell in shown])
    return sink.getvalue()


def markdown_text(table: Table, level: int = 2) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    shown = [
        line([escaped(shown_as(cell, column)) for cell, column in zip(row, table.columns, strict=True)])
        for row in table.rows
    ]
    return "\n".join(
        [
            f"{'#' * level} {table.title}",
            "",
            *([table.note, ""] if table.note else []),
            line([column.title for column in table.columns]),
            line([":--" if column.is_text else "--:" for column in table.columns]),
            *shown,
            "",
        ]
    )


def latex_text(table: Table) -> str:
    """With booktabs, as `smaragdine export` has it."""

    def line(cells: Sequence[str]) -> str:
        return f"    {' & '.join(map(latex_escaped, cells))} \\\\"

    caption = f"{table.title}. {table.note}".strip()
    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            r"\begin{table*}",
            r"  \centering\small",
            rf"  \caption{{{latex_escaped(caption)}}}",
            rf"  \label{{tab:study-{table.name}}}",
            rf"  \begin{{tabular}}{{@{{}}{''.join('l' if c.is_text else 'r' for c in table.columns)}@{{}}}}",
            r"    \toprule",
            line([column.title for column in table.columns]),
            r"    \midrule",
            *(
                line([shown_as(cell, column) for cell, column in zip(row, table.columns, strict=True)])
                for row in table.rows
            ),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table*}",
            "",
        ]
    )


def shown_as(cell: Cell, column: Column) -> str:
    if cell is None:
        return NONE
    if isinstance(cell, str):
        return visible(cell)
    mean, std = (cell.mean, cell.std) if isinstance(cell, Mean) else (float(cell), None)
    if not column.unit:
        return f"{mean:,.0f}" if mean == round(mean) or abs(mean) >= 1000 else f"{mean:.4g}"
    if column.unit in ("J", "W"):
        # What no run has needs no spread.
        known = std is not None and not mean == std == 0
        return plus_minus(mean, std or 0.0, column.unit) if known else si(mean, column.unit)
    if column.unit == "s":
        return seconds(mean) if std is None or mean >= 120 else plus_minus(mean, std, "s")
    if column.unit == "part":
        return f"{100 * mean:.1f} %".replace("-", "−")
    digits = 2 if column.unit == "%" else 4
    unit = " %" if column.unit == "%" else ""
    return f"{mean:.{digits}f}{'' if std is None else f' ± {std:.{digits}f}'}{unit}".replace("-", "−")


def escaped(text: str) -> str:
    """As Markdown shows it."""
    return "".join(_SIGNS.get(sign, sign) for sign in text)
