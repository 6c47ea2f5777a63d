"""A study on the terminal: what it is to run, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table as RichTable

from smaragdine.report.progress import RunsDisplay
from smaragdine.study.custom import step_j
from smaragdine.study.folder import expected_s
from smaragdine.study.results import Result
from smaragdine.study.settings import Run
from smaragdine.sweep.progress import Progress
from smaragdine.units import joules, seconds


def runs_table(left: Sequence[Run], took_s: Mapping[str, float]) -> RenderableType:
    """The runs that a study lacks, a line for each setting."""
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("setting", "runs", "time"):
        table.add_column(header, justify="left" if header == "setting" else "right", overflow="fold")
    settings: dict[str, list[Run]] = {}
    for run in left:
        settings.setdefault(run.setting.name, []).append(run)
    for name, runs in settings.items():
        table.add_row(name, str(len(runs)), seconds(expected_s(runs, took_s)))
    return table


class StudyDisplay(RunsDisplay):
    """Tells how a study goes."""

    def begin(self, run: Run, progress: Progress) -> None:
        self.show(run.name, progress)

    def end(self, run: Run, result: Result, progress: Progress) -> None:
        step = f"{joules(step_j(result.step))} and {seconds(result.step_s)} a step"
        self.ended(f"{run.name}: {step}", progress)
