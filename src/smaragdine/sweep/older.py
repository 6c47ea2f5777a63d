"""Sweeps whose tables were made before steps were counted: their recordings still tell them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from smaragdine.errors import UserError
from smaragdine.recording.reader import open_recording
from smaragdine.sweep.measured import measure_steps
from smaragdine.sweep.table import Repetition, counts_steps, read_results


def read_rows(folder: str | os.PathLike[str]) -> tuple[list[Repetition], int]:
    """The rows of a sweep with their steps, and of how many these cannot be told any more."""
    rows = read_results(folder)
    if counts_steps(folder):
        return rows, 0
    counted = [_counted(Path(folder), row) for row in rows]
    return [row or old for row, old in zip(counted, rows, strict=True)], counted.count(None)


def _counted(folder: Path, row: Repetition) -> Repetition | None:
    if row.device is None:
        return row  # nothing was measured
    try:
        recording = open_recording(folder / row.recording)
        if recording.lost("power") or recording.lost("marks"):
            return None
        found = measure_steps(recording, row.device.split(" + "))
    except UserError:
        return None
    return replace(row, **vars(found))
