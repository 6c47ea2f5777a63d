"""Runs a program for as many steps as a point of a profile needs, as a recording, and ends it then.

The program runs under `smaragdine run`, which passes our request to end on to it, and dies with us.
"""

from __future__ import annotations

import contextlib
import json
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

from smaragdine.accounting.step_spans import main_steps
from smaragdine.allocate.profiling import UPDATES, update_period_s
from smaragdine.errors import UserError
from smaragdine.recording.format import INFO_FILE, SPOOL_FOLDER, channel_from_dict
from smaragdine.recording.marks import NewMarks
from smaragdine.recording.printed import lines_of, tail
from smaragdine.recording.reader import open_recording
from smaragdine.recording.supervise import dying_with_us
from smaragdine.sweep.groups import GRACE_S, end, end_rest

# enough: it ran until we ended it · ended: by itself · out_of_memory · failed: with another error
# stuck: no step came for too long
How = Literal["enough", "ended", "out_of_memory", "failed", "stuck"]

_LOOK_S = 0.1
_MARGIN = 1.1  # steps with an epoch's end in them do not count
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|"
    r"CUDA_ERROR_OUT_OF_MEMORY|RESOURCE_EXHAUSTED|ResourceExhaustedError|CUBLAS_STATUS_ALLOC_FAILED|"
    r"CUDNN_STATUS_ALLOC_FAILED|DefaultCPUAllocator: (?:can't|not enough)|\bMemoryError\b"
)


@dataclass(frozen=True)
class Need:
    """When a point has been measured for long enough."""

    device: str
    warm_up: int  # steps that are dropped
    steps: int  # after them, at least
    patience_s: float  # that the next step may take


@dataclass(frozen=True)
class Ran:
    how: How
    steps: int  # that were announced
    returncode: int = 0
    said: str = ""  # the last line the program printed


class Announced:
    """Ends of steps, as they come into the spool of a recording that is being made."""

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
) -> Ran:
    """Run the program into the new recording `folder`, what it prints into `log`."""
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
                # All of them at once: a shell between would end first, and the recording before the steps.
                os.killpg(child.pid, signal.SIGTERM)
                told_s = now_s
    said = tail(log)
    line = _last_words(said)
    if enough or stuck:
        end_rest(child.pid)
        return Ran("enough" if enough else "stuck", last, child.returncode, line)
    last = max(last, len(announced.look()), _written(folder))
    if child.returncode and _OUT_OF_MEMORY.search(said):
        return Ran("out_of_memory", last, child.returncode, line)
    return Ran("failed" if child.returncode else "ended", last, child.returncode, line)


def _written(folder: Path) -> int:
    """Steps of a recording that is over: it may have been between two looks."""
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
    """A program that is recorded into `folder`, and what it prints into `log`. It has ended behind the
    block; where that is left by an exception, so has all that it started."""
    # -P: a file named numpy.py beside the user's script must not be imported by us.
    ours = [sys.executable, "-P", "-m", "smaragdine", "run", "--trace", "off", "-o", str(folder)]
    with open(log, "wb") as out:
        child = subprocess.Popen(
            [*ours, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=dict(environment),
            process_group=0,  # Ctrl-C is meant for us, who end it
            preexec_fn=dying_with_us(),
        )
    try:
        yield child
        child.wait()
    except BaseException:
        end(child)
        raise


def _last_words(said: str) -> str:
    """The program's last line, which is before the table of `smaragdine run`: an error if there is one."""
    lines = lines_of(said)
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|smaragdine)\b.*:", line)]
    return (errors or lines or [""])[-1]
