"""Ask the daemon of this machine for the channels that we may not read ourselves.

Where there is no socket, this costs one system call: we load gRPC only where there is one. If the daemon does
not answer within a second, we estimate the CPU as we would without a daemon.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from smaragdine.clock import SYSTEM, Clock
from smaragdine.errors import UserError
from smaragdine.monitor.contract import ADDRESS_VARIABLE, DEFAULT_SOCKET
from smaragdine.monitor.sampler import Note
from smaragdine.sensors.base import Absent, Channel, Found, SensorLost
from smaragdine.sensors.discover import Elsewhere

if TYPE_CHECKING:
    from smaragdine.monitor.client import Client
    from smaragdine.monitor.contract import monitor_pb2 as pb


# Sensors that we may not read ourselves, read by a daemon that may. The daemon keeps what it has read, so a
# thread fetches it about once a second. Only the ends are urgent: a run begins after the first reading of
# every counter, and ends with one that was made after it.

_SENSORS = frozenset({"rapl", "perf", "hwmon"})  # we read the rest ourselves, or not at all
_FETCH_EVERY_S = 1.0
_HURRY_S = 0.03
_LAST_WITHIN_S = 0.6
_END_WITHIN_S = 1.0
_QUICK_MS = 150.0  # for slower channels, nobody waits for a first and a last reading


@dataclass(frozen=True)
class DaemonSession:
    id: str
    sequence: int
    channels: Mapping[int, Channel]  # by the daemon's number


@dataclass
class SessionStart:
    """How to begin a session, and to begin it again should the daemon have forgotten it."""

    client: Client
    pids: Sequence[int]
    period_ms: float
    have: Collection[str]

    def first(self) -> tuple[str, DaemonSession]:
        return self.client.health().version, self.session()

    def session(self) -> DaemonSession:
        from smaragdine.monitor.client import DaemonError

        for pid in self.pids:
            try:
                started = self.client.start(pid, self.period_ms)
            except DaemonError as error:
                if error.status not in ("NOT_FOUND", "PERMISSION_DENIED") or pid == self.pids[-1]:
                    raise
            else:
                wanted = wanted_channels(started.channels, self.have)
                return DaemonSession(started.session_id, started.sequence, wanted)
        raise AssertionError

    def stop(self, session_id: str) -> None:
        with contextlib.suppress(Exception):
            self.client.stop(session_id)
        self.client.close()


class DaemonSensor:
    """The channels of a session, which the daemon reads."""

    lane = "daemon"
    period_ns = 500_000_000

    def __init__(self, start: SessionStart, session: DaemonSession, clock: Clock = SYSTEM) -> None:
        self._start = start
        self._clock = clock
        self._channels = tuple(session.channels.values())
        self._quick = {i for i, channel in enumerate(self._channels) if channel.period_ms <= _QUICK_MS}
        self._session = session
        self._sequence = session.sequence
        self._index = self._indices(session)
        self._readings: list[tuple[int, int, float]] = []
        self._last_ns: dict[int, int] = {}
        self._notes: list[Note] = []
        self._first = threading.Event()
        self._closing = threading.Event()
        self._end_ns = 0
        self._gone_since_s: float | None = None
        self._gone_why = ""
        self._away_s = 0.0
        self._over = ""
        self.problem = ""  # what to say once all is over
        self._thread = in_background(self._keep_fetching)

    def channels(self) -> Sequence[Channel]:
        return self._channels

    def has_begun(self, timeout_s: float) -> bool:
        """Wait for the first reading of every quick channel. False: the time was up, and none came."""
        self._first.wait(timeout_s)
        self._first.set()
        return bool(self._last_ns) or not self._quick

    def read(self) -> Sequence[tuple[int, int, float]]:
        readings = self._drain()
        if not readings and self._over:
            raise SensorLost(self._over)
        return readings

    def close(self) -> Sequence[tuple[int, int, float]]:
        self._end_ns = self._clock.wall_ns()
        self._closing.set()
        self._thread.join(_END_WITHIN_S)
        if self._gone_since_s is not None:
            away_s = time.monotonic() - self._gone_since_s
            self.problem = f"the daemon has been gone for {away_s:.1f} s: {self._gone_why}"
        elif self._thread.is_alive() and not self._has_last():
            self.problem = f"the daemon at {self._start.client.address} does not answer any more"
        elif self._away_s:
            self.problem = f"the daemon was gone for {self._away_s:.1f} s: {self._gone_why}"
        return self._drain()

    def drain_notes(self) -> list[Note]:
        """What happened to the measurement since the last call."""
        count = len(self._notes)
        notes = self._notes[:count]
        del self._notes[:count]
        return notes

    def _drain(self) -> list[tuple[int, int, float]]:
        # The thread only appends, so copying a prefix needs no lock.
        count = len(self._readings)
        readings = self._readings[:count]
        del self._readings[:count]
        return readings

    def _indices(self, session: DaemonSession) -> dict[int, int]:
        places = {(channel.name, channel.detail): i for i, channel in enumerate(self._channels)}
        found = ((number, places.get((c.name, c.detail))) for number, c in session.channels.items())
        return {number: place for number, place in found if place is not None}

    def _keep_fetching(self) -> None:
        deadline_s = 0.0
        while not self._over:
            try:
                self._fetch()
                self._here()
            except Exception as error:  # whatever it is, the daemon may come back, and the run goes on
                self._gone(error)
            if self._closing.is_set():
                deadline_s = deadline_s or time.monotonic() + _LAST_WITHIN_S
                if self._has_last() or time.monotonic() >= deadline_s:
                    break
            if self._closing.is_set() or not self._first.is_set():
                time.sleep(_HURRY_S)
            else:
                self._closing.wait(_FETCH_EVERY_S)
        self._start.stop(self._session.id)

    def _has_last(self) -> bool:
        """Whether every channel that has readings has one from after the end. A lost channel gets no more."""
        return all(self._last_ns[i] >= self._end_ns for i in self._quick & self._last_ns.keys())

    def _fetch(self) -> None:
        from smaragdine.monitor.client import DaemonError

        try:
            for batch in self._start.client.read(self._session.id, self._sequence, patience_s=-1.0):
                self._take(batch)
        except DaemonError as error:
            if error.status not in ("NOT_FOUND", "INVALID_ARGUMENT"):
                raise
            # The daemon came back without its state, and does not know this session.
            self._session = self._start.session()
            self._sequence = self._session.sequence
            self._index = self._indices(self._session)

    def _take(self, batch: pb.ReadResponse) -> None:
        index, last_ns = self._index, self._last_ns
        for t_ns, number, value in zip(batch.t_ns, batch.channel, batch.value, strict=True):
            place = index.get(number)
            if place is not None:
                self._readings.append((t_ns, place, value))
                last_ns[place] = t_ns
        self._sequence = batch.next_sequence
        if batch.dropped_batches:
            self._note("dropped", f"{batch.dropped_batches} batches were not kept by the daemon until read")
        for note in batch.notes:
            if self._concerns_us(note):
                self._notes.append(Note(note.t_ns, note.name, f"{note.detail} (daemon)"))
        if batch.ended and not self._closing.is_set():
            self._over = f"the daemon's session has ended: {batch.end_reason}"
        if self._quick <= last_ns.keys():
            self._first.set()

    def _concerns_us(self, note: pb.Note) -> bool:
        if note.name.startswith("sensor_"):
            return any(channel.name in note.detail for channel in self._channels)
        return note.name not in ("clock_step", "suspended")  # the recorder sees this itself

    def _here(self) -> None:
        if self._gone_since_s is not None:
            away_s = time.monotonic() - self._gone_since_s
            self._away_s += away_s
            self._gone_since_s = None
            self._note("daemon_back", f"after {away_s:.1f} s")

    def _gone(self, error: Exception) -> None:
        why = error.reason if isinstance(error, UserError) else str(error)
        self._gone_why = why or type(error).__name__
        if self._gone_since_s is None:
            self._gone_since_s = time.monotonic()
            self._note("daemon_lost", self._gone_why)

    def _note(self, name: str, detail: str) -> None:
        self._notes.append(Note(self._clock.wall_ns(), name, detail))


def wanted_channels(messages: Iterable[pb.Channel], have: Collection[str]) -> dict[int, Channel]:
    """The daemon's measured channels, by number, of devices that nobody here measures."""
    wanted: dict[int, Channel] = {}
    for message in messages:
        if message.sensor not in _SENSORS or message.quantity not in ("energy", "power"):
            continue
        channel = _channel(message)
        if channel is not None and channel.provenance == "measured" and channel.device not in have:
            wanted[message.number] = channel
    return wanted


def _channel(message: pb.Channel) -> Channel | None:
    from smaragdine.monitor.contract import monitor_pb2 as pb

    def word(enumeration: Any, value: int, prefix: str) -> Any:
        return enumeration.Name(value).removeprefix(prefix).lower()

    try:
        kind = word(pb.Kind, message.kind, "KIND_")
        provenance = word(pb.Provenance, message.provenance, "PROVENANCE_")
        scope = word(pb.Scope, message.scope, "SCOPE_")
    except ValueError:  # from a newer daemon than we know
        return None
    return Channel(
        device=message.device,
        quantity=message.quantity,
        unit=message.unit,
        kind=kind,
        provenance=provenance,
        period_ms=message.period_ms,
        sensor=message.sensor,
        scope=scope,
        window_ms=message.window_ms if message.HasField("window_ms") else None,
        wraps_at=message.wraps_at if message.HasField("wraps_at") else None,
        detail=", ".join(filter(None, (message.detail, "through the daemon"))),
    )


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, name="daemon", daemon=True)
    thread.start()
    return thread


_ABSENT = "cpu:* energy (through the daemon)"
_ANSWER_WITHIN_S = 1.0
_FIRST_WITHIN_S = 1.0
_T = TypeVar("_T")


def through_daemon(
    environment: Mapping[str, str], period_ns: int = 0, *, look_only: bool = False, clock: Clock = SYSTEM
) -> Elsewhere:
    """What `discover` asks for channels that it cannot read itself. With `look_only` we read none."""

    def look(have: Collection[str]) -> Found:
        address = environment.get(ADDRESS_VARIABLE) or DEFAULT_SOCKET
        try:
            path = _socket_path(address)
            if path is None:
                return Found()
            return _open(path, have, period_ns, look_only, clock)
        except UserError as error:
            return Found(absent=[Absent(_ABSENT, error.reason, error.remedy or "see the daemon's own log")])
        except Exception as error:  # a recording without it is better than none
            reason = f"asking the daemon failed: {type(error).__name__}: {error}"
            return Found(absent=[Absent(_ABSENT, reason, "is this package installed as a whole?")])

    return look


def _socket_path(address: str) -> str | None:
    """The daemon's socket, where there is one. A missing default socket is normal; not reported."""
    path = address.removeprefix("unix:")
    path = path[2:] if path.startswith("//") else path
    if not path.startswith("/"):
        why = "only a Unix socket is sure to be this machine's"
        raise UserError(f"{ADDRESS_VARIABLE}={address} is not asked", why, "Name its socket, or unset it")
    try:
        os.stat(path)
    except PermissionError:
        pass  # the client says what this means
    except OSError as error:
        if path == DEFAULT_SOCKET:
            return None
        remedy = "Start one there with `sudo smaragdine daemon --socket PATH`, or unset it"
        raise UserError(f"{ADDRESS_VARIABLE}={address} has no daemon", error.strerror or "", remedy) from None
    return path


def _open(path: str, have: Collection[str], period_ns: int, look_only: bool, clock: Clock) -> Found:
    # Load it first: that time is not the daemon's.
    for module in ("smaragdine.monitor.contract.service", "grpclib.client", "grpclib.encoding.proto"):
        import_module(module)
    from smaragdine.monitor.client import connect

    client = connect(path)
    if look_only:
        described = _within(client.describe, path)
        client.close()
        return Found([_Shown(tuple(wanted_channels(described.channels, have).values()))])
    start = SessionStart(client, _whom(path), period_ns / 1e6, have)
    version, session = _within(start.first, path)
    if not session.channels:
        in_background(lambda: start.stop(session.id))
        return Found()
    sensor = DaemonSensor(start, session, clock)
    if not sensor.has_begun(_FIRST_WITHIN_S):
        # An estimate is better than nothing.
        in_background(sensor.close)
        raise UserError(f"the daemon at {path} has no readings", remedy="See its own log")
    facts: dict[str, object] = {
        "daemon": {
            "address": path,
            "version": version,
            "channels": [channel.name for channel in sensor.channels()],
        }
    }
    return Found([sensor], facts=facts)


@dataclass
class _Shown:
    """Channels only to show; nobody reads them."""

    shown: Sequence[Channel]
    period_ns: int = 1_000_000_000
    lane: str = "daemon"

    def channels(self) -> Sequence[Channel]:
        return self.shown

    def read(self) -> Sequence[tuple[int, int, float]]:
        return ()

    def close(self) -> Sequence[tuple[int, int, float]]:
        return ()


def _whom(path: str) -> Sequence[int]:
    """The process to record: our parent, with the program in its tree; else ourselves (0).

    A daemon outside our container counts processes differently. The kernel shows that by calling it 0.
    """
    import socket
    import struct

    parent = os.getppid()
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_ANSWER_WITHIN_S / 4)
            probe.connect(path)
            daemon_pid = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    except OSError:
        return (0,)
    return (parent, 0) if daemon_pid and parent > 1 else (0,)


def _within(call: Callable[[], _T], path: str) -> _T:
    """What `call` gives. If the daemon takes too long, the call is left behind."""
    results: list[_T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    in_background(work).join(_ANSWER_WITHIN_S)
    if errors:
        raise errors[0]
    if not results:
        raise UserError(
            f"the daemon at {path} does not answer", f"waited {_ANSWER_WITHIN_S:g} s", "See its own log"
        )
    return results[0]
