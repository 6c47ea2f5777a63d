"""Where boxes with arrows between them go: in columns, left to right, by the dataflow.

Layered drawing as Sugiyama has it: each box one column behind what it waits for, few crossings. Columns that
do not fit the width go on below, as lines of text do. An edge that leads back is left out, and so is one that
would go on below and that others imply. All lengths are in millimetres.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

GAP_X_MM = 5.0
GAP_Y_MM = 2.0
BAND_GAP_MM = 5.0
_PASS_MM = 1.0  # height of a place where an edge passes a column
_SWEEPS = 8


@dataclass(frozen=True)
class Box:
    x_mm: float  # of its left upper corner
    y_mm: float  # downwards
    width_mm: float
    height_mm: float


@dataclass(frozen=True)
class Way:
    """An edge and the points it goes through, from the source's side to the target's."""

    source: str
    target: str
    points_mm: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Layout:
    boxes: Mapping[str, Box]
    ways: tuple[Way, ...]
    left_out: tuple[tuple[str, str], ...]
    height_mm: float
    bands: int  # how often the columns begin anew at the left


Place = str | tuple[str, str, int]  # a box, or where an edge passes a column


def layout(
    widths_mm: Mapping[str, float], edges: Iterable[tuple[str, str]], room_mm: float, height_mm: float
) -> Layout:
    """Boxes of these widths and one height; those without edges come last, in rows."""
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
            wide_mm = max(_width(place, widths_mm) for place in column)
            at_mm = y_mm + (tall_mm - _height(column, height_mm)) / 2
            for place in column:
                own_mm = height_mm if isinstance(place, str) else _PASS_MM
                inset_mm = (wide_mm - _width(place, widths_mm)) / 2 if isinstance(place, str) else 0.0
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
    """Boxes by column, and for each edge the places it goes through, both ends among them."""
    depth = dict.fromkeys(names, 0)
    moved = True
    while moved:  # the longest path, as there are no cycles
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
    """Without those that lead back to where they came from, as found from the first box on."""
    after = _after(edges)
    entered = {b for _, b in edges}
    state: dict[str, int] = {}  # 1: on the way down, 2: done
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
    """Each column by the mean position of its neighbours, back and forth."""
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
        wide_mm = max(_width(place, widths_mm) for place in column)
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
    """The points of an edge; from one band to the next it goes round by the right and the left margin."""
    for here, there in itertools.pairwise(chain):
        _, right_mm, y_mm = middle[here]
        left_mm, _, to_mm = middle[there]
        yield right_mm, y_mm
        if band_of[here] != band_of[there]:
            between_mm = bottoms[band_of[here]] + BAND_GAP_MM / 2
            edge_mm = room_mm + 1.5
            yield from ((edge_mm, y_mm), (edge_mm, between_mm), (-1.5, between_mm), (-1.5, to_mm))
        yield left_mm, to_mm


def _width(place: Place, widths_mm: Mapping[str, float]) -> float:
    return widths_mm[place] if isinstance(place, str) else 0.0


def _height(column: Sequence[Place], height_mm: float) -> float:
    each = [height_mm if isinstance(place, str) else _PASS_MM for place in column]
    return sum(each) + GAP_Y_MM * (len(each) - 1)
