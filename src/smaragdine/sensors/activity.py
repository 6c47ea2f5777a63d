"""Who used the processor: the machine's busy time, the program's share and our own, per socket.

Busy time is cores × wall − idle − iowait: the user and system columns of /proc/stat alias with the
scheduler's tick, the idle ones do not. What the hypervisor took (steal) is nobody's work here, so it
counts as not busy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from smaragdine.clock import SYSTEM, Clock
from smaragdine.sensors.base import Absent, Channel
from smaragdine.sensors.cpuinfo import CpuInfo
from smaragdine.sensors.processes import Place, ProcessTree

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
# The kernel counts idle time in ticks of 10 ms: more often brings nothing. And it makes /proc/stat anew at
# each read, the longer the more cores and interrupts there are: on a big machine it is read less often, so
# that it never costs more than this share of a core.
_STAT_EVERY_NS = 40_000_000
_STAT_SHARE = 0.005


class Activity:
    """Busy CPU-seconds per socket, and whose they were. All three quantities are running totals."""

    lane = "counters"

    def __init__(
        self,
        cpus: CpuInfo,
        proc_root: Path = Path("/proc"),
        period_ns: int = 4_000_000,
        clock: Clock = SYSTEM,
    ) -> None:
        self.period_ns = period_ns
        self._clock = clock
        self._cpus = cpus
        self._sockets = sorted(cpus.sockets)
        self.socket_of_cpu = {cpu: socket for socket, members in cpus.sockets.items() for cpu in members}
        self._stat_fd = os.open(proc_root / "stat", os.O_RDONLY | os.O_CLOEXEC)
        self._stat_bytes = 4096
        self._tree: ProcessTree | None = None
        self._monitor_start_s = time.process_time()
        self._next_stat_ns = 0
        self.cpu_count = self._count_cpus()
        self._start_ns = clock.mono_ns()
        self._idle_start_s = self._idle_s()
        self._busy = dict.fromkeys(self._sockets, 0.0)
        self._busy_t_ns = clock.wall_ns()
        self._position = {"busy": 0, "program": 1, "monitor": 2}
        self._channels = [
            Channel(
                device=f"cpu:{socket}",
                quantity=quantity,
                unit="s",
                kind="counter",
                provenance="measured",
                period_ms=period_ns / 1e6 if quantity == "program" else _STAT_EVERY_NS / 1e6,
                sensor="activity",
                detail=detail,
            )
            for socket in self._sockets
            for quantity, detail in (
                ("busy", f"{len(cpus.sockets[socket])} logical CPUs × wall − idle − iowait − steal"),
                ("program", "process CPU clocks of the program and its children"),
                ("monitor", "the sampler's own CPU time"),
            )
        ]

    def channels(self) -> Sequence[Channel]:
        return self._channels

    def leave_out_program(self) -> None:
        """No `program` channels: a daemon watches many programs, and does so itself. Before any use."""
        self._channels = [channel for channel in self._channels if channel.quantity != "program"]
        self._position = {"busy": 0, "monitor": 1}

    def watch(self, pid: int, marker: bytes = b"", include_past: bool = True) -> None:
        """From now on `program` is the CPU time of this process and its descendants."""
        # Publishing the finished tree in one assignment keeps the sampling thread from seeing half of it.
        self._tree = ProcessTree(pid, self.socket_of_cpu, marker, include_past, clock=self._clock)

    @property
    def program_pids(self) -> frozenset[int]:
        return self._tree.pids if self._tree is not None else frozenset()

    def drain_places(self) -> list[Place]:
        """On which socket the program's threads were seen, since the last call."""
        return self._tree.drain_places() if self._tree is not None else []

    def busy_s(self, socket: int) -> tuple[int, float]:
        """When the socket's busy time was last read (ns), and that running total in CPU-seconds."""
        return self._busy_t_ns, self._busy[socket]

    def read(self) -> Sequence[tuple[int, int, float]]:
        readings: list[tuple[int, int, float]] = []
        if self._clock.mono_ns() >= self._next_stat_ns:
            self._read_busy(readings)
        if "program" not in self._position:
            return readings
        tree = self._tree
        if tree is not None:
            tree.update()
        t_ns = self._clock.wall_ns()
        for i, socket in enumerate(self._sockets):
            readings.append((t_ns, 3 * i + 1, tree.cpu_s[socket] if tree is not None else 0.0))
        return readings

    def close(self) -> Sequence[tuple[int, int, float]]:
        self._next_stat_ns = 0
        last = self.read()
        os.close(self._stat_fd)
        if self._tree is not None:
            self._tree.close()
        return last

    def _read_busy(self, readings: list[tuple[int, int, float]]) -> None:
        now_ns = self._clock.mono_ns()
        idle_s = self._idle_s()
        t_ns = self._busy_t_ns = self._clock.wall_ns()
        wall_s = (now_ns - self._start_ns) * 1e-9
        # The sampler is one process of short bursts: which socket it ran on is not worth a system call.
        monitor_s = (time.process_time() - self._monitor_start_s) / len(self._sockets)
        for i, socket in enumerate(self._sockets):
            busy_s = self.cpu_count[socket] * wall_s - (idle_s[socket] - self._idle_start_s[socket])
            # iowait may run backwards (proc(5)) and ticks are coarse: a running total must not.
            self._busy[socket] = max(self._busy[socket], busy_s)
            first = i * len(self._position)
            readings.append((t_ns, first + self._position["busy"], self._busy[socket]))
            readings.append((t_ns, first + self._position["monitor"], monitor_s))
        cost_ns = self._clock.mono_ns() - now_ns
        self._next_stat_ns = now_ns + max(_STAT_EVERY_NS, int(cost_ns / _STAT_SHARE))

    def _count_cpus(self) -> dict[int, int]:
        """CPUs per socket that /proc/stat has a line for: one that is offline is not busy."""
        names = [line.split(None, 1)[0] for line in self._stat_text().split(b"\n") if line.startswith(b"cpu")]
        numbers = {int(name[3:]) for name in names if name[3:].isdigit()}
        return {socket: len(numbers.intersection(members)) for socket, members in self._cpus.sockets.items()}

    def _stat_text(self) -> bytes:
        text = os.pread(self._stat_fd, self._stat_bytes, 0)
        while len(text) == self._stat_bytes and b"\nintr" not in text:
            self._stat_bytes *= 2
            text = os.pread(self._stat_fd, self._stat_bytes, 0)
        return text

    def _idle_s(self) -> dict[int, float]:
        """Idle, iowait and steal seconds per socket since boot."""
        text = self._stat_text()
        if len(self._sockets) == 1:
            fields = text[: text.index(b"\n")].split()
            return {self._sockets[0]: _idle_ticks(fields) * _TICK_S}
        idle_s = dict.fromkeys(self._sockets, 0.0)
        for line in text.split(b"\n")[1:]:
            if not line.startswith(b"cpu"):
                break
            fields = line.split()
            socket = self.socket_of_cpu.get(int(fields[0][3:]))
            if socket is not None:
                idle_s[socket] += _idle_ticks(fields) * _TICK_S
        return idle_s


def _idle_ticks(fields: list[bytes]) -> int:
    return int(fields[4]) + int(fields[5]) + (int(fields[8]) if len(fields) > 8 else 0)


def open_activity(
    cpus: CpuInfo, proc_root: Path, period_ns: int, clock: Clock = SYSTEM
) -> tuple[Activity | None, list[Absent]]:
    try:
        return Activity(cpus, proc_root, period_ns, clock), []
    except (OSError, ValueError, IndexError) as error:
        return None, [
            Absent(
                "cpu busy",
                f"{proc_root / 'stat'} cannot be read: {error}",
                "mount /proc, or name the host's with SMARAGDINE_PROC_ROOT",
            )
        ]
