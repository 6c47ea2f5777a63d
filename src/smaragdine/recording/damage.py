"""The files of a recording's tables: which are there, and what is wrong with them, in words."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from smaragdine.arrow import pc
from smaragdine.recording import marks
from smaragdine.recording.format import INFO_FILE, READING_TABLES, SPOOL_FOLDER, TABLES
from smaragdine.recording.seal import Survey, batches, map_file, survey
from smaragdine.recording.tables import MOST_T_NS, arrow_bytes, refuse_beyond

# What figures lack where a part of a table is lost.
_COST = {
    "power": "energy of that time is missing from the figures",
    "activity": "the program's share of CPU and memory energy may be far off",
    "telemetry": "clocks, temperatures and limits of that time are missing",
    "places": "the program's share of each socket may be off",
    "marks": "epochs, steps and regions may be missing or wrong",
    "events": "operations may be missing, and what is left is charged for them",
    "edges": "arrows between operations may be missing",
    "calls": "some calls may be missing, and smaragdine calibrate cannot replay them",
    "windows": "which steps were traced may be missing, and figures of one step wrong",
}
# The last line of run.json.
_INFO_SEAL = re.compile(rb'"crc32": "([0-9a-f]{8})"\s*\}\s*\Z')
# What a file that was changed may still have of this line.
_INFO_TRACE = re.compile(rb'"crc32": "|"[0-9a-f]{8}"\n\}\n\Z')


@dataclass(frozen=True)
class TableFile:
    """One file of a table: `power.arrows` is segment 0, `power.1.arrows` segment 1, which goes on in
    `power.1.1.arrows`."""

    segment: int
    path: Path
    found: Survey
    piece: int = 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The batches that are as they were written, one at a time."""
        return batches(map_file(self.path), self.found)

    def last_batch(self) -> pa.RecordBatch | None:
        """The last batch, without unpacking those before it. For tables without dictionaries."""
        ends = (self.found.pieces[0], *self.found.pieces[-1:]) if len(self.found.pieces) > 1 else ()
        found = list(batches(map_file(self.path), dataclasses.replace(self.found, pieces=ends)))
        return found[-1] if found else None


def table_files(folder: Path, table: str) -> list[TableFile]:
    """The files of a table in the order they were written, each with what its check found."""
    found = [
        (place, path) for path in folder.glob(f"{table}.*") if (place := place_of(path.name)) is not None
    ]
    return [
        TableFile(segment, path, _survey(path), piece)
        for (_, segment, piece), path in sorted(found)
        if path.is_file()
    ]


def place_of(name: str) -> tuple[str, int, int] | None:
    """A file's table, its restart, and its number since that restart."""
    match = re.fullmatch(r"([a-z]+)(?:\.(\d{1,9}))?(?:\.(\d{1,9}))?\.arrows", name)
    return None if match is None else (match[1], int(match[2] or 0), int(match[3] or 0))


def _survey(path: Path) -> Survey:
    content = map_file(path)
    found = survey(content)
    if found.sealed or not found.pieces:
        return found
    refuse_beyond(arrow_bytes(content), content.size, str(path))
    # It was written before there were checksums: only reading it tells whether it can be read.
    readable = 0
    with contextlib.suppress(pa.ArrowException, OSError, ValueError):
        for _ in batches(content, found):
            readable += 1
    lost = len(found.pieces) - readable
    return dataclasses.replace(found, pieces=found.pieces[:readable], damaged=lost) if lost else found


def said(
    folder: Path,
    status: str,
    info: Mapping[str, Any],
    files: Mapping[str, Sequence[TableFile]],
    gone: Mapping[str, int],
    done: Mapping[str, int],
) -> list[str]:
    """Sentences: what is not as it was written, what is missing, and what that costs.

    `gone`: by restart, the last of the files that were removed on purpose. `done`: bytes of a spool that are
    in a table.
    """
    sealed = any(file.found.sealed for of in files.values() for file in of)
    lines = [*_info_damage(folder, sealed), *(_spool_damage(folder, done) if status != "running" else ())]
    cut: list[str] = []
    for table in TABLES:
        # A monitor that died, and was followed by another, left a file without an end. The marks say so.
        last = files[table][-1:] if table in READING_TABLES else files[table]
        for number, file in enumerate(files[table]):
            name, found = file.path.name, file.found
            goes_on = any(later.segment == file.segment for later in files[table][number + 1 :])
            if found.damaged:
                much = "part" if found.pieces else "all"
                lines.append(
                    f"{name} is damaged: {much} of it is not as it was written and left out: {_COST[table]}"
                )
            elif file in last and not found.ended and status == "interrupted":
                cut.append(name)
            elif not found.ended and (goes_on or (file in last and status != "running")):
                lines.append(
                    f"{name} is damaged: it was cut off, and what came after is lost: {_COST[table]}"
                )
        lines += _missing(table, files[table], info, gone)
    if cut:
        lines.append(f"the run was interrupted: what came last may be missing from {', '.join(cut)}")
    unsealed = [file.path.name for of in files.values() for file in of if not file.found.sealed]
    # What is left of a damaged file may have no checksum, though the file had some.
    unsealed = [name for name in unsealed if not any(line.startswith(f"{name} is ") for line in lines)]
    if unsealed:
        lines.append(
            f"{', '.join(unsealed)}: written without checksums, as older versions did; "
            "a change since then would not be noticed"
        )
    return lines


def _missing(
    table: str, files: Sequence[TableFile], info: Mapping[str, Any], gone: Mapping[str, int]
) -> list[str]:
    """The files whose rows run.json counted, and that are gone or have another number of rows."""
    rows = {file.path.name: file.found.rows for file in files}
    seals = {file.path.name: file.found.last for file in files if file.found.whole}
    wanted: Mapping[str, str] = info.get("seals") or {}
    lines: list[str] = []
    for name, count in (info.get("rows") or {}).items():
        place = place_of(name)
        if place is None or place[0] != table:
            continue
        if table in READING_TABLES and place[2] <= gone.get(str(place[1]), -1):
            continue
        if name not in rows:
            lines.append(f"{name} is missing: {_COST[table]}")
        elif rows[name] is not None and rows[name] != count:
            lines.append(f"{name} has {rows[name]:,} rows, and run.json counted {count:,}: {_COST[table]}")
        elif name in seals and seals[name] != wanted.get(name, seals[name]):
            lines.append(f"{name} is not the file that this run wrote, but another's: {_COST[table]}")
    return lines


def sealed_json(values: Mapping[str, Any]) -> bytes:
    """A JSON file whose last line is the checksum of everything before it."""
    rest = {name: value for name, value in values.items() if name != "crc32"}
    text = json.dumps({**rest, "crc32": ""}, indent=1)  # ASCII, because an argument need not be valid text.
    body = text[: text.rindex('"crc32"')].encode()
    return body + b'"crc32": "%08x"\n}\n' % zlib.crc32(body)


def is_as_written(data: bytes) -> bool:
    """Whether a JSON file ends with the right checksum of everything before it."""
    match = _INFO_SEAL.search(data)
    return match is not None and int(match[1], 16) == zlib.crc32(data[: match.start()])


def _info_damage(folder: Path, sealed: bool) -> list[str]:
    """What is wrong with run.json. `sealed`: a table has checksums, so run.json must have had one too."""
    with contextlib.suppress(OSError):
        data = (folder / INFO_FILE).read_bytes()
        if is_as_written(data) or not (sealed or _INFO_TRACE.search(data)):
            return []  # it is as it was written, or of an older version, or written by hand
    return [f"{INFO_FILE} was changed after it was written: whatever rests on it may be wrong"]


def _spool_damage(folder: Path, done: Mapping[str, int]) -> list[str]:
    files = sorted((folder / SPOOL_FOLDER).glob("marks-*.jsonl"))
    spoilt = [path.name for path in files if marks.is_spoilt(path, done.get(path.name, 0))]
    return [f"{name} is damaged: {_COST['marks']}" for name in spoilt]


# What the rows of a table must look like before anybody reckons with them. Checksums say that a table is as
# it was written. A table of an older version has none: there, one turned bit makes a row without a time, or a
# CPU time of 10³⁰⁰ s.

_NEEDED = {
    "power": ("t_ns", "channel", "value"),
    "activity": ("t_ns", "channel", "value"),
    "telemetry": ("t_ns", "channel", "value"),
    "places": ("t_ns", "pid", "tid", "socket"),
    "marks": ("t_ns", "name"),
    "events": ("name", "device", "start_ns", "duration_ns"),
    "edges": ("source", "target"),
    "calls": ("op", "inputs", "kernels"),
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
    """What is wrong with the rows of a table; empty where nothing is."""
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
    """The largest of the numbers, whatever their sign; 0 where there are none."""
    ends = pc.min_max(column).as_py()
    return max(abs(end) for end in (ends["min"] or 0, ends["max"] or 0))
