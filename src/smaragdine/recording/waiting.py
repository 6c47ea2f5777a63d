"""Wait for descriptors of any number: select() gives up at 1024, and our caller may leave us more."""

from __future__ import annotations

import select
from collections.abc import Collection


def readable(fds: Collection[int], timeout_s: float | None) -> set[int]:
    """Those that have something to read, or have ended; empty after `timeout_s` seconds."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1e3)}
