"""`smaragdine profile`: energy and time of a step over batch sizes and power limits."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smaragdine.allocate.measuring import Limits, measure
from smaragdine.allocate.points import claim, write_profile
from smaragdine.allocate.profiler import Need
from smaragdine.allocate.profiling import UPDATES, update_period_s
from smaragdine.allocate.rest_power import idle_power, python_of, wait_power
from smaragdine.cli.parsing import Parser, count, counts, positive_count, positive_seconds, positive_watts
from smaragdine.errors import UserError
from smaragdine.recording.command import build_command, without_secrets
from smaragdine.recording.reader import open_recording
from smaragdine.sensors.cpu_limit import socket_limit_w
from smaragdine.sensors.discover import settings_from_environment
from smaragdine.sweep.limits import devices_here, lender, ranges_here, wanted_limits
from smaragdine.sweep.plan import Setting

_EXAMPLE = """\
  smaragdine profile -- train.py --batch-size {batch}
  smaragdine profile --batches 32,64,128 --power 150,200 -o a10.parquet -- train.py --batch-size {batch}
  smaragdine profile --device gpu:1 -o t4.json -- train.py --batch-size {batch}
  smaragdine allocate --gpu a10=a10.parquet --gpu t4=t4.json --global-batch 4096"""

_BATCHES = "32,64,128,256,512,1024"


@dataclass(frozen=True)
class Device:
    name: str  # gpu:0, cpu:0
    uuid: str | None
    model: str


def main(words: list[str]) -> int:
    ours, program = _split(words)
    options = _parser().parse_args(ours)
    command = build_command(program, os.environ)
    if not any("{batch}" in word for word in program):
        why, remedy = "nothing in it says {batch}", "Example: -- train.py --batch-size {batch}"
        raise UserError("the command has no batch size", why, remedy)
    devices = _devices(options.device, bool(options.power))
    if len(devices) > 1 and options.output:
        names = ", ".join(f"{device.name} ({device.model})" for device in devices)
        raise UserError(f"-o {options.output} is one file", f"there is {names}", "Choose one with --device")
    for device in devices:
        _profile(device, options, program, python_of(command.executable, sys.executable))
    return 0


def _parser() -> Parser:
    parser = Parser(
        "profile",
        "Run a training for a few steps at every batch size and power limit, and write down what a step\n"
        "takes: a profile for smaragdine allocate. {batch} in the command is the batch size. Interrupted,\n"
        "it goes on where it was; limits are as before in the end, however it ends.",
        _EXAMPLE,
    )
    parser.usage = "smaragdine profile [options] -- SCRIPT.py | -m MODULE | EXECUTABLE  [arguments]"
    parser.add_argument("--batches", metavar="N,…", type=counts, default=counts(_BATCHES), help=_BATCHES)
    parser.add_argument("--power", metavar="W,…", type=_watts, default=[], help="power limits (the current)")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=".parquet, or .json without repeats (<GPU>.parquet)"
    )
    parser.add_argument("--device", metavar="gpu:N", help="which (one GPU of each model; without any cpu:0)")
    parser.add_argument("--name", metavar="NAME", help="of the GPU in the profile (the file's)")
    how = parser.add_argument_group("how long: each point lasts at least 50 updates of the device's counter")
    how.add_argument("--warm-up", metavar="N", type=count, default=10, help="steps to drop (10)")
    how.add_argument("--steps", metavar="N", type=positive_count, default=20, help="steps at least (20)")
    how.add_argument("--blocks", metavar="N", type=positive_count, default=5, help="repeats made of them (5)")
    how.add_argument(
        "--patience",
        metavar="S",
        type=positive_seconds,
        default=600.0,
        help="longest time without a step (600)",
    )
    return parser


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    if "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    if any(word in ("-h", "--help") for word in words):
        return words, []
    remedy = "Example: smaragdine profile -- train.py --batch-size {batch}"
    raise UserError("no program to profile", "it comes after --", remedy)


def _watts(text: str) -> list[float]:
    return [positive_watts(word) for word in text.split(",")]


def _devices(named: str | None, limited: bool) -> list[Device]:
    """The one that was named, else one GPU of each model that a program sees, else the processor."""
    if named is not None and not re.fullmatch(r"(gpu|cpu):\d{1,3}", named):
        raise UserError(f"--device {named}", "that is no device", "It is gpu:0, cpu:0 …")
    if named is None or named.startswith("gpu:"):
        found = devices_here([named] if named else [], os.environ)
        models = _models()
        gpus = [Device(device, uuid, models.get(device, "gpu")) for device, uuid in found.items()]
        if gpus:
            return list({gpu.model: gpu for gpu in reversed(gpus)}.values())[::-1]
    if limited:
        raise UserError("--power", "there is no GPU whose limit could be set", "Leave it out, or see doctor")
    return [Device(named or "cpu:0", None, named or "cpu:0")]


def _models() -> dict[str, str]:
    from smaragdine.sensors.nvml_gpu import ask, nvml, text
    from smaragdine.sweep.limits import gpus_here

    with gpus_here() as gpus:
        return {gpu.device: text(ask(nvml().nvmlDeviceGetName, gpu.handle) or "gpu") for gpu in gpus}


def _profile(device: Device, options: argparse.Namespace, program: list[str], python: str) -> None:
    slug = re.sub(r"[^a-z0-9]+", "-", device.model.lower()).strip("-")
    output = Path(options.output or f"{slug}.parquet")
    if output.suffix not in (".parquet", ".json"):
        raise UserError(f"-o {output}", "a profile ends in .parquet or .json")
    if not output.parent.is_dir():
        raise UserError(f"{output.parent} does not exist", remedy="Make the folder, or name another with -o")
    limits_w: list[float] = list(dict.fromkeys(options.power)) or [_current_limit_w(device)]
    if options.power:
        for limit_w in limits_w:
            wanted_limits(Setting("power", limit_w), [device.name], ranges_here())
    folder = output.with_suffix(".profile")
    request = {
        "command": without_secrets(program),
        "device": device.name,
        "uuid": device.uuid,
        "warm_up": options.warm_up,
        "steps": options.steps,
        "blocks": options.blocks,
    }
    claim(folder, request)
    # The program sees this GPU alone, whichever it would take otherwise.
    visible = {} if device.uuid is None else {"CUDA_VISIBLE_DEVICES": device.uuid}
    environment = {**os.environ, **visible}
    _say(f"{device.name} ({device.model}): idle power")
    idle_w = idle_power(folder / "idle", device.name)
    period_s = update_period_s(open_recording(folder / "idle").channels, device.name)
    if period_s is None:
        raise UserError(f"nothing measures {device.name}", remedy="See smaragdine doctor")
    if device.uuid is None:
        wait_w, why = idle_w, ""
    else:
        _say(f"{device.name}: power while waiting")
        wait_w, why = wait_power(folder / "wait", device.name, python, environment, UPDATES * period_s)
    remarks = [f"power while waiting is not known: {why}"] if why else []
    need = Need(device.name, options.warm_up, options.steps, options.patience)
    with _limits(device.name, bool(options.power)) as limits:
        points = measure(
            program, environment, folder, options.batches, limits_w, need, options.blocks, limits, _say
        )
    gpu = options.name or output.stem
    write_profile(output, gpu, points, idle_w, wait_w)
    from smaragdine.report.profile import profile_table
    from smaragdine.report.terminal import console

    console().print(profile_table(gpu, points, idle_w, wait_w, remarks))
    _say(f"profile: {output}")


@contextlib.contextmanager
def _limits(device: str, wanted: bool) -> Iterator[Limits | None]:
    if not wanted:
        yield None
        return
    with lender(_say) as lent:

        def apply(limit_w: float) -> None:
            lent.apply(wanted_limits(Setting("power", limit_w), [device], ranges_here()))

        yield Limits(apply, lent.held)


def _current_limit_w(device: Device) -> float:
    limit_w: Any = None
    if device.uuid is None:
        limit_w = socket_limit_w(int(device.name.partition(":")[2]), settings_from_environment(os.environ))
    else:
        of = [r for r in ranges_here() if (r.device, r.kind) == (device.name, "power")]
        limit_w = of[0].current.value if of and of[0].current is not None else None
    if limit_w is None:
        raise UserError(f"{device.name} has no power limit that can be read", remedy="See smaragdine doctor")
    return float(limit_w)


def _say(line: str) -> None:
    print(f"smaragdine: {line}", file=sys.stderr, flush=True)
