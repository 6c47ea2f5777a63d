"""The other end of the recorder's lines: start it, tell it what to watch, hear what it has to say."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from smaragdine.recording.recorder_config import RecorderConfig
from smaragdine.recording.waiting import readable


class RecorderClient:
    """A running recorder process. Its death is a fact to report, never an exception."""

    def __init__(self, config: RecorderConfig, environment: Mapping[str, str]) -> None:
        self.config = config
        self.ready: dict[str, Any] | None = None
        self.done: dict[str, Any] | None = None
        self.feeds: list[dict[str, Any]] = []
        self._text = b""
        log = os.open(
            f"{config.folder}/recorder.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        # -P: a file named numpy.py beside the user's script must not be imported by us.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "smaragdine.recording.recorder", json.dumps(asdict(config))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=dict(environment),
        )
        os.close(log)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin_fd = self._process.stdin.fileno()
        self.fd = self._process.stdout.fileno()
        self.ended = False

    def take(self) -> None:
        """Read what is there; call when `fd` is readable."""
        chunk = os.read(self.fd, 1 << 16)
        if not chunk:
            self.ended = True
            self._process.wait()
            return
        *lines, self._text = (self._text + chunk).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                self._note(json.loads(line))

    def _note(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.ready = message["ready"]
        elif "done" in message:
            self.done = message["done"]
        elif "feed" in message:
            self.feeds.append(message["feed"])

    def wait_ready(self, timeout_s: float) -> bool:
        return self._wait(lambda: self.ready is not None, timeout_s)

    def watch(self, pid: int, include_past: bool, marker: str) -> None:
        self._tell(f"watch {pid} {int(include_past)} {marker}\n")

    def stop(self, timeout_s: float) -> None:
        """Ask it to finish, wait, and end it if it hangs in a driver: the run must come to its end."""
        self._tell("stop\n")
        if not self._wait(lambda: False, timeout_s) and not self.ended:
            self._process.kill()
            self._process.wait()
            self.ended = True
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def gone(self) -> bool:
        return self._process.poll() is not None

    def returncode(self) -> int | None:
        return self._process.returncode

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._stdin_fd, line.encode())

    def _wait(self, happened: Any, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not self.ended and not happened():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            if readable([self.fd], left_s):
                self.take()
        return bool(happened())
