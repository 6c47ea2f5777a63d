"""The daemon's heart without processes or privileges: one event loop, no sensors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from grpclib.client import Channel as GrpcChannel
from grpclib.client import UnaryUnaryMethod

from cli import TIMEOUT_S
from smaragdine.daemon.callers import Caller, CredentialFile, Owner, Rights, add_token
from smaragdine.daemon.core import Daemon, Knowledge
from smaragdine.daemon.lease_calls import LeaseCalls
from smaragdine.daemon.log import Log
from smaragdine.daemon.running_energy import RunningEnergy
from smaragdine.daemon.server import Server
from smaragdine.daemon.service import Service
from smaragdine.daemon.sessions import Refused, SessionTable
from smaragdine.daemon.settings import Bounds, Settings
from smaragdine.daemon.source import Source
from smaragdine.monitor.contract.service import METHODS
from smaragdine.sensors.discover import Machine, SensorSettings

CALLER = Caller("uid:1", "ada", os.getuid(), os.getpid(), Owner("ada"), may_read=True)


@contextlib.asynccontextmanager
async def a_daemon(settings: Settings) -> AsyncIterator[Daemon]:
    source = Source(Machine([], [], {}, None), SensorSettings(), gpu_pids=dict)
    meter = RunningEnergy(source.channels, source.cpus, source.inside, source.gpu_sessions)
    table = SessionTable(settings.state, settings.bounds, print)
    daemon = Daemon(settings, Knowledge((), {}), source, Log(settings.state), table, meter, print)
    daemon.begin()
    try:
        yield daemon
    finally:
        await daemon.end()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


class Held:
    """A source's `add` that waits to be let go, as in a look at very many processes."""

    def __init__(self, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        self._add = source.add
        monkeypatch.setattr(source, "add", self._wait_and_add)

    def _wait_and_add(self, *args: Any) -> Any:
        assert self.let_go.wait(TIMEOUT_S)
        return self._add(*args)


async def start_and_hang_up(daemon: Daemon) -> None:
    starting = asyncio.create_task(daemon.start(CALLER, os.getpid(), 1.0, "", False))
    await asyncio.sleep(0)  # until it waits for the source
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_start_that_nobody_waits_for_leaves_nothing_and_holds_its_place_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang_up_twice() -> None:
        bounds = Bounds(sessions_per_user=2)
        async with a_daemon(Settings(state=None, bounds=bounds)) as daemon:
            before, idle_ns = descriptors(), daemon.source.period_ns
            held = Held(daemon.source, monkeypatch)
            await start_and_hang_up(daemon)
            await start_and_hang_up(daemon)
            with pytest.raises(Refused, match="no more are allowed"):
                await daemon.start(CALLER, os.getpid(), 1.0, "", False)
            held.let_go.set()
            await until(lambda: not daemon.table.sessions)
            assert daemon.source.period_ns == idle_ns
            assert descriptors() == before
            session = await daemon.start(CALLER, os.getpid(), 1.0, "", False)
            daemon.stop(session)

    asyncio.run(hang_up_twice())


def test_a_start_that_nobody_waits_for_and_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang_up() -> None:
        async with a_daemon(Settings(state=None)) as daemon:
            held = Held(daemon.source, monkeypatch)
            monkeypatch.setattr(held, "_add", lambda *_: int("no number"))
            before = descriptors()
            await start_and_hang_up(daemon)
            held.let_go.set()
            await until(lambda: not daemon.table.sessions)
            assert descriptors() == before

    asyncio.run(hang_up())


def test_a_stranger_who_only_holds_a_connection_goes_and_who_has_a_token_stays(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    for_server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    for_server.load_cert_chain(cert, key)
    for_server.set_alpn_protocols(["h2"])
    for_client = ssl.create_default_context(cafile=str(cert))
    for_client.set_alpn_protocols(["h2"])
    token = add_token(tmp_path / "tokens", "ci", "nobody", 1, frozenset({"read"}))
    method = METHODS["Health"]

    async def ask(channel: GrpcChannel) -> bool:
        call = UnaryUnaryMethod(channel, method.path, method.request, method.response)
        answer = await call(method.request(), metadata={"authorization": f"Bearer {token}"})
        return answer.ok

    async def hold_and_ask() -> None:
        bounds = Bounds(stranger_s=3.0, tcp_connections=3)
        async with a_daemon(Settings(state=None, bounds=bounds)) as daemon, asyncio.timeout(TIMEOUT_S):
            service = Service(daemon, LeaseCalls(None, print), CredentialFile(tmp_path / "tokens", print))
            server = Server(service.methods, Rights(-1, -1), bounds, print)
            listening = socket.create_server(("127.0.0.1", 0))
            port = listening.getsockname()[1]
            server.serve(listening, for_server)
            known = GrpcChannel("localhost", port, ssl=for_client)
            assert await ask(known)
            [protocol] = server.protocols
            strangers = [await asyncio.open_connection("localhost", port, ssl=for_client) for _ in range(2)]
            for reader, writer in strangers:
                with contextlib.suppress(ConnectionError):
                    await reader.read()  # to the end
                writer.close()
            assert server.protocols == {protocol}
            assert await ask(known)
            known.close()
            await server.close()

    asyncio.run(hold_and_ask())
