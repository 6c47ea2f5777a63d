"""Tunes a running program: follows its steps, sets the limits that the policy asks for, and marks every
change."""

from __future__ import annotations

import contextlib
import json
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from smaragdine.clock import SYSTEM, Clock
from smaragdine.errors import UserError
from smaragdine.jobs.lender import Lender
from smaragdine.limits.nvml import LimitedGpu, open_gpus
from smaragdine.limits.nvml import LimitValue as Limit
from smaragdine.recording.marks import NewMarks
from smaragdine.sensors.base import SensorLost
from smaragdine.sensors.nvml.gpus import Gpu, Health, ask, hold_library, nvml, release_library
from smaragdine.sensors.nvml.power import CounterSensor, find_pace
from smaragdine.tuning.policy import Policy, Slice

# The energy of GPUs, live: readings of each GPU's counter at the instants at which it steps.

_POWER_PERIOD_NS = 20_000_000
_USUAL_PERIOD_NS = 100_000_000
_MOST_READINGS = 20_000


class SlicedSensor(Protocol):
    def read(self) -> Sequence[tuple[int, int, float]]:
        """(t_ns, 0, joules so far), if there is a new reading. Raises `SensorLost`."""
        ...


class PowerSensor:
    """For GPUs without the counter: adds up power readings."""

    def __init__(self, device: str, read_mw: Callable[[], int], clock: Clock = SYSTEM) -> None:
        self._read_mw = read_mw
        self._clock = clock
        self._health = Health(device, clock)
        self._last: tuple[int, float] | None = None  # time and power
        self._energy_j = 0.0

    def read(self) -> Sequence[tuple[int, int, float]]:
        t_ns, last = self._clock.wall_ns(), self._last
        if last is not None and t_ns - last[0] < _POWER_PERIOD_NS:
            return ()
        power_mw = self._health.attempt(self._read_mw)
        if power_mw is None:
            return ()
        self._last = t_ns, power_mw / 1000
        if last is None:
            return ()
        self._energy_j += (last[1] + self._last[1]) / 2 * (t_ns - last[0]) * 1e-9
        return ((t_ns, 0, self._energy_j),)


class LiveEnergy:
    """What all devices used together, between any two times that their readings cover."""

    def __init__(self, sensors: Sequence[SlicedSensor], period_ns: int) -> None:
        self.period_ns = period_ns  # how often the slowest counter steps
        self._sensors = sensors
        self._readings: list[tuple[list[int], list[float]]] = [([], []) for _ in sensors]

    def read(self) -> None:
        for sensor, (times_ns, joules) in zip(self._sensors, self._readings, strict=True):
            for t_ns, _, energy_j in sensor.read():
                # After a reload of the driver, it counts from zero.
                if joules and energy_j < joules[-1]:
                    times_ns.clear()
                    joules.clear()
                times_ns.append(t_ns)
                joules.append(energy_j)
            if len(times_ns) > _MOST_READINGS:
                # A program may pause for hours, and go on.
                del times_ns[: _MOST_READINGS // 2], joules[: _MOST_READINGS // 2]

    def forget(self) -> None:
        """Begins a new stretch of time with the next readings."""
        for times_ns, joules in self._readings:
            times_ns.clear()
            joules.clear()

    def covered_ns(self) -> tuple[int, int] | None:
        """The time that readings of all devices cover."""
        if any(len(times_ns) < 2 for times_ns, _ in self._readings):
            return None
        begin_ns = max(times_ns[0] for times_ns, _ in self._readings)
        return begin_ns, min(times_ns[-1] for times_ns, _ in self._readings)

    def between_j(self, begin_ns: int, end_ns: int) -> float:
        """Both times must be covered. Power counts as even between two readings."""
        return sum(
            _at(end_ns, times_ns, joules) - _at(begin_ns, times_ns, joules)
            for times_ns, joules in self._readings
        )


def _at(t_ns: int, times_ns: list[int], joules: list[float]) -> float:
    after = min(max(bisect_left(times_ns, t_ns), 1), len(times_ns) - 1)
    begin_ns, end_ns = times_ns[after - 1], times_ns[after]
    part = (t_ns - begin_ns) / (end_ns - begin_ns)
    return joules[after - 1] + part * (joules[after] - joules[after - 1])


@contextlib.contextmanager
def live_energy(devices: Mapping[str, str]) -> Iterator[LiveEnergy]:
    """Opens these devices, by name and UUID, through NVML."""
    hold_library()
    sensors: list[Any] = []
    try:
        gpus = {gpu.uuid: gpu for gpu in open_gpus()}
        periods_ns = [_USUAL_PERIOD_NS]
        for device, uuid in devices.items():
            if uuid not in gpus:
                raise UserError(f"{device} does not answer", remedy="See smaragdine doctor")
            sensor, period_ns = _open(gpus[uuid])
            sensors.append(sensor)
            periods_ns.append(period_ns)
        yield LiveEnergy(sensors, max(periods_ns))
    finally:
        for sensor in sensors:
            if isinstance(sensor, CounterSensor):
                sensor.close()
        release_library()


def _open(gpu: LimitedGpu) -> tuple[SlicedSensor, int]:
    lib = nvml()

    def read_mj() -> int:
        return lib.nvmlDeviceGetTotalEnergyConsumption(gpu.handle)

    def read_mw() -> int:
        return lib.nvmlDeviceGetPowerUsage(gpu.handle)

    if ask(read_mj) is not None:
        pace = find_pace(read_mj, SYSTEM)
        index = int(gpu.device.partition(":")[2])
        known = Gpu(index, gpu.handle, "", gpu.uuid, "", 0, 0, gpu.mig)
        return CounterSensor(known, SYSTEM, read_mj, pace, alone=True, detail=""), pace.period_ns
    if ask(read_mw) is None:
        why = "it has neither an energy counter nor a power reading"
        raise UserError(f"{gpu.device} cannot be measured", why, "See smaragdine doctor")
    return PowerSensor(gpu.device, read_mw), _USUAL_PERIOD_NS


# The program's steps, as they come into the spool of its recording.

_QUIET_NS = 2_000_000_000  # how long a stream must be quiet before another is followed
_QUIET_STEPS = 10
# Marks between steps: the time of an evaluation or the end of an epoch belongs to no step.
_BETWEEN = ("train_", "epoch_", "evaluate_", "predict_")


@dataclass(frozen=True)
class Step:
    """From the end of the step before to its own end. One mark may stand for several steps."""

    begin_ns: int
    end_ns: int
    count: int = 1


@dataclass
class _Stream:
    """Steps of one source: an optimizer or a trainer in one process."""

    end_ns: int
    index: int | None
    length_ns: int = 0  # the last step's length

    def take(self, end_ns: int, index: int | None) -> Step:
        ahead = 1 if index is None or self.index is None else index - self.index
        step = Step(self.end_ns, end_ns, max(1, ahead))
        self.end_ns, self.index, self.length_ns = end_ns, index, end_ns - step.begin_ns
        return step


class StepFollower:
    """Follows one stream. Processes that train together announce the same steps, so one is enough."""

    def __init__(self, spool: Path) -> None:
        self._marks = NewMarks(spool)
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._between_ns: dict[int, int] = {}  # process → time of its last mark between steps
        self._followed: tuple[int, str] | None = None
        self.ended = 0  # steps of followed streams so far

    def look(self) -> list[Step]:
        """New steps, without those that have a mark between them and the one before."""
        steps: list[Step] = []
        for mark in self._marks.look():
            if mark["source"] not in ("run", "monitor", "tune"):
                steps += self._take(mark)
        return steps

    def _take(self, mark: Mapping[str, Any]) -> list[Step]:
        name, t_ns, pid = mark["name"], mark["t_ns"], mark["pid"] or 0
        if name.startswith(_BETWEEN):
            self._between_ns[pid] = max(self._between_ns.get(pid, 0), t_ns)
        if name != "step_end":
            return []
        key = pid, mark["source"] or ""
        stream = self._streams.get(key)
        if stream is None or t_ns <= stream.end_ns:
            self._streams[key] = _Stream(t_ns, mark["index"])
            self._count(key, t_ns, 1)
            return []
        step = stream.take(t_ns, mark["index"])
        if not self._count(key, t_ns, step.count) or self._between_ns.get(pid, 0) >= step.begin_ns:
            return []
        return [step]

    def _count(self, key: tuple[int, str], t_ns: int, count: int) -> bool:
        """Whether this is the stream to follow."""
        now = self._streams.get(self._followed) if self._followed is not None else None
        if now is None or t_ns - now.end_ns > max(_QUIET_NS, _QUIET_STEPS * now.length_ns):
            self._followed = key
        if self._followed != key:
            return False
        self.ended += count
        return True


# Puts steps and their energy together into slices.

BLOCKS = 5
UPDATES = 2  # of the energy counter per block: then its error is a part of one step of the counter
SETTLE_STEPS = 2  # the GPU may still be working off steps that were announced before
PAUSE = 5.0  # a step so many times longer than usual had a checkpoint or the like


@dataclass(frozen=True)
class SliceOptions:
    steps: int = 20  # at least so many per slice
    settle_s: float = 0.5  # dropped after each change of the limit
    skip: int = 10  # the program's first steps compile and choose kernels


class Collector:
    """Makes one slice after the other, from the steps since `begin`."""

    def __init__(self, energy: LiveEnergy, options: SliceOptions) -> None:
        self._energy = energy
        self._options = options
        self._settled_ns = 0
        self._steps: list[Step] = []
        self._early = 0  # steps dropped although they ended after the limit settled

    def begin(self, t_ns: int, settle: bool) -> None:
        """Starts a slice: what ends before is not part of it. `settle` after a change of the limit."""
        self._settled_ns = t_ns + (round(self._options.settle_s * 1e9) if settle else 0)
        self._early = SETTLE_STEPS if settle else 0
        self._steps.clear()
        self._energy.forget()

    def take(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if step.begin_ns < self._settled_ns:
                continue
            if self._early:
                self._early -= 1
                continue
            self._steps.append(step)

    def made(self, limit_w: float, steps: int, span_s: float) -> Slice | None:
        """The slice, once it is long enough; None until then. `steps` and `span_s` are as in `Slice`."""
        usable = self._usable()
        if sum(step.count for step in usable) < self._options.steps:
            return None
        blocks = _blocks(usable, UPDATES * self._energy.period_ns)
        if len(blocks) < BLOCKS:
            return None
        counts = [sum(step.count for step in block) for block in blocks]
        times_s = [sum(s.end_ns - s.begin_ns for s in block) * 1e-9 for block in blocks]
        energies_j = [sum(self._energy.between_j(s.begin_ns, s.end_ns) for s in block) for block in blocks]
        return Slice(
            limit_w,
            tuple(time_s / count for time_s, count in zip(times_s, counts, strict=True)),
            tuple(energy_j / count for energy_j, count in zip(energies_j, counts, strict=True)),
            steps,
            span_s,
        )

    def _usable(self) -> list[Step]:
        covered_ns = self._energy.covered_ns()
        if covered_ns is None or not self._steps:
            return []
        # All of them, also those outside of the readings: they tell what is usual.
        usual = statistics.median((step.end_ns - step.begin_ns) / step.count for step in self._steps)
        return [
            step
            for step in self._steps
            if covered_ns[0] <= step.begin_ns
            and step.end_ns <= covered_ns[1]
            and step.end_ns - step.begin_ns <= PAUSE * usual * step.count
        ]


def _blocks(steps: Sequence[Step], length_ns: int) -> list[list[Step]]:
    """Whole blocks of at least that length; the rest at the end belongs to none."""
    blocks: list[list[Step]] = []
    block: list[Step] = []
    length = 0
    for step in steps:
        block.append(step)
        length += step.end_ns - step.begin_ns
        if length >= length_ns:
            blocks.append(block)
            block, length = [], 0
    return blocks


MARKS_FILE = "marks-tune.jsonl"
_POLL_S = 0.005
_LOOK_NS = 50_000_000  # how often to look into the spool
_REST_S = 0.1
_RESTS = 2.0  # once settled, read nothing for so many times the length of a slice
_MOST_VOID = 3

# Waits so many seconds; returns True when it is time to end.
Wait = Callable[[float], bool]


@dataclass
class Tuner:
    """Tunes until `wait` says so, or limits or energy are lost. The lender brings limits back."""

    lender: Lender
    energy: LiveEnergy
    policy: Policy
    devices: Sequence[str]
    spool: Path
    options: SliceOptions
    clock: Clock = SYSTEM
    problem: str = ""  # why tuning ended early
    _void: int = 0
    _set_w: float | None = None
    _begin_ns: int = 0  # of the slice, including the rest before it
    _measured_ns: int = 0  # without that rest
    _begin_steps: int = 0
    _looked_ns: int = 0
    _follower: StepFollower = field(init=False)
    _collector: Collector = field(init=False)

    def __post_init__(self) -> None:
        self._follower = StepFollower(self.spool)
        self._collector = Collector(self.energy, self.options)

    def run(self, wait: Wait) -> None:
        try:
            while self._follower.ended <= self.options.skip:
                if wait(_REST_S):
                    return
                self._follower.look()
            self._mark(
                "tune_begin", {"limits_w": self.policy.limits_w, "objective": self.policy.objective.kind}
            )
            self._apply("trying")
            while not self._slice(wait):
                pass
        except (UserError, SensorLost) as error:
            self.problem = str(error)
        if self._set_w == self.policy.limit_w:
            self._follower.look()
            steps, now_ns = self._follower.ended - self._begin_steps, self.clock.wall_ns()
            self.policy.finish(steps, (now_ns - self._begin_ns) * 1e-9)
        if self.problem:
            self._mark("tune_end", {"problem": self.problem})

    def _slice(self, wait: Wait) -> bool:
        """Measures one slice and acts on it; True when it is time to end."""
        found = None
        while found is None:
            if wait(_POLL_S):
                return True
            self.energy.read()
            if self.clock.mono_ns() - self._looked_ns >= _LOOK_NS:
                self._looked_ns = self.clock.mono_ns()
                self._collector.take(self._follower.look())
                now_ns = self.clock.wall_ns()
                steps = self._follower.ended - self._begin_steps
                span_s = (now_ns - self._begin_ns) * 1e-9
                found = self._collector.made(self.policy.limit_w, steps, span_s)
        if not self.lender.held():
            self._again()
            return False
        self._void = 0
        was_settled, searches = self.policy.settled, len(self.policy.searches)
        self.policy.take(found)
        took_ns = self.clock.wall_ns() - self._measured_ns
        if len(self.policy.searches) > searches:
            self._mark("workload_changed", {"why": self.policy.search.why})
        if self.policy.settled and not was_settled:
            self._mark("tune_settled", {"limit_w": self.policy.limit_w})
        self._apply("settled" if self.policy.settled else "trying")
        return self.policy.settled and was_settled and self._rest(wait, took_ns)

    def _rest(self, wait: Wait, took_ns: int) -> bool:
        """Once settled, looks at the program only now and then."""
        until_ns = self.clock.wall_ns() + round(_RESTS * took_ns)
        while self.clock.wall_ns() < until_ns:
            if wait(_REST_S):
                return True
        self._measured_ns = self.clock.wall_ns()
        self._collector.begin(self._measured_ns, settle=False)
        return False

    def _apply(self, why: str) -> None:
        """Begins the next slice, at the limit that the policy wants."""
        limit_w = self.policy.limit_w
        changed = limit_w != self._set_w
        if changed:
            self.lender.apply({(device, "power"): Limit(limit_w) for device in self.devices})
            self._set_w = limit_w
            self._mark("limit_set", {"limit_w": limit_w, "devices": list(self.devices), "why": why})
        self._begin_ns = self._measured_ns = self.clock.wall_ns()
        self._begin_steps = self._follower.ended
        self._collector.begin(self._begin_ns, settle=changed)

    def _again(self) -> None:
        """Something else took the limit back, so what was measured belongs to no known limit: begin again."""
        self._void += 1
        if self._void == _MOST_VOID:
            raise UserError("limits do not stand", "something else takes them back", "See smaragdine daemon")
        self._set_w = None
        self._apply("taken back by something else")

    def _mark(self, name: str, detail: dict[str, Any]) -> None:
        """Writes a mark into the recording; a full disk loses the mark, not the run."""
        mark = {"t_ns": self.clock.wall_ns(), "name": name, "source": "tune", "detail": detail}
        with (
            contextlib.suppress(OSError),
            open(self.spool / MARKS_FILE, "a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(mark) + "\n")
