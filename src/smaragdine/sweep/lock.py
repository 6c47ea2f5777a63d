"""One process at a time works in a folder."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TextIO

from smaragdine.errors import UserError


def locked(folder: Path) -> TextIO:
    """Held until it is closed, or its process ends."""
    lock = open(folder / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(
            f"{folder} is at work already", remedy="Wait for it, or name another folder"
        ) from None
    return lock
