"""The one bounded log of batches. Sessions are only views of it: a reader that never reads holds nothing up.

The newest batches are in memory, more of them in the spool, from which a restarted daemon goes on: a batch is
in its file before anybody can read it. While the disk is full or not writable the memory serves alone; what
it still holds is spooled as soon as that works again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from smaragdine.monitor.daemon.batch import Batch
from smaragdine.monitor.daemon.spool import Spool
from smaragdine.monitor.sampler import Note

__all__ = ["MEMORY_BYTES", "SPOOL_BYTES", "Batch", "Log"]

MEMORY_BYTES = 16 << 20
SPOOL_BYTES = 256 << 20
_RETRY_NS = 1_000_000_000


class Log:
    """Batches by sequence number, from 1 on. Any thread may call.

    Without a `folder` there is only memory. `trouble` says why nothing is spooled; empty: all is well.
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
        self.next_channel = 0  # one past the highest channel number of any batch there ever was
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._spool_bytes = spool_bytes
        self._mono_ns = mono_ns
        self._lock = threading.Lock()
        self._ring: dict[int, Batch] = {}
        self._ring_bytes = 0
        self._spool: Spool | None = None
        self._unspooled: dict[int, Batch] = {}  # of the ring: those that are not in a file
        self._retry_ns = 0
        self._notes: list[Note] = []
        if folder is not None:
            self._write()

    @property
    def first(self) -> int:
        """The oldest sequence number there is; `next_sequence` when there is none."""
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
        """Gives a batch its sequence number and keeps it."""
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
        """The first batch from `sequence` on; those it skips are lost. None: there is none yet."""
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
        """Spools what is not; after a failure, again in a second."""
        if self.trouble and self._mono_ns() < self._retry_ns:
            if self._spool is not None:
                with contextlib.suppress(OSError):
                    self._spool.keep_numbers(self.next_sequence + 1, self.next_channel)
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
            return
        if self.trouble:
            self._note("spool_back", f"{self._folder} takes batches again")
            self.trouble = ""

    def _open_spool(self) -> Spool:
        assert self._folder is not None
        spool = Spool(self._folder, self._spool_bytes)
        if self.next_sequence > 1 or self._unspooled:
            # Readers have been given numbers that are another batch's in there.
            spool.clear()
        else:
            self.next_sequence = max(self.next_sequence, spool.next_sequence)
        self.next_channel = max(self.next_channel, spool.next_channel)
        self._spool = spool
        return spool

    def _note(self, name: str, detail: str) -> None:
        self._notes.append(Note(time.time_ns(), name, detail))
