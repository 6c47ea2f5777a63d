"""`%load_ext smaragdine`: the cell magic `%%energy`.

    %%energy
    model.fit(x, y)

It records the cell, traces a few of its steps if a framework announces them, shows where the joules went, and
leaves everything in `_energy`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shlex
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from smaragdine.accounting.footprint import Footprint
    from smaragdine.accounting.run import Run
    from smaragdine.recording.reader import Recording


@dataclass(frozen=True)
class CellEnergy:
    """What `%%energy` leaves behind."""

    recording: Recording
    remarks: tuple[str, ...] = ()

    @cached_property
    def run(self) -> Run:
        from smaragdine.accounting.run import Run

        return Run(self.recording)

    @property
    def footprint(self) -> Footprint | None:
        """One step if steps were traced, else all that was traced."""
        return self.run.shown

    def _repr_html_(self) -> str:
        from smaragdine.report.notebook import cell_html

        return cell_html(self.run)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For a terminal."""
        from smaragdine.report.notebook import text

        printer.text(text(self.run))


def load_ipython_extension(shell: Any) -> None:
    shell.register_magic_function(_energy, magic_kind="cell", magic_name="energy")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from IPython.core.error import UsageError

        raise UsageError(f"{message}; %%energy [-o FOLDER] [--steps N] [--skip N] [--no-trace]")


def _options(line: str) -> argparse.Namespace:
    parser = _Parser("%%energy", add_help=False, allow_abbrev=False)
    parser.add_argument("-o", dest="folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=3)  # a cell has fewer steps than a script: skip less
    parser.add_argument("--no-trace", action="store_true")
    return parser.parse_args(shlex.split(line))


def _energy(line: str, cell: str) -> None:
    """Records the cell, traces a few of its steps, and shows where the joules went."""
    from IPython.core.error import UsageError
    from IPython.core.getipython import get_ipython

    from smaragdine.errors import UserError

    options = _options(line)
    shell: Any = get_ipython()
    try:
        measured = _record(shell, cell, options)
    except UserError as error:
        raise UsageError(str(error)) from None
    shell.user_ns["_energy"] = measured
    _show(measured)
    if measured.recording.status != "complete":
        # The traceback is there already; this marks the cell as failed for whoever runs the notebook.
        raise UsageError("the cell failed; _energy has what it used until then")


class _CellFailed(Exception):
    """Tells the recording what IPython told the user."""


def _record(shell: Any, cell: str, options: argparse.Namespace) -> CellEnergy:
    """Records the cell; the recording itself says whether it ended well."""
    from smaragdine.recording.reader import open_recording

    where = options.folder or _free_folder()
    if options.no_trace:
        from smaragdine.api import record

        with contextlib.suppress(_CellFailed), record(where) as folder:
            _run(shell, cell)
        return CellEnergy(open_recording(folder))
    from smaragdine.api import Trace

    trace = Trace(None, where, steps=options.steps, skip=options.skip, verbose=False)
    with contextlib.suppress(_CellFailed), trace:
        _run(shell, cell)
    return CellEnergy(trace.recording, trace.remarks)


def _run(shell: Any, cell: str) -> None:
    if not shell.run_cell(cell).success:
        raise _CellFailed


def _free_folder() -> Path:
    """A fresh folder. Others are named after the script, which here would be the notebook server's."""
    names = (Path("runs") / f"{time.strftime('%Y-%m-%d')}-cell-{number}" for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _show(measured: CellEnergy) -> None:
    from IPython.display import display

    from smaragdine.errors import UserError

    try:
        display(measured)
        for remark in measured.remarks:
            print(f"trace: {remark}")
    except UserError as error:
        print(f"smaragdine: {error}")
    print(f"recording: {measured.recording.path}")
