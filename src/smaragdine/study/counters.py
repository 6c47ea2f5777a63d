"""Energy counters of the machine, read at two edges of a stretch of time: its mean power.

A GPU's counter steps every 100 ms, and a value read in between is old. So an edge is where it steps, as a
tight loop of polls sees it; how wide the last poll was, is said.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smaragdine.clock import SYSTEM
from smaragdine.sensors import nvml as nvml_sensors
from smaragdine.sensors import rapl
from smaragdine.sensors.base import Sensor, SensorLost
from smaragdine.sensors.discover import settings_from_environment
from smaragdine.sensors.nvml_counter import Watch
from smaragdine.sensors.nvml_gpu import ask, hold_library, nvml, release_library
from smaragdine.sensors.nvml_limits import open_gpus

_LONGEST_NS = 500_000_000  # a counter that does not step in so long stands still
_POLL_S = 0.001


@dataclass(frozen=True)
class Edge:
    """A device's counter at one time."""

    mono_ns: int
    energy_j: float
    within_ns: int  # the time is exact to half of it
    wraps_at_j: float | None = None


Read = Callable[[], Mapping[str, Edge]]


def mean_power_w(first: Mapping[str, Edge], last: Mapping[str, Edge]) -> dict[str, float]:
    """Of every device that has both edges."""
    found: dict[str, float] = {}
    for device in first.keys() & last.keys():
        begin, end = first[device], last[device]
        used_j = end.energy_j - begin.energy_j
        if used_j < 0 and end.wraps_at_j is not None:
            used_j += end.wraps_at_j
        if used_j > 0 and end.mono_ns > begin.mono_ns:
            found[device] = used_j / ((end.mono_ns - begin.mono_ns) * 1e-9)
    return dict(sorted(found.items()))


@contextlib.contextmanager
def measured_counters(environment: Mapping[str, str]) -> Iterator[Read]:
    """Those of sockets and their memory, and of the GPUs that a program with this environment sees."""
    settings = settings_from_environment(environment)
    sockets = rapl.open_sensors(root=settings.powercap_root).sensors
    held = False
    try:
        watches: dict[str, Watch] = {}
        uuids = _visible(settings.cuda_visible, settings.cuda_order)
        if uuids:
            hold_library()
            held = True
            watches = _watches(uuids)
        yield lambda: {**_read_sockets(sockets), **_read_gpus(watches)}
    finally:
        for sensor in sockets:
            sensor.close()
        if held:
            release_library()


def _visible(visible: str | None, order: str | None) -> set[str]:
    found = nvml_sensors.open_sensors(visible=visible, device_order=order)
    for sensor in found.sensors:
        sensor.close()
    gpus: Any = found.facts.get("gpus") or []
    return {str(gpu["uuid"]) for gpu in gpus}


def _watches(uuids: set[str]) -> dict[str, Watch]:
    lib = nvml()
    found: dict[str, Watch] = {}
    for gpu in open_gpus():

        def read_mj(handle: Any = gpu.handle) -> int:
            return lib.nvmlDeviceGetTotalEnergyConsumption(handle)

        if gpu.uuid in uuids and ask(read_mj) is not None:
            found[gpu.device] = Watch(read_mj, SYSTEM)
    return found


def _read_sockets(sensors: list[Sensor]) -> dict[str, Edge]:
    found: dict[str, Edge] = {}
    for sensor in sensors:
        channels = sensor.channels()
        begin_ns = time.monotonic_ns()
        try:
            readings = sensor.read()
        except SensorLost:
            continue
        end_ns = time.monotonic_ns()
        for _, number, energy_j in readings:
            channel = channels[number]
            # A second die of a socket is the same device: its sum cannot be told from a wrap of one of them.
            if channel.scope == "device" and channel.device not in found:
                middle_ns = (begin_ns + end_ns) // 2
                found[channel.device] = Edge(middle_ns, energy_j, end_ns - begin_ns, channel.wraps_at)
    return found


def _read_gpus(watches: Mapping[str, Watch]) -> dict[str, Edge]:
    """Waits until every counter has stepped once."""
    found: dict[str, Edge] = {}
    for watch in watches.values():
        watch.restart()
    deadline_ns = time.monotonic_ns() + _LONGEST_NS
    while len(found) < len(watches) and time.monotonic_ns() < deadline_ns:
        for device, watch in watches.items():
            change = None if device in found else ask(watch.poll)
            if change is not None:
                found[device] = Edge(change.mono_ns, change.value_mj / 1000, change.gap_ns)
        time.sleep(_POLL_S)
    return found
