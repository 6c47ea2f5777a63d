"""The running energy of every device, and who used it. Each has one gauge, however many sessions look at it.

Sessions share a socket and its memory by CPU time:

    static × program ÷ (wall × CPUs)     static: the lowest power of any second so far
    dynamic × program ÷ busy             dynamic: the rest

Sessions that computed on a GPU share it equally; processes of no session have one more share. `own_j` is what
a session's processes used. Where sessions lie in one another, `own_exclusive_j` counts each process for the
innermost session alone. Over all sessions these add up to the device's energy at most.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smaragdine.daemon.log import Batch
from smaragdine.daemon.totals import (
    Counter,
    DeviceLines,
    EnergyLine,
    Gauges,
    RunningTotal,
    SessionUse,
    Socket,
    equal_shares,
)
from smaragdine.sensors.base import Channel

# Splits a GPU's energy in equal parts among the sessions that were on it when it was used. Readings come
# late, a second's worth at a time. Who is on the GPU is known at once, and kept until they come.

_MOST_LOOKS = 1000  # of a GPU that is not read


@dataclass(frozen=True)
class _Look:
    """Who was on the GPU from this time until the next look; None: nobody can tell."""

    from_ns: int
    on_it: frozenset[str] | None
    inside: Mapping[str, str]


@dataclass
class GpuShares:
    """One GPU: what it used, and who was on it since the last reading."""

    device: DeviceLines
    _looks: list[_Look] = field(default_factory=list[_Look])
    _cut_uj: int = 0

    def look(self, now_ns: int, on_it: frozenset[str] | None, inside: Mapping[str, str]) -> None:
        last = self._looks[-1] if self._looks else None
        if last is None or (on_it, inside) != (last.on_it, last.inside):
            self._looks.append(_Look(now_ns, on_it, dict(inside)))
            del self._looks[:-_MOST_LOOKS]

    def restart(self) -> None:
        """The clock was set or stood still: nobody can tell who was on it at earlier readings."""
        self._looks.clear()
        self._cut_uj = self.device.at(self.device.last_ns)

    def cut(self, sessions: Sequence[str]) -> dict[str, SessionUse]:
        """What each session used from the last cut to the last reading; nothing where nobody can tell.

        Sessions that have ended keep their part: it is not shared among the others.
        """
        last_ns = self.device.last_ns
        used: dict[str, SessionUse] = {}
        ends_ns = [*(look.from_ns for look in self._looks[1:]), last_ns]
        for look, end_ns in zip(self._looks, ends_ns, strict=False):
            begin_uj = max(self.device.at(min(look.from_ns, last_ns)), self._cut_uj)
            self._cut_uj = max(self.device.at(min(end_ns, last_ns)), begin_uj)
            if look.on_it is None:
                continue
            for key, part in equal_shares(self._cut_uj - begin_uj, look.on_it, sessions, look.inside).items():
                total = used.setdefault(key, SessionUse())
                total.own += part.own
                total.exclusive += part.exclusive
        # The look at the last reading and all later ones are still needed.
        past = [look for look in self._looks if look.from_ns <= last_ns]
        del self._looks[: max(len(past) - 1, 0)]
        return used


_SOCKET = re.compile(r"(?:cpu|dram):(\d+)")
_GPU_BASIS = "equal shares among the sessions with a process on it, and one for all other processes"


@dataclass(frozen=True)
class DeviceUse:
    """What a device used during a session, and the session's own part of it (None: nobody can tell)."""

    device: str
    energy_j: float
    own_j: float | None
    provenance: str
    basis: str
    own_exclusive_j: float | None = None


@dataclass
class _Session:
    begin_ns: int
    programs: dict[int, tuple[int, Counter]]  # channel number → socket and CPU time
    begin: dict[str, int] = field(default_factory=dict)  # µJ of each device by then
    used: dict[str, SessionUse] = field(default_factory=dict)


class RunningEnergy:
    """The running energy of all devices. Feed it every batch with `update`, from one thread at a time.

    `inside` and `gpu_sessions` are the source's; `cpus` has the logical CPUs of each socket.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        cpus: Mapping[int, int],
        inside: Callable[[], Mapping[str, str]] = dict,
        gpu_sessions: Callable[[], Mapping[str, frozenset[str]]] = dict,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.sequence = 0  # of the last batch
        self._inside = inside
        self._gpu_sessions = gpu_sessions
        self._wall_ns = wall_ns
        self._gauges = Gauges(channels)
        self._sessions: dict[str, _Session] = {}
        self._latest_s: dict[int, float] = {}
        self._gpus: dict[str, GpuShares] = {}  # GPUs of which we know who is on them
        self._sockets = {socket: Socket(count) for socket, count in cpus.items()}
        self._activity: dict[int, Counter] = {}  # CPU time, by channel number
        for number, channel in channels.items():
            socket = self._sockets.get(_socket(channel.device))
            if socket is not None and channel.quantity in ("busy", "monitor"):
                self._activity[number] = socket.busy if channel.quantity == "busy" else socket.monitor
        for name, device in self._gauges.devices.items():
            socket = self._sockets.get(_socket(name))
            if socket is not None and self._gauges.channel_of[name].scope == "device":
                socket.devices[name] = device

    def add(self, session_id: str, channels: Mapping[int, Channel], begin_ns: int | None = None) -> None:
        """Meter a session from now on, or go on with one that `load` brought."""
        begin_ns = self._wall_ns() if begin_ns is None else begin_ns
        session = self._sessions.setdefault(session_id, _Session(begin_ns, {}))
        for number, channel in channels.items():
            socket, counter = _socket(channel.device), Counter(EnergyLine())
            session.programs[number] = socket, counter
            self._activity[number] = counter
            if socket in self._sockets:
                self._sockets[socket].programs[session_id] = counter

    def remove(self, session_id: str, at_ns: int | None = None) -> list[DeviceUse]:
        """End a session. Returns its energies, its own shares up to its last reading."""
        session = self._sessions[session_id]
        at_ns = self._wall_ns() if at_ns is None else at_ns
        for socket, counter in session.programs.values():
            if socket in self._sockets:
                self._take(self._sockets[socket].cut_early(counter.line.last_ns, self._inside()))
        energies = self.energies(session_id, at_ns)
        del self._sessions[session_id]
        self._look_at_gpus(at_ns)
        for number, (socket, _) in session.programs.items():
            del self._activity[number]
            self._latest_s.pop(number, None)
            if socket in self._sockets:
                del self._sockets[socket].programs[session_id]
        return energies

    def update(self, batch: Batch, sequence: int = 0) -> None:
        """Take readings and notes; `sequence` is the batch's in the log."""
        self.sequence = sequence or batch.sequence or self.sequence
        lost_ns = {n: note.t_ns for note in batch.notes if note.name == "sensor_lost" for n in note.channels}
        order = np.argsort(batch.channel, kind="stable")
        numbers, starts = np.unique(batch.channel[order], return_index=True)
        edges = [*starts.tolist(), order.size]
        for i, number in enumerate(numbers.tolist()):
            rows = order[edges[i] : edges[i + 1]]
            t_ns, value = batch.t_ns[rows], batch.value[rows]
            if number in self._activity:
                # Running totals that long intervals are cut from: the last of a batch is enough.
                self._activity[number].add(t_ns[-1:], [round(float(value[-1]) * 1e9)])
                self._latest_s[number] = float(value[-1])
            else:
                self._gauges.read(number, t_ns, value, lost_ns.pop(number, None))
        for number in lost_ns:
            self._gauges.break_off(number)
        names = {note.name for note in batch.notes}
        if "suspended" in names:
            self._gauges.break_off()  # counters may have begun anew
        if names & {"suspended", "clock_step"}:
            for shared in (*self._sockets.values(), *self._gpus.values()):
                shared.restart()
        self._look_at_gpus(self._wall_ns())
        self._share()

    def energies(self, session_id: str, at_ns: int | None = None) -> list[DeviceUse]:
        """What each device used since the session began; own shares up to about a second ago.

        Asking changes nothing. Were an interval cut short to answer, the seconds in which static power is
        found would lack it. So shares never fall, and add up at any time.
        """
        session = self._sessions[session_id]
        at_ns = self._wall_ns() if at_ns is None else at_ns
        return [
            self._energy(session, name, device, at_ns)
            for name, device in self._gauges.devices.items()
            if device.is_known and self._gauges.channel_of[name].scope == "device"
        ]

    def devices(self) -> list[RunningTotal]:
        return self._gauges.totals(self._wall_ns())

    def last_values(self, numbers: Iterable[int]) -> list[float]:
        """The last CPU time read in each of these channels, for a session that goes on after a restart."""
        return [self._latest_s.get(number, 0.0) for number in numbers]

    def state(self) -> dict[str, Any]:
        """All that a restarted daemon needs to go on, as JSON. Feed it later batches again."""
        sessions = {
            key: {
                "begin_ns": session.begin_ns,
                "begin": session.begin,
                "used": {name: [used.own, used.exclusive] for name, used in session.used.items()},
                "latest_s": {n: self._latest_s[n] for n in session.programs if n in self._latest_s},
            }
            for key, session in self._sessions.items()
        }
        return {"sequence": self.sequence, "gauges": self._gauges.state(), "sessions": sessions}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`. Then `add` each session that goes on, feed later batches, and call `go_on`.
        Raises where the state makes no sense."""
        self._gauges.load(state["gauges"], self._wall_ns())
        for key, kept in state["sessions"].items():
            used = {name: SessionUse(own, alone) for name, (own, alone) in kept["used"].items()}
            self._sessions[key] = _Session(kept["begin_ns"], {}, dict(kept["begin"]), used)
            self._latest_s |= {int(number): value for number, value in kept["latest_s"].items()}
        self.sequence = state["sequence"]

    def go_on(self) -> None:
        """Everything that was read before the restart has been fed again."""
        self._gauges.go_on(self._wall_ns())

    def _share(self) -> None:
        inside = self._inside()
        for socket in self._sockets.values():
            at_ns = socket.next_cut_ns()
            if at_ns is not None:
                self._take(socket.cut(at_ns, inside))
            socket.forget()
        self._share_gpus()
        for session in self._sessions.values():
            for name, device in self._gauges.devices.items():
                if name not in session.begin and device.last_ns >= session.begin_ns:
                    session.begin[name] = device.at(session.begin_ns)
        self._gauges.forget()

    def _look_at_gpus(self, now_ns: int) -> None:
        told, inside = self._gpu_sessions(), self._inside()
        for name in told.keys() - self._gpus.keys():
            if name in self._gauges.devices:
                self._gpus[name] = GpuShares(self._gauges.devices[name])
        for name, gpu in self._gpus.items():
            on_it = told.get(name)
            # The list is up to a second old: leave out those that have ended meanwhile.
            gpu.look(now_ns, None if on_it is None else on_it & {"", *self._sessions}, inside)

    def _share_gpus(self) -> None:
        for name, gpu in self._gpus.items():
            if gpu.device.is_known:
                self._take({(key, name): part for key, part in gpu.cut([*self._sessions]).items()})

    def _take(self, used: Mapping[tuple[str, str], SessionUse]) -> None:
        for (key, name), part in used.items():
            total = self._sessions[key].used.setdefault(name, SessionUse())
            total.own += part.own
            total.exclusive += part.exclusive

    def _energy(self, session: _Session, name: str, device: DeviceLines, at_ns: int) -> DeviceUse:
        begin = session.begin.get(name)
        if begin is None:
            begin = device.carried_to(session.begin_ns)
        energy = max(device.carried_to(at_ns) - begin, 0)
        used = session.used.get(name)
        basis = ""
        if used is not None:
            span = "second" if device.lowest.whole else "interval"
            static = f"CPU time; static power {device.lowest.power_w:.4g} W, the lowest {span} so far"
            basis = static if _SOCKET.fullmatch(name) else _GPU_BASIS
        return DeviceUse(
            device=name,
            energy_j=energy / 1e6,
            # An interval of shared time may have begun before the session.
            own_j=None if used is None else min(used.own, energy) / 1e6,
            provenance=self._gauges.channel_of[name].provenance,
            basis=basis,
            own_exclusive_j=None if used is None else min(used.exclusive, energy) / 1e6,
        )


def _socket(device: str) -> int:
    match = _SOCKET.fullmatch(device)
    return int(match[1]) if match else -1
