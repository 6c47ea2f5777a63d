"""Turns a footprint into a tree of layers, with the dataflow between siblings (the paper's EDD).

`diagram` is the paper's T2E, and `flatten` undoes it; both keep every row as it is. A name may be an
operation and a layer at once (`a/MatMul` and `a/MatMul/x`), and may have empty segments (`/a`, `a//b`).
"""

from __future__ import annotations

import dataclasses
import difflib
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from smaragdine.accounting.footprint import Footprint, column
from smaragdine.accounting.intervals import half_widths_j
from smaragdine.display import Shown
from smaragdine.errors import UserError


@dataclass(frozen=True)
class Edge:
    """Dataflow from one child to another, and how many edges between their operations it stands for."""

    source: str
    target: str
    count: int


@dataclass(frozen=True)
class Node(Shown):
    """A layer or an operation with all that is below it, over all devices of the footprint."""

    name: str  # the last segment of its path; empty for the root
    path: str
    energy_j: float
    busy_s: float
    count: float
    uncertainty_j: float | None  # None: not known for some row below
    share: float | None  # of its parent's energy; None if that has none
    by_phase: Mapping[str | None, float]  # phase → energy in joules
    children: tuple[Node, ...]  # in the order of the dataflow, if known; else most energy first
    edges: tuple[Edge, ...]  # between the children
    rows: tuple[int, ...]  # rows of `footprint` with exactly this path
    footprint: Footprint = field(repr=False, compare=False)
    is_root: bool = False


@dataclass
class _Draft:
    """A node in the making: its rows and children add their sums."""

    name: str
    path: str
    children: dict[str, _Draft] = field(default_factory=dict[str, "_Draft"])
    edges: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    rows: list[int] = field(default_factory=list[int])
    energy_j: float = 0.0
    busy_s: float = 0.0
    count: float = 0.0
    uncertainty_j: float = 0.0
    by_phase: dict[str | None, float] = field(default_factory=dict[str | None, float])


def diagram(footprint: Footprint, edges: pa.Table | None = None) -> Node:
    """The tree of a footprint. `edges` (source, target: qualified names) are drawn where their paths part."""
    root = _Draft("", "")
    drafts = [root]  # a parent before its children
    names, phases = footprint.rows["name"].to_pylist(), footprint.rows["phase"].to_pylist()
    figures = [column(footprint.rows, name) for name in ("energy_j", "busy_s", "count")]
    for row, values in enumerate(zip(names, phases, *(figure.tolist() for figure in figures), strict=True)):
        draft = root
        for segment in values[0].split("/"):
            below = draft.children.get(segment)
            if below is None:
                path = segment if draft is root else f"{draft.path}/{segment}"
                below = draft.children[segment] = _Draft(segment, path)
                drafts.append(below)
            draft = below
        draft.rows.append(row)
        _pour(draft, values[2:], {values[1]: values[2]})
    parents = {id(child): draft for draft in drafts for child in draft.children.values()}
    for draft in reversed(drafts[1:]):
        _pour(parents[id(draft)], (draft.energy_j, draft.busy_s, draft.count), draft.by_phase)
    _bound(drafts, footprint)
    if edges is not None:
        _project(root, edges)
    done: dict[int, Node] = {}
    for draft in reversed(drafts):
        children = [done.pop(id(child)) for child in draft.children.values()]
        above = parents.get(id(draft))
        done[id(draft)] = _finish(draft, above, _sorted(children, draft.edges), footprint)
    return done[id(root)]


def zoom(node: Node, path: str) -> Node:
    """The node at a path below this one. The empty path is the node itself, unless a child has no name."""
    if path == "" and all(child.name for child in node.children):
        return node
    found = node
    for segment in path.split("/"):
        below = next((child for child in found.children if child.name == segment), None)
        if below is None:
            raise _not_found(node, path)
        found = below
    return found


def flatten(node: Node) -> Footprint:
    """The footprint of all that is below a node; for a whole diagram, the one it was made from.

    For a part, each device's total is what the part's rows took, because idle time belongs to no layer.
    """
    whole = node.footprint
    rows = whole.rows.take(pa.array(sorted(_rows_below(node)), type=pa.int64()))
    if node.is_root:
        return dataclasses.replace(whole, rows=rows)
    energy_j: dict[str, float] = {}
    for device, value in zip(rows["device"].to_pylist(), column(rows, "energy_j").tolist(), strict=True):
        energy_j[device] = energy_j.get(device, 0.0) + value
    devices = {
        device: dataclasses.replace(
            total, total_j=energy_j[device], idle_j=0.0, other_j=None, static_j=None, uncertainty_j=None
        )
        for device, total in whole.devices.items()
        if device in energy_j
    }
    return Footprint(rows, devices, remarks=whole.remarks, joints=whole.joints)


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it, parents first."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(reversed(node.children))


def _rows_below(node: Node) -> Iterator[int]:
    for below in walk(node):
        yield from below.rows


def _pour(draft: _Draft, sums: Sequence[float], by_phase: Mapping[str | None, float]) -> None:
    draft.energy_j += sums[0]
    draft.busy_s += sums[1]
    draft.count += sums[2]
    for phase, energy_j in by_phase.items():
        draft.by_phase[phase] = draft.by_phase.get(phase, 0.0) + energy_j


def _bound(drafts: Sequence[_Draft], footprint: Footprint) -> None:
    """How far each node may be off: the rows below it are one range of all rows, left to right."""
    size = {id(draft): len(draft.rows) for draft in drafts}
    for draft in reversed(drafts):
        size[id(draft)] += sum(size[id(child)] for child in draft.children.values())
    begin = {id(drafts[0]): 0}
    order = np.zeros(footprint.rows.num_rows, dtype=np.int64)
    for draft in drafts:
        at = begin[id(draft)]
        order[at : at + len(draft.rows)] = draft.rows
        at += len(draft.rows)
        for child in draft.children.values():
            begin[id(child)] = at
            at += size[id(child)]
    begins = np.array([begin[id(draft)] for draft in drafts], dtype=np.int64)
    sizes = np.array([size[id(draft)] for draft in drafts], dtype=np.int64)
    widths_j = half_widths_j(footprint, order, begins, begins + sizes)
    for draft, width_j in zip(drafts, widths_j.tolist(), strict=True):
        draft.uncertainty_j = width_j


def _finish(draft: _Draft, above: _Draft | None, children: list[Node], footprint: Footprint) -> Node:
    share = 1.0 if above is None else draft.energy_j / above.energy_j if above.energy_j > 0 else None
    return Node(
        name=draft.name,
        path=draft.path,
        energy_j=draft.energy_j,
        busy_s=draft.busy_s,
        count=draft.count,
        uncertainty_j=None if np.isnan(draft.uncertainty_j) else draft.uncertainty_j,
        share=share,
        by_phase=draft.by_phase,
        children=tuple(children),
        edges=tuple(Edge(source, target, n) for (source, target), n in sorted(draft.edges.items())),
        rows=tuple(draft.rows),
        footprint=footprint,
        is_root=above is None,
    )


def _project(root: _Draft, edges: pa.Table) -> None:
    """An edge a/b/x → a/c/y becomes one from b to c, in a. Edges of a layer with its own inside go."""
    for source, target in zip(edges["source"].to_pylist(), edges["target"].to_pylist(), strict=True):
        draft = root
        for segment, other in zip(source.split("/"), target.split("/"), strict=False):
            if segment != other:
                if segment in draft.children and other in draft.children:
                    draft.edges[segment, other] = draft.edges.get((segment, other), 0) + 1
                break
            if segment not in draft.children:
                break
            draft = draft.children[segment]


def _sorted(children: list[Node], edges: Mapping[tuple[str, str], int]) -> list[Node]:
    """In the order of the dataflow; if that leaves a choice or goes in a circle, most energy first."""
    if len(children) < 2:
        return children
    before = {child.name: 0 for child in children}
    after: dict[str, list[str]] = {}
    for source, target in edges:
        before[target] += 1
        after.setdefault(source, []).append(target)
    node_of = {child.name: child for child in children}
    waiting = [(before[child.name], -child.energy_j, child.name) for child in children]
    heapq.heapify(waiting)
    placed: dict[str, Node] = {}
    while waiting:
        inputs, _, name = heapq.heappop(waiting)
        if name in placed or inputs != before[name]:
            continue  # outdated: it is queued again with fewer inputs
        placed[name] = node_of[name]
        for target in after.get(name, ()):
            before[target] -= 1
            if target not in placed:
                heapq.heappush(waiting, (before[target], -node_of[target].energy_j, target))
    return list(placed.values())


def _not_found(node: Node, path: str) -> UserError:
    prefix = "" if node.is_root else f"{node.path}/"
    paths = [below.path[len(prefix) :] for below in walk(node) if below is not node]
    # It would take minutes to compare with every path of a large model: compare those that share a segment.
    segments = set(path.split("/"))
    sharing = [known for known in paths if segments & set(known.split("/"))] or paths
    # Mostly the model's own name is missing in front.
    near = [known for known in sharing if known.endswith(f"/{path}")][:3]
    near = near or difflib.get_close_matches(path, sharing[:5000], n=3, cutoff=0.5)
    remedy = f"Did you mean {', '.join(near)}?" if near else ""
    if not near and node.children:
        remedy = f"There are: {', '.join(child.name for child in node.children[:8])}"
    return UserError(f"no layer or operation {path!r}", remedy=remedy)
