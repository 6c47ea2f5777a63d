"""A ResNet on unequal GPUs: see README.md beside this file.

python train.py --batch-size 128                                      # on one GPU; this is what gets profiled
torchrun --nproc-per-node 2 train.py --allocation allocation.json     # as smaragdine allocate has it
torchrun --nproc-per-node 2 train.py --split 1874,2222
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import smaragdine.hetero
from smaragdine.errors import UserError

# Images, classes, side, and the layers of each stage: ResNet-18 in both cases.
SHAPES = {"cifar100": (50_000, 100, 32), "imagenet": (1_281_167, 1000, 224)}
STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(32, channels)


class Block(nn.Module):
    def __init__(self, before: int, channels: int, stride: int, norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, 1, bias=False),
            norm(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            norm(channels),
        )
        same = stride == 1 and before == channels
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), norm(channels))
        )

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


def resnet18(classes: int, side: int, norm) -> nn.Sequential:
    large = side > 64
    stem = [nn.Conv2d(3, 64, 7 if large else 3, 2 if large else 1, 3 if large else 1, bias=False), norm(64)]
    layers = [*stem, nn.ReLU(inplace=True), *([nn.MaxPool2d(3, 2, 1)] if large else [])]
    before = 64
    for channels, stride in STAGES:
        layers += [Block(before, channels, stride, norm), Block(channels, channels, 1, norm)]
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


class Synthetic(torch.utils.data.Dataset):
    """Tensors of the data's shape: the same sample for the same index, on every rank."""

    def __init__(self, count: int, classes: int, side: int) -> None:
        self.count, self.classes = count, classes
        self.images = torch.randn(256, 3, side, side, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return self.images[index % len(self.images)], index % self.classes


def data(options: argparse.Namespace):
    count, classes, side = SHAPES[options.shape]
    if options.data is None:
        return Synthetic(options.samples or count, classes, side)
    from torchvision import datasets, transforms

    if options.shape == "cifar100":
        augment = transforms.Compose(
            [transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        )
        return datasets.CIFAR100(options.data, train=True, transform=augment)
    augment = transforms.Compose(
        [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    return datasets.ImageFolder(os.path.join(options.data, "train"), augment)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--batch-size", type=int, help="batch size, to train on one GPU alone")
    how.add_argument("--split", help="samples for each rank: 1874,2222")
    how.add_argument("--allocation", help="a file that smaragdine allocate --json wrote")
    parser.add_argument("--shape", choices=SHAPES, default="cifar100")
    parser.add_argument("--data", help="folder with the real files (synthetic tensors without it)")
    parser.add_argument("--samples", type=int, help="how many samples the synthetic data has")
    parser.add_argument("--norm", choices=("group", "batch"), default="group")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--amp", action="store_true", help="use bfloat16 if the device can")
    parser.add_argument("--limits", action="store_true", help="set the allocation's power limits")
    return parser.parse_args()


def train(options: argparse.Namespace) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    how = options.allocation or (
        [options.batch_size] if options.batch_size else [int(n) for n in options.split.split(",")]
    )
    with smaragdine.hetero.split(how, power_limits=options.limits) as shards:
        dataset = data(options)
        loader = shards.loader(dataset, num_workers=options.workers, pin_memory=torch.cuda.is_available())
        torch.manual_seed(0)
        model = resnet18(
            *SHAPES[options.shape][1:], group_norm if options.norm == "group" else nn.BatchNorm2d
        )
        if options.norm == "batch" and torch.cuda.is_available() and shards.world_size > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = shards.wrap(model.to(device))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
        for epoch in range(options.epochs):
            loader.set_epoch(epoch)
            for x, y in loader:
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                with torch.autocast(str(device).split(":")[0], torch.bfloat16, enabled=options.amp):
                    loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad(set_to_none=True)
                shards.weight(loss).backward()
                optimizer.step()
            if shards.rank == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f} of the last shard", flush=True)
    if dist.is_initialized():
        del model, optimizer
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        train(parse())
    except UserError as error:
        sys.exit(f"train.py: {error}")
