"""The keeper: the only process that sets limits. It brings every limit back, however its parent ends.

    python -m smaragdine.limits.keeper --journal FILE

It takes requests as messages (see messages.py). Before it sets a limit it notes the previous value in the
journal. When its stdin or its parent ends, or at SIGTERM, it brings back every limit, latest first. A lost
GPU or a reloading driver may refuse: then it tries again every second for a while, and leaves the rest in the
journal for the next keeper. With an empty stdin it only brings back: `… --journal FILE </dev/null`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from smaragdine.limits import journal
from smaragdine.limits.journal import JournalEntry
from smaragdine.limits.nvml import (
    Kind,
    LimitedGpu,
    LimitError,
    LimitValue,
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
from smaragdine.messages import Inbox, Message, send
from smaragdine.privilege import CAPABILITIES, bound
from smaragdine.sensors.nvml.gpus import ask, hold_library, nvml, release_library

# What a keeper is asked. Each has an `id` besides, and so has its answer.


class AskRanges(msgspec.Struct, tag_field="do", tag="ranges"):
    pass


class SetLimit(msgspec.Struct, tag_field="do", tag="set"):
    device: str
    kind: Kind
    value: float
    low: float = 0.0


class Restore(msgspec.Struct, tag_field="do", tag="restore"):
    device: str
    kind: Kind


class RestoreAll(msgspec.Struct, tag_field="do", tag="restore_all"):
    pass


Request = AskRanges | SetLimit | Restore | RestoreAll

# restored: as before · left: somebody else has set it since, or the driver refuses · pending: we try again
State = Literal["restored", "left", "pending"]
Key = tuple[str, Kind]


@dataclass(frozen=True)
class Brought:
    """How bringing a limit back went, and what is set `now` (None: unknown, or the driver's own choice)."""

    state: State
    now: LimitValue | None
    line: str


class Keeper:
    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path = path
        self._note = note
        self._entries: dict[Key, JournalEntry] = {}
        self.pending: set[Key] = set()
        # By UUID. A keeper of another journal may work on this machine too. Were it to set a limit on top of
        # ours, it would take ours for the previous value.
        self._held: dict[str, journal.Lock] = {}
        self._unread = ""  # why the journal, which may hold limits to bring back, cannot be read
        self._gpus: list[LimitedGpu] | None = None
        self._no_nvml = "no NVIDIA driver was found"

    def open(self) -> None:
        """Look for GPUs. Finding none is no error: they may come later."""
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
        """Bring back what an earlier keeper left in the journal."""
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

    def set(self, device: str, kind: Kind, asked: LimitValue) -> JournalEntry:
        """Note the previous value on disk, then set the limit. Raises `LimitError`, with nothing changed."""
        try:
            return self._set(device, kind, asked)
        finally:
            self._let_go_of_unchanged()

    def _set(self, device: str, kind: Kind, asked: LimitValue) -> JournalEntry:
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
            # After a driver reload, NVML must be re-initialised.
            self._reopen()
            gpu, wanted, now = self._look(device, kind, asked)
        key = (gpu.uuid, kind)
        known = self._entries.get(key)
        # However often we change a limit, we owe the value from before the first change.
        previous = now if known is None else known.previous
        entry = JournalEntry(device, gpu.uuid, kind, previous, wanted, confirmed=False)
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
        # Boards round. Note what they made of it, to see later whether somebody else has changed it.
        entry = self._entries[key] = replace(entry, target=actual, confirmed=True)
        self._save()
        return entry

    def _look(
        self, device: str, kind: Kind, asked: LimitValue
    ) -> tuple[LimitedGpu, LimitValue, LimitValue | None]:
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

    def _not_set(self, key: Key, known: JournalEntry | None, failed: LimitError) -> None:
        if failed.code == "unavailable":
            # Nobody knows whether it was set all the same: the entry stays in the journal.
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
        """Latest first, so that a setting on top of another one goes before that one."""
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
        # A full disk must not keep us from bringing limits back.
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
            # An entry too many does no harm: the next keeper finds that limit as it was.
            self._note(f"the journal {self._path} could not be written ({error.strerror})")

    def _hold(self, gpu: LimitedGpu) -> bool:
        """Lock the GPU until its limits are back. False: another keeper has it."""
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
        """Unlock all GPUs: whoever takes over the journal brings their limits back."""
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
        """Open NVML anew: handles do not outlive a driver, and NVML finds a new one only after a shutdown."""
        lib = nvml()
        held = {uuid for uuid, kind in self._entries if (uuid, kind) not in self.pending}
        if any(gpu.uuid in held and ask(lib.nvmlDeviceGetUUID, gpu.handle) for gpu in self._gpus or []):
            # The driver lives. It might forget what is set on this GPU if its last user let go.
            self._gpus = ask(open_gpus) or self._gpus
            return
        if self._gpus is not None:
            self._gpus = None
            release_library()
        self.open()


RETRY_S = 1.0
GIVE_UP_S = 60.0
LOCK_WAIT_S = 10.0
_LONGEST_BYTES = 65536  # of a request
_NEEDED = frozenset({"CAP_SYS_ADMIN"})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="smaragdine.limits.keeper")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--give-up-s", type=float, default=GIVE_UP_S)
    parser.add_argument("--lock-wait-s", type=float, default=LOCK_WAIT_S)
    options = parser.parse_args(argv)
    wake = _signals()
    with contextlib.suppress(OSError):
        # The kernel should kill this process last for memory: nobody else knows what to bring back.
        Path("/proc/self/oom_score_adj").write_text("-900")
    path: Path = options.journal
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _anybodys(path.parent):
            return _refuse(
                f"others may write to {path.parent}, and so to the limits' journal: none will be set"
            )
        lock = journal.Lock(path)
    except OSError as error:
        return _refuse(f"the limits' journal {path} cannot be made ({error.strerror}): no limit will be set")
    if not lock.take(options.lock_wait_s):
        return _refuse(f"another process holds the limits of this machine (journal {path})")
    keeper = Keeper(path, _note)
    keeper.open()
    privilege = _drop()
    keeper.start()
    send(1, {"ready": {"pid": os.getpid(), "privilege": privilege}})
    try:
        _serve(keeper, wake)
    except Exception as error:
        _log(f"stopped by {error!r}")
    return _finish(keeper, lock, options.give_up_s)


def _anybodys(folder: Path) -> bool:
    """Whether another user could put a journal there, and so have us set what they like."""
    found = folder.stat()
    return found.st_uid not in (0, os.geteuid()) or bool(found.st_mode & 0o022)


def _serve(keeper: Keeper, wake: int) -> None:
    """Answer until stdin or the parent ends, or a signal says so."""
    poller = select.poll()
    for fd in (0, wake, _parent()):
        if fd is not None:
            poller.register(fd, select.POLLIN)
    inbox = Inbox(0, _LONGEST_BYTES)
    next_try_s = 0.0
    while True:
        if keeper.pending and time.monotonic() >= next_try_s:
            keeper.try_again()
            next_try_s = time.monotonic() + RETRY_S
        events = poller.poll(1000 * RETRY_S if keeper.pending else None)
        if any(fd != 0 for fd, _ in events):
            return
        if not events:
            continue
        for message in inbox.take():
            if not send(1, _answer(keeper, message)):
                return
        if inbox.ended:
            return


def _answer(keeper: Keeper, message: Message) -> Message:
    number = message.get("id")
    try:
        return {"id": number, "result": _do(keeper, msgspec.convert(message, Request))}
    except LimitError as error:
        return {"id": number, "error": str(error), "code": error.code}
    except ValueError as error:
        return {"id": number, "error": f"not a request: {error}", "code": "invalid"}
    except Exception as error:  # It must live on, whatever a driver throws at it.
        return {"id": number, "error": f"the limits' keeper failed: {error!r}", "code": "unavailable"}


def _do(keeper: Keeper, request: Request) -> Any:
    if isinstance(request, AskRanges):
        return keeper.ranges()
    if isinstance(request, RestoreAll):
        return [asdict(brought) for brought in keeper.restore_all()]
    if isinstance(request, Restore):
        return asdict(keeper.restore(request.device, request.kind))
    entry = keeper.set(request.device, request.kind, LimitValue(request.value, request.low))
    return {"previous": entry.previous, "actual": entry.target}


def _finish(keeper: Keeper, lock: journal.Lock, give_up_s: float) -> int:
    """Bring everything back, unless another keeper takes over the journal meanwhile."""
    deadline_s = time.monotonic() + give_up_s
    keeper.restore_all()
    while keeper.pending:
        if time.monotonic() >= deadline_s:
            _log(f"given up for now: {', '.join(keeper.pending_words())}; it stays in the journal")
            return 1
        keeper.let_go()
        lock.let_go()
        time.sleep(RETRY_S)
        if not lock.take():
            return 0
        keeper.reload()
        keeper.try_again()
    return 0


def _signals() -> int:
    """A descriptor that wakes the loop at SIGTERM. We ignore the signals of a terminal."""
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(ignored, signal.SIG_IGN)
    receive, send = os.pipe()
    os.set_blocking(send, False)
    signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return receive


def _parent() -> int | None:
    """A descriptor that tells when the parent ends. A forked child of it may hold our stdin open longer."""
    try:
        return os.pidfd_open(os.getppid())
    except OSError:
        return None


def _drop() -> str:
    """Stay root, with only the capability that the driver asks for. Says what is left."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.geteuid() != 0:
        return f"uid {os.geteuid()}: the NVIDIA driver may refuse to set limits"
    try:
        bound(_NEEDED)
    except OSError as error:
        return f"root with all its capabilities: they could not be dropped ({error.strerror})"
    effective = Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0]
    if not int(effective, 16) >> CAPABILITIES["CAP_SYS_ADMIN"] & 1:
        return "root without CAP_SYS_ADMIN: the NVIDIA driver will refuse to set limits"
    return "root, with no capability but CAP_SYS_ADMIN"


def _note(line: str) -> None:
    if not send(1, {"note": line}):
        _log(line)


def _log(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"smaragdine: limits: {line}\n".encode())


def _refuse(line: str) -> int:
    send(1, {"refused": line})
    return 3


if __name__ == "__main__":
    # NVML's own threads and exit handlers have nothing left to do, and could hang.
    os._exit(main())
