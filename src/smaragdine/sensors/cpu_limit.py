"""The power limit of a socket: what powercap says is set, else the power the processor is rated for."""

from __future__ import annotations

import contextlib

from smaragdine.sensors.cpuinfo import read_cpuinfo
from smaragdine.sensors.descriptors import attribute_text
from smaragdine.sensors.discover import SensorSettings
from smaragdine.sensors.estimate import socket_model
from smaragdine.sensors.rapl import find_zones


def socket_limit_w(socket: int, settings: SensorSettings) -> float | None:
    """In W; None where there is no such socket."""
    with contextlib.suppress(OSError):
        for zone in find_zones(settings.powercap_root):
            limit_uw = attribute_text(zone.path / "constraint_0_power_limit_uw")
            if zone.name == f"package-{socket}" and limit_uw.isdigit() and int(limit_uw):
                return int(limit_uw) / 1e6
    cpus = read_cpuinfo(settings.proc_root)
    return socket_model(cpus, socket, settings.estimate).rated_w if socket in cpus.sockets else None
