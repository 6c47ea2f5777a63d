"""The folder `thinned/` of a recording: what stays of readings that nobody looks at again.

    state.json          how far it goes, and what a reader needs to go on from there; written last
    stretches.arrows    the power of each device, mostly its mean over ten seconds
    steps.arrows        lengths of steps that are like the others
    regions.arrows      what regions used
    marks.arrows        all other marks
    telemetry.arrows    clocks, temperatures, utilisation … every ten seconds

Before `cut_ns` these tables speak, after it the readings themselves. Rows that the state does not count were
never finished, and mean nothing. `docs/format.md` says what is kept, and for how long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.errors import UserError
from smaragdine.files import write_whole
from smaragdine.recording.damage import TableFile, is_as_written, sealed_json
from smaragdine.recording.format import MARKS, THINNED_FOLDER
from smaragdine.recording.seal import map_file, survey
from smaragdine.recording.writer import Position, TableWriter

STATE_FILE = "state.json"
_FLOATS = (
    "power_w",
    "program_w",  # this and the next six: nan where nobody knows who used the device
    "static_w",  # of the program's part, its share of the idle device
    "monitor_w",
    "unseen_w",  # more for the program, if all CPU time of unknown users were its own
    "occupied",  # CPU time as parts of all there is: the program's,
    "monitor",
    "foreign",  # and other programs'
    "peak_w",  # the highest mean over 100 ms that begin here and end before the next mark; nan: there is none
    "highest_w",  # the same, over marks
)
STRETCHES = pa.schema(
    [
        ("device", pa.int16()),
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        *((name, pa.float64()) for name in _FLOATS),
    ]
)
# Steps of one process and source, one after the other, none of them traced or special in any way.
STEPS = pa.schema(
    [
        ("rank", pa.int32()),
        ("pid", pa.int32()),
        ("source", pa.string()),
        ("first_index", pa.int64()),  # null: these steps have no numbers
        ("begin_ns", pa.int64()),
        ("lengths_us", pa.list_(pa.uint32())),
    ]
)
# All times that a region ran between two cuts: every second of them once (`count` > 0), or one of them (0).
REGIONS = pa.schema(
    [
        ("name", pa.string()),
        ("count", pa.int64()),
        ("begin_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("duration_s", pa.float64()),
        ("energies_j", pa.list_(pa.float64())),  # one for each device of the state; null: nobody looked
        ("program_j", pa.float64()),
        ("unseen_j", pa.float64()),
    ]
)
SCHEMAS = {"stretches": STRETCHES, "steps": STEPS, "regions": REGIONS, "marks": MARKS}


class ThinnedDevice(msgspec.Struct, frozen=True):
    """Where a device's readings go on, and what we found out about it."""

    start_ns: int  # readings before it are no longer needed
    channel: dict[str, Any]
    hold_ns: int
    static_w: float | None = None
    basis: str = ""
    restarts_ns: list[int] = []
    anchors: int = 0
    implausible: int = 0


class State(msgspec.Struct, frozen=True):
    cut_ns: int
    devices: dict[str, ThinnedDevice]
    sockets: dict[str, int]  # where the readings of its users go on
    spool: dict[str, int]  # file of marks → how many of its bytes are done
    files: dict[str, tuple[int, int, int]]  # table → its position
    gone: dict[str, int]  # restart → the last of its files that were removed
    steps: list[
        tuple[int | None, int | None, str | None, int, int]
    ] = []  # who marked it: how many, and the end of the last one
    beyond: dict[str, int] = {}  # channel → how many of its readings cannot be right
    problems: list[str] = []
    version: int = 1


Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Thinned:
    """What `thinned/` holds."""

    folder: Path
    state: State

    @cached_property
    def stretches(self) -> dict[str, Arrays]:
        """Device → its columns of STRETCHES, by time."""
        table = self.table("stretches")
        number = table["device"].to_numpy()
        found: dict[str, Arrays] = {}
        for i, device in enumerate(self.state.devices):
            rows = np.flatnonzero(number == i)
            found[device] = {name: table[name].to_numpy()[rows] for name in STRETCHES.names[1:]}
        del table, number
        give_back()
        return found

    def table(self, name: str) -> pa.Table:
        file = self.file(name)
        batches = [] if file is None else _batches(file)
        return pa.Table.from_batches(batches, schema=SCHEMAS[name])

    def file(self, name: str) -> TableFile | None:
        """One of its tables, as far as it counts."""
        size, rows, _ = self.state.files.get(name, (0, 0, 0))
        if not size:
            return None
        path = self.folder / f"{name}.arrows"
        content = map_file(path)
        found = survey(content.slice(0, min(size, content.size)))
        if content.size < size or found.damaged or found.rows != rows:
            raise UserError(
                f"{path} is damaged", "it is not as it was written", "Copy the recording anew, if you can"
            )
        return TableFile(0, path, found)


def give_back() -> None:
    """Have Arrow give back memory that nobody uses, after it read a large table: numbers come next."""
    pa.default_memory_pool().release_unused()


def _batches(file: TableFile) -> list[pa.RecordBatch]:
    try:
        return [batch for batch in file.batches() if batch.num_rows]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{file.path} is damaged", str(error)) from None


def read_thinned(recording: Path) -> Thinned | None:
    """Read `thinned/`; None where all readings are there."""
    folder = recording / THINNED_FOLDER
    path = folder / STATE_FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read", str(error)) from None
    try:
        if not is_as_written(data):
            raise ValueError("it is not as it was written")
        state = msgspec.json.decode(data, type=State)
    except (ValueError, msgspec.DecodeError) as error:
        raise UserError(
            f"{path} is damaged", str(error), "Without it nothing is known of the run's earlier part"
        ) from None
    return Thinned(folder, state)


@contextlib.contextmanager
def appending(recording: Path, before: State | None, schemas: Mapping[str, pa.Schema]) -> Iterator[Appended]:
    """Tables that go on where `before` left them. Their `positions` are known when the block ends."""
    folder = recording / THINNED_FOLDER
    folder.mkdir(exist_ok=True)
    added = Appended({}, {})
    for name, schema in schemas.items():
        path = folder / f"{name}.arrows"
        at = before.files.get(name) if before is not None else None
        if at is None:
            path.unlink(missing_ok=True)  # left by a thinner that did not finish
        added.writers[name] = TableWriter(path, schema, None if at is None else Position(*at))
    yield added
    for name, writer in added.writers.items():
        # Write all in one batch: to unpack a batch takes as long as some thousand rows.
        if tables := added.tables.get(name):
            for batch in pa.concat_tables(tables).combine_chunks().to_batches():
                writer.write(batch)
        writer.leave()
        size, rows, checksum = writer.position
        added.positions[name] = (size, rows, checksum)


@dataclass(frozen=True)
class Appended:
    writers: dict[str, TableWriter]
    positions: dict[str, tuple[int, int, int]]
    tables: dict[str, list[pa.Table]] = field(default_factory=dict[str, list[pa.Table]])

    def write(self, name: str, table: pa.Table) -> None:
        self.tables.setdefault(name, []).append(table)


def write_state(recording: Path, state: State) -> None:
    """From this write on, the tables stand for the removed readings."""
    data = sealed_json(msgspec.to_builtins(state))
    write_whole(recording / THINNED_FOLDER / STATE_FILE, data.decode(), 0o644)
