"""Prepares runs for figures: gives them labels, and groups those that repeat one setting."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from smaragdine.accounting import arithmetic
from smaragdine.accounting.diagram import Node, diagram
from smaragdine.accounting.footprint import Footprint, numbers, only, replace
from smaragdine.accounting.merge import merge_edges, renamed, renaming
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.run import Run

# Matches base-2, base_run2, 2, auto2; but not base512, nor lr-0.1.
_REPEAT = re.compile(
    r"(.*?)(?:[-_ ](?:run|rep|seed)?[-_ ]?(\d{1,4})|(?:run|rep|seed|^)(\d{1,4})|(?<=[A-Za-z])(\d{1,2}))",
    re.IGNORECASE,
)


class NotDrawn(Exception):
    """A figure that these recordings do not allow, and why."""


@dataclass(frozen=True, eq=False)
class LabelledRun:
    run: Run
    label: str
    group: str  # runs of the same setting
    setting: str | None = None  # as the sweep says it
    steps_ns: tuple[int, int] | None = None  # curves over time show these steps; None: the whole program

    @cached_property
    def footprint(self) -> Footprint:
        """One step if there are steps, else all that was traced."""
        footprint = self.run.shown
        if footprint is None or not footprint.rows.num_rows:
            raise NotDrawn(self.run.absent or f"{self.label} has no events: nothing was traced")
        return footprint

    def summary_footprint(self, names: Mapping[str, str]) -> Footprint:
        """The footprint with self-similar siblings merged, called as in `names`, and how their sum spreads
        over steps.

        That spread does not follow from those of the parts, so the events are accounted again by merged
        names.
        """
        merged = renamed(self.footprint, names)
        again = self.run.accounted_as(names)
        key = ("device", "name", "phase")
        spread_j = {
            tuple(row[part] for part in key): (row["step_mean_j"], row["step_std_j"])
            for row in again.rows.to_pylist()
        }
        known = [spread_j[row] for row in zip(*(merged.rows[k].to_pylist() for k in key), strict=True)]
        mean_j, std_j = (np.array(each, dtype=np.float64) for each in zip(*known, strict=True))
        rows = replace(merged.rows, {"step_mean_j": numbers(mean_j), "step_std_j": numbers(std_j)})
        return dataclasses.replace(merged, rows=rows)

    @cached_property
    def diagram(self) -> Node:
        """Only the device that does the work: a share of the joules of all devices says little about any."""
        names = renaming([self.footprint])
        edges = _inside(self.run.edges, merge_edges(self.run.edges, names))
        one = only(renamed(self.footprint, names), [working_device([self.footprint])])
        return diagram(one, edges)

    @cached_property
    def traces(self) -> dict[str, PowerTrace]:
        """Devices that add up and have power."""
        found = {d: t for d, t in self.run.traces.items() if t.start_ns.size}
        if not found:
            raise NotDrawn(f"{self.label} has no power of any device")
        return {d: t for d, t in found.items() if self.run.channels[d].scope == "device"} or found

    @property
    def bounds_ns(self) -> tuple[int, int]:
        """The time that curves show."""
        return self.steps_ns or self.run.bounds_ns

    @cached_property
    def limit_w(self) -> float | None:
        """The power limit of its GPUs, if they all have the same."""
        limits = {
            float(np.median(series.value))
            for series in self.run.recording.series("telemetry")
            if series.channel.quantity == "power_limit" and series.value.size
        }
        return limits.pop() if len(limits) == 1 else None


def labelled(runs: Sequence[Run]) -> list[LabelledRun]:
    """Labels runs with the ends of their paths, as long as it takes to tell them apart."""
    labels = _labels([run.path.resolve().parts for run in runs])
    numbered = [_number(label) for label in labels]
    found: list[LabelledRun] = []
    for run, label, (stem, _) in zip(runs, labels, numbered, strict=True):
        mates = [n for n, (other, _) in enumerate(numbered) if other == stem]
        repeats = _repeated([runs[n] for n in mates], [numbered[n][1] for n in mates])
        found.append(LabelledRun(run, label, stem if repeats else label))
    return found


def _labels(paths: Sequence[tuple[str, ...]]) -> list[str]:
    depth = 1
    while len({path[-depth:] for path in paths}) < len({path[-4:] for path in paths}):
        depth += 1
    labels = ["/".join(path[-depth:]) for path in paths]
    return [f"{label} ({i})" if labels.count(label) > 1 else label for i, label in enumerate(labels, 1)]


def _number(label: str) -> tuple[str, int]:
    """A label without the number at its end, and that number; the first may have none."""
    above, _, last = label.rpartition("/")
    match = _REPEAT.fullmatch(last)
    if match is None:
        return label, 1
    number = next(text for text in match.groups()[1:] if text)
    return "/".join(part for part in (above, match[1]) if part) or label, int(number)


def _repeated(runs: Sequence[Run], numbers: Sequence[int]) -> bool:
    """Whether runs repeat one setting: base-1 and base-2 do; batch-32 and batch-64 only with one command."""
    if len(runs) < 2:
        return False
    commands = {tuple(run.info.get("command", [])) for run in runs}
    first = min(numbers)
    counted = sorted(numbers) == list(range(first, first + len(numbers))) and first in (0, 1)
    return counted or (len(commands) == 1 and commands != {()} and len(set(numbers)) == len(numbers))


def by_setting(runs: Sequence[LabelledRun]) -> dict[str, list[LabelledRun]]:
    """Groups runs by the sweep's settings, in its order; else by power limit, lowest first, if runs differ in
    it; else by folder names without their numbers."""
    if all(run.setting is not None for run in runs):
        said = list(dict.fromkeys(str(run.setting) for run in runs))
        return {setting: [run for run in runs if run.setting == setting] for setting in said}
    limits = [run.limit_w for run in runs]
    if None not in limits and len(set(limits)) > 1:
        return {
            f"{limit:g} W": [run for run in runs if run.limit_w == limit]
            for limit in sorted({limit for limit in limits if limit is not None})
        }
    return by_folder(runs)


def one_setting(runs: Sequence[LabelledRun]) -> None:
    settings = by_setting(runs)
    if len(settings) > 1:
        raise NotDrawn(f"runs of {len(settings)} settings cannot be averaged; give those of one")


def by_folder(runs: Sequence[LabelledRun]) -> dict[str, list[LabelledRun]]:
    groups: dict[str, list[LabelledRun]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return groups


def working_device(footprints: Sequence[Footprint]) -> str:
    """The device whose operations take the most energy."""
    device = arithmetic.working_device(footprints)
    if device is None:
        raise NotDrawn("the recordings have no device in common")
    return device


def _inside(edges: pa.Table, merged: pa.Table) -> pa.Table:
    """Drops merged edges between siblings that became one: inside of it they would lead back."""
    kept: list[bool] = []
    for *names, new_source, new_target in zip(
        *(table[side].to_pylist() for table in (edges, merged) for side in ("source", "target")), strict=True
    ):
        source, target = (name.split("/") for name in names)
        parted = next((i for i, (a, b) in enumerate(zip(source, target, strict=False)) if a != b), None)
        parts = new_source.split("/"), new_target.split("/")
        kept.append(parted is None or parts[0][parted] != parts[1][parted])
    return merged.filter(pa.array(kept, pa.bool_()))


def provenance_notes(provenance: Iterable[tuple[str, str | None]]) -> list[str]:
    """Notes from pairs (device, provenance); measured devices need none."""
    said: dict[str, list[str]] = {}
    for device, known in provenance:
        if known not in (None, "measured") and device not in said.setdefault(str(known), []):
            said[str(known)].append(device)
    return [f"{', '.join(sorted(devices))} {known}" for known, devices in said.items()]


def footprint_notes(footprints: Sequence[Footprint]) -> list[str]:
    return provenance_notes((d, t.provenance) for f in footprints for d, t in f.devices.items())


def time_notes(runs: Sequence[LabelledRun]) -> list[str]:
    """Says what curves over time show, if that is not the whole program."""
    return ["time: from the end of the first step to the end of the last"] if runs[0].steps_ns else []


def power_notes(runs: Sequence[LabelledRun], devices: Sequence[str]) -> list[str]:
    found = [(d, run.run.channels[d].provenance) for run in runs for d in devices if d in run.run.channels]
    return provenance_notes(found)
