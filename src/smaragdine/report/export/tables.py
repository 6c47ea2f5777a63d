"""A recording as a folder of tables, CSV or Parquet, with units in the names of the columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from smaragdine.accounting.footprint import ROWS, DeviceTotal, with_power
from smaragdine.accounting.power import PowerTrace, within
from smaragdine.accounting.spans import Span, mark_spans
from smaragdine.accounting.step_spans import joined, resumed_ns
from smaragdine.accounting.summary import DeviceSummary
from smaragdine.accounting.traces import device_traces
from smaragdine.report.export.run import Run, traced_energies

TABLES = ("devices", "footprint", "totals", "epochs", "steps", "regions", "power", "marks", "events", "edges")
pc: Any = pyarrow.compute  # its functions are made on import, where no type checker sees them

_DEVICES: dict[str, pa.DataType] = {
    **{figure: pa.float64() for figure in ("energy_j", "mean_w", "peak_w", "missing_s")},
    **{word: pa.string() for word in ("provenance", "scope", "source")},
}
_SPANS: dict[str, pa.DataType] = {
    "index": pa.int64(),
    "rank": pa.int32(),
    "source": pa.string(),
    "begin_ns": pa.int64(),
    "end_ns": pa.int64(),
    "duration_s": pa.float64(),
    "device": pa.string(),
    "energy_j": pa.float64(),  # null: nothing is known of that time
    "missing_s": pa.float64(),
}
_TOTALS = {
    field.name: {"provenance": pa.string(), "per_step": pa.bool_()}.get(field.name, pa.float64())
    for field in dataclasses.fields(DeviceTotal)
}


def tables(run: Run) -> tuple[dict[str, pa.Table], list[str]]:
    """Name → table, those with nothing to say left out; and why they have nothing to say.

    `devices`, `epochs` and `steps` are of all that a device used; `footprint` and `totals` are of the
    program's part of it.
    """
    events, remarks = _events(run)
    found = {"devices": _devices(run), **_footprint(run), **_spans(run), "power": _power(run)}
    found |= {"marks": run.recording.marks, "events": events, "edges": run.recording.edges}
    return {name: table for name, table in found.items() if table.num_rows}, remarks


def write_tables(run: Run, folder: Path, kind: str) -> list[str]:
    """`kind` is csv or parquet. The remarks say what is not there, and why."""
    found, remarks = tables(run)
    for name, table in found.items():
        path = folder / f"{name}.{kind}"
        if kind == "csv":
            import pyarrow.csv as pv

            pv.write_csv(_plain(table), path)
        else:
            import pyarrow.parquet as pq

            pq.write_table(table, path)
    return remarks


def _plain(table: pa.Table) -> pa.Table:
    """Text as text: a CSV knows no dictionaries."""
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(i, field.name, table.column(i).cast(pa.string()))
    return table


def _devices(run: Run) -> pa.Table:
    known = [device for device in run.summary.devices.values() if run.wants(device.device)]
    columns: dict[str, Any] = {"device": pa.array([device.device for device in known], pa.string())}
    for name, kind in _DEVICES.items():
        columns[name] = pa.array([getattr(device, name) for device in known], kind)
    return pa.table(columns)


def _footprint(run: Run) -> dict[str, pa.Table]:
    """Rows and totals of the footprint: Σ energy_j + idle_j = total_j on each device."""
    footprint = run.footprint
    if footprint is None:
        return {"footprint": ROWS.empty_table()}
    totals: dict[str, Any] = {"device": pa.array(list(footprint.devices), pa.string())}
    for name, kind in _TOTALS.items():
        values = [getattr(total, name) for total in footprint.devices.values()]
        totals[name] = pa.array([float(v) if type(v) is int else v for v in values], kind)
    return {"footprint": with_power(footprint.rows), "totals": pa.table(totals)}


def _spans(run: Run) -> dict[str, pa.Table]:
    """Epochs, steps and regions, a row for each device: what all of it used, whoever used it."""
    traces = {device: device_traces(run.recording)[device] for device in _adding(run)}
    epochs = [
        Span("epoch", epoch.index, None, None, None, epoch.start_ns, epoch.end_ns)
        for epoch in run.summary.epochs
    ]
    steps = [span for span in mark_spans(run.recording.marks) if span.name == "step"]
    regions = [
        Span(region.name, None, None, None, None, *span_ns)
        for region in run.summary.regions
        for span_ns in region.spans_ns
    ]
    named = _span_table(regions, traces).drop_columns(["index", "rank", "source"])
    names = [span.name for _ in traces for span in regions]
    table = _span_table(steps, traces)
    traced = joined([(w["asked_ns"], resumed_ns(w)) for w in run.recording.windows.to_pylist()])
    table = table.append_column("traced", pa.array(_overlaps(table, traced), pa.bool_()))
    return {
        "epochs": _span_table(epochs, traces).drop_columns(["rank", "source"]),
        "steps": table,
        "regions": named.add_column(0, "name", pa.array(names, pa.string())),
    }


def _adding(run: Run) -> list[str]:
    def counts(device: DeviceSummary) -> bool:
        return device.scope == "device" and device.energy_j is not None and run.wants(device.device)

    return [name for name, device in run.summary.devices.items() if counts(device)]


def _span_table(spans: Sequence[Span], traces: dict[str, PowerTrace]) -> pa.Table:
    begin_ns = np.array([span.begin_ns for span in spans], dtype=np.int64)
    end_ns = np.array([span.end_ns for span in spans], dtype=np.int64)
    parts = [pa.schema(list(_SPANS.items())).empty_table()]
    for device, trace in traces.items():
        covered_ns = trace.covered_until_ns(end_ns) - trace.covered_until_ns(begin_ns)
        energy_j = trace.energy_until_j(end_ns) - trace.energy_until_j(begin_ns)
        columns = {
            "index": [span.index for span in spans],
            "rank": [span.rank for span in spans],
            "source": [span.source for span in spans],
            "begin_ns": begin_ns,
            "end_ns": end_ns,
            "duration_s": (end_ns - begin_ns) * 1e-9,
            "device": pa.repeat(pa.scalar(device, pa.string()), len(spans)),
            "energy_j": pa.array(energy_j, mask=covered_ns == 0),
            "missing_s": (end_ns - begin_ns - covered_ns) * 1e-9,
        }
        parts.append(pa.table({name: pa.array(columns[name], kind) for name, kind in _SPANS.items()}))
    return pa.concat_tables(parts)


def _overlaps(table: pa.Table, windows: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """Which rows lie, even in part, where the profiler ran, started or stopped."""
    begins, ends = (np.array(edge, dtype=np.int64) for edge in (list(zip(*windows, strict=True)) or [[], []]))
    first = np.searchsorted(ends, table["begin_ns"].to_numpy(), side="right")
    return np.searchsorted(begins, table["end_ns"].to_numpy(), side="left") > first


def _power(run: Run) -> pa.Table:
    """The power of each device from t_ns on, for duration_ns; between two rows of it nothing is known."""
    spans = [(run.summary.begin_ns, run.summary.end_ns)]
    traces = [(d, t) for d, t in device_traces(run.recording).items() if run.wants(d)]
    parts: list[pa.Table] = []
    for device, trace in traces:
        here = within(trace, spans)
        parts.append(
            pa.table(
                {
                    "t_ns": here.start_ns,
                    "device": pa.repeat(pa.scalar(device, pa.string()), here.start_ns.size),
                    "power_w": here.power_w,
                    "duration_ns": here.end_ns - here.start_ns,
                }
            )
        )
    return pa.concat_tables(parts) if parts else pa.table({"t_ns": pa.array([], pa.int64())})


def _events(run: Run) -> tuple[pa.Table, list[str]]:
    """Every event with its energy; null where no power is known."""
    events, energy_j, remarks = traced_energies(run)
    events = events.append_column("energy_j", pa.array(energy_j, mask=np.isnan(energy_j)))
    if run.devices:
        events = events.filter(
            pc.is_in(events["device"].cast(pa.string()), pa.array(run.devices, pa.string()))
        )
    return events, remarks
