"""Checksums inside an Arrow stream: they tell what was changed or lost after it was written.

Each record batch carries a seal in its custom metadata, which other readers ignore:

    smaragdine crc32 1c291ca3 rows 0000000000000004096

The checksum covers all bytes since the previous batch, dictionaries included, with its own digits as zeros.
It goes on from the checksum of that batch, so that no batch can be changed, lost, repeated or moved
unnoticed. The first batch has no rows and seals the schema. `rows` counts from the beginning of the file. A
finished table ends with Arrow's end mark.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

KEY = "smaragdine.seal"
BLANK = b"smaragdine crc32 00000000 rows 0000000000000000000"
_SEAL = re.compile(rb"smaragdine crc32 ([0-9a-f]{8}) rows (\d{19})")
_END_MARK = b"\xff\xff\xff\xff\0\0\0\0"


def seal(written: bytes, rows: int, before: int) -> tuple[bytes, int]:
    """Fill the blank seal in what `write_batch` wrote. Returns that and the checksum to go on from.

    `before` is the checksum of all that came before. `rows` counts the rows so far, its own included.
    """
    at = _last_metadata(written) + BLANK.index(b"00000000")
    counted = b"%019d" % rows
    rows_at = at + len(b"00000000 rows ")
    filled = bytearray(written)
    filled[rows_at : rows_at + len(counted)] = counted
    checksum = zlib.crc32(filled, before)
    filled[at : at + 8] = b"%08x" % checksum
    return bytes(filled), checksum


def _last_metadata(written: bytes) -> int:
    """Where the blank seal is: in the last message, after the dictionaries that this needs."""
    source = pa.BufferReader(written)
    begin = 0
    while (end := _next_message(source)[1]) < len(written):
        begin = end
    return written.index(BLANK, begin)


def _next_message(source: Any) -> tuple[Any, int]:
    message = pa.ipc.read_message(source)
    return message, source.tell()


@dataclass(frozen=True)
class Survey:
    """What we know of a table's file without unpacking it."""

    pieces: tuple[tuple[int, int], ...]  # the bytes to read: all but what is damaged
    rows: int | None  # as the last seal counts them; null: there is no seal
    sealed: bool  # the file has checksums
    ended: bool  # it ends with its end mark
    damaged: int  # batches that are not as they were written
    cut: bool  # it ends within a message, or we cannot follow it from there
    last: str | None = None  # the last seal's checksum, and so the whole file's

    @property
    def whole(self) -> bool:
        return self.ended and not self.damaged and not self.cut


def survey(content: pa.Buffer) -> Survey:
    """Go through the messages of a stream and check their seals."""
    source = pa.BufferReader(content)
    view = memoryview(content)
    pieces: list[tuple[int, int]] = []
    begin = at = before = damaged = 0
    rows: int | None = None
    last: str | None = None
    sealed = dictionaries = ended = cut = leaning = False
    while at < content.size:
        if bytes(view[at : at + 8]) == _END_MARK:
            ended = at + 8 == content.size
            cut = not ended
            damaged += sealed and begin < at  # it says that it is no batch
            break
        try:
            message, end = _next_message(source)
        except (pa.ArrowException, OSError, EOFError, ValueError):
            cut = True
            break
        kind, at_message, at = message.type, at, end
        if (kind == "schema") != (at_message == 0):
            cut = True
            break
        dictionaries = dictionaries or kind == "dictionary"
        if kind != "record batch":
            continue
        found = _SEAL.search(memoryview(message.metadata))
        if found is None:
            good = not sealed
        else:
            if begin > 0 and not sealed:
                # Where one batch has a seal, all have, so it is the schema's that is damaged.
                damaged, leaning = len(pieces), True
                pieces.clear()
            sealed = True
            checksum, rows = int(found[1], 16), int(found[2])
            digits = at_message + 8 + found.start(1)  # a message begins with a mark and its metadata's length
            good = _checksum(view[begin:end], digits - begin, before) == checksum
            before, last = checksum, found[1].decode()
        if good and not leaning:
            pieces.append((begin, end))
        else:
            damaged += 1
            # The schema comes with the first batch, and names with any: what builds on them is lost too.
            leaning = leaning or dictionaries or begin == 0
        begin = end
    return Survey(tuple(pieces), rows, sealed, ended, damaged, cut, last)


def last_seals(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The checksum of the last seal of each of these files, by name, for those that have one."""
    found: dict[str, str] = {}
    for name in names:
        with (
            contextlib.suppress(OSError, ValueError),  # it is gone or empty
            (folder / name).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            at = content.rfind(BLANK[: BLANK.index(b"00000000")])
            match = _SEAL.match(content, at) if at >= 0 else None
            if match is not None:
                found[name] = match[1].decode()
    return found


def _checksum(data: memoryview, digits: int, before: int) -> int:
    checksum = zlib.crc32(data[:digits], before)
    return zlib.crc32(data[digits + 8 :], zlib.crc32(b"00000000", checksum))


def map_file(path: Path) -> pa.Buffer:
    """The bytes of a file, mapped; None where it is empty or gone."""
    with contextlib.suppress(OSError, pa.ArrowException), pa.memory_map(str(path)) as source:
        return source.read_buffer()
    return pa.py_buffer(b"")


def batches(content: pa.Buffer, found: Survey) -> Iterator[pa.RecordBatch]:
    """The batches that a survey found good, one at a time.

    Raises what Arrow raises where one cannot be read all the same, which nobody can know without checksums.
    """
    if not found.pieces:
        return
    end = found.pieces[-1][1]
    if sum(end - begin for begin, end in found.pieces) == end:
        content = content.slice(0, end)
    else:
        content = pa.py_buffer(b"".join(memoryview(content)[begin:end] for begin, end in found.pieces))
    for batch in pa.ipc.open_stream(pa.BufferReader(content)):
        batch.validate(full=True)
        yield batch
