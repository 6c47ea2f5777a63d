"""What the sampler costs: its own CPU time at 4 ms, exactly, as a share of one core.

    python bench/sampler.py [--seconds 20]

A powercap tree of two sockets (package, core and dram each: six counters), a program of 20 threads, and
the estimate where no counter is. The figure is the process's CPU clock over the sampling, start-up apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def measure(name: str, environment: dict[str, str], seconds: float) -> None:
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
        size = sum(path.stat().st_size for path in Path(folder).glob("*.arrows"))
    lane = figures["lanes"]["counters"]
    print(
        f"{name:34} {figures['core_share']:7.2%} {figures['readings'] / figures['wall_s']:10.0f} "
        f"{lane['lag_p50_ms']:8.2f} {lane['lag_p99_ms']:8.2f} {lane['missed']:7d} "
        f"{size / figures['wall_s'] / 1e3:7.1f} {figures['start_cpu_s']:8.2f}  {lane['priority']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    print(
        f"{'':34} {'core':>7} {'readings/s':>10} {'lag p50':>8} {'p99 ms':>8} {'missed':>7} "
        f"{'kB/s':>7} {'start s':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        proc = {"SMARAGDINE_PROC_ROOT": str(two_sockets(Path(folder) / "proc"))}
        with PowercapTree(Path(folder) / "a", packages=2, dram=True, core=True) as tree:
            measure("2 sockets, 6 counters", {**proc, "SMARAGDINE_POWERCAP_ROOT": str(tree.root)}, seconds)
        with PowercapTree(Path(folder) / "b", packages=2, dram=False, core=True) as tree:
            measure(
                "2 sockets, 4 counters, dram estimate",
                {**proc, "SMARAGDINE_POWERCAP_ROOT": str(tree.root)},
                seconds,
            )
        measure("2 sockets, estimate alone", {**proc, "SMARAGDINE_POWERCAP_ROOT": f"{folder}/none"}, seconds)


if __name__ == "__main__":
    main()
