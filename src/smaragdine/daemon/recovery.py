"""Sensors whose source may go and come back: noticed, opened again, and cheap while it stays away."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smaragdine.clock import Clock
from smaragdine.sensors import hwmon, rapl
from smaragdine.sensors.base import Channel, Sensor, SensorLost
from smaragdine.sensors.discover import SensorSettings
from smaragdine.sensors.nvml import discover
from smaragdine.sensors.nvml.gpus import ask, hold_library, release_library, text
from smaragdine.sensors.nvml.gpus import nvml as binding
from smaragdine.sensors.processes import DescriptorSensor, OpenChannel, fetch_decimal

# Sensors whose source may go and come back: a driver reloaded, a zone that vanished for a while.
#
# The lane's thread reads; a second one looks once a second for what is lost, since opening a GPU takes up to
# a second. A channel keeps its number, and between loss and return there is no reading.

GIVE_UP_AFTER = 20  # failures of one sensor in a row

# What happened, in words, and the numbers of the channels it happened to.
Tell = Callable[[str, str, tuple[int, ...]], None]
# Of the lost channels, those that can be read again: a new sensor each, or one for several.
Reopen = Callable[[Sequence[Channel]], Sequence[Sensor]]
# Of the channels, those whose source is not there any more though nobody said so.
Gone = Callable[[Sequence[Channel]], Sequence[Channel]]


@dataclass
class _Part:
    """A sensor that is being read, and the place of each of its channels among ours (None: not wanted)."""

    sensor: Sensor
    places: list[int | None]
    failures: int = 0
    ended: int = 0


class Returning:
    """Reads like the sensor it was made of, and never ends."""

    def __init__(self, sensor: Sensor, numbers: Sequence[int], tell: Tell) -> None:
        self.lane = sensor.lane
        self.period_ns = sensor.period_ns
        self._channels = tuple(sensor.channels())
        self._numbers = tuple(numbers)
        self._tell = tell
        self._parts = [_Part(sensor, list(range(len(self._channels))))]
        self._arriving: list[_Part] = []
        self._leaving: list[Sensor] = []
        self._vanished: list[int] = []
        self._lost: set[int] = set()

    def channels(self) -> Sequence[Channel]:
        return self._channels

    @property
    def lost(self) -> list[Channel]:
        """Channels that wait for their return."""
        return [] if self._arriving else [self._channels[place] for place in sorted(self._lost)]

    @property
    def present(self) -> list[Channel]:
        return [channel for place, channel in enumerate(self._channels) if place not in self._lost]

    def read(self) -> Sequence[tuple[int, int, float]]:
        if self._arriving:
            self._welcome(self._arriving.pop(0))
        if self._vanished:
            vanished, self._vanished = self._vanished, []
            for part in list(self._parts):
                self._lose(part, vanished, "it is not there any more")
        readings: list[tuple[int, int, float]] = []
        for part in list(self._parts):
            for t_ns, index, value in self._read(part):
                place = part.places[index]
                if place is not None:
                    readings.append((t_ns, place, value))
        return readings

    def close(self) -> Sequence[tuple[int, int, float]]:
        readings: list[tuple[int, int, float]] = []
        for part in self._parts:
            for t_ns, index, value in part.sensor.close():
                place = part.places[index]
                if place is not None:
                    readings.append((t_ns, place, value))
        self.let_go()
        return readings

    def let_go(self) -> None:
        """Close what was lost; a driver that is to be opened anew must not be held any more."""
        while self._leaving:
            with contextlib.suppress(Exception):
                self._leaving.pop().close()

    def vanish(self, channels: Sequence[Channel]) -> None:
        """These have no source any more."""
        self._vanished = [place for place, channel in enumerate(self._channels) if channel in channels]

    def offer(self, sensor: Sensor) -> bool:
        """A sensor that reads some of the lost channels; whether it is taken."""
        places: list[int | None] = []
        left = set(self._lost) if not self._arriving else set[int]()
        for channel in sensor.channels():
            same = [place for place in sorted(left) if _same(self._channels[place], channel)]
            places.append(same[0] if same else None)
            left -= set(same[:1])
        if all(place is None for place in places):
            return False
        self._arriving.append(_Part(sensor, places))
        return True

    def _read(self, part: _Part) -> Sequence[tuple[int, int, float]]:
        try:
            readings = part.sensor.read()
            part.failures = 0
        except SensorLost as lost:
            self._lose(part, range(len(self._channels)), str(lost))
            return ()
        except Exception as error:
            part.failures += 1
            if part.failures >= GIVE_UP_AFTER:
                self._lose(part, range(len(self._channels)), f"{type(error).__name__}: {error}")
            return ()
        # A sensor of several channels may lose one and go on with the others.
        ended: Mapping[str, str] = getattr(part.sensor, "ended", {})
        if len(ended) != part.ended:
            part.ended = len(ended)
            for index, channel in enumerate(part.sensor.channels()):
                why = ended.get(f"{channel.name} ({channel.detail})")
                place = part.places[index]
                if why is not None and place is not None:
                    self._lose(part, [place], why)
        return readings

    def _lose(self, part: _Part, places: Sequence[int], why: str) -> None:
        lost = [place for place in part.places if place is not None and place in places]
        if lost:
            self._lost.update(lost)
            part.places = [None if place in lost else place for place in part.places]
            self._say("sensor_lost", lost, f": {why}")
        if all(place is None for place in part.places):
            self._parts.remove(part)
            self._leaving.append(part.sensor)

    def _welcome(self, part: _Part) -> None:
        back = [place for place in part.places if place is not None]
        self._lost.difference_update(back)
        self._parts.append(part)
        self._say("sensor_back", back, "")

    def _say(self, name: str, places: Sequence[int], why: str) -> None:
        names = ", ".join(dict.fromkeys(self._channels[place].name for place in places))
        self._tell(name, f"{names}{why}", tuple(self._numbers[place] for place in places))


def mend(sensors: Sequence[Returning], reopen: Mapping[str, Reopen], gone: Mapping[str, Gone]) -> None:
    """Try to get back what is lost: once per source, however many sensors of it are lost."""
    for sensor in sensors:
        sensor.let_go()
        for source, find in gone.items():
            vanished = find([channel for channel in sensor.present if channel.sensor == source])
            if vanished:
                sensor.vanish(vanished)
    for source, open_again in reopen.items():
        lost = [channel for sensor in sensors for channel in sensor.lost if channel.sensor == source]
        for opened in open_again(lost) if lost else ():
            if not any(sensor.lane == opened.lane and sensor.offer(opened) for sensor in sensors):
                with contextlib.suppress(Exception):
                    opened.close()


def _same(ours: Channel, other: Channel) -> bool:
    """Whether two are the same quantity of the same source. NVML words its details anew at each start."""
    if (ours.device, ours.quantity, ours.sensor) != (other.device, other.quantity, other.sensor):
        return False
    return ours.sensor == "nvml" or ours.detail == other.detail


OpenFile = Callable[[Path], int]


def open_read_only(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def ways_back(
    settings: SensorSettings, facts: Mapping[str, object], clock: Clock, open_file: OpenFile
) -> dict[str, Reopen]:
    """By the name of the sensor. What is not here never returns."""
    uuids = gpu_uuids(facts)
    return {
        "rapl": lambda lost: _rapl(settings.powercap_root, lost, clock, open_file),
        "hwmon": lambda lost: _matching(
            hwmon.open_sensors(root=settings.hwmon_root, clock=clock).sensors, lost
        ),
        "nvml": lambda lost: _nvml(uuids, lost, settings.pcie, clock),
    }


def ways_to_miss(settings: SensorSettings) -> dict[str, Gone]:
    """A zone of a mirrored tree goes without a word: an open file outlives its name."""

    paths = _zone_files(settings.powercap_root)

    def gone(channels: Sequence[Channel]) -> Sequence[Channel]:
        return [c for c in channels if c.detail in paths and not os.path.exists(paths[c.detail])]

    return {"rapl": gone}


def gpu_uuids(facts: Mapping[str, object]) -> dict[str, str]:
    """gpu:N → UUID, as found at start."""
    gpus = facts.get("gpus")
    return {gpu["device"]: gpu["uuid"] for gpu in gpus} if isinstance(gpus, list) else {}


def running_pids(uuids: Mapping[str, str]) -> dict[str, frozenset[int]]:
    """The processes that compute on each GPU; a GPU that does not tell is left out. Does not raise."""
    try:
        hold_library()
    except Exception:
        return {}
    lib = binding()
    pids: dict[str, frozenset[int]] = {}
    try:
        for device, uuid in uuids.items():
            handle = ask(lib.nvmlDeviceGetHandleByUUID, uuid.encode())
            running = None if handle is None else ask(lib.nvmlDeviceGetComputeRunningProcesses, handle)
            if running is not None:
                pids[device] = frozenset(int(process.pid) for process in running)
    finally:
        release_library()
    return pids


def _rapl(root: Path, lost: Sequence[Channel], clock: Clock, open_file: OpenFile) -> list[Sensor]:
    paths = _zone_files(root)
    sensors: list[Sensor] = []
    for channel in lost:
        path = paths.get(channel.detail)
        if path is None:
            continue
        try:
            fd = open_file(path)
        except OSError:
            continue
        try:
            fetch_decimal(fd)
        except (OSError, ValueError):
            os.close(fd)
            continue
        opened = [OpenChannel(channel, fd, 1e6, path)]
        sensors.append(DescriptorSensor(opened, period_ns=0, lane="counters", clock=clock))
    return sensors


def _zone_files(root: Path) -> dict[str, Path]:
    try:
        return {zone.detail: zone.path / "energy_uj" for zone in rapl.find_zones(root)}
    except OSError:
        return {}


def _nvml(uuids: Mapping[str, str], lost: Sequence[Channel], pcie: bool, clock: Clock) -> list[Sensor]:
    """By UUID: a driver that is loaded anew numbers the GPUs that it finds, and one may be missing."""
    sensors: list[Sensor] = []
    for device in sorted({channel.device for channel in lost}):
        uuid = uuids.get(device)
        # Opening takes a second of polling: only for a GPU that answers.
        if uuid is not None and _answers(uuid):
            number = {uuid: int(device.removeprefix("gpu:"))}
            found = discover.open_sensors(
                visible=uuid, device_order=None, pcie=pcie, clock=clock, numbers=number
            )
            sensors += _matching(found.sensors, [channel for channel in lost if channel.device == device])
    return sensors


def _answers(uuid: str) -> bool:
    lib = binding()
    try:
        hold_library()
    except lib.NVMLError:
        return False
    try:
        handle = lib.nvmlDeviceGetHandleByUUID(uuid.encode())
        lib.nvmlDeviceGetTemperature(handle, lib.NVML_TEMPERATURE_GPU)
        return text(lib.nvmlDeviceGetUUID(handle)) == uuid
    except lib.NVMLError_NotSupported:
        return True
    except lib.NVMLError:
        return False
    finally:
        release_library()


def _matching(sensors: Sequence[Sensor], lost: Sequence[Channel]) -> list[Sensor]:
    """Those that read something lost; the others are closed again."""
    wanted = {(channel.device, channel.quantity) for channel in lost}
    kept: list[Sensor] = []
    for sensor in sensors:
        if wanted.intersection((channel.device, channel.quantity) for channel in sensor.channels()):
            kept.append(sensor)
        else:
            sensor.close()
    return kept
