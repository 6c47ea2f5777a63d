"""This process, recorded and traced from now on: what the one-liners of all frameworks are made of."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from smaragdine.api import hook_module, record

if TYPE_CHECKING:
    from smaragdine.accounting.footprint import Footprint
    from smaragdine.recording.reader import Recording

_QUIET_S = 1.0  # who asks for a trace here wants it here: slices begin this soon where no steps are announced


class Trace:
    """A recording of this process with a few of its steps traced, until `stop`, the end of a `with` block or
    of the process.

    Inside `smaragdine run`, which records and traces already, it does nothing.
    """

    def __init__(
        self,
        model: Any = None,
        folder: str | os.PathLike[str] | None = None,
        *,
        steps: int = 20,
        skip: int = 10,
        budget: float | None = None,
        verbose: bool = True,
    ) -> None:
        self.folder: Path | None = None  # of the recording
        self.remarks: tuple[str, ...] = ()  # what is to be said about the trace
        self._verbose = verbose
        self._open: contextlib.ExitStack | None = None
        if os.environ.get("SMARAGDINE_SPOOL"):
            return
        self._open = contextlib.ExitStack()
        self.folder = self._open.enter_context(record(folder))
        self._open.callback(hook_module("trace").end)
        settings = hook_module("windows").Settings(
            str(self.folder / "traces"), steps, skip, budget, quiet_s=_QUIET_S
        )
        hook_module("trace").begin(settings)
        if hasattr(model, "register_forward_hook"):
            # Without an optimizer nobody else says where a step ends.
            self._open.callback(hook_module("forward").announce(model))
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the recording; a second call does nothing."""
        opened, self._open = self._open, None
        if opened is None or self.folder is None:
            return
        atexit.unregister(self.stop)
        opened.close()
        from smaragdine.tracing.assemble.recording import assemble

        self.remarks = tuple(assemble(self.folder))
        if self._verbose:
            for remark in self.remarks:
                print(f"trace: {remark}", file=sys.stderr)
            print(f"recording: {self.folder}\noperations: smaragdine report {self.folder}", file=sys.stderr)

    @property
    def recording(self) -> Recording:
        from smaragdine.errors import UserError
        from smaragdine.recording.reader import open_recording

        if self.folder is None:
            raise UserError("there is no recording of its own", "smaragdine run records the whole program")
        return open_recording(self.folder)

    @property
    def footprint(self) -> Footprint:
        """Of the traced steps, once stopped."""
        from smaragdine.accounting.account import account_recording

        return account_recording(self.recording)

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()
