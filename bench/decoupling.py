"""Measures what it costs a program that a daemon samples it every 4 ms.

    python bench/decoupling.py [--groups 100] [--piece-s 0.4]      (as root; needs PyTorch and a second core)

First it measures the daemon's own CPU time over the machine's (cores × wall), by the kernel's clocks of all
the daemon's processes, while the daemon follows the program. Then it measures the program itself: a
single-threaded training loop, pinned to one core, that does the same work over and over. Pieces with and
without the daemon take turns (ABBA). In the pieces without, the daemon's processes are stopped (SIGSTOP)
and cost nothing at all. A group gives the ratio of its two pieces with to its two without; the middle is
the median over all groups in which the second core was free.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from cli import children
from daemon_fake import Daemon, a_machine
from smaragdine.stats import ratio_interval

_FREE = 0.15  # of a core: more than the kernel and a shell take

_LOOP = Path(__file__).with_name("training_loop.py")


@dataclass(frozen=True)
class Piece:
    wall_s: float
    cpu_s: float

    def __add__(self, other: Piece) -> Piece:
        return Piece(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


class Program:
    """The training loop; `run` tells it how many steps to make."""

    def __init__(self, core: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(_LOOP)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def run(self, steps: int) -> Piece:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return Piece(*map(float, self.process.stdout.readline().split()))


def processes(daemon: Daemon) -> list[int]:
    return [daemon.process.pid, *children(daemon.process.pid)]


def cpu_s(pids: list[int]) -> float:
    """The kernel's own clocks of these processes, to the nanosecond."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def signal_all(pids: list[int], number: signal.Signals) -> None:
    # The operator's process last on the way down: it waits for its children.
    for pid in pids if number == signal.SIGCONT else reversed(pids):
        os.kill(pid, number)


def others_s(pids: list[int]) -> float:
    """CPU time of everything on the machine but these processes and the idle loop."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split(None, 9)[1:9]]
    user, nice, system, _, _, irq, soft_irq, stolen = fields
    busy = user + nice + system + irq + soft_irq + stolen
    return busy / os.sysconf("SC_CLK_TCK") - cpu_s(pids)


@dataclass(frozen=True)
class Groups:
    """For each group, the two pieces with the daemon and the two without."""

    sampled: list[Piece]
    alone: list[Piece]
    left_out: int  # in these, others had the core that should be free


def measure(program: Program, pids: list[int], steps: int, wanted: int, most_s: float) -> Groups:
    groups = Groups([], [], 0)
    deadline_s = time.monotonic() + most_s
    everybody = [*pids, program.process.pid]
    turn = 0
    try:
        while len(groups.alone) < wanted and time.monotonic() < deadline_s:
            turn += 1
            found = {True: Piece(0.0, 0.0), False: Piece(0.0, 0.0)}
            begin_s, before_s = time.monotonic(), others_s(everybody)
            for with_it in (True, False, False, True) if turn % 2 else (False, True, True, False):
                signal_all(pids, signal.SIGCONT if with_it else signal.SIGSTOP)
                time.sleep(0.03)  # what it has to catch up with is none of the program's time
                found[with_it] += program.run(steps)
            if others_s(everybody) - before_s > _FREE * (time.monotonic() - begin_s):
                groups = replace(groups, left_out=groups.left_out + 1)
                continue
            groups.sampled.append(found[True])
            groups.alone.append(found[False])
    finally:
        signal_all(pids, signal.SIGCONT)
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=15.0, help="at most")
    parser.add_argument("--piece-s", type=float, default=0.4)
    parser.add_argument("--seconds", type=float, default=20.0, help="for the daemon's own share")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(a_machine(packages=2))
        daemon = stack.enter_context(machine.daemon())
        client = stack.enter_context(daemon.connect())
        program = Program(cores[-1])
        stack.callback(program.process.kill)
        steps = max(1, round(options.piece_s / (program.run(200).wall_s / 200)))
        client.start(program.process.pid, period_ms=4)
        pids = processes(daemon)

        print(f"load {os.getloadavg()[0]:.1f} on {len(cores)} cores; six counters, every 4 ms", flush=True)
        program.run(steps)
        used_s, begin_s = cpu_s(pids), time.monotonic()
        while time.monotonic() - begin_s < options.seconds:
            program.run(steps)
        used_s, wall_s = cpu_s(pids) - used_s, time.monotonic() - begin_s
        share = used_s / wall_s / len(cores)
        print(f"daemon's CPU time ÷ machine's: {used_s:.3f} s of {wall_s * len(cores):.1f} s = {share:.2%}")

        groups = measure(program, pids, steps, options.groups, 60 * options.minutes)
        print(
            f"load {os.getloadavg()[0]:.1f}; {len(groups.alone)} groups of 4 × {options.piece_s:g} s, "
            f"{groups.left_out} left out, in which others had more than {_FREE:.0%} of a core"
        )
        for name, what in (("wall time", "wall_s"), ("CPU time", "cpu_s")):
            with_it, without = (
                [getattr(piece, what) for piece in each] for each in (groups.sampled, groups.alone)
            )
            low, middle, high = ratio_interval(with_it, without)
            ratios = sorted(a / b - 1 for a, b in zip(with_it, without, strict=True))
            tenth = len(ratios) // 10
            print(
                f"program's {name}, sampled ÷ alone: {middle - 1:+.2%}, 95 % interval {low - 1:+.2%} … "
                f"{high - 1:+.2%}; of groups, 80 % lie in {ratios[tenth]:+.1%} … {ratios[-1 - tenth]:+.1%}"
            )


if __name__ == "__main__":
    main()
