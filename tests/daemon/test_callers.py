"""Who may do what: users and groups on the Unix socket, tokens over TLS."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from cli import TIMEOUT_S, smaragdine, wait_for
from daemon_fake import GROUP_NUMBER, Daemon, Machine, a_machine, a_program, as_user
from nvml_fake import GpuSpec
from smaragdine.daemon.callers import CredentialFile, add_token, parse_tokens
from smaragdine.daemon.settings import Bounds, Settings, parse_endpoint
from smaragdine.errors import UserError
from smaragdine.monitor.client import Client, DaemonError, connect
from smaragdine.monitor.contract import monitor_pb2 as pb

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")

ALICE, BOB = 61_001, 61_002
CONTROL_GROUP_NUMBER = 1  # Debian's `daemon`
CONTROL_GROUP = "daemon"
TICK_MS = 100


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with a_machine(watts={"cpu:0": 50.0, "dram:0": 5.0}, gpus=[GpuSpec()]) as machine:
        yield machine


@pytest.fixture(scope="module")
def daemon(machine: Machine) -> Iterator[Daemon]:
    with machine.daemon("--control-group", CONTROL_GROUP) as daemon:
        yield daemon


def call_as(daemon: Daemon, uid: int, groups: list[int], call: Callable[[Client], object]) -> object:
    def connected() -> object:
        with daemon.connect() as client:
            return call(client)

    return as_user(uid, groups, connected)


def test_without_the_group_there_is_no_connection(daemon: Daemon) -> None:
    status, line = call_as(daemon, ALICE, [], lambda client: client.health().ok)
    assert status == "PERMISSION_DENIED"
    assert "group games" in line


def test_a_socket_that_lets_everybody_in_does_not_let_everybody_do(daemon: Daemon) -> None:
    """The kernel's word on the peer counts, whatever the file's mode has become."""
    daemon.socket.chmod(0o666)
    try:
        status, line = call_as(daemon, ALICE, [], lambda client: client.describe().version)
    finally:
        daemon.socket.chmod(0o660)
    assert status == "PERMISSION_DENIED"
    assert "61001 may not use this daemon" in line


def test_members_of_the_group_record_their_own_processes_and_nobody_elses(daemon: Daemon) -> None:
    groups = [GROUP_NUMBER]
    with a_program(uid=ALICE) as hers, a_program(uid=BOB) as his:
        session_id = call_as(daemon, ALICE, groups, lambda client: client.start(hers.pid).session_id)
        assert isinstance(session_id, str)
        for pid in (his.pid, os.getpid(), 1):
            status, line = call_as(
                daemon, ALICE, groups, lambda client, pid=pid: client.start(pid).session_id
            )
            assert (status, f"process {pid} is not" in line) == ("PERMISSION_DENIED", True)
        for call in (
            lambda client: len(list(client.read(session_id))),
            lambda client: client.stop(session_id).end_ns,
        ):
            assert call_as(daemon, BOB, groups, call)[0] == "PERMISSION_DENIED"

        def listed(client: Client) -> list[str]:
            return [session.session_id for session in client.list()]

        assert call_as(daemon, BOB, groups, listed) == []
        assert call_as(daemon, ALICE, groups, listed) == [session_id]
        with daemon.connect() as root:
            assert session_id in listed(root)
            assert root.stop(session_id).end_ns
        # Stopping it again is no error, and tells the same.
        assert call_as(daemon, ALICE, groups, lambda client: client.stop(session_id).end_ns)


def test_pid_0_is_the_caller_itself(daemon: Daemon) -> None:
    def start(client: Client) -> list[int]:
        session_id = client.start().session_id
        return [s.pid for s in client.list() if s.session_id == session_id] + [os.getpid()]

    recorded, own = call_as(daemon, ALICE, [GROUP_NUMBER], start)
    assert recorded == own


def test_package_counters_come_no_finer_than_100_ms_however_one_asks(daemon: Daemon) -> None:
    """Not by a short period, not by several sessions, not by reading from every position."""

    def times(client: Client) -> dict[str, list[int]]:
        sessions = [client.start(period_ms=period_ms) for period_ms in (1, 4, 7)]
        numbers = {c.number: f"{c.device} {c.quantity}" for s in sessions for c in s.channels}
        package = next(number for number, name in numbers.items() if name == "cpu:0 energy")
        assert wait_for(
            lambda: sum(list(b.channel).count(package) for b in client.read(sessions[0].session_id)) > 8
        )
        found: dict[str, set[int]] = {}
        for session in sessions:
            last = client.stop(session.session_id).sequence
            for sequence in range(session.sequence, last):
                for batch in client.read(session.session_id, sequence=sequence):
                    for t_ns, number in zip(batch.t_ns, batch.channel, strict=True):
                        found.setdefault(numbers[number], set()).add(t_ns)
        return {name: sorted(each) for name, each in found.items()}

    found = call_as(daemon, ALICE, [GROUP_NUMBER], times)
    assert isinstance(found, dict), found
    # Parts of a package lie between its readings, and are root's alone.
    assert "cpu:0/core energy" not in found
    for name in ("cpu:0 energy", "dram:0 energy"):
        gaps = [after - before for before, after in pairwise(found[name])]
        assert min(gaps, default=TICK_MS * 10**6) >= TICK_MS * 10**6, name
    # What tells only of oneself comes as asked.
    own = [after - before for before, after in pairwise(found["cpu:0 program"])]
    assert min(own) < TICK_MS * 10**6


def test_root_gets_package_counters_as_fine_as_asked(daemon: Daemon) -> None:
    with daemon.connect() as root, a_program() as program:
        assert root.describe().finest_counter_ms == 0
        started = root.start(program.pid, period_ms=4)
        (number,) = [c.number for c in started.channels if (c.device, c.quantity) == ("cpu:0", "energy")]
        assert wait_for(
            lambda: sum(list(b.channel).count(number) for b in root.read(started.session_id)) > 30
        )
        end_ns = root.stop(started.session_id).end_ns
        count = sum(list(b.channel).count(number) for b in root.read(started.session_id))
        assert count > 2 * (end_ns - started.begin_ns) / (TICK_MS * 1e6)
    described = call_as(daemon, ALICE, [GROUP_NUMBER], lambda client: client.describe().finest_counter_ms)
    assert described == TICK_MS


def test_controlling_is_a_right_of_its_own(daemon: Daemon) -> None:
    def set_limit(client: Client) -> str:
        assert client.describe().may_control is (os.getuid() != ALICE)
        return client.set_limit("gpu:0", pb.LIMIT_KIND_POWER, 300.0).lease_id

    def may(client: Client) -> bool:
        return client.describe().may_control

    assert call_as(daemon, ALICE, [GROUP_NUMBER], may) is False
    assert call_as(daemon, BOB, [GROUP_NUMBER, CONTROL_GROUP_NUMBER], may) is True
    status, line = call_as(daemon, ALICE, [GROUP_NUMBER], set_limit)
    assert status == "PERMISSION_DENIED"
    assert "--control-group" in line


def test_a_lease_ends_with_its_process_and_cannot_be_used_by_another(daemon: Daemon) -> None:
    def current_w(client: Client) -> float:
        found = [limit for limit in client.describe().limits if limit.kind == pb.LIMIT_KIND_POWER]
        return found[0].current

    with daemon.connect() as root:
        assert wait_for(lambda: root.describe().limits)
        before_w = current_w(root)
        lease = root.set_limit("gpu:0", pb.LIMIT_KIND_POWER, 300.0)
        assert lease.previous == before_w
        assert wait_for(lambda: current_w(root) == 300.0)
        status, _ = call_as(
            daemon, BOB, [GROUP_NUMBER, CONTROL_GROUP_NUMBER], lambda c: c.release(lease.lease_id).restored
        )
        assert status == "PERMISSION_DENIED"
        status, line = call_as(
            daemon,
            BOB,
            [GROUP_NUMBER, CONTROL_GROUP_NUMBER],
            lambda c: c.set_limit("gpu:0", pb.LIMIT_KIND_POWER, 200.0).lease_id,
        )
        assert status == "FAILED_PRECONDITION"
        assert f"process {os.getpid()} of root" in line
        with pytest.raises(DaemonError) as refused:
            root.set_limit("gpu:0", pb.LIMIT_KIND_POWER, 1e6, lease_id=lease.lease_id)
        assert refused.value.status == "INVALID_ARGUMENT"
        assert "700" in str(refused.value)
        assert root.release(lease.lease_id).restored == before_w
        with pytest.raises(DaemonError) as refused:
            root.release(lease.lease_id)
        assert refused.value.status == "NOT_FOUND"
        assert wait_for(lambda: current_w(root) == before_w)
        # A process that dies without a word, as by kill -9.
        lent = call_as(
            daemon,
            BOB,
            [GROUP_NUMBER, CONTROL_GROUP_NUMBER],
            lambda c: c.set_limit("gpu:0", pb.LIMIT_KIND_POWER, 250.0).lease_id,
        )
        assert isinstance(lent, str)
        assert wait_for(lambda: root.health().leases == 0)
        assert wait_for(lambda: current_w(root) == before_w)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_limits_come_back_when_the_daemon_goes(number: signal.Signals) -> None:
    def current_w(client: Client) -> float | None:
        found = [limit.current for limit in client.describe().limits if limit.kind == pb.LIMIT_KIND_POWER]
        return found[0] if found else None

    with a_machine(gpus=[GpuSpec()]) as machine:
        with machine.daemon() as daemon, daemon.connect() as client:
            assert wait_for(lambda: current_w(client) == 700.0)
            lease = client.set_limit("gpu:0", pb.LIMIT_KIND_POWER, 300.0, lease_s=3600)
            assert wait_for(lambda: current_w(client) == 300.0)
            if number == signal.SIGKILL:
                daemon.kill()
            else:
                assert daemon.stop() == 0
        with machine.daemon() as daemon, daemon.connect() as client:
            assert wait_for(lambda: current_w(client) == 700.0)
            with pytest.raises(DaemonError) as refused:
                client.set_limit("gpu:0", pb.LIMIT_KIND_POWER, 300.0, lease_id=lease.lease_id)
            assert refused.value.status == "NOT_FOUND"


def test_one_user_cannot_take_all_sessions() -> None:
    with (
        a_machine() as machine,
        machine.daemon("--most-sessions-per-user", "3", "--most-sessions", "4") as daemon,
        daemon.connect() as root,
    ):

        def start(client: Client) -> list[str]:
            return [client.start().session_id for _ in range(4)]

        status, line = call_as(daemon, ALICE, [GROUP_NUMBER], start)
        assert (status, "3 sessions of 61001" in line) == ("RESOURCE_EXHAUSTED", True)
        # They ended with their process.
        assert wait_for(lambda: root.health().sessions == 0)
        for _ in range(3):
            root.start()
        with pytest.raises(DaemonError, match="3 sessions of root"):
            root.start()


def test_one_user_cannot_take_all_connections(daemon: Daemon) -> None:
    most = Bounds().connections_per_user

    def connections() -> list[bool]:
        peers = [socket.socket(socket.AF_UNIX) for _ in range(most + 5)]
        for peer in peers:
            peer.connect(str(daemon.socket))
        # Whoever is let in gets the settings first; the others, the end.
        return [bool(peer.recv(1)) for peer in peers]

    let_in = as_user(ALICE, [GROUP_NUMBER], connections)
    assert let_in == [True] * most + [False] * 5
    with daemon.connect() as root:
        assert root.health().ok


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_tcp_needs_tls_and_a_token(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with a_machine(watts={"cpu:0": 50.0}) as machine:
        tokens = machine.folder / "tokens"
        good = add_token(tokens, "ci", "nobody", 1, frozenset({"read"}))
        port = free_port()
        options = ("--listen", f"127.0.0.1:{port}", "--tls-cert", str(cert), "--tls-key", str(key))
        address = f"localhost:{port}"
        with machine.daemon(*options, "--tokens", str(tokens)) as daemon, a_program(uid=65534) as program:
            for token in ("", "wrong", good[:-1]):
                with connect(address, token, str(cert)) as client, pytest.raises(DaemonError) as refused:
                    client.health()
                assert refused.value.status == "UNAUTHENTICATED"
            with connect(address, good, "") as client, pytest.raises(DaemonError) as refused:
                client.health()  # nobody vouches for that certificate
            assert refused.value.status == "UNAUTHENTICATED"
            with connect(address, good, str(cert)) as client:
                assert client.health().ok
                assert client.describe().finest_counter_ms == TICK_MS
                assert client.describe().may_control is False
                started = client.start(program.pid)
                assert wait_for(lambda: [b for b in client.read(started.session_id) if b.t_ns])
                for pid in (0, os.getpid()):
                    with pytest.raises(DaemonError):
                        client.start(pid)
                # Taken back while it is in use.
                tokens.write_text("# none\n")
                with pytest.raises(DaemonError) as refused:
                    client.health()
                assert refused.value.status == "UNAUTHENTICATED"
            with socket.create_connection(("127.0.0.1", port)) as plain:
                plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
                plain.settimeout(TIMEOUT_S)
                assert b"grpc" not in plain.recv(100)
            with daemon.connect() as root:
                assert root.health().ok


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "tokens"])
def test_tcp_without_one_of_the_three_is_refused(missing: str) -> None:
    given = {name: Path("x") for name in ("tls_cert", "tls_key", "tokens") if name != missing}
    with pytest.raises(UserError, match=missing.replace("_", "-")):
        Settings(listen=("0.0.0.0", 1), **given).check()


def test_a_file_that_is_no_text_gets_no_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(bytes(range(128, 192)))
    with pytest.raises(UserError, match="is no file of tokens"):
        add_token(path, "ci", "root", 30, frozenset({"read"}))
    assert path.read_bytes() == bytes(range(128, 192))


def test_tokens_are_hashes_that_expire(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    now_s = 1_900_000_000.0
    token = add_token(path, "ci", "root", 30, frozenset({"read", "control"}))
    assert token not in path.read_text()
    assert hashlib.sha256(token.encode()).hexdigest() in path.read_text()
    (entry,), wrong = parse_tokens(path.read_text())
    assert wrong == []
    said: list[str] = []
    times = [entry.expires_s - 1]
    file = CredentialFile(path, said.append, lambda: times[-1])
    caller = file.caller(f"Bearer {token}")
    assert caller is not None
    assert (caller.may_read, caller.may_control, caller.uid) == (True, True, 0)
    assert file.caller(token) is None
    assert file.caller(f"Basic {token}") is None
    assert file.caller("Bearer ") is None
    times.append(entry.expires_s)
    assert file.caller(f"Bearer {token}") is None
    times.append(now_s if now_s < entry.expires_s else entry.expires_s - 1)
    newer = add_token(path, "ci", "root", 30, frozenset({"read"}))
    assert file.caller(f"Bearer {token}") is None
    again = file.caller(f"Bearer {newer}")
    assert again is not None
    assert again.may_control is False
    path.unlink()
    assert file.caller(f"Bearer {newer}") is None
    assert len(said) == 1


def test_a_broken_line_opens_nothing_and_is_said() -> None:
    good = "ci root 2999-01-01T00:00:00Z read " + "a" * 64
    bad = ["ci root", good.replace("read", "write"), good.replace("root", "nobody-here"), good[:-1]]
    tokens, wrong = parse_tokens("\n".join(["# a comment", "", *bad, good]))
    assert len(tokens) == 1
    assert [line.split(":")[0] for line in wrong] == [f"line {n}" for n in (3, 4, 5, 6)]


def test_a_token_is_printed_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    new = ("daemon", "--new-token", "ci", "--tokens", path)
    made = smaragdine(*new, "--days", "2", "--rights", "read,control")
    assert made.returncode == 0, made.stderr
    (entry,), _ = parse_tokens(path.read_text())
    assert entry.digest == hashlib.sha256(made.stdout.strip().encode()).digest()
    assert entry.rights == {"read", "control"}
    refused = smaragdine(*new, "--rights", "all")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_endpoints() -> None:
    assert parse_endpoint(":9402", "") == ("", 9402)
    assert parse_endpoint("[::1]:9402", "") == ("::1", 9402)
    for wrong in ("9402", "host:", "host:70000", "host:x"):
        with pytest.raises(UserError):
            parse_endpoint(wrong, "")
