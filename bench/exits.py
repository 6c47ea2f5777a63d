"""Measures whether programs that end right after a traced window do end, many of them at a time.

    python bench/exits.py [--programs 30] [--at-once 10]      # a GPU is needed to say something

Every third program does something else for three seconds before it ends. Beside them, *kineto* is PyTorch's
profiler alone, told to leave CUPTI as we tell it, in a program that does not call CUDA any more before it
ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIMIT_S = 40
LATER_S = 3

TRAIN = """
import sys, time, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
block = lambda: torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256))
model = torch.nn.Sequential(*[block() for _ in range(24)]).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(64, 256, device=device)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
time.sleep(float(sys.argv[2]))
"""

KINETO = """
import os, torch
import torch.autograd.profiler as profiler
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(48)]).to(device)
os.environ["KINETO_LOG_LEVEL"] = "99"
profile = profiler.profile(use_kineto=True, use_device="cuda" if device == "cuda" else None)
profile._prepare_trace()
profile._start_trace()
for _ in range(10):
    model(torch.randn(64, 256, device=device)).sum().backward()
if device == "cuda":
    torch.cuda.synchronize()
os.environ["TEARDOWN_CUPTI"] = "1"
torch.autograd._disable_profiler()
"""

STEPS = (21, 22, 24, 30, 60, 120)  # the window ends with step 21, the writing of its file some steps later


def took_s(folder: Path, kind: str, number: int) -> float | None:
    """How long it took to end; None: it did not end."""
    command = [sys.executable, str(folder / "kineto.py")]
    if kind == "smaragdine":
        later_s = 0 if number % 3 else LATER_S
        program = [str(folder / "train.py"), str(STEPS[number % len(STEPS)]), str(later_s)]
        own = ["-m", "smaragdine", "run", "--trace-steps", "10", "-o", str(folder / str(number))]
        command = [sys.executable, *own, *program]
    begin_s = time.monotonic()
    with open(folder / f"{kind}-{number}.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            if process.wait(LIMIT_S):
                sys.exit(Path(log.name).read_text())
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
    return time.monotonic() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--programs", type=int, default=30)
    parser.add_argument("--at-once", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        (folder / "kineto.py").write_text(KINETO)
        plan = [(kind, number) for number in range(options.programs) for kind in ("smaragdine", "kineto")]
        with ThreadPoolExecutor(options.at_once) as pool:
            found = list(pool.map(lambda each: took_s(folder, *each), plan))
    print(f"{'':12}{'programs':>10}{'ended':>8}{'never':>8}{'median':>10}")
    for kind in ("smaragdine", "kineto"):
        times = [took for (each, _), took in zip(plan, found, strict=True) if each == kind]
        ended = [took for took in times if took is not None]
        median = f"{statistics.median(ended):.1f} s" if ended else "–"
        print(f"{kind:12}{len(times):10}{len(ended):8}{len(times) - len(ended):8}{median:>10}")


if __name__ == "__main__":
    main()
