"""What the callbacks of all frameworks share: something that lasts from the beginning of a training to its
end."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from smaragdine.api import Trace, hook_module, record
from smaragdine.errors import UserError

if TYPE_CHECKING:
    from smaragdine.tuning.process import TuneOptions, TuneOutcome


class _Stopped(Protocol):
    def stop(self) -> Any: ...


_T = TypeVar("_T", bound=_Stopped)


class PerTraining(Generic[_T]):
    """One of it for each training, with a folder of its own."""

    def __init__(self, folder: str | None, make: Callable[[str | None], _T]) -> None:
        self.last: _T | None = None
        self._folder = folder
        self._make = make
        self._count = 0
        # Before the framework's own trainer is called, which would not see it any more.
        hook_module("install").install_all()

    def begin(self) -> None:
        self.end()  # of a training that failed, and so did not say that it ended
        self._count += 1
        folder = self._folder
        if folder is not None and self._count > 1:
            folder = f"{folder}-{self._count}"
        self.last = self._make(folder)

    def end(self) -> None:
        if self.last is not None:
            self.last.stop()


def traced_training(folder: str | None, options: Mapping[str, Any]) -> PerTraining[Trace]:
    hook_module("environment").ask_for_trace()
    return PerTraining(folder, lambda here: Trace(None, here, **options))


# One line for a loop: `with smaragdine.tune():` around it tries power limits and settles on the best.

# The number of a process among those of its machine: torchrun, Open MPI, Intel MPI and MPICH, and PMIx.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMIX_LOCAL_RANK")


class Tune:
    """Limits are tuned until `stop`, the end of a `with` block or of the process, and are then as before.

    Steps of PyTorch's optimizers and of trainers are seen by themselves; other loops call `step` after each.
    It is recorded, unless `smaragdine run` does so already. In `smaragdine tune`, and in all processes of a
    machine but the first of those that train together, it does nothing. Where limits may not be set, it says
    so and the training goes on. The arguments are those of `smaragdine tune`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        power_w: Sequence[float] = (),
        objective: Literal["energy", "edp", "cost"] = "energy",
        eta: float = 0.5,
        slowdown: float | None = None,
        devices: Sequence[str] = (),
        steps: int = 20,
        settle_s: float = 0.5,
        skip: int = 10,
        trying: float = 0.1,
        verbose: bool = True,
    ) -> None:
        from smaragdine.tuning.process import TuneOptions

        options = TuneOptions(
            tuple(power_w), objective, eta, slowdown, tuple(devices), steps, settle_s, skip, trying
        )
        _check(options)
        self.folder: Path | None = None  # of the recording
        self.outcome: TuneOutcome | None = None  # once stopped
        self.problem = ""  # why nothing is tuned
        self._verbose = verbose
        self._pid = os.getpid()
        self._steps = 0
        self._tuner: Any = None
        self._recording = contextlib.ExitStack()
        if _is_tuned(os.environ):
            return
        self._begin(folder, options)
        atexit.register(self.stop)

    def step(self) -> None:
        """A step has ended, in a loop no framework knows."""
        hook_module("marks").mark("step_end", self._steps, source="user")
        self._steps += 1

    def stop(self) -> None:
        """End it and bring limits back; a second call does nothing."""
        self._stop(None, None, None)

    def _begin(self, folder: str | os.PathLike[str] | None, options: TuneOptions) -> None:
        from smaragdine.recording.format import SPOOL_FOLDER
        from smaragdine.tuning.process import TunerClient

        try:
            self._tuner = TunerClient(options, os.environ)
        except UserError as error:
            self.problem = str(error)
            self._say(f"nothing is tuned: {error}")
        spool = os.environ.get("SMARAGDINE_SPOOL")
        if spool is None:
            try:
                self.folder = self._recording.enter_context(record(folder))
            except BaseException:
                if self._tuner is not None:
                    self._tuner.finish()
                raise
            spool = str(self.folder / SPOOL_FOLDER)
        if self._tuner is not None:
            self._tuner.follow(spool)

    def _stop(self, *failure: Any) -> None:
        # A forked child has the object, but the tuner is its parent's.
        if os.getpid() != self._pid:
            return
        atexit.unregister(self.stop)
        tuner, self._tuner = self._tuner, None
        recording, self._recording = self._recording, contextlib.ExitStack()
        try:
            if tuner is not None:
                self._finish(tuner)
        finally:
            recording.__exit__(*failure)

    def _finish(self, tuner: Any) -> None:
        from smaragdine.report.limits import tune_lines
        from smaragdine.tuning.process import save_outcome

        hook_module("marks").flush()
        self.outcome = tuner.finish()
        if self.outcome is None:
            self.problem = "the tuner died; what it had set was brought back then"
            self._say(self.problem)
            return
        if self.folder is not None:
            save_outcome(self.folder, self.outcome)
        for line in tune_lines(self.outcome):
            self._say(line)

    def _say(self, line: str) -> None:
        if self._verbose and sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # a stream that was closed
                print(f"limits: {line}", file=sys.stderr)

    def __enter__(self) -> Tune:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop(kind, error, where)


def tuned_training(folder: str | None, options: Mapping[str, Any]) -> PerTraining[Tune]:
    return PerTraining(folder, lambda here: Tune(here, **options))


def _is_tuned(environment: Mapping[str, str]) -> bool:
    """By somebody else: the command, or the first process of this machine's."""
    from smaragdine.tuning.process import TUNED_VARIABLE

    names = _LOCAL_RANKS
    # Without srun a batch script has a SLURM_LOCALID too, which says nothing about the program.
    tasks = environment.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) > 1:
        names = (*names, "SLURM_LOCALID")
    others = (environment.get(name, "0") for name in names)
    return TUNED_VARIABLE in environment or any(rank.isdigit() and int(rank) for rank in others)


def _check(options: TuneOptions) -> None:
    if options.objective not in ("energy", "edp", "cost"):
        raise UserError(f"objective={options.objective!r}", remedy="There are: energy, edp, cost")
    if not 0 <= options.eta <= 1:
        raise UserError(f"eta={options.eta} is not a number from 0 to 1")
    if options.slowdown is not None and (options.slowdown <= 0 or options.objective != "energy"):
        raise UserError(
            f"slowdown={options.slowdown}", "it is a part above 0, and goes with energy", "5 % is 0.05"
        )
    if options.steps < 1 or options.skip < 0 or options.settle_s < 0 or options.trying <= 0:
        raise UserError("steps, skip, settle_s and trying are numbers above 0")
