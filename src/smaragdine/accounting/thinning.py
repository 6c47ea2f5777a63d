"""Thins old readings of a run that goes on: `python -m smaragdine.accounting.thinning RUN`.

The recorder starts it whenever it begins new files. It turns readings some minutes old into stretches of ten
seconds at their mean power. It cuts them at every mark, so the energy of the run, of an epoch and of every
other span between marks stays exactly what it was. What only fine readings tell (who used the power, its
peaks, what regions used) it works out before they go. Readings stay fine where operations were traced, and in
regions that are a small part of the time.

It may be killed at any time: it writes its state last, and until then the readings count.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.accounting.activity import Intervals, fine_activity
from smaragdine.accounting.power import (
    PowerTrace,
    distinct,
    implausible,
    within,
)
from smaragdine.accounting.regions import RegionTimes, named_spans, region_of
from smaragdine.accounting.spans import BOUNDARIES, FEW, far_from_median, is_region, joined, region_pairs
from smaragdine.accounting.split import FineSplit, split_fine
from smaragdine.accounting.summary import PEAK_OVER_NS
from smaragdine.accounting.traces import count_beyond, fine_traces, main_channels
from smaragdine.arrays import Floats, Ints
from smaragdine.arrow import pc
from smaragdine.errors import UserError
from smaragdine.files import read_json
from smaragdine.recording.damage import TableFile
from smaragdine.recording.format import (
    MARKS,
    READING_TABLES,
    TRACES_FOLDER,
    channel_to_dict,
    channels_of,
    readings_schema,
)
from smaragdine.recording.marks import read_spool_until
from smaragdine.recording.reader import Recording, Series, open_recording
from smaragdine.recording.thinned import (
    REGIONS,
    SCHEMAS,
    STEPS,
    STRETCHES,
    Appended,
    State,
    ThinnedDevice,
    appending,
    write_state,
)
from smaragdine.sensors.base import Channel

GRID_NS = 10_000_000_000
KEPT_PIECES = 1  # closed files that stay as they are, besides the one being written
_SETTLED_NS = 30_000_000_000  # later readings may still change the last so many
_AROUND_NS = 5_000_000_000  # around a traced window, which stays fine too
_SMALL_PART = 0.1  # of the time: larger regions do not stay fine
_SLOW_STEP_NS = 5_000_000_000  # if steps take longer on average, each keeps its own energy
_EACH_TIME = 600  # times of a region between two cuts; if there are more, only their sum is kept
_WARM = 3  # a process's first steps compile and allocate
_OVER = ("end_ns", "resumed_ns", "stopped_ns")  # of a window
_LONGEST_US = (1 << 32) - 1


def thin(folder: Path) -> bool:
    """Thins a recording once; whether there was anything to thin."""
    recording = open_recording(folder)
    before = None if recording.thinned is None else recording.thinned.state
    last = _last_file(recording)
    if last is None:
        return False
    recording = recording.only(lambda file: (file.segment, file.piece) <= last)
    cut_ns = _cut_ns(recording, last)
    if cut_ns is None or (before is not None and cut_ns <= before.cut_ns):
        return False
    traces = fine_traces(recording)
    sockets = fine_activity(recording)
    splits = split_fine(recording, traces, sockets)
    marks, spool = read_spool_until(folder, {} if before is None else before.spool, cut_ns)
    devices = list(dict.fromkeys([*(before.devices if before is not None else ()), *traces]))
    since_ns = None if before is None else before.cut_ns
    windows = _windows(recording)
    regions = named_spans(marks)  # those that begin and end here; the others' marks stay
    begin_ns = recording.info.get("begin_ns", cut_ns) if since_ns is None else since_ns
    kept = _kept(windows, regions, begin_ns, cut_ns)
    steps, marks = _steps(_without_regions(marks), before, windows)
    # A stretch ends at every mark that stays, and where special steps begin and end.
    cuts_ns = distinct(np.concatenate([marks["t_ns"].to_numpy(), *steps.edges_ns]).astype(np.int64))
    telemetry = _telemetry(recording)
    with appending(folder, before, {**SCHEMAS, "telemetry": readings_schema(telemetry)}) as added:
        for number, device in enumerate(devices):
            if device in traces:
                table = _stretches(
                    number, traces[device], splits.get(device), since_ns, cut_ns, cuts_ns, kept
                )
                added.write("stretches", table)
        added.write("steps", steps.table)
        added.write("regions", _region_rows(regions, traces, splits, devices))
        added.write("marks", marks)
        _write_telemetry(added, recording, telemetry, since_ns, cut_ns)
    state = State(
        cut_ns=cut_ns,
        devices={
            device: _device(recording, device, traces.get(device), splits.get(device), before, cut_ns)
            for device in devices
        },
        sockets=_sockets(sockets, before, cut_ns),
        spool=spool,
        files=added.positions,
        gone={} if before is None else before.gone,
        steps=steps.ends,
        beyond=count_beyond(recording, cut_ns),
        problems=[*(before.problems if before is not None else ()), *_damage(recording, before)],
    )
    needless = _needless(recording, state)
    gone = {str(file.segment): file.piece for file in needless}  # the last file of each restart
    write_state(folder, msgspec.structs.replace(state, gone=state.gone | gone))
    _remove(needless)
    return True


def _last_file(recording: Recording) -> tuple[int, int] | None:
    """The last file to be thinned: after it come some that stay, and the one being written."""
    places = [(file.segment, file.piece) for table in READING_TABLES for file in recording.files(table)]
    segment, piece = max(places, default=(0, 0))
    piece -= 1 + KEPT_PIECES
    return (segment, piece) if piece >= 0 else None


def _cut_ns(recording: Recording, last: tuple[int, int]) -> int | None:
    """The time up to which readings are thinned: nothing that comes after it can change what is before it."""
    ends_ns = [
        end_ns
        for table in ("power", "activity")
        for file in recording.files(table)
        if (file.segment, file.piece) == last and (end_ns := _last_ns(file)) is not None
    ]
    return (min(ends_ns) - _SETTLED_NS) // GRID_NS * GRID_NS if ends_ns else None


def _last_ns(file: TableFile) -> int | None:
    batch = file.last_batch()
    return None if batch is None or not batch.num_rows else pc.max(batch["t_ns"]).as_py()


# When readings stay fine.


def _windows(recording: Recording) -> list[tuple[int, int]]:
    """When the profiler ran: from its notes beside its files, and from windows that were read already."""
    notes: list[Any] = recording.windows.select(["asked_ns", *_OVER]).to_pylist()
    for path in sorted((recording.path / TRACES_FOLDER).glob("*.meta.json")):
        with contextlib.suppress(OSError, ValueError):
            notes.append(read_json(path))
    found: list[tuple[int, int]] = []
    for note in notes:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            over_ns = max(int(note[name] or 0) for name in _OVER)
            found.append((int(note["asked_ns"]) - _AROUND_NS, over_ns + _AROUND_NS))
    return joined(found)


def _kept(
    windows: Sequence[tuple[int, int]],
    regions: Mapping[str, Sequence[tuple[int, int]]],
    since_ns: int,
    cut_ns: int,
) -> list[tuple[int, int]]:
    named = joined([span for spans in regions.values() for span in spans])
    if sum(end - begin for begin, end in named) > _SMALL_PART * (cut_ns - since_ns):
        named = []
    return joined([*windows, *named])


# Power.


def _stretches(
    number: int,
    trace: PowerTrace,
    split: FineSplit | None,
    since_ns: int | None,
    cut_ns: int,
    marks_ns: Ints,
    kept: Sequence[tuple[int, int]],
) -> pa.Table:
    """One device's rows: its power between `since_ns` and `cut_ns`."""
    bounds = (int(trace.start_ns[0]) if trace.start_ns.size else 0) if since_ns is None else since_ns, cut_ns
    own = within(trace, [bounds])
    if not own.start_ns.size:
        return STRETCHES.empty_table()
    grid_ns = np.arange(bounds[0] // GRID_NS * GRID_NS, cut_ns + 1, GRID_NS)
    # What stays fine is not cut finer than readings.
    outside = [_outside(np.concatenate([grid_ns, marks_ns]), kept)]
    edges = [np.array(bounds), *outside, *_gaps(own)]
    if split is not None:
        edges += _gaps(within(split.program, [bounds]))
    for each in (trace, split.program) if split is not None else (trace,):
        edges += [t for span in kept for t in _edges_within(each, span)]
    cuts_ns = distinct(np.concatenate(edges).astype(np.int64))
    cuts_ns = cuts_ns[(cuts_ns >= bounds[0]) & (cuts_ns <= bounds[1])]
    length_ns = np.diff(cuts_ns)
    rows = np.flatnonzero(np.diff(trace.covered_until_ns(cuts_ns)) == length_ns)
    length_s = length_ns[rows] * 1e-9
    start_ns, end_ns = cuts_ns[:-1][rows], cuts_ns[1:][rows]

    def mean(of: PowerTrace) -> Floats:
        return np.diff(of.energy_until_j(cuts_ns))[rows] / length_s

    nothing = np.full(rows.size, np.nan)
    columns = {
        "device": np.full(rows.size, number, dtype=np.int16),
        "start_ns": start_ns,
        "end_ns": end_ns,
        "power_w": mean(trace),
    }
    names = ("program_w", "static_w", "monitor_w", "unseen_w", "occupied", "monitor", "foreign")
    if split is None:
        columns |= dict.fromkeys(names, nothing)
    else:
        known = (np.diff(split.program.covered_until_ns(cuts_ns)) == length_ns)[rows]
        parts = ("program", "static", "monitor", "unseen", "occupied", "monitored", "foreign")
        for name, part in zip(names, parts, strict=True):
            columns[name] = np.where(known, mean(getattr(split, part)), np.nan)
    columns["peak_w"], columns["highest_w"] = _peaks(trace, start_ns, end_ns, marks_ns)
    return pa.table(columns, schema=STRETCHES)


def _outside(t_ns: Ints, spans: Sequence[tuple[int, int]]) -> Ints:
    """Instants outside of these spans, which are in order and disjoint."""
    begin_ns, end_ns = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    return t_ns[np.searchsorted(begin_ns, t_ns, side="left") == np.searchsorted(end_ns, t_ns, side="right")]


def _gaps(trace: PowerTrace) -> list[Ints]:
    """Where a trace begins, ends, and begins again."""
    apart = np.flatnonzero(trace.start_ns[1:] != trace.end_ns[:-1])
    return [trace.start_ns[:1], trace.end_ns[-1:], trace.end_ns[apart], trace.start_ns[apart + 1]]


def _edges_within(trace: PowerTrace, span: tuple[int, int]) -> list[Ints]:
    return [edge[(edge >= span[0]) & (edge <= span[1])] for edge in (trace.start_ns, trace.end_ns)] + [
        np.array(span)
    ]


def _peaks(trace: PowerTrace, start_ns: Ints, end_ns: Ints, marks_ns: Ints) -> tuple[Floats, Floats]:
    """The highest mean over 100 ms that begin in each stretch: up to the next mark, and beyond it."""
    # As in `summary.peak_w`, the highest mean begins or ends at an edge or a mark.
    begin_ns = np.sort(
        np.concatenate([trace.start_ns, trace.end_ns - PEAK_OVER_NS, marks_ns, marks_ns - PEAK_OVER_NS]),
        kind="stable",
    )
    begin_ns = begin_ns[(begin_ns >= start_ns[0]) & (begin_ns < end_ns[-1])]
    stretch = np.searchsorted(start_ns, begin_ns, side="right") - 1
    begin_ns, stretch = (each[begin_ns < end_ns[stretch]] for each in (begin_ns, stretch))
    covered_ns = trace.covered_until_ns(begin_ns + PEAK_OVER_NS) - trace.covered_until_ns(begin_ns)
    used_j = trace.energy_until_j(begin_ns + PEAK_OVER_NS) - trace.energy_until_j(begin_ns)
    known = covered_ns >= 0.9 * PEAK_OVER_NS
    mean_w = np.where(known, used_j / np.maximum(covered_ns, 1) * 1e9, -np.inf)
    over = np.searchsorted(marks_ns, begin_ns, side="right") != np.searchsorted(
        marks_ns, begin_ns + PEAK_OVER_NS, side="left"
    )
    inside_w = np.where(over, -np.inf, mean_w)
    return _highest(stretch, inside_w, start_ns.size), _highest(stretch, mean_w, start_ns.size)


def _highest(of: Ints, value: Floats, count: int) -> Floats:
    found = np.full(count, -np.inf)
    np.maximum.at(found, of, value)
    return np.where(np.isfinite(found), found, np.nan)


# Steps.


Who = tuple[int | None, int | None, str | None]  # rank, process, source


@dataclass(frozen=True)
class KeptSteps:
    table: pa.Table
    ends: list[tuple[int | None, int | None, str | None, int, int]]
    edges_ns: list[Ints]  # of steps that keep their own energy, and of runs


def _steps(
    marks: pa.Table, before: State | None, windows: Sequence[tuple[int, int]]
) -> tuple[KeptSteps, pa.Table]:
    """Finds runs of steps that are like the others, and drops their marks."""
    known: dict[Who, tuple[int, int | None]] = {
        (rank, pid, source): (count, last_ns)
        for rank, pid, source, count, last_ns in (before.steps if before else ())
    }
    is_end = pc.equal(marks["name"], "step_end").to_numpy(zero_copy_only=False)
    t_ns, index = marks["t_ns"].to_numpy(), marks["index"].fill_null(-1).to_numpy()
    columns = (marks[name].to_pylist() for name in ("rank", "pid", "source"))
    who = list(zip(*columns, strict=True))
    places: dict[Who, list[int]] = {}
    for i in np.flatnonzero(is_end).tolist():
        places.setdefault(who[i], []).append(i)
    boundary = pc.is_in(marks["name"], pa.array(sorted(BOUNDARIES))).to_numpy(zero_copy_only=False)
    stays = np.ones(t_ns.size, dtype=np.bool_)
    rows: list[dict[str, Any]] = []
    edges_ns: list[Ints] = []
    for of, at in places.items():
        rank, pid, source = of
        count, last_ns = known.get(of, (0, None))
        rows_at = np.array(at)
        ends_ns = t_ns[rows_at]
        begins_ns = np.concatenate([[ends_ns[0] if last_ns is None else last_ns], ends_ns[:-1]])
        known[of] = count + len(at), int(ends_ns[-1])
        mine = [i for i in np.flatnonzero(boundary).tolist() if who[i][1] == pid]
        plain = _plain(begins_ns, ends_ns, t_ns[mine], windows)
        plain[: max(_WARM - count, 0)] = False
        if np.mean(ends_ns - begins_ns) >= _SLOW_STEP_NS:
            continue  # there are few: each keeps its mark and its energy
        far = far_from_median(ends_ns - begins_ns)
        special = ~plain | (far if far.sum() <= FEW * far.size else False)
        edges_ns += [begins_ns[special], ends_ns[special]]
        for run in _runs(plain, index[rows_at]):
            lengths_us = np.diff(np.append(begins_ns[run[0]], ends_ns[run]) // 1000)
            edges_ns.append(np.array([begins_ns[run[0]], ends_ns[run[-1]]]) // 1000 * 1000)
            rows.append(
                {
                    "rank": rank,
                    "pid": pid,
                    "source": source,
                    "first_index": None if index[rows_at[run[0]]] < 0 else int(index[rows_at[run[0]]]),
                    "begin_ns": int(begins_ns[run[0]] // 1000 * 1000),
                    "lengths_us": lengths_us.astype(np.uint32),
                }
            )
            stays[rows_at[run]] = False
    ends = [(*of, count, int(last_ns or 0)) for of, (count, last_ns) in known.items()]
    table = pa.Table.from_pylist(rows, schema=STEPS)
    return KeptSteps(table, ends, edges_ns), marks.filter(pa.array(stays))


def _plain(
    begins_ns: Ints, ends_ns: Ints, boundaries_ns: Ints, windows: Sequence[tuple[int, int]]
) -> npt.NDArray[np.bool_]:
    """Steps in which nothing else begins or ends, away from traced ones."""
    plain = np.searchsorted(boundaries_ns, begins_ns) == np.searchsorted(boundaries_ns, ends_ns)
    for begin_ns, end_ns in windows:
        plain &= (ends_ns < begin_ns) | (begins_ns > end_ns)
    length_ns = ends_ns - begins_ns
    return plain & (length_ns >= 0) & (length_ns // 1000 < _LONGEST_US)


def _runs(plain: npt.NDArray[np.bool_], index: Ints) -> Iterator[Ints]:
    """Runs of two or more plain steps that follow each other, with rising numbers or none."""
    rising = np.concatenate([[False], (np.diff(index) == 1) | ((index[1:] < 0) & (index[:-1] < 0))])
    begins = plain & ~(rising & np.concatenate([[False], plain[:-1]]))
    number = np.cumsum(begins)[plain]
    for run in np.split(np.flatnonzero(plain), np.flatnonzero(np.diff(number)) + 1):
        if run.size > 1:
            yield run


# Regions.


def _without_regions(marks: pa.Table) -> pa.Table:
    """Drops marks of regions that both begin and end among these marks."""
    own = np.flatnonzero(is_region(marks).to_numpy(zero_copy_only=False))
    stays = np.ones(marks.num_rows, dtype=np.bool_)
    for pair in region_pairs(marks.take(pa.array(own))):
        stays[own[list(pair)]] = False
    return marks.filter(pa.array(stays)).select(MARKS.names).cast(MARKS)


def _region_rows(
    regions: Mapping[str, Sequence[tuple[int, int]]],
    traces: Mapping[str, PowerTrace],
    splits: Mapping[str, FineSplit],
    devices: Sequence[str],
) -> pa.Table:
    adding = [device for device in traces if device in splits or device.startswith("gpu:")]
    parts = [splits[device].program if device in splits else traces[device] for device in adding]
    unseen = [splits[device].unseen for device in adding if device in splits]
    rows: list[dict[str, Any]] = []
    for name, spans in regions.items():
        for each in [spans, *([span] for span in spans if len(spans) <= _EACH_TIME)]:
            found = region_of(name, each, traces, parts)
            more = region_of(name, each, {}, unseen) if unseen else None
            rows.append(_region_row(found, more, devices, len(spans) if each is spans else 0))
    return pa.Table.from_pylist(rows, schema=REGIONS)


def _region_row(
    found: RegionTimes, more: RegionTimes | None, devices: Sequence[str], count: int
) -> dict[str, Any]:
    return {
        "name": found.name,
        "count": count,
        "begin_ns": min(begin for begin, _ in found.spans_ns),
        "end_ns": max(end for _, end in found.spans_ns),
        "duration_s": found.duration_s,
        "energies_j": [found.total_j.get(device) for device in devices],
        "program_j": found.program_j,
        "unseen_j": None if more is None else more.program_j,
    }


# Telemetry.


def _telemetry(recording: Recording) -> list[Channel]:
    """Channels, named as in the table that is there already."""
    file = None if recording.thinned is None else recording.thinned.file("telemetry")
    if file is not None:
        return channels_of(next(iter(file.batches())).schema)
    return [series.channel for series in recording.series("telemetry")]


def _write_telemetry(
    added: Appended, recording: Recording, channels: Sequence[Channel], since_ns: int | None, cut_ns: int
) -> None:
    numbers = {(c.device, c.quantity, c.sensor): i for i, c in enumerate(channels)}
    for series in recording.series("telemetry"):
        of = series.channel
        number = numbers.get((of.device, of.quantity, of.sensor))
        if number is not None:  # None: a restarted monitor found one more
            t_ns, value = _every_ten_seconds(series, since_ns, cut_ns)
            columns = [t_ns, np.full(t_ns.size, number, dtype=np.uint16), value]
            added.write("telemetry", pa.table(columns, schema=readings_schema(channels)))


def _every_ten_seconds(series: Series, since_ns: int | None, cut_ns: int) -> tuple[Ints, Floats]:
    """The mean; for processes and utilisation the most, because what was there once was there."""
    rows = np.flatnonzero((series.t_ns < cut_ns) & (series.t_ns >= (since_ns or 0)))
    t_ns, value = series.t_ns[rows], series.value[rows]
    if not t_ns.size:
        return t_ns, value
    first = np.flatnonzero(np.diff(t_ns // GRID_NS, prepend=-1))
    if series.channel.quantity == "processes" or "utilisation" in series.channel.quantity:
        return t_ns[first], np.maximum.reduceat(value, first)
    return t_ns[first], np.add.reduceat(value, first) / np.diff(np.append(first, t_ns.size))


# The state: all that a reader needs to go on from the cut.


def _device(
    recording: Recording,
    device: str,
    trace: PowerTrace | None,
    split: FineSplit | None,
    before: State | None,
    cut_ns: int,
) -> ThinnedDevice:
    known = None if before is None else before.devices.get(device)
    if trace is None:
        assert known is not None
        return known
    start_ns = _goes_on_from_ns(recording, device, trace, cut_ns)
    anchors = trace.anchors
    past = anchors.factor[: np.searchsorted(anchors.t_ns, start_ns)] if anchors is not None else None
    restarts_ns = trace.restarts_ns[trace.restarts_ns < start_ns].tolist()
    return ThinnedDevice(
        start_ns=start_ns,
        channel=channel_to_dict(main_channels(recording)[device]),
        hold_ns=trace.hold_ns,
        static_w=split.static_w if split is not None else (known.static_w if known else None),
        basis=split.basis if split is not None else (known.basis if known else ""),
        restarts_ns=sorted({*(known.restarts_ns if known else ()), *restarts_ns}),
        anchors=(known.anchors if known else 0) + (past.size if past is not None else 0),
        implausible=(known.implausible if known else 0)
        + (int(implausible(past).sum()) if past is not None else 0),
    )


def _goes_on_from_ns(recording: Recording, device: str, trace: PowerTrace, cut_ns: int) -> int:
    """The last anchor before the cut, or a counter's last reading: from there on figures continue as if
    nothing had been thinned."""
    if trace.anchors is not None and (trace.anchors.t_ns <= cut_ns).any():
        return int(trace.anchors.t_ns[trace.anchors.t_ns <= cut_ns][-1])
    counters = [
        series.t_ns[series.t_ns <= cut_ns]
        for series in recording.series("power")
        if series.channel.device == device and series.channel.quantity == "energy"
    ]
    return min((int(t_ns[-1]) for t_ns in counters if t_ns.size), default=cut_ns)


def _sockets(sockets: Mapping[int, Intervals], before: State | None, cut_ns: int) -> dict[str, int]:
    found = {} if before is None else dict(before.sockets)
    for socket, intervals in sockets.items():
        ended_ns = intervals.start_ns[intervals.start_ns <= cut_ns]
        if ended_ns.size:
            found[str(socket)] = int(ended_ns[-1])
    return found


def _damage(recording: Recording, before: State | None) -> list[str]:
    """Damage of files that go: later nobody could tell."""
    told = set(before.problems if before is not None else ())
    lines = [
        f"{file.path.name} was damaged before it was thinned: energy of that time may be missing"
        for table in READING_TABLES
        for file in recording.files(table)
        if file.found.damaged or not file.found.ended
    ]
    return [line for line in lines if line not in told]


def _needless(recording: Recording, state: State) -> list[TableFile]:
    """Files that nobody needs any more, oldest first."""
    needed_ns = min([state.cut_ns, *(d.start_ns for d in state.devices.values()), *state.sockets.values()])
    needed_ns -= _SETTLED_NS
    by_place: dict[tuple[int, int], list[TableFile]] = {}
    for table in READING_TABLES:
        for file in recording.files(table):
            by_place.setdefault((file.segment, file.piece), []).append(file)
    old = itertools.takewhile(
        lambda files: all((_last_ns(file) or 0) < needed_ns for file in files),
        (files for _, files in sorted(by_place.items())),
    )
    return [file for files in old for file in files]


def _remove(files: Sequence[TableFile]) -> None:
    for file in files:
        file.path.unlink(missing_ok=True)


class _WithoutPandas:
    """Keeps pyarrow from importing pandas, which takes a second, only to ask whose an array is."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ImportError(name)


def main() -> None:
    folder = Path(sys.argv[1])
    os.nice(19)
    sys.meta_path.insert(0, _WithoutPandas())
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        thin(folder)
    except (UserError, OSError) as error:
        sys.exit(f"old readings are not thinned: {error}")


if __name__ == "__main__":
    main()
