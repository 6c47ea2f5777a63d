"""The figures of a sweep: the recordings of each benchmark, drawn by limit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smaragdine.errors import UserError
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.report.figures.cumulative import cumulative_of_runs
from smaragdine.report.figures.draw import FORMATS, Drawn, save
from smaragdine.report.figures.epochs import epochs_of_runs
from smaragdine.report.figures.mean_power import mean_power_of_runs
from smaragdine.report.figures.power import power_of_runs
from smaragdine.report.figures.runs import NotDrawn, Run, runs_of
from smaragdine.report.figures.sampling import sampling_of_runs
from smaragdine.sweep.table import Repetition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OF_RUNS: Mapping[str, Callable[[Sequence[Run]], Figure]] = {
    "power": power_of_runs,
    "mean_power": mean_power_of_runs,
    "cumulative": cumulative_of_runs,
    "epochs": epochs_of_runs,
    "sampling": sampling_of_runs,
}


def draw_sweep(
    sweep: Path, rows: Sequence[Repetition], folder: Path, formats: Sequence[str] = FORMATS
) -> Drawn:
    """What the recordings of a sweep allow, a folder for every experiment and benchmark."""
    files: list[Path] = []
    left_out: dict[str, str] = {}
    kinds = dict.fromkeys((row.experiment, row.benchmark) for row in rows)
    for kind in kinds:
        own = [r for r in rows if (r.experiment, r.benchmark) == kind and r.status == "complete"]
        name = "-".join(re.findall(r"[\w.+]+", " ".join(kind))) or "runs"
        try:
            runs = runs_of(_recordings(sweep, own))
        except UserError as error:
            left_out[name] = str(error)
            continue
        for figure, of in OF_RUNS.items():
            try:
                files += save(of(runs), folder / name, figure, formats)
            except NotDrawn as error:
                left_out[f"{name}/{figure}"] = str(error)
    return Drawn(files, left_out)


def _recordings(sweep: Path, rows: Sequence[Repetition]) -> list[Recording]:
    if not rows:
        raise UserError("no repetition completed")
    return [open_recording(sweep / row.recording) for row in rows]
