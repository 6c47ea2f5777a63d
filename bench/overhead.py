"""Measures what `smaragdine run` costs the program: a single-threaded training loop with and without it.

    python bench/overhead.py [--pairs 20]

The two of a pair run one after the other, in random order, and the program times its own loop. This needs
PyTorch, and a free core beside the program's own.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from smaragdine.stats import ratio_interval

_LOOP = Path(__file__).with_name("training_loop.py")


def wall_s(command: list[str], steps: int, environment: dict[str, str]) -> float:
    out = subprocess.run(
        command,
        env=environment,
        check=True,
        input=f"{steps}\n",
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    ready, wall_s, _cpu_s = out.stdout.split()
    assert ready == "ready"
    return float(wall_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=16)
    pairs = parser.parse_args().pairs
    print(f"{'time with run ÷ without':24} {'pairs':>6} {'step':>9} {'middle':>8} {'95 % interval':>20}")
    for name, width, batch, steps in (("short steps", 512, 128, 2000), ("longer steps", 1024, 256, 500)):
        compare(name, [str(_LOOP), str(width), str(batch)], pairs, steps)


def compare(name: str, program: list[str], pairs: int, steps: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    bare: list[float] = []
    wrapped: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(pairs):
            plain = [sys.executable, *program]
            run = [sys.executable, "-m", "smaragdine", "run", "-o", f"{folder}/{i}", *program]
            both = [(plain, bare), (run, wrapped)]
            random.shuffle(both)
            for command, times in both:
                times.append(wall_s(command, steps, environment))
            if sys.stderr.isatty():
                print(f"\r{name}: {i + 1}/{pairs} pairs ", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    low, middle, high = ratio_interval(wrapped, bare)
    step_ms = sum(bare) / len(bare) / steps * 1e3
    print(
        f"{name:24} {pairs:6d} {step_ms:6.2f} ms {middle - 1:+8.2%} {low - 1:+9.2%} … {high - 1:+.2%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
