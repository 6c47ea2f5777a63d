"""The Python API: `smaragdine.mark`, `smaragdine.record`, `smaragdine.open`."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _hook(module: str) -> Any:
    """A module of this process's hook: the one `smaragdine run` loaded, else our own copy of it."""
    package = "_smaragdine_hook" if "_smaragdine_hook" in sys.modules else "smaragdine.tracing.hook"
    return importlib.import_module(f"{package}.{module}")


def mark(name: str, index: int | None = None) -> None:
    """Put a named instant into the recording; does nothing where nobody records.

    Epochs of a loop no framework knows: `mark("epoch_begin", 3)` … `mark("epoch_end", 3)`.
    """
    _hook("marks").mark(name, index, source="user")


@contextlib.contextmanager
def record(folder: str | os.PathLike[str], *, period_ms: float = 4.0) -> Iterator[Path]:
    """Record this process and its children while the block runs, into a new folder.

    with smaragdine.record("runs/first"):
        train()
    """
    from smaragdine.errors import UserError
    from smaragdine.recording.format import SPOOL_FOLDER
    from smaragdine.recording.session import RecordOptions, record_here

    if not 1 <= period_ms <= 1000:
        raise UserError(f"period_ms={period_ms} is not between 1 and 1000")
    marks = _hook("marks")
    with record_here(Path(folder), RecordOptions(int(period_ms * 1e6)), label="block") as path:
        marks.set_spool(str(path / SPOOL_FOLDER))
        marks.install_all()
        try:
            yield path
        finally:
            _hook("versions").mark_libraries()
            # Back to the surrounding `smaragdine run`, if there is one.
            marks.set_spool(os.environ.get("SMARAGDINE_SPOOL"))
