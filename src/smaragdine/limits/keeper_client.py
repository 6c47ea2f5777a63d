"""Talks to the keeper: asks it to set limits, and starts another one if it dies.

    with own_keeper() as keeper:
        keeper.set("gpu:0", "power", 300)
        …                                     # after the block every limit is as before, however it ends

Every call has a time limit, so that a keeper that hangs in a driver holds up nobody. If a keeper does not
answer a `set` in time, the limit is brought back as soon as it answers again.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path
from typing import Any

from smaragdine.limits.journal import DEFAULT_JOURNAL
from smaragdine.limits.keeper import Brought
from smaragdine.limits.leases import Applied
from smaragdine.limits.nvml import Code, Kind, LimitError, LimitRange, LimitValue
from smaragdine.messages import Child, Inbox, Message, encode, module_command

TIMEOUT_S = 5.0
START_TIMEOUT_S = 15.0  # a keeper before us may still be bringing back
CLOSE_TIMEOUT_S = 2.0
_BACKOFF_S = (0.0, 0.1, 0.5, 2.0, 5.0)
_FIRST_WAIT_S = 2.0
_STARTING = "the limits' keeper is still starting"
_LOST = "the limits' keeper has died; another one brings everything back"

# Starts a keeper. Gives the descriptors of its stdout and its stdin, which nobody else may hold.
Launch = Callable[[], tuple[int, int]]


def keeper_command(journal: Path) -> list[str]:
    return module_command("smaragdine.limits.keeper", "--journal", str(journal))


def launch_here(journal: Path) -> Launch:
    """Start keepers as children of this process."""

    def launch() -> tuple[int, int]:
        # In a session of its own, the terminal's signals do not reach it.
        child = Child(keeper_command(journal), start_new_session=True)
        threading.Thread(target=child.process.wait, name="limits-reap", daemon=True).start()
        return child.detach()

    return launch


class KeeperClient:
    """Asks a keeper, from any thread. `say` gets a line for everything worth knowing."""

    def __init__(
        self, launch: Launch, *, timeout_s: float = TIMEOUT_S, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._launch = launch
        self._timeout_s = timeout_s
        self._say = say
        self._lock = threading.Lock()
        self._write_fd = -1
        self._next_id = 0
        self._waiting: dict[int, Future[Any]] = {}
        self._late: set[int] = set()
        self._generation = 0
        self._ready = threading.Event()
        self._closing = threading.Event()
        self._refused = ""
        self.pid = 0
        self.privilege = ""
        self._thread = threading.Thread(target=self._run, name="limits", daemon=True)
        self._thread.start()

    @property
    def generation(self) -> int:
        """Grows by one with every keeper. A new keeper has brought back what the one before had set."""
        return self._generation

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until a keeper works. Raises `LimitError` where none does."""
        if not self._ready.wait(timeout_s) or self._refused:
            why = self._refused or "its process does not start"
            raise LimitError("unavailable", "limits cannot be set", why)

    def ranges(self) -> list[LimitRange]:
        return [_range(found) for found in self._ask("ranges")[0]]

    def set(self, device: str, kind: Kind, value: float, low: float = 0.0) -> Applied:
        """Set a limit. `restore` brings back what was before the first `set`. Raises `LimitError`."""
        answer, generation = self._ask("set", device=device, kind=kind, value=value, low=low)
        actual = _setting(answer["actual"])
        assert actual is not None
        return Applied(_setting(answer["previous"]), actual, generation)

    def restore(self, device: str, kind: Kind) -> Brought:
        """Bring back what was before the first `set`, if there was one."""
        return _brought(self._ask("restore", device=device, kind=kind)[0])

    def restore_all(self) -> list[Brought]:
        return [_brought(answer) for answer in self._ask("restore_all")[0]]

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Hang up: the keeper brings everything back and ends. We wait for that at most so long."""
        self._closing.set()
        with self._lock:
            self._hang_up()
        self._thread.join(timeout_s)

    def _hang_up(self) -> None:
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1

    def _ask(self, verb: str, **arguments: object) -> tuple[Any, int]:
        """The keeper's answer, and its generation."""
        future: Future[Any] = Future()
        if not self._generation:
            # A daemon answers calls before its first keeper does.
            self._ready.wait(_FIRST_WAIT_S)
        with self._lock:
            if self._late and verb in ("set", "ranges"):
                why = "the driver has not answered an earlier request yet"
                raise LimitError("unavailable", "limits cannot be set now", why, "Try again later")
            number, generation = self._send(verb, arguments, future), self._generation
        try:
            return future.result(self._timeout_s), generation
        except NotInTime:
            with self._lock:
                if self._waiting.get(number) is future:
                    self._late.add(number)
                    if verb == "set":
                        # It stands behind the `set` in the pipe, so the keeper does it right after.
                        undo = {"device": arguments["device"], "kind": arguments["kind"]}
                        with contextlib.suppress(LimitError):
                            self._late.add(self._send("restore", undo, Future()))
            why = f"the driver has not answered for {self._timeout_s:g} s"
            raise LimitError("unavailable", "limits cannot be set now", why, "See nvidia-smi") from None

    def _send(self, verb: str, arguments: dict[str, Any], future: Future[Any]) -> int:
        if self._write_fd < 0 or not self._ready.is_set():
            why = self._refused or (_LOST if self._generation else _STARTING)
            raise LimitError("unavailable", "limits cannot be set now", why, "Try again")
        self._next_id += 1
        number = self._next_id
        line = encode({"id": number, "do": verb, **arguments})
        if len(line) > select.PIPE_BUF:
            raise LimitError("invalid", "limit not set", "the device's name is too long")
        try:
            # Up to this length a pipe takes all of a line or nothing.
            os.write(self._write_fd, line)
        except OSError as error:
            why = "the keeper takes no more requests" if isinstance(error, BlockingIOError) else _LOST
            raise LimitError("unavailable", "limits cannot be set now", why, "Try again") from None
        self._waiting[number] = future
        return number

    def _run(self) -> None:
        failures = 0
        while not self._closing.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]):
            try:
                read_fd, write_fd = self._launch()
            except OSError as error:
                self._say(f"the limits' keeper does not start: {error}")
                failures += 1
                continue
            os.set_blocking(write_fd, False)
            with self._lock:
                self._write_fd = write_fd
                if self._closing.is_set():
                    self._hang_up()
            failures = 0 if self._listen(read_fd) else failures + 1
            self._lost()

    def _listen(self, read_fd: int) -> bool:
        """Take the keeper's messages until it ends. True: it was ready at some time."""
        worked = False
        try:
            for message in Inbox(read_fd):
                if "ready" in message:
                    worked = True
                    self.pid = message["ready"]["pid"]
                    self.privilege = message["ready"]["privilege"]
                    self._refused = ""
                    self._ready.set()
                elif "note" in message:
                    self._say(message["note"])
                elif "refused" in message:
                    if message["refused"] != self._refused:
                        self._say(message["refused"])
                    self._refused = message["refused"]
                    self._ready.set()
                elif "id" in message:
                    self._answered(message)
        finally:
            os.close(read_fd)
        return worked

    def _answered(self, message: Message) -> None:
        with self._lock:
            future = self._waiting.pop(message["id"], None)
            self._late.discard(message["id"])
        if future is None:
            return
        if "error" in message:
            code: Code = message["code"]
            future.set_exception(LimitError(code, message["error"]))
        else:
            future.set_result(message["result"])

    def _lost(self) -> None:
        with self._lock:
            self._hang_up()
            waiting = list(self._waiting.values())
            self._waiting.clear()
            self._late.clear()
            # In this order: whoever sees the new generation waits for its keeper.
            if not self._refused:
                self._ready.clear()
            self._generation += 1
        for future in waiting:
            future.set_exception(LimitError("unavailable", "limit not set", _LOST, "Try again"))
        if not self._closing.is_set() and not self._refused:
            self._say(_LOST)


@contextlib.contextmanager
def own_keeper(
    journal: Path = DEFAULT_JOURNAL, *, say: Callable[[str], None] = lambda line: None
) -> Iterator[KeeperClient]:
    """A keeper for one block, at whose end it brings everything back. Raises `LimitError`."""
    keeper = KeeperClient(launch_here(journal), say=say)
    try:
        keeper.wait_ready()
        yield keeper
    finally:
        with contextlib.suppress(LimitError):
            for brought in keeper.restore_all():
                if brought.state == "pending":
                    say(brought.line)
        keeper.close()


def _setting(value: Any) -> LimitValue | None:
    return None if value is None else LimitValue(*map(float, value))


def _brought(answer: dict[str, Any]) -> Brought:
    return Brought(answer["state"], _setting(answer["now"]), answer["line"])


def _range(found: dict[str, Any]) -> LimitRange:
    return LimitRange(
        device=found["device"],
        kind=found["kind"],
        lowest=found["lowest"],
        highest=found["highest"],
        steps=tuple(found["steps"]),
        low_steps=tuple(found["low_steps"]),
        current=_setting(found["current"]),
        default=_setting(found["default"]),
    )
