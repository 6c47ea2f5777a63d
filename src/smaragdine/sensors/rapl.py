"""RAPL: the processor's energy counters of packages, cores and memory, on Intel and AMD alike.

They are read through powercap, or through perf's `power` events where powercap is missing or closed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import struct
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from smaragdine.clock import SYSTEM, Clock
from smaragdine.sensors.base import Absent, Channel, Found, Scope
from smaragdine.sensors.processes import DescriptorSensor, OpenChannel, attribute_text, open_decimal

ROOT = Path("/sys/class/powercap")
UPDATE_MS = 1.0  # how often the hardware brings its energy register up to date

# control:zone[:subzone…]; control types and the links back (device, subsystem) have no colon.
_ZONE_ID = re.compile(r"(?P<control>[^:]+)(?::\d+)+")
PARTS_PERIOD_NS = 20_000_000
_PACKAGE = re.compile(r"package-(?P<socket>\d+)(?:-die-\d+)?")

_NO_POWERCAP = (
    "load the driver with `sudo modprobe intel_rapl_msr` (AMD too; older kernels: intel_rapl_common); "
    "virtual machines and most ARM machines have no RAPL, and the CPU is estimated there"
)
_MASKED = (
    "run on the host, or give the container the counters read-only: "
    "docker run -v /sys/devices/virtual/powercap:/host/powercap:ro "
    "-e SMARAGDINE_POWERCAP_ROOT=/host/powercap …, "
    "or the socket of the host's daemon: -v /run/smaragdine:/run/smaragdine"
)
_DENIED = (
    "let the daemon read them, which is then found by itself: sudo smaragdine daemon; "
    "or run as root; or let a group read the counters: "
    "sudo groupadd -f smaragdine && sudo usermod -aG smaragdine $USER && "
    """echo 'SUBSYSTEM=="powercap", ACTION=="add|change", KERNEL=="*:*", """
    """RUN+="/bin/chgrp smaragdine /sys%p/energy_uj", RUN+="/bin/chmod g+r /sys%p/energy_uj"' """
    "| sudo tee /etc/udev/rules.d/60-smaragdine.rules && sudo udevadm control --reload && "
    "sudo udevadm trigger --subsystem-match=powercap; then log in again"
)


@dataclass(frozen=True)
class Zone:
    """One powercap zone that counts energy."""

    id: str  # intel-rapl:0:1
    path: Path
    name: str  # package-0, core, dram, psys …
    parent: str  # the name of the zone it lies in, or ""

    @property
    def detail(self) -> str:
        return f"{self.id} {self.name}"


def open_sensors(*, root: Path = ROOT, period_ns: int = 4_000_000, clock: Clock = SYSTEM) -> Found:
    """Every readable zone under `root`: flat as in /sys/class, nested as in /sys/devices, or both."""
    found = Found()
    try:
        zones = find_zones(root)
    except OSError as error:
        found.absent.append(_no_zones(root, error))
        return found
    if not zones:
        found.absent.append(_no_zones(root, None))
        return found
    opened: list[OpenChannel] = []
    for zone in zones:
        channel = _channel(zone)
        try:
            path = zone.path / "energy_uj"
            opened.append(OpenChannel(channel, open_decimal(path), 1e6, path))
        except OSError as error:
            found.absent.append(_unreadable(channel, error))
    # Parts of a package are never added up. They are only there to look at, and looking costs.
    whole = [item for item in opened if item.channel.scope != "part"]
    parts = [item for item in opened if item.channel.scope == "part"]
    for members, every_ns in ((whole, period_ns), (parts, max(period_ns, PARTS_PERIOD_NS))):
        if members:
            found.sensors.append(DescriptorSensor(members, period_ns=every_ns, lane="counters", clock=clock))
    if opened:
        found.facts["rapl"] = {"root": str(root), "zones": [item.channel.detail for item in opened]}
    return found


def find_zones(root: Path) -> list[Zone]:
    """Each zone once, in natural order. A memory-mapped zone is left out where its twin is there."""
    paths: dict[str, Path] = {}
    for path in _walk(root):
        paths.setdefault(path.name, path)
    names = {zone_id: attribute_text(path / "name") or zone_id for zone_id, path in paths.items()}
    zones = [
        Zone(zone_id, path, names[zone_id], names.get(zone_id.rpartition(":")[0], ""))
        for zone_id, path in sorted(paths.items(), key=lambda item: _natural(item[0]))
        if _counts_energy(path)
    ]
    direct = {(zone.parent, zone.name) for zone in zones if not _is_mmio(zone)}
    return [zone for zone in zones if not (_is_mmio(zone) and (zone.parent, zone.name) in direct)]


def _counts_energy(zone: Path) -> bool:
    try:
        return (zone / "energy_uj").exists()
    except OSError:
        return True  # we may not look: reported as unreadable, not left out


def _walk(folder: Path) -> Iterator[Path]:
    """The zone folders below a root. Only names of zones and control types count: no link leads back."""
    for entry in sorted(folder.iterdir()):
        if not entry.is_dir():
            continue
        if _ZONE_ID.fullmatch(entry.name):
            yield from _walk_zone(entry)
        elif entry.name not in ("subsystem", "device", "power"):
            for child in sorted(entry.iterdir()):
                if child.name.startswith(f"{entry.name}:") and child.is_dir():
                    yield from _walk_zone(child)


def _walk_zone(zone: Path) -> Iterator[Path]:
    yield zone
    try:
        children = sorted(zone.iterdir())
    except OSError:
        return  # the zone itself will be reported as unreadable; the others stand
    for child in children:
        if child.name.startswith(f"{zone.name}:") and child.is_dir():
            yield from _walk_zone(child)


def _channel(zone: Zone) -> Channel:
    device, scope = _meaning(zone)
    range_uj = attribute_text(zone.path / "max_energy_range_uj")
    # The register holds 32 bits of the energy unit. The range is its highest value, so the true modulus is
    # one unit (15–61 µJ) more. The kernel does not tell the unit. Per wrap of 65–262 kJ that is 2e-10.
    wraps_at_j = int(range_uj) / 1e6 if range_uj.isdigit() and int(range_uj) > 0 else None
    return Channel(
        device=device,
        quantity="energy",
        unit="J",
        kind="counter",
        provenance="measured",
        period_ms=UPDATE_MS,
        sensor="rapl",
        scope=scope,
        wraps_at=wraps_at_j,
        detail=zone.detail,
    )


def _meaning(zone: Zone) -> tuple[str, Scope]:
    package = _PACKAGE.fullmatch(zone.name)
    if package:
        return f"cpu:{package['socket']}", "device"
    if zone.name == "psys":
        return "psys", "whole"
    parent = _PACKAGE.fullmatch(zone.parent)
    if parent and zone.name in ("core", "uncore"):
        return f"cpu:{parent['socket']}/{zone.name}", "part"
    if parent and zone.name == "dram":
        return f"dram:{parent['socket']}", "device"
    return f"powercap:{zone.name}", "whole"


def _no_zones(root: Path, error: OSError | None) -> Absent:
    channel = "cpu:* energy"
    if isinstance(error, FileNotFoundError):
        return Absent(channel, f"{root} does not exist: this kernel shows no powercap", _NO_POWERCAP)
    if isinstance(error, PermissionError):
        return Absent(channel, f"{error.filename}: permission denied", _DENIED)
    if error is not None:
        return Absent(channel, f"{error.filename or root}: {error.strerror}", _NO_POWERCAP)
    # Docker and Podman lay an empty folder over the zones and leave the links to them.
    if any(entry.is_symlink() and not entry.exists() for entry in root.iterdir()):
        return Absent(channel, f"the links in {root} lead nowhere: a container hides the counters", _MASKED)
    if root.resolve() == Path("/sys/devices/virtual/powercap") and ROOT.is_dir():
        return Absent(channel, f"{root} is empty: a container hides the counters", _MASKED)
    return Absent(channel, f"{root} holds no energy counter: no RAPL driver is loaded", _NO_POWERCAP)


def _unreadable(channel: Channel, error: OSError) -> Absent:
    if error.errno in (errno.EACCES, errno.EPERM):
        reason = f"{error.filename}: permission denied (root only, since CVE-2020-8694)"
        return Absent(channel.name, reason, _DENIED)
    reason = f"{error.filename}: {error.strerror}"
    remedy = _REMEDIES.get(error.errno or 0, "see `dmesg` for the powercap driver's own message")
    return Absent(channel.name, reason, remedy)


_REMEDIES: Mapping[int, str] = {
    errno.ENODEV: "the zone went away: load the RAPL driver again with `sudo modprobe intel_rapl_msr`",
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
}


def _is_mmio(zone: Zone) -> bool:
    return zone.id.partition(":")[0].endswith("-mmio")


def _natural(zone_id: str) -> tuple[str, list[int]]:
    control, *numbers = zone_id.split(":")
    return control, [int(number) for number in numbers]


# The second route: perf's `power` events.

PERF_ROOT = Path("/sys/bus/event_source/devices")
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

_PERF_DENIED = (
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


def open_perf_sensors(
    *,
    root: Path = PERF_ROOT,
    cpu_root: Path = CPU_ROOT,
    period_ns: int = 4_000_000,
    clock: Clock = SYSTEM,
    have: Collection[str] = (),
) -> Found:
    """Every energy event of the `power` PMU, except for devices in `have` (measured already)."""
    found = Found()
    pmu = root / "power"
    try:
        pmu_type = int(_attribute(pmu / "type"))
        sockets = _socket_cpus(_attribute(pmu / "cpumask"), cpu_root)
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
    """Keep the counters that count. A virtual machine may show events with nothing behind them."""
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
    text = _attribute(pmu / "events" / name)
    match = re.fullmatch(r"event=(0x[0-9a-fA-F]+|\d+)", text)
    if not match:
        raise ValueError(f"cannot read {text!r}")
    unit = _attribute(pmu / "events" / f"{name}.unit")
    if unit != "Joules":
        raise ValueError(f"its unit is {unit!r}, not Joules")
    scale = float(_attribute(pmu / "events" / f"{name}.scale"))
    if not scale > 0:
        raise ValueError(f"its scale is {scale}")
    return PerfEvent(pmu_type, int(match[1], 0), cpu, scale)


def _socket_cpus(cpumask: str, cpu_root: Path) -> list[tuple[int, int]]:
    """(cpu, socket) for each CPU that reads for its socket or die. Dies of one socket have one number."""
    pairs: list[tuple[int, int]] = []
    for part in cpumask.split(","):
        first, _, last = part.partition("-")
        for cpu in range(int(first), int(last or first) + 1):
            try:
                socket = int(_attribute(cpu_root / f"cpu{cpu}" / "topology" / "physical_package_id"))
            except (OSError, ValueError):
                socket = len(pairs)
            pairs.append((cpu, max(socket, 0)))
    return pairs


def _refused(channel: str, event: str, error: OSError) -> Absent:
    if error.errno in (errno.EACCES, errno.EPERM):
        return Absent(
            channel, f"perf power/{event}/: permission denied (kernel.perf_event_paranoid)", _PERF_DENIED
        )
    return Absent(channel, f"perf power/{event}/: {error.strerror}", _NO_PMU)


def _attribute(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace").strip()
