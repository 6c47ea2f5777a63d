"""Replays calls on a card, one after the other, the largest first, and measures what each draws.

A call runs in turns of some milliseconds for about a second. Its energy is the counter's, and the time that
it ran is the card's own. Back to back a product runs into the card's power limit: it slows down, and what it
draws comes out too low. So a call that was slowed is replayed again with a rest after each turn, and longer
rests until nothing holds the clock down.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from smaragdine.calibrate.meter import Meter, Stretch
from smaragdine.calibrate.store import CacheState, MeasuredCall, Store, call_key
from smaragdine.errors import UserError
from smaragdine.messages import Child, Message

WARM_S = 0.25
LENGTH_S, SHORT_S = 1.2, 0.7  # of a replay; short ones of calls that matter little
MATTERS = 0.02  # of the busy time
IDLE_EVERY = 20  # calls: the card warms up, and its idle power with it
RESTS = (0.0, 1.0, 3.0)  # times a turn's length
_SLOWED = 0.02  # of the time; a single look may catch a change of the clock
FITS = 0.03  # of the time in the program: with colder or warmer caches it is not the same call
_CACHE_BYTES = 128 << 20  # calls that read more than this are cold whatever came before
_START_S, _ASK_S = 120.0, 300.0


@dataclass(frozen=True)
class Call:
    """One call of a run, as its `calls` table has it."""

    id: int
    key: str
    op: str
    inputs: Mapping[str, Any]
    settings: Mapping[str, Any]
    kernels: Sequence[Any]
    count: int
    busy_s: float

    @property
    def time_s(self) -> float:
        """Of one call, in the program."""
        return self.busy_s / max(self.count, 1)


def calls_of(rows: Sequence[Mapping[str, Any]], device: str) -> list[Call]:
    """The calls of a device, by falling time."""
    found = [
        Call(
            id=row["call"],
            key=call_key(row["op"], row["inputs"], row["settings"], row["kernels"]),
            op=row["op"],
            inputs=msgspec.json.decode(row["inputs"]),
            settings=msgspec.json.decode(row["settings"]),
            kernels=msgspec.json.decode(row["kernels"]),
            count=row["count"],
            busy_s=row["busy_ns"] * 1e-9,
        )
        for row in rows
        if row["device"] == device
    ]
    return sorted(found, key=lambda call: -call.busy_s)


class CardProcess:
    """A process that runs calls on one GPU, in the program's interpreter."""

    def __init__(self, python: str, uuid: str, settings: Mapping[str, Any]) -> None:
        self._python, self._uuid, self._settings = python, uuid, settings
        self._child: Child | None = None
        self.facts: Message = {}

    def start(self) -> None:
        script = Path(__file__).with_name("torch_card.py")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": self._uuid, "KINETO_LOG_LEVEL": "99"}
        environment.pop("SMARAGDINE_SPOOL", None)
        try:
            # Ctrl-C is ours: the child ends when we hang up.
            self._child = Child([self._python, str(script)], env=environment, start_new_session=True)
        except OSError as error:
            raise UserError(
                f"{self._python} does not start", error.strerror or str(error), "Name another: --python PATH"
            ) from None
        self._child.send(dict(self._settings))
        answer = self._child.receive(_START_S)
        if answer is None or "ready" not in answer:
            why = (answer or {}).get("why") or self._child.inbox.printed or "it ended without a word"
            self.close()
            raise UserError(
                f"{self._python} cannot replay on {self._uuid}",
                why,
                "It needs PyTorch with CUDA: --python PATH",
            )
        self.facts = answer["ready"]

    def ask(self, **message: Any) -> Message:
        """What it answers; `why` where it cannot, or died over it: then another one is started."""
        if self._child is None:
            self.start()
        assert self._child is not None
        self._child.send(message)
        answer = self._child.receive(_ASK_S)
        if answer is None:
            self.close()
            return {"why": "the process that replayed it ended", "died": True}
        return answer

    @property
    def alive(self) -> bool:
        return self._child is not None

    def close(self) -> None:
        if self._child is not None:
            self._child.end(10.0)
            self._child = None


@dataclass
class ReplayProgress:
    """Said after every call."""

    done: int
    of: int
    busy_share: float  # of the run's busy time, what is replayed by now
    left_s: float


def replay_all(
    calls: Sequence[Call],
    card: CardProcess,
    meter: Meter,
    store: Store,
    budget_s: float,
    say: Callable[[ReplayProgress], None],
) -> list[MeasuredCall]:
    """Every call that can be rebuilt, until the time is over. Each is in the store as soon as it is done."""
    begin_s = meter.now_s()
    whole_s = sum(call.busy_s for call in calls) or 1.0
    library = f"torch {card.facts.get('torch')}"
    checked = _check(calls, card)
    idle = _idle(card, meter)
    done: list[MeasuredCall] = []
    replayed_s = 0.0
    for number, call in enumerate(calls):
        if meter.now_s() - begin_s > budget_s:
            break
        if number % IDLE_EVERY == IDLE_EVERY - 1:
            idle = _idle(card, meter)
        why = checked.get(call.id, "it was not looked at")
        replay = MeasuredCall(
            call.key, call.op, meter.uuid, meter.name, meter.driver, library, idle.power_w, why=why
        )
        if not why:
            length_s = LENGTH_S if call.busy_s > MATTERS * whole_s else SHORT_S
            replay = _replay(call, replay, card, meter, idle, length_s)
        if not card.alive and calls[number + 1 :]:
            checked = _check(calls[number + 1 :], card)  # by the process that takes its place
        store.add(replay)
        done.append(replay)
        replayed_s += call.busy_s if replay.cold or replay.hot else 0.0
        spent_s = meter.now_s() - begin_s
        left_s = spent_s / (number + 1) * (len(calls) - number - 1)
        say(
            ReplayProgress(
                number + 1, len(calls), replayed_s / whole_s, min(left_s, max(budget_s - spent_s, 0))
            )
        )
    return done


def _check(calls: Sequence[Call], card: CardProcess) -> dict[int, str]:
    """Call → why it cannot be replayed; empty where it can. A call that ends the process is found and left
    out: what the process had rebuilt is gone with it."""
    deadly: dict[int, str] = {}
    while left := [call for call in calls if call.id not in deadly]:
        answer = _rebuild(left, card)
        if answer is not None:
            return deadly | {each["id"]: each.get("why", "") for each in answer.get("checked", ())}
        while len(left) > 1:
            half = left[: len(left) // 2]
            left = half if _rebuild(half, card) is None else left[len(half) :]
        deadly[left[0].id] = "making it again ends the process"
    return deadly


def _rebuild(calls: Sequence[Call], card: CardProcess) -> Message | None:
    """None: the process ended over it."""
    lists = next((call.settings["lists"] for call in calls if call.settings.get("lists")), [])
    asked = [{"id": call.id, "op": call.op, **call.inputs, "kernels": call.kernels} for call in calls]
    answer = card.ask(do="check", calls=asked, lists=lists)
    return None if answer.get("died") else answer


def _idle(card: CardProcess, meter: Meter) -> Stretch:
    card.ask(do="pause")
    try:
        return meter.over(meter.now_s() + WARM_S, LENGTH_S)
    finally:
        card.ask(do="stop")


def _replay(
    call: Call, replay: MeasuredCall, card: CardProcess, meter: Meter, idle: Stretch, length_s: float
) -> MeasuredCall:
    """Cold first; hot too where the program ran it faster, and the caches may be why."""
    found = _state(call, card, meter, idle, cold=True, length_s=length_s)
    cold = found.state
    if cold is None:
        return dataclasses.replace(replay, why=found.why)
    hot = None
    if call.time_s < cold.time_s * (1 - FITS) and found.bytes < _CACHE_BYTES:
        hot = _state(call, card, meter, idle, cold=False, length_s=length_s).state
    return dataclasses.replace(replay, cold=cold, hot=hot, limited=found.limited)


@dataclass(frozen=True)
class _Replayed:
    """What it draws, or why that is not known."""

    state: CacheState | None = None
    limited: CacheState | None = None  # back to back, at the clock that the card's limits left it
    bytes: int = 0  # that it reads
    why: str = ""


def _state(
    call: Call, card: CardProcess, meter: Meter, idle: Stretch, cold: bool, length_s: float
) -> _Replayed:
    prepared = card.ask(do="prepare", call=call.id, cold=cold)
    if "why" in prepared:
        return _Replayed(why=prepared["why"])
    limited = None
    for rest in RESTS:
        card.ask(do="load", rest=rest)
        begin_s = meter.now_s() + WARM_S
        meter.wait(WARM_S)
        slowed = meter.slowed(begin_s - WARM_S / 2) > _SLOWED
        wanted = rest == RESTS[-1] or (cold and rest == 0)  # at a lower clock, too: programs meet limits
        if slowed and not wanted:
            card.ask(do="stop")
            continue
        half_s = (SHORT_S if slowed else length_s) / 2
        first = meter.over(begin_s, half_s)
        parts = [first, meter.over(first.end_s - 1e-6, half_s)]
        ran = card.ask(do="stop")
        if "why" in ran or not ran.get("on_s"):
            return _Replayed(why=ran.get("why", "it did not run"))
        found = _measured(parts, ran, prepared, idle, rest)
        if found.slowed <= _SLOWED or rest == RESTS[-1]:
            return _Replayed(found, limited, int(prepared["bytes"]))
        limited = found if rest == 0 else limited
    raise AssertionError("the longest rest is the last")


def _measured(
    parts: Sequence[Stretch], ran: Message, prepared: Message, idle: Stretch, rest: float
) -> CacheState:
    """The mean of turns and rests is the counter's; a rest draws what the idle card does, and so does the
    microsecond between two kernels of a turn, which the program's times do not hold."""
    inside = min(prepared.get("kernel_s", prepared["call_s"]) / prepared["call_s"], 1.0)
    on = inside * ran["on_s"] / (ran["on_s"] + ran["rest_s"])
    powers_w = [(part.power_w - (1 - on) * idle.power_w) / on for part in parts]
    power_w = statistics.fmean(powers_w)
    above_w = max(power_w - idle.power_w, 1.0)
    return CacheState(
        power_w=power_w,
        time_s=inside * ran["on_s"] / max(ran["calls"], 1),
        spread=abs(powers_w[0] - powers_w[1]) / 2 / above_w,
        clock_mhz=statistics.fmean(part.clock_mhz for part in parts),
        slowed=max(part.slowed for part in parts),
        temperature_c=statistics.fmean(part.temperature_c for part in parts),
        rest=rest,
    )
