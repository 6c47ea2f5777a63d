"""RAPL through perf's `power` events: the second route where powercap is missing or closed."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import struct
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from smaragdine.clock import SYSTEM, Clock
from smaragdine.sensors.base import Absent, Channel, Found, Scope
from smaragdine.sensors.processes import DescriptorSensor, OpenChannel

ROOT = Path("/sys/bus/event_source/devices")
CPU_ROOT = Path("/sys/devices/system/cpu")

_MOVES_WITHIN_S = 0.05  # even an idle package uses a thousand units of energy in that time
_SYSCALL_NUMBER: Mapping[str, int] = {"x86_64": 298, "aarch64": 241}
_CLOEXEC = 8  # PERF_FLAG_FD_CLOEXEC
_ATTR_BYTES = 64  # PERF_ATTR_SIZE_VER0, which every kernel takes

# event → device of socket N and its scope. perf's "gpu" is the PP1 plane, which powercap calls uncore.
_EVENTS: Mapping[str, tuple[str, Scope]] = {
    "energy-pkg": ("cpu:{}", "device"),
    "energy-cores": ("cpu:{}/core", "part"),
    "energy-gpu": ("cpu:{}/uncore", "part"),
    "energy-ram": ("dram:{}", "device"),
    "energy-psys": ("psys", "whole"),
}

_DENIED = (
    "run as root, or `sudo sysctl kernel.perf_event_paranoid=0` (for good: in "
    "/etc/sysctl.d), or give CAP_PERFMON (in Docker: --cap-add PERFMON)"
)
_NO_PMU = (
    "load the driver with `sudo modprobe rapl`; virtual machines and most ARM machines have none, and the "
    "CPU is estimated there"
)


@dataclass(frozen=True)
class PerfEvent:
    """One energy event of one socket, as perf_event_open wants it."""

    pmu_type: int
    config: int
    cpu: int
    joules_per_count: float


def open_sensors(
    *,
    root: Path = ROOT,
    cpu_root: Path = CPU_ROOT,
    period_ns: int = 4_000_000,
    clock: Clock = SYSTEM,
    have: Collection[str] = (),
) -> Found:
    """Every energy event of the `power` PMU, except for devices in `have` (measured already)."""
    found = Found()
    pmu = root / "power"
    try:
        pmu_type = int(_text(pmu / "type"))
        sockets = _socket_cpus(_text(pmu / "cpumask"), cpu_root)
    except FileNotFoundError:
        reason = f"{pmu} does not exist: perf has no power events here"
        found.absent.append(Absent("cpu:* energy", reason, _NO_PMU))
        return found
    except (OSError, ValueError) as error:
        found.absent.append(Absent("cpu:* energy", f"{pmu}: {error}", _NO_PMU))
        return found
    opened: list[OpenChannel] = []
    for name, (pattern, scope) in _EVENTS.items():
        if not (pmu / "events" / name).exists():
            continue
        # The platform has one counter, which every socket shows.
        for cpu, socket in sockets[:1] if scope == "whole" else sockets:
            device = pattern.format(socket)
            if device in have:
                continue
            try:
                event = _event(pmu, pmu_type, name, cpu)
                fd = perf_event_open(event)
            except ValueError as error:
                found.absent.append(Absent(f"{device} energy", f"{pmu}/events/{name}: {error}", _NO_PMU))
            except OSError as error:
                found.absent.append(_refused(f"{device} energy", name, error))
            else:
                channel = Channel(
                    device=device,
                    quantity="energy",
                    unit="J",
                    kind="counter",
                    provenance="measured",
                    period_ms=1.0,
                    sensor="perf",
                    scope=scope,
                    detail=f"perf power/{name}/ on CPU {cpu}",
                )
                opened.append(OpenChannel(channel, fd, 1.0 / event.joules_per_count))
    opened = _moving(opened, found.absent, clock)
    if opened:
        found.sensors.append(
            DescriptorSensor(opened, period_ns=period_ns, lane="counters", fetch=_fetch_count, clock=clock)
        )
        found.facts["perf"] = {"root": str(root), "events": [item.channel.detail for item in opened]}
    elif not found.absent and not have:
        found.absent.append(Absent("cpu:* energy", f"{pmu}/events lists no energy event", _NO_PMU))
    return found


def _moving(opened: list[OpenChannel], absent: list[Absent], clock: Clock) -> list[OpenChannel]:
    """The counters that count. A virtual machine may show events behind which there is nothing."""
    if not opened:
        return []
    clock.sleep_s(_MOVES_WITHIN_S)
    moving: list[OpenChannel] = []
    for item in opened:
        if _fetch_count(item.fd) > 0:
            moving.append(item)
            continue
        os.close(item.fd)
        reason = f"{item.channel.detail} can be opened but does not count"
        absent.append(
            Absent(item.channel.name, reason, "virtual machines show such counters; run on the host")
        )
    return moving


def perf_event_open(event: PerfEvent) -> int:
    """A descriptor that counts the event on its CPU, whoever runs there. Raises OSError."""
    number = _SYSCALL_NUMBER.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"the perf_event_open number of {platform.machine()} is not known")
    # type, size, config, then sample period and type, read format and flags: all off, counting at once.
    attr = struct.pack("=IIQ", event.pmu_type, _ATTR_BYTES, event.config).ljust(_ATTR_BYTES, b"\0")
    libc = ctypes.CDLL(None, use_errno=True)
    any_process, no_group = ctypes.c_int(-1), ctypes.c_int(-1)
    fd: int = libc.syscall(
        ctypes.c_long(number),
        ctypes.create_string_buffer(attr, _ATTR_BYTES),
        any_process,
        ctypes.c_int(event.cpu),
        no_group,
        ctypes.c_ulong(_CLOEXEC),
    )
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd


def _fetch_count(fd: int) -> int:
    return int.from_bytes(os.read(fd, 8), sys.byteorder)


def _event(pmu: Path, pmu_type: int, name: str, cpu: int) -> PerfEvent:
    text = _text(pmu / "events" / name)
    match = re.fullmatch(r"event=(0x[0-9a-fA-F]+|\d+)", text)
    if not match:
        raise ValueError(f"cannot read {text!r}")
    unit = _text(pmu / "events" / f"{name}.unit")
    if unit != "Joules":
        raise ValueError(f"its unit is {unit!r}, not Joules")
    scale = float(_text(pmu / "events" / f"{name}.scale"))
    if not scale > 0:
        raise ValueError(f"its scale is {scale}")
    return PerfEvent(pmu_type, int(match[1], 0), cpu, scale)


def _socket_cpus(cpumask: str, cpu_root: Path) -> list[tuple[int, int]]:
    """(cpu, socket) for each CPU that reads for its socket or die; dies of one socket share its number."""
    pairs: list[tuple[int, int]] = []
    for part in cpumask.split(","):
        first, _, last = part.partition("-")
        for cpu in range(int(first), int(last or first) + 1):
            try:
                socket = int(_text(cpu_root / f"cpu{cpu}" / "topology" / "physical_package_id"))
            except (OSError, ValueError):
                socket = len(pairs)
            pairs.append((cpu, max(socket, 0)))
    return pairs


def _refused(channel: str, event: str, error: OSError) -> Absent:
    if error.errno in (errno.EACCES, errno.EPERM):
        return Absent(
            channel, f"perf power/{event}/: permission denied (kernel.perf_event_paranoid)", _DENIED
        )
    return Absent(channel, f"perf power/{event}/: {error.strerror}", _NO_PMU)


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace").strip()
