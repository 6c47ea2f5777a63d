"""Measures what sampling costs the program, in time and in energy.

Time: seconds per step with the recorder beside the program ÷ without it, over pairs of blocks. Energy: the
same in joules per step, for devices with a counter. If power is estimated, no counter shows a difference; we
then give the monitor's own energy as a part of the program's, estimated too.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from smaragdine.accounting.footprint import write_json
from smaragdine.accounting.run import Run
from smaragdine.arrays import Ints
from smaragdine.clock import SYSTEM
from smaragdine.errors import UserError
from smaragdine.files import last_printed, read_json
from smaragdine.limits.nvml import open_gpus
from smaragdine.recording.command import build_command
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.recording.session import record_here
from smaragdine.sensors import rapl
from smaragdine.sensors.base import Sensor, SensorLost
from smaragdine.sensors.discover import settings_from_environment
from smaragdine.sensors.nvml import discover as nvml_sensors
from smaragdine.sensors.nvml.gpus import ask, hold_library, nvml, release_library
from smaragdine.sensors.nvml.power import Watch
from smaragdine.stats import alternating_interval, mean_interval, ratio_interval
from smaragdine.study.plan import StudySetting
from smaragdine.study.results import hardware_of
from smaragdine.system import dying_with_us, end

# Mean power over a stretch of time, from energy counters read at its two edges.
#
# A GPU's counter steps every 100 ms, and a value read in between is old. So an edge is where the counter
# steps, as a tight loop of polls sees it; we state how long the last poll was.

_LONGEST_NS = 500_000_000  # a counter that does not step for so long stands still
_POLL_S = 0.001


@dataclass(frozen=True)
class CounterReading:
    """A device's counter at one time."""

    mono_ns: int
    energy_j: float
    within_ns: int  # the time is exact to half of this
    wraps_at_j: float | None = None


Read = Callable[[], Mapping[str, CounterReading]]


def mean_power_w(first: Mapping[str, CounterReading], last: Mapping[str, CounterReading]) -> dict[str, float]:
    """For every device with both edges."""
    found: dict[str, float] = {}
    for device in first.keys() & last.keys():
        begin, end = first[device], last[device]
        used_j = end.energy_j - begin.energy_j
        if used_j < 0 and end.wraps_at_j is not None:
            used_j += end.wraps_at_j
        if used_j > 0 and end.mono_ns > begin.mono_ns:
            found[device] = used_j / ((end.mono_ns - begin.mono_ns) * 1e-9)
    return dict(sorted(found.items()))


@contextlib.contextmanager
def measured_counters(environment: Mapping[str, str]) -> Iterator[Read]:
    """Counters of sockets and their memory, and of the GPUs that a program with this environment sees."""
    settings = settings_from_environment(environment)
    sockets = rapl.open_sensors(root=settings.powercap_root).sensors
    held = False
    try:
        watches: dict[str, Watch] = {}
        uuids = _visible(settings.cuda_visible, settings.cuda_order)
        if uuids:
            hold_library()
            held = True
            watches = _watches(uuids)
        yield lambda: {**_read_sockets(sockets), **_read_gpus(watches)}
    finally:
        for sensor in sockets:
            sensor.close()
        if held:
            release_library()


def _visible(visible: str | None, order: str | None) -> set[str]:
    found = nvml_sensors.open_sensors(visible=visible, device_order=order)
    for sensor in found.sensors:
        sensor.close()
    gpus: Any = found.facts.get("gpus") or []
    return {str(gpu["uuid"]) for gpu in gpus}


def _watches(uuids: set[str]) -> dict[str, Watch]:
    lib = nvml()
    found: dict[str, Watch] = {}
    for gpu in open_gpus():

        def read_mj(handle: Any = gpu.handle) -> int:
            return lib.nvmlDeviceGetTotalEnergyConsumption(handle)

        if gpu.uuid in uuids and ask(read_mj) is not None:
            found[gpu.device] = Watch(read_mj, SYSTEM)
    return found


def _read_sockets(sensors: list[Sensor]) -> dict[str, CounterReading]:
    found: dict[str, CounterReading] = {}
    for sensor in sensors:
        channels = sensor.channels()
        begin_ns = time.monotonic_ns()
        try:
            readings = sensor.read()
        except SensorLost:
            continue
        end_ns = time.monotonic_ns()
        for _, number, energy_j in readings:
            channel = channels[number]
            # A second die of a socket is the same device: their sum looks like a wrap of one of them.
            if channel.scope == "device" and channel.device not in found:
                middle_ns = (begin_ns + end_ns) // 2
                found[channel.device] = CounterReading(
                    middle_ns, energy_j, end_ns - begin_ns, channel.wraps_at
                )
    return found


def _read_gpus(watches: Mapping[str, Watch]) -> dict[str, CounterReading]:
    """Waits until every counter has stepped once."""
    found: dict[str, CounterReading] = {}
    for watch in watches.values():
        watch.restart()
    deadline_ns = time.monotonic_ns() + _LONGEST_NS
    while len(found) < len(watches) and time.monotonic_ns() < deadline_ns:
        for device, watch in watches.items():
            change = None if device in found else ask(watch.poll)
            if change is not None:
                found[device] = CounterReading(change.mono_ns, change.value_mj / 1000, change.gap_ns)
        time.sleep(_POLL_S)
    return found


# One program that runs all the time, and a recorder that comes and goes beside it.
#
# The program has no hook and traces nothing. It stamps the ends of its steps into a file (see
# experiments/study/overhead_loop.py), so we know what it did in any stretch of time without asking it. Blocks
# with and without the recorder alternate as ABBA, so that steady drift cancels.

STAMPS_VARIABLE = "STEP_STAMPS"
DRIVER = "overhead_loop.py"
SCRATCH = "overhead-"  # folders beside the results, during the measurement
_LOOK_S = 0.05
_GRACE_S = 20.0
_FIRST_STEP_S = 300.0  # to start a framework and make data
_WARM_UP_S = 3.0
_SETTLE_S = 0.5  # wait so long after the recorder came or went
_STAMPS_A_BLOCK = 8
_LONGEST_BLOCK_S = 10.0
_PATIENCE = 10  # times a block's length: then the program has stalled
_AT_MOST_S = 86_400  # if nobody ends the program


@dataclass(frozen=True)
class OverheadBlock:
    """A stretch of the program's run."""

    recorded: bool
    step_s: float
    steps: int
    power_w: Mapping[str, float] = field(default_factory=dict[str, float])  # for devices with a counter
    # device whose power is estimated → the monitor's energy as a part of the program's; recorded blocks only
    monitor_part: Mapping[str, float] = field(default_factory=dict[str, float])
    core_share: float | None = None  # the recorder's part of one core


@dataclass(frozen=True)
class MeasuredOverhead:
    blocks: list[OverheadBlock]
    block_s: float
    stamp_s: Mapping[str, float]  # device → the worst timing of its counter's steps
    last: Recording  # for facts about the machine; its folder is gone


class Stopped(Exception):
    """The user wants to stop."""


def measure_blocks(
    setting: StudySetting,
    out: Path,
    pairs: int,
    block_s: float,
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> MeasuredOverhead:
    """Measures 2 × `pairs` blocks. Raises `Stopped`, or `UserError` if the program ends or has no steps."""
    log = out / "logs" / f"overhead-{setting.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **setting.environment}
    with (
        tempfile.TemporaryDirectory(prefix=SCRATCH, dir=out) as scratch,
        measured_counters(environment) as edges,
        _running(setting, environment, Path(scratch) / "stamps", log) as program,
    ):
        measuring = _Measuring(setting, program, Path(scratch), log, edges, stop)
        measuring.warm_up()
        block_s = measuring.long_enough_s(block_s)
        blocks: list[OverheadBlock] = []
        for pair in range(pairs):
            order = (False, True) if pair % 2 == 0 else (True, False)
            blocks += [measuring.block(recorded, block_s) for recorded in order]
            say(f"overhead: {pair + 1} of {pairs} pairs of blocks")
        assert measuring.last is not None
        return MeasuredOverhead(blocks, block_s, measuring.stamp_s, measuring.last)


def stamps_in(path: Path) -> Ints:
    """Rows of monotonic time in ns and the number of steps so far."""
    try:
        values = np.fromfile(path, dtype="<i8")
    except FileNotFoundError:
        values = np.zeros(0, dtype="<i8")
    return values[: values.size // 2 * 2].reshape(-1, 2).astype(np.int64)


def steps_between(stamps: Ints, begin_ns: int, end_ns: int) -> tuple[int, float] | None:
    """Whole steps inside, and the seconds that one took; None if fewer than two stamps are inside."""
    inside = stamps[(stamps[:, 0] >= begin_ns) & (stamps[:, 0] <= end_ns)]
    if len(inside) < 2 or inside[-1, 1] == inside[0, 1]:
        return None
    steps = int(inside[-1, 1] - inside[0, 1])
    return steps, float(inside[-1, 0] - inside[0, 0]) * 1e-9 / steps


class _Measuring:
    def __init__(
        self,
        setting: StudySetting,
        program: subprocess.Popen[bytes],
        folder: Path,
        log: Path,
        edges: Callable[[], Mapping[str, CounterReading]],
        stop: Callable[[], bool],
    ) -> None:
        self._setting = setting
        self._program = program
        self._folder = folder
        self._log = log
        self._edges = edges
        self._stop = stop
        self._count = 0
        self.stamp_s: dict[str, float] = {}
        self.last: Recording | None = None

    def warm_up(self) -> None:
        deadline_s = time.monotonic() + _FIRST_STEP_S
        while not len(self._stamps()):
            if time.monotonic() > deadline_s:
                why = f"no step ended in {_FIRST_STEP_S:.0f} s"
                raise UserError(f"{self._setting.name} announces no steps", why, f"See {self._log}")
            self._wait(_LOOK_S)
        self._wait(_WARM_UP_S)
        while len(self._stamps()) < 3:
            self._wait(_LOOK_S)

    def long_enough_s(self, block_s: float) -> float:
        """Long enough for many steps, even if each takes a second; but nobody waits for hours."""
        apart_s = float(np.median(np.diff(self._stamps()[:, 0]))) * 1e-9
        return max(block_s, min(_STAMPS_A_BLOCK * apart_s, _LONGEST_BLOCK_S))

    def block(self, recorded: bool, block_s: float) -> OverheadBlock:
        if not recorded:
            return self._plain_block(False, block_s)
        self._count += 1
        folder = self._folder / f"recorded-{self._count}"
        with record_here(folder, label="overhead"):
            block = self._plain_block(True, block_s)
        return self._with_monitor(block, open_recording(folder))

    def _plain_block(self, recorded: bool, block_s: float) -> OverheadBlock:
        self._wait(_SETTLE_S)
        begin_ns = time.monotonic_ns()
        first = self._edges()
        self._wait(block_s - (time.monotonic_ns() - begin_ns) * 1e-9)
        deadline_s = time.monotonic() + _PATIENCE * block_s
        while steps_between(self._stamps(), begin_ns, time.monotonic_ns()) is None:
            if time.monotonic() > deadline_s:
                why = f"not two stamps in {(1 + _PATIENCE) * block_s:.0f} s"
                raise UserError(f"{self._setting.name} makes no steps any more", why, f"See {self._log}")
            self._wait(_LOOK_S)
        last = self._edges()
        found = steps_between(self._stamps(), begin_ns, time.monotonic_ns())
        assert found is not None
        for device in first.keys() & last.keys():
            exact_s = (first[device].within_ns + last[device].within_ns) * 0.5e-9
            self.stamp_s[device] = max(self.stamp_s.get(device, 0.0), exact_s)
        return OverheadBlock(recorded, found[1], found[0], mean_power_w(first, last))

    def _with_monitor(self, block: OverheadBlock, recording: Recording) -> OverheadBlock:
        figures = recording.info.get("monitor") or []
        if not figures:
            why = "; ".join(recording.info.get("problems", [])) or "it left no figures"
            raise UserError("the monitor did not run beside the program", why, "See smaragdine doctor")
        summary = Run(recording).summary
        self.last = recording
        estimated = {
            device: owners
            for device, owners in summary.owners.items()
            if summary.devices[device].provenance != "measured"
        }
        program_j = sum(owners.program_j for owners in estimated.values())
        monitor_j = sum(owners.monitor_j for owners in estimated.values())
        parts = {" + ".join(sorted(estimated)): monitor_j / program_j} if program_j > 0 else {}
        return OverheadBlock(
            True, block.step_s, block.steps, block.power_w, parts, float(figures[0]["core_share"])
        )

    def _stamps(self) -> Ints:
        return stamps_in(self._folder / "stamps")

    def _wait(self, wait_s: float) -> None:
        deadline_s = time.monotonic() + wait_s
        while True:
            if self._stop():
                raise Stopped
            if self._program.poll() is not None:
                code = self._program.returncode
                why = last_printed(self._log) or f"exit code {code}"
                raise UserError(f"{self._setting.name} ended too early", why, f"See {self._log}")
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, _LOOK_S))


@contextlib.contextmanager
def _running(
    setting: StudySetting, environment: Mapping[str, str], stamps: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "wb") as printed:
        program = subprocess.Popen(
            command_of(setting, environment),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**environment, STAMPS_VARIABLE: str(stamps.absolute())},
            process_group=0,  # Ctrl-C is for us: we end it
            preexec_fn=dying_with_us(),  # else it would train on for a day
        )
    try:
        yield program
    finally:
        end(program, _GRACE_S)


def command_of(setting: StudySetting, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Runs a program of ours in its driver, which stamps its steps; any other must stamp its own."""
    python, *words = build_command(setting.words, environment).argv
    framework = setting.facts.get("framework")
    if framework is None:
        return (python, *words)
    driver = Path(words[0]).with_name(DRIVER)
    return (python, str(driver), str(framework), *words, "--seconds", str(_AT_MOST_S))


OVERHEAD = "overhead.json"
BLOCK_S = 2.0
_FORMAT = 1


@dataclass(frozen=True)
class ExtraCost:
    """How much more, as a part of the value without: 0.01 is one per cent. With the 95 % interval."""

    low: float
    middle: float
    high: float
    provenance: str = "measured"


@dataclass(frozen=True)
class Overhead:
    setting: str
    pairs: int
    block_s: float
    step_s: float  # without the recorder
    time: ExtraCost  # the mean over pairs
    time_median: ExtraCost  # not moved by a pair in which somebody else took the machine
    energy: Mapping[str, ExtraCost]  # device → per step
    core_share: float  # the recorder's part of one core
    hardware: str
    remarks: tuple[str, ...] = ()
    blocks: tuple[OverheadBlock, ...] = field(default=(), repr=False)


def measure_overhead(
    setting: StudySetting,
    out: Path,
    say: Callable[[str], None],
    stop: object,  # true once the user wants no more
    pairs: int = 20,
    block_s: float = BLOCK_S,
) -> Overhead | None:
    """Measures into OUT/overhead.json, unless it is there already. None if `stop` became true, or if the
    program cannot run without us."""
    # Whole rounds of ABBA: half a round would let drift through.
    pairs = max(2, pairs + pairs % 2)
    known = {each.setting: each for each in load_overhead(out)}
    if setting.name in known and known[setting.name].pairs >= pairs:
        return known[setting.name]
    if setting.facts.get("framework") == "tf1":
        say(f"overhead of {setting.name}: not measured, its program records itself by a session hook")
        return None
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob(f"{SCRATCH}*"):  # left by a process that was killed
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
    try:
        measured = measure_blocks(setting, out, pairs, block_s, say, lambda: bool(stop))
    except Stopped:
        return None
    found = overhead_of(setting.name, measured)
    known[setting.name] = found
    values = {name: asdict(each) for name, each in sorted(known.items())}
    write_json({"format_version": _FORMAT, "settings": values}, out / OVERHEAD)
    return found


def load_overhead(out: Path) -> list[Overhead]:
    """Of every setting for which it was measured."""
    path = out / OVERHEAD
    if not path.is_file():
        return []
    try:
        values = read_json(path)
        if int(values["format_version"]) > _FORMAT:
            raise UserError(f"{path} is of a newer version of Smaragdine", remedy="Upgrade it")
        return [_from_dict(each) for each in values["settings"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read", str(error), "Remove it: it is measured again") from None


def overhead_of(setting: str, measured: MeasuredOverhead) -> Overhead:
    blocks = measured.blocks
    with_it, without = pairs_of(blocks)
    times = [b.step_s for b in with_it], [b.step_s for b in without]
    return Overhead(
        setting=setting,
        pairs=len(with_it),
        block_s=measured.block_s,
        step_s=statistics.median(times[1]),
        time=_cost(alternating_interval(*times)),
        time_median=_cost(ratio_interval(*times)),
        energy=_energy(with_it, without),
        core_share=statistics.median([b.core_share for b in with_it if b.core_share is not None] or [0.0]),
        hardware=hardware_of(measured.last),
        remarks=tuple(_remarks(measured)),
        blocks=tuple(blocks),
    )


def pairs_of(blocks: Sequence[OverheadBlock]) -> tuple[list[OverheadBlock], list[OverheadBlock]]:
    """Each pair's block with the recorder, and the one without."""
    pairs = list(zip(blocks[::2], blocks[1::2], strict=True))
    if any(a.recorded == b.recorded for a, b in pairs):
        raise ValueError("a pair has a block of each kind")
    return [a if a.recorded else b for a, b in pairs], [b if a.recorded else a for a, b in pairs]


def _energy(with_it: Sequence[OverheadBlock], without: Sequence[OverheadBlock]) -> dict[str, ExtraCost]:
    found: dict[str, ExtraCost] = {}
    measured = set(with_it[0].power_w).intersection(*(b.power_w for b in (*with_it, *without)))
    for device in sorted(measured):
        step_j = [[b.power_w[device] * b.step_s for b in kind] for kind in (with_it, without)]
        found[device] = _cost(alternating_interval(*step_j))
    estimated = set(with_it[0].monitor_part).intersection(*(b.monitor_part for b in with_it)) - measured
    for device in sorted(estimated):
        low, middle, high = mean_interval([b.monitor_part[device] for b in with_it])
        found[device] = ExtraCost(max(low, 0.0), middle, high, "estimated")
    return found


def _cost(ratio: tuple[float, float, float]) -> ExtraCost:
    low, middle, high = ratio
    return ExtraCost(low - 1, middle - 1, high - 1)


def _remarks(measured: MeasuredOverhead) -> list[str]:
    found: list[str] = []
    pairs = len(measured.blocks) / 2
    for device, stamp_s in sorted(measured.stamp_s.items()):
        one = stamp_s / measured.block_s
        found.append(
            f"{device}: its counter's steps are timed to {stamp_s * 1e3:.1f} ms at worst, {one:.2%} of a "
            f"block and {one * math.sqrt(2 / pairs):.2%} of the mean over {pairs:.0f} pairs"
        )
    if any(block.monitor_part for block in measured.blocks):
        found.append("estimated: the monitor's own energy as a part of the program's")
    return found


def _from_dict(values: dict[str, Any]) -> Overhead:
    values = dict(values)
    for name in ("time", "time_median"):
        values[name] = ExtraCost(**values[name])
    values["energy"] = {device: ExtraCost(**cost) for device, cost in values["energy"].items()}
    values["remarks"] = tuple(values["remarks"])
    values["blocks"] = tuple(OverheadBlock(**block) for block in values["blocks"])
    return Overhead(**values)
