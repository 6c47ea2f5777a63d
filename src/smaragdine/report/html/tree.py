"""The layers and operations of a footprint as columns: a node comes after its parent, the root is 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.accounting.diagram import diagram, walk
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.merge import Rule, merge_edges, renamed, renaming

Ints = npt.NDArray[np.int64]


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
