"""The layers and operations of a footprint as columns: a node comes after its parent, the root is 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.accounting.diagram import diagram, walk
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.joint import half_widths_j
from smaragdine.accounting.merge import Rule, merge_edges, renamed, renaming
from smaragdine.arrays import Ints


@dataclass(frozen=True)
class Tree:
    paths: list[str]  # of the root, nothing
    number: dict[str, int]  # path → node; the root is not in it
    columns: dict[str, Any]  # what the page gets


def tree_of(footprint: Footprint, edges: pa.Table | None) -> Tree:
    segments: dict[str, int] = {}
    paths: list[str] = []
    number: dict[str, int] = {}
    parent, segment = [0], list[int]()
    flows: list[tuple[int, str, str, int]] = []  # in, source, target, how many edges it stands for
    waiting: list[int] = []  # parents of the nodes to come
    for i, node in enumerate(walk(diagram(footprint, edges))):
        paths.append(node.path)
        segment.append(segments.setdefault(node.name, len(segments)))
        if not node.is_root:
            parent.append(waiting.pop())
            number[node.path] = i
        waiting += [i] * len(node.children)
        prefix = "" if node.is_root else f"{node.path}/"
        flows += [(i, prefix + edge.source, prefix + edge.target, edge.count) for edge in node.edges]
    columns = {
        "parent": np.array(parent, dtype=np.int64),
        "segment": np.array(segment, dtype=np.int64),
        "segments": list(segments),
        "edge_in": np.array([flow[0] for flow in flows], dtype=np.int64),
        "edge_source": np.array([number[flow[1]] for flow in flows], dtype=np.int64),
        "edge_target": np.array([number[flow[2]] for flow in flows], dtype=np.int64),
        "edge_count": np.array([flow[3] for flow in flows], dtype=np.int64),
    }
    return Tree(paths, number, columns)


def merged_tree(
    footprint: Footprint, edges: pa.Table | None, plain: Tree, rules: Sequence[Rule] = ()
) -> tuple[Tree, Ints] | None:
    """The tree of the summary footprint, and for each node of the plain tree its node there.

    None where nothing merges.
    """
    names = renaming([footprint], rules)
    if all(old == new for old, new in names.items()):
        return None
    tree = tree_of(renamed(footprint, names), None if edges is None else merge_edges(edges, names))
    to = np.zeros(len(plain.paths), dtype=np.int64)
    for old, new in names.items():
        while True:  # a merged name has as many segments as before
            to[plain.number[old]] = tree.number[new]
            if "/" not in old:
                break
            old, new = old.rpartition("/")[0], new.rpartition("/")[0]
            if to[plain.number[old]]:
                break
    return tree, to


def interval_columns(footprint: Footprint, tree: Tree, merged: tuple[Tree, Ints] | None) -> dict[str, Any]:
    """How far sums of rows may be off, for every choice that the page offers: tree, device, phase, node.

    Only of nodes with several rows of a device: one row has its own, and devices add up. `below` is of a node
    with all below it, `own` of the rows that are called as it is.
    """
    node = np.array([tree.number[name] for name in footprint.rows["name"].to_pylist()], dtype=np.int64)
    trees = {"plain": (len(tree.paths), node)}
    if merged is not None:
        trees["merged"] = len(merged[0].paths), merged[1][node]
    device = footprint.rows["device"].to_numpy(zero_copy_only=False)
    phase = footprint.rows["phase"].to_numpy(zero_copy_only=False)
    devices = {name: device == name for name in footprint.devices}
    phases = {name or "not known": phase == name for name in dict.fromkeys(phase.tolist())}
    phases = {"all": np.ones(phase.size, dtype=np.bool_), **phases}
    found: dict[str, Any] = {}
    for which, (count, place) in trees.items():
        parents = (tree if which == "plain" or merged is None else merged[0]).columns["parent"]
        last = _last_below(parents, count)
        for of_device, here in devices.items():
            for of_phase, then in phases.items():
                rows = np.flatnonzero(here & then)
                order = rows[np.argsort(place[rows], kind="stable")]
                found.setdefault(which, {}).setdefault(of_device, {})[of_phase] = {
                    "below": _widths(footprint, order, place[order], np.arange(count), last),
                    "own": _widths(footprint, order, place[order], np.arange(count), np.arange(count)),
                }
    return found


def _last_below(parents: Ints, count: int) -> Ints:
    """The last node below each, or itself: what is below a node follows it."""
    last = np.arange(count)
    for node in range(count - 1, 0, -1):
        last[parents[node]] = max(last[parents[node]], last[node])
    return last


def _widths(footprint: Footprint, order: Ints, place: Ints, first: Ints, last: Ints) -> dict[str, Any]:
    begin, end = np.searchsorted(place, first), np.searchsorted(place, last, side="right")
    several = np.flatnonzero(end - begin > 1)
    widths_j = half_widths_j(footprint, order, begin[several], end[several])
    return {"node": several, "uncertainty_j": widths_j.astype(np.float32)}
