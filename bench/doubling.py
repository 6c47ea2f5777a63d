"""Checks calibrated rows against the energy counter, without replays: every call of one operation runs twice.

    smaragdine run -o runs/gpt2 bench/doubling.py --train gpt2
    smaragdine calibrate runs/gpt2
    python bench/doubling.py runs/gpt2 gpt2 aten::mm aten::addmm aten::mul

Needs an NVIDIA GPU, PyTorch and transformers. The step is captured as a CUDA graph, once as it is (A) and
once with every call of the operation made twice (B). They run A B A B, some seconds each, and what B takes
more by the counter is what the operation takes: its row should say the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

SECONDS = 2.2
STEPS = 100


def bert() -> tuple[Any, Callable[[], Any]]:
    import torch
    from transformers import BertConfig, BertForPreTraining

    model = BertForPreTraining(BertConfig()).cuda().train()
    tokens, labels = (torch.randint(0, 30000, (32, 128), device="cuda") for _ in range(2))
    follows = torch.randint(0, 2, (32,), device="cuda")
    return model, lambda: model(input_ids=tokens, labels=labels, next_sentence_label=follows).loss


def gpt2() -> tuple[Any, Callable[[], Any]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).cuda().train()
    tokens = torch.randint(0, 50257, (8, 1024), device="cuda")
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


MODELS = {"bert": bert, "gpt2": gpt2}


def training(name: str, **adam: Any) -> Callable[[bool], None]:
    """One step, bf16 with AdamW."""
    import torch

    torch.manual_seed(0)
    model, loss_of = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **adam)

    def step(keep_casts: bool = True) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=keep_casts):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def train(name: str) -> None:
    import torch

    step = training(name)
    for _ in range(STEPS):
        step(True)
    torch.cuda.synchronize()


def captured(step: Callable[[bool], None], operation: str | None) -> tuple[Any, int]:
    """The step as a graph, and how many calls of the operation were made twice in it."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Twice(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func._schema.name == operation:
                self.count += 1
                func(*args, **(kwargs or {}))
            return out

    graph, twice = torch.cuda.CUDAGraph(), Twice()
    with torch.cuda.graph(graph):
        if operation is None:
            step(False)
        else:
            with twice:
                step(False)
    return graph, twice.count


def joules(graph: Any, meter: Any) -> float:
    """Of one replay of the graph."""
    import torch

    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    begin_s, count, waiting = time.monotonic(), 0, []
    while time.monotonic() - begin_s < SECONDS:
        graph.replay()
        done = torch.cuda.Event()
        done.record()
        waiting.append(done)
        count += 1
        if len(waiting) > 3:
            waiting.pop(0).synchronize()
    torch.cuda.synchronize()
    length_s = time.monotonic() - begin_s
    return meter.over(begin_s + 0.3, SECONDS - 0.7).power_w * length_s / count


def rows_j(path: str, calibrated: bool) -> dict[str, float]:
    """Operation → its energy in one step of gpu:0, all layers together."""
    from smaragdine.accounting.run import Run

    run = Run.open(path)
    if not calibrated:
        vars(run)["calibrations"] = ({}, "")
    found: dict[str, float] = {}
    for row in run.needed.device_rows("gpu:0").to_pylist():
        operation = "aten::" + row["name"].rpartition("/")[2]
        found[operation] = found.get(operation, 0.0) + row["energy_j"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", help="a calibrated recording of --train")
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("operations", nargs="*", help="aten::mm …")
    parser.add_argument("--train", choices=MODELS, help="train, to be recorded")
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return 0
    import torch

    from smaragdine.calibrate.meter import NvmlMeter

    calibrated, equal = rows_j(options.run, True), rows_j(options.run, False)
    meter = NvmlMeter()
    step = training(options.model, capturable=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(4):
            step(False)
    torch.cuda.synchronize()
    plain, _ = captured(step, None)
    print(f"{'operation':<34}{'calls':>6}{'measured':>10}{'of a step':>10}{'calibrated':>12}{'equal':>9}")
    before_j = joules(plain, meter)
    for operation in options.operations:
        doubled, count = captured(step, operation)
        if not count:
            print(f"{operation:<34} does not occur")
            continue
        doubled_j, plain_j = [], [before_j]
        for _ in range(2):
            doubled_j.append(joules(doubled, meter))
            plain_j.append(joules(plain, meter))
        before_j = plain_j[-1]
        step_j = statistics.fmean(plain_j)
        measured_j = statistics.fmean(doubled_j) - step_j
        off = [of.get(operation, 0.0) / measured_j - 1 for of in (calibrated, equal)]
        said = f"{measured_j:>8.3f} J{measured_j / step_j:>10.1%}{off[0]:>+12.1%}{off[1]:>+9.1%}"
        print(f"{operation:<34}{count:>6}{said}", flush=True)
    meter.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
