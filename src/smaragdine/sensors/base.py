"""What a sensor is: some channels, and a way to read them.

A third-party sensor implements `Sensor` and names a function that returns `Found` under the entry
point group `smaragdine.sensors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

Provenance = Literal["measured", "estimated", "replayed"]

# How a channel's values relate to time:
#   counter  a running total; the difference of two readings covers the time between them
#   sample   a mean over the `window_ms` that end at the reading
#   level    whatever was true at the reading (temperature, clock, limit)
Kind = Literal["counter", "sample", "level"]

# How a power channel relates to the sum over devices:
#   device   a device of its own; these add up
#   part     inside another channel of the same device (core inside package): never added
#   whole    contains or may contain other devices (psys, a wall meter): never added
Scope = Literal["device", "part", "whole"]


@dataclass(frozen=True)
class Channel:
    """One physical quantity of one device."""

    device: str  # gpu:0, cpu:0, cpu:0/core, dram:0, psys, hwmon:NAME/LABEL
    quantity: str  # energy, power; busy, program, monitor (CPU time); everything else is telemetry
    unit: str  # J, W, s, %, MHz, °C, MB/s
    kind: Kind
    provenance: Provenance
    period_ms: float  # how often the source gets a new value
    sensor: str  # rapl, perf, nvml, hwmon, estimate, activity, or a plug-in's name
    scope: Scope = "device"
    window_ms: float | None = None  # for samples: the time one value averages over
    wraps_at: float | None = None  # for counters: the value at which it starts again from 0, in `unit`
    detail: str = ""  # which zone, field or formula; what was assumed
    # What is known of a sample's electronics: it comes so late, after a low-pass with this time constant.
    lag_ms: float | None = None
    smoothing_ms: float | None = None

    @property
    def name(self) -> str:
        return f"{self.device} {self.quantity}"


_NUMBERS = ("window_ms", "wraps_at", "lag_ms", "smoothing_ms")  # or None


def checked(channel: Channel) -> Channel:
    """The same, where its texts are texts and its numbers numbers. Raises TypeError: it is of a plug-in, or
    out of a file that somebody edited."""
    for name, value in vars(channel).items():
        if name == "period_ms" or (name in _NUMBERS and value is not None):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            good = number and abs(value) < 1e15
        else:
            good = value is None if name in _NUMBERS else isinstance(value, str)
        if not good:
            raise TypeError(f"{name} of a channel is {str(value)[:40]}")
    return channel


@dataclass(frozen=True)
class Absent:
    """A channel one might expect and cannot have: never a zero, always a reason and a remedy."""

    channel: str
    reason: str
    remedy: str


class Reading(NamedTuple):
    """One value of one channel at one time. `channel` is the position in the sensor's `channels()`."""

    t_ns: int
    channel: int
    value: float


class Sensor(Protocol):
    """Reads some channels together. Only one thread calls it."""

    period_ns: int  # how often `read` has something new
    lane: str  # sensors of one lane share a thread, so a slow call delays only its own lane

    def channels(self) -> Sequence[Channel]: ...

    def read(self) -> Sequence[tuple[int, int, float]]:
        """New readings since the last call, as `Reading`s or plain tuples of the same shape.

        Raises `SensorLost` when there will never be another one.
        """
        ...

    def close(self) -> Sequence[tuple[int, int, float]]:
        """Give the last readings, then let go of the hardware. Must not raise."""
        ...


class SensorLost(Exception):
    """The source is gone for good (a GPU fell off the bus, a zone vanished): its channels end here."""


@dataclass(frozen=True)
class Found:
    """What a look at the machine brought: sensors that work, what is absent and why, facts for run.json."""

    sensors: list[Sensor] = field(default_factory=list[Sensor])
    absent: list[Absent] = field(default_factory=list[Absent])
    facts: dict[str, object] = field(default_factory=dict[str, object])
