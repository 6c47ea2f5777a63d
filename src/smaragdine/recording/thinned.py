"""What stays of readings that nobody looks at again: the folder `thinned/` of a recording.

    state.json          how far it goes, and what a reader needs to go on from there; written last
    stretches.arrows    the power of each device, mostly its mean over ten seconds
    steps.arrows        lengths of steps that are like the others
    regions.arrows      what regions used
    marks.arrows        all other marks
    telemetry.arrows    clocks, temperatures, utilisation … every ten seconds

Before `cut_ns` these tables speak, from there on the readings themselves. What a table holds beyond what the
state counts was never finished, and does not count. `docs/format.md` says what is kept, and for how long.
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
    "program_w",  # this and the next six: nan where it is not known who used the device
    "static_w",  # of the program's, what is its part of the idle device
    "monitor_w",
    "unseen_w",  # what more would be the program's, were all CPU time its own that nobody is known to use
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
# Steps of one process and source, one after the other, none of them traced or in any way special.
STEPS = pa.schema(
    [
        ("rank", pa.int32()),
        ("pid", pa.int32()),
        ("source", pa.string()),
        ("first_index", pa.int64()),  # null: they have no numbers
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
        ("energies_j", pa.list_(pa.float64())),  # by the devices of the state; null: nobody looked
        ("program_j", pa.float64()),
        ("unseen_j", pa.float64()),
    ]
)
SCHEMAS = {"stretches": STRETCHES, "steps": STEPS, "regions": REGIONS, "marks": MARKS}


class ThinnedDevice(msgspec.Struct, frozen=True):
    """Where a device's readings go on, and what was found out about it."""

    start_ns: int  # readings before it are needed no more
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
    sockets: dict[str, int]  # where the readings of who used them go on
    spool: dict[str, int]  # file of marks → bytes of it that are done
    files: dict[str, tuple[int, int, int]]  # table → its position
    gone: dict[str, int]  # restart → files up to this one were removed
    steps: list[
        tuple[int | None, int | None, str | None, int, int]
    ] = []  # who: how many, and the last one's end
    beyond: dict[str, int] = {}  # channel → readings that cannot be
    problems: list[str] = []
    version: int = 1


Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Thinned:
    """What `thinned/` says."""

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
        """As far as it counts."""
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
    """What Arrow holds and nobody uses, after a large table was read: the next one is made of numbers."""
    pa.default_memory_pool().release_unused()


def _batches(file: TableFile) -> list[pa.RecordBatch]:
    try:
        return [batch for batch in file.batches() if batch.num_rows]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{file.path} is damaged", str(error)) from None


def read_thinned(recording: Path) -> Thinned | None:
    """None where all readings are there."""
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
    """Tables to go on with from where `before` left them; its `positions` are known when the block ends."""
    folder = recording / THINNED_FOLDER
    folder.mkdir(exist_ok=True)
    added = Appended({}, {})
    for name, schema in schemas.items():
        path = folder / f"{name}.arrows"
        at = before.files.get(name) if before is not None else None
        if at is None:
            path.unlink(missing_ok=True)  # of somebody who did not come to an end
        added.writers[name] = TableWriter(path, schema, None if at is None else Position(*at))
    yield added
    for name, writer in added.writers.items():
        # One batch for all: to unpack one takes as long as some thousand rows do.
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
    """From here on the tables say what the removed readings said."""
    data = sealed_json(msgspec.to_builtins(state))
    write_whole(recording / THINNED_FOLDER / STATE_FILE, data.decode(), 0o644)
