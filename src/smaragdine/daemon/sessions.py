"""The session table: who records what, since when, and how it ended. It outlives the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from smaragdine.daemon.callers import Caller, has_ended, open_process, process_uids
from smaragdine.daemon.running_energy import DeviceUse
from smaragdine.daemon.settings import Bounds
from smaragdine.files import write_whole
from smaragdine.sensors.base import Channel
from smaragdine.system import boot_id, start_ticks

# What outlives the daemon's process, in JSON files in the state folder.


class StateFile:
    """One file, written whole or not at all. Says once if it cannot be written."""

    def __init__(self, folder: Path | None, name: str, say: Callable[[str], None]) -> None:
        self._path = folder / name if folder is not None else None
        self._say = say
        self._failed = False

    def save(self, value: Any) -> None:
        if self._path is None:
            return
        try:
            write_whole(self._path, json.dumps(value))
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._say(f"{self._path} cannot be written, so a restart would lose it: {error.strerror}")
            self._failed = True

    def load(self, use: Callable[[Any], None]) -> bool:
        """Hand what it holds to `use`. Returns whether that went well."""
        if self._path is None:
            return False
        try:
            use(json.loads(self._path.read_text()))
            return True
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            self._say(f"{self._path} cannot be used and is ignored: {type(error).__name__}: {error}")
            return False


STOPPED, PROCESS_ENDED = "stopped", "process ended"
_JOB = re.compile(r"[A-Za-z0-9._-]{0,63}")


class Refused(Exception):
    """Answers a call with an error: gRPC's status and one line."""

    def __init__(self, status: str, line: str) -> None:
        super().__init__(line)
        self.status = status
        self.line = line


@dataclass
class Session:
    id: str
    pid: int
    ticks: int  # when the process started: with its number and the boot, this says which one it is
    uid: int
    user: str
    period_ns: int
    job: str = ""
    slurm_job_id: str = ""
    begin_ns: int = 0
    end_ns: int = 0
    sequence: int = 0
    end_sequence: int = 0  # one more than its last batch; 0: it goes on
    end_reason: str = ""
    dropped_batches: int = 0
    channels: dict[int, Channel] = field(default_factory=dict[int, Channel])  # its own
    energies: list[DeviceUse] = field(default_factory=list[DeviceUse])  # once it has ended
    pidfd: int = -1
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # set when it ends or the daemon stops

    @property
    def ended(self) -> bool:
        return bool(self.end_sequence)


def check_request(period_ms: float, job: str) -> None:
    if not (period_ms == 0 or 1 <= period_ms <= 1000):
        raise Refused("INVALID_ARGUMENT", f"a period of {period_ms:g} ms is not between 1 and 1000 ms")
    if not _JOB.fullmatch(job):
        raise Refused("INVALID_ARGUMENT", "a job's name has letters, digits and ._- , at most 63 of them")


def open_target(caller: Caller, pid: int) -> tuple[int, int]:
    """The number and a pidfd of the process to record. Refuses one that the caller may not record."""
    if pid == 0:
        pid = caller.pid
    if pid == 0:
        raise Refused("INVALID_ARGUMENT", "pid 0 is the caller's own process, which is not on this machine")
    pidfd = open_process(pid) if 0 < pid < 1 << 31 else None
    if pidfd is None:
        raise Refused("NOT_FOUND", f"there is no process {pid}")
    # The pidfd holds on to the process: had its number gone to another one, this one would have ended.
    try:
        uids = process_uids(pid)
    except OSError:
        os.close(pidfd)
        raise
    ended = has_ended(pidfd)
    if not ended and (caller.is_root or uids == frozenset({caller.uid})):
        return pid, pidfd
    os.close(pidfd)
    if ended or not uids:
        raise Refused("NOT_FOUND", f"process {pid} has ended")
    raise Refused("PERMISSION_DENIED", f"process {pid} is not {caller.user}'s")


class SessionTable:
    """All sessions, with those that ended lately."""

    def __init__(self, folder: Path | None, bounds: Bounds, say: Callable[[str], None]) -> None:
        self._file = StateFile(folder, "sessions.json", say)
        self._bounds = bounds
        self.sessions: dict[str, Session] = {}

    @property
    def live(self) -> list[Session]:
        return [session for session in self.sessions.values() if not session.ended]

    def reserve(self, caller: Caller, pid: int, period_ns: int, job: str) -> Session:
        live = self.live
        own = sum(session.uid == caller.uid for session in live)
        if len(live) >= self._bounds.sessions and not caller.is_root:
            raise Refused("RESOURCE_EXHAUSTED", f"{len(live)} sessions run here, and no more are allowed")
        if own >= self._bounds.sessions_per_user:
            line = f"{own} sessions of {caller.user} run here, and no more are allowed. Stop some of them"
            raise Refused("RESOURCE_EXHAUSTED", line)
        session = Session(
            secrets.token_hex(6), pid, start_ticks(pid), caller.uid, caller.user, period_ns, job
        )
        self.sessions[session.id] = session
        return session

    def get(self, caller: Caller, session_id: str) -> Session:
        session = self.sessions.get(session_id)
        if session is None:
            shown = session_id[:40] if session_id.isprintable() else "of that name"
            raise Refused("NOT_FOUND", f"there is no session {shown}; one that ended is forgotten in a while")
        if not caller.is_root and session.uid != caller.uid:
            raise Refused("PERMISSION_DENIED", f"session {session_id} is another user's")
        return session

    def forget(self, now_ns: int) -> list[Session]:
        """Drop sessions that ended long ago; of too many, the oldest of whoever has the most."""
        ended = sorted((s for s in self.sessions.values() if s.ended), key=lambda s: s.end_ns)
        oldest_ns = now_ns - int(self._bounds.forget_s * 1e9)
        gone = [s for s in ended if s.end_ns < oldest_ns]
        by_user: dict[int, deque[Session]] = {}
        for session in ended[len(gone) :]:
            by_user.setdefault(session.uid, deque()).append(session)
        too_many = len(ended) - len(gone) - self._bounds.ended_sessions
        gone += [max(by_user.values(), key=len).popleft() for _ in range(too_many)]
        for session in gone:
            del self.sessions[session.id]
        return gone

    def save(self) -> None:
        begun = [_to_dict(session) for session in self.sessions.values() if session.begin_ns]
        self._file.save({"boot_id": boot_id(), "sessions": begun})

    def load(self) -> None:
        """Take up sessions from before a restart: hold a live one's process, or note that it has ended."""
        self._file.load(self._take_up)

    def _take_up(self, values: Any) -> None:
        sessions = [_from_dict(item) for item in values["sessions"]]
        same_boot = values["boot_id"] == boot_id()
        for session in sessions:
            self.sessions[session.id] = session
            if session.ended or not same_boot:
                continue
            pidfd = None
            with contextlib.suppress(OSError):  # no descriptor is left, so this session cannot go on
                pidfd = open_process(session.pid)
                if pidfd is not None and start_ticks(session.pid) == session.ticks and not has_ended(pidfd):
                    session.pidfd = pidfd
                    continue
            if pidfd is not None:
                os.close(pidfd)


_NOT_KEPT = ("channels", "energies", "pidfd", "wake")
_PLAIN = [item.name for item in fields(Session) if item.name not in _NOT_KEPT]


def _to_dict(session: Session) -> dict[str, Any]:
    return {
        **{name: getattr(session, name) for name in _PLAIN},
        "channels": {number: vars(channel) for number, channel in session.channels.items()},
        "energies": [vars(energy) for energy in session.energies],
    }


def _from_dict(item: dict[str, Any]) -> Session:
    return Session(
        **{name: item[name] for name in _PLAIN},
        channels={int(number): Channel(**channel) for number, channel in item["channels"].items()},
        energies=[DeviceUse(**energy) for energy in item["energies"]],
    )
