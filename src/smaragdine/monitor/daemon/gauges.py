"""Running energy of each device, from its counters, its samples, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from smaragdine.monitor.daemon.batch import Times, Values
from smaragdine.monitor.daemon.line import Counter, Line, Samples
from smaragdine.monitor.daemon.shares import Device
from smaragdine.sensors.base import Channel, Provenance, Scope
from smaragdine.sensors.kernel import boot_id

_POWER_OVER_NS = 1_000_000_000
_STALE_PERIODS = 3
# Whatever period a channel names: idle counters are read, and a GPU's samples fetched, once a second.
_LEAST_PERIOD_NS = 1_000_000_000
_MOST_AWAY_NS = 60_000_000_000  # RAPL wraps round within minutes: a longer absence may hide one


@dataclass(frozen=True)
class DeviceTotal:
    """What a device has used since it was first read, and its power over the last second.

    There is no power where nothing was read lately, or the sensor is lost.
    """

    device: str
    energy_j: float
    power_w: float | None
    provenance: Provenance
    scope: Scope
    last_ns: int


class Gauges:
    """One gauge per device: whatever reads it, it is counted once. Parts of a device have none."""

    def __init__(self, channels: Mapping[int, Channel]) -> None:
        self.devices: dict[str, Device] = {}
        self.channel_of: dict[str, Channel] = {}
        self._lines: dict[int, Line] = {}
        self._counters: dict[int, Counter] = {}
        self._samples: dict[int, Samples] = {}
        self._boot_id = boot_id()
        self._same_boot = True
        self._levels: dict[int, Samples] = {}  # a counter's number → the samples it sets the level of
        whole = {number: channel for number, channel in channels.items() if channel.scope != "part"}
        counters = {n: c for n, c in whole.items() if c.quantity == "energy" and c.kind == "counter"}
        samples = {n: c for n, c in whole.items() if c.quantity == "power" and c.kind == "sample"}
        for number, channel in samples.items():
            self._samples[number] = Samples(self._line(number, channel), channel)
        by_device = {channel.device: number for number, channel in samples.items()}
        for number, channel in counters.items():
            wraps_at = None if channel.wraps_at is None else round(channel.wraps_at * 1e6)
            if channel.device in by_device:
                self._levels[number] = self._samples[by_device[channel.device]]
                self._levels[number].counter = Counter(Line(), wraps_at, 1e-6)
            else:
                self._counters[number] = Counter(self._line(number, channel), wraps_at, 1e-6)

    def read(self, number: int, t_ns: Times, value: Values, lost_ns: int | None = None) -> None:
        """A channel's readings, in order; `lost_ns`: when its sensor was lost, if it was."""
        if lost_ns is not None:
            at = int(np.searchsorted(t_ns, lost_ns, side="right"))
            self.read(number, t_ns[:at], value[:at])
            self.break_off(number)
            t_ns, value = t_ns[at:], value[at:]
        if number in self._samples:
            self._samples[number].add(t_ns, value)
        elif number in self._counters:
            self._counters[number].add(t_ns, _microjoules(value))
        elif number in self._levels:
            self._levels[number].add_counter(t_ns, _microjoules(value))

    def break_off(self, number: int | None = None) -> None:
        """Nothing is known from now until the next reading: of a channel, or of all."""
        gauges = {**self._counters, **self._samples, **self._levels}
        for gauge in gauges.values() if number is None else [gauges[number]] if number in gauges else []:
            gauge.break_off()

    def forget(self) -> None:
        """Drop old points."""
        lines = [*self._lines.values()]
        for samples in self._samples.values():
            lines += [samples.paid, *([samples.counter.line] if samples.counter is not None else [])]
        for line in lines:
            line.forget_before(line.last_ns)

    def totals(self, now_ns: int) -> list[DeviceTotal]:
        return [
            DeviceTotal(
                device=name,
                energy_j=sum(line.total for line in device.lines) / 1e6,
                power_w=_power_w(device, now_ns - self._stale_after_ns(name)),
                provenance=self.channel_of[name].provenance,
                scope=self.channel_of[name].scope,
                last_ns=device.last_ns,
            )
            for name, device in self.devices.items()
            if device.is_known
        ]

    def state(self) -> dict[str, Any]:
        """What a restarted daemon needs to go on counting."""
        counters = {n: [c.last, c.last_ns] for n, c in self._counters.items() if c.last is not None}
        totals = {n: line.total for n, line in self._lines.items()}
        return {"boot_id": self._boot_id, "totals": totals, "counters": counters}

    def load(self, state: Mapping[str, Any], now_ns: int) -> None:
        """Goes on from a `state`. What a counter counted while nobody looked is its device's."""
        self._same_boot = state.get("boot_id") == self._boot_id
        for number, total in state["totals"].items():
            if int(number) in self._lines:
                self._lines[int(number)].total = int(total)
        for number, (last, last_ns) in state["counters"].items():
            counter = self._counters.get(int(number))
            if counter is not None:
                counter.last, counter.last_ns = int(last), int(last_ns)
                counter.line.add(int(last_ns), 0)
        self.go_on(now_ns)

    def go_on(self, now_ns: int) -> None:
        """All that was read before a restart has come: from here on it is read anew.

        A boot sets counters back, which would look like wrapping round.
        """
        if not self._same_boot:
            self.break_off()
        for counter in self._counters.values():
            if not 0 <= now_ns - counter.last_ns <= _MOST_AWAY_NS:
                counter.break_off()

    def _stale_after_ns(self, name: str) -> int:
        return _STALE_PERIODS * max(round(self.channel_of[name].period_ms * 1e6), _LEAST_PERIOD_NS)

    def _line(self, number: int, channel: Channel) -> Line:
        self.channel_of.setdefault(channel.device, channel)
        self._lines[number] = line = Line()
        self.devices.setdefault(channel.device, Device()).lines.append(line)
        return line


def _microjoules(value: Values) -> list[int]:
    return [round(joules * 1e6) for joules in value.tolist()]


def _power_w(device: Device, oldest_ns: int) -> float | None:
    """Over the last second that was read; None where that is older, or nothing has been read since a gap."""
    watts = 0.0
    for line in device.lines:
        if line.since_ns is None or line.last_ns < oldest_ns:
            return None
        begin_ns = max(line.last_ns - _POWER_OVER_NS, line.since_ns, line.t_ns[0])
        if line.last_ns <= begin_ns:
            return None
        watts += (line.total - line.at(begin_ns)) * 1000 / (line.last_ns - begin_ns)
    return watts
