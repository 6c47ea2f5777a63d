"""The Python API: `mark`, `record`, `summarise`, `account`. `trace` is in `traced`, callbacks in a folder."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from smaragdine.accounting.footprint import Footprint
    from smaragdine.accounting.meters import Meters, SensorFacts
    from smaragdine.accounting.summary import RunSummary
    from smaragdine.recording.reader import Recording


def hook_module(module: str) -> Any:
    """A module of this process's hook: the one `smaragdine run` loaded, else our own copy of it."""
    package = "_smaragdine_hook" if "_smaragdine_hook" in sys.modules else "smaragdine.tracing.hook"
    return importlib.import_module(f"{package}.{module}")


def mark(name: str, index: int | None = None) -> None:
    """Put a named instant into the recording; does nothing where nobody records.

    Epochs of a loop no framework knows: `mark("epoch_begin", 3)` … `mark("epoch_end", 3)`.
    """
    hook_module("marks").mark(name, index, source="user")


@contextlib.contextmanager
def record(
    folder: str | os.PathLike[str] | None = None, *, period_ms: float = 4.0, gpus: Sequence[str] = ()
) -> Iterator[Path]:
    """Record this process and its children while the block runs, into a new folder (runs/<date>-<script>).
    `gpus` are UUIDs, where others than this process sees are to be recorded.

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
    """`record`, with what its run.json says that it was asked for."""
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
        marks.install_all()
        try:
            yield path
        finally:
            hook_module("versions").mark_libraries()
            # Back to the surrounding `smaragdine run`, if there is one.
            marks.set_spool(os.environ.get("SMARAGDINE_SPOOL"))


def summarise(recording: Recording | str | os.PathLike[str]) -> RunSummary:
    """What the program used, and energy, power and time per device, as `smaragdine show` has them.

    smaragdine.summarise("runs/first").program_j        # .total_j: the machine's; .devices, .epochs, .regions
    """
    from smaragdine.accounting.summary import summarise as of
    from smaragdine.recording.reader import open_recording

    return of(open_recording(recording) if isinstance(recording, str | os.PathLike) else recording)


def account(
    events: Any,
    power: Any,
    *,
    hold_s: float | None = None,
    tz: str | None = None,
    facts: SensorFacts | None = None,
) -> Footprint:
    """Which operation used how much energy.

    `events` has columns name, device, start_ns, duration_ns and perhaps phase, lane, step; `power` has
    device, t_ns, power_w. Each is a dict of arrays, an Arrow table, a data frame, or the path of a file.

    footprint = smaragdine.account(events, power)
    footprint.rows.to_pandas()
    """
    from smaragdine.accounting.account import account_meters

    return account_meters(*account_inputs(events, power, hold_s, tz, facts))


def account_inputs(
    events: Any, power: Any, hold_s: float | None, tz: str | None, facts: SensorFacts | None
) -> tuple[pa.Table, Meters]:
    """Events and power of `account`, as the accounting takes them."""
    from smaragdine.accounting.meters import NOTHING_KNOWN, from_power_table
    from smaragdine.recording.power_log import power_table, read_power
    from smaragdine.tracing.files.events import read_events
    from smaragdine.tracing.files.table import events_table

    event_rows = read_events(events) if isinstance(events, str | os.PathLike) else events_table(events)
    power_rows = read_power(power, tz) if isinstance(power, str | os.PathLike) else power_table(power)
    return event_rows, from_power_table(power_rows, facts or NOTHING_KNOWN, hold_s)
