"""Looks at the machine: which sensors work here, and which channels are absent and why."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

from smaragdine.clock import SYSTEM, Clock
from smaragdine.sensors import cpu, estimate, hwmon, rapl
from smaragdine.sensors.base import Absent, Channel, Found, Sensor, checked
from smaragdine.sensors.cpu import Activity, open_activity, read_cpuinfo
from smaragdine.sensors.estimate import socket_model
from smaragdine.sensors.nvml import discover as nvml
from smaragdine.sensors.processes import attribute_text
from smaragdine.sensors.rapl import find_zones

# Third-party sensors, with checks: one that goes wrong ends alone, and writes to no channel but its own.

PLUGIN_GROUP = "smaragdine.sensors"


def open_sensors() -> Found:
    """Open the sensors of every installed package: each names a function without arguments that returns
    `Found`. A broken one is absent."""
    found = Found()
    for entry in entry_points(group=PLUGIN_GROUP):
        try:
            plugin: Found = entry.load()()
            sensors = [PluginSensor(sensor) for sensor in plugin.sensors]
        except Exception as error:
            reason = f"the plug-in {entry.value} failed: {type(error).__name__}: {error}"
            found.absent.append(Absent(f"{entry.name} (plug-in)", reason, "update or uninstall that package"))
            continue
        found.sensors.extend(sensors)
        found.absent.extend(plugin.absent)
        found.facts.update(plugin.facts)
    return found


class PluginSensor:
    """Somebody else's sensor. `read` raises where readings are not proper: whoever reads counts failures."""

    def __init__(self, sensor: Sensor) -> None:
        self._sensor = sensor
        self._channels = tuple(checked(channel) for channel in sensor.channels())
        self.period_ns = sensor.period_ns
        self.lane = sensor.lane
        self._failed: dict[str, str] = {}

    @property
    def ended(self) -> Mapping[str, str]:
        return {**getattr(self._sensor, "ended", {}), **self._failed}

    def channels(self) -> Sequence[Channel]:
        return self._channels

    def read(self) -> Sequence[tuple[int, int, float]]:
        return self._checked(self._sensor.read())

    def close(self) -> Sequence[tuple[int, int, float]]:
        try:
            return self._checked(self._sensor.close())
        except Exception as error:
            self._failed = {channel.name: f"{type(error).__name__}: {error}" for channel in self._channels}
            return ()

    def _checked(self, readings: Iterable[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
        checked = [(int(t_ns), int(channel), float(value)) for t_ns, channel, value in readings]
        for t_ns, channel, _ in checked:
            if not 0 <= channel < len(self._channels):
                raise ValueError(f"a reading of channel {channel}, of {len(self._channels)}")
            if not 0 <= t_ns < 1 << 62:
                raise ValueError(f"a reading at {t_ns}, which is no time in nanoseconds since 1970")
        return checked


COUNTER_PERIOD_NS = 4_000_000
ESTIMATE_SHARE_PERIOD_NS = 20_000_000

# Is asked for channels that cannot be read here, and told which devices are measured already.
Elsewhere = Callable[[Collection[str]], Found]
_ENERGY_OF = ("cpu:", "dram:", "psys ", "powercap:", "hwmon")


@dataclass(frozen=True)
class SensorSettings:
    """Where to look and how often. Everything has a default; tests and containers name other trees."""

    powercap_root: Path = Path("/sys/class/powercap")
    proc_root: Path = Path("/proc")
    hwmon_root: Path = Path("/sys/class/hwmon")
    perf_root: Path = Path("/sys/bus/event_source/devices")
    period_ns: int = COUNTER_PERIOD_NS
    pcie: bool = False
    cuda_visible: str | None = None
    cuda_order: str | None = None
    estimate: estimate.EstimateSettings = field(default_factory=estimate.EstimateSettings)


def settings_from_environment(
    environment: Mapping[str, str], period_ns: int = COUNTER_PERIOD_NS, pcie: bool = False
) -> SensorSettings:
    default = SensorSettings()
    return SensorSettings(
        powercap_root=Path(environment.get("SMARAGDINE_POWERCAP_ROOT", default.powercap_root)),
        proc_root=Path(environment.get("SMARAGDINE_PROC_ROOT", default.proc_root)),
        hwmon_root=Path(environment.get("SMARAGDINE_HWMON_ROOT", default.hwmon_root)),
        perf_root=Path(environment.get("SMARAGDINE_PERF_ROOT", default.perf_root)),
        period_ns=period_ns,
        pcie=pcie,
        cuda_visible=environment.get("CUDA_VISIBLE_DEVICES"),
        cuda_order=environment.get("CUDA_DEVICE_ORDER"),
        estimate=estimate.EstimateSettings.from_environment(environment),
    )


@dataclass(frozen=True)
class Machine:
    """Everything we found. `activity` is one of the sensors; tell it which program to watch."""

    sensors: list[Sensor]
    absent: list[Absent]
    facts: dict[str, object]
    activity: Activity | None

    def channels(self) -> list[Channel]:
        return [channel for sensor in self.sensors for channel in sensor.channels()]


def discover(settings: SensorSettings, clock: Clock = SYSTEM, elsewhere: Elsewhere | None = None) -> Machine:
    cpus = cpu.read_cpuinfo(settings.proc_root)
    # A tree that is made for its cpuinfo alone need not have the rest.
    stat_root = settings.proc_root if (settings.proc_root / "stat").exists() else Path("/proc")
    # The busy time, which shares are of, moves in ticks of 10 ms: half the counters' rate loses nothing.
    activity, absent = open_activity(cpus, stat_root, 2 * settings.period_ns, clock)
    sensors: list[Sensor] = [activity] if activity is not None else []
    facts: dict[str, object] = {}

    def take(found: Found) -> None:
        sensors.extend(found.sensors)
        absent.extend(found.absent)
        facts.update(found.facts)

    take(rapl.open_sensors(root=settings.powercap_root, period_ns=settings.period_ns, clock=clock))
    if not any(device.startswith("cpu:") for device in _measured(sensors)):
        have = _measured(sensors)
        take(
            rapl.open_perf_sensors(
                root=settings.perf_root, period_ns=settings.period_ns, clock=clock, have=have
            )
        )
    found_hwmon = hwmon.open_sensors(root=settings.hwmon_root, clock=clock)
    gaps = [*absent, *found_hwmon.absent]
    if elsewhere is not None and any(gap.channel.startswith(_ENERGY_OF) for gap in gaps):
        found = elsewhere(_measured([*sensors, *found_hwmon.sensors]))
        names = {channel.name for sensor in found.sensors for channel in sensor.channels()}
        if any(name.startswith("cpu:") for name in names):
            names.add("cpu:* energy")
        for gaps in (absent, found_hwmon.absent):
            gaps[:] = [gap for gap in gaps if gap.channel not in names]
        take(found)
    measured = _measured(sensors)
    if activity is not None and not _finer_than_estimates(sensors):
        # Shares that are finer than their power would be wasted work.
        activity.period_ns = max(activity.period_ns, ESTIMATE_SHARE_PERIOD_NS)
    if activity is not None:
        take(
            estimate.open_sensors(
                activity=activity,
                cpus=cpus,
                memory_bytes=_memory_bytes(settings),
                sockets_missing=[s for s in sorted(cpus.sockets) if f"cpu:{s}" not in measured],
                dram_missing=[s for s in sorted(cpus.sockets) if f"dram:{s}" not in measured],
                settings=settings.estimate,
                clock=clock,
            )
        )
    take(found_hwmon)
    take(
        nvml.open_sensors(
            visible=settings.cuda_visible, device_order=settings.cuda_order, pcie=settings.pcie, clock=clock
        )
    )
    take(open_sensors())
    return Machine(sensors, absent, facts, activity)


def _measured(sensors: Iterable[Sensor]) -> set[str]:
    """Devices whose energy or power some sensor reads."""
    return {c.device for sensor in sensors for c in sensor.channels() if c.quantity in ("energy", "power")}


def _finer_than_estimates(sensors: Iterable[Sensor]) -> bool:
    return any(
        channel.quantity in ("energy", "power") and channel.period_ms * 1e6 < ESTIMATE_SHARE_PERIOD_NS
        for sensor in sensors
        for channel in sensor.channels()
    )


def _memory_bytes(settings: SensorSettings) -> int:
    return cpu.read_memory_bytes(settings.proc_root) or cpu.read_memory_bytes()


def host_facts(settings: SensorSettings) -> dict[str, object]:
    """What a reader needs to know of the machine; no user names, no addresses."""
    cpus = cpu.read_cpuinfo(settings.proc_root)
    system = os.uname()
    return {
        "hostname": system.nodename,
        "kernel": f"{system.sysname} {system.release} {system.machine}",
        "cpu": cpus.model,
        "sockets": {
            f"cpu:{socket}": {"logical_cpus": len(members), "cores": cpus.cores[socket]}
            for socket, members in sorted(cpus.sockets.items())
        },
        "memory_bytes": _memory_bytes(settings),
    }


# A socket's power limit: what is set through powercap, else what the processor is rated for.


def socket_limit_w(socket: int, settings: SensorSettings) -> float | None:
    """In W; None where there is no such socket."""
    with contextlib.suppress(OSError):
        for zone in find_zones(settings.powercap_root):
            limit_uw = attribute_text(zone.path / "constraint_0_power_limit_uw")
            if zone.name == f"package-{socket}" and limit_uw.isdigit() and int(limit_uw):
                return int(limit_uw) / 1e6
    cpus = read_cpuinfo(settings.proc_root)
    return socket_model(cpus, socket, settings.estimate).rated_w if socket in cpus.sockets else None
