"""Run a program as if we were not there, and record it.

The program is a direct child with our standard streams, working directory, process group and inherited
files. Signals are the delicate part: one sent to the whole group (Ctrl-C, a batch system) has reached the
program already, one sent to us alone has not and must be passed on. The canary tells which it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smaragdine.errors import NOT_RUN, UserError
from smaragdine.recording.command import Command
from smaragdine.recording.printed import last_printed
from smaragdine.recording.recorder_client import RecorderClient
from smaragdine.recording.recorder_config import GROUP_SIGNALS, RecorderConfig
from smaragdine.recording.signals import Canary, Signals
from smaragdine.recording.waiting import readable

_PR_SET_PDEATHSIG = 1
_MOST_RESTARTS = 3
_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0


@dataclass
class Supervision:
    """What came of it. `returncode` as subprocess has it: negative is the signal the program died of."""

    returncode: int = 0
    begin_ns: int = 0
    end_ns: int = 0
    program_cpu_s: float = 0.0
    ready: dict[str, Any] | None = None
    figures: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    deaths_ns: list[int] = field(default_factory=lambda: list[int]())  # of the monitor


class Recorders:
    """The recorder and, should it die, its successors."""

    def __init__(self, config: RecorderConfig, environment: Mapping[str, str], outcome: Supervision) -> None:
        self._config = config
        self._environment = environment
        self._outcome = outcome
        self._watching: tuple[int, bool, str] | None = None
        self.client: RecorderClient | None = self._start(config)
        if self.client is not None and not self.client.wait_ready(_READY_TIMEOUT_S):
            self._bury("did not start")
        if self.client is not None:
            outcome.ready = self.client.ready

    def watch(self, pid: int, include_past: bool, marker: str) -> None:
        self._watching = (pid, include_past, marker)
        if self.client is not None:
            self.client.watch(pid, include_past, marker)

    def take(self) -> None:
        """Hear the recorder; if it is dead, start another one, a few times."""
        client = self.client
        if client is None:
            return
        client.take()
        if not client.ended:
            return
        if client.done is not None:
            # It saw the program's end before we did.
            self._outcome.figures.append(client.done)
            self.client = None
            return
        self._bury("died")
        if client.config.segment < _MOST_RESTARTS and self._watching is not None:
            self.client = self._start(dataclasses.replace(self._config, segment=client.config.segment + 1))
            if self.client is not None:
                # What the program spent while nobody looked is not this segment's.
                self.client.watch(self._watching[0], False, self._watching[2])

    def stop(self) -> None:
        client = self.client
        if client is None:
            return
        gone = client.gone()
        client.stop(_STOP_TIMEOUT_S)
        if client.done is not None:
            self._outcome.figures.append(client.done)
        elif gone:
            # Nobody heard it die: a block of the program's own has no supervisor.
            self._bury("died")
        else:
            self._outcome.problems.append("the monitor did not finish: the last second may be missing")
        self.client = None

    def _start(self, config: RecorderConfig) -> RecorderClient | None:
        try:
            return RecorderClient(config, self._environment)
        except OSError as error:
            self._outcome.problems.append(f"the monitor could not be started: {error}")
            return None

    def _bury(self, how: str) -> None:
        assert self.client is not None
        if not self.client.ended:
            self.client.stop(0)
        self._outcome.deaths_ns.append(time.time_ns())
        code = self.client.returncode()
        reason = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        last = last_printed(Path(self._config.folder) / "recorder.log")
        self._outcome.problems.append(f"the monitor {how} ({reason}){': ' + last if last else ''}")
        self.client = None


def supervise(
    command: Command,
    config: RecorderConfig,
    environment: Mapping[str, str],
    program_environment: Mapping[str, str],
    marker: str,
    on_start: Callable[[Supervision], None],
    on_feed: Callable[[dict[str, Any]], None] | None = None,
) -> Supervision:
    """Record one program from its first instruction to its end.

    `on_start` is called when the sensors are known and the program is about to begin. Raises `UserError`
    when the program cannot be started at all.
    """
    outcome = Supervision()
    with Canary(GROUP_SIGNALS) as canary:
        signals = Signals(canary)
        recorders = Recorders(config, environment, outcome)
        try:
            outcome.begin_ns = time.time_ns()
            on_start(outcome)
            with signals.starting() as in_child:
                program = _start(command, program_environment, in_child)
            recorders.watch(program.pid, True, marker)
            _until_end(program, outcome, recorders, signals, on_feed)
        finally:
            recorders.stop()
            signals.restore()
    return outcome


def dying_with_us(in_child: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """What a child does before it becomes the program: whoever kills us with -9 meant the program too, which
    would otherwise go on unseen."""
    parent_pid = os.getpid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(128 + signal.SIGKILL)
        in_child()

    return prepare


def _start(
    command: Command, environment: Mapping[str, str], in_child: Callable[[], None]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command.argv,
            executable=command.executable,
            env=dict(environment),
            close_fds=False,  # files the caller opened for the program stay open; ours are close-on-exec
            preexec_fn=dying_with_us(in_child),
        )
    except OSError as error:
        raise UserError(
            f"cannot run {command.argv[0]}",
            error.strerror or str(error),
            "Is it a program for this machine, with a valid #! line?",
            NOT_RUN,
        ) from None


def _until_end(
    program: subprocess.Popen[bytes],
    outcome: Supervision,
    recorders: Recorders,
    signals: Signals,
    on_feed: Callable[[dict[str, Any]], None] | None,
) -> None:
    while True:
        # Not Popen.poll: this also tells the exact CPU time of the program and all it waited for.
        pid, status, usage = os.wait4(program.pid, os.WNOHANG)
        if pid:
            outcome.end_ns = time.time_ns()
            outcome.program_cpu_s = usage.ru_utime + usage.ru_stime
            outcome.returncode = program.returncode = os.waitstatus_to_exitcode(status)
            return
        client = recorders.client
        fds = [signals.fd, *signals.canary.fds, *([client.fd] if client is not None else [])]
        ready = readable(fds, signals.timeout_s())
        if client is not None and client.fd in ready:
            recorders.take()
            feeds, client.feeds = client.feeds, []
            if on_feed is not None:
                # A display that fails is no reason to end the program.
                with contextlib.suppress(Exception):
                    for feed in feeds:
                        on_feed(feed)
        signals.take()
        signals.pass_on(program.pid)
