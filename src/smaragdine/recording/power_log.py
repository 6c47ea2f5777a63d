"""Power logs of other tools: columns `device, t_ns, power_w`, or what nvidia-smi writes as CSV."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.errors import UserError
from smaragdine.recording.columns import MOST_T_NS, TEXT, as_table, need_columns, number, refuse, text, whole
from smaragdine.recording.table_files import csv_header, kind_of, read_content, read_table

MOST_W = 1e9

POWER = pa.schema([("device", TEXT), ("t_ns", pa.int64()), ("power_w", pa.float64())])


def read_power(path: str | os.PathLike[str], tz: str | None = None) -> pa.Table:
    """A table of schema POWER, by time, from Parquet, Arrow, CSV or a log of nvidia-smi, or a UserError.

    `tz` is the zone of a log in local time, an IANA name or an offset; the machine's own unless given.
    """
    where = os.fspath(path)
    content = read_content(path)
    kind = kind_of(content, path)
    if kind in ("json", "xplane", "unknown"):
        raise UserError(
            f"{where} is of no kind that holds power",
            remedy="Parquet, Arrow and CSV with device, t_ns, power_w are read, and nvidia-smi's CSV",
        )
    if kind == "csv":
        header, _ = csv_header(content)
        from smaragdine.recording import nvidia_smi

        if nvidia_smi.is_log(header):
            return _checked(nvidia_smi.read(content, header, tz, where), where)
    return _checked(read_table(content, kind, POWER.names, ["device"], where), where)


def power_table(data: Any, where: str = "power") -> pa.Table:
    """Power from a dict of arrays, an Arrow table or a data frame, as a table of schema POWER, by time."""
    return _checked(as_table(data, where), where)


def _checked(table: pa.Table, where: str) -> pa.Table:
    need_columns(table, POWER.names, (), where)
    device = text(table, "device", where)
    t_ns = whole(table, "t_ns", where)
    power_w = number(table, "power_w", where)
    watts = power_w.to_numpy()
    refuse(where, "power_w", watts < 0, "is negative")
    refuse(where, "power_w", watts > MOST_W, f"is above {MOST_W:.0e} W", "Is it in watts?")
    times = t_ns.to_numpy()
    # Far from the ends of 64 bits: differences and holds must fit too.
    refuse(where, "t_ns", (times > MOST_T_NS) | (times < -MOST_T_NS), "is no time in nanoseconds since 1970")
    if int(times.max()) - int(times.min()) > MOST_T_NS // 2:
        raise UserError(f"{where} spans centuries", remedy="t_ns is in nanoseconds since 1970")
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in device.chunks])
    order = _order(times, codes, watts, device.chunk(0).dictionary.to_pylist(), where)
    checked = pa.table([device, t_ns, power_w], schema=POWER)
    return checked if order is None else checked.take(pa.array(order))


def _order(
    t_ns: npt.NDArray[np.int64],
    codes: npt.NDArray[np.int32],
    power_w: npt.NDArray[np.float64],
    devices: list[str],
    where: str,
) -> npt.NDArray[np.int64] | None:
    """The rows to keep, by time; None for all of them as they are. The same reading twice is kept once."""
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
