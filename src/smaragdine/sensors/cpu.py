"""The processor: which one it is, and the busy time of each socket, the program's part of it, and our own.

Busy time is cores × wall − idle − iowait. The user and system columns of /proc/stat alias with the
scheduler's tick; the idle ones do not. What the hypervisor took (steal) is nobody's work here, so it counts
as not busy.

CPUs come and go. One that is offline has no line of its own, and may return with another idle time than it
left with. So we count how much each CPU was idle between two reads that both have it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smaragdine.clock import SYSTEM, Clock
from smaragdine.sensors.base import Absent, Channel
from smaragdine.sensors.processes import Place, ProcessTree

UNKNOWN_MODEL = "unknown CPU"


@dataclass(frozen=True)
class CpuInfo:
    """The processor as this kernel sees it. A virtual machine sees a part of the real one."""

    model: str
    sockets: Mapping[int, tuple[int, ...]]  # socket → its logical CPUs
    cores: Mapping[int, int]  # socket → its physical cores


def read_cpuinfo(proc_root: Path = Path("/proc")) -> CpuInfo:
    """From /proc/cpuinfo. Without "physical id" (ARM, some virtual machines) all CPUs are socket 0."""
    try:
        text = (proc_root / "cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    blocks = [block for block in _blocks(text) if block.get("processor", "").isdigit()]
    if not blocks:
        cpus = tuple(range(os.cpu_count() or 1))
        return CpuInfo(UNKNOWN_MODEL, {0: cpus}, {0: len(cpus)})
    sockets: dict[int, list[dict[str, str]]] = {}
    for block in blocks:
        sockets.setdefault(_number(block, "physical id", 0), []).append(block)
    return CpuInfo(
        model=_model(text, blocks[0]),
        sockets={s: tuple(sorted(int(b["processor"]) for b in sockets[s])) for s in sorted(sockets)},
        cores={s: _cores(sockets[s]) for s in sorted(sockets)},
    )


def read_memory_bytes(proc_root: Path = Path("/proc")) -> int:
    """The installed memory in bytes, less what the kernel keeps (MemTotal); 0 when we cannot read it."""
    try:
        for line in (proc_root / "meminfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _blocks(text: str) -> Iterator[dict[str, str]]:
    for paragraph in text.split("\n\n"):
        pairs = (line.partition(":") for line in paragraph.splitlines())
        yield {key.strip(): value.strip() for key, _, value in pairs}


def _cores(blocks: list[dict[str, str]]) -> int:
    """Physical cores of one socket that this kernel can use."""
    # "cpu cores" counts the whole socket even where a container shows only some of its CPUs; the core ids
    # repeat from die to die on some machines.
    stated = _number(blocks[0], "cpu cores", 0)
    if 0 < stated <= len(blocks):
        return stated
    ids = {block["core id"] for block in blocks if "core id" in block}
    return len(ids) or len(blocks)


def _model(text: str, block: Mapping[str, str]) -> str:
    if block.get("model name"):
        return block["model name"]
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("Model", "Hardware", "cpu model") and value.strip():
            return value.strip()
    if "CPU implementer" in block:
        return f"ARM implementer {block['CPU implementer']} part {block.get('CPU part', '?')}"
    return UNKNOWN_MODEL


def _number(block: Mapping[str, str], key: str, default: int) -> int:
    value = block.get(key, "")
    return int(value) if value.isdigit() else default


_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
# The kernel counts idle time in ticks of 10 ms, so reading more often brings nothing. It makes /proc/stat
# anew at each read, and takes longer the more cores and interrupts there are. On a big machine we read it
# less often, so that it never costs more than this part of a core.
_STAT_EVERY_NS, _STAT_AT_LEAST_EVERY_NS = 40_000_000, 500_000_000
_STAT_SHARE = 0.005
# iowait may run backwards a little (proc(5)). If it does by more than this, a CPU was away and began anew.
_BACKWARDS_TICKS = 10 * os.sysconf("SC_CLK_TCK")


class Activity:
    """Busy CPU-seconds per socket: the machine's, the program's and our own. All three are running totals."""

    lane = "counters"

    def __init__(
        self,
        cpus: CpuInfo,
        proc_root: Path = Path("/proc"),
        period_ns: int = 4_000_000,
        clock: Clock = SYSTEM,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self.period_ns = period_ns
        self._clock, self._cpu_ns = clock, cpu_ns
        self._cpus = cpus
        self._sockets = sorted(cpus.sockets)
        self.socket_of_cpu = {cpu: socket for socket, members in cpus.sockets.items() for cpu in members}
        self._stat_fd = os.open(proc_root / "stat", os.O_RDONLY | os.O_CLOEXEC)
        self._stat_bytes = 4096
        self._tree: ProcessTree | None = None
        self._monitor_start_s = time.process_time()
        self._next_stat_ns = 0
        self._last_cost_ns = 0
        self._line_sockets = {b"cpu%d" % cpu: socket for cpu, socket in self.socket_of_cpu.items()}
        self._last_ns = clock.mono_ns()
        self._last_stat = self._stat_text()
        self._last_sum = _cpus_and_idle_ticks(self._last_stat)
        self._last_idle = _idle_ticks_by_line(self._last_stat)
        self.cpu_count = {
            socket: len(self._last_idle.keys() & {b"cpu%d" % cpu for cpu in members})
            for socket, members in cpus.sockets.items()
        }
        self._present_ns = dict.fromkeys(self._sockets, 0)
        self._idle_ticks = dict.fromkeys(self._sockets, 0)
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
        """Have no `program` channels: a daemon watches many programs itself. Call it before any other use."""
        self._channels = [channel for channel in self._channels if channel.quantity != "program"]
        self._position = {"busy": 0, "monitor": 1}

    def watch(self, pid: int, marker: bytes = b"", include_past: bool = True) -> None:
        """From now on `program` is the CPU time of this process and its descendants."""
        # Publish the finished tree in one assignment, so that the sampling thread never sees half of it.
        self._tree = ProcessTree(pid, self.socket_of_cpu, marker, include_past, clock=self._clock)

    @property
    def program_pids(self) -> frozenset[int]:
        return self._tree.pids if self._tree is not None else frozenset()

    def drain_places(self) -> list[Place]:
        """On which sockets the program's threads were seen since the last call."""
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
        now_ns, begin_ns = self._clock.mono_ns(), self._cpu_ns()
        self._count_idle(self._stat_text(), now_ns - self._last_ns)
        self._last_ns = now_ns
        t_ns = self._busy_t_ns = self._clock.wall_ns()
        # The sampler runs in short bursts: to know its socket is not worth a system call.
        monitor_s = (time.process_time() - self._monitor_start_s) / len(self._sockets)
        for i, socket in enumerate(self._sockets):
            busy_s = self._present_ns[socket] * 1e-9 - self._idle_ticks[socket] * _TICK_S
            # iowait may run backwards (proc(5)) and ticks are coarse, but a running total must not fall.
            self._busy[socket] = max(self._busy[socket], busy_s)
            first = i * len(self._position)
            readings.append((t_ns, first + self._position["busy"], self._busy[socket]))
            readings.append((t_ns, first + self._position["monitor"], monitor_s))
        # The smaller cost of the last two: something else may have held up one of them.
        cost_ns, self._last_cost_ns = self._last_cost_ns, self._cpu_ns() - begin_ns
        every_ns = int(min(cost_ns, self._last_cost_ns) / _STAT_SHARE)
        self._next_stat_ns = now_ns + min(max(_STAT_EVERY_NS, every_ns), _STAT_AT_LEAST_EVERY_NS)

    def _stat_text(self) -> bytes:
        text = os.pread(self._stat_fd, self._stat_bytes, 0)
        while len(text) == self._stat_bytes and b"\nintr" not in text:
            self._stat_bytes *= 2
            text = os.pread(self._stat_fd, self._stat_bytes, 0)
        return text

    def _count_idle(self, text: bytes, elapsed_ns: int) -> None:
        """Add how long each socket's CPUs were there since the last read, and idle, waiting or stolen."""
        if len(self._sockets) > 1:
            idle = _idle_ticks_by_line(text)
            self._count_lines(self._last_idle, idle, elapsed_ns)
            self._last_idle = idle
            return
        # The first line is the sum of all CPUs. We need the others only when a CPU came or went.
        cpus, ticks = _cpus_and_idle_ticks(text)
        last_cpus, last_ticks = self._last_sum
        if cpus == last_cpus and ticks - last_ticks >= -_BACKWARDS_TICKS:
            self._present_ns[self._sockets[0]] += cpus * elapsed_ns
            self._idle_ticks[self._sockets[0]] += ticks - last_ticks
        else:
            self._count_lines(_idle_ticks_by_line(self._last_stat), _idle_ticks_by_line(text), elapsed_ns)
        self._last_sum, self._last_stat = (cpus, ticks), text

    def _count_lines(self, last: dict[bytes, int], now: dict[bytes, int], elapsed_ns: int) -> None:
        present_ns, idle_ticks, sockets = self._present_ns, self._idle_ticks, self._line_sockets
        for name, ticks in now.items():
            if name in last and name in sockets and (more := ticks - last[name]) >= -_BACKWARDS_TICKS:
                present_ns[sockets[name]] += elapsed_ns
                idle_ticks[sockets[name]] += more


def _cpus_and_idle_ticks(text: bytes) -> tuple[int, int]:
    """How many CPUs are online, and the idle, iowait and steal ticks of all together since boot."""
    # Lines of CPUs have letters only in their names, and "intr" comes after them. To look for one letter
    # takes a tenth of the time that whole names would take.
    cpus = text.count(b"u", 0, text.find(b"i")) - 1
    return cpus, _idle_ticks(text[: text.index(b"\n")].split())


def _idle_ticks_by_line(text: bytes) -> dict[bytes, int]:
    """Idle, iowait and steal ticks since boot, by the names of the CPUs that are online: cpu0, …"""
    ticks: dict[bytes, int] = {}
    for line in text.split(b"\n")[1:]:
        if not line.startswith(b"cpu"):
            break
        fields = line.split()
        ticks[fields[0]] = _idle_ticks(fields)
    return ticks


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
