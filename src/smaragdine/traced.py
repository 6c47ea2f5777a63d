"""This process, recorded and traced from now on: what the one-liners of all frameworks are made of."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from smaragdine.api import hook_module, record_asked

if TYPE_CHECKING:
    from smaragdine.accounting.footprint import Footprint
    from smaragdine.recording.reader import Recording

_QUIET_S = 1.0  # who asks for a trace here wants it here: slices begin this soon where no steps are announced


class Trace:
    """A recording of this process with a few of its steps traced, until `stop`, the end of a `with` block or
    of the process. `budget` is the part of the time that tracing may cost: 0.01.

    Inside `smaragdine run`, which records and traces already, it only announces the model's calls.
    """

    def __init__(
        self,
        model: Any = None,
        folder: str | os.PathLike[str] | None = None,
        *,
        steps: int = 10,
        skip: int = 10,
        budget: float | None = None,
        verbose: bool = True,
    ) -> None:
        _check(steps, skip, budget)
        self.folder: Path | None = None  # of the recording
        self.remarks: tuple[str, ...] = ()  # what is to be said about the trace
        self._verbose = verbose
        self._pid = os.getpid()
        self._open: contextlib.ExitStack | None = None
        if os.environ.get("SMARAGDINE_SPOOL"):
            self._open = _announced(model)
            return
        hook_module("windows").asked = True
        with contextlib.ExitStack() as opening:
            self.folder = opening.enter_context(record_asked(_asked(steps, skip, budget), folder))
            opening.callback(hook_module("trace").end)
            settings = hook_module("windows").Settings(
                str(self.folder / "traces"), steps, skip, budget, quiet_s=_QUIET_S
            )
            hook_module("trace").begin(settings)
            opening.enter_context(_announced(model))
            self._open = opening.pop_all()
        atexit.register(self._at_exit)

    def stop(self) -> None:
        """End the recording; a second call does nothing."""
        self._stop(None)

    def _at_exit(self) -> None:
        self._stop(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))

    def _stop(self, error: BaseException | None) -> None:
        opened, self._open = self._open, None
        # A forked child has the object, but the recording is its parent's.
        if opened is None or os.getpid() != self._pid:
            return
        if self.folder is None:
            opened.close()
            return
        atexit.unregister(self._at_exit)
        opened.__exit__(None if error is None else type(error), error, None)
        self.remarks = tuple(_events(self.folder))
        if self._verbose and sys.stderr is not None:
            lines = [f"trace: {remark}" for remark in self.remarks] + [f"recording: {self.folder}"]
            if any(self.folder.glob("events*.arrows")):
                lines.append(f"operations: smaragdine report {self.folder}")
            with contextlib.suppress(OSError, ValueError):  # a stream that was closed
                print(*lines, sep="\n", file=sys.stderr)

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
        self._stop(error)


def _announced(model: Any) -> contextlib.ExitStack:
    """A model's calls are steps until it is closed: without an optimizer nobody else tells where one ends."""
    opened = contextlib.ExitStack()
    if hasattr(model, "register_forward_hook") and hook_module("windows").wanted():
        opened.callback(hook_module("forward").announce(model))
    return opened


def _check(steps: int, skip: int, budget: float | None) -> None:
    from smaragdine.errors import UserError

    for name, value in (("steps", steps), ("skip", skip)):
        if value < 0:
            raise UserError(f"{name}={value} is not a number of steps")
    if budget is not None and not 0 < budget <= 1:
        raise UserError(f"budget={budget} is not a part of the time", remedy="1 % is 0.01")


def _asked(steps: int, skip: int, budget: float | None) -> dict[str, Any]:
    from smaragdine.recording.asked import TraceAsked, asked

    return asked("trace", TraceAsked(True, steps, skip, budget, _QUIET_S))


def _events(folder: Path) -> list[str]:
    """What was traced becomes events of the recording; what is to be said about them. Whatever fails here,
    the program goes on."""
    try:
        from smaragdine.recording.reader import open_recording
        from smaragdine.tracing.assemble.absence import hook_errors, why_nothing
        from smaragdine.tracing.assemble.recording import assemble

        said = assemble(folder)
        recording = open_recording(folder)
        why = None if said else why_nothing(recording)
        return [*hook_errors(recording), *said, *([why] if why else [])]
    except Exception as error:
        return [f"the trace cannot be used: {error}"]
