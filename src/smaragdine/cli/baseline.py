"""`smaragdine baseline`: what the machine draws doing nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from smaragdine.cli.parsing import Parser, positive_seconds
from smaragdine.errors import UserError
from smaragdine.recording.asked import BASELINE, asked
from smaragdine.recording.session import RecordOptions, record_here
from smaragdine.sensors.nvml.cuda_context import attached_context


def main(words: list[str]) -> int:
    parser = Parser(
        "baseline",
        "Record idle power per device; `smaragdine show RUN --subtract BASELINE` shows energy above it.\n"
        "Keep the machine otherwise idle meanwhile.",
        "  smaragdine baseline --seconds 30 -o runs/idle\n  smaragdine show runs/first --subtract runs/idle",
    )
    parser.add_argument("--seconds", type=positive_seconds, default=30.0, help="how long (default 30)")
    parser.add_argument(
        "--with-context",
        action="store_true",
        help="with a process attached to every visible GPU: a V100 idles at 40–50 W, attached at 50–60 W",
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="the recording's folder (default runs/<date>-baseline)"
    )
    options = parser.parse_args(words)
    from smaragdine.accounting.run import Run
    from smaragdine.report.terminal import console, run_tables, shortest_path

    output = Path(options.output) if options.output else None
    wanted = RecordOptions(asked=asked(BASELINE, seconds=options.seconds, with_context=options.with_context))
    out = console(sys.stderr)
    folder: Path | None = None
    try:
        with _context(options.with_context), record_here(output, wanted, label="baseline") as folder:
            _wait(options.seconds)
    except KeyboardInterrupt:
        if folder is not None:
            out.print("\ninterrupted: the recording holds what was measured until then")
            out.print(f"recording: {shortest_path(folder)}", markup=False, soft_wrap=True)
        raise
    run = Run.open(folder)
    out.print(run_tables(run.summary, idle=True))
    for line in run.not_idle:
        out.print(f"! {line}", markup=False, soft_wrap=True)
    out.print(f"recording: {shortest_path(folder)}", markup=False, soft_wrap=True)
    return 0


@contextlib.contextmanager
def _context(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    try:
        with attached_context(os.environ):
            yield
    except OSError as error:
        raise UserError(
            "no GPU context could be made",
            str(error),
            "Check that nvidia-smi works, or leave --with-context out",
        ) from None


def _wait(duration_s: float) -> None:
    end_s = time.monotonic() + duration_s
    show = sys.stderr.isatty()
    while (left_s := end_s - time.monotonic()) > 0:
        if show:
            print(f"\rmeasuring idle power: {left_s:.0f} s left ", end="", file=sys.stderr, flush=True)
        time.sleep(min(1.0, left_s))
    if show:
        print("\r\x1b[2K", end="", file=sys.stderr)
