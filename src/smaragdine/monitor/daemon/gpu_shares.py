"""Whose a GPU's energy was: in equal parts of those that were on it when it was used.

Its readings come late, a second's at a time. Who is on it is known at once and kept until they come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from smaragdine.monitor.daemon.shares import Device, Used, equal_shares

_MOST_LOOKS = 1000  # of a GPU that is not read


@dataclass(frozen=True)
class _Look:
    """Who was on it from then until the next look; None: nobody can tell."""

    from_ns: int
    on_it: frozenset[str] | None
    inside: Mapping[str, str]


@dataclass
class Gpu:
    """One GPU: what it used, and who was on it since the last reading."""

    device: Device
    _looks: list[_Look] = field(default_factory=list[_Look])
    _cut_uj: int = 0

    def look(self, now_ns: int, on_it: frozenset[str] | None, inside: Mapping[str, str]) -> None:
        last = self._looks[-1] if self._looks else None
        if last is None or (on_it, inside) != (last.on_it, last.inside):
            self._looks.append(_Look(now_ns, on_it, dict(inside)))
            del self._looks[:-_MOST_LOOKS]

    def restart(self) -> None:
        """The clock was set or stood still: nobody can tell who was on it at the times of readings before."""
        self._looks.clear()
        self._cut_uj = self.device.at(self.device.last_ns)

    def cut(self, sessions: Sequence[str]) -> dict[str, Used]:
        """What each session used since the last cut, up to the last reading; none where nobody can tell.

        Those that have ended keep their part: what is theirs is not shared among the others.
        """
        last_ns = self.device.last_ns
        used: dict[str, Used] = {}
        ends_ns = [*(look.from_ns for look in self._looks[1:]), last_ns]
        for look, end_ns in zip(self._looks, ends_ns, strict=False):
            begin_uj = max(self.device.at(min(look.from_ns, last_ns)), self._cut_uj)
            self._cut_uj = max(self.device.at(min(end_ns, last_ns)), begin_uj)
            if look.on_it is None:
                continue
            for key, part in equal_shares(self._cut_uj - begin_uj, look.on_it, sessions, look.inside).items():
                total = used.setdefault(key, Used())
                total.own += part.own
                total.exclusive += part.exclusive
        # The look that holds at the last reading, and those after it, are still needed.
        past = [look for look in self._looks if look.from_ns <= last_ns]
        del self._looks[: max(len(past) - 1, 0)]
        return used
