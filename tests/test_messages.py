"""Messages between processes: whole, bounded, and waited for only so long."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from cli import TIMEOUT_S, wait_for
from smaragdine.messages import Child, Inbox, Outbox, encode, send
from smaragdine.system import dying_with_us, start_ticks

# --- what arrives -------------------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    fds = os.pipe()
    yield fds
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def test_messages_come_whole_however_they_are_cut(pipe: tuple[int, int]):
    receive, write = pipe
    inbox = Inbox(receive)
    wanted = [{"n": n, "text": "é\n" * n} for n in range(20)]
    found: list[dict[str, object]] = []
    data = b"".join(map(encode, wanted))
    for at in range(0, len(data), 7):
        os.write(write, data[at : at + 7])
        found += inbox.take()
    assert found == wanted
    assert not inbox.ended


def test_half_a_line_counts_for_nothing(pipe: tuple[int, int]):
    receive, write = pipe
    os.write(write, encode({"n": 1}) + b'{"n": 2}')
    os.close(write)
    inbox = Inbox(receive)
    assert list(inbox) == [{"n": 1}]
    assert inbox.ended
    assert inbox.receive() is None
    assert inbox.take() == []


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[1]", b"1", b"null", b"\xff\xfe", b"[" * 50_000, b"9" * 50_000], ids=lambda b: b[:3]
)
def test_a_line_that_is_no_message_is_an_empty_one(pipe: tuple[int, int], line: bytes):
    receive, write = pipe
    inbox = Inbox(receive)
    os.write(write, line + b"\n")
    assert inbox.take() == [{}]
    os.write(write, b"\n" + encode({"n": 1}))
    assert inbox.receive(TIMEOUT_S) == {"n": 1}
    assert inbox.printed == line.decode(errors="replace")[:300]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_too_long_is_the_end(pipe: tuple[int, int], end: bytes):
    receive, write = pipe
    inbox = Inbox(receive, longest_bytes=1000)
    os.write(write, encode({"n": 1}) + b'"' + b"x" * 1000 + end + encode({"n": 2}))
    assert list(inbox) == [{"n": 1}]
    assert inbox.ended


def test_a_long_line_is_read_in_time_that_grows_with_it_alone(pipe: tuple[int, int]):
    receive, write = pipe
    message = {"text": "x" * (8 << 20)}
    sender = threading.Thread(target=send, args=(write, message))
    sender.start()
    assert Inbox(receive).receive(TIMEOUT_S) == message
    sender.join()


def test_waits_for_a_message_only_so_long(pipe: tuple[int, int]):
    receive, write = pipe
    inbox = Inbox(receive)
    os.write(write, b'{"n":')
    begin_s = time.monotonic()
    assert inbox.receive(0.05) is None
    assert time.monotonic() - begin_s >= 0.05
    assert not inbox.ended
    os.write(write, b"1}\n")
    assert inbox.receive(TIMEOUT_S) == {"n": 1}


def test_a_reader_that_is_gone_is_no_exception(pipe: tuple[int, int]):
    receive, write = pipe
    assert send(write, {"n": 1})
    os.close(receive)
    assert not send(write, {"n": 2})


# --- a child ------------------------------------------------------------------------------------------------

ECHO = """
from smaragdine.messages import Inbox, keep_stdout_for_messages, send
answers = keep_stdout_for_messages()
print("not a message")
for message in Inbox(0):
    send(answers, {"got": message})
"""
DEAF = "import time; time.sleep(3600)"


def test_a_child_answers_until_it_is_hung_up_on():
    child = Child([sys.executable, "-c", ECHO], stderr=subprocess.DEVNULL)
    assert child.send({"n": 1})
    assert child.receive(TIMEOUT_S) == {"got": {"n": 1}}
    child.hang_up()
    assert child.receive(TIMEOUT_S) is None
    assert child.inbox.ended
    assert child.end() == 0
    assert not child.send({"n": 2})
    assert child.end() == 0


def test_a_killed_child_ends_its_inbox():
    child = Child([sys.executable, "-c", DEAF])
    os.kill(child.pid, signal.SIGKILL)
    assert child.receive(TIMEOUT_S) is None
    assert child.end() == -signal.SIGKILL


def test_a_stopped_child_is_not_waited_for_and_can_be_ended():
    child = Child([sys.executable, "-c", DEAF])
    os.kill(child.pid, signal.SIGSTOP)
    assert child.receive(0.05) is None
    assert not child.inbox.ended
    assert child.end(0.05) == -signal.SIGKILL


def test_what_a_child_printed_before_it_died_is_known():
    child = Child([sys.executable, "-c", "raise MemoryError('no more')"], stderr=subprocess.STDOUT)
    assert child.receive() is None
    assert child.inbox.printed == "MemoryError: no more"
    assert child.end() == 1


def test_a_child_that_dies_with_us_also_dies_when_we_are_killed(pipe: tuple[int, int]):
    receive, write = pipe
    pid = os.fork()
    if pid == 0:
        child = Child([sys.executable, "-c", DEAF], preexec_fn=dying_with_us())
        send(write, {"child": child.pid})
        time.sleep(3600)
        os._exit(1)
    message = Inbox(receive).receive(TIMEOUT_S)
    assert message is not None
    born = start_ticks(message["child"])
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: start_ticks(message["child"]) != born)


# --- a reader that does not read ----------------------------------------------------------------------------


@pytest.fixture
def small_pipe() -> Iterator[tuple[int, int]]:
    receive, send = os.pipe()
    fcntl.fcntl(send, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(receive, False)
    yield receive, send
    for fd in (receive, send):
        with contextlib.suppress(OSError):
            os.close(fd)


def all_unread(fd: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, 1 << 20)
    return b""


def test_who_does_not_read_misses_whole_lines(small_pipe: tuple[int, int]):
    receive, send = small_pipe
    outbox = Outbox(send)
    for n in range(100):
        outbox.offer({"feed": "x" * 1000, "n": n})
    heard = all_unread(receive)
    outbox.offer({"feed": "late"})
    heard += all_unread(receive)
    *first, last = map(json.loads, heard.splitlines())
    assert [line["n"] for line in first] == [*range(len(first))]
    assert len(first) < 10
    assert last == {"feed": "late"}


def test_a_line_longer_than_the_pipe_arrives_whole(small_pipe: tuple[int, int]):
    receive, send = small_pipe
    outbox = Outbox(send)
    outbox.offer({"feed": "x" * 10_000})
    heard = all_unread(receive)
    for _ in range(4):
        outbox.offer({"feed": "next"})
        heard += all_unread(receive)
    assert json.loads(heard.splitlines()[0]) == {"feed": "x" * 10_000}
    assert [json.loads(line) for line in heard.splitlines()[1:]] == [{"feed": "next"}] * 3


def test_what_must_be_heard_has_room_though_nobody_reads():
    receive, send = os.pipe()
    outbox = Outbox(send)
    for _ in range(1000):
        outbox.offer({"feed": "x" * 500})
    outbox.say({"done": 1}, wait_s=0.0)
    assert json.loads(os.read(receive, 1 << 20).splitlines()[-1]) == {"done": 1}
    os.close(receive)
    outbox.say({"done": 2}, wait_s=3600.0)  # gone: nothing to wait for
    os.close(send)


def test_waits_for_a_reader_only_so_long(small_pipe: tuple[int, int]):
    receive, send = small_pipe
    outbox = Outbox(send)
    outbox.say({"ready": "x" * 6000}, wait_s=0.01)
    heard = all_unread(receive)
    outbox.say({"done": 1}, wait_s=0.01)
    heard += all_unread(receive)
    assert [*map(json.loads, heard.splitlines())] == [{"ready": "x" * 6000}, {"done": 1}]
