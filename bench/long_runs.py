"""Measures what it takes to read a training of an hour, a day and a week: time, memory and room on disk.

    python bench/long_runs.py [--hours 1,24,168] [--folder DIR]

The trainings have two sockets with memory every 4 ms, a GPU and ten steps a second, on a simulated clock
(bench/long_run.py). A week takes half an hour to make. Trainings that are in the folder already are not
made again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from long_run import finish_run, make_run

_FINISH = "--finish"


def measured(words: Sequence[str]) -> tuple[float, float, float]:
    """Seconds, seconds of CPU time, and the most memory in MB."""
    begin_s = time.monotonic()
    pid = os.posix_spawn(
        words[0], list(words), os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    )
    _, status, used = os.wait4(pid, 0)
    if status:
        sys.exit(f"{' '.join(words)}: exit code {os.waitstatus_to_exitcode(status)}")
    return time.monotonic() - begin_s, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6


def finish(folder: Path) -> None:
    """The end of `run`: marks, run.json and the table."""
    from smaragdine.accounting.run import Run
    from smaragdine.report.terminal import console, run_tables

    finish_run(folder)
    console().print(run_tables(Run.open(folder).summary))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", default="1,24,168")
    parser.add_argument("--folder", type=Path)
    parser.add_argument(_FINISH, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.finish is not None:
        finish(options.finish)
        return
    where = options.folder or Path(tempfile.mkdtemp())
    print("hours   MB on disk  MB a day  command              s   CPU s    MB")
    for hours in options.hours.split(","):
        made = where / f"h{hours}"
        if not made.exists():
            make_run(made, float(hours))
        run, out = where / "run", where / "out"
        for folder in (run, out):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, run)
        out.mkdir()
        smaragdine = [sys.executable, "-m", "smaragdine"]
        rows = [("end of run", measured([sys.executable, __file__, _FINISH, str(run)]))]
        for name, words in (
            ("show", ["show", str(run)]),
            ("report", ["report", str(run)]),
            ("report --html", ["report", str(run), "--html", str(out / "page.html")]),
            ("export --to csv", ["export", str(run), "--to", "csv", "-o", str(out / "csv")]),
            ("export --to perfetto", ["export", str(run), "--to", "perfetto", "-o", str(out / "trace")]),
        ):
            rows.append((name, measured([*smaragdine, *words])))
        disk_mb = sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) / 1e6
        for i, (name, (wall_s, cpu_s, memory_mb)) in enumerate(rows):
            head = f"{hours:>5}{disk_mb:13.1f}{disk_mb / float(hours) * 24:10.1f}" if not i else " " * 28
            print(f"{head}  {name:20}{wall_s:5.1f}{cpu_s:8.1f}{memory_mb:6.0f}", flush=True)


if __name__ == "__main__":
    main()
