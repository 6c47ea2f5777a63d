"""Records a program for as many steps as a point of a profile needs, ends it, and measures its steps.

The program runs under `smaragdine run`, which passes our request to end on to it, and dies with us.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from smaragdine.accounting.run import Run
from smaragdine.accounting.spans import BOUNDARIES, main_steps
from smaragdine.accounting.steps import step_energies
from smaragdine.arrays import Ints
from smaragdine.errors import UserError
from smaragdine.files import lines_of, tail
from smaragdine.recording.format import INFO_FILE, SPOOL_FOLDER, channel_from_dict
from smaragdine.recording.marks import NewMarks
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.sensors.base import Channel
from smaragdine.sensors.discover import COUNTER_PERIOD_NS
from smaragdine.system import GRACE_S, dying_with_us, end, end_rest
from smaragdine.units import seconds

# What a recording says about a point of a profile: energy and time of a step, and how sure that is.
#
# A step lasts from the end of one to the end of the next. We drop steps that compile and allocate, and those
# with an epoch's end or an evaluation in them. The rest is cut into blocks, each a repeat of the profile: the
# spread over blocks allows for steps that resemble their neighbours.

UPDATES = 50  # a point lasts at least so many updates of the counter
_MOST_MISSING = 0.01  # the part of a point's time that readings may miss
_STEPS_EVERY = re.compile(r"\bcounter steps every (\d+) ms")


@dataclass(frozen=True)
class StepBlock:
    """Steps in a row; figures are their sum."""

    steps: int
    time_s: float
    energy_j: float
    energy_error_j: float  # standard error: a block's edges are known to one update of the sensor


@dataclass(frozen=True)
class ProfiledSteps:
    """A point as measured."""

    blocks: tuple[StepBlock, ...]
    updates: float  # of the counter, over all blocks
    provenance: str

    @property
    def count(self) -> int:
        return sum(block.steps for block in self.blocks)

    @property
    def time_s(self) -> float:
        """Time per step."""
        return sum(block.time_s for block in self.blocks) / self.count

    @property
    def energy_j(self) -> float:
        """Energy per step."""
        return sum(block.energy_j for block in self.blocks) / self.count

    @property
    def time_error_s(self) -> float | None:
        """Standard error of `time_s`; None for a single block."""
        return _standard_error([block.time_s / block.steps for block in self.blocks])

    @property
    def energy_error_j(self) -> float | None:
        """Standard error of `energy_j`: the spread over blocks, no less than the sensor's updates allow."""
        spread = _standard_error([block.energy_j / block.steps for block in self.blocks])
        # Blocks touch: what one gets too much, the next gets too little.
        edges_j = max(block.energy_error_j for block in self.blocks) / self.count
        return None if spread is None else max(spread, edges_j)


def update_period_s(channels: Sequence[Channel], device: str) -> float | None:
    """How often we see a new value of the device's counter or, without a counter, of its power. None if
    nothing is known of the device."""
    mine = [channel for channel in channels if channel.device == device]
    for quantity in ("energy", "power"):
        for channel in mine:
            if channel.quantity == quantity:
                # We look at a GPU's counter less often than it steps; its detail says how often it steps.
                steps = _STEPS_EVERY.search(channel.detail)
                period_ms = float(steps[1]) if steps else channel.period_ms
                return max(period_ms / 1e3, COUNTER_PERIOD_NS / 1e9)
    return None


def steps_of(run: Run, device: str, warm_up: int, blocks: int) -> ProfiledSteps:
    """Measures a point. Raises `UserError` if the recording does not make one."""
    channel = run.channels.get(device)
    period_s = update_period_s(run.recording.channels, device)
    announced = None if run.table is None else step_energies(run.table, run.traces)
    if channel is None or period_s is None or announced is None or device not in announced.energy_j:
        what = "no steps" if channel is not None and announced is None else f"nothing of {device}"
        remedy = 'Mark them with smaragdine.mark("step_end", i)' if what == "no steps" else ""
        raise UserError(f"{run.path} has {what}", remedy=remedy)
    spans_ns = announced.steps.spans_ns[max(warm_up - 1, 0) :]
    energy_j = announced.energy_j[device][max(warm_up - 1, 0) :]
    plain = _plain(run.recording, spans_ns)
    spans_ns, energy_j = spans_ns[plain], energy_j[plain]
    if not len(spans_ns):
        raise UserError(
            f"{run.path} has no steps after the first {warm_up}",
            remedy="Let the program run longer, or drop fewer: --warm-up N",
        )
    refuse_gaps(run, spans_ns, device)
    known = np.isfinite(energy_j)
    spans_ns, energy_j = spans_ns[known], energy_j[known]
    length_s = (spans_ns[:, 1] - spans_ns[:, 0]) * 1e-9
    edge_s = max(channel.period_ms / 1e3, COUNTER_PERIOD_NS / 1e9)
    found: list[StepBlock] = []
    count = min(blocks, len(spans_ns) // 2) or 1
    for rows in np.array_split(np.arange(len(spans_ns)), count):
        time_s, sum_j = float(length_s[rows].sum()), float(energy_j[rows].sum())
        # Each of the two edges lies anywhere between two updates.
        error_j = sum_j / time_s * edge_s / math.sqrt(6) if time_s > 0 else 0.0
        found.append(StepBlock(len(rows), time_s, sum_j, error_j))
    return ProfiledSteps(tuple(found), float(length_s.sum()) / period_s, channel.provenance)


def mean_power_w(run: Run, device: str, begin_ns: int, end_ns: int) -> float | None:
    """None if no reading covers that time."""
    trace = run.traces.get(device)
    covered_s = 0.0 if trace is None else trace.covered_s(begin_ns, end_ns)
    return trace.energy_j(begin_ns, end_ns) / covered_s if trace is not None and covered_s > 0 else None


def _plain(recording: Recording, spans_ns: Ints) -> npt.NDArray[np.bool_]:
    """Steps with nothing else in them."""
    marks = recording.marks
    boundary = np.isin(marks["name"].to_numpy(zero_copy_only=False).astype(str), [*BOUNDARIES, "train_end"])
    t_ns = np.sort(marks["t_ns"].to_numpy()[boundary])
    return np.searchsorted(t_ns, spans_ns[:, 0]) == np.searchsorted(t_ns, spans_ns[:, 1])


def refuse_gaps(run: Run, spans_ns: Ints, device: str) -> None:
    """Refuses gaps: time without readings would count as time without power."""
    covered_ns = np.diff(run.traces[device].covered_until_ns(spans_ns), axis=1).sum()
    length_ns = (spans_ns[:, 1] - spans_ns[:, 0]).sum()
    if covered_ns < (1 - _MOST_MISSING) * length_ns:
        missing_s = float(length_ns - covered_ns) * 1e-9
        why = f"{seconds(missing_s)} of {device} are missing"
        raise UserError(f"{run.path} cannot be used", why, "Profile it again")


def _standard_error(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


# How it ended. enough: we ended it · ended: by itself · failed: with another error · stuck: no step came
How = Literal["enough", "ended", "out_of_memory", "failed", "stuck"]

_LOOK_S = 0.1
_MARGIN = 1.1  # some steps do not count: an epoch ends in them
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|"
    r"CUDA_ERROR_OUT_OF_MEMORY|RESOURCE_EXHAUSTED|ResourceExhaustedError|CUBLAS_STATUS_ALLOC_FAILED|"
    r"CUDNN_STATUS_ALLOC_FAILED|DefaultCPUAllocator: (?:can't|not enough)|\bMemoryError\b"
)


@dataclass(frozen=True)
class Need:
    """When a point was measured for long enough."""

    device: str
    warm_up: int  # steps to drop
    steps: int  # at least so many after them
    patience_s: float  # the longest wait for the next step


@dataclass(frozen=True)
class ProfilerResult:
    how: How
    steps: int  # announced steps
    returncode: int = 0
    said: str = ""  # the last line the program printed


class Announced:
    """Ends of steps, as they come into the spool of a recording in the making."""

    def __init__(self, folder: Path) -> None:
        self._marks = NewMarks(folder / SPOOL_FOLDER)
        self._ends_ns: dict[tuple[int, str], list[int]] = {}

    @property
    def begun(self) -> bool:
        return self._marks.begun

    def look(self) -> list[int]:
        """Those of the process that announced most."""
        for mark in self._marks.look():
            if mark["name"] == "step_end":
                key = int(mark["pid"] or 0), str(mark["source"])
                self._ends_ns.setdefault(key, []).append(mark["t_ns"])
        return max(self._ends_ns.values(), key=len, default=[])


def run_point(
    words: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str], need: Need
) -> ProfilerResult:
    """Records the program into the new folder `folder`, and what it prints into `log`."""
    shutil.rmtree(folder, ignore_errors=True)
    announced, told_s, enough, stuck = Announced(folder), 0.0, False, False
    last, last_s = 0, time.monotonic()
    with recorded_program(words, folder, log, environment) as child:
        while child.poll() is None:
            time.sleep(_LOOK_S)
            now_s = time.monotonic()
            if told_s:
                if now_s - told_s > GRACE_S:
                    child.kill()
                continue
            ends_ns = announced.look()
            # The first mark is our own: the program begins.
            if len(ends_ns) > last or not announced.begun:
                last, last_s = len(ends_ns), now_s
            enough = _enough(ends_ns, folder, need)
            stuck = not enough and now_s - last_s > need.patience_s
            if enough or stuck:
                # End all at once: a shell between would end first, and the recording before its steps.
                os.killpg(child.pid, signal.SIGTERM)
                told_s = now_s
    said = tail(log)
    line = _last_words(said)
    if enough or stuck:
        end_rest(child.pid)
        return ProfilerResult("enough" if enough else "stuck", last, child.returncode, line)
    last = max(last, len(announced.look()), _written(folder))
    if child.returncode and _OUT_OF_MEMORY.search(said):
        return ProfilerResult("out_of_memory", last, child.returncode, line)
    return ProfilerResult("failed" if child.returncode else "ended", last, child.returncode, line)


def _written(folder: Path) -> int:
    """Steps of a recording that is over: some may have come after the last look."""
    try:
        return main_steps(open_recording(folder).marks).num_rows
    except UserError:
        return 0


def needed_s(channels: Sequence[Any], device: str) -> float | None:
    """How long a point lasts at least; None while nothing is known of the device."""
    period_s = update_period_s([channel_from_dict(each) for each in channels], device)
    return None if period_s is None else UPDATES * period_s


def _enough(ends_ns: Sequence[int], folder: Path, need: Need) -> bool:
    first = max(need.warm_up, 1) - 1
    if len(ends_ns) - 1 - first < max(need.steps, 1):
        return False
    with contextlib.suppress(OSError, ValueError, KeyError):
        length_s = needed_s(json.loads((folder / INFO_FILE).read_bytes())["channels"], need.device)
        if length_s is not None:
            return (ends_ns[-1] - ends_ns[first]) * 1e-9 >= _MARGIN * length_s
    return False


@contextlib.contextmanager
def recorded_program(
    words: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that is recorded into `folder`, and what it prints into `log`. After the block it has ended;
    if the block fails, so has all that it started."""
    # -P: we must not import a file named numpy.py beside the user's script.
    ours = [sys.executable, "-P", "-m", "smaragdine", "run", "--trace", "off", "-o", str(folder)]
    with open(log, "wb") as out:
        child = subprocess.Popen(
            [*ours, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=dict(environment),
            process_group=0,  # Ctrl-C is for us: we end it
            preexec_fn=dying_with_us(),
        )
    try:
        yield child
        child.wait()
    except BaseException:
        end(child)
        raise


def _last_words(said: str) -> str:
    """The program's last line before the table of `smaragdine run`; an error, if there is one."""
    lines = lines_of(said)
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|smaragdine)\b.*:", line)]
    return (errors or lines or [""])[-1]
