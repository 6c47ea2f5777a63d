"""Sets limits and brings them back, with the journal always a step ahead. Used by the keeper alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from smaragdine.monitor.limits import journal
from smaragdine.monitor.limits.journal import Entry
from smaragdine.sensors.nvml_gpu import ask, hold_library, nvml, release_library
from smaragdine.sensors.nvml_limits import (
    Kind,
    LimitedGpu,
    LimitError,
    Setting,
    apply,
    bring_back,
    checked,
    current_setting,
    kind_words,
    limit_error,
    limit_ranges,
    open_gpus,
    setting_words,
)

# restored: as before · left: somebody else has set it since, or the driver refuses · pending: tried again
State = Literal["restored", "left", "pending"]
Key = tuple[str, Kind]


@dataclass(frozen=True)
class Brought:
    """How bringing back went, and what is set `now` (None: unknown, or the driver's own choice)."""

    state: State
    now: Setting | None
    line: str


class Setter:
    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path = path
        self._note = note
        self._entries: dict[Key, Entry] = {}
        self.pending: set[Key] = set()
        # By UUID. Keepers of other journals work on this machine too: one that sets a limit on top of ours
        # would take ours for what was before.
        self._held: dict[str, journal.Lock] = {}
        self._unread = ""  # why the journal cannot be read, which may hold limits to bring back
        self._gpus: list[LimitedGpu] | None = None
        self._no_nvml = "no NVIDIA driver was found"

    def open(self) -> None:
        """Look for GPUs. None is no error: they may come."""
        try:
            hold_library()
        except ImportError:
            self._no_nvml = "the binding nvidia-ml-py is not installed"
            return
        except nvml().NVMLError as error:
            self._no_nvml = f"NVML does not start: {error}"
            return
        try:
            self._gpus = open_gpus()
        except nvml().NVMLError as error:
            self._no_nvml = f"NVML does not answer: {error}"
            release_library()

    def start(self) -> None:
        """Bring back what a keeper before us left in the journal."""
        self.reload()
        if self._entries:
            self._note(f"bringing back {len(self._entries)} limits that were left changed")
            self.restore_all()

    def reload(self) -> None:
        loaded = journal.load(self._path)
        if loaded.trouble:
            self._note(loaded.trouble)
        self._unread = loaded.trouble if loaded.state == "unread" else ""
        if self._unread:
            return
        self._entries = {(entry.uuid, entry.kind): entry for entry in loaded.entries}
        self.pending &= self._entries.keys()
        self._let_go_of_unchanged()
        if loaded.state == "damaged":
            journal.set_aside(self._path)
        if loaded.state != "whole":
            self._save()

    def ranges(self) -> list[dict[str, Any]]:
        if self._gpus is None or any(ask(nvml().nvmlDeviceGetUUID, gpu.handle) is None for gpu in self._gpus):
            self._reopen()
        return [asdict(found) for gpu in self._gpus or [] for found in limit_ranges(gpu)]

    def set(self, device: str, kind: Kind, asked: Setting) -> Entry:
        """Set a limit whose previous value is safe on disk. Raises `LimitError`, with nothing changed."""
        try:
            return self._set(device, kind, asked)
        finally:
            self._let_go_of_unchanged()

    def _set(self, device: str, kind: Kind, asked: Setting) -> Entry:
        if self._unread:
            self.start()
        if self._unread:
            remedy = (
                f"Bring its limits back with what wrote it; see nvidia-smi before you remove {self._path}"
            )
            raise LimitError("unavailable", f"{device} {kind_words(kind)} not set", self._unread, remedy)
        try:
            gpu, wanted, now = self._look(device, kind, asked)
        except LimitError as error:
            if error.code not in ("unavailable", "not_found"):
                raise
            # A driver that was loaded anew answers only who starts NVML anew.
            self._reopen()
            gpu, wanted, now = self._look(device, kind, asked)
        key = (gpu.uuid, kind)
        known = self._entries.get(key)
        # What is owed stays what it was before the first change, however often it is changed.
        previous = now if known is None else known.previous
        entry = Entry(device, gpu.uuid, kind, previous, wanted, confirmed=False)
        try:
            journal.save(self._path, {**self._entries, key: entry}.values())
        except OSError as error:
            why = f"what it was could not be written down first ({error.strerror})"
            raise LimitError(
                "unavailable", f"{device} {kind_words(kind)} not set", why, f"See {self._path}"
            ) from None
        self._entries[key] = entry
        lib = nvml()
        try:
            apply(gpu, kind, wanted)
        except lib.NVMLError as error:
            failed = limit_error(device, kind, error, mig=gpu.mig)
            self._not_set(key, known, failed)
            raise failed from None
        self.pending.discard(key)
        try:
            actual = current_setting(gpu, kind) or wanted
        except lib.NVMLError:
            return entry
        # Boards round: what they made of it tells later whether somebody else has changed it.
        entry = self._entries[key] = replace(entry, target=actual, confirmed=True)
        self._save()
        return entry

    def _look(self, device: str, kind: Kind, asked: Setting) -> tuple[LimitedGpu, Setting, Setting | None]:
        gpu = self._gpu(device)
        try:
            free = self._hold(gpu)
        except OSError as error:
            why = f"its lock beside {self._path} cannot be had ({error.strerror})"
            raise LimitError("unavailable", f"{device} {kind_words(kind)} not set", why) from None
        if not free:
            why = "another sweep or daemon has changed a limit of this GPU, and not brought it back yet"
            raise LimitError("held", f"{device} {kind_words(kind)} not set", why, "Try again after it")
        try:
            return gpu, checked(gpu, kind, asked), current_setting(gpu, kind)
        except nvml().NVMLError as error:
            raise limit_error(device, kind, error, mig=gpu.mig) from None

    def _not_set(self, key: Key, known: Entry | None, failed: LimitError) -> None:
        if failed.code == "unavailable":
            # Whether it was set all the same, nobody knows: what is owed stays in the journal.
            self._reopen()
            if known is None:
                self._restore(key)
            return
        if known is None:
            del self._entries[key]
        else:
            self._entries[key] = known
        self._save()

    def restore(self, device: str, kind: Kind) -> Brought:
        for key, entry in self._entries.items():
            if entry.device == device and entry.kind == kind:
                return self._restore(key)
        return Brought("restored", None, f"{device} {kind_words(kind)} was not changed")

    def restore_all(self) -> list[Brought]:
        """Latest first, so that what was set on top of another setting goes before it."""
        return [self._restore(key) for key in reversed(list(self._entries))]

    def try_again(self) -> None:
        self._reopen()
        for key in [key for key in reversed(list(self._entries)) if key in self.pending]:
            brought = self._restore(key)
            if brought.state != "pending":
                self._note(brought.line)

    def pending_words(self) -> list[str]:
        waiting = [entry for key, entry in self._entries.items() if key in self.pending]
        return [f"{entry.device} {kind_words(entry.kind)}" for entry in waiting]

    def _restore(self, key: Key) -> Brought:
        entry = self._entries[key]
        name = f"{entry.device} {kind_words(entry.kind)}"
        gpu = next((gpu for gpu in self._gpus or [] if gpu.uuid == entry.uuid), None)
        if gpu is None:
            self.pending.add(key)
            return Brought("pending", None, f"{name} comes back as soon as the GPU does")
        # A full disk must not keep from bringing back.
        with contextlib.suppress(OSError):
            if not self._hold(gpu):
                self.pending.add(key)
                line = f"{name} comes back as soon as another sweep or daemon has brought back its own"
                return Brought("pending", None, line)
        try:
            now = current_setting(gpu, entry.kind)
            changed_by_others = entry.confirmed and now not in (entry.target, entry.previous)
            if now is not None and changed_by_others:
                line = f"{name} left at {setting_words(entry.kind, now)}: somebody else has set it since"
                self._done(key, line)
                return Brought("left", now, line)
            if now is None or now != entry.previous:
                bring_back(gpu, entry.kind, entry.previous)
        except nvml().NVMLError as error:
            failed = limit_error(entry.device, entry.kind, error, mig=gpu.mig)
            if failed.code in ("invalid", "unsupported"):
                line = f"{name} could not be brought back: {failed}"
                self._done(key, line)
                return Brought("left", None, line)
            if key not in self.pending:
                self._note(f"{name} is not back yet: {failed}")
            self.pending.add(key)
            return Brought("pending", None, f"{name} comes back as soon as possible: {failed}")
        self._done(key)
        line = f"{name} is {setting_words(entry.kind, entry.previous)} again"
        return Brought("restored", entry.previous, line)

    def _done(self, key: Key, line: str = "") -> None:
        del self._entries[key]
        self.pending.discard(key)
        self._save()
        self._let_go_of_unchanged()
        if line:
            self._note(line)

    def _save(self) -> None:
        try:
            journal.save(self._path, self._entries.values())
        except OSError as error:
            # Safe: an entry too many only makes the next keeper look at a limit that is as it was.
            self._note(f"the journal {self._path} could not be written ({error.strerror})")

    def _hold(self, gpu: LimitedGpu) -> bool:
        """Whether no keeper but this one may change the GPU's limits until they are brought back."""
        if gpu.uuid in self._held:
            return True
        lock = journal.Lock(self._path.with_name(gpu.uuid))
        if not lock.take():
            lock.close()
            return False
        self._held[gpu.uuid] = lock
        return True

    def _let_go_of_unchanged(self) -> None:
        changed = {uuid for uuid, _ in self._entries}
        for uuid in [uuid for uuid in self._held if uuid not in changed]:
            self._held.pop(uuid).close()

    def let_go(self) -> None:
        """Of all GPUs: whoever takes over the journal brings their limits back."""
        while self._held:
            self._held.popitem()[1].close()

    def _gpu(self, device: str) -> LimitedGpu:
        if self._gpus is None:
            self.open()
        if self._gpus is None:
            raise LimitError("not_found", f"no device {device}", self._no_nvml, "Check that nvidia-smi works")
        for gpu in self._gpus:
            if gpu.device == device:
                return gpu
        index = device.removeprefix("gpu:")
        if index.isdecimal() and int(index) < (ask(nvml().nvmlDeviceGetCount) or 0):
            raise LimitError(
                "unavailable", f"{device} does not answer", remedy="See nvidia-smi, and try again"
            )
        known = ", ".join(gpu.device for gpu in self._gpus) or "none"
        raise LimitError("not_found", f"no device {device} whose limits can be set", f"there is {known}")

    def _reopen(self) -> None:
        """Handles do not outlive a driver; NVML must let go of it before it can find the new one."""
        lib = nvml()
        held = {uuid for uuid, kind in self._entries if (uuid, kind) not in self.pending}
        if any(gpu.uuid in held and ask(lib.nvmlDeviceGetUUID, gpu.handle) for gpu in self._gpus or []):
            # The driver lives, and might forget what is set on this GPU when its last user lets go.
            self._gpus = ask(open_gpus) or self._gpus
            return
        if self._gpus is not None:
            self._gpus = None
            release_library()
        self.open()
