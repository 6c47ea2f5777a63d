"""What a device draws when it does not work: idle, and waiting for others in an all-reduce.

A GPU waits in a kernel that spins until the others are there, at full clocks: far above idle. PyTorch has
such a kernel, which spins for a number of cycles. A processor's threads sleep while they wait: it draws what
it draws idle.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smaragdine.allocate.points import write_json
from smaragdine.allocate.profiler import needed_s, recorded_program
from smaragdine.allocate.profiling import mean_power_w, update_period_s
from smaragdine.errors import UserError
from smaragdine.files import read_json
from smaragdine.recording.asked import BASELINE, asked
from smaragdine.recording.format import INFO_FILE
from smaragdine.recording.printed import tail
from smaragdine.recording.reader import open_recording
from smaragdine.recording.session import RecordOptions, record_here

_AT_LEAST_S = 2.0
_SETTLE_S = 1.5  # some sensors average over a second
_WORD = "smaragdine spun"
_SPIN = f"""
import sys, time
import torch

torch.cuda.init()
millisecond = getattr(torch.cuda.get_device_properties(0), "clock_rate", 1_500_000)  # in cycles
begin, end = time.time(), time.time() + float(sys.argv[1])
while time.time() < end:
    torch.cuda._sleep(50 * millisecond)
    torch.cuda._sleep(50 * millisecond)
    torch.cuda.synchronize()
print("{_WORD}", int(begin * 1e9), int(time.time() * 1e9), flush=True)
"""


def idle_power(folder: Path, device: str) -> tuple[float | None, float | None]:
    """Mean idle power in W, and how often the device has a new value, in s; measured once."""
    if (known := _known(folder)) is None:
        shutil.rmtree(folder, ignore_errors=True)
        with record_here(folder, RecordOptions(asked=asked(BASELINE)), label="idle"):
            channels = json.loads((folder / INFO_FILE).read_bytes())["channels"]
            begin_ns = time.time_ns()
            time.sleep(max(needed_s(channels, device) or 0.0, _AT_LEAST_S))
            end_ns = time.time_ns()
        recording = open_recording(folder)
        power_w = mean_power_w(recording, device, begin_ns, end_ns)
        known = {"power_w": power_w, "period_s": update_period_s(recording.channels, device)}
        write_json(_file(folder), known)
    return known["power_w"], known["period_s"]


def wait_power(
    folder: Path, device: str, python: str, environment: Mapping[str, str], length_s: float
) -> tuple[float | None, str]:
    """Mean power in W while a kernel spins, or None and why it is not known; measured once."""
    if (known := _known(folder)) is not None:
        return known["power_w"], ""
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    seconds = max(length_s, _AT_LEAST_S) + _SETTLE_S
    words = ["--", python, "-c", _SPIN, str(seconds)]
    with recorded_program(words, folder, log, environment):
        pass
    lines = tail(log).splitlines()
    spun = next((line.split() for line in lines if line.startswith(_WORD)), None)
    if spun is not None:
        with contextlib.suppress(UserError, ValueError):
            begin_ns = int(spun[2]) + int(_SETTLE_S * 1e9)
            power_w = mean_power_w(open_recording(folder), device, begin_ns, int(spun[3]))
            write_json(_file(folder), {"power_w": power_w})
            return power_w, ""
    errors = [line.strip() for line in lines if "Error" in line]
    return None, (errors or ["nothing was measured"])[-1][:200]


def python_of(executable: str, fallback: str) -> str:
    """The interpreter that a program runs in: itself, or the one beside a launcher."""
    if os.path.basename(executable).startswith("python"):
        return executable
    beside = Path(executable).parent / "python"
    return str(beside) if os.access(beside, os.X_OK) else fallback


def _known(folder: Path) -> dict[str, Any] | None:
    try:
        known: Any = read_json(_file(folder))
        return {"power_w": known["power_w"], "period_s": known.get("period_s")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _file(folder: Path) -> Path:
    return folder.with_suffix(".json")
