"""What a page draws over time: each device's power, and the layer that ran in the traced windows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.step_spans import joined
from smaragdine.arrays import Floats, Ints
from smaragdine.arrow import pc
from smaragdine.report.html.tree import Tree

Span = tuple[int, int]  # begin and end, ns

MOST_POINTS = 24_000  # of all devices: more than any screen is wide, and below 300 kB
MOST_STRETCHES = 40_000  # of layers, of all devices


def power_columns(trace: PowerTrace, begin_ns: int, end_ns: int, windows: Sequence[Span], most: int) -> Any:
    """Stretches of a power trace, each with its lowest, highest and mean power; finer inside the windows."""
    clipped = [(max(begin_ns, begin), min(end_ns, end)) for begin, end in windows]
    fine = joined([(begin, end) for begin, end in clipped if begin < end])
    edges_ns = [begin_ns, *(edge for span in fine for edge in span), end_ns]
    every = [(begin, end) for begin, end in pairwise(edges_ns) if begin < end] or [(begin_ns, end_ns)]
    coarse_ns = max(1, sum(end - begin for begin, end in every if (begin, end) not in fine))
    parts = [
        # Half of the points for the windows, half for the rest by its length.
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
    # Between pairs of places, `reduceat` also looks from each end to the next begin: every second one counts.
    places = np.stack([i, j], axis=1).ravel()
    padded_w = np.append(trace.power_w, trace.power_w[-1:])
    low_w, high_w = (of.reduceat(padded_w, places)[::2] for of in (np.minimum, np.maximum))
    return start_ns, stop_ns, low_w, high_w, used_j / (covered_ns * 1e-9)


def layer_columns(events: pa.Table, device: str, tree: Tree, begin_ns: int, most: int) -> Any:
    """Stretches in which one layer was at work, by the operations that started one after the other.

    Where there are too many, layers deep down stand for nothing by themselves; where that is not enough, the
    later ones are left out.
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
    # What began later has the floor.
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
