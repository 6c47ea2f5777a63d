"""Which folder a sweep goes to: a new one, or that of the same sweep which was cut off."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from smaragdine.errors import UserError
from smaragdine.sweep.experiment import ExperimentFile
from smaragdine.sweep.lock import locked
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


@contextlib.contextmanager
def gone_if_refused(folder: Path) -> Iterator[None]:
    """A new sweep that is refused before anything was run leaves nothing, nor the folders made on its way."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    users = set[Path]() if new else set(folder.iterdir())
    try:
        yield
    except UserError:
        # Unless another process, started at the same time, is at work in it.
        with contextlib.suppress(OSError, UserError), locked(folder):
            if not any((folder / RUNS).glob("*")) and not any((folder / UNFINISHED).glob("*")):
                _remove(set(folder.iterdir()) - users)
                for path in new:
                    path.rmdir()
        raise


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


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
