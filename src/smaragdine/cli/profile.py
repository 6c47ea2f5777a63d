"""`smaragdine profile`: measures energy and time of a step over batch sizes and power limits."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from smaragdine.allocate.device import (
    Profiled,
    ProfiledDevice,
    Request,
    check_request,
    claim,
    devices_to_profile,
    file_stem,
    profile_device,
    write_profile,
)
from smaragdine.cli.parsing import Parser, count, counts, positive_count, positive_seconds, positive_watts
from smaragdine.errors import UserError, visible
from smaragdine.recording.command import build_command

_EXAMPLE = """\
  smaragdine profile -- train.py --batch-size {batch}
  smaragdine profile --batches 32,64,128 --power 150,200 -o a10.parquet -- train.py --batch-size {batch}
  smaragdine profile --device gpu:1 -o t4.json -- train.py --batch-size {batch}
  smaragdine profile --engine ray --power a10=300,200 --power t4=70,60 -o profiles/ -- train.py -b {batch}
  smaragdine allocate --gpu a10=a10.parquet --gpu t4=t4.json --global-batch 4096"""

_BATCHES = "32,64,128,256,512,1024"


def main(words: list[str]) -> int:
    ours, program = _split(words)
    options = _parser().parse_args(ours)
    if options.engine == "local" or not program:
        build_command(program, os.environ)
    if not any("{batch}" in word for word in program):
        why, remedy = "nothing in it says {batch}", "Example: -- train.py --batch-size {batch}"
        raise UserError("the command has no batch size", why, remedy)
    limits_w = dict[str, list[float]]()
    for name, values in options.power:
        limits_w.setdefault(name, []).extend(values)
    request = Request(
        tuple(program),
        tuple(sorted(set(options.batches))),
        tuple(dict.fromkeys(limits_w.pop("", []))),
        options.warm_up,
        options.steps,
        options.blocks,
        options.patience,
    )
    if options.engine == "ray":
        return _profile_on_ray(request, limits_w, options)
    if limits_w:
        why = "types are those of a cluster"
        raise UserError(f"--power {next(iter(limits_w))}=…", why, "Leave the name out, or add --engine ray")
    return _profile_here(request, options)


def _parser() -> Parser:
    parser = Parser(
        "profile",
        "Run a training for a few steps at every batch size and power limit, and write down what a step\n"
        "takes: a profile for smaragdine allocate. {batch} in the command is the batch size. Interrupted,\n"
        "the same command goes on. Limits are restored, however it ends.",
        _EXAMPLE,
    )
    parser.usage = "smaragdine profile [options] -- SCRIPT.py | -m MODULE | EXECUTABLE  [arguments]"
    parser.add_argument("--batches", metavar="N,…", type=counts, default=counts(_BATCHES), help=_BATCHES)
    parser.add_argument(
        "--power", metavar="[TYPE=]W,…", type=_watts, action="append", default=[],
        help="power limits (the current one); repeat it for each GPU type of a cluster",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=".parquet, .json without repeats, or DIR/ (<GPU>.parquet)"
    )
    parser.add_argument(
        "--device", metavar="gpu:N", help="the GPU (one of each model; cpu:0 if there is none)"
    )
    parser.add_argument("--name", metavar="NAME", help="the GPU's name in the profile (the file's name)")
    how = parser.add_argument_group("how long: each point lasts at least 50 updates of the device's counter")
    how.add_argument("--warm-up", metavar="N", type=count, default=10, help="steps to drop at first (10)")
    how.add_argument(
        "--steps", metavar="N", type=positive_count, default=20, help="at least so many steps (20)"
    )
    how.add_argument(
        "--blocks", metavar="N", type=positive_count, default=5, help="repeats to make of them (5)"
    )
    how.add_argument(
        "--patience",
        metavar="S",
        type=positive_seconds,
        default=600.0,
        help="give up after so long without a step (600)",
    )
    where = parser.add_argument_group("a Ray cluster: each type of GPU on a node that has it, all at once")
    where.add_argument("--engine", choices=("local", "ray"), default="local", help="where to run (local)")
    where.add_argument("--address", metavar="A", help="the cluster's address (RAY_ADDRESS, or auto)")
    where.add_argument("--gpu-type", metavar="T,…", help="profile these (all types of the cluster)")
    return parser


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    if "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    if any(word in ("-h", "--help") for word in words):
        return words, []
    remedy = "Example: smaragdine profile -- train.py --batch-size {batch}"
    raise UserError("no program to profile", "it comes after --", remedy)


def _watts(text: str) -> tuple[str, list[float]]:
    """Reads TYPE=W,… or W,…: the type, if any, and its limits."""
    name, equals, values = text.rpartition("=")
    if equals and not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not TYPE=W,… such as a10=200,300")
    return name, [positive_watts(word) for word in values.split(",")]


def _profile_here(request: Request, options: argparse.Namespace) -> int:
    for name in ("address", "gpu_type"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} is for clusters", remedy="Add --engine ray")
    devices = devices_to_profile(options.device, bool(request.limits_w), os.environ)
    folder = None if options.output is None else _folder(options.output)
    if len(devices) > 1 and ((options.output and folder is None) or options.name):
        what = f"--name {options.name}" if options.name else f"-o {options.output}"
        names = ", ".join(f"{device.name} ({device.model})" for device in devices)
        remedy = "Choose one with --device, or name a folder: -o profiles/"
        raise UserError(f"{what} is for one", f"there is {names}", remedy)
    written: list[Path] = []
    for device in devices:
        if options.output and folder is None:
            output = Path(options.output)
            if not output.parent.is_dir():
                remedy = "Make the folder, or name another with -o"
                raise UserError(f"{output.parent} does not exist", remedy=remedy)
        else:
            output = (folder or Path()) / f"{file_stem(device.model)}.parquet"
        _profile(device, request, output, options.name or output.stem)
        written.append(output)
    _say_next(written)
    return 0


def _profile(device: ProfiledDevice, request: Request, output: Path, gpu: str) -> None:
    if output.suffix not in (".parquet", ".json"):
        raise UserError(f"-o {output}", "a profile ends in .parquet or .json, a folder in /")
    check_request(device, request)
    points = output.with_suffix(".profile")
    claim(points, {**request.claimed(), "device": device.name, "uuid": device.uuid})
    try:
        _write(output, gpu, profile_device(device, request, points, _say))
    except KeyboardInterrupt:
        _say("stopped. The same command goes on")
        raise


def _profile_on_ray(request: Request, limits_w: dict[str, list[float]], options: argparse.Namespace) -> int:
    from smaragdine.allocate.ray import profile_types
    from smaragdine.jobs.job import Stop

    for name in ("device", "name"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is for this machine", remedy="Choose types with --gpu-type")
    folder = Path() if options.output is None else _folder(options.output)
    if folder is None:
        raise UserError(
            f"-o {options.output} is one file", "each type has its own", "Name a folder: -o profiles/"
        )
    written: list[Path] = []
    types = options.gpu_type.split(",") if options.gpu_type else []

    def done(stem: str, profiled: Profiled) -> None:
        written.append(folder / f"{stem}.parquet")
        _write(written[-1], stem, profiled)

    with Stop() as stop:
        profile_types(request, limits_w, types, folder, options.address, _say, done, stop)
    if stop:
        _say("stopped. The same command goes on")
        return 128 + stop.number
    _say_next(written)
    return 0


def _folder(output: str) -> Path | None:
    """None if it is a file."""
    return Path(output) if output.endswith(os.sep) or os.path.isdir(output) else None


def _write(output: Path, gpu: str, profiled: Profiled) -> None:
    from smaragdine.report.allocation import profile_table
    from smaragdine.report.terminal import console

    write_profile(output, gpu, profiled.points, profiled.idle_w, profiled.wait_w)
    console().print(profile_table(gpu, profiled.points, profiled.idle_w, profiled.wait_w, profiled.remarks))
    _say(f"profile: {output}")


def _say_next(written: Sequence[Path]) -> None:
    gpus = " ".join(f"--gpu {path.stem}={path}" for path in sorted(written))
    more = "" if len(written) > 1 else " --gpu NAME=FILE"
    print(f"split a batch: smaragdine allocate {gpus}{more} --global-batch N", file=sys.stderr)


def _say(line: str) -> None:
    print(f"smaragdine: {visible(line)}", file=sys.stderr, flush=True)
