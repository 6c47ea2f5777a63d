"""Lays epochs or steps over each other at their beginnings: their power over time, and when a layer ran.

Readings fall on different parts of each repetition, so many of them together show more than the sensor alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from smaragdine.accounting.diagram import Node, diagram
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.run import Run
from smaragdine.accounting.similarity import select
from smaragdine.accounting.spans import Spans, joined
from smaragdine.arrays import Floats
from smaragdine.arrow import pc
from smaragdine.recording.reader import Recording

_CELLS = (24, 240)  # fewest and most cells of the grid


Stretches: TypeAlias = Sequence[Sequence[tuple[float, float]]]  # per epoch, in seconds since its beginning


@dataclass(frozen=True)
class LayerTimes:
    """When a layer ran, in the epochs in which it was seen; and when the others of its kind did."""

    layer: str
    spans_s: Stretches
    others: Sequence[str] = ()
    others_s: Stretches = ()


@dataclass(frozen=True)
class Repeated:
    """Mean power in even cells of the median epoch, or of whatever `of` says repeats."""

    of: str
    count: int
    edges_s: Floats  # one more than cells
    mean_w: Floats  # nan: too few of them cover the cell
    std_w: Floats


def laid_over(
    runs: Sequence[Run], device: str, layer: str | None = None
) -> tuple[Repeated, LayerTimes | None] | None:
    """Lays over each other the epochs of runs of one setting or, if there are none, their traced steps. Also
    tells when a layer (by default the main one) ran in the first traced run. None if nothing repeats."""
    spans = [[(epoch.start_ns, epoch.end_ns) for epoch in run.summary.epochs] for run in runs]
    of = "epoch"
    if not any(spans):
        spans = [traced_steps(run, device) for run in runs]
        of = "step"
    known = [(run.traces[device], each) for run, each in zip(runs, spans, strict=True) if each]
    if not known:
        return None
    ran = None
    for run, each in zip(runs, spans, strict=True):
        footprint = run.shown
        if footprint is not None and device in footprint.devices:
            alike = layers_alike(select(footprint, device), layer)
            ran = when(run.recording.events, device, alike, each) if alike else None
            break
    return averaged(known, of), ran


def averaged(traces: Sequence[tuple[PowerTrace, Spans]], of: str = "epoch") -> Repeated:
    """A cell counts for an epoch that covers half of it; nan if fewer than half of the epochs do."""
    long_ns = np.array([end - begin for _, spans in traces for begin, end in spans])
    length_ns = int(np.median(long_ns))
    piece_ns = max(int(np.median(t.end_ns - t.start_ns)) for t, _ in traces if t.start_ns.size)
    cells = int(np.clip(length_ns // max(piece_ns, 1), *_CELLS))
    edges_ns = np.linspace(0, length_ns, cells + 1).astype(np.int64)
    rows: list[Floats] = []
    for trace, spans in traces:
        for begin_ns, end_ns in spans:
            t_ns = np.minimum(begin_ns + edges_ns, end_ns)
            covered_ns = np.diff(trace.covered_until_ns(t_ns))
            used_j = np.diff(trace.energy_until_j(t_ns))
            enough = covered_ns * 2 >= np.diff(edges_ns)
            rows.append(np.divide(used_j, covered_ns * 1e-9, out=np.full(cells, np.nan), where=enough))
    power_w = np.array(rows)
    known = np.isfinite(power_w).sum(axis=0)
    shown = 2 * known >= len(rows)
    mean_w = np.divide(np.nansum(power_w, axis=0), known, out=np.full(cells, np.nan), where=shown)
    squares = np.nansum((power_w - mean_w) ** 2, axis=0)
    std_w = np.sqrt(np.divide(squares, known - 1, out=np.full(cells, np.nan), where=shown & (known > 1)))
    return Repeated(of, len(rows), edges_ns / 1e9, mean_w, std_w)


def traced_steps(run: Run, device: str) -> list[tuple[int, int]]:
    """A GPU lags behind the marks by a varying time, so its steps begin with their first kernels."""
    if device.startswith("gpu"):
        return _by_kernels(run.recording, device)
    return [] if run.steps is None else [(int(begin), int(end)) for begin, end in run.steps.traced_ns]


def _by_kernels(recording: Recording, device: str) -> list[tuple[int, int]]:
    """From each step's first kernel to the next step's, within one window."""
    events = recording.events
    here = pc.and_(pc.equal(events["device"].cast(pa.string()), device), events["step"].is_valid())  # pyright: ignore
    first = events.filter(here).group_by("step").aggregate([("start_ns", "min")])
    begin_ns = np.sort(first["start_ns_min"].to_numpy())
    window = np.searchsorted(np.sort(recording.windows["begin_ns"].to_numpy()), begin_ns, side="right")
    return [
        (b, e) for (b, e), same in zip(pairwise(begin_ns.tolist()), np.diff(window) == 0, strict=True) if same
    ]


def when(events: pa.Table, device: str, layers: Sequence[str], spans: Spans) -> LayerTimes:
    """When the first of these layers ran, and when the others did."""
    here = events.filter(pc.equal(events["device"].cast(pa.string()), device))  # pyright: ignore
    names = here["name"].cast(pa.string()).dictionary_encode().combine_chunks()
    first, others = layers[0], tuple(layers[1:])
    own_s, others_s = (_stretches(here, names, alike, spans) for alike in ((first,), others))
    return LayerTimes(first, own_s, others, others_s)


def _stretches(events: pa.Table, names: pa.DictionaryArray, layers: Sequence[str], spans: Spans) -> Stretches:
    """Stretches in which events of these layers ran, from the beginning of each epoch."""
    inside = [
        any(name == layer or name.startswith(layer + "/") for layer in layers)
        for name in names.dictionary.to_pylist()
    ]
    here = events.filter(pc.take(pa.array(inside, pa.bool_()), names.indices))
    start_ns = here["start_ns"].to_numpy()
    end_ns = start_ns + here["duration_ns"].to_numpy()
    order = sorted(spans)
    at = np.searchsorted([begin for begin, _ in order], start_ns, side="right") - 1
    found: dict[int, list[tuple[int, int]]] = {}
    for start, end, i in zip(start_ns.tolist(), end_ns.tolist(), at.tolist(), strict=True):
        if i >= 0 and start < order[i][1]:
            found.setdefault(i, []).append((start - order[i][0], min(end, order[i][1]) - order[i][0]))
    # Kernels of one layer follow each other within microseconds: at this scale they are one stretch.
    gap_ns = max((end - begin for begin, end in order), default=0) // 200
    return [
        [
            (begin * 1e-9, (end - gap_ns) * 1e-9)
            for begin, end in joined([(begin, end + gap_ns) for begin, end in spans_ns])
        ]
        for spans_ns in found.values()
    ]


def layers_alike(footprint: Footprint, layer: str | None = None) -> list[str]:
    """The siblings that repeat and together take the most energy (layer_0 to layer_11); or the named layer,
    with the others of its family if it has any."""
    found = [node.path for node in repeating(diagram(footprint))]
    if layer is None:
        return found
    return [layer, *(path for path in found if path != layer)] if layer in found else [layer]


def repeating(root: Node) -> list[Node]:
    """Composite siblings, three or more, that differ only in an index, of the family that takes the most
    energy.

    A family inside another takes less than it; if both take the same, the outer one is found first.
    """
    best: list[Node] = []
    waiting = [root]
    while waiting:
        node = waiting.pop(0)
        families: dict[str, list[Node]] = {}
        for child in node.children:
            if child.children and re.search(r"\d", child.name):
                families.setdefault(re.sub(r"\d+", "*", child.name), []).append(child)
        for family in families.values():
            if len(family) >= 3 and _energy_j(family) > _energy_j(best):
                best = family
        waiting.extend(node.children)
    return sorted(best, key=lambda node: [int(n) for n in re.findall(r"\d+", node.name)])


def _energy_j(nodes: Sequence[Node]) -> float:
    return sum(node.energy_j for node in nodes)
