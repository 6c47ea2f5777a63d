"""How far many runs are, on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from smaragdine.report.terminal import console
from smaragdine.sweep.progress import Progress
from smaragdine.units import seconds


def left_words(found: Progress) -> str:
    return "" if not found.left_s else f"{seconds(found.left_s)} left"


class RunsDisplay:
    def __init__(self, note: Callable[[str], None], total: int) -> None:
        self._note = note
        self._total = total
        self._out = console(sys.stderr)
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        if self._out.is_terminal:
            columns = (
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Bar(*columns, console=self._out, transient=True)
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

    def show(self, what: str, found: Progress) -> None:
        if self._bar is not None:
            words = ", ".join(part for part in (what, left_words(found)) if part)
            self._bar.update(self._number, completed=found.done, total=found.total, description=words)

    def ended(self, what: str, progress: Progress) -> None:
        line = f"[{progress.done}/{progress.total}] {what}"
        left = left_words(progress)
        self.say(f"{line}; {left}" if left else line)
        self.show("", progress)
