"""How each kind of sensor is opened again after its source went away, cheaply while it stays away."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from smaragdine.clock import Clock
from smaragdine.monitor.daemon.returning import Gone, Reopen
from smaragdine.sensors import hwmon, nvml, rapl
from smaragdine.sensors.base import Channel, Sensor
from smaragdine.sensors.descriptors import DescriptorSensor, OpenChannel, fetch_decimal
from smaragdine.sensors.discover import SensorSettings
from smaragdine.sensors.nvml_gpu import ask, hold_library, release_library, text
from smaragdine.sensors.nvml_gpu import nvml as binding

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
            found = nvml.open_sensors(visible=uuid, device_order=None, pcie=pcie, clock=clock, numbers=number)
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
