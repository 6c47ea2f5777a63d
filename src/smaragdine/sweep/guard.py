"""Should we and the limits' keeper be killed together, nobody is left to bring limits back: the guard is."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from smaragdine.monitor.limits.control import keeper_command

# A line means that all is well. The end without one means that we are gone: a keeper with nobody to ask it
# waits for the one before it, and brings back what that left in the journal.
_WAIT = 'read -r line || exec "$@" </dev/null'


@contextlib.contextmanager
def guarded(journal: Path) -> Iterator[None]:
    """What the journal has is brought back even if this process and its keeper die within the block."""
    # A session of its own: what is meant for the terminal's programs does not reach it.
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _WAIT, "limits-guard", *keeper_command(journal)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            guard.communicate(b"\n")
