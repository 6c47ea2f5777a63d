"""The daemon at work: all its parts on one event loop, from the first reading to a tidy end."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smaragdine.daemon.callers import CredentialFile, Rights
from smaragdine.daemon.core import Daemon, Knowledge
from smaragdine.daemon.lending import Desk, Lending
from smaragdine.daemon.log import Log
from smaragdine.daemon.metrics import FleetMetrics, serve_metrics
from smaragdine.daemon.parent import KEEPER, Parent
from smaragdine.daemon.running_energy import RunningEnergy
from smaragdine.daemon.server import Server
from smaragdine.daemon.service import Service
from smaragdine.daemon.sessions import SessionTable
from smaragdine.daemon.settings import Settings
from smaragdine.daemon.source import Source
from smaragdine.daemon.unit import notify
from smaragdine.errors import UserError
from smaragdine.limits.control import Control

if TYPE_CHECKING:
    from smaragdine.sensors.discover import Machine, SensorSettings


@dataclass(frozen=True)
class Prepared:
    """What only root could open."""

    rights: Rights
    sensor_settings: SensorSettings
    machine: Machine
    unix: socket.socket
    tcp: socket.socket | None
    tls: ssl.SSLContext | None


_READERS_END_S = 0.3
_LEASES_END_S = 0.3


async def serve(settings: Settings, prepared: Prepared, parent: Parent, say: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    loop.set_exception_handler(lambda _, context: say(str(context.get("exception") or context["message"])))

    machine = prepared.machine
    log = Log(settings.state, settings.memory_bytes, settings.spool_bytes)
    source = Source(
        machine,
        prepared.sensor_settings,
        folder=settings.state,
        next_channel=log.next_channel,
        open_file=parent.open_file,
    )
    table = SessionTable(settings.state, settings.bounds, say)
    knowledge = Knowledge(tuple(machine.absent), machine.facts)
    meter = RunningEnergy(source.channels, source.cpus, source.inside, source.gpu_sessions)
    daemon = Daemon(settings, knowledge, source, log, table, meter, say)
    desk = Desk(Control(lambda: parent.start(KEEPER), say=say), say=say)
    lending = Lending(desk, say)
    tokens = CredentialFile(settings.tokens, say) if settings.tokens is not None else None
    service = Service(daemon, lending, tokens)
    server = Server(service.methods, prepared.rights, settings.bounds, say)

    daemon.begin()
    keeping = loop.create_task(desk.keep())
    metrics = None
    if settings.prometheus is not None:
        fleet = FleetMetrics(daemon, lending)
        fleet.take_up()
        daemon.every_second.append(fleet.update)
        try:
            metrics = await serve_metrics(*settings.prometheus, fleet.text)
        except OSError as error:
            host, port = settings.prometheus
            raise UserError(f"no metrics at {host}:{port}", error.strerror or str(error)) from None
    server.serve(prepared.unix)
    if prepared.tcp is not None and prepared.tls is not None:
        server.serve(prepared.tcp, prepared.tls)
    say(
        f"serves {settings.socket}"
        + (f" and {':'.join(map(str, settings.listen))}" if settings.listen else "")
    )
    notify("READY=1")

    await stop.wait()
    notify("STOPPING=1")
    say("is ending")
    server.stop_accepting()
    if metrics is not None:
        metrics.close()
    keeping.cancel()
    await daemon.end()
    # Readers get what is left and hear that we stop.
    deadline_s = loop.time() + _READERS_END_S
    while daemon.readers and loop.time() < deadline_s:
        await asyncio.sleep(0.01)
    await desk.close(_LEASES_END_S)
    await server.close()
    log.close()
