"""The recorder: a process that reads the sensors and writes the tables; and the other end, which starts it.

    python -m smaragdine.recording.recorder CONFIG

A process of its own shares no interpreter lock with the program. It ends when the program does, which a pidfd
tells it, even of `kill -9`. Its messages (see messages.py):

    in   {"watch": PID, "include_past": …, "marker": …}    the program to follow
         {"stop": true}                                    finish and go
    out  {"ready": {…}}                 sensors are open and the first readings are in
         {"feed": {…}}                  once a second, for `--live`; left out while nobody reads
         {"done": {…}}                  all is on disk; figures about the sampler itself
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from smaragdine.files import last_printed
from smaragdine.messages import Child, Inbox, Outbox, module_command
from smaragdine.monitor.sampler import ClockWatch, Sampler, prioritise_thread
from smaragdine.monitor.through_daemon import DaemonSensor, through_daemon
from smaragdine.recording.format import SPOOL_FOLDER, channel_to_dict, table_of
from smaragdine.recording.writer import ReadingsWriter
from smaragdine.sensors.base import Absent
from smaragdine.sensors.discover import Machine, discover, settings_from_environment
from smaragdine.system import readable

# What a recorder must know at its start.

# Signals that anybody may send to us and mean the program: all that can be caught, but those of a fault of
# our own.
GROUP_SIGNALS: tuple[int, ...] = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGXCPU,
    signal.SIGTSTP,
    signal.SIGCONT,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)


# How long readings go into one file. On two sockets it then has half a million of them.
PIECE_NS = 180_000_000_000


@dataclass(frozen=True)
class RecorderConfig:
    folder: str
    segment: int = 0
    period_ns: int = 4_000_000
    pcie: bool = False
    live: bool = False
    keep_all: bool = False  # of the readings; else old ones are thinned
    piece_ns: int = PIECE_NS


# Which processes outlived the program, but for those that Python itself starts and that leave by themselves.

# As multiprocessing starts them, and loky after it. A resource tracker leaves once everything it cleans up
# after is gone, and so does a fork server. But the workers of a fork server have its command line too.
_TRACKER = re.compile(rb"from [\w.]*\bresource_tracker import main\b")
_FORK_SERVER = re.compile(rb"from [\w.]*\bforkserver import main\b")


def survivors(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that run on, and that somebody may want to know about."""
    left = sorted(pid for pid in pids if runs(pid))
    commands = {pid: _read(pid, "cmdline") for pid in left}
    servers = {pid for pid, command in commands.items() if _FORK_SERVER.search(command)}
    # A server leaves after the last of its workers. One whose parent is no server is a server itself.
    workers = {pid for pid in servers if _parent(pid) in servers}
    return [pid for pid in left if pid in workers or not (pid in servers or _TRACKER.search(commands[pid]))]


def runs(pid: int) -> bool:
    status = _status(pid)
    return bool(status) and status[0] not in (b"Z", b"X")


def _parent(pid: int) -> int | None:
    status = _status(pid)
    return int(status[1]) if status else None


def _status(pid: int) -> list[bytes]:
    """The state, the parent and so on of a process: what follows its name, which may contain anything."""
    return _read(pid, "stat").rpartition(b")")[2].split()


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read(1 << 16)
    except OSError:
        return b""


FLUSH_EVERY_NS = 1_000_000_000
# The thinner knows what readings mean, so it is not in this package. It ends by itself, and we may kill it.
_THINNER = "smaragdine.accounting.thinning"
# Whoever started us may be stopped for a while. We wait so long for them to hear that we are ready or done.
_HEARD_WITHIN_S = 30.0


class Recorder:
    """The sampler with its writer, and the loop that flushes, listens, and notices the end."""

    def __init__(self, config: RecorderConfig, machine: Machine) -> None:
        self._config = config
        self._machine = machine
        self._folder = Path(config.folder)
        self._sampler = Sampler(machine.sensors)
        self._daemons = [sensor for sensor in machine.sensors if isinstance(sensor, DaemonSensor)]
        self._writer = ReadingsWriter(self._folder, self._sampler.channels, config.segment)
        self._power_channels = {i for i, c in enumerate(self._sampler.channels) if table_of(c) == "power"}
        self._clocks = ClockWatch()
        self._inbox = Inbox(0)
        self._outbox = Outbox(1)
        self._pidfd: int | None = None
        self._watched = 0
        self._stopping = False
        self._flushes = 0
        self._errors: list[str] = []
        self._thinner: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        setup_cpu_s = time.process_time()
        setup_wall_ns = time.monotonic_ns()
        self._sampler.start()
        self._wait_for_first_readings()
        self._outbox.say({"ready": self._describe()}, _HEARD_WITHIN_S)
        next_flush_ns = time.monotonic_ns() + FLUSH_EVERY_NS
        next_piece_ns = time.monotonic_ns() + self._config.piece_ns
        waiting_on = [0]
        while not self._stopping:
            fds = [*waiting_on, self._pidfd] if self._pidfd is not None else waiting_on
            left_s = max(0.0, (next_flush_ns - time.monotonic_ns()) * 1e-9)
            ready = readable(fds, left_s)
            if 0 in ready and not self._listen():
                waiting_on = []
                self._stopping = self._pidfd is None
            if self._pidfd is not None and self._pidfd in ready:
                self._stopping = True
            if time.monotonic_ns() >= next_flush_ns:
                self._flush()
                next_flush_ns += FLUSH_EVERY_NS
            if time.monotonic_ns() >= next_piece_ns and self._writer.error is None:
                self._writer.next_piece()
                self._thin()
                next_piece_ns = time.monotonic_ns() + self._config.piece_ns
        self._note_survivors()
        if self._thinner is not None:
            self._thinner.kill()  # what it has not replaced yet stays as it was
            self._thinner.wait()
        self._sampler.stop()
        self._flush()
        self._writer.close()
        self._outbox.say({"done": self._figures(setup_cpu_s, setup_wall_ns)}, _HEARD_WITHIN_S)

    def _wait_for_first_readings(self) -> None:
        """Let every lane come round once, so that the program's first second has something to stand on."""
        deadline_ns = time.monotonic_ns() + 1_500_000_000
        while time.monotonic_ns() < deadline_ns and not self._sampler.every_lane_has_read():
            time.sleep(0.005)

    def _describe(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "channels": [channel_to_dict(channel) for channel in self._sampler.channels],
            "absent": [vars(absent) for absent in self._machine.absent],
            "facts": self._machine.facts,
        }

    def _listen(self) -> bool:
        """Take messages. False: there will be no more."""
        for message in self._inbox.take():
            if "stop" in message:
                self._stopping = True
            elif "watch" in message:
                self._watch(message["watch"], message["include_past"], message["marker"].encode())
        return not self._inbox.ended

    def _watch(self, pid: int, include_past: bool, marker: bytes) -> None:
        self._watched = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError as error:
            # It has gone already (a program of a millisecond). What was read so far is the recording.
            self._stopping = error.errno == errno.ESRCH
        if self._machine.activity is not None:
            with contextlib.suppress(OSError):
                self._machine.activity.watch(pid, marker, include_past)

    def _flush(self) -> None:
        batches = self._sampler.drain()
        try:
            self._writer.write(batches)
            if self._machine.activity is not None:
                self._writer.write_places(self._machine.activity.drain_places())
            self._write_notes()
        except OSError as error:
            self._errors.append(str(error))
        if self._config.live:
            self._outbox.offer({"feed": self._feed(batches)})
        self._flushes += 1
        if self._flushes % 60 == 0:
            gc.collect()

    def _thin(self) -> None:
        """Start the thinner, in a process of its own at the lowest priority: it takes a second, and sampling
        must not wait."""
        if self._config.keep_all or (self._thinner is not None and self._thinner.poll() is None):
            return
        try:
            self._thinner = subprocess.Popen(
                module_command(_THINNER, str(self._folder)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        except OSError as error:
            self._errors.append(f"old readings could not be thinned: {error}")

    def _write_notes(self) -> None:
        for name, detail in self._clocks.look().words().items():
            self._sampler.note(name, detail)
        notes = [*self._sampler.notes(), *(note for d in self._daemons for note in d.drain_notes())]
        if not notes:
            return
        path = self._folder / SPOOL_FOLDER / f"marks-sampler-{self._config.segment}.jsonl"
        with open(path, "a", encoding="utf-8") as file:
            for note in notes:
                mark = {"t_ns": note.t_ns, "name": note.name, "source": "monitor", "detail": note.detail}
                file.write(json.dumps(mark) + "\n")

    def _feed(self, batches: list[tuple[int, list[tuple[int, int, float]]]]) -> dict[str, Any]:
        """For each power channel: time and value of the newest reading, the mean of all, then time and value
        of the first."""
        latest: dict[str, list[float]] = {}
        for first, readings in batches:
            by_channel: dict[int, list[tuple[int, float]]] = {}
            for t_ns, index, value in readings:
                if first + index in self._power_channels:
                    by_channel.setdefault(first + index, []).append((t_ns, value))
            for channel, values in by_channel.items():
                mean = sum(value for _, value in values) / len(values)
                latest[str(channel)] = [*values[-1], mean, *values[0]]
        return latest

    def _note_survivors(self) -> None:
        activity = self._machine.activity
        if activity is None or runs(self._watched):
            return
        left = survivors(pid for pid in activity.program_pids if pid != self._watched)
        if left:
            numbers = ", ".join(map(str, left[:5])) + (" …" if len(left) > 5 else "")
            what = "1 process" if len(left) == 1 else f"{len(left)} processes"
            self._sampler.note("left_running", f"{what} of the program outlived it: {numbers}")

    def _figures(self, setup_cpu_s: float, setup_wall_ns: int) -> dict[str, Any]:
        wall_s = (time.monotonic_ns() - setup_wall_ns) * 1e-9
        cpu_s = time.process_time() - setup_cpu_s
        errors = [*self._errors[:3], *([self._writer.error] if self._writer.error else [])]
        if self._writer.dropped_batches and not errors:
            errors = ["the disk was full for a while"]
        return {
            "cpu_s": cpu_s,
            "wall_s": wall_s,
            "core_share": cpu_s / wall_s,
            "start_cpu_s": setup_cpu_s,
            "readings": self._writer.rows,
            "rows": self._writer.rows_of,
            "dropped_batches": self._writer.dropped_batches,
            "write_error": errors[0] if errors else None,
            "problems": [daemon.problem for daemon in self._daemons if daemon.problem],
            "lanes": {
                lane: {
                    "priority": self._sampler.priority.get(lane, "normal"),
                    "wakeups": lag.count,
                    "missed": lag.missed,
                    "lag_p50_ms": lag.quantile_ms(0.5),
                    "lag_p99_ms": lag.quantile_ms(0.99),
                    "lag_max_ms": lag.worst_ns / 1e6,
                }
                for lane, lag in self._sampler.lag.items()
            },
        }


def main() -> None:
    # What a terminal or a batch system sends to the whole process group is meant for the program. We end when
    # the program ends, and go on when it is stopped.
    for number in (*GROUP_SIGNALS, signal.SIGTTIN, signal.SIGTTOU, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    config = RecorderConfig(**json.loads(sys.argv[1]))
    # One open file per watched thread on machines of several sockets.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    # The default of 5 ms would let a flush delay a sample by more than the sampling period.
    sys.setswitchinterval(0.0002)
    prioritise_thread(realtime=False)
    settings = settings_from_environment(os.environ, config.period_ns, config.pcie)
    machine = discover(settings, elsewhere=through_daemon(os.environ, config.period_ns))
    if not any(table_of(channel) == "power" for channel in machine.channels()):
        machine.absent.append(
            Absent("power", "no sensor and no estimate works on this machine", "see smaragdine doctor")
        )
    gc.collect()
    gc.freeze()
    gc.disable()
    Recorder(config, machine).run()


# The other end: starts the recorder, tells it what to watch, hears it, and starts another one if it dies.

_MOST_RESTARTS = 3
_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_EXIT_S = 1.0  # from the end of its output to the end of the recorder


class RecorderClient:
    """A running recorder. If it dies, that is a fact to report and never an exception."""

    def __init__(self, config: RecorderConfig, environment: Mapping[str, str]) -> None:
        self.config = config
        self.ready: dict[str, Any] | None = None
        self.done: dict[str, Any] | None = None
        self.feeds: list[dict[str, Any]] = []
        log = os.open(
            f"{config.folder}/recorder.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        command = module_command("smaragdine.recording.recorder", json.dumps(asdict(config)))
        self._child = Child(command, stderr=log, env=dict(environment))
        os.close(log)
        self.fd = self._child.inbox.fd

    @property
    def ended(self) -> bool:
        return self._child.inbox.ended

    def take(self) -> None:
        """Read what is there; call when `fd` is readable."""
        for message in self._child.inbox.take():
            if "ready" in message:
                self.ready = message["ready"]
            elif "done" in message:
                self.done = message["done"]
            elif "feed" in message:
                self.feeds.append(message["feed"])
        if self.ended:
            self._child.end(_EXIT_S)

    def wait_ready(self, timeout_s: float) -> bool:
        return self._wait(lambda: self.ready is not None, timeout_s)

    def watch(self, pid: int, include_past: bool, marker: str) -> None:
        self._child.send({"watch": pid, "include_past": include_past, "marker": marker})

    def stop(self, timeout_s: float) -> None:
        """Ask it to finish and wait. If it hangs in a driver, kill it: the run must come to its end."""
        self._child.send({"stop": True})
        self._wait(lambda: False, timeout_s)
        self._child.end(0.0)

    def gone(self) -> bool:
        return self._child.process.poll() is not None

    def returncode(self) -> int | None:
        return self._child.process.returncode

    def _wait(self, happened: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not self.ended and not happened():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            if readable([self.fd], left_s):
                self.take()
        return happened()


@dataclass
class Supervision:
    """How recording went. `returncode` is subprocess's: negative for the signal that the program died of."""

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
            # It saw the program end before we did.
            self._outcome.figures.append(client.done)
            self.client = None
            return
        self._bury("died")
        if client.config.segment < _MOST_RESTARTS and self._watching is not None:
            self.client = self._start(replace(self._config, segment=client.config.segment + 1))
            if self.client is not None:
                # What the program used while nobody looked does not belong to this segment.
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
            # Nobody heard it die: nobody supervises a block of the user's own program.
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


if __name__ == "__main__":
    main()
