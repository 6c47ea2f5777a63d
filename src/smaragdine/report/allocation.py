"""Prints allocations, platforms, batch sizes and profiles as tables for a terminal, or for a paper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from smaragdine.allocate.batch_size import BatchSize, Replay
from smaragdine.allocate.device import ProfiledPoint
from smaragdine.allocate.methods import Answer, Corner, Tie
from smaragdine.allocate.model import Objective, Share, step_time_s, unit
from smaragdine.allocate.platform import Choice, Miss, Standard
from smaragdine.errors import visible
from smaragdine.report.terminal import plain_table
from smaragdine.units import joules, plain, seconds, watts


def allocation_tables(
    answers: Sequence[Answer],
    model: str,
    global_batch: int,
    front: Sequence[Corner] = (),
    remarks: Sequence[str] = (),
    skipped: Mapping[str, str] | None = None,
) -> RenderableType:
    objective = answers[0].objective
    parts: list[RenderableType] = [
        Text(f"{global_batch} samples a step, {model} model, {_formula(objective)}", style="bold"),
        Text(""),
        _answers_table(answers),
    ]
    parts += [Text(line, style="dim") for line in _notes(answers)]
    if front:
        parts += [Text(""), _front_table(front, objective)]
    parts += [Text.assemble((f"no {name}: ", "dim"), why) for name, why in (skipped or {}).items()]
    parts += [Text.assemble(("! ", "yellow"), visible(remark)) for remark in remarks]
    return Group(*parts)


def _formula(objective: Objective) -> str:
    eta = f"η = {objective.eta:g}"
    within = (
        "" if objective.slowdown is None else f" within {plain(objective.slowdown, 3)} of the fastest step"
    )
    return {
        "sum": f"Σ (η·P̄ + (1−η)·P_limit)·t, {eta}",
        "sync": f"η·E + (1−η)·T·ΣP_limit of a synchronous step, {eta}",
        "energy": f"energy of a synchronous step{within}",
        "time": "time of a synchronous step",
        "edp": "energy × time of a synchronous step",
    }[objective.kind]


def _answers_table(answers: Sequence[Answer]) -> Table:
    uncertain = any(each.standard_error is not None for each in answers)
    heads = [
        "cost",
        *(["±"] if uncertain else []),
        "found in",
        "batch",
        "limit",
        "time",
        "mean power",
        "step",
    ]
    table = plain_table("method", "GPU", *heads, left=("GPU",))
    for n, each in enumerate(answers):
        if n:
            table.add_row()
        cost = Text(f"{each.allocation.cost:.4f} {unit(each.objective)}", style="bold")
        error = [] if not uncertain else [_figure(each.standard_error)]
        step = seconds(step_time_s(each.allocation.shares, each.objective.all_reduce_s))
        for i, share in enumerate(each.allocation.shares):
            first = (each.method, cost, *error, seconds(each.seconds), step)
            method, *of_method, last = first if not i else ("",) * len(first)
            table.add_row(method, Text(visible(share.gpu)), *of_method, *_share(share), last)
    return table


def _share(share: Share) -> tuple[str, ...]:
    if not share.batch:
        return ("–", "left out", "–", "–")
    limit = f"{share.power_limit_w:g} W"
    return (str(share.batch), limit, seconds(share.time_s), watts(share.power_w))


def _notes(answers: Sequence[Answer]) -> list[str]:
    notes: list[str] = []
    for each in answers:
        found = each.allocation
        if each.too_slow:
            notes.append(f"{each.method}: longer steps than asked for; this is the fastest it finds")
        if not found.exact and each.method != "baseline":
            gap = (found.cost - found.lower_bound) / found.cost
            notes.append(
                f"{each.method}: not known to be the best; no allocation costs less than "
                f"{found.lower_bound:.4f} {unit(each.objective)} ({gap:.2%} less)"
            )
        if each.tie is not None:
            notes.append(f"{each.method}: {_tie_words(each, each.tie)}")
    if any(each.standard_error is not None for each in answers):
        notes.append("±: standard error from the profiles' repeats")
    return notes


def _tie_words(answer: Answer, tie: Tie) -> str:
    """What would be cheaper, by how little, and why this answer was preferred."""
    chosen, cheapest, of = answer.allocation, tie.cheapest, unit(answer.objective)
    split = " + ".join(str(share.batch) for share in cheapest.shares)
    steps_s = [step_time_s(each.shares, answer.objective.all_reduce_s) for each in (chosen, cheapest)]
    less = plain(max(chosen.cost - cheapest.cost, 0.0))
    error = f"the error of {plain(tie.margin)} {of}" if tie.margin else "rounding"
    return (
        f"a tie. {split} samples cost {less} {of} less, within {error}, with steps of {seconds(steps_s[1])} "
        f"instead of {seconds(steps_s[0])}; of such answers the fastest inside what was profiled is given"
    )


def _front_table(front: Sequence[Corner], objective: Objective) -> Table:
    energy, limits = ("Σ P̄·t", "Σ P_limit·t") if objective.kind == "sum" else ("E", "T·ΣP_limit")
    table = plain_table(
        "best for η", "allocation", energy, limits, "step", left=("allocation",), folds=("allocation",)
    )
    for corner in front:
        shares = corner.allocation.shares
        split = " + ".join(f"{share.batch}@{share.power_limit_w:g}W" for share in shares)
        table.add_row(
            f"{corner.eta_low:.3f} … {corner.eta_high:.3f}",
            Text(split, overflow="fold"),
            joules(corner.energy),
            joules(corner.limit_energy),
            seconds(step_time_s(shares, objective.all_reduce_s)),
        )
    return table


def _figure(value: float | None) -> str:
    return "–" if value is None else plain(value)


# Platforms and batch sizes as tables for a terminal.

_LAST = 20  # recurrences: by then the bandit should have settled


def platform_tables(
    scale: Standard, missed: Mapping[str, Sequence[Miss]], ranked: Sequence[Choice]
) -> RenderableType:
    table = plain_table("GPU", "slowness", "draw", "highest limit")
    for row in scale_json(scale):
        table.add_row(
            visible(row["gpu"]), f"{row['slowness']:.3f}", f"{row['draw']:.3f}", f"{row['highest_w']:g} W"
        )
    parts: list[RenderableType] = [table]
    parts.append(Text("time and power of an unlimited epoch, the standard device's being 1", style="dim"))
    for name, misses in missed.items():
        errors = plain_table(
            f"known there: {name}", "epochs", "time: median", "90 %", "energy: median", "90 %"
        )
        for row in misses_json({name: misses}):
            figures = (row[f"{of}_{at}"] for of in ("time", "energy") for at in ("median", "p90"))
            errors.add_row(visible(row["gpu"]), str(row["epochs"]), *(f"{value:.1%}" for value in figures))
        parts += [Text(""), errors]
    if missed:
        parts.append(Text("absolute errors, each workload left out on each GPU in turn", style="dim"))
    if ranked:
        choice = plain_table("best first", "limit", "time", "energy")
        for each in ranked:
            of = each.prediction
            choice.add_row(
                visible(each.gpu), f"{each.power_limit_w:g} W", seconds(of.time_s), joules(of.energy_j)
            )
        parts += [Text(""), choice]
    return Group(*parts)


def scale_json(scale: Standard) -> list[dict[str, Any]]:
    return [
        {
            "gpu": gpu,
            "slowness": math.exp(scale.slowness[gpu]),
            "draw": math.exp(scale.draw[gpu]),
            "highest_w": scale.highest_w[gpu],
        }
        for gpu in scale.slowness
    ]


def misses_json(missed: Mapping[str, Sequence[Miss]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, misses in missed.items():
        for gpu in [*sorted({miss.measured.gpu for miss in misses}), "all"]:
            of = [miss for miss in misses if gpu in ("all", miss.measured.gpu)]
            row: dict[str, Any] = {"known": name, "gpu": gpu, "epochs": len(of)}
            for what, errors in (
                ("time", [abs(miss.time_error) for miss in of]),
                ("energy", [abs(miss.energy_error) for miss in of]),
            ):
                row[f"{what}_median"], row[f"{what}_p90"] = map(float, np.quantile(errors, [0.5, 0.9]))
            rows.append(row)
    return rows


def batch_tables(
    sizes: Sequence[BatchSize], best: BatchSize, default: BatchSize, replays: Sequence[Replay]
) -> RenderableType:
    table = plain_table("batch", "limit", "epochs", "cost", "energy", "time", "", left=("",))
    for size in sizes:
        mark = "best" if size is best else "default" if size.batch == default.batch else ""
        style = "bold" if size is best else "" if size.reaches else "dim"
        table.add_row(*_row(size), Text(mark), style=style)
    table.add_row(*_row(default), Text("default, as it is"))
    parts: list[RenderableType] = [table]
    parts.append(Text(f"the best costs {best.cost / default.cost:.1%} of the default", style="bold"))
    if replays:
        count = len(replays[0].costs)
        regret = statistics.fmean(each.regret[-1] for each in replays) / best.cost
        last = statistics.fmean(cost for each in replays for cost in each.costs[-_LAST:]) / best.cost
        lost = count * (default.cost / best.cost - 1)
        parts.append(
            Text(
                f"bandit, {len(replays)} replays of {count} recurrences: regret {regret:.1f} jobs (default "
                f"{lost:.1f}); the last {min(_LAST, count)} cost {last:.3f} of the oracle's"
            )
        )
    return Group(*parts)


def _row(size: BatchSize) -> tuple[str, ...]:
    figures: tuple[str, ...] = ("never" if not any(size.epochs) else "not always", "–", "–", "–")
    if size.reaches:
        figures = (
            f"{size.mean_epochs:.1f}",
            joules(size.cost),
            joules(size.mean_epochs * size.epoch_energy_j),
            seconds(size.mean_epochs * size.epoch_time_s),
        )
    return (str(size.batch), f"{size.power_limit_w:g} W", *figures)


# A profile as a table for a terminal.


def profile_table(
    gpu: str,
    points: Sequence[ProfiledPoint],
    idle_w: float | None,
    wait_w: float | None,
    remarks: Sequence[str],
) -> RenderableType:
    table = plain_table(gpu, "limit", "steps", "time per step", "", "energy per step", "", "mean power")
    estimated = False
    for point in points:
        steps, limit = point.steps, f"{point.power_limit_w:g} W"
        if steps is None:
            table.add_row(f"batch {point.batch}", limit, "", "out of memory", style="dim")
            continue
        estimated = estimated or steps.provenance == "estimated"
        table.add_row(
            f"batch {point.batch}",
            limit,
            str(steps.count),
            seconds(steps.time_s),
            _part(steps.time_error_s, steps.time_s),
            joules(steps.energy_j),
            _part(steps.energy_error_j, steps.energy_j),
            f"{steps.energy_j / steps.time_s:.4g} W",
        )
    powers = [("idle", idle_w), ("waiting", wait_w)]
    known = ", ".join(f"{name} {power_w:.4g} W" for name, power_w in powers if power_w is not None)
    notes = [*([known] if known else []), *(["energy is estimated"] if estimated else []), *remarks]
    return Group(table, *(Text(note, style="dim") for note in notes))


def _part(error: float | None, value: float) -> str:
    """The standard error as a part of the value."""
    return "" if error is None or value <= 0 else f"± {error / value:.1%}"
