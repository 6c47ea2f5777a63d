"""A GPU as physics has it, in a time of its own: what it draws and how long calls take follows from clock,
temperature and caches, and its truth is known.

    clock         the power limit lowers it, in steps of 15 MHz, as far as the mean over some 20 ms asks for
    time          of a product follows the clock; of a call that waits for memory it does not
    energy        of the multiprocessors goes with the voltage squared, of memory it stays
    static power  leaks more when warm; it is there once, however many calls run
    warmth        follows power, a part of it in a second and the rest in half a minute
    caches        of inputs that are there, a call moves fewer bytes: less energy, for some less time
    at once       two calls that together want more than the card slow each other down
    the counter   steps every 20 or 100 ms, and is a little off, for programs and replays alike

`SimulatedCards` answers what `calibrate` asks of a card and of a meter, instead of PyTorch and NVML. Nothing
in here knows how rows or intervals are computed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smaragdine.calibrate.meter import Meter

UUID = "GPU-00000000-0000-4000-8000-0000000051b1"
NAME = "a simulated H200"
LIMIT_W = 700.0
TOP_MHZ, LEAST_MHZ, STEP_MHZ = 1980.0, 600.0, 15.0
CACHE_BYTES = 60 << 20
COLD_BYTES = 200 << 20  # what replays rotate over
TURN_S = 0.005
NODE_S = 1.2e-6  # a node of a graph, beside its kernels
_SLOWED = 0x04  # why the clock is low: the power limit
_TICK_S = 0.005  # of the clock's regulator
_MEAN_S = 0.02  # what it looks at
_FAST_S, _FAST_K_W, _SLOW_S, _SLOW_K_W = 1.0, 0.018, 30.0, 0.034


@dataclass(frozen=True)
class SimulatedCall:
    """What a call costs at the top clock, with cold caches and made-up values."""

    op: str
    time_s: float
    core_j: float  # of the multiprocessors
    memory_j: float  # of what moves bytes
    bound: float  # the part of its time that follows the clock
    bytes: int  # of its inputs
    hot_time: float  # the part of its time that hot inputs save
    hot_energy: float  # the part of its memory's energy that they save
    wants: float  # of the card while it runs alone
    values: float  # times the energy of made-up values: the program's
    kernels: int = 1
    why: str = ""  # it cannot be made again

    def time_at(self, clock_mhz: float, hot: float) -> float:
        """`hot`: 0 for cold inputs, 1 for inputs that are all in the cache."""
        return self.time_s * (1 + self.bound * (TOP_MHZ / clock_mhz - 1)) * (1 - hot * self.hot_time)

    def energy_at(self, clock_mhz: float, hot: float) -> float:
        """Above the idle card."""
        return self.core_j * volts(clock_mhz) ** 2 + self.memory_j * (1 - hot * self.hot_energy)


def volts(clock_mhz: float) -> float:
    """As a part of those at the top."""
    return 0.72 + 0.28 * max(clock_mhz - 900, 0) / (TOP_MHZ - 900)


class SimulatedCard:
    """Its state, and what changes it: `pass_by`, a time at some mean power."""

    def __init__(self, seed: int, step_ms: float) -> None:
        self.random = random.Random(seed)
        self.step_s = step_ms * 1e-3
        self.gain = self.random.gauss(1, 0.005)
        self.leak_w = 40 * self.random.gauss(1, 0.08)
        self.air_c = self.random.gauss(29, 2)
        self.now_s = 1000 + self.random.random()
        self.clock_mhz = TOP_MHZ
        self.fast_k = self.slow_k = 3.0
        self.mean_w = self.static_w()
        self.energy_j = 0.0
        self._regulated_s = self.now_s

    @property
    def temperature_c(self) -> float:
        return self.air_c + self.fast_k + self.slow_k

    @property
    def slowed(self) -> bool:
        return self.clock_mhz < TOP_MHZ

    def static_w(self) -> float:
        """Of the card whose clock runs, whether it works or not."""
        volt = volts(self.clock_mhz)
        clocks_w = 38 * self.clock_mhz / TOP_MHZ * volt**2
        return 47 + clocks_w + self.leak_w * volt * math.exp((self.temperature_c - 45) / 55)

    def regulate_at(self) -> float:
        """When the clock is set next."""
        return self._regulated_s + _TICK_S

    def settle(self, mean_w: float) -> None:
        """As after minutes at that power."""
        self.slow_k = _SLOW_K_W * mean_w

    def pass_by(self, length_s: float, above_w: float) -> float:
        """Lets time pass with calls that draw so much above static power; at what power."""
        power_w = self.static_w() + above_w
        self.now_s += length_s
        self.energy_j += power_w * length_s
        self.fast_k += (_FAST_K_W * power_w - self.fast_k) * -math.expm1(-length_s / _FAST_S)
        self.slow_k += (_SLOW_K_W * power_w - self.slow_k) * -math.expm1(-length_s / _SLOW_S)
        self.mean_w += (power_w - self.mean_w) * -math.expm1(-length_s / _MEAN_S)
        if self.now_s >= self.regulate_at() - 1e-9:
            self._regulate()
        return power_w

    def _regulate(self) -> None:
        self._regulated_s = self.now_s
        steps = round((LIMIT_W / self.mean_w - 1) * 40)
        # Down at once, up by a step at a time.
        moved = self.clock_mhz + STEP_MHZ * max(min(steps, 1), -12)
        self.clock_mhz = min(max(moved, LEAST_MHZ), TOP_MHZ)


# What `calibrate` asks: calls on the card, and its counter.


@dataclass
class _Load:
    """A call again and again, with a rest after each turn; or rests alone."""

    call: SimulatedCall | None
    hot: float
    count: int  # of calls in a turn
    rest_s: float  # at the top clock
    turns: float = 0.0
    on_s: float = 0.0
    off_s: float = 0.0

    def cycle(self, clock_mhz: float) -> tuple[float, float, float]:
        """The seconds of a turn and of its rest, and its energy above the idle card."""
        rest_s = self.rest_s * TOP_MHZ / clock_mhz
        if self.call is None:
            return 0.0, rest_s, 1.0 * rest_s  # one watt: a single thread that counts cycles
        on_s = self.count * (self.call.time_at(clock_mhz, self.hot) + NODE_S * self.call.kernels)
        return on_s, rest_s, self.count * self.call.energy_at(clock_mhz, self.hot) + 1.0 * rest_s


class SimulatedProcess:
    """What `torch_card.py` answers, on a card whose time passes while somebody waits."""

    def __init__(self, card: SimulatedCard, calls: Mapping[int, SimulatedCall]) -> None:
        self._card, self._calls = card, calls
        self.facts = {"torch": "2.11.0+simulated"}
        self.alive = True
        self.load: _Load | None = None
        self._prepared: tuple[SimulatedCall, float, int] | None = None

    def start(self) -> None:
        self.let_pass(2.0)

    def close(self) -> None:
        self.load = None

    def ask(self, **asked: Any) -> dict[str, Any]:
        answer = getattr(self, f"_{asked.pop('do')}")(**asked)
        self.let_pass(0.002)
        return answer

    def let_pass(self, length_s: float) -> None:
        """The regulator and the load go in step: turns are short beside what the regulator looks at."""
        card, until_s = self._card, self._card.now_s + length_s
        while (left_s := until_s - card.now_s) > 1e-9:
            piece_s = min(left_s, max(card.regulate_at() - card.now_s, 1e-6))
            if self.load is None:
                card.pass_by(piece_s, 0.0)
                continue
            on_s, rest_s, energy_j = self.load.cycle(card.clock_mhz)
            turns = piece_s / (on_s + rest_s)
            self.load.turns += turns
            self.load.on_s += turns * on_s
            self.load.off_s += turns * rest_s
            card.pass_by(piece_s, energy_j / (on_s + rest_s))

    def _check(self, calls: Sequence[Mapping[str, Any]], lists: Sequence[Any]) -> dict[str, Any]:
        self.let_pass(0.02 * len(calls))
        whys = [(each["id"], self._calls[each["id"]].why) for each in calls]
        return {"checked": [{"id": id_, **({"why": why} if why else {})} for id_, why in whys]}

    def _prepare(self, call: int, cold: bool) -> dict[str, Any]:
        self.let_pass(0.15)
        one = self._calls[call]
        copies = min(64, 1 + COLD_BYTES // one.bytes) if cold else 1
        # What is larger than the cache is never hot, and 64 copies of a small input are never cold.
        hot = max(0.0, 1 - copies * one.bytes / CACHE_BYTES)
        each_s = one.time_at(TOP_MHZ, hot) + NODE_S * one.kernels
        count = max(1, math.ceil(TURN_S / each_s))
        self._prepared = one, hot, count
        about = {"calls": count, "copies": copies, "bytes": one.bytes}
        return {**about, "call_s": each_s, "kernel_s": one.time_at(TOP_MHZ, hot)}

    def _load(self, rest: float) -> dict[str, Any]:
        assert self._prepared is not None
        one, hot, count = self._prepared
        turn_s = count * (one.time_at(TOP_MHZ, hot) + NODE_S * one.kernels)
        self.load = _Load(one, hot, count, rest * turn_s)
        return {"running": True}

    def _pause(self) -> dict[str, Any]:
        self.load = _Load(None, 0.0, 0, TURN_S)
        return {"running": True}

    def _stop(self) -> dict[str, Any]:
        done, self.load = self.load, None
        assert done is not None
        calls = round(done.turns * done.count)
        return {"turns": round(done.turns), "calls": calls, "on_s": done.on_s, "rest_s": done.off_s}


class SimulatedMeter(Meter):
    """Sees the counter step, up to 4 ms late: it is polled, and each call takes its time."""

    def __init__(self, card: SimulatedCard, process: SimulatedProcess) -> None:
        super().__init__()
        self.uuid, self.name, self.driver = UUID, NAME, "simulated"
        self._card, self._process = card, process
        self._step_at_s = card.now_s + card.step_s
        self._look_at_s = card.now_s

    def now_s(self) -> float:
        return self._card.now_s

    def wait(self, length_s: float) -> None:
        card, until_s = self._card, self._card.now_s + length_s
        while card.now_s < until_s - 1e-9:
            self._process.let_pass(min(until_s, self._step_at_s, self._look_at_s) - card.now_s)
            if card.now_s >= self._step_at_s - 1e-9:
                # While nobody waited, time passed, too: those steps are seen no more.
                late_s = card.random.uniform(0, 0.004)
                missed = card.now_s > self._step_at_s + 1e-9
                if not missed:
                    self._ticks.append((card.now_s + late_s, round(card.energy_j * card.gain * 1000)))
                while self._step_at_s <= card.now_s + 1e-9:
                    self._step_at_s += card.step_s
            if card.now_s >= self._look_at_s - 1e-9:
                reasons = _SLOWED if card.slowed else 0
                self._looks.append((card.now_s, card.clock_mhz, reasons, float(round(card.temperature_c))))
                self._look_at_s = card.now_s + 0.02

    def processes(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


class SimulatedCards:
    """For `calibrate(…, cards=…)`: one card, with a process that knows these calls."""

    def __init__(self, card: SimulatedCard, calls: Mapping[int, SimulatedCall]) -> None:
        self._card = card
        self._process = SimulatedProcess(card, calls)

    def process(self, uuid: str, settings: Mapping[str, Any]) -> SimulatedProcess:
        return self._process

    def meter(self, gpu: Mapping[str, Any]) -> SimulatedMeter:
        return SimulatedMeter(self._card, self._process)
