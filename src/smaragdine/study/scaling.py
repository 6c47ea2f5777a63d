"""Shows how the cost of monitoring, tracing and accounting grows with layers, batch and the length of a run.

A few extra runs change one of these at a time, and every run says what measuring it took (`Result.cost`). We
cannot add devices to a machine, so every row says how many devices and channels there are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from smaragdine.study.plan import Fact, StudySetting
from smaragdine.study.results import Result

FACTORS: Mapping[str, tuple[float, ...]] = {"layers": (0.5, 2), "batch": (2,), "seconds": (3,)}
Row = dict[str, str | float | int | None]
_MICRO = 1e6


@dataclass(frozen=True)
class Growth:
    """y grows as x to the `exponent`: 1 is proportional, 0 not at all. None: x was the same in all runs."""

    base: str  # the setting that grew
    scale: str
    x: str
    y: str
    exponent: float | None
    lowest_ratio: float  # the lowest y ÷ x
    highest_ratio: float
    runs: int


def scaling_settings(base: StudySetting) -> list[StudySetting]:
    """`base` with one of its words changed; one run of each is enough."""
    found: list[StudySetting] = []
    for scale, factors in FACTORS.items():
        word = f"--{scale}"
        if word not in base.words:
            continue
        at = base.words.index(word) + 1
        for factor in factors:
            value = _scaled(base.words[at], factor)
            if value == base.words[at]:
                continue
            facts: dict[str, Fact] = {**base.facts, "scale": scale, "base": base.name}
            if scale in facts:
                facts[scale] = int(value)
            words = (*base.words[:at], value, *base.words[at + 1 :])
            found.append(replace(base, name=f"{base.name}-{scale}{value}", words=words, facts=facts))
    return found


def _scaled(word: str, factor: float) -> str:
    value = float(word) * factor
    return f"{value:g}" if "." in word else str(max(1, round(value)))


def scaling_of(results: Sequence[Result]) -> list[Row]:
    """A row for each run that shows growth, after the first run of the setting that it grew from."""
    grown = [result for result in results if "scale" in result.facts]
    first: dict[str, Result] = {}
    for base in sorted({str(result.facts.get("base")) for result in grown}):
        runs = [result for result in results if result.setting == base]
        if runs:
            first[base] = min(runs, key=lambda result: result.number)
    grown.sort(key=lambda result: (str(result.facts["scale"]), result.duration_s, result.name))
    return [_row(result) for result in (*first.values(), *grown) if result.cost]


def _row(result: Result) -> Row:
    cost = result.cost
    events = cost.get("events") or None

    def each(name: str) -> float | None:
        value = cost.get(name)
        return None if value is None or events is None else _MICRO * value / events

    monitor_cpu_s, monitor_s = cost.get("monitor_cpu_s"), cost.get("monitor_s")
    return {
        "run": result.name,
        "base": str(result.facts.get("base", result.setting)),
        "scale": str(result.facts.get("scale", "")),
        "layers": _number(result.facts.get("layers")),
        "batch": _number(result.facts.get("batch")),
        "run_s": result.duration_s,
        "devices": cost.get("devices"),
        "channels": cost.get("channels"),
        "monitor_cores": monitor_cpu_s / monitor_s if monitor_cpu_s is not None and monitor_s else None,
        "step_s": result.step_s,
        "traced_steps": result.traced_steps,
        "traced_slower": result.slower,
        "paused_s": cost.get("paused_s"),
        "tracing_part": cost.get("tracing_part"),
        "events": events,
        "step_events": events / result.traced_steps if events and result.traced_steps else None,
        "assemble_s": cost.get("assemble_s"),
        "account_s": cost.get("account_s"),
        "assemble_us_per_event": each("assemble_s"),
        "account_us_per_event": each("account_s"),
        "bytes": cost.get("bytes"),
    }


def _number(fact: Fact | None) -> float | int | None:
    return fact if isinstance(fact, int | float) else None


GROWTHS = (
    ("layers", "layers", "step_events"),
    ("layers", "events", "assemble_s"),
    ("layers", "events", "account_s"),
    ("layers", "events", "bytes"),
    ("batch", "batch", "step_events"),
    ("batch", "batch", "paused_s"),
    ("seconds", "run_s", "events"),
    ("seconds", "run_s", "bytes"),
    ("seconds", "run_s", "monitor_cores"),
)


def growths_of(rows: Sequence[Row]) -> list[Growth]:
    """By least squares of logarithms, over a base's run and those that change its scale."""
    found: list[Growth] = []
    for base in dict.fromkeys(str(row["base"]) for row in rows):
        own = [row for row in rows if row["base"] == base]
        for scale, x, y in GROWTHS:
            points = [
                (float(row[x] or 0), float(row[y] or 0))
                for row in own
                if row["scale"] in ("", scale) and row[x] and row[y]
            ]
            if len(points) < 2 or not any(row["scale"] == scale for row in own):
                continue
            ratios = [b / a for a, b in points]
            found.append(Growth(base, scale, x, y, _exponent(points), min(ratios), max(ratios), len(points)))
    return found


def _exponent(points: Sequence[tuple[float, float]]) -> float | None:
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    middle_x, middle_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - middle_x) ** 2 for x in xs)
    if spread < 1e-12:
        return None
    return sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True)) / spread
