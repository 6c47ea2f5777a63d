"""From what is known of a card to the powers of one run's calls.

A call does the same work whether the card gets to it at once or a microsecond later, and whether others slow
it down or not. So what a replay tells is its energy, not its power. The state of the caches changes the work,
and so does the clock: a time between cold and hot has an energy between theirs, a clock between that of
replays with rests and that of a card at its limit a power between theirs.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from smaragdine.accounting.calibrated import CallPower
from smaragdine.accounting.run import Run
from smaragdine.arrays import Floats, Ints
from smaragdine.calibrate.card_model import CallSketch, CardModel
from smaragdine.calibrate.replay import FITS, Call, slower_than
from smaragdine.calibrate.store import CacheState, MeasuredCall

LENT = 0.04  # two cards of one kind differ by about as much
SLOWED = 0.2  # a call whose clock was held down even at rest draws less than in the program
WAITING_FOLLOWS = 0.4  # of a call that waits for memory, the part of its power that follows the clock


def powers(
    calls: Sequence[Call],
    replays: Mapping[str, MeasuredCall],
    idle_w: float,
    lent: bool,
    clock_mhz: float | None,
) -> dict[int, CallPower]:
    """Call → its power in this run, whose clock was so high, all above the same idle power."""
    found = {call.id: _power(call, replays.get(call.key), idle_w, lent, clock_mhz) for call in calls}
    return {call: power for call, power in found.items() if power is not None}


def idle_of(replays: Sequence[MeasuredCall]) -> float:
    """The card warms up while it replays, and draws more at idle for it: the middle stands for all."""
    return statistics.median([each.idle_w for each in replays] or [0.0])


def modelled(
    calls: Sequence[Call], used: Mapping[int, CallPower], model: CardModel | None, idle_w: float
) -> dict[int, CallPower]:
    """Of the calls that nobody replayed."""
    left = [call for call in calls if call.id not in used]
    if model is None:
        return {}
    guesses = model.guesses([CallSketch(call.op, *call.largest, call.time_s) for call in left])
    return {
        call.id: CallPower(idle_w + guess.above_w, guess.deviation, modelled=True)
        for call, guess in zip(left, guesses, strict=True)
    }


def program_clock_mhz(run: Run, device: str) -> float | None:
    """Of the multiprocessors, the mean over the traced steps; None where nobody read it."""
    windows = [(window["begin_ns"], window["end_ns"]) for window in run.recording.windows.to_pylist()]
    parts = [
        held(series.t_ns, series.value, *window)
        for series in run.recording.series("telemetry")
        if (series.channel.device, series.channel.quantity) == (device, "sm_clock")
        for window in windows
    ]
    seconds = sum(length_s for length_s, _ in parts)
    return sum(cycles for _, cycles in parts) / seconds if seconds > 0 else None


def held(t_ns: Ints, value: Floats, begin_ns: int, end_ns: int) -> tuple[float, float]:
    """How long a level is known in this time, and its integral: it holds until the next reading."""
    inside = np.flatnonzero((t_ns > begin_ns) & (t_ns < end_ns))
    first = int(np.searchsorted(t_ns, begin_ns, side="right")) - 1
    at = np.concatenate([[first] if first >= 0 else [], inside]).astype(np.int64)
    if not at.size:
        return 0.0, 0.0
    start_ns = np.maximum(t_ns[at], begin_ns)
    length_s = np.diff(np.append(start_ns, end_ns)) * 1e-9
    return float(length_s.sum()), float((length_s * value[at]).sum())


def lacks_limit(replay: MeasuredCall, clock_mhz: float | None) -> bool:
    """Whether a call that needed rests is to be replayed anew: a program met the limits, and it is not known
    what the call draws back to back."""
    cold = replay.cold
    if clock_mhz is None or cold is None or not cold.rest or replay.limited is not None:
        return False
    return slower_than(cold.clock_mhz, clock_mhz)


def _power(
    call: Call, replay: MeasuredCall | None, idle_w: float, lent: bool, clock_mhz: float | None
) -> CallPower | None:
    if replay is None or (replay.cold is None and replay.hot is None):
        return None
    slower = _at_clock(replay, clock_mhz)
    above_j, time_s, between, state = _at_time(call.time_s, replay.idle_w, *slower.of(replay))
    deviation = math.hypot(state.spread, between, slower.deviation)
    if lent:
        deviation = math.hypot(deviation, LENT)
    if state.slowed > SLOWED:
        deviation = math.hypot(deviation, SLOWED / 2)
    alone = min(time_s / call.time_s, 1.0) if call.time_s > 0 else 1.0
    return CallPower(idle_w + above_j / call.time_s, deviation, gap=_gap(call.time_s, time_s), alone=alone)


@dataclass(frozen=True)
class _Slower:
    """What a lower clock makes of a call."""

    power: float = 1.0  # above idle, times that of the replay
    time: float = 1.0
    deviation: float = 0.0

    def of(self, replay: MeasuredCall) -> list[CacheState | None]:
        """Its cold and hot states at that clock."""
        return [
            state
            and dataclasses.replace(
                state,
                power_w=replay.idle_w + (state.power_w - replay.idle_w) * self.power,
                time_s=state.time_s * self.time,
            )
            for state in (replay.cold, replay.hot)
        ]


def _at_clock(replay: MeasuredCall, clock_mhz: float | None) -> _Slower:
    """A program that meets the card's limits runs at a lower clock than replays with rests. Back to back a
    product met them, too: between the two clocks its power lies between the two powers."""
    free = replay.cold or replay.hot
    if free is None or clock_mhz is None or not slower_than(free.clock_mhz, clock_mhz):
        return _Slower()
    limited = replay.limited
    if limited is None or not slower_than(free.clock_mhz, limited.clock_mhz):
        # It never met them: most of it waits for memory, and the rest follows the clock.
        less = WAITING_FOLLOWS * (1 - clock_mhz / free.clock_mhz)
        return _Slower(power=1 - less, deviation=less)
    part = (free.clock_mhz - clock_mhz) / (free.clock_mhz - limited.clock_mhz)
    part, beyond = min(part, 1.5), max(part - 1, 0.0)
    above_w, limited_w = free.power_w - replay.idle_w, limited.power_w - replay.idle_w
    lower = 1 - limited_w / max(above_w, 1.0)
    return _Slower(
        power=1 - part * lower,
        time=1 + part * (limited.time_s / free.time_s - 1),
        deviation=abs(lower) * (0.1 * min(part, 1.0) + 0.3 * min(beyond, 1.0)),
    )


def _at_time(
    time_s: float, idle_w: float, cold: CacheState | None, hot: CacheState | None
) -> tuple[float, float, float, CacheState]:
    """Energy above idle and time of the cache state whose time is the program's, and how far off that energy
    may be."""
    if cold is None or hot is None or cold.time_s <= hot.time_s:
        state = cold or hot
        assert state is not None
        return _above_j(state, idle_w), state.time_s, 0.0, state
    part = min(max((cold.time_s - time_s) / (cold.time_s - hot.time_s), 0.0), 1.0)
    at_s = cold.time_s + part * (hot.time_s - cold.time_s)
    cold_j, hot_j = _above_j(cold, idle_w), _above_j(hot, idle_w)
    above_j = cold_j + part * (hot_j - cold_j)
    return above_j, at_s, abs(cold_j - hot_j) / max(above_j, 1e-12) / 4, cold


def _above_j(state: CacheState, idle_w: float) -> float:
    return max(state.power_w - idle_w, 0.0) * state.time_s


def _gap(time_s: float, replayed_s: float) -> float:
    """A call that takes another time is not quite the same call: half of the difference may be energy."""
    off = abs(time_s / replayed_s - 1) if replayed_s > 0 else 1.0
    return 0.0 if off <= FITS else min(off / 2, 0.3)
