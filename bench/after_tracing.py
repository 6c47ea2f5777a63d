"""Measures whether steps are slower after the profiler has stopped than before it began (PyTorch on CUDA).

    python bench/after_tracing.py [--rounds 4] [--steps 60] [--traced 3]

One process trains BERT-base 32×128 in bfloat16: untraced steps, a traced window, steps while the window's
trace is written beside them, untraced steps, and so on. With TEARDOWN_CUPTI=0 Kineto stays attached, for
comparison.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
from transformers import BertConfig, BertForMaskedLM

from smaragdine.tracing.hook.torch import tracer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("rounds", 4), ("steps", 60), ("traced", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig()).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = torch.randint(30522, (32, 128), device="cuda")

    def median_ms(steps: int) -> float:
        times: list[float] = []
        for _ in range(steps):
            begin = time.perf_counter()
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=words, labels=words).loss
            loss.backward()
            optimizer.step()
            times.append((time.perf_counter() - begin) * 1e3)
        torch.cuda.synchronize()
        return statistics.median(times)

    median_ms(10)
    before_ms = median_ms(options.steps)
    print(
        f"TEARDOWN_CUPTI={os.environ.get('TEARDOWN_CUPTI', '')}; {before_ms:.2f} ms a step before any tracing"
    )
    print("round   start s   traced ms   pause s   written s   while ms   after ms   after ÷ before")
    with tempfile.TemporaryDirectory() as folder:
        for i in range(options.rounds):
            begin = time.perf_counter()
            session = tracer.start()
            start_s = time.perf_counter() - begin
            traced_ms = median_ms(options.traced)
            begin = time.perf_counter()
            ending = tracer.stop_aside(session, f"{folder}/{i}.json", lambda *facts: None)
            if ending is None:
                tracer.stop(session, f"{folder}/{i}.json")
            pause_s = time.perf_counter() - begin
            while_ms = [median_ms(1)]
            while ending is not None and not ending.over():
                while_ms.append(median_ms(1))
            written_s = time.perf_counter() - begin
            after_ms = median_ms(options.steps)
            print(
                f"{i:5} {start_s:9.3f} {traced_ms:11.2f} {pause_s:9.3f} {written_s:11.2f}"
                f" {statistics.median(while_ms):10.2f} {after_ms:10.2f} {after_ms / before_ms:16.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
