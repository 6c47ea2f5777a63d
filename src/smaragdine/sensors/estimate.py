"""Estimates where no sensor is: CPU energy from utilisation and rated power, DRAM energy from its size.

    P = P_idle + (P_rated − P_idle) · u      u = Δbusy / (CPUs · Δt), between 0 and 1

They are always labelled as estimates, without an error bar. Defaults and their sources: docs/estimate.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from smaragdine.clock import SYSTEM, Clock
from smaragdine.errors import UserError
from smaragdine.sensors.base import Absent, Channel, Found, SensorLost
from smaragdine.sensors.cpu import CpuInfo, find_model, short_name

DEFAULT_CORE_W = 7.0
DEFAULT_IDLE_FRACTION = 0.2
DEFAULT_DRAM_W_PER_GIB = 0.375
PERIOD_NS = 100_000_000

_GIB = 1 << 30
# Two readings of the busy time are this far from the steady clock only if somebody set the wall clock.
_SET_CLOCK_NS = 1_000_000_000


class BusyTime(Protocol):
    """Knows how busy a socket was."""

    def busy_s(self, socket: int) -> tuple[int, float]:
        """When the total was last read (ns), and the running total of busy CPU-seconds."""
        ...


@dataclass(frozen=True)
class EstimateSettings:
    """What the user knows better than our tables. `cpu_rated_w` is per socket, as this machine sees it."""

    cpu_rated_w: float | None = None
    idle_fraction: float = DEFAULT_IDLE_FRACTION
    dram_w_per_gib: float = DEFAULT_DRAM_W_PER_GIB

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> EstimateSettings:
        """The variables that docs/estimate.md lists; a value that makes no sense is a UserError."""
        rated_w = _number(environment, "SMARAGDINE_CPU_RATED_W", "watts per socket, such as 150", 1e5)
        if rated_w == 0:
            raise UserError(
                "SMARAGDINE_CPU_RATED_W=0", "a CPU draws power", "Give watts per socket, such as 150."
            )
        idle = _number(
            environment, "SMARAGDINE_CPU_IDLE_FRACTION", "a share between 0 and 1, such as 0.2", 1.0
        )
        dram = _number(environment, "SMARAGDINE_DRAM_W_PER_GIB", "watts per GiB, such as 0.375", 1e3)
        return cls(
            cpu_rated_w=rated_w,
            idle_fraction=DEFAULT_IDLE_FRACTION if idle is None else idle,
            dram_w_per_gib=DEFAULT_DRAM_W_PER_GIB if dram is None else dram,
        )


@dataclass(frozen=True)
class SocketModel:
    """The straight line from utilisation to power of one socket, and where its numbers come from."""

    socket: int
    logical_cpus: int
    idle_w: float
    rated_w: float
    detail: str

    def energy_j(self, busy_s: float, elapsed_s: float) -> float:
        """Energy of `elapsed_s` seconds in which the socket's CPUs were busy for `busy_s` CPU-seconds."""
        utilisation = min(max(busy_s / (self.logical_cpus * elapsed_s), 0.0), 1.0)
        return (self.idle_w + (self.rated_w - self.idle_w) * utilisation) * elapsed_s


def open_sensors(
    *,
    activity: BusyTime,
    cpus: CpuInfo,
    memory_bytes: int,
    sockets_missing: Sequence[int],
    dram_missing: Sequence[int],
    settings: EstimateSettings | None = None,
    clock: Clock = SYSTEM,
) -> Found:
    """Estimates for the sockets and memories that nothing measures. `memory_bytes` is the whole machine's."""
    settings = settings or EstimateSettings()
    found = Found()
    models = [socket_model(cpus, socket, settings) for socket in sockets_missing if socket in cpus.sockets]
    for socket in sorted(set(sockets_missing) - set(cpus.sockets)):
        reason = f"/proc/cpuinfo shows no socket {socket}, so its busy time is not known"
        found.absent.append(
            Absent(f"cpu:{socket} energy", reason, "run on the host rather than in a container")
        )
    memories: dict[int, float] = {}
    if dram_missing and memory_bytes <= 0:
        reason = "/proc/meminfo does not say how much memory there is"
        found.absent.extend(
            Absent(f"dram:{socket} energy", reason, "mount /proc where this runs") for socket in dram_missing
        )
    elif dram_missing:
        share_gib = memory_bytes / _GIB / max(len(cpus.sockets), 1)
        memories = dict.fromkeys(dram_missing, share_gib)
    if models or memories:
        found.sensors.append(Estimate(activity, models, memories, settings, clock))
        found.facts["estimate"] = {
            **{
                f"cpu:{m.socket}": {"idle_w": m.idle_w, "rated_w": m.rated_w, "from": m.detail}
                for m in models
            },
            **{
                f"dram:{s}": {"gib": gib, "w_per_gib": settings.dram_w_per_gib} for s, gib in memories.items()
            },
        }
    return found


def socket_model(cpus: CpuInfo, socket: int, settings: EstimateSettings) -> SocketModel:
    """The rated power: from the user, else from the table of models, else per core."""
    cores = cpus.cores[socket]
    rated = find_model(cpus.model)
    if settings.cpu_rated_w is not None:
        rated_w = settings.cpu_rated_w
        source = f"{short_name(cpus.model)}: {rated_w:g} W from SMARAGDINE_CPU_RATED_W"
    elif rated is None:
        rated_w = cores * DEFAULT_CORE_W
        source = f"{short_name(cpus.model)} (unknown model): {cores} cores × {DEFAULT_CORE_W:g} W default"
    elif cores < rated.cores:
        # Do not charge a guest, a container or a machine with cores switched off for the whole socket.
        rated_w = rated.rated_w * cores / rated.cores
        source = f"{rated.name}: {rated.rated_w:g} W × {cores}/{rated.cores} cores"
    else:
        rated_w = rated.rated_w
        source = f"{rated.name}: {rated_w:g} W"
    return SocketModel(
        socket=socket,
        logical_cpus=len(cpus.sockets[socket]),
        idle_w=rated_w * settings.idle_fraction,
        rated_w=rated_w,
        detail=f"{source}, idle {settings.idle_fraction * 100:g} %",
    )


class Estimate:
    """Energy counters that start from 0 at the first read."""

    period_ns = PERIOD_NS
    lane = "counters"

    def __init__(
        self,
        activity: BusyTime,
        models: Sequence[SocketModel],
        memory_gib: Mapping[int, float],
        settings: EstimateSettings,
        clock: Clock,
    ) -> None:
        self._activity = activity
        self._clock = clock
        self._models = tuple(models)
        self._dram_w = tuple(gib * settings.dram_w_per_gib for gib in memory_gib.values())
        self._energy_j = [0.0] * len(self._models)
        self._last: list[tuple[int, int, float] | None] = [None] * len(self._models)  # wall, mono, busy
        self._start_mono_ns: int | None = None
        self._channels = (
            *(_channel(f"cpu:{model.socket}", model.detail) for model in self._models),
            *(
                _channel(
                    f"dram:{socket}", f"{gib:.1f} GiB × {settings.dram_w_per_gib:g} W/GiB, whatever it does"
                )
                for socket, gib in memory_gib.items()
            ),
        )

    def channels(self) -> Sequence[Channel]:
        return self._channels

    def read(self) -> Sequence[tuple[int, int, float]]:
        mono_ns = self._clock.mono_ns()
        readings: list[tuple[int, int, float]] = []
        for index, model in enumerate(self._models):
            t_ns, busy_s = self._activity.busy_s(model.socket)
            last = self._last[index]
            if last is not None:
                last_t_ns, last_mono_ns, last_busy_s = last
                if t_ns == last_t_ns:
                    continue  # nobody has looked since then
                elapsed_ns, steady_ns = t_ns - last_t_ns, mono_ns - last_mono_ns
                if abs(elapsed_ns - steady_ns) > _SET_CLOCK_NS:
                    elapsed_ns = steady_ns
                if elapsed_ns <= 0:
                    continue
                self._energy_j[index] += model.energy_j(busy_s - last_busy_s, elapsed_ns / 1e9)
            self._last[index] = (t_ns, mono_ns, busy_s)
            readings.append((t_ns, index, self._energy_j[index]))
        if self._dram_w:
            if self._start_mono_ns is None:
                self._start_mono_ns = mono_ns
            t_ns, elapsed_s = self._clock.wall_ns(), (mono_ns - self._start_mono_ns) / 1e9
            first = len(self._models)
            readings.extend((t_ns, first + i, power_w * elapsed_s) for i, power_w in enumerate(self._dram_w))
        return readings

    def close(self) -> Sequence[tuple[int, int, float]]:
        try:
            return self.read()
        except (SensorLost, OSError, ValueError):
            return ()


def _channel(device: str, detail: str) -> Channel:
    return Channel(
        device=device,
        quantity="energy",
        unit="J",
        kind="counter",
        provenance="estimated",
        period_ms=PERIOD_NS / 1e6,
        sensor="estimate",
        detail=detail,
    )


def _number(environment: Mapping[str, str], name: str, expected: str, highest: float) -> float | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= highest:
        raise UserError(f"{name}={text}", f"expected {expected}", "Correct it or unset it.")
    return value
