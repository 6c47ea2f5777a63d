"""Two footprints side by side and their correlation: how similarity is computed (the paper's figure 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.grouping import grouped
from smaragdine.accounting.merge import merge_all
from smaragdine.accounting.similarity import correlation, values
from smaragdine.report.figures import lettering, style
from smaragdine.report.figures.runs import NotDrawn, footprint_notes
from smaragdine.report.figures.style import styled
from smaragdine.units import joules

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 12
_DEEPEST = 9
_HEAD_MM = 5.4
_ROW_MM = 3.9
_VALUE_MM = 16.0
_NUMBER_MM = 10.5
_SCORE_MM = 15.0


@styled
def pair(
    a: Footprint, b: Footprint, labels: tuple[str, str], device: str, notes: Sequence[str] = ()
) -> Figure:
    """Both by layer, as deep as a table has room for; the correlation is that of the rows shown."""
    of_a, of_b = coarse(*merge_all([a, b]))
    score = correlation(of_a, of_b, "energy", device)
    if score.value is None:
        raise NotDrawn(score.reason)
    left, right = values(of_a, "energy", device), values(of_b, "energy", device)
    rows = [(key[0], left[key], right[key]) for key in left if key in right]
    end_mm = style.COLUMN_MM - _SCORE_MM
    columns_mm = (end_mm - _VALUE_MM - 1, end_mm - 1)
    room_mm = columns_mm[0] - _NUMBER_MM - 1.5
    names, key = lettering.distinct(_endings([name for name, _, _ in rows], room_mm), room_mm)
    said = ["Pearson correlation (1) of the rows"]
    whole = correlation(a, b, "energy", device)
    if whole.value is not None:
        said.append(f"over all {whole.common} names {whole.value:.4f}")
    said += [*notes, *key, *footprint_notes([of_a])]
    bottom_mm = _HEAD_MM + _ROW_MM * len(rows)
    high_mm = bottom_mm + 4 + 2.9 * len(lettering.wrapped("; ".join(said), style.COLUMN_MM - 2))
    figure, axes = _canvas(high_mm)
    for x_mm, label in zip(columns_mm, labels, strict=True):
        axes.text(x_mm, 3, lettering.shortened(label, _VALUE_MM), ha="right", va="center", weight="bold")
    axes.plot([1.5, end_mm], [_HEAD_MM, _HEAD_MM], color=style.INK, lw=0.7)
    for n, (name, (_, *both_j)) in enumerate(zip(names, rows, strict=True)):
        y_mm = _HEAD_MM + _ROW_MM * (n + 0.5) + 0.5
        axes.text(1.5, y_mm, name, va="center")
        for x_mm, value_j in zip(columns_mm, both_j, strict=True):
            axes.text(x_mm, y_mm, joules(value_j), ha="right", va="center")
    bracket_mm = [end_mm + 1, end_mm + 2, end_mm + 2, end_mm + 1]
    axes.plot(bracket_mm, [_HEAD_MM + 0.6] * 2 + [bottom_mm] * 2, color=style.INK, lw=0.7)
    axes.text(end_mm + 3, (_HEAD_MM + bottom_mm) / 2, f"{score.value:.4f}", va="center", weight="bold")
    text = "; ".join(f"{name}: {joules(a_j)} and {joules(b_j)}" for name, a_j, b_j in rows)
    text = f"{labels[0]} and {labels[1]} correlate {score.value:.4f}: {text}"
    return style.describe(figure, "How similarity is computed", text, said)


def _canvas(high_mm: float) -> tuple[Figure, Axes]:
    """A sheet to write on, in millimetres from its left upper corner."""
    figure, (axes,) = style.sheet(high_mm)
    figure.set_layout_engine("none")
    axes.set_position((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, style.COLUMN_MM)
    axes.set_ylim(high_mm, 0)
    return figure, axes


def _endings(names: Sequence[str], room_mm: float) -> list[str]:
    """The ends of paths that tell them apart: two segments, one where two do not fit, more where needed."""
    found: list[str] = []
    for name in names:
        segments = name.split("/")
        ends = ["/".join(segments[-count:]) for count in range(1, len(segments) + 1)]
        telling = [end for end in ends if sum(f"/{other}".endswith(f"/{end}") for other in names) == 1]
        whole = [end for end in telling if "/" in end and not end.startswith("*")] or telling
        fitting = [end for end in (*whole, *telling) if lettering.width_mm(end) <= room_mm]
        found.append(next(iter(fitting or telling), name))
    return found


def coarse(a: Footprint, b: Footprint) -> tuple[Footprint, Footprint]:
    """By layers, as deep as leaves few enough of them in `a`."""
    depth = 1
    for deeper in range(2, _DEEPEST + 1):
        if grouped(a, "layer", deeper).rows.num_rows > MOST_ROWS:
            break
        depth = deeper
    return grouped(a, "layer", depth), grouped(b, "layer", depth)
