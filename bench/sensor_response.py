"""Finds how a GPU's power samples follow its power: which electronics explain recordings best.

    python bench/sensor_response.py RUN…

It takes recordings with traced kernels, and explains every sample by what ran before it (forward, backward,
optimizer, anything else, nothing), each at a power of its own. The sample sees this through a mean over a
window or a low-pass of first order, with some delay, at the times of the stamps or of an even rhythm. For
each such explanation it prints the deviation of what is left, as the mean over recordings, and how much
less likely it is than the best one, as a logarithm. What it finds for an architecture belongs in
sensors/nvml/power.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import smaragdine
from smaragdine.accounting.power import PowerTrace, on_time
from smaragdine.arrays import Floats, Ints

STEP_NS = 100_000
LONGEST = 900  # steps of history
WINDOWS_MS, CONSTANTS_MS, LAGS_MS = (20, 25), (8, 10, 12, 13.5, 15, 18), (0, 1, 2, 3, 3.5, 4, 5, 6)
LEAST_PART, MOST_IDLE = 0.004, 0.97
GROUPS = ("forward", "backward", "optimizer")


class Seen(NamedTuple):
    """Which kind of work had which part of the time in every step of history, and the samples."""

    parts: Floats
    at: dict[str, Ints]  # the step in which each sample was taken, by its stamp and by the rhythm
    power_w: Floats


def seen(recording: smaragdine.Recording) -> Seen:
    events: Any = recording.events.to_pandas()
    events = events[events["device"].astype(str) == "gpu:0"].sort_values("start_ns")
    start_ns = events["start_ns"].to_numpy()
    end_ns = np.maximum.accumulate(start_ns + events["duration_ns"].to_numpy())
    start_ns = np.maximum(start_ns, np.concatenate([start_ns[:1], end_ns[:-1]]))  # one at a time
    phase = events["phase"].astype(str).to_numpy()
    steps = int((end_ns[-1] - start_ns[0]) // STEP_NS)
    edges_ns = start_ns[0] + np.arange(steps + 1) * STEP_NS
    groups = [phase == name for name in GROUPS]
    groups.append(~np.any(groups, axis=0))
    spans = [PowerTrace(start_ns[own], end_ns[own], np.ones(own.sum())) for own in groups]
    busy = np.array([np.diff(each.covered_until_ns(edges_ns)) / STEP_NS for each in spans])
    (samples,) = [s for s in recording.series("power") if s.channel.name == "gpu:0 power"]
    taken_ns = {"stamps": samples.t_ns, "rhythm": on_time(samples.t_ns)}
    at = {times: (t_ns - start_ns[0]) // STEP_NS for times, t_ns in taken_ns.items()}
    return Seen(np.vstack([busy, 1 - busy.sum(axis=0)]), at, samples.value)


def responses() -> Iterator[tuple[str, float, Floats]]:
    """Name, lag and weights of each way in which a sample may see what ran before it."""
    behind_ms = np.arange(LONGEST) * STEP_NS * 1e-6
    for lag_ms in LAGS_MS:
        for window_ms in WINDOWS_MS:
            inside = (behind_ms >= lag_ms) & (behind_ms < lag_ms + window_ms)
            yield f"mean over {window_ms} ms", lag_ms, inside / inside.sum()
        for constant_ms in CONSTANTS_MS:
            weight = np.where(behind_ms >= lag_ms, np.exp(-(behind_ms - lag_ms) / constant_ms), 0.0)
            yield f"low-pass of {constant_ms:g} ms", lag_ms, weight / weight.sum()


def left_over(one: Seen, weights: Floats) -> dict[str, tuple[float, int]]:
    """For the samples, at their stamps and in their rhythm: the deviation of what is not explained, and how
    many samples there are."""
    parts = one.parts[one.parts.mean(axis=1) > LEAST_PART]
    shown = np.array([np.convolve(part, weights)[: part.size] for part in parts])
    found: dict[str, tuple[float, int]] = {}
    for times, at in one.at.items():
        known = np.flatnonzero((at >= LONGEST) & (at < shown.shape[1]))
        known = known[shown[-1, at[known] - 1] < MOST_IDLE]
        explained, power_w = shown[:, at[known] - 1].T, one.power_w[known]
        powers_w, *_ = np.linalg.lstsq(explained, power_w, rcond=None)
        found[times] = float(np.sqrt(np.mean((explained @ powers_w - power_w) ** 2))), power_w.size
    return found


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    all_seen = [seen(smaragdine.open(path)) for path in sys.argv[1:]]
    rows: list[tuple[float, float, int, str, float, str]] = []
    for name, lag_ms, weights in responses():
        left = [left_over(one, weights) for one in all_seen]
        for times in ("stamps", "rhythm"):
            deviations_w, counts = zip(*(each[times] for each in left), strict=True)
            unlikely = sum(n * math.log(w) for w, n in zip(deviations_w, counts, strict=True))
            rows.append((unlikely, sum(deviations_w) / len(left), sum(counts), name, lag_ms, times))
    rows.sort()
    print(f"{len(all_seen)} recordings, {rows[0][2]} samples\n")
    print("response            lag      times       left  less likely (ln)")
    stamps = [row for row in rows if row[5] == "stamps"]
    plain = [row for row in stamps if row[3:5] == ("mean over 20 ms", 0)]
    for unlikely, left_w, _, name, lag_ms, times in [*rows[:8], stamps[0], *plain]:
        print(f"{name:19} {lag_ms:3g} ms   {times}  {left_w:6.1f} W  {unlikely - rows[0][0]:8.0f}")


if __name__ == "__main__":
    main()
