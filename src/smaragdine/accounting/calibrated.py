"""Rows that rest on calibration: what each call draws alone, put in the place of equal shares.

An event whose call was replayed takes what the call draws above the idle card, for as long as the event ran,
and a share of the idle card's power, which it divides with whatever ran beside it. A call that was not
replayed goes by the model of the card (`calibrate/card_model.py`). Where there is none it is taken to draw as
much as the others, give or take half.

The energy counter has the last word. Replays and idle never come to exactly what it says; the rest is spread
over them, most of it to what is known least, so that rows and idle add up to the counter as they always do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from smaragdine.accounting.integral import sum_by
from smaragdine.arrays import Bools, Floats, Ints
from smaragdine.errors import visible
from smaragdine.files import users_file
from smaragdine.sensors.energy import MOST_W

BASIS = "calibration"
MODEL = "model"
FILE = "calibration.json"  # of the recording

# Standard deviations, as parts of what they are of.
TOGETHER = 0.03  # all replays alike: another temperature, another card's day
EACH = 0.03  # one replay: values that are not the program's
GUESSED = 0.1  # all that is modelled alike: what the model misses, it may miss everywhere
UNKNOWN = 0.5  # what a call draws that nobody replayed, above idle
STRETCHED = 0.1  # a call that others slowed down: its time does not tell the state of the caches
IDLE = 0.05
COUNTER = 0.01

BESIDE = 0.02  # of its time: a call that ran beside others for less was not slowed by them

WAITING = 1.25  # times the card's idle power: between kernels it draws no more

MOST_BUSY = 1.25  # times a step's length: if something ran for longer, the length is not the step's

# Beyond these the replays do not describe the program, and its rows stay as they were.
CREDIBLE = (0.7, 1.4)


@dataclass(frozen=True)
class CallPower:
    """What a call of this run draws while its kernels run, the idle card included."""

    power_w: float
    deviation: float  # of its power above idle, as a part of it: repeats, and the state of the caches
    modelled: bool = False  # nobody replayed it: it is guessed from other calls of the card
    gap: float = 0.0  # the same, for a time that is not the program's
    alone: float = 1.0  # of its time in the program, the part that it takes alone; 1 if that is more


@dataclass(frozen=True)
class Calibration:
    """What was replayed of a run's calls on one device."""

    calls: Mapping[int, CallPower]
    idle_w: float  # of the card at the clock of the replays
    remarks: tuple[str, ...] = field(default=())


class _Devices(msgspec.Struct):
    devices: dict[str, Calibration]


def write(folder: Path, found: Mapping[str, Calibration]) -> None:
    """Beside the recording's tables; whole or not at all."""
    devices = {device: asdict(each) for device, each in found.items()}
    with users_file(folder / FILE) as part:
        part.write_text(json.dumps({"devices": devices}, allow_nan=False) + "\n", encoding="utf-8")


def read(folder: Path) -> tuple[dict[str, Calibration], str]:
    """Device → its calibration, and what is wrong with the file; empty where nothing is, or there is none."""
    try:
        text = (folder / FILE).read_bytes()
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"{FILE} cannot be read ({error.strerror}): rows are equal shares"
    try:
        found = msgspec.json.decode(text, type=_Devices).devices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return {}, f"{FILE} is damaged ({visible(str(error))}): rows are equal shares"
    for device, each in found.items():
        if not all(map(_can_be, each.calls.values())) or not 0 <= each.idle_w < MOST_W:
            return {}, f"{FILE} is damaged ({visible(device)} draws what no card can): rows are equal shares"
    return found, ""


def _can_be(power: CallPower) -> bool:
    parts = 0 <= power.deviation < 1e3 and 0 <= power.gap < 1e3 and 0 < power.alone <= 1
    return parts and 0 <= power.power_w < MOST_W


@dataclass(frozen=True)
class UntracedLevel:
    """What the counter says of steps without the profiler. They launch the same kernels, for many seconds: of
    a traced window of half a second, a sensor that takes 50 samples a second is some percent off."""

    traced_steps: int
    length_s: float  # of one untraced step
    energy_j: float


@dataclass(frozen=True)
class Attribution:
    """One device's events by their calls."""

    energy_j: Floats  # per event
    idle_j: float
    closure: float  # what the replays and idle come to, as a part of the counter's energy
    untraced: bool  # whether that is of untraced steps
    known: float  # of the busy time, what was replayed
    above_idle_j: Floats  # per event, of its energy
    deviation: Floats  # per event, of that; by the same replay for all events of a call
    replayed: Bools  # per event: whether its call was
    modelled: Bools  # per event: whether its call goes by the model of the card
    guessed: float  # of the busy time, what does


def by_calls(
    call: Ints,
    busy_s: Floats,
    share_s: Floats,
    total_j: float,
    covered_s: float,
    idle_w: float | None,
    calibration: Calibration,
    untraced: UntracedLevel | None = None,
) -> Attribution | None:
    """Shares `total_j` among events. `busy_s` is how long each ran, `share_s` the same divided among what ran
    at a time; a call below 0 is none. None where the replays do not describe what ran.

    Where `untraced` steps are known, the closure is theirs."""
    powers = calibration.calls
    ids, place = np.unique(call, return_inverse=True)
    found = [powers.get(int(each)) for each in ids]
    above_w = np.array([math.nan if p is None else max(p.power_w - calibration.idle_w, 0.0) for p in found])
    told = ~np.isnan(above_w)[place]
    modelled = np.array([p is not None and p.modelled for p in found], dtype=bool)[place]
    replayed = told & ~modelled
    alone = np.array([1.0 if p is None else p.alone for p in found])
    weight, explained = _weights(busy_s, share_s, place, alone)
    spread = np.array([_spread(p, part) for p, part in zip(found, explained.tolist(), strict=True)])
    told_s, all_s = float(busy_s[told].sum()), float(busy_s.sum())
    if told_s <= 0 or total_j <= 0:
        return None
    if idle_w is None or idle_w > WAITING * calibration.idle_w:
        idle_w = calibration.idle_w  # readings of a card that never waited long hold work, too
    told_j = np.where(told, np.nan_to_num(above_w)[place] * weight, 0.0)
    mean_w = float(told_j.sum()) / told_s
    known_j, guessed_j = np.where(replayed, told_j, 0.0), np.where(modelled, told_j, 0.0)
    unknown_j = np.where(told, 0.0, mean_w * busy_s)
    waiting_s = max(covered_s - float(share_s.sum()), 0.0)
    waiting_j = idle_w * waiting_s
    static_j = idle_w * share_s
    above_model_j, idle_model_j = float(told_j.sum() + unknown_j.sum()), float(static_j.sum()) + waiting_j
    model_j = above_model_j + idle_model_j
    if untraced is not None and float(share_s.sum()) > MOST_BUSY * untraced.traced_steps * untraced.length_s:
        untraced = None  # steps are announced long before they are done
    closure = model_j / total_j
    if untraced is not None:
        step_j = above_model_j / untraced.traced_steps + idle_w * untraced.length_s
        closure = step_j / untraced.energy_j
    # What was not replayed may draw nothing above idle, or several times what the others do.
    may_be = 2 * spread[place]
    least_j = model_j - float(unknown_j.sum() + (guessed_j * np.minimum(may_be, 1.0)).sum())
    most_j = model_j + float(2 * unknown_j.sum() + (guessed_j * may_be).sum())
    if most_j < CREDIBLE[0] * total_j or least_j > CREDIBLE[1] * total_j:
        return None

    def var(part_j: Floats, together: float) -> float:
        """Of what may be off: all calls together, and each."""
        each_j = sum_by(place, part_j, ids.size)
        return (together * float(part_j.sum())) ** 2 + float(((spread * each_j) ** 2).sum())

    known_var, guessed_var, unknown_var = var(known_j, TOGETHER), var(guessed_j, GUESSED), var(unknown_j, 0.0)
    idle_var = (IDLE * idle_model_j) ** 2
    left_j, variance = total_j - model_j, known_var + guessed_var + unknown_var + idle_var

    def corrected(part_j: float, part_var: float) -> float:
        """The factor of a part that takes its share of what is left over."""
        return max(1 + left_j * part_var / variance / part_j, 0.0) if part_j > 0 and variance > 0 else 1.0

    known_j *= corrected(float(known_j.sum()), known_var)
    guessed_j *= corrected(float(guessed_j.sum()), guessed_var)
    unknown_j *= corrected(float(unknown_j.sum()), unknown_var)
    of_idle = corrected(idle_model_j, idle_var)
    above_j = known_j + guessed_j + unknown_j
    energy_j = above_j + of_idle * static_j
    # To the last digit, and where a factor met its bound.
    factor = total_j / (float(energy_j.sum()) + of_idle * waiting_j)
    return Attribution(
        energy_j=energy_j * factor,
        idle_j=of_idle * waiting_j * factor,
        closure=closure,
        untraced=untraced is not None,
        known=float(busy_s[replayed].sum()) / all_s if all_s > 0 else 0.0,
        above_idle_j=above_j * factor,
        deviation=spread[place],
        replayed=replayed,
        modelled=modelled,
        guessed=float(busy_s[modelled].sum()) / all_s if all_s > 0 else 0.0,
    )


def _spread(power: CallPower | None, explained: float) -> float:
    """Of a call's power above idle, as a part of it; others beside it explain so much of its longer time."""
    if power is None:
        return UNKNOWN
    stretched = min(1 - power.alone, STRETCHED) * explained
    return math.hypot(power.deviation, EACH, power.gap * (1 - explained), stretched)


def _weights(busy_s: Floats, share_s: Floats, place: Ints, alone: Floats) -> tuple[Floats, Floats]:
    """What part each event has in the time of its call, and per call how much of its longer time others
    explain.

    Calls that run at once slow each other down: each takes longer and draws less, but its work takes the same
    energy. At most they take turns, and then an event works for its share of the time.
    """
    calls = alone.size
    all_s, beside_s = sum_by(place, busy_s, calls), sum_by(place, busy_s - share_s, calls)
    longer_s = (1 - alone) * all_s
    lost = np.divide(longer_s, beside_s, out=np.zeros(calls), where=beside_s > BESIDE * all_s)
    lost = np.clip(lost, 0.0, 1.0)
    explained = np.divide(lost * beside_s, longer_s, out=np.zeros(calls), where=longer_s > 0)
    worked_s = busy_s - lost[place] * (busy_s - share_s)
    worked_all_s = sum_by(place, worked_s, calls)
    scale = np.divide(all_s, worked_all_s, out=np.ones(calls), where=worked_all_s > 0)
    return worked_s * scale[place], explained


def closure_remark(device: str, found: Attribution) -> str:
    guessed = f" and {found.guessed:.1%} modelled" if found.guessed > 0 else ""
    said = (
        f"{device}: rows rest on calibration. {found.known:.1%} of the busy time was replayed{guessed}; "
        f"replays and idle explain {found.closure:.1%} of the energy counter"
        + (" in steps without tracing" if found.untraced else "")
    )
    if abs(1 - found.closure) > 0.05:
        said += ", which is more than 5 % off: error bars are wider for it"
    return said


def refused_remark(device: str) -> str:
    return (
        f"{device}: its calibration does not describe this run (replays and idle come to less than "
        f"{CREDIBLE[0]:.0%} or more than {CREDIBLE[1]:.0%} of the energy counter): rows are equal shares"
    )
