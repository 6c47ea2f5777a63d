"""Accounts events with power: shares each device's energy among the operations that ran on it.

`account` gives the footprint, `event_energies_j` the energy of every single event; rows are sums of these.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from smaragdine.accounting.calibrated import (
    BASIS,
    MODEL,
    Attribution,
    Calibration,
    by_calls,
    closure_remark,
    refused_remark,
)
from smaragdine.accounting.device_power import (
    DevicePower,
    DevicePowers,
)
from smaragdine.accounting.footprint import ROWS, DeviceTotal, Footprint, numbers, ordered, replace
from smaragdine.accounting.gpu_idle import busy_spans, sharpen, without_idle
from smaragdine.accounting.integral import (
    CHUNK,
    Chunk,
    Levels,
    chunks,
    in_threads,
    levels,
    share,
    sum_by,
    sweep_for,
)
from smaragdine.accounting.intervals import (
    Joint,
    joint_of,
    joint_of_calls,
    row_half_widths_j,
    sum_half_width_j,
)
from smaragdine.accounting.ledger import (
    Columns,
    Entry,
    Ledger,
    blocks,
    columns,
    device_counts,
    entry,
    entry_compiled,
)
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.precision import Score, asss
from smaragdine.accounting.spans import Spans
from smaragdine.accounting.uncertainty import (
    PRIOR,
    Kinship,
    Look,
    Windows,
    combine,
    infer,
    join,
    sensor_of,
    windows,
)
from smaragdine.arrays import Floats, Ints
from smaragdine.arrow import pc
from smaragdine.errors import UserError

CONSERVED_TO = 1e-9
APART_NS = 60_000_000_000  # if they are farther apart, they are not of one run
_NUMBER = re.compile(r"(_\d+)+$")
SAMPLED_CHUNKS = 2  # show how operations mix; to sample all would take several times as long


def account(
    events: pa.Table | Columns, power: Mapping[str, PowerTrace | DevicePower], narrowed: bool = True
) -> Footprint:
    """The footprint of `events` (schema EVENTS, or `columns` of it), given the power of each device.

    Time in which a device's power is not known counts as missing and costs nothing. Events of devices without
    power are counted and left out. `narrowed` looks at what the sensor saw, to make the error bars as narrow
    as it allows; that takes several times as long.
    """
    source = events if isinstance(events, Columns) else columns(events)
    counts = device_counts(source)
    without = {device: count for device, count in counts.items() if device not in power}
    if counts and len(without) == len(counts):
        raise UserError(
            "events and power have no device in common",
            f"events are of {_few(counts)}, power of {_few(power)}",
            "Rename the devices in one of them",
        )
    meters = {d: m if isinstance(m, DevicePower) else DevicePower(m, sensor_of(m)) for d, m in power.items()}
    done = {
        device: _account_device(source, device, meter, counts.get(device, 0), narrowed)
        for device, meter in meters.items()
    }
    rows = pa.concat_tables([table for table, *_ in done.values()]) if done else ROWS.empty_table()
    totals = {device: total for device, (_, total, _) in done.items()}
    joints = {device: joint for device, (*_, joint) in done.items() if joint is not None}
    found = Footprint(rows, totals, without, (), joints)
    whole = {
        device: dataclasses.replace(total, uncertainty_j=sum_half_width_j(found, device))
        for device, total in totals.items()
    }
    return dataclasses.replace(found, devices=whole)


def check_times(source: Columns, traces: Sequence[PowerTrace]) -> None:
    """Raises `UserError` if events and power have no time in common: another run, hour or unit."""
    known = [trace for trace in traces if trace.start_ns.size]
    begin_ns = min((int(trace.start_ns[0]) for trace in known), default=source.first_ns)
    end_ns = max((int(trace.end_ns[-1]) for trace in known), default=source.last_ns)
    apart_ns = max(begin_ns - source.last_ns, source.first_ns - end_ns)
    if not source.table.num_rows or not known or apart_ns <= 0:
        return
    what = "events and power have no time in common"
    why = f"events {_when(source.first_ns, source.last_ns)}, power {_when(begin_ns, end_ns)}"
    remedy = "Let the log begin before the first event and end after the last"
    if apart_ns > APART_NS:
        remedy = "Both must be in Unix nanoseconds, of the same run; nvidia-smi's local times need --tz"
    raise UserError(what, why, remedy)


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def account_meters(events: pa.Table, meters: DevicePowers) -> Footprint:
    source = columns(events)
    check_times(source, [meters.of[device].trace for device in device_counts(source) if device in meters.of])
    found = account(source, meters.of)
    found = dataclasses.replace(found, remarks=(*found.remarks, *meters.remarks))
    for device, meter in meters.of.items():
        if meter.calibration is not None and found.device_rows(device).num_rows:
            found = _with_calibration(found, events, device, meter, meter.calibration)
    return found


def thinned(events: pa.Table, meters: DevicePowers, ks: Sequence[int]) -> dict[str, list[Score]]:
    """The paper's ASSS per device: how alike the footprint stays if only every k-th reading is kept."""
    source = columns(events)
    there = [device for device in device_counts(source) if device in meters.of]
    return {device: _thinned(source, device, meters.of[device], ks) for device in there}


def _thinned(source: Columns, device: str, meter: DevicePower, ks: Sequence[int]) -> list[Score]:
    def account_one(traces: Mapping[str, PowerTrace]) -> Footprint:
        meters = {device: DevicePower(traces[device], meter.sensor, idle_w=meter.idle_w)}
        return account(source, meters, narrowed=False)  # only energies are compared

    return asss(account_one, {device: meter.trace}, ks, meter.readings)


def _when(begin_ns: int, end_ns: int) -> str:
    return " to ".join(f"{str(np.datetime64(t_ns, 'ns'))[:23]}Z" for t_ns in (begin_ns, end_ns))


def _account_device(
    source: Columns, device: str, meter: DevicePower, events: int, narrowed: bool
) -> tuple[pa.Table, DeviceTotal, Joint | None]:
    trace = meter.trace
    ledger, looks = _integrate(source, device, meter, events, narrowed)
    total_j = float((trace.power_w * (trace.end_ns - trace.start_ns)).sum() / 1e9)
    rows_j = float(ledger.energy_j.sum())
    if abs(rows_j + ledger.idle_j - total_j) > CONSERVED_TO * max(total_j, 1e-300):
        raise ArithmeticError(f"{device}: {rows_j} J of events + {ledger.idle_j} J idle are not {total_j} J")
    widths = combine(looks, ledger, meter.sensor)
    uncertainty_j, basis = widths.half_width_j, widths.basis
    if not trace.start_ns.size:
        uncertainty_j = np.full_like(uncertainty_j, np.nan)  # not measured, so not zero
    key = np.flatnonzero(ledger.count)
    key = key[np.argsort(-ledger.energy_j[key], kind="stable")]
    name, phase = source.key_names(key)
    stepped = ledger.steps > 0
    table = pa.table(
        {
            "device": pa.repeat(pa.scalar(device, pa.string()), key.size),
            "name": pa.array(name, pa.string()),
            "phase": pa.array(phase, pa.string()),
            "energy_j": ledger.energy_j[key],
            "busy_s": ledger.busy_ns[key] / 1e9,
            "count": ledger.count[key].astype(np.float64),
            "uncertainty_j": numbers(uncertainty_j[key]),
            "basis": pa.array([basis[k] for k in key], pa.string()),
            "step_mean_j": pa.array(ledger.step_mean_j[key], mask=np.full(key.size, not stepped)),
            "step_std_j": pa.array(ledger.step_std_j()[key], mask=np.full(key.size, ledger.steps < 2)),
        },
        schema=ROWS,
    )
    covered_s, missing_s = _coverage(trace, meter.spans, ledger.first_ns, ledger.last_ns)
    total = DeviceTotal(
        total_j=total_j,
        idle_j=ledger.idle_j,
        covered_s=covered_s,
        missing_s=missing_s,
        steps=ledger.steps,
        other_j=meter.other_j,
        static_j=meter.static_j,
        provenance=meter.provenance,
        foreign=meter.foreign,
    )
    return table, total, joint_of(looks, widths, ledger, key, list(zip(name, phase, strict=True)))


def _kinship(source: Columns) -> Kinship:
    """Operations are of one kind if their paths end alike: `MatMul` and `MatMul_1` are."""
    name, phase = np.divmod(np.arange(source.keys), len(source.phases) + 1)
    kinds = [_NUMBER.sub("", name.rpartition("/")[2]) for name in source.names]
    _, kind = np.unique(kinds, return_inverse=True) if kinds else ([], np.zeros(0, dtype=np.int64))
    return Kinship(kind[name], phase)


def power_of(source: Columns, device: str, meter: DevicePower) -> Levels:
    """A device's power, sharpened if we know what it draws when idle."""
    if meter.idle_w is None or device not in source.devices:
        return levels(meter.trace)
    parts = list(blocks(source, device))
    start_ns = np.concatenate([part.start_ns for part in parts])
    end_ns = np.concatenate([part.end_ns for part in parts])
    return levels(sharpen(meter.trace, busy_spans(start_ns, end_ns), meter.idle_w, meter.sensor.limit_w))


def _integrate(
    source: Columns, device: str, meter: DevicePower, events: int, narrowed: bool
) -> tuple[Ledger, list[Look]]:
    read, keys, sensor = levels(meter.trace), source.keys, meter.sensor
    power = power_of(source, device, meter)
    # Once with the clocks as they are, then with power moved either way by as much as they may disagree.
    moved_ns = [0, -sensor.timing_ns, sensor.timing_ns] if narrowed else []
    ledger = Ledger(keys)
    seen: list[list[Windows]] = [[] for _ in moved_ns]
    here = blocks(source, device) if device in source.devices else iter(())
    edges_ns = power.edge_ns[[0, -1]].tolist() if power.edge_ns.size else []
    spans_ns = [*edges_ns, *([source.first_ns, source.last_ns] if source.table.num_rows else [])] or [0]
    every = max(1, events // (CHUNK * SAMPLED_CHUNKS))

    sweep = sweep_for(source.table.num_rows)

    def work(numbered: tuple[int, Chunk]) -> tuple[Entry, list[Windows]]:
        number, chunk = numbered
        sampled = number % every == 0 and chunk.start_ns.size and edges_ns
        seen_here = [windows(chunk, read, by, sensor.window_ns, keys) for by in moved_ns] if sampled else []
        added = entry_compiled(chunk, power, keys, sweep) if sweep else None
        return added or entry(chunk, power, keys), seen_here

    for added, seen_here in in_threads(work, enumerate(chunks(here, min(spans_ns), max(spans_ns)))):
        ledger.add(added)
        for all_seen, part in zip(seen, seen_here, strict=False):
            all_seen.append(part)
    ledger.close()
    joined = [join(parts) for parts in seen if parts]
    if meter.idle_w is not None:
        joined = [without_idle(each, meter.idle_w, sensor.limit_w) for each in joined]
    kin = _kinship(source)
    return ledger, [infer(each, sensor, keys, kin) for each in joined if each.energy_j.size]


def _coverage(trace: PowerTrace, spans: Spans | None, first_ns: int, last_ns: int) -> tuple[float, float]:
    """Seconds in which power is known, and seconds in which it should be but is not: within `spans` or,
    without them, between the first and the last of power and events."""
    covered_ns = int((trace.end_ns - trace.start_ns).sum())
    if spans is None:
        edges = [*trace.start_ns[:1].tolist(), *trace.end_ns[-1:].tolist()]
        edges += [first_ns, last_ns] if first_ns <= last_ns else []
        spans = [(min(edges), max(edges))] if edges else []
    asked_ns = sum(end_ns - begin_ns for begin_ns, end_ns in spans)
    return covered_ns / 1e9, (asked_ns - covered_ns) / 1e9


def event_energies_j(events: pa.Table, meters: DevicePowers) -> Floats:
    """The energy of every event, in the order of the table; nan where power is not known while it ran.

    If other events of the same lane lie inside an event, it keeps what they leave.
    """
    numbers = pa.array(np.arange(events.num_rows))
    # Nobody needs the steps here, so each event's number travels in their column.
    source = columns(events.set_column(events.schema.get_field_index("step"), "step", numbers))
    energy_j = np.full(events.num_rows, np.nan)
    for device in device_counts(source):
        if device in meters.of:
            _add_device(energy_j, source, device, meters.of[device])
    for device, meter in meters.of.items():
        if meter.calibration is not None:
            rows, found = _by_calls(events, device, meter, meter.calibration)
            if found is not None:
                energy_j[rows] = np.where(np.isnan(energy_j[rows]), np.nan, found.energy_j)
    return energy_j


def _add_device(energy_j: Floats, source: Columns, device: str, meter: DevicePower) -> None:
    power = power_of(source, device, meter)
    edges_ns = power.edge_ns[[0, -1]].tolist() if power.edge_ns.size else []
    begin_ns, until_ns = min([source.first_ns, *edges_ns]), max([source.last_ns, *edges_ns])
    parts = chunks(blocks(source, device), begin_ns, until_ns)
    for chunk, shares in in_threads(lambda chunk: (chunk, share(chunk, power)), parts):
        count = chunk.start_ns.size
        added_j = sum_by(shares.of_pieces(np.arange(count)), shares.energy_j, count)
        known_ns = meter.trace.covered_until_ns(chunk.end_ns) - meter.trace.covered_until_ns(chunk.start_ns)
        # An event of no length uses nothing, even if no power is known.
        some = (known_ns > 0) | (chunk.end_ns == chunk.start_ns)
        rows = chunk.step[some]
        energy_j[rows] = np.nan_to_num(energy_j[rows]) + added_j[some]


# Devices whose calls were replayed: the same energy by what each call draws alone.


def _by_calls(
    events: pa.Table, device: str, meter: DevicePower, calibration: Calibration
) -> tuple[Ints, Attribution | None]:
    """Which events are of the device, and the energy of each by its call; None where replays do not fit."""
    rows = np.flatnonzero(pc.equal(events["device"].cast(pa.string()), device).to_numpy())
    mine = events.take(pa.array(rows))
    trace = meter.trace
    one_watt = dataclasses.replace(trace, power_w=np.ones_like(trace.power_w))
    share_s = event_energies_j(mine, DevicePowers({device: DevicePower(one_watt, meter.sensor)}))
    start_ns = mine["start_ns"].to_numpy()
    until_ns = start_ns + mine["duration_ns"].to_numpy()
    busy_s = np.asarray(trace.covered_until_ns(until_ns) - trace.covered_until_ns(start_ns)) * 1e-9
    busy_s = busy_s.astype(np.float64)
    length_s = (trace.end_ns - trace.start_ns) * 1e-9
    return rows, by_calls(
        mine["call"].fill_null(-1).to_numpy(),
        busy_s,
        np.nan_to_num(share_s),
        float((trace.power_w * length_s).sum()),
        float(length_s.sum()),
        meter.idle_w,
        calibration,
        meter.untraced,
    )


def _with_calibration(
    footprint: Footprint, events: pa.Table, device: str, meter: DevicePower, calibration: Calibration
) -> Footprint:
    at, found = _by_calls(events, device, meter, calibration)
    if found is None:
        return dataclasses.replace(footprint, remarks=(*footprint.remarks, refused_remark(device)))
    mine, others = (
        footprint.rows.filter(test) for test in (pc.field("device") == device, pc.field("device") != device)
    )
    names = list(zip(mine["name"].to_pylist(), mine["phase"].to_pylist(), strict=True))
    place = {name: i for i, name in enumerate(names)}
    texts = (events[column].take(pa.array(at)).to_pylist() for column in ("name", "phase"))
    row = np.array([place[both] for both in zip(*texts, strict=True)], dtype=np.int64)
    call = events["call"].take(pa.array(at)).fill_null(-1).to_numpy()
    joint = joint_of_calls(found, call, row, len(names), names)
    energy_j = sum_by(row, found.energy_j, len(names))
    known_j, guessed_j = (
        sum_by(row[which], found.energy_j[which], len(names)) for which in (found.replayed, found.modelled)
    )
    told = np.where(known_j >= guessed_j, BASIS, MODEL)
    basis = np.where(known_j + guessed_j >= energy_j / 2, told, PRIOR)
    mean_j, std_j = _over_steps(events["step"].take(pa.array(at)), row, found.energy_j, len(names))
    rows = replace(
        mine,
        {
            "energy_j": pa.array(energy_j),
            "uncertainty_j": numbers(row_half_widths_j(joint)),
            "basis": pa.array(basis.tolist(), pa.string()),
            "step_mean_j": numbers(mean_j),
            "step_std_j": numbers(std_j),
        },
    )
    total = dataclasses.replace(footprint.devices[device], idle_j=found.idle_j)
    shown = dataclasses.replace(
        footprint,
        rows=ordered(pa.concat_tables([others, rows]), footprint.devices),
        devices={**footprint.devices, device: total},
        remarks=(*footprint.remarks, closure_remark(device, found), *calibration.remarks),
        joints={**footprint.joints, device: joint},
    )
    whole = dataclasses.replace(total, uncertainty_j=sum_half_width_j(shown, device))
    return dataclasses.replace(shown, devices={**shown.devices, device: whole})


def _over_steps(step: pa.ChunkedArray, row: Ints, energy_j: Floats, rows: int) -> tuple[Floats, Floats]:
    """Mean and standard deviation over steps of every row; nan where there are no steps, or one."""
    known = np.flatnonzero(step.is_valid().to_numpy())
    ids, column = np.unique(step.drop_null().to_numpy(), return_inverse=True)
    if not ids.size:
        return np.full(rows, np.nan), np.full(rows, np.nan)
    sums = sum_by(row[known] * ids.size + column, energy_j[known], rows * ids.size).reshape(rows, ids.size)
    std_j = sums.std(axis=1, ddof=1) if ids.size > 1 else np.full(rows, np.nan)
    return sums.mean(axis=1), std_j
