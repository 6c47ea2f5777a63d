"""The figures of a sweep's recordings: those of each group that is fitted, drawn by limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smaragdine.errors import UserError
from smaragdine.recording.reader import open_recording
from smaragdine.report.figures.cumulative import cumulative_of_runs
from smaragdine.report.figures.draw import FORMATS, Drawn, save
from smaragdine.report.figures.epochs import epochs_of_runs
from smaragdine.report.figures.limits import Key
from smaragdine.report.figures.mean_power import mean_power_of_runs
from smaragdine.report.figures.power import power_of_runs
from smaragdine.report.figures.runs import NotDrawn, Run
from smaragdine.report.figures.sampling import sampling_of_runs
from smaragdine.sweep.measured import steps_span_ns
from smaragdine.sweep.measurements import Of
from smaragdine.sweep.settings import SweepGroups
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
    sweep: Path, swept: SweepGroups, names: Mapping[Key, str], folder: Path, formats: Sequence[str] = FORMATS
) -> Drawn:
    """What the recordings of a sweep allow, a folder for every group: named as its fit is."""
    files: list[Path] = []
    left_out: dict[str, str] = {}
    for group, settings in zip(swept.groups, swept.settings, strict=True):
        name = names[tuple(group.by.items())]
        try:
            runs = [_run(sweep, row, said, group.of) for said, rows in settings.items() for row in rows]
        except UserError as error:
            left_out[name] = str(error)
            continue
        for figure, drawn in OF_RUNS.items():
            try:
                files += save(drawn(runs), folder / name, figure, formats)
            except NotDrawn as error:
                left_out[f"{name}/{figure}"] = str(error)
    return Drawn(files, left_out)


def _run(sweep: Path, row: Repetition, setting: str, of: Of | None) -> Run:
    recording = open_recording(sweep / row.recording)
    steps_ns = steps_span_ns(recording) if of == "steps" else None
    if of == "steps" and steps_ns is None:
        raise UserError(f"{recording.path} has no steps", "the sweep's table has them", "Was it replaced?")
    return Run(recording, recording.path.name, setting, setting, steps_ns)
