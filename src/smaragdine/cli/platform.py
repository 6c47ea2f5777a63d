"""`smaragdine platform`: chooses a GPU and its power limit for a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smaragdine.allocate.platform import Prediction, best_platform, leave_one_out, standard_device
from smaragdine.allocate.profile import MeasuredEpoch, read_epochs
from smaragdine.cli.parsing import Parser, positive_count, print_json
from smaragdine.errors import UserError

_EXAMPLE = """\
  smaragdine platform --epochs v100=v100.csv --epochs a40=a40.csv --leave-one-out
  smaragdine platform --epochs v100=v100.csv --epochs a40=a40.csv \\
    --workload squad/bert_base_uncased/adamw --batch 16 --objective edp"""

_COSTS: dict[str, Callable[[Prediction], float]] = {
    "energy": lambda each: each.energy_j,
    "time": lambda each: each.time_s,
    "edp": lambda each: each.energy_j * each.time_s,
}


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    epochs = _epochs(options.epochs)
    scale = standard_device(epochs)
    missed = {
        name: leave_one_out(epochs, one_point)
        for name, one_point in (("one point", True), ("no point", False))
        if options.leave_one_out
    }
    ranked = []
    if options.workload:
        if options.batch is None:
            raise UserError("--workload needs a batch size", remedy="Give it: --batch N")
        limits_w = {gpu: sorted({e.power_limit_w for e in epochs if e.gpu == gpu}) for gpu in scale.slowness}
        ranked = best_platform(
            scale,
            options.workload,
            options.batch,
            limits_w,
            _known(epochs, options.workload, options.batch),
            _COSTS[options.objective],
        )
    from smaragdine.report.allocation import misses_json, platform_tables, scale_json

    if options.json:
        values: dict[str, Any] = {"scale": scale_json(scale)}
        if missed:
            values["leave_one_out"] = misses_json(missed)
        if ranked:
            values["platforms"] = [
                {
                    "gpu": each.gpu,
                    "power_limit_w": each.power_limit_w,
                    "time_s": each.prediction.time_s,
                    "energy_j": each.prediction.energy_j,
                    "cost": each.cost,
                }
                for each in ranked
            ]
        return print_json(values)
    from smaragdine.report.terminal import console

    console().print(platform_tables(scale, missed, ranked))
    return 0


def _parser() -> Parser:
    parser = Parser(
        "platform",
        "Put many GPUs on one scale, from tables of time and power per epoch. Predict what a workload takes\n"
        "on a GPU where it was hardly measured, how wrong that may be, and the best GPU and limit for it.",
        _EXAMPLE,
    )
    parser.add_argument(
        "--epochs",
        metavar="GPU=FILE",
        action="append",
        default=[],
        help="a GPU's table; repeat it for more GPUs",
    )
    parser.add_argument("--workload", metavar="NAME", help="dataset/network/optimizer, to find a GPU for")
    parser.add_argument("--batch", metavar="N", type=positive_count, help="its batch size")
    parser.add_argument("--objective", choices=tuple(_COSTS), default="energy", help="(energy)")
    parser.add_argument(
        "--leave-one-out", action="store_true", help="show how wrong predictions are on these tables"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _epochs(given: list[str]) -> list[MeasuredEpoch]:
    found: dict[str, list[MeasuredEpoch]] = {}
    for text in given:
        gpu, equals, file = text.partition("=")
        if not (gpu and equals and file):
            raise UserError(f"--epochs {text}", "that is not GPU=FILE", "See smaragdine platform --help")
        if gpu in found:
            raise UserError(f"GPU {gpu} is given twice")
        found[gpu] = read_epochs(file, gpu)
    if not found:
        raise UserError("no table to make a scale of", remedy="Name one or more: --epochs GPU=FILE")
    return [epoch for each in found.values() for epoch in each]


def _known(epochs: list[MeasuredEpoch], workload: str, batch: int) -> dict[str, MeasuredEpoch]:
    """What was measured of the workload on each GPU: at the highest limit, and at this batch if possible."""
    known: dict[str, MeasuredEpoch] = {}
    for epoch in sorted(epochs, key=lambda epoch: (epoch.batch == batch, epoch.power_limit_w)):
        if epoch.workload == workload:
            known[epoch.gpu] = epoch
    return known
