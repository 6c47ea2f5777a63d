"""What an operator and an attacker with an account in the group would try first."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpclib.client import Channel, UnaryStreamMethod
from grpclib.exceptions import GRPCError

from cli import TIMEOUT_S, smaragdine, wait_for
from daemon_fake import GROUP, GROUP_NUMBER, Daemon, Machine, a_machine, a_program, as_user
from smaragdine.daemon.callers import Caller, add_token
from smaragdine.daemon.lease_calls import LeaseCalls
from smaragdine.daemon.parent import Parent, run_unprivileged
from smaragdine.daemon.sessions import Session, SessionTable
from smaragdine.daemon.settings import Bounds
from smaragdine.limits.keeper_client import keeper_command
from smaragdine.monitor.client import DaemonError, connect
from smaragdine.monitor.contract import monitor_pb2 as pb
from smaragdine.monitor.contract.service import METHODS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")

ALICE, MALLORY = 61_001, 61_002
INSTALL = Path(__file__).parents[2] / "deploy" / "install.sh"
_H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_H2_PING = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678"


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with a_machine(watts={"cpu:0": 50.0}) as machine:
        yield machine


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def daemon(machine: Machine, certificate: tuple[Path, Path], port: int) -> Iterator[Daemon]:
    cert, key = map(str, certificate)
    options = ("--listen", f"127.0.0.1:{port}", "--tls-cert", cert, "--tls-key", key)
    tokens = str(machine.folder / "tokens")
    # A host by name: what looks it up must be loaded while root can still read it.
    with machine.daemon(*options, "--tokens", tokens, "--prometheus", "localhost:0") as daemon:
        yield daemon


def healthy_for(daemon: Daemon, uid: int) -> object:
    def ask() -> bool:
        with daemon.connect() as client:
            return client.health().ok

    return as_user(uid, [GROUP_NUMBER], ask)


def test_the_keeper_runs_nothing_from_the_folder_it_is_started_in(tmp_path: Path) -> None:
    """`sudo smaragdine daemon` in /tmp, where somebody has put a module."""
    here = tmp_path / "anybodys"
    here.mkdir()
    (here / "argparse.py").write_text("raise SystemExit(99)\n")
    done = subprocess.run(
        keeper_command(tmp_path / "limits" / "journal"),
        cwd=here,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, b'"ready"' in done.stdout) == (0, True)


def test_the_keeper_believes_no_journal_that_others_can_write(tmp_path: Path) -> None:
    folder = tmp_path / "limits"
    folder.mkdir()
    for mode, owner in ((0o777, 0), (0o700, MALLORY)):
        folder.chmod(mode)
        os.chown(folder, owner, -1)
        done = subprocess.run(
            keeper_command(folder / "journal"), stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        assert (done.returncode, b"others may write" in done.stdout) == (3, True)


def test_the_server_has_no_terminal_to_type_into(daemon: Daemon) -> None:
    assert os.getsid(daemon.server_pid) == daemon.server_pid


def test_the_parent_starts_only_so_many_helpers() -> None:
    def serve(_: None, parent: Parent) -> int:
        pipes: list[tuple[int, int]] = []
        try:
            for _ in range(10):
                pipes.append(parent.start("cat"))  # noqa: PERF401
        except BlockingIOError:
            return len(pipes)
        return 99

    pid = os.fork()
    if pid == 0:
        os._exit(run_unprivileged(lambda: None, serve, user="nobody", helpers={"cat": ["cat"]}))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4


def test_a_folder_with_other_things_in_it_is_not_given_away(machine: Machine, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o755)
    (precious / "passwd").write_text("")
    started = machine.start("--state", str(precious), "--socket", str(tmp_path / "socket"))
    assert started.process.wait(60) == 2
    assert "it holds what is not the daemon's, such as passwd" in started.lines()
    assert started.lines().count("\n") == 1
    assert (precious.stat().st_uid, (precious / "passwd").stat().st_uid) == (0, 0)
    assert precious.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("options", [("--group", "99999999999"), ("--user", "²")])
def test_accounts_that_cannot_be_are_one_line(tmp_path: Path, options: tuple[str, str]) -> None:
    refused = smaragdine("daemon", "--socket", tmp_path / "socket", "--no-state", "--group", GROUP, *options)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr


def test_strangers_on_the_network_take_no_users_place(daemon: Daemon, port: int) -> None:
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(Bounds().connections + 8)]
    try:
        assert healthy_for(daemon, ALICE) is True
        assert healthy_for(daemon, 0) is True
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_connection_too_many_is_one_kind_line(daemon: Daemon) -> None:
    def ask_again() -> list[str]:
        held = [socket.socket(socket.AF_UNIX) for _ in range(Bounds().connections_per_user)]
        for peer in held:
            peer.connect(str(daemon.socket))
            peer.recv(1)
        answers: list[str] = []
        for _ in range(20):
            with daemon.connect() as client, pytest.raises(DaemonError) as refused:
                client.health()
            answers.append(refused.value.status)
        return answers

    assert as_user(MALLORY, [GROUP_NUMBER], ask_again) == ["UNAVAILABLE"] * 20


def test_who_asks_and_never_reads_is_cut_off(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(daemon.socket))
        peer.sendall(_H2_PREFACE)
        peer.settimeout(TIMEOUT_S)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            peer.sendall(_H2_PING * (1 << 20))
    with daemon.connect() as client:
        assert client.health().ok


def test_one_user_cannot_have_all_readers(daemon: Daemon) -> None:
    most = Bounds().readers_per_user
    read = METHODS["Read"]

    async def refusals() -> list[str]:
        with daemon.connect() as client:
            session_id = client.start().session_id
        channels = [Channel(path=str(daemon.socket)) for _ in range(2)]
        begun, lines = 0, list[str]()

        async def follow(channel: Channel) -> None:
            nonlocal begun
            call = UnaryStreamMethod(channel, read.path, read.request, read.response)
            try:
                async with call.open() as stream:
                    await stream.send_message(pb.ReadRequest(session_id=session_id, follow=True), end=True)
                    async for _ in stream:
                        begun += 1
                        break
                    await asyncio.Event().wait()
            except GRPCError as error:
                lines.append(f"{error.status.name} {error.message}")

        tasks = [asyncio.create_task(follow(channel)) for channel in channels for _ in range(most // 2 + 1)]
        async with asyncio.timeout(TIMEOUT_S):
            while begun + len(lines) < most + 2:
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            channel.close()
        return lines

    lines = as_user(MALLORY, [GROUP_NUMBER], lambda: asyncio.run(refusals()))
    assert isinstance(lines, list)
    assert len(lines) == 2
    assert all(line.startswith(f"RESOURCE_EXHAUSTED {most} calls of {MALLORY}") for line in lines)
    # Their places are free again.
    assert wait_for(lambda: healthy_for(daemon, MALLORY) is True)


def test_a_token_that_is_taken_back_ends_what_it_reads(
    machine: Machine, daemon: Daemon, certificate: tuple[Path, Path], port: int
) -> None:
    tokens = machine.folder / "tokens"
    token = add_token(tokens, "ci", "nobody", 1, frozenset({"read"}))
    with connect(f"localhost:{port}", token, str(certificate[0])) as client, a_program(uid=65534) as program:
        batches = iter(client.read(client.start(program.pid).session_id, follow=True, every_ms=100))
        next(batches)
        tokens.write_text("# none\n")
        # Without the refusal it would end with its process, and quietly.
        end = threading.Timer(20, program.send_signal, [signal.SIGKILL])
        end.start()
        with pytest.raises(DaemonError) as refused:
            list(batches)
        end.cancel()
    assert refused.value.status == "UNAUTHENTICATED"


def test_ended_sessions_of_others_outlive_a_busy_users() -> None:
    table = SessionTable(None, Bounds(ended_sessions=4), lambda line: None)
    for number, uid in enumerate([ALICE, ALICE, *[MALLORY] * 5], 1):
        session = Session(f"{number}", 1, 1, uid, str(uid), 1, begin_ns=1, end_ns=number, end_sequence=1)
        table.sessions[session.id] = session
    assert [session.id for session in table.forget(10)] == ["3", "4", "5"]
    assert list(table.sessions) == ["1", "2", "6", "7"]


def test_root_has_a_place_when_users_have_taken_all() -> None:
    table = SessionTable(None, Bounds(sessions=1), lambda line: None)
    table.reserve(Caller("uid:61002", "mallory", MALLORY), os.getpid(), 1, "")
    table.reserve(Caller("uid:0", "root", 0), os.getpid(), 1, "")
    assert len(table.live) == 2


def test_however_many_ask_the_driver_is_asked_once() -> None:
    class SlowLeases:
        asked = 0

        async def ranges(self) -> list[object]:
            self.asked += 1
            await asyncio.sleep(0.01)
            return []

    async def describe_all(leases: SlowLeases) -> None:
        calls = LeaseCalls(leases, lambda line: None)  # type: ignore[arg-type]
        await asyncio.gather(*(calls.ranges() for _ in range(50)))

    leases = SlowLeases()
    asyncio.run(describe_all(leases))
    assert leases.asked == 1


_UNINSTALL = """
mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /etc
mkdir -p /run/systemd/system /etc/systemd/system /run/bin
printf '#!/bin/sh\\necho "$@" >>/run/told\\n' >/run/bin/systemctl; chmod +x /run/bin/systemctl
: >/run/told
echo "ExecStart=$1/bin/smaragdine daemon" >/etc/systemd/system/smaragdine.service
PATH=/run/bin:$PATH sh "$2" --prefix "$3" --uninstall >/dev/null; cat /run/told
"""


def test_uninstalling_one_stops_no_other(tmp_path: Path) -> None:
    def told(unit_of: str, uninstalled: str) -> str:
        words = ["unshare", "-m", "sh", "-c", _UNINSTALL, "sh", unit_of, str(INSTALL), uninstalled]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if "unshare" in done.stderr or "mount:" in done.stderr:
            pytest.skip("no mount namespace here")
        return done.stdout

    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    assert told(here, there) == ""
    assert told(here, here).splitlines() == ["disable --now smaragdine.service", "daemon-reload"]


def test_parts_of_a_package_are_roots_alone(daemon: Daemon) -> None:
    """They are read at other instants than the package, and together would be finer than 100 ms."""
    with daemon.connect() as root:
        assert {c.device for c in root.describe().channels} >= {"cpu:0", "cpu:0/core"}

    def seen() -> list[list[str]]:
        with daemon.connect() as member:
            started = member.start()
            (listed,) = member.list(started.session_id)
            answers = (member.describe().channels, started.channels, listed.channels)
            return [sorted({c.device for c in channels if c.quantity == "energy"}) for channels in answers]

    answers = as_user(ALICE, [GROUP_NUMBER], seen)
    assert isinstance(answers, list), answers
    assert answers == [["cpu:0", "dram:0"]] * 3
