"""The plan of a sweep: every repetition in the order in which it runs, made once and kept in `plan.json`."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from smaragdine.errors import UserError
from smaragdine.files import read_json, write_whole
from smaragdine.jobs.setting import Setting, Value
from smaragdine.recording.command import without_secrets
from smaragdine.sweep.experiment import Benchmark, Experiment, checked, filled
from smaragdine.version import __version__

PLAN = "plan.json"
_FORMAT = 1


@dataclass(frozen=True)
class Task:
    """One repetition to run."""

    experiment: str
    benchmark: str
    setting: Setting
    repetition: int  # from 0
    name: str  # also of its recording's folder

    @property
    def group(self) -> str:
        """The same for all repetitions of one setting."""
        return self.name.rpartition("-")[0]


@dataclass(frozen=True)
class Plan:
    seed: int
    experiments: tuple[Experiment, ...]
    tasks: tuple[Task, ...]
    made: Mapping[str, Any] = field(default_factory=dict[str, Any])  # when, where, with what

    def experiment(self, task: Task) -> Experiment:
        return next(each for each in self.experiments if each.name == task.experiment)

    def benchmark(self, task: Task) -> Benchmark:
        return next(each for each in self.experiment(task).benchmarks if each.name == task.benchmark)


def make_plan(
    experiments: Sequence[Experiment], seed: int | None, made: Mapping[str, Any] | None = None
) -> Plan:
    """Each repetition goes through all settings and benchmarks, every time in another order."""
    chosen = random.SystemRandom().randrange(2**31) if seed is None else seed
    pairs_of = {e.name: [(b, s) for b in e.benchmarks for s in _settings(e)] for e in experiments}
    all_names = iter(_names([(name, *pair) for name, pairs in pairs_of.items() for pair in pairs]))
    tasks: list[Task] = []
    for experiment in experiments:
        pairs = pairs_of[experiment.name]
        names = list(itertools.islice(all_names, len(pairs)))
        for repetition in range(experiment.repeat):
            order = list(range(len(pairs)))
            if experiment.order == "shuffled":
                random.Random(f"{chosen}/{experiment.name}/{repetition}").shuffle(order)
            for n in order:
                benchmark, setting = pairs[n]
                folder = f"{names[n]}-{repetition + 1}"
                tasks.append(Task(experiment.name, benchmark.name or "", setting, repetition, folder))
    facts = {"smaragdine_version": __version__, "made_ns": time.time_ns(), **(made or {})}
    return Plan(chosen, tuple(experiments), tuple(tasks), facts)


def command_words(benchmark: Benchmark, setting: Setting) -> list[str]:
    return [filled(str(word), _values(benchmark, setting)) for word in benchmark.command]


def command_environment(benchmark: Benchmark, setting: Setting) -> dict[str, str]:
    values = _values(benchmark, setting)
    return {name: filled(str(value), values) for name, value in benchmark.environment.items()}


def save_plan(folder: Path, plan: Plan) -> None:
    """Writes it whole or not at all. If a command names a secret, only the owner may read the file."""
    values = {
        "format_version": _FORMAT,
        **plan.made,
        "seed": plan.seed,
        "experiments": msgspec.to_builtins(list(plan.experiments)),
        "tasks": [asdict(task) for task in plan.tasks],
    }
    words = [[str(w) for w in b.command] for e in plan.experiments for b in e.benchmarks]
    secret = any(without_secrets(each) != each for each in words)
    text = json.dumps(values, indent=1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / PLAN, text, 0o600 if secret else 0o644, durable=True)
    except OSError as error:
        raise UserError(f"{folder / PLAN} cannot be written", error.strerror or str(error)) from None


def read_plan(folder: Path) -> Plan:
    path = folder / PLAN
    try:
        values: dict[str, Any] = read_json(path)
        version = int(values["format_version"])
        if version > _FORMAT:
            raise UserError(f"{path} is of a newer version of Smaragdine", remedy="Upgrade it")
        experiments = {"experiments": values.pop("experiments")}
        found = checked(experiments, str(path), folder).experiments
        tasks = msgspec.convert(values.pop("tasks"), tuple[Task, ...])
        known = {(each.name, benchmark.name) for each in found for benchmark in each.benchmarks}
        for task in tasks:
            if (task.experiment, task.benchmark) not in known:
                raise ValueError(f"its experiments have no {task.experiment}, {task.benchmark}")
        return Plan(int(values.pop("seed")), tuple(found), tasks, values)
    except FileNotFoundError:
        remedy = "Name the folder that smaragdine sweep made"
        raise UserError(f"{folder} is no sweep", f"it has no {PLAN}", remedy) from None
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise UserError(f"{path} cannot be read", str(error), "Was it edited?") from None


def same_plan(plan: Plan, experiments: Sequence[Experiment], seed: int | None) -> bool:
    """Whether these experiments would give that plan, with whatever seed it got."""
    return list(plan.experiments) == list(experiments) and seed in (None, plan.seed)


def _settings(experiment: Experiment) -> list[Setting]:
    names = list(experiment.parameters)
    limits: list[dict[str, Any]] = [{"limit_kind": "parameter"}]
    if experiment.power_limits:
        limits = [{"limit_kind": "power", "power_limit_w": watts} for watts in experiment.power_limits]
    elif experiment.clock_limits:
        limits = [
            {"limit_kind": "clock", "memory_clock_mhz": memory, "graphics_clock_mhz": graphics}
            for memory, graphics in experiment.clock_limits
        ]
    return [
        Setting(**limit, parameters=dict(zip(names, values, strict=True)), gpu_type=kind)
        for kind in experiment.gpu_types or [None]
        for values in itertools.product(*experiment.parameters.values())
        for limit in limits
    ]


def _names(settings: Sequence[tuple[str, Benchmark, Setting]]) -> list[str]:
    """A folder name for every setting: readable, and unique."""
    names: list[str] = []
    for experiment, benchmark, setting in settings:
        text = "-".join([experiment, benchmark.name or "", *str(setting).split(", ")])
        text = text.replace(" W", "W").replace(" MHz", "MHz").replace("/", "x").replace(" ", "_")
        names.append(re.sub(r"[^A-Za-z0-9_.+-]+", "", text)[:100])
    return [f"{name}-{n}" if names.count(name) > 1 else name for n, name in enumerate(names)]


def _values(benchmark: Benchmark, setting: Setting) -> dict[str, Value]:
    epochs: dict[str, Value] = {} if benchmark.epochs is None else {"epochs": benchmark.epochs}
    return {**setting.parameters, **epochs}
