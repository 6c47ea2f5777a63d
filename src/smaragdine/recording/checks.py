"""What the rows of a table must be before anybody reckons with them.

Checksums say that a table is as it was written. One of an older version has none: a turned bit in it is a row
without a time, or a CPU time of 10³⁰⁰ s.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from smaragdine.arrow import pc
from smaragdine.recording.columns import MOST_T_NS

_NEEDED = {
    "power": ("t_ns", "channel", "value"),
    "activity": ("t_ns", "channel", "value"),
    "telemetry": ("t_ns", "channel", "value"),
    "places": ("t_ns", "pid", "tid", "socket"),
    "marks": ("t_ns", "name"),
    "events": ("name", "device", "start_ns", "duration_ns"),
    "edges": ("source", "target"),
    "windows": (
        "rank",
        "pid",
        "asked_ns",
        "begin_ns",
        "end_ns",
        "stopped_ns",
        "steps",
        "events",
        "busy_ns",
        "placed_ns",
        "remarks",
    ),
}
_MOST_CPU_S = 1e12


def oddity(table: str, rows: pa.Table) -> str | None:
    """What is wrong with the rows of a table, if anything is."""
    return next(_oddities(table, rows), None)


def _oddities(table: str, rows: pa.Table) -> Iterator[str]:
    for name in _NEEDED[table]:
        if rows[name].null_count:
            yield f"a row has no {name}"
    for name in rows.column_names:
        if name.endswith("_ns") and _largest(rows[name]) > MOST_T_NS:
            yield f"{name} of a row is no time in nanoseconds since 1970"
    if table == "events" and (pc.min(rows["duration_ns"]).as_py() or 0) < 0:
        yield "an event ends before it begins"
    if table == "activity" and not pc.all(pc.less_equal(pc.abs(rows["value"]), _MOST_CPU_S)).as_py():
        yield "a CPU time is none"
    if table == "windows":
        steps = pc.list_flatten(rows["steps"])
        for name in ("index", "begin_ns", "end_ns"):
            values = pc.struct_field(steps, name)
            if steps.null_count or values.null_count or _largest(values) > MOST_T_NS:
                yield f"a step of a window has no {name}"
        if pc.list_flatten(rows["remarks"]).null_count:
            yield "a remark of a window is none"


def _largest(column: pa.ChunkedArray) -> int:
    """Of numbers with either sign; 0 of none."""
    ends = pc.min_max(column).as_py()
    return max(abs(end) for end in (ends["min"] or 0, ends["max"] or 0))
