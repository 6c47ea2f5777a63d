"""CPU time of the program: a process and everything it starts, threads and short-lived children included.

The kernel has a clock for each process's CPU time. It is exact to the nanosecond, and read without opening a
file: 2 µs for a process of 200 threads. We look for new processes only when the kernel has handed out a new
number.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smaragdine.clock import SYSTEM, Clock
from smaragdine.sensors.base import Channel, SensorLost

# A scan of /proc may cost at most this share of a core, however many processes the machine runs.
SCAN_SHARE = 0.005
SCAN_EVERY_NS = 20_000_000
_MOST_PROBES = 64
# Where Linux begins again after the largest number (RESERVED_PIDS of kernel/pid.c).
_FIRST_PID_AGAIN = 300
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_SOCKET_SCAN_EVERY_NS = 100_000_000
SOCKET_SCAN_SHARE = 0.001
_SHARED_UNSEEN_EVERY_NS = 1_000_000_000
_SETTLING_NS = 1_000_000_000
# How many moves may wait to be drained. Beyond it, a move is noted at a later look.
_MOST_PLACES = 1 << 16

Place = tuple[int, int, int, int]  # t_ns, pid, tid, socket


def process_clock(pid: int) -> int:
    """The clock id of a process's CPU time (linux/posix-timers.h: CPUCLOCK_SCHED of the whole group)."""
    return (~pid << 3) | 2


@dataclass(slots=True)
class _Process:
    clock_id: int
    last_ns: int


@dataclass
class _Thread:
    stat_fd: int  # −1: not open
    last_ticks: int = 0
    socket: int | None = None  # as last noted

    def close(self) -> None:
        if self.stat_fd >= 0:
            os.close(self.stat_fd)
            self.stat_fd = -1


@dataclass
class ProcessTree:
    """The CPU time of `root_pid` and its descendants, by socket.

    `marker` is a `NAME=value` that every process of the program has in its environment. It finds those whose
    parent has gone already (a daemon's second fork). A `shared` tree does not look for new processes by
    itself: one look serves many trees, and `take` brings them what it found.
    """

    root_pid: int
    socket_of_cpu: Mapping[int, int]
    marker: bytes = b""
    include_past: bool = True  # False for a process that ran before: only what follows counts
    proc: Path = Path("/proc")
    clock: Clock = SYSTEM
    shared: bool = False
    socket_scan_share: float = SOCKET_SCAN_SHARE  # part of a core, for finding out where threads run
    cpu_s: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        self._sockets = sorted(set(self.socket_of_cpu.values())) or [0]
        self.cpu_s = dict.fromkeys(self._sockets, 0.0)
        self._weights = {socket: 1.0 / len(self._sockets) for socket in self._sockets}
        self._processes: dict[int, _Process] = {}
        # The sampler may be a child of the process that it watches. It pays for itself.
        self._own_pid = os.getpid()
        self._threads: dict[int, _Thread] = {}
        self._places: list[Place] = []
        self._followed_ns = 0  # of processes that have ended
        self._unseen_ns = 0  # of children too short-lived to be followed
        self._forked = False
        self._last_pid = 0
        self._next_scan_ns = 0
        self._next_socket_scan_ns = 0
        self._next_unseen_ns = 0
        self._settled_ns = self.clock.mono_ns() + _SETTLING_NS
        self._loadavg_fd = os.open(self.proc / "loadavg", os.O_RDONLY | os.O_CLOEXEC)
        self._last_pid = newest_pid(self._loadavg_fd)
        self._add(self.root_pid, include_past=self.include_past)
        self._take(self._parents(listed(self.proc)), include_past=self.include_past)

    def close(self) -> None:
        os.close(self._loadavg_fd)
        for thread in self._threads.values():
            thread.close()
        self._threads.clear()

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(self._processes)

    def __contains__(self, pid: int) -> bool:
        return pid in self._processes

    def drain_places(self) -> list[Place]:
        """Where threads were first seen and where they moved, since the last call; nothing on one socket.

        The sampling thread only appends, so copying a prefix needs no lock.
        """
        count = len(self._places)
        places = self._places[:count]
        del self._places[:count]
        return places

    def update(self) -> None:
        """Bring `cpu_s` (seconds per socket, since the start) up to now."""
        now_ns = self.clock.mono_ns()
        # Count time on a CPU. A scan that had to wait for a CPU cost others nothing, and is no reason to look
        # less often.
        if now_ns >= self._next_scan_ns and not self.shared:
            before_ns = time.thread_time_ns()
            self.catch_up()
            cost_ns = time.thread_time_ns() - before_ns
            self._next_scan_ns = now_ns + max(SCAN_EVERY_NS, int(cost_ns / SCAN_SHARE))
        if len(self._sockets) > 1 and now_ns >= self._next_socket_scan_ns:
            before_ns = time.thread_time_ns()
            self._weigh_sockets()
            cost_ns = time.thread_time_ns() - before_ns
            # A thread finds its place when it starts, and rarely moves to another socket after that.
            settling = now_ns < self._settled_ns
            pause_ns = 0 if settling else int(cost_ns / self.socket_scan_share)
            self._next_socket_scan_ns = now_ns + max(
                _SOCKET_SCAN_EVERY_NS // (2 if settling else 1), pause_ns
            )
        spent_ns = 0
        gone: list[int] = []
        clock_gettime_ns = time.clock_gettime_ns
        for pid, process in self._processes.items():
            try:
                cpu_ns = clock_gettime_ns(process.clock_id)
            except OSError:
                gone.append(pid)
                continue
            if cpu_ns < process.last_ns:
                # Between two looks another process of the program got this number.
                self._followed_ns += process.last_ns
                process.last_ns = 0
            spent_ns += cpu_ns - process.last_ns
            process.last_ns = cpu_ns
        for pid in gone:
            self._followed_ns += self._processes.pop(pid).last_ns
        if self._forked and now_ns >= self._next_unseen_ns:
            self._forked = False
            # This opens a file per process, so each of many trees does it once a second.
            self._next_unseen_ns = now_ns + _SHARED_UNSEEN_EVERY_NS if self.shared else 0
            spent_ns += self._unseen()
        if spent_ns:
            for socket, weight in self._weights.items():
                self.cpu_s[socket] += spent_ns * 1e-9 * weight

    def catch_up(self) -> None:
        """Look for what started since the last look, or since this tree was made."""
        last_pid = newest_pid(self._loadavg_fd)
        if last_pid != self._last_pid:
            candidates = fresh_pids(self.proc, self._last_pid, last_pid)
            self._last_pid = last_pid
            self.take(self._parents(candidates))

    def take(self, parents: Mapping[int, int]) -> None:
        """Take the machine's new processes and their parents, and follow those of the program."""
        self._forked = True
        self._take(parents, include_past=True)

    def _take(self, parents: Mapping[int, int], include_past: bool) -> None:
        # A grandchild may be listed before we know its parent, so go round until nothing is added.
        found = True
        while found:
            found = False
            for pid, parent in parents.items():
                if parent in self._processes and pid not in self._processes and pid != self._own_pid:
                    self._add(pid, include_past)
                    found = found or pid in self._processes
        if self.marker:
            for pid in parents.keys() - self._processes.keys():
                if self.marker in _environment(self.proc, pid):
                    self._add(pid, include_past)

    def _parents(self, candidates: Iterable[int]) -> dict[int, int]:
        return find_parents(self.proc, candidates, known=self._processes.keys() | {self._own_pid})

    def _add(self, pid: int, include_past: bool) -> None:
        clock_id = process_clock(pid)
        last_ns = 0
        if not include_past:
            try:
                last_ns = time.clock_gettime_ns(clock_id)
            except OSError:
                return
        self._processes[pid] = _Process(clock_id, last_ns)

    def _unseen(self) -> int:
        """The time (ns) of children that came and went between two looks, as far as it is new.

        It is in their parent's account, together with that of children that we followed; an orphan's is in no
        account. So this is a lower bound, and only grows.
        """
        if not self.include_past:
            return 0
        ticks = 0
        try:
            for pid in self._processes:
                with open(self.proc / str(pid) / "stat", "rb", buffering=0) as file:
                    fields = file.read(1024).rpartition(b")")[2].split()
                ticks += int(fields[13]) + int(fields[14])
            for process in self._processes.values():
                time.clock_gettime_ns(process.clock_id)
        except (OSError, IndexError, ValueError):
            # One has ended meanwhile, and may be in an account already. Look again when all live.
            self._forked = True
            return 0
        new_ns = max(0, ticks * _TICK_NS - self._followed_ns - self._unseen_ns)
        self._unseen_ns += new_ns
        return new_ns

    def _weigh_sockets(self) -> None:
        """On which sockets the threads ran since the last look, weighted by the ticks that they spent."""
        ticks = dict.fromkeys(self._sockets, 0)
        threads = dict.fromkeys(self._sockets, 0)
        seen: set[int] = set()
        t_ns = self.clock.wall_ns()
        for pid in self._processes:
            try:
                tids = [int(name) for name in os.listdir(self.proc / str(pid) / "task")]
            except OSError:
                continue
            seen.update(tids)
            for tid in tids:
                self._tally(t_ns, pid, tid, ticks, threads)
        for tid in self._threads.keys() - seen:
            self._forget(tid)
        # Until the first tick of 10 ms is over, we only know where the threads are.
        counts = ticks if any(ticks.values()) else threads
        total = sum(counts.values())
        if total:
            self._weights = {socket: count / total for socket, count in counts.items()}

    def _tally(self, t_ns: int, pid: int, tid: int, ticks: dict[int, int], threads: dict[int, int]) -> None:
        thread = self._threads.get(tid)
        try:
            if thread is None:
                thread = self._threads[tid] = _Thread(-1)
            if thread.stat_fd < 0:
                path = self.proc / str(pid) / "task" / str(tid) / "stat"
                thread.stat_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fields = os.pread(thread.stat_fd, 1024, 0).rpartition(b")")[2].split()
            if self.shared:
                # The files of many trees with many threads would use up all that may be open.
                thread.close()
        except OSError:
            self._forget(tid)  # it ended, and another thread may have its number at the next look
            return
        if len(fields) < 37:
            return
        spent = int(fields[11]) + int(fields[12])
        socket = self.socket_of_cpu.get(int(fields[36]), self._sockets[0])
        threads[socket] += 1
        ticks[socket] += spent - thread.last_ticks
        thread.last_ticks = spent
        if socket != thread.socket and len(self._places) < _MOST_PLACES and not self.shared:
            thread.socket = socket
            self._places.append((t_ns, pid, tid, socket))

    def _forget(self, tid: int) -> None:
        thread = self._threads.pop(tid, None)
        if thread is not None:
            thread.close()


def newest_pid(loadavg_fd: int) -> int:
    """The newest process number, the last field of /proc/loadavg. While it stays, nothing has started."""
    return int(os.pread(loadavg_fd, 128, 0).rsplit(b" ", 1)[-1])


def fresh_pids(proc: Path, last_pid: int, newest: int) -> Iterable[int]:
    """The numbers that may have started since the newest one was `last_pid`.

    Linux hands numbers out in order and starts over at the largest. After many, look at all of them.
    """
    fresh = [*range(last_pid + 1, newest + 1)]
    if _FIRST_PID_AGAIN <= newest < last_pid:
        fresh = [*range(last_pid + 1, _pid_end(proc)), *range(_FIRST_PID_AGAIN, newest + 1)]
    return fresh if 0 < len(fresh) <= _MOST_PROBES else listed(proc)


def _pid_end(proc: Path) -> int:
    """One more than the largest number a process may have."""
    try:
        return int((proc / "sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        return 1 << 22  # the most that Linux ever has


def listed(proc: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(proc) if name.isdigit()]
    except OSError:
        return []


def find_parents(proc: Path, candidates: Iterable[int], known: Container[int]) -> dict[int, int]:
    """The processes among the candidates that are not known yet, with their parents."""
    parents = {pid: _parent(proc, pid) for pid in candidates if pid not in known}
    return {pid: parent for pid, parent in parents.items() if parent is not None}


def _parent(proc: Path, pid: int) -> int | None:
    """The parent of a process; None where there is no such process, or it is a thread of another one."""
    try:
        with open(proc / str(pid) / "status", "rb", buffering=0) as file:
            text = file.read(512)
        if int(text.partition(b"\nTgid:")[2].split(None, 1)[0]) != pid:
            return None
        return int(text.partition(b"\nPPid:")[2].split(None, 1)[0])
    except (OSError, IndexError, ValueError):
        return None


def _environment(proc: Path, pid: int) -> bytes:
    try:
        with open(proc / str(pid) / "environ", "rb", buffering=0) as file:
            return file.read(1 << 17)
    except OSError:
        return b""


# A sensor over open file descriptors, which reads the number behind each again and again. RAPL zones, perf
# events and hwmon attributes differ only in how one finds and decodes the number.

# Hardware that is busy, asleep or slow answers with one of these, and may answer better next time. With any
# other error on an open descriptor, its source is gone.
_TRANSIENT = frozenset(
    {errno.EAGAIN, errno.EINTR, errno.EIO, errno.EBUSY, errno.ENODATA, errno.ETIMEDOUT, errno.EREMOTEIO}
)

_FOLLOW_EVERY_NS = 1_000_000_000


def fetch_decimal(fd: int) -> int:
    """The decimal number at the beginning of a sysfs attribute."""
    return int(os.pread(fd, 32, 0))


def attribute_text(path: Path) -> str:
    """What a sysfs attribute says; empty where it is absent or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def open_decimal(path: Path) -> int:
    """Open an attribute and read it once. Some refuse at open, some only at the first read (OSError)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _first_number(fd)
    except ValueError as error:
        os.close(fd)
        raise OSError(errno.EINVAL, f"not a number ({error})", str(path)) from None
    except OSError as error:
        os.close(fd)
        raise OSError(error.errno, error.strerror, str(path)) from None
    return fd


def _first_number(fd: int) -> int:
    for _ in range(4):
        try:
            return fetch_decimal(fd)
        except ValueError:
            # A plain file (a tree mounted or mirrored from elsewhere) is empty while it is being rewritten.
            time.sleep(0.002)
    return fetch_decimal(fd)


@dataclass(frozen=True)
class OpenChannel:
    """A channel, its descriptor, and how many raw counts are one of its unit.

    With a `path`, the descriptor follows the name when another file takes its place.
    """

    channel: Channel
    fd: int
    per_unit: float
    path: Path | None = None


class DescriptorSensor:
    """Reads every descriptor at each call. A channel whose source goes ends alone; with the last one, it
    raises."""

    def __init__(
        self,
        opened: Sequence[OpenChannel],
        *,
        period_ns: int,
        lane: str,
        fetch: Callable[[int], int] = fetch_decimal,
        clock: Clock = SYSTEM,
    ) -> None:
        self.period_ns = period_ns
        self.lane = lane
        self.ended: dict[str, str] = {}  # channel name and detail → why it ended
        self._channels = tuple(item.channel for item in opened)
        self._open = [(item.fd, index, item.per_unit) for index, item in enumerate(opened)]
        self._paths = {item.fd: item.path for item in opened if item.path is not None}
        self._fetch = fetch
        self._wall_ns = clock.wall_ns
        self._mono_ns = clock.mono_ns
        self._next_follow_ns = clock.mono_ns() + _FOLLOW_EVERY_NS

    def channels(self) -> Sequence[Channel]:
        return self._channels

    def read(self) -> Sequence[tuple[int, int, float]]:
        fetch, wall_ns = self._fetch, self._wall_ns
        if self._mono_ns() >= self._next_follow_ns:
            self._follow()
        readings: list[tuple[int, int, float]] = []
        gone: list[tuple[int, OSError]] = []
        for fd, index, per_unit in self._open:
            try:
                count = fetch(fd)
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    gone.append((fd, error))
                continue
            except ValueError:
                continue
            readings.append((wall_ns(), index, count / per_unit))
        if gone:
            self._drop(gone)
        if not self._open:
            raise SensorLost("; ".join(f"{name}: {why}" for name, why in self.ended.items()) or "closed")
        return readings

    def close(self) -> Sequence[tuple[int, int, float]]:
        self._next_follow_ns = 0
        try:
            last = self.read()
        except SensorLost:
            last = ()
        for fd, _, _ in self._open:
            os.close(fd)
        self._open = []
        return last

    def _follow(self) -> None:
        """Open anew what was replaced under its name: the old file would stand still for ever."""
        self._next_follow_ns = self._mono_ns() + _FOLLOW_EVERY_NS
        for fd, path in self._paths.items():
            try:
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    continue
                fresh = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # gone for now; the open descriptor decides
            # Give the new file the same number: nobody else needs to know.
            os.dup2(fresh, fd, inheritable=False)
            os.close(fresh)

    def _drop(self, gone: Sequence[tuple[int, OSError]]) -> None:
        errors = dict(gone)
        for fd, index, _ in self._open:
            if fd in errors:
                channel = self._channels[index]
                self.ended[f"{channel.name} ({channel.detail})"] = errors[fd].strerror or "unreadable"
                self._paths.pop(fd, None)
                os.close(fd)
        self._open = [item for item in self._open if item[0] not in errors]
