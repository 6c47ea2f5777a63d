"""Regions that the program named: how often each ran, how long, and what each device used meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.spans import region_spans
from smaragdine.accounting.step_spans import Spans, joined
from smaragdine.sensors.base import Channel
from smaragdine.units import seconds

_MOST_NAMED = 3
_LONGEST_NAME = 40


@dataclass(frozen=True)
class Region:
    """All times that one ran. Those of threads or ranks may overlap: each has its own length and what devices
    used meanwhile, but in the sums every second counts once, as a device's energy is nobody's alone."""

    name: str
    spans_ns: tuple[tuple[int, int], ...]  # each time, by its beginning
    energies_j: Mapping[str, tuple[float | None, ...]]  # device → of each time; None: nobody looked
    duration_s: float
    total_j: Mapping[str, float | None]  # device → of all times together, as far as known

    @property
    def short(self) -> str:
        """A name with an end, to print."""
        return self.name if len(self.name) <= _LONGEST_NAME else self.name[: _LONGEST_NAME - 1] + "…"

    @property
    def lengths_s(self) -> list[float]:
        return [(end_ns - begin_ns) * 1e-9 for begin_ns, end_ns in self.spans_ns]

    def known_j(self, device: str) -> list[float]:
        return [each for each in self.energies_j.get(device, ()) if each is not None]


def regions_of(marks: pa.Table, traces: Mapping[str, PowerTrace]) -> list[Region]:
    """In the order in which they first began."""
    by_name: dict[str, list[tuple[int, int]]] = {}
    for span in region_spans(marks):
        by_name.setdefault(span.name, []).append((span.begin_ns, span.end_ns))
    found: list[Region] = []
    for name, spans_ns in by_name.items():
        once_ns = joined(spans_ns)
        total_j = {device: _sum(_energies_j(trace, once_ns)) for device, trace in traces.items()}
        energies_j = {device: _energies_j(trace, spans_ns) for device, trace in traces.items()}
        duration_s = sum(end_ns - begin_ns for begin_ns, end_ns in once_ns) * 1e-9
        found.append(Region(name, tuple(spans_ns), energies_j, duration_s, total_j))
    return found


def longest(regions: Sequence[Region], most: int) -> list[Region]:
    """Those that took the most time, in the order in which they are."""
    chosen = sorted(range(len(regions)), key=lambda i: -regions[i].duration_s)[:most]
    return [regions[i] for i in sorted(chosen)]


def _energies_j(trace: PowerTrace, spans_ns: Spans) -> tuple[float | None, ...]:
    begin_ns, end_ns = np.array(list(spans_ns), dtype=np.int64).T
    covered_ns = trace.covered_until_ns(end_ns) - trace.covered_until_ns(begin_ns)
    energy_j = trace.energy_until_j(end_ns) - trace.energy_until_j(begin_ns)
    pairs = zip(energy_j.tolist(), covered_ns.tolist(), strict=True)
    return tuple(each_j if known_ns > 0 else None for each_j, known_ns in pairs)


def _sum(energies_j: Sequence[float | None]) -> float | None:
    known = [each for each in energies_j if each is not None]
    return sum(known) if known else None


def too_short(regions: Sequence[Region], channels: Mapping[str, Channel]) -> list[str]:
    """Of which regions a single time is shorter than a sensor looks: a line for each device."""
    said: list[str] = []
    for device, channel in channels.items():
        short = [r for r in regions if float(np.median(r.lengths_s)) < channel.period_ms * 1e-3]
        if channel.scope != "device" or not short:
            continue
        named = [f"{r.short} ({seconds(float(np.median(r.lengths_s)))})" for r in short[:_MOST_NAMED]]
        more = [f"{len(short) - _MOST_NAMED} more"] if len(short) > _MOST_NAMED else []
        known = f"power of {device} is known every {seconds(channel.period_ms * 1e-3)}"
        said.append(
            f"{known}, and one time of {', '.join([*named, *more])} is shorter: a sum of many is better"
        )
    return said
