"""The footprint: energy, busy time, mean power and count per qualified name, phase and device; and its
files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import msgspec
import numpy as np
import pyarrow as pa

from smaragdine.arrays import Floats, Ints
from smaragdine.arrow import pc
from smaragdine.display import Shown
from smaragdine.errors import UserError
from smaragdine.files import parse_json, read_json, users_file
from smaragdine.recording.tables import kind_of, read_content, read_table, refuse, write_csv

if TYPE_CHECKING:
    from smaragdine.accounting.intervals import Joint


ROWS = pa.schema(
    [
        ("device", pa.string()),
        ("name", pa.string()),
        ("phase", pa.string()),
        ("energy_j", pa.float64()),
        ("busy_s", pa.float64()),  # in which its events pay, of each by itself
        ("count", pa.float64()),  # whole, unless footprints were averaged or scaled
        ("uncertainty_j", pa.float64()),  # 95 % half-width; null: not known
        ("basis", pa.string()),  # what the uncertainty rests on
        ("step_mean_j", pa.float64()),  # per step, where events carry one
        ("step_std_j", pa.float64()),
    ]
)
_META = b"smaragdine.footprint"


@dataclass(frozen=True)
class DeviceTotal:
    """A device's energy while its power is known: total = rows + idle."""

    total_j: float
    idle_j: float  # used while no event ran
    covered_s: float
    missing_s: float
    steps: int = 0  # distinct steps among its events
    other_j: float | None = None  # other processes and the monitor; not part of total_j
    static_j: float | None = None  # the static part of total_j
    per_step: bool = False  # energies are those of one step
    provenance: str | None = None  # measured, estimated, replayed; None: a foreign log does not say
    uncertainty_j: float | None = None  # 95 % half-width of the sum of all rows; None: not known
    foreign: float | None = None  # the part of CPU time that other programs used; None: not known


@dataclass(frozen=True)
class Footprint(Shown):
    """Rows by device, most energy first. Immutable; arithmetic makes new ones."""

    rows: pa.Table
    devices: Mapping[str, DeviceTotal]
    # device → number of events whose power nobody measured
    without_power: Mapping[str, int] = field(default_factory=dict[str, int])
    remarks: tuple[str, ...] = ()
    # Device → what is known of its rows together (`accounting.intervals`). Files do not have it.
    joints: Mapping[str, Joint] = field(default_factory=dict[str, "Joint"], repr=False, compare=False)

    def device_rows(self, device: str) -> pa.Table:
        return self.rows.filter(pc.field("device") == device)


def only(footprint: Footprint, devices: Sequence[str]) -> Footprint:
    """The footprint of these devices."""
    return dataclasses.replace(
        footprint,
        rows=footprint.rows.filter(pc.is_in(footprint.rows["device"], pa.array(devices, pa.string()))),
        devices={device: total for device, total in footprint.devices.items() if device in devices},
        without_power={d: count for d, count in footprint.without_power.items() if d in devices},
    )


def with_power(rows: pa.Table) -> pa.Table:
    """The rows with their mean power while busy; null if a row was never busy."""
    busy_s = rows["busy_s"].to_numpy()
    energy_j = rows["energy_j"].to_numpy()
    power_w = np.divide(energy_j, busy_s, out=np.zeros(len(busy_s)), where=busy_s > 0)
    column = pa.array(power_w, mask=~(busy_s > 0))
    return rows.add_column(rows.schema.get_field_index("busy_s") + 1, "power_w", column)


def to_json(footprint: Footprint) -> dict[str, Any]:
    """What `account --json` prints."""
    devices: dict[str, Any] = {}
    for device, total in footprint.devices.items():
        table = with_power(footprint.device_rows(device)).drop_columns(["device"])
        rows = table.to_pylist()
        for row in rows:
            row["count"] = int(row["count"]) if row["count"].is_integer() else row["count"]
        devices[device] = {**dataclasses.asdict(total), "rows": rows}
    return {
        "devices": devices,
        "without_power": dict(footprint.without_power),
        "remarks": list(footprint.remarks),
    }


def save(footprint: Footprint, path: str | os.PathLike[str]) -> None:
    """Writes .parquet, .arrow or .csv (only rows), or .json; whole or not at all."""
    file = Path(path)
    write = _WRITERS.get(file.suffix.lower())
    if write is None:
        raise UserError(
            f"{file}: a footprint is not written as {file.suffix or 'a file without suffix'}",
            remedy=f"Name it {', '.join(_WRITERS)}",
        )
    meta = {
        "devices": {device: dataclasses.asdict(total) for device, total in footprint.devices.items()},
        "without_power": dict(footprint.without_power),
        "remarks": list(footprint.remarks),
    }
    rows = footprint.rows.replace_schema_metadata({_META: json.dumps(meta)})
    with users_file(file) as part:
        write(footprint, rows, part)


def write_json(values: dict[str, Any], file: Path) -> None:
    """Writes a file of any name, whole or not at all."""
    with users_file(file) as part:
        _dump(values, part)


def _write_parquet(footprint: Footprint, rows: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    # Splits the bytes of numbers: digits do not repeat over rows, exponents do. A third smaller.
    numbers = [field.name for field in rows.schema if pa.types.is_floating(field.type)]
    texts = [name for name in rows.schema.names if name not in numbers]
    how: dict[str, Any] = {"use_dictionary": texts, "use_byte_stream_split": numbers}
    pq.write_table(rows, path, compression="zstd", **how)


def _write_arrow(footprint: Footprint, rows: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)


def _write_csv(footprint: Footprint, rows: pa.Table, path: Path) -> None:
    write_csv(with_power(rows), path)


def _write_json(footprint: Footprint, rows: pa.Table, path: Path) -> None:
    _dump(to_json(footprint), path)


def _dump(values: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")


_WRITERS = {".parquet": _write_parquet, ".arrow": _write_arrow, ".csv": _write_csv, ".json": _write_json}


def load(path: str | os.PathLike[str]) -> Footprint:
    """Reads a footprint that `save` wrote as .parquet, .arrow or .json; a CSV has no totals."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file} does not exist" if not file.exists() else f"{file} is no file")
    if file.suffix.lower() == ".csv":
        remedy = "Write it as .parquet, .arrow or .json: smaragdine account … -o footprint.parquet"
        raise UserError(f"{file} is no footprint", "a CSV has rows and no totals", remedy)
    try:
        if file.suffix.lower() == ".json":
            return _from_json(read_json(file), str(file))
        content = read_content(file)
        kind = kind_of(content, file)
        if kind not in ("parquet", "arrow"):
            raise ValueError("it is neither Parquet nor an Arrow file")
        rows = read_table(content, kind, ROWS.names, (), str(file))
        meta = parse_json((rows.schema.metadata or {})[_META])
        return _footprint(rows.replace_schema_metadata(None), meta, str(file))
    except (UserError, *_ODD) as error:
        why = error.reason if isinstance(error, UserError) else str(error)
        raise UserError(
            f"{file} is no footprint",
            f"it has no {error.args[0]!r}" if isinstance(error, KeyError) else why,
            "Write one with smaragdine account … -o footprint.parquet",
        ) from None


_ODD = (OSError, pa.ArrowException, ValueError, KeyError, TypeError, AttributeError, msgspec.ValidationError)


def _from_json(values: dict[str, Any], where: str) -> Footprint:
    rows = [
        {**row, "device": device} for device, total in values["devices"].items() for row in total.pop("rows")
    ]
    columns = {name: [row[name] for row in rows] for name in ROWS.names}
    return _footprint(pa.table(columns, schema=ROWS), values, where)


class _Meta(TypedDict):
    devices: dict[str, DeviceTotal]
    without_power: dict[str, int]
    remarks: tuple[str, ...]


def _footprint(rows: pa.Table, meta: Any, where: str) -> Footprint:
    """Checks what was read: others will add it up, and look for the total of each row's device."""
    told = msgspec.convert(meta, _Meta)
    rows = rows.cast(ROWS)
    for field_ in ROWS:
        values = rows[field_.name]
        if field_.name in _NEEDED:
            refuse(where, field_.name, values.is_null().to_numpy(), "is missing")
        if pa.types.is_floating(field_.type):
            numbers = np.abs(values.fill_null(0.0).to_numpy())
            odd = ~(numbers <= _MOST) | ((numbers > 0) & (numbers < _LEAST))
            refuse(where, field_.name, odd, "is beyond what can be")
    alone = pc.invert(pc.is_in(rows["device"], pa.array(list(told["devices"]), pa.string())))
    refuse(where, "device", alone.to_numpy(), "has no total")
    for device, total in told["devices"].items():
        figures = [value for value in dataclasses.astuple(total) if isinstance(value, int | float)]
        if any(abs(value) > _MOST for value in figures):
            raise ValueError(f"a figure of {device} is beyond what can be")
    return Footprint(rows, told["devices"], told["without_power"], told["remarks"])


_NEEDED = ("device", "name", "energy_j", "busy_s", "count")
_LEAST = 1e-100  # parts of less would round to nothing
_MOST = 1e15  # J, s and counts: more than a thousand machines use in their life


# Rows of footprints: which belong together, their sums, and their order.


@dataclass(frozen=True)
class Groups:
    """Groups of rows with the same device, name and phase."""

    of_row: Ints  # row → its group
    leader: Ints  # group → its row with the widest uncertainty
    size: Ints

    def sum(self, values: Floats) -> Floats:
        """If one value of a group is not known (nan), neither is the sum."""
        return np.bincount(self.of_row, weights=values, minlength=self.size.size).astype(np.float64)


def column(rows: pa.Table, name: str) -> Floats:
    """A column of numbers; null becomes nan, so what is not known stays unknown in every sum."""
    return rows[name].to_numpy().astype(np.float64, copy=False)


def numbers(values: Floats) -> pa.Array:
    return pa.array(values, type=pa.float64(), from_pandas=True)


def replace(rows: pa.Table, columns: dict[str, pa.Array]) -> pa.Table:
    for name, values in columns.items():
        rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), values)
    return rows


def group(rows: pa.Table) -> Groups:
    code = np.zeros(rows.num_rows, dtype=np.int64)
    for name in ("device", "name", "phase"):
        texts = rows[name].combine_chunks().dictionary_encode(null_encoding="encode")
        code = code * max(1, len(texts.dictionary)) + texts.indices.to_numpy(zero_copy_only=False)
    _, of_row, size = np.unique(code, return_inverse=True, return_counts=True)
    width_j = np.nan_to_num(column(rows, "uncertainty_j"), nan=np.inf)
    by_group = np.lexsort((-width_j, of_row))
    first = np.concatenate([[0], np.cumsum(size)[:-1]]).astype(np.int64) if size.size else size
    return Groups(of_row.astype(np.int64), by_group[first], size.astype(np.int64))


def combine(rows: pa.Table, groups: Groups) -> pa.Table:
    """One row for each group.

    Uncertainties simply add up here; `grouping` knows what cancels. The sum rests on what its least certain
    part rests on. What the parts cost per step adds up; how far the sum spreads over steps does not follow
    from the parts, so it is left open.
    """
    alone = groups.size == 1
    summed = {
        name: numbers(groups.sum(column(rows, name)))
        for name in ("energy_j", "busy_s", "count", "uncertainty_j", "step_mean_j")
    }
    spread_j = np.where(alone, column(rows, "step_std_j")[groups.leader], np.nan)
    return replace(rows.take(pa.array(groups.leader)), {**summed, "step_std_j": numbers(spread_j)})


def ordered(rows: pa.Table, devices: Iterable[str]) -> pa.Table:
    """Devices in the given order, each with its most energy first; ties by name, so the order is unique."""
    known = {device: i for i, device in enumerate(devices)}
    texts = rows["device"].combine_chunks().dictionary_encode()
    rank = pa.array([known.get(device, len(known)) for device in texts.dictionary.to_pylist()], pa.int32())
    order = [
        ("rank", "ascending"),
        ("device", "ascending"),
        ("energy_j", "descending"),
        ("name", "ascending"),
        ("phase", "ascending"),
    ]
    return rows.append_column("rank", rank.take(texts.indices)).sort_by(order).drop_columns(["rank"])


Sort = Literal["energy", "power", "time", "count"]

_SORTED = {"energy": "energy_j", "time": "busy_s", "count": "count"}


def in_order(footprint: Footprint, sort: Sort) -> Footprint:
    """Each device's rows with the highest energy, mean power, busy time or count first."""
    rows = footprint.rows
    if sort == "power":
        busy_s, energy_j = column(rows, "busy_s"), column(rows, "energy_j")
        key = np.divide(energy_j, busy_s, out=np.full(len(busy_s), -1.0), where=busy_s > 0)
    else:
        key = column(rows, _SORTED[sort])
    rank = {device: i for i, device in enumerate(footprint.devices)}
    device = np.array([rank.get(name, len(rank)) for name in rows["device"].to_pylist()], dtype=np.int64)
    return dataclasses.replace(footprint, rows=rows.take(pa.array(np.lexsort((-key, device)))))
