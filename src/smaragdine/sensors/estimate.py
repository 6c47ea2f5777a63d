"""Estimates where no sensor is: CPU energy from utilisation and rated power, DRAM energy from its size.

    P = P_idle + (P_rated − P_idle) · u      u = Δbusy / (CPUs · Δt), between 0 and 1

They are always labelled as estimates, without an error bar. Defaults and their sources: docs/estimate.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from smaragdine.clock import SYSTEM, Clock
from smaragdine.errors import UserError
from smaragdine.sensors.base import Absent, Channel, Found, SensorLost
from smaragdine.sensors.cpu import CpuInfo

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


# Rated power and cores of common processors, as their makers publish them. Intel: TDP, or since the 12th
# generation the processor base power. AMD: default TDP. We leave out models whose rating is a range, or that
# exist for one cloud only: no entry is better than a guess.

# A name as in /proc/cpuinfo, with {} for each of the models that follow as model=watts/cores.
_TABLE: Mapping[str, str] = {
    "EPYC {}": """
        7251=120/8 7451=180/24 7551=180/32 7601=180/32
        7252=120/8 7262=155/8 7272=120/12 7282=120/16 7302=155/16 7302P=155/16 7352=155/24 7402=180/24
        7402P=180/24 7452=155/32 7502=180/32 7502P=180/32 7532=200/32 7542=225/32 7552=200/48 7642=225/48
        7662=225/64 7702=200/64 7702P=200/64 7742=225/64 7H12=280/64 7F32=180/8 7F52=240/16 7F72=240/24
        7313=155/16 7313P=155/16 7343=190/16 7413=180/24 7443=200/24 7443P=200/24 7453=225/28 7513=200/32
        7543=225/32 7543P=225/32 7643=225/48 7663=240/56 7713=225/64 7713P=225/64 7763=280/64
        72F3=180/8 73F3=240/16 74F3=240/24 75F3=280/32 7373X=240/16 7473X=240/24 7573X=280/32 7773X=280/64
        9124=200/16 9174F=320/16 9224=200/24 9254=200/24 9274F=320/24 9334=210/32 9354=280/32 9354P=280/32
        9374F=320/32 9454=290/48 9454P=290/48 9474F=360/48 9534=280/64 9554=360/64 9554P=360/64 9634=290/84
        9654=360/96 9654P=360/96 9184X=320/16 9384X=320/32 9684X=400/96 9734=340/112 9754=360/128
        9355=280/32 9455=300/48 9535=300/64 9555=360/64 9575F=400/64 9565=400/72 9645=320/96 9655=400/96
        9745=400/128 9755=500/128 9825=390/144 9845=390/160 9965=500/192""",
    "E5-{} 0": "2650=95/8 2660=95/8 2670=115/8 2680=130/8 2690=135/8",
    "E5-{} v2": """
        2620=80/6 2630=80/6 2640=95/8 2650=95/8 2660=95/10 2670=115/10 2680=115/10 2690=130/10 2695=115/12
        2697=130/12""",
    "E5-{} v3": """
        2620=85/6 2630=85/8 2640=90/8 2650=105/10 2660=105/10 2670=120/12 2680=120/12 2683=120/14 2690=135/12
        2695=120/14 2697=145/14 2698=135/16 2699=145/18""",
    "E5-{} v4": """
        2620=85/8 2630=85/10 2640=90/10 2650=105/12 2660=105/14 2680=120/14 2683=120/16 2690=135/14
        2695=120/18 2697=145/18 2698=135/20 2699=145/22""",
    "Xeon Silver {}": """
        4108=85/8 4110=85/8 4114=85/10 4116=85/12 4208=85/8 4210=85/10 4210R=100/10 4214=85/12 4214R=100/12
        4216=100/16 4309Y=105/8 4310=120/12 4314=135/16 4316=150/20 4410Y=150/12 4416+=165/20""",
    "Xeon Gold {}": """
        5118=105/12 5120=105/14 6126=125/12 6130=125/16 6132=140/14 6134=130/8 6136=150/12 6138=125/20
        6140=140/18 6142=150/16 6148=150/20 6150=165/18 6152=140/22 6154=200/18
        5215=85/10 5217=115/8 5218=125/16 5218R=125/20 5220=125/18 5220R=150/24 6226=125/12 6226R=150/16
        6230=125/20 6230R=150/26 6240=150/18 6240R=165/24 6242=150/16 6242R=205/20 6246R=205/16 6248=150/20
        6248R=205/24 6252=150/24 6254=200/18 6258R=205/28
        5317=150/12 5318Y=165/24 5320=185/26 6326=185/16 6330=205/28 6336Y=185/24 6338=205/32 6342=230/24
        6346=205/16 6348=235/28 6354=205/18
        5418Y=185/24 6426Y=185/16 6430=270/32 6438Y+=205/32 6442Y=225/24 6444Y=270/16 6448Y=225/32
        6454S=270/32 6530=270/32 6538Y+=225/32 6542Y=250/24 6548Y+=250/32""",
    "Xeon Platinum {}": """
        8160=150/24 8164=150/26 8168=205/24 8170=165/26 8176=165/28 8180=205/28
        8260=165/24 8268=205/24 8270=205/26 8276=165/28 8280=205/28
        8352Y=205/32 8358=250/32 8360Y=250/36 8362=265/32 8368=270/38 8380=270/40
        8452Y=300/36 8458P=350/44 8460Y+=300/40 8462Y+=300/32 8468=350/48 8470=350/52 8480+=350/56
        8490H=350/60 8558=330/48 8562Y+=300/32 8568Y+=350/48 8580=350/60 8592+=350/64""",
    "Xeon {}": "6952P=400/96 6960P=500/72 6972P=500/96 6979P=500/120 6980P=500/128",
    "Xeon W-{}": """
        2123=120/4 2133=140/6 2145=140/8 2155=140/10 2175=140/14 2195=140/18 2245=155/8 2255=165/10
        2265=165/12 2275=165/14 2295=165/18 3175X=255/28 3275=205/28""",
    "Xeon {}X": "w5-3435=270/16 w7-2495=225/24 w7-3465=300/28 w9-3495=350/56",
    "Core {}": """
        i7-4770=84/4 i7-4770K=84/4 i7-4790=84/4 i7-4790K=88/4 i5-6500=65/4 i5-6600K=91/4 i7-6700=65/4
        i7-6700K=91/4 i5-7500=65/4 i5-7600K=91/4 i7-7700=65/4 i7-7700K=91/4 i5-8400=65/6 i5-8600K=95/6
        i7-8700=65/6 i7-8700K=95/6 i5-9400F=65/6 i5-9600K=95/6 i7-9700=65/8 i7-9700K=95/8 i9-9900=65/8
        i9-9900K=95/8 i9-9900KF=95/8 i9-9900KS=127/8
        i5-10400=65/6 i5-10600K=125/6 i7-10700=65/8 i7-10700K=125/8 i9-10900=65/10 i9-10900K=125/10
        i5-11400=65/6 i5-11600K=125/6 i7-11700=65/8 i7-11700K=125/8 i9-11900K=125/8
        i5-12400=65/6 i5-12400F=65/6 i5-12600K=125/10 i7-12700=65/12 i7-12700K=125/12 i7-12700KF=125/12
        i9-12900=65/16 i9-12900K=125/16 i9-12900KF=125/16 i9-12900KS=150/16
        i5-13600K=125/14 i5-13600KF=125/14 i7-13700=65/16 i7-13700K=125/16 i7-13700KF=125/16 i9-13900=65/24
        i9-13900K=125/24 i9-13900KF=125/24 i9-13900KS=150/24
        i5-14600K=125/14 i7-14700=65/20 i7-14700K=125/20 i7-14700KF=125/20 i9-14900K=125/24
        i9-14900KF=125/24 i9-14900KS=150/24
        i7-5820K=140/6 i7-5930K=140/6 i7-5960X=140/8 i7-6800K=140/6 i7-6850K=140/6 i7-6900K=140/8
        i7-6950X=140/10 i7-7820X=140/8 i9-7900X=140/10 i9-7920X=140/12 i9-7940X=165/14 i9-7960X=165/16
        i9-7980XE=165/18 i9-9820X=165/10 i9-9980XE=165/18 i9-10900X=165/10 i9-10920X=165/12 i9-10940X=165/14
        i9-10980XE=165/18
        i5-8250U=15/4 i7-8550U=15/4 i5-8265U=15/4 i7-8565U=15/4 i7-10510U=15/4 i7-8750H=45/6 i7-9750H=45/6
        i9-9880H=45/8 i7-10750H=45/6 i7-10875H=45/8 i7-11800H=45/8 i7-12700H=45/14 i9-12900H=45/14
        i7-13700H=45/14 i7-1260P=28/12 i7-1280P=28/14 i7-1360P=28/12 i7-1370P=28/14 i7-13700HX=55/16
        i9-13900HX=55/24 i9-13980HX=55/24 i7-14700HX=55/20 i9-14900HX=55/24""",
    "Core Ultra 5 {}": "245K=125/14",
    "Core Ultra 7 {}": "155H=28/16 265K=125/20",
    "Core Ultra 9 {}": "185H=45/16 285K=125/24",
    "Ryzen 5 {}": """
        1600=65/6 1600X=95/6 2600=65/6 2600X=95/6 3600=65/6 3600X=95/6 5600=65/6 5600G=65/6 5600X=65/6
        7600=65/6 7600X=105/6 9600X=65/6""",
    "Ryzen 7 {}": """
        1700=65/8 1700X=95/8 1800X=95/8 2700=65/8 2700X=105/8 3700X=65/8 3800X=105/8 5700G=65/8 5700X=65/8
        5800X=105/8 5800X3D=105/8 7700=65/8 7700X=105/8 7800X3D=120/8 9700X=65/8 9800X3D=120/8
        4700U=15/8 4800H=45/8 5800H=45/8 5800U=15/8""",
    "Ryzen 9 {}": """
        3900X=105/12 3950X=105/16 5900X=105/12 5950X=105/16 7900=65/12 7900X=170/12 7900X3D=120/12
        7950X=170/16 7950X3D=120/16 9900X=120/12 9900X3D=120/12 9950X=170/16 9950X3D=170/16 5900HX=45/8""",
    "Threadripper {}": """
        1920X=180/12 1950X=180/16 2920X=180/12 2950X=180/16 2970WX=250/24 2990WX=250/32 3960X=280/24
        3970X=280/32 3990X=280/64 7960X=350/24 7970X=350/32 7980X=350/64""",
    "Threadripper PRO {}": """
        3955WX=280/16 3975WX=280/32 3995WX=280/64 5955WX=280/16 5965WX=280/24 5975WX=280/32 5995WX=280/64
        7965WX=350/24 7975WX=350/32 7985WX=350/64 7995WX=350/96""",
}


@dataclass(frozen=True)
class RatedCpu:
    """What the maker says of one model."""

    name: str
    rated_w: float
    cores: int


def find_model(model_name: str) -> RatedCpu | None:
    """The table's entry for a model name of /proc/cpuinfo, or None."""
    words = _words(model_name)
    # Take the longest name that fits: "Xeon {}" must not answer for "Xeon Gold {}".
    for length in range(min(len(words), 5), 0, -1):
        for start in range(len(words) - length + 1):
            rated = rated_cpus().get(" ".join(words[start : start + length]).lower())
            if rated is not None:
                return rated
    return None


@cache
def rated_cpus() -> Mapping[str, RatedCpu]:
    """Every model of the table, by its name in lower case."""
    models: dict[str, RatedCpu] = {}
    for pattern, entries in _TABLE.items():
        for entry in entries.split():
            model, rating = entry.split("=")
            rated_w, cores = rating.split("/")
            name = pattern.format(model)
            models[name.lower()] = RatedCpu(name, float(rated_w), int(cores))
    return models


def short_name(model_name: str) -> str:
    """The model name without marks, clock and the word CPU."""
    return " ".join(_words(model_name))


def _words(model_name: str) -> list[str]:
    plain = re.sub(r"\((?:R|TM)\)|@.*$", " ", model_name, flags=re.IGNORECASE)
    return [word for word in plain.split() if word.lower() not in ("cpu", "processor")]
