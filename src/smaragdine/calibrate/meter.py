"""Reads one GPU's energy counter, clock, throttling and temperature while something else keeps the card busy.

The counter steps every 20 to 100 ms and says nothing in between: energy is taken between two of its steps, at
the times they were seen.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from smaragdine.sensors.nvml.gpus import ask, hold_library, nvml, release_library, text

_POLL_S = 0.002
_LOOK_S = 0.02
# Reasons that mean that the card would run faster if it were allowed to: power, heat, hardware.
_SLOWED = 0x04 | 0x08 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True)
class Stretch:
    """What the card did between two steps of its counter."""

    begin_s: float
    end_s: float
    energy_j: float
    clock_mhz: float  # of the multiprocessors, the mean
    lowest_mhz: float
    slowed: float  # of the time, the part in which something held the clock down
    temperature_c: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def power_w(self) -> float:
        return self.energy_j / self.length_s


@dataclass
class Meter:
    """Of the GPU with this UUID, or of the first. Close it."""

    uuid: str = ""
    _ticks: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    _looks: list[tuple[float, float, int, float]] = field(
        default_factory=list[tuple[float, float, int, float]]
    )

    def __post_init__(self) -> None:
        hold_library()
        lib = nvml()
        self._handle: Any = (
            lib.nvmlDeviceGetHandleByUUID(self.uuid) if self.uuid else lib.nvmlDeviceGetHandleByIndex(0)
        )
        self.uuid = text(lib.nvmlDeviceGetUUID(self._handle))
        self.name = text(lib.nvmlDeviceGetName(self._handle))
        self.driver = text(lib.nvmlSystemGetDriverVersion())
        self.limit_w = (ask(lib.nvmlDeviceGetEnforcedPowerLimit, self._handle) or 0) / 1000
        self.most_mhz = float(ask(lib.nvmlDeviceGetMaxClockInfo, self._handle, lib.NVML_CLOCK_SM) or 0)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        release_library()

    def _follow(self) -> None:
        lib = nvml()
        before, looked_s = -1, 0.0
        reasons = getattr(lib, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = reasons or lib.nvmlDeviceGetCurrentClocksThrottleReasons
        while not self._ending.wait(_POLL_S):
            began_s = time.monotonic()
            now_mj = lib.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            ended_s = time.monotonic()
            if now_mj != before:
                if before >= 0:
                    self._ticks.append((began_s + (ended_s - began_s) / 2, now_mj))
                before = now_mj
            if ended_s - looked_s >= _LOOK_S:
                looked_s = ended_s
                clock = lib.nvmlDeviceGetClockInfo(self._handle, lib.NVML_CLOCK_SM)
                warmth = lib.nvmlDeviceGetTemperature(self._handle, lib.NVML_TEMPERATURE_GPU)
                self._looks.append((ended_s, clock, ask(reasons, self._handle) or 0, warmth))

    def processes(self) -> list[int]:
        """Who computes on the card."""
        found = ask(nvml().nvmlDeviceGetComputeRunningProcesses, self._handle) or []
        return sorted(int(each.pid) for each in found)

    def slowed(self, since_s: float) -> float:
        """Of the time since then, the part in which something held the clock down."""
        looks = [look for look in self._looks if look[0] >= since_s]
        return sum(bool(look[2] & _SLOWED) for look in looks) / max(1, len(looks))

    def over(self, begin_s: float, length_s: float) -> Stretch:
        """Waits until the counter has shown that much time after `begin_s` (monotonic)."""
        limit_s = time.monotonic() + length_s + 5
        while time.monotonic() < limit_s:
            inside = [tick for tick in self._ticks if tick[0] >= begin_s]
            if len(inside) > 1 and inside[-1][0] - inside[0][0] >= length_s:
                (first_s, first_mj), (last_s, last_mj) = inside[0], inside[-1]
                looks = [look for look in self._looks if first_s <= look[0] <= last_s]
                clocks = [look[1] for look in looks] or [0.0]
                return Stretch(
                    first_s,
                    last_s,
                    (last_mj - first_mj) / 1000,
                    statistics.fmean(clocks),
                    min(clocks),
                    sum(bool(look[2] & _SLOWED) for look in looks) / max(1, len(looks)),
                    statistics.fmean([look[3] for look in looks] or [0.0]),
                )
            time.sleep(0.005)
        raise TimeoutError("the energy counter of the GPU stands still")
