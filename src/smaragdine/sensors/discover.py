"""Look at the machine: which sensors work here, which channels are absent and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from smaragdine.clock import SYSTEM, Clock
from smaragdine.sensors import cpuinfo, estimate, hwmon, nvml, perf, plugin, rapl
from smaragdine.sensors.activity import Activity, open_activity
from smaragdine.sensors.base import Absent, Channel, Found, Sensor

COUNTER_PERIOD_NS = 4_000_000
ESTIMATE_SHARE_PERIOD_NS = 20_000_000

# Asked for channels that cannot be read here, given the devices that are measured already.
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
    """Everything found. `activity` is one of the sensors; it must be told which program to watch."""

    sensors: list[Sensor]
    absent: list[Absent]
    facts: dict[str, object]
    activity: Activity | None

    def channels(self) -> list[Channel]:
        return [channel for sensor in self.sensors for channel in sensor.channels()]


def discover(settings: SensorSettings, clock: Clock = SYSTEM, elsewhere: Elsewhere | None = None) -> Machine:
    cpus = cpuinfo.read_cpuinfo(settings.proc_root)
    # A tree made for its cpuinfo alone need not have the rest.
    stat_root = settings.proc_root if (settings.proc_root / "stat").exists() else Path("/proc")
    # The busy time that shares are taken of moves in ticks of 10 ms: half the counters' rate loses nothing.
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
        take(perf.open_sensors(root=settings.perf_root, period_ns=settings.period_ns, clock=clock, have=have))
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
        # Shares finer than the power they are of would be work for nothing.
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
    take(plugin.open_sensors())
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
    return cpuinfo.read_memory_bytes(settings.proc_root) or cpuinfo.read_memory_bytes()


def host_facts(settings: SensorSettings) -> dict[str, object]:
    """What a reader needs to know of the machine; no user names, no addresses."""
    cpus = cpuinfo.read_cpuinfo(settings.proc_root)
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
