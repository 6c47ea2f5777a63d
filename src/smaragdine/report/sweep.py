"""A sweep on the terminal: its plan, and how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from smaragdine.report.terminal import console
from smaragdine.sweep import progress as sweeps
from smaragdine.sweep.plan import Plan, Task, command_words
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
    energy = joules(energy_j) if energy_j is not None else "no energy"
    return f"{what}: {seconds(row.time_s)}, {energy}"


def left_words(found: sweeps.Progress) -> str:
    return "" if not found.left_s else f"{seconds(found.left_s)} left"


class SweepDisplay:
    """Tells how a sweep goes, on stderr: a bar on a terminal, lines elsewhere."""

    def __init__(self, note: Callable[[str], None], total: int) -> None:
        self._note = note
        self._total = total
        self._out = console(sys.stderr)
        self._bar: Progress | None = None

    def __enter__(self) -> SweepDisplay:
        if self._out.is_terminal:
            columns = (
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self._out, transient=True)
            self._bar.start()
            self._number = self._bar.add_task("", total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        self._note(line)
        self._out.print(line, markup=False, soft_wrap=True)

    def begin(self, task: Task, node: str, progress: sweeps.Progress) -> None:
        self._show(f"{task.benchmark} {task.setting} #{task.repetition + 1}", progress)

    def end(self, task: Task, row: Repetition, progress: sweeps.Progress) -> None:
        line = f"[{progress.done}/{progress.total}] {row_words(task, row)}"
        left = left_words(progress)
        self.say(f"{line}; {left}" if left else line)
        self._show("", progress)

    def _show(self, what: str, found: sweeps.Progress) -> None:
        if self._bar is not None:
            words = ", ".join(part for part in (what, left_words(found)) if part)
            self._bar.update(self._number, completed=found.done, total=found.total, description=words)
