"""Reads one GPU's energy counter, clock, throttling and temperature while something else keeps the card busy.

The counter steps every 20 to 100 ms and says nothing in between: energy is taken between two of its steps, at
the times they were seen.
"""

from __future__ import annotations

import statistics
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smaragdine.errors import UserError
from smaragdine.sensors.nvml.discover import SLOWED
from smaragdine.sensors.nvml.gpus import ask, hold_library, nvml, release_library, text

_POLL_S = 0.002
_PATIENCE_S = 10.0
_LOOK_S = 0.02
_IN_TIME_S = 0.025  # between two readings, which take up to 8 ms themselves


@dataclass(frozen=True)
class Stretch:
    """What the card did between two steps of its counter."""

    begin_s: float
    end_s: float
    energy_j: float
    clock_mhz: float  # of the multiprocessors, the mean
    slowed: float  # of the time, the part in which something held the clock down
    temperature_c: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def power_w(self) -> float:
        return self.energy_j / self.length_s


class Meter(ABC):
    """What is seen of one card as time goes by. The time is the meter's: a simulated card has its own."""

    uuid: str
    name: str
    driver: str

    def __init__(self) -> None:
        self._ticks: list[tuple[float, int]] = []  # when the counter stepped, and to what
        self._looks: list[tuple[float, float, int, float]] = []  # time, clock, reasons, temperature
        self._lost = ""  # why the card no longer answers

    @abstractmethod
    def now_s(self) -> float: ...

    @abstractmethod
    def wait(self, length_s: float) -> None: ...

    @abstractmethod
    def processes(self) -> list[int]:
        """Who computes on the card."""

    @abstractmethod
    def close(self) -> None: ...

    def slowed(self, since_s: float) -> float:
        """Of the time since then, the part in which something held the clock down."""
        return _slowed_part(self._looks[bisect_left(self._looks, (since_s,)) :])

    def over(self, begin_s: float, length_s: float) -> Stretch:
        """Waits until the counter has shown that much time after `begin_s`."""
        limit_s = self.now_s() + length_s + _PATIENCE_S
        while self.now_s() < limit_s and not self._lost:
            inside = self._ticks[bisect_left(self._ticks, (begin_s,)) :]
            if len(inside) > 1 and inside[-1][0] - inside[0][0] >= length_s:
                (first_s, first_mj), (last_s, last_mj) = inside[0], inside[-1]
                since = self._looks[bisect_left(self._looks, (first_s,)) :]
                looks = [look for look in since if look[0] <= last_s]
                return Stretch(
                    first_s,
                    last_s,
                    (last_mj - first_mj) / 1000,
                    statistics.fmean([look[1] for look in looks] or [0.0]),
                    _slowed_part(looks),
                    statistics.fmean([look[3] for look in looks] or [0.0]),
                )
            self.wait(0.005)
        why = self._lost or "its energy counter stands still"
        raise UserError(f"{self.name} can no longer be measured", why, "What was replayed until now is kept")


class NvmlMeter(Meter):
    """Reads the GPU with this UUID, or the first, in a thread. Close it."""

    def __init__(self, uuid: str = "") -> None:
        super().__init__()
        hold_library()
        lib = nvml()
        self._handle: Any = lib.nvmlDeviceGetHandleByUUID(uuid) if uuid else lib.nvmlDeviceGetHandleByIndex(0)
        self.uuid = text(lib.nvmlDeviceGetUUID(self._handle))
        self.name = text(lib.nvmlDeviceGetName(self._handle))
        self.driver = text(lib.nvmlSystemGetDriverVersion())
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        release_library()

    def now_s(self) -> float:
        return time.monotonic()

    def wait(self, length_s: float) -> None:
        time.sleep(length_s)

    def processes(self) -> list[int]:
        found = ask(nvml().nvmlDeviceGetComputeRunningProcesses, self._handle) or []
        return sorted(int(each.pid) for each in found)

    def _follow(self) -> None:
        try:
            self._read_on()
        except nvml().NVMLError as error:
            self._lost = str(error)

    def _read_on(self) -> None:
        lib = nvml()
        before, looked_s, polled_s = -1, 0.0, 0.0
        reasons = getattr(lib, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = reasons or lib.nvmlDeviceGetCurrentClocksThrottleReasons
        while not self._ending.wait(_POLL_S):
            began_s = time.monotonic()
            now_mj = lib.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            ended_s = time.monotonic()
            # On a busy machine we may look late; then nobody knows when the counter stepped.
            in_time, polled_s = ended_s - polled_s < _IN_TIME_S, ended_s
            if now_mj != before:
                if before >= 0 and in_time:
                    self._ticks.append((began_s + (ended_s - began_s) / 2, now_mj))
                before = now_mj
            if ended_s - looked_s >= _LOOK_S:
                looked_s = ended_s
                clock = lib.nvmlDeviceGetClockInfo(self._handle, lib.NVML_CLOCK_SM)
                warmth = lib.nvmlDeviceGetTemperature(self._handle, lib.NVML_TEMPERATURE_GPU)
                self._looks.append((ended_s, clock, ask(reasons, self._handle) or 0, warmth))


def _slowed_part(looks: Sequence[tuple[float, float, int, float]]) -> float:
    return sum(bool(look[2] & SLOWED) for look in looks) / max(1, len(looks))
