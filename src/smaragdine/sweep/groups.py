"""What a program has started and left running would be measured with the next one: it ends with its group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

GRACE_S = 10.0  # between asking a program to end and making it
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
    """End whatever is left of a process group whose first process has ended."""
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
