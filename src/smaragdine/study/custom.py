"""Studies a user's own program: makes a setting of every combination of values, and compares the settings."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smaragdine.accounting.arithmetic import adding_devices, average, working_device
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.merge import merge_all
from smaragdine.accounting.similarity import Correlation, constant_power, correlation, matrix, mean_difference
from smaragdine.errors import UserError
from smaragdine.recording.command import build_command
from smaragdine.study.plan import PROGRAM, SCRIPT, Fact, StudySetting
from smaragdine.study.results import Result, by_setting
from smaragdine.sweep.experiment import filled

_VARIED = "--"  # put before the name of what varies: a user's `model` or `scale` is not the study's


def custom_settings(
    words: Sequence[str], vary: Mapping[str, Sequence[Fact]], trace_steps: int, trace_skip: int
) -> list[StudySetting]:
    """Every combination. `{layers}` in the words is replaced; without it, `--layers 2` is added."""
    label = build_command(words, os.environ).label
    program: dict[str, Fact] = {PROGRAM: label, **_script(words)}
    settings: list[StudySetting] = []
    for values in itertools.product(*vary.values()):
        facts = dict(zip(vary, values, strict=True))
        own = [filled(word, {**facts}) for word in words]
        for name, value in facts.items():
            if not any(f"{{{name}}}" in word for word in words):
                own += [f"--{name}", str(value)]
        name = "-".join([label, *(f"{name}_{value}" for name, value in facts.items())])
        name = re.sub(r"[^A-Za-z0-9_.+-]+", "_", name)[:100]
        varying = {f"{_VARIED}{name}": value for name, value in facts.items()}
        settings.append(StudySetting(name, tuple(own), {**program, **varying}, {}, trace_steps, trace_skip))
    names = [setting.name for setting in settings]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two settings would be named {twice}", remedy="Name every value once, and shorter")
    return settings


def _script(words: Sequence[str]) -> dict[str, Fact]:
    """Nothing is known of a program that is no file."""
    try:
        return {SCRIPT: hashlib.sha256(Path(words[0]).read_bytes()).hexdigest()[:16]}
    except OSError:
        return {}


@dataclass(frozen=True)
class Own:
    """One setting of a user's program; figures are per step on all devices, as means over its runs."""

    name: str
    runs: int
    step_s: float | None
    energy_j: float
    energy_std_j: float | None  # None for a single run
    provenance: str
    alike: float | None  # the lowest similarity of two of its runs, by energy
    alike_power: float | None
    asss: float | None  # the lowest over all thinnings and runs, by energy


@dataclass(frozen=True)
class Customs:
    """How the settings of one program compare. Matrices are in their order, with layers merged."""

    device: str | None  # the device that does the work, for similarities; None: all devices
    settings: tuple[Own, ...]
    energy: list[list[Correlation]]
    power: list[list[Correlation]]
    time_alone: list[list[Correlation]]  # the score of constant power
    difference_j: list[list[float | None]]  # the mean of row − column over common names, as in figure 9
    difference_w: list[list[float | None]]


def customs_of(results: Sequence[Result], program: str) -> Customs:
    """From all results of a user's program, whatever command they came from."""
    own = [result for result in results if result.facts.get(PROGRAM) == program]
    groups = by_setting(sorted(own, key=varied))
    device = working_device([run.step for runs in groups.values() for run in runs]) if groups else None
    merged = iter(merge_all([run.step for runs in groups.values() for run in runs]) if groups else [])
    means = [average([next(merged) for _ in runs]).mean for runs in groups.values()]
    return Customs(
        device,
        tuple(_own(name, runs, device) for name, runs in groups.items()),
        matrix(means, "energy", device),
        matrix(means, "power", device),
        matrix([constant_power(mean) for mean in means], "energy", device),
        [[mean_difference(b, a, "energy", device) for b in means] for a in means],
        [[mean_difference(b, a, "power", device) for b in means] for a in means],
    )


def varied(result: Result) -> list[tuple[bool, float, str]]:
    """Sorts settings: numbers as numbers, before words."""
    own = values_of(result).values()
    return [(False, value, "") if isinstance(value, int | float) else (True, 0.0, value) for value in own]


def values_of(result: Result) -> dict[str, Fact]:
    """What varies → its value."""
    return {
        name.removeprefix(_VARIED): value
        for name, value in result.facts.items()
        if name not in (PROGRAM, SCRIPT)
    }


def step_j(footprint: Footprint) -> float:
    """Over all devices that add up."""
    return sum(footprint.devices[device].total_j for device in adding_devices(footprint))


def _own(name: str, runs: Sequence[Result], device: str | None) -> Own:
    energies_j = [step_j(run.step) for run in runs]
    lengths_s = [run.step_s for run in runs if run.step_s is not None]
    pairs = list(itertools.combinations([run.step for run in runs], 2))
    scores = [score for run in runs for score in run.asss.get(device or "", ())]
    thinned = [score["energy"] for score in scores if (score["every"] or 1) > 1]
    return Own(
        name,
        len(runs),
        statistics.fmean(lengths_s) if lengths_s else None,
        statistics.fmean(energies_j),
        statistics.stdev(energies_j) if len(runs) > 1 else None,
        " + ".join(sorted({each for run in runs for each in run.provenance.values()})),
        _lowest([correlation(a, b, "energy", device).value for a, b in pairs]),
        _lowest([correlation(a, b, "power", device).value for a, b in pairs]),
        _lowest(thinned),
    )


def _lowest(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)
