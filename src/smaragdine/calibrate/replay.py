"""Replays calls on a card, one after the other, the largest first, and measures what each draws.

A call runs in turns of some milliseconds for about a second. Its energy is the counter's, and the time that
it ran is the card's own. Back to back a product runs into the card's power limit: it slows down, and what it
draws comes out too low. So a call that was slowed is replayed again with a rest after each turn, and longer
rests until nothing holds the clock down.

A warm card draws more, idle or not. So we look at the idle card at several temperatures, and take off each
replay what the idle card draws at the same temperature.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from smaragdine.calibrate.meter import Meter, Stretch
from smaragdine.calibrate.store import CacheState, MeasuredCall, Store, call_key
from smaragdine.errors import UserError
from smaragdine.messages import Child, Message

WARM_S = 0.2
SETTLE_S = 0.4  # after a limit was met: the card goes on saying so for a while
LENGTH_S, SHORT_S = 1.0, 0.5  # of a replay; short ones of calls that matter little
MATTERS = 0.02  # of the busy time
LOOK_EVERY = 20  # calls: the card warms up, and its idle power with it
HANDFUL = 8  # calls
# An H200 at idle draws 118 W at 37 °C and 131 W at 54 °C: a part of 0.006 more for each kelvin, give or take.
IDLE_PER_K, IDLE_PER_K_SPREAD, IDLE_NOISE_W = 0.006, 0.002, 1.0
RESTS = (0.0, 1.0, 3.0)  # times a turn's length
_SLOWED = 0.05  # of the time; a single look may catch a change of the clock
_PRODUCT = re.compile(r"mm(_|$)|conv|gemm|matmul|dot", re.IGNORECASE)
AS_FAST = 0.01  # of a clock
FITS = 0.03  # of the time in the program: with colder or warmer caches it is not the same call
_CACHE_BYTES = 128 << 20  # calls that read more than this are cold whatever came before
_START_S, _ASK_S = 120.0, 300.0
_NEEDS = {"torch": "PyTorch", "jax": "JAX"}


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
    def framework(self) -> str:
        return framework_of(self.settings)

    @property
    def time_s(self) -> float:
        """Of one call, in the program."""
        return self.busy_s / max(self.count, 1)

    @property
    def lost(self) -> str:
        """Why nobody can make it again; empty where one may try."""
        return str(self.inputs.get("why", ""))

    @property
    def largest(self) -> tuple[str, int]:
        """The kernel of most blocks, without the end of a long name, and how many blocks these are."""
        found = [(str(name)[:200], math.prod(grid or ())) for name, grid, *_ in self.kernels]
        return max(found, key=lambda each: each[1], default=("", 0))


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


def framework_of(settings: Mapping[str, Any]) -> str:
    """A recording may come from anywhere: of what it says, only what we know chooses a file."""
    return "jax" if settings.get("framework") == "jax" else "torch"


class CardProcess:
    """A process that runs calls on one GPU, in the program's interpreter."""

    def __init__(self, python: str, uuid: str, settings: Mapping[str, Any]) -> None:
        self._python, self._uuid, self._settings = python, uuid, settings
        self._framework = framework_of(settings)
        self._child: Child | None = None
        self.facts: Message = {}

    def start(self) -> None:
        script = Path(__file__).with_name(f"{self._framework}_card.py")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": self._uuid, "KINETO_LOG_LEVEL": "99"}
        environment.pop("SMARAGDINE_SPOOL", None)
        environment["PYTHONWARNINGS"] = "ignore"  # of what its libraries deprecate, nobody asked
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
                f"It needs {_NEEDS[self._framework]} with CUDA: --python PATH",
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
            answer = {"why": "the process that replayed it ended", "died": True}
        if answer.get("died"):
            self.close()
        return answer

    @property
    def alive(self) -> bool:
        return self._child is not None

    def close(self) -> None:
        if self._child is not None:
            self._child.end(10.0)
            self._child = None


@dataclass
class Surroundings:
    """What changes while calls are replayed: the idle card, and what one and the same call draws."""

    looks: list[Stretch]  # at the idle card
    throttled: bool  # the card's limits held the program's clock down
    reference: Call | None = None  # replayed again and again
    reference_w: list[float] = field(default_factory=list[float])  # what it drew above idle
    rests: dict[str, int] = field(default_factory=dict[str, int])  # operation → the rest that it needed

    @property
    def idle_w(self) -> float:
        return self.looks[-1].power_w

    @property
    def drift(self) -> float:
        """How far replays of one call spread, as a part of what it draws."""
        if len(self.reference_w) < 2:
            return 0.0
        return statistics.stdev(self.reference_w) / statistics.fmean(self.reference_w)

    def look_again(self, card: CardProcess, meter: Meter) -> None:
        self.looks.append(_idle(card, meter))
        if self.reference is not None:
            state = _state(self.reference, card, meter, self, cold=True, length_s=SHORT_S).state
            self.reference_w += [self.above_w(state)] if state is not None else []

    def refer_to(self, call: Call, state: CacheState) -> None:
        """The first call that draws a good deal is the reference."""
        if self.reference is None and self.above_w(state) > self.idle_w:
            self.reference, self.reference_w = call, [self.above_w(state)]

    def first_rest(self, op: str) -> int:
        """Products meet the limits, and whatever needed a rest will need one again."""
        return self.rests.get(op, 1 if _PRODUCT.search(op) else 0)

    def as_warm_as(self, cold: CacheState, state: CacheState | None) -> CacheState | None:
        """The state at the temperature of the cold one, so that one idle power is that of both."""
        if state is None:
            return None
        warmer_w = self.idle_at_w(state.temperature_c) - self.idle_at_w(cold.temperature_c)
        return dataclasses.replace(state, power_w=state.power_w - warmer_w)

    def above_w(self, state: CacheState) -> float:
        return state.power_w - self.idle_at_w(state.temperature_c)

    def idle_at_w(self, temperature_c: float) -> float:
        """By a line through the looks. They are few and near each other: it leans on the usual slope."""
        mean_w = statistics.fmean(look.power_w for look in self.looks)
        mean_c = statistics.fmean(look.temperature_c for look in self.looks)
        usual = IDLE_PER_K * mean_w
        trust = (IDLE_NOISE_W / (IDLE_PER_K_SPREAD * mean_w)) ** 2
        away = [(look.temperature_c - mean_c, look.power_w - mean_w) for look in self.looks]
        slope = (trust * usual + sum(c * w for c, w in away)) / (trust + sum(c * c for c, _ in away))
        return mean_w + slope * (temperature_c - mean_c)


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
    program: str = "",
    clock_mhz: float | None = None,
) -> list[MeasuredCall]:
    """Every call that can be rebuilt, until the time is over. Each is in the store as soon as it is done.

    `program` and `clock_mhz` say whose calls they are, and at which clock they ran.
    """
    begin_s = meter.now_s()
    whole_s = sum(call.busy_s for call in calls) or 1.0
    framework = calls[0].framework
    library = f"{framework} {card.facts.get(framework)}"
    checked = _check(calls, card)
    idle = _idle(card, meter)
    throttled = clock_mhz is not None and slower_than(idle.clock_mhz, clock_mhz)
    seen = Surroundings([idle], throttled)
    done: list[MeasuredCall] = []
    replayed_s = 0.0
    calls = shuffled(calls)
    for number, call in enumerate(calls):
        if meter.now_s() - begin_s > budget_s:
            break
        if number % LOOK_EVERY == LOOK_EVERY - 1:
            seen.look_again(card, meter)
        why = checked.get(call.id, "it was not looked at")
        kernel, blocks = call.largest
        replay = MeasuredCall(
            call.key,
            call.op,
            meter.uuid,
            meter.name,
            meter.driver,
            library,
            seen.idle_w,
            why=why,
            kernel=kernel,
            blocks=blocks,
            program=program,
        )
        if not why:
            length_s = LENGTH_S if call.busy_s > MATTERS * whole_s else SHORT_S
            replay = _replay(call, replay, card, meter, seen, length_s)
        if not card.alive and calls[number + 1 :]:
            checked = _check(calls[number + 1 :], card)  # by the process that takes its place
            seen.reference = None
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


def slower_than(clock_mhz: float, other_mhz: float) -> bool:
    """Whether the other clock is the lower one by more than its jitter."""
    return 0 < other_mhz < clock_mhz * (1 - AS_FAST)


def shuffled(calls: Sequence[Call]) -> list[Call]:
    """The largest first, but after the first handful each handful in no order: else one kind of call would
    always follow another, on a card that this one has warmed."""
    random = Random(len(calls))
    found = list(calls[:HANDFUL])
    for begin in range(HANDFUL, len(calls), HANDFUL):
        some = list(calls[begin : begin + HANDFUL])
        random.shuffle(some)
        found += some
    return found


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
    call: Call, replay: MeasuredCall, card: CardProcess, meter: Meter, seen: Surroundings, length_s: float
) -> MeasuredCall:
    """Cold first; hot too where the program ran it faster, and the caches may be why."""
    found = _state(call, card, meter, seen, cold=True, length_s=length_s)
    cold = found.state
    if cold is None:
        return dataclasses.replace(replay, why=found.why)
    seen.refer_to(call, cold)
    idle_w = seen.idle_at_w(cold.temperature_c)
    hot = None
    if call.time_s < cold.time_s * (1 - FITS) and found.bytes < _CACHE_BYTES:
        hot = _state(call, card, meter, seen, cold=False, length_s=length_s).state
    hot, limited = (seen.as_warm_as(cold, state) for state in (hot, found.limited))
    return dataclasses.replace(replay, idle_w=idle_w, cold=cold, hot=hot, limited=limited)


@dataclass(frozen=True)
class _Replayed:
    """What it draws, or why that is not known."""

    state: CacheState | None = None
    limited: CacheState | None = None  # back to back, at the clock that the card's limits left it
    bytes: int = 0  # that it reads
    why: str = ""


def _state(
    call: Call, card: CardProcess, meter: Meter, seen: Surroundings, cold: bool, length_s: float
) -> _Replayed:
    prepared = card.ask(do="prepare", call=call.id, cold=cold)
    if "why" in prepared:
        return _Replayed(why=prepared["why"])
    limited = None
    at_limit = seen.throttled and cold  # the program's clock was lower, so we look at a lower clock, too
    first = 0 if at_limit else seen.first_rest(call.op)
    for number, rest in list(enumerate(RESTS))[first:]:
        card.ask(do="load", rest=rest)
        warm_s = WARM_S if number == first else SETTLE_S
        begin_s = meter.now_s() + warm_s
        meter.wait(warm_s)
        slowed = meter.slowed(begin_s - warm_s / 2) > _SLOWED
        is_last = rest == RESTS[-1]
        if slowed and not (is_last or (at_limit and rest == 0)):
            card.ask(do="stop")
            continue
        half_s = (SHORT_S if slowed else length_s) * (1 + rest / 2) / 2
        half = meter.over(begin_s, half_s)
        parts = [half, meter.over(half.end_s - 1e-6, half_s)]
        ran = card.ask(do="stop")
        if "why" in ran or not ran.get("on_s"):
            return _Replayed(why=ran.get("why", "it did not run"))
        found = _measured(parts, ran, seen, rest)
        if found.slowed <= _SLOWED or is_last:
            seen.rests[call.op] = number
            return _Replayed(found, limited, int(prepared["bytes"]))
        limited = found if rest == 0 else limited
    raise AssertionError("the longest rest is the last")


def _measured(parts: Sequence[Stretch], ran: Message, seen: Surroundings, rest: float) -> CacheState:
    """The mean of turns and rests is the counter's; a rest draws what the idle card does."""
    temperature_c = statistics.fmean(part.temperature_c for part in parts)
    idle_w = seen.idle_at_w(temperature_c)
    on = ran["on_s"] / (ran["on_s"] + ran["rest_s"])
    powers_w = [(part.power_w - (1 - on) * idle_w) / on for part in parts]
    power_w = statistics.fmean(powers_w)
    above_w = max(power_w - idle_w, 1.0)
    return CacheState(
        power_w=power_w,
        time_s=ran["on_s"] / max(ran["calls"], 1),
        spread=math.hypot((powers_w[0] - powers_w[1]) / 2 / above_w, seen.drift),
        clock_mhz=statistics.fmean(part.clock_mhz for part in parts),
        slowed=max(part.slowed for part in parts),
        temperature_c=temperature_c,
        rest=rest,
    )
