"""Power logs: tables with columns `device, t_ns, power_w`, or the CSV of nvidia-smi. A table that `export`
wrote also says for how long each power holds."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.arrays import Ints
from smaragdine.arrow import pc
from smaragdine.errors import UserError
from smaragdine.recording import tables

# The CSV of `nvidia-smi --query-gpu=timestamp,index,power.draw --format=csv -lms 100`. Its times are local,
# without a zone. Where a clock that is set back repeats an hour, the order of the rows tells which of the two
# a time is in.

# By the time that they average over, shortest first: some 25 ms, what the driver takes for usual, a second.
_POWER = ("power.draw.instant", "power.draw", "power.draw.average")
_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)")
_MINUTE_NS = 60_000_000_000
_COMPLETE = re.compile(rb"(?:\d\.\d\d|W|\])\s*$")


def is_log(header: Sequence[str]) -> bool:
    return any(_plain(name) in _POWER for name in header)


def read(content: pa.Buffer, header: Sequence[str], tz: str | None, where: str) -> pa.Table:
    """A table device, t_ns, power_w, without rows that have no value ([N/A], [Unknown Error] …)."""
    zone = zone_of(tz)
    plain = {_plain(name): name for name in header}
    powers = [plain[name] for name in _POWER if name in plain]
    for name in ("timestamp", "index"):
        if name not in plain:
            raise UserError(
                f"{where} has no column {name}",
                "it is nvidia-smi's, and GPUs are told apart by their index" if name == "index" else "",
                "Log with nvidia-smi --query-gpu=timestamp,index,power.draw --format=csv -lms 100",
            )
    table = _read_rows(content, [plain["timestamp"], plain["index"], *powers], where)
    local_ns = _local_ns(table[plain["timestamp"]], where)
    index = table[plain["index"]]
    good = pc.match_substring_regex(index, r"^\d{1,4}$").to_numpy()
    tables.refuse(where, "index", ~good, "is no number")
    gpu = index.cast(pa.int64()).to_numpy()
    t_ns = _to_unix(local_ns, gpu, zone, where)
    power_w = np.full(gpu.size, np.nan)
    columns = [_watts(table[name], where) for name in powers]
    for one in np.unique(gpu):
        mine = gpu == one
        values = next((column[mine] for column in columns if np.any(~np.isnan(column[mine]))), None)
        if values is not None:
            power_w[mine] = values
    known = ~np.isnan(power_w)
    if not np.any(known):
        raise UserError(
            f"{where} has no power", "every value is [N/A] or an error", "Does this GPU report power?"
        )
    rows = np.flatnonzero(known)
    devices = pa.array([f"gpu:{n}" for n in gpu[rows].tolist()], pa.string())
    return pa.table({"device": devices, "t_ns": pa.array(t_ns[rows]), "power_w": pa.array(power_w[rows])})


def zone_of(tz: str | None) -> tzinfo | None:
    """A zone by name or offset. None is the machine's own, for datetime too."""
    if tz is None:
        return None
    match = _OFFSET.fullmatch(tz)
    if match and int(match[2]) < 24 and int(match[3]) < 60:
        offset = timedelta(hours=int(match[2]), minutes=int(match[3]))
        return timezone(-offset if match[1] == "-" else offset)
    if tz in ("UTC", "Z"):
        return UTC
    try:
        return ZoneInfo(tz)
    except (KeyError, ValueError, OSError):
        raise UserError(
            f"no time zone is named {tz}",
            remedy="Give an IANA name such as Europe/Berlin, or an offset: +02:00",
        ) from None


def _plain(name: str) -> str:
    return name.split(" [")[0].strip()


def _read_rows(content: pa.Buffer, columns: Sequence[str], where: str) -> pa.Table:
    content = _whole_lines(content)
    tables.check_text(content, where)
    bad: list[Any] = []

    def note(row: Any) -> str:
        bad.append(row)
        return "skip"

    try:
        table = tables.read_csv(content, columns, [], where, note)
    except pa.ArrowInvalid as error:
        raise UserError(f"{where} cannot be read as nvidia-smi's CSV", str(error).splitlines()[0]) from None
    if bad:
        raise UserError(
            f"{where}: a line has {bad[0].actual_columns} fields, the header {bad[0].expected_columns}",
            bad[0].text.strip()[:80],
        )
    if not table.num_columns:
        raise UserError(f"{where} has no rows", "it ends within its header")
    # A log that was appended to has its header again.
    repeated = pc.equal(table.column(0), table.column_names[0])
    table = table.filter(pc.invert(repeated))
    if not table.num_rows:
        raise UserError(f"{where} has no rows")
    return pa.table([pc.utf8_trim_whitespace(column) for column in table.columns], names=table.column_names)


def _whole_lines(content: pa.Buffer) -> pa.Buffer:
    """Drop a last line that was still being written: 71.4 may have been going to be 71.45."""
    view = memoryview(content)
    if bytes(view[-1:]) in (b"\n", b"\r"):
        return content
    last = re.split(rb"[\r\n]", bytes(view[-4096:]))[-1]
    header = tables.first_line(content)
    if last.count(b",") == header.count(b",") and _COMPLETE.search(last):
        return content
    return content.slice(0, content.size - len(last))


def _local_ns(column: pa.ChunkedArray, where: str) -> Ints:
    good = pc.match_substring_regex(column, r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d(\.\d{1,9})?$").to_numpy()
    tables.refuse(where, "timestamp", ~good, "is not like 2026/11/15 10:52:16.123")
    try:
        return pc.replace_substring(column, "/", "-").cast(pa.timestamp("ns")).cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise UserError(f"{where} has a time that is none", str(error)) from None


def _watts(column: pa.ChunkedArray, where: str) -> npt.NDArray[np.float64]:
    """NaN where nvidia-smi wrote a reason instead of a value."""
    absent = pc.match_substring_regex(column, r"^(\[.*\]|N/A)$")
    words = pc.if_else(absent, pa.scalar(None, pa.string()), column)
    words = pc.replace_substring_regex(words, r"\s*W$", "")
    good = pc.fill_null(pc.match_substring_regex(words, r"^\d+(\.\d*)?$"), True)
    tables.refuse(where, "power.draw", ~good.to_numpy(), "is no number of watts")
    return pc.fill_null(words.cast(pa.float64()), np.nan).to_numpy()


def _to_unix(local_ns: Ints, gpu: Ints, zone: tzinfo | None, where: str) -> Ints:
    """An offset changes on the minute, so ask for each minute of the log once."""
    minutes, at = np.unique(local_ns // _MINUTE_NS, return_inverse=True)
    first_ns, second_ns = (
        np.array([_offset_ns(int(minute), zone, fold) for minute in minutes], dtype=np.int64)[at]
        for fold in (0, 1)
    )
    tables.refuse(
        where, "timestamp", first_ns < second_ns, "does not exist: clocks were set forward", "Give --tz"
    )
    early_ns, late_ns = local_ns - first_ns, local_ns - second_ns
    twice = early_ns != late_ns
    if not np.any(twice):
        return early_ns
    t_ns = early_ns.copy()
    for one in np.unique(gpu):
        rows = np.flatnonzero(gpu == one)
        t_ns[rows] = _in_order(early_ns[rows], late_ns[rows], twice[rows], where)
    return t_ns


def _in_order(early_ns: Ints, late_ns: Ints, twice: npt.NDArray[np.bool_], where: str) -> Ints:
    """Decide which of its two times each row of the repeated hour has: times of one GPU never go back."""
    t_ns = early_ns.copy()
    edges = np.flatnonzero(np.diff(twice.astype(np.int8), prepend=0, append=0))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        back = np.flatnonzero(np.diff(early_ns[begin:end]) < 0)
        if back.size:
            t_ns[begin + int(back[0]) + 1 : end] = late_ns[begin + int(back[0]) + 1 : end]
        else:
            before_ns = early_ns[begin] - early_ns[begin - 1] if begin else None
            after_ns = early_ns[end] - late_ns[end - 1] if end < early_ns.size else None
            if before_ns is None and after_ns is None:
                raise UserError(
                    f"{where} lies within an hour that the clocks showed twice",
                    "its rows do not say which",
                    "Give --tz as an offset, such as +02:00",
                )
            if before_ns is None or (after_ns is not None and after_ns < before_ns):
                t_ns[begin:end] = late_ns[begin:end]
        if np.any(np.diff(t_ns[begin:end]) < 0):
            raise UserError(f"{where}: times go back twice within the hour that the clocks showed twice")
    return t_ns


def _offset_ns(minute: int, zone: tzinfo | None, fold: int) -> int:
    moment = (datetime(1970, 1, 1) + timedelta(minutes=minute)).replace(fold=fold)
    seconds = moment.replace(tzinfo=UTC).timestamp() - moment.replace(tzinfo=zone).timestamp()
    return round(seconds) * 1_000_000_000


MOST_W = 1e9

POWER = pa.schema([("device", tables.TEXT), ("t_ns", pa.int64()), ("power_w", pa.float64())])
LENGTH = "duration_ns"


def read_power(path: str | os.PathLike[str], tz: str | None = None) -> pa.Table:
    """A table of schema POWER, by time, from Parquet, Arrow, CSV or a log of nvidia-smi, or a UserError. A
    column LENGTH comes along.

    `tz` is the zone of a log in local time, an IANA name or an offset; the machine's own unless given.
    """
    where = os.fspath(path)
    content = tables.read_content(path)
    kind = tables.kind_of(content, path)
    if kind in ("json", "xplane", "unknown"):
        raise UserError(
            f"{where} is of no kind that holds power",
            remedy="Parquet, Arrow and CSV with device, t_ns, power_w are read, and nvidia-smi's CSV",
        )
    if kind == "csv":
        header, _ = tables.csv_header(content)

        if is_log(header):
            return _checked(read(content, header, tz, where), where)
    return _checked(tables.read_table(content, kind, (*POWER.names, LENGTH), ["device"], where), where)


def power_table(data: Any, where: str = "power") -> pa.Table:
    """Power from a dict of arrays, an Arrow table or a data frame, as a table of schema POWER, by time."""
    return _checked(tables.as_table(data, where), where)


def _checked(table: pa.Table, where: str) -> pa.Table:
    tables.need_columns(table, POWER.names, (LENGTH,), where)
    device = tables.text(table, "device", where)
    t_ns = tables.whole(table, "t_ns", where)
    power_w = tables.number(table, "power_w", where)
    watts = power_w.to_numpy()
    tables.refuse(where, "power_w", watts < 0, "is negative")
    tables.refuse(where, "power_w", watts > MOST_W, f"is above {MOST_W:.0e} W", "Is it in watts?")
    times = t_ns.to_numpy()
    # Far from the ends of 64 bits, so that differences and holds fit too.
    tables.refuse(
        where,
        "t_ns",
        (times > tables.MOST_T_NS) | (times < -tables.MOST_T_NS),
        "is no time in nanoseconds since 1970",
    )
    if int(times.max()) - int(times.min()) > tables.MOST_T_NS // 2:
        raise UserError(f"{where} spans centuries", remedy="t_ns is in nanoseconds since 1970")
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in device.chunks])
    order = _order(times, codes, watts, device.chunk(0).dictionary.to_pylist(), where)
    checked = pa.table([device, t_ns, power_w], schema=POWER)
    if LENGTH in table.column_names:
        checked = checked.append_column(LENGTH, _lengths(table, times, where))
    checked = checked if order is None else checked.take(pa.array(order))
    if LENGTH in checked.column_names:
        _refuse_overlaps(checked, where)
    return checked


def _lengths(table: pa.Table, t_ns: Ints, where: str) -> pa.ChunkedArray:
    length_ns = tables.whole(table, LENGTH, where)
    tables.refuse(where, LENGTH, length_ns.to_numpy() < 0, "is negative")
    too_long = length_ns.to_numpy() > tables.MOST_T_NS - np.maximum(t_ns, 0)
    tables.refuse(where, f"t_ns + {LENGTH}", too_long, "is no time in nanoseconds since 1970")
    return length_ns


def _refuse_overlaps(table: pa.Table, where: str) -> None:
    """A device has one power at a time. Stretches may have gaps between them: there nothing is known."""
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in table["device"].chunks])
    t_ns, length_ns = table["t_ns"].to_numpy(), table[LENGTH].to_numpy()
    for code in np.unique(codes).tolist():
        mine = np.flatnonzero(codes == code)
        late = np.flatnonzero(t_ns[mine][:-1] + length_ns[mine][:-1] > t_ns[mine][1:])
        if late.size:
            device, at_ns = table["device"].chunk(0).dictionary[code], t_ns[mine[late[0] + 1]]
            why = f"{device} has two powers at {at_ns} ns: {LENGTH} of a row reaches beyond the next"
            raise UserError(f"{where} contradicts itself", why)


def _order(
    t_ns: npt.NDArray[np.int64],
    codes: npt.NDArray[np.int32],
    power_w: npt.NDArray[np.float64],
    devices: list[str],
    where: str,
) -> npt.NDArray[np.int64] | None:
    """The rows to keep, by time; None: all as they are. A reading that is there twice is kept once."""
    order = np.lexsort((codes, t_ns))
    same = (np.diff(t_ns[order]) == 0) & (np.diff(codes[order]) == 0)
    contrary = np.flatnonzero(same & (np.diff(power_w[order]) != 0))
    if contrary.size:
        first, second = int(order[contrary[0]]), int(order[contrary[0] + 1])
        raise UserError(
            f"{where} contradicts itself",
            f"{devices[codes[first]]} has {power_w[first]} W and {power_w[second]} W at {t_ns[first]} ns",
        )
    kept = order[np.concatenate([[True], ~same])]
    return None if np.array_equal(kept, np.arange(t_ns.size)) else kept
