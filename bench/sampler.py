"""Measures what the sampler costs: its own CPU time at 4 ms, exactly, as a share of one core.

    python bench/sampler.py [--seconds 10] [--rounds 5]

It samples a powercap tree of two sockets (package, core and dram each: six counters) and a program of 20
threads, and, in other rounds, the estimate that is used without counters. The figure is the CPU clock of
the process over the sampling, without its start-up. The rounds take turns, and the bare cost of waking up
stands beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from machine_fake import two_sockets
from powercap_fake import PowercapTree

_THREADS = """
import threading, time
def work():
    while True:
        sum(range(200)); time.sleep(0.01)
for _ in range(19):
    threading.Thread(target=work, daemon=True).start()
print("up", flush=True)
time.sleep(3600)
"""


_WAKE_UPS = """
import sys, time
from smaragdine.monitor.sampler import Alarm
from smaragdine.monitor.sampler import prioritise_thread
prioritise_thread(realtime=True)
alarm = Alarm(4_000_000)
cpu_s, begin_s, due_ns = time.process_time(), time.monotonic(), time.monotonic_ns()
while time.monotonic() - begin_s < float(sys.argv[1]):
    due_ns += 4_000_000
    alarm.wait_until(due_ns)
print((time.process_time() - cpu_s) / (time.monotonic() - begin_s))
"""


def wake_ups_alone(seconds: float) -> float:
    """The floor: an interpreter that wakes every 4 ms and does nothing, as a share of one core."""
    out = subprocess.run([sys.executable, "-c", _WAKE_UPS, str(seconds)], check=True, stdout=subprocess.PIPE)
    return float(out.stdout)


def measure(environment: dict[str, str], seconds: float) -> dict[str, Any]:
    """The recorder's own figures after following a program of 20 threads for a while."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "spool").mkdir()
        recorder = subprocess.Popen(
            [sys.executable, "-P", "-m", "smaragdine.recording.recorder", json.dumps({"folder": folder})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        program = subprocess.Popen([sys.executable, "-c", _THREADS], stdout=subprocess.PIPE)
        assert recorder.stdin is not None
        assert recorder.stdout is not None
        assert program.stdout is not None
        program.stdout.readline()
        recorder.stdout.readline()
        recorder.stdin.write(f"watch {program.pid} 1 \n")
        recorder.stdin.flush()
        time.sleep(seconds)
        program.kill()
        figures = json.loads(recorder.stdout.readlines()[-1])["done"]
        recorder.wait()
        program.wait()
        size = sum(path.stat().st_size for path in Path(folder).glob("*.arrows"))
    return {**figures, "bytes_per_s": size / figures["wall_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        root = Path(folder)
        proc = {"SMARAGDINE_PROC_ROOT": str(two_sockets(root / "proc"))}
        six = stack.enter_context(PowercapTree(root / "a", packages=2, dram=True, core=True))
        four = stack.enter_context(PowercapTree(root / "b", packages=2, dram=False, core=True))
        machines = {
            "6 counters": {**proc, "SMARAGDINE_POWERCAP_ROOT": str(six.root)},
            "4 counters, dram estimated": {**proc, "SMARAGDINE_POWERCAP_ROOT": str(four.root)},
            "all estimated": {**proc, "SMARAGDINE_POWERCAP_ROOT": str(root / "none")},
        }
        floors: list[float] = []
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in machines}
        for _ in range(options.rounds):
            floors.append(wake_ups_alone(options.seconds / 2))
            for name, environment in machines.items():
                rounds[name].append(measure(environment, options.seconds))
    print(f"{'2 sockets, 20 threads':28} {'core: median':>12} {'range':>15} {'readings/s':>11} ", end="")
    print(f"{'lag p50':>8} {'p99':>8} {'missed':>7} {'kB/s':>6} {'start-up':>9}")
    print(f"{'(wake-ups alone)':28} {_spread(floors)}")
    for name, results in rounds.items():
        lanes = [result["lanes"]["counters"] for result in results]
        print(
            f"{name:28} {_spread([result['core_share'] for result in results])} "
            f"{results[0]['readings'] / results[0]['wall_s']:11.0f} "
            f"{statistics.median(lane['lag_p50_ms'] for lane in lanes):5.2f} ms "
            f"{statistics.median(lane['lag_p99_ms'] for lane in lanes):5.2f} ms "
            f"{sum(lane['missed'] for lane in lanes):7d} {results[0]['bytes_per_s'] / 1e3:6.1f} "
            f"{statistics.median(result['start_cpu_s'] for result in results):7.2f} s"
        )


def _spread(shares: list[float]) -> str:
    return f"{statistics.median(shares):12.2%} {min(shares):6.2%} … {max(shares):.2%}"


if __name__ == "__main__":
    main()
