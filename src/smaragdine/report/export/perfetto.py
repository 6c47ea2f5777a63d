"""A recording for ui.perfetto.dev: events as slices on their lanes, power and energy as counters, marks.

Native protobuf, written packet by packet. Times are Unix nanoseconds, and the trace says so (REALTIME).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from smaragdine.accounting.coarse import coarse
from smaragdine.accounting.power import within
from smaragdine.accounting.spans import REGION, Span, all_spans, region_spans
from smaragdine.accounting.summary import DeviceSummary
from smaragdine.accounting.traces import device_traces
from smaragdine.arrays import Floats
from smaragdine.report.export.nesting import Edge, Slice, edges
from smaragdine.report.export.perfetto_message import INSTANT
from smaragdine.report.export.perfetto_packets import Packets
from smaragdine.report.export.run import Run, hardware, program, traced_energies

_BATCH = 1 << 16
_MOST_POINTS = 500_000  # of a counter: the browser has to hold them
_SPAN_ORDER = {"experiment": 1, "train": 2, "evaluate": 3, "predict": 4, "epoch": 5, "step": 6}


def write_perfetto(run: Run, path: Path) -> list[str]:
    """The remarks say what is not in the file, and why."""
    events, energy_j, remarks = traced_energies(run)
    with path.open("wb") as file:
        trace = Packets(file, run.recording)
        _write_marks(trace, run)
        devices = [device for device in _devices(run, events) if run.wants(device)]
        tracks = {device: _describe_device(trace, run, device, i + 1) for i, device in enumerate(devices)}
        for device in devices:
            if device in run.summary.devices:
                _write_counters(trace, run, run.summary.devices[device], tracks[device])
        _write_events(trace, events, energy_j, tracks)
    return remarks


def _devices(run: Run, events: pa.Table) -> Sequence[str]:
    traced: list[str] = events["device"].unique().to_pylist()
    return list(dict.fromkeys([*run.summary.devices, *sorted(traced)]))


def _describe_device(trace: Packets, run: Run, device: str, pid: int) -> int:
    known = run.summary.devices.get(device)
    what = hardware(run.recording.info, device)
    labels = [known.provenance if known is not None else "power not recorded"]
    return trace.track(f"{device} {what}" if what else device, pid=pid, labels=labels, order=pid)


def _write_counters(trace: Packets, run: Run, device: DeviceSummary, parent: int) -> None:
    if device.energy_j is None:
        return
    begin_ns, end_ns = run.summary.begin_ns, run.summary.end_ns
    whole = device_traces(run.recording)[device.device]
    drawn = coarse(within(whole, [(begin_ns, end_ns)]), _MOST_POINTS)
    suffix = "" if device.provenance == "measured" else f", {device.provenance}"
    about = device.source + ("" if device.scope == "device" else "; not in the sum over devices")
    power = trace.track(f"power{suffix}", parent, 1, unit="W", description=about)
    for t_ns, power_w in zip(drawn.start_ns.tolist(), drawn.power_w.tolist(), strict=True):
        trace.count(t_ns, power, power_w)
    energy = trace.track(f"energy{suffix}", parent, 2, unit="J", description=about)
    at_ns = np.unique(np.concatenate([[begin_ns], drawn.start_ns, drawn.end_ns, [end_ns]]))
    until_j = whole.energy_until_j(at_ns) - whole.energy_until_j(begin_ns)
    for t_ns, value_j in zip(at_ns.tolist(), until_j.tolist(), strict=True):
        trace.count(t_ns, energy, value_j)
    if device.missing:
        missing = trace.track("no readings", parent, 3)
        for gap_begin_ns, gap_end_ns in device.missing:
            trace.begin(gap_begin_ns, missing, "no readings")
            trace.end(gap_end_ns, missing)


def _write_events(trace: Packets, events: pa.Table, energy_j: Floats, parents: Mapping[str, int]) -> None:
    tracks: dict[object, int] = {}
    reading = _Reading(events, energy_j)
    for edge in edges(reading.slices(parents)):
        track = tracks.get(edge.track)
        if track is None:
            (device, lane), _ = edge.track
            # Tracks of one name below one parent are drawn as one lane.
            kind = "stream" if device.startswith("gpu") else "thread"
            name = "lane not known" if lane is None else f"{kind} {lane}"
            track = tracks[edge.track] = trace.track(name, parents[device], 4 + len(tracks))
        if edge.slice is None:
            trace.end(edge.t_ns, track)
        else:
            name, notes = reading.of(edge.slice.item)
            trace.begin(edge.t_ns, track, name, notes)


class _Reading:
    """Events in the order they are drawn, a batch at a time as Python's own numbers and words."""

    def __init__(self, events: pa.Table, energy_j: Floats) -> None:
        self._events, self._energy_j = events, energy_j
        self._batch: list[tuple[str, dict[str, object]]] = []
        self._first = 0

    def slices(self, devices: Mapping[str, int]) -> Iterator[Slice[tuple[str, int | None]]]:
        start_ns = self._events["start_ns"].to_numpy()
        order = np.lexsort((-self._events["duration_ns"].to_numpy(), start_ns))
        for first in range(0, order.size, _BATCH):
            rows = order[first : first + _BATCH]
            batch = self._events.take(pa.array(rows)).to_pydict()
            energy_j = [None if np.isnan(value) else value for value in self._energy_j[rows].tolist()]
            named = zip(batch["name"], batch["phase"], batch["step"], energy_j, strict=True)
            self._batch = [
                (name, {"phase": phase, "step": step, "energy_j": used_j})
                for name, phase, step, used_j in named
            ]
            self._first = first
            timed = zip(batch["start_ns"], batch["duration_ns"], batch["device"], batch["lane"], strict=True)
            for item, (begun_ns, duration_ns, device, lane) in enumerate(timed, start=first):
                if device in devices:
                    yield Slice(begun_ns, begun_ns + duration_ns, (device, lane), lane is not None, item)

    def of(self, item: int) -> tuple[str, dict[str, object]]:
        """Name and notes of a slice just begun."""
        return self._batch[item - self._first]


def _write_marks(trace: Packets, run: Run) -> None:
    """Marks in pairs as slices, others as instants; when the profiler ran, and over which steps."""
    top = trace.track(program(run.recording.info))
    spans = [*all_spans(run.recording), *region_spans(run.recording.marks)]
    spans.sort(key=lambda span: (span.begin_ns, -span.end_ns))
    kinds = sorted({_kind(span) for span in spans}, key=lambda kind: (_SPAN_ORDER.get(kind[0], 9), kind))
    lanes = {kind: (_called(kind), order) for order, kind in enumerate(kinds, start=1)}
    slices = [Slice(s.begin_ns, s.end_ns, lanes[_kind(s)], True, i) for i, s in enumerate(spans)]
    notes = [
        (span.name if span.index is None else f"{span.name} {span.index}", {"source": span.source})
        for span in spans
    ]
    for window in run.recording.windows.to_pylist():
        lane = (f"tracing, process {window['pid']}", 20)
        texts = [(window["asked_ns"], window["begin_ns"], "profiler starts")]
        texts.append((window["begin_ns"], window["end_ns"], f"traced by {window['framework']}"))
        texts += [(step["begin_ns"], step["end_ns"], f"step {step['index']}") for step in window["steps"]]
        texts.append((window["end_ns"], window["stopped_ns"], "profiler stops"))
        for begin_ns, end_ns, text in texts:
            slices.append(Slice(begin_ns, max(begin_ns, end_ns), lane, True, len(notes)))
            notes.append((text, {}))
    slices.sort(key=lambda one: (one.start_ns, -one.end_ns))
    tracks: dict[object, int] = {}
    for edge in edges(slices):
        _write_mark_edge(trace, edge, tracks, top, notes)
    _write_instants(trace, run.recording.marks, spans, top)


def _write_mark_edge(
    trace: Packets,
    edge: Edge[tuple[str, int]],
    tracks: dict[object, int],
    top: int,
    notes: Sequence[tuple[str, Mapping[str, object]]],
) -> None:
    if edge.track not in tracks:
        (name, order), _ = edge.track
        tracks[edge.track] = trace.track(name, top, order)
    if edge.slice is None:
        trace.end(edge.t_ns, tracks[edge.track])
    else:
        trace.begin(edge.t_ns, tracks[edge.track], *notes[edge.slice.item])


def _kind(span: Span) -> tuple[str, int]:
    return f"region {span.name}" if span.source == REGION else span.name, span.rank or 0


def _called(kind: tuple[str, int]) -> str:
    return f"{kind[0]}, rank {kind[1]}" if kind[1] else kind[0]


def _write_instants(trace: Packets, marks: pa.Table, spans: Sequence[Span], top: int) -> None:
    ends = {
        (REGION if span.source == REGION else span.name, span.pid, span.source, t_ns)
        for span in spans
        for t_ns in (span.begin_ns, span.end_ns)
    }
    track = None
    for mark in marks.to_pylist():
        if (mark["name"].rpartition("_")[0], mark["pid"], mark["source"], mark["t_ns"]) in ends:
            continue
        track = trace.track("marks", top, 30) if track is None else track
        name = mark["name"] if mark["index"] is None else f"{mark['name']} {mark['index']}"
        trace.begin(mark["t_ns"], track, name, {"source": mark["source"], "detail": mark["detail"]}, INSTANT)
