"""Merges self-similar siblings into one: the summary footprint (the paper's STEF and STPF).

Composite siblings become one if their names differ in one index only and the same operations and phases are
below them: `layer_0` … `layer_11` → `layer_*`, `layer/0` … → `layer/*`. A sibling that differs keeps its
name; if two kinds repeat side by side, they are `layer_*` and `layer_*~2`. Merging starts inside and works
outwards, so nested repetition merges too. Operations never merge: `MatMul_1` may be another product.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from smaragdine.accounting.footprint import Footprint, replace
from smaragdine.accounting.intervals import joined
from smaragdine.errors import UserError

_INDEX = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class MergeRule:
    """Calls every segment of a path that `pattern` matches in full `name`, operations too."""

    pattern: re.Pattern[str]
    name: str


@dataclass
class _Tree:
    """The paths of all names, as columns; parents come first."""

    parent: list[int] = field(default_factory=lambda: [-1])
    segment: list[str] = field(default_factory=lambda: [""])
    children: list[dict[str, int]] = field(default_factory=lambda: [{}])
    phases: list[set[str | None]] = field(default_factory=lambda: [set()])
    touched: list[bool] = field(default_factory=lambda: [False])  # renamed by a rule


def parse_rule(text: str) -> MergeRule:
    r"""Reads a rule such as `layer_(\d+)=transformer`; the name may use groups of the pattern: `\1`."""
    pattern, equals, name = text.rpartition("=")
    remedy = r"Write it as 'layer_(\d+)=transformer'"
    if not equals or not pattern or not name:
        raise UserError(f"{text!r} is no merge rule", "it is no PATTERN=NAME", remedy)
    if "/" in name:
        raise UserError(f"{text!r} is no merge rule", "a rule names one segment of a path: no /", remedy)
    try:
        rule = MergeRule(re.compile(pattern), name)
        rule.pattern.sub(name, "")  # checks every \1 in the name, even if nothing matches
    except (re.error, IndexError) as error:
        raise UserError(f"{text!r} is no merge rule", str(error), remedy) from None
    return rule


def merge(footprint: Footprint, rules: Sequence[MergeRule] = ()) -> Footprint:
    """Applies rules, then merges what repeats among segments without a rule. Totals do not change."""
    return merge_all([footprint], rules)[0]


def merge_all(footprints: Sequence[Footprint], rules: Sequence[MergeRule] = ()) -> list[Footprint]:
    """Merges each by the names of all, so that they compare: if one lacks an operation, its layers would
    split and move their joules to other names."""
    names = renaming(footprints, rules)
    return [renamed(footprint, names) for footprint in footprints]


def renamed(footprint: Footprint, names: Mapping[str, str]) -> Footprint:
    """With the names of `renaming`; rows that get the same name become one."""
    texts = footprint.rows["name"].combine_chunks().dictionary_encode()
    new = pa.array([names[name] for name in texts.dictionary.to_pylist()], type=pa.string())
    return joined(footprint, replace(footprint.rows, {"name": new.take(texts.indices)}))


def merge_edges(edges: pa.Table, names: Mapping[str, str]) -> pa.Table:
    """Dataflow between merged names. An operation that never ran follows the layer it is in."""
    known = dict(names)
    for old, new in names.items():
        while "/" in old:  # merging keeps the number of segments
            old, new = old.rpartition("/")[0], new.rpartition("/")[0]
            if old in known:
                break
            known[old] = new

    def called(name: str) -> str:
        above = name
        while above not in known and "/" in above:
            above = above.rpartition("/")[0]
        return known[above] + name[len(above) :] if above in known else name

    return pa.table(
        {
            side: pa.array([called(name) for name in edges[side].to_pylist()], type=pa.string())
            for side in ("source", "target")
        }
    )


def renaming(footprints: Sequence[Footprint], rules: Sequence[MergeRule] = ()) -> dict[str, str]:
    """What `merge_all` calls each name."""
    tree, node_of = _grow(footprints, rules)
    _join(tree)
    path = [""] * len(tree.parent)
    for node in range(1, len(path)):
        above = tree.parent[node]
        path[node] = f"{path[above]}/{tree.segment[node]}" if above else tree.segment[node]
    return {name: path[node] for name, node in node_of.items()}


def _grow(footprints: Sequence[Footprint], rules: Sequence[MergeRule]) -> tuple[_Tree, dict[str, int]]:
    tree, node_of = _Tree(), dict[str, int]()
    ruled: dict[str, tuple[str, bool]] = {}
    pairs = pa.concat_tables([footprint.rows.select(["name", "phase"]) for footprint in footprints])
    for name, phase in zip(pairs["name"].to_pylist(), pairs["phase"].to_pylist(), strict=True):
        node = node_of.get(name)
        if node is None:
            node = 0
            for segment in name.split("/"):
                if segment not in ruled:
                    ruled[segment] = _apply(rules, segment)
                called, touched = ruled[segment]
                below = tree.children[node].get(called)
                if below is None:
                    below = tree.children[node][called] = len(tree.parent)
                    tree.parent.append(node)
                    tree.segment.append(called)
                    tree.children.append({})
                    tree.phases.append(set())
                    tree.touched.append(touched)
                tree.touched[below] |= touched
                node = below
            node_of[name] = node
        tree.phases[node].add(phase)
    return tree, node_of


def _apply(rules: Sequence[MergeRule], segment: str) -> tuple[str, bool]:
    for rule in rules:
        match = rule.pattern.fullmatch(segment)
        if match:
            return match.expand(rule.name), True
    return segment, False


def _join(tree: _Tree) -> None:
    """Gives siblings that are alike the same segment, innermost nodes first."""
    kinds: dict[object, int] = {}  # all that is below a node → its kind
    kind = [0] * len(tree.parent)
    for node in reversed(range(len(tree.parent))):
        children = tree.children[node]
        alike = [
            (segment, child)
            for segment, child in children.items()
            if tree.children[child] and not tree.touched[child] and _INDEX.search(segment)
        ]
        if len(alike) > 1:
            _join_siblings(tree, children, alike, kind)
        below = frozenset((tree.segment[child], kind[child]) for child in children.values())
        kind[node] = kinds.setdefault((frozenset(tree.phases[node]), below), len(kinds))


def _join_siblings(
    tree: _Tree, siblings: Mapping[str, int], alike: Sequence[tuple[str, int]], kind: Sequence[int]
) -> None:
    # (name, kind) → nodes of that name; a name with two indices takes two rounds
    called: dict[tuple[str, int], list[int]] = {(segment, kind[child]): [child] for segment, child in alike}
    merging = True
    while merging:
        families: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for segment, of_kind in called:
            for pattern in _patterns(segment):
                families.setdefault((pattern, of_kind), []).append((segment, of_kind))
        merging = False
        for family, members in sorted(families.items(), key=lambda item: (-len(item[1]), item[0])):
            left = [member for member in members if member in called]
            if len(left) > 1:
                nodes = [node for member in left for node in called.pop(member)]
                called[family] = [*called.get(family, []), *nodes]
                merging = True
    joined = [(pattern, nodes) for (pattern, _), nodes in called.items() if len(nodes) > 1]
    moved = {node for _, nodes in joined for node in nodes}
    taken = {segment for segment, child in siblings.items() if child not in moved}
    for pattern, nodes in sorted(joined, key=lambda item: min(_natural(tree.segment[n]) for n in item[1])):
        name, n = pattern, 1
        while name in taken:
            n += 1
            name = f"{pattern}~{n}"
        taken.add(name)
        for node in nodes:
            tree.segment[node] = name


def _patterns(segment: str) -> Iterator[str]:
    """The segment with one of its indices left open, for each index in turn."""
    for match in _INDEX.finditer(segment):
        yield f"{segment[: match.start()]}*{segment[match.end() :]}"


def _natural(segment: str) -> list[tuple[int, str]]:
    """Sorts layer_2 before layer_10."""
    texts = re.split(r"([0-9]+)", segment)  # every second one is an index
    return [(len(text.lstrip("0")), text) if i % 2 else (0, text) for i, text in enumerate(texts)]
