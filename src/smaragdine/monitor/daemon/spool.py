"""Batches in files: a bounded row of segments in the state folder, readable by nobody else.

Nothing is synchronised to the disk: a killed daemon loses nothing by that, and a machine that loses power
ends every session anyway. What is torn or harmed then is found by its checksum and skipped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smaragdine.monitor.daemon.batch import MAGIC, Batch, decode, encode, length_at

_SEGMENTS = 16  # the oldest goes as a whole, so each is a small part of the spool
_NAME = re.compile(r"batches-\d{20}\.spool")
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
# Next sequence number, next channel number, checksum. Written over in place, which a full disk allows too.
_NUMBERS = struct.Struct("<QQI")


@dataclass
class _Segment:
    """One file: the sequence numbers in it, where each begins, and how many bytes are good."""

    path: Path
    fd: int
    sequences: array[int]
    offsets: array[int]
    size: int = 0


class Spool:
    """Raises OSError when the folder cannot be used; after one it may be tried again at any time."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self.next_sequence = 1
        self.next_channel = 0
        self._most_bytes = most_bytes
        self._segments: list[_Segment] = []
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._numbers_fd = os.open(folder / "numbers", _FLAGS, 0o600)
        try:
            # A second daemon on the same folder would write over what the first one writes.
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
        """The sequence numbers there are, in order."""
        return (sequence for segment in self._segments for sequence in segment.sequences)

    @property
    def first(self) -> int | None:
        return next(self.sequences, None)

    @property
    def count(self) -> int:
        return sum(len(segment.sequences) for segment in self._segments)

    def write(self, batch: Batch, next_channel: int) -> None:
        """Puts a batch behind those that are there. What was half written is not in the way of the next."""
        self.keep_numbers(batch.sequence + 1, next_channel)
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
        self._prune()

    def keep_numbers(self, next_sequence: int, next_channel: int) -> None:
        """A batch's number is never another's, even where the batch itself could not be written."""
        self.next_sequence, self.next_channel = next_sequence, next_channel
        data = struct.pack("<QQ", next_sequence, next_channel)
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
                # The disk has lost it: so it is lost, and not asked for again.
                del segment.sequences[at], segment.offsets[at]
        return None

    def clear(self) -> None:
        """Forgets all batches; the numbers go on."""
        for segment in self._segments:
            self._drop(segment)
        self._segments = []

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
        """Takes what is good in a file another daemon left; a file without anything good is deleted."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        segment = _Segment(path, fd, array("Q"), array("Q"))
        data = os.pread(segment.fd, os.fstat(segment.fd).st_size, 0)
        at = 0
        while at < len(data):
            batch = decode(data, at)
            if batch is None:
                # Harm in the middle leaves what follows: go on at the next place that looks like a batch.
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
