"""The process that alone sets limits, and brings every previous value back however its parent ends.

    python -m smaragdine.monitor.limits.keeper --journal FILE

Requests and answers are lines of JSON on stdin and stdout. What was before goes into the journal before
anything is set. When stdin ends (the parent is gone, also by SIGKILL) or at SIGTERM everything is brought
back, latest first; what a lost GPU or a reloading driver does not take is tried again every second for a
while, and stays in the journal for the next start. With an empty stdin it only does that:
`… --journal FILE </dev/null`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smaragdine.monitor.daemon.privilege import CAPABILITIES, bound
from smaragdine.monitor.limits import journal
from smaragdine.monitor.limits.setter import Brought, Setter
from smaragdine.sensors.nvml_limits import KINDS, LimitError, Setting

RETRY_S = 1.0
GIVE_UP_S = 60.0
LOCK_WAIT_S = 10.0
_LINE_BYTES = 65536
_NEEDED = frozenset({"CAP_SYS_ADMIN"})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="smaragdine.monitor.limits.keeper")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--give-up-s", type=float, default=GIVE_UP_S)
    parser.add_argument("--lock-wait-s", type=float, default=LOCK_WAIT_S)
    options = parser.parse_args(argv)
    wake = _signals()
    with contextlib.suppress(OSError):
        # The last process to be killed for memory: nobody else knows what to bring back.
        Path("/proc/self/oom_score_adj").write_text("-900")
    path: Path = options.journal
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _anybodys(path.parent):
            return _refuse(
                f"others may write to {path.parent}, and so to the limits' journal: none will be set"
            )
        lock = journal.Lock(path)
    except OSError as error:
        return _refuse(f"the limits' journal {path} cannot be made ({error.strerror}): no limit will be set")
    if not lock.take(options.lock_wait_s):
        return _refuse(f"another process holds the limits of this machine (journal {path})")
    setter = Setter(path, _note)
    setter.open()
    privilege = _drop()
    setter.start()
    _say({"ready": {"pid": os.getpid(), "privilege": privilege}})
    try:
        _serve(setter, wake)
    except Exception as error:
        _log(f"stopped by {error!r}")
    return _finish(setter, lock, options.give_up_s)


def _anybodys(folder: Path) -> bool:
    """Whether another user could put a journal of theirs there, for us to set."""
    found = folder.stat()
    return found.st_uid not in (0, os.geteuid()) or bool(found.st_mode & 0o022)


def _serve(setter: Setter, wake: int) -> None:
    """Answer until stdin or the parent ends, or a signal says so."""
    poller = select.poll()
    for fd in (0, wake, _parent()):
        if fd is not None:
            poller.register(fd, select.POLLIN)
    rest = b""
    next_try_s = 0.0
    while True:
        if setter.pending and time.monotonic() >= next_try_s:
            setter.try_again()
            next_try_s = time.monotonic() + RETRY_S
        events = poller.poll(1000 * RETRY_S if setter.pending else None)
        if any(fd != 0 for fd, _ in events):
            return
        if not events:
            continue
        data = os.read(0, _LINE_BYTES)
        *lines, rest = (rest + data).split(b"\n")
        if not data or len(rest) > _LINE_BYTES:
            return
        for line in lines:
            if not _say(_answer(setter, line)):
                return


def _answer(setter: Setter, line: bytes) -> dict[str, Any]:
    number = None
    try:
        request = json.loads(line)
        number = request["id"]
        return {"id": number, "result": _do(setter, request)}
    except LimitError as error:
        return {"id": number, "error": str(error), "code": error.code}
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        return {"id": number, "error": f"not a request: {error}", "code": "invalid"}
    except Exception as error:  # It must live on, whatever a driver throws at it.
        return {"id": number, "error": f"the limits' keeper failed: {error!r}", "code": "unavailable"}


def _do(setter: Setter, request: dict[str, Any]) -> Any:
    verb = request["do"]
    if verb == "ranges":
        return setter.ranges()
    if verb == "restore_all":
        return [_brought(brought) for brought in setter.restore_all()]
    device, kind = str(request["device"]), request["kind"]
    if kind not in KINDS:
        raise LimitError("invalid", f"no kind of limit: {kind!r}", remedy=f"Known: {', '.join(KINDS)}")
    if verb == "set":
        asked = Setting(float(request["value"]), float(request.get("low") or 0.0))
        entry = setter.set(device, kind, asked)
        return {"previous": entry.previous, "actual": entry.target}
    if verb == "restore":
        return _brought(setter.restore(device, kind))
    raise LimitError("invalid", f"no such request: {verb!r}")


def _brought(brought: Brought) -> dict[str, Any]:
    return {"state": brought.state, "now": brought.now, "line": brought.line}


def _finish(setter: Setter, lock: journal.Lock, give_up_s: float) -> int:
    """Bring everything back; whoever starts on the journal meanwhile takes over."""
    deadline_s = time.monotonic() + give_up_s
    setter.restore_all()
    while setter.pending:
        if time.monotonic() >= deadline_s:
            _log(f"given up for now: {', '.join(setter.pending_words())}; it stays in the journal")
            return 1
        setter.let_go()
        lock.let_go()
        time.sleep(RETRY_S)
        if not lock.take():
            return 0
        setter.reload()
        setter.try_again()
    return 0


def _signals() -> int:
    """A descriptor that wakes the loop at SIGTERM. A terminal's signals are its programs' business."""
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(ignored, signal.SIG_IGN)
    receive, send = os.pipe()
    os.set_blocking(send, False)
    signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return receive


def _parent() -> int | None:
    """Tells of the parent's end even where a forked child of it still holds our stdin open."""
    try:
        return os.pidfd_open(os.getppid())
    except OSError:
        return None


def _drop() -> str:
    """Keep root's user and the one capability that the driver asks for. What is left, in words."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.geteuid() != 0:
        return f"uid {os.geteuid()}: the NVIDIA driver may refuse to set limits"
    try:
        bound(_NEEDED)
    except OSError as error:
        return f"root with all its capabilities: they could not be dropped ({error.strerror})"
    effective = Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0]
    if not int(effective, 16) >> CAPABILITIES["CAP_SYS_ADMIN"] & 1:
        return "root without CAP_SYS_ADMIN: the NVIDIA driver will refuse to set limits"
    return "root, with no capability but CAP_SYS_ADMIN"


def _say(message: dict[str, Any]) -> bool:
    """One line to the parent; False when it is gone."""
    data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    while data:
        try:
            data = data[os.write(1, data) :]
        except OSError:
            return False
    return True


def _note(line: str) -> None:
    if not _say({"note": line}):
        _log(line)


def _log(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"smaragdine: limits: {line}\n".encode())


def _refuse(line: str) -> int:
    _say({"refused": line})
    return 3


if __name__ == "__main__":
    # NVML's own threads and exit handlers have nothing left to do, and could hang.
    os._exit(main())
