"""`smaragdine batch`: finds the batch size and power limit that reach a target at the least cost."""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from typing import Any

from smaragdine.allocate.batch_size import BatchSize, Replay, batch_sizes, best_batch_size, epoch_cost, replay
from smaragdine.allocate.profile import MeasuredEpoch, read_epochs, read_trainings
from smaragdine.cli.parsing import Parser, count, positive_count, print_json
from smaragdine.errors import UserError

_EXAMPLE = """\
  smaragdine batch --epochs v100=v100.csv --trainings train.csv \\
    --workload cifar100/shufflenetv2/adadelta --target 0.6 --default 1024 --recurrences 100"""


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    gpu, equals, file = options.epochs.partition("=")
    if not (gpu and equals and file):
        raise UserError(f"--epochs {options.epochs}", "that is not GPU=FILE", "See smaragdine batch --help")
    if not 0 <= options.eta <= 1:
        raise UserError(f"--eta {options.eta:g} is not between 0 and 1")
    epochs = read_epochs(file, gpu)
    trainings = read_trainings(options.trainings)
    sizes = batch_sizes(epochs, trainings, gpu, options.workload, options.target, options.eta)
    best = best_batch_size(sizes)
    default = _default(sizes, epochs, options)
    replays = [replay(sizes, default, options.recurrences, seed) for seed in range(options.replays)]
    if options.json:
        return print_json(_json(sizes, best, default, replays))
    from smaragdine.report.allocation import batch_tables
    from smaragdine.report.terminal import console

    console().print(batch_tables(sizes, best, default, replays))
    return 0


def _parser() -> Parser:
    parser = Parser(
        "batch",
        "Find the batch size and power limit that reach a target at the least cost: epochs × their cost.\n"
        "A bandit can find them for a job that recurs, while it runs; here it is replayed on the tables.",
        _EXAMPLE,
    )
    parser.add_argument(
        "--epochs", metavar="GPU=FILE", required=True, help="a table of time and power per epoch"
    )
    parser.add_argument("--trainings", metavar="FILE", required=True, help="a table of epochs until targets")
    parser.add_argument("--workload", metavar="NAME", required=True, help="dataset/network/optimizer")
    parser.add_argument("--target", metavar="X", type=float, required=True, help="the metric to reach")
    parser.add_argument("--eta", metavar="η", type=float, default=0.5, help="weight of energy, 0 to 1 (0.5)")
    parser.add_argument("--default", metavar="N", type=positive_count, help="the batch size used so far")
    parser.add_argument(
        "--recurrences", metavar="N", type=positive_count, default=100, help="how often the job recurs (100)"
    )
    parser.add_argument(
        "--replays", metavar="N", type=count, default=20, help="how often to replay the bandit (20)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _default(sizes: list[BatchSize], epochs: list[MeasuredEpoch], options: argparse.Namespace) -> BatchSize:
    """Without us: the highest limit and, unless given, the largest batch that reaches the target."""
    reaching = [size.batch for size in sizes if size.reaches]
    batch = options.default or max(reaching)
    if batch not in reaching:
        raise UserError(
            f"batch size {batch} does not reach the target, or was not measured",
            remedy=f"There are: {', '.join(map(str, reaching))}",
        )
    size = next(size for size in sizes if size.batch == batch)
    rows = [epoch for epoch in epochs if (epoch.workload, epoch.batch) == (options.workload, batch)]
    top = max(rows, key=lambda epoch: epoch.power_limit_w)
    highest_w = max(epoch.power_limit_w for epoch in epochs if epoch.workload == options.workload)
    return dataclasses.replace(
        size,
        power_limit_w=top.power_limit_w,
        epoch_cost=epoch_cost(top, options.eta, highest_w),
        epoch_energy_j=top.energy_j,
        epoch_time_s=top.time_s,
    )


def _json(
    sizes: list[BatchSize], best: BatchSize, default: BatchSize, replays: list[Replay]
) -> dict[str, Any]:
    def row(size: BatchSize) -> dict[str, Any]:
        cost = size.cost if math.isfinite(size.cost) else None
        return {"batch": size.batch, "power_limit_w": size.power_limit_w, "cost": cost}

    values: dict[str, Any] = {
        "best": row(best),
        "default": row(default),
        "sizes": [row(each) for each in sizes],
    }
    if replays:
        values["replays"] = {
            "count": len(replays),
            "recurrences": len(replays[0].costs),
            "regret": statistics.fmean(each.regret[-1] for each in replays),
            "regret_of_default": len(replays[0].costs) * (default.cost - best.cost),
        }
    return values
