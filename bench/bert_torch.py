"""Trains a BERT with random weights, as a program to be measured. It knows nothing of Smaragdine.

    python bench/bert_torch.py --steps 500 --json steps.json                              # BERT-base, 32×128
    python bench/bert_torch.py --steps 5 --layers 2 --hidden 64 --batch 2 --length 16     # on a laptop

On CUDA it runs in bfloat16 by autocast. Steps are stamped on the CPU without waiting for the device; only the
end of the whole training waits for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = BertConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=max(1, options.hidden // 64),
        intermediate_size=4 * options.hidden,
        attn_implementation=options.attention,
    )
    model = BertForMaskedLM(config).to(device).train()
    run = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (options.batch, options.length)
    words = torch.randint(config.vocab_size, shape, device=device)
    mask = torch.ones(shape, dtype=torch.long, device=device)
    autocast = (
        torch.autocast(device, torch.bfloat16)
        if device == "cuda" and not options.fp32
        else contextlib.nullcontext()
    )

    ends_ns: list[int] = []
    _wait(device)
    begin_ns = time.time_ns()
    for _ in range(options.steps):
        optimizer.zero_grad()
        with autocast:
            loss = run(input_ids=words, attention_mask=mask, labels=words).loss
        loss.backward()
        optimizer.step()
        ends_ns.append(time.time_ns())
    _wait(device)
    end_ns = time.time_ns()

    starts_ns = [begin_ns, *ends_ns[:-1]]
    steps_ms = [(end - start) * 1e-6 for start, end in zip(starts_ns, ends_ns, strict=True)]
    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "options": vars(options),
        "begin_ns": begin_ns,
        "end_ns": end_ns,
        "step_end_ns": ends_ns,
        "step_ms": steps_ms,
        "median_step_ms": statistics.median(steps_ms),
        "whole_s": (end_ns - begin_ns) * 1e-9,
        "loss": float(loss.detach()),
    }
    if options.json is not None:
        Path(options.json).write_text(json.dumps(result))
    print(
        f"{options.steps} steps in {result['whole_s']:.3f} s, median {result['median_step_ms']:.2f} ms, "
        f"loss {result['loss']:.6f}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "eager"))
    parser.add_argument("--fp32", action="store_true", help="no autocast")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
