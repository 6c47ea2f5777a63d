"""One job: warm-up, cool-down, limits, and a recording of the program, made by a process of its own.

    python -m smaragdine.jobs.job PARENT    # one message asks, one answers (see messages.py)

It needs a process of its own because recording takes over signals and the working folder. The process dies
with its parent, and the program with the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from smaragdine.errors import UserError
from smaragdine.jobs.lender import Lender, Wanted, temperature_c
from smaragdine.jobs.setting import CoolDown
from smaragdine.messages import Child, Inbox, keep_stdout_for_messages, module_command, send
from smaragdine.recording.format import INFO_FILE, TRACES_FOLDER
from smaragdine.system import GRACE_S, end_rest, end_with_parent, readable

_LOOK_S = 0.5  # how often temperature and time are looked at
_MOST_VOID = 3


@dataclass(frozen=True)
class RunRequest:
    """What the job's process needs to know."""

    words: Sequence[str]
    folder: str  # where it starts
    environment: Mapping[str, str] = field(default_factory=dict[str, str])  # added to ours
    devices: Sequence[str] = ()
    limits: Wanted = field(default_factory=dict[Any, Any])
    warm_up: int = 0
    cool_down: CoolDown | None = None
    timeout_s: float | None = None
    trace_steps: int = 0  # how many steps to trace, 0: none; whoever asks assembles the events
    trace_skip: int = 0  # steps before the first traced one
    verb: str = "sweep"  # as the recording's run.json has it


@dataclass(frozen=True)
class RunResult:
    """How the program ended. Unless there is an `error`, the recording is in the folder asked for."""

    returncode: int = 0  # as subprocess has it
    problems: tuple[str, ...] = ()
    error: str = ""  # why nothing could be run
    timed_out: bool = False


class Stop:
    """Takes Ctrl-C and its kin: passes the first one on to what runs, and kills it at the second."""

    def __init__(self) -> None:
        self.number = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._old: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self.number)

    def __enter__(self) -> Stop:
        self.take_over()
        return self

    def take_over(self) -> None:
        """Take the signals over, also again from a library that has put its own handlers in our place."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old.setdefault(number, signal.getsignal(number))
                signal.signal(number, self._take)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        again, self.number = bool(self.number), number
        if self._child is not None:
            _signal(self._child, signal.SIGKILL if again else number)

    @contextlib.contextmanager
    def telling(self, child: subprocess.Popen[bytes]) -> Iterator[None]:
        self._child = child
        if self.number:
            _signal(child, self.number)
        try:
            yield
        finally:
            self._child = None


def perform(
    job: RunRequest, lender: Lender | None, recording: Path, log: Path, stop: Stop, say: Callable[[str], None]
) -> RunResult:
    """Run a job. The recording goes into the new folder `recording`, what the program prints into `log`."""
    for _ in range(job.warm_up):
        ran = record(job, recording, log, stop)
        if stop or ran.error or ran.returncode:
            return ran
        shutil.rmtree(recording)
    for attempt in range(_MOST_VOID):
        if job.cool_down is not None:
            cool_down(job.cool_down, job.devices, stop, say)
        if stop:
            return RunResult(-stop.number)
        if lender is not None:
            lender.apply(job.limits)
        ran = record(job, recording, log, stop)
        if stop or ran.error or lender is None or lender.held():
            return ran
        say("the limits did not stand through the repetition: it runs again")
        os.rename(recording, recording.with_name(f"{recording.name}-void-{attempt + 1}"))
    return RunResult(error="the limits do not stand: something takes them back")


def cool_down(to: CoolDown, devices: Sequence[str], stop: Stop, say: Callable[[str], None]) -> None:
    deadline_s = time.monotonic() + to.timeout_s
    while not stop:
        now_c = temperature_c(devices)
        if now_c is None or now_c <= to.temperature_c:
            return
        if time.monotonic() >= deadline_s:
            say(f"still {now_c:g} °C after {to.timeout_s:g} s, not {to.temperature_c:g}: goes on anyway")
            return
        time.sleep(_LOOK_S)


def record(job: RunRequest, recording: Path, log: Path, stop: Stop) -> RunResult:
    request = {
        "words": list(job.words),
        "folder": job.folder,
        "environment": dict(job.environment),
        "recording": str(recording.absolute()),
        "log": str(log.absolute()),
        "trace_steps": job.trace_steps,
        "trace_skip": job.trace_skip,
        "verb": job.verb,
    }
    command = module_command("smaragdine.jobs.job", str(os.getpid()))
    child = Child(command, process_group=0)  # what the terminal sends to its programs, we pass on
    timed_out = False
    try:
        with stop.telling(child.process):
            child.send(request)
            child.hang_up()
            if job.timeout_s is not None and not _ends_within(job.timeout_s, child.inbox, recording):
                timed_out = True
                _signal(child.process, signal.SIGTERM)
                if not readable([child.inbox.fd], GRACE_S):
                    _signal(child.process, signal.SIGKILL)
            answer = child.receive()
    finally:
        returncode = child.end()
    if timed_out or stop:
        end_rest(child.pid)
    if answer is None:
        # It was killed, and the program with it.
        error = "" if recording.exists() else "its process ended before the program began"
        return RunResult(returncode or 1, error=error, timed_out=timed_out)
    return replace(msgspec.convert(answer, RunResult), timed_out=timed_out)


def _ends_within(timeout_s: float, inbox: Inbox, recording: Path) -> bool:
    """Whether the program ends within its time, which begins when the program does."""
    begin_s: float | None = None
    while not readable([inbox.fd], min(_LOOK_S, timeout_s)):
        if begin_s is None:
            with contextlib.suppress(OSError, ValueError, KeyError):
                begin_s = json.loads((recording / INFO_FILE).read_bytes())["begin_ns"] * 1e-9
        elif time.time() - begin_s > timeout_s:
            return False
    return True


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    if child.poll() is None:
        child.send_signal(number)


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    request = Inbox(0).receive()
    if request is None:
        os._exit(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 2)
    answers = keep_stdout_for_messages(log)
    send(answers, asdict(_recorded(request)))
    # Threads of libraries that nobody has joined can abort a process on its way out.
    os._exit(0)


def _recorded(request: Mapping[str, Any]) -> RunResult:
    from smaragdine.recording.asked import TraceAsked, asked
    from smaragdine.recording.command import build_command
    from smaragdine.recording.session import RecordOptions, record_program
    from smaragdine.tracing.hook.environment import TraceSettings, trace_environment
    from smaragdine.tracing.hook.environment import environment as hook_environment

    steps, skip = request["trace_steps"], request["trace_skip"]

    def prepare(spool: str, run_id: str, base: Mapping[str, str]) -> Mapping[str, str]:
        variables = hook_environment(spool, run_id, base)
        if steps:
            folder = os.path.join(os.path.dirname(spool), TRACES_FOLDER)
            variables |= trace_environment(folder, steps, skip)
        return {**base, **variables}

    environment = {**os.environ, **request["environment"]}
    try:
        os.chdir(request["folder"])
        command = build_command(request["words"], environment)
        trace = TraceAsked(bool(steps), steps, skip, quiet_s=TraceSettings("").quiet_s)
        # All readings: a fit rests on them.
        wanted = RecordOptions(keep_all=True, asked=asked(request["verb"], trace))
        recorded = record_program(command, Path(request["recording"]), wanted, environment, prepare)
    except UserError as error:
        return RunResult(error=str(error))
    except OSError as error:
        return RunResult(error=f"{request['folder']}: {error.strerror or error}")
    return RunResult(recorded.returncode, tuple(recorded.problems))


if __name__ == "__main__":
    main()
