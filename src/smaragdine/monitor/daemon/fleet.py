"""What the daemon knows, as fleet metrics want it."""

from __future__ import annotations

import time

from smaragdine.monitor.daemon.core import Daemon
from smaragdine.monitor.daemon.lending import Lending
from smaragdine.monitor.daemon.prometheus import DaemonHealth, DeviceEnergy, Fleet, SessionEnergy


class FleetMetrics:
    """Counts every second, scraped or not, so that a session between two scrapes is not lost."""

    def __init__(self, daemon: Daemon, lending: Lending) -> None:
        self._daemon = daemon
        self._lending = lending
        self._fleet = Fleet()

    def take_up(self) -> None:
        """Sessions of before a restart: what they had used has been counted."""
        self._fleet.take_up(time.monotonic(), self._sessions())

    def update(self) -> None:
        devices = [
            DeviceEnergy(device.device, device.provenance, device.energy_j, device.scope, device.power_w)
            for device in self._daemon.meter.devices()
        ]
        self._fleet.update(time.monotonic(), devices, self._sessions())

    def _sessions(self) -> list[SessionEnergy]:
        daemon = self._daemon
        return [
            SessionEnergy(
                session.id,
                session.job,
                session.user,
                session.slurm_job_id,
                daemon.exclusive_j(session),
                session.ended,
            )
            for session in daemon.table.sessions.values()
            if session.begin_ns
        ]

    def text(self) -> str:
        daemon = self._daemon
        channels = daemon.source.channels.items()
        return self._fleet.text(
            DaemonHealth(
                begin_s=daemon.begin_ns / 1e9,
                cpu_s=time.process_time(),
                memory_bytes=daemon.memory_bytes(),
                sensors_up={(c.device, c.quantity): number not in daemon.lost for number, c in channels},
                missed_readings=sum(lag.missed for lag in daemon.source.sampler.lag.values()),
                dropped_batches=daemon.dropped_batches,
                kept_batches=daemon.log.kept_batches,
                leases=self._lending.count,
            )
        )
