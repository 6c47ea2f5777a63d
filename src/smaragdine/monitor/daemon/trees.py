"""The process trees of all sessions, on one look for new processes however many sessions there are."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smaragdine.clock import SYSTEM, Clock
from smaragdine.sensors.base import Channel
from smaragdine.sensors.processes import (
    SCAN_EVERY_NS,
    SCAN_SHARE,
    SOCKET_SCAN_SHARE,
    ProcessTree,
    find_parents,
    fresh_pids,
    newest_pid,
    process_clock,
)

# Of a core, for reading all trees: users share it equally, and each user's sessions that user's part.
_READ_SHARE = 0.1


@dataclass(slots=True)
class _Member:
    """A session's tree, the channel number and the total at its start for each socket, and when it is due."""

    tree: ProcessTree
    numbers: Mapping[int, int]
    start_s: Mapping[int, float]
    every_ns: int
    owner: int
    share: float = _READ_SHARE  # of a core
    next_ns: int = 0


class Trees:
    """A sensor that keeps what it reads until `drain`: sessions come and go, and so do its channels.

    The sampler's thread reads, any other may call the rest.
    """

    lane = "counters"

    def __init__(
        self, socket_of_cpu: Mapping[int, int], clock: Clock = SYSTEM, proc: Path = Path("/proc")
    ) -> None:
        self.period_ns = 1_000_000_000
        self._socket_of_cpu = socket_of_cpu
        self._clock = clock
        self._proc = proc
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._inside: dict[str, str] = {}
        self._t_ns, self._number, self._value = array("q"), array("I"), array("d")
        self._loadavg_fd = os.open(proc / "loadavg", os.O_RDONLY | os.O_CLOEXEC)
        self._last_pid = newest_pid(self._loadavg_fd)
        self._next_scan_ns = 0

    def channels(self) -> Sequence[Channel]:
        return ()

    def add(
        self,
        session_id: str,
        pid: int,
        include_past: bool,
        every_ns: int,
        numbers: Mapping[int, int],
        start_s: Mapping[int, float],
        owner: int = 0,
    ) -> None:
        """Follow a process from now on. Raises ProcessLookupError when there is none of that number."""
        try:
            time.clock_gettime_ns(process_clock(pid))
        except (OSError, OverflowError):
            raise ProcessLookupError(f"there is no process {pid}") from None
        tree = ProcessTree(pid, self._socket_of_cpu, b"", include_past, self._proc, self._clock, shared=True)
        try:
            with self._lock:
                # What was started while the tree looked around is in nobody's next look.
                tree.catch_up()
                self._nest(session_id, tree)
                self._members[session_id] = _Member(tree, numbers, start_s, every_ns, owner)
                self._share_out()
        except BaseException:
            tree.close()
            raise

    def remove(self, session_id: str) -> None:
        """Stop following; the last readings are in the next `drain`."""
        with self._lock:
            member = self._members.pop(session_id)
            member.tree.update()
            self._note(member)
            member.tree.close()
            outer = self._inside.pop(session_id, None)
            for inner, parent in list(self._inside.items()):
                if parent == session_id and outer is not None:
                    self._inside[inner] = outer
                elif parent == session_id:
                    del self._inside[inner]
            self._share_out()

    def inside(self) -> dict[str, str]:
        """Sessions whose first process is another session's: session → the innermost one around it."""
        with self._lock:
            return dict(self._inside)

    def sessions_of(self, pids: frozenset[int]) -> frozenset[str]:
        """The sessions these processes belong to, each to its innermost; "" for those that are in none."""
        with self._lock:
            found: set[str] = set()
            for pid in pids:
                members = {key for key, member in self._members.items() if pid in member.tree}
                found |= members - {self._inside[key] for key in members if key in self._inside} or {""}
            return frozenset(found)

    def drain(self) -> tuple[array[int], array[int], array[float]]:
        """Times, channel numbers and CPU-seconds since the last call."""
        with self._lock:
            columns = self._t_ns, self._number, self._value
            self._t_ns, self._number, self._value = array("q"), array("I"), array("d")
            return columns

    def read(self) -> Sequence[tuple[int, int, float]]:
        now_ns = self._clock.mono_ns()
        # Woken a hair early, a tree must not be left for a whole period more.
        due_ns = now_ns + self.period_ns // 2
        with self._lock:
            if now_ns >= self._next_scan_ns and self._members:
                self._look(now_ns)
            for member in self._members.values():
                if member.next_ns > due_ns:
                    continue
                before_ns = time.thread_time_ns()
                member.tree.update()
                self._note(member)
                # Thousands of processes are read less often, and their sessions are their user's own affair.
                cost_ns = time.thread_time_ns() - before_ns
                member.next_ns = now_ns + max(member.every_ns, int(cost_ns / member.share))
        return ()

    def close(self) -> Sequence[tuple[int, int, float]]:
        with self._lock:
            for member in self._members.values():
                member.tree.update()
                self._note(member)
                member.tree.close()
            self._members.clear()
            os.close(self._loadavg_fd)
        return ()

    def _note(self, member: _Member) -> None:
        t_ns, cpu_s = self._clock.wall_ns(), member.tree.cpu_s
        for socket, number in member.numbers.items():
            self._t_ns.append(t_ns)
            self._number.append(number)
            self._value.append(member.start_s[socket] + cpu_s[socket])

    def _look(self, now_ns: int) -> None:
        before_ns = time.thread_time_ns()
        newest = newest_pid(self._loadavg_fd)
        if newest != self._last_pid:
            candidates = fresh_pids(self._proc, self._last_pid, newest)
            self._last_pid = newest
            known = frozenset[int]().union(*(member.tree.pids for member in self._members.values()))
            parents = find_parents(self._proc, candidates, known)
            for member in self._members.values():
                member.tree.take(parents)
        cost_ns = time.thread_time_ns() - before_ns
        self._next_scan_ns = now_ns + max(SCAN_EVERY_NS, int(cost_ns / SCAN_SHARE))

    def _nest(self, session_id: str, tree: ProcessTree) -> None:
        """Where the new session lies among the others. Of two on the same process the later is the inner."""
        around = {key for key, member in self._members.items() if tree.root_pid in member.tree}
        within = {key for key, member in self._members.items() if member.tree.root_pid in tree} - around
        innermost = around - {self._inside[key] for key in around if key in self._inside}
        outer = min(innermost, default=None)
        if outer is not None:
            self._inside[session_id] = outer
        for key in within:
            if self._inside.get(key) is None or self._inside[key] in around:
                self._inside[key] = session_id

    def _share_out(self) -> None:
        sessions = Counter(member.owner for member in self._members.values())
        for member in self._members.values():
            member.share = _READ_SHARE / (len(sessions) * sessions[member.owner])
            member.tree.socket_scan_share = SOCKET_SCAN_SHARE / max(1, len(self._members) // 4)
