"""A real daemon process for tests, on a simulated machine.

    with a_machine() as machine, machine.daemon("--prometheus", ":0") as daemon, daemon.connect() as client:
        started = client.start(pid=…)

`machine` has a powercap tree and, where asked for, GPUs; daemons of one machine share its state folder, so
that a second one goes on where the first was. The daemon's unprivileged user can reach its folder.
"""

from __future__ import annotations

import grp
import importlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cli import SMARAGDINE, TIMEOUT_S, alive, environment, wait_for
from nvml_fake import GpuSpec, nvml_environment, write_spec
from powercap_fake import INTEL_WRAP_UJ, PowercapTree
from smaragdine.monitor.client import Client, DaemonError, connect

# A group that every Debian has and no test user is in by chance.
GROUP = "games"
GROUP_NUMBER = grp.getgrnam(GROUP).gr_gid


@dataclass
class Daemon:
    process: subprocess.Popen[bytes]
    socket: Path
    log: Path

    def connect(self) -> Client:
        return connect(str(self.socket))

    @property
    def server_pid(self) -> int:
        """The unprivileged process: the operator's own is its parent."""
        return wait_for(lambda: _children(self.process.pid))[0]

    def lines(self) -> str:
        return self.log.read_text()

    def ready(self) -> bool:
        return "serves " in self.lines()

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)

    def kill(self) -> None:
        """As `kill -9` of the server; its parent ends by itself then."""
        os.kill(self.server_pid, signal.SIGKILL)
        self.process.wait(TIMEOUT_S)


@dataclass
class Machine:
    folder: Path
    tree: PowercapTree
    env: dict[str, str]
    count: int = 0
    daemons: list[Daemon] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.folder / "monitor.sock"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def set_gpus(self, gpus: Sequence[GpuSpec], **more: int) -> None:
        spec = Path(self.env["FAKE_NVML"])
        write_spec(spec, gpus, **more)
        spec.chmod(0o644)

    def start(self, *options: str, most_files: int = 0) -> Daemon:
        self.count += 1
        log = self.folder / f"daemon-{self.count}.log"
        command = [*SMARAGDINE, "daemon", "--socket", str(self.socket), "--state", str(self.state), *options]
        if "--group" not in options:
            command += ["--group", GROUP]
        if most_files:
            command = ["prlimit", f"--nofile={most_files}:{most_files}", *command]
        with open(log, "wb") as stderr:
            process = subprocess.Popen(
                command, env=environment(self.env), stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr
            )
        daemon = Daemon(process, self.socket, log)
        self.daemons.append(daemon)
        return daemon

    @contextmanager
    def daemon(self, *options: str, most_files: int = 0) -> Iterator[Daemon]:
        daemon = self.start(*options, most_files=most_files)
        try:
            assert wait_for(lambda: daemon.ready() or process_ended(daemon)), daemon.lines()
            assert daemon.ready(), daemon.lines()
            yield daemon
        finally:
            daemon.stop()


def process_ended(daemon: Daemon) -> bool:
    return daemon.process.poll() is not None


@contextmanager
def a_machine(
    watts: dict[str, float] | None = None,
    gpus: Sequence[GpuSpec] = (),
    packages: int = 1,
    wrap_uj: int = INTEL_WRAP_UJ,
) -> Iterator[Machine]:
    """`watts` per device of the powercap tree: the counters move by themselves then."""
    folder = Path(tempfile.mkdtemp(prefix="smaragdine-test-"))
    folder.chmod(0o755)
    tree = PowercapTree(folder / "powercap", packages=packages, wrap_uj=wrap_uj)
    # Of the machine the tests run on nothing is seen.
    none = {f"SMARAGDINE_{name}_ROOT": str(folder / "none") for name in ("HWMON", "PERF")}
    env = {"SMARAGDINE_POWERCAP_ROOT": str(tree.root), **none}
    if gpus:
        made = nvml_environment(folder, gpus)
        env |= {name: made[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML")}
        Path(env["FAKE_NVML"]).chmod(0o644)
    machine = Machine(folder, tree, env)
    if watts:
        tree.start(watts)
    try:
        yield machine
    finally:
        for daemon in machine.daemons:
            if daemon.process.poll() is None:
                daemon.process.kill()
                daemon.process.wait()
        tree.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def a_program(*, uid: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A process to record that does nothing."""
    with subprocess.Popen(["sleep", "300"], user=uid or None) as process:
        try:
            yield process
        finally:
            process.kill()


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split() if alive(int(word))]


def as_user(uid: int, groups: Sequence[int], call: Callable[[], object]) -> object:
    """What `call` gives, in a fork that is another user's process; of a refusal its status and line.

    A fork, since other users may not even start this interpreter; so all that is needed is imported before.
    """
    for name in ("smaragdine.monitor.contract.service", "grpclib.client", "grpclib.encoding.proto"):
        importlib.import_module(name)
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(list(groups))
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            try:
                answer = {"value": call()}
            except DaemonError as error:
                answer = {"status": error.status, "line": str(error)}
            except BaseException as error:
                answer = {"failed": f"{type(error).__name__}: {error}"}
            os.write(send, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(pid, 0)
    assert "failed" not in answer, answer["failed"]
    return answer["value"] if "value" in answer else (answer["status"], answer["line"])
