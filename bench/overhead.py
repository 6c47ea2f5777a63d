"""What `smaragdine run` costs the program: a single-threaded training loop with and without it.

    python bench/overhead.py [--pairs 20]

Pairs run in turn and in random order; the program times its own loop. Needs a free core beside the
program's own, and PyTorch.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from smaragdine.accounting.ratios import ratio_interval

_LOOP = """
import time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, {width}), torch.nn.ReLU(), torch.nn.Linear({width}, 10))
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.randn({batch}, 256), torch.randint(0, 10, ({batch},))
def steps(count):
    for _ in range(count):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
steps(50)
begin = time.perf_counter()
steps({steps})
print(time.perf_counter() - begin)
"""


def seconds(command: list[str], environment: dict[str, str]) -> float:
    out = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return float(out.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=16)
    pairs = parser.parse_args().pairs
    print(f"{'time with run ÷ without':24} {'pairs':>6} {'step':>9} {'middle':>8} {'95 % interval':>20}")
    for name, width, batch, steps in (("short steps", 512, 128, 2000), ("longer steps", 1024, 256, 500)):
        compare(name, _LOOP.format(width=width, batch=batch, steps=steps), pairs, steps)


def compare(name: str, program: str, pairs: int, steps: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    bare: list[float] = []
    wrapped: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "loop.py"
        script.write_text(program)
        for i in range(pairs):
            plain = [sys.executable, str(script)]
            run = [sys.executable, "-m", "smaragdine", "run", "-o", f"{folder}/{i}", str(script)]
            both = [(plain, bare), (run, wrapped)]
            random.shuffle(both)
            for command, times in both:
                times.append(seconds(command, environment))
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
