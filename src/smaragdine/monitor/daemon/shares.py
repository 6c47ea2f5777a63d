"""Whose a socket's energy was: its package and memory, shared by CPU time in intervals of 100 ms to a second.

All in whole µJ and ns, rounded down: what sessions get never adds up to more than the device used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from smaragdine.monitor.daemon.line import Counter, Line

# The kernel counts idle time in ticks of 10 ms (accounting.activity has the same bounds).
_LEAST_NS = 100_000_000
_LEAST_BUSY_NS = 100_000_000
_MOST_NS = 1_000_000_000
# A session read once a second is waited for; one that is not read at all is not.
_PATIENCE_NS = 2_500_000_000


@dataclass
class Used:
    """µJ of a device that were a session's: of all its processes, and of those in no session within it."""

    own: int = 0
    exclusive: int = 0


@dataclass
class Lowest:
    """The lowest mean power of a second so far; of an interval as long as there was no whole second."""

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
        """What came so far is no part of a whole second."""
        self._sum_uj = self._sum_ns = 0

    def over(self, ns: int) -> int:
        """µJ of an idle device."""
        return self.uj * ns // self.ns if self.ns else 0


@dataclass
class Device:
    """Lines that add up to one device (the dies of a package), and how low its power goes."""

    lines: list[Line] = field(default_factory=list)
    lowest: Lowest = field(default_factory=Lowest)
    _holes: int = 0

    def at(self, t_ns: int) -> int:
        return sum(line.at(t_ns) for line in self.lines)

    def carried_to(self, t_ns: int) -> int:
        return sum(line.carried_to(t_ns) for line in self.lines)

    @property
    def last_ns(self) -> int:
        """Until when all of it has been read."""
        return min(line.last_ns for line in self.lines)

    @property
    def is_known(self) -> bool:
        """Whether it was ever read."""
        return any(line.t_ns for line in self.lines)

    def is_whole(self, t_ns: int) -> bool:
        """Whether it was read without a gap since the last call, up to `t_ns`."""
        holes = sum(line.holes for line in self.lines)
        whole = holes == self._holes and self.last_ns >= t_ns
        self._holes = holes
        return whole


@dataclass
class Socket:
    """The devices of one socket, the time it was busy, and the CPU time of each session on it."""

    cpus: int
    busy: Counter = field(default_factory=lambda: Counter(Line()))
    monitor: Counter = field(default_factory=lambda: Counter(Line()))
    devices: dict[str, Device] = field(default_factory=dict)
    programs: dict[str, Counter] = field(default_factory=dict)
    _cut_ns: int = 0
    _before: dict[str, int] = field(default_factory=dict)

    def restart(self) -> None:
        """The clock was set or stood still: no interval reaches across."""
        self._cut_ns = 0

    def next_cut_ns(self) -> int | None:
        """Where the interval that runs may end: it is long enough, and all that it needs has been read."""
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

    def cut_early(self, at_ns: int, inside: Mapping[str, str]) -> dict[tuple[str, str], Used]:
        """As `cut`, for a session that ends; nothing where the interval would be a shorter one than usual."""
        return self.cut(at_ns, inside) if self._cut_ns and at_ns - self._cut_ns >= _LEAST_NS else {}

    def cut(self, at_ns: int, inside: Mapping[str, str]) -> dict[tuple[str, str], Used]:
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
        used: dict[tuple[str, str], Used] = {}
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
                used[key, name] = Used(*parts)
        return used

    def forget(self) -> None:
        """Drop points that no interval needs any more."""
        lines = [self.busy.line, self.monitor.line, *(program.line for program in self.programs.values())]
        for line in lines:
            line.forget_before(self._cut_ns)


def exclusive(own: Mapping[str, int], inside: Mapping[str, str]) -> dict[str, int]:
    """Of each session, what is not that of a session within it."""
    left = dict(own)
    for inner, outer in inside.items():
        if inner in own and outer in left:
            left[outer] -= own[inner]
    return {key: max(value, 0) for key, value in left.items()}


def equal_shares(
    uj: int, on_it: frozenset[str], sessions: Sequence[str], inside: Mapping[str, str]
) -> dict[str, Used]:
    """A device's energy in equal parts among those on it; a session has those within it too.

    Of those on it some may be none of the `sessions`: then their parts are nobody's, or of those around them.
    """
    used = {key: Used() for key in sessions}
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
