"""The figures of a sweep's recordings: those of each group that is fitted, drawn by limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smaragdine.errors import UserError
from smaragdine.recording.reader import open_recording
from smaragdine.report.figures.cumulative import cumulative_of_runs
from smaragdine.report.figures.draw import FORMATS, Drawn, save, write_captions
from smaragdine.report.figures.epochs import epochs_of_runs
from smaragdine.report.figures.limits import draw_fits, stems
from smaragdine.report.figures.mean_power import mean_power_of_runs
from smaragdine.report.figures.power import power_of_runs
from smaragdine.report.figures.runs import NotDrawn, Run
from smaragdine.report.figures.sampling import sampling_of_runs
from smaragdine.report.figures.style import alt_text
from smaragdine.report.fit import label
from smaragdine.sweep.fit import Analysis
from smaragdine.sweep.measured import steps_span_ns
from smaragdine.sweep.measurements import Group, Of
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
    sweep: Path, swept: SweepGroups, found: Analysis, folder: Path, formats: Sequence[str] = FORMATS
) -> Drawn:
    """The fits of a sweep; and what its recordings allow, a folder for every group: named as its fit is.

    All captions are in one file, each with what was run.
    """
    fits = draw_fits(found, folder, formats)
    names = stems(found)
    files = list(fits.files)
    captions: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for group, settings in zip(swept.groups, swept.settings, strict=True):
        name = names[tuple(group.by.items())]
        said_of = _swept_words(group, settings)
        if name in fits.captions:
            captions[name] = f"{fits.captions[name]} {said_of}"
        try:
            runs = [_run(sweep, row, said, group.of) for said, rows in settings.items() for row in rows]
        except UserError as error:
            left_out[name] = str(error)
            continue
        for kind, draw in OF_RUNS.items():
            try:
                figure = draw(runs)
            except NotDrawn as error:
                left_out[f"{name}/{kind}"] = str(error)
                continue
            files += save(figure, folder / name, kind, formats)
            captions[f"{name}/{kind}"] = f"{alt_text(figure)} {said_of}"
    write_captions(folder, captions)
    return Drawn(files, left_out, captions)


def _swept_words(group: Group, settings: Mapping[str, Sequence[Repetition]]) -> str:
    """What was run, on what and how often: the end of a caption."""
    rows = [row for each in settings.values() for row in each]
    gpus, devices, provenance = (
        " and ".join(sorted({value for row in rows if (value := getattr(row, name))}))
        for name in ("device_name", "device", "provenance")
    )
    known = " ".join(word for word in (devices, provenance) if word)
    where = f" on {gpus} ({known})" if gpus else f" on {known}" if known else ""
    names, several = list(settings), len(settings) > 1
    span = f"{len(names)} settings from {names[0]} to {names[-1]}" if several else names[0]
    low, high = (of(map(len, settings.values())) for of in (min, max))
    often = f"{low}–{high} repetitions" if low < high else f"{low} repetition{'s' * (low > 1)}"
    return f"A sweep of {label(group.by)}{where}: {span}, {often}{' each' * several}."


def _run(sweep: Path, row: Repetition, setting: str, of: Of | None) -> Run:
    recording = open_recording(sweep / row.recording)
    steps_ns = steps_span_ns(recording) if of == "steps" else None
    if of == "steps" and steps_ns is None:
        raise UserError(f"{recording.path} has no steps", "the sweep's table has them", "Was it replaced?")
    return Run(recording, recording.path.name, setting, setting, steps_ns)
