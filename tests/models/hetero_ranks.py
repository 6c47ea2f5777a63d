"""Trains small networks in several ways as one of several ranks: hetero_ranks.py RANK WORLD FOLDER SPLIT.

With one rank it is the reference: a plain loop over the same global batches, without anything of ours but the
order of the samples.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import smaragdine.hetero
from smaragdine.hetero.shards import permutation

SEED, EPOCHS, IGNORED = 5, 3, -100


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU())
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, x):
        return self.head(torch.tanh(self.table(x))).transpose(1, 2)


def images(count, dtype):
    random = torch.Generator().manual_seed(1)
    x = torch.randn(count, 2, 4, 4, generator=random, dtype=dtype)
    return torch.utils.data.TensorDataset(x, torch.randint(5, (count,), generator=random))


def texts(count):
    """Of very different length; some have nothing to predict."""
    random = torch.Generator().manual_seed(2)
    x, y = (torch.randint(11, (count, 7), generator=random) for _ in range(2))
    length = torch.randint(8, (count, 1), generator=random)
    y[torch.arange(7)[None, :] >= length] = IGNORED
    return torch.utils.data.TensorDataset(x, y)


def build(kind, dtype):
    torch.manual_seed(3)
    model = kind().to(dtype)
    return model, torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)


def reference(kind, dataset, dtype, batch, every=1, tokens=False):
    """One device, the whole batch."""
    model, optimizer = build(kind, dtype)
    for epoch in range(EPOCHS):
        order = permutation(len(dataset), SEED, epoch)
        begins = list(range(0, len(dataset), batch))
        for n, begin in enumerate(begins):
            x, y = dataset[order[begin : begin + batch].tolist()]
            loss = F.cross_entropy(model(x), y)
            (loss / every).backward()
            if (n + 1) % every == 0 or n + 1 == len(begins):
                optimizer.step()
                optimizer.zero_grad()
    return model


def shared(shards, kind, dataset, dtype, every=1, tokens=False, mixed=False):
    model, optimizer = build(kind, dtype)
    model = shards.wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=mixed)
    loader = shards.loader(dataset, seed=SEED)
    seen = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for n, (x, y) in enumerate(loader):
            seen.append([shards.part.samples, len(x)])
            step = (n + 1) % every == 0 or n + 1 == len(loader)
            model.require_backward_grad_sync = step  # what no_sync() sets
            if tokens:
                summed = F.cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum")
                loss = shards.weight(summed, (y != IGNORED).sum(), summed=True)
            else:
                loss = shards.weight(F.cross_entropy(model(x), y))
            scaler.scale(loss / every).backward()
            if step:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return model.module, seen


def main(rank, world, folder, split):
    torch.set_num_threads(1)
    case = {"kind": Network, "dtype": torch.float64}
    cases = {
        "float64": {**case, "dataset": images(37, torch.float64)},
        "float32": {**case, "dataset": images(37, torch.float32), "dtype": torch.float32},
        "accumulated": {**case, "dataset": images(37, torch.float64), "every": 2},
        "tokens": {**case, "kind": Tokens, "dataset": texts(37), "tokens": True},
        # 3 : 5 of one sample is none for the first rank.
        "empty": {**case, "dataset": images(33, torch.float64)},
        "empty tokens": {**case, "kind": Tokens, "dataset": texts(33), "tokens": True},
    }
    if world == 1:
        weights = {name: reference(batch=sum(split), **case).state_dict() for name, case in cases.items()}
        torch.save(weights, folder / "reference.pt")
        return
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    weights, parts = {}, {}
    with smaragdine.hetero.split(split, folder=folder / "run") as shards:
        for name, case in {**cases, "mixed": {**cases["float32"], "mixed": True}}.items():
            model, parts[name] = shared(shards, **case)
            weights[name] = model.state_dict()
            del model
    torch.save(weights, folder / f"rank{rank}.pt")
    (folder / f"parts{rank}.json").write_text(json.dumps(parts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
