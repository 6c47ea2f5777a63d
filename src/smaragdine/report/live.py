"""`--live`: shows power per device, the machine's joules so far and their expected total on the last line.

How much of that is the program's is known only at its end.

The program's output scrolls above: the line lies outside of the scrolling region, and each update is one
write that puts the cursor back where the program left it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from smaragdine.accounting.summary import epoch_bounds
from smaragdine.recording.format import SPOOL_FOLDER
from smaragdine.recording.marks import parse_lines
from smaragdine.report.terminal import console
from smaragdine.sweep.sweep import Progress
from smaragdine.units import joules, seconds, watts

Feed = Callable[[Path, list[Any], dict[str, Any]], None]


@dataclass
class RunProgress:
    """What is known so far; one per run. Energies in J, over devices that add up."""

    t_ns: list[int] = field(default_factory=list)
    total_j: list[float] = field(default_factory=list)
    power_w: dict[str, float] = field(default_factory=dict)
    energy_j: dict[str, float] = field(default_factory=dict)
    estimated: bool = False
    _last: dict[str, tuple[int, float]] = field(default_factory=dict)
    _offsets: dict[str, int] = field(default_factory=dict)
    _marks: list[dict[str, Any]] = field(default_factory=list)

    def take(self, channels: list[dict[str, Any]], values: dict[str, list[float]]) -> None:
        """Takes one second's readings from the recorder's feed."""
        if not self.t_ns and values:
            self.t_ns.append(int(min(v[3] for v in values.values())))
            self.total_j.append(0.0)
        power_now: dict[str, float] = {}
        for number, (t_ns, newest, mean, first_ns, first) in values.items():
            channel = channels[int(number)]
            device = channel["device"]
            if channel["scope"] != "device":
                continue
            self.estimated |= channel["provenance"] == "estimated"
            last = self._last.get(number, (int(first_ns), first))
            self._last[number] = (int(t_ns), newest)
            if channel["quantity"] == "power":
                # Samples show what is drawn now; if a counter says what was used, believe it.
                power_now[device] = mean
                if not self._has_counter(channels, device):
                    self._add(device, mean * (t_ns - last[0]) * 1e-9)
            elif t_ns > last[0]:
                used_j = newest - last[1]
                used_j += channel["wraps_at"] or 0.0 if used_j < 0 else 0.0
                self._add(device, used_j)
                if not self._has_samples(channels, device):
                    drawn_w = used_j / ((t_ns - last[0]) * 1e-9)
                    power_now[device] = power_now.get(device, 0.0) + drawn_w
        self.power_w.update(power_now)
        if values:
            self.t_ns.append(int(max(v[0] for v in values.values())))
            self.total_j.append(sum(self.energy_j.values()))

    def _has_counter(self, channels: list[dict[str, Any]], device: str) -> bool:
        return any(c["device"] == device and c["quantity"] == "energy" for c in channels)

    def _has_samples(self, channels: list[dict[str, Any]], device: str) -> bool:
        return any(c["device"] == device and c["quantity"] == "power" for c in channels)

    def _add(self, device: str, used_j: float) -> None:
        self.energy_j[device] = self.energy_j.get(device, 0.0) + max(0.0, used_j)

    def read_marks(self, spool: Path) -> None:
        """Reads epoch marks that are new since last time."""
        for path in spool.glob("marks-*.jsonl"):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                file.seek(self._offsets.get(path.name, 0))
                whole, _, _ = file.read().rpartition(b"\n")
                self._offsets[path.name] = self._offsets.get(path.name, 0) + len(whole) + bool(whole)
                wanted = ("train_begin", "epoch_begin", "epoch_end")
                self._marks += [mark for mark in parse_lines(whole.splitlines()) if mark["name"] in wanted]

    def expected_j(self) -> tuple[float, float] | None:
        """The whole run's energy and its standard deviation; from the second epoch on, if their number is
        known."""
        marks = sorted(self._marks, key=lambda mark: mark["t_ns"])
        # A second fit() has its own plan.
        begun = [i for i, mark in enumerate(marks) if mark["name"] == "train_begin"]
        current = marks[begun[-1] :] if begun else marks
        planned = next((mark["total"] for mark in current if mark["total"]), None)
        epochs = epoch_bounds(current)
        if planned is None or len(epochs) < 2 or len(self.t_ns) < 2:
            return None
        edges = np.interp([t for _, s, e in epochs for t in (s, e)], self.t_ns, self.total_j)
        each_j = edges[1::2] - edges[0::2]
        last_index = epochs[-1][0]
        # A resumed training may plan ten epochs in all and begin with the sixth.
        finished = last_index + 1 if last_index is not None else len(epochs)
        done, left = len(epochs), max(0, planned - finished)
        # Epochs to come scatter, and we know their mean only from those that are done.
        spread_j = statistics.stdev(each_j) * (left + left**2 / done) ** 0.5
        return float(edges[-1] + left * each_j.mean()), float(spread_j)

    def line(self) -> str:
        parts = [f"{device} {watts(power)}" for device, power in sorted(self.power_w.items())]
        text = f"⚡ {'  '.join(parts)}  machine so far {joules(sum(self.energy_j.values()))}"
        expected = self.expected_j()
        if expected is not None:
            text += f"  expected {joules(expected[0])} ± {joules(expected[1])}"
        return text + ("  (estimated)" if self.estimated else "")


class LastLine:
    """Keeps the terminal's last line out of the scrolling region."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rows = 0

    def show(self, text: str) -> None:
        try:
            columns, rows = os.get_terminal_size(self._fd)
        except OSError:
            return
        if rows < 2 or columns < 2:
            return  # no room, or the terminal does not know its size
        reserve = "" if rows == self._rows else self._reserve(rows)
        self._write(f"{reserve}\x1b7\x1b[{rows};1H\x1b[2K{text[: columns - 1]}\x1b8")

    def _reserve(self, rows: int) -> str:
        first = not self._rows
        self._rows = rows
        # A line feed first: if the cursor is on the last line, what stands there scrolls up and stays.
        begin, end = ("\n", "\x1b[1A") if first else ("", "")
        return f"{begin}\x1b7\x1b[1;{rows - 1}r\x1b8{end}"

    def release(self) -> None:
        if self._rows:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, text.encode())


@contextlib.contextmanager
def live_line() -> Iterator[Feed]:
    if sys.stderr is None or not sys.stderr.isatty():
        if sys.stderr is not None:
            print("smaragdine: --live needs a terminal; recording without it", file=sys.stderr)
        yield lambda *_: None
        return
    last_line = LastLine(sys.stderr.fileno())
    progress = RunProgress()

    def on_feed(folder: Path, channels: list[Any], values: dict[str, Any]) -> None:
        progress.take(channels, values)
        progress.read_marks(folder / SPOOL_FOLDER)
        last_line.show(progress.line())

    try:
        yield on_feed
    finally:
        last_line.release()


# The progress of many runs on stderr: a bar on a terminal, lines elsewhere.


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
