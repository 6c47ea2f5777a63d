"""`smaragdine sweep`: runs benchmarks at many limits or settings, many times, and resumes what was cut
off."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smaragdine.cli.parsing import Parser, count, parameter, percentage, positive_count, positive_seconds
from smaragdine.errors import UserError
from smaragdine.sweep.experiment import ExperimentFile, checked, name_of, read_experiments
from smaragdine.sweep.plan import Plan, make_plan, save_plan
from smaragdine.sweep.sweep import BASELINE, Queue, Sweep, find_sweep, gone_if_refused

_FILES = (".yaml", ".yml", ".toml", ".json")
_EXAMPLE = """\
  smaragdine sweep experiment.yaml
  smaragdine sweep --power 150,200,250,300 --repeat 5 -- train.py --epochs 10
  smaragdine sweep --clock 877,1005 --clock 877,1380 -- train.py
  smaragdine sweep --parameter batch=16,32,64 --until 2% -- train.py --batch {batch}
  smaragdine sweep --resume sweeps/2026-11-15-train
  smaragdine fit sweeps/2026-11-15-train --figures figures"""
# What an experiment file says by itself.
_OF_FILE = ("power", "clock", "parameter", "repeat", "devices", "gpu_type", "order", "warm_up", "cool_down",
            "baseline", "until", "timeout", "name")  # fmt: skip
# Keys of an experiment whose options are called differently.
_OPTIONS = {"power_limits": "--power", "clock_limits": "--clock", "parameters": "--parameter",
            "baseline_s": "--baseline", "timeout_s": "--timeout", "gpu_types": "--gpu-type",
            "command": "the program"}  # fmt: skip


def main(words: list[str]) -> int:
    ours, program = _split(words)
    options = _parser().parse_args(ours)
    if options.resume is not None:
        if program or options.file:
            raise UserError("--resume takes nothing but the sweep's folder", "the plan is in it")
        return _run(Path(options.resume), options)
    wanted = _of_words(program, options) if program else _of_file(options)
    seed = options.seed if options.seed is not None else wanted.seed
    folder, known = find_sweep(wanted, seed, Path(options.output) if options.output else None)
    plan = known or make_plan(wanted.experiments, seed, _made())
    if options.dry_run:
        return _dry_run(plan, folder if known else None, options)
    if known is not None:
        return _run(folder, options)
    if options.engine == "local":
        from smaragdine.sweep.local import jobs_here

        jobs_here(plan, plan.tasks, os.environ)
    with gone_if_refused(folder):
        save_plan(folder, plan)
        return _run(folder, options)


def _parser() -> Parser:
    parser = Parser(
        "sweep",
        "Run benchmarks at many power or clock limits, or with many values of a parameter, many times and\n"
        "in random order; each repetition is a recording. Limits are restored, however this ends.\n"
        "The same command, or --resume, goes on where it stopped. Our options come before the program.",
        _EXAMPLE,
    )
    parser.usage = (
        "smaragdine sweep EXPERIMENT.yaml [options]\n"
        "       smaragdine sweep --power W,… | --clock MEM,GFX | --parameter NAME=V,… [options] -- PROGRAM\n"
        "       smaragdine sweep --resume SWEEP"
    )
    parser.add_argument("file", nargs="?", metavar="EXPERIMENT", help="YAML, TOML or JSON; see docs/sweep.md")
    parser.add_argument("-o", "--output", metavar="DIR", help="the sweep's folder (sweeps/<date>-<name>)")
    parser.add_argument("--resume", metavar="SWEEP", help="go on with this sweep")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and how long it will take")
    parser.add_argument(
        "--retry", metavar="N", type=count, default=0, help="run what fails again, N times (0)"
    )
    parser.add_argument(
        "--seed", metavar="N", type=count, help="seed of the random order (a new one, recorded)"
    )
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="where to run")
    parser.add_argument("--address", metavar="A", help="the Ray cluster's address (RAY_ADDRESS, or auto)")
    vary = parser.add_argument_group("without an experiment file: what to vary")
    vary.add_argument("--power", metavar="W,…", type=_numbers, help="power limits in watts")
    vary.add_argument(
        "--clock",
        metavar="MEM,GFX",
        type=_clocks,
        action="append",
        help="memory and graphics clock in MHz; repeat it for more",
    )
    vary.add_argument(
        "--parameter",
        metavar="NAME=V,…",
        type=parameter,
        action="append",
        help="values of {NAME} in the command; repeat it for more names",
    )
    more = parser.add_argument_group("without an experiment file: how")
    more.add_argument("--repeat", metavar="N", type=positive_count, help="repetitions of each setting (5)")
    more.add_argument("--name", metavar="NAME", help="the experiment's name (the program's)")
    more.add_argument("--devices", metavar="gpu:0,…", help="set and measure these (all visible)")
    more.add_argument("--gpu-type", metavar="T,…", help="run on nodes with these GPUs; for --engine ray")
    more.add_argument(
        "--order", choices=("shuffled", "listed"), help="order of settings in a repetition (shuffled)"
    )
    more.add_argument("--warm-up", metavar="N", type=count, help="runs before the first repetition (0)")
    more.add_argument("--cool-down", metavar="°C", type=float, help="first wait until the GPUs are this cool")
    more.add_argument(
        "--baseline", metavar="S", type=positive_seconds, help="first measure idle power for so long"
    )
    more.add_argument(
        "--until", metavar="P%", type=percentage,
        help="stop repeating when the 95%% interval of the energy is within ± this (at least 3 times)",
    )  # fmt: skip
    more.add_argument(
        "--timeout", metavar="S", type=positive_seconds, help="end a repetition that takes longer"
    )
    return parser


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Splits our words from the program and all that follows it."""
    flags = ("--dry-run", "--help", "-h")
    i = 0
    while i < len(words):
        word = words[i]
        if word == "--":
            return words[:i], words[i + 1 :]
        if (not word.startswith("-") and not word.endswith(_FILES)) or word == "-m":
            return words[:i], words[i:]
        i += 2 if word.startswith("-") and word not in flags and "=" not in word else 1
    return words, []


def _of_file(options: argparse.Namespace) -> ExperimentFile:
    if options.file is None:
        raise UserError("nothing to sweep", remedy="Name an experiment file, or a program after --")
    own = [name for name in _OF_FILE if getattr(options, name) is not None]
    if own:
        raise UserError(f"--{own[0].replace('_', '-')} is for programs", f"{options.file} says it itself")
    return read_experiments(options.file)


def _of_words(program: Sequence[str], options: argparse.Namespace) -> ExperimentFile:
    if options.file is not None:
        raise UserError(f"{options.file} and a program", remedy="Name one or the other")
    if not (options.power or options.clock or options.parameter):
        raise UserError("nothing varies", remedy="Give --power, --clock or --parameter")
    if options.power and options.clock:
        raise UserError("--power and --clock", "a sweep varies one of them", "Make two sweeps of it")
    names = [name for name, _ in options.parameter or []]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"--parameter {twice} is there twice", remedy=f"Write --parameter {twice}=1,2")
    benchmark = {"command": list(program), "timeout_s": options.timeout}
    cool_down = None if options.cool_down is None else {"temperature_c": options.cool_down}
    experiment: dict[str, Any] = {
        "name": options.name or name_of(program),
        "repeat": options.repeat,
        "power_limits": options.power,
        "clock_limits": options.clock,
        "parameters": dict(options.parameter or []),
        "devices": options.devices and options.devices.split(","),
        "gpu_types": options.gpu_type and options.gpu_type.split(","),
        "order": options.order,
        "warm_up": options.warm_up,
        "cool_down": cool_down,
        "baseline_s": options.baseline,
        "until": options.until and f"{options.until * 100:.10g}%",
        "benchmarks": [{name: value for name, value in benchmark.items() if value is not None}],
    }
    given = {name: value for name, value in experiment.items() if value is not None}
    try:
        return checked({"experiments": [given]}, "command line", Path.cwd())
    except UserError as error:
        raise _as_option(error) from None


def _as_option(error: UserError) -> UserError:
    """Words an error at a key of an experiment for somebody who gave options."""
    key = r"command line: experiments\[0\]\.(?:benchmarks\[0\]\.)?(\w+)[^:]*: "
    found = re.fullmatch(key + r"(.*)", error.reason)
    if found is None:
        return error
    option = _OPTIONS.get(found[1]) or f"--{found[1].replace('_', '-')}"
    remedy = error.remedy.replace("Example: command: ", "Example: ").replace("Use repeat", "Use --repeat")
    # Other remedies speak of keys in a file.
    own = remedy.startswith(("Use --", "Allowed")) or (found[1] == "command" and "Example" in remedy)
    return UserError(option, found[2], remedy if own else "See smaragdine sweep --help")


def _made() -> dict[str, Any]:
    from smaragdine.recording.command import without_secrets
    from smaragdine.recording.folder import STORED_VARIABLES

    return {
        "command": without_secrets(["smaragdine", *sys.argv[1:]]),
        "node": platform.node(),
        "environment": {name: os.environ[name] for name in STORED_VARIABLES if name in os.environ},
    }


def _dry_run(plan: Plan, folder: Path | None, options: argparse.Namespace) -> int:
    from smaragdine.report.limits import plan_table
    from smaragdine.report.terminal import console
    from smaragdine.sweep.local import jobs_here
    from smaragdine.sweep.sweep import expected_s, with_warm_up
    from smaragdine.units import seconds

    left, took_s = list(plan.tasks), dict[str, list[float]]()
    idle_s = max((e.baseline_s or 0.0 for e in plan.experiments), default=0.0)
    if folder is not None:
        sweep = Sweep(folder)
        left, took_s = sweep.left(), sweep.took_s
        sweep.close()
        idle_s = 0.0 if (folder / BASELINE).exists() else idle_s
    if options.engine == "local":
        jobs_here(plan, left, os.environ)
    out = console()
    out.print(plan_table(plan, left))
    total_s = expected_s(plan, with_warm_up(plan, left), took_s)
    cools = any(plan.experiment(task).cool_down for task in left)
    time_words = (
        f"about {seconds(total_s + idle_s)}{' and what cool-down takes' if cools else ''}"
        if total_s is not None
        else "unknown until the first repetition has run; a benchmark's expected_s can say it"
    )
    out.print(
        f"\n{len(left)} repetitions, seed {plan.seed}; time: {time_words}", markup=False, soft_wrap=True
    )
    return 0


def _run(folder: Path, options: argparse.Namespace) -> int:
    with contextlib.closing(Sweep(folder)) as sweep:
        if not options.dry_run:
            return _run_sweep(sweep, options)
    return _dry_run(sweep.plan, folder, options)


def _run_sweep(sweep: Sweep, options: argparse.Namespace) -> int:
    from smaragdine.jobs.job import Stop
    from smaragdine.report.limits import SweepDisplay
    from smaragdine.report.terminal import shortest_path

    where = shlex.quote(shortest_path(sweep.folder))
    before = len(sweep.rows) - len(sweep.failed())
    first = f"sweep: {where}" + (f", {before} of {len(sweep.plan.tasks)} are there" if before else "")
    with SweepDisplay(sweep.note, len(sweep.left()), first) as display, Stop() as stop:
        queue = Queue(sweep, options.retry)
        if options.engine == "ray":
            from smaragdine.sweep.ray import run_ray

            run_ray(queue, display, stop, options.address)
        else:
            from smaragdine.sweep.local import run_local

            run_local(queue, display, stop)
        sweep.save()
    if stop:
        print(f"smaragdine: stopped. Go on with: smaragdine sweep --resume {where}", file=sys.stderr)
        return 128 + stop.number
    failed = [row.recording for row in sweep.failed()]
    if failed:
        what = f"{failed[0]} failed" if len(failed) == 1 else f"{len(failed)} failed, such as {failed[0]}"
        print(f"smaragdine: {what}. Try again with: smaragdine sweep --resume {where}", file=sys.stderr)
    if len(failed) < len(sweep.rows):
        print(f"best setting: smaragdine fit {where}", file=sys.stderr)
    return 1 if failed else 0


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 150,200") from None


def _clocks(text: str) -> list[int]:
    if not re.fullmatch(r"\d{1,6},\d{1,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair MEMORY,GRAPHICS in MHz such as 877,1005")
    return [int(word) for word in text.split(",")]
