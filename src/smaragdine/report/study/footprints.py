"""The summary footprint of every setting, name by name: what the figures are drawn from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from smaragdine.accounting.arithmetic import average
from smaragdine.report.figures.stages import IDLE
from smaragdine.report.study.cells import Cell, Column, Mean, Table, mean_of
from smaragdine.report.study.material import Material
from smaragdine.study.results import Result, by_setting
from smaragdine.study.scores import summaries

_COLUMNS = (
    Column("setting", "Setting"),
    Column("device", "Device"),
    Column("name", "Operation"),
    Column("phase", "Phase"),
    Column("count", "Executions in a step"),
    Column("energy_j", "Energy of a step", "J"),
    Column("uncertainty_j", "95 % half-width", "J"),
    Column("basis", "Which rests on"),
    Column("busy_s", "Busy time", "s"),
    Column("power_w", "Power while busy", "W"),
)


def footprints_table(materials: Sequence[Material]) -> Table:
    """Of the device that does the work; a setting's rows, `(idle)` among them, add up to its step."""
    rows = [
        row
        for material in materials
        for results in by_setting(material.results).values()
        for row in _rows(results, material.device)
    ]
    return Table("footprints", "Footprints", _COLUMNS, tuple(rows))


def _rows(results: Sequence[Result], device: str) -> Iterator[tuple[Cell, ...]]:
    having = [result for result in results if device in result.step.devices]
    if not having:
        return
    footprints = summaries(having, device)
    over = average(footprints)
    setting = having[0].setting
    for row, spread in zip(over.mean.rows.to_pylist(), over.spread.to_pylist(), strict=True):
        ran = row["busy_s"] > 0
        yield (
            setting,
            device,
            row["name"],
            row["phase"],
            row["count"],
            _mean(row["energy_j"], spread["energy_std_j"], len(having)),
            row["uncertainty_j"],
            row["basis"],
            _mean(row["busy_s"], spread["busy_std_s"], len(having)),
            _mean(spread["power_mean_w"], spread["power_std_w"], spread["runs"]) if ran else None,
        )
    idle = mean_of([footprint.devices[device].idle_j for footprint in footprints])
    yield (setting, device, f"({IDLE})", None, None, idle, None, None, None, None)


def _mean(mean: float, std: float | None, runs: int) -> Mean:
    return Mean(mean, std if std is not None and math.isfinite(std) else None, runs)
