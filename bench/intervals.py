"""Measures how often a 95 % interval covers the true energy, and how wide it is: for rows, and for groups.

    python bench/intervals.py [--programs 60]

The operations of the programs have a known power (bench/programs.py), and a sensor sees means over 5, 20
and 100 ms. Beside our interval of a row stands the one that a mean over steps alone would give. Then come
groups of the rows of models made of layers: layers, phases, kinds of operations, halves taken at random,
the whole. Beside our interval of a group stands the sum of its rows' intervals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from programs import IDLE_W, LIMIT_W, make_model, make_program, watch

from smaragdine.accounting.account import account
from smaragdine.accounting.device_power import DevicePower
from smaragdine.accounting.intervals import half_widths_j
from smaragdine.accounting.uncertainty import sensor_of
from smaragdine.arrays import Floats
from smaragdine.stats import t_quantile

WINDOWS_MS = (5, 20, 100)


@dataclass(frozen=True)
class Outcome:
    """One line per row of all programs, all relative to the row's true energy."""

    error: Floats
    width: Floats
    spread: Floats  # the half-width from the spread over steps alone
    energy_j: Floats
    by_prior: npt.NDArray[np.bool_]


def watch_programs(programs: int, window_ms: float, limits_known: bool) -> Outcome:
    lines: list[tuple[float, float, float, float, bool]] = []
    for seed in range(programs):
        program = make_program(seed)
        trace = watch(program, window_ms, seed)
        known = (IDLE_W, LIMIT_W) if limits_known else (None, None)
        found = account(program.events, {"gpu:0": DevicePower(trace, sensor_of(trace, *known))})
        steps = found.devices["gpu:0"].steps
        for row in found.rows.to_pylist():
            true_j = float(program.true_j[int(row["name"][2:])])
            spread_j = t_quantile(steps - 1) * row["step_std_j"] * steps**0.5
            lines.append(
                (
                    abs(row["energy_j"] - true_j) / true_j,
                    row["uncertainty_j"] / true_j,
                    spread_j / true_j,
                    true_j,
                    row["basis"] == "prior",
                )
            )
    error, width, spread, energy_j, by_prior = (np.array(column) for column in zip(*lines, strict=True))
    return Outcome(error, width, spread, energy_j, by_prior)


@dataclass(frozen=True)
class GroupOutcome:
    """One line per group of all models, all relative to the group's true energy."""

    error: Floats
    width: Floats
    summed: Floats  # the sum of its rows' half-widths


def watch_models(models: int, window_ms: float) -> dict[str, GroupOutcome]:
    """The outcome of every group, by the kind of group."""
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(models):
        program, operations = make_model(seed)
        trace = watch(program, window_ms, seed)
        found = account(program.events, {"gpu:0": DevicePower(trace, sensor_of(trace, IDLE_W, LIMIT_W))})
        place = {(each.name, each.phase): i for i, each in enumerate(operations)}
        rows = found.rows.to_pylist()
        true_j = np.array([program.true_j[place[row["name"], row["phase"]]] for row in rows])
        energy_j, width_j = (np.array([row[name] for row in rows]) for name in ("energy_j", "uncertainty_j"))
        for what, members in groups_of([(row["name"], row["phase"]) for row in rows], seed):
            group = np.array(members)
            half = half_widths_j(found, group, np.array([0]), np.array([group.size]))[0]
            error_j = abs(energy_j[group].sum() - true_j[group].sum())
            relative = np.array([error_j, half, width_j[group].sum()]) / true_j[group].sum()
            lines.setdefault(what, []).append(tuple(relative.tolist()))
    return {what: GroupOutcome(*np.array(of).T) for what, of in lines.items()}


def groups_of(keys: list[tuple[str, str]], seed: int) -> Iterator[tuple[str, list[int]]]:
    """The kind of a group, and its rows: at least two."""
    groups: dict[tuple[str, str], list[int]] = {}
    for i, (name, phase) in enumerate(keys):
        _, layer, kind = name.split("/")
        for what, which in (
            ("layer", layer),
            ("layer and phase", f"{layer} {phase}"),
            ("phase", phase),
            ("kind", kind),
            ("whole", ""),
        ):
            groups.setdefault((what, which), []).append(i)
    random = np.random.default_rng(seed)
    for i in range(6):
        groups["random half", str(i)] = np.flatnonzero(random.random(len(keys)) < 0.5).tolist()
    for (what, _), members in groups.items():
        if len(members) > 1:
            yield what, members


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=60)
    programs = parser.parse_args().programs
    print(
        "window  limits    rows  covered  by spread alone  median width  by energy  median error  on a prior"
    )
    for window_ms in WINDOWS_MS:
        for limits_known in (True, False):
            if sys.stderr.isatty():
                print(f"  {window_ms} ms …", end="\r", file=sys.stderr)
            seen = watch_programs(programs, window_ms, limits_known)
            print(
                f"{window_ms:3} ms  {'known' if limits_known else 'guessed':8}{seen.error.size:6}"
                f"{np.mean(seen.error <= seen.width):9.1%}{np.mean(seen.error <= seen.spread):17.1%}"
                f"{np.median(seen.width):14.1%}{np.average(seen.width, weights=seen.energy_j):11.1%}"
                f"{np.median(seen.error):14.1%}{np.mean(seen.by_prior):12.1%}",
                flush=True,
            )
    print("\nwindow  group            groups  covered  median width  by the sum of rows  median error")
    for window_ms in WINDOWS_MS:
        found = watch_models(programs, window_ms)
        columns = zip(*((of.error, of.width, of.summed) for of in found.values()), strict=True)
        found["all of them"] = GroupOutcome(*map(np.concatenate, columns))
        for what, group in found.items():
            print(
                f"{window_ms:3} ms  {what:15}{group.error.size:8}{np.mean(group.error <= group.width):9.1%}"
                f"{np.median(group.width):14.1%}{np.median(group.summed):20.1%}{np.median(group.error):14.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
