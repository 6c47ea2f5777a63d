"""The other end of the tuner's lines: start it, tell it what to follow, hear what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smaragdine.errors import UserError
from smaragdine.sweep.tune.outcome import Outcome, outcome_from
from smaragdine.sweep.tune.setup import TuneOptions

OUTCOME_FILE = "tune.json"  # of a recording
TUNED_VARIABLE = "SMARAGDINE_TUNED"  # set in a program whose limits are being tuned
_END_TIMEOUT_S = 15.0


class TunerClient:
    """A running tuner. Raises `UserError` where limits cannot be tuned; its later death is only reported."""

    def __init__(self, options: TuneOptions, environment: Mapping[str, str]) -> None:
        # A session of its own: what is meant for the terminal's programs does not reach it.
        # -P: a file named numpy.py beside the user's script must not be imported by us.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "smaragdine.sweep.tune.process", json.dumps(asdict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        answer = _message(self._process.stdout.readline())
        if "ready" not in answer:
            self._end()
            raise UserError(answer.get("refused") or "the tuner does not start")

    def follow(self, spool: str | os.PathLike[str]) -> None:
        """Tune the program whose marks come into this folder."""
        self._tell(os.path.abspath(spool).encode() + b"\n")

    def finish(self) -> Outcome | None:
        """Have all limits brought back; what came of it, or None where the tuner has died."""
        self._hang_up()
        said = b""
        with contextlib.suppress(subprocess.TimeoutExpired):
            said, _ = self._process.communicate(timeout=_END_TIMEOUT_S)
        self._end()
        done = _message(said).get("done")
        return None if done is None else outcome_from(done)

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _hang_up(self) -> None:
        pipe, self._process.stdin = self._process.stdin, None
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()

    def _end(self) -> None:
        """Its keeper brings limits back also when it is killed."""
        self._hang_up()
        if self._process.poll() is None:
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def save_outcome(folder: Path, found: Outcome) -> None:
    """Into the recording. A full disk loses the file, not the run."""
    with contextlib.suppress(OSError):
        (folder / OUTCOME_FILE).write_text(json.dumps(asdict(found), indent=1) + "\n")


def _message(said: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        return json.loads(said)
    return {}
