"""Ask the daemon of this machine for the channels that we may not read ourselves.

A look that finds no socket costs a system call: gRPC is loaded only where there is one. A daemon that does
not answer within a second is left alone, and the CPU is estimated as it would be without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

from smaragdine.clock import SYSTEM, Clock
from smaragdine.errors import UserError
from smaragdine.monitor.address import ADDRESS_VARIABLE, DEFAULT_SOCKET
from smaragdine.monitor.daemon_sensor import DaemonSensor, SessionStart, in_background, wanted_channels
from smaragdine.sensors.base import Absent, Channel, Found
from smaragdine.sensors.discover import Elsewhere

_ABSENT = "cpu:* energy (through the daemon)"
_ANSWER_WITHIN_S = 1.0
_FIRST_WITHIN_S = 1.0
_T = TypeVar("_T")


def through_daemon(
    environment: Mapping[str, str], period_ns: int = 0, *, look_only: bool = False, clock: Clock = SYSTEM
) -> Elsewhere:
    """What `discover` asks for the channels that it cannot read itself. With `look_only` none is read."""

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
    """The socket, where there is one. The default one is nobody's promise, so nothing is said of it."""
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
    # Loading takes time that is not the daemon's.
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
    """Channels to tell of; nobody reads them."""

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
    """Whose session it is: our parent's, with the program in its tree; else our own (0).

    A daemon outside our container counts processes differently, which the kernel shows by calling it 0.
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
    """What `call` gives, unless the daemon takes too long: then it is left behind."""
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
