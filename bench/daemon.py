"""Measures what a daemon costs under load: many sessions at 4 ms against one, each with a reader.

    python bench/daemon.py [--sessions 64] [--seconds 60] [--rounds 1]      (as root)

There is a powercap tree of two packages (six counters), and a program that sleeps for each session. CPU
time is that of all the daemon's processes over the measured time, as a share of one core. Memory is theirs
too, a sixth of the way in and at the end (the log has 2 MiB and not 16, so that it is full by the first
look). *Missed* counts readings that were skipped because the loop came too late; *dropped* counts batches
that a reader asked for and that were gone. Readers count what they get in a process of their own. *Catching
up* is one reader that asks for the whole backlog of a session at the end. *Others* is what the rest of the
machine did meanwhile, in cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from cli import children, wait_for
from daemon_fake import Daemon, Machine, a_machine, a_program
from smaragdine.monitor.client import connect


@dataclass(frozen=True)
class Figures:
    core_share: float
    others_share: float  # of a core: what neither the daemon nor its readers had
    early_mib: float
    late_mib: float
    readings_per_s: float
    longest_gap_ms: float  # between two readings of a package's counter
    missed: int
    dropped: int
    caught_up_per_s: float


def processes(daemon: Daemon) -> list[int]:
    return [daemon.process.pid, *children(daemon.process.pid)]


def cpu_s(pids: list[int]) -> float:
    """The kernel's own clocks of these processes, to the nanosecond."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def busy_s() -> float:
    """CPU time of the whole machine, with what the host took from it."""
    user, nice, system, _, _, irq, soft_irq, stolen = map(
        int, Path("/proc/stat").read_text().split(None, 9)[1:9]
    )
    return (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK")


def memory_mib(pids: list[int]) -> float:
    """Memory of these processes. Pages that several of them share count once."""
    total_kib = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total_kib += int(line.split()[1])
    return total_kib / 1024


def missed(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith("smaragdine_missed_readings_total")]
    return int(float(value))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(machine: Machine, sessions: int, seconds: float, period_ms: float) -> Figures:
    port = free_port()
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(machine.daemon("--prometheus", f"127.0.0.1:{port}", "--memory-mib", "2"))
        client = stack.enter_context(daemon.connect())
        programs = [stack.enter_context(a_program()) for _ in range(sessions)]
        started = [client.start(program.pid, period_ms=period_ms) for program in programs]
        ids = [each.session_id for each in started]
        command = [sys.executable, __file__, "--read", str(machine.socket), *ids]
        reader = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        time.sleep(1.0)
        pids = processes(daemon)
        missed_before, cpu_before_s, begin_s = missed(port), cpu_s(pids), time.monotonic()
        ours = [*pids, reader.pid, os.getpid()]
        others_before_s = busy_s() - cpu_s(ours)
        begin = ask(reader)
        time.sleep(seconds / 6)
        early_mib = memory_mib(pids)
        time.sleep(max(0.0, begin_s + seconds - time.monotonic()))
        wall_s, used_s, end = time.monotonic() - begin_s, cpu_s(pids) - cpu_before_s, ask(reader)
        others_s = busy_s() - cpu_s(ours) - others_before_s
        late_mib, missed_now = memory_mib(pids), missed(port) - missed_before
        reader.stdin.close()
        package = next(c.number for c in started[0].channels if (c.device, c.quantity) == ("cpu:0", "energy"))
        begin_s = time.perf_counter()
        backlog = list(client.read(ids[0]))
        caught_s = time.perf_counter() - begin_s
        times = [
            t_ns
            for batch in backlog
            for t_ns, number in zip(batch.t_ns, batch.channel, strict=True)
            if number == package
        ]
        return Figures(
            core_share=used_s / wall_s,
            others_share=others_s / wall_s,
            early_mib=early_mib,
            late_mib=late_mib,
            readings_per_s=(end["readings"] - begin["readings"]) / wall_s,
            longest_gap_ms=max(after - before for before, after in pairwise(times)) / 1e6,
            missed=missed_now,
            dropped=end["dropped"] + sum(batch.dropped_batches for batch in backlog),
            caught_up_per_s=sum(len(batch.t_ns) for batch in backlog) / caught_s,
        )


def ask(reader: subprocess.Popen[str]) -> dict[str, int]:
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write("\n")
    reader.stdin.flush()
    return json.loads(reader.stdout.readline())


def read(path: str, session_ids: list[str]) -> None:
    """Follow all these sessions, with a connection each, and say on demand how much came."""
    readings = [0] * len(session_ids)
    dropped = [0] * len(session_ids)

    def follow(place: int) -> None:
        with connect(path) as client:
            for batch in client.read(session_ids[place], follow=True):
                readings[place] += len(batch.t_ns)
                dropped[place] += batch.dropped_batches

    for place in range(len(session_ids)):
        threading.Thread(target=follow, args=(place,), daemon=True).start()
    wait_for(lambda: all(readings), 60.0)
    print("reads", flush=True)
    for _ in sys.stdin:
        print(json.dumps({"readings": sum(readings), "dropped": sum(dropped)}), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2], sys.argv[3:])
        os._exit(0)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--period-ms", type=float, default=4.0)
    options = parser.parse_args()
    early, late = f"MiB {options.seconds / 6:.0f} s", f"{options.seconds:.0f} s"
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; every {options.period_ms:g} ms")
    print(f"{'sessions':>8} {'core':>7} {'others':>7} {early:>9} {late:>7} {'readings/s':>11} ", end="")
    print(f"{'longest gap':>12} {'missed':>7} {'dropped':>8} {'catching up':>14}")
    for _ in range(options.rounds):
        found: list[Figures] = []
        for sessions in (1, options.sessions):
            with a_machine(packages=2) as machine:
                one = measure(machine, sessions, options.seconds, options.period_ms)
            found.append(one)
            print(
                f"{sessions:8d} {one.core_share:7.2%} {one.others_share:7.1%} "
                f"{one.early_mib:9.1f} {one.late_mib:7.1f} "
                f"{one.readings_per_s:11.0f} {one.longest_gap_ms:9.1f} ms {one.missed:7d} {one.dropped:8d} "
                f"{one.caught_up_per_s:12.0f}/s",
                flush=True,
            )
        unit, many = found
        print(
            f"{'ratio':>8} {many.core_share / unit.core_share:6.1f}× {'':17} "
            f"{many.late_mib / unit.late_mib:6.1f}× {many.readings_per_s / unit.readings_per_s:10.1f}×"
        )


if __name__ == "__main__":
    main()
