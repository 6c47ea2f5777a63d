"""A client that talks to the daemon and waits for its answers.

    with connect() as daemon:
        session = daemon.start(pid=1234, period_ms=4)
        for batch in daemon.read(session.session_id, follow=True):
            …

Without an address, it connects to the one in SMARAGDINE_DAEMON, or to the Unix socket of this machine's
daemon. A TCP address is HOST:PORT; the token is in SMARAGDINE_DAEMON_TOKEN. If no public authority signed the
certificate, SMARAGDINE_DAEMON_CA names the file of the authority that did.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import ssl
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from smaragdine.errors import UserError
from smaragdine.monitor.contract import ADDRESS_VARIABLE, DEFAULT_SOCKET

if TYPE_CHECKING:
    from grpclib.client import Channel

    from smaragdine.monitor.contract import monitor_pb2
    from smaragdine.monitor.contract.service import Method


TOKEN_VARIABLE = "SMARAGDINE_DAEMON_TOKEN"
CA_VARIABLE = "SMARAGDINE_DAEMON_CA"

_CALL_TIMEOUT_S = 30.0
_RETRY_EVERY_S = 0.2
_T = TypeVar("_T")


class DaemonError(UserError):
    """The daemon refused, in its own words. `status` is gRPC's, such as NOT_FOUND."""

    def __init__(self, status: str, what: str, why: str = "", remedy: str = "") -> None:
        super().__init__(what, why, remedy)
        self.status = status


@dataclass(frozen=True)
class Address:
    """A Unix socket's `path`, or `host` and `port` with TLS."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        path = path[2:]
    if path.startswith("/"):
        return Address(path=path)
    host, colon, port = text.removeprefix("https://").rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"{text!r} is no address of a daemon", remedy="It is /PATH/OF/A/SOCKET or HOST:PORT")
    return Address(host=host.removeprefix("[").removesuffix("]"), port=int(port))


def daemon_address(environment: Mapping[str, str]) -> str:
    return environment.get(ADDRESS_VARIABLE) or DEFAULT_SOCKET


def connect(address: str | None = None, token: str | None = None, ca: str | None = None) -> Client:
    """A client of the daemon at `address`; it connects with the first call."""
    place = parse_address(address or daemon_address(os.environ))
    return Client(place, token or os.environ.get(TOKEN_VARIABLE, ""), ca or os.environ.get(CA_VARIABLE, ""))


class Client:
    """One connection, which reconnects by itself. Any thread may call; a forked child gets its own."""

    def __init__(self, address: Address, token: str = "", ca: str = "") -> None:
        self.address = address
        self._token = token
        self._ca = ca
        self._lock = threading.Lock()
        self._owner_pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._channel: Channel | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def describe(self) -> monitor_pb2.DescribeResponse:
        return self._call("Describe")

    def start(
        self, pid: int = 0, period_ms: float = 0.0, job: str = "", include_past: bool = False
    ) -> monitor_pb2.StartResponse:
        return self._call("Start", pid=pid, period_ms=period_ms, job=job, include_past=include_past)

    def stop(self, session_id: str) -> monitor_pb2.StopResponse:
        return self._call("Stop", session_id=session_id)

    def list(self, session_id: str = "") -> Sequence[monitor_pb2.Session]:
        """The caller's sessions, or one of them with its channels."""
        return self._call("List", session_id=session_id).sessions

    def set_limit(
        self,
        device: str,
        kind: monitor_pb2.LimitKind | int,
        value: float,
        low: float = 0.0,
        lease_s: float = 0.0,
        lease_id: str = "",
    ) -> monitor_pb2.SetLimitResponse:
        """Set a limit and get a lease on it; with the `lease_id` of an own one renew or change it."""
        return self._call(
            "SetLimit", device=device, kind=kind, value=value, low=low, lease_s=lease_s, lease_id=lease_id
        )

    def release(self, lease_id: str) -> monitor_pb2.ReleaseResponse:
        return self._call("Release", lease_id=lease_id)

    def health(self) -> monitor_pb2.HealthResponse:
        return self._call("Health")

    def read(
        self,
        session_id: str,
        sequence: int = 0,
        follow: bool = False,
        every_ms: float = 0.0,
        patience_s: float = 30.0,
    ) -> Iterator[monitor_pb2.ReadResponse]:
        """Read batches of a session. If the daemon goes away, wait for it and go on from there; after
        `patience_s` without it, raise."""
        gone_since_s: float | None = None
        while True:
            batches = self._batches(session_id, sequence, follow, every_ms)
            try:
                while True:
                    batch = self._run(_next(batches))
                    if batch is None:
                        return
                    gone_since_s = None
                    sequence = batch.next_sequence
                    yield batch
                    if batch.ended:
                        return
            except DaemonError as error:
                now_s = time.monotonic()
                gone_since_s = gone_since_s or now_s
                if error.status != "UNAVAILABLE" or now_s - gone_since_s > patience_s:
                    raise
            finally:
                self._abandon(batches)
            time.sleep(_RETRY_EVERY_S)

    def close(self) -> None:
        with self._lock:
            loop, thread, channel = self._loop, self._thread, self._channel
            self._loop = self._thread = self._channel = None
            if loop is None or self._owner_pid != os.getpid():
                return
        if channel is not None:
            loop.call_soon_threadsafe(channel.close)
        loop.call_soon_threadsafe(loop.stop)
        if thread is not None:
            thread.join(2.0)

    def _call(self, name: str, **fields: Any) -> Any:
        from smaragdine.monitor.contract.service import METHODS

        method = METHODS[name]
        try:
            request = method.request(**fields)
        except (ValueError, TypeError) as error:
            raise UserError(f"{name} cannot be asked for that", str(error)) from None
        return self._run(self._unary(method, request))

    async def _unary(self, method: Method, request: Any) -> Any:
        from grpclib.client import UnaryUnaryMethod

        call = UnaryUnaryMethod[Any, Any](self._open(), method.path, method.request, method.response)
        return await call(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata())

    async def _batches(
        self, session_id: str, sequence: int, follow: bool, every_ms: float
    ) -> AsyncIterator[monitor_pb2.ReadResponse]:
        from grpclib.client import UnaryStreamMethod

        from smaragdine.monitor.contract.service import METHODS

        method = METHODS["Read"]
        call = UnaryStreamMethod[Any, Any](self._open(), method.path, method.request, method.response)
        request = method.request(session_id=session_id, sequence=sequence, follow=follow, every_ms=every_ms)
        async with call.open(metadata=self._metadata()) as stream:
            await stream.send_message(request, end=True)
            async for batch in stream:
                yield batch
            # Ask for it: else a connection that closes right after a refusal looks like a good end.
            await stream.recv_trailing_metadata()

    def _metadata(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._token}"} if self._token else {}

    def _open(self) -> Channel:
        """Open the channel, on the loop's own thread."""
        from grpclib.client import Channel

        if self._channel is None:
            if self.address.path:
                self._channel = Channel(path=self.address.path)
            else:
                context = ssl.create_default_context(cafile=self._ca or None)
                context.set_alpn_protocols(["h2"])
                self._channel = Channel(self.address.host, self.address.port, ssl=context)
        return self._channel

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # A forked child has no thread of ours, and must not use our socket.
            if self._loop is None or self._owner_pid != os.getpid():
                self._owner_pid = os.getpid()
                self._channel = None
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run_loop, args=(self._loop,), name="daemon client", daemon=True
                )
                self._thread.start()
            return self._loop

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._running_loop())
        try:
            return future.result()
        except (KeyboardInterrupt, concurrent.futures.CancelledError):
            future.cancel()
            raise
        except Exception as error:
            raise _as_user_error(error, self.address) from None

    def _abandon(self, batches: AsyncIterator[Any]) -> None:
        close = getattr(batches, "aclose", None)
        if close is not None and self._loop is not None and self._owner_pid == os.getpid():
            asyncio.run_coroutine_threadsafe(close(), self._loop)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


async def _next(batches: AsyncIterator[_T]) -> _T | None:
    return await anext(batches, None)


def _as_user_error(error: Exception, address: Address) -> UserError:
    from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

    if isinstance(error, UserError):
        return error
    if isinstance(error, GRPCError):
        # The daemon answers in one line: what and why, then what to do.
        reason, _, remedy = (error.message or f"the daemon answered {error.status.name}").partition(". ")
        return DaemonError(error.status.name, reason, remedy=remedy)
    # The library has no class of its own for a connection that was closed before it was used.
    closed = isinstance(error, AttributeError) and "_transport" in str(error)
    if closed or isinstance(error, (StreamTerminatedError, ProtocolError)):
        return DaemonError("UNAVAILABLE", f"the daemon at {address} closed the connection")
    if isinstance(error, TimeoutError):
        return DaemonError("DEADLINE_EXCEEDED", f"the daemon at {address} does not answer")
    if isinstance(error, PermissionError):
        return _no_access(address)
    if isinstance(error, ssl.SSLError):
        remedy = f"Name the authority's certificate in {CA_VARIABLE}"
        return DaemonError("UNAUTHENTICATED", f"no TLS with the daemon at {address}", str(error), remedy)
    if isinstance(error, OSError):
        remedy = "Start it with `sudo smaragdine daemon`, or name another with " + ADDRESS_VARIABLE
        return DaemonError("UNAVAILABLE", f"no daemon at {address}", error.strerror or str(error), remedy)
    why = f"{type(error).__name__}: {error}"
    return DaemonError("INTERNAL", f"talking to the daemon at {address} failed", why)


def _no_access(address: Address) -> DaemonError:
    what = f"no access to the daemon at {address}"
    group = _group_of(address.path)
    if not group or group == "root":
        return DaemonError("PERMISSION_DENIED", what, "its socket is for root alone")
    return DaemonError(
        "PERMISSION_DENIED",
        what,
        f"its socket is for members of the group {group}",
        f"Have an administrator add you (sudo usermod -aG {group} $USER), then log in again",
    )


def _group_of(path: str) -> str:
    """The group whose members may connect; empty where we cannot even look at the socket."""
    for place in (Path(path), Path(path).parent):
        try:
            return place.group()
        except (OSError, KeyError):
            continue
    return ""
