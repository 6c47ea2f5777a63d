"""Marks on their way to the table: one line each in the spool, one file per process that made some."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from smaragdine.recording.format import MARKS, SPOOL_FOLDER
from smaragdine.recording.writer import TableWriter


def append(folder: Path, name: str, t_ns: int, **more: Any) -> None:
    """Write one mark of our own. A full disk loses the mark, not the run."""
    line = json.dumps({"t_ns": t_ns, "name": name, "source": "run", **more})
    with (
        contextlib.suppress(OSError),
        open(folder / SPOOL_FOLDER / "marks-run.jsonl", "a", encoding="utf-8") as file,
    ):
        file.write(line + "\n")


def read_spool(folder: Path) -> pa.Table:
    """All marks in the spool, by time. Lines cut off by a crash are skipped."""
    rows: list[dict[str, Any]] = []
    for path in sorted((folder / SPOOL_FOLDER).glob("marks-*.jsonl")):
        with contextlib.suppress(OSError):
            rows.extend(parse_lines(path.read_bytes().split(b"\n")))
    return marks_table(rows)


def marks_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    ordered = sorted(rows, key=lambda row: row["t_ns"])
    return pa.Table.from_pylist(
        [{name: row.get(name) for name in MARKS.names} for row in ordered], schema=MARKS
    )


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
        # A script may mark anything; what the table cannot hold is left empty.
        for key, bits in _INTEGERS.items():
            value = row.get(key)
            whole = int(value) if isinstance(value, int | float) and abs(value) < 1 << bits else None
            row[key] = whole
        for key in _TEXTS:
            value = row.get(key)
            text = value if isinstance(value, str | None) else json.dumps(value)
            row[key] = text.encode("utf-8", "replace").decode() if text is not None else None
        yield row


def fold_spool(folder: Path) -> OSError | None:
    """Turn the spool into marks.arrows; on a full disk the spool stays, and readers use it."""
    table = read_spool(folder)
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


def libraries(folder: Path) -> dict[str, str]:
    """The versions the program reported at its end."""
    found: dict[str, str] = {}
    for row in read_spool(folder).to_pylist():
        if row["name"] == "libraries":
            with contextlib.suppress(ValueError, TypeError):
                found.update(json.loads(row["detail"]))
    return found
