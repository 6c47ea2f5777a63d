"""Processes: which one a number means, how one ends with its parent, and how to end one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl  # loaded now: between fork and exec nothing may be loaded


def end_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send us this signal when our parent ends, however it ends. If it has ended already, at
    once.

    A change of user undoes this, so call it after one.
    """
    _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), number)


def dying_with_us(in_child: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """For `preexec_fn`: ends the program with us, also after kill -9. Else it would run on unseen.

    `in_child` is called after that, in the child too.
    """
    parent_pid = os.getpid()

    def prepare() -> None:
        end_with_parent(parent_pid)
        in_child()

    return prepare


def readable(fds: Collection[int], timeout_s: float | None) -> set[int]:
    """The descriptors that have something to read, or have ended; none after `timeout_s` seconds."""
    # select() gives up at descriptor 1024, and our caller may leave us more.
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1e3)}


# The kernel uses numbers of processes again. A number and its start name one process; boot_id names the boot.


def boot_id() -> str:
    """Names this boot of the machine; empty where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int:
    """When a process started, in ticks since boot; with its number, this names it. 0: there is none."""
    try:
        with open(proc / str(pid) / "stat", "rb", buffering=0) as file:
            return int(file.read(1024).rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError) as error:
        if out_of_files(error):
            raise
        return 0


def out_of_files(error: BaseException) -> bool:
    """Whether we have no descriptors left, rather than that the file cannot be opened."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


GRACE_S = 10.0  # between asking a program to end and killing it
_LOOK_S = 0.02


def end(program: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """End a program that leads its process group, and then whatever is left of the group."""
    program.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(grace_s)
    program.kill()
    program.wait()
    end_rest(program.pid)


def end_rest(group: int) -> None:
    """End whatever is left of a process group whose first process has ended. It would be measured with the
    next program."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 1.0)):
        deadline_s = time.monotonic() + wait_s
        with contextlib.suppress(PermissionError):  # another user's by now
            try:
                os.killpg(group, number)
                while time.monotonic() < deadline_s:
                    time.sleep(_LOOK_S)
                    os.killpg(group, 0)
            except ProcessLookupError:
                return
