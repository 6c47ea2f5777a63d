"""What a GPU was doing besides burning power: utilisation, clocks, temperature, limit, processes, PCIe.

We poll each at the slowest rate that loses nothing. They have lanes of their own, because a slow call here
must not delay the power readings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smaragdine.clock import Clock
from smaragdine.sensors.base import Channel, Kind, Sensor
from smaragdine.sensors.nvml.gpus import (
    Gpu,
    Health,
    ask,
    hold_library,
    nvml,
    release_library,
    usual_step,
)

LANE = "nvml-telemetry"
PCIE_LANE = "nvml-pcie"
MS_NS = 1_000_000
UTILISATION_MS = 200.0
CLOCKS_MS = 500.0
SLOW_MS = 1000.0
PCIE_WINDOW_MS = 20.0


@dataclass(frozen=True)
class Item:
    """One quantity: how to read it (None: not now), and what its channel says."""

    quantity: str
    unit: str
    read: Callable[[], float | None]
    kind: Kind = "level"
    window_ms: float | None = None
    detail: str = ""


def open_telemetry(gpu: Gpu, clock: Clock, *, pcie: bool) -> list[Sensor]:
    """Sensors for whatever this GPU tells, without what it does not support."""
    utilisation_ms, whence = _utilisation_period(gpu)
    groups = [
        (LANE, utilisation_ms, _utilisation(gpu, utilisation_ms, whence)),
        (LANE, CLOCKS_MS, _clocks(gpu)),
        (LANE, SLOW_MS, _slow(gpu)),
    ]
    if pcie:
        groups.append((PCIE_LANE, SLOW_MS, _pcie(gpu)))
    sensors: list[Sensor] = []
    for lane, period_ms, items in groups:
        supported = [item for item in items if ask(item.read) is not None]
        if supported:
            sensors.append(TelemetrySensor(gpu, clock, lane, period_ms, supported))
    return sensors


class TelemetrySensor:
    """Some quantities of one GPU, read together."""

    def __init__(self, gpu: Gpu, clock: Clock, lane: str, period_ms: float, items: Sequence[Item]) -> None:
        hold_library()
        self.lane = lane
        self.period_ns = int(period_ms * MS_NS)
        self._clock = clock
        self._items = tuple(items)
        self._health = Health(gpu.device, clock)
        self._channels = tuple(
            Channel(
                gpu.device,
                item.quantity,
                item.unit,
                item.kind,
                "measured",
                period_ms,
                "nvml",
                window_ms=item.window_ms,
                detail=item.detail,
            )
            for item in items
        )

    def channels(self) -> Sequence[Channel]:
        return self._channels

    def read(self) -> Sequence[tuple[int, int, float]]:
        lib = nvml()
        readings: list[tuple[int, int, float]] = []
        failure: Any = None
        for position, item in enumerate(self._items):
            try:
                value = item.read()
            except lib.NVMLError as error:
                failure = error
                continue
            if value is not None:
                readings.append((self._clock.wall_ns(), position, value))
        if failure is not None and not readings:
            self._health.bad(failure)
        else:
            self._health.good()
        return readings

    def close(self) -> Sequence[tuple[int, int, float]]:
        release_library()
        return ()


def _utilisation_period(gpu: Gpu) -> tuple[float, str]:
    """(ms, where it comes from). NVIDIA only says that it is between 1/6 s and 1 s."""
    lib = nvml()
    answer = ask(lib.nvmlDeviceGetSamples, gpu.handle, lib.NVML_GPU_UTILIZATION_SAMPLES, 0)
    stamps_us = sorted({s.timeStamp for s in answer[1] if s.timeStamp > 0}) if answer else []
    period_ms = usual_step(stamps_us) / 1000 if len(stamps_us) >= 4 else 0.0
    if not 20 <= period_ms <= 2000:
        return UTILISATION_MS, "assumed"
    return round(period_ms, 1), "the spacing of the driver's samples"


def _utilisation(gpu: Gpu, period_ms: float, whence: str) -> list[Item]:
    lib = nvml()
    detail = f"window {period_ms:.4g} ms: {whence}"

    def gpu_percent() -> float:
        return lib.nvmlDeviceGetUtilizationRates(gpu.handle).gpu

    def memory_percent() -> float:
        return lib.nvmlDeviceGetUtilizationRates(gpu.handle).memory

    return [
        Item(
            "gpu_utilisation", "%", gpu_percent, "sample", period_ms, f"time with a kernel running; {detail}"
        ),
        Item(
            "memory_utilisation", "%", memory_percent, "sample", period_ms, f"time memory was busy; {detail}"
        ),
    ]


def _clocks(gpu: Gpu) -> list[Item]:
    lib = nvml()

    def clock_mhz(kind: int) -> Callable[[], float]:
        return lambda: lib.nvmlDeviceGetClockInfo(gpu.handle, kind)

    def performance_state() -> float | None:
        state = lib.nvmlDeviceGetPerformanceState(gpu.handle)
        return None if state == lib.NVML_PSTATE_UNKNOWN else state

    # The older call is deprecated, and older drivers do not have the newer one.
    has_new = ask(lambda: lib.nvmlDeviceGetTemperatureV(gpu.handle, lib.NVML_TEMPERATURE_GPU)) is not None

    def temperature_c() -> float:
        if has_new:
            return lib.nvmlDeviceGetTemperatureV(gpu.handle, lib.NVML_TEMPERATURE_GPU)
        return lib.nvmlDeviceGetTemperature(gpu.handle, lib.NVML_TEMPERATURE_GPU)

    return [
        Item("sm_clock", "MHz", clock_mhz(lib.NVML_CLOCK_SM)),
        Item("memory_clock", "MHz", clock_mhz(lib.NVML_CLOCK_MEM)),
        Item("performance_state", "", performance_state, detail="0 is the fastest"),
        Item("temperature", "°C", temperature_c),
    ]


def _slow(gpu: Gpu) -> list[Item]:
    lib = nvml()

    def power_limit_w() -> float:
        return lib.nvmlDeviceGetEnforcedPowerLimit(gpu.handle) / 1000

    def processes() -> float:
        return len(lib.nvmlDeviceGetComputeRunningProcesses(gpu.handle))

    return [
        Item("power_limit", "W", power_limit_w, detail="enforced: the lowest of all limits in force"),
        Item("processes", "", processes, detail="compute processes on the GPU, any user's"),
    ]


def _pcie(gpu: Gpu) -> list[Item]:
    lib = nvml()

    def rate_mb_s(counter: int) -> Callable[[], float]:
        # NVML counts in KB/s.
        return lambda: lib.nvmlDeviceGetPcieThroughput(gpu.handle, counter) / 1000

    window = "mean over the 20 ms of the call"
    return [
        Item("pcie_tx", "MB/s", rate_mb_s(lib.NVML_PCIE_UTIL_TX_BYTES), "sample", PCIE_WINDOW_MS, window),
        Item("pcie_rx", "MB/s", rate_mb_s(lib.NVML_PCIE_UTIL_RX_BYTES), "sample", PCIE_WINDOW_MS, window),
    ]
