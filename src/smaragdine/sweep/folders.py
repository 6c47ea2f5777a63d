"""Which folder a sweep goes to: a new one, or that of the same sweep which was cut off."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from smaragdine.errors import UserError
from smaragdine.sweep.experiment import ExperimentFile
from smaragdine.sweep.plan import PLAN, Plan, read_plan, same_plan
from smaragdine.sweep.runner import RUNS, UNFINISHED, Sweep

ROOT = Path("sweeps")


def find_sweep(
    wanted: ExperimentFile, seed: int | None, output: Path | None, root: Path = ROOT
) -> tuple[Path, Plan | None]:
    """The folder; with its plan where the same sweep is there already."""
    if output is not None:
        return output, _plan_at(output, wanted, seed)
    for path in sorted(root.glob(f"*/{PLAN}")):
        try:
            plan = read_plan(path.parent)
        except UserError:
            continue
        if same_plan(plan, wanted.experiments, seed) and _unfinished(path.parent):
            return path.parent, plan
    name = "-".join(each.name for each in wanted.experiments)[:60]
    stem = f"{time.strftime('%Y-%m-%d')}-{name}"
    for number in range(1, 100_000):
        folder = root / (stem if number == 1 else f"{stem}-{number}")
        if not folder.exists():
            return folder, None
    raise UserError(f"{root} is full of sweeps named {stem}", remedy="Name another folder with -o DIR")


def remove_empty(folder: Path) -> None:
    """Take back a sweep in which nothing was run."""
    if any((folder / RUNS).glob("*")) or any((folder / UNFINISHED).glob("*")):
        return
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent.name == ROOT.name:
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def _plan_at(folder: Path, wanted: ExperimentFile, seed: int | None) -> Plan | None:
    if not (folder / PLAN).exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} already holds files", remedy="Name a new folder with -o DIR")
        return None
    plan = read_plan(folder)
    if not same_plan(plan, wanted.experiments, seed):
        why = "its experiments or its seed are not these"
        raise UserError(f"{folder} holds another sweep", why, "Name a new folder with -o DIR")
    return plan


def _unfinished(folder: Path) -> bool:
    try:
        sweep = Sweep(folder)
    except UserError as error:
        raise UserError("the same sweep is there", str(error)) from None
    try:
        return bool(sweep.left())
    finally:
        sweep.close()
