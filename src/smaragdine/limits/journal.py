"""The journal: which limits we changed and must bring back. It is on disk before a limit is changed.

It has a header and a line for each limit, each with a checksum. We replace the file as a whole. Should a
broken file system tear it all the same, its whole lines still count.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from smaragdine.limits.nvml import KINDS, Kind, LimitValue
from smaragdine.system import boot_id

DEFAULT_JOURNAL = Path("/var/lib/smaragdine-limits/journal")
_VERSION = 1
_LOCK_LOOK_S = 0.02


@dataclass(frozen=True)
class JournalEntry:
    """One limit that we changed. `target` is what we asked for; once `confirmed`, what the driver set."""

    device: str
    uuid: str  # a GPU's number may change when the driver is reloaded
    kind: Kind
    previous: LimitValue | None  # None: the driver does not tell, and has a way to reset
    target: LimitValue
    confirmed: bool


@dataclass(frozen=True)
class Loaded:
    entries: tuple[JournalEntry, ...]
    trouble: str = ""  # what could not be read
    # past: from before a reboot · damaged: for good · unread: not readable now, so not to be replaced
    state: Literal["whole", "past", "damaged", "unread"] = "whole"


def save(path: Path, entries: Iterable[JournalEntry], boot: str | None = None) -> None:
    """Replace the journal, durably. Where that raises OSError, the old one stands."""
    kept = list(entries)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not kept:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)
            os.fsync(folder)
            return
        new = f"{path.name}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(new, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(encode(kept, boot_id() if boot is None else boot))
            file.flush()
            os.fsync(file.fileno())
        os.rename(new, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path) -> Loaded:
    """What must still be brought back. Raises nothing: `trouble` says what cannot be read."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Loaded(())
    except OSError as error:
        return Loaded((), f"the journal {path} cannot be read ({error.strerror})", "unread")
    entries, promised, boot = decode(data)
    if boot and boot_id() and boot != boot_id():
        return Loaded((), "the machine was started anew since: the driver's own limits are back", "past")
    if (version := _version(data)) not in (None, _VERSION):
        return Loaded((), f"the journal {path} is of version {version}, of another smaragdine", "unread")
    if promised is not None and len(entries) == promised:
        return Loaded(entries)
    some = "none" if not entries else f"only {len(entries)}"
    of = "" if promised is None else f" of {promised}"
    trouble = f"the journal {path} is damaged: {some}{of} of its limits can be read; see nvidia-smi"
    return Loaded(entries, trouble, "damaged")


def set_aside(path: Path) -> None:
    """Copy a damaged journal: a person may be able to read more of it than we are."""
    with contextlib.suppress(OSError):
        Path(f"{path}.damaged").write_bytes(path.read_bytes())


def encode(entries: Iterable[JournalEntry], boot: str) -> bytes:
    kept = list(entries)
    header = {"limits": _VERSION, "boot": boot, "entries": len(kept)}
    return b"".join(map(_line, [header, *map(asdict, kept)]))


def decode(data: bytes) -> tuple[tuple[JournalEntry, ...], int | None, str]:
    """The entries of its whole lines, how many there should be (None: no header), and their boot."""
    promised, boot = None, ""
    entries: list[JournalEntry] = []
    for number, line in enumerate(data.split(b"\n")[:-1]):
        fields = _fields(line)
        if fields is None:
            continue
        if number == 0:
            promised, boot = fields.get("entries"), str(fields.get("boot", ""))
            if fields.get("limits") != _VERSION:
                return (), None, boot
        elif (entry := _entry(fields)) is not None:
            entries.append(entry)
    return tuple(entries), promised, boot


class Lock:
    """Only one keeper at a time works on a journal, or on a GPU. The kernel unlocks it when a keeper ends."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path.with_name(f"{path.name}.lock"), flags, 0o600)

    def take(self, wait_s: float = 0.0) -> bool:
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    return False
                time.sleep(_LOCK_LOOK_S)

    def let_go(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._fd)


def _line(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _fields(line: bytes) -> dict[str, Any] | None:
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _version(data: bytes) -> object:
    """None where the header does not say it."""
    fields = _fields(data.partition(b"\n")[0])
    return None if fields is None else fields.get("limits")


def _entry(fields: Mapping[str, Any]) -> JournalEntry | None:
    try:
        previous = fields["previous"]
        entry = JournalEntry(
            device=str(fields["device"]),
            uuid=str(fields["uuid"]),
            kind=fields["kind"],
            previous=None if previous is None else LimitValue(*map(float, previous)),
            target=LimitValue(*map(float, fields["target"])),
            confirmed=bool(fields["confirmed"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
    return entry if entry.kind in KINDS else None
