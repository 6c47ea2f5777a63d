"""Makes ten real comparisons: a small PyTorch training, recorded three times on either side.

    python bench/real_pairs.py FOLDER

In five pairs the programs are equal; in five, side B has a hidden layer that is twice as wide. The last two
pairs of each kind run beside a neighbour of our own making, which keeps one CPU busy for some seconds and
rests for some. The two sides are recorded in turn, as they should be. FOLDER keeps the recordings; those
that are there already are not made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = """\
import sys
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
wide = int(sys.argv[1])
model = torch.nn.Sequential(
    torch.nn.Linear(256, 512), torch.nn.ReLU(),
    torch.nn.Linear(512, wide), torch.nn.ReLU(),
    torch.nn.Linear(wide, 512), torch.nn.ReLU(),
    torch.nn.Linear(512, 512), torch.nn.ReLU(),
    torch.nn.Linear(512, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(60):
    x, y = torch.randn(256, 256), torch.randint(10, (256,))
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
NEIGHBOUR = """\
import random, time
while True:
    until = time.monotonic() + random.uniform(0.5, 3)
    while time.monotonic() < until:
        sum(range(1000))
    time.sleep(random.uniform(0.5, 3))
"""
PAIRS, RUNS = 10, 3
USUAL, WIDE = 512, 1024
CLAIMS = ("more", "less")


@contextmanager
def neighbour(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    beside = subprocess.Popen([sys.executable, "-c", NEIGHBOUR])
    try:
        yield
    finally:
        beside.kill()
        beside.wait()


def record(folder: Path, program: Path, width: int) -> str:
    if not folder.exists():
        words = ["run", "-o", str(folder), "--", sys.executable, str(program), str(width)]
        subprocess.run([sys.executable, "-m", "smaragdine", *words], check=True, capture_output=True)
    return str(folder)


def main() -> None:
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    program = root / "train.py"
    program.write_text(PROGRAM)
    head = "pair  B          neighbour  foreign A, B   sum               idle              names changed"
    print(f"{head}  layers changed")
    for pair in range(PAIRS):
        wider, busy = pair % 2 == 1, pair >= PAIRS - 4
        with neighbour(busy):
            a: list[str] = []
            b: list[str] = []
            for run in range(RUNS):
                a.append(record(root / f"{pair}-a{run}", program, USUAL))
                b.append(record(root / f"{pair}-b{run}", program, WIDE if wider else USUAL))
        found: list[dict[str, Any]] = []
        for by in ("name", "layer"):
            words = ["compare", *a, "--against", *b, "--by", by, "--depth", "2", "--json"]
            said = subprocess.run(
                [sys.executable, "-m", "smaragdine", *words], check=True, capture_output=True, text=True
            )
            found.append(json.loads(said.stdout))
            (root / f"{pair}-{by}.json").write_text(said.stdout)
        names = found[0]
        total = names["total"]
        changed = [
            sorted(f"{c['name']} {c['verdict']}" for c in each["changes"] if c["verdict"] in CLAIMS)
            for each in found
        ]
        loads = ", ".join("?" if load is None else f"{load:.0%}" for load in names["foreign_load"].values())
        print(
            f"{pair:4}  {'wider' if wider else 'equal':9}  {'yes' if busy else 'no':9}  {loads:13}  "
            f"{total['verdict']:16}  {names['idle']['verdict']:16}  "
            f"{len(changed[0]):3} of {len(names['changes']):3}     {'; '.join(changed[1]) or 'none'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
