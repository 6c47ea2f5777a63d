"""The tuner's process: `python -m smaragdine.sweep.tune.process`, beside the program and never in its way.

Options are JSON in its argument. It says on stdout that it is ready, or why it refuses; then a line on stdin
names the recording's spool. The end of stdin, or of whoever started it, is the end: limits are brought back,
and the last line on stdout is what came of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from smaragdine.errors import UserError
from smaragdine.sensors.nvml_gpu import nvml
from smaragdine.sweep.limits import lender
from smaragdine.sweep.tune.collect import SliceOptions
from smaragdine.sweep.tune.energy import live_energy
from smaragdine.sweep.tune.outcome import Outcome, outcome
from smaragdine.sweep.tune.setup import TuneOptions, check_permission, find_setup, refusal
from smaragdine.sweep.tune.tuner import Tuner, Wait

_MOST_NOTES = 20


def main() -> int:
    wait = _until_end()
    options = msgspec.json.decode(sys.argv[1], type=TuneOptions)
    try:
        found = _tune(options, wait)
    except UserError as error:
        _say({"refused": refusal(error)})
        return 2
    except nvml().NVMLError as error:
        _say({"refused": str(UserError("no GPU answers", str(error), "See smaragdine doctor"))})
        return 2
    while not wait(60.0):
        pass
    if found is not None:
        _say({"done": asdict(found)})
    return 0


def _tune(options: TuneOptions, wait: Wait) -> Outcome | None:
    """Until the end or a problem; then all limits are as before."""
    notes: list[str] = []
    setup = find_setup(options, os.environ)
    devices = tuple(setup.devices)
    policy = setup.policy(options)
    with lender(notes.append) as lending:
        check_permission(lending, setup)
        with live_energy(setup.devices) as energy:
            _say({"ready": {}})
            spool = sys.stdin.readline().rstrip("\n")
            if not spool:
                return None
            slices = SliceOptions(options.steps, options.settle_s, options.skip)
            tuner = Tuner(lending, energy, policy, devices, Path(spool), slices)
            tuner.run(wait)
    return outcome(policy, devices, tuner.problem, tuple(notes[:_MOST_NOTES]))


def _until_end() -> Callable[[float], bool]:
    """Waits so long; True when stdin or our parent has ended."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    with contextlib.suppress(OSError):
        # A forked child of our parent may hold our stdin open.
        poller.register(os.pidfd_open(os.getppid()), select.POLLIN)

    def wait(timeout_s: float) -> bool:
        return bool(poller.poll(1000 * timeout_s))

    return wait


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(1, data) :]


if __name__ == "__main__":
    code = main()
    # NVML's own threads and exit handlers have nothing left to do, and could hang.
    os._exit(code)
