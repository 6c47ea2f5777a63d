"""The tree of a footprint, and the way back."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from footprints import assert_conserved, energies, footprint, footprints, names
from smaragdine.accounting.diagram import Edge, Node, diagram, flatten, walk, zoom
from smaragdine.accounting.footprint import Footprint
from smaragdine.errors import UserError
from smaragdine.recording.format import EDGES


def made() -> Footprint:
    return footprint(
        [
            {"name": "a/b/x", "energy_j": 6.0, "phase": "forward", "busy_s": 2.0, "uncertainty_j": 1.0},
            {"name": "a/b/x", "energy_j": 2.0, "phase": "backward", "busy_s": 1.0, "uncertainty_j": 0.5},
            {"name": "a/c/y", "energy_j": 1.0, "phase": "forward", "count": 7.0, "uncertainty_j": 0.25},
            {"name": "a/c", "energy_j": 1.0, "phase": None},
            {"name": "d", "energy_j": 10.0, "phase": "forward", "uncertainty_j": 2.0, "device": "cpu:0"},
        ]
    )


def edges(*pairs: tuple[str, str]) -> pa.Table:
    return pa.table({"source": [s for s, _ in pairs], "target": [t for _, t in pairs]}, schema=EDGES)


def test_a_node_is_the_sum_of_what_is_below() -> None:
    root = diagram(made())
    a, b = zoom(root, "a"), zoom(root, "a/b")
    assert (root.energy_j, root.share, root.name) == (20.0, 1.0, "")
    assert (a.energy_j, a.busy_s, a.count, a.share) == (10.0, 5.0, 10.0, 0.5)
    assert a.by_phase == {"forward": 7.0, "backward": 2.0, None: 1.0}
    assert a.uncertainty_j is None  # a/c has none
    assert (b.energy_j, b.share, b.uncertainty_j, b.path) == (8.0, 0.8, 1.5, "a/b")
    assert [child.name for child in a.children] == ["b", "c"]
    assert [child.name for child in root.children] in (["a", "d"], ["d", "a"])


def test_shares_of_nothing_are_not_known() -> None:
    assert zoom(diagram(footprint([{"name": "a/x", "energy_j": 0.0}])), "a/x").share is None


def test_edges_are_drawn_where_their_ends_part() -> None:
    pairs = [
        ("a/b/x", "a/c/y"),
        ("a/b/x", "a/c"),
        ("a/b/quiet", "a/c/y"),  # never ran, but its layer did
        ("a/b/x", "a/b/z"),  # no z here
        ("a/b/x", "a/b/x"),  # itself
        ("a/c", "a/c/y"),  # a layer and its inside
        ("a/b/x", "d"),
        ("gone/x", "d"),
    ]
    root = diagram(made(), edges(*pairs))
    assert root.edges == (Edge("a", "d", 1),)
    assert zoom(root, "a").edges == (Edge("b", "c", 3),)
    assert zoom(root, "a/b").edges == zoom(root, "a/c").edges == ()


def test_children_follow_the_dataflow() -> None:
    rows = [
        {"name": name, "energy_j": energy_j}
        for name, energy_j in zip("abcd", (1.0, 2.0, 3.0, 4.0), strict=True)
    ]
    run = footprint(rows)

    def order(*pairs: tuple[str, str]) -> str:
        return "".join(child.name for child in diagram(run, edges(*pairs)).children)

    assert order() == "dcba"
    assert order(("a", "b"), ("b", "c"), ("c", "d")) == "abcd"
    assert order(("a", "d"), ("b", "d")) == "cbad"
    assert sorted(order(("a", "b"), ("b", "a"))) == list("abcd")  # a circle loses nobody
    assert order(("a", "b"), ("b", "a"), ("c", "a")).index("c") < 2


def test_zoom_and_what_is_near() -> None:
    root = diagram(made())
    assert zoom(root, "") is root
    assert zoom(zoom(root, "a"), "b/x").path == "a/b/x"
    with pytest.raises(UserError, match=r"a/b/X.*Did you mean a/b/x"):
        zoom(root, "a/b/X")
    with pytest.raises(UserError, match=r"'X'.*Did you mean|'X'.*There are: b, c"):
        zoom(zoom(root, "a"), "X")
    wrapped = diagram(footprint([{"name": "AModelOfALongName/b/x", "energy_j": 1.0}]))
    with pytest.raises(UserError, match=r"'b/x'. Did you mean AModelOfALongName/b/x\?"):
        zoom(wrapped, "b/x")
    with pytest.raises(UserError, match="no layer or operation 'a/b/x/'"):
        zoom(root, "a/b/x/")


def test_a_part_is_a_footprint_of_its_own() -> None:
    part = flatten(zoom(diagram(made()), "a/c"))
    assert energies(part) == {"a/c": 1.0, "a/c/y": 1.0}
    assert list(part.devices) == ["gpu:0"]
    assert (part.devices["gpu:0"].total_j, part.devices["gpu:0"].idle_j) == (2.0, 0.0)
    assert_conserved(part)


def test_odd_names_survive() -> None:
    odd = ["", "/", "//", "a", "a/", "/a", "a//b", "a/MatMul", "a/MatMul/x", "/".join("z" * 3000)]
    run = footprint([{"name": name, "energy_j": float(i)} for i, name in enumerate(odd)], idle_j=1.0)
    root = diagram(run)
    assert flatten(root) == run
    for name in odd:
        node = zoom(root, name)
        assert [run.rows["name"][i].as_py() for i in node.rows] == [name]


@given(footprints(), st.lists(st.tuples(names, names), max_size=8))
def test_there_and_back(run: Footprint, pairs: list[tuple[str, str]]) -> None:
    root = diagram(run, edges(*pairs))
    back = flatten(root)
    assert back.rows.equals(run.rows)
    assert back == run
    for node in walk(root):
        below = flatten(node)
        assert_conserved(below)
        assert math.isclose(node.energy_j, math.fsum(below.rows["energy_j"].to_pylist()), abs_tol=1e-9)
        assert math.isclose(node.energy_j, math.fsum(node.by_phase.values()), abs_tol=1e-9)
        inside = [r["name"] for r in below.rows.to_pylist()]
        if not node.is_root:
            assert all(name == node.path or name.startswith(f"{node.path}/") for name in inside)
        _check_edges(node, pairs)


def _check_edges(node: Node, pairs: list[tuple[str, str]]) -> None:
    """Brute force: an edge counts where both ends are below, in different children."""
    depth = 0 if node.is_root else node.path.count("/") + 1
    children = {child.name for child in node.children}
    above = [] if node.is_root else node.path.split("/")
    wanted: dict[tuple[str, str], int] = {}
    for source, target in pairs:
        ends = source.split("/"), target.split("/")
        if all(end[:depth] == above and len(end) > depth and end[depth] in children for end in ends):
            pair = (ends[0][depth], ends[1][depth])
            if pair[0] != pair[1]:
                wanted[pair] = wanted.get(pair, 0) + 1
    assert {(edge.source, edge.target): edge.count for edge in node.edges} == wanted
