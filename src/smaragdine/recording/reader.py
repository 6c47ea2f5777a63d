"""Opens a recording, whatever state it was left in.

recording = smaragdine.open("runs/2026-11-15-train")
recording.power                       # Arrow table: t_ns, device, quantity, value, …
recording.table("marks", "pandas")    # or "numpy": a dict of arrays
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Required, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.display import Shown
from smaragdine.errors import UserError
from smaragdine.files import parse_json
from smaragdine.recording import damage
from smaragdine.recording.damage import TableFile, oddity, table_files
from smaragdine.recording.format import (
    CALLS,
    EDGES,
    EVENTS_WITH_CALLS,
    FORMAT_VERSION,
    INFO_FILE,
    MARKS,
    PLACES,
    READING_TABLES,
    READINGS,
    TABLES,
    WINDOWS,
    channel_from_dict,
    channels_of,
)
from smaragdine.recording.marks import by_time, read_spool
from smaragdine.recording.tables import MOST_T_NS
from smaragdine.recording.thinned import Thinned, read_thinned
from smaragdine.recording.writer import fit, one_dictionary
from smaragdine.sensors.base import Channel
from smaragdine.system import boot_id, start_ticks

_SILENT_S = 60.0  # tables are written every second


@dataclass(frozen=True)
class Series:
    """The readings of one channel, by time. Between segments of a restarted sampler nothing is known."""

    channel: Channel
    t_ns: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]
    segment: npt.NDArray[np.int16]


@dataclass(frozen=True)
class Recording(Shown):
    path: Path
    info: dict[str, Any] = field(repr=False)

    @property
    def status(self) -> str:
        """complete, failed (exit code), killed (signal), running, or interrupted: the supervisor died."""
        status: str = self.info.get("status", "running")
        if status == "running" and not _goes_on(self.path, self.info):
            return "interrupted"
        return status

    @cached_property
    def channels(self) -> list[Channel]:
        """Every recorded channel, in the order of its first appearance."""
        known = [channel_from_dict(values) for values in self.info.get("channels", [])]
        return list(
            dict.fromkeys([*known, *(series.channel for t in READING_TABLES for series in self.series(t))])
        )

    @property
    def power(self) -> pa.Table:
        return self.table("power")

    @property
    def activity(self) -> pa.Table:
        return self.table("activity")

    @property
    def telemetry(self) -> pa.Table:
        return self.table("telemetry")

    @property
    def places(self) -> pa.Table:
        """Where each thread of the program was first seen, and moved. Empty on machines of one socket."""
        return self.table("places")

    @property
    def marks(self) -> pa.Table:
        """Named instants. For the earlier part of a long run, without steps and regions: see `thinned`."""
        return self.table("marks")

    @cached_property
    def announced_steps(self) -> int:
        """How many ends of steps anybody has marked."""
        thinned = 0
        if self.thinned is not None:
            thinned = sum(len(lengths) for lengths in self.thinned.table("steps")["lengths_us"])
        return thinned + self.marks["name"].to_pylist().count("step_end")

    @property
    def events(self) -> pa.Table:
        """Executions of tensor operations, from every process that traced. Text is dictionary-encoded."""
        return self.table("events")

    @property
    def calls(self) -> pa.Table:
        """What rebuilds the calls that launched a GPU's kernels."""
        return self._calls

    @property
    def edges(self) -> pa.Table:
        return self.table("edges")

    @property
    def windows(self) -> pa.Table:
        """When the profiler ran, over which steps, and how much of them it explains."""
        return self.table("windows")

    def table(self, name: str, form: Literal["arrow", "pandas", "numpy"] = "arrow") -> Any:
        """One table as an Arrow table, a pandas frame, or a dict of numpy arrays."""
        if name not in TABLES:
            raise UserError(f"no table named {name}", remedy=f"There are: {', '.join(TABLES)}")
        table = self._readings(name) if name in READING_TABLES else getattr(self, f"_{name}")
        if form not in ("arrow", "pandas", "numpy"):
            raise UserError(f"no form named {form}", remedy="There are: arrow, pandas, numpy")
        if form == "pandas":
            return table.to_pandas()
        if form == "numpy":
            return {column: _to_numpy(table[column]) for column in table.column_names}
        return table

    @cached_property
    def damage(self) -> list[str]:
        """What is not as it was written, or is missing, and what that does to figures: a sentence each.

        Where the supervisor died, tables end where their writer did. That is said, but it is no damage.
        """
        if self.thinned is None:
            return damage.said(self.path, self.status, self.info, self._files, {}, {})
        state = self.thinned.state
        lines = damage.said(self.path, self.status, self.info, self._files, state.gone, state.spool)
        return [*lines, *state.problems]

    @cached_property
    def thinned(self) -> Thinned | None:
        """What is left of the earlier part of a long run; None where all readings are there."""
        _ = self._files  # first, so that it knows of a file that goes while we look
        return read_thinned(self.path)

    def lost(self, table: str) -> str:
        """What is wrong with the files of a table, for messages about missing rows; empty: nothing."""
        return "; ".join(
            line for line in self.damage if re.match(rf"{table}\.(\d+\.){{0,2}}arrows is ", line)
        )

    def series(self, table: str) -> list[Series]:
        """The readings of one table, channel by channel."""
        return self._series[table]

    def files(self, table: str) -> list[TableFile]:
        """The files of a table, in the order they were written."""
        return self._files[table]

    def only(self, these: Callable[[TableFile], bool]) -> Recording:
        """The same recording with no other files of readings than these."""
        one = Recording(self.path, self.info)
        files = {
            table: [file for file in of if table not in READING_TABLES or these(file)]
            for table, of in self._files.items()
        }
        one.__dict__["_files"] = files  # as if it had found them itself
        return one

    @cached_property
    def _files(self) -> dict[str, list[TableFile]]:
        return {table: table_files(self.path, table) for table in TABLES}

    @cached_property
    def _series(self) -> dict[str, list[Series]]:
        files = {table: self._files[table] for table in READING_TABLES}
        earlier = self.thinned.file("telemetry") if self.thinned is not None else None
        if earlier is not None:
            files["telemetry"] = [earlier, *files["telemetry"]]
        return {table: list(_read_series(files[table])) for table in READING_TABLES}

    @cached_property
    def _marks(self) -> pa.Table:
        tables = [table for *_, table in _tables(self._files["marks"], MARKS)]
        # A crash after writing the table and before removing the spool leaves both, with the same marks.
        later = pa.concat_tables(tables) if tables else self._spool
        earlier = None if self.thinned is None else self.thinned.table("marks")
        return later if earlier is None else by_time(pa.concat_tables([earlier, later]))

    @cached_property
    def _spool(self) -> pa.Table:
        return read_spool(self.path, None if self.thinned is None else self.thinned.state.spool)

    @cached_property
    def _places(self) -> pa.Table:
        return _read_whole(self._files["places"], PLACES)

    @cached_property
    def _events(self) -> pa.Table:
        events = one_dictionary(_read_whole(self._files["events"], EVENTS_WITH_CALLS))
        return events.drop_columns(["call"]) if events["call"].null_count == events.num_rows else events

    @cached_property
    def _edges(self) -> pa.Table:
        return _read_whole(self._files["edges"], EDGES)

    @cached_property
    def _calls(self) -> pa.Table:
        return _read_whole(self._files["calls"], CALLS)

    @cached_property
    def _windows(self) -> pa.Table:
        return _read_whole(self._files["windows"], WINDOWS)

    def _readings(self, name: str) -> pa.Table:
        columns: dict[str, list[Any]] = {column: [] for column in ("t_ns", "device", "quantity", "value")}
        for series in self.series(name):
            count = series.t_ns.size
            columns["t_ns"].append(pa.array(series.t_ns))
            columns["device"].append(_repeat(series.channel.device, count))
            columns["quantity"].append(_repeat(series.channel.quantity, count))
            columns["value"].append(pa.array(series.value))
        types = {"t_ns": pa.int64(), "device": pa.string(), "quantity": pa.string(), "value": pa.float64()}
        arrays = {
            column: pa.chunked_array(chunks, type=types[column]).combine_chunks()
            for column, chunks in columns.items()
        }
        return pa.table(arrays).sort_by([("t_ns", "ascending")])


def _repeat(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.string()), count)


def _to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    if pa.types.is_dictionary(column.type):
        # Going straight to numpy, a null would become the dictionary's last text.
        column = column.cast(column.type.value_type)
    return column.to_numpy(zero_copy_only=False)


def open_recording(path: str | os.PathLike[str]) -> Recording:
    folder = Path(path)
    if not folder.exists():
        raise UserError(
            f"{folder} does not exist", remedy="Recordings are under runs/ unless -o named another folder"
        )
    file = folder / INFO_FILE
    if not file.is_file():
        raise UserError(
            f"{folder} is no recording",
            f"it has no {INFO_FILE}",
            _inside(folder) or "Name the folder that smaragdine run printed",
        )
    try:
        info: dict[str, Any] = parse_json(file.read_text(encoding="utf-8"), nan=True)
        version = int(info["format_version"])
        _check(info)
        info.pop("crc32", None)  # of the file itself
    except (OSError, ValueError, KeyError, TypeError, OverflowError, msgspec.ValidationError) as error:
        raise UserError(
            f"{file} cannot be read", str(error), "Was it edited? The tables beside it are Arrow streams"
        ) from None
    if version > FORMAT_VERSION:
        raise UserError(
            f"{folder} has format {version}",
            f"this version of smaragdine knows formats up to {FORMAT_VERSION}",
            "Update smaragdine",
        )
    return Recording(folder, info)


def _inside(folder: Path) -> str:
    """The recording that was perhaps meant, where the folder holds several."""
    files = list(folder.glob(f"*/{INFO_FILE}")) or list(
        folder.glob(f"runs/*/{INFO_FILE}")
    )  # a sweep, a study
    if not files:
        return ""
    count = "a recording" if len(files) == 1 else f"{len(files)} recordings"
    return f"It holds {count}; the newest is {max(files, key=lambda file: file.stat().st_mtime).parent}"


# Far from the ends of 64 bits, so that differences fit too.
_Ns = Annotated[int, msgspec.Meta(ge=-MOST_T_NS, le=MOST_T_NS)]


class _Clock(TypedDict, total=False):
    begin: Required[dict[Literal["wall_ns", "mono_ns"], _Ns]]
    end: dict[Literal["wall_ns", "mono_ns"], _Ns]
    step_ns: _Ns


class _Gpu(TypedDict, total=False):
    device: str
    name: str | None
    power_limit_w: float | None


class _Host(TypedDict, total=False):
    hostname: str | None
    kernel: str | None
    cpu: str | None
    sockets: dict[str, dict[str, Any]]
    gpus: list[_Gpu] | None


class _Info(TypedDict, total=False):
    """What others rely on in run.json."""

    status: Literal["complete", "failed", "killed", "running", "interrupted"]
    command: list[str]
    working_folder: str | None
    environment: dict[str, str]
    host: _Host
    clock: Required[_Clock]
    channels: list[dict[str, Any]]
    absent: list[dict[str, str]]
    problems: list[str]
    monitor: list[dict[str, Any]]
    rows: dict[str, int]
    seals: dict[str, str]
    libraries: dict[str, str]
    begin_ns: _Ns
    end_ns: _Ns
    exit_code: int | None
    signal: int | None
    program_cpu_s: float


def _check(info: Any) -> None:
    """Check run.json: an edited file should give one clear message, and no failure later."""
    checked = msgspec.convert(info, _Info)
    for values in checked.get("channels", []):
        channel_from_dict(values)


def _batches(file: TableFile) -> list[pa.RecordBatch]:
    """Every whole batch that is as it was written, of a file that may end anywhere."""
    try:
        return list(file.batches())
    except (pa.ArrowException, OSError, ValueError) as error:
        if not file.path.exists():
            raise UserError(
                f"{file.path} went while it was read",
                "the run goes on, and old readings are thinned",
                "Try again",
            ) from None
        raise _damaged(file.path, str(error)) from None


def _tables(files: Sequence[TableFile], schema: pa.Schema) -> Iterator[tuple[TableFile, pa.Table]]:
    """The files of a table that hold rows, each with the columns of `schema`."""
    for file in files:
        batches = [batch for batch in _batches(file) if batch.num_rows]
        if not batches:
            continue
        whole = pa.Table.from_batches(batches)
        for column in schema:
            at = whole.schema.get_field_index(column.name)
            if at < 0 or whole.schema.field(at).type != column.type:
                raise _damaged(
                    file.path, f"not exactly one of its columns is {column.name}, of {column.type}"
                )
        yield file, _sound(file, whole.select(schema.names))


def _sound(file: TableFile, rows: pa.Table) -> pa.Table:
    why = None if file.found.sealed else oddity(file.path.name.partition(".")[0], rows)
    if why is not None:
        raise _damaged(file.path, why)
    return rows


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged", why, "Copy it anew, or move it away to see what the others hold")


def _read_whole(files: Sequence[TableFile], schema: pa.Schema) -> pa.Table:
    """All files of a table, one below the other. Raises where a column means something else."""
    tables = [
        _sound(file, fit(pa.Table.from_batches(batches), schema, str(file.path)))
        for file in files
        if (batches := _batches(file))
    ]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _read_series(files: Sequence[TableFile]) -> Iterator[Series]:
    parts: dict[tuple[str, str, str, int], tuple[Channel, list[tuple[int, Any, Any]]]] = {}
    for file, whole in _tables(files, READINGS):
        path = file.path
        try:
            channels = channels_of(whole.schema)
        except (ValueError, TypeError, AttributeError):
            raise _damaged(path, "its list of channels cannot be read") from None
        number = whole["channel"].to_numpy()
        if number.max() >= len(channels):
            raise _damaged(path, f"it names {len(channels)} channels and has readings of more")
        t_ns, value = whole["t_ns"].to_numpy(), whole["value"].to_numpy()
        seen: Counter[tuple[str, str, str]] = Counter()
        for index, channel in enumerate(channels):
            # A restarted recorder finds the same channels in the same order, though a measured period may
            # differ. Two dies of one socket are two channels of one name.
            key = (channel.device, channel.quantity, channel.sensor)
            seen[key] += 1
            rows = np.flatnonzero(number == index)
            if rows.size:
                parts.setdefault((*key, seen[key]), (channel, []))[1].append(
                    (file.segment, t_ns[rows], value[rows])
                )
    for channel, pieces in parts.values():
        yield Series(
            channel,
            np.concatenate([t for _, t, _ in pieces]),
            np.concatenate([v for _, _, v in pieces]),
            np.concatenate([np.full(t.size, segment, dtype=np.int16) for segment, t, _ in pieces]),
        )


def _goes_on(folder: Path, info: dict[str, Any]) -> bool:
    """Whether a recording without an end goes on: whether its supervisor lives.

    On another machine, or in a container, we cannot see its process. There the recording goes on as long as
    somebody writes to it.
    """
    here = {"boot_id": boot_id(), "hostname": os.uname().nodename}
    there = {"boot_id": info.get("boot_id"), "hostname": info.get("host", {}).get("hostname")}
    if any(said and said != here[name] for name, said in there.items()):
        written_s = max((path.stat().st_mtime for path in folder.iterdir() if path.is_file()), default=0.0)
        return time.time() - written_s < _SILENT_S
    pid = info.get("supervisor_pid")
    ticks = start_ticks(pid) if isinstance(pid, int) else 0
    return ticks > 0 and ticks == info.get("supervisor_start_ticks", ticks)
