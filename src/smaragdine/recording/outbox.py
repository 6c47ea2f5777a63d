"""Lines into a pipe whose reader may be stopped (Ctrl-Z) or gone: nothing here waits for it for ever."""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import termios
import time
from typing import Any

# A reader that has left this much unread is not listening. The rest of the pipe is for what it must hear.
_MOST_UNREAD_BYTES = 4096


class Outbox:
    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""  # of lines that did not fit

    def offer(self, message: dict[str, Any]) -> None:
        """Say it, unless the reader is not listening: then it is left out."""
        if self._push() and self._unread_bytes() <= _MOST_UNREAD_BYTES:
            self._rest = _line(message)
            self._push()

    def say(self, message: dict[str, Any], wait_s: float) -> None:
        """Say it, and wait so long until the pipe has all of it."""
        self._rest += _line(message)
        deadline_s = time.monotonic() + wait_s
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while not self._push() and (left_s := deadline_s - time.monotonic()) > 0:
            poll.poll(left_s * 1e3)

    def _push(self) -> bool:
        """Whether nothing is left to write. A line may go in parts, but never without its end."""
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._fd, self._rest) :]
        except BlockingIOError:
            return False
        except OSError:
            # Whoever listened is gone; the recording goes on without them.
            self._rest = b""
        return True

    def _unread_bytes(self) -> int:
        try:
            return struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)))[0]
        except OSError:
            return 0


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
