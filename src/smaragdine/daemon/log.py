"""The one bounded log of batches. Sessions only look at it, so a reader that never reads holds nothing up.

The newest batches are in memory. More of them are in the spool, from which a restarted daemon goes on: a
batch is in its file before anybody can read it. While the disk is full or not writable, memory serves alone,
and what it still holds is spooled as soon as that works again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import struct
import threading
import time
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from smaragdine.monitor.sampler import Note

# A batch of readings, and how it is written in a spool file.

Times = npt.NDArray[np.int64]
ChannelNumbers = npt.NDArray[np.uint32]
Values = npt.NDArray[np.float64]

# Magic, checksum of all that follows it, sequence number, readings, bytes of notes.
HEADER = struct.Struct("<4sIQII")
MAGIC = b"SMB1"
_CHECKED_FROM = 8
_READING_BYTES = 8 + 4 + 8
_OBJECT_BYTES = 600  # of a Batch and three arrays, besides what they hold
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
    """The length in bytes of the batch that begins at `at`, as its header has it; 0 where none begins."""
    if len(data) - at < HEADER.size:
        return 0
    magic, _, _, readings, notes_bytes = HEADER.unpack_from(data, at)
    return HEADER.size + _READING_BYTES * readings + notes_bytes if magic == MAGIC else 0


def decode(data: bytes, at: int = 0) -> Batch | None:
    """The batch that begins at `at`; None where there is no whole and unharmed one."""
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


# Batches in files: a bounded row of segments in the state folder, which nobody else can read. We do not force
# them to the disk. That loses nothing when the daemon is killed, and when the machine loses power every
# session has ended anyway. Whatever is torn or harmed then has a wrong checksum, and we skip it.

_SEGMENTS = 16  # the oldest is removed as a whole, so each is a small part of the spool
_NAME = re.compile(r"batches-\d{20}\.spool")
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
# Next sequence number, next channel number, checksum; overwritten in place, which works on a full disk too.
_NUMBERS = struct.Struct("<QQI")


@dataclass
class _Segment:
    """One file: its sequence numbers, where each batch begins, and how many bytes are good."""

    path: Path
    fd: int
    sequences: array[int]
    offsets: array[int]
    size: int = 0


class Spool:
    """The segments in a folder. Raises OSError when the folder cannot be used; try again at any time."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self.next_sequence = 1
        self.next_channel = 0
        self._most_bytes = most_bytes
        self._segments: list[_Segment] = []
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._numbers_fd = os.open(folder / "numbers", _FLAGS, 0o600)
        try:
            # A second daemon on the same folder would overwrite what the first one writes.
            fcntl.flock(self._numbers_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._take_numbers()
            for name in sorted(filter(_NAME.fullmatch, os.listdir(folder))):
                self._scan(folder / name)
            self._prune()
        except OSError:
            self.close()
            raise

    @property
    def sequences(self) -> Iterator[int]:
        """All sequence numbers, in order."""
        return (sequence for segment in self._segments for sequence in segment.sequences)

    @property
    def first(self) -> int | None:
        return next(self.sequences, None)

    @property
    def count(self) -> int:
        return sum(len(segment.sequences) for segment in self._segments)

    def write(self, batch: Batch, next_channel: int) -> None:
        """Append a batch. A half-written one before it is overwritten.

        Its number is kept after it. A daemon that is killed in between leaves no number without a batch,
        which a reader would take for a loss.
        """
        data = encode(batch)
        if not self._segments or self._segments[-1].size + len(data) > self._most_bytes // _SEGMENTS:
            path = self.folder / f"batches-{batch.sequence:020}.spool"
            fd = os.open(path, _FLAGS | os.O_TRUNC, 0o600)
            self._segments.append(_Segment(path, fd, array("Q"), array("Q")))
        segment = self._segments[-1]
        written = os.pwrite(segment.fd, data, segment.size)
        if written < len(data):
            written += os.pwrite(segment.fd, data[written:], segment.size + written)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        segment.sequences.append(batch.sequence)
        segment.offsets.append(segment.size)
        segment.size += len(data)
        self.keep_numbers(batch.sequence + 1, next_channel)
        self._prune()

    def keep_numbers(self, next_sequence: int, next_channel: int) -> None:
        """Keep the numbers that come next: a number never goes to a second batch, even where the first could
        not be written. When a full disk has room again, older batches may come late from memory, so numbers
        only grow."""
        self.next_sequence = max(self.next_sequence, next_sequence)
        self.next_channel = max(self.next_channel, next_channel)
        data = struct.pack("<QQ", self.next_sequence, self.next_channel)
        os.pwrite(self._numbers_fd, data + struct.pack("<I", zlib.crc32(data)), 0)

    def read(self, sequence: int) -> Batch | None:
        """The first batch from `sequence` on that can be read."""
        for segment in self._segments:
            while (at := bisect_left(segment.sequences, sequence)) < len(segment.sequences):
                begin = segment.offsets[at]
                end = segment.offsets[at + 1] if at + 1 < len(segment.offsets) else segment.size
                with contextlib.suppress(OSError):
                    batch = decode(os.pread(segment.fd, end - begin, begin))
                    if batch is not None:
                        return batch
                # The disk has lost it. Do not ask for it again.
                del segment.sequences[at], segment.offsets[at]
        return None

    def clear(self, next_sequence: int) -> None:
        """Forget all batches. The numbers go on from those given meanwhile."""
        for segment in self._segments:
            self._drop(segment)
        self._segments = []
        self.next_sequence = next_sequence

    def close(self) -> None:
        for segment in self._segments:
            os.close(segment.fd)
        self._segments = []
        os.close(self._numbers_fd)

    def _take_numbers(self) -> None:
        data = os.pread(self._numbers_fd, _NUMBERS.size, 0)
        if len(data) == _NUMBERS.size:
            sequence, channel, check = _NUMBERS.unpack(data)
            if check == zlib.crc32(data[:-4]):
                self.next_sequence, self.next_channel = sequence, channel

    def _scan(self, path: Path) -> None:
        """Take what is good in a file that another daemon left. Delete a file without anything good."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        segment = _Segment(path, fd, array("Q"), array("Q"))
        data = os.pread(segment.fd, os.fstat(segment.fd).st_size, 0)
        at = 0
        while at < len(data):
            batch = decode(data, at)
            if batch is None:
                # What follows the harm still counts: go on at the next place that looks like a batch.
                at = data.find(MAGIC, at + 1)
                if at < 0:
                    break
                continue
            if batch.sequence >= self._after_last(segment):
                segment.sequences.append(batch.sequence)
                segment.offsets.append(at)
                if batch.channel.size:
                    self.next_channel = max(self.next_channel, int(batch.channel.max()) + 1)
            at += length_at(data, at)
            segment.size = at
        if not segment.sequences:
            self._drop(segment)
            return
        self._segments.append(segment)
        self.next_sequence = max(self.next_sequence, segment.sequences[-1] + 1)

    def _after_last(self, segment: _Segment) -> int:
        for each in (segment, *reversed(self._segments)):
            if each.sequences:
                return each.sequences[-1] + 1
        return 0

    def _prune(self) -> None:
        while len(self._segments) > 1 and sum(each.size for each in self._segments) > self._most_bytes:
            self._drop(self._segments.pop(0))

    def _drop(self, segment: _Segment) -> None:
        with contextlib.suppress(OSError):
            os.unlink(segment.path)
        os.close(segment.fd)


__all__ = ["MEMORY_BYTES", "SPOOL_BYTES", "Batch", "Log"]

MEMORY_BYTES = 16 << 20
SPOOL_BYTES = 256 << 20
_RETRY_NS = 1_000_000_000


class Log:
    """All batches by sequence number, from 1 on. Any thread may call.

    Without a `folder` there is only memory. `trouble` says why nothing can be spooled; empty: all is well.
    """

    def __init__(
        self,
        folder: Path | None,
        memory_bytes: int = MEMORY_BYTES,
        spool_bytes: int = SPOOL_BYTES,
        mono_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.trouble = ""
        self.next_sequence = 1
        self.next_channel = 0  # one more than the highest channel number of any batch ever
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._spool_bytes = spool_bytes
        self._mono_ns = mono_ns
        self._lock = threading.Lock()
        self._ring: dict[int, Batch] = {}
        self._ring_bytes = 0
        self._spool: Spool | None = None
        self._unspooled: dict[int, Batch] = {}  # bytes of the batches in memory that are not in a file
        self._retry_ns = 0
        self._notes: list[Note] = []
        if folder is not None:
            self._write()

    @property
    def first(self) -> int:
        """The oldest sequence number that can be read; `next_sequence` where none can."""
        with self._lock:
            in_memory = next(iter(self._ring), self.next_sequence)
            spooled = self._spool.first if self._spool is not None else None
            return in_memory if spooled is None else min(spooled, in_memory)

    @property
    def kept_batches(self) -> int:
        with self._lock:
            if self._spool is None:
                return len(self._ring)
            return self._spool.count + len(self._unspooled)

    def append(self, batch: Batch) -> int:
        """Give a batch its sequence number, and keep it."""
        with self._lock:
            notes = (*batch.notes, *self._notes)
            self._notes = []
            batch = replace(batch, sequence=self.next_sequence, notes=notes)
            if batch.channel.size:
                self.next_channel = max(self.next_channel, int(batch.channel.max()) + 1)
            if self._folder is not None:
                self._unspooled[batch.sequence] = batch
                self._write()
            self._ring[batch.sequence] = batch
            self._ring_bytes += batch.memory_bytes
            while self._ring_bytes > self._memory_bytes and len(self._ring) > 1:
                oldest = next(iter(self._ring))
                self._ring_bytes -= self._ring.pop(oldest).memory_bytes
                self._unspooled.pop(oldest, None)
            self.next_sequence = batch.sequence + 1
            return batch.sequence

    def read(self, sequence: int) -> Batch | None:
        """The first batch from `sequence` on; None: there is none yet. Numbers that it skips are lost."""
        with self._lock:
            found = self._ring.get(sequence)
            if found is not None or sequence >= self.next_sequence:
                return found
            spooled = self._spool.read(sequence) if self._spool is not None else None
            in_memory = next((batch for number, batch in self._ring.items() if number >= sequence), None)
            if spooled is None or (in_memory is not None and in_memory.sequence <= spooled.sequence):
                return in_memory
            return spooled

    def close(self) -> None:
        with self._lock:
            if self._spool is not None:
                self._spool.close()
            self._spool = self._folder = None

    def _write(self) -> None:
        """Spool what is not in a file yet. After a failure, try again in a second."""
        if self.trouble and self._mono_ns() < self._retry_ns:
            self._keep_numbers()
            return
        try:
            spool = self._spool or self._open_spool()
            for sequence, batch in list(self._unspooled.items()):
                spool.write(batch, self.next_channel)
                del self._unspooled[sequence]
        except OSError as error:
            if not self.trouble:
                self._note(
                    "spool_lost", f"{self._folder}: {error.strerror}: only the newest batches are kept"
                )
            self.trouble = f"{self._folder}: {error.strerror}"
            self._retry_ns = self._mono_ns() + _RETRY_NS
            self._keep_numbers()
            return
        if self.trouble:
            self._note("spool_back", f"{self._folder} takes batches again")
            self.trouble = ""

    def _keep_numbers(self) -> None:
        """Keep the number of the batch being appended: readers get it from memory under this number."""
        if self._spool is not None:
            with contextlib.suppress(OSError):
                self._spool.keep_numbers(self.next_sequence + 1, self.next_channel)

    def _open_spool(self) -> Spool:
        assert self._folder is not None
        spool = Spool(self._folder, self._spool_bytes)
        if self.next_sequence > 1 or self._unspooled:
            # Readers already know numbers that belong to other batches in the spool.
            spool.clear(self.next_sequence)
        else:
            self.next_sequence = max(self.next_sequence, spool.next_sequence)
        self.next_channel = max(self.next_channel, spool.next_channel)
        self._spool = spool
        return spool

    def _note(self, name: str, detail: str) -> None:
        self._notes.append(Note(time.time_ns(), name, detail))
