"""The power of one GPU, by the best route it has.

In this order: the driver's ring of samples together with the energy counter, the ring alone, the counter
alone, the field of instant power, the averaged power. With the first, the ring sees every 20 ms and the
counter sets the level. The last two only see what is there when we poll them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smaragdine.clock import Clock
from smaragdine.sensors.base import Absent, Channel, Sensor
from smaragdine.sensors.nvml.gpus import (
    Gpu,
    Health,
    hold_library,
    is_lost,
    nvml,
    release_library,
    usual_step,
)

# The GPU's energy counter, read at the instants when it changes. The counter steps (every 100 ms on an H200),
# and a call is dear (3 ms there, up to 30 while the GPU is busy). A value that is read at any time may be a
# whole step old, so a reading is an observed change. We stamp it halfway between the starts of two polls: the
# last that saw the old value, and the first that saw the new one. The driver takes the value when the call
# begins, however long the call then lasts: of 120 steps on an H200 under load, the starts bracket a regular
# step every time, to 0.5 ms; the ends miss it by up to 6 ms. From the last step we predict the next one, and
# begin to poll shortly before it.

MS_NS = 1_000_000
DEFAULT_PERIOD_NS = 100 * MS_NS
PROBE_NS = 500 * MS_NS
PROBE_CHANGES = 4
POLL_S = 0.001
LEAD_NS = 6 * MS_NS  # a call of 3 ms must begin before the step, even if it begins late
GAP_NS = 12 * MS_NS  # a change bracketed less tightly makes a poor anchor
READ_BUDGET_NS = 250 * MS_NS
CLOSE_BUDGET_NS = 500 * MS_NS
ANCHOR_NS = 2_000_000_000  # accounting takes no anchors closer than this
ANCHOR_AT_LEAST_NS = 1_700 * MS_NS
QUIET_NS = 8_000_000_000


@dataclass(frozen=True)
class CounterStep:
    """A step of the counter: its middle on both clocks, how tightly two polls bracket it, the new value."""

    t_ns: int
    mono_ns: int
    gap_ns: int
    value_mj: int


@dataclass(frozen=True)
class Pace:
    """How often the counter steps, and the last step seen (None: none, and the period is a default)."""

    period_ns: int
    last: CounterStep | None

    @property
    def found(self) -> str:
        period_ms = self.period_ns / MS_NS
        return f"steps every {period_ms:.0f} ms" + (
            "" if self.last else " (assumed: no step was seen at start)"
        )


class Watch:
    """Polls the counter and notices changes."""

    def __init__(self, read_mj: Callable[[], int], clock: Clock) -> None:
        self._read_mj = read_mj
        self._clock = clock
        self._value_mj: int | None = None
        self._start_ns = 0

    def restart(self) -> None:
        """Forget the last poll: nobody knows when what changed since then did so."""
        self._value_mj = None

    def poll(self, period_ns: int | None = None) -> CounterStep | None:
        """Call once, and return the change that it saw. Of several unseen steps, the last one is stamped."""
        wall_ns, start_ns = self._clock.wall_ns(), self._clock.mono_ns()
        value_mj = self._read_mj()
        before_mj, gap_ns = self._value_mj, start_ns - self._start_ns
        self._value_mj, self._start_ns = value_mj, start_ns
        if before_mj is None or before_mj == value_mj:
            return None
        if period_ns is not None:
            gap_ns = min(gap_ns, period_ns)
        return CounterStep(wall_ns - gap_ns // 2, start_ns - gap_ns // 2, gap_ns, value_mj)


def find_pace(read_mj: Callable[[], int], clock: Clock) -> Pace:
    """Poll for up to 0.5 s. Raises NVMLError where there is no counter."""
    watch = Watch(read_mj, clock)
    changes: list[CounterStep] = []
    deadline_ns = clock.mono_ns() + PROBE_NS
    while clock.mono_ns() < deadline_ns and len(changes) < PROBE_CHANGES:
        change = watch.poll()
        if change is not None:
            changes.append(change)
        clock.sleep_s(POLL_S)
    if len(changes) < 2:
        return Pace(DEFAULT_PERIOD_NS, None)
    return Pace(max(MS_NS, round(usual_step([change.mono_ns for change in changes]))), changes[-1])


class CounterSensor:
    """The energy of one GPU since the driver was loaded, in joules.

    Beside a ring of samples, one change in two seconds is enough, and `read` waits for it. `alone`, we want
    every step: `read` is called often. It waits for the first step, on which a run stands, and then polls
    only when a step is due.
    """

    lane = "nvml"

    def __init__(
        self, gpu: Gpu, clock: Clock, read_mj: Callable[[], int], pace: Pace, *, alone: bool, detail: str
    ) -> None:
        hold_library()
        self._clock = clock
        self._alone = alone
        self._health = Health(gpu.device, clock)
        self._watch = Watch(read_mj, clock)
        self._period_ns = float(pace.period_ns)
        self._last_ns = float(pace.last.mono_ns) if pace.last else None
        self._lead_ns = min(float(LEAD_NS), pace.period_ns / 2)
        self._gap_ns = GAP_NS
        self._misses = 0
        self._not_before_ns = 0
        self._begun = False
        if alone:
            self.period_ns = min(max(pace.period_ns // 20, 2 * MS_NS), 10 * MS_NS)
        elif pace.period_ns <= READ_BUDGET_NS - 2 * LEAD_NS:
            self.period_ns = ANCHOR_NS
        else:
            self.period_ns = READ_BUDGET_NS
        stamp_ms = self.period_ns / MS_NS / 2 + 2 if alone else GAP_NS / MS_NS / 2
        self._channel = Channel(
            gpu.device,
            "energy",
            "J",
            "counter",
            "measured",
            pace.period_ns / MS_NS if alone else max(ANCHOR_NS, pace.period_ns) / MS_NS,
            "nvml",
            detail=f"{detail}; counter {pace.found}; each reading an observed step, ±{stamp_ms:.0f} ms",
        )

    def channels(self) -> Sequence[Channel]:
        return (self._channel,)

    def read(self) -> Sequence[tuple[int, int, float]]:
        now_ns = self._clock.mono_ns()
        if now_ns < self._not_before_ns:
            return ()
        look = self._glance if self._alone else self._wait
        change = self._health.attempt(lambda: look(now_ns))
        return () if change is None else (_reading(change),)

    def close(self) -> Sequence[tuple[int, int, float]]:
        lib = nvml()
        try:
            change = self._look(min(CLOSE_BUDGET_NS, int(2 * self._period_ns) + LEAD_NS))
            return () if change is None else (_reading(change),)
        except lib.NVMLError:
            return ()
        finally:
            release_library()

    def _glance(self, now_ns: int) -> CounterStep | None:
        if self._begun:
            change = self._watch.poll(int(self._period_ns))
            change = None if change is None else self._learn(change)
        else:
            change, self._begun = self._look(READ_BUDGET_NS), True
        if change is not None:
            self._not_before_ns = int(change.mono_ns + self._period_ns - self._lead_ns)
        elif self._last_ns is not None and now_ns > self._last_ns + 4 * self._period_ns:
            self._not_before_ns = int(now_ns + self._period_ns / 2)
        return change

    def _wait(self, now_ns: int) -> CounterStep | None:
        if self._wait_ns(now_ns) > READ_BUDGET_NS - 2 * LEAD_NS:
            return None
        change = self._look(READ_BUDGET_NS)
        if change is None:
            self._misses += 1
            self._not_before_ns = now_ns + min(ANCHOR_NS << min(self._misses, 8), QUIET_NS)
        else:
            self._misses = 0
            self._not_before_ns = change.mono_ns + ANCHOR_AT_LEAST_NS
        return change

    def _wait_ns(self, now_ns: int) -> int:
        """How long to wait before polling begins, so that the next step falls into it."""
        if self._last_ns is None or self._lead_ns >= self._period_ns / 2:
            return 0
        steps = -(-(now_ns + self._lead_ns - self._last_ns) // self._period_ns)
        return int(self._last_ns + steps * self._period_ns - self._lead_ns - now_ns)

    def _look(self, budget_ns: int) -> CounterStep | None:
        start_ns = self._clock.mono_ns()
        wait_ns = self._wait_ns(start_ns)
        deadline_ns = start_ns + min(budget_ns, wait_ns + int(3 * self._period_ns) + LEAD_NS)
        if wait_ns > 0:
            self._clock.sleep_s(wait_ns / 1e9)
        self._watch.restart()
        while True:
            change = self._watch.poll()
            if change is not None:
                change = self._learn(change)
                # A machine that is too busy for tight polling would never give an anchor, so each refusal
                # doubles what we accept next.
                if change.gap_ns <= self._gap_ns:
                    self._gap_ns = GAP_NS
                    return change
                self._gap_ns *= 2
            if self._clock.mono_ns() >= deadline_ns:
                self._lead_ns = min(2 * self._lead_ns, self._period_ns / 2)
                return None
            self._clock.sleep_s(POLL_S)

    def _learn(self, change: CounterStep) -> CounterStep:
        """Follow the counter's phase and period, and stamp a loosely bracketed step by prediction.

        We only know that the step lies in the bracket. We keep a prediction inside it, and move one outside
        to the nearer edge. So a slow call does not throw the phase off.
        """
        step_ns, half_ns = float(change.mono_ns), change.gap_ns / 2
        miss_ns = 0.0
        if self._last_ns is not None:
            steps = max(1, round((change.mono_ns - self._last_ns) / self._period_ns))
            predicted_ns = self._last_ns + steps * self._period_ns
            step_ns = min(max(predicted_ns, change.mono_ns - half_ns), change.mono_ns + half_ns)
            miss_ns = step_ns - predicted_ns
            if abs(miss_ns) < self._period_ns / 4:
                self._period_ns += miss_ns / steps / 2
        self._lead_ns = min(LEAD_NS + 2 * abs(miss_ns), self._period_ns / 2)
        self._last_ns = step_ns
        if change.gap_ns <= GAP_NS:
            return change
        moved_ns = round(step_ns - change.mono_ns)
        return replace(change, t_ns=change.t_ns + moved_ns, mono_ns=change.mono_ns + moved_ns)


def _reading(change: CounterStep) -> tuple[int, int, float]:
    return change.t_ns, 0, change.value_mj / 1000


RING_WAIT_NS = 300 * MS_NS
RING_PERIOD_NS = 1_000_000_000
STAMP_SLACK_US = 2_000_000
AVERAGE_WINDOW_MS = 1000.0
GA100_PCI_IDS = range(0x20B0, 0x2100)
VALUE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


@dataclass(frozen=True)
class Response:
    """How a chip's samples follow its power: how late, and after a low-pass of which time constant.

    None: nobody has measured it. A sample then counts as the mean over the time since the last one.
    """

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
    """Wait up to 0.3 s for a ring with samples. Raises NVMLError where there is none that we can use."""
    lib = nvml()
    deadline_ns = clock.mono_ns() + RING_WAIT_NS
    while True:
        stamps_us = [stamp_us for stamp_us, _ in _samples(gpu, 0)]
        if len(stamps_us) >= 4:
            break
        if clock.mono_ns() >= deadline_ns:
            raise lib.NVMLError(lib.NVML_ERROR_NO_DATA)
        clock.sleep_s(0.05)
    # Stamps on another clock could not be laid over anything else that we measure.
    if abs(stamps_us[-1] - clock.wall_ns() // 1000) > STAMP_SLACK_US:
        raise lib.NVMLError(lib.NVML_ERROR_NO_DATA)
    return Ring(max(1, round(usual_step(stamps_us))), stamps_us[-1] - stamps_us[0])


def find_period(read_mw: Callable[[], float], clock: Clock) -> tuple[int, bool]:
    """(period in ns, whether we saw it) of a polled value, from its changes in up to 0.5 s."""
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
    """Power in watts from the driver's own ring of samples. Reads about once a second, and loses none."""

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
            # The driver is only now taking the sample that covers the last anchor of the counter.
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
    """Power in watts from a value that the driver renews now and then.

    A reading is a renewed value, stamped halfway between the polls around its change. A value that stays for
    a whole period counts as renewed.
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
            # The present value stands for the time since the last reading, which would else count as unknown.
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
