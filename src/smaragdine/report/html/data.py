"""What a page knows about its runs: figures as `report --json` has them, in columns.

The rows of a footprint are columns beside a tree of nodes; nothing is summed here. What one step costs is
nearly always what was traced times a factor or two for each device: then only the factors are stored, after
the product was seen to be equal in every bit.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.accounting.at_rest import is_baseline
from smaragdine.accounting.comparison import Comparison, compare
from smaragdine.accounting.comparison import to_json as comparison_json
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.merge import Rule
from smaragdine.accounting.overview import Overview, alike, overview_json
from smaragdine.accounting.regions import longest
from smaragdine.accounting.rows import column
from smaragdine.accounting.traces import device_traces
from smaragdine.arrays import Ints
from smaragdine.errors import UserError, signal_name
from smaragdine.recording.reader import Recording
from smaragdine.report.html.timeline import MOST_POINTS, MOST_STRETCHES, layer_columns, power_columns
from smaragdine.report.html.tree import (
    Tree,
    interval_columns,
    merged_tree,
    tree_of,
)
from smaragdine.report.overview import tracing_lines
from smaragdine.report.terminal import headline
from smaragdine.tracing.assemble.absence import why_no_operations

_FIGURES = ("energy_j", "busy_s", "count", "uncertainty_j")
_TEXTS = ["name", "device", "phase", "basis"]
_MOST_EPOCHS = 1000
_MOST_REGIONS = 200


def run_data(recording: Recording, found: Overview, rules: Sequence[Rule] = ()) -> dict[str, Any]:
    info = recording.info
    figures = overview_json(found)
    data: dict[str, Any] = {
        "title": title_of(recording),
        "command": shlex.join(info.get("command", [])),
        "host": _host(info),
        "libraries": info.get("libraries", {}),
        "exit_code": info.get("exit_code"),
        "signal": signal_name(info["signal"]) if info.get("signal") else None,
        "begin_ms": found.summary.begin_ns // 1_000_000,
        "absent": info.get("absent", []),
        "headline": headline(found.summary, is_baseline(recording)),
        "epochs": _epochs(found),
        "regions": _regions(found),
        # Rows are in columns below, marks in the power's picture.
        "figures": {
            name: value
            for name, value in figures.items()
            if name not in ("marks", "epochs", "regions", "step", "traced")
        },
        "events": recording.events.num_rows,
        # Why nothing was traced stands where the operations would.
        "traced_lines": [] if found.tracing is None else tracing_lines(found.tracing, found.steps),
        "why_untraced": why_no_operations(recording),
        "power": _power(recording, found),
        "windows": [
            {key: window[key] - found.summary.begin_ns for key in ("begin_ns", "end_ns")}
            | {"steps": len(window["steps"])}
            for window in recording.windows.to_pylist()
        ],
    }
    if found.footprint is not None:
        edges = recording.edges if recording.edges.num_rows else None
        tree = tree_of(found.footprint, edges)
        merged = merged_tree(found.footprint, edges, tree, rules)
        data["tree"] = tree.columns
        data["merged"] = None if merged is None else {**merged[0].columns, "of_node": merged[1]}
        data["rows"] = _rows(found.footprint, tree)
        data["levels"] = _levels(found, figures, tree, merged)
        data["layers"] = _layers(recording, found, tree)
    return data


def title_of(recording: Recording) -> str:
    return recording.path.resolve().name


def comparison_data(a: Overview, b: Overview, edges: pa.Table | None = None) -> dict[str, Any]:
    """What changed: of one step where both have steps, else of all that was traced.

    Why there is none, where there is none.
    """
    steps = alike(a, b)
    of_a, of_b = steps or (a.footprint, b.footprint)
    if of_a is None or of_b is None:
        return {"reason": f"{'A' if of_a is None else 'B'} has no traced operations"}
    try:
        whole = compare([of_a], [of_b])
    except UserError as error:
        return {"reason": str(error)}
    devices = [change.name for change in whole.devices]
    found = {"all": whole, **{name: compare([of_a], [of_b], name) for name in devices}}
    tree = tree_of(_bare(found.values()), edges)
    views = {name: _comparison(comparison, tree) for name, comparison in found.items()}
    return {"level": "step" if steps else "traced", "tree": tree.columns, "views": views}


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
    """Name, phase, energy in A and in B (nan: it is not there), half-width (nan: not known)."""
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
    """A footprint of both sides' names, for its tree alone."""
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


def _epochs(found: Overview) -> dict[str, Any]:
    epochs = found.summary.epochs
    shown = epochs[:_MOST_EPOCHS]
    begin_ns = found.summary.begin_ns
    return {
        "count": len(epochs),
        "index": [epoch.index for epoch in shown],
        "start_ns": np.array([epoch.start_ns - begin_ns for epoch in shown], dtype=np.int64),
        "end_ns": np.array([epoch.end_ns - begin_ns for epoch in shown], dtype=np.int64),
        "program_j": np.array([epoch.program_j for epoch in shown], dtype=float),
        "energy_j": {
            name: np.array([epoch.devices[name].energy_j for epoch in shown], dtype=float)
            for name in _adding(found)
        },
    }


def _adding(found: Overview) -> list[str]:
    return [name for name, device in found.summary.devices.items() if device.scope == "device"]


def _regions(found: Overview) -> dict[str, Any]:
    regions = found.summary.regions
    return {
        "devices": _adding(found),
        "count": len(regions),
        "rows": [
            {
                "name": region.name,
                "times": region.count,
                "duration_s": region.duration_s,
                "program_j": region.program_j,
                "energy_j": {name: region.total_j.get(name) for name in _adding(found)},
            }
            for region in longest(regions, _MOST_REGIONS)
        ],
    }


def _power(recording: Recording, found: Overview) -> dict[str, Any]:
    begin_ns, end_ns = found.summary.begin_ns, found.summary.end_ns
    traces = device_traces(recording)
    drawn = [name for name, device in found.summary.devices.items() if device.scope != "part"]
    windows = [(window["asked_ns"], window["stopped_ns"]) for window in recording.windows.to_pylist()]
    most = MOST_POINTS // max(1, len(drawn))
    return {
        name: power_columns(traces[name], begin_ns, end_ns, windows, most)
        for name in drawn
        if traces[name].start_ns.size and end_ns > begin_ns
    }


def _layers(recording: Recording, found: Overview, tree: Tree) -> dict[str, Any]:
    drawn = [name for name, device in found.summary.devices.items() if device.scope == "device"]
    busy = set(recording.events["device"].cast(pa.string()).unique().to_pylist())
    drawn = [name for name in drawn if name in busy]
    most = MOST_STRETCHES // max(1, len(drawn))
    return {name: layer_columns(recording.events, name, tree, found.summary.begin_ns, most) for name in drawn}


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
    found: Overview, figures: Mapping[str, Any], tree: Tree, merged: tuple[Tree, Ints] | None
) -> dict[str, Any]:
    """Totals for both levels, and how the rows of one step follow from those traced."""
    levels: dict[str, Any] = {}
    for name, footprint in (("step", found.step), ("traced", found.footprint)):
        if footprint is None:
            continue
        said = figures[name]
        totals = {d: {k: v for k, v in total.items() if k != "rows"} for d, total in said["devices"].items()}
        levels[name] = {**said, "devices": totals}
    if found.step is not None and found.footprint is not None:
        if found.footprint.rows.select(_TEXTS).equals(found.step.rows.select(_TEXTS)):
            levels["step"]["columns"] = _factors(found.footprint, found.step, found)
        else:
            levels["step"]["rows"] = _rows(found.step, tree)
    for name, footprint in (("step", found.step), ("traced", found.footprint)):
        # Where rows follow from those traced by a factor, so do their sums.
        if footprint is not None and not isinstance(_column(levels[name], "uncertainty_j"), dict):
            levels[name]["widths"] = interval_columns(footprint, tree, merged)
    return levels


def _column(level: Mapping[str, Any], name: str) -> Any:
    return level.get("columns", {}).get(name)


def _factors(traced: Footprint, step: Footprint, found: Overview) -> dict[str, Any]:
    """Per column, a factor or two for each device; the column itself where no factors give it exactly."""
    steps = max(total.steps for total in traced.devices.values())
    device = traced.rows["device"].to_numpy(zero_copy_only=False)
    levelled = {name: of.factor for name, of in found.untraced.items()}
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
