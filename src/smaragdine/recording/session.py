"""One recording from beginning to end: its folder, the recorder, the program, the marks, run.json.

The program runs as if we were not there. Signals are the delicate part: one that went to the whole process
group (Ctrl-C, a batch system) has reached the program already, one that went to us alone we must pass on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from smaragdine.errors import NOT_RUN, UserError
from smaragdine.monitor.sampler import ClockWatch
from smaragdine.recording import folder as folders
from smaragdine.recording import marks
from smaragdine.recording.asked import asked
from smaragdine.recording.command import Command, without_secrets
from smaragdine.recording.format import SPOOL_FOLDER
from smaragdine.recording.recorder import GROUP_SIGNALS, RecorderConfig, Recorders, Supervision
from smaragdine.recording.seal import last_seals
from smaragdine.recording.thinned import read_thinned
from smaragdine.sensors.discover import COUNTER_PERIOD_NS, host_facts, settings_from_environment
from smaragdine.system import dying_with_us, end_with_parent, readable

MARKER_VARIABLE = "SMARAGDINE_RUN_ID"


@dataclass(frozen=True)
class RecordOptions:
    period_ns: int = COUNTER_PERIOD_NS
    pcie: bool = False
    live: bool = False
    gpus: tuple[str, ...] = ()  # UUIDs; none: those that a program with this environment sees
    keep_all: bool = False  # of the readings; else old ones are thinned
    asked: Mapping[str, Any] = field(default_factory=lambda: asked("record"))


@dataclass(frozen=True)
class Recorded:
    folder: Path
    info: dict[str, Any]  # what run.json should say, even where a full disk kept us from writing it
    returncode: int
    problems: list[str]


# Prepares the program's environment: (spool folder, run id, environment) → environment.
Prepare = Callable[[str, str, Mapping[str, str]], Mapping[str, str]]


def record_program(
    command: Command,
    folder: Path | None,
    options: RecordOptions,
    environment: Mapping[str, str],
    prepare: Prepare,
    on_feed: Callable[[Path, list[Any], dict[str, Any]], None] | None = None,
) -> Recorded:
    """Run `command` to its end and leave a recording of it, whatever happens to the monitor."""
    host = host_facts(settings_from_environment(environment))
    existed = folder is not None and folder.exists()
    path = folders.create(folder, command.label).absolute()
    run_id = uuid.uuid4().hex
    clocks = ClockWatch()
    info = folders.initial_info(without_secrets(command.argv), environment, host, clocks.pair)
    info["run_id"] = run_id
    info["asked"] = dict(options.asked)
    first_error = folders.write_info(path, info)
    channels: list[Any] = []

    def on_start(outcome: Supervision) -> None:
        _take_ready(info, outcome)
        info["begin_ns"] = outcome.begin_ns
        marks.append(path, "experiment_begin", outcome.begin_ns)
        channels.extend(info["channels"])
        folders.write_info(path, info)

    try:
        outcome = supervise(
            command,
            _config(path, options),
            environment,
            prepare(str(path / SPOOL_FOLDER), run_id, environment),
            f"{MARKER_VARIABLE}={run_id}",
            on_start,
            functools.partial(on_feed, path, channels) if on_feed is not None else None,
        )
    except UserError:
        folders.remove(path, keep_folder=existed)
        raise
    if first_error is not None:
        outcome.problems.append(f"the recording could not be written: {first_error}")
    marks.append(path, "experiment_end", outcome.end_ns)
    info["exit_code"] = outcome.returncode if outcome.returncode >= 0 else None
    info["signal"] = -outcome.returncode if outcome.returncode < 0 else None
    info["program_cpu_s"] = outcome.program_cpu_s
    status = "complete" if outcome.returncode == 0 else "failed" if outcome.returncode > 0 else "killed"
    _finish(path, info, outcome, status, clocks)
    return Recorded(path, info, outcome.returncode, outcome.problems)


@contextlib.contextmanager
def record_here(
    folder: Path | None, options: RecordOptions | None = None, label: str = "block"
) -> Iterator[Path]:
    """Record this process and its children while the block runs."""
    options = options or RecordOptions()
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(options.gpus)} if options.gpus else {}
    environment = {**os.environ, **chosen}
    host = host_facts(settings_from_environment(environment))
    path = folders.create(folder, label).absolute()
    clocks = ClockWatch()
    info = folders.initial_info([label], environment, host, clocks.pair)
    info["asked"] = dict(options.asked)
    folders.write_info(path, info)
    outcome = Supervision()
    recorders = Recorders(_config(path, options), environment, outcome)
    _take_ready(info, outcome)
    folders.write_info(path, info)
    recorders.watch(os.getpid(), False, "")
    outcome.begin_ns = info["begin_ns"] = time.time_ns()
    marks.append(path, "experiment_begin", outcome.begin_ns)
    status, pid = "failed", os.getpid()
    try:
        yield path
        status = "complete"
    finally:
        # A forked child that leaves the block ends nothing: the recording belongs to its parent.
        if os.getpid() == pid:
            outcome.end_ns = time.time_ns()
            recorders.stop()
            marks.append(path, "experiment_end", outcome.end_ns)
            _finish(path, info, outcome, status, clocks)


def _config(path: Path, options: RecordOptions) -> RecorderConfig:
    return RecorderConfig(str(path), 0, options.period_ns, options.pcie, options.live, options.keep_all)


def _take_ready(info: dict[str, Any], outcome: Supervision) -> None:
    if outcome.ready is not None:
        info["channels"] = outcome.ready["channels"]
        info["absent"] = outcome.ready["absent"]
        info["host"].update(outcome.ready["facts"])


def _finish(path: Path, info: dict[str, Any], outcome: Supervision, status: str, clocks: ClockWatch) -> None:
    info["clock"]["step_ns"] = clocks.look().step_ns
    info["clock"]["end"] = {"wall_ns": clocks.pair.wall_ns, "mono_ns": clocks.pair.mono_ns}
    info["status"] = status
    info["begin_ns"], info["end_ns"] = outcome.begin_ns, outcome.end_ns
    info["monitor"] = outcome.figures
    info["problems"] = outcome.problems
    if not path.exists():
        outcome.problems[:] = [f"the recording was lost: {path} was deleted during the run"]
        return
    outcome.problems.extend(
        f"readings were lost: {figures['write_error']}"
        for figures in outcome.figures
        if figures["write_error"]
    )
    outcome.problems.extend(problem for figures in outcome.figures for problem in figures["problems"])
    # By their rows we notice a file that is gone, or is another one.
    info["rows"] = {name: rows for figures in outcome.figures for name, rows in figures["rows"].items()}
    for t_ns in outcome.deaths_ns:
        marks.append(path, "monitor_died", t_ns)
    try:
        thinned = read_thinned(path)
        table = marks.read_spool(path, None if thinned is None else thinned.state.spool)
        info["libraries"] = marks.libraries(table)
        error = marks.fold_spool(path, table)
        if error is None:
            info["rows"]["marks.arrows"] = table.num_rows
    except Exception as unexpected:
        # Whatever a program marks, its caller must get its exit code.
        error = unexpected
    if error is not None:
        outcome.problems.append(f"the marks stay in the spool: {error}")
    # By the seals we notice a table of another recording, even with as many rows.
    info["seals"] = last_seals(path, info["rows"])
    log = path / "recorder.log"
    with contextlib.suppress(OSError):
        if not log.stat().st_size:
            log.unlink()
    error = folders.write_info(path, info)
    if error is not None:
        outcome.problems.append(f"run.json could not be finished: {error}")


# Running the program: a direct child, with our standard streams, working directory, process group and files.


def supervise(
    command: Command,
    config: RecorderConfig,
    environment: Mapping[str, str],
    program_environment: Mapping[str, str],
    marker: str,
    on_start: Callable[[Supervision], None],
    on_feed: Callable[[dict[str, Any]], None] | None = None,
) -> Supervision:
    """Record a program from its first instruction to its end.

    Calls `on_start` when the sensors are known and the program is about to begin. Raises `UserError` when the
    program cannot be started at all.
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


def _start(
    command: Command, environment: Mapping[str, str], in_child: Callable[[], None]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command.argv,
            executable=command.executable,
            env=dict(environment),
            close_fds=False,  # files that the caller opened for the program stay open; ours are close-on-exec
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
        # Not Popen.poll: this also gives the exact CPU time of the program and of all it waited for.
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
                # A display that fails must not end the program.
                with contextlib.suppress(Exception):
                    for feed in feeds:
                        on_feed(feed)
        signals.take()
        signals.pass_on(program.pid)


# Signals: each reaches the program exactly once, whoever it was sent to. Was it sent to us alone, or to our
# whole process group? The canary is a tiny process in the same group that only says which signals it got. If
# it got one too, so did the program: passing it on would deliver it twice.

_CANARY_WAIT_S = 0.15
_CANARY_LATE_S = 2.0  # on a busy machine
_MOST_CANARIES = 4


class Canary:
    """Says which signals reached the group: `fds` (one or none) gives a byte for each, its number. A canary
    that is killed is replaced, a few times."""

    def __init__(self, numbers: Collection[int]) -> None:
        self._numbers = numbers
        self._left = _MOST_CANARIES
        self.fds: list[int] = []
        self._start()

    def _start(self) -> None:
        self._left -= 1
        numbers = self._numbers
        fd, write_fd = os.pipe()
        parent_pid = os.getpid()
        # Hold signals back before the fork: else our handlers, in the child, would report one once more.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                end_with_parent(parent_pid)
                for number in (signal.SIGTTIN, signal.SIGTTOU):
                    signal.signal(number, signal.SIG_IGN)
                while os.getppid() == parent_pid:
                    os.write(write_fd, bytes([signal.sigwait(numbers)]))
            finally:
                os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(write_fd)
        os.set_blocking(fd, False)
        self.fds = [fd]

    def take(self) -> bytes:
        try:
            said = b"".join(os.read(fd, 256) for fd in self.fds)
        except BlockingIOError:
            return b""
        if not said and self.fds:
            self._end()
            if self._left:
                self._start()
        return said

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        while self.fds:
            os.close(self.fds.pop())

    def __enter__(self) -> Canary:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()


class Signals:
    """Knows which signals came to us, and which of them we must still pass on to the program."""

    def __init__(self, canary: Canary) -> None:
        self.canary = canary
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._old: dict[int, Any] = {}
        for number in GROUP_SIGNALS:
            # If the caller ignores a signal (nohup), the program must go on ignoring it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, lambda *_: None)
        # If it stayed ignored, the kernel would reap the program, and we would lose its exit code.
        self._child_ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        self._old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._alone: list[tuple[int, float]] = []
        self._shared: list[tuple[int, float]] = []
        self._early: list[tuple[int, float]] = []

    @contextlib.contextmanager
    def starting(self) -> Iterator[Callable[[], None]]:
        """Hold signals back while the program starts. Yields what the child does before it becomes the
        program.

        The program cannot have got what came before it was there, whoever that was sent to.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._old.keys())
        self._early_ones(list(self.canary.take()))

        def in_child() -> None:
            # Signals that we handle take their default in the program. Until it runs, our handler must not
            # swallow one.
            for number in self._old:
                signal.signal(number, signal.SIG_DFL)
            if self._child_ignored:
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        try:
            yield in_child
        finally:
            # Signals that wait now may also have come before the program was there.
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._early_ones([])

    def _early_ones(self, reported: list[int]) -> None:
        """Note all that came until now, for the program to be told, even if the canary got it too or, being
        slow, will still report it."""
        known = len(self._alone)
        self._take(0.0)
        self._shared.clear()
        late_s = time.monotonic() + _CANARY_LATE_S
        for number, _ in self._alone[known:]:
            if number in reported:
                reported.remove(number)
            else:
                self._early.append((number, late_s))

    def take(self) -> None:
        now_s = time.monotonic()
        self._early = [(n, s) for n, s in self._early if s > now_s]
        for number in self.canary.take():
            if _drop(self._early, number):
                continue
            if _drop(self._alone, number):
                self._obey(number)
            else:
                self._shared.append((number, time.monotonic() + _CANARY_WAIT_S))
        self._take(_CANARY_WAIT_S)

    def _take(self, wait_s: float) -> None:
        try:
            numbers = os.read(self.fd, 256)
        except BlockingIOError:
            return
        now_s = time.monotonic()
        self._shared = [(n, s) for n, s in self._shared if s > now_s]
        for number in numbers:
            if number == signal.SIGCHLD or number not in self._old:
                continue
            if _drop(self._shared, number):
                self._obey(number)
            else:
                self._alone.append((number, now_s + wait_s))

    def _obey(self, number: int) -> None:
        """Do ourselves what a signal to the group asks of us."""
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def pass_on(self, pid: int) -> None:
        """Pass the signals on to the program that reached nobody but us."""
        for number in self._due():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            self._obey(number)

    def _due(self) -> list[int]:
        now_s = time.monotonic()
        due = [number for number, deadline_s in self._alone if deadline_s <= now_s]
        self._alone = [(number, s) for number, s in self._alone if s > now_s]
        return due

    def timeout_s(self) -> float | None:
        if not self._alone:
            return None
        return max(0.0, min(s for _, s in self._alone) - time.monotonic())

    def restore(self) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write_fd)


def _drop(entries: list[tuple[int, float]], number: int) -> bool:
    for entry in entries:
        if entry[0] == number:
            entries.remove(entry)
            return True
    return False
