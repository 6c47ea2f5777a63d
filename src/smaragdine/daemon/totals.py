"""Running totals: the energy of each device from its counters, its samples or both, and who used it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smaragdine.daemon.log import Times, Values
from smaragdine.sensors.base import Channel, Provenance, Scope
from smaragdine.sensors.energy import can_be, growth, stretches
from smaragdine.system import boot_id

# A running total as a function of time. Energy is whole µJ, the unit of RAPL's counters, and CPU time whole
# ns, so that shares of a total never add up to more than it.

_KEEP_NS = 5_000_000_000
_CARRY_NS = 2_500_000_000
_MOST_WAITING = 100


@dataclass
class EnergyLine:
    """A total that grows by what is added. Between two points it is a straight line."""

    total: int = 0
    holes: int = 0  # stretches of time of which nothing is known
    since_ns: int | None = None  # the first point after the last of them; None: it lasts still
    t_ns: list[int] = field(default_factory=list[int])
    at_t: list[int] = field(default_factory=list[int])

    def add(self, t_ns: int, amount: int) -> None:
        """Grow until `t_ns`. If the clock was set back, a new stretch begins."""
        self.total += max(amount, 0)
        if self.t_ns and t_ns <= self.t_ns[-1]:
            if t_ns == self.t_ns[-1]:
                self.at_t[-1] = self.total
                return
            del self.t_ns[:], self.at_t[:]
            self.since_ns = None
        if self.since_ns is None:
            self.since_ns = t_ns
        self.t_ns.append(t_ns)
        self.at_t.append(self.total)

    def break_off(self) -> None:
        """From now until the next point nothing is known."""
        self.holes += 1
        self.since_ns = None

    def at(self, t_ns: int) -> int:
        """The total at a time. It stands still before the first point that is kept, and after the last."""
        after = bisect_right(self.t_ns, t_ns)
        if after == 0:
            return self.at_t[0] if self.at_t else self.total
        if after == len(self.t_ns):
            return self.total
        begin_ns, end_ns = self.t_ns[after - 1], self.t_ns[after]
        begin, end = self.at_t[after - 1], self.at_t[after]
        return begin + (end - begin) * (t_ns - begin_ns) // (end_ns - begin_ns)

    def carried_to(self, t_ns: int) -> int:
        """As `at`, but the last stretch goes on for a short while into what is not read yet."""
        late_ns = t_ns - self.last_ns
        if len(self.t_ns) < 2 or not 0 < late_ns <= _CARRY_NS:
            return self.at(t_ns)
        length_ns = self.t_ns[-1] - self.t_ns[-2]
        return self.total + (self.at_t[-1] - self.at_t[-2]) * late_ns // length_ns

    @property
    def last_ns(self) -> int:
        return self.t_ns[-1] if self.t_ns else 0

    def forget_before(self, t_ns: int) -> None:
        keep = max(bisect_left(self.t_ns, min(t_ns, self.last_ns - _KEEP_NS)) - 1, 0)
        if keep > 256:
            del self.t_ns[:keep], self.at_t[:keep]


@dataclass
class Counter:
    """Adds up the differences of a counter's readings, also where it wraps round, but never across a gap."""

    line: EnergyLine
    wraps_at: int | None = None
    joules: float | None = None  # joules of one count; null: it counts something else
    last: int | None = None
    last_ns: int = 0

    def add(self, t_ns: Times, counts: list[int]) -> None:
        if not counts:
            return
        first = (counts[0], int(t_ns[0])) if self.last is None else (self.last, self.last_ns)
        total = np.array([first[0], *counts], dtype=np.int64)
        since_ns = np.diff(np.concatenate([np.array([first[1]], dtype=np.int64), t_ns]))
        grown, known = growth(total, since_ns, self.wraps_at, self.joules)
        for now_ns, amount in zip(t_ns.tolist(), np.where(known, grown, 0).tolist(), strict=True):
            self.line.add(now_ns, amount)
        self.last, self.last_ns = counts[-1], int(t_ns[-1])

    def break_off(self) -> None:
        """From now until the next reading nothing is known."""
        self.last = None
        self.line.break_off()


@dataclass
class Samples:
    """Turns samples of power into a line, each for the time that it stands for.

    Where a counter counts the same device, the counter says how high the line is, and the samples say what
    came since. A line that is too high waits for the counter instead of falling.
    """

    line: EnergyLine
    channel: Channel
    counter: Counter | None = None
    last: tuple[int, float] | None = None
    level: int | None = None  # how much higher this line is than the counter's own
    owed: int = 0
    paid: EnergyLine = field(default_factory=EnergyLine)
    waiting: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    rest_nj: int = 0

    def add(self, t_ns: Times, power_w: Values) -> None:
        known = can_be(power_w)
        t_ns, power_w = t_ns[known], power_w[known]
        # The clock was set back: begin anew.
        back = np.flatnonzero(np.diff(t_ns) < 0) + 1
        for times_ns, watts in zip(np.split(t_ns, back), np.split(power_w, back), strict=True):
            if not times_ns.size:
                continue
            before = self.last if self.last is not None and self.last[0] <= times_ns[0] else None
            for start_ns, end_ns, power in zip(
                *(column.tolist() for column in stretches(self.channel, times_ns, watts, before)), strict=True
            ):
                if start_ns < self.line.last_ns < end_ns:
                    start_ns = self.line.last_ns  # its window reaches back over a break
                elif start_ns > self.line.last_ns:
                    self.line.add(start_ns, 0)
                # W × ns are nJ. Round the sum, not each of them.
                self._grow(end_ns, round(power * (end_ns - start_ns)))
                self._settle()
            if before is None or before[0] < times_ns[-1]:
                first = int(np.searchsorted(times_ns, times_ns[-1]))  # the counter's reading with this stamp
                self.last = (int(times_ns[first]), float(watts[first]))

    def add_counter(self, t_ns: Times, counts: list[int]) -> None:
        """Take the counter's readings, which wait for the samples of a second later."""
        assert self.counter is not None
        for i, now_ns in enumerate(t_ns.tolist()):
            if self.counter.last is None:
                self.level = None
            self.counter.add(t_ns[i : i + 1], counts[i : i + 1])
            self.waiting.append((now_ns, self.counter.line.total))
            del self.waiting[:-_MOST_WAITING]
        self._settle()

    def break_off(self) -> None:
        """From now until both are read again nothing is known."""
        self.last, self.level = None, None
        self.line.break_off()
        self.waiting.clear()
        if self.counter is not None:
            self.counter.break_off()

    def _grow(self, t_ns: int, amount_nj: int) -> None:
        self.rest_nj += amount_nj
        amount, self.rest_nj = divmod(self.rest_nj, 1000)
        paid = min(self.owed, amount)
        self.owed -= paid
        self.line.add(t_ns, amount - paid)
        self.paid.add(t_ns, paid)

    def _settle(self) -> None:
        while self.waiting and self.waiting[0][0] <= self.line.last_ns:
            t_ns, counted = self.waiting.pop(0)
            if self.level is None:
                self.level = self.line.at(t_ns) - counted
                continue
            paid_since = self.paid.total - self.paid.at(t_ns)
            too_high = self.line.at(t_ns) - (self.level + counted) - paid_since
            self.owed = max(too_high, 0)
            if too_high < 0:
                self.line.add(self.line.last_ns, -too_high)


# Splits the energy of a socket, its package and its memory, by CPU time, in intervals of 100 ms to a second.
# All figures are whole µJ and ns, rounded down: what sessions get never adds up to more than the device used.

# The kernel counts idle time in ticks of 10 ms (accounting/activity.py has the same bounds).
_LEAST_NS = 100_000_000
_LEAST_BUSY_NS = 100_000_000
_MOST_NS = 1_000_000_000
# We wait for a session that is read once a second, but not for one that is not read at all.
_PATIENCE_NS = 2_500_000_000


@dataclass
class SessionUse:
    """µJ of a device that a session used: with all its processes, and with those of no session within."""

    own: int = 0
    exclusive: int = 0


@dataclass
class Lowest:
    """The lowest mean power of any second so far; until there was a whole second, of an interval."""

    uj: int = 0
    ns: int = 0
    whole: bool = False
    _sum_uj: int = 0
    _sum_ns: int = 0

    @property
    def power_w(self) -> float:
        return self.uj * 1000 / self.ns if self.ns else 0.0

    def add(self, uj: int, ns: int) -> None:
        self._sum_uj += uj
        self._sum_ns += ns
        if self._sum_ns >= _MOST_NS:
            if not self.whole or self._sum_uj * self.ns < self.uj * self._sum_ns:
                self.uj, self.ns, self.whole = self._sum_uj, self._sum_ns, True
            self.forget()
        elif not self.whole and (not self.ns or uj * self.ns < self.uj * ns):
            self.uj, self.ns = uj, ns

    def forget(self) -> None:
        """Begin a new second: what came so far is no part of it."""
        self._sum_uj = self._sum_ns = 0

    def over(self, ns: int) -> int:
        """µJ that the idle device uses in this time."""
        return self.uj * ns // self.ns if self.ns else 0


@dataclass
class DeviceLines:
    """The lines that add up to one device (the dies of a package), and how low its power goes."""

    lines: list[EnergyLine] = field(default_factory=list)
    lowest: Lowest = field(default_factory=Lowest)
    _holes: int = 0

    def at(self, t_ns: int) -> int:
        return sum(line.at(t_ns) for line in self.lines)

    def carried_to(self, t_ns: int) -> int:
        return sum(line.carried_to(t_ns) for line in self.lines)

    @property
    def last_ns(self) -> int:
        """Until when all of its lines have been read."""
        return min(line.last_ns for line in self.lines)

    @property
    def is_known(self) -> bool:
        """Whether it was ever read."""
        return any(line.t_ns for line in self.lines)

    def is_whole(self, t_ns: int) -> bool:
        """Whether it was read up to `t_ns` without a gap since the last call."""
        holes = sum(line.holes for line in self.lines)
        whole = holes == self._holes and self.last_ns >= t_ns
        self._holes = holes
        return whole


@dataclass
class Socket:
    """The devices of one socket, how long it was busy, and the CPU time of each session on it."""

    cpus: int
    busy: Counter = field(default_factory=lambda: Counter(EnergyLine()))
    monitor: Counter = field(default_factory=lambda: Counter(EnergyLine()))
    devices: dict[str, DeviceLines] = field(default_factory=dict)
    programs: dict[str, Counter] = field(default_factory=dict)
    _cut_ns: int = 0
    _before: dict[str, int] = field(default_factory=dict)

    def restart(self) -> None:
        """The clock was set or stood still: no interval may reach across."""
        self._cut_ns = 0

    def next_cut_ns(self) -> int | None:
        """Where the current interval may end: it is long enough, and everything it needs has been read."""
        newest_ns = self.busy.line.last_ns
        lines = [line for device in self.devices.values() for line in device.lines]
        lines += [program.line for program in self.programs.values()]
        read_ns = [line.last_ns for line in lines if line.last_ns > newest_ns - _PATIENCE_NS]
        at_ns = min([newest_ns, *read_ns])
        if at_ns < self._cut_ns:
            self.restart()  # the clock was set back
        if not self._cut_ns:
            return at_ns or None
        length_ns = at_ns - self._cut_ns
        if length_ns < _LEAST_NS:
            return None
        spent_ns = self.busy.line.at(at_ns) - self._before["busy"]
        return at_ns if spent_ns >= _LEAST_BUSY_NS or length_ns >= _MOST_NS else None

    def cut_early(self, at_ns: int, inside: Mapping[str, str]) -> dict[tuple[str, str], SessionUse]:
        """As `cut`, for a session that ends. Gives nothing where the interval would be shorter than usual."""
        return self.cut(at_ns, inside) if self._cut_ns and at_ns - self._cut_ns >= _LEAST_NS else {}

    def cut(self, at_ns: int, inside: Mapping[str, str]) -> dict[tuple[str, str], SessionUse]:
        """What each session used of each device since the last cut."""
        begin_ns, before = self._cut_ns, self._before
        now = {"busy": self.busy.line.carried_to(at_ns), "monitor": self.monitor.line.carried_to(at_ns)}
        now |= {f"device {name}": device.at(at_ns) for name, device in self.devices.items()}
        now |= {f"session {key}": program.line.at(at_ns) for key, program in self.programs.items()}
        self._cut_ns, self._before = at_ns, now
        whole = {name: device.is_whole(at_ns) for name, device in self.devices.items()}
        if not begin_ns or at_ns <= begin_ns:
            return {}
        # A session that came since began at 0.
        spent = {key: max(value - before.get(key, 0), 0) for key, value in now.items()}
        own_ns = {key: spent[f"session {key}"] for key in self.programs}
        exclusive_ns = exclusive(own_ns, inside)
        used_ns = sum(exclusive_ns.values())
        busy_ns = max(spent["busy"], used_ns + spent["monitor"])
        wall_ns = max((at_ns - begin_ns) * self.cpus, used_ns)
        used: dict[tuple[str, str], SessionUse] = {}
        for name, device in self.devices.items():
            uj = spent[f"device {name}"]
            if whole[name]:
                device.lowest.add(uj, at_ns - begin_ns)
            else:
                device.lowest.forget()
            static_uj = min(device.lowest.over(at_ns - begin_ns), uj)
            for key in self.programs:
                parts = [
                    _part(uj - static_uj, ns, busy_ns) + _part(static_uj, ns, wall_ns)
                    for ns in (own_ns[key], exclusive_ns[key])
                ]
                used[key, name] = SessionUse(*parts)
        return used

    def forget(self) -> None:
        """Drop points that no interval needs any more."""
        lines = [self.busy.line, self.monitor.line, *(program.line for program in self.programs.values())]
        for line in lines:
            line.forget_before(self._cut_ns)


def exclusive(own: Mapping[str, int], inside: Mapping[str, str]) -> dict[str, int]:
    """What each session used without the sessions within it."""
    left = dict(own)
    for inner, outer in inside.items():
        if inner in own and outer in left:
            left[outer] -= own[inner]
    return {key: max(value, 0) for key, value in left.items()}


def equal_shares(
    uj: int, on_it: frozenset[str], sessions: Sequence[str], inside: Mapping[str, str]
) -> dict[str, SessionUse]:
    """Split a device's energy in equal parts among those on it. A session has the parts of those within it
    too.

    Some of those on it may not be in `sessions`. Their parts are nobody's, or belong to the sessions around
    them.
    """
    used = {key: SessionUse() for key in sessions}
    if not on_it:
        return used
    parts = dict.fromkeys(sessions, 0)
    for key in on_it:
        if key in used:
            used[key].exclusive = uj // len(on_it)
        around: str | None = key
        while around is not None:
            if around in parts:
                parts[around] += 1
            around = inside.get(around)
    for key in sessions:
        used[key].own = uj * parts[key] // len(on_it)
    return used


def _part(uj: int, ns: int, of_ns: int) -> int:
    return uj * ns // of_ns if of_ns else 0


_POWER_OVER_NS = 1_000_000_000
_STALE_PERIODS = 3
# Whatever period a channel names, we read idle counters, and fetch a GPU's samples, once a second.
_LEAST_PERIOD_NS = 1_000_000_000
_MOST_AWAY_NS = 60_000_000_000  # RAPL wraps round within minutes, so a longer absence may hide a round.


@dataclass(frozen=True)
class RunningTotal:
    """What a device has used since it was first read, and its power over the last second.

    It has no power where nothing was read lately, or the sensor is lost.
    """

    device: str
    energy_j: float
    power_w: float | None
    provenance: Provenance
    scope: Scope
    last_ns: int


class Gauges:
    """A gauge for each device, which counts it once, whatever reads it. Parts of a device have none."""

    def __init__(self, channels: Mapping[int, Channel]) -> None:
        self.devices: dict[str, DeviceLines] = {}
        self.channel_of: dict[str, Channel] = {}
        self._lines: dict[int, EnergyLine] = {}
        self._counters: dict[int, Counter] = {}
        self._samples: dict[int, Samples] = {}
        self._boot_id = boot_id()
        self._same_boot = True
        self._levels: dict[int, Samples] = {}  # a counter's number → the samples whose level it sets
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
                self._levels[number].counter = Counter(EnergyLine(), wraps_at, 1e-6)
            else:
                self._counters[number] = Counter(self._line(number, channel), wraps_at, 1e-6)

    def read(self, number: int, t_ns: Times, value: Values, lost_ns: int | None = None) -> None:
        """Take a channel's readings, in order. `lost_ns`: when its sensor was lost, if it was."""
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
        """From now until the next reading nothing is known, of a channel or of all."""
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

    def totals(self, now_ns: int) -> list[RunningTotal]:
        return [
            RunningTotal(
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
        """Go on from a `state`. What a counter counted while nobody looked is its device's."""
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
        """Everything that was read before the restart has come, and what is read anew begins. A reboot sets
        counters back, which would look like wrapping round."""
        if not self._same_boot:
            self.break_off()
        for counter in self._counters.values():
            if not 0 <= now_ns - counter.last_ns <= _MOST_AWAY_NS:
                counter.break_off()

    def _stale_after_ns(self, name: str) -> int:
        return _STALE_PERIODS * max(round(self.channel_of[name].period_ms * 1e6), _LEAST_PERIOD_NS)

    def _line(self, number: int, channel: Channel) -> EnergyLine:
        self.channel_of.setdefault(channel.device, channel)
        self._lines[number] = line = EnergyLine()
        self.devices.setdefault(channel.device, DeviceLines()).lines.append(line)
        return line


def _microjoules(value: Values) -> list[int]:
    return [round(joules * 1e6) for joules in value.tolist()]


def _power_w(device: DeviceLines, oldest_ns: int) -> float | None:
    """The power over the last second that was read; None: long ago, or nothing since a gap."""
    watts = 0.0
    for line in device.lines:
        if line.since_ns is None or line.last_ns < oldest_ns:
            return None
        begin_ns = max(line.last_ns - _POWER_OVER_NS, line.since_ns, line.t_ns[0])
        if line.last_ns <= begin_ns:
            return None
        watts += (line.total - line.at(begin_ns)) * 1000 / (line.last_ns - begin_ns)
    return watts
