"""Measures the regions that a program named: how often each ran, how long, and what each device used
meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from smaragdine.accounting.power import MOST_MISSED, PowerTrace
from smaragdine.accounting.spans import REGION, Spans, joined, region_spans
from smaragdine.errors import visible
from smaragdine.recording.reader import Recording
from smaragdine.sensors.base import Channel
from smaragdine.units import seconds

_MOST_NAMED = 3
_LONGEST_NAME = 40


@dataclass(frozen=True)
class RegionTimes:
    """All times that one region ran. Times of threads or ranks may overlap: each has its own length and
    energy, but sums count every second once, because a device's energy belongs to no single one."""

    name: str
    count: int  # how often it ran
    spans_ns: tuple[tuple[int, int], ...]  # each time, by its beginning; a long run keeps only some
    energies_j: Mapping[str, tuple[float | None, ...]]  # device → energy of each time; None: not measured
    duration_s: float
    total_j: Mapping[str, float | None]  # device → energy of all times together; None: too much was missed
    program_j: float | None = None  # the program's part, of all times together
    programs_j: tuple[float | None, ...] = ()  # the same for each time

    @property
    def short(self) -> str:
        """The name, shortened for tables."""
        return self.name if len(self.name) <= _LONGEST_NAME else self.name[: _LONGEST_NAME - 1] + "…"

    @property
    def lengths_s(self) -> list[float]:
        return [(end_ns - begin_ns) * 1e-9 for begin_ns, end_ns in self.spans_ns]

    def known_j(self, device: str) -> list[float]:
        return [each for each in self.energies_j.get(device, ()) if each is not None]


def regions_of(
    recording: Recording,
    traces: Mapping[str, PowerTrace],
    program: Mapping[str, PowerTrace],
    unseen: float,
) -> list[RegionTimes]:
    """Regions in the order in which they first began. `program` is the program's part of each device's power,
    `unseen` the part it gets of CPU time that nobody is known to have used."""
    parts = list(program.values())
    found = _thinned_regions(recording, list(traces), unseen)
    for name, spans_ns in named_spans(recording.marks).items():
        region = region_of(name, spans_ns, traces, parts)
        found[name] = _both(found[name], region) if name in found else region
    return list(found.values())


def named_spans(marks: pa.Table) -> dict[str, list[tuple[int, int]]]:
    """Region → when it ran, by beginning."""
    by_name: dict[str, list[tuple[int, int]]] = {}
    for span in region_spans(marks):
        by_name.setdefault(span.name, []).append((span.begin_ns, span.end_ns))
    return by_name


def region_of(
    name: str, spans_ns: Spans, traces: Mapping[str, PowerTrace], parts: Sequence[PowerTrace]
) -> RegionTimes:
    once_ns = joined(spans_ns)
    [program_j] = sum_of_each([[_together_j(trace, once_ns)] for trace in parts]) or [None]
    return RegionTimes(
        name,
        len(spans_ns),
        tuple(spans_ns),
        energies_j={device: _energies_j(trace, spans_ns) for device, trace in traces.items()},
        duration_s=sum(end_ns - begin_ns for begin_ns, end_ns in once_ns) * 1e-9,
        total_j={device: _together_j(trace, once_ns) for device, trace in traces.items()},
        program_j=program_j,
        programs_j=sum_of_each([_energies_j(trace, spans_ns) for trace in parts]),
    )


def _thinned_regions(recording: Recording, devices: Sequence[str], unseen: float) -> dict[str, RegionTimes]:
    """Regions whose readings were thinned: thinning worked out what they used beforehand."""
    thinned = recording.thinned
    if thinned is None:
        return {}
    table = thinned.table("regions")
    if not table.num_rows:
        return {}
    known = list(thinned.state.devices)
    found: dict[str, RegionTimes] = {}
    for row in table.to_pylist():
        energies_j = dict(zip(known, row["energies_j"], strict=False))
        program_j = None if row["program_j"] is None else row["program_j"] + unseen * (row["unseen_j"] or 0.0)
        of = {device: energies_j.get(device) for device in devices}
        if row["count"]:
            region = RegionTimes(row["name"], row["count"], (), {}, row["duration_s"], of, program_j)
        else:
            each = {device: (value,) for device, value in of.items()}
            span_ns = (row["begin_ns"], row["end_ns"])
            region = RegionTimes(row["name"], 0, (span_ns,), each, 0.0, {}, None, (program_j,))
        found[row["name"]] = _both(found[row["name"]], region) if row["name"] in found else region
    return found


def _both(a: RegionTimes, b: RegionTimes) -> RegionTimes:
    return RegionTimes(
        a.name,
        a.count + b.count,
        (*a.spans_ns, *b.spans_ns),
        {
            device: (*a.energies_j.get(device, ()), *b.energies_j.get(device, ()))
            for device in dict.fromkeys([*a.energies_j, *b.energies_j])
        },
        a.duration_s + b.duration_s,
        {
            device: _sum([a.total_j.get(device), b.total_j.get(device)])
            for device in dict.fromkeys([*a.total_j, *b.total_j])
        },
        _sum([a.program_j, b.program_j]),
        (*a.programs_j, *b.programs_j),
    )


def longest(regions: Sequence[RegionTimes], most: int) -> list[RegionTimes]:
    """The regions that took the most time, still in their order."""
    chosen = sorted(range(len(regions)), key=lambda i: -regions[i].duration_s)[:most]
    return [regions[i] for i in sorted(chosen)]


def sum_of_each(parts_j: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    """The sum over devices for each time; None if one of them is not known."""
    return tuple(
        None if any(part is None for part in each) else sum(part for part in each if part is not None)
        for each in zip(*parts_j, strict=True)
    )


def _energies_j(trace: PowerTrace, spans_ns: Spans) -> tuple[float | None, ...]:
    """What was used in a part of a time is not what the time took."""
    return tuple(
        energy_j if 0 < known_ns >= (1 - MOST_MISSED) * length_ns else None
        for energy_j, known_ns, length_ns in _parts(trace, spans_ns)
    )


def _together_j(trace: PowerTrace, spans_ns: Spans) -> float | None:
    energies_j, known_ns, lengths_ns = zip(*_parts(trace, spans_ns), strict=True)
    return sum(energies_j) if 0 < sum(known_ns) >= (1 - MOST_MISSED) * sum(lengths_ns) else None


def _parts(trace: PowerTrace, spans_ns: Spans) -> list[tuple[float, int, int]]:
    """Per span: the energy as far as known, how much of it is known, and its length."""
    begin_ns, end_ns = np.array(list(spans_ns), dtype=np.int64).T
    known_ns = trace.covered_until_ns(end_ns) - trace.covered_until_ns(begin_ns)
    energy_j = trace.energy_until_j(end_ns) - trace.energy_until_j(begin_ns)
    lengths_ns = end_ns - begin_ns
    return list(zip(energy_j.tolist(), known_ns.tolist(), lengths_ns.tolist(), strict=True))


def _sum(energies_j: Sequence[float | None]) -> float | None:
    known = [each for each in energies_j if each is not None]
    return sum(known) if known else None


def too_short(regions: Sequence[RegionTimes], channels: Mapping[str, Channel]) -> list[str]:
    """For each device, a line about regions that are too short for its sensor."""
    said: list[str] = []
    for device, channel in channels.items():
        short = [r for r in regions if r.spans_ns and np.median(r.lengths_s) < channel.period_ms * 1e-3]
        if channel.scope != "device" or not short:
            continue
        named = [f"{r.short} ({seconds(float(np.median(r.lengths_s)))})" for r in short[:_MOST_NAMED]]
        more = [f"{len(short) - _MOST_NAMED} more"] if len(short) > _MOST_NAMED else []
        known = f"power of {device} is known every {seconds(channel.period_ms * 1e-3)}"
        said.append(
            f"{known}, and one time of {', '.join([*named, *more])} is shorter: a sum of many is better"
        )
    return said


_PAIRED = ("train", "epoch", "step", "evaluate", "predict")


def unpaired(recording: Recording) -> list[str]:
    """A line for each region, and each kind of span, that the program marked itself and that only began or
    only ended. A program that did not come to its end may leave any of them open."""
    if recording.status != "complete" or recording.thinned is not None:
        return []
    open_: dict[tuple[object, ...], str] = {}
    never: Counter[tuple[str, str]] = Counter()
    columns = ("name", "index", "rank", "pid", "source", "detail")
    for mark, index, rank, pid, source, detail in zip(
        *(recording.marks[name].to_pylist() for name in columns), strict=True
    ):
        name, _, what = (mark or "").rpartition("_")
        if source == REGION:
            key, called = (name, pid, index), f"region {detail or ''}"
        elif source == "user" and name in _PAIRED:
            key, called = (name, rank, pid), name
        else:
            continue
        if what == "begin":
            if key in open_:
                never[open_[key], "ended"] += 1
            open_[key] = called
        elif open_.pop(key, None) is None and name != "step":  # a step ends where the next begins
            never[called, "began"] += 1
    never.update((called, "ended") for called in open_.values())
    return [
        f"{visible(called)} {_OTHER[what]} {'once' if count == 1 else f'{count:,} times'} and never {what}: "
        "that counts nowhere"
        for (called, what), count in never.items()
    ]


_OTHER = {"ended": "began", "began": "ended"}
