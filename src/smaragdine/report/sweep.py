"""A sweep on the terminal: its plan, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.table import Table

from smaragdine.report.progress import RunsDisplay
from smaragdine.sweep.plan import Plan, Task, command_words
from smaragdine.sweep.progress import Progress
from smaragdine.sweep.table import Repetition
from smaragdine.units import joules, seconds

_MOST_ROWS = 200


def plan_table(plan: Plan, left: Sequence[Task]) -> RenderableType:
    """Every repetition that is still to run, in order; of a long plan its beginning."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("", "experiment", "benchmark", "setting", "repetition", "command"):
        table.add_column(header, justify="right" if header in ("", "repetition") else "left")
    for n, task in enumerate(left[:_MOST_ROWS], 1):
        words = " ".join(command_words(plan.benchmark(task), task.setting))
        cells = [task.experiment, task.benchmark, str(task.setting), str(task.repetition + 1), words]
        table.add_row(str(n), *cells)
    if len(left) > _MOST_ROWS:
        table.add_row("…", f"{len(left) - _MOST_ROWS} more")
    return table


def row_words(task: Task, row: Repetition) -> str:
    """`small 150 W #2: 12.1 s, 1.82 kJ`."""
    what = f"{task.benchmark} {task.setting} #{task.repetition + 1}"
    if row.status != "complete":
        return f"{what}: {row.status}"
    energy_j = row.energy_j if row.energy_j is not None else row.energy_counter_j
    if row.time_s is None or energy_j is None:
        return f"{what}: not measured"
    return f"{what}: {seconds(row.time_s)}, {joules(energy_j)}"


class SweepDisplay(RunsDisplay):
    """Tells how a sweep goes; `first` is said once it is sure to go."""

    def __init__(self, note: Callable[[str], None], total: int, first: str) -> None:
        super().__init__(note, total)
        self._first = first

    def ready(self) -> None:
        self.say(self._first)

    def begin(self, task: Task, node: str, progress: Progress) -> None:
        self.show(f"{task.benchmark} {task.setting} #{task.repetition + 1}", progress)

    def end(self, task: Task, row: Repetition, progress: Progress) -> None:
        self.ended(row_words(task, row), progress)
