"""Exports a recording as a folder of tables, CSV or Parquet, with units in the names of columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.accounting.footprint import ROWS, DeviceTotal, with_power
from smaragdine.accounting.power import (
    MOST_MISSED,
    PowerTrace,
    within,
)
from smaragdine.accounting.spans import TRACED, Span, joined, resumed_ns
from smaragdine.accounting.split import when
from smaragdine.accounting.summary import DeviceSummary
from smaragdine.arrays import Floats, Ints
from smaragdine.arrow import pc
from smaragdine.recording.tables import write_csv
from smaragdine.report.export.selection import Selection

TABLES = ("devices", "footprint", "totals", "epochs", "steps", "regions", "power", "marks", "events", "edges")

_DEVICES: dict[str, pa.DataType] = {
    **{figure: pa.float64() for figure in ("program_j", "energy_j", "mean_w", "peak_w", "missing_s")},
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
    "program_j": pa.float64(),  # the program's part; null: not known
    "energy_j": pa.float64(),  # of the whole device; null: not known in that time
    "missing_s": pa.float64(),
}
_NEVER = PowerTrace(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
_TOTALS = {
    field.name: {"provenance": pa.string(), "per_step": pa.bool_()}.get(field.name, pa.float64())
    for field in dataclasses.fields(DeviceTotal)
}


def tables(chosen: Selection) -> tuple[dict[str, pa.Table], list[str]]:
    """Name → table, without empty ones, and why those are empty.

    In `devices`, `epochs`, `steps` and `regions`, `program_j` is the program's part of a device's energy and
    `energy_j` all of it. `footprint` and `totals` are about the program's part.
    """
    events, remarks = _events(chosen)
    found = {"devices": _devices(chosen), **_footprint(chosen), **_spans(chosen), "power": _power(chosen)}
    found |= {"marks": chosen.run.recording.marks, "events": events, "edges": chosen.run.recording.edges}
    thinned = chosen.run.recording.thinned
    if thinned is not None:
        remarks = [
            *remarks,
            f"readings before {when(thinned.state.cut_ns)} were thinned: of that time steps "
            "that are like all others are left out, and power is a mean over ten seconds",
        ]
    return {name: table for name, table in found.items() if table.num_rows}, remarks


def write_tables(chosen: Selection, folder: Path, kind: str) -> list[str]:
    """Writes the tables; `kind` is csv or parquet. Returns remarks on what is missing, and why."""
    found, remarks = tables(chosen)
    for name, table in found.items():
        path = folder / f"{name}.{kind}"
        if kind == "csv":
            write_csv(table, path)
        else:
            import pyarrow.parquet as pq

            pq.write_table(table, path)
    return remarks


def _devices(chosen: Selection) -> pa.Table:
    known = [device for device in chosen.run.summary.devices.values() if chosen.wants(device.device)]
    columns: dict[str, Any] = {"device": pa.array([device.device for device in known], pa.string())}
    for name, kind in _DEVICES.items():
        columns[name] = pa.array([getattr(device, name) for device in known], kind)
    return pa.table(columns)


def _footprint(chosen: Selection) -> dict[str, pa.Table]:
    """The footprint's rows and totals: Σ energy_j + idle_j = total_j on each device."""
    footprint = chosen.footprint
    if footprint is None:
        return {"footprint": ROWS.empty_table()}
    totals: dict[str, Any] = {"device": pa.array(list(footprint.devices), pa.string())}
    for name, kind in _TOTALS.items():
        values = [getattr(total, name) for total in footprint.devices.values()]
        totals[name] = pa.array([float(v) if type(v) is int else v for v in values], kind)
    return {"footprint": with_power(footprint.rows), "totals": pa.table(totals)}


def _spans(chosen: Selection) -> dict[str, pa.Table]:
    """Epochs, steps and regions, one row for each and each device."""
    traces = {device: chosen.run.traces[device] for device in _adding(chosen)}
    program = chosen.run.power.program
    epochs = [
        Span("epoch", epoch.index, None, None, None, epoch.start_ns, epoch.end_ns)
        for epoch in chosen.run.summary.epochs
    ]
    told = chosen.run.announced_steps
    steps = [span for span, _ in told]
    table = _span_table(steps, traces, program)
    # Of processes and sources that do not stand for all, we only know the time.
    windows = joined([(w["asked_ns"], resumed_ns(w)) for w in chosen.run.recording.windows.to_pylist()])
    kinds = [kind for _ in traces for _, kind in told]
    overlaps = _overlaps(table, windows).tolist()
    traced = [kind == TRACED if kind else over for kind, over in zip(kinds, overlaps, strict=True)]
    table = table.append_column("traced", pa.array(traced, pa.bool_()))
    table = table.append_column("kind", pa.array(kinds, pa.string()))
    return {
        "epochs": _span_table(epochs, traces, program).drop_columns(["rank", "source"]),
        "steps": table,
        "regions": _regions(chosen, traces, program),
    }


def _regions(
    chosen: Selection, traces: Mapping[str, PowerTrace], program: Mapping[str, PowerTrace]
) -> pa.Table:
    spans = [
        Span(region.name, None, None, None, None, *span_ns)
        for region in chosen.run.summary.regions
        for span_ns in region.spans_ns
    ]
    table = _span_table(spans, traces, program).drop_columns(["index", "rank", "source"])
    names = [span.name for _ in traces for span in spans]
    # As thinning worked them out: nobody could from thinned readings.
    energies_j = [
        each for d in traces for region in chosen.run.summary.regions for each in region.energies_j[d]
    ]
    thinned = chosen.run.recording.thinned
    known = pc.greater_equal(table["begin_ns"], -1 if thinned is None else thinned.state.cut_ns)
    program_j = pc.if_else(known, table["program_j"], pa.scalar(None, pa.float64()))
    for name, column in (("energy_j", pa.array(energies_j, pa.float64())), ("program_j", program_j)):
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table.add_column(0, "name", pa.array(names, pa.string()))


def _adding(chosen: Selection) -> list[str]:
    def counts(device: DeviceSummary) -> bool:
        return device.scope == "device" and device.energy_j is not None and chosen.wants(device.device)

    return [name for name, device in chosen.run.summary.devices.items() if counts(device)]


def _span_table(
    spans: Sequence[Span], traces: Mapping[str, PowerTrace], program: Mapping[str, PowerTrace]
) -> pa.Table:
    begin_ns = np.array([span.begin_ns for span in spans], dtype=np.int64)
    end_ns = np.array([span.end_ns for span in spans], dtype=np.int64)
    parts = [pa.schema(list(_SPANS.items())).empty_table()]
    for device, trace in traces.items():
        energy_j, covered_ns = _energies(trace, begin_ns, end_ns)
        # If a device's users are not known, there is no time in which they are.
        program_j, split_ns = _energies(program.get(device, _NEVER), begin_ns, end_ns)
        columns = {
            "index": [span.index for span in spans],
            "rank": [span.rank for span in spans],
            "source": [span.source for span in spans],
            "begin_ns": begin_ns,
            "end_ns": end_ns,
            "duration_s": (end_ns - begin_ns) * 1e-9,
            "device": pa.repeat(pa.scalar(device, pa.string()), len(spans)),
            "program_j": pa.array(program_j, mask=_missed(split_ns, begin_ns, end_ns)),
            "energy_j": pa.array(energy_j, mask=_missed(covered_ns, begin_ns, end_ns)),
            "missing_s": (end_ns - begin_ns - covered_ns) * 1e-9,
        }
        parts.append(pa.table({name: pa.array(columns[name], kind) for name, kind in _SPANS.items()}))
    return pa.concat_tables(parts)


def _energies(trace: PowerTrace, begin_ns: Ints, end_ns: Ints) -> tuple[Floats, Ints]:
    """The energy of each span, and how much of it is known."""
    energy_j = trace.energy_until_j(end_ns) - trace.energy_until_j(begin_ns)
    return energy_j, trace.covered_until_ns(end_ns) - trace.covered_until_ns(begin_ns)


def _missed(known_ns: Ints, begin_ns: Ints, end_ns: Ints) -> np.ndarray[Any, Any]:
    """Of which spans too much is missing to say what they took."""
    return (known_ns == 0) | (known_ns < (1 - MOST_MISSED) * (end_ns - begin_ns))


def _overlaps(table: pa.Table, windows: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """Which rows overlap a time in which the profiler ran, started or stopped."""
    begins, ends = (np.array(edge, dtype=np.int64) for edge in (list(zip(*windows, strict=True)) or [[], []]))
    first = np.searchsorted(ends, table["begin_ns"].to_numpy(), side="right")
    return np.searchsorted(begins, table["end_ns"].to_numpy(), side="left") > first


def _power(chosen: Selection) -> pa.Table:
    """Each device's power from t_ns on, for duration_ns; between its rows nothing is known."""
    spans = [(chosen.run.summary.begin_ns, chosen.run.summary.end_ns)]
    traces = [(d, t) for d, t in chosen.run.traces.items() if chosen.wants(d)]
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


def _events(chosen: Selection) -> tuple[pa.Table, list[str]]:
    """Every event with its energy; null if its power is not known."""
    events, energy_j, remarks = chosen.run.event_energies
    events = events.append_column("energy_j", pa.array(energy_j, mask=np.isnan(energy_j)))
    if chosen.devices:
        events = events.filter(
            pc.is_in(events["device"].cast(pa.string()), pa.array(chosen.devices, pa.string()))
        )
    return events, remarks
