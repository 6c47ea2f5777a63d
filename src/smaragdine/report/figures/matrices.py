"""Draws `similarity` and `difference`: every run against every other (the paper's figures 8 and 9)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smaragdine.accounting.arithmetic import average
from smaragdine.accounting.footprint import Footprint, only
from smaragdine.accounting.similarity import constant_power, matrix, mean_difference
from smaragdine.arrays import Floats
from smaragdine.report.figures import style
from smaragdine.report.figures.runs import (
    LabelledRun,
    NotDrawn,
    by_folder,
    footprint_notes,
    working_device,
)
from smaragdine.report.figures.style import styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = 16
_CELL_MM = 8.2
_WIDEST_CELL_MM = 13.0
_LABEL_MM = 22.0
_TITLE_MM = 27.0  # room for the longest title


@styled
def similarity(
    footprints: Mapping[str, Footprint], device: str | None = None, more: Sequence[str] = ()
) -> Figure:
    """Pearson correlation of energy, of power, and of energies at constant power, which are busy times."""
    runs = _checked(footprints)
    flat = [constant_power(footprint) for footprint in runs]
    matrices = {
        "Energy": _values(matrix(runs, "energy", device)),
        "Power": _values(matrix(runs, "power", device)),
        "At constant power": _values(matrix(flat, "energy", device)),
    }
    known = np.concatenate([m[np.isfinite(m)] for m in matrices.values()])
    low = min(float(known.min()), 0.99) if known.size else 0.0
    digits = 3 if low > 0.98 else 2
    look = {"cmap": style.intensity(), "vmin": low - (1 - low) * 0.15, "vmax": 1.0}
    figure, panels = _panels(len(matrices), list(footprints))
    for axes, (title, values) in zip(panels, matrices.items(), strict=True):
        _draw(axes, values, list(footprints), look, lambda value: f"{value:.{digits}f}")
        axes.set_title(title)
    common = matrix(runs, "energy", device)[0][-1].common
    names = f"Pearson correlation (1) over {common} common names" + (f" on {device}" if device else "")
    off = known[known < 1]
    text = f"between {off.min():.4f} and {off.max():.4f}" if off.size else "all alike"
    text = f"{', '.join(footprints)}: {text}"
    title = "Similarity of footprints"
    notes = [names, *more, *_key(list(footprints)), *footprint_notes(runs)]
    return style.describe(figure, title, text, notes)


@styled
def difference(footprints: Mapping[str, Footprint], device: str | None = None) -> Figure:
    """The mean difference over common names, row − column, in joules and in watts."""
    runs = _checked(footprints)
    figure, panels = _panels(2, list(footprints))
    said: list[str] = []
    for axes, quantity, unit in zip(panels, ("energy", "power"), ("J", "W"), strict=True):
        of_each = [[mean_difference(b, a, quantity, device) for b in runs] for a in runs]  # pyright: ignore
        values = np.array([[math.nan if v is None else v for v in row] for row in of_each])
        most = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
        scale, name = style.prefixed(most, unit)
        look = {"cmap": style.difference(), "vmin": -most or -1.0, "vmax": most or 1.0}
        _draw(axes, values, list(footprints), look, lambda value, scale=scale: _signed(value / scale))
        axes.set_title(f"{quantity.capitalize()} ({name})")
        said.append(f"{quantity} up to {most / scale:.3g} {name}")
    where = f" on {device}" if device else ""
    notes = [f"mean difference over common names{where}, row − column", *_key(list(footprints))]
    text = f"{', '.join(footprints)}: {'; '.join(said)}"
    return style.describe(figure, "Difference of footprints", text, [*notes, *footprint_notes(runs)])


def similarity_of_runs(runs: Sequence[LabelledRun]) -> Figure:
    footprints, device = _of(runs)
    return similarity(footprints, device)


def difference_of_runs(runs: Sequence[LabelledRun]) -> Figure:
    footprints, device = _of(runs)
    return difference(footprints, device)


def _of(runs: Sequence[LabelledRun]) -> tuple[dict[str, Footprint], str]:
    """The mean of each setting if there are several, else every run."""
    if len(runs) < 2:
        raise NotDrawn("it takes two runs or more")
    device = working_device([run.footprint for run in runs])
    groups = by_folder(runs)
    if len(groups) == 1:
        found = {run.label: only(run.footprint, [device]) for run in runs}
    else:
        means = {name: average([run.footprint for run in each]).mean for name, each in groups.items()}
        found = {name: only(mean, [device]) for name, mean in means.items()}
    return found, device


def _checked(footprints: Mapping[str, Footprint]) -> list[Footprint]:
    if not 2 <= len(footprints) <= _MOST:
        raise NotDrawn(f"a matrix takes 2 to {_MOST} runs, not {len(footprints)}")
    return list(footprints.values())


def _values(rows: Sequence[Sequence[Any]]) -> Floats:
    return np.array([[math.nan if one.value is None else one.value for one in row] for row in rows])


def _panels(count: int, labels: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """Side by side as far as the page goes, with cells wide enough for a number."""
    name_mm = max(style.width_mm(label) for label in _short(labels)) + 3
    cells_mm = _CELL_MM * len(labels) + 3
    least_mm = max(cells_mm, _TITLE_MM)
    in_column, in_page = (
        max(1, min(count, int((wide_mm - name_mm) // least_mm)))
        for wide_mm in (style.COLUMN_MM, style.PAGE_MM)
    )
    # A few cells below long titles stand below each other: else the page would be mostly empty.
    narrow = in_column * least_mm + name_mm <= style.COLUMN_MM and (
        in_column == count or (cells_mm < _TITLE_MM and in_column > 1)
    )
    columns, width_mm = (in_column, style.COLUMN_MM) if narrow else (in_page, style.PAGE_MM)
    each_mm = min((width_mm - name_mm) / columns, _WIDEST_CELL_MM * len(labels) + 3)
    rows = -(-count // columns)
    under_mm = name_mm if _turned(labels) else 5
    height_mm = (each_mm + 3 + under_mm) * rows + (4 if _turned(labels) else 7)
    figure, panels = style.sheet(height_mm, rows, columns, width_mm, sharey=True)
    for spare in panels[count:]:
        spare.remove()
    return figure, panels[:count]


def _draw(axes: Axes, values: Floats, labels: Sequence[str], look: dict[str, Any], text: Any) -> None:
    """The lower triangle only: the upper one says the same."""
    count = len(labels)
    shown = np.where(np.tril(np.ones((count, count), bool)), values, np.nan)
    image = axes.imshow(shown, **look, gid="cells")
    for row in range(count):
        for at in range(row + 1):
            if math.isfinite(values[row, at]):
                colour = style.ink_on(image.cmap(image.norm(values[row, at])))
                axes.text(at, row, text(values[row, at]), ha="center", va="center", color=colour)
            else:
                axes.text(at, row, "–", ha="center", va="center")
    axes.set_xticks(range(count), _short(labels), rotation=90 if _turned(labels) else 0)
    axes.set_yticks(range(count), _short(labels))
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _short(labels: Sequence[str]) -> list[str]:
    return style.distinct(labels, _LABEL_MM)[0]


def _turned(labels: Sequence[str]) -> bool:
    return any(style.width_mm(label) > _CELL_MM - 0.8 for label in _short(labels))


def _key(labels: Sequence[str]) -> list[str]:
    return style.distinct(labels, _LABEL_MM)[1]


def _signed(value: float) -> str:
    text = f"{value:.0f}" if abs(value) >= 99.5 else f"{value:.2g}" if abs(value) >= 0.095 else f"{value:.2f}"
    return "0" if float(text) == 0 else text.replace("-", "−")
