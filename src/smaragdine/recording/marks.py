"""Marks on their way into the table. Each is a line in the spool, in the file of the process that made it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from smaragdine.arrow import pc
from smaragdine.recording.format import MARKS, SPOOL_FOLDER
from smaragdine.recording.writer import TableWriter


def append(folder: Path, name: str, t_ns: int, **more: Any) -> None:
    """Write a mark of our own. A full disk costs us the mark, not the run."""
    line = json.dumps({"t_ns": t_ns, "name": name, "source": "run", **more})
    with (
        contextlib.suppress(OSError),
        open(folder / SPOOL_FOLDER / "marks-run.jsonl", "a", encoding="utf-8") as file,
    ):
        file.write(line + "\n")


def read_spool(folder: Path, done: Mapping[str, int] | None = None) -> pa.Table:
    """All marks in the spool, by time, without lines that a crash cut off. `done`: bytes of a file that are
    in the table already."""
    tables: list[pa.Table] = []
    for path in sorted((folder / SPOOL_FOLDER).glob("marks-*.jsonl")):
        with contextlib.suppress(OSError):
            tables += _parsed(_read_from(path, (done or {}).get(path.name, 0)))
    return by_time(pa.concat_tables(tables)) if tables else MARKS.empty_table()


def read_spool_until(folder: Path, done: Mapping[str, int], end_ns: int) -> tuple[pa.Table, dict[str, int]]:
    """Each process's marks before its first at or after `end_ns`, by time; and how far into each file."""
    tables: list[pa.Table] = []
    reached = dict(done)
    for path in sorted((folder / SPOOL_FOLDER).glob("marks-*.jsonl")):
        with contextlib.suppress(OSError):
            whole, newline, _ = _read_from(path, done.get(path.name, 0)).rpartition(b"\n")
            lines = (whole + newline).splitlines(keepends=True)
            until = next((i for i, line in enumerate(lines) if _time_ns(line) >= end_ns), len(lines))
            tables += _parsed(b"".join(lines[:until]))
            reached[path.name] = done.get(path.name, 0) + sum(map(len, lines[:until]))
    return by_time(pa.concat_tables([MARKS.empty_table(), *tables])), reached


def _time_ns(line: bytes) -> int:
    plain = _STAMP.match(line)
    if plain is not None:
        return int(plain[1])
    return next((row["t_ns"] for row in parse_lines([line])), 0)


def _read_from(path: Path, offset: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read()


class NewMarks:
    """Follows a spool that is being written: gives each new mark once."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._read: dict[Path, int] = {}

    @property
    def begun(self) -> bool:
        """Whether any process has made a mark."""
        return bool(self._read)

    def look(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self._spool.glob("marks-*.jsonl")):
            yield from parse_lines(self._lines(path))

    def _lines(self, path: Path) -> list[bytes]:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(self._read.get(path, 0))
            whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            return whole.split(b"\n")
        return []


def marks_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    named = [{name: row.get(name) for name in MARKS.names} for row in rows]
    return by_time(pa.Table.from_pylist(named, schema=MARKS))


def by_time(table: pa.Table) -> pa.Table:
    return table.take(np.argsort(table["t_ns"].to_numpy(), kind="stable"))


def _parsed(content: bytes) -> list[pa.Table]:
    """The marks of a process. Arrow reads millions of plain steps; we read the odd ones one by one."""
    lines = content.split(b"\n")
    plain = [line for line in lines if _PLAIN.fullmatch(line)]
    odd = lines
    tables: list[pa.Table] = []
    if len(plain) > _WORTH_IT:
        with contextlib.suppress(pa.ArrowInvalid):
            options = pa_json.ParseOptions(explicit_schema=MARKS, unexpected_field_behavior="ignore")
            table = pa_json.read_json(io.BytesIO(b"\n".join(plain)), parse_options=options)
            tables.append(table.select(MARKS.names).cast(MARKS))
            odd = [line for line in lines if line and not _PLAIN.fullmatch(line)]
    rows = list(parse_lines(odd))
    return [*tables, marks_table(rows)] if rows else tables


# A step as the hook writes it, so that nothing can be out of range or of another type.
_PLAIN = re.compile(
    rb'\{"t_ns":\d{1,18}\d?,"name":"\w+","index":(?:null|\d{1,18}),"rank":\d{1,9},"pid":\d{1,9},"source":"[\w.:]+"\}'
)
_STAMP = re.compile(rb'\{"t_ns": ?(\d{1,18}\d?),')
_WORTH_IT = 1000
_INTEGERS = {"index": 63, "total": 63, "rank": 31, "pid": 31}
_TEXTS = ("name", "source", "detail")


def parse_lines(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            row: dict[str, Any] = json.loads(line)
            t_ns = int(row["t_ns"])
            name = row["name"]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        if not isinstance(name, str) or abs(t_ns) >= 1 << 63:
            continue
        row["t_ns"] = t_ns
        # A script may mark anything. We leave empty what the table cannot hold.
        for key, bits in _INTEGERS.items():
            value = row.get(key)
            whole = int(value) if isinstance(value, int | float) and abs(value) < 1 << bits else None
            row[key] = whole
        for key in _TEXTS:
            value = row.get(key)
            text = value if isinstance(value, str | None) else json.dumps(value)
            row[key] = text.encode("utf-8", "replace").decode() if text is not None else None
        yield row


def is_spoilt(path: Path, done: int = 0) -> bool:
    """Whether any line of a spool is no mark, except for the last, which a crash may have cut off. `done`:
    bytes of it that are in a table already."""
    with contextlib.suppress(OSError):
        every = _read_from(path, done).split(b"\n")[:-1]
        lines = [line for line in every if line and not _PLAIN.fullmatch(line)]
        return sum(1 for _ in parse_lines(lines)) < len(lines)
    return True


def fold_spool(folder: Path, table: pa.Table) -> OSError | None:
    """Turn the spool, read into `table`, into marks.arrows. On a full disk it stays, and readers use it."""
    path = folder / "marks.arrows"
    try:
        writer = TableWriter(path, MARKS)
        for batch in table.to_batches():
            writer.write(batch)
        writer.close()
    except OSError as error:
        return error
    if writer.error is not None:
        with contextlib.suppress(OSError):
            path.unlink()
        return writer.error
    shutil.rmtree(folder / SPOOL_FOLDER, ignore_errors=True)
    return None


def libraries(table: pa.Table) -> dict[str, str]:
    """The versions the program reported at its end."""
    found: dict[str, str] = {}
    for detail in table.filter(pc.field("name") == "libraries")["detail"].to_pylist():
        with contextlib.suppress(ValueError, TypeError):
            found.update(json.loads(detail))
    return found
