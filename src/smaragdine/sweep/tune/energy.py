"""The energy of GPUs live: readings of each GPU's counter, at the instants it steps."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from smaragdine.clock import SYSTEM, Clock
from smaragdine.errors import UserError
from smaragdine.sensors.nvml_counter import CounterSensor, find_pace
from smaragdine.sensors.nvml_gpu import Gpu, Health, ask, hold_library, nvml, release_library
from smaragdine.sensors.nvml_limits import LimitedGpu, open_gpus

_POWER_PERIOD_NS = 20_000_000
_USUAL_PERIOD_NS = 100_000_000
_MOST_READINGS = 20_000


class Sensor(Protocol):
    def read(self) -> Sequence[tuple[int, int, float]]:
        """(t_ns, 0, joules so far), where there is a new one. Raises `SensorLost`."""
        ...


class PowerSensor:
    """For GPUs older than the counter: the sum of power readings."""

    def __init__(self, device: str, read_mw: Callable[[], int], clock: Clock = SYSTEM) -> None:
        self._read_mw = read_mw
        self._clock = clock
        self._health = Health(device, clock)
        self._last: tuple[int, float] | None = None  # when, and power
        self._energy_j = 0.0

    def read(self) -> Sequence[tuple[int, int, float]]:
        t_ns, last = self._clock.wall_ns(), self._last
        if last is not None and t_ns - last[0] < _POWER_PERIOD_NS:
            return ()
        power_mw = self._health.attempt(self._read_mw)
        if power_mw is None:
            return ()
        self._last = t_ns, power_mw / 1000
        if last is None:
            return ()
        self._energy_j += (last[1] + self._last[1]) / 2 * (t_ns - last[0]) * 1e-9
        return ((t_ns, 0, self._energy_j),)


class Energy:
    """What all devices used together, between any two times that their readings cover."""

    def __init__(self, sensors: Sequence[Sensor], period_ns: int) -> None:
        self.period_ns = period_ns  # between two steps of the slowest counter
        self._sensors = sensors
        self._readings: list[tuple[list[int], list[float]]] = [([], []) for _ in sensors]

    def read(self) -> None:
        for sensor, (times_ns, joules) in zip(self._sensors, self._readings, strict=True):
            for t_ns, _, energy_j in sensor.read():
                # A driver that was loaded anew counts from zero.
                if joules and energy_j < joules[-1]:
                    times_ns.clear()
                    joules.clear()
                times_ns.append(t_ns)
                joules.append(energy_j)
            if len(times_ns) > _MOST_READINGS:
                # A program that pauses for hours is still a program.
                del times_ns[: _MOST_READINGS // 2], joules[: _MOST_READINGS // 2]

    def forget(self) -> None:
        """Readings from now on are another stretch of time."""
        for times_ns, joules in self._readings:
            times_ns.clear()
            joules.clear()

    def covered_ns(self) -> tuple[int, int] | None:
        """The time that readings of all devices cover."""
        if any(len(times_ns) < 2 for times_ns, _ in self._readings):
            return None
        begin_ns = max(times_ns[0] for times_ns, _ in self._readings)
        return begin_ns, min(times_ns[-1] for times_ns, _ in self._readings)

    def between_j(self, begin_ns: int, end_ns: int) -> float:
        """Times must be covered. Power counts as even between two readings."""
        return sum(
            _at(end_ns, times_ns, joules) - _at(begin_ns, times_ns, joules)
            for times_ns, joules in self._readings
        )


def _at(t_ns: int, times_ns: list[int], joules: list[float]) -> float:
    after = min(max(bisect_left(times_ns, t_ns), 1), len(times_ns) - 1)
    begin_ns, end_ns = times_ns[after - 1], times_ns[after]
    part = (t_ns - begin_ns) / (end_ns - begin_ns)
    return joules[after - 1] + part * (joules[after] - joules[after - 1])


@contextlib.contextmanager
def live_energy(devices: Mapping[str, str]) -> Iterator[Energy]:
    """Of these devices, by name and UUID, through NVML."""
    hold_library()
    sensors: list[Any] = []
    try:
        gpus = {gpu.uuid: gpu for gpu in open_gpus()}
        periods_ns = [_USUAL_PERIOD_NS]
        for device, uuid in devices.items():
            if uuid not in gpus:
                raise UserError(f"{device} does not answer", remedy="See smaragdine doctor")
            sensor, period_ns = _open(gpus[uuid])
            sensors.append(sensor)
            periods_ns.append(period_ns)
        yield Energy(sensors, max(periods_ns))
    finally:
        for sensor in sensors:
            if isinstance(sensor, CounterSensor):
                sensor.close()
        release_library()


def _open(gpu: LimitedGpu) -> tuple[Sensor, int]:
    lib = nvml()

    def read_mj() -> int:
        return lib.nvmlDeviceGetTotalEnergyConsumption(gpu.handle)

    def read_mw() -> int:
        return lib.nvmlDeviceGetPowerUsage(gpu.handle)

    if ask(read_mj) is not None:
        pace = find_pace(read_mj, SYSTEM)
        index = int(gpu.device.partition(":")[2])
        known = Gpu(index, gpu.handle, "", gpu.uuid, "", 0, 0, gpu.mig)
        return CounterSensor(known, SYSTEM, read_mj, pace, alone=True, detail=""), pace.period_ns
    if ask(read_mw) is None:
        why = "it has neither an energy counter nor a power reading"
        raise UserError(f"{gpu.device} cannot be measured", why, "See smaragdine doctor")
    return PowerSensor(gpu.device, read_mw), _USUAL_PERIOD_NS
