"""The power of one GPU, by the best route it has.

In order: the driver's ring of samples together with the energy counter, the ring alone, the counter
alone, the instant-power field, the averaged power. The first sees every 20 ms and the counter sets the
level; the last two see only what is there when they are polled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smaragdine.clock import Clock
from smaragdine.sensors.base import Absent, Channel, Sensor
from smaragdine.sensors.nvml_counter import (
    DEFAULT_PERIOD_NS,
    MS_NS,
    PROBE_CHANGES,
    PROBE_NS,
    CounterSensor,
    find_pace,
)
from smaragdine.sensors.nvml_gpu import Gpu, Health, hold_library, is_lost, nvml, release_library, usual_step

RING_WAIT_NS = 300 * MS_NS
RING_PERIOD_NS = 1_000_000_000
STAMP_SLACK_US = 2_000_000
AVERAGE_WINDOW_MS = 1000.0
GA100_PCI_IDS = range(0x20B0, 0x2100)
VALUE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


@dataclass(frozen=True)
class Response:
    """How a chip's samples follow its power: so late, after a low-pass of this time constant. None: nobody
    has measured it; a sample is then taken for a mean over the time since the last one."""

    lag_ms: float | None = None
    smoothing_ms: float | None = None


# By the architecture's name in NVML, as measured: see docs/measurements.
RESPONSES = {"NVML_DEVICE_ARCH_HOPPER": Response(lag_ms=3.5, smoothing_ms=13.5)}


@dataclass(frozen=True)
class Ring:
    """What the ring of power samples looks like: time between samples, and how much time it holds."""

    spacing_us: int
    span_us: int


def open_power(gpu: Gpu, clock: Clock) -> tuple[list[Sensor], Absent | None]:
    """The power sensors of one GPU, or why there are none. Takes up to about 1 s."""
    lib = nvml()
    refused: list[str] = []
    codes: set[int] = set()

    def attempt(name: str, find: Callable[[], Any]) -> Any:
        try:
            return find()
        except lib.NVMLError as error:
            refused.append(f"{name}: {error}")
            codes.add(error.value)
            return None

    def detail(route: str) -> str:
        parts = [f"route: {route}"]
        if refused:
            parts.append(f"without {', '.join(refused)}")
        if gpu.mig:
            parts.append("MIG is on: this is the whole physical GPU, all its instances together")
        return "; ".join(parts)

    ring = attempt("samples", lambda: find_ring(gpu, clock))
    pace = attempt("counter", lambda: find_pace(_counter(gpu), clock))
    if ring is not None and pace is not None:
        route = detail("samples + counter")
        return [
            CounterSensor(gpu, clock, _counter(gpu), pace, alone=False, detail=route),
            RingSensor(gpu, clock, ring, route),
        ], None
    if ring is not None:
        return [RingSensor(gpu, clock, ring, detail("samples"))], None
    if pace is not None:
        return [CounterSensor(gpu, clock, _counter(gpu), pace, alone=True, detail=detail("counter"))], None
    for name, read_mw, window in (
        ("instant", _instant(gpu), (None, "not documented, taken as the period; the chip may average less")),
        ("average", _average(gpu), average_window(gpu)),
    ):
        period = attempt(name, lambda read_mw=read_mw: find_period(read_mw, clock))
        if period is not None:
            return [PolledSensor(gpu, clock, read_mw, period, window, detail(f"{name} polling"))], None
    return [], _no_power(gpu, refused, codes)


def find_ring(gpu: Gpu, clock: Clock) -> Ring:
    """Waits up to 0.3 s for a ring with samples in it. Raises NVMLError where there is none to use."""
    lib = nvml()
    deadline_ns = clock.mono_ns() + RING_WAIT_NS
    while True:
        stamps_us = [stamp_us for stamp_us, _ in _samples(gpu, 0)]
        if len(stamps_us) >= 4:
            break
        if clock.mono_ns() >= deadline_ns:
            raise lib.NVMLError(lib.NVML_ERROR_NO_DATA)
        clock.sleep_s(0.05)
    # Stamps on another clock than ours could not be laid over anything else that was measured.
    if abs(stamps_us[-1] - clock.wall_ns() // 1000) > STAMP_SLACK_US:
        raise lib.NVMLError(lib.NVML_ERROR_NO_DATA)
    return Ring(max(1, round(usual_step(stamps_us))), stamps_us[-1] - stamps_us[0])


def find_period(read_mw: Callable[[], float], clock: Clock) -> tuple[int, bool]:
    """(period in ns, whether it was seen) of a polled value, from its changes in up to 0.5 s."""
    changes_ns: list[int] = []
    last_mw = read_mw()
    deadline_ns = clock.mono_ns() + PROBE_NS
    while clock.mono_ns() < deadline_ns and len(changes_ns) < PROBE_CHANGES:
        clock.sleep_s(0.004)
        value_mw = read_mw()
        if value_mw != last_mw:
            changes_ns.append(clock.mono_ns())
        last_mw = value_mw
    if len(changes_ns) < 2:
        return DEFAULT_PERIOD_NS, False
    return max(10 * MS_NS, round(usual_step(changes_ns))), True


def average_window(gpu: Gpu) -> tuple[float | None, str]:
    """(window in ms or None for the period, where that comes from) of nvmlDeviceGetPowerUsage."""
    ampere = nvml().NVML_DEVICE_ARCH_AMPERE
    unknown = nvml().NVML_DEVICE_ARCH_UNKNOWN
    ga100 = gpu.pci_device_id in GA100_PCI_IDS
    if gpu.architecture != unknown and gpu.architecture >= ampere and not ga100:
        return AVERAGE_WINDOW_MS, "NVIDIA's documentation: a 1 s average on Ampere and newer except GA100"
    return None, "the period; NVIDIA's documentation: instantaneous on GA100 and before Ampere"


def response(gpu: Gpu) -> Response:
    known = {getattr(nvml(), name): found for name, found in RESPONSES.items()}
    return known.get(gpu.architecture, Response())


class RingSensor:
    """Power from the driver's own ring of samples, in watts: all of them, read about once a second."""

    lane = "nvml"

    def __init__(self, gpu: Gpu, clock: Clock, ring: Ring, detail: str) -> None:
        hold_library()
        self._gpu = gpu
        self._clock = clock
        self._spacing_us = ring.spacing_us
        self._health = Health(gpu.device, clock)
        self._seen_us = clock.wall_ns() // 1000 - ring.spacing_us
        self.period_ns = min(RING_PERIOD_NS, max(ring.span_us * 1000 * 2 // 5, 100 * MS_NS))
        spacing_ms = ring.spacing_us / 1000
        known = response(gpu)
        if known.smoothing_ms is not None:
            detail += f"; {known.lag_ms:g} ms late and smoothed over {known.smoothing_ms:g} ms, as measured"
        self._channel = Channel(
            gpu.device,
            "power",
            "W",
            "sample",
            "measured",
            spacing_ms,
            "nvml",
            window_ms=spacing_ms,
            detail=f"{detail}; samples every {spacing_ms:.4g} ms, the window taken as their spacing",
            lag_ms=known.lag_ms,
            smoothing_ms=known.smoothing_ms,
        )

    def channels(self) -> Sequence[Channel]:
        return (self._channel,)

    def read(self) -> Sequence[tuple[int, int, float]]:
        return self._health.attempt(self._new) or ()

    def close(self) -> Sequence[tuple[int, int, float]]:
        lib = nvml()
        try:
            # The sample that covers the last anchor of the counter is only now being taken.
            self._clock.sleep_s(min(0.1, self._spacing_us / 1e6))
            return self._new()
        except lib.NVMLError:
            return ()
        finally:
            release_library()

    def _new(self) -> Sequence[tuple[int, int, float]]:
        now_us = self._clock.wall_ns() // 1000
        if self._seen_us > now_us + STAMP_SLACK_US:  # the wall clock was set back
            self._seen_us = now_us - self._spacing_us
        samples = [(t_us, mw) for t_us, mw in _samples(self._gpu, self._seen_us) if t_us > self._seen_us]
        if samples:
            self._seen_us = samples[-1][0]
        return [(t_us * 1000, 0, mw / 1000) for t_us, mw in samples]


class PolledSensor:
    """Power from a value that the driver renews now and then, in watts.

    A reading is a renewed value, stamped halfway between the polls around its change; a value that does
    not change for a period is taken as renewed unchanged.
    """

    lane = "nvml"

    def __init__(
        self,
        gpu: Gpu,
        clock: Clock,
        read_mw: Callable[[], float],
        period: tuple[int, bool],
        window: tuple[float | None, str],
        detail: str,
    ) -> None:
        hold_library()
        self._clock = clock
        self._read_mw = read_mw
        self._health = Health(gpu.device, clock)
        self._renewal_ns, seen = period
        self._last_mw: float | None = None
        self._polled_ns = 0
        self._emitted_ns = 0
        self.period_ns = max(4 * MS_NS, self._renewal_ns // 5)
        window_ms, whence = window
        period_ms = self._renewal_ns / MS_NS
        period_note = f"every {period_ms:.0f} ms" + ("" if seen else " (assumed: it did not change at start)")
        self._channel = Channel(
            gpu.device,
            "power",
            "W",
            "sample",
            "measured",
            period_ms,
            "nvml",
            window_ms=period_ms if window_ms is None else window_ms,
            detail=f"{detail}; renewed {period_note}; window: {whence}",
        )

    def channels(self) -> Sequence[Channel]:
        return (self._channel,)

    def read(self) -> Sequence[tuple[int, int, float]]:
        value_mw = self._health.attempt(self._read_mw)
        if value_mw is None:
            return ()
        t_ns, now_ns = self._clock.wall_ns(), self._clock.mono_ns()
        gap_ns, changed = now_ns - self._polled_ns, value_mw != self._last_mw
        first = self._last_mw is None
        self._last_mw, self._polled_ns = value_mw, now_ns
        if changed and not first:
            t_ns -= min(gap_ns, self._renewal_ns) // 2
        elif not first and now_ns - self._emitted_ns < self._renewal_ns + self.period_ns:
            return ()
        self._emitted_ns = now_ns
        return ((t_ns, 0, value_mw / 1000),)

    def close(self) -> Sequence[tuple[int, int, float]]:
        lib = nvml()
        try:
            # The value of now stands for the time since the last reading, or that would count as unknown.
            value_mw = self._read_mw()
            return ((self._clock.wall_ns(), 0, value_mw / 1000),)
        except lib.NVMLError:
            return ()
        finally:
            release_library()


def _counter(gpu: Gpu) -> Callable[[], int]:
    return lambda: nvml().nvmlDeviceGetTotalEnergyConsumption(gpu.handle)


def _average(gpu: Gpu) -> Callable[[], float]:
    return lambda: nvml().nvmlDeviceGetPowerUsage(gpu.handle)


def _instant(gpu: Gpu) -> Callable[[], float]:
    def read_mw() -> float:
        lib = nvml()
        field = lib.nvmlDeviceGetFieldValues(gpu.handle, [lib.NVML_FI_DEV_POWER_INSTANT])[0]
        if field.nvmlReturn != lib.NVML_SUCCESS:
            raise lib.NVMLError(field.nvmlReturn)
        return getattr(field.value, VALUE_FIELDS[field.valueType])

    return read_mw


def _samples(gpu: Gpu, since_us: int) -> list[tuple[int, float]]:
    """(unix µs, mW) of the ring's samples after `since_us`, in order of time."""
    lib = nvml()
    try:
        kind, samples = lib.nvmlDeviceGetSamples(gpu.handle, lib.NVML_TOTAL_POWER_SAMPLES, since_us)
    except lib.NVMLError_NotFound:  # nothing new
        return []
    value = VALUE_FIELDS[kind]
    return sorted({s.timeStamp: getattr(s.sampleValue, value) for s in samples if s.timeStamp > 0}.items())


def _no_power(gpu: Gpu, refused: list[str], codes: set[int]) -> Absent:
    lib = nvml()
    reason = f"{gpu.name} gives no power by any route of NVML ({'; '.join(refused)})"
    if any(is_lost(lib.NVMLError(code)) for code in codes):
        remedy = "reset the GPU (nvidia-smi --gpu-reset) or reboot, and see the kernel log for Xid errors"
    elif lib.NVML_ERROR_NO_PERMISSION in codes:
        remedy = "run as a user who may read the GPU: `nvidia-smi -q -d POWER` must show its power"
    else:
        remedy = "see `nvidia-smi -q -d POWER`; a newer driver, or a wall meter as a plug-in sensor"
    return Absent(f"{gpu.device} power", reason, remedy)
