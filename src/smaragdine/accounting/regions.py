"""Regions that the program named: how often each ran, how long, and what each device used meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.spans import region_spans
from smaragdine.accounting.step_spans import joined
from smaragdine.sensors.base import Channel
from smaragdine.units import seconds


@dataclass(frozen=True)
class Region:
    """All times that one ran. Those of several threads or ranks that overlap are one: a device's energy is
    nobody's alone, and would be counted twice."""

    name: str
    spans_ns: tuple[tuple[int, int], ...]
    energies_j: Mapping[str, tuple[float | None, ...]]  # device → of each time; None: nobody looked

    @property
    def lengths_s(self) -> list[float]:
        return [(end_ns - begin_ns) * 1e-9 for begin_ns, end_ns in self.spans_ns]

    @property
    def duration_s(self) -> float:
        return math.fsum(self.lengths_s)

    def energy_j(self, device: str) -> float | None:
        """Of all times together, as far as known."""
        known = self.known_j(device)
        return math.fsum(known) if known else None

    def known_j(self, device: str) -> list[float]:
        return [each for each in self.energies_j.get(device, ()) if each is not None]


def regions_of(marks: pa.Table, traces: Mapping[str, PowerTrace]) -> list[Region]:
    """In the order in which they first began."""
    by_name: dict[str, list[tuple[int, int]]] = {}
    for span in region_spans(marks):
        by_name.setdefault(span.name, []).append((span.begin_ns, span.end_ns))
    found: list[Region] = []
    for name, spans in by_name.items():
        spans_ns = joined(spans)
        energies_j = {device: _energies_j(trace, spans_ns) for device, trace in traces.items()}
        found.append(Region(name, tuple(spans_ns), energies_j))
    return found


def _energies_j(trace: PowerTrace, spans_ns: Iterable[tuple[int, int]]) -> tuple[float | None, ...]:
    begin_ns, end_ns = np.array(list(spans_ns), dtype=np.int64).T
    covered_ns = trace.covered_until_ns(end_ns) - trace.covered_until_ns(begin_ns)
    energy_j = trace.energy_until_j(end_ns) - trace.energy_until_j(begin_ns)
    pairs = zip(energy_j.tolist(), covered_ns.tolist(), strict=True)
    return tuple(each_j if known_ns > 0 else None for each_j, known_ns in pairs)


def too_short(regions: Iterable[Region], channels: Mapping[str, Channel]) -> list[str]:
    """Of which regions a single time is shorter than a sensor looks: in words."""
    said: list[str] = []
    for region in regions:
        length_s = float(np.median(region.lengths_s))
        coarse = [
            f"{device} every {seconds(channel.period_ms * 1e-3)}"
            for device, channel in channels.items()
            if channel.scope == "device" and length_s < channel.period_ms * 1e-3
        ]
        if coarse:
            known = f"{seconds(length_s)} at a time, and power is known of {', '.join(coarse)}"
            said.append(f"region {region.name}: {known}: the sum over many times is better than any one")
    return said
