"""What may happen to a daemon, its clients and their programs: kill -9 at random moments, a reader that never
reads, a full disk, no descriptors left.

What a reader was given, it was given once and for good: the batches of all its attempts, one after the other,
are those of a single undisturbed Read.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, StreamEnded

from cli import TIMEOUT_S, alive, children, wait_for
from daemon_fake import Daemon, Machine, a_machine, a_program
from nvml_fake import GpuSpec, set_from_outside, settings_made, settings_now
from smaragdine.errors import UserError
from smaragdine.monitor.client import Client, DaemonError, connect
from smaragdine.monitor.contract import monitor_pb2 as pb
from smaragdine.monitor.contract.service import METHODS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon is started by root")

DAEMON_ROUNDS, CLIENT_ROUNDS, PROGRAM_ROUNDS = 24, 40, 40
WRAP_J = 1000.0
PERIOD_NS = 4_000_000
LIMIT_W, BEFORE_W = 300.0, 512.0

Series = dict[int, list[tuple[int, float]]]


@contextlib.contextmanager
def our_machine() -> Iterator[Machine]:
    """A package counter that wraps often, and a GPU whose power limit somebody has set."""
    with a_machine(gpus=[GpuSpec()], wrap_uj=round(WRAP_J * 1e6)) as machine:
        set_from_outside(spec_of(machine), 0, "l", round(BEFORE_W * 1000))
        yield machine


def spec_of(machine: Machine) -> Path:
    return Path(machine.env["FAKE_NVML"])


def limit_w(machine: Machine) -> float:
    """As another process sees it."""
    return settings_now(spec_of(machine))[0, "l"] / 1000


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with our_machine() as machine:
        yield machine


def series(batches: Iterable[pb.ReadResponse]) -> Series:
    """Readings by channel, as they came."""
    found: Series = {}
    for batch in batches:
        for t_ns, channel, value in zip(batch.t_ns, batch.channel, batch.value, strict=True):
            found.setdefault(channel, []).append((t_ns, value))
    return found


def thinned(found: Series, channels: Iterable[pb.Channel]) -> Series:
    """The first reading of a counter in each period: whoever resumes in the middle of one gets a second."""
    counters = {channel.number for channel in channels if channel.kind == pb.KIND_COUNTER}
    return {
        number: [
            now
            for before, now in pairwise([(-PERIOD_NS, 0.0), *readings])
            if number not in counters or before[0] // PERIOD_NS != now[0] // PERIOD_NS
        ]
        for number, readings in found.items()
    }


def check_delivered(
    delivered: Sequence[pb.ReadResponse], full: Sequence[pb.ReadResponse], channels: Iterable[pb.Channel]
) -> None:
    """Nothing is missing, nothing came twice or differently, and times only grow."""
    got = series(delivered)
    for readings in got.values():
        assert all(before < after for (before, _), (after, _) in pairwise(readings))
    assert thinned(got, channels) == series(full)
    sequences = [batch.next_sequence for batch in delivered]
    assert sequences == sorted(set(sequences))
    assert not any(batch.dropped_batches for batch in (*delivered, *full))


def energy_channel(channels: Iterable[pb.Channel]) -> pb.Channel:
    (found,) = [c for c in channels if (c.device, c.quantity) == ("cpu:0", "energy")]
    return found


def used_j(batches: Iterable[pb.ReadResponse], number: int) -> float:
    values = [value for _, value in series(batches)[number]]
    return sum((after - before) % WRAP_J for before, after in pairwise(values))


def metered_j(client: Client, session_id: str) -> float:
    (session,) = [s for s in client.list() if s.session_id == session_id]
    return next((e.energy_j for e in session.energies if e.device == "cpu:0"), -1.0)


@dataclass
class Follower:
    """A reader that goes on whatever happens, in a thread."""

    client: Client
    session_id: str

    def __post_init__(self) -> None:
        self.batches: list[pb.ReadResponse] = []
        self.error = ""
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for batch in self.client.read(self.session_id, follow=True, every_ms=100):
                self.batches.append(batch)
        except UserError as error:
            self.error = str(error)

    def join(self) -> Sequence[pb.ReadResponse]:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        assert not self.error
        assert self.batches[-1].ended
        return self.batches


@pytest.fixture(scope="module")
def bystander(machine: Machine, daemon: Daemon) -> Iterator[None]:
    """A session that nothing happens to, while other sessions' clients and programs are killed."""
    with a_program() as program, daemon.connect() as client:
        started = client.start(program.pid, period_ms=4)
        follower = Follower(client, started.session_id)
        assert wait_for(lambda: len(follower.batches) > 3)
        yield
        machine.tree.add_joules("cpu:0", 123.456789)
        assert wait_for(lambda: metered_j(client, started.session_id) == pytest.approx(123.456789, abs=1e-6))
        client.stop(started.session_id)
        batches = follower.join()
        check_delivered(batches, list(client.read(started.session_id)), started.channels)
        assert used_j(batches, energy_channel(started.channels).number) == pytest.approx(123.456789, abs=1e-6)


def start_unless_gone(client: Client, pid: int) -> pb.StartResponse | None:
    try:
        return client.start(pid, period_ms=4)
    except DaemonError as error:
        if error.status != "NOT_FOUND":
            raise
        return None


@pytest.mark.usefixtures("bystander")
def test_kill_9_of_the_program(daemon: Daemon, client: Client) -> None:
    dice = random.Random(2)
    before = client.health().sessions
    descriptors = open_files(daemon)
    for _ in range(PROGRAM_ROUNDS):
        with a_program() as program:
            killer = threading.Timer(dice.choice([0.0, dice.uniform(0.0, 0.3)]), program.kill)
            killer.start()
            started = start_unless_gone(client, program.pid)
            follower = Follower(client, started.session_id) if started else None
            killer.join()
            if started is None or follower is None:
                continue
            batches = follower.join()
        assert batches[-1].end_reason == "process ended"
        full = list(client.read(started.session_id))
        check_delivered(batches, full, started.channels)
        # Whoever stopped somewhere goes on from there.
        upto = dice.randrange(len(batches))
        rest = client.read(started.session_id, sequence=batches[upto - 1].next_sequence if upto else 0)
        check_delivered([*batches[:upto], *rest], full, started.channels)
    assert wait_for(lambda: client.health().sessions == before)
    assert wait_for(lambda: open_files(daemon) <= descriptors)


def in_a_fork(work: Callable[[int], None]) -> tuple[int, int]:
    """A process of its own that has a pipe to us: its number, and our end."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(receive)
            work(send)
        finally:
            os._exit(0)
    os.close(send)
    return pid, receive


def tell(send: int, kind: bytes, data: bytes) -> None:
    os.write(send, kind + struct.pack("<I", len(data)) + data)


def told(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """What came through whole."""
    while len(data) >= 5 and len(data) >= 5 + (length := struct.unpack_from("<I", data, 1)[0]):
        yield data[:1], data[5 : 5 + length]
        data = data[5 + length :]


def a_client(path: Path, pid: int, send: int) -> None:
    client = connect(str(path))
    started = client.start(pid, period_ms=4)
    tell(send, b"s", started.SerializeToString())
    client.set_limit("gpu:0", pb.LIMIT_KIND_POWER, LIMIT_W)
    tell(send, b"l", b"")
    for batch in client.read(started.session_id, follow=True, every_ms=100):
        tell(send, b"b", batch.SerializeToString())


def test_kill_9_of_the_client(machine: Machine, daemon: Daemon, client: Client, bystander: None) -> None:
    dice = random.Random(3)
    assert client.health().leases == 0
    descriptors = open_files(daemon)
    made = len(settings_made(spec_of(machine)))
    with a_program() as program:
        for number in range(CLIENT_ROUNDS):
            pid, receive = in_a_fork(lambda send: a_client(daemon.socket, program.pid, send))
            data = b""
            with contextlib.closing(os.fdopen(receive, "rb", 0)) as pipe:
                # Every other one may not even have connected; the rest get to hold a limit.
                while number % 2 and not any(kind == b"l" for kind, _ in told(data)):
                    data += pipe.read(65536)
                time.sleep(dice.uniform(0.0, 0.25))
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                data += pipe.readall()
            assert wait_for(lambda: limit_w(machine) == BEFORE_W)
            heard = list(told(data))
            batches = [pb.ReadResponse.FromString(text) for kind, text in heard if kind == b"b"]
            for text in (text for kind, text in heard if kind == b"s"):
                started = pb.StartResponse.FromString(text)
                client.stop(started.session_id)
                after = batches[-1].next_sequence if batches else 0
                rest = list(client.read(started.session_id, sequence=after))
                full = list(client.read(started.session_id))
                check_delivered([*batches, *rest], full, started.channels)
            for session in client.list():
                if session.pid == program.pid and not session.end_ns:
                    client.stop(session.session_id)  # its client died before it heard of it
    assert len(settings_made(spec_of(machine))) >= made + CLIENT_ROUNDS // 2 * 2
    assert client.health().leases == 0
    assert wait_for(lambda: open_files(daemon) <= descriptors)


def open_files(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.server_pid}/fd"))


def lend(client: Client) -> pb.SetLimitResponse | None:
    """Tried again while a keeper is started for one that was killed."""
    try:
        return client.set_limit("gpu:0", pb.LIMIT_KIND_POWER, LIMIT_W)
    except DaemonError as error:
        if error.status != "UNAVAILABLE":
            raise
        return None


VICTIMS = ("server", "parent", "keeper", "all")


def kill_some(daemon: Daemon, victim: str) -> list[int]:
    """Kills processes of a daemon at once; all that it had."""
    os.kill(daemon.process.pid, signal.SIGSTOP)  # it starts no other meanwhile
    below = children(daemon.process.pid)
    server, keepers = below[:1], below[1:]
    chosen = {"server": server, "parent": [daemon.process.pid], "keeper": keepers}
    # The keeper first: it would bring back what it can between the others' ends and its own.
    for pid in chosen.get(victim, [*keepers, *server, daemon.process.pid]):
        os.kill(pid, signal.SIGKILL)
    os.kill(daemon.process.pid, signal.SIGCONT)
    return below


def test_kill_9_of_the_daemon() -> None:
    """Of its server, of the process that started it, of the one that keeps limits, or of all at once."""
    dice = random.Random(4)
    total_j = 0.0
    with (
        our_machine() as machine,
        a_program() as program,
        connect(str(machine.socket)) as client,
    ):

        def use() -> None:
            nonlocal total_j
            joules = dice.randrange(100_000_000) / 1e6
            machine.tree.add_joules("cpu:0", joules)
            total_j += joules

        daemon = machine.start()
        assert wait_for(daemon.ready)
        started = client.start(program.pid, period_ms=4)
        number = energy_channel(started.channels).number
        follower = Follower(client, started.session_id)
        assert wait_for(lambda: len(follower.batches) > 3)
        for round_number in range(DAEMON_ROUNDS):
            victim = VICTIMS[round_number % len(VICTIMS)]
            lease = wait_for(lambda: lend(client))
            assert limit_w(machine) == LIMIT_W
            use()
            time.sleep(dice.uniform(0.0, 0.3))
            below = kill_some(daemon, victim)
            use()
            if victim == "all":
                assert limit_w(machine) == LIMIT_W  # there is nobody left who could
            else:
                assert wait_for(lambda: limit_w(machine) == BEFORE_W), victim
            if victim != "keeper":
                daemon.process.wait(TIMEOUT_S)
                assert wait_for(lambda below=below: not any(map(alive, below)))
                use()
                daemon = machine.start()
                if round_number % 6 == 5:
                    time.sleep(dice.uniform(0.0, 0.8))
                    below = kill_some(daemon, "all")
                    daemon.process.wait(TIMEOUT_S)
                    assert wait_for(lambda below=below: not any(map(alive, below)))
                    daemon = machine.start()
                assert wait_for(lambda daemon=daemon: daemon.ready()), daemon.lines()
                assert wait_for(lambda: limit_w(machine) == BEFORE_W), victim
            with pytest.raises(DaemonError) as refused:
                client.release(lease.lease_id)
            assert refused.value.status == "NOT_FOUND"
            assert [s.session_id for s in client.list() if not s.end_ns] == [started.session_id]
        assert wait_for(lambda: abs(metered_j(client, started.session_id) - total_j) < 1e-6), total_j
        last_j = machine.tree.exact_joules("cpu:0") % WRAP_J
        assert wait_for(lambda: series(follower.batches)[number][-1][1] == pytest.approx(last_j, abs=1e-9))
        stopped = client.stop(started.session_id)
        batches = follower.join()
        full = list(client.read(started.session_id))
        assert daemon.stop() == 0
        assert not any("Traceback" in each.lines() for each in machine.daemons)
    check_delivered(batches, full, started.channels)
    assert used_j(batches, number) == pytest.approx(total_j, abs=1e-6)
    (energy,) = [e for e in stopped.energies if e.device == "cpu:0"]
    assert energy.energy_j == pytest.approx(total_j, abs=1e-6)
    assert sum(note.name == "daemon_restarted" for b in batches for note in b.notes) >= DAEMON_ROUNDS * 3 // 4


def test_a_reader_that_never_reads_learns_what_it_missed() -> None:
    """And the daemon keeps no more for it than for anybody: a MiB in memory, and one in files."""
    with (
        a_machine(packages=8) as machine,
        machine.daemon("--memory-mib", "1", "--spool-mib", "1") as daemon,
        a_program() as program,
        daemon.connect() as client,
        a_stuck_reader(daemon) as stuck,
    ):
        started = client.start(program.pid, period_ms=1)
        stuck.ask(started.session_id)
        follower = Follower(client, started.session_id)
        assert wait_for(lambda: len(follower.batches) > 5)
        before_bytes = client.health().memory_bytes

        def lost() -> bool:
            """Whether more batches are gone than the reader's connection can have taken up."""
            made = follower.batches[-1].next_sequence - started.sequence
            return made > client.health().kept_batches + 40

        assert wait_for(lost)
        assert client.health().memory_bytes < before_bytes + 32 * 2**20
        assert sum(path.stat().st_size for path in machine.state.glob("*.spool")) < 2 * 2**20
        client.stop(started.session_id)
        quick = follower.join()
        received = stuck.read_all()
        late = list(client.read(started.session_id))
    assert not any(batch.dropped_batches for batch in quick)
    made = quick[-1].next_sequence - started.sequence
    for batches in (received, late):
        assert batches[-1].ended
        # Each batch was delivered or is said to be lost.
        assert 0 < sum(batch.dropped_batches for batch in batches) < made
    # What is left is what the quick one has, less than all of it.
    kept = series(quick)
    for number, readings in series(late).items():
        assert kept[number][-len(readings) :] == readings
        assert len(readings) < len(kept[number])


class StuckReader:
    """A connection with one call of Read, from which nothing is taken until the end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._h2 = H2Connection(H2Configuration(client_side=True))
        self._h2.initiate_connection()

    def ask(self, session_id: str) -> None:
        request = pb.ReadRequest(session_id=session_id, follow=True, every_ms=100).SerializeToString()
        method = METHODS["Read"].path
        head = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x", "te": "trailers"}
        self._h2.send_headers(1, [*head.items(), ("content-type", "application/grpc")])
        self._h2.send_data(1, b"\x00" + struct.pack(">I", len(request)) + request, end_stream=True)
        self._sock.sendall(self._h2.data_to_send())

    def read_all(self) -> list[pb.ReadResponse]:
        data = b""
        ended = False
        while not ended:
            for event in self._h2.receive_data(self._sock.recv(65536)):
                ended = ended or isinstance(event, StreamEnded)
                if isinstance(event, DataReceived):
                    data += event.data
                    self._h2.acknowledge_received_data(event.flow_controlled_length, 1)
            self._sock.sendall(self._h2.data_to_send())
        found: list[pb.ReadResponse] = []
        while data:
            length = struct.unpack_from(">I", data, 1)[0]
            found.append(pb.ReadResponse.FromString(data[5 : 5 + length]))
            data = data[5 + length :]
        return found


@contextlib.contextmanager
def a_stuck_reader(daemon: Daemon) -> Iterator[StuckReader]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.connect(str(daemon.socket))
        yield StuckReader(sock)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system of our own can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    with open(path, "wb", 0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def notes(follower: Follower) -> set[str]:
    return {note.name for batch in follower.batches for note in batch.notes}


def test_a_full_disk_for_the_state_folder() -> None:
    """Measuring goes on from memory, readers and Health hear of it, and it heals by itself."""
    with a_machine() as machine, small_disk(machine.state), a_program() as program, a_program() as other:
        with machine.daemon() as daemon, daemon.connect() as client:
            started = client.start(program.pid, period_ms=4)
            follower = Follower(client, started.session_id)
            fill(machine.state / "somebody-elses")
            assert wait_for(lambda: not client.health().ok)
            last = len(follower.batches)
            assert wait_for(lambda: len(follower.batches) > last + 3)
            # Sessions begin and end all the same.
            client.stop(client.start(other.pid).session_id)
            (machine.state / "somebody-elses").unlink()
            assert wait_for(lambda: client.health().ok)
            assert wait_for(lambda: {"spool_lost", "spool_back"} <= notes(follower)), notes(follower)
            assert "Traceback" not in daemon.lines()
            assert daemon.lines().count("cannot be written") <= 4
            daemon.kill()
        # What was measured while nothing could be written is there after a restart.
        with machine.daemon() as daemon, daemon.connect() as client:
            assert wait_for(lambda: "daemon_restarted" in notes(follower))
            client.stop(started.session_id)
            check_delivered(follower.join(), list(client.read(started.session_id)), started.channels)


def test_hundreds_of_connections_and_no_descriptors_left() -> None:
    with (
        a_machine() as machine,
        machine.daemon(most_files=64) as daemon,
        daemon.connect() as client,
        a_program() as program,
        a_program() as other,
    ):
        started = client.start(program.pid, period_ms=4)
        follower = Follower(client, started.session_id)
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                peer = stack.enter_context(socket.socket(socket.AF_UNIX))
                peer.connect(str(daemon.socket))
            assert wait_for(lambda: "refused" in daemon.lines())
            with pytest.raises(UserError), daemon.connect() as late:
                late.health()
            # Who was there before is served, as far as it needs nothing new.
            last = len(follower.batches)
            assert wait_for(lambda: len(follower.batches) > last + 2)
            with pytest.raises(DaemonError) as refused:
                client.start(other.pid)
            assert refused.value.status == "RESOURCE_EXHAUSTED"

        def works() -> bool:
            with contextlib.suppress(UserError), daemon.connect() as fresh:
                return fresh.health().ok
            return False

        assert wait_for(works)
        client.stop(client.start(other.pid).session_id)
        client.stop(started.session_id)
        check_delivered(follower.join(), list(client.read(started.session_id)), started.channels)
        assert "Traceback" not in daemon.lines()
        assert "failed:" not in daemon.lines()
        assert daemon.lines().count("refused") <= 20
