"""A program to be measured: a single-threaded training loop. A line of input says how many steps to make.

    echo 2000 | python bench/training_loop.py [WIDTH BATCH]      (needs PyTorch)

It prints `ready`, and for each line how long the steps took: seconds of wall time and of CPU time.
"""

import sys
import time

import torch

width, batch = (int(word) for word in (sys.argv[1:] or ["512", "128"]))
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.randn(batch, 256), torch.randint(0, 10, (batch,))


def steps(count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


steps(50)
print("ready", flush=True)
for line in sys.stdin:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    steps(int(line))
    print(time.perf_counter() - wall_s, time.process_time() - cpu_s, flush=True)
