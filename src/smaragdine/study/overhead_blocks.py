"""One program that runs all the time, and the recorder that comes and goes beside it.

The program has no hook and traces nothing. It stamps the ends of its steps into a file (see
experiments/study/overhead_loop.py), so that what it did in any stretch of time is known without asking it.
Blocks with and without the recorder alternate as ABBA: what drifts steadily cancels.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from smaragdine.accounting.summary import summarise
from smaragdine.arrays import Ints
from smaragdine.errors import UserError
from smaragdine.recording.command import build_command
from smaragdine.recording.printed import last_printed
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.recording.session import record_here
from smaragdine.recording.supervise import dying_with_us
from smaragdine.study.counters import Edge, mean_power_w, measured_counters
from smaragdine.study.settings import Setting
from smaragdine.sweep.groups import end

STAMPS_VARIABLE = "STEP_STAMPS"
DRIVER = "overhead_loop.py"
SCRATCH = "overhead-"  # folders beside the results, while it is measured
_LOOK_S = 0.05
_GRACE_S = 20.0
_FIRST_STEP_S = 300.0  # to start a framework and make data
_WARM_UP_S = 3.0
_SETTLE_S = 0.5  # after the recorder came or went
_STAMPS_A_BLOCK = 8
_LONGEST_BLOCK_S = 10.0
_PATIENCE = 10  # times a block's length, with a program that has stalled
_AT_MOST_S = 86_400  # should nobody end the program


@dataclass(frozen=True)
class Block:
    """A stretch of the program's run."""

    recorded: bool
    step_s: float
    steps: int
    power_w: Mapping[str, float] = field(default_factory=dict[str, float])  # of devices with a counter
    # devices whose power is estimated → the monitor's energy as a part of the program's; recorded blocks only
    monitor_part: Mapping[str, float] = field(default_factory=dict[str, float])
    core_share: float | None = None  # of one core, the recorder's


@dataclass(frozen=True)
class Measured:
    blocks: list[Block]
    block_s: float
    stamp_s: Mapping[str, float]  # device → how exactly its counter's steps are timed, at worst
    last: Recording  # for facts about the machine; its folder is gone


class Stopped(Exception):
    """The user wants no more."""


def measure_blocks(
    setting: Setting,
    out: Path,
    pairs: int,
    block_s: float,
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> Measured:
    """2 × `pairs` blocks. Raises `Stopped`, and `UserError` where the program ends or announces no steps."""
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
        blocks: list[Block] = []
        for pair in range(pairs):
            order = (False, True) if pair % 2 == 0 else (True, False)
            blocks += [measuring.block(recorded, block_s) for recorded in order]
            say(f"overhead: {pair + 1} of {pairs} pairs of blocks")
        assert measuring.last is not None
        return Measured(blocks, block_s, measuring.stamp_s, measuring.last)


def stamps_in(path: Path) -> Ints:
    """Rows of the monotonic clock in ns and the steps so far."""
    try:
        values = np.fromfile(path, dtype="<i8")
    except FileNotFoundError:
        values = np.zeros(0, dtype="<i8")
    return values[: values.size // 2 * 2].reshape(-1, 2).astype(np.int64)


def steps_between(stamps: Ints, begin_ns: int, end_ns: int) -> tuple[int, float] | None:
    """Whole steps inside, and the seconds that one took; None where fewer than two stamps are inside."""
    inside = stamps[(stamps[:, 0] >= begin_ns) & (stamps[:, 0] <= end_ns)]
    if len(inside) < 2 or inside[-1, 1] == inside[0, 1]:
        return None
    steps = int(inside[-1, 1] - inside[0, 1])
    return steps, float(inside[-1, 0] - inside[0, 0]) * 1e-9 / steps


class _Measuring:
    def __init__(
        self,
        setting: Setting,
        program: subprocess.Popen[bytes],
        folder: Path,
        log: Path,
        edges: Callable[[], Mapping[str, Edge]],
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
        """Steps of a second would leave two or three of them in a block; but nobody waits for hours."""
        apart_s = float(np.median(np.diff(self._stamps()[:, 0]))) * 1e-9
        return max(block_s, min(_STAMPS_A_BLOCK * apart_s, _LONGEST_BLOCK_S))

    def block(self, recorded: bool, block_s: float) -> Block:
        if not recorded:
            return self._plain_block(False, block_s)
        self._count += 1
        folder = self._folder / f"recorded-{self._count}"
        with record_here(folder, label="overhead"):
            block = self._plain_block(True, block_s)
        return self._with_monitor(block, open_recording(folder))

    def _plain_block(self, recorded: bool, block_s: float) -> Block:
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
        return Block(recorded, found[1], found[0], mean_power_w(first, last))

    def _with_monitor(self, block: Block, recording: Recording) -> Block:
        figures = recording.info.get("monitor") or []
        if not figures:
            why = "; ".join(recording.info.get("problems", [])) or "it left no figures"
            raise UserError("the monitor did not run beside the program", why, "See smaragdine doctor")
        summary = summarise(recording)
        self.last = recording
        estimated = {
            device: owners
            for device, owners in summary.owners.items()
            if summary.devices[device].provenance != "measured"
        }
        program_j = sum(owners.program_j for owners in estimated.values())
        monitor_j = sum(owners.monitor_j for owners in estimated.values())
        parts = {" + ".join(sorted(estimated)): monitor_j / program_j} if program_j > 0 else {}
        return Block(True, block.step_s, block.steps, block.power_w, parts, float(figures[0]["core_share"]))

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
    setting: Setting, environment: Mapping[str, str], stamps: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "wb") as printed:
        program = subprocess.Popen(
            command_of(setting, environment),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**environment, STAMPS_VARIABLE: str(stamps.absolute())},
            process_group=0,  # Ctrl-C is meant for us, who end it
            preexec_fn=dying_with_us(),  # it would train on for a day
        )
    try:
        yield program
    finally:
        end(program, _GRACE_S)


def command_of(setting: Setting, environment: Mapping[str, str]) -> tuple[str, ...]:
    """A program of ours in its driver, which stamps its steps; any other one must stamp by itself."""
    python, *words = build_command(setting.words, environment).argv
    framework = setting.facts.get("framework")
    if framework is None:
        return (python, *words)
    driver = Path(words[0]).with_name(DRIVER)
    return (python, str(driver), str(framework), *words, "--seconds", str(_AT_MOST_S))
