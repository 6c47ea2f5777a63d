"""`smaragdine allocate`: splits one global batch over unequal GPUs, with a power limit for each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from smaragdine.allocate.methods import (
    METHODS,
    Answer,
    Corner,
    allocation_json,
    answer,
    answers_json,
    left_out,
    pareto,
    warnings,
)
from smaragdine.allocate.model import MODELS, OBJECTIVES, Choices, Objective, check, choices, model_warnings
from smaragdine.allocate.profile import Profile, read_profile
from smaragdine.cli.parsing import (
    Parser,
    percentage,
    positive_count,
    positive_watts,
    print_json,
    seconds_from_0,
    weight,
)
from smaragdine.errors import UserError, visible

_EXAMPLE = """\
  smaragdine allocate --gpu a10=a10.json --gpu t4=t4.json --global-batch 4096
  smaragdine allocate --gpu a10=a10.json --gpu t4=t4.json --global-batch 4096 --objective sync \\
    --wait-power a10=60 --wait-power t4=30 --max-batch t4=2048
  smaragdine allocate … --objective energy --slowdown 10%
  smaragdine allocate … --pareto --plot figures
  smaragdine allocate … --json | jq '.methods[] | select(.method == "optimal")'"""

Value = TypeVar("Value")


def _parser() -> Parser:
    parser = Parser(
        "allocate",
        "How to split a global batch over unequal GPUs, and which power limit to give each, from a profile\n"
        "of each GPU over batch sizes and limits. docs/allocate.md has the models, objectives and methods.",
        _EXAMPLE,
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME=FILE",
        action="append",
        default=[],
        help="a GPU's profile; repeat it for more GPUs",
    )
    parser.add_argument("--global-batch", metavar="N", type=positive_count, required=True)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", metavar="DIR", help="draw models, allocations and the Pareto front into this folder"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--model",
        choices=MODELS,
        default="monotone",
        help="how to read a profile between its points (monotone)",
    )
    how.add_argument("--objective", choices=OBJECTIVES, default="sum", help="what to minimise (sum)")
    how.add_argument("--eta", metavar="η", type=weight, help="weight of energy in sum and sync, 0 to 1 (0.5)")
    how.add_argument(
        "--slowdown",
        metavar="P%",
        type=percentage,
        help="least energy with steps at most P%% slower than the fastest",
    )
    how.add_argument("--method", metavar="NAME,…", help=f"only these of {', '.join(METHODS)} (all possible)")
    how.add_argument("--pareto", action="store_true", help="also the best allocation for every η from 0 to 1")
    gpus = parser.add_argument_group("about the GPUs")
    gpus.add_argument(
        "--strongest", metavar="NAME", help="the strongest GPU, for the heuristic (the first --gpu)"
    )
    gpus.add_argument(
        "--max-batch",
        metavar="NAME=N",
        action="append",
        default=[],
        help="the largest batch that a GPU's memory holds",
    )
    gpus.add_argument(
        "--wait-power",
        metavar="NAME=W",
        action="append",
        default=[],
        help="a GPU's power while it waits for the others (its profile's)",
    )
    gpus.add_argument(
        "--all-reduce", metavar="S", type=seconds_from_0, default=0.0, help="time of a step's all-reduce (0)"
    )
    gpus.add_argument("--leave-out", action="store_true", help="allow GPUs to be left out of the job")
    return parser


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    profiles = _profiles(options.gpu)
    if options.eta is not None and options.objective not in ("sum", "sync"):
        why = f"{options.objective} is one quantity alone"
        raise UserError("--eta weighs energy against time", why, "Use --objective sum or sync")
    eta = 0.5 if options.eta is None else options.eta
    objective = Objective(options.objective, eta, options.all_reduce, options.slowdown)
    gpus = _choices(profiles, options)
    check(objective, gpus, options.global_batch)
    skipped = left_out(gpus, options.global_batch)
    names = options.method.split(",") if options.method else [name for name in METHODS if name not in skipped]
    answers = [
        answer(name, gpus, objective, options.global_batch, options.strongest, profiles, options.model)
        for name in dict.fromkeys(names)
    ]
    front = pareto(gpus, objective, options.global_batch) if options.pareto else []
    remarks = [*warnings(answers, profiles), *model_warnings(list(profiles.values()), options.model)]
    if options.plot:
        _draw(profiles, gpus, answers, front, options)
    if options.json:
        for remark in remarks:
            print(f"smaragdine: {visible(remark)}", file=sys.stderr)
        return _print_json(answers, front)
    from smaragdine.report.allocation import allocation_tables
    from smaragdine.report.terminal import console

    if options.method:
        skipped = {}
    console().print(allocation_tables(answers, options.model, options.global_batch, front, remarks, skipped))
    return 0


def _profiles(given: Sequence[str]) -> dict[str, Profile]:
    files = _named("--gpu", given, str)
    if not files:
        raise UserError("no GPU to allocate to", remedy="Name one or more: --gpu NAME=FILE")
    return {gpu: read_profile(file, gpu) for gpu, file in files.items()}


def _choices(profiles: Mapping[str, Profile], options: argparse.Namespace) -> list[Choices]:
    most = _named("--max-batch", options.max_batch, positive_count)
    waits_w = _named("--wait-power", options.wait_power, positive_watts)
    named = {"--max-batch": most, "--wait-power": waits_w, "--strongest": [options.strongest or ""]}
    for option, gpus in named.items():
        for gpu in gpus:
            if gpu and gpu not in profiles:
                raise UserError(f"{option}: no GPU named {gpu}", remedy=f"There are: {', '.join(profiles)}")
    return [
        choices(
            profile,
            options.global_batch,
            options.model,
            most.get(gpu),
            waits_w.get(gpu),
            may_be_left_out=options.leave_out,
        )
        for gpu, profile in profiles.items()
    ]


def _named(option: str, given: Sequence[str], kind: Callable[[str], Value]) -> dict[str, Value]:
    """Reads NAME=VALUE words, each name once."""
    found: dict[str, Value] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UserError(f"{option} {text}", "that is not NAME=VALUE", "See smaragdine allocate --help")
        if name in found:
            raise UserError(f"{option}: GPU {name} is given twice", remedy="Give each a name of its own")
        try:
            found[name] = kind(value)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{option} {text}", str(error)) from None
    return found


def _draw(
    profiles: Mapping[str, Profile],
    gpus: Sequence[Choices],
    answers: Sequence[Answer],
    front: Sequence[Corner],
    options: argparse.Namespace,
) -> None:
    from smaragdine.report.figures.allocation import draw_allocation

    for file in draw_allocation(profiles, gpus, answers, front, options.model, Path(options.plot)):
        print(file, file=sys.stderr)


def _print_json(answers: Sequence[Answer], front: Sequence[Corner]) -> int:
    values: dict[str, Any] = {"methods": answers_json(answers)}
    if front:
        values["pareto"] = [
            {
                "eta": [corner.eta_low, corner.eta_high],
                "energy": corner.energy,
                "limit_energy": corner.limit_energy,
                "allocation": allocation_json(corner.allocation),
            }
            for corner in front
        ]
    return print_json(values)
