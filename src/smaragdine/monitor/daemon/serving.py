"""The daemon at work: all its parts on one event loop, from the first reading to a tidy end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from smaragdine.errors import UserError
from smaragdine.monitor.daemon.core import Daemon, Knowledge
from smaragdine.monitor.daemon.fleet import FleetMetrics
from smaragdine.monitor.daemon.lending import Lending
from smaragdine.monitor.daemon.log import Log
from smaragdine.monitor.daemon.main import KEEPER, Prepared
from smaragdine.monitor.daemon.meter import Meter
from smaragdine.monitor.daemon.metrics_server import serve_metrics
from smaragdine.monitor.daemon.parent import Parent
from smaragdine.monitor.daemon.server import Server
from smaragdine.monitor.daemon.service import Service
from smaragdine.monitor.daemon.sessions import Table
from smaragdine.monitor.daemon.settings import Settings
from smaragdine.monitor.daemon.source import Source
from smaragdine.monitor.daemon.tokens import TokenFile
from smaragdine.monitor.daemon.unit import notify
from smaragdine.monitor.limits.control import Control
from smaragdine.monitor.limits.desk import Desk

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
    table = Table(settings.state, settings.bounds, say)
    knowledge = Knowledge(tuple(machine.absent), machine.facts)
    meter = Meter(source.channels, source.cpus, source.inside, source.gpu_sessions)
    daemon = Daemon(settings, knowledge, source, log, table, meter, say)
    desk = Desk(Control(lambda: parent.start(KEEPER), say=say), say=say)
    lending = Lending(desk, say)
    tokens = TokenFile(settings.tokens, say) if settings.tokens is not None else None
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
