"""The Python API: `mark`, `region`, `trace`, `record`, `summarise`, `account`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import inspect
import itertools
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

if TYPE_CHECKING:
    import pyarrow as pa

    from smaragdine.accounting.device_power import DevicePowers, SensorFacts
    from smaragdine.accounting.footprint import Footprint
    from smaragdine.accounting.run import Run
    from smaragdine.accounting.summary import RunSummary
    from smaragdine.recording.reader import Recording


def hook_module(module: str) -> Any:
    """A module of this process's hook: the one that `smaragdine run` loaded, else our own copy."""
    package = "_smaragdine_hook" if "_smaragdine_hook" in sys.modules else "smaragdine.tracing.hook"
    return importlib.import_module(f"{package}.{module}")


def mark(name: str, index: int | None = None) -> None:
    """Puts a named instant into the recording. Does nothing if nobody records.

    Marks epochs in a loop that no framework knows: `mark("epoch_begin", 3)` … `mark("epoch_end", 3)`. A name
    or index that a mark cannot hold never fails: the recording says what became of it.
    """
    marks = hook_module("marks")
    if not marks.wanted():
        return
    text, odd = _as_name(name, "mark")
    if odd:
        marks.odd("name of a mark", odd)
    whole = _as_index(index)
    if whole is None and index is not None:
        why = f"mark({text!r}): an index is a whole number of 64 bits, and this one is none; it was left out"
        marks.odd("index of a mark", why)
    marks.mark(text, whole, source="user")


_LONGEST_NAME = 200  # characters


def _as_name(name: Any, call: str) -> tuple[str, str]:
    """A name as text that is not too long, and what is odd about it; empty if nothing is."""
    if isinstance(name, str):
        if len(name) <= _LONGEST_NAME:
            return name, ""
        said = f"{call}: a name of {len(name):,} characters was cut to {_LONGEST_NAME}"
        return f"{name[: _LONGEST_NAME - 1]}…", said
    text = f"<{type(name).__name__}>"
    with contextlib.suppress(Exception):
        if callable(name):
            text = str(getattr(name, "__qualname__", text))
        elif name is None or isinstance(name, int | float):  # the text of others may take long to make
            text = str(name)
    said = f"{call}: a name is text, not {type(name).__name__}: it is called {text[:_LONGEST_NAME]}"
    return text[:_LONGEST_NAME], "" if call == "region" and callable(name) else said


def _as_index(index: Any) -> int | None:
    try:
        if isinstance(index, float):
            return _as_index(int(index)) if index.is_integer() else None
        whole = operator.index(index)
    except Exception:  # whatever the program's object raises
        return None
    return whole if abs(whole) < 1 << 63 else None


@contextlib.contextmanager
def record(
    folder: str | os.PathLike[str] | None = None, *, period_ms: float = 4.0, gpus: Sequence[str] = ()
) -> Iterator[Path]:
    """Records this process and its children while the block runs, into a new folder (runs/<date>-<script>).
    `gpus` are UUIDs, to record other GPUs than this process sees.

        with smaragdine.record("runs/first"):
            train()
    """
    from smaragdine.recording.asked import asked

    with record_asked(asked("record"), folder, period_ms, gpus) as path:
        yield path


@contextlib.contextmanager
def record_asked(
    wanted: Mapping[str, Any],
    folder: str | os.PathLike[str] | None = None,
    period_ms: float = 4.0,
    gpus: Sequence[str] = (),
) -> Iterator[Path]:
    """Like `record`; `wanted` goes into run.json as what was asked for."""
    from smaragdine.errors import UserError
    from smaragdine.recording.format import SPOOL_FOLDER
    from smaragdine.recording.session import RecordOptions, record_here

    if not 1 <= period_ms <= 1000:
        raise UserError(f"period_ms={period_ms} is not between 1 and 1000")
    marks = hook_module("marks")
    where = None if folder is None else Path(folder)
    label = "block" if where is not None else Path(sys.argv[0]).stem or "block"
    options = RecordOptions(int(period_ms * 1e6), gpus=tuple(gpus), asked=wanted)
    with record_here(where, options, label) as path:
        marks.set_spool(str(path / SPOOL_FOLDER))
        hook_module("install").install_all()
        try:
            yield path
        finally:
            hook_module("install").mark_libraries()
            # Back to the surrounding `smaragdine run`, if there is one.
            marks.set_spool(os.environ.get("SMARAGDINE_SPOOL"))


def summarise(recording: Run | Recording | str | os.PathLike[str]) -> RunSummary:
    """What the program used, and energy, power and time per device, as in `smaragdine show`.

    smaragdine.summarise("runs/first").program_j        # .total_j: the machine's; .devices, .epochs, .regions
    """
    from smaragdine.accounting.run import Run

    if isinstance(recording, str | os.PathLike):
        return Run.open(recording).summary
    return (recording if isinstance(recording, Run) else Run(recording)).summary


def account(
    events: Any,
    power: Any,
    *,
    hold_s: float | None = None,
    tz: str | None = None,
    facts: SensorFacts | None = None,
) -> Footprint:
    """Tells which operation used how much energy.

    `events` has columns name, device, start_ns, duration_ns, and optionally phase, lane and step; `power` has
    device, t_ns and power_w. Each is a dict of arrays, an Arrow table, a data frame, or the path of a file.

        footprint = smaragdine.account(events, power)
        footprint.rows.to_pandas()
    """
    from smaragdine.accounting.account import account_meters

    return account_meters(*account_inputs(events, power, hold_s, tz, facts))


def account_inputs(
    events: Any, power: Any, hold_s: float | None, tz: str | None, facts: SensorFacts | None
) -> tuple[pa.Table, DevicePowers]:
    """Events and power of `account`, ready for accounting."""
    from smaragdine.accounting.device_power import NOTHING_KNOWN, from_power_table
    from smaragdine.recording.power_logs import power_table, read_power
    from smaragdine.tracing.files import read_events
    from smaragdine.tracing.table import events_table

    event_rows = read_events(events) if isinstance(events, str | os.PathLike) else events_table(events)
    power_rows = read_power(power, tz) if isinstance(power, str | os.PathLike) else power_table(power)
    return event_rows, from_power_table(power_rows, facts or NOTHING_KNOWN, hold_s)


# `region`: a named stretch of the program, measured every time it runs.


def _compiling() -> bool:
    """A constant under torch.compile, which then sees an empty function."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and compiler.is_compiling()


_Function = TypeVar("_Function", bound=Callable[..., Any])
_numbers = itertools.count()  # tell one time from another, also in threads


class Region:
    """Names and measures a block or a function. Does nothing if nobody records.

        with smaragdine.region("load"):          @smaragdine.region("forward", sync=True)
            batch = next(batches)                def forward(batch): …

    A GPU works behind the program, so what a block has started may run after it. `sync` waits for PyTorch's
    work at both ends, which takes time. Inside of what torch.compile compiles there is no region: its kernels
    have no begin and end that Python could see. `@smaragdine.region` alone takes the function's name.
    """

    def __init__(self, name: str | Callable[..., Any], *, sync: bool = False) -> None:
        self.name, self._odd = _as_name(name, "region")
        self._sync = sync
        self._begun: list[int] = []
        self._measured = self._around(name) if callable(name) else None

    def __enter__(self) -> Region:
        if _compiling():
            return self
        self._begun.append(next(_numbers))
        self._mark("region_begin", self._begun[-1])
        return self

    def __exit__(self, *_: object) -> None:
        if _compiling():
            return
        if self._begun:
            self._mark("region_end", self._begun.pop())
        elif (marks := hook_module("marks")).wanted():
            marks.odd("end of a region", f"region {self.name!r} ended more often than it began")

    @overload
    def __call__(self, function: _Function, /) -> _Function: ...

    @overload
    def __call__(self, *words: Any, **named: Any) -> Any: ...

    def __call__(self, *words: Any, **named: Any) -> Any:
        return self._around(*words, **named) if self._measured is None else self._measured(*words, **named)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method, without a name of its own."""
        if self._measured is None or instance is None:
            return self
        return functools.partial(self._measured, instance)

    def _around(self, function: _Function) -> _Function:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__name__} runs in pieces: put `with smaragdine.region(…):` around one, inside it"
            )

        def again() -> Region:
            return Region(self.name, sync=self._sync)

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with again():
                return function(*args, **kwargs)

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with again():
                return await function(*args, **kwargs)

        return cast(_Function, awaited if inspect.iscoroutinefunction(function) else measured)

    def _mark(self, name: str, number: int) -> None:
        marks = hook_module("marks")
        if self._odd and marks.wanted():
            marks.odd("name of a region", self._odd)
        if self._sync and "torch" in sys.modules and marks.wanted():
            # If something is wrong with the GPU, the program's own next call will say so.
            with contextlib.suppress(Exception):
                hook_module("torch.conflicts").wait_for_gpu()
        marks.mark(name, number, source="region", detail=self.name)


# This process, recorded and traced from now on: the one-liners of all frameworks use it.

_QUIET_S = 1.0  # without announced steps, slices begin this soon: whoever asks for a trace wants one


class Trace:
    """Records this process and traces a few of its steps, until `stop`, the end of a `with` block or of the
    process. `budget` is the part of the time that tracing may cost: 0.01.

    Inside `smaragdine run`, which already records and traces, it only announces the model's calls.
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
        self.folder: Path | None = None  # the recording's folder
        self.remarks: tuple[str, ...] = ()  # remarks on the trace
        self._verbose = verbose
        self._pid = os.getpid()
        self._open: contextlib.ExitStack | None = None
        if os.environ.get("SMARAGDINE_SPOOL"):
            self._open = _announced(model)
            return
        hook_module("environment").ask_for_trace()
        with contextlib.ExitStack() as opening:
            self.folder = opening.enter_context(record_asked(_asked(steps, skip, budget), folder))
            opening.callback(hook_module("trace").end)
            settings = hook_module("environment").TraceSettings(
                str(self.folder / "traces"), steps, skip, budget, quiet_s=_QUIET_S
            )
            hook_module("trace").begin(settings)
            opening.enter_context(_announced(model))
            self._open = opening.pop_all()
        atexit.register(self._at_exit)

    def stop(self) -> None:
        """Ends the recording; a second call does nothing."""
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
            with contextlib.suppress(OSError, ValueError):  # a closed stream
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
        """The footprint of the traced steps, once stopped."""
        from smaragdine.accounting.run import Run

        return Run(self.recording).accounted

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop(error)


def _announced(model: Any) -> contextlib.ExitStack:
    """Makes a model's calls steps until closed: without an optimizer, nothing else tells steps apart."""
    opened = contextlib.ExitStack()
    if hasattr(model, "register_forward_hook") and hook_module("environment").trace_wanted():
        opened.callback(hook_module("torch.loop").announce(model))
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
    """Turns what was traced into events; returns remarks. Whatever fails here, the program goes on."""
    try:
        from smaragdine.recording.reader import open_recording
        from smaragdine.tracing.absence import hook_errors, why_nothing
        from smaragdine.tracing.assemble import assemble

        said = assemble(folder)
        recording = open_recording(folder)
        why = None if said else why_nothing(recording)
        return [*hook_errors(recording), *said, *([why] if why else [])]
    except Exception as error:
        return [f"the trace cannot be used: {error}"]
