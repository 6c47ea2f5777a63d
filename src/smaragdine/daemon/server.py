"""Connections: who is at the other end, and how much one peer may take up.

We accept connections ourselves, so that we know from the kernel who is calling before we read the first byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from grpclib.config import Configuration
from grpclib.const import Handler as MethodHandler
from grpclib.encoding.proto import ProtoCodec
from grpclib.events import _DispatchServerEvents  # pyright: ignore[reportPrivateUsage]
from grpclib.protocol import AbstractHandler, EventsProcessor, H2Protocol
from grpclib.protocol import Connection as H2Link
from grpclib.server import Handler
from h2.config import H2Configuration
from h2.events import DataReceived, Event

from smaragdine.daemon.callers import Caller, Owner, Rights, peer_pidfd, unix_caller
from smaragdine.daemon.settings import Bounds
from smaragdine.errors import UserError
from smaragdine.system import out_of_files

# We do not log what the library says about a peer's nonsense.
for _library in ("grpclib", "asyncio"):
    logging.getLogger(_library).setLevel(logging.CRITICAL + 1)

_H2 = H2Configuration(
    client_side=False,
    header_encoding="utf-8",
    validate_inbound_headers=False,
    validate_outbound_headers=False,
    normalize_inbound_headers=False,
    normalize_outbound_headers=False,
)
_LEAST_WINDOW = 65535
_HANDSHAKE_S = 5.0
_LINGER_S = 1.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection:
    """The connection of one peer. `caller` is None where its token comes with each call."""

    def __init__(self, caller: Caller | None, sock: socket.socket | None = None) -> None:
        self.caller = caller
        self.is_known = caller is not None  # or has shown a valid token
        self.on_close: list[Callable[[], None]] = []
        self.closed = False
        self.lends_to: Owner | None = None  # a caller on another machine who holds leases
        self._sock = sock

    def process_fd(self) -> int | None:
        """A pidfd of the peer's process; None where it is gone, or not on this machine."""
        if self._sock is None or self.caller is None:
            return None
        try:
            return peer_pidfd(self._sock, self.caller)
        except OSError:
            return None


MakeMethods = Callable[[Connection], dict[str, MethodHandler]]


class _Codec(ProtoCodec):
    """Encodes messages, and passes on what is encoded already."""

    def encode(self, message: Any, message_type: Any) -> bytes:
        return message if isinstance(message, bytes) else super().encode(message, message_type)


class _Link(H2Link):
    """Closes at once, also where the peer does not read what we still have for it."""

    def close(self) -> None:
        transport = getattr(self, "_transport", None)
        super().close()
        if transport is not None:
            asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)


class _Processor(EventsProcessor):
    """Bounds what one call may send us: the library would buffer whatever length a peer announces."""

    def __init__(self, handler: AbstractHandler, connection: H2Link, request_bytes: int) -> None:
        super().__init__(handler, connection)
        self._request_bytes = request_bytes

    def process(self, event: Event) -> None:
        if type(event) in getattr(self, "processors", {}):
            super().process(event)

    def process_data_received(self, event: DataReceived) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None and stream.data_received + len(event.data) > self._request_bytes:
            if stream.data_received <= self._request_bytes:
                stream.data_received = self._request_bytes + 1
                stream.buffer.eof()
            self.connection.ack(event.stream_id, event.flow_controlled_length)
            return
        super().process_data_received(event)


class _Protocol(H2Protocol):
    def __init__(
        self, server: Server, connection: Connection, handler: Handler, config: Configuration
    ) -> None:
        super().__init__(handler, config, _H2)
        self._server = server
        self._peer = connection
        self._transport: asyncio.Transport | None = None
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        link = self.connection
        h2_connection = link._connection  # pyright: ignore[reportPrivateUsage]
        if link._ping_handle is not None:  # pyright: ignore[reportPrivateUsage]
            link._ping_handle.cancel()  # pyright: ignore[reportPrivateUsage]
        self._transport = cast(asyncio.Transport, transport)
        self.connection = _Link(h2_connection, self._transport, config=self.config)
        self.connection.initialize()
        self.processor = _Processor(self.handler, self.connection, self._server.bounds.request_bytes)
        self._server.protocols.add(self)
        if not self._peer.is_known:
            loop, patience_s = asyncio.get_running_loop(), self._server.bounds.stranger_s
            self._patience = loop.call_later(patience_s, self._drop_stranger)

    def _drop_stranger(self) -> None:
        """Close a stranger's connection: one that is only held takes a place from others."""
        if not self._peer.is_known and self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception:  # whatever nonsense came in, only this peer goes
            self.processor.close("nonsense")
        # Even a ping has an answer. A peer that asks again and again and reads nothing would fill our memory.
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() > self._server.bounds.unread_bytes:
            transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._server.protocols.discard(self)
        self._server.count(self._peer, -1)
        self._peer.closed = True
        for close in self._peer.on_close:
            close()
        super().connection_lost(exc)


class Server:
    """Accepts and bounds connections. `make_methods` gives the calls of one connection."""

    def __init__(
        self, make_methods: MakeMethods, rights: Rights, bounds: Bounds, say: Callable[[str], None]
    ) -> None:
        self.protocols: set[_Protocol] = set()
        self._make_methods = make_methods
        self._rights = rights
        self.bounds = bounds
        self._say = say
        self._listening: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: Counter[str] = Counter()
        self._full = False
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._config = Configuration(
            _keepalive_time=bounds.keepalive_s,
            _keepalive_timeout=bounds.keepalive_timeout_s,
            _keepalive_permit_without_calls=True,
            _http2_max_pings_without_data=0,
            _http2_min_sent_ping_interval_without_data=bounds.keepalive_s / 2,
            http2_connection_window_size=_LEAST_WINDOW,
            http2_stream_window_size=_LEAST_WINDOW,
        ).__for_server__()

    def serve(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        listening.setblocking(False)
        self._listening.append(listening)
        asyncio.get_running_loop().add_reader(listening, self._accept, listening, tls)

    def stop_accepting(self) -> None:
        for listening in self._listening:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        self._listening.clear()

    async def close(self) -> None:
        self.stop_accepting()
        for protocol in list(self.protocols):
            protocol.processor.close("the daemon is stopping")
        await asyncio.sleep(0)
        with contextlib.suppress(OSError):
            os.close(self._spare_fd)

    def count(self, connection: Connection, by: int) -> None:
        key = connection.caller.key if connection.caller is not None else "tcp"
        self._open[key] += by
        if not self._open[key]:
            del self._open[key]
        if by < 0:
            self._full = False

    def _accept(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        try:
            sock, _ = listening.accept()
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                self._refuse_one(listening, error)
            return
        sock.setblocking(False)
        try:
            caller = None if tls is not None else unix_caller(sock, self._rights)
        except OSError as error:  # it has gone already, or took the last descriptor
            if out_of_files(error):
                self._say_full(f"a connection was refused: {error.strerror}")
            sock.close()
            return
        connection = Connection(caller, sock if tls is None else None)
        key = caller.key if caller is not None else "tcp"
        if not self._has_room(key):
            self._say_full(f"{key} has {self._open[key]} of {self._open.total()} connections: no more")
            sock.close()
            return
        self.count(connection, 1)
        task = asyncio.get_running_loop().create_task(self._open_connection(sock, connection, tls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _has_room(self, key: str) -> bool:
        """Whether there is room. Strangers, users and root take no places from one another."""
        own, bounds = self._open[key], self.bounds
        if key == "tcp":
            return own < bounds.tcp_connections
        if key == "uid:0":
            return own < bounds.connections
        users = self._open.total() - self._open["tcp"] - self._open["uid:0"]
        return own < bounds.connections_per_user and users < bounds.connections

    async def _open_connection(
        self, sock: socket.socket, connection: Connection, tls: ssl.SSLContext | None
    ) -> None:
        loop = asyncio.get_running_loop()
        handler = Handler(self._make_methods(connection), _Codec(), None, _DispatchServerEvents())
        made: list[_Protocol] = []

        def protocol() -> _Protocol:
            made.append(_Protocol(self, connection, handler, self._config))
            return made[0]

        try:
            await loop.connect_accepted_socket(
                protocol, sock, ssl=tls, ssl_handshake_timeout=_HANDSHAKE_S if tls is not None else None
            )
        except Exception:  # it does not speak TLS, or has gone meanwhile
            if not made or made[0] not in self.protocols:
                self.count(connection, -1)
            sock.close()

    def _refuse_one(self, listening: socket.socket, error: OSError) -> None:
        """Refuse one peer with our last descriptor, so that it hears of it and the loop does not spin."""
        self._say_full(f"a connection was refused: {error.strerror}")
        with contextlib.suppress(OSError):
            os.close(self._spare_fd)
        with contextlib.suppress(OSError):
            listening.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _say_full(self, line: str) -> None:
        if not self._full:
            self._say(line)
        self._full = True


# The sockets on which we listen: a Unix one for root and a group; TCP with TLS.

_BACKLOG = 128


def listen_unix(path: Path, group: int) -> socket.socket:
    """A socket at `path` to which root and `group` can connect. It replaces one that a dead daemon left."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        remove_stale(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # Nobody may connect before mode and group are right.
            before = os.umask(0o777)
            try:
                sock.bind(os.fspath(path))
            finally:
                os.umask(before)
            os.chown(path, -1, group, follow_symlinks=False)
            os.chmod(path, 0o660)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock
    except OSError as error:
        why = "the path is too long" if "too long" in str(error) else error.strerror or str(error)
        raise UserError(f"no socket at {path}", why, "Name another place with --socket") from None


def remove_stale(path: Path) -> None:
    """Remove a socket that nobody serves. Refuses where somebody does."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UserError(
                f"no socket at {path}", "there is a file of that name", "Name another with --socket"
            )
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:
            pass
    raise UserError(f"a daemon serves {path} already", remedy="Stop it, or name another place with --socket")


def listen_tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise UserError(f"cannot listen at {host}:{port}", error.strerror or str(error)) from None


def tls_context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        what = f"no TLS with {cert} and {key}"
        raise UserError(
            what, error.strerror or str(error), "They are a certificate and its key, as PEM"
        ) from None
    return context
