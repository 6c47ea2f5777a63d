"""Platforms and batch sizes as tables for a terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from smaragdine.allocate.bandit import Replay
from smaragdine.allocate.batch_size import BatchSize
from smaragdine.allocate.platform import Choice, Miss, Standard
from smaragdine.errors import visible
from smaragdine.units import joules, seconds

_LAST = 20  # recurrences, by which the bandit should have settled


def platform_tables(
    scale: Standard, missed: Mapping[str, Sequence[Miss]], ranked: Sequence[Choice]
) -> RenderableType:
    table = _table("GPU", "slowness", "draw", "highest limit")
    for row in scale_json(scale):
        table.add_row(
            visible(row["gpu"]), f"{row['slowness']:.3f}", f"{row['draw']:.3f}", f"{row['highest_w']:g} W"
        )
    parts: list[RenderableType] = [table]
    parts.append(Text("time and power of an unlimited epoch, the standard device's being 1", style="dim"))
    for name, misses in missed.items():
        errors = _table(f"known there: {name}", "epochs", "time: median", "90 %", "energy: median", "90 %")
        for row in misses_json({name: misses}):
            figures = (row[f"{of}_{at}"] for of in ("time", "energy") for at in ("median", "p90"))
            errors.add_row(visible(row["gpu"]), str(row["epochs"]), *(f"{value:.1%}" for value in figures))
        parts += [Text(""), errors]
    if missed:
        parts.append(Text("absolute errors, each workload left out on each GPU in turn", style="dim"))
    if ranked:
        choice = _table("best first", "limit", "time", "energy")
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
    table = _table("batch", "limit", "epochs", "cost", "energy", "time", "")
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


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i and header else "left", no_wrap=True)
    return table
