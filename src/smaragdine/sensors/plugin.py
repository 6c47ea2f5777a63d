"""Third-party sensors, checked: one that goes wrong ends alone, and writes into no channel but its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points

from smaragdine.sensors.base import Absent, Channel, Found, Sensor, checked

PLUGIN_GROUP = "smaragdine.sensors"


def open_sensors() -> Found:
    """Those of every installed package: a function without arguments that returns `Found`. A broken one is
    absent."""
    found = Found()
    for entry in entry_points(group=PLUGIN_GROUP):
        try:
            plugin: Found = entry.load()()
            sensors = [PluginSensor(sensor) for sensor in plugin.sensors]
        except Exception as error:
            reason = f"the plug-in {entry.value} failed: {type(error).__name__}: {error}"
            found.absent.append(Absent(f"{entry.name} (plug-in)", reason, "update or uninstall that package"))
            continue
        found.sensors.extend(sensors)
        found.absent.extend(plugin.absent)
        found.facts.update(plugin.facts)
    return found


class PluginSensor:
    """Somebody else's sensor. `read` raises where its readings are none: whoever reads counts failures."""

    def __init__(self, sensor: Sensor) -> None:
        self._sensor = sensor
        self._channels = tuple(checked(channel) for channel in sensor.channels())
        self.period_ns = sensor.period_ns
        self.lane = sensor.lane
        self._failed: dict[str, str] = {}

    @property
    def ended(self) -> Mapping[str, str]:
        return {**getattr(self._sensor, "ended", {}), **self._failed}

    def channels(self) -> Sequence[Channel]:
        return self._channels

    def read(self) -> Sequence[tuple[int, int, float]]:
        return self._checked(self._sensor.read())

    def close(self) -> Sequence[tuple[int, int, float]]:
        try:
            return self._checked(self._sensor.close())
        except Exception as error:
            self._failed = {channel.name: f"{type(error).__name__}: {error}" for channel in self._channels}
            return ()

    def _checked(self, readings: Iterable[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
        checked = [(int(t_ns), int(channel), float(value)) for t_ns, channel, value in readings]
        for t_ns, channel, _ in checked:
            if not 0 <= channel < len(self._channels):
                raise ValueError(f"a reading of channel {channel}, of {len(self._channels)}")
            if not 0 <= t_ns < 1 << 62:
                raise ValueError(f"a reading at {t_ns}, which is no time in nanoseconds since 1970")
        return checked
