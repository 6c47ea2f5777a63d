"""Draws `diagram`: levels of the diagram as boxes with dataflow arrows (the paper's figures 2 and 4, EDD)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smaragdine.accounting.diagram import Node, zoom
from smaragdine.report.figures import style
from smaragdine.report.figures.runs import LabelledRun, NotDrawn, footprint_notes, working_device
from smaragdine.report.figures.style import styled
from smaragdine.units import joules, plus_minus

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The layout: boxes in columns, from left to right along the dataflow.
#
# This is Sugiyama's layered drawing: each box stands one column after what it waits for, and few edges cross.
# Columns that do not fit the width go on below, like lines of text. Edges that lead back are left out, and so
# are edges to a later line if others imply them. All lengths are in millimetres.

GAP_X_MM = 5.0
GAP_Y_MM = 2.0
BAND_GAP_MM = 5.0
_PASS_MM = 1.0  # height of the gap where an edge passes a column
_SWEEPS = 8


@dataclass(frozen=True)
class Box:
    x_mm: float  # of its upper left corner
    y_mm: float  # downwards from the top
    width_mm: float
    height_mm: float


@dataclass(frozen=True)
class Way:
    """An edge, and the points through which it goes from source to target."""

    source: str
    target: str
    points_mm: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Layout:
    boxes: Mapping[str, Box]
    ways: tuple[Way, ...]
    left_out: tuple[tuple[str, str], ...]
    height_mm: float
    bands: int  # number of lines of columns


Place = str | tuple[str, str, int]  # a box, or the gap where an edge passes a column


def layout(
    widths_mm: Mapping[str, float], edges: Iterable[tuple[str, str]], room_mm: float, height_mm: float
) -> Layout:
    """Lays out boxes of these widths and one height; those without edges come last, in rows."""
    known = list(dict.fromkeys((a, b) for a, b in edges if a != b and a in widths_mm and b in widths_mm))
    linked = [name for name in widths_mm if any(name in edge for edge in known)]
    forward = _without_cycles(linked, known)
    columns, chains = _columns(linked, forward)
    bands = _bands(columns, widths_mm, room_mm)
    if len(bands) > 1:
        band = {place: n for n, members in enumerate(bands) for column in members for place in column}
        forward = [(a, b) for a, b in forward if band[a] == band[b] or not _implied((a, b), forward)]
        columns, chains = _columns(linked, forward)
        bands = _bands(columns, widths_mm, room_mm)
    boxes: dict[str, Box] = {}
    middle: dict[Place, tuple[float, float, float]] = {}  # left, right, y
    band_of: dict[Place, int] = {}
    y_mm, bottoms = 0.0, list[float]()
    end_mm, centre_mm = 0.0, 0.0
    for band, members in enumerate(bands):
        tall_mm = max(_height(column, height_mm) for column in members)
        x_mm = 0.0
        for column in members:
            wide_mm = max(_width_layout(place, widths_mm) for place in column)
            at_mm = y_mm + (tall_mm - _height(column, height_mm)) / 2
            for place in column:
                own_mm = height_mm if isinstance(place, str) else _PASS_MM
                inset_mm = (wide_mm - _width_layout(place, widths_mm)) / 2 if isinstance(place, str) else 0.0
                left_mm, right_mm = x_mm + inset_mm, x_mm + wide_mm - inset_mm
                if isinstance(place, str):
                    boxes[place] = Box(left_mm, at_mm, right_mm - left_mm, height_mm)
                middle[place] = (left_mm, right_mm, at_mm + own_mm / 2)
                band_of[place] = band
                at_mm += own_mm + GAP_Y_MM
            x_mm += wide_mm + GAP_X_MM
        end_mm, centre_mm = x_mm, y_mm + (tall_mm - height_mm) / 2
        y_mm += tall_mm
        bottoms.append(y_mm)
        y_mm += BAND_GAP_MM
    ways = tuple(
        Way(*edge, tuple(_through(chain, middle, band_of, bottoms, room_mm)))
        for edge, chain in chains.items()
    )
    alone = [name for name in widths_mm if name not in linked]
    while end_mm and alone and end_mm + widths_mm[alone[0]] <= room_mm:
        name = alone.pop(0)
        boxes[name] = Box(end_mm, centre_mm, widths_mm[name], height_mm)
        end_mm += widths_mm[name] + GAP_Y_MM
    y_mm = bottoms[-1] + GAP_Y_MM + 1 if bottoms else 0.0
    for row in _rows(alone, widths_mm, room_mm):
        x_mm = 0.0
        for name in row:
            boxes[name] = Box(x_mm, y_mm, widths_mm[name], height_mm)
            x_mm += widths_mm[name] + GAP_Y_MM
        y_mm += height_mm + GAP_Y_MM
        bottoms.append(y_mm - GAP_Y_MM)
    left_out = tuple(edge for edge in known if edge not in chains)
    return Layout(boxes, ways, left_out, bottoms[-1] if bottoms else 0.0, len(bands))


def _columns(
    names: Sequence[str], edges: Sequence[tuple[str, str]]
) -> tuple[list[list[Place]], dict[tuple[str, str], list[Place]]]:
    """Boxes by column, and for each edge the places through which it goes, ends included."""
    depth = dict.fromkeys(names, 0)
    moved = True
    while moved:  # longest paths; there are no cycles
        moved = False
        for a, b in edges:
            if depth[b] <= depth[a]:
                depth[b], moved = depth[a] + 1, True
    columns: list[list[Place]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for name in names:
        columns[depth[name]].append(name)
    chains: dict[tuple[str, str], list[Place]] = {}
    for a, b in edges:
        passed: list[Place] = [(a, b, n) for n in range(depth[a] + 1, depth[b])]
        for n, place in enumerate(passed, depth[a] + 1):
            columns[n].append(place)
        chains[a, b] = [a, *passed, b]
    return _uncrossed(columns, chains.values()), chains


def _without_cycles(names: Sequence[str], edges: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Drops edges that lead back to where they came from, as seen from the first box."""
    after = _after(edges)
    entered = {b for _, b in edges}
    state: dict[str, int] = {}  # 1: in progress, 2: done
    found: list[tuple[str, str]] = []
    for start in sorted(names, key=lambda name: name in entered):
        if start in state:
            continue
        state[start] = 1
        stack = [(start, iter(after.get(start, ())))]
        while stack:
            name, rest = stack[-1]
            target = next(rest, None)
            if target is None:
                state[name] = 2
                stack.pop()
            elif state.get(target) != 1:
                found.append((name, target))
                if target not in state:
                    state[target] = 1
                    stack.append((target, iter(after.get(target, ()))))
    return found


def _implied(edge: tuple[str, str], edges: Sequence[tuple[str, str]]) -> bool:
    """Whether other edges lead from its source to its target."""
    after = _after([other for other in edges if other != edge])
    seen, waiting = {edge[0]}, [edge[0]]
    while waiting:
        for target in after.get(waiting.pop(), ()):
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    return edge[1] in seen


def _after(edges: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    after: dict[str, list[str]] = {}
    for a, b in edges:
        after.setdefault(a, []).append(b)
    return after


def _uncrossed(columns: list[list[Place]], chains: Iterable[list[Place]]) -> list[list[Place]]:
    """Sorts each column by the mean position of its neighbours, back and forth."""
    beside: dict[Place, list[Place]] = {}
    for chain in chains:
        for a, b in itertools.pairwise(chain):
            beside.setdefault(a, []).append(b)
            beside.setdefault(b, []).append(a)
    of_column = {place: n for n, column in enumerate(columns) for place in column}
    for sweep in range(_SWEEPS):
        order = range(1, len(columns)) if sweep % 2 == 0 else range(len(columns) - 2, -1, -1)
        for n in order:
            near = n - 1 if sweep % 2 == 0 else n + 1
            position = {place: i for i, place in enumerate(columns[near])}
            own = {place: i for i, place in enumerate(columns[n])}

            def mean(
                place: Place, position: Mapping[Place, int], own: Mapping[Place, int], near: int
            ) -> float:
                there = [position[b] for b in beside.get(place, ()) if of_column[b] == near]
                return sum(there) / len(there) if there else float(own[place])

            columns[n].sort(key=lambda place: mean(place, position, own, near))
    return columns


def _bands(
    columns: Sequence[list[Place]], widths_mm: Mapping[str, float], room_mm: float
) -> list[list[list[Place]]]:
    bands: list[list[list[Place]]] = []
    used_mm = room_mm + 1
    for column in columns:
        wide_mm = max(_width_layout(place, widths_mm) for place in column)
        if used_mm + GAP_X_MM + wide_mm > room_mm:
            bands.append([])
            used_mm = -GAP_X_MM
        bands[-1].append(column)
        used_mm += GAP_X_MM + wide_mm
    return bands


def _rows(names: Sequence[str], widths_mm: Mapping[str, float], room_mm: float) -> list[list[str]]:
    rows: list[list[str]] = []
    used_mm = room_mm + 1
    for name in names:
        if used_mm + GAP_Y_MM + widths_mm[name] > room_mm:
            rows.append([])
            used_mm = -GAP_Y_MM
        rows[-1].append(name)
        used_mm += GAP_Y_MM + widths_mm[name]
    return rows


def _through(
    chain: Sequence[Place],
    middle: Mapping[Place, tuple[float, float, float]],
    band_of: Mapping[Place, int],
    bottoms: Sequence[float],
    room_mm: float,
) -> Iterable[tuple[float, float]]:
    """The points of an edge; from one line to the next it goes around by the right and the left margin."""
    for here, there in itertools.pairwise(chain):
        _, right_mm, y_mm = middle[here]
        left_mm, _, to_mm = middle[there]
        yield right_mm, y_mm
        if band_of[here] != band_of[there]:
            between_mm = bottoms[band_of[here]] + BAND_GAP_MM / 2
            edge_mm = room_mm + 1.5
            yield from ((edge_mm, y_mm), (edge_mm, between_mm), (-1.5, between_mm), (-1.5, to_mm))
        yield left_mm, to_mm


def _width_layout(place: Place, widths_mm: Mapping[str, float]) -> float:
    return widths_mm[place] if isinstance(place, str) else 0.0


def _height(column: Sequence[Place], height_mm: float) -> float:
    each = [height_mm if isinstance(place, str) else _PASS_MM for place in column]
    return sum(each) + GAP_Y_MM * (len(each) - 1)


LEAST_SHARE = 0.005
_WORTH_SAYING = 0.0005
MOST_BOXES = 12
_LEVELS = 4
_MARGIN_MM = 3.5
_BOX_MM = 8.4
_WIDEST_MM = {style.COLUMN_MM: 27.0, style.PAGE_MM: 36.0}
_TITLE_MM = 5.0
_GAP_MM = 4.0
_REST = " rest"  # no segment of a path begins with a blank, so no child has this name


@styled
def diagram(
    levels: Sequence[Node],
    device: str = "",
    width_mm: float | None = style.COLUMN_MM,
    more: Sequence[str] = (),
    least_share: float = LEAST_SHARE,
) -> Figure:
    """Draws one panel per node with its children. Boxes that the next panel opens have a thick outline.

    Without a given width, it is as wide as a column if all fits, else as a page. Children below `least_share`
    share a box.
    """
    width_mm = width_mm or _width(levels, least_share)
    panels = [(node, *_shown(node, width_mm, least_share)) for node in levels]
    placed = [_place(node, texts, width_mm) for node, texts, _ in panels]
    device_note = f"share of each panel's energy on {device}" if device else "share of each panel's energy"
    notes = [
        device_note,
        "round: layer, sharp: operation",
        *(["±: 95 % interval"] if any(_interval(node) for node in levels) else []),
        *(["thick: opened below"] if len(levels) > 1 else []),
        *(["some dataflow left out"] if any(one.left_out for one in placed) else []),
        *more,
        *footprint_notes([levels[0].footprint]),
    ]
    below_mm = 3.2 * len(style.wrapped("; ".join(notes), width_mm - 2)) + 2
    height_mm = sum(_TITLE_MM + one.height_mm + _GAP_MM for one in placed) + below_mm
    figure, (axes,) = style.sheet(height_mm, wide_mm=width_mm)
    figure.set_layout_engine("none")
    axes.set_position((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width_mm)
    axes.set_ylim(height_mm, 0)
    opened = {node.path for node in levels}
    y_mm = 0.0
    for (node, texts, rest), one in zip(panels, placed, strict=True):
        _title(axes, node, y_mm + 1, width_mm)
        y_mm += _TITLE_MM
        _boxes(axes, node, texts, rest, one, y_mm, opened)
        for way in one.ways:
            _arrow(axes, way, y_mm)
        y_mm += one.height_mm + _GAP_MM
    text = ". ".join(_said(node, texts, rest) for node, texts, rest in panels)
    return style.describe(figure, "Energy distribution diagram", text, notes)


def diagram_of_runs(runs: Sequence[LabelledRun], path: str | None = None) -> Figure:
    """The first run's level at `path`, or the levels that lead to where most of the energy goes."""
    root = runs[0].diagram
    levels = [zoom(root, path)] if path is not None else main_levels(root)
    if not levels or not levels[0].children:
        raise NotDrawn(f"{runs[0].label} has no layer with parts")
    of = ["of one step" if runs[0].run.step is not None else "of all that was traced", "idle left out"]
    first = [f"of {len(runs)} runs: {runs[0].label}"] if len(runs) > 1 else []
    return diagram(levels, working_device([runs[0].footprint]), None, [*of, *first])


def main_levels(root: Node, most: int = _LEVELS) -> list[Node]:
    """From the root down along the largest child; levels with only one part worth a box are skipped."""
    found: list[Node] = []
    node: Node | None = root
    while node is not None and len(found) < most:
        if sum((child.share or 0.0) >= LEAST_SHARE for child in node.children) > 1:
            found.append(node)
        composite = [child for child in node.children if child.children]
        node = max(composite, key=lambda child: child.energy_j, default=None)
    return found


def _place(node: Node, texts: dict[str, tuple[str, str]], width_mm: float) -> Layout:
    edges = [(edge.source, edge.target) for edge in node.edges]
    widths_mm = {
        key: max(11.0, *(style.width_mm(line) + 3.0 for line in text)) for key, text in texts.items()
    }
    return layout(widths_mm, edges, width_mm - 2 * _MARGIN_MM, _BOX_MM)


def _width(levels: Sequence[Node], least_share: float) -> float:
    shown = [(node, _shown(node, style.COLUMN_MM, least_share)[0]) for node in levels]
    fits = all(_place(node, texts, style.COLUMN_MM).bands <= 1 for node, texts in shown)
    return style.COLUMN_MM if fits else style.PAGE_MM


def _shown(
    node: Node, width_mm: float, least_share: float = LEAST_SHARE
) -> tuple[dict[str, tuple[str, str]], list[Node]]:
    """Box → its two lines; and the small children that share one box."""
    large = [child for child in node.children if (child.share or 0.0) >= least_share]
    if len(large) > MOST_BOXES:
        most = sorted(large, key=lambda child: -child.energy_j)[: MOST_BOXES - 1]
        large = [child for child in large if any(child is one for one in most)]
    rest = [child for child in node.children if not any(child is one for one in large)]
    widest_mm = _WIDEST_MM.get(width_mm, 27.0)
    texts = {
        child.name: (
            style.shortened(child.name or "(no name)", widest_mm - 3),
            f"{child.share or 0.0:.1%}",
        )
        for child in large
    }
    share = sum(child.share or 0.0 for child in rest)
    if share >= _WORTH_SAYING:
        texts[_REST] = (f"{len(rest)} more", f"{share:.1%}")
    return texts, rest


def _title(axes: Axes, node: Node, y_mm: float, width_mm: float) -> None:
    energy = joules(node.energy_j)
    if _interval(node):
        energy = plus_minus(node.energy_j, _interval(node), "J")
    room_mm = width_mm - style.width_mm(energy) - 2 * _MARGIN_MM - 3
    size_pt = style.TEXT_PT + 0.5
    name = "all operations" if node.is_root else style.shortened(node.path, room_mm * 0.92, size_pt)
    axes.text(_MARGIN_MM, y_mm, name, va="top", weight="bold", fontsize=size_pt)
    axes.text(width_mm - _MARGIN_MM, y_mm + 0.2, energy, va="top", ha="right")


def _interval(node: Node) -> float:
    """Its half-width; 0 if not known, or as large as the energy itself."""
    known = node.uncertainty_j is not None and node.uncertainty_j < node.energy_j
    return node.uncertainty_j if known and node.uncertainty_j is not None else 0.0


def _boxes(
    axes: Axes,
    node: Node,
    texts: dict[str, tuple[str, str]],
    rest: Sequence[Node],
    placed: Layout,
    y_mm: float,
    opened: set[str],
) -> None:
    from matplotlib.patches import FancyBboxPatch

    shares = {child.name: child.share or 0.0 for child in node.children if child.name in texts}
    shares |= {_REST: sum(child.share or 0.0 for child in rest)}
    composite = {child.name: bool(child.children) for child in node.children}
    highest = max(shares.values()) or 1.0
    for key, box in placed.boxes.items():
        colour = style.intensity()(0.9 * shares[key] / highest)
        round_mm = 2.0 if composite.get(key) else 0.0
        look: dict[str, Any] = {"ls": "--"} if key == _REST else {}
        path = key if node.is_root else f"{node.path}/{key}"
        axes.add_patch(
            FancyBboxPatch(
                (box.x_mm + _MARGIN_MM, box.y_mm + y_mm),
                box.width_mm,
                box.height_mm,
                boxstyle=f"round,pad=0,rounding_size={round_mm}" if round_mm else "square,pad=0",
                fc=colour,
                ec=style.INK,
                lw=1.4 if path in opened else 0.6,
                gid=f"{node.path}|{key}",
                **look,
            )
        )
        x_mm = box.x_mm + _MARGIN_MM + box.width_mm / 2
        for line, off_mm in zip(texts[key], (2.5, 5.9), strict=True):
            axes.text(
                x_mm, box.y_mm + y_mm + off_mm, line, ha="center", va="center", color=style.ink_on(colour)
            )


def _arrow(axes: Axes, way: Way, y_mm: float) -> None:
    """Smooth between columns; square with round corners on the way to the next line."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path

    points = [(x + _MARGIN_MM, y + y_mm) for x, y in way.points_mm]
    codes: list[Any] = [Path.MOVETO]
    vertices = [points[0]]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if abs(y1 - y0) > 0.01 and abs(x1 - x0) > 0.01:
            half = (x0 + x1) / 2
            vertices += [(half, y0), (half, y1), (x1, y1)]
            codes += [Path.CURVE4] * 3
        else:
            vertices.append((x1, y1))
            codes.append(Path.LINETO)
    axes.add_patch(
        FancyArrowPatch(
            path=Path(vertices, codes),
            arrowstyle="-|>,head_length=2.6,head_width=1.3",
            color="#4A4A4A",
            lw=0.7,
            shrinkA=0,
            shrinkB=0,
            joinstyle="round",
            zorder=0.5,
        )
    )


def _said(node: Node, texts: dict[str, tuple[str, str]], rest: Sequence[Node]) -> str:
    shares = [f"{child.name} {child.share or 0.0:.2%}" for child in node.children if child.name in texts]
    if rest:
        shares.append(f"{len(rest)} more {sum(child.share or 0.0 for child in rest):.2%}")
    return f"{'All operations' if node.is_root else node.path} ({joules(node.energy_j)}): {', '.join(shares)}"
