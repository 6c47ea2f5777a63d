"""`smaragdine run` where only the daemon may read the counters: who gets what, and what if it goes away."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from another_user import USER, as_user, cannot_play
from cli import (
    SMARAGDINE,
    TIMEOUT_S,
    environment,
    finish,
    info,
    show_json,
    smaragdine,
    wait_for,
    write_script,
)
from daemon_fake import GROUP, GROUP_NUMBER, Daemon, Machine, a_machine
from smaragdine.recording.reader import Recording
from smaragdine.version import __version__

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon is started by root")

HOLD_S = 1.0  # ten periods: a longer gap is missing
WAITS = """
import pathlib, sys, time
pathlib.Path("started").touch()
while not pathlib.Path("end").exists():
    time.sleep(0.01)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def user() -> None:
    why_not = cannot_play()
    if why_not:
        pytest.skip(f"another user cannot run this interpreter here: {why_not}")


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Counters for root alone, which are about to wrap."""
    with a_machine() as machine:
        close_counters(machine)
        yield machine


@pytest.fixture(scope="module")
def daemon(machine: Machine) -> Iterator[Daemon]:
    with machine.daemon() as daemon:
        yield daemon


def close_counters(machine: Machine) -> None:
    machine.tree.start_uj = machine.tree.wrap_uj - 2_000_000
    for device in machine.tree.devices:
        machine.tree.add_joules(device, 0)
    for zone in machine.tree.zones.values():
        (zone / "energy_uj").chmod(0o400)


class Run:
    """`smaragdine run` of a program that ends when told, with its energy so far."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder = folder
        self.recording = folder / "recording"
        self.process = process
        assert wait_for((folder / "started").exists), process.communicate(timeout=TIMEOUT_S)
        self.began_ns = time.time_ns()

    def last_ns(self) -> int:
        """When the newest counter reading on disk was made."""
        series = Recording(self.recording, info(self.recording)).series("power")
        return max((int(one.t_ns[-1]) for one in series if one.t_ns.size), default=0)

    def wait_for_reading_after(self, t_ns: int) -> None:
        assert wait_for(lambda: self.last_ns() > t_ns)

    def use(self, machine: Machine, joules: float) -> None:
        self.wait_for_reading_after(self.began_ns)
        machine.tree.add_joules("cpu:0", joules)
        self.settle()

    def settle(self) -> None:
        """All that was used so far is between two readings within the run."""
        self.wait_for_reading_after(time.time_ns())

    def end(self) -> tuple[int, str]:
        (self.folder / "end").touch()
        code, _, err = finish(self.process)
        return code, err


@contextmanager
def running(machine: Machine, groups: Sequence[int] | None, *words: str, exit_code: int = 0) -> Iterator[Run]:
    """A run by the user in these groups, or by root for None."""
    machine.count += 1
    folder = machine.folder / f"run-{machine.count}"
    folder.mkdir()
    write_script(folder / "program.py", WAITS)
    prefix = []
    if groups is not None:
        os.chown(folder, USER, USER)
        prefix = as_user(groups)
    process = subprocess.Popen(
        [*prefix, *SMARAGDINE, "run", "-o", "recording", *words, "program.py", str(exit_code)],
        env=run_environment(machine),
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Run(folder, process)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def run_environment(machine: Machine) -> dict[str, str]:
    return environment({**machine.env, "SMARAGDINE_DAEMON": str(machine.socket), "HOME": "/"})


def doctor(machine: Machine, groups: Sequence[int]) -> dict[str, Any]:
    done = subprocess.run(
        [*as_user(groups), *SMARAGDINE, "doctor", "--json"],
        env=run_environment(machine),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def energy_channels(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = [channel for channel in values["channels"] if channel["quantity"] == "energy"]
    by_device = {channel["device"]: channel for channel in found}
    assert len(by_device) == len(found)  # no estimate beside a measurement
    return by_device


def through_the_daemon(values: dict[str, Any]) -> str:
    """Why nothing came through it."""
    (reason,) = [gap["reason"] for gap in values["absent"] if "(through the daemon)" in gap["channel"]]
    return reason


@needs_root
def test_a_user_of_the_group_gets_what_root_gets(machine: Machine, daemon: Daemon, user: None) -> None:
    with running(machine, [GROUP_NUMBER]) as mine, running(machine, None) as roots:
        with daemon.connect() as root:
            (session,) = root.list()
        assert (session.uid, session.pid, session.period_ms) == (USER, mine.process.pid, 4)
        for run in (mine, roots):
            run.wait_for_reading_after(roots.began_ns)
        for joules in (1.5, 3.25, 1e-6):  # over the counter's end
            machine.tree.add_joules("cpu:0", joules)
        machine.tree.add_joules("dram:0", 0.5)
        for run in (mine, roots):
            run.settle()
        assert (mine.end()[0], roots.end()[0]) == (0, 0)
        shown = show_json(mine.recording)
        for devices in (shown["devices"], show_json(roots.recording)["devices"]):
            assert devices["cpu:0"]["energy_j"] == pytest.approx(4.750001, abs=1e-7)
            assert devices["dram:0"]["energy_j"] == pytest.approx(0.5, abs=1e-7)
            assert devices["cpu:0"]["provenance"] == "measured"
        assert shown["missing_s"] == 0
        assert shown["problems"] == []
        said = info(mine.recording)
        assert said["host"]["daemon"]["version"] == __version__
        assert [gap["channel"] for gap in said["absent"] if "energy" in gap["channel"]] == [
            "cpu:0/core energy"
        ]
        channels = energy_channels(said)
        assert set(channels) == {"cpu:0", "dram:0"}
        for channel in channels.values():
            assert channel["period_ms"] == 100
            assert channel["detail"].endswith("through the daemon")
        # From before the beginning to after the end.
        for series in Recording(mine.recording, said).series("power"):
            assert series.t_ns[0] <= said["begin_ns"]
            assert series.t_ns[-1] >= said["end_ns"]
        assert "daemon" not in info(roots.recording)["host"]
        with daemon.connect() as root:
            assert [session.end_ns > 0 for session in root.list()] == [True]
        seen = energy_channels(doctor(machine, [GROUP_NUMBER]))
        assert {device: channel["detail"] for device, channel in seen.items()} == {
            device: channel["detail"] for device, channel in channels.items()
        }


@needs_root
def test_who_is_not_in_the_group_gets_an_estimate_and_the_remedy(
    machine: Machine, daemon: Daemon, user: None
) -> None:
    with running(machine, []) as run:
        assert run.end()[0] == 0
        said = info(run.recording)
        values = doctor(machine, [])
    for where in (said, values):
        assert {channel["provenance"] for channel in energy_channels(where).values()} == {"estimated"}
        (gap,) = [gap for gap in where["absent"] if "(through the daemon)" in gap["channel"]]
        assert str(machine.socket) in gap["reason"]
        assert f"group {GROUP}" in gap["reason"]
        assert f"sudo usermod -aG {GROUP} $USER" in gap["remedy"]


@needs_root
def test_a_block_in_a_container_is_recorded_through_the_daemon_outside(
    machine: Machine, daemon: Daemon, user: None
) -> None:
    """Where processes have other numbers than the daemon's."""
    folder = machine.folder / "block"
    folder.mkdir()
    os.chown(folder, USER, USER)
    script = write_script(folder / "block.py", "import smaragdine\nwith smaragdine.record('run'): pass\n")
    inside = ["unshare", "--pid", "--fork", "--mount-proc"]
    command = [*inside, *as_user([GROUP_NUMBER]), sys.executable, str(script)]
    env = run_environment(machine)
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    channels = energy_channels(info(folder / "run"))
    assert {channel["provenance"] for channel in channels.values()} == {"measured"}
    with daemon.connect() as root:
        assert all(session.end_ns and session.pid > 2 for session in root.list())


def kill(daemon: Daemon) -> None:
    """It is gone for too long to be bridged."""
    daemon.kill()
    gone_s = time.monotonic()
    assert wait_for(lambda: time.monotonic() - gone_s > 1.2 * HOLD_S)


def restarted(machine: Machine, daemon: Daemon, run: Run) -> Daemon:
    """A daemon that is killed, and its successor at work."""
    kill(daemon)
    machine.tree.add_joules("cpu:0", 1000.0)  # nobody sees when
    successor = machine.start()
    assert wait_for(successor.ready), successor.lines()
    run.settle()
    return successor


@needs_root
def test_a_daemon_that_is_killed_leaves_a_gap_and_comes_back(user: None) -> None:
    with a_machine() as machine:
        close_counters(machine)
        with machine.daemon() as first, running(machine, [GROUP_NUMBER]) as run:
            run.use(machine, 3.0)
            second = restarted(machine, first, run)
            run.use(machine, 5.0)
            shutil.rmtree(machine.state)  # its successor knows nothing of the session
            restarted(machine, second, run)
            run.use(machine, 7.0)
            assert run.end()[0] == 0
        shown = show_json(run.recording)
        names = [mark["name"] for mark in shown["marks"] if mark["name"].startswith("daemon_")]
        assert names.count("daemon_lost") == names.count("daemon_back") == 2
        (problem,) = [problem for problem in shown["problems"] if "daemon" in problem]
        assert problem.startswith("the daemon was gone for ")
        cpu = shown["devices"]["cpu:0"]
        assert cpu["energy_j"] == pytest.approx(15.0, abs=1e-7)
        assert len(cpu["missing"]) == 2
        assert cpu["missing_s"] > 2 * HOLD_S


@needs_root
def test_a_daemon_that_is_gone_for_good_disturbs_nobody(user: None) -> None:
    with a_machine() as machine:
        close_counters(machine)
        with machine.daemon() as daemon, running(machine, [GROUP_NUMBER], exit_code=3) as run:
            run.use(machine, 3.0)
            kill(daemon)
            code, err = run.end()
        assert code == 3
        assert "the daemon has been gone for" in err
        shown = show_json(run.recording)
        assert shown["devices"]["cpu:0"]["energy_j"] == pytest.approx(3.0, abs=1e-7)
        assert shown["devices"]["cpu:0"]["missing_s"] > HOLD_S


def test_a_daemon_that_hangs_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "monitor.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        env = {"SMARAGDINE_DAEMON": str(path), "SMARAGDINE_POWERCAP_ROOT": str(tmp_path / "none")}
        done = smaragdine("run", "-o", tmp_path / "run", "--", "true", env=env)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "recorder.log").exists()
    said = info(tmp_path / "run")
    assert through_the_daemon(said) == f"the daemon at {path} does not answer: waited 1 s"
    assert {channel["provenance"] for channel in energy_channels(said).values()} == {"estimated"}


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("{tmp_path}/none", "SMARAGDINE_DAEMON={tmp_path}/none has no daemon: No such file or directory"),
        ("unix:{tmp_path}/dead", "no daemon at {tmp_path}/dead: Connection refused"),
        ("elsewhere:50051", "SMARAGDINE_DAEMON=elsewhere:50051 is not asked: only a Unix socket is sure"),
    ],
)
def test_an_address_without_a_daemon_is_named(tmp_path: Path, address: str, reason: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    env = {
        "SMARAGDINE_DAEMON": address.format(tmp_path=tmp_path),
        "SMARAGDINE_POWERCAP_ROOT": str(tmp_path / "none"),
    }
    done = smaragdine("doctor", "--json", env=env)
    assert through_the_daemon(json.loads(done.stdout)).startswith(reason.format(tmp_path=tmp_path))


def test_without_a_daemon_nothing_is_loaded_to_talk_to_it(tmp_path: Path) -> None:
    code = f"""
import os, sys
import smaragdine.recording.recorder as recorder
from smaragdine.monitor import through_daemon
through_daemon.DEFAULT_SOCKET = {str(tmp_path / "none")!r}
settings = recorder.settings_from_environment(os.environ)
machine = recorder.discover(settings, elsewhere=through_daemon.through_daemon(os.environ))
print([gap.channel for gap in machine.absent if "daemon" in gap.channel])
print(sorted({{"grpclib", "google.protobuf", "asyncio", "ssl"}} & set(sys.modules)))
"""
    env = environment({"SMARAGDINE_POWERCAP_ROOT": str(tmp_path / "none")})
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"


def test_without_daemon_and_root_limits_are_refused_in_one_line() -> None:
    words = """
from pathlib import Path
from smaragdine.errors import UserError
from smaragdine.jobs.lender import lender
try:
    with lender(print, Path("/var/nobody-may/here/journal")):
        print("lent")
except UserError as error:
    print(error)
"""
    command = [*as_user([]), sys.executable, "-c", words]
    done = subprocess.run(
        command, env=environment(), cwd="/", capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.stdout.startswith("limits cannot be set: no daemon answers, and what they were before"), (
        done.stderr
    )
    assert done.stdout.rstrip().endswith("Start smaragdine daemon as root, or run this as root")
