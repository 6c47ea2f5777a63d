"""`epoch_power`: the power of an epoch, averaged over epochs, and when one layer ran (the paper's figure 3).

Epochs are laid over each other at their beginnings. A run without epochs but with traced steps is drawn by
step: over many of them, readings fall on every part of a step, finer than the sensor looks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from smaragdine.accounting.diagram import Node, diagram
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.power import Floats, PowerTrace
from smaragdine.accounting.step_spans import joined
from smaragdine.recording.reader import Recording
from smaragdine.report.figures import lettering, style
from smaragdine.report.figures.power import common_device
from smaragdine.report.figures.runs import NotDrawn, Run, one_setting, only, power_notes, working_device
from smaragdine.report.figures.style import styled
from smaragdine.units import watts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHADE = 0.55
_CELLS = (24, 240)  # fewest and most on the grid

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Ran:
    """A layer and when it ran: for each epoch in which it was seen, spans in seconds since its beginning."""

    layer: str
    spans_s: Sequence[Sequence[tuple[float, float]]]


@styled
def epoch_power(
    traces: Sequence[tuple[PowerTrace, Spans]],
    device: str,
    ran: Ran | None = None,
    of: str = "epoch",
    notes: Sequence[str] = (),
) -> Figure:
    """The power of each run with its epochs, or whatever `of` says that repeats."""
    figure, (axes,) = style.sheet(height_mm=56)
    edges_s, mean_w, std_w = averaged(traces)
    middle_s = (edges_s[:-1] + edges_s[1:]) / 2
    count = sum(len(spans) for _, spans in traces)
    if ran is not None and ran.spans_s:
        # So faint that all of them over each other make the colour of the legend.
        alpha = 1 - (1 - _SHADE) ** (1 / len(ran.spans_s))
        height = axes.get_xaxis_transform()
        for spans in ran.spans_s:
            bars = [(begin_s, end_s - begin_s) for begin_s, end_s in spans]
            axes.broken_barh(bars, (0, 1), transform=height, color=style.VERMILLION, alpha=alpha, lw=0.3)
    if count > 1:
        axes.fill_between(middle_s, mean_w - std_w, mean_w + std_w, color=style.BLUE, alpha=0.22, lw=0)
    axes.plot(middle_s, mean_w, color=style.BLUE, marker="o", ms=1.6, mew=0, lw=0.8, label="mean power")
    highest_w = float(np.nanmax(mean_w + np.nan_to_num(std_w)))
    axes.set_xlim(0, float(edges_s[-1]))
    axes.set_ylim(0, highest_w * 1.06)
    axes.grid(axis="y")
    style.duration(axes.xaxis, f"Time since the {of} began", float(edges_s[-1]))
    style.quantity(axes.yaxis, f"Power of {device}", "W", highest_w)
    _legend(axes, ran)
    plural = f"{count} {of}s" if count > 1 else f"one {of}"
    said = [f"mean and standard deviation (band) over {plural}" if count > 1 else f"{plural}: no spread"]
    if ran is not None and ran.spans_s:
        seen = len(ran.spans_s)
        said += [f"shaded: when the layer ran in {seen} traced {of}{'s, darker in more' if seen > 1 else ''}"]
    text = f"{watts(float(np.nanmean(mean_w)))} on average, {watts(float(np.nanmax(mean_w)))} at most"
    text += f"; the layer is {ran.layer}" if ran is not None else ""
    return style.describe(figure, f"Power of {device} during one {of}", text, [*said, *notes])


def epoch_power_of_runs(runs: Sequence[Run], layer: str | None = None) -> Figure:
    """Highlights the layer that takes the most, unless one is named; of the first run that traced it."""
    one_setting(runs)
    traced = [run for run in runs if run.overview.footprint is not None]
    device = working_device([run.footprint for run in traced]) if traced else common_device(runs)
    epochs = [[(e.start_ns, e.end_ns) for e in run.overview.summary.epochs] for run in runs]
    of = "epoch"
    if not any(epochs):
        epochs = traced_steps(runs, device)
        of = "step"
    known = [(run.traces[device], spans) for run, spans in zip(runs, epochs, strict=True) if spans]
    if not known:
        raise NotDrawn("no run has epochs or traced steps")
    ran = None
    if traced:
        layer = layer or main_layer(only(traced[0].footprint, [device]))
        spans = epochs[runs.index(traced[0])]
        ran = when(traced[0].recording.events, device, layer, spans) if layer else None
    return epoch_power(known, device, ran, of, power_notes(runs, [device]))


def traced_steps(runs: Sequence[Run], device: str) -> list[list[tuple[int, int]]]:
    """Of each run. A GPU lags behind the marks, now more, now less: there a step begins with its first
    kernel."""
    if device.startswith("gpu"):
        return [_by_kernels(run.recording, device) for run in runs]
    steps = [run.overview.steps for run in runs]
    return [[(int(b), int(e)) for b, e in s.traced_ns] if s is not None else [] for s in steps]


def _by_kernels(recording: Recording, device: str) -> list[tuple[int, int]]:
    """From each step's first kernel to that of the next one of its window."""
    events = recording.events
    here = pc.and_(pc.equal(events["device"].cast(pa.string()), device), events["step"].is_valid())  # pyright: ignore
    first = events.filter(here).group_by("step").aggregate([("start_ns", "min")])
    begin_ns = np.sort(first["start_ns_min"].to_numpy())
    window = np.searchsorted(np.sort(recording.windows["begin_ns"].to_numpy()), begin_ns, side="right")
    return [
        (b, e) for (b, e), same in zip(pairwise(begin_ns.tolist()), np.diff(window) == 0, strict=True) if same
    ]


def averaged(traces: Sequence[tuple[PowerTrace, Spans]]) -> tuple[Floats, Floats, Floats]:
    """Edges of even cells in seconds, mean and standard deviation of the power in each over all epochs.

    The grid is as long as the median epoch. A cell counts of an epoch that covers at least half of it; one
    that fewer than half of the epochs cover is nan.
    """
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
    return edges_ns / 1e9, mean_w, std_w


def when(events: pa.Table, device: str, layer: str, spans: Spans) -> Ran:
    """The stretches in which events of a layer ran, since the beginning of the epoch they are in."""
    name = events["name"].cast(pa.string())
    inside = pc.or_(pc.equal(name, layer), pc.starts_with(name, layer + "/"))  # pyright: ignore
    here = events.filter(pc.and_(inside, pc.equal(events["device"].cast(pa.string()), device)))  # pyright: ignore
    start_ns = here["start_ns"].to_numpy()
    end_ns = start_ns + here["duration_ns"].to_numpy()
    order = sorted(spans)
    at = np.searchsorted([begin for begin, _ in order], start_ns, side="right") - 1
    found: dict[int, list[tuple[int, int]]] = {}
    for start, end, i in zip(start_ns.tolist(), end_ns.tolist(), at.tolist(), strict=True):
        if i >= 0 and start < order[i][1]:
            found.setdefault(i, []).append((start - order[i][0], min(end, order[i][1]) - order[i][0]))
    # Kernels of one layer follow each other within microseconds: at this scale that is one stretch.
    gap_ns = max((end - begin for begin, end in order), default=0) // 200
    return Ran(
        layer,
        [
            [
                (begin * 1e-9, (end - gap_ns) * 1e-9)
                for begin, end in joined([(begin, end + gap_ns) for begin, end in spans_ns])
            ]
            for spans_ns in found.values()
        ],
    )


def _legend(axes: Axes, ran: Ran | None) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = list(axes.get_lines()[:1])
    if ran is not None and ran.spans_s:
        handles.append(Patch(fc=style.VERMILLION, alpha=_SHADE, label=lettering.shortened(ran.layer, 44)))
    style.legend_above(axes, handles)


def main_layer(footprint: Footprint) -> str | None:
    """The first of the siblings that repeat and together take the most (layer_0 of twelve); else None."""
    found = repeating(diagram(footprint))
    return found[0].path if found else None


def repeating(root: Node) -> list[Node]:
    """Composite siblings whose names differ only in an index, three or more, that together take the most.

    A family inside another takes less than it: of equal ones the outer is found first.
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
