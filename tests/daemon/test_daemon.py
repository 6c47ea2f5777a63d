"""The daemon as its clients see it: a real process on a simulated machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from cli import TIMEOUT_S, alive, smaragdine, wait_for
from daemon_fake import Daemon, Machine, a_machine, a_program
from node_client import node_command
from nvml_fake import GpuSpec, energy_j
from smaragdine.monitor.client import Client, DaemonError
from smaragdine.monitor.contract import monitor_pb2 as pb
from smaragdine.monitor.contract.service import METHODS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon is started by root")

STEP_NS = 100_000_000  # of the fake GPU's energy counter


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with a_machine(watts={"cpu:0": 50.0, "dram:0": 5.0}) as machine:
        yield machine


class Grpcio:
    """An independent client: gRPC's own library, with messages from the contract's descriptor."""

    def __init__(self, path: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{path}")

    def __enter__(self) -> Grpcio:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, name: str, **fields: object) -> object:
        method = METHODS[name]
        make = self._channel.unary_stream if method.streams else self._channel.unary_unary
        call = make(method.path, method.request.SerializeToString, method.response.FromString)
        return call(method.request(**fields), timeout=TIMEOUT_S)


def channel_number(channels: Iterable[pb.Channel], device: str, quantity: str) -> int:
    (found,) = [c.number for c in channels if (c.device, c.quantity) == (device, quantity)]
    return found


def readings(batches: Iterable[pb.ReadResponse], number: int) -> list[tuple[int, float]]:
    return [
        (t_ns, value)
        for batch in batches
        for t_ns, channel, value in zip(batch.t_ns, batch.channel, batch.value, strict=True)
        if channel == number
    ]


def unwrapped_j(values: Sequence[float], wraps_at: float) -> float:
    return sum((after - before) % wraps_at for before, after in pairwise(values))


def start_node(daemon: Daemon, pid: int) -> subprocess.Popen[str] | None:
    """The example client in Node, following a process until it ends; None where npm cannot fetch it."""
    try:
        command = node_command(f"unix:{daemon.socket}", pid, "--json", "--period-ms", "20")
    except pytest.skip.Exception:
        return None
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_clients_of_three_kinds_get_exact_energies_at_different_periods() -> None:
    """Every joule that goes into a counter between two readings is in their difference: for our client,
    gRPC's own and one in Node, at once, on one sampling loop."""
    gpu = GpuSpec(low_w=60, high_w=300, period_ms=200, duty=0.25)
    with (
        a_machine(gpus=[gpu], wrap_uj=1_000_000_000) as machine,
        machine.daemon() as daemon,
        a_program() as first,
        a_program() as second,
        a_program() as third,
        daemon.connect() as ours,
        Grpcio(daemon.socket) as theirs,
    ):
        fine = ours.start(first.pid, period_ms=4)
        coarse = theirs.call("Start", pid=second.pid, period_ms=50)
        node = start_node(daemon, third.pid)
        assert wait_for(lambda: len(ours.list()) == (3 if node else 2))
        ids = [session.session_id for session in ours.list()]
        assert (fine.period_ms, coarse.period_ms) == (4, 50)
        package = channel_number(fine.channels, "cpu:0", "energy")
        assert package == channel_number(coarse.channels, "cpu:0", "energy")

        def seen(session_id: str) -> list[float]:
            return [value for _, value in readings(ours.read(session_id), package)]

        def times(session_id: str) -> list[int]:
            return [t_ns for t_ns, _ in readings(ours.read(session_id), package)]

        def metered_j() -> list[float]:
            return [e.energy_j for s in ours.list() for e in s.energies if e.device == "cpu:0"]

        begin_ns = max(session.begin_ns for session in ours.list())
        # Two steps of the meter's 100 ms, so that nothing is shared out over the time before a session.
        assert wait_for(lambda: all(times(i)[-1:] > [begin_ns + 2 * STEP_NS] for i in ids))
        total_j = 0.0
        for joules in (3.25, 0.000001, 900.5, 333.125):  # the last one wraps round
            machine.tree.add_joules("cpu:0", joules)
            total_j += joules
            now_j = machine.tree.exact_joules("cpu:0") % 1000.0
            assert wait_for(lambda now_j=now_j: all(abs(seen(i)[-1] - now_j) < 1e-9 for i in ids))
            # The meter goes on at the last power it saw: that is 0 once two readings are the same.
            exact_j = pytest.approx([total_j] * len(ids), abs=1e-6)
            assert wait_for(lambda exact_j=exact_j: metered_j() == exact_j), (metered_j(), total_j)
        counter = channel_number(fine.channels, "gpu:0", "energy")
        # The GPU's counter is seen to change every 2 s.
        for i in ids:
            assert wait_for(lambda i=i: len(readings(ours.read(i), counter)) > 1)
        third.kill()
        if node is not None:
            out, err = node.communicate(timeout=TIMEOUT_S)
            assert node.returncode == 0, err
            rows = {row["device"]: row for row in json.loads(out)["channels"]}
            assert rows["cpu:0"]["energy_j"] == pytest.approx(total_j, abs=1e-6)
            times_ns = [int(rows["gpu:0"][key]) for key in ("first_t_ns", "last_t_ns")]
            assert rows["gpu:0"]["energy_j"] == pytest.approx(counted_j(gpu, *times_ns), abs=0.002)
        stopped = ours.stop(fine.session_id), theirs.call("Stop", session_id=coarse.session_id)
        mine = list(ours.read(fine.session_id))
        others = list(theirs.call("Read", session_id=coarse.session_id))
    assert mine[-1].ended
    assert others[-1].end_reason == "stopped"
    for batches, session in ((mine, stopped[0]), (others, stopped[1])):
        values = [value for _, value in readings(batches, package)]
        assert unwrapped_j(values, 1000.0) == pytest.approx(total_j, abs=1e-6)
        (energy,) = [e for e in session.energies if e.device == "cpu:0"]
        assert energy.energy_j == pytest.approx(total_j, abs=1e-6)
        assert energy.provenance == pb.PROVENANCE_MEASURED
    coarse_t = [t_ns for t_ns, _ in readings(others, package)]
    # The same readings, one in each cell of 50 ms.
    assert len({t_ns // 50_000_000 for t_ns in coarse_t}) == len(coarse_t)
    assert len(readings(mine, package)) > 3 * len(coarse_t)
    for batches in (mine, others):
        for (from_ns, before_j), (to_ns, after_j) in pairwise(readings(batches, counter)):
            assert after_j - before_j == pytest.approx(counted_j(gpu, from_ns, to_ns), abs=0.002)


def counted_j(gpu: GpuSpec, *times_ns: int) -> float:
    """What the GPU's counter gained between two of its steps; a reading is stamped close to one."""
    phase_ns = int(gpu.counter_phase_ms * 1e6)
    steps = ((t_ns - phase_ns + STEP_NS // 2) // STEP_NS for t_ns in times_ns)
    return energy_j(gpu, *(step * STEP_NS + phase_ns for step in steps))


def test_the_two_libraries_agree_on_everything(daemon: Daemon, client: Client) -> None:
    with Grpcio(daemon.socket) as other:
        assert other.call("Describe").channels == client.describe().channels
        assert other.call("Health").version == client.health().version


def test_a_session_ends_with_its_process(client: Client) -> None:
    with a_program() as program:
        started = client.start(program.pid, job="short.job-1")
        assert wait_for(lambda: list(client.read(started.session_id)))
        followed: list[pb.ReadResponse] = []
        reader = threading.Thread(
            target=lambda: followed.extend(client.read(started.session_id, follow=True, every_ms=100))
        )
        reader.start()
        program.kill()
        program.wait()
        reader.join(TIMEOUT_S)
    assert followed[-1].ended
    assert followed[-1].end_reason == "process ended"
    (session,) = [s for s in client.list() if s.session_id == started.session_id]
    assert session.end_ns > started.begin_ns
    assert session.job == "short.job-1"
    # What it recorded can be read again, from anywhere.
    again = list(client.read(started.session_id))
    assert [list(b.t_ns) for b in again if b.t_ns] != []
    assert sum(len(b.t_ns) for b in again) == sum(len(b.t_ns) for b in followed)
    middle = again[0].next_sequence
    rest = list(client.read(started.session_id, sequence=middle))
    assert rest[-1].ended
    assert client.stop(started.session_id).sequence == followed[-1].next_sequence


def test_the_programs_own_cpu_time_is_in_its_session_alone(client: Client) -> None:
    work = "import time\nwhile time.process_time() < 0.3: pass\ninput()"
    with (
        subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE) as busy,
        a_program() as idle,
    ):
        sessions = [client.start(process.pid, include_past=True) for process in (busy, idle)]
        numbers = [channel_number(s.channels, "cpu:0", "program") for s in sessions]
        assert numbers[0] != numbers[1]

        def used_s(which: int) -> float:
            found = readings(client.read(sessions[which].session_id), numbers[which])
            return found[-1][1] if found else 0.0

        assert wait_for(lambda: used_s(0) >= 0.3)
        assert used_s(1) < 0.1
        assert not readings(client.read(sessions[1].session_id), numbers[0])
        busy.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_reader_goes_on_over_a_restart(number: signal.Signals) -> None:
    with a_machine(watts={"cpu:0": 50.0}) as machine, a_program() as program, a_program() as ending:
        batches: list[pb.ReadResponse] = []
        with machine.daemon() as daemon:
            client = daemon.connect()
            started = client.start(program.pid)
            other = client.start(ending.pid)
            reader = threading.Thread(
                target=lambda: batches.extend(client.read(started.session_id, follow=True, every_ms=100))
            )
            reader.start()
            assert wait_for(lambda: len(batches) >= 3)
            if number == signal.SIGKILL:
                daemon.kill()
            else:
                assert daemon.stop() == 0
                assert not machine.socket.exists()
        before = len(batches)
        ending.kill()
        ending.wait()
        with machine.daemon() as daemon:
            assert wait_for(lambda: len(batches) > before + 2)
            ended = {s.session_id: s for s in client.list()}[other.session_id]
            assert ended.end_ns
            assert list(client.read(other.session_id))[-1].end_reason == "process ended"
            client.stop(started.session_id)
            reader.join(TIMEOUT_S)
            client.close()
        assert batches[-1].ended
        package = channel_number(started.channels, "cpu:0", "energy")
        times = [t_ns for t_ns, _ in readings(batches, package)]
        assert times == sorted(set(times))
        program_s = [v for _, v in readings(batches, channel_number(started.channels, "cpu:0", "program"))]
        assert program_s == sorted(program_s)
        assert "daemon_restarted" in {note.name for batch in batches for note in batch.notes}
        assert not any(batch.dropped_batches for batch in batches)


def test_a_second_daemon_is_refused_and_a_dead_ones_socket_replaced(machine: Machine, daemon: Daemon) -> None:
    second = machine.start()
    assert second.process.wait(TIMEOUT_S) == 2
    assert second.lines().count("\n") == 1
    assert "serves" in second.lines()
    assert "already" in second.lines()
    assert daemon.socket.exists()
    assert daemon.socket.stat().st_mode & 0o777 == 0o660
    with a_machine() as other:
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(str(other.socket))
        stale.close()
        with other.daemon() as fresh, fresh.connect() as client:
            assert client.health().ok


def test_the_server_has_no_privileges(daemon: Daemon) -> None:
    status = Path(f"/proc/{daemon.server_pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    assert "0" not in fields["Uid"].split()
    assert int(fields["CapPrm"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"].strip() == "1"


@pytest.mark.parametrize(
    ("name", "fields", "status"),
    [
        ("Start", {"pid": 2**31}, "NOT_FOUND"),
        ("Start", {"pid": -1}, "NOT_FOUND"),
        ("Start", {"pid": 1, "period_ms": 0.5}, "INVALID_ARGUMENT"),
        ("Start", {"pid": 1, "period_ms": float("nan")}, "INVALID_ARGUMENT"),
        ("Start", {"pid": 1, "job": "no spaces"}, "INVALID_ARGUMENT"),
        ("Start", {"pid": 1, "job": "x" * 64}, "INVALID_ARGUMENT"),
        ("Stop", {"session_id": "none"}, "NOT_FOUND"),
        ("Read", {"session_id": "\x00\n"}, "NOT_FOUND"),
        ("SetLimit", {"device": "gpu:0", "kind": 99}, "INVALID_ARGUMENT"),
        ("Release", {"lease_id": "none"}, "NOT_FOUND"),
    ],
)
def test_what_makes_no_sense_is_refused_with_one_line(
    daemon: Daemon, name: str, fields: dict[str, object], status: str
) -> None:
    with Grpcio(daemon.socket) as other, pytest.raises(grpc.RpcError) as refused:
        list(other.call(name, **fields))
    assert refused.value.code().name == status
    line = refused.value.details()
    assert line
    assert "\n" not in line
    assert "Traceback" not in line


def test_read_refuses_impossible_positions(client: Client) -> None:
    with a_program() as program:
        started = client.start(program.pid)
        with pytest.raises(DaemonError) as refused:
            list(client.read(started.session_id, sequence=2**60))
        assert refused.value.status == "INVALID_ARGUMENT"
        with pytest.raises(DaemonError) as refused:
            list(client.read(started.session_id, follow=True, every_ms=1))
        assert refused.value.status == "INVALID_ARGUMENT"
        client.stop(started.session_id)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def request_headers(path: bytes) -> bytes:
    """HPACK literals without indexing."""

    def literal(name: bytes, value: bytes) -> bytes:
        return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value

    fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"))
    more = ((b"te", b"trailers"), (b"content-type", b"application/grpc"))
    return b"".join(literal(*field) for field in (*fields, *more))


def test_a_tidy_end_tells_readers_and_leaves_nothing_behind(machine: Machine) -> None:
    with (
        a_machine() as machine,
        machine.daemon() as daemon,
        daemon.connect() as client,
        a_program() as program,
    ):
        started = client.start(program.pid)
        refused: list[str] = []

        def follow() -> None:
            try:
                for _ in client.read(started.session_id, follow=True, every_ms=100, patience_s=0.0):
                    pass
            except DaemonError as error:
                refused.append(error.status)

        reader = threading.Thread(target=follow)
        reader.start()
        assert wait_for(lambda: list(client.read(started.session_id)))
        server = daemon.server_pid
        assert daemon.stop() == 0
        reader.join(TIMEOUT_S)
        assert refused == ["UNAVAILABLE"]
        assert not alive(server)
        assert not machine.socket.exists()
        assert (machine.state / "sessions.json").exists()


def test_the_command_line(daemon: Daemon, tmp_path: Path) -> None:
    env = {"SMARAGDINE_DAEMON": str(daemon.socket)}
    with a_program() as program:
        started = smaragdine("session", "start", "--pid", str(program.pid), "--job", "by-hand", env=env)
        assert started.returncode == 0, started.stderr
        session_id = started.stdout.strip()
        listed = smaragdine("session", "list", env=env)
        assert session_id in listed.stdout
        assert "by-hand" in listed.stdout
        assert wait_for(lambda: smaragdine("session", "read", session_id, env=env).stdout.count("\n") > 20)
        lines = smaragdine("session", "read", session_id, env=env).stdout.splitlines()
        assert lines[0] == "t_ns,device,quantity,value,unit"
        assert any(",cpu:0,energy," in line for line in lines)
        assert any(",cpu:0,program," in line for line in lines)
        stopped = smaragdine("session", "stop", session_id, env=env)
        assert "cpu:0" in stopped.stdout
        again = smaragdine("session", "stop", "nothing", env=env)
        assert again.returncode == 2
        assert again.stderr.startswith("smaragdine: there is no session nothing")
        assert again.stderr.count("\n") == 1


def test_no_daemon_is_one_line(tmp_path: Path) -> None:
    done = smaragdine("session", "list", env={"SMARAGDINE_DAEMON": str(tmp_path / "none.sock")})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no daemon at" in done.stderr


def test_a_reader_that_never_reads_holds_nobody_up() -> None:
    with (
        a_machine(watts={"cpu:0": 50.0}) as machine,
        machine.daemon() as daemon,
        daemon.connect() as client,
        a_program() as program,
        socket.socket(socket.AF_UNIX) as stuck,
    ):
        started = client.start(program.pid, period_ms=1)
        request = pb.ReadRequest(session_id=started.session_id, follow=True, every_ms=100).SerializeToString()
        stuck.connect(str(daemon.socket))
        stuck.sendall(
            PREFACE
            + SETTINGS
            + frame(1, 4, 1, request_headers(METHODS["Read"].path.encode()))
            + frame(0, 1, 1, b"\x00" + struct.pack(">I", len(request)) + request)
        )
        followed: list[pb.ReadResponse] = []
        reader = threading.Thread(
            target=lambda: followed.extend(client.read(started.session_id, follow=True, every_ms=100))
        )
        reader.start()
        # Twice what a stream's window and the socket's buffers take.
        assert wait_for(lambda: sum(batch.ByteSize() for batch in followed) > 150_000)
        assert not any(batch.dropped_batches for batch in followed)
        client.stop(started.session_id)
        reader.join(TIMEOUT_S)
        assert followed[-1].ended
        assert daemon.stop() == 0


def test_who_comes_too_late_learns_how_much_is_lost() -> None:
    import asyncio
    from types import SimpleNamespace

    import numpy as np

    from smaragdine.daemon.log import Batch, Log
    from smaragdine.daemon.service import Service
    from smaragdine.daemon.sessions import Session

    log = Log(None, memory_bytes=20_000)
    for number in range(100):
        log.append(Batch(0, np.arange(10) + number, np.zeros(10, np.uint32), np.zeros(10)))
    session = Session(
        "id", 1, 1, 0, "root", 1, sequence=3, end_sequence=log.next_sequence, end_reason="stopped"
    )
    daemon = SimpleNamespace(
        log=log,
        table=SimpleNamespace(get=lambda caller, session_id: session),
        view=lambda caller, session: SimpleNamespace(see=lambda batch: batch),
        stopping=False,
        dropped_batches=0,
    )
    sent: list[bytes] = []

    async def send(message: bytes) -> None:
        sent.append(message)

    service = Service(daemon, None)  # type: ignore[arg-type]
    asyncio.run(service._read(None, pb.ReadRequest(session_id="id"), send))  # type: ignore[arg-type]
    (answer,) = [pb.ReadResponse.FromString(message) for message in sent]
    assert answer.dropped_batches == log.first - 3 > 0
    assert len(answer.t_ns) == 10 * (log.next_sequence - log.first)
    assert (answer.ended, answer.next_sequence) == (True, 101)
    assert daemon.dropped_batches == answer.dropped_batches


def test_fleet_metrics_are_served() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ("--prometheus", f"127.0.0.1:{port}")
    with (
        a_machine(watts={"cpu:0": 50.0}) as machine,
        machine.daemon(*options) as daemon,
        daemon.connect() as client,
        a_program() as program,
    ):
        client.start(program.pid, job="bert")

        def text() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
                return answer.read().decode()

        assert wait_for(lambda: 'job="bert"' in text())
        assert 'smaragdine_device_energy_joules_total{device="cpu:0"' in text()
        assert 'smaragdine_sensor_up{device="cpu:0",quantity="energy"} 1.0' in text()
