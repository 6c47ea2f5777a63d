"""How a parent and its child talk: each message is one line of JSON, on the child's stdin and stdout.

    child = Child(module_command("smaragdine.tuning.process"))     # in the parent
    child.send({"follow": "spool"})
    answer = child.receive(timeout_s=15)

    for message in Inbox(0):                                      # in the child
        send(1, {"done": …})

A peer may end, stop or go mad, and none of it is an exception here. Its end ends the inbox. Half a line
counts for nothing. A line that is no message arrives as an empty message. A line longer than agreed counts as
the peer's end. Nobody waits longer than they say: `receive` has a time limit, and an `Outbox` never blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from typing import Any

from smaragdine.errors import visible
from smaragdine.system import readable

Message = dict[str, Any]

LONGEST_BYTES = 16 << 20  # of a line: messages are small, and a peer gone mad must not fill our memory
_READ_BYTES = 1 << 16
_MOST_PRINTED = 300  # of a line that goes into a message of ours
# A reader that has left this much unread is not listening. The rest of the pipe is for what it must hear.
_MOST_UNREAD_BYTES = 4096


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of a line. A line that is none gives an empty one, in which nobody finds anything."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def send(fd: int, message: Message) -> bool:
    """Write a message, however long the reader takes. False: the reader is gone."""
    data = memoryview(encode(message))
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return False
    return True


class Inbox:
    """The messages that arrive at a descriptor. `ended` once no more will come."""

    def __init__(self, fd: int, longest_bytes: int = LONGEST_BYTES) -> None:
        self.fd = fd
        self.ended = False
        self.printed = ""  # the last line that was no message: what a library, or a dying Python, had to say
        self._longest_bytes = longest_bytes
        self._begun = bytearray()  # a line whose end is still to come
        self._waiting: list[Message] = []

    def take(self) -> list[Message]:
        """Read once, and give the messages that this completes. Blocks where there is nothing to read."""
        chunk = b"" if self.ended else os.read(self.fd, _READ_BYTES)
        *lines, rest = chunk.split(b"\n")
        messages: list[Message] = []
        for line in lines:
            if len(self._begun) + len(line) > self._longest_bytes:
                self.ended = True
                return messages
            messages.append(self._read(bytes(self._begun) + line))
            self._begun.clear()
        self._begun += rest
        if not chunk:
            self._read(bytes(self._begun))  # half a line is no message, but may be what was printed last
        self.ended = not chunk or len(self._begun) > self._longest_bytes
        return messages

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message. None: the time is over, or the peer has `ended`."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            while self._waiting:
                if message := self._waiting.pop(0):
                    return message
            if self.ended:
                return None
            if not readable([self.fd], None if deadline_s is None else deadline_s - time.monotonic()):
                return None
            self._waiting += self.take()

    def __iter__(self) -> Iterator[Message]:
        """Every message until the peer ends."""
        while (message := self.receive()) is not None:
            yield message

    def _read(self, line: bytes) -> Message:
        message = decode(line)
        if not message and line.strip():
            self.printed = visible(line.decode(errors="replace").strip()[:_MOST_PRINTED])
        return message


class Outbox:
    """Sends into a pipe whose reader may be stopped (Ctrl-Z) or gone, and never waits for it for ever."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""  # of lines that did not fit

    def offer(self, message: Message) -> None:
        """Say it, unless the reader is not listening: then it is left out."""
        if self._push() and self._unread_bytes() <= _MOST_UNREAD_BYTES:
            self._rest = encode(message)
            self._push()

    def say(self, message: Message, wait_s: float) -> None:
        """Say it, and wait at most this long until the pipe has all of it."""
        self._rest += encode(message)
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
            self._rest = b""  # the reader is gone, and we go on without it
        return True

    def _unread_bytes(self) -> int:
        try:
            return struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)))[0]
        except OSError:
            return 0


def module_command(module: str, *arguments: str) -> list[str]:
    """How a module of ours is started as a process."""
    # -P: a file named numpy.py in the folder where the user started us must not be imported by us.
    return [sys.executable, "-P", "-m", module, *arguments]


class Child:
    """A process that we talk to. `options` are subprocess's. Raises OSError where it does not start."""

    def __init__(self, command: Sequence[str], *, longest_bytes: int = LONGEST_BYTES, **options: Any) -> None:
        self.process = subprocess.Popen[bytes](
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, **options
        )
        self.pid = self.process.pid
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self.inbox = Inbox(self._stdout.fileno(), longest_bytes)

    def send(self, message: Message) -> bool:
        """False: it has ended, or we have hung up."""
        return not self._stdin.closed and send(self._stdin.fileno(), message)

    def receive(self, timeout_s: float | None = None) -> Message | None:
        return self.inbox.receive(timeout_s)

    def hang_up(self) -> None:
        """End its stdin: nothing more will be sent."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def detach(self) -> tuple[int, int]:
        """The descriptors of its stdout and its stdin, for somebody else to read and write."""
        fds = os.dup(self._stdout.fileno()), os.dup(self._stdin.fileno())
        self._stdout.close()
        self._stdin.close()
        return fds

    def end(self, wait_s: float | None = None) -> int:
        """Hang up and wait for its end; one that takes longer is killed. Returns what subprocess does."""
        self.hang_up()
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._stdout.close()
        self.inbox.ended = True
        return self.process.returncode


def keep_stdout_for_messages(printed_fd: int = 2) -> int:
    """Where a child writes its messages. What libraries print on stdout goes to `printed_fd` from now on."""
    messages_fd = os.dup(1)
    os.dup2(printed_fd, 1)
    return messages_fd
