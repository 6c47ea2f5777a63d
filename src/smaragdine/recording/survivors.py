"""Which processes outlived the program, but for those of Python's own that leave by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable

# As multiprocessing starts them, and loky after it. A resource tracker leaves once all it cleans up after
# are gone. So does a fork server; but its workers have its command line too.
_TRACKER = re.compile(rb"from [\w.]*\bresource_tracker import main\b")
_FORK_SERVER = re.compile(rb"from [\w.]*\bforkserver import main\b")


def survivors(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that run on, and that somebody may want to know of."""
    left = sorted(pid for pid in pids if runs(pid))
    commands = {pid: _read(pid, "cmdline") for pid in left}
    servers = {pid for pid, command in commands.items() if _FORK_SERVER.search(command)}
    # A server leaves after the last of its workers: whose parent is none is one itself.
    workers = {pid for pid in servers if _parent(pid) in servers}
    return [pid for pid in left if pid in workers or not (pid in servers or _TRACKER.search(commands[pid]))]


def runs(pid: int) -> bool:
    status = _status(pid)
    return bool(status) and status[0] not in (b"Z", b"X")


def _parent(pid: int) -> int | None:
    status = _status(pid)
    return int(status[1]) if status else None


def _status(pid: int) -> list[bytes]:
    """Its state, its parent and so on: what follows its name, in which there may be anything."""
    return _read(pid, "stat").rpartition(b")")[2].split()


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read(1 << 16)
    except OSError:
        return b""
