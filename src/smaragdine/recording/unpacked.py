"""How large a packed file becomes, told before it is unpacked, and how large it may become.

A few megabytes of zeros unpack to gigabytes, be they in a gzip file, in Parquet or in an Arrow message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from smaragdine.errors import UserError

# Text of numbers is packed 3 to 50 times. What is small may be packed more tightly, and harms nobody.
_TIMES = 100
_AT_LEAST = 256 << 20
_AT_MOST = 16 << 30

_RECORD_BATCH = 3  # of Arrow's kinds of messages
_DICTIONARY = 2


def ceiling(packed_bytes: int) -> int:
    return min(max(_TIMES * packed_bytes, _AT_LEAST), _AT_MOST)


def refuse_beyond(unpacked_bytes: int, packed_bytes: int, where: str, remedy: str = "") -> None:
    most = ceiling(packed_bytes)
    if unpacked_bytes > most:
        raise UserError(
            f"{where} unpacks to more than {most >> 20:,} MiB",
            f"it has {packed_bytes / 2**20:.3g} MiB, and no trace or log is packed so tightly",
            remedy or "If it is one all the same, write it anew unpacked",
        )


def arrow_bytes(content: pa.Buffer) -> int:
    """What the messages of an Arrow stream or file unpack to, by what they say of themselves."""
    source = pa.BufferReader(content)
    source.seek(8 if bytes(content[:6]) == b"ARROW1" else 0)
    total = 0
    try:
        while source.tell() < content.size:
            message = pa.ipc.read_message(source)
            total += sum(_buffers(memoryview(message.metadata), message.body))
    except (pa.ArrowException, OSError, EOFError, ValueError, struct.error):
        pass  # whoever reads it says what is wrong
    return total


def _buffers(metadata: memoryview, body: pa.Buffer | None) -> Iterator[int]:
    """The sizes of a message's buffers once they are unpacked: each begins with its own."""
    at = _root(metadata)
    kind, header = _number(metadata, at, 1, "<B"), _table(metadata, at, 2)
    if kind == _DICTIONARY and header is not None:
        header = _table(metadata, header, 1)
    if kind not in (_DICTIONARY, _RECORD_BATCH) or header is None or body is None:
        return
    if _table(metadata, header, 3) is None:
        return  # it is not packed: it is as large as it is
    buffers = _table(metadata, header, 2)
    if buffers is None:
        return
    (count,) = struct.unpack_from("<I", metadata, buffers)
    for number in range(count):
        offset, length = struct.unpack_from("<qq", metadata, buffers + 4 + 16 * number)
        if length >= 8 and 0 <= offset <= body.size - 8:
            (unpacked,) = struct.unpack("<q", bytes(body[offset : offset + 8]))
            yield max(unpacked, 0)


# As much of FlatBuffers as that takes: a table begins with the way back to where its fields are.


def _root(data: memoryview) -> int:
    return struct.unpack_from("<I", data, 0)[0]


def _field(data: memoryview, table: int, number: int) -> int | None:
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0 or 4 + 2 * number >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
    return table + offset if offset else None


def _number(data: memoryview, table: int, number: int, kind: str) -> Any:
    at = _field(data, table, number)
    return None if at is None else struct.unpack_from(kind, data, at)[0]


def _table(data: memoryview, table: int, number: int) -> int | None:
    at = _field(data, table, number)
    return None if at is None else at + struct.unpack_from("<I", data, at)[0]
