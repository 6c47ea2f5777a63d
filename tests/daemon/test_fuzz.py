"""Garbage on the daemon's socket: bytes, frames, messages and values that nobody should send.

The daemon stays, answers everybody else, and has no more sessions, leases, descriptors or memory afterwards.
All garbage comes from a process of its own: what it happened to start or to lend ends with it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from hpack import Decoder

import search
from cli import TIMEOUT_S, wait_for
from daemon_fake import Daemon, Machine, a_machine, a_program
from nvml_fake import GpuSpec, set_from_outside, settings_now
from smaragdine.monitor.client import Client, DaemonError, connect
from smaragdine.monitor.contract import monitor_pb2 as pb
from smaragdine.monitor.contract.service import METHODS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon is started by root")

BEFORE_MW = 512_000
CALLS, CONNECTIONS, FRAMES = 30_000, 4_000, 12
AT_ONCE = 90  # streams of one connection; HTTP/2 servers allow 100
GROWTH_BYTES = 32 * 2**20

# grpc-status numbers that a caller's own mistakes may have; 2 (UNKNOWN) and 13 (INTERNAL) are ours.
OK, INVALID, NOT_FOUND, DENIED, EXHAUSTED, PRECONDITION, UNAVAILABLE = 0, 3, 5, 7, 8, 9, 14
REFUSALS = {INVALID, NOT_FOUND, DENIED, EXHAUSTED, PRECONDITION}

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with a_machine(gpus=[GpuSpec()]) as machine:
        set_from_outside(Path(machine.env["FAKE_NVML"]), 0, "l", BEFORE_MW)
        yield machine


@pytest.fixture(scope="module")
def daemon(machine: Machine) -> Iterator[Daemon]:
    # Some messages are good by chance, and what they start would be recorded all the while.
    with machine.daemon("--most-sessions-per-user", "8") as daemon:
        yield daemon


def open_files(daemon: Daemon) -> int:
    """Without the log's own, of which it opens one every now and then."""
    found = Path(f"/proc/{daemon.server_pid}/fd")
    return sum(not os.readlink(found / name).endswith(".spool") for name in os.listdir(found))


@contextlib.contextmanager
def unharmed(machine: Machine, daemon: Daemon) -> Iterator[Client]:
    """The daemon is as before after the block, and somebody else's session went on in it."""
    with daemon.connect() as client, a_program() as program:
        started = client.start(program.pid)
        before, files = client.health(), open_files(daemon)
        yield client
        health = client.health()
        assert health.begin_ns == before.begin_ns
        for session in client.list():
            # By chance of some process that lives on.
            if not session.end_ns and session.session_id != started.session_id:
                client.stop(session.session_id)
        assert wait_for(lambda: client.health().sessions == before.sessions)
        assert wait_for(lambda: client.health().leases == 0)
        assert wait_for(lambda: settings_now(Path(machine.env["FAKE_NVML"])) == {(0, "l"): BEFORE_MW})
        assert wait_for(lambda: open_files(daemon) <= files), (files, open_files(daemon))
        assert health.memory_bytes < before.memory_bytes + GROWTH_BYTES
        client.stop(started.session_id)
        batches = list(client.read(started.session_id))
        assert batches[-1].ended
        assert not any(batch.dropped_batches for batch in batches)
    lines = daemon.lines()
    assert "Traceback" not in lines
    assert "failed:" not in lines
    assert "was lost" not in lines


def in_another_process(work: Callable[..., object], *arguments: object) -> object:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(work, *arguments).result()


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def hello() -> bytes:
    """A client's beginning: windows so large that no answer has to wait, and headers that need no memory."""
    large = struct.pack(">HIHI", 4, 2**31 - 1, 1, 0)
    return PREFACE + frame(SETTINGS, 0, 0, large) + frame(WINDOW, 0, 0, struct.pack(">I", 2**30))


def head(path: str) -> bytes:
    """A request's header block: HPACK literals without indexing."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    fields["content-type"] = "application/grpc"
    words = [word.encode() for field in fields.items() for word in field]
    return b"".join(
        b"\x00" + b"".join(bytes([len(word)]) + word for word in words[i : i + 2])
        for i in range(0, len(words), 2)
    )


def grpc_message(data: bytes) -> bytes:
    return b"\x00" + struct.pack(">I", len(data)) + data


@functools.cache
def status_in(block: bytes) -> int:
    return int(dict(Decoder().decode(block))["grpc-status"])


class Peer:
    """One connection that sends calls in bulk and takes their answers."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(TIMEOUT_S)
        self._sock.connect(str(path))
        self._sock.sendall(hello())
        self._stream = 1
        self._buffer = b""

    def close(self) -> None:
        self._sock.close()

    def send(self, calls: list[tuple[bytes, bytes]]) -> set[int]:
        """Header blocks and bodies; the numbers of the streams they went on."""
        streams = range(self._stream, self._stream + 2 * len(calls), 2)
        self._stream = streams.stop
        sent = bytearray()
        for stream, (block, body) in zip(streams, calls, strict=True):
            sent += frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, body)
        self._sock.sendall(sent)
        return set(streams)

    def answers(self, streams: set[int]) -> list[int]:
        """The status that each of these calls got."""
        found: list[int] = []
        waiting = set(streams)
        while waiting:
            for kind, flags, stream, body in self._frames():
                assert kind != GOAWAY
                if kind == PING and not flags:
                    self._sock.sendall(frame(PING, ACK, 0, body))
                elif kind == HEADERS and flags & END_STREAM:
                    waiting.discard(stream)
                    found.append(status_in(body))
        return found

    def _frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        data = self._sock.recv(1 << 20)
        assert data
        self._buffer += data
        at = 0
        while len(self._buffer) >= at + 9:
            end = at + 9 + int.from_bytes(self._buffer[at : at + 3], "big")
            if len(self._buffer) < end:
                break
            stream = int.from_bytes(self._buffer[at + 5 : at + 9], "big")
            yield self._buffer[at + 3], self._buffer[at + 4], stream, self._buffer[at + 9 : end]
            at = end
        self._buffer = self._buffer[at:]


def good_requests(session_id: str) -> dict[str, list[bytes]]:
    """Messages that make sense, by method."""
    power = pb.LIMIT_KIND_POWER
    found = {
        "Describe": [pb.DescribeRequest()],
        "Start": [pb.StartRequest(pid=2**22 + 1, period_ms=4, job="bert", include_past=True)],
        "Stop": [pb.StopRequest(session_id=session_id)],
        "Read": [pb.ReadRequest(session_id=session_id, sequence=1, every_ms=100)],
        "List": [pb.ListRequest()],
        "SetLimit": [
            pb.SetLimitRequest(device="gpu:0", kind=power, value=400, lease_s=30),
            pb.SetLimitRequest(device="gpu:7", kind=power, value=400, low=1, lease_id="x" * 22),
        ],
        "Release": [pb.ReleaseRequest(lease_id="x" * 22)],
        "Health": [pb.HealthRequest()],
    }
    return {name: [message.SerializeToString() for message in each] for name, each in found.items()}


def mutated(dice: random.Random, message: bytes) -> bytes:
    data = bytearray(message)
    for _ in range(dice.choice([0, 1, 1, 2, 4])):
        place = dice.randrange(len(data) + 1)
        match dice.randrange(5):
            case 0:
                data[place : place + 1] = dice.randbytes(1)
            case 1:
                del data[place : place + dice.randrange(1, 9)]
            case 2:
                data[place:place] = dice.randbytes(dice.randrange(1, 9))
            case 3:
                data[place:place] = data[: dice.randrange(len(data) + 1)]
            case _:
                data[place:place] = b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"  # the largest number there is
    return bytes(data)


def broken_call(dice: random.Random, names: list[str], requests: dict[str, list[bytes]]) -> tuple[str, bytes]:
    name = dice.choice(names)
    # Often the message of another method.
    message = mutated(dice, dice.choice(requests[dice.choice([name, dice.choice(names)])]))
    body = grpc_message(message)
    match dice.randrange(20):
        case 0:
            body = body[: dice.randrange(len(body))]  # ends too early
        case 1:
            body = bytes([dice.randrange(256)]) + body[1:]  # says it is compressed
        case 2:
            body = body[:1] + dice.randbytes(4) + body[5:]  # announces another length
        case 3:
            body += dice.randbytes(dice.randrange(1, 20))
        case _:
            pass
    return name, body


def send_broken_messages(path: Path, session_id: str, seed: int, count: int) -> dict[int, int]:
    """How often each status was the answer."""
    dice = random.Random(search.seed(seed))
    names = [*METHODS, *3 * ["Start", "Stop", "Read", "SetLimit", "Release"]]
    heads = {name: head(METHODS[name].path) for name in names}
    requests = good_requests(session_id)
    statuses: Counter[int] = Counter()
    peer = Peer(path)
    sent = 0
    while sent < count:
        calls = [broken_call(dice, names, requests) for _ in range(AT_ONCE)]
        statuses.update(peer.answers(peer.send([(heads[name], body) for name, body in calls])))
        sent += len(calls)
    peer.close()
    return dict(statuses)


def test_broken_messages_are_answered_one_by_one(machine: Machine, daemon: Daemon) -> None:
    with daemon.connect() as client, a_program() as program:
        ended = client.start(program.pid).session_id
        assert wait_for(lambda: list(client.read(ended)))
        client.stop(ended)
    # What it takes to serve at all is taken up first.
    in_another_process(send_broken_messages, daemon.socket, ended, 1, CALLS // 20)
    with unharmed(machine, daemon):
        statuses = in_another_process(send_broken_messages, daemon.socket, ended, 2, CALLS)
    assert isinstance(statuses, dict)
    assert sum(statuses.values()) >= CALLS
    assert statuses.keys() <= {OK, UNAVAILABLE, *REFUSALS}, statuses
    assert min(statuses[OK], statuses[INVALID], statuses[NOT_FOUND]) > CALLS // 100, statuses


def broken_frames(dice: random.Random) -> bytes:
    """A connection's bytes: a good beginning of `FRAMES` frames, with something wrong in it."""
    path = dice.choice([method.path for method in METHODS.values()] + ["/none", "/" + "x" * 200])
    body = grpc_message(pb.StartRequest(pid=2**22 + 1).SerializeToString())
    stream = dice.choice([1, 1, 1, 3, 2, 0, 2**31 - 1])
    frames = [
        frame(HEADERS, END_HEADERS | dice.choice([0, END_STREAM]), stream, head(path)),
        frame(DATA, dice.choice([0, END_STREAM]), stream, body),
        frame(DATA, 0, stream, b"\x00\xff\xff\xff\xff" + bytes(dice.randrange(16000))),  # 4 GB announced
        frame(PING, 0, 0, dice.randbytes(8)),
        frame(SETTINGS, 0, 0, struct.pack(">HI", dice.randrange(8), dice.choice([0, 1, 2**31, 2**32 - 1]))),
        frame(WINDOW, 0, dice.choice([0, stream]), struct.pack(">I", dice.choice([0, 1, 2**31 - 1]))),
        frame(RESET, 0, stream, struct.pack(">I", dice.randrange(20))),
        frame(
            dice.randrange(256), dice.randrange(256), dice.randrange(5), dice.randbytes(dice.randrange(60))
        ),
        frame(HEADERS, END_HEADERS, stream, dice.randbytes(dice.randrange(60))),  # no HPACK
        frame(HEADERS, 0, stream + 2, head(path)[:20]),  # to be continued, and is not
    ]
    data = bytearray(hello() + b"".join(dice.choices(frames, k=FRAMES - 2)))
    for _ in range(dice.choice([0, 0, 1, 3])):
        data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data) if dice.randrange(10) else dice.randbytes(dice.randrange(1, 2000))


def send_broken_frames(path: Path, seed: int, count: int) -> int:
    dice = random.Random(search.seed(seed))
    for _ in range(count):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(TIMEOUT_S)
            peer.connect(str(path))
            # It may hang up before it has taken everything.
            with contextlib.suppress(ConnectionError):
                peer.sendall(broken_frames(dice))
                if dice.randrange(4):
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(65536):
                        pass
    return count * FRAMES


def test_broken_frames_end_a_connection_and_nothing_else(machine: Machine, daemon: Daemon) -> None:
    in_another_process(send_broken_frames, daemon.socket, 3, CONNECTIONS // 20)
    with unharmed(machine, daemon):
        sent = in_another_process(send_broken_frames, daemon.socket, 4, CONNECTIONS)
    assert isinstance(sent, int)


HUGE = "x" * (10 * 2**20)
NUMBERS = (math.nan, math.inf, -math.inf, -1.0, 1e308, -0.5, 5e-324)


def hostile_calls(client: Client, session_id: str) -> Iterator[Callable[[], object]]:
    """Calls that a client can make and nobody should; each must be refused."""
    for pid in (-1, -(2**63), 2**22 + 1, 2**31, 2**32, 2**63 - 1):
        yield lambda pid=pid: client.start(pid)
    for number in NUMBERS:
        yield lambda number=number: client.start(period_ms=number)
        yield lambda number=number: list(client.read(session_id, every_ms=number))
        yield lambda number=number: client.set_limit("gpu:0", pb.LIMIT_KIND_POWER, number)
        if number != 5e-324:
            yield lambda number=number: client.set_limit("gpu:0", pb.LIMIT_KIND_POWER, 400.0, lease_s=number)
            yield lambda number=number: client.set_limit(
                "gpu:0", pb.LIMIT_KIND_GRAPHICS_CLOCK, 1980.0, low=number
            )
    for name in ("", "\x00", "../../etc/passwd", "gpu:-1", "gpu:99999999999999999999", "ü" * 100, HUGE):
        yield lambda name=name: client.stop(name)
        yield lambda name=name: list(client.read(name))
        yield lambda name=name: client.release(name)
        yield lambda name=name: client.set_limit(name, pb.LIMIT_KIND_POWER, 400.0)
        yield lambda name=name: client.set_limit("gpu:0", pb.LIMIT_KIND_POWER, 400.0, lease_id=name or "x")
    for job in ("a b", "a\nb", "x" * 64, "ü", "{}", '"', HUGE):
        yield lambda job=job: client.start(job=job)
    for kind in (0, 5, 99, -1, 2**31 - 1):
        yield lambda kind=kind: client.set_limit("gpu:0", kind, 400.0)
    for sequence in (2**64 - 1, 2**63, 2**40):
        yield lambda sequence=sequence: list(client.read(session_id, sequence=sequence))


def make_hostile_calls(path: Path, pid: int) -> list[tuple[str, str]]:
    """What each was answered."""
    answers: list[tuple[str, str]] = []
    with connect(str(path)) as client:
        session_id = client.start(pid).session_id
        for call in hostile_calls(client, session_id):
            try:
                answers.append(("OK", str(call())))
            except DaemonError as error:
                answers.append((error.status, str(error)))
    return answers


def test_hostile_values_are_refused_in_one_line(machine: Machine, daemon: Daemon) -> None:
    with unharmed(machine, daemon), a_program() as program:
        answers = in_another_process(make_hostile_calls, daemon.socket, program.pid)
    assert isinstance(answers, list)
    assert len(answers) > 80
    for status, line in answers:
        assert status in ("INVALID_ARGUMENT", "NOT_FOUND"), line
        assert "\n" not in line
        assert 0 < len(line) < 300
