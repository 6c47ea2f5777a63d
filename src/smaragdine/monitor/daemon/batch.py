"""A batch of readings, and how it looks in a spool file."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smaragdine.monitor.sampler import Note

Times = npt.NDArray[np.int64]
ChannelNumbers = npt.NDArray[np.uint32]
Values = npt.NDArray[np.float64]

# Magic, checksum of all that follows it, sequence number, readings, bytes of notes.
HEADER = struct.Struct("<4sIQII")
MAGIC = b"SMB1"
_CHECKED_FROM = 8
_READING_BYTES = 8 + 4 + 8
_OBJECT_BYTES = 600  # what a Batch and three arrays take besides their contents
_NOTE_BYTES = 300


@dataclass(frozen=True)
class Batch:
    """Columns of equal length, ordered by time within each channel. Sequence 0: not in the log yet."""

    sequence: int
    t_ns: Times
    channel: ChannelNumbers
    value: Values
    notes: tuple[Note, ...] = ()

    @property
    def memory_bytes(self) -> int:
        texts = sum(len(note.detail) + _NOTE_BYTES for note in self.notes)
        return _OBJECT_BYTES + _READING_BYTES * self.t_ns.size + texts


def encode(batch: Batch) -> bytes:
    notes = [[note.t_ns, note.name, note.detail, list(note.channels)] for note in batch.notes]
    notes_json = json.dumps(notes).encode() if notes else b""
    body = b"".join(
        [
            HEADER.pack(MAGIC, 0, batch.sequence, batch.t_ns.size, len(notes_json))[_CHECKED_FROM:],
            batch.t_ns.astype("<i8", copy=False).tobytes(),
            batch.value.astype("<f8", copy=False).tobytes(),
            batch.channel.astype("<u4", copy=False).tobytes(),
            notes_json,
        ]
    )
    return struct.pack("<4sI", MAGIC, zlib.crc32(body)) + body


def length_at(data: bytes, at: int = 0) -> int:
    """How many bytes the batch that begins at `at` has, by its own header; 0 where none begins."""
    if len(data) - at < HEADER.size:
        return 0
    magic, _, _, readings, notes_bytes = HEADER.unpack_from(data, at)
    return HEADER.size + _READING_BYTES * readings + notes_bytes if magic == MAGIC else 0


def decode(data: bytes, at: int = 0) -> Batch | None:
    """The batch that begins at `at`; None where there is none that is whole and unharmed."""
    length = length_at(data, at)
    if not length or len(data) - at < length:
        return None
    _, check, sequence, readings, notes_bytes = HEADER.unpack_from(data, at)
    if zlib.crc32(memoryview(data)[at + _CHECKED_FROM : at + length]) != check:
        return None
    begin = at + HEADER.size
    notes_at = at + length - notes_bytes
    notes = json.loads(data[notes_at : at + length]) if notes_bytes else []
    return Batch(
        sequence,
        np.frombuffer(data, "<i8", readings, begin),
        np.frombuffer(data, "<u4", readings, begin + 16 * readings),
        np.frombuffer(data, "<f8", readings, begin + 8 * readings),
        tuple(Note(t_ns, name, detail, tuple(channels)) for t_ns, name, detail, channels in notes),
    )
