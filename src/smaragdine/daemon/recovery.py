"""Sensors whose source may go and come back: we notice, and open it again; waiting costs next to nothing."""

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

# Sensors whose source may go and come back: a driver is reloaded, a zone vanishes for a while. The lane's
# thread reads them. Once a second another thread looks for what is lost, because opening a GPU takes up to a
# second. A channel keeps its number. Between loss and return it has no readings.

GIVE_UP_AFTER = 20  # failures of one sensor in a row

# Is told what happened, in words, and the numbers of the channels concerned.
Tell = Callable[[str, str, tuple[int, ...]], None]
# Finds lost channels that can be read again: gives a new sensor for each, or one for several.
Reopen = Callable[[Sequence[Channel]], Sequence[Sensor]]
# Finds channels whose source has gone without anybody saying so.
Gone = Callable[[Sequence[Channel]], Sequence[Channel]]


@dataclass
class _Part:
    """A sensor that we read now, and which of our channels each of its channels is (None: not wanted)."""

    sensor: Sensor
    places: list[int | None]
    failures: int = 0
    ended: int = 0


class Returning:
    """Reads like the sensor that it was made from, and never ends."""

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
        """The channels that are lost."""
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
        """Close what was lost: nobody may hold a driver that we want to open anew."""
        while self._leaving:
            with contextlib.suppress(Exception):
                self._leaving.pop().close()

    def vanish(self, channels: Sequence[Channel]) -> None:
        """Note that these channels have lost their source."""
        self._vanished = [place for place, channel in enumerate(self._channels) if channel in channels]

    def offer(self, sensor: Sensor) -> bool:
        """Offer a sensor that reads some of the lost channels. Returns whether it was taken."""
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
        # A sensor may lose one of its channels and go on with the others.
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
    """Try to get back what is lost: once for each source, however many of its sensors are lost."""
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
    """How sensors come back, by name. Those that are not named here never do."""
    uuids = gpu_uuids(facts)
    return {
        "rapl": lambda lost: _rapl(settings.powercap_root, lost, clock, open_file),
        "hwmon": lambda lost: _matching(
            hwmon.open_sensors(root=settings.hwmon_root, clock=clock).sensors, lost
        ),
        "nvml": lambda lost: _nvml(uuids, lost, settings.pcie, clock),
    }


def ways_to_miss(settings: SensorSettings) -> dict[str, Gone]:
    """How zones vanish from a mirrored tree. Nobody says so: an open file outlives its name."""

    paths = _zone_files(settings.powercap_root)

    def gone(channels: Sequence[Channel]) -> Sequence[Channel]:
        return [c for c in channels if c.detail in paths and not os.path.exists(paths[c.detail])]

    return {"rapl": gone}


def gpu_uuids(facts: Mapping[str, object]) -> dict[str, str]:
    """gpu:N → UUID, as found at start."""
    gpus = facts.get("gpus")
    return {gpu["device"]: gpu["uuid"] for gpu in gpus} if isinstance(gpus, list) else {}


def running_pids(uuids: Mapping[str, str]) -> dict[str, frozenset[int]]:
    """The processes that compute on each GPU, without GPUs that do not tell. Raises nothing."""
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
    """Find GPUs by UUID: a reloaded driver numbers those that it finds, and one may be missing."""
    sensors: list[Sensor] = []
    for device in sorted({channel.device for channel in lost}):
        uuid = uuids.get(device)
        # Opening takes a second of polling, so open only a GPU that answers.
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
    """The sensors that read something lost. Closes the others."""
    wanted = {(channel.device, channel.quantity) for channel in lost}
    kept: list[Sensor] = []
    for sensor in sensors:
        if wanted.intersection((channel.device, channel.quantity) for channel in sensor.channels()):
            kept.append(sensor)
        else:
            sensor.close()
    return kept
