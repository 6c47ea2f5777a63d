"""Collects what a page knows about its runs: the figures of `report --json`, in columns.

Rows of a footprint are columns beside a tree of nodes; nothing is summed here. What one step costs is nearly
always what was traced times a factor or two per device. If that product is equal in every bit, only the
factors are stored.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.accounting.comparison import Comparison, compare
from smaragdine.accounting.comparison import to_json as comparison_json
from smaragdine.accounting.diagram import diagram, walk
from smaragdine.accounting.footprint import Footprint, column
from smaragdine.accounting.intervals import half_widths_j
from smaragdine.accounting.merge import MergeRule, merge_edges, renamed, renaming
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.regions import longest
from smaragdine.accounting.run import Run, alike
from smaragdine.accounting.spans import joined
from smaragdine.arrays import Floats, Ints
from smaragdine.arrow import pc
from smaragdine.errors import UserError, signal_name
from smaragdine.report.tables import tracing_lines
from smaragdine.report.terminal import headline
from smaragdine.tracing.absence import why_no_operations

# A footprint's layers and operations as columns: parents come first, the root is node 0.


@dataclass(frozen=True)
class Tree:
    paths: list[str]  # empty for the root
    number: dict[str, int]  # path → node, without the root
    columns: dict[str, Any]  # as the page gets them


def tree_of(footprint: Footprint, edges: pa.Table | None) -> Tree:
    segments: dict[str, int] = {}
    paths: list[str] = []
    number: dict[str, int] = {}
    parent, segment = [0], list[int]()
    flows: list[tuple[int, str, str, int]] = []  # node, source, target, how many edges it stands for
    waiting: list[int] = []  # parents of nodes still to come
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
    footprint: Footprint, edges: pa.Table | None, plain: Tree, rules: Sequence[MergeRule] = ()
) -> tuple[Tree, Ints] | None:
    """The tree of the summary footprint, and for each node of the plain tree its node there.

    None if nothing merges.
    """
    names = renaming([footprint], rules)
    if all(old == new for old, new in names.items()):
        return None
    tree = tree_of(renamed(footprint, names), None if edges is None else merge_edges(edges, names))
    to = np.zeros(len(plain.paths), dtype=np.int64)
    for old, new in names.items():
        while True:  # merging keeps the number of segments
            to[plain.number[old]] = tree.number[new]
            if "/" not in old:
                break
            old, new = old.rpartition("/")[0], new.rpartition("/")[0]
            if to[plain.number[old]]:
                break
    return tree, to


def interval_columns(footprint: Footprint, tree: Tree, merged: tuple[Tree, Ints] | None) -> dict[str, Any]:
    """How far sums of rows may be off, for every choice that the page offers: tree, device, phase, node.

    Only for nodes with several rows of a device: a single row has its own, and devices add up. `below` is for
    a node with all below it, `own` for rows with exactly its name.
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
    """The last node below each, or itself: nodes below a node come right after it."""
    last = np.arange(count)
    for node in range(count - 1, 0, -1):
        last[parents[node]] = max(last[parents[node]], last[node])
    return last


def _widths(footprint: Footprint, order: Ints, place: Ints, first: Ints, last: Ints) -> dict[str, Any]:
    begin, end = np.searchsorted(place, first), np.searchsorted(place, last, side="right")
    several = np.flatnonzero(end - begin > 1)
    widths_j = half_widths_j(footprint, order, begin[several], end[several])
    return {"node": several, "uncertainty_j": widths_j.astype(np.float32)}


# What a page draws over time: each device's power, and which layer ran while the profiler did.

Span = tuple[int, int]  # begin and end in ns

MOST_POINTS = 24_000  # over all devices: more than the pixels of a screen, and below 300 kB
MOST_STRETCHES = 40_000  # of layers, over all devices


def power_columns(trace: PowerTrace, begin_ns: int, end_ns: int, windows: Sequence[Span], most: int) -> Any:
    """Stretches of power, each with its lowest, highest and mean power; finer inside the windows."""
    clipped = [(max(begin_ns, begin), min(end_ns, end)) for begin, end in windows]
    fine = joined([(begin, end) for begin, end in clipped if begin < end])
    edges_ns = [begin_ns, *(edge for span in fine for edge in span), end_ns]
    every = [(begin, end) for begin, end in pairwise(edges_ns) if begin < end] or [(begin_ns, end_ns)]
    coarse_ns = max(1, sum(end - begin for begin, end in every if (begin, end) not in fine))
    parts = [
        # Half of the points go to the windows, half to the rest by its length.
        _points(trace, span, most // 2 // len(fine))
        if span in fine
        else _points(trace, span, int(most / 2 * (span[1] - span[0]) / coarse_ns))
        for span in every
    ]
    start_ns, stop_ns, low_w, high_w, mean_w = (np.concatenate(column) for column in zip(*parts, strict=True))
    return {
        "start_ns": start_ns - begin_ns,
        "end_ns": stop_ns - begin_ns,
        "low_w": low_w.astype(np.float32),
        "high_w": high_w.astype(np.float32),
        "mean_w": mean_w.astype(np.float32),
    }


def _points(trace: PowerTrace, span: Span, most: int) -> tuple[Ints, Ints, Floats, Floats, Floats]:
    begin_ns, end_ns = span
    first = int(np.searchsorted(trace.end_ns, begin_ns, side="right"))
    last = int(np.searchsorted(trace.start_ns, end_ns, side="left"))
    if last - first <= most:
        power_w = trace.power_w[first:last]
        start_ns = np.maximum(trace.start_ns[first:last], begin_ns)
        return start_ns, np.minimum(trace.end_ns[first:last], end_ns), power_w, power_w, power_w
    edges_ns = np.linspace(begin_ns, end_ns, max(2, most + 1)).astype(np.int64)
    start_ns, stop_ns = edges_ns[:-1], edges_ns[1:]
    i = np.searchsorted(trace.end_ns, start_ns, side="right")
    j = np.searchsorted(trace.start_ns, stop_ns, side="left")
    covered_ns = trace.covered_until_ns(stop_ns) - trace.covered_until_ns(start_ns)
    known = (j > i) & (covered_ns > 0)
    i, j, start_ns, stop_ns, covered_ns = (a[known] for a in (i, j, start_ns, stop_ns, covered_ns))
    used_j = trace.energy_until_j(stop_ns) - trace.energy_until_j(start_ns)
    # `reduceat` also looks from each end to the next begin: use every second result.
    places = np.stack([i, j], axis=1).ravel()
    padded_w = np.append(trace.power_w, trace.power_w[-1:])
    low_w, high_w = (of.reduceat(padded_w, places)[::2] for of in (np.minimum, np.maximum))
    return start_ns, stop_ns, low_w, high_w, used_j / (covered_ns * 1e-9)


def layer_columns(events: pa.Table, device: str, tree: Tree, begin_ns: int, most: int) -> Any:
    """Stretches in which one layer worked, from the operations that started one after the other.

    If there are too many, deep layers are not told apart; if that is not enough, later ones are left out.
    """
    here = events.filter(pc.equal(events["device"].cast(pa.string()), device))
    here = here.unify_dictionaries()
    order = np.argsort(here["start_ns"].to_numpy(), kind="stable")
    start_ns = here["start_ns"].to_numpy()[order]
    end_ns = start_ns + here["duration_ns"].to_numpy()[order]
    names = here["name"].combine_chunks()
    phases = here["phase"].combine_chunks()
    known: list[str] = names.dictionary.to_pylist()
    code = names.indices.to_numpy()[order]
    phase = pc.fill_null(phases.indices, -1).to_numpy()[order]
    depth = max((name.count("/") for name in known), default=0)
    node, first = _stretches(known, code, phase, depth, tree)
    while first.size > most and depth > 3:
        depth -= 1
        node, first = _stretches(known, code, phase, depth, tree)
    left_out = max(0, first.size - most)
    if left_out:
        end_ns = end_ns[: first[most]]
        first = first[:most]
    stop_ns = np.maximum.reduceat(end_ns, first)
    # What began last shows.
    stop_ns[:-1] = np.minimum(stop_ns[:-1], start_ns[first[1:]])
    return {
        "start_ns": start_ns[first] - begin_ns,
        "length_ns": stop_ns - start_ns[first],
        "node": node[first],
        "phase": phase[first] + 1,
        "phases": [None, *phases.dictionary.to_pylist()],
        "left_out": left_out,
    }


def _stretches(names: list[str], code: Ints, phase: Ints, depth: int, tree: Tree) -> tuple[Ints, Ints]:
    """The layer of each event, down to a depth, and where another layer or phase begins."""
    node = np.array([_layer(name, depth, tree) for name in names], dtype=np.int64)[code]
    return node, np.flatnonzero((np.diff(node, prepend=-1) != 0) | (np.diff(phase, prepend=-2) != 0))


def _layer(name: str, depth: int, tree: Tree) -> int:
    parts = name.split("/")[:-1][: max(depth, 1)]
    return tree.number.get("/".join(parts), 0) if parts else tree.number.get(name, 0)


_FIGURES = ("energy_j", "busy_s", "count", "uncertainty_j")
_TEXTS = ["name", "device", "phase", "basis"]
_MOST_EPOCHS = 1000
_MOST_REGIONS = 200


def run_data(run: Run, rules: Sequence[MergeRule] = ()) -> dict[str, Any]:
    info = run.info
    figures = run.to_json()
    data: dict[str, Any] = {
        "title": run.name,
        "command": shlex.join(info.get("command", [])),
        "host": _host(info),
        "libraries": info.get("libraries", {}),
        "exit_code": info.get("exit_code"),
        "signal": signal_name(info["signal"]) if info.get("signal") else None,
        "begin_ms": run.summary.begin_ns // 1_000_000,
        "absent": info.get("absent", []),
        "headline": headline(run.summary, run.is_baseline),
        "epochs": _epochs(run),
        "regions": _regions(run),
        # Rows are in columns below, marks in the picture of power.
        "figures": {
            name: value
            for name, value in figures.items()
            if name not in ("marks", "epochs", "regions", "step", "traced")
        },
        "events": run.recording.events.num_rows,
        # If nothing was traced, the reason stands in the place of operations.
        "traced_lines": tracing_lines(run),
        "why_untraced": why_no_operations(run.recording),
        "power": _power(run),
        "windows": [
            {key: window[key] - run.summary.begin_ns for key in ("begin_ns", "end_ns")}
            | {"steps": len(window["steps"])}
            for window in run.recording.windows.to_pylist()
        ],
    }
    if run.footprint is not None:
        edges = run.edges if run.edges.num_rows else None
        tree = tree_of(run.footprint, edges)
        merged = merged_tree(run.footprint, edges, tree, rules)
        data["tree"] = tree.columns
        data["merged"] = None if merged is None else {**merged[0].columns, "of_node": merged[1]}
        data["rows"] = _rows(run.footprint, tree)
        data["levels"] = _levels(run, figures, tree, merged)
        data["layers"] = _layers(run, tree)
    return data


def comparison_data(a: Run, b: Run, edges: pa.Table | None = None) -> dict[str, Any]:
    """What changed: in one step if both have steps, else in all that was traced.

    Or the reason why that cannot be said.
    """
    steps, untraced = alike(a, b) or ((a.footprint, b.footprint), [])
    of_a, of_b = steps
    if of_a is None or of_b is None:
        side, run = ("A", a) if of_a is None else ("B", b)
        why = run.absent or run.recording.lost("events")
        return {"reason": f"{side} has no traced operations{why and f': {why}'}"}
    try:
        whole = compare([of_a], [of_b], untraced=untraced)
    except UserError as error:
        return {"reason": str(error)}
    devices = [change.name for change in whole.devices]
    found = {"all": whole, **{name: compare([of_a], [of_b], name, untraced=untraced) for name in devices}}
    tree = tree_of(_bare(found.values()), edges)
    views = {name: _comparison(comparison, tree) for name, comparison in found.items()}
    return {"tree": tree.columns, "views": views}


def _comparison(comparison: Comparison, tree: Tree) -> dict[str, Any]:
    changes = _changes(comparison)
    figures = {
        name: value
        for name, value in comparison_json(comparison).items()
        if name not in ("changes", "only_a", "only_b")
    }
    phases = list(dict.fromkeys(phase for _, phase, *_ in changes))
    return {
        **figures,
        "node": np.array([tree.number[name] for name, *_ in changes], dtype=np.int64),
        "phase": np.array([phases.index(phase) for _, phase, *_ in changes], dtype=np.int64),
        "phases": phases,
        **{
            key: np.array([change[i] for change in changes], dtype=np.float64)
            for i, key in enumerate(("a_j", "b_j", "half_width_j"), start=2)
        },
    }


def _changes(comparison: Comparison) -> list[tuple[str, str | None, float, float, float]]:
    """Name, phase, energy in A and in B (nan: not there), half-width (nan: not known)."""
    none = math.nan
    return [
        *(
            (one.name, one.phase, one.a_j, one.b_j, none if one.half_width_j is None else one.half_width_j)
            for one in comparison.changes
        ),
        *((name, phase, energy_j, none, none) for (name, phase), energy_j in comparison.only_a),
        *((name, phase, none, energy_j, none) for (name, phase), energy_j in comparison.only_b),
    ]


def _bare(comparisons: Iterable[Comparison]) -> Footprint:
    """A footprint with the names of both sides, only for its tree."""
    energy_j: dict[str, float] = {}
    for comparison in comparisons:
        for name, _, a_j, b_j, _ in _changes(comparison):
            energy_j[name] = energy_j.get(name, 0.0) + np.nansum([a_j, b_j])
    zeros = pa.array(np.zeros(len(energy_j)))
    rows = {
        "device": pa.array([""] * len(energy_j), pa.string()),
        "name": pa.array(list(energy_j), pa.string()),
        "phase": pa.nulls(len(energy_j), pa.string()),
        **dict.fromkeys(_FIGURES, zeros),
        "energy_j": pa.array(list(energy_j.values()), pa.float64()),
    }
    return Footprint(pa.table(rows), {})


def _host(info: Mapping[str, Any]) -> dict[str, Any]:
    host = info.get("host", {})
    gpus = {gpu.get("device"): gpu for gpu in host.get("gpus") or []}
    return {
        "hostname": host.get("hostname"),
        "cpu": host.get("cpu"),
        "devices": {
            device: {"name": gpu.get("name"), "limit_w": gpu.get("power_limit_w")}
            for device, gpu in gpus.items()
        },
    }


def _epochs(run: Run) -> dict[str, Any]:
    epochs = run.summary.epochs
    shown = epochs[:_MOST_EPOCHS]
    begin_ns = run.summary.begin_ns
    return {
        "count": len(epochs),
        "index": [epoch.index for epoch in shown],
        "start_ns": np.array([epoch.start_ns - begin_ns for epoch in shown], dtype=np.int64),
        "end_ns": np.array([epoch.end_ns - begin_ns for epoch in shown], dtype=np.int64),
        "program_j": np.array([epoch.program_j for epoch in shown], dtype=float),
        "energy_j": {
            name: np.array([epoch.devices[name].energy_j for epoch in shown], dtype=float)
            for name in _adding(run)
        },
    }


def _adding(run: Run) -> list[str]:
    return [name for name, device in run.summary.devices.items() if device.scope == "device"]


def _regions(run: Run) -> dict[str, Any]:
    regions = run.summary.regions
    return {
        "devices": _adding(run),
        "count": len(regions),
        "rows": [
            {
                "name": region.name,
                "times": region.count,
                "duration_s": region.duration_s,
                "program_j": region.program_j,
                "energy_j": {name: region.total_j.get(name) for name in _adding(run)},
            }
            for region in longest(regions, _MOST_REGIONS)
        ],
    }


def _power(run: Run) -> dict[str, Any]:
    begin_ns, end_ns = run.summary.begin_ns, run.summary.end_ns
    drawn = [name for name, device in run.summary.devices.items() if device.scope != "part"]
    windows = [(window["asked_ns"], window["stopped_ns"]) for window in run.recording.windows.to_pylist()]
    most = MOST_POINTS // max(1, len(drawn))
    return {
        name: power_columns(run.traces[name], begin_ns, end_ns, windows, most)
        for name in drawn
        if run.traces[name].start_ns.size and end_ns > begin_ns
    }


def _layers(run: Run, tree: Tree) -> dict[str, Any]:
    drawn = [name for name, device in run.summary.devices.items() if device.scope == "device"]
    busy = set(run.recording.events["device"].cast(pa.string()).unique().to_pylist())
    drawn = [name for name in drawn if name in busy]
    most = MOST_STRETCHES // max(1, len(drawn))
    return {
        name: layer_columns(run.recording.events, name, tree, run.summary.begin_ns, most) for name in drawn
    }


def _rows(footprint: Footprint, tree: Tree) -> dict[str, Any]:
    rows = footprint.rows
    texts = {name: rows[name].combine_chunks().dictionary_encode(null_encoding="encode") for name in _TEXTS}
    node = np.array([tree.number[name] for name in texts["name"].dictionary.to_pylist()], dtype=np.int64)
    return {
        "node": node[texts["name"].indices.to_numpy()] if rows.num_rows else node,
        **{name: texts[name].indices.to_numpy().astype(np.int64) for name in _TEXTS[1:]},
        **{f"{name}_names": texts[name].dictionary.to_pylist() for name in _TEXTS[1:]},
        **{name: column(rows, name) for name in _FIGURES},
    }


def _levels(
    run: Run, figures: Mapping[str, Any], tree: Tree, merged: tuple[Tree, Ints] | None
) -> dict[str, Any]:
    """Totals for both levels, and how the rows of one step follow from those traced."""
    levels: dict[str, Any] = {}
    for name, footprint in (("step", run.step), ("traced", run.footprint)):
        if footprint is None:
            continue
        said = figures[name]
        totals = {d: {k: v for k, v in total.items() if k != "rows"} for d, total in said["devices"].items()}
        levels[name] = {**said, "devices": totals}
    if run.step is not None and run.footprint is not None:
        if run.footprint.rows.select(_TEXTS).equals(run.step.rows.select(_TEXTS)):
            levels["step"]["columns"] = _factors(run.footprint, run.step, run)
        else:
            levels["step"]["rows"] = _rows(run.step, tree)
    for name, footprint in (("step", run.step), ("traced", run.footprint)):
        # If rows follow by a factor, so do their sums.
        if footprint is not None and not isinstance(_column(levels[name], "uncertainty_j"), dict):
            levels[name]["widths"] = interval_columns(footprint, tree, merged)
    return levels


def _column(level: Mapping[str, Any], name: str) -> Any:
    return level.get("columns", {}).get(name)


def _factors(traced: Footprint, step: Footprint, run: Run) -> dict[str, Any]:
    """Per column, a factor or two per device; or the column itself, if no factors give it exactly."""
    steps = max(total.steps for total in traced.devices.values())
    device = traced.rows["device"].to_numpy(zero_copy_only=False)
    levelled = {name: of.factor for name, of in run.untraced.items()}
    chosen: dict[str, Any] = {}
    for name in _FIGURES:
        before, after = column(traced.rows, name), column(step.rows, name)
        chosen[name] = after
        for level in (levelled, {}):
            factors = {each: [1 / steps, level.get(each) or 1.0] for each in traced.devices}
            product = before.copy()
            for place in (0, 1):
                product *= np.array([factors[each][place] for each in device], dtype=np.float64)
            if np.array_equal(product, after, equal_nan=True):
                chosen[name] = {"times": factors}
                break
    return chosen
